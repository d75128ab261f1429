import json
import math

import pandas as pd
import pytest

from coterie.errors import DataError
from coterie.results import summary


def row(result, **wanted):
    """The one row with these entries."""
    (found,) = [r for r in result["rows"] if all(r[k] == v for k, v in wanted.items())]
    return found


def test_summary_averages_over_clients_and_over_clusters(small):
    """DAC, seed 0: clients mean 0.625, clusters (0.7, 0.4) mean 0.55; seed 1: 0.65 and (0.6, 0.8) mean 0.7."""
    result = summary.summarize(small)
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
    timing = summary.summarize(small)["timing"]
    assert len(timing) == 4
    assert timing[-1] == {"label": "Local", "seed": 1, "wall_s": 3.0, "train_s": 1.5, "train_samples": 960}


def test_clusters_carry_the_names_that_the_study_gave_them(small):
    """federation.json beside the runs names the planted clusters."""
    (small / "federation.json").write_text(json.dumps({"clusters": ["upright", "<b>turned</b>"]}))
    clusters = {r["cluster"] for r in summary.summarize(small)["rows"]}
    assert clusters == {"upright", "<b>turned</b>", "all", "clusters"}


def test_a_population_without_planted_clusters_has_only_the_mean_over_clients(tmp_path, write_run, final_rows):
    """A cluster of -1 means that nothing is known."""
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=final_rows([0.2, 0.4], [-1, -1]))
    assert [r["cluster"] for r in summary.summarize(tmp_path / "s")["rows"]] == ["all"]


def test_gain_is_paired_by_client_and_seed(small):
    """Seed 0: gains .2 .1 .3 -.1 (mean .125, one of four lost); seed 1: .2 .2 .2 0 (mean .15, none lost)."""
    result = summary.gains(small)
    assert (result["baseline"], result["metric"]) == ("Local", "accuracy")
    (dac,) = result["rows"]
    assert dac["label"] == "DAC"
    assert dac["mean"] == pytest.approx(0.1375)
    assert dac["worst_tenth"] == pytest.approx((-0.1 + 0.0) / 2)
    assert dac["lost"] == pytest.approx(0.125)
    half = 12.7062047 * math.sqrt(2) * 0.0125 / math.sqrt(2)  # Student's t for one degree of freedom
    assert (dac["mean_low"], dac["mean_high"]) == pytest.approx((0.1375 - half, 0.1375 + half))


def test_gain_of_a_loss_is_turned_round(tmp_path, write_run, final_rows):
    """For regression less is better: from 3 to 1 is a gain of 2."""
    for label, kind, loss in (("L", "local", 3.0), ("D", "dac", 1.0)):
        rows = final_rows([loss, loss], [0, 0], metric="loss")
        write_run(tmp_path / "s" / label / "seed-0", kind=kind, label=label, seed=0, metrics=rows)
    (gain,) = summary.gains(tmp_path / "s")["rows"]
    assert (gain["mean"], gain["lost"], gain["mean_low"]) == (2.0, 0.0, None)


def test_worst_tenth_is_at_least_one_client_and_a_tenth_of_many():
    """Of 20 clients the two that gained least."""
    values = pd.Series([float(v) for v in range(20)]).to_numpy()
    assert summary._reduce_gains(values)["worst_tenth"] == 0.5


def test_a_study_without_local_has_no_gains(tmp_path, write_run, final_rows):
    """Nothing to compare with is said, not invented."""
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=final_rows([0.2], [0]))
    assert summary.gains(tmp_path / "s") == {
        "baseline": None, "metric": "accuracy", "confidence": 0.95, "rows": []
    }  # fmt: skip


def test_a_run_that_is_still_going_is_left_out_of_the_summary(small, write_run, final_rows):
    """Two of ten rounds are there: test values on the way are no result."""
    rows = final_rows([0.1] * 4, [0, 0, 0, 1], model="current")
    write_run(small / "Late" / "seed-0", kind="dac", label="Late", seed=0, metrics=rows, rounds=10, done=False)
    assert "Late" not in {r["label"] for r in summary.summarize(small)["rows"]}


def test_a_broken_run_is_reported_beside_the_good_ones(small):
    """One damaged table and one run without any are named with the reason; the rest is read."""
    (small / "DAC" / "seed-0" / "metrics.parquet").write_bytes(b"PAR1 cut off")
    (small / "DAC" / "seed-1" / "metrics.parquet").unlink()
    runs, problems = summary.find_runs([small])
    assert [run.label for run in runs] == ["Local", "Local"]
    assert [p.folder.name for p in problems] == ["seed-0", "seed-1"]
    assert "damaged" in problems[0].reason
    assert problems[1].reason == "metrics.parquet is not there (yet)"


def test_a_table_of_something_else_is_not_taken_for_a_run(small, listed):
    """Another parquet file of that name is refused by its columns."""
    pd.DataFrame({"a": [1]}).to_parquet(small / "DAC" / "seed-0" / "metrics.parquet")
    listed(small / "DAC" / "seed-0")
    _, (problem,) = summary.find_runs([small])
    assert problem.reason == "metrics.parquet has no column 'round'; it is not the table of a run"


def test_seeds_are_read_in_the_order_of_their_numbers(tmp_path, write_run, final_rows):
    """seed-10 comes after seed-2."""
    for seed in (10, 2):
        rows = final_rows([0.5], [0])
        write_run(tmp_path / "s" / "A" / f"seed-{seed}", kind="dac", label="A", seed=seed, metrics=rows)
    assert [run.seed for run in summary.find_runs([tmp_path / "s"])[0]] == [2, 10]


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_runs_is_refused(tmp_path, make):
    """A missing folder and an empty one are both said plainly."""
    path = tmp_path / "none"
    if make:
        path.mkdir()
    with pytest.raises(DataError, match="is not a folder" if not make else "holds no run"):
        summary.find_runs([path])


def test_the_file_says_null_for_what_diverged(tmp_path, write_run, final_rows):
    """summary.json stays JSON when a loss is not a number."""
    rows = final_rows([math.nan, 1.0], [0, 0], metric="loss")
    write_run(tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows)
    stored = json.loads(summary.write_summary(tmp_path / "s").read_text())
    assert stored["rows"][0]["mean"] is None


def test_methods_come_in_the_order_of_the_study(small):
    """The study says Local before DAC; what it does not name comes last."""
    (small / "config.toml").write_text('[[methods]]\nkind = "local"\nlabel = "Local"\n')
    assert [run.label for run in summary.find_runs([small])[0]] == ["Local", "Local", "DAC", "DAC"]


def test_nodes_that_each_hosted_some_clients_are_one_run(tmp_path, write_run, final_rows, listed):
    """Two nodes of one run, one of them still at work, then done: three clients together, times added up."""
    clusters = [0, 0, 1]
    rows = final_rows([0.2, 0.4, 0.9], clusters)
    common = {"kind": "dac", "label": "DAC", "seed": 3, "study": "real"}
    write_run(tmp_path / "north/real/DAC/seed-3", **common, metrics=rows[:2], edges=[(0, 0, 2, "mix", 0.5, 8)])
    write_run(
        tmp_path / "south/real/DAC/seed-3", **common, metrics=rows[2:], edges=[(0, 2, 1, "mix", 0.5, 8)], done=False
    )
    (run,), _ = summary.find_runs([tmp_path])
    assert (run.finished, len(run.edges), run.population) == (False, 2, 3)
    path = tmp_path / "south/real/DAC/seed-3/provenance.json"
    path.write_text(path.read_text().replace('"done": false', '"done": true'))
    listed(path.parent)
    (run,), _ = summary.find_runs([tmp_path])
    assert run.final("accuracy").to_dict() == {0: 0.2, 1: 0.4, 2: 0.9}
    assert run.provenance["timing"] == {"train_s": 3.0, "train_samples": 1920, "wall_s": 5.0}


def test_one_node_alone_knows_its_own_rows_only(tmp_path, write_run, final_rows):
    """Client 1 of at least four: it read client 3, whose cluster it does not know."""
    rows = [(1, 1, -1, "test", "best", "accuracy", 0.5)]
    write_run(
        tmp_path / "s" / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=rows, edges=[(0, 1, 3, "mix", 1.0, 8)]
    )
    (run,), _ = summary.find_runs([tmp_path / "s"])
    assert run.population == 4
    assert run.planted.tolist() == [-1, -1, -1, -1]


def test_the_same_clients_under_the_same_name_are_two_runs(tmp_path, write_run, final_rows):
    """Two points of a sweep are not parts of one run."""
    for point in ("a", "b"):
        write_run(tmp_path / point / "A" / "seed-0", kind="dac", label="A", seed=0, metrics=final_rows([0.5], [0]))
    assert len(summary.find_runs([tmp_path])[0]) == 2
