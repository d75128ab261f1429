"""What a whole run came to: its clusters against the planted ones, and its best round."""

import warnings

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from coterie import metrics

MAXIMA = ("accuracy", "balanced_accuracy", "global_accuracy")
"""Metrics whose largest mean over clients is reported, as "accuracy_max" and so on."""


def cluster_metrics(
    label: Int[Tensor, " clients"], truth: Int[Tensor, " clients"] | None, counts: Int[Tensor, "clients classes"]
) -> dict[str, float]:
    """Score found clusters: `n_clusters`, `rand` and `adjusted_rand` (with a truth), `was` and `wadb` (with classes).

    What is not defined, such as WAS of one cluster, is NaN.

    Args:
        label: the found clusters.
        truth: the planted ones, where they are known.
        counts: training samples of each class at each client.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", metrics.Undefined)
        out = {"n_clusters": float(len(label.unique()))}
        if truth is not None:
            out |= {"rand": metrics.rand(truth, label), "adjusted_rand": metrics.adjusted_rand(truth, label)}
        if counts.shape[1]:
            out |= {"was": metrics.was(counts, label), "wadb": metrics.wadb(counts, label)}
    return out


def maxima(table: pd.DataFrame) -> dict[str, Tensor]:
    """Return each client's value in the round in which the mean over clients was largest, for each of MAXIMA.

    The mean of what is returned is ACC as the papers of personalised learning report it: the maximum over rounds,
    on test data, and so optimistic.

    Args:
        table: the metrics table of a run, with the evaluations of the newest models on the test sets.
    """
    tests = table[(table["split"] == "test") & (table["model"] == "current")]
    out = {}
    for metric in MAXIMA:
        rows = pd.DataFrame(tests[tests["metric"] == metric])
        history = rows.pivot_table(index="round", columns="client", values="value", observed=True).to_numpy(dtype=float)
        if len(history):
            out[f"{metric}_max"] = torch.from_numpy(history[np.nanmean(history, axis=1).argmax()].copy())
    return out
