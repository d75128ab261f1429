"""The asynchronous schedule with a server: it takes in each client's update when it arrives.

A client fetches the newest model, trains it, sends it back and begins again at once. The server
collects updates by its rule, FedBuff or FedAsync, and makes a new model of them: the method's own
aggregation over the models that the rule makes of the updates.
"""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import ConfigError, ExchangeError
from coterie.exchange.base import Inbox, Message, Reply, Rule
from coterie.exchange.narrowed import narrow_exchange, narrow_message
from coterie.functional import metrics
from coterie.methods.base import Info, State
from coterie.methods.fedavg import OneModel
from coterie.methods.server import ServerMethod, model_request, send_models
from coterie.runtime.virtual_time import SECOND
from coterie.simulation._asynchronous import (
    IDLE,
    AsynchronousLoop,
    Report,
    copy_state,
    take_reports,
)
from coterie.simulation._publishing import StandingExchange

# Steps of a round that this loop does in place of `ServerMethod.round`.
_STEPS = ("round", "reply", "publish")


@dataclasses.dataclass(frozen=True)
class _Update:
    """What a client sent back.

    Args:
        client: its number.
        trained: the model that it trained.
        fetched: the model with which it began.
        version: how many models the server had made by then.
    """

    client: int
    trained: Float[Tensor, " params"]
    fetched: Float[Tensor, " params"]
    version: int


class AsynchronousServerLoop(AsynchronousLoop):
    """A run with a server in which each client has rounds of its own; see `AsynchronousLoop`.

    Raises:
        ConfigError: when the method is none with one model that is averaged.
    """

    def _open_boards(self) -> None:
        """Check that the method does in a round what this loop does; nothing stands on boards."""
        method, settings = self.method, self.settings
        whole = isinstance(method, OneModel) and type(method).aggregate is OneModel.aggregate
        kind = type(method)
        if not whole or any(getattr(kind, one) is not getattr(ServerMethod, one) for one in _STEPS):
            raise ConfigError(
                "schedule = 'asynchronous': with a server it is for methods that average one "
                f"model, as FedAvg does; {method.kind} does more in a round; use 'synchronous'"
            )
        if self.time.max_staleness is not None or self.time.max_staleness_seconds is not None:
            raise ConfigError(
                "time.max_staleness is for peer-to-peer methods; a server weighs updates by their "
                "staleness: leave it out"
            )
        variances = {one.name for one in ServerMethod.reports} & set(map(str, settings.metrics))
        if variances:
            raise ConfigError(
                f"metrics has {sorted(variances)[0]!r}, which is over the cohort of a round; with "
                "schedule = 'asynchronous' there is none: leave it out"
            )
        assert isinstance(method, ServerMethod)
        self.server_method, self.rule = method, self.time.server_rule
        self.version = 0  # how many models the server has made
        self._left_out = 0  # updates of this span that are not valid
        self.begun = np.zeros(len(self.task), dtype=np.int64)  # version with which each began
        self.begun_at = np.zeros(len(self.task), dtype=np.int64)  # and when
        self.fetched = [self._server_model] * len(self.task)  # that model
        self.collected: list[_Update] = []

    @property
    def _server_model(self) -> Float[Tensor, " params"]:
        return self.state.shared.models[0]

    # ------------------------------------------------------------------ the order of events

    def _start(self) -> None:
        self.state, self.flight = copy_state(self.state), copy_state(self.state)
        self._measure_messages()
        for client in range(len(self.task)):
            self._begin(client, 0)

    def _measure_messages(self) -> None:
        """Note the bytes of a model that is fetched and of what is sent, and how long both take."""
        one = torch.zeros(1, dtype=torch.int64)
        state = self.state.select_rows(one)
        rnd = self._make_own_round(one, [0], self.exchange, state.params)
        part, message = self.task.sharing, self.server_method.publish(rnd, state, {})
        offer = narrow_message(part, Message(self._server_model[None]))
        sent = (narrow_message(part, each) for each in (model_request(state), message))
        self._down = offer.row_bytes
        self._up = sum(each.row_bytes for each in sent)
        everybody = np.arange(len(self.task))
        down = np.full(len(everybody), float(self._down))
        up = np.full(len(everybody), float(self._up))
        self._fetching = self.clock.move_to_server(everybody, down)
        self._sending = self.clock.move_to_server(everybody, up)

    def _begin(self, client: int, time: int) -> int:
        """Let a client fetch the newest model, and return when its update is at the server."""
        self.begun[client], self.begun_at[client] = self.version, time
        self.fetched[client] = self._server_model
        return super()._begin(client, time)

    def _time_round(self, client: int, time: int) -> tuple[int, int]:
        """Return when an update is at the server, and how long its client does not work for it."""
        down, up = int(self._fetching[client]), int(self._sending[client])
        end, paused = super()._time_round(client, time + down)
        return end + up, paused + down + up

    def _run_round(self, index: int) -> None:
        """Let virtual time pass until the next record, and record what happened."""
        until = (index + 1) * self.time.record_nanoseconds
        if index == 0:
            self._start()
        while self._queue and self._queue[0][0] <= until:
            time, arrived = self._queue[0][0], list[int]()
            self._train_pending(time)
            # At one time all send before anybody fetches.
            while self._queue and self._queue[0][0] == time:
                arrived.append(heapq.heappop(self._queue)[1])
            self._receive(arrived, time)
            for client in arrived:
                self._begin(client, time)
        self._record_span(index)

    def _train(
        self, rows: Int[Tensor, " rows"], rounds: Sequence[int]
    ) -> tuple[State, Info, Report]:
        """Train clients from the models that they fetched; no one of them is judged."""
        own = self.state.select_rows(rows)
        rnd = self._make_own_round(rows, rounds, self.exchange, own.params)
        # Each model once, however many clients fetched it.
        _, first, place = np.unique(
            self.begun[rows.numpy()], return_index=True, return_inverse=True
        )
        table = torch.stack([self.fetched[client] for client in rows[first].tolist()])
        chosen = torch.from_numpy(place)
        reply = Reply(table, chosen[:, None]).to_inbox()
        received = rnd.task.apply_buffer_policy(own.params, table[chosen])
        own = dataclasses.replace(own, params=received)
        new, info = self.server_method.local_update(rnd, own, reply)
        return new, info, {}

    def _receive(self, arrived: Sequence[int], time: int) -> None:
        """Take in the updates of some clients, in the order of their numbers."""
        rows = torch.tensor(arrived, dtype=torch.int64)
        self.state = self.state.assign_rows(rows, self.flight.select_rows(rows))
        report = take_reports(self.train_reports, arrived)
        ages = []
        for client in arrived:
            version, trained = int(self.begun[client]), self.state.params[client].clone()
            ages.append(self.version - version)
            self.collected.append(_Update(client, trained, self.fetched[client], version))
            if len(self.collected) >= self.rule.size:
                self._aggregate()
        self.idle[rows.numpy()] += self.pause[rows.numpy()]
        self.number[rows.numpy()] += 1
        self.end[rows.numpy()] = IDLE
        seconds = (time - self.begun_at[rows.numpy()]) / SECOND
        report |= {
            "ages": torch.tensor(ages)[:, None],
            "age_seconds": torch.from_numpy(seconds)[:, None],
            metrics.BYTES_DOWN.name: torch.full((len(rows),), self._down),
            metrics.BYTES_UP.name: torch.full((len(rows),), self._up),
        }
        self._ended.append((rows, torch.from_numpy(self.number[rows.numpy()] - 1), report))

    def _aggregate(self) -> None:
        """Make a new model of the collected updates."""
        now, models = self._server_model, []
        for one in self.collected:
            staleness = self.version - one.version
            models.append(self.rule.place(now, one.fetched, one.trained, staleness))
        rows = torch.tensor([one.client for one in self.collected], dtype=torch.int64)
        message = Message(torch.stack(models), {"samples": self.task.num_samples[rows]})
        door = _ServerDoor(rows)
        rnd = dataclasses.replace(
            self._make_round(self.version, rows, rows),
            exchange=narrow_exchange(door, self.task.sharing, message.params),
        )
        shared, report = send_models(self.server_method, rnd, message, self.state.shared)
        if metrics.REFUSED.name in report:
            # By client, of which a buffer may hold two updates.
            self._left_out += sum(client in self.refused for client in rows.tolist())
        self.state = dataclasses.replace(self.state, shared=shared)
        self.collected = []
        self.version += 1

    # ------------------------------------------------------------------ results

    def _record_span(self, index: int) -> None:
        """Record the rounds that ended in a span, and the model that serves at its end."""
        staleness = self._record_ended(index)
        # Of the server, and so the same for all clients, as in a common round.
        if self._left_out:
            count = torch.full((len(self.task),), self._left_out)
            self.record.add_metrics(
                index, self.task.ids, "train", "current", {metrics.REFUSED.name: count}
            )
            self._left_out = 0
        reports = self.mean_reports
        # The server's model serves all clients, trained or not: as after a common round.
        self._finish_round(index, torch.arange(len(self.task)), {})
        self.mean_reports = reports
        self._record_times(index, staleness)

    def _explain_first_models(self) -> str:
        """Return why the server has made no model; "" where it has."""
        if (why := super()._explain_first_models()) or self.version:
            return why
        return (
            f"the server has {len(self.collected)} of the {self.rule.size} updates that it makes a "
            "model of; expected more rounds, or a smaller time.server.buffer"
        )

    # ------------------------------------------------------------------ checkpoints

    def snapshot(self) -> dict[str, Tensor]:
        """Return what later rounds depend on in addition to the state, for a checkpoint."""
        if self.next_round < 1:
            return {}
        out = self._snapshot_clients()
        out["version"] = torch.tensor(self.version)
        out["begun"] = torch.from_numpy(self.begun.copy())
        out["begun_at"] = torch.from_numpy(self.begun_at.copy())
        models = dict(zip(self.begun.tolist(), self.fetched, strict=True))
        models |= {one.version: one.fetched for one in self.collected}
        out["models.versions"] = torch.tensor(list(models))
        out["models.params"] = torch.stack(list(models.values()))
        trained = [self.state.params[:0], *(one.trained[None] for one in self.collected)]
        out["collected.params"] = torch.cat(trained)
        for name in ("client", "version"):
            numbers = [getattr(one, name) for one in self.collected]
            out[f"collected.{name}s"] = torch.tensor(numbers, dtype=torch.int64)
        return out

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        if not tensors:
            return
        self._restore_clients(tensors)
        self._measure_messages()
        self.version = int(tensors["version"])
        self.begun, self.begun_at = (tensors[name].numpy().copy() for name in ("begun", "begun_at"))
        device = self.state.params.device
        rows = tensors["models.params"].to(device)
        models = dict(zip(tensors["models.versions"].tolist(), rows, strict=True))
        self.fetched = [models[version] for version in self.begun.tolist()]
        self.collected = []
        for client, trained, version in zip(
            tensors["collected.clients"].tolist(),
            tensors["collected.params"].to(device),
            tensors["collected.versions"].tolist(),
            strict=True,
        ):
            self.collected.append(_Update(client, trained, models[version], version))


class _ServerDoor(StandingExchange):
    """The way to the server for updates that it has collected, of which a client may have two.

    Args:
        ids: whose updates they are.
    """

    def __init__(self, ids: Int[Tensor, " updates"]) -> None:
        self.ids = ids

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Do nothing: the updates say whose they are."""

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Refuse: there are no peers."""
        raise ExchangeError("a server collects updates; there is nobody to read from")

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Apply the rule to the collected updates."""
        shared, reply = rule(shared, dataclasses.replace(message, ids=self.ids))
        return shared, reply.to_inbox()
