"""Copy a run's folder between two machines: only what is new, by the digests of its manifest."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from coterie._util import manifest
from coterie._util.claims import claim_folder, find_owner
from coterie.results.stored_runs import CONFIG, EDGES, METRICS, PROVENANCE
from coterie.runtime import checkpoint

_TEMPORARY = "coterie-worker-"
_YOUNG = 60.0  # seconds in which a new folder may not be claimed yet
# Configuration and checkpoint come first and provenance last, so that a copy that breaks off looks
# unfinished, not complete. Other files are in between.
_RANKS = {CONFIG: 0, checkpoint.FILE: 0, METRICS: 2, EDGES: 3, PROVENANCE: 4}


@dataclass(frozen=True)
class FolderUpdate:
    """The new files of a folder.

    Args:
        files: the bytes of new files, by name, in the order in which they are put into place.
        kept: files that the receiver has and stores under another name: the previous checkpoint.
    """

    files: Mapping[str, bytes]
    kept: Mapping[str, str]


def load_files(folder: Path) -> dict[str, bytes]:
    """Load the files of a run's folder with the manifest, without files of this machine alone."""
    if not folder.exists():
        return {}
    # Temporary files, which are hidden, are of writers that have not ended.
    shown = [path for path in folder.iterdir() if not path.name.startswith(".")]
    paths = sorted(path for path in shown if path.is_file())
    return {path.name: path.read_bytes() for path in paths}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a new folder."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def collect_update(folder: Path, known: Mapping[str, str]) -> tuple[FolderUpdate, dict[str, str]]:
    """Return the new files of a folder that was just written, and the digests of all its files.

    Args:
        folder: of a run.
        known: the digests that the receiver has, by name.
    """
    now = manifest.load_digests(folder)
    changed = [name for name, digest in now.items() if known.get(name) != digest]
    before, newest = checkpoint.BEFORE, checkpoint.FILE
    # A new checkpoint renames the one before, which the receiver has under the old name: it
    # renames its own copy too, and those bytes do not travel again.
    rotated = before in changed and now[before] == known.get(newest) and newest in changed
    renamed: dict[str, str] = {}
    if rotated:
        renamed[newest] = before
        changed.remove(before)
    changed.sort(key=lambda name: _RANKS.get(name, 1))
    return FolderUpdate({name: (folder / name).read_bytes() for name in changed}, renamed), now


def apply_update(update: FolderUpdate, folder: Path) -> None:
    """Write an update into the folder of the same run here, atomically.

    See `manifest.replace_files`.
    """
    if update.files:
        manifest.replace_files(folder, update.files, update.kept)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a temporary folder for the block; first remove those of workers that were killed."""
    base = Path(tempfile.gettempdir())
    for old in base.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):
            if (
                # Only folders of this account that no process claims. A young one may not be
                # claimed yet.
                old.stat().st_uid == os.getuid()
                and time.time() - old.stat().st_mtime > _YOUNG
                and not find_owner(old)
            ):
                shutil.rmtree(old)
    made = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    try:
        with claim_folder(made):
            yield made
    finally:
        # What cannot be removed now is removed by the next worker.
        shutil.rmtree(made, ignore_errors=True)
