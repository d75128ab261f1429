"""What stays at home is in no message, and a received part is completed with the reader's own."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.errors import ExchangeError
from coterie.exchange.base import Message, Reply
from coterie.exchange.in_memory import InMemory
from coterie.exchange.narrowed import NarrowedExchange, narrow_exchange, narrow_message
from coterie.models.layout import Layout
from coterie.models.part import ParameterSharing
from coterie.rng import Rng
from coterie.testing import tiny_federation
from coterie.testing.tiny import build_task

LAYOUT = Layout(nn.Linear(2, 2), torch.float64)  # weight: columns 0 to 3; bias: 4 and 5
PART = ParameterSharing.from_patterns(LAYOUT, ["weight"])
ROWS = torch.arange(18, dtype=torch.float64).reshape(3, 6)
PEERS = torch.tensor([[1, 2], [0, -1], [1, 0]])


def door(inner=None):
    return NarrowedExchange(inner or InMemory(torch.arange(3), 3), PART, ROWS)


def test_where_everything_is_shared_the_exchange_is_the_one_beneath():
    inner, message = InMemory(torch.arange(3), 3), Message(ROWS)
    assert narrow_exchange(inner, ParameterSharing.from_patterns(LAYOUT), ROWS) is inner
    assert narrow_message(ParameterSharing.from_patterns(LAYOUT), message) is message


def test_a_message_has_the_shared_columns_and_an_inbox_zeros_in_the_others():
    inner = InMemory(torch.arange(3), 3)
    inbox = door(inner).pull(Message(ROWS, {"samples": torch.ones(3)}), PEERS)
    assert torch.equal(inner.last[0].params, ROWS[:, :4])
    assert torch.equal(inbox.table[:, :4], ROWS[:, :4])
    assert not inbox.table[:, 4:].any()
    assert inbox.bytes[inbox.mask].unique().tolist() == [4 * 8 + 4]


def test_a_mix_keeps_what_is_at_home():
    inbox = door().pull(Message(ROWS), PEERS)
    mixed = inbox.mix(torch.full((3, 2), 0.25), own=ROWS, own_weight=torch.full((3,), 0.5))
    assert torch.equal(mixed[:, 4:], ROWS[:, 4:])
    assert mixed[0, :4].tolist() == pytest.approx(
        (ROWS[0] / 2 + ROWS[1] / 4 + ROWS[2] / 4)[:4].tolist()
    )


def test_a_servers_rule_sees_zeros_and_answers_with_shared_columns():
    seen = []

    def rule(shared, message):
        seen.append(message.params)
        return shared, Reply.to_every_client(message.params.mean(0, keepdim=True) + 1, len(message))

    _, inbox = door().ask_server(Message(ROWS), rule, None)
    assert torch.equal(seen[0], PART.shared.expand_to_rows(ROWS[:, :4]))
    assert torch.equal(
        inbox.table, PART.shared.expand_to_rows(ROWS[:, :4].mean(0, keepdim=True) + 1)
    )
    assert int(inbox.bytes[0, 0]) == 4 * 8


def test_a_message_without_models_has_none_on_the_other_side_either():
    inbox = door().pull(Message(ROWS[:, :0], {"asked": torch.arange(3)}), PEERS)
    assert inbox.table.shape == (3, 0)
    assert inbox.field_by_slot("asked")[0].tolist() == [1, 2]


def test_models_that_answer_a_message_without_any_are_completed_with_the_readers_own():
    _, offer = door().ask_server(
        Message(ROWS[:, :0]), lambda shared, m: (shared, Reply.to_every_client(ROWS[:1], 3)), None
    )
    assert torch.equal(offer.own, ROWS)


def test_rows_of_another_width_are_refused_on_both_sides():
    with pytest.raises(
        ExchangeError, match="rows of 5 numbers; expected none, or whole models, 6, of which 4"
    ):
        door().pull(Message(ROWS[:, :5]), PEERS)
    with pytest.raises(ExchangeError, match="a model of 3 numbers was received; expected 4"):
        NarrowedExchange(_Wrong(torch.arange(3), 3), PART, ROWS).pull(Message(ROWS), PEERS)


class _Wrong(InMemory):
    """An exchange that brings other models than were sent."""

    def pull(self, message, peers):
        inbox = super().pull(message, peers)
        return replace(inbox, table=inbox.table[:, :3])


def test_a_received_part_is_measured_with_the_home_part_of_its_reader():
    """As the joined model is, one by one; with many pairs they are joined a few at a time."""
    federation = tiny_federation(num_clients=3)
    task = build_task(
        federation.host(federation.ids),
        "linear",
        dtype=torch.float64,
        shared=["1.weight"],
        engine="loop",
    )
    rows = task.initial_models(Rng(0)).repeat(1, 1) + torch.from_numpy(
        Rng(1).generator("rows").normal(size=(3, 15))
    )
    inbox = NarrowedExchange(InMemory(torch.arange(3), 3), task.sharing, rows).pull(
        Message(rows), PEERS
    )
    losses = task.score(inbox)
    for reader, slot in [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]:
        joined = torch.cat([rows[PEERS[reader, slot], :12], rows[reader, 12:]])
        own = task.select_clients(torch.tensor([reader]))
        assert torch.equal(own.loss(joined[None], "train"), losses[reader, slot][None])
    assert float(losses[1, 1]) == float("inf")
