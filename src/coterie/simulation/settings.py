"""Settings: how a run goes, whatever the method."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from coterie.engine.precision import Precision
from coterie.engine.task import InitMode, LocalTraining
from coterie.errors import require
from coterie.functional.metrics import ExtraMetric
from coterie.methods.base import Order

DTYPES = {"float32": torch.float32, "float64": torch.float64}
Schedule = Literal["synchronous", "sequential_exchange", "sequential"]


@dataclass(frozen=True)
class Settings:
    """How a run goes; the same for every method of a study unless a method overrides `local`.

    Args:
        rounds: rounds of exchange and training after the warm-up ($T$).
        local: how clients train.
        init: "shared" (one first model for all), "per_client", or "given" (the module's own values).
        order: "exchange_first" or "train_first"; the method's own order when None.
        schedule: "synchronous"; "sequential_exchange" and "sequential" let clients act one after another on each
            other's newest models, as some published code does, in simulation only.
        warmup_epochs: local epochs before the first exchange; `local.epochs` when None. Not for "train_first".
        participation: share of clients in (0, 1], or a count above 1, that takes part in a round.
        patience: rounds without a better validation loss after which a client stops; None for never.
        stopped_broadcast: whether a stopped client publishes its "best" or its "last" model.
        evaluate: the final test uses the "best_val" model of each client or its "final" one.
        buffers: what a merge does with running statistics: "average", "local" or "reset".
        engine: "auto" or a name of `engine.ENGINES`.
        block: clients trained at once; chosen when None.
        device: "cpu", "cuda", ...
        dtype: "float32" or "float64".
        precision: of the products in training and measuring: "full", that of `dtype`; "tf32", on a CUDA device; "bf16",
            bfloat16 beside parameters in float32. Optimizers, merges and losses keep `dtype`.
        cuda_graphs: on a CUDA device: capture the steps of a block of clients and replay them (vmap engine).
        validate_every: rounds between two measurements on the validation data, 1 or more.
        eval_every: rounds between two evaluations on the test sets, a multiple of `validate_every`; 0 for the end only.
        extra_metrics: further metrics of every evaluation on the test sets, for classes: "balanced_accuracy",
            "train_prior_accuracy", and with a server "global_accuracy", of the model for everybody (or of the
            client's cluster) on all test sets together; at the end "clusters" (how many, Rand, WAS, WADB; see
            `outcome.cluster_metrics`), "maxima" over the evaluated rounds (see `outcome.maxima`) and "reductions" of
            the final accuracy with other weights than one a client (see `metrics.federated`). Of every round, in
            simulations with a server: "gradient_variance", the total variance of the last layer's updates over the
            round's clients (see `metrics.total_variance`; of all endpoints of a simplex), "composed_gradient_variance",
            that of the layer composed at the simplex's barycenter, and with FedGWC "interaction_change", the running
            mean that decides when a client's cluster has settled.
        checkpoint_seconds: least time between two checkpoints; 0 for one after every round. Where writing one takes
            long, they come so seldom that it takes a twentieth of the time.
    """

    rounds: int = 30
    local: LocalTraining = field(default_factory=LocalTraining)
    init: InitMode = "shared"
    order: Order | None = None
    schedule: Schedule = "synchronous"
    warmup_epochs: int | None = None
    participation: float | int = 1.0
    patience: int | None = None
    stopped_broadcast: Literal["best", "last"] = "best"
    evaluate: Literal["best_val", "final"] = "best_val"
    buffers: Literal["average", "local", "reset"] = "average"
    engine: str = "auto"
    block: int | None = None
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "full"
    cuda_graphs: bool = False
    validate_every: int = 1
    eval_every: int = 0
    extra_metrics: Sequence[ExtraMetric] = ()
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        require(self.rounds >= 0, "rounds", self.rounds, "0 or more")
        require(self.participation > 0, "participation", self.participation, "a share in (0, 1] or a count")
        require(self.patience is None or self.patience >= 1, "patience", self.patience, "at least 1, or nothing")
        require(self.warmup_epochs is None or self.warmup_epochs >= 0, "warmup_epochs", self.warmup_epochs, "0 or more")
        require(self.validate_every >= 1, "validate_every", self.validate_every, "at least 1")
        require(self.eval_every >= 0, "eval_every", self.eval_every, "0 or more")
        every = self.validate_every
        require(self.eval_every % every == 0, "eval_every", self.eval_every, f"a multiple of validate_every ({every})")
        unknown = sorted(set(self.extra_metrics) - set(get_args(ExtraMetric)))
        require(not unknown, "extra_metrics", list(self.extra_metrics), f"some of {', '.join(get_args(ExtraMetric))}")
        for name, valid in (
            ("order", ("exchange_first", "train_first", None)),
            ("schedule", ("synchronous", "sequential_exchange", "sequential")),
            ("stopped_broadcast", ("best", "last")),
            ("evaluate", ("best_val", "final")),
            ("dtype", tuple(DTYPES)),
            ("precision", get_args(Precision)),
        ):
            value = getattr(self, name)
            require(value in valid, name, value, f"one of {', '.join(str(v) for v in valid)}")
        keeps = self.local.persistent_client_optimizer and self.schedule != "synchronous"
        require(not keeps, "local.persistent_client_optimizer", True, "schedule = 'synchronous' with it")

    def keeps_best(self, server: bool) -> bool:
        """Return whether the best model of each client is needed: for the final test, or to go on being read.

        Args:
            server: whether the method has a server; then nobody stops early.
        """
        stops = self.patience is not None and not server
        return self.evaluate == "best_val" or (stops and self.stopped_broadcast == "best")
