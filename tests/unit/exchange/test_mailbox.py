"""Several hosts in one program."""

import torch

from coterie.exchange.base import Message, Reply
from coterie.exchange.mailbox import Mailbox, PostOffice
from coterie.rng import Rng


def test_the_server_waits_for_the_cohort_that_it_chose(monkeypatch):
    """Of the clients 0 and 1, both hosted here, the first takes part: nobody waits for the other."""
    waited = []
    collect = PostOffice.collect_messages
    monkeypatch.setattr(
        PostOffice,
        "collect_messages",
        lambda self, at, ids: waited.append(ids) or collect(self, at, {0}),
    )
    box = Mailbox(PostOffice(2, timeout=20), torch.arange(2), server=True)
    box.begin_round(Rng(0).at_round(0))
    active = box.agree_on_cohort(lambda: torch.tensor([0]))
    box.set_active(active)
    shared, found = box.ask_server(
        Message(torch.ones(1, 1)),
        lambda shared, whole: (shared + len(whole), Reply(whole.params, torch.zeros(1, 1).long())),
        0,
    )
    assert waited == [{0}]
    assert shared == 1
    assert found.table.tolist() == [[1.0]]
