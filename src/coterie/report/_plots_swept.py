"""The test metric against settings: sweeps, and small multiples of them for several studies."""

import re
from collections.abc import Sequence
from fnmatch import fnmatch

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from coterie.errors import ConfigError, DataError
from coterie.report.plots import (
    Drawn,
    Named,
    fit_scale,
    legend_of,
    look,
    main_of,
    panels_of,
    scale_of,
    setting_of,
    shared_legend,
    single_figure,
    unit_of,
    value_of,
)
from coterie.results.summary import HIGHER_IS_BETTER

NAMES = {  # of settings, on axes
    "tau": "inverse temperature, tau",
    "train": "training samples per client",
    "num_peers": "sampled peers",
    "num_clients": "clients",
    "regions": "clusters",
    "radius": "radius of the subregions",
}


def sweep(runs: Named, *, setting: str | None = None, metric: str | None = None, cluster: str = "all") -> Drawn:
    """The final test metric against a setting, a line a method, or against two, as a grid of the best method's mean."""
    if not setting:
        raise ConfigError("figure sweep needs --setting: the name of one setting, or of two with a comma between")
    metric = metric or main_of(runs)
    asked = [one.strip() for one in setting.split(",")]
    points = []
    for _, run in runs:
        values = [setting_of(run, one) for one in asked]
        if run.finished and None not in values:
            points.append((bare(run.label, asked), run.kind, *values, value_of(run, metric, cluster)))
    table = pd.DataFrame(points, columns=["method", "kind", *asked, "value"])
    if all(len(np.unique(table[one].to_numpy())) < 2 for one in asked):
        raise DataError(f"the finished runs here do not vary {setting}; give the folders of all points of a sweep")
    if len(set(zip(table["method"], table[asked[0]], strict=True))) == len(set(table["method"])):  # a label a value
        table["method"] = table["kind"]
    reduced = _reduced(table, "method", asked)
    figure, axes = single_figure()
    if len(asked) == 1:
        lines_of(axes, reduced, asked[0], metric)
        legend_of(axes)
    else:
        _grid(axes, reduced, asked, metric)
    return figure, reduced


def bare(label: str, settings: Sequence[str]) -> str:
    """Return the label of a point of a sweep without the values of the settings on the axes.

    Example:
        >>> bare("Inverse loss, tau=30", ["tau"])
        'Inverse loss'
    """
    for one in settings:
        label = re.sub(rf"[\s,]*\b{re.escape(one)}=[^\s,]*", "", label)
    return label or settings[0]


def lines_of(axes: Axes, table: pd.DataFrame, setting: str, metric: str, order: Sequence[str] = ()) -> None:
    """Draw a line for each method against a setting; its look is that of its place in `order`, or in the table."""
    methods = list(dict.fromkeys(table["method"]))
    for name in methods:
        place = (order or methods).index(name)
        own = table.loc[(table["method"] == name).to_numpy()]
        x, scale = own[setting].to_numpy(float), scale_of(metric)
        mean, spread = scale * own["mean"].to_numpy(), scale * own["std"].to_numpy()
        axes.errorbar(x, mean, yerr=spread, label=name, capsize=2, **look(place))
    fit_scale(axes, metric, table["mean"].tolist())
    values = np.unique(table[setting].to_numpy(float))
    if values.min() > 0 and values.max() / values.min() >= 20:
        axes.set_xscale("log")
    axes.set(xlabel=NAMES.get(setting, setting), ylabel=f"test {unit_of(metric)}")


def _grid(axes: Axes, table: pd.DataFrame, asked: Sequence[str], metric: str) -> None:
    best = "max" if metric in HIGHER_IS_BETTER else "min"
    grid = table.pivot_table(index=asked[0], columns=asked[1], values="mean", aggfunc=best) * scale_of(metric)
    image = axes.imshow(grid.to_numpy(), cmap="cividis", aspect="auto", origin="lower")
    axes.grid(visible=False)
    axes.set_xticks(range(grid.shape[1]), [f"{v:g}" for v in grid.columns])
    axes.set_yticks(range(grid.shape[0]), [f"{v:g}" for v in grid.index])
    axes.set(xlabel=NAMES.get(asked[1], asked[1]), ylabel=NAMES.get(asked[0], asked[0]))
    axes.figure.colorbar(image, ax=axes, label=f"test {unit_of(metric)}")


def sensitivities(
    runs: Named, *, setting: str, studies: Sequence[str] = (), metric: str | None = None, cluster: str = "all"
) -> Drawn:
    """The final test metric against a setting: a panel for each study and way of averaging, a line a method.

    Args:
        runs: named runs, of the points of one or more sweeps.
        setting: the setting on the horizontal axis.
        studies: patterns of the names of studies to draw; where no study of the runs fits, all are drawn.
        metric: accuracy or loss.
        cluster: "all", "clusters" or a cluster's name.
    """
    fits = [any(fnmatch(run.study, pattern) for pattern in studies) for _, run in runs]
    chosen = [pair for pair, fit in zip(runs, fits, strict=True) if fit] or list(runs)
    metric = metric or main_of(chosen)
    rows = []
    for _, run in chosen:
        value = setting_of(run, setting)
        if run.finished and value is not None:
            title = ", ".join(part for part in (run.study.split("/")[-1], run.method.get("aggregation")) if part)
            rows.append((title, bare(run.label, [setting]), value, value_of(run, metric, cluster)))
    table = pd.DataFrame(rows, columns=["panel", "method", setting, "value"])
    if len(np.unique(table[setting].to_numpy())) < 2:
        raise DataError(f"the finished runs here do not vary {setting}; give the folders of all points of a sweep")
    reduced = _reduced(table, "panel", ["method", setting])
    titles, order = (list(dict.fromkeys(reduced[column])) for column in ("panel", "method"))
    figure, panels = panels_of(len(titles))
    for axes, title in zip(panels, titles, strict=True):
        lines_of(axes, reduced.loc[(reduced["panel"] == title).to_numpy()], setting, metric, order)
        axes.set_title(title.replace(", ", "\n"))
    shared_legend(panels, ncols=2 if len(panels) < 3 else 4)
    return figure, reduced


def _reduced(table: pd.DataFrame, first: str, others: Sequence[str]) -> pd.DataFrame:
    """Mean and deviation over seeds; methods and panels in the order of their runs, settings by value."""
    for column in (first, *others):
        if column in ("panel", "method"):
            table[column] = pd.Categorical(table[column], list(dict.fromkeys(table[column])))
    grouped = table.groupby([first, *others], sort=True, observed=True)["value"]
    return grouped.agg(mean="mean", std=lambda values: values.std(ddof=0), seeds="count").reset_index()
