"""The record of a run: what it keeps in memory, and that reading it changes nothing."""

import ctypes
import gc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coterie.runtime import checkpoint
from coterie.runtime.record import Record


def filled(rounds: int) -> Record:
    record = Record(torch.tensor([0, 1, 1]))
    for round in range(rounds):
        values = {"loss": torch.tensor([1.0, 2.0, 3.0]) / (round + 1)}
        record.add_metrics(round, torch.tensor([0, 1, 2]), "train", "current", values)
    return record


def test_reading_the_tables_joins_their_chunks_and_changes_nothing():
    """A checkpoint after every round reads them: what stays in memory is the numbers, not thousands of short arrays."""
    often, once = Record(torch.tensor([0, 1, 1])), filled(3)
    for round in range(3):
        values = {"loss": torch.tensor([1.0, 2.0, 3.0]) / (round + 1)}
        often.add_metrics(round, torch.tensor([0, 1, 2]), "train", "current", values)
        often.snapshot()
        assert len(often._metrics.chunks) == 1
    assert often.metrics.equals(once.metrics)
    often.drop_metrics(1, "train", "current")
    assert often.metrics["round"].tolist() == [0, 0, 0, 2, 2, 2]
    assert often.metrics["value"].tolist()[:3] == [1.0, 2.0, 3.0]


def test_an_edge_says_what_became_of_a_model_that_was_asked_for():
    """Mixed, only evaluated, or lost on the way, whatever weight was meant for it; an empty slot is no edge."""
    record = Record(torch.zeros(4, dtype=torch.int64))
    info = {
        "peers": torch.tensor([[2, 3, 0, -1]]),
        "arrived": torch.tensor([[True, True, False, False]]),
        "weights": torch.tensor([[0.5, 0.0, 0.25, 0.0]]),
        "bytes": torch.tensor([[40, 40, 0, 0]]),
    }
    record.add_edges(3, torch.tensor([1]), info)
    assert record.edges.astype({"purpose": str}).values.tolist() == [
        [3, 1, 2, "mix", 0.5, 40], [3, 1, 3, "probe", 0.0, 40], [3, 1, 0, "missing", 0.0, 0]
    ]  # fmt: skip


def test_similarities_are_two_more_columns_where_a_run_asks_for_them():
    """NaN of what did not arrive, and of methods that report none; restored from a checkpoint as they were."""
    info = {
        "peers": torch.tensor([[2, 3, -1]]),
        "arrived": torch.tensor([[True, False, False]]),
        "similarities": torch.tensor([[0.75, 0.0, 0.0]], dtype=torch.float64),
        "probabilities": torch.tensor([[0.5, 0.25, 0.125]], dtype=torch.float64),
    }
    plain, record = (
        Record(torch.zeros(4, dtype=torch.int64)),
        Record(torch.zeros(4, dtype=torch.int64), similarities=True),
    )
    for one in (plain, record):
        one.add_edges(0, torch.tensor([1]), info)
        one.add_edges(1, torch.tensor([1]), {"peers": torch.tensor([[0]])})
    assert list(plain.edges) == ["round", "reader", "read", "purpose", "weight", "bytes"]
    again = Record(torch.zeros(4, dtype=torch.int64), similarities=True)
    again.restore(*record.snapshot())
    for one in (record, again):
        assert one.edges["similarity"].to_numpy() == pytest.approx(
            [0.75, np.nan, np.nan], nan_ok=True
        )
        assert one.edges["probability"].to_numpy() == pytest.approx(
            [0.5, 0.25, np.nan], nan_ok=True
        )
        assert one.edges["similarity"].dtype == "float32"
    assert again.encode_files() == record.encode_files()


def test_a_frame_is_a_copy():
    """What a user does to a table of results does not reach the record."""
    record = filled(2)
    record.snapshot()
    frame = record.metrics
    frame.loc[:, "value"] = 0.0
    assert record.metrics["value"].tolist() == [1.0, 2.0, 3.0, 0.5, 1.0, 1.5]


@pytest.mark.full
def test_checkpoints_of_growing_tables_leave_nothing_behind(tmp_path):
    """Twenty sizes of a table; the library's way over ctypes would keep types for each of them for ever."""

    kind = type(ctypes.c_ubyte * 1)

    def array_types() -> int:
        return sum(type(o) is kind for o in gc.get_objects())

    checkpoint._write_tensors({"value": torch.zeros(7)}, {}, tmp_path / "first.safetensors")
    before = array_types()
    for size in range(1000, 1020):
        tensors = {"value": torch.arange(float(size)), "kept": torch.tensor([True, False])}
        checkpoint._write_tensors(tensors, {"round": size}, tmp_path / "run.safetensors")
    assert array_types() == before
    assert torch.equal(load_file(tmp_path / "run.safetensors")["value"], torch.arange(1019.0))
