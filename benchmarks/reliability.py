"""Damage, kill and starve runs, and see what comes of it: the right bytes, one clear line, or something worse.

    python benchmarks/reliability.py corruptions --number 1000
    python benchmarks/reliability.py kills --number 200
    python benchmarks/reliability.py plans --number 200
    python benchmarks/reliability.py faults --number 200

Each experiment runs a small study, of DAC and FedAvg, to its end or until it is stopped; then it
reads what is left, or goes on with it. Everything is drawn from `--seed`. The results are kept in
docs/reference/runs/reliability, from which scripts/reliability.py writes the page.
"""

import argparse
import collections
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from coterie._util import manifest
from coterie._util.origin import write_results
from coterie.data.federation import Federation
from coterie.errors import CoterieError
from coterie.methods.dac import Dac
from coterie.methods.fedavg import FedAvg
from coterie.papers.compare import compare_each_two, compare_in_pairs, load_result, to_json
from coterie.results import stored_runs
from coterie.runtime import checkpoint
from coterie.runtime.settings import Settings
from coterie.simulation.run import FilesSaved
from coterie.simulation.workers import fan_out
from coterie.studies.definition import StudyConfig, make_study
from coterie.studies.run import load_study_results, run_study
from coterie.studies.sweep import run_sweep
from coterie.studies.tune import tune_study, write_result
from coterie.testing import tiny_federation

STORED = Path(__file__).resolve().parents[1] / "docs/reference/runs/reliability"
SPEAKS_OF = ("_util", "simulation", "studies", "results", "methods/dac.py", "methods/fedavg.py")
NAME = "small"
KINDS = ("flip", "truncate", "swap", "missing")
ERRNOS = {"full disk": errno.ENOSPC, "read-only": errno.EROFS, "failing disk": errno.EIO}
_OWN = str(Path(manifest.__file__).parents[1])
_CALLS_TO_FILES = frozenset(
    {"replace", "rename", "fsync", "mkstemp", "open", "write", "serialize_file", "write_table"}
)
_TIMES = ("timing", "engine", "check")  # the check at the start has its seconds


class _Stop(Exception):
    """Ends the study that is left half done."""


def make(name: str = NAME, seeds: Sequence[int] = (0,), rounds: int = 5) -> StudyConfig:
    """Return a study; every round of it is followed by a checkpoint."""
    return make_study(
        {"DAC": Dac(num_peers=2), "FedAvg": FedAvg()}, name=name, seeds=seeds, model="linear",
        settings=Settings(rounds=rounds, checkpoint_seconds=0),
    )  # fmt: skip


def make_data(seed: int) -> Federation:
    """Return the data of a seed."""
    return tiny_federation(seed=seed)


def run(
    out: Path, observer: Callable[[Any], None] | None = None, *, seeds: Sequence[int] = (0,)
) -> None:
    """Run the study, or go on with it, in a folder."""
    run_study(make(seeds=seeds), out=out, resume=True, federation=make_data, observer=observer)


def prepared(folder: Path) -> tuple[Path, Path]:
    """Return the folder of the finished study, and of one that was left in round 3 of its second run."""
    finished, half = folder / "finished", folder / "half"
    seen = 0

    def stop(_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 9:
            raise _Stop

    run(finished, seeds=(0, 1))
    with contextlib.suppress(_Stop):
        run(half, stop, seeds=(0, 1))
    return finished, half


def results(out: Path) -> dict[str, Any]:
    """Return what a study leaves, by file: bytes, and the content of JSON files without times.

    A checkpoint before the last is left out: a run that went on may have skipped it.
    """
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if (
            path.is_dir()
            or path.name.startswith(".")
            or path.name in (manifest.FILE, "checkpoint-before.safetensors")
        ):
            continue
        if path.suffix == ".json":
            content = json.loads(path.read_text("utf-8"))
            if isinstance(content, dict):
                content = {key: value for key, value in content.items() if key not in _TIMES}
            found[name] = content
        else:
            found[name] = path.read_bytes()
    return found


def went_on(out: Path, seeds: Sequence[int] = (0,)) -> dict[str, Any]:
    """Go on with a study to its end, and return what it leaves."""
    run(out, seeds=seeds)
    return results(out)


def outcome(action: Callable[[], Any], expected: Any) -> tuple[str, str]:
    """Do something and return what came of it, and what was said.

    Args:
        action: returns what to compare.
        expected: what it should return.

    Returns:
        "right", "right, and said" (with a note), "refused" (one line), "WRONG", or "RAW ERROR" (no
        clear line).
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = action()
        except CoterieError as error:
            return ("refused" if "\n" not in str(error) else "RAW ERROR"), str(error)
        except Exception:
            return "RAW ERROR", traceback.format_exc()
    notes = "; ".join(str(one.message) for one in said)
    if found != expected:
        return "WRONG", notes
    return ("right, and said" if notes else "right"), notes


# ---------------------------------------------------------------- damage to files


def damage(out: Path, kind: str, stream: random.Random) -> str:
    """Damage a study's folder, and return what was done."""
    files = sorted(
        path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")
    )
    path = stream.choice([one for one in files if one.stat().st_size])
    name, data = path.relative_to(out).as_posix(), bytearray(path.read_bytes())
    if kind == "flip":
        for place in [stream.randrange(8 * len(data)) for _ in range(stream.randint(1, 4))]:
            data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
    elif kind == "truncate":
        path.write_bytes(data[: stream.randrange(len(data))])
    elif kind == "missing":
        path.unlink()
    else:
        other = stream.choice(
            [one for one in files if one.suffix == path.suffix and one != path] or [path]
        )
        theirs = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(theirs)
        return f"swap {name} {other.relative_to(out).as_posix()}"
    return f"{kind} {name}"


def read(out: Path) -> tuple[Any, bool]:
    """Return the results of a study as `coterie show` reads them, and whether runs are named that could not be read."""
    found = load_study_results(out / NAME)
    return found.summary["rows"], bool(stored_runs.load_runs([out / NAME])[1])


def corruptions(number: int, seed: int) -> list[dict[str, Any]]:
    """Damage one file of a study at a time, then read the study, or go on with it."""
    stream, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        finished, half = prepared(Path(name))
        right, shown = results(finished), {out: read(out) for out in (finished, half)}
        for index in range(number):
            source, act = stream.choice((finished, half)), stream.choice(("read", "go on"))
            kind, copy = KINDS[index % len(KINDS)], Path(name) / "copy"
            shutil.copytree(source, copy)
            what = damage(copy, kind, stream)
            if act == "read":
                found, said = _read(copy, shown[source])
            else:
                gone = copy / what.removeprefix("missing ")
                # A finished run needs no checkpoint; its models are written again.
                unmissed = gone.name == checkpoint.FILE and checkpoint.is_done(gone.parent)
                kept = {
                    name: content
                    for name, content in right.items()
                    if not unmissed or copy / name != gone
                }
                found, said = outcome(partial(went_on, copy, (0, 1)), kept)
            rows.append(
                {"folder": source.name, "kind": kind, "what": what, "then": act, "outcome": found}
            )
            if found.isupper():
                rows[-1]["said"] = said
            shutil.rmtree(copy)
    return rows


def _read(out: Path, expected: tuple[Any, bool]) -> tuple[str, str]:
    found, said = outcome(lambda: read(out), expected)
    if found == "WRONG" and read(out)[1]:  # other numbers, and the runs that lack are named
        return "right, and said", said
    return found, said


# ---------------------------------------------------------------- kills and faults within rounds


class Moments:
    """Calls of functions within the package, counted: the moments at which a run can be stopped.

    Args:
        act: what to do at a moment, with its number and whether files are being written; see
            `kills`, `faults`.
        files: count calls that change files only.
    """

    def __init__(self, act: Callable[[int, bool], None], *, files: bool = False) -> None:
        self.count, self._act, self._files, self._writing = 0, act, files, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Receive a call from `sys.setprofile`."""
        own = frame.f_code.co_filename.startswith(_OWN)
        if (
            own
            and frame.f_code.co_name == manifest.replace_files.__name__
            and event in ("call", "return")
        ):
            self._writing += 1 if event == "call" else -1
        name = getattr(arg, "__name__", "") if event == "c_call" else ""
        counts = (name in _CALLS_TO_FILES) if self._files else (own and event in ("call", "c_call"))
        if counts:
            self.count += 1
            self._act(self.count, self._writing > 0)


@contextlib.contextmanager
def stopped_by(moments: Moments) -> Iterator[None]:
    """Count the moments of a block."""
    sys.setprofile(moments)
    try:
        yield
    finally:
        sys.setprofile(None)


def in_child(action: Callable[[], None]) -> int:
    """Do something in a copy of this process, and return its wait status."""
    child = os.fork()
    if not child:
        status = 1
        try:
            action()
            status = 0
        except CoterieError as error:
            status = 0 if "\n" not in str(error) else 3
        except OSError as error:  # the command line prints it in one line
            status = 0 if error.strerror else 3
        except MemoryError:  # here as well
            status = 0
        except BaseException:  # a copy of this process must end here
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def moments_of(
    out: Path, *, files: bool = False, action: Callable[[Path], None] = run
) -> list[bool]:
    """Return for each moment of an action, such as the whole study, whether files are being written."""
    found: list[bool] = []
    with stopped_by(Moments(lambda _, writing: found.append(writing), files=files)):
        action(out)
    return found


def kills(number: int, seed: int) -> list[dict[str, Any]]:
    """Kill a study with SIGKILL at random moments, half of them while files are written; then go on to the end."""
    stream, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        run(Path(name) / "right")
        right = results(Path(name) / "right")
        moments = moments_of(Path(name) / "counted")
        groups = [
            [place for place, one in enumerate(moments, 1) if one is writing]
            for writing in (False, True)
        ]
        for index in range(number):
            place, out = stream.choice(groups[index % 2]), Path(name) / "copy"
            status = in_child(partial(_killed_at, place, out))
            whole = all(
                not manifest.describe_fault(path.parent, path.name) for path in _listed(out)
            )
            found, said = outcome(partial(went_on, out), right)
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            rows.append(
                {"moment": place, "of": len(moments), "writing": bool(index % 2), "killed": killed}
            )
            rows[-1] |= {"whole": whole, "outcome": found, **({"said": said} if said else {})}
            shutil.rmtree(out, ignore_errors=True)
    return rows


def _killed_at(place: int, out: Path, action: Callable[[Path], None] = run) -> None:
    def act(count: int, _: bool) -> None:
        if count == place:
            os.kill(os.getpid(), signal.SIGKILL)

    with stopped_by(Moments(act)):
        action(out)


class Watched:
    """`fan_out` in this process.

    Attributes:
        trained: the folders of the runs that were begun or gone on with.
    """

    far = False

    def __init__(self) -> None:
        self.trained: set[Path] = set()

    def __call__(self, work: Any, jobs: Any, workers: int, emit: Any) -> Iterator[tuple[Any, Any]]:
        """Do the jobs, and note the folder of each."""

        def note(message: object) -> None:
            if isinstance(message, FilesSaved):
                self.trained.add(message.folder)

        return fan_out(work, jobs, 1, note)


def _run_another(out: Path, over: Watched | None = None) -> None:
    """Run a study that has two of its four runs in common with one that is there."""
    run_study(make("another", (0, 1)), out=out, federation=make_data, over=over)


def _run_sweep(out: Path, over: Watched | None = None) -> None:
    study = replace(make("swept", rounds=2), sweep={"data.train": [8, 16]})
    run_sweep(study, out=out, federation=make_data, over=over)


def _tune(out: Path, over: Watched | None = None) -> None:
    """Tune, and write what was chosen."""
    found = tune_study(
        make("tuned", rounds=2), {"lr": [0.01, 0.02]}, widenings=0, out=out, over=over,
        federation=make_data,
    )  # fmt: skip
    write_result(found, out)


def _compare(out: Path, over: Watched | None = None) -> None:
    """Compare two studies that are there, and write what was found."""
    found = [load_result(out / name) for name in (NAME, "longer")]
    pairs = [to_json(one) for one in (*compare_in_pairs(found), *compare_each_two(found))]
    (out / "compared.json").write_text(json.dumps({"pairs": pairs}))


PLANS: dict[str, Callable[..., None]] = {
    "run": _run_another,
    "sweep": _run_sweep,
    "tune": _tune,
    "compare": _compare,
}


def plans(number: int, seed: int) -> list[dict[str, Any]]:
    """Kill run, sweep, tune and compare at random moments, then give the same command again.

    A run that was finished when the process died must not be trained again.
    """
    stream, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        before, out = Path(name) / "before", Path(name) / "copy"
        run(before)
        run_study(make("longer", rounds=6), out=before, federation=make_data)
        right, groups = {}, {}
        for kind, action in PLANS.items():
            action(Path(shutil.copytree(before, out)))
            right[kind] = results(out)
            shutil.rmtree(out)
            moments = moments_of(Path(shutil.copytree(before, out)), action=action)
            shutil.rmtree(out)
            groups[kind] = [
                [place for place, one in enumerate(moments, 1) if one is writing]
                for writing in (False, True)
            ]
        for index in range(number):
            kind = [*PLANS][index % len(PLANS)]
            # Half of them while files are written; a comparison writes none in this way.
            writing = bool(groups[kind][1]) and bool(index // len(PLANS) % 2)
            place = stream.choice(groups[kind][writing])
            shutil.copytree(before, out)
            status = in_child(partial(_killed_at, place, out, PLANS[kind]))
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            finished = {path.parent for path in out.rglob(checkpoint.PROVENANCE)}
            finished = {path for path in finished if checkpoint.is_finished(path)}
            over = Watched()
            found, said = outcome(partial(_went_on, PLANS[kind], out, over), right[kind])
            row = {"kind": kind, "moment": place, "of": sum(map(len, groups[kind]))}
            row |= {"writing": writing, "killed": killed, "finished": len(finished)}
            row |= {"twice": len(finished & over.trained), "outcome": found}
            rows.append(row | ({"said": said} if said else {}))
            shutil.rmtree(out)
    return rows


def _went_on(action: Callable[..., None], out: Path, over: Watched) -> dict[str, Any]:
    """Give the command again, and return what it leaves."""
    action(out, over)
    return results(out)


def _listed(out: Path) -> Iterator[Path]:
    """The files of a study that a manifest should list."""
    for path in out.rglob("*"):
        if path.is_file() and not path.name.startswith(".") and path.name != manifest.FILE:
            yield path


def faults(number: int, seed: int) -> list[dict[str, Any]]:
    """Let the system refuse one call that changes files, or memory end within a round; then go on to the end."""
    stream, rows = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        run(Path(name) / "right")
        right = results(Path(name) / "right")
        calls = len(moments_of(Path(name) / "files", files=True))
        anywhere = [
            place for place, writing in enumerate(moments_of(Path(name) / "all"), 1) if not writing
        ]
        for index in range(number):
            kind = (*ERRNOS, "out of memory")[index % (len(ERRNOS) + 1)]
            memory, out = kind not in ERRNOS, Path(name) / "copy"
            place = stream.choice(anywhere) if memory else stream.randint(1, calls)
            status = in_child(partial(_refused_at, place, out, kind))
            found, said = outcome(partial(went_on, out), right)
            row = {"kind": kind, "moment": place, "one_line": status == 0, "outcome": found}
            rows.append(row | ({"said": said} if said else {}))
            shutil.rmtree(out, ignore_errors=True)
    return rows


def _refused_at(place: int, out: Path, kind: str) -> None:
    def act(count: int, _: bool) -> None:
        if count == place:
            raise (
                MemoryError
                if kind not in ERRNOS
                else OSError(ERRNOS[kind], os.strerror(ERRNOS[kind]), str(out))
            )

    with stopped_by(Moments(act, files=kind in ERRNOS)):
        run(out)


EXPERIMENTS = {"corruptions": corruptions, "kills": kills, "plans": plans, "faults": faults}


def counted(rows: Sequence[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], int]:
    """Return how often each combination of some columns occurs."""
    return dict(collections.Counter(tuple(row[name] for name in names) for row in rows))


def main() -> None:
    """Read the command line, run an experiment and keep its results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--number", type=int, default=200, help="how many trials (default: 200)")
    parser.add_argument(
        "--seed", type=int, default=0, help="from which they are drawn (default: 0)"
    )
    given = parser.parse_args()
    rows = EXPERIMENTS[given.experiment](given.number, given.seed)
    write_results(
        STORED / f"{given.experiment}.json", rows, SPEAKS_OF, vars(given), seeds=(given.seed,)
    )
    for key, times in sorted(counted(rows, "outcome").items()):
        print(f"{times:6d}  {key[0]}")


if __name__ == "__main__":
    main()
