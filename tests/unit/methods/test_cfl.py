"""CFL's options, on updates that are unit vectors in the plane."""

import math

import pytest
import torch
from torch import nn

from coterie.exchange.base import Message
from coterie.methods.cfl import Cfl, CflClusters
from coterie.methods.fedavg import FedAvg
from coterie.methods.server import ServerContext
from coterie.models.layout import Layout
from coterie.rng import Rng

LAYOUT = Layout(nn.Linear(2, 1, bias=False), torch.float64)
DEGREES = [0, 30, 63, 97, 140]


def start(clients: int) -> CflClusters:
    """One cluster, at the origin, of which nothing is known."""
    models, label = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(clients, dtype=torch.int64)
    return CflClusters(
        models, models[:, :0], label, models.expand(clients, -1).clone(), torch.full_like(label, -1)
    )


def merged(method: Cfl, shared: CflClusters, ids: list[int], index: int = 0) -> CflClusters:
    """A round in which some clients return unit vectors."""
    radians = torch.tensor([DEGREES[i] for i in ids], dtype=torch.float64) * math.pi / 180
    params = torch.stack([radians.cos(), radians.sin()], dim=1)
    message = Message(
        params, {"samples": torch.ones(len(ids), dtype=torch.float64)}, torch.tensor(ids)
    )
    return method.aggregate(
        ServerContext(index, Rng(0).at_round(index), LAYOUT, 5), shared, message
    )


def always(**options) -> Cfl:
    """CFL that splits whatever it may split."""
    return Cfl(eps1=9.0, eps2=0.0, warmup_rounds=0, min_cluster_size=1, **options)


@pytest.mark.option("Cfl.linkage", "single", "complete")
def test_the_cut_is_at_the_widest_gap_or_between_compact_parts():
    """Directions 0, 30, 63, 97 and 140: the widest gap is the last.

    Complete linkage joins 0 with 30 and 63 with 97 (apart by 33 and less), 140 with the latter (77
    apart, to 97 for the other two), and so cuts between 30 and 63.
    """
    assert merged(always(), start(5), [0, 1, 2, 3, 4]).label.tolist() == [0, 0, 0, 0, 1]
    assert merged(always(linkage="complete"), start(5), [0, 1, 2, 3, 4]).label.tolist() == [
        0,
        0,
        1,
        1,
        1,
    ]


def test_a_split_must_be_clearer_than_gamma_max():
    """The nearest directions across the cut are 43 degrees apart: sqrt((1 - cos 43) / 2) = sin 21.5 = 0.3665."""
    split = {
        gamma: len(merged(always(gamma_max=gamma), start(5), [0, 1, 2, 3, 4]).models)
        for gamma in (0.366, 0.367)
    }
    assert split == {0.366: 2, 0.367: 1}


@pytest.mark.option("Cfl.participation", "full", "partial")
def test_everybody_takes_part_or_the_runs_share():
    """Three of ten, as with FedAvg, or all ten."""
    rng = Rng(0).at_round(3)
    assert Cfl().select_cohort(None, rng, 10, 0.3).tolist() == list(range(10))
    drawn = Cfl(participation="partial").select_cohort(None, rng, 10, 0.3)
    assert drawn.tolist() == FedAvg().select_cohort(None, rng, 10, 0.3).tolist()
    assert len(drawn) == 3


@pytest.mark.option("Cfl.participation", "partial")
def test_a_cluster_is_judged_by_the_last_update_of_each_member():
    """Two rounds of some of the clients show all five updates; with full participation no round shows them all."""
    for participation, clusters in (("partial", 2), ("full", 1)):
        method = always(participation=participation)
        shared = merged(method, start(5), [0, 1, 2], index=0)
        assert len(shared.models) == 1
        still = shared.__class__(
            **{**vars(shared), "models": torch.zeros(1, 2, dtype=torch.float64)}
        )
        assert len(merged(method, still, [3, 4], index=1).models) == clusters


@pytest.mark.parametrize(("max_age", "clusters"), [(1, 1), (2, 2), (None, 2)])
def test_an_update_of_two_rounds_ago_is_two_rounds_old(max_age, clusters):
    """Known since round 0, judged in round 2."""
    method = always(participation="partial", max_age=max_age)
    shared = merged(method, start(5), [0, 1, 2], index=0)
    still = shared.__class__(**{**vars(shared), "models": torch.zeros(1, 2, dtype=torch.float64)})
    assert len(merged(method, still, [3, 4], index=2).models) == clusters
