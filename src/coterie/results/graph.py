"""The collaboration graph: which models each client used, compared with the planted clusters.

Pure functions on the edges table of a run (columns round, reader, read, purpose, weight, bytes) and
the planted clusters. Unlike `metrics` they need no model or tensor, only the stored table;
comparisons, reports and notebooks use them.

Client `i` reads client `j` when it receives the model of `j`: rows of every matrix are readers.
Reads of the client's own model and messages that did not arrive (purpose "missing") are not
counted. A planted cluster of -1 is unknown, as an attacker's: such a client has no cluster to find,
and a read of it is outside the reader's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Num
from scipy import sparse

from coterie._util.mappings import number_items
from coterie.errors import DataError, require
from coterie.functional.metrics import LABEL
from coterie.results.planted import PlantedPhases

MOST_COMMUNITIES = 20
PATIENCE = 4  # numbers of communities tried in vain before the search ends
WHOLE_SPECTRUM = 400
"""Largest population of which all eigenvectors are computed; of a larger one, the leading ones."""
MOST_ROWS = 10_000
"""Clients from which the centers of groups are found; of a larger population, a random sample."""
_RESTARTS, _TOLERANCE = 60, 1e-3  # of that iteration
_ENTRIES = 40_000_000  # of the reads, times restarts: more reads get fewer


def count_reads(edges: pd.DataFrame, population: int) -> Int[np.ndarray, "population population"]:
    """Count how often each client (row) read each other client (column).

    Args:
        edges: the edges table, or a part of it.
        population: number of clients; ids run from 0 to population - 1.

    Raises:
        DataError: when the table names a client outside the population.

    Example:
        >>> edges = pd.DataFrame({"round": [0, 1], "reader": 0, "read": 1, "purpose": "mix"})
        >>> count_reads(edges, 2).tolist()
        [[0, 2], [0, 0]]
    """
    return count_reads_sparse(edges, population).toarray()


def count_reads_sparse(edges: pd.DataFrame, population: int) -> sparse.csr_array:
    """Count reads as `count_reads` does, in a sparse matrix that grows with the reads alone.

    Raises:
        DataError: when the table names a client outside the population.
    """
    _, reader, read = _select_peer_reads(edges)
    highest = max((int(ids.max()) for ids in (reader, read) if len(ids)), default=-1)
    lowest = min((int(ids.min()) for ids in (reader, read) if len(ids)), default=0)
    inside = lowest >= 0 and highest < population
    require(
        inside,
        "the client ids of the edges",
        (lowest, highest),
        f"ids from 0 to {population - 1}",
        error=DataError,
    )
    once = np.ones(len(reader), dtype=np.int64)
    # The conversion adds up entries of one place: one for each read.
    return sparse.coo_array((once, (reader, read)), shape=(population, population)).tocsr()


def _select_peer_reads(
    edges: pd.DataFrame,
) -> tuple[Int[np.ndarray, " edges"], Int[np.ndarray, " edges"], Int[np.ndarray, " edges"]]:
    """Round, reader and read of every message that arrived from another client."""
    index, reader = edges["round"].to_numpy(np.int64), edges["reader"].to_numpy(np.int64)
    read = edges["read"].to_numpy(np.int64)
    # A message to oneself and one that did not arrive brought no model.
    others = (reader != read) & (edges["purpose"] != "missing").to_numpy(bool)
    return index[others], reader[others], read[others]


def within_share(
    edges: pd.DataFrame, truth: Int[np.ndarray, " population"] | PlantedPhases
) -> pd.Series:
    """Return the share of each round's reads within the reader's planted cluster, indexed by round.

    Args:
        edges: the edges table.
        truth: the planted cluster of each client, or that by round; readers of which it is unknown
            are not counted.
    """
    if not isinstance(truth, PlantedPhases):
        truth = PlantedPhases(np.zeros(1, np.int64), truth[None])
    index, reader, read = _select_peer_reads(edges)
    own = truth.find(index, reader)
    known = own >= 0
    same = own[known] == truth.find(index[known], read[known])
    # `place` is the index of each read's round among the rounds.
    rounds, place, pulls = np.unique(index[known], return_inverse=True, return_counts=True)
    inside = np.bincount(place, weights=same, minlength=len(rounds))
    return pd.Series(inside / pulls, index=rounds, dtype=float, name="within")


def within_share_of_groups(metrics: pd.DataFrame, truth: PlantedPhases) -> pd.Series:
    """Return the share of each round's pairs of clients in one group that have one planted cluster.

    A method found the groups itself, and clients of one share a model. It says of them what
    `within_share` says of reads.

    Args:
        metrics: the metrics table.
        truth: the planted cluster of each client by round; as in `within_share`, a client of which
            it is unknown is outside the clusters of others, and its own pairs are not counted.

    Returns:
        By round, for those in which a method reported groups; NaN where no two clients share one.
    """
    value = metrics["value"].to_numpy(float)
    labeled = (metrics["split"] == "train") & (metrics["metric"] == LABEL.name)
    chosen = labeled.to_numpy() & np.isfinite(value)
    index = metrics["round"].to_numpy(np.int64)[chosen]
    planted = truth.find(index, metrics["client"].to_numpy(np.int64)[chosen])
    rounds, place = np.unique(index, return_inverse=True)

    known = planted >= 0
    group = np.stack([place, value[chosen].astype(np.int64)])
    found, at, sizes = np.unique(group, axis=1, return_inverse=True, return_counts=True)
    # Ordered pairs, as a reader and a client that it reads: the cluster of the first is known.
    readers = np.bincount(at.ravel(), weights=known, minlength=len(sizes))
    pairs = np.bincount(found[0], weights=readers * (sizes - 1), minlength=len(rounds))
    same = np.concatenate([group, planted[None]])[:, known]
    found, sizes = np.unique(same, axis=1, return_counts=True)
    inside = np.bincount(found[0], weights=sizes * (sizes - 1), minlength=len(rounds))
    share = np.full(len(rounds), np.nan)
    np.divide(inside, pairs, out=share, where=pairs > 0)
    return pd.Series(share, index=rounds, dtype=float, name="within")


def expected_share(truth: Int[np.ndarray, " population"]) -> float:
    r"""Within-cluster share of random reads: $\sum_c n_c (n_c - 1) / (k (K - 1))$.

    Readers are the $k$ of $K$ clients whose planted cluster is known.

    Example:
        >>> expected_share(np.repeat([0, 1, 2, 3], 25)).__round__(3)
        0.242
    """
    sizes = np.unique(truth[truth >= 0], return_counts=True)[1]
    pairs = sizes.sum() * (len(truth) - 1)
    return float((sizes * (sizes - 1)).sum() / pairs) if pairs else 0.0


def rounds_to_discovery(
    edges: pd.DataFrame,
    truth: Int[np.ndarray, " population"],
    *,
    absent: Sequence[int] | Int[np.ndarray, " absent"] = (),
    share: float = 0.8,
    window: int = 5,
) -> Float[np.ndarray, " population"]:
    r"""Round in which each client has discovered its planted cluster.

    Of its reads in the last `window` active rounds ($m_t$ in round $t$), $a$ are within the
    client's cluster; random peers give $c = \sum_t m_t (n_c - 1) / (K - 1)$ on average, and at most
    $b = \sum_t \min(m_t, n_c - 1)$ are possible; $K$ and $n_c$ count clients that can be read. It
    has discovered its cluster in the first round with $a - c \ge s (b - c)$, so that chance in a
    large cluster does not count as discovery, and a small cluster can still be discovered.

    Args:
        edges: the edges table.
        truth: the planted cluster of each client.
        absent: ids of clients that were in no round, such as clients that joined late.
        share: the share $s$ of the way from chance to the maximum that counts as discovery, in (0,
            1].
        window: number of active rounds that are counted together, at least 1.

    Returns:
        The round per client; NaN for a client that never discovers its cluster, such as one that is
        alone in it, reads all others, is active in fewer than `window` rounds, or has no known
        cluster.
    """
    require(0 < share <= 1, "share", share, "a number above 0 and at most 1")
    require(window >= 1, "window", window, "a number of rounds, 1 or more")
    found = np.full(len(truth), np.nan)
    index, reader, read = _select_peer_reads(edges)
    known = truth[reader] >= 0
    index, reader, read = index[known], reader[known], read[known]
    if not len(index):
        return found
    # Sorted by reader, then by round: each (reader, round) is one contiguous block.
    order = np.lexsort((index, reader))
    inside = (truth[reader] == truth[read])[order]
    # Where a block begins: reader or round differs from the row before.
    starts = np.flatnonzero(np.diff(reader[order], prepend=-1) | np.diff(index[order], prepend=-1))
    client, rounds = reader[order][starts], index[order][starts]
    pulls = np.diff(starts, append=len(order))
    right = np.add.reduceat(inside.astype(np.int64), starts)
    there = np.delete(truth, np.asarray(absent, np.int64))
    others = np.bincount(there[there >= 0])[truth[client]] - 1
    chance, best = pulls * others / (len(there) - 1), np.minimum(pulls, others)
    # Prefix sums with a zero before them: the sum over a window is a difference of two entries.
    reached = np.concatenate([[0.0], (right - chance).cumsum()])
    needed = np.concatenate([[0.0], (share * (best - chance)).cumsum()])
    gained, wanted = reached[window:] - reached[:-window], needed[window:] - needed[:-window]
    last = np.arange(window - 1, len(client))  # block of a client that ends each of these windows
    # A window is of one client; 1e-9 takes up rounding; one in which nothing above chance is
    # possible never counts.
    own = client[last] == client[last - window + 1]
    done = last[own & (wanted > 1e-9) & (gained >= wanted - 1e-9)]
    # The first such window of each client.
    who, where = np.unique(client[done], return_index=True)
    found[who] = rounds[done[where]]
    return found


def find_communities(
    counts: Num[np.ndarray, "population population"] | sparse.csr_array,
) -> Int[np.ndarray, " population"]:
    """Group clients that read each other often; the number of groups is found as well.

    Spectral clustering of the symmetrized counts, with the number of groups from 1 to 20 that has
    the highest modularity (the search ends after four numbers without improvement); deterministic.
    A client without reads joins the nearest group. Above `WHOLE_SPECTRUM` clients the leading
    eigenvectors are found by Lanczos iteration, to a thousandth; above `MOST_ROWS` in single
    precision, and the centers of the groups from a random sample of so many clients.

    Args:
        counts: how often each client read each other, as `count_reads` or `count_reads_sparse`
            returns.

    Returns:
        A label per client, numbered from 0 in order of appearance.

    References:
        Ng, Jordan & Weiss, On spectral clustering, 2001.
        Newman, Modularity and community structure, 2006.
    """
    from threadpoolctl import threadpool_limits

    # On busy cores several threads take several times as long as one; and sums are those of one.
    with threadpool_limits(1):
        return _find_communities(counts)


def _find_communities(
    counts: Num[np.ndarray, "population population"] | sparse.csr_array,
) -> Int[np.ndarray, " population"]:
    from sklearn.cluster import KMeans

    weights: Any = sparse.csr_array(counts, dtype=float)
    # Reads in both directions count alike; twice the diagonal is removed, so that no client is its
    # own neighbor.
    weights = weights + weights.T - sparse.diags_array(2 * weights.diagonal())
    size = len(weights.diagonal())
    # `eigh` takes dense matrices.
    if size <= WHOLE_SPECTRUM:
        weights = weights.toarray()
    degree = weights.sum(1)
    best = np.zeros(size, dtype=np.int64)
    if size < 3 or not degree.any():
        return best
    vectors = _compute_eigenvectors(
        weights, np.divide(1, np.sqrt(degree), out=np.zeros(size), where=degree > 0)
    )
    chosen = np.arange(size)
    if size > MOST_ROWS:
        chosen = np.sort(np.random.default_rng(0).choice(size, MOST_ROWS, replace=False))
    quality, worse = 0.0, 0
    for groups in range(2, min(MOST_COMMUNITIES, size - 1, vectors.shape[1]) + 1):
        rows = vectors[:, :groups]
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        # Clients without reads keep a row of zeros.
        rows = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 1e-12)
        # k-means warns when there are fewer different points than groups.
        sample = rows[chosen]
        if len(np.unique(sample.round(9), axis=0)) < groups:
            continue
        means = KMeans(groups, n_init="auto", random_state=0).fit(sample)
        found = means.labels_ if len(sample) == size else means.predict(rows)
        labels = np.asarray(found, dtype=np.int64)
        score = modularity(weights, labels)
        # Rounding alone is no improvement.
        if score > quality + 1e-9:
            best, quality, worse = labels, score, 0
        else:
            worse += 1
        if worse == PATIENCE:
            break
    # Numbers by first appearance do not depend on how k-means numbers its groups.
    appearance = number_items(dict.fromkeys(best.tolist()))
    return np.array([appearance[label] for label in best.tolist()], dtype=np.int64)


def _compute_eigenvectors(
    weights: Num[np.ndarray, "population population"] | sparse.csr_array,
    scale: Float[np.ndarray, " population"],
) -> Float[np.ndarray, "population vectors"]:
    """Return eigenvectors of the normalized weights, that of the largest eigenvalue first."""
    if isinstance(weights, np.ndarray):
        # `eigh` has eigenvalues in ascending order.
        return np.linalg.eigh(scale[:, None] * weights * scale)[1][:, ::-1]
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    normalized = sparse.diags_array(scale) @ weights @ sparse.diags_array(scale)
    # ARPACK draws a random start otherwise, and results would differ between calls.
    start = np.random.default_rng(0).normal(size=len(scale))
    if len(scale) > MOST_ROWS:
        # Most of the time is taken by the memory that the iteration reads.
        normalized, start = normalized.astype(np.float32), start.astype(np.float32)
    try:
        values, vectors = eigsh(
            normalized,
            MOST_COMMUNITIES,
            which="LA",
            v0=start,
            tol=_TOLERANCE,  # pyright: ignore[reportArgumentType]
            maxiter=max(4, min(_RESTARTS, _ENTRIES // max(1, weights.nnz))),
        )
    # The eigenvalues that stand out of the bulk have converged; the others carry no structure.
    except ArpackNoConvergence as error:
        values, vectors = error.eigenvalues, error.eigenvectors
    return vectors[:, np.argsort(-values)]


def modularity(
    weights: Num[np.ndarray, "population population"] | sparse.csr_array,
    labels: Int[np.ndarray, " population"],
) -> float:
    r"""Return Newman's modularity of a grouping, below 1.

    It is $\frac{1}{2m} \sum_{ij} (w_{ij} - d_i d_j / 2m) [c_i = c_j]$.

    Args:
        weights: a symmetric matrix of non-negative weights, with at least one above zero.
        labels: the group of each client.
    """
    member = (labels[:, None] == np.unique(labels)).astype(float)
    total = weights.sum()
    inside = (member * (weights @ member)).sum(0)
    degree = member.T @ weights.sum(1)
    return float((inside / total - (degree / total) ** 2).sum())


def compare_partitions(
    label: Int[np.ndarray, " population"], truth: Int[np.ndarray, " population"]
) -> dict[str, float]:
    """Compare found groups with the planted clusters; the names of the groups do not matter.

    Returns:
        `ari`, the adjusted Rand index (1 the same partition, about 0 for chance, can be negative),
        and `nmi`, the normalized mutual information (arithmetic mean), in [0, 1].

    Example:
        >>> compare_partitions(np.array([1, 1, 0, 0]), np.array([0, 0, 1, 1]))
        {'ari': 1.0, 'nmi': 1.0}
    """
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    return {
        "ari": float(adjusted_rand_score(truth, label)),
        "nmi": float(normalized_mutual_info_score(truth, label)),
    }


def find_top_peers(
    counts: Any, clients: Int[np.ndarray, " clients"], most: int
) -> tuple[Int[np.ndarray, "clients peers"], Int[np.ndarray, "clients peers"]]:
    """Find the peers that some clients read most, and how often: most read first, ties by id.

    Args:
        counts: a sparse matrix, as `count_reads_sparse` returns.
        clients: whose peers are found.
        most: peers of a client; a client that read fewer has 0 times in its last places.
    """
    peers, times = np.zeros((2, len(clients), min(most, counts.shape[0])), dtype=np.int64)
    for row, client in enumerate(clients):
        # The entries of one row of a CSR matrix.
        own = slice(counts.indptr[client], counts.indptr[client + 1])
        read, count = np.asarray(counts.indices[own]), np.asarray(counts.data[own])
        order = np.lexsort((read, -count))[: peers.shape[1]]
        peers[row, : len(order)] = read[order]
        times[row, : len(order)] = count[order]
    return peers, times


def count_readers(
    counts: Num[np.ndarray, "population population"] | sparse.csr_array,
) -> Num[np.ndarray, " population"]:
    """Count how often each client was read, from the counts of `count_reads`."""
    return counts.sum(0)


def gini(values: Num[np.ndarray, " clients"]) -> float:
    """Return the Gini index: 0 when equal, (n - 1) / n when one client has everything.

    Example:
        >>> gini(np.array([0, 0, 0, 8]))
        0.75
    """
    total = float(values.sum())
    if not total:
        return 0.0
    place = np.arange(1, len(values) + 1)
    return float(
        2 * (place * np.sort(values)).sum() / (len(values) * total)
        - (len(values) + 1) / len(values)
    )
