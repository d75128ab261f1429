"""FixTopology."""

import pytest
import torch

from coterie.errors import ConfigError
from coterie.methods.fix_topology import FixTopology
from coterie.testing import tiny_federation


def test_fixed_topology_is_fixed(play):
    """Invariant 30: M_i is constant over rounds, drawn once, and without oneself."""
    run = play(FixTopology(num_peers=3)).steps(4)
    first = run.infos[1]["peers"]
    assert all(torch.equal(info["peers"], first) for info in run.infos[1:])
    assert not (first == torch.arange(6)[:, None]).any()
    assert all(len(set(row)) == 3 for row in first.tolist())


def test_every_client_draws_its_own_peers(play):
    """60 clients that read 5 each: one is read by 5 on average; 17 is 5 standard deviations (2.1) and more away."""
    peers = play(FixTopology(num_peers=5), tiny_federation(60, train=2, validation=1)).memory.peers
    readers = torch.bincount(peers.flatten(), minlength=60)
    assert int(readers.sum()) == 300
    assert int(readers.max()) < 17


def test_the_graph_is_that_of_a_gumbel_draw_for_each_pair(play):
    """The five largest draws of a row, the largest first: the reference sees all pairs at once."""
    run = play(FixTopology(num_peers=5), tiny_federation(70, train=2, validation=1))
    noise = run.loop.rng.gumbel("peers", torch.arange(70), 70).fill_diagonal_(-torch.inf)
    assert torch.equal(run.memory.peers, noise.argsort(1, descending=True)[:, :5])


def test_a_large_population_has_a_graph_of_distinct_members_too(play, monkeypatch):
    monkeypatch.setattr("coterie.methods.fix_topology.LARGEST_WITH_PAIRS", 10)
    peers = play(FixTopology(), tiny_federation(60, train=2, validation=1)).memory.peers
    assert all(len(set(row)) == 5 for row in peers.tolist())
    assert not (peers == torch.arange(60)[:, None]).any()
    assert int(torch.bincount(peers.flatten(), minlength=60).max()) < 17


def test_fixed_topology_waits_for_nobody_outside_the_cohort(play):
    """A neighbor that takes no part this round is an empty slot."""
    run = play(FixTopology(num_peers=5))
    _, info = run.exchange(reachable=torch.tensor([True, True, False, False, True, True]))
    assert set(info["peers"].flatten().tolist()) == {-1, 0, 1, 4, 5}


def test_no_peers_at_all_is_refused_and_too_many_are_clamped(play):
    with pytest.raises(ConfigError, match=r"num_peers is 0; expected a whole number, 1 or more"):
        FixTopology(num_peers=0)
    _, info = play(FixTopology(num_peers=99)).exchange()
    assert info["peers"].shape[1] == 5
