"""PPDL: peers are chosen in groups, whose models are seen as a mean and never one by one."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, final

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.settings import PositiveInt, Share
from coterie.engine.task import Task
from coterie.errors import ConfigError, require
from coterie.exchange import group_sum
from coterie.exchange.group_sum import GroupMeans, pull_group_means
from coterie.functional import bandits, metrics, similarity
from coterie.methods.base import Info, PeerMethod, Round, State
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_reading
from coterie.rng import Rng


@dataclass(frozen=True)
class Played:
    """The groups that each client has read, the newest first.

    Args:
        members: ids of the members; -1 in entries that are not used yet.
        rewards: what each group earned.
        chances: the probability with which it was drawn.
        spreads: $q$ when it was.
        count: rounds in which the client has read a group.
    """

    members: Int[Tensor, "clients plays members"]
    rewards: Float[Tensor, "clients plays"]
    chances: Float[Tensor, "clients plays"]
    spreads: Float[Tensor, "clients plays"]
    count: Int[Tensor, " clients"]


@final
@dataclass(frozen=True)
class Ppdl(PeerMethod):
    r"""Read the mean of one group of peers a round, chosen by a correlated adversarial bandit.

    An arm is a group of $M$ other members. A client reads the mean of the models of one group,
    weighted by samples, averages it with its own model by samples, and earns the accuracy of the
    result on its validation data. By what groups earned it draws the next one: with the
    probabilities of Tsallis-INF, among the groups that may be best. A group with $u$ members in
    common with one that earned $r$ is taken to earn at most $\min(r + q(t) / u, 1)$, where $q(t) =
    q_\min + (q - q_\min) 0.9^t$ does not increase.

    What is not in the abstract and the published summary of the paper follows the authors' code
    (the reward, the bound, $q(t)$), except: probabilities are those of the draw itself, where the
    code divides by those before groups are ruled out; a client remembers a bounded number of
    rounds; and `reward = "likelihood"` is not theirs. In simulation only.

    Args:
        group_size: $M$: members of a group, clamped to population - 1; at least 2, since the mean
            of one would be its model.
        spread: $q$ of the first round, in [0, 1].
        least_spread: $q_\min$.
        num_remembered: rounds that a client remembers; older ones are forgotten.
        reward: "accuracy" on the validation data, or "likelihood", $e^{-\text{loss}}$ there; when
            None the accuracy where the task has one, else the likelihood. A client without
            validation data takes its training data.
    """

    kind: ClassVar[str] = "ppdl"
    summary: ClassVar[str] = (
        "average with the mean of a group of peers, chosen by a bandit; no single model is shown"
    )
    references: ClassVar[tuple[str, ...]] = (
        "Listo Zec, Östman, Mogren, Gillblad, Efficient node selection in private personalized "
        "decentralized learning, 2023, https://arxiv.org/abs/2301.12755",
    )
    sums_groups: ClassVar[bool] = True
    group_size: Annotated[int, Ge(2)] = 3
    spread: Share = 0.5
    least_spread: Share = 0.07
    # Bounds the memory of a client, whatever the number of rounds.
    num_remembered: PositiveInt = 256
    reward: Literal["accuracy", "likelihood"] | None = None

    def check(self) -> None:
        """Let the spread fall."""
        fits = self.least_spread <= self.spread
        require(fits, "least_spread", self.least_spread, f"at most spread = {self.spread}")

    @property
    def privacy_leak(self) -> str:
        """See `Method.privacy_leak`."""
        return (
            "groups are chosen by what their means earn on the validation data, or on the training "
            "data of a client without any"
        )

    @property
    def reads_everybody(self) -> str:
        """See `Method.reads_everybody`."""
        return "its bandit chooses among groups of all members"

    @property
    def needs_positive_loss(self) -> str:
        """See `Method.needs_positive_loss`."""
        # No loss that can be below 0 has an accuracy, which is the reward where there is one.
        return (
            "its reward is the exponential of minus the loss, which is at most 1; take another loss"
        )

    def size_among(self, population: int) -> int:
        """Return how many members a group has: all others, where they are fewer."""
        return max(1, min(self.group_size, population - 1))

    def spread_at(self, round: int) -> float:
        """Return $q(t)$."""
        return self.least_spread + (self.spread - self.least_spread) * 0.9**round

    def init_memory(self, task: Task, rng: Rng) -> Played:
        """Return the memory of clients that have read nobody."""
        size = self.size_among(task.population)
        bandits.check_groups(task.population - 1, size)
        clients, shape = len(task), (len(task), self.num_remembered)
        members = torch.full((*shape, size), -1, dtype=torch.int32)
        nothing = torch.zeros(shape, dtype=torch.float64)
        count = torch.zeros(clients, dtype=torch.int64)
        return Played(members, nothing, nothing.clone(), nothing.clone(), count)

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Draw a group, read its mean, average, and remember what it earned."""
        members, chances = self._draw_groups(rnd, state.memory)
        found = pull_group_means(rnd.exchange, self.publish(rnd.task, state), members)
        own = rnd.task.num_samples.double()
        weight = torch.where(found.mask, found.samples / (found.samples + own), 0)
        part = weight.to(state.params)[:, None]
        # A client without a mean keeps its bits.
        mixed = torch.where(part > 0, state.params * (1 - part) + found.table * part, state.params)
        # What is measured is the model that is used: statistics as `buffers` says, ranks as set.
        mixed = rnd.task.apply_buffer_policy(state.params, mixed)
        earned, passes = self._measure_rewards(rnd, mixed, found)
        memory = self._remember(rnd, state.memory, found, earned, chances)
        report = {
            "peers": members,
            "arrived": found.mask[:, None].expand(members.shape) & (members >= 0),
            "weights": found.shares * weight[:, None],
            "own_weight": 1 - weight,
            "bytes": found.bytes,
            "passes": passes,
        }
        return replace(state, params=mixed, memory=memory), report

    def _draw_groups(
        self, rnd: Round, memory: Played
    ) -> tuple[Int[Tensor, "clients members"], Float[Tensor, " clients"]]:
        others, size = rnd.task.population - 1, memory.members.shape[2]
        members = torch.full((len(rnd.ids), size), -1, dtype=torch.int64)
        chances = torch.zeros(len(rnd.ids), dtype=torch.float64)
        population = others + 1
        draws = [rnd.rng.gumbel(f"groups.{k}", rnd.ids, population) for k in range(size)]
        noise = torch.stack(draws).numpy()
        # The mean of one model is that model: with one other client nobody is read.
        for row, client in enumerate(rnd.ids.tolist() if size >= group_sum.LEAST else ()):
            # The others are numbered without the client itself: all clients have one list of
            # groups.
            ids = np.delete(np.arange(population), client)
            allowed = rnd.candidates_of(torch.tensor([row]))[0].numpy()[ids]
            group, chance = bandits.draw_group(
                _read_plays(memory, row, client), others, size, allowed, noise[:, row, ids]
            )
            if group:
                members[row], chances[row] = torch.from_numpy(ids[group]), chance
        return members, chances

    def _measure_rewards(
        self, rnd: Round, mixed: Float[Tensor, "clients params"], found: GroupMeans
    ) -> tuple[Float[Tensor, " clients"], Int[Tensor, " clients"]]:
        """Return what each client's average earned, and the forward passes that this took."""
        counts = {split: rnd.task.count_samples(split) for split in ("validation", "train")}
        has_validation = counts["validation"] > 0
        earned, passes = (
            torch.zeros(len(mixed), dtype=torch.float64),
            torch.zeros_like(counts["train"]),
        )
        for split, rows in (("validation", has_validation), ("train", ~has_validation)):
            rows = rows & found.mask
            if not bool(rows.any()):
                continue
            measured = rnd.task.evaluator.evaluate_split(mixed, split)
            known = metrics.ACCURACY.name in measured
            if self.reward == "accuracy" and not known:
                raise ConfigError(
                    "reward is 'accuracy', and this task has none: expected 'likelihood'"
                )
            if known and self.reward != "likelihood":
                value = measured[metrics.ACCURACY.name].double().cpu()
            else:
                losses = measured[metrics.LOSS.name].double().cpu()
                value = torch.exp(-similarity.check_not_negative(losses, f"{self.kind}'s reward"))
            # A model that diverged earns nothing.
            earned = torch.where(rows, value.nan_to_num(0.0).clamp(0, 1), earned)
            passes = torch.where(rows, counts[split], passes)
        return earned, passes

    def _remember(
        self, rnd: Round, memory: Played, found: GroupMeans, earned: Tensor, chances: Tensor
    ) -> Played:
        """Return the memory with the groups of this round in front, where their means arrived."""
        read = found.mask

        def push(old: Tensor, new: Tensor) -> Tensor:
            moved = torch.cat([new.to(old)[:, None], old[:, :-1]], dim=1)
            return torch.where(read.reshape(-1, *[1] * (old.ndim - 1)), moved, old)

        spread = torch.full_like(earned, self.spread_at(rnd.index))
        return Played(
            push(memory.members, torch.sort(found.members, dim=1).values),
            push(memory.rewards, earned),
            push(memory.chances, chances),
            push(memory.spreads, spread),
            memory.count + read.to(torch.int64),
        )

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Read the parts of a group's mean, and measure the average."""
        if isinstance(phase, str):
            return Cost()
        size = min(self.group_size, setting.num_others)
        return cost_of_reading(setting, size if size >= group_sum.LEAST else 0)


def _read_plays(memory: Played, row: int, client: int) -> bandits.Plays:
    """Return what a client remembers, with the others numbered without itself."""
    used = int((memory.members[row, :, 0] >= 0).sum())
    members = memory.members[row, :used].numpy().astype(np.int64)
    return bandits.Plays(
        members - (members > client),
        memory.rewards[row, :used].numpy(),
        memory.chances[row, :used].numpy(),
        memory.spreads[row, :used].numpy(),
    )
