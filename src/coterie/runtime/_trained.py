"""What will train, in the check of the translation: the run's own engine on a few real samples.

The counterpart of `_plain`: both return the same quantities under the same names.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.data.federation import Federation
from coterie.engine.client_data import ClientData
from coterie.engine.optim import GRADIENT_ONLY, LocalTraining, OptimizerState
from coterie.engine.task import Task
from coterie.rng import Rng
from coterie.runtime._plain import PURPOSE, Values

MANY_PARAMS = 1 << 24  # above it one client is enough: each needs several copies of the model
ADVICE = (
    "take engine = 'loop' if it agrees, or write the module so that PyTorch's layers do it; "
    "check = false trains what differs"
)


@dataclass
class TrainedSide:
    """What will train: the task's own engine, on samples of the check."""

    task: Task
    federation: Federation
    rng: Rng
    # The models of the last step and what it returned: steps of the optimizer begin there too.
    _last: tuple[Tensor, list[Values]] | None = field(default=None, init=False, repr=False)

    @staticmethod
    def build(task: Task, sample: Federation, rng: Rng) -> "TrainedSide":
        """Give the task's engine other data, and totals of its own."""
        data = ClientData.load(sample, task.trainer.loss, task.dtype, task.device)
        trainer = replace(task.trainer, data=data, totals=type(task.trainer.totals)())
        evaluator = replace(task.evaluator, data=data, metrics=(), cache={})
        view = replace(task, data=data, trainer=trainer, evaluator=evaluator, clusters=None)
        # The seed of the run, in streams that nothing else draws from.
        return TrainedSide(view, sample, Rng(rng.seed))

    def inputs(self) -> Tensor:
        """Return the prepared inputs of each client."""
        data = self.task.data
        return data.samples.prepare_inputs(data.sample_indices("train"))

    def targets(self) -> Tensor:
        """Return the targets of each client, as its loss takes them."""
        data = self.task.data
        return data.samples.prepare_targets(data.sample_indices("train"))

    def evaluate(self, rows: Tensor) -> list[Values]:
        """Return outputs, loss and score of each client in evaluation mode."""
        layout = self.task.layout
        outputs = self.task.engine.forward(rows, self.inputs(), layout.zero_inputs(len(rows)))
        loss, *score = self.task.evaluator.evaluate_split(rows, "train").values()
        found = []
        for row in range(len(rows)):
            values = {"evaluation outputs": outputs[row], "evaluation loss": loss[row]}
            if score:  # of a loss that is its own metric there is none
                values["evaluation score"] = score[0][row]
            found.append(values)
        return found

    def step(
        self,
        rows: Tensor,
        local: LocalTraining,
        steps: int = 1,
        state: OptimizerState | None = None,
    ) -> tuple[Tensor, dict[str, Any], OptimizerState | None]:
        """Take steps on all samples of each client at once, as a run trains."""
        plain = replace(
            local, steps=steps, batch_size=self.federation.x.shape[1], lr_schedule=None,
            augment="none", drop_last=False, persistent_client_optimizer=state is not None,
        )  # fmt: skip
        found = self.task.trainer.train(rows, self.rng, plain, optimizer=state, purpose=PURPOSE)
        return found.params, found.info, found.optimizer

    def run_epoch(self, rows: Tensor, batch_size: int) -> dict[str, Any]:
        """Return the report of an epoch that moves nothing, of the first clients."""
        some = self.task.select_clients(torch.arange(len(rows)))
        local = LocalTraining(optimizer="sgd", lr=0.0, batch_size=batch_size)
        return some.trainer.train(rows, self.rng, local, purpose=f"{PURPOSE}.epoch").info

    def train(self, rows: Tensor, *, private: bool = False) -> list[Values]:
        """Return loss, gradients and buffers of one step of each client.

        Args:
            rows: the models.
            private: by gradients of single samples, with a norm that clips none, and no noise.
        """
        if self._last is not None and self._last[0] is rows and not private:
            return self._last[1]
        # Every sample is in the batch, since the batch is as large as the data.
        dp = {"clip": 1e12, "noise_multiplier": 0.0, "delta": 1e-12} if private else None
        local, layout = replace(GRADIENT_ONLY, dp=dp), self.task.layout
        state = OptimizerState.initial(local, 1, rows[:, : layout.trainable])
        after, info, left = self.step(rows, local, state=state)
        assert left is not None
        gradients, losses = left.values[:, 0, 0], info["losses"][:, 0]
        found = []
        for row in range(len(rows)):
            values = {"training loss": losses[row]}
            for slot in layout.slots:
                if slot.stop <= layout.trainable:
                    part, name = gradients[row], f"gradient of {slot.name}"
                else:
                    part, name = after[row], f"buffer {slot.name}"
                if not (private and name.startswith("buffer")):
                    values[name] = part[slot.start : slot.stop].reshape(slot.shape)
            found.append(values)
        if not private:
            self._last = rows, found
        return found
