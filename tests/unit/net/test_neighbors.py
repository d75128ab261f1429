"""Nodes of a large roster ask few of its members, find those that are there, and keep few links."""

import io
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.replay import replay
from coterie.errors import ConfigError
from coterie.methods.dac import Dac
from coterie.methods.random_gossip import Random
from coterie.net import local
from coterie.net.log import Log
from coterie.net.neighbors import Neighbors
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.post import Terms
from coterie.net.transport import Hub, InProcess
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

VIEWS = {"view": 4, "shuffle": 2}
QUICK = {"start": 20.0, "linger": 20.0, "ask": 20.0, "poll": 0.02}


class Counting(InProcess):
    """Counts the questions to each member, and knows only those with which it had to do.

    As over a network: a hub alone shows all that take part.
    """

    def __init__(self, hub: Hub, name: str) -> None:
        super().__init__(hub, name)
        self.asked: dict[str, int] = defaultdict(int)
        self.preferred: list[set[str]] = []

    def prefer_members(self, names):
        self.preferred.append(set(names))

    def ask_head(self, peer, nonce, deadline):
        self.asked[peer] += 1
        return super().ask_head(peer, nonce, deadline)

    def alive_members(self):
        return super().alive_members() & (self.asked.keys() | self.last_questions.keys())


class Network:
    """Nodes of one client inside one program, of which only some run."""

    def __init__(self, folder: Path, method, members: int, running, **patience) -> None:
        settings = tiny_settings(rounds=4, peer_sampling=VIEWS)
        self.plan = RunSpec(method, settings, "linear", "linear", seed=3)
        self.federation, self.folder, hub = tiny_federation(members), folder, Hub()
        who, keys = local.make_members([[i] for i in range(members)])
        self.nodes, self.logs = {}, {}
        for number in running:
            name = f"n{number}"
            self.logs[number] = io.StringIO()
            self.nodes[number] = Node(
                self.plan, self.federation.host([number]), who, Counting(hub, name),
                local.make_signer(keys[number]), folder / name, terms=Terms(deadline=20.0),
                patience=Patience(**{**QUICK, **patience}),
                log=Log(name, stream=self.logs[number]),
            )  # fmt: skip

    def run(self) -> None:
        # One whose thread starts late would be passed over, and views close without it.
        for node in self.nodes.values():
            node.answer_visitors()
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            for ended in [pool.submit(node.run) for node in self.nodes.values()]:
                ended.result(timeout=120)

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
            node.transport.close()


@pytest.fixture
def network(tmp_path):
    made = []

    def make(*arguments, **options) -> Network:
        made.append(Network(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    "method", [Random(num_peers=2), Dac(num_peers=2, table=3)], ids=["random", "dac"]
)
def test_nodes_with_views_have_the_bytes_of_the_simulation(network, method):
    nodes = network(method, 14, range(14))
    nodes.run()
    plan = nodes.plan
    expected = simulate(
        nodes.federation, method, model="linear", settings=plan.settings, seed=plan.seed
    )
    for number, node in nodes.nodes.items():
        assert not node.loop.skipped_rounds
        assert torch.equal(node.loop.state.params[0], expected.params[number]) or torch.equal(
            node.loop.tracker.best[0], expected.params[number]
        )


def test_a_node_prefers_links_from_the_members_that_read_it(network):
    """Who is in whose view is mutual, and Random reads nobody else."""
    nodes = network(Random(num_peers=2), 14, range(14))
    nodes.run()
    preferred = {}
    for number, node in nodes.nodes.items():
        assert isinstance(node.transport, Counting)
        preferred[f"n{number}"] = node.transport.preferred
    for index in range(4):
        for name, rounds in preferred.items():
            assert len(rounds) == 4
            assert 1 <= len(rounds[index] - {name}) <= VIEWS["view"]
            assert all(name in preferred[other][index] for other in rounds[index])
    for number, node in nodes.nodes.items():
        edges = node.loop.record.edges
        for index, read in zip(edges["round"], edges["read"], strict=True):
            assert index < 0 or f"n{number}" in preferred[f"n{read}"][index]


def test_few_of_many_find_each_other_and_finish_together(network):
    """6 of 150 run: a view names one of the others with probability 1/6, and then all that it has met."""
    running = (0, 31, 77, 90, 120, 149)
    nodes = network(Random(num_peers=2), 150, running, start=3.0)
    nodes.run()
    places = {nodes.nodes[k].folder: [k] for k in running}
    loop = replay(nodes.plan, nodes.federation, places)
    read = set[tuple[int, int]]()
    for number, node in nodes.nodes.items():
        assert torch.equal(node.loop.state.params[0], loop.state.params[number])
        assert not node.loop.alone_rounds
        edges = node.loop.record.edges
        read |= set(zip(edges["reader"], edges["read"], strict=True))
    assert len({reader for reader, _ in read}) == len(running)
    assert {other for _, other in read} <= set(running)


def test_one_who_asks_is_met_wherever_it_is_on_the_rings(network, monkeypatch):
    """Of 400 members two run. n0 has no time to look along its rings; n399 has asked it."""
    monkeypatch.setattr("coterie.net.neighbors._LONGEST", 0.0)
    nodes = network(Random(num_peers=2), 400, (0, 399), start=0.0)
    first, last = nodes.nodes[0], nodes.nodes[399]
    for node in (first, last):
        node.answer_visitors()
    assert first.look_around(0.0) == {}
    assert last.transport.ask_head("n0", "1", 2.0)
    assert set(first.look_around(0.0)) == {"n399"}


class Town:
    """Members of whom some answer, each with those that it has met."""

    def __init__(self, here: dict[str, list[str]], most: int = 3) -> None:
        self.here, self.asked, self.known = here, list[list[str]](), set[str]()
        self.neighbors = Neighbors(self.ask, most, lambda: sorted(self.known))

    def ask(self, names):
        self.asked.append(list(names))
        found = {name: self.here[name] for name in names if name in self.here}
        self.known |= found.keys()
        return found

    def look(self, ring: list[str], view: int) -> bool:
        """The view are the first on a ring that are not passed over."""

        def strangers(passed_over: set[str]) -> set[str]:
            return {n for n in [n for n in ring if n not in passed_over][:view]} - self.known

        return self.neighbors.look(strangers, lambda: set(ring) - self.known)


def test_who_does_not_answer_is_passed_over_and_the_next_is_asked():
    town = Town({"c": [], "e": []})
    assert town.look(["a", "b", "c", "d", "e"], 2)
    # c is asked again, since d did not answer: it may have met others.
    assert town.asked == [["a", "b"], ["c", "d"], ["c"], ["e"]]
    assert town.neighbors.list_absent() == {"a", "b", "d"}
    town.asked.clear()
    assert town.look(["a", "b", "c", "d", "e"], 2), "nobody is asked again at once"
    assert town.asked == []


def test_one_who_was_absent_is_asked_again_later_each_time_after_a_longer_pause(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("coterie.net.neighbors.time.monotonic", lambda: now[0])
    town = Town({})
    for pause in (2, 4, 8):
        town.look(["a"], 1)
        assert town.neighbors.list_absent() == {"a"}
        now[0] += pause - 0.5
        assert town.neighbors.list_absent() == {"a"}
        now[0] += 1
        assert town.neighbors.list_absent() == set()
    town.here["a"] = []
    assert town.look(["a"], 1)
    assert town.neighbors.absent == {}


def test_a_liar_does_not_crowd_out_what_others_tell_and_is_not_believed():
    """z tells of 100 names of which nobody is here; y tells of one member that is."""
    names = [f"m{k:03}" for k in range(100)]
    town = Town({"y": ["x"], "z": names, "x": []}, most=3)
    ring = ["a", "y", "z", "b", *names, "x"]
    town.look(ring, 4)
    first, again, hinted = town.asked[:3]
    assert first == ["a", "b", "y", "z"]
    assert again == ["z"]
    assert len(hinted) <= 3
    assert "x" in hinted
    assert town.known == {"x", "y", "z"}


def test_more_than_a_thousand_members_need_views(tmp_path):
    who, keys = local.make_members([[i] for i in range(1001)])
    settings = tiny_settings(rounds=1)
    federation = tiny_federation(1001).host([0])

    def make(settings) -> Node:
        return Node(
            RunSpec(Random(), settings, "linear", "linear"), federation, who,
            InProcess(Hub(), "n0"), local.make_signer(keys[0]), tmp_path / "n0",
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"has 1001 members; .* set peer_sampling = true"):
        make(settings)
    make(replace(settings, peer_sampling=True)).close()
    with pytest.raises(ConfigError, match="new_clients are set; with peer_sampling"):
        make(replace(settings, peer_sampling=True, new_clients=2))


def test_a_known_member_is_asked_again_which_others_it_has_met():
    """y had met nobody when it was asked first; one look later it has met x, which is on no ring nearby."""
    ring = ["a", "y", *[f"m{k:03}" for k in range(60)], "x"]
    town = Town({"y": [], "x": []})
    assert not town.look(ring, 2)
    assert town.known == {"y"}
    town.here["y"] = ["x"]
    town.look(ring, 2)
    assert town.known == {"x", "y"}


def test_a_look_ends_when_nobody_has_answered_twice():
    town = Town({"y": []})
    town.look(["y"], 1)
    town.asked.clear()
    assert not town.look([f"m{k}" for k in range(100)], 5)
    assert [len(names) for names in town.asked if names != ["y"]] == [5, 5]


def test_one_that_knows_nobody_looks_until_it_has_met_somebody():
    """Forty of ten thousand: the first of them is met after hundreds of questions in vain."""
    ring = [f"m{k:04}" for k in range(2000)]
    town = Town({"m0900": ["m1500"], "m1500": []})
    town.look(ring, 5)
    assert town.known == {"m1500", "m0900"}
