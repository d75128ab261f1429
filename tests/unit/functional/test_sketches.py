"""Count sketches, against sums over the places and signs that unit vectors show, and against exact products."""

import numpy as np
import pytest
import torch

from coterie.functional import sketches
from coterie.functional.adapters import AdapterPair
from coterie.functional.sketches import count_sketch, sketch_products
from coterie.models.layout import Slot

WIDTH = 16
SLOTS = (
    Slot("one.lora_A.weight", (2, 5), 0, 10),
    Slot("one.lora_B.weight", (4, 2), 10, 18),
    Slot("two.lora_A.weight", (2, 3), 18, 24),
    Slot("two.lora_B.weight", (6, 2), 24, 36),
)
PAIRS = (AdapterPair(*SLOTS[:2]), AdapterPair(*SLOTS[2:]))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hashes(size, width, name):
    """The place and the sign of each number, as the sketches of unit vectors show them."""
    shown = count_sketch(torch.eye(size), width, name)
    assert shown.abs().sum(1).tolist() == [1.0] * size
    return shown.abs().argmax(1).numpy(), shown.sum(1).numpy()


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_each_number_is_added_to_one_place_with_its_sign(monkeypatch, block):
    monkeypatch.setattr(sketches, "_COLUMNS", block)
    rows, expected = normal(3, 40), np.zeros((3, WIDTH))
    place, sign = hashes(40, WIDTH, "some")
    assert set(sign) == {-1.0, 1.0}
    assert len(set(place)) > WIDTH // 2
    for number in range(40):
        expected[:, place[number]] += sign[number] * rows[:, number].numpy()
    found = count_sketch(rows, WIDTH, "some")
    assert found.numpy() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(found[1:2], count_sketch(rows[1:2], WIDTH, "some"))


def test_draws_of_one_name_are_the_same_and_of_others_not():
    rows = normal(1, 40)
    assert torch.equal(count_sketch(rows, WIDTH, "a"), count_sketch(rows, WIDTH, "a"))
    assert not torch.equal(count_sketch(rows, WIDTH, "a"), count_sketch(rows, WIDTH, "b"))


def test_inner_products_are_met_on_average_and_as_near_as_the_paper_says():
    """The variance of x'y is at most (|x|² |y|² + (x'y)²) / width, over draws of places and signs."""
    rows = normal(2, 300)
    rows[1] += 0.5 * rows[0]
    exact, norms = float(rows[0] @ rows[1]), float(rows[0].norm() * rows[1].norm())
    for width in (32, 128):
        draws = 400
        found = [count_sketch(rows, width, str(draw)) for draw in range(draws)]
        errors = np.array([float(one[0] @ one[1]) - exact for one in found])
        deviation = ((norms**2 + exact**2) / width) ** 0.5
        assert abs(errors.mean()) < 4 * deviation / draws**0.5
        assert 0.7 * deviation < errors.std() < 1.2 * deviation


def test_the_sketch_of_a_product_is_that_of_the_formed_one():
    """An entry lies at the sum of the places of its row and its column, with both signs."""
    rows, expected = normal(2, 36), np.zeros((2, WIDTH))
    for a, b in (SLOTS[:2], SLOTS[2:]):
        rights, turned = hashes(a.shape[1], WIDTH, a.name)
        lefts, signs = hashes(b.shape[0], WIDTH, b.name)
        for model in range(2):
            one = rows[model, a.start : a.stop].view(a.shape)
            two = rows[model, b.start : b.stop].view(b.shape)
            product = (two @ one).numpy()
            for i in range(len(product)):
                for j in range(product.shape[1]):
                    at = (lefts[i] + rights[j]) % WIDTH
                    expected[model, at] += signs[i] * turned[j] * product[i, j]
    found = sketch_products(rows, PAIRS, WIDTH)
    assert found.numpy() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(found[1:], sketch_products(rows[1:], PAIRS, WIDTH))


def test_how_a_product_is_split_does_not_show():
    rows = normal(1, 36)
    other = rows.clone()
    for place, slot in enumerate(SLOTS):
        other[:, slot.start : slot.stop] *= (0.5, 2.0)[place % 2]
    torch.testing.assert_close(
        sketch_products(rows, PAIRS, WIDTH), sketch_products(other, PAIRS, WIDTH)
    )
