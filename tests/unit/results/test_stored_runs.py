"""Run folders are loaded, joined, ordered, or refused with a reason."""

import json
import shutil

import pandas as pd
import pytest

from coterie._util import manifest
from coterie.errors import DataError
from coterie.results import gains, stored_runs, summary


def planned(folder, seeds, *labels):
    """Write the file of a study: which methods and seeds it should have."""
    methods = "".join(
        f'[[methods]]\nkind = "{label.lower()}"\nlabel = "{label}"\n' for label in labels
    )
    (folder / "config.toml").write_text(f"seeds = {seeds}\n{methods}")


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
    assert gains.compute_study_gains(tmp_path / "s")["metric"] == main


def test_a_broken_run_is_reported_beside_the_good_ones(small):
    """One damaged table and one run without any are named with the reason; the rest is read."""
    (small / "DAC" / "seed-0" / "metrics.parquet").write_bytes(b"PAR1 cut off")
    (small / "DAC" / "seed-1" / "metrics.parquet").unlink()
    runs, problems = stored_runs.load_runs([small])
    assert [run.label for run in runs] == ["Local", "Local"]
    assert [p.folder.name for p in problems] == ["seed-0", "seed-1"]
    assert "damaged" in problems[0].reason
    assert problems[1].reason == "metrics.parquet is not there (yet)"


def test_a_table_of_something_else_is_not_taken_for_a_run(small, listed):
    """Another parquet file of that name is refused by its columns."""
    pd.DataFrame({"a": [1]}).to_parquet(small / "DAC" / "seed-0" / "metrics.parquet")
    listed(small / "DAC" / "seed-0")
    _, (problem,) = stored_runs.load_runs([small])
    assert problem.reason == "metrics.parquet has no column 'round'; it is not the table of a run"


def test_seeds_are_read_in_the_order_of_their_numbers(tmp_path, write_run, final_rows):
    """seed-10 comes after seed-2."""
    for seed in (10, 2):
        rows = final_rows([0.5], [0])
        write_run(
            tmp_path / "s" / "A" / f"seed-{seed}", kind="dac", label="A", seed=seed, metrics=rows
        )
    assert [run.seed for run in stored_runs.load_runs([tmp_path / "s"])[0]] == [2, 10]
    assert stored_runs.UnreadableRun(tmp_path / "s" / "A" / "seed-2²", "damaged").seed == 0


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_runs_is_refused(tmp_path, make):
    """A missing folder and an empty one are both said plainly."""
    path = tmp_path / "none"
    if make:
        path.mkdir()
    with pytest.raises(DataError, match="is not a folder" if not make else "holds no run"):
        stored_runs.load_runs([path])


def test_a_copy_of_a_run_is_not_one_more_seed(small):
    """Its folder was copied: the mean over two seeds would be that of one, without a deviation."""
    copy = shutil.copytree(small / "DAC" / "seed-0", small / "DAC" / "seed-7")
    runs, problems = stored_runs.load_runs([small])
    assert {run.seed for run in runs} == {0, 1}
    assert [(one.folder, one.state, one.reason) for one in problems] == [
        (copy, "damaged", "its name says seed 7, and config.toml says 0")
    ]


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
    (run,), _ = stored_runs.load_runs([tmp_path])
    assert (run.is_finished, len(run.edges), run.population) == (False, 2, 3)
    path = tmp_path / "south/real/DAC/seed-3/provenance.json"
    path.write_text(path.read_text().replace('"done": false', '"done": true'))
    listed(path.parent)
    (run,), _ = stored_runs.load_runs([tmp_path])
    assert run.final_values("accuracy").to_dict() == {0: 0.2, 1: 0.4, 2: 0.9}
    assert run.provenance["timing"] == {"train_s": 3.0, "train_samples": 1920, "wall_s": 5.0}


def test_a_round_of_nodes_ends_when_the_last_of_them_ends_it(
    tmp_path, write_run, final_rows, listed
):
    """Their clocks are apart by a thousand seconds; the south left out round 0, and is slower in round 1."""
    rows = final_rows([0.2, 0.4], [0, 0])
    for name, row, ends in (
        ("north", rows[0], [10.0, 12.0, 13.0]),
        ("south", rows[1], [1010.0, None, 1014.5]),
    ):
        folder = tmp_path / name / "real/DAC/seed-3"
        write_run(folder, kind="dac", label="DAC", seed=3, study="real", metrics=[row])
        path = folder / "provenance.json"
        content = json.loads(path.read_text())
        content["timing"]["ends"] = ends
        path.write_text(json.dumps(content))
        listed(folder)
    (run,), _ = stored_runs.load_runs([tmp_path])
    assert run.elapsed_seconds.tolist() == [2.0, 4.5]


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
    (run,), _ = stored_runs.load_runs([tmp_path / "s"])
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
    assert len(stored_runs.load_runs([tmp_path])[0]) == 2


def test_which_runs_a_folder_should_hold(tmp_path):
    """A study's file tells; of a method's folder its own seeds, of a run's folder that run, of others nothing."""
    study = tmp_path / "s"
    (study / "DAC" / "seed-1").mkdir(parents=True)
    planned(study, [0, 1], "Local", "DAC")
    planned(study / "DAC" / "seed-1", [1], "DAC")
    assert stored_runs.find_planned_runs(study) == [
        ("Local", 0),
        ("Local", 1),
        ("DAC", 0),
        ("DAC", 1),
    ]
    assert stored_runs.find_planned_runs(study / "DAC") == [("DAC", 0), ("DAC", 1)]
    assert stored_runs.find_planned_runs(study / "DAC" / "seed-1") == [("DAC", 1)]
    assert stored_runs.find_planned_runs(tmp_path) == []


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
    runs, _ = stored_runs.load_runs([study])
    assert [run.client_names for run in runs] == [names] * 4
    assert stored_runs.merge_client_names(runs) == names
    path = study / "DAC" / "seed-1" / "provenance.json"
    stored = json.loads(path.read_text("utf-8"))
    path.write_text(
        json.dumps(
            {**stored, "client_names": {**stored["client_names"], "0": "Lima", "3": "Quito"}}
        )
    )
    listed(path.parent)
    assert stored_runs.merge_client_names(stored_runs.load_runs([study])[0]) == {
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
    (run,), _ = stored_runs.load_runs([tmp_path])
    assert run.client_names == {0: "site n0", 1: "site n1"}
