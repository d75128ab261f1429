"""Every exchange keeps the contract of `Exchange`."""

import torch

from coterie.exchange import Faulty, InMemory
from coterie.mailbox import Mailbox, PostOffice
from coterie.net import local
from coterie.net.post import Terms
from coterie.testing import check_exchange


def test_in_memory_exchange_keeps_the_contract():
    check_exchange(lambda groups, population: [InMemory(torch.tensor(groups[0]), population)], groups=[[2, 0, 3, 1]])


def test_faulty_exchange_without_faults_keeps_the_contract():
    check_exchange(
        lambda groups, population: [Faulty(InMemory(torch.tensor(groups[0]), population))], groups=[[2, 0, 3, 1]]
    )


def test_mailboxes_of_several_hosts_keep_the_contract():
    def make(groups, population):
        office = PostOffice(population, timeout=20)
        return [Mailbox(office, torch.tensor(g), server=number == 0) for number, g in enumerate(groups)]

    check_exchange(make)
    check_exchange(make, groups=[[0], [1], [2], [3], [4]])


def test_remote_exchanges_over_the_in_process_twin_keep_the_contract():
    """Sealed, signed, chunked, checked and put together again: the same inboxes."""
    made = []

    def make(groups, population):
        _, exchanges = local.in_process(groups, terms=Terms(deadline=20.0))
        made.extend(exchanges)
        return exchanges

    check_exchange(make)
    check_exchange(make, groups=[[0], [1], [2], [3], [4]])
    for exchange in made:
        exchange.post.close()
        exchange.post.transport.close()
