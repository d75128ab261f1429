"""Local training of hosted clients: batches, draws, privacy, optimizer state."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from coterie._util import pages
from coterie.engine._augment import Augmentation, CropFlip, FunctionAugmentation
from coterie.engine._base import MODULE_ERRORS, Engine, explain_module_errors
from coterie.engine._batches import (
    BatchPlan,
    count_steps,
    draw_batches,
    make_report,
    poisson_rate,
    smallest_batch_size,
)
from coterie.engine._work import TrainingTotals, TrainingWork
from coterie.engine.client_data import ClientData
from coterie.engine.optim import LocalTraining, OptimizerState
from coterie.engine.privacy import PrivateQuery, PrivateSteps
from coterie.engine.stepwise import StepwiseTraining
from coterie.errors import ConfigError, ModelError
from coterie.functional.losses import Loss
from coterie.functional.ranks import ClientRanks
from coterie.models.draws import KeyedDraws
from coterie.models.given import copy_deeply
from coterie.models.layout import Layout
from coterie.rng import Rng


class Trained(NamedTuple):
    """What a local training returns.

    Args:
        params: the new models.
        info: the report: `loss` (mean batch loss of the last epoch), `losses` (of each step, before
            its update; NaN after a client's last step), `train_samples` (processed), and
            `diverged` (a loss or a parameter is not finite).
        optimizer: the state of the clients' optimizers, where it was given.
    """

    params: Float[Tensor, "clients params"]
    info: dict[str, Tensor]
    optimizer: OptimizerState | None


@dataclass(frozen=True, eq=False)
class Trainer:
    """Trains clients on their own data.

    Args:
        data: the clients.
        layout: how their models lie in rows.
        loss: what is minimized.
        engine: computes the steps.
        block: clients trained at once.
        rounds: of the run, for learning-rate schedules over all of them.
        secret: seed of the draws that make training private; that of the run when None.
        totals: what trainings have cost so far, of all views of these data together.
        ranks: of the clients' adapters; None where they have the same.
    """

    data: ClientData
    layout: Layout
    loss: Loss
    engine: Engine
    block: int
    rounds: int | None = None
    secret: int | None = None
    totals: TrainingTotals = field(default_factory=TrainingTotals)
    ranks: ClientRanks | None = None

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
        r"""Train every client on its own training data.

        Args:
            params: the models to start from; not changed, unless `in_place`.
            rng: the streams of the round.
            local: epochs, batches, optimizer.
            optimizer: the state from which optimizers go on, where
                `local.persistent_client_optimizer` is set; not changed. They start fresh when None.
            anchor: models of the proximal term; needed when `prox` is not 0.
            prox: weight $\mu$ of the proximal term $\frac{\mu}{2} \lVert w - anchor \rVert^2$ on
                trained parameters.
            inputs: values of the layout's input buffers in every step.
            purpose: names the stream of batch orders; a second training in one round takes another
                name.
            track: which of the client's models this is, each of which has an optimizer of its own.
            in_place: change `params` instead of a copy, which saves memory; its rows lie apart.
        """
        if inputs is not None and (unknown := set(inputs) - set(self.layout.inputs)):
            raise ModelError(
                f"the module has no input buffer {sorted(unknown)[0]!r}; "
                f"it has {list(self.layout.inputs)}"
            )
        started = time.perf_counter()
        schedule = self._draw_batches(rng, local, purpose)
        moments, steps_taken = self._copy_track(optimizer, local, track)
        work = replace(
            self._make_work(rng, local, schedule, purpose, inputs),
            anchor=anchor if prox else None,
            prox=prox,
            moments=moments,
            steps_taken=steps_taken,
        )
        out = params.detach() if in_place else pages.copy(params.detach())
        with explain_module_errors("in training"):
            losses = self.engine.train(out, work, self.block)
        info = make_report(losses, schedule, schedule.batch_sizes.sum(1), [out])
        # A step with an empty Poisson batch counts: it moves the model and is charged.
        number = schedule.active_steps.sum(1)
        if optimizer is not None and moments is not None and steps_taken is not None:
            optimizer = optimizer.replace_track(
                track, moments, steps_taken + number, local.initial_accumulator_value
            )
        self._charge_privacy(local, number, 1)
        self.totals.seconds += time.perf_counter() - started
        return Trained(out, info, optimizer)

    def train_stepwise(
        self,
        rng: Rng,
        local: LocalTraining,
        *,
        optimizer: OptimizerState | None = None,
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
            optimizer: see `train`.
            purpose: names the stream of batch orders; a second training in one round takes another
                name.
            only: which trained parameters the steps move; all when None.

        Raises:
            ConfigError: for an optimizer that is given by its import path.

        Example:
            FedAvg's local training, step by step:

                steps = task.train_stepwise(rng, local)
                for step in range(steps.num_steps):
                    steps.apply_gradient(params, steps.compute_gradient(params, step), step)
                info = steps.finish(params)
        """
        schedule = self._draw_batches(rng, local, purpose)
        ids, device = self.data.ids, self.data.device
        return StepwiseTraining(
            engine=self.engine,
            work=self._make_work(rng, local, schedule, purpose),
            block=self.block,
            schedule=schedule,
            seed_torch=lambda step, row: rng.temporary_torch_seed(
                f"{purpose}.torch.{step}", int(ids[row]), device
            ),
            totals=self.totals,
            copy_track=lambda track: self._copy_track(optimizer, local, track),
            record_query=lambda step, number: self._charge_privacy(
                local, schedule.active_steps[:, step].to(torch.int64), number
            ),
            optimizer=optimizer,
            only=only,
        )

    def count_steps(self, local: LocalTraining) -> list[int]:
        """Return the optimizer steps of each client in one local training."""
        samples = self.data.count_samples("train").tolist()
        return [count_steps(local, number) for number in samples]

    def init_optimizer_state(self, local: LocalTraining, tracks: int = 1) -> OptimizerState:
        """Return the state of the optimizers before the first step.

        Args:
            local: the optimizer.
            tracks: how many models each client trains in a round.
        """
        # Only shape and type are read: one number, expanded, stands for all rows.
        one = torch.empty(1, dtype=self.layout.dtype, device=self.data.device)
        return OptimizerState.initial(
            local, tracks, one.expand(len(self.data), self.layout.trainable)
        )

    # ------------------------------------------------------------------ what a training needs

    def _draw_batches(self, rng: Rng, local: LocalTraining, purpose: str) -> BatchPlan:
        samples = self.data.count_samples("train")
        return draw_batches(
            local, samples, self.data.ids, self._secret_streams(rng, local), purpose
        )

    def _make_work(
        self,
        rng: Rng,
        local: LocalTraining,
        schedule: BatchPlan,
        purpose: str,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> TrainingWork:
        """Return a local training as engines take it, from a fresh optimizer; see `train`."""
        data, device = self.data, self.data.device
        # -1 pads short batches: 0 is a valid index, and `batch_sizes` ends each batch before it.
        order = schedule.sample_order.clamp(min=0)
        indices = data.sample_indices("train").gather(1, order.flatten(1)).reshape(order.shape)
        draw_keys = None
        if self.layout.draws[True]:
            draw_keys = data.draw_keys(rng, f"{purpose}.dropout")
        noise = data.input_noise(rng, f"{purpose}.noise")
        rates = None
        # Only schedules ask for the round, which is not the same for all clients in virtual time.
        if local.schedules:
            rates = local.learning_rates(
                schedule.active_steps.to(torch.int64), rng.round, self.rounds
            )
        return TrainingWork(
            data.samples,
            indices.to(device),
            schedule.batch_sizes,
            local,
            inputs=inputs or {},
            draw_keys=draw_keys,
            augment=self._make_augmentation(local, rng, purpose),
            noise=noise and noise.to(data.samples.device),
            rates=rates,
            seed_torch=lambda row: rng.temporary_torch_seed(
                f"{purpose}.torch", int(data.ids[row]), device
            ),
            private=self._make_private(rng, local, schedule, purpose),
        )

    def _make_augmentation(
        self, local: LocalTraining, rng: Rng, purpose: str
    ) -> Augmentation | None:
        if local.augment == "none":
            return None
        samples = self.data.samples
        keys = self.data.draw_keys(rng, f"{purpose}.augment")
        if local.custom_augment:
            return FunctionAugmentation(keys, local.custom_augment)
        if len(samples.input_shape) != 3:
            raise ModelError(
                f"local.augment is {local.augment!r}; it takes images, found shape "
                f"{samples.input_shape}"
            )
        return CropFlip(keys, local.padding, samples.black_pixel())

    def _copy_track(
        self, optimizer: OptimizerState | None, local: LocalTraining, track: int
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return a copy of the state of each client's optimizer, and its steps so far, if kept."""
        if not local.persistent_client_optimizer:
            return None, None
        # A first training: the state has one track for each model up to this one.
        if optimizer is None:
            optimizer = self.init_optimizer_state(local, track + 1)
        return optimizer.copy_track(track)

    # ------------------------------------------------------------------ privacy

    def _secret_streams(self, rng: Rng, local: LocalTraining) -> Rng:
        """Return the streams from which private training draws batches and noise."""
        if local.dp_settings is None or self.secret is None:
            return rng
        return replace(rng, seed=self.secret)

    def _make_private(
        self, rng: Rng, local: LocalTraining, schedule: BatchPlan, purpose: str
    ) -> PrivateSteps | None:
        if local.dp_settings is None or schedule.poisson_steps is None:
            return None
        self.check_private(local)
        streams, size, ids = self._secret_streams(rng, local), self.layout.trainable, self.data.ids

        def draw_normal(row: int, step: int, query: int) -> np.ndarray:
            # Named by training, step, query and client: a resumed run, or another grouping, draws
            # the same.
            stream = streams.generator(f"{purpose}.dp.{step}.{query}", int(ids[row]))
            noise = stream.standard_normal(size)
            if self.ranks is not None:
                # The gradient of what an adapter does not use is 0 whatever the data are, and noise
                # there would make the rank larger.
                whole = torch.zeros(1, self.layout.size, dtype=torch.float64)
                whole[0, :size] = torch.from_numpy(noise)
                noise = self.ranks.cut(whole, self.data.rows[row : row + 1])[0, :size].numpy()
            return noise

        # q n = min(batch_size, n): the divisor must not depend on the draw.
        expected = self.data.count_samples("train").clamp(max=local.batch_size).double()
        return PrivateSteps(local.dp_settings, expected, schedule.poisson_steps, draw_normal)

    def _charge_privacy(
        self, local: LocalTraining, times: Int[Tensor, " clients"], number: int
    ) -> None:
        """Count private gradients that were released.

        Args:
            local: the training.
            times: of how many batches of each client.
            number: how many gradients of each of these batches were released with this one.
        """
        if local.dp_settings is None:
            return
        noise, ledger = local.dp_settings.noise_multiplier, self.totals.privacy
        samples = self.data.count_samples("train").tolist()
        for client, size, often in zip(
            self.data.ids.tolist(), samples, times.tolist(), strict=True
        ):
            rate = poisson_rate(local, size)
            ledger.add_uses(client, PrivateQuery(rate, noise, number), often)
            if number > 1:  # the batch now counts as one query of more gradients
                ledger.add_uses(client, PrivateQuery(rate, noise, number - 1), -often)

    # ------------------------------------------------------------------ checks

    def check_batches(self, local: LocalTraining, owner: str = "") -> None:
        """Refuse batches of one sample, where the module normalizes over batches.

        Args:
            local: how clients train.
            owner: whose the samples are; the client's when empty.

        Raises:
            ModelError: with a client that has such a batch, and what to do.
        """
        counts = self.data.count_samples("train").tolist()
        # Batch sizes follow from the settings, so that nothing is drawn here.
        alone = []
        for row, number in enumerate(counts):
            if smallest_batch_size(local, number) == 1:
                alone.append(row)
        if not alone or self._can_train_on_one_sample():
            return
        name, samples = owner or self.data.client_name(alone[0]), counts[alone[0]]
        more = ""
        if len(alone) > 1:
            more = f" ({len(alone) - 1} more like it)"
        needs = "batch normalization needs two or more"
        other = "a model without it (nn.GroupNorm, nn.LayerNorm)"
        if local.batch_size == 1:
            raise ModelError(
                f"local.batch_size is 1, and {needs} samples a batch: choose a larger one, "
                f"or {other}"
            )
        if samples == 1:
            raise ModelError(
                f"{name} has one training sample{more}, and {needs} a batch: leave it out, "
                f"or take {other}"
            )
        raise ModelError(
            f"{name} has {samples} training samples, so its last batch of local.batch_size = "
            f"{local.batch_size} holds one{more}, and {needs}: set local.drop_last = true, choose "
            f"another batch size, or take {other}"
        )

    def _can_train_on_one_sample(self) -> bool:
        """Return whether the module trains on a batch of one sample."""
        x = self.data.samples.prepare_inputs(torch.zeros(1, dtype=torch.int64))
        try:
            # A copy, since a forward pass in training mode changes running statistics; with a key
            # of its own, since it must not draw from anybody's stream.
            with torch.no_grad(), KeyedDraws(torch.tensor(0, device=x.device)):
                copy_deeply(self.layout.train_module)(x)
        except ValueError as error:
            # The text of the error is that of PyTorch's batch normalization.
            return "more than 1 value per channel" not in str(error)
        except MODULE_ERRORS:  # left to the engines
            return True
        return True

    def check_private(self, local: LocalTraining) -> None:
        """Refuse private training that cannot be: without gradients of single samples, or delta.

        Raises:
            ModelError: for batch normalization, or a loss that joins the samples of a batch.
            ConfigError: for a delta of 1 / training samples of a client, or more.
        """
        # A block hosts none of the clients of some rounds.
        if local.dp_settings is None or not len(self.data):
            return
        for name, part in self.layout.train_module.named_modules():
            if _joins_samples(part):
                raise ModelError(
                    f"local.dp needs the gradient of each sample, and {type(part).__name__} "
                    f"{name!r} joins samples: take nn.GroupNorm or nn.LayerNorm"
                )
        if self.loss.whole:
            raise ModelError(
                f"local.dp needs a loss of each sample, and loss {self.loss.kind!r} joins those of "
                "a batch: take another loss, or leave dp out"
            )
        # The client with the most samples has the strictest limit.
        most, delta = int(self.data.count_samples("train").max()), local.dp_settings.delta
        if delta * most >= 1:
            raise ConfigError(
                f"dp.delta is {delta:g}; expected less than 1 / {most}, the most training samples "
                "of a client: with more, to publish a sample at random would count as private"
            )


def _joins_samples(module: nn.Module) -> bool:
    """Return whether a layer's output for a sample, or its statistics, depend on other samples."""
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        # It normalizes each sample alone, but its running statistics are means over samples.
        return module.track_running_stats
    return isinstance(module, nn.modules.batchnorm._BatchNorm)
