"""Heads: a node's signed state, and the check that all nodes run the same study."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from coterie._util.mappings import drop_empty, drop_keys, prefix_keys
from coterie.data.federation import Federation
from coterie.data.schema import TableSchema
from coterie.errors import PeerMismatch
from coterie.methods.base import Method
from coterie.methods.registry import all_settings
from coterie.models.layout import Layout
from coterie.net.payload import Refused, escape_text, parse_strict_json
from coterie.net.roster import Roster
from coterie.net.wire import MAX_HEAD, NAME, SIGNATURE, VERSION, canonical_json
from coterie.runtime.settings import Settings

# It precedes what is signed, so that a signature of another kind of text never counts here.
_DOMAIN = b"coterie head 1\n"
# Each node chooses these for itself: they change its speed and its files, not its results.
_OWN_AFFAIR = (
    "engine",
    "block",
    "cuda_graphs",
    "device",
    "checkpoint_seconds",
    "eval_every",
    "record_similarities",
)
_OPTIONAL = (
    "shared",
    "output",
    "similarity_on",
    "acceptance",
    "secure_aggregation",
    "attacks",
    "portable",
    "time",
)  # unset, they say what rosters that do not know them say
FROZEN = "model.frozen"
"""The setting that names the frozen weights; it is in the model's hash, not in the study's."""
GIVEN = "model.given weights"
"""The setting that names the first weights that no seed draws; compared between members."""
PACE = "pace"
"""The setting by which nodes wait for each other or do not; "common" where it is not named."""
TABLE = "table."
"""What the settings begin with that say how a node reads its own table."""
# Bytes of how a table is read. With a thousand names of members and what else is in it, a head
# stays below its limit.
_MAX_TABLE = 32 * 1024
STATES = ("starting", "running", "done")


@dataclass(frozen=True)
class Head:
    """The state of a node.

    Args:
        run: the run's id.
        peer: the answering node.
        inc: its incarnation, 0 to 2^53 - 1.
        nonce: the asker's, so that an old answer cannot be replayed.
        round: the round it is in; -1 for the warm-up.
        state: "starting", "running" or "done".
        protocol: version of the wire format.
        study: hash of `settings`.
        schema: hash of the model's tensors.
        roster: version of its roster.
        time: its clock, in seconds since 1970.
        met: the members that answered at its start.
        settings: everything that must be equal on all nodes, as plain values.
    """

    run: str
    peer: str
    inc: int
    nonce: str
    round: int
    state: str
    protocol: int
    study: str
    schema: str
    roster: int
    time: float
    met: list
    settings: dict

    def seal(self, sign: Callable[[bytes], bytes]) -> bytes:
        """Return the head as signed bytes."""
        text = canonical_json(asdict(self))
        return sign(_DOMAIN + text) + text


def parse_head(
    data: bytes, verify: Callable[[bytes, bytes], bool], *, run: str, peer: str, nonce: str
) -> Head:
    """Read a head and check that it is this member's and fresh.

    Raises:
        Refused: when it is not.
    """
    signature, text = data[:SIGNATURE], data[SIGNATURE:]
    # The length first: nothing is hashed for a text that is too long.
    if len(text) > MAX_HEAD:
        raise Refused("head", f"{len(text)} bytes; expected at most {MAX_HEAD}")
    # Nothing of the text is interpreted before its signature is checked.
    if not verify(signature, _DOMAIN + text):
        raise Refused("signature", f"the head is not signed by {peer}'s key of the roster")
    document = parse_strict_json(text, "head")
    if not isinstance(document, dict) or set(document) != {f.name for f in fields(Head)}:
        raise Refused("head", "it has not the keys of a head")
    for field in fields(Head):
        # The exact type: a bool is an int for `isinstance`.
        if type(document[field.name]) is not field.type:
            raise Refused("head", f"{field.name} is not of type {field.type}")
    head = Head(**document)
    if (head.run, head.peer, head.nonce) != (run, peer, nonce):
        raise Refused(
            "head", f"it is of {head.peer[:64]} in run {head.run[:64]}, or answers another question"
        )
    if head.state not in STATES or not -1 <= head.round < 1 << 31:
        raise Refused("head", f"state {head.state[:20]!r} in round {head.round}")
    # Numbers as in a manifest: they are compared, logged and written down.
    counts = (head.inc, head.roster, head.protocol)
    if not all(0 <= number < 1 << 53 for number in counts) or not 0 <= head.time < 1 << 40:
        raise Refused("head", "a number is out of range")
    if not all(isinstance(name, str) and NAME.fullmatch(name) for name in head.met):
        raise Refused("head", "met is not a list of names")
    if not all(map(_is_plain, head.settings.values())):
        raise Refused("head", "a setting is neither a text nor a number nor true or false")
    return head


def _is_plain(value: Any) -> bool:
    """Whether a setting is a plain value; whole numbers are below 2^53, for any JSON reader."""
    if type(value) is int:
        return abs(value) < 1 << 53
    return value is None or isinstance(value, str | bool | float)


def settings_of(
    method: Method, settings: Settings, seed: int, model: str, population: int
) -> dict[str, Any]:
    """Return everything that must be equal on all nodes of a run, as a flat table of plain values.

    Args:
        method: the method with its hyperparameters.
        settings: the settings of the run, without the ones that only change the speed or one
            node's files.
        seed: the seed of the run.
        model: the model, in words.
        population: number of clients.
    """
    out: dict[str, Any] = {
        "method": method.kind,
        "seed": seed,
        "model": model,
        "population": population,
    }
    out |= _flatten("method.", all_settings(method))
    own = {k: v for k, v in settings.to_identity().items() if v or k not in _OPTIONAL}
    if settings.new_client_others == "frozen":  # younger than rosters that are about
        del own["new_client_others"]
    out |= drop_keys(_flatten("", own), _OWN_AFFAIR)
    return out


def _flatten(prefix: str, table: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            out |= _flatten(f"{prefix}{key}.", value)
        else:
            # Other values, such as tuples, become text: the hash needs plain JSON.
            out[prefix + key] = (
                value if isinstance(value, str | int | float | bool | None) else str(value)
            )
    return out


def study_hash(settings: Mapping[str, Any]) -> str:
    """Return the hash of the settings that must be equal on all nodes."""
    # These three have checks of their own, which say more than that two hashes differ.
    apart = {FROZEN, GIVEN, *_select_common(settings, TABLE)}
    return hashlib.sha256(canonical_json(drop_keys(settings, apart))).hexdigest()


def with_frozen(settings: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return settings that say what the model's frozen weights are, where it has any."""
    return {**settings, FROZEN: layout.frozen_digest[:16]} if layout.frozen else settings


def with_given(settings: dict[str, Any], digest: str) -> dict[str, Any]:
    """Return settings that name the first weights that no seed draws, where there are any."""
    return {**settings, GIVEN: digest} if digest else settings


def with_table(settings: dict[str, Any], federation: Federation) -> dict[str, Any]:
    """Return settings that say how a node's own table is read, where it has one."""
    schema = TableSchema.from_federation(federation)
    if schema is None:
        return settings
    coding = schema.list_coding()
    text = canonical_json(coding)
    if len(text) > _MAX_TABLE:
        coding = {"all columns": hashlib.sha256(text).hexdigest()}
    return settings | prefix_keys(TABLE, coding)


def _select_common(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name.startswith(key)}


def _check_common(
    roster: Roster, settings: Mapping[str, Any], others: Mapping[str, Head], own: str, key: str
) -> list[str]:
    """Return the members whose tables, or given weights, are not those of most.

    Those of most nodes hold; of equally many, those of the first on the roster.

    Args:
        roster: the roster.
        settings: of this node.
        others: the heads of the members met.
        own: the name of this node.
        key: TABLE or GIVEN: what the compared settings begin with.

    Raises:
        PeerMismatch: when it is this node that differs; it says in what.
    """
    mine = _select_common(settings, key)
    tables = {name: _select_common(head.settings, key) for name, head in others.items()}
    everyone = {**drop_empty(tables), own: mine}
    if not mine or all(table == mine for table in everyone.values()):
        return []
    order = {member.name: place for place, member in enumerate(roster.members)}
    counts = Counter(map(canonical_json, everyone.values()))
    # What most members have counts; among equals the first on the roster, as all nodes must name
    # the same one.
    first = min(
        everyone,
        key=lambda name: (-counts[canonical_json(everyone[name])], order.get(name, len(order))),
    )
    if everyone[first] == mine:
        return [name for name, table in everyone.items() if table != mine]
    difference = describe_difference(mine, everyone[first])
    if key == GIVEN:
        raise PeerMismatch(
            f"this node's model begins with other weights than that of {first}: {difference}; "
            "every node gives or loads the same file of weights"
        )
    raise PeerMismatch(
        f"this node reads its table otherwise than {first}: "
        f"{difference}; use one schema on all nodes: schema = "
        '"table.json" in data.options'
    )


def schema_hash(layout: Layout) -> str:
    """Return the hash of a model's tensor names, shapes and type, and of its frozen values."""
    slots = [[slot.name, list(slot.shape)] for slot in layout.slots]
    frozen = [layout.frozen_digest] if layout.frozen else []
    return hashlib.sha256(
        canonical_json([slots, str(layout.dtype), layout.trainable, *frozen])
    ).hexdigest()


def describe_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Name the settings in which two nodes differ, with both values; "" when there are none."""
    keys = [k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k)]
    differ = []
    for key in keys[:4]:
        there, here = escape_text(repr(theirs.get(key)), 80), escape_text(repr(mine.get(key)), 80)
        differ.append(f"{escape_text(key, 80)} is {there} there and {here} here")
    return "; ".join(differ) + ("; and more" if len(keys) > 4 else "")


def _advise(what: str, schema: str, others: Mapping[str, Head]) -> str:
    """Return what to do about a study or a model that is not the roster's."""
    if what == "study":
        return "; use the study file of the roster"
    # The study is the same: the shape of an input or the number of classes makes another model.
    alike = sum(head.schema == schema for head in others.values())
    if alike:
        return (
            f", but {alike} of {len(others)} members that answered have this node's: the organizer "
            "wrote the roster with other --features or --classes than the data have"
        )
    return (
        ": the data have other features or classes than the roster was written for; `coterie "
        "doctor` says which"
    )


def _check_pace(settings: Mapping[str, Any], others: Mapping[str, Head], own: str) -> None:
    """Check that all members met go by one pace.

    Raises:
        PeerMismatch: naming a member with another pace.
    """
    mine = settings.get(PACE, "common")
    for name, head in others.items():
        theirs = head.settings.get(PACE, "common")
        if theirs != mine:
            raise PeerMismatch(
                f"{name} has pace = {escape_text(repr(theirs), 40)} and {own or 'this node'} has "
                f"{mine!r}; all members of a run go by one pace: use one study file"
            )


def check_study(
    roster: Roster,
    settings: Mapping[str, Any],
    schema: str,
    others: Mapping[str, Head],
    own: str = "",
) -> list[str]:
    """Check this node's study and model against the roster, and return the members that differ.

    A node that differs from the roster stops; a node that meets one that differs continues without
    it. With a roster that names no study, any difference stops a node.

    Args:
        roster: the roster, signed by the organizer.
        settings: this node's, from `settings_of`.
        schema: this node's, from `schema_hash`.
        others: the heads of the members met.
        own: the name of this node.

    Raises:
        PeerMismatch: naming the settings and both values.
    """
    mine = study_hash(settings)
    # By the roster's study it is the others who differ: this node goes on without them.
    if mine != roster.study:
        _check_pace(settings, others, own)
    odd, own_form = [], (mine, schema, VERSION)
    for name, other in others.items():
        if (other.study, other.schema, other.protocol) != own_form:
            odd.append(name)
    agree = [n for n, h in others.items() if roster.study and h.study == roster.study]
    for what, found, expected in (
        ("study", mine, roster.study),
        ("model schema", schema, roster.schema),
    ):
        if expected and found != expected:
            # A member with the roster's study shows which settings differ; the hashes alone
            # cannot.
            name = next(iter(agree), "")
            text = describe_difference(settings, others[name].settings) if name else ""
            if what == "model schema" and FROZEN in settings and not text:
                raise PeerMismatch(
                    f"this node's model, whose frozen weights are {settings[FROZEN]}, is not that "
                    "of the roster of run "
                    f"{roster.run}; every node loads the same model with the same frozen weights"
                )
            raise PeerMismatch(
                f"this node has {what} {found[:16]}, the roster of run {roster.run} has "
                f"{expected[:16]}"
                + (f"; compared with {name}: {text}" if text else _advise(what, schema, others))
            )
    if odd and not roster.study:
        name = odd[0]
        text = (
            describe_difference(settings, others[name].settings)
            or f"model schema {escape_text(others[name].schema, 16)}"
        )
        raise PeerMismatch(f"{name} runs something else than {roster.run} here: {text}")
    for key in (TABLE, GIVEN):
        odd += _check_common(roster, settings, others, own, key)
    return list(dict.fromkeys(odd))
