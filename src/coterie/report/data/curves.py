"""Learning curves of the population and of each client, and each client's final values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from coterie.functional.metrics import LOSS
from coterie.report.data.packing import over_seeds, pack, sampled, thin, together
from coterie.results.summary import StoredRun, client_gains, compared

MOST_POINTS = 300  # rounds of a curve over clients
CLIENT_POINTS = 80  # rounds of the curve of one client


def curves(
    groups: dict[str, list[StoredRun]], cluster: np.ndarray, ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Learning curves: the mean over clients, over clusters and per cluster; mean and deviation over seeds.

    Returns:
        One entry per method, split and metric, with arrays of (2 + clusters) x rounds.
    """
    out = []
    members = [np.flatnonzero(cluster == c) for c in ids]
    for place, runs in enumerate(groups.values()):
        for split, metric in _recorded(runs):
            rounds, tables = together(runs, split, metric)
            if len(rounds) < 2:
                continue
            stacked = np.full((len(tables), 2 + len(members), len(rounds)), np.nan)
            for seed, values in enumerate(tables):
                per_cluster = [_mean(values[:, rows]) for rows in members]
                stacked[seed, 0] = _mean(values)
                for line, mean in enumerate(per_cluster):
                    stacked[seed, 2 + line] = mean
                if per_cluster:
                    stacked[seed, 1] = np.mean(per_cluster, axis=0)
            shown = thin(len(rounds), MOST_POINTS)
            whole = stacked[:, :, shown]
            mean, spread = over_seeds(whole)
            out.append(
                {
                    "method": place, "split": split, "metric": metric, "rounds": rounds[shown].tolist(),
                    "mean": pack(mean, "q16"), "std": pack(spread, "q16"), "seeds": len(tables),
                }
            )  # fmt: skip
    return out


def _recorded(runs: Sequence[StoredRun]) -> list[tuple[str, str]]:
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
    found = [pair for pair in found if runs[0].known[pair[1]].shown not in ("cost", "not")]
    return sorted(
        found,
        key=lambda pair: (("validation", "train", "test").index(pair[0]), pair[1] == LOSS.name),
    )


def _mean(values: Float[np.ndarray, "rounds clients"]) -> Float[np.ndarray, " rounds"]:
    """Mean over the clients that have a value; NaN where none has."""
    known = np.isfinite(values)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, values, 0).sum(1) / np.maximum(count, 1), np.nan)


def clients(
    groups: dict[str, list[StoredRun]], metric: str, cluster: Int[np.ndarray, " population"]
) -> dict[str, Any]:
    """Final test value, gain and learning curve of each client, as means over the seeds that are compared.

    Returns:
        `shown`, the ids of the clients that the arrays are of, a sample of a large population; None
        for all. `means`, each method's means of the final value and of the gain, are over all
        clients.
    """
    population, chosen = len(cluster), sampled(cluster)
    done = compared([run for runs in groups.values() for run in runs])
    baseline = next(
        (run.label for runs in groups.values() for run in runs if run.kind == "local"), None
    )
    final, gain = np.full((2, len(groups), population), np.nan)
    own_gains = client_gains(done, baseline, metric)
    lines = []
    for place, (label, runs) in enumerate(groups.items()):
        values = [run.final(metric) for run in done if run.label == label]
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
        lines += _client_curves(place, runs, metric, chosen)
    return {
        "shown": chosen.tolist() if len(chosen) < population else None,
        "means": {
            name: _mean(values).tolist() for name, values in (("final", final), ("gain", gain))
        },
        "baseline": baseline,
        "final": pack(final[:, chosen], "f32"),
        "gain": pack(gain[:, chosen], "f32"),
        "curves": lines,
    }


def _client_curves(
    place: int, runs: Sequence[StoredRun], metric: str, chosen: np.ndarray
) -> list[dict[str, Any]]:
    rounds, tables = together(runs, "validation", metric)
    if len(rounds) < 2:
        return []
    shown = thin(len(rounds), CLIENT_POINTS)
    mean, _ = over_seeds(np.array([values[shown] for values in tables]))
    values = mean if len(chosen) == chosen[-1] + 1 else mean[:, chosen]
    return [{"method": place, "rounds": rounds[shown].tolist(), "values": pack(values, "q16")}]


def mean_curve(runs: Sequence[StoredRun], split: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The rounds, and the mean of a metric over clients and seeds; both empty when it was not recorded."""
    rounds, tables = together(runs, split, metric)
    return rounds, over_seeds(
        np.array([_mean(values) for values in tables]).reshape(len(tables), len(rounds))
    )[0]
