"""The figures of the papers: the options of each published figure, and those drawn from `coterie analyze` results.

Importing this module adds them to `report.figures`, whose `plot` draws them.
"""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from coterie._util.names import called, short
from coterie.errors import DataError
from coterie.functional.metrics import ACCURACY, GLOBAL_ACCURACY, GRADIENT_VARIANCE, INTERACTION_CHANGE, LABEL
from coterie.report import plots
from coterie.report.data.packing import dense
from coterie.report.figures import FIGURES, NOT_STORED, PUBLISHED, Kind, PublishedFigure, plot
from coterie.report.plots import COLORS, PERCENT, WIDTH, Drawn, Named, content_of, groups_of, panels_of
from coterie.results.summary import StoredRun

__all__ = ["distributions", "interactions", "plot", "simplexes"]

ANALYSES = "analyses"
EVERYBODY = -1  # the client of rows about all test sets together
SERVED = -1  # the point that models are served from


def simplexes(runs: Named) -> Drawn:
    """Accuracy of models over a simplex: a panel for all test sets, and one for each tested client."""
    name, run, table = _measured(runs, "simplex")[0]
    axes_of = [column for column in table.columns if column.startswith("alpha_")]
    corners = _corners(len(axes_of))
    clients = sorted(int(client) for client in table["client"].unique())
    figure, panels = panels_of(len(clients))
    accuracy = ACCURACY.scale * table[ACCURACY.name].to_numpy(float)
    norm = Normalize(accuracy.min(), accuracy.max())
    for axes, client in zip(panels, clients, strict=True):
        own = table.loc[(table["client"] == client).to_numpy()]
        place = own[axes_of].to_numpy(float) @ corners
        value, served = ACCURACY.scale * own[ACCURACY.name].to_numpy(float), (own["point"] == SERVED).to_numpy()
        outline = np.concatenate([corners, corners[:1]])
        axes.plot(outline[:, 0], outline[:, 1], color="#777777", lw=0.6, zorder=1)
        axes.scatter(place[~served, 0], place[~served, 1], c=value[~served], cmap="cividis", norm=norm, s=4, lw=0)
        axes.plot(place[served, 0], place[served, 1], "*", color="white", mec="black", ms=9, mew=0.8)
        axes.set(title="all test sets" if client == EVERYBODY else short(called(run.names, client)), aspect="equal")
        axes.axis("off")
    figure.colorbar(ScalarMappable(norm, "cividis"), ax=panels, label="test accuracy (%); star: served", shrink=0.8)
    return figure, table.assign(method=name, seed=run.seed)


def _corners(number: int) -> Float[np.ndarray, "topics 2"]:
    """Corners of a regular polygon: exact for up to three endpoints, a projection of the simplex for more."""
    if number == 2:
        return np.array([[0.0, 0.0], [1.0, 0.0]])
    angle = np.pi / 2 + 2 * np.pi * np.arange(number) / number
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def interactions(runs: Named) -> Drawn:
    """FedGWC's interaction matrix of each first seed, in order of found cluster, with lines between clusters."""
    found = _measured(runs, "interaction")
    first = {name: (run, table) for name, run, table in reversed(found)}
    figure, panels = panels_of(len(first))
    norm, tables = Normalize(0, 1), []
    for axes, (name, (_, table)) in zip(panels, first.items(), strict=True):
        matrix = table.pivot_table(index="client", columns="other", values="interaction").to_numpy()
        label = table.drop_duplicates("client").sort_values("client")["label"].to_numpy()
        order = np.argsort(label, kind="stable")
        axes.grid(visible=False)
        axes.imshow(matrix[order][:, order], cmap="cividis", norm=norm)
        for edge in np.flatnonzero(np.diff(label[order])) + 0.5:
            axes.axhline(edge, color="white", lw=1)
            axes.axvline(edge, color="white", lw=1)
        groups = len(np.unique(label))
        axes.set(title=name, ylabel="client", xlabel=f"client; {groups} cluster{'s' if groups != 1 else ''} found")
        tables.append(table.assign(method=name))
    figure.colorbar(ScalarMappable(norm, "cividis"), ax=panels, label="interaction", shrink=0.8)
    return figure, pd.concat(tables, ignore_index=True)


def _measured(runs: Named, what: str) -> list[tuple[str, StoredRun, pd.DataFrame]]:
    """The tables of an analysis, of the runs that have one."""
    found = []
    for name, run in runs:
        path = run.folder / ANALYSES / f"{what}.parquet"
        if path.is_file():
            found.append((name, run, pd.read_parquet(path)))
    if not found:
        folder = runs[0][1].folder.parent.parent
        raise DataError(f"no run here was analyzed; first say: coterie analyze {folder} --what {what}")
    return found


def distributions(runs: Named, *, most: int = 12) -> Drawn:
    """Class shares of the training data in each found cluster, a panel per cluster, of the first method with clusters.

    Args:
        runs: named runs.
        most: largest number of panels, those of the largest clusters.
    """
    tables = {name: (group[0], dense(group[0], "train", LABEL.name)[1]) for name, group in groups_of(runs).items()}
    name = next((name for name, (_, values) in tables.items() if len(values)), None)
    if name is None:
        raise DataError("no method here reports labels of its own; clustered methods such as fedgwc and ifca do")
    run, values = tables[name]
    classes, content = content_of(run, "class")
    label = values[-1]
    groups, sizes = np.unique(label[np.isfinite(label)].astype(int), return_counts=True)
    groups = np.sort(groups[np.argsort(-sizes, kind="stable")][:most])
    figure = Figure(figsize=(WIDTH, 0.8 + 0.75 * len(groups)), layout="constrained")
    panels = np.atleast_1d(np.array(figure.subplots(len(groups), 1, sharex=True, sharey=True)))
    rows = []
    for place, (axes, group) in enumerate(zip(panels, groups, strict=True)):
        mine = label == group
        count = content[mine].sum(0)
        share = PERCENT * count / count.sum()
        axes.bar(range(len(classes)), share, width=1.0 if len(classes) > 30 else 0.8, color=COLORS[place % 8], lw=0)
        axes.set_title(f"{name}: found cluster {group}, {int(mine.sum())} clients", loc="left", pad=2)
        axes.grid(visible=False, axis="x")
        rows += [(name, int(group), column, int(n)) for column, n in zip(classes, count, strict=True)]
    few = len(classes) <= 20
    panels[-1].set_xticks(range(len(classes)) if few else range(0, len(classes), 10))
    panels[-1].set_xticklabels(
        classes if few else [str(k) for k in range(0, len(classes), 10)],
        rotation=90 if few and max(map(len, classes)) > 2 else 0,
    )
    panels[-1].set_xlabel("class")
    figure.supylabel("share of training samples (%)", fontsize=8)
    return figure, pd.DataFrame(rows, columns=["method", "found", "of", "count"])


def _of(figure: str, study: str, **options: Any) -> PublishedFigure:
    return PublishedFigure(figure, options, study)


SIMILARITIES = ("Inverse loss", "Cosine of updates", "Cosine of weights", "L2")
ROWS = (*SIMILARITIES, *(f"{name} FedSim" for name in SIMILARITIES), "Random", "Oracle", "Local")
PUBLISHED.update(
    {
        "similarity-2a": _of("heatmap", "similarity/synthetic", methods=SIMILARITIES),
        "similarity-2b": _of("heatmap", "similarity/cifar100-pretrained", methods=SIMILARITIES),
        "similarity-3a": _of("bars", "similarity/synthetic", methods=ROWS),
        "similarity-3b": _of("samples", "similarity/samples"),
        "similarity-4a": _of("bars", "similarity/domain-mlp", methods=ROWS),
        "similarity-4b": _of("bars", "similarity/domain-cnn", methods=ROWS),
        "similarity-5a": _of("bars", "similarity/fmnist-covariate-4", methods=ROWS),
        "similarity-5b": _of("bars", "similarity/cifar100-pretrained", methods=ROWS),
        "similarity-5c": _of("bars", "similarity/cifar10-label-2", methods=ROWS),
        "similarity-5d": _of("bars", "similarity/cifar10-label-5", methods=ROWS),
        "similarity-6": _of("peers", "similarity/peers"),
        "similarity-7": _of(
            "heatmap",
            "similarity/cifar10-label-2, similarity/cifar10-label-5, similarity/fmnist-covariate-4",
            methods=SIMILARITIES,
        ),
        "similarity-8": _of("sensitivity", "similarity/tau-cifar10-*", studies=("*tau-cifar10-label-[25]",)),
        "similarity-9": _of(
            "sensitivity",
            "similarity/tau-domain-cnn, similarity/tau-fmnist-covariate-4",
            studies=("*tau-domain-cnn", "*tau-fmnist-covariate-4"),
        ),
        "similarity-10": _of("tau", "similarity/tau-cifar100"),
        "dac-2": _of("samples", "dac/samples"),
        "dac-3": _of("tau", "dac/tau"),
        "dac-4": _of("heatmap", "dac/cifar10-label-40-60"),
        "panm-4": _of("graph", "panm/cifar10-4", after="stage_one_rounds"),
        "panm-5-left": _of("samples", "panm/samples"),
        "panm-5-right": _of("population", "panm/population"),
        "sosicfl-4": _of(
            "curves",
            "sosicfl/cifar10-squeezenet-2-fold",
            split="test",
            metric=f"{GLOBAL_ACCURACY.name},{ACCURACY.name}",
        ),
        "sosicfl-5": _of("simplex", "sosicfl/cifar10-squeezenet-dirichlet"),
        "sosicfl-7a": _of("variance", "sosicfl/cifar10-squeezenet-dirichlet"),
        "sosicfl-7b": _of("sweep", "sosicfl/regions", setting="regions,radius"),
        "sosicfl-8": _of("curves", "sosicfl/late-start", split="test", metric=ACCURACY.name),
        "fedgwc-2": _of(
            "curves",
            "fedgwc/cifar100-dirichlet",
            split="test",
            metric=ACCURACY.name,
            splits=True,
            methods=("FedAvg", "FedGWC"),
        ),
        "fedgwc-4": _of("change", "fedgwc/cifar10-hom-het"),
        "fedgwc-5": _of("interaction", "fedgwc/cifar10-hom-het"),
        "fedgwc-6": _of("interaction", "fedgwc/cifar10-hom"),
        "fedgwc-7": _of("classes", "fedgwc/cifar100-dirichlet"),
        "fedgwc-8": _of("labels", "fedgwc/cifar100-clean-noise-blur"),
    }
)
NOT_STORED["sosicfl-6"] = "the text of the paper does not say what it shows"
FIGURES.update(
    {
        "classes": Kind(distributions, "classes of the data in each found cluster", {}),
        "interaction": Kind(interactions, "FedGWC's interaction matrix, of `coterie analyze`", {}),
        "simplex": Kind(simplexes, "accuracy all over SosicFL's simplex, of `coterie analyze`", {}),
        "variance": Kind(
            plots.curves,
            "variance of updates over rounds",
            {"metric": GRADIENT_VARIANCE.name, "split": "train", "log": True},
        ),
        "change": Kind(
            plots.curves,
            "change of FedGWC's interaction matrix over rounds",
            {"metric": INTERACTION_CHANGE.name, "split": "train", "log": True},
        ),
    }
)
