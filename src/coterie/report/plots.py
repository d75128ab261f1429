"""The kinds of figure, as functions: named runs and options to a figure and the table behind it."""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, StrMethodFormatter

from coterie._util.names import format_client, shorten_text
from coterie.errors import ConfigError, DataError
from coterie.functional.metrics import LABEL, Metric
from coterie.report.data.packing import align_seeds, build_dense_table, nan_mean_std
from coterie.results import graph, summary
from coterie.results.stored_runs import (
    FEDERATION,
    StoredRun,
    collect_metrics,
    load_cluster_names,
    load_federation_description,
    main_metric,
    merge_client_names,
)
from coterie.results.summary import compute_cluster_means

NamedRuns = Sequence[tuple[str, StoredRun]]
DrawnFigure = tuple[Figure, pd.DataFrame]

# as in the report
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
    """Learning curves, mean over clients (or of one planted cluster), with bands over seeds.

    Args:
        runs: named runs.
        metric: one, or several with commas between: a panel each.
        split: "train", "validation" or "test".
        cluster: "all", "clusters" or a cluster's name.
        log: a logarithmic vertical axis.
        splits: mark the rounds in which a method found another number of clusters (first seed); the
            table says which.
    """
    metrics = [choose_metric(runs, one.strip()) for one in (metric or "").split(",")]
    figure, panels = make_panels(len(metrics)) if len(metrics) > 1 else _make_single_panel()
    rows = []
    for axes, one in zip(panels, metrics, strict=True):
        for place, (name, group) in enumerate(group_by_name(runs).items()):
            rows += [
                (name, one.name, *point)
                for point in draw_method_curve(axes, name, group, place, (split, one, cluster))
            ]
        if log:
            set_log_scale(axes, "y")
        axes.set(xlabel="round", ylabel=format_axis_label(one, split))
    if not rows:
        names = ", ".join(group_by_name(runs))
        raise DataError(
            f"{names} recorded no {split} {' or '.join(one.name for one in metrics)} round by round; choose another "
            "--metric or --split"
        )
    if splits:
        for place, (name, group) in enumerate(group_by_name(runs).items()):
            for index, clusters in _find_cluster_changes(group[0]):
                panels[0].axvline(
                    index, color=select_style(place)["color"], lw=0.7, ls=":", zorder=0
                )
                rows.append((name, "split", index, clusters, np.nan, 1))
    if len(panels) == 1:
        add_legend(panels[0])
    else:
        add_shared_legend(panels)
    return figure, pd.DataFrame(rows, columns=["method", "metric", "round", "mean", "std", "seeds"])


def draw_method_curve(
    axes: Axes, name: str, group: Sequence[StoredRun], place: int, what: tuple[str, Metric, str]
) -> list[tuple[int, float, float, int]]:
    """Draw the curve of a method; its rounds, means and deviations, and the number of seeds."""
    split, metric, cluster = what
    recorded = [run for run in group if len(build_dense_table(run, split, metric.name)[0])]
    x, tables = align_seeds(recorded, split, metric.name)
    if not len(x):
        return []
    values = np.array(
        [_mean_over_clients(run, own, cluster) for run, own in zip(recorded, tables, strict=True)]
    )
    return draw_band(axes, name, place, x, values, metric.scale)


def draw_band(
    axes: Axes,
    name: str,
    place: int,
    x: Sequence[int] | np.ndarray,
    values: Float[np.ndarray, "seeds rounds"],
    scale: float,
) -> list[tuple[int, float, float, int]]:
    """Draw a curve with its band over seeds; return its rounds, means and deviations, and the number of seeds."""
    mean, spread = nan_mean_std(values)
    seen = select_style(place)
    axes.plot(x, scale * mean, label=name, color=seen["color"], linestyle=seen["linestyle"])
    if len(values) > 1:
        axes.fill_between(
            x,
            scale * (mean - spread),
            scale * (mean + spread),
            color=seen["color"],
            alpha=0.18,
            lw=0,
        )
    return [
        (int(r), float(m), float(s), len(values)) for r, m, s in zip(x, mean, spread, strict=True)
    ]


def _find_cluster_changes(run: StoredRun) -> list[tuple[int, int]]:
    """The rounds whose labels are of another number of clusters than those before, and that number."""
    rounds, labels = build_dense_table(run, "train", LABEL.name)
    counts = np.array([len(np.unique(own[np.isfinite(own)])) for own in labels])
    changed = np.flatnonzero(np.diff(counts)) + 1
    return [(int(rounds[at]), int(counts[at])) for at in changed]


def draw_heatmaps(runs: NamedRuns) -> DrawnFigure:
    """Which models each client used over whole runs: a panel per method, in order of planted cluster."""
    groups = {
        name: group
        for name, group in group_by_name(runs).items()
        if any(len(run.edges) for run in group)
    }
    if not groups:
        raise DataError("no method here reads other clients; there is nothing to show in a heatmap")
    counts = {name: _sum_reads(group) for name, group in groups.items()}
    most = max(int(count.max()) for count in counts.values())
    figure, panels = make_panels(len(groups))
    norm, rows, names = PowerNorm(0.5, 0, most), [], merge_client_names(run for _, run in runs)
    for number, (axes, (name, count)) in enumerate(zip(panels, counts.items(), strict=True)):
        cluster = pad_planted_clusters(groups[name], len(count))
        order = np.argsort(cluster, kind="stable")
        axes.grid(visible=False)
        axes.imshow(count[order][:, order], cmap="magma_r", norm=norm)
        for edge in np.flatnonzero(np.diff(cluster[order])) + 0.5:
            axes.axhline(edge, color="#888888", lw=0.5)
            axes.axvline(edge, color="#888888", lw=0.5)
        # as wide as a panel
        axes.set(title=textwrap.fill(name, 26), xlabel="peer whose\nmodel was used")
        if number % ACROSS == 0:
            axes.set(ylabel="client")
        if names and len(order) <= MOST_NAMES:
            told = [shorten_text(format_client(names, client), 16) for client in order.tolist()]
            axes.set_xticks(range(len(order)), told, rotation=90, fontsize=5)
            axes.set_yticks(range(len(order)), told if number % ACROSS == 0 else [], fontsize=5)
        reader, read = np.nonzero(count)
        rows += [
            (name, int(i), int(j), int(count[i, j])) for i, j in zip(reader, read, strict=True)
        ]
    figure.colorbar(
        ScalarMappable(norm, "magma_r"),
        ax=panels,
        label="times used (square-root scale)",
        shrink=0.8,
    )
    return figure, _add_client_names(
        pd.DataFrame(rows, columns=["method", "reader", "read", "times"]), names
    )


def draw_bars(runs: NamedRuns, *, metric: str | None = None, cluster: str = "all") -> DrawnFigure:
    """The final test metric of each method, with Random and Oracle as bands across."""
    shown = choose_metric(runs, metric)
    table = _build_final_table(runs, shown.name, cluster)
    kinds = {name: group[0].method_kind for name, group in group_by_name(runs).items()}
    values = {
        name: (mean, std)
        for name, mean, std in zip(table["method"], table["mean"], table["std"], strict=True)
    }
    bands = [name for name in values if kinds[name] in ("random", "oracle")]
    others = [name for name in values if name not in bands]
    figure, axes = make_single_figure()
    scale = shown.scale
    for place, name in enumerate(others):
        mean, spread = values[name]
        seen, bar = select_style(place), _scale_deviation(scale, spread)
        axes.errorbar(
            place, scale * mean, yerr=bar, fmt=seen["marker"], color=seen["color"], capsize=3
        )
    for name in bands:
        mean, spread = values[name]
        color, hatch = (COLORS[2], "///") if kinds[name] == "oracle" else (COLORS[4], "...")
        low, high = (
            scale * mean + sign * (_scale_deviation(scale, spread) or 0.0) for sign in (-1, 1)
        )
        axes.axhspan(
            low, high, facecolor=color, edgecolor=color, hatch=hatch, alpha=0.22, lw=0, label=name
        )
        axes.axhline(scale * mean, color=color, lw=0.8)
    fit_scale(axes, shown, [mean for mean, _ in values.values()])
    axes.set_xlim(-0.6, max(len(others), 1) - 0.4)
    axes.set_xticks(range(len(others)), others, rotation=40, ha="right", rotation_mode="anchor")
    axes.set(ylabel=format_axis_label(shown))
    if bands:
        add_legend(axes)
    return figure, table


def draw_client_strips(runs: NamedRuns, *, metric: str | None = None) -> DrawnFigure:
    """The final test metric of each client: a strip a method, shapes by planted cluster."""
    shown = choose_metric(runs, metric)
    figure, axes = make_single_figure()
    rows, seen = [], set()
    groups = group_by_name(runs)
    for place, (name, group) in enumerate(groups.items()):
        done = [run.final_values(shown.name) for run in group if run.is_finished]
        if not done:
            continue
        ids, cluster = done[0].index.to_numpy(np.int64), group[0].client_clusters
        values = np.mean([series.reindex(ids).to_numpy(float) for series in done], axis=0)
        planted = cluster.reindex(ids).to_numpy()
        names = load_cluster_names(
            group[0].folder.parent.parent, (int(c) for c in np.unique(planted))
        )
        for number, c in enumerate(sorted(names)):
            mine = planted == c
            jitter = 0.5 * ((ids[mine] * 0.618033988749895) % 1) - 0.25
            label = names[c] if c >= 0 and c not in seen else None
            seen.add(c)
            axes.plot(
                place + jitter, shown.scale * values[mine], MARKS[number % 8], color=COLORS[number % 8], ms=3,
                alpha=0.8, label=label, mew=0,
            )  # fmt: skip
            rows += [
                (name, int(i), names[c], float(v))
                for i, v in zip(ids[mine], values[mine], strict=True)
            ]
        axes.plot(
            [place - 0.3, place + 0.3], [shown.scale * values.mean()] * 2, color="black", lw=1
        )
    long = max(map(len, groups)) * len(groups) > 30
    axes.set_xticks(
        range(len(groups)),
        list(groups),
        rotation=30 if long else 0,
        ha="right" if long else "center",
    )
    axes.set(ylabel=format_axis_label(shown))
    add_legend(axes)
    table = pd.DataFrame(rows, columns=["method", "client", "cluster", shown.name])
    return figure, _add_client_names(table, merge_client_names(run for _, run in runs))


def draw_graphs(runs: NamedRuns, *, peers: int = 3, after: str | None = None) -> DrawnFigure:
    """Clients on a circle in order of planted cluster, with a line to each of the peers they read most.

    Args:
        runs: named runs.
        peers: lines from each client.
        after: a number of rounds in the settings of some of the methods, such as
            "stage_one_rounds": only later rounds count, for all. It is scaled as the rounds of the
            run were.

    Raises:
        DataError: when nobody read anybody in these rounds.
    """
    known = (
        [(find_setting(run, after), float(run.config.get("scale", 1.0))) for _, run in runs]
        if after
        else []
    )
    start = max((max(1, round(value * scale)) for value, scale in known if value), default=0)
    groups = {
        name: group
        for name, group in group_by_name(runs).items()
        if any(len(run.edges) for run in group)
    }
    if not groups:
        raise DataError("no method here reads other clients; there is no graph to draw")
    counts = {name: _sum_reads(group, start) for name, group in groups.items()}
    if not any(count.any() for count in counts.values()):
        raise DataError(
            f"no client reads another in round {start} or later ({after}); there is no graph to draw"
        )
    figure, panels = make_panels(len(groups))
    rows, names = [], merge_client_names(run for _, run in runs)
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        count = counts[name]
        cluster = pad_planted_clusters(group, len(count))
        angle = np.empty(len(cluster))
        angle[np.argsort(cluster, kind="stable")] = (
            2 * np.pi * np.arange(len(cluster)) / len(cluster)
        )
        x, y = np.cos(angle), np.sin(angle)
        for i, row in enumerate(count):
            for j in np.argsort(-row, kind="stable")[:peers]:
                if row[j]:
                    axes.plot(
                        [x[i], x[j]], [y[i], y[j]], color="#777777", lw=0.4, alpha=0.6, zorder=1
                    )
                    rows.append((name, i, int(j), int(row[j])))
        for number, c in enumerate(np.unique(cluster)):
            mine = cluster == c
            axes.plot(x[mine], y[mine], MARKS[number % 8], color=COLORS[number % 8], ms=4, zorder=2)
        for client in names if len(cluster) <= MOST_NAMES else ():
            # of the text, so that it leads away from the circle
            side = "left" if x[client] >= 0 else "right"
            turned = math.degrees(angle[client]) - (0 if side == "left" else 180)
            axes.text(1.08 * x[client], 1.08 * y[client], shorten_text(names[client], 16), fontsize=5, ha=side, va="center",
                      rotation=turned, rotation_mode="anchor")  # fmt: skip
        axes.set_title(name, pad=45 if names and len(cluster) <= MOST_NAMES else None)
        axes.set(aspect="equal")
        axes.axis("off")
    return figure, _add_client_names(
        pd.DataFrame(rows, columns=["method", "reader", "read", "times"]), names
    )


def draw_label_bars(runs: NamedRuns) -> DrawnFigure:
    """The clients of each found cluster, by planted cluster; the first seed."""
    groups = {name: group[0] for name, group in group_by_name(runs).items()}
    tables = {
        name: (run, build_dense_table(run, "train", LABEL.name)) for name, run in groups.items()
    }
    tables = {name: (run, table) for name, (run, table) in tables.items() if len(table[0])}
    if not tables:
        raise DataError(
            "no method here reports labels of its own; clustered methods such as fedgwc and ifca do"
        )
    figure, panels = make_panels(len(tables))
    rows = []
    for axes, (name, (run, (_, values))) in zip(panels, tables.items(), strict=True):
        found = values[-1]
        columns, content = count_cluster_content(run, "cluster")
        groups_found = [int(g) for g in np.unique(found[np.isfinite(found)])]
        bottom = np.zeros(len(groups_found))
        for number, column in enumerate(columns):
            height = np.array(
                [content[found == g, number].sum() for g in groups_found], dtype=float
            )
            color = COLORS[number % 8] if len(columns) <= 8 else f"C{number % 10}"
            axes.bar(
                range(len(groups_found)),
                height,
                bottom=bottom,
                color=color,
                label=column,
                edgecolor="white",
                lw=0.4,
            )
            bottom += height
            rows += [(name, g, column, int(h)) for g, h in zip(groups_found, height, strict=True)]
        axes.set_xticks(range(len(groups_found)), [str(g) for g in groups_found])
        axes.set(title=name, xlabel="found cluster", ylabel="clients")
    if len(panels[0].get_legend_handles_labels()[1]) <= 12:
        add_shared_legend(panels)
    return figure, pd.DataFrame(rows, columns=["method", "found", "of", "count"])


def _add_client_names(table: pd.DataFrame, names: Mapping[int, str]) -> pd.DataFrame:
    """The table behind a figure with the names of its clients, where they have any, in columns at its end."""
    columns = [column for column in ("client", "reader", "read") if names and column in table]
    return table.assign(
        **{
            f"{column}_name": [format_client(names, one) for one in table[column].tolist()]
            for column in columns
        }
    )


def count_cluster_content(run: StoredRun, by: str) -> tuple[list[str], np.ndarray]:
    """What each client adds to its found cluster: itself, under its planted cluster, or its samples by class."""
    study = run.folder.parent.parent
    if by == "class":
        stored = load_federation_description(study)
        if "labels" not in stored:
            path = study / FEDERATION
            raise DataError(
                f"{path} does not tell the classes of each client; run the study again to write it"
            )
        return [str(name) for name in stored["classes"]], np.array(stored["labels"])
    cluster = run.client_clusters.to_numpy()
    names = load_cluster_names(study, (int(c) for c in np.unique(cluster)))
    return list(names.values()), (cluster[:, None] == np.array(list(names))).astype(int)


def find_setting(run: StoredRun, name: str) -> Any:
    """A number among the settings of a run: of its method, its local training, its data, or the study."""
    places = (
        run.method_settings,
        run.config.get("local") or {},
        run.config.get("data") or {},
        run.config,
    )
    value = next((place[name] for place in places if name in place), None)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _sum_reads(group: Sequence[StoredRun], start: int = 0) -> np.ndarray:
    """How often each client used each other's model from a round on, all seeds together."""
    population = max(run.population for run in group)
    tables = [run.edges.loc[(run.edges["round"] >= start).to_numpy()] for run in group]
    return np.sum([graph.count_reads(table, population) for table in tables], axis=0)


def pad_planted_clusters(group: Sequence[StoredRun], population: int) -> np.ndarray:
    """The planted cluster of each client, -1 where none is known."""
    cluster = np.full(population, -1)
    cluster[: group[0].population] = group[0].planted_clusters
    return cluster


def group_by_name(runs: NamedRuns) -> dict[str, list[StoredRun]]:
    """The runs of each name: its seeds."""
    groups: dict[str, list[StoredRun]] = {}
    for name, run in runs:
        groups.setdefault(name, []).append(run)
    return groups


def choose_metric(runs: NamedRuns, name: str | None = None) -> Metric:
    """A metric of the runs, the one that they are judged by when no name is given."""
    stored = [run for _, run in runs]
    return collect_metrics(stored)[name or main_metric(stored)]


def _build_final_table(runs: NamedRuns, metric: str, cluster: str) -> pd.DataFrame:
    """Final test value of each method, mean and deviation over seeds."""
    rows = []
    for name, group in group_by_name(runs).items():
        values = np.array(
            [compute_final_mean(run, metric, cluster) for run in group if run.is_finished]
        )
        if len(values):
            rows.append((name, *summary.mean_std_over_seeds(values), len(values)))
    if not rows:
        raise DataError("no run here has come to its final evaluation")
    return pd.DataFrame(rows, columns=["method", "mean", "std", "seeds"])


def compute_final_mean(run: StoredRun, metric: str, cluster: str) -> float:
    """One number of a run: over all clients, over clusters, or of a cluster by its name."""
    means = compute_cluster_means(run, metric)
    names = load_cluster_names(run.folder.parent.parent, (c for c in means if isinstance(c, int)))
    found = {names.get(c, str(c)) if isinstance(c, int) else c: value for c, value in means.items()}
    if cluster not in found:
        raise ConfigError(f"cluster is {cluster!r}; expected one of: {', '.join(map(str, found))}")
    return found[cluster]


def _scale_deviation(scale: float, spread: float | None) -> float | None:
    """A deviation as it is drawn; a single seed has none."""
    return None if spread is None or math.isnan(spread) else scale * spread


def _mean_over_clients(run: StoredRun, values: np.ndarray, cluster: str) -> np.ndarray:
    planted = run.client_clusters.reindex(range(values.shape[1])).to_numpy()
    names = load_cluster_names(
        run.folder.parent.parent, (int(c) for c in run.client_clusters.unique() if c >= 0)
    )
    members = {name: planted == c for c, name in names.items()}
    if cluster == "all":
        return np.nanmean(values, axis=1) if values.size else np.zeros(0)
    if cluster == "clusters" and members:
        return np.mean([np.nanmean(values[:, mine], axis=1) for mine in members.values()], axis=0)
    if cluster not in members:
        raise ConfigError(
            f"cluster is {cluster!r}; expected one of: all, clusters, {', '.join(members)}"
        )
    return np.nanmean(values[:, members[cluster]], axis=1)


def select_style(place: int) -> dict[str, Any]:
    """Color, dash and mark of a method by its place: 64 differ from one another."""
    turn = (place + place // 8) % 8
    return {"color": COLORS[place % 8], "linestyle": DASHES[turn], "marker": MARKS[turn]}


def fit_scale(axes: Axes, metric: Metric, values: Sequence[float]) -> None:
    """Make the vertical axis logarithmic where losses lie so far apart that most would lie on one line."""
    known = [value for value in values if math.isfinite(value)]
    if metric.sign < 0 and known and min(known) > 0 and max(known) >= FAR * min(known):
        set_log_scale(axes, "y")


def set_log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers: a $ in a text is no sign of mathematics here."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    # named only where there is hardly a decade
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))


def format_axis_label(metric: Metric, split: str = "test") -> str:
    """A metric with its split and unit, for an axis."""
    title = f"{split} {metric.title}" if metric.on_samples else metric.title
    return f"{title} ({metric.unit})" if metric.unit else title


def make_single_figure() -> tuple[Figure, Axes]:
    """A figure with one panel, as wide as a column."""
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
        # inches of a line
        figure.set_figheight(figure.get_figheight() + 0.16 * (math.ceil(len(named) / ncols) - 1))


def add_legend(axes: Axes) -> None:
    """Name the lines above the axes, where nothing is drawn; without a name there is no legend."""
    names = axes.get_legend_handles_labels()[1]
    if not names:
        return
    # letters of this size to an inch, and those that a line takes
    fit = int(17 * WIDTH) // (max(map(len, names)) + 8)
    ncols = min(3, max(1, fit, math.ceil(len(names) / 6)))
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.12, 1.0), ncols=ncols, fontsize=7, columnspacing=1.2
    )


def make_panels(count: int) -> tuple[Figure, list[Axes]]:
    """A row of panels, or rows of so many."""
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
    """The final test metric against a setting, a line a method, or against two, as a grid of the best method's mean."""
    if not setting:
        raise ConfigError(
            "figure sweep needs --setting: the name of one setting, or of two with a comma between"
        )
    shown = choose_metric(runs, metric)
    asked = [one.strip() for one in setting.split(",")]
    points = []
    for _, run in runs:
        values = [find_setting(run, one) for one in asked]
        if run.is_finished and None not in values:
            points.append(
                (
                    strip_settings(run.label, asked),
                    run.method_kind,
                    *values,
                    compute_final_mean(run, shown.name, cluster),
                )
            )
    table = pd.DataFrame(points, columns=["method", "kind", *asked, "value"])
    if all(len(np.unique(table[one].to_numpy())) < 2 for one in asked):
        raise DataError(
            f"the finished runs here do not vary {setting}; give the folders of all points of a sweep"
        )
    # a label a value
    if len(set(zip(table["method"], table[asked[0]], strict=True))) == len(set(table["method"])):
        table["method"] = table["kind"]
    reduced = _reduce_over_seeds(table, "method", asked)
    figure, axes = make_single_figure()
    if len(asked) == 1:
        draw_setting_lines(axes, reduced, asked[0], shown)
        add_legend(axes)
    else:
        _draw_grid(axes, reduced, asked, shown)
    return figure, reduced


def strip_settings(label: str, settings: Sequence[str]) -> str:
    """Return the label of a point of a sweep without the values of the settings on the axes.

    Example:
        >>> bare("Inverse loss, tau=30", ["tau"])
        'Inverse loss'
    """
    for one in settings:
        label = re.sub(rf"[\s,]*\b{re.escape(one)}=[^\s,]*", "", label)
    return label or settings[0]


def draw_setting_lines(
    axes: Axes, table: pd.DataFrame, setting: str, metric: Metric, order: Sequence[str] = ()
) -> None:
    """Draw a line for each method against a setting; its look is that of its place in `order`, or in the table."""
    methods = list(dict.fromkeys(table["method"]))
    for name in methods:
        place = (order or methods).index(name)
        own = table.loc[(table["method"] == name).to_numpy()]
        x, scale = own[setting].to_numpy(float), metric.scale
        mean, spread = scale * own["mean"].to_numpy(), scale * own["std"].fillna(0.0).to_numpy()
        axes.errorbar(x, mean, yerr=spread, label=name, capsize=2, **select_style(place))
    fit_scale(axes, metric, table["mean"].tolist())
    values = np.unique(table[setting].to_numpy(float))
    if values.min() > 0 and values.max() / values.min() >= 20:
        set_log_scale(axes, "x")
    axes.set(xlabel=SETTING_TITLES.get(setting, setting), ylabel=format_axis_label(metric))


def _draw_grid(axes: Axes, table: pd.DataFrame, asked: Sequence[str], metric: Metric) -> None:
    best = "min" if metric.sign < 0 else "max"
    grid = (
        table.pivot_table(index=asked[0], columns=asked[1], values="mean", aggfunc=best)
        * metric.scale
    )
    image = axes.imshow(grid.to_numpy(), cmap="cividis", aspect="auto", origin="lower")
    axes.grid(visible=False)
    axes.set_xticks(range(grid.shape[1]), [f"{v:g}" for v in grid.columns])
    axes.set_yticks(range(grid.shape[0]), [f"{v:g}" for v in grid.index])
    axes.set(
        xlabel=SETTING_TITLES.get(asked[1], asked[1]), ylabel=SETTING_TITLES.get(asked[0], asked[0])
    )
    axes.figure.colorbar(image, ax=axes, label=format_axis_label(metric))


def draw_sensitivities(
    runs: NamedRuns,
    *,
    setting: str,
    studies: Sequence[str] = (),
    metric: str | None = None,
    cluster: str = "all",
) -> DrawnFigure:
    """The final test metric against a setting: a panel for each study and way of averaging, a line a method.

    Args:
        runs: named runs, of the points of one or more sweeps.
        setting: the setting on the horizontal axis.
        studies: patterns of the names of studies to draw; where no study of the runs fits, all are
            drawn.
        metric: its name; the one that the runs are judged by when None.
        cluster: "all", "clusters" or a cluster's name.
    """
    fits = [any(fnmatch(run.study_name, pattern) for pattern in studies) for _, run in runs]
    chosen = [pair for pair, fit in zip(runs, fits, strict=True) if fit] or list(runs)
    shown = choose_metric(chosen, metric)
    rows = []
    for _, run in chosen:
        value = find_setting(run, setting)
        if run.is_finished and value is not None:
            title = ", ".join(
                part
                for part in (run.study_name.split("/")[-1], run.method_settings.get("aggregation"))
                if part
            )
            rows.append(
                (
                    title,
                    strip_settings(run.label, [setting]),
                    value,
                    compute_final_mean(run, shown.name, cluster),
                )
            )
    table = pd.DataFrame(rows, columns=["panel", "method", setting, "value"])
    if len(np.unique(table[setting].to_numpy())) < 2:
        raise DataError(
            f"the finished runs here do not vary {setting}; give the folders of all points of a sweep"
        )
    reduced = _reduce_over_seeds(table, "panel", ["method", setting])
    titles, order = (list(dict.fromkeys(reduced[column])) for column in ("panel", "method"))
    figure, panels = make_panels(len(titles))
    for axes, title in zip(panels, titles, strict=True):
        draw_setting_lines(
            axes, reduced.loc[(reduced["panel"] == title).to_numpy()], setting, shown, order
        )
        axes.set_title(title.replace(", ", "\n"))
    add_shared_legend(panels, ncols=2 if len(panels) < 3 else 4)
    return figure, reduced


def _reduce_over_seeds(table: pd.DataFrame, first: str, others: Sequence[str]) -> pd.DataFrame:
    """Mean and deviation over seeds; methods and panels in the order of their runs, settings by value."""
    for column in (first, *others):
        if column in ("panel", "method"):
            table[column] = pd.Categorical(table[column], list(dict.fromkeys(table[column])))
    grouped = table.groupby([first, *others], sort=True, observed=True)["value"]
    return grouped.agg(mean="mean", std=_std_over_seeds, seeds="count").reset_index()


def _std_over_seeds(values: pd.Series) -> float:
    """The deviation over seeds; NaN for a single one."""
    deviation = summary.mean_std_over_seeds(values.to_numpy(float))[1]
    return math.nan if deviation is None else deviation
