"""What a round costs a client: each method predicts it from its settings, in its own file.

One unit of traffic is a model. Papers count the models that a client receives (with a server: down
and up). That leaves out what else is sent: PANM's formula omits the neighbors that a correction
round averages with but did not score, and PANMGrad reads an update with every model.
"""

from dataclasses import dataclass, fields
from typing import Literal

from coterie.engine.task import Task

Phase = int | Literal["enroll", "evaluate"]
"""What is predicted: a round by its number from 0, the enrollment, or an evaluation."""


@dataclass(frozen=True)
class CostSetting:
    """What a cost depends on, other than the method.

    Args:
        population: clients ($K$).
        params: numbers in a model ($P$), counting shared ones only.
        samples: training samples of a client ($n_i$).
        group: members of the client's own cluster, itself included: Oracle's choice, and the size
            that PANM's bag and PENS's neighbors are taken to have found. The whole population when
            None.
        number_bytes: bytes of a number as sent.
        start_apart: whether clients start from different models.
        compared: numbers of a model in which similarities compare; all when None.
        public_samples: samples of the public set.
        predictions: classes that a model predicts for it.
    """

    population: int
    params: int
    samples: int
    group: int | None = None
    number_bytes: int = 4
    start_apart: bool = False
    compared: int | None = None
    public_samples: int = 0
    predictions: int = 0

    @staticmethod
    def from_task(task: Task) -> "CostSetting":
        """Return the setting of a task, whose clients have as many training samples as on average."""
        part = task.sharing
        samples, apart = int(task.num_samples.mean()), task.model.init == "per_client"
        shared, compared = part.shared.num_columns, part.compared.num_columns
        public = task.num_public_samples
        return CostSetting(
            task.population, shared, samples, None, task.dtype.itemsize, apart, compared, public,
            task.evaluator.count_predictions() if public else 0,
        )  # fmt: skip

    @property
    def num_compared(self) -> int:
        """The numbers of a model in which similarities compare."""
        if self.compared is None:
            return self.params
        return self.compared

    @property
    def num_others(self) -> int:
        """How many other clients there are."""
        return self.population - 1

    @property
    def num_cluster_peers(self) -> int:
        """How many others are in the own cluster."""
        # Without known clusters, everybody is one.
        return (self.group or self.population) - 1


@dataclass(frozen=True)
class Cost:
    """Per client: averages over clients, so they need not be whole numbers.

    Args:
        models: models read (server-based methods: received and sent).
        extra_models: further numbers in units of a model: updates, first models, models that
            others pushed.
        extra_floats: other numbers received: similarities, requests, answers.
        messages: messages received that carry no model.
        bytes: payload received (server-based methods: and sent).
        passes: forward passes of one sample, in addition to those of training.
    """

    models: float = 0.0
    extra_models: float = 0.0
    extra_floats: float = 0.0
    messages: float = 0.0
    bytes: float = 0.0
    passes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))


def cost_of_reading(setting: CostSetting, models: float, scored: float = 0.0) -> Cost:
    """Return the cost of reading models with their sample counts, and of scoring some by loss."""
    # One more number: the count of samples that weighs the model.
    size = (setting.params + 1) * setting.number_bytes
    return Cost(models=models, bytes=models * size, passes=scored * setting.samples)


def cost_of_moving(setting: CostSetting, models: float) -> Cost:
    """Return the cost of models that go between a client and the server, up or down."""
    return Cost(models=models, bytes=models * setting.params * setting.number_bytes)
