"""Bandits over groups: probabilities worked by hand, bounds by the formula, draws by their frequencies."""

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import brentq

from coterie.errors import ConfigError
from coterie.functional.bandits import (
    Plays,
    bound_rewards,
    draw_group,
    find_competitive,
    list_groups,
    tsallis_weights,
)
from coterie.rng import Rng


def plays(*entries) -> Plays:
    """From (group, reward, chance, spread)."""
    groups, *rest = zip(*entries, strict=True)
    return Plays(np.array(groups), *(np.array(part, dtype=float) for part in rest))


def gumbel(seed: int, size: int, members: int) -> np.ndarray:
    return Rng(seed).generator("bandits").gumbel(size=(size, members))


def test_groups_are_all_of_a_size_each_once():
    found = [tuple(group) for group in list_groups(5, 3).tolist()]
    assert found == list(combinations(range(5), 3))
    with pytest.raises(ConfigError, match=r"999 other members make 165,668,499 groups of 3"):
        list_groups(999, 3)


def test_two_arms_of_tsallis_inf_by_hand():
    """With L = (0, 3/2) and t = 1, x solves 1 / x^2 + 1 / (3/2 - x)^2 = 1, and the weights are its terms."""
    weights, _ = tsallis_weights(np.array([0.0, 1.5]), 0, 1)
    x = -1 / np.sqrt(weights[0])
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert weights[1] == pytest.approx(1 / (1.5 - x) ** 2, rel=1e-9)
    assert weights[0] > weights[1] > 0


@pytest.mark.parametrize("losses", [[0.0], [5.0, 0.1], [1e6, 3.0, 3.0]])
@pytest.mark.parametrize("others", [0, 1, 1000])
@pytest.mark.parametrize("rounds", [1, 50])
def test_probabilities_solve_the_equation_of_tsallis_inf(losses, others, rounds):
    weights, rest = tsallis_weights(np.array(losses), others, rounds)
    assert weights.sum() + others * rest == pytest.approx(1, abs=1e-12)
    # sqrt(t / w_k) = L_k - x has one x for all arms
    found = np.array(losses) - np.sqrt(rounds / weights)
    if others:
        found = np.append(found, -np.sqrt(rounds / rest))
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


def test_what_a_group_earned_bounds_its_neighbors():
    """The mean of min(r + q / u, 1) over its plays; its own mean for itself, nothing for strangers."""
    found = bound_rewards(np.array([0.5, 0.9]), np.array([0.4, 0.2]), 3)
    one = (0.9 + 1.0) / 2
    two = (0.7 + 1.0) / 2
    np.testing.assert_allclose(found, [1, one, two, 0.7])


def test_groups_that_share_members_with_a_poor_one_are_ruled_out():
    groups = list_groups(5, 2)
    played, means = np.array([[0, 1], [2, 3]]), np.array([0.2, 0.8])
    bounds = np.array([[1.0, 0.5, 0.2], [1.0, 1.0, 0.8]])
    open_ = find_competitive(groups, played, means, bounds, 5)
    # One member in common with (0, 1) allows at most 0.5; (2, 3) itself has earned the best mean.
    assert {tuple(g) for g in groups[open_].tolist()} == {(2, 3), (2, 4), (3, 4)}


def test_a_first_draw_is_uniform_over_the_groups():
    counts: dict[tuple, int] = {}
    draw = np.random.default_rng(0)
    none = Plays(np.zeros((0, 2), dtype=int), *(np.zeros(0) for _ in range(3)))
    for _ in range(3000):
        group, chance = draw_group(none, 4, 2, np.ones(4, dtype=bool), draw.gumbel(size=(2, 4)))
        counts[tuple(group)] = counts.get(tuple(group), 0) + 1
        assert chance == pytest.approx(1 / 6)
    # 500 of each expected, with a standard deviation of 20.4
    assert sorted(counts) == list(combinations(range(4), 2))
    assert all(abs(count - 500) < 100 for count in counts.values())


@pytest.mark.full
def test_draws_follow_the_stated_chances():
    """Of groups with unequal weights too: each is drawn as often as the chance that is returned with it."""
    known = plays(([0, 1], 0.9, 0.3, 0.5), ([2, 3], 0.8, 0.3, 0.5), ([0, 4], 0.9, 0.2, 0.5))
    draw, chances, counts = np.random.default_rng(1), {}, {}
    for _ in range(3000):
        group, chance = draw_group(known, 5, 2, np.ones(5, dtype=bool), draw.gumbel(size=(2, 5)))
        key = tuple(group)
        counts[key] = counts.get(key, 0) + 1
        assert chances.setdefault(key, chance) == chance
    assert len({round(chance, 6) for chance in chances.values()}) > 1
    assert sum(chances.values()) == pytest.approx(1)
    for key, chance in chances.items():
        assert abs(counts[key] - 3000 * chance) < 5 * np.sqrt(3000 * chance)


def test_the_numbers_of_the_members_do_not_matter():
    known = plays(([0, 1], 0.9, 0.3, 0.5), ([2, 3], 0.4, 0.3, 0.2), ([0, 4], 0.7, 0.2, 0.5))
    new = np.array([3, 5, 0, 2, 4, 1])  # member m is called new[m]
    renamed = Plays(
        np.sort(new[known.groups], axis=1), *(known.rewards, known.chances, known.spreads)
    )
    for seed in range(20):
        noise, allowed = gumbel(seed, 2, 6), np.array([True] * 5 + [seed % 2 == 0])
        turned, there = np.empty_like(noise), np.empty_like(allowed)
        turned[:, new], there[new] = noise, allowed
        one, chance = draw_group(known, 6, 2, allowed, noise)
        other, again = draw_group(renamed, 6, 2, there, turned)
        assert sorted(new[one].tolist()) == other
        assert chance == pytest.approx(again)


def test_only_allowed_members_are_drawn():
    known = plays(([0, 1], 1.0, 0.1, 0.0))
    allowed = np.array([False, True, True, True, False])
    for seed in range(10):
        group, chance = draw_group(known, 5, 2, allowed, gumbel(seed, 2, 5))
        assert set(group) <= {1, 2, 3}
        assert chance > 0
    assert draw_group(known, 5, 4, allowed, gumbel(0, 4, 5)) == ([], 0.0)


def test_the_best_group_is_found_and_kept():
    """Ten members, of whom four are good: a group earns 0.3 and 0.3 for each good one of two."""
    none = Plays(np.zeros((0, 2), dtype=int), *(np.zeros(0) for _ in range(3)))
    found, late = none, []
    for number in range(150):
        noise = gumbel(number, 2, 10)
        group, chance = draw_group(found, 10, 2, np.ones(10, dtype=bool), noise)
        reward, spread = 0.3 + 0.3 * sum(m < 4 for m in group), 0.07 + 0.43 * 0.9**number
        found = Plays(
            np.concatenate([found.groups, [group]]), np.append(found.rewards, reward),
            np.append(found.chances, chance), np.append(found.spreads, spread),
        )  # fmt: skip
        if number >= 100:
            late.append(reward)
    # By chance a group earns 0.54, the best 0.9.
    assert np.mean(late) > 0.88


def test_chances_follow_from_losses_divided_by_the_chance_of_their_draw():
    """One play of three groups earned 1/2 with chance 1/4: a loss of 2, and 1/(2-x)^2 + 2/x^2 = 1."""
    known = plays(([0, 1], 0.5, 0.25, 1.0))
    x = brentq(lambda x: 1 / (2 - x) ** 2 + 2 / x**2 - 1, -10, -1)
    wanted = {(0, 1): 1 / (2 - x) ** 2, (0, 2): 1 / x**2, (1, 2): 1 / x**2}
    found = {}
    for seed in range(40):
        group, chance = draw_group(known, 3, 2, np.ones(3, dtype=bool), gumbel(seed, 2, 3))
        found[tuple(group)] = chance
    assert found == pytest.approx(wanted, rel=1e-6)
