"""Several hosts in one program."""

import torch

from coterie.exchange.base import Message, Reply
from coterie.exchange.mailbox import Mailbox, PostOffice
from coterie.rng import Rng


def test_the_server_waits_for_the_cohort_that_it_chose(monkeypatch):
    """Of the clients 0 and 1, both hosted here, the first takes part: nobody waits for the other."""
    waited = []
    collect = PostOffice.collect
    monkeypatch.setattr(
        PostOffice, "collect", lambda self, at, ids: waited.append(ids) or collect(self, at, {0})
    )
    box = Mailbox(PostOffice(2, timeout=20), torch.arange(2), server=True)
    box.begin(Rng(0).at(0))
    active = box.cohort(lambda: torch.tensor([0]))
    box.enter(active)
    shared, found = box.serve(
        Message(torch.ones(1, 1)),
        lambda shared, whole: (shared + len(whole), Reply(whole.params, torch.zeros(1, 1).long())),
        0,
    )
    assert waited == [{0}]
    assert shared == 1
    assert found.table.tolist() == [[1.0]]
