"""Balanced, train-prior and global accuracy of a run."""

import dataclasses
import math
from typing import Any

import pandas as pd
import pytest
import torch

from coterie import metrics, outcome, testing
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


def test_the_best_round_is_that_of_the_mean_over_clients():
    """Means 0.4, 0.5 and 0.3 over two clients: the values of the second round, whatever single clients did."""
    rows = [(t, c, v) for t, pair in enumerate([(0.8, 0.0), (0.6, 0.4), (0.0, 0.6)]) for c, v in enumerate(pair)]
    table = pd.DataFrame(rows, columns=["round", "client", "value"])
    table = table.assign(split="test", model="current", metric="accuracy")
    assert outcome.maxima(table)["accuracy_max"].tolist() == [0.6, 0.4]
    assert outcome.maxima(table.assign(model="best")) == {}


def test_clusters_are_scored_at_the_end():
    """One-shot clustering finds the two planted rules or not; either way the scores are those of its labels."""
    settings = testing.tiny_settings(extra_metrics=("clusters", "maxima"), eval_every=1, evaluate="final")
    loop = testing.follow(OneShot(clusters=2, warmup_rounds=2), settings=settings)
    loop.record.clusters = torch.arange(6).numpy() % 2
    loop.final()
    table = loop.record.metrics.query("split == 'test'")
    label, truth = loop.state.shared.label, torch.arange(6) % 2
    last = table.drop_duplicates(["client", "metric"], keep="last").pivot(
        index="client", columns="metric", values="value"
    )
    assert last.n_clusters.tolist() == [2.0] * 6
    assert last["rand"].tolist() == pytest.approx([metrics.rand(truth, label)] * 6)
    assert last.adjusted_rand[0] == pytest.approx(metrics.adjusted_rand(truth, label))
    assert last.was[0] == pytest.approx(metrics.was(loop.task.class_counts(), label))
    history = table[table.metric == "accuracy"].groupby("round")["value"].mean()
    assert last.accuracy_max.mean() == pytest.approx(history.max())


def test_one_cluster_has_no_was():
    """NaN, not 0, and no warning in the middle of a run; without a truth there is no Rand index."""
    scores = outcome.cluster_metrics(torch.zeros(4, dtype=torch.int64), None, torch.ones(4, 3, dtype=torch.int64))
    assert scores["n_clusters"] == 1.0
    assert math.isnan(scores["was"])
    assert math.isnan(scores["wadb"])
    assert "rand" not in scores
    regression = outcome.cluster_metrics(torch.arange(3), torch.arange(3), torch.zeros(3, 0, dtype=torch.int64))
    assert regression == {"n_clusters": 3.0, "rand": 1.0, "adjusted_rand": 1.0}
