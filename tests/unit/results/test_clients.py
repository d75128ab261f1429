"""Results of each client: the numbers of the runs, their means, and who is named in the terminal."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.results.clients import load_client_rows
from coterie.results.stored_runs import load_runs
from coterie.studies import config
from coterie.studies.run import run_study
from coterie.testing import tiny_federation


def test_each_client_has_the_mean_over_the_seeds_of_its_final_value(small):
    """Of four clients and two seeds; DAC's fourth has 0.4 and 0.8: 0.6 ± 0.2."""
    rows = load_client_rows(small)
    assert len(rows) == 8
    found = {(row["label"], row["client"]): (row["mean"], row["std"], row["seeds"]) for row in rows}
    assert found["DAC", 3] == (pytest.approx(0.6), pytest.approx(0.2), 2)
    assert found["DAC", 0] == (pytest.approx(0.65), pytest.approx(0.05), 2)
    assert found["Local", 3] == (pytest.approx(0.65), pytest.approx(0.15), 2)
    assert {row["cluster"] for row in rows} == {f"client {i}" for i in range(4)}
    assert {row["metric"] for row in rows} == {"accuracy"}


def test_a_client_with_a_value_that_is_not_finite_has_no_mean(tmp_path, write_run, final_rows):
    for seed, values in enumerate(([0.5, float("nan")], [0.7, 0.9])):
        write_run(
            tmp_path / f"small/Local/seed-{seed}", kind="local", label="Local", seed=seed,
            metrics=final_rows(values, [0, 0]),
        )  # fmt: skip
    first, second = load_client_rows(tmp_path / "small", "accuracy")
    assert (first["mean"], first["std"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert (second["mean"], second["std"]) == (None, None)


def test_clients_whose_names_differ_in_white_space_are_columns_of_their_own(tmp_path):
    data = replace(tiny_federation(num_clients=3), client_names=("Nord", "Nord ", "all"))
    study = run_study(config.parse_study_text(STUDY), out=tmp_path, federation=data)
    rows = load_client_rows(study.folder)
    assert [row["cluster"] for row in rows] == [
        "Nord (client 0)",
        "Nord (client 1)",
        "all (client 2)",
    ]
    last = load_runs([study.folder])[0][0].final_values("accuracy")
    assert [row["mean"] for row in rows] == pytest.approx(list(last))
    output = CliRunner().invoke(app, ["show", str(study.folder), "--clients"]).output
    assert output.count("(client 0)") == output.count("(client 1)") == 1
    assert "mean over clients" not in output.partition("of each client")[2].partition("\n\n")[0]


STUDY = """
name = "tiny"
rounds = 1
seeds = [0]
model = { kind = "linear" }
data = { dataset = "digits" }

[[methods]]
kind = "local"
"""


@pytest.mark.full
@pytest.mark.parametrize("clients", [3, 12, 13])
def test_a_dozen_named_clients_are_shown_and_more_when_asked_for(tmp_path, clients):
    data = tiny_federation(num_clients=clients)
    named = replace(data, client_names=tuple(f"site-{i}" for i in range(clients)))
    study = run_study(config.parse_study_text(STUDY), out=tmp_path, federation=named)
    rows = load_client_rows(study.folder)
    assert [row["cluster"] for row in rows] == [f"site-{i}" for i in range(clients)]
    folder = str(study.folder)
    shown = CliRunner().invoke(app, ["show", folder]).output
    assert [f"site-{i}" in shown for i in range(clients)] == [clients <= 12] * clients
    asked = CliRunner().invoke(app, ["show", folder, "--clients"]).output
    # One method: clients are lines, each with its value in %.
    found = {line.split()[0]: line.split()[1] for line in asked.splitlines() if "site-" in line}
    if clients > 3:
        assert found == {row["cluster"]: f"{100 * row['mean']:.1f}" for row in rows}
    assert "of each client: one seed" in asked
    listed = CliRunner().invoke(app, ["show", folder, "--clients", "--json"]).output
    assert json.loads(listed) == {"tiny": rows}


def test_a_client_that_is_not_there_with_a_seed_has_not_diverged(tmp_path, write_run, final_rows):
    """Client 2 is there with seed 1 alone; of client 1 seed 0 leaves the AUROC undefined."""
    nan = float("nan")
    for seed, accuracy, auroc in (
        (0, [0.5, 0.5], [0.6, nan]),
        (1, [0.7, 0.7, 0.9], [0.8, 0.4, nan]),
    ):
        clusters = [-1] * 3
        write_run(
            tmp_path / f"small/Local/seed-{seed}", kind="local", label="Local", seed=seed,
            metrics=final_rows(accuracy, clusters) + final_rows(auroc, clusters, metric="auroc")
            + final_rows([1.0] * len(accuracy), clusters, metric="loss"),
        )  # fmt: skip
    study = tmp_path / "small"
    (study / "config.toml").write_text(STUDY.replace("[0]", "[0, 1]").replace("tiny", "small"))

    def found(metric):
        return [(row["mean"], row["seeds"]) for row in load_client_rows(study, metric)]

    assert found("accuracy") == [(pytest.approx(0.6), 2), (pytest.approx(0.6), 2), (0.9, 1)]
    assert found("auroc") == [(pytest.approx(0.7), 2), (0.4, 1), (None, 0)]
    lines = CliRunner().invoke(app, ["show", str(study), "--clients"]).output
    assert "diverged" not in lines
    assert "90.0 (n 1)" in lines
