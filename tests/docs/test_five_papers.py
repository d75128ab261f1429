"""What the page about the five papers says of stored runs is what they say."""

import json
from pathlib import Path

from coterie.papers import compare

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "reference" / "runs"
PAGE = (ROOT / "docs" / "explanation" / "what-five-papers-taught-us.md").read_text(encoding="utf-8")


def means(study: str, metric: str) -> dict[str, float]:
    rows = json.loads((STORED / study / "summary.json").read_text())["rows"]
    return {row["label"]: row["mean"] for row in rows if (row["cluster"], row["metric"]) == ("all", metric)}


def test_the_claims_about_synthetic_concept_shift():
    mse = means("similarity/synthetic", "mse")
    assert mse["Local (tuned)"] < min(mse["L2"], mse["Inverse loss"])
    assert mse["Oracle (tuned)"] < min(mse["Cosine of updates"], mse["Cosine of weights"]) < mse["Local (tuned)"]
    assert round(mse["Random"]) == 169
    assert "Our 169" in PAGE


def test_the_claims_about_labels_and_smaller_runs():
    accuracy = means("similarity/cifar10-label-5", "accuracy")
    baselines = max(accuracy["Random"], accuracy["Local"])
    assert all(accuracy[name] > baselines for name in ("Inverse loss", "Cosine of updates", "Cosine of weights", "L2"))
    comparison = compare.with_paper(compare.read(STORED / "similarity" / "cifar10-label-5"))
    assert all(line.within for line in comparison.lines if line.cluster == "all")
    for name in ("fmnist-covariate-4", "domain-cnn"):
        assert all(one.kept for one in compare.with_paper(compare.read(STORED / "similarity" / name)).chain)


def test_the_claims_about_server_based_methods():
    study = "sosicfl/cifar10-simplecnn-5-fold"
    local, overall = means(study, "accuracy"), means(study, "global_accuracy")
    assert local["SosicFL"] > local["FedAvg"] + 0.1
    assert overall["SosicFL"] < overall["FedAvg"]
    assert local["SosicFL+"] < local["Ditto"]
    assert set(means("fedgwc/cifar100-dirichlet", "n_clusters").values()) == {1.0}
    assert means("fedgwc/cifar10-clean", "n_clusters") == {"FedGWC": 1.0}
    assert means("fedgwc/cifar10-clean-blur", "rand")["FedGWC, 35 meetings"] == 1.0


def test_what_is_said_not_to_be_stored_is_not():
    """When such a run is there, the page must say what it shows."""
    for folder in ("dac", "panm", "fedgwc/cifar100-equal-participation"):
        assert not (STORED / folder).exists()
