"""The exchange of a simulation."""

import torch

from coterie.exchange.base import Message
from coterie.exchange.in_memory import InMemory
from coterie.rng import Rng


def test_a_stopped_client_publishes_its_last_message_until_it_takes_part_again():
    """Client 2 stops with the model 9: it is read as 9, with its last extras; when it is back, as what it publishes."""
    exchange, ids = InMemory(torch.arange(3), 3), torch.arange(3)
    exchange.begin_round(Rng(0).at_round(0))
    exchange.set_active(ids)
    exchange.pull(
        Message(ids[:, None] + 0.5, {"samples": ids + 10.0}), torch.tensor([[2], [2], [0]])
    )
    exchange.retire_clients(torch.tensor([2]), torch.tensor([[9.0]]))
    exchange.begin_round(Rng(0).at_round(1))
    exchange.set_active(ids[:2])
    found = exchange.pull(
        Message(ids[:2, None] + 1.5, {"samples": ids[:2] + 20.0}), torch.tensor([[2], [2]])
    )
    assert found.mask.tolist() == [[True], [True]]
    assert found.table[found.index].flatten().tolist() == [9.0, 9.0]
    assert found.field_by_slot("samples").flatten().tolist() == [12.0, 12.0]
    exchange.begin_round(Rng(0).at_round(2))
    exchange.set_active(ids)
    found = exchange.pull(
        Message(ids[:, None] + 2.5, {"samples": ids + 30.0}), torch.tensor([[2], [2], [0]])
    )
    assert found.table.flatten().tolist() == [0.5 + 2, 1.5 + 2, 2.5 + 2]
    assert found.table[found.index].flatten().tolist() == [4.5, 4.5, 2.5]
