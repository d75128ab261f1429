"""Nodes that wait for nobody: what is read, how old it is, and what a slow member costs the others."""

import json
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training import intercept_training
from tests.unit.net.test_node import Network

from coterie.errors import ConfigError, PeerMismatch, TransportError
from coterie.exchange.base import Message
from coterie.methods import METHODS
from coterie.net import local
from coterie.net.free import Ages, FreeExchange
from coterie.net.head import Head, check_study, study_hash
from coterie.net.node import Node, RunSpec
from coterie.net.outbox import Missing
from coterie.net.post import Post, Terms
from coterie.net.transport import Hub, InProcess
from coterie.net.wire import NEWEST, VERSION, Address, seal_parcel
from coterie.rng import Rng
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings


def make_slow(node: Node, seconds: float) -> None:
    """Let each training of a node take longer."""

    def train(function: Any, *arguments: Any, **options: Any) -> Any:
        node._stop.wait(seconds)
        return function(*arguments, **options)

    intercept_training(node.loop, train)


def free_plan(kind: str = "random", options: dict | None = None, **changes: Any) -> RunSpec:
    given = {"rounds": 8, "pace": "free", "max_staleness": 5, **changes}
    return RunSpec(
        METHODS[kind](**(options or {})), tiny_settings(**given), "linear", "linear", seed=3
    )


@pytest.fixture
def networks(tmp_path) -> Iterator:
    made = []

    def make(*arguments: Any, **changes: Any) -> Network:
        made.append(Network(tmp_path / str(len(made)), free_plan(*arguments, **changes)))
        return made[-1]

    yield make
    for network in made:
        network.close()


def seconds_of(network: Network, number: int) -> np.ndarray:
    """Return when each round of a node ended."""
    frame = pd.read_parquet(network.folder / f"n{number}" / "metrics.parquet")
    return frame.loc[(frame["metric"] == "elapsed_seconds").to_numpy(), "value"].to_numpy()


# ---------------------------------------------------------------- a whole run


@pytest.mark.option("Settings.pace", "free")
def test_a_slow_member_costs_the_others_nothing(networks):
    """Five nodes train 0.1 s a round, and one 1 s. With common rounds all would take 8 s."""
    network = networks("dac", {"num_peers": 2})
    for number in range(6):
        make_slow(network.node(number), 1.0 if number == 5 else 0.1)
    network.run()
    fast = [seconds_of(network, number)[-1] for number in range(5)]
    assert seconds_of(network, 5)[-1] > 8
    # Eight trainings of 0.1 s, and what else the rounds take on a busy machine.
    assert max(fast) < 4
    edges = pd.read_parquet(network.folder / "n5" / "edges.parquet")
    assert set(edges["purpose"]) <= {"mix", "probe"}
    assert len(edges) == 8 * 2
    lines = (network.folder / "n5" / "arrivals.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "read"]
    # The others are done by its third round: it reads what they have at the end, never too old.
    last = [(one["round"], one["age"]) for event in events[-4:] for one in event["read"]]
    assert last == [(8, 0)] * 8
    found = pd.read_parquet(network.folder / "n0" / "metrics.parquet")
    own = found[found["metric"] == "own_rounds"]["value"].tolist()
    assert own == list(range(1, 9))
    assert {"staleness", "staleness_seconds", "idle_share"} <= set(found["metric"])
    assert all(event["event"] != "slow" for event in network.events(0))


def test_rounds_before_the_first_messages_are_no_rounds_alone(networks):
    """Nobody has published when the first node reads: that is how such a run begins."""
    network = networks(rounds=3)
    for number in range(6):
        make_slow(network.node(number), 0.1 + 0.1 * number)
    network.run()
    assert [node.loop.alone_rounds for node in network.nodes.values()] == [[]] * 6


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("fedavg", {}, "it has one model for all"),
        ("panm-loss", {}, "it makes 2 exchanges a round"),
        ("dac", {"loss_direction": "push"}, "it makes 3 exchanges a round"),
        ("oracle", {}, "its members exchange with all others before the first round"),
    ],
)
def test_a_method_that_needs_common_rounds_is_refused(networks, kind, options, reason):
    with pytest.raises(ConfigError, match=f"pace = 'free' does not go with {kind}.*: {reason}"):
        networks(kind, options).node(0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"participation": 0.5}, "participation is set; with pace = 'free' it is not"),
        ({"new_clients": 2}, "new_clients is set; with pace = 'free' it is not"),
        ({"schedule": "sequential"}, "schedule.*'synchronous' with pace = 'free'"),
        ({"pace": "common"}, "max_staleness.*pace = 'free' alone"),
    ],
)
def test_settings_that_need_common_rounds_are_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        free_plan(**change)


def test_a_simulation_says_what_it_has_in_place_of_it():
    plan = free_plan()
    with pytest.raises(ConfigError, match=r"pace is 'free'.*schedule = 'asynchronous'"):
        simulate(tiny_federation(), plan.method, model="linear", settings=plan.settings)


@pytest.mark.option("Settings.pace", "common")
@pytest.mark.parametrize("odd", ["free", "common"])
def test_members_with_two_paces_do_not_start(networks, odd):
    """The one that differs is told so, and so is the one that it meets."""
    paces = {"free": {"pace": "common", "max_staleness": None}, "common": {}}
    network = networks(**paces[odd])
    other = free_plan(**({} if odd == "free" else {"pace": "common", "max_staleness": None}))
    nodes = [network.node(0), network.node(1, other)]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(node.meet_others) for node in nodes]
        network.nodes[0].patience = network.nodes[1].patience
        time.sleep(0.1)
        for node in nodes:
            node._stop.set()
        errors = [run.exception(30) for run in runs]
    mine, theirs = ("common", "free") if odd == "free" else ("free", "common")
    expected = f"n1 has pace = '{theirs}' and n0 has '{mine}'; all members of a run go by one pace"
    assert isinstance(errors[0], PeerMismatch)
    assert expected in str(errors[0])
    assert isinstance(errors[1], PeerMismatch)


def test_who_has_the_pace_of_the_roster_goes_on_without_the_one_that_has_another(networks):
    network = networks()
    first = network.node(0)
    other = free_plan(pace="common", max_staleness=None)
    network.roster = replace(network.roster, study=study_hash(first.settings))
    second = network.node(1, other)
    met = {
        name: replace(head(0), peer=name, study=study_hash(node.settings), schema=node.schema,
                      settings=node.settings)
        for name, node in (("n0", first), ("n1", second))
    }  # fmt: skip
    odd = check_study(network.roster, first.settings, first.schema, {"n1": met["n1"]}, "n0")
    assert odd == ["n1"]
    with pytest.raises(PeerMismatch, match="n0 has pace = 'free' and n1 has 'common'"):
        check_study(network.roster, second.settings, second.schema, {"n0": met["n0"]}, "n1")


# ---------------------------------------------------------------- how old


def head(round: int, inc: int = 1, state: str = "running") -> Head:
    return Head("r", "b", inc, "n", round, state, VERSION, "", "", 1, 0.0, [], {})


def test_a_message_is_as_old_as_the_rounds_since_it_was_not_there_yet():
    """Asked in rounds 2, 5 and 9, b was in rounds 3, 3 and 7.

    In round 10 its message of round 7 came after the question of round 5: rounds 6, 7, 8 and 9
    have begun since. That of round 8 came after the question of round 9, and none has.
    """
    ages = Ages(began=100.0)
    for reader, round in ((2, 3), (5, 3), (9, 7)):
        assert ages.note_head(ages.ask("b", reader, 100.0 + reader), head(round))
    assert ages.measure("b", 7, 10, 111.0) == (4, 6.0)
    assert ages.measure("b", 8, 10, 111.0) == (0, 2.0)
    # of rounds before all that is known it may be as old as the run
    assert ages.measure("b", 3, 10, 111.0) == (10, 11.0)
    assert ages.measure("c", 0, 10, 111.0) == (10, 11.0)


def test_a_head_that_goes_back_in_rounds_does_not_count():
    ages = Ages(began=0.0)
    assert ages.note_head(ages.ask("b", 0, 0.0), head(5))
    assert not ages.note_head(ages.ask("b", 1, 1.0), head(4))
    assert not ages.note_head(ages.ask("b", 1, 1.0), head(4, inc=2))
    ages.note_message("b", 3, 7)
    assert not ages.note_head(ages.ask("b", 2, 2.0), head(6, inc=3))
    assert not ages.note_head(ages.ask("b", 2, 2.0), head(8, inc=2))
    assert ages.measure("b", 5, 3, 3.0) == (3, 3.0), "what did not count is no proof"
    assert ages.note_head(ages.ask("b", 3, 3.0), head(8, inc=3))


def test_a_head_asked_for_before_a_message_came_may_be_older_than_it():
    """Both were on the way at once: the head is no lie."""
    ages = Ages(began=0.0)
    asked = ages.ask("b", 4, 4.0)
    ages.note_message("b", 1, 6)
    assert ages.note_head(asked, head(5))
    assert ages.measure("b", 6, 6, 6.0) == (1, 2.0)


def test_what_a_member_published_last_never_grows_old():
    ages = Ages(began=0.0)
    ages.note_head(ages.ask("b", 1, 1.0), head(9))
    ages.note_head(ages.ask("b", 2, 2.0), head(10, state="done"))
    assert ages.measure("b", 10, 50, 50.0) == (0, 0.0)
    assert ages.measure("b", 9, 50, 50.0) == (0, 0.0), "with train_first it is of the last round"
    assert ages.measure("b", 8, 50, 50.0)[0] == 50


def test_what_is_known_of_others_outlasts_a_restart():
    ages = Ages(began=7.0)
    for reader, round in ((0, 0), (3, 2), (4, 4)):
        ages.note_head(ages.ask("b", reader, 10.0 + reader), head(round, inc=5))
    again = Ages(began=0.0)
    again.restore(ages.snapshot({"b": 1, "c": 2}), {1: "b", 2: "c"})
    for round in range(6):
        assert again.measure("b", round, 9, 20.0) == ages.measure("b", round, 9, 20.0)
    assert again.first_round("b") == 3
    assert not again.note_head(again.ask("b", 5, 15.0), head(3, inc=5))


# ---------------------------------------------------------------- the exchange, step by step


class AtOnce(ThreadPoolExecutor):
    """Does work when it is handed in."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Any:
        function(*arguments, **options)


class Reader:
    """A reader of three senders, whose events happen one after another."""

    def __init__(self, max_staleness: int | None) -> None:
        self.hub = Hub()
        self.roster, self.keys = local.make_members([[i] for i in range(4)])
        self.posts = []
        for number, member in enumerate(self.roster.members):
            transport = InProcess(self.hub, member.name)
            self.posts.append(
                Post(
                    transport, self.roster, local.make_signer(self.keys[number]), incarnation=1,
                    terms=Terms(deadline=5.0),
                )
            )  # fmt: skip
        self.journal: list = []
        self.posts[0].journal = self.journal.append
        self.senders = [-1] * 4  # the round that each is in
        self.exchange = FreeExchange(
            self.posts[0], None, max_staleness=max_staleness, ask_head=self.ask_head
        )
        self.exchange._watchers = AtOnce()
        self.exchange.is_watching = True
        self.round = -1
        self.began: list[int] = []  # the number of the event with which each round began
        self.sent: dict[tuple[int, int], int] = {}  # and each message
        self.events = 0

    def ask_head(self, name: str) -> Head | None:
        return head(self.senders[int(name[1:])])

    def send(self, sender: int) -> None:
        """A sender publishes in its next round."""
        self.senders[sender] += 1
        round = self.senders[sender]
        self.sent[sender, round] = self.events
        self.events += 1
        self.posts[sender].publish(
            {
                "params": torch.full((3,), 100.0 * sender + round),
                "field.samples": torch.tensor(1.0),
            },
            Address(round, 0, sender),
        )

    def read(self, *peers: int) -> dict[int, tuple[int, int]]:
        """The reader does a round; return of each peer whose message it read its round and age."""
        self.round += 1
        self.began.append(self.events)
        self.events += 1
        self.exchange.begin_round(Rng(0).at_round(self.round))
        message = Message(torch.zeros(1, 3), {"samples": torch.ones(1)})
        inbox = self.exchange.pull(message, torch.tensor([list(peers)]))
        out = {}
        for slot, peer in enumerate(peers):
            if bool(inbox.mask[0, slot]):
                value = float(inbox.table[inbox.index[0, slot], 0])
                assert value // 100 == peer
                out[peer] = int(value) % 100, int(inbox.age[0, slot])
        return out

    def true_age(self, sender: int, round: int) -> int:
        """Return how many rounds of the reader began between a message and its newest round."""
        return sum(self.sent[sender, round] < began for began in self.began[:-1])

    def close(self) -> None:
        self.exchange.close()
        for post in self.posts:
            post.close()
            post.transport.close()


@pytest.fixture
def readers() -> Iterator:
    made = []

    def make(max_staleness: int | None = None) -> Reader:
        made.append(Reader(max_staleness))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.one_of(st.integers(1, 3), st.just(0)), max_size=40), most=st.integers(1, 4)
)
def test_nothing_is_read_that_is_older_than_allowed_or_older_than_what_was_read_before(steps, most):
    """Any order of rounds of three senders and a reader: 0 is a round of the reader."""
    reader = Reader(most)
    try:
        newest: dict[int, int] = dict.fromkeys(range(4), -1)
        for step in steps:
            if step:
                reader.send(step)
                continue
            found = reader.read(1, 2, 3)
            for sender, (round, age) in found.items():
                assert reader.true_age(sender, round) <= age <= most
                assert round >= newest[sender]
                assert round == reader.senders[sender], "it is the newest"
                newest[sender] = round
            for sender in {1, 2, 3} - found.keys():
                round = reader.senders[sender]
                # Only what is too old, or was never sent, is missing.
                assert round < 0 or reader.true_age(sender, round) >= most
    finally:
        reader.close()


def test_a_message_that_is_too_old_counts_as_missing(readers):
    reader = readers(2)
    reader.send(1)
    assert reader.read(1) == {1: (0, 0)}
    assert [reader.read(1) for _ in range(3)] == [{1: (0, 1)}, {1: (0, 2)}, {}]
    assert reader.journal[-1]["missing"] == {"1": "stale"}
    reader.send(1)
    assert reader.read(1) == {1: (1, 0)}


def test_a_message_that_is_here_already_does_not_travel_again(readers):
    reader = readers()
    reader.send(1)
    for _ in range(3):
        reader.read(1, 2)
    assert reader.posts[0].traffic.received == 1
    assert [event["missing"] for event in reader.journal] == [{"2": "not_ready"}] * 3
    assert reader.posts[0].traffic.missing == {}, "that nothing is new is no loss"
    message = Message(torch.zeros(1, 3), {"samples": torch.ones(1)})
    reader.exchange.begin_round(Rng(0).at_round(3))
    assert reader.exchange.pull(message, torch.tensor([[1]])).bytes.tolist() == [[0]]
    reader.send(1)
    reader.exchange.begin_round(Rng(0).at_round(4))
    assert reader.exchange.pull(message, torch.tensor([[1]])).bytes.tolist() == [[16]]


def test_an_older_message_in_place_of_the_newest_is_refused(readers):
    """A thief on the way has kept what was sent before."""
    reader, kept = readers(), []
    reader.send(1)

    def keep(parts):
        kept.append(parts)
        return parts

    reader.hub.tamper = keep
    assert reader.read(1) == {1: (0, 0)}
    reader.send(1)
    reader.send(1)
    reader.hub.tamper = lambda parts: kept[0]
    assert reader.read(1) == {1: (0, 1)}, "what is here counts as long as it is not too old"
    assert reader.posts[0].traffic.missing == {"refused:rewound": 1}
    reader.hub.tamper = None
    assert reader.read(1) == {1: (2, 1)}


def test_a_signed_head_that_goes_back_is_in_the_journal(readers):
    reader = readers()
    for _ in range(3):
        reader.send(1)
    reader.read(1)
    reader.senders[1] = 0
    reader.read(1)
    reader.read(1)
    refused = [event for event in reader.journal if event["event"] == "refused"]
    assert [(event["peer"], event["code"]) for event in refused] == [("n1", "rewound")]


def test_a_node_that_is_closed_asks_no_more(readers):
    reader = readers()
    reader.exchange.close()
    with pytest.raises(TransportError, match="closed"):
        reader.read(1)


def test_a_forged_message_is_refused(readers):
    reader = readers()
    reader.send(1)
    reader.send(2)
    forged = seal_parcel(
        {"params": torch.full((3,), 105.0), "field.samples": torch.tensor(1.0)},
        run="local", peer="n1", inc=1, address=Address(5, 0, 1), schema=reader.roster.schema,
        sign=local.make_signer(reader.keys[2]),
    )  # fmt: skip
    parts = [(head, bytes(chunk)) for head, chunk in forged.iterate_chunks()]
    reader.hub.tamper = lambda found: parts
    assert reader.read(1) == {}
    assert reader.posts[0].traffic.missing == {"refused:signature": 1}


def test_a_model_that_is_not_finite_is_missing_and_not_the_one_before(readers):
    reader = readers()
    reader.send(1)
    assert reader.read(1) == {1: (0, 0)}
    reader.posts[1].publish(
        {"params": torch.full((3,), torch.nan), "field.samples": torch.tensor(1.0)},
        Address(1, 0, 1),
    )
    assert reader.read(1) == {}
    assert reader.journal[-1]["missing"] == {"1": "withheld"}


def test_a_member_that_does_not_answer_is_waited_for_once(readers, monkeypatch):
    reader = readers()
    reader.posts[0].terms = Terms(deadline=60.0, slow=0.5)
    reader.send(1)
    reader.send(2)
    answer = reader.posts[1].transport.outbox.ask
    monkeypatch.setattr(reader.posts[1].transport.outbox, "ask", lambda *question: None)
    monkeypatch.setattr("coterie.net.post._QUIET", 3.0)
    began = time.monotonic()
    assert reader.read(1, 2) == {2: (0, 0)}
    first = time.monotonic() - began
    began = time.monotonic()
    for _ in range(5):
        assert 1 not in reader.read(1, 2)
    later = time.monotonic() - began
    assert 0.4 < first < 2
    assert later < 0.4, "its question is still open, and nobody waits for it"
    assert reader.journal[-1]["missing"] == {"1": "timeout"}
    monkeypatch.setattr(reader.posts[1].transport.outbox, "ask", answer)
    until = time.monotonic() + 20
    while 1 not in reader.read(1, 2) and time.monotonic() < until:
        time.sleep(0.05)
    assert reader.read(1) == {1: (0, reader.round)}


def test_a_member_cannot_stretch_the_wait_for_it_by_answering_later_and_later(readers):
    """Others answer in 0.1 s: four times that, whatever it takes itself; alone, 3 s at most."""
    newest = readers().exchange.newest
    assert newest._patience("n1") == 3.0, "the first answer has a connection to make"
    newest._times = {"n1": deque([50.0, 60.0, 70.0])}
    assert newest._patience("n1") == 3.0
    newest._times["n1"] = deque([0.5])
    assert newest._patience("n1") == 2.0
    newest._times |= {"n1": deque([50.0]), "n2": deque([0.1, 0.1, 9.0]), "n3": deque([30.0])}
    assert newest._patience("n1") == pytest.approx(0.4), "of two others the faster one"
    newest._times["n2"] = deque([0.001])
    assert newest._patience("n1") == 0.25, "time for a busy machine"


@pytest.mark.parametrize(
    ("reason", "counts"),
    [("", True), ("not_ready", True), ("timeout", False), ("busy", False), ("full", False)],
)
def test_a_question_that_found_no_room_says_nothing_of_how_fast_its_member_is(
    readers, reason, counts
):
    newest = readers().exchange.newest
    newest._silent.add("n1")
    newest._busy["n1"] = {}
    newest._end("n1", 2.0, reason)
    assert list(newest._times.get("n1", ())) == ([2.0] if counts else [])
    assert ("n1" in newest._silent) == (not counts)


def test_an_error_of_this_program_is_raised_and_the_member_is_asked_again(readers, monkeypatch):
    reader = readers()
    reader.send(1)
    with monkeypatch.context() as patched:
        patched.setattr(reader.posts[0], "fetch_newest", lambda *question: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reader.read(1)
    assert reader.read(1) == {1: (0, 1)}


def test_two_exchanges_in_a_round_are_refused(readers):
    reader = readers()
    reader.read(1)
    message = Message(torch.zeros(1, 3), {"samples": torch.ones(1)})
    with pytest.raises(ConfigError, match="pulled twice in a round"):
        reader.exchange.pull(message, torch.tensor([[1]]))


# ---------------------------------------------------------------- the question for the newest


def test_the_outbox_answers_with_the_newest_message_from_a_round_on(readers):
    reader = readers()
    outbox, answers = reader.posts[1].transport.outbox, list[Any]()
    logged = []
    outbox.permit = lambda asker, address, what: logged.append(address) or True

    def ask(round: int, client: int = 1) -> Any:
        outbox.ask("n0", Address(round, 0, client, NEWEST), 60.0, answers.append)
        return answers[-1]

    assert ask(0) == Missing("not_ready", -2)
    for _ in range(12):
        reader.send(1)
    assert b'"round":11' in ask(0).manifest
    assert b'"round":11' in ask(11).manifest
    assert ask(12).reason == "not_ready"
    assert ask(0, client=2).reason == "not_ready"
    # the audit log names the message, not the question
    assert logged[1] == Address(11, 0, 1, "model")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (Address(4, 0, 1, NEWEST), "rewound"),
        (Address(3, 0, 2, NEWEST), "address"),
        (Address(3, 1, 1, NEWEST), "address"),
        (Address(3, 0, 1, NEWEST), None),
        (Address(-1, 0, 1, NEWEST), None),
    ],
)
def test_only_a_model_of_the_client_from_that_round_on_answers_a_question_for_the_newest(
    asked, code
):
    from tests.unit.net.test_wire import expected, opened, refusal, sealed

    parts = sealed().iterate_chunks()
    if code is None:
        assert opened(parts, expected(address=asked))["params"].tolist() == [0, 1, 2, 3, 4]
    else:
        assert refusal(parts, expected(address=asked)) == code


def test_no_message_is_of_the_kind_of_that_question():
    from tests.unit.net.test_wire import expected, refusal, sealed

    at = Address(3, 0, 1, NEWEST)
    assert refusal(sealed(address=at).iterate_chunks(), expected(address=at)) == "manifest"
