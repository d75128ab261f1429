"""Attacks on a running network of three nodes with mutual TLS; honest members go on unharmed."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import zenoh

from coterie.errors import TransportError
from coterie.exchange.base import Message
from coterie.net import identity, local, setup
from coterie.net.exchange import RemoteExchange
from coterie.net.identity import Identity
from coterie.net.post import Post, Terms
from coterie.net.roster import Roster
from coterie.net.wire import Address, canonical_json, seal_parcel
from coterie.net.zenoh_transport import ZenohTransport, build_config, key_prefix
from coterie.rng import Rng

pytestmark = pytest.mark.e2e
SECONDS = 4.0


class Honest:
    """Nodes n0 and n1 of a roster of three; n2's credentials are at an attacker's disposal."""

    def __init__(self, folder: Path, port: int) -> None:
        who, _ = local.make_members([[0], [1], [2]], port=port)
        self.folder, self.port = folder, port
        self.roster, self.people = local.create_credentials(folder, who)
        self.told: list[dict] = []
        self.transports, self.exchanges = [], []
        for own in self.people[:2]:
            transport = ZenohTransport(
                self.roster,
                own.name,
                own,
                log=lambda event, **details: self.told.append({"event": event, **details}),
            )
            self.transports.append(transport)
            terms = Terms(deadline=SECONDS, redraws=0)
            self.exchanges.append(
                RemoteExchange(Post(transport, self.roster, own.sign, terms=terms))
            )
        self.round = 0

    def close(self) -> None:
        for exchange, transport in zip(self.exchanges, self.transports, strict=True):
            exchange.post.close()
            transport.close()

    def exchange(self, *peers: int, seconds: float = SECONDS) -> torch.Tensor:
        """Let both honest nodes publish in a new round and n0 read some peers; return what arrived."""
        self.round += 1
        a, b = self.exchanges
        for node in (a, b):
            node.post.terms = replace(node.post.terms, deadline=seconds)
            node.begin_round(Rng(0).at_round(self.round))
            node.set_active(node.ids)
        b.pull(message(1), torch.full((1, 0), -1))
        return a.pull(message(0), torch.tensor([list(peers)])).mask[0]


def message(client: int) -> Message:
    return Message(torch.full((1, 4), float(client)), {"samples": torch.ones(1)})


@pytest.fixture(scope="module")
def honest(tmp_path_factory, ports) -> Iterator[Honest]:
    network = Honest(tmp_path_factory.mktemp("honest"), ports())
    try:
        until(lambda: bool(network.exchange(1)[0]))
        yield network
        assert network.exchange(1).tolist() == [True], "honest members are unharmed"
    finally:
        network.close()


def test_an_address_in_use_is_named(honest):
    """A second node with the same address ends with one line, and the first goes on."""
    with pytest.raises(
        TransportError,
        match=rf"cannot listen on tls/127.0.0.1:{honest.port}: it is in use: this node runs",
    ):
        ZenohTransport(honest.roster, "n0", honest.people[0])


def until(condition: Callable[[], bool], tries: int = 50) -> None:
    pause = threading.Event()
    for _ in range(tries):
        if condition():
            return
        pause.wait(0.1)
    raise AssertionError("it did not come to be")


@contextmanager
def attacker(roster: Roster, name: str, own: Identity, *, port: int) -> Iterator[zenoh.Session]:
    """A session with some credentials that keeps to no rule; it dials everybody."""
    config = build_config(roster, roster.members[-1].name, own, listen=f"127.0.0.1:{port}")
    config["connect"]["endpoints"] = [f"tls/{m.address}" for m in roster.members[:2]]
    del config["access_control"], config["low_pass_filter"]
    with zenoh.open(zenoh.Config.from_json5(json.dumps(config))) as session:
        yield session


def links(session: zenoh.Session) -> int:
    return len(session.info.transports())


def made(
    folder: Path,
    name: str,
    *,
    authority: Path | None = None,
    days: float = 1.0,
    now: datetime | None = None,
):
    """Credentials of a name, by an authority of one's own or by the run's."""
    if authority is None:
        identity.make_authority(folder, "local", days=10, now=now)
        authority = folder
    request = identity.make_request(folder, name, "127.0.0.1:1")
    identity.sign_request(authority, request, name, "127.0.0.1:1", days=days, now=now)
    own = Identity.load(
        folder / f"{name}.key", authority / "members" / f"{name}.pem", authority / "ca.pem", now=now
    )
    return own


def answering(session: zenoh.Session, key: str, reply: Callable[[Any], None]) -> Any:
    return session.declare_queryable(key, reply)


@pytest.mark.parametrize("name", ["mallory", "n2"])
def test_certificates_of_another_authority_get_no_link(honest, tmp_path, name):
    """Neither under a name of one's own nor under a member's."""
    own = made(tmp_path, name)
    with attacker(honest.roster, name, own, port=honest.port + 50) as session:
        threading.Event().wait(1.5)
        assert links(session) == 0
        assert list(session.get(f"{key_prefix('local')}/n0/head/{name}?n=1", timeout=1.0)) == []


def test_a_certificate_that_is_over_gets_no_link(honest, tmp_path):
    """Issued by the right authority, for n2, and ended an hour ago."""
    past = datetime.now(UTC) - timedelta(hours=25)
    (tmp_path / "members").mkdir()
    for name in ("ca.key", "ca.pem"):
        (tmp_path / name).write_bytes((honest.folder / name).read_bytes())
    (tmp_path / "ca.key").chmod(0o600)
    request = identity.make_request(tmp_path, "n2", "127.0.0.1:1")
    identity.sign_request(tmp_path, request, "n2", "127.0.0.1:1", days=1.0, now=past)
    own = replace(
        honest.people[2],
        key_file=tmp_path / "n2.key",
        certificate_file=tmp_path / "members" / "n2.pem",
    )
    with attacker(honest.roster, "n2", own, port=honest.port + 51) as session:
        threading.Event().wait(1.5)
        assert links(session) == 0


def test_a_valid_certificate_that_is_not_on_the_roster_is_of_no_use(honest, tmp_path):
    """It has links, and neither its questions nor its answers nor its tokens come through."""
    (tmp_path / "members").mkdir()
    for name in ("ca.key", "ca.pem"):
        (tmp_path / name).write_bytes((honest.folder / name).read_bytes())
    (tmp_path / "ca.key").chmod(0o600)
    own = made(tmp_path, "mallory", authority=tmp_path)
    base = key_prefix("local")
    with attacker(honest.roster, "mallory", own, port=honest.port + 52) as session:
        until(lambda: links(session) == 2)
        for key in (
            f"{base}/n0/model/mallory?r={honest.round};x=0;c=0;w=1",
            f"{base}/n0/model/n2?r=1;x=0;c=0;w=1",
        ):
            assert list(session.get(key, timeout=1.0)) == []
        asked: list = []
        queryable = answering(session, f"{base}/n2/**", lambda query: asked.append(query))
        token = session.liveliness().declare_token(f"{base}/n2/alive")
        threading.Event().wait(0.5)
        assert "n2" not in honest.transports[0].alive_members()
        assert honest.exchange(2, seconds=1.0).tolist() == [False]
        assert asked == []
        queryable.undeclare()
        token.undeclare()


def test_a_member_cannot_answer_announce_or_ask_under_anothers_name(honest):
    """n2's certificate is good for n2's keys only: n1's place stays empty while n1 is cut off."""
    base = key_prefix("local")
    asked: list = []
    with attacker(honest.roster, "n2", honest.people[2], port=honest.port + 53) as session:
        until(lambda: links(session) == 2)
        queryable = answering(session, f"{base}/n1/**", lambda query: asked.append(query))
        threading.Event().wait(0.5)
        assert honest.exchange(1).tolist() == [True], "n1 itself answers"
        token = session.liveliness().declare_token(f"{base}/n1/alive")
        assert asked == []
        r = honest.round
        assert list(session.get(f"{base}/n0/model/n1?r={r};x=0;c=0;w=1", timeout=1.0)) == []
        everybody = session.get(f"{base}/*/model/n2?r={r};x=0;c=0;w=1", timeout=1.0)
        assert all(reply.ok is None for reply in everybody), "no wildcards"
        mine = list(session.get(f"{base}/n0/model/n2?r={r};x=0;c=0;w=1", timeout=2.0))
        assert len(mine) == 1, "under its own name it is served"
        queryable.undeclare()
        token.undeclare()


GOOD = {"params": torch.zeros(4), "field.samples": torch.tensor(1.0)}


class Liar:
    """n2, a member in good standing that answers whatever it likes; `n0` reads it."""

    def __init__(self, honest: Honest) -> None:
        self.honest, self.parts = honest, list[tuple[bytes, bytes]]()

    def answer(self, query: zenoh.Query) -> None:
        with query:
            for attachment, chunk in self.parts:
                query.reply(query.key_expr, chunk, attachment=attachment)

    def sealed(self, tensors: dict[str, torch.Tensor], **changes: Any) -> list[tuple[bytes, bytes]]:
        """A message as the format has it, for the round to come, with some parts changed."""
        options = {
            "run": "local", "peer": "n2", "inc": 1, "address": Address(self.honest.round + 1, 0, 2), "schema": "",
            "sign": self.honest.people[2].sign, **changes,
        }  # fmt: skip
        return [
            (attachment, bytes(chunk))
            for attachment, chunk in seal_parcel(tensors, **options).iterate_chunks()
        ]

    def signed(self, payload: bytes) -> list[tuple[bytes, bytes]]:
        """Any bytes as the payload of a message that is in order otherwise, signed by n2."""
        ((attachment, _),) = self.sealed(GOOD)
        manifest = {
            **json.loads(attachment[68:]), "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()
        }  # fmt: skip
        text = canonical_json(manifest)
        return [
            (bytes(4) + self.honest.people[2].sign(b"coterie manifest 1\n" + text) + text, payload)
        ]

    def read(self, parts: list[tuple[bytes, bytes]]) -> str:
        """Let n0 read n2 and n1; return why n2's message was not used ("" when it was). n1's always is."""
        self.parts = parts
        traffic = self.honest.exchanges[0].post.traffic
        traffic.missing.clear()
        mine, others = self.honest.exchange(2, 1).tolist()
        assert others, "an honest peer is unharmed"
        assert mine == (not traffic.missing)
        return next(iter(traffic.missing), "")

    def check_refused(self, parts: list[tuple[bytes, bytes]], code: str) -> None:
        """The message is not used, and the log says whose it was and why."""
        self.honest.told.clear()
        assert self.read(parts) == f"refused:{code}"
        (told,) = [event for event in self.honest.told if event["event"] == "refused"]
        assert (told["peer"], told["code"], told["level"]) == ("n2", code, "warning")


@pytest.fixture(scope="module")
def liar(honest: Honest) -> Iterator[Liar]:
    made = Liar(honest)
    with attacker(honest.roster, "n2", honest.people[2], port=honest.port + 54) as session:
        until(lambda: links(session) == 2)
        queryable = session.declare_queryable(f"{key_prefix('local')}/n2/**", made.answer)
        until(lambda: made.read(made.sealed(GOOD)) == "")
        yield made
        assert made.read(made.sealed(GOOD)) == "", "what is in order is read, now as before"
        queryable.undeclare()


def with_header(header: str, data: bytes = bytes(20)) -> bytes:
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


HEADER = (
    '"params":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
    '"field.samples":{"dtype":"F32","shape":[],"data_offsets":[16,20]}'
)


def test_a_replayed_manifest_is_refused(liar):
    """The message of an earlier round, which n2 did sign; of another run; and of an incarnation that has been."""
    liar.check_refused(liar.sealed(GOOD, address=Address(liar.honest.round, 0, 2)), "address")
    liar.check_refused(liar.sealed(GOOD, run="other"), "run")
    assert liar.read(liar.sealed(GOOD, inc=1)) == ""
    liar.check_refused(liar.sealed(GOOD, inc=0), "replay")


def test_a_message_under_anothers_name_or_signature_is_refused(liar):
    liar.check_refused(liar.sealed(GOOD, peer="n1"), "sender")
    liar.check_refused(liar.sealed(GOOD, sign=liar.honest.people[1].sign), "signature")


def test_another_model_is_refused(liar):
    liar.check_refused(liar.sealed(GOOD, schema="6" * 64), "schema")


def test_a_hostile_pickle_is_refused_and_never_loaded(liar, tmp_path):
    """A pickle that would make a file, bare and properly signed; nothing is made."""
    mark = tmp_path / "executed"
    hostile = b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    liar.check_refused([(bytes(4), hostile)], "signature")
    liar.check_refused(liar.signed(hostile), "header")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (with_header("{" + HEADER + "}")[:-4], "layout"),
        (with_header("{" + HEADER.replace("[16,20]", "[0,4]") + "}"), "layout"),
        (with_header("{" + HEADER.replace("[4]", "[-4]") + "}"), "header"),
        (with_header("{" + HEADER + "}" + "x" * 9), "header"),
        (b"\xff" * 40, "header"),
        (with_header("[" * 5000), "header"),
    ],
    ids=[
        "truncated",
        "overlapping",
        "a negative shape",
        "no JSON",
        "an endless header",
        "endless nesting",
    ],
)
def test_malformed_safetensors_are_refused(liar, payload, code):
    liar.check_refused(liar.signed(payload), code)


def test_a_model_with_nan_or_infinity_is_refused(liar):
    for bad in (float("nan"), float("inf")):
        numbers = torch.tensor([0.0, bad, 0.0, 0.0, 1.0]).numpy().tobytes()
        liar.check_refused(liar.signed(with_header("{" + HEADER + "}", numbers)), "not_finite")


def test_a_model_of_the_wrong_shape_or_type_is_refused(liar):
    liar.check_refused(liar.sealed({**GOOD, "params": torch.zeros(5)}), "shape")
    liar.check_refused(liar.sealed({**GOOD, "params": torch.zeros(3)}), "shape")
    liar.check_refused(liar.sealed({**GOOD, "params": torch.zeros(2, 2)}), "shape")
    liar.check_refused(liar.sealed({**GOOD, "params": torch.zeros(2).double()}), "dtype")
    liar.check_refused(liar.sealed({"params": torch.zeros(4)}), "names")


def test_duplicate_keys_are_refused(liar):
    """In the payload's header and in the signed manifest."""
    liar.check_refused(liar.signed(with_header("{" + HEADER + "," + HEADER + "}")), "duplicate_key")
    text = b'{"v":1,"v":1}'
    signature = liar.honest.people[2].sign(b"coterie manifest 1\n" + text)
    liar.check_refused([(bytes(4) + signature + text, b"")], "duplicate_key")


def test_an_oversize_reply_is_dropped(liar):
    """Two megabytes in one reply never arrive; a message that says it is a gigabyte is refused before it is kept."""
    assert liar.read([(bytes(4), bytes(2 << 20))]) == "unreachable"
    ((attachment, _),) = liar.sealed(GOOD)
    text = canonical_json({**json.loads(attachment[68:]), "bytes": 1 << 30})
    signature = liar.honest.people[2].sign(b"coterie manifest 1\n" + text)
    liar.check_refused([(bytes(4) + signature + text, bytes(1 << 19))], "size")


def test_a_reply_that_ends_early_is_not_taken_for_a_message(liar):
    """Nothing at all, chunks out of order, and a payload that is not what the manifest says."""
    assert liar.read([]) == "unreachable"
    liar.check_refused([(b"\0\0\0\7", b"x")], "chunk")
    ((attachment, chunk),) = liar.sealed(GOOD)
    liar.check_refused([(attachment, chunk[:-1] + b"x")], "digest")


def test_an_oversize_question_never_reaches_the_node(honest):
    """65 kB of question: the filter drops it; the next one of normal size is answered."""
    base = key_prefix("local")
    with attacker(honest.roster, "n2", honest.people[2], port=honest.port + 55) as session:
        until(lambda: links(session) == 2)
        key = f"{base}/n0/model/n2?r={honest.round};x=0;c=0;w=1"
        assert list(session.get(key, payload=bytes(1 << 20), timeout=1.0)) == []
        assert len(list(session.get(key, timeout=2.0))) == 1


def test_a_flood_of_questions_leaves_the_node_answering_others(honest):
    """Two hundred open questions by one member: eight are held, the rest are told that there are too many."""
    base = key_prefix("local")
    with attacker(honest.roster, "n2", honest.people[2], port=honest.port + 56) as session:
        until(lambda: links(session) == 2)
        open_ = [
            session.get(f"{base}/n0/model/n2?r={honest.round + 50 + i};x=0;c=0;w=3", timeout=4.0)
            for i in range(200)
        ]
        assert honest.exchange(1).tolist() == [True]
        assert honest.transports[0].outbox.current_load[1] <= 8
        codes = [
            json.loads(r.err.payload.to_bytes())["code"]
            for replies in open_
            for r in replies
            if r.err
        ]
    assert codes.count("busy") >= 190


def test_a_key_that_was_replaced_and_a_member_that_was_removed_are_refused_on_open_links(
    tmp_path, port
):
    """n2's first certificate is good until the roster names another key for it; the second until n2 is removed.

    Neither expires, and the session with its links was open before: they are closed, and new ones
    are of no use.
    """
    base = key_prefix("local")
    who, _ = local.make_members([[0], [1], [2]], port=port)
    first, people = local.create_credentials(tmp_path, who)
    held = tmp_path / "held"
    held.mkdir()
    stolen = replace(people[2], certificate_file=held / "stolen.pem", key_file=held / "stolen.key")
    (held / "stolen.pem").write_bytes(people[2].certificate_file.read_bytes())
    (held / "stolen.key").write_bytes(people[2].key_file.read_bytes())
    (held / "stolen.key").chmod(0o600)
    request = identity.make_request(tmp_path / "new", "n2", f"127.0.0.1:{port + 2}")
    second = setup.rekey_member(tmp_path, "n2", request)
    fresh = Identity.load(
        tmp_path / "new" / "n2.key", tmp_path / "members" / "n2.pem", tmp_path / "ca.pem"
    )
    third = setup.remove_member(tmp_path, "n2")
    transports = [ZenohTransport(first, own.name, own) for own in people[:2]]
    question = f"{base}/n0/head/n2?n=1"
    try:
        for transport in transports:
            transport.serve_head(lambda nonce: b"here")
        until(lambda: isinstance(transports[1].ask_head("n0", "1", 1.0), bytes))
        with attacker(first, "n2", stolen, port=port + 50) as session:
            until(lambda: links(session) == 2)
            until(lambda: len(list(session.get(question, timeout=1.0))) == 1)
            for transport in transports:
                transport.use_roster(second)
            until(lambda: isinstance(transports[1].ask_head("n0", "1", 1.0), bytes))
            until(lambda: links(session) >= 1)
            threading.Event().wait(1.5)
            assert list(session.get(question, timeout=1.0)) == []
            asked: list = []
            queryable = answering(session, f"{base}/n2/**", lambda query: asked.append(query))
            assert not isinstance(transports[0].ask_head("n2", "1", 1.0), bytes)
            assert asked == []
            queryable.undeclare()
        with attacker(second, "n2", fresh, port=port + 51) as session:
            until(lambda: len(list(session.get(question, timeout=1.0))) == 1)
            for transport in transports:
                transport.use_roster(third)
            until(lambda: isinstance(transports[1].ask_head("n0", "1", 1.0), bytes))
            threading.Event().wait(1.5)
            assert list(session.get(question, timeout=1.0)) == []
    finally:
        for transport in transports:
            transport.close()
