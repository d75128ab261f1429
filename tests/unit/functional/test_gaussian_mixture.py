"""The mixture that tells neighbors from strangers."""

import pytest
import torch

from coterie.functional.gaussian_mixture import MixtureOptions, correct_bags, find_neighbors
from coterie.rng import Rng


def split(scores, first, mask=None, **how):
    scores = torch.tensor([scores]).double()
    first = torch.tensor([first])
    mask = torch.ones_like(first) if mask is None else torch.tensor([mask])
    chosen, usable = find_neighbors(scores, first, mask, MixtureOptions(**how))
    return chosen[0].nonzero().flatten().tolist() if bool(usable) else None


HIGH, LOW = [0.90, 0.91, 0.89], [0.10, 0.11, 0.09]


@pytest.mark.parametrize("em", ["hard", "soft"])
def test_well_separated_scores_are_split_exactly(em):
    """Invariant 34: the bag has an outlier (0.09), the candidates two of the own cluster (0.905, 0.895)."""
    scores = [*HIGH, 0.09, 0.10, 0.11, 0.905, 0.895]
    first = [True] * 4 + [False] * 4
    assert split(scores, first, em=em) == [0, 1, 2, 6, 7]


@pytest.mark.parametrize("em", ["hard", "soft"])
@pytest.mark.parametrize(("a", "b"), [(1e-3, 0.0), (1e4, -7.0), (1.0, 100.0)])
def test_the_split_does_not_depend_on_scale_or_offset(em, a, b):
    """Invariant 35: s -> a s + b with a > 0, on random scores."""
    draws = Rng(0).generator("test")
    for _ in range(5):
        scores = draws.normal(size=8) + (draws.random(8) < 0.5) * 3
        first = ([True] * 4) + ([False] * 4)
        assert split(scores.tolist(), first, em=em) == split(
            (a * scores + b).tolist(), first, em=em
        )


def test_labels_are_switched_when_the_bag_was_wrong():
    """Invariant 36: all of the bag are low and all candidates high: the neighbors are the candidates.

    With component = "first" the bag's component stays the neighbors' one, which here is the low
    group.
    """
    scores, first = [*LOW, *HIGH], [True] * 3 + [False] * 3
    assert split(scores, first) == [3, 4, 5]
    assert split(scores, first, component="first") == [0, 1, 2]


@pytest.mark.parametrize("em", ["hard", "soft"])
@pytest.mark.parametrize(
    ("scores", "first"),
    [
        ([0.5] * 6, [True] * 3 + [False] * 3),  # all equal
        ([0.9, 0.1, 0.2], [True, False, False]),  # one member of the bag
        ([0.9, 0.1], [True, False]),
        ([1e6, 0.3, -1e6, 0.3], [True, True, False, False]),
    ],
)
def test_degenerate_scores_do_not_crash(em, scores, first):
    """Invariant 34: it ends, and either somebody is a neighbor or the bag is kept."""
    assert split(scores, first, em=em) != []


def test_one_side_empty_keeps_the_bag():
    """Invariant 34: no candidate arrived, nobody of the bag did, or nothing at all."""
    assert split([0.9, 0.8], [True, True]) is None
    assert split([0.9, 0.8], [False, False]) is None
    assert split([0.9, 0.1], [True, False], [True, False]) is None
    assert split([0.9, 0.1], [True, False], [False, False]) is None


def test_equal_scores_go_to_the_larger_component():
    """The densities are the same, so the weights decide: 3 of 5 start as neighbors and then all are; 2 of 5: none."""
    assert split([0.5] * 5, [True] * 3 + [False] * 2) == [0, 1, 2, 3, 4]
    assert split([0.5] * 5, [True] * 2 + [False] * 3) is None


def test_monotone_takes_everybody_above_the_mean():
    """A narrow neighbor component (0.90, 0.91, 0.92) loses 1.5 to the wide other one; monotone takes it back."""
    scores, first = [0.90, 0.91, 0.92, 0.1, -0.5, 0.6, 1.5], [True] * 3 + [False] * 4
    assert split(scores, first) == [0, 1, 2]
    assert split(scores, first, monotone=True) == [0, 1, 2, 6]


def test_monotone_takes_those_at_the_mean_too():
    """The first component holds 0 and 10 around 5; the scores of 5 are the other's, which is much narrower."""
    scores, first = (
        torch.tensor([[0.0, 10.0, 5.0, 5.0]]),
        torch.tensor([[True, True, False, False]]),
    )
    here = torch.ones(1, 4, dtype=torch.bool)
    found, _ = find_neighbors(scores, first, here, MixtureOptions(component="first"))
    assert found.tolist() == [[True, True, False, False]]
    found, _ = find_neighbors(scores, first, here, MixtureOptions(component="first", monotone=True))
    assert found.tolist() == [[True] * 4]


def test_what_did_not_arrive_plays_no_part():
    """The slot that did not arrive may show anything."""
    for garbage in (0.5, 1e9, float("nan")):
        scores = [*HIGH, garbage, *LOW]
        got = split(scores, [True] * 4 + [False] * 3, [True] * 3 + [False] + [True] * 3)
        assert got == [0, 1, 2]


def test_rows_do_not_influence_each_other():
    """Each client's split is the same alone and among others."""
    draws = torch.from_numpy(Rng(1).generator("test").normal(size=(7, 8)))
    first = (torch.arange(8) < 4).expand(7, 8)
    mask = torch.ones(7, 8, dtype=torch.bool)
    for em in ("hard", "soft"):
        chosen, usable = find_neighbors(draws, first, mask, MixtureOptions(em))
        for row in range(7):
            alone = find_neighbors(
                draws[row, None], first[row, None], mask[row, None], MixtureOptions(em)
            )
            assert torch.equal(alone[0][0], chosen[row])
            assert bool(alone[1]) == bool(usable[row])


def test_the_bag_is_corrected_where_it_was_examined():
    """Invariant 34: B = {1, 2, 3, 9}; 1, 2, 3 examined, 3 is low; candidate 5 is high: B becomes {1, 2, 5, 9}."""
    bag = torch.zeros(1, 10, dtype=torch.bool)
    bag[0, [1, 2, 3, 9]] = True
    slots = torch.tensor([[1, 2, 3, 4, 5, 6]])
    scores = torch.tensor([[0.90, 0.91, 0.1, 0.11, 0.905, 0.09]])
    first = torch.tensor([[True] * 3 + [False] * 3])
    new = correct_bags(bag, slots, scores, first, torch.ones_like(first), MixtureOptions())
    assert new[0].nonzero().flatten().tolist() == [1, 2, 5, 9]
    silent = torch.tensor([[True, True, False, True, True, True]])
    new = correct_bags(bag, slots, scores, first, silent, MixtureOptions())
    assert new[0].nonzero().flatten().tolist() == [1, 2, 3, 5, 9]
