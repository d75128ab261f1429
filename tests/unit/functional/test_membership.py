"""Membership inference: the attacks' scores, and what tells how well they do."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from coterie.errors import ConfigError
from coterie.functional import membership
from coterie.rng import Rng


def drawn(runs=8, samples=400, away=0.0, seed=0):
    """Values that are `away` larger for members, around a level of each sample, and who is a member."""
    stream = Rng(seed).generator("test")
    half = torch.from_numpy(stream.random((runs // 2, samples)) < 0.5)
    member = torch.stack([half, ~half], 1).flatten(0, 1)
    level = 3 * torch.from_numpy(stream.normal(size=samples))
    return level + torch.from_numpy(stream.normal(size=(runs, samples))) + away * member, member


def test_confidence_is_the_logit_of_the_probability():
    p = torch.tensor([0.01, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(membership.logit_confidence(-p.log()), (p / (1 - p)).log())
    edge = membership.logit_confidence(torch.tensor([0.0, math.inf, math.nan, -1.0]))
    assert torch.isfinite(edge).all()
    assert edge[0] > edge[1] == edge[2]


def test_auc_is_that_of_the_roc_curve_with_ties():
    stream = Rng(0).generator("test")
    scores, member = (
        torch.from_numpy(stream.integers(7, size=500)).double(),
        torch.from_numpy(stream.random(500) < 0.3),
    )
    assert membership.attack_auc(scores, member) == pytest.approx(
        roc_auc_score(member.numpy(), scores.numpy())
    )


def test_members_are_found_at_one_per_cent_of_false_alarms():
    """Of normal scores one and a half deviations apart: the power of a one-sided test."""
    stream = Rng(0).generator("test")
    member = torch.arange(40_000) % 2 == 0
    scores = torch.from_numpy(stream.normal(size=40_000)) + 1.5 * member
    expected = stats.norm.sf(stats.norm.isf(0.01) - 1.5)
    assert membership.true_positive_rate(scores, member) == pytest.approx(expected, abs=0.02)
    assert (
        membership.true_positive_rate(torch.zeros(10), torch.arange(10) < 5) == 0
    )  # ties find nobody


def test_the_likelihood_ratio_is_that_of_normal_distributions():
    """Written out for one sample of one run with scipy's densities."""
    values, member = drawn(samples=50, away=1.0)
    found = membership.likelihood_ratio(values, member)
    others = [0, 1, 4, 5, 6, 7]  # run 3 is attacked; run 2 is its pair
    fits = {}
    for inside in (True, False):
        chosen = [
            [float(values[r, s]) for r in others if bool(member[r, s]) == inside] for s in range(50)
        ]
        assert {len(one) for one in chosen} == {3}
        fits[inside] = (
            np.mean(chosen[7]),
            math.sqrt(np.mean([np.var(one, ddof=1) for one in chosen])),
        )
    value = float(values[3, 7])
    expected = stats.norm.logpdf(value, *fits[True]) - stats.norm.logpdf(value, *fits[False])
    assert float(found[3, 7]) == pytest.approx(expected)


def test_the_likelihood_ratio_knows_how_hard_a_sample_is():
    values, member = drawn(away=2.0)
    by_value, by_ratio = (membership.attack_auc(s.flatten(), member.flatten()) for s in
                          (values, membership.likelihood_ratio(values, member)))  # fmt: skip
    assert by_value < 0.75
    assert by_ratio > 0.85


@pytest.mark.parametrize("seed", range(3))
def test_without_a_difference_it_guesses(seed):
    values, member = drawn(samples=1000, seed=seed)
    scores = membership.likelihood_ratio(values, member)
    assert membership.attack_auc(scores.flatten(), member.flatten()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("runs", [4, 7])
def test_runs_come_in_three_pairs_or_more(runs):
    with pytest.raises(ConfigError, match=f"runs is {runs}; expected an even number, 6 or more"):
        membership.likelihood_ratio(torch.zeros(runs, 3), torch.zeros(runs, 3).bool())
