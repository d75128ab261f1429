"""Inboxes: how received models are mixed, and what messages cost."""

import itertools

import pytest
import torch

from coterie.exchange.base import Inbox, Message, Reply, ReplyForm, SecureAggregation, make_inbox


def inbox(peers: list[int], models: torch.Tensor, arrived: list[bool]) -> Inbox:
    """The inbox of one client whose slots have these peers; the model of peer i is row i."""
    slots, mask = torch.tensor([peers]), torch.tensor([arrived])
    none = torch.zeros_like(slots)
    return Inbox(models, torch.where(mask, slots, 0), slots, mask, none, {}, none)


WIDTHS = [1, 1 << 13]
"""Models are mixed in two ways: many small ones at once, and large ones by themselves."""


@pytest.mark.parametrize("width", WIDTHS)
def test_a_model_that_weighs_nothing_has_no_influence(width):
    """1/2 of 2 and 1/2 of 6 is 4, though a peer of weight 0 sent NaN; a slot without a message weighs nothing."""
    models = torch.tensor([torch.nan, 6.0, torch.nan])[:, None].expand(3, width)
    box = inbox([2, 1, 0], models, [True, True, False])
    weights = torch.tensor([[0.0, 0.5, 0.25]])
    mixed = box.mix(weights, own=torch.full((1, width), 2.0), own_weight=torch.tensor([0.5]))
    assert mixed.unique().tolist() == [4.0]


@pytest.mark.parametrize("width", WIDTHS)
def test_models_are_added_in_the_order_of_ids_whatever_their_slots(width):
    """((0 + 1e8) + 1) - 1e8 is 0 in float32, where 1e8 + 1 is 1e8; another order of the terms gives 1."""
    models = torch.tensor([1e8, 1.0, -1e8])[:, None].expand(3, width)
    for order in itertools.permutations(range(3)):
        box = inbox(list(order), models, [True] * 3)
        mixed = box.mix(torch.ones(1, 3), own=torch.zeros(1, width), own_weight=torch.ones(1))
        assert mixed.unique().tolist() == [0.0], order


def test_a_message_is_counted_with_its_extras_where_it_arrives():
    """Two numbers of 4 bytes and one of 8; a peer that published nothing costs nothing."""
    board = Message(
        torch.zeros(2, 2), {"samples": torch.zeros(2, dtype=torch.float64)}, torch.tensor([0, 1])
    )
    assert board.row_bytes == 16
    found = make_inbox(board, torch.tensor([0]), torch.tensor([[1, 2, -1]]), 3)
    assert found.mask.tolist() == [[True, False, False]]
    assert found.bytes.tolist() == [[16, 0, 0]]


def test_a_servers_answer_is_counted_with_its_extras():
    """Three numbers of 4 bytes and two of 8."""
    reply = Reply(
        torch.zeros(2, 3),
        torch.tensor([[1], [0]]),
        {"center": torch.zeros(2, 2, dtype=torch.float64)},
    )
    assert reply.to_inbox().bytes.tolist() == [[28], [28]]
    assert reply.to_inbox(torch.tensor([1])).index.tolist() == [[0]]


def test_some_rows_of_a_message_are_sent_on_the_same_terms():
    whole = Message(
        torch.arange(6.0).reshape(3, 2), {"samples": torch.tensor([1, 2, 3])}, torch.tensor([4, 5, 6]),
        ReplyForm(1), SecureAggregation(),
    )  # fmt: skip
    part = whole.take_rows(torch.tensor([2, 0]))
    assert part.params.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert part.fields["samples"].tolist() == [3, 1]
    assert part.ids is not None
    assert part.ids.tolist() == [6, 4]
    assert (part.expects, part.sum_only) == (whole.expects, whole.sum_only)
