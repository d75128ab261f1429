"""Stored results say where they come from; pages say how old they are; a cheap study comes out again."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import reproduction
import stored

from coterie._util import manifest, origin
from coterie.errors import CoterieError
from coterie.papers import compare
from coterie.results import stored_runs
from coterie.studies import config, sweep
from coterie.studies.run import run_study


@pytest.fixture(scope="module")
def history():
    """The history of the repository, which says how old a stored result is."""
    try:
        stored.check_history()
    except OSError as error:
        pytest.skip(f"no history: {error}")


# ---------------------------------------------------------------------- what is stored


@pytest.mark.full
def test_every_stored_result_says_where_it_comes_from_and_what_it_speaks_of(history):
    found = stored.results()
    assert {one.name.split("/")[0] for one in found} >= {
        "network",
        "performance",
        "rotated-digits",
        "similarity",
    }
    assert [line for one in found for line in stored.problems(one)] == []


@pytest.mark.slow
def test_the_page_and_the_ages_are_those_of_the_history(history):
    """Counted at the commit that the page names, so that later commits do not make it wrong."""
    at = json.loads(stored.AGES.read_text())["counted_at"]
    assert stored.in_history(at)
    for path, text in stored.render(at).items():
        assert path.read_text() == text, "run make docs"


@pytest.mark.slow
def test_results_that_have_grown_old_since_they_were_counted_are_told_again(history):
    """A page may lag behind by fifty commits to a part, and not at all where golden results have changed."""
    told = json.loads(stored.AGES.read_text())["results"]
    now = stored.ages(stored.git("rev-parse", "HEAD"))["results"]
    assert told.keys() == now.keys()
    lag = {
        (name, part): number - told[name]["commits"].get(part, 0)
        for name, age in now.items() for part, number in age["commits"].items()
    }  # fmt: skip
    assert {key: number for key, number in lag.items() if number > 50} == {}, "run make docs"
    assert {name: age["golden"] for name, age in now.items()} == {
        name: age["golden"] for name, age in told.items()
    }


def test_a_stored_summary_is_the_mean_over_its_stored_runs():
    """Of every study whose runs are stored one by one: each cluster's, and over clients and clusters."""
    folders = [path.parent for path in stored.STORED.rglob("runs.json")]
    assert stored.STORED / "rotated-digits" in folders
    for folder in folders:
        runs = json.loads((folder / "runs.json").read_text())
        rows = json.loads((folder / "summary.json").read_text())["rows"]
        seeds = json.loads((folder / "origin.json").read_text())["seeds"]
        assert {run["seed"] for run in runs} == set(seeds)
        assert rows
        for row in rows:
            found = [
                run["values"][row["metric"]][row["cluster"]]
                for run in runs
                if run["label"] == row["label"]
            ]
            assert row["seeds"] == len(found)
            if None in found:  # a measure that some run leaves undefined, as WADB of one cluster
                assert row["mean"] is None
                continue
            assert row["mean"] == pytest.approx(sum(found) / len(found), rel=1e-12)


@pytest.mark.slow
def test_a_cheap_study_comes_out_again_as_it_is_stored(tmp_path):
    """Every method of the bundled study with its first seed.

    On the kind of machine that it was stored on, with its vector instructions, the values are the
    same; on another the last bits of sums differ, which training amplifies. Another seed moves the
    mean over clients by far more than that: it has to be within three of the stored deviations, and
    no more than five points of accuracy.
    """
    folder = stored.STORED / "rotated-digits"
    study = config.load_study(folder / "config.toml")
    head = json.loads((folder / "origin.json").read_text())
    runs = run_study(replace(study, seeds=study.seeds[:1]), out=tmp_path).folder
    expected = {
        run["label"]: run["values"]
        for run in json.loads((folder / "runs.json").read_text())
        if run["seed"] == 0
    }
    deviation = {
        row["label"]: row["std"] for row in json.loads((folder / "summary.json").read_text())["rows"]
        if (row["metric"], row["cluster"]) == ("accuracy", "all")
    }  # fmt: skip
    same = all(
        head["machine"].get(name) == value
        for name, value in origin.describe_machine().items()
        if name != "cores"
    )
    found = {run.label: stored.values(run) for run in stored_runs.load_runs([runs])[0]}
    assert found.keys() == expected.keys() == {"DAC", "Random", "Local", "Oracle"}
    for label, values in found.items():
        if same:
            assert values == expected[label]
        allowed = min(3 * deviation[label], 0.05)
        assert values["accuracy"]["all"] == pytest.approx(
            expected[label]["accuracy"]["all"], abs=allowed
        )


NUMBER = re.compile(r"(?<![\w-])\d[\d.,]*")


@pytest.mark.parametrize(
    "path", sorted(stored.STORED.rglob("notes.md")), ids=lambda path: path.parent.name
)
def test_no_number_of_the_notes_is_typed(path):
    """They are filled in; settings stand in backticks, and a digit in a name (CNN-10, L2) is no number."""
    text = re.sub(r"\{\{.+?\}\}|`[^`]*`|\$[^$]*\$", "", path.read_text())
    assert NUMBER.findall(text) == []


def test_a_typed_number_is_found():
    assert NUMBER.findall("CNN-10 and L2 of CIFAR-100: 2.6 points, 4,000 rounds") == [
        "2.6",
        "4,000",
    ]


# ---------------------------------------------------------------------- what is wrong is found


@pytest.fixture
def good():
    """A stored result with nothing wrong, of this commit."""
    head = origin.make_origin(["net"], config={}, seeds=[0], where={}) | {"dirty": False}
    return stored.Stored(
        stored.STORED / "network/made-up.json", {**head, "commit": stored.git("rev-parse", "HEAD")}
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"commit": "0" * 40},
            "network/made-up: its commit 0000000000000000000000000000000000000000 is not in",
        ),
        (
            {"commits": ["HEAD", "1" * 40]},
            f"network/made-up: its commit {'1' * 40} is not in the history",
        ),
        ({"speaks_of": []}, "network/made-up names no part of the package that it speaks of"),
        ({"speaks_of": ["nets"]}, "network/made-up speaks of nets, which is not in the package"),
        (
            {"dirty": None},
            "network/made-up: dirty is not known, and the head is not marked as inferred",
        ),
        ({"commit": None, "inferred": True}, "network/made-up: commit is not known"),
    ],
)
def test_a_head_that_lacks_something_is_named(history, good, change, line):
    assert stored.problems(good) == []
    (found,) = stored.problems(replace(good, head={**good.head, **change}))
    assert found.startswith(line)


@pytest.mark.parametrize("name", stored.FIELDS)
def test_a_head_without_a_field_is_named(good, name):
    head = {key: value for key, value in good.head.items() if key != name}
    assert stored.problems(replace(good, head=head)) == [f"network/made-up does not say its {name}"]


def test_a_file_without_a_head_is_a_stored_result_that_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "STORED", tmp_path)
    (tmp_path / "speed.json").write_text('{"results": []}')
    (one,) = stored.results(tmp_path)
    assert len(stored.problems(one)) == len(stored.FIELDS)


# ---------------------------------------------------------------------- ages


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Four commits: a result, a change to net, one to data, one to both; golden wire vectors from the first on."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(*files: str) -> str:
        for name in files:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"local": str(len(commits))}))
        git("add", ".")
        git("commit", "--quiet", "-m", "more")
        commits.append(git("rev-parse", "HEAD"))
        return commits[-1]

    commits: list[str] = []
    git("init", "--quiet")
    monkeypatch.setattr(stored, "ROOT", tmp_path)
    monkeypatch.setattr(
        stored, "GOLDEN", {name: tmp_path / f"golden/{name}.json" for name in ("wire", "runs")}
    )
    for function in (stored.in_history, stored.commits_since, stored.golden):
        function.cache_clear()
    net, data, local = (
        "src/coterie/net/wire.py",
        "src/coterie/data/arrays.py",
        "src/coterie/methods/local.py",
    )
    commit("golden/wire.json", "golden/runs.json", net, data, local)
    commit(net)
    commit(data)
    commit(net, data)
    yield tmp_path, commits, commit
    for function in (stored.in_history, stored.commits_since, stored.golden):
        function.cache_clear()


def test_the_age_is_the_number_of_commits_to_what_a_result_speaks_of(repository):
    _, commits, _ = repository
    head = {"commit": commits[0], "speaks_of": ["data", "methods/local.py", "net"]}
    assert stored.age(head, commits[3]) == {"commits": {"data": 2, "net": 2}, "golden": []}
    assert stored.age(head, commits[1]) == {"commits": {"net": 1}, "golden": []}
    assert stored.age({**head, "commit": commits[3]}, commits[3])["commits"] == {}


def test_golden_results_that_changed_since_are_named_before_they_are_committed(repository):
    folder, commits, commit = repository
    (folder / "golden/wire.json").write_text('{"local": "9"}')
    assert stored.changed({"commit": commits[0], "speaks_of": ["net"]}) == ["wire"]
    assert stored.changed({"commit": commits[0], "speaks_of": ["data"]}) == []
    last = commit("golden/runs.json")
    assert stored.changed({"commit": commits[0], "speaks_of": ["methods/local.py"]}) == ["local"]
    assert stored.changed({"commit": last, "speaks_of": ["methods/local.py"]}) == []


def test_a_result_from_before_there_were_golden_results_says_so(repository, monkeypatch):
    folder, commits, _ = repository
    monkeypatch.setitem(stored.GOLDEN, "wire", folder / "golden/later.json")
    assert stored.changed({"commit": commits[0], "speaks_of": ["net"]}) is None


def test_a_shallow_clone_is_told_apart(repository, tmp_path_factory, monkeypatch):
    whole, _, _ = repository
    shallow = tmp_path_factory.mktemp("shallow") / "clone"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth=1", f"file://{whole}", str(shallow)], check=True
    )
    stored.check_history()
    monkeypatch.setattr(stored, "ROOT", shallow)
    with pytest.raises(OSError, match="the clone is shallow; git fetch --unshallow"):
        stored.check_history()


def test_pages_tell_the_age_and_what_is_inferred(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "AGES", tmp_path / "ages.json")
    commits = {"net": 12, "engine": 30, "data": 1, "models": 2}
    ages = {"date": "2026-01-02", "results": {"a": {"commits": commits, "golden": ["dac"]}}}
    (tmp_path / "ages.json").write_text(json.dumps(ages))
    head = {"commit": "abcdef0123456", "made": "2026-01-01", "version": "0.1", "dirty": True}
    assert stored.told("a", head) == (
        "Commit `abcdef012` of 2026-01-01, version 0.1. The code had changes that were not committed. Commits since to "
        "the code that it speaks of: 30 to `engine`, 12 to `net`, 2 to `models`, and fewer to 1 more parts "
        "([counted](stored-results.md) on 2026-01-02). **The golden results of dac have changed since.**"
    )
    assert stored.told("b", {**head, "dirty": None, "inferred": True}) == (
        "Made before provenance was recorded: commit `abcdef012` of 2026-01-01 is inferred from the history of the "
        "file."
    )
    assert stored.told(
        "b", {**head, "dirty": False, "inferred": "Its own commit is not in the history"}
    ) == (
        "Its own commit is not in the history: commit `abcdef012` of 2026-01-01 is inferred from the history of the "
        "file."
    )


# ---------------------------------------------------------------------- keeping


def changed(path, content):
    """Change a file of a run, and mean it."""
    manifest.replace_files(path.parent, {path.name: json.dumps(content).encode()})


def tells_its_origin(run: Path, command: str) -> None:
    """Let a run say the commit, the command and the machine that it was made with."""
    path = run / "provenance.json"
    known = json.loads(path.read_text())
    known["packages"]["numpy"] = "2"
    more = {
        "commit": stored.git("rev-parse", "HEAD"), "dirty": False, "command": command, "python": "3.11",
        "hardware": {"processor": "P"}, "engine": {"name": "loop"},
    }  # fmt: skip
    changed(path, {**known, **more})


def finished(folder: Path, write_run, final_rows, **changes) -> Path:
    """A study of one method and two seeds, as runs leave it."""
    for seed, accuracy in ((0, 0.5), (1, 0.25)):
        run = folder / "Local" / f"seed-{seed}"
        rows = final_rows([accuracy, 2 * accuracy], [0, 1])
        write_run(run, kind="local", label="Local", seed=seed, metrics=rows, **changes)
        tells_its_origin(run, "coterie run")
    (folder / "config.toml").write_text('name = "small"\n')
    return folder


def test_a_study_is_kept_with_each_of_its_runs_and_where_it_comes_from(
    history, tmp_path, write_run, final_rows
):
    run = finished(tmp_path / "small", write_run, final_rows)
    kept = stored.keep(run, in_one_go=False, where=tmp_path / "kept")
    assert kept == tmp_path / "kept/small"
    runs = json.loads((kept / "runs.json").read_text())
    assert [(one["label"], one["seed"]) for one in runs] == [("Local", 0), ("Local", 1)]
    assert runs[1]["values"]["accuracy"] == {"0": 0.25, "1": 0.5, "all": 0.375, "clusters": 0.375}
    told = json.loads((kept / "origin.json").read_text())
    assert (told["command"], told["seeds"], told["dirty"]) == ("coterie run", [0, 1], False)
    assert told["machine"]["processor"] == "P"
    assert "methods/local.py" in told["speaks_of"]
    assert "elapsed_s" not in told
    assert stored.problems(stored.Stored(stored.STORED / "small", told)) == []


def test_a_folder_that_is_younger_or_older_than_its_runs_took_does_not_say_how_long(
    history, tmp_path, write_run, final_rows
):
    """The longer run took 3 s; a study of others' runs is made in less, one that was stopped in more."""
    run = finished(tmp_path / "small", write_run, final_rows)
    (run / "summary.json").write_text("{}")
    for age, said in ((2, None), (9, 9), (90, None)):
        began = (run / "summary.json").stat().st_mtime - age
        for path in run.rglob("config.toml"):
            os.utime(path, (began, began))
        kept = stored.keep(run, where=tmp_path / "kept")
        assert json.loads((kept / "origin.json").read_text()).get("elapsed_s") == said


@pytest.mark.full
def test_a_sweep_is_kept_as_one_study_with_its_points_in_the_labels(history, tmp_path):
    (tmp_path / "small.toml").write_text(
        'rounds = 1\nseeds = [0]\nmodel.kind = "linear"\nmethods = [{ kind = "local", label = "Local" }]\n'
        'data = { dataset = "digits", num_clients = 2, train = 5, validation = 5 }\nsweep = { "data.train" = [5, 8] }\n'
    )
    sweep.run_sweep(tmp_path / "small.toml", out=tmp_path)
    for points in (tmp_path / "small").glob("train=*/Local/seed-0"):
        tells_its_origin(points, "coterie run small")
    kept = stored.keep(tmp_path / "small", in_one_go=False, where=tmp_path / "kept")
    runs = json.loads((kept / "runs.json").read_text())
    assert {(one["label"], one["seed"]) for one in runs} == {
        ("Local, train=5", 0),
        ("Local, train=8", 0),
    }
    rows = json.loads((kept / "summary.json").read_text())["rows"]
    means = {
        row["label"]: row["mean"]
        for row in rows
        if (row["cluster"], row["metric"]) == ("all", "accuracy")
    }
    assert means == {one["label"]: one["values"]["accuracy"]["all"] for one in runs}
    assert json.loads((kept / "origin.json").read_text())["runs"] == 2
    first = tmp_path / "small/train=5/config.toml"
    os.utime(first, (0, (tmp_path / "small/summary.json").stat().st_mtime - 9))
    kept = stored.keep(tmp_path / "small", where=tmp_path / "kept")
    assert json.loads((kept / "origin.json").read_text())["elapsed_s"] == 9, (
        "since its first point began"
    )
    with pytest.raises(CoterieError, match="cannot be joined"):
        stored.keep(tmp_path / "small", join=True, where=tmp_path / "kept")


def test_a_study_with_an_unfinished_run_or_one_without_a_commit_is_not_kept(
    history, tmp_path, write_run, final_rows
):
    run = finished(tmp_path / "open", write_run, final_rows, done=False)
    with pytest.raises(CoterieError, match="have not finished; run it to its end"):
        stored.keep(run, where=tmp_path / "kept")
    run = finished(tmp_path / "small", write_run, final_rows)
    path = run / "Local/seed-1/provenance.json"
    changed(path, {**json.loads(path.read_text()), "commit": None})
    with pytest.raises(CoterieError, match="a run does not say the commit"):
        stored.keep(run, where=tmp_path / "kept")
    changed(path, {**json.loads(path.read_text()), "commit": "0" * 40})
    with pytest.raises(
        CoterieError, match=r"no commit of .* comes before the others; run it again"
    ):
        stored.keep(run, where=tmp_path / "kept")


def test_a_study_run_at_several_commits_is_as_old_as_the_first_of_them(
    history, tmp_path, write_run, final_rows
):
    run = finished(tmp_path / "small", write_run, final_rows)
    path = run / "Local/seed-1/provenance.json"
    before, last = stored.git(
        "rev-list", "--max-count=2", "--reverse", "--first-parent", "HEAD"
    ).splitlines()
    changed(path, {**json.loads(path.read_text()), "commit": before, "dirty": True})
    told = json.loads(
        (stored.keep(run, in_one_go=False, where=tmp_path / "kept") / "origin.json").read_text()
    )
    assert (told["commit"], set(told["commits"]), told["dirty"]) == (before, {before, last}, True)


def study_of(labels, seeds, **changes):
    """The settings of a built-in study with some of its methods."""
    study = config.load_study("rotated-digits")
    methods = tuple(entry for label in labels for entry in study.methods if entry.label == label)
    return replace(study, methods=methods, seeds=tuple(seeds), **changes)


def a_part(folder: Path, write_run, final_rows, results, diverged=None, **changes) -> Path:
    """A study whose runs ended with these accuracies of its two clients, by method and seed; one may have diverged."""
    for (label, seed), accuracy in results.items():
        run = folder / label / f"seed-{seed}"
        loss = [math.nan if (label, seed) == diverged else 1.0] * 2
        write_run(
            run,
            study="rotated-digits",
            kind=label.lower(),
            label=label,
            seed=seed,
            metrics=final_rows(accuracy, [0, 1])
            + (final_rows(loss, [0, 1], metric="loss") if diverged else []),
        )
        tells_its_origin(
            run,
            "coterie run rotated-digits --seeds 1 --set data.train=9 --set 'use_methods=[\"Local\"]'",
        )
    study = study_of(
        dict.fromkeys(label for label, _ in results),
        sorted({seed for _, seed in results}),
        **changes,
    )
    (folder / "config.toml").write_text(config.format_study(study))
    return folder


ACCURACIES = {
    ("Local", 0): [0.5, 1.0], ("Local", 1): [0.25, 0.75], ("Random", 0): [0.125, 0.5], ("Random", 1): [0.0, 0.25],
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    "cut", [lambda label, seed: label == "Local", lambda label, seed: seed == 0]
)
@pytest.mark.parametrize(
    ("lost", "diverged"),
    [(None, None), ("Local", None), ("Local", ("Local", 0)), ("Local", ("Local", 1))],
)
def test_parts_that_are_joined_are_what_the_whole_is(
    history, tmp_path, write_run, final_rows, cut, lost, diverged
):
    """Other methods with the same seeds, and other seeds of the same methods; one run may have no number to show."""
    accuracies = {
        key: [math.nan, math.nan] if key[0] == lost else value for key, value in ACCURACIES.items()
    }
    first = {key: value for key, value in accuracies.items() if cut(*key)}
    second = {key: value for key, value in accuracies.items() if not cut(*key)}
    whole = stored.keep(
        a_part(tmp_path / "w", write_run, final_rows, accuracies, diverged),
        in_one_go=False,
        where=tmp_path / "whole",
    )
    stored.keep(
        a_part(tmp_path / "a", write_run, final_rows, first, diverged),
        in_one_go=False,
        where=tmp_path / "kept",
    )
    kept = stored.keep(
        a_part(tmp_path / "b", write_run, final_rows, second, diverged),
        join=True,
        where=tmp_path / "kept",
    )

    def read(folder, name):
        return json.loads((folder / name).read_text())

    assert read(kept, "runs.json") == read(whole, "runs.json")
    for name in ("seeds", "rows", "left_out", "timing", "participation"):
        assert sorted(map(str, read(kept, "summary.json")[name])) == sorted(
            map(str, read(whole, "summary.json")[name])
        )
    assert "pairs" not in read(kept, "summary.json")
    told, wanted = read(kept, "origin.json"), read(whole, "origin.json")
    for name in (
        "commit",
        "dirty",
        "seeds",
        "speaks_of",
        "runs",
        "rounds",
        "rounds_trained",
        "train_samples",
    ):
        assert told[name] == wanted[name]
    assert told["wall_s"] == pytest.approx(wanted["wall_s"])
    methods = """'use_methods=["Local","Random"]'"""
    assert (
        told["command"]
        == f"coterie run rotated-digits --set data.train=9 --seeds 2 --set {methods}"
    )
    assert config.parse_study_text(
        (kept / "config.toml").read_text(), "kept"
    ) == config.parse_study_text((whole / "config.toml").read_text(), "whole")
    assert [row["mean"] for row in compare.load_result(kept).rows] == [
        row["mean"] for row in compare.load_result(whole).rows
    ]


@pytest.mark.parametrize(
    ("cut", "kept"), [(lambda label, _: label == "Local", True), (lambda _, seed: seed == 0, False)]
)
def test_times_to_an_accuracy_stay_where_other_methods_are_joined(
    history, tmp_path, write_run, final_rows, cut, kept
):
    """Where other seeds are, a time would be the mean over some of them alone."""
    first = {key: value for key, value in ACCURACIES.items() if cut(*key)}
    second = {key: value for key, value in ACCURACIES.items() if not cut(*key)}
    place = stored.keep(
        a_part(tmp_path / "a", write_run, final_rows, first),
        in_one_go=False,
        where=tmp_path / "kept",
    )
    content = json.loads((place / "summary.json").read_text())
    content["time_to_accuracy"] = [
        {"label": "Local", "base": "FedAvg", "metric": "accuracy", "ratio": 2.0}
    ]
    (place / "summary.json").write_text(json.dumps(content))
    stored.keep(
        a_part(tmp_path / "b", write_run, final_rows, second), join=True, where=tmp_path / "kept"
    )
    found = json.loads((place / "summary.json").read_text())
    assert found.get("time_to_accuracy", []) == (content["time_to_accuracy"] if kept else [])


def test_a_study_whose_methods_ran_by_commands_of_their_own_is_repeated_by_one(
    history, tmp_path, write_run, final_rows
):
    """As when methods run beside each other, into a folder each, and are put together."""
    run = a_part(tmp_path / "w", write_run, final_rows, ACCURACIES)
    for label, seed in ACCURACIES:
        command = (
            f"coterie run rotated-digits --seeds 1 --out {label} --set 'use_methods=[\"{label}\"]'"
        )
        tells_its_origin(run / label / f"seed-{seed}", command)
    told = json.loads(
        (stored.keep(run, in_one_go=False, where=tmp_path / "kept") / "origin.json").read_text()
    )
    assert (
        told["command"]
        == """coterie run rotated-digits --seeds 2 --set 'use_methods=["Local","Random"]'"""
    )


def test_a_study_of_which_a_program_ran_a_part_is_repeated_by_its_settings(
    history, tmp_path, write_run, final_rows
):
    """The command of the other part would leave out what the program ran."""
    run = a_part(tmp_path / "w", write_run, final_rows, ACCURACIES)
    for label, seed in ACCURACIES:
        own = f"coterie run rotated-digits --seeds 1 --set 'use_methods=[\"{label}\"]'"
        command = "python mine.py" if label == "Random" else own
        tells_its_origin(run / label / f"seed-{seed}", command)
    kept = stored.keep(run, in_one_go=False, where=tmp_path / "kept")
    told = json.loads((kept / "origin.json").read_text())
    assert told["command"] == "coterie run docs/reference/runs/rotated-digits/config.toml"


@pytest.mark.parametrize(
    ("name", "labels", "methods"),
    [
        ("dac/tau", ["DAC tau=1", "DAC tau=3"], ""),
        (
            "similarity/peers",
            ["L2 num_peers=1", "L2 FedSim num_peers=1"],
            ' --set \'use_methods=["L2","L2 FedSim"]\'',
        ),
    ],
)
def test_the_command_of_a_sweep_names_methods_and_not_their_points(name, labels, methods):
    study = config.load_study(name)
    expanded = replace(
        study, seeds=(0,), methods=tuple(replace(study.methods[0], label=label) for label in labels)
    )
    assert (
        stored._command(f"coterie run {name} --seeds 1", expanded)
        == f"coterie run {name} --seeds 1{methods}"
    )


@pytest.mark.parametrize(
    ("seeds", "said"), [((0,), "1"), ((0, 1), "2"), ((1,), "1,"), ((1, 2), "1,2")]
)
def test_the_command_of_joined_runs_says_their_seeds(seeds, said):
    study = replace(config.load_study("dac/cifar10-rotation-4x25"), seeds=seeds)
    command = stored._command("coterie run dac/cifar10-rotation-4x25 --seeds 5", study)
    assert command == f"coterie run dac/cifar10-rotation-4x25 --seeds {said}"
    assert config.load_study(study.name, [f"seeds={config.parse_seeds(said)}"]).seeds == seeds


def test_joined_runs_have_the_rounds_of_the_longest(history, tmp_path, write_run, final_rows):
    """A method with fewer rounds of its own does not make the study a shorter one."""
    first, second = (
        {key: value for key, value in ACCURACIES.items() if key[0] == name}
        for name in ("Local", "Random")
    )
    kept = stored.keep(
        a_part(tmp_path / "a", write_run, final_rows, first),
        in_one_go=False,
        where=tmp_path / "kept",
    )
    told = json.loads((kept / "origin.json").read_text())
    (kept / "origin.json").write_text(json.dumps({**told, "rounds": told["rounds"] + 40}))
    stored.keep(
        a_part(tmp_path / "b", write_run, final_rows, second), join=True, where=tmp_path / "kept"
    )
    assert json.loads((kept / "origin.json").read_text())["rounds"] == told["rounds"] + 40


def test_what_only_a_part_has_measured_is_left_out_where_parts_are_joined(
    history, tmp_path, write_run, final_rows
):
    """A mean over fewer seeds than the others would not be told apart."""
    first = a_part(tmp_path / "a", write_run, final_rows, {("Local", 0): [0.5, 1.0]})
    kept = stored.keep(first, in_one_go=False, where=tmp_path / "kept")
    content, runs = (
        json.loads((kept / name).read_text()) for name in ("summary.json", "runs.json")
    )
    content["rows"].append({**content["rows"][0], "metric": "loss"})
    runs[0]["values"]["loss"] = runs[0]["values"]["accuracy"]
    (kept / "summary.json").write_text(json.dumps(content))
    (kept / "runs.json").write_text(json.dumps(runs))
    second = a_part(tmp_path / "b", write_run, final_rows, {("Local", 1): [0.25, 0.75]})
    stored.keep(second, join=True, where=tmp_path / "kept")
    rows = json.loads((kept / "summary.json").read_text())["rows"]
    assert {(row["metric"], row["seeds"]) for row in rows} == {("accuracy", 2)}


def test_parts_with_other_settings_or_seeds_are_not_joined(
    history, tmp_path, write_run, final_rows
):
    def part(name, *runs, **changes):
        return a_part(
            tmp_path / name,
            write_run,
            final_rows,
            {key: ACCURACIES[key] for key in runs},
            **changes,
        )

    where = tmp_path / "kept"
    with pytest.raises(
        CoterieError,
        match="rotated-digits is not stored, there is nothing to join; leave out --join",
    ):
        stored.keep(part("a", ("Local", 0)), join=True, where=where)
    kept = stored.keep(tmp_path / "a", in_one_go=False, where=where)
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    for name, runs in (("again", [("Local", 0)]), ("uneven", [("Random", 1)])):
        with pytest.raises(
            CoterieError,
            match="other methods with the same seeds, or other seeds of the same methods",
        ):
            stored.keep(part(name, *runs), join=True, where=where)
    data = replace(config.load_study("rotated-digits").data, train=7)
    with pytest.raises(CoterieError, match=r"other settings: data\.train is 60 there and 7 here"):
        stored.keep(part("other", ("Random", 0), data=data), join=True, where=where)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before


def test_bad_input_is_one_line_and_exit_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stored.py", "keep", str(tmp_path / "none")])
    assert stored.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("none is not a folder; give a run folder or a study folder")


# ---------------------------------------------------------------------- notes


def test_notes_are_filled_in_from_what_is_stored():
    folder = stored.STORED / "fedgwc/cifar10-clean-blur-strong"
    (mean,) = (
        row["mean"] for row in json.loads((folder / "summary.json").read_text())["rows"]
        if (row["label"], row["cluster"], row["metric"]) == ("FedGWC", "all", "rand")
    )  # fmt: skip
    text = 'Rand {{value("FedGWC", "rand"):.2f}} in {{setting("rounds"):,}} of {{paper("10,000")}} rounds'
    assert reproduction.filled(text, folder) == f"Rand {mean:.2f} in 4,000 of 10,000 rounds"
    trained = json.loads((folder / "origin.json").read_text())["rounds_trained"]["FedGWC"]
    assert reproduction.filled('{{trained("FedGWC")}} rounds', folder) == f"{trained} rounds"
    assert reproduction.filled('{{typed("3")}} were', folder) == (
        "3 † were\n\n† Of a run that was not stored: typed by hand."
    )
    with pytest.raises(KeyError):
        reproduction.filled('{{value("FedAvg", "rand")}}', folder)


def test_notes_can_speak_of_one_seed():
    folder = stored.STORED / "dac/cifar10-rotation-4x25"
    runs = [run for run in json.loads((folder / "runs.json").read_text()) if run["label"] == "DAC"]
    each = {run["seed"]: run["values"]["accuracy"]["clusters"] for run in runs}
    text = '{{value("DAC", "accuracy", cluster="clusters", seed=1):.4f}}'
    assert reproduction.filled(text, folder) == f"{each[1]:.4f}" != f"{each[0]:.4f}"
    mean = reproduction.filled('{{value("DAC", "accuracy", cluster="clusters"):.4f}}', folder)
    assert mean == f"{sum(each.values()) / len(each):.4f}"


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        (["coterie run a/b -q --json"], "coterie run a/b -q --json"),
        (
            ["coterie run a/b --seeds 3 --out /big/disk --data-dir=/data --resume"],
            "coterie run a/b --seeds 3",
        ),
        (
            ["coterie resume /big/disk/a/b", "coterie run a/b -o /big/disk --scale 0.1"],
            "coterie run a/b --scale 0.1",
        ),
        (
            ["coterie resume /big/disk/a/b --workers 2"],
            "coterie run docs/reference/runs/a/b/config.toml",
        ),
        (
            ["coterie run a/b --set 'methods.DAC.tau=[1, 2]'"],
            "coterie run a/b --set 'methods.DAC.tau=[1, 2]'",
        ),
        (
            ["python mine.py a/b", "coterie run a/b --set 'use_methods=[\"Local\"]'"],
            "coterie run docs/reference/runs/a/b/config.toml",
        ),
        (
            ["coterie run /home/me/b.toml --scale 0.1 --set local.lr=1"],
            "coterie run docs/reference/runs/a/b/config.toml",
        ),
    ],
)
def test_the_command_that_is_stored_repeats_the_study_elsewhere(commands, told):
    """Places of the machine that ran it are left out, and a run that was resumed is told as it was begun."""
    assert stored.repeated_by(commands, "a/b") == told
