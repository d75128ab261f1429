"""What all methods share: cohorts, and running statistics in an exchange."""

import pytest
import torch
from torch import nn

from coterie.methods.fedavg import FedAvg
from coterie.methods.random_gossip import Random
from coterie.rng import Rng


def test_a_share_of_a_peer_to_peer_population_may_be_one_client():
    """A tenth of ten is one; a server averages three at least."""
    assert len(Random().cohort(None, Rng(0).at(0), 10, 0.1)) == 1
    assert len(FedAvg().cohort(None, Rng(0).at(0), 10, 0.1)) == 3


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
