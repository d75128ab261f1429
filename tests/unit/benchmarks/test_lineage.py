"""benchmarks/lineage.py: grids that are written down before they run, how points are scored, and what `| head` leaves."""

import csv
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import lineage as page_script  # of scripts, which comes first
import numpy as np
import pytest
import torch

from benchmarks import lineage, lineage_nets
from coterie.studies.config import load_study
from coterie.testing import tiny_federation

ROOT = Path(__file__).resolve().parents[3]
GRIDS = lineage.load_grids()


@pytest.mark.parametrize("name", GRIDS)
def test_each_point_of_a_registered_grid_is_a_study_that_runs(name):
    grid = GRIDS[name]
    assert isinstance(grid["registered"], date)
    assert grid["difference"].endswith(".")
    assert grid["conclude"].endswith(".")
    names = [point["name"] for point in grid["points"]]
    # A setting that another grid has found has one point in what it is to explain, too.
    assert len(set(names)) == len(names) >= 1
    for point in grid["points"]:
        assert point["found_in"]
        for stage in lineage.STAGES:
            for study in grid["studies"]:
                loaded = load_study(study, lineage.list_changes(grid, point, stage))
                # The name is the built-in one: published numbers are found by it.
                assert loaded.name == study
                assert {one.label for one in loaded.methods} == set(grid["methods"])
                assert list(loaded.seeds) == grid[lineage.STAGES[stage]]["seeds"]


def test_points_of_a_grid_differ_in_what_they_say_and_in_nothing_else():
    grid = GRIDS["dac-cifar10-network"]
    studies = [
        load_study(grid["studies"][0], lineage.list_changes(grid, point, 1))
        for point in grid["points"]
    ]
    assert len({str(one.model) for one in studies}) == len(studies)
    assert (
        len({(str(one.data), str(one.settings.rounds), str(one.methods)) for one in studies}) == 1
    )


def test_what_a_point_says_wins_over_what_its_stage_says():
    grid = GRIDS["panm-pens"]
    rounds = {}
    for point in grid["points"]:
        for stage in lineage.STAGES:
            study = load_study(grid["studies"][0], lineage.list_changes(grid, point, stage))
            (pens,) = [one.method for one in study.methods if one.label == "PENS"]
            rounds[point["name"], stage] = pens.stage_one_rounds
    own = "200 samples, PENS selects for 20 rounds"
    assert (rounds.pop((own, 1)), rounds.pop((own, 2))) == (20, 20)
    assert {stage: number for (_, stage), number in rounds.items()} == {1: 33, 2: 100}


def test_the_score_is_the_mean_square_in_deviations_of_the_paper(tmp_path, monkeypatch, capsys):
    """The cells of a small run, against the paper's table and the summary as they are stored."""
    federation = tiny_federation()
    grid = {
        "studies": ["panm/cifar10-4"], "methods": ["Local", "FedAvg"], "deviation": 1.0,
        "first": {"set": ["rounds=1", 'model.kind="linear"', "data.num_clients=4", "data.shift=[]"], "seeds": [0, 1]},
    }  # fmt: skip
    run = lineage.run_study
    monkeypatch.setattr(
        lineage, "run_study", lambda study, **given: run(study, federation=federation, **given)
    )
    cells = lineage.run_point(grid, {"name": "small", "set": []}, 1, tmp_path, 1)
    # A reader of hours of work sees where it is; standard output has results alone.
    said = capsys.readouterr()
    assert "small: panm/cifar10-4\n" in said.err
    assert "FedAvg, seed 1: round 1/1" in said.err
    assert said.out == ""
    rows = json.loads((tmp_path / "panm/cifar10-4/summary.json").read_text())["rows"]
    table = csv.DictReader((ROOT / "src/coterie/papers/panm.csv").read_text().splitlines())
    squares = []
    for one in table:
        if (one["experiment"], one["method"]) in (
            ("panm_cifar10_4c", "local"),
            ("panm_cifar10_4c", "fedavg"),
        ):
            (ours,) = [
                row["mean"] for row in rows
                if (row["label"].lower(), row["cluster"], row["metric"]) == (one["method"], "all", "accuracy")
            ]  # fmt: skip
            squares.append(((100 * ours - float(one["mean"])) / float(one["std"])) ** 2)
    assert len(squares) == len(cells) == 2
    assert lineage.score_point(cells)["score"] == pytest.approx(np.mean(squares), rel=1e-12)
    assert {one["seeds"] for one in cells} == {2}
    assert {one["rounds"] for one in cells} == {1}


def test_cells_that_a_grid_names_are_scored_alone_and_one_may_be_of_the_grid(tmp_path, monkeypatch):
    federation = tiny_federation()
    grid = {
        "studies": ["panm/cifar10-4"], "methods": ["Local", "FedAvg"], "deviation": 2.0,
        "cells": [{"row": "local/none", "cluster": "all", "mean": 0.5}],
        "first": {"set": ["rounds=1", 'model.kind="linear"', "data.num_clients=4", "data.shift=[]"], "seeds": [0]},
    }  # fmt: skip
    run = lineage.run_study
    monkeypatch.setattr(
        lineage, "run_study", lambda study, **given: run(study, federation=federation, **given)
    )
    (cell,) = lineage.run_point(grid, {"name": "small", "set": []}, 1, tmp_path, 1)
    assert (cell["row"], cell["paper"], cell["deviation"]) == ("local/none", 50.0, 2.0)
    grid["cells"].append({"row": "local/none", "cluster": "rotation 7"})
    with pytest.raises(LookupError, match="rotation 7"):
        lineage.find_cells(grid, "panm/cifar10-4", tmp_path / "panm/cifar10-4")


def test_the_second_stage_runs_the_best_two_of_the_first_and_only_of_the_same_grid():
    points = [{"name": name, "set": []} for name in "abcd"]
    rows = [
        {"point": name, "score": score} for name, score in zip("abcd", (3, 1, 4, 2), strict=True)
    ]
    found = lineage.choose_points({"points": points}, "x", {"grid": "x", "results": rows})
    assert [one["name"] for one in found] == ["b", "d"]
    with pytest.raises(ValueError, match="another grid"):
        lineage.choose_points({"points": points}, "y", {"grid": "x", "results": rows})


def test_rounds_until_clients_stop_are_shown_where_points_differ_in_them():
    cell = {
        "study": "a/b", "row": "local/none", "cluster": "all", "metric": "accuracy",
        "ours": 1.0, "paper": 1.0, "deviation": 1.0,
    }  # fmt: skip
    other = cell | {"row": "oracle/fedavg", "rounds": 7.0}
    rows = [
        {"point": name, "cells": [cell | {"rounds": rounds}, other], "score": 0.0,
         "mean difference": 0.0, "largest difference": 0.0}
        for name, rounds in (("early", 20.04), ("late", 31.0))
    ]  # fmt: skip
    origin = json.loads(next(lineage.STORED.glob("*.json")).read_text())["origin"]
    shown = page_script._show_result("x", 1, {"results": rows, "origin": origin})
    lines = [line.split(" | ") for line in shown.splitlines() if line.startswith("| ")]
    assert lines[0][-1] == "rounds trained, local |"
    assert {line[0]: line[-1] for line in lines[2:]} == {"| early": "20.0 |", "| late": "31.0 |"}


@pytest.mark.parametrize(
    ("channels", "parameters"),
    [
        # 3 x 3 kernels with biases; 32 x 32 becomes 15, 6 and 2 by pooling.
        ([32, 64], 28 * 32 + (9 * 32 + 1) * 64 + (64 * 36 + 1) * 64 + 65 * 10),
        ([32, 64, 64], 28 * 32 + 289 * 64 + (9 * 64 + 1) * 64 + (64 * 4 + 1) * 64 + 65 * 10),
    ],
)
def test_networks_have_the_size_of_their_description(channels, parameters):
    net = lineage_nets.build_pooled_cnn((3, 32, 32), 10, channels)
    assert sum(one.numel() for one in net.parameters()) == parameters
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/reference/lineage.md").read_text() == page_script.page(), "run make docs"


def test_each_stored_result_is_of_a_grid_that_was_registered_before():
    """At the commit that it was made with the grid was already there, and it is the one of today."""
    git = ["git", "-C", str(ROOT)]
    shallow = [*git, "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, capture_output=True, text=True, check=True).stdout.strip() == "true":
        pytest.skip("no history: the clone is shallow")
    for path in sorted(lineage.STORED.glob("*.json")):
        result = json.loads(path.read_text())
        name, stage = result["origin"]["config"]["grid"], result["origin"]["config"]["stage"]
        assert path.stem == f"{name}-stage-{stage}"
        grid = GRIDS[name]
        assert result["grid"] == lineage.compute_digest(grid)
        assert result["registered"] == str(grid["registered"])
        assert result["origin"]["made"] >= result["registered"]
        then = f"{result['origin']['commit']}:benchmarks/lineage.toml"
        shown = subprocess.run([*git, "show", then], capture_output=True, text=True, check=True)
        assert lineage.tomllib.loads(shown.stdout)[name] == grid
        ran = {row["point"] for row in result["results"]}
        wanted = {point["name"] for point in grid["points"]}
        assert ran == wanted if stage == 1 else len(ran) == lineage.BEST
        for row in result["results"]:
            squares = [((c["ours"] - c["paper"]) / c["deviation"]) ** 2 for c in row["cells"]]
            assert row["score"] == pytest.approx(np.mean(squares), rel=1e-9)


PRINTS = """
import sys
for number in range(100_000):
    print(number)
if len(sys.argv) > 1:
    raise BrokenPipeError("of a node")
"""


def start_printing(tmp_path, *words):
    """Start a program of a package that begins as the benchmarks do."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").write_bytes(
        Path(lineage.__file__).with_name("__init__.py").read_bytes()
    )
    (package / "prints.py").write_text(PRINTS)
    command = [sys.executable, "-m", "benchmarks.prints", *words]
    return subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_reader_that_has_enough_ends_a_program_without_a_traceback(tmp_path):
    with start_printing(tmp_path) as program:
        assert program.stdout.readline() == "0\n"
        program.stdout.close()
        assert program.stderr.read() == ""


def test_another_broken_pipe_keeps_its_traceback(tmp_path):
    with start_printing(tmp_path, "broken") as program:
        assert program.stdout.read().endswith("99999\n")
        assert "BrokenPipeError: of a node" in program.stderr.read()
