"""FixTopology."""

import pytest
import torch

from coterie.errors import ConfigError
from coterie.methods.fix_topology import FixTopology


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


def test_no_peers_at_all_is_refused_and_too_many_are_clamped(play):
    with pytest.raises(ConfigError, match=r"num_peers is 0; expected a whole number, 1 or more"):
        FixTopology(num_peers=0)
    _, info = play(FixTopology(num_peers=99)).exchange()
    assert info["peers"].shape[1] == 5
