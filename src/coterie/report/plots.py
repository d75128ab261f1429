"""The kinds of figure, as functions: named runs and options in, a figure and its table out."""

import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator, StrMethodFormatter
from scipy import sparse

from coterie._util.mappings import map_values
from coterie._util.names import format_client, shorten_clients
from coterie.errors import ConfigError, DataError
from coterie.functional.metrics import DIVERGED, LABEL, Metric
from coterie.report.data.packing import (
    MOST_CLIENTS,
    align_seeds,
    build_dense_table,
    mean_over_clients,
    nan_mean_std,
    sample_clients,
)
from coterie.report.data.reads import assign_cells
from coterie.results import graph, summary
from coterie.results.coverage import IncompleteStudyWarning, format_seed_ranges
from coterie.results.planted import MOST_CLUSTERS
from coterie.results.stored_runs import (
    FEDERATION,
    StoredRun,
    collect_metrics,
    compute_seed_overlap,
    find_planned_runs,
    load_cluster_names,
    load_federation_description,
    main_metric,
    merge_client_names,
)
from coterie.results.summary import compute_cluster_means
from coterie.results.tables import compute_mean_interval
from coterie.results.varied import find_value, name_runs, split_setting, strip_settings

NamedRuns = Sequence[tuple[str, StoredRun]]
DrawnFigure = tuple[Figure, pd.DataFrame]

# Those of the report (METHOD_COLORS of core.js): a method has one color in both.
COLORS = ("#004885", "#895200", "#0DA066", "#BA6FCC", "#D96A05", "#006B9C", "#623902", "#625A5E")
DASHES = (
    "-",
    "--",
    ":",
    "-.",
    (0, (8, 2, 2, 2, 2, 2)),
    (0, (1, 3)),
    (0, (10, 3)),
    (0, (3, 1, 1, 1)),
)
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 3.3  # inches: a column of a paper
ACROSS = 4  # panels in a row
MOST_NAMES = 20  # clients of which a picture has room for the names
MOST_CELLS = 1000  # side of a heatmap: of a larger population a cell holds several clients
MOST_LINED = 200  # clients of a larger population whose lines a graph has
PERCENT = 100.0
FAR = 10.0  # the ratio of values from which an axis becomes logarithmic


def draw_curves(
    runs: NamedRuns,
    *,
    metric: str | None = None,
    split: str = "validation",
    cluster: str = "all",
    log: bool = False,
    splits: bool = False,
) -> DrawnFigure:
    """Draw learning curves, mean over clients (or of one planted cluster), with bands over seeds.

    Args:
        runs: named runs.
        metric: one, or several with commas between: a panel each.
        split: "train", "validation" or "test".
        cluster: "all", "clusters" or a cluster's name.
        log: a logarithmic vertical axis.
        splits: mark the rounds in which a method found another number of clusters (first seed); the
            table has them too.
    """
    metrics = [choose_metric(runs, one.strip()) for one in (metric or "").split(",")]
    groups = group_by_name(runs)
    figure, panels = make_panels(len(metrics)) if len(metrics) > 1 else _make_single_panel()
    rows = []
    for axes, one in zip(panels, metrics, strict=True):
        for place, (name, group) in enumerate(groups.items()):
            for point in draw_method_curve(axes, name, group, place, (split, one, cluster)):
                rows.append((name, one.name, *point))
        if log:
            set_log_scale(axes, "y")
        axes.set(xlabel="round", ylabel=format_axis_label(one, split))
        # Of few rounds there would be marks between them.
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not rows:
        wanted = " or ".join(one.name for one in metrics)
        raise DataError(
            f"{', '.join(groups)} recorded no {split} {wanted} round by round; choose another "
            "--metric or --split"
        )
    if splits:
        # A line from top to bottom at each change, in the color of the method.
        for place, (name, group) in enumerate(groups.items()):
            color = select_style(place)["color"]
            for index, clusters in _find_cluster_changes(group[0]):
                panels[0].axvline(index, color=color, lw=0.7, ls=":", zorder=0)
                rows.append((name, "split", index, clusters, np.nan, 1))
    if len(panels) == 1:
        add_legend(panels[0])
    else:
        add_shared_legend(panels)
    return figure, pd.DataFrame(rows, columns=["method", "metric", "round", "mean", "std", "seeds"])


def draw_method_curve(
    axes: Axes, name: str, group: Sequence[StoredRun], place: int, what: tuple[str, Metric, str]
) -> list[tuple[int, float, float, int]]:
    """Draw the curve of a method; return its rounds, means, deviations, and the number of seeds."""
    split, metric, cluster = what
    # A run that is still going on may not have this metric yet.
    recorded = [run for run in group if len(build_dense_table(run, split, metric.name)[0])]
    x, tables = align_seeds(recorded, split, metric.name)
    if not len(x):
        return []
    values = []
    for run, own in zip(recorded, tables, strict=True):
        values.append(_mean_over_clients(run, own, cluster))
    return draw_band(axes, name, place, x, np.array(values), metric.scale)


def draw_band(
    axes: Axes,
    name: str,
    place: int,
    x: Sequence[int] | np.ndarray,
    values: Float[np.ndarray, "seeds rounds"],
    scale: float,
) -> list[tuple[int, float, float, int]]:
    """Draw a curve with its band over seeds; return its points and number of seeds."""
    # Seeds that lack a round do not count in it.
    mean, spread = nan_mean_std(values)
    style = select_style(place)
    # A curve ends where a model diverges, which the legend says.
    shown = f"{name} ({DIVERGED.title})" if np.isinf(values).any() else name
    axes.plot(x, scale * mean, label=shown, color=style["color"], linestyle=style["linestyle"])
    if len(values) > 1:
        low, high = scale * (mean - spread), scale * (mean + spread)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)
    points = []
    for point in zip(x, mean, spread, strict=True):
        points.append((int(point[0]), float(point[1]), float(point[2]), len(values)))
    return points


def _find_cluster_changes(run: StoredRun) -> list[tuple[int, int]]:
    """Find the rounds in which the number of found clusters changes, and the new number."""
    rounds, labels = build_dense_table(run, "train", LABEL.name)
    counts = np.array([len(np.unique(own[np.isfinite(own)])) for own in labels])
    changed = np.flatnonzero(np.diff(counts)) + 1
    return [(int(rounds[at]), int(counts[at])) for at in changed]


def draw_heatmaps(runs: NamedRuns) -> DrawnFigure:
    """Draw which models each client used: a panel per method, by planted cluster."""
    groups = _select_reading_groups(runs)
    if not groups:
        raise DataError("no method here reads other clients; there is nothing to show in a heatmap")
    counts = map_values(_sum_reads, groups)
    cells = {name: _bin_reads(groups[name], count) for name, count in counts.items()}
    # All panels share one color scale.
    most = max(int(image.max()) for _, image in cells.values())
    figure, panels = make_panels(len(groups))
    # A square root: a few frequent pairs would hide all others on a linear scale.
    norm, tables, names = PowerNorm(0.5, 0, most), [], merge_client_names(run for _, run in runs)
    for number, (axes, (name, count)) in enumerate(zip(panels, counts.items(), strict=True)):
        cell, image = cells[name]
        cluster, largest = (
            pad_planted_clusters(groups[name], len(cell)),
            int(np.bincount(cell).max()),
        )
        # A stable sort keeps the clients of a cluster in the order of their ids.
        order = np.argsort(cell, kind="stable")
        axes.grid(visible=False)
        axes.imshow(image, cmap="magma_r", norm=norm)
        # Between two cells: imshow centers cell i at i.
        edges = cell[order][np.flatnonzero(np.diff(cluster[order]))] + 0.5
        for edge in edges if len(edges) < MOST_CLUSTERS else ():
            axes.axhline(edge, color="#888888", lw=0.5)
            axes.axvline(edge, color="#888888", lw=0.5)
        # 26 letters are as wide as a panel.
        title, row = textwrap.fill(name, 26), "client"
        if largest > 1:
            title, row = (
                f"{title}\nof {len(cell):,} clients",
                f"cell of {largest:,} clients or fewer",
            )
        axes.set(title=title, xlabel="peer whose\nmodel was used")
        is_left = number % ACROSS == 0
        if is_left:
            axes.set(ylabel=row)
        if largest == 1:
            # Rows are in the order of clusters: their places are not the ids of clients.
            ids = FuncFormatter(partial(_format_id, order.tolist()))
            axes.xaxis.set_major_formatter(ids)
            axes.yaxis.set_major_formatter(ids)
        if names and len(order) <= MOST_NAMES:
            ticks = list(shorten_clients(names, order.tolist(), 16).values())
            axes.set_xticks(range(len(order)), ticks, rotation=90, fontsize=5)
            axes.set_yticks(range(len(order)), ticks if is_left else [], fontsize=5)
        tables.append(_list_reads(name, image if largest > 1 else count, largest))
    figure.colorbar(
        ScalarMappable(norm, "magma_r"),
        ax=panels,
        label="times used (square-root scale)",
        shrink=0.8,
    )
    return figure, _add_client_names(pd.concat(tables, ignore_index=True), names)


def _format_id(order: Sequence[int], place: float, _: int | None = None) -> str:
    """Return the id of the client at a place of an axis; "" between two of them."""
    at = round(place)
    return str(order[at]) if at == place and 0 <= at < len(order) else ""


def _bin_reads(
    group: Sequence[StoredRun], counts: Any
) -> tuple[Int[np.ndarray, " population"], Int[np.ndarray, "cells cells"]]:
    """Return the cell of each client of a heatmap, and the reads of each pair of cells."""
    cell = assign_cells(pad_planted_clusters(group, counts.shape[0]), MOST_CELLS)
    side, whole = int(cell.max()) + 1, counts.tocoo()
    code = cell[whole.row] * side + cell[whole.col]
    image = np.bincount(code, weights=whole.data, minlength=side * side)
    return cell, image.reshape(side, side).astype(np.int64)


def _list_reads(name: str, counts: Any, clients: int) -> pd.DataFrame:
    """List the pairs with reads of a heatmap, of clients or of cells with several clients."""
    pairs = sparse.csr_array(counts)
    pairs.sort_indices()
    entries = pairs.tocoo()
    reader, read = ("reader", "read") if clients == 1 else ("reader_cell", "read_cell")
    return pd.DataFrame(
        {"method": name, reader: entries.row, read: entries.col, "times": entries.data}
    )


def _select_reading_groups(runs: NamedRuns) -> dict[str, list[StoredRun]]:
    """Select the methods in which a client reads another one, by name."""
    groups = {}
    for name, group in group_by_name(select_alike_runs(runs)).items():
        if any(len(run.edges) for run in group):
            groups[name] = group
    return groups


def draw_bars(runs: NamedRuns, *, metric: str | None = None, cluster: str = "all") -> DrawnFigure:
    """Draw the final test metric of each method, with Random and Oracle as bands across."""
    shown = choose_metric(runs, metric)
    table = _build_final_table(runs, shown.name, cluster)
    kinds = {name: group[0].method_kind for name, group in group_by_name(runs).items()}
    bands, others, across = [], [], set()
    for row in zip(table["method"], table["mean"], table["std"], strict=True):
        # Random and Oracle bound what peers can give: they are drawn across. A second one of a kind
        # would have the looks of the first.
        kind = kinds[row[0]]
        is_band = kind in ("random", "oracle") and kind not in across
        # One that is not defined says so at a place of its own.
        is_band = is_band and math.isfinite(row[1])
        if is_band:
            across.add(kind)
        (bands if is_band else others).append(row)
    figure, axes = make_single_figure()
    scale = shown.scale
    for place, (_, mean, spread) in enumerate(others):
        style, bar = select_style(place), _scale_deviation(scale, spread)
        axes.errorbar(
            place, scale * mean, yerr=bar, fmt=style["marker"], color=style["color"], capsize=3
        )
        _note_undefined(axes, place, mean)
    for name, mean, spread in bands:
        # A hatch of its own, since colors of bands are alike in gray.
        # The last colors: those of methods begin at the first.
        color, hatch = (COLORS[7], "///") if kinds[name] == "oracle" else (COLORS[6], "...")
        half = _scale_deviation(scale, spread) or 0.0
        low, high = scale * mean - half, scale * mean + half
        axes.axhspan(
            low, high, facecolor=color, edgecolor=color, hatch=hatch, alpha=0.22, lw=0, label=name
        )
        axes.axhline(scale * mean, color=color, lw=0.8)
    fit_scale(axes, shown, table["mean"].tolist())
    # 0.6 of a place before the first method and after the last; bands alone get one place.
    axes.set_xlim(-0.6, max(len(others), 1) - 0.4)
    names = [name for name, _, _ in others]
    axes.set_xticks(range(len(others)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set(ylabel=format_axis_label(shown))
    if bands:
        add_legend(axes)
    return figure, table


def _note_undefined(axes: Axes, place: float, value: float) -> None:
    """Write at the place of a method that it has no value: a model diverged, or no data has one."""
    if not math.isfinite(value):
        axes.text(
            place,
            0.02,
            "not defined",
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=6,
        )


def draw_client_strips(runs: NamedRuns, *, metric: str | None = None) -> DrawnFigure:
    """Draw the final test metric of each client: a strip per method, shapes by planted cluster."""
    shown = choose_metric(runs, metric)
    figure, axes = make_single_figure()
    rows, named = [], set()
    groups = group_by_name(select_alike_runs(runs))
    for place, (name, group) in enumerate(groups.items()):
        done = []
        for run in group:
            if run.is_finished:
                done.append(run.defined_values(shown.name))
        if not done:
            continue
        # Mean over the seeds in which a client has a value; NaN where its model diverged in one.
        means = pd.concat([one.fillna(np.inf) for one in done], axis=1).mean(axis=1).sort_index()
        ids, values = means.index.to_numpy(np.int64), means.to_numpy(float)
        values = np.where(np.isinf(values), np.nan, values)
        planted = pad_planted_clusters(group, int(ids.max()) + 1)[ids]
        names = load_cluster_names(group[0].folder.parent.parent, map(int, np.unique(planted)))
        # Of many clients a sample of each cluster; the table has all.
        drawn = np.isin(np.arange(len(ids)), sample_clients(planted, MOST_CLIENTS))
        for number, c in enumerate(sorted(names)):
            every = planted == c
            mine = every & drawn
            # Multiples of the golden ratio spread points evenly and the same in every drawing.
            jitter = 0.5 * ((ids[mine] * 0.618033988749895) % 1) - 0.25
            # Each cluster once in the legend; clients without a known cluster are not named.
            fits = len(names) <= MOST_CLUSTERS
            label = names[c] if fits and c >= 0 and c not in named else None
            named.add(c)
            style = select_style(number)
            axes.plot(
                place + jitter,
                shown.scale * values[mine],
                style["marker"],
                color=style["color"],
                ms=3 if drawn.all() else 1.5,
                alpha=0.8,
                label=label,
                mew=0,
            )
            for client, value in zip(ids[every], values[every], strict=True):
                rows.append((name, int(client), names[c], float(value)))
        mean = shown.scale * values.mean()
        axes.plot([place - 0.3, place + 0.3], [mean, mean], color="black", lw=1)
        _note_undefined(axes, place, mean)
    # Long names overlap unless they are turned.
    if max(map(len, groups)) * len(groups) > 30:
        axes.set_xticks(range(len(groups)), list(groups), rotation=30, ha="right")
    else:
        axes.set_xticks(range(len(groups)), list(groups), rotation=0, ha="center")
    axes.set(ylabel=format_axis_label(shown))
    add_legend(axes)
    table = pd.DataFrame(rows, columns=["method", "client", "cluster", shown.name])
    return figure, _add_client_names(table, merge_client_names(run for _, run in runs))


def draw_graphs(runs: NamedRuns, *, peers: int = 3, after: str | None = None) -> DrawnFigure:
    """Draw clients on a circle by planted cluster, with a line to each of the peers they read most.

    Args:
        runs: named runs.
        peers: lines from each client.
        after: a number of rounds in the settings of some of the methods, such as
            "stage_one_rounds": only later rounds count, for all methods. It is scaled as the rounds
            of the run were.

    Raises:
        DataError: when no client read another one in these rounds.
    """
    start = 0
    for _, run in runs:
        if after and (value := find_setting(run, after)):
            # At least round 1, however small the scale is.
            start = max(start, 1, round(value * float(run.config.get("scale", 1.0))))
    groups = _select_reading_groups(runs)
    if not groups:
        raise DataError("no method here reads other clients; there is no graph to draw")
    counts = {name: _sum_reads(group, start) for name, group in groups.items()}
    if not any(count.nnz for count in counts.values()):
        raise DataError(
            f"no client reads another in round {start} or later ({after}); there is no "
            "graph to draw"
        )
    figure, panels = make_panels(len(groups))
    rows, names = [], merge_client_names(run for _, run in runs)
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        count = counts[name]
        cluster = pad_planted_clusters(group, count.shape[0])
        order = np.argsort(cluster, kind="stable")
        shown = drawn = np.arange(len(cluster))
        title = name
        if len(cluster) > MOST_CELLS:
            shown = sample_clients(cluster, MOST_LINED)
            title = f"{name}\n{len(shown):,} of {len(cluster):,} clients"
        # Neighbors on the circle are clients of one cluster.
        angle = np.empty(len(cluster))
        angle[order] = 2 * np.pi * np.arange(len(cluster)) / len(cluster)
        x, y = np.cos(angle), np.sin(angle)
        top, times = graph.find_top_peers(count, shown, peers)
        for place, i in enumerate(shown.tolist()):
            for j, number in zip(top[place].tolist(), times[place].tolist(), strict=True):
                # Fewer peers than asked for: the last places have zeros.
                if number:
                    ends = [x[i], x[j]], [y[i], y[j]]
                    axes.plot(*ends, color="#777777", lw=0.4, alpha=0.6, zorder=1)
                    rows.append((name, i, j, number))
        if len(shown) < len(cluster):
            drawn = np.union1d(shown, top[times > 0])
        for number, c in enumerate(np.unique(cluster)):
            mine, style = drawn[cluster[drawn] == c], select_style(number)
            axes.plot(
                x[mine],
                y[mine],
                style["marker"],
                color=style["color"],
                ms=4 if len(shown) == len(cluster) else 2,
                zorder=2,
            )
        shown_names = shorten_clients(names, names, 16) if len(cluster) <= MOST_NAMES else {}
        for client, client_name in shown_names.items():
            # Text reads from left to right on both sides of the circle, and leads away from it.
            side, turned = "left", math.degrees(angle[client])
            if x[client] < 0:
                side, turned = "right", turned - 180
            axes.text(
                1.08 * x[client],
                1.08 * y[client],
                client_name,
                fontsize=5,
                ha=side,
                va="center",
                rotation=turned,
                rotation_mode="anchor",
            )
        # Higher where names of clients stand around the circle.
        axes.set_title(title, pad=45 if shown_names else None)
        axes.set(aspect="equal")
        axes.axis("off")
    table = pd.DataFrame(rows, columns=["method", "reader", "read", "times"])
    return figure, _add_client_names(table, names)


def draw_label_bars(runs: NamedRuns) -> DrawnFigure:
    """Draw the clients of each found cluster, by planted cluster; the first seed."""
    last_labels = collect_found_labels(runs)
    figure, panels = make_panels(len(last_labels))
    rows = []
    for axes, (name, (run, found)) in zip(panels, last_labels.items(), strict=True):
        columns, content = count_cluster_content(run, "cluster")
        found_clusters = list(map(int, np.unique(found[np.isfinite(found)])))
        bottom = np.zeros(len(found_clusters))
        for number, column in enumerate(columns):
            # Above 8 clusters the palette would repeat: this one of matplotlib has 20.
            color = COLORS[number] if len(columns) <= 8 else f"C{number % 10}"
            if len(columns) > 10:
                color = mpl.colormaps["tab20"](number % 20)
            height = np.zeros(len(found_clusters))
            for place, g in enumerate(found_clusters):
                height[place] = content[found == g, number].sum()
                rows.append((name, g, column, int(height[place])))
            axes.bar(
                range(len(found_clusters)),
                height,
                bottom=bottom,
                color=color,
                label=column,
                edgecolor="white",
                lw=0.4,
            )
            bottom += height
        axes.set_xticks(range(len(found_clusters)), list(map(str, found_clusters)))
        axes.set(title=name, xlabel="found cluster", ylabel="clients")
    # A longer legend would hide the panels.
    if len(panels[0].get_legend_handles_labels()[1]) <= 12:
        add_shared_legend(panels)
    return figure, pd.DataFrame(rows, columns=["method", "found", "of", "count"])


def collect_found_labels(runs: NamedRuns) -> dict[str, tuple[StoredRun, np.ndarray]]:
    """Return the first run of each method that finds clusters, and the labels of its last round.

    Raises:
        DataError: when no method does.
    """
    last_labels = {}
    for name, group in group_by_name(runs).items():
        rounds, values = build_dense_table(group[0], "train", LABEL.name)
        if len(rounds):
            last_labels[name] = group[0], values[-1]
    if not last_labels:
        raise DataError(
            "no method here reports labels of its own; clustered methods such as fedgwc and ifca do"
        )
    return last_labels


def _add_client_names(table: pd.DataFrame, names: Mapping[int, str]) -> pd.DataFrame:
    """Add the names of clients, if they have any, in columns at the end of a figure's table."""
    for column in ("client", "reader", "read"):
        if names and column in table:
            called = [format_client(names, client) for client in table[column].tolist()]
            table = table.assign(**{f"{column}_name": called})
    return table


def count_cluster_content(run: StoredRun, by: str) -> tuple[list[str], np.ndarray]:
    """Count what each client adds to its found cluster.

    Args:
        run: the run.
        by: "cluster", then a client counts itself under its planted cluster, or "class", then it
            counts its samples.
    """
    study = run.folder.parent.parent
    if by == "class":
        stored = load_federation_description(study)
        if "labels" not in stored:
            path = study / FEDERATION
            raise DataError(
                f"{path} does not have the classes of each client; run the study again to write it"
            )
        # Each seed draws its own data, and those of the first are described.
        planned = find_planned_runs(study)
        described = planned[0][1] if planned else run.seed
        drawn_once = (run.config.get("data") or {}).get("fixed_seed") is not None
        if run.seed != described and not drawn_once:
            raise DataError(
                f"{study / FEDERATION} has the classes of each client with seed {described}, whose "
                f"run of {run.label} is not among the compared ones; finish it: the clusters of "
                f"seed {run.seed} are of other data"
            )
        return list(map(str, stored["classes"])), np.array(stored["labels"])
    cluster = run.client_clusters.to_numpy()
    names = load_cluster_names(study, map(int, np.unique(cluster)))
    # One column for each cluster, 1 where the client is in it.
    return list(names.values()), (cluster[:, None] == np.array(list(names))).astype(int)


def find_setting(run: StoredRun, name: str) -> int | float | None:
    """Find a number in the settings of a run (method, training, data, study); None without one.

    Args:
        run: the run.
        name: the name of the setting; or its path, as in a sweep: `data.shift.0.concentration`.
    """
    value = find_value(run.config, name)
    # A bool is an int to Python.
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _sum_reads(group: Sequence[StoredRun], start: int = 0) -> Any:
    """Count how often each client used each other's model from a round on, all seeds together.

    The matrix is sparse.
    """
    # Seeds can name different numbers of clients; matrices must agree to be added.
    population = max(run.population for run in group)
    total = sparse.csr_array((population, population), dtype=np.int64)
    for run in group:
        table = run.edges.loc[(run.edges["round"] >= start).to_numpy()]
        total = total + graph.count_reads_sparse(table, population)
    return total


def pad_planted_clusters(group: Sequence[StoredRun], population: int) -> np.ndarray:
    """Return the planted cluster of each client of a population, -1 when it is unknown."""
    cluster = np.full(population, -1)
    for run in reversed(group):
        # Other seeds may name more clients than the first one, whose clusters it does not know.
        own = run.planted_clusters[:population]
        cluster[: len(own)] = np.where(own < 0, cluster[: len(own)], own)
    return cluster


def select_alike_runs(runs: NamedRuns) -> NamedRuns:
    """Select the runs whose clients are in the planted clusters of the first run of their study.

    Only these can share a picture of single clients: where each seed plants its clusters at other
    clients (`assign = "shuffled"`), a mean over seeds would be one over clusters.

    Warns:
        IncompleteStudyWarning: about the seeds that are left out.
    """
    first: dict[Path, StoredRun] = {}
    chosen, left = [], dict[str, list[int]]()
    for name, run in runs:
        if _plant_alike(first.setdefault(run.folder.parent.parent, run), run):
            chosen.append((name, run))
        else:
            left.setdefault(name, []).append(run.seed)
    for name, seeds in left.items():
        which = f"seeds {format_seed_ranges(seeds)} plant their"
        if len(seeds) == 1:
            which = f"seed {seeds[0]} plants its"
        warnings.warn(
            f"{name}: {which} clusters at other clients than the first seed does: not in "
            "this figure of single clients",
            IncompleteStudyWarning,
            stacklevel=3,
        )
    return chosen


def _plant_alike(first: StoredRun, other: StoredRun) -> bool:
    """Whether each client of two runs is in one planted cluster, at the beginning and at the end."""
    both = [[run.planted_phases.select(0) for run in (first, other)]]
    # Where data change over the rounds, a run that goes on may be in an earlier phase.
    if first.is_finished and other.is_finished:
        both.append([first.planted_clusters, other.planted_clusters])
    for a, b in both:
        # Seeds may name other clients, whose clusters are then not known of each.
        size = min(len(a), len(b))
        a, b = a[:size], b[:size]
        if np.any((a != b) & (a >= 0) & (b >= 0)):
            return False
    return True


def group_by_name(runs: NamedRuns) -> dict[str, list[StoredRun]]:
    """Return the runs of each name: its seeds."""
    groups: dict[str, list[StoredRun]] = {}
    for name, run in runs:
        groups.setdefault(name, []).append(run)
    return groups


def choose_metric(runs: NamedRuns, name: str | None = None) -> Metric:
    """Return a metric of the runs by name; without a name, the one that they are compared by."""
    stored = [run for _, run in runs]
    return collect_metrics(stored)[name or main_metric(stored)]


def _build_final_table(runs: NamedRuns, metric: str, cluster: str) -> pd.DataFrame:
    """Build the table of the final test value of each method, mean and deviation over seeds."""
    rows = []
    for name, group in group_by_name(runs).items():
        values = []
        for run in group:
            if run.is_finished:
                values.append(compute_final_mean(run, metric, cluster))
        if values:
            rows.append((name, *summary.mean_std_over_seeds(np.array(values)), len(values)))
    if not rows:
        raise DataError("no run here has come to its final evaluation")
    return pd.DataFrame(rows, columns=["method", "mean", "std", "seeds"])


def compute_final_mean(run: StoredRun, metric: str, cluster: str) -> float:
    """Return one number of a run: over all clients, over clusters, or of a cluster by its name."""
    means = compute_cluster_means(run, metric)
    planted = [key for key in means if isinstance(key, int)]
    names: dict[Any, str] = dict(load_cluster_names(run.folder.parent.parent, planted))
    found = {}
    for key, value in means.items():
        found[names.get(key, str(key))] = value
    if cluster not in found:
        raise ConfigError(f"cluster is {cluster!r}; expected one of: {', '.join(map(str, found))}")
    return found[cluster]


def _scale_deviation(scale: float, spread: float | None) -> float | None:
    """Return a deviation in the units of the axis; None for a single seed, which has none."""
    return None if spread is None or math.isnan(spread) else scale * spread


def _mean_over_clients(run: StoredRun, values: np.ndarray, cluster: str) -> np.ndarray:
    # Aligned with the columns of `values`, one for each id; NaN for other ids.
    planted = run.client_clusters.reindex(range(values.shape[1])).to_numpy()
    names = load_cluster_names(run.folder.parent.parent, run.known_clusters)
    members = {name: planted == c for c, name in names.items()}
    if cluster == "all":
        return mean_over_clients(values) if values.size else np.zeros(0)
    if cluster == "clusters" and members:
        return np.mean([mean_over_clients(values[:, mine]) for mine in members.values()], axis=0)
    if cluster not in members:
        raise ConfigError(
            f"cluster is {cluster!r}; expected one of: all, clusters, {', '.join(members)}"
        )
    return mean_over_clients(values[:, members[cluster]])


def select_style(place: int) -> dict[str, Any]:
    """Return color, dash and mark of a method by its position: 64 differ from one another."""
    # Colors repeat after 8; dashes and marks shift by one at each repetition.
    turn = (place + place // 8) % 8
    return {"color": COLORS[place % 8], "linestyle": DASHES[turn], "marker": MARKS[turn]}


def fit_scale(axes: Axes, metric: Metric, values: Sequence[float]) -> None:
    """Make the vertical axis logarithmic when losses differ by orders of magnitude."""
    known = [value for value in values if math.isfinite(value)]
    if metric.sign < 0 and known and min(known) > 0 and max(known) >= FAR * min(known):
        set_log_scale(axes, "y")


def set_log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers: a $ in a text is not mathematics here."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    # Minor ticks are named only on an axis of one decade or less, where major ones are few.
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))


def format_axis_label(metric: Metric, split: str = "test") -> str:
    """Format a metric with its split and unit, for an axis."""
    title = f"{split} {metric.title}" if metric.on_samples else metric.title
    return f"{title} ({metric.unit})" if metric.unit else title


def make_single_figure() -> tuple[Figure, Axes]:
    """Make a figure with one panel, as wide as a column."""
    figure = Figure(figsize=(WIDTH, 0.72 * WIDTH))
    return figure, figure.add_subplot()


def _make_single_panel() -> tuple[Figure, list[Axes]]:
    figure, axes = make_single_figure()
    return figure, [axes]


def add_shared_legend(panels: Sequence[Axes], ncols: int = 4) -> None:
    """Name the lines of all panels above them, each once."""
    figure = panels[0].get_figure()
    named = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    if isinstance(figure, Figure):
        figure.legend(
            list(named.values()), list(named), loc="outside upper center", ncols=ncols, fontsize=7
        )
        # A line of the legend takes 0.16 inches; the figure has room for the first.
        figure.set_figheight(figure.get_figheight() + 0.16 * (math.ceil(len(named) / ncols) - 1))


def add_legend(axes: Axes) -> None:
    """Name the lines above the axes, where nothing is drawn; without a name there is no legend."""
    names = axes.get_legend_handles_labels()[1]
    if not names:
        return
    # 17 letters of this size fit an inch; a line and its gap take 8.
    fit = int(17 * WIDTH) // (max(map(len, names)) + 8)
    ncols = min(3, max(1, fit, math.ceil(len(names) / 6)))
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.12, 1.0), ncols=ncols, fontsize=7, columnspacing=1.2
    )


def make_panels(count: int) -> tuple[Figure, list[Axes]]:
    """Make a figure with a number of panels in rows."""
    across = min(count, ACROSS)
    down = math.ceil(count / across)
    figure = Figure(figsize=(max(WIDTH, 1.9 * across), 2.1 * down), layout="constrained")
    return figure, [figure.add_subplot(down, across, i + 1) for i in range(count)]


SETTING_TITLES = {  # of settings, on axes
    "tau": "inverse temperature, tau",
    "train": "training samples per client",
    "num_peers": "sampled peers",
    "num_clients": "clients",
    "regions": "clusters",
    "radius": "radius of the subregions",
}


def draw_sweep(
    runs: NamedRuns, *, setting: str | None = None, metric: str | None = None, cluster: str = "all"
) -> DrawnFigure:
    """Draw the final test metric against one setting, a line per method, or against two, as a grid.

    A cell of the grid is the mean of the method that is best there.
    """
    if not setting:
        raise ConfigError(
            "figure sweep needs --setting: the name or path of one setting, or of two with a comma "
            "between"
        )
    shown = choose_metric(runs, metric)
    called = dict(map(split_setting, setting.split(",")))
    asked = [*called]
    points = []
    found = []
    for _, run in runs:
        values = [find_setting(run, one) for one in asked]
        if run.is_finished and None not in values:
            found.append((run, values))
    for (run, values), (label, rest) in zip(found, name_runs(found, asked), strict=True):
        mean = compute_final_mean(run, shown.name, cluster)
        points.append((label + rest, run.method_kind + rest, *values, run.seed, mean))
    table = pd.DataFrame(points, columns=["method", "kind", *asked, "seed", "value"])
    if all(len(np.unique(table[one].to_numpy())) < 2 for one in asked):
        raise DataError(
            f"the finished runs here do not vary {setting}; give the folders of all points "
            "of a sweep"
        )
    # When each label has one value, lines by label would be single points: the kind joins them,
    # unless two methods of a kind have one value, of which a point would be the mean.
    single = len(set(zip(table["method"], table[asked[0]], strict=True))) == len(
        set(table["method"])
    )
    if single and not table.duplicated(["kind", *asked, "seed"]).any():
        table["method"] = table["kind"]
    reduced = _reduce_over_seeds([run for run, _ in found], table, "method", asked)
    figure, axes = make_single_figure()
    if len(asked) == 1:
        draw_setting_lines(axes, reduced, asked[0], shown, name=called[asked[0]])
        add_legend(axes)
    else:
        _draw_grid(axes, reduced, called, shown)
    return figure, reduced


def draw_setting_lines(
    axes: Axes, table: pd.DataFrame, setting: str, metric: Metric, order: Sequence[str] = (),
    name: str = "",
) -> None:  # fmt: skip
    """Draw a line for each method against a setting with its intervals, styled as in `order`."""
    methods = list(dict.fromkeys(table["method"]))
    for method in methods:
        place = (order or methods).index(method)
        own = table.loc[(table["method"] == method).to_numpy()]
        x, scale = own[setting].to_numpy(float), metric.scale
        mean = scale * own["mean"].to_numpy()
        # Without an interval, as of one seed, a point has no bar.
        half = scale * (own["high"] - own["mean"]).fillna(0.0).to_numpy(float)
        axes.errorbar(x, mean, yerr=half, label=method, capsize=2, **select_style(place))
        for one, value in zip(x, mean, strict=True):
            _note_undefined(axes, one, value)
    fit_scale(axes, metric, table["mean"].tolist())
    values = np.unique(table[setting].to_numpy(float))
    # A factor of 20 is more than a decade: equal steps would crowd the small values.
    if values.min() > 0 and values.max() / values.min() >= 20:
        set_log_scale(axes, "x")
    name = name or setting.rpartition(".")[-1]
    axes.set(xlabel=SETTING_TITLES.get(name, name), ylabel=format_axis_label(metric))


def _draw_grid(axes: Axes, table: pd.DataFrame, called: Mapping[str, str], metric: Metric) -> None:
    asked = [*called]
    best = "min" if metric.sign < 0 else "max"
    # A point at which no method has a mean stays a cell, and says so.
    grid = metric.scale * table.pivot_table(
        index=asked[0], columns=asked[1], values="mean", aggfunc=best, dropna=False
    )
    image = axes.imshow(grid.to_numpy(float), cmap="cividis", aspect="auto", origin="lower")
    tried = set(map(tuple, table[asked].to_numpy().tolist()))
    for down, across in np.argwhere(~np.isfinite(grid.to_numpy(float))):
        if (grid.index[down], grid.columns[across]) in tried:
            axes.text(across, down, "not defined", ha="center", va="center", fontsize=5)
    axes.grid(visible=False)
    axes.set_xticks(range(grid.shape[1]), [f"{v:g}" for v in grid.columns])
    axes.set_yticks(range(grid.shape[0]), [f"{v:g}" for v in grid.index])
    # The first setting is the rows of the grid, the second its columns.
    down, across = called.values()
    axes.set(xlabel=SETTING_TITLES.get(across, across), ylabel=SETTING_TITLES.get(down, down))
    axes.figure.colorbar(image, ax=axes, label=format_axis_label(metric))


def draw_sensitivities(
    runs: NamedRuns,
    *,
    setting: str,
    studies: Sequence[str] = (),
    metric: str | None = None,
    cluster: str = "all",
) -> DrawnFigure:
    """Draw the final test metric against a setting: a panel for each study and way of averaging.

    Args:
        runs: named runs, of the points of one or more sweeps.
        setting: the setting on the horizontal axis.
        studies: patterns of the names of studies to draw; when no study of the runs fits, all are
            drawn.
        metric: its name; the main metric of the runs when None.
        cluster: "all", "clusters" or a cluster's name.
    """
    chosen = []
    for name, run in runs:
        if any(fnmatch(run.study_name, pattern) for pattern in studies):
            chosen.append((name, run))
    chosen = chosen or list(runs)
    shown = choose_metric(chosen, metric)
    found = []
    for _, run in chosen:
        value = find_setting(run, setting)
        if run.is_finished and value is not None:
            found.append((run, value))
    called = {run.folder.parent.parent: run.study_name.split("/")[-1] for run, _ in found}
    # Of two studies with one name a panel would show the means.
    if len(set(called.values())) < len(called):
        called = {folder: str(folder) for folder in called}
    rows = []
    for run, value in found:
        parts = called[run.folder.parent.parent], run.method_settings.get("aggregation")
        mean = compute_final_mean(run, shown.name, cluster)
        label = strip_settings(run.label, [setting])
        # A method that averages nothing has no rule of it in the name of its panel.
        rows.append((", ".join(filter(None, parts)), label, value, mean))
    table = pd.DataFrame(rows, columns=["panel", "method", setting, "value"])
    if len(np.unique(table[setting].to_numpy())) < 2:
        raise DataError(
            f"the finished runs here do not vary {setting}; give the folders of all points "
            "of a sweep"
        )
    reduced = _reduce_over_seeds([run for run, _ in found], table, "panel", ["method", setting])
    titles = list(dict.fromkeys(reduced["panel"]))
    # A method has the same style in all panels, also in one that lacks other methods.
    order = list(dict.fromkeys(reduced["method"]))
    figure, panels = make_panels(len(titles))
    for axes, title in zip(panels, titles, strict=True):
        draw_setting_lines(
            axes, reduced.loc[(reduced["panel"] == title).to_numpy()], setting, shown, order
        )
        axes.set_title(title.replace(", ", "\n"))
    add_shared_legend(panels, ncols=2 if len(panels) < 3 else 4)
    return figure, reduced


def _reduce_over_seeds(
    runs: Sequence[StoredRun], table: pd.DataFrame, first: str, others: Sequence[str]
) -> pd.DataFrame:
    """Return mean, deviation and interval over seeds, ordered by first run and setting value."""
    overlap = max(map(compute_seed_overlap, runs), default=0.0)
    # Categories keep the order of first appearance; `groupby` would sort names by letter.
    for column in (first, *others):
        if column in ("panel", "method"):
            table[column] = pd.Categorical(table[column], list(dict.fromkeys(table[column])))
    grouped = table.groupby([first, *others], sort=True, observed=True)["value"]
    # Not pandas' own mean, which leaves NaN out: a seed that diverged is no seed less.
    reduced = grouped.agg(mean=_mean_over_seeds, std=_std_over_seeds, seeds="size").reset_index()
    # Without an interval, as of one seed, both of its ends are NaN.
    intervals = np.full((len(reduced), 2), np.nan)
    for row, record in enumerate(reduced.to_dict("records")):
        interval = compute_mean_interval(record, overlap)
        if interval is not None:
            intervals[row] = interval
    return reduced.assign(low=intervals[:, 0], high=intervals[:, 1])


def _mean_over_seeds(values: pd.Series) -> float:
    """Return the mean over seeds; NaN where that of one is."""
    return summary.mean_std_over_seeds(values.to_numpy(float))[0]


def _std_over_seeds(values: pd.Series) -> float:
    """Return the deviation over seeds; NaN for a single one."""
    deviation = summary.mean_std_over_seeds(values.to_numpy(float))[1]
    return math.nan if deviation is None else deviation
