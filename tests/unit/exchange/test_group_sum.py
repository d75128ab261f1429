"""Means of groups: plain averages in float64, whole groups or nothing."""

import pytest
import torch

from coterie.errors import ExchangeError
from coterie.exchange.base import ExchangeWrapper, Message
from coterie.exchange.faulty import Faulty
from coterie.exchange.group_sum import pull_group_means
from coterie.exchange.in_memory import InMemory
from coterie.net import local
from coterie.rng import Rng


def make_message() -> Message:
    draw = torch.Generator().manual_seed(2)
    return Message(
        torch.randn(5, 20, generator=draw), {"samples": torch.tensor([3.0, 10.0, 1.0, 7.0, 200.0])}
    )


def pull(message: Message, members, exchange=None):
    exchange = exchange or InMemory(torch.arange(5), 5)
    exchange.begin_round(Rng(0).at_round(0))
    return pull_group_means(exchange, message, torch.tensor(members))


def test_each_client_gets_the_mean_of_its_group_by_samples():
    message, members = make_message(), [[1, 2], [4, 0], [-1, -1], [2, 0], [3, 1]]
    found = pull(message, members)
    assert found.mask.tolist() == [True, True, False, True, True]
    for row in (0, 1, 3, 4):
        weights = message.fields["samples"][members[row]].double()
        plain = (message.params[members[row]].double() * weights[:, None]).sum(0) / weights.sum()
        assert float((found.table[row].double() - plain).abs().max()) < 1e-6
        assert float(found.samples[row]) == float(weights.sum())
        torch.testing.assert_close(found.shares[row], weights / weights.sum())
    assert not found.table[2].any()
    assert found.bytes.tolist() == [[84, 84]] * 2 + [[0, 0]] + [[84, 84]] * 2


def test_the_order_of_a_group_changes_no_bit():
    message = make_message()
    one = pull(message, [[1, 2, 3], [4, 0, 2], [0, 1, 4], [0, 1, 2], [0, 1, 2]])
    other = pull(message, [[3, 1, 2], [0, 2, 4], [4, 1, 0], [2, 0, 1], [1, 2, 0]])
    assert torch.equal(one.table, other.table)


def test_a_group_with_a_member_that_does_not_send_shows_nothing_of_the_others():
    everything_lost = Faulty(InMemory(torch.arange(5), 5), drop=0.5)
    found = pull(make_message(), [[1, 2], [4, 0], [0, 1], [2, 0], [3, 1]], everything_lost)
    assert 0 < int(found.mask.sum()) < 5
    assert not found.table[~found.mask].any()
    assert not found.bytes[~found.mask].any()


def test_a_group_with_a_client_that_never_sends_is_no_group():
    found = pull(
        make_message(), [[1, 5], [4, 0], [5, 1], [2, 0], [3, 5]], InMemory(torch.arange(5), 6)
    )
    assert found.mask.tolist() == [False, True, False, True, False]
    assert not found.table[~found.mask].any()


@pytest.mark.parametrize("value", [torch.nan, 1e6])
def test_a_model_that_no_sum_holds_counts_as_not_sent(value):
    message = make_message()
    message.params[2, 3] = value
    found = pull(message, [[1, 2], [4, 0], [0, 1], [2, 0], [3, 1]])
    assert found.mask.tolist() == [False, True, True, False, True]
    assert found.table.isfinite().all()


def test_the_exchange_is_told_that_no_single_model_may_be_shown():
    class Watch(ExchangeWrapper[InMemory]):
        def __init__(self) -> None:
            self.inner, self.seen = InMemory(torch.arange(5), 5), []

        def pull(self, message, peers):
            self.seen.append(message.sum_only)
            return self.inner.pull(message, peers)

    watch = Watch()
    pull(make_message(), [[1, 2], [4, 0], [0, 1], [2, 0], [3, 1]], watch)
    assert watch.seen[0] is not None


def test_an_exchange_between_machines_sends_nothing_under_such_terms():
    _, (door,) = local.connect_in_process([[0, 1, 2, 3, 4]])
    published = []
    door.post.publish = lambda *args, **options: published.append(args)
    with pytest.raises(ExchangeError, match="between machines no single model of a group"):
        pull(make_message(), [[1, 2], [4, 0], [0, 1], [2, 0], [3, 1]], door)
    assert not published
    door.post.close()
    door.post.transport.close()
