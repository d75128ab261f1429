"""PENS."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from coterie.errors import ConfigError
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.functional import selection
from coterie.methods import base
from coterie.methods.base import PeerMethod, average_models
from coterie.methods.pens import Pens, PensMemory
from coterie.runtime.task import StandsStill, make_task
from coterie.testing import tiny_federation, tiny_settings


def count_kept(memory, population):
    """A number for each pair, as the paper writes it ($q_{ij}$)."""
    kept = torch.zeros(len(memory.ids), population, dtype=torch.int64)
    for row, (ids, count) in enumerate(
        zip(memory.ids.tolist(), memory.count.tolist(), strict=True)
    ):
        for member, often in zip(ids, count, strict=True):
            assert (member >= 0) == (often > 0)
            assert member < 0 or not kept[row, member], "an id has one column"
            if member >= 0:
                kept[row, member] = often
    return kept


@dataclass(frozen=True)
class KeptPairs:
    kept: torch.Tensor


@dataclass(frozen=True)
class PensOfPairs(PeerMethod):
    """PENS with a count and a Gumbel draw for each pair: the reference."""

    kind: ClassVar[str] = "pens-of-pairs"
    pens: Pens

    def init_memory(self, task, rng):
        return KeptPairs(torch.zeros(len(task.ids), task.population, dtype=torch.int64))

    def exchange(self, rnd, state):
        pens, kept, population = self.pens, state.memory.kept, rnd.task.population
        noise = rnd.rng.gumbel("peers", rnd.ids, population)
        message = self.publish(rnd.task, state)
        if rnd.index < pens.stage_one_rounds:
            peers = selection.sample_uniformly(noise, pens.num_sampled, rnd.candidates)
            inbox = rnd.exchange.pull(message, peers)
            keep = selection.select_lowest(rnd.task.score(inbox), peers, pens.num_kept, inbox.mask)
            rows, slots = keep.nonzero(as_tuple=True)
            kept = kept.clone()
            kept[rows, peers[rows, slots]] += 1
        else:
            chance = pens.num_kept * pens.stage_one_rounds / (population - 1)
            peers = selection.sample_uniformly(
                noise, pens.num_peers, rnd.candidates & (kept > chance)
            )
            inbox = rnd.exchange.pull(message, peers)
            keep = inbox.mask
        return average_models(rnd, replace(state, memory=KeptPairs(kept)), inbox, None, keep)


@pytest.mark.parametrize(("clients", "participation"), [(6, 1.0), (40, 0.5), (90, 1.0)])
def test_a_column_for_each_member_that_was_kept_is_as_good_as_one_for_each_member(
    play, clients, participation
):
    """Same bytes of models, same peers, same counts; also where a row holds less than the population."""
    pens = Pens(num_sampled=4, num_kept=2, num_peers=3, stage_one_rounds=4)
    runs = []
    for method in (pens, PensOfPairs(pens=pens)):
        federation = tiny_federation(clients, train=4, validation=2)
        door = Faulty(InMemory(torch.arange(clients), clients), drop=0.2)
        runs.append(play(method, federation, exchange=door, participation=participation).steps(7))
    ours, reference = runs
    assert ours.memory.ids.shape == (clients, min(8, clients - 1))
    assert torch.equal(ours.state.params, reference.state.params)
    assert torch.equal(count_kept(ours.memory, clients), reference.memory.kept)
    for one, other in zip(ours.infos, reference.infos, strict=True):
        for name in ("peers", "weights", "own_weight") if "peers" in other else ():
            assert torch.equal(one[name], other[name])
    assert any(int((info["weights"] > 0).sum()) for info in ours.infos[-2:]), "stage two reads"


def test_a_member_kept_again_is_counted_in_its_column_and_a_full_row_takes_nobody_in():
    memory = PensMemory.nobody_kept(2, 2)
    peers = torch.tensor([[7, 3, 5], [1, 0, -1]])
    memory = memory.add_kept(peers, torch.tensor([[True, False, True], [False, True, False]]))
    assert memory.ids.tolist() == [[7, 5], [0, -1]]
    memory = memory.add_kept(peers, torch.tensor([[False, True, True], [True, True, False]]))
    assert memory.ids.tolist() == [[7, 5], [0, 1]]
    assert memory.count.tolist() == [[1, 2], [2, 1]]


def test_draws_in_a_large_population_read_and_find_as_in_a_small_one(play, monkeypatch):
    """Members are drawn in turn: four distinct ones a round, and in stage two those kept often."""
    monkeypatch.setattr("coterie.methods.pens.LARGEST_WITH_PAIRS", 10)
    federation = tiny_federation(12, train=4, validation=2)
    run = play(Pens(num_sampled=4, num_kept=2, num_peers=3, stage_one_rounds=5), federation)
    drawn = []
    monkeypatch.setattr(base, "_draw_in_turn", lambda *given, f=base._draw_in_turn: drawn.append(f(*given)) or drawn[-1])  # fmt: skip
    for _ in range(5):
        run.steps(1)
        for client, row in enumerate(run.infos[-1]["peers"].tolist()):
            assert len(set(row) - {client, -1}) == 4
    kept = count_kept(run.memory, 12)
    run.steps(1)
    for i, row in enumerate(run.infos[-1]["peers"].tolist()):
        friends = {j for j in range(12) if kept[i, j] > 10 / 11}
        assert {j for j in row if j >= 0} <= friends
        assert sum(j >= 0 for j in row) == min(3, len(friends))
    assert len(drawn) == 6


def test_stage_one_keeps_the_peers_with_the_lowest_loss(play, loss_table):
    """Of five peers read the two with the lowest loss on the own data are averaged with and counted."""
    run = play(Pens(num_sampled=5, num_kept=2))
    state, info = run.exchange()
    losses = loss_table(run.loop.task, run.state.params)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        best = sorted(sorted(others, key=lambda j: float(losses[i, j]))[:2])
        assert count_kept(state.memory, 6)[i].nonzero().flatten().tolist() == best
        weighed = info["peers"][i][info["weights"][i] > 0].tolist()
        assert sorted(weighed) == best
    torch.testing.assert_close(info["own_weight"], torch.full((6,), 1 / 3).double())
    assert info["passes"].tolist() == [5 * 12] * 6


def test_counts_add_up_and_stage_two_gossips_with_those_kept_often(play):
    """Invariant 32: a row of q sums to m x T1; neighbors are strictly above m T1 / (K - 1) = 1.2."""
    run = play(Pens(num_sampled=4, num_kept=2, num_peers=3, stage_one_rounds=3)).steps(3)
    kept = count_kept(run.memory, 6)
    assert kept.sum(1).tolist() == [6] * 6
    assert not kept.diagonal().any()
    run.steps(1)
    info = run.infos[-1]
    assert torch.equal(count_kept(run.memory, 6), kept)
    assert "passes" not in info
    for i, row in enumerate(info["peers"].tolist()):
        friends = {j for j in range(6) if kept[i, j] > 1.2}
        chosen = {j for j in row if j >= 0}
        assert chosen <= friends
        assert len(chosen) == min(3, len(friends))


def test_nobody_kept_often_enough_is_local_training(play):
    """Kept once each by chance alone, with a threshold of 5: every client trains alone in stage two."""
    run = play(Pens(num_sampled=5, num_kept=5, num_peers=2, stage_one_rounds=2)).steps(2)
    assert bool((run.memory.count.sum(1) == 10).all())
    found = run.loop.method.find_neighbors(run.memory, 6)
    assert bool((found == -1).all()), "2 is not above 5 x 2 / 5"
    state, info = run.exchange()
    assert torch.equal(state.params, run.state.params)
    assert info["own_weight"].tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("threshold", "bound", "friends"),
    [("expected", 0.404, [1, 2]), ("dac_repo", 0.4, [1, 2]), ("pens_repo", -0.596, [1, 2])],
)
@pytest.mark.option("Pens.threshold", "expected", "dac_repo", "pens_repo")
def test_the_three_published_thresholds(threshold, bound, friends):
    """Invariant 32: K = 100, T1 = 20, m = 2; below 0 the last would let strangers in, who were never kept."""
    pens = Pens(num_kept=2, stage_one_rounds=20, threshold=threshold)
    assert pens.min_times_kept(100) == pytest.approx(bound, abs=5e-4)
    kept = PensMemory(torch.tensor([[1, 2, -1]]), torch.tensor([[1, 7, 0]]))
    assert pens.find_neighbors(kept, 100)[0].tolist() == [*friends, -1]


def test_thresholds_differ_where_counts_lie_between():
    """K = 5, m = 2, T1 = 10: 5, 4 and 4; a count of 5 is above the latter two alone."""
    kept = PensMemory(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 4, 5]]))
    found = {
        name: Pens(num_kept=2, stage_one_rounds=10, threshold=name)
        .find_neighbors(kept, 5)[0]
        .tolist()
        for name in ("expected", "dac_repo", "pens_repo")
    }
    assert found["expected"] == [-1, 2, -1, -1]
    assert found["dac_repo"] == found["pens_repo"] == [1, 2, -1, 4]


def test_peers_that_do_not_answer_are_neither_kept_nor_counted(play):
    run = play(
        Pens(num_sampled=5, num_kept=3), exchange=Faulty(InMemory(torch.arange(6), 6), drop=0.7)
    ).steps(2)
    for info in run.infos:
        assert not info["weights"][~info["arrived"]].any()
        assert bool(((info["weights"] > 0).sum(1) == info["arrived"].sum(1).clamp(max=3)).all())
    expected = torch.stack([info["arrived"].sum(1).clamp(max=3) for info in run.infos]).sum(0)
    assert torch.equal(run.memory.count.sum(1), expected)


def test_impossible_settings_are_refused(play):
    with pytest.raises(
        ConfigError, match=r"pens: num_sampled is 1; expected at least num_kept = 2"
    ):
        Pens(num_sampled=1)
    with pytest.raises(
        ConfigError, match=r"pens: stage_one_rounds is -1; expected a whole number, 0 or more"
    ):
        Pens(stage_one_rounds=-1)
    _, info = play(Pens(num_sampled=50, num_kept=50), tiny_federation(3)).exchange()
    assert info["peers"].shape == (3, 2)


def test_stage_two_in_which_nobody_is_read_is_warned_of():
    """Two of two others are kept in all five rounds, and 5 is not above 2 x 5 / 2.

    With three others 5 is above 2 x 5 / 3. Ten of twenty take part in half of the rounds, in which
    chance keeps a member 2 x 10 / 19 times and not 2 x 20 / 19; with one kept of ten rounds both
    are below 1, and admit the same members.
    """
    method, settings = Pens(stage_one_rounds=5), tiny_settings(rounds=10)
    with pytest.warns(StandsStill, match=r"^pens: in stage two every client trains alone: .* 5 "):
        make_task(tiny_federation(3), method, "linear", settings)
    make_task(tiny_federation(4), method, "linear", settings)
    half = tiny_settings(rounds=30, participation=10)
    with pytest.warns(StandsStill, match=r"10 of the 20 rounds of stage one, .* 2.105 times"):
        make_task(tiny_federation(20), Pens(stage_one_rounds=20), "linear", half)
    make_task(tiny_federation(20), Pens(num_kept=1, stage_one_rounds=10), "linear", half)
