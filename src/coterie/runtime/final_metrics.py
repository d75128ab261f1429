"""Metrics of a whole run: final test, found against planted clusters, and the best round."""

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.functional import metrics


def select_final_tests(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the final test: of the best models where stored, else of the last.

    Args:
        table: the metrics table of a run.
    """
    tests = table.loc[
        ((table["split"] == "test") & (table["round"] == table["round"].max())).to_numpy()
    ]
    best = tests.loc[(tests["model"] == "best").to_numpy()]
    if best.empty:
        return tests
    return best


def select_defined(values: pd.Series, losses: pd.Series, metric: metrics.Metric) -> pd.Series:
    """Return the clients over which a mean of a metric is taken.

    Clients whose test samples leave a metric of outputs undefined are left out, the same clients
    for every method. A client whose loss is not finite stays, since its model diverged: no mean may
    hide that.

    Args:
        values: the final test value of each client.
        losses: its final test loss, by client; none where it was not measured.
        metric: what the values are of.
    """
    built_in = metrics.REGISTRY.get(metric.name)
    # a stored custom metric has no function, but all of them that are on samples had one
    of_outputs = metric.on_samples
    if built_in is not None:
        of_outputs = built_in.function is not None
    if not of_outputs or not bool(values.isna().any()):
        return values
    # A client without a loss counts as diverged too: `reindex` gives it NaN.
    diverged = ~np.isfinite(losses.reindex(values.index).to_numpy(float))
    return pd.Series(values.loc[values.notna().to_numpy() | diverged])


def find_diverged(table: pd.DataFrame) -> Bool[np.ndarray, " rows"]:
    """Return which rows of a metrics table are without a value because a model diverged.

    The value of such a row is not finite, and neither is the loss of the same client, round, split
    and model. A client that never has a loss in a split, nor is reported as diverged, has no data
    there: its rows do not count. Nor do other values that are not finite: the data leave a metric
    undefined.

    Args:
        table: the metrics table of a run.
    """
    bad = ~np.isfinite(table["value"].to_numpy(float))
    if not bad.any():
        return bad
    key = ["round", "client", "split", "model"]
    is_loss = (table["metric"] == metrics.LOSS.name).to_numpy()
    lost = table.loc[is_loss & bad, key]
    measured = table.loc[is_loss & ~bad, ["client", "split"]].drop_duplicates()
    known = pd.MultiIndex.from_frame(measured.astype(str))
    diverged_ids = table.loc[
        (table["metric"] == metrics.DIVERGED.name).to_numpy(), "client"
    ].unique()
    has_data = (
        pd.MultiIndex.from_frame(lost[["client", "split"]].astype(str)).isin(known)
        | lost["client"].isin(diverged_ids).to_numpy()
        # Every client has test samples, and so has one that joins at the end.
        | lost["split"].isin(("test", "new_clients")).to_numpy()
    )
    diverged = pd.MultiIndex.from_frame(lost.loc[has_data].astype(str))
    out = bad.copy()
    out[bad] = pd.MultiIndex.from_frame(table.loc[bad, key].astype(str)).isin(diverged)
    return out


def list_diverged_clients(table: pd.DataFrame) -> tuple[int, ...]:
    """Return the clients whose model became NaN or infinite: in training, or where it was measured.

    A model that a client received may be so without any training: attackers, or sums that overflow.

    Args:
        table: the metrics table of a run.
    """
    trained = (table["metric"] == metrics.DIVERGED.name).to_numpy()
    lost = table.loc[trained | find_diverged(table), "client"].unique()
    return tuple(sorted(map(int, lost)))


def compute_cluster_metrics(
    label: Int[Tensor, " clients"],
    truth: Int[Tensor, " clients"] | None,
    counts: Int[Tensor, "clients classes"],
) -> dict[str, float]:
    """Score found clusters.

    The scores are `n_clusters`, `rand` and `adjusted_rand` (with a truth), `was` and `wadb` (with
    classes). An undefined score, such as WAS of one cluster, is NaN; `explain_cluster_metrics` says
    why.

    Args:
        label: the found clusters.
        truth: the planted ones, where they are known.
        counts: training samples of each class at each client.
    """
    return explain_cluster_metrics(label, truth, counts)[0]


def explain_cluster_metrics(
    label: Int[Tensor, " clients"],
    truth: Int[Tensor, " clients"] | None,
    counts: Int[Tensor, "clients classes"],
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the scores of `compute_cluster_metrics`, and the reason for each that is NaN."""
    scores, reasons = {metrics.N_CLUSTERS.name: float(len(label.unique()))}, {}
    measures: dict[str, Callable[[], float]] = {}
    if truth is not None:
        measures[metrics.RAND.name] = lambda: metrics.rand_index(truth, label)
        measures[metrics.ADJUSTED_RAND.name] = lambda: metrics.adjusted_rand_index(truth, label)
    if counts.shape[1]:
        measures[metrics.WAS.name] = lambda: metrics.wasserstein_silhouette(counts, label)
        measures[metrics.WADB.name] = lambda: metrics.wasserstein_davies_bouldin(counts, label)
    for name, measure in measures.items():
        # The measures give their reasons as warnings, which become text of the report.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", metrics.Undefined)
            scores[name] = measure()
        if said and math.isnan(scores[name]):
            reasons[name] = str(said[-1].message)
    return scores, reasons


def compute_reductions(
    accuracy: Float[Tensor, " clients"],
    samples: Int[Tensor, " clients"],
    label: Int[Tensor, " clients"] | None,
) -> dict[str, Tensor]:
    """Average the accuracy by samples and by clusters; each client gets the same value.

    Args:
        accuracy: the accuracy of each client.
        samples: test samples of each.
        label: the found clusters; without them accuracy is not reduced cluster by cluster.
    """
    if label is not None:
        label = label.cpu()
    values = {}
    for how, entry in metrics.REDUCTIONS.items():
        if label is not None or how == "sample_weighted":
            value = metrics.reduce_over_clients(accuracy, samples, label, how=how)
            # float64, as the table of metrics has it.
            values[entry.name] = torch.full((len(accuracy),), value).double()
    return values


def compute_maxima(table: pd.DataFrame, clients: np.ndarray) -> dict[str, Tensor]:
    """Return each client's value in the best round, for each metric of `metrics.MAXIMA`.

    The best round is the one with the largest mean over clients. The mean of its values is ACC as
    papers of personalized learning report it: the maximum over rounds on test data, which is
    optimistic.

    Args:
        table: the metrics table of a run, with the evaluations of the newest models on the test
            sets.
        clients: their ids in the table; NaN for one that has no value.
    """
    # The maximum is over test data of the newest models, as papers report it.
    tests = table.loc[((table["split"] == "test") & (table["model"] == "current")).to_numpy()]
    out = {}
    for metric, largest in metrics.MAXIMA.items():
        rows = pd.DataFrame(tests[tests["metric"] == metric.name])
        pivot = rows.pivot_table(index="round", columns="client", values="value", observed=True)
        # A client without any value has no column in the pivot.
        history = pivot.reindex(columns=clients).to_numpy(dtype=float)
        if len(history):
            # A client without rows, such as an attacker, never has a value. A round in which
            # another one has none, since its model diverged, is not the best.
            lost = np.isin(clients, tests.loc[find_diverged(tests), "client"].unique())
            tested = history[:, ~np.isnan(history).all(axis=0) | lost]
            means = tested.mean(axis=1) if tested.shape[1] else np.full(len(history), -np.inf)
            best = np.where(np.isnan(means), -np.inf, means).argmax()
            out[largest.name] = torch.from_numpy(history[best].copy())
    return out


def average_over_rounds(
    table: pd.DataFrame, names: Sequence[str], clients: np.ndarray
) -> dict[str, Tensor]:
    """Return the mean over rounds of reported metrics; rounds without a value are left out.

    Args:
        table: the metrics table of a run.
        names: of the metrics.
        clients: their ids in the table; NaN for one that never reported a metric, because it was in
            no cohort.
    """
    # Round -1 is the warm-up, in which nothing is mixed.
    rounds = table.loc[((table["split"] == "train") & (table["round"] >= 0)).to_numpy()]
    found = {}
    for name in names:
        rows = rounds.loc[(rounds["metric"] == name).to_numpy()]
        if len(rows):
            means = pd.Series(rows.groupby("client")["value"].mean())
            # A copy, since pandas may give memory that must not be written to.
            found[name] = torch.from_numpy(means.reindex(clients).to_numpy(dtype=float).copy())
    return found
