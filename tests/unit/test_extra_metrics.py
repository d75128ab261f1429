"""Balanced, train-prior and global accuracy of a run."""

import dataclasses
from typing import Any

import pytest
import torch

from coterie import metrics, testing
from coterie.errors import ConfigError
from coterie.federation import TestSet
from coterie.methods.base import Method
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.oneshot import OneShot
from coterie.methods.random_gossip import Random
from coterie.methods.sosicfl import SosicFl, SosicFlPlus
from coterie.settings import Settings
from coterie.tables import parse

ALL = ("balanced_accuracy", "train_prior_accuracy", "global_accuracy")


def uneven():
    """A tiny federation whose second test set has only 7 samples."""
    federation = testing.tiny_federation()
    first, second = federation.tests
    return dataclasses.replace(federation, tests=(first, TestSet(second.x[:7], second.y[:7], second.name)))


def run(method: Method, **settings: Any):
    """The finished loop and its final test metrics, clients x metrics."""
    setup = testing.tiny_settings(extra_metrics=ALL, evaluate="final", **settings)
    loop = testing.follow(method, federation=uneven(), settings=setup)
    params = loop.final()
    table = loop.record.metrics.query("split == 'test'").pivot(index="client", columns="metric", values="value")
    return loop, params, table


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_class_metrics_are_those_of_the_predictions(engine: str):
    """Against the functions of `metrics` on predictions of each client's model."""
    loop, params, table = run(FedAvg(), engine=engine)
    federation = uneven()
    for client in range(6):
        test = federation.tests[int(federation.test_of[client])]
        predicted = loop.task.layout.module(params[client])(test.x).argmax(1)
        prior = loop.task.class_counts()[client]
        assert table.balanced_accuracy[client] == pytest.approx(metrics.balanced_accuracy(predicted, test.y))
        expected = metrics.train_prior_accuracy(predicted, test.y, prior)
        assert table.train_prior_accuracy[client] == pytest.approx(expected)


def pooled(loop, row: torch.Tensor) -> float:
    """Accuracy of one model on both test sets together."""
    federation = uneven()
    x, y = (torch.cat([getattr(test, name) for test in federation.tests]) for name in ("x", "y"))
    return float((loop.task.layout.module(row)(x).argmax(1) == y).double().mean())


def test_the_global_accuracy_is_that_of_the_common_model():
    """FedAvg's model; Ditto's global one, not the personal ones; SosicFL's barycentre."""
    loop, params, table = run(FedAvg())
    assert table.global_accuracy.tolist() == pytest.approx([pooled(loop, params[0])] * 6)
    ditto, _, personal = run(Ditto())
    assert personal.global_accuracy.tolist() == pytest.approx(table.global_accuracy.tolist())
    assert personal.accuracy.tolist() != table.accuracy.tolist()
    assert ditto.state.memory is not None
    for method in (SosicFl(endpoints=3, regions=2), SosicFlPlus(endpoints=3, regions=2)):
        simplex, _, mixed = run(method)
        whole = simplex.state.shared.models[0]
        assert mixed.global_accuracy.tolist() == pytest.approx([pooled(simplex, whole)] * 6)  # at its barycentre


def test_clusters_are_weighed_by_their_members():
    """Each client counts the accuracy of its cluster's model: the mean is the sum of K_c / K times that accuracy."""
    loop, _, table = run(OneShot(clusters=2, warmup_rounds=2))
    label, models = loop.state.shared.label, loop.state.shared.models
    expected = [pooled(loop, models[int(c)]) for c in label]
    assert table.global_accuracy.tolist() == pytest.approx(expected)


def test_only_a_server_has_a_global_model():
    """Peer-to-peer methods report the class metrics alone; unknown names are refused."""
    _, _, table = run(Random(num_peers=2))
    assert "global_accuracy" not in table.columns
    assert "balanced_accuracy" in table.columns
    with pytest.raises(ConfigError, match="extra_metrics"):
        parse(Settings, {"extra_metrics": ["f1"]}, "study")
