"""Drift: from some round on, clients have other data.

A `[[data.drift]]` table says which clients change, in which round, and how: by a shift of
`data.shifts`, or by moving to another planted cluster. The samples of a client stay the same; how
they look and how they are labeled changes. So rounds fall into phases, in each of which the data of
all clients are fixed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, final

import numpy as np
import torch
from annotated_types import Gt, Le, MinLen
from torch import Tensor

from coterie._util.mappings import drop_keys, number_items, select_keys
from coterie._util.settings import (
    Configurable,
    NonNegativeInt,
    PositiveInt,
    parse_settings,
    settable_fields,
    to_plain,
)
from coterie.data._partition import apportion_total
from coterie.data.federation import PADDING, Federation, Phase, TestSet, Truth
from coterie.data.plan import Client, Clients, SampleRecipe, Shift, apply_shift, name_cluster
from coterie.data.shifts import parse_shift, shift_to_table
from coterie.data.source import Source
from coterie.errors import ConfigError, DataError
from coterie.rng import EVERYONE, Rng

Planted = tuple[tuple[int, str], ...]
"""The number and the name of a client's cluster in each shift that plants clusters."""

MOVE = "move"
"""The kind of drift by which clients move to another planted cluster."""


@final
@dataclass(frozen=True)
class Drift(Configurable):
    """When the data of which clients change; a table of `[[data.drift]]` without its change.

    Args:
        at: the round from which the change applies, counted from 0; a list for a change that comes
            back in each of these rounds.
        lasts: rounds after which a changed client has its former data again; None for never.
        over: rounds in which the clients change, one after another, from `at` on; 1 for all at
            once.
        share: part of the clients of each planted cluster that changes, rounded to whole clients,
            drawn by the seed.
        clients: the numbers of the clients that change, instead of a share.
    """

    at: PositiveInt | Annotated[Sequence[PositiveInt], MinLen(1)]
    lasts: PositiveInt | None = None
    over: PositiveInt = 1
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    clients: Annotated[Sequence[NonNegativeInt], MinLen(1)] | None = None

    def check(self) -> None:
        """Check that a change that comes back has gone before."""
        starts = self.starts
        if list(starts) != sorted(set(starts)):
            raise ConfigError(f"at is {list(starts)}; expected ascending rounds")
        if self.clients is not None and self.share != 1:
            raise ConfigError("share and clients are both given; expected one of the two")
        if len(starts) > 1:
            least = min(np.diff(starts))
            if self.lasts is None or self.lasts >= least:
                raise ConfigError(
                    f"at is {list(starts)} and lasts is {self.lasts}; expected lasts below {least},"
                    " so that each change ends before the next one"
                )

    @property
    def starts(self) -> tuple[int, ...]:
        """The rounds in which the change begins."""
        return (self.at,) if isinstance(self.at, int) else tuple(self.at)

    def list_rounds(self, delay: int) -> list[int]:
        """Return the rounds in which a client changes, back too.

        Args:
            delay: rounds by which this client is later than the first.
        """
        found = []
        for start in self.starts:
            found.append(start + delay)
            if self.lasts is not None:
                found.append(start + delay + self.lasts)
        return found

    def is_changed(self, delay: int, round: int) -> bool:
        """Return whether a client has changed data in a round; see `list_rounds`."""
        # Each change ends before the next one begins, so the number of changes so far says it.
        return sum(one <= round for one in self.list_rounds(delay)) % 2 == 1


@dataclass(frozen=True)
class PhasePlan:
    """The plan of all clients from a round on.

    Args:
        first: the round; 0 for the plan before any drift.
        clients: what each client has then.
    """

    first: int
    clients: Clients


@dataclass(frozen=True)
class DriftPlan:
    """The plans of all phases.

    Args:
        phases: the first one is without drift.
        clusters: every planted cluster that there can be, in the order of their numbers.
    """

    phases: tuple[PhasePlan, ...]
    clusters: tuple[Planted, ...]

    @property
    def all_clients(self) -> Clients:
        """What clients have in any phase, phase by phase."""
        found: Clients = ()
        for phase in self.phases:
            found += phase.clients
        return found


def parse_drift(table: Mapping[str, Any], where: str = "drift") -> tuple[Drift, Shift | None]:
    """Parse a `[[data.drift]]` table.

    Args:
        table: the fields of `Drift`, and `kind`: "move", or that of a shift with the fields of it.
        where: how the user finds it.

    Returns:
        When who changes, and the shift; None for clients that move to another cluster.

    Raises:
        ConfigError: on an unknown kind or key, or a value that does not fit.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r:.60}; expected a table with a kind")
    names = settable_fields(Drift)
    rest = drop_keys(table, names)
    if rest.get("kind") == MOVE:
        # The kind alone is left: any other key is unknown.
        drift = parse_settings(Drift, drop_keys(table, ("kind",)), where)
        return drift, None
    return parse_settings(Drift, select_keys(table, names), where), parse_shift(rest, where)


def drift_to_table(table: Mapping[str, Any], where: str = "drift") -> dict[str, Any]:
    """Return a `[[data.drift]]` table with every field, as studies are stored and compared.

    Args:
        table: the table, see `parse_drift`.
        where: how the user finds it.

    Example:
        >>> drift_to_table({"kind": "move", "at": 5, "share": 0.5})
        {'kind': 'move', 'at': 5, 'over': 1, 'share': 0.5}
    """
    names = settable_fields(Drift)
    own = isinstance(table, Mapping) and ":" in str(table.get("kind"))
    # A shift of one's own is not imported to be stored.
    shift = {"kind": MOVE}
    if own:
        drift = parse_settings(Drift, select_keys(table, names), where)
        shift = to_plain(drop_keys(table, names))
    else:
        drift, made = parse_drift(table, where)
        if made is not None:
            shift = shift_to_table(made, where)
    return {**shift, **to_plain(drift)}


def plan_phases(
    tables: Sequence[Mapping[str, Any]], clients: Clients, sources: Sequence[Source], rng: Rng
) -> DriftPlan:
    """Return the plan of each phase.

    Args:
        tables: of `[[data.drift]]`, which are applied in this order.
        clients: the plan without drift.
        sources: the datasets.
        rng: the streams of the data.

    Raises:
        ConfigError: when a change would give clients other samples, or names unknown clients.
    """
    drifts, additions = [], []
    # What has been drawn for each client: its cluster, and by which tables it changes.
    histories: list[tuple[Any, ...]] = [(client.planted,) for client in clients]
    for number, table in enumerate(tables):
        where = f"data.drift[{number}]"
        drift, shift = parse_drift(table, where)
        delays = _draw_delays(drift, histories, rng, number, where)
        drifts.append((drift, shift, delays, number, where))
        histories = [(*one, row in delays) for row, one in enumerate(histories)]
        if shift is None and additions:
            raise ConfigError(
                f"{where}: kind is {MOVE!r}, after a change of another kind; expected it first: "
                "clients move between the clusters that there are without drift"
            )
        if shift is None:
            continue
        changed = _apply_shift(clients, sorted(delays), shift, sources, rng, number)
        added = {one.planted[len(clients[row].planted) :] for row, one in changed.items()}
        additions.append(sorted(added))
    rounds = set[int]()
    for drift, _, delays, _, _ in drifts:
        for delay in delays.values():
            rounds |= set(drift.list_rounds(delay))
    phases = [PhasePlan(0, clients)]
    for first in sorted(rounds):
        now = clients
        for drift, shift, delays, number, where in drifts:
            rows = [row for row, delay in delays.items() if drift.is_changed(delay, first)]
            if not rows:
                continue
            if shift is None:
                new = {row: _move_client(now[row], clients, where) for row in rows}
            else:
                new = _apply_shift(now, sorted(delays), shift, sources, rng, number)
            now = tuple(new[row] if row in rows else now[row] for row in range(len(now)))
        _require_same_samples(clients, now)
        if now != phases[-1].clients:
            phases.append(PhasePlan(first, now))
    return DriftPlan(tuple(phases), tuple(_list_clusters(clients, additions)))


def _draw_delays(
    drift: Drift, histories: Sequence[tuple[Any, ...]], rng: Rng, number: int, where: str
) -> dict[int, int]:
    """Return the delay of each client that changes, by its row.

    Args:
        drift: when who changes.
        histories: of each client, its planted cluster first.
        rng: the streams of the data.
        number: of the table.
        where: how the user finds it.
    """
    stream = rng.generator(f"data.drift.{number}.clients", EVERYONE)
    chosen: list[int] = []
    if drift.clients is not None:
        for row in drift.clients:
            if row >= len(histories):
                raise ConfigError(
                    f"{where}: clients has {row}; expected 0 to {len(histories) - 1}, the number "
                    "of a client"
                )
        chosen = list(dict.fromkeys(drift.clients))
    else:
        # Shares of each cluster, split further into clients that earlier tables change and others:
        # so many clients of each kind change with every seed, and no kind by chance alone.
        kinds: dict[Any, dict[Any, list[int]]] = {}
        for row, history in sorted(enumerate(histories), key=lambda item: (item[1], item[0])):
            kinds.setdefault(history[0], {}).setdefault(history, []).append(row)
        for groups in kinds.values():
            sizes = np.array([len(members) for members in groups.values()], dtype=float)
            counts = apportion_total(round(drift.share * int(sizes.sum())), sizes)
            for members, count in zip(groups.values(), counts.tolist(), strict=True):
                chosen += [members[place] for place in stream.permutation(len(members))[:count]]
        if not chosen:
            raise ConfigError(
                f"{where}: share is {drift.share:g}, which is no client of any cluster; give more, "
                "or name clients"
            )
    # Who changes first is drawn too, over all clusters.
    order = stream.permutation(len(chosen))
    return {
        chosen[place]: turn * drift.over // len(chosen) for turn, place in enumerate(order.tolist())
    }


def _apply_shift(
    clients: Clients,
    rows: Sequence[int],
    shift: Shift,
    sources: Sequence[Source],
    rng: Rng,
    number: int,
) -> dict[int, Client]:
    """Return what the clients of some rows have after a shift.

    All clients that ever change by a table are changed together, so that the change of one does not
    depend on who changes in the same round.
    """

    def make_stream(client: int) -> np.random.Generator:
        # A shift counts the clients that it is given; streams are those of the whole population.
        own = client if client == EVERYONE else rows[client]
        return rng.generator(f"data.drift.{number}.{shift.kind}", own)

    changed = apply_shift(shift, tuple(clients[row] for row in rows), sources, make_stream)
    return dict(zip(rows, changed, strict=True))


def _move_client(client: Client, clients: Clients, where: str) -> Client:
    """Return a client as a member of the next planted cluster, of the last one in the first.

    Args:
        client: as it is now, in one of the clusters.
        clients: the plan without drift, which has the clusters.
        where: how the user finds the table.
    """
    clusters = sorted({one.planted for one in clients})
    if len(clusters) < 2:
        raise ConfigError(
            f"{where}: kind is {MOVE!r}, and there is one planted cluster; expected two at least: "
            "add a shift that plants them"
        )
    target = clusters[(clusters.index(client.planted) + 1) % len(clusters)]
    members = [one for one in clients if one.planted == target]
    if any(one.recipe != members[0].recipe for one in members):
        raise ConfigError(
            f"{where}: kind is {MOVE!r}, and members of {members[0].cluster_name!r} have different "
            "data; expected clusters whose members are alike"
        )
    model = members[0]
    return replace(client, recipe=model.recipe, planted=model.planted, notes=model.notes)


def _describe_samples(client: Client) -> tuple[Any, ...]:
    """Return all that decides which samples a client has, and which it is tested on."""
    recipe = client.recipe
    return (
        client.samples, client.shares, client.group, client.rows, client.mixture, client.counts,
        client.reuse, recipe.source, recipe.offset, recipe.labels, recipe.where, recipe.mixture,
    )  # fmt: skip


def _require_same_samples(before: Clients, after: Clients) -> None:
    for row, (one, other) in enumerate(zip(before, after, strict=True)):
        if _describe_samples(one) != _describe_samples(other):
            raise ConfigError(
                f"data.drift gives client {row} other samples ({other.describe_changes()}); "
                "expected changes of how samples look or are labeled: rotation, visual, "
                "label-swap, regression-targets, or move between clusters of these"
            )


def join_phases(plan: DriftPlan, built: Sequence[Federation], *, shares_tests: bool) -> Federation:
    """Join the federations of all phases into one.

    Each client's row has its samples once for each way in which they ever look; a phase says which
    of them are in use.

    Args:
        plan: of the phases.
        built: the federation of each phase.
        shares_tests: whether clients with equal recipes have one test set.

    Raises:
        DataError: when samples are read from disk when they are needed.
    """
    inputs = list[Tensor]()
    for one in built:
        if not isinstance(one.x, Tensor):
            raise DataError(
                "data.drift needs samples in memory, in rows of about equal length; these are read "
                "when they are needed: leave data.drift out, or load smaller data"
            )
        inputs.append(one.x)
    first, plans = built[0], plan.phases
    clients, width = len(first), first.split.shape[1]
    # The place of each recipe of a client in its row.
    places: list[dict[SampleRecipe, int]] = [{} for _ in range(clients)]
    for phase in plans:
        for row, client in enumerate(phase.clients):
            places[row].setdefault(client.recipe, len(places[row]))
    copies = max(map(len, places))
    x = inputs[0].new_zeros(clients, copies * width, *inputs[0].shape[2:])
    y = first.y.new_zeros(clients, copies * width, *first.y.shape[2:])
    origin = torch.full((clients, copies * width), -1)
    tests, test_places = _TestTable(shares_tests), []
    splits = []
    for phase, one, own_x in zip(plans, built, inputs, strict=True):
        split = torch.full((clients, copies * width), PADDING)
        for row, client in enumerate(phase.clients):
            start = places[row][client.recipe] * width
            span = slice(start, start + width)
            x[row, span], y[row, span] = own_x[row], one.y[row]
            split[row, span] = one.split[row]
            if one.origin is not None:
                origin[row, span] = one.origin[row]
        splits.append(split)
        test_places.append(tests.add_phase(phase.clients, one))
    truths = _number_clusters(plan.clusters, plans, built)
    phases = []
    for place, phase in enumerate(plans[1:], 1):
        phases.append(
            Phase(phase.first, splits[place], test_places[place], built[place].noise, truths[place])
        )
    return replace(
        first, x=x, y=y, split=splits[0], tests=tuple(tests.sets), test_of=test_places[0],
        origin=origin, truth=truths[0], phases=tuple(phases),
    ).validate()  # fmt: skip


class _TestTable:
    """The test sets of all phases, each once."""

    def __init__(self, shares_tests: bool) -> None:
        self.sets: list[TestSet] = []
        self._shares_tests = shares_tests
        self._places: dict[Any, int] = {}

    def add_phase(self, clients: Clients, built: Federation) -> Tensor:
        """Return the place of each client's test set in a phase."""
        found = []
        for row, client in enumerate(clients):
            key = client.recipe if self._shares_tests else (row, client.recipe)
            if key not in self._places:
                self._places[key] = len(self.sets)
                self.sets.append(built.tests[int(built.test_of[row])])
            found.append(self._places[key])
        return torch.tensor(found)


def _list_clusters(clients: Clients, additions: Sequence[Sequence[Planted]]) -> list[Planted]:
    """Return every cluster that there can be, in an order that is that of every seed.

    Names of clusters are stored once for all seeds, and which of several changes meet at a client
    may depend on the seed.

    Args:
        clients: the plan without drift, whose clusters come first.
        additions: what each change adds to the planted clusters of its clients.
    """
    found = dict.fromkeys(sorted({client.planted for client in clients}))
    for each in additions:
        for before in list(found):
            found |= dict.fromkeys(before + added for added in each)
    return list(found)


def _number_clusters(
    clusters: Sequence[Planted], plans: Sequence[PhasePlan], built: Sequence[Federation]
) -> list[Truth | None]:
    """Return the truth of each phase, with the same number for a cluster in all of them."""
    numbers = number_items(clusters)
    names = tuple(name_cluster(cluster) for cluster in clusters)
    found: list[Truth | None] = []
    for plan, one in zip(plans, built, strict=True):
        if one.truth is None:
            found.append(None)
            continue
        cluster = [numbers[client.planted] for client in plan.clients]
        found.append(Truth(torch.tensor(cluster), names, one.truth.shift))
    return found
