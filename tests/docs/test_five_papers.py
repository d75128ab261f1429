"""What the page about the five papers says of stored runs is what they say."""

import json
import re
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
    """When such a run is there, the page must say what it shows, in the row of the claim and in "What is open".

    A verdict with "no stored run" is of the studies of its row; "... have no stored run." is of whole papers.
    """
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    waiting = [name for _, verdict, runs in rows if "no stored run" in verdict for name in re.findall("`(.+?)`", runs)]
    assert not [name for name in waiting if (STORED / name).exists()]
    sentences = re.findall(r"([^.]*) ha(?:s|ve) no stored run[;.]", PAGE)
    for source, title in (("dac", "DAC"), ("panm", "PANM")):
        if any(title in sentence for sentence in sentences):
            assert not (STORED / source).exists(), title
        else:
            assert (STORED / source).exists(), f"{title}: nothing is stored, and the page does not say so"
    asked = "fedgwc/cifar100-equal-participation"
    assert not (STORED / asked).exists() or f"`{asked}` asks" not in PAGE


def test_the_costs_that_are_told_are_those_that_are_predicted():
    lines = [one for found in compare.costs_of("panm").values() for one in found]
    assert f"{sum(bool(one.within) for one in lines)} of the {len(lines)} costs" in PAGE
    more = {f"{round(one.difference)}" for one in lines if one.ours > 1000 and not one.within}
    assert all(number in PAGE for number in more)
    assert more == {"33", "50"}
