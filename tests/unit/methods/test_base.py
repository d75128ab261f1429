"""What all methods share: cohorts, and running statistics in an exchange."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from coterie.exchange.in_memory import InMemory
from coterie.functional import selection
from coterie.methods import base
from coterie.methods.base import Round, draw_peers_uniformly
from coterie.methods.fedavg import FedAvg
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.testing import tiny_federation
from coterie.testing.tiny import build_task


def test_a_share_of_a_peer_to_peer_population_may_be_one_client():
    """A tenth of ten is one; a server averages three at least."""
    assert len(Random().select_cohort(None, Rng(0).at_round(0), 10, 0.1)) == 1
    assert len(FedAvg().select_cohort(None, Rng(0).at_round(0), 10, 0.1)) == 3


def normalized() -> nn.Module:
    """Two layers with running statistics between them; 53 trained parameters."""
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize("buffers", ["average", "local", "reset"])
def test_an_exchange_treats_running_statistics_as_the_run_says(play, buffers):
    """Everybody reads everybody, with equal samples: parameters become the mean; statistics do, stay, or start anew."""
    run = play(Random(num_peers=5), model=normalized, buffers=buffers, order="train_first").steps(1)
    before, after = run.infos[-1]["trained"], run.state.params
    mean = before.mean(0).expand(6, -1)
    torch.testing.assert_close(after[:, :53], mean[:, :53])
    first = torch.cat([torch.zeros(5), torch.ones(5), torch.zeros(1)]).double().expand(6, -1)
    expected = {"average": mean[:, 53:], "local": before[:, 53:], "reset": first}[buffers]
    torch.testing.assert_close(after[:, 53:], expected)
    assert float((before[:, 53:63] - mean[:, 53:63]).abs().min()) > 0


def a_round(
    clients: int, ids: list[int], index: int = 0, reachable: torch.Tensor | None = None
) -> Round:
    """A round in which some clients of a population are hosted."""
    task = build_task(
        tiny_federation(clients).host(ids), "linear", engine="loop", dtype=torch.float64
    )
    everybody = torch.ones(clients, dtype=torch.bool) if reachable is None else reachable
    return Round(
        index, task, InMemory(torch.tensor(ids), clients), Rng(3).at_round(index), everybody
    )


@pytest.fixture(params=[20_000, 4], ids=["a draw for each pair", "one after another"])
def many(monkeypatch, request):
    """Both ways to draw uniformly."""
    monkeypatch.setattr(base, "LARGE_POPULATION", request.param)


def test_uniform_draws_are_candidates_and_no_one_twice(many):
    """Clients 3 and 7 cannot be reached, and client 0 may choose 5 and 9 alone."""
    reachable = torch.ones(40, dtype=torch.bool)
    reachable[[3, 7]] = False
    rnd = a_round(40, list(range(40)), reachable=reachable)
    allowed = torch.ones(40, 40, dtype=torch.bool)
    allowed[0] = False
    allowed[0, [5, 9]] = True
    for peers in (draw_peers_uniformly(rnd, 6), draw_peers_uniformly(rnd, 6, allowed)):
        for client, row in enumerate(peers.tolist()):
            found = [peer for peer in row if peer >= 0]
            assert len(set(found)) == len(found)
            assert not {client, 3, 7} & set(found)
    assert sorted(peers[0].tolist()) == [-1, -1, -1, -1, 5, 9]
    assert bool((peers[1:] >= 0).all())


def test_uniform_draws_do_not_depend_on_who_else_is_hosted(many):
    whole = draw_peers_uniformly(a_round(40, list(range(40))), 5)
    assert torch.equal(draw_peers_uniformly(a_round(40, [2, 30, 39]), 5), whole[[2, 30, 39]])
    assert not torch.equal(
        draw_peers_uniformly(a_round(40, [2, 30, 39], index=1), 5), whole[[2, 30, 39]]
    )


@pytest.mark.slow
def test_uniform_draws_take_every_candidate_equally_often(many):
    """12 clients in 400 rounds, 3 of 11 each: 1,200 reads of each member are expected."""
    rounds = (
        draw_peers_uniformly(a_round(12, list(range(12)), index=index), 3) for index in range(400)
    )
    times = np.bincount(torch.cat(list(rounds)).flatten().numpy(), minlength=12)
    assert times.sum() == 400 * 12 * 3
    assert np.abs(times - 1200).max() < 4 * np.sqrt(400 * 11 * 3 / 11 * 8 / 11)


def test_as_many_peers_as_there_are_are_all_of_them(many):
    peers = draw_peers_uniformly(a_round(6, list(range(6))), 9)
    assert [sorted(row) for row in peers.tolist()] == [
        [j for j in range(6) if j != i] for i in range(6)
    ]


@pytest.mark.parametrize("by_client", [False, True])
def test_slots_of_members_out_of_reach_are_emptied_as_by_the_mask_of_all_pairs(by_client):
    """Client 0 reads neither itself nor member 2; with an axis of clients 3 does not read member 1."""
    reachable = torch.tensor([True, True, False, True, True])
    if by_client:
        reachable = reachable.expand(5, -1).clone()
        reachable[3, 1] = False
    rnd = a_round(5, list(range(5)), reachable=reachable)
    peers = torch.tensor([[0, 2, 4], [0, 1, -1], [-1, 3, 2], [1, 2, 4], [3, 0, 1]])
    found = rnd.keep_candidates(peers)
    assert found.tolist() == [
        [-1, -1, 4], [0, -1, -1], [-1, 3, -1], [-1 if by_client else 1, -1, 4], [3, 0, 1],
    ]  # fmt: skip
    assert torch.equal(found, selection.keep_allowed(peers, rnd.candidates))


def test_members_in_quarantine_are_out_of_reach_of_those_that_refused_them_alone(many):
    """Client 1 does not read 0 and 4; nobody reads 2, which is away."""
    reachable = torch.tensor([True, True, False, True, True, True])
    rnd = a_round(6, list(range(6)), reachable=reachable)
    unread = torch.full((6, 2), -1)
    unread[1] = torch.tensor([4, 0])
    barred = replace(rnd, unread=unread)
    expected = rnd.candidates
    expected[1, [0, 4]] = False
    assert torch.equal(barred.candidates, expected)
    assert torch.equal(barred.candidates_of(torch.tensor([1])), expected[1:2])
    assert barred.readable_by(torch.tensor([0, 2])).ndim == 1, "one row where all read the same"
    everybody = torch.arange(6).expand(6, -1)
    assert torch.equal(barred.keep_candidates(everybody) >= 0, expected)
    assert sorted(draw_peers_uniformly(barred, 5)[1].tolist()) == [-1, -1, -1, 3, 5]
    without = [row for row in range(6) if row != 1]
    assert torch.equal(
        draw_peers_uniformly(barred, 2)[without], draw_peers_uniformly(rnd, 2)[without]
    )
