"""Catching up on signed claims: a member that lies about rounds ends nobody's training."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coterie.errors import TransportError
from coterie.methods import METHODS
from coterie.net import local
from coterie.net.catchup import RunClock, newest_backed_round
from coterie.net.head import Head, study_hash
from coterie.net.log import Log
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.outbox import KEEP, Missing
from coterie.net.post import Terms
from coterie.net.transport import Hub, InProcess
from coterie.net.wire import VERSION, Address
from coterie.runtime import checkpoint
from coterie.testing import tiny_federation, tiny_settings

FAR = (1 << 31) - 1


@pytest.mark.parametrize(
    ("rounds", "others", "newest"),
    [
        ([8, FAR], 2, 8),  # one of two lies: both are needed
        ([8, 9, FAR, FAR], 4, 9),  # half of them lie: an honest one has reached it
        ([3, 9, 5, 20], 5, 5),  # one has not answered: three of five
        ([FAR], 2, -1),  # the honest one is silent
        ([], 3, -1),
        ([7], 1, 7),  # with one other there is nobody else to ask
        ([], 0, -1),
    ],
)
def test_most_of_the_others_must_be_in_a_round(rounds, others, newest):
    assert newest_backed_round(rounds, others) == newest


def test_no_more_rounds_have_passed_than_time_allows():
    """In round 5 at 100 s, then 20 s in which a node that trains 2 s a round trains 10: others 100, and the 8 kept."""
    now = [100.0]
    clock = RunClock(-1, None, lambda: now[0])
    assert clock.newest_possible_round(2.0) is None, "nothing is known before a message has come"
    clock.note_in_step(5)
    now[0] = 120.0
    assert clock.newest_possible_round(2.0) == 5 + KEEP + 100
    now[0] = 90.0
    assert clock.newest_possible_round(2.0) == 5 + KEEP, "a clock that was set back"


@pytest.mark.parametrize(("issued", "possible"), [(1_000.0, KEEP - 1 + 50), (99_000.0, None)])
def test_a_time_that_is_still_to_come_bounds_no_jump(honest, monkeypatch, issued, possible):
    """By this node's clock the run was agreed on 10 s ago, or in a day: the other clock is ahead."""
    monkeypatch.setattr(time, "time", lambda: 1_010.0)
    when = datetime.fromtimestamp(issued, UTC).isoformat(timespec="seconds")
    honest.roster = replace(honest.roster, issued=when)
    a = honest.node(0)
    a.clock._clock = time.time
    assert a.clock.newest_possible_round(2.0) == possible
    if possible is None:
        claims = {name: replace_head(a, name, 4) for name in ("n1", "n2")}
        monkeypatch.setattr(a, "ask_heads", lambda names: claims)
        a.loop.next_round = 0
        a._catch_up()
        assert a.loop.next_round == 4, "most of the others are there"


class Liar(InProcess):
    """A member's own program: it says that every round is over, and signs that it is far ahead."""

    def __init__(self, hub: Hub, name: str, node: Node, sign) -> None:
        super().__init__(hub, name)
        self._announced, self.ahead = True, False

        def head(nonce: str) -> bytes:
            round = FAR if self.ahead else -1
            return Head(
                node.roster.run, name, 1, nonce, round, "running" if self.ahead else "starting", VERSION,
                study_hash(node.settings), node.schema, 1, 0.0, [], node.settings,
            ).seal(sign)  # fmt: skip

        self.serve_head(head)
        self.outbox.ask = self.ask  # type: ignore[method-assign]

    def ask(self, asker: str, address: Address, wait: float, answer) -> None:
        self.ahead = True
        answer(Missing("gone", FAR))


class Honest:
    """n0 and n1 train; n2 is whatever a test makes it."""

    def __init__(self, folder: Path, kind: str = "random", rounds: int = 6) -> None:
        self.hub, self.folder = Hub(), folder
        method = METHODS[kind](**({"num_peers": 2} if kind == "random" else {}))
        self.plan = RunSpec(method, tiny_settings(rounds=rounds), "linear", "linear", seed=3)
        self.roster, self.keys = local.make_members(
            [[0], [1], [2]], server="n2" if method.server else ""
        )
        self.federation = tiny_federation(num_clients=3)
        self.nodes: list[Node] = []

    def node(self, number: int, start: float = 20.0) -> Node:
        name = f"n{number}"
        self.nodes.append(
            Node(
                self.plan,
                self.federation.host([number]),
                self.roster,
                InProcess(self.hub, name),
                local.make_signer(self.keys[number]),
                self.folder / name,
                terms=Terms(deadline=20.0, redraws=0),
                patience=Patience(start=start, linger=0.0, ask=2.0, poll=0.02),
                log=Log(name, stream=(self.folder / f"{name}.log").open("a")),
            )
        )
        return self.nodes[-1]

    def told(self, number: int, event: str) -> list[dict]:
        lines = (self.folder / f"n{number}.log").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == event]

    def close(self) -> None:
        for node in self.nodes:
            node.close()
            node.transport.close()
            node.log.stream.close()


@pytest.fixture
def honest(tmp_path) -> Iterator[Honest]:
    made = Honest(tmp_path)
    yield made
    made.close()


def test_a_member_that_says_that_the_run_is_over_ends_nobodys_training(honest):
    """It answers every question with a round far ahead, without a signature, and signs heads that say the same."""
    a, b = honest.node(0), honest.node(1)
    liar = Liar(honest.hub, "n2", a, local.make_signer(honest.keys[2]))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Node.run, (a, b)))
    liar.close()
    for number, node in enumerate((a, b)):
        assert node.loop.skipped_rounds == []
        measured = node.loop.record.metrics
        trained = measured[(measured["split"] == "validation") & (measured["model"] == "current")]
        assert sorted(set(trained["round"])) == [-1, 0, 1, 2, 3, 4, 5], "every round"
        assert honest.told(number, "not_backed"), "it is said, once in a few rounds"
        assert not honest.told(number, "catch_up")


def test_a_member_that_has_started_alone_hurries_nobody(honest):
    """Its head says that it is far ahead, before the second honest node is there: that one is waited for."""
    a = honest.node(0)
    liar = Liar(honest.hub, "n2", a, local.make_signer(honest.keys[2]))
    liar.ahead = True
    seen = a.patience
    a.patience = replace(seen, poll=0.01)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(a.run)
        b = honest.node(1)
        b.run()
        running.result()
    liar.close()
    assert "n1" in honest.told(0, "met")[0]["peers"]


def test_rounds_that_were_left_out_are_marked_and_never_reach_the_end(honest, monkeypatch):
    """Both others sign that they are in the last round: the node trains that one, and says which it did not."""
    a = honest.node(0)
    a.transport.serve_head(a._make_head)
    a._state = "running"
    a._run_round()
    a._run_round()
    heads = {name: replace_head(a, name, 99) for name in ("n1", "n2")}
    monkeypatch.setattr(a, "ask_heads", lambda names: heads)
    a._catch_up()
    assert a.loop.next_round == 5, "the last of six"
    a._run_round()
    assert a.loop.skipped_rounds == [(1, 4)]
    checkpoint.save(a.folder, a.loop, a._identity, a._timing())
    stored = json.loads((a.folder / checkpoint.PROVENANCE).read_text())
    assert stored["skipped"] == [[1, 4]]
    a.close()
    a.transport.close()
    assert honest.node(0).loop.skipped_rounds == [(1, 4)], "a restart does not forget it"


def test_the_clock_of_the_run_bounds_a_jump(honest, monkeypatch):
    """A second after a message of round 0, with rounds of 10 s: others can be in round 9 at the most."""
    honest.plan = replace(honest.plan, settings=tiny_settings(rounds=40))
    a = honest.node(0)
    a.loop.next_round = 1
    now = [100.0]
    a.clock = RunClock(0, 99.0, lambda: now[0])
    monkeypatch.setattr(a, "_seconds_per_round", lambda: 10.0)
    monkeypatch.setattr(
        a, "ask_heads", lambda names: {name: replace_head(a, name, 30) for name in ("n1", "n2")}
    )
    a._catch_up()
    assert a.loop.next_round == 0 + KEEP + 1
    assert honest.told(0, "catch_up")[0]["claimed"] == 30


def replace_head(node: Node, name: str, round: int) -> Head:
    return Head(
        node.roster.run, name, 1, "n", round, "running", VERSION, "", node.schema, 1, 0.0, [], node.settings
    )  # fmt: skip


@pytest.fixture
def left_out(tmp_path) -> Iterator[tuple[Honest, Node, Liar]]:
    """A node whose server answers "absent" each time."""
    honest = Honest(tmp_path, "fedavg", rounds=3)
    a = honest.node(0, start=0.0)
    server = Liar(honest.hub, "n2", a, local.make_signer(honest.keys[2]))
    server.outbox.ask = lambda asker, address, wait, answer: answer(Missing("absent", FAR))  # type: ignore
    yield honest, a, server
    server.close()
    honest.close()


def test_a_node_leaves_out_a_round_when_its_server_signs_that_it_is_past_it(left_out):
    """The server's word without a signature is as if it had not answered: its signed head is in the warm-up."""
    _, a, server = left_out
    a.post.terms = replace(a.post.terms, server_wait=0.0)
    a.loop.next_round = 1
    with pytest.raises(TransportError, match="the server n2 has not answered for 0 s"):
        a._run_round()
    assert a.loop.skipped_rounds == []
    server.ahead = True
    a._run_round()
    assert a.loop.skipped_rounds == [(1, 1)]


def test_a_server_that_leaves_a_node_out_of_every_round_gives_it_no_success(left_out):
    """The node ends with an error, and its results say that none was trained."""
    _, a, server = left_out
    server.ahead = True
    with pytest.raises(TransportError, match="left this node out of every round"):
        a.run()
    assert not checkpoint.is_done(a.folder)
    stored = json.loads((a.folder / checkpoint.PROVENANCE).read_text())
    assert stored["skipped"] == [[-1, 2]]
