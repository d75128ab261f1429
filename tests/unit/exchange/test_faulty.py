"""Messages that are lost, late or doubled."""

import torch

from coterie.exchange.base import Inbox, Message
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.rng import Rng

IDS = torch.arange(20)
ASKED = (IDS[:, None] + torch.arange(1, 6)) % 20


def door(**chances: float) -> Faulty:
    return Faulty(InMemory(IDS, 20), **chances)


def pulled(exchange: Faulty, round: int, value: float, times: int = 1) -> list[Inbox]:
    """The inboxes of a round's exchanges in which every client publishes its id plus some value."""
    exchange.begin_round(Rng(0).at_round(round))
    exchange.set_active(IDS)
    message = Message((IDS + value)[:, None], {"samples": IDS + value})
    return [exchange.pull(message, ASKED) for _ in range(times)]


def test_a_late_message_is_that_of_the_round_before_and_a_round_old():
    """In the first round there is none before, so nothing arrives."""
    exchange = door(delay=1.0)
    (first,) = pulled(exchange, 0, 0.25)
    assert not first.mask.any()
    assert not first.bytes.any()
    (second,) = pulled(exchange, 1, 0.5)
    assert bool(second.mask.all())
    assert bool((second.age == 1).all())
    assert torch.equal(second.table[second.index][..., 0], ASKED + 0.25)
    assert torch.equal(second.field_by_slot("samples"), ASKED + 0.25)
    (punctual,) = pulled(door(), 1, 0.5)
    assert not punctual.age.any()


def test_late_messages_outlast_a_checkpoint():
    """What is restored from a snapshot gives out the same messages of the round before."""
    exchange, again = door(delay=1.0), door(delay=1.0)
    pulled(exchange, 0, 0.25)
    again.restore(exchange.snapshot())
    (expected,), (found,) = (pulled(each, 1, 0.5) for each in (exchange, again))
    assert bool(expected.mask.all())
    assert torch.equal(found.mask, expected.mask)
    assert torch.equal(found.table[found.index], expected.table[expected.index])


def test_each_exchange_of_a_round_loses_messages_of_its_own():
    """Half of 100 messages are lost in each of two exchanges: about half of those lost in one are lost in the other."""
    one, other = pulled(door(drop=0.5), 0, 0.0, times=2)
    assert 30 <= int(one.mask.sum()) <= 70
    assert 30 <= int((one.mask != other.mask).sum()) <= 70
    (alike,) = pulled(door(drop=0.5), 0, 0.0)
    assert torch.equal(alike.mask, one.mask)


def test_a_duplicate_costs_its_bytes_again_and_changes_nothing_else():
    """A number of 4 bytes and one of 4."""
    (once,), (twice,) = pulled(door(), 0, 0.0), pulled(door(duplicate=1.0), 0, 0.0)
    assert once.bytes.unique().tolist() == [8]
    assert twice.bytes.unique().tolist() == [16]
    assert torch.equal(twice.mask, once.mask)
    assert torch.equal(twice.table[twice.index], once.table[once.index])


def test_a_message_of_another_form_is_no_earlier_one_of_an_exchange():
    """Clients enroll without a model before they exchange models: where these are late, nothing arrives."""
    for enrolled in (
        Message(torch.zeros(20, 0), {"cluster": IDS}),
        Message(torch.zeros(20, 1)),
        Message(torch.zeros(20, 0), {"samples": IDS + 0.5}),
    ):
        exchange = door(delay=1.0)
        exchange.begin_round(Rng(0).at_round(-1))
        exchange.set_active(IDS)
        exchange.pull(enrolled, ASKED)
        (first,) = pulled(exchange, 0, 0.25)
        assert not first.mask.any()
        assert not first.bytes.any()
        (second,) = pulled(exchange, 1, 0.5)
        assert torch.equal(second.field_by_slot("samples"), ASKED + 0.25)


def test_faults_of_many_readers_are_drawn_a_few_rows_at_a_time(monkeypatch):
    """75 readers lose what one draw of all pairs says; no draw has more than 32 rows of the 75."""
    ids, rows, whole = torch.arange(75), list[int](), Rng.uniform
    expected = whole(Rng(0).at_round(0), "faults.drop.0", ids, 75)

    def note(self: Rng, purpose: str, of: torch.Tensor, size: int) -> torch.Tensor:
        rows.append(len(of))
        return whole(self, purpose, of, size)

    monkeypatch.setattr(Rng, "uniform", note)
    exchange = Faulty(InMemory(ids, 75), drop=0.5)
    exchange.begin_round(Rng(0).at_round(0))
    exchange.set_active(ids)
    asked = (ids[:, None] + torch.arange(1, 6)) % 75
    inbox = exchange.pull(Message(ids[:, None].double()), asked)
    assert torch.equal(inbox.mask, expected.gather(1, asked) >= 0.5)
    assert rows == [32, 32, 11]
