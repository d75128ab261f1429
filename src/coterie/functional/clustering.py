"""Clustering of clients: pure functions on losses, updates and models.

FedGWC's rewards, interaction matrix and affinity, and the choice of a split; CFL's exact
bipartition; FeSEM's E-step. They find labels and never use the planted clusters.
"""

import warnings
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Axis = Literal["column", "row"]
Space = Literal["rows", "embedding"]
Labels = Literal["cluster_qr", "kmeans"]
_FLOOR = 1e-12  # below this a variance or a norm counts as zero
_ROWS_AT_ONCE = 256
_WEAK = 1e-15  # the weakest edge of an affinity graph, so that it stays connected

# ---------------------------------------------------------------- FedGWC


def gaussian_rewards(
    losses: Float[Tensor, "clients steps"],
    *,
    ddof: int = 1,
    weights: Shaped[Tensor, " clients"] | None = None,
    synthetic: Float[Tensor, "extra steps"] | None = None,
) -> Float[Tensor, " clients"]:
    r"""Compute each client's reward: how typical its losses are in its round.

    It is FedGWC's $\omega_k$, in (0, 1].
    $r_k^s = \exp(-(\ell_k^s - m^s)^2 / (2 (\sigma^s)^2))$ with mean $m^s$ and variance
    $(\sigma^s)^2$ over the clients, averaged over the steps $s$. Adding a constant to all losses or
    scaling them changes nothing.

    Args:
        losses: batch loss before each local step ($\ell_k^{t,s}$); NaN where a client took fewer
            steps.
        ddof: 1 for the sample variance, 0 for the biased one.
        weights: of the clients in mean and variance ($n_k$); all equal by default. With weights the
            variance is biased, whatever `ddof`.
        synthetic: standard normal draws; each becomes one more loss, at the mean plus so many
            standard deviations, before mean and variance are taken again.

    Returns:
        One reward a client; 1 where all losses of a step are equal or fewer than two clients took
        it.
    """
    losses = losses.double()
    here = torch.isfinite(losses)
    # A missing loss has weight 0 in mean and variance, so 0 may stand for it.
    if weights is None:
        weights = torch.ones(len(losses))
    else:
        ddof = 0
    share = here * weights.double()[:, None]
    mean, variance = _weighted_moments(torch.nan_to_num(losses), share, ddof)
    if synthetic is not None:
        drawn = mean + variance.sqrt() * synthetic.double()
        # Synthetic losses count like a client of weight 1.
        both = torch.cat([torch.nan_to_num(losses), drawn])
        mean, variance = _weighted_moments(both, torch.cat([share, torch.ones_like(drawn)]), ddof)
    # Equal losses, or a lone one, are typical: reward 1 instead of 0 / 0.
    flat = (variance <= _FLOOR) | (here.sum(0) < 2)
    rewards = torch.exp(-(losses - mean).square() / (2 * torch.where(flat, 1, variance)))
    rewards = torch.where(flat, 1.0, rewards)
    # The mean over the steps that the client took; 0 for a client without any.
    return torch.where(here, rewards, 0).sum(1) / here.sum(1).clamp(min=1)


def _weighted_moments(losses: Tensor, share: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance over the clients for each step, weighted by `share`.

    A missing loss has share 0.
    """
    total = share.sum(0).clamp(min=_FLOOR)
    mean = (share * losses).sum(0) / total
    # A step of one client has no degree of freedom left.
    degrees = (total - ddof).clamp(min=_FLOOR)
    return mean, (share * (losses - mean).square()).sum(0) / degrees


def update_interactions(
    matrix: Float[Tensor, "population population"],
    ids: Int[Tensor, " clients"],
    rewards: Float[Tensor, " clients"],
    alpha: float,
) -> Float[Tensor, "population population"]:
    r"""Update FedGWC's interaction matrix for the clients that were sampled together.

    For sampled $k$ and $j$: $P_{kj} \leftarrow (1 - \alpha) P_{kj} + \alpha \omega_k$. The
    increment depends on the row's client; the diagonal is the running mean of its reward
    ($\gamma_k$). Pairs not sampled together keep their value.

    Args:
        matrix: $P$, in [0, 1].
        ids: the clients sampled together.
        rewards: $\omega_k$ of each.
        alpha: $\alpha_t$, in (0, 1).
    """
    new, rewards = matrix.clone(), rewards.to(matrix.dtype)
    # A few rows at a time: of a cohort of all clients, further matrices would be as large as P.
    for rows, reward in zip(ids.split(_ROWS_AT_ONCE), rewards.split(_ROWS_AT_ONCE), strict=True):
        pairs = rows[:, None], ids[None, :]
        new[pairs] = (1 - alpha) * matrix[pairs] + alpha * reward[:, None]
    return new


def affinity_matrix(
    matrix: Float[Tensor, "clients clients"],
    beta: float,
    *,
    axis: Axis = "column",
    minmax: bool = False,
    diagonal: float = 1.0,
) -> Float[Tensor, "clients clients"]:
    r"""Compute the similarity of clients from the interaction matrix.

    $W_{kj} = \exp(-\beta \lVert v_k^j - v_j^k \rVert^2)$, where $v_k^j$ is vector k of $P$ without
    entries k and j (the unbiased pairwise vector), so both run over the same other clients.

    Args:
        matrix: the interaction matrix of one cluster.
        beta: width of the kernel ($\beta$).
        axis: whether a client's vector is its column (how its presence changes the others' rewards)
            or its row.
        minmax: scale the matrix to [0, 1] first.
        diagonal: value of $W_{kk}$.

    Returns:
        Symmetric, in (0, 1].
    """
    vectors = matrix.double()
    if axis == "column":
        vectors = vectors.T
    if minmax:
        low, high = vectors.min(), vectors.max()
        vectors = (vectors - low) / (high - low).clamp(min=_FLOOR)
    own = vectors.diagonal()
    # The faster mode expands the square, which cancels where vectors are close.
    square = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()
    # Entries k and j leave the distance of vectors k and j: [k, j] of the first term is v_k[k] -
    # v_j[k], of the second v_k[j] - v_j[j].
    square = square - (own[:, None] - vectors.T).square() - (vectors - own[None, :]).square()
    square = (square + square.T) / 2  # symmetric to the last bit
    # The subtraction may leave a negative rest of rounding.
    out = torch.exp(-beta * square.clamp(min=0))
    out.fill_diagonal_(diagonal)
    return out


def spectral_clusters(
    affinity: Float[Tensor, "clients clients"], count: int, *, labels: Labels, seed: int
) -> Int[Tensor, " clients"]:
    """Cut an affinity graph into `count` groups by normalized spectral clustering.

    Args:
        affinity: symmetric, not negative.
        count: 2 or more, below the number of clients.
        labels: how groups are assigned from the eigenvectors.
        seed: seed of the eigenvalue solver's start.
    """
    from sklearn.cluster import SpectralClustering

    graph = np.maximum(affinity.double().numpy(), _WEAK)
    model = SpectralClustering(
        count, affinity="precomputed", assign_labels=labels, random_state=seed
    )
    return torch.from_numpy(model.fit_predict(graph).astype(np.int64))


def propose_split(
    affinity: Float[Tensor, "clients clients"],
    *,
    n_max: int = 4,
    min_cluster_size: int = 3,
    space: Space = "rows",
    labels: Labels = "cluster_qr",
    seed: int = 0,
) -> Int[Tensor, " clients"] | None:
    """Choose the number of groups by the Davies-Bouldin index, and whether to split at all.

    Args:
        affinity: of the members of one cluster.
        n_max: largest number of groups tried; also at most clients / `min_cluster_size`.
        min_cluster_size: a split with a smaller part is rejected.
        space: where the index is measured: the rows of the affinity, or its spectral embedding.
        labels: see `spectral_clusters`.
        seed: see `spectral_clusters`.

    Returns:
        A label from 0 for each client, groups numbered by their first member; None for no split: no
        partition has an index below 1, or the best one has a part that is too small.
    """
    size = len(affinity)
    best: tuple[float, Tensor] | None = None
    # The index needs fewer groups than clients.
    for count in range(2, min(n_max, size // max(1, min_cluster_size), size - 1) + 1):
        found = spectral_clusters(affinity, count, labels=labels, seed=seed)
        # The solver may leave groups empty, and one group has no index.
        if len(found.unique()) < 2:
            continue
        index = davies_bouldin(_index_features(affinity, count, space, seed), found)
        # Equal indices go to fewer groups.
        if best is None or index < best[0]:
            best = index, found
    # `not <` also refuses an index of NaN.
    if (
        best is None
        or not best[0] < 1
        or int(torch.bincount(renumber_labels(best[1])).min()) < min_cluster_size
    ):
        return None
    return renumber_labels(best[1])


def _index_features(affinity: Tensor, count: int, space: Space, seed: int) -> Tensor:
    from sklearn.manifold import SpectralEmbedding

    if space == "rows":
        return affinity
    graph = np.maximum(affinity.double().numpy(), _WEAK)
    model = SpectralEmbedding(n_components=count, affinity="precomputed", random_state=seed)
    return torch.from_numpy(model.fit_transform(graph))


def davies_bouldin(
    points: Float[Tensor, "clients features"], label: Int[Tensor, " clients"]
) -> float:
    """Compute the Davies-Bouldin index, lower is better; infinite where all centroids coincide.

    scikit-learn returns 0, a perfect score, when all within-cluster distances or all distances of
    centroids vanish. Coinciding centroids are no clusters at all; coinciding points in distinct
    clusters are perfect ones.
    """
    from sklearn.metrics import davies_bouldin_score

    # Centroids coincide when they are apart by rounding only, measured against their own length.
    centers = torch.stack([points[label == group].mean(0) for group in label.unique()]).double()
    spread = torch.cdist(centers, centers)
    if float(spread.max()) <= 1e-9 * max(1.0, float(centers.norm(dim=1).max())):
        return float("inf")
    return float(davies_bouldin_score(points.double().numpy(), label.numpy()))


def renumber_labels(label: Int[Tensor, " clients"]) -> Int[Tensor, " clients"]:
    """Number groups from 0 in the order of their first members.

    Example:
        >>> renumber_labels(torch.tensor([7, 2, 7, 0]))
        tensor([0, 1, 0, 2])
    """
    seen: dict[int, int] = {}
    # setdefault numbers a group when its first member comes.
    numbers = [seen.setdefault(group, len(seen)) for group in label.tolist()]
    return torch.tensor(numbers, dtype=torch.int64)


# ---------------------------------------------------------------- CFL


def compute_update_cosines(
    updates: Float[Tensor, "clients params"],
) -> Float[Tensor, "clients clients"]:
    r"""Cosines of all pairs of updates.

    $a_{ij} = \langle \Delta_i, \Delta_j \rangle / (\lVert \Delta_i \rVert \lVert \Delta_j \rVert)$;
    the denominator is at least 1e-12, so that an update of zero has cosine 0 with all others.
    """
    flat = updates.double()
    norms = flat.norm(dim=1)
    return (flat @ flat.T) / (norms[:, None] * norms[None, :]).clamp(min=_FLOOR)


def find_bipartition(
    similarity: Float[Tensor, "clients clients"],
    linkage_method: Literal["single", "complete"] = "single",
) -> Bool[Tensor, " clients"]:
    """Split clients in two so that the largest similarity across the cut is as small as possible.

    Single linkage on 1 - similarity, cut at two clusters, is the exact solution.

    Args:
        similarity: symmetric; at least two clients.
        linkage_method: "complete" is what the authors' code does.

    Returns:
        True for the part that does not hold the first client.
    """
    from scipy.cluster.hierarchy import cut_tree, linkage
    from scipy.spatial.distance import squareform

    distance = 1 - similarity.double()
    # Rounding leaves the diagonal near 0 and the halves unequal, which squareform's checks would
    # refuse.
    distance = (distance + distance.T) / 2
    condensed = squareform(distance.numpy(), checks=False)
    parts = cut_tree(linkage(condensed, method=linkage_method), n_clusters=2)[:, 0]
    return torch.from_numpy(parts != parts[0])


def compute_loss_distances(
    losses: Float[Tensor, "clusters clusters"],
) -> Float[Tensor, "clusters clusters"]:
    r"""Return how much worse the models of two clusters do on each other's data, as FedDrift does.

    $D(i, j) = \max(L_{ij} - L_{ii}, L_{ji} - L_{jj}, 0)$: symmetric, and 0 on the diagonal.

    Args:
        losses: $L_{ij}$ of the model of cluster j on the data of cluster i.

    Example:
        >>> compute_loss_distances(torch.tensor([[1.0, 1.5], [4.0, 2.0]]))
        tensor([[0., 2.],
                [2., 0.]])
    """
    worse = losses - losses.diagonal()[:, None]
    return torch.maximum(worse, worse.T).clamp(min=0)


def merge_close(
    distances: Float[Tensor, "clusters clusters"], most: float
) -> Int[Tensor, " clusters"]:
    """Return the group of each cluster, by complete linkage up to a distance.

    All clusters of a group are at most that far from each other.

    Args:
        distances: between clusters; symmetric, 0 on the diagonal.
        most: the distance.

    Example:
        >>> merge_close(torch.tensor([[0.0, 0.1, 0.9], [0.1, 0.0, 0.9], [0.9, 0.9, 0.0]]), 0.2)
        tensor([0, 0, 1])
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    condensed = squareform(distances.cpu().double().numpy(), checks=False)
    groups = fcluster(linkage(condensed, method="complete"), t=most, criterion="distance")
    return renumber_labels(torch.from_numpy(groups.astype("int64")))


def max_cross_similarity(
    similarity: Float[Tensor, "clients clients"], part: Bool[Tensor, " clients"]
) -> float:
    """The largest similarity across a bipartition."""
    return float(similarity[part][:, ~part].max())


# ---------------------------------------------------------------- FeSEM and one-shot clustering


def nearest_centers(
    points: Float[Tensor, "clients params"], centers: Float[Tensor, "clusters params"]
) -> Int[Tensor, " clients"]:
    r"""Return the nearest center of each model (FeSEM's E-step); ties go to the first center.

    It is $\arg\min_c \lVert W_k - \tilde W^c \rVert^2$.
    """
    return squared_distances(points, centers).argmin(1)


def squared_distances(
    points: Float[Tensor, "clients params"], centers: Float[Tensor, "clusters params"]
) -> Float[Tensor, "clients clusters"]:
    """Squared Euclidean distances, summed in float64."""
    parts = [torch.zeros(0, len(centers), dtype=torch.float64, device=points.device)]
    # Center by center and a few points at a time: no second array of clients x params exists.
    for some in points.split(_ROWS_AT_ONCE):
        found = [(some - center).square_().sum(1, dtype=torch.float64) for center in centers]
        parts.append(torch.stack(found, dim=1))
    return torch.cat(parts)


def k_means(
    points: Float[Tensor, "clients params"], count: int, *, seed: int
) -> Int[Tensor, " clients"]:
    """Group points by k-means with ten restarts; clusters are numbered by their first members."""
    from sklearn.cluster import KMeans

    with warnings.catch_warnings():
        # Fewer distinct points than clusters are fine: some clusters are then missing.
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        # the stubs of scikit-learn know n_init as a text only
        model = KMeans(count, n_init=10, random_state=seed)  # pyright: ignore[reportArgumentType]
        return renumber_labels(
            torch.from_numpy(model.fit_predict(points.double().numpy()).astype(np.int64))
        )
