"""Nodes over the in-process twin: parity with the simulation, restarts, late joiners, replay, mismatches."""

import io
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from replay import replay
from tests.hugging import require_peft
from tests.selection import first_only, one_of_each_family
from tests.training import intercept_training
from torch import nn

from coterie.data.arrays import from_table
from coterie.errors import ConfigError, PeerMismatch, TransportError
from coterie.methods import METHODS
from coterie.models.layout import NamedModel, custom_model_name
from coterie.net import local
from coterie.net.head import Head, check_study, study_hash, with_given, with_table
from coterie.net.log import Log, format_samples
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.pace import Wait
from coterie.net.post import Terms
from coterie.net.roster import Member, Roster
from coterie.net.transport import Delivery, Hub, InProcess
from coterie.net.wire import VERSION, Manifest
from coterie.results import traffic
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.runtime.models import load_models
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

FEDERATION = tiny_federation()


def wide() -> nn.Module:
    """A model of 16,003 numbers."""
    return nn.Sequential(nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 3))


class Network:
    """Six nodes with one client each, inside one program."""

    def __init__(self, folder: Path, plan: RunSpec, **roster) -> None:
        self.folder, self.plan, self.hub = folder, plan, Hub()
        server = "n0" if plan.method.server else ""
        who, self.keys = local.make_members([[i] for i in range(6)], server=server)
        truth = FEDERATION.truth
        assert truth is not None
        self.roster = replace(who, clusters=tuple(truth.cluster.tolist()), **roster)
        self.nodes: dict[int, Node] = {}
        self.logs: dict[int, io.StringIO] = {}

    def node(
        self,
        number: int,
        plan: RunSpec | None = None,
        start: float = 20.0,
        federation=FEDERATION,
        min_peers: int = 1,
    ) -> Node:
        """Start (or restart) a node."""
        name = f"n{number}"
        self.logs[number] = io.StringIO()
        self.nodes[number] = Node(
            plan or self.plan,
            federation.host([number]),
            self.roster,
            InProcess(self.hub, name),
            local.make_signer(self.keys[number]),
            self.folder / name,
            terms=Terms(deadline=20.0),
            patience=Patience(start, min_peers, linger=20.0, ask=2.0, poll=0.02),
            log=Log(name, stream=self.logs[number]),
        )
        return self.nodes[number]

    def run(self) -> None:
        """Run all nodes to their end."""
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(Node.run, [self.nodes.get(i) or self.node(i) for i in range(6)]))

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
            node.transport.close()

    def events(self, number: int) -> list[dict]:
        return [json.loads(line) for line in self.logs[number].getvalue().splitlines()]

    def replayed(self) -> Loop:
        return replay(self.plan, FEDERATION, {self.folder / f"n{i}": [i] for i in range(6)})


@pytest.fixture
def networks(tmp_path) -> Iterator:
    made = []

    def make(kind: str, options: Mapping[str, Any] | None = None, **settings) -> Network:
        plan = RunSpec(
            METHODS[kind](**options or {}), tiny_settings(**settings), "linear", "linear", seed=3
        )
        made.append(Network(tmp_path, plan))
        return made[-1]

    yield make
    for network in made:
        network.close()


def table(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.astype({c: str for c in frame.columns if frame[c].dtype == "category"})
    return frame.sort_values(list(frame.columns)).reset_index(drop=True)


def joined(network: Network, what: str) -> pd.DataFrame:
    return table(pd.concat([getattr(node.loop.record, what) for node in network.nodes.values()]))


# Settings that suit six clients, three classes and four rounds, where the defaults do not.
SMALL: dict[str, dict[str, Any]] = {
    "cfl": {"eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1},
    "fedgwc": {"eps": 1.0, "patience": 1, "min_pair_updates": 0.0},
    "fedper": {"personal_layers": 0},  # the model has one layer
    "fedrep": {"personal_layers": 0},
    "dfedalt": {"personal_layers": 0},
    "ifca": {"clusters": 2},
    "one-shot": {"warmup_rounds": 2},
    "panm-grad": {"num_peers": 1, "num_candidates": 2, "stage_one_rounds": 2, "interval": 1},
    "panm-loss": {"num_peers": 1, "num_candidates": 2, "stage_one_rounds": 2, "interval": 1},
    "pens": {"num_sampled": 3, "num_kept": 1, "num_peers": 2, "stage_one_rounds": 2},
    "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
    "sosicfl-all": {"endpoints": 3, "regions": 2},
    "sosicfl-plus": {"endpoints": 3, "regions": 2},
}
PARITY = [
    (kind, SMALL.get(kind, {}))
    for kind, method in sorted(METHODS.items())
    if "pool" not in method.needs and not method.sums_groups  # these are in simulation only
]
PARITY += [
    ("dac", {"num_peers": 2, "loss_direction": "push"}),
    ("dac", {"num_peers": 2, "similarity": "cos_grad"}),
]


def median(received):
    """An aggregation rule."""
    return received.models.median(0).values


def curious(known):
    """A selection rule."""
    return known.noise + 5 * known.similarity - known.count + 0.1 * known.age


PARITY += [
    ("dac", {"num_peers": 2, "table": 3}),
    ("random", {"num_peers": 2, "selection": curious, "aggregation": median}),
    ("dac", {"num_peers": 2, "selection": curious, "aggregation": median}),
    ("fedavg", {"aggregation": median}),
    ("ifca", {"clusters": 3, "start": "random_groups", "group_rounds": 2}),
]


def said(option):
    return getattr(option, "__name__", str(option))


@pytest.mark.parametrize(
    ("kind", "options"),
    one_of_each_family(PARITY, slow=True, only=["dac", "panm-grad", "fedavg", "sosicfl"]),
    ids=[" ".join([k, *map(said, o.values())]) for k, o in PARITY],
)
def test_nodes_end_with_the_same_bits_as_the_simulation(networks, kind, options):
    """The same peers in every round, the same metrics, the same models, whoever hosts whom."""
    network = networks(kind, options)
    network.run()
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    best = torch.cat([network.nodes[i].loop.tracker.best for i in range(6)])
    assert torch.equal(best, run.params)
    assert joined(network, "edges").equals(table(run.edges))
    assert joined(network, "metrics").equals(table(run.metrics))
    for i in range(6):  # each node has the model of its own client in its folder
        models = load_models(network.folder / f"n{i}")
        assert models.clients == (i,)
        assert torch.equal(models.load_row(i), run.models.load_row(i))


@pytest.mark.full
@pytest.mark.parametrize("kind", first_only(["dac", "panm-grad"]))
def test_nodes_judge_what_they_receive_as_the_simulation_does(networks, kind):
    """The same refusals, quarantines and clipped weights, with rules so strict that there are some."""
    rules = {"worse": 1.0, "clip": 0.5}
    network = networks(kind, {"num_peers": 2}, acceptance=rules)
    network.run()
    run = simulate(
        FEDERATION, network.plan.method, model="linear", settings=network.plan.settings, seed=3
    )
    assert joined(network, "edges").equals(table(run.edges))
    assert joined(network, "metrics").equals(table(run.metrics))
    assert bool((run.edges["purpose"] == "refused").any())


def test_nobody_is_made_to_attack_between_machines(networks):
    network = networks("random", attacks=[{"kind": "noise", "clients": 1}])
    with pytest.raises(
        ConfigError, match="attacks are set; between machines nobody is made to attack"
    ):
        network.node(0)


def test_time_between_machines_is_real(networks):
    with pytest.raises(ConfigError, match="time is set; between machines time is real"):
        networks("random", time={"round_seconds": 2.0}).node(0)


SHARED = [
    ("dac", {"num_peers": 2, "similarity": "cos_grad"}),
    ("dac", {"num_peers": 2, "loss_direction": "push"}),
]
SHARED += [
    (kind, SMALL.get(kind, {}))
    for kind in ("dac", "fedavg", "fesem", "ifca", "panm-grad", "pens", "sosicfl")
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options"),
    first_only(SHARED, slow=True),
    ids=[" ".join([k, *map(said, o.values())]) for k, o in SHARED],
)
def test_nodes_that_share_a_part_end_with_the_same_bits_as_the_simulation(networks, kind, options):
    """The bias stays at home, whoever reads whom."""
    network = networks(kind, options, shared=["1.weight"])
    network.run()
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    best = torch.cat([network.nodes[i].loop.tracker.best for i in range(6)])
    assert torch.equal(best, run.params)
    assert joined(network, "edges").equals(table(run.edges))
    assert joined(network, "metrics").equals(table(run.metrics))


@pytest.mark.full
def test_nodes_know_the_number_of_rounds_that_a_schedule_runs_over(networks):
    """Two models a client, whose rates fall over rounds and within each training."""
    schedule = [
        {"kind": "warmup", "length": 2},
        {"kind": "cosine"},
        {"kind": "linear", "over": "steps"},
    ]
    local = replace(
        tiny_settings().local, optimizer="adamw", momentum=0.0, lr=0.05, lr_schedule=schedule
    )
    network = networks("ditto", local=local)
    network.run()
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    best = torch.cat([network.nodes[i].loop.tracker.best for i in range(6)])
    assert torch.equal(best, run.params)
    plain = replace(plan.settings, local=replace(local, lr_schedule=None))
    assert not torch.equal(
        best, simulate(FEDERATION, plan.method, model="linear", settings=plain, seed=3).params
    )


@pytest.mark.slow
def test_noise_of_private_training_is_of_the_node_alone(networks):
    """Whoever knows the run's seed cannot draw it again; epsilon is that of the simulation, which depends on none."""
    local = replace(tiny_settings().local, batch_size=4, dp={"clip": 1.0, "noise_multiplier": 1.0})
    network = networks("random", local=local, engine="vmap")
    network.run()
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    best = torch.cat([network.nodes[i].loop.tracker.best for i in range(6)])
    assert not bool((best == run.params).any())
    found, expected = (
        table(frame)[lambda rows: rows["metric"] == "epsilon"]["value"].to_numpy()
        for frame in (joined(network, "metrics"), run.metrics)
    )
    assert (found > 0).all()
    assert found.tolist() == expected.tolist()


@pytest.mark.full
@pytest.mark.parametrize("shared", first_only([[], ["1.weight"]]))
def test_clients_that_stop_early_end_with_the_same_models_as_in_the_simulation(networks, shared):
    """Who stopped is done and goes on answering; the others read its best model to the end."""
    network = networks("random", patience=1, rounds=6, shared=shared)
    network.run()
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    rounds = {node.loop.next_round for node in network.nodes.values()}
    assert len(rounds) > 1, "the problem is one in which clients stop at different times"
    assert torch.equal(
        torch.cat([network.nodes[i].loop.tracker.best for i in range(6)]), run.params
    )


def crash_in(node: Node, round: int) -> None:
    """Let a node fail in a round, after it has published."""

    def fail(train, params, rng, *rest, **options):
        if rng.round == round:
            raise KeyboardInterrupt
        return train(params, rng, *rest, **options)

    intercept_training(node.loop, fail)


@pytest.mark.full
@pytest.mark.parametrize("acceptance", first_only([True, False], slow=True))
def test_a_node_that_is_killed_comes_back_and_the_run_can_be_replayed(networks, acceptance):
    """It fails in round 1 with its message published, restarts from its checkpoint, catches up and takes part again.

    The others draw replacements. The simulator, given the journals, ends with the same models to
    the last bit.
    """
    # With acceptance, what a client remembers of others decides whom it reads.
    network = networks("random", rounds=8, acceptance=acceptance)
    crash_in(network.node(4), 1)

    def life(number: int) -> None:
        node = network.nodes.get(number) or network.node(number)
        if number != 4:
            return node.run()
        with pytest.raises(KeyboardInterrupt):
            node.run()
        node.close()
        node.transport.close()
        return network.node(4).run()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(life, range(6)))
    again = network.nodes[4]
    assert again.incarnation > 0
    assert any(e["event"] == "met" and e["resumes"] == 1 for e in network.events(4))
    # real times of the warm-up and of each round, through the restart; None of what it missed
    ends = json.loads((again.folder / "provenance.json").read_text())["timing"]["ends"]
    known = [end for end in ends if end is not None]
    assert (len(ends), len(known) > 4) == (9, True)
    assert known == sorted(known)
    assert time.time() - 300 < known[0] < known[-1] <= time.time()
    loop = network.replayed()
    for number, node in network.nodes.items():
        assert torch.equal(node.loop.state.params[0], loop.state.params[number])
        assert torch.equal(node.loop.tracker.best[0], loop.tracker.best[number])
    mine = table(again.loop.record.metrics)
    theirs = table(loop.record.metrics)
    # the rounds it did not miss
    there = theirs[(theirs["client"] == 4) & theirs["round"].isin(mine["round"])]
    assert mine.equals(there.reset_index(drop=True))


@pytest.mark.slow
def test_a_late_joiner_takes_part_from_the_round_of_the_others(networks):
    """It trains its warm-up alone, jumps to the others' round, and the replay agrees."""
    network = networks("random", rounds=12)
    early = [network.node(i, start=0.1) for i in range(5)]

    def wait_for_the_last(train, params, rng, *rest, **options):
        if rng.round == 3:
            while "n5" not in network.hub.nodes or not network.hub.nodes["n5"]._announced:
                early[0]._stop.wait(0.01)
        return train(params, rng, *rest, **options)

    intercept_training(early[0].loop, wait_for_the_last)

    def life(number: int) -> None:
        if number < 5:
            return early[number].run()
        while early[0].loop.next_round < 3:
            early[0]._stop.wait(0.01)
        return network.node(5).run()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(life, range(6)))
    jumps = [e for e in network.events(5) if e["event"] == "catch_up"]
    assert jumps
    assert jumps[0]["goes_to"] >= 2
    read = pd.concat([node.loop.record.edges for n, node in network.nodes.items() if n != 5])[
        "read"
    ]
    assert (read == 5).any(), "the others read it"
    loop = network.replayed()
    for number, node in network.nodes.items():
        assert torch.equal(node.loop.state.params[0], loop.state.params[number])


@pytest.mark.full
def test_who_begins_when_the_others_are_done_gets_their_messages(networks):
    """They have met it, as it has answered them; it looks around again when they have done all their rounds."""
    network = networks("fix-topology", {"num_peers": 1})
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    (slow,) = set(range(6)) - set(run.edges["read"])  # nobody waits for its messages
    nodes = [network.node(i) for i in range(6)]
    look_around = nodes[slow].look_around

    def later(seconds: float) -> dict[str, Head]:
        while any(node._state != "done" for node in nodes if node is not nodes[slow]):
            nodes[slow]._stop.wait(0.01)
        nodes[slow]._stop.wait(0.5)
        return look_around(seconds)

    def life(node: Node) -> None:
        node.run()
        node.transport.close()

    nodes[slow].look_around = later
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(life, nodes))
    assert joined(network, "edges").equals(table(run.edges))
    assert joined(network, "metrics").equals(table(run.metrics))


@pytest.mark.parametrize(
    ("heads", "asked"),
    [
        ([{}], 1),
        ([{"n1": "done"}], 1),
        ([{"n1": "starting"}, {"n1": "running"}, {"n1": "done"}], 3),
        ([{}, {"n1": "running", "n2": "done"}, {"n2": "done"}, {"n1": "done", "n2": "done"}], 4),
    ],
    ids=["nobody is there", "all are done", "one begins", "one is there and does not answer"],
)
def test_a_node_that_is_done_stays_while_others_are_not(networks, monkeypatch, heads, asked):
    network, calls = networks("random"), iter(heads)
    node = network.node(0)
    there = frozenset(name for found in heads for name in found)
    monkeypatch.setattr(node.transport, "alive_members", lambda: there)
    asks = []

    def ask_heads(names):
        asks.append(list(names))
        return {name: SimpleNamespace(state=state, round=4) for name, state in next(calls).items()}

    monkeypatch.setattr(node, "ask_heads", ask_heads)
    node._linger()
    assert len(asks) == asked


@pytest.mark.parametrize(
    ("rounds", "asked"),
    [([4], 3), ([4, 4, 5], 5), ([4, 5, 6, 7], 6)],
    ids=["nothing moves", "one round more", "every time"],
)
def test_a_node_that_is_done_stays_so_long_after_the_last_change(
    networks, monkeypatch, rounds, asked
):
    """It asks every 9 seconds and stays for 20 after a change: to 20, to 18 + 20, to 27 + 20."""
    node, now, asks = networks("random").node(0), [0.0], []

    def ask_heads(names):
        asks.append(now[0])
        # The last of them from then on.
        reached = rounds[min(len(asks), len(rounds)) - 1]
        return {"n1": SimpleNamespace(state="running", round=reached)}

    def wait(seconds):
        now[0] += 9.0
        return False

    monkeypatch.setattr(node, "ask_heads", ask_heads)
    monkeypatch.setattr(node.transport, "alive_members", lambda: frozenset({"n1"}))
    monkeypatch.setattr(node, "_stop", SimpleNamespace(wait=wait, set=lambda: None))
    monkeypatch.setattr("coterie.net.node.time", SimpleNamespace(monotonic=lambda: now[0]))
    node._linger()
    assert len(asks) == asked


def test_a_node_that_is_done_stays_for_members_that_took_part_and_are_away(networks, monkeypatch):
    """The links to n1 and n2 were lost. n1 comes back, and n2 does not: it is not waited for without end."""
    node, now, asks = networks("random").node(0), [0.0], []
    monkeypatch.setattr(node.transport, "lost_members", lambda: frozenset({"n1", "n2"}))

    def ask_heads(names):
        asks.append(now[0])
        return {"n1": SimpleNamespace(state="done", round=4)} if len(asks) == 2 else {}

    def wait(seconds):
        now[0] += 9.0
        return False

    monkeypatch.setattr(node, "ask_heads", ask_heads)
    monkeypatch.setattr(node.transport, "alive_members", frozenset)
    monkeypatch.setattr(node, "_stop", SimpleNamespace(wait=wait, set=lambda: None))
    monkeypatch.setattr("coterie.net.node.time", SimpleNamespace(monotonic=lambda: now[0]))
    node._linger()
    # n1 at 9 s, and gone at 18 s: until 18 + 20.
    assert asks == [0.0, 9.0, 18.0, 27.0, 36.0]


@pytest.mark.parametrize(("received", "asked"), [(0, 3), (5, 1)], ids=["nobody is asked", "read"])
def test_a_node_whose_method_asks_nobody_stays_for_those_who_had_not_begun(
    networks, monkeypatch, received, asked
):
    """A relay that goes down hides n1, which needs this node to begin, and never published anything."""
    node, calls = networks("local").node(0), []
    node._heads = {"n1": SimpleNamespace(state="starting", round=-1)}
    node.post.traffic.received = received

    def ask_heads(names):
        calls.append(names)
        return {"n1": SimpleNamespace(state="done", round=4)} if len(calls) == 3 else {}

    monkeypatch.setattr(node, "ask_heads", ask_heads)
    node._linger()
    assert len(calls) == asked


def test_the_time_of_a_run_is_that_of_all_its_starts(networks):
    node = networks("random").node(0)
    node._earlier = {}
    first = node._timing()["wall_s"]
    assert 0 < first < 60
    node._earlier = {"wall_s": 1000.0, "train_s": 500.0}
    assert 1000 < node._timing()["wall_s"] < 1000 + first + 60
    assert 500 <= node._timing()["train_s"] < 560


@pytest.mark.parametrize(("kind", "away"), [("random", [3]), ("fedavg", [])])
def test_members_that_are_away_cannot_be_chosen_as_peers(networks, kind, away):
    """A member that did not answer at the start; with a server it is the server that misses it."""
    node = networks(kind).node(0)
    node.exchange.set_away(["n3"])
    node.exchange.begin_round(Rng(3).at_round(0))
    everybody = torch.arange(6)
    rnd = node.loop._make_round(0, torch.tensor([0]), everybody)
    assert everybody[~rnd.reachable].tolist() == away


def test_a_node_that_fell_behind_goes_to_the_round_in_the_middle_of_the_others(
    networks, monkeypatch
):
    """Others are in rounds 3, 5 and 9, and one is done: to 5. It never goes back, and never before its warm-up."""
    node = networks("random", rounds=20).node(0)
    rounds = {"n1": (3, "running"), "n2": (9, "running"), "n3": (5, "running"), "n4": (20, "done")}
    heads = {
        name: SimpleNamespace(round=round, state=state) for name, (round, state) in rounds.items()
    }
    monkeypatch.setattr(node, "ask_heads", lambda names: heads)
    for before, after in ((1, 5), (3, 5), (5, 5), (7, 7), (-1, -1)):
        node.loop.next_round = before
        node._catch_up()
        assert node.loop.next_round == after


@pytest.mark.parametrize(("method", "after"), [("random", 4), ("fedavg", 5)])
def test_a_peer_one_round_behind_leaves_out_none_and_a_client_of_a_server_does(
    networks, monkeypatch, method, after
):
    """Peers wait for its messages of that round, and theirs are there; the server has averaged without it."""
    node = networks(method, rounds=20).node(1)
    heads = {name: SimpleNamespace(round=5, state="running") for name in ("n0", "n2", "n3", "n4")}
    monkeypatch.setattr(node, "ask_heads", lambda names: heads)
    told: list[str] = []
    monkeypatch.setattr(node, "log", lambda event, **_: told.append(event))
    # A member says, without a signature, that it is further on, as most say with one.
    node.loop.next_round, node.post.ahead = 4, 5
    node._catch_up()
    assert "not_backed" not in told
    assert node.loop.next_round == after


def test_a_deadline_has_room_for_three_usual_times_and_two_trainings(networks):
    """Others take 18, 20 and 500 s and trainings 8, 10 and 60 s: 3 x 20 + 2 x 10; half a minute at least."""
    node = networks("random").node(0)
    node.post.terms = Terms(deadline=0.0)
    assert node.round_deadline() == 30.0
    sealed = Manifest(1, "r", "d", 1, 0, 0, 3, "model", "", "safetensors", 9, 1024, "", "")
    delivered = Delivery(sealed, {}, 0, 0.0)
    waits = [
        Wait(f"n{i + 1}", seconds, False, delivered)
        for i, seconds in enumerate((18.0, 500.0, 20.0))
    ]
    node.post.pace.judge_waits(0, waits)
    node._local = [8.0, 60.0, 10.0]
    assert node.round_deadline() == 80.0
    node.post.terms = Terms(deadline=7.0)
    assert node.round_deadline() == 7.0


@pytest.mark.slow
def test_a_node_with_another_method_is_turned_away_and_told_why(networks):
    """The organizer's roster says who is right: the one that differs stops, naming both values; the others go on."""
    network = networks("random", rounds=1)
    nodes = [network.node(i, start=0.5) for i in range(5)]
    wrong = replace(network.plan, method=METHODS["random"](num_peers=2))
    study = nodes[0].settings
    network.roster = replace(network.roster, study=study_hash(study), schema=nodes[0].schema)
    for i in range(5):
        network.nodes[i].transport.close()
        network.nodes[i].close()
        network.node(i, start=0.5)
    network.node(5, plan=wrong, start=0.5)

    def life(number: int) -> str:
        try:
            network.nodes[number].run()
        except PeerMismatch as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(life, range(6)))
    assert told[:5] == [""] * 5
    assert "method.num_peers is 5 there and 2 here" in told[5]


@pytest.mark.full
@pytest.mark.parametrize("kind", first_only(["fedavg", "fedgwc", "ditto"]))
def test_nodes_outside_a_cohort_stay_in_step(networks, kind):
    """With half of the clients in a round, those who sat it out fetch the newest model like the others."""
    network = networks(kind, participation=0.5, eval_every=1)
    network.run()
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    assert torch.equal(
        torch.cat([network.nodes[i].loop.tracker.best for i in range(6)]), run.params
    )
    assert joined(network, "metrics").equals(table(run.metrics))


def test_a_node_with_other_clients_than_the_roster_says_is_refused(networks):
    network = networks("random")
    with pytest.raises(
        ConfigError, match=r"the data are of clients \[2\] of 6; on the roster n0 hosts \[0\] of 6"
    ):
        Node(
            network.plan, FEDERATION.host([2]), network.roster, InProcess(network.hub, "n0"), lambda data: data,
            network.folder,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change", "found"),
    [
        ("oracle", {"clusters": ()}, "needs the planted clusters"),
        ("fedavg", {"server": ""}, "needs a server"),
        ("pooled", {}, "needs the data of all members in one place"),
    ],
)
def test_what_a_method_needs_must_be_on_the_roster(networks, kind, change, found):
    network = networks(kind)
    network.roster = replace(network.roster, **change)
    with pytest.raises(ConfigError, match=found):
        network.node(0)
    network.hub.nodes["n0"].close()


class Late(Network):
    """Six nodes of which those of some clients join when the others have ended."""

    def __init__(self, folder: Path, plan: RunSpec, late: list[int]) -> None:
        super().__init__(folder, plan)
        self.late = late

    def run(self) -> None:
        """Run the others; start the late ones when all of those are done, as a member that comes days later does."""
        others = [i for i in range(6) if i not in self.late]
        nodes = {i: self.node(i) for i in others}

        def life(number: int) -> None:
            if number in others:
                return nodes[number].run()
            while not all(node._state == "done" for node in nodes.values()):
                nodes[others[0]]._stop.wait(0.01)
            return self.node(number).run()

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(life, range(6)))


@pytest.fixture
def late_networks(tmp_path) -> Iterator:
    made = []

    def make(
        kind: str,
        options: Mapping[str, Any] | None = None,
        late: list[int] | None = None,
        **settings,
    ) -> Late:
        settings = {"new_clients": late or [4], "new_client_rounds": 2, **settings}
        plan = RunSpec(
            METHODS[kind](**options or {}), tiny_settings(**settings), "linear", "linear", seed=3
        )
        made.append(Late(tmp_path, plan, late or [4]))
        return made[-1]

    yield make
    for network in made:
        network.close()


ANSWERED = [
    (kind, o)
    for kind, o in PARITY
    if kind not in ("oracle", "panm-grad", "panm-loss") and o.get("loss_direction") is None
]


@pytest.mark.parametrize(
    ("kind", "options"),
    one_of_each_family(ANSWERED, only=["dac", "fedavg"], slow=True),
    ids=[" ".join([k, *map(said, o.values())]) for k, o in ANSWERED],
)
def test_a_member_that_joins_late_ends_with_the_bits_of_the_simulation(
    late_networks, kind, options
):
    """With every method that can be joined: the others as if it were not there, then it by the method's rule."""
    network = late_networks(kind, options)
    network.run()
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    assert joined(network, "edges").equals(table(run.edges))
    assert joined(network, "metrics").equals(table(run.metrics))
    new = run.metrics[run.metrics["split"] == "new_clients"]
    assert set(new["client"]) == {4}
    assert load_models(network.folder / "n4").clients == (4,)


STOPS = {"patience": 1, "rounds": 6}
JOINING: list[tuple[str, dict[str, Any]]] = [
    (kind, one)
    for kind in ("dac", "ifca")
    for one in ({"shared": ["1.weight"]}, {"evaluate": "final"})
]
JOINING += [("dac", STOPS), ("dac", {"acceptance": True})]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "settings"), first_only(JOINING, slow=True))
def test_two_members_join_late_whatever_is_shared_and_tested(late_networks, kind, settings):
    network = late_networks(kind, SMALL.get(kind, {}), late=[1, 4], **settings)
    network.run()
    plan = network.plan
    run = simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)
    found, wanted = joined(network, "metrics"), table(run.metrics)
    # a node that has stopped is done, and notes nothing of the rounds of others
    if "patience" in settings:
        assert len({node.loop.next_round for node in network.nodes.values()}) > 1
        found, wanted = (
            one[one["split"] == "new_clients"].reset_index(drop=True) for one in (found, wanted)
        )
    assert found.equals(wanted)
    assert set(wanted[wanted["split"] == "new_clients"]["client"]) == {1, 4}


@pytest.mark.parametrize("kind", first_only(["dac", "fedavg"]))
def test_finished_members_that_are_started_again_answer_whom_nobody_knew_of(tmp_path, kind):
    """Five end a run of five; then a sixth is on the roster, and in the study as a new client."""
    settings = tiny_settings(new_clients=["n5"], new_client_rounds=2)
    plan = RunSpec(METHODS[kind](), settings, "linear", "linear", seed=3)
    first = Network(tmp_path, replace(plan, settings=replace(settings, new_clients=None)))
    five = replace(first.roster, members=first.roster.members[:5], population=5, clusters=())
    whole, first.roster = replace(first.roster, clusters=()), five
    five_alone = FEDERATION.select_clients(torch.arange(5))
    try:
        nodes = [first.node(i, federation=five_alone) for i in range(5)]
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(Node.run, nodes))
    finally:
        first.close()
    again = Network(tmp_path, plan)
    again.keys, again.roster = first.keys, whole
    try:
        nodes = [again.node(i) for i in (*range(5), 5)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(Node.run, nodes if kind == "dac" else [nodes[0], nodes[5]]))
        run = simulate(
            FEDERATION,
            plan.method,
            model="linear",
            settings=replace(settings, new_clients=[5]),
            seed=3,
        )
        found, wanted = (
            table(nodes[5].loop.record.metrics),
            table(run.metrics[run.metrics["split"] == "new_clients"]),
        )
        # this roster names no clusters
        assert found.drop(columns="cluster").equals(wanted.drop(columns="cluster"))
    finally:
        again.close()


def test_a_newcomer_that_nobody_answers_says_what_to_do(late_networks):
    network = late_networks("random")
    with pytest.raises(
        TransportError, match="n0, n1, n2, n3, n5 did not answer for 0 s; a finished member answers"
    ):
        network.node(4, start=0.0, min_peers=0).run()


def test_a_newcomer_waits_for_a_quorum_and_says_so(late_networks):
    """Two finished members have to answer it, and none does: it trains nothing and names who is away."""
    network = late_networks("random")
    node = network.node(4, start=0.0, min_peers=2)
    told = []
    node.log.also = lambda event, level, details: told.append((event, level, details))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(node.run)
        for _ in range(100):
            if node.is_waiting:
                break
            threading.Event().wait(0.05)
        threading.Event().wait(0.1)
        node.stop()
        run.result(10)
    warnings = [
        details for event, level, details in told if (event, level) == ("waiting", "warning")
    ]
    assert len(warnings) == 1
    assert "0 of 2 other members are here (min_peers)" in warnings[0]["text"]
    assert warnings[0]["absent"] == ["n0", "n1", "n2", "n3", "n5"]
    assert node.loop.next_round == -1


@pytest.mark.parametrize(
    ("kind", "options", "settings", "found"),
    [
        (
            "random",
            {},
            {"new_clients": [0], "new_client_others": "training"},
            "join when the run of the others has ended",
        ),
        ("dac", {"loss_direction": "push"}, {"new_clients": [0]}, "members answer each other"),
        ("oracle", {}, {"new_clients": [0]}, "members answer each other"),
        ("fedavg", {}, {"new_clients": [0]}, "n0 has the server role and cannot join late"),
        ("random", {}, {"new_clients": 5}, "of 6 clients 1 would take part"),
        ("random", {}, {"new_clients": ["x"]}, "unknown client 'x'"),
    ],
)
def test_whom_a_run_between_machines_cannot_hold_out_is_said(
    networks, kind, options, settings, found
):
    network = networks(kind, options, **settings)
    with pytest.raises(ConfigError, match=found):
        network.node(0)
    network.hub.nodes["n0"].close()


def test_numbers_for_prometheus_are_in_its_text_format(networks):
    node = networks("random").node(0)
    node.post.traffic.missing["timeout"] = 2
    text = format_samples(node.prometheus_samples())
    assert "# TYPE coterie_received_total counter" in text
    assert 'coterie_missing_total{node="n0",reason="timeout"} 2' in text
    assert 'coterie_round{node="n0"} -1' in text


def test_the_log_is_one_json_object_a_line_from_a_level_on():
    stream = io.StringIO()
    log = Log("a", level="warning", stream=stream, clock=lambda: 12.5)
    log("quiet")
    log("loud", level="error", peer="b")
    assert json.loads(stream.getvalue()) == {
        "time": 12.5, "level": "error", "node": "a", "round": -1, "event": "loud", "peer": "b"
    }  # fmt: skip


BYTES = {
    "pens": {"num_sampled": 3, "num_kept": 2, "stage_one_rounds": 9},
    "one-shot": {"warmup_rounds": 1},
}
# the model has one layer
BYTES |= {kind: {"personal_layers": 0} for kind in ("dfedalt", "fedper", "fedrep")}
BYTES |= {kind: {"num_peers": 2, "num_candidates": 3} for kind in ("panm-grad", "panm-loss")}
UNDETERMINED = {"sosicfl", "sosicfl-all", "sosicfl-plus"}
"""What they send depends on the model and the stage, and the ledger says so (see test_traffic)."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    one_of_each_family(sorted(METHODS.keys() - UNDETERMINED - {"pooled", "ppdl"}), slow=True),
)
def test_counted_bytes_are_within_half_a_percent_of_the_ledgers_prediction(tmp_path, kind):
    """Six nodes with a model of 16,003 numbers, two rounds: what they count on the wire, envelopes included."""
    plan = RunSpec(
        METHODS[kind](**BYTES.get(kind, {})), tiny_settings(rounds=2), wide, "wide", seed=3
    )
    network = Network(tmp_path, plan)
    try:
        network.run()
        counted = sum(node.post.traffic.bytes for node in network.nodes.values())
        params = network.nodes[0].task.layout.size
    finally:
        network.close()
    setting = traffic.CostSetting(population=6, params=params, samples=12, group=3, number_bytes=8)
    away = 6 - plan.method.server  # the client on the server's node needs no network
    assert counted == pytest.approx(
        away * traffic.predict_network_bytes(plan.method, setting, 2), rel=0.005
    )


class Adapted(nn.Module):
    """A frozen layer of 80,000 weights with a trained product of two narrow ones beside it, and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.base = nn.Linear(4, 16_000, bias=False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 16_000)
        self.pool, self.head = nn.AdaptiveAvgPool1d(20), nn.Linear(20, 3)
        self.base.weight.data.copy_(torch.arange(64_000).reshape(16_000, 4).sin() * (1 + seed))
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(torch.tanh(self.base(x) + self.up(self.down(x)))))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "models"), [("random", 6 * 1 * 2), ("fedavg", 5 * (2 * 2 + 3))])
def test_adapters_on_a_frozen_layer_cost_their_own_bytes_on_the_wire(tmp_path, kind, models):
    """Of 96,067 numbers 32,004 are shared: 4 bytes each, once a read; the ledger predicts it to half a percent.

    Each of the five nodes away from the server fetches and sends a model in two rounds, and fetches
    one to measure after each and in the end.
    """
    options = {"num_peers": 1} if kind == "random" else {}
    settings = tiny_settings(rounds=2, shared=["!head"], dtype="float32", engine="loop")
    plan = RunSpec(METHODS[kind](**options), settings, Adapted, "adapted", seed=3)
    network = Network(tmp_path, plan)
    try:
        network.run()
        counted = sum(node.post.traffic.bytes for node in network.nodes.values())
        task = network.nodes[0].task
    finally:
        network.close()
    assert counted == pytest.approx(models * 4 * 32_004, rel=0.05)
    setting = replace(traffic.CostSetting.from_task(task), population=6)
    assert setting.params == 32_004
    away = 6 - plan.method.server
    assert counted == pytest.approx(
        away * traffic.predict_network_bytes(plan.method, setting, 2), rel=0.005
    )


class LowRank(nn.Module):
    """A frozen layer with an adapter, named as peft names it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x) + self.lora_B(self.lora_A(x))))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("random", {"num_peers": 2, "aggregation": "product-mean"}),
        ("dac", {"num_peers": 2, "similarity": "cos_product", "aggregation": "product-mean"}),
        ("fedavg", {"aggregation": "product-mean"}),
    ],
    ids=["random", "dac", "fedavg"],
)
@pytest.mark.parametrize("shared", [(), ("!head",)], ids=["whole", "head at home"])
def test_nodes_merge_and_compare_adapters_as_the_simulation_does(tmp_path, kind, options, shared):
    """By the names of tensors, which lie elsewhere in the columns that are shared."""
    settings = tiny_settings(shared=shared, engine="loop")
    plan = RunSpec(METHODS[kind](**options), settings, LowRank, "low-rank", seed=3)
    network = Network(tmp_path, plan)
    try:
        network.run()
        run = simulate(FEDERATION, plan.method, model=LowRank, settings=settings, seed=3)
        best = torch.cat([network.nodes[i].loop.tracker.best for i in range(6)])
        assert torch.equal(best, run.params)
        assert joined(network, "edges").equals(table(run.edges))
        assert joined(network, "metrics").equals(table(run.metrics))
    finally:
        network.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"similarity": "public_agreement"},
        {"similarity": "cos_product", "sketch": 8, "num_candidates": 3},
        {"similarity": "cos_grad", "sketch": 8, "table": 4, "num_candidates": 2},
    ],
    ids=["predictions", "sketches of products", "sketches in a table"],
)
def test_nodes_compare_what_is_published_without_models_as_the_simulation_does(tmp_path, options):
    """What is refused, or comes late, would show in who is drawn."""
    public = replace(tiny_federation(1, 1, seed=4), tests=())
    data, settings = FEDERATION.with_public_set(public), tiny_settings(engine="loop")
    plan = RunSpec(METHODS["dac"](num_peers=2, **options), settings, LowRank, "low-rank", seed=3)
    network = Network(tmp_path, plan)
    try:
        for number in range(6):
            network.node(number, federation=data)
        network.run()
        run = simulate(data, plan.method, model=LowRank, settings=settings, seed=3)
        best = torch.cat([network.nodes[i].loop.tracker.best for i in range(6)])
        assert torch.equal(best, run.params)
        assert joined(network, "edges").equals(table(run.edges))
        assert joined(network, "metrics").equals(table(run.metrics))
    finally:
        network.close()


def small() -> nn.Module:
    """Two layers, the first of which gets an adapter."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options"), [("dac", {"num_peers": 2, "similarity": "cos_product"}), ("fedavg", {})]
)
def test_nodes_with_adapters_of_different_ranks_do_as_the_simulation_does(tmp_path, kind, options):
    """Each knows its own rank from the study; members with other ranks do not train together."""
    require_peft()
    adapter = {"r": [1, 3, 2], "target": ["0"], "trained": ["2"]}
    model = NamedModel(f"{__name__}:small", adapter=adapter)
    settings = tiny_settings(engine="loop", evaluate="final")
    method = METHODS[kind](**options, aggregation="product-mean")
    plan = RunSpec(method, settings, model, custom_model_name(model), seed=3)
    network = Network(tmp_path, plan)
    try:
        network.run()
        run = simulate(FEDERATION, plan.method, model=model, settings=settings, seed=3)
        final = torch.cat([network.nodes[i].loop.evaluated_models for i in range(6)])
        assert torch.equal(final, run.params)
        ranks = [len(run.model(i).base_model.model[0].lora_A["default"].weight) for i in range(6)]
        assert ranks == [1, 3, 2, 1, 3, 2]
        other = NamedModel(model.kind, adapter={**adapter, "r": [1, 3]})
        wrong = replace(plan, model=other, model_name=custom_model_name(other))
        assert study_hash(wrong.common_settings(6)) != study_hash(plan.common_settings(6))
    finally:
        network.close()


def test_a_node_with_other_frozen_weights_is_told_so_in_one_line(tmp_path):
    """Whether the roster knows the model, or nodes compare with each other."""
    plan = RunSpec(
        METHODS["random"](num_peers=1),
        tiny_settings(rounds=1, engine="loop"),
        Adapted,
        "adapted",
        seed=3,
    )
    network = Network(tmp_path, plan)
    other = replace(plan, model=lambda: Adapted(1))
    try:
        right, wrong = network.node(0), network.node(1, plan=other)
        assert study_hash(right.settings) == study_hash(wrong.settings)
        mine, theirs = (node.settings["model.frozen"] for node in (right, wrong))
        assert mine != theirs
        study, schema, own = study_hash(right.settings), right.schema, right.settings
        met = {
            "n0": Head(
                "run", "n0", 1, "nonce", -1, "starting", VERSION, study, schema, 1, 0.0, [], own
            )
        }
        with pytest.raises(
            PeerMismatch, match=f"model.frozen is '{mine}' there and '{theirs}' here"
        ):
            check_study(network.roster, wrong.settings, wrong.schema, met)
        agreed = replace(network.roster, study=study, schema=schema)
        with pytest.raises(
            PeerMismatch, match=f"compared with n0: model.frozen is '{mine}' there and '{theirs}'"
        ):
            check_study(agreed, wrong.settings, wrong.schema, met)
        with pytest.raises(
            PeerMismatch, match=f"frozen weights are {theirs}, is not that of the roster"
        ):
            check_study(agreed, wrong.settings, wrong.schema, {})
        assert check_study(agreed, right.settings, right.schema, met) == []
    finally:
        network.close()


def test_nodes_whose_tables_mean_other_things_do_not_train_together(tmp_path):
    """What most say holds, else the first of the roster; who differs stops with a line, the others go on without."""
    members = tuple(Member(f"n{n}", f"10.0.0.{n}:7447", (n,)) for n in range(4))
    roster = Roster("run", members, 4)
    federations = {
        word: from_table(
            pd.DataFrame({"c": ["a"] * 12, "age": range(12), "ill": ["no", "yes"] * 6}),
            target="ill",
            client="c",
            class_names=names,
        )
        for word, names in {"right": ["no", "yes"], "swapped": ["yes", "no"]}.items()
    }
    common = {"seed": 3}
    says = {word: with_table(common, federation) for word, federation in federations.items()}
    says["no table"] = with_table(common, tiny_federation())
    assert says["no table"] == common
    assert len({study_hash(settings) for settings in says.values()}) == 1, "data are no settings"

    def check(own: str, **others: str):
        met = {
            name: Head(
                "run",
                name,
                1,
                "",
                -1,
                "starting",
                VERSION,
                study_hash(common),
                "",
                1,
                0.0,
                [],
                says[word],
            )
            for name, word in others.items()
        }
        own_name = next(f"n{n}" for n in range(4) if f"n{n}" not in others)
        return check_study(roster, says[own], "", met, own_name)

    assert check("right", n1="right", n2="right", n3="no table") == []
    assert check("no table", n1="right", n2="swapped") == []
    assert check("right", n1="right", n2="swapped") == ["n2"]
    assert check("right", n1="swapped") == ["n1"], "of two, the first of the roster holds"
    line = (
        "reads its table otherwise than {}: table.class_names is '{}' there and '{}' here; use one"
    )
    with pytest.raises(PeerMismatch, match=line.format("n0", "no, yes", "yes, no")):
        check("swapped", n0="right")
    with pytest.raises(PeerMismatch, match=line.format("n1", "yes, no", "no, yes")):
        check("right", n1="swapped", n2="swapped")


def test_members_whose_models_begin_with_other_given_weights_are_named():
    """Of three, the one that differs: it stops with a line, and the others go on without it."""
    members = tuple(Member(f"n{n}", f"10.0.0.{n}:7447", (n,)) for n in range(3))
    roster, common = Roster("run", members, 3), {"seed": 3}
    says = {word: with_given(common, word) for word in ("aa", "bb", "")}
    assert says[""] == common
    assert len({study_hash(settings) for settings in says.values()}) == 1

    def check(own: str, **others: str):
        met = {
            name: Head(
                "run", name, 1, "", -1, "starting", VERSION, study_hash(common), "", 1, 0.0, [],
                says[word],
            )
            for name, word in others.items()
        }  # fmt: skip
        own_name = next(f"n{n}" for n in range(3) if f"n{n}" not in others)
        return check_study(roster, says[own], "", met, own_name)

    assert check("aa", n1="aa", n2="aa") == []
    assert check("aa", n1="aa", n2="bb") == ["n2"]
    with pytest.raises(
        PeerMismatch, match=r"begins with other weights than that of n0: .*'aa' there"
    ):
        check("bb", n0="aa", n2="aa")


def flipped(parts: list[tuple[bytes, bytes]], draw: random.Random) -> list[tuple[bytes, bytes]]:
    """The parts of a message with one bit changed: in the envelope or in the payload, wherever."""
    place = draw.randrange(len(parts))
    part = [bytearray(half) for half in parts[place]]
    half = part[draw.randrange(2)]
    half[draw.randrange(len(half))] ^= 1 << draw.randrange(8)
    return [*parts[:place], (bytes(part[0]), bytes(part[1])), *parts[place + 1 :]]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["random", "dac"])
def test_damaged_messages_are_to_a_run_as_if_they_had_not_come(networks, kind):
    """Every fifth message has one bit changed; the simulator, told only which ones came, ends with the same bits."""
    network = networks(kind, {"num_peers": 3}, rounds=6)
    draw, lock, damaged = random.Random(0), threading.Lock(), [0]

    def tamper(parts):
        with lock:
            if draw.random() >= 0.2:
                return parts
            damaged[0] += 1
            return flipped(parts, draw)

    network.hub.tamper = tamper
    network.run()
    refused = sum((node.post.traffic.missing for node in network.nodes.values()), Counter())
    assert damaged[0] > 10
    assert {reason.partition(":")[0] for reason in refused} == {"refused"}
    assert refused.total() == damaged[0], "every one of them, and nothing else"
    loop = network.replayed()
    for number, node in network.nodes.items():
        assert torch.equal(node.loop.state.params[0], loop.state.params[number])
        assert torch.equal(node.loop.tracker.best[0], loop.tracker.best[number])


@pytest.mark.slow
def test_a_servers_damaged_answers_are_asked_for_again(networks):
    """The first time that each answer is sent it has one bit changed; the run ends with the simulation's bits."""
    network = networks("fedavg")
    draw, lock, seen = random.Random(0), threading.Lock(), set()

    def tamper(parts):
        manifest = json.loads(parts[0][0][68:])
        where = (manifest["kind"], manifest["round"], manifest["exchange"], manifest["client"])
        with lock:
            if manifest["kind"] != "reply" or where in seen:
                return parts
            seen.add(where)
            return flipped(parts, draw)

    network.hub.tamper = tamper
    network.run()
    assert len(seen) >= 5 * network.plan.settings.rounds
    assert sum(sum(node.post.traffic.missing.values()) for node in network.nodes.values()) == len(
        seen
    )
    run = simulate(
        FEDERATION, network.plan.method, model="linear", settings=network.plan.settings, seed=3
    )
    assert torch.equal(
        torch.cat([network.nodes[i].loop.tracker.best for i in range(6)]), run.params
    )
    assert joined(network, "metrics").equals(table(run.metrics))
