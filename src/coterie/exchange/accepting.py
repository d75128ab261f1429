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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

import torch
from annotated_types import Ge
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.settings import Configurable, PositiveFloat
from coterie.exchange.base import SAMPLES, Exchange, ExchangeWrapper, Inbox, Limits, Message
from coterie.functional import metrics, selection, similarity
from coterie.functional.member_lists import MemberLists, align_lists
from coterie.models.part import ParameterSharing

# The remembered step shrinks by at most this factor a round: one short step, of a client that
# happened to train little, must not shut out its peers.
_STEP_DECAY = 0.9
_MOST_STRIKES = 16  # quarantine grows up to 2 ** 15 rounds
_LAST = torch.iinfo(torch.int64).max  # above all ids
_ROWS_AT_ONCE = 4096  # clients whose lists are compared at once

BYTES_OF_STRIKES = 9
"""Bytes that a client remembers of each member that has strikes: its id, strikes and a round."""


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
class Reputation(MemberLists):
    """What clients remember of the peers that they judged, and of their own training.

    A row has a column for each member with strikes or in quarantine, and none for others: its width
    is the number of these of the client that has most.

    Args:
        first: loss of the client's first model on the data that it judges with; NaN without such
            data.
        step: length of its own training step, the largest of the recent ones; 0 before the first.
        members: ids in ascending order, each once; -1 behind the last.
        strikes: number of refusals of each of them, minus the acceptances since.
        until: the first round in which it reads each of them again.
    """

    fills: ClassVar[Mapping[str, int]] = {"members": -1, "strikes": 0, "until": 0}
    first: Float[Tensor, " clients"]
    step: Float[Tensor, " clients"]
    members: Int[Tensor, "clients slots"]
    strikes: Int[Tensor, "clients slots"]
    until: Int[Tensor, "clients slots"]

    @staticmethod
    def from_first_losses(first: Float[Tensor, " clients"]) -> "Reputation":
        """Return the memory of clients that have not judged any peer."""
        step = torch.zeros(len(first), dtype=torch.float64)
        # The smallest types that hold an id, _MOST_STRIKES and a round: `BYTES_OF_STRIKES`.
        until = torch.zeros(len(first), 0, dtype=torch.int32)
        return Reputation(first.double(), step, until, until.to(torch.int8), until)

    @staticmethod
    def join_rows(parts: Sequence["Reputation"]) -> "Reputation":
        """Return the memory of several groups of clients as one."""
        padded = align_lists(parts)
        names = [item.name for item in fields(Reputation)]
        return Reputation(*(torch.cat([getattr(one, name) for one in padded]) for name in names))

    def take_rows(self, rows: Int[Tensor, " rows"]) -> "Reputation":
        """Return the memory of some clients."""
        return Reputation(**{item.name: getattr(self, item.name)[rows] for item in fields(self)})

    def replace_rows(self, rows: Int[Tensor, " rows"], new: "Reputation") -> "Reputation":
        """Return this memory with that of some clients replaced."""
        old, new = align_lists([self, new])
        out = {}
        for item in fields(self):
            out[item.name] = getattr(old, item.name).index_copy(0, rows, getattr(new, item.name))
        return Reputation(**out).trim()

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

    def unread_members(self, round: int) -> Int[Tensor, "clients slots"]:
        """Return the members that each client does not read in a round: nobody before the first.

        Returns:
            Ids; -1 elsewhere.
        """
        return self.members.long().masked_fill(self.until <= max(round, 0), -1)

    def list_new_terms(self, before: "Reputation") -> list[tuple[int, int, int]]:
        """Return the quarantines that began after an earlier time, as rows, members and ends."""
        terms = []
        both = zip(self._list_terms(), before._list_terms(), strict=True)
        for row, (now, then) in enumerate(both):
            terms += [(row, one, end) for one, end in now.items() if then.get(one, 0) != end]
        return terms

    def _list_terms(self) -> list[dict[int, int]]:
        """Return the end of each quarantine of each client, by member."""
        rows = zip(self.members.tolist(), self.until.tolist(), strict=True)
        return [
            {one: end for one, end in zip(members, ends, strict=True) if one >= 0}
            for members, ends in rows
        ]

    def after_round(
        self,
        round: int,
        refused: Int[Tensor, "clients refused"],
        accepted: Int[Tensor, "clients accepted"],
    ) -> "Reputation":
        """Return the memory after a round.

        Args:
            round: its number.
            refused: ids of the members that each client refused, in any order; -1 for none.
            accepted: ids of the members that it accepted; one that was both counts as
                refused.
        """
        parts = []
        for rows in torch.arange(len(self.members)).split(_ROWS_AT_ONCE):
            parts.append(self.take_rows(rows)._judge(round, refused[rows], accepted[rows]))
        return Reputation.join_rows(parts).trim()

    def _judge(self, round: int, refused: Tensor, accepted: Tensor) -> "Reputation":
        # Who has no column is new, and has one from its first refusal on.
        news = refused.masked_fill(selection.find_listed(refused, self.members.long()), -1)
        news = news.sort(1).values
        news[:, 1:] = news[:, 1:].masked_fill(news[:, 1:] == news[:, :-1], -1)
        members = torch.cat([self.members.long(), news], dim=1)
        known = self.pad_to(members.shape[1])
        bad = selection.find_listed(members, refused)
        # A refusal is a strike and an acceptance takes one back: one doubling of the pause, not all
        # of them.
        good = selection.find_listed(members, accepted) & ~bad
        strikes = known.strikes + bad.to(torch.int8) - good.to(torch.int8)
        strikes = strikes.clamp(0, _MOST_STRIKES)
        # int8 holds the strikes, but not 2 ** 15 rounds.
        pause = torch.pow(2, (strikes.to(torch.int32) - 1).clamp(min=0))
        until = torch.where(bad, round + 1 + pause, known.until).to(torch.int32)
        # Without strikes and after its quarantine a member is as one that was never refused.
        members = members.masked_fill((strikes == 0) & (until <= round), -1)
        order = torch.argsort(members.masked_fill(members < 0, _LAST), dim=1, stable=True)
        members, empty = members.gather(1, order), (members < 0).gather(1, order)
        return replace(
            self,
            members=members.to(torch.int32),
            strikes=strikes.gather(1, order).masked_fill(empty, 0),
            until=until.gather(1, order).masked_fill(empty, 0),
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
            # A method may ask for a quarantined peer all the same.
            unread = self.reputation.unread_members(self.round)
            arrived = arrived & ~selection.find_listed(peers, unread)
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
        # A member may be judged in several exchanges: any refusal counts, see `after_round`.
        refused = self._list_judged("refused")
        reputation = self.reputation
        if self.rules.quarantine:
            reputation = reputation.after_round(self.round, refused, self._list_judged("accepted"))
        out = dict(info)
        out[metrics.PASSES.name] = (
            out.get(metrics.PASSES.name, torch.zeros_like(self.passes)) + self.passes
        )
        # Each member once: the first of its ids in a sorted row.
        found = refused.sort(1).values
        first = torch.ones_like(found, dtype=torch.bool)
        first[:, 1:] = found[:, 1:] != found[:, :-1]
        out[metrics.REFUSED.name] = (first & (found >= 0)).sum(1).double()
        if "peers" in info:
            out["slots_refused"] = selection.find_listed(info["peers"], refused)
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

    def _list_judged(self, kind: Literal["refused", "accepted"]) -> Int[Tensor, "clients slots"]:
        """Return the ids that each client refused or accepted in this round; -1 elsewhere."""
        nobody = torch.zeros(len(self.passes), 0, dtype=torch.int64)
        parts = [one.peers.masked_fill(~getattr(one, kind), -1) for one in self._pulled]
        return torch.cat([nobody, *parts], dim=1)

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
