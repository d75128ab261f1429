"""Newcomers: clients that join after the last round, train a few rounds, and are tested.

They show how a method serves clients that it has not seen ("new" or "unseen" clients). The others
stay as they are: peers keep publishing their last models, a server keeps its own, and nothing that
a newcomer does changes them. Or, with `new_client_others = "training"`, the run continues with the
newcomers in it; the results of the others are those of the run's end in any case.

In a peer-to-peer method a newcomer acts as the method does from its first round on: it begins with
the first model and an empty memory, and reads only clients that were in the run (others that train
read it, and newcomers each other). With a server it evaluates the models that serve clients now,
takes the one with the least loss on its training data, and continues to train it; where the others
train, it is in every cohort from then on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.data.federation import Federation
from coterie.engine.optim import OptimizerState
from coterie.engine.task import LocalTraining, Task
from coterie.errors import ConfigError, require
from coterie.exchange.base import Exchange, Reply
from coterie.exchange.in_memory import InMemory
from coterie.exchange.narrowed import narrow_exchange
from coterie.functional import metrics
from coterie.functional.member_lists import align_lists
from coterie.methods.base import (
    Method,
    Order,
    PeerMethod,
    Round,
    State,
    check_returned_round,
    exchange_with_retries,
    train_locally,
    zip_tensors,
)
from coterie.methods.server import ServerContext, ServerMethod
from coterie.rng import Rng
from coterie.runtime.client_choice import count_clients, find_client
from coterie.runtime.loop import Loop, Tracker
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings

SPLIT, RECEIVED = "new_clients", "received"
"""The names in a run's tables for tests of newcomers, and for a server's model as received."""


@dataclass(frozen=True)
class NewcomerSplit:
    """A federation separated into participants of the rounds and newcomers.

    Args:
        participants: the clients that take part, as a federation of their own.
        all_clients: all clients: first the participants, then the newcomers.
        ids: the id of each row of `all_clients` in the original federation.
    """

    participants: Federation
    all_clients: Federation
    ids: Int[Tensor, " clients"]

    @property
    def newcomer_rows(self) -> Int[Tensor, " rows"]:
        """The rows of the newcomers in `all_clients`."""
        return torch.arange(len(self.participants), len(self.all_clients))


def separate_newcomers(
    federation: Federation, settings: Settings, method: Method, seed: int
) -> NewcomerSplit | None:
    """Separate the newcomers from the others; None where the settings ask for none.

    The arguments and errors are those of `find_newcomers`.
    """
    new = find_newcomers(federation, settings, method, seed)
    if new is None:
        return None
    inside = torch.ones(len(federation), dtype=torch.bool)
    inside[new] = False
    others = inside.nonzero().flatten()
    # Participants first, so that their rows are the same in both federations.
    order = torch.cat([others, new])
    return NewcomerSplit(federation.select_clients(others), federation.select_clients(order), order)


def find_newcomers(
    federation: Federation, settings: Settings, method: Method, seed: int
) -> Int[Tensor, " rows"] | None:
    """Return the rows of the newcomers, ascending; None where the settings ask for none.

    Who they are depends on the seed alone, or is given by the settings.

    Args:
        federation: all clients.
        settings: of the run.
        method: of the run.
        seed: of the run.

    Raises:
        ConfigError: when there is no such client, fewer than two would be left, or the method has
            no rule for them.
    """
    if settings.new_clients is None:
        return None
    if not isinstance(method, PeerMethod | ServerMethod):
        raise ConfigError(
            f"new_clients is {settings.new_clients!r}; {method.kind} is neither a PeerMethod nor "
            "a ServerMethod, so "
            "nothing says how a client joins late"
        )
    new = choose_newcomers(settings.new_clients, len(federation), federation.client_names, seed)
    others = len(federation) - len(new)
    # One client alone trains with nobody, and says nothing of who joins it.
    if others < 2:
        raise ConfigError(
            f"new_clients is {settings.new_clients!r}: of {len(federation)} clients {others} "
            "would take part; "
            "expected two or more"
        )
    return new


def choose_newcomers(
    wanted: Any, population: int, names: Sequence[str], seed: int
) -> Int[Tensor, " rows"]:
    """Return the rows of the newcomers, ascending; see `Settings.new_clients`.

    Args:
        wanted: a share, a count, or a list of names and numbers.
        population: number of clients in all.
        names: of the clients; empty where they have none.
        seed: of the run.

    Raises:
        ConfigError: when there is no such client, or no other client would be left.
    """
    if not isinstance(wanted, float | int):
        rows = {find_client(one, population, names, "new_clients") for one in wanted}
        return torch.tensor(sorted(rows))
    count = count_clients(wanted, population, "new_clients")
    expected = f"1 to {population - 2} of the {population} clients"
    if population < 3:
        expected = (
            f"three or more clients with it, two of them from the start; there are {population}"
        )
    require(1 <= count < population, "new_clients", wanted, expected)
    # A stream of its own, so that the choice does not shift any other draw.
    drawn = Rng(seed).at_round(-1).generator("new_clients").permutation(population)[:count]
    # Ascending, so that newcomers keep the order of their ids.
    return torch.from_numpy(drawn).sort().values


@dataclass(frozen=True)
class JoinContext:
    """A run that newcomers join, as the process that hosts them sees it.

    Args:
        method: of the run.
        settings: of the run.
        order: of exchange and training in a round.
        rng: the random streams of the run.
        task: of the clients hosted here, numbered as in `NewcomerSplit.all_clients`.
        rows: of the newcomers in it.
        exchange: the door to other clients.
        reachable: which members of the whole population they may read.
    """

    method: Method
    settings: Settings
    order: Order
    rng: Rng
    task: Task
    rows: Int[Tensor, " rows"]
    exchange: Exchange
    reachable: Bool[Tensor, " population"]

    @property
    def newcomer_task(self) -> Task:
        """The task of the newcomers alone."""
        return self.task.select_clients(self.rows)

    def make_round(self, index: int, task: Task, params: Float[Tensor, "clients params"]) -> Round:
        """Return a round of some clients; a newcomer's rounds count from its first."""
        rng = self.rng.at_round(index)
        return Round(
            index=index,
            task=task.for_round(rng),
            exchange=narrow_exchange(self.exchange, task.sharing, params),
            rng=rng,
            reachable=self.reachable,
            local=self.settings.local,
            order=self.order,
            sum_only=self.settings.secure_terms,
            sampling=self.settings.views_among(self.task.population),
        )

    def begin_round(self, index: int, ids: Int[Tensor, " clients"]) -> None:
        """Start a round of these clients at the exchange."""
        self.exchange.begin_round(self.rng.at_round(index))
        self.exchange.set_active(ids)

    def init_moments(self, task: Task) -> OptimizerState | None:
        """Return the initial optimizer states of some clients, where they outlast a round."""
        local = self.settings.local
        if not local.persistent_client_optimizer:
            return None
        return task.trainer.init_optimizer_state(local, self.method.tracks)


ModelSteps = Iterator[tuple[Float[Tensor, "newcomers params"], Float[Tensor, "newcomers params"]]]
"""The newcomers' models after each step, and the models to judge on their validation data."""


def join_newcomers(
    loop: Loop, task: Task, parts: NewcomerSplit
) -> Float[Tensor, "newcomers params"]:
    """Let the newcomers join a finished run, train and be tested; add the results to its tables.

    Args:
        loop: the run of the others, after its final evaluation; not changed, but for its tables.
        task: of all clients, as in `parts.all_clients`.
        parts: who is new.

    Returns:
        The tested model of each newcomer.
    """
    rows, going = parts.newcomer_rows, None
    reachable = torch.ones(task.population, dtype=torch.bool)
    if loop.settings.new_client_others == "training":
        going = loop
    else:
        # Newcomers do not read each other while the others are frozen.
        reachable[rows] = False
    # A fresh one: nothing that was published in the run is read a second time.
    door = InMemory(task.ids, task.population)
    now = JoinContext(loop.method, loop.settings, loop.order, loop.rng, task, rows, door, reachable)
    if not isinstance(loop.method, ServerMethod):
        models = iterate_peer_models(now, join_states(loop, task), going)
    else:
        # The server's state is that of the participants alone.
        taking, last = loop.task, loop.next_round - 1
        context = ServerContext(
            last, loop.rng.at_round(last), taking.layout, taking.population, None, taking.sharing
        )
        table = loop.method.newcomer_candidates(context, loop.state.shared)
        if going is None:
            models = iterate_served_models(now, table)
        else:
            models = _iterate_cohort_models(now, table, going)
    return evaluate_newcomers(now, models, loop.record, loop.next_round - 1)


def evaluate_newcomers(
    now: JoinContext, models: ModelSteps, record: Record, last: int
) -> Float[Tensor, "newcomers params"]:
    """Test the newcomers' last or best models, as the settings say.

    Args:
        now: the run that they join.
        models: what they train.
        record: gets the results.
        last: number of the run's last round, under which they are kept.

    Returns:
        The tested model of each newcomer.
    """
    own, best = now.newcomer_task, now.settings.evaluate == "best_val"
    measured = own.for_round(now.rng.at_round(last))
    everybody = torch.ones(len(own), dtype=torch.bool)
    unknown = own.count_samples("validation") == 0
    tracker: Tracker | None = None
    params = None
    for place, (params, judged) in enumerate(models):
        # The model as received is tested before any training.
        if place == 0 and now.method.server:
            record.add_metrics(last, own.ids, SPLIT, RECEIVED, measured.evaluate(params))
        if best:
            loss = measured.evaluator.evaluate_split(judged, "validation")[metrics.LOSS.name].cpu()
            # From the first model on, so that the one received can be the best.
            tracker = tracker or Tracker.start(judged)
            # Without patience: newcomers train all of their rounds.
            tracker = tracker.observe(judged, loss, everybody, unknown, None)
    assert params is not None
    final, model = params, "current"
    if tracker is not None:
        final, model = tracker.best, "best"
    record.add_metrics(last, own.ids, SPLIT, model, measured.evaluate(final))
    return final


# ---------------------------------------------------------------- with a server


def iterate_served_models(now: JoinContext, table: Float[Tensor, "models params"]) -> ModelSteps:
    """Yield the newcomers' models with a frozen server: as received, then after each round.

    Args:
        now: the run that they join.
        table: the models with which the server serves clients; see
            `ServerMethod.newcomer_candidates`.
    """
    method, own = now.method, now.newcomer_task
    assert isinstance(method, ServerMethod)
    received, _ = _choose_received_models(now, table)
    state = State(received, moments=now.init_moments(own))
    yield received, received
    for index in range(now.settings.new_client_rounds):
        rnd = now.make_round(index, own, state.params)
        state = method.adapt_newcomer(rnd, state, received)
        yield state.params, state.params


def _choose_received_models(
    now: JoinContext, table: Float[Tensor, "models params"]
) -> tuple[Tensor, Tensor]:
    """Return the model that each newcomer receives, and the server's row of it.

    It is the one of all models with the least loss on the newcomer's training data. What clients do
    not share comes from their own first model.
    """
    own, mine = now.newcomer_task, now.newcomer_task.initial_models(now.rng)
    offer = Reply.to_every_client(table, len(own)).to_inbox()
    if not own.sharing.shares_all:
        offer = replace(offer, part=own.sharing, own=mine)
    # A model that diverged must not be chosen: argmin would return the place of a NaN.
    losses = own.score(offer).nan_to_num(nan=torch.inf)
    chosen = table[losses.argmin(1).to(table.device)]
    return own.apply_buffer_policy(mine, chosen), chosen


def _iterate_cohort_models(
    now: JoinContext, table: Float[Tensor, "models params"], loop: Loop
) -> ModelSteps:
    """Yield the newcomers' serving models while the run continues with them in every cohort."""
    method, task, rows = now.method, now.task, now.rows
    assert isinstance(method, ServerMethod)
    received, chosen = _choose_received_models(now, table)
    yield received, received
    fresh, old = method.init_state(task, now.rng), loop.state
    # What members of the run remember moves into tables of the whole population; see
    # `_make_enlarger`.
    memory = _enlarge_memory(fresh.memory, old.memory, method.kind)
    state = State(torch.cat([old.params, received]), memory, method.add_members(old.shared, chosen))
    if old.moments is not None:
        state = replace(
            state, moments=_join_moments(old.moments, now.init_moments(now.newcomer_task))
        )
    for index in range(loop.next_round, loop.next_round + now.settings.new_client_rounds):
        taking = torch.zeros(task.population, dtype=torch.bool)
        # Newcomers are in every cohort, in addition to the ones that the rule draws.
        taking[rows] = True
        cohort = method.select_cohort(
            state.shared, now.rng.at_round(index), task.population, now.settings.participation
        )
        taking[cohort] = True
        active = taking.nonzero().flatten()
        now.begin_round(index, active)
        part = state.select_rows(active)
        rnd = now.make_round(index, task.select_clients(active), part.params)
        rnd = replace(rnd, reachable=taking)
        new, _ = check_returned_round(method, "round", method.round(rnd, part), rnd.task)
        state = state.replace_rows(active, new)
        # Evaluation is of all clients, not of the cohort alone.
        now.exchange.set_active(task.ids)
        params = method.serving_model(now.make_round(index, task, state.params), state)[0]
        yield params[rows], params[rows]


# ---------------------------------------------------------------- peer to peer


def iterate_peer_models(now: JoinContext, state: State, going: Loop | None = None) -> ModelSteps:
    """Yield the newcomers' peer-to-peer models, and the ones to judge, after each round.

    The first is that after the warm-up. All clients hosted here exchange, so that the others answer
    as the method says. What the others would learn from it is dropped, unless their run continues:
    then each round is two passes over the same messages, one in which newcomers learn, in their own
    count of rounds, and one in which the others do, in theirs.

    Args:
        now: the run that they join.
        state: of all clients hosted here.
        going: the run of the others, where it goes on.
    """
    method, settings, rows = now.method, now.settings, now.rows
    assert isinstance(method, PeerMethod)
    if state.moments is None:
        state = replace(state, moments=now.init_moments(now.task))
    reachable = now.reachable

    def choose_active_others(index: int) -> Int[Tensor, " active"]:
        """Choose which of the others take part in a round, by the rule of their run."""
        if going is None or index < 0:
            return rows[:0]
        rng, cohort = now.rng.at_round(going.next_round + index), torch.arange(len(going.task))
        if settings.participation != 1:
            # Drawn among the others: their cohorts do not depend on how many newcomers there are.
            cohort = method.select_cohort(
                going.state.shared, rng, len(going.task), settings.participation
            )
        return cohort[~going.tracker.stopped[cohort]]

    def exchange_models(index: int, state: State, active: Tensor) -> State:
        new = state
        # A pass of the newcomers in their count of rounds, then one of the others in theirs.
        passes = [(index, rows)]
        if going is not None and len(active):
            passes.append((going.next_round + index, active))
        for number, learning in passes:
            now.begin_round(number, now.task.ids)
            # Both passes read the models of before: `state`, not `new`.
            rnd = now.make_round(number, now.task, state.params)
            if going is not None:
                rnd = replace(rnd, reachable=reachable)
            found, _ = exchange_with_retries(method, rnd, state)
            # Only the rows that learn in this pass change.
            new = new.replace_rows(learning, found.select_rows(learning))
        return new

    def train_models(index: int, state: State, active: Tensor, local: LocalTraining) -> State:
        rnd = replace(now.make_round(index, now.newcomer_task, state.params[rows]), local=local)
        new = state.replace_rows(rows, train_locally(method, rnd, state.select_rows(rows))[0])
        if going is not None and len(active):
            task = now.task.select_clients(active)
            rnd = now.make_round(going.next_round + index, task, state.params[active])
            found, _ = train_locally(method, rnd, state.select_rows(active))
            new = new.replace_rows(active, found)
        return new

    for index in range(-1, settings.new_client_rounds):
        active = choose_active_others(index)
        if going is not None and index >= 0:
            reachable = torch.zeros_like(now.reachable)
            reachable[rows], reachable[active] = True, True
            reachable[: len(going.task)] |= going.tracker.stopped  # stopped clients keep publishing
        if index < 0:
            local = settings.warmup_training
            # As in the run: a client that reads before it trains has trained once before its first
            # round.
            if now.order == "exchange_first" and (local.steps or local.epochs):
                state = train_models(index, state, active, local)
            now.begin_round(index, now.task.ids)
            rnd = now.make_round(index, now.task, state.params)
            # Enrolling concerns everybody's messages, but only newcomers keep what they learn from
            # it.
            state = state.replace_rows(rows, method.enroll(rnd, state).select_rows(rows))
            judged = state.params[rows]
        elif now.order == "train_first":
            state = train_models(index, state, active, settings.local)
            judged = state.params[rows]
            state = exchange_models(index, state, active)
        else:
            state = exchange_models(index, state, active)
            state = train_models(index, state, active, settings.local)
            judged = state.params[rows]
        yield state.params[rows], judged


def join_states(loop: Loop, task: Task) -> State:
    """Return the state of all clients hosted here: the others' from the run, the newcomers' new.

    Args:
        loop: the run of the others.
        task: of the others hosted here and of the newcomers, in the whole population.

    Raises:
        ConfigError: when the method's memory does not fit into one of the whole population.
    """
    count, old, tracker = len(loop.task), loop.state, loop.tracker
    published = old.params
    if (
        loop.settings.stopped_broadcast == "best"
        and bool(tracker.stopped.any())
        and len(tracker.best)
    ):
        # A stopped client publishes its best model, as in the run.
        published = torch.where(
            tracker.stopped.to(old.params.device)[:, None], tracker.best, old.params
        )
    fresh = loop.method.init_state(task, loop.rng)
    memory = _enlarge_memory(fresh.memory, old.memory, loop.method.kind)
    # The newcomers' rows come after the others', who are the first `count`.
    params = torch.cat([published, fresh.params[count:]])
    if old.moments is None:
        return State(params, memory)
    newcomers = task.select_clients(torch.arange(count, len(task)))
    begun = newcomers.trainer.init_optimizer_state(loop.settings.local, loop.method.tracks)
    return State(params, memory, moments=_join_moments(old.moments, begun))


def _join_moments(old: OptimizerState, new: OptimizerState | None) -> OptimizerState:
    """Return the optimizers of clients, and of others after them."""
    return zip_tensors(old, new, lambda a, b: torch.cat([a, b]))


def _enlarge_memory(fresh: Any, old: Any, kind: str) -> Any:
    """Copy the tables of a memory into the same places of larger ones; None stays None."""

    def enlarge_table(new: Tensor, before: Tensor) -> Tensor:
        # A dimension that shrinks has another meaning, so places cannot be matched.
        if any(a < b for a, b in zip(new.shape, before.shape, strict=True)):
            raise ConfigError(
                f"new_clients: {kind} remembers a table of {tuple(before.shape)} where a larger "
                "population "
                f"begins with {tuple(new.shape)}; a client cannot join it"
            )
        out = new.clone()
        # The population's clients are the first in both tables.
        out[tuple(map(slice, before.shape))] = before.to(new.dtype)
        return out

    if old is None:
        return None
    # A list of members has no columns at first.
    fresh, old = align_lists([fresh, old])
    return zip_tensors(fresh, old, enlarge_table)
