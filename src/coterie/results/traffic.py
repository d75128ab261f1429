"""Bytes: counted in a run, and predicted for a run between machines from its method's cost."""

import numpy as np
import pandas as pd
from jaxtyping import Float

from coterie.functional.metrics import BYTES_DOWN, BYTES_UP, EXTRA_BYTES
from coterie.methods.base import Method
from coterie.methods.cost import Cost, CostSetting

ENVELOPE = 523
"""Bytes of a message in addition to its numbers; see docs/reference/wire.md."""


def predict_run_cost(method: Method, setting: CostSetting, rounds: int) -> Cost:
    """Predict the cost of a whole run for one client.

    Raises:
        ConfigError: for a method whose settings do not determine its cost.
    """
    return sum((method.cost(setting, round) for round in range(rounds)), Cost())


def predict_network_bytes(method: Method, setting: CostSetting, rounds: int) -> float:
    """Predict the bytes that one client's node receives, and with a server sends.

    They are the payload of the rounds, of the requests before them and of the measurements, and an
    envelope around each message. With a server a round has two messages about which clients take
    part, and a request and a reply each for the served model, for the round, and for the
    measurement if clients fetch the models that they measure: after each round, to validate them,
    and at the end, to test them.

    Raises:
        ConfigError: for a method whose settings do not determine its cost.

    Example:
        >>> from coterie.methods.random_gossip import Random
        >>> setting = CostSetting(population=2, params=1000, samples=10)
        >>> predict_network_bytes(Random(num_peers=1), setting, rounds=2)
        9054.0
    """
    cost = predict_run_cost(method, setting, rounds) + method.cost(setting, "enroll")
    once = method.cost(setting, "evaluate")
    if not method.server:
        return cost.bytes + ENVELOPE * (cost.models + cost.messages)
    fetched = rounds + 1 if once.models else 0
    messages = (2 * rounds + 1) + 2 * (2 * rounds + fetched)
    return (
        cost.bytes
        + fetched * once.bytes
        # Lists of client ids have 8 bytes for each member.
        + 8 * setting.population * (2 * rounds + 1)
        + ENVELOPE * messages
    )


def count_traffic(
    metrics: pd.DataFrame, edges: pd.DataFrame, rounds: int
) -> tuple[Float[np.ndarray, " rounds"], Float[np.ndarray, " rounds"]]:
    """Count the bytes of all clients in each round: received, and sent to a server.

    Bytes sent to peers are counted once, as the bytes that the peers receive.

    Args:
        metrics: the metrics table of a run.
        edges: its edges table.
        rounds: how many rounds there are; a warm-up is not one of them.
    """

    def sum_by_round(table: pd.DataFrame, column: str) -> Float[np.ndarray, " rounds"]:
        # A warm-up has round -1, which bincount refuses.
        table = table.loc[(table["round"] >= 0).to_numpy()]
        values = np.bincount(
            table["round"].to_numpy(np.int64), table[column].to_numpy(float), minlength=rounds
        )
        # Of an empty table bincount makes whole numbers.
        return values.astype(float)

    def sum_metric(name: str) -> Float[np.ndarray, " rounds"]:
        return sum_by_round(metrics.loc[(metrics["metric"] == name).to_numpy()], "value")

    extra, down, up = map(sum_metric, (EXTRA_BYTES.name, BYTES_DOWN.name, BYTES_UP.name))
    return sum_by_round(edges, "bytes") + extra + down, up
