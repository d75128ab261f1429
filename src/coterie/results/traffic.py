"""The cost ledger: what a method costs a client in a round, predicted from its settings and counted in a run.

One unit of traffic is a model. Papers count the models a client receives (server-based ones: down and up). That leaves
out what else is sent: PANM's formula omits the neighbors that a correction round averages with but did not score, and
PANMGrad reads an update beside every model. So there are two ways of counting here, `paper_cost` and `true_cost`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
from jaxtyping import Float

from coterie.errors import ConfigError
from coterie.functional.metrics import BYTES_DOWN, BYTES_UP, COSTS, EXTRA_BYTES
from coterie.methods.base import Method
from coterie.methods.dac import Dac
from coterie.methods.ditto import Ditto
from coterie.methods.fix_topology import FixTopology
from coterie.methods.ifca import Ifca
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle
from coterie.methods.panm import Panm, PanmGrad, PanmLoss
from coterie.methods.pens import Pens
from coterie.methods.random_gossip import Random
from coterie.methods.sosicfl import SimplexMethod

ENVELOPE = 523
"""Bytes of a message between machines beside its numbers: manifest, signature, header (see docs/reference/wire.md)."""
COUNTED = tuple(one.name for one in COSTS)


@dataclass(frozen=True)
class Setting:
    """What a cost depends on beside the method.

    Args:
        population: clients ($K$).
        params: numbers in a model ($P$).
        samples: training samples of a client ($n_i$).
        group: members of the client's own cluster, itself included: Oracle's choice, and the size that PANM's bag and
            PENS's neighbors are taken to have found. The whole population when None.
        number_bytes: bytes of a number as sent.
        start_apart: whether clients start from different models.
    """

    population: int
    params: int
    samples: int
    group: int | None = None
    number_bytes: int = 4
    start_apart: bool = False

    @property
    def others(self) -> int:
        """How many other clients there are."""
        return self.population - 1

    @property
    def fellows(self) -> int:
        """How many others are in the own cluster."""
        return (self.group or self.population) - 1


@dataclass(frozen=True)
class Cost:
    """Per client: averages over clients, so they need not be whole numbers.

    Args:
        models: models read (server-based methods: received and sent).
        extra_models: numbers beside them in units of a model: updates, first models, models that others pushed.
        extra_floats: other numbers received: similarities, requests, answers.
        messages: messages received that carry no model.
        bytes: payload received (server-based methods: and sent).
        passes: forward passes of one sample, beside those of training.
        operations: numbers that went through a multiplication or an addition to compare and to mix models.
    """

    models: float = 0.0
    extra_models: float = 0.0
    extra_floats: float = 0.0
    messages: float = 0.0
    bytes: float = 0.0
    passes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))


def _read(setting: Setting, models: float, scored: float = 0.0, mixed: float | None = None) -> Cost:
    """Return the cost of reading models with their numbers of samples, of scoring some by their loss, and of mixing."""
    return Cost(
        models=models,
        bytes=models * (setting.params + 1) * setting.number_bytes,
        passes=scored * setting.samples,
        operations=((models if mixed is None else mixed) + 1) * setting.params,
    )


def _dac(method: Dac, setting: Setting, round: int) -> Cost:
    peers, size = min(method.num_peers, setting.others), setting.number_bytes
    loss = method.similarity == "inv_loss"
    cost = _read(setting, peers, scored=peers if loss else 0)
    products = {"inv_loss": 0, "inv_l2": peers, "cos_weight": 2 * peers + 1, "cos_grad": 3 * peers + 2}
    cost += Cost(operations=products[method.similarity] * setting.params)
    if method.similarity == "cos_grad" and setting.start_apart:
        cost += Cost(extra_models=peers, bytes=peers * setting.params * size)
    scores = setting.population * (size + 1)  # a similarity for each member, and whether it counts
    if method.two_hop and method.two_hop_scope == "current":
        cost += Cost(extra_floats=peers * setting.population, bytes=peers * scores)
    elif method.two_hop:
        known = setting.others * (1 - (1 - peers / max(1, setting.others)) ** (round + 1))
        cost += Cost(extra_floats=known * setting.population, messages=known, bytes=known * scores)
    if method.loss_direction == "push":
        pushed = peers * (1 - peers / max(1, setting.others))  # those that ask and were not asked
        carried = setting.params + 1
        beside = scores if method.two_hop and method.two_hop_scope == "current" else 0
        requests, answers = setting.others * (peers + 1) * 8, peers * (scores + 8)
        cost += Cost(
            extra_models=pushed,
            extra_floats=setting.others * peers + peers * setting.population,
            messages=setting.others + peers,
            bytes=pushed * (carried * size + beside) + requests + answers,
        )
    return cost


def _pens(method: Pens, setting: Setting, round: int) -> Cost:
    if round >= method.stage_one_rounds:
        return _read(setting, min(method.num_peers, setting.fellows))
    peers = min(method.num_sampled, setting.others)
    return _read(setting, peers, scored=peers, mixed=min(method.num_kept, peers))


def _panm(method: Panm, setting: Setting, round: int) -> Cost:
    number, kept, tried = round + 1, method.num_peers, method.num_candidates
    bag = max(1, setting.fellows)
    rest = 0.0
    if number <= method.stage_one_rounds:
        neighbors = 0 if number == 1 else min(kept, setting.others)
        scored = neighbors + min(tried, setting.others - neighbors)
        mixed = min(kept, scored)
    else:
        mixed = min(kept, bag)
        scored, rest = 0, float(mixed)
        if number % method.interval == 0:
            believed = min(tried, bag)
            scored = believed + min(tried, setting.others - bag)
            rest = mixed * (1 - believed / bag)
    cost = _read(setting, scored + rest, mixed=mixed)
    if isinstance(method, PanmLoss):
        return cost + Cost(passes=scored * setting.samples)
    assert isinstance(method, PanmGrad)
    told = (method.alpha > 0) + (method.alpha < 1 and setting.start_apart)
    products = (2 * scored + 1) * (method.alpha > 0) + (3 * scored + 2) * (method.alpha < 1)
    return cost + Cost(
        extra_models=scored * told,
        bytes=scored * told * setting.params * setting.number_bytes,
        operations=products * setting.params if scored else 0,
    )


def _server(method: Method, setting: Setting) -> Cost:
    if isinstance(method, SimplexMethod) or method.kind == "one-shot":
        raise ConfigError(
            f"no prediction for {method.kind}: what it sends depends on the model and the stage; count it"
        )
    choices = method.clusters if isinstance(method, Ifca) else 1
    return Cost(
        models=1 + choices,
        bytes=(1 + choices) * setting.params * setting.number_bytes,
        passes=choices * setting.samples if choices > 1 else 0,
    )


def predicted(method: Method, setting: Setting, round: int) -> Cost:
    """Predict what a round costs a client that takes part, when everybody answers.

    Where the cost depends on chance (who asks whom) it is the expected one under uniform draws; where it depends on
    what was found (PANM's bag, PENS's neighbors) that is taken to be the own cluster.

    Args:
        method: the method.
        setting: population, model and data.
        round: the number of the round, from 0.

    Raises:
        ConfigError: for a method whose cost cannot be told from its settings.

    Example:
        >>> predicted(Random(num_peers=5), Setting(population=100, params=1000, samples=400), 0).models
        5
    """
    if isinstance(method, Local):
        return Cost()
    if isinstance(method, Random | FixTopology):
        return _read(setting, min(method.num_peers, setting.others))
    if isinstance(method, Oracle):
        return _read(setting, min(method.num_peers, setting.fellows))
    if isinstance(method, Dac):
        return _dac(method, setting, round)
    if isinstance(method, Pens):
        return _pens(method, setting, round)
    if isinstance(method, Panm):
        return _panm(method, setting, round)
    if method.server:
        return _server(method, setting)
    raise ConfigError(f"no prediction for {method.kind}; count what a run of it cost")


def measuring(method: Method, setting: Setting) -> Cost:
    """Predict what one measurement of the newest models costs a client beside the rounds.

    Peers measure their own models for nothing. With a server a client fetches the newest model (with IFCA all of them)
    after each round, to validate it, and once more in the end, to test it: rounds + 1 times. Ditto's clients measure
    their personal models, which they have.

    Example:
        >>> measuring(Ifca(clusters=3), Setting(population=10, params=100, samples=50)).models
        3
    """
    if not method.server or isinstance(method, Ditto):
        return Cost()
    models = _server(method, setting).models - 1  # without the one that it sends
    return Cost(models=models, bytes=models * setting.params * setting.number_bytes)


def total(method: Method, setting: Setting, rounds: int) -> Cost:
    """Predict the cost of a whole run for one client."""
    return _sum(predicted(method, setting, round) for round in range(rounds))


def between_machines(method: Method, setting: Setting, rounds: int) -> float:
    """Predict the bytes of messages that one client's node receives (server-based methods: and sends) over a run.

    Payload of the rounds and of the measurements, and an envelope around each message. With a server a round has two
    messages that say who takes part, and a question and an answer each for the served model, for the round, and for
    the measurement (Ditto's clients measure on their own).

    Example:
        >>> alone = Setting(population=2, params=1000, samples=10)
        >>> between_machines(Random(num_peers=1), alone, rounds=2)
        9054.0
    """
    rounds_cost = total(method, setting, rounds)
    if not method.server:
        return rounds_cost.bytes + ENVELOPE * (rounds_cost.models + rounds_cost.messages)
    alone = isinstance(method, Ditto)
    cohorts, exchanges = 2 * rounds + 1, (2 if alone else 3) * rounds + (not alone)
    measured = (rounds + 1) * measuring(method, setting).bytes
    return rounds_cost.bytes + measured + 8 * setting.population * cohorts + ENVELOPE * (cohorts + 2 * exchanges)


def _sum(costs: Iterable[Cost]) -> Cost:
    whole = Cost()
    for cost in costs:
        whole = whole + cost
    return whole


def true_cost(method: Method, setting: Setting, rounds: int) -> float:
    """Return all models' worth of traffic of a client over a run: models, and extra models."""
    cost = total(method, setting, rounds)
    return cost.models + cost.extra_models


def paper_cost(method: Method, rounds: int, setting: Setting | None = None) -> float:
    r"""Return the models of a client over a run as the papers count them.

    PANM: $l + (T_1 - 1)(l + k) + 2l$ for each correction round and $k$ for every other round of stage two, whatever it
    reads to average in a correction round, and one model a peer for PANMGrad too. Server-based methods: down and up.

    Example:
        >>> paper_cost(PanmLoss(num_peers=2, num_candidates=4), rounds=300)
        1118.0
    """
    setting = setting or Setting(population=1_000_000, params=0, samples=0)
    models = 0.0
    for round in range(rounds):
        late = isinstance(method, Panm) and round >= method.stage_one_rounds
        if isinstance(method, Panm) and late and (round + 1) % method.interval == 0:
            models += 2 * method.num_candidates
        else:
            models += predicted(method, setting, round).models
    return models


def counted(metrics: pd.DataFrame, edges: pd.DataFrame) -> pd.DataFrame:
    """Count what a run cost each client in each round, from its record.

    Args:
        metrics: the metrics table of a run.
        edges: its edges table.

    Returns:
        Columns round, client, models (read), bytes (received, and sent to a server), and `COUNTED`, 0 where a method
        reports nothing of the kind.
    """
    named = metrics[metrics["metric"].isin(COUNTED) & (metrics["split"] == "train")]
    wide = named.pivot_table(index=["round", "client"], columns="metric", values="value", aggfunc="sum", observed=True)
    read = edges[edges["purpose"] != "missing"].groupby(["round", "reader"], observed=True)
    slots = pd.DataFrame({"models": read.size(), "bytes": read["bytes"].sum()})
    slots.index.names = ["round", "client"]
    table = slots.join(wide, how="outer").reindex(columns=["models", "bytes", *COUNTED]).fillna(0.0)
    table["bytes"] += table[EXTRA_BYTES.name] + table[BYTES_DOWN.name] + table[BYTES_UP.name]
    return table.reset_index()


def traffic(
    metrics: pd.DataFrame, edges: pd.DataFrame, rounds: int
) -> tuple[Float[np.ndarray, " rounds"], Float[np.ndarray, " rounds"]]:
    """Count the bytes of a run, of all its clients together: received in each round, and sent to a server.

    What a client gives to peers is what they receive, so it is counted there.

    Args:
        metrics: the metrics table of a run.
        edges: its edges table.
        rounds: how many rounds there are; a warm-up is not one of them.
    """

    def summed(table: pd.DataFrame, column: str) -> Float[np.ndarray, " rounds"]:
        table = table.loc[(table["round"] >= 0).to_numpy()]
        values = np.bincount(table["round"].to_numpy(np.int64), table[column].to_numpy(float), minlength=rounds)
        return values.astype(float)  # of an empty table it makes whole numbers

    extra, down, up = (
        summed(metrics.loc[(metrics["metric"] == one.name).to_numpy()], "value")
        for one in (EXTRA_BYTES, BYTES_DOWN, BYTES_UP)
    )
    return summed(edges, "bytes") + extra + down, up
