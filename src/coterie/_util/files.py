"""Files: the atomic writer of files, the places where results go, and the cache folder."""

import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coterie._util.names import to_one_line
from coterie.errors import ConfigError, DiskFull

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@contextmanager
def replace_atomically(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield the path of a new file that replaces `path` when the block ends without an error.

    Readers find the old or the new file, even after a crash at any moment. A link stays a link: the
    file that it leads to is replaced. A file that is there keeps its permissions and, where the
    system allows it, its owner; a new one gets what the umask leaves.

    Args:
        path: the file to write; its folder must exist.
        mode: the permissions of a new file, of which the umask leaves some.

    Raises:
        ConfigError: when `path` is no regular file: a folder, a pipe, a device, a loop of links.
        OSError: from the system; it names `path`.
    """
    place, before = _find_regular_file(path)
    # In the same folder: a rename is atomic only within one file system.
    temporary = place.with_name(f".{place.name[:100]}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        # O_EXCL never opens a file that somebody else put there; the system applies the umask.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield temporary
        # on the disk before it gets its name: a crash must not leave an empty file under `path`
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        if before is not None:
            _copy_permissions(before, temporary)
        os.replace(temporary, place)
    # Ctrl-C must not leave a temporary file either.
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        # The caller knows the file by its own name.
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            error.filename = str(path)
        raise


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically; see `replace_atomically`."""
    with replace_atomically(path, mode) as temporary:
        temporary.write_bytes(data)


def replace_folder(made: Path, path: Path) -> None:
    """Put a folder that was just made into the place of another, which may exist.

    The old folder is removed only when the new one is in its place; an error brings it back. A
    process that is killed in between leaves it whole under a hidden name next to the new one. A
    link stays a link: the folder that it leads to is replaced.

    Args:
        made: the new folder, next to the one that it replaces.
        path: the folder that is replaced.

    Raises:
        OSError: from the system.
    """
    for file in made.rglob("*"):
        if file.is_file():
            # On the disk before the old ones go, as in `replace_atomically`.
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
    place = resolve_path(path)
    # A rename replaces no folder that has files, so the old one makes room first.
    aside = place.with_name(f".{place.name[:100]}.{uuid.uuid4().hex[:12]}.old")
    try:
        with suppress(FileNotFoundError):
            os.replace(place, aside)
        os.replace(made, place)
    # Ctrl-C between the two renames must not take the folder away either.
    except BaseException:
        if aside.exists() and not place.exists():
            os.replace(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def prepare_file(path: str | Path) -> Path:
    """Make the folders of a file that will be written next, and check that it can be.

    Commands call `check_file` before their work, so that a bad place costs no hours.

    Raises:
        ConfigError: when the file is no regular file, or its folder cannot be made or written.
        DiskFull: when the disk is full.
    """
    place, _ = _find_regular_file(Path(path))
    _check_writable(place.parent, f"cannot write {show_path(path)}", make=True)
    return Path(path)


def check_file(path: str | Path) -> Path:
    """Check that a file can be written later; see `prepare_file`. Nothing is made."""
    place, _ = _find_regular_file(Path(path))
    _check_writable(place.parent, f"cannot write {show_path(path)}", make=False)
    return Path(path)


def check_replaceable(path: str | Path, beginning: bytes) -> None:
    """Refuse to replace a file that is not of the kind that will be written.

    Args:
        path: of the file, which need not exist.
        beginning: bytes with which all files of that kind begin.

    Raises:
        ConfigError: when there is another file, such as a study whose name was given by mistake.
    """
    place, found = _find_regular_file(Path(path))
    if found is None or found.st_size == 0:
        return
    with place.open("rb") as file:
        begins = file.read(len(beginning))
    if begins != beginning:
        raise ConfigError(
            f"{show_path(path)} exists and is another kind of file; choose another name, or remove "
            "it"
        )


def prepare_folder(path: str | Path) -> Path:
    """Make a folder for files that will be written later, and check that it can be written.

    Raises:
        ConfigError: when a file is there, or the folder cannot be made or written.
        DiskFull: when the disk is full.
    """
    _check_writable(Path(path), f"cannot write into {show_path(path)}", make=True)
    return Path(path)


def check_folder(path: str | Path) -> None:
    """Check that a folder can be written or made; see `prepare_folder`. Nothing is made."""
    _check_writable(Path(path), f"cannot write into {show_path(path)}", make=False)


def resolve_path(path: str | Path) -> Path:
    """Return an absolute path without links; where links lead in a circle, up to the circle.

    `Path.resolve` raises a RuntimeError there.
    """
    return Path(os.path.realpath(path))


def expand_home(path: str | Path) -> Path:
    """Return a path with "~" replaced; an account that does not exist stays as it is written.

    `Path.expanduser` raises a RuntimeError there.
    """
    return Path(os.path.expanduser(str(path)))


def show_path(path: str | Path) -> str:
    """Return a path for a message or a terminal, on one line."""
    return to_one_line(str(path))


def cache_folder() -> Path:
    """Return the folder of decoded images and compiled programs.

    It is `COTERIE_CACHE`, or else "coterie" in the cache folder of the account.
    """
    if chosen := os.environ.get("COTERIE_CACHE"):
        return expand_home(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "coterie"
    return Path.home() / ".cache" / "coterie"


def _find_regular_file(path: Path) -> tuple[Path, os.stat_result | None]:
    """Return where a path leads through links, and the state of the file there if there is one."""
    kind = ""
    try:
        found = path.stat()
    except OSError as error:
        # Any other error comes again when the file is written, and is the system's to describe.
        if error.errno != errno.ELOOP:
            return resolve_path(path), None
        kind = "a loop of links"
    else:
        if stat.S_ISREG(found.st_mode):
            return resolve_path(path), found
        for is_kind, name in _KINDS:
            if is_kind(found.st_mode):
                kind = name
    raise ConfigError(f"{show_path(path)} is {kind}; expected a file: choose another name")


def _copy_permissions(before: os.stat_result, path: Path) -> None:
    made = path.stat()
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        # Another's file in a shared folder becomes the writer's own.
        with suppress(OSError):
            os.chown(path, before.st_uid, before.st_gid)
    path.chmod(stat.S_IMODE(before.st_mode))


def _check_writable(folder: Path, what: str, *, make: bool) -> None:
    """Check that files can be made in a folder, or that the folder can be made."""
    there = folder
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        while not os.path.lexists(there) and there != there.parent:
            there = there.parent
        # Only an attempt shows it: permissions do not describe read-only or special file systems.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        if DiskFull.matches(error):
            raise DiskFull(f"{what}: the disk is full; make room, and start again") from error
        raise ConfigError(
            f"{what}: {_describe_refusal(there, error)}; choose another place"
        ) from error


def _describe_refusal(folder: Path, error: OSError) -> str:
    """Describe why files cannot be made in a folder, with the path that is at fault."""
    for one in (folder, *folder.parents):
        if os.path.lexists(one) and not one.is_dir():
            return f"{show_path(one)} is no folder"
    return f"{show_path(folder)}: {error.strerror or error}"
