"""The interface of engines, which train and measure many models at once.

An engine is independent of clients, rounds and methods: it takes rows of the population's matrix
and work to do on them. Engines compute the same results at different speeds. The default `train`
and `measure_pairs` use `compute_gradients` and `forward`; an engine may implement the whole step
instead.
"""

import math
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional

from coterie._util.tensors import index_each, index_optional, select_rows
from coterie.engine._work import (
    Batch,
    EvaluationPairs,
    TrainingWork,
    group_equal_values,
    move_indices,
)
from coterie.engine.optim import RowOptimizer
from coterie.engine.precision import product_precision
from coterie.engine.privacy import clip_factors
from coterie.errors import CoterieError, ModelError, OutOfMemory, first_line
from coterie.functional.losses import CrossEntropy, SquaredError
from coterie.functional.metrics import LOSS
from coterie.functional.scores import mark_not_finite
from coterie.models.layout import Layout

Objective = Callable[[Tensor, Tensor], Tensor]
"""(outputs [samples ...], targets [samples ...]) -> one loss a sample; usually a `Loss`."""

MODULE_ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)
"""What a module of somebody else's raises where it cannot take what it is given."""


@contextmanager
def explain_module_errors(work: str) -> Iterator[None]:
    """Turn an error that a module raises into a ModelError.

    Engines try a module on a few samples before the first round. What it does with other numbers of
    samples is seen only later: a normalization without statistics takes two or more, for example.

    Args:
        work: what is done with the module, such as "in training".
    """
    try:
        yield
    except MODULE_ERRORS as error:
        frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        # An error from elsewhere is a fault of this package, which nobody should be asked to mend.
        is_of_module = torch.nn.Module._call_impl.__name__ in frames
        if isinstance(error, CoterieError) or OutOfMemory.matches(error) or not is_of_module:
            raise
        raise ModelError(f"the module fails {work}: {first_line(error)}") from error


# input entries of one evaluation call, which bounds the activations
# A device needs large calls to be busy; on a CPU larger ones than this only leave the caches.
_MAX_INPUT_ENTRIES = {"cpu": 1 << 20, "cuda": 1 << 26}
# samples of one call of one model on a CPU: the activations of a convolution stay in the cache
_SAMPLES_ONE_MODEL = 32
# numbers of models, one for each sample, that are held at once
_MAX_MODEL_ENTRIES = {"cpu": 1 << 22, "cuda": 1 << 28}
# samples of one call of many models; sums must not depend on how many they are
_SAMPLES_MANY_MODELS = {"cpu": 256, "cuda": 2048}


def _limit_of(limits: Mapping[str, int], device: torch.device) -> int:
    """Return the limit on a CPU, or on any other device."""
    return limits.get(device.type, limits["cuda"])


cross_entropy, squared_error = CrossEntropy(), SquaredError()


class Engine(ABC):
    """Runs one module over rows of parameters.

    Args:
        layout: how the module's tensors lie in a row.
        objective: the loss of each sample.
        precision: see `engine.precision.product_precision`.

    Attributes:
        metrics: what is measured: the loss, and what the objective says that it is judged by.
        modules: the modules for training and for evaluation.
        compile_seconds: time of compiling in this process; 0 when nothing was compiled, or the
            program was cached.
        reason: the engine, what it does, and why no faster one runs: a line for people.
    """

    name: ClassVar[str]
    description: ClassVar[str] = "an engine of its own"
    copies_rows: ClassVar[bool] = False
    """Whether `forward` computes with a copy of each row, so that nothing depends on where it lies."""
    reason: str = ""
    compile_seconds: float = 0.0
    # how many times smaller blocks are than asked for, since the memory did not hold them
    _block_divisor: int = 1

    def __init__(self, layout: Layout, objective: Objective, precision: str = "full") -> None:
        self.layout, self.objective, self.precision = layout, objective, precision
        self.metrics = metric_names(objective)
        self.modules: tuple[nn.Module, ...] = (layout.train_module, layout.eval_module)
        self._is_cross_entropy = objective == cross_entropy

    @abstractmethod
    def compute_gradients(
        self,
        rows: Float[Tensor, "clients params"],
        x: Float[Tensor, "clients samples *features"],
        y: Shaped[Tensor, "clients samples *targets"],
        inputs: Mapping[str, Shaped[Tensor, "clients *shape"]],
    ) -> tuple[
        Float[Tensor, " clients"],
        Float[Tensor, "clients trainable"],
        Float[Tensor, "clients state"],
    ]:
        """Return each client's mean loss, its gradient, and the new running statistics.

        Args:
            rows: a model for each client.
            x: a batch for each.
            y: its targets.
            inputs: values of the layout's input buffers, and of `KEY`.
        """

    @abstractmethod
    def forward(
        self,
        rows: Float[Tensor, "clients params"],
        x: Float[Tensor, "_clients samples *features"],
        inputs: Mapping[str, Shaped[Tensor, "clients *shape"]],
    ) -> Float[Tensor, "clients samples *outputs"]:
        """Return outputs in evaluation mode; `x` with one leading entry is for all rows."""

    def runs_one_by_one(self, device: torch.device) -> bool:
        """Return whether `forward` runs one model after another."""
        return False

    def limit_models(self, number: int, samples: int, device: torch.device) -> int:
        """Return how many of a number of models to train at once, as memory allows.

        Args:
            number: of models.
            samples: that each has in a step.
            device: where they are.
        """
        return number

    # ------------------------------------------------------------------ training

    def _product_precision(self, device: torch.device) -> AbstractContextManager[None]:
        """Set PyTorch's products for forward and backward passes."""
        # Autocast belongs around the forward pass alone: backward operations take its types.
        return product_precision("full" if self.precision == "bf16" else self.precision, device)

    def _mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        # For cross-entropy PyTorch's own mean is one call instead of two.
        if self._is_cross_entropy:
            return functional.cross_entropy(outputs, y)
        return self.objective(outputs, y).mean()

    def train(
        self, rows: Float[Tensor, "clients params"], work: TrainingWork, block: int
    ) -> Float[Tensor, "clients steps"]:
        """Train clients in place, `block` of them at once.

        Args:
            rows: the models, changed in place.
            work: batches, optimizer and the rest.
            block: number of clients trained at once.

        Returns:
            The loss of each step before its update, on the CPU; NaN where a client had no batch.
        """
        losses = rows.new_full(work.batch_sizes.shape, torch.nan)
        # Private training takes single samples.
        samples = 1
        if work.private is None and work.num_steps:
            samples = max(1, int(work.batch_sizes.max()))
        block = self.limit_models(block, samples, rows.device)
        start = 0
        while start < len(rows):
            step = max(1, block // self._block_divisor)
            part = slice(start, min(start + step, len(rows)))
            now = work.select_clients(part)
            changing = [rows[part]]
            if now.moments is not None:
                changing.append(now.moments)
            # A block that runs out of memory may have taken some steps: it starts again from these
            # copies.
            before = [tensor.clone() for tensor in changing]
            try:
                losses[part] = self._train_block(rows[part], now)
            except torch.OutOfMemoryError:
                # A block of one client cannot become smaller.
                if step == 1:
                    raise ModelError(
                        "the memory does not hold the training of one client: take a smaller batch"
                    ) from None
                for tensor, earlier in zip(changing, before, strict=True):
                    tensor.copy_(earlier)
                self._halve_blocks()
                continue
            start = part.stop
        # Once for all blocks: a device is waited for here, and not in each step.
        return losses.cpu()

    def _halve_blocks(self) -> None:
        """Halve the blocks from now on, since the last one did not fit into memory."""
        self._block_divisor *= 2
        torch.cuda.empty_cache()  # does nothing where CUDA was not used
        text = f"out of memory: blocks of clients are {self._block_divisor} times smaller "
        text += "from now on; no result changes"
        warnings.warn(text, stacklevel=4)

    def _train_block(self, rows: Tensor, work: TrainingWork) -> Tensor:
        trainable, private = self.layout.trainable, work.private
        optimizer = RowOptimizer(work.local, rows[:, :trainable], work.moments, work.steps_taken)
        losses = rows.new_full(work.batch_sizes.shape, torch.nan)
        rates = work.rates_on(rows.device)
        steps: Iterable[tuple[int, Tensor, Batch | None]] = work.iterate_steps()
        if private is not None:
            # A client whose Poisson batch is empty takes its step all the same, with noise alone.
            steps = ((step, private.active_clients(step), None) for step in range(work.num_steps))
        for step, chosen, batch in steps:
            if not len(chosen):
                continue
            # Members are distinct and in ascending order: as many as there are rows are all rows,
            # which are then trained in place, without copies.
            members, whole = chosen.to(rows.device), len(chosen) == len(rows)
            part, state = rows, optimizer
            if not whole:
                part, state = rows[members], optimizer.select_rows(members)
            if private is not None:
                loss, sums = self._sum_clipped_gradients(part, work, chosen, step, private.dp.clip)
                # Running statistics stay as they are.
                grads, buffers = private.add_noise(sums, chosen, step), part[:, trainable:]
            else:
                assert batch is not None
                loss, grads, buffers = self.compute_gradients(part, *batch)
            # The gradient of mu / 2 * ||w - anchor||^2 is mu * (w - anchor), on trained parameters
            # only. It says nothing of the samples, so it needs neither clip nor noise.
            if work.anchor is not None and work.prox:
                away = part[:, :trainable] - work.anchor[members, :trainable]
                grads = grads.add_(away, alpha=work.prox)
            rate = index_optional(rates, (members, step, None))
            state.step(part[:, :trainable], grads, step + 1, rate)
            # The optimizer does not move running statistics: the forward pass has made the new
            # ones.
            if self.layout.size > trainable:
                part[:, trainable:] = buffers
            losses[members, step] = loss.to(losses)
            if not whole:
                rows[members] = part
                optimizer.store_rows(members, state)
        return losses

    def _sum_clipped_gradients(
        self, rows: Tensor, work: TrainingWork, members: Tensor, step: int, clip: float
    ) -> tuple[Float[Tensor, " members"], Float[Tensor, "members trainable"]]:
        """Return each member's mean loss, NaN for an empty batch, and its clipped gradients' sum.

        Sums are taken sample by sample, so that they do not depend on how many gradients are held
        at once.
        """
        alone, owner = work.split_into_samples(members, step)
        sums = torch.zeros_like(rows[:, : self.layout.trainable])
        total = rows.new_zeros(len(rows))
        # Each sample needs a row of parameters and a gradient of its own.
        entries = _limit_of(_MAX_MODEL_ENTRIES, rows.device) // self._block_divisor
        size = max(1, entries // max(1, self.layout.size))
        size = self.limit_models(size, 1, rows.device)
        for start in range(0, len(owner), size):
            some = slice(start, start + size)
            loss, gradients = self.sample_gradients(rows[owner[some]], alone.select_clients(some))
            gradients.mul_(clip_factors(gradients, clip))
            sums.index_add_(0, owner[some], gradients)
            total.index_add_(0, owner[some], loss.to(total))
        return total / work.batch_sizes[members, step].to(total), sums

    def sample_gradients(
        self, rows: Float[Tensor, "samples params"], work: TrainingWork
    ) -> tuple[Float[Tensor, " samples"], Float[Tensor, "samples trainable"]]:
        """Return the loss of single samples, and its gradient in a model for each.

        Args:
            rows: the models; may be overwritten.
            work: one step of one sample for each; see `TrainingWork.split_into_samples`.
        """
        everybody = torch.arange(len(rows), device=rows.device)
        # Running statistics of single samples are dropped: private training does not move them.
        loss, gradients, _ = self.compute_gradients(rows, *work.gather_batch(everybody, 0, 1))
        return loss, gradients

    # ------------------------------------------------------------------ evaluation

    def measure_pairs(
        self,
        table: Float[Tensor, "models params"],
        pairs: EvaluationPairs,
        inputs: Mapping[str, Tensor],
        block: int,
    ) -> dict[str, Float[Tensor, " pairs"]]:
        """Return the mean of each metric for each pair; NaN for a set without samples.

        Args:
            table: the models.
            pairs: pairs of a model and a set to measure it on.
            inputs: values of the layout's input buffers, one per row of the table.
            block: number of models run at once.
        """
        alone, work = self.runs_one_by_one(table.device), pairs.to_sample_device()
        # A loss that joins samples is no mean over them, so parts of a set cannot be added up.
        if getattr(self.objective, "whole", False):
            return self._measure_joint_loss(table, pairs, inputs, block)
        # Totals may hold some blocks when the memory runs out, so a smaller block begins again at
        # zero.
        while True:
            totals = {name: table.new_zeros(len(pairs.models)) for name in self.metrics}
            step = 1 if alone else max(1, block // self._block_divisor)
            try:
                # Where models share sets, each set is prepared once for all of its models.
                shared = len(pairs.set_sizes) < len(pairs.models)
                if shared or (alone and not self.copies_rows):
                    self._measure_sets(table, work, pairs.sets, inputs, step, totals)
                else:
                    # Many models share the calls around their forward passes, one by one or not.
                    if alone:
                        step = max(1, self._max_entries(table) // max(1, self.layout.size))
                    self._measure_blocks(
                        table, work, pairs.set_sizes[pairs.sets], inputs, step, totals
                    )
                break
            except torch.OutOfMemoryError:
                # By then a call has one model and one sample.
                if self._block_divisor > _MAX_INPUT_ENTRIES["cuda"]:
                    raise ModelError(
                        "the memory does not hold the measurement of one model on one sample"
                    ) from None
                self._halve_blocks()
        # A set without samples gives 0 / 0, which is NaN.
        means = torch.stack(list(totals.values())) / pairs.set_sizes[pairs.sets].to(table)
        return dict(zip(totals, means.cpu(), strict=True))

    def _measure_sets(
        self,
        table: Tensor,
        pairs: EvaluationPairs,
        sets: Tensor,
        inputs: Mapping[str, Tensor],
        block: int,
        totals: dict[str, Tensor],
    ) -> None:
        """Prepare each set once, in pieces, and run every model on it; `sets` is on the CPU."""
        size, most = self._chunk_sizes(pairs, table)
        # On the CPU: to ask a device for the numbers of the sets would wait for it.
        order = torch.argsort(sets, stable=True)
        found, repeats = torch.unique_consecutive(sets[order], return_counts=True)
        who = order.to(table.device).split(repeats.tolist())
        for number, chosen in zip(found.tolist(), who, strict=True):
            everything = pairs.sample_indices[number, : int(pairs.set_sizes[number])]
            pieces = everything.split(size)
            read = pairs.prepare_each(pairs.sets[chosen[:1]], [places[None] for places in pieces])
            for piece, (places, x) in enumerate(zip(pieces, read, strict=True)):
                y = pairs.samples.prepare_targets(places)
                for part in chosen.split(min(block, most)):
                    models = pairs.models[part]
                    chosen_inputs = index_each(inputs, models)
                    chosen_inputs |= pairs.draw_inputs(
                        pairs.sets[chosen[:1]], piece * size, len(part)
                    )
                    outputs = self.forward(select_rows(table, models), x, chosen_inputs)
                    for name, value in self._sample_metrics(
                        outputs, y.expand(len(part), *y.shape)
                    ).items():
                        totals[name][part] += value.sum(1)

    def _measure_blocks(
        self,
        table: Tensor,
        pairs: EvaluationPairs,
        count: Tensor,
        inputs: Mapping[str, Tensor],
        block: int,
        totals: dict[str, Tensor],
    ) -> None:
        """Run a block of models at once, each on its own set; no set is padded."""
        size, most = self._chunk_sizes(pairs, table)
        groups = dict(group_equal_values(count))
        there = move_indices(list(groups.values()), table.device)
        for number, members in zip(groups, there, strict=True):
            # Totals of sets without samples stay 0, and 0 / 0 makes their mean NaN.
            if not number:
                continue
            for part in members.split(min(block, most)):
                models, sets = pairs.models[part], pairs.sets[part]
                rows = select_rows(table, models) if self.copies_rows else table[models]
                chosen = index_each(inputs, models)
                pieces = pairs.sample_indices[sets, :number].split(size, dim=1)
                read = pairs.prepare_each(sets, pieces)
                for piece, (places, x) in enumerate(zip(pieces, read, strict=True)):
                    drawn = pairs.draw_inputs(sets, piece * size, len(part))
                    outputs = self.forward(rows, x, {**chosen, **drawn})
                    for name, value in self._sample_metrics(
                        outputs, pairs.samples.prepare_targets(places)
                    ).items():
                        totals[name][part] += value.sum(1)

    def _chunk_sizes(self, pairs: EvaluationPairs, table: Tensor) -> tuple[int, int]:
        """Return how many samples of a set, whatever the block, and models one call takes."""
        entries = self._max_entries(table) // max(1, math.prod(pairs.samples.input_shape))
        # What a forward pass draws belongs to the samples of a call, which must then be as many in
        # every engine.
        piece = _SAMPLES_ONE_MODEL
        if pairs.draw_keys is None and not self.runs_one_by_one(table.device):
            piece = _limit_of(_SAMPLES_MANY_MODELS, table.device)
        size = max(1, min(piece, entries))
        return size, max(1, entries // size)

    def _max_entries(self, table: Tensor) -> int:
        return _limit_of(_MAX_INPUT_ENTRIES, table.device) // self._block_divisor

    def _sample_metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return each metric of every sample, NaN where no output is finite: [models, samples]."""
        models, samples = outputs.shape[:2]
        flat = outputs.reshape(models * samples, *outputs.shape[2:])
        wanted = targets.reshape(models * samples, *targets.shape[2:])
        found = [self.objective(flat, wanted)]
        if len(self.metrics) > 1:
            found.append(self.objective.measure_samples(flat, wanted))  # type: ignore[attr-defined]
        # the argmax of NaN is class 0, and an own loss may hide it: neither is a score
        lost = mark_not_finite(flat)
        values = {}
        for name, value in zip(self.metrics, found, strict=True):
            values[name] = value.to(outputs.dtype).add(lost).reshape(models, samples)
        return values

    def _measure_joint_loss(
        self, table: Tensor, pairs: EvaluationPairs, inputs: Mapping[str, Tensor], block: int
    ) -> dict[str, Tensor]:
        """Measure where a sample's loss depends on the other samples of its set."""
        totals = {}
        for name in self.metrics:
            # NaN stays where a set has no samples.
            totals[name] = torch.full((len(pairs.models),), torch.nan, dtype=table.dtype)
        for number, part, outputs in self.iterate_outputs(table, pairs, inputs, block):
            targets = pairs.samples.prepare_targets(
                pairs.sample_indices[number, : int(pairs.set_sizes[number])]
            )
            for pair, own in zip(part.tolist(), outputs, strict=True):
                for name, value in self._sample_metrics(own[None], targets[None]).items():
                    totals[name][pair] = value.mean().cpu()
        return totals

    def iterate_outputs(
        self,
        table: Float[Tensor, "models params"],
        pairs: EvaluationPairs,
        inputs: Mapping[str, Tensor],
        block: int,
    ) -> Iterator[tuple[int, Int[Tensor, " some"], Float[Tensor, "some samples *outputs"]]]:
        """Give the outputs of models on whole sets, set by set.

        Args:
            table: the models.
            pairs: pairs of a model and a set.
            inputs: values of the layout's input buffers, one per row of the table.
            block: number of models run at once.

        Yields:
            The number of a set, some of the pairs with it (their places among all pairs, on the
            CPU), and the outputs of their models on all of its samples, where the models are.
        """
        work, alone = pairs.to_sample_device(), self.runs_one_by_one(table.device)
        size, most = self._chunk_sizes(work, table)
        step = 1 if alone else max(1, min(block, most))
        for number in torch.unique(pairs.sets).tolist():
            who = (pairs.sets == number).nonzero().flatten()
            places = work.sample_indices[number, : int(pairs.set_sizes[number])]
            if not len(places):
                continue
            # `prepare_inputs` takes sets x places: here one set, whose samples all models share.
            of = torch.tensor([number], device=places.device)
            for part in who.split(step):
                models = pairs.models[part].to(table.device)
                chosen = index_each(inputs, models)
                found = []
                read = work.prepare_each(of, [some[None] for some in places.split(size)])
                for piece, x in enumerate(read):
                    drawn = work.draw_inputs(of, piece * size, len(part))
                    found.append(self.forward(table[models], x, {**chosen, **drawn}))
                yield number, part, torch.cat(found, 1)


def metric_names(objective: Objective) -> tuple[str, ...]:
    """Return what samples measure: the loss, and the metric that goes with it."""
    metric = getattr(objective, "metric", None)
    if metric is None:
        return (LOSS.name,)
    return LOSS.name, metric
