"""Whom to read: the probabilities, the draws, and estimates at second hand."""

import itertools
import math

import pytest
import torch

from coterie.functional import selection
from coterie.rng import Rng

IDS = torch.arange(4)
OTHERS = torch.arange(4) != IDS[:, None]
EVERYBODY = torch.ones(4, 4, dtype=torch.bool)


def similarities(seed=0, size=4):
    return torch.from_numpy(Rng(seed).generator("test").normal(size=(size, size)))


def uniform(size=4):
    return (1 - torch.eye(size).double()) / (size - 1)


def test_tau_zero_is_uniform_for_any_similarity():
    """Invariant 10."""
    p = selection.selection_probabilities(1e6 * similarities(), 0.0, EVERYBODY, IDS)
    torch.testing.assert_close(p, uniform(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("considered", [EVERYBODY, ~EVERYBODY])
@pytest.mark.parametrize("floor", [0.0, 1e-6])
def test_nothing_known_is_uniform(considered, floor):
    """Invariant 11: at t = 0 every similarity is 0 (or nobody is considered)."""
    p = selection.selection_probabilities(torch.zeros(4, 4), 30.0, considered, IDS, floor=floor)
    torch.testing.assert_close(p, uniform(), rtol=0, atol=1e-15)


def test_large_tau_gives_all_but_the_floor_to_the_most_similar():
    """Invariant 12: p of the best is (1 + eps) / (1 + 3 eps), of the others eps / (1 + 3 eps)."""
    s = torch.tensor([[9.0, 0.1, 0.3, 0.2]])
    p = selection.selection_probabilities(s, 1e9, EVERYBODY[:1], IDS[:1], floor=1e-6)
    total = 1 + 3e-6
    torch.testing.assert_close(
        p, torch.tensor([[0.0, 1e-6 / total, (1 + 1e-6) / total, 1e-6 / total]]).double()
    )


def test_adding_a_constant_changes_nothing():
    """Invariant 13, when all entries are known."""
    s = similarities()
    a, b = (selection.selection_probabilities(x, 30.0, EVERYBODY, IDS) for x in (s, s + 5.0))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("scale", "tau"), [(1e6, 1.0), (1.0, 1e6), (1e6, 1e6)])
def test_extreme_similarities_stay_finite(scale, tau):
    """Invariant 14: no NaN; each row sums to 1."""
    p = selection.selection_probabilities(scale * similarities(), tau, EVERYBODY, IDS)
    assert bool(torch.isfinite(p).all())
    torch.testing.assert_close(p.sum(1), torch.ones(4, dtype=torch.float64))


def test_a_draw_succeeds_when_one_entry_has_all_the_probability():
    """Invariant 14: three of four others have probability 0 in floating point and three peers are wanted."""
    p = selection.selection_probabilities(
        torch.tensor([[0.0, 0, 1, 0, 0]]), 1e9, torch.ones(1, 5) > 0, IDS[:1], floor=0.0
    )
    noise = Rng(0).gumbel("peers", IDS[:1], 5)
    peers = selection.sample_peers(p.log(), noise, 3, torch.arange(5)[None] != 0)
    assert peers[0, 0] == 2
    assert len(set(peers[0].tolist())) == 3
    assert 0 not in peers


def test_those_not_considered_keep_the_floor():
    """s = (1, ?, 1) of which the middle one is unknown: shares 1/2, 0, 1/2 before the floor of 0.1."""
    known = torch.tensor([[False, True, False, True]])
    p = selection.selection_probabilities(torch.ones(1, 4), 30.0, known, IDS[:1], floor=0.1)
    torch.testing.assert_close(p, torch.tensor([[0.0, 0.6, 0.1, 0.6]]).double() / 1.3)


def test_one_client_has_nobody_to_draw():
    p = selection.selection_probabilities(
        torch.zeros(1, 1), 30.0, torch.ones(1, 1) > 0, torch.tensor([0])
    )
    assert p.tolist() == [[0.0]]


def test_draws_exclude_oneself_and_repeats_and_are_clamped():
    """Invariant 9: i is not in M_i, no repeats, |M_i| = min(m, K - 1)."""
    noise = Rng(0).gumbel("peers", IDS, 4)
    for count in (0, 1, 3, 9):
        peers = selection.sample_peers(torch.zeros(4, 4), noise, count, OTHERS)
        assert peers.shape == (4, min(count, 3))
        for i, row in enumerate(peers.tolist()):
            assert i not in row
            assert len(set(row)) == len(row)


def test_gumbel_top_m_has_the_law_of_successive_draws():
    """Invariant 15: K = 6, m = 2; chi-square of 4000 draws over 10 unordered pairs, at the 0.1 % level (9 degrees)."""
    p = torch.tensor([0.0, 0.4, 0.3, 0.15, 0.1, 0.05]).double()
    allowed = (torch.arange(6) != 0).expand(4000, 6)
    noise = torch.from_numpy(Rng(0).generator("test").gumbel(size=(4000, 6)))
    drawn = selection.sample_peers(p.log().expand(4000, 6), noise, 2, allowed)
    counts: dict[tuple[int, int], int] = {}
    for a, b in drawn.sort(1).values.tolist():
        counts[a, b] = counts.get((a, b), 0) + 1
    chi = 0.0
    for a, b in itertools.combinations(range(1, 6), 2):
        x, y = float(p[a]), float(p[b])
        expected = 4000 * (x * y / (1 - x) + y * x / (1 - y))
        chi += (counts.get((a, b), 0) - expected) ** 2 / expected
    assert chi < 27.9


def test_a_loss_that_is_no_number_is_the_highest():
    """Of NaN, 0.5 and 0.7 the two lowest are the latter; of those that arrived only."""
    scores, peers = torch.tensor([[torch.nan, 0.5, 0.7, 0.1]]), torch.tensor([[4, 5, 6, 7]])
    mask = torch.tensor([[True, True, True, False]])
    assert selection.select_lowest(scores, peers, 2, mask).tolist() == [[False, True, True, False]]


def test_the_best_are_those_that_arrived_then_those_that_stay():
    """9 has the highest score, 3 follows; 4 sent nothing but stays; 5 sent nothing and goes; NaN is the lowest."""
    slots, scores = (
        torch.tensor([[3, 9, 4, 5, 6, -1]]),
        torch.tensor([[0.5, 0.8, 7.0, 8.0, torch.nan, 9.0]]),
    )
    mask = torch.tensor([[True, True, False, False, True, False]])
    stays = torch.tensor([[False, False, True, False, False, True]])
    assert selection.select_best(scores, slots, 2, mask, stays).tolist() == [[9, 3]]
    assert selection.select_best(scores, slots, 5, mask, stays).tolist() == [[9, 3, 6, 4, -1]]
    assert selection.select_best(
        scores[:, :2], slots[:, :2], 4, mask[:, :2], stays[:, :2]
    ).tolist() == [[9, 3, -1, -1]]


def test_peers_who_are_not_allowed_are_dropped():
    allowed = torch.tensor([[True, True, False]])
    assert selection.keep_allowed(torch.tensor([[2, 1, -1]]), allowed).tolist() == [[-1, 1, -1]]


def test_entropy_tau_finds_the_entropy():
    """Five others and 2 bits wanted: the probabilities at the tau found have 2 bits of entropy."""
    s, ids, everybody = similarities(size=6), torch.arange(6), torch.ones(6, 6) > 0
    tau = selection.find_entropy_tau(s, everybody, ids, 2.0)
    p = selection.selection_probabilities(s, tau, everybody, ids, floor=0.0)
    entropy = -torch.special.xlogy(p, p).sum(1) / math.log(2)
    torch.testing.assert_close(entropy, torch.full((6,), 2.0).double())


def test_entropy_tau_is_zero_when_too_few_are_known():
    """Two others can have 1 bit at most; wanted are 2."""
    tau = selection.find_entropy_tau(
        similarities(size=3)[:1], torch.ones(1, 3) > 0, torch.tensor([0]), 2.0
    )
    assert float(tau) < 1e-12


def test_min_max_scales_those_considered():
    s = torch.tensor([[5.0, 3.0, 1.0], [2.0, 2.0, 9.0]])
    considered = torch.tensor([[False, True, True], [True, True, False]])
    assert selection.scale_min_max(s, considered).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


# ---------------------------------------------------------------- two hops

# Four clients; client 0 hears from 1 (similarity 0.9) and 2 (similarity 0.4). Both know 3: 1 says
# 0.7, 2 says 0.2.
VECTORS = torch.tensor([[0.0, 0, 0, 0], [0.3, 0, 0.5, 0.7], [0.1, 0.6, 0, 0.2], [0, 0, 0, 0]])
KNOWS = VECTORS > 0
HEARD = torch.tensor([[2, 1]])
KNOWN = torch.tensor([[True, True, True, False]])


def hops(preference, known=KNOWN, knows=KNOWS, peers=HEARD):
    return selection.estimate_two_hop(
        known, peers, torch.tensor([preference]).double(), peers.clamp(min=0), VECTORS, knows
    )


def test_an_estimate_comes_from_the_preferred_relay():
    """Invariant 16: of 2 (0.4) and 1 (0.9) the most similar one, 1, is believed: s_03 = 0.7; reversed, 0.2."""
    estimate, found = hops([0.4, 0.9])
    assert found.tolist() == [[False, False, False, True]]
    assert float(estimate[0, 3]) == pytest.approx(0.7)
    assert float(hops([-0.4, -0.9])[0][0, 3]) == pytest.approx(0.2)


def test_ties_between_relays_go_to_the_lowest_id():
    """Invariant 16: equal similarity: client 1 is believed, in whichever slot it is."""
    for peers in (torch.tensor([[2, 1]]), torch.tensor([[1, 2]])):
        assert float(hops([0.5, 0.5], peers=peers)[0][0, 3]) == pytest.approx(0.7)


def test_a_relay_that_does_not_know_is_passed_over():
    """Invariant 16: the most similar relay knows nothing of 3, so the other one's word counts."""
    knows = KNOWS.clone()
    knows[1, 3] = False
    assert float(hops([0.4, 0.9], knows=knows)[0][0, 3]) == pytest.approx(0.2)


def test_what_was_measured_is_never_estimated():
    """Invariant 16: everybody is known already."""
    assert not hops([0.4, 0.9], known=torch.ones(1, 4) > 0)[1].any()


def test_a_silent_relay_says_nothing():
    """The better relay's message did not arrive; when none arrives there is no estimate."""
    assert float(hops([0.4, -torch.inf])[0][0, 3]) == pytest.approx(0.2)
    assert not hops([-torch.inf, -torch.inf])[1].any()


@pytest.mark.parametrize("tau", [0.0, 3.0, 30.0, 300.0])
def test_a_race_chooses_what_gumbel_top_m_chooses(tau: float):
    """The same ids in the same order for the same keyed streams, flat and peaked; most clients need no logarithm."""
    ids, population = torch.arange(40), 300
    similarity = torch.rand(
        40, population, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    mass = selection.selection_probabilities(
        similarity, tau, torch.ones(40, population, dtype=torch.bool), ids
    )
    allowed = torch.arange(population) != ids[:, None]
    certain = torch.zeros(0, dtype=torch.bool)
    for round in range(5):
        rng = Rng(4, round)
        wanted = selection.sample_peers(
            mass.log(), rng.gumbel("peers", ids, population), 5, allowed
        )
        found, sure = selection.sample_peers_quickly(
            mass, rng.pairs("peers", ids, population), 5, allowed
        )
        assert torch.equal(found[sure], wanted[sure])
        certain = torch.cat([certain, sure])
    assert certain.double().mean() > 0.9


def test_a_race_is_not_certain_where_members_without_weight_would_be_drawn():
    """Two have weight, three are wanted: the third is drawn by `sample`, which breaks ties by id."""
    mass = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    draws = torch.full((1, 9), 0.5, dtype=torch.float64)
    _, certain = selection.sample_peers_quickly(mass, draws, 3, torch.ones(1, 9, dtype=torch.bool))
    assert certain.tolist() == [False]


def test_equal_scores_go_to_the_lowest_id():
    """Also where more are equal than are wanted."""
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    assert selection.select_top(scores, 3, torch.ones(1, 6, dtype=torch.bool)).tolist() == [
        [1, 3, 0]
    ]


def test_a_race_is_not_certain_where_too_few_are_allowed():
    """One may be read and two are wanted: `sample` leaves the second slot empty."""
    mass, draws = (
        torch.full((1, 3), 0.5, dtype=torch.float64),
        torch.full((1, 3), 0.5, dtype=torch.float64),
    )
    _, certain = selection.sample_peers_quickly(
        mass, draws, 2, torch.tensor([[False, True, False]])
    )
    assert certain.tolist() == [False]


@pytest.mark.parametrize("population", [1, 7, 8, 9, 100])
def test_a_packed_mask_has_an_eighth_of_the_bytes_and_comes_back(population):
    mask = torch.rand(3, population, generator=torch.Generator().manual_seed(1)) < 0.5
    packed = selection.pack_mask(mask)
    assert packed.shape == (3, -(-population // 8))
    for row in range(3):
        for member in range(population):
            bit = int(packed[row, member // 8]) >> member % 8 & 1
            assert bit == int(mask[row, member])
    assert torch.equal(selection.unpack_mask(packed, population), mask)


def test_peers_are_found_in_lists_and_empty_slots_in_none():
    peers = torch.tensor([[5, 2, -1], [0, 0, 3]])
    found = selection.find_listed(peers, torch.tensor([[2, -1], [3, 9]]))
    assert found.tolist() == [[False, True, False], [False, False, True]]
    assert not selection.find_listed(peers, peers[:, :0]).any()


@pytest.mark.parametrize(
    ("members", "cohort", "least"), [(6, 4, 3), (2, 5, 2), (9, 2, 1), (3, 9, 3)]
)
def test_the_chance_to_take_part_is_the_share_of_cohorts(members, cohort, least):
    """Of nine clients, all cohorts are counted; the group is the first of them."""
    cohorts = list(itertools.combinations(range(9), cohort))
    enough = sum(sum(one < members for one in chosen) >= least for chosen in cohorts)
    found = selection.chance_to_take_part(members, 9, cohort, least)
    assert found == pytest.approx(enough / len(cohorts), abs=1e-12)
