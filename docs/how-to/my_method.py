"""A method of your own: copy this file, rename the class, and change `exchange`."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from coterie import aggregation, selection
from coterie.methods.base import Info, PeerMethod, Round, State, check_positive, mixing


@final
@dataclass(frozen=True)
class MyMethod(PeerMethod):
    """Average with random peers, but keep a fixed share of the own model.

    Args:
        num_peers: peers read each round; clamped to population - 1.
        keep: share of the own model that is kept, in [0, 1].
    """

    kind: ClassVar[str] = "my-method"
    summary: ClassVar[str] = "average with random peers, keeping a share of the own model"
    references: ClassVar[tuple[str, ...]] = ("You, Your paper, this year, https://example.org",)
    num_peers: int = 5
    keep: float = 0.5

    def __post_init__(self) -> None:
        check_positive(self, num_peers=self.num_peers)

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """What happens between two phases of local training: sample, pull, mix."""
        noise = rnd.rng.gumbel("peers", rnd.ids, rnd.task.population)
        peers = selection.uniform(noise, self.num_peers, rnd.candidates)
        inbox = rnd.exchange.pull(self.message(rnd.task, state), peers)
        weights, own = aggregation.fedavg(inbox.field("samples"), rnd.task.samples, inbox.mask)
        weights, own = (1 - self.keep) * weights, self.keep + (1 - self.keep) * own
        mixed = inbox.mix(weights, own=state.params, own_weight=own)
        return replace(state, params=mixed), mixing(inbox, weights, own)
