"""PENS."""

import pytest
import torch

from coterie.errors import ConfigError
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.methods.pens import Pens
from coterie.testing import tiny_federation


def test_stage_one_keeps_the_peers_with_the_lowest_loss(play, loss_table):
    """Of five peers read the two with the lowest loss on the own data are averaged with and counted."""
    run = play(Pens(num_sampled=5, num_kept=2))
    state, info = run.exchange()
    losses = loss_table(run.loop.task, run.state.params)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        best = sorted(sorted(others, key=lambda j: float(losses[i, j]))[:2])
        assert state.memory.kept[i].nonzero().flatten().tolist() == best
        weighed = info["peers"][i][info["weights"][i] > 0].tolist()
        assert sorted(weighed) == best
    torch.testing.assert_close(info["own_weight"], torch.full((6,), 1 / 3).double())
    assert info["passes"].tolist() == [5 * 12] * 6


def test_counts_add_up_and_stage_two_gossips_with_those_kept_often(play):
    """Invariant 32: a row of q sums to m x T1; neighbors are strictly above m T1 / (K - 1) = 1.2."""
    run = play(Pens(num_sampled=4, num_kept=2, num_peers=3, stage_one_rounds=3)).steps(3)
    kept = run.memory.kept
    assert kept.sum(1).tolist() == [6] * 6
    assert not kept.diagonal().any()
    run.steps(1)
    info = run.infos[-1]
    assert torch.equal(run.memory.kept, kept)
    assert "passes" not in info
    for i, row in enumerate(info["peers"].tolist()):
        friends = {j for j in range(6) if kept[i, j] > 1.2}
        chosen = {j for j in row if j >= 0}
        assert chosen <= friends
        assert len(chosen) == min(3, len(friends))


def test_nobody_kept_often_enough_is_local_training(play):
    """Kept once each by chance alone, with a threshold of 5: every client trains alone in stage two."""
    run = play(Pens(num_sampled=5, num_kept=5, num_peers=2, stage_one_rounds=2)).steps(2)
    assert bool((run.memory.kept.sum(1) == 10).all())
    assert not run.loop.method.find_neighbors(run.memory.kept).any(), "2 is not above 5 x 2 / 5"
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
    kept = torch.zeros(1, 100, dtype=torch.int64)
    kept[0, 1], kept[0, 2] = 1, 7
    assert pens.find_neighbors(kept)[0].nonzero().flatten().tolist() == friends


def test_thresholds_differ_where_counts_lie_between():
    """K = 5, m = 2, T1 = 10: 5, 4 and 4; a count of 5 is above the latter two alone."""
    kept = torch.tensor([[0, 5, 6, 4, 5]])
    found = {
        name: Pens(num_kept=2, stage_one_rounds=10, threshold=name).find_neighbors(kept)[0].tolist()
        for name in ("expected", "dac_repo", "pens_repo")
    }
    assert found["expected"] == [False, False, True, False, False]
    assert found["dac_repo"] == found["pens_repo"] == [False, True, True, False, True]


def test_peers_that_do_not_answer_are_neither_kept_nor_counted(play):
    run = play(
        Pens(num_sampled=5, num_kept=3), exchange=Faulty(InMemory(torch.arange(6), 6), drop=0.7)
    ).steps(2)
    for info in run.infos:
        assert not info["weights"][~info["arrived"]].any()
        assert bool(((info["weights"] > 0).sum(1) == info["arrived"].sum(1).clamp(max=3)).all())
    expected = sum(info["arrived"].sum(1).clamp(max=3) for info in run.infos)
    assert torch.equal(run.memory.kept.sum(1), expected)


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
