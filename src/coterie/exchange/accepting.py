"""Acceptance: an exchange that judges messages before a method sees them.

A member of a run is known, not trusted. A message with values that are not finite is refused; so is
a model that does worse on the reader's own data than both the reader's model and an untrained one.
An accepted model moves its reader by a bounded distance and counts for a bounded number of samples.
Methods need no change: they see a refused message as one that did not arrive.

The rules combine three papers: UBAR (Guo et al., 2021, https://arxiv.org/abs/1907.07324) selects
models by their loss on the reader's own data, BALANCE (Fang et al., 2024,
https://arxiv.org/abs/2406.10416) compares them with the reader's own model, and ClippedGossip (He,
Karimireddy, Jaggi, 2022, https://arxiv.org/abs/2202.01545) clips the distance to a peer's model,
here to a radius that a client knows: the length of its own training step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Protocol, runtime_checkable

import torch
from annotated_types import Ge
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.settings import Configurable, PositiveFloat
from coterie.exchange.base import SAMPLES, Exchange, ExchangeWrapper, Inbox, Limits, Message
from coterie.functional import metrics, similarity
from coterie.models.part import ParameterSharing

# The remembered step shrinks by at most this factor a round: one short step, of a client that
# happened to train little, must not shut out its peers.
_STEP_DECAY = 0.9
_MOST_STRIKES = 16  # quarantine grows up to 2 ** 15 rounds


@dataclass(frozen=True)
class Acceptance(Configurable):
    """The rules by which clients judge what they receive.

    Args:
        worse: a model is refused when its loss on the reader's own data is above `worse` times that
            of the reader's model, and above that of the reader's first model, which was untrained.
            The data are the validation data, or the training data of a client without validation
            data.
        clip: a model counts as if it were no farther from the reader's than `clip` times the
            reader's own training step (the largest of the recent ones). A server refuses a model
            that is three times that far from its own, measured in the median step of the cohort.
        samples: a peer counts for at most `samples` times as many training samples as the reader
            has; for a server, as the median of the cohort.
        quarantine: peers do not read a peer for 1, 2, 4, ... rounds, up to 32,768, each time that
            it is refused; each acceptance takes one doubling back.
    """

    worse: Annotated[float, Ge(1)] = 1.5
    clip: PositiveFloat = 3.0
    samples: PositiveFloat = 4.0
    quarantine: bool = True


@dataclass(frozen=True)
class Reputation:
    """What clients remember of the peers that they judged, and of their own training.

    Args:
        first: loss of the client's first model on the data that it judges with; NaN without such
            data.
        step: length of its own training step, the largest of the recent ones; 0 before the first.
        strikes: number of refusals of each member, minus the acceptances since.
        until: the first round in which it reads each member again; 0 for one that it reads.
    """

    first: Float[Tensor, " clients"]
    step: Float[Tensor, " clients"]
    strikes: Int[Tensor, "clients population"]
    until: Int[Tensor, "clients population"]

    @staticmethod
    def from_first_losses(first: Float[Tensor, " clients"], population: int) -> "Reputation":
        """Return the memory of clients that have not judged any peer."""
        step = torch.zeros(len(first), dtype=torch.float64)
        # population^2 entries: the smallest types that hold _MOST_STRIKES and a round
        strikes = torch.zeros(len(first), population, dtype=torch.int8)
        until = torch.zeros(len(first), population, dtype=torch.int32)
        return Reputation(first.double(), step, strikes, until)

    def take_rows(self, rows: Int[Tensor, " rows"]) -> "Reputation":
        """Return the memory of some clients."""
        return Reputation(**{item.name: getattr(self, item.name)[rows] for item in fields(self)})

    def after_training(
        self,
        part: ParameterSharing,
        before: Float[Tensor, "clients params"],
        after: Float[Tensor, "clients params"],
    ) -> "Reputation":
        """Return the memory after local training.

        A step that changed nothing, or diverged, is ignored.
        """
        # One slot a client, with its own model after training.
        rows = torch.arange(len(after))[:, None]
        moved = _shared_distances(
            part, before, after, rows, torch.ones_like(rows, dtype=torch.bool)
        )[:, 0]
        new = torch.maximum(moved, _STEP_DECAY * self.step)
        return replace(self, step=torch.where((moved > 0) & moved.isfinite(), new, self.step))

    def readable_members(self, round: int) -> Bool[Tensor, "clients population"]:
        """Return the members that each client reads in a round: all of them before the first."""
        return self.until <= max(round, 0)

    def after_round(
        self,
        round: int,
        refused: Bool[Tensor, "clients population"],
        accepted: Bool[Tensor, "clients population"],
    ) -> "Reputation":
        """Return the memory after a round.

        A member that was both refused and accepted in it counts as refused.
        """
        # A refusal is a strike and an acceptance takes one back: one doubling of the pause, not all
        # of them.
        good = accepted & ~refused
        strikes = self.strikes + refused.to(torch.int8) - good.to(torch.int8)
        strikes = strikes.clamp(0, _MOST_STRIKES)
        # int8 holds the strikes, but not 2 ** 15 rounds.
        pause = torch.pow(2, (strikes.to(torch.int32) - 1).clamp(min=0))
        return replace(
            self,
            strikes=strikes,
            until=torch.where(refused, round + 1 + pause, self.until).to(torch.int32),
        )


@runtime_checkable
class Judge(Protocol):
    """The data and the model with which a client judges. An `engine.task.Task` is one."""

    @property
    def num_samples(self) -> Float[Tensor, " clients"]:
        """Training samples of each client."""
        ...

    @property
    def population(self) -> int:
        """How many clients there are in all."""
        ...

    @property
    def sharing(self) -> ParameterSharing:
        """What clients share of their models."""
        ...

    def count_samples(self, split: str) -> Int[Tensor, " clients"]:
        """Return how many samples each client has in a split."""
        ...

    def loss(
        self, params: Float[Tensor, "clients params"], split: str
    ) -> Float[Tensor, " clients"]:
        """Return the loss of each client's model on its own data."""
        ...

    def score(self, inbox: Inbox, split: str) -> Float[Tensor, "clients peers"]:
        """Return the loss of each received model on the receiver's own data."""
        ...


def own_losses(task: Judge, params: Float[Tensor, "clients params"]) -> Float[Tensor, " clients"]:
    """Return the loss of each client's model on the data that it judges with; NaN without data."""
    found = {split: task.loss(params, split).double().cpu() for split in _splits_to_judge_by(task)}
    return _choose_by_split(task, found, torch.full((len(params),), torch.nan, dtype=torch.float64))


def _splits_to_judge_by(task: Judge) -> list[str]:
    has_validation = task.count_samples("validation") > 0
    # A split that no client judges with is not evaluated.
    splits = []
    if bool(has_validation.any()):
        splits.append("validation")
    if not bool(has_validation.all()):
        splits.append("train")
    return splits


def _choose_by_split(task: Judge, found: Mapping[str, Tensor], nothing: Tensor) -> Tensor:
    """Choose each client's values: of its validation data, or else of its training data."""
    seen, out = task.count_samples("validation") > 0, nothing
    for split, value in found.items():
        rows = seen
        if split == "train":
            rows = ~seen
        # Values are of clients or of clients x peers.
        out = torch.where(rows.reshape(-1, *[1] * (value.ndim - 1)), value, out)
    return out


def _shared_distances(
    part: ParameterSharing, own: Tensor, table: Tensor, index: Tensor, mask: Tensor
) -> Tensor:
    """Return the distances of the shared parts of models."""
    if not part.shares_all:
        own, table = part.shared.select_from(own), part.shared.select_from(table)
    return similarity.l2_distances(own, table, index, mask)


@dataclass
class _PullDecision:
    """The decisions about the slots of one exchange of models."""

    peers: Tensor
    scale: Tensor
    refused: Tensor
    accepted: Tensor


class AcceptingExchange(ExchangeWrapper[Exchange]):
    """A wrapper of another exchange that refuses or bounds received models, for one round.

    Args:
        inner: the exchange underneath.
        rules: when a model is refused, and how far an accepted one counts.
        task: model and data of the clients that take part.
        reputation: what they remember.
        round: the number of the round.
    """

    def __init__(
        self, inner: Exchange, rules: Acceptance, task: Judge, reputation: Reputation, round: int
    ) -> None:
        self.inner, self.rules, self.task, self.round = inner, rules, task, round
        self.reputation = reputation
        self.passes = torch.zeros(len(reputation.first), dtype=torch.int64)
        self._pulled: list[_PullDecision] = []
        self._own: tuple[Tensor, Tensor] | None = None  # models, losses

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish, read, and judge the received messages: see `Exchange.pull`.

        The bytes of refused messages are counted.
        """
        inbox = self.inner.pull(message, peers)
        arrived = inbox.mask
        if self.rules.quarantine:
            readable = self.reputation.readable_members(self.round)
            # A method may ask for a quarantined peer all the same. The clamp makes -1 a legal
            # index; such a slot has not arrived.
            arrived = arrived & readable.gather(1, peers.clamp(min=0))
        # Numbers first: a model that is not finite is not worth an evaluation.
        fine = arrived & _check_numbers(inbox, arrived)
        scale = torch.ones(fine.shape, dtype=torch.float64)
        # An exchange of extras alone has no model to judge.
        if message.params.shape[1]:
            fine = self._check_losses(replace(inbox, mask=fine), message.params)
            radius = self.rules.clip * self.reputation.step[:, None]
            far = _shared_distances(
                self.task.sharing, message.params, inbox.table, inbox.index, fine
            )
            # A client that has not trained yet has no radius: nothing is clipped.
            scale = torch.where(fine & (radius > 0) & (far > radius), radius / far, scale)
        self._pulled.append(_PullDecision(peers, scale, arrived & ~fine, fine))
        # The reader's own number is trusted: liars could raise a median of claims.
        most = self.rules.samples * self.task.num_samples.double()
        return replace(inbox, mask=fine, limits=Limits(message.params, scale, most))

    def _check_losses(self, inbox: Inbox, own: Tensor) -> Bool[Tensor, "clients peers"]:
        """Return which models are not much worse than their reader's, on its own data."""
        # A round may publish the same models in several exchanges: they are evaluated once.
        if self._own is None or self._own[0] is not own:
            self._own = own, own_losses(self.task, own)
        mine, first = self._own[1], self.reputation.first
        # fmax, unlike maximum, ignores a NaN where the other value is a number
        bound = torch.fmax(self.rules.worse * mine, first)
        bound = torch.where(mine.isfinite(), bound, first)
        counts, found = torch.zeros_like(self.passes), {}
        for split in _splits_to_judge_by(self.task):
            rows = (self.task.count_samples("validation") > 0) == (split == "validation")
            # Each client's slots are evaluated on the one split that it judges with.
            some = inbox.mask & rows[:, None]
            found[split] = self.task.score(replace(inbox, mask=some), split).double().cpu()
            counts = torch.where(rows, self.task.count_samples(split), counts)
        losses = _choose_by_split(
            self.task, found, torch.full(inbox.mask.shape, torch.inf, dtype=torch.float64)
        )
        # One forward pass for each model and sample.
        self.passes = self.passes + inbox.mask.sum(1) * counts
        blind = counts == 0  # a client without any data cannot judge, and accepts
        return inbox.mask & ((losses <= bound[:, None]) | blind[:, None])

    def note_training(
        self, before: Float[Tensor, "clients params"], after: Float[Tensor, "clients params"]
    ) -> None:
        """Remember how far the clients' own training moved their models."""
        self.reputation = self.reputation.after_training(self.task.sharing, before, after)

    def finish_round(self, info: Mapping[str, Tensor]) -> tuple[Reputation, dict[str, Tensor]]:
        """Return the clients' memory after the round, and the round's report with the judgments.

        Mixing weights become the effective ones, after clipping. The forward passes for judging are
        added to the method's.
        """
        refused = torch.zeros(len(self.passes), self.task.population, dtype=torch.bool)
        accepted = torch.zeros_like(refused)
        # A member may be judged in several exchanges: any refusal counts, see `after_round`.
        for one in self._pulled:
            for found, slots in ((refused, one.refused), (accepted, one.accepted)):
                rows, at = slots.nonzero(as_tuple=True)
                found[rows, one.peers[rows, at]] = True
        reputation = self.reputation
        if self.rules.quarantine:
            reputation = reputation.after_round(self.round, refused, accepted)
        out = dict(info)
        out[metrics.PASSES.name] = (
            out.get(metrics.PASSES.name, torch.zeros_like(self.passes)) + self.passes
        )
        out[metrics.REFUSED.name] = refused.sum(1).double()
        if "peers" in info:
            out["slots_refused"] = refused.gather(1, info["peers"].clamp(min=0)) & (
                info["peers"] >= 0
            )
        if "peers" in info and "weights" in info and "own_weight" in info:
            counted = info["weights"] * self._slot_scales(info["peers"]).to(info["weights"])
            # What clipping takes from a peer's weight belongs to the reader's own model, see
            # `Inbox.mix`.
            rest = torch.where(info["arrived"], info["weights"] - counted, 0).sum(1)
            out |= {
                "weights": counted,
                "own_weight": info["own_weight"] + rest.to(info["own_weight"]),
            }
        return reputation, out

    def _slot_scales(self, peers: Int[Tensor, "clients slots"]) -> Float[Tensor, "clients slots"]:
        out = torch.ones(peers.shape, dtype=torch.float64)
        for one in self._pulled:
            same = (peers[:, :, None] == one.peers[:, None, :]) & one.accepted[:, None, :]
            # The peer may have been read in several exchanges: the strongest clipping counts.
            smallest = torch.where(same, one.scale[:, None, :], 1.0)
            if smallest.shape[2]:  # `amin` of no entries is an error
                out = torch.minimum(out, smallest.amin(2))
        return out


def _check_numbers(
    inbox: Inbox, arrived: Bool[Tensor, "clients peers"]
) -> Bool[Tensor, "clients peers"]:
    """Return which messages are finite throughout and claim no negative number of samples."""
    # The index of an empty slot is 0, also where the table has no row.
    sound = torch.ones(max(1, len(inbox.table)), dtype=torch.bool)
    parts = [inbox.table, *(value for value in inbox.fields.values() if value.is_floating_point())]
    for sender in inbox.index[arrived].unique().tolist():
        sound[sender] = all(bool(part[sender].isfinite().all()) for part in parts)
        if SAMPLES in inbox.fields:
            claimed = inbox.fields[SAMPLES][sender]
            sound[sender] &= claimed.ndim > 0 or bool(claimed >= 0)
    return sound[inbox.index]
