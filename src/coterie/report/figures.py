"""Static figures for papers, from stored runs: vector graphics, with their numbers as a CSV file.

`FIGURES` names the kinds of figure; `PUBLISHED` maps each published figure to its kind. Colors are
the report's, chosen for contrast and for every kind of color blindness. Every line has a dash and
every point a shape of its own, so that a figure stays readable in gray.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from coterie._util.files import check_file, prepare_file, replace_atomically, show_path
from coterie.errors import ConfigError, DataError, describe_unknown
from coterie.report import plots
from coterie.results.coverage import IncompleteStudyWarning, describe_coverage
from coterie.results.selection import group_by_study, select_charted_runs
from coterie.results.stored_runs import StoredRun, load_runs
from coterie.results.varied import find_value, format_value, name_runs, split_setting

FORMATS = ("pdf", "svg", "png")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    # TrueType: publishers refuse Type 3 fonts, matplotlib's default.
    "pdf.fonttype": 42,
    # Text stays text, in the reader's font.
    "svg.fonttype": "none",
    # Ids in an SVG are random without a salt: equal runs must give equal files.
    "svg.hashsalt": "coterie",
    "savefig.dpi": 200,
    "text.parse_math": False,  # a $ in a name is a $
}


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure.

    Args:
        draw: takes the runs and the options, returns a figure and the table of its numbers.
        text: what it shows, in a line.
        options: its default options.
    """

    draw: Callable[..., tuple[Figure, pd.DataFrame]]
    text: str
    options: Mapping[str, Any]


def _make_sweep_kind(setting: str, text: str) -> FigureKind:
    return FigureKind(plots.draw_sweep, text, {"setting": setting})


# `coterie.papers` adds the kinds that only its papers have.
FIGURES: dict[str, FigureKind] = {
    "curves": FigureKind(plots.draw_curves, "learning curves with bands over seeds", {}),
    "heatmap": FigureKind(
        plots.draw_heatmaps, "which models each client used, a panel per method", {}
    ),
    "bars": FigureKind(
        plots.draw_bars, "final test metric of each method, between Random and Oracle", {}
    ),
    "clients": FigureKind(plots.draw_client_strips, "final test metric of each client", {}),
    "graph": FigureKind(plots.draw_graphs, "clients and their most used peers", {}),
    "labels": FigureKind(plots.draw_label_bars, "found and planted clusters", {}),
    "sensitivity": FigureKind(
        plots.draw_sensitivities, "a setting, a panel for each study", {"setting": "tau"}
    ),
    "tau": _make_sweep_kind("tau", "sensitivity to tau"),
    "samples": _make_sweep_kind("train", "training samples per client"),
    "peers": _make_sweep_kind("num_peers", "sampled peers"),
    "population": _make_sweep_kind("num_clients", "number of clients"),
    "sweep": FigureKind(plots.draw_sweep, "any setting, with --setting; two make a grid", {}),
}


@dataclass(frozen=True)
class PublishedFigure:
    """A figure of a paper: its kind, options and study.

    Args:
        figure: the kind.
        options: options of the kind; `methods` are the labels to show, if the runs have any of
            them.
        study: the study of which it needs runs.
        shows: what the paper says about it, if it says that in words; see
            docs/reference/reproduction.md.
    """

    figure: str
    options: Mapping[str, Any]
    study: str
    shows: str = ""


PUBLISHED: dict[str, PublishedFigure] = {}
"""Published figures by name, such as "dac-3"; `coterie.papers` adds those of its papers."""
NOT_STORED: dict[str, str] = {}
"""Published figures that cannot be drawn from stored runs, and why."""


def plot(
    runs: Sequence[str | Path],
    figure: str,
    *,
    out: str | Path | None = None,
    format: str = "pdf",
    **options: Any,
) -> Path:
    """Draw a figure of stored runs, and write its numbers to a CSV file next to it.

    Args:
        runs: folders of studies or runs; for a sweep, the folders of its points or the folder above
            them.
        figure: a name of FIGURES, or a published figure of PUBLISHED such as "dac-3".
        out: the file; default the figure's name in the current folder.
        format: "pdf", "svg" or "png"; the suffix of `out` has precedence.
        options: `methods` (labels to show, a list or a text with commas; `*` matches anything),
            `metric`, `split` (curves), `cluster` ("all", "clusters" or a cluster's name), `setting`
            (the name or path of one that the runs vary, or "NAME=PATH"; of two, with a comma, for a
            grid). A figure that has no axis for it names each method with its value.

    Returns:
        The path of the figure; the CSV file has the same name with another suffix.

    Warns:
        IncompleteStudyWarning: for each method whose runs are missing, damaged or not finished, and
            about the drawn seeds: of each study the seeds that all its methods finished.

    Raises:
        ConfigError: for an unknown figure or format, or a published figure that stored runs cannot
            give.
        DataError: when the runs do not hold what the figure shows.
    """
    if figure in NOT_STORED:
        raise ConfigError(f"figure {figure} cannot be drawn from stored runs: {NOT_STORED[figure]}")
    if figure not in FIGURES and figure not in PUBLISHED:
        raise ConfigError(describe_unknown("figure", figure, [*FIGURES, *PUBLISHED]))
    published = PUBLISHED.get(figure)
    kind = FIGURES[published.figure if published else figure]
    # Later ones win: the caller's options over the paper's over the kind's.
    chosen = {**kind.options, **(published.options if published else {}), **options}
    path = Path(out) if out is not None else Path(f"{figure}.{format}")
    suffix = path.suffix.removeprefix(".")
    if suffix not in FORMATS:
        raise ConfigError(describe_unknown("format", suffix or str(path), FORMATS))
    # Before drawing, which may take minutes.
    for file in (path, path.with_suffix(".csv")):
        check_file(file)
    drawn_before = any(path.with_suffix(f".{name}").exists() for name in FORMATS)
    if path.with_suffix(".csv").exists() and not drawn_before:
        # A figure and its table are written together, so this one belongs to somebody else.
        raise ConfigError(
            f"{show_path(path.with_suffix('.csv'))} exists without its figure, and would be "
            "replaced by the figure's table; choose another name with --out"
        )
    found = _load_drawn_runs(runs)
    # A paper's labels are a default, which may fit none; labels that the caller gave must.
    found = _select_methods(found, chosen.pop("methods", ()), asked="methods" in options)
    # For this figure alone: the caller's own style and warnings stay.
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        try:
            named = _name_runs(found)
            if "setting" in chosen and "setting" not in inspect.signature(kind.draw).parameters:
                named = _name_by_setting(found, chosen.pop("setting"))
            drawn, table = kind.draw(named, **chosen)
        except DataError as problem:
            if published is None:
                raise
            raise DataError(
                f"figure {figure} needs runs of {published.study}: {problem}"
            ) from problem
        # The font may lack letters of a name; the table has the name whole.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        # Without a date the same runs give the same bytes.
        stamp = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[suffix]
        with replace_atomically(prepare_file(path)) as temporary:
            drawn.savefig(temporary, format=suffix, bbox_inches="tight", metadata=stamp)
    with replace_atomically(path.with_suffix(".csv")) as temporary:
        table.to_csv(temporary, index=False)
    return path


def _load_drawn_runs(folders: Sequence[str | Path]) -> list[StoredRun]:
    """Load the runs to draw: of each study its compared runs, or all if it has none."""
    found, problems = load_runs(folders)
    if not found:
        raise DataError(f"no run could be read: {problems[0].folder}: {problems[0].reason}")
    drawn = []
    for own, broken, content in group_by_study(folders, found, problems):
        for note in describe_coverage(content):
            warnings.warn(f"{content['study']}: {note}", IncompleteStudyWarning, stacklevel=3)
        drawn += select_charted_runs(own, broken)
    return drawn


def _select_methods(
    runs: Sequence[StoredRun], methods: str | Sequence[str], *, asked: bool
) -> list[StoredRun]:
    """Select the runs of some methods; all runs when no default label fits."""
    patterns = list(methods)
    if isinstance(methods, str):
        patterns = [one.strip() for one in methods.split(",")]
    chosen = []
    for run in runs:
        if any(fnmatchcase(run.label, pattern) for pattern in patterns):
            chosen.append(run)
    if asked and not chosen:
        labels = ", ".join(dict.fromkeys(run.label for run in runs))
        raise ConfigError(f"methods is {', '.join(patterns)!r}; the runs here are of: {labels}")
    return chosen or list(runs)


def _name_runs(runs: Sequence[StoredRun]) -> list[tuple[str, StoredRun]]:
    """Return the runs with a name for their line: the label, and the study if there are several."""
    names = {run.folder.parent.parent: run.study_name for run in runs}
    # The name of a study begins with its paper, which would not fit a legend. Where two studies
    # have one name then, a line would be a mean over both.
    shown = {folder: name.split("/", 1)[-1] for folder, name in names.items()}
    if len(set(shown.values())) < len(names):
        shown = names
    if len(set(shown.values())) < len(names):
        shown = {folder: str(folder) for folder in names}
    named = []
    for run in runs:
        study = f", {shown[run.folder.parent.parent]}" if len(names) > 1 else ""
        named.append((run.label + study, run))
    return named


def _name_by_setting(runs: Sequence[StoredRun], setting: str) -> list[tuple[str, StoredRun]]:
    """Return the runs that have a setting, named by label and value, in the order of values."""
    setting, called = split_setting(setting)
    found = []
    for run in runs:
        value = find_value(run.config, setting)
        if value is not None:
            found.append((value, run))
    if not found:
        raise DataError(
            f"no finished run here has a setting {setting}; give its path, as in [sweep]"
        )
    if all(isinstance(value, int | float) for value, _ in found):
        found.sort(key=lambda one: one[0])
    names = name_runs([(run, [str(value)]) for value, run in found], [setting])
    named = []
    for (label, rest), (value, run) in zip(names, found, strict=True):
        named.append((f"{label}{rest}, {format_value(called, value)}", run))
    return named
