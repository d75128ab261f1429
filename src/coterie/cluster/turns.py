"""Turns: one batch job at a time works on a run, even where the file system has no locks.

A claim is a file `.turn-N.json` that is made by a hard link, which is atomic on every file system
that machines share. The highest N has the run. The next job may take the turn after it when that
job is over, according to the batch system; of two that try, one gets the link.
"""

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.errors import FolderInUse

_NAME = re.compile(r"\.turn-(\d+)\.json")


@contextmanager
def claim_turn(folder: Path, job: str, over: Callable[[str], bool]) -> Iterator[None]:
    """Claim the turn on a run's folder for the block.

    Args:
        folder: the folder; it is made if missing.
        job: the id of this job of the batch system. A job that was requeued has the same, and goes
            on.
        over: whether another job has ended, however it did.

    Raises:
        FolderInUse: when another job has the turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number, owner = find_holder(folder)
    # A requeued job has the same id and may go on. The turn of a job that is over does not count.
    if owner and owner["job"] != job and not over(owner["job"]):
        raise FolderInUse(
            f"{folder} is in use by {describe_owner(owner)}; wait for it, or cancel it first (or, if "
            f"it is over and the batch system does not know it, delete .turn-{number}.json there)"
        )
    # A number that nobody has: `os.link` fails if another job takes it first.
    mine = folder / f".turn-{number + 1}.json"
    what = {"job": job, "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    handle, name = tempfile.mkstemp(dir=folder, prefix=".turn-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(what, file)
            file.flush()
            # The content is on disk before the name exists, so no reader sees an empty claim.
            os.fsync(file.fileno())
        os.link(name, mine)
    except FileExistsError:
        raise FolderInUse(
            f"{folder} is in use by {describe_owner(find_holder(folder)[1])}; wait for it, or "
            "cancel it first"
        ) from None
    finally:
        Path(name).unlink(missing_ok=True)
    try:
        yield
    finally:
        # The highest last: a lower one must at no moment seem to have the run.
        for _, path in sorted(_list_turns(folder)):
            path.unlink(missing_ok=True)


def find_holder(folder: Path) -> tuple[int, Mapping[str, Any]]:
    """Return the number of the turn on a folder, and its owner (`job`, `host`, `since`); 0 if none.

    The owner's job may be over: a job that is killed does not remove its claim.
    """
    for number, path in sorted(_list_turns(folder), reverse=True):
        try:
            found = json.loads(path.read_text("utf-8"))
            return number, {key: str(found[key]) for key in ("job", "host", "since")}
        except FileNotFoundError:  # removed since it was listed
            continue
        except (ValueError, KeyError, TypeError):  # not written by a job
            # Valid as a claim, but of an unknown owner: it is safer to respect it.
            return number, {}
    return 0, {}


def describe_owner(owner: Mapping[str, Any]) -> str:
    """Describe the owner of a turn."""
    return (
        f"job {owner['job']} on {owner['host']} since {owner['since']}" if owner else "another job"
    )


def _list_turns(folder: Path) -> list[tuple[int, Path]]:
    if not folder.exists():
        return []
    found = []
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.append((int(match[1]), path))
    return found
