"""The measurement of kernels runs through where Triton interprets them, and tells what failed or was left out."""

import json
import sys

import pytest
from torch import nn

pytest.importorskip("triton", reason="no Triton: it is for Linux")

from benchmarks import kernels
from coterie.engine.kernels import update

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(kernels, "NETS", {"tiny": lambda: nn.Linear(3, 10)})
    monkeypatch.setattr(kernels, "UPDATES", {"sgd": {}, "adam": {}})
    monkeypatch.setattr(kernels, "STEPS", 1)


def rows_of(monkeypatch, tmp_path, *words):
    out = tmp_path / "kernels.json"
    given = ["--device", "cpu", "--models", "tiny", "--clients", "2", "--batches", "3", "--sizes", "5",
             "--repeats", "1", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["kernels.py", *given, *words])
    kernels.main()
    return json.loads(out.read_text())["results"]


def test_each_way_has_a_time_and_comes_to_the_same(monkeypatch, tmp_path):
    sgd, adam, steps, refused = rows_of(monkeypatch, tmp_path, "--precisions", "full", "bf16")
    for row, numbers in ((sgd, 3), (adam, 7)):
        # Bytes of two clients with five parameters in four bytes each, over the time.
        assert row["GB/s, kernel"] == pytest.approx(4 * 2 * 5 * numbers / row["ms, kernel"] / 1e6)
        assert row["times"] == row["ms, operations"] / row["ms, kernel"]
    assert sgd["difference"] == 0
    assert adam["difference"] < 1e-6
    assert steps["difference"] < 1e-5
    titles = ("vmap", "vmap, one update", "triton, 4 warps", "triton, 8 warps")
    assert all(steps[f"us a client and step, {title}"] > 0 for title in titles)
    # The interpreter knows no products of bfloat16.
    assert refused["error"] == "NotTraceableError: its kernel does not compute what it does"


def test_what_fails_and_what_there_is_no_time_for_are_rows(monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr(update, "update_rows", fail)
    first, *_ = rows_of(monkeypatch, tmp_path, "--precisions", "full")
    assert first["error"] == "RuntimeError: Failed to find C compiler."
    rows = rows_of(monkeypatch, tmp_path, "--precisions", "full", "--seconds", "-1")
    assert {row["error"] for row in rows} == {"left out: -1 s were over"}
    assert len(rows) == 3


def test_without_a_device_it_says_so_and_ends_with_2(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        rows_of(monkeypatch, tmp_path, "--device", "cuda:77")
    assert ended.value.code == 2
    assert "device is 'cuda:77'" in capsys.readouterr().err
