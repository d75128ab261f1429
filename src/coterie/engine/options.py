"""What a task is built from besides data: the model, the engine, the amount of work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from coterie.data.federation import Federation
from coterie.engine.device import check_device
from coterie.engine.optim import LocalTraining
from coterie.engine.precision import check_portable, check_precision
from coterie.errors import require
from coterie.functional.losses import Loss
from coterie.functional.metrics import Metric
from coterie.functional.selection import cohort_size
from coterie.models.layout import BUFFER_POLICIES, Layout, ModelSource
from coterie.models.pretrained import AdapterConfig

InitMode = Literal["shared", "per_client", "given", "redrawn"]


@dataclass(frozen=True)
class ModelSpec:
    """What clients train.

    Args:
        source: a name of `models.NETS`, an nn.Module, or a factory of modules.
        init: the first models; see `Settings.init`.
        buffers: what a merge does with BatchNorm statistics: "average" mixes them like parameters,
            "local" keeps each client's own, "reset" restores the initial ones.
        shared: patterns of the tensors that clients share; everything when empty. See
            `models.part.match_patterns`.
        similarity_on: patterns of the tensors in which models are compared, among the
            trained and shared ones.
        local_tensors: (layout) -> patterns of further tensors that clients keep to themselves.
        owner: who asks for `local_tensors`, for messages.
        loss: what is minimized; cross-entropy for classes and squared error for numbers when None.
        metrics: what `evaluate` measures in addition to the loss and the metric that goes with it.
        output: which entry of what the module returns is its output; see `OutputConversion`.
        adapter: the settings of the model's adapter, which say the ranks of clients; None without
            one. See `layout.find_adapter`.
    """

    source: ModelSource
    init: InitMode = "shared"
    buffers: str = "average"
    shared: Sequence[str] = ()
    similarity_on: Sequence[str] = ()
    local_tensors: Callable[[Layout], Sequence[str]] | None = None
    owner: str = "the method"
    loss: Loss | None = None
    metrics: Sequence[Metric] = ()
    output: str = ""
    adapter: AdapterConfig | None = None

    def __post_init__(self) -> None:
        """Check names of choices.

        Raises:
            ConfigError: with what was found and what was expected.
        """
        modes = get_args(InitMode)
        require(self.init in modes, "init", self.init, f"one of {', '.join(modes)}")
        policies = f"one of {', '.join(BUFFER_POLICIES)}"
        require(self.buffers in BUFFER_POLICIES, "buffers", self.buffers, policies)


@dataclass(frozen=True)
class EngineOptions:
    """How models are computed; results agree, up to rounding.

    Args:
        engine: "auto" or a name of `engine.ENGINE_NAMES`.
        block: how many clients are trained at once; chosen from the size of the model when None. It
            changes the speed, never the result.
        dtype: floating-point type of models and inputs.
        device: where models and data are; ids, counts, losses and other reports are on the CPU.
        precision: of the products in training and evaluation: "full", "tf32" or "bf16"; see
            `engine.precision`.
        cuda_graphs: capture the steps of the vmap engine and replay them, on a CUDA device.
        portable: compute the same bytes on all processors of a kind; see `check_portable`.
    """

    engine: str = "auto"
    block: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    precision: str = "full"
    cuda_graphs: bool = False
    portable: bool = False

    def __post_init__(self) -> None:
        """Refuse what this machine cannot compute.

        Raises:
            ConfigError: with what was found and what was expected.
        """
        require(self.block is None or self.block >= 1, "block", self.block, "at least 1")
        check_device(self.device)
        check_precision(self.precision, self.cuda_graphs, self.device, self.dtype)
        if self.portable:
            check_portable(self.device)


_USUAL_BATCH = 32  # where the batch size is unknown


@dataclass(frozen=True)
class Workload:
    """How much is trained; "auto" chooses an engine by it.

    Args:
        rounds: of the run, for learning-rate schedules over all of them; None for unknown.
        train_samples: samples that clients train on in a run, or in all `runs`; None for a few.
        batch_size: samples of a client's step; None for unknown.
        clients: that train in a round, in all processes; None for unknown.
        custom_optimizer: `LocalTraining.custom_optimizer`, which only the loop engine runs.
        runs: of a plan that share a program; each records its graphs again.
        train_steps: of which `train_samples` are the batches, where their sizes differ between the
            runs; None for those of `batch_size`.
    """

    rounds: int | None = None
    train_samples: float | None = None
    batch_size: int | None = None
    clients: int | None = None
    custom_optimizer: str | None = None
    runs: int = 1
    train_steps: float | None = None

    @property
    def num_steps(self) -> float:
        """The steps in which the samples are trained."""
        if self.train_steps is not None:
            return self.train_steps
        return (self.train_samples or 0.0) / (self.batch_size or _USUAL_BATCH)

    @staticmethod
    def of_run(
        local: LocalTraining, rounds: int, federation: Federation, participation: float = 1.0
    ) -> "Workload":
        """Return the work of a run with all clients of a federation, the warm-up included.

        Args:
            local: how clients train.
            rounds: of the run.
            federation: the clients.
            participation: share of the population that trains in a round, or how many above 1.
        """
        if local.steps is None:
            samples = local.epochs * int(federation.count_samples("train").sum())
        else:
            # An upper bound: the batches of a client with fewer samples are smaller.
            samples = local.steps * local.batch_size * len(federation)
        clients = cohort_size(federation.population, participation)
        # The warm-up before the first exchange trains all clients, not only those of a cohort.
        total = samples * (rounds * clients / federation.population + 1)
        return Workload(rounds, total, local.batch_size, clients, local.custom_optimizer)

    def in_plan(self, others: "Sequence[Workload]") -> "Workload":
        """Return this run's work, of which a program is built for all of some runs.

        Args:
            others: the runs that share its program, this one included.
        """
        return replace(
            self,
            train_samples=sum(one.train_samples or 0.0 for one in others),
            train_steps=sum(one.num_steps for one in others),
            runs=sum(one.runs for one in others),
        )
