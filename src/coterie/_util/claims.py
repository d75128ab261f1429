"""Claims: one process at a time works in a folder, and others can see which.

The system releases a claim when its process ends, however it ends: no claim outlives its owner, on
this machine or, where the file system shares locks, on another.
"""

import errno
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from coterie._util.files import write_atomically
from coterie.errors import FolderInUse

LOCK, OWNER = ".lock", ".owner.json"
# What file systems without locks answer, such as some network mounts.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# How often each thread of this process has claimed each folder.
_mine: dict[tuple[str, int], int] = {}


@contextmanager
def claim_folder(folder: Path, wait: float = 1.0) -> Iterator[None]:
    """Claim a folder for the block; a thread that has the claim already may claim it again.

    Args:
        folder: the folder; it is made if missing.
        wait: seconds to wait for another's claim to end.

    Raises:
        FolderInUse: when another process, or another thread, has the claim.
        OSError: when the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A key belongs to one thread, so its count needs no lock.
    key = str(folder.resolve()), threading.get_ident()
    # The lock is not reentrant across objects: an inner claim counts only.
    lock: AbstractContextManager[Any] = nullcontext()
    if key not in _mine:
        lock = _lock_folder(folder, wait)
    with lock:
        _mine[key] = _mine.get(key, 0) + 1
        try:
            yield
        finally:
            _mine[key] -= 1
            if not _mine[key]:
                del _mine[key]


def find_owner(folder: Path) -> str:
    """Return the owner of a claimed folder, such as "process 17 on host since 10:31"; else ""."""
    if not (folder / LOCK).exists():
        return ""
    # The file of the owner may be left from a process that was killed; the lock is not.
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        return _load_owner(folder)
    except OSError:  # no locks here, or no right to write
        return ""
    lock.release()
    return ""


@contextmanager
def _lock_folder(folder: Path, wait: float) -> Iterator[None]:
    lock = FileLock(folder / LOCK, timeout=wait)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUse(
            f"{folder} is in use by {_load_owner(folder)}; wait for it, or stop it first"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{folder}: this file system has no locks; start one process at a time on it",
            stacklevel=4,
        )
    try:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        what = {"process": os.getpid(), "host": socket.gethostname(), "since": now}
        write_atomically(folder / OWNER, json.dumps(what).encode())
        yield
    finally:
        # While the lock is held: afterwards the file may be the next owner's.
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def _load_owner(folder: Path) -> str:
    try:
        found = json.loads((folder / OWNER).read_text("utf-8"))
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has just begun, or ended
        return "another process"
