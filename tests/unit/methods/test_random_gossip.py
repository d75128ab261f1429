"""Random."""

import pytest
import torch

from coterie.errors import ConfigError
from coterie.methods.random_gossip import Random
from coterie.results.graph import expected_share
from coterie.testing import tiny_federation


@pytest.mark.parametrize(
    ("sizes", "share"),
    [([25] * 4, 0.242), ([70, 20, 5, 5], 0.530), ([40, 60], 0.515), ([20] * 5, 0.192)],
)
def test_random_reads_within_clusters_as_often_as_the_formula_says(play, planted, sizes, share):
    """Invariant 31: sum of n_c (n_c - 1) / (K (K - 1)) within 4 binomial errors of 100 x 10 x 4 pulls."""
    federation = planted(sizes)
    cluster = federation.truth.cluster
    assert expected_share(cluster.numpy()) == pytest.approx(share, abs=0.001)
    run = play(Random(num_peers=10), federation)
    pulls = torch.cat([info["peers"] for info in run.steps(4).infos])
    same = (cluster[pulls] == cluster.repeat(4)[:, None]).double().mean()
    assert abs(float(same) - share) < 4 * (share * (1 - share) / pulls.numel()) ** 0.5 + 0.0005


def test_every_client_draws_its_own_peers_in_however_many_blocks(play):
    """80 clients that read 5 each; 17 readers of one client are 5 standard deviations (2.2) above the mean of 5.

    No two clients drew the same five: the chance is 3,160 pairs over 24 million sets.
    """
    peers = play(Random(num_peers=5), tiny_federation(80, train=2, validation=1)).exchange()[1][
        "peers"
    ]
    assert int(torch.bincount(peers.flatten(), minlength=80).max()) < 17
    assert len({frozenset(row) for row in peers.tolist()}) == 80


def test_no_peers_at_all_is_refused_and_too_many_are_clamped(play):
    with pytest.raises(ConfigError, match=r"num_peers is 0; expected a whole number, 1 or more"):
        Random(num_peers=0)
    _, info = play(Random(num_peers=99)).exchange()
    assert info["peers"].shape[1] == 5
