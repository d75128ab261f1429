"""The benchmark measures two sides that do the same, and says nothing when they do not."""

import json

import pytest
import torch
from benchmarks.engines import cells, measure
from benchmarks.engines.__main__ import app, main
from benchmarks.engines.cells import WORKS, Cell, Coterie, DifferentResultsError, Usual, compare
from typer.testing import CliRunner

from coterie.errors import ConfigError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small images and short timings."""
    shapes = {"cnn-b": (1, 8, 8), "mlp": (1, 3, 3)}
    monkeypatch.setattr(cells, "SHAPES", shapes)
    monkeypatch.setattr(measure, "SHAPES", shapes)
    monkeypatch.setattr(measure, "_LEAST", 0.001)
    monkeypatch.setattr(measure, "_SIDE", 32)


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
    with pytest.raises(DifferentResultsError, match=r"train: the two sides differ by .*; expected at most 2e-03"):
        compare(ours.run(), usual.run(), "train")
    nothing = torch.full((2, 3), torch.nan)
    with pytest.raises(DifferentResultsError):
        compare(nothing, nothing, "train")


def test_a_row_tells_costs_of_one_client_round():
    row = measure.measure(Cell("mlp", 7, 12, "train"), "loop", 3)
    assert row.low <= row.ratio <= row.high
    assert row.memory_mb > 50
    assert row.samples_per_second == pytest.approx(12 / (row.milliseconds / 1e3))
    # 2 * (9 * 512 + 512 * 10) operations a sample forward, and as much twice backward
    assert Coterie(Cell("mlp", 7, 12, "train"), "vmap").flops == 3 * 12 * 2 * (9 * 512 + 512 * 10)


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
    assert (head["config"]["cells"], head["config"]["repeats"], head["seeds"]) == ("mlp/7/*", 1, [0])
    assert "engine" in head["speaks_of"]


def test_bad_input_is_one_line_and_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["engines", "--cells", "mlp/7"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m benchmarks.engines: found the cell 'mlp/7'; expected NETWORK/CLIENTS/WORK")


def test_patterns_name_cells():
    assert measure.cells("mlp/7/mix,mlp/*/mix", 9) == [Cell("mlp", number, 9, "mix") for number in (7, 100, 1000)]
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
