"""Newcomers: clients that were in no round, join when a run has ended, train a few rounds, and are tested.

They tell how a method serves clients that it has not seen ("new" or "unseen" clients). The others stay as they are:
peers go on publishing their last models, a server keeps its own, and nothing that a newcomer does changes them.

In a peer-to-peer method a newcomer acts as the method does from its first round on: it begins with the first model and
an empty memory, and reads only clients that were in the run. With a server it measures the models that serve clients
now, takes the one with the least loss on its training data, and trains it on.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.data.federation import Federation
from coterie.engine.optim import Moments
from coterie.engine.task import Task
from coterie.errors import ConfigError, require, unknown
from coterie.exchange.base import Reply
from coterie.exchange.in_memory import InMemory
from coterie.functional import metrics
from coterie.methods.base import Method, PeerMethod, Round, State, zip_tensors
from coterie.methods.server import ServerMethod
from coterie.rng import Rng
from coterie.simulation.loop import Loop, Tracker
from coterie.simulation.settings import Settings

SPLIT, RECEIVED = "new_clients", "received"
"""What the tables of a run call the tests of newcomers, and a server's model before a newcomer trained it."""


@dataclass(frozen=True)
class Parted:
    """A federation whose clients do not all take part.

    Args:
        taking: those that do, as a federation of their own.
        whole: all of them: first those that take part, then the newcomers.
        ids: the id of each row of `whole` in the federation that was given.
    """

    taking: Federation
    whole: Federation
    ids: Int[Tensor, " clients"]

    @property
    def newcomers(self) -> Int[Tensor, " rows"]:
        """The rows of the newcomers in `whole`."""
        return torch.arange(len(self.taking), len(self.whole))


def parted(federation: Federation, settings: Settings, method: Method, seed: int) -> Parted | None:
    """Set newcomers apart; None where the settings ask for none.

    Who they are depends on the seed alone, or is told.

    Args:
        federation: all clients.
        settings: of the run.
        method: of the run.
        seed: of the run.

    Raises:
        ConfigError: when there is no such client, fewer than two would be left, or the method has no rule for them.
    """
    if settings.new_clients is None:
        return None
    if not isinstance(method, PeerMethod | ServerMethod):
        raise ConfigError(
            f"new_clients is {settings.new_clients!r}; {method.kind} is neither a PeerMethod nor a ServerMethod, so "
            "nothing says how a client joins late"
        )
    new = _chosen(federation, settings.new_clients, seed)
    inside = torch.ones(len(federation), dtype=torch.bool)
    inside[new] = False
    others = inside.nonzero().flatten()
    if len(others) < 2:
        raise ConfigError(
            f"new_clients is {settings.new_clients!r}: of {len(federation)} clients {len(others)} would take part; "
            "expected two or more"
        )
    order = torch.cat([others, new])
    return Parted(federation.part(others), federation.part(order), order)


def _chosen(federation: Federation, wanted: Any, seed: int) -> Int[Tensor, " rows"]:
    """The rows of the newcomers, ascending."""
    population = len(federation)
    if not isinstance(wanted, float | int):
        rows = {_row(federation, one) for one in wanted}
        return torch.tensor(sorted(rows))
    count = round(wanted * population) if wanted < 1 else round(wanted)
    require(wanted < 1 or wanted == count, "new_clients", wanted, "a share below 1, a whole number, or a list")
    require(1 <= count < population, "new_clients", wanted, f"1 to {population - 2} of the {population} clients")
    drawn = Rng(seed).at(-1).generator("new_clients").permutation(population)[:count]
    return torch.from_numpy(drawn).sort().values


def _row(federation: Federation, wanted: int | str) -> int:
    names = federation.client_names
    if isinstance(wanted, str) and wanted in names:
        return names.index(wanted)
    if names and isinstance(wanted, str) and not wanted.isdecimal():
        raise ConfigError(f"new_clients: {unknown('client', wanted, names)}")
    fits = not isinstance(wanted, str) or wanted.isdecimal()
    require(fits and 0 <= int(wanted) < len(federation), "new_clients", wanted, f"0 to {len(federation) - 1}")
    return int(wanted)


def join(loop: Loop, task: Task, parts: Parted) -> Float[Tensor, "newcomers params"]:
    """Let the newcomers join a run that has ended, train and be tested; the run's tables get the results.

    Args:
        loop: the run of the others, after its final evaluation; not changed, but for its tables.
        task: of all clients, as `parts.whole` has them.
        parts: who is new.

    Returns:
        The tested model of each newcomer.
    """
    rows, last, best = parts.newcomers, loop.next_round - 1, loop.settings.evaluate == "best_val"
    own = task.rows(rows)
    method, measured = loop.method, own.at(loop.rng.at(last))
    everybody, unknown = torch.ones(len(rows), dtype=torch.bool), own.counts("validation") == 0
    tracker: Tracker | None = None
    models = _served(loop, own) if isinstance(method, ServerMethod) else _peers(loop, task, rows)
    params = None
    for place, (params, judged) in enumerate(models):
        if place == 0 and method.server:
            loop.record.add_metrics(last, own.ids, SPLIT, RECEIVED, measured.evaluate(params))
        if best:
            loss = measured.measure(judged, "validation")[metrics.LOSS.name].cpu()
            tracker = tracker or Tracker.start(judged)
            tracker = tracker.observe(judged, loss, everybody, unknown, None)
    assert params is not None
    final = tracker.best if tracker is not None else params
    loop.record.add_metrics(last, own.ids, SPLIT, "best" if best else "current", measured.evaluate(final))
    return final


def _round(loop: Loop, task: Task, index: int, exchange: Any, reachable: Tensor) -> Round:
    """A round of the newcomers, counted from their first; its draws are those of clients with their numbers."""
    rng = loop.rng.at(index)
    return Round(
        index=index,
        task=task.at(rng),
        exchange=exchange,
        rng=rng,
        reachable=reachable,
        local=loop.settings.local,
        order=loop.order,
    )


def _served(loop: Loop, task: Task) -> Any:
    """Yield the newcomers' models of a method with a server: as received, then after each round."""
    method = loop.method
    assert isinstance(method, ServerMethod)
    here, population = torch.arange(len(loop.task)), torch.arange(loop.task.population)
    loop.exchange.cohort(lambda: population)
    loop.exchange.enter(loop.task.ids)
    table = method.overall(loop._context(loop.next_round - 1, here, population), loop.state).unique(dim=0)
    losses = task.score(Reply.everything(table, len(task)).inbox()).nan_to_num(nan=torch.inf)
    received = table[losses.argmin(1).to(table.device)]
    params, moments = received, _fresh(loop, task)
    yield params, params
    reachable = torch.zeros(task.population, dtype=torch.bool)
    for index in range(loop.settings.new_client_rounds):
        rnd = _round(loop, task.carrying(moments), index, loop.exchange, reachable)
        params = method.adapt(rnd, params, received)
        moments = rnd.task.moments
        yield params, params


def _fresh(loop: Loop, task: Task) -> Moments | None:
    keeps = loop.settings.local.persistent_client_optimizer
    return task.fresh_moments(loop.settings.local, loop.method.tracks) if keeps else None


def _peers(loop: Loop, task: Task, rows: Int[Tensor, " rows"]) -> Any:
    """Yield the newcomers' models of a peer-to-peer method, and those to judge: after the warm-up and each round.

    Everybody exchanges, so that the others answer as the method says; what they would learn from it is dropped.
    """
    method, settings = loop.method, loop.settings
    assert isinstance(method, PeerMethod)
    state = _joined(loop, task)
    exchange = InMemory(task.ids, task.population)
    reachable = torch.ones(task.population, dtype=torch.bool)
    reachable[rows] = False
    own, moments = task.rows(rows), _fresh(loop, task.rows(rows))

    def kept(new: State) -> State:
        return state.put(rows, new.take(rows))

    def trained(index: int, local: Any) -> State:
        nonlocal moments
        rnd = replace(_round(loop, own.carrying(moments), index, exchange, reachable), local=local)
        found, _ = method.train(rnd, state.take(rows))
        moments = rnd.task.moments
        return state.put(rows, replace(found, moments=None))

    for index in range(-1, settings.new_client_rounds):
        rnd = _round(loop, task, index, exchange, reachable)
        exchange.begin(rnd.rng)
        exchange.enter(task.ids)
        if index < 0:
            local = settings.local
            if settings.warmup_epochs is not None:
                local = replace(local, epochs=settings.warmup_epochs, steps=None)
            if loop.order == "exchange_first" and (local.steps or local.epochs):
                state = trained(index, local)
            state = kept(method.enroll(rnd, state))
            judged = state.params[rows]
        elif loop.order == "train_first":
            state = trained(index, settings.local)
            judged = state.params[rows]
            state = kept(method.settled_exchange(rnd, state)[0])
        else:
            state = kept(method.settled_exchange(rnd, state)[0])
            state = trained(index, settings.local)
            judged = state.params[rows]
        yield state.params[rows], judged


def _joined(loop: Loop, task: Task) -> State:
    """The state of all clients: that of the others as the run left it, and that of newcomers as a run begins."""
    count, old, tracker = len(loop.task), loop.state, loop.tracker
    published = old.params
    if loop.settings.stopped_broadcast == "best" and bool(tracker.stopped.any()) and len(tracker.best):
        published = torch.where(tracker.stopped.to(old.params.device)[:, None], tracker.best, old.params)
    fresh = loop.method.init(task, loop.rng)

    def place(new: Tensor, before: Tensor) -> Tensor:
        """What is there of the others goes to the same places of the larger table."""
        if any(a < b for a, b in zip(new.shape, before.shape, strict=True)):
            raise ConfigError(
                f"new_clients: {loop.method.kind} remembers a table of {tuple(before.shape)} where a larger population "
                f"begins with {tuple(new.shape)}; a client cannot join it"
            )
        out = new.clone()
        out[tuple(slice(0, size) for size in before.shape)] = before.to(new.dtype)
        return out

    memory = None if old.memory is None else zip_tensors(fresh.memory, old.memory, place)
    return State(torch.cat([published, fresh.params[count:]]), memory)
