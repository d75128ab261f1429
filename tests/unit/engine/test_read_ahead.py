"""Training and measuring on rows of a table: the same bytes as on an array, with every engine."""

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.selection import first_only
from torch import nn

import coterie
from coterie import LocalTraining, Settings, from_arrays, simulate
from coterie.data import build, rows
from coterie.data.rows import ClientRows
from coterie.engine import _work
from coterie.engine._read_ahead import read_ahead
from coterie.engine.native import tiles

OWNERS = np.array([0] * 100 + [1] * 50 + [2] * 30 + [3] * 20)
LABELS = np.arange(200) * 7 % 3


def add_one(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + torch.rand(len(x), *(1 for _ in x.shape[1:]), generator=generator)


def convolutions() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))


def draw(kind: str) -> np.ndarray:
    stream = np.random.default_rng(0)
    if kind == "images":
        return stream.integers(0, 256, (200, 1, 6, 6), dtype=np.uint8)
    if kind == "tokens":
        return stream.integers(0, 9, (200, 5))
    return stream.normal(size=(200, 6))


MODULES = {"images": convolutions, "numbers": dropout, "tokens": embedding}
LOCAL = {
    "images": LocalTraining(
        epochs=2, batch_size=16, drop_last=True, lr=0.1, augment="crop-flip", padding=1
    ),
    "numbers": LocalTraining(epochs=2, batch_size=16, optimizer="adam", lr=0.01),
    "tokens": LocalTraining(
        epochs=2, batch_size=16, optimizer="adagrad", lr=0.1, initial_accumulator_value=0.1
    ),
}


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of some steps of two clients, and reads of some batches."""
    monkeypatch.setattr(rows, "MIN_STORED_BYTES", 0)
    monkeypatch.setattr(tiles, "_TILE_BYTES", 2500)
    monkeypatch.setattr(tiles, "_MIN_CLIENTS", 2)
    monkeypatch.setattr(_work, "_READ_BYTES", 2000)


def on_disk(values: np.ndarray, folder: Path) -> np.memmap:
    np.save(folder / "x.npy", values)
    return np.load(folder / "x.npy", mmap_mode="r")


def run_bytes(federation: coterie.Federation, kind: str, engine: str, local: LocalTraining, **more):
    """Return the models of a run, and all of its metrics."""
    settings = Settings(rounds=2, engine=engine, local=local, **more)
    method = coterie.Ditto() if kind == "tokens" else coterie.FedAvg()
    run = simulate(federation, method, model=MODULES[kind], settings=settings, seed=1)
    return run.params, run.metrics["value"].to_numpy()


def require_equal(one, other) -> None:
    assert torch.equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1])
    assert not np.isnan(one[1]).all()


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
@pytest.mark.parametrize("kind", first_only(list(MODULES), slow=True))
@pytest.mark.usefixtures("small_reads")
def test_rows_of_a_disk_give_the_bytes_of_an_array(kind: str, engine: str, tmp_path: Path) -> None:
    x = draw(kind)
    inside = from_arrays(x, LABELS, clients=OWNERS)
    outside = from_arrays(on_disk(x, tmp_path), LABELS, clients=OWNERS)
    assert isinstance(outside.x, ClientRows)
    found = run_bytes(outside, kind, engine, LOCAL[kind])
    require_equal(found, run_bytes(inside, kind, engine, LOCAL[kind]))


OPTIONS = {
    "rmsprop": {"optimizer": "rmsprop", "lr": 0.01, "momentum": 0.5, "centered": True},
    "adam-kept": {"optimizer": "adam", "lr": 0.01, "persistent_client_optimizer": True},
    "private": {"dp": {"clip": 1.0, "noise_multiplier": 0.5, "delta": 1e-3}},
    "own-augment": {"augment": f"{__name__}:add_one"},
}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["loop", "compiled"])
@pytest.mark.parametrize("option", first_only(list(OPTIONS), 2, slow=True))
@pytest.mark.usefixtures("small_reads")
def test_options_of_training_give_the_bytes_of_an_array(
    option: str, engine: str, tmp_path: Path
) -> None:
    x = draw("numbers")
    local = LocalTraining(epochs=2, batch_size=16, **OPTIONS[option])
    inside = from_arrays(x, LABELS, clients=OWNERS)
    outside = from_arrays(on_disk(x, tmp_path), LABELS, clients=OWNERS)
    found = run_bytes(outside, "numbers", engine, local)
    require_equal(found, run_bytes(inside, "numbers", engine, local))


@pytest.mark.full
@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
@pytest.mark.usefixtures("small_reads")
def test_noise_belongs_to_the_sample_and_not_to_where_it_lies(engine: str, tmp_path: Path) -> None:
    x, sigma = draw("numbers"), torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    inside = replace(from_arrays(x, LABELS, clients=OWNERS), noise=sigma)
    outside = replace(from_arrays(on_disk(x, tmp_path), LABELS, clients=OWNERS), noise=sigma)
    found = run_bytes(outside, "numbers", engine, LOCAL["numbers"])
    require_equal(found, run_bytes(inside, "numbers", engine, LOCAL["numbers"]))


@pytest.mark.full
@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_unequal_clients_without_padding_give_the_same_bytes(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, owners = draw("numbers"), np.array([0] * 170 + [1] * 12 + [2] * 10 + [3] * 8)
    padded = from_arrays(x, LABELS, clients=owners)
    monkeypatch.setattr(build, "_MAX_PADDING", 0)
    flat = from_arrays(x, LABELS, clients=owners)
    assert isinstance(padded.x, torch.Tensor)
    assert isinstance(flat.x, ClientRows)
    assert flat.compute_digest() == padded.compute_digest()
    found = run_bytes(flat, "numbers", engine, LOCAL["numbers"])
    require_equal(found, run_bytes(padded, "numbers", engine, LOCAL["numbers"]))


@pytest.mark.full
@pytest.mark.usefixtures("small_reads")
def test_each_sample_of_a_tile_is_read_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiles, "_TILE_BYTES", 1 << 20)  # all fits into one tile
    outside = from_arrays(on_disk(draw("numbers"), tmp_path), LABELS, clients=OWNERS)
    assert isinstance(outside.x, ClientRows)
    read: list[int] = []
    inner = rows.StoredRows.read_ascending

    def watch(table: rows.StoredRows, chosen: np.ndarray) -> torch.Tensor:
        read.append(len(chosen))
        return inner(table, chosen)

    monkeypatch.setattr(rows.StoredRows, "read_ascending", watch)
    found = []
    for epochs in (1, 5):
        read.clear()
        local = LocalTraining(epochs=epochs, batch_size=16)
        settings = Settings(rounds=1, engine="compiled", local=local, warmup_epochs=0)
        simulate(outside, coterie.Local(), model=dropout, settings=settings)
        found.append(sorted(read))
    # Five epochs read what one does: all training samples at once.
    assert found[0] == found[1]
    assert int(outside.count_samples("train").sum()) in found[0]


def test_the_next_item_is_made_while_the_last_one_is_used() -> None:
    started = threading.Event()

    def make():
        yield 1
        started.set()
        yield 2

    items = read_ahead(make())
    assert next(items) == 1
    assert started.wait(10)  # nobody has asked for the second one
    assert list(items) == [2]

    def fail():
        yield 1
        raise OSError("the disk is gone")

    items = read_ahead(fail())
    assert next(items) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)


LIMITED = """
import resource, sys
import numpy as np, torch
from coterie import FedAvg, LocalTraining, Settings, from_arrays, simulate

torch.set_num_threads(1)
x = np.memmap(sys.argv[1], dtype=np.float32, mode="r", shape=(100_000, 1024))
y, owners = np.arange(len(x)) % 4, np.arange(len(x)) % 3
settings = Settings(rounds=1, engine=sys.argv[2], local=LocalTraining(batch_size=2000, lr=0.01))
few = from_arrays(np.array(x[:300]), y[:300], clients=owners[:300])
simulate(few, FedAvg(), model="linear", settings=settings)  # libraries are loaded
used = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) << 10
# The samples take 410 MB: they do not fit.
resource.setrlimit(resource.RLIMIT_DATA, (used + (250 << 20),) * 2)
try:
    np.array(x)
    sys.exit("the limit does not hold")
except MemoryError:
    pass
data = from_arrays(x, y, clients=owners)
run = simulate(data, FedAvg(), model="linear", settings=settings)
print(float(run.params.double().sum()), data.compute_fingerprint())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
@pytest.mark.parametrize("engine", ["loop", "compiled"])
def test_data_larger_than_the_memory(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    x = np.memmap(path, dtype=np.float32, mode="w+", shape=(100_000, 1024))
    stream = np.random.default_rng(0)
    for start in range(0, len(x), 10_000):
        x[start : start + 10_000] = stream.random((10_000, 1024), dtype=np.float32)
    x.flush()
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(path), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    y, owners = np.arange(len(x)) % 4, np.arange(len(x)) % 3
    settings = Settings(rounds=1, engine=engine, local=LocalTraining(batch_size=2000, lr=0.01))
    data = from_arrays(np.array(x), y, clients=owners)
    run = simulate(data, coterie.FedAvg(), model="linear", settings=settings)
    found = done.stdout.split()
    assert float(found[0]) == float(run.params.double().sum())
    assert found[1] == data.compute_fingerprint()
