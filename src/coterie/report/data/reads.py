"""Which models each client used over time: heatmap frames, within-cluster shares, discovery, communities, labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse

from coterie.functional.metrics import LABEL
from coterie.report.data.packing import (
    MOST_CLIENTS,
    build_dense_table,
    nan_mean_std,
    pack_array,
    sample_clients,
    thin_indices,
)
from coterie.results import graph
from coterie.results.stored_runs import StoredRun

MOST_POINTS = 300  # rounds of a curve
MOST_CELLS = 240  # side of a heatmap
MOST_FRAMES = 60  # steps of the slider
FRAME_BUDGET = 6_000_000  # cells of all heatmaps together
TOP_PEERS = 8  # peers named per client
WINDOWS = 6  # windows in which communities are looked for; two above 300 clients
LABEL_POINTS = 120  # rounds of found labels


def assign_cells(
    cluster: Int[np.ndarray, " population"], most: int = MOST_CELLS
) -> Int[np.ndarray, " population"]:
    """The cell of a heatmap in which each client lies: clients in order of cluster and id, neighbors together.

    A cell holds one client while the population fits; else equally many of one cluster.
    """
    order = np.lexsort((np.arange(len(cluster)), cluster))
    size = -(-len(cluster) // most)
    cell, place, last, inside = np.empty(len(cluster), dtype=np.int64), -1, None, 0
    for client in order:
        if cluster[client] != last or inside == size:
            place, last, inside = place + 1, cluster[client], 0
        cell[client] = place
        inside += 1
    return cell


def build_reads(
    groups: dict[str, list[StoredRun]], cluster: Int[np.ndarray, " population"]
) -> dict[str, Any] | None:
    """Reads over time, within-cluster share, and when clients found their cluster; None without any read."""
    active = [
        (place, runs)
        for place, runs in enumerate(groups.values())
        if any(len(run.edges) for run in runs)
    ]
    if not active:
        return None
    cell = assign_cells(cluster)
    side, last = int(cell.max()) + 1, max(run.num_rounds for _, runs in active for run in runs)
    frames = max(1, min(last, MOST_FRAMES, FRAME_BUDGET // (side * side * len(active))))
    ends = np.unique(np.ceil(np.arange(1, frames + 1) * last / frames).astype(np.int64))
    shown = sample_clients(cluster)
    return {
        "cell": cell.tolist(),
        "ends": ends.tolist(),
        "expected": graph.expected_share(cluster) if cluster.max() > 0 else None,
        "methods": [
            {"method": place, **_build_method_reads(runs, cluster, cell, ends, shown)}
            for place, runs in active
        ],
    }


def _build_method_reads(
    runs: Sequence[StoredRun],
    cluster: np.ndarray,
    cell: np.ndarray,
    ends: np.ndarray,
    clients: np.ndarray,
) -> dict[str, Any]:
    population, side = len(cluster), int(cell.max()) + 1
    counts = np.zeros((len(ends), side, side), dtype=np.int64)
    whole = sparse.csr_array((population, population), dtype=np.int64)
    for run in runs:
        table = run.edges.loc[(run.edges["purpose"] != "missing").to_numpy()]
        reader, read = table["reader"].to_numpy(np.int64), table["read"].to_numpy(np.int64)
        frame = np.searchsorted(ends, table["round"].to_numpy(np.int64), side="right")
        code = (frame * side + cell[reader]) * side + cell[read]
        counts += np.bincount(code, minlength=counts.size).reshape(counts.shape)
        whole = whole + graph.count_reads_sparse(table, population)
    shares = [graph.within_share(run.edges, cluster) for run in runs]
    rounds = np.unique(np.concatenate([share.index.to_numpy(np.int64) for share in shares]))
    rounds = rounds[thin_indices(len(rounds), MOST_POINTS)]
    stacked = np.array([share.reindex(rounds).to_numpy(float) for share in shares])
    mean, spread = nan_mean_std(stacked)
    found = np.concatenate([graph.rounds_to_discovery(run.edges, cluster) for run in runs])
    groups = graph.find_communities(whole)
    windows = WINDOWS if population <= 300 else 2
    window_ends = ends[
        thin_indices(len(ends), windows + 1)[1:]
        if len(ends) > windows
        else thin_indices(len(ends), windows)
    ]
    peers, times = _find_top_peers(whole, clients)
    return {
        "counts": pack_array(counts, "u8" if counts.max() < 256 else "u16"),
        "rounds": rounds.tolist(),
        "share": pack_array(mean, "q16"),
        "share_std": pack_array(spread, "q16"),
        "found": np.sort(found[np.isfinite(found)]).astype(int).tolist(),
        "asked": len(found),
        "communities": groups.tolist(),
        "agreement": graph.compare_partitions(groups, cluster),
        "windows": _score_windows(runs, cluster, window_ends),
        "gini": graph.gini(graph.count_readers(whole)),
        # a float holds an id to 2^24
        "peers": pack_array(peers, "u16" if population <= 65536 else "f32"),
        "times": pack_array(times, "u16"),
    }


def _find_top_peers(
    whole: Any, clients: Int[np.ndarray, " clients"]
) -> tuple[np.ndarray, np.ndarray]:
    """The peers that some clients read most, and how often; places that nobody fills have a count of 0."""
    peers, times = np.zeros((2, len(clients), min(TOP_PEERS, whole.shape[0])), dtype=np.int64)
    for row, client in enumerate(clients):
        own = slice(whole.indptr[client], whole.indptr[client + 1])
        read, count = np.asarray(whole.indices[own]), np.asarray(whole.data[own])
        order = np.lexsort((read, -count))[: peers.shape[1]]
        peers[row, : len(order)], times[row, : len(order)] = (
            read[order],
            np.minimum(count[order], 65535),
        )
    return peers, times


def _score_windows(
    runs: Sequence[StoredRun], cluster: np.ndarray, ends: np.ndarray
) -> list[dict[str, Any]]:
    """How well communities of the reads of each window agree with the planted clusters, all seeds together."""
    out, start = [], 0
    for end in ends:
        counts = sparse.csr_array((len(cluster), len(cluster)), dtype=np.int64)
        for run in runs:
            index = run.edges["round"].to_numpy(np.int64)
            counts = counts + graph.count_reads_sparse(
                run.edges.loc[(index >= start) & (index < end)], len(cluster)
            )
        if counts.nnz:
            found = graph.find_communities(counts)
            number = int(found.max()) + 1
            out.append(
                {
                    "round": int(end) - 1,
                    "groups": number,
                    **graph.compare_partitions(found, cluster),
                }
            )
        start = end
    return out


def build_labels(
    groups: dict[str, list[StoredRun]], cluster: Int[np.ndarray, " population"]
) -> list[dict[str, Any]]:
    """The clusters that methods with labels of their own found: agreement over rounds, and the labels of one seed.

    Returns:
        An entry per method that reports labels: `rounds`, `ari`, `nmi` and `groups` (means over
        seeds), and `label`, those of the first seed as rounds x clients, 65535 where a client had
        none yet; of a population above `MOST_CLIENTS` those of the last round alone.
    """
    out = []
    for place, runs in enumerate(groups.values()):
        found = [build_dense_table(run, "train", LABEL.name) for run in runs]
        tables = [(rounds, values) for rounds, values in found if len(rounds)]
        if not tables:
            continue
        rounds = tables[0][0][thin_indices(len(tables[0][0]), LABEL_POINTS)]
        scores = []
        for own, values in tables:
            at = np.clip(np.searchsorted(own, rounds, side="right") - 1, 0, len(own) - 1)
            scores.append([_score_labels(row, cluster) for row in values[at]])
        mean, _ = nan_mean_std(np.array(scores))
        own, values = tables[0]
        shown = values[
            np.searchsorted(own, rounds if len(cluster) <= MOST_CLIENTS else rounds[-1:])
        ]
        out.append(
            {
                "method": place,
                "rounds": rounds.tolist(),
                **{name: mean[:, i].tolist() for i, name in enumerate(("ari", "nmi", "groups"))},
                "label": pack_array(
                    np.where(np.isfinite(shown), shown, 65535).astype(np.int64), "u16"
                ),
            }
        )
    return out


def _score_labels(
    label: Float[np.ndarray, " population"], cluster: np.ndarray
) -> tuple[float, float, float]:
    known = np.isfinite(label)
    if not known.any():
        return np.nan, np.nan, np.nan
    whole = label[known].astype(np.int64)
    score = graph.compare_partitions(whole, cluster[known])
    return score["ari"], score["nmi"], float(len(np.unique(whole)))
