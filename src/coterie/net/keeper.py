"""Keeper: the newest roster that a node has seen. Versions only rise, also over restarts.

A new roster comes as a file that the operator replaces, or from another member; it counts only with
the organizer's signature, for the same run, and with a higher version. It is kept in the node's
folder, so that a roster of before is not taken again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie._util.files import write_atomically
from coterie._util.mappings import index_by_name
from coterie.errors import PeerMismatch, TransportError
from coterie.net import roster as rosters
from coterie.net.roster import Roster
from coterie.net.wire import MAX_ROSTER
from coterie.results.stored_runs import ROSTER_SEEN

_Stamp = tuple[tuple[int, int, int], ...]


class Keeper:
    """The newest roster of one node's run.

    Args:
        file: the roster's file; its signature is next to it.
        organizer: the file with the organizer's public key.
        folder: the node's folder, where the newest roster is kept.
        log: receives events.

    Raises:
        TransportError: when there is no roster that the organizer signed.
    """

    def __init__(
        self,
        file: Path,
        organizer: Path,
        folder: Path,
        log: Callable[..., None] = lambda *_, **__: None,
    ):
        self.file, self._seen, self._log = file, folder / ROSTER_SEEN, log
        self._organizer = rosters.load_organizer_key(organizer)
        # Before the content: a file that is replaced in between has another stamp, and is read
        # again.
        self._stamp = self._file_stamp()
        self.sealed = rosters.load_signed(file)
        what = f"{file} is not signed by the organizer in {organizer}"
        # Of the same bytes: the file may be replaced at any moment.
        self.roster = rosters.parse_signed(self.sealed, self._organizer, what)
        # Before a restart this node may have seen a newer roster than the file has.
        if self._seen.exists():
            self._accept_newer(self._seen.read_bytes(), str(self._seen))

    def save_roster(self) -> None:
        """Keep the roster on disk."""
        self._seen.parent.mkdir(parents=True, exist_ok=True)
        if not self._seen.exists() or self._seen.read_bytes() != self.sealed:
            write_atomically(self._seen, self.sealed)

    def _accept_newer(self, data: bytes, source: str) -> bool:
        """Take a roster if it is a newer one."""
        if len(data) > MAX_ROSTER:
            self._log("roster_refused", level="warning", source=source, text=f"{len(data)} bytes")
            return False
        try:
            found = rosters.parse_signed(data, self._organizer)
        except (TransportError, PeerMismatch) as error:
            self._log("roster_refused", level="warning", source=source, text=str(error)[:300])
            return False
        known = self.roster
        if found.run != known.run or found.version <= known.version:
            # The known roster again is no refusal.
            if found != known:
                text = f"run {found.run}, version {found.version}; "
                text += f"version {known.version} of {known.run} is known"
                self._log("roster_refused", level="warning", source=source, text=text)
            return False
        self.roster, self.sealed = found, data
        return True

    def reload_file(self) -> Roster | None:
        """Return the roster of the file when the file has changed and holds a newer one."""
        stamp = self._file_stamp()
        if stamp == self._stamp:
            return None
        try:
            data = rosters.load_signed(self.file)
        except TransportError as error:  # half-copied: looked at again when it changes again
            self._log(
                "roster_refused", level="warning", source=str(self.file), text=str(error)[:300]
            )
            data = b""
        # Also after a refusal, so that the same file is not read in every round.
        self._stamp = stamp
        if not data or not self._accept_newer(data, str(self.file)):
            return None
        self.save_roster()
        return self.roster

    def accept_offer(self, data: bytes, peer: str) -> Roster | None:
        """Return the roster that another member sent, when it is newer."""
        if not self._accept_newer(data, peer):
            return None
        self.save_roster()
        return self.roster

    def _file_stamp(self) -> _Stamp:
        out = []
        for path in (self.file, self.file.with_name(self.file.name + ".sig")):
            try:
                found = path.stat()
            except OSError:
                continue
            # An atomic replacement changes the inode, even when size and time stay the same.
            out.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return tuple(out)


def describe_changes(old: Roster, new: Roster) -> dict[str, Any]:
    """Return a new roster's version, and the members that it removes, rekeys or moves."""
    now = index_by_name(new.members)
    removed, rekeyed, moved = [], [], []
    for before in old.members:
        member = now.get(before.name)
        if member is None:
            removed.append(before.name)
            continue
        if member.key != before.key:
            rekeyed.append(before.name)
        if member.address != before.address:
            moved.append(before.name)
    return {"version": new.version, "removed": removed, "rekeyed": rekeyed, "moved": moved}


def check_same_run(old: Roster, new: Roster, name: str) -> None:
    """Check that a running node can go on with a new roster.

    Raises:
        TransportError: when the node was removed or has another key in it, or when it describes
            another study.
    """
    known = index_by_name(new.members)
    if name not in known:
        raise TransportError(
            f"{name} was removed from run {new.run} in version {new.version} of the roster"
        )
    mine, before = known[name], old.member(name)
    if mine.key != before.key:
        raise TransportError(
            f"version {new.version} of the roster has another key for {name}: put its key and "
            "certificate in place "
            "and start the node again; it continues from its checkpoint"
        )
    for what in ("population", "study", "schema", "server", "clusters"):
        if getattr(old, what) != getattr(new, what):
            raise TransportError(
                f"version {new.version} of the roster has another {what} than version "
                f"{old.version}; "
                "start the node again with the study of the new roster"
            )
    if mine.clients != before.clients:
        raise TransportError(
            f"version {new.version} of the roster gives {name} other clients; a client keeps its id"
        )
