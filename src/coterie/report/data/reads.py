"""Which models each client used over time: heatmap frames, within-cluster shares, discovery, communities, labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse

from coterie.functional.metrics import LABEL
from coterie.report.data.packing import MOST_CLIENTS, dense, over_seeds, pack, sampled, thin
from coterie.results import graph
from coterie.results.summary import StoredRun

MOST_POINTS = 300  # rounds of a curve
MOST_CELLS = 240  # side of a heatmap
MOST_FRAMES = 60  # steps of the slider
FRAME_BUDGET = 6_000_000  # cells of all heatmaps together
TOP_PEERS = 8  # peers named per client
WINDOWS = 6  # windows in which communities are looked for; two above 300 clients
LABEL_POINTS = 120  # rounds of found labels


def cells(
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


def reads(
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
    cell = cells(cluster)
    side, last = int(cell.max()) + 1, max(run.rounds for _, runs in active for run in runs)
    frames = max(1, min(last, MOST_FRAMES, FRAME_BUDGET // (side * side * len(active))))
    ends = np.unique(np.ceil(np.arange(1, frames + 1) * last / frames).astype(np.int64))
    shown = sampled(cluster)
    return {
        "cell": cell.tolist(),
        "ends": ends.tolist(),
        "expected": graph.expected_share(cluster) if cluster.max() > 0 else None,
        "methods": [
            {"method": place, **_method_reads(runs, cluster, cell, ends, shown)}
            for place, runs in active
        ],
    }


def _method_reads(
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
        whole = whole + graph.counted(table, population)
    shares = [graph.within_share(run.edges, cluster) for run in runs]
    rounds = np.unique(np.concatenate([share.index.to_numpy(np.int64) for share in shares]))
    rounds = rounds[thin(len(rounds), MOST_POINTS)]
    stacked = np.array([share.reindex(rounds).to_numpy(float) for share in shares])
    mean, spread = over_seeds(stacked)
    found = np.concatenate([graph.rounds_to_discovery(run.edges, cluster) for run in runs])
    groups = graph.communities(whole)
    windows = WINDOWS if population <= 300 else 2
    window_ends = ends[
        thin(len(ends), windows + 1)[1:] if len(ends) > windows else thin(len(ends), windows)
    ]
    peers, times = _top_peers(whole, clients)
    return {
        "counts": pack(counts, "u8" if counts.max() < 256 else "u16"),
        "rounds": rounds.tolist(),
        "share": pack(mean, "q16"),
        "share_std": pack(spread, "q16"),
        "found": np.sort(found[np.isfinite(found)]).astype(int).tolist(),
        "asked": len(found),
        "communities": groups.tolist(),
        "agreement": graph.agreement(groups, cluster),
        "windows": _windows(runs, cluster, window_ends),
        "gini": graph.gini(graph.in_degree(whole)),
        # a float holds an id to 2^24
        "peers": pack(peers, "u16" if population <= 65536 else "f32"),
        "times": pack(times, "u16"),
    }


def _top_peers(whole: Any, clients: Int[np.ndarray, " clients"]) -> tuple[np.ndarray, np.ndarray]:
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


def _windows(
    runs: Sequence[StoredRun], cluster: np.ndarray, ends: np.ndarray
) -> list[dict[str, Any]]:
    """How well communities of the reads of each window agree with the planted clusters, all seeds together."""
    out, start = [], 0
    for end in ends:
        counts = sparse.csr_array((len(cluster), len(cluster)), dtype=np.int64)
        for run in runs:
            index = run.edges["round"].to_numpy(np.int64)
            counts = counts + graph.counted(
                run.edges.loc[(index >= start) & (index < end)], len(cluster)
            )
        if counts.nnz:
            found = graph.communities(counts)
            number = int(found.max()) + 1
            out.append({"round": int(end) - 1, "groups": number, **graph.agreement(found, cluster)})
        start = end
    return out


def labels(
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
        found = [dense(run, "train", LABEL.name) for run in runs]
        tables = [(rounds, values) for rounds, values in found if len(rounds)]
        if not tables:
            continue
        rounds = tables[0][0][thin(len(tables[0][0]), LABEL_POINTS)]
        scores = []
        for own, values in tables:
            at = np.clip(np.searchsorted(own, rounds, side="right") - 1, 0, len(own) - 1)
            scores.append([_label_scores(row, cluster) for row in values[at]])
        mean, _ = over_seeds(np.array(scores))
        own, values = tables[0]
        shown = values[
            np.searchsorted(own, rounds if len(cluster) <= MOST_CLIENTS else rounds[-1:])
        ]
        out.append(
            {
                "method": place,
                "rounds": rounds.tolist(),
                **{name: mean[:, i].tolist() for i, name in enumerate(("ari", "nmi", "groups"))},
                "label": pack(np.where(np.isfinite(shown), shown, 65535).astype(np.int64), "u16"),
            }
        )
    return out


def _label_scores(
    label: Float[np.ndarray, " population"], cluster: np.ndarray
) -> tuple[float, float, float]:
    known = np.isfinite(label)
    if not known.any():
        return np.nan, np.nan, np.nan
    whole = label[known].astype(np.int64)
    score = graph.agreement(whole, cluster[known])
    return score["ari"], score["nmi"], float(len(np.unique(whole)))
