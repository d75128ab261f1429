"""Balanced, train-prior and global accuracy of a run."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score
from torch import nn

from coterie import testing
from coterie._util.settings import parse_settings
from coterie.data.federation import TestSet
from coterie.engine.task import Task
from coterie.errors import ConfigError
from coterie.functional import metrics
from coterie.methods.base import Method, Round
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedgwc import FedGwc
from coterie.methods.ifca import Ifca
from coterie.methods.oneshot import OneShot
from coterie.methods.random_gossip import Random
from coterie.methods.server import gradient_variance_report
from coterie.methods.sosicfl import SosicFl, SosicFlPlus
from coterie.models import simplex_layers
from coterie.models.layout import Layout
from coterie.rng import Rng
from coterie.runtime import final_metrics
from coterie.runtime.final_metrics import select_defined
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate

ALL = ("balanced_accuracy", "train_prior_accuracy", "global_accuracy")


def uneven():
    """A tiny federation whose second test set has only 7 samples."""
    federation = testing.tiny_federation()
    first, second = federation.tests
    return dataclasses.replace(
        federation, tests=(first, TestSet(second.x[:7], second.y[:7], second.name))
    )


def run(method: Method, **settings: Any):
    """The finished loop and its final test metrics, clients x metrics."""
    setup = testing.tiny_settings(metrics=ALL, evaluate="final", **settings)
    loop = testing.run_method(method, federation=uneven(), settings=setup)
    params = loop.evaluate_final()
    table = loop.record.metrics.query("split == 'test'").pivot(
        index="client", columns="metric", values="value"
    )
    return loop, params, table


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
@pytest.mark.option("Settings.metrics", "balanced_accuracy", "train_prior_accuracy")
def test_class_metrics_are_those_of_the_predictions(engine: str):
    """Against scikit-learn on predictions of each client's model; the prior is how often it trained on each class."""
    loop, params, table = run(FedAvg(), engine=engine)
    federation = uneven()
    for client in range(6):
        test = federation.tests[int(federation.test_of[client])]
        predicted = loop.task.layout.build_module(params[client], dtype=loop.task.dtype)(
            test.x
        ).argmax(1)
        prior = loop.task.class_counts()[client]
        assert table.balanced_accuracy[client] == pytest.approx(
            balanced_accuracy_score(test.y, predicted)
        )
        expected = accuracy_score(test.y, predicted, sample_weight=prior[test.y])
        assert table.train_prior_accuracy[client] == pytest.approx(expected)


def test_a_class_without_test_samples_is_left_out_of_balanced_accuracy():
    """The first test set has the classes 0 and 1 alone: the mean of those two recalls, not a third less."""
    federation = testing.tiny_federation()
    first, second = federation.tests
    held = first.y < 2
    federation = dataclasses.replace(
        federation, tests=(TestSet(first.x[held], first.y[held], first.name), second)
    )
    settings = testing.tiny_settings(metrics=("balanced_accuracy",), evaluate="final")
    loop = testing.run_method(FedAvg(), federation=federation, settings=settings)
    params = loop.evaluate_final()
    table = loop.record.metrics.query(
        "split == 'test' and metric == 'balanced_accuracy'"
    ).set_index("client")["value"]
    for client in range(6):
        test = federation.tests[int(federation.test_of[client])]
        right = (
            loop.task.layout.build_module(params[client], dtype=loop.task.dtype)(test.x).argmax(1)
            == test.y
        )
        recalls = [float(right[test.y == label].double().mean()) for label in test.y.unique()]
        assert table[client] == pytest.approx(sum(recalls) / len(recalls))
    assert table[0] > 0


def pooled(loop, row: torch.Tensor) -> float:
    """Accuracy of one model on both test sets together."""
    federation = uneven()
    x, y = (torch.cat([getattr(test, name) for test in federation.tests]) for name in ("x", "y"))
    return float(
        (loop.task.layout.build_module(row, dtype=loop.task.dtype)(x).argmax(1) == y)
        .double()
        .mean()
    )


@pytest.mark.option("Settings.metrics", "global_accuracy")
def test_the_global_accuracy_is_that_of_the_common_model():
    """FedAvg's model; Ditto's global one, not the personal ones; SosicFL's barycenter."""
    loop, params, table = run(FedAvg())
    assert table.global_accuracy.tolist() == pytest.approx([pooled(loop, params[0])] * 6)
    ditto, _, personal = run(Ditto())
    assert personal.global_accuracy.tolist() == pytest.approx(table.global_accuracy.tolist())
    assert personal.accuracy.tolist() != table.accuracy.tolist()
    assert ditto.state.memory is not None
    for method in (SosicFl(endpoints=3, regions=2), SosicFlPlus(endpoints=3, regions=2)):
        simplex, _, mixed = run(method)
        whole = simplex.state.shared.models[0]
        # at its barycenter
        assert mixed.global_accuracy.tolist() == pytest.approx([pooled(simplex, whole)] * 6)


def test_clusters_are_weighed_by_their_members():
    """Each client counts the accuracy of its cluster's model: the mean is the sum of K_c / K times that accuracy."""
    loop, _, table = run(OneShot(clusters=2, warmup_rounds=2))
    label, models = loop.state.shared.label, loop.state.shared.models
    expected = [pooled(loop, models[int(c)]) for c in label]
    assert table.global_accuracy.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["train_prior_accuracy", "global_accuracy"])
def test_what_is_made_of_the_accuracy_is_refused_where_none_is_measured(name):
    """It would be in no table, and nothing would say so."""
    given = {"classes": "mse", "labels": "multi-label"}
    for kind, loss in given.items():
        data = testing.tiny_federation(kind=kind)
        settings = testing.tiny_settings(loss=loss, metrics=[name])
        with pytest.raises(ConfigError, match=f"metric '{name}' needs classes, .*loss '{loss}'"):
            simulate(data, FedAvg(), model="linear", settings=settings)


def test_only_a_server_has_a_global_model():
    """Peer-to-peer methods report the class metrics alone; unknown names are refused."""
    _, _, table = run(Random(num_peers=2))
    assert "global_accuracy" not in table.columns
    assert "balanced_accuracy" in table.columns
    with pytest.raises(ConfigError, match=r"unknown metric 'n_clusters'.* clusters, "):
        parse_settings(Settings, {"metrics": ["n_clusters"]}, "study")


def test_the_best_round_is_that_of_the_mean_over_clients():
    """Means 0.4, 0.5 and 0.3 over two clients: the values of the second round, whatever single clients did."""
    rows = [
        (t, c, v)
        for t, pair in enumerate([(0.8, 0.0), (0.6, 0.4), (0.0, 0.6)])
        for c, v in enumerate(pair)
    ]
    table = pd.DataFrame(rows, columns=["round", "client", "value"])
    table = table.assign(split="test", model="current", metric="accuracy")
    both = np.arange(2)
    assert final_metrics.compute_maxima(table, both)["accuracy_max"].tolist() == [0.6, 0.4]
    assert final_metrics.compute_maxima(table.assign(model="best"), both) == {}
    # In the second round the second client has no finite outputs: the mean 0.4 of the first is best.
    table.loc[3, "value"] = math.nan
    assert final_metrics.compute_maxima(table, both)["accuracy_max"].tolist() == [0.8, 0.0]
    # A client that never has a value chooses nothing: 0.8 of the other.
    table.loc[table.client == 1, "value"] = math.nan
    assert final_metrics.compute_maxima(table, both)["accuracy_max"].tolist()[0] == 0.8


def test_a_client_without_a_value_has_none():
    """Client 1 of three was in no cohort: its mean and its best are undefined, those of the others are theirs."""
    rows = [(0, 0, 0.2), (1, 0, 0.4), (0, 2, 0.6), (0, 1, np.nan)]
    table = pd.DataFrame(rows, columns=["round", "client", "value"])
    tests = table.assign(split="test", model="current", metric="accuracy")
    best = final_metrics.compute_maxima(tests, np.arange(3))["accuracy_max"]
    assert torch.equal(best.isnan(), torch.tensor([False, True, False]))
    reports = table.assign(split="train", model="current", metric="m").dropna()
    means = final_metrics.average_over_rounds(reports, ["m", "n"], np.arange(3))
    assert list(means) == ["m"]
    assert np.allclose(means["m"].numpy(), [0.3, np.nan, 0.6], equal_nan=True)


@pytest.mark.option("Settings.metrics", "clusters", "maxima")
def test_clusters_are_scored_at_the_end():
    """One-shot clustering finds the two planted rules or not; either way the scores are those of its labels."""
    settings = testing.tiny_settings(metrics=("clusters", "maxima"), eval_every=1, evaluate="final")
    loop = testing.run_method(OneShot(clusters=2, warmup_rounds=2), settings=settings)
    loop.record._clusters = [(-1, torch.arange(6).numpy() % 2)]
    loop.evaluate_final()
    table = loop.record.metrics.query("split == 'test'")
    label, truth = loop.state.shared.label, torch.arange(6) % 2
    last = table.drop_duplicates(["client", "metric"], keep="last").pivot(
        index="client", columns="metric", values="value"
    )
    assert last.n_clusters.tolist() == [2.0] * 6
    assert last["rand"].tolist() == pytest.approx([metrics.rand_index(truth, label)] * 6)
    assert last.adjusted_rand[0] == pytest.approx(metrics.adjusted_rand_index(truth, label))
    assert last.was[0] == pytest.approx(
        metrics.wasserstein_silhouette(loop.task.class_counts(), label)
    )
    history = table[table.metric == "accuracy"].groupby("round")["value"].mean()
    assert last.accuracy_max.mean() == pytest.approx(history.max())


def test_one_cluster_has_no_was():
    """NaN, not 0, and no warning in the middle of a run; without a truth there is no Rand index."""
    scores = final_metrics.compute_cluster_metrics(
        torch.zeros(4, dtype=torch.int64), None, torch.ones(4, 3, dtype=torch.int64)
    )
    assert scores["n_clusters"] == 1.0
    assert math.isnan(scores["was"])
    assert math.isnan(scores["wadb"])
    assert "rand" not in scores
    _, reasons = final_metrics.explain_cluster_metrics(
        torch.zeros(4, dtype=torch.int64), None, torch.ones(4, 3, dtype=torch.int64)
    )
    assert set(reasons) == {"was", "wadb"}
    assert "WAS is undefined: it needs at least 2 clusters" in reasons["was"]
    regression = final_metrics.compute_cluster_metrics(
        torch.arange(3), torch.arange(3), torch.zeros(3, 0, dtype=torch.int64)
    )
    assert regression == {"n_clusters": 3.0, "rand": 1.0, "adjusted_rand": 1.0}


def updates(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return a list to which each local training from now on adds what it changed."""
    seen: list[torch.Tensor] = []
    train = Task.train

    def spy(task: Task, params: torch.Tensor, *args: Any, **kwargs: Any):
        trained = train(task, params, *args, **kwargs)
        seen.append(trained[0] - params)
        return trained

    monkeypatch.setattr(Task, "train", spy)
    return seen


@pytest.mark.parametrize(
    "method", [FedAvg(), Ifca(clusters=2), SosicFl(endpoints=3, regions=2)], ids=lambda m: m.kind
)
@pytest.mark.option("Settings.metrics", "gradient_variance")
def test_the_gradient_variance_is_that_of_what_clients_trained(
    method: Method, monkeypatch: pytest.MonkeyPatch
):
    """Against what went into and came out of local training, once a round, alike for each client of the cohort."""
    seen = updates(monkeypatch)
    settings = testing.tiny_settings(metrics=("gradient_variance",), participation=0.5, rounds=3)
    loop = testing.run_method(method, settings=settings)
    found = loop.record.metrics.query("metric == 'gradient_variance'").groupby("round")["value"]
    assert found.size().tolist() == [3, 3, 3]
    assert found.nunique().tolist() == [1, 1, 1]
    assert found.mean().tolist() == pytest.approx(
        [metrics.total_variance(updates) for updates in seen]
    )


def test_the_gradient_variance_is_of_the_last_layer():
    """Two layers: only the second counts; with endpoints in all layers, weight and bias of its endpoints do."""

    def two() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))

    assert int(simplex_layers.last_layer_mask(Layout(two())).sum()) == 5 * 3 + 3
    every = Layout(simplex_layers.simplex_all(two, 2)())  # type: ignore[operator]
    assert int(simplex_layers.last_layer_mask(every).sum()) == 2 * (5 * 3 + 3)
    alone = Layout(simplex_layers.simplex_all(lambda: nn.Linear(5, 3), 2)())  # type: ignore[operator]
    assert bool(simplex_layers.last_layer_mask(alone).all())


def test_diverged_updates_do_not_count():
    """Updates (0, 0), (2, 4) and one that is not finite: 5, as of the first two."""
    federation = testing.tiny_federation()
    loop = testing.run_method(
        FedAvg(), federation=federation, settings=testing.tiny_settings(rounds=0)
    )
    rnd = Round(0, loop.task, loop.exchange, Rng(0), torch.ones(6, dtype=torch.bool))
    start = torch.zeros(3, loop.task.layout.size, dtype=torch.float64)
    params = start.clone()
    params[1, :2] = torch.tensor([2.0, 4.0])
    params[2, 0] = torch.nan
    rnd = dataclasses.replace(
        rnd, metrics=frozenset({"gradient_variance", "composed_gradient_variance"})
    )
    found = gradient_variance_report(rnd, start, params)
    assert {name: value.tolist() for name, value in found.items()} == {
        "composed_gradient_variance": [5.0] * 3, "gradient_variance": [5.0] * 3
    }  # fmt: skip


@pytest.mark.parametrize(("gain", "bias"), [(1.0, True), (2.0, True), (1.0, False)])
def test_the_composed_update_is_that_of_the_layer_at_the_barycenter(gain: float, bias: bool):
    """Against the layer that the model computes with before and after, for endpoints of its own or a shared bias."""
    layout = Layout(
        simplex_layers.simplex_head(lambda: nn.Linear(5, 3), 4, bias=bias, gain=gain)(),
        torch.float64,
    )
    before, after = torch.from_numpy(Rng(0).generator("rows").normal(size=(2, 1, layout.size)))

    def outputs(row: torch.Tensor) -> torch.Tensor:
        tensors = layout.split_rows(row[0]) | {
            name: value[0] for name, value in layout.zero_inputs(1).items()
        }
        run = partial(torch.func.functional_call, layout.eval_module, tensors)
        at_zero = run((torch.zeros(1, 5, dtype=torch.float64),))
        weight = run((torch.eye(5, dtype=torch.float64),)) - at_zero
        return torch.cat([weight.T.flatten(), at_zero[0]])

    found = simplex_layers.compose_last_layer(layout, after - before)
    torch.testing.assert_close(found[0], outputs(after) - outputs(before))


def test_a_simplex_reports_both_variances():
    """Of all endpoints, and at the barycenter; a method without endpoints has one value under both names."""
    names = ("gradient_variance", "composed_gradient_variance")
    for method, same in ((SosicFl(endpoints=3, regions=2), False), (FedAvg(), True)):
        loop = testing.run_method(method, settings=testing.tiny_settings(metrics=names, rounds=2))
        table = loop.record.metrics.groupby("metric")["value"].mean()
        assert (table[names[0]] == pytest.approx(table[names[1]])) == same


@pytest.mark.option("Settings.metrics", "interaction_change")
def test_fedgwc_says_how_much_its_matrix_still_changes():
    """The running mean at the server after each round, for the clients of the cohort by their clusters."""
    settings = testing.tiny_settings(metrics=("interaction_change",), rounds=2)
    loop = testing.run_method(FedGwc(), settings=settings)
    found = loop.record.metrics.query("metric == 'interaction_change'").groupby("round")["value"]
    assert found.size().tolist() == [6, 6]
    shared = loop.state.shared
    assert found.max().tolist()[-1] == pytest.approx(float(shared.mse[0]))
    assert found.max().tolist()[0] > found.max().tolist()[-1]


def test_a_host_of_some_clients_cannot_say_what_is_of_all():
    """Two hosts: neither the variance over the cohort nor the server's state is theirs to report."""
    settings = testing.tiny_settings(metrics=("gradient_variance", "interaction_change"), rounds=2)
    loop = testing.run_method(FedGwc(), settings=settings)
    part = loop._make_round(1, torch.arange(2), torch.arange(6))
    rows = loop.state.params[:2]
    assert gradient_variance_report(part, rows, rows) == {}
    loop.exchange.set_active(torch.arange(2))
    _, report = loop.method.round(part, loop.state.select_rows(torch.arange(2)))
    assert "interaction_change" not in report


def test_a_run_says_why_a_metric_is_not_defined(tmp_path: Path):
    """FedAvg has one cluster: NaN in the tables, and the reason in provenance.json."""
    settings = testing.tiny_settings(metrics=("clusters",), rounds=1, evaluate="final")
    simulate(
        testing.tiny_federation(),
        FedAvg(),
        model="linear",
        settings=settings,
        folder=tmp_path / "run",
    )
    reasons = json.loads((tmp_path / "run/provenance.json").read_text())["undefined"]
    assert "fewer than the 6 clients; found 1" in reasons["was"]
    assert set(reasons) == {"was", "wadb"}


@pytest.mark.option("Settings.metrics", "reductions")
def test_accuracies_can_be_reduced_with_other_weights():
    """Test sets of different sizes: by samples, and by samples inside the clusters that were found."""
    settings = testing.tiny_settings(metrics=("reductions",), evaluate="final")
    loop = testing.run_method(
        OneShot(clusters=2, warmup_rounds=2), federation=uneven(), settings=settings
    )
    loop.evaluate_final()
    table = loop.record.metrics.query("split == 'test'").pivot(
        index="client", columns="metric", values="value"
    )
    sizes = [len(test.y) for test in uneven().tests]
    samples = torch.tensor([sizes[int(place)] for place in uneven().test_of])
    assert loop.task.data.count_test_samples().tolist() == samples.tolist()
    accuracy, label = torch.tensor(table.accuracy.to_numpy()), loop.state.shared.label
    by_samples = float((samples * accuracy).sum() / samples.sum())
    assert table.accuracy_sample_weighted.tolist() == pytest.approx([by_samples] * 6)
    total = 0.0
    for cluster in range(2):
        inside = label == cluster
        total += int(inside.sum()) * float(
            (samples * accuracy)[inside].sum() / samples[inside].sum()
        )
    assert table.accuracy_cluster_then_client.tolist() == pytest.approx([total / 6] * 6)


@pytest.mark.option("Settings.metrics", "composed_gradient_variance")
def test_the_composed_variance_is_that_of_the_mean_over_endpoints(monkeypatch: pytest.MonkeyPatch):
    """Three endpoints of 3 x 4 weights and 3 biases: the variance over clients of their means, summed."""
    seen = updates(monkeypatch)
    settings = testing.tiny_settings(metrics=("composed_gradient_variance",), rounds=2)
    loop = testing.run_method(SosicFl(endpoints=3, regions=2), settings=settings)
    found = (
        loop.record.metrics.query("metric == 'composed_gradient_variance'")
        .groupby("round")["value"]
        .mean()
    )
    parts = [
        (update[:, :36].reshape(6, 3, 12).mean(1), update[:, 36:].reshape(6, 3, 3).mean(1))
        for update in seen
    ]
    assert found.tolist() == pytest.approx(
        [float(torch.cat(part, dim=1).var(0, correction=0).sum()) for part in parts]
    )


@pytest.mark.parametrize(
    ("metric", "kept"),
    [
        # client 1 lacks a class; client 2 diverged, which no mean hides
        (metrics.AUROC, [0, 2, 3]),
        (metrics.Metric("own_of_samples", on_samples=True), [0, 2, 3]),
        (metrics.Metric("of_a_method"), [0, 1, 2, 3]),
        (metrics.TRAIN_PRIOR_ACCURACY, [0, 1, 2, 3]),
    ],
)
def test_clients_whose_samples_leave_a_metric_undefined_are_not_in_its_mean(metric, kept):
    values = pd.Series([0.5, math.nan, math.nan, 1.0])
    losses = pd.Series([math.nan, 0.4, 0.3], index=[2, 1, 0])
    assert select_defined(values, losses, metric).index.tolist() == kept
    assert select_defined(values.fillna(0), losses, metric).index.tolist() == [0, 1, 2, 3]
