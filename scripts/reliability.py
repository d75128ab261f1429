"""Write docs/reference/reliability.md: which failures were caused on purpose, and what was lost.

    python benchmarks/reliability.py kills    (or another measurement; each writes its JSON into
                                              docs/reference/runs/reliability)
    python scripts/reliability.py             (`--check` only compares the page)

No number of the page is typed.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from _pages import REFERENCE, STORED, table, write
from stored import told

HEAD = """<!-- made by scripts/reliability.py; do not edit -->
# Reliability, measured

Each experiment runs a small study (DAC and FedAvg, a checkpoint after every round), does something to it at random, and
compares every file it leaves, byte by byte, with those of a study that nothing happened to. *Right* means
equal bytes; *right, and said* that a line also named what had been damaged or which run is missing; *refused* that one clear
line said what is wrong and what to do. [Resume a study](../how-to/resume.md) explains why.
"""
Rows = list[dict[str, Any]]
OUTCOMES = ("right", "right, and said", "refused", "WRONG", "RAW ERROR")
TITLES = {"WRONG": "other bytes, no word", "RAW ERROR": "an error that is no clear line"}
KINDS = {
    "flip": "1 to 4 bits of a file flipped",
    "truncate": "a file cut off",
    "swap": "two files in each other's place",
    "missing": "a file deleted",
}


def _table(rows: Rows, name: Callable[[dict[str, Any]], str], head: str) -> str:
    counts = Counter((name(row), row["outcome"]) for row in rows)
    names = list(dict.fromkeys(name(row) for row in rows))
    cells = [
        (one, sum(counts[one, o] for o in OUTCOMES), *(counts[one, o] for o in OUTCOMES))
        for one in names
    ]
    whole = ("all", *(sum(int(line[i]) for line in cells) for i in range(1, len(OUTCOMES) + 2)))
    return table((head, "trials", *(TITLES.get(o, o) for o in OUTCOMES)), [*cells, whole])


def corruptions(rows: Rows) -> str:
    """Return the part on damaged files."""
    then = {"read": "read as `coterie show` does", "go on": "gone on with"}

    def name(row: dict[str, Any]) -> str:
        return f"{KINDS[row['kind']]}, then {then[row['then']]}"

    ordered = sorted(rows, key=lambda row: (row["then"], list(KINDS).index(row["kind"])))
    return (
        "One file of a finished study, or of one stopped in the middle, is damaged: tables, checkpoints, "
        "configurations, summaries, manifests.\n\n" + _table(ordered, name, "damage")
    )


def kills(rows: Rows) -> str:
    """Return the part on kills."""

    def name(row: dict[str, Any]) -> str:
        return "while files are written" if row["writing"] else "within rounds"

    killed, whole = sum(row["killed"] for row in rows), sum(row["whole"] for row in rows)
    return (
        f"The process is killed with SIGKILL at a call of a function that is drawn from the {rows[0]['of']:,} of the "
        f"whole study; then the study is gone on with. {killed} of {len(rows)} processes were killed; in {whole} of "
        f"{len(rows)} folders every file was then whole by its digest. A line is said where a kill left a checkpoint "
        "without its tables.\n\n" + _table(rows, name, "killed")
    )


def plans(rows: Rows) -> str:
    """Return the part on kills of run, sweep, tune and compare."""
    finished, twice = sum(row["finished"] for row in rows), sum(row["twice"] for row in rows)
    return (
        "The same for every kind of plan: a study that takes two of its four runs from another, a sweep, a tuning, and a "
        "comparison of two studies; after the kill the same command is given again. "
        f"{sum(row['killed'] for row in rows)} of {len(rows)} processes were killed. {finished} runs were finished "
        f"when their process died; {twice} of them were trained again.\n\n"
        + _table(rows, lambda row: row["kind"], "killed")
    )


def faults(rows: Rows) -> str:
    """Return the part on a system that refuses."""
    kinds = {
        "full disk": "no space left (ENOSPC)",
        "read-only": "read-only file system (EROFS)",
        "failing disk": "input/output error (EIO)",
        "out of memory": "no memory, anywhere in a round",
    }
    lines = sum(row["one_line"] for row in rows)
    return (
        "One call that changes files is refused by the system, or memory ends at a random call; when that is over, the "
        f"study is gone on with. {lines} of {len(rows)} faults ended in one clear line.\n\n"
        + _table(rows, lambda row: kinds[row["kind"]], "fault")
    )


def mutants(rows: Rows) -> str:
    """Return the part on faults in the code."""
    packages = sorted({row["package"] for row in rows})
    counts = Counter((row["package"], row["outcome"]) for row in rows)
    cells = [(one, *_counts([counts[one, kind] for kind in NOTICED])) for one in packages]
    whole = ("all", *_counts([sum(counts[one, kind] for one in packages) for kind in NOTICED]))
    survived = [
        f"* {row['package']}: {row['name']}: {row['survives']}."
        for row in rows
        if row["outcome"] == "survived"
    ]
    told_of = "\n\nNot noticed, and why:\n\n" + "\n".join(survived) if survived else ""
    return (
        "One fault at a time is put into the code, such as a wrong sign, an ignored option, a bound off by one; then "
        "the tests next to that code run, no others (`make mutants`, tests/mutants). A test that does not end within "
        "its time notices, too. About half of the faults were noticed when the list was first written; tests were "
        "written for the others. So the share describes these faults, not the next one.\n\n"
        + table(("package", "faults", *NOTICED, "share noticed"), [*cells, whole])
        + told_of
    )


def sampled(rows: Rows) -> str:
    """Return the part on faults that a program draws."""
    return (
        "The same with faults that nobody chose: a program draws them from all places of a package where a comparison, "
        "a number, an operator, a condition, the order of arguments, a call or a step can be changed "
        "(`scripts/sampled_mutants.py` has the list). A new seed is a new sample, so the share is an estimate for faults that "
        "nobody thought of; the tests were not written for it. In *the same program*, the change makes no difference, for a "
        "reason that is listed in tests/mutants/equivalent; such changes are not counted.\n\n"
        + _sample(rows)
    )


def sampled_before(rows: Rows) -> str:
    """Return the part on an earlier sample."""
    return (
        "Another seed, before tests were written for the kinds of faults that survived in it.\n\n"
        + _sample(rows)
    )


def _sample(rows: Rows) -> str:
    """Return the table of a sample and the list of what the tests did not notice."""
    packages = list(dict.fromkeys(row["package"] for row in rows))
    cells = []
    for name in [*packages, "all"]:
        outcomes = Counter(row["outcome"] for row in rows if name in (row["package"], "all"))
        same = outcomes.pop("equivalent", 0)
        cells.append((name, *_counts([outcomes[kind] for kind in NOTICED]), same))
    survived = []
    for row in rows:
        if row["outcome"] == "survived":
            place = f"`{row['file']}` line {row['line']}, {row['kind']}"
            survived.append(f"* {place}: `{row['before']}` became `{row['after']}`")
    listed = "\n\nNot noticed:\n\n" + "\n".join(survived) if survived else ""
    heads = ("package", "faults", *NOTICED, "share noticed", "the same program")
    return table(heads, cells) + listed


def _counts(numbers: list[int]) -> tuple[object, ...]:
    return sum(numbers), *numbers, f"{100 * (1 - numbers[-1] / sum(numbers)):.1f} %"


NOTICED = ("noticed", "timed out", "survived")
CHECKS = {
    "run": "the study runs, or is refused in one line",
    "resume": "run again, and stopped after a round and resumed: equal bytes",
    "engines": "another engine ends where the loop engine does",
    "blocks": "hosted in blocks of clients: equal bytes",
    "groups": "hosted by several members that send messages: equal models",
    "watching": "what is only measured or stored changes no model",
    "relabeling": "clients with other ids have the same models",
    "names": "names change nothing, and are stored with the models",
    "study file": "written and read it is the same study",
    "models": "models taken home are the run's, and score what was reported",
    "said": "what is not finite is no score, and a line names it",
    "faulty": "with messages lost, late or double, resumed: equal bytes",
    "command line": "run, show, compare, report, export and resume end with 0, or with 2 and a line",
    "workers": "two worker processes leave the bytes of one",
}
RESULTS = ("held", "refused", "not for it", "too sensitive", "FOUND")


def adversary(rows: Rows) -> str:
    """Return the part on combinations drawn at random."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        counts[row["check"], row["result"]] += row["times"]
    refused = counts["run", "refused"]
    held = sum(counts[check, "held"] for check in CHECKS if check != "run")
    ran = counts["run", "held"]
    kinds = [kind for row in rows for kind in row.get("kinds", ())]
    left = "\n".join(f"* {CHECKS[one['check']]}: {one['said']}" for one in kinds)
    cells = [
        (text, *(counts[check, result] for result in RESULTS)) for check, text in CHECKS.items()
    ]
    heads = ("held", "refused", "not for it", "too sensitive", "found wrong")
    return (
        "Studies are drawn at random: a method, settings, data and a model, from the registries and by the annotations "
        "of each setting (`benchmarks/combinations.py`). A study that is refused is tried again with a setting less. Each "
        f"study is run, and some of the promises below are tried on it. {ran} studies ran, {refused} draws were refused, each "
        f"in one line, and {held} trials of the other promises held. *Not for it*: the promise is not about such a study. "
        "*Too sensitive*: rounding decides such a training: data and a rate that are moved by about the rounding of "
        "their numbers change it as much, or float32 takes the loop engine itself as far from its float64 run, in "
        "which the engines agree. What was found before was mended, and is a test.\n\n"
        + table(("promise", *heads), cells)
        + (f"\n\nStill open:\n\n{left}" if left else "")
    )


SECTIONS = (
    ("Damaged files", "reliability/corruptions", corruptions),
    ("Kills", "reliability/kills", kills),
    ("Kills of every kind of plan", "reliability/plans", plans),
    ("Faults of the system", "reliability/faults", faults),
    ("Combinations that nobody chose", "reliability/adversary", adversary),
    ("Faults in the code", "reliability/mutants", mutants),
    ("Faults in the code, drawn at random", "reliability/sampled-mutants", sampled),
    ("An earlier sample", "reliability/sampled-mutants-4021", sampled_before),
)


def section(title: str, name: str, document: dict[str, Any], shown: Callable[[Rows], str]) -> str:
    """Return one part of the page."""
    origin = document["origin"]
    machine = origin["machine"]
    source = (
        f"`{origin['command']}`, {machine['processor']}, Python {machine['python']}, torch {machine['torch']}. "
        + told(name, origin)
    )
    return f"## {title}\n\n{shown(document['results'])}\n\n{source}\n"


def page() -> str:
    """Return the page, of all that has been stored."""
    parts = [
        section(title, name, json.loads((STORED / f"{name}.json").read_text("utf-8")), shown)
        for title, name, shown in SECTIONS
        if (STORED / f"{name}.json").exists()
    ]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    sys.exit(write({REFERENCE / "reliability.md": page()}))
