"""Methods ranked at equal bytes: when each of their clients has used the same number of bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from coterie.functional import metrics
from coterie.results import coverage, selection, stored_runs, summary
from coterie.results.stored_runs import StoredRun, UnreadableRun
from coterie.results.traffic import count_traffic

Split = Literal["test", "validation"]
Model = Literal["best", "current", "either"]


@dataclass(frozen=True)
class MethodAtBudget:
    """A method at the point where every method has used the same number of bytes.

    Args:
        label: the method.
        rounds: its rounds by then.
        used: bytes of a client, received and sent to a server, mean over clients and seeds.
        value: the metric then, mean over clients and seeds; NaN where nothing was measured by then.
        std: population standard deviation over seeds; None for a single seed.
        seeds: number of seeds.
    """

    label: str
    rounds: float
    used: float
    value: float
    std: float | None
    seeds: int


@dataclass(frozen=True)
class EqualBytes:
    """A ranking at equal bytes.

    Args:
        study: its name.
        metric: accuracy or loss.
        split: what the models are scored on: "test" where that was measured during the runs
            (`eval_every`), else "validation".
        model: on test data what the final evaluation takes: "best", each client's best model by
            validation loss, or "current", the newest (`evaluate = "final"`), or "either", where
            methods differ in that. On validation data "current", since there the score of a best
            model would be that by which it was chosen.
        budget: bytes per client: what was asked for, else the total of the communicating method
            that uses the fewest.
        rows: best first.
        seeds: the seeds that the means are over; see `summary.select_compared_runs`.
        left_out: how each run stands that is not among them.
    """

    study: str
    metric: str
    split: Split
    model: Model
    budget: float
    rows: Sequence[MethodAtBudget]
    seeds: Sequence[int]
    left_out: Sequence[dict[str, Any]]

    @property
    def heading(self) -> str:
        """What the values are, such as "test accuracy in % of each client's best model by validation"."""
        which = {
            "best": "each client's best model by validation",
            "current": "the newest models",
            "either": "the models of the final evaluation",
        }[self.model]
        return f"{metrics.REGISTRY[self.metric].heading(self.split)} of {which}"

    @property
    def caveat(self) -> str:
        """Why it is not on test data; empty where it is."""
        if self.split == "test":
            return ""
        return (
            "The rounds were not tested, so the newest models are scored, on validation data; these are not the "
            "numbers of the final test. With eval_every = 1 the best models are scored on test data."
        )

    def describe_coverage(self) -> list[str]:
        """Return what must be known beside it: which runs are not in it, and why it is not on test data."""
        content = {
            "rows": [asdict(row) for row in self.rows],
            "seeds": self.seeds,
            "left_out": self.left_out,
        }
        return [*coverage.describe_coverage(content), *([self.caveat] if self.caveat else [])]


def rank_at_equal_bytes(folder: str | Path, budget: float | None = None) -> EqualBytes:
    """Rank the methods of a stored study when each of their clients has used the same number of bytes.

    Bytes are those of all messages received and of those sent to a server (messages sent to peers
    are counted as received by them). With `eval_every` the model of a client is chosen as in the
    final evaluation, the best by validation loss, and scored on test data. A method that has not
    used more in its whole run has its final result; of another, the model is chosen among the
    rounds by then that were tested (a warm-up is not).

    Args:
        folder: of the study.
        budget: bytes of a client; by default the total of the communicating method that uses the
            fewest.

    Raises:
        DataError: when there is no run, or several studies.
    """
    runs, problems = stored_runs.load_runs([folder])
    return rank_runs(runs, problems, folder, budget)


def rank_runs(
    runs: Sequence[StoredRun],
    problems: Sequence[UnreadableRun],
    folder: str | Path,
    budget: float | None = None,
    whole: Mapping[str, Any] | None = None,
) -> EqualBytes:
    """As `rank_at_equal_bytes`, of runs that were read already, and of the folders that could not be read.

    Args:
        runs: those that could be read.
        problems: the other folders.
        folder: of the study.
        budget: bytes of a client.
        whole: the summary of these runs, where there is one already.
    """
    whole = whole or summary.summarize_runs(runs, folder, problems)
    chosen = selection.select_compared_runs(runs, problems)
    metric = stored_runs.main_metric(chosen)
    tested = bool(chosen) and all(_has_round_tests(run, metric) for run in chosen)
    best = {tested and _uses_best_models(run) for run in chosen}
    groups = stored_runs.group_by_label(chosen)
    spent = [
        np.mean([compute_bytes_per_client(run)[-1] for run in group]) for group in groups.values()
    ]
    if budget is None:
        budget = float(min((one for one in spent if one > 0), default=0.0))
    rows = []
    for label, group in groups.items():
        points = [_evaluate_at_budget(run, metric, budget, tested=tested) for run in group]
        rounds, used, values = (np.array(part) for part in zip(*points, strict=True))
        value, deviation = summary.mean_std_over_seeds(values.astype(float))
        rows.append(
            MethodAtBudget(
                label, float(rounds.mean()), float(used.mean()), value, deviation, len(group)
            )
        )
    sign = metrics.REGISTRY[metric].sign
    rows.sort(key=lambda row: (math.isnan(row.value), -sign * row.value))
    model: Model = "either" if len(best) > 1 else "best" if True in best else "current"
    split: Split = "test" if tested else "validation"
    return EqualBytes(
        whole["study"], metric, split, model, budget, rows, whole["seeds"], whole["left_out"]
    )


def compute_bytes_per_client(run: StoredRun) -> Float[np.ndarray, " rounds"]:
    """Return the bytes of a client after each round from the first: received, and sent to a server.

    They are means over clients, cumulated over rounds.
    """
    received, sent = count_traffic(run.metrics, run.edges, max(1, run.num_rounds))
    return np.cumsum(received + sent) / len(run.client_clusters)


def _pivot_metric(run: StoredRun, split: str, metric: str) -> pd.DataFrame:
    """A metric of the newest models as rounds x clients."""
    rows = run.metrics
    wanted = (rows["split"] == split) & (rows["model"] == "current") & (rows["metric"] == metric)
    return (
        rows.loc[wanted.to_numpy()]
        .pivot(index="round", columns="client", values="value")
        .sort_index()
    )


def _has_round_tests(run: StoredRun, metric: str) -> bool:
    """Whether rounds were tested on the way, not in the end alone."""
    return len(_pivot_metric(run, "test", metric)) > 1


def _uses_best_models(run: StoredRun) -> bool:
    """Whether the final evaluation of a run takes each client's best model by validation."""
    return bool((run.final_rows["model"] == "best").all())


def _evaluate_at_budget(
    run: StoredRun, metric: str, budget: float, *, tested: bool
) -> tuple[float, float, float]:
    """Return rounds, bytes and metric of a run at a budget; all of it where it stays below."""
    cumulated = compute_bytes_per_client(run)
    last = int(np.searchsorted(cumulated, budget * (1 + 1e-9), side="right")) - 1
    used = float(cumulated[last]) if last >= 0 else 0.0
    if tested and last + 1 >= run.num_rounds:
        return last + 1, used, float(run.final_values(metric).mean(skipna=False))
    loss = _pivot_metric(run, "validation", metrics.LOSS.name)
    values = (
        _pivot_metric(run, "test", metric) if tested else _pivot_metric(run, "validation", metric)
    )
    if not tested:  # clients without validation data have no value in any round
        values = values.loc[:, values.notna().any().to_numpy()]
    values = values.loc[(values.index <= last)]
    if not values.size:
        return last + 1, used, math.nan
    place = np.full(values.shape[1], len(values) - 1)
    if tested and _uses_best_models(run):
        known = loss.reindex(index=values.index, columns=values.columns).to_numpy(float)
        place = np.where(
            np.isnan(known).all(0), place, np.where(np.isnan(known), np.inf, known).argmin(0)
        )
    return last + 1, used, float(values.to_numpy(float)[place, np.arange(values.shape[1])].mean())
