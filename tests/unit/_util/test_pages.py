"""Large tensors: their memory is used again while a run is on, and never while a tensor still needs it."""

import mmap

import pytest
import torch

from coterie import METHODS
from coterie._util import pages
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

needs_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages"
)
MANY = pages._LEAST // 8


@pytest.fixture
def fresh(monkeypatch):
    """The sizes of blocks asked of the system, by a store that no run of another test uses."""
    asked: list[int] = []
    monkeypatch.setattr(pages, "_STORE", pages._PageStore())
    real = pages._map_block
    monkeypatch.setattr(pages, "_map_block", lambda size: asked.append(size) or real(size))
    return asked


def test_a_copy_has_the_same_values_and_lies_apart():
    """Large or small, whole or a view of one row."""
    for one in (
        torch.arange(6.0).reshape(2, 3),
        torch.arange(MANY).expand(3, -1),
        torch.ones(3, MANY).T,
    ):
        copied = pages.copy(one)
        assert torch.equal(copied, one)
        assert copied.dtype == one.dtype
        assert copied.is_contiguous()
        copied[0, 0] = 7
        assert one[0, 0] != 7


@needs_pages
def test_memory_of_a_dead_tensor_serves_the_next_of_its_size(fresh):
    with pages.reuse_pages():
        first = pages.empty(MANY, dtype=torch.float64)
        row = first[3:5]
        place = first.data_ptr()
        del first
        other = pages.empty(MANY, dtype=torch.float64)  # a view of the first still lives
        assert other.data_ptr() != place
        row.fill_(5.0)
        other.fill_(1.0)
        assert row.tolist() == [5.0, 5.0]
        del row
        assert pages.empty(2, MANY, dtype=torch.float32).data_ptr() == place
    assert len(fresh) == 2


@needs_pages
def test_nothing_is_kept_after_the_last_run(fresh):
    """Of two at a time the first to end leaves the other its memory."""
    with pages.reuse_pages():
        with pages.reuse_pages():
            pages.empty(MANY, dtype=torch.float64)
        pages.empty(MANY, dtype=torch.float64)
        assert len(fresh) == 1
    pages.empty(MANY, dtype=torch.float64)
    pages.empty(MANY, dtype=torch.float64)
    assert len(fresh) == 3


@needs_pages
def test_where_memory_ends_what_waits_is_given_back(monkeypatch):
    """A block of another size that nobody uses makes room."""
    real = pages._map_block

    def scarce(size: int) -> mmap.mmap:
        if any(pages._STORE.free.values()):
            raise OSError("no memory")
        return real(size)

    with pages.reuse_pages():
        pages.empty(MANY, dtype=torch.float64)
        monkeypatch.setattr(pages, "_map_block", scarce)
        assert pages.empty(2 * MANY, dtype=torch.float64).shape == (2 * MANY,)


@pytest.mark.parametrize("kind", ["dac", "random", "fedavg"])
def test_runs_on_memory_used_again_give_the_same_bytes(kind, monkeypatch):
    """Whatever the memory held before."""

    def run() -> torch.Tensor:
        settings = tiny_settings(rounds=3, engine="loop")
        return simulate(
            tiny_federation(), METHODS[kind](), model="linear", settings=settings
        ).params

    expected = run()
    give = pages._STORE.give

    def spoil(size: int, block: mmap.mmap) -> None:
        block[:] = b"\xff" * size
        give(size, block)

    monkeypatch.setattr(pages, "_LEAST", 1)
    monkeypatch.setattr(pages._STORE, "give", spoil)
    assert torch.equal(run(), expected)
