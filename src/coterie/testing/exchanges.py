"""Contract test of exchanges."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ExchangeError
from coterie.exchange.base import Exchange, Inbox, Message, Reply
from coterie.rng import Rng

MakeExchanges = Callable[[Sequence[Sequence[int]], int], Sequence[Exchange]]
"""Makes an exchange for each host from its ids and the population; the first is the server."""


def check_exchange(
    make: MakeExchanges, *, groups: Sequence[Sequence[int]] = ((0, 2), (1,), (3,))
) -> None:
    """Check that an exchange keeps the contract of `Exchange`.

    Args:
        make: makes connected exchanges, one per host.
        groups: the client ids of each host; together 0 .. K-1. For an exchange that hosts all
            clients in one process, pass one group.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    population = sum(map(len, groups))
    exchanges = make(groups, population)

    def run_on_every_host(action: Callable[[int, Exchange], Any], round: int) -> list[Any]:
        def run_on_host(number: int) -> Any:
            exchanges[number].begin_round(Rng(0).at_round(round))
            exchanges[number].set_active(torch.tensor(groups[number]))
            return action(number, exchanges[number])

        # A thread for each host: hosts wait for each other's messages.
        with ThreadPoolExecutor(len(groups)) as pool:
            return list(pool.map(run_on_host, range(len(groups))))

    def make_message(number: int, step: int) -> Message:
        ids = torch.tensor(groups[number])
        # Each row shows its client and its step, so that a wrong message is recognized.
        params = ids[:, None].float() * 10 + torch.arange(3.0) + 100 * step
        return Message(
            params, {"samples": ids.float() + 1, "row": torch.ones(len(ids), 2) * ids[:, None]}
        )

    def peers_to_pull(number: int) -> Tensor:
        # An unused slot in the middle: slots must not move.
        ids = torch.tensor(groups[number])
        columns = [(ids + 2) % population, torch.full_like(ids, -1), (ids + 1) % population]
        return torch.stack(columns, dim=1)

    def pull_twice(number: int, exchange: Exchange) -> list[Inbox]:
        peers = peers_to_pull(number)
        return [exchange.pull(make_message(number, step), peers) for step in range(2)]

    for number, inboxes in enumerate(run_on_every_host(pull_twice, 0)):
        for step, inbox in enumerate(inboxes):
            _check_inbox(inbox, peers_to_pull(number), step)

    def ask_for_invalid_ids(number: int, exchange: Exchange) -> None:
        own = torch.tensor(groups[number])[:, None]
        # The client itself, and an id behind the population.
        for wrong in (own, torch.full_like(own, population)):
            try:
                exchange.pull(make_message(number, 0), wrong)
            except ExchangeError:
                continue
            raise AssertionError(f"asking for {wrong.tolist()} was not refused")

    run_on_every_host(ask_for_invalid_ids, 1)

    def serve_once(number: int, exchange: Exchange) -> tuple[Any, Inbox]:
        def rule(shared: Tensor, whole: Message) -> tuple[Tensor, Reply]:
            assert whole.ids is not None
            assert whole.ids.tolist() == list(range(population)), (
                "a rule sees the cohort in the order of ids"
            )
            return shared + 1, Reply(
                whole.params, whole.ids[:, None], {"twice": whole.fields["samples"] * 2}
            )

        return exchange.ask_server(make_message(number, 0), rule, torch.zeros(()))

    for number, (shared, inbox) in enumerate(run_on_every_host(serve_once, 2)):
        assert torch.equal(inbox.table[inbox.index[:, 0]], make_message(number, 0).params), (
            "a reply went to another client"
        )
        assert torch.equal(
            inbox.field_by_slot("twice")[:, 0], make_message(number, 0).fields["samples"] * 2
        ), "a reply lost a field"
        # Without the attribute all clients are hosted in one process, which is also the server.
        serving = number == 0 or bool(getattr(exchanges[number], "server", False))
        assert float(shared) == serving, "the shared state changes where the server role is, only"


def _check_inbox(inbox: Inbox, peers: Tensor, step: int) -> None:
    assert torch.equal(inbox.peers, peers), "slots are in the order in which they were asked"
    assert torch.equal(inbox.mask, peers >= 0), (
        "what was published arrives, an unused slot does not"
    )
    received = inbox.table[inbox.index]
    expected = peers[..., None].float() * 10 + torch.arange(3.0) + 100 * step
    arrived = inbox.mask[..., None].expand_as(received)
    assert torch.equal(received[arrived], expected[arrived]), (
        "a slot shows another message than its peer's"
    )
    assert torch.equal(inbox.field_by_slot("samples")[inbox.mask], peers[inbox.mask].float() + 1), (
        "a field is another peer's"
    )
    # 3 parameters, 1 count of samples and 2 entries of "row", of 4 bytes each.
    assert bool((inbox.bytes[inbox.mask] == 3 * 4 + 4 + 2 * 4).all()), (
        "a message is counted with its payload in bytes"
    )
    assert not inbox.bytes[~inbox.mask].any(), "what did not arrive costs nothing"
    # A slot in which nothing arrived has a weight all the same, and a large one: mix must ignore
    # it.
    weights = torch.where(inbox.mask, 0.25, 7.0)
    own = torch.ones(len(peers), 3)
    mixed = inbox.mix(weights, own=own, own_weight=torch.full((len(peers),), 0.5))
    naive = 0.5 + 0.25 * (expected * inbox.mask[..., None]).sum(1)
    assert torch.allclose(mixed, naive), "mix is the weighted sum of what arrived and the own model"
