"""FedGWC: clients whose presence changes the others' rewards alike are grouped, again and again.

What the paper and its authors' code do differently are options of a subclass,
`papers.fedgwc.PublishedFedGwc`, which overrides the small functions here.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from coterie.engine.task import Task
from coterie.exchange.base import Inbox, Message
from coterie.functional import clustering, metrics, selection
from coterie.functional.metrics import Metric
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State, draw_cohort_noise
from coterie.methods.server import (
    Averaging,
    Clusters,
    Momentum,
    ServerContext,
    ServerMethod,
    Weights,
    cluster_sizes,
    sees_whole_cohort,
)
from coterie.rng import Rng


@dataclass(frozen=True)
class FedGwcClusters(Clusters):
    r"""Clusters, and what was seen of their members.

    Args:
        matrix: $P$; the block of a cluster's members is the cluster's. Its diagonal is $\gamma$.
        sampled: how often each member took part ($u_k$).
        pairs: how often each pair did ($N_{kj}$).
        mse: running mean of the squared change of each cluster's block.
        patience: rounds in a row in which it was small.
    """

    matrix: Float[Tensor, "population population"]
    sampled: Int[Tensor, " population"]
    pairs: Int[Tensor, "population population"]
    mse: Float[Tensor, " clusters"]
    patience: Int[Tensor, " clusters"]


_ROWS_AT_ONCE = 256  # of a matrix of pairs

MIN_PARTICIPANTS = 3
"""Least number of a cluster's clients in a round: two get equal rewards whatever their losses."""


@dataclass(frozen=True)
class FedGwc(ServerMethod):
    r"""Clusters from Gaussian rewards of local losses.

    In each round, and for each cluster, a client's loss trace is compared with those of the clients
    sampled with it ($\omega_k$), the rewards update the interaction matrix $P$, and once $P$ has
    settled its members are grouped by spectral clustering of an affinity of their vectors. Children
    start from the parent's model. Each cluster has its own participation: the run's share of its
    members, at least 3; but see `cohort_of`.

    Args:
        aggregator: how each cluster averages: "fedavg", "fedavgm", "fedprox" or "fairavg".
        beta: width of the affinity ($\beta$).
        eps: a cluster has settled when the running mean of its squared change is below
            ($\varepsilon$).
        alpha: $\alpha$, in (0, 1); the paper takes the participation rate.
        n_max: most children of a split.
        patience: rounds in a row below `eps` before a split is tried; 0 for $K_c / |P|$, rounded.
        cohort_of: the run's share is of each "cluster", or of the "population": then more clusters
            do not make a round dearer. Where three of each are more than that share, clusters take
            turns, the one whose members took part least often first.
        min_cluster_size: a split with a smaller part is refused; 30 is advisable at 10 %
            participation.
        min_pair_updates: no split before pairs took part together so often on average.
        momentum: of "fedavgm".
        mu: of "fedprox"; the penalty is no part of the losses.
        trace: losses sent, when local training is counted in epochs; with steps, one each.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the mean when not given.
    """

    kind: ClassVar[str] = "fedgwc"
    reports: ClassVar[tuple[Metric, ...]] = (metrics.INTERACTION_CHANGE,)
    summary: ClassVar[str] = (
        "clusters of clients with a similar effect on each other's loss rewards"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Licciardi, Leo, Fanì, Caputo, Ciccone, Interaction-aware Gaussian weighting for "
        "clustered federated "
        "learning, 2025, https://arxiv.org/abs/2502.03340",
    )
    needs_single_models: ClassVar[str] = "its server compares the losses of single clients"
    aggregator: Literal["fedavg", "fedavgm", "fedprox", "fairavg"] = "fedavg"
    beta: PositiveFloat = 0.5
    eps: NonNegativeFloat = 1e-5
    alpha: Annotated[float, Gt(0), Lt(1)] = 0.1
    n_max: Annotated[int, Ge(2)] = 4
    patience: NonNegativeInt = 0
    cohort_of: Literal["cluster", "population"] = "cluster"
    min_cluster_size: PositiveInt = 3
    min_pair_updates: NonNegativeFloat = 1.0
    momentum: Momentum = 0.9
    mu: NonNegativeFloat = 0.01
    trace: PositiveInt = 32
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """That of the aggregator."""
        if self.aggregator == "fedavgm":
            return Averaging("samples", self.momentum, rule=self.aggregation)
        weights: Weights = "uniform" if self.aggregator == "fairavg" else "samples"
        return Averaging(weights, rule=self.aggregation)

    @property
    def privacy_leak(self) -> str:
        """See `Method.privacy_leak`."""
        return "the losses of the first batches are sent"

    def init_server_state(self, task: Task, rng: Rng) -> FedGwcClusters:
        """Return one cluster whose members have not met."""
        size = task.population
        begin = self.averaging.init_clusters(task.draw_models(rng, 1), size, task.layout)
        matrix = torch.zeros(size, size, dtype=torch.float64)
        pairs = torch.zeros(size, size, dtype=torch.int32)
        never = torch.zeros(size, dtype=torch.int64)
        # A running mean of 1 is far above `eps`: a new cluster has not settled.
        one = torch.ones(1, dtype=torch.float64)
        return FedGwcClusters(
            begin.models, begin.velocity, begin.label, matrix, never, pairs, one, never[:1]
        )

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Train, with FedProx's penalty where that is the aggregator."""
        if self.aggregator == "fedprox":
            return rnd.train(state, anchor=state.params, prox=self.mu)
        return rnd.train(state)

    def publish(self, rnd: Round, state: State, info: Info) -> Message:
        """Send the losses of the first steps, padded with NaN to a length all clients share."""
        losses = info["losses"]
        width = rnd.local.steps
        if width is None:
            width = self.trace
        padded = losses.new_full((len(losses), width), torch.nan)
        # Clients with fewer steps keep NaN behind their last loss.
        padded[:, : losses.shape[1]] = losses[:, :width]
        return Message(state.params, {"samples": rnd.task.num_samples, "losses": padded})

    def round(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Report also how much each client's cluster still changes, where that is requested."""
        new, info = super().round(rnd, state)
        if metrics.INTERACTION_CHANGE.name in rnd.metrics and sees_whole_cohort(rnd):
            change = new.shared.mse[new.shared.label[rnd.ids]]
            info = {**info, metrics.INTERACTION_CHANGE.name: change}
        return new, info

    # ---------------------------------------------------------------- where the server role is

    def select_cohort(
        self, shared: FedGwcClusters, rng: Rng, population: int, participation: float | int
    ) -> Int[Tensor, " active"]:
        """Draw in each cluster, as many as `_cohort_sizes` says."""
        noise = draw_cohort_noise(rng, population)
        chosen = []
        # One noise for all clusters: who takes part does not depend on the order of the clusters.
        for cluster, count in enumerate(self._cohort_sizes(shared, participation)):
            members = shared.label == cluster
            preference = self._log_weights(shared, members)
            chosen.append(
                selection.draw_cohort(noise, count, log_weights=preference, members=members)
            )
        return torch.cat(chosen).sort().values

    def _log_weights(
        self, shared: FedGwcClusters, members: Bool[Tensor, " population"]
    ) -> Float[Tensor, " population"]:
        r"""Prefer members that took part less often: $p_k \propto \exp(\min u - u_k)$."""
        return (shared.sampled[members].min() - shared.sampled).double()

    def _cohort_sizes(self, shared: FedGwcClusters, rate: float | int) -> list[int]:
        """Return how many clients of each cluster take part."""
        members = cluster_sizes(shared.label, len(shared.models)).tolist()
        if self.cohort_of == "cluster":
            return [selection.cohort_size(size, rate, least=MIN_PARTICIPANTS) for size in members]
        often = torch.zeros(len(members), dtype=torch.float64)
        # Mean number of rounds in which a member took part, of each cluster; no cluster is empty.
        often = often.index_add(0, shared.label, shared.sampled.double()) / torch.tensor(members)
        return selection.share_places(
            members,
            often,
            selection.cohort_size(sum(members), rate, least=MIN_PARTICIPANTS),
            least=MIN_PARTICIPANTS,
        )

    def aggregate(
        self, context: ServerContext, shared: FedGwcClusters, message: Message
    ) -> FedGwcClusters:
        """Average, reward and, where a cluster has settled, split."""
        assert message.ids is not None
        group, before = shared.label[message.ids], len(shared.models)
        # A cluster with fewer members than the least number of updates needs all of them.
        least = cluster_sizes(shared.label, before).clamp(max=context.min_updates)
        shared = self.averaging.update_models(shared, message, group, least, context)
        # Clusters that are founded in this loop have no updates of their own yet.
        for cluster in range(before):
            rows = message.take_rows((group == cluster).nonzero().flatten())
            if len(rows):
                shared = self._update_interactions(context, shared, cluster, rows)
        return shared

    def _update_interactions(
        self, context: ServerContext, shared: FedGwcClusters, cluster: int, message: Message
    ) -> FedGwcClusters:
        """Update a cluster's rewards and interactions, and split it if it has settled."""
        assert message.ids is not None
        ids, size = message.ids, int((shared.label == cluster).sum())
        pairs = shared.pairs.clone()
        # Ids are distinct, so that the addition counts each pair once; the diagonal counts too.
        for rows in ids.split(_ROWS_AT_ONCE):
            pairs[rows[:, None], ids[None, :]] += 1
        shared = replace(
            shared, pairs=pairs, sampled=shared.sampled.index_add(0, ids, torch.ones_like(ids))
        )
        # A reward compares with others.
        if len(ids) < 2:
            return shared
        alpha = self._step_size(context.index, len(ids), size)
        matrix = clustering.update_interactions(
            shared.matrix, ids, self._compute_rewards(context, cluster, message), alpha
        )
        width = self._change_width(size, len(ids))
        change = (matrix - shared.matrix).square_().sum() / width**2
        mse, patience = shared.mse.clone(), shared.patience.clone()
        mse[cluster] = (1 - alpha) * mse[cluster] + alpha * change
        patience[cluster] = (patience[cluster] + 1) * (mse[cluster] < self.eps)
        shared = replace(shared, matrix=matrix, mse=mse, patience=patience)
        # K_c / |P|, rounded half up: so many rounds until each member has taken part once on
        # average.
        needed = self.patience or max(1, int(size / len(ids) + 0.5))
        if patience[cluster] < needed:
            return shared
        return self._try_split(context, shared, cluster, len(ids))

    def _step_size(self, index: int, cohort: int, size: int) -> float:
        """Return the step of the running means in a round, for a cluster with so many members."""
        return self.alpha

    def _change_width(self, size: int, cohort: int) -> int:
        """Return the width of the block of the matrix over which the squared change is averaged."""
        return size

    def _compute_rewards(
        self, context: ServerContext, cluster: int, message: Message
    ) -> Float[Tensor, " clients"]:
        return clustering.gaussian_rewards(message.fields["losses"].cpu())

    def compute_affinity(
        self, matrix: Float[Tensor, "clients clients"], beta: float
    ) -> Float[Tensor, "clients clients"]:
        """Return the affinity of clients with some interactions, for a width."""
        return clustering.affinity_matrix(matrix, beta)

    def propose_split(
        self, affinity: Float[Tensor, "clients clients"], cohort: int | None = None, seed: int = 0
    ) -> Int[Tensor, " clients"] | None:
        """Return the groups into which clients with an affinity fall apart; None where they do not.

        Args:
            affinity: of the members of a cluster.
            cohort: how many of them took part in the round; None outside a round.
            seed: of the eigenvalue solver.
        """
        return clustering.propose_split(
            affinity, n_max=self.n_max, min_cluster_size=self.min_cluster_size, seed=seed
        )

    def _try_split(
        self, context: ServerContext, shared: FedGwcClusters, cluster: int, cohort: int
    ) -> FedGwcClusters:
        """Split a settled cluster if its members fall apart; restart its clock."""
        members = (shared.label == cluster).nonzero().flatten()
        block, size = (members[:, None], members[None, :]), len(members)
        met = shared.pairs[block].double()
        # Mean over pairs of different members: the diagonal counts single clients.
        apart = float(met.sum() - met.diagonal().sum()) / max(1, size * (size - 1))
        # Both parts need their least size.
        if size < 2 * self.min_cluster_size or apart < self.min_pair_updates:
            return shared
        affinity = self.compute_affinity(shared.matrix[block], self.beta)
        # scikit-learn takes seeds as 32-bit integers.
        seed = int(context.rng.generator(f"fedgwc.split.{cluster}").integers(1 << 31))
        label = self.propose_split(affinity, cohort, seed)
        # The clock starts again whether or not the split succeeds; children inherit it.
        mse, patience = shared.mse.clone(), shared.patience.clone()
        mse[cluster], patience[cluster] = 1.0, 0
        shared = replace(shared, mse=mse, patience=patience)
        if label is None:
            return shared
        return _split_cluster(shared, cluster, members, label)


def _split_cluster(
    shared: FedGwcClusters, cluster: int, members: Tensor, label: Tensor
) -> FedGwcClusters:
    """Found a cluster for each label but 0, on the parent's model; label 0 keeps the parent."""
    count, children = len(shared.models), int(label.max())
    # Label 0 stays; labels 1, 2, ... become the next free numbers.
    number = torch.where(label == 0, cluster, count + label - 1)

    def append_children(value: Tensor) -> Tensor:
        return torch.cat([value, value[cluster].expand(children, *value.shape[1:])])

    return replace(
        shared,
        label=shared.label.index_copy(0, members, number),
        models=append_children(shared.models),
        velocity=append_children(shared.velocity),
        mse=append_children(shared.mse),
        patience=append_children(shared.patience),
    )
