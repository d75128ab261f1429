"""The measurement of kernels runs through where Triton interprets them, and tells what failed or was left out."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
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
    tiny = kernels.Net(lambda: nn.Linear(3, 10), (3,), batch=3, target=40, share=0.5)
    monkeypatch.setattr(kernels, "NETS", {"tiny": tiny})
    monkeypatch.setattr(kernels, "UPDATES", {"sgd": {}, "adam": {}})
    monkeypatch.setattr(kernels, "SAMPLES", 4)


def rows_of(monkeypatch, tmp_path, *words):
    out = tmp_path / "kernels.json"
    given = ["--device", "cpu", "--models", "tiny", "--clients", "2", "--sizes", "5",
             "--repeats", "1", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["kernels.py", *given, *words])
    kernels.main()
    return json.loads(out.read_text())["results"]


def test_each_way_has_a_time_and_comes_to_the_same(monkeypatch, tmp_path):
    trained, sgd, adam, refused = rows_of(
        monkeypatch, tmp_path, "--precisions", "full", "bf16", "--peak", "2"
    )
    for row, numbers in ((sgd, 3), (adam, 7)):
        # Bytes of two clients with five parameters in four bytes each, over the time.
        assert row["GB/s, kernel"] == pytest.approx(4 * 2 * 5 * numbers / row["ms, kernel"] / 1e6)
        assert row["times"] == row["ms, operations"] / row["ms, kernel"]
    assert sgd["difference"] == 0
    assert adam["difference"] < 1e-6
    assert trained["difference"] < 1e-5
    titles = ("vmap", "vmap, one update", "triton, 4 warps", "triton, 8 warps")
    times = [trained[f"us a client, {title}"] for title in titles]
    assert min(times) > 0
    # Forward, and backward for the weights: a product and a sum each, of 3 x 10 weights and 4 samples.
    assert trained["TFLOP/s, triton"] == pytest.approx(2 * 2 * 30 * 4 / min(times[2:]) / 1e6)
    assert trained["share of the peak"] == pytest.approx(trained["TFLOP/s, triton"] / 2)
    # The aim is for 1,000 clients.
    assert trained["us a client, aim"] is None
    assert trained["share of the peak, aim"] == 0.5
    # The interpreter knows no products of bfloat16.
    assert refused["error"] == "NotTraceableError: its kernel does not compute what it does"


def test_what_fails_and_what_there_is_no_time_for_are_rows(monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler.\nmore")

    monkeypatch.setattr(update, "update_rows", fail)
    _, first, _ = rows_of(monkeypatch, tmp_path, "--precisions", "full")
    assert first["error"] == "RuntimeError: Failed to find C compiler."
    rows = rows_of(monkeypatch, tmp_path, "--precisions", "full", "--seconds", "-1")
    assert {row["error"] for row in rows} == {"left out: -1 s were over"}
    assert len(rows) == 3


def test_without_a_device_it_says_so_and_ends_with_2(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        rows_of(monkeypatch, tmp_path, "--device", "cuda:77")
    assert ended.value.code == 2
    assert "device is 'cuda:77'" in capsys.readouterr().err


def test_the_largest_questions_come_first_and_nets_have_their_aims(monkeypatch):
    monkeypatch.undo()
    options = SimpleNamespace(
        device="cuda", repeats=3, clients=[100, 1000], precisions=["full", "tf32"], models=kernels.MODELS,
        sizes=[7], peak=67.0,
    )  # fmt: skip
    cells = list(kernels.iterate_cells(options))
    assert [given[:3] for _, given in cells[:5]] == [(net, 1000, "full") for net in kernels.MODELS]
    assert [given[:3] for _, given in cells[5:9]] == [(one, 1000, 7) for one in kernels.UPDATES]
    assert len(cells) == 4 + 5 * 2 * 2
    aims = {name: (net.batch, net.target, net.share) for name, net in kernels.NETS.items()}
    # Microseconds of an epoch of 1,000 clients, or a third of the peak.
    assert aims["cnn-a"] == (8, 40, None)
    assert aims["cnn-b"] == (32, 40, None)
    assert aims["mlp-512"] == (8, 80, None)
    assert aims["cnn-y"] == aims["resnet8-bn"] == (8, None, 1 / 3)
    for net in kernels.NETS.values():
        assert net.build()(torch.zeros(2, *net.features)).shape == (2, net.classes)
