"""DAC with the options in which its papers, their code and this project differ.

A study file sets these options on a DAC kind; `methods.registry` then takes a class of this module.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import NonNegativeFloat
from coterie.engine.task import Task
from coterie.errors import require
from coterie.exchange.base import Inbox, Message
from coterie.functional import aggregation, selection
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Round, State, make_variant
from coterie.methods.cost import Cost, CostSetting, Phase
from coterie.methods.dac import Dac, DacNoTwoHop, DacVar, MeasuredInbox, PeerSimilarities
from coterie.methods.peer_table import PeerTable, TableColumns


@dataclass(frozen=True)
class PublishedDac(Dac):
    r"""DAC with the options of published code; see `Dac` for the other settings.

    Args:
        aggregation: also "fedsim_prior", by the probabilities with which the peers were drawn, as
            the similarity paper's code does.
        tau_schedule: also "reference", $1 + \tau \tanh(bt/2)$, as published code does; or
            "entropy", each client's own $\tau$ at which its probabilities have `entropy` bits.
        two_hop_pick: use the estimate of the "most" similar peer, or of the "least" as one
            published code does.
        two_hop_relay: peers share similarities that they measured themselves ("direct") or
            estimates too ("any").
        two_hop_scope: ask this round's peers ("current"), or all ever read ("history": one more
            exchange).
        unknown: members without a similarity enter the softmax with 0 ("zero") or get the floor
            only ("floor").
        drop_nonpositive: treat similarities of 0 and below as unknown.
        entropy: bits, for tau_schedule = "entropy".
        scaling: "none", or "minmax": known similarities are scaled to [0, 1] before the softmax.
        eps_p: floor $\varepsilon_p$ of the probabilities.
    """

    aggregation: Literal["fedavg", "fedsim", "fedsim_prior"] | Aggregation = "fedavg"
    # More schedules than the method's own field has, which the type checker refuses.
    tau_schedule: Literal[  # pyright: ignore[reportIncompatibleVariableOverride]
        "constant", "var", "reference", "entropy"
    ] = "constant"
    two_hop_pick: Literal["most", "least"] = "most"
    two_hop_relay: Literal["direct", "any"] = "direct"
    two_hop_scope: Literal["current", "history"] = "current"
    unknown: Literal["zero", "floor"] = "zero"
    drop_nonpositive: bool = False
    entropy: NonNegativeFloat = 2.0
    scaling: Literal["none", "minmax"] = "none"
    eps_p: NonNegativeFloat = 1e-6

    def check(self) -> None:
        """Refuse weights by probabilities where a custom rule selects peers."""
        super().check()
        drawn = self.selection is None or self.aggregation != "fedsim_prior"
        expected = "another one with selection: a rule draws with no probability"
        require(drawn, "aggregation", self.aggregation, expected)
        asks = not (self.compares_profiles and self.asks_history)
        expected = "'current' where sketches or predictions are compared"
        require(asks, "two_hop_scope", self.two_hop_scope, expected)
        if self.table is not None:
            asked, sharpness = self.two_hop_scope, self.tau_schedule
            require(asked == "current", "two_hop_scope", asked, "'current' with a table")
            require(sharpness != "entropy", "tau_schedule", sharpness, "another with a table")

    @property
    def asks_history(self) -> bool:
        """Whether clients ask every peer that they ever read, in an exchange of its own."""
        return self.two_hop and self.two_hop_scope == "history"

    @property
    def shares_with_model(self) -> bool:
        """Whether a message with a model also holds the similarities that its client shares."""
        return self.two_hop and not self.asks_history

    @property
    def exchanges(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One more to ask earlier peers."""
        return super().exchanges + self.asks_history

    def publish(self, task: Task, state: State, exchange: int = 0) -> Message:
        """Publish the model, and the similarities alone where earlier peers are asked for them."""
        # With "pull" the only later exchange is the one that asks earlier peers, or that of models
        # behind the one of profiles; with "push" the base class refuses.
        if exchange and self.asks_history and self.loss_direction == "pull":
            return Message(state.params[:, :0], self.scores_to_share(state))
        return super().publish(task, state, exchange)

    def scores_to_share(self, state: State) -> dict[str, Tensor]:
        """Return the similarities to share with peers."""
        memory: PeerSimilarities | PeerTable = state.memory
        dropped, dtype = self.drop_nonpositive, state.params.dtype
        return memory.scores_to_share(self.two_hop_relay, drop_nonpositive=dropped, dtype=dtype)

    def tau_at(self, round: int) -> float:
        """Return the inverse temperature of a round."""
        if self.tau_schedule == "reference":
            return 1 + self.tau * math.tanh(self.b * round / 2)
        return super().tau_at(round)

    def peer_probabilities(
        self, ids: Int[Tensor, " clients"], memory: PeerSimilarities | TableColumns, round: int
    ) -> Tensor:
        """Return the probabilities of drawing peers next ($p_{ij}$): clients x population."""
        # `considered` None: unknown members enter the softmax with 0. Otherwise they get the floor
        # alone.
        similarity, considered, tau = memory.similarity, None, self.tau_at(round)
        if self.drop_nonpositive or self.scaling == "minmax" or self.unknown == "floor":
            usable = memory.usable_members(drop_nonpositive=self.drop_nonpositive)
            similarity = torch.where(usable, similarity, 0)
            considered = usable if self.unknown == "floor" else None
            if self.scaling == "minmax":
                similarity = selection.scale_min_max(similarity, usable)
        if self.tau_schedule == "entropy":
            tau = selection.find_entropy_tau(similarity, considered, ids, self.entropy)
        return self._draw_probabilities(ids, memory, similarity, tau, considered, self.eps_p)

    def aggregation_weights(
        self, rnd: Round, measured: MeasuredInbox, prior: Float[Tensor, "clients peers"]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the weight of each slot and of the client's own model; None for a custom rule."""
        if self.aggregation == "fedsim_prior":
            return aggregation.fedsim_weights(prior, measured.inbox.mask)
        return super().aggregation_weights(rnd, measured, prior)

    def estimate_from_peers(
        self,
        rnd: Round,
        state: State,
        memory: PeerSimilarities | PeerTable,
        relays: Inbox,
        cost: dict[str, Tensor],
        pick: Literal["most", "least"] = "most",
    ) -> tuple[PeerSimilarities | PeerTable, Info]:
        """Estimate by this round's peers, or by all that were ever read, which are asked for it."""
        if self.asks_history:
            assert isinstance(memory, PeerSimilarities)  # `check` refuses a table
            # `memory` already counts this round's reads: these peers are asked too.
            read = memory.count > 0
            earlier = selection.ids_from_mask(
                read & rnd.candidates_of(torch.arange(len(read)), read)
            )
            # A client shares what it knew before the round, as every other message does.
            message = Message(state.params[:, :0], self.scores_to_share(state))
            relays = rnd.exchange.pull(message, earlier)
            extra = cost.get("extra_bytes", torch.zeros_like(rnd.ids))
            cost["extra_bytes"] = extra + relays.bytes.sum(1)
        return super().estimate_from_peers(rnd, state, memory, relays, cost, self.two_hop_pick)

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Add the answers of the peers that were ever read."""
        cost = super().cost(setting, phase)
        if isinstance(phase, str) or not self.asks_history:
            return cost
        others = setting.num_others
        peers = min(self.num_peers, others)
        scores = setting.population * (setting.number_bytes + 1)
        # Expected number of different peers read after phase + 1 rounds of uniform draws.
        known = others * (1 - (1 - peers / max(1, others)) ** (phase + 1))
        return cost + Cost(
            extra_floats=known * setting.population, messages=known, bytes=known * scores
        )


PublishedDacVar = make_variant(
    PublishedDac, "PublishedDacVar", DacVar.kind, DacVar.summary, tau_schedule="var"
)
PublishedDacNoTwoHop = make_variant(
    PublishedDac, "PublishedDacNoTwoHop", DacNoTwoHop.kind, DacNoTwoHop.summary, two_hop=False
)
