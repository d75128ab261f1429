"""Plans of programs for images, against PyTorch and brute force; nothing is compiled here.

What a plan gets wrong about memory is often only slow, and no result shows it: so these tests look
at sizes, zeros, orders of memory and calls themselves.
"""

import itertools
import random
import re
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.engine._base import cross_entropy
from coterie.engine.native import compiler, images
from coterie.engine.native.images import LAST, PLANES, SAMPLES, ImageLowering, _Convolution
from coterie.engine.native.loops import Program, Value, dense_strides, in_memory
from coterie.engine.native.pooling import pool_before_activations
from coterie.engine.native.trace import ArrayKind, Dim, NotTraceableError, Trace, record
from coterie.engine.native.traced import _Function
from coterie.models.layout import Layout

T = torch.float32
N = Dim(1)


@pytest.fixture(autouse=True)
def wide_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers of 64 bytes, 16 numbers, whatever this machine has."""
    monkeypatch.setattr(compiler, "vector_bytes", lambda: 64)


def lowering() -> ImageLowering:
    return ImageLowering(Program(), Trace(), 16, T)


def convolution(
    channels=1, outputs=2, size=(18, 18), kernel=(3, 3), stride=1, padding=0, dilation=1, groups=1
) -> _Convolution:
    x = ArrayKind((N, channels, *size), T)
    w = ArrayKind((outputs, channels // groups, *kernel), T)
    options = ([each] if isinstance(each, int) else each for each in (stride, padding, dilation))
    return _Convolution(x, w, *options, False, groups)


def lying(shape, order=(0, 1, 2, 3), buffer="b") -> Value:
    return in_memory(buffer, shape, dense_strides(shape, order), T)


# ---------------------------------------------------------------- numbers of a convolution


def draw_convolutions(count: int) -> list[dict]:
    """Draw the options of convolutions that have an output."""
    stream, drawn = random.Random(5), []
    while len(drawn) < count:

        def two(low: int, high: int) -> tuple[int, int]:
            return stream.randint(low, high), stream.randint(low, high)

        one = {"size": two(1, 6), "kernel": two(1, 5), "stride": two(1, 3), "padding": two(0, 4), "dilation": two(1, 3)}  # fmt: skip
        axes = zip(*one.values(), strict=True)
        if all(s + 2 * p >= d * (k - 1) + 1 for s, k, _stride, p, d in axes):
            drawn.append(one)
    return drawn


def apply(one: dict, x: Tensor, w: Tensor) -> Tensor:
    return functional.conv2d(x, w, None, one["stride"], one["padding"], one["dilation"])


def tensors(one: dict) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(3)
    x = torch.rand(2, 2, *one["size"], generator=stream, dtype=torch.float64) + 0.1
    w = torch.randn(3, 2, *one["kernel"], generator=stream, dtype=torch.float64)
    return x.requires_grad_(), w.requires_grad_()


CONVOLUTIONS = draw_convolutions(120)


def test_an_output_is_as_large_as_pytorchs():
    for one in CONVOLUTIONS:
        conv = convolution(2, 3, **one)
        assert (conv.c, conv.h, conv.w, conv.o) == (2, *one["size"], 3)
        assert (conv.ho, conv.wo) == apply(one, *tensors(one)).shape[2:], one


def test_the_rim_that_is_left_out_is_all_that_only_meets_padding():
    """A weight that never meets a positive input has the gradient 0, by PyTorch's backward pass."""
    cut = 0
    for one in CONVOLUTIONS:
        conv, (x, w) = convolution(2, 3, **one), tensors(one)
        y = apply(one, x, w)
        for axis, (long, size, stride, padding, dilation) in enumerate(
            zip(*one.values(), strict=True)
        ):
            line, kernel = torch.ones(1, 1, long), torch.ones(1, 1, size, requires_grad=True)
            functional.conv1d(line, kernel, None, stride, padding, dilation).sum().backward()
            met = kernel.grad.flatten().nonzero().flatten().tolist()
            expected = 0
            if met:
                # As much at both ends, and padding is never negative.
                fitting = range(min(met[0], size - 1 - met[-1]) + 1)
                expected = max(n for n in fitting if padding - n * dilation >= 0)
            assert conv.cut[axis] == expected, (one, axis)
        (top, left), (kh, kw) = conv.cut, one["kernel"]
        assert (conv.kh, conv.kw, conv.taps) == (kh - 2 * top, kw - 2 * left, conv.kh * conv.kw)
        inner = w[:, :, top : kh - top, left : kw - left]
        # What is left is the same convolution.
        torch.testing.assert_close(apply(one | {"padding": conv.padding}, x, inner), y)
        cut += any(conv.cut)
    assert cut > 20


def test_zeros_around_a_gradient_are_those_that_the_gradient_of_inputs_reads():
    """Every input finds the gradients of the outputs that it is part of, added up by hand; PyTorch has the same sum."""
    for one in CONVOLUTIONS:
        conv, (x, w) = convolution(2, 3, **one), tensors(one)
        w = w[:, :, conv.cut[0] : one["kernel"][0] - conv.cut[0]]
        w = w[:, :, :, conv.cut[1] : one["kernel"][1] - conv.cut[1]].detach()
        y = apply(one | {"padding": conv.padding}, x, w)
        g = torch.rand(y.shape, generator=torch.Generator().manual_seed(4), dtype=y.dtype)
        y.backward(g)
        (above, below), (left, right) = conv.frames()
        framed = functional.pad(g, (left, right, above, below))
        found = torch.zeros_like(x.grad)
        for h, t in itertools.product(range(conv.h), range(conv.w)):
            for i, j in itertools.product(range(conv.kh), range(conv.kw)):
                down = h + conv.padding[0] - i * conv.dh
                over = t + conv.padding[1] - j * conv.dw
                if down % conv.stride[0] or over % conv.stride[1]:
                    continue
                row, column = down // conv.stride[0] + above, over // conv.stride[1] + left
                # A place outside the zeros would be read of other memory.
                assert 0 <= row < framed.shape[2], one
                assert 0 <= column < framed.shape[3], one
                found[:, :, h, t] += framed[:, :, row, column] @ w[:, :, i, j]
        torch.testing.assert_close(found, x.grad)
        # No more than that: kernels round places up to whole steps, and read one output further.
        for axis, (size, kernel, dilation, out) in enumerate(
            ((conv.h, conv.kh, conv.dh, conv.ho), (conv.w, conv.kw, conv.dw, conv.wo))
        ):
            stride, padding = conv.stride[axis], conv.padding[axis]
            before, after = conv.frames()[axis]
            first = Fraction(padding - (kernel - 1) * dilation, stride)
            last = Fraction(size - 1 + padding, stride)
            assert max(0, -first) <= before < max(0, -first) + 1
            assert max(0, last - out) < after <= max(0, last - (out - 1)) + 1


@pytest.mark.parametrize(
    ("options", "depthwise", "point"),
    [
        ({}, False, False),
        ({"kernel": (1, 1)}, False, True),
        ({"kernel": (1, 1), "stride": 2}, False, False),
        ({"kernel": (1, 1), "padding": 1}, False, False),
        ({"kernel": (1, 3)}, False, False),
        ({"kernel": (3, 3), "size": (1, 1), "padding": 1}, False, True),  # all but the middle is rim
        ({"groups": 4}, True, False),
        ({"groups": 2}, False, False),
        ({"groups": 4, "outputs": 8}, False, False),  # two kernels a channel
        ({"groups": 4, "kernel": (1, 1)}, True, False),
    ],
)  # fmt: skip
def test_kernels_of_single_channels_and_of_single_pixels_are_told_from_others(
    options, depthwise, point
):
    conv = convolution(**{"channels": 4, "outputs": 4, **options})
    assert (conv.depthwise, conv.point) == (depthwise, point)
    assert (conv.cg, conv.og) == (4 // conv.groups, conv.o // conv.groups)


def test_the_shape_of_a_group_is_written_in_the_order_of_blocks_h():
    """Channels and their distance, outputs and theirs, the padded input, the output, kernel, stride, dilation."""
    options = {"size": (9, 8), "kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 3)}  # fmt: skip
    conv = convolution(4, 6, **options, groups=2)
    assert conv.text(4, 6) == "Shape<2, 4, 3, 6, 11, 8, 5, 5, 3, 2, 2, 1, 1, 3>"
    deep = convolution(4, 4, **options, groups=4)
    assert deep.text(4, 4) == "Shape<4, 4, 4, 4, 11, 8, 5, 5, 3, 2, 2, 1, 1, 3>"


@pytest.mark.parametrize("transposed", [True, False])
def test_other_convolutions_are_refused(transposed):
    x = ArrayKind((N, 2, 5, 5, 5)[: 4 if transposed else 5], T)
    w = ArrayKind((2, 2, 3, 3), T)
    with pytest.raises(NotTraceableError, match="transposed or three-dimensional"):
        _Convolution(x, w, [1], [0], [1], transposed, 1)


# ---------------------------------------------------------------- orders of memory


def share(size: int) -> Fraction:
    """How much of whole vectors of 16 numbers is filled."""
    return Fraction(size, 16 * -(-size // 16))


def test_pixels_lie_side_by_side_where_they_fill_vectors_better_by_a_fifth():
    plan = lowering()
    assert plan.lanes == 16
    assert [plan._rounded(size) for size in (1, 15, 16, 17, 32)] == [16, 16, 16, 32, 32]
    seen = Counter()
    for outputs, width in itertools.product(range(1, 36), range(1, 36)):
        conv = convolution(3, outputs, size=(5, width + 2))
        assert (conv.o, conv.wo) == (outputs, width)
        better = share(width) > Fraction(6, 5) * share(outputs)
        seen[better] += 1
        # Where both are equal rounding may decide.
        if share(width) != Fraction(6, 5) * share(outputs):
            expected = PLANES if better else LAST
            assert plan._best_order(outputs, width, conv) == expected
            assert plan._order_read_by(conv) == expected
    assert min(seen.values()) > 100


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, PLANES), ({"stride": (1, 2)}, LAST), ({"stride": (2, 1)}, LAST), ({"groups": 2}, LAST),
     ({"kernel": (1, 1)}, LAST), ({"kernel": (1, 3)}, PLANES), ({"groups": 4, "channels": 4, "outputs": 4}, LAST)],
)  # fmt: skip
def test_pixels_have_kernels_of_their_own_for_plain_convolutions_alone(options, expected):
    conv = convolution(**{"channels": 2, "outputs": 2, "size": (18, 34), **options})
    assert lowering()._order_read_by(conv) == expected


def test_images_are_pooled_in_the_order_in_which_they_lie():
    plan = lowering()
    for order, expected in ((LAST, LAST), (PLANES, PLANES)):
        assert plan._order_to_pool(lying((N, 4, 6, 5), order)) == expected
    # Of a value that is not in memory yet, by what it is made of.
    value = lying((N, 4, 6, 5), LAST)
    assert plan._order_to_pool(Value(value.shape, value.leaves, "".join, T, 1)) == LAST
    # An axis of one entry has no neighbors.
    assert images._innermost(lying((N, 1, 6, 5), LAST)) == 3
    assert images._innermost(lying((N, 4, 6, 1), PLANES)) == 2
    assert images._innermost(lying((1, 1, 1, 1))) == 3


# ---------------------------------------------------------------- zeros around images


def test_without_zeros_images_are_read_where_they_lie():
    plan = lowering()
    x = lying((N, 2, 5, 6), LAST)
    assert plan._padded(x, LAST, 2, (0, 0), (0, 0)) == "b + 0"
    assert plan.program.statements == []
    # In another order they are copied, once.
    found = plan._padded(x, PLANES, 2, (0, 0), (0, 0))
    assert found == plan._padded(x, PLANES, 2, (0, 0), (0, 0)) != "b + 0"
    (copy,) = plan.program.statements
    assert (copy.reads, copy.writes) == ({"b"}, {found.split()[0]})


@pytest.mark.parametrize(
    ("order", "channels", "before", "after"),
    [(LAST, 2, (1, 0), (0, 0)), (LAST, 2, (0, 1), (0, 0)), (LAST, 2, (0, 0), (1, 0)), (LAST, 2, (0, 0), (0, 1)),
     (LAST, 2, (1, 2), (3, 4)), (PLANES, 2, (1, 2), (3, 4)), (SAMPLES, 2, (1, 2), (3, 4)),
     (LAST, 16, (1, 2), (3, 4)), (LAST, 16, (0, 0), (0, 0))],
)  # fmt: skip
def test_zeros_lie_where_padding_is(order, channels, before, after):
    """The statements, executed here for 3 samples, against PyTorch's `pad`."""
    plan = lowering()
    x = torch.arange(1.0, 3 * 2 * 5 * 6 + 1).reshape(3, 2, 5, 6)
    found = plan._padded(lying((N, 2, 5, 6), buffer="x"), order, channels, before, after)
    again = plan._padded(lying((N, 2, 5, 6), buffer="x"), order, channels, before, after)
    assert again == found, "a copy is shared"
    zeros, copy = plan.program.statements
    name = found.removesuffix(" + 0")
    shape = 3, channels, 5 + before[0] + after[0], 6 + before[1] + after[1]
    size = shape[0] * shape[1] * shape[2] * shape[3]
    assert plan.program.bytes_of(plan.program.buffers[name], 3) == 4 * size
    memory = torch.full((size,), torch.nan)
    if channels == 2:
        write_frame(zeros.text, memory)
    else:
        assert zeros.text.startswith(f"memset({name}, 0, ")
        memory[:] = 0
    run_loops(copy.text, {name: memory, "x": x.flatten()})
    wide = functional.pad(x, (before[1], after[1], before[0], after[0], 0, channels - 2))
    assert memory.tolist() == wide.permute(order).flatten().tolist()


def write_frame(call: str, memory: Tensor) -> None:
    """Do what `frame` of blocks.h does, for 3 samples, by slices of an array."""
    words = re.fullmatch(r"frame\((.*), \w+\);", call).group(1).split(", ")
    many, rows, width, top, left, bottom, right = (eval(word, {"n": 3}) for word in words)
    planes = memory.view(many, rows, width)
    planes[:, :top], planes[:, rows - bottom :] = 0, 0
    planes[:, top : rows - bottom, :left] = 0
    planes[:, top : rows - bottom, width - right :] = 0


def run_loops(text: str, memory: dict[str, Tensor]) -> None:
    """Execute an assignment in loops, for 3 samples."""
    loops = re.findall(r"for \(long (\w+) = 0; \w+ < (.*?); \w+\+\+\)", text)
    body = re.search(r"\{ (.*); \}$", text).group(1)
    names = [name for name, _size in loops]
    for places in itertools.product(*(range(eval(size, {"n": 3})) for _name, size in loops)):
        exec(body, {"n": 3, **memory}, dict(zip(names, places, strict=True)))


# ---------------------------------------------------------------- whole networks


def plan_step(module: nn.Module, features: tuple[int, ...]) -> list[str]:
    """Return the statements of a training step."""
    layout = Layout(module)
    x, y = torch.rand(3, *features), torch.tensor([0, 1, 2])
    trace = record(layout, cross_entropy, x, y, ImageLowering.knows).train
    found = _Function(pool_before_activations(trace), layout, False)
    found.write_gradients(found.results[1:])
    return [statement.text for statement in found.program.statements]


def count_calls(statements: list[str]) -> Counter:
    """Return how often each kernel of blocks.h is called."""
    return Counter(text.split("(")[0].split("<")[0] for text in statements if "for" not in text)


def copies(statements: list[str]) -> list[str]:
    """Return statements that write an array as it is to another place."""
    place = r"\w+\[[^\[\]]*\]"
    return [text for text in statements if re.search(rf"\{{ b{place} = {place}; \}}", text)]


def test_few_outputs_and_wide_rows_are_computed_by_pixels_in_all_passes():
    """Frames: the input, what the second convolution reads, and its gradient; copies: the input, and the gradient."""
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 3, padding=1), nn.Tanh()
    found = plan_step(nn.Sequential(*layers, nn.Flatten(), nn.Linear(768, 3)), (1, 16, 16))
    calls = count_calls(found)
    assert (calls["pixels_convolve"], calls["pixels_weights"], calls["frame"]) == (3, 2, 3)
    assert not {"convolve", "convolve_weights", "convolve_back", "pack_outputs"} & {*calls}
    # Each array is computed in the order in which it is read.
    assert len(copies(found)) == 2


def test_many_outputs_and_short_rows_are_computed_by_channels_in_all_passes():
    """As above; images are stored by planes, so the first copy changes their order too."""
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    found = plan_step(nn.Sequential(*layers, *head), (3, 6, 6))
    calls = count_calls(found)
    assert [calls[name] for name in ("convolve", "convolve_weights", "convolve_back")] == [2, 2, 1]
    # Weights are packed for each direction in which they are read.
    assert (calls["frame"], calls["pack_outputs"]) == (3, 3)
    assert not {"pixels_convolve", "pixels_weights"} & {*calls}
    assert len(copies(found)) == 2


def test_a_convolution_of_single_pixels_is_a_product():
    layers = nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(256, 3)
    calls = count_calls(plan_step(nn.Sequential(*layers), (3, 6, 6)))
    assert calls["convolve"] == calls["convolve_weights"] == 1
    assert calls["convolve_back"] == 0


def test_kernels_of_single_channels_share_their_copies():
    """16 channels fill a vector, 5 do not: both have one frame of images and one of gradients for all three passes."""
    for channels in (16, 5):
        layers = (
            nn.Conv2d(3, channels, 3),
            nn.Tanh(),
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        )
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 3))  # fmt: skip
        calls = count_calls(plan_step(net, (3, 6, 6)))
        names = "depthwise", "depthwise_weights", "depthwise_back", "pack_depthwise"
        assert [calls[name] for name in names] == [1] * 4
        assert calls["frame"] + calls["memset"] == 2
