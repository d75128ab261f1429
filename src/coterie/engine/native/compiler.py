"""Building C++ programs for this machine, kept in the per-user cache folder."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from coterie._util.files import cache_folder, write_atomically

# Multiply-add may be fused, and sqrt is an instruction without errno; -w, since generated programs
# name values that they do not use.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-w")
_SECONDS = 300


class CompilerError(Exception):
    """There is no C++ compiler, or it failed; the text says which."""


_LISTENERS: list[Callable[[str], None]] = []


@contextmanager
def report_compiling(listener: Callable[[str], None]) -> Iterator[None]:
    """Notify a listener, in words for a person, whenever this process compiles in the block."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


@lru_cache(maxsize=1)
def find_compiler() -> str:
    """Return the path of the C++ compiler: CXX, or the first of c++, g++ and clang++.

    Raises:
        CompilerError: when there is none.
    """
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise CompilerError(
        "no C++ compiler was found (c++, g++ or clang++); install one, or name it in CXX"
    )


_portable = ContextVar("portable", default=False)


@contextmanager
def portable_code(wanted: bool = True) -> Iterator[None]:
    """Compile what is loaded in the block for all processors of the last ten years, or this one.

    Args:
        wanted: whether for all: x86-64-v3, or version 8.2 of ARM's instructions. With the same
            compiler, such programs are the same on all of them, and so are their results.
    """
    token = _portable.set(wanted)
    try:
        yield
    finally:
        _portable.reset(token)


def _processor_flag() -> str:
    """Return the flag for the processors that programs are for."""
    arm = platform.machine() in ("aarch64", "arm64")
    if _portable.get():
        return "-march=armv8.2-a" if arm else "-march=x86-64-v3"
    return "-mcpu=native" if arm else "-march=native"


def describe_machine() -> tuple[str, ...]:
    """Return what compiled code depends on: the compiler, its processor flag, and its macros.

    Among what it defines are its version, and the features of the processor that it uses.
    """
    return describe_target(_processor_flag())


@lru_cache(maxsize=2)
def describe_target(native: str) -> tuple[str, ...]:
    """Return what compiled code depends on with a processor flag; see `describe_machine`."""
    # Asks the compiler, not the operating system: an old one may know fewer vector instructions
    # than the processor has.
    command = [find_compiler(), native, "-dM", "-E", "-x", "c++", os.devnull]
    defined = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_SECONDS
    ).stdout
    return (find_compiler(), native, platform.machine(), platform.processor(), defined)


def vector_bytes() -> int:
    """Return the bytes of the widest vector registers that programs use here: 64, 32 or 16."""
    defined = set(describe_machine()[-1].split())
    if "__AVX512F__" in defined:
        return 64
    if "__AVX__" in defined:
        return 32
    return 16  # SSE of every 64-bit x86, and NEON of ARM


def load(text: str, flags: tuple[str, ...] = ()) -> tuple[ctypes.CDLL, float]:
    """Return the compiled program and the seconds of compiling it, 0 when it was compiled before.

    Args:
        text: of the program.
        flags: of the compiler, in addition to the usual ones.

    Raises:
        CompilerError: when there is no compiler, or it fails.
    """
    here = describe_machine()
    # A cache may be shared by machines with different processors, so the key has all that the
    # compiler defines for this one. 24 digits are 96 bits: no two programs meet by chance.
    key = hashlib.sha256("\n".join((text, *_FLAGS, *flags, *here)).encode()).hexdigest()[:24]
    library = cache_folder() / "compiled" / f"{key}.so"
    seconds = 0.0
    try:
        # For this user alone from the start: what others can write to is refused in the next line.
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(library.parent)
        if not _trusted(library):
            started = time.perf_counter()
            _compile(text, library, (*_FLAGS, *flags, here[1]))
            seconds = time.perf_counter() - started
        return ctypes.CDLL(str(library)), seconds
    except OSError as error:
        raise CompilerError(f"the compiled program cannot be kept or loaded: {error}") from error


def _check_private(path: Path) -> None:
    """Refuse what others could have written: a program that is loaded can do anything.

    Raises:
        CompilerError: when it is another user's, or others may write to it.
    """
    if os.name != "posix":
        return
    found = path.stat()
    # 0o022: the group, or everybody, may write.
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise CompilerError(
            f"{path} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}; "
            "compiled programs are loaded "
            "only from what is yours and nobody else can write: chmod go-w it, or set "
            "COTERIE_CACHE to another folder"
        )


def _digest_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _trusted(library: Path) -> bool:
    """Whether an undamaged program written here exists; a damaged one is compiled again."""
    digest = library.with_suffix(".sha256")
    if not library.exists() or not digest.exists():
        return False
    for path in (library, digest):
        _check_private(path)
    return digest.read_text("utf-8", errors="replace").strip() == _digest_of(library)


def _compile(text: str, library: Path, flags: tuple[str, ...]) -> None:
    for listener in _LISTENERS:
        listener("compiling the model (once for this machine)")
    # On the file system of the cache, so that os.replace moves the program in one piece.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, built = Path(folder) / "program.cpp", Path(folder) / "program.so"
        source.write_text(text)
        try:
            done = subprocess.run(
                [find_compiler(), *flags, str(source), "-o", str(built)],
                capture_output=True, text=True, check=False, timeout=_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise CompilerError(f"the C++ compiler took more than {_SECONDS} seconds") from error
        if done.returncode or not built.exists():
            first = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise CompilerError(f"the C++ compiler failed: {first}")
        # The compiler gave it the modes of the umask, which may let a group write.
        built.chmod(0o600)
        digest = _digest_of(built)
        # The digest comes last: a process that ends before it leaves a program that is not trusted,
        # and is compiled again.
        os.replace(built, library)
        # Whatever the umask: what others could write would not be trusted.
        write_atomically(library.with_suffix(".sha256"), f"{digest}\n".encode(), 0o600)
