"""Metrics of clients, clusters and runs: pure functions.

A metric that is not defined for its arguments is NaN, never 0, and a warning of class `Undefined` names the reason.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


class Undefined(UserWarning):
    """A metric is NaN; the message says why."""


def _undefined(metric: str, reason: str) -> float:
    warnings.warn(f"{metric} is undefined: {reason}", Undefined, stacklevel=3)
    return math.nan


# ---------------------------------------------------------------- one client's predictions


def balanced_accuracy(predicted: Int[Tensor, " samples"], labels: Int[Tensor, " samples"]) -> float:
    r"""Mean recall of the classes that occur: $\frac{1}{|Y_k|} \sum_{y \in Y_k} TP_y / m_{k,y}$.

    Example:
        >>> balanced_accuracy(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1]))  # recalls 1 and 1/2
        0.75
    """
    if not len(labels):
        return _undefined("balanced accuracy", "there are no samples")
    recalls = [float((predicted[labels == y] == y).double().mean()) for y in labels.unique()]
    return sum(recalls) / len(recalls)


def train_prior_accuracy(
    predicted: Int[Tensor, " samples"], labels: Int[Tensor, " samples"], prior: Shaped[Tensor, " classes"]
) -> float:
    r"""Accuracy with samples weighed by their class's share of the training data: $\sum x_y TP_y / \sum x_y m_y$.

    What FedGWC's code calls balanced; where test and training labels match, it favors frequent classes twice.

    Args:
        predicted: the predicted classes.
        labels: the true ones.
        prior: counts or frequencies of the classes in the client's training data ($x^k_y$).
    """
    weights = prior.double()[labels]
    if float(weights.sum()) <= 0:
        return _undefined("train-prior accuracy", "no test sample has a class of the training data")
    return float((weights * (predicted == labels)).sum() / weights.sum())


def federated(
    values: Float[Tensor, " clients"],
    samples: Shaped[Tensor, " clients"],
    label: Int[Tensor, " clients"] | None = None,
    *,
    how: str = "client_mean",
) -> float:
    r"""Reduce one value a client to one of the federation.

    Args:
        values: of each client.
        samples: test samples of each ($m_k$).
        label: its cluster, for "cluster_then_client".
        how: "client_mean": $\frac1K \sum A_k$; "sample_weighted": $\sum m_k A_k / \sum m_k$; "cluster_then_client":
            weighted by $m_k$ inside clusters, and by their numbers of members across.
    """
    values, weights = values.double(), samples.double()
    if how == "client_mean":
        return float(values.mean())
    if how == "sample_weighted" or label is None:
        return float((weights * values).sum() / weights.sum())
    total = 0.0
    for cluster in label.unique():
        inside = label == cluster
        total += int(inside.sum()) * float((weights * values)[inside].sum() / weights[inside].sum())
    return total / len(values)


# ---------------------------------------------------------------- clusters


def frequencies(counts: Int[Tensor, "clients classes"]) -> Float[Tensor, "clients classes"]:
    r"""Return class frequencies in descending order ($\tilde X_k$): how uneven a client's labels are, not which."""
    share = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    return share.sort(dim=1, descending=True).values


def _clusters(metric: str, label: Tensor) -> str | None:
    found = len(label.unique())
    if 2 <= found <= len(label) - 1:
        return None
    return f"it needs at least 2 clusters and fewer than the {len(label)} clients; found {found}"


def was(counts: Int[Tensor, "clients classes"], label: Int[Tensor, " clients"]) -> float:
    r"""Wasserstein adjusted silhouette: the silhouette of clients by their sorted class frequencies, in [-1, 1].

    The distance of two clients is $W_2$ between their frequency values. Blind to *which* classes a client has: it
    scores levels of heterogeneity only.

    Args:
        counts: training samples of each class at each client.
        label: the found clusters.

    Returns:
        NaN unless there are at least 2 clusters and fewer than clients.
    """
    from sklearn.metrics import silhouette_score

    reason = _clusters("WAS", label)
    if reason is not None:
        return _undefined("WAS", reason)
    return float(silhouette_score(frequencies(counts).numpy(), label.numpy()))


def wadb(counts: Int[Tensor, "clients classes"], label: Int[Tensor, " clients"]) -> float:
    """Wasserstein adjusted Davies-Bouldin index, lower is better, 0 or more; see `was`.

    Returns:
        NaN unless there are at least 2 clusters and fewer than clients, and where two clusters' centroids coincide
        (scikit-learn would give 0, a perfect score, when all do).
    """
    from sklearn.metrics import davies_bouldin_score

    reason = _clusters("WADB", label)
    if reason is not None:
        return _undefined("WADB", reason)
    points = frequencies(counts)
    centers = torch.stack([points[label == cluster].mean(0) for cluster in label.unique()])
    if float(torch.pdist(centers).min()) <= 1e-12:
        return _undefined("WADB", "the centroids of two clusters coincide")
    return float(davies_bouldin_score(points.numpy(), label.numpy()))


def rand(truth: Int[Tensor, " clients"], label: Int[Tensor, " clients"]) -> float:
    """Rand index (not adjusted): the share of pairs that both groupings keep together or both keep apart.

    Example:
        >>> rand(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0]))
        1.0
    """
    from sklearn.metrics import rand_score

    if len(truth) < 2:
        return _undefined("the Rand index", "there are no pairs of clients")
    return float(rand_score(truth.numpy(), label.numpy()))


def adjusted_rand(truth: Int[Tensor, " clients"], label: Int[Tensor, " clients"]) -> float:
    """Rand index adjusted for chance: 1 for equal groupings, 0 on average for random ones."""
    from sklearn.metrics import adjusted_rand_score

    if len(truth) < 2:
        return _undefined("the adjusted Rand index", "there are no pairs of clients")
    return float(adjusted_rand_score(truth.numpy(), label.numpy()))


# ---------------------------------------------------------------- whole runs


def acc_final(accuracy: Sequence[float]) -> float:
    """Accuracy at the last evaluation."""
    return accuracy[-1] if len(accuracy) else _undefined("the final accuracy", "nothing was evaluated")


def acc_max(accuracy: Sequence[float]) -> float:
    """The largest accuracy of all evaluations (on test data, so optimistic); NaN entries do not count."""
    values = [value for value in accuracy if not math.isnan(value)]
    return max(values) if values else _undefined("the largest accuracy", "nothing was evaluated")


def time_to_accuracy(rounds: Sequence[int], accuracy: Sequence[float], target: float) -> float:
    """The first evaluated round whose accuracy is at least `target`; infinite when it is never reached (TTA).

    Args:
        rounds: when evaluations took place, ascending.
        accuracy: at each of them.
        target: usually the largest accuracy of a baseline.
    """
    if math.isnan(target):
        return _undefined("the time to accuracy", "the target is undefined")
    return float(next((r for r, value in zip(rounds, accuracy, strict=True) if value >= target), math.inf))


def tta_ratio(
    rounds: Sequence[int], accuracy: Sequence[float], base_rounds: Sequence[int], base: Sequence[float]
) -> float:
    """How many times sooner a method reaches the baseline's largest accuracy than the baseline did, for one seed.

    Returns:
        1 for the baseline itself, 0 when the method never gets there (its time is infinite), NaN when the method was
        there in round 0 and the baseline later, where no ratio exists.
    """
    target = acc_max(base)
    own, theirs = time_to_accuracy(rounds, accuracy, target), time_to_accuracy(base_rounds, base, target)
    if own == 0:
        return 1.0 if theirs == 0 else _undefined("the TTA ratio", "the method was there in round 0")
    return theirs / own


def total_variance(updates: Float[Tensor, "clients params"]) -> float:
    r"""Total variance of updates: $\frac{1}{|P|} \sum_k \lVert \Delta_k - \bar\Delta \rVert^2$.

    Args:
        updates: $\Delta_k$ of a round's clients, usually of the last layer (`heads.last_layer`); of a simplex model
            all endpoints, one beside another.
    """
    if not len(updates):
        return _undefined("the total variance", "there are no updates")
    flat = updates.double()
    return float((flat - flat.mean(0)).square().sum(1).mean())
