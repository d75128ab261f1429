"""Try the built package as a stranger would: installed from its wheel, in a fresh environment, outside the checkout.

    python scripts/try_wheel.py dist

What must be there: one wheel and one source archive in the folder. `make dist` builds both first.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUDY = """
extends = "rotated-digits"
name = "tiny"
rounds = 2
seeds = [0]
"""
PROBE = """
import pathlib, coterie
folder = pathlib.Path(coterie.__file__).parent
print(folder)
print(*sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()), sep="\\n")
"""
"""Prints where the package is, and its files."""


def files(folder: Path) -> set[str]:
    """Return the files of the package in the checkout, by their paths in it."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def main(folder: Path) -> None:
    """Install the wheel of a folder and use it.

    Raises:
        SystemExit: where something is missing or fails.
    """
    (wheel,), (_,) = folder.resolve().glob("*.whl"), folder.glob("*.tar.gz")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "COTERIE", "VIRTUAL"))
    }
    with tempfile.TemporaryDirectory(prefix="coterie-wheel-") as place:
        python = Path(place, "env/bin/python")

        def run(*command: str | Path, shown: bool = True) -> str:
            start = time.monotonic()
            done = subprocess.run(
                [str(word) for word in command],
                cwd=place,
                env=clean,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(
                    f"{' '.join(map(str, command))} ended with status {done.returncode}\n{done.stdout}{done.stderr}"
                )
            if shown:
                print(
                    f"{time.monotonic() - start:6.1f} s  {' '.join(Path(str(word)).name for word in command)}"
                )
            return done.stdout

        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "-c",
            ROOT / "constraints.txt",
        ]
        run(sys.executable, "-m", "venv", "--without-pip", Path(place, "env"))
        run(*pip, "torch")
        run(*pip, f"{wheel}[net]")
        where, *there = run(python, "-c", PROBE, shown=False).splitlines()
        if missing := files(ROOT / "src/coterie") - set(there):
            sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
        if not Path(where).is_relative_to(place):
            sys.exit(f"{where} is not the installed package")
        coterie = Path(place, "env/bin/coterie")
        print(run(coterie, "--version"), end="")
        run(coterie, "methods")
        run(coterie, "net", "init", "organizer", "--run", "tiny")
        Path(place, "tiny.toml").write_text(STUDY)
        print(run(coterie, "run", "tiny.toml"), end="")
        if not Path(place, "runs/tiny/report.html").stat().st_size > 500_000:
            sys.exit("the report lacks its parts")
    print(f"{wheel.name} works")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
