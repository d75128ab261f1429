"""The gain of each client over training alone, and its summary over clients and seeds."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from coterie.functional.paired import CONFIDENCE, correct_holm, mean_difference
from coterie.results.selection import select_compared_runs
from coterie.results.stored_runs import (
    StoredRun,
    UnreadableRun,
    can_compare,
    collect_metrics,
    compute_seed_overlap,
    load_runs,
    main_metric,
)


def compute_study_gains(study: str | Path) -> dict[str, Any]:
    """Compute what collaboration was worth to each client: the gain over training alone.

    The gain of a client is the final test value of its model minus that of the same client under
    the study's method of kind "local" with the same seed, with the opposite sign for a loss, so
    that above zero is always better.

    Args:
        study: the study's folder.

    Returns:
        `baseline` (the label, or None when the study has no such method: then there are no rows),
        `metric`, `confidence`, and a row for each other method: `label`, `seeds` (the number of
        compared seeds), and for each of `mean` (over clients), `worst_tenth` (mean over the tenth
        of the clients that gained least, rounded up to whole clients) and `lost` (share of clients
        with a gain below zero) the mean over the seeds with the ends of Student's interval,
        `<name>_low` and `<name>_high`; None with a single seed, or when all seeds gave the same.
        `mean_established` is whether the mean differs from 0, by Student's t test and with Holm's
        correction for the number of rows. The worst tenth has no such test: the worst of several
        clients that neither gain nor lose is below 0 by chance.

    Raises:
        DataError: when the folder holds no run.
    """
    runs, problems = load_runs([study])
    return compute_gains(runs, problems)


def compute_gains(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun] = ()
) -> dict[str, Any]:
    """Compute the gains of runs that were already loaded; see `compute_study_gains`."""
    done = select_compared_runs(runs, problems)
    metric = main_metric(runs)
    baseline = find_local_label(runs)
    # A difference of two losses is no gain.
    if not can_compare(runs, metric):
        baseline = None
    overlap = compute_seed_overlap(runs[0]) if runs else 0.0
    rows, tests = [], []
    for label, per_seed in compute_client_gains(done, baseline, metric).items():
        reduced = pd.DataFrame([_reduce_gains(own.to_numpy()) for own in per_seed.values()])
        row: dict[str, Any] = {"label": label, "seeds": len(reduced)}
        for name in reduced.columns:
            row |= mean_with_interval(name, reduced[name].to_numpy(), overlap)
        rows.append(row)
        # Only the mean is tested: see the docstring of `compute_study_gains`.
        tests.append(float(mean_difference(reduced["mean"].to_numpy(), overlap=overlap).p))
    corrected = correct_holm(np.array(tests)) if tests else ()
    for row, p in zip(rows, corrected, strict=True):
        row["mean_established"] = bool(p <= 1 - CONFIDENCE)
    return {"baseline": baseline, "metric": metric, "confidence": CONFIDENCE, "rows": rows}


def find_local_label(runs: Iterable[StoredRun]) -> str | None:
    """Return the label of Local, against which gains are measured; None without a run of it."""
    return next((run.label for run in runs if run.method_kind == "local"), None)


def compute_client_gains(
    runs: Sequence[StoredRun], baseline: str | None, metric: str
) -> dict[str, dict[int, pd.Series]]:
    """Return the gain of each client over the baseline, by label and common seed.

    A client whose test samples leave the metric undefined is left out, as in all means; the gain of
    one whose model diverged is NaN.
    """
    # A metric without a direction keeps its sign.
    sign = collect_metrics(runs)[metric].sign or 1
    # Methods with losses of their own may lack each other's metrics.
    runs = [run for run in runs if metric in run.result_metrics]
    alone = {run.seed: run.defined_values(metric) for run in runs if run.label == baseline}
    found: dict[str, dict[int, pd.Series]] = {}
    for run in runs:
        if run.label != baseline and run.seed in alone:
            found.setdefault(run.label, {})[run.seed] = sign * (
                run.defined_values(metric) - alone[run.seed]
            )
    return found


def _reduce_gains(values: np.ndarray) -> dict[str, float]:
    # Sorting would put a diverged client last, as one of the clients with the largest gains.
    if not np.isfinite(values).all():
        return dict.fromkeys(("mean", "worst_tenth", "lost"), math.nan)
    # Rounded up, so that there is at least one client.
    tenth = np.sort(values)[: math.ceil(len(values) / 10)]
    lost = float((values < 0).mean())
    return {"mean": float(values.mean()), "worst_tenth": float(tenth.mean()), "lost": lost}


def mean_with_interval(
    name: str, values: np.ndarray, overlap: float = 0.0
) -> dict[str, float | None]:
    """Return the mean over seeds, with the ends of Student's interval.

    The ends are None for one seed, or when all seeds gave the same.
    """
    found = mean_difference(values, overlap=overlap)
    out: dict[str, float | None] = {name: float(found.mean)}
    for key, end in ((f"{name}_low", found.low), (f"{name}_high", found.high)):
        out[key] = None if np.isnan(end) else float(end)
    return out
