"""Analyses of stored runs: the simplex, the interaction matrix, beta."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from coterie import testing
from coterie.cli.app import app
from coterie.errors import CheckpointError, ConfigError, CoterieError
from coterie.functional import clustering, metrics
from coterie.methods.base import Method
from coterie.methods.fedgwc import FedGwc
from coterie.methods.sosicfl import SosicFl
from coterie.papers import analyses
from coterie.papers.analyses import AnalysisOptions, analyze_runs
from coterie.studies import config
from coterie.studies.run import reopen_run, run_study

STUDY = """
name = "small"
rounds = 2
seeds = [0]
evaluate = "final"

[data]
dataset = "digits"
num_clients = 6
train = 20
validation = 4
test = "client"
test_samples = 10
shift = [{ kind = "k-fold", folds = 2 }]

[model]
kind = "linear"

[[methods]]
kind = "fedavg"

[[methods]]
kind = "fedgwc"

[[methods]]
kind = "sosicfl"
endpoints = 3
regions = 2
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, two of which can be analyzed."""
    return run_study(config.parse_study_text(STUDY), out=tmp_path_factory.mktemp("runs")).folder


def follow(method: Method, **settings: Any):
    """The finished loop of a run of the tiny federation."""
    return testing.run_method(method, settings=testing.tiny_settings(evaluate="final", **settings))


def test_points_of_a_simplex_are_scored_by_their_models():
    """Each row is the accuracy of theta_f with the mixed head, on one client's test set or on all together."""
    loop = follow(SosicFl(endpoints=3, regions=2))
    table = analyses.evaluate_simplex(loop, AnalysisOptions(points=5, clients=[4]))
    assert table["client"].tolist() == [-1] * 6 + [4] * 6
    assert table["point"].tolist() == [-1, 0, 1, 2, 3, 4] * 2
    federation, row = testing.tiny_federation(), loop.state.shared.models[0]
    # endpoints x classes x features
    weight, bias = row[:36].reshape(3, 3, 4), row[36:].reshape(3, 3)
    for one in table.to_dict("records"):
        alpha = torch.tensor([one[f"alpha_{m}"] for m in range(3)], dtype=torch.float64)
        assert float(alpha.sum()) == pytest.approx(1)
        w, b = torch.einsum("m,mij->ij", alpha, weight), alpha @ bias
        tests = (
            federation.tests
            if one["client"] < 0
            else (federation.tests[int(federation.test_of[4])],)
        )
        x, y = (torch.cat([getattr(test, name) for test in tests]) for name in ("x", "y"))
        assert one["accuracy"] == pytest.approx(
            float(((x.double() @ w.T + b).argmax(1) == y).double().mean())
        )


def test_the_first_row_is_where_models_are_served():
    """The barycenter for everybody, the center of its region for a client: as in the run's own evaluation."""
    loop = follow(SosicFl(endpoints=3, regions=2), metrics=("global_accuracy",))
    loop.evaluate_final()
    table = (
        analyses.evaluate_simplex(loop, AnalysisOptions(points=1))
        .query("point == -1")
        .set_index("client")
    )
    final = loop.record.metrics.query("split == 'test'").pivot(
        index="client", columns="metric", values="value"
    )
    assert table.accuracy[-1] == pytest.approx(final.global_accuracy[0])
    for client in table.index[1:]:
        assert table.accuracy[client] == pytest.approx(final.accuracy[client])
    region = loop.state.shared.region
    first, second = table.index[1:]
    assert region[first] != region[second]


def test_interactions_are_the_servers():
    """P, W and N by pairs, with the found clusters."""
    loop = follow(FedGwc(eps=1.0, patience=1, min_pair_updates=0.0, beta=2.0))
    table, shared = analyses.tabulate_interactions(loop, AnalysisOptions()), loop.state.shared
    assert len(table) == 36
    pair = table.query("client == 1 and other == 3").iloc[0]
    assert pair.interaction == float(shared.matrix[1, 3])
    assert pair.affinity == float(clustering.affinity_matrix(shared.matrix, 2.0)[1, 3])
    assert pair.pairs == int(shared.pairs[1, 3])
    assert (pair.label, pair.other_label) == (int(shared.label[1]), int(shared.label[3]))


def test_beta_on_two_planted_blocks():
    """P = 1 inside two blocks of three and 0 across: two clusters, the planted ones, whatever beta. Constant P: one."""
    loop = follow(FedGwc(), rounds=0)
    truth = torch.tensor([0, 0, 0, 1, 1, 1])
    loop.record._clusters = [(-1, truth.numpy())]
    block = (truth[:, None] == truth[None, :]).double()
    loop.state = dataclasses.replace(
        loop.state, shared=dataclasses.replace(loop.state.shared, matrix=block)
    )
    table = analyses.evaluate_betas(loop, AnalysisOptions(betas=[0.5, 4.0]))
    assert table[["beta", "n_clusters", "rand", "adjusted_rand"]].to_numpy().tolist() == [
        [0.5, 2, 1, 1],
        [4, 2, 1, 1],
    ]
    assert table.was[0] == pytest.approx(
        metrics.wasserstein_silhouette(loop.task.class_counts(), truth)
    )
    same = dataclasses.replace(
        loop.state.shared, matrix=torch.full((6, 6), 0.5, dtype=torch.float64)
    )
    loop.state = dataclasses.replace(loop.state, shared=same)
    whole = analyses.evaluate_betas(loop, AnalysisOptions(betas=[1.0]))
    assert whole.n_clusters.tolist() == [1.0]
    assert np.isnan(whole.was[0])


@pytest.mark.full
def test_a_study_is_analyzed_run_by_run(study: Path):
    """Tables lie in the folders of the runs they are of; the study is read as before."""
    (path,) = analyze_runs(study, "interaction")
    assert path == study / "fedgwc/seed-0/analyses/interaction.parquet"
    assert len(pd.read_parquet(path)) == 36
    (path,) = analyze_runs(study / "sosicfl/seed-0", "simplex", AnalysisOptions(points=3))
    assert len(pd.read_parquet(path)) == 3 * 4
    loop = reopen_run(study / "fedgwc/seed-0")
    assert loop.is_finished
    assert config.load_study(study / "config.toml").name == "small"


@pytest.mark.full
def test_what_cannot_be_analyzed_is_told(study: Path, tmp_path: Path):
    """Unknown analyses, runs of other methods, ids and numbers that make no sense, runs without a checkpoint."""
    wrong: list[tuple[Any, str, type[CoterieError]]] = [
        (lambda: analyze_runs(study, "simplx"), "did you mean 'simplex'", ConfigError),
        (lambda: analyze_runs(study / "fedavg", "beta"), "holds fedavg; .* takes runs of fedgwc", ConfigError),
        (lambda: analyze_runs(study, "simplex", AnalysisOptions(clients=[6])), "clients is 6; expected ids from", ConfigError),
        (lambda: AnalysisOptions(points=0), "points is 0; expected a whole number, 1 or more", ConfigError),
        (lambda: reopen_run(study), "is a study; expected the folder of one run", ConfigError),
        (lambda: reopen_run(tmp_path), "holds no run", ConfigError),
    ]  # fmt: skip
    for call, text, kind in wrong:
        with pytest.raises(kind, match=text):
            call()
    (study / "fedgwc/seed-0/checkpoint.safetensors").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors is missing"):
        analyze_runs(study, "beta")
    (tmp_path / "away").rename(study / "fedgwc/seed-0/checkpoint.safetensors")


def test_the_command_writes_and_lists(study: Path):
    """Without --what it lists; with it, it names each table; numbers that are none are refused."""
    run = CliRunner().invoke
    assert "interaction matrix" in run(app, ["analyze", str(study)]).output
    done = run(app, ["analyze", str(study), "--what", "beta", "--betas", "0.5"])
    assert "beta.parquet" in done.output.replace("\n", "")
    assert pd.read_parquet(study / "fedgwc/seed-0/analyses/beta.parquet").beta.tolist() == [0.5]
    refused = run(app, ["analyze", str(study), "--what", "beta", "--betas", "much"])
    assert isinstance(refused.exception, ConfigError)


def test_a_simplex_over_numbers_is_refused_in_words(monkeypatch):
    loop = follow(SosicFl(endpoints=3, regions=2))
    monkeypatch.setattr(type(loop.task), "classes", 0)  # as with squared errors
    with pytest.raises(
        ConfigError,
        match="scores models by their accuracy; these targets are not one class a sample",
    ):
        analyses.evaluate_simplex(loop, AnalysisOptions())
