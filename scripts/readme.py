"""Write the generated parts of README.md, between their markers: the results of a stored run, and the methods.

    coterie run && python scripts/stored.py keep runs/rotated-digits
    coterie run four-hospitals --workers 2 && python scripts/stored.py keep runs/four-hospitals
    python scripts/readme.py

No number of the README is typed by hand.
"""

import json
import re
import sys

import hospitals
from _pages import ROOT, STORED, write

from coterie.functional.metrics import ACCURACY
from coterie.methods import METHODS
from coterie.results import pairs

README = ROOT / "README.md"


def accuracies(summary: dict) -> str:
    """Return the accuracy of every method, in per cent, as a Markdown table."""
    cells = {(r["label"], r["cluster"]): r for r in summary["rows"] if r["metric"] == "accuracy"}
    labels = list(dict.fromkeys(label for label, _ in cells))
    clusters = [
        c for c in dict.fromkeys(cluster for _, cluster in cells) if c not in ("all", "clusters")
    ]
    columns = [*clusters, "all", "clusters"]
    names = [*clusters, "mean over clients", "mean over clusters"]
    lines = [f"| test accuracy, % | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    found = pairs.parse_pairs(summary)
    leading = {
        column: pairs.find_leaders(summary["rows"], found, ACCURACY, column) for column in columns
    }
    for label in labels:
        row = [_cell(cells[label, column], leading[column]) for column in columns]
        lines.append(f"| {label} | {' | '.join(row)} |")
    seeds = {r["seeds"] for r in cells.values()}
    wall = sum(t["wall_s"] for t in summary["timing"])
    samples = sum(t["train_samples"] for t in summary["timing"])
    lines += ["", f"Mean ± population standard deviation over {max(seeds)} seeds; {len(summary['timing'])} runs, "
              f"{samples:,} training samples, {wall:.0f} s of computing. **Bold** is established as the best of its "
              "column, without Oracle; \\* is not distinguishable from it."]  # fmt: skip
    return "\n".join([*lines, "", processors(), "", *verdicts(summary)]) + "\n"


def processors() -> str:
    """Return on which processor the table was made, and how far another one is from it."""
    machine = json.loads((STORED / "rotated-digits/origin.json").read_text())["machine"]
    rows = json.loads((STORED / "performance/processor.json").read_text())["results"]
    gaps: dict[bool, float] = {True: 0.0, False: 0.0}
    for row in rows:
        over_all = row["cluster"] in ("all", "clusters")
        gaps[over_all] = max(gaps[over_all], 100 * abs(row["avx512"] - row["avx2"]))
    return (
        f"Made on an {machine['processor']} with {machine['vectors']}. Processors round differently: between AVX-512 "
        f"and AVX2, means over clients differ by up to {gaps[True]:.1f} points, those of a cluster by up to "
        f"{gaps[False]:.1f} ([how to have the same bytes](docs/how-to/machines.md))."
    )


def _cell(row: dict, leading: list[str]) -> str:
    text = f"{100 * row['mean']:.1f} ± {100 * row['std']:.1f}"
    return f"**{text}**" if leading == [row["label"]] else text + r"\*" * (row["label"] in leading)


def verdicts(summary: dict) -> list[str]:
    """Return what the study establishes about each pair of methods over all clients, and what that speaks of."""
    found = pairs.select_pairs(pairs.parse_pairs(summary), metric=ACCURACY.name)
    said = [f"* {pairs.describe_pair(pair, ACCURACY)};" for pair in found]
    intro = "What that establishes, in points of accuracy over all clients, with 95 % intervals over the seeds:"
    return [intro, "", *said[:-1], said[-1].removesuffix(";") + ".", "", summary["about"]]


def methods() -> str:
    """Return every method with its papers, as a Markdown table."""
    lines = ["| method | what it does | paper (first author, year) |", "|---|---|---|"]
    for kind, method in METHODS.items():
        papers = ", ".join(map(short, method.references)) or "–"
        lines.append(f"| `{kind}` | {method.summary} | {papers} |")
    return "\n".join(lines) + "\n"


def short(reference: str) -> str:
    """Return the first author and the year of a reference, linked where it has an address.

    Example:
        >>> short("Boyd, Ghosh, Randomized gossip, 2006, https://example.org")
        '[Boyd 2006](https://example.org)'
    """
    match = re.fullmatch(r"(.+?), .*, (\d{4})(?:, (https?://\S+))?", reference)
    if match is None:
        raise ValueError(f"{reference!r} is not 'authors, title, year, address'")
    author, year, address = match.groups()
    return f"[{author} {year}]({address})" if address else f"{author} {year}"


def fill(text: str, name: str, made: str) -> str:
    """Return a page with the part between the markers of a name replaced."""
    start, end = f"<!-- {name}: scripts/readme.py -->\n", f"<!-- end of {name} -->\n"
    before, rest = text.split(start)
    _, after = rest.split(end)
    return before + start + made + end + after


def readme() -> str:
    """Return README.md with its generated parts written again."""
    summary = json.loads((STORED / "rotated-digits/summary.json").read_text())
    text = fill(README.read_text(encoding="utf-8"), "results", accuracies(summary))
    text = fill(text, "hospitals", hospitals.readme())
    return fill(text, "methods", methods())


if __name__ == "__main__":
    sys.exit(write({README: readme()}))
