"""Attacks on a running network of three nodes with mutual TLS; honest members go on unharmed."""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from outlaw import ask, call, channel_to, frame, message, question, serve, wait_until
from tests.outbound import settle

from coterie.errors import TransportError
from coterie.exchange.base import Message
from coterie.net import identity, local, setup
from coterie.net.exchange import RemoteExchange
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.identity import Identity
from coterie.net.outbox import Missing
from coterie.net.post import Post, Terms
from coterie.net.wire import Address, canonical_json, seal_parcel
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
            transport = GrpcTransport(
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
        b.pull(row(1), torch.full((1, 0), -1))
        return a.pull(row(0), torch.tensor([list(peers)])).mask[0]


def row(client: int) -> Message:
    return Message(torch.full((1, 4), float(client)), {"samples": torch.ones(1)})


@pytest.fixture(scope="module")
def honest(tmp_path_factory, ports) -> Iterator[Honest]:
    network = Honest(tmp_path_factory.mktemp("honest"), ports())
    try:
        wait_until(lambda: bool(network.exchange(1)[0]))
        yield network
        assert network.exchange(1).tolist() == [True], "honest members are unharmed"
    finally:
        network.close()


def test_an_address_in_use_is_named(honest):
    """A second node with the same address ends with one line, and the first goes on."""
    with pytest.raises(
        TransportError,
        match=rf"cannot listen on 127.0.0.1:{honest.port}: it is taken: the node runs",
    ):
        GrpcTransport(honest.roster, "n0", honest.people[0])


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


def authority(folder: Path, honest: Honest) -> Path:
    """A copy of the run's authority, with its key."""
    (folder / "members").mkdir()
    for name in ("ca.key", "ca.pem"):
        (folder / name).write_bytes((honest.folder / name).read_bytes())
    (folder / "ca.key").chmod(0o600)
    return folder


def check_of_no_use(honest: Honest, own: Identity) -> None:
    """Nobody connects with these credentials, and nobody asks who has them at n2's address."""
    body = question("local", nonce="1")
    for member in honest.roster.members[:2]:
        found = ask(own, member, "Head", body)
        assert (found.parts, found.status) == ([], "UNAVAILABLE")
    asked: list[str] = []
    with serve(own, honest.roster.members[2].address, lambda method, body: asked.append(method)):  # type: ignore[arg-type,func-returns-value]
        assert honest.exchange(2, seconds=2.0).tolist() == [False]
    assert asked == []


@pytest.mark.parametrize("name", ["mallory", "n2"])
def test_certificates_of_another_authority_get_no_link(honest, tmp_path, name):
    """Neither under a name of one's own nor under a member's; neither to ask nor to answer."""
    check_of_no_use(honest, made(tmp_path, name))


def test_a_certificate_that_is_over_gets_no_link(honest, tmp_path):
    """Issued by the right authority, for n2, and ended an hour ago."""
    past = datetime.now(UTC) - timedelta(hours=25)
    authority(tmp_path, honest)
    request = identity.make_request(tmp_path, "n2", "127.0.0.1:1")
    identity.sign_request(tmp_path, request, "n2", "127.0.0.1:1", days=1.0, now=past)
    own = replace(
        honest.people[2],
        key_file=tmp_path / "n2.key",
        certificate_file=tmp_path / "members" / "n2.pem",
    )
    check_of_no_use(honest, own)


def test_a_valid_certificate_that_is_not_on_the_roster_is_of_no_use(honest, tmp_path):
    """It connects; its questions are refused, its presence is not noted, and nobody asks it anything."""
    own = made(tmp_path, "mallory", authority=authority(tmp_path, honest))
    honest.told.clear()
    for method, body in (
        ("Message", message("local", honest.round, 0)),
        ("Head", question("local", nonce="1")),
        ("Roster", question("local")),
        ("Presence", question("local", here=True)),
        ("Nothing", b""),
    ):
        found = ask(own, honest.roster.members[0], method, body)
        expected = "UNIMPLEMENTED" if method == "Nothing" else "PERMISSION_DENIED"
        assert (found.parts, found.status) == ([], expected)
    wait_until(lambda: any(event.get("reason") == "not_on_roster" for event in honest.told))
    asked: list[str] = []
    with serve(own, honest.roster.members[2].address, lambda method, body: asked.append(method)):  # type: ignore[arg-type,func-returns-value]
        assert honest.exchange(2, seconds=2.0).tolist() == [False]
    assert asked == []
    assert "n2" not in honest.transports[0].alive_members()


def test_a_member_cannot_answer_announce_or_ask_under_anothers_name(honest):
    """Who asks is the certificate's; who answers must have the certificate of the key that was dialed."""
    n0, people = honest.transports[0], honest.people
    asked: list[str] = []
    elsewhere = f"127.0.0.1:{honest.port + 53}"
    moved = replace(honest.roster.members[1], address=elsewhere)
    try:
        with serve(people[2], elsewhere, lambda method, body: asked.append(method)):  # type: ignore[arg-type,func-returns-value]
            n0.use_roster(replace(honest.roster, members=(
                honest.roster.members[0], moved, honest.roster.members[2])))  # fmt: skip
            assert isinstance(n0.ask_head("n1", "1", 2.0), Missing)
        assert asked == []
    finally:
        n0.use_roster(honest.roster)
    wait_until(lambda: "n1" in n0.alive_members())
    assert honest.exchange(1).tolist() == [True]
    # What n0 has for n1 alone is for nobody else, whatever the question says.
    at = Address(honest.round, 0, 0, "reply")
    n0.publish(at, honest.exchanges[0].post.seal(GOOD, at, "n1"), to="n1")
    body = message("local", at.round, 0, kind="reply")
    assert ask(people[2], honest.roster.members[0], "Message", body).code == "forbidden"
    assert ask(people[1], honest.roster.members[0], "Message", body).status == "OK"
    extra = json.dumps({**json.loads(body), "asker": "n1"}).encode()
    assert ask(people[2], honest.roster.members[0], "Message", extra).code == "forbidden"
    # Its presence is its own.
    ask(people[2], honest.roster.members[0], "Presence", question("local", here=False))
    assert "n1" in n0.alive_members()


GOOD = {"params": torch.zeros(4), "field.samples": torch.tensor(1.0)}


class Liar:
    """n2, a member in good standing that answers whatever it likes; `n0` reads it."""

    def __init__(self, honest: Honest) -> None:
        self.honest, self.parts = honest, list[tuple[bytes, bytes]]()

    def answer(self, method: str, body: Mapping[str, Any]) -> Iterable[bytes]:
        if method == "Message":
            for attachment, chunk in self.parts:
                yield frame(attachment, chunk)

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
        wait_until(lambda: any(event["event"] == "refused" for event in self.honest.told))
        (told,) = [event for event in self.honest.told if event["event"] == "refused"]
        assert (told["peer"], told["code"], told["level"]) == ("n2", code, "warning")


@pytest.fixture(scope="module")
def liar(tmp_path_factory, ports) -> Iterator[Liar]:
    """In a network of its own, since it keeps n2's address while tests of `honest` may run in between."""
    network = Honest(tmp_path_factory.mktemp("lied to"), ports())
    made = Liar(network)
    try:
        with serve(network.people[2], network.roster.members[2].address, made.answer):
            wait_until(lambda: made.read(made.sealed(GOOD)) == "")
            yield made
            assert made.read(made.sealed(GOOD)) == "", "what is in order is read, now as before"
    finally:
        network.close()


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
    liar.check_refused([(bytes(4), bytes(2 << 20))], "size")
    ((attachment, _),) = liar.sealed(GOOD)
    text = canonical_json({**json.loads(attachment[68:]), "bytes": 1 << 30})
    signature = liar.honest.people[2].sign(b"coterie manifest 1\n" + text)
    liar.check_refused([(bytes(4) + signature + text, bytes(1 << 18))], "size")


def test_a_reply_that_ends_early_is_not_taken_for_a_message(liar):
    """Nothing at all, chunks out of order, and a payload that is not what the manifest says."""
    assert liar.read([]) == "unreachable"
    liar.check_refused([(b"\0\0\0\7", b"x")], "chunk")
    ((attachment, chunk),) = liar.sealed(GOOD)
    liar.check_refused([(attachment, chunk[:-1] + b"x")], "digest")


def test_an_oversize_question_never_reaches_the_node(honest):
    """A megabyte of question is refused by the library; the next one of normal size is answered."""
    body = message("local", honest.round, 0)
    with channel_to(honest.people[2], honest.roster.members[0]) as channel:
        assert call(channel, "Message", body + bytes(1 << 20)).parts == []
        assert len(call(channel, "Message", body).parts) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff" * 40,
        b"[" * 1000,
        message("other", 1, 0),
        message("local", 1, 0, kind="secrets"),
        message(
            "local", 1, 0, kind='model\n{"event": "refused", "peer": "n1", "text": "FORGED"}\n'
        ),
        message("local", 1, 0, kind="model\x1b[31mFORGED\x1b[0m"),
        message("local", 10**400, 0),
        message("local", -2, 0),
        message("local", 1, -2),
        message("local", 1, 0, wait=float("nan")),
        message("local", 1, 0, wait=True),
        message("local", True, 0),  # type: ignore[arg-type]
        message("local", 1, 0)[:-1] + b', "round": 1}',
        message("local", 1, 0)[:-1] + b', "FORGED\\n": 1}',
    ],
)
def test_questions_that_cannot_be_read_are_refused_and_nothing_of_them_is_told(honest, body):
    """No byte of a question becomes a line, a name or an event of the node that it is put to."""
    honest.told.clear()
    found = ask(honest.people[2], honest.roster.members[0], "Message", body)
    assert (found.parts, found.code) == ([], "forbidden")
    for transport in honest.transports:
        settle(transport)
    assert "FORGED" not in json.dumps(honest.told)
    # A link between honest members may come or go at this moment, as it does on a busy machine.
    about = [event for event in honest.told if event["event"] not in ("peer_up", "peer_down")]
    assert all(event.get("peer", "n2") == "n2" for event in about)


@pytest.mark.slow
def test_a_flood_of_questions_leaves_the_node_answering_others(honest):
    """Two hundred open questions by one member: eight are held, the rest are told that there are too many."""
    n0, load = honest.roster.members[0], honest.transports[0].outbox
    with channel_to(honest.people[2], n0) as channel, ThreadPoolExecutor(200) as pool:
        open_ = [
            pool.submit(
                call,
                channel,
                "Message",
                message("local", honest.round + 50 + i, 0, wait=10.0),
                10.0,
            )
            for i in range(200)
        ]
        assert honest.exchange(1).tolist() == [True]
        assert load.current_load[1] <= 8
        codes = [one.result().code for one in open_]
    assert codes.count("busy") >= 190
    wait_until(lambda: load.current_load[1] == 0)  # other tests may follow


def test_a_question_that_never_comes_holds_nobody_up(honest):
    """A hundred calls without a question, by a member: each ends after some seconds, and others are answered."""
    n0 = honest.roster.members[0]
    never = threading.Event()

    def silent() -> Iterator[bytes]:
        never.wait(60)
        yield from ()

    with channel_to(honest.people[2], n0) as channel:
        method = channel.stream_stream("/coterie.v1/Head")
        calls = [method(silent(), timeout=30) for _ in range(100)]
        assert honest.exchange(1).tolist() == [True]
        assert ask(honest.people[1], n0, "Head", question("local", nonce="1")).code == "not_ready"
        never.set()
        for one in calls:
            one.cancel()


def test_a_key_that_was_replaced_and_a_member_that_was_removed_are_refused_on_open_links(
    tmp_path, port
):
    """n2's first certificate is good until the roster names another key for it; the second until n2 is removed.

    Neither expires, and the connection was open before, with a question that was held: that ends, and the
    next one on the same connection is refused. Nor does n0 ask who has the old certificate at n2's address.
    """
    who, _ = local.make_members([[0], [1], [2]], port=port)
    first, people = local.create_credentials(tmp_path, who)
    held = tmp_path / "held"
    held.mkdir()
    stolen = replace(people[2], certificate_file=held / "stolen.pem", key_file=held / "stolen.key")
    (held / "stolen.pem").write_bytes(people[2].certificate_file.read_bytes())
    (held / "stolen.key").write_bytes(people[2].key_file.read_bytes())
    (held / "stolen.key").chmod(0o600)
    request = identity.make_request(tmp_path / "new", "n2", f"127.0.0.1:{port + 2}")
    second = setup.rekey_member(tmp_path, "n2", request, days=0.5)
    fresh = Identity.load(
        tmp_path / "new" / "n2.key", tmp_path / "members" / "n2.pem", tmp_path / "ca.pem"
    )
    third = setup.remove_member(tmp_path, "n2")
    transports = [GrpcTransport(first, own.name, own) for own in people[:2]]
    n0, head = first.members[0], question("local", nonce="1")
    try:
        for transport in transports:
            transport.serve_head(lambda nonce: b"here")
        for own, roster, other in ((stolen, second, first), (fresh, third, second)):
            with channel_to(own, n0) as channel, ThreadPoolExecutor(1) as pool:
                assert call(channel, "Head", head).parts == [b"here"]
                waiting = pool.submit(
                    call, channel, "Message", message("local", 5, 0, wait=60.0), 60.0
                )
                wait_until(lambda: transports[0].outbox.current_load[1] == 1)
                for transport in transports:
                    transport.use_roster(roster)
                assert waiting.result(5).parts == []
                found = call(channel, "Head", head)
                assert (found.parts, found.status) == ([], "PERMISSION_DENIED")
            assert transports[1].ask_head("n0", "1", 2.0) == b"here"
            asked = list[str]()
            address = other.member("n2").address
            with serve(own, address, lambda method, body, asked=asked: asked.append(method)):  # type: ignore[misc]
                assert isinstance(transports[0].ask_head("n2", "1", 1.0), Missing)
            assert asked == []
    finally:
        for transport in transports:
            transport.close()
