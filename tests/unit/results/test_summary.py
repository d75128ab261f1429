import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from coterie._util import manifest
from coterie.errors import DataError
from coterie.results import summary


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
    runs, _ = summary.load_runs([tmp_path / "s"])
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
        summary.load_run(tmp_path / "s" / "A" / "seed-0"), "auroc"
    )
    assert means == pytest.approx(
        {0: 0.5, 1: nan, 2: nan, "all": nan, "clusters": nan}, nan_ok=True
    )
    rows = [row for row in rows if row[1] != 2]
    write_run(tmp_path / "t" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    means = summary.compute_cluster_means(
        summary.load_run(tmp_path / "t" / "A" / "seed-0"), "auroc"
    )
    assert means == pytest.approx({0: 0.5, 2: nan, "all": 0.5, "clusters": nan}, nan_ok=True)


def test_gain_is_paired_by_client_and_seed(small):
    """Seed 0: gains .2 .1 .3 -.1 (mean .125, one of four lost); seed 1: .2 .2 .2 0 (mean .15, none lost)."""
    result = summary.compute_study_gains(small)
    assert (result["baseline"], result["metric"]) == ("Local", "accuracy")
    (dac,) = result["rows"]
    assert dac["label"] == "DAC"
    assert dac["mean"] == pytest.approx(0.1375)
    assert dac["worst_tenth"] == pytest.approx((-0.1 + 0.0) / 2)
    assert dac["lost"] == pytest.approx(0.125)
    # Student's t for one degree of freedom
    half = 12.7062047 * math.sqrt(2) * 0.0125 / math.sqrt(2)
    assert (dac["mean_low"], dac["mean_high"]) == pytest.approx((0.1375 - half, 0.1375 + half))


def test_the_worst_of_clients_who_neither_gain_nor_lose_is_no_established_loss(
    tmp_path, write_run, final_rows
):
    """The worst of ten is below 0 in every seed, its interval too; nothing is said to be established."""
    rng = np.random.default_rng(0)
    for seed in range(12):
        for label, values in (
            ("Local", np.full(10, 0.5)),
            ("DAC", 0.5 + 0.05 * rng.standard_normal(10)),
        ):
            folder = tmp_path / "s" / label / f"seed-{seed}"
            rows = final_rows(list(values), [0] * 10)
            write_run(folder, kind=label.lower(), label=label, seed=seed, metrics=rows)
    (dac,) = summary.compute_study_gains(tmp_path / "s")["rows"]
    assert dac["worst_tenth_high"] < 0
    assert not dac["mean_established"]
    assert "worst_tenth_established" not in dac


def test_gain_of_a_loss_is_turned_round(tmp_path, write_run, final_rows):
    """For regression less is better: from 3 to 1 is a gain of 2."""
    for label, kind, loss in (("L", "local", 3.0), ("D", "dac", 1.0)):
        rows = final_rows([loss, loss], [0, 0], metric="loss")
        write_run(tmp_path / "s" / label / "seed-0", kind=kind, label=label, seed=0, metrics=rows)
    (gain,) = summary.compute_study_gains(tmp_path / "s")["rows"]
    assert (gain["mean"], gain["lost"], gain["mean_low"]) == (2.0, 0.0, None)


@pytest.mark.parametrize(
    ("validated", "main"), [(["loss"], "loss"), (["loss", "mae"], "mae"), ([], "mae")]
)
def test_what_validation_data_lack_does_not_compare_methods(
    tmp_path, write_run, final_rows, validated, main
):
    """An absolute error of the test sets alone does not, unless there are no validation data at all."""
    rows = [row for name in ("loss", "mae") for row in final_rows([3.0, 2.0], [0, 0], metric=name)]
    rows += [(*row[:3], "validation", *row[4:]) for row in rows if row[5] in validated]
    write_run(tmp_path / "s" / "L" / "seed-0", kind="local", label="L", seed=0, metrics=rows)
    assert summary.compute_study_gains(tmp_path / "s")["metric"] == main


@pytest.mark.parametrize(
    ("clients", "expected"),
    [(1, 0.0), (10, 0.0), (11, 0.5), (15, 0.5), (20, 0.5), (21, 1.0), (25, 1.0)],
)
def test_worst_tenth_is_at_least_one_client_and_rounded_up(clients, expected):
    """Of clients that gained 0, 1, 2, ...: of 10 the first, of 11 to 20 the first two, of 21 to 30 the first three."""
    values = np.random.default_rng(0).permutation(clients).astype(float)
    assert summary._reduce_gains(values)["worst_tenth"] == expected


def test_a_study_without_local_has_no_gains(tmp_path, write_run, final_rows):
    """Nothing to compare with is said, not invented."""
    write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="dac",
        label="A",
        seed=0,
        metrics=final_rows([0.2], [0]),
    )
    assert summary.compute_study_gains(tmp_path / "s") == {
        "baseline": None, "metric": "accuracy", "confidence": 0.95, "rows": []
    }  # fmt: skip


def test_a_run_that_is_still_going_is_left_out_of_the_summary(small, write_run, final_rows):
    """Two of ten rounds are there: test values on the way are no result."""
    rows = final_rows([0.1] * 4, [0, 0, 0, 1], model="current")
    write_run(
        small / "Late" / "seed-0",
        kind="dac",
        label="Late",
        seed=0,
        metrics=rows,
        rounds=10,
        done=False,
    )
    assert "Late" not in {r["label"] for r in summary.summarize_study(small)["rows"]}


def test_a_broken_run_is_reported_beside_the_good_ones(small):
    """One damaged table and one run without any are named with the reason; the rest is read."""
    (small / "DAC" / "seed-0" / "metrics.parquet").write_bytes(b"PAR1 cut off")
    (small / "DAC" / "seed-1" / "metrics.parquet").unlink()
    runs, problems = summary.load_runs([small])
    assert [run.label for run in runs] == ["Local", "Local"]
    assert [p.folder.name for p in problems] == ["seed-0", "seed-1"]
    assert "damaged" in problems[0].reason
    assert problems[1].reason == "metrics.parquet is not there (yet)"


def test_a_table_of_something_else_is_not_taken_for_a_run(small, listed):
    """Another parquet file of that name is refused by its columns."""
    pd.DataFrame({"a": [1]}).to_parquet(small / "DAC" / "seed-0" / "metrics.parquet")
    listed(small / "DAC" / "seed-0")
    _, (problem,) = summary.load_runs([small])
    assert problem.reason == "metrics.parquet has no column 'round'; it is not the table of a run"


def test_seeds_are_read_in_the_order_of_their_numbers(tmp_path, write_run, final_rows):
    """seed-10 comes after seed-2."""
    for seed in (10, 2):
        rows = final_rows([0.5], [0])
        write_run(
            tmp_path / "s" / "A" / f"seed-{seed}", kind="dac", label="A", seed=seed, metrics=rows
        )
    assert [run.seed for run in summary.load_runs([tmp_path / "s"])[0]] == [2, 10]


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_runs_is_refused(tmp_path, make):
    """A missing folder and an empty one are both said plainly."""
    path = tmp_path / "none"
    if make:
        path.mkdir()
    with pytest.raises(DataError, match="is not a folder" if not make else "holds no run"):
        summary.load_runs([path])


def test_the_file_says_null_for_what_diverged(tmp_path, write_run, final_rows):
    """summary.json stays JSON when a loss is not a number."""
    rows = final_rows([math.nan, 1.0], [0, 0], metric="loss")
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    stored = json.loads(summary.write_summary(tmp_path / "s").read_text())
    assert stored["rows"][0]["mean"] is None


def test_methods_come_in_the_order_of_the_study(small):
    """The study says Local before DAC; what it does not name comes last."""
    (small / "config.toml").write_text('[[methods]]\nkind = "local"\nlabel = "Local"\n')
    assert [run.label for run in summary.load_runs([small])[0]] == ["Local", "Local", "DAC", "DAC"]


def test_nodes_that_each_hosted_some_clients_are_one_run(tmp_path, write_run, final_rows, listed):
    """Two nodes of one run, one of them still at work, then done: three clients together, times added up."""
    clusters = [0, 0, 1]
    rows = final_rows([0.2, 0.4, 0.9], clusters)
    common = {"kind": "dac", "label": "DAC", "seed": 3, "study": "real"}
    write_run(
        tmp_path / "north/real/DAC/seed-3",
        **common,
        metrics=rows[:2],
        edges=[(0, 0, 2, "mix", 0.5, 8)],
    )
    write_run(
        tmp_path / "south/real/DAC/seed-3",
        **common,
        metrics=rows[2:],
        edges=[(0, 2, 1, "mix", 0.5, 8)],
        done=False,
    )
    (run,), _ = summary.load_runs([tmp_path])
    assert (run.is_finished, len(run.edges), run.population) == (False, 2, 3)
    path = tmp_path / "south/real/DAC/seed-3/provenance.json"
    path.write_text(path.read_text().replace('"done": false', '"done": true'))
    listed(path.parent)
    (run,), _ = summary.load_runs([tmp_path])
    assert run.final_values("accuracy").to_dict() == {0: 0.2, 1: 0.4, 2: 0.9}
    assert run.provenance["timing"] == {"train_s": 3.0, "train_samples": 1920, "wall_s": 5.0}


def test_one_node_alone_knows_its_own_rows_only(tmp_path, write_run, final_rows):
    """Client 1 of at least four: it read client 3, whose cluster it does not know."""
    rows = [(1, 1, -1, "test", "best", "accuracy", 0.5)]
    write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="dac",
        label="A",
        seed=0,
        metrics=rows,
        edges=[(0, 1, 3, "mix", 1.0, 8)],
    )
    (run,), _ = summary.load_runs([tmp_path / "s"])
    assert run.population == 4
    assert run.planted_clusters.tolist() == [-1, -1, -1, -1]


def test_the_same_clients_under_the_same_name_are_two_runs(tmp_path, write_run, final_rows):
    """Two points of a sweep are not parts of one run."""
    for point in ("a", "b"):
        write_run(
            tmp_path / point / "A" / "seed-0",
            kind="dac",
            label="A",
            seed=0,
            metrics=final_rows([0.5], [0]),
        )
    assert len(summary.load_runs([tmp_path])[0]) == 2


def planned(folder, seeds, *labels):
    """Write the file of a study: which methods and seeds it should have."""
    methods = "".join(
        f'[[methods]]\nkind = "{label.lower()}"\nlabel = "{label}"\n' for label in labels
    )
    (folder / "config.toml").write_text(f"seeds = {seeds}\n{methods}")


def states(found):
    return [(one["label"], one["seed"], one["state"]) for one in found["left_out"]]


def test_means_are_over_the_seeds_that_all_methods_finished(small):
    """Local has seed 1 left (.4 .4 .4 .8, mean .5), so DAC is its seed 1 too (.6 .6 .6 .8, mean .65), not .6375."""
    shutil.rmtree(small / "Local" / "seed-0")
    planned(small, [0, 1, 2], "Local", "DAC", "Random")
    result = summary.summarize_study(small)
    assert result["seeds"] == [1]
    assert states(result) == [
        ("Local", 0, "missing"), ("Local", 2, "missing"), ("DAC", 0, "finished"), ("DAC", 2, "missing"),
        ("Random", 0, "missing"), ("Random", 1, "missing"), ("Random", 2, "missing"),
    ]  # fmt: skip
    for label, mean in (("Local", 0.5), ("DAC", 0.65)):
        found = row(result, label=label, cluster="all", metric="accuracy")
        assert (found["mean"], found["std"], found["seeds"]) == (pytest.approx(mean), None, 1)
    (gain,) = summary.compute_study_gains(small)["rows"]
    assert (gain["mean"], gain["seeds"], gain["mean_low"]) == (pytest.approx(0.15), 1, None)


def test_a_method_that_finished_nothing_does_not_empty_the_tables(small, write_run, final_rows):
    """Late has measured two of ten rounds: the others keep both seeds, and Late is named."""
    rows = final_rows([0.1] * 4, [0, 0, 0, 1], model="current")
    write_run(
        small / "Late" / "seed-0",
        kind="dac",
        label="Late",
        seed=0,
        metrics=rows,
        rounds=10,
        done=False,
    )
    result = summary.summarize_study(small)
    assert result["seeds"] == [0, 1]
    assert result["left_out"] == [
        {"label": "Late", "seed": 0, "state": "unfinished", "reason": "round 2 of 10"}
    ]


def test_without_a_common_seed_there_are_no_rows(small):
    """DAC has seed 0 alone and Local seed 1: nothing is averaged, and both are named."""
    shutil.rmtree(small / "DAC" / "seed-1")
    shutil.rmtree(small / "Local" / "seed-0")
    result = summary.summarize_study(small)
    assert (result["seeds"], result["rows"]) == ([], [])
    assert states(result) == [("DAC", 0, "finished"), ("Local", 1, "finished")]
    assert summary.compute_study_gains(small)["rows"] == []


def test_participation_and_times_are_of_the_compared_seeds(small):
    """The times of all runs stay: they are no means."""
    shutil.rmtree(small / "Local" / "seed-0")
    result = summary.summarize_study(small)
    assert [(one["label"], one["seed"]) for one in result["participation"]] == [
        ("DAC", 1),
        ("Local", 1),
    ]
    assert len(result["timing"]) == 3


def test_a_run_of_which_a_node_is_damaged_is_not_compared(tmp_path, write_run, final_rows):
    """North's client has 0.9; without South's it is not the run's mean. Seed 1 is whole: (.5 + .7) / 2."""
    for seed, (north, south) in enumerate([(0.9, 0.1), (0.5, 0.7)]):
        for node, client, value in (("north", 0, north), ("south", 1, south)):
            folder = tmp_path / node / "real" / "DAC" / f"seed-{seed}"
            rows = [(1, client, 0, "test", "best", "accuracy", value)]
            write_run(folder, kind="dac", label="DAC", seed=seed, study="real", metrics=rows)
    (tmp_path / "south/real/DAC/seed-0/metrics.parquet").write_bytes(b"PAR1 cut off")
    result = summary.summarize_study(tmp_path)
    assert row(result, cluster="all", metric="accuracy")["mean"] == pytest.approx(0.6)
    assert states(result) == [("DAC", 0, "damaged")]


@pytest.mark.parametrize("point", ["tau=1", "tau=2"])
def test_several_studies_are_not_averaged_together(tmp_path, write_run, final_rows, point):
    """The points of a sweep have methods of the same names; one that is given alone is read."""
    for number, name in enumerate(("tau=1", "tau=2")):
        folder = tmp_path / name / "DAC" / f"seed-{number}"
        write_run(
            folder,
            kind="dac",
            label="DAC",
            seed=number,
            metrics=final_rows([0.5], [0]),
            study=f"sweep/{name}",
        )
    for read in (summary.summarize_study, summary.compute_study_gains):
        with pytest.raises(DataError, match="several studies"):
            read(tmp_path)
    assert len(summary.summarize_study(tmp_path / point)["rows"]) > 0


def test_the_same_run_twice_is_not_two_seeds(tmp_path, write_run, final_rows):
    """A copy of a study beside it: its seed 0 would count twice."""
    for name in ("a", "b"):
        write_run(
            tmp_path / name / "DAC" / "seed-0",
            kind="dac",
            label="DAC",
            seed=0,
            metrics=final_rows([0.5], [0]),
        )
    with pytest.raises(DataError, match="several studies"):
        summary.summarize_study(tmp_path)


def test_which_runs_a_folder_should_hold(tmp_path):
    """A study's file tells; of a method's folder its own seeds, of a run's folder that run, of others nothing."""
    study = tmp_path / "s"
    (study / "DAC" / "seed-1").mkdir(parents=True)
    planned(study, [0, 1], "Local", "DAC")
    planned(study / "DAC" / "seed-1", [1], "DAC")
    assert summary.find_planned_runs(study) == [("Local", 0), ("Local", 1), ("DAC", 0), ("DAC", 1)]
    assert summary.find_planned_runs(study / "DAC") == [("DAC", 0), ("DAC", 1)]
    assert summary.find_planned_runs(study / "DAC" / "seed-1") == [("DAC", 1)]
    assert summary.find_planned_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        (
            lambda run: (run / "metrics.parquet").unlink(),
            "damaged",
            "metrics.parquet is not there (yet)",
        ),
        (lambda run: (run / "config.toml").unlink(), "damaged", "config.toml is not there (yet)"),
        (lambda run: (run / "provenance.json").write_text("{"), "damaged", None),
        (
            lambda run: manifest.replace_files(run, {"provenance.json": b'{"round": 1}'}),
            "unfinished",
            "round 1 of 2",
        ),
        (
            lambda run: manifest.replace_files(run, {"provenance.json": b"{}"}),
            "unfinished",
            "round 2 of 2",
        ),
        (lambda run: (run / "provenance.json").unlink(), "damaged", "provenance.json is missing"),
        (lambda run: (run / "B2SUMS").unlink(), "damaged", None),
        (
            lambda run: [path.unlink() for path in run.iterdir() if path.name != "config.toml"],
            "unfinished",
            None,
        ),
        (shutil.rmtree, "missing", None),
    ],
)
def test_what_is_wrong_with_a_run_is_told_apart(small, change, state, reason):
    """A file that is gone or torn, a run that has not come to its end, one that was never begun."""
    planned(small, [0, 1], "Local", "DAC")
    change(small / "DAC" / "seed-0")
    result = summary.summarize_study(small)
    (found,) = [one for one in result["left_out"] if one["label"] == "DAC"]
    assert (found["seed"], found["state"]) == (0, state)
    assert reason is None or found["reason"] == reason
    assert result["seeds"] == [1]


def test_names_are_those_on_which_runs_agree(named, listed):
    study, names = named
    runs, _ = summary.load_runs([study])
    assert [run.client_names for run in runs] == [names] * 4
    assert summary.merge_client_names(runs) == names
    path = study / "DAC" / "seed-1" / "provenance.json"
    stored = json.loads(path.read_text("utf-8"))
    path.write_text(
        json.dumps(
            {**stored, "client_names": {**stored["client_names"], "0": "Lima", "3": "Quito"}}
        )
    )
    listed(path.parent)
    assert summary.merge_client_names(summary.load_runs([study])[0]) == {
        1: names[1],
        2: names[2],
        3: "Quito",
    }


def test_what_nodes_tell_of_their_clients_is_put_together(write_run, listed, final_rows, tmp_path):
    for node, client in (("n0", 0), ("n1", 1)):
        rows = [row for row in final_rows([0.5, 0.75], [0, 0]) if row[1] == client]
        folder = write_run(
            tmp_path / node / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows
        )
        stored = json.loads((folder / "provenance.json").read_text("utf-8"))
        (folder / "provenance.json").write_text(
            json.dumps({**stored, "client_names": {str(client): f"site {node}"}})
        )
        listed(folder)
    (run,), _ = summary.load_runs([tmp_path])
    assert run.client_names == {0: "site n0", 1: "site n1"}
