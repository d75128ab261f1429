"""The built-in studies of the server-based papers, and a study that mixes methods with and without a server."""

import tomllib
from pathlib import Path

import pytest

from coterie.data.datasets import BUNDLED, GATHERED, HUB_NAMES
from coterie.studies import config, sweep
from coterie.studies.run import run_study

NAMES = [name for name in config.find_builtin_studies() if name.startswith(("fedgwc/", "sosicfl/"))]

MIXED = """
name = "mixed"
rounds = 2
seeds = [0]
evaluate = "final"
participation = 0.5
eval_every = 1
metrics = ["balanced_accuracy", "global_accuracy"]

[data]
dataset = "digits"
num_clients = 10
train = 40
validation = 8
test = "client"
test_samples = 12
shift = [{ kind = "k-fold", folds = 5 }]

[local]
batch_size = 20
optimizer = "sgd"
lr = 0.1

[[methods]]
kind = "random"
num_peers = 2

[[methods]]
kind = "fedavg"

[[methods]]
kind = "fedgwc"

[[methods]]
kind = "sosicfl-plus"
endpoints = 5
regions = 5
"""


def test_there_is_a_study_for_every_table():
    """A1 to A8 of FedGWC (three triples for levels and domains), beta, the homogeneous case, two of equal
    participation, and A1 with published labels; B1 to B4 of SosicFL (three splits), clusters and radii, the late start, the calibration,
    crops and flips, and three splits without mirrored images."""
    assert len([name for name in NAMES if name.startswith("fedgwc/")]) == 4 + 3 * 4 + 1 + 3 + 1
    assert len([name for name in NAMES if name.startswith("sosicfl/")]) == 4 * 3 + 4 + 3


SWEEPS = {
    "fedgwc/beta": 5,
    "sosicfl/regions": 1 + 16,
    "sosicfl/late-start": 1 + 3,
    "sosicfl/calibration": 1 + 8,
}


@pytest.mark.parametrize("name", SWEEPS)
def test_grids_of_the_papers(name: str):
    """One method for each point of the grid, beside FedAvg for SosicFL; each can be made."""
    (study,) = sweep.expand_sweep(config.load_study(name))
    assert len(study.methods) == SWEEPS[name]
    assert study.settings.evaluate == "final"


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SWEEPS)))
def test_guesses_are_marked(name: str):
    """What a paper lost is marked in its file or one it extends; FedGWC is there in every preset but once;
    evaluation is of the last models, and the largest accuracy over rounds is reported beside it."""
    source, texts = name, []
    while source:
        texts.append(config.find_builtin_studies(bases=True)[source].read_text(encoding="utf-8"))
        source = tomllib.loads(texts[-1]).get("extends")
    assert any("ours" in text or "lost" in text for text in texts)
    study = config.load_study(name)
    assert study.settings.evaluate == "final"
    assert study.settings.eval_every > 0
    assert "maxima" in study.settings.metrics
    assert ("clusters" in study.settings.metrics) == name.startswith("fedgwc/")
    labels = {entry.label for entry in study.methods}
    wanted = (
        {"FedGWC", "FedGWC paper", "FedGWC released"}
        if name.startswith("fedgwc")
        else {"FedAvg", "SosicFL"}
    )
    # presets are compared by the study that it extends
    if name == "fedgwc/cifar100-cluster-methods":
        wanted = {"FedGWC paper", "FedAvg"}
    if name == "sosicfl/cifar10-simplecnn-5-fold-crop-flip":  # its question is of the level alone
        wanted = {"FedAvg"}
    assert wanted <= labels


def test_the_data_of_every_study_can_be_had_or_are_described():
    """A short name of the Hub, a bundled dataset, or one of which the error says what to get."""
    known = {*BUNDLED, *HUB_NAMES, *GATHERED, "coterie.data.heart_disease:flamby"}
    assert {
        dataset for name in NAMES for dataset in config.load_study(name).data.dataset_names
    } <= known


@pytest.mark.slow
def test_methods_with_and_without_a_server_share_a_table(tmp_path: Path):
    """On one federation; the global accuracy is there for those that have a global model."""
    study = run_study(config.parse_study_text(MIXED), out=tmp_path)
    rows = study.rows
    overall = rows[rows["cluster"] == "all"]
    assert set(overall["label"]) == {"random", "fedavg", "fedgwc", "sosicfl-plus"}
    assert set(overall.loc[overall["metric"] == "accuracy", "label"]) == set(overall["label"])
    found = set(overall.loc[overall["metric"] == "global_accuracy", "label"])
    assert found == {"fedavg", "fedgwc", "sosicfl-plus"}
    total = {row["label"]: row["client_rounds"] for row in study.summary["participation"]}
    # 5 of 10 clients, two rounds
    assert total == {"random": 10, "fedavg": 10, "fedgwc": 10, "sosicfl-plus": 10}
    timed = {
        (row["label"], row["base"], row["metric"]) for row in study.summary["time_to_accuracy"]
    }
    assert timed == {(one, "fedavg", "accuracy") for one in ("random", "fedgwc")} | {
        ("fedgwc", "fedavg", "global_accuracy")
    }
