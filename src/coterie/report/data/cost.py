"""The cost of a method: bytes, reads and forward passes, and the metric reached."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from coterie._util.mappings import select_keys
from coterie.functional.metrics import COSTS
from coterie.report.data.curves import compute_mean_curve, mean_used
from coterie.report.data.packing import thin_indices
from coterie.results.stored_runs import StoredRun
from coterie.results.traffic import count_traffic

MOST_POINTS = 150  # rounds of a curve
COUNTED_METRICS = [one.name for one in COSTS if one.unit != "B"]


def compute_costs(groups: dict[str, list[StoredRun]], metric: str) -> list[dict[str, Any]]:
    """Compute the cost per client of each method, mean over clients and seeds.

    Args:
        groups: the runs of each method.
        metric: the metric on the validation sets.

    Returns:
        An entry per method: totals of `received` bytes, `sent` (to a server), `bytes` (both),
        `reads`, `missing`, what the method counted itself (`counted`, by name; None when it did
        not), `train_samples` and `wall_s` of the whole run, the number of `seeds`, and over
        `rounds` the cumulative bytes `spent`, the `seconds` (None without times) and the metric
        `reached`.
    """
    costs = []
    for place, runs in enumerate(groups.values()):
        if runs:
            costs.append({"method": place, **_compute_method_cost(runs, metric)})
    return costs


def _compute_method_cost(runs: Sequence[StoredRun], metric: str) -> dict[str, Any]:
    rounds, reached = compute_mean_curve(runs, metric)
    shown = thin_indices(len(rounds), MOST_POINTS) if len(rounds) else np.zeros(0, dtype=np.int64)
    spent = mean_used(runs, rounds[shown], "bytes")
    assert spent is not None  # of every run, unlike times
    per_run = pd.DataFrame(list(map(_compute_run_cost, runs)))
    means = {name: float(np.mean(per_run[name].to_numpy())) for name in per_run.columns}
    return {
        "seeds": len(runs),
        "bytes": means["received"] + means["sent"],
        **select_keys(means, ("received", "sent", "reads", "missing")),
        "counted": {name: _mean_counted_total(runs, name) for name in COUNTED_METRICS},
        "train_samples": means["train_samples"],
        "wall_s": means["wall_s"],
        "rounds": rounds[shown].tolist(),
        "spent": spent,
        "seconds": mean_used(runs, rounds[shown], "seconds"),
        "reached": reached[shown].tolist(),
    }


def _compute_run_cost(run: StoredRun) -> dict[str, float]:
    """Compute the cost of one run: of its clients together the duration, the rest per client."""
    clients, edges = run.num_counted, run.counted_edges
    received, sent = count_traffic(run.metrics, edges, run.num_rounds)
    missing = int(np.count_nonzero(edges["purpose"] == "missing"))
    timing = run.provenance.get("timing") or {}
    trained = timing.get("train_samples", np.nan)
    # The samples are those of all clients together, with those of attackers, which do not count.
    if run.config.get("attacks") or run.method_settings.get("attacks"):
        trained = np.nan
    return {
        "received": received.sum() / clients,
        "sent": sent.sum() / clients,
        "reads": (len(edges) - missing) / clients,
        "missing": missing / clients,
        # NaN too for runs of older versions, which did not record it.
        "train_samples": trained / clients,
        "wall_s": timing.get("wall_s", np.nan),
    }


def _mean_counted_total(runs: Sequence[StoredRun], name: str) -> float | None:
    """Return the total per client of a count that the method reports; None without one."""
    totals = []
    for run in runs:
        rows = run.metrics.loc[(run.metrics["metric"] == name).to_numpy(), "value"]
        # None instead of 0: this method does not report the count.
        if not len(rows):
            return None
        totals.append(float(rows.sum()) / run.num_counted)
    return float(np.mean(totals))
