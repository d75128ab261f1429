"""How functions of a program are written and called: flags, samples of a call, and gradients that kernels write themselves."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.engine._base import cross_entropy
from coterie.engine.native import compiler, traced
from coterie.engine.native.images import ImageLowering
from coterie.engine.native.loops import dense_strides, in_memory
from coterie.engine.native.trace import record
from coterie.engine.native.traced import TracedProgram, _Function
from coterie.models.layout import Layout

KIB = 1024


@pytest.mark.parametrize(("width", "more"), [(64, True), (32, False), (16, False)])
def test_registers_of_64_bytes_are_used_whole(monkeypatch, width, more):
    """Compilers use half of them where nothing is said."""
    monkeypatch.setattr(compiler, "vector_bytes", lambda: width)
    assert ("-mprefer-vector-width=512" in traced._flags()) == more
    assert {"-fno-strict-aliasing", "-fwrapv", "-fopenmp-simd"} <= {*traced._flags()}


def fitting(each: int, *, size: int = 0, frozen: int = 0, fixed: int = 5000, across=False) -> int:
    """Return the samples of a call of which each takes some bytes."""
    program = object.__new__(TracedProgram)
    program.across = across
    held = {"one": torch.zeros(frozen // 2, 2)}
    function = SimpleNamespace(
        layout=SimpleNamespace(size=size, frozen=held),
        program=SimpleNamespace(number_bytes=4),
        memory=lambda samples: (None, fixed + samples * each),
    )
    # The function's own type is not looked at.
    return inspect.unwrap(TracedProgram._fitting)(program, function)


def test_a_call_has_as_many_samples_as_fit_the_cache():
    """768 KiB of one core's; 64 samples at most and 4 at least, halved from 64."""
    # 64 samples take 63 more than one.
    room = 768 * KIB
    assert fitting(room // 63) == 64
    assert fitting(room // 63 + 1) == 32
    assert fitting(room // 31) == 32
    assert fitting(room // 31 + 1) == 16
    assert fitting(room // 7 + 1) == 4
    assert fitting(10 * room) == 4
    assert fitting(0) == 64
    assert fitting(10 * room, across=True) == 8


def test_a_large_model_has_calls_that_need_less_than_twice_its_bytes():
    size = 1_000_000  # numbers, of 4 bytes
    assert fitting(2 * 4 * size // 31, size=size) == 32
    assert fitting(2 * 4 * size // 31 + 1, size=size) == 16
    # Frozen weights are passed over too.
    assert fitting(2 * 4 * size // 31, size=size // 2, frozen=size // 2) == 32
    assert fitting(2 * 4 * size // 31 + 1, size=size // 2, frozen=size // 2) == 16


@pytest.mark.parametrize(
    ("value", "start", "there"),
    [
        (in_memory("row", (2, 3), (3, 1), torch.float32, 7), 7, True),
        (in_memory("row", (2, 3), (3, 1), torch.float32, 7), 6, False),
        (in_memory("row", (2, 3), (1, 2), torch.float32, 7), 7, False),
        (in_memory("b", (2, 3), (3, 1), torch.float32, 7), 7, False),
    ],
)
def test_what_lies_where_it_goes_is_not_copied(value, start, there):
    assert traced._is_there(value, start) is there


class Halves(nn.Module):
    """A layer, one that nothing depends on, and weights that are read twice."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(7, 6), nn.Linear(2, 3), nn.Linear(6, 4)
        self.twice = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        z = torch.tanh(self.twice(torch.tanh(self.twice(self.first(x)))))
        return self.last(z)


def plan_step(module: nn.Module, *features: int) -> tuple[_Function, Layout]:
    layout = Layout(module)
    x, y = torch.rand(3, *features), torch.tensor([0, 1, 2])
    trace = record(layout, cross_entropy, x, y, ImageLowering.knows).train
    found = _Function(trace, layout, False)
    trained = sum(slot.stop <= layout.trainable for slot in layout.slots)
    found.write_vector("losses", found.results[0])
    found.write_gradients(found.results[1 : 1 + trained])
    found.write_state(found.results[1 + trained :])
    return found, layout


def test_gradients_are_written_once_each_by_their_kernel_where_it_can_add():
    """By the text: products of weights add where `more` is true, biases in a loop, and what has none is zero once."""
    function, layout = plan_step(Halves(), 7)
    lines = [*function.declarations(), *function.statements()]
    # Slots by name: where the gradient of each begins.
    starts = {slot.name: slot for slot in layout.slots}
    for name in ("first.weight", "last.weight"):
        (own,) = [line for line in lines if line.endswith(f"= g + {starts[name].start};")]
        buffer = own.split("* const ")[1].split(" ")[0]
        (writes,) = [line for line in lines if f", {buffer}, " in line and "product" in line]
        assert writes.endswith(f", {buffer}, more);")
    for name in ("first.bias", "last.bias", "twice.weight"):
        (add,) = [line for line in lines if f"(more ? g[{starts[name].start}" in line]
        assert add.count("g[") == 2
    for name in ("unused.weight", "unused.bias"):
        slot = starts[name]
        size = slot.stop - slot.start
        assert f"if (!more) memset(g + {slot.start}, 0, sizeof(T) * {size});" in lines
    assert not any("MORE_" in line for line in lines)
    assert any("losses[i0] = " in line for line in lines)


def test_the_middle_of_a_kernel_is_the_only_part_of_its_gradient_that_is_written():
    """A 5 x 3 kernel over images of one row: of five rows of weights only the middle one meets numbers."""

    class Rim(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = nn.Conv2d(2, 6, (5, 3), padding=(2, 1)), nn.Linear(24, 4)

        def forward(self, x):
            return self.last(functional.relu(self.conv(x)).flatten(1))

    function, layout = plan_step(Rim(), 2, 1, 4)
    (slot,) = [one for one in layout.slots if one.name == "conv.weight"]
    lines = [*function.declarations(), *function.statements()]
    assert f"if (!more) memset(g + {slot.start}, 0, sizeof(T) * {6 * 2 * 15});" in lines
    # Row 2 of 5 begins after 2 x 3 numbers; kernels lie 15 apart.
    (add,) = [line for line in lines if f"(more ? g[{slot.start + 6}" in line]
    assert "* 15" in add
    assert dense_strides(slot.shape) == [30, 15, 3, 1]


def test_statistics_are_copied_before_one_of_them_is_replaced():
    function, layout = plan_step(nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)), 7)
    state = [slot for slot in layout.slots if slot.stop > layout.trainable]
    texts = [one.text for one in function.program.statements]
    writes = [k for k, text in enumerate(texts) if any(f"{{ row[{s.start}" in text for s in state)]
    assert len(writes) == len(state) > 1
    assert writes == list(range(len(texts) - len(state), len(texts))), "at the end, all together"
