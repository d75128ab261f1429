"""Which models each client used over time: heatmaps, within-cluster shares, communities, labels."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy import sparse

from coterie.functional.metrics import LABEL
from coterie.report.data.packing import (
    MOST_CLIENTS,
    build_dense_table,
    nan_mean_std,
    pack_array,
    pad_clients,
    sample_clients,
    thin_indices,
)
from coterie.results import graph
from coterie.results.planted import MOST_CLUSTERS, PlantedPhases
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
    """Assign each client to a cell of a heatmap, in order of cluster and id.

    A cell holds one client while the population fits; else equally many of one cluster, or of
    neighboring ones where there are more than `MOST_CLUSTERS`.
    """
    # The last key is the main one: by cluster, then by id.
    order = np.lexsort((np.arange(len(cluster)), cluster))
    # Clients in a cell, rounded up.
    size = -(-len(cluster) // most)
    if len(np.unique(cluster)) > MOST_CLUSTERS:
        cell = np.empty(len(cluster), dtype=np.int64)
        cell[order] = np.arange(len(cluster)) // size
        return cell
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
    """Build reads over time, and when clients found their cluster; None without reads."""
    active = {}
    for place, runs in enumerate(groups.values()):
        if any(len(run.edges) for run in runs):
            active[place] = runs
    if not active:
        return None
    cell = assign_cells(cluster)
    side = int(cell.max()) + 1
    last = max(run.num_rounds for run in chain.from_iterable(active.values()))
    # Fewer frames for large heatmaps, so that the page stays small.
    frames = max(1, min(last, MOST_FRAMES, FRAME_BUDGET // (side * side * len(active))))
    # The round before which each frame ends; at least one round each.
    ends = np.unique(np.ceil(np.arange(1, frames + 1) * last / frames).astype(np.int64))
    shown = sample_clients(cluster)
    methods = []
    for place, runs in active.items():
        methods.append({"method": place, **_build_method_reads(runs, cluster, cell, ends, shown)})
    # Who joined at the end is read by nobody.
    there = np.delete(cluster, next(iter(active.values()))[0].late_clients)
    expected = graph.expected_share(there) if cluster.max() > 0 else None
    return {"cell": cell.tolist(), "ends": ends.tolist(), "expected": expected, "methods": methods}


def _build_method_reads(
    runs: Sequence[StoredRun],
    cluster: np.ndarray,
    cell: np.ndarray,
    ends: np.ndarray,
    clients: np.ndarray,
) -> dict[str, Any]:
    population, side = len(cluster), int(cell.max()) + 1
    # Clusters are those at the end, where the data change over the rounds. What is compared with
    # them are reads from the last change on.
    changed = max(run.planted_phases.last_change for run in runs)
    counts = np.zeros((len(ends), side, side), dtype=np.int64)
    whole = sparse.csr_array((population, population), dtype=np.int64)
    for run in runs:
        table = run.edges.loc[(run.edges["purpose"] != "missing").to_numpy()]
        reader, read = table["reader"].to_numpy(np.int64), table["read"].to_numpy(np.int64)
        frame = np.searchsorted(ends, table["round"].to_numpy(np.int64), side="right")
        # One number for (frame, row, column): one bincount fills the whole array.
        code = (frame * side + cell[reader]) * side + cell[read]
        counts += np.bincount(code, minlength=counts.size).reshape(counts.shape)
        whole = whole + graph.count_reads_sparse(table, population)
    latest = [run.edges.loc[(run.edges["round"] >= changed).to_numpy()] for run in runs]
    since = whole
    if changed:
        since = sparse.csr_array((population, population), dtype=np.int64)
        for table in latest:
            since = since + graph.count_reads_sparse(table, population)
    shares = [graph.within_share(run.edges, _pad_phases(run, cluster)) for run in runs]
    rounds = np.unique(np.concatenate([share.index.to_numpy(np.int64) for share in shares]))
    rounds = rounds[thin_indices(len(rounds), MOST_POINTS)]
    stacked = np.array([share.reindex(rounds).to_numpy(float) for share in shares])
    mean, spread = nan_mean_std(stacked)
    found = np.concatenate(
        [_find_discovery(run, table, cluster) for run, table in zip(runs, latest, strict=True)]
    )
    groups = graph.find_communities(since)
    # A window holds a number for each pair of clients: many of large populations make a huge page.
    windows = WINDOWS if population <= 300 else 2
    at = thin_indices(len(ends), windows)
    if len(ends) > windows:
        # The first of evenly spread ends would be the first round alone.
        at = thin_indices(len(ends), windows + 1)[1:]
    window_ends = ends[at]
    peers, times = graph.find_top_peers(whole, clients, TOP_PEERS)
    # The smallest types that hold them; a float holds an id up to 2^24.
    count_type = "u8" if counts.max() < 256 else "u16"
    id_type = "u16" if population <= 65536 else "f32"
    return {
        "counts": pack_array(counts, count_type),
        "rounds": rounds.tolist(),
        "share": pack_array(mean, "q16"),
        "share_std": pack_array(spread, "q16"),
        "found": np.sort(found[np.isfinite(found)]).astype(int).tolist(),
        "asked": len(found),
        "communities": groups.tolist(),
        "agreement": graph.compare_partitions(groups, cluster),
        # Without planted clusters nothing is compared with them.
        "windows": _score_windows(runs, cluster, window_ends) if cluster.max() > 0 else [],
        "gini": graph.gini(graph.count_readers(whole)),
        "peers": pack_array(peers, id_type),
        "times": pack_array(np.minimum(times, 65535), "u16"),  # the largest number of the type
    }


def _find_discovery(
    run: StoredRun, edges: pd.DataFrame, cluster: Int[np.ndarray, " population"]
) -> Float[np.ndarray, " looking"]:
    """Return when each client found its cluster, of clients that were in rounds and have one."""
    found = graph.rounds_to_discovery(edges, cluster, absent=run.late_clients)
    looking = cluster >= 0
    looking[run.late_clients] = False
    return found[looking]


def _pad_phases(run: StoredRun, cluster: Int[np.ndarray, " population"]) -> PlantedPhases:
    """Return the clusters of a run by round, for a population in which runs have more clients."""
    phases = run.planted_phases
    if len(phases.firsts) == 1:
        return PlantedPhases(phases.firsts, cluster[None])
    padded = np.tile(cluster, (len(phases.firsts), 1))
    padded[:, : phases.clusters.shape[1]] = phases.clusters
    return PlantedPhases(phases.firsts, padded)


def _score_windows(
    runs: Sequence[StoredRun], cluster: np.ndarray, ends: np.ndarray
) -> list[dict[str, Any]]:
    """Score how well communities of each window's reads agree with planted clusters."""
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
            planted = _pad_phases(runs[0], cluster).select(int(end) - 1)
            out.append(
                {
                    "round": int(end) - 1,
                    "groups": number,
                    **graph.compare_partitions(found, planted),
                }
            )
        start = end
    return out


def build_labels(
    groups: dict[str, list[StoredRun]], cluster: Int[np.ndarray, " population"]
) -> list[dict[str, Any]]:
    """Build the clusters that methods found themselves, and their agreement by round.

    Returns:
        An entry per method that reports labels: `rounds`, `ari`, `nmi` and `groups` (means over
        seeds), and `label`, the labels of the first seed as rounds x clients, 65535 for a client
        without one; of a population above `MOST_CLIENTS` the labels of the last round alone.
    """
    out = []
    for place, runs in enumerate(groups.values()):
        tables = []
        for run in runs:
            rounds, values = build_dense_table(run, "train", LABEL.name)
            if len(rounds):
                # The page has a place for each client that any seed has.
                values = pad_clients(values, len(cluster))
                tables.append((rounds, values, _pad_phases(run, cluster)))
        if not tables:
            continue
        first_rounds, first_values, _ = tables[0]
        rounds = first_rounds[thin_indices(len(first_rounds), LABEL_POINTS)]
        scores = []
        for own, values, planted in tables:
            # The last own round at or before each shown one, at least the first.
            at = np.clip(np.searchsorted(own, rounds, side="right") - 1, 0, len(own) - 1)
            scores.append(
                [
                    _score_labels(row, planted.select(int(number)))
                    for row, number in zip(values[at], own[at], strict=True)
                ]
            )
        ari, nmi, number = nan_mean_std(np.array(scores))[0].T.tolist()
        # Of a large population only the last labels are shown: the page must stay small.
        shown_rounds = rounds if len(cluster) <= MOST_CLIENTS else rounds[-1:]
        shown = first_values[np.searchsorted(first_rounds, shown_rounds)]
        # 65535 in "u16" stands for no label.
        labels = np.where(np.isfinite(shown), shown, 65535).astype(np.int64)
        out.append(
            {
                "method": place,
                "rounds": rounds.tolist(),
                "ari": ari,
                "nmi": nmi,
                "groups": number,
                "label": pack_array(labels, "u16"),
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
