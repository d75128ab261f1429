"""The cost of a method: bytes, reads and forward passes over rounds, and the metric reached at that cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.functional.metrics import COSTS
from coterie.report.data.curves import compute_mean_curve
from coterie.report.data.packing import thin_indices
from coterie.results.equal_bytes import compute_bytes_per_client
from coterie.results.stored_runs import StoredRun
from coterie.results.traffic import count_traffic

MOST_POINTS = 150  # rounds of a curve
COUNTED_METRICS = [one.name for one in COSTS if one.unit != "B"]


def compute_costs(groups: dict[str, list[StoredRun]], metric: str) -> list[dict[str, Any]]:
    """Cost per client, mean over clients and seeds.

    Args:
        groups: the runs of each method.
        metric: the metric on the validation sets.

    Returns:
        An entry per method: totals of `received` bytes, `sent` (to a server), `bytes` (both),
        `reads`, `missing`, what the method counted itself (`counted`, by name; None where it did
        not), `train_samples` and `wall_s` of the whole run, the number of `seeds`, and over
        `rounds` the cumulative bytes `spent` and the metric `reached`.
    """
    return [
        {"method": place, **_compute_method_cost(runs, metric)}
        for place, runs in enumerate(groups.values())
        if runs
    ]


def _compute_method_cost(runs: Sequence[StoredRun], metric: str) -> dict[str, Any]:
    rounds, reached = compute_mean_curve(runs, "validation", metric)
    shown = thin_indices(len(rounds), MOST_POINTS) if len(rounds) else np.zeros(0, dtype=np.int64)
    spent = np.mean([_cumulative_bytes(run, rounds) for run in runs], axis=0)
    clients = np.array([len(run.client_clusters) for run in runs])
    whole = [count_traffic(run.metrics, run.edges, run.num_rounds) for run in runs]
    received, sent = (
        np.mean([one.sum() / size for one, size in zip(part, clients, strict=True)])
        for part in zip(*whole, strict=True)
    )
    missing = np.array([(run.edges["purpose"] == "missing").sum() for run in runs])
    times = [run.provenance.get("timing") or {} for run in runs]
    return {
        "seeds": len(runs),
        "bytes": float(received + sent),
        "received": float(received),
        "sent": float(sent),
        "reads": float(np.mean(([len(run.edges) for run in runs] - missing) / clients)),
        "missing": float(np.mean(missing / clients)),
        "counted": {name: _mean_counted_total(runs, name) for name in COUNTED_METRICS},
        "train_samples": float(
            np.mean([time.get("train_samples", np.nan) for time in times] / clients)
        ),
        "wall_s": float(np.mean([time.get("wall_s", np.nan) for time in times])),
        "rounds": rounds[shown].tolist(),
        "spent": spent[shown].tolist(),
        "reached": reached[shown].tolist(),
    }


def _cumulative_bytes(run: StoredRun, rounds: np.ndarray) -> np.ndarray:
    """Bytes per client up to and with each round; those of the whole run where it has ended before."""
    totals = np.concatenate([[0.0], compute_bytes_per_client(run)])
    return totals[np.minimum(rounds + 1, len(totals) - 1)]


def _mean_counted_total(runs: Sequence[StoredRun], name: str) -> float | None:
    """Total per client of something that the method counted itself; None when it did not."""
    totals = []
    for run in runs:
        rows = run.metrics.loc[(run.metrics["metric"] == name).to_numpy(), "value"]
        if not len(rows):
            return None
        totals.append(float(rows.sum()) / len(run.client_clusters))
    return float(np.mean(totals))
