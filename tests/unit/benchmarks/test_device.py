"""The benchmark of a device runs through on one that is only pretended; where there is none, one line says so."""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tests.contract.pretend_device import pretended_cuda
from tests.unit.engine.test_graphs import Recorder

from benchmarks import device
from benchmarks.engines import cells
from coterie.engine import _graphs
from coterie.errors import CoterieError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small images, few samples."""
    monkeypatch.setattr(cells, "SHAPES", {"cnn-b": (1, 8, 8), "mlp": (1, 3, 3)})
    monkeypatch.setattr(device, "SAMPLES", 9)
    monkeypatch.setattr(_graphs, "GraphCapture", Recorder)


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["device.py", *map(str, words)])
    device.main()


@pytest.mark.full
def test_a_row_tells_the_costs_of_four_sides_that_come_to_the_same(monkeypatch, tmp_path):
    out = tmp_path / "device.json"
    with pretended_cuda():
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", Mock())
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", Mock(return_value=3_000_000))
        monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value="pretended"))
        command(
            monkeypatch,
            "--models",
            "mlp",
            "cnn-b",
            "--clients",
            3,
            "--batches",
            4,
            "--repeats",
            1,
            "--out",
            out,
        )
    stored = json.loads(out.read_text())
    assert [
        (row["model"], row["engine there"], row["MB on the device"]) for row in stored["results"]
    ] == [("mlp", "vmap", 3.0), ("cnn-b", "vmap", 3.0)]
    for row in stored["results"]:
        replayed = row["ms a client, device with graphs"]
        assert row["times without graphs"] == row["ms a client, device"] / replayed
        assert row["times a CPU"] == row["ms a client, CPU"] / replayed
        assert (
            row["times the usual loop"] == row["ms a client, usual loop on the device"] / replayed
        )
    assert stored["origin"]["config"]["devices"] == "CUDA: pretended"


def test_sides_that_differ_are_refused(monkeypatch):
    monkeypatch.setattr(device, "usual", lambda *_: lambda: torch.zeros(2, 3))
    with (
        pretended_cuda(),
        pytest.raises(CoterieError, match=r"mlp: the sides differ by .*; expected at most"),
    ):
        device.cell("mlp", 3, 4, "cuda", 1)


def test_without_a_device_it_says_so_and_ends_with_2(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--device", "cuda:77", "--out", tmp_path / "device.json")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "device is 'cuda:77'" in line


def test_the_how_to_says_of_a_gpu_what_was_measured():
    """docs/how-to/machines.md, beside the stored measurement on an H100."""
    docs = Path(__file__).parents[3] / "docs"
    text = " ".join((docs / "how-to/machines.md").read_text(encoding="utf-8").split())
    rows = json.loads((docs / "reference/runs/performance/device.json").read_text())["results"]
    assert "One H100 then trains small networks two to five times as fast as sixteen cores" in text
    assert all(2 <= row["times a CPU"] < 5 for row in rows)
    assert "without it, most networks with convolutions are slower there than on the cores" in text
    some = [row for row in rows if row["model"] != "mlp" and row["clients"] == 100]
    slower = [row["ms a client, device"] > row["ms a client, CPU"] for row in some]
    assert sum(slower) > len(slower) / 2
    assert "With a thousand clients it gains nothing" in text
    assert all(0.85 < row["times without graphs"] < 1.15 for row in rows if row["clients"] == 1000)
    assert all(row["times without graphs"] > 1.3 for row in rows if row["clients"] == 100)
