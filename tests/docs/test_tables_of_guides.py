"""Tables of guides that are typed: every number is that of the stored runs that the guide names."""

import json
from pathlib import Path
from statistics import median
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
GUIDES, RUNS = DOCS / "how-to", DOCS / "reference/runs"


def read_rows(guide: str, head: str) -> list[list[str]]:
    """The cells of each row of the table of a guide that has a head, once for each such table."""
    text = (GUIDES / guide).read_text()
    rows = []
    for after in text.split(f"\n{head}\n")[1:]:
        lines = after.split("\n\n")[0].splitlines()[1:]
        rows.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
    assert rows, head
    return rows


def load(study: str) -> dict[str, Any]:
    return json.loads((RUNS / study / "summary.json").read_text())


def format_phase(row: dict[str, Any]) -> list[str]:
    """A row of the table of phases, as the guide describes it."""
    shares = [row["share_before"]] * (row["phase"] > 0) + [row["share_begins"], row["share"]]
    path = recovered = "–"
    if row["share"] is not None:
        path = " → ".join(f"{100 * share:.0f}" for share in shares)
        path += f" ({100 * row['chance']:.0f})"
        if row["phase"]:
            recovered = "no"
            if row["share_before"] < 0.3:  # random reads are within a rotation in 21 of 100
                recovered = "at chance"
            elif None not in row["recovered"]:
                recovered = f"{median(row['recovered'])} rounds"
    return [
        row["label"],
        f"{row['first']} to {row['last']}",
        f"{row['moved']:.0f}" if row["phase"] else "–",
        f"{100 * row['begins']:.1f}",
        f"{100 * row['mean']:.1f} ±{100 * row['std']:.1f}",
        path,
        recovered,
    ]


def test_the_tables_of_drift_are_those_of_the_stored_runs():
    head = "| method | rounds | moved | begins | ends | own cluster (chance) | recovered |"
    move, new = read_rows("drift.md", head)
    assert move == [format_phase(row) for row in load("drift/move")["phases"]]
    assert new == [
        format_phase(row) for row in load("drift/new-clusters")["phases"] if row["phase"]
    ]


def mean_and_deviation(study: str, metric: str, factor: float = 1) -> dict[str, str]:
    return {
        row["label"]: f"{factor * row['mean']:.1f} ± {factor * row['std']:.1f}"
        for row in load(study)["rows"]
        if (row["metric"], row["cluster"]) == (metric, "all")
    }


def test_the_table_of_sketches_is_that_of_the_stored_runs():
    names = {
        "`cos_grad` of the models that were read": "cos_grad of models",
        "sketches of 16 numbers, all candidates": "sketch 16",
        "sketches of 64 numbers, 5 candidates": "sketch 64, 5 candidates",
        "sketches of 64 numbers, all candidates": "sketch 64",
        "sketches of 256 numbers, all candidates": "sketch 256",
        "sketches of 16,384 numbers, all candidates": "sketch 16384",
        "Random": "Random",
        "Oracle": "Oracle",
    }
    head = "| peers are drawn by | accuracy | reads of the own rotation, from round 10 on | kB a client and round, before models |"
    (rows,) = read_rows("fine-tune.md", head)
    assert {names[row[0]]: row[1] for row in rows} == mean_and_deviation(
        "sketches", "accuracy", 100
    )


LANGUAGES = ("German", "French", "Dutch", "Portuguese", "Russian", "Swedish")


def test_the_table_of_languages_is_that_of_the_stored_runs():
    head = f"| method | all | {' | '.join(LANGUAGES)} | own language | kB a round |"
    (rows,) = read_rows("fine-tune.md", head)
    found = {row[0].removesuffix(" (3 of the own language)"): row[1:] for row in rows}
    expected = {}
    for study in ("manual-pages", "manual-pages-ffa"):
        content = load(study)
        spent = {one["label"]: one for one in content["spent"]}
        for label, both in mean_and_deviation(study, "perplexity").items():
            by_cluster = {
                row["cluster"]: f"{row['mean']:.1f}"
                for row in content["rows"]
                if (row["metric"], row["label"]) == ("perplexity", label)
            }
            clusters = [by_cluster[f"cluster {i}"] for i in range(len(LANGUAGES))]
            # 24 clients in 15 rounds; what is spent is the mean over clients.
            kilobytes = f"{spent[label]['bytes'] / 15 / 1000:.0f}" if label in spent else "0"
            expected[label] = [both, *clusters, kilobytes]
    assert {name: [*row[:7], row[8]] for name, row in found.items()} == expected
