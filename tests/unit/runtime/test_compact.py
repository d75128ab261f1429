"""Tables of a checkpoint in less room: every bit comes back."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.selection import first_only

from coterie.methods import METHODS
from coterie.runtime import _compact
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings


def bits(table: torch.Tensor) -> np.ndarray:
    return table.numpy().view(f"u{table.element_size()}")


def sparse(dtype: torch.dtype, share: float) -> torch.Tensor:
    """A table of more than a megabyte in which a share of the entries is drawn, and each kind of number stands once."""
    stream = torch.Generator().manual_seed(0)
    table = torch.zeros(700, 1501, dtype=dtype)
    here = torch.rand(700, 1501, generator=stream) < share
    drawn = torch.randn(int(here.sum()), generator=stream, dtype=torch.float64)
    table[here] = (drawn * 40).to(dtype) if not dtype.is_floating_point else drawn.to(dtype)
    if dtype.is_floating_point:
        odd = torch.tensor(
            [-0.0, torch.nan, torch.inf, -torch.inf, 1e-320, 1e300, 0.5], dtype=torch.float64
        )
        table[3, : len(odd)] = odd.to(dtype)
        table[-1, -1] = 1 / 3
    elif dtype != torch.bool:
        table[3, 0], table[-1, -1] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return table


KINDS = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.4])
def test_every_bit_of_a_table_comes_back(dtype, share):
    table = sparse(dtype, share)
    parts, told = _compact.pack_table("t", table)
    if table.nbytes < _compact.MIN_BYTES or told is None:
        assert parts["t"] is table
        assert share > 0.02 or dtype.itemsize == 1
        return
    assert sum(part.nbytes for part in parts.values()) < 0.75 * table.nbytes
    again = _compact.unpack_table("t", told, parts)
    assert again.dtype == dtype
    np.testing.assert_array_equal(bits(again), bits(table))


def test_room_is_a_bit_an_entry_and_the_entries_that_are_not_zero():
    """2,000 x 1,000 float64: 2e6 / 8 bytes of bits; 1,000 entries of four bytes and one that needs eight."""
    table = torch.zeros(2000, 1000, dtype=torch.float64)
    table[:1000, 7] = 0.25
    table[5, 9] = 1 / 3
    parts, _ = _compact.pack_table("t", table)
    assert {name: part.nbytes for name, part in parts.items()} == {
        "t#kept": 250_000, "t#short": 4000, "t#long": 8, "t#which": 126
    }  # fmt: skip


def test_what_would_not_be_smaller_is_kept_as_it_is():
    """Dense numbers of full length, a small table, and a list."""
    dense = torch.rand(400, 400, dtype=torch.float64)
    for table in (dense, torch.zeros(3, 4), torch.zeros(1 << 20)):
        assert _compact.pack_table("t", table) == ({"t": table}, None)


@pytest.mark.full
@pytest.mark.parametrize("kind", first_only(["dac", "panm-loss"], slow=True))
def test_a_run_goes_on_from_small_tables_to_the_same_bytes(kind, monkeypatch, tmp_path):
    """With tables of any size made smaller: a run of four rounds, and one of two that goes on, leave the same files."""
    monkeypatch.setattr(_compact, "MIN_BYTES", 1)

    def run(folder: Path, rounds: int) -> None:
        settings = tiny_settings(rounds=rounds, engine="loop", checkpoint_seconds=0)
        simulate(
            tiny_federation(40),
            METHODS[kind](num_peers=2),
            model="linear",
            settings=settings,
            folder=folder,
            resume=True,
        )

    run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    with safe_open(str(tmp_path / "parts/checkpoint.safetensors"), framework="np") as file:
        assert any("#kept" in name for name in file.keys())  # noqa: SIM118 (it is no dict)
    run(tmp_path / "parts", 4)
    for name in ("checkpoint.safetensors", "metrics.parquet", "edges.parquet"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


@pytest.mark.full
def test_a_checkpoint_of_whole_tables_is_read_too(monkeypatch, tmp_path):
    """As those from before tables were made smaller."""
    settings, model = tiny_settings(rounds=2, engine="loop"), "linear"
    monkeypatch.setattr(_compact, "MIN_BYTES", 1 << 40)
    simulate(tiny_federation(40), METHODS["dac"](), model=model, settings=settings, folder=tmp_path)
    monkeypatch.setattr(_compact, "MIN_BYTES", 1)
    longer = tiny_settings(rounds=3, engine="loop")
    one = simulate(
        tiny_federation(40),
        METHODS["dac"](),
        model=model,
        settings=longer,
        folder=tmp_path,
        resume=True,
    )
    other = simulate(tiny_federation(40), METHODS["dac"](), model=model, settings=longer)
    assert torch.equal(one.params, other.params)
