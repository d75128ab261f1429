"""The gain of each client over training alone, and its summary over clients and seeds."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from coterie.functional.paired import CONFIDENCE, correct_holm, mean_difference
from coterie.results.selection import select_compared_runs
from coterie.results.stored_runs import (
    StoredRun,
    UnreadableRun,
    collect_metrics,
    compute_seed_overlap,
    load_runs,
    main_metric,
)


def compute_study_gains(study: str | Path) -> dict[str, Any]:
    """What collaboration was worth to each client: the gain over training alone.

    The gain of a client is the final test value of its model minus that of the same client under
    the study's method of kind "local" with the same seed, turned round for a loss, so that above
    zero is always better.

    Args:
        study: the study's folder.

    Returns:
        `baseline` (the label, or None when the study has no such method: then there are no rows),
        `metric`, `confidence`, and a row for each other method: `label`, `seeds` (the number of
        those that are `select_compared_runs`), and for each of `mean` (over clients), `worst_tenth` (mean over
        the tenth of the clients that gained least, rounded up to whole clients) and `lost` (share
        of clients with a gain below zero) the mean over the seeds with the ends of Student's
        interval, `<name>_low` and `<name>_high`; None with a single seed, or where all seeds gave
        the same. `mean_established` says whether the mean differs from 0, by Student's t test and
        with Holm's correction for the number of rows. Nothing like it is said of the worst tenth:
        the worst of several clients that neither gain nor lose is below 0.

    Raises:
        DataError: when the folder holds no run.
    """
    runs, problems = load_runs([study])
    return compute_gains(runs, problems)


def compute_gains(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun] = ()
) -> dict[str, Any]:
    """As `compute_study_gains`, of runs that were read already, and of the folders that could not be read."""
    done = select_compared_runs(runs, problems)
    metric = main_metric(runs)
    baseline = next((run.label for run in runs if run.method_kind == "local"), None)
    out: dict[str, Any] = {
        "baseline": baseline,
        "metric": metric,
        "confidence": CONFIDENCE,
        "rows": [],
    }
    tests: list[float] = []
    overlap = compute_seed_overlap(runs[0]) if runs else 0.0
    for label, per_seed in compute_client_gains(done, baseline, metric).items():
        reduced = [_reduce_gains(own.to_numpy()) for own in per_seed.values()]
        row: dict[str, Any] = {"label": label, "seeds": len(reduced)}
        for name in ("mean", "worst_tenth", "lost"):
            row |= mean_with_interval(name, np.array([one[name] for one in reduced]), overlap)
        tests.append(
            float(mean_difference(np.array([one["mean"] for one in reduced]), overlap=overlap).p)
        )
        out["rows"].append(row)
    for row, p in zip(out["rows"], correct_holm(np.array(tests)) if tests else (), strict=True):
        row["mean_established"] = bool(p <= 1 - CONFIDENCE)
    return out


def compute_client_gains(
    runs: Sequence[StoredRun], baseline: str | None, metric: str
) -> dict[str, dict[int, pd.Series]]:
    """The gain of each client over the baseline, by label and seed; only seeds that both have."""
    sign = collect_metrics(runs)[metric].sign or 1
    alone = {run.seed: run.final_values(metric) for run in runs if run.label == baseline}
    found: dict[str, dict[int, pd.Series]] = {}
    for run in runs:
        if run.label != baseline and run.seed in alone:
            found.setdefault(run.label, {})[run.seed] = sign * (
                run.final_values(metric) - alone[run.seed]
            )
    return found


def _reduce_gains(values: np.ndarray) -> dict[str, float]:
    tenth = np.sort(values)[: math.ceil(len(values) / 10)]
    return {
        "mean": float(values.mean()),
        "worst_tenth": float(tenth.mean()),
        "lost": float((values < 0).mean()),
    }


def mean_with_interval(
    name: str, values: np.ndarray, overlap: float = 0.0
) -> dict[str, float | None]:
    """Mean over seeds, with the ends of Student's interval; None for one seed, or where all gave the same."""
    found = mean_difference(values, overlap=overlap)
    ends = (None if np.isnan(end) else float(end) for end in (found.low, found.high))
    return dict(zip((name, f"{name}_low", f"{name}_high"), (float(found.mean), *ends), strict=True))
