"""Every exchange keeps the contract of `Exchange`."""

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from coterie.cluster.exchange import BlockExchange, BlockLinks, Postbox
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.exchange.mailbox import Mailbox, PostOffice
from coterie.net import local
from coterie.net.exchange import RemoteExchange
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.outbox import Missing
from coterie.net.post import Post, Terms
from coterie.testing import check_exchange


def test_in_memory_exchange_keeps_the_contract():
    check_exchange(
        lambda groups, population: [InMemory(torch.tensor(groups[0]), population)],
        groups=[[2, 0, 3, 1]],
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda inbox: {"peers": inbox.peers.flip(1)},
            "slots are in the order in which they were asked",
        ),
        (lambda inbox: {"mask": inbox.mask | True}, "an unused slot does not"),
        (
            lambda inbox: {"table": inbox.table.roll(1, 0)},
            "a slot shows another message than its peer's",
        ),
        (
            lambda inbox: {"fields": {n: v.roll(1, 0) for n, v in inbox.fields.items()}},
            "a field is another peer's",
        ),
        (
            lambda inbox: {"bytes": inbox.bytes // 2},
            "a message is counted with its payload in bytes",
        ),
    ],
)
def test_an_exchange_that_breaks_the_contract_is_named_with_what_it_breaks(change, said):
    class Wrong(InMemory):
        def pull(self, message, peers):
            inbox = super().pull(message, peers)
            return replace(inbox, **change(inbox))

    with pytest.raises(AssertionError, match=said):
        check_exchange(
            lambda groups, population: [Wrong(torch.tensor(groups[0]), population)],
            groups=[[2, 0, 3, 1]],
        )


def test_faulty_exchange_without_faults_keeps_the_contract():
    check_exchange(
        lambda groups, population: [Faulty(InMemory(torch.tensor(groups[0]), population))],
        groups=[[2, 0, 3, 1]],
    )


def test_mailboxes_of_several_hosts_keep_the_contract():
    def make(groups, population):
        office = PostOffice(population, timeout=20)
        return [
            Mailbox(office, torch.tensor(g), server=number == 0) for number, g in enumerate(groups)
        ]

    check_exchange(make)
    check_exchange(make, groups=[[0], [1], [2], [3], [4]])


def test_blocks_of_a_population_keep_the_contract():
    def make(groups, population):
        owner, boxes = (
            torch.empty(population, dtype=torch.int32),
            [Postbox(len(groups)) for _ in groups],
        )
        for number, group in enumerate(groups):
            owner[torch.tensor(group)] = number
        links = [
            BlockLinks(number, [box.put for box in boxes], box) for number, box in enumerate(boxes)
        ]
        return [
            BlockExchange(links[n], torch.tensor(g), owner, server=True)
            for n, g in enumerate(groups)
        ]

    check_exchange(make)
    check_exchange(make, groups=[[0], [1], [2], [3], [4]])


def test_remote_exchanges_over_the_in_process_twin_keep_the_contract():
    """Sealed, signed, chunked, checked and put together again: the same inboxes."""
    made = []

    def make(groups, population):
        _, exchanges = local.connect_in_process(groups, terms=Terms(deadline=20.0))
        made.extend(exchanges)
        return exchanges

    check_exchange(make)
    check_exchange(make, groups=[[0], [1], [2], [3], [4]])
    for exchange in made:
        exchange.post.close()
        exchange.post.transport.close()


@pytest.mark.e2e
def test_remote_exchanges_over_grpc_with_mutual_tls_keep_the_contract(tmp_path, port):
    """Five nodes with sockets, and certificates: the same inboxes again."""
    groups = [[0, 2], [1], [3], [4], [5]]
    with ExitStack() as stack:

        def make(groups, population):
            who, people = local.create_credentials(
                tmp_path, local.make_members(groups, server="n0", port=port)[0]
            )
            exchanges = []
            for own in people:
                transport = stack.enter_context(GrpcTransport(who, own.name, own))
                exchanges.append(
                    RemoteExchange(Post(transport, who, own.sign, terms=Terms(deadline=20.0)))
                )
                stack.callback(exchanges[-1].post.close)
            for exchange in exchanges:
                exchange.post.transport.serve_head(lambda nonce: b"here")
            pause = threading.Event()
            for exchange in exchanges:  # links come up within a second or two
                for member in who.members:
                    others = member.name != exchange.name
                    while others and isinstance(
                        exchange.post.transport.ask_head(member.name, "0", 1.0), Missing
                    ):
                        pause.wait(0.05)
            return exchanges

        check_exchange(make, groups=groups)
