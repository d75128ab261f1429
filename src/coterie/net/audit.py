"""Audit log: a chain of hashes of who joined and what was asked, sent, received and refused.

Every line is a JSON object with its number `n` and the SHA-256 of the line before it, `prev`. At
the end of every round the node signs the chain as it is then. So no line can be changed, removed or
added afterward without it being found, unless everything from there on is written and signed again;
what other members wrote down shows that. `auditor` checks logs, and compares those of two members.
Neither private keys nor messages are in them, only digests.
"""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from coterie import __version__
from coterie._util.lines import LineFile
from coterie._util.mappings import drop_keys, index_by_name, map_values, select_keys
from coterie.net.outbox import Missing
from coterie.net.payload import tensor_names
from coterie.net.roster import Member, Roster
from coterie.net.transport import Delivery
from coterie.net.wire import SIGNATURE, Address, Parcel, canonical_json

FILE = "audit.log"
# As long as any hash of a line, so that the field has one form in all lines.
NOTHING = "0" * 64
"""The `prev` of a chain's first line."""
# `_find_end` reads the newest file whole, at every start.
MAX_BYTES = 64 * 1024 * 1024
"""A larger file is renamed to audit-NNNNNN.log after a round; the next one continues the chain."""
FORMAT = 1
MAX_LISTED = 1000
"""Members of a roster that is written down whole. Of a larger one the log has the digest of all keys,
and a line for each member that the node meets."""
# It precedes what is signed, so that a signature of another kind of text never counts here.
_DOMAIN = b"coterie audit 1\n"
# A signature is 64 bytes, so 128 hexadecimal digits, in the last field of a line.
_SEAL = re.compile(rb',"signature":"([0-9a-f]{128})"\}$')
_TEXT = 300  # characters of a reason, which can come from others
_CUT = 1000  # characters of half a line that is written down before it is removed
# events of the log that are written down; of others, warnings are
_ALWAYS = ("peer_up", "peer_down", "roster_refused")
# said line by line, or when nothing can be written
_ELSEWHERE = ("pull", "redraw", "serve", "waiting", "disk_full")


def hash_line(line: bytes) -> str:
    """Return the hash of a line, which the next line names."""
    return hashlib.sha256(line).hexdigest()


def hash_keys(keys: Mapping[str, str]) -> str:
    """Return the digest of all members' public keys by name, which stands for a large roster."""
    return hashlib.sha256(canonical_json(dict(keys))).hexdigest()


def append_signature(line: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """Return a line with a signature of all that was in it, as its last field."""
    # Signed is the line without this field; `split_signature` restores those bytes.
    return line[:-1] + b',"signature":"' + sign(_DOMAIN + line).hex().encode() + b'"}'


def split_signature(line: bytes) -> tuple[bytes, bytes]:
    """Return the signature that `append_signature` added, empty if there is none, and its bytes."""
    found = _SEAL.search(line)
    if found is None:
        return b"", line
    return bytes.fromhex(found[1].decode()), _DOMAIN + line[: found.start()] + b"}"


def list_files(folder: Path) -> list[Path]:
    """Return the files of a folder's log, in order."""
    current = folder / FILE
    # Numbers have six digits, so the order of names is that of numbers; the current file is the
    # last.
    return [*sorted(folder.glob("audit-[0-9]*.log")), *([current] if current.exists() else [])]


class Audit:
    """The audit log of one node: a context manager that several threads may write to.

    A line that cannot be written is never left out: from then on nothing more is sent, and
    `ensure_written` raises the error.

    Args:
        folder: the node's folder; its owner has claimed it.
        node: the member's name.
        run: the run's id.
        key: the node's public key, 66 hexadecimal digits.
        sign: signs bytes with the node's key.
        max_bytes: size from which a file is put aside.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        run: str,
        key: str,
        sign: Callable[[bytes], bytes],
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.node, self.run = folder, node, run
        self._sign, self._max, self._clock = sign, max_bytes, clock
        # Reentrant: `write_once` and `end_round` hold it while they call `write_event`.
        self._lock = threading.RLock()
        self._failed: OSError | None = None
        self._closed, self._started = False, False
        self._times: dict[tuple[Any, ...], tuple[dict[str, Any], int]] = {}
        self._about = {"format": FORMAT, "run": run, "node": node, "key": key}
        self._roster: dict[str, Any] | None = None
        self._unlisted: Roster | None = None  # a roster of which only some members are written down
        self._named: set[str] = set()  # those, since the last line with a roster
        self._round = -1
        folder.mkdir(parents=True, exist_ok=True)
        self._n, self._prev = 0, NOTHING
        self._lines = self._open_newest()

    # ------------------------------------------------------------------ lines

    def _open_newest(self) -> LineFile:
        """Open the newest file at its end; remove an unfinished line, and record that in a line."""
        lines = LineFile(self.folder / FILE, 0o600)
        try:
            # A power cut can leave half a line: it goes before anything is appended to it.
            torn = lines.trim_partial_line()
            self._lines = lines
            if not self._find_end():
                # A complete line that is invalid is evidence: its file is put aside unchanged.
                text = f"the last line of {self._rotate_file().name} is none of an audit log"
                self._begin_file("broken", text=text)
            elif not self._lines.size:
                self._begin_file("file")
            if torn:
                # The removed bytes can be anything, and must fit into a line of JSON.
                text = torn[:_CUT].decode(errors="backslashreplace").replace("\0", "\\0")
                self._append_line("repaired", bytes=len(torn), sha256=hash_line(torn), cut=text)
            return self._lines
        except BaseException:
            lines.close()
            raise

    def _find_end(self) -> bool:
        """Continue from the last line's number and hash; return whether it has them."""
        for path in reversed(list_files(self.folder)):
            text = path.read_bytes()
            # The newest file is empty after a rotation: the chain goes on from the file before.
            if not text:
                continue
            # The search ends before the last newline, which belongs to the last line.
            last = text[text.rfind(b"\n", 0, len(text) - 1) + 1 :].removesuffix(b"\n")
            try:
                number = json.loads(last)["n"]
            except (ValueError, KeyError, TypeError):
                return False
            # The exact type: a bool is an int as well.
            if type(number) is not int:
                return False
            self._n, self._prev = number + 1, hash_line(last)
            return True
        return True

    def _begin_file(self, event: str, **details: Any) -> None:
        """Write the first line of a file, which says whose it is, and the roster that counts."""
        self._append_line(event, **self._about, **details)
        if self._roster is not None:
            self._append_line("roster", **self._roster)
            self._named.clear()
            self._name_member(self.node)

    def _rotate_file(self) -> Path:
        """Put the current file aside, and return where."""
        aside = [path for path in list_files(self.folder) if path.name != FILE]
        number = 1 + max((int(path.stem.removeprefix("audit-")) for path in aside), default=0)
        path = self._lines.path
        self._lines.close()
        aside_as = path.with_name(f"audit-{number:06d}.log")
        os.rename(path, aside_as)
        self._lines = LineFile(path, 0o600)
        # A renamed file is safe from a power cut only when its folder is synced.
        _sync_folder(self.folder)
        return aside_as

    def _append_line(self, event: str, **details: Any) -> None:
        """Add a line.

        Raises:
            OSError: from the system; nothing was added then.
        """
        line = {
            "n": self._n,
            "time": round(self._clock(), 3),
            "prev": self._prev,
            "event": event,
            **details,
        }
        text = json.dumps(line, separators=(",", ":"), default=str).encode()
        text = append_signature(text, self._sign) if event == "head" else text
        self._lines.append(text)
        # Counted only when the line is in the file: after an error the next line must not name it.
        self._n, self._prev = self._n + 1, hash_line(text)

    def write_event(self, event: str, **details: Any) -> bool:
        """Add a line; return whether it is there."""
        with self._lock:
            if self._failed is None and not self._closed:
                try:
                    self._append_line(event, **details)
                except OSError as error:
                    # Stored, not raised: this runs in threads that answer others. `ensure_written`
                    # raises it.
                    self._failed = error
            return self._failed is None and not self._closed

    def write_once(
        self, event: str, key: Mapping[str, Any], times: int = 1, **details: Any
    ) -> bool:
        """Add a line for the first event of a kind in a round; a line at its end counts the others.

        So nobody fills the disk from outside.

        Args:
            event: what happened.
            key: what makes it of one kind.
            times: how often.
            details: of the first.

        Returns:
            Whether it is written down.
        """
        with self._lock:
            kind = (event, *key.values())
            if kind in self._times:
                known, before = self._times[kind]
                self._times[kind] = known, before + times
                return self._failed is None
            self._times[kind] = {"of": event, **key}, 0
            return self.write_event(
                event, **key, **details, **({"times": times} if times > 1 else {})
            )

    def ensure_written(self) -> None:
        """Make sure that everything is written down so far.

        Raises:
            OSError: that with which a line could not be written.
        """
        if self._failed is not None:
            raise self._failed

    def end_round(self, round: int) -> None:
        """End a round: write the counts of repeated events, sign the chain, sync it to the disk.

        Raises:
            OSError: when a line could not be written, now or before.
        """
        with self._lock:
            # The counts come before the head, so that its signature covers them.
            for known, times in self._times.values():
                if times:
                    self.write_event("again", **known, times=times)
            self._times.clear()
            self._round = round
            self.write_event("head", run=self.run, node=self.node, round=round)
            self.ensure_written()
            # Synced before the node stores the round: no stored round is missing in the log.
            self._lines.sync()
            if self._lines.size > self._max:
                # Between rounds only: a round's lines and its head lie in one file.
                self._rotate_file()
                self._begin_file("file")

    # ------------------------------------------------------------------ what happens to a node

    def record_start(self, roster: Roster, **details: Any) -> None:
        """Write that a node starts, and with which roster.

        Args:
            roster: the roster.
            details: of the node: its incarnation, the round, the hashes of study and model.
        """
        self._started = True
        self.write_event("start", **self._about, coterie=__version__, **details)
        self.record_roster(roster)

    def record_roster(self, roster: Roster, **details: Any) -> None:
        """Write which roster counts from now on: members, keys, clients."""
        with self._lock:
            self._roster = {
                "version": roster.version,
                "issued": roster.issued,
                "server": roster.server,
            }
            self._named.clear()
            if len(roster.members) <= MAX_LISTED:
                self._unlisted = None
                members = index_by_name(roster.members)
                self._roster["members"] = map_values(_describe_member, members)
            else:
                self._unlisted = roster
                keys = {m.name: m.key for m in roster.members}
                self._roster |= {"count": len(keys), "digest": hash_keys(keys)}
            self.write_event("roster", **self._roster, **details)
            self._name_member(self.node)

    def _name_member(self, name: str) -> None:
        """Write a member's entry of a large roster, before the first line that is judged by it."""
        with self._lock:
            roster = self._unlisted
            if roster is None or name in self._named or not roster.has_member(name):
                return
            self._named.add(name)
            self.write_event("member", peer=name, **_describe_member(roster.member(name)))

    def record_join(self, peer: str, roster: Roster, **details: Any) -> None:
        """Write that a member was met: its key's fingerprint, and what its signed head says."""
        self._name_member(peer)
        self.write_event("joined", peer=peer, key=roster.member(peer).subject, **details)

    def record_answer(self, asker: str, address: Address, what: Parcel | Missing) -> bool:
        """Write what a member asked for and is about to get.

        Returns:
            Whether it may get it: what cannot be written down is not sent.
        """
        if isinstance(what, Missing):
            return self.write_once(
                "declined", {"to": asker, "reason": what.reason}, **asdict(address)
            )
        m = json.loads(what.manifest)
        # After a restart the same address is another message, of another incarnation.
        key = {"to": asker, "inc": m["inc"], **asdict(address)}
        return self.write_once(
            "sent", key, bytes=m["bytes"], sha256=m["sha256"], tensors=tensor_names(what.payload)
        )

    def record_delivery(self, peer: str, address: Address, found: Delivery | Missing) -> None:
        """Write a member's answer to this node: its signed manifest, or why there is no message."""
        if isinstance(found, Delivery):
            self._name_member(peer)
            signature, manifest = found.sealed[:SIGNATURE].hex(), found.sealed[SIGNATURE:].decode()
            about = {"manifest": manifest, "signature": signature, "tensors": sorted(found.tensors)}
            self.write_event("received", **{"from": peer}, **about)
        elif found.reason.startswith("refused:"):
            code = found.reason.removeprefix("refused:")
            self.write_once(
                "refused", {"peer": peer, "code": code}, text=found.text[:_TEXT], **asdict(address)
            )
        else:
            self.write_once("missing", {"peer": peer, "reason": found.reason}, **asdict(address))

    def record_rejections(
        self, round: int, refused: Iterable[tuple[int, int, str, int | None]]
    ) -> None:
        """Write which models the acceptance step refused in a round.

        Args:
            round: the round.
            refused: (reader, client read, its member, first round in which it is read again) of
                each.
        """
        for reader, read, peer, until in refused:
            self.write_event(
                "rejected", round=round, reader=reader, client=read, peer=peer, until=until
            )

    def record_event(self, event: str, level: str, details: Mapping[str, Any]) -> None:
        """Write an event of the node's log if it is a refusal, or a peer that comes or goes."""
        grave = level in ("warning", "error") and event not in _ELSEWHERE
        # A refused message with `about` is written by `record_delivery` already.
        if not (grave or event in _ALWAYS) or (event == "refused" and "about" in details):
            return
        key = select_keys(details, ("peer", "reason", "code", "source"))
        # The key and the number of times have a place of their own in the line.
        rest = drop_keys(details, {*key, "times"})
        for name, value in rest.items():
            if isinstance(value, str):
                rest[name] = value[:_TEXT]
        self.write_once(event, key, int(details.get("times", 1)), **rest)

    # ------------------------------------------------------------------ the end

    def __enter__(self) -> "Audit":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write why the node ends, and sign."""
        why = "in order"
        if isinstance(error, KeyboardInterrupt | SystemExit):
            why = "a signal"
        elif error is not None:
            why = f"{type(error).__name__}: {error}"[:_TEXT]
        # A start that fails ends no start before it, whose node may have been killed.
        event = "stop" if self._started else "failed_start"
        try:
            self.write_event(event, why=why)
            self.end_round(self._round)
        except OSError:
            # The error that ends the node counts more than that of its last line.
            if error is None:
                raise
        finally:
            self._closed = True
            self._lines.close()


def _describe_member(member: Member) -> dict[str, Any]:
    return {"key": member.key, "subject": member.subject, "clients": list(member.clients)}


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
