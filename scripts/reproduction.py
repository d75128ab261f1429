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
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from _pages import REFERENCE, STORED, markdown, table, write
from stored import told

from coterie.cli import _tables
from coterie.functional import metrics
from coterie.papers import compare, counting, numbers
from coterie.papers.figures import PUBLISHED
from coterie.report import plots
from coterie.results import coverage

# The mean of fewer numbers says nothing of a table, and they stand together in its part anyway.
MIN_COMPARED = 3

HEAD = f"""# Reproduction of the papers

Written by `make docs` from the stored summaries of `docs/reference/runs`; do not edit. `coterie compare RUN --paper`
prints the same numbers for your own run.

A number is *within* when its distance from the paper's is at most twice the standard deviation of their difference, or
one point of accuracy. A wide deviation of ours lets any number pass, so each verdict says by what, with a letter behind
the two numbers, here / paper:

| letter | verdict |
| --- | --- |
| {_tables.LETTERS["paper"]} | {compare.VERDICTS["paper"]} |
| {_tables.LETTERS["point"]} | {compare.VERDICTS["point"]} |
| {_tables.LETTERS["ours"]} | {compare.VERDICTS["ours"]} |
| {_tables.LETTERS["outside"]} | {compare.VERDICTS["outside"]} |
| {_tables.LETTERS["undecided"]} | {compare.VERDICTS["undecided"]}: the paper's deviation is half of the number or more (1,495 ± 1,973) |
| {_tables.FEW_SEEDS} | rests on few seeds: one or two, and a difference of at most three times what seeds move |

A number is undecided with the clusters of its row. Standard deviations are population deviations over seeds, as in the
papers; where a paper prints none, ours of the same row stands for it, pooled over its clusters. What seeds move is the
largest deviation over three seeds or more of the same metric in that paper's stored runs; where it has none, in all
papers' runs, or else of any percentage. Rows that are not in the paper (tuned, or with another learning rate) are in a
separate table with the published row that they explain, and are not counted.
"""


def coverage_table(
    results: Sequence[compare.StudyResult], deviations: counting.SeedDeviations
) -> str:
    """Return how much of each paper is compared with a result of ours, and with which verdicts."""
    rows = counting.count_coverage(results, deviations)
    cells = []
    for one in rows:
        said = one.verdicts
        cells.append(
            (
                one.source, one.published, one.full, one.reduced, one.predicted, one.none, said.paper,
                said.point, said.ours, said.outside, said.undecided, said.few_seeds,
            )
        )  # fmt: skip
    total = [sum(row[place] for row in cells) for place in range(1, 12)]
    head = (
        "paper", "published", "full", "reduced", "predicted", "none", "paper's deviation", "one point", "ours alone",
        "outside", "undecided", "few seeds",
    )  # fmt: skip
    about = (
        "Published numbers that are compared with a result of full size, of a reduced one only, or with none. Full size means "
        "the clients, samples, model, steps and rounds of the built-in study. *Predicted* are costs that follow from the "
        "settings of the built-in study, and are equal to what is printed or outside. The next five columns are the verdicts on "
        "all numbers that are compared; *few seeds* are those of them, undecided ones aside, that rest on few seeds."
    )
    for source, again in numbers.PRINTED_AGAIN.items():
        where = ", ".join(dict.fromkeys(one[0] for one in again))
        about += f" {source} prints {len(again)} more numbers that repeat one of these ({where}); each is counted once."
    return (
        f"## Coverage\n\n{headline(rows)}\n\n{table(head, [*cells, ('all', *total)])}\n\n{about}\n"
    )


def headline(rows: Sequence[counting.PaperCoverage]) -> str:
    """Return the figures of the page: numbers compared with ours, and those within, by both counts."""
    published, full = sum(one.published for one in rows), sum(one.full for one in rows)
    judged = sum(one.verdicts.judged for one in rows)
    within, strict = (
        sum(one.verdicts.within for one in rows), sum(one.verdicts.strict for one in rows),
    )  # fmt: skip
    few = sum(one.verdicts.few_seeds for one in rows)
    most = max(rows, key=lambda one: one.verdicts.strict)
    rest = [one.verdicts for one in rows if one is not most]
    return (
        f"**{full} of {published} published numbers are compared with a run of full size. Of {judged} that are compared with "
        f"any result and can be judged, {within} are within the rule: {strict} by the paper's own deviation or one point, "
        f"{within - strict} by ours alone. {few} of the {judged} verdicts rest on few seeds.** The paper *{most.source}* has "
        f"{most.verdicts.within} of those within; outside it {sum(one.within for one in rest)} of "
        f"{sum(one.judged for one in rest)} are, {sum(one.strict for one in rest)} without our deviation. "
        "A count of single numbers says nothing of many small differences of one sign: the next table does."
    )


def bias_table(results: Sequence[compare.StudyResult], deviations: counting.SeedDeviations) -> str:
    """Return how far the numbers of each stored study lie to one side of the paper's."""
    found, few = [], dict[str, None]()
    for result in results:
        if result.experiment is None:
            continue
        for one in counting.measure_bias(compare.compare_with_paper(result), deviations):
            if one.compared < MIN_COMPARED:
                few[f"`{one.study}`"] = None
            else:
                found.append((compare.is_full_size(result.study), one))
    found.sort(key=lambda pair: (not pair[1].is_one_sided, pair[1].study))
    cells = []
    for is_full, one in found:
        side, count = one.side
        said = one.verdicts
        cells.append(
            (
                f"`{one.study}`", metrics.REGISTRY[one.metric].heading(), "full" if is_full else "reduced", one.seeds,
                one.compared, _tables.format_difference(one), f"{100 * count / one.compared:.0f} % {side}",
                said.paper, said.point, said.ours, said.outside, said.few_seeds, "yes" if one.is_one_sided else "",
            )
        )  # fmt: skip
    head = (
        "study", "metric", "size", "seeds", "compared", "mean difference", "of one sign", "paper's deviation", "one point",
        "ours alone", "outside", "few seeds", "one-sided",
    )  # fmt: skip
    about = (
        "Each stored study as a whole: the mean of our numbers minus the paper's, over rows and clusters, how many of them are "
        "on the side that has more, the fewest seeds of a number, and the verdicts. *One-sided* tables have at least nine "
        "tenths of six or more numbers on one side: the experiment differs from the paper's there, however many are within. "
        f"Metrics with fewer than {MIN_COMPARED} numbers have no row: see the parts on {', '.join(few)}."
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


def section(folder: Path, deviations: counting.SeedDeviations | None = None) -> str:
    """Return the part of the page on one stored study.

    Args:
        folder: of the study.
        deviations: how far seeds move numbers; those of this study when not given.
    """
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
    # Predicted costs have a part of their own, above.
    measured = [line for line in comparison.lines if not line.predicted]
    for compared in _tables.build_paper_tables(
        replace(comparison, lines=measured), deviations, compact=True
    ):
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
    """Return the numbers of a study that repeats no published experiment: a row for each method."""
    rows = [row for row in result.rows if row["cluster"] == "all" and row["mean"] is not None]
    seeds = {row["seeds"] for row in rows}
    columns = list(dict.fromkeys(row["metric"] for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        count = f" (n {row['seeds']})" if len(seeds) > 1 else ""
        cells.setdefault(row["label"], {})[row["metric"]] = f"{row['mean']:.4g}{count}"
    made = [(label, *(own.get(name, "") for name in columns)) for label, own in cells.items()]
    head = ("method", *(name.replace("_", " ") for name in columns))
    said = "n is the number of seeds"
    if len(seeds) == 1:
        said = f"{min(seeds)} {'seed' if seeds == {1} else 'seeds'}"
    return f"{table(head, made)}\n\nMeans over clients; {said}."


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
    beside = [compare.compare_with_paper(one) for one in results if one.experiment is not None]
    deviations = counting.SeedDeviations.measure(beside)
    counted = [coverage_table(results, deviations), bias_table(results, deviations)]
    parts = [section(folder, deviations) for folder in folders]
    return "\n".join([HEAD, *counted, figure_table(), *cost_tables(), *parts])


if __name__ == "__main__":
    sys.exit(write({REFERENCE / "reproduction.md": page()}))
