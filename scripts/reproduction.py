"""Write docs/reference/reproduction.md and a page for each paper: stored studies and the numbers of their papers.

    python scripts/reproduction.py            (`--check` only says whether the pages are up to date)

A stored study is docs/reference/runs/<study>/ as scripts/stored.py keeps it; notes.md in it,
written by hand, says what explains the differences, its numbers filled in from what is stored (see
`filled`). <study>-trials is a study of its own, with one setting changed in each run, and shown
with the study. No number of the tables is typed.
"""

import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
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

PAGES = REFERENCE / "reproduction"
OTHERS = "others"
"""The page of studies that repeat no paper of the five."""
TITLES = {
    "similarity": "On the effects of similarity metrics",
    "dac": "Decentralized adaptive clustering (DAC)",
    "panm": "Personalized adaptive neighbor matching (PANM)",
    "fedgwc": "FedGWC",
    "sosicfl": "SosicFL",
    OTHERS: "Studies of other papers and of our own",
}
GENERATED = "<!-- made by scripts/reproduction.py; do not edit -->\n"

HEAD = f"""{GENERATED}# Reproduction of the papers

How much of five papers comes back, counted from the stored summaries of `docs/reference/runs`. Each paper has a page
with its studies: {", ".join(f"[{title}](reproduction/{name}.md)" for name, title in TITLES.items())}.
Verdicts on claims, and why numbers differ: [what five papers taught us](../explanation/what-five-papers-taught-us.md);
which settings are tried next: [settings behind the papers' numbers](lineage.md).
`coterie compare RUN --paper` prints the same numbers for your own run; how old each stored run is stands on [a page of its
own](stored-results.md).

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
                f"[{one.source}](reproduction/{one.source}.md)", one.published, one.full, one.reduced, one.predicted, one.none, said.paper,
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
                moved = deviation_over_seeds(result.folder, one.lines)
                found.append((compare.is_full_size(result.study), moved, one))
    found.sort(key=lambda row: (not row[-1].is_one_sided, row[-1].study))
    cells = []
    for is_full, moved, one in found:
        side, count = one.side
        said = one.verdicts
        cells.append(
            (
                f"`{one.study}`", metrics.REGISTRY[one.metric].heading(), "full" if is_full else "reduced", one.seeds,
                one.compared, _tables.format_difference(one), moved, f"{100 * count / one.compared:.0f} % {side}",
                said.paper, said.point, said.ours, said.outside, said.few_seeds, "yes" if one.is_one_sided else "",
            )
        )  # fmt: skip
    head = (
        "study", "metric", "size", "seeds", "compared", "mean difference", "seeds move it by", "of one sign",
        "paper's deviation", "one point", "ours alone", "outside", "few seeds", "one-sided",
    )  # fmt: skip
    about = (
        "Each stored study as a whole: the mean of our numbers minus the paper's, over rows and clusters, how many of them are "
        "on the side that has more, the fewest seeds of a number, and the verdicts. *One-sided* tables have at least nine "
        "tenths of six or more numbers on one side: the experiment differs from the paper's there, however many are within, or "
        "its seeds do. For the rows of a seed share its data and often its first model, and are above or below together: "
        "*seeds move it by* is the deviation of the mean over all rows from one of our seeds to the next. The paper's mean "
        "over its own seeds moves as much, and thirty rows are then no more than a few. "
        f"Metrics with fewer than {MIN_COMPARED} numbers have no row: see the parts on {', '.join(few)}."
    )
    return f"## To one side\n\n{about}\n\n{table(head, cells)}\n"


def deviation_over_seeds(folder: Path, lines: Sequence[compare.ComparedNumber]) -> str:
    """Return the population deviation over seeds of the mean of a table's numbers; nothing for one seed.

    Args:
        folder: the stored study.
        lines: the numbers, all of one metric.
    """
    path = folder / "runs.json"
    means: dict[int, dict[tuple[str, str], float]] = {}
    for run in json.loads(path.read_text()) if path.exists() else []:
        for cluster, value in run["values"].get(lines[0].metric, {}).items():
            means.setdefault(run["seed"], {})[run["label"], cluster] = value
    wanted = [(line.label, line.cluster) for line in lines]
    # A seed that some row lacks has a mean of other rows.
    whole = [[own[one] for one in wanted] for own in means.values() if own.keys() >= set(wanted)]
    if len(whole) < 2:
        return ""
    return f"{metrics.REGISTRY[lines[0].metric].scale * np.std(np.mean(whole, axis=1)):.2f}"


def show_costs(source: str) -> list[str]:
    """Return a paper's printed costs, and those that the cost ledger predicts for studies of full size."""
    parts = []
    for name, lines in compare.predict_paper_costs(source).items():
        predicted = _tables.build_cost_table(name, lines)
        notes = " ".join(numbers.find_notes(numbers.EXPERIMENTS[name]))
        text = f"{markdown(predicted)}\n\nOn the printed numbers: {notes}"
        parts.append(f"## {predicted.title}\n\n{predicted.foot}\n\n{fold('All costs', text)}")
    return parts


def show_figures(source: str) -> list[str]:
    """Return the published figures of a paper of which a text says what they show, and how ours is drawn."""
    rows = [
        (f"`{name}`", one.shows, f"`coterie plot runs/{one.study} --figure {name}`")
        for name, one in PUBLISHED.items()
        if one.shows and one.study.partition("/")[0] == source
    ]
    if not rows:
        return []
    about = (
        "Figures of which the paper has words. `coterie plot` draws ours from runs of the study; a drawing of stored runs "
        "stands in the part on its study."
    )
    return [f"## Figures\n\n{about}\n\n{table(('figure', 'in the paper', 'here'), rows)}"]


def fold(title: str, text: str) -> str:
    """Return a part of a page that is closed until it is asked for."""
    # The attribute has mkdocs read what is inside as Markdown; GitHub does so without it.
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text}\n\n</details>'


def drawings(folder: Path) -> list[str]:
    """Return the drawings of published figures that are stored with a study, each with what the paper shows."""
    parts = []
    for path in sorted(folder.glob("*.svg")):
        shows = PUBLISHED[path.stem].shows if path.stem in PUBLISHED else ""
        place = f"../{path.relative_to(REFERENCE).as_posix()}"
        said = f" In the paper: {shows}" if shows else ""
        parts.append(
            f"![{path.stem}]({place})\nFigure {path.stem}, [its numbers]({place[:-4]}.csv).{said}"
        )
    return parts


def section(folder: Path, deviations: counting.SeedDeviations | None = None) -> str:
    """Return the part of the page on one stored study.

    Args:
        folder: of the study.
        deviations: how far seeds move numbers; those of this study when not given.
    """
    result = compare.load_result(folder)
    origin = json.loads((folder / "origin.json").read_text())
    withdrawn = find_withdrawal(folder)
    is_beside = result.experiment is not None and not withdrawn
    comparison = compare.compare_with_paper(result) if is_beside else None
    cores = f"{origin['machine']['cores']} {origin['machine']['machine']} cores"
    if "elapsed_s" in origin:
        took = f"{origin['elapsed_s']:,.0f} s elapsed on {cores}, one thread a run"
    else:
        took = f"{origin['wall_s']:,.0f} s over all runs, on {cores} shared with other work"
    runs = f"{origin['runs']} run{'s' if origin['runs'] != 1 else ''}"
    cost = (
        f"`{origin['command']}`: {runs}, {origin['train_samples']:,} training samples, {took}, engine "
        f"{' and '.join(origin['engines'])}. {told(folder.relative_to(STORED).as_posix(), origin, counted=False)}"
    )
    trained = origin["rounds_trained"].values()
    if min(trained) < origin["rounds"] and result.study.settings.participation == 1.0:
        cost += (
            f" With early stopping, clients trained in {min(trained):g} to {max(trained):g} of the {origin['rounds']} "
            "rounds on average, by method."
        )
    parts = [f"## {result.study.name}", result.study.description]
    missing = coverage.describe_coverage(
        {"rows": result.rows, "seeds": result.seeds, "left_out": result.left_out}
    )
    notes, trials, tables = folder / "notes.md", trials_of(folder), []
    if comparison is not None:
        # Predicted costs have a part of their own.
        measured = [line for line in comparison.lines if not line.predicted]
        comparison = replace(comparison, lines=measured)
        # Orderings and pairs are said in words.
        unordered = replace(comparison, chain=[], pairs=[])
        tables = _tables.build_paper_tables(unordered, deviations, compact=True)
        # What the numbers come to is said before they are shown.
        parts.append(f"{tables[0].foot} {describe_orders(comparison)}".strip())
    if withdrawn:
        parts.append(f"**Withdrawn: not compared with the paper until it runs again.** {withdrawn}")
    parts += ["\n".join(f"* {note}" for note in missing)] if missing else []
    if notes.exists():
        parts.append(wrap(filled(notes.read_text().strip(), folder)))
    parts += drawings(folder)
    if trials.exists():
        parts.append(_trials(trials))
    parts.append(cost)
    if comparison is None:
        return (
            "\n\n".join([*parts, _swept(result) if result.study.sweep else _alone(result)]) + "\n"
        )
    shown = [markdown(replace(tables[0], foot=""))]
    shown += [f"{one.title}:\n\n{markdown(one)}" for one in tables[1:]]
    if comparison.notes:
        shown.append("On the printed numbers: " + " ".join(comparison.notes))
    title = tables[0].title.removeprefix(f"{result.study.name} ")
    parts.append(fold(f"Numbers {title}", "\n\n".join(shown)))
    return "\n\n".join(parts) + "\n"


def find_withdrawal(folder: Path) -> str:
    """Return why a stored study is no longer compared with its paper; "" where it is."""
    # Written by hand into origin.json; storing the study again removes it.
    return json.loads((folder / "origin.json").read_text()).get("withdrawn", "")


def describe_orders(comparison: compare.PaperComparison) -> str:
    """Say which orders of the paper are the same here, and name each that is not."""
    said = []
    if comparison.pairs:
        kept = sum(one.kept for one in comparison.pairs)
        said.append(
            f"{kept} of the {len(comparison.pairs)} pairs that are clearly apart in the paper are in its order here."
        )
    broken = [one for one in (*comparison.chain, *comparison.pairs) if not one.kept]
    if broken:
        names = []
        for one in broken:
            better, worse, paper, ours, _ = _tables.format_ordering(one, comparison)
            names.append(f"{better} above {worse} ({paper}; here {ours})")
        said.append(f"Not in its order: {'; '.join(names)}.")
    return " ".join(said)


def wrap(text: str) -> str:
    """Return notes with their paragraphs broken at 120 columns: numbers that were filled in are shorter than what they came from."""
    parts = []
    for part in text.split("\n\n"):
        # Tables and lists have lines of their own.
        plain = not re.search(r"^(\||[-*] |```)", part, re.MULTILINE)
        parts.append(textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) if plain else part)  # fmt: skip
    return "\n\n".join(parts)


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
    overall = [row for row in result.rows if row["cluster"] == "all"]
    rows = [row for row in overall if row["mean"] is not None]
    seeds = {row["seeds"] for row in rows}
    columns = list(dict.fromkeys(row["metric"] for row in rows))
    # A method whose models diverged has a row, too, and nothing in it.
    cells: dict[str, dict[str, str]] = {row["label"]: {} for row in overall}
    for row in rows:
        count = f" (n {row['seeds']})" if len(seeds) > 1 else ""
        cells[row["label"]][row["metric"]] = f"{row['mean']:.4g}{count}"
    made = [(label, *(own.get(name, "") for name in columns)) for label, own in cells.items()]
    head = ("method", *(name.replace("_", " ") for name in columns))
    said = "n is the number of seeds"
    if len(seeds) == 1:
        said = f"{min(seeds)} {'seed' if seeds == {1} else 'seeds'}"
    return f"{table(head, made)}\n\nMeans over clients; {said}."


def filled(text: str, folder: Path) -> str:
    """Return notes with their numbers filled in from what is stored.

    `{{EXPRESSION}}` or `{{EXPRESSION:FORMAT}}` is the value of an expression in Python over

        value(LABEL, METRIC, study=STUDY, cluster=CLUSTER, seed=SEED)
                                             the mean over clients and seeds, or of one cluster, or over "clusters"; of
                                             another stored study where one is named; of one seed where one is given
        by_seed(LABEL, METRIC)               the mean over clients with each seed, percentages in %
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

    def by_seed(label: str, metric: str) -> str:
        own = means(folder)
        each = (own[label, metric, "all", seed] for seed in origin["seeds"])
        return ", ".join(f"{metrics.REGISTRY[metric].scale * value:.1f}" for value in each)

    origin = json.loads((folder / "origin.json").read_text())
    result = compare.load_result(folder)
    pairs = [] if result.experiment is None else compare.compare_with_paper(result).pairs
    names: dict[str, Any] = {
        "value": lambda label, metric, study="", cluster="all", seed=None: (
            means(STORED / study if study else folder)[label, metric, cluster, seed]
        ),
        "by_seed": by_seed,
        "trial": lambda label, metric, seed=None: means(trials_of(folder))[label, metric, "all", seed],
        "trained": lambda label: origin["rounds_trained"][label],
        "setting": setting, "typed": typed, "paper": str, "kept": sum(one.kept for one in pairs), "clear": len(pairs),
    }  # fmt: skip
    made = re.sub(
        r"\{\{(.+?)(?::([^{}:\"]+))?\}\}",
        lambda m: format(eval(m[1], {"__builtins__": {}}, names), m[2] or ""),
        text,
    )
    return made + ("\n\n† Of a run that was not stored: typed by hand." if seen else "")


def trials_of(folder: Path) -> Path:
    """Return where the runs of a study are stored in which one setting is another."""
    return folder.with_name(f"{folder.name}-trials")


def _trials(folder: Path) -> str:
    """Return the experiments that explain differences, and where they come from."""
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    metric = metrics.REGISTRY[metrics.REGISTRY.choose_main(row["metric"] for row in rows)]
    said = []
    for row in rows:
        if (row["cluster"], row["metric"]) == ("all", metric.name):
            spread = f" ± {metric.scale * row['std']:.2f}" if row["seeds"] > 1 else ""
            said.append(f"{row['label']}: {metric.scale * row['mean']:.2f}{spread}")
    unit = f", {metric.unit}" if metric.unit else ""
    seeds = sorted({row["seeds"] for row in rows})
    origin = json.loads((folder / "origin.json").read_text())
    where = told(folder.relative_to(STORED).as_posix(), origin, counted=False)
    count = f"{' or '.join(map(str, seeds))} seed{'' if seeds == [1] else 's'}"
    text = textwrap.fill(f"{'; '.join(said)}.", 120, break_long_words=False, break_on_hyphens=False)
    return fold(
        f"Further runs with one setting changed (test {metric.name}{unit}, {count})",
        f"{text}\n\n{where}",
    )


def show_paper(
    source: str,
    folders: Sequence[Path],
    rows: Sequence[counting.PaperCoverage],
    deviations: counting.SeedDeviations,
) -> str:
    """Return the page of a paper, or that of the studies that repeat none of the five."""
    about = (
        "What stands in no table of the papers here: studies of drift and of personalized methods."
    )
    if source in numbers.SOURCES:
        one = next(row for row in rows if row.source == source)
        said = one.verdicts
        about = (
            f"{numbers.SOURCES[source]}. Of {one.published} published numbers {one.full} are compared with a run of full "
            f"size. Of {said.judged} that can be judged {said.within} are within the rule: {said.strict} by the paper's own "
            f"deviation or one point, {said.within - said.strict} by ours alone; {said.few_seeds} rest on few seeds. The rule "
            "and the letters of the tables are on [the first page](../reproduction.md)."
        )
    parts = [section(folder, deviations) for folder in folders]
    head = f"{GENERATED}# {TITLES[source]}: reproduction\n\n{about}\n"
    if source == OTHERS:
        head = head.replace(": reproduction", "")
    return "\n".join([head, *parts, *(f"{one}\n" for one in (*show_costs(source), *show_figures(source)))])  # fmt: skip


def pages() -> dict[Path, str]:
    """Return the pages by path."""
    folders = sorted(path.parent for path in STORED.glob("*/*/origin.json"))
    folders = [folder for folder in folders if not folder.name.endswith("-trials")]
    results = [compare.load_result(one) for one in folders if not find_withdrawal(one)]
    beside = [compare.compare_with_paper(one) for one in results if one.experiment is not None]
    deviations = counting.SeedDeviations.measure(beside)
    counted = [coverage_table(results, deviations), bias_table(results, deviations)]
    rows = counting.count_coverage(results, deviations)
    made = {REFERENCE / "reproduction.md": "\n".join([HEAD, *counted])}
    for source in TITLES:
        own = [folder for folder in folders if _find_source(folder) == source]
        made[PAGES / f"{source}.md"] = show_paper(source, own, rows, deviations)
    return made


def _find_source(folder: Path) -> str:
    """Return the paper of a stored study, by the folder that it is in."""
    source = folder.parent.name
    return source if source in numbers.SOURCES else OTHERS


if __name__ == "__main__":
    sys.exit(write(pages()))
