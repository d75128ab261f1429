"""Attackers of a simulation: which clients attack, and the labels that label flippers train on.

Results are of the honest clients: attackers have no rows in the table of metrics, while the table
of reads has theirs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from coterie.data.federation import SPLITS, Federation
from coterie.engine.task import Task
from coterie.errors import ConfigError, require
from coterie.exchange.attacking import LABEL_FLIP, Attack, AttackingExchange
from coterie.exchange.base import Exchange
from coterie.functional import metrics
from coterie.functional.metrics import Metric
from coterie.methods.base import Info, Method, PeerMethod, Round
from coterie.rng import Rng
from coterie.runtime.client_choice import count_clients, find_client
from coterie.runtime.extensions import Extension, make_extensions
from coterie.runtime.final_metrics import average_over_rounds
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings

AttackGroups = list[tuple[Attack, Int[Tensor, " attackers"]]]


def choose_attackers(federation: Federation, attacks: Sequence[Attack], seed: int) -> AttackGroups:
    """Return the rows of the clients of each attack, ascending; no client has two attacks.

    Args:
        federation: all clients.
        attacks: of the settings.
        seed: of the run; the draws depend on nothing else.

    Raises:
        ConfigError: when there is no such client, one is named twice, or fewer than two honest ones
            are left.
    """
    taken, population, groups = set[int](), len(federation), AttackGroups()
    for number, attack in enumerate(attacks):
        where, wanted = f"attacks[{number}]: clients", attack.clients
        if isinstance(wanted, float | int):
            count = count_clients(wanted, population, where)
            expected = f"a share that is at least one of {population} clients"
            require(count >= 1, where, wanted, expected)
            # Clients of earlier attacks are not free.
            free = np.array([row for row in range(population) if row not in taken])
            # A stream for each attack: adding one does not change the clients of those before it.
            stream = Rng(seed).at_round(-1).generator(f"attackers.{number}")
            rows = free[stream.permutation(len(free))[:count]].tolist()
            short = len(rows) < count
        else:
            names = federation.client_names
            rows = [find_client(one, population, names, where) for one in wanted]
            short = False
        twice = sorted(taken & set(rows)) + [row for row in rows if rows.count(row) > 1]
        require(
            not twice,
            where,
            wanted,
            f"clients that attack once; {federation.client_name(twice[0]) if twice else ''}",
        )
        taken |= set(rows)
        if short or population - len(taken) < 2:
            left = 0 if short else population - len(taken)
            raise ConfigError(
                f"{where} is {wanted!r}: of {population} clients {left} would be honest; expected "
                "two or more"
            )
        groups.append((attack, torch.tensor(sorted(rows))))
    return groups


def flip_labels(federation: Federation, groups: AttackGroups) -> Federation:
    """Return the data with flipped training labels of the label flippers: c becomes C - 1 - c.

    Raises:
        ConfigError: when there are label flippers and the targets are not classes.
    """
    rows = [ids for attack, ids in groups if attack.kind == LABEL_FLIP]
    if not rows:
        return federation
    if not federation.classes or federation.y.ndim != 2:
        raise ConfigError(
            f"attack {LABEL_FLIP!r} flips classes; these targets are not one class a sample"
        )
    # Validation and test labels stay: an attacker changes what it trains on.
    flips = torch.zeros_like(federation.split, dtype=torch.bool)
    flips[torch.cat(rows)] = True
    flips &= federation.split == SPLITS["train"]
    return replace(
        federation, y=torch.where(flips, federation.classes - 1 - federation.y, federation.y)
    )


def make_attacker_mask(groups: AttackGroups, population: int) -> Bool[Tensor, " population"] | None:
    """Return which clients attack; None where there are no attackers."""
    if not groups:
        return None
    found = torch.zeros(population, dtype=torch.bool)
    for _, ids in groups:
        found[ids] = True
    return found


class AttackExtension(Extension):
    """Reports how much attackers weigh with honest clients, and leaves attackers out of results.

    Args:
        attackers: which members of the population attack.
        method: of the run.
    """

    def __init__(self, attackers: Bool[Tensor, " population"], method: Method) -> None:
        self.attackers = attackers
        self.reports = (metrics.ATTACKER_WEIGHT, metrics.ATTACKER_READS)
        if not isinstance(method, PeerMethod):
            self.reports = ()

    def report_metrics(self) -> Sequence[Metric]:
        """Return the attackers' shares of mixing weight and of mixed models, with peers only."""
        return self.reports

    def select_counted(self, ids: Int[Tensor, " clients"]) -> Bool[Tensor, " clients"]:
        """Return which clients are honest."""
        return ~self.attackers[ids]

    def finish_round(self, rnd: Round, rows: Int[Tensor, " rows"], info: Info) -> Info:
        """Add the attackers' shares to the report of a round that mixed models."""
        if not {"peers", "weights", "own_weight"} <= set(info):
            return info
        weights, peers = info["weights"].double().cpu(), info["peers"]
        mixed = info["arrived"] & (weights > 0)
        # An empty slot is -1, and so names the last client: the last condition removes it.
        theirs = mixed & self.attackers[peers] & (peers >= 0)
        # The own model counts in the whole weight.
        whole = torch.where(mixed, weights, 0).sum(1) + info["own_weight"].double().cpu()
        share = torch.where(theirs, weights, 0).sum(1) / whole
        # 0 / 0 is NaN where a client mixed nothing: it has no share, and means leave it out.
        reads = theirs.sum(1).double() / mixed.sum(1)
        return {**info, metrics.ATTACKER_WEIGHT.name: share, metrics.ATTACKER_READS.name: reads}

    def measure_run(self, record: Record) -> dict[str, Tensor]:
        """Return the means of both shares over the rounds."""
        names = (metrics.ATTACKER_WEIGHT.name, metrics.ATTACKER_READS.name)
        honest = record.table_ids((~self.attackers).nonzero().flatten())
        return average_over_rounds(record.metrics, names, honest)


def make_all_extensions(
    method: Method, settings: Settings, groups: AttackGroups, population: int
) -> list[Extension]:
    """Return the extensions of a simulation: those of every run, and one for attackers."""
    found = make_extensions(method, settings)
    attackers = make_attacker_mask(groups, population)
    if attackers is not None:
        found.append(AttackExtension(attackers, method))
    return found


def wrap_exchange(inner: Exchange, groups: AttackGroups, task: Task, seed: int) -> Exchange:
    """Return the exchange in which these clients attack; the given one without attackers."""
    if not groups:
        return inner
    part, first = task.sharing, task.initial_models(Rng(seed))
    if not part.shares_all:
        first = part.shared.select_from(first)
    return AttackingExchange(inner, groups, first, task.population, task.ids)
