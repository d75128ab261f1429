"""Put faults into the code, one at a time, and check that the tests next to them fail.

    python scripts/mutants.py                      all faults; writes the stored results
    python scripts/mutants.py --package methods    the faults of tests/mutants/methods.toml
    python scripts/mutants.py --only DAC --dry     the faults with DAC in their name; writes nothing
    python scripts/mutants.py --new                the faults without a result of their present text

A fault is an entry of a TOML file in tests/mutants:

    [[fault]]
    name = "DAC ignores two_hop_relay"             # what would be wrong
    file = "src/coterie/methods/dac.py"
    old = '''text that is found exactly once in the file'''
    new = '''the faulty text'''
    tests = ["tests/unit/methods/test_dac.py"]     # files, folders or node ids of tests next to it
    survives = "why no test can notice it"         # only for a fault that is known to survive

Each worker has a copy of the project in which one file at a time is changed and restored. A fault
is noticed when a test fails, or does not end within the time limit. The exit status is 0 when at
least 95 % of the faults are noticed and each other fault has a reason, 1 when not, 2 when a fault
or its tests cannot be used.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAULTS = "tests/mutants"
STORED = "docs/reference/runs/reliability/mutants.json"
AIM = 0.95
"""The share of faults that the tests must notice."""
NOT_COPIED = {
    ".git",
    ".venv",
    "runs",
    "dist",
    "build",
    "site",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
}
"""Entries of the project's folder that no test needs."""
FAST = "not full and not slow and not gpu"
"""What `make test` runs: a fault counts as noticed when one of these tests notices it."""
PYTEST = (
    "-m",
    FAST,
    "-x",
    "-q",
    "-n0",
    "-p",
    "no:cacheprovider",
    "--no-header",
    "--tb=no",
    "-rfE",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
STOPPED = threading.Event()
"""Set when the work ends early; nothing is started any more."""
RUNNING: set[BaseProcess] = set()
LOCK = threading.Lock()
SERVER = multiprocessing.get_context("forkserver")
WARM = (
    "torch", "torch.func", "numpy", "pandas", "pyarrow.parquet", "scipy.stats", "scipy.sparse.csgraph",
    "sklearn.cluster", "sklearn.metrics", "sklearn.datasets", "safetensors.torch", "pytest", "beartype", "jaxtyping",
    "hypothesis", "typer", "rich", "PIL.Image",
)  # fmt: skip
"""Packages that most tests need. They are loaded once: each process of tests is a fork of one that has them."""


class Unusable(Exception):
    """A fault, or the tests of it, cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Fault:
    """A change that makes the code wrong; see the module for the entries of its file."""

    package: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str | None = None

    @property
    def digest(self) -> str:
        """What its result depends on besides the code: a result of another text is out of date."""
        return hashlib.sha256(
            "\0".join((self.file, self.old, self.new, *self.tests)).encode()
        ).hexdigest()[:16]

    def applied(self, root: Path) -> str:
        """Return the text of its file with the fault.

        Raises:
            Unusable: when the text to replace is not there exactly once.
        """
        path = root / self.file
        text = path.read_text("utf-8") if path.is_file() else ""
        found = text.count(self.old)
        if found != 1:
            raise Unusable(
                f"stale fault: {self.name!r} of {FAULTS}/{self.package}.toml: `old` is found {found} times in "
                f"{self.file}, expected once; bring it up to date with the code"
            )
        return text.replace(self.old, self.new)


def load(root: Path = ROOT) -> list[Fault]:
    """Return all faults.

    Raises:
        Unusable: when an entry lacks a key or has an unknown one, or a name is there twice.
    """
    needed, faults = {"name", "file", "old", "new", "tests"}, []
    for path in sorted((root / FAULTS).glob("*.toml")):
        try:
            content = tomllib.loads(path.read_text("utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise Unusable(f"{path}: {error}") from error
        for entry in content.get("fault", ()):
            if wrong := sorted((needed - entry.keys()) | (entry.keys() - needed - {"survives"})):
                raise Unusable(
                    f"{path}: {entry.get('name', 'a fault')!r}: check the key {wrong[0]!r}"
                )
            faults.append(Fault(path.stem, **{**entry, "tests": tuple(entry["tests"])}))
    names = [fault.name for fault in faults]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Unusable(f"two faults are named {twice[0]!r}; names identify results")
    return faults


def copied(root: Path, folder: Path) -> Path:
    """Copy what tests need of a project into a folder; the data folder next to it is linked."""

    def left_out(directory: str, names: list[str]) -> Iterable[str]:
        top = NOT_COPIED if Path(directory) == root else set()
        return {name for name in names if name in top or name == "__pycache__"}

    copy = folder / root.name
    shutil.copytree(root, copy, ignore=left_out, symlinks=True)
    beside = root.parent / "shared"
    if beside.is_dir() and not (folder / "shared").exists():
        (folder / "shared").symlink_to(beside)
    return copy


def pytest(copy: Path, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run tests in a copy; return pytest's exit status, None when it was stopped at the limit, and what it wrote."""
    with tempfile.NamedTemporaryFile("r", suffix=".txt", errors="replace") as output:
        with LOCK:
            if STOPPED.is_set():
                raise KeyboardInterrupt
            SERVER.set_forkserver_preload(list(WARM))
            process = SERVER.Process(target=_pytest, args=(copy, tuple(tests), output.name))
            process.start()
            RUNNING.add(process)
        try:
            process.join(limit)
            return process.exitcode, output.read() if process.exitcode is not None else ""
        finally:
            end(process)
            with LOCK:
                RUNNING.discard(process)


def _pytest(copy: Path, tests: Sequence[str], output: str) -> None:
    """Run tests in this process, which has the warm packages and nothing of the project, and end it."""
    os.setsid()
    handle = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.chdir(copy)
    os.environ |= {
        "PYTHONPATH": str(copy / "src"),
        # of two versions of a file within a second, one would be taken for the other
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy / "src"))
    import pytest

    status = pytest.main([*PYTEST, *tests])
    sys.stdout.flush()
    os._exit(int(status))


def end(process: BaseProcess) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.kill()
    process.join()


def stop() -> None:
    """End all tests that run and start no more."""
    with LOCK:
        STOPPED.set()
        for process in RUNNING:
            end(process)


def first_failure(output: str) -> str:
    """Return the test that failed, from what pytest wrote; empty when it names none."""
    lines = [
        line.split(maxsplit=2)
        for line in output.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return lines[0][1] if lines else ""


def tried(fault: Fault, copy: Path, limit: float) -> dict[str, Any]:
    """Run the tests of a fault in a copy that has it, put the copy right again, and return the result."""
    path = copy / fault.file
    right, begin = path.read_text("utf-8"), time.monotonic()
    path.write_text(fault.applied(copy), encoding="utf-8")
    try:
        status, output = pytest(copy, fault.tests, limit)
    finally:
        path.write_text(right, encoding="utf-8")
    if status in (4, 5):
        raise Unusable(
            f"{fault.name!r}: pytest cannot run {' '.join(fault.tests)}: {output.strip().splitlines()[-1]}"
        )
    outcome = "timed out" if status is None else "survived" if status == 0 else "noticed"
    by = (first_failure(output) or f"exit status {status}") if outcome == "noticed" else ""
    return {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - begin, 1)}


def everything(
    faults: Sequence[Fault], root: Path, workers: int, limit: float, *, room: float = 0.0
) -> dict[str, dict[str, Any]]:
    """Try all faults and return the result of each by its name.

    Args:
        faults: the faults.
        root: the project.
        workers: tests run at once.
        limit: seconds for the tests of a fault.
        room: how many times the seconds of all tests on the code as it is the limit must be, so
            that tests which are merely slow do not count as stopped by a fault.

    Raises:
        Unusable: when a fault is stale, a related test fails on the code as it is, or the limit is
            too short.
    """
    STOPPED.clear()
    for fault in faults:
        fault.applied(root)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="coterie-mutants-") as folder:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(workers):
            copies.put(copied(root, Path(folder, str(number))))

        def attempt(fault: Fault) -> dict[str, Any]:
            copy = copies.get()
            try:
                return tried(fault, copy, limit)
            finally:
                copies.put(copy)

        pool = ThreadPoolExecutor(workers)
        try:
            tests = sorted({test for fault in faults for test in fault.tests})
            print(
                f"the code as it is: {len(tests)} related files and tests",
                file=sys.stderr,
                flush=True,
            )
            copy, began = copies.get(), time.monotonic()
            status, output = pytest(copy, tests, max(limit, 60.0 * len(tests)))
            copies.put(copy)
            took = time.monotonic() - began
            if status != 0:
                failed = first_failure(output) or "\n".join(output.strip().splitlines()[-3:])
                raise Unusable(f"a related test fails without any fault; mend it first: {failed}")
            if limit < room * took:
                raise Unusable(
                    f"--limit is {limit:.0f}; the tests take {took:.0f} s without any fault, so "
                    f"expected {room * took:.0f} or more: else one that is slow counts as noticed"
                )
            waiting = {pool.submit(attempt, fault): fault for fault in faults}
            for done, future in enumerate(as_completed(waiting), start=1):
                fault, result = waiting[future], future.result()
                results[fault.name] = result
                by = f" ({result['by']})" if result["by"] else ""
                line = f"{done}/{len(faults)} {result['outcome']} {result['seconds']} s {fault.package}: {fault.name}"
                print(line + by, file=sys.stderr, flush=True)
        except BaseException:
            stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return results


def commit(root: Path) -> str | None:
    """Return the commit of a project, with "+" where other files than results differ from it; None without one."""

    def git(*words: str) -> str | None:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return head and head + (
        "+" if git("status", "--porcelain", "--", ".", ":!docs/reference/runs") else ""
    )


def rate(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of faults that were not survived; 1 of none."""
    return sum(row["outcome"] != "survived" for row in rows) / len(rows) if rows else 1.0


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Count outcomes by package, and of all."""
    packages = sorted({row["package"] for row in rows})
    parts = {name: [row for row in rows if row["package"] == name] for name in packages} | {
        "all": list(rows)
    }
    return {
        name: {
            "faults": len(part),
            **{
                kind: sum(row["outcome"] == kind for row in part)
                for kind in ("noticed", "timed out", "survived")
            },
            "kill_rate": round(rate(part), 4),
        }
        for name, part in parts.items()
    }


def merged(
    faults: Sequence[Fault],
    results: Mapping[str, Mapping[str, Any]],
    stored: Sequence[Mapping[str, Any]],
    at: str | None,
) -> list[dict[str, Any]]:
    """Return a row for each fault that has a result, new or stored; rows of faults that are gone are dropped."""
    before, rows = {row["name"]: row for row in stored}, []
    for fault in faults:
        head = {
            "package": fault.package,
            "name": fault.name,
            "file": fault.file,
            "digest": fault.digest,
        }
        why = {"survives": fault.survives} if fault.survives else {}
        if fault.name in results:
            rows.append({**head, **results[fault.name], "commit": at, **why})
        elif before.get(fault.name, {}).get("digest") == fault.digest:
            rows.append({**before[fault.name], **head, **why})
    return rows


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """Return the stored results; none where nothing is stored."""
    return json.loads(path.read_text("utf-8"))["results"] if path.exists() else []


def keep(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the results below the head of all stored results; the settings are those of a run of all faults."""
    from coterie._util.origin import describe_machine, write_results

    parts = {Path(row["file"]).parts for row in rows}  # src, coterie, the package
    speaks_of = sorted({one[2] if len(one) > 2 else "/".join(one) for one in parts})
    write_results(
        path,
        rows,
        speaks_of,
        {"faults": len(rows)},
        seeds=(),
        where=describe_machine("pytest"),
        totals=totals(rows),
    )


def unexplained(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each fault that survived without a reason, or was noticed against its reason."""
    out = []
    for row in rows:
        if row["outcome"] == "survived" and not row.get("survives"):
            out.append(
                f"survived: {row['package']}: {row['name']}: write a test that notices it, or `survives`"
            )
        elif row["outcome"] != "survived" and row.get("survives"):
            out.append(f"noticed after all: {row['package']}: {row['name']}: take `survives` away")
    return out


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", help="only the faults of tests/mutants/PACKAGE.toml")
    parser.add_argument(
        "--only", metavar="TEXT", help="only faults whose name contains TEXT, in any case"
    )
    parser.add_argument(
        "--new",
        action="store_true",
        help="only faults without a stored result of their present text",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="tests run at once (default: cores)",
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds for the tests of a fault (default: 300)"
    )
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--out", type=Path, help=f"where results are kept (default: {STORED})")
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        help="the project (default: the one that this script is in)",
    )
    found = parser.parse_args(words)
    if found.workers < 1:
        parser.error(f"--workers is {found.workers}; expected at least 1")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run the faults that were asked for, say what survived and store the results; return the exit status."""
    arguments = parsed(words)
    root = arguments.root.resolve()
    path = arguments.out or root / STORED
    try:
        faults, stored = load(root), stored_rows(path)
        known = {(row["name"], row["digest"]) for row in stored}
        chosen = [
            fault
            for fault in faults
            if arguments.package in (None, fault.package)
            and (arguments.only or "").lower() in fault.name.lower()
            and not (arguments.new and (fault.name, fault.digest) in known)
        ]
        if not chosen and not arguments.new:
            raise Unusable(f"no fault fits; there are {len(faults)} in {root / FAULTS}")
        at = commit(root)
        results = everything(chosen, root, arguments.workers, arguments.limit) if chosen else {}
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    rows = merged(faults, results, stored, at)
    if not arguments.dry:
        keep(path, rows)
    here = [row for row in rows if row["name"] in results]
    share = rate(here)
    print(f"{share:.1%} of {len(here)} faults were noticed", file=sys.stderr)
    complaints = unexplained(here)
    print(*complaints, sep="\n", end="\n" if complaints else "", file=sys.stderr)
    return int(bool(complaints) or share < AIM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
