"""Data and modules made from a few options, so that a study file can name any of them by import path.

The adversary draws the options (`benchmarks.combinations`); see `make_data` and `Net`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from coterie.data.arrays import from_arrays
from coterie.data.build import Split
from coterie.data.federation import Federation, TestSet, Truth
from coterie.data.source import InputPart, Samples
from coterie.exchange.attacking import AttackContext
from coterie.functional.aggregation import ReceivedModels
from coterie.functional.selection import PeerKnowledge
from coterie.rng import Rng

VALUES = 4
"""Numbers of an input, positions of a sequence, side of an image."""
CODES = 3
"""Categories of a column, and tokens of a vocabulary."""


# ---------------------------------------------------------------- data


def make_data(
    seed: int,
    kind: str = "classes",
    sizes: Sequence[Sequence[int]] = ((12, 4),) * 5,
    clusters: int = 2,
    classes: int = 3,
    one_class: Sequence[int] = (),
    names: Sequence[str] = (),
    tests: str = "cluster",
    noise: float = 0.0,
    truth: bool = True,
) -> Federation:
    """Make a federation in which each cluster has a random rule of its own.

    Args:
        seed: what everything is drawn from.
        kind: "classes"; "yes-no"; "labels" (several of them); "numbers" or "vector" (regression); "counts";
            "times" (of events, some censored); "tokens" (a class at each position); "images" (of
            bytes, one class); "pixels" (images, a class at each pixel); "parts" (an input of
            numbers and codes, one class).
        sizes: training and validation samples of each client.
        clusters: of the clients, in turn.
        classes: classes, labels, or entries of a vector.
        one_class: clients all of whose training samples have the same class.
        names: of the clients; numbers when empty.
        tests: a test set for each "cluster", for each "client", or one for "all".
        noise: deviation of the noise that clients add to their inputs at every access.
        truth: whether the clusters are known.
    """
    stream = Rng(seed).generator("generated.data")
    number, width = len(sizes), max(map(sum, sizes))
    rules = stream.normal(size=(clusters, _count_values(kind), _count_targets(kind, classes)))
    cluster = torch.arange(number) % clusters
    parts = [
        _draw_samples(stream, kind, rules[int(one)], width, i in one_class)
        for i, one in enumerate(cluster)
    ]
    split = torch.full((number, width), -1)
    for row, (train, validation) in enumerate(sizes):
        split[row, :train] = 0
        split[row, train : train + validation] = 1
    owners = {"cluster": cluster, "client": torch.arange(number), "all": torch.zeros_like(cluster)}
    test_of = owners[tests]
    sets = []
    for place in range(int(test_of.max()) + 1):
        first = int((test_of == place).nonzero()[0])
        x, y = _draw_samples(stream, kind, rules[int(cluster[first])], 10, False)
        sets.append(TestSet(x, y, f"test {place}"))
    named = tuple(f"rule {one}" for one in range(clusters))
    is_image = kind in ("images", "pixels")
    return Federation(
        x=torch.stack([x for x, _ in parts]),
        y=torch.stack([y for _, y in parts]),
        split=split,
        tests=tuple(sets),
        test_of=test_of,
        ids=torch.arange(number),
        population=number,
        classes=classes if kind in ("classes", "images", "parts") else 0,
        mean=(0.5,) if is_image else (),
        std=(0.5,) if is_image else (),
        truth=Truth(cluster, named, tuple(named[int(one)] for one in cluster)) if truth else None,
        name="generated",
        noise=torch.full((number,), noise, dtype=torch.float64) if noise else None,
        client_names=tuple(names),
        parts=(InputPart("", (VALUES,)), InputPart("", (1,), True)) if kind == "parts" else (),
    )


def make_shifted_data(
    seed: int,
    num_clients: int = 4,
    samples: int = 120,
    classes: int = 3,
    images: bool = True,
    shift: Sequence[Mapping[str, Any]] = (),
    **split: Any,
) -> Federation:
    """Make a federation from a pool that shifts divide among the clients.

    Args:
        seed: of the pool and its division.
        num_clients: how many.
        samples: of the pool.
        classes: of the targets; 0 for a regression.
        images: whether inputs are images of bytes, or numbers.
        shift: tables of shifts, as in `Split`.
        split: further fields of `Split`.
    """
    stream = Rng(seed).generator("generated.pool")
    shape = (samples, 1, VALUES, VALUES) if images else (samples, VALUES)
    drawn = (
        stream.integers(256, size=shape, dtype=np.uint8) if images else stream.normal(size=shape)
    )
    numbers = drawn.reshape(samples, -1).astype(float)
    y = numbers.mean(1) if not classes else np.argsort(np.argsort(numbers[:, 0])) % classes
    made = Split(shift=tuple(shift), seed=seed, **split)
    return from_arrays(drawn, y, num_clients=num_clients, classes=classes, split=made)


def _count_values(kind: str) -> int:
    counts = {"images": VALUES * VALUES, "pixels": VALUES * VALUES, "parts": VALUES + 1}
    return counts.get(kind, VALUES)


def _count_targets(kind: str, classes: int) -> int:
    return 1 if kind in ("numbers", "counts", "times", "tokens", "pixels", "yes-no") else classes


def _draw_samples(
    stream: np.random.Generator, kind: str, rule: np.ndarray, count: int, one_class: bool
) -> tuple[Tensor, Tensor]:
    """Draw inputs, and their targets by a rule."""
    if kind == "tokens":
        tokens = stream.integers(CODES, size=(count, VALUES))
        moved = (tokens + 1 + (rule[0, 0] > 0)) % CODES
        return torch.from_numpy(tokens).int(), torch.from_numpy(moved)
    if kind in ("images", "pixels"):
        pixels = stream.integers(256, size=(count, 1, VALUES, VALUES), dtype=np.uint8)
        values = (pixels.reshape(count, -1) / 255 - 0.5) @ rule
        y = values.argmax(1) if kind == "images" else (pixels[:, 0] > 128).astype(np.int64)
        x = torch.from_numpy(pixels)
    else:
        numbers = stream.normal(size=(count, len(rule)))
        if kind == "parts":
            numbers[:, -1] = stream.integers(CODES, size=count)
        values, x = numbers @ rule, torch.from_numpy(numbers)
        y = _make_targets(stream, kind, values)
    targets = torch.from_numpy(np.ascontiguousarray(y))
    return x, torch.zeros_like(targets) if one_class else targets


def _make_targets(stream: np.random.Generator, kind: str, values: np.ndarray) -> np.ndarray:
    if kind in ("labels", "yes-no"):
        said = (values > 0).astype(np.float32)
        return said if kind == "labels" else said[:, 0]
    if kind == "numbers":
        return values[:, 0]
    if kind == "vector":
        return values
    if kind == "counts":
        return stream.poisson(np.exp(values[:, 0].clip(-2, 2))).astype(np.float64)
    if kind == "times":
        happened = stream.random(len(values)) < 0.7
        return np.stack([np.exp(values[:, 0].clip(-2, 2)), happened], 1)
    return values.argmax(1)


# ---------------------------------------------------------------- modules


class Net(nn.Module):
    """A small network: its inputs as numbers, some pieces, and a linear layer.

    Args:
        features: the shape of an input.
        outputs: the number of outputs, where `shape` is empty.
        pieces: names of `PIECES`, in order; "dropout:0.5" gives an argument.
        width: numbers of a sample between the pieces.
        shape: of a sample's outputs; one axis of `outputs` when empty.
        vocabulary: embed an input of whole numbers; 0 for numbers.
    """

    def __init__(
        self,
        features: Sequence[int],
        outputs: int,
        pieces: Sequence[str] = (),
        width: int = 5,
        shape: Sequence[int] = (),
        vocabulary: int = 0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 2) if vocabulary else None
        size = math.prod(features) * (2 if vocabulary else 1)
        self.first = nn.Linear(size, width)
        self.pieces = nn.Sequential(*(make_piece(piece, width) for piece in pieces))
        self.shape = tuple(shape) or (outputs,)
        self.last = nn.Linear(width, math.prod(self.shape))

    def forward(self, x: Tensor) -> Float[Tensor, "samples *outputs"]:
        """Return the outputs of each sample."""
        seen = self.embedding(x.long()) if self.embedding is not None else x
        z = self.pieces(self.first(seen.flatten(1)))
        return self.last(z).reshape(len(x), *self.shape)


class TwoInputs(Net):
    """A `Net` of numbers and codes; see there."""

    def __init__(
        self, features: Sequence[int], outputs: int, pieces: Sequence[str] = (), width: int = 5
    ) -> None:
        super().__init__((VALUES + 2,), outputs, pieces, width)
        head, self.codes = self.last, nn.Embedding(CODES, 2)
        del self.last
        self.last = head  # the last layer, for methods that look for it

    def forward(self, x: Tensor, codes: Tensor) -> Float[Tensor, "samples *outputs"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the outputs of each sample."""
        return super().forward(torch.cat([x, self.codes(codes.long()).flatten(1)], 1))


def make_piece(piece: str, width: int) -> nn.Module:
    """Return a piece of a `Net` by its name, with the argument behind a colon."""
    name, _, argument = piece.partition(":")
    return PIECES[name](width, *([float(argument)] if argument else []))


class _Residual(nn.Module):
    """x + tanh(linear(x)), the tanh in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh_()


class _Recurrent(nn.Module):
    """A recurrent layer over the numbers of a sample."""

    def __init__(self, width: int, layer: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.layer = layer(1, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, :, None])[0][:, -1]


class _Attention(nn.Module):
    """A transformer's layer over three views of a sample."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 1, 2 * width, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.stack([x, x.tanh(), x * 0.5], 1)).mean(1)


class _Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, width), nn.Linear(width, width)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).relu())


class _TiedStack(nn.Sequential):
    """A plain stack in which a layer occurs twice."""

    def __init__(self, width: int) -> None:
        layer = nn.Linear(width, width)
        super().__init__(layer, nn.ReLU(), layer)


class _Frozen(nn.Module):
    """A layer that is not trained, and one that is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fixed, self.free = nn.Linear(width, width), nn.Linear(width, width)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.free(self.fixed(x).relu())


class _Counting(nn.Module):
    """Buffers that training changes: a running mean, and a count of batches."""

    mean: Tensor
    batches: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean += 0.1 * (x.mean(0) - self.mean)
                self.batches += 1
        return x - self.mean


class _Scalars(nn.Module):
    """Parameters without axes, one of them unused, and a buffer that never changes."""

    offset: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.offset


class _Noisy(nn.Module):
    """Draws of its own in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deviation = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.deviation * torch.randn_like(x) if self.training else x


class _Deciding(nn.Module):
    """A choice that depends on the values of a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.detach().sum()) > 0 else x


class _Groups(nn.Module):
    """A normalization that needs an axis of channels."""

    def __init__(self, width: int, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layer = layer(width)

    def forward(self, x: Tensor) -> Tensor:
        # Other weights than those of the mean, which is zero behind some of these layers.
        seen = self.layer(torch.stack([x, x.square(), x.sin()], 2))
        return 0.5 * seen[:, :, 0] + 0.3 * seen[:, :, 1] + 0.2 * seen[:, :, 2]


class _Complex(nn.Module):
    """A complex weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).real.to(x.dtype)


PIECES: dict[str, Callable[..., nn.Module]] = {
    "relu": lambda width: nn.ReLU(inplace=True),
    "tanh": lambda width: nn.Tanh(),
    "gelu": lambda width: nn.GELU(),
    "prelu": lambda width: nn.PReLU(),
    "linear": lambda width: nn.Linear(width, width, bias=False),
    "lazy": lambda width: nn.LazyLinear(width),
    "batch-norm": lambda width: nn.BatchNorm1d(width),
    "batch-norm-cumulative": lambda width: nn.BatchNorm1d(width, momentum=None),
    "batch-norm-of-batch": lambda width: nn.BatchNorm1d(width, track_running_stats=False),
    "batch-norm-plain": lambda width: nn.BatchNorm1d(width, affine=False),
    "batch-norm-images": lambda width: _Groups(width, nn.BatchNorm1d),
    "instance-norm": lambda width: _Groups(
        width, lambda channels: nn.InstanceNorm1d(channels, track_running_stats=True)
    ),
    "layer-norm": lambda width: nn.LayerNorm(width),
    "rms-norm": lambda width: nn.RMSNorm(width),
    "group-norm": lambda width: nn.GroupNorm(1, width),
    "dropout": lambda width, p=0.5: nn.Dropout(p),
    "alpha-dropout": lambda width, p=0.5: nn.AlphaDropout(p),
    "residual": _Residual,
    "gru": lambda width: _Recurrent(width, nn.GRU),
    "lstm": lambda width: _Recurrent(width, nn.LSTM),
    "attention": _Attention,
    "tied": _Tied,
    "tied-stack": _TiedStack,
    "frozen": _Frozen,
    "counting": _Counting,
    "scalars": _Scalars,
    "noisy": _Noisy,
    "deciding": _Deciding,
    "complex": _Complex,
    "weight-norm": lambda width: parametrizations.weight_norm(nn.Linear(width, width)),
}
"""The pieces of a `Net`: each makes a module from `width` numbers a sample to as many."""


# ---------------------------------------------------------------- rules, losses and metrics


def median(received: ReceivedModels) -> Tensor:
    """Merge models by the median of each number."""
    return received.models.median(0).values


def least_read(known: PeerKnowledge) -> Tensor:
    """Prefer peers that were read less often."""
    return known.noise - known.count


def halve(seen: AttackContext) -> Tensor:
    """An attack: half of each model."""
    return seen.models / 2


def divide_samples(
    samples: Samples, num_clients: int, generator: np.random.Generator
) -> np.ndarray:
    """A partition: by the classes where there are any, and at random."""
    owners = (
        samples.y.numpy().round().astype(int) + generator.integers(2, size=len(samples.y))
    ) % num_clients
    owners[:num_clients] = np.arange(num_clients)
    return owners


def absolute_logits(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of classes: cross-entropy and a penalty on large outputs."""
    return functional.cross_entropy(outputs, targets, reduction="none") + outputs.abs().mean(1)


def half_rate(number: int, total: int) -> float:
    """A learning-rate schedule."""
    return 0.5 if 2 * number >= total else 1.0


def mean_output(outputs: Tensor, targets: Tensor) -> float:
    """The mean of all outputs."""
    return float(outputs.double().mean())


def add_noise(batch: Tensor, generator: torch.Generator) -> Tensor:
    """Add noise to training samples: an augmentation of one's own."""
    noise = torch.randn(batch.shape, generator=generator, dtype=batch.dtype)
    return batch + 0.1 * noise
