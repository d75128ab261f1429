"""Rows with room for the largest rank hold adapters of each client's own."""

import pytest
import torch
from torch import nn

from coterie.errors import ConfigError, ModelError
from coterie.functional.adapters import find_pairs
from coterie.functional.ranks import ClientRanks, cut_tensors
from coterie.models.layout import Layout
from coterie.rng import Rng


class Adapted(nn.Module):
    """A layer and a convolution with adapters of rank 3, and a head."""

    def __init__(self, zero="lora_B"):
        super().__init__()
        self.first = nn.ModuleDict(
            {"lora_A": nn.Linear(7, 3, bias=False), "lora_B": nn.Linear(3, 5, bias=False)}
        )
        self.second = nn.ModuleDict(
            {"lora_A": nn.Conv2d(2, 3, 3, bias=False), "lora_B": nn.Conv2d(3, 6, 1, bias=False)}
        )
        self.head = nn.Linear(5, 2)
        for name, one in self.named_parameters():
            if zero in name:
                nn.init.zeros_(one)


LAYOUT = Layout(Adapted(), torch.float64)


def draw_rows(count):
    return torch.from_numpy(Rng(0).generator("ranks").normal(size=(count, LAYOUT.size)))


def test_each_model_keeps_the_rank_of_its_client():
    ranks, rows = ClientRanks.build(LAYOUT, [1, 3, 2, 1]), draw_rows(3)
    before = rows.clone()
    found = LAYOUT.split_rows(ranks.cut(rows, torch.tensor([2, 0, 1])))
    assert torch.equal(rows, before)
    given = LAYOUT.split_rows(rows)
    for place, rank in enumerate([2, 1, 3]):
        for layer in ("first", "second"):
            a, b = (f"{layer}.lora_{part}.weight" for part in "AB")
            assert torch.equal(found[a][place, :rank], given[a][place, :rank])
            assert torch.equal(found[b][place, :, :rank], given[b][place, :, :rank])
            assert not bool(found[a][place, rank:].any())
            assert not bool(found[b][place, :, rank:].any())
        for name in ("head.weight", "head.bias"):
            assert torch.equal(found[name][place], given[name][place])


@pytest.mark.parametrize("zero", ["lora_A", "lora_B"])
def test_either_part_may_be_the_one_that_begins_at_zero(zero):
    ClientRanks.build(Layout(Adapted(zero)), [1, 2])


def test_what_does_not_begin_at_zero_or_is_no_adapter_is_refused():
    with pytest.raises(ConfigError, match="the adapters do not begin at 0: a part of them cannot"):
        ClientRanks.build(Layout(Adapted("nothing")), [1, 2])
    with pytest.raises(ConfigError, match=r"model.adapter.r with several ranks is for adapters"):
        ClientRanks.build(Layout(nn.Linear(3, 2)), [1, 2])


def test_tensors_of_a_wide_row_become_those_of_an_adapter_of_its_rank():
    rows = ClientRanks.build(LAYOUT, [2]).cut(draw_rows(1), torch.tensor([0]))
    named, pairs = LAYOUT.split_rows(rows[0]), find_pairs(LAYOUT.slots, "it")
    found = cut_tensors(named, pairs, 2)
    assert found["first.lora_A.weight"].shape == (2, 7)
    assert found["second.lora_B.weight"].shape == (6, 2, 1, 1)
    assert torch.equal(found["first.lora_B.weight"], named["first.lora_B.weight"][:, :2])
    assert torch.equal(found["head.bias"], named["head.bias"])
    with pytest.raises(ModelError, match=r"first.lora_A.weight is of a larger rank than 1"):
        cut_tensors(named, pairs, 1)
