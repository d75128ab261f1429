"""FedGWC as in the paper and in its authors' code, where they differ from `methods.fedgwc`.

A study file sets these options on `kind = "fedgwc"`; `methods.registry` then takes this class.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, final

import torch
from annotated_types import Ge, Gt, Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeInt, PositiveFloat, WithPresets
from coterie.engine.task import Task
from coterie.errors import require
from coterie.exchange.base import Message
from coterie.functional import clustering
from coterie.methods.fedgwc import FedGwc, FedGwcClusters
from coterie.methods.server import Averaging, ServerContext
from coterie.rng import Rng

PRESETS: dict[str, dict[str, Any]] = {
    "coterie": {},
    "paper": {"upv_axis": "row", "patience": 1, "min_pair_updates": 0.0},
    "released": {
        "alpha_rule": "local_rate", "reward_weights": "samples", "ddof": 0,
        "loss_sampling_size": 10, "normalize_rewards": True, "start": "uniform", "minmax": True,
        "diagonal": 0.0, "db_space": "embedding",
        "n_max_by": "cohort", "mse_scope": "sampled", "clients_per_round": 10, "explore": False,
        "min_cluster_size": 1, "min_pair_updates": 0.0,
    },
}  # fmt: skip


@final
@dataclass(frozen=True)
class PublishedFedGwc(FedGwc, WithPresets):
    r"""FedGWC with the settings in which the paper, its authors' code and this project differ.

    See `FedGwc` for the other settings; `beta` is not comparable across `minmax`.

    Args:
        preset: "coterie" (the paper with guards), "paper" (its text) or "released" (the authors'
            code); a field that is given wins over it. "paper" splits first and by the least
            evidence; see docs/explanation.
        kappa: exponent of `alpha_rule="decay"`, in (1/2, 1].
        labels: how spectral clustering reads its eigenvectors.
        alpha_rule: "constant"; "local_rate": $|P| / K_c$; "decay": $\alpha (1 + t)^{-\kappa}$.
        reward_weights: clients in the mean and variance of losses alike, or by samples (then
            biased).
        ddof: 1 for the sample variance, 0 for the biased one.
        loss_sampling_size: fill the losses of a step up to so many with normal draws; 0 for off.
        normalize_rewards: divide rewards by their sum.
        start: $P^0$ is "zero" or "uniform", $1 / K^2$.
        upv_axis: a client's vector is its "column" or its "row" of $P$.
        minmax: scale $P$ to [0, 1] before the affinity.
        diagonal: of the affinity.
        db_space: Davies-Bouldin index of the affinity's "rows" or of its spectral "embedding".
        n_max_by: children at most $K_c$ divided by the smallest size, or by the cohort's.
        mse_scope: mean squared change over the cluster's whole "matrix", or the "sampled" part.
        clients_per_round: so many of every cluster (or of the population), whatever the run's
            participation; 0 for the run's share.
        explore: prefer clients that took part less often, $p_k \propto \exp(\min u - u_k)$.
        server_lr: of "fedavgm".
        nesterov: of "fedavgm".
    """

    presets: ClassVar = PRESETS
    preset: Literal["coterie", "paper", "released"] = "coterie"
    kappa: Annotated[float, Gt(0.5), Le(1)] = 1.0
    labels: clustering.Labels = "cluster_qr"
    alpha_rule: Literal["constant", "local_rate", "decay"] = "constant"
    reward_weights: Literal["uniform", "samples"] = "uniform"
    ddof: Annotated[int, Ge(0), Le(1)] = 1
    loss_sampling_size: NonNegativeInt = 0
    normalize_rewards: bool = False
    start: Literal["zero", "uniform"] = "zero"
    upv_axis: clustering.Axis = "column"
    minmax: bool = False
    diagonal: float = 1.0
    db_space: clustering.Space = "rows"
    n_max_by: Literal["size", "cohort"] = "size"
    mse_scope: Literal["matrix", "sampled"] = "matrix"
    clients_per_round: NonNegativeInt = 0
    explore: bool = True
    server_lr: PositiveFloat = 1.0
    nesterov: bool = False

    def check(self) -> None:
        """Refuse one client a round: it has nobody to be compared with."""
        require(self.clients_per_round != 1, "clients_per_round", 1, "0, or at least 2")

    @property
    def averaging(self) -> Averaging:
        """The averaging of the aggregator."""
        if self.aggregator == "fedavgm":
            return Averaging(
                "samples", self.momentum, self.server_lr, self.nesterov, self.aggregation
            )
        return super().averaging

    def init_server_state(self, task: Task, rng: Rng) -> FedGwcClusters:
        """Return one cluster whose members have not met."""
        shared = super().init_server_state(task, rng)
        # $P^0$; "uniform" sums to 1 over all pairs.
        level = 1 / task.population**2 if self.start == "uniform" else 0.0
        return replace(shared, matrix=torch.full_like(shared.matrix, level))

    def select_cohort(
        self, shared: FedGwcClusters, rng: Rng, population: int, participation: float | int
    ) -> Int[Tensor, " active"]:
        """Draw in each cluster, the run's share or so many."""
        # 0 falls back to the run's share.
        return super().select_cohort(
            shared, rng, population, self.clients_per_round or participation
        )

    def _log_weights(
        self, shared: FedGwcClusters, members: Bool[Tensor, " population"]
    ) -> Float[Tensor, " population"]:
        if self.explore:
            return super()._log_weights(shared, members)
        # Equal weights: a uniform draw.
        return torch.zeros(len(members), dtype=torch.float64)

    def _step_size(self, index: int, cohort: int, size: int) -> float:
        if self.alpha_rule == "local_rate":
            return cohort / size
        if self.alpha_rule == "decay":
            return self.alpha * (1 + index) ** -self.kappa
        return self.alpha

    def _change_width(self, size: int, cohort: int) -> int:
        # Only pairs of the cohort changed: its block, or the block of the whole cluster.
        return size if self.mse_scope == "matrix" else cohort

    def _compute_rewards(
        self, context: ServerContext, cluster: int, message: Message
    ) -> Float[Tensor, " clients"]:
        losses = message.fields["losses"].cpu()
        # The published code fills up each step's losses with standard normal draws.
        missing = self.loss_sampling_size - len(losses)
        synthetic = None
        if missing > 0:
            # A stream for each cluster, so that splitting one changes no draw of another.
            stream = context.rng.generator(f"fedgwc.synthetic.{cluster}")
            synthetic = torch.from_numpy(stream.normal(size=(missing, losses.shape[1])))
        weights = message.fields["samples"].cpu() if self.reward_weights == "samples" else None
        rewards = clustering.gaussian_rewards(
            losses, ddof=self.ddof, weights=weights, synthetic=synthetic
        )
        return rewards / rewards.sum() if self.normalize_rewards else rewards

    def compute_affinity(
        self, matrix: Float[Tensor, "clients clients"], beta: float
    ) -> Float[Tensor, "clients clients"]:
        """Return the affinity of clients with some interactions, for a width."""
        return clustering.affinity_matrix(
            matrix, beta, axis=self.upv_axis, minmax=self.minmax, diagonal=self.diagonal
        )

    def propose_split(
        self, affinity: Float[Tensor, "clients clients"], cohort: int | None = None, seed: int = 0
    ) -> Int[Tensor, " clients"] | None:
        """Return the groups into which clients with an affinity split, or None if they do not."""
        n_max = self.n_max
        # Outside a round there is no cohort, and `n_max` alone bounds the children.
        if self.n_max_by == "cohort" and cohort is not None:
            n_max = min(n_max, len(affinity) // cohort)
        return clustering.propose_split(
            affinity,
            n_max=n_max,
            min_cluster_size=self.min_cluster_size,
            space=self.db_space,
            labels=self.labels,
            seed=seed,
        )
