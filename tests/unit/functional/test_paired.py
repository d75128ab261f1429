"""Intervals, corrections and power, on simulated studies whose true differences are known."""

import math

import numpy as np
import pytest
from scipy import stats

from coterie.functional.paired import (
    correct_holm,
    find_seeds_needed,
    mean_difference,
    overlap_from_share,
    power_of_t_test,
)

DRAWS = 2000


def studies(seeds, *, difference=0.02, clients=8, methods=2, tails=None):
    """Simulated final metrics: draws x methods x seeds x clients; method 0 is better by a difference.

    Seeds have a level of their own (the split, the initial models), clients too, fixed over seeds
    as those of named hospitals are; a method has better and worse seeds, in which all its clients
    share, and clients that it suits.
    """
    rng = np.random.default_rng([seeds, clients, methods, tails or 0])
    shared = rng.standard_normal if tails is None else lambda size: rng.standard_t(tails, size)
    shape = (DRAWS, methods, seeds, clients)
    values = (
        0.8
        + 0.05 * rng.standard_normal((DRAWS, 1, seeds, 1))
        + 0.1 * rng.standard_normal((1, 1, 1, clients))
    )
    suits = 0.02 * rng.standard_normal((1, methods, 1, clients))
    suits -= suits.mean(-1, keepdims=True)  # so that the mean over these clients is as given
    values = (
        values
        + suits
        + 0.02 * shared((DRAWS, methods, seeds, 1))
        + 0.03 * rng.standard_normal(shape)
    )
    values[:, 0] += difference
    return values


def covered(differences, truth, **options):
    """The share of the studies whose interval has the true difference."""
    found = mean_difference(differences, **options)
    return float(((found.low <= truth) & (truth <= found.high)).mean())


@pytest.mark.parametrize("clients", [1, 8, 40])
@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_intervals_cover_the_true_difference_at_the_stated_rate(seeds, clients):
    values = studies(seeds, clients=clients)
    assert 0.93 <= covered((values[:, 0] - values[:, 1]).mean(-1), 0.02) <= 0.97


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_with_heavy_tails_intervals_cover_no_less(seeds):
    """Seeds with three degrees of freedom, some of which are far off: intervals get wider, not wrong."""
    values = studies(seeds, tails=3)
    assert 0.93 <= covered((values[:, 0] - values[:, 1]).mean(-1), 0.02) <= 0.98


def test_with_skewed_seeds_and_few_of_them_intervals_cover_less():
    """What the method cannot do: differences of which most are small and few are large. Stated in the docs."""
    rates = {}
    for seeds in (5, 40):
        rng = np.random.default_rng(seeds)
        rates[seeds] = covered(rng.exponential(1.0, (DRAWS, seeds)), 1.0)
    assert 0.86 <= rates[5] <= 0.92
    assert rates[5] < rates[40] <= 0.96


def test_clients_of_a_seed_are_not_independent():
    """An interval over all clients of all seeds, as if each were a study of its own, is too narrow by far."""
    values = studies(5, clients=20)
    differences = values[:, 0] - values[:, 1]
    assert covered(differences.reshape(DRAWS, -1), 0.02) < 0.75
    assert covered(differences.mean(-1), 0.02) >= 0.93


@pytest.mark.parametrize("seeds", [3, 10])
def test_no_difference_is_called_established_more_often_than_stated(seeds):
    """Six pairs of four methods that are all the same: some pair is called established in 5 % of studies at most.

    Without the correction it would be in three times as many.
    """
    values = studies(seeds, difference=0.0, methods=4).mean(-1)
    first, second = np.triu_indices(4, 1)
    p = mean_difference(values[:, first] - values[:, second]).p
    wrong = (correct_holm(p) <= 0.05).any(-1).mean()
    assert wrong <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / DRAWS)
    assert (p <= 0.05).any(-1).mean() > 0.13


def test_with_one_true_difference_the_others_are_called_established_as_rarely():
    """Method 0 is far better; the three pairs of the others are still all the same."""
    values = studies(10, difference=0.5, methods=4).mean(-1)
    first, second = np.triu_indices(4, 1)
    corrected = correct_holm(mean_difference(values[:, first] - values[:, second]).p)
    assert (corrected[:, first == 0] <= 0.05).all()
    assert (corrected[:, first > 0] <= 0.05).any(-1).mean() <= 0.05 + 2 * math.sqrt(
        0.05 * 0.95 / DRAWS
    )


@pytest.mark.parametrize("seeds", [5, 20])
def test_seeds_that_share_training_data_are_corrected_for(seeds):
    """Equally correlated differences, as Nadeau and Bengio model repeated splits: rho = n_test / (n_test + n_train)."""
    rng, share = np.random.default_rng(seeds), 0.2
    common, own = rng.standard_normal((DRAWS, 1)), rng.standard_normal((DRAWS, seeds))
    differences = 1.0 + math.sqrt(share) * common + math.sqrt(1 - share) * own
    assert 0.93 <= covered(differences, 1.0, overlap=overlap_from_share(share)) <= 0.97
    narrow = stats.t.ppf(0.975, seeds - 1) * math.sqrt(
        (1 / seeds) / (1 / seeds + overlap_from_share(share))
    )
    expected = 1 - 2 * stats.t.sf(narrow, seeds - 1)  # 86 % with 5 seeds, 64 % with 20
    assert covered(differences, 1.0) == pytest.approx(expected, abs=0.025)


def test_an_interval_agrees_with_the_t_test_of_scipy():
    differences = np.random.default_rng(0).standard_normal((3, 4, 7)) + 0.5
    found, expected = mean_difference(differences), stats.ttest_1samp(differences, 0.0, axis=-1)
    low, high = expected.confidence_interval()
    np.testing.assert_allclose([found.p, found.low, found.high], [expected.pvalue, low, high])
    np.testing.assert_allclose(found.effect, differences.mean(-1) / differences.std(-1, ddof=1))


@pytest.mark.parametrize("differences", [[0.25], [0.0, 0.0, 0.0], [0.2, 0.2 + 1e-16], [-0.1, -0.1]])
def test_one_seed_or_seeds_without_spread_have_no_interval(differences):
    """Several seeds that give the same number are one observation: nothing tells how far another may be."""
    found = mean_difference(np.array(differences))
    assert float(found.mean) == pytest.approx(differences[0])
    assert np.isnan([found.low, found.high, found.p, found.effect]).all()


def test_holm_by_hand():
    """Of 0.01, 0.02, 0.02, 0.5: times 4, 3, 2, 1 gives .04, .06, .04 (raised to .06), .5."""
    p = np.array([[0.5, 0.02, 0.01, 0.02], [0.9, 0.8, 1.0, 0.7]])
    np.testing.assert_allclose(correct_holm(p), [[0.5, 0.06, 0.04, 0.06], [1.0, 1.0, 1.0, 1.0]])


def test_a_pair_without_a_test_does_not_count():
    np.testing.assert_allclose(
        correct_holm(np.array([np.nan, 0.02, 0.03, np.nan])), [np.nan, 0.04, 0.04, np.nan]
    )
    assert np.isnan(correct_holm(np.array([np.nan, np.nan]))).all()


@pytest.mark.parametrize(
    ("effect", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (2.0, 5)]
)
def test_seeds_needed_are_those_of_tables_of_power(effect, seeds):
    """Of the paired t test, two-sided, 5 %, 80 % power, as G*Power prints them."""
    assert find_seeds_needed(effect) == find_seeds_needed(-effect) == seeds


def test_the_power_is_what_simulated_studies_find():
    """And one seed fewer has less than was wanted."""
    needed = find_seeds_needed(0.7, level=0.01)
    assert needed is not None
    differences = 0.7 + np.random.default_rng(1).standard_normal((DRAWS, needed))
    found = (mean_difference(differences).p <= 0.01).mean()
    assert power_of_t_test(0.7, needed, level=0.01) == pytest.approx(found, abs=0.03)
    assert (
        power_of_t_test(0.7, needed, level=0.01)
        >= 0.8
        > power_of_t_test(0.7, needed - 1, level=0.01)
    )


def test_where_seeds_share_training_data_more_of_them_may_never_do():
    """With an effect of 0.5 and a fifth tested, the variance of the mean stays above a quarter of one seed's."""
    assert find_seeds_needed(0.5, overlap=0.25) is None
    assert find_seeds_needed(0.0) is None
    assert find_seeds_needed(math.inf) is None
