"""Task: the model and the data of the clients hosted here, as methods see them.

It is made of the clients' data on a device (`client_data`), the model (`client_model`), training
(`training`), which is the only place where gradients are taken, and evaluation (`evaluation`).
"""

import contextlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie._util.finite import not_finite
from coterie._util.tensors import index_optional
from coterie.data.coding import WHOLE
from coterie.data.federation import Federation
from coterie.engine._base import MODULE_ERRORS, Engine, metric_names
from coterie.engine._choice import default_block, make_engine
from coterie.engine.client_data import ClientData
from coterie.engine.client_model import ClientModel
from coterie.engine.evaluation import Evaluator
from coterie.engine.optim import LocalTraining, OptimizerState
from coterie.engine.options import EngineOptions, InitMode, ModelSpec, Workload
from coterie.engine.stepwise import StepwiseTraining
from coterie.engine.training import Trained, Trainer
from coterie.errors import ConfigError, ModelError
from coterie.exchange.base import Inbox
from coterie.functional import metrics
from coterie.functional.losses import CustomLoss, Loss, Tokens, default_loss
from coterie.models.given import copy_deeply
from coterie.models.layout import Layout
from coterie.models.part import ParameterSharing
from coterie.rng import Rng

__all__ = [
    "EngineOptions", "InitMode", "LocalTraining", "ModelSpec", "Task", "Trained", "Workload",
    "not_finite",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Task:
    """A model and the data of the clients hosted here; methods see no more of them.

    Args:
        data: the clients' samples.
        model: how the model lies in rows, and its first values.
        trainer: trains clients on their data.
        evaluator: evaluates models on them.
        clusters: planted cluster of each hosted client, for methods that declare that they need it.
        pool: the task of one client that has everybody's samples, for methods that declare that
            they need it.
        starts_from_module: first models are the module's own values.
        phases: where the clients' data change over the rounds: the first round of each later phase,
            and the task from then on.
    """

    data: ClientData
    model: ClientModel
    trainer: Trainer
    evaluator: Evaluator
    clusters: Int[Tensor, " clients"] | None = None
    pool: "Task | None" = None
    starts_from_module: bool = False
    phases: "tuple[tuple[int, Task], ...]" = ()

    @staticmethod
    def build(
        federation: Federation,
        model: ModelSpec,
        options: EngineOptions | None = None,
        *,
        workload: Workload | None = None,
        clusters: Int[Tensor, " clients"] | None = None,
        pool: "Task | None" = None,
        secret: int | None = None,
    ) -> "Task":
        """Build a task of all clients of a federation.

        Args:
            federation: the hosted rows, without truth (see `Federation.host`).
            model: what clients train.
            options: how it is computed.
            workload: how much a run trains.
            clusters: see `Task`.
            pool: see `Task`.
            secret: seed of the draws that make training private (who is in a batch, and the noise),
                0 or larger; that of the run when None, which is for simulations alone: who knows it
                can take the noise off again.

        Raises:
            ConfigError: for an unknown name, or patterns that match nothing.
            ModelError: when the module cannot be trained on such data.
        """
        options, work = options or EngineOptions(), workload or Workload()
        federation.validate()
        loss = model.loss or default_loss(federation.y.flatten(0, 1), federation.classes)
        client_model = ClientModel.from_spec(model, federation, options)
        layout = client_model.layout
        data = ClientData.load(federation, loss, options.dtype, options.device)
        x, y = data.make_trial_batch()
        if model.output:
            _check_output_is_needed(layout, x)
        # Before the trial of an engine, so that the message names outputs and targets.
        given = client_model.keeps_given or client_model.init == "given"
        outputs = _check_outputs(layout, loss, data, x, given)
        if isinstance(loss, Tokens):
            _warn_of_copied_tokens(layout, loss, x, y)
        # What goes with the loss is measured once.
        own = metric_names(loss)
        extra = tuple(metric for metric in model.metrics if metric.name not in own)
        for metric in extra:
            loss.check_metric_fits(metric, y)
        form = loss.possible_forms(y)[0]
        if outputs is not None:
            form = loss.find_form(outputs, y)
            judged = [*extra]
            # A loss that measures samples in a way of its own takes outputs as they are.
            if loss.metric is not None and type(loss).measure_samples is Loss.measure_samples:
                judged.append(metrics.REGISTRY[loss.metric])
            for metric in judged:
                loss.check_metric_shapes(metric, outputs, y, federation.classes)
        engine = make_engine(
            options.engine,
            layout,
            loss,
            x,
            y,
            work,
            precision=options.precision,
            cuda_graphs=options.cuda_graphs,
            portable=options.portable,
        )
        block = options.block
        if block is None:
            # The loop engine runs one client at a time in any block.
            block = 1 if engine.name == "loop" else default_block(layout, options.device)
        trainer = Trainer(
            data, layout, loss, engine, block, work.rounds, secret, ranks=client_model.ranks
        )
        evaluator = Evaluator(data, layout, loss, extra, form, engine, block)
        return Task(data, client_model, trainer, evaluator, clusters, pool)

    # ------------------------------------------------------------------ the clients and their model

    def __len__(self) -> int:
        return len(self.data)

    @property
    def ids(self) -> Int[Tensor, " clients"]:
        """The hosted clients, in the order of all rows."""
        return self.data.ids

    @property
    def population(self) -> int:
        """How many clients there are in all."""
        return self.data.population

    @property
    def num_samples(self) -> Float[Tensor, " clients"]:
        """Training samples of each client, as floats: the $n_i$ of the papers."""
        return self.data.count_samples("train").to(self.dtype)

    @property
    def layout(self) -> Layout:
        """How the model's tensors lie in a row."""
        return self.model.layout

    @property
    def sharing(self) -> ParameterSharing:
        """Which columns of a row are shared, stay with the client, and are compared."""
        return self.model.sharing

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of models."""
        return self.layout.dtype

    @property
    def device(self) -> str:
        """Where models and data are."""
        return self.data.device

    @property
    def classes(self) -> int:
        """Number of classes; 0 where targets are no classes."""
        return self.data.federation.classes

    @property
    def engine(self) -> Engine:
        """What computes gradients and outputs."""
        return self.trainer.engine

    @property
    def block(self) -> int:
        """How many clients are trained at once."""
        return self.trainer.block

    def count_samples(self, split: str) -> Int[Tensor, " clients"]:
        """Return how many samples each hosted client has in a split."""
        return self.data.count_samples(split)

    def class_counts(self) -> Int[Tensor, "clients classes"]:
        """Return how many training samples of each class every hosted client has."""
        return self.data.class_counts()

    # ------------------------------------------------------------------ views

    def select_clients(self, rows: Int[Tensor, " rows"]) -> "Task":
        """Return a view of some of the hosted clients; the data are not copied."""
        clusters = index_optional(self.clusters, rows)
        return replace(self._with_data(self.data.select_clients(rows)), clusters=clusters)

    def first_clients_alone(self, count: int) -> "Task":
        """Return a view of the first hosted clients as if the population had no others.

        First models are the module's own: only shapes may depend on such a view.
        """
        alone = self._with_data(self.data.first_clients_alone(count))
        clusters = index_optional(self.clusters, slice(count))
        return replace(alone, clusters=clusters, starts_from_module=True)

    def with_phases(self, clusters: Sequence[Int[Tensor, " clients"] | None]) -> "Task":
        """Return the task with the tasks of the later phases of its federation.

        Args:
            clusters: of each later phase; see `Task`.
        """
        phases = []
        for place, phase in enumerate(self.data.federation.phases):
            now = self._with_data(self.data.select_phase(place))
            # Losses that were measured on other data must not be taken for these.
            now = replace(now, evaluator=replace(now.evaluator, cache={}))
            phases.append((phase.first, replace(now, clusters=clusters[place])))
        return replace(self, phases=tuple(phases))

    def for_round(self, rng: Rng) -> "Task":
        """Return a view for the evaluations of a round: noise on inputs depends on the round."""
        return replace(self, evaluator=replace(self.evaluator, rng=rng))

    def _with_data(self, data: ClientData) -> "Task":
        trainer = replace(self.trainer, data=data)
        evaluator = replace(self.evaluator, data=data)
        return replace(self, data=data, trainer=trainer, evaluator=evaluator)

    # ------------------------------------------------------------------ models

    def initial_models(self, rng: Rng) -> Float[Tensor, "clients params"]:
        """Return each client's first model $w^0$; with a shared start, a view of one row.

        It does not depend on the round of `rng`.
        """
        if self.starts_from_module:
            return self.model.module_values().expand(len(self), -1)
        return self.cut_to_ranks(self.model.initial_models(self.ids, rng))

    def draw_models(
        self, rng: Rng, count: int, *, different: bool = False
    ) -> Float[Tensor, "clusters params"]:
        """Return first models, the same in every process; the first is $w^0$.

        A function that makes the module is called for each, under a stream of its own. A module
        that was given has one set of weights: then all are equal.

        Args:
            rng: the streams of the run; its round does not matter.
            count: how many.
            different: whether the method needs different ones.

        Raises:
            ModelError: when two that must differ are equal.
        """
        return self.model.draw_models(rng, count, different)

    def apply_buffer_policy(
        self, before: Float[Tensor, "clients params"], merged: Float[Tensor, "clients params"]
    ) -> Float[Tensor, "clients params"]:
        """Apply the policy for BatchNorm statistics to a merge that led from `before` to `merged`.

        Columns that clients do not share, of statistics or parameters, are as before. Adapters are
        cut to the rank of each client.
        """
        return self.cut_to_ranks(self.model.apply_buffer_policy(before, merged))

    def cut_to_ranks(
        self, rows: Float[Tensor, "clients params"]
    ) -> Float[Tensor, "clients params"]:
        """Return models whose adapters have the rank of each client, where ranks differ."""
        if self.model.ranks is None:
            return rows
        return self.model.ranks.cut(rows, self.data.rows)

    # ------------------------------------------------------------------ training

    def train(
        self,
        params: Float[Tensor, "clients params"],
        rng: Rng,
        local: LocalTraining,
        *,
        optimizer: OptimizerState | None = None,
        anchor: Float[Tensor, "clients params"] | None = None,
        prox: float = 0.0,
        inputs: Mapping[str, Shaped[Tensor, "clients steps *shape"]] | None = None,
        purpose: str = "batches",
        track: int = 0,
        in_place: bool = False,
    ) -> Trained:
        """Train every hosted client on its own training data; see `Trainer.train`."""
        return self.trainer.train(
            params, rng, local, optimizer=optimizer, anchor=anchor, prox=prox, inputs=inputs,
            purpose=purpose, track=track, in_place=in_place,
        )  # fmt: skip

    def train_stepwise(
        self,
        rng: Rng,
        local: LocalTraining,
        *,
        optimizer: OptimizerState | None = None,
        purpose: str = "batches",
        only: Bool[Tensor, " trainable"] | None = None,
    ) -> StepwiseTraining:
        """Return a training whose steps a method takes itself; see `Trainer.train_stepwise`."""
        return self.trainer.train_stepwise(
            rng, local, optimizer=optimizer, purpose=purpose, only=only
        )

    def count_steps(self, local: LocalTraining) -> list[int]:
        """Return the optimizer steps of each hosted client in one local training."""
        return self.trainer.count_steps(local)

    def train_pooled(
        self,
        params: Float[Tensor, "1 params"],
        rng: Rng,
        local: LocalTraining,
        *,
        optimizer: OptimizerState | None = None,
    ) -> Trained:
        """Train one model on the training data of all clients of the population; see `train`.

        Args:
            params: the model.
            rng: the streams of the round.
            local: epochs, batches, optimizer.
            optimizer: of the hosted clients. Training goes on from that of the first of them, and
                leaves all the same.
        """
        pool, totals = self._require_pool(), self.trainer.totals
        started = time.perf_counter()
        first = None
        if optimizer is not None:
            # One model is trained, with one state, which all clients hold alike.
            first = OptimizerState(optimizer.values[:1], optimizer.taken[:1])
        trained = pool.train(params, rng, local, optimizer=first)
        # Everybody's samples are in the pool, so each client is charged with all of its queries.
        totals.privacy.charge_clients(pool.trainer.totals.privacy, self.ids.tolist())
        totals.seconds += time.perf_counter() - started
        if optimizer is not None and trained.optimizer is not None:
            number, left = len(self), trained.optimizer
            # Each client gets a copy of the state that the one model has left.
            moments = left.values[:, 0].expand(number, -1, -1).clone()
            optimizer = optimizer.replace_track(0, moments, left.taken[:, 0].expand(number))
        return trained._replace(optimizer=optimizer)

    @property
    def num_pooled_samples(self) -> int:
        """How many training samples there are at all clients of the population together."""
        return int(self._require_pool().num_samples.sum())

    def _require_pool(self) -> "Task":
        if self.pool is None:
            raise ConfigError(
                "this method needs the data of all clients in one place; "
                "there is no such place here"
            )
        return self.pool

    # ------------------------------------------------------------------ evaluation

    def loss(
        self, params: Float[Tensor, "clients params"], split: str
    ) -> Float[Tensor, " clients"]:
        """Return the mean loss of each client's model on its data; NaN without any."""
        return self.evaluator.evaluate_split(params, split)[metrics.LOSS.name]

    def score(
        self, inbox: Inbox, split: str = "train", *, keep: bool = False
    ) -> Float[Tensor, "clients peers"]:
        """Return each received model's mean loss on the receiver's data; +inf for none.

        A model of which only a part was shared is completed with what its receiver has.

        Args:
            inbox: what was received.
            split: of the receiver's data.
            keep: cache the losses until other models are scored, for models that are scored again.
        """
        return self.evaluator.score(inbox, split, keep=keep)

    def measure_agreement(
        self, own: Float[Tensor, "clients params"], inbox: Inbox, split: str = "train"
    ) -> Float[Tensor, "clients peers"]:
        """Return how far each received model predicts what the receiver's own does, in [0, 1].

        Args:
            own: the models of the receivers.
            inbox: what was received; 0 where nothing arrived.
            split: of the receiver's data, on which both models are run.

        Raises:
            ConfigError: where outputs are no classes.
        """
        return self.evaluator.measure_agreement(own, inbox, split)

    @property
    def num_public_samples(self) -> int:
        """How many samples the public set has; 0 without one."""
        return 0 if self.data.public is None else len(self.data.public)

    def predict_public(
        self, params: Float[Tensor, "clients params"]
    ) -> Int[Tensor, "clients predictions"]:
        """Return the class that each model predicts for each sample of the public set.

        Of sequences that is one for each position, of labels one for each label; -1 where a
        position does not count or an output is not finite.

        Args:
            params: the models.

        Raises:
            ConfigError: where outputs are no classes, or there is no public set.
        """
        return self.evaluator.predict_public(params)

    def evaluate(
        self, params: Float[Tensor, "clients params"]
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return each client's metrics on the test set that serves it.

        The loss, the metric that goes with it ("accuracy" for classes, "mse" for squared errors),
        and those of `ModelSpec.metrics`. Equal models are evaluated once on each test set. No
        random draw is made.
        """
        return self.evaluator.evaluate(params)


def _check_output_is_needed(layout: Layout, x: Tensor) -> None:
    """Refuse the name of an entry where the module returns a tensor in both of its modes."""
    seen: list[bool] = []
    for module in (layout.train_module, layout.eval_module):
        trial = copy_deeply(module)
        trial.register_forward_hook(
            lambda _module, _args, returned: seen.append(isinstance(returned, Tensor)), prepend=True
        )
        # Modules may draw; a trial must not draw from anybody's stream.
        with (
            torch.no_grad(),
            Rng(0).temporary_torch_seed("template"),
            contextlib.suppress(*MODULE_ERRORS),
        ):
            trial(x)
    if len(seen) == 2 and all(seen):
        raise ConfigError(
            f"output is {layout.output.name!r}, which names an entry of what the module returns; "
            "it returns a tensor, so leave output out"
        )


def _warn_of_copied_tokens(layout: Layout, loss: Tokens, x: Tensor, y: Tensor) -> None:
    """Warn where each position is to predict the very token that it has as its input."""
    args, named = layout.arguments(layout.train_module, (x,), {})
    ids, counted = named.get("input_ids"), y != loss.ignore_index
    if ids is None and args:
        ids = args[0]
    if ids is None or ids.shape != y.shape or not bool(counted.any()):
        return
    if bool((ids == y)[counted].all()):
        warnings.warn(
            "the targets are the tokens of the inputs, and loss 'tokens' compares each with the "
            "output at its own position, which sees it; to predict the next token take loss = "
            "'causal-lm'",
            stacklevel=2,
        )


def _check_outputs(
    layout: Layout, loss: Loss, data: ClientData, x: Tensor, keeps_given: bool
) -> Tensor | None:
    """Refuse outputs and targets that the loss does not take, or that mean other classes.

    A module that fails on the inputs is left to the engines, which say where it does.

    Returns:
        The outputs; None where the module fails.
    """
    try:
        outputs = layout.try_module(x)
    except ModelError:  # of what the module returned
        raise
    except MODULE_ERRORS:
        return None
    classes = data.federation.classes
    if loss.targets == "class" and outputs.shape[-1] < classes:
        raise ModelError(
            f"the module has {outputs.shape[-1]} outputs; expected {classes}, one a class"
        )
    names = data.federation.class_names
    if loss.targets == "class":
        _check_meaning(outputs.shape[-1], names, keeps_given)
    elif loss.targets == "numbers":
        _check_numbers(loss, outputs[0].numel(), names)
    for samples in (data.samples, *data.tests):
        if len(samples):
            loss.check_data(outputs, samples.y)
    return outputs


def _check_meaning(outputs: int, names: Sequence[str], keeps_given: bool) -> None:
    """Say that classes are numbered in another way than outputs may be.

    Labels 0 and 2 are the classes 0 and 1. A module of three outputs may have been made for labels
    as they are, and one that was trained so would be scored by another class than it says.

    Args:
        outputs: of the module.
        names: of the classes; those of renumbered labels are whole numbers.
        keeps_given: whether the module's own weights are the first models.

    Raises:
        ModelError: for weights that were given, where each label is the number of an output.
    """
    renumbered = _find_renumbered(names)
    if outputs <= len(names) or renumbered is None:
        return
    labels, place = renumbered
    known = min(labels) >= 0 and max(labels) < outputs
    said = (
        f"the module has {outputs} outputs, and the labels {', '.join(names[:5])}"
        f"{', ...' * (len(names) > 5)} are the classes 0 to {len(names) - 1} in this order: output "
        f"{place} is that of label {labels[place]}; give "
        + f"classes = {outputs}, which keeps labels as they are, or " * known
        + f"a module of {len(names)} outputs"
    )
    if known and keeps_given:
        raise ModelError(f"{said} (its weights are given, and their outputs have a meaning)")
    warnings.warn(said, stacklevel=2)


def _check_numbers(loss: Loss, outputs: int, names: Sequence[str]) -> None:
    """Refuse a loss of numbers where labels were replaced by the numbers of their classes.

    Days of 30, 60 and 90 are the classes 0, 1 and 2, and errors would be in classes, not in days.

    Args:
        loss: takes targets as numbers, or is a function of one's own, which may mean either.
        outputs: of the module for a sample.
        names: of the classes.

    Raises:
        ConfigError: for a loss of numbers; of a function it is said where there is one output for
            more than two classes.
    """
    renumbered = _find_renumbered(names)
    if renumbered is None:
        return
    labels, place = renumbered
    own = isinstance(loss, CustomLoss)
    name = loss.path if own else loss.kind
    said = (
        f"loss {name!r} takes the numbers of classes, from 0 to {len(names) - 1}, and not the "
        f"labels {', '.join(names[:5])}{', ...' * (len(names) > 5)}: it has {place} for "
        f"{labels[place]}; for a regression make the data with classes = 0, or give floats"
    )
    if not own:
        raise ConfigError(said)
    if outputs == 1 and len(names) > 2:
        warnings.warn(said, stacklevel=2)


def _find_renumbered(names: Sequence[str]) -> tuple[list[int], int] | None:
    """Return the labels of classes, and the first class whose number is not its label.

    None where labels are words, or the numbers of their classes.
    """
    if not all(map(WHOLE.fullmatch, names)):
        return None
    labels = list(map(int, names))
    place = next((i for i, label in enumerate(labels) if i != label), None)
    return None if place is None else (labels, place)
