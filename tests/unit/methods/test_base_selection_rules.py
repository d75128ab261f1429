"""Selection rules of one's own: what a client remembers of the peers that it has read."""

import dataclasses
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.selection import first_only

from coterie._util import manifest
from coterie.cluster.blocks import ThreadBlocks, simulate_in_blocks
from coterie.errors import CheckpointError, ConfigError
from coterie.exchange.base import Inbox
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.functional.selection import PeerKnowledge
from coterie.methods.base import PeerMethod, ReadHistory, average_models
from coterie.methods.dac import Dac
from coterie.methods.fedper import DFedAlt
from coterie.methods.panm import PanmLoss
from coterie.methods.peer_table import DatedTable
from coterie.methods.random_gossip import Random
from coterie.simulation import _memory, run
from coterie.simulation.run import make_task, simulate
from coterie.testing import check_method, tiny_federation, tiny_settings

CLIENTS = 9


def returning(known: PeerKnowledge) -> torch.Tensor:
    """Prefer who was read often and long ago: each number that a rule is given counts."""
    return known.noise + 0.7 * known.count + 0.2 * known.age


RULE = f"{__name__}:returning"


@dataclass(frozen=True)
class ReadPairs:
    count: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class RuleOfPairs(PeerMethod):
    """Random with that rule, and a count and a round for each pair of clients: the reference."""

    kind: ClassVar[str] = "random"
    num_peers: int = 2

    def init_memory(self, task, rng):
        count = torch.zeros(len(task), task.population, dtype=torch.int64)
        return ReadPairs(count, count - 1)

    def exchange(self, rnd, state):
        memory, population = state.memory, rnd.task.population
        age = torch.where(memory.last < 0, -1, rnd.index - memory.last)
        scores = rnd.rng.gumbel("peers", rnd.ids, population) + 0.7 * memory.count + 0.2 * age
        scores[~rnd.candidates] = -torch.inf
        order = scores.argsort(dim=1, descending=True)[:, : self.num_peers]
        peers = torch.where(scores.gather(1, order) > -torch.inf, order, -1)
        inbox = rnd.exchange.pull(self.publish(rnd.task, state), peers)
        count, last = memory.count.clone(), memory.last.clone()
        for row, slot in inbox.mask.nonzero().tolist():
            count[row, inbox.peers[row, slot]] += 1
            last[row, inbox.peers[row, slot]] = rnd.index
        return average_models(rnd, replace(state, memory=ReadPairs(count, last)), inbox)


SLOW = {
    "round_seconds": [1.0, 2.0, 1.5, 6.5, 1.2, 3.0, 1.0, 1.0, 4.0],
    "jitter": 0.2,
    "latency": [0.05 * client for client in range(CLIENTS)],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"rounds": 8},
    "participation and acceptance": {"participation": 0.5, "acceptance": True},
    "one after another": {"schedule": "sequential"},
    "new clients": {"new_clients": 2, "new_client_others": "training", "new_client_rounds": 3},
    "new clients who learn alone": {"new_clients": 2, "new_client_rounds": 3},
    "asynchronous": {"schedule": "asynchronous", "time": {**SLOW, "record_seconds": 2.0}},
    "deadlines": {"time": {**SLOW, "deadline_seconds": 2.5}},
}


def go(method: Any, **settings: Any) -> run.Run:
    chosen = tiny_settings(**{"rounds": 5, **settings})
    return simulate(tiny_federation(CLIENTS), method, model="linear", settings=chosen, seed=1)


@pytest.mark.parametrize("name", first_only(SETTINGS))
def test_a_list_of_who_was_read_is_as_good_as_a_number_for_each_member(name):
    """Same bytes of models, same metrics and readings as of a memory of all pairs."""
    settings = SETTINGS[name]
    lists = go(Random(num_peers=2, selection=RULE), **settings)
    pairs = go(RuleOfPairs(), **settings)
    assert torch.equal(lists.params, pairs.params)
    assert lists.metrics.equals(pairs.metrics)
    assert lists.edges.equals(pairs.edges)


def test_the_rule_of_the_test_above_depends_on_what_was_read(play):
    """It reads the same peers again, as one that does not know whom it has read cannot."""
    method = Random(num_peers=2, selection=RULE)
    door = Faulty(InMemory(torch.arange(40), 40), drop=0.3)
    ours = play(method, tiny_federation(40, train=4, validation=2), exchange=door).steps(12)
    memory, read = ours.memory, [set[int]() for _ in range(40)]
    counts = torch.zeros(40, 40, dtype=torch.int64)
    for info in ours.infos:
        for row, slot in info.get("arrived", torch.zeros(0, 0)).nonzero().tolist():
            read[row].add(int(info["peers"][row, slot]))
            counts[row, info["peers"][row, slot]] += 1
    # A column for each member that was read, of whom who was silent is none.
    assert [set(row) - {-1} for row in memory.members.tolist()] == read
    assert memory.members.shape[1] == max(map(len, read)) < 24, "some were read again"
    for row in range(40):
        assert torch.equal(memory.recall(row, 40).count, counts[row])


def test_reads_are_noted_with_the_round_and_silent_peers_are_not():
    mask = torch.tensor([[True, True], [False, True], [False, False]])

    def inbox(peers, mask):
        none = torch.zeros_like(peers)
        return Inbox(torch.zeros(1, 1), none, peers, mask, none, {}, none)

    before = ReadHistory.new_history(3)
    once = before.record_reads(inbox(torch.tensor([[4, 2], [0, 3], [-1, -1]]), mask), 6)
    mask = mask[:, [1, 0]]
    mask[0] = True
    twice = once.record_reads(inbox(torch.tensor([[2, 1], [3, 0], [-1, -1]]), mask), 8)
    assert before.members.shape == (3, 0)
    assert once.members.tolist() == [[4, 2], [3, -1], [-1, -1]]
    assert twice.members.tolist() == [[4, 2, 1], [3, -1, -1], [-1, -1, -1]]
    assert twice.count.tolist() == [[1, 2, 1], [2, 0, 0], [0, 0, 0]]
    assert twice.last.tolist() == [[6, 8, 8], [8, -1, -1], [-1, -1, -1]]
    known = twice.recall(0, 6)
    assert known.count.tolist() == [0, 1, 2, 0, 1, 0]
    assert known.last.tolist() == [-1, 8, 8, -1, 6, -1]


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    [
        Random(num_peers=2, selection=RULE),
        DFedAlt(num_peers=2, selection=RULE, personal_layers=0),
        Dac(num_peers=2, selection=RULE, table=3),
    ],
    ids=["random", "dfedalt", "table"],
)
def test_promises_hold_with_lists(method):
    """Hosted in any grouping, resumed, with silence; a table's ties go to the lowest id."""
    check_method(method, relabel=not isinstance(method, Dac))


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"schedule": "asynchronous"}, {"deadline": 2.5}])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, changes):
    chosen: dict[str, Any] = {"rounds": 6, "checkpoint_seconds": 0.0}
    if "schedule" in changes:
        chosen |= {**changes, "time": SETTINGS["asynchronous"]["time"]}
    elif changes:
        chosen["time"] = SETTINGS["deadlines"]["time"]
    else:
        chosen["participation"] = 0.4

    class Killed(Exception):
        pass

    def start(folder, at=None):
        def kill(progress):
            if progress.round == at:
                raise Killed

        return simulate(
            tiny_federation(CLIENTS), Random(num_peers=2, selection=RULE), model="linear",
            settings=tiny_settings(**chosen), seed=2, folder=tmp_path / folder, resume=True, observer=kill,
        )  # fmt: skip

    whole = start("whole")
    for at in range(6):
        with pytest.raises(Killed):
            start("killed", at)
    assert torch.equal(whole.params, start("killed").params)
    for name in ("metrics.parquet", "edges.parquet", "checkpoint.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


@pytest.mark.parametrize("table", [None, 4])
def test_blocks_whose_clients_have_read_more_or_fewer_are_joined(tmp_path, table):
    """With few participants some blocks have shorter lists; each is as in one process."""
    method: Any = Random(num_peers=2, selection=RULE)
    if table is not None:
        method = Dac(num_peers=2, selection=RULE, table=table)
    chosen = tiny_settings(rounds=4, participation=0.4, engine="loop")
    given = {"model": "linear", "settings": chosen, "seed": 3}
    simulate(tiny_federation(CLIENTS), method, folder=tmp_path / "whole", **given)
    simulate_in_blocks(
        tiny_federation(CLIENTS), method, folder=tmp_path / "split", blocks=[2, 1, 6], start=ThreadBlocks.start, **given,
    )  # fmt: skip
    for name in ("metrics.parquet", "edges.parquet", "checkpoint.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "split" / name).read_bytes()


def test_a_checkpoint_with_a_number_for_each_pair_is_refused(tmp_path):
    """As older versions wrote it."""
    given = {"model": "linear", "settings": tiny_settings(rounds=2), "seed": 1, "folder": tmp_path}
    simulate(tiny_federation(), Random(num_peers=2, selection=RULE), **given)
    for name in ("checkpoint.safetensors", "checkpoint-before.safetensors"):
        if not (tmp_path / name).exists():
            continue
        tensors = load_file(tmp_path / name)
        del tensors["state.memory.members"]
        for part in ("count", "last"):
            tensors[f"state.memory.{part}"] = torch.zeros(6, 6, dtype=torch.int32).numpy()
        with safe_open(str(tmp_path / name), framework="np") as file:
            meta = file.metadata()
        old = partial(save_file, tensors, metadata=meta)
        manifest.replace_files(tmp_path, {name: old})
    given["settings"] = tiny_settings(rounds=3)
    with pytest.raises(CheckpointError, match=r"has no 'members'; it was written by another"):
        simulate(tiny_federation(), Random(num_peers=2, selection=RULE), resume=True, **given)


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("method", "settings", "bytes_a_client"),
    [
        (Random(num_peers=5, selection=RULE), {"rounds": 3}, 12 * 15),
        # No more than there are other clients.
        (Random(num_peers=5, selection=RULE), {"rounds": 100}, 12 * 39),
        (DFedAlt(num_peers=2, selection=RULE), {"rounds": 3}, 12 * 6),
        (Random(num_peers=5), {"rounds": 3}, 0),
        (Random(num_peers=5, selection=RULE), {"rounds": 3, "acceptance": True}, (12 + 9) * 15),
        # In 4 of 400 rounds on average, and 5 standard deviations of 1.99 more: 14 rounds.
        (Random(num_peers=2, selection=RULE), {"rounds": 400, "participation": 0.01}, 12 * 28),
        # Ten rounds of the fastest client in each span of which results are recorded.
        (
            Random(num_peers=1, selection=RULE),
            {
                "rounds": 3,
                "schedule": "asynchronous",
                "time": {"round_seconds": [0.5, 0.1] * 20, "record_seconds": 1.0},
            },
            12 * 30,
        ),
        # Five neighbors of eight bytes, and ids of these and of ten more in each of two corrections.
        (PanmLoss(), {"rounds": 11}, 8 * 5 + 4 * (5 + 20)),
        (PanmLoss(interval=1), {"rounds": 11}, 8 * 5 + 4 * 39),
        (Dac(num_peers=2, selection=RULE), {"rounds": 9}, (8 + 1 + 4 + 4) * 40),
        (Dac(num_peers=2, selection=RULE, table=8), {"rounds": 9}, (4 + 8 + 1 + 4 + 4) * 9),
    ],
)
def test_the_forecast_tells_what_will_be_remembered(monkeypatch, method, settings, bytes_a_client):
    """Twice, before a round and after it."""
    asked = []
    monkeypatch.setattr(_memory, "check_forecast", lambda wanted, *_: asked.append(wanted.memory))
    federation, chosen = tiny_federation(40), tiny_settings(**settings)
    task = make_task(federation, method, two_layers, chosen)
    run.check_driver_memory(task, federation, method, chosen)
    assert asked == [2 * 40 * bytes_a_client]


def test_100_000_clients_with_a_rule_fit(monkeypatch):
    """Five reads in each of 100 rounds: 6,000 bytes a client; before, 800,000."""
    method = Random(num_peers=5, selection=RULE)
    federation = tiny_federation(60)
    task = make_task(federation, method, "linear", tiny_settings())
    assert _memory.estimate_method_memory(method, task, 100_000)[0] == 0
    monkeypatch.setattr(type(task), "population", 100_000)
    found = run._growing_lists(task, method, tiny_settings(rounds=100))
    assert found == 60 * 5 * 100 * 12


# ---------------------------------------------------------------- a rule with a table

SEEN: list[PeerKnowledge] = []


def noting(known: PeerKnowledge) -> torch.Tensor:
    """As `returning`; it notes what it was told."""
    SEEN.append(known)
    return returning(known)


def test_a_rule_is_told_what_the_table_holds_and_nothing_else(play):
    """Members outside are as those that were never read; the client itself is no peer."""
    SEEN.clear()
    ours = play(
        Dac(num_peers=2, selection=f"{__name__}:noting", table=4), tiny_federation(CLIENTS)
    ).steps(5)
    before = ours.memory
    assert isinstance(before, DatedTable)
    SEEN.clear()
    _, info = ours.exchange()
    assert [known.client for known in SEEN] == list(range(CLIENTS))
    outside = 0
    for client, known in enumerate(SEEN):
        for member in range(CLIENTS):
            at = (before.ids[client] == member).nonzero().flatten().tolist()
            told = (
                int(known.count[member]),
                int(known.age[member]),
                float(known.similarity[member]),
                bool(known.measured[member]),
                bool(known.reported[member]),
            )
            if member == client or not at:
                outside += member != client
                assert told == (0, -1, 0.0, False, False)
                continue
            status, last = int(before.status[client, at[0]]), int(before.last[client, at[0]])
            assert told == (
                int(before.count[client, at[0]]),
                5 - last if last >= 0 else -1,
                float(before.similarity[client, at[0]]),
                status == 2,
                status == 1,
            )
            assert (last >= 0) == (status == 2), "what was read was measured"
        scores = returning(known).masked_fill(~known.candidates, -torch.inf)
        assert info["peers"][client].tolist() == scores.argsort(descending=True)[:2].tolist()
    assert outside > 0
    assert bool(info["arrived"].all())


def test_a_table_notes_the_round_of_each_read(play):
    """The last round in which each member of a table was read, by what the rounds reported."""
    ours = play(Dac(num_peers=2, selection=RULE, table=4), tiny_federation(CLIENTS)).steps(6)
    last = torch.full((CLIENTS, CLIENTS), -1)
    for index, info in enumerate(one for one in ours.infos if "peers" in one):
        for row, slot in info["arrived"].nonzero().tolist():
            last[row, info["peers"][row, slot]] = index
    memory, dates = ours.memory, 0
    for row in range(CLIENTS):
        for member, date in zip(memory.ids[row].tolist(), memory.last[row].tolist(), strict=True):
            if date >= 0:
                assert date == last[row, member]
                dates += 1
    assert dates >= 2 * CLIENTS, "those of the last round are in the table"


def test_exploring_is_not_for_a_rule():
    with pytest.raises(ConfigError, match=r"explore is 1; expected 0 with a selection rule"):
        Dac(num_peers=2, table=4, explore=1, selection=RULE)
    assert dataclasses.replace(Dac(num_peers=2, table=4, selection=RULE)).table == 4


def test_a_comparison_without_reading_keeps_the_date_of_the_last_read():
    """Client 4 knows 2, read twice and last in round 6; its sketch says another similarity now."""
    ids = torch.tensor([[2, 4, -1]], dtype=torch.int32)
    before = DatedTable(
        ids,
        torch.tensor([[0.5, 0.0, 0.0]], dtype=torch.float64),
        torch.tensor([[2, 3, 0]], dtype=torch.int8),
        torch.tensor([[2, 0, 0]], dtype=torch.int32),
        torch.zeros(1, 0),
        torch.tensor([[6, -1, -1]], dtype=torch.int32),
    )
    after = before.with_measurements(
        torch.tensor([[2, 3]]),
        torch.tensor([[0.25, 0.75]], dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.bool),
        reads=False,
    )
    known = after.recall(0, 6)
    assert known.count.tolist() == [0, 0, 2, 0, 0, 0]
    assert known.last.tolist() == [-1, -1, 6, -1, -1, -1]
    assert known.similarity.tolist() == [0, 0, 0.25, 0.75, 0, 0]
    assert known.status.tolist() == [0, 0, 2, 2, 0, 0], "the client itself is no peer"


def with_a_number(known: PeerKnowledge, num_peers: int) -> torch.Tensor:
    """Takes more than a rule is given."""
    return known.noise[:num_peers]


def test_a_rule_that_takes_other_arguments_is_refused_in_a_line():
    method = Random(num_peers=2, selection=f"{__name__}:with_a_number")
    with pytest.raises(
        ConfigError,
        match=r"has the arguments \(known: .*, num_peers: int\) .*; expected \(known\)$",
    ):
        simulate(tiny_federation(4), method, model="linear", settings=tiny_settings(rounds=1))
