"""Rank methods at equal bytes, or at equal time: when each of their clients has used as much."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from coterie.errors import DataError
from coterie.functional import metrics
from coterie.results import coverage, pairs, selection, stored_runs, summary
from coterie.results.stored_runs import StoredRun, UnreadableRun
from coterie.results.traffic import count_traffic
from coterie.runtime.final_metrics import find_diverged

Unit = Literal["bytes", "seconds"]
"""What is equal: bytes of a client, received and sent to a server; or seconds since the warm-up,
virtual in a simulation and real between machines."""
Split = Literal["test", "validation"]
Model = Literal["best", "current", "either"]


@dataclass(frozen=True)
class MethodAtBudget:
    """A method at the point where every method has used as many bytes, or seconds.

    Args:
        label: the method.
        rounds: its rounds by then.
        used: bytes of a client, mean over clients and seeds, or seconds.
        value: the metric then, mean over clients and seeds; NaN when nothing was measured by then.
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
class EqualBudget:
    """A ranking at equal bytes or at equal time.

    Args:
        study: its name.
        unit: of what methods have used as much.
        metric: accuracy or loss.
        split: the data that the models are scored on: "test" when that was measured during the runs
            (`eval_every`), else "validation".
        model: on test data the model of the final evaluation: "best", each client's best model by
            validation loss, or "current", the newest (`evaluate = "final"`), or "either" when
            methods differ in that. On validation data "current", since the best model was chosen by
            its validation score, which would be biased.
        budget: bytes per client, or seconds: the requested number, else the total of the method
            that uses the fewest, for bytes without methods that send nothing.
        rows: best first.
        pairs: of these methods with these values, over all clients.
        seeds: the seeds that the means are over; see `selection.select_compared_runs`.
        left_out: the status of each other run.
        comparable: False where the values are those of different losses: they are not ranked.
    """

    study: str
    unit: Unit
    metric: str
    split: Split
    model: Model
    budget: float
    rows: Sequence[MethodAtBudget]
    pairs: Sequence[pairs.Pair]
    seeds: Sequence[int]
    left_out: Sequence[dict[str, Any]]
    comparable: bool = True

    @property
    def heading(self) -> str:
        """The heading of the values: metric, split, and which models are scored."""
        which = {
            "best": "each client's best model by validation",
            "current": "the newest models",
            "either": "the models of the final evaluation",
        }[self.model]
        return f"{metrics.REGISTRY[self.metric].heading(self.split)} of {which}"

    @property
    def caveat(self) -> str:
        """Why the ranking is not on test data; "" when it is."""
        if self.split == "test":
            return ""
        return (
            "The rounds were not tested, so the newest models are scored, on validation data; "
            "these are not the "
            "numbers of the final test. With eval_every = 1 the best models are scored on "
            "test data."
        )

    @property
    def verdicts(self) -> list[str]:
        """What is established about each pair of methods."""
        if not self.comparable:
            return [pairs.OTHER_LOSSES]
        return [pairs.describe_pair(one, metrics.REGISTRY[self.metric]) for one in self.pairs]

    def describe_coverage(self) -> list[str]:
        """Describe the runs that are not in the ranking, and why it is not on test data."""
        rows = list(map(asdict, self.rows))
        content = {"rows": rows, "seeds": self.seeds, "left_out": self.left_out}
        lines = coverage.describe_coverage(content)
        return [*lines, self.caveat] if self.caveat else lines


def rank_at_equal_budget(
    folder: str | Path,
    budget: float | None = None,
    unit: Unit = "bytes",
    *,
    baseline: str | None = None,
) -> EqualBudget:
    """Rank the methods of a stored study when each client has used as many bytes, or seconds.

    Bytes are those of all messages received and of those sent to a server (messages sent to peers
    are counted as received by them). With `eval_every` the model of a client is chosen as in the
    final evaluation, the best by validation loss, and scored on test data. A method that uses no
    more in its whole run has its final result; for another, the model is chosen among the tested
    rounds by then (a warm-up is not one).

    Args:
        folder: the folder of the study.
        budget: bytes of a client, or seconds; by default the total of the method that uses the
            fewest, for bytes without methods that send nothing.
        unit: which of them.
        baseline: the label of the method with which each other one is paired; all pairs when None.

    Raises:
        DataError: when there is no run, or several studies, or runs without times.
    """
    runs, problems = stored_runs.load_runs([folder])
    return rank_runs(runs, problems, folder, budget, unit, baseline=baseline)


def rank_runs(
    runs: Sequence[StoredRun],
    problems: Sequence[UnreadableRun],
    folder: str | Path,
    budget: float | None = None,
    unit: Unit = "bytes",
    whole: Mapping[str, Any] | None = None,
    baseline: str | None = None,
) -> EqualBudget:
    """Rank runs that were already loaded; see `rank_at_equal_budget`.

    Args:
        runs: the runs of the study.
        problems: its folders that could not be read.
        folder: the folder of the study.
        budget: bytes of a client, or seconds.
        unit: which of them.
        whole: the summary of these runs, if there is one already.
        baseline: see `rank_at_equal_budget`.
    """
    whole = whole or summary.summarize_runs(runs, folder, problems)
    chosen = selection.select_compared_runs(runs, problems)
    metric = stored_runs.main_metric(chosen)
    # All or none: values on test and on validation data are not comparable.
    tested = bool(chosen) and all(_has_round_tests(run, metric) for run in chosen)
    groups = stored_runs.group_by_label(chosen)
    if budget is None:
        budget = _choose_budget(groups.values(), unit)
    rows, values = [], dict[str, dict[int, pd.Series]]()
    for label, group in groups.items():
        points = [_evaluate_at_budget(run, metric, budget, unit, tested=tested) for run in group]
        rounds, used, found = zip(*points, strict=True)
        # Clients whose models diverged have NaN, and so has a mean with them.
        means = np.array([float(one.mean(skipna=False)) for one in found])
        value, deviation = summary.mean_std_over_seeds(means)
        row = MethodAtBudget(
            label, float(np.mean(rounds)), float(np.mean(used)), value, deviation, len(group)
        )
        rows.append(row)
        # Of a method that has not been measured by then there is nothing to pair.
        if all(map(len, found)):
            values[label] = {}
            for run, one in zip(group, found, strict=True):
                values[label][run.seed] = one
    comparable = stored_runs.can_compare(chosen, metric)
    sign = metrics.REGISTRY[metric].sign if comparable else 0
    # NaN last, then the best first; as they come where none is better.
    rows.sort(key=lambda row: (math.isnan(row.value), -sign * row.value))
    model: Model = "current"
    if tested:
        uses_best = set(map(_uses_best_models, chosen))
        # Methods may set `evaluate` for themselves.
        if len(uses_best) > 1:
            model = "either"
        elif uses_best == {True}:
            model = "best"
    return EqualBudget(
        study=whole["study"],
        unit=unit,
        metric=metric,
        split="test" if tested else "validation",
        model=model,
        budget=budget,
        rows=rows,
        pairs=_pair_values(chosen, values, metric, baseline) if comparable else [],
        seeds=whole["seeds"],
        left_out=whole["left_out"],
        comparable=comparable,
    )


def _pair_values(
    runs: Sequence[StoredRun],
    values: Mapping[str, Mapping[int, pd.Series]],
    metric: str,
    baseline: str | None,
) -> list[pairs.Pair]:
    """Compare methods in pairs over all clients, by their values at the budget."""
    known = stored_runs.collect_metrics(runs)[metric]
    if len(values) < 2 or not known.sign:
        return []
    everybody = summary.forget_clusters(summary.join_clusters(runs))
    overlap = stored_runs.compute_seed_overlap(runs[0])
    found = pairs.compare_pairs(values, everybody, known, {}, overlap)
    return pairs.select_pairs(found, metric=metric, baseline=baseline)


def _choose_budget(groups: Iterable[Sequence[StoredRun]], unit: Unit) -> float:
    """Return the total of the method that uses the fewest; 0 if none uses any."""
    totals = []
    for group in groups:
        total = np.mean([count_used(run, unit)[-1] for run in group])
        # Local sends nothing: its budget of 0 would stop all others before the first round.
        if total > 0:
            totals.append(float(total))
    return min(totals, default=0.0)


def count_used(run: StoredRun, unit: Unit) -> Float[np.ndarray, " rounds"]:
    """Return what a client has used after each round from the first, in bytes or seconds.

    Raises:
        DataError: for the seconds of a run without times.
    """
    if unit == "bytes":
        return compute_bytes_per_client(run)
    seconds = run.elapsed_seconds
    if seconds is None:
        raise DataError(
            f"{run.folder} has no times; a simulation has them with a table [time], nodes always"
        )
    return seconds


def compute_bytes_per_client(run: StoredRun) -> Float[np.ndarray, " rounds"]:
    """Return the bytes of a client after each round from the first: received, and sent to a server.

    They are means over clients, accumulated over rounds.
    """
    received, sent = count_traffic(run.metrics, run.counted_edges, max(1, run.num_rounds))
    return np.cumsum(received + sent) / run.num_counted


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
    """Whether models were tested during the run, not only at its end."""
    # One entry is that of the end, which every run has.
    return len(_pivot_metric(run, "test", metric)) > 1


def _uses_best_models(run: StoredRun) -> bool:
    """Whether the final evaluation of a run takes each client's best model by validation."""
    return bool((run.final_rows["model"] == "best").all())


def _evaluate_at_budget(
    run: StoredRun, metric: str, budget: float, unit: Unit, *, tested: bool
) -> tuple[int, float, pd.Series]:
    """Return rounds, what was used, and the metric of each client at a budget.

    They are of the whole run if it uses less; without clients where nothing was measured by then.
    """
    cumulated = count_used(run, unit)
    # A budget is often the total of another run, so that rounding must not cost its last round.
    last = int(np.searchsorted(cumulated, budget * (1 + 1e-9), side="right")) - 1
    used = float(cumulated[last]) if last >= 0 else 0.0
    # The whole run fits: its final result counts.
    if tested and last + 1 >= run.num_rounds:
        return last + 1, used, run.defined_values(metric)
    split: Split = "test" if tested else "validation"
    values = _pivot_metric(run, split, metric)
    # Clients without validation data, and those whose data leave the metric undefined, have no
    # value in any round; neither has a model that diverged at once, which stays.
    diverged = set(run.metrics.loc[find_diverged(run.metrics), "client"])
    values = values.loc[:, values.notna().any().to_numpy() | values.columns.isin(diverged)]
    # Rounds within the budget.
    values = values.loc[(values.index <= last)]
    if not values.size:
        return last + 1, used, pd.Series(dtype=float)
    # The last round within the budget.
    place = np.full(values.shape[1], len(values) - 1)
    if tested and _uses_best_models(run):
        loss = _pivot_metric(run, "validation", metrics.LOSS.name)
        known = loss.reindex(index=values.index, columns=values.columns).to_numpy(float)
        # argmin would choose NaN; a client without any validation loss keeps its last model.
        best = np.where(np.isnan(known), np.inf, known).argmin(0)
        place = np.where(np.isnan(known).all(0), place, best)
    chosen = values.to_numpy(float)[place, np.arange(values.shape[1])]
    return last + 1, used, pd.Series(chosen, index=values.columns.to_numpy())
