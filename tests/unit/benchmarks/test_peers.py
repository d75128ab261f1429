"""The benchmark beside other frameworks: ratios, refusals, the table, and a tiny cell through Coterie."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "benchmarks/peers"


@pytest.fixture
def bench(monkeypatch):
    """The driver as a module, with the scripts beside it to be found."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("cell", "coterie_cell"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("peers_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "peers_run", module)
    spec.loader.exec_module(module)
    yield module
    for name in ("cell", "coterie_cell"):
        sys.modules.pop(name, None)


def timing(bench, first, *rounds):
    """A run with these seconds."""
    return bench.Timing(first, rounds, {}, {"it": "1.0"})


def test_the_ratio_is_of_the_medians_of_each_pair(bench):
    """Medians 10 beside 2 and 12 beside 4 are 5 and 3 times as long; their median is 4."""
    pairs = [
        (timing(bench, 20.0, 9.0, 10.0, 50.0), timing(bench, 7.0, 1.0, 2.0, 3.0)),
        (timing(bench, 30.0, 12.0), timing(bench, 7.0, 4.0)),
    ]
    row = bench.row("Another", pairs)
    assert (row["from"], row["times Coterie's"], row["to"]) == (3, 4, 5)
    assert (row["fastest"], row["seconds a round"], row["slowest"]) == (9, 11, 50)
    assert row["start and first round, s"] == 25
    assert row["versions"] == "it 1.0"


def test_the_difference_is_a_share_of_the_way(bench):
    """From the origin to (3, 4) is 5 long; (3, 4.5) is half a unit off."""
    start, ours = {"a": np.zeros(1), "b": np.zeros(1)}, {"a": np.array([3.0]), "b": np.array([4.0])}
    assert bench.difference(
        {"a": np.array([3.0]), "b": np.array([4.5])}, ours, start
    ) == pytest.approx(0.1)


@pytest.mark.parametrize("found", [0.02, float("nan")])
def test_other_results_are_refused(bench, found):
    """A model that is too far away, or not a number, is named."""
    bench.check("pfl", 0.01, 0.01)
    with pytest.raises(
        bench.DifferentResultsError, match=r"pfl: the last model differs by (2.0e-02|nan); expected"
    ):
        bench.check("pfl", found, 0.01)


def test_the_table_has_the_fastest_first_and_says_who_did_not_run(bench):
    """Coterie, then by time, then failures with their error."""
    ours = timing(bench, 5.0, 2.0)
    pairs = {
        "Slow": [(timing(bench, 9.0, 30.0), ours)],
        "Fast": [(timing(bench, 9.0, 10.0), ours)],
        "Broken": [],
    }
    last = {"Coterie": 0.5, "Slow": 0.5, "Fast": 0.5}
    rows = bench.table(pairs, {"Slow": 1e-5, "Fast": 1e-4}, last, {"Broken": "ImportError: gone"})
    assert [row["framework"] for row in rows] == ["Coterie", "Fast", "Slow", "Broken"]
    assert [row.get("differs by") for row in rows] == [None, 1e-4, 1e-5, None]
    assert rows[3]["versions"] == "did not run: ImportError: gone"


def test_less_than_one_batch_is_refused(bench, monkeypatch):
    """Every framework would do something else with it."""
    monkeypatch.setattr(sys, "argv", ["run.py", "--samples", "7"])
    with pytest.raises(SystemExit):
        bench.main()


def test_a_script_that_fails_leaves_its_error(bench, tmp_path):
    """The last line of what it wrote, and no timing."""
    cell = bench.Cell(tmp_path, 2, 8, 0.05, 1)
    assert "No such file" in bench.run(cell, (sys.executable, "missing.py"), 1)


def test_a_tiny_cell_through_coterie_is_fedavg_in_the_given_order(bench, tmp_path, monkeypatch):
    """Two rounds of three clients are what plain PyTorch computes from the cell's files: two batches of 19 images."""
    import torch

    cell = bench.prepare(tmp_path, 3, 19, 2)
    assert cell.x.shape[:2] == (3, 19)
    assert cell.order.shape == (2, 3, 16)
    monkeypatch.setattr(sys, "argv", ["coterie_cell.py", str(tmp_path), str(tmp_path)])
    runpy.run_path(str(FOLDER / "coterie_cell.py"), run_name="__main__")
    with np.load(tmp_path / "model.npz") as stored:
        ours = dict(stored)
    usual = runpy.run_path(str(FOLDER / "usual.py"))
    model = {name: torch.from_numpy(value) for name, value in cell.start.items()}
    for number in range(cell.rounds):
        trained = []
        for client in range(cell.clients):
            module = usual["network"]()
            module.load_state_dict(model)
            x, y = map(torch.from_numpy, cell.data(client, number))
            usual["epoch"](module, x, y, cell.batch_size, cell.lr)
            trained.append(module.state_dict())
        model = {name: torch.stack([each[name] for each in trained]).mean(0) for name in model}
    assert (
        bench.difference({name: value.numpy() for name, value in model.items()}, ours, cell.start)
        < 1e-3
    )
    assert len(json.loads((tmp_path / "report.json").read_text())["times"]) == cell.rounds + 1
