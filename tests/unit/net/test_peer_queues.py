"""Desks: whoever holds up its own work holds up nobody else's."""

import threading

from coterie.net.peer_queues import PeerQueues


def test_one_that_never_reads_its_answers_holds_up_only_itself():
    desks, free, others = PeerQueues(threads=4, room=3), threading.Event(), threading.Event()
    order: list[int] = []
    desks.put("slow", lambda: order.append(0) if free.wait(60) else None)
    assert desks.put("other", others.set)
    assert others.wait(60), "the other one's work is done"
    taken = [
        desks.put("slow", lambda number=number: order.append(number)) for number in range(1, 6)
    ]
    assert taken in ([True] * 3 + [False] * 2, [True] * 2 + [False] * 3), (
        "as many wait as there is room for"
    )
    assert order == []
    free.set()
    desks.close()
    assert order == list(range(1 + sum(taken))), "in their order"
    assert not desks.put("other", others.set), "closed"


def test_a_desk_takes_more_work_when_it_is_done():
    desks, done = PeerQueues(threads=2, room=1), threading.Semaphore(0)
    for _ in range(50):
        while not desks.put("one", lambda: done.release()):
            pass
        assert done.acquire(timeout=60)
    desks.close()
