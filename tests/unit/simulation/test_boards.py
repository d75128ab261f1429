"""Boards: a reader finds the newest message that has arrived and is not too old, and no other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.exchange.base import Message
from coterie.runtime.virtual_time import SECOND, Clock, VirtualTime
from coterie.simulation._boards import Boards

CLIENTS = 4


def make_boards(latency=0.0, rounds=None, nanoseconds=None, extra=False):
    fields = {"number": torch.zeros(1, 1)} if extra else {}
    form = Message(torch.zeros(1, 3, dtype=torch.float64), fields)
    clock = Clock(VirtualTime(latency=latency), [1] * CLIENTS, seed=0)
    return Boards([form], CLIENTS, clock, rounds, nanoseconds)


def publish(boards, client, time, value):
    """Publish a message that says whose it is and when it was published."""
    params = torch.tensor([[client, time, value]], dtype=torch.float64)
    boards.publish([client], [time], [Message(params)])


@st.composite
def _histories(draw):
    """When each client acts, ascending, and the latencies of their links."""
    latency = [draw(st.integers(0, 12)) / SECOND for _ in range(CLIENTS)]
    times = {}
    for client in range(CLIENTS):
        gaps = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
        times[client] = (np.cumsum(gaps) - 1).tolist()
    return latency, times


@settings(max_examples=25, deadline=None)
@given(_histories(), st.none() | st.integers(0, 3), st.none() | st.integers(0, 15))
def test_nothing_is_read_before_it_arrives_or_after_it_is_too_old(history, rounds, nanoseconds):
    """In the order of time, with what is forgotten, against a search through all messages."""
    latency, times = history
    boards = make_boards(latency, rounds, nanoseconds)
    delay = [[latency[a] + latency[b] for b in range(CLIENTS)] for a in range(CLIENTS)]
    published = {client: [] for client in range(CLIENTS)}
    for now in range(80):
        acting = [client for client in range(CLIENTS) if now in times[client]]
        for client in acting:
            publish(boards, client, now, len(published[client]))
            published[client].append(now)
        for reader in acting:
            peers = torch.tensor([[one for one in range(CLIENTS) if one != reader]])
            ids, at = torch.tensor([reader]), np.array([now])
            boards.set_readers(ids, at)
            own = torch.tensor([[reader, now, len(published[reader]) - 1]], dtype=torch.float64)
            inbox = boards.pull(Message(own), peers)
            for slot, peer in enumerate(peers[0].tolist()):
                arrived = [
                    sent
                    for sent in published[peer]
                    if sent + round(delay[reader][peer] * SECOND) <= now
                ]
                wanted = max(arrived, default=None)
                if wanted is not None:
                    age = sum(wanted <= acted < now for acted in times[reader])
                    too_old = rounds is not None and age > rounds
                    if too_old or (nanoseconds is not None and now - wanted > nanoseconds):
                        wanted = None
                assert bool(inbox.mask[0, slot]) == (wanted is not None)
                if wanted is not None:
                    found = inbox.table[inbox.index[0, slot]].tolist()
                    assert found[:2] == [peer, wanted]
                    assert int(inbox.age[0, slot]) == age
        boards.forget(now)
        # what nobody can find any more is not kept
        assert boards.capacity <= 60


def test_old_messages_are_forgotten():
    boards = make_boards()
    for now in range(100):
        for client in range(CLIENTS):
            publish(boards, client, now, now)
        boards.forget(now)
    assert boards.count.tolist() == [1] * CLIENTS
    assert boards.capacity < 3 * CLIENTS


def test_a_client_that_stopped_is_repeated_and_never_too_old():
    boards = make_boards(rounds=1)
    publish(boards, 0, 0, 1)
    boards.retire(0, 1, [torch.full((1, 3), 7.0, dtype=torch.float64)])
    for now in range(20):
        publish(boards, 1, now, now)
    found = boards.find_messages(torch.tensor([1]), np.array([19]), torch.tensor([[0, 2]]))
    assert found.version.tolist() == [[1, -1]]
    assert found.age.tolist() == [[0, 0]]


def test_a_model_that_is_not_finite_reaches_nobody():
    boards = make_boards()
    publish(boards, 0, 0, torch.nan)
    publish(boards, 1, 0, 1)
    publish(boards, 2, 0, 1)
    boards.set_readers(torch.tensor([1]), np.array([0]))
    own = torch.tensor([[1, 0, 1]], dtype=torch.float64)
    assert boards.pull(Message(own), torch.tensor([[0, 2]])).mask.tolist() == [[False, True]]


@pytest.mark.parametrize("change", ["params", "field"])
def test_a_restored_board_is_the_same(change):
    """And what changes in the copy does not change the first."""
    boards = make_boards([0.0, 5 / SECOND, 0.0, 0.0], extra=True)
    for client, time in ((0, 0), (1, 0), (1, 3), (2, 4), (0, 9)):
        message = Message(
            torch.full((1, 3), float(time), dtype=torch.float64),
            {"number": torch.full((1, 1), float(client))},
        )
        boards.publish([client], [time], [message])
    again = make_boards([0.0, 5 / SECOND, 0.0, 0.0], extra=True)
    again.restore(boards.snapshot())
    before = boards.snapshot()
    for name, value in again.snapshot().items():
        assert torch.equal(value, before[name]), name
    again.pools[0]["" if change == "params" else "number"].fill_(8)
    for name, value in boards.snapshot().items():
        assert torch.equal(value, before[name]), name
