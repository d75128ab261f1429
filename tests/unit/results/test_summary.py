"""The content of summary.json, by hand on small stored runs."""

import json
import math
from dataclasses import replace

import pytest

from coterie.results import stored_runs, summary


def row(result, **wanted):
    """The one row with these entries."""
    (found,) = [r for r in result["rows"] if all(r[k] == v for k, v in wanted.items())]
    return found


def test_summary_averages_over_clients_and_over_clusters(small):
    """DAC, seed 0: clients mean 0.625, clusters (0.7, 0.4) mean 0.55; seed 1: 0.65 and (0.6, 0.8) mean 0.7."""
    result = summary.summarize_study(small)
    assert result["study"] == "small"
    everyone = row(result, label="DAC", cluster="all", metric="accuracy")
    assert everyone == pytest.approx(
        {
            "method": "dac",
            "label": "DAC",
            "cluster": "all",
            "metric": "accuracy",
            "mean": 0.6375,
            "std": 0.0125,
            "seeds": 2,
        }
    )
    clusters = row(result, label="DAC", cluster="clusters", metric="accuracy")
    assert (clusters["mean"], clusters["std"]) == pytest.approx((0.625, 0.075))
    assert row(result, label="DAC", cluster="0", metric="accuracy")["mean"] == pytest.approx(0.65)
    assert row(result, label="Local", cluster="1", metric="loss")["mean"] == pytest.approx(0.35)


def test_summary_has_the_time_of_every_run(small):
    """Wall time, training time and samples come from the provenance of each run."""
    timing = summary.summarize_study(small)["timing"]
    assert len(timing) == 4
    assert timing[-1] == {
        "label": "Local",
        "seed": 1,
        "wall_s": 3.0,
        "train_s": 1.5,
        "train_samples": 960,
    }


def test_clusters_carry_the_names_that_the_study_gave_them(small):
    """federation.json beside the runs names the planted clusters."""
    (small / "federation.json").write_text(json.dumps({"clusters": ["upright", "<b>turned</b>"]}))
    clusters = {r["cluster"] for r in summary.summarize_study(small)["rows"]}
    assert clusters == {"upright", "<b>turned</b>", "all", "clusters"}


def test_a_population_without_planted_clusters_has_only_the_mean_over_clients(
    tmp_path, write_run, final_rows
):
    """A cluster of -1 means that nothing is known."""
    write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="dac",
        label="A",
        seed=0,
        metrics=final_rows([0.2, 0.4], [-1, -1]),
    )
    assert [r["cluster"] for r in summary.summarize_study(tmp_path / "s")["rows"]] == ["all"]


def test_rows_tell_what_a_method_needs_that_no_client_has(tmp_path, write_run, final_rows):
    """As the run noted it; of a run from before that was noted, as the class declares it."""
    run = {"seed": 0, "metrics": final_rows([0.2, 0.4], [0, 1])}
    for label, kind in (("DAC", "dac"), ("Oracle", "oracle"), ("Mine", "mine:Own")):
        write_run(tmp_path / "s" / label / "seed-0", kind=kind, label=label, **run)
    runs, _ = stored_runs.load_runs([tmp_path / "s"])
    noted = [
        replace(one, provenance={**one.provenance, "needs": ["pool", "truth"]})
        if one.label == "Mine"
        else one
        for one in runs
    ]
    rows = summary.summarize_runs(noted, tmp_path / "s")["rows"]
    found = {row["label"]: row.get("needs") for row in rows}
    assert found == {"DAC": None, "Oracle": ["truth"], "Mine": ["pool", "truth"]}


def test_a_client_whose_samples_leave_a_metric_undefined_is_not_in_its_mean(
    tmp_path, write_run, final_rows
):
    """Clusters {0, 1}, {2} and {3}: the last has no value, and the second diverged."""
    clusters, nan = [0, 0, 1, 2], math.nan
    rows = final_rows([0.5, nan, nan, nan], clusters, metric="auroc")
    rows += final_rows([0.1, 0.2, nan, 0.4], clusters, metric="loss")
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    means = summary.compute_cluster_means(
        stored_runs.load_run(tmp_path / "s" / "A" / "seed-0"), "auroc"
    )
    assert means == pytest.approx(
        {0: 0.5, 1: nan, 2: nan, "all": nan, "clusters": nan}, nan_ok=True
    )
    rows = [row for row in rows if row[1] != 2]
    write_run(tmp_path / "t" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    means = summary.compute_cluster_means(
        stored_runs.load_run(tmp_path / "t" / "A" / "seed-0"), "auroc"
    )
    assert means == pytest.approx({0: 0.5, 2: nan, "all": 0.5, "clusters": nan}, nan_ok=True)


def test_a_mean_that_no_client_has_is_told_from_one_that_diverged(tmp_path, write_run, final_rows):
    """Cluster 1 has a model that diverged, cluster 2 no sample by which AUROC is defined."""
    clusters, nan = [0, 0, 1, 2], math.nan
    for study, loss in (("broken", nan), ("fine", 0.3)):
        auroc = final_rows([0.5, 0.7, loss, nan], clusters, metric="auroc")
        rows = auroc + final_rows([0.1, 0.2, loss, 0.4], clusters, metric="loss")
        folder = tmp_path / study / "A" / "seed-0"
        write_run(folder, kind="dac", label="A", seed=0, metrics=rows)
        found = {
            (row["metric"], row["cluster"])
            for row in summary.summarize_study(tmp_path / study)["rows"]
            if row.get("undefined")
        }
        told = {("auroc", "2"), ("auroc", "clusters")}
        assert found == (told if study == "fine" else {("auroc", "2")})


def test_the_file_says_null_for_what_diverged(tmp_path, write_run, final_rows):
    """summary.json stays JSON when a loss is not a number."""
    rows = final_rows([math.nan, 1.0], [0, 0], metric="loss")
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    stored = json.loads(summary.write_summary(tmp_path / "s").read_text())
    assert stored["rows"][0]["mean"] is None


def test_methods_come_in_the_order_of_the_study(small):
    """The study says Local before DAC; what it does not name comes last."""
    (small / "config.toml").write_text('[[methods]]\nkind = "local"\nlabel = "Local"\n')
    assert [run.label for run in stored_runs.load_runs([small])[0]] == [
        "Local",
        "Local",
        "DAC",
        "DAC",
    ]


@pytest.mark.parametrize(
    ("values", "losses", "expected"),
    [
        ([0.5, 0.7], [1.0, 2.0], 0.6),
        ([0.5, math.nan], [1.0, 2.0], 0.5),  # its test samples leave the metric undefined
        ([math.nan, math.nan], [1.0, 2.0], math.nan),
        ([0.5, math.nan], [1.0, math.nan], math.nan),  # it diverged
    ],
)
def test_newcomers_without_a_value_leave_the_mean_undefined_without_a_warning(
    tmp_path, write_run, final_rows, values, losses, expected
):
    rows = final_rows([0.5] * 4, [0] * 4) + final_rows([1.0] * 4, [0] * 4, metric="loss")
    for metric, own in (("accuracy", values), ("loss", losses)):
        rows += [(1, 2 + n, 0, "new_clients", "joined", metric, v) for n, v in enumerate(own)]
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    runs, _ = stored_runs.load_runs([tmp_path / "s"])
    found = [one for one in summary.summarize_new_clients(runs) if one["metric"] == "accuracy"]
    assert [one["mean"] for one in found] == [pytest.approx(expected, nan_ok=True)]


def test_a_cluster_that_a_seed_does_not_have_is_averaged_over_the_others(
    tmp_path, write_run, final_rows
):
    """With data that change over the rounds a cluster may be empty at the end: nothing diverged."""
    for seed, clusters in ((0, [0, 0, 2]), (1, [0, 1, 1])):
        rows = final_rows([0.5, 0.7, 0.9], clusters)
        folder = tmp_path / "s" / "A" / f"seed-{seed}"
        write_run(folder, kind="dac", label="A", seed=seed, metrics=rows)
    found = summary.summarize_study(tmp_path / "s")["rows"]
    told = [(one["cluster"], one["mean"], one["seeds"]) for one in found]
    assert told == [
        ("0", pytest.approx(0.55), 2),
        ("1", pytest.approx(0.8), 1),
        ("2", pytest.approx(0.9), 1),
        ("all", pytest.approx(0.7), 2),
        ("clusters", pytest.approx((0.75 + 0.65) / 2), 2),
    ]


@pytest.fixture
def joined_study(tmp_path, write_run, final_rows):
    """Clients 0 and 1 are in the rounds, 2 alone of its cluster joins at the end, and 3 is an attacker."""
    for label, values in (("A", [0.5, 0.7]), ("B", [0.4, 0.4])):
        for seed in (0, 1):
            rows = [(0, c, 0, "train", "current", "bytes_up", 40.0) for c in (0, 1)]
            rows += final_rows([value + 0.1 * seed * (label == "A") for value in values], [0, 0])
            rows += [(1, 2, 1, "new_clients", "joined", "accuracy", 0.9)]
            edges = [(0, 0, 1, "mix", 0.5, 100), (1, 0, 3, "mix", 0.5, 300)]
            edges += [(1, 1, 0, "missing", 0.0, 0), (0, 3, 0, "mix", 0.5, 1000)]
            write_run(
                tmp_path / "s" / label / f"seed-{seed}",
                kind="dac", label=label, seed=seed, metrics=rows, edges=edges,
            )  # fmt: skip
    return tmp_path / "s"


def test_bytes_of_a_client_are_of_those_that_were_in_rounds_and_have_results(joined_study):
    """They received 100 + 300 and sent 2 x 40: 240 each, whatever the attacker read."""
    spent = summary.summarize_study(joined_study)["spent"]
    assert [(row["label"], row["bytes"]) for row in spent] == [("A", 240.0), ("B", 240.0)]


def test_a_cluster_of_clients_that_joined_at_the_end_is_none_of_the_compared(joined_study):
    """Means over clusters are those of cluster 0: 0.6 and 0.7 under A, 0.4 under B."""
    found = summary.summarize_study(joined_study)
    means = [row["mean"] for row in found["rows"] if row["cluster"] == "clusters"]
    assert means == pytest.approx([0.65, 0.4])
    (pair,) = [one for one in found["pairs"] if one["cluster"] == "clusters"]
    assert (pair["method_a"], pair["difference"]) == ("A", pytest.approx(0.25))
    assert {one["cluster"] for one in found["pairs"]} == {"0", "all", "clusters"}


def test_clusters_with_a_name_that_means_something_else_are_told_by_number(small):
    """One is called "all", as the mean over clients is: .65 in it, and .6375 over all."""
    (small / "federation.json").write_text('{"clusters": ["all", "north"]}')
    rows = summary.summarize_study(small)["rows"]
    own = [row for row in rows if (row["label"], row["metric"]) == ("DAC", "accuracy")]
    assert [row["cluster"] for row in own] == ["all (cluster 0)", "north", "all", "clusters"]
    assert [row["mean"] for row in own] == pytest.approx([0.65, 0.6, 0.6375, 0.625])
    (small / "federation.json").write_text('{"clusters": ["north", "north"]}')
    found = summary.summarize_study(small)
    names = {pair["cluster"] for pair in found["pairs"]}
    assert names == {"north (cluster 0)", "north (cluster 1)", "all", "clusters"}


def test_the_metric_of_the_tables_is_compared_in_each_cluster(tmp_path, write_run, final_rows):
    """The concordance was tested alone, and the loss was validated too: tables show the first, by cluster."""
    for label, values in {"A": ([0.6, 0.9], [0.62, 0.9]), "B": ([0.5, 0.9], [0.53, 0.9])}.items():
        for seed, own in enumerate(values):
            rows = final_rows(own, [0, 1], metric="concordance")
            rows += final_rows([1.0, 1.0], [0, 1], metric="loss")
            rows += [(1, c, c, "validation", "current", "loss", 1.0) for c in (0, 1)]
            write_run(
                tmp_path / "s" / label / f"seed-{seed}", kind="local", label=label, seed=seed,
                metrics=rows,
            )  # fmt: skip
    found = summary.summarize_study(tmp_path / "s")["pairs"]
    differences = {p["cluster"]: p["difference"] for p in found if p["metric"] == "concordance"}
    # (.1 + .09) / 2 in cluster 0, nothing in cluster 1.
    assert differences == pytest.approx({"0": 0.095, "1": 0.0, "all": 0.0475, "clusters": 0.0475})
    assert "0" in {p["cluster"] for p in found if p["metric"] == "loss"}
