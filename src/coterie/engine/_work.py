"""The work of an engine: samples, local trainings, and pairs of a model and samples."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie._util.tensors import index_each, index_optional
from coterie.data.rows import ClientRows, read_inputs
from coterie.data.source import normalize_images
from coterie.engine._augment import Augmentation, FunctionAugmentation
from coterie.engine._read_ahead import read_ahead
from coterie.engine.noise import InputNoise
from coterie.engine.optim import LocalTraining
from coterie.engine.privacy import PrivacyLedger, PrivateSteps
from coterie.models.draws import KEY, splitmix

_GOLDEN = 0x1F123BB5159A55E5  # an odd constant that spreads the keys of successive steps
# steps of a client, and entries of their inputs, that are gathered at once
# Few enough that gathered batches are still in the caches when their step comes.
_STEPS, _GATHERED = 64, 1 << 18
_PREPARED = 1 << 25  # entries of batches that are augmented before a native program takes them
_MAX_COMPARED_ENTRIES = 1 << 26  # entries of rows that a device compares at once
_READ_BYTES = 8 << 20  # of several batches, which are read from a disk at once

Batch = tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""Inputs, targets, and values of the input buffers and of `KEY` of some members of a block."""


@dataclass(frozen=True, eq=False)
class RawSamples:
    """Samples as they are stored; they are prepared batch by batch.

    Args:
        x: the inputs. uint8 images are scaled to [0, 1] and normalized; other integers become equal
            numbers of `dtype`. On a CPU or on disk when they are rows of a table, wherever the
            targets are.
        y: the targets: integers, or numbers.
        dtype: floating-point type of models and inputs.
        mean: per channel, for uint8 images; empty for "do not normalize".
        std: per channel.
    """

    x: Shaped[Tensor, "samples *input_shape"] | ClientRows
    y: Shaped[Tensor, "samples *targets"]
    dtype: torch.dtype
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.x)

    @property
    def device(self) -> torch.device:
        """Where targets are stored, and inputs are prepared."""
        return self.y.device

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def is_images(self) -> bool:
        """Whether the inputs are images of bytes."""
        return self.x.dtype == torch.uint8 and self.x.ndim == 4

    @property
    def is_on_disk(self) -> bool:
        """Whether inputs are read from a disk."""
        return isinstance(self.x, ClientRows) and self.x.is_on_disk

    def prepare_inputs(self, places: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return samples as engines take them: as numbers, images scaled and normalized."""
        return self._to_numbers(self._read(places))

    def prepare_each(self, places: Iterable[Int[Tensor, "..."]]) -> Iterator[Float[Tensor, "..."]]:
        """Return samples as engines take them, batch by batch.

        Args:
            places: of each batch; the next ones are read while the engine has this one, where that
                waits for a disk.
        """
        if not self.is_on_disk:
            yield from map(self.prepare_inputs, places)
            return
        for group in read_ahead(map(self._read_together, self._group_batches(places))):
            yield from map(self._to_numbers, group)

    def _group_batches(self, places: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Return batches in groups which are read at once: a chunk of a disk serves several."""
        size = max(1, math.prod(self.input_shape) * self.x.dtype.itemsize)
        group, held = [], 0
        for own in places:
            group.append(own)
            held += own.numel() * size
            if held >= _READ_BYTES:
                yield group
                group, held = [], 0
        if group:
            yield group

    def _read_together(self, places: Sequence[Tensor]) -> list[Tensor]:
        joined = torch.cat([own.flatten().cpu() for own in places])
        found = read_inputs(self.x[joined]).split([own.numel() for own in places])
        # Each in memory of its own, as without a disk: rounding depends on where a batch begins.
        parts = []
        for x, own in zip(found, places, strict=True):
            parts.append(x.reshape(*own.shape, *x.shape[1:]).clone().to(self.device))
        return parts

    def _read(self, places: Int[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Return samples as they are stored, on the device."""
        if isinstance(self.x, ClientRows):
            return self.x[places.cpu()].read().to(self.device)
        return self.x[places.to(self.device)]

    def _to_numbers(self, x: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
        if not self.is_images:
            return x.to(self.dtype)
        return normalize_images(x, self.dtype, *(self._channel_stats if self.mean else ()))

    def black_pixel(self) -> Float[Tensor, " channels"]:
        """Return the value of a black pixel as the model takes it, per channel."""
        channels = self.input_shape[0]
        if not self.is_images or not self.mean:
            return torch.zeros(channels, dtype=self.dtype, device=self.device)
        mean, std = self._channel_stats
        # Black is 0 before normalization.
        return (-mean / std).flatten()

    @cached_property
    def _channel_stats(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel, shaped like an image."""
        shape = (-1, *[1] * (len(self.input_shape) - 1))
        mean = torch.tensor(self.mean, dtype=self.dtype, device=self.device)
        std = torch.tensor(self.std, dtype=self.dtype, device=self.device)
        return mean.reshape(shape), std.reshape(shape)

    def prepare_targets(self, places: Int[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Return targets: integers as int64, numbers as `dtype`."""
        y = self.y[places.to(self.device)]
        if y.is_floating_point():
            return y.to(self.dtype)
        return y.to(torch.int64)


@dataclass(frozen=True)
class TrainingWork:
    """One local training of some clients: all that an engine needs besides models.

    Lengths of batches, which decide what is done when, stay on the CPU. All other tensors are where
    the samples are, so that nothing goes there in a step.

    Args:
        samples: the data of the batches.
        sample_indices: indices of each batch's samples in `samples`; ignored beyond the batch's
            size.
        batch_sizes: the size of each batch; 0 after a client's last step.
        local: optimizer and its settings.
        anchor: models of the proximal term.
        prox: weight of the proximal term.
        inputs: values of the layout's input buffers, in each step.
        draw_keys: the key of what each client's forward passes draw; None where nothing is drawn.
        augment: augmentation of the inputs of each step.
        noise: added after augmentation.
        moments: the state of each client's optimizer, changed in place; a fresh one when None.
        steps_taken: with `moments`: steps that each client took before.
        rates: the learning rate of each step of each client, in float64 on the CPU; that of `local`
            when None.
        seed_torch: (client's row) -> a context in which PyTorch's own generator is that client's,
            for foreign modules.
        private: clip the gradient of each sample and add noise; None for plain gradients.
    """

    samples: RawSamples
    sample_indices: Int[Tensor, "clients steps batch"]
    batch_sizes: Int[Tensor, "clients steps"]
    local: LocalTraining
    anchor: Float[Tensor, "clients params"] | None = None
    prox: float = 0.0
    inputs: Mapping[str, Shaped[Tensor, "clients steps *shape"]] = field(default_factory=dict)
    draw_keys: Int[Tensor, " clients"] | None = None
    augment: Augmentation | None = None
    noise: InputNoise | None = None
    moments: Float[Tensor, "clients moments trainable"] | None = None
    steps_taken: Int[Tensor, " clients"] | None = None
    rates: Float[Tensor, "clients steps"] | None = None
    seed_torch: Callable[[int], AbstractContextManager[None]] = lambda _row: nullcontext()
    private: PrivateSteps | None = None

    @property
    def num_steps(self) -> int:
        """The largest number of steps of any client."""
        return self.batch_sizes.shape[1]

    def rates_on(self, device: torch.device) -> Float[Tensor, "clients steps"] | None:
        """Return the rates on a device, to which they go in one copy instead of one a step."""
        if self.rates is None:
            return None
        return self.rates.to(device)

    def select_clients(self, rows: slice) -> "TrainingWork":
        """Return the training of some of the clients."""
        return replace(
            self,
            sample_indices=self.sample_indices[rows],
            batch_sizes=self.batch_sizes[rows],
            anchor=index_optional(self.anchor, rows),
            inputs=index_each(self.inputs, rows),
            draw_keys=index_optional(self.draw_keys, rows),
            augment=self.augment and replace(self.augment, keys=self.augment.keys[rows]),
            noise=self.noise and self.noise.select_clients(rows),
            moments=index_optional(self.moments, rows),
            steps_taken=index_optional(self.steps_taken, rows),
            rates=index_optional(self.rates, rows),
            seed_torch=lambda row: self.seed_torch((rows.start or 0) + row),
            private=self.private and self.private.select_clients(rows),
        )

    def single_step(self, step: int, query: int = 0) -> "TrainingWork":
        """Return one step as a training of its own, with its draws, without anchor and moments.

        Args:
            step: which.
            query: how many gradients of its batch were asked for before.
        """
        # The step becomes number 0 of the new training, so its keys already hold what the number
        # adds to them.
        only = slice(step, step + 1)
        return replace(
            self,
            sample_indices=self.sample_indices[:, only],
            batch_sizes=self.batch_sizes[:, only],
            anchor=None,
            prox=0.0,
            inputs=index_each(self.inputs, (slice(None), only)),
            draw_keys=None if self.draw_keys is None else step_keys(self.draw_keys, step),
            augment=self.augment and replace(self.augment, keys=self.augment.keys + step),
            noise=self.noise and replace(self.noise, keys=self.noise.keys + step),
            moments=None,
            steps_taken=None,
            rates=None,
            private=self.private and self.private.single_step(step, query),
        )

    def split_into_samples(
        self, members: Int[Tensor, " members"], step: int
    ) -> "tuple[TrainingWork, Int[Tensor, ' samples']]":
        """Return a step of some clients as trainings of one sample each.

        Args:
            members: the clients, on the CPU.
            step: the step.

        Returns:
            The trainings, of one step each, and the place among `members` of each one's client.
        """
        sizes = self.batch_sizes[members, step]
        # owner: a sample's client as a place among members; who: as a row.
        owner = torch.repeat_interleave(torch.arange(len(members)), sizes)
        # A sample's place in its batch: its number less that of the first sample of its client.
        place = torch.arange(len(owner)) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        device = self.samples.device
        owner, who, place = owner.to(device), members[owner].to(device), place.to(device)
        keys, augment, noise = self.draw_keys, self.augment, self.noise
        if keys is not None:
            keys = splitmix(step_keys(keys[who], step) + place)
        if augment is not None:
            augment = replace(augment, keys=splitmix(augment.keys[who] + step) + place)
        if noise is not None:
            noise = replace(noise, keys=noise.keys[who] + step, sigma=noise.sigma[who])
        inputs = {}
        for name, value in self.inputs.items():
            # One step for each sample, whose axis is that of steps.
            inputs[name] = value[who.to(value.device), step][:, None]
        work = replace(
            self,
            sample_indices=self.sample_indices[who, step, place][:, None, None],
            batch_sizes=torch.ones(len(owner), 1, dtype=torch.int64),
            anchor=None,
            prox=0.0,
            inputs=inputs,
            draw_keys=keys,
            augment=augment,
            noise=noise,
            moments=None,
            steps_taken=None,
            rates=None,
            private=None,
        )
        return work, owner

    def iterate_steps(self) -> Iterator[tuple[int, Int[Tensor, " members"], Batch]]:
        """Return each step, the clients that have batches of one size in it, and these batches."""
        steps, places = [], []
        for step in range(self.num_steps):
            for size, members in self.group_by_size(step):
                steps.append((step, size, members))
                places.append(self.sample_indices[members, step, :size])
        # All of them at once, so that what is on a disk is read ahead over the steps.
        read = self.samples.prepare_each(places)
        for (step, size, members), x in zip(steps, read, strict=True):
            yield step, members, self.gather_batch(members, step, size, x)

    def gather_batch(
        self,
        members: Int[Tensor, " members"],
        step: int,
        size: int,
        x: Float[Tensor, "members samples *features"] | None = None,
    ) -> Batch:
        """Return the batches of some clients in a step; `x` are their inputs, read before."""
        places = self.sample_indices[members, step, :size]
        values = index_each(self.inputs, (members, step))
        if self.draw_keys is not None:
            values[KEY] = step_keys(self.draw_keys[members], step)
        x = self.samples.prepare_inputs(places) if x is None else x
        if self.augment is not None:
            x = self.augment(x, members, step)
        if self.noise is not None:
            x = self.noise.add_to(x, members, step, places)
        return x, self.samples.prepare_targets(places), values

    def split_for_programs(self) -> "Iterator[tuple[slice, TrainingWork]]":
        """Split into trainings that a native program can do, with the rows of their clients.

        A program cannot call a function of Python: where one augments, the batches of some clients
        are made beforehand, and are the samples of the training.
        """
        if not isinstance(self.augment, FunctionAugmentation):
            yield slice(0, len(self.batch_sizes)), self
            return
        entries = math.prod((*self.sample_indices.shape[1:], *self.samples.input_shape))
        size = max(1, _PREPARED // max(1, entries))
        for start in range(0, len(self.batch_sizes), size):
            rows = slice(start, min(start + size, len(self.batch_sizes)))
            yield rows, self.select_clients(rows)._prepare_batches()

    def _prepare_batches(self) -> "TrainingWork":
        """Return this training with augmented batches, noise included, as its samples."""
        shape, samples = self.sample_indices.shape, self.samples
        x = torch.zeros(*shape, *samples.input_shape, dtype=samples.dtype)
        for step in range(self.num_steps):
            for size, members in self.group_by_size(step):
                x[members, step, :size] = self.gather_batch(members, step, size)[0]
        return replace(
            self,
            samples=RawSamples(
                x.flatten(0, 2), samples.y[self.sample_indices.flatten()], samples.dtype
            ),
            sample_indices=torch.arange(math.prod(shape)).reshape(shape),
            augment=None,
            noise=None,
        )

    def iterate_batches(self, row: int) -> Iterator[Batch]:
        """Return the batch of each step of one client, without the axis of members.

        Samples of several steps of equal size are gathered at once, since that costs as much as for
        one step.
        """
        member = torch.tensor([row], device=self.samples.device)
        pieces = list(self._split_steps(row))
        read = self.samples.prepare_each(self.sample_indices[row, steps, :n] for steps, n in pieces)
        for (steps, size), x in zip(pieces, read, strict=True):
            places = self.sample_indices[row, steps, :size]
            y = self.samples.prepare_targets(places)
            for number, step in enumerate(range(steps.start, steps.stop)):
                values = index_each(self.inputs, (row, step))
                if self.draw_keys is not None:
                    values[KEY] = step_keys(self.draw_keys[member], step)[0]
                own, at = x[number : number + 1], places[number : number + 1]
                if self.augment is not None:
                    own = self.augment(own, member, step)
                if self.noise is not None:
                    own = self.noise.add_to(own, member, step, at)
                yield own[0], y[number], values

    def _split_steps(self, row: int) -> Iterator[tuple[slice, int]]:
        """Return ranges of a client's steps with batches of equal size, and that size."""
        lengths = [size for size in self.batch_sizes[row].tolist() if size]
        start = 0
        while start < len(lengths):
            size = lengths[start]
            # So many steps that their inputs stay within `_GATHERED` entries, but at least one.
            most = start + max(
                1, min(_STEPS, _GATHERED // (size * max(1, math.prod(self.samples.input_shape))))
            )
            # A gather has one size of batch: a batch of another size begins a new one.
            stop = start
            while stop < min(most, len(lengths)) and lengths[stop] == size:
                stop += 1
            yield slice(start, stop), size
            start = stop

    def group_by_size(self, step: int) -> list[tuple[int, Int[Tensor, " members"]]]:
        """Group the clients that have a batch in a step by its size, so that no batch is padded."""
        return self._groups_by_step[step]

    @cached_property
    def _groups_by_step(self) -> list[list[tuple[int, Tensor]]]:
        """The groups of every step, whose members go to the samples' device at once."""
        steps = []
        for length in self.batch_sizes.T:
            groups = dict(group_equal_values(length))
            groups.pop(0, None)  # after a client's last step
            steps.append(groups)
        # One copy for all steps: a copy in each step would make the device wait.
        members = chain.from_iterable(groups.values() for groups in steps)
        there = iter(move_indices(list(members), self.samples.device))
        # zip takes from the groups of a step first, so that none of the next step is lost.
        return [list(zip(groups, there, strict=False)) for groups in steps]


@dataclass
class TrainingTotals:
    """What the trainings of the clients hosted here have cost so far.

    Args:
        seconds: spent in training.
        privacy: what private training has spent of each client's privacy.
    """

    seconds: float = 0.0
    privacy: PrivacyLedger = field(default_factory=PrivacyLedger)


def step_keys(keys: Int[Tensor, " clients"], step: int) -> Int[Tensor, " clients"]:
    """Return the keys of a step's draws from those of a training: 64 bits, wrapping."""
    # The product wraps at 64 bits and is read as signed, as native/steps.h computes it.
    away = step * _GOLDEN % (1 << 64)
    if away >> 63:
        away -= 1 << 64
    return keys + away


def group_equal_values(
    values: Int[Tensor, " entries"],
) -> Iterator[tuple[int, Int[Tensor, " places"]]]:
    """Return each value that occurs, in ascending order, and the places where it does.

    Example:
        >>> groups = group_equal_values(torch.tensor([5, 2, 5]))
        >>> [(value, places.tolist()) for value, places in groups]
        [(2, [1]), (5, [0, 2])]
    """
    for value in torch.unique(values).tolist():
        yield value, (values == value).nonzero().flatten()


def move_indices(
    parts: Sequence[Int[Tensor, " entries"]], device: torch.device
) -> list[Int[Tensor, " entries"]]:
    """Return index tensors on a device, to which they go in one copy."""
    if not parts:
        return []
    return list(torch.cat(list(parts)).to(device).split(list(map(len, parts))))


@dataclass(frozen=True)
class EvaluationPairs:
    """Pairs of a model and a set of samples on which it is measured.

    Args:
        samples: the data of the sets.
        sample_indices: indices of each set's samples in `samples`; ignored beyond its size.
        set_sizes: the size of each set.
        models: row of each pair's model in the table of models.
        sets: the set of each pair.
        noise: on the inputs of each set; the same for all models measured on it.
        draw_keys: the key of what forward passes on each set draw, the same for all models; None
            where nothing is drawn.
    """

    samples: RawSamples
    sample_indices: Int[Tensor, "sets width"]
    set_sizes: Int[Tensor, " sets"]
    models: Int[Tensor, " pairs"]
    sets: Int[Tensor, " pairs"]
    noise: InputNoise | None = None
    draw_keys: Int[Tensor, " sets"] | None = None

    def to_sample_device(self) -> "EvaluationPairs":
        """Return the same pairs with all but the sizes of sets on the samples' device."""
        device = self.samples.device
        noise = None if self.noise is None else self.noise.to(device)
        keys = None if self.draw_keys is None else self.draw_keys.to(device)
        return replace(
            self,
            sample_indices=self.sample_indices.to(device),
            models=self.models.to(device),
            sets=self.sets.to(device),
            noise=noise,
            draw_keys=keys,
        )

    def draw_inputs(
        self, sets: Int[Tensor, " members"], start: int, models: int
    ) -> dict[str, Int[Tensor, " models"]]:
        """Return the keys of forward passes of so many models on parts of sets.

        Args:
            sets: the sets, or one for all of the models.
            start: the number of the part's first sample within its set.
            models: how many.
        """
        if self.draw_keys is None:
            return {}
        return {KEY: splitmix(self.draw_keys[sets] + start).expand(models)}

    def prepare_each(
        self, sets: Int[Tensor, " members"], pieces: Sequence[Int[Tensor, "members _width"]]
    ) -> Iterator[Float[Tensor, "members _width *features"]]:
        """Return samples of some sets as the model takes them, piece by piece."""
        for x, places in zip(self.samples.prepare_each(pieces), pieces, strict=True):
            if self.noise is not None:
                x = self.noise.add_to(x, sets, 0, places)
            yield x


def first_equal_rows(rows: Float[Tensor, "rows params"]) -> Int[Tensor, " rows"]:
    """Return for each row the first row that equals it; a row with NaN may equal no other.

    Example:
        >>> first_equal_rows(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).tolist()
        [0, 1, 0]
    """
    # An expanded row, such as a shared first model.
    if len(rows) and rows.stride(0) == 0:
        return torch.zeros(len(rows), dtype=torch.int64)
    # The sum alone is the same for models that differ: the gradients of a softmax's logits add up to
    # zero, so that steps of gradient descent leave the sum of a linear model as it was.
    norms = torch.linalg.vector_norm(rows, dim=1)
    keys = list(zip(rows.sum(1).tolist(), norms.tolist(), strict=True))
    first, open_ = torch.arange(len(rows)), list(range(len(rows)))
    while open_:  # each time, rows with the same key are compared with the first of them
        # A NaN equals no key, so a row with one leads itself and is not compared.
        leader: dict[tuple[float, float], int] = {}
        pairs = [(row, leader.setdefault(keys[row], row)) for row in open_]
        later = [(row, other) for row, other in pairs if row != other]
        same = _compare_rows(rows, later)
        for (row, other), is_ in zip(later, same, strict=True):
            if is_:
                first[row] = other
        # Rows that differ in spite of equal keys look for another leader among themselves.
        open_ = [row for (row, _), is_ in zip(later, same, strict=True) if not is_]
    return first


def _compare_rows(rows: Tensor, pairs: Sequence[tuple[int, int]]) -> list[bool]:
    """Return whether the rows of each pair are equal; a device compares many at once."""
    if rows.device.type == "cpu":
        return [torch.equal(rows[one], rows[other]) for one, other in pairs]
    if not pairs:
        return []
    size = max(1, _MAX_COMPARED_ENTRIES // max(1, rows.shape[1]))
    one, other = torch.tensor(pairs).T.to(rows.device)
    found = []
    for a, b in zip(one.split(size), other.split(size), strict=True):
        found.append((rows[a] == rows[b]).all(1))
    return torch.cat(found).tolist()
