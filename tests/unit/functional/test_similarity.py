"""Similarities of pairs: values, edge cases, and that hosting changes nothing."""

import math

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError
from coterie.functional import aggregation, similarity
from coterie.rng import Rng


def normal(*shape, seed=0):
    return torch.from_numpy(Rng(seed).generator("test").normal(size=shape))


ALL = torch.ones(3, 3, dtype=torch.bool)
EVERY = torch.arange(3).expand(3, 3)


def test_updates_are_compared_each_with_its_own_norm():
    """u_i = (3, 4) - (3, 0) = (0, 4) and u_j = (5, 5) - (2, 1) = (3, 4): 16 / (4 x 5)."""
    own, origin = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]])
    table, origins = torch.tensor([[5.0, 5.0]]), torch.tensor([[2.0, 1.0]])
    index, mask = torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.bool)
    found = similarity.cosine(own, table, index, mask, origin=origin, origins=origins)
    assert found.tolist() == [[pytest.approx(0.8, abs=1e-15)]]


def test_cosine_and_distance_are_symmetric_and_the_cosine_is_bounded():
    """Invariant 19: s_ij = s_ji for cosine and L2, and the cosine lies in [-1, 1]."""
    w = normal(3, 50)
    cos, gap = similarity.cosine(w, w, EVERY, ALL), similarity.l2_distances(w, w, EVERY, ALL)
    assert torch.equal(cos, cos.T)
    assert torch.equal(gap, gap.T)
    assert bool((cos.abs() <= 1).all())


def test_cosine_ignores_scale_and_distance_does_not():
    """Invariant 19: cos(w, 2v) = cos(w, v); the distance from 0 to 2v is twice that to v."""
    w = normal(3, 20)
    torch.testing.assert_close(
        similarity.cosine(w, 2 * w, EVERY, ALL), similarity.cosine(w, w, EVERY, ALL)
    )
    zero = torch.zeros_like(w)
    torch.testing.assert_close(
        similarity.l2_distances(zero, 2 * w, EVERY, ALL),
        2 * similarity.l2_distances(zero, w, EVERY, ALL),
    )


def test_cosine_of_gradients_from_zero_is_that_of_weights():
    """Invariant 19: with w_0 = 0 the update since the start is the model itself."""
    w, zero = normal(3, 20), torch.zeros(3, 20, dtype=torch.float64)
    got = similarity.cosine(w, w, EVERY, ALL, origin=zero, origins=zero)
    assert torch.equal(got, similarity.cosine(w, w, EVERY, ALL))


def test_identical_models_have_cosine_one_and_the_largest_inverse_distance():
    """Invariant 19: cos = 1 and inverse L2 = 1 / eps."""
    w = normal(1, 30).expand(3, 30)
    torch.testing.assert_close(
        similarity.cosine(w, w, EVERY, ALL), torch.ones(3, 3, dtype=torch.float64)
    )
    assert torch.equal(
        similarity.invert_cost(similarity.l2_distances(w, w, EVERY, ALL)),
        torch.full((3, 3), 1e6).double(),
    )


def test_a_zero_update_has_cosine_zero():
    """Invariant 20: a client that has not moved gives 0, not NaN."""
    w = normal(3, 8)
    cos = similarity.cosine(w, w, EVERY, ALL, origin=w, origins=torch.zeros_like(w))
    assert torch.equal(cos, torch.zeros(3, 3, dtype=torch.float64))


def test_nothing_arrived_is_zero_similarity_whatever_the_slot_shows():
    """A slot that did not arrive may show NaN; its similarity is 0 all the same."""
    w = torch.full((3, 4), torch.nan)
    none = torch.zeros(3, 2, dtype=torch.bool)
    index = torch.zeros(3, 2, dtype=torch.int64)
    assert not similarity.cosine(w, w, index, none).any()
    assert not similarity.invert_cost(similarity.l2_distances(w, w, index, none)).any()
    assert similarity.cosine(w, w, index[:, :0], none[:, :0]).shape == (3, 0)


def test_cosine_of_gradients_subtracts_each_sides_own_origin():
    """u_i = (3, 0) - (2, 0) = (1, 0) and u_j = (5, 5) - (5, 4) = (0, 1): cosine 0; without origins 3/3/sqrt(2)."""
    own, table = torch.tensor([[3.0, 0.0]]), torch.tensor([[5.0, 5.0]])
    origin, origins = torch.tensor([[2.0, 0.0]]), torch.tensor([[5.0, 4.0]])
    slot, here = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    assert float(similarity.cosine(own, table, slot, here, origin=origin, origins=origins)) == 0
    assert float(similarity.cosine(own, table, slot, here)) == pytest.approx(
        math.sqrt(0.5), abs=1e-15
    )


def test_nearly_parallel_vectors_of_a_million_entries_are_told_apart():
    """Invariant 22: float32 vectors, products in float64: correct to 1e-9 against exact summation."""
    a = normal(1_000_000).float()
    b = a + 1e-3 * normal(1_000_000, seed=1).float()
    x, y = a.double().tolist(), b.double().tolist()
    dot = math.fsum(p * q for p, q in zip(x, y, strict=True))
    norms = math.sqrt(math.fsum(p * p for p in x) * math.fsum(q * q for q in y))
    slot, here = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    assert float(similarity.cosine(a[None], b[None], slot, here)) == pytest.approx(
        dot / norms, abs=1e-9
    )


@pytest.mark.parametrize("params", [1, 2, 7, 8192, 8193, 20_011])
def test_hosting_and_threads_change_no_bit(params):
    """A client alone, in a block of three or with two threads gets the same similarities to the last bit."""
    w = normal(40, params).float()
    index = torch.from_numpy(Rng(1).generator("test").integers(0, 40, (40, 4)))
    mask = torch.from_numpy(Rng(2).generator("test").random((40, 4)) < 0.8)
    for measure in (similarity.cosine, similarity.l2_distances):
        whole = measure(w, w, index, mask)
        threads = torch.get_num_threads()
        torch.set_num_threads(2 if threads == 1 else 1)
        try:
            for rows in (slice(7, 8), slice(3, 6)):
                seen = index[rows].unique()
                small = torch.searchsorted(seen, index[rows])  # a table of those senders alone
                assert torch.equal(measure(w[rows], w[seen], small, mask[rows]), whole[rows])
        finally:
            torch.set_num_threads(threads)


def _halved(values):
    """The sum of numbers in the documented order: blocks of 8192, in each the second half is added to the first."""
    total = 0.0
    for first in range(0, len(values), 8192):
        block = values[first : first + 8192]
        while len(block) > 1:
            half = len(block) // 2
            block = np.concatenate([block[:half] + block[half : 2 * half], block[2 * half :]])
        total += block[0]
    return total


@pytest.mark.parametrize("params", [1, 3, 8192, 8193, 20_001])
def test_sums_are_added_in_a_documented_order(params):
    """The same sums in every release, whatever rows an index shows twice; roots are PyTorch's, right to an ulp."""
    own, table, origin, origins = (normal(6, params, seed=seed).float() for seed in range(4))
    index, mask = torch.tensor([[0, 1, 1, 5, 3]] * 6), torch.ones(6, 5, dtype=torch.bool)
    mask[0, 0] = mask[4, 3] = False
    cosines = similarity.cosine(own, table, index, mask, origin=origin, origins=origins)
    distances = similarity.l2_distances(own, table, index, mask)
    left, right = (
        (own.double() - origin.double()).numpy(),
        (table.double() - origins.double()).numpy(),
    )
    for i, k in mask.nonzero().tolist():
        a, b = left[i], right[index[i, k]]
        true = _halved(a * b) / (math.sqrt(_halved(a * a)) * math.sqrt(_halved(b * b)))
        assert cosines[i, k].item() == pytest.approx(max(-1.0, min(1.0, true)), rel=1e-15, abs=0)
        gap = own[i].double().numpy() - table[index[i, k]].double().numpy()
        assert distances[i, k].item() == pytest.approx(
            math.sqrt(_halved(gap * gap)), rel=1e-15, abs=0
        )


def test_inverse_handles_lost_and_diverged_models():
    """1 / (0.5 + 0.5) = 1; an infinite loss and a loss that is not a number give 0."""
    got = similarity.invert_cost(torch.tensor([[0.5, torch.inf, torch.nan]]), eps=0.5)
    assert got.tolist() == [[1.0, 0.0, 0.0]]


def test_losses_below_zero_have_no_inverse():
    """1 / -2 is below 1 / 5 although a loss of -2 is the better one."""
    with pytest.raises(ConfigError, match=r"losses of 0 and more; found -2: choose another"):
        similarity.invert_cost(torch.tensor([[5.0, -2.0, torch.nan, torch.inf]]))


def test_equal_models_are_averaged_without_an_epsilon():
    """Three peers at no distance have the same weight as the client itself, a quarter each."""
    alike = similarity.invert_cost(torch.zeros(1, 3), eps=0.0)
    weights, own = aggregation.fedsim_weights(alike, torch.ones(1, 3, dtype=torch.bool))
    assert weights.tolist() == [[0.25] * 3]
    assert own.tolist() == [0.25]
    assert bool(torch.isfinite(alike.float()).all()), "a message has float32"


# ---------------------------------------------------------------- predictions


def softmax(logits):
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def test_agreement_is_one_minus_the_total_variation_of_what_is_predicted():
    """Against numpy: classes of samples, positions that count, and labels."""
    one, other = normal(4, 5, 3), normal(4, 5, 3, seed=1)
    targets = torch.arange(20).reshape(4, 5) % 3
    targets[0, 2:] = -100
    gap = np.abs(softmax(one.numpy()) - softmax(other.numpy())).sum(-1) / 2
    found = similarity.agree_on_predictions("positions", one, other, targets)
    assert found == pytest.approx(1 - gap[targets.numpy() != -100].mean(), abs=1e-12)
    found = similarity.agree_on_predictions("class", one[0], other[0], targets[1])
    assert found == pytest.approx(1 - gap[0].mean(), abs=1e-12)
    yes = [1 / (1 + np.exp(-logits[0].numpy())) for logits in (one, other)]
    found = similarity.agree_on_predictions("labels", one[0], other[0], targets[0])
    assert found == pytest.approx(1 - np.abs(yes[0] - yes[1]).mean(), abs=1e-12)
    assert similarity.agree_on_predictions("positions", one, one, targets) == 1


def test_numbers_are_no_predictions_of_classes():
    with pytest.raises(ConfigError, match=r"'agreement' compares predicted classes, .* 'inv_loss'"):
        similarity.agree_on_predictions("numbers", normal(3), normal(3), normal(3))


def test_predicted_classes_are_those_of_finite_outputs_that_count():
    """Worked by hand: the larger of two, the sign of a label; -1 where a number is missing or a position does not count."""
    outputs = torch.tensor([[1.0, 2.0], [3.0, 0.0], [math.nan, 0.0], [math.inf, 0.0]])
    targets = torch.zeros(4, dtype=torch.int64)
    assert similarity.predict_classes("class", outputs, targets).tolist() == [1, 0, -1, -1]
    labels = similarity.predict_classes("labels", outputs - 1.5, outputs)
    assert labels.tolist() == [[0, 1], [1, 0], [-1, 0], [-1, 0]]
    places = torch.tensor([[5, -100], [0, 1]])
    found = similarity.predict_classes("positions", outputs.view(2, 2, 2), places)
    assert found.tolist() == [[1, -1], [-1, -1]]


def test_the_share_of_equal_classes_is_of_those_that_the_receiver_predicts():
    own = torch.tensor([[1, 2, -1, 0], [-1, -1, -1, -1]])
    table = torch.tensor([[1, 2, 3, 1], [0, 2, -1, -1]])
    index, mask = torch.tensor([[0, 1, 0], [0, 1, 1]]), torch.tensor([[True, True, False]] * 2)
    found = similarity.share_of_equal_classes(own, table, index, mask)
    assert found.tolist() == [[pytest.approx(2 / 3), pytest.approx(1 / 3), 0], [0, 0, 0]]
