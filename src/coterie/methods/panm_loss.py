"""PANMLoss: adaptive neighbour matching by the loss of the peers' models on the own data."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from jaxtyping import Float
from torch import Tensor

from coterie.errors import require
from coterie.exchange.base import Inbox
from coterie.functional import similarity
from coterie.methods.base import Info, Round, State
from coterie.methods.panm import Panm


@final
@dataclass(frozen=True)
class PanmLoss(Panm):
    r"""PANM by the loss of the peer's model on the own data; see `Panm`.

    Args:
        transform: the similarity: "inverse", $1 / (\ell + \varepsilon)$, or "negative", $-\ell$. The ranking is the
            same, the mixture is not.
        eps: $\varepsilon$.
    """

    kind: ClassVar[str] = "panm-loss"
    summary: ClassVar[str] = "match neighbours adaptively, by the loss of their models on the own data"
    transform: Literal["inverse", "negative"] = "inverse"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eps >= 0, "panm-loss.eps", self.eps, "0 or more")

    def score(self, rnd: Round, state: State, inbox: Inbox) -> tuple[Float[Tensor, "clients peers"], Info]:
        """Evaluate the received models on the own training data."""
        loss = rnd.task.score(inbox).cpu().double()
        value = similarity.inverse(loss, self.eps) if self.transform == "inverse" else -loss
        return value, {"passes": inbox.mask.sum(1) * rnd.task.counts("train")}
