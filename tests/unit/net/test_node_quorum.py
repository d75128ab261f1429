"""Nodes wait for a quorum of others, and what a node did alone is marked wherever its results are read."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.selection import first_only

from coterie.errors import QuorumError
from coterie.methods import METHODS
from coterie.net import local, nodefile, process
from coterie.net.log import Log, format_samples
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.post import Terms
from coterie.net.transport import Hub, InProcess
from coterie.results.coverage import describe_skipped_rounds
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

FEDERATION = tiny_federation()


class Six:
    """Six nodes of one client inside one program, of which some start later."""

    def __init__(self, folder: Path, kind: str = "dac", **patience) -> None:
        self.folder, self.hub, self.patience = folder, Hub(), patience
        self.plan = RunSpec(METHODS[kind](), tiny_settings(), "linear", "linear", seed=3)
        self.who, self.keys = local.make_members(
            [[i] for i in range(6)], server="n0" if self.plan.method.server else ""
        )
        self.nodes: dict[int, Node] = {}
        self.logs: dict[int, io.StringIO] = {}

    def node(self, number: int) -> Node:
        name = f"n{number}"
        self.logs[number] = io.StringIO()
        wait = {"start": 0.0, "linger": 10.0, "ask": 2.0, "poll": 0.02, **self.patience}
        self.nodes[number] = Node(
            self.plan, FEDERATION.host([number]), self.who, InProcess(self.hub, name),
            local.make_signer(self.keys[number]), self.folder / name, terms=Terms(deadline=20.0),
            patience=Patience(**wait), log=Log(name, stream=self.logs[number]),
        )  # fmt: skip
        return self.nodes[number]

    def events(self, number: int, *names: str) -> list[dict]:
        lines = [json.loads(line) for line in self.logs[number].getvalue().splitlines()]
        return [event for event in lines if event["event"] in names]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
            node.transport.close()


def until(condition) -> None:
    pause = threading.Event()
    for _ in range(600):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("it did not come to be")


@pytest.fixture
def six(tmp_path):
    made = []

    def make(*arguments, **options) -> Six:
        made.append(Six(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.mark.parametrize("kind", first_only(["dac", "fedavg"]))
def test_who_comes_first_trains_nothing_until_enough_others_are_there(six, kind):
    """n0 does not wait for anybody at the start, and yet ends with the bits of the simulation."""
    network = six(kind, min_peers=5)
    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(network.node(0).run)]
        try:
            until(lambda: network.events(0, "waiting"))
            threading.Event().wait(0.3)
            first = network.nodes[0]
            assert first.loop.next_round == -1
            assert "coterie_waiting{node=" in format_samples(first.prometheus_samples())
            assert first.is_waiting
            (told,) = network.events(0, "waiting")
            assert told["level"] == "warning"
            assert "0 of 5" in told["text"]
            assert told["absent"] == [f"n{i}" for i in range(1, 6)]
            runs += [pool.submit(network.node(i).run) for i in range(1, 6)]
            for run in runs:
                run.result(60)
        finally:
            for node in network.nodes.values():
                node.stop()
    expected = simulate(
        FEDERATION, network.plan.method, model="linear", settings=network.plan.settings, seed=3
    )
    for number, node in network.nodes.items():
        assert torch.equal(node.loop.tracker.best[0], expected.params[number])
        assert node.loop.alone_rounds == []


def test_a_node_stops_while_it_waits(six):
    network = six()
    node = network.node(0)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(node.run)
        until(lambda: node.is_waiting)
        node.stop()
        run.result(10)
    assert node.loop.next_round == -1


def test_rounds_without_any_message_are_marked_in_results_and_exit_status(six, tmp_path):
    """A node that may go on alone, and does: four rounds, each of them marked."""
    network = six(min_peers=0, linger=0.0)
    network.node(0).run()
    rounds = network.plan.settings.rounds
    assert network.nodes[0].loop.alone_rounds == [(0, rounds - 1)]
    assert [event["round"] for event in network.events(0, "alone")] == list(range(rounds))
    assert network.events(0, "done")[0]["alone"] == [[0, rounds - 1]]
    stored = json.loads((tmp_path / "n0" / "provenance.json").read_text())
    assert stored["alone"] == [[0, rounds - 1]]
    assert process._find_status(tmp_path / "n0") == process.ALONE
    (line,) = describe_skipped_rounds(
        {"alone": [{"label": "DAC", "seed": 3, "rounds": stored["alone"]}]}
    )
    assert line == (
        f"DAC, seed 3: rounds 0 to {rounds - 1} were done alone: no message of another member arrived in them."
    )


def test_who_asks_nobody_by_its_method_is_not_alone(six, tmp_path):
    network = six("local", min_peers=0, linger=0.0)
    network.node(0).run()
    assert network.nodes[0].loop.alone_rounds == []
    assert process._find_status(tmp_path / "n0") == 0


def test_waits_may_be_unlimited():
    patience = nodefile.NetworkSettings(
        start="unlimited", min_peers=3, quorum_wait="unlimited"
    ).patience
    assert (patience.start, patience.min_peers) == (float("inf"), 3)
    assert (patience.quorum_wait, patience.linger) == (float("inf"), 120.0)


# ---------------------------------------------------------------- a quorum that is over


def test_a_run_that_has_begun_waits_so_long_for_its_quorum_and_then_ends(six):
    network = six(quorum_wait=0.3)
    node = network.node(0)
    node.exchange.set_away(node.other_members)
    node.loop.next_round = 2
    with pytest.raises(QuorumError, match=r"0 of 1 other members .* for 0 s .quorum_wait.*2 of 4"):
        node._await_quorum()
    assert len(network.events(0, "waiting")) == 1


def test_members_that_were_done_and_have_left_are_not_waited_for(six):
    """n1 to n4 say that they are done, and n5 goes on: it alone can still come."""
    network = six(min_peers=2, quorum_wait=5.0)
    node, others = network.node(0), [network.node(number) for number in range(1, 6)]
    for other in others:
        other._start_answering()
        other._state = "running" if other is others[-1] else "done"
        other.loop.next_round = 2
    node.loop.next_round = 2
    assert len(node.ask_heads(node.other_members)) == 5
    for other in others:
        other.transport.close()
    node.exchange.set_away(node.other_members)
    with pytest.raises(QuorumError, match="n1, n2, n3, n4 said that they are done, and have left"):
        node._await_quorum()
    assert network.events(0, "waiting") == [], "it does not wait for them"
    node.patience = Patience(min_peers=1, quorum_wait=0.1)
    with pytest.raises(QuorumError, match=r"for [0-9] s"):  # n5 could come, and does not
        node._await_quorum()


def test_a_member_that_is_done_and_begins_again_is_waited_for(six):
    network = six(min_peers=1)
    node, other = network.node(0), network.node(1)
    other._start_answering()
    other._state = "done"
    node.ask_heads(["n1"])
    assert node._done == {"n1"}
    other._state = "running"
    node.ask_heads(["n1", "n2"])
    assert node._done == frozenset()


@pytest.mark.full
def test_a_node_that_is_killed_and_comes_back_when_the_others_are_done_finishes(six):
    """n5 does two rounds and goes; the others end theirs, stay for it, and it ends the run with their messages."""
    network = six(start=5.0, linger=30.0, quorum_wait=20.0)
    killed = threading.Event()

    def die(node: Node) -> None:
        run_next = node.loop.run_next_round

        def run_or_die() -> None:
            if node.loop.next_round == 2:
                killed.set()
                raise SystemExit
            run_next()

        node.loop.run_next_round = run_or_die

    def life(node: Node) -> None:
        node.run()
        node.transport.close()

    with ThreadPoolExecutor(7) as pool:
        nodes = [network.node(number) for number in range(6)]
        die(nodes[5])
        runs = [pool.submit(life, node) for node in nodes]
        assert killed.wait(30)
        with pytest.raises(SystemExit):
            runs[5].result(10)
        nodes[5].close()
        # Before it goes: at no time may it look to the others as if it had left in order.
        network.hub.lost.add("n5")
        nodes[5].transport.close()
        until(lambda: all(network.events(number, "staying") for number in range(5)))
        # Others may not have been done either when a node began to stay.
        said = [network.events(number, "staying")[-1]["text"] for number in range(5)]
        again = network.node(5)
        try:
            pool.submit(life, again).result(30)
            for run in runs[:5]:
                run.result(30)
        finally:
            for node in [*nodes, again]:
                node.stop()
    assert all("n5" in text for text in said)
    assert again.loop.is_finished
    assert again.loop.next_round == network.plan.settings.rounds
    assert network.events(5, "done")
