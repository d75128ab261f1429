"""Rows of a disk, and clients' rows without padding: the same inputs as an array in memory has."""

import copy
import pickle
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie import Split, from_arrays
from coterie.data import federation, rows
from coterie.data.federation import compute_checksum
from coterie.data.rows import ClientRows, StoredRows, is_stored, read_inputs
from coterie.errors import DataError

LIBRARIES = [name for name in ("h5py", "zarr") if find_spec(name)]


@pytest.fixture(autouse=True)
def everything_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_STORED_BYTES", 0)
    monkeypatch.setattr(rows, "_PIECE", 1000)


@dataclass
class Chunked:
    """What HDF5 and Zarr have in common; counts what is read, and refuses all but ranges."""

    values: np.ndarray
    chunks: tuple[int, ...] | None = None
    reads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def __getitem__(self, key: slice) -> np.ndarray:
        assert isinstance(key, slice)
        self.reads += 1
        return self.values[key]


def store(kind: str, values: np.ndarray, folder: Path):
    if kind == "chunked":
        return Chunked(values, (7, *values.shape[1:]))
    if kind == "ranges":
        return Chunked(values)
    if kind == "h5py":
        import h5py

        file = h5py.File(folder / "x.h5", "w")
        return file.create_dataset("x", data=values, chunks=(7, *values.shape[1:]))
    if kind == "zarr":
        import zarr

        return zarr.create_array(str(folder / "x.zarr"), data=values, chunks=(7, *values.shape[1:]))
    np.save(folder / "x.npy", values)
    return np.load(folder / "x.npy", mmap_mode="r")


KINDS = ["map", "chunked", "ranges", *LIBRARIES]
STREAM = np.random.default_rng(0)
VALUES = {
    "images": STREAM.integers(0, 256, (60, 1, 4, 5), dtype=np.uint8),
    "gray": STREAM.integers(0, 256, (60, 4, 5), dtype=np.uint8),
    "tokens": STREAM.integers(0, 99, (60, 3), dtype=np.int16),
    "numbers": STREAM.normal(size=(60, 3)),
    "half": STREAM.normal(size=(60, 3)).astype(np.float16),
    "big-endian": STREAM.normal(size=(60, 3)).astype(">f4"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", list(VALUES))
def test_a_federation_of_rows_on_disk_is_that_of_the_array(
    kind: str, form: str, tmp_path: Path
) -> None:
    x, y, owners = VALUES[form], np.arange(60) % 3, np.array(["a"] * 33 + ["b"] * 18 + ["c"] * 9)
    inside = from_arrays(x, y, clients=owners)
    outside = from_arrays(store(kind, x, tmp_path), y, clients=owners)
    assert isinstance(outside.x, ClientRows)
    assert outside.x.is_on_disk
    assert isinstance(outside.tests[0].x, ClientRows)
    assert torch.equal(outside.x.read(), inside.x)
    assert outside.x.dtype == inside.x.dtype
    assert outside.x.shape == inside.x.shape
    for own, other in zip(outside.tests, inside.tests, strict=True):
        assert torch.equal(read_inputs(own.x), other.x)
    assert outside.compute_digest() == inside.compute_digest()
    # The numbers of rows are in memory, and no input.
    assert outside.x.nbytes == outside.x.index.nbytes
    few = outside.host([2, 0])
    assert torch.equal(few.x.read(), inside.host([2, 0]).x)
    assert torch.equal(outside.pool_clients().x.read(), inside.pool_clients().x)
    assert outside.facts()[1] == inside.facts()[1]


@pytest.mark.parametrize("shift", ["quantity", "rotation", "concept"])
def test_shifts_change_rows_of_a_disk_when_they_are_read(shift: str, tmp_path: Path) -> None:
    tables = {
        "quantity": {"kind": "quantity", "concentration_per_client": 1.0},
        "rotation": {"kind": "rotation", "degrees": [0, 90, 180]},
        "concept": {"kind": "label-swap", "swaps": [[], [[0, 1]]]},
    }
    x = STREAM.integers(0, 256, (300, 1, 6, 6), dtype=np.uint8)
    y = np.arange(300) % 3
    split = Split(shift=[tables[shift]], seed=3)
    inside = from_arrays(x, y, num_clients=6, split=split, normalize="standard")
    held = store("map", x, tmp_path)
    outside = from_arrays(held, y, num_clients=6, split=split, normalize="standard")
    assert isinstance(outside.x, ClientRows)
    assert torch.equal(outside.x.read(), inside.x)
    assert outside.compute_digest() == inside.compute_digest()
    assert outside.select_clients(torch.tensor([5, 1])).compute_digest() == (
        inside.select_clients(torch.tensor([5, 1])).compute_digest()
    )


def test_a_given_test_set_stays_on_disk_too(tmp_path: Path) -> None:
    x, y = VALUES["numbers"], np.arange(60) % 3
    (tmp_path / "test").mkdir()
    held = store("map", x[:20] + 1, tmp_path / "test")
    outside = from_arrays(store("map", x, tmp_path), y, num_clients=2, test=(held, y[:20]))
    inside = from_arrays(x, y, num_clients=2, test=(x[:20] + 1, y[:20]))
    assert isinstance(outside.tests[0].x, ClientRows)
    assert outside.compute_digest() == inside.compute_digest()


def test_a_chunk_is_read_once_for_all_of_its_rows() -> None:
    array = Chunked(np.arange(140.0).reshape(70, 2), (7, 2))
    table = StoredRows.open(array, rows._to_float)
    array.reads = 0
    found = table[torch.tensor([69, 0, 6, 0, 8, 13])]
    assert found[:, 0].tolist() == [138, 0, 12, 0, 16, 26]
    assert array.reads == 3  # chunks 0, 1 and 9
    assert table[torch.tensor([], dtype=torch.int64)].shape == (0, 2)
    assert table[3:3].shape == (0, 2)
    assert table[1:6:2][:, 0].tolist() == [2, 6, 10]


def test_values_on_disk_are_checked_like_others(tmp_path: Path) -> None:
    y, owners = np.arange(60) % 3, np.arange(60) % 2
    bad = VALUES["numbers"].copy()
    bad[47, 1] = np.nan
    with pytest.raises(DataError, match=r"NaN or infinity in the inputs \(first in sample 47"):
        from_arrays(store("map", bad, tmp_path), y, clients=owners)
    large = np.zeros((60, 2), dtype=np.int64)
    large[51] = 1 << 25
    with pytest.raises(DataError, match="whole numbers up to 33,554,432"):
        from_arrays(Chunked(large), y, clients=owners)
    with pytest.raises(DataError, match="no rows"):
        from_arrays(Chunked(large[:0]), y[:0], clients=owners[:0])


def test_rows_are_opened_again_in_another_process(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", VALUES["numbers"])
    whole = np.load(tmp_path / "x.npy", mmap_mode="r")
    for array, wanted in ((whole, VALUES["numbers"]), (whole[11:40], VALUES["numbers"][11:40])):
        table = StoredRows.open(array, rows._to_float)
        text = pickle.dumps(table)
        assert len(text) < 2000
        assert torch.equal(pickle.loads(text)[0:29], torch.from_numpy(wanted[:29]).float())
    text = pickle.dumps(StoredRows.open(whole, rows._to_float))
    (tmp_path / "x.npy").unlink()
    with pytest.raises(DataError, match="which is not there"):
        pickle.loads(text)


def test_arrays_and_tables_in_memory_are_not_on_disk(tmp_path: Path) -> None:
    import pandas as pd

    values = VALUES["numbers"]
    for value in (values, torch.from_numpy(values), pd.DataFrame(values), pd.Series([1.0]), [1.0]):
        assert not is_stored(value)
    assert is_stored(store("map", values, tmp_path))
    assert is_stored(Chunked(values))


def test_small_files_are_read_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rows, "MIN_STORED_BYTES", VALUES["numbers"].nbytes + 1)
    held = store("map", VALUES["numbers"], tmp_path)
    found = from_arrays(held, np.arange(60) % 3, num_clients=3)
    assert isinstance(found.x, torch.Tensor)


@pytest.mark.slow
def test_clients_of_very_unequal_size_take_the_memory_that_they_have() -> None:
    # 200 clients of 3 samples beside one of 2,000, as bytes: 30 MB of samples.
    owners = np.concatenate([np.repeat(np.arange(200), 3), np.full(2000, 200)])
    x = STREAM.integers(0, 256, (2600, 1, 12, 1000), dtype=np.uint8)
    y = np.arange(2600) % 2
    found = from_arrays(x, y, clients=owners)
    assert isinstance(found.x, ClientRows)
    assert not found.x.is_on_disk
    padded = found.x.numel()
    assert padded > 3e9
    # The samples once, and 8 bytes for each place of a row, of which there are four tables.
    places = 8 * found.split.numel()
    assert found.nbytes < x.nbytes * 1.3 + 4 * places < 0.02 * padded
    last = found.x[200]
    assert torch.equal(last.read()[:3], torch.from_numpy(x[last.index[:3].numpy()]))
    assert found.x[0].read()[3:].sum() == 0  # padding
    changed = copy.deepcopy(found)
    assert changed.compute_fingerprint() == found.compute_fingerprint()


@pytest.mark.parametrize("piece", [16, 64, 1000, 1 << 20])
def test_the_checksum_is_that_of_the_padded_tensor(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federation, "_PIECE", piece)
    for seed in range(20):
        stream = np.random.default_rng(seed)
        table = torch.from_numpy(stream.random((50, 3), dtype=np.float32))
        index = torch.from_numpy(stream.integers(0, 50, (7, 11)))
        for row, size in enumerate(stream.integers(0, 12, 7)):
            index[row, size:] = -1
        padded = torch.where((index >= 0)[..., None], table[index.clamp(min=0)], 0)
        found = ClientRows(table, index)
        assert torch.equal(found.read(), padded)
        assert compute_checksum(found) == compute_checksum(padded)
