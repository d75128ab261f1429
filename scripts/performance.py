"""Write docs/reference/performance.md from the measurements of docs/reference/runs/performance.

    python scripts/performance.py            (`--check` only says whether the page is up to date)

A measurement is NAME.json: {"origin": {...}, "results": [one flat object a row]}; see
scripts/stored.py. NAME.md next to it, written by hand, has a title (`## ...`) and says what was
measured, without results. The table has a column for each key of the results; a measurement that
needs another table has a function in TABLES. Sections are sorted by `order` in NAME.json (100 when
it is missing). No number of the tables is typed.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _pages import REFERENCE, STORED, markdown, write
from stored import told

from coterie.results.tables import TextTable

HEAD = """# Performance

Written by `make docs` from the stored measurements of `docs/reference/runs/performance`; do not edit. Each section
names the command that repeats it. Ratios carry over to other machines; milliseconds are those of the machine named.
"""
Rows = Sequence[Mapping[str, Any]]
NEVER_SLOWER = 1.1
"""How many times as fast as a lean loop of plain PyTorch every model should train."""


def number(value: object) -> str:
    """Return a cell: three significant digits, thousands apart; text as it is."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def plain(results: Rows) -> TextTable:
    """Return a table with a column for each key."""
    columns = list(dict.fromkeys(key for row in results for key in row))
    rows = [[number(row.get(name)) for name in columns] for row in results]
    return TextTable("", [name.replace("_", " ") for name in columns], rows)


def engines(results: Rows) -> TextTable:
    """Return the table of `python -m benchmarks.engines`."""
    head = (
        "cell", "engine", "threads", "times the usual loop", "from, to", "ms a client-round", "usual loop, ms",
        "usual loop in", "share of peak", "peak MB", "processor share",
    )  # fmt: skip
    rows = [
        (
            f"{row['net']}/{row['clients']}/{row['work']}",
            row["engine"],
            str(row["threads"]),
            f"{row['ratio']:.1f}",
            f"{row['low']:.1f}, {row['high']:.1f}",
            number(row["milliseconds"]),
            number(row["usual_milliseconds"]),
            # not in what was stored before it was measured, as the share
            row.get("usual_form", "-"),
            f"{row['share_of_peak']:.0%}" if "share_of_peak" in row else "-",
            f"{row['memory_mb']:,.0f}",
            f"{row['processor_share']:.0%}",
        )
        for row in results
    ]
    return TextTable("", head, rows)


def models(results: Rows) -> TextTable:
    """Return the table of `benchmarks/models.py`, with what is slower than it should be and why below it."""
    engines = list(dict.fromkeys(name for row in results for name in row["lean"]))
    head = (
        "model", "batch", "MFLOP a step", "usual loop, ms", "lean loop, ms", "auto takes", "ms a step",
        "times usual", "times lean", "from, to", "share of peak", "ready after, s",
        *(f"{name}, times lean" for name in engines),
    )  # fmt: skip
    rows, slow, reasons = [], [], dict[str, list[str]]()
    for row in results:
        auto = row["auto"]
        over = row["lean"][auto]
        rows.append((
            row["model"],
            str(row["batch"]),
            number(row["mflop"]),
            number(row["ms"]["usual"]),
            number(row["ms"]["lean"]),
            auto,
            number(row["ms"][auto]),
            times(row["usual"][auto]["median"]),
            times(over["median"]),
            f"{times(over['low'])}, {times(over['high'])}",
            f"{row['share'][auto]:.0%}",
            number(row["ready_s"][auto]),
            *(times(row["lean"][name]["median"]) if name in row["lean"] else "-" for name in engines),
        ))  # fmt: skip
        name = f"{row['model']} ({row['batch']})"
        if over["median"] < NEVER_SLOWER:
            slow.append(f"{name} {times(over['median'])}")
        if row["reason"]:
            reasons.setdefault(row["reason"], []).append(name)
    below = f"{len(slow)} of {len(results)}: {', '.join(slow)}" if slow else "none"
    foot = [f"Below {NEVER_SLOWER} times the lean loop with what auto takes: {below}."]
    foot += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return TextTable("", head, rows, "\n\n".join(foot))


def times(ratio: float) -> str:
    """Return a ratio: with two digits after the point below 10, none above."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def exchanges(results: Rows) -> TextTable:
    """Return the table of rounds between machines and the same bytes over raw TCP."""
    head = (
        "",
        "ms a round",
        "its runs",
        "times raw TCP",
        "90 % within (ms)",
        "MB a node received",
        "more bytes",
    )
    middle = {}
    names = {
        "raw": "raw TCP, mutual TLS 1.3",
        "coterie": "nodes",
        "before": "nodes of 403d6c1a, over Zenoh",
    }
    there = {row["kind"] for row in results}
    for kind in names.keys() & there:
        middle[kind] = statistics.median(row["median_ms"] for row in results if row["kind"] == kind)
    rows = []
    for kind, name in names.items():
        if kind not in there:
            continue
        runs = [row for row in results if row["kind"] == kind]
        rows.append((
            name,
            f"{middle[kind]:.1f}",
            ", ".join(f"{row['median_ms']:.0f}" for row in runs),
            f"{middle[kind] / middle['raw']:.2f}",
            f"{max(row['p90_ms'] for row in runs):.0f}",
            f"{runs[0]['bytes_a_node'] / 1e6:.2f}",
            f"{runs[0]['overhead']:.3%}",
        ))  # fmt: skip
    first = results[0]
    what = (
        f"{first['nodes']} nodes, models of {first['model_bytes'] / 1e6:g} MB, {first['peers']} peers a round, "
        f"{first['rounds']} rounds a run after the first ones."
    )
    return TextTable("", head, rows, what)


def whole_runs(results: Rows) -> TextTable:
    """Return the table of `benchmarks/models.py --rounds`."""
    sides = ("alone", "in a study")
    head = ["model", "clients", "rounds", "lean loop, s"]
    for side in sides:
        head += [f"engine {side}", "s", "times lean", "by processor time"]
    rows = []
    skipped = []
    for row in results:
        place = [row["model"], str(row["clients"]), str(row["rounds"])]
        if "skipped" in row:
            skipped.append(" x ".join(place))
            continue
        cells = [*place, number(row["seconds"]["lean"])]
        for side in sides:
            engine = row["engines"][side].partition(",")[0]
            ratios = (row["times lean"][side], row["processor"][side])
            cells += [engine, number(row["seconds"][side]), *map(number, ratios)]
        rows.append(cells)
    foot = ""
    if skipped:
        foot = "Left out, since the lean loop would take too long: " + ", ".join(skipped) + "."
    return TextTable("", head, rows, foot)


MILLION, MACHINE = 1_000_000, 24
"""Clients of the paper run, and GiB of the machine that measurements were made on."""


def million(results: Rows) -> TextTable:
    """Return the table of populations, and below it what a million clients would take by its slopes.

    Of each model the two largest populations give a line; what is beyond them was not run.
    """
    names = {
        "seconds a round": "s a round",
        "peak memory, GiB": "GiB",
        "checkpoint, MB": "MB of a checkpoint",
        "report, s": "s of the report",
        "report, MB": "MB of the report",
    }
    foot = [
        "**A million by measured pieces.** No run had a million clients. Each model's two largest populations give a line, "
        f"and this is where it is at {MILLION:,}:"
    ]
    for model in dict.fromkeys(row["model"] for row in results):
        own = [row for row in results if row["model"] == model]
        small, large = sorted(own, key=lambda row: row["clients"])[-2:]
        at, parts = {}, []
        for key, unit in names.items():
            slope = (large[key] - small[key]) / (large["clients"] - small["clients"])
            at[key] = large[key] + slope * (MILLION - large["clients"])
            parts.append(f"{number(at[key])} {unit}")
        machines = math.ceil(at["peak memory, GiB"] / MACHINE)
        fits = "one machine" if machines == 1 else f"blocks on {machines} machines or more"
        foot.append(f"* {model}: {', '.join(parts)}. That takes {fits}, of {MACHINE} GiB.")
    return replace(plain(results), foot="\n".join([foot[0], "", *foot[1:]]))


TABLES: dict[str, Callable[[Rows], TextTable]] = {
    "engines": engines, "thousand": engines, "machine": engines, "models": models, "models-avx512": models,
    "network": exchanges, "population-table": million, "short-runs": whole_runs, "whole-runs": whole_runs,
}  # fmt: skip


def section(path: Path) -> str:
    """Return the part of the page on one measurement."""
    stored = json.loads(path.read_text())
    head = stored["origin"]
    where = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in head["machine"].items()
    )
    table = TABLES.get(path.stem, plain)(stored["results"])
    parts = [
        path.with_suffix(".md").read_text().strip(),
        f"```console\n$ {head['command']}\n```",
        f"Measured with {where}. {told(f'performance/{path.stem}', head)}",
    ]
    return "\n\n".join([*parts, markdown(table)]) + "\n"


def _place(path: Path) -> tuple[int, str]:
    return json.loads(path.read_text()).get("order", 100), path.stem


def page() -> str:
    """Return the page."""
    return "\n".join(
        [HEAD, *map(section, sorted((STORED / "performance").glob("*.json"), key=_place))]
    )


if __name__ == "__main__":
    sys.exit(write({REFERENCE / "performance.md": page()}))
