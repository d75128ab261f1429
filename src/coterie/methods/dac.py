"""DAC: gossip with peers drawn by similarity."""

import math
import typing
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie._util import pages
from coterie._util.settings import CustomFunction, NonNegativeFloat, NonNegativeInt, PositiveInt
from coterie.engine.task import Task
from coterie.errors import ConfigError, require
from coterie.exchange.base import Inbox, Message
from coterie.functional import adapters, aggregation, selection, similarity, sketches
from coterie.functional.robust import Aggregation
from coterie.methods.base import (
    ROWS_AT_ONCE,
    Info,
    PeerMethod,
    RememberedPeers,
    Round,
    State,
    choose_peers_by_rule,
    draw_peers_uniformly,
    make_variant,
    merge_by_rule,
    mixing_report,
    similarity_report,
)  # fmt: skip
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_reading
from coterie.methods.peer_profiles import (
    Profile,
    Sketched,
    compare_profiles,
    count_numbers,
    predict_profile,
    sketch_profile,
)
from coterie.methods.peer_table import (
    ESTIMATED,
    MEASURED,
    ROWS_OF_TABLES,
    UNKNOWN,
    DatedTable,
    PeerTable,
    TableColumns,
    table_width,
)
from coterie.rng import Rng

Similarity = Literal[
    "inv_loss", "inv_l2", "cos_weight", "cos_grad", "cos_product", "agreement", "public_agreement"
]
# Similarities of what models return for a client's training data.
_BY_OUTPUTS = ("inv_loss", "agreement")
# Similarities of parameters.
_BY_PARAMETERS = typing.get_args(Sketched)


@dataclass(frozen=True)
class MeasuredInbox:
    """Received models and their similarities.

    Args:
        inbox: the received messages.
        similarity: similarity of each slot, float64; 0 where nothing arrived.
        cost: costs for the record.
    """

    inbox: Inbox
    similarity: Float[Tensor, "clients peers"]
    cost: Info


def pull_and_measure(
    rnd: Round,
    state: State,
    message: Message,
    peers: Int[Tensor, "clients peers"],
    kind: Similarity,
    eps: float,
) -> MeasuredInbox:
    r"""Pull models and measure how similar each $w_j$ is to the client's own, by the given kind.

    Args:
        rnd: the round.
        state: state of the hosted clients before the exchange.
        message: their message; with "origin" ($w^0$) where clients start from different models.
        peers: ids of their peers.
        kind: of the similarity.
        eps: $\varepsilon$ of the inverse loss and distance.
    """
    inbox = rnd.exchange.pull(message, peers)
    mask, arrived = inbox.mask, inbox.mask.sum(1)
    # Slots without a message have loss inf, so that their similarity is 0.
    if kind == "inv_loss":
        value = similarity.invert_cost(rnd.task.score(inbox), eps)
        return MeasuredInbox(inbox, value, {"passes": arrived * rnd.task.count_samples("train")})
    if kind == "agreement":
        value = rnd.task.measure_agreement(state.params, inbox)
        # The client's own model is run too.
        passes = (arrived + (arrived > 0)) * rnd.task.count_samples("train")
        return MeasuredInbox(inbox, value, {"passes": passes})
    if kind == "cos_product":
        slots = rnd.task.sharing.list_compared_slots(rnd.task.layout)
        pairs = adapters.find_pairs(slots, "similarity 'cos_product'")
        value = adapters.cosine_of_products(state.params, inbox.table, inbox.index, mask, pairs)
        return MeasuredInbox(inbox, value, {})
    compared = rnd.task.sharing.compared
    # Rows of clients, rows of distinct senders, and the sender of each slot: each product is
    # computed once a sender.
    pair = (
        compared.select_from(state.params),
        compared.select_from(inbox.table),
        inbox.index,
        mask,
    )
    if kind == "inv_l2":
        return MeasuredInbox(inbox, similarity.invert_cost(similarity.l2_distances(*pair), eps), {})
    if kind == "cos_weight":
        return MeasuredInbox(inbox, similarity.cosine(*pair), {})
    # The origin is a second model in each message.
    cost = {"extra_models": arrived} if "origin" in message.fields else {}
    return MeasuredInbox(inbox, cosine_since_start(rnd, state, inbox), cost)


def cosine_since_start(rnd: Round, state: State, inbox: Inbox) -> Float[Tensor, "clients peers"]:
    """Return the cosine of each pair of models' differences from their first models.

    Where clients start from different models, the memory has `origin` and messages carry it; else
    all know it.
    """
    compared = rnd.task.sharing.compared
    origin: Tensor = state.memory.origin
    # The memory has columns only where clients start from different models.
    if origin.shape[1]:
        origin, origins = compared.select_from(origin), inbox.fields["origin"]
    else:
        origin = compared.select_from(rnd.task.initial_models(rnd.rng))
        # All start alike: one row serves every sender.
        origins = origin[:1].expand(len(inbox.table), -1)
    own, table = compared.select_from(state.params), compared.select_from(inbox.table)
    return similarity.cosine(own, table, inbox.index, inbox.mask, origin=origin, origins=origins)


def push_and_measure(
    rnd: Round,
    state: State,
    message: Message,
    peers: Int[Tensor, "clients peers"],
    kind: Similarity,
    eps: float,
) -> MeasuredInbox:
    r"""Let the peers measure: $\ell(w_i; D_j)$, answered by $j$. Three exchanges.

    In the first exchange, without models, clients publish which peers they ask. In the second, a
    client and the peers it asks pull each other's models. In the third, peers publish the losses.
    An answer to an older question does not count: a peer that stopped, or answered late, counts as
    missing.

    Args:
        rnd: the round.
        state: state of the hosted clients before the exchange.
        message: their message.
        peers: ids of the peers they ask.
        kind: "inv_loss", the only similarity that peers can measure.
        eps: $\varepsilon$ of the inverse loss.
    """
    ids, count = rnd.ids, peers.shape[1]
    # Each message carries its round, so that an old answer is recognized.
    now = torch.full_like(ids, rnd.index)
    nothing = state.params[:, :0]
    # A client does not know who asks it: it reads the requests of all members.
    everybody = torch.arange(rnd.task.population).expand(len(ids), -1)
    requests = rnd.exchange.pull(
        Message(nothing, {"asked": peers, "round": now}),
        selection.keep_allowed(everybody, rnd.candidates),
    )
    # [senders, slots asked] against [hosted clients]: which sender asks which hosted client in this
    # round.
    asks = (requests.fields["asked"][:, :, None] == ids).any(1) & (
        requests.fields["round"] == rnd.index
    )[:, None]
    # [clients, population]: slot j of `requests` is member j, because `everybody` is in order.
    asked_by = asks[requests.index, torch.arange(len(ids))[:, None]] & requests.mask
    # Members that ask a client without being asked by it: it has to pull their models too.
    further = selection.ids_from_mask(
        asked_by & ~selection.mask_from_ids(peers, rnd.task.population)
    )

    models = rnd.exchange.pull(message, torch.cat([peers, further], dim=1))
    # Unused slots have peer -1; clamp makes them a legal index, and the mask excludes them.
    judged = models.mask & asked_by.gather(1, models.peers.clamp(min=0))
    loss = rnd.task.score(replace(models, mask=judged)).cpu()
    # A loss of NaN or infinity is not answered: the asker counts the peer as missing.
    answers, given = _scatter_to_members(
        models.peers, judged & torch.isfinite(loss), loss, rnd.task.population
    )

    replies = rnd.exchange.pull(
        Message(nothing, {"loss": answers, "given": given, "round": now}), peers
    )
    # An answer has a column for each member; a client reads its own.
    column = ids[:, None]
    valid = replies.fields["given"][replies.index, column] & (
        replies.field_by_slot("round") == rnd.index
    )
    # The first `count` slots are the peers that the client asked; the others only asked it.
    answered = replies.mask & models.mask[:, :count] & valid
    value = torch.where(answered, replies.fields["loss"][replies.index, column].double(), torch.inf)

    # The method sees only the peers that it asked.
    inbox = models.first_slots(count)
    inbox = replace(inbox, mask=answered, bytes=inbox.bytes + replies.bytes)
    cost = {
        "passes": judged.sum(1) * rnd.task.count_samples("train"),
        "extra_models": models.mask[:, count:].sum(1),
        "extra_floats": requests.mask.sum(1) * count + replies.mask.sum(1) * rnd.task.population,
        "extra_bytes": requests.bytes.sum(1) + models.bytes[:, count:].sum(1),
    }
    return MeasuredInbox(inbox, similarity.invert_cost(value, eps), cost)


def _scatter_to_members(
    peers: Tensor, mask: Tensor, value: Tensor, population: int
) -> tuple[Tensor, Tensor]:
    """Spread values of slots over all members of the population; return which have one too."""
    rows, slots = mask.nonzero(as_tuple=True)
    out = torch.zeros(len(peers), population, dtype=value.dtype)
    given = torch.zeros(len(peers), population, dtype=torch.bool)
    out[rows, peers[rows, slots]] = value[rows, slots]
    given[rows, peers[rows, slots]] = True
    return out, given


MIN_PROBABILITY = 1e-6
"""Floor $\\varepsilon_p$ of the probabilities with which peers are drawn."""


@dataclass(frozen=True)
class PeerSimilarities:
    r"""Each hosted client's similarities to the whole population.

    Args:
        similarity: $s_{ij}$; 0 where unknown.
        status: $\kappa_{ij}$: 0 unknown, 1 estimated from peers, 2 measured.
        count: how often i has read j ($c_{ij}$).
        origin: $w^0$ of each client where messages carry it; else without columns.
    """

    similarity: Float[Tensor, "clients population"]
    status: Int[Tensor, "clients population"]
    count: Int[Tensor, "clients population"]
    origin: Float[Tensor, "clients origin"]

    @staticmethod
    def all_unknown(population: int, origin: Float[Tensor, "clients origin"]) -> "PeerSimilarities":
        """Return a memory without similarities."""
        # 13 bytes for each pair of a client and a member: the largest part of the memory of a big
        # population.
        shape = (len(origin), population)
        similarity = pages.empty(*shape, dtype=torch.float64).zero_()
        status = pages.empty(*shape, dtype=torch.int8).zero_()
        count = pages.empty(*shape, dtype=torch.int32).zero_()
        return PeerSimilarities(similarity, status, count, origin)

    def select_rows(self, rows: slice) -> "PeerSimilarities":
        """Return the memory of some clients, not copied."""
        return PeerSimilarities(
            self.similarity[rows], self.status[rows], self.count[rows], self.origin[rows]
        )

    def with_measurements(
        self,
        peers: Int[Tensor, "clients peers"],
        similarity: Float[Tensor, "clients peers"],
        mask: Bool[Tensor, "clients peers"],
        *,
        reads: bool = True,
    ) -> "PeerSimilarities":
        """Return a copy with measured similarities; those of silent peers stay unchanged.

        Args:
            peers: ids of the peers.
            similarity: that was measured.
            mask: which peers answered.
            reads: whether models were read, which `count` counts.
        """
        rows, slots = mask.nonzero(as_tuple=True)
        at = (rows, peers[rows, slots])
        values, status, count = map(pages.copy, (self.similarity, self.status, self.count))
        values[at], status[at] = similarity[rows, slots].double(), MEASURED
        # Peers of a row are distinct, so that no index occurs twice and each read counts.
        count[at] += int(reads)
        return replace(self, similarity=values, status=status, count=count)

    def usable_members(self, *, drop_nonpositive: bool) -> Bool[Tensor, "clients population"]:
        """Return the members with a known similarity."""
        known = self.status > UNKNOWN
        if drop_nonpositive:
            known &= self.similarity > 0
        return known

    def scores_to_share(
        self, relay: str, *, drop_nonpositive: bool, dtype: torch.dtype
    ) -> dict[str, Shaped[Tensor, "..."]]:
        """Return the similarities that a client shares with its peers, as two extras of a message.

        Args:
            relay: "direct": those it measured itself; "any": estimates too.
            drop_nonpositive: leave out similarities of 0 and below.
            dtype: the type in which they are sent.
        """
        # Written in place, a few rows at a time: temporaries of clients x population would leave
        # the cache.
        values = pages.empty(*self.status.shape, dtype=dtype)
        known = pages.empty(*self.status.shape, dtype=torch.bool)
        for first in range(0, len(known), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            mine = self.select_rows(rows)
            shared = mine.usable_members(drop_nonpositive=drop_nonpositive)
            if relay == "direct":
                shared &= mine.status == MEASURED
            known[rows] = shared
            values[rows].copy_(mine.similarity).masked_fill_(~shared, 0)
        return {"similarity": values, "known": known}

    def with_estimates(
        self, ids: Int[Tensor, " clients"], relays: Inbox, pick: str, *, fresh: bool = False
    ) -> "PeerSimilarities":
        """Estimate unmeasured similarities from the ones that peers share.

        Args:
            ids: the hosted clients.
            relays: messages with the extras of `scores_to_share`.
            pick: use the estimate of the "most" or the "least" similar peer.
            fresh: change this memory instead of a copy, when nothing else refers to it.
        """
        # `count` and `origin` do not change here: they are shared with the old memory.
        new = self
        if not fresh:
            similarity, status = pages.copy(self.similarity), pages.copy(self.status)
            new = replace(self, similarity=similarity, status=status)
        for first in range(0, len(ids), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            # Views: what is written into `mine` below is written into `new`.
            mine, peers = new.select_rows(rows), relays.peers[rows]
            preference = mine.similarity.gather(1, peers.clamp(min=0))
            if pick == "least":
                preference = -preference
            # Unused slots were gathered from member 0: the mask removes them.
            answered = relays.mask[rows] & (peers >= 0)
            measured = mine.status == MEASURED
            # A client has no similarity to itself: it counts as known and gets no estimate.
            estimate, found = selection.estimate_two_hop(
                measured.scatter_(1, ids[rows, None], True),
                peers,
                torch.where(answered, preference, -torch.inf),
                relays.index[rows],
                relays.fields["similarity"],
                relays.fields["known"],
            )
            # Measured similarities stay: `found` never includes them.
            torch.where(found, estimate, mine.similarity, out=mine.similarity)
            mine.status.masked_fill_(found, ESTIMATED)
        return new


@final
@dataclass(frozen=True)
class DatedSimilarities(PeerSimilarities):
    """Similarities with the round of each read, for a custom selection rule.

    Args:
        last: the round in which i last read j; -1 for never.
    """

    last: Int[Tensor, "clients population"]

    def record_reads(self, inbox: Inbox, round: int) -> "DatedSimilarities":
        """Return the memory after a round's reading."""
        rows, slots = inbox.mask.nonzero(as_tuple=True)
        last = pages.copy(self.last)
        last[rows, inbox.peers[rows, slots]] = round
        return replace(self, last=last)

    def recall(self, row: int, population: int) -> RememberedPeers:
        """See `base.PeerMemory.recall`."""
        # Copies: a rule that writes into its arguments must not change the memory.
        return RememberedPeers(
            self.count[row].long(),
            self.last[row].long(),
            self.similarity[row].clone(),
            self.status[row].clone(),
        )


@dataclass(frozen=True)
class Dac(PeerMethod):
    r"""Decentralized adaptive clustering.

    Every client keeps a similarity to each member of the population and draws peers with $p_{ij}
    \propto e^{\tau s_{ij}}$. It measures the similarity of the peers it reads, and estimates others
    from what they share.

    Args:
        num_peers: peers read each round ($m$); clamped to population - 1.
        tau: inverse temperature $\tau$ (with a schedule: its limit).
        similarity: "inv_loss", 1 over the loss of the peer's model on the client's data, for losses
            that are never below 0; "inv_l2", 1 over the distance of the models; "cos_weight" and
            "cos_grad", the cosine of the models or of their updates since the start; "cos_product",
            that of the products of their low-rank adapters; "agreement", 1 minus the total
            variation between what the two models predict for the client's data, classes alone;
            "public_agreement", the share of a public set for which both predict the same class, of
            which clients publish their predictions.
        aggregation: "fedavg"; "fedsim", by this round's similarities; a rule of
            `functional.robust.RULES`, by its name or as a table with its settings; or the import
            path of a custom rule, a function of `functional.aggregation.ReceivedModels`.
        two_hop: estimate unmeasured similarities from the ones that peers share.
        loss_direction: "pull", the loss of $w_j$ on the client's data; "push", that of $w_i$ on the
            peer's data, which the peer measures (three exchanges).
        tau_schedule: "constant"; or "var", $1 + (\tau - 1) \tanh(bt/2)$.
        b: steepness of the schedule.
        eps: $\varepsilon$ of the inverse similarities.
        selection: import path of a rule of yours that says which peers a client reads, a function
            of `functional.selection.PeerKnowledge`; the draw by similarity when not given. With a
            table it knows what the table holds: members outside count as never read.
        table: members that a client remembers at most, for large populations; all when not given.
            The others count as unknown. Half of the table is for the most similar members that the
            client measured itself, the rest for estimates, those of the most similar peer first.
        explore: how many of the peers read each round are drawn uniformly from the members outside
            of the table; needs a table, and no rule of yours.
        sketch: numbers of a sketch, by which models are compared instead of reading them; for
            "cos_weight", "cos_grad", "cos_product" and "inv_l2". The models themselves are compared
            when not given.
        num_candidates: members whose sketches or predictions a client reads before it draws peers,
            drawn uniformly in each round; all when not given.
    """

    kind: ClassVar[str] = "dac"
    summary: ClassVar[str] = "average with peers drawn by how similar they were found to be"
    references: ClassVar[tuple[str, ...]] = (
        "Listo Zec, Ekblom, Willbo, Mogren, Girdzijauskas, Decentralized adaptive clustering of "
        "deep nets is "
        "beneficial for client collaboration, 2022, https://arxiv.org/abs/2206.08839",
        "Listo Zec, Hagander, Ihre-Thomason, Girdzijauskas, On the effects of similarity metrics "
        "in decentralized deep "
        "learning under distributional shift, 2024, https://arxiv.org/abs/2409.10720",
    )
    num_peers: PositiveInt = 5
    tau: NonNegativeFloat = 30.0
    similarity: Similarity = "inv_loss"
    aggregation: Literal["fedavg", "fedsim"] | Aggregation = "fedavg"
    two_hop: bool = True
    loss_direction: Literal["pull", "push"] = "pull"
    tau_schedule: Literal["constant", "var"] = "constant"
    b: NonNegativeFloat = 0.2
    eps: NonNegativeFloat = 1e-6
    selection: CustomFunction | None = None
    table: PositiveInt | None = None
    explore: NonNegativeInt = 0
    sketch: PositiveInt | None = None
    num_candidates: PositiveInt | None = None

    def check(self) -> None:
        """Refuse a push of a similarity other than "inv_loss", and what does not go with a table."""
        fits = self.sketch is None or self.similarity in _BY_PARAMETERS
        expected = f"none unless similarity is one of {', '.join(_BY_PARAMETERS)}"
        require(fits, "sketch", self.sketch, expected)
        fits = self.num_candidates is None or self.compares_profiles
        expected = "none unless sketch is given or similarity = 'public_agreement'"
        require(fits, "num_candidates", self.num_candidates, expected)
        fits = self.loss_direction == "pull" or self.similarity == "inv_loss"
        require(
            fits, "loss_direction", self.loss_direction, "'pull' unless similarity = 'inv_loss'"
        )
        expected = f"at most num_peers ({self.num_peers})"
        require(self.explore <= self.num_peers, "explore", self.explore, expected)
        if self.table is None or self.selection is not None:
            # A memory of all pairs has no member outside, and a rule chooses all peers.
            expected = "0 without a table" if self.table is None else "0 with a selection rule"
            require(self.explore == 0, "explore", self.explore, expected)
        if self.table is None:
            return
        # A client has to remember what it reads in a round until the round's end.
        expected = f"num_peers ({self.num_peers}) or more"
        require(self.table >= self.num_peers, "table", self.table, expected)
        candidates = self.num_candidates
        fits = not self.compares_profiles or (candidates and candidates <= self.table)
        expected = f"a number up to table ({self.table}): a client remembers what it compares"
        require(bool(fits), "num_candidates", candidates, expected)
        pulls = self.loss_direction == "pull"
        expected = "'pull' with a table: a push asks all members and answers them"
        require(pulls, "loss_direction", self.loss_direction, expected)

    @property
    def memory_bound(self) -> int | None:
        """See `Method.memory_bound`: with a table the members that it holds, and the client."""
        return None if self.table is None else self.table + 1

    @property
    def privacy_leak(self) -> str:
        """See `Method.privacy_leak`."""
        if self.similarity == "inv_loss":
            return "models are mixed by their losses on the training data"
        if self.similarity == "agreement":
            return "models are mixed by what they predict for the training data"
        return ""

    @property
    def needs_positive_loss(self) -> str:
        """See `Method.needs_positive_loss`."""
        if self.similarity == "inv_loss":
            return "similarity = 'inv_loss' is 1 over the loss; take 'cos_grad' or another one"
        return ""

    @property
    def reads_everybody(self) -> str:
        """See `Method.reads_everybody`."""
        if self.loss_direction == "push":
            return "a push asks all members and answers them"
        return ""

    @property
    def compares_profiles(self) -> bool:
        """Whether clients are compared by what they publish without their models."""
        return self.sketch is not None or self.similarity == "public_agreement"

    @property
    def exchanges(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One; one before it for profiles, or two more for the answers of a push."""
        return 1 + self.compares_profiles + 2 * (self.loss_direction == "push")

    def init_memory(self, task: Task, rng: Rng) -> PeerSimilarities | PeerTable:
        """Return a memory without similarities."""
        apart = task.model.init == "per_client" and self.similarity in _BY_PARAMETERS
        if apart:
            # Differences between the first models hide those between the data.
            text = f"{self.kind}: {self.similarity} says little "
            text += "while clients start from different models (per_client)"
            warnings.warn(text, stacklevel=2)
        columns = 0
        if apart and self.similarity == "cos_grad":
            columns = task.layout.trainable
        first = task.initial_models(rng)
        origin = first[:, :columns].clone()
        if self.similarity == "cos_grad" and self.sketch is not None:
            # That of a shared start is computed once.
            rows = task.sharing.compared.select_from(first if apart else first[:1])
            origin = sketches.count_sketch(rows, self.sketch).expand(len(first), -1).clone()
        if self.table is not None:
            table = PeerTable.all_unknown(task.ids, self.table, task.population, origin)
            return table if self.selection is None else DatedTable.without_reads(table)
        memory = PeerSimilarities.all_unknown(task.population, origin)
        if self.selection is None:
            # Only a selection rule asks when a peer was read last.
            return memory
        last = torch.full_like(memory.count, -1)
        return DatedSimilarities(
            memory.similarity, memory.status, memory.count, memory.origin, last
        )

    def publish(self, task: Task, state: State, exchange: int = 0) -> Message:
        """Publish the model with the similarities to share; before it the profile, if any.

        Raises:
            ConfigError: with loss_direction = "push": peers measure and answer what they are asked
                in the same round.
        """
        if self.compares_profiles:
            profile = self.make_profile(task, state)
            if exchange == 0:
                return Message(state.params[:, :0], profile)
            return self._publish_model(task, state, profile)
        if exchange:
            raise ConfigError(
                f"{self.kind} with loss_direction = 'push' is answered by peers in the round in "
                "which it asks them; "
                "peers that act one after another have not published an answer when they are asked"
            )
        return self._publish_model(task, state, {})

    def _publish_model(self, task: Task, state: State, profile: Profile) -> Message:
        fields = {"samples": task.num_samples, **profile}
        # A sketch of an update is that since the client's own first model.
        if state.memory.origin.shape[1] and not profile:
            fields["origin"] = task.sharing.compared.select_from(state.memory.origin)
        if self.shares_with_model:
            fields |= self.scores_to_share(state)
        return Message(state.params, fields)

    def make_profile(self, task: Task, state: State) -> Profile:
        """Return what clients are compared by before models are read; see `compares_profiles`."""
        if self.sketch is None:
            return predict_profile(task, state.params)
        # `check` allows a sketch with these similarities alone.
        kind = typing.cast(Sketched, self.similarity)
        return sketch_profile(task, state.params, kind, self.sketch, state.memory.origin)

    @property
    def shares_with_model(self) -> bool:
        """Whether a message with a model also holds the similarities that its client shares."""
        return self.two_hop

    def scores_to_share(self, state: State) -> dict[str, Tensor]:
        """Return the similarities to share with peers."""
        memory: PeerSimilarities | PeerTable = state.memory
        return memory.scores_to_share("direct", drop_nonpositive=False, dtype=state.params.dtype)

    def tau_at(self, round: int) -> float:
        """Return the inverse temperature of a round."""
        if self.tau_schedule != "var":
            return self.tau
        return 1 + (self.tau - 1) * math.tanh(self.b * round / 2)

    def peer_probabilities(
        self, ids: Int[Tensor, " clients"], memory: PeerSimilarities | TableColumns, round: int
    ) -> Tensor:
        """Return the probabilities of drawing peers after a round ($p_{ij}$): clients x population.

        Members with an unknown similarity enter the softmax with 0. With a table: of one member of
        each of its columns.
        """
        return self._draw_probabilities(
            ids, memory, memory.similarity, self.tau_at(round), None, MIN_PROBABILITY
        )

    @staticmethod
    def _draw_probabilities(
        ids: Int[Tensor, " clients"],
        memory: PeerSimilarities | TableColumns,
        similarity: Float[Tensor, "clients columns"],
        tau: float | Float[Tensor, " clients"],
        considered: Bool[Tensor, "clients columns"] | None,
        floor: float,
    ) -> Float[Tensor, "clients columns"]:
        members = None
        if isinstance(memory, TableColumns):
            ids, members = memory.own, memory.members
        return selection.selection_probabilities(
            similarity, tau, considered, ids, floor=floor, members=members
        )

    def draw_peers(self, rnd: Round, memory: PeerSimilarities | PeerTable) -> tuple[Tensor, Tensor]:
        """Draw peers; return them and their probabilities, a few rows at a time for the cache."""
        if self.selection is not None:
            assert isinstance(memory, DatedSimilarities | DatedTable)
            peers = choose_peers_by_rule(self.selection, rnd, self.num_peers, memory)
            # A rule has no probabilities; the report says NaN.
            return peers, torch.ones_like(peers, dtype=torch.float64)
        if isinstance(memory, PeerTable):
            return self._draw_from_tables(rnd, memory)
        drawn, population = [], rnd.task.population
        for first in range(0, max(1, len(rnd.ids)), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            ids = rnd.ids[rows]
            at, known = torch.arange(len(rnd.ids))[rows], memory.status[rows] > UNKNOWN
            allowed = rnd.candidates_of(at, known)
            # The memory is that of the end of the last round, hence also its temperature.
            probability = self.peer_probabilities(
                ids, memory.select_rows(rows), max(rnd.index - 1, 0)
            )
            draws = rnd.rng.pairs("peers", ids, population)
            # Logarithms of a few draws decide most rows; the others take the exact way with the
            # same draws.
            peers, certain = selection.sample_peers_quickly(
                probability, draws, self.num_peers, allowed
            )
            if not bool(certain.all()):
                noise = rnd.rng.gumbel("peers", ids[~certain], population)
                logs = probability[~certain].log()
                peers[~certain] = selection.sample_peers(
                    logs, noise, self.num_peers, allowed[~certain]
                )
            # Unused slots (-1) take any probability: nothing arrives there.
            drawn.append((peers, probability.gather(1, peers.clamp(min=0))))
        peers, prior = map(torch.cat, zip(*drawn, strict=True))
        return peers, prior

    def _draw_from_tables(self, rnd: Round, memory: PeerTable) -> tuple[Tensor, Tensor]:
        drawn = []
        for first in range(0, max(1, len(rnd.ids)), ROWS_OF_TABLES):
            rows = slice(first, first + ROWS_OF_TABLES)
            views = None
            if rnd.sampling is not None:
                views = rnd.views_of(torch.arange(len(rnd.ids))[rows])
            tables = memory.select_rows(rows)
            columns = tables.list_columns(rnd.ids[rows], rnd.task.population, views)
            # As without a table: the memory is that of the end of the last round.
            probability = self.peer_probabilities(rnd.ids[rows], columns, max(rnd.index - 1, 0))
            drawn.append(
                tables.draw_peers(rnd, rows, probability, self.num_peers, self.explore, views)
            )
        peers, prior = map(torch.cat, zip(*drawn, strict=True))
        return peers, prior

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw peers by similarity, pull, measure, average, update the memory."""
        profile: Profile = {}
        known, cost_of_profiles = state, {}
        if self.compares_profiles:
            profile = self.make_profile(rnd.task, state)
            memory, cost_of_profiles = self.compare_candidates(rnd, state, profile)
            known = replace(state, memory=memory)
        peers, prior = self.draw_peers(rnd, known.memory)
        drawn = prior
        if self.selection is not None:  # a custom rule states no probabilities
            drawn = torch.full_like(prior, torch.nan)
        # What is published was known before the round.
        message = self._publish_model(rnd.task, state, profile)
        if profile:
            measured = self._pull_with_profiles(rnd, message, peers, profile, cost_of_profiles)
        else:
            ask = push_and_measure if self.loss_direction == "push" else pull_and_measure
            measured = ask(rnd, state, message, peers, self.similarity, self.eps)
        state, inbox = known, measured.inbox
        similarities = similarity_report(rnd, measured.similarity, drawn)
        # By this round's measurements, not by the memory.
        weighted = self.aggregation_weights(rnd, measured, prior)
        if weighted is None:
            merged, report = merge_by_rule(
                self.aggregation, rnd, state, inbox, inbox.mask, measured.similarity
            )
            memory, cost = self.update_memory(rnd, state, measured)
            return replace(merged, memory=memory), {**report, **cost, **similarities}
        weights, own_weight = weighted
        mixed = inbox.mix(weights, own=state.params, own_weight=own_weight)
        memory, cost = self.update_memory(rnd, state, measured)
        return replace(state, params=mixed, memory=memory), {
            **mixing_report(inbox, weights, own_weight),
            **cost,
            **similarities,
        }

    def compare_candidates(
        self, rnd: Round, state: State, profile: Profile
    ) -> tuple[PeerSimilarities | PeerTable, dict[str, Tensor]]:
        """Read profiles, without models; return the memory with their similarities, and the costs.

        Args:
            rnd: the round.
            state: before it.
            profile: those of the hosted clients; see `make_profile`.
        """
        if self.num_candidates is None:
            everybody = torch.arange(rnd.task.population).expand(len(rnd.ids), -1)
            asked = selection.keep_allowed(everybody, rnd.candidates)
        else:
            asked = draw_peers_uniformly(rnd, self.num_candidates, purpose="candidates")
        inbox = rnd.exchange.pull(Message(state.params[:, :0], profile), asked)
        value = compare_profiles(profile, inbox, self.similarity, self.eps)
        memory: PeerSimilarities | PeerTable = state.memory
        cost = {
            "extra_floats": inbox.mask.sum(1) * count_numbers(profile),
            "extra_bytes": inbox.bytes.sum(1),
        }
        if self.sketch is None:
            # The own model alone is run.
            cost["passes"] = torch.full_like(rnd.ids, rnd.task.num_public_samples)
        return memory.with_measurements(inbox.peers, value, inbox.mask, reads=False), cost

    def _pull_with_profiles(
        self, rnd: Round, message: Message, peers: Tensor, profile: Profile, cost: dict[str, Tensor]
    ) -> MeasuredInbox:
        """Read models, and compare by the profiles that came with them, as with all others."""
        inbox = rnd.exchange.pull(message, peers)
        floats = cost["extra_floats"] + inbox.mask.sum(1) * count_numbers(profile)
        value = compare_profiles(profile, inbox, self.similarity, self.eps)
        return MeasuredInbox(inbox, value, {**cost, "extra_floats": floats})

    def aggregation_weights(
        self, rnd: Round, measured: MeasuredInbox, prior: Float[Tensor, "clients peers"]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the weight of each slot and of the client's own model; None for a custom rule.

        Args:
            rnd: the round.
            measured: what arrived, with its similarities.
            prior: the probabilities with which the peers were drawn.
        """
        inbox = measured.inbox
        # `prior` is for subclasses (published code weighs by it).
        if self.aggregation == "fedavg":
            samples = inbox.field_by_slot("samples")
            return aggregation.fedavg_weights(samples, rnd.task.num_samples, inbox.mask)
        if self.aggregation == "fedsim":
            return aggregation.fedsim_weights(measured.similarity, inbox.mask)
        return None

    def update_memory(
        self, rnd: Round, state: State, measured: MeasuredInbox
    ) -> tuple[PeerSimilarities | PeerTable, Info]:
        """Store measured similarities and estimates from peers; return the memory and the costs."""
        inbox, cost = measured.inbox, dict(measured.cost)
        before: PeerSimilarities | PeerTable = state.memory
        # A copy: later steps may change it in place.
        memory = before.with_measurements(inbox.peers, measured.similarity, inbox.mask)
        if isinstance(memory, DatedSimilarities | DatedTable):
            memory = memory.record_reads(inbox, rnd.index)
        if not self.two_hop:
            return memory, cost
        return self.estimate_from_peers(rnd, state, memory, inbox, cost)

    def estimate_from_peers(
        self,
        rnd: Round,
        state: State,
        memory: PeerSimilarities | PeerTable,
        relays: Inbox,
        cost: dict[str, Tensor],
        pick: Literal["most", "least"] = "most",
    ) -> tuple[PeerSimilarities | PeerTable, Info]:
        """Estimate unmeasured similarities from what peers share; return the memory and the costs.

        Args:
            rnd: the round.
            state: before it.
            memory: with this round's measurements; changed in place.
            relays: messages with the similarities that peers share.
            cost: so far.
            pick: use the estimate of the most or of the least similar peer.
        """
        zero = torch.zeros_like(rnd.ids)
        # Each peer shares a number for every member that it may remember.
        received = relays.mask.sum(1) * self.count_scores(rnd.task.population)
        cost["extra_floats"] = cost.get("extra_floats", zero) + received
        if isinstance(memory, PeerTable):
            return memory.with_estimates(relays, rnd.task.population, pick), cost
        return memory.with_estimates(rnd.ids, relays, pick, fresh=True), cost

    def count_scores(self, population: int) -> int:
        """Return how many similarities a client shares."""
        if self.table is None:
            return population
        return table_width(self.table, population)

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Count peers' models and shared similarities; a push adds reads of the own model."""
        if isinstance(phase, str):
            return Cost()
        peers, size = min(self.num_peers, setting.num_others), setting.number_bytes
        scored = peers * (self.similarity in _BY_OUTPUTS)
        scored += self.similarity == "agreement"  # the client's own model is run too
        cost = cost_of_reading(setting, peers, scored=scored)
        if self.compares_profiles:
            cost += self._cost_of_profiles(setting, peers)
        elif self.similarity == "cos_grad" and setting.start_apart:
            cost += Cost(extra_models=peers, bytes=peers * setting.num_compared * size)
        # a similarity for each member, and whether it counts; in a table an id in place of that
        number, mark = self.count_scores(setting.population), 1
        if self.table is not None:
            mark = 4
        scores = number * (size + mark)
        if self.shares_with_model:
            cost += Cost(extra_floats=peers * number, bytes=peers * scores)
        if self.loss_direction == "push":
            # The expected number of members that ask a client without being asked by it.
            pushed = peers * (1 - peers / max(1, setting.num_others))
            with_model = scores * self.shares_with_model
            # A request is `num_peers` ids and the round, an answer a loss and a flag for each
            # member and the round; integers have 8 bytes.
            requests, answers = setting.num_others * (peers + 1) * 8, peers * (scores + 8)
            cost += Cost(
                extra_models=pushed,
                extra_floats=setting.num_others * peers + peers * setting.population,
                messages=setting.num_others + peers,
                bytes=pushed * ((setting.params + 1) * size + with_model) + requests + answers,
            )
        return cost

    def _cost_of_profiles(self, setting: CostSetting, peers: int) -> Cost:
        """Count a profile of each candidate, and one with each model."""
        candidates, passes = setting.num_others, 0
        if self.num_candidates is not None:
            candidates = min(self.num_candidates, candidates)
        if self.sketch is not None:
            numbers, size = self.sketch, self.sketch * setting.number_bytes
        else:
            # a class of 4 bytes each, and the checksum of the set
            numbers, size = setting.predictions + 1, setting.predictions * 4 + 8
            passes = setting.public_samples
        read = candidates + peers
        return Cost(
            extra_floats=read * numbers, messages=candidates, bytes=read * size, passes=passes
        )


DacVar = make_variant(
    Dac, "DacVar", "dac-var",
    "DAC that explores first: the inverse temperature rises with the rounds", tau_schedule="var",
)  # fmt: skip
DacNoTwoHop = make_variant(
    Dac,
    "DacNoTwoHop",
    "dac-no-two-hop",
    "DAC that knows only the similarities that it measured itself",
    two_hop=False,
)
