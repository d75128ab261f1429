"""Datasets that stay on disk: the same federations and runs as with their items in memory."""

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset, Subset

from coterie import (
    FedAvg,
    LocalTraining,
    Settings,
    from_arrays,
    from_dataset,
    from_datasets,
    simulate,
)
from coterie.data import arrow_items, rows
from coterie.data.arrow_items import ArrowItems
from coterie.data.rows import read_inputs
from coterie.errors import ConfigError, DataError

X = np.random.default_rng(0).normal(size=(60, 2, 3)).astype(np.float32)
Y, OWNERS = np.arange(60) % 3, np.array(["a"] * 33 + ["b"] * 18 + ["c"] * 9)


@pytest.fixture(autouse=True)
def everything_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_STORED_BYTES", 0)
    monkeypatch.setattr(rows, "_PIECE", 100)


class Pairs(Dataset):
    """Counts the items that are read."""

    def __init__(self, x=X) -> None:
        self.x, self.reads = x, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int):
        self.reads += 1
        return self.x[place], int(Y[place])


def require_same(found, expected) -> None:
    assert found.x.is_on_disk
    assert torch.equal(found.x.read(), expected.x)
    for own, other in zip(found.tests, expected.tests, strict=True):
        assert torch.equal(read_inputs(own.x), other.x)
        assert torch.equal(own.y, other.y)
    assert found.compute_digest() == expected.compute_digest()


def test_items_that_are_read_when_needed_train_the_same_models() -> None:
    inside = from_arrays(X, Y, clients=OWNERS)
    dataset = Pairs()
    outside = from_dataset(dataset, OWNERS, in_memory=False)
    require_same(outside, inside)
    local = LocalTraining(batch_size=4, optimizer="sgd", lr=0.1)
    settings = Settings(rounds=2, local=local, warmup_epochs=0)
    dataset.reads = 0
    found, expected = (
        simulate(data, FedAvg(), model="linear", settings=settings) for data in (outside, inside)
    )
    assert torch.equal(found.params, expected.params)
    assert dataset.reads > 2 * int(outside.count_samples("train").sum())  # in each round anew
    again = pickle.loads(pickle.dumps(outside))
    assert torch.equal(again.x.read(), inside.x)


def test_one_dataset_a_client_and_their_test_sets_stay_where_they_are() -> None:
    parts = [Subset(Pairs(), range(start, start + 20)) for start in (0, 20, 40)]
    test = Pairs(-X[:12])
    outside = from_datasets(parts, test=test, in_memory=False)
    require_same(outside, from_datasets(parts, test=test))
    assert outside.tests[0].x.is_on_disk


def write_files(folder: Path, kind: str) -> Path:
    pixels = pa.array(X.reshape(60, 6).tolist(), pa.list_(pa.float32(), 6))
    if kind != "fixed":
        pixels = pa.array(X.tolist(), pa.list_(pa.list_(pa.float32())))
    table = pa.table({"pixels": pixels, "label": Y, "hospital": OWNERS})
    for number, part in enumerate((table[:25], table[25:])):
        file = folder / f"part-{number}"
        if kind == "parquet":
            pq.write_table(part, file.with_suffix(".parquet"), row_group_size=4)
        elif kind == "stream":
            with pa.ipc.new_stream(str(file.with_suffix(".arrow")), part.schema) as writer:
                writer.write_table(part, max_chunksize=7)
        else:
            with pa.ipc.new_file(str(file.with_suffix(".feather")), part.schema) as writer:
                writer.write_table(part, max_chunksize=7)
    return folder


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "stream", "file", "fixed"])
def test_a_folder_of_arrow_or_parquet_is_a_dataset(
    kind: str, in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_items, "_KEPT_GROUPS", 2)
    folder = write_files(tmp_path, kind)
    x = X.reshape(60, 6) if kind == "fixed" else X
    expected = from_arrays(x, Y, clients=OWNERS)
    found = from_dataset(folder, "hospital", inputs="pixels", in_memory=in_memory)
    assert found.names_by_id == expected.names_by_id
    if in_memory:
        assert torch.equal(found.x, expected.x)
    else:
        require_same(found, expected)


def test_rows_of_files_come_in_the_order_asked_for(tmp_path: Path) -> None:
    items = ArrowItems(write_files(tmp_path, "parquet"))
    found = items.__getitems__([59, 3, 26, 3])
    assert [one["label"] for one in found] == [2, 0, 2, 0]
    assert np.array_equal(found[2]["pixels"], X[26])
    assert items[-1]["hospital"] == "c"
    with pytest.raises(IndexError):
        items[60]


def test_a_file_for_each_client(tmp_path: Path) -> None:
    for name in "ab":
        table = pa.table({"x": X[:20, 0, 0], "label": Y[:20]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    data = from_datasets({name: tmp_path / f"{name}.parquet" for name in "ab"}, in_memory=False)
    assert list(data.names_by_id.values()) == ["a", "b"]
    assert data.x.is_on_disk


class Random(Pairs):
    def __getitem__(self, place: int):
        return torch.rand(3), int(Y[place])


class Uneven(Pairs):
    def __getitem__(self, place: int):
        return self.x[place, 0, : 3 - (place == 50)], int(Y[place])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(X, Y.tolist(), strict=True)


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Random(), "items are read again in each round: leave the random transform out"),
        (Uneven(), "different shapes: \\(2,\\) and \\(3,\\)"),
        (Stream(), "expected a dataset with __len__ and __getitem__"),
    ],
)
def test_what_cannot_be_read_again_is_refused(dataset, says: str) -> None:
    with pytest.raises(DataError, match=says):
        from_dataset(dataset, OWNERS, in_memory=False)


def test_what_contradicts_reading_item_by_item_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="collate takes all items at once"):
        from_dataset(Pairs(), OWNERS, in_memory=False, collate=lambda items: items)
    two = [((X[0], X[1]), 0)] * 4

    class Two(Pairs):
        def __getitem__(self, place: int):
            return two[0]

    with pytest.raises(DataError, match="inputs of several parts"):
        from_dataset(Two(), OWNERS, in_memory=False)
    with pytest.raises(DataError, match="found no file"):
        from_dataset(tmp_path, "hospital")
    (tmp_path / "x.arrow").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"x\.arrow cannot be read"):
        from_dataset(tmp_path, "hospital")
    write_files(tmp_path, "file")
    (tmp_path / "x.arrow").unlink()
    table = pa.table({"pixels": [[1.0], [1.0, 2.0]], "label": [0, 1], "hospital": ["a", "b"]})
    pq.write_table(table, tmp_path / "zz.parquet")
    with pytest.raises(DataError, match="'pixels' has lists of different lengths"):
        ArrowItems(tmp_path).__getitems__([60, 61])
