"""Write docs/reference/reproduction.md: stored studies and the numbers of their papers.

    python scripts/reproduction.py            (`--check` only says whether the page is up to date)

A stored study is docs/reference/runs/<study>/ as scripts/stored.py keeps it; notes.md in it,
written by hand, says what explains the differences, its numbers filled in from what is stored (see
`filled`). <study>-trials is a study of its own, with one setting changed in each run, and shown
with the study. No number of the tables is typed.
"""

import json
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from _pages import REFERENCE, STORED, markdown, table, write
from stored import told

from coterie.cli import _tables
from coterie.functional import metrics
from coterie.papers import compare, numbers
from coterie.papers.figures import PUBLISHED
from coterie.report import plots
from coterie.results import coverage

HEAD = """# Reproduction of the papers

Written by `make docs` from the stored summaries of `docs/reference/runs`; do not edit. `coterie compare RUN --paper`
prints the same tables for your own run.

A number is *within* when its distance from the paper's is at most twice the standard deviation of their difference, or
one point of accuracy. Standard deviations are population deviations over seeds, as in the papers; where a paper prints
none, ours of the same row stands for it, pooled over its clusters. Where the published deviation is half of the number
or more (1,495 ± 1,973), the number and that row's clusters are *undecided*. Rows that are not
in the paper (tuned, or with another learning rate) are in a separate table with the published row that they
explain, and are not counted.
"""


def coverage_table(results: Sequence[compare.StudyResult]) -> str:
    """Return how much of each paper is compared with a result of ours."""
    rows = compare.count_coverage(results)
    cells = [
        (
            one.source,
            *map(
                str,
                (
                    one.published,
                    one.full,
                    one.reduced,
                    one.predicted,
                    one.none,
                    one.within,
                    one.strict,
                    one.unknown,
                ),
            ),
        )
        for one in rows
    ]
    total = [sum(int(row[place]) for row in cells) for place in range(1, 9)]
    head = (
        "paper", "published", "full", "reduced", "predicted", "none", "within", "strictly", "undecided",
    )  # fmt: skip
    about = (
        "Published numbers that are compared with a result of full size, of a reduced one only, or with none. Full size means "
        "the clients, samples, model, steps and rounds of the built-in study; seeds may be fewer, as each table says. "
        "*Predicted* are costs that follow from the settings of the built-in study. *Within* and *undecided* count "
        "only the numbers that are compared with one of ours; *strictly* those of them that are within by the paper's "
        "own deviation, or one point of accuracy, and not only because ours is wide."
    )
    for source, again in numbers.PRINTED_AGAIN.items():
        where = ", ".join(dict.fromkeys(one[0] for one in again))
        about += f" {source} prints {len(again)} more numbers that repeat one of these ({where}); each is counted once."
    return f"## Coverage\n\n{headline(rows)}\n\n{table(head, [*cells, ('all', *map(str, total))])}\n\n{about}\n"


def headline(rows: Sequence[compare.PaperCoverage]) -> str:
    """Return the two figures of the page: numbers within, and those that need no deviation of ours."""
    compared = [one.published - one.none - one.unknown for one in rows]
    most = max(range(len(rows)), key=lambda place: rows[place].strict)
    within, strict = sum(one.within for one in rows), sum(one.strict for one in rows)
    others = [place for place in range(len(rows)) if place != most]
    return (
        f"Of {sum(compared)} published numbers that are compared and can be judged, **{within} are within the rule, "
        f"{strict} of them strictly**. The paper *{rows[most].source}* alone has {rows[most].within} and "
        f"{rows[most].strict}; outside it {sum(rows[place].within for place in others)} and "
        f"{sum(rows[place].strict for place in others)} of {sum(compared[place] for place in others)} are. "
        "A count of single numbers says nothing of many small differences of one sign: the next table does."
    )


def bias_table(results: Sequence[compare.StudyResult]) -> str:
    """Return how far the numbers of each stored study lie to one side of the paper's."""
    found = [
        (compare.is_full_size(result.study), one)
        for result in results if result.experiment is not None
        for one in compare.measure_bias(compare.compare_with_paper(result))
    ]  # fmt: skip
    found.sort(key=lambda pair: (not pair[1].is_one_sided, pair[1].study))
    cells = []
    for is_full, one in found:
        metric = metrics.REGISTRY[one.metric]
        mean = metric.scale * one.difference
        cells.append(
            (
                f"`{one.study}`", metric.heading(), "full" if is_full else "reduced", str(one.seeds),
                str(one.compared), f"{mean:+.2f}" if abs(mean) < 1000 else f"{mean:+.0f}", str(one.below),
                str(one.above), str(one.within), str(one.strict), "yes" if one.is_one_sided else "",
            )
        )  # fmt: skip
    head = (
        "study", "metric", "size", "seeds", "compared", "mean difference", "below", "above", "within", "strictly",
        "one-sided",
    )  # fmt: skip
    about = (
        "Each stored study as a whole: the mean of our numbers minus the paper's, over rows and clusters, how many are "
        "below and above it, and the fewest seeds of a number. *One-sided* tables have at least nine tenths of six or "
        "more numbers on one side: the experiment differs from the paper's there, however many are within."
    )
    return f"## To one side\n\n{about}\n\n{table(head, cells)}\n"


def cost_tables() -> list[str]:
    """Return printed costs, and the costs that the cost ledger predicts, of studies of full size."""
    parts = []
    for source in numbers.SOURCES:
        for name, lines in compare.predict_paper_costs(source).items():
            predicted = _tables.build_cost_table(name, lines)
            notes = " ".join(numbers.find_notes(numbers.EXPERIMENTS[name]))
            parts.append(
                f"## {predicted.title}\n\n{markdown(predicted)}\n\nOn the printed numbers: {notes}\n"
            )
    return parts


def figure_table() -> str:
    """Return the published figures of which a text says what they show, and how ours is drawn."""
    about = (
        "Figures of which the paper has words. `coterie plot` draws ours from runs of the study, `coterie plot RUN` "
        "without a figure lists those of all papers. A drawing of stored runs stands in the part on its study."
    )
    rows = [
        (
            f"`{name}`",
            f"`{one.study}`",
            one.shows,
            f"`coterie plot runs/{one.study} --figure {name}`",
        )
        for name, one in PUBLISHED.items()
        if one.shows
    ]
    return f"## Figures\n\n{about}\n\n{table(('figure', 'study', 'in the paper', 'here'), rows)}\n"


def drawings(folder: Path) -> list[str]:
    """Return the drawings of published figures that are stored with a study."""
    parts = []
    for path in sorted(folder.glob("*.svg")):
        shows = PUBLISHED[path.stem].shows if path.stem in PUBLISHED else ""
        place = path.relative_to(REFERENCE).as_posix()
        said = f" In the paper: {shows}" if shows else ""
        parts.append(
            f"### Figure {path.stem}\n\n![{path.stem}]({place})\n\n[Its numbers]({place[:-4]}.csv).{said}"
        )
    return parts


def section(folder: Path) -> str:
    """Return the part of the page on one stored study."""
    result = compare.load_result(folder)
    comparison = None if result.experiment is None else compare.compare_with_paper(result)
    origin = json.loads((folder / "origin.json").read_text())
    machine = origin["machine"]
    cores = f"{machine['cores']} {machine['machine']} cores"
    if "elapsed_s" in origin:
        took = f"{origin['elapsed_s']:,.0f} s elapsed on {cores}, one thread a run"
    else:
        took = f"{origin['wall_s']:,.0f} s over all runs, on {cores} shared with other work"
    runs = f"{origin['runs']} run{'s' if origin['runs'] != 1 else ''}"
    cost = (
        f"{runs}, {origin['train_samples']:,} training samples, {took}; Python "
        f"{machine['python']}, torch {machine['torch']}, numpy {machine['numpy']}, engine "
        f"{' and '.join(origin['engines'])}. Seconds a run, by method: {_seconds(result)}. "
        f"{told(folder.relative_to(STORED).as_posix(), origin)}"
    )
    trained = origin["rounds_trained"].values()
    if min(trained) < origin["rounds"] and result.study.settings.participation == 1.0:
        cost += (
            f" With early stopping, clients trained in {min(trained):g} to {max(trained):g} of the {origin['rounds']} "
            "rounds on average, by method."
        )
    parts = [
        f"## {result.study.name}",
        result.study.description,
        *([] if comparison is None else [f"Paper: {comparison.reference}."]),
        f"```console\n$ {origin['command']}\n```",
        cost,
    ]
    missing = coverage.describe_coverage(
        {"rows": result.rows, "seeds": result.seeds, "left_out": result.left_out}
    )
    parts += ["\n".join(f"* {note}" for note in missing)] if missing else []
    notes = folder / "notes.md"
    if notes.exists():
        parts.append(filled(notes.read_text().strip(), folder))
    parts += drawings(folder)
    trials = trials_of(folder)
    if trials.exists():
        parts += ["### Further runs with one setting changed", _trials(trials)]
    if comparison is None:
        return (
            "\n\n".join([*parts, _swept(result) if result.study.sweep else _alone(result)]) + "\n"
        )
    for compared in _tables.build_paper_tables(comparison):
        parts += [f"### {compared.title}", markdown(compared)]
    if comparison.notes:
        parts.append("On the printed numbers: " + " ".join(comparison.notes))
    return "\n\n".join(parts) + "\n"


def _settings(result: compare.StudyResult) -> list[str]:
    """Return the settings that the points of a stored sweep differ in, as labels have them; none of another study."""
    return [path.rpartition(".")[2] for path in result.study.sweep]


def _swept(result: compare.StudyResult) -> str:
    """Return the numbers of a sweep: a row for each method, a column for each point."""
    settings = _settings(result)
    metric = metrics.REGISTRY[metrics.REGISTRY.choose_main(row["metric"] for row in result.rows)]
    found: dict[str, dict[str, str]] = {}
    for row in result.rows:
        if (row["cluster"], row["metric"]) == ("all", metric.name):
            method = plots.strip_settings(row["label"], settings)
            spread = f" ± {metric.scale * row['std']:.2f}" if row["seeds"] > 1 else ""
            point = row["label"].removeprefix(method).strip(", ")
            found.setdefault(method, {})[point] = f"{metric.scale * row['mean']:.2f}{spread}"
    points = list(dict.fromkeys(point for cells in found.values() for point in cells))
    rows = [
        (method, *(cells.get(point, "") for point in points)) for method, cells in found.items()
    ]
    name = f"test {metric.title}" + (f" in {metric.unit}" if metric.unit else "")
    return f"{table(('method', *points), rows)}\n\nThe {name}, mean over clients; {len(result.seeds)} seeds."


def _alone(result: compare.StudyResult) -> str:
    """Return the numbers of a study that repeats no published experiment."""
    rows = [row for row in result.rows if row["cluster"] == "all" and row["mean"] is not None]
    cells = [
        (row["label"], row["metric"].replace("_", " "), f"{row['mean']:.4g}", str(row["seeds"]))
        for row in rows
    ]
    return table(("method", "metric, mean over clients", "here", "seeds"), cells)


def _seconds(result: compare.StudyResult) -> str:
    """Return how long the runs of each method took, mean over seeds and over the points of a sweep."""
    settings, took = _settings(result), dict[str, list[float]]()
    for run in json.loads((result.folder / "summary.json").read_text())["timing"]:
        took.setdefault(plots.strip_settings(run["label"], settings), []).append(run["wall_s"])
    return ", ".join(f"{label} {sum(values) / len(values):,.3g}" for label, values in took.items())


def filled(text: str, folder: Path) -> str:
    """Return notes with their numbers filled in from what is stored.

    `{{EXPRESSION}}` or `{{EXPRESSION:FORMAT}}` is the value of an expression in Python over

        value(LABEL, METRIC, study=STUDY, cluster=CLUSTER, seed=SEED)
                                             the mean over clients and seeds, or of one cluster, or over "clusters"; of
                                             another stored study where one is named; of one seed where one is given
        trial(LABEL, METRIC, seed=SEED)      the same, of a run with one setting changed
        trained(LABEL)                       rounds in which a client trained, mean over clients and seeds
        setting(PATH)                        of the study's config.toml, such as "data.num_clients"
        kept, clear                          pairs that the paper shows clearly apart, and those in its order here
        typed(WHAT)                          what no stored run holds, as it was typed; the page says so
        paper(WHAT)                          as the paper prints it

    Args:
        text: the notes, without numbers of results but these.
        folder: the stored study.
    """

    @cache
    def means(of: Path) -> dict[tuple[Any, ...], float]:
        """The means of a stored study, by label, metric, cluster and seed; over all seeds the seed is None."""
        rows = json.loads((of / "summary.json").read_text())["rows"]
        found = {(row["label"], row["metric"], row["cluster"], None): row["mean"] for row in rows}
        each = json.loads((of / "runs.json").read_text()) if (of / "runs.json").exists() else []
        return found | {
            (run["label"], metric, cluster, run["seed"]): mean
            for run in each for metric, clusters in run["values"].items() for cluster, mean in clusters.items()
        }  # fmt: skip

    config, seen = tomllib.loads((folder / "config.toml").read_text()), []

    def setting(path: str) -> object:
        found: Any = config
        for part in path.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found

    def typed(what: str) -> str:
        seen.append(what)
        return f"{what} †"

    origin = json.loads((folder / "origin.json").read_text())
    result = compare.load_result(folder)
    pairs = [] if result.experiment is None else compare.compare_with_paper(result).pairs
    names: dict[str, Any] = {
        "value": lambda label, metric, study="", cluster="all", seed=None: (
            means(STORED / study if study else folder)[label, metric, cluster, seed]
        ),
        "trial": lambda label, metric, seed=None: means(trials_of(folder))[label, metric, "all", seed],
        "trained": lambda label: origin["rounds_trained"][label],
        "setting": setting, "typed": typed, "paper": str, "kept": sum(one.kept for one in pairs), "clear": len(pairs),
    }  # fmt: skip
    made = re.sub(
        r"\{\{(.+?)(?::([^{}:\"]+))?\}\}",
        lambda m: format(eval(m[1], {"__builtins__": {}}, names), m[2] or ""),
        text,
    )
    return made + (
        "\n\n† Of a run that was not stored: typed by hand, before provenance was recorded."
        if seen
        else ""
    )


def trials_of(folder: Path) -> Path:
    """Return where the runs of a study are stored in which one setting is another."""
    return folder.with_name(f"{folder.name}-trials")


def _trials(folder: Path) -> str:
    """Return the experiments that explain differences, and where they come from."""
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    metric = metrics.REGISTRY[metrics.REGISTRY.choose_main(row["metric"] for row in rows)]
    cells = []
    for row in rows:
        if (row["cluster"], row["metric"]) == ("all", metric.name):
            spread = f" ± {metric.scale * row['std']:.2f}" if row["seeds"] > 1 else ""
            cells.append(
                (row["label"], f"{metric.scale * row['mean']:.2f}{spread}", str(row["seeds"]))
            )
    name = f"test {metric.name}" + (f", {metric.unit}" if metric.unit else "")
    origin = json.loads((folder / "origin.json").read_text())
    where = told(folder.relative_to(STORED).as_posix(), origin)
    return table(("method, with what is changed", name, "seeds"), cells) + f"\n\n{where}"


def page() -> str:
    """Return the page."""
    folders = sorted(path.parent for path in STORED.glob("*/*/origin.json"))
    folders = [folder for folder in folders if not folder.name.endswith("-trials")]
    results = [compare.load_result(one) for one in folders]
    counted = [coverage_table(results), bias_table(results)]
    return "\n".join([HEAD, *counted, figure_table(), *cost_tables(), *map(section, folders)])


if __name__ == "__main__":
    sys.exit(write({REFERENCE / "reproduction.md": page()}))
