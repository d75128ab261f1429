"""The comparison of models: what is counted, how ratios and shares are taken, and that a stored cell is kept."""

import json
import time

import pytest
import torch

from benchmarks import models
from benchmarks.models import Sides, Size, Times
from coterie._util import origin


def _sides(*names: str, **run) -> Sides:
    return Sides(
        {name: run.get(name, lambda: None) for name in names},
        "loop",
        "because",
        {"vmap": "no"},
        {"loop": 0.5},
    )


def test_a_row_has_medians_ratios_within_a_turn_and_shares_of_the_peak_of_the_turn():
    found = Times(
        {
            "usual": [0.004, 0.006, 0.005],
            "lean": [0.002, 0.004, 0.002],
            "loop": [0.001, 0.001, 0.004],
        },
        [1e11, 2e11, 4e11],
    )
    row = models.row(Size(3, 5, 8), 50_000_000, found, _sides("usual", "lean", "loop"))
    assert (row["clients"], row["steps"], row["mflop"]) == (3, 5, 50.0)
    assert row["ms"] == pytest.approx({"usual": 5.0, "lean": 2.0, "loop": 1.0})
    # of 2, 4 and 0.5
    assert row["lean"]["loop"] == pytest.approx({"median": 2.0, "low": 0.5, "high": 4.0})
    # of 4, 6 and 1.25
    assert row["usual"]["loop"] == pytest.approx({"median": 4.0, "low": 1.25, "high": 6.0})
    # 5e7 operations in 1, 1 and 4 ms: 5e10, 5e10 and 1.25e10 a second, of the peaks above
    assert row["share"]["loop"] == pytest.approx(0.25)
    assert (row["auto"], row["reason"], row["missing"], row["ready_s"]) == (
        "loop", "because", {"vmap": "no"}, {"loop": 0.5},
    )  # fmt: skip


def test_an_engine_that_sat_out_later_turns_is_compared_with_the_turns_it_was_in():
    assert models.ratios([2.0, 2.0], [1.0, 3.0, 100.0]) == {"median": 1.0, "low": 0.5, "high": 1.5}


@pytest.mark.parametrize(
    ("name", "products"),
    [
        # a product of the forward pass costs two operations, and twice as many backward; the first
        # layer has no gradient of its inputs
        ("linear", 2 * 784 * 10 * 2),
        ("mlp-128", 2 * (784 * 128 * 2 + 128 * 10 * 3)),
        ("lenet", 2 * (2 * 450 * 784 + 3 * (2400 * 100 + 400 * 120 + 120 * 84 + 84 * 10))),
    ],
)
def test_operations_of_a_stack_are_those_counted_by_hand(name, products):
    assert models.operations(models.ZOO[name], 3) == 3 * products


@pytest.mark.parametrize(("name", "gates"), [("gru", 3), ("lstm", 4)])
def test_operations_of_recurrent_layers_are_counted(name, gates):
    """32 steps of 64 units with 32 inputs; the first step's state is zero and has no gradient."""
    by_hand = 2 * 3 * (32 * gates * 64 * (32 + 64) + 64 * 10)
    found = models.operations(models.ZOO[name], 2) / 2
    assert found == pytest.approx(by_hand, rel=0.03)


def test_operations_of_attention_are_counted():
    """A layer: 64 x 192, 64 x 64 and twice 64 x 256 a token, two products of 32 x 32 x 64 a sequence; 90 outputs."""
    layer = 32 * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 2 * 32 * 32 * 64
    assert models.operations(models.ZOO["transformer"], 2) / 2 == pytest.approx(
        6 * (2 * layer + 32 * 64 * 90)
    )


def test_timings_are_about_equally_long_and_have_whole_batches():
    assert models.size(0.0001, 8) == Size(32, 16, 8)
    assert models.size(0.005, 32) == Size(4, 16, 32)
    assert models.size(0.25, 64) == Size(1, 4, 64)
    assert Size(1, 4, 64).samples == 256


class _Fixed:
    """A core that always does as much."""

    def flops(self, *_: object) -> float:
        return 1e11


def test_turns_end_with_the_time_and_slow_sides_sit_out(monkeypatch):
    monkeypatch.setattr(models, "timed", lambda function: function())
    sides = _sides(
        "usual",
        "lean",
        "loop",
        "vmap",
        usual=lambda: 2.0,
        lean=lambda: 1.0,
        loop=lambda: 1.0,
        vmap=lambda: 5,
    )
    found = models.measure(sides, Size(2, 5, 8), _Fixed(), time.monotonic() + 60)
    assert {name: len(times) for name, times in found.step.items()} == {
        "usual": 7,
        "lean": 7,
        "loop": 7,
        "vmap": 2,
    }
    assert found.step["lean"] == [0.1] * 7  # of 2 clients with 5 steps
    assert len(models.measure(sides, Size(2, 5, 8), _Fixed(), time.monotonic()).peak) == 3


def test_engines_that_compute_something_else_are_refused():
    first = torch.tensor([2.0, 2.3])
    models.compare("vmap", first, "loop", first * (1 + 1e-5))
    with pytest.raises(
        models.DifferentResultsError, match=r"losses of vmap and loop differ by 1\.0e-02"
    ):
        models.compare("vmap", first * 1.01, "loop", first)


def test_both_loops_of_plain_pytorch_train_on_every_sample():
    entry = models.ZOO["tabular-bn"]
    x, y = models.samples(entry, Size(1, 3, 8))
    for train in (
        models.usual,
        lambda *rest: models.lean(*rest, "fused"),
        lambda *rest: models.lean(*rest, "foreach"),
    ):
        module = models.made(entry)
        train(module, x[0], y[0], 8)
        assert int(module[1].num_batches_tracked) == 3


@pytest.mark.slow
def test_the_command_stores_each_cell_and_goes_on_after_a_stop(tmp_path, monkeypatch, capsys):
    """A second call of the same command measures nothing again; one with other code starts anew."""
    monkeypatch.setattr(models, "SHORT", 0.0)
    monkeypatch.setattr(models, "keep_freed_memory", lambda: None)
    code = {"commit": "a" * 40, "dirty": False}
    monkeypatch.setattr(origin, "describe_code", lambda: code)
    before = torch.get_num_threads()
    out = tmp_path / "models.json"
    command = [
        "--quick",
        "--only",
        "mlp-ln-gelu",
        "--batches",
        "4",
        "--engines",
        "vmap",
        "--out",
        str(out),
    ]
    try:
        models.main(command)
        stored = json.loads(out.read_text())
        (row,) = stored["results"]
        assert (row["model"], row["batch"], row["clients"]) == ("mlp-ln-gelu", 4, 2)
        assert {"usual", "lean", "vmap", row["auto"]} == set(row["ms"])
        assert stored["origin"]["machine"]["fma_gflops"] > 1
        assert capsys.readouterr().out.startswith("mlp-ln-gelu    4  usual ")
        models.main(command)
        assert json.loads(out.read_text()) == stored
        assert capsys.readouterr().out == ""
        code["commit"] = "b" * 40
        models.main(command)
        assert json.loads(out.read_text())["origin"]["commit"] == "b" * 40
    finally:
        torch.set_num_threads(before)
