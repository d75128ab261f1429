"""Ledger: the statements about studies that a member of a federation holds, as files.

`studies/NAME/signed` has the proposal of a study and what members say about it, a file each, as
they were signed. What is there was checked when it came. A name is used once: a second proposal
under it is refused, so that nobody approves one study and gets another.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from coterie._util.claims import claim_folder
from coterie._util.files import write_atomically
from coterie.errors import ConfigError, describe_unknown
from coterie.net.payload import Refused
from coterie.net.roster import Roster
from coterie.net.statements import (
    KINDS,
    STUDY_NAME,
    Proposal,
    Word,
    check_signer,
    name_kind,
    open_statement,
    reopen_statement,
)
from coterie.net.wire import NAME

SIGNED = "signed"
"""The folder of statements in a study's folder."""
FAILED = "failed.txt"
"""Why a study failed here, in its folder."""
MAX_OPEN = 8
"""Proposals of one member that may be open here at a time."""
MAX_A_DAY = 32
"""Proposals of one member that are taken in a day."""
MAX_AGE = 90 * 86400.0
"""Seconds after which a proposal is passed on, and taken, no more."""
MAX_LISTED = 8192
_PROPOSAL = "proposal"
_DAY = 86400.0
_TICK = 2_000_000_000  # nanoseconds: the coarsest clock of a file system
_WAIT = 10.0  # seconds for another process of this member to write its statement


@dataclass
class Entry:
    """A study that was proposed.

    Args:
        proposal: the proposal.
        came: when it came here, in seconds since 1970.
        words: what members say about it, by kind and member.
        sealed: all statements as they were signed, by digest.
        folder: the study's folder.
    """

    proposal: Proposal
    came: float
    folder: Path
    words: dict[tuple[str, str], Word] = field(default_factory=dict)
    sealed: dict[str, bytes] = field(default_factory=dict)

    def says(self, kind: str, by: str) -> bool:
        """Whether a member has said something about it."""
        return (kind, by) in self.words

    @property
    def is_withdrawn(self) -> bool:
        """Whether its proposer has withdrawn it."""
        return self.says("withdrawal", self.proposal.by)

    def list_taking_part(self, roster: Roster) -> list[str]:
        """Return the members on the roster that have approved it and have not stopped."""
        known, found = {member.name for member in roster.members}, []
        for name in self.proposal.members:
            if name in known and self.says("approval", name) and not self.says("stop", name):
                found.append(name)
        return found

    def has_quorum(self, roster: Roster) -> bool:
        """Whether as many take part as it needs, the member in the server role among them."""
        taking_part, server = self.list_taking_part(roster), self.proposal.server
        return len(taking_part) >= self.proposal.quorum and server in ("", *taking_part)

    def is_closed(self, own: str) -> bool:
        """Whether nothing more will happen with it at a member."""
        if self.is_withdrawn or self.says("stop", own) or self.says("end", own):
            return True
        return self.says("refusal", own) and not self.says("approval", own)


class Ledger:
    """The statements in a folder.

    Several processes of one member may use one folder.

    Args:
        folder: the folder of studies.
        own: this member's name.
        organizer: the organizer's public key.
        clock: seconds since 1970.

    Attributes:
        entries: the studies by name, in the order in which they were proposed.
    """

    def __init__(
        self, folder: Path, own: str, organizer: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder, self.own, self._organizer, self._clock = folder, own, organizer, clock
        self.entries: dict[str, Entry] = {}
        self._read: dict[Path, int] = {}
        # Threads wait here for each other as long as it takes: eight of them on a slow disk would
        # time out at the claim, which nobody else has.
        self._adding = threading.Lock()
        self.reload()

    def reload(self) -> None:
        """Read what other processes have written."""
        if not self.folder.is_dir():
            return
        found = dict(self.entries)
        for place in self.folder.iterdir():
            signed = place / SIGNED
            if not STUDY_NAME.fullmatch(place.name) or not (signed / _PROPOSAL).is_file():
                continue
            stamp = signed.stat().st_mtime_ns
            # Files are only added, and each time the folder changes.
            if self._read.get(signed) != stamp:
                found[place.name] = self._load_entry(place, found.get(place.name))
                # Within its last tick the folder may change again without another stamp.
                if time.time_ns() - stamp > _TICK:
                    self._read[signed] = stamp
        self.entries = dict(
            sorted(found.items(), key=lambda one: (one[1].proposal.time, one[1].proposal.digest))
        )

    def _load_entry(self, place: Path, known: Entry | None) -> Entry:
        path = place / SIGNED / _PROPOSAL
        if known is None:
            sealed = path.read_bytes()
            proposal = _reopen(path, sealed)
            if not isinstance(proposal, Proposal):
                raise ConfigError(f"{path} is no proposal; restore it from a copy")
            # Results and statements of a study are found by its name.
            if proposal.name != place.name:
                raise ConfigError(
                    f"{place} holds the proposal of {proposal.name}; a study's folder has the "
                    f"study's name: rename it, or move it out of {self.folder}"
                )
            known = Entry(proposal, path.stat().st_mtime, place, {}, {proposal.digest: sealed})
        words, all_sealed = dict(known.words), dict(known.sealed)
        for path in (place / SIGNED).iterdir():
            kind, _, by = path.name.partition("-")
            if kind in KINDS and NAME.fullmatch(by) and (kind, by) not in words:
                sealed = path.read_bytes()
                word = _reopen(path, sealed)
                if isinstance(word, Word):
                    words[kind, by], all_sealed[word.digest] = word, sealed
        # A new one: other threads may be reading the old.
        return Entry(known.proposal, known.came, place, words, all_sealed)

    def find(self, name: str) -> Entry:
        """Return a study by name.

        Raises:
            ConfigError: when there is none.
        """
        if name not in self.entries:
            raise ConfigError(describe_unknown("study", name, self.entries))
        return self.entries[name]

    def find_digest(self, digest: str) -> Entry | None:
        """Return a study by the digest of its proposal."""
        return next((e for e in self.entries.values() if e.proposal.digest == digest), None)

    def add(self, data: bytes, roster: Roster) -> Proposal | Word | None:
        """Check a statement and keep it; None when it is known.

        Raises:
            Refused: when it is not taken, with the reason.
            OSError: when it cannot be written.
        """
        now = self._clock()
        found = open_statement(data, roster, self._organizer, now)
        # One process at a time decides whether a name is free.
        with self._adding, claim_folder(self.folder, wait=_WAIT):
            self.reload()
            if isinstance(found, Proposal):
                known = self.entries.get(found.name)
                if known is not None and known.proposal.digest == found.digest:
                    return None
                self._check_room(found, known, roster, now)
                path = self.folder / found.name / SIGNED / _PROPOSAL
            else:
                if (entry := self.find_digest(found.proposal)) is None:
                    raise Refused("proposal", "it is about a study that is not known here")
                check_signer(found, entry.proposal)
                # What a member has said, it does not say otherwise.
                if entry.says(found.kind, found.by):
                    return None
                path = entry.folder / SIGNED / f"{name_kind(found)}-{found.by}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
            self.reload()
        return found

    def _check_room(self, found: Proposal, known: Entry | None, roster: Roster, now: float) -> None:
        """Check that a proposal may be taken.

        Raises:
            Refused: when it may not.
        """
        if known is not None:
            raise Refused(
                "name",
                f"{known.proposal.by} has proposed another study named {found.name} before; a "
                "name is used once: take another",
            )
        if now - found.time > MAX_AGE:
            raise Refused("age", f"{found.name} was proposed over {MAX_AGE / _DAY:.0f} days ago")
        roster.member(found.by)
        own = [e for e in self.entries.values() if e.proposal.by == found.by]
        if sum(not entry.is_closed(self.own) for entry in own) >= MAX_OPEN:
            raise Refused(
                "many",
                f"{found.by} has {MAX_OPEN} studies open here; the next is taken when one of them "
                "is over, withdrawn or declined",
            )
        if sum(now - entry.came < _DAY for entry in own) >= MAX_A_DAY:
            raise Refused("many", f"{found.by} has proposed {MAX_A_DAY} studies within a day")

    def list_digests(self) -> list[str]:
        """Return the names of the statements that are passed on: proposals before words."""
        now, proposals, words = self._clock(), list[str](), list[str]()
        for entry in reversed(self.entries.values()):
            if now - entry.proposal.time <= MAX_AGE:
                proposals.append(entry.proposal.digest)
                words += [word.digest for word in entry.words.values()]
        return [*proposals, *words][:MAX_LISTED]

    def find_sealed(self, digest: str) -> bytes:
        """Return a statement as it was signed; empty when it is not here."""
        for entry in self.entries.values():
            if digest in entry.sealed:
                return entry.sealed[digest]
        return b""

    def find_new(self, digests: Iterable[str]) -> list[str]:
        """Return those of some statements that are not here."""
        known = set().union(*(entry.sealed for entry in self.entries.values()))
        return [digest for digest in digests if digest not in known]


def _reopen(path: Path, sealed: bytes) -> Proposal | Word:
    try:
        return reopen_statement(sealed)
    except Refused as error:
        raise ConfigError(f"{path} is damaged ({error}); restore it from a copy") from None
