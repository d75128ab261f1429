"""Random: gossip with peers drawn uniformly in every round."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from coterie._util.settings import PositiveInt
from coterie.functional import aggregation
from coterie.methods.base import Info, PeerMethod, Round, State, drawn_uniformly, mixing
from coterie.methods.cost import Cost, Setting, reading


@final
@dataclass(frozen=True)
class Random(PeerMethod):
    """Gossip averaging with uniformly drawn peers.

    Args:
        num_peers: peers read each round ($m$); clamped to population - 1.
    """

    kind: ClassVar[str] = "random"
    summary: ClassVar[str] = "average with peers drawn uniformly in every round"
    references: ClassVar[tuple[str, ...]] = (
        "Boyd, Ghosh, Prabhakar, Shah, Randomized gossip algorithms, 2006, https://doi.org/10.1109/TIT.2006.874516",
    )
    num_peers: PositiveInt = 5

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw, pull, average."""
        peers = drawn_uniformly(rnd, self.num_peers)
        inbox = rnd.exchange.pull(self.message(rnd.task, state), peers)
        weights, own_weight = aggregation.fedavg(inbox.field("samples"), rnd.task.samples, inbox.mask)
        mixed = inbox.mix(weights, own=state.params, own_weight=own_weight)
        return replace(state, params=mixed), mixing(inbox, weights, own_weight)

    def cost(self, setting: Setting, round: int) -> Cost:
        """Read the peers' models."""
        return reading(setting, min(self.num_peers, setting.others))
