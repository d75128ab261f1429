"""Local, Random, Oracle and FixTopology."""

import dataclasses

import pytest
import torch

from coterie.errors import ConfigError
from coterie.methods.fix_topology import FixTopology
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle
from coterie.methods.random_gossip import Random
from coterie.results.graph import expected_share
from coterie.testing import tiny_federation


def planted(sizes):
    """A federation whose clusters have these sizes, one after another."""
    cluster = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    federation = tiny_federation(len(cluster), len(sizes), train=4, validation=2)
    assert federation.truth is not None
    return dataclasses.replace(federation, truth=dataclasses.replace(federation.truth, cluster=cluster))


def test_local_never_reads_and_merges_nothing(play):
    """Invariant 5: rounds of Local are local training alone."""
    run = play(Local())
    state, info = run.exchange()
    assert torch.equal(state.params, run.state.params)
    assert not info


def test_oracle_reads_its_own_cluster_only(play):
    """Invariant 29: the matrix of pulls is block-diagonal, and a cluster of q members pulls min(m, q - 1)."""
    federation = planted([6, 3, 2])
    run = play(Oracle(num_peers=4), federation).steps(5)
    cluster = federation.truth.cluster
    for info in run.infos[-5:]:
        for i, row in enumerate(info["peers"].tolist()):
            chosen = [j for j in row if j >= 0]
            assert all(cluster[j] == cluster[i] for j in chosen)
            assert i not in chosen
            assert len(chosen) == min(4, int((cluster == cluster[i]).sum()) - 1)


def test_oracle_alone_in_its_cluster_is_local(play):
    """Invariant 29: the singleton's models are those of local training, to the last bit."""
    federation = planted([3, 1])
    oracle, local = play(Oracle(), federation).steps(3), play(Local(), federation).steps(3)
    assert torch.equal(oracle.state.params[3], local.state.params[3])
    assert not torch.equal(oracle.state.params[0], local.state.params[0])


def test_oracle_keeps_vehicles_and_animals_apart(play):
    """Invariant 29: 40 and 60 clients, as in the label shift of the papers; nobody reads across or itself.

    The published code excluded the leftover index of a loop instead of the client, and gossiped with 40 .. 98.
    """
    run = play(Oracle(num_peers=5), planted([40, 60]))
    _, info = run.exchange()
    peers = info["peers"]
    assert bool(((peers < 40) == (torch.arange(100) < 40)[:, None]).all())
    assert not (peers == torch.arange(100)[:, None]).any()
    assert peers.shape == (100, 5)


def test_oracle_without_the_truth_is_refused(play):
    federation = dataclasses.replace(tiny_federation(), truth=None)
    with pytest.raises(ConfigError, match="needs the planted cluster"):
        play(Oracle(), federation)


def test_fixed_topology_is_fixed(play):
    """Invariant 30: M_i is constant over rounds, drawn once, and without oneself."""
    run = play(FixTopology(num_peers=3)).steps(4)
    first = run.infos[1]["peers"]
    assert all(torch.equal(info["peers"], first) for info in run.infos[1:])
    assert not (first == torch.arange(6)[:, None]).any()
    assert all(len(set(row)) == 3 for row in first.tolist())


def test_fixed_topology_waits_for_nobody_outside_the_cohort(play):
    """A neighbor that takes no part this round is an empty slot."""
    run = play(FixTopology(num_peers=5))
    _, info = run.exchange(reachable=torch.tensor([True, True, False, False, True, True]))
    assert set(info["peers"].flatten().tolist()) == {-1, 0, 1, 4, 5}


@pytest.mark.parametrize(
    ("sizes", "share"), [([25] * 4, 0.242), ([70, 20, 5, 5], 0.530), ([40, 60], 0.515), ([20] * 5, 0.192)]
)
def test_random_reads_within_clusters_as_often_as_the_formula_says(play, sizes, share):
    """Invariant 31: sum of n_c (n_c - 1) / (K (K - 1)) within 4 binomial errors of 100 x 10 x 4 pulls."""
    federation = planted(sizes)
    cluster = federation.truth.cluster
    assert expected_share(cluster.numpy()) == pytest.approx(share, abs=0.001)
    run = play(Random(num_peers=10), federation)
    pulls = torch.cat([info["peers"] for info in run.steps(4).infos])
    same = (cluster[pulls] == cluster.repeat(4)[:, None]).double().mean()
    assert abs(float(same) - share) < 4 * (share * (1 - share) / pulls.numel()) ** 0.5 + 0.0005


@pytest.mark.parametrize("method", [Random, Oracle, FixTopology])
def test_no_peers_at_all_is_refused_and_too_many_are_clamped(method, play):
    with pytest.raises(ConfigError, match=r"num_peers is 0; expected at least 1"):
        method(num_peers=0)
    _, info = play(method(num_peers=99)).exchange()
    assert info["peers"].shape[1] == 5
