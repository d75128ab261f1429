"""The figures of the papers: the options of each published figure, and the papers' own kinds.

Some are drawn from `coterie analyze` results, some from runs that recorded similarities
(`record_similarities`).

Importing this module adds them to `report.figures`, whose `plot` draws them.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from scipy.special import ndtr

from coterie._util.names import format_client, shorten_text
from coterie.errors import DataError
from coterie.functional.metrics import (
    ACCURACY,
    GLOBAL_ACCURACY,
    GRADIENT_VARIANCE,
    INTERACTION_CHANGE,
    Metric,
)
from coterie.papers.analyses import ALL_CLIENTS, FOLDER, SERVED
from coterie.report import plots
from coterie.report.figures import FIGURES, NOT_STORED, PUBLISHED, FigureKind, PublishedFigure, plot
from coterie.report.plots import (
    COLORS,
    FAR,
    PERCENT,
    WIDTH,
    DrawnFigure,
    NamedRuns,
    add_shared_legend,
    choose_metric,
    collect_found_labels,
    count_cluster_content,
    draw_band,
    draw_method_curve,
    format_axis_label,
    group_by_name,
    make_panels,
    set_log_scale,
)  # fmt: skip
from coterie.results import graph
from coterie.results.stored_runs import StoredRun

__all__ = [
    "plot",
    "plot_class_shares",
    "plot_interactions",
    "plot_neighbors",
    "plot_similarities",
    "plot_simplexes",
]


def plot_simplexes(runs: NamedRuns) -> DrawnFigure:
    """Accuracy over a simplex: a panel for all test sets, and one for each tested client."""
    # Each run has a simplex of its own, so that one is drawn: that of the first.
    name, run, table = _load_analysis(runs, "simplex")[0]
    # One column of weights for each endpoint, and so for each corner.
    axes_of = [column for column in table.columns if column.startswith("alpha_")]
    corners = _polygon_corners(len(axes_of))
    clients = sorted(map(int, table["client"].unique()))
    figure, panels = make_panels(len(clients))
    # One color scale for all panels, so that they can be compared.
    accuracy = ACCURACY.scale * table[ACCURACY.name].to_numpy(float)
    # A model whose outputs are not finite has no accuracy: no color, and no end of the scale.
    known = accuracy[np.isfinite(accuracy)]
    if not len(known):
        raise DataError("no model of the simplex has finite outputs; there is nothing to show")
    norm = Normalize(known.min(), known.max())
    for axes, client in zip(panels, clients, strict=True):
        own = table.loc[(table["client"] == client).to_numpy()]
        # Barycentric coordinates: the weighted mean of the corners.
        place = own[axes_of].to_numpy(float) @ corners
        value = ACCURACY.scale * own[ACCURACY.name].to_numpy(float)
        served = (own["point"] == SERVED).to_numpy()
        outline = np.concatenate([corners, corners[:1]])
        axes.plot(outline[:, 0], outline[:, 1], color="#777777", lw=0.6, zorder=1)
        axes.scatter(
            place[~served, 0],
            place[~served, 1],
            c=value[~served],
            cmap="cividis",
            norm=norm,
            s=4,
            lw=0,
        )
        axes.plot(
            place[served, 0], place[served, 1], "*", color="white", mec="black", ms=9, mew=0.8
        )
        title = "all test sets"
        if client != ALL_CLIENTS:
            title = shorten_text(format_client(run.client_names, client))
        lost = int(np.count_nonzero(~np.isfinite(value)))
        if lost:
            title += f"\n{lost} of {len(value)} not defined"
        # Equal units on both axes, or the simplex would be out of shape.
        axes.set(title=title, aspect="equal")
        axes.axis("off")
    figure.colorbar(
        ScalarMappable(norm, "cividis"),
        ax=panels,
        label="test accuracy (%); star: served",
        shrink=0.8,
    )
    return figure, table.assign(method=name, seed=run.seed)


def _polygon_corners(number: int) -> Float[np.ndarray, "topics 2"]:
    """Corners of a regular polygon; for over three endpoints it is a projection of the simplex."""
    if number == 2:
        return np.array([[0.0, 0.0], [1.0, 0.0]])
    # The first corner is at the top.
    angle = np.pi / 2 + 2 * np.pi * np.arange(number) / number
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def plot_interactions(runs: NamedRuns) -> DrawnFigure:
    """FedGWC's interaction matrix of each first seed, ordered and divided by found cluster."""
    found = _load_analysis(runs, "interaction")
    # Reversed, so that the first seed of a method is written last and stays.
    first = {name: (run, table) for name, run, table in reversed(found)}
    figure, panels = make_panels(len(first))
    norm, tables = Normalize(0, 1), []
    for axes, (name, (_, table)) in zip(panels, first.items(), strict=True):
        # From a row for each pair of clients back to the matrix.
        matrix = table.pivot_table(index="client", columns="other", values="interaction").to_numpy()
        # The label repeats in each row of a client: one of them is enough.
        label = table.drop_duplicates("client").sort_values("client")["label"].to_numpy()
        # Stable: within a cluster clients stay in the order of their numbers.
        order = np.argsort(label, kind="stable")
        axes.grid(visible=False)
        axes.imshow(matrix[order][:, order], cmap="cividis", norm=norm)
        # Between two cells: imshow centers cell i at i.
        for edge in np.flatnonzero(np.diff(label[order])) + 0.5:
            axes.axhline(edge, color="white", lw=1)
            axes.axvline(edge, color="white", lw=1)
        groups = len(np.unique(label))
        axes.set(
            title=name,
            ylabel="client",
            xlabel=f"client; {groups} cluster{'s' if groups != 1 else ''} found",
        )
        tables.append(table.assign(method=name))
    figure.colorbar(ScalarMappable(norm, "cividis"), ax=panels, label="interaction", shrink=0.8)
    return figure, pd.concat(tables, ignore_index=True)


def _load_analysis(runs: NamedRuns, what: str) -> list[tuple[str, StoredRun, pd.DataFrame]]:
    """The tables of an analysis, of the runs that have one."""
    found = []
    for name, run in runs:
        path = run.folder / FOLDER / f"{what}.parquet"
        if path.is_file():
            found.append((name, run, pd.read_parquet(path)))
    if not found:
        folder = runs[0][1].folder.parent.parent
        raise DataError(
            f"no run here was analyzed; first say: coterie analyze {folder} --what {what}"
        )
    return found


def plot_class_shares(runs: NamedRuns, *, most: int = 12) -> DrawnFigure:
    """Class shares of each found cluster's training data, for the first method with clusters.

    Each cluster has a panel.

    Args:
        runs: named runs.
        most: largest number of panels, those of the largest clusters.
    """
    name, (run, label) = next(iter(collect_found_labels(runs).items()))
    classes, content = count_cluster_content(run, "class")
    groups, sizes = np.unique(label[np.isfinite(label)].astype(int), return_counts=True)
    # The largest clusters, then in the order of their numbers.
    groups = np.sort(groups[np.argsort(-sizes, kind="stable")][:most])
    figure = Figure(figsize=(WIDTH, 0.8 + 0.75 * len(groups)), layout="constrained")
    # One panel comes alone, and not as an array of one.
    panels = np.atleast_1d(np.array(figure.subplots(len(groups), 1, sharex=True, sharey=True)))
    rows = []
    for place, (axes, group) in enumerate(zip(panels, groups, strict=True)):
        mine = label == group
        count = content[mine].sum(0)
        share = PERCENT * count / count.sum()
        axes.bar(
            range(len(classes)),
            share,
            width=1.0 if len(classes) > 30 else 0.8,
            # The palette has eight colors.
            color=COLORS[place % 8],
            lw=0,
        )
        axes.set_title(
            f"{name}: found cluster {group}, {int(mine.sum())} clients", loc="left", pad=2
        )
        axes.grid(visible=False, axis="x")
        for column, n in zip(classes, count, strict=True):
            rows.append((name, int(group), column, int(n)))
    # Above 20 classes the names do not fit: every tenth number instead.
    step, names, rotation = 10, list(map(str, range(len(classes)))), 0
    if len(classes) <= 20:
        step, names = 1, list(classes)
        # Names of over two letters overlap when they lie flat.
        rotation = 90 if max(map(len, classes)) > 2 else 0
    panels[-1].set_xticks(range(0, len(classes), step))
    panels[-1].set_xticklabels(names[::step], rotation=rotation)
    panels[-1].set_xlabel("class")
    figure.supylabel("share of training samples (%)", fontsize=8)
    return figure, pd.DataFrame(rows, columns=["method", "found", "of", "count"])


BINS = 30
# The ratio of similarities from which their axis becomes logarithmic. DAC's similarity 1 / loss
# reaches such ratios when models overfit: the losses on the own data go to zero.
HEAVY = 1000.0
HISTOGRAM = ["pairs", "low", "high", "count", "mean", "std", "own_above_other"]
PAIRS = ("own cluster", "another cluster")
OWN = Metric(
    "own_cluster", title="neighbors of own cluster", unit="%", scale=PERCENT, digits=2, shown="not"
)


def plot_similarities(
    runs: NamedRuns,
    *,
    column: Literal["similarity", "probability"] = "similarity",
    moments: int = 2,
) -> DrawnFigure:
    """Similarities of peers of the own cluster and of others: a panel per method and round.

    Next to the histograms (all clients, all seeds) stand the normal distributions with their means
    and deviations.

    Args:
        runs: named runs that recorded similarities.
        column: "similarity", or "probability", with which the peers were drawn.
        moments: how many rounds are shown of each method: the last in which it has values, and
            others evenly before.
    """
    groups: dict[str, list[pd.DataFrame]] = {}
    shown: list[tuple[str, int]] = []
    for name, group in group_by_name(runs).items():
        own = [_load_pairs(run, column) for run in group]
        # A method without recorded pairs gets no panel.
        if any(map(len, own)):
            groups[name] = own
            shown += [(name, index) for index in _choose_rounds(own, moments)]
    if not groups:
        raise DataError(
            f"no method here recorded a {column} of clients whose clusters are known; run the "
            "study with "
            "--set record_similarities=true"
        )
    figure, panels = make_panels(len(shown))
    tables = []
    for axes, (name, index) in zip(panels, shown, strict=True):
        rows = pd.concat([own.loc[(own["round"] == index).to_numpy()] for own in groups[name]])
        drawn = _plot_histograms(
            axes, rows[column].to_numpy(float), rows["own"].to_numpy(bool), column
        )
        axes.set(title=f"{name}\nround {index + 1}", xlabel=column)
        tables.append(drawn.assign(method=name, round=index))
    panels[0].set_ylabel("share of pairs (%)")
    add_shared_legend(panels, ncols=2)
    table = pd.concat(tables, ignore_index=True)
    return figure, table.reindex(columns=["method", "round", *HISTOGRAM])


def _load_pairs(run: StoredRun, column: str) -> pd.DataFrame:
    """Load a run's records of pairs with known clusters: round, value, and if clusters agree."""
    if column not in run.edges:
        return pd.DataFrame({"round": [], column: [], "own": []})
    reader, read = _find_planted_clusters(run, run.edges)
    value = run.edges[column].to_numpy(float)
    known = np.isfinite(value) & (reader >= 0) & (read >= 0)
    table = pd.DataFrame(
        {"round": run.edges["round"].to_numpy(), column: value, "own": reader == read}
    )
    return table.loc[known]


def _find_planted_clusters(run: StoredRun, edges: pd.DataFrame) -> list[Int[np.ndarray, " edges"]]:
    """Return the planted clusters of the reader and the read client of each edge; -1: unknown."""
    rounds, find = edges["round"].to_numpy(np.int64), run.planted_phases.find
    return [find(rounds, edges[one].to_numpy(np.int64)) for one in ("reader", "read")]


def _choose_rounds(tables: Sequence[pd.DataFrame], number: int) -> list[int]:
    """Some of the rounds in which there are values, evenly spread, the last one among them."""
    rounds = sorted(set().union(*(map(int, table["round"].unique()) for table in tables)))
    # -(-a // b) rounds up. A set: with few rounds two steps may meet at one place.
    places = {-(-len(rounds) * (step + 1) // number) - 1 for step in range(number)}
    return [rounds[place] for place in sorted(places)]


def _plot_histograms(
    axes: Axes, value: Float[np.ndarray, " pairs"], own: Bool[np.ndarray, " pairs"], column: str
) -> pd.DataFrame:
    """Draw values of pairs within and across clusters; the table has bins and the separation."""
    low, high = float(value.min()), float(value.max())
    wide = low > 0 and high > (FAR if column == "probability" else HEAVY) * low
    # One value alone would give bins of width 0: the range is widened by 1.
    edges = np.linspace(low, high + (low == high), BINS + 1)
    if wide:
        edges = np.geomspace(low, high, BINS + 1)
    above, rows = _probability_above(value, own), []
    for place, (name, mine) in enumerate(zip(PAIRS, (own, ~own), strict=True)):
        if not mine.any():
            continue
        count = np.histogram(value[mine], edges)[0]
        mean, spread = value[mine].mean(), value[mine].std()
        # Blue and orange: far apart in the palette.
        color = COLORS[(0, 4)[place]]
        axes.stairs(
            PERCENT * count / mine.sum(), edges, fill=True, color=color, alpha=0.45, label=name
        )
        if column == "similarity" and spread > 0:
            # The normal curve shows its mass in a window of one bin around x, so that it has the
            # scale of the histogram. Bins of a logarithmic axis have equal ratios.
            if wide:
                x, half = np.geomspace(low, high, 200), np.sqrt(edges[1] / edges[0])
                left, right = x / half, x * half
            else:
                x, half = np.linspace(low, high, 200), (edges[1] - edges[0]) / 2
                left, right = x - half, x + half
            share = ndtr((right - mean) / spread) - ndtr((left - mean) / spread)
            axes.plot(x, PERCENT * share, color=color, ls=("-", "--")[place], lw=1)
        # One number of separation for both groups: it stands in each of their rows.
        for a, b, n in zip(edges[:-1], edges[1:], count, strict=True):
            rows.append((name, float(a), float(b), int(n), float(mean), float(spread), above))
    if wide:
        set_log_scale(axes, "x")
        # A panel has no room for the names of seven decades.
        axes.xaxis.set_major_locator(LogLocator(numticks=3))
    return pd.DataFrame(rows, columns=HISTOGRAM)


def _probability_above(
    value: Float[np.ndarray, " pairs"], own: Bool[np.ndarray, " pairs"]
) -> float:
    """The probability that a same-cluster pair has the larger value; ties count half."""
    number, others = int(own.sum()), int((~own).sum())
    if not number or not others:
        return float("nan")
    # Mann-Whitney: the rank sum counts for each pair of one cluster the pairs of two below it.
    rank = pd.Series(value).rank().to_numpy()
    return float((rank[own].sum() - number * (number + 1) / 2) / (number * others))


def plot_neighbors(
    runs: NamedRuns, *, metric: str | None = None, split: str = "validation", cluster: str = "all"
) -> DrawnFigure:
    """A metric over rounds, and the share of averaged models from the clients' own clusters.

    Args:
        runs: named runs of peer-to-peer methods, with planted clusters.
        metric: its name; the one that the runs are judged by when None.
        split: "train", "validation" or "test".
        cluster: of the metric: "all", "clusters" or a cluster's name.
    """
    shown = choose_metric(runs, metric)
    figure, panels = make_panels(2)
    # A set: methods on the same planted clusters have one level of chance, and one line.
    rows, chance = [], set[float]()
    for place, (name, group) in enumerate(group_by_name(runs).items()):
        curve = draw_method_curve(panels[0], name, group, place, (split, shown, cluster))
        rows += [(name, shown.name, *one) for one in curve]
        tables = [own for run in group if len(own := _own_share(run))]
        rounds = sorted(set().union(*(own.index for own in tables)))
        if rounds:
            # Seeds that lack a round have NaN there.
            values = np.array([own.reindex(rounds).to_numpy(float) for own in tables])
            band = draw_band(panels[1], name, place, rounds, values, PERCENT)
            rows += [(name, OWN.name, *one) for one in band]
            planted = np.delete(group[0].planted_clusters, group[0].late_clients)
            chance.add(graph.expected_share(planted))
    if not chance:
        raise DataError(
            "no client here averaged with others whose clusters are known; there are no "
            "neighbors to show"
        )
    # Where peers are drawn uniformly: what a curve must rise above to show a choice.
    for level in chance:
        panels[1].axhline(PERCENT * level, color="#777777", lw=0.7, ls=":", label="uniform draws")
    panels[0].set(xlabel="round", ylabel=format_axis_label(shown, split))
    panels[1].set(xlabel="round", ylabel=format_axis_label(OWN))
    add_shared_legend(panels, ncols=2)
    return figure, pd.DataFrame(rows, columns=["method", "metric", "round", "mean", "std", "seeds"])


def _own_share(run: StoredRun) -> pd.Series:
    """Each round's share of averaged models from the client's own cluster: mean over clients."""
    # Only models that were averaged with: scored and relayed ones are no neighbors.
    mixed = run.edges.loc[(run.edges["purpose"] == "mix").to_numpy(), ["round", "reader", "read"]]
    reader, read = _find_planted_clusters(run, mixed)
    mixed = mixed.assign(own=(reader == read).astype(float)).loc[(reader >= 0) & (read >= 0)]
    # First within a client, then over clients: a client with many peers does not weigh more.
    return mixed.groupby(["round", "reader"])["own"].mean().groupby(level="round").mean()


def _figure(figure: str, study: str, shows: str = "", **options: Any) -> PublishedFigure:
    return PublishedFigure(figure, options, study, shows)


SIMILARITIES = ("Inverse loss", "Cosine of updates", "Cosine of weights", "L2")
ROWS = (*SIMILARITIES, *(f"{name} FedSim" for name in SIMILARITIES), "Random", "Oracle", "Local")
PUBLISHED.update(
    {
        "similarity-2a": _figure(
            "heatmap",
            "similarity/synthetic",
            "How often each client read each other: inverse loss and L2 are noisier than the "
            "cosines.",
            methods=SIMILARITIES,
        ),
        "similarity-2b": _figure("heatmap", "similarity/cifar100-pretrained", methods=SIMILARITIES),
        "similarity-3a": _figure(
            "bars",
            "similarity/synthetic",
            "Losses with concept shift: FedSim lowers them, those of inverse loss and L2 most; "
            "inverse loss is the "
            "worst metric, the cosines come close to the oracle.",
            methods=ROWS,
        ),
        "similarity-3b": _figure(
            "samples",
            "similarity/samples",
            "Losses by the number of training samples: inverse loss and L2 come nearer to the "
            "cosines, never to them.",
        ),
        "similarity-4a": _figure(
            "bars",
            "similarity/domain-mlp",
            "Accuracies on MNIST with Fashion-MNIST, an MLP: a gap between random peers and the "
            "oracle; FedSim helps "
            "only L2.",
            methods=ROWS,
        ),
        "similarity-4b": _figure(
            "bars",
            "similarity/domain-cnn",
            "Accuracies on MNIST with Fashion-MNIST, a CNN: inverse loss is far below the other "
            "metrics, a cosine is "
            "best.",
            methods=ROWS,
        ),
        "similarity-5a": _figure(
            "bars",
            "similarity/fmnist-covariate-4",
            "Accuracies on rotated Fashion-MNIST: every metric is above random peers but the "
            "cosine of updates with "
            "FedSim.",
            methods=ROWS,
        ),
        "similarity-5b": _figure("bars", "similarity/cifar100-pretrained", methods=ROWS),
        "similarity-5c": _figure("bars", "similarity/cifar10-label-2", methods=ROWS),
        "similarity-5d": _figure("bars", "similarity/cifar10-label-5", methods=ROWS),
        "similarity-6": _figure("peers", "similarity/peers"),
        "similarity-7": _figure(
            "heatmap",
            "similarity/cifar10-label-2, similarity/cifar10-label-5, similarity/fmnist-covariate-4",
            methods=SIMILARITIES,
        ),
        "similarity-8": _figure(
            "sensitivity", "similarity/tau-cifar10-*", studies=("*tau-cifar10-label-[25]",)
        ),
        "similarity-9": _figure(
            "sensitivity",
            "similarity/tau-domain-cnn, similarity/tau-fmnist-covariate-4",
            studies=("*tau-domain-cnn", "*tau-fmnist-covariate-4"),
        ),
        "similarity-10": _figure("tau", "similarity/tau-cifar100"),
        "dac-2": _figure("samples", "dac/samples"),
        "dac-3": _figure("tau", "dac/tau"),
        "dac-4": _figure(
            "heatmap",
            "dac/cifar10-label-40-60",
            "How often each client read each other: DAC finds the clusters and has stripes, a "
            "few clients that many "
            "read; DAC-var has no stripes; PENS is noisier.",
        ),
        "panm-2": _figure(
            "neighbors",
            "panm/ablation",
            "An ablation of PANMGrad: the similarity of both cosines, that of the last update "
            "and that of all updates, "
            "is called robust and effective. What its axes show is not said; here they are the "
            "accuracy, and which "
            "share of a client's neighbors are of its own cluster.",
            metric=ACCURACY.name,
            split="test",
        ),
        "panm-3": _figure(
            "similarities",
            "panm/similarities",
            "Distributions of similarities: high within a cluster and low between clusters, "
            "taken for two Gaussians.",
        ),
        "panm-4": _figure(
            "graph",
            "panm/cifar10-4",
            "Topologies of neighbors in stage two, next to those of baselines: a color for each "
            "cluster.",
            after="stage_one_rounds",
        ),
        "panm-5-left": _figure(
            "samples", "panm/samples", "Accuracies as the size of the clients' datasets varies."
        ),
        "panm-5-right": _figure(
            "population", "panm/population", "Accuracies as the number of clients varies."
        ),
        "sosicfl-4": _figure(
            "curves",
            "sosicfl/cifar10-squeezenet-2-fold",
            split="test",
            metric=f"{GLOBAL_ACCURACY.name},{ACCURACY.name}",
        ),
        "sosicfl-5": _figure("simplex", "sosicfl/cifar10-squeezenet-dirichlet"),
        "sosicfl-7a": _figure("variance", "sosicfl/cifar10-squeezenet-dirichlet"),
        "sosicfl-7b": _figure("sweep", "sosicfl/regions", setting="regions,radius"),
        "sosicfl-8": _figure("curves", "sosicfl/late-start", split="test", metric=ACCURACY.name),
        "fedgwc-2": _figure(
            "curves",
            "fedgwc/cifar100-dirichlet",
            split="test",
            metric=ACCURACY.name,
            splits=True,
            methods=("FedAvg", "FedGWC"),
        ),
        "fedgwc-4": _figure("change", "fedgwc/cifar10-hom-het"),
        "fedgwc-5": _figure("interaction", "fedgwc/cifar10-hom-het"),
        "fedgwc-6": _figure("interaction", "fedgwc/cifar10-hom"),
        "fedgwc-7": _figure("classes", "fedgwc/cifar100-dirichlet"),
        "fedgwc-8": _figure("labels", "fedgwc/cifar100-clean-noise-blur"),
    }
)
NOT_STORED["sosicfl-6"] = "the text of the paper does not say what it shows"
FIGURES.update(
    {
        "classes": FigureKind(plot_class_shares, "classes of the data in each found cluster", {}),
        "similarities": FigureKind(
            plot_similarities,
            "similarities of peers of the own cluster and of others, as recorded",
            {},
        ),
        "probabilities": FigureKind(
            plot_similarities,
            "probabilities with which peers were drawn, as recorded",
            {"column": "probability"},
        ),
        "neighbors": FigureKind(
            plot_neighbors,
            "a metric, and the share of neighbors of the own cluster, over rounds",
            {},
        ),
        "interaction": FigureKind(
            plot_interactions, "FedGWC's interaction matrix, of `coterie analyze`", {}
        ),
        "simplex": FigureKind(
            plot_simplexes, "accuracy all over SosicFL's simplex, of `coterie analyze`", {}
        ),
        "variance": FigureKind(
            plots.draw_curves,
            "variance of updates over rounds",
            {"metric": GRADIENT_VARIANCE.name, "split": "train", "log": True},
        ),
        "change": FigureKind(
            plots.draw_curves,
            "change of FedGWC's interaction matrix over rounds",
            {"metric": INTERACTION_CHANGE.name, "split": "train", "log": True},
        ),
    }
)
