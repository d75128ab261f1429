"""Building C++ programs for this machine, kept in the user's cache folder."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import lru_cache
from pathlib import Path

from coterie._util.files import cache_folder

_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-w")
_SECONDS = 300


class CompilerError(Exception):
    """There is no C++ compiler, or it failed; the text says which."""


@lru_cache(maxsize=1)
def compiler() -> str:
    """Return the path of the C++ compiler: CXX, or the first of c++, g++ and clang++.

    Raises:
        CompilerError: when there is none.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise CompilerError("no C++ compiler was found (c++, g++ or clang++); install one, or name it in CXX")


@lru_cache(maxsize=1)
def machine() -> tuple[str, ...]:
    """Return what compiled code depends on: the compiler, its flags and the processor."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False, timeout=_SECONDS)
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    features = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return (version.stdout, native, platform.machine(), platform.processor(), features)


def load(text: str) -> tuple[ctypes.CDLL, float]:
    """Return the compiled program and the seconds it took to compile; 0 when it was compiled before.

    Args:
        text: of the program.

    Raises:
        CompilerError: when there is no compiler, or it fails.
    """
    here = machine()
    key = hashlib.sha256("\n".join((text, *_FLAGS, *here)).encode()).hexdigest()[:24]
    library = cache_folder() / "compiled" / f"{key}.so"
    seconds = 0.0
    try:
        if not library.exists():
            started = time.perf_counter()
            _compile(text, library, (*_FLAGS, here[1]))
            seconds = time.perf_counter() - started
        return ctypes.CDLL(str(library)), seconds
    except OSError as error:
        raise CompilerError(f"the compiled program cannot be kept or loaded: {error}") from error


def _compile(text: str, library: Path, flags: tuple[str, ...]) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, built = Path(folder) / "program.cpp", Path(folder) / "program.so"
        source.write_text(text)
        try:
            done = subprocess.run(
                [compiler(), *flags, str(source), "-o", str(built)],
                capture_output=True, text=True, check=False, timeout=_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CompilerError(f"the C++ compiler took more than {_SECONDS} seconds") from error
        if done.returncode or not built.exists():
            first = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise CompilerError(f"the C++ compiler failed: {first}")
        os.replace(built, library)
