"""Replay: the rounds of nodes that waited for nobody, again, from their journals and data."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.selection import first_only
from tests.unit.net.test_free import free_plan, make_slow
from tests.unit.net.test_node import FEDERATION, Network, crash_in

from coterie.errors import ConfigError, DataError
from coterie.net import local
from coterie.net.log import Log
from coterie.net.node import ARRIVALS, Node, Patience
from coterie.net.replay import ReplayMember, compare_with_stored, read_journal, read_reach, replay
from coterie.net.transport import Hub, InProcess
from coterie.runtime import checkpoint


@pytest.fixture
def networks(tmp_path) -> Iterator:
    made = []

    def make(*arguments: Any, **changes: Any) -> Network:
        made.append(Network(tmp_path / str(len(made)), free_plan(*arguments, **changes)))
        return made[-1]

    yield make
    for network in made:
        network.close()


def run_at_speeds(network: Network, seconds: list[float]) -> None:
    """Run all nodes, each with trainings that take so long."""
    for number, each in enumerate(seconds):
        make_slow(network.nodes.get(number) or network.node(number), each)
    network.run()


def members_of(network: Network) -> list[ReplayMember]:
    return [ReplayMember(f"n{i}", FEDERATION.host([i]), network.folder / f"n{i}") for i in range(6)]


def differences(network: Network) -> dict[str, list[str]]:
    members = members_of(network)
    loops = replay(network.plan, network.roster, members)
    return {one.name: compare_with_stored(one, loops[one.name]) for one in members}


SPEEDS = [0.0, 0.02, 0.03, 0.05, 0.08, 0.2]
CASES = [
    ("random", {"num_peers": 2}, {"rounds": 5}),
    ("dac", {"num_peers": 2}, {"order": "train_first"}),
    ("dac", {"num_peers": 2}, {"acceptance": True, "record_similarities": True}),
    ("pens", {"stage_one_rounds": 3, "num_sampled": 3, "num_kept": 2}, {}),
    ("random", {"num_peers": 2}, {"patience": 1, "rounds": 20}),
    ("fix-topology", {"num_peers": 2}, {"shared": ("1.weight",), "max_staleness": None}),
    ("local", {}, {}),
]


@pytest.mark.parametrize(("kind", "options", "changes"), first_only(CASES))
def test_a_run_in_which_nobody_waits_is_repeated_to_the_byte(networks, kind, options, changes):
    """Models, memory, trackers and both tables of each node, times and ages included."""
    network = networks(kind, options, **changes)
    run_at_speeds(network, SPEEDS)
    assert differences(network) == {f"n{i}": [] for i in range(6)}


def test_messages_in_half_precision_are_repeated_as_they_came(networks):
    network = networks()
    for number in range(6):
        node = network.node(number)
        node.post.terms = replace(node.post.terms, half=number != 2)
    run_at_speeds(network, SPEEDS)
    assert differences(network) == {f"n{i}": [] for i in range(6)}


@pytest.mark.full
def test_nodes_with_several_clients_of_which_some_stop_are_repeated(tmp_path):
    """Three nodes of two clients; those of a node go in step and read each other."""
    groups, plan = (
        [[0, 1], [2, 3], [4, 5]],
        free_plan("dac", {"num_peers": 3}, patience=2, rounds=9),
    )
    roster, keys = local.make_members(groups)
    hub, nodes = Hub(), []
    for number, group in enumerate(groups):
        node = Node(
            plan, FEDERATION.host(group), roster, InProcess(hub, f"n{number}"),
            local.make_signer(keys[number]), tmp_path / f"n{number}",
            patience=Patience(20.0, 1, linger=20.0, ask=2.0, poll=0.02), log=Log("n", level="error"),
        )  # fmt: skip
        make_slow(node, [0.0, 0.05, 0.2][number])
        nodes.append(node)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Node.run, nodes))
    for node in nodes:
        node.close()
        node.transport.close()
    stopped = torch.cat([node.loop.tracker.stopped for node in nodes])
    assert stopped.any(), "the case is one in which clients stop"
    members = [
        ReplayMember(f"n{i}", FEDERATION.host(group), tmp_path / f"n{i}")
        for i, group in enumerate(groups)
    ]
    loops = replay(plan, roster, members)
    assert [compare_with_stored(one, loops[one.name]) for one in members] == [[], [], []]


@pytest.mark.parametrize("order", first_only(["exchange_first", "train_first"]))
def test_a_node_that_is_killed_goes_on_and_is_repeated(networks, order):
    """It fails in round 3, in its training; it begins again in that round and reads other messages."""
    network = networks(rounds=10, order=order, options={"num_peers": 2})
    for number in range(6):
        make_slow(network.node(number), SPEEDS[number])
    crash_in(network.nodes[4], 3)

    def life(number: int) -> None:
        node = network.nodes[number]
        if number != 4:
            return node.run()
        with pytest.raises(KeyboardInterrupt):
            node.run()
        node.close()
        node.transport.close()
        return network.node(4).run()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(life, range(6)))
    lines = (network.folder / "n4" / ARRIVALS).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["round"] for e in events if e["event"] == "start"] == [-1, 3]
    assert [e["round"] for e in events if e["event"] == "round"] == list(range(-1, 10))
    assert network.nodes[4].loop.skipped_rounds == []
    assert differences(network) == {f"n{i}": [] for i in range(6)}


def test_a_run_that_was_stopped_is_repeated_as_far_as_it_went(networks):
    network = networks(rounds=200, options={"num_peers": 2})
    for number in range(6):
        make_slow(network.node(number), 0.02 + SPEEDS[number])
    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(Node.run, node) for node in network.nodes.values()]
        while network.nodes[5].loop.next_round < 3:
            network.nodes[5]._stop.wait(0.01)
        for node in network.nodes.values():
            node.stop()
        for run in runs:
            run.result(60)
    assert not checkpoint.is_done(network.folder / "n0")
    assert differences(network) == {f"n{i}": [] for i in range(6)}


@pytest.fixture
def finished(networks) -> Network:
    network = networks(rounds=4)
    run_at_speeds(network, SPEEDS)
    return network


def test_other_data_are_noticed_at_the_first_message_that_they_change(finished):
    members = members_of(finished)
    x = members[1].federation.x
    assert isinstance(x, torch.Tensor)
    x = x.clone()
    x[0, 0] += 1
    members[1] = replace(members[1], federation=replace(members[1].federation, x=x))
    with pytest.raises(
        DataError, match=r"message of client 1 .* the data, the study or the program"
    ):
        replay(finished.plan, finished.roster, members)


def test_a_changed_model_and_a_changed_table_are_named(finished, monkeypatch):
    members = members_of(finished)
    loop = replay(finished.plan, finished.roster, members)["n0"]
    loop.state.params[0, 0] = torch.nextafter(loop.state.params[0, 0], torch.tensor(9.0))
    assert compare_with_stored(members[0], loop) == ["state.params"]
    loop.record.add_metrics(9, loop.task.ids, "train", "current", {"loss": torch.zeros(1)})
    assert compare_with_stored(members[0], loop) == ["state.params", "metrics.parquet"]


def test_a_member_whose_journal_is_missing_is_named_by_who_read_it(finished):
    with pytest.raises(
        DataError, match=r"read in its round . the message of client 0 .* nobody made"
    ):
        replay(finished.plan, finished.roster, members_of(finished)[1:])


def test_a_journal_that_was_cut_or_changed_is_refused(finished):
    path = finished.folder / "n0" / ARRIVALS
    text = path.read_text()
    path.write_text(text + '{"event": "rea')
    assert read_journal(path).last == 3, "half a line at the end is that of a kill"
    path.write_text(text.replace('"read": [{', '"read": [[{', 1))
    with pytest.raises(DataError, match=r"arrivals.jsonl line \d+ is no event of a journal"):
        read_journal(path)
    lines = [
        line for line in text.splitlines() if '"read"' not in line or '"round": 2,' not in line
    ]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="the journal of n0 does not say what it read in round 2"):
        replay(finished.plan, finished.roster, members_of(finished))


def test_who_could_be_asked_is_read_from_either_list(finished):
    """Journals have the shorter one; older ones have those that could not be asked, however many."""
    for number in range(6):
        path = finished.folder / f"n{number}" / ARRIVALS
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for event in lines:
            for name, other in (("unreachable", "reachable"), ("reachable", "unreachable")):
                if name in event:
                    event[other] = sorted(set(range(6)) - set(event.pop(name)))
                    break
        assert sum("reachable" in event for event in lines) >= 4
        path.write_text("".join(json.dumps(event) + "\n" for event in lines))
    assert differences(finished) == {f"n{i}": [] for i in range(6)}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"unreachable": [1, 3]}, [True, False, True, False]),
        ({"reachable": [1, 3]}, [False, True, False, True]),
        ({"unreachable": []}, [True] * 4),
        ({"reachable": []}, [False] * 4),
    ],
)
def test_either_list_marks_who_could_be_asked(event, expected):
    assert read_reach(event).mark_open(4).tolist() == expected


def test_lists_that_say_nothing_or_name_nobody_are_refused(tmp_path):
    for event in ({}, {"reachable": [], "unreachable": []}):
        path = tmp_path / ARRIVALS
        path.write_text(json.dumps({"event": "read", "round": 0, "read": [], **event}) + "\n\n")
        with pytest.raises(DataError, match="line 1 is no event of a journal"):
            read_journal(path)
    for listed in ([4], [-1]):
        with pytest.raises(DataError, match="clients that are not among 4"):
            read_reach({"reachable": listed}).mark_open(4)


def test_rounds_after_the_checkpoint_of_a_start_did_not_happen(tmp_path):
    """The node had done rounds 0 to 2, and began again in round 1."""
    events: list[dict] = [{"event": "start", "round": -1, "half": False}]
    for round in range(3):
        events.append({"event": "read", "round": round, "read": [], "unreachable": []})
        events.append({"event": "round", "round": round, "elapsed": 1.0, "idle": 0.0})
    events.append({"event": "start", "round": 1, "half": True})
    path = tmp_path / ARRIVALS
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    journal = read_journal(path)
    assert (journal.last, list(journal.reads)) == (0, [0])
    assert [journal.sends_half(round) for round in (0, 1, 5)] == [False, True, True]


def test_a_run_with_common_rounds_is_told_to_be_simulated(tmp_path, networks):
    path = tmp_path / ARRIVALS
    path.write_text(json.dumps({"event": "pull", "round": 0}) + "\n")
    with pytest.raises(ConfigError, match="a run with common rounds"):
        read_journal(path)
    plan = free_plan(pace="common", max_staleness=None)
    with pytest.raises(ConfigError, match="pace is 'common'"):
        replay(plan, networks().roster, [])


def test_private_training_cannot_be_repeated(networks):
    network = networks()
    private = replace(network.plan.settings.local, dp={"clip": 1.0, "noise_multiplier": 1.0})
    plan = replace(network.plan, settings=replace(network.plan.settings, local=private))
    with pytest.raises(ConfigError, match=r"local\.dp is set; a run with private training"):
        replay(plan, network.roster, [])
