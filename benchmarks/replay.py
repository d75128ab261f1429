"""Replay: repeat a run between machines, failures included, in the simulator.

Every node keeps a journal of what it asked for and what arrived. With the journals and the data,
the simulator repeats the same rounds with the same participants, reachable peers and received
messages. Peer-to-peer methods only.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coterie.data.federation import Federation
from coterie.errors import DataError
from coterie.exchange.base import Inbox, Message
from coterie.exchange.in_memory import InMemory
from coterie.methods.base import Info, Round
from coterie.net.node import ARRIVALS, RunSpec
from coterie.net.replay import Reach, read_reach
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.runtime.record import Record

_NOTHING: tuple[Reach, set[int]] = Reach(frozenset(), is_open=False), set()


@dataclass
class Arrivals:
    """The participants and the received messages of each round.

    Args:
        completed: (round, client) pairs of completed rounds.
        asked: (round, exchange, client) -> (which clients could be asked, clients whose message
            arrived).
    """

    completed: set[tuple[int, int]] = field(default_factory=set)
    asked: dict[tuple[int, int, int], tuple[Reach, set[int]]] = field(default_factory=dict)

    def active(self, round: int) -> set[int]:
        """Return the clients that completed a round, and clients that failed after others read them."""
        read = {c for (r, _, _), (_, arrived) in self.asked.items() if r == round for c in arrived}
        return read | {c for r, c in self.completed if r == round}


def read_arrivals(files: Mapping[Path, Iterable[int]]) -> Arrivals:
    """Read the journals of all nodes.

    Args:
        files: the journal of each node, and the clients it hosts.

    Raises:
        DataError: when a file is not a journal.
    """
    out = Arrivals()
    for path, clients in files.items():
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            try:
                _take(out, json.loads(line), tuple(clients))
            except (ValueError, KeyError, TypeError) as error:
                # a node killed while it wrote leaves half a line at the end
                if number + 1 < len(lines):
                    raise DataError(
                        f"{path} line {number + 1} is no event of a journal: {error}"
                    ) from error
    return out


def _take(out: Arrivals, event: Mapping[str, Any], clients: tuple[int, ...]) -> None:
    round = int(event["round"])
    if event["event"] == "pull":
        for client in event["readers"]:
            arrived = set(event["arrived"])
            out.asked[round, int(event["exchange"]), client] = read_reach(event), arrived
    elif event["event"] == "round":
        out.completed |= {(round, client) for client in clients}
    elif (
        event["event"] == "start" and round > 0
    ):  # its checkpoint says that the round before was completed
        out.completed |= {(round - 1, client) for client in clients}
    elif event["event"] == "missed":
        out.completed -= {(round, client) for client in clients}


class Replayed(InMemory):
    """An exchange that delivers the messages on record."""

    def __init__(self, ids: Int[Tensor, " clients"], population: int, arrivals: Arrivals) -> None:
        super().__init__(ids, population)
        self.arrivals, self._round, self._pull = arrivals, -1, 0

    def begin_round(self, rng: Rng) -> None:
        """Start a round."""
        super().begin_round(rng)
        self._round, self._pull = rng.round, 0

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Return the messages that arrived according to the record."""
        number, self._pull = self._pull, self._pull + 1
        arrived = torch.zeros_like(peers, dtype=torch.bool)
        for row, client in enumerate(self.active.tolist()):
            _, read = self.arrivals.asked.get((self._round, number, client), _NOTHING)
            came = read | set(self.hosted(client))
            arrived[row] = torch.tensor([p in came for p in peers[row].tolist()], dtype=torch.bool)
        inbox = super().pull(message, peers)
        mask = inbox.mask & arrived
        return replace(inbox, mask=mask, bytes=inbox.bytes * mask)

    def hosted(self, client: int) -> tuple[int, ...]:
        """Return the clients on the same node; their messages need no network."""
        return self.neighbors.get(client, ())

    neighbors: Mapping[int, tuple[int, ...]] = {}


class ReplayLoop(Loop):
    """The run's loop with the participants and the reachable peers on record."""

    def _make_round(self, index: int, rows: Tensor, cohort: Tensor) -> Round:
        rnd = super()._make_round(index, rows, cohort)
        return replace(rnd, reachable=self._reachable(index, rnd.reachable, rnd.ids))

    def _reachable(
        self, index: int, everybody: Tensor, ids: Tensor
    ) -> Bool[Tensor, "clients population"]:
        assert isinstance(self.exchange, Replayed)
        out = everybody.expand(len(ids), -1).clone()
        for row, client in enumerate(ids.tolist()):
            reach, _ = self.exchange.arrivals.asked.get((index, 0, client), _NOTHING)
            out[row] &= reach.mark_open(out.shape[1])
        return out

    def _run_round(self, index: int) -> None:
        """Do one round; a client that did not complete it has published, and keeps its state."""
        assert isinstance(self.exchange, Replayed)
        arrivals, rng = self.exchange.arrivals, self.rng.at_round(index)
        self.exchange.begin_round(rng)
        cohort = self._choose_cohort(rng)
        chosen = set(cohort.tolist()) & arrivals.active(index)
        ids = self.task.ids.tolist()
        rows = torch.tensor(
            [r for r, c in enumerate(ids) if c in chosen and not bool(self.tracker.stopped[r])]
        )
        rows = rows.to(torch.int64)
        self.exchange.set_active(self.task.ids[rows])
        if not len(rows):
            self._finish_round(index, rows, {})
            return
        rnd = self._make_round(index, rows, cohort)
        new, info = self._apply_method(rnd, self.state.select_rows(rows))
        kept = torch.tensor(
            [k for k, r in enumerate(rows.tolist()) if (index, ids[r]) in arrivals.completed]
        )
        kept = kept.to(torch.int64)
        self.state = self.state.replace_rows(rows[kept], new.select_rows(kept))
        info = self._finish_extensions(rnd, rows, rows[kept], info)
        info = {name: value[kept] for name, value in info.items()}
        self.record.add_edges(index, self.task.ids[rows[kept]], info)
        self._finish_round(index, rows[kept], info)

    def _finish_extensions(self, rnd: Round, rows: Tensor, completed: Tensor, info: Info) -> Info:
        """Let the extensions finish the round; those of clients that did not complete it forget it."""
        for extension in self.extensions:
            before = extension.state
            info = extension.finish_round(rnd, rows, info)
            if before is not None:
                new = extension.state.take_rows(completed)
                extension.state = before.replace_rows(completed, new)
        return info


def replay(plan: RunSpec, federation: Federation, folders: Mapping[Path, Iterable[int]]) -> Loop:
    """Repeat a recorded run in the simulator and evaluate it.

    Args:
        plan: the part that was equal on all nodes.
        federation: the data of all clients, with the planted clusters when the method needs them.
        folders: the folder of each node's run, and the clients it hosted.

    Returns:
        The loop at its end: its models are in `tracker.best` and `state.params`, its results in
        `record`.
    """
    arrivals = read_arrivals(
        {Path(folder) / ARRIVALS: clients for folder, clients in folders.items()}
    )
    truth = (
        federation.truth.cluster
        if federation.truth is not None
        else torch.full((federation.population,), -1)
    )
    task = plan.make_task(federation)
    exchange = Replayed(federation.ids, federation.population, arrivals)
    exchange.neighbors = {c: tuple(group) for group in folders.values() for c in group}
    loop = ReplayLoop(task, plan.method, exchange, plan.settings, Rng(plan.seed), Record(truth))
    while not loop.is_finished:
        loop.run_next_round()
    loop.evaluate_final()
    return loop
