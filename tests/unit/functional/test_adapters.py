"""Products of adapters, merged and compared without forming them, against numpy that forms them."""

import numpy as np
import pytest
import torch
from torch import nn

from coterie.errors import ConfigError
from coterie.functional import adapters
from coterie.functional.adapters import find_pairs
from coterie.functional.aggregation import ReceivedModels, view_tensors
from coterie.functional.robust import make_rule
from coterie.models.layout import Layout, Slot
from coterie.rng import Rng

RANK = 3


class Adapted(nn.Module):
    """Two layers with adapters, one of them a convolution as peft has it, and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleDict(
            {"lora_A": nn.Linear(7, RANK, bias=False), "lora_B": nn.Linear(RANK, 5, bias=False)}
        )
        self.second = nn.ModuleDict(
            {
                "lora_A": nn.Conv2d(2, RANK, 3, bias=False),
                "lora_B": nn.Conv2d(RANK, 6, 1, bias=False),
            }
        )
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.first["lora_B"](self.first["lora_A"](x)))


LAYOUT = Layout(Adapted(), torch.float64)
SLOTS = tuple(LAYOUT.slots)
SAMPLES = torch.tensor([3.0, 1.0, 4.0], dtype=torch.float64)


def draw_rows(count, key=0):
    return torch.from_numpy(Rng(key).generator("adapters").normal(size=(count, LAYOUT.size)))


def products(row):
    """The formed products of each adapter of a row, with numpy."""
    named = {name: tensor.numpy() for name, tensor in LAYOUT.split_rows(row).items()}
    found = []
    for layer in ("first", "second"):
        a, b = named[f"{layer}.lora_A.weight"], named[f"{layer}.lora_B.weight"]
        found.append(b.reshape(len(b), -1) @ a.reshape(len(a), -1))
    return found


def cut(matrix, rank):
    """The nearest matrix of a rank."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def merge(rule, rows, samples=SAMPLES, slots=SLOTS):
    return make_rule(rule)(ReceivedModels(rows, samples, None, rows[0].clone(), slots))


def test_the_mean_of_products_is_cut_to_the_rank():
    rows, shares = draw_rows(3), SAMPLES.numpy() / 8
    merged = merge("product-mean", rows)
    for layer, found in enumerate(products(merged)):
        mean = sum(share * products(row)[layer] for share, row in zip(shares, rows, strict=True))
        np.testing.assert_allclose(found, cut(mean, RANK), atol=1e-12)
        assert np.linalg.matrix_rank(mean) > RANK
    named, every = LAYOUT.split_rows(merged), LAYOUT.split_rows(rows)
    for name in ("head.weight", "head.bias"):
        expected = np.average(every[name].numpy(), axis=0, weights=shares)
        np.testing.assert_allclose(named[name], expected, atol=1e-12)


def test_the_new_a_is_as_long_as_those_that_came_and_its_rows_are_orthogonal():
    rows = draw_rows(3)
    a = LAYOUT.split_rows(merge("product-mean", rows))["first.lora_A.weight"].numpy()
    lengths = np.linalg.norm(LAYOUT.split_rows(rows)["first.lora_A.weight"].numpy(), axis=2)
    expected = float((SAMPLES.numpy() / 8 * lengths.mean(1)).sum())
    np.testing.assert_allclose(a @ a.T, expected**2 * np.eye(RANK), atol=1e-10)


def test_one_model_keeps_its_products_and_a_zero_one_can_still_be_trained():
    rows = draw_rows(1)
    merged = merge("product-mean", rows, SAMPLES[:1])
    for found, expected in zip(products(merged), products(rows[0]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)
    views = view_tensors(rows, SLOTS)
    for name, view in views.items():
        if "lora_B" in name:
            view.zero_()
    fresh = LAYOUT.split_rows(merge("product-mean", rows.expand(3, -1)))
    for layer in ("first", "second"):
        assert float(fresh[f"{layer}.lora_B.weight"].abs().max()) == 0
        assert float(fresh[f"{layer}.lora_A.weight"].flatten(1).norm(dim=1).min()) > 0.1


def test_the_order_of_the_models_does_not_matter_and_equal_ones_are_no_trouble():
    rows, turned = draw_rows(3), torch.tensor([0, 2, 1])
    torch.testing.assert_close(
        merge("product-mean", rows), merge("product-mean", rows[turned], SAMPLES[turned])
    )
    same = rows[:1].expand(3, -1)
    for found, expected in zip(
        products(merge("product-mean", same)), products(rows[0]), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-12)
    none = torch.zeros_like(SAMPLES)
    assert bool(torch.isfinite(merge("product-mean", rows, none)).all())


def test_a_model_that_is_not_finite_makes_the_merged_one_so():
    rows = draw_rows(3)
    rows[1, 0] = torch.nan
    assert not bool(torch.isfinite(merge("product-mean", rows)).all())


def test_models_are_weighted_by_the_norm_of_their_products():
    rows = draw_rows(3)
    norms = np.array([np.sqrt(sum((one**2).sum() for one in products(row))) for row in rows])
    expected = np.average(rows.numpy(), axis=0, weights=norms)
    np.testing.assert_allclose(merge("norm-weighted", rows), expected, atol=1e-12)
    for name, view in view_tensors(rows, SLOTS).items():
        if "lora_B" in name:
            view.zero_()
    expected = np.average(rows.numpy(), axis=0, weights=SAMPLES.numpy())
    np.testing.assert_allclose(merge("norm-weighted", rows), expected, atol=1e-12)


@pytest.mark.parametrize("rule", ["product-mean", "norm-weighted"])
@pytest.mark.parametrize("slots", [(), tuple(one for one in SLOTS if "lora_B" not in one.name)])
def test_a_model_without_adapters_is_told_what_is_missing(rule, slots):
    with pytest.raises(
        ConfigError, match=f"aggregation '{rule}' is for adapters, pairs of tensors"
    ):
        merge(rule, draw_rows(3), slots=slots)


# ---------------------------------------------------------------- similarity


def compare(own, table):
    index = torch.arange(len(table)).expand(len(own), -1)
    mask = torch.ones_like(index, dtype=torch.bool)
    mask[0, -1] = False
    pairs = find_pairs(SLOTS, "it")
    return adapters.cosine_of_products(own, table, index, mask, pairs)


def test_the_cosine_is_that_of_the_formed_products():
    own, table = draw_rows(2), draw_rows(4, key=1)
    found = compare(own, table)
    for i, j in np.ndindex(2, 4):
        one, other = (
            np.concatenate([part.ravel() for part in products(row)]) for row in (own[i], table[j])
        )
        expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        if (i, j) == (0, 3):
            expected = 0.0  # it did not arrive
        assert float(found[i, j]) == pytest.approx(expected, abs=1e-12)


def test_it_does_not_see_how_a_product_is_split():
    """A turned and scaled, B turned and scaled back: the same update, and the cosine of the raw numbers is not 1."""
    own = draw_rows(1)
    turn = torch.linalg.qr(draw_rows(1, key=2)[0, : RANK * RANK].reshape(RANK, RANK))[0] * 3
    other = own.clone()
    views = view_tensors(other, SLOTS)
    for layer in ("first", "second"):
        a, b = views[f"{layer}.lora_A.weight"], views[f"{layer}.lora_B.weight"]
        a.copy_(torch.einsum("rs,ns...->nr...", turn, a))
        b.copy_(torch.einsum("nos...,sr->nor...", b, torch.linalg.inv(turn)))
    found = compare(own.expand(2, -1), torch.cat([other, other]))
    assert found[0, 0] == pytest.approx(1.0, abs=1e-12)
    assert float(nn.functional.cosine_similarity(own, other)) < 0.9


def test_a_zero_product_resembles_nobody():
    own = draw_rows(2)
    own[1, : LAYOUT.trainable] = 0
    found = compare(own, own)
    assert found[1].tolist() == [0.0, 0.0]
    assert float(found[0, 0]) == pytest.approx(1.0)


# ---------------------------------------------------------------- names


def test_rules_see_tensors_by_name_as_views():
    rows = draw_rows(3)
    received = ReceivedModels(rows, SAMPLES, None, rows[0], SLOTS)
    assert set(received.tensors) == {slot.name for slot in SLOTS}
    for name, view in received.tensors.items():
        assert view.shape[0] == 3
        assert torch.equal(view, LAYOUT.split_rows(rows)[name])
    received.tensors["head.bias"].fill_(9.0)
    assert torch.equal(LAYOUT.split_rows(rows)["head.bias"], torch.full((3, 2), 9.0).double())
    scalar = view_tensors(torch.arange(3.0), [Slot("scale", (), 1, 2)])["scale"]
    assert (scalar.shape, float(scalar)) == ((), 1.0)


def test_embeddings_of_peft_are_pairs_too():
    slots = [
        Slot("e.lora_embedding_A.default", (2, 9), 0, 18),
        Slot("e.lora_embedding_B.default", (4, 2), 18, 26),
        Slot("lora_A_norm.weight", (4,), 26, 30),
    ]
    (pair,) = find_pairs(slots, "it")
    a, b = pair.read(torch.zeros(5, 30))
    assert (a.shape, b.shape) == ((5, 2, 9), (5, 4, 2))
