"""Where results come from: the code, the command and the machine that made them."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coterie._util.files import prepare_file, write_atomically

PACKAGE = Path(__file__).resolve().parent.parent
CODE = ("src", "benchmarks", "scripts", "pyproject.toml", "constraints.txt")
"""The files of the repository that results depend on; changes of other files change no result."""
_STARTED = time.time()


@lru_cache(maxsize=1)
def describe_code() -> dict[str, Any]:
    """Return the commit of the running code, and whether its files differ from that commit.

    A long run may see another commit at its end than the one that it was started with, so that
    files which changed after the start count as well.

    Returns:
        `commit` and `dirty`; both None where the package does not run from its own repository.
    """
    # an installed package may lie inside a repository that is not Coterie's
    if _run_git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None}
    top = _run_git("rev-parse", "--show-toplevel") or str(PACKAGE)
    code = [str(Path(top, name)) for name in CODE]
    changed = _run_git("status", "--porcelain", "--", *code)
    files = _run_git("ls-files", "-z", "--full-name", "--", *code)
    # An empty status says that nothing differs; None, that git failed.
    dirty = None
    if changed is not None and files is not None:
        paths = [Path(top, name) for name in files.split("\0") if name]
        dirty = bool(changed) or any(path.stat().st_mtime > _STARTED for path in paths)
    return {"commit": _run_git("rev-parse", "HEAD"), "dirty": dirty}


@lru_cache(maxsize=1)
def compute_code_digest() -> str:
    """Return a digest of the package's own code, installed or in a repository."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".h"):
            digest.update(f"{path.relative_to(PACKAGE).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _run_git(*words: str) -> str | None:
    """Return the output of a reading git command in the package's folder; None when it fails."""
    # Without optional locks a status neither writes the index nor disturbs another git command.
    command = ["git", "--no-optional-locks", "-C", str(PACKAGE), *words]
    try:
        # Seconds; a repository on a slow network disk must not stop a run.
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip()


def _find_main_module(script: Path) -> str | None:
    """Return the module that `python -m` runs from a file; None where the file itself is run."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None or spec.origin != str(script):
        return None
    return spec.name


def format_command() -> str:
    """Return the command of this process as a shell takes it, such as "coterie run study.toml"."""
    script = Path(sys.argv[0] or "python")
    # python -m PACKAGE: argv has the path of the file, from which the package's name follows
    if script.name == "__main__.py":
        names = [script.parent.name]
        for folder in script.parents[1:]:
            if not (folder / "__init__.py").exists():
                break
            names.insert(0, folder.name)
        first = ["python", "-m", ".".join(names)]
        if names == ["coterie"]:  # its command is installed
            first = ["coterie"]
    elif (module := _find_main_module(script)) is not None:
        first = ["python", "-m", module]
    elif script.suffix == ".py":
        if script.is_absolute() and script.is_relative_to(Path.cwd()):
            script = script.relative_to(Path.cwd())
        first = ["python", str(script)]
    else:
        first = [*["python"] * (sys.argv[0] == "-c"), script.name]
    return shlex.join([*first, *sys.argv[1:]])


def describe_hardware() -> dict[str, Any]:
    """Return the kind of machine: `processor`, `vectors`, `cores`, `machine` and `system`.

    Processors of one name may have different vector instructions (`vectors`, as torch calls them),
    which add in another order.
    """
    import torch  # imported late: commands that only read results do without it

    processor, info = platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        # a line "model name : AMD EPYC ..." for each core, though not on every architecture
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return {
        "processor": processor,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
    }


def get_versions(*names: str) -> dict[str, str]:
    """Return the installed versions of some packages; "unknown" for one that is not installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def describe_machine(*more: str) -> dict[str, Any]:
    """Return the hardware, and the versions of Python, torch, numpy and `more` packages."""
    return {
        **describe_hardware(),
        "python": platform.python_version(),
        **get_versions("torch", "numpy", *more),
    }


def make_origin(
    speaks_of: Sequence[str],
    *,
    config: Mapping[str, Any],
    seeds: Sequence[int],
    where: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that a stored result depends on: code, command, settings and machine.

    Args:
        speaks_of: the parts of the package that the results measure, as paths below it: "net",
            "methods/dac.py".
        config: the settings.
        seeds: of all random streams.
        where: the machine; see `describe_machine`.
    """
    return {
        **describe_code(),
        "version": get_versions("coterie")["coterie"],
        "made": datetime.now(UTC).date().isoformat(),
        "command": format_command(),
        "config": dict(config),
        "seeds": list(seeds),
        "machine": dict(where),
        "speaks_of": sorted(speaks_of),
    }


def write_results(
    path: Path,
    results: Sequence[Mapping[str, Any]],
    speaks_of: Sequence[str],
    settings: Mapping[str, Any],
    *,
    seeds: Sequence[int] = (0,),
    where: Mapping[str, Any] | None = None,
    **more: Any,
) -> None:
    """Write measurements as JSON, together with their origin (`make_origin`).

    Args:
        path: the file.
        results: the rows.
        speaks_of: the parts of the package that are measured, as paths below it.
        settings: the settings of the command, defaults included.
        seeds: of all random streams.
        where: the machine; the result of `describe_machine` when None.
        more: further entries.
    """
    config = {}
    for name, value in settings.items():
        if isinstance(value, Path):
            value = str(value)
        config[name] = value
    if where is None:
        where = describe_machine()
    first = make_origin(speaks_of, config=config, seeds=seeds, where=where)
    write_atomically(
        prepare_file(path),
        (json.dumps({"origin": first, **more, "results": results}, indent=1) + "\n").encode(),
    )
