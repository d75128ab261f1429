"""Convolutions, pooling and normalization of images in kernels against plain PyTorch in double precision.

Without a CUDA device Triton interprets the programs here (conftest.py).
"""

import itertools

import pytest
import torch
from tests.kernels import DEVICE, EPS, assert_steps_are_those_of_torch, by_torch, numbers
from tests.selection import full
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo import Residual
from coterie.engine._base import cross_entropy
from coterie.engine.native.trace import NotTraceableError
from coterie.engine.optim import LocalTraining
from coterie.models.layout import Layout, build_model

pytest.importorskip("triton", reason="no Triton: it is for Linux")

from coterie.engine.kernels.images import Areas, Windows
from coterie.engine.kernels.programs import ClientProgram

# Entries that a mask leaves out are computed as of zeros.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]
SGD = LocalTraining(optimizer="sgd", lr=0.5)


def classifier(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


def block(norm, channels: int, stride: int) -> nn.Module:
    """A residual block of 6 channels or more, which pools to the mean of each channel."""
    return classifier(
        nn.Conv2d(2, 6, 1, bias=False), Residual(6, channels, stride, norm),
        nn.AdaptiveAvgPool2d(1), features=channels,
    )  # fmt: skip


class Pooled(nn.Module):
    """Images times a weight for each place, whose gradient shows what came back to the place."""

    def __init__(self, features, pool) -> None:
        super().__init__()
        self.weight, self.pool = nn.Parameter(torch.ones(features)), pool
        self.head = nn.Linear(pool(torch.zeros(1, *features)).numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x * self.weight).flatten(1))


class OfParameters(nn.Module):
    """Convolutions over a parameter and with a centered kernel, which move in the step that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Parameter(torch.linspace(0, 1, 40).reshape(1, 2, 4, 5))
        self.kernel, self.other = nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2)
        self.head = nn.Linear(3 * 3 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.kernel.weight
        w = w - w.mean((1, 2, 3), keepdim=True)
        y = functional.conv2d(x, w, self.kernel.bias) + self.other(self.image)
        return self.head(torch.tanh(y).flatten(1))


# A module and the shape of its inputs.
CONVOLUTIONS = {
    # 3 x 4 and 11 x 5 places: kernel, stride, padding and dilation differ along rows and columns
    "odd": (
        lambda: classifier(
            nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
            nn.Tanh(), nn.Conv2d(5, 4, (2, 3), padding=(2, 1), dilation=(3, 1)), features=4 * 5 * 4,
        ),
        (3, 7, 6),
    ),
    # The last rows and columns meet no window, and windows do not meet each other.
    "strided": (
        lambda: classifier(
            nn.Conv2d(2, 20, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(20, 7, 2, stride=3, bias=False), features=7 * 4,
        ),
        (2, 11, 12),
    ),
    "grouped": (
        lambda: classifier(
            nn.Conv2d(4, 6, 1), nn.Tanh(), nn.Conv2d(6, 9, 3, padding=1, groups=3), nn.Tanh(),
            nn.Conv2d(9, 9, 3, stride=2, groups=9), nn.Tanh(), nn.Conv2d(9, 4, 1, stride=2),
            features=4,
        ),
        (4, 6, 5),
    ),
    "sequence": (
        lambda: classifier(
            nn.Conv1d(2, 5, 3, padding=1, dilation=2), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(5, 3, 2, stride=2), nn.AvgPool1d(2), nn.Conv1d(3, 3, 1), features=3,
        ),
        (2, 12),
    ),
    "parameters": (OfParameters, (2, 4, 5)),
    # More channels than a tile has rows.
    "wide": (lambda: classifier(nn.Conv2d(1, 70, 2), nn.ReLU(), nn.Conv2d(70, 2, 2), features=2 * 2), (1, 4, 3)),
}  # fmt: skip
BLOCKS = {
    "batch norm": (lambda: block(nn.BatchNorm2d, 6, 1), (2, 5, 4)),
    "batch norm, stride": (lambda: block(nn.BatchNorm2d, 9, 2), (2, 5, 6)),
    "group norm": (lambda: block(lambda channels: nn.GroupNorm(3, channels), 9, 2), (2, 5, 5)),
    "plain group norm": (
        lambda: classifier(nn.Conv2d(2, 6, 2), nn.GroupNorm(2, 6, affine=False), features=6 * 6), (2, 3, 4),
    ),
}  # fmt: skip
POOLS = {
    "largest": (nn.MaxPool2d(2), (2, 5, 4)),
    "largest, padded": (nn.MaxPool2d(3, 2, 1), (2, 6, 5)),
    "largest, dilated": (nn.MaxPool2d((2, 3), (1, 2), (1, 0), dilation=(2, 1)), (1, 6, 7)),
    "largest, rounded up": (nn.MaxPool2d(2, 3, ceil_mode=True), (2, 6, 7)),
    "largest of areas": (nn.AdaptiveMaxPool2d((3, 2)), (2, 7, 5)),
    "mean": (nn.AvgPool2d(2), (2, 5, 4)),
    "mean, padded": (nn.AvgPool2d((3, 2), (2, 1), (1, 1)), (2, 6, 5)),
    "mean, of images alone": (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 6, 7)),
    "mean, rounded up": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), (2, 6, 6)),
    "mean, gaps": (nn.AvgPool2d(2, 3, divisor_override=3), (1, 7, 8)),
    "mean of areas": (nn.AdaptiveAvgPool2d((3, 2)), (2, 7, 6)),
    "mean of more areas": (nn.AdaptiveAvgPool2d((5, 3)), (2, 3, 4)),
}  # fmt: skip
ZOO = {
    "cnn-a": (3, 16, 16), "cnn-b": (1, 10, 11), "lenet-5": (1, 16, 18), "simple-cnn": (3, 20, 20),
    "cnn-y": (1, 16, 16),
}  # fmt: skip


def make(build, features):
    with torch.random.fork_rng():
        torch.random.manual_seed(1)
        net = build()
    layout = Layout(net)
    x = numbers(5, *features, seed=1)
    return net, layout, ClientProgram(layout, cross_entropy, x, torch.tensor([0, 1, 2, 0, 1]))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients_are_those_of_pytorch(name):
    build, features = CONVOLUTIONS[name]
    made = make(build, features)
    for size in (1, 5):
        # sums over 70 channels of 4 places, or over 5 x 42 places
        assert_steps_are_those_of_torch(
            made, SGD, size, features, steps=1, terms=280, members=(0, 3)
        )


@pytest.mark.parametrize("name", BLOCKS)
def test_residual_blocks_with_normalization_are_those_of_pytorch(name):
    build, features = BLOCKS[name]
    assert_steps_are_those_of_torch(
        make(build, features), SGD, 4, features, steps=1, terms=120, members=(3, 0)
    )


@pytest.mark.parametrize("name", POOLS)
def test_pooling_and_its_gradients_are_those_of_pytorch(name):
    """With random images, and with those that have many equal entries in a window."""
    pool, features = POOLS[name]
    net, layout, program = made = make(lambda: Pooled(features, pool), features)
    assert_steps_are_those_of_torch(made, SGD, 3, features, steps=1, members=(2,))
    x = torch.randint(0, 2, (1, 4, *features), generator=torch.Generator().manual_seed(0)).float()
    y, rows = torch.tensor([[0, 1, 2, 0]]), layout.own_values()[None].clone()
    wanted, _ = by_torch(net, layout, rows[0], x[0], y[0], cross_entropy, SGD, 1)
    given = [
        one.to(DEVICE)
        for one in (rows, rows.new_zeros(1, 0, rows.shape[1]), torch.tensor([0]), x, y)
    ]
    program.step(*given, SGD, SGD.lr, 1)
    assert float((given[0][0].cpu() - wanted).abs().max()) <= 2 * 70 * EPS * float(
        wanted.abs().max()
    )


def test_what_is_no_number_is_the_largest_of_a_window_as_for_pytorch():
    net, layout, program = make(lambda: Pooled((1, 2, 4), nn.MaxPool2d(2)), (1, 2, 4))
    x = torch.tensor([[1.0, 2.0, float("nan"), 1.0], [3.0, 4.0, 2.0, 9.0]])[None, None, None]
    y, rows = torch.tensor([[1]]), layout.own_values()[None].clone()
    given = [
        one.to(DEVICE)
        for one in (rows, rows.new_zeros(1, 0, rows.shape[1]), torch.tensor([0]), x, y)
    ]
    losses = program.step(*given, SGD, SGD.lr, 1)
    _, wanted = by_torch(net, layout, layout.own_values(), x[0], y[0], cross_entropy, SGD, 1)
    assert losses.isnan().all()
    assert wanted.isnan().all()


@pytest.mark.parametrize("name", [one if one == "cnn-b" else full(one) for one in ZOO])
def test_networks_of_the_papers_take_steps_of_adam_as_pytorch_does(name):
    local = LocalTraining(optimizer="adam", lr=0.02, eps=0.1)
    made = make(lambda: build_model(name, ZOO[name], 3), ZOO[name])
    assert_steps_are_those_of_torch(made, local, 3, ZOO[name], terms=500, members=(2,))


@pytest.mark.parametrize(
    ("net", "features", "why"),
    [
        (nn.ConvTranspose2d(2, 3, 2), (2, 4, 4), "a transposed or three-dimensional convolution"),
        (nn.Conv3d(2, 3, 2), (2, 4, 4, 4), "a transposed or three-dimensional convolution"),
    ],
)
def test_what_no_kernel_convolves_is_refused_by_name(net, features, why):
    whole = nn.Sequential(net, nn.Flatten(), nn.LazyLinear(3))
    x = numbers(4, *features, seed=0)
    whole(x)
    with pytest.raises(NotTraceableError, match=f"{why} in '0'"):
        ClientProgram(Layout(whole), cross_entropy, x, torch.tensor([0, 1, 2, 0]))


# ---------------------------------------------------------------------- indices


def join(given):
    return "-".join(map(str, given))


def evaluate(found, names):
    """Return the place that a rule found, or None where a condition does not hold."""
    place, needed = found
    value = eval(place, dict(names))
    return value if all(eval(one, dict(names)) for one in needed) else None


def as_is(text):
    return f"({text})"


@pytest.mark.parametrize(
    "given", list(itertools.product((5, 8), (1, 2, 3), (1, 2, 3), (0, 1), (1, 2))), ids=join
)
def test_windows_are_found_from_their_entries_and_the_other_way_round(given):
    size, kernel, stride, padding, dilation = given
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    axis = Windows(size, out, kernel, stride, padding, dilation)
    places = torch.arange(-padding, size + padding).unfold(0, dilation * (kernel - 1) + 1, stride)
    wanted = set()
    for window, row in enumerate(places[:, ::dilation].tolist()):
        for tap, place in enumerate(row):
            found = evaluate(axis.find_entry(as_is, "w", "k"), {"w": window, "k": tap})
            assert found == (place if 0 <= place < size else None)
            if found is not None:
                wanted.add((window, tap, place))
    turned, near = set(), set()
    for part in axis.parts:
        for entry, tap in itertools.product(range(part.count), range(part.taps)):
            window = evaluate(part.find_window(as_is, "e", "k"), {"e": entry, "k": tap})
            if window is not None:
                place = eval(part.locate("e"), {"e": entry})
                turned.add((window, part.tap + tap * (1 if part.mixed else stride), place))
    for place in range(size):
        for number in range(axis.near):
            window = evaluate(axis.find_near(as_is, "e", "j"), {"e": place, "j": number})
            if window is not None:
                near.add((window, place))
    assert turned == wanted
    # With gaps in a window some of those near do not hold the entry.
    assert near >= {(window, place) for window, _tap, place in wanted}
    if dilation == 1:
        assert near == {(window, place) for window, _tap, place in wanted}


@pytest.mark.parametrize("given", list(itertools.product((3, 6, 7), (1, 2, 3, 5))), ids=join)
def test_areas_are_those_of_pytorch(given):
    size, out = given
    axis = Areas(size, out)
    # An area's mean of ones at a place says whether it holds the place.
    means = functional.adaptive_avg_pool1d(torch.eye(size)[:, None], out)[:, 0]
    entries, near = torch.zeros(size, out), torch.zeros(size, out)
    for area in range(out):
        for tap in range(axis.kernel):
            place = evaluate(axis.find_entry(as_is, "a", "k"), {"a": area, "k": tap})
            if place is not None:
                entries[place, area] = 1 / eval(axis.count_entries("a"), {"a": area})
    for place in range(size):
        for number in range(axis.near):
            area = evaluate(axis.find_near(as_is, "e", "j"), {"e": place, "j": number})
            if area is not None:
                near[place, area] = 1 / eval(axis.count_entries("a"), {"a": area})
    torch.testing.assert_close(entries, means)
    torch.testing.assert_close(near, means)
