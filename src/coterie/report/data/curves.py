"""Learning curves of the population and of each client, and each client's final values."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from coterie.functional.metrics import LOSS
from coterie.report.data.packing import (
    align_seeds,
    mean_over_clients,
    nan_mean_std,
    pack_array,
    pad_clients,
    sample_clients,
    thin_indices,
)
from coterie.results.equal_budget import Unit, count_used
from coterie.results.gains import compute_client_gains, find_local_label
from coterie.results.planted import MOST_CLUSTERS
from coterie.results.selection import select_compared_runs
from coterie.results.stored_runs import StoredRun

MOST_POINTS = 300  # rounds of a curve over clients
CLIENT_POINTS = 80  # rounds of the curve of one client


def build_curves(
    groups: dict[str, list[StoredRun]], cluster: np.ndarray, ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Build learning curves: the mean over clients, over clusters and per cluster, with deviations.

    Returns:
        One entry per method, split and metric, with mean and deviation over seeds as arrays of
        (2 + clusters) x rounds (of more than `MOST_CLUSTERS` clusters, 2 x rounds), and the `seconds` of the rounds where runs have times.
    """
    out = []
    members = [np.flatnonzero(cluster == c) for c in ids]
    for place, runs in enumerate(groups.values()):
        for split, metric in _find_recorded_metrics(runs):
            rounds, tables = align_seeds(runs, split, metric)
            # A curve needs two points.
            if len(rounds) < 2:
                continue
            # [seeds, lines, rounds]; line 0 is over clients, 1 over clusters, then one for each
            # cluster.
            stacked = np.full((len(tables), 2 + len(members), len(rounds)), np.nan)
            for seed, values in enumerate(tables):
                stacked[seed, 0] = mean_over_clients(values)
                for line, rows in enumerate(members, start=2):
                    stacked[seed, line] = mean_over_clients(values[:, rows])
                if members:
                    stacked[seed, 1] = np.mean(stacked[seed, 2:], axis=0)
            if len(members) > MOST_CLUSTERS:
                stacked = stacked[:, :2]
            shown = thin_indices(len(rounds), MOST_POINTS)
            mean, spread = nan_mean_std(stacked[:, :, shown])
            out.append(
                {
                    "method": place,
                    "split": split,
                    "metric": metric,
                    "rounds": rounds[shown].tolist(),
                    "seconds": mean_used(runs, rounds[shown], "seconds"),
                    "mean": pack_array(mean, "q16"),
                    "std": pack_array(spread, "q16"),
                    "seeds": len(tables),
                }
            )
    return out


def mean_used(
    runs: Sequence[StoredRun], rounds: Int[np.ndarray, " rounds"], unit: Unit
) -> list[float] | None:
    """Return what a client has used up to some rounds, mean over runs; None for unknown seconds.

    Args:
        runs: of one method.
        rounds: ascending; after a run's end it has used its total.
        unit: bytes or seconds.
    """
    if unit == "seconds" and any(run.elapsed_seconds is None for run in runs):
        return None
    found = []
    for run in runs:
        # Entry r + 1 is the total after round r; entry 0 is the warm-up, round -1, with nothing.
        totals = np.concatenate([[0.0], count_used(run, unit)])
        found.append(totals[np.minimum(rounds + 1, len(totals) - 1)])
    return np.mean(found, axis=0).tolist()


def _find_recorded_metrics(runs: Sequence[StoredRun]) -> list[tuple[str, str]]:
    """Find the (split, metric) pairs that were recorded round by round."""
    if not runs:
        return []
    table = runs[0].metrics
    current = (table["model"] == "current").to_numpy()
    names = table.loc[current, ["split", "metric"]].drop_duplicates()
    found = []
    splits = ("validation", "train", "test")
    for split, metric in zip(names["split"], names["metric"], strict=True):
        # Newcomers are tested once, in a split of their own: that is no curve.
        if split in splits and runs[0].known_metrics[metric].shown not in ("cost", "not"):
            found.append((str(split), str(metric)))
    # The loss comes last of each split.
    return sorted(found, key=lambda pair: (splits.index(pair[0]), pair[1] == LOSS.name))


def build_client_data(
    groups: dict[str, list[StoredRun]], metric: str, cluster: Int[np.ndarray, " population"]
) -> dict[str, Any]:
    """Build the final value, gain and curve of each client, means over compared seeds.

    Returns:
        `shown`, the ids of the clients in the arrays, a sample of a large population; None for all.
        `means`, each method's means of the final value and of the gain, are over all clients.
    """
    population, chosen = len(cluster), sample_clients(cluster)
    runs = list(chain.from_iterable(groups.values()))
    # Final values are of the compared seeds alone, curves of all runs.
    done = select_compared_runs(runs)
    baseline = find_local_label(runs)
    gains = compute_client_gains(done, baseline, metric)
    final, gain = np.full((2, len(groups), population), np.nan)
    lines = []
    for place, (label, group) in enumerate(groups.items()):
        values = []
        for run in done:
            if run.label == label:
                values.append(run.defined_values(metric))
        if values:
            final[place] = _mean_over_series(values, population)
        if gains.get(label):
            gain[place] = _mean_over_series(gains[label].values(), population)
        lines += _build_client_curves(place, group, metric, chosen, population)
    means = {}
    for name, shown in (("final", final), ("gain", gain)):
        means[name] = _replace_infinite(mean_over_clients(shown)).tolist()
    final, gain = _replace_infinite(final), _replace_infinite(gain)
    return {
        "shown": chosen.tolist() if len(chosen) < population else None,
        "means": means,
        "baseline": baseline,
        "final": pack_array(final[:, chosen], "f32"),
        "gain": pack_array(gain[:, chosen], "f32"),
        "curves": lines,
    }


def _mean_over_series(
    series: Iterable[pd.Series], population: int
) -> Float[np.ndarray, " population"]:
    """Return the mean over seeds of each client.

    It is NaN for a client that one seed lacks, and infinite for one whose model diverged: in the
    series, that is one with NaN.
    """
    values = []
    for one in series:
        values.append(one.fillna(np.inf).reindex(range(population)).to_numpy(float))
    return np.mean(values, axis=0)


def _replace_infinite(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    return np.where(np.isinf(values), np.nan, values)


def _build_client_curves(
    place: int, runs: Sequence[StoredRun], metric: str, chosen: np.ndarray, population: int
) -> list[dict[str, Any]]:
    rounds, tables = align_seeds(runs, "validation", metric)
    if len(rounds) < 2:
        return []
    shown = thin_indices(len(rounds), CLIENT_POINTS)
    mean, _ = nan_mean_std(np.array([values[shown] for values in tables]))
    # The page has a place for each client that any seed has.
    mean = pad_clients(mean, population)
    values = pack_array(mean[:, chosen], "q16")
    return [{"method": place, "rounds": rounds[shown].tolist(), "values": values}]


def compute_mean_curve(runs: Sequence[StoredRun], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds and the mean of a validation metric; both empty without records of it."""
    rounds, tables = align_seeds(runs, "validation", metric)
    means = np.zeros((len(tables), len(rounds)))
    for seed, values in enumerate(tables):
        means[seed] = mean_over_clients(values)
    return rounds, nan_mean_std(means)[0]
