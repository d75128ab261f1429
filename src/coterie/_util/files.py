"""Files: the atomic writer of files, and the cache folder."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that replaces `path` when the block ends without an error.

    Readers find the old or the new file, even after a crash at any moment.

    Args:
        path: the file to write; its folder must exist.

    Raises:
        OSError: from the system; it names `path`.
    """
    # In the same folder: a rename is atomic only within one file system.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # on the disk before it gets its name: a crash must not leave an empty file under `path`
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner reads.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    # Ctrl-C must not leave a temporary file either.
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # The caller knows the file by its own name.
        if isinstance(error, OSError) and error.filename in (None, name):
            error.filename = str(path)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically; see `replace_atomically`."""
    with replace_atomically(path) as temporary:
        temporary.write_bytes(data)


def cache_folder() -> Path:
    """Return the folder of decoded images and compiled programs.

    It is `COTERIE_CACHE`, or else "coterie" in the cache folder of the account.
    """
    if chosen := os.environ.get("COTERIE_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "coterie"
    return Path.home() / ".cache" / "coterie"
