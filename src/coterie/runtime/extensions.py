"""Extensions: what a run adds to the rounds of its method, through one seam of the loop.

Acceptance of received models, accounting of privacy and reports on attackers are extensions. The
loop calls them at fixed points and knows none of them.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.engine.optim import LocalTraining
from coterie.engine.task import Task
from coterie.errors import ConfigError, require
from coterie.exchange.accepting import Acceptance, AcceptingExchange, Reputation, own_losses
from coterie.functional import metrics
from coterie.functional.metrics import Metric
from coterie.methods.base import Info, Method, Round, concatenate_tensors
from coterie.rng import Rng
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings
from coterie.runtime.virtual_time import LONGEST, SECOND, Clock, RoundTraffic


class Unprotected(UserWarning):
    """A method reveals training data in a way that differential privacy does not cover."""


class Extension:
    """What a run adds to the rounds of its method. Each function does nothing unless overridden.

    Extensions are called in their order, so a later one sees what an earlier one reports.
    """

    name: ClassVar[str] = ""
    """The name under which checkpoints hold `state`."""
    state: Any = None
    """What later rounds depend on: a frozen dataclass of tensors, a row for each hosted client."""

    def report_metrics(self) -> Sequence[Metric]:
        """Return the metrics that it adds to the reports of rounds."""
        return ()

    def select_counted(self, ids: Int[Tensor, " clients"]) -> Bool[Tensor, " clients"]:
        """Return which clients count in results."""
        return torch.ones(len(ids), dtype=torch.bool)

    def start(self, task: Task, rng: Rng, params: Float[Tensor, "clients params"]) -> None:
        """Set the state before the first round, from the clients' first models."""

    def note_warm_up(
        self,
        task: Task,
        before: Float[Tensor, "clients params"],
        after: Float[Tensor, "clients params"],
    ) -> None:
        """Take note of the local training before the first round."""

    def prepare_round(self, rnd: Round, rows: Int[Tensor, " rows"]) -> Round:
        """Return the round as the method gets it.

        Args:
            rnd: the round.
            rows: of the hosted clients that take part.
        """
        return rnd

    def finish_round(self, rnd: Round, rows: Int[Tensor, " rows"], info: Info) -> Info:
        """Update the state after the method's round, and return its report; see `prepare_round`."""
        return info

    def measure_clients(self, task: Task) -> dict[str, Tensor]:
        """Return metrics of each hosted client that are recorded with every evaluation."""
        return {}

    def measure_run(self, record: Record) -> dict[str, Tensor]:
        """Return metrics of the whole run, one value for each client that counts."""
        return {}

    def join_states(self, states: Sequence[Any]) -> Any:
        """Return the states of several groups of clients as one, in their order."""
        return concatenate_tensors(states)


class AcceptanceExtension(Extension):
    """Lets clients judge the messages that they receive; see `exchange.accepting`.

    Args:
        rules: what clients refuse, and how far the rest counts.
    """

    name = "reputation"
    state: Reputation

    def __init__(self, rules: Acceptance) -> None:
        self.rules = rules

    def report_metrics(self) -> Sequence[Metric]:
        """Return the number of refused models."""
        return (metrics.REFUSED,)

    def start(self, task: Task, rng: Rng, params: Float[Tensor, "clients params"]) -> None:
        """Let every client trust every other one."""
        # The losses before any training are what `Reputation` compares with later.
        losses = own_losses(task.for_round(rng.at_round(-1)), params)
        self.state = Reputation.from_first_losses(losses)

    def note_warm_up(
        self,
        task: Task,
        before: Float[Tensor, "clients params"],
        after: Float[Tensor, "clients params"],
    ) -> None:
        """Remember how far the training moved each client's model."""
        self.state = self.state.after_training(task.sharing, before, after)

    def prepare_round(self, rnd: Round, rows: Int[Tensor, " rows"]) -> Round:
        """Put the judging exchange around the round's, and take away members in quarantine."""
        # A cohort's rows, because the wrapper numbers clients by their rows in the round.
        whole = len(rows) == len(self.state.first)
        reputation = self.state
        if not whole:
            reputation = reputation.take_rows(rows)
        exchange = AcceptingExchange(rnd.exchange, self.rules, rnd.task, reputation, rnd.index)
        unread = rnd.unread
        if self.rules.quarantine:
            unread = reputation.unread_members(rnd.index)
        return replace(rnd, exchange=exchange, unread=unread)

    def finish_round(self, rnd: Round, rows: Int[Tensor, " rows"], info: Info) -> Info:
        """Remember which members the clients refused and accepted, and add both to the report."""
        assert isinstance(rnd.exchange, AcceptingExchange)
        new, info = rnd.exchange.finish_round(info)
        # Clients that did not take part keep what they remember.
        if len(rows) < len(self.state.first):
            new = self.state.replace_rows(rows, new)
        self.state = new
        return info


class PrivacyExtension(Extension):
    """Records each client's epsilon, and warns of a method that reveals more than its training.

    Args:
        method: of the run.
        local: local training, with the settings of differential privacy.
    """

    def __init__(self, method: Method, local: LocalTraining) -> None:
        assert local.dp_settings is not None
        self.delta = local.dp_settings.delta
        if method.privacy_leak:
            warnings.warn(
                f"{method.kind}: {method.privacy_leak}, which local.dp does not cover: epsilon is "
                "of the local training alone",
                Unprotected,
                stacklevel=4,
            )

    def measure_clients(self, task: Task) -> dict[str, Tensor]:
        """Return each client's epsilon so far."""
        return {
            metrics.EPSILON.name: task.trainer.totals.privacy.compute_epsilon(task.ids, self.delta)
        }


@dataclass(frozen=True)
class _Spent:
    """Nanoseconds of virtual time of each client: since the warm-up, and those it computed in."""

    elapsed: Int[Tensor, " clients"]
    worked: Int[Tensor, " clients"]


class TimeExtension(Extension):
    """Counts the virtual time of rounds in which clients wait for each other.

    Args:
        settings: of the run, with a table of time.

    Attributes:
        late: whether each participant of the last round missed its deadline.
        done: when each of them was, or will be, done, in nanoseconds.
    """

    name = "time"
    state: _Spent
    late: Bool[np.ndarray, " clients"]
    done: Int[np.ndarray, " clients"]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def report_metrics(self) -> Sequence[Metric]:
        """Return the time since the warm-up, the share of it without work, and who was late."""
        return metrics.ELAPSED, metrics.IDLE_SHARE, metrics.LATE

    def start(self, task: Task, rng: Rng, params: Float[Tensor, "clients params"]) -> None:
        """Begin at time 0.

        Raises:
            ConfigError: where other processes host some of the clients.
        """
        time = self.settings.virtual_time
        assert time is not None
        # A round ends when the slowest client of all is done, which one process must know.
        if len(task) < task.population:
            raise ConfigError(
                "time is set: virtual time needs one process that hosts all clients; leave it out"
            )
        self.clock = Clock(time, task.count_steps(self.settings.local), rng.seed)
        self.span = time.deadline_nanoseconds
        zero = torch.zeros(len(task), dtype=torch.int64)
        self.state = _Spent(zero, zero)

    def finish_round(self, rnd: Round, rows: Int[Tensor, " rows"], info: Info) -> Info:
        """Let the time of a round pass, and add the times to its report."""
        numbers, nothing = rows.numpy(), np.full((len(rows), 0), -1)
        peers, sizes = nothing, nothing
        if "peers" in info:
            peers = info["peers"].cpu().numpy()
            # A method that counts no bytes: its messages take the latency of both links alone.
            sizes = np.zeros_like(peers)
        if "bytes" in info:
            sizes = info["bytes"].cpu().numpy()
        down, up = info.get(metrics.BYTES_DOWN.name), info.get(metrics.BYTES_UP.name)
        traffic = RoundTraffic(peers, sizes)
        if down is not None and up is not None:
            traffic = replace(
                traffic, down=down.double().cpu().numpy(), up=up.double().cpu().numpy()
            )
        before, deadline = self.state, self.deadline
        times = self.clock.time_round(
            rnd.index,
            self.now,
            numbers,
            traffic,
            reads_first=rnd.order == "exchange_first",
            deadline=deadline,
        )
        # To a server a model goes at the end of the round; a peer is late with its next message.
        self.done = times.done if traffic.up is not None else times.trained
        self.late = self.done > deadline
        elapsed = torch.full_like(before.elapsed, min(deadline, int(times.done.max())))
        # As with rounds of their own: sums of times stay below 2^63 nanoseconds.
        seconds = int(elapsed.max()) / SECOND
        expected = f"at most {LONGEST} seconds of virtual time in all, or a deadline"
        require(seconds <= LONGEST, f"time: the end of round {rnd.index}", seconds, expected)
        total = before.worked.index_add(0, rows, torch.from_numpy(times.worked))
        self.state = _Spent(elapsed, total)
        late, idle = torch.from_numpy(self.late), 1 - total[rows].double() / elapsed[rows].double()
        times_report = {metrics.ELAPSED.name: elapsed[rows].double() / SECOND}
        if bool(late.any()):
            # The work of a late client is not over: up to the beginning of the round (NaN: 0 of 0).
            earlier = 1 - before.worked[rows].double() / before.elapsed[rows].double()
            idle = torch.where(late, earlier, idle)
            times_report[metrics.LATE.name] = late.double()
        return {**info, **times_report, metrics.IDLE_SHARE.name: idle}

    @property
    def now(self) -> int:
        """When the next round begins, in nanoseconds."""
        # The latest end: clients that took no part have waited too.
        return int(self.state.elapsed.max())

    @property
    def deadline(self) -> int:
        """When the next round ends at the latest; where there is no deadline, after any time."""
        if self.span is None:
            return np.iinfo(np.int64).max
        return self.now + self.span

    def pass_round(self) -> float:
        """Let a round pass in which nobody takes part, and return its end, in seconds."""
        assert self.span is not None
        self.state = replace(self.state, elapsed=self.state.elapsed + self.span)
        return self.now / SECOND


def make_extensions(method: Method, settings: Settings) -> list[Extension]:
    """Return the extensions that the settings ask for, of a simulation and of nodes alike."""
    # In this order they wrap a round: who judges messages comes first.
    found: list[Extension] = []
    if (rules := settings.acceptance_rules_for(method)) is not None:
        found.append(AcceptanceExtension(rules))
    if settings.local.dp_settings is not None:
        found.append(PrivacyExtension(method, settings.local))
    # With other schedules the loop has the clock.
    if settings.time is not None and settings.schedule == "synchronous":
        found.append(TimeExtension(settings))
    return found
