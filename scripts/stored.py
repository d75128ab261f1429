"""Keep results of studies and benchmarks in the repository, and say how old each is.

    coterie run similarity/synthetic
    python scripts/stored.py keep runs/similarity/synthetic [--in-parts | --join]
    python scripts/stored.py                  (`--check` only compares what it writes)

A stored result is a file of docs/reference/runs that a program of benchmarks wrote, with its head
as "origin", or a folder with a study's summary.json, config.toml, runs.json (the values of each
run) and origin.json: the head, and what the runs took. A sweep is stored as one study, with its
points in the labels. `--join` adds runs to the stored ones: other methods with the same seeds, or
other seeds of the same methods.

The program that made the result writes the head, which names the parts of the package that the
result depends on (`coterie._util.origin.head`). Without arguments the script counts the commits to
these parts since the result's own commit. It writes ages.json, which all pages with stored results
show, and docs/reference/stored-results.md.
"""

import json
import math
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _pages import REFERENCE, ROOT, STORED, table, write

from coterie._util.files import write_atomically
from coterie.errors import CoterieError
from coterie.methods import METHODS
from coterie.report.plots import strip_settings
from coterie.results import stored_runs, summary
from coterie.runtime import final_metrics
from coterie.studies import config, sweep

PAGE, AGES = REFERENCE / "stored-results.md", STORED / "ages.json"
FIELDS = (
    "commit",
    "dirty",
    "version",
    "made",
    "command",
    "config",
    "seeds",
    "machine",
    "speaks_of",
)
NOT_INFERRED = ("dirty", "config", "seeds")
"""Fields that are unknown for results that were stored without them."""
BETWEEN_RUNS = 10
"""Seconds in which a run is set up, at most."""
GOLDEN = {
    "wire": ROOT / "tests/golden/wire/vectors.json",
    "runs": ROOT / "tests/golden/runs/runs.json",
}
"""What the code computes, byte by byte: where they differ from those of a result's commit, results are others too."""
SHARED = ("data", "engine", "exchange", "functional", "models", "rng.py", "simulation")
"""What the results of every study depend on, in addition to its methods."""
HEAD = """<!-- made by scripts/stored.py; do not edit -->
# Stored results

Every number of the pages on [reproduction](reproduction.md), [performance](performance.md) and [the
network](network.md) comes from a result that is stored in `docs/reference/runs` with the commit that it was made with.
The table says how many commits have since changed the code that it speaks of, and whether the golden runs of its
methods (or the wire format) are others than at that commit: then the same command would give another result. A result
that is old and whose golden runs are the same is likely, not certain, to come out again.

An *inferred* commit is that in which the result was stored, found in the history of the file: it was made before
programs recorded where their results come from, or at a commit that the history did not keep.
"""


@dataclass(frozen=True)
class Stored:
    """A stored result.

    Args:
        path: its file, or the folder of a study.
        head: where it comes from; empty where it does not say.
    """

    path: Path
    head: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its place below the stored results, without the suffix."""
        return self.path.relative_to(STORED).with_suffix("").as_posix()


def results(folder: Path | None = None) -> list[Stored]:
    """Return every stored result, in order of their names."""
    folder = folder or STORED
    found = []
    for path in sorted(folder.rglob("*.json")):
        if path.name == "origin.json":
            found.append(Stored(path.parent, json.loads(path.read_text())))
        elif path != AGES and not (path.parent / "origin.json").exists():
            found.append(Stored(path, json.loads(path.read_text()).get("origin", {})))
    return found


# ---------------------------------------------------------------------- how old they are


def git(*words: str) -> str:
    """Return what git says of this repository.

    Raises:
        OSError: when it fails, is not there, or the clone is shallow, so that its history cannot be
            counted.
    """
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"git {words[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def check_history() -> None:
    """Find out whether this is a whole clone.

    Raises:
        OSError: when it is not; says what to do.
    """
    if git("rev-parse", "--is-shallow-repository") == "true":
        raise OSError(
            "the clone is shallow; git fetch --unshallow brings the history that stored results name"
        )


def problems(one: Stored) -> list[str]:
    """Return what is wrong with the head of a stored result, a line each."""
    head, inferred = one.head, bool(one.head.get("inferred"))
    missing = [name for name in FIELDS if name not in head]
    if missing:
        return [f"{one.name} does not say its {name}" for name in missing]
    unknown = [
        name for name in FIELDS if head[name] is None and not (inferred and name in NOT_INFERRED)
    ]
    lines = [
        f"{one.name}: {name} is not known, and the head is not marked as inferred"
        for name in unknown
    ]
    if not head["speaks_of"]:
        lines.append(f"{one.name} names no part of the package that it speaks of")
    gone = [part for part in head["speaks_of"] if not (ROOT / "src/coterie" / part).exists()]
    lines += [f"{one.name} speaks of {part}, which is not in the package" for part in gone]
    gone = [
        commit
        for commit in head.get("commits", [head["commit"]])
        if commit and not in_history(commit)
    ]
    return lines + [f"{one.name}: its commit {commit} is not in the history" for commit in gone]


@lru_cache(maxsize=256)
def in_history(commit: str, of: str = "HEAD") -> bool:
    """Return whether a commit is `of` or one that it comes from."""
    try:
        git("merge-base", "--is-ancestor", commit, of)
    except OSError:
        return False
    return True


@lru_cache(maxsize=1024)
def commits_since(commit: str, part: str, until: str) -> int:
    """Return how many commits after one have changed a part of the package, up to another."""
    return int(
        git("rev-list", "--count", "--no-merges", f"{commit}..{until}", "--", f"src/coterie/{part}")
    )


@lru_cache(maxsize=64)
def golden(name: str, commit: str) -> str | None:
    """Return the text of a file of golden results at a commit; None where there was none."""
    try:
        return git("show", f"{commit}:{GOLDEN[name].relative_to(ROOT).as_posix()}")
    except OSError:
        return None


def changed(head: Mapping[str, Any]) -> list[str] | None:
    """Return the golden results of what a stored result speaks of that are now others than at its commit.

    Returns:
        Kinds of methods, and "wire" for the format of messages; None where there were none at that
        commit.
    """
    found: list[str] = []
    speaks_of = head["speaks_of"]
    if "net" in speaks_of:
        before = golden("wire", head["commit"])
        if before is None:
            return None
        found += ["wire"] * (json.loads(before) != json.loads(GOLDEN["wire"].read_text()))
    kinds = [kind for kind in METHODS if module_of(kind) in speaks_of]
    if kinds:
        before = golden("runs", head["commit"])
        if before is None:
            return None
        was, now = json.loads(before), json.loads(GOLDEN["runs"].read_text())
        found += [kind for kind in kinds if was.get(kind) != now.get(kind)]
    return found


def module_of(kind: str) -> str:
    """Return the file of a method, below the package."""
    return METHODS[kind].__module__.removeprefix("coterie.").replace(".", "/") + ".py"


def age(head: Mapping[str, Any], until: str) -> dict[str, Any]:
    """Return how old a result is: commits to each part since, and golden results that have changed."""
    counted = {part: commits_since(head["commit"], part, until) for part in head["speaks_of"]}
    return {
        "commits": {part: number for part, number in counted.items() if number},
        "golden": changed(head),
    }


def ages(until: str) -> dict[str, Any]:
    """Return the content of ages.json: how old every stored result is at a commit."""
    return {
        "counted_at": until,
        "date": git("show", "-s", "--format=%cs", until),
        "results": {one.name: age(one.head, until) for one in results()},
    }


def told(name: str, head: Mapping[str, Any], *, counted: bool = True) -> str:
    """Return where a stored result comes from and how old it is, in a sentence or two for a page.

    Args:
        name: of the result.
        head: where it comes from.
        counted: whether the commits since are counted; what golden results have changed is said
            anyway.
    """
    parts = [f"Commit `{head['commit'][:9]}` of {head['made']}, version {head['version']}."]
    if why := head.get("inferred"):
        why = why if isinstance(why, str) else "Made before provenance was recorded"
        parts = [
            f"{why}: commit `{head['commit'][:9]}` of {head['made']} is inferred from the history of the file."
        ]
    if head["dirty"]:
        parts.append("The code had changes that were not committed.")
    stored = json.loads(AGES.read_text())
    found = stored["results"].get(name)
    if found is not None:
        most = sorted(found["commits"].items(), key=lambda one: -one[1])
        since = ", ".join(f"{number} to `{part}`" for part, number in most[:3])
        fewer = f", and fewer to {len(most) - 3} more parts" if len(most) > 3 else ""
        what = (
            f"Commits since to the code that it speaks of: {since}{fewer}"
            if most
            else "Its code is the same since"
        )
        if counted:
            parts.append(f"{what} ([counted](stored-results.md) on {stored['date']}).")
        if found["golden"]:
            parts.append(
                f"**The golden results of {', '.join(found['golden'])} have changed since.**"
            )
    return " ".join(parts)


def page(stored: Mapping[str, Any]) -> str:
    """Return the page with all stored results.

    Args:
        stored: the content of ages.json.
    """
    rows = []
    for one in results():
        found = stored["results"][one.name]
        others = found["golden"]
        rows.append((
            f"`{one.name}`",
            one.head["made"],
            f"`{one.head['commit'][:9]}`" + (", inferred" if one.head.get("inferred") else ""),
            {True: "yes", False: "no", None: "not recorded"}[one.head["dirty"]],
            one.head["machine"].get("processor", "not recorded"),
            ", ".join(f"{part} {number}" for part, number in found["commits"].items()) or "none",
            "not stored then" if others is None else ", ".join(others) or "no",
        ))  # fmt: skip
    head = (
        "result",
        "made",
        "commit",
        "uncommitted changes",
        "processor",
        "commits since, by part",
        "golden changed",
    )
    counted = f"Counted at commit `{stored['counted_at'][:9]}` of {stored['date']}.\n"
    return "\n".join([HEAD, counted, table(head, rows), ""])


def render(until: str) -> dict[Path, str]:
    """Return what this script writes, counted at a commit."""
    counted = ages(until)
    return {AGES: json.dumps(counted, indent=1) + "\n", PAGE: page(counted)}


# ---------------------------------------------------------------------- studies


def keep(
    run: Path, *, in_one_go: bool = True, join: bool = False, where: Path | None = None
) -> Path:
    """Store a study: its summary, settings, the values of each run, and where they come from.

    Args:
        run: the folder of a finished study.
        in_one_go: whether it ran without a break, so that its duration is known.
        join: add the runs to the stored ones (see `joined`), in place of them.
        where: the folder of stored results; the repository's own when None.

    Raises:
        CoterieError: when a run has no provenance, there is a run that has not finished, or runs
            cannot be joined.
    """
    runs, unread = stored_runs.load_runs([run])
    open_ = [str(problem.folder) for problem in unread] + [
        str(one.folder) for one in runs if not one.is_finished
    ]
    if open_:
        raise CoterieError(
            f"{open_[0]} and {len(open_) - 1} more runs of {run} have not finished; run it to its end"
        )
    settings = stored_runs.load_study_text(run, stored_runs.CONFIG)
    study = tomllib.loads(settings)
    swept = "sweep" in study
    content = (
        sweep.join_summaries(sweep.load_sweep_results(run))
        if swept
        else summary.summarize_study(run)
    )
    content["rows"] += [] if swept else _left_out(runs, content["rows"])
    # A run may have been made under another name, such as a study with changes by --set.
    content["study"] = study["name"]
    target = (where or STORED) / study["name"]
    points = [f", {one.folder.parent.parent.name}" if swept else "" for one in runs]
    each = [
        {"label": one.label + point, "seed": one.seed, "values": values(one), **by_client(one)}
        for one, point in zip(runs, points, strict=True)
    ]
    told_ = _origin(runs, content, settings)
    if in_one_go and not join:
        # a sweep's own is written at its end
        started = min(path.stat().st_mtime for path in run.rglob(stored_runs.CONFIG))
        elapsed = (run / "summary.json").stat().st_mtime - started
        took = [one.provenance["timing"]["wall_s"] for one in runs]
        # A folder that was made of others' runs, or written again, is younger than they took; one
        # in which runs were stopped, or which got further runs later, is older.
        if max(took) <= elapsed <= sum(took) + BETWEEN_RUNS * len(took):
            told_["elapsed_s"] = round(elapsed, 1)
    if join:
        content, each, told_, settings = joined(target, content, each, told_, settings)
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary.replace_nonfinite(content), indent=1, ensure_ascii=False) + "\n"
    write_atomically(target / "summary.json", text.encode())
    write_atomically(target / stored_runs.CONFIG, settings.encode())
    write_atomically(target / "runs.json", _lines(summary.replace_nonfinite(each)))
    write_atomically(target / "origin.json", (json.dumps(told_, indent=1) + "\n").encode())
    return target


Content = dict[str, Any]


def joined(
    target: Path, content: Content, each: list[Content], told_: Content, settings: str
) -> tuple[Content, list[Content], Content, str]:
    """Return what is stored, with more runs: other methods with the same seeds, or other seeds of the same methods.

    Every method keeps the seeds of the others. The values of clients are not stored, so what needs
    those of several runs side by side is left out: pairs of methods, and with other seeds times to
    an accuracy.

    Args:
        target: the folder of the stored study.
        content: what is in `summary.json`, of the runs to add.
        each: the same of `runs.json`.
        told_: the same of `origin.json`.
        settings: the same of `config.toml`.

    Raises:
        CoterieError: when no such study is stored, or its settings, methods or seeds do not fit.
    """
    if not (target / "summary.json").exists():
        raise CoterieError(
            f"{content['study']} is not stored, there is nothing to join; leave out --join"
        )
    before, head = (
        json.loads((target / name).read_text()) for name in ("summary.json", "origin.json")
    )
    runs = _stored_runs(target, before, head)
    first, second = (
        config.parse_study_text(text, content["study"], to_run=False)
        for text in ((target / stored_runs.CONFIG).read_text(), settings)
    )
    ours, theirs = ({entry.label: entry for entry in study.methods} for study in (first, second))
    same = ours.keys() & theirs.keys()
    other = replace(
        second, seeds=first.seeds, methods=tuple(theirs.get(label, ours[label]) for label in ours)
    )
    if difference := config.describe_difference(first, other):
        raise CoterieError(f"the stored runs have other settings: {difference}")
    if before.get("left_out") or content.get("left_out") or "new_clients" in content:
        raise CoterieError(
            "runs that were left out, and new clients, cannot be joined; run the study again"
        )
    if {run["label"] for run in [*runs, *each]} - ours.keys() - theirs.keys():
        raise CoterieError(
            "points of a sweep cannot be joined; put them into one folder and keep that"
        )
    seeds = sorted({run["seed"] for run in runs}), sorted({run["seed"] for run in each})
    if not (seeds[0] == seeds[1] and not same) and not (
        ours.keys() == theirs.keys() and not {*seeds[0]} & {*seeds[1]}
    ):
        raise CoterieError(
            "give other methods with the same seeds, or other seeds of the same methods"
        )
    methods = [*first.methods, *(entry for entry in second.methods if entry.label not in same)]
    study = replace(first, methods=tuple(methods), seeds=tuple(sorted({*seeds[0], *seeds[1]})))
    order = [entry.label for entry in methods]
    both = sorted([*runs, *each], key=lambda run: (order.index(run["label"]), run["seed"]))
    parts: dict[tuple[str, str, str], list[Content]] = {}
    for row in [*before["rows"], *content["rows"]]:
        parts.setdefault((row["label"], row["cluster"], row["metric"]), []).append(row)
    rows = []
    for (label, cluster, metric), of_parts in parts.items():
        found = [run["values"].get(metric, {}) for run in both if run["label"] == label]
        if all(cluster in one for one in found):  # what not every run has measured has no mean
            # Stored as None is what was measured and is no number: diverged, or undefined.
            mean, deviation = summary.mean_std_over_seeds(
                np.array([one[cluster] for one in found], float)
            )
            row = {**of_parts[-1], "mean": mean, "std": deviation, "seeds": len(found)}
            row.pop("undefined", None)
            unknown = [one for one in of_parts if one["mean"] is None or math.isnan(one["mean"])]
            if unknown and all(one.get("undefined") for one in unknown):
                row["undefined"] = True
            rows.append(row)
    lists = {
        name: [*before.get(name, ()), *content.get(name, ())]
        for name in ("timing", "participation", "undefined")
    }
    # of the runs of one method, and of its baseline
    single = () if same else ("spent", "time_to_accuracy")
    lists |= {name: [*before.get(name, ()), *content.get(name, ())] for name in single}
    out = {
        **{name: content[name] for name in ("study", "metrics", "scale") if name in content},
        "seeds": list(study.seeds), "left_out": [], "rows": sorted(rows, key=lambda row: order.index(row["label"])),
        "spent": [], **lists,
    }  # fmt: skip
    return out, both, _joined_heads(head, told_, study), config.format_study(study)


def _stored_runs(target: Path, content: Content, head: Content) -> list[Content]:
    """Return the values of each stored run; of a single seed, the rows of the summary are those."""
    if (target / "runs.json").exists():
        return json.loads((target / "runs.json").read_text())
    if len(head["seeds"] or ()) != 1:
        raise CoterieError(
            f"{content['study']} was stored without the values of its runs; run it again"
        )
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in content["rows"]:
        found.setdefault(row["label"], {}).setdefault(row["metric"], {})[row["cluster"]] = row[
            "mean"
        ]
    return [
        {"label": label, "seed": head["seeds"][0], "values": one} for label, one in found.items()
    ]


def _joined_heads(first: Content, second: Content, study: config.StudyConfig) -> Content:
    """Return the head of joined runs: that of the newer ones, as old as the oldest of both, with the work of both."""
    commits = [one for head in (first, second) for one in head.get("commits", [head["commit"]])]
    runs = first["runs"], second["runs"]
    trained = dict(first["rounds_trained"])
    for label, rounds in second["rounds_trained"].items():
        share = len(second["seeds"]) / len(study.seeds)
        trained[label] = (
            round(share * rounds + (1 - share) * trained[label], 1) if label in trained else rounds
        )
    return {
        **second, **{name: first[name] for name in ("inferred",) if name in first},
        **_of_commits(commits), "dirty": None if first["dirty"] is None else first["dirty"] or second["dirty"],
        "made": max(first["made"], second["made"]), "seeds": list(study.seeds),
        "command": _command(first["command"], study),
        "speaks_of": sorted({*first["speaks_of"], *second["speaks_of"]}),
        "engines": sorted({*first["engines"], *second["engines"]}), "runs": sum(runs), "rounds_trained": trained,
        "rounds": max(first["rounds"], second["rounds"]),
        **{name: round(first[name] + second[name], 1) for name in ("wall_s", "train_samples")},
    }  # fmt: skip


def _of_commits(commits: Iterable[str]) -> Content:
    """Return the oldest commit that runs were made with, and all commits when there are several.

    Raises:
        CoterieError: when none of them comes before the others.
    """
    known = list(dict.fromkeys(commits))
    oldest = next((one for one in known if all(in_history(one, other) for other in known)), None)
    if oldest is None:
        raise CoterieError(
            f"no commit of {', '.join(one[:9] for one in known)} comes before the others; run it again"
        )
    return {"commit": oldest, **({"commits": known} if len(known) > 1 else {})}


def _command(begun: str, study: config.StudyConfig) -> str:
    """Return a command that ran a part of a built-in study, with the methods and seeds of this one."""
    kept = _without(begun, {"--seeds": "", "--set": "use_methods="})
    seeds, built_in = list(study.seeds), config.load_study(study.name)
    swept = [path.rpartition(".")[2] for path in built_in.sweep]
    labels = list(dict.fromkeys(strip_settings(entry.label, swept) for entry in study.methods))
    # of one seed; "7" would be seven
    listed = ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")
    kept += ["--seeds", str(len(seeds)) if seeds == [*range(len(seeds))] else listed]
    if {entry.label for entry in built_in.methods} != {*labels}:
        kept += ["--set", "use_methods=" + json.dumps(labels, separators=(",", ":"))]
    return shlex.join(kept)


def _lines(rows: Sequence[Any]) -> bytes:
    """Return JSON with a row a line."""
    return (
        "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"
    ).encode()


def _origin(
    runs: Sequence[stored_runs.StoredRun], content: Mapping[str, Any], settings: str
) -> dict[str, Any]:
    """Return the head of a study from what its own runs say, and what they took."""
    told_ = [run.provenance for run in runs]
    study, made_by = content["study"], [one["command"] for one in told_]
    command = repeated_by(made_by, study)
    parts = {repeated_by([one], study) for one in filter(_begins, made_by)}
    if parts - {command} and not command.endswith(stored_runs.CONFIG):  # each did a part
        command = _command(command, config.parse_study_text(settings, study, to_run=False))
    commits = [one.get("commit") for one in told_]
    if None in commits or any(one.get("dirty") is None for one in told_):
        raise CoterieError(
            "a run does not say the commit that it was made with; run the study from the repository"
        )
    first = told_[0]
    return {
        **_of_commits(commits),
        "dirty": any(one["dirty"] for one in told_),
        "version": first["packages"]["coterie"],
        "made": max(_day(run.folder / stored_runs.PROVENANCE) for run in runs),
        "command": command,
        "config": stored_runs.CONFIG,
        "seeds": sorted({run.seed for run in runs}),
        "machine": {
            **first["hardware"], "python": first["python"],
            **{name: first["packages"][name] for name in ("torch", "numpy")},
        },
        "speaks_of": sorted({*SHARED, *(module_of(run.method_kind) for run in runs)}),
        "engines": sorted({one["engine"]["name"] for one in told_}),
        "runs": len(runs),
        "rounds": max(run.num_rounds for run in runs),
        "rounds_trained": {label: round(summary.compute_mean_rounds(group), 1) for label, group in stored_runs.group_by_label(runs).items()},
        "wall_s": round(sum(t["wall_s"] for t in content["timing"]), 1),
        "train_samples": sum(t["train_samples"] for t in content["timing"]),
    }  # fmt: skip


def repeated_by(commands: Sequence[str], study: str) -> str:
    """Return the command that repeats a study: the first that began a run of it, without the places of that machine.

    Args:
        commands: what each run was made with; `coterie resume` says nothing of the settings.
        study: its name. The settings that are stored are run where a study file was, where every
            command resumed, and where a program ran some of it, which no command of ours names.
    """
    settings = (STORED / study / stored_runs.CONFIG).relative_to(ROOT).as_posix()
    begun = next(filter(_begins, commands), "")
    words = _without(begun, dict.fromkeys(("--out", "-o", "--data-dir"), ""))
    by_programs = any(one.split()[:1] != ["coterie"] for one in commands)
    if not begun or by_programs or any(word.endswith(".toml") for word in words):
        words = ["coterie", "run", settings]
    return shlex.join(word for word in words if word != "--resume")


def _begins(command: str) -> bool:
    """Whether a command begins runs, and so names their settings; `coterie resume` does not."""
    return command.split()[:2] == ["coterie", "run"]


def _without(command: str, options: Mapping[str, str]) -> list[str]:
    """Return the words of a command but some options, each where its value begins with the text given for it."""
    words, kept = iter(shlex.split(command)), []
    for word in words:
        name, _, inside = word.partition("=")
        if name not in options:
            kept.append(word)
            continue
        value = inside or next(words, "")
        if not value.startswith(options[name]):
            kept += [word] if inside else [name, value]
    return kept


def _day(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()


def values(run: stored_runs.StoredRun) -> dict[str, dict[str, float]]:
    """Return the final values of a run by metric: of each cluster by its name, and over clients and clusters."""
    names = stored_runs.load_cluster_names(
        run.folder.parent.parent, (int(c) for c in run.client_clusters.unique() if c >= 0)
    )
    found: dict[str, dict[str, float]] = {
        name: {"all": value} for name, value in _outcome(run).items()
    }
    for metric in run.result_metrics:
        means = summary.compute_cluster_means(run, metric)
        found[metric] = {
            names.get(c, str(c)) if isinstance(c, int) else c: value for c, value in means.items()
        }
    return found


def by_client(run: stored_runs.StoredRun) -> dict[str, dict[str, dict[str, float]]]:
    """Return the final values of clients that have names, by metric, as `clients`; nothing where they are numbers."""
    if not run.client_names:
        return {}
    found = {metric: run.final_values(metric) for metric in run.result_metrics}
    return {
        "clients": {
            metric: {run.client_names[int(i)]: float(v) for i, v in own.items()}
            for metric, own in found.items()
        }
    }


def _left_out(runs: Iterable[stored_runs.StoredRun], known: list[dict]) -> list[dict]:
    """Return what the tables of the runs hold and was not asked for: scores of the clusters, and the best rounds."""
    there = {(row["label"], row["metric"]) for row in known}
    rows = []
    for label, group in stored_runs.group_by_label(runs).items():
        found: dict[str, list[float]] = {}
        for run in group:
            for name, value in _outcome(run).items():
                found.setdefault(name, []).append(value)
        rows += [
            {
                **summary.describe_method(group[0]), "cluster": "all", "metric": name,
                **dict(zip(("mean", "std"), summary.mean_std_over_seeds(np.array(values)), strict=True)), "seeds": len(values),
            }
            for name, values in found.items() if (label, name) not in there
        ]  # fmt: skip
    return rows


def _outcome(run: stored_runs.StoredRun) -> dict[str, float]:
    """Return the Rand indices and the number of the clusters that a run ended with, and its best rounds."""
    table = run.metrics
    best = final_metrics.compute_maxima(table, run.client_clusters.index.to_numpy())
    # A client that was in no cohort has no value, and does not count; one whose model diverged does.
    clients = torch.tensor(run.client_clusters.index.to_numpy(int))
    lost = torch.isin(
        clients, torch.tensor(table.loc[final_metrics.find_diverged(table), "client"].to_numpy(int))
    )
    values = {
        name: math.nan if bool(value[lost].isnan().any()) else float(value.nanmean())
        for name, value in best.items()
    }
    labels = table.loc[(table["metric"] == "label").to_numpy()]
    if len(labels):
        last = labels.loc[(labels["round"] == labels["round"].max()).to_numpy()].sort_values(
            "client"
        )
        found, truth = (
            torch.tensor(last[name].to_numpy(dtype=int)) for name in ("value", "cluster")
        )
        values |= final_metrics.compute_cluster_metrics(
            found, truth, torch.zeros(len(last), 0, dtype=torch.int64)
        )
    return values


def main() -> int:
    """Do what the command line says; bad input is one line and exit status 2."""
    try:
        match sys.argv[1:]:
            case ["keep", run, *rest] if rest in ([], ["--in-parts"], ["--join"]):
                print(keep(Path(run), in_one_go=not rest, join="--join" in rest).relative_to(ROOT))
            case [] | ["--check"]:
                check_history()
                last = (
                    json.loads(AGES.read_text())["counted_at"]
                    if "--check" in sys.argv
                    else git("rev-parse", "HEAD")
                )
                return write(render(last))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except (CoterieError, OSError) as error:
        print(f"scripts/stored.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
