"""The work of an engine: samples, one local training of some clients, pairs of a model and a set to measure it on."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie.engine._augment import CropFlip
from coterie.engine.noise import Noise
from coterie.engine.optim import LocalTraining
from coterie.functional.metrics import measured

_GOLDEN = 0x1F123BB5159A55E5  # an odd constant that spreads the keys of successive steps
_STEPS, _GATHERED = 64, 1 << 18  # steps of a client, and entries of their inputs, that are gathered at once

Batch = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Inputs, targets and values of the input buffers of some members of a block."""


@dataclass(frozen=True, eq=False)
class RawSamples:
    """Samples as they are stored; they are prepared batch by batch.

    Args:
        x: the inputs. uint8 images are scaled to [0, 1] and normalized.
        y: the targets.
        classes: number of classes; 0 for regression.
        dtype: floating-point type of models and inputs.
        mean: per channel, for uint8 images; empty for "do not normalize".
        std: per channel.
    """

    x: Shaped[Tensor, "samples *features"]
    y: Shaped[Tensor, "samples *targets"]
    classes: int
    dtype: torch.dtype
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.x)

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    def inputs(self, places: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return samples as the model takes them: floats, images scaled and normalized."""
        x = self.x[places.to(self.x.device)]
        if x.dtype != torch.uint8:
            return x.to(self.dtype)
        x = x.to(self.dtype).div_(255)
        if self.mean:
            x = x.sub_(self._per_channel(self.mean)).div_(self._per_channel(self.std))
        return x

    def black(self) -> Float[Tensor, " channels"]:
        """Return the value of a black pixel as the model takes it, per channel."""
        channels = self.features[0]
        if self.x.dtype != torch.uint8 or not self.mean:
            return torch.zeros(channels, dtype=self.dtype)
        return (-self._per_channel(self.mean) / self._per_channel(self.std)).flatten()

    def _per_channel(self, values: tuple[float, ...]) -> Tensor:
        values_ = torch.tensor(values, dtype=self.dtype, device=self.x.device)
        return values_.reshape(-1, *(1 for _ in self.features[1:]))

    def targets(self, places: Int[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Return targets: integer classes, or floats for regression."""
        y = self.y[places.to(self.y.device)]
        return y.to(torch.int64) if self.classes else y.to(self.dtype)


@dataclass(frozen=True)
class Training:
    """One local training of some clients: everything an engine needs beside the models.

    Args:
        samples: the data of the batches.
        places: indices of each batch's samples in `samples`; ignored beyond the batch's size.
        length: the size of each batch; 0 after a client's last step.
        local: optimizer and its settings.
        anchor: models of the proximal term.
        prox: weight of the proximal term.
        inputs: values of the layout's input buffers, in each step.
        keys: the key of each client's dropout masks, and the names of the buffers that take them.
        augment: augmentation of the inputs of each step.
        noise: added after augmentation.
        moments: the state of each client's optimizer, changed in place; a fresh one when None.
        taken: with `moments`: steps that each client took before.
        foreign: (client's row) -> a context in which PyTorch's own generator is that client's, for foreign modules.
    """

    samples: RawSamples
    places: Int[Tensor, "clients steps batch"]
    length: Int[Tensor, "clients steps"]
    local: LocalTraining
    anchor: Float[Tensor, "clients params"] | None = None
    prox: float = 0.0
    inputs: Mapping[str, Shaped[Tensor, "clients steps *shape"]] = field(default_factory=dict)
    keys: tuple[Int[Tensor, " clients"], tuple[str, ...]] | None = None
    augment: CropFlip | None = None
    noise: Noise | None = None
    moments: Float[Tensor, "clients moments trainable"] | None = None
    taken: Int[Tensor, " clients"] | None = None
    foreign: Callable[[int], AbstractContextManager[None]] = lambda _row: nullcontext()

    @property
    def steps(self) -> int:
        """The largest number of steps of any client."""
        return self.length.shape[1]

    def part(self, rows: slice) -> "Training":
        """Return the training of some of the clients."""
        return replace(
            self,
            places=self.places[rows],
            length=self.length[rows],
            anchor=None if self.anchor is None else self.anchor[rows],
            inputs={name: value[rows] for name, value in self.inputs.items()},
            keys=None if self.keys is None else (self.keys[0][rows], self.keys[1]),
            augment=None if self.augment is None else replace(self.augment, keys=self.augment.keys[rows]),
            noise=None if self.noise is None else self.noise.part(rows),
            moments=None if self.moments is None else self.moments[rows],
            taken=None if self.taken is None else self.taken[rows],
            foreign=lambda row: self.foreign((rows.start or 0) + row),
        )

    def batch(self, members: Int[Tensor, " members"], step: int, size: int) -> Batch:
        """Return the batches of some clients in a step."""
        places = self.places[members, step, :size]
        values = {name: value[members, step] for name, value in self.inputs.items()}
        if self.keys is not None:
            keys, names = self.keys
            values |= dict.fromkeys(names, step_keys(keys[members], step).to(self.samples.x.device))
        x = self.samples.inputs(places)
        if self.augment is not None:
            x = self.augment(x, members, step)
        if self.noise is not None:
            x = self.noise.add(x, members, step, places)
        return x, self.samples.targets(places), values

    def batches(self, row: int) -> Iterator[Batch]:
        """Return the batch of each step of one client, without the axis of members.

        Samples of several steps of equal size are gathered at once, since that costs as much as for one step.
        """
        member = torch.full((1,), row, device=self.places.device)
        lengths = [size for size in self.length[row].tolist() if size]
        start = 0
        while start < len(lengths):
            size = lengths[start]
            most = start + max(1, min(_STEPS, _GATHERED // (size * max(1, math.prod(self.samples.features)))))
            stop = next((step for step in range(start, len(lengths)) if lengths[step] != size), len(lengths))
            steps = range(start, min(most, stop))
            places = self.places[row, start : steps.stop, :size]
            x, y = self.samples.inputs(places), self.samples.targets(places)
            for number, step in enumerate(steps):
                values = {name: value[row, step] for name, value in self.inputs.items()}
                if self.keys is not None:
                    keys, names = self.keys
                    values |= dict.fromkeys(names, step_keys(keys[member], step).to(self.samples.x.device)[0])
                own, at = x[number : number + 1], places[number : number + 1]
                if self.augment is not None:
                    own = self.augment(own, member, step)
                if self.noise is not None:
                    own = self.noise.add(own, member, step, at)
                yield own[0], y[number], values
            start = steps.stop

    def groups(self, step: int) -> Iterator[tuple[int, Int[Tensor, " members"]]]:
        """Group the clients that have a batch in a step by its size, so that no batch is padded."""
        length = self.length[:, step]
        for size in torch.unique(length).tolist():
            if size:
                yield size, (length == size).nonzero().flatten()


def step_keys(keys: Int[Tensor, " clients"], step: int) -> Int[Tensor, " clients"]:
    """Return the keys of a step's dropout masks from the clients' keys of one training: 64 bits, wrapping."""
    return keys + torch.tensor([step]) * _GOLDEN


@dataclass(frozen=True)
class Pairs:
    """Pairs of a model and a set of samples on which it is measured.

    Args:
        samples: the data of the sets.
        places: indices of each set's samples in `samples`; ignored beyond its size.
        count: the size of each set.
        models: row of each pair's model in the table of models.
        sets: the set of each pair.
        noise: on the inputs of each set; the same for all models measured on it.
    """

    samples: RawSamples
    places: Int[Tensor, "sets width"]
    count: Int[Tensor, " sets"]
    models: Int[Tensor, " pairs"]
    sets: Int[Tensor, " pairs"]
    noise: Noise | None = None

    def inputs(
        self, sets: Int[Tensor, " members"], places: Int[Tensor, "members width"]
    ) -> Float[Tensor, "members width *features"]:
        """Return samples of some sets as the model takes them."""
        x = self.samples.inputs(places)
        return x if self.noise is None else self.noise.add(x, sets, 0, places)

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured: the loss, and accuracy for classes or mean squared error else."""
        return measured(self.samples.classes > 0)


def distinct(rows: Float[Tensor, "rows params"]) -> Int[Tensor, " rows"]:
    """Return for each row the first row that equals it; a row with NaN may count as different from all others.

    Example:
        >>> distinct(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).tolist()
        [0, 1, 0]
    """
    if len(rows) and rows.stride(0) == 0:
        return torch.zeros(len(rows), dtype=torch.int64)
    found: dict[float, list[int]] = {}
    first = torch.arange(len(rows))
    for row, total in enumerate(rows.sum(1).tolist()):
        alike = found.setdefault(total, [])
        first[row] = next((other for other in alike if torch.equal(rows[other], rows[row])), row)
        if first[row] == row:
            alike.append(row)
    return first
