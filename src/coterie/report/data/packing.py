"""Arrays as text, thinned, and averaged over seeds."""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Num

from coterie.functional.metrics import DIVERGED, LOSS
from coterie.results.stored_runs import StoredRun
from coterie.runtime.final_metrics import find_diverged


def pack_array(values: Num[np.ndarray, "..."], kind: str) -> dict[str, Any]:
    """Encode an array as text.

    The kinds "u8", "u16" and "f32" store values as they are; "q16" puts floats on a grid of 65,535
    steps. NaN survives in "f32" and "q16". The text is base64 of zlib of little-endian values in C
    order.

    Example:
        >>> pack_array(np.array([[0, 1]]), "u8")["shape"]
        [1, 2]
    """
    out: dict[str, Any] = {"kind": kind, "shape": list(values.shape)}
    if kind == "q16":
        finite = np.isfinite(values)
        low = high = 0.0
        if finite.any():
            low, high = float(values[finite].min()), float(values[finite].max())
        # Steps 0 to 65,534 hold the values, 65,535 stands for NaN; 1.0 where all values are equal.
        step = (high - low) / 65534 or 1.0
        out |= {"low": low, "step": step}
        steps = np.round((np.where(finite, values, low) - low) / step)
        whole = np.where(finite, steps, 65535).astype("<u2")
    else:
        whole = values.astype({"u8": "u1", "u16": "<u2", "f32": "<f4"}[kind])
    out["text"] = base64.b64encode(zlib.compress(whole.tobytes(), 6)).decode()
    return out


def build_dense_table(
    run: StoredRun, split: str, metric: str
) -> tuple[Int[np.ndarray, " rounds"], Float[np.ndarray, "rounds clients"]]:
    """Build an array of rounds x clients of a metric; an inactive client keeps its last value.

    Returns:
        The rounds that have a value (-1 is the warm-up), and the values: NaN before a client's
        first one, infinite while its model has diverged. Both are empty when no round has a value:
        clients without validation data record NaN in each.
    """
    table = run.metrics
    of_models = (table["split"] == split) & (table["model"] == "current")
    chosen = of_models & (table["metric"] == metric)
    # The loss too: it shows which models diverged.
    shown = table["metric"].isin((metric, LOSS.name)) & of_models
    around = table.loc[(shown | (table["metric"] == DIVERGED.name)).to_numpy()]
    lost = around.loc[find_diverged(around) & (around["metric"] == metric).to_numpy()]
    rows = table.loc[chosen.to_numpy()]
    # `place` is the row of each value.
    rounds, place = np.unique(rows["round"].to_numpy(np.int64), return_inverse=True)
    values = np.full((len(rounds), int(run.client_clusters.index.to_numpy().max()) + 1), np.nan)
    values[place, rows["client"].to_numpy(np.int64)] = rows["value"].to_numpy(float)
    if np.isnan(values).all():
        rounds, values = rounds[:0], values[:0]
    else:
        # Before the values are carried on: a model that diverged must not keep its last one.
        at = np.searchsorted(rounds, lost["round"].to_numpy(np.int64))
        values[at, lost["client"].to_numpy(np.int64)] = np.inf
    # `ffill` runs down the rounds, client by client.
    return rounds, pd.DataFrame(values).ffill().to_numpy()


def mean_over_clients(values: Float[np.ndarray, "*shape clients"]) -> Float[np.ndarray, "*shape"]:
    """Return the mean over the clients that have a value.

    It is NaN when none has one, and infinite when a model diverged, as in `build_dense_table`.

    Example:
        >>> mean_over_clients(np.array([[1.0, 3.0], [np.nan, 3.0], [1.0, np.inf]])).tolist()
        [2.0, 3.0, inf]
    """
    known = np.isfinite(values)
    count = known.sum(-1)
    mean = np.where(known, values, 0).sum(-1) / np.maximum(count, 1)
    return np.where(np.isinf(values).any(-1), np.inf, np.where(count > 0, mean, np.nan))


def align_seeds(
    runs: Sequence[StoredRun], split: str, metric: str
) -> tuple[Int[np.ndarray, " rounds"], list[Float[np.ndarray, "rounds clients"]]]:
    """Build arrays of a metric over common rounds, each a mean over the same seeds.

    A finished run that ended early, because all its clients had stopped, keeps its last values.
    When a run is still going on, the rounds end with the last round that all runs have.

    Returns:
        The rounds, and the values of each run that recorded the metric.
    """
    tables, ends = [], []
    for run in runs:
        own, values = build_dense_table(run, split, metric)
        if len(own):
            tables.append((own, values))
            # A run that is not finished bounds the rounds: its last one is not its end.
            if not run.is_finished:
                ends.append(own[-1])
    if not tables:
        return np.zeros(0, dtype=np.int64), []
    rounds = np.unique(np.concatenate([own for own, _ in tables]))
    rounds = rounds[rounds <= min(ends, default=rounds[-1])]
    out = []
    for own, values in tables:
        # The last own round at or before each common one; -1 before the first.
        at = np.searchsorted(own, rounds, side="right") - 1
        out.append(np.where((at >= 0)[:, None], values[np.maximum(at, 0)], np.nan))
    return rounds, out


def pad_clients(
    values: Float[np.ndarray, "rounds clients"], population: int
) -> Float[np.ndarray, "rounds population"]:
    """Return an array with a column for each client of a population: NaN in those it lacks.

    Example:
        >>> pad_clients(np.array([[0.5]]), 2).tolist()
        [[0.5, nan]]
    """
    wider = np.full((len(values), population), np.nan)
    wider[:, : values.shape[1]] = values
    return wider


def thin_indices(count: int, most: int) -> Int[np.ndarray, " points"]:
    """Return at most `most` of `count` indices, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


MOST_CLIENTS = 2000
"""Clients of which a page shows each by itself; of a larger population, a sample."""


def sample_clients(
    cluster: Int[np.ndarray, " population"], most: int = MOST_CLIENTS
) -> Int[np.ndarray, " shown"]:
    """Return the clients that a page shows one by one: all, or a sample of each planted cluster.

    Example:
        >>> sample_clients(np.array([1, 0, 1, 0, 1]), 3).tolist()
        [0, 1, 4]
    """
    # By cluster, then by id: evenly spaced places sample each cluster in proportion.
    order = np.lexsort((np.arange(len(cluster)), cluster))
    return np.sort(order[thin_indices(len(cluster), most)])


def nan_mean_std(
    stacked: Float[np.ndarray, "*shape"],
) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """Return mean and population standard deviation over the first axis, without missing values.

    Infinite values, of models that diverged, leave both NaN. A single value has no deviation: it is
    NaN, as `summary.mean_std_over_seeds` has None.
    """
    # Without numpy's nanmean, which warns when all are missing.
    known = np.isfinite(stacked)
    count = np.maximum(known.sum(0), 1)
    mean = np.where(known, stacked, 0).sum(0) / count
    square = np.where(known, (stacked - mean) ** 2, 0).sum(0) / count
    number = np.where(np.isinf(stacked).any(0), 0, known.sum(0))
    return np.where(number > 0, mean, np.nan), np.where(number > 1, np.sqrt(square), np.nan)
