"""Who is there, by the hub that connects the nodes of one program."""

import torch

from coterie.net import transport
from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.transport import Hub, InProcess
from coterie.net.wire import Address, Expectation


def test_a_node_that_came_back_and_left_in_order_is_not_waited_for():
    """It was lost; it counts as lost until it publishes; after it has left in order nobody stays for it."""
    hub = Hub()
    other, first = InProcess(hub, "n0"), InProcess(hub, "n1")
    hub.lost.add("n1")
    first.close()
    assert other.lost_members() == {"n1"}
    again = InProcess(hub, "n1")
    assert other.lost_members() == {"n1"}
    again.publish(Address(0, 0, 1, "model"), Missing("absent", 0))
    assert other.alive_members() == {"n1"}
    again.close()
    assert other.alive_members() == other.lost_members() == frozenset()


def test_a_question_that_was_given_up_keeps_no_place(monkeypatch):
    """The other side would hold it for longer than its asker waits."""
    monkeypatch.setattr(transport, "WAIT", 1000.0)
    hub = Hub()
    asker, other = InProcess(hub, "n0"), InProcess(hub, "n1")
    template = Template({"params": (torch.float32, (4,))})
    expect = Expectation("local", "n1", "n0", Address(0, 0, 1), "", template, lambda s, d: True, 0)
    for _ in range(10):
        assert asker.fetch("n1", expect, 0.01) == Missing("timeout")
    assert other.outbox.current_load == (0, 0)
    asker.close()
    other.close()
