"""Where results come from: the code, the command and the machine that made them."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from coterie._util.files import write_atomically

PACKAGE = Path(__file__).resolve().parent.parent
CODE = ("src", "benchmarks", "scripts", "pyproject.toml", "constraints.txt")
"""What results depend on, in the repository: other files may change without a result being another."""


@lru_cache(maxsize=1)
def describe_code() -> dict[str, Any]:
    """Return the commit of the code that this process runs, and whether files of it differ from that commit.

    Returns:
        `commit` and `dirty`; both None where the package does not run from its own repository.
    """
    # a repository around it is not its own
    if _run_git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None}
    top = _run_git("rev-parse", "--show-toplevel") or str(PACKAGE)
    changed = _run_git("status", "--porcelain", "--", *(str(Path(top, name)) for name in CODE))
    return {
        "commit": _run_git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
    }


def _run_git(*words: str) -> str | None:
    """Return what git says of the package's folder, which it leaves as it is; None when it fails or is not there."""
    command = ["git", "--no-optional-locks", "-C", str(PACKAGE), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def format_command() -> str:
    """Return the command of this process as a shell takes it, such as "coterie run study.toml"."""
    script = Path(sys.argv[0] or "python")
    # python -m PACKAGE; a worker process does not know its name, but where it is
    if script.name == "__main__.py":
        names = [script.parent.name]
        for folder in script.parents[1:]:
            if not (folder / "__init__.py").exists():
                break
            names.insert(0, folder.name)
        first = ["coterie"] if names == ["coterie"] else ["python", "-m", ".".join(names)]
    elif script.suffix == ".py":
        inside = script.is_absolute() and script.is_relative_to(Path.cwd())
        first = ["python", str(script.relative_to(Path.cwd()) if inside else script)]
    else:
        first = [*["python"] * (sys.argv[0] == "-c"), script.name]
    return shlex.join([*first, *sys.argv[1:]])


def describe_hardware() -> dict[str, Any]:
    """Return the kind of machine: `processor`, `vectors`, `cores`, `describe_machine` and `system`.

    Processors of one name may have different vector instructions (`vectors`, as torch calls them),
    which add in another order.
    """
    import torch  # late: commands that only read do without it

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
    }


def get_versions(*names: str) -> dict[str, str]:
    """Return the installed versions of some packages; "unknown" where there is none."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def describe_machine(*more: str) -> dict[str, Any]:
    """Return the machine, and the versions of Python, torch, numpy and of `more` packages, in one flat mapping."""
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
    """Return the head of a result that this process made and that is stored: all that it depends on.

    Args:
        speaks_of: the parts of the package whose results they are, as paths below it: "net",
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
    """Write measurements as JSON, below the head that says where they come from.

    Args:
        path: the file.
        results: the rows.
        speaks_of: the parts of the package that are measured, as paths below it.
        settings: what the command was given, defaults included.
        seeds: of all random streams.
        where: the machine; what `describe_machine` says when None.
        more: further entries.
    """
    config = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.items()
    }
    first = make_origin(
        speaks_of, config=config, seeds=seeds, where=describe_machine() if where is None else where
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path, (json.dumps({"origin": first, **more, "results": results}, indent=1) + "\n").encode()
    )
