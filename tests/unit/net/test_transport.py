"""Who is there, by the hub that connects the nodes of one program."""

from coterie.net.outbox import Missing
from coterie.net.transport import Hub, InProcess
from coterie.net.wire import Address


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
