r"""The simplex of models (SosicFL, Floco): regions, uniform draws, and assignment of clients.

A region is the part of the simplex within L1 distance `radius` of a center. A client trains models
drawn from its region and uses the model at its center.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.errors import require

Distance = Literal["l1", "hilbert"]
Center = Literal["medoid", "mean"]
Distances = Callable[[Tensor, Tensor], Tensor]
# Rejection takes at most _BLOCKS blocks of _TRIES proposals a point. The Gibbs chain that then
# takes over makes _SWEEPS sweeps over the coordinates, after which it has forgotten its start.
_TRIES, _BLOCKS, _SWEEPS = 50, 4, 30

# ---------------------------------------------------------------- regions


def mean_distance(center: Float[Tensor, "*batch topics"]) -> Float[Tensor, "*batch"]:
    r"""Return the mean L1 distance from a center to a uniform point of the simplex.

    It is $\frac{2}{M} \sum_m (1 - \mu_m)^M$.

    Example:
        >>> mean_distance(torch.tensor([1.0, 0.0, 0.0]))  # a vertex: 2 (1 - 1/M)
        tensor(1.3333)
    """
    topics = center.shape[-1]
    return 2 / topics * (1 - center).pow(topics).sum(-1)


def sample_region(
    stream: np.random.Generator, center: Float[Tensor, " topics"], radius: float, count: int
) -> Float[Tensor, "count topics"]:
    r"""Draw uniformly from $\{\alpha \in \Delta^{M-1} : \lVert \alpha - \mu \rVert_1 \le r\}$.

    Uses exact rejection from two proposals (the L1 ball around the center; the whole simplex), and
    a Gibbs chain over pairs of coordinates where both reject 200 times.

    Args:
        stream: the random stream.
        center: $\mu$, on the simplex.
        radius: $r$, 0 or larger; 2 or larger is the whole simplex.
        count: number of points.
    """
    mu = center.double().numpy()
    size = len(mu)
    if size == 1 or count == 0:
        return torch.ones(count, size, dtype=torch.float64)
    # An edge: the distance of (a, 1 - a) from the center is 2 |a - mu_0|.
    if size == 2:
        low, high = max(0.0, mu[0] - radius / 2), min(1.0, mu[0] + radius / 2)
        first = stream.uniform(low, high, count)
        return torch.from_numpy(np.stack([first, 1 - first], axis=1))
    # The farthest point of the simplex is a corner, at 2 (1 - mu_m): all of it is in the region.
    if radius >= 2 * (1 - mu).max():
        return torch.from_numpy(stream.dirichlet(np.ones(size), count))
    found = np.empty((0, size))
    for _ in range(_BLOCKS):
        # Each proposal is uniform on a set that holds the region, so the accepted points are
        # uniform on the region. The ball is better for small radii, the simplex for large ones.
        ball = mu + _draw_l1_steps(stream, size, radius, count * _TRIES)
        whole = stream.dirichlet(np.ones(size), count * _TRIES)
        accepted = np.concatenate(
            [ball[(ball >= 0).all(1)], whole[np.abs(whole - mu).sum(1) <= radius]]
        )
        found = np.concatenate([found, accepted])
        if len(found) >= count:
            return torch.from_numpy(_fix_rounding(found[:count]))
    return torch.from_numpy(
        _fix_rounding(
            np.concatenate([found, _run_gibbs_chains(stream, mu, radius, count - len(found))])
        )
    )


def _fix_rounding(points: np.ndarray) -> np.ndarray:
    """Correct rounding: sums such as 1 - 1e-16, entries such as -1e-17."""
    points = np.maximum(points, 0)
    return points / points.sum(1, keepdims=True)


def _draw_l1_steps(stream: np.random.Generator, size: int, radius: float, count: int) -> np.ndarray:
    """Draw uniformly from the steps that sum to 0 with L1 norm up to `radius`."""
    # The ball consists of cones, one for each pattern of signs: comb(M, p) patterns have p positive
    # entries, and the volume of each is proportional to comb(M - 2, p - 1).
    counts = [math.comb(size, p) * math.comb(size - 2, p - 1) for p in range(1, size)]
    chances = np.array(counts, dtype=float)
    positives = stream.choice(np.arange(1, size), count, p=chances / chances.sum())
    # argsort of argsort gives random ranks; the first `positives` of them are positive entries.
    rank = stream.random((count, size)).argsort(1).argsort(1)
    sign = rank < positives[:, None]
    # Exponential draws over their sum are uniform on a simplex: one for each sign.
    draws = stream.exponential(size=(count, size))
    up, down = np.where(sign, draws, 0), np.where(sign, 0, draws)
    # Each sign has half of the norm. The power makes the length uniform by volume, in M - 1
    # dimensions.
    scale = radius / 2 * stream.random((count, 1)) ** (1 / (size - 1))
    return scale * (up / up.sum(1, keepdims=True) - down / down.sum(1, keepdims=True))


def _run_gibbs_chains(
    stream: np.random.Generator, mu: np.ndarray, radius: float, count: int
) -> np.ndarray:
    """Run a Gibbs chain from the center for each point.

    A step redraws two coordinates, with their sum kept, on the interval that stays in the region.
    """
    points = np.tile(mu, (count, 1))
    rows = np.arange(count)
    for _ in range(_SWEEPS * len(mu)):
        i = stream.integers(len(mu), size=count)
        # An offset of 1 to M - 1: j is never i.
        j = (i + stream.integers(1, len(mu), size=count)) % len(mu)
        total = points[rows, i] + points[rows, j]
        gaps = np.abs(points - mu)
        # What the other coordinates leave of the radius to |x_i - mu_i| + |x_j - mu_j|.
        budget = radius - (gaps.sum(1) - gaps[rows, i] - gaps[rows, j])
        # With x_j = total - x_i both distances are of x_i, to mu_i and to total - mu_j: their sum
        # is within the budget on an interval around the mean of the two.
        middle = mu[i] + total - mu[j]
        low, high = np.maximum(0, (middle - budget) / 2), np.minimum(total, (middle + budget) / 2)
        # Rounding may leave an empty interval.
        points[rows, i] = low + (high - low).clip(min=0) * stream.random(count)
        points[rows, j] = total - points[rows, i]
    return points


def sample_released(
    stream: np.random.Generator, center: Float[Tensor, " topics"], radius: float, count: int
) -> Float[Tensor, "count topics"]:
    """Draw as the released code does: a direction from U(-1, 1) with L1 norm 1, a uniform length.

    Neither uniform nor on the simplex (sums differ from 1, entries may be negative); only for
    comparison with published runs. No draw is farther than `radius` from the center, in L1.
    """
    direction = stream.uniform(-1, 1, (count, len(center)))
    direction /= np.abs(direction).sum(1, keepdims=True)
    return center.double() + torch.from_numpy(direction * stream.uniform(0, radius, (count, 1)))


# ---------------------------------------------------------------- assignment of clients to regions


def topic_mixtures(
    counts: Int[Tensor, "clients classes"], topics: int, *, seed: int
) -> Float[Tensor, "clients topics"]:
    r"""Describe each client's labels as a mixture of topics, by latent Dirichlet allocation.

    It is the paper's $\beta_k$.

    Args:
        counts: samples of each class at each client ($n_{k,y}$).
        topics: corners of the simplex ($M$), at most the number of classes.
        seed: seed of the variational fit.

    Returns:
        Points of the simplex; clients with the same counts get the same.
    """
    from sklearn.decomposition import LatentDirichletAllocation

    require(
        topics <= counts.shape[1], "endpoints", topics, f"at most the {counts.shape[1]} classes"
    )
    model = LatentDirichletAllocation(topics, learning_method="online", random_state=seed)
    return torch.from_numpy(model.fit_transform(counts.numpy()))


def l1_distances(
    a: Float[Tensor, "first topics"], b: Float[Tensor, "second topics"]
) -> Float[Tensor, "first second"]:
    """Return the L1 distances of all pairs."""
    return (a[:, None, :] - b[None, :, :]).abs().sum(2)


def hilbert_distances(
    a: Float[Tensor, "first topics"], b: Float[Tensor, "second topics"]
) -> Float[Tensor, "first second"]:
    r"""Return Hilbert's projective distance of all pairs.

    It is $\max_i \ln(p_i / q_i) - \min_i \ln(p_i / q_i)$.

    Entries below 1e-12 count as 1e-12.
    """
    # log of the largest over the smallest ratio of coordinates; a coordinate of 0 would be
    # infinitely far.
    ratio = a.clamp(min=1e-12).log()[:, None, :] - b.clamp(min=1e-12).log()[None, :, :]
    return ratio.amax(2) - ratio.amin(2)


def cluster_points(
    points: Float[Tensor, "clients topics"],
    count: int,
    stream: np.random.Generator,
    *,
    distance: Distance = "l1",
    center: Center = "medoid",
    restarts: int = 10,
) -> tuple[Int[Tensor, " clients"], Float[Tensor, "clusters topics"]]:
    """Group points of the simplex around centers: seeds drawn far apart, then Voronoi iterations.

    Args:
        points: points on the simplex.
        count: number of groups ($L$), at most the points.
        stream: the random stream.
        distance: "l1", or Hilbert's distance.
        center: a group's center: the member with the least sum of distances, or the mean.
        restarts: number of runs; the one with the least sum of distances wins.

    Returns:
        The group of each point, and the centers.
    """
    require(1 <= count <= len(points), "regions", count, f"between 1 and the {len(points)} clients")
    distances = {"l1": l1_distances, "hilbert": hilbert_distances}[distance]
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(restarts):
        centers = _draw_seeds_far_apart(points, count, stream, distances)
        label = distances(points, centers).argmin(1)
        # The label settles after a few iterations; 100 bounds the loop.
        for _ in range(100):
            centers = _update_centers(points, label, centers, center, distances)
            new = distances(points, centers).argmin(1)
            if torch.equal(new, label):
                break
            label = new
        cost = float(distances(points, centers).amin(1).sum())
        # Rounding does not choose between equal runs: the first of them wins.
        if best is None or cost < best[0] - 1e-12:
            best = cost, label, centers
    assert best is not None
    return best[1], best[2]


def _draw_seeds_far_apart(
    points: Tensor, count: int, stream: np.random.Generator, distances: Distances
) -> Tensor:
    """Draw seeds in proportion to the squared distance to the earlier ones (k-means++)."""
    chosen = [int(stream.integers(len(points)))]
    while len(chosen) < count:
        gap = distances(points, points[chosen]).amin(1).square().numpy()
        if gap.sum() <= 0:  # fewer distinct points than groups
            chosen.append(next(i for i in range(len(points)) if i not in chosen))
        else:
            chosen.append(int(stream.choice(len(points), p=gap / gap.sum())))
    return points[chosen]


def _update_centers(
    points: Tensor, label: Tensor, old: Tensor, center: Center, distances: Distances
) -> Tensor:
    # A group without members keeps its center.
    out = old.clone()
    for group in label.unique().tolist():
        members = points[label == group]
        if center == "mean":
            out[group] = members.mean(0)
        else:
            out[group] = members[int(distances(members, members).sum(1).argmin())]
    return out


# ---------------------------------------------------------------- Floco's assignment from gradients


def project_on_simplex(
    points: Float[Tensor, "clients topics"], total: float
) -> Float[Tensor, "clients topics"]:
    """Project on the simplex whose entries sum to `total` (Euclidean, by sorting).

    Example:
        >>> project_on_simplex(torch.tensor([[0.5, 2.0, -1.0]]), 1.0)
        tensor([[0., 1., 0.]])
    """
    # The projection is max(x - shift, 0): `support` is the number of positive entries, the largest
    # place whose ordered entry exceeds the shift that this place would need.
    ordered = points.sort(dim=1, descending=True).values
    excess = ordered.cumsum(1) - total
    place = torch.arange(1, points.shape[1] + 1)
    support = (ordered - excess / place > 0).sum(1)
    shift = excess.gather(1, support[:, None] - 1) / support[:, None]
    return (points - shift).clamp(min=0)


def riesz_energy(points: Float[Tensor, "clients topics"]) -> float:
    """Return the log of the mean inverse squared distance of all pairs: small for spread points.

    Distances count as at least 1e-4.
    """
    # Two equal points would have infinite energy.
    gaps = torch.pdist(points.double()).clamp(min=1e-4)
    return float(gaps.pow(-2).mean().log())


def gradient_points(
    gradients: Float[Tensor, "clients params"], topics: int
) -> Float[Tensor, "clients topics"]:
    r"""Place each client on the simplex by its head's update (Floco).

    The updates are reduced to `topics` principal components and projected on simplices of 1,000
    sizes in [1e-4, 1]; the size with the least Riesz energy wins, and points are scaled to sum to
    1.

    Args:
        gradients: $g_k$: the head that was sent minus the head that was returned. The sign matters.
        topics: $M$, at most the number of clients.

    References:
        Grinwald, Wiesner, Nakajima, Federated learning over connected modes, 2024,
        https://arxiv.org/abs/2403.03333
    """
    from sklearn.decomposition import PCA

    require(topics <= len(gradients), "endpoints", topics, f"at most the {len(gradients)} clients")
    # Equal updates, such as those of a rate of 0, have no principal component: scikit-learn would
    # divide by their variance of 0. All stand in the middle, as projections of the origin do.
    if bool((gradients == gradients[0]).all()):
        return torch.full((len(gradients), topics), 1 / topics, dtype=torch.float64)
    # The solver "full" draws nothing at random.
    scores = PCA(topics, svd_solver="full").fit_transform(gradients.double().numpy())
    components = torch.from_numpy(np.ascontiguousarray(scores))
    # Not from 0: a simplex of size 0 is a single point.
    totals = np.linspace(1e-4, 1, 1000)
    candidates = (project_on_simplex(components, float(total)) / total for total in totals)
    # `min` returns the first of equal ones.
    best = min(candidates, key=riesz_energy)
    # Small sizes lose digits in the projection: rows sum to 1 again.
    return best / best.sum(1, keepdim=True)
