"""Statements: what members of a federation sign about studies, and how untrusted ones are read.

A statement is a member's signature and then a text in canonical JSON: a proposal of a study, or
what somebody says about one (an approval, a withdrawal, ...). It is named by the digest of its
text, so that a second signature under the same text makes no second statement. Of a text nothing
but who signed it is read before its signature is checked, and no module that a study names is
imported here.
"""

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from coterie._util.toml import parse_toml
from coterie.errors import ConfigError, first_line
from coterie.net import identity
from coterie.net.payload import Refused, escape_text, parse_strict_json
from coterie.net.roster import MAX_ALL_TO_ALL, Roster
from coterie.net.wire import NAME, SIGNATURE, canonical_json
from coterie.studies import config
from coterie.studies.definition import StudyConfig

# It precedes what is signed, so that a signature of another kind of text never counts here.
_DOMAIN = b"coterie statement 1\n"
MAX_STUDY = 64 * 1024
"""Bytes of the text of a study."""
MAX_STATEMENT = 512 * 1024
"""Bytes of a statement: a thousand members, and how a table is read, are in a proposal too."""
DIGEST = re.compile(r"[0-9a-f]{64}")
STUDY_RUN = re.compile(r"study-[0-9a-f]{32}")
"""The id of a study's run: see `Proposal.run`."""
STUDY_NAME = re.compile(r"[a-z0-9-]{1,40}")
ROLE = re.compile(r"[A-Za-z0-9_-]{1,63}")
KINDS = ("approval", "refusal", "withdrawal", "stop", "end")
"""What members say about a proposal: withdrawals are the proposer's, all others any member's."""
_MAX_TABLE = 64 * 1024  # bytes of how a table is read
_AHEAD = 24 * 3600.0  # seconds by which a clock may be wrong


@dataclass(frozen=True)
class Proposal:
    """A study that a member proposes.

    Args:
        federation: the federation's name.
        organizer: its organizer's public key.
        by: the proposer.
        time: when, in seconds since 1970.
        name: the study's name, of the characters a-z, 0-9 and -.
        study: the study as the text of a study file: one method, one seed, extending nothing.
        role: the role of the data that it needs.
        features: shape of one input.
        classes: number of classes; 0 for a regression.
        outputs: number of outputs of the model.
        table: how a table is read, as `TableSchema.list_coding` has it; empty where it is none.
        members: who may take part; a member's client has the number of its place.
        quorum: how many members must have approved, and be there, before it begins.
        server: the member in the server role; "" for peer-to-peer methods.
    """

    federation: str
    organizer: str
    by: str
    time: float
    name: str
    study: str
    role: str
    features: list
    classes: int
    outputs: int
    table: dict
    members: list
    quorum: int
    server: str

    @property
    def digest(self) -> str:
        """The name of this statement."""
        return digest_of(make_text(self))

    @property
    def run(self) -> str:
        """The id of its run, which every message of it is bound to, and with it to this text."""
        return f"study-{self.digest[:32]}"


@dataclass(frozen=True)
class Word:
    """What a member says about a proposal.

    Args:
        federation: the federation's name.
        organizer: its organizer's public key.
        by: who says it.
        time: when, in seconds since 1970.
        kind: one of `KINDS`.
        proposal: the digest of the proposal.
    """

    federation: str
    organizer: str
    by: str
    time: float
    kind: str
    proposal: str

    @property
    def digest(self) -> str:
        """The name of this statement."""
        return digest_of(make_text(self))


def make_text(statement: Proposal | Word) -> bytes:
    """Return the text of a statement, which is signed."""
    what = "proposal" if isinstance(statement, Proposal) else "word"
    return canonical_json({"statement": what, **asdict(statement)})


def digest_of(text: bytes) -> str:
    """Return the name of a statement: the digest of its text."""
    return hashlib.sha256(_DOMAIN + text).hexdigest()


def seal(statement: Proposal | Word, sign: Callable[[bytes], bytes]) -> bytes:
    """Return a statement as signed bytes.

    Raises:
        ConfigError: when it is larger than what members take.
    """
    text = make_text(statement)
    if len(text) + SIGNATURE > MAX_STATEMENT:
        raise ConfigError(
            f"the proposal has {len(text)} bytes; expected at most {MAX_STATEMENT - SIGNATURE}"
        )
    return sign(_DOMAIN + text) + text


def open_statement(data: bytes, roster: Roster, organizer: str, now: float) -> Proposal | Word:
    """Read a statement of a member and check it.

    Args:
        data: the signed bytes.
        roster: the members, and their keys.
        organizer: the organizer's public key.
        now: the time, in seconds since 1970.

    Raises:
        Refused: when it is no statement of a member of this federation, or not well-formed.
    """
    signature, text, document = _split(data)
    by, keys = document.get("by"), {member.name: member.key for member in roster.members}
    if not isinstance(by, str) or by not in keys:
        raise Refused("signer", f"{escape_text(by, 64)} is not on the roster")
    key = identity.decode_public_key(keys[by])
    if not identity.verify(key, signature, _DOMAIN + text):
        raise Refused("signature", f"it is not signed by {by}'s key of the roster")
    made = _make_statement(document, text)
    if (made.federation, made.organizer) != (roster.run, organizer):
        raise Refused("federation", "it is of another federation")
    if not 0 <= made.time <= now + _AHEAD:
        raise Refused("time", f"{made.time:.0f} s since 1970; it is {now:.0f} by this clock")
    if isinstance(made, Proposal):
        _check_proposal(made)
    elif made.kind not in KINDS or not DIGEST.fullmatch(made.proposal):
        raise Refused("statement", "it is of no known kind, or about no proposal")
    return made


def reopen_statement(data: bytes) -> Proposal | Word:
    """Read a statement that `open_statement` has accepted before, of whatever key.

    Raises:
        Refused: when it is damaged.
    """
    _, text, document = _split(data)
    return _make_statement(document, text)


def _split(data: bytes) -> tuple[bytes, bytes, dict[str, Any]]:
    """Return the signature, the text and what is in it, unchecked."""
    if len(data) > MAX_STATEMENT:
        raise Refused("size", f"{len(data)} bytes; expected at most {MAX_STATEMENT}")
    text = data[SIGNATURE:]
    document = parse_strict_json(text, "statement")
    if not isinstance(document, dict):
        raise Refused("statement", "it is no table")
    return data[:SIGNATURE], text, document


def _make_statement(document: dict[str, Any], text: bytes) -> Proposal | Word:
    """Return the statement of a document: of exactly its fields and types, in its one spelling."""
    kinds: dict[Any, type[Proposal] | type[Word]] = {"proposal": Proposal, "word": Word}
    kind = kinds.get(what) if isinstance(what := document.pop("statement", None), str) else None
    if kind is None or set(document) != {field.name for field in fields(kind)}:
        raise Refused("statement", "it has not the keys of a statement")
    for field in fields(kind):
        value = document[field.name]
        # The exact type: a bool is an int. A whole number of seconds may come without a point.
        whole = field.type is float and type(value) is int
        if type(value) is not field.type and not whole:
            raise Refused("statement", f"{field.name} is not of type {field.type}")
    made = kind(**document)
    try:
        same = make_text(made) == text
    except (ValueError, RecursionError):  # a number that is none; tables nested too deeply
        same = False
    # Another spelling of the same document would be another statement.
    if not same:
        raise Refused("statement", "it is not in canonical JSON")
    return made


def _check_proposal(found: Proposal) -> None:
    """Check the fields of a proposal.

    Raises:
        Refused: with the first that is wrong.
    """
    if not STUDY_NAME.fullmatch(found.name):
        raise Refused(
            "name", f"a study named {found.name[:80]!r}; expected 1 to 40 of a-z, 0-9 and -"
        )
    if not ROLE.fullmatch(found.role):
        raise Refused("role", f"data named {found.role[:80]!r}; expected a role such as heart")
    if len(found.study.encode()) > MAX_STUDY:
        raise Refused("size", f"a study of over {MAX_STUDY} bytes")
    names = found.members
    known = all(isinstance(name, str) and NAME.fullmatch(name) for name in names)
    if not known or not 2 <= len(names) <= MAX_ALL_TO_ALL or len(set(names)) < len(names):
        raise Refused("members", f"expected 2 to {MAX_ALL_TO_ALL} names, each once")
    if not 2 <= found.quorum <= len(names):
        raise Refused("quorum", f"{found.quorum} of {len(names)} members; expected 2 or more")
    if found.server and found.server not in names:
        raise Refused("server", "the server is none of the members")
    sizes = [*found.features, found.outputs]
    # A model is made from them: no larger than any that is trained.
    if not all(type(size) is int and 1 <= size <= 1 << 24 for size in sizes):
        raise Refused("features", "expected whole numbers, 1 or more")
    if len(found.features) > 8 or not 0 <= found.classes <= 1 << 24:
        raise Refused("features", "expected at most 8 of them, and a number of classes")
    if len(canonical_json(found.table)) > _MAX_TABLE:
        raise Refused("size", f"columns in over {_MAX_TABLE} bytes")
    try:
        study = parse_proposed(found.study)
    # Study files are made for one's own use: no fault in reading one may end who reads another's.
    except Exception as error:
        raise Refused("study", first_line(error)) from None
    if study.name != found.name:
        raise Refused("name", f"its file is of the study {study.name[:80]!r}")


def parse_proposed(text: str, *, to_run: bool = False) -> StudyConfig:
    """Read the study of a proposal: one run, complete in itself.

    Args:
        text: the study file.
        to_run: whether modules that it names are imported; only after a person has approved them.

    Raises:
        ConfigError: when it is none.
    """
    try:
        table = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the study is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError("the study is nested too deeply") from None
    for key in ("extends", "use_methods", "unset"):
        if key in table:
            raise ConfigError(f"the study has {key}; expected one that is complete in itself")
    study = config.parse_study(table, to_run=to_run)
    if len(study.methods) != 1 or len(study.seeds) != 1 or study.sweep or study.tune:
        raise ConfigError("the study has several runs; expected one method and one seed")
    return study


def find_code(text: str) -> list[str]:
    """Return what a study would load from a member's machine: import paths, models, files.

    Every text with a ":", a slash or a backslash counts, and every package: too many rather than
    too few, because what is listed here no rule approves.
    """
    found = []
    for path, value in _iterate_texts("", parse_toml(text)):
        last = path.rpartition(".")[2]
        if last in ("description", "paper", "label"):
            continue
        if any(sign in value for sign in ":/\\") or last == "package":
            found.append(f"{path} = {value}")
    return [escape_text(line, 160) for line in dict.fromkeys(found)]


def _iterate_texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield all texts in nested tables, keys included, with the dotted path to each."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield f"{path}.key", key
            yield from _iterate_texts(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _iterate_texts(path, inner)
    elif isinstance(value, str):
        yield path, value


def check_signer(word: Word, proposal: Proposal) -> None:
    """Check that a word about a proposal is one that its signer may say.

    Raises:
        Refused: when it is not.
    """
    allowed = [proposal.by] if word.kind == "withdrawal" else proposal.members
    if word.by not in allowed:
        raise Refused("signer", f"{word.by} has no say in it")


def name_kind(statement: Proposal | Word) -> str:
    """Return the kind of a statement as one word."""
    return "proposal" if isinstance(statement, Proposal) else statement.kind
