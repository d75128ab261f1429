"""The benchmark measures two sides that do the same, and says nothing when they do not."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.engines import cells, measure
from benchmarks.engines.__main__ import app, main
from benchmarks.engines.cells import WORKS, Cell, Coterie, DifferentResultsError, Usual, compare
from benchmarks.engines.processes import Processes, per_client
from coterie.errors import ConfigError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small images and short timings."""
    shapes = {"cnn-b": (1, 8, 8), "mlp": (1, 3, 3)}
    monkeypatch.setattr(cells, "SHAPES", shapes)
    monkeypatch.setattr(measure, "SHAPES", shapes)
    monkeypatch.setattr(measure, "_LEAST", 0.001)


@pytest.mark.parametrize("work", WORKS)
def test_both_sides_compute_the_same(work):
    for engine, limit in (("vmap", None), ("loop", 3)):
        ours = Coterie(Cell("cnn-b", 7, 12, work), engine, limit)
        compare(ours.run(), Usual(ours, 2).run(), work)


def test_the_usual_loop_does_the_same_again_after_a_reset():
    usual = Usual(Coterie(Cell("mlp", 7, 12, "dac-round"), "vmap"), 2)
    first = usual.run()
    assert not torch.equal(usual.run(), first)
    usual.reset()
    assert torch.equal(usual.run(), first)


def test_sides_that_differ_are_refused():
    ours = Coterie(Cell("mlp", 7, 12, "train"), "vmap")
    usual = Usual(ours, 2)
    usual.lr = 0.02
    with pytest.raises(
        DifferentResultsError, match=r"train: the two sides differ by .*; expected at most 2e-03"
    ):
        compare(ours.run(), usual.run(), "train")
    nothing = torch.full((2, 3), torch.nan)
    with pytest.raises(DifferentResultsError):
        compare(nothing, nothing, "train")


def test_a_row_tells_costs_of_one_client_round():
    row = measure.measure(Cell("mlp", 7, 12, "train"), "loop", 3)
    assert row.low <= row.ratio <= row.high
    assert row.memory_mb > 50
    assert row.samples_per_second == pytest.approx(12 / (row.milliseconds / 1e3))
    # 2 * (9 * 512 + 512 * 10) operations a sample forward and for the weights' gradients, and those
    # of hidden units
    assert Coterie(Cell("mlp", 7, 12, "train"), "vmap").flops == 12 * 2 * (
        2 * 9 * 512 + 3 * 512 * 10
    )
    assert Coterie(Cell("mlp", 7, 12, "inverse-loss"), "vmap").flops == 5 * 12 * 2 * (
        9 * 512 + 512 * 10
    )


def test_a_row_has_medians_and_shares_of_the_peak_of_the_cores_used():
    pairs = [
        measure.Pair(0.001, 0.004, "2 processes", 2e11),
        measure.Pair(0.002, 0.006, "2 processes", 2e11),
        measure.Pair(0.001, 0.010, "2 threads", 4e11),
    ]
    row = measure.row(Cell("mlp", 7, 12, "train"), "compiled", 2, pairs, 1e7, 1.5)
    assert (row.milliseconds, row.usual_milliseconds, row.usual_form) == (1.0, 6.0, "2 processes")
    assert (row.low, row.ratio, row.high) == (3.0, 4.0, 10.0)
    # of 1e10, 5e9 and 1e10 a second: 5 %, 2.5 % and 2.5 %
    assert row.share_of_peak == pytest.approx(0.025)
    assert row.processor_share == 1.5


def test_the_usual_loop_counts_in_its_best_form():
    assert measure.best({"1 process": 0.04, "2 threads": 0.05, "2 processes": 0.02}) == (
        0.02,
        "2 processes",
    )


def test_clients_of_several_processes_share_the_time():
    """Two processes with four clients each do the work three times in six seconds."""
    assert per_client(6.0, 8, 3) == 0.25


@pytest.mark.slow
def test_the_usual_loop_runs_in_processes_of_its_own():
    several = Processes(Cell("mlp", 5, 9, "mix"), 2, 3)
    try:
        assert several.clients == 6
        each = several.seconds(2)
        assert several.waited == pytest.approx(each * 6 * 2)
        found = measure.forms(Usual(Coterie(Cell("mlp", 5, 9, "mix"), "loop"), 3), several, 2)
        assert list(found) == ["1 process", "2 threads", "2 processes"]
    finally:
        several.close()
    assert not any(worker.is_alive() for worker in several.workers)


@pytest.mark.full
def test_the_command_prints_a_line_a_cell_and_writes_json(tmp_path):
    out = tmp_path / "results.json"
    line = ["--cells", "mlp/7/*", "--samples", "9", "--repeats", "1", "--engines", "vmap"]
    result = CliRunner().invoke(app, [*line, "--json", str(out)])
    assert result.exit_code == 0
    assert [text.split()[3] for text in result.stdout.splitlines()] == list(WORKS)
    stored = json.loads(out.read_text())
    assert [row["work"] for row in stored["results"]] == list(WORKS)
    head = stored["origin"]
    assert head["machine"]["torch"] == torch.__version__
    assert (head["config"]["cells"], head["config"]["repeats"], head["seeds"]) == (
        "mlp/7/*",
        1,
        [0],
    )
    assert "engine" in head["speaks_of"]


def test_bad_input_is_one_line_and_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["engines", "--cells", "mlp/7"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "python -m benchmarks.engines: found the cell 'mlp/7'; expected NETWORK/CLIENTS/WORK"
    )


def test_patterns_name_cells():
    assert measure.cells("mlp/7/mix,mlp/*/mix", 9) == [
        Cell("mlp", number, 9, "mix") for number in (7, 100, 1000)
    ]
    assert len(measure.cells("*/*/*", 9)) == 2 * 2 * len(WORKS)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("mlp/7", r"found the cell 'mlp/7'; expected NETWORK/CLIENTS/WORK"),
        ("mlp/few/mix", r"found the cell 'mlp/few/mix'; expected NETWORK/CLIENTS/WORK"),
        ("mlp/1/mix", r"found 1 clients in the cell 'mlp/1/mix'; expected at least 2"),
        ("mlq/7/mix", r"unknown network 'mlq'.*mlp"),
        ("mlp/7/mox", r"unknown work 'mox'.*mix"),
    ],
)
def test_a_pattern_that_names_no_cell_is_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        measure.cells(pattern, 9)
