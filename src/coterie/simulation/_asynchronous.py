"""The asynchronous schedule: nobody waits, each client has rounds of its own in virtual time.

A client publishes when its local training ends, reads at once the newest messages that have reached
it, mixes, and trains again; how long everything takes is the clock's. A queue of (time, client)
orders what happens.

A training is computed when its result is needed: when the client's round ends. Then all trainings
that have begun are computed with it, as one stack. Readings are collected too: all that happen
before the end of a training that is not computed yet are one call of the method. Both change the
speed and not one bit of the results, since messages have times and draws have keys.
"""

import dataclasses
import heapq
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.mappings import map_values, prefix_keys, select_prefix
from coterie._util.tensors import index_each
from coterie.errors import ConfigError, require
from coterie.exchange.base import Exchange, Message
from coterie.exchange.in_memory import InMemory
from coterie.exchange.narrowed import narrow_exchange, narrow_message
from coterie.functional import metrics
from coterie.methods.base import (
    SLOT_FILLS,
    Info,
    PeerMethod,
    Round,
    State,
    can_train_in_place,
    check_returned_round,
    concatenate_rows,
    exchange_with_retries,
    list_tensors,
    map_tensors,
    train_locally,
)
from coterie.rng import Rng, RngByClient, RoundsDiffer
from coterie.runtime.loop import Loop, Tracker
from coterie.runtime.virtual_time import LONGEST, SECOND, Clock, to_nanoseconds
from coterie.simulation._boards import Boards
from coterie.simulation._publishing import check_messages, make_published_messages

IDLE = -1
"""The end of a round of a client that is in none."""

Report = dict[str, Tensor]
"""A report of some clients: tensors with a row for each."""
Reports = dict[int, tuple[Report, int]]
"""The reports of clients: for each the report of all that acted with it, and its row of that."""


class NothingLearned(UserWarning):
    """The results of a run are those of its first models: it was over before anything changed."""


class MixedRound(Round):
    """A round of clients that are each in a round of its own; its number is not defined."""


def _refuse_index(rnd: Round) -> int:
    raise RoundsDiffer("these clients are in several rounds")


# As of `RngByClient`: asking for the number is an error, and setting it does nothing.
MixedRound.index = property(_refuse_index, lambda rnd, value: None)  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Reading:
    """A client that reads: when, and in which of its rounds."""

    client: int
    time: int
    round: int


@dataclasses.dataclass(frozen=True)
class Wave:
    """What happens before the next training that is not computed yet.

    Args:
        ended: the clients whose rounds end, and when.
        stopping: which of them stop for ever.
        readings: the clients that read, each once.
    """

    ended: dict[int, int]
    stopping: set[int]
    readings: list[Reading]

    @property
    def last_time(self) -> int:
        """When the last of it happens."""
        return max([*self.ended.values(), *(one.time for one in self.readings)])


class AsynchronousLoop(Loop):
    """A run in which each client has rounds of its own in virtual time; see `Loop`.

    A round of the results is a span of virtual time, `record_seconds` long. All clients are hosted,
    so that their numbers are those of the rows.

    Raises:
        ConfigError: when the method cannot be run so, or the process does not host all clients.
    """

    schedules = frozenset({"asynchronous"})

    def _prepare_schedule(self) -> None:
        task, settings, time = self.task, self.settings, self.settings.virtual_time
        if not isinstance(self.exchange, InMemory) or len(task) < task.population:
            raise ConfigError(
                "schedule = 'asynchronous' delivers messages by virtual time itself, in one "
                "process that hosts all clients; found another exchange, or a part of the clients"
            )
        # `Settings` requires both.
        assert time is not None
        assert not self.extensions
        self.time = time
        expected = f"at most {LONGEST} seconds of virtual time"
        seconds = settings.rounds * time.record_seconds
        require(seconds <= LONGEST, "rounds * time.record_seconds", seconds, expected)
        self.clock = Clock(time, task.count_steps(settings.local), self.rng.seed)
        self._open_boards()
        self._without_validation = task.count_samples("validation") == 0
        number = len(task)
        # the models of rounds that have begun, before their training or after it
        self.flight = self.state
        self.end = np.full(number, IDLE, dtype=np.int64)
        self.pause = np.zeros(number, dtype=np.int64)  # in the round that has begun
        self.number = np.zeros(number, dtype=np.int64)  # of that round, or of the next one
        self.trained = np.zeros(number, dtype=bool)  # whether its training is computed
        self.stops = np.zeros(number, dtype=bool)  # whether the client stops after that round
        self.due = np.zeros(number, dtype=bool)  # who reads when the next span begins
        self.idle = np.zeros(number, dtype=np.int64)  # pauses in rounds that have ended
        # of rounds that have begun, by client: what the reading and the training reported, and how
        # the trained model did on validation data
        self.read_reports: Reports = {}
        self.train_reports: Reports = {}
        self.judged: Reports = {}
        # of the rounds that ended in this span: clients, numbers, reports
        self._ended: list[tuple[Tensor, Tensor, Report]] = []
        self._queue: list[tuple[int, int]] = []  # the end of each round that has begun, and whose
        self._apart = set[str]()  # what clients in several rounds cannot do together

    def _open_boards(self) -> None:
        """Make the boards on which messages stand."""
        method, time, oldest = self.method, self.time, None
        if not isinstance(method, PeerMethod):
            raise ConfigError(
                f"schedule = 'asynchronous': {method.kind} has one model for all and no server, so "
                "that its rounds have a common end; use 'synchronous'"
            )
        if time.max_staleness_seconds is not None:
            oldest = to_nanoseconds(time.max_staleness_seconds)
        forms = check_messages(method, self.task, self.state, self.settings.schedule)
        self.peer_method = method
        # A method without exchanges publishes nothing.
        self.boards = Boards(
            forms[: method.exchanges], len(self.task), self.clock, time.max_staleness, oldest
        )

    # ------------------------------------------------------------------ the order of events

    @property
    def _reads_first(self) -> bool:
        return self.order == "exchange_first"

    def _run_round(self, index: int) -> None:
        """Let virtual time pass until the next record, and record what happened."""
        span = self.time.record_nanoseconds
        if index == 0:
            self._start()
        # Who is due at the end of this span reads in the next one.
        due = self.due.nonzero()[0].tolist()
        self.due[:] = False
        while True:
            begun = [Reading(one, index * span, int(self.number[one])) for one in due]
            wave, due = self._collect_wave(begun, (index + 1) * span), []
            if wave.ended or wave.readings:
                self._apply_wave(wave)
            elif not self._train_pending((index + 1) * span):
                break
        self._record_span(index)

    def _start(self) -> None:
        """Begin the first round of every client, at time 0: after the training before it."""
        # Rows are written in place from now on, and the first state may be views of one row.
        self.state, self.flight = copy_state(self.state), copy_state(self.state)
        self.tracker = dataclasses.replace(self.tracker, best=self.tracker.best.clone())
        active = (~self.tracker.stopped).nonzero().flatten()
        for client in self.tracker.stopped.nonzero().flatten().tolist():
            self.boards.retire(client, 0, ())
        if self._reads_first:
            self._publish(active.tolist(), [0] * len(active), self.state.select_rows(active))
            self.due[active.numpy()] = True
            return
        for client in active.tolist():
            self._begin(client, 0)

    def _begin(self, client: int, time: int) -> int:
        """Begin a round of a client, and return when it ends."""
        end, self.pause[client] = self._time_round(client, time)
        self.end[client] = end
        self.trained[client] = False
        heapq.heappush(self._queue, (end, client))
        return end

    def _time_round(self, client: int, time: int) -> tuple[int, int]:
        """Return when a client's next round ends that begins at a time, and how long it pauses."""
        return self.clock.end_round(client, int(self.number[client]), time)

    def _collect_wave(self, begun: list[Reading], until: int) -> Wave:
        """Take what happens next out of the queue, up to the first training that is not computed.

        Args:
            begun: who reads at the beginning of this span of virtual time.
            until: when it ends.
        """
        wave = Wave({}, set(), begun)
        pending = self.end[(self.end != IDLE) & ~self.trained]
        first_pending = int(pending.min(initial=np.iinfo(np.int64).max))
        for one in begun:
            first_pending = min(first_pending, self._begin(one.client, one.time))
        # At one time all messages come before all readings: nothing at the time at which a training
        # ends that is not computed can happen before it is.
        while self._queue and self._queue[0][0] <= until and self._queue[0][0] < first_pending:
            time, client = heapq.heappop(self._queue)
            wave.ended[client], goes_on = time, not self.stops[client]
            round = int(self.number[client])
            self.idle[client] += self.pause[client]
            self.number[client] += 1
            self.end[client] = IDLE
            if not goes_on:
                wave.stopping.add(client)
                # With `train_first` it publishes once more, after its last reading: later readings
                # come in another wave.
                first_pending = min(first_pending, time + 1)
            if not self._reads_first:
                wave.readings.append(Reading(client, time, round))
            elif goes_on and time == until:
                # What is recorded at this time comes before the next round.
                self.due[client] = True
                continue
            elif goes_on:
                wave.readings.append(Reading(client, time, round + 1))
            if goes_on:
                first_pending = min(first_pending, self._begin(client, time))
        return wave

    def _observe(
        self, rows: Int[Tensor, " rows"], params: Tensor | None, values: Mapping[str, Tensor]
    ) -> Tracker:
        """Return the tracker of some clients after their rounds; without models when None."""
        before = self.tracker
        kept = before.best[:0]
        if params is not None and len(before.best):
            kept = before.best[rows]
        if params is None:
            params = before.best.new_zeros(len(rows), 0)
        own = Tracker(
            before.best_loss[rows],
            kept,
            before.bad[rows],
            before.stopped[rows],
            before.changed[rows],
        )
        return own.observe(
            params,
            values[metrics.LOSS.name],
            torch.ones(len(rows), dtype=torch.bool),
            self._without_validation[rows],
            self.settings.patience,
        )

    # ------------------------------------------------------------------ what happens in a wave

    def _apply_wave(self, wave: Wave) -> None:
        """End rounds, publish, read and mix."""
        clients = sorted(wave.ended)
        rows = torch.tensor(clients, dtype=torch.int64)
        report = take_reports(self.read_reports, clients)
        report |= take_reports(self.train_reports, clients)
        trained = self.flight.select_rows(rows)
        if self._reads_first:
            self.state = self.state.assign_rows(rows, trained)
        self._judge(clients, trained.params)
        # With `exchange_first`, a client that stops publishes its best model instead of this one.
        publishing, state = clients, trained
        if self._reads_first and wave.stopping:
            kept = [place for place, one in enumerate(clients) if one not in wave.stopping]
            publishing = [clients[place] for place in kept]
            state = trained.select_rows(torch.tensor(kept, dtype=torch.int64))
        self._publish(publishing, [wave.ended[client] for client in publishing], state)
        if self._reads_first:
            self._retire(wave)
        self._read(wave.readings, publishing, state)
        if not self._reads_first:
            # the reading that ends this round, not the next one
            report = {**take_reports(self.read_reports, clients), **report}
            self._retire(wave)
        if clients:
            self._ended.append((rows, torch.from_numpy(self.number[rows.numpy()] - 1), report))
        self.boards.forget(wave.last_time)

    def _judge(self, clients: Sequence[int], params: Float[Tensor, "rows params"]) -> None:
        """Note how the models of rounds that end did, and keep the best."""
        if not clients:
            return
        rows, joined = torch.tensor(clients), take_reports(self.judged, clients)
        for name, value in joined.items():
            nothing = torch.full((len(self.task),), torch.nan, dtype=value.dtype)
            # a copy: the record may hold the former values
            self.validation[name] = self.validation.get(name, nothing).index_copy(0, rows, value)
        new, old = self._observe(rows, params, joined), self.tracker
        if len(old.best):
            old.best[rows] = new.best
        self.tracker = Tracker(
            old.best_loss.index_copy(0, rows, new.best_loss),
            old.best,
            old.bad.index_copy(0, rows, new.bad),
            old.stopped.index_copy(0, rows, new.stopped),
            old.changed,
        )

    def _publish(self, clients: Sequence[int], times: Sequence[int], state: State) -> None:
        """Publish the messages of some clients, from their state."""
        if not self.boards.forms or not clients:
            return
        task = self.task.select_clients(torch.tensor(clients))
        messages = make_published_messages(self.peer_method, task, state)
        self.boards.publish(clients, times, messages)

    def _retire(self, wave: Wave) -> None:
        """Make clients that stop keep publishing one model."""
        models = self.state.params
        if self.settings.stopped_broadcast == "best":
            models = self.tracker.best
        for client in sorted(wave.stopping):
            row = Message(models[client : client + 1])
            shared = narrow_message(self.task.sharing, row).params
            # An exchange of extras alone has no columns.
            kept = [shared[:, : form.params.shape[1]] for form in self.boards.forms]
            # With `train_first` all read its trained model at this time, and this one later.
            self.boards.retire(client, wave.ended[client] + (not self._reads_first), kept)

    def _read(self, readings: Sequence[Reading], known: Sequence[int], known_state: State) -> None:
        """Let clients read and mix, each at its time.

        Args:
            readings: of the clients.
            known: clients whose rows were taken already.
            known_state: those rows.
        """
        readings = sorted(readings, key=lambda one: one.client)
        rows = torch.tensor([one.client for one in readings], dtype=torch.int64)
        times = np.zeros(len(self.task), dtype=np.int64)
        for one in readings:
            times[one.client] = one.time
        source = self.state
        if not self._reads_first:
            source = self.flight

        def read_messages(rows: Tensor, rounds: Sequence[int]) -> tuple[State, Info]:
            own, now = known_state, times[rows.numpy()]
            if rows.tolist() != known:
                own = source.select_rows(rows)
            self.boards.set_readers(rows, now)
            rnd = self._make_own_round(rows, rounds, self.boards, own.params)
            new, info = exchange_with_retries(self.peer_method, rnd, own)
            if "peers" not in info:
                return new, info
            found = self.boards.find_messages(rows, now, info["peers"])
            return new, {
                **info,
                "ages": torch.from_numpy(np.where(found.version < 0, -1, found.age)),
                "age_seconds": torch.from_numpy(
                    np.where(found.version < 0, np.nan, found.nanoseconds / SECOND)
                ),
            }

        for group, (new, info) in self._act(
            "read", rows, [r.round for r in readings], read_messages
        ):
            self.flight = self.flight.assign_rows(group, new)
            if not self._reads_first:
                self.state = self.state.assign_rows(group, new)
            self.read_reports |= note_reports(group, info)

    def _train_pending(self, until: int) -> bool:
        """Compute all trainings that have begun, if one of them ends until some time.

        Returns:
            Whether there was one.
        """
        pending = (self.end != IDLE) & ~self.trained
        if not (pending & (self.end <= until)).any():
            return False
        rows = torch.from_numpy(self._choose_trainings(pending).nonzero()[0])

        rounds = self.number[rows.numpy()].tolist()
        for group, (new, info, values) in self._act("train", rows, rounds, self._train):
            self._require_moments(self.flight, new)
            self.flight = self.flight.assign_rows(group, new)
            self.trained[group.numpy()] = True
            self.train_reports |= note_reports(group, info)
            if values:
                self.judged |= note_reports(group, values)
                self.stops[group.numpy()] = self._observe(group, None, values).stopped.numpy()
        return True

    def _train(
        self, rows: Int[Tensor, " rows"], rounds: Sequence[int]
    ) -> tuple[State, Info, Report]:
        """Train clients; return also how each does on its validation data, {} if none is judged."""
        own = self.flight.select_rows(rows)
        rnd = self._make_own_round(rows, rounds, self.boards, own.params)
        # The rows are copies, which may be trained in place unless the method compares.
        method, alone = self.peer_method, can_train_in_place(self.peer_method, own, self.flight)
        new, info = check_returned_round(
            method, "local_update", train_locally(method, rnd, own, alone), rnd.task
        )
        values = rnd.task.evaluator.evaluate_split(new.params, "validation")
        return new, info, map_values(Tensor.cpu, values)

    def _choose_trainings(self, pending: np.ndarray) -> np.ndarray:
        """Return which of the trainings that are not computed to compute now: the more, the faster.

        The one that ends first must be among them.
        """
        # A training that ends after the run does is of no use.
        return pending & (self.end <= self.settings.rounds * self.time.record_nanoseconds)

    def _act(
        self,
        what: str,
        rows: Int[Tensor, " rows"],
        rounds: Sequence[int],
        function: Callable[[Tensor, Sequence[int]], tuple],
    ) -> list[tuple[Tensor, tuple]]:
        """Call a function for clients, together where that is possible.

        Clients in several rounds act together unless something asks for the number of the round:
        then those of each round do.

        Args:
            what: the function's name, under which it is remembered that it asks.
            rows: the clients, ascending.
            rounds: of each of them.
            function: of rows and their rounds; it changes nothing.

        Returns:
            The rows of each call, and what it returned.
        """
        if not len(rows):
            return []
        different = sorted(set(rounds))
        if len(different) == 1 or what not in self._apart:
            try:
                return [(rows, function(rows, rounds))]
            except RoundsDiffer:
                self._apart.add(what)
        found, of_row = [], torch.tensor(rounds)
        for round in different:
            group = rows[of_row == round]
            found.append((group, function(group, [round] * len(group))))
        return found

    def _make_own_round(
        self,
        rows: Int[Tensor, " rows"],
        rounds: Sequence[int],
        door: Exchange,
        params: Float[Tensor, "rows params"],
    ) -> Round:
        """Return the round that some clients are in, each in its own."""
        kind, index = MixedRound, -1
        rng: Rng = RngByClient(self.rng.seed, rounds=dict(zip(rows.tolist(), rounds, strict=True)))
        if len(set(rounds)) == 1:
            kind, index, rng = Round, rounds[0], self.rng.at_round(rounds[0])
        task = self.task.for_round(rng).select_clients(rows)
        return kind(
            index=index,
            task=task,
            exchange=narrow_exchange(door, task.sharing, params),
            rng=rng,
            reachable=torch.ones(task.population, dtype=torch.bool),
            local=self.settings.local,
            order=self.order,
            metrics=frozenset(map(str, self.settings.metrics)),
            record_similarities=self.settings.record_similarities,
        )

    # ------------------------------------------------------------------ results

    def _record_span(self, index: int) -> None:
        """Record the rounds that ended in a span of virtual time, and the models at its end."""
        staleness = self._record_ended(index)
        self._record_evaluation(index, self.state.params, {})
        self._record_times(index, staleness)

    def _record_ended(self, index: int) -> Report:
        """Record the rounds that ended in a span, and return how old what they read was."""
        staleness: dict[str, Tensor] = {}
        if self._ended:
            ids, rounds, parts = map(list, zip(*self._ended, strict=True))
            self._ended = []
            ids, info = torch.cat(ids), _join_parts(parts)
            # by client, and the rounds of each in order: whatever acted together
            order = torch.from_numpy(np.lexsort((torch.cat(rounds).numpy(), ids.numpy())))
            ids, info = ids[order], index_each(info, order)
            self.record.add_edges(index, ids, info)
            if "train_samples" in info:
                self.train_samples += int(info["train_samples"].sum())
            clients, totals = _sum_rounds(ids, info)
            self._record_info(index, clients, totals)
            staleness = _mean_ages(ids, info, len(self.task))
        return staleness

    def _record_times(self, index: int, staleness: Report) -> None:
        """Record how far each client is at the end of a span."""
        elapsed = (index + 1) * self.time.record_nanoseconds
        # pauses of rounds that have not ended are not known as idle yet
        values = {
            metrics.ELAPSED.name: torch.full(
                (len(self.task),), elapsed / SECOND, dtype=torch.float64
            ),
            metrics.OWN_ROUNDS.name: torch.from_numpy(self.number.copy()),
            metrics.IDLE_SHARE.name: torch.from_numpy(self.idle / elapsed),
            **staleness,
        }
        self.record.add_metrics(index, self.task.ids, "train", "current", values)

    def evaluate_final(self) -> Float[Tensor, "clients params"]:
        """See `Loop.evaluate_final`; warn where the models are the first ones."""
        if why := self._explain_first_models():
            warnings.warn(
                f"the results are those of the first models: {why}", NothingLearned, stacklevel=2
            )
        return super().evaluate_final()

    def _explain_first_models(self) -> str:
        """Return why no model has changed since the warm-up; "" where one has."""
        if self.number.any():
            return ""
        seconds = self.settings.rounds * self.time.record_seconds
        return (
            f"no client has ended a round in the {seconds:g} seconds of virtual time of the run; "
            "expected more rounds, or a longer time.record_seconds"
        )

    # ------------------------------------------------------------------ checkpoints

    def snapshot(self) -> dict[str, Tensor]:
        """Return what later rounds depend on in addition to the state, for a checkpoint."""
        if self.next_round < 1:
            return {}
        return self._snapshot_clients() | prefix_keys("boards.", self.boards.snapshot())

    def _snapshot_clients(self) -> dict[str, Tensor]:
        """Return what is known of the rounds that have begun."""
        out: dict[str, Tensor] = {}
        out |= prefix_keys("flight.", list_parts(self.flight))
        for name in _ARRAYS:
            out[name] = torch.from_numpy(getattr(self, name).copy())
        for name in _REPORTS:
            reports: Reports = dict(getattr(self, name))
            for number, clients in enumerate(_group_by_names(reports)):
                out[f"{name}.{number}.clients"] = torch.tensor(clients, dtype=torch.int64)
                joined = take_reports(reports, clients)
                out |= {f"{name}.{number}.report.{key}": value for key, value in joined.items()}
        return out

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        if tensors:
            self.boards.restore(select_prefix("boards.", tensors))
            self._restore_clients(tensors)

    def _restore_clients(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `_snapshot_clients`."""
        self.state, self.flight = copy_state(self.state), copy_state(self.state)
        for name, mine in list_parts(self.flight).items():
            stored = tensors[f"flight.{name}"]
            # Lists of members may be longer than in the state.
            mine.resize_(stored.shape).copy_(stored)
        for name in _ARRAYS:
            setattr(self, name, tensors[name].numpy().copy())
        for name in _REPORTS:
            reports: Reports = {}
            for number in itertools.count():
                clients = tensors.get(f"{name}.{number}.clients")
                if clients is None:
                    break
                found = select_prefix(f"{name}.{number}.report.", tensors)
                reports |= note_reports(clients, found)
            setattr(self, name, reports)
        busy = (self.end != IDLE).nonzero()[0].tolist()
        self._queue = [(int(self.end[client]), client) for client in busy]
        heapq.heapify(self._queue)


_ARRAYS = ("end", "pause", "number", "trained", "stops", "due", "idle")
_REPORTS = ("read_reports", "train_reports", "judged")
# Of each step, or the models themselves: nothing is recorded of them.
_NOT_KEPT = ("losses", "trained")


def copy_state(state: State) -> State:
    """Return a state whose tensors nothing else uses and no two rows share."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    return State(
        copy(state.params),
        map_tensors(state.memory, copy),
        state.shared,
        map_tensors(state.moments, copy),
    )


def list_parts(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state that have a row for each client, by the names of checkpoints."""
    found = {"params.0": state.params}
    for name, owner in (("memory", state.memory), ("moments", state.moments)):
        found |= prefix_keys(f"{name}.", dict(enumerate(list_tensors(owner))))
    return found


def note_reports(rows: Int[Tensor, " rows"], info: Info) -> Reports:
    """Return the report of each client."""
    kept = {name: value.cpu() for name, value in info.items() if name not in _NOT_KEPT}
    return {client: (kept, place) for place, client in enumerate(rows.tolist())}


def _group_by_names(reports: Reports) -> list[list[int]]:
    """Return the clients of which the same is reported, group by group."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for client in sorted(reports):
        groups.setdefault(tuple(sorted(reports[client][0])), []).append(client)
    return list(groups.values())


def take_reports(reports: Reports, clients: Sequence[int]) -> Report:
    """Take the reports of some clients out, as one; nothing where none has any."""
    parts: dict[int, Report] = {}
    places: dict[int, list[tuple[int, int]]] = {}
    for row, client in enumerate(clients):
        if client in reports:
            part, place = reports.pop(client)
            parts[id(part)] = part
            places.setdefault(id(part), []).append((row, place))
    joined, order = [], list[int]()
    for key, found in places.items():
        taken = torch.tensor([place for _, place in found])
        joined.append(index_each(parts[key], taken))
        order += [row for row, _ in found]
    if not joined:
        return {}
    back = torch.argsort(torch.tensor(order))
    return index_each(_join_parts(joined), back)


def _join_parts(parts: Sequence[Report]) -> Report:
    """Join reports; what a method reports in some of its rounds alone is NaN in the others.

    Clients are in rounds of their own, so that one may be in a method's first stage and another one
    in its second.
    """
    known: Report = {}
    for one in parts:
        known = {**one, **known}
    joined = {}
    for name, example in known.items():
        rows = []
        for one in parts:
            if name in one:
                rows.append(one[name])
            else:
                rows.append(_report_nothing(name, example, len(next(iter(one.values())))))
        joined[name] = concatenate_rows(name, rows)
    return joined


def _report_nothing(name: str, example: Tensor, clients: int) -> Tensor:
    """Return the rows of an entry for clients that do not report it: no slots, or NaN."""
    if name in SLOT_FILLS and example.ndim > 1:
        return example.new_empty(clients, 0)
    if example.ndim > 1:
        raise ConfigError(
            f"the method reports {name!r} of some clients or rounds alone, and it is no number a "
            "client; expected it of all"
        )
    return torch.full((clients,), torch.nan, dtype=torch.float64)


def _sum_rounds(ids: Int[Tensor, " rounds"], info: Info) -> tuple[Tensor, Report]:
    """Return the report of each client over its rounds: costs add up, else the last one counts.

    Args:
        ids: the clients, ascending, and the rounds of each in order.
        info: their reports.
    """
    clients, place = ids.unique(return_inverse=True)
    last = torch.zeros_like(clients).scatter_reduce(
        0, place, torch.arange(len(ids)), "amax", include_self=False
    )
    summed = {one.name for one in metrics.COSTS} | {"train_samples", metrics.REFUSED.name}
    out = {}
    for name, value in info.items():
        if name in SLOT_FILLS:
            continue
        out[name] = value[last]
        if name in summed:
            # NaN is a round without a report: the others of the client count.
            reported = ~value.isnan()
            total = torch.zeros_like(out[name]).index_add(0, place, torch.where(reported, value, 0))
            any_round = torch.zeros_like(clients).index_add(0, place, reported.to(clients)) > 0
            out[name] = torch.where(any_round, total, out[name])
        elif name == metrics.DIVERGED.name:
            out[name] = torch.zeros_like(clients).index_add(0, place, (value > 0).to(clients)) > 0
    return clients, out


def _mean_ages(ids: Int[Tensor, " rounds"], info: Info, population: int) -> Report:
    """Return the mean age of what each client read; NaN for a client that read nothing."""
    if "ages" not in info:
        return {}
    read = info["ages"] >= 0
    if "arrived" in info:
        read = read & info["arrived"]
    count = torch.zeros(population, dtype=torch.float64).index_add(0, ids, read.sum(1).double())
    out = {}
    for name, value in (
        (metrics.STALENESS.name, info["ages"].double()),
        (metrics.STALENESS_SECONDS.name, info["age_seconds"]),
    ):
        total = torch.where(read, value, 0).sum(1)
        out[name] = torch.zeros_like(count).index_add(0, ids, total) / count
    return out
