"""Learning curves of the population and of each client, and each client's final values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from coterie.functional.metrics import LOSS
from coterie.report.data.packing import (
    align_seeds,
    nan_mean_std,
    pack_array,
    sample_clients,
    thin_indices,
)
from coterie.results.gains import compute_client_gains
from coterie.results.selection import select_compared_runs
from coterie.results.stored_runs import StoredRun

MOST_POINTS = 300  # rounds of a curve over clients
CLIENT_POINTS = 80  # rounds of the curve of one client


def build_curves(
    groups: dict[str, list[StoredRun]], cluster: np.ndarray, ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Learning curves: the mean over clients, over clusters and per cluster; mean and deviation over seeds.

    Returns:
        One entry per method, split and metric, with arrays of (2 + clusters) x rounds.
    """
    out = []
    members = [np.flatnonzero(cluster == c) for c in ids]
    for place, runs in enumerate(groups.values()):
        for split, metric in _find_recorded_metrics(runs):
            rounds, tables = align_seeds(runs, split, metric)
            if len(rounds) < 2:
                continue
            stacked = np.full((len(tables), 2 + len(members), len(rounds)), np.nan)
            for seed, values in enumerate(tables):
                per_cluster = [_mean_over_clients(values[:, rows]) for rows in members]
                stacked[seed, 0] = _mean_over_clients(values)
                for line, mean in enumerate(per_cluster):
                    stacked[seed, 2 + line] = mean
                if per_cluster:
                    stacked[seed, 1] = np.mean(per_cluster, axis=0)
            shown = thin_indices(len(rounds), MOST_POINTS)
            whole = stacked[:, :, shown]
            mean, spread = nan_mean_std(whole)
            out.append(
                {
                    "method": place, "split": split, "metric": metric, "rounds": rounds[shown].tolist(),
                    "mean": pack_array(mean, "q16"), "std": pack_array(spread, "q16"), "seeds": len(tables),
                }
            )  # fmt: skip
    return out


def _find_recorded_metrics(runs: Sequence[StoredRun]) -> list[tuple[str, str]]:
    """The (split, metric) pairs that were recorded round by round."""
    if not runs:
        return []
    table = runs[0].metrics
    names = table.loc[
        (table["model"] == "current").to_numpy(), ["split", "metric"]
    ].drop_duplicates()
    found = [
        (str(split), str(metric))
        for split, metric in zip(names["split"], names["metric"], strict=True)
    ]
    found = [pair for pair in found if runs[0].known_metrics[pair[1]].shown not in ("cost", "not")]
    return sorted(
        found,
        key=lambda pair: (("validation", "train", "test").index(pair[0]), pair[1] == LOSS.name),
    )


def _mean_over_clients(values: Float[np.ndarray, "rounds clients"]) -> Float[np.ndarray, " rounds"]:
    """Mean over the clients that have a value; NaN where none has."""
    known = np.isfinite(values)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, values, 0).sum(1) / np.maximum(count, 1), np.nan)


def build_client_data(
    groups: dict[str, list[StoredRun]], metric: str, cluster: Int[np.ndarray, " population"]
) -> dict[str, Any]:
    """Final test value, gain and learning curve of each client, as means over the seeds that are compared.

    Returns:
        `shown`, the ids of the clients that the arrays are of, a sample of a large population; None
        for all. `means`, each method's means of the final value and of the gain, are over all
        clients.
    """
    population, chosen = len(cluster), sample_clients(cluster)
    done = select_compared_runs([run for runs in groups.values() for run in runs])
    baseline = next(
        (run.label for runs in groups.values() for run in runs if run.method_kind == "local"), None
    )
    final, gain = np.full((2, len(groups), population), np.nan)
    own_gains = compute_client_gains(done, baseline, metric)
    lines = []
    for place, (label, runs) in enumerate(groups.items()):
        values = [run.final_values(metric) for run in done if run.label == label]
        if values:
            final[place] = np.mean(
                [series.reindex(range(population)).to_numpy(float) for series in values], axis=0
            )
        if own_gains.get(label):
            over = [
                series.reindex(range(population)).to_numpy(float)
                for series in own_gains[label].values()
            ]
            gain[place] = np.mean(over, axis=0)
        lines += _build_client_curves(place, runs, metric, chosen)
    return {
        "shown": chosen.tolist() if len(chosen) < population else None,
        "means": {
            name: _mean_over_clients(values).tolist()
            for name, values in (("final", final), ("gain", gain))
        },
        "baseline": baseline,
        "final": pack_array(final[:, chosen], "f32"),
        "gain": pack_array(gain[:, chosen], "f32"),
        "curves": lines,
    }


def _build_client_curves(
    place: int, runs: Sequence[StoredRun], metric: str, chosen: np.ndarray
) -> list[dict[str, Any]]:
    rounds, tables = align_seeds(runs, "validation", metric)
    if len(rounds) < 2:
        return []
    shown = thin_indices(len(rounds), CLIENT_POINTS)
    mean, _ = nan_mean_std(np.array([values[shown] for values in tables]))
    values = mean if len(chosen) == chosen[-1] + 1 else mean[:, chosen]
    return [
        {"method": place, "rounds": rounds[shown].tolist(), "values": pack_array(values, "q16")}
    ]


def compute_mean_curve(
    runs: Sequence[StoredRun], split: str, metric: str
) -> tuple[np.ndarray, np.ndarray]:
    """The rounds, and the mean of a metric over clients and seeds; both empty when it was not recorded."""
    rounds, tables = align_seeds(runs, split, metric)
    return rounds, nan_mean_std(
        np.array([_mean_over_clients(values) for values in tables]).reshape(
            len(tables), len(rounds)
        )
    )[0]
