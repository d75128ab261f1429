"""FedAvg, and its servers with momentum (FedAvgM) and with uniform weights (FairAvg)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from coterie._util.settings import PositiveFloat
from coterie.exchange.base import Message
from coterie.functional.robust import Aggregation
from coterie.methods.base import make_variant
from coterie.methods.server import Averaging, Momentum, ServerContext, ServerMethod, Weights


@dataclass(frozen=True)
class OneModel(ServerMethod):
    """A server with one model, averaged over the cohort."""

    needs_single_models: ClassVar[str] = ""

    def aggregate(self, context: ServerContext, shared: Any, message: Message) -> Any:
        """Average."""
        # All rows are in group 0.
        everybody: Tensor = torch.zeros(len(message), dtype=torch.int64)
        return self.averaging.update_models(
            shared, message, everybody, context.min_updates, context
        )


@final
@dataclass(frozen=True)
class FedAvg(OneModel):
    r"""Federated averaging: $\theta^{t+1} = \sum_{k \in P} (n_k / n_P)\, \theta_k^{t+1}$.

    Args:
        weights: of the clients: "samples" ($n_k$) or "uniform".
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "a server averages the models of each round's clients"
    references: ClassVar[tuple[str, ...]] = (
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas, Communication-efficient learning of "
        "deep networks from "
        "decentralized data, 2017, https://arxiv.org/abs/1602.05629",
    )
    weights: Weights = "samples"
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """By samples, uniform, or by a custom rule."""
        return Averaging(self.weights, rule=self.aggregation)


@final
@dataclass(frozen=True)
class FedAvgM(OneModel):
    r"""FedAvg with momentum: $v \leftarrow \beta v + d$, $\theta \leftarrow \theta - \eta_s v$.

    $d$ is the model sent minus the mean of the returned models.

    Args:
        momentum: $\beta$, in [0, 1).
        server_lr: $\eta_s$.
        nesterov: step along $d + \beta v$ instead, as the authors' experiments do.
        aggregation: how models are merged: a rule of `functional.robust.RULES`, by its name or as a
            table with its settings, or the import path of a custom rule, a function of
            `functional.aggregation.ReceivedModels`; the weighted mean when not given.
    """

    kind: ClassVar[str] = "fedavgm"
    summary: ClassVar[str] = "FedAvg with momentum on the server"
    references: ClassVar[tuple[str, ...]] = (
        "Hsu, Qi, Brown, Measuring the effects of non-identical data distribution for federated "
        "visual "
        "classification, 2019, https://arxiv.org/abs/1909.06335",
    )
    momentum: Momentum = 0.9
    server_lr: PositiveFloat = 1.0
    nesterov: bool = False
    aggregation: Aggregation | None = None

    @property
    def averaging(self) -> Averaging:
        """With momentum."""
        return Averaging("samples", self.momentum, self.server_lr, self.nesterov, self.aggregation)


FairAvg = make_variant(
    FedAvg, "FairAvg", "fairavg", "FedAvg with the same weight for every client", fixed=True,
    weights="uniform",
    references=("Michieli, Ozay, Are all users treated fairly in federated learning systems?, 2021",
    ),
)  # fmt: skip
