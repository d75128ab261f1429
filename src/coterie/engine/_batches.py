"""The batches of local training, drawn from each client's own stream."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.finite import not_finite
from coterie.engine.optim import LocalTraining
from coterie.functional import metrics
from coterie.rng import Rng


@dataclass(frozen=True)
class BatchPlan:
    """The batches of one local training.

    Args:
        sample_order: indices of each client's training samples in each step; -1 where its batch is
            shorter.
        batch_sizes: the size of each batch; 0 after a client's last step.
        last_epoch: the first step of each client's last epoch.
        poisson_steps: steps of each client, where batches are drawn by Poisson sampling and may be
            empty; None where every step has a batch.
    """

    sample_order: Int[Tensor, "clients steps batch"]
    batch_sizes: Int[Tensor, "clients steps"]
    last_epoch: Int[Tensor, " clients"]
    poisson_steps: Int[Tensor, " clients"] | None = None

    @property
    def num_steps(self) -> int:
        """The largest number of steps of any client."""
        return self.sample_order.shape[1]

    @property
    def active_steps(self) -> Bool[Tensor, "clients steps"]:
        """Which steps each client takes."""
        if self.poisson_steps is None:
            return self.batch_sizes > 0
        return torch.arange(self.num_steps) < self.poisson_steps[:, None]


def draw_batches(
    local: LocalTraining,
    samples: Int[Tensor, " clients"],
    ids: Int[Tensor, " clients"],
    rng: Rng,
    purpose: str,
) -> BatchPlan:
    """Draw the batches of one local training.

    Args:
        local: batch size, epochs or steps.
        samples: training samples of each hosted client.
        ids: their ids.
        rng: the streams of the round.
        purpose: names the stream, so that a second training in one round draws other batches.
    """
    if local.dp_settings is not None:
        return _draw_poisson_batches(local, samples, ids, rng, purpose)
    drawn, last = [], []
    streams = rng.iterate_generators(purpose, ids.tolist())
    for number, stream in zip(samples.tolist(), streams, strict=True):
        batches, first = _draw_client_batches(local, number, stream)
        drawn.append(batches)
        last.append(first)
    return BatchPlan(*_pad_batches(drawn), torch.tensor(last, dtype=torch.int64))


def _pad_batches(
    drawn: Sequence[Sequence[np.ndarray]],
) -> tuple[Int[Tensor, "clients steps batch"], Int[Tensor, "clients steps"]]:
    """Return the batches of each client as one table, padded with -1, and their sizes."""
    steps = max(map(len, drawn), default=0)
    width = max(map(len, chain.from_iterable(drawn)), default=1)
    # At least one column, since Poisson sampling may leave every batch empty.
    order = np.full((len(drawn), steps, max(1, width)), -1, dtype=np.int64)
    length = np.zeros((len(drawn), steps), dtype=np.int64)
    for row, batches in enumerate(drawn):
        for step, batch in enumerate(batches):
            order[row, step, : len(batch)] = batch
            length[row, step] = len(batch)
    return torch.from_numpy(order), torch.from_numpy(length)


def poisson_rate(local: LocalTraining, samples: int) -> float:
    """Return the probability with which Poisson sampling takes each sample in a step.

    Example:
        >>> local = LocalTraining(batch_size=8)
        >>> poisson_rate(local, 40), poisson_rate(local, 5)
        (0.2, 1.0)
    """
    return min(local.batch_size, samples) / max(1, samples)


def _draw_poisson_batches(
    local: LocalTraining,
    samples: Int[Tensor, " clients"],
    ids: Int[Tensor, " clients"],
    rng: Rng,
    purpose: str,
) -> BatchPlan:
    """Draw batches by Poisson sampling: each sample by a draw of its own, in as many steps."""
    sizes = samples.tolist()
    count = torch.tensor([count_steps(local, n) for n in sizes], dtype=torch.int64)
    # Steps of an epoch; a number of steps without epochs counts as one epoch.
    each = count
    if local.steps is None:
        each = count // max(1, local.epochs)
    drawn = []
    for n, client, number in zip(sizes, ids.tolist(), count.tolist(), strict=True):
        # One uniform draw for each step and sample: the sample is in the batch with probability
        # `poisson_rate`.
        inside = rng.generator(purpose, client).random((number, n)) < poisson_rate(local, n)
        drawn.append(list(map(np.flatnonzero, inside)))
    return BatchPlan(*_pad_batches(drawn), count - each, count)


def _draw_client_batches(
    local: LocalTraining, samples: int, stream: np.random.Generator
) -> tuple[list[np.ndarray], int]:
    """Return one client's batches and the first step of its last epoch."""
    size = min(local.batch_size, samples)

    # Another order in each pass: all samples are seen once before any is seen again.
    def draw_epoch() -> list[np.ndarray]:
        order = stream.permutation(samples)
        stop = samples // size * size if local.drop_last else samples
        return [order[start : start + size] for start in range(0, stop, size)]

    batches: list[np.ndarray] = []
    # A pass gives at least one batch, as size <= samples; the last pass may be used in part.
    if local.steps is not None:
        while len(batches) < local.steps:
            batches += draw_epoch()
        return batches[: local.steps], 0
    last = 0
    for _ in range(local.epochs):
        last = len(batches)
        batches += draw_epoch()
    return batches, last


def count_steps(local: LocalTraining, samples: int) -> int:
    """Return the number of optimizer steps of a client with a number of samples.

    Example:
        >>> count_steps(LocalTraining(epochs=2, batch_size=4), 9)
        6
    """
    if local.steps is not None:
        return local.steps
    size = min(local.batch_size, samples)
    if local.drop_last:
        return local.epochs * (samples // size)
    return local.epochs * -(-samples // size)  # rounded up: the last batch may be smaller


def smallest_batch_size(local: LocalTraining, samples: int) -> int:
    """Return the size of the smallest batch of a client with a number of samples.

    Example:
        >>> smallest_batch_size(LocalTraining(batch_size=4), 9)
        1
        >>> smallest_batch_size(LocalTraining(batch_size=4, drop_last=True), 9)
        4
    """
    size = min(local.batch_size, samples)
    rest = samples % max(1, size)
    # The smaller batch is the last of a pass: fewer steps than full batches do not reach it.
    reached = local.steps is None or local.steps > samples // max(1, size)
    if rest and reached and not local.drop_last:
        return rest
    return size


def last_epoch_mean(
    losses: Float[Tensor, "clients steps"], schedule: BatchPlan
) -> Float[Tensor, " clients"]:
    """Return the mean batch loss of each client's last epoch; NaN when it took no step."""
    inside = (torch.arange(schedule.num_steps) >= schedule.last_epoch[:, None]) & (
        schedule.batch_sizes > 0
    )
    # The losses of steps that were not taken are NaN; a client without steps gets 0 / 0, NaN.
    # Added one after another, since `sum` takes another order where another client takes more
    # steps: a client's mean must not depend on who is hosted with it.
    totals = torch.where(inside, losses, 0).cumsum(1)[:, -1:].sum(1)
    return totals / inside.sum(1)


def make_report(
    losses: Float[Tensor, "clients steps"],
    schedule: BatchPlan,
    samples: Int[Tensor, " clients"],
    models: Iterable[Float[Tensor, "clients params"]],
) -> dict[str, Tensor]:
    """Return the report of a local training; see `training.Trained`.

    Args:
        losses: of each step; NaN where none was taken.
        schedule: the batches.
        samples: processed by each client.
        models: that it led to; a client with NaN or infinity in one of them has diverged.
    """
    # NaN is a divergence only in a step with a batch: an empty Poisson batch has no loss.
    lost = torch.isinf(losses).any(1) | (losses.isnan() & (schedule.batch_sizes > 0)).any(1)
    for rows in models:
        lost |= not_finite(rows)
    return {
        metrics.LOSS.name: last_epoch_mean(losses, schedule),
        "losses": losses,
        "train_samples": samples,
        metrics.DIVERGED.name: lost,
    }
