"""Task: the model with the data of the clients hosted here. The only place where gradients are taken."""

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from coterie._util import pages
from coterie.data.federation import SPLITS, Federation
from coterie.data.source import is_images
from coterie.engine._augment import CropFlip
from coterie.engine._base import MODULE_ERRORS, metric_names
from coterie.engine._batches import (
    BatchPlan,
    count_steps,
    draw_batches,
    last_epoch_mean,
    poisson_rate,
    smallest_batch_size,
)
from coterie.engine._choice import default_block, make_engine
from coterie.engine._work import (
    EvaluationPairs,
    RawSamples,
    TrainingWork,
    first_equal_rows,
    not_finite,
)
from coterie.engine.device import check_device as check_device
from coterie.engine.noise import InputNoise
from coterie.engine.optim import LocalTraining, OptimizerState
from coterie.engine.precision import check_precision as check_precision
from coterie.engine.privacy import PrivacyLedger, PrivateQuery, PrivateSteps
from coterie.engine.stepwise import StepwiseTraining
from coterie.errors import ConfigError, ModelError, require
from coterie.exchange.base import Inbox
from coterie.functional import metrics
from coterie.functional.losses import Loss, cast_targets, default_loss
from coterie.functional.metrics import Metric, Undefined
from coterie.models.layout import (
    BUFFER_POLICIES,
    FunctionalBatchNorm,
    InputConversion,
    Layout,
    ModelSource,
    draw_initial_params,
    make_template,
    resolve_model,
)
from coterie.models.part import ParameterSharing
from coterie.rng import EVERYONE, Rng


@dataclass(frozen=True)
class SplitPositions:
    """Positions of the samples of one split in each client's row, padded with 0."""

    indices: Int[Tensor, "clients samples"]
    count: Int[Tensor, " clients"]


@dataclass
class Shared:
    """The shared part of all views of a task: the data, and results that are computed once."""

    federation: Federation
    samples: RawSamples  # every sample of every client, one after another
    tests: tuple[RawSamples, ...]
    positions: dict[str, SplitPositions]
    origins: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    # by split: models, losses; NaN: not yet
    scored: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    train_seconds: float = 0.0
    spent: PrivacyLedger = field(default_factory=PrivacyLedger)


def find_positions(split: Int[Tensor, "clients samples"], wanted: int) -> SplitPositions:
    """Find the samples of one split.

    Args:
        split: the split of each sample.
        wanted: its number.
    """
    chosen = split == wanted
    count = chosen.sum(1)
    order = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)[
        :, : max(1, int(count.max()))
    ]
    inside = torch.arange(order.shape[1]) < count[:, None]
    return SplitPositions(torch.where(inside, order, 0), count)


def _find_input_conversion(
    module: nn.Module, federation: Federation, dtype: torch.dtype
) -> InputConversion:
    """Return what becomes of an input before the module takes it.

    Whole numbers stay whole for a module that can take them (an embedding needs them), and are
    numbers of `dtype` for others, such as a linear layer.
    """
    x = federation.x[0, :2]
    whole = not (federation.parts or x.is_floating_point() or is_images(x[0]))
    if not whole:
        return InputConversion(federation.parts)
    layout = Layout(module, dtype, InputConversion(whole=True))
    try:
        with torch.no_grad():
            layout.eval_module(x)
    except MODULE_ERRORS:
        return InputConversion()
    return layout.arguments


@dataclass
class Carried:
    """The state of the optimizers of the clients of a round: what trainings start from, and what they leave."""

    before: OptimizerState
    after: OptimizerState | None = None  # a copy, made when the first training ends

    def leave(
        self, rows: Tensor, track: int, moments: Tensor, taken: Tensor, initial: float = 0.0
    ) -> None:
        """Take the state of some clients' optimizers after a training; who diverged starts afresh."""
        if self.after is None:
            self.after = OptimizerState(self.before.values.clone(), self.before.taken.clone())
        lost = not_finite(moments.flatten(1))
        moments[lost] = initial
        self.after.values[rows, track] = moments
        self.after.taken[rows, track] = taken.masked_fill(lost, 0)


__all__ = ["LocalTraining", "Task", "not_finite"]

_COMPLETED = 1 << 24  # numbers of received models that are completed at once

InitMode = Literal["shared", "per_client", "given"]


class Task:
    """A model and the data of the clients hosted here.

    Args:
        federation: the hosted rows, without truth (see `Federation.host`).
        model: a name of `models.NETS`, an nn.Module, or a factory of modules.
        init: "shared": one model drawn for all; "per_client": one drawn for each; "given": the
            module's own values.
        buffers: what a merge does with BatchNorm statistics: "average" mixes them like parameters,
            "local" keeps each client's own, "reset" restores the initial ones.
        shared: patterns of the tensors that clients share; everything when empty. See
            `models.part.match_patterns`.
        similarity_on: patterns of the tensors in which models are compared, of those that are
            trained and shared.
        home: (layout) -> patterns of the tensors that stay at home beside.
        owner: whose wish `home` is, for messages.
        engine: "auto" or a name of `engine.ENGINES`.
        block: how many clients are trained at once; chosen from the size of the model when None. It
            changes the speed, never the result.
        dtype: floating-point type of models and inputs.
        device: where models and data live; ids, counts, losses and other reports are on the CPU.
        precision: of the products in training and measuring: "full", "tf32" or "bf16"; see
            `engine.precision`.
        cuda_graphs: capture the steps of the vmap engine and replay them, on a CUDA device.
        loss: what is minimized; cross-entropy for classes and squared error for numbers when None.
        metrics: what `evaluate` measures beside the loss and the metric that goes with it.
        clusters: planted cluster of each hosted client, for methods that declare that they need it.
        expected: number of training samples in all, so that "auto" compiles only where that pays.
        batch_size: samples of a client's step, so that "auto" batches clients only where that pays.
        own_optimizer: `LocalTraining.custom_optimizer`, which only the loop engine runs.
        rounds: of the run, for learning-rate schedules that run over all of them.
        pool: the task of one client that has everybody's samples, for methods that declare that
            they need it.
        secret: seed of the draws that make training private (who is in a batch, and the noise), 0
            or larger; that of the run when None, which is for simulations alone: whoever knows it
            can take the noise off again.

    Attributes:
        ids: the hosted clients, in the order of all rows.
        samples: training samples of each, as floats: the $n_i$ of the papers.
        objective: the loss of each sample.
        metrics: what `evaluate` measures further.
        layout: how the model's tensors lie in a row.
        part: which columns of a row are shared, stay at home, and are compared.
    """

    def __init__(
        self,
        federation: Federation,
        model: ModelSource,
        *,
        init: InitMode = "shared",
        buffers: str = "average",
        shared: Sequence[str] = (),
        similarity_on: Sequence[str] = (),
        home: Callable[[Layout], Sequence[str]] | None = None,
        owner: str = "the method",
        engine: str = "auto",
        block: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        precision: str = "full",
        cuda_graphs: bool = False,
        loss: Loss | None = None,
        metrics: Sequence[Metric] = (),
        clusters: Int[Tensor, " clients"] | None = None,
        expected: float | None = None,
        batch_size: int | None = None,
        own_optimizer: str | None = None,
        rounds: int | None = None,
        pool: "Task | None" = None,
        secret: int | None = None,
    ) -> None:
        require(
            init in ("shared", "per_client", "given"),
            "init",
            init,
            "'shared', 'per_client' or 'given'",
        )
        require(
            buffers in BUFFER_POLICIES, "buffers", buffers, f"one of {', '.join(BUFFER_POLICIES)}"
        )
        require(block is None or block >= 1, "block", block, "at least 1")
        check_device(device)
        check_precision(precision, cuda_graphs, device, dtype)
        federation.validate()
        self.model = resolve_model(model, federation.features, federation.outputs)
        module = make_template(self.model)
        self.objective = loss or default_loss(federation.y.flatten(0, 1), federation.classes)
        self.layout = Layout(module, dtype, _find_input_conversion(module, federation, dtype)).to(
            device
        )
        self.sharing = ParameterSharing.from_patterns(
            self.layout, shared, similarity_on, () if home is None else home(self.layout), owner
        )
        self.init_mode, self.buffers, self.device, self.dtype = init, buffers, device, dtype
        self.ids, self.population, self.classes = (
            federation.ids,
            federation.population,
            federation.classes,
        )
        self.clusters = clusters
        where = {name: find_positions(federation.split, number) for name, number in SPLITS.items()}

        def samples(x: Tensor, y: Tensor) -> RawSamples:
            targets = cast_targets(self.objective, y, dtype).to(device)
            return RawSamples(x.to(device), targets, dtype, federation.mean, federation.std)

        everything = samples(federation.x.flatten(0, 1), federation.y.flatten(0, 1))
        tests = tuple(samples(test.x, test.y) for test in federation.tests)
        self._shared = Shared(federation, everything, tests, where)
        self._at = torch.arange(len(federation))
        self._carried: tuple[Carried, Tensor] | None = None  # with the row of each client in it
        self._rng = Rng(0)
        self._fixed = False  # first models are the module's own values
        self.num_samples = where["train"].count.to(dtype)
        probe = torch.arange(8) % max(1, len(everything))
        x, y = everything.prepare_inputs(probe), everything.prepare_targets(probe)
        self._check_outputs(x)
        self.metrics = tuple(one for one in metrics if one.name not in metric_names(self.objective))
        for metric in self.metrics:
            self.objective.check_metric_fits(metric, y)
        self.engine = make_engine(
            engine,
            self.layout,
            self.objective,
            x,
            y,
            expected,
            batch_size=batch_size,
            precision=precision,
            cuda_graphs=cuda_graphs,
            custom_optimizer=own_optimizer,
        )
        self.rounds, self._pool, self._secret = rounds, pool, secret
        self.block = block or (
            1 if self.engine.name == "loop" else default_block(self.layout, device)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def _check_outputs(self, x: Tensor) -> None:
        """Refuse outputs and targets that the loss does not take; a module that fails is left to the engines."""
        try:
            with torch.no_grad():
                outputs = self.layout.eval_module(x)
        except MODULE_ERRORS:
            return
        if self.objective.targets == "class" and outputs.shape[-1] < self.classes:
            raise ModelError(
                f"the module has {outputs.shape[-1]} outputs; expected {self.classes}, one a class"
            )
        for samples in (self._shared.samples, *self._shared.tests):
            if len(samples):
                self.objective.check_data(outputs, samples.y)

    def check_batches(self, local: LocalTraining) -> None:
        """Refuse clients one of whose batches holds one sample, where the module normalizes over batches.

        Raises:
            ModelError: with the client, and what to do.
        """
        counts = self.count_samples("train").tolist()
        alone = [
            row for row, samples in enumerate(counts) if smallest_batch_size(local, samples) == 1
        ]
        if not alone or self._takes_one():
            return
        name, samples = (
            self._shared.federation.client_name(int(self._at[alone[0]])),
            counts[alone[0]],
        )
        more = f" ({len(alone) - 1} more like it)" if len(alone) > 1 else ""
        needs, other = (
            "batch normalization needs two or more",
            "a model without it (nn.GroupNorm, nn.LayerNorm)",
        )
        if local.batch_size == 1:
            raise ModelError(
                f"local.batch_size is 1, and {needs} samples a batch: choose a larger one, or {other}"
            )
        if samples == 1:
            raise ModelError(
                f"{name} has one training sample{more}, and {needs} a batch: leave it out, or take {other}"
            )
        raise ModelError(
            f"{name} has {samples} training samples, so its last batch of local.batch_size = {local.batch_size} holds "
            f"one{more}, and {needs}: set local.drop_last = true, choose another batch size, or take {other}"
        )

    def check_private(self, local: LocalTraining) -> None:
        """Refuse private training of what has no gradient of single samples, and a delta that says nothing.

        Raises:
            ModelError: for batch normalization, or a loss that joins the samples of a batch.
            ConfigError: for a delta of 1 / training samples of a client, or more.
        """
        if local.dp_settings is None:
            return
        for name, part in self.layout.train_module.named_modules():
            kind = type(part).__name__.removeprefix("Returned")
            joins = isinstance(part, FunctionalBatchNorm | nn.modules.batchnorm._BatchNorm)
            if joins or (
                isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats
            ):
                raise ModelError(
                    f"local.dp needs the gradient of each sample, and {kind} {name!r} joins samples: take nn.GroupNorm "
                    "or nn.LayerNorm"
                )
        if self.objective.whole:
            raise ModelError(
                f"local.dp needs a loss of each sample, and loss {self.objective.kind!r} joins those of a batch: take "
                "another loss, or leave dp out"
            )
        most, delta = int(self.count_samples("train").max()), local.dp_settings.delta
        if delta * most >= 1:
            raise ConfigError(
                f"dp.delta is {delta:g}; expected less than 1 / {most}, the most training samples of a client: with "
                "more, to publish a sample at random would count as private"
            )

    def _takes_one(self) -> bool:
        """Whether the module trains on a batch of one sample."""
        try:
            with torch.no_grad():
                copy.deepcopy(self.layout.train_module)(
                    self._shared.samples.prepare_inputs(torch.zeros(1, dtype=torch.int64))
                )
        except ValueError as error:
            return "more than one value a channel" not in str(error)
        except MODULE_ERRORS:  # left to the engines
            return True
        return True

    @property
    def federation(self) -> Federation:
        """The data of all clients that this process hosts, without truth."""
        return self._shared.federation

    @property
    def privacy_ledger(self) -> PrivacyLedger:
        """What private training has spent of each hosted client's privacy so far, all views of this task together."""
        return self._shared.spent

    @property
    def train_seconds(self) -> float:
        """Seconds spent in `train` so far, all views of this task together."""
        return self._shared.train_seconds

    def count_samples(self, split: str) -> Int[Tensor, " clients"]:
        """Return how many samples each hosted client has in a split."""
        return self._shared.positions[split].count[self._at]

    def count_test_samples(self) -> Int[Tensor, " clients"]:
        """Return how many samples the test set that serves each hosted client has ($m_k$)."""
        sizes = torch.tensor([len(test) for test in self._shared.tests])
        return sizes[self._shared.federation.test_of[self._at]]

    def select_clients(self, rows: Int[Tensor, " select_clients"]) -> "Task":
        """Return a view of some of the hosted clients; the data are not copied."""
        part = copy.copy(self)
        part._at = self._at[rows]
        part.ids, part.num_samples = self.ids[rows], self.num_samples[rows]
        if self._carried is not None:
            part._carried = self._carried[0], self._carried[1][rows]
        part.clusters = None if self.clusters is None else self.clusters[rows]
        return part

    def first_clients_alone(self, count: int) -> "Task":
        """Return a view of the first hosted clients as if there were no others; only shapes may depend on it."""
        part = self.select_clients(torch.arange(count))
        part.ids, part.population = torch.arange(count), count
        part._fixed = True
        return part

    def for_round(self, rng: Rng) -> "Task":
        """Return a view for the evaluations of a round: noise that is drawn at every access depends on the round."""
        view = copy.copy(self)
        view._rng = rng
        return view

    # ------------------------------------------------------------------ models

    def initial_models(self, rng: Rng) -> Float[Tensor, "clients params"]:
        """Return the first model $w^0$ of each hosted client; it does not depend on the round of `rng`."""
        return self.origin(rng)

    def origin(self, rng: Rng) -> Float[Tensor, "clients params"]:
        """Return the first models again; with a shared start, a view of one row."""
        if self._fixed:
            return (
                self.layout.flatten_rewritten(self.layout.train_module)
                .to(self.device)
                .expand(len(self), -1)
            )
        key = (rng.seed, self.init_mode)
        if self.init_mode != "per_client":
            if key not in self._shared.origins:
                self._shared.origins[key] = self._draw(rng.at_round(-1), EVERYONE)
            return self._shared.origins[key].expand(len(self), -1)
        return torch.stack([self._draw(rng.at_round(-1), client) for client in self.ids.tolist()])

    def _draw(self, rng: Rng, client: int) -> Tensor:
        if self.init_mode == "given":
            return self.layout.flatten_rewritten(self.layout.train_module).to(self.device)
        return draw_initial_params(self.model, self.layout, rng, client).to(self.device)

    def draw_models(self, rng: Rng, count: int) -> Float[Tensor, "clusters params"]:
        """Return independently drawn first models, the same in every process; the first of them is $w^0$.

        With `init="given"` the first has the module's own values and the others are drawn.
        """
        first = self._draw(rng.at_round(-1), EVERYONE)
        others = [
            draw_initial_params(self.model, self.layout, rng.at_round(-1), purpose=f"init.{c}")
            for c in range(1, count)
        ]
        return torch.stack([first, *(row.to(self.device) for row in others)])

    def apply_buffer_policy(
        self, before: Float[Tensor, "clients params"], merged: Float[Tensor, "clients params"]
    ) -> Float[Tensor, "clients params"]:
        """Apply the policy for BatchNorm statistics to a merge that led from `before` to `merged`.

        What stays at home, statistics or parameters, is as before.
        """
        start = self.layout.trainable
        if self.buffers == "average" or start == self.layout.size:
            return self.sharing.keep_local(before, merged)
        own = before[:, start:]
        if self.buffers == "reset":
            own = (
                self.layout.flatten_rewritten(self.layout.train_module)[start:]
                .to(merged)
                .expand(len(merged), -1)
            )
        return self.sharing.keep_local(before, torch.cat([merged[:, :start], own], dim=1))

    # ------------------------------------------------------------------ data

    def _places(self, split: str) -> Int[Tensor, "clients samples"]:
        """Return the indices of each hosted client's samples of a split among all samples."""
        width = self._shared.federation.split.shape[1]
        return self._at[:, None] * width + self._shared.positions[split].indices[self._at]

    def class_counts(self) -> Int[Tensor, "clients classes"]:
        """Return how many training samples of each class every hosted client has; no columns for regression."""
        if not self.classes:
            return torch.zeros(len(self), 0, dtype=torch.int64)
        inside = self._shared.federation.split[self._at] == SPLITS["train"]
        labels = torch.where(
            inside, self._shared.federation.y[self._at].to(torch.int64), self.classes
        )
        counts = torch.zeros(len(self), self.classes + 1, dtype=torch.int64)
        return counts.scatter_add_(1, labels, torch.ones_like(labels))[:, : self.classes]

    # ------------------------------------------------------------------ training

    def carrying(self, moments: OptimizerState | None) -> "Task":
        """Return a view whose clients continue from an optimizer state, if the local training keeps one.

        All its trainings start from that state; what they leave is in `moments` of the view.

        Args:
            moments: of the hosted clients; not changed. None for fresh ones.
        """
        view = copy.copy(self)
        view._carried = None if moments is None else (Carried(moments), torch.arange(len(self)))
        return view

    @property
    def moments(self) -> OptimizerState | None:
        """The state of these clients' optimizers after the trainings of this view and of its rows; None if not kept."""
        if self._carried is None:
            return None
        carried, rows = self._carried
        left = carried.after or carried.before
        return (
            left
            if len(rows) == len(left.taken)
            else OptimizerState(left.values[rows], left.taken[rows])
        )

    def init_optimizer_state(self, local: LocalTraining, tracks: int = 1) -> OptimizerState:
        """Return the initial state of the optimizers.

        Args:
            local: the optimizer.
            tracks: how many models each client trains in a round.
        """
        like = torch.empty(1, dtype=self.dtype, device=self.device).expand(
            len(self), self.layout.trainable
        )
        return OptimizerState.initial(local, tracks, like)

    def count_steps(self, local: LocalTraining) -> int:
        """Return the most optimizer steps any hosted client takes in one local training."""
        return max((count_steps(local, int(n)) for n in self.num_samples), default=0)

    def train(
        self,
        params: Float[Tensor, "clients params"],
        rng: Rng,
        local: LocalTraining,
        *,
        anchor: Float[Tensor, "clients params"] | None = None,
        prox: float = 0.0,
        inputs: Mapping[str, Shaped[Tensor, "clients steps *shape"]] | None = None,
        purpose: str = "batches",
        track: int = 0,
        in_place: bool = False,
    ) -> tuple[Float[Tensor, "clients params"], dict[str, Tensor]]:
        r"""Train every hosted client on its own training data.

        Optimizers start fresh, unless `local.persistent_client_optimizer` is set and this view
        carries their state.

        Args:
            params: the models to start from; not changed, unless `in_place`.
            rng: the streams of the round.
            local: epochs, batches, optimizer.
            anchor: models of the proximal term; needed when `prox` is not 0.
            prox: weight $\mu$ of the proximal term $\frac{\mu}{2} \lVert w - anchor \rVert^2$ on
                trained parameters.
            inputs: values of the layout's input buffers in every step.
            purpose: names the stream of batch orders; a second training in one round takes another
                name.
            track: which of the client's models this is, where optimizers go on from their state.
            in_place: change `params` instead of a copy, which saves memory; its rows lie apart.

        Returns:
            The new models, and a report: `loss` (mean batch loss of the last epoch), `losses` (of
            each step, before its update; NaN after a client's last step), `train_samples`
            (processed), and `diverged` (a loss or a parameter is not finite).
        """
        if inputs is not None and (unknown := set(inputs) - set(self.layout.inputs)):
            known = list(self.layout.inputs)
            raise ModelError(
                f"the module has no input buffer {sorted(unknown)[0]!r}; it has {known}"
            )
        started = time.perf_counter()
        schedule = draw_batches(
            local, self.count_samples("train"), self.ids, self._hidden(rng, local), purpose
        )
        moments, taken = self._kept(local, track)
        work = replace(
            self._training(rng, local, schedule, purpose, inputs),
            anchor=anchor if prox else None,
            prox=prox,
            moments=moments,
            steps_taken=taken,
        )
        out = params.detach() if in_place else pages.copy(params.detach())
        losses = self.engine.train(out, work, self.block)
        stepped = schedule.batch_sizes > 0
        lost = not_finite(out) | torch.isinf(losses).any(1) | (losses.isnan() & stepped).any(1)
        info = {
            metrics.LOSS.name: last_epoch_mean(losses, schedule),
            "losses": losses,
            "train_samples": schedule.batch_sizes.sum(1),
            metrics.DIVERGED.name: lost,
        }
        if self._carried is not None and moments is not None and taken is not None:
            carried, rows = self._carried
            carried.leave(
                rows,
                track,
                moments,
                taken + schedule.active_steps.sum(1),
                local.initial_accumulator_value,
            )
        self._use(local, schedule.active_steps.sum(1), 1)
        self._shared.train_seconds += time.perf_counter() - started
        return out, info

    def _training(
        self,
        rng: Rng,
        local: LocalTraining,
        schedule: BatchPlan,
        purpose: str,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> TrainingWork:
        """Return a local training as engines take it, from a fresh optimizer; see `train`."""
        noise = self._noise(rng, f"{purpose}.noise")
        order = schedule.sample_order.clamp(min=0)
        places = self._places("train").gather(1, order.flatten(1)).reshape(order.shape)
        return TrainingWork(
            self._shared.samples,
            places.to(self.device),
            schedule.batch_sizes,
            local,
            inputs=inputs or {},
            dropout_keys=(self._keys(rng, f"{purpose}.dropout"), self.layout.keys)
            if self.layout.keys
            else None,
            augment=self._augment(local, rng, purpose),
            noise=None if noise is None else noise.to(self._shared.samples.device),
            rates=local.learning_rates(
                schedule.active_steps.to(torch.int64), rng.round, self.rounds
            ),
            seed_torch=lambda row: rng.temporary_torch_seed(
                f"{purpose}.torch", int(self.ids[row]), self.device
            ),
            private=self._private(rng, local, schedule, purpose),
        )

    def _hidden(self, rng: Rng, local: LocalTraining) -> Rng:
        """Return the streams of which batches and noise are drawn."""
        return (
            rng
            if local.dp_settings is None or self._secret is None
            else replace(rng, seed=self._secret)
        )

    def _private(
        self, rng: Rng, local: LocalTraining, schedule: BatchPlan, purpose: str
    ) -> PrivateSteps | None:
        if local.dp_settings is None or schedule.poisson_steps is None:
            return None
        self.check_private(local)
        hidden, size = self._hidden(rng, local), self.layout.trainable

        def normal(row: int, step: int, query: int) -> np.ndarray:
            stream = hidden.generator(f"{purpose}.dp.{step}.{query}", int(self.ids[row]))
            return stream.standard_normal(size)

        expected = self.count_samples("train").clamp(max=local.batch_size).double()
        return PrivateSteps(local.dp_settings, expected, schedule.poisson_steps, normal)

    def _use(self, local: LocalTraining, times: Int[Tensor, " clients"], number: int) -> None:
        """Count so many batches of each client of which a private gradient was released, the `number`-th of it."""
        if local.dp_settings is None:
            return
        noise, spent = local.dp_settings.noise_multiplier, self._shared.spent
        for client, samples, often in zip(
            self.ids.tolist(), self.count_samples("train").tolist(), times.tolist(), strict=True
        ):
            share = poisson_rate(local, samples)
            spent.add_uses(client, PrivateQuery(share, noise, number), often)
            if number > 1:
                spent.add_uses(client, PrivateQuery(share, noise, number - 1), -often)

    def train_stepwise(
        self,
        rng: Rng,
        local: LocalTraining,
        *,
        purpose: str = "batches",
        only: Bool[Tensor, " trainable"] | None = None,
    ) -> StepwiseTraining:
        """Return a local training whose steps a method takes itself, gradient by gradient.

        For methods whose local work is not `train`'s: several models that move together, a gradient
        at another point than the model that it moves, a part of the parameters. Engines agree in it
        as they do in `train`, which is faster where it does.

        Args:
            rng: the streams of the round.
            local: epochs, batches, optimizer.
            purpose: names the stream of batch orders; a second training in one round takes another
                name.
            only: which trained parameters the steps move; all when None.

        Raises:
            ConfigError: for an optimizer that is given by its import path.

        Example:
            FedAvg's local training, step by step:

                steps = task.stepwise(rng, local)
                for step in range(steps.count):
                    steps.descend(params, steps.gradient(params, step), step)
                info = steps.report(params)
        """
        schedule = draw_batches(
            local, self.count_samples("train"), self.ids, self._hidden(rng, local), purpose
        )

        def spent(seconds: float) -> None:
            self._shared.train_seconds += seconds

        def leave(track: int, moments: Tensor, taken: Tensor) -> None:
            if self._carried is not None:
                carried, rows = self._carried
                carried.leave(rows, track, moments, taken, local.initial_accumulator_value)

        return StepwiseTraining(
            self.engine,
            self._training(rng, local, schedule, purpose),
            self.block,
            schedule,
            lambda step, row: rng.temporary_torch_seed(
                f"{purpose}.torch.{step}", int(self.ids[row]), self.device
            ),
            spent,
            leave,
            lambda track: self._kept(local, track),
            lambda step, number: self._use(
                local, schedule.active_steps[:, step].to(torch.int64), number
            ),
            only,
        )

    def train_pooled(
        self, params: Float[Tensor, "1 params"], rng: Rng, local: LocalTraining
    ) -> tuple[Float[Tensor, "1 params"], dict[str, Tensor]]:
        """Train one model on the training data of all clients of the population; see `train`.

        Where optimizers go on from their state, that of the first of these clients is meant, and
        all are left the same.
        """
        pool = self._pooled
        if self._carried is not None:
            carried, rows = self._carried
            pool = pool.carrying(
                OptimizerState(carried.before.values[rows[:1]], carried.before.taken[rows[:1]])
            )
        started = time.perf_counter()
        out, info = pool.train(params, rng, local)
        self._shared.spent.charge_clients(pool.privacy_ledger, self.ids.tolist())
        self._shared.train_seconds += time.perf_counter() - started
        if self._carried is not None and (left := pool.moments) is not None:
            carried, rows = self._carried
            number = len(rows)
            carried.leave(
                rows,
                0,
                left.values[:, 0].expand(number, -1, -1).clone(),
                left.taken[:, 0].expand(number),
            )
        return out, info

    @property
    def num_pooled_samples(self) -> int:
        """How many training samples there are at all clients of the population together."""
        return int(self._pooled.num_samples.sum())

    @property
    def _pooled(self) -> "Task":
        if self._pool is None:
            raise ConfigError(
                "this method needs the data of all clients in one place; there is no such place here"
            )
        return self._pool

    def _keys(self, rng: Rng, purpose: str) -> Int[Tensor, " clients"]:
        """Return the keys of the clients' draws for a purpose, where the samples are."""
        return rng.draw_keys(purpose, self.ids).to(self.device)

    def _noise(self, rng: Rng, purpose: str) -> InputNoise | None:
        federation = self._shared.federation
        if federation.noise is None:
            return None
        return InputNoise(
            rng.draw_keys(purpose, self.ids), federation.noise[self._at], federation.split.shape[1]
        )

    def _kept(self, local: LocalTraining, track: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return a copy of the state of each client's optimizer, and its steps so far, if it keeps one."""
        if not local.persistent_client_optimizer:
            return None, None
        if self._carried is None:
            moments, rows = self.init_optimizer_state(local, track + 1), torch.arange(len(self))
        else:
            moments, rows = self._carried[0].before, self._carried[1]
        return moments.values[rows, track].contiguous(), moments.taken[rows, track]

    def _augment(self, local: LocalTraining, rng: Rng, purpose: str) -> CropFlip | None:
        if local.augment == "none":
            return None
        samples = self._shared.samples
        if len(samples.input_shape) != 3:
            raise ModelError(
                f"local.augment is {local.augment!r}; it takes images, found shape {samples.input_shape}"
            )
        return CropFlip(self._keys(rng, f"{purpose}.augment"), local.padding, samples.black_pixel())

    # ------------------------------------------------------------------ evaluation

    def loss(
        self,
        params: Float[Tensor, "clients params"],
        split: str,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, " clients"]:
        """Return the mean loss of each client's model on its own data; NaN for a client without such data."""
        return self.evaluate_split(params, split, inputs)[metrics.LOSS.name]

    def evaluate_split(
        self,
        params: Float[Tensor, "clients params"],
        split: str,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return the loss of each client's model on its own data, and what it is judged by. No random draw is made."""
        return self._measure(
            params, torch.arange(len(self)), torch.arange(len(self)), split, inputs
        )

    def sample_losses(
        self, params: Float[Tensor, "clients params"], split: str = "train"
    ) -> Float[Tensor, "clients samples"]:
        """Return the loss of each client's model on each sample of its own, on the CPU; NaN behind its last sample."""
        places, counts, everybody = (
            self._places(split),
            self.count_samples(split),
            torch.arange(len(self)),
        )
        pairs = EvaluationPairs(self._shared.samples, places, counts, everybody, everybody)
        found = torch.full(places.shape, torch.nan, dtype=self.dtype)
        for client, _, outputs in self.engine.iterate_outputs(
            params, pairs, self.layout.zero_inputs(len(params)), self.block
        ):
            count = int(counts[client])
            targets = self._shared.samples.prepare_targets(places[client, :count])
            found[client, :count] = self.objective(outputs[0], targets).to(found)
        return found

    def score(
        self, inbox: Inbox, split: str = "train", *, keep: bool = False
    ) -> Float[Tensor, "clients peers"]:
        """Return the mean loss of each received model on the receiver's own data; +inf where nothing came.

        A model of which only a part was shared is measured with what its receiver has at home.

        Args:
            inbox: what was received.
            split: of the receiver's data.
            keep: cache the losses until other models are scored, for models that are scored again.
        """
        out = torch.full(inbox.mask.shape, torch.inf, dtype=self.dtype)
        clients, slots = inbox.mask.nonzero(as_tuple=True)
        if len(clients):
            models = inbox.index[clients, slots]
            if inbox.part is None or inbox.own is None:
                out[clients, slots] = self._losses(inbox.table, models, clients, split, keep)
            else:
                out[clients, slots] = self._completed(
                    inbox.part, inbox.own, inbox.table, models, clients, split
                )
        return out

    def _completed(
        self,
        part: ParameterSharing,
        own: Tensor,
        table: Tensor,
        models: Tensor,
        clients: Tensor,
        split: str,
    ) -> Float[Tensor, " pairs"]:
        """Measure shared parts, each with the home part of who measures it, as many models at once as memory holds."""
        found = []
        for some in torch.arange(len(models)).split(max(1, _COMPLETED // table.shape[1])):
            received, readers = (
                table[models[some].to(table.device)],
                own[clients[some].to(own.device)],
            )
            joined = part.keep_local(readers, received)
            found.append(
                self._measure(joined, torch.arange(len(some)), clients[some], split)[
                    metrics.LOSS.name
                ]
            )
        return torch.cat(found)

    def _losses(
        self, table: Tensor, models: Tensor, clients: Tensor, split: str, keep: bool
    ) -> Tensor:
        if not keep or self._shared.federation.noise is not None:  # noise is another in every round
            return self._measure(table, models, clients, split)[metrics.LOSS.name]
        known = self._shared.scored.get(split)
        if known is None or not torch.equal(known[0], table):
            everybody = len(self._shared.federation)
            known = table.clone(), torch.full((everybody, len(table)), torch.nan, dtype=self.dtype)
            self._shared.scored[split] = known
        rows, losses = self._at[clients], known[1]
        new = losses[rows, models].isnan()
        if bool(new.any()):
            found = self._measure(table, models[new], clients[new], split)
            losses[rows[new], models[new]] = found[metrics.LOSS.name]
        return losses[rows, models]

    def _measure(
        self,
        table: Float[Tensor, "models params"],
        models: Int[Tensor, " pairs"],
        clients: Int[Tensor, " pairs"],
        split: str,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Float[Tensor, " pairs"]]:
        """Measure pairs of (row of the table, hosted client) on the client's own data."""
        noise = self._noise(self._rng, "noise")
        pairs = EvaluationPairs(
            self._shared.samples,
            self._places(split),
            self.count_samples(split),
            models,
            clients,
            noise,
        )
        values = self._run(table, pairs, inputs)
        # then the metric says what the loss says
        repeats = self.objective.kind == self.objective.metric
        return {metrics.LOSS.name: values[metrics.LOSS.name]} if repeats else values

    def _run(
        self, table: Tensor, pairs: EvaluationPairs, inputs: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        extra = self.layout.zero_inputs(len(table)) if inputs is None else inputs
        return self.engine.measure_pairs(table, pairs, extra, self.block)

    def evaluate(
        self, params: Float[Tensor, "clients params"], inputs: Mapping[str, Tensor] | None = None
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return each client's metrics on the test set that serves it; equal models are measured once on each.

        The loss, what it is judged by ("accuracy" for classes, "mse" for squared errors), and
        `metrics`. No random draw is made.
        """
        return {
            **self._evaluate(params, inputs),
            **self.evaluate_metrics(params, self.metrics, inputs),
        }

    def _evaluate(
        self, params: Float[Tensor, "clients params"], inputs: Mapping[str, Tensor] | None
    ) -> dict[str, Float[Tensor, " clients"]]:
        out = {
            name: torch.full((len(self),), torch.nan, dtype=self.dtype)
            for name in self.engine.metrics
        }
        serves = self._shared.federation.test_of[self._at]
        same = first_equal_rows(params) if inputs is None else torch.arange(len(params))
        for number in range(len(self._shared.tests)):
            rows = (serves == number).nonzero().flatten()
            models, which = same[rows].unique(return_inverse=True)
            for name, value in self._run(params, self._whole_test(number, models), inputs).items():
                out[name][rows] = value[which]
        return out

    def evaluate_metrics(
        self,
        params: Float[Tensor, "clients params"],
        wanted: Sequence[Metric],
        inputs: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return metrics of each client's outputs for all samples of the test set that serves it.

        Args:
            params: the models.
            wanted: the metrics; NaN where one is not defined, and for a test set without samples.
            inputs: values of the layout's input buffers.
        """
        out = {
            metric.name: torch.full((len(self),), torch.nan, dtype=self.dtype) for metric in wanted
        }
        serves = self._shared.federation.test_of[self._at]
        same = first_equal_rows(params) if inputs is None else torch.arange(len(params))
        for number, test in enumerate(self._shared.tests if wanted else ()):
            rows = (serves == number).nonzero().flatten()
            models, which = same[rows].unique(return_inverse=True)
            pairs = self._whole_test(number, models)
            values = {
                metric.name: torch.full((len(models),), torch.nan, dtype=self.dtype)
                for metric in wanted
            }
            extra = self.layout.zero_inputs(len(params)) if inputs is None else inputs
            targets = test.prepare_targets(torch.arange(len(test)))
            for _, part, outputs in self.engine.iterate_outputs(params, pairs, extra, self.block):
                for pair, own in zip(part.tolist(), outputs, strict=True):
                    for metric in wanted:
                        values[metric.name][pair] = self._judge(metric, own, targets)
            for name, value in values.items():
                out[name][rows] = value[which]
        return out

    def _judge(self, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
        """Return a metric of one model's outputs."""
        seen = self.objective.metric_inputs(metric, outputs, targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Undefined)  # a NaN says it, and the run says why
            return metric(*(seen if metric.each else (each.cpu() for each in seen)))

    def _whole_test(self, number: int, models: Int[Tensor, " models"]) -> EvaluationPairs:
        test = self._shared.tests[number]
        everything, size = torch.arange(len(test))[None], torch.tensor([len(test)])
        return EvaluationPairs(
            test, everything, size, models, torch.zeros_like(models), self._test_noise(number, 1)
        )

    def _test_noise(self, number: int, sets: int) -> InputNoise | None:
        """Return the noise of a test set that is cut into so many sets: that of its samples, however it is cut."""
        test = self._shared.federation.tests[number]
        if not test.noise:
            return None
        key = self._rng.generator(f"noise.test.{test.name}").integers(1 << 62)
        sigma = torch.full((sets,), test.noise, dtype=torch.float64)
        return InputNoise(torch.full((sets,), int(key)), sigma, len(test.x))

    def evaluate_by_class(
        self, params: Float[Tensor, "clients params"]
    ) -> tuple[dict[str, Tensor], Float[Tensor, "clients classes"], Int[Tensor, "clients classes"]]:
        """Return what `evaluate` returns, up to the rounding of the loss, from one pass over each class's samples.

        With it the recall of each class on the test set that serves each client, NaN for a class
        without samples, and how many samples it has.
        """
        values = {
            name: torch.full((len(self),), torch.nan, dtype=self.dtype)
            for name in self.engine.metrics
        }
        recall = torch.full((len(self), self.classes), torch.nan, dtype=self.dtype)
        number = torch.zeros(len(self), self.classes, dtype=torch.int64)
        serves, same = self._shared.federation.test_of[self._at], first_equal_rows(params)
        for place, test in enumerate(self._shared.tests):
            rows = (serves == place).nonzero().flatten()
            chosen, which = same[rows].unique(return_inverse=True)
            labels = self._shared.federation.tests[place].y.to(torch.int64)
            found, count = labels.unique(return_counts=True)
            order = list(torch.argsort(labels, stable=True).split(count.tolist()))
            places = torch.nn.utils.rnn.pad_sequence(order, batch_first=True)
            models, sets = (
                chosen.repeat_interleave(len(found)),
                torch.arange(len(found)).repeat(len(chosen)),
            )
            pairs = EvaluationPairs(
                test, places, count, models, sets, self._test_noise(place, len(found))
            )
            means = {
                n: v.reshape(len(chosen), len(found))
                for n, v in self._run(params, pairs, None).items()
            }
            recall[rows[:, None], found] = means[metrics.ACCURACY.name][which]
            number[rows[:, None], found] = count
            for name in values:
                sums = means[name].double() * count
                whole = sums.round() if name == metrics.ACCURACY.name else sums
                values[name][rows] = (whole.sum(1) / len(test)).to(self.dtype)[which]
        return values, recall, number

    def accuracy_on_all_tests(
        self, models: Float[Tensor, "clients params"]
    ) -> Float[Tensor, " clients"]:
        """Return the accuracy of each model on all test sets together; equal models are measured once."""
        chosen, which = first_equal_rows(models).unique(return_inverse=True)
        right, total = torch.zeros(len(chosen), dtype=self.dtype), 0
        for number, test in enumerate(self._shared.tests):
            right += self._run(models, self._whole_test(number, chosen), None)[
                metrics.ACCURACY.name
            ] * len(test)
            total += len(test)
        return (right / total)[which]
