"""Bytes: counted in a run, and predicted for one between machines from what its method says it costs."""

import numpy as np
import pandas as pd
from jaxtyping import Float

from coterie.functional.metrics import BYTES_DOWN, BYTES_UP, EXTRA_BYTES
from coterie.methods.base import Method
from coterie.methods.cost import Cost, CostSetting

ENVELOPE = 523
"""Bytes of a message between machines beside its numbers: manifest, signature, header (see docs/reference/wire.md)."""


def predict_run_cost(method: Method, setting: CostSetting, rounds: int) -> Cost:
    """Predict the cost of a whole run for one client.

    Raises:
        ConfigError: for a method whose settings do not determine its cost.
    """
    return sum((method.cost(setting, round) for round in range(rounds)), Cost())


def predict_network_bytes(method: Method, setting: CostSetting, rounds: int) -> float:
    """Predict the bytes of messages that one client's node receives (server-based methods: and sends) over a run.

    Payload of the rounds, of what is asked once before them and of the measurements, and an
    envelope around each message. With a server a round has two messages that say who takes part,
    and a question and an answer each for the served model, for the round, and for the measurement,
    where clients fetch what they measure: after each round, to validate it, and in the end, to
    test.

    Raises:
        ConfigError: for a method whose settings do not determine its cost.

    Example:
        >>> from coterie.methods.random_gossip import Random
        >>> alone = Setting(population=2, params=1000, samples=10)
        >>> between_machines(Random(num_peers=1), alone, rounds=2)
        9054.0
    """
    cost, once = (
        predict_run_cost(method, setting, rounds) + method.cost(setting, "enroll"),
        method.cost(setting, "evaluate"),
    )
    if not method.server:
        return cost.bytes + ENVELOPE * (cost.models + cost.messages)
    fetched = rounds + 1 if once.models else 0
    messages = (2 * rounds + 1) + 2 * (2 * rounds + fetched)
    return (
        cost.bytes
        + fetched * once.bytes
        + 8 * setting.population * (2 * rounds + 1)
        + ENVELOPE * messages
    )


def count_traffic(
    metrics: pd.DataFrame, edges: pd.DataFrame, rounds: int
) -> tuple[Float[np.ndarray, " rounds"], Float[np.ndarray, " rounds"]]:
    """Count the bytes of a run, of all its clients together: received in each round, and sent to a server.

    Bytes sent to peers are counted once, as the bytes that the peers receive.

    Args:
        metrics: the metrics table of a run.
        edges: its edges table.
        rounds: how many rounds there are; a warm-up is not one of them.
    """

    def sum_by_round(table: pd.DataFrame, column: str) -> Float[np.ndarray, " rounds"]:
        table = table.loc[(table["round"] >= 0).to_numpy()]
        values = np.bincount(
            table["round"].to_numpy(np.int64), table[column].to_numpy(float), minlength=rounds
        )
        return values.astype(float)  # of an empty table it makes whole numbers

    extra, down, up = (
        sum_by_round(metrics.loc[(metrics["metric"] == one.name).to_numpy()], "value")
        for one in (EXTRA_BYTES, BYTES_DOWN, BYTES_UP)
    )
    return sum_by_round(edges, "bytes") + extra + down, up
