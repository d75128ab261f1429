"""PANMGrad: adaptive neighbour matching by cosines of updates."""

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from coterie.engine.task import Task
from coterie.errors import require
from coterie.exchange.base import Inbox
from coterie.functional import similarity
from coterie.methods import _measuring
from coterie.methods.base import Info, Round, State
from coterie.methods.panm import Panm


@final
@dataclass(frozen=True)
class PanmGrad(Panm):
    r"""PANM by cosines of updates; see `Panm`.

    $s_{ij} = \alpha \cos(g_i, g_j) + (1 - \alpha) \cos(h_i, h_j)$ with the last local update $g$ and the whole way from
    the start $h$. A peer sends $g_j$ beside its model unless $\alpha = 0$.

    Args:
        alpha: weight $\alpha$ of the last update, in [0, 1].
    """

    kind: ClassVar[str] = "panm-grad"
    summary: ClassVar[str] = "match neighbours adaptively, by the cosines of updates"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.alpha <= 1, "panm-grad.alpha", self.alpha, "a number from 0 to 1")

    def remembered(self, task: Task) -> tuple[int, int]:
        """Remember what has to be told to others."""
        apart = task.init_mode == "per_client" and self.alpha < 1
        if apart:
            text = "panm-grad: cosines of updates say little while clients start from different models (per_client)"
            warnings.warn(text, stacklevel=2)
        return task.layout.trainable * (self.alpha > 0), task.layout.trainable * apart

    def trained(self, state: State, before: Float[Tensor, "clients params"]) -> State:
        """Remember the update of the last local training."""
        columns = slice(state.memory.update.shape[1])
        update = state.params[:, columns] - before[:, columns]
        return replace(state, memory=replace(state.memory, update=update))

    def score(self, rnd: Round, state: State, inbox: Inbox) -> tuple[Float[Tensor, "clients peers"], Info]:
        """Compare updates with those received."""
        total = torch.zeros(inbox.mask.shape, dtype=torch.float64)
        if self.alpha > 0:
            last = similarity.cosine(state.memory.update, inbox.fields["update"], inbox.index, inbox.mask)
            total = total + self.alpha * last
        if self.alpha < 1:
            total = total + (1 - self.alpha) * _measuring.cosine_since_start(rnd, state, inbox)
        copies = int(self.alpha > 0) + int(state.memory.origin.shape[1] > 0)
        return total, {"extra_models": inbox.mask.sum(1) * copies}
