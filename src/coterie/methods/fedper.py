"""FedPer, FedRep and FedBN: FedAvg of a part of the model; the rest stays with each client.

DFedAlt is FedRep between peers, without a server.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, final

from coterie._util.settings import NonNegativeInt
from coterie.errors import ConfigError
from coterie.exchange.base import Inbox
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State
from coterie.methods.ditto import personal_training
from coterie.methods.fedavg import OneModel
from coterie.methods.random_gossip import Gossip
from coterie.methods.server import Averaging, Weights
from coterie.models.layout import Layout
from coterie.models.part import match_patterns


def head_tensors(layout: Layout, layers: int) -> tuple[str, ...]:
    """Return the tensors of the last layers with trained parameters, with running statistics.

    Raises:
        ConfigError: when the model has fewer layers.
    """
    found = list(layout.layer_tensors().values())
    if layers > len(found):
        raise ConfigError(
            f"personal_layers is {layers}, and the model has {len(found)} with trained parameters; "
            f"expected at most {len(found)}"
        )
    return tuple(chain.from_iterable(found[len(found) - layers :]))


def train_alternately(
    rnd: Round, state: State, own: Sequence[str], head_epochs: int | None
) -> tuple[State, Info]:
    """Train each client's head with the body fixed, then the body with the head fixed.

    Args:
        rnd: the round; its local training is the body's.
        state: `state.params` are the models to start from; not changed.
        own: names of the head's tensors. Where there are none, all is trained together.
        head_epochs: epochs of the head; as long as the body when None.
    """
    layout = rnd.task.layout
    if not own:
        return rnd.train(state)
    # Statistics lie behind the trained columns: no gradient moves them.
    last = match_patterns(layout, own, "the head")[: layout.trainable]
    # Steps change the models in place; the state must not change.
    params, longer = state.params.clone(), personal_training(rnd.local, head_epochs, None)
    parts = (longer, last, "batches.head"), (rnd.local, ~last, "batches")
    reports = []
    # Track 0 is the optimizer of the head, track 1 that of the body.
    for track, (local, only, purpose) in enumerate(parts):
        steps = rnd.train_stepwise(state, local=local, purpose=purpose, only=only)
        for step in range(steps.num_steps):
            steps.apply_gradient(params, steps.compute_gradient(params, step), step, track)
        reports.append(steps.finish(params))
        state = replace(state, moments=steps.optimizer)
    fitted, info = reports
    # A client whose head diverged may have a finite body.
    lost = fitted["diverged"] | info["diverged"]
    return replace(state, params=params), {
        **info,
        "train_samples": fitted["train_samples"] + info["train_samples"],
        "diverged": lost,
    }


@final
@dataclass(frozen=True)
class FedPer(OneModel):
    r"""FedAvg whose last layers stay with the clients; all layers train together.

    Running statistics of shared layers are merged as the run's `buffers` says. The mean of
    statistics from clients whose inputs differ fits none of them, nor the head that each trained on
    its own: `buffers = "local"` keeps them.

    Any other method does so where the run's `shared` leaves out the head: `shared = ["!head"]`.

    Args:
        personal_layers: how many layers are personal ($K_P$), counted from the last one that has
            trained parameters, normalizations included; 0 is FedAvg.
        weights: of the clients: "samples" ($n_k$) or "uniform".
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "fedper"
    summary: ClassVar[str] = "FedAvg of all layers but the last ones, which each client keeps"
    references: ClassVar[tuple[str, ...]] = (
        "Arivazhagan, Aggarwal, Singh, Choudhary, Federated learning with personalization "
        "layers, 2019, "
        "https://arxiv.org/abs/1912.00818",
    )
    personal_layers: NonNegativeInt = 1
    weights: Weights = "samples"
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, uniform, or by a custom rule."""
        return Averaging(self.weights, rule=self.aggregation)

    def personal_tensors(self, layout: Layout) -> Sequence[str]:
        """Keep the last layers."""
        return head_tensors(layout, self.personal_layers)


@final
@dataclass(frozen=True)
class FedRep(OneModel):
    r"""FedAvg of a representation; in a round a client fits its head first, then the rest.

    The head ($h_i$) trains for `head_epochs` epochs with the body fixed, then the body ($\phi$)
    trains as the run says with the head fixed. Running statistics of the body follow in both, and
    are merged as `buffers` says (see FedPer). The paper's theorem takes one step of the body a
    round, its experiments epochs: ten of the head, then one or five of the body. The authors' code
    averages by samples.

    Args:
        personal_layers: how many layers the head has, counted from the last one that has trained
            parameters; 0 is FedAvg.
        head_epochs: epochs of the head ($\tau_h$); those (or the steps) of the run when None.
        weights: of the clients: "uniform" as in the paper, or "samples".
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "fedrep"
    tracks: ClassVar[int] = 2
    summary: ClassVar[str] = "a shared body and each client's own head, trained in turn"
    references: ClassVar[tuple[str, ...]] = (
        "Collins, Hassani, Mokhtari, Shakkottai, Exploiting shared representations for "
        "personalized federated "
        "learning, 2021, https://arxiv.org/abs/2102.07078",
    )
    personal_layers: NonNegativeInt = 1
    head_epochs: NonNegativeInt | None = 10
    weights: Weights = "uniform"
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """Uniform, by samples, or by a custom rule."""
        return Averaging(self.weights, rule=self.aggregation)

    def personal_tensors(self, layout: Layout) -> Sequence[str]:
        """Keep the head."""
        return head_tensors(layout, self.personal_layers)

    def count_step_models(self, moments: int) -> int:
        """See `Method.count_step_models`: a gradient; the body is trained by the engine."""
        return 1 + moments

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Train the head, then the body."""
        return train_alternately(
            rnd, state, self.personal_tensors(rnd.task.layout), self.head_epochs
        )


@final
@dataclass(frozen=True)
class DFedAlt(Gossip):
    r"""FedRep without a server: bodies gossip; each client trains its head and its body in turn.

    The head ($v_i$) trains for `head_epochs` epochs with the body fixed, then the body ($u_i$)
    trains as the run says with the head fixed. The paper mixes with the neighbors of a graph, by
    the weights of a doubly stochastic matrix; here peers are drawn again in every round, and weigh
    by their samples. The paper's other method, DFedSalt, trains the body by sharpness-aware
    minimization, and is not here.

    Args:
        num_peers: peers read each round; clamped to population - 1.
        selection: import path of a rule of yours that says which peers a client reads, a function
            of `functional.selection.PeerKnowledge`; a uniform draw when not given.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the average by numbers of
            samples when not given.
        personal_layers: how many layers the head has, counted from the last one that has trained
            parameters; 0 is Random.
        head_epochs: epochs of the head ($K_v$); those (or the steps) of the run when None.
    """

    kind: ClassVar[str] = "dfedalt"
    tracks: ClassVar[int] = 2
    summary: ClassVar[str] = (
        "gossip of bodies; each client trains its own head and its body in turn"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Shi, Liu, Sun, Lin, Shen, Wang, Tao, Towards more suitable personalization in federated "
        "learning via "
        "decentralized partial model training, 2023, https://arxiv.org/abs/2305.15157",
    )
    personal_layers: NonNegativeInt = 1
    head_epochs: NonNegativeInt | None = None

    def personal_tensors(self, layout: Layout) -> Sequence[str]:
        """Keep the head."""
        return head_tensors(layout, self.personal_layers)

    def count_step_models(self, moments: int) -> int:
        """See `Method.count_step_models`: a gradient; the body is trained by the engine."""
        return 1 + moments

    def local_update(
        self, rnd: Round, state: State, *, in_place: bool = False
    ) -> tuple[State, Info]:
        """Train the head, then the body."""
        return train_alternately(
            rnd, state, self.personal_tensors(rnd.task.layout), self.head_epochs
        )


@final
@dataclass(frozen=True)
class FedBN(OneModel):
    """FedAvg whose normalization layers, with their running statistics, stay with the clients.

    The paper's are batch normalizations; layer and group normalizations stay too. A model without
    any is FedAvg's. The authors' code gives all clients the same weight. With `buffers = "local"`
    alone, the affine parameters of any method are averaged and the statistics are not.

    Args:
        weights: of the clients: "samples" ($n_k$) or "uniform".
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "fedbn"
    summary: ClassVar[str] = "FedAvg of all layers but the normalizations, which each client keeps"
    references: ClassVar[tuple[str, ...]] = (
        "Li, Jiang, Zhang, Kamp, Dou, FedBN: federated learning on non-IID features via local "
        "batch normalization, "
        "2021, https://arxiv.org/abs/2102.07623",
    )
    weights: Weights = "samples"
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, uniform, or by a custom rule."""
        return Averaging(self.weights, rule=self.aggregation)

    def personal_tensors(self, layout: Layout) -> Sequence[str]:
        """Keep the normalizations."""
        return layout.normalization_tensors()
