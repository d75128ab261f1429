"""What a study's rounds come down to: total participation, time to accuracy, and why a number is not defined.

Pure functions of stored runs; `summary` puts what they return into summary.json.
"""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from coterie.functional import metrics

if TYPE_CHECKING:
    from coterie.results.summary import StoredRun

BASES = {"sosicfl-plus": "ditto"}
"""The kind of method whose best accuracy others are timed against; FedAvg where a kind is not named."""
TIMED = ("accuracy", "global_accuracy")


def client_rounds(table: pd.DataFrame) -> int:
    """Return the total participation: how many local trainings there were in all rounds, over all clients.

    Args:
        table: the metrics table of a run.
    """
    trained = (table["split"] == "train") & (table["metric"] == "loss") & (table["round"] >= 0)
    return int(trained.to_numpy().sum())


def curve(table: pd.DataFrame, metric: str) -> tuple[list[int], list[float]]:
    """Return the evaluated rounds, and the mean over clients of a test metric of the newest models in each.

    Args:
        table: the metrics table of a run.
        metric: such as "accuracy".
    """
    wanted = (table["split"] == "test") & (table["model"] == "current") & (table["metric"] == metric)
    means = table.loc[wanted.to_numpy()].groupby("round")["value"].mean()
    return [int(index) for index in means.index], [float(value) for value in means.to_numpy()]


def participation(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return the total participation of each run: `label`, `seed`, `client_rounds`."""
    return [{"label": run.label, "seed": run.seed, "client_rounds": client_rounds(run.metrics)} for run in runs]


def time_to_accuracy(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    r"""Return how much sooner each method reaches the largest accuracy of a baseline than the baseline did.

    The baseline of SosicFL+ is Ditto, that of all others FedAvg; both need evaluations over the rounds (`eval_every`).

    Args:
        runs: finished runs of one study.

    Returns:
        A row for each method and metric ("accuracy" over the clients' own test sets, "global_accuracy"): `label`,
        `base`, `metric`, `ratio` (the baseline's time over the method's, mean over seeds; 0 in a seed in which the
        method never gets there), `std`, `seeds`, `reached` (in how many of them it got there), `tta` (the method's
        first round with that accuracy, mean over the seeds in which it got there) and `reason` (why the ratio is NaN).
    """
    bases: dict[tuple[str, int], StoredRun] = {(run.kind, run.seed): run for run in runs}
    found: dict[tuple[str, str, str], list[tuple[float, float, str]]] = {}
    for run in runs:
        base = bases.get((BASES.get(run.kind, "fedavg"), run.seed))
        for metric in TIMED if base is not None and base.label != run.label else ():
            own, theirs = curve(run.metrics, metric), curve(base.metrics, metric)  # type: ignore[union-attr]
            if own[0] and theirs[0]:
                entry = _ratio(own, theirs)
                found.setdefault((run.label, base.label, metric), []).append(entry)  # type: ignore[union-attr]
    rows = []
    for (label, name, metric), entries in found.items():
        ratios = np.array([ratio for ratio, _, _ in entries])
        times = [time for _, time, _ in entries if math.isfinite(time)]
        row = {
            "label": label,
            "base": name,
            "metric": metric,
            "ratio": float(ratios.mean()),
            "std": float(ratios.std()),
        }
        more = {"seeds": len(entries), "reached": len(times), "tta": float(np.mean(times)) if times else math.inf}
        rows.append({**row, **more, "reason": next((reason for _, _, reason in entries if reason), "")})
    return rows


def _ratio(own: tuple[list[int], list[float]], base: tuple[list[int], list[float]]) -> tuple[float, float, str]:
    """The ratio of one seed, the method's time, and why there is no ratio."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", metrics.Undefined)
        ratio = metrics.tta_ratio(*own, *base)
        time = metrics.time_to_accuracy(*own, metrics.acc_max(base[1]))
    return ratio, time, str(said[0].message) if said and math.isnan(ratio) else ""


def undefined(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return why final metrics are NaN: `label`, `metric` and `reason`, each once."""
    rows = []
    for run in runs:
        for metric, reason in (run.provenance.get("undefined") or {}).items():
            row = {"label": run.label, "metric": metric, "reason": reason}
            if row not in rows:
                rows.append(row)
    return rows
