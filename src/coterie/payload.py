"""What the report and the live page draw: stored runs reduced to one JSON document of bounded size.

Long arrays are quantised, compressed and written as text (`pack`), and what would grow with clients x clients x rounds
is binned in time and, for large populations, over neighbouring clients of one cluster. A page therefore stays small
however long the run was; the parquet files keep every value.
"""

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Num

from coterie import graph
from coterie.summary import (
    FEDERATION,
    HIGHER_IS_BETTER,
    Problem,
    StoredRun,
    by_label,
    client_gains,
    cluster_names,
    gains_of,
    main_metric,
    plain,
    summary_of,
)

NO_CURVE = frozenset({"label", "diverged", "passes", "extra_models", "extra_floats"})
MOST_POINTS = 300  # rounds of a curve over clients
CLIENT_POINTS = 80  # rounds of the curve of one client
MOST_CELLS = 240  # side of a heatmap
MOST_FRAMES = 60  # steps of the slider
FRAME_BUDGET = 6_000_000  # cells of all heatmaps together
TOP_PEERS = 8  # peers named per client


def payload(runs: Sequence[StoredRun], problems: Sequence[Problem] = (), folder: Path | None = None) -> dict[str, Any]:
    """Reduce the runs of one study to what the page draws.

    Args:
        runs: at least one run.
        problems: folders that could not be read; the page names them.
        folder: the study's folder, where federation.json may lie.

    Returns:
        Plain values for JSON, without NaN.
    """
    folder = folder or runs[0].folder.parent.parent
    metric = main_metric(runs)
    truth = runs[0].clients
    population = int(truth.index.to_numpy().max()) + 1
    cluster = np.full(population, -1)
    cluster[truth.index] = truth.to_numpy()
    names = cluster_names(folder, (int(c) for c in np.unique(cluster) if c >= 0))
    groups = by_label(runs)
    alike = {label: [run for run in group if run.clients.equals(truth)] for label, group in groups.items()}
    path = folder / FEDERATION
    return plain(
        {
            "study": runs[0].study,
            "metric": metric,
            "higher": metric in HIGHER_IS_BETTER,
            "methods": [_method(label, group) for label, group in groups.items()],
            "clusters": [{"id": c, "name": name, "size": int((cluster == c).sum())} for c, name in names.items()],
            "cluster": cluster.tolist(),
            "results": summary_of(runs, folder),
            "gains": gains_of(runs),
            "curves": curves(alike, cluster, list(names)),
            "reads": reads(alike, cluster),
            "clients": clients(alike, metric, population),
            "data": json.loads(path.read_text("utf-8")) if path.is_file() else None,
            "problems": [{"folder": problem.folder.name, "reason": problem.reason} for problem in problems],
        }
    )


def _method(label: str, group: Sequence[StoredRun]) -> dict[str, Any]:
    return {
        "label": label,
        "kind": group[0].kind,
        "settings": group[0].method,
        "runs": [
            {"seed": run.seed, "rounds": run.rounds, "of": run.config.get("rounds"), "finished": run.finished}
            for run in group
        ],
    }


def pack(values: Num[np.ndarray, "..."], kind: str) -> dict[str, Any]:
    """Write an array as text: "u8", "u16" and "f32" hold it as it is, "q16" puts floats on a grid of 65,535 steps.

    NaN survives in "f32" and "q16". The text is base64 of zlib of little-endian values in C order.

    Example:
        >>> pack(np.array([[0, 1]]), "u8")["shape"]
        [1, 2]
    """
    out: dict[str, Any] = {"kind": kind, "shape": list(values.shape)}
    if kind == "q16":
        finite = np.isfinite(values)
        low, high = (float(values[finite].min()), float(values[finite].max())) if finite.any() else (0.0, 0.0)
        step = (high - low) / 65534 or 1.0
        out |= {"low": low, "step": step}
        whole = np.where(finite, np.round((np.where(finite, values, low) - low) / step), 65535).astype("<u2")
    else:
        whole = values.astype({"u8": "u1", "u16": "<u2", "f32": "<f4"}[kind])
    out["text"] = base64.b64encode(zlib.compress(whole.tobytes(), 9)).decode()
    return out


def dense(
    run: StoredRun, split: str, metric: str, model: str = "current"
) -> tuple[Int[np.ndarray, " rounds"], Float[np.ndarray, "rounds clients"]]:
    """A metric as an array of rounds and clients; a client that was not active keeps its last value.

    Returns:
        The rounds that have a value (-1 is the warm-up), and the values; NaN before a client's first one.
    """
    table = run.metrics
    chosen = (table["split"] == split) & (table["metric"] == metric) & (table["model"] == model)
    rows = table.loc[chosen.to_numpy()]
    rounds, place = np.unique(rows["round"].to_numpy(np.int64), return_inverse=True)
    values = np.full((len(rounds), int(run.clients.index.to_numpy().max()) + 1), np.nan)
    values[place, rows["client"].to_numpy(np.int64)] = rows["value"].to_numpy(float)
    return rounds, pd.DataFrame(values).ffill().to_numpy()


def thin(count: int, most: int) -> Int[np.ndarray, " points"]:
    """At most `most` of `count` places, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def curves(groups: dict[str, list[StoredRun]], cluster: np.ndarray, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Learning curves: the mean over clients, over clusters and per cluster; mean and deviation over seeds.

    Returns:
        One entry per method, split and metric, with arrays of (2 + clusters) x rounds.
    """
    out = []
    members = [np.flatnonzero(cluster == c) for c in ids]
    for place, runs in enumerate(groups.values()):
        for split, metric in _recorded(runs):
            tables = [dense(run, split, metric) for run in runs]
            rounds = np.unique(np.concatenate([rounds for rounds, _ in tables]))
            if len(rounds) < 2:
                continue
            stacked = np.full((len(tables), 2 + len(members), len(rounds)), np.nan)
            for seed, (own, values) in enumerate(tables):
                at = np.searchsorted(rounds, own)
                per_cluster = [_mean(values[:, rows]) for rows in members]
                stacked[seed, 0, at] = _mean(values)
                for line, mean in enumerate(per_cluster):
                    stacked[seed, 2 + line, at] = mean
                if per_cluster:
                    stacked[seed, 1, at] = np.mean(per_cluster, axis=0)
            shown = thin(len(rounds), MOST_POINTS)
            whole = stacked[:, :, shown]
            mean, spread = _over_seeds(whole)
            out.append(
                {
                    "method": place, "split": split, "metric": metric, "rounds": rounds[shown].tolist(),
                    "mean": pack(mean, "q16"), "std": pack(spread, "q16"), "seeds": len(tables),
                }
            )  # fmt: skip
    return out


def _recorded(runs: Sequence[StoredRun]) -> list[tuple[str, str]]:
    """The (split, metric) pairs that were recorded round by round."""
    if not runs:
        return []
    table = runs[0].metrics
    names = table.loc[(table["model"] == "current").to_numpy(), ["split", "metric"]].drop_duplicates()
    found = [(str(split), str(metric)) for split, metric in zip(names["split"], names["metric"], strict=True)]
    found = [pair for pair in found if pair[1] not in NO_CURVE]
    return sorted(found, key=lambda pair: (("validation", "train", "test").index(pair[0]), pair[1] == "loss"))


def _mean(values: Float[np.ndarray, "rounds clients"]) -> Float[np.ndarray, " rounds"]:
    """Mean over the clients that have a value; NaN where none has."""
    known = np.isfinite(values)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, values, 0).sum(1) / np.maximum(count, 1), np.nan)


def _over_seeds(stacked: Float[np.ndarray, "*shape"]) -> tuple[Float[np.ndarray, "*rest"], Float[np.ndarray, "*rest"]]:
    """Mean and population deviation over the first axis, leaving out what is not there."""
    known = np.isfinite(stacked)
    count = np.maximum(known.sum(0), 1)
    mean = np.where(known, stacked, 0).sum(0) / count
    square = np.where(known, (stacked - mean) ** 2, 0).sum(0) / count
    some = known.any(0)
    return np.where(some, mean, np.nan), np.where(some, np.sqrt(square), np.nan)


def cells(cluster: Int[np.ndarray, " population"], most: int = MOST_CELLS) -> Int[np.ndarray, " population"]:
    """The cell of a heatmap in which each client lies: clients in order of cluster and id, neighbours together.

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


def reads(groups: dict[str, list[StoredRun]], cluster: Int[np.ndarray, " population"]) -> dict[str, Any] | None:
    """Who read whom over time, within-cluster share, and when clients found their cluster; None without any read."""
    active = [(place, runs) for place, runs in enumerate(groups.values()) if any(len(run.edges) for run in runs)]
    if not active:
        return None
    cell = cells(cluster)
    side, last = int(cell.max()) + 1, max(run.rounds for _, runs in active for run in runs)
    frames = max(1, min(last, MOST_FRAMES, FRAME_BUDGET // (side * side * len(active))))
    ends = np.unique(np.ceil(np.arange(1, frames + 1) * last / frames).astype(np.int64))
    return {
        "cell": cell.tolist(),
        "ends": ends.tolist(),
        "expected": graph.expected_share(cluster) if cluster.max() > 0 else None,
        "methods": [{"method": place, **_method_reads(runs, cluster, cell, ends)} for place, runs in active],
    }


def _method_reads(runs: Sequence[StoredRun], cluster: np.ndarray, cell: np.ndarray, ends: np.ndarray) -> dict[str, Any]:
    population, side = len(cluster), int(cell.max()) + 1
    counts = np.zeros((len(ends), side, side), dtype=np.int64)
    whole = np.zeros((population, population), dtype=np.int64)
    for run in runs:
        table = run.edges.loc[(run.edges["purpose"] != "missing").to_numpy()]
        reader, read = table["reader"].to_numpy(np.int64), table["read"].to_numpy(np.int64)
        frame = np.searchsorted(ends, table["round"].to_numpy(np.int64), side="right")
        code = (frame * side + cell[reader]) * side + cell[read]
        counts += np.bincount(code, minlength=counts.size).reshape(counts.shape)
        whole += graph.heatmap(table, population)
    shares = [graph.within_share(run.edges, cluster) for run in runs]
    rounds = np.unique(np.concatenate([share.index.to_numpy(np.int64) for share in shares]))
    rounds = rounds[thin(len(rounds), MOST_POINTS)]
    stacked = np.array([share.reindex(rounds).to_numpy(float) for share in shares])
    mean, spread = _over_seeds(stacked)
    found = np.concatenate([graph.rounds_to_discovery(run.edges, cluster) for run in runs])
    groups = graph.communities(whole)
    peers, times = _top_peers(whole)
    return {
        "counts": pack(counts, "u8" if counts.max() < 256 else "u16"),
        "rounds": rounds.tolist(),
        "share": pack(mean, "q16"),
        "share_std": pack(spread, "q16"),
        "found": np.sort(found[np.isfinite(found)]).astype(int).tolist(),
        "asked": len(found),
        "communities": groups.tolist(),
        "agreement": graph.agreement(groups, cluster),
        "gini": graph.gini(graph.in_degree(whole)),
        "peers": pack(peers, "u16"),
        "times": pack(times, "u16"),
    }


def _top_peers(whole: Int[np.ndarray, "population population"]) -> tuple[np.ndarray, np.ndarray]:
    """The peers that each client read most, and how often; never read ones come last with a count of 0."""
    order = np.argsort(-whole, axis=1, kind="stable")[:, : min(TOP_PEERS, len(whole))]
    return order, np.minimum(np.take_along_axis(whole, order, axis=1), 65535)


def clients(groups: dict[str, list[StoredRun]], metric: str, population: int) -> dict[str, Any]:
    """Final test value, gain and learning curve of each client, as means over seeds."""
    done = [run for runs in groups.values() for run in runs if run.finished]
    baseline = next((run.label for runs in groups.values() for run in runs if run.kind == "local"), None)
    final, gain = np.full((2, len(groups), population), np.nan)
    own_gains = client_gains(done, baseline, metric)
    lines = []
    for place, (label, runs) in enumerate(groups.items()):
        values = [run.final(metric) for run in runs if run.finished]
        if values:
            final[place] = np.mean([series.reindex(range(population)).to_numpy(float) for series in values], axis=0)
        if own_gains.get(label):
            over = [series.reindex(range(population)).to_numpy(float) for series in own_gains[label].values()]
            gain[place] = np.mean(over, axis=0)
        lines += _client_curves(place, runs, metric)
    return {"baseline": baseline, "final": pack(final, "f32"), "gain": pack(gain, "f32"), "curves": lines}


def _client_curves(place: int, runs: Sequence[StoredRun], metric: str) -> list[dict[str, Any]]:
    tables = [dense(run, "validation", metric) for run in runs]
    tables = [(rounds, values) for rounds, values in tables if len(rounds) > 1]
    if not tables:
        return []
    rounds = tables[0][0][thin(len(tables[0][0]), CLIENT_POINTS)]
    picked = []
    for own, values in tables:
        at = np.clip(np.searchsorted(own, rounds, side="right") - 1, 0, len(own) - 1)
        picked.append(values[at])
    return [{"method": place, "rounds": rounds.tolist(), "values": pack(_over_seeds(np.array(picked))[0], "q16")}]
