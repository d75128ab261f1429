"""The command line, in this process: output, exit status, one line for each mistake."""

import errno
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pandas as pd
import pytest
import typer

from coterie import __version__
from coterie._util import manifest
from coterie.cli import _catalog
from coterie.cli import app as app_module
from coterie.errors import ClockError, QuorumError
from coterie.methods import METHODS, registry
from coterie.results.coverage import IncompleteStudyWarning
from coterie.studies import config
from coterie.studies.run import run_study

STUDY = """
name = "tiny"
rounds = 2
seeds = [0]
model = { kind = "linear" }

[data]
dataset = "digits"
num_clients = 4
train = 16
validation = 8
shift = [{ kind = "rotation", degrees = [0, 180] }]

[[methods]]
kind = "random"
label = "Gossip"

[[methods]]
kind = "local"
"""


@pytest.fixture
def coterie(coterie, tmp_path):
    """Call the command line in a folder with a study alone."""
    (tmp_path / "tiny.toml").write_text(STUDY)
    return coterie


def run(coterie, *arguments):
    return coterie("run", "tiny.toml", "--workers", "1", *arguments)


@pytest.mark.full
def test_a_run_ends_with_the_tables_and_the_paths(coterie, tmp_path):
    status, out, err = run(coterie)
    assert status == 0
    for said in (
        "rotation 0",
        "rotation 180",
        "mean over clients",
        "Gossip",
        "Gain over local",
        "worst tenth",
    ):
        assert said in " ".join(out.split()), said
    assert out.splitlines()[-2:] == ["Runs:   runs/tiny", "Report: runs/tiny/report.html"]
    assert (tmp_path / "runs/tiny/report.html").exists()
    assert "Gossip, seed 0: round 2/2" in err


@pytest.mark.full
@pytest.mark.parametrize(
    ("figure", "message"),
    [
        ("tau", "the finished runs here do not vary tau"),
        (
            "fedgwc-5",
            "figure fedgwc-5 needs runs of fedgwc/cifar10-hom-het: no run here was analyzed",
        ),
        ("sosicfl-6", "figure sosicfl-6 cannot be drawn from stored runs"),
        ("tua", "unknown figure 'tua'"),
    ],
)
def test_a_figure_that_the_runs_cannot_give_is_one_line_and_status_2(
    coterie, tmp_path, figure, message
):
    run(coterie, "--quiet")
    status, out, err = coterie("plot", "runs/tiny", "--figure", figure, "--format", "svg")
    assert (status, out) == (2, "")
    assert err.startswith("coterie: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.glob("*.svg")) == []


def test_nothing_is_wider_than_80_columns_and_there_are_no_escape_codes_in_a_pipe(coterie):
    _, out, err = run(coterie)
    assert max(len(line) for line in (out + err).splitlines()) <= 80
    assert "\x1b" not in out + err


def test_json_is_the_summary_and_nothing_else(coterie, tmp_path):
    status, out, err = run(coterie, "--json", "--quiet")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "runs/tiny/summary.json").read_text())


@pytest.mark.full
def test_options_reach_the_study(coterie, tmp_path):
    status, _, _ = run(
        coterie, "--set", "methods.gossip.num_peers=1", "--seeds", "3,4", "--engine", "loop", "--out", "elsewhere",
        "--scale", "0.5",
    )  # fmt: skip
    study = config.load_study(tmp_path / "elsewhere/tiny/config.toml")
    assert status == 0
    assert (study.seeds, study.settings.engine, study.scale) == ((3, 4), "loop", 0.5)
    assert study.methods[0].method == METHODS["random"](num_peers=1)
    assert (tmp_path / "elsewhere/tiny/Gossip/seed-4/metrics.parquet").exists()


def test_a_scaled_study_says_so(coterie):
    _, out, _ = run(coterie, "--scale", "0.5")
    assert "Rounds were scaled by 0.5" in out


@pytest.mark.slow
def test_a_stored_study_goes_on_is_refused_with_other_settings_and_overwritten(coterie, tmp_path):
    assert run(coterie)[0] == 0
    status, out, err = run(coterie, "--set", "rounds=1")
    assert (status, out) == (2, "")
    assert "was run with other settings (rounds is" in err
    assert "--overwrite starts again, --out keeps both" in err
    for again in ((), ("--resume",)):
        assert run(coterie, *again)[0] == 0
    assert run(coterie, "--overwrite", "--set", "rounds=1")[0] == 0
    assert config.load_study(tmp_path / "runs/tiny/config.toml").settings.rounds == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "rotated-digit"), "did you mean 'rotated-digits'"),
        (("run", "missing.toml"), "no study file missing.toml"),
        (("run", "tiny.toml", "--set", "local.lr=fast"), "lr is 'fast'; expected a number"),
        (("run", "tiny.toml", "--set", "methods.gossip.num_peer=3"), "did you mean 'num_peers'"),
        (
            ("run", "tiny.toml", "--set", "methods.local.kind=loacl"),
            "unknown method 'loacl'; did you mean 'local'",
        ),
        (("run", "tiny.toml", "--seeds", "few"), "--seeds is 'few'; expected a number of seeds"),
        (
            ("run", "tiny.toml", "--seeds", "99999999999999999999"),
            "expected a number of seeds, 1 to 10000, or a list",
        ),
        (("run", "tiny.toml", "--seeds", "0,99999999999999999999"), "and below 2^63"),
        (("run", "tiny.toml", "--seeds", ","), "--seeds is ','; expected a number of seeds"),
        (("run", "tiny.toml", "--seeds", "²"), "--seeds is '²'; expected a number of seeds"),
        (("run", "tiny.toml", "--set", "rounds=99999999999999999999"), "and below 2^63"),
        (
            ("run", "tiny.toml", "--scale", "1e300"),
            "scale is 1e+300; expected a number, above 0 and at most 1000",
        ),
        (("run", "tiny.toml", "--set", "device=gpu"), "device is 'gpu'; expected 'cpu', 'cuda'"),
        (
            ("tune", "tiny.toml", "--grid", "lr=0.1", "--set", "device=gpu"),
            "device is 'gpu'; expected 'cpu', 'cuda'",
        ),
        (("tune", "tiny.toml", "--grid", "seeds=0,1"), "seeds alone repeat one trial; give --grid"),
        (("run", "tiny.toml", "--set", "data.num_clients=4000"), "num_clients"),
        (("run", "tiny.toml", "--set", "data.dataset=mnist"), "COTERIE_DATA"),
        (("run", "tiny.toml", "--set", "data.dataset=mnist", "--data-dir", "nowhere"), "nowhere"),
        (("run", "tiny.toml", "--engine", "warp"), "warp"),
        (("run", "tiny.toml", "--set", "model.kind=cnn-c"), "unknown model 'cnn-c'"),
        (("run", "tiny.toml", "--overwrite", "--resume"), "exclude each other"),
        (("run", "tiny.toml", "--workers", "0"), "workers"),
        (("run", "--fast"), "No such option"),
        (("run", "--fast"), "; see `coterie run --help`"),
        (("run", "tiny.toml", "--rounds", "5"), "; rounds is a setting: --set rounds=5; see"),
        (("run", "--batch-size=3"), "; batch_size is a setting: --set local.batch_size=3; see"),
        (
            ("run", "tiny.toml", "--set", "methods.local.momentm=3"),
            "did you mean 'momentum'? the closest of ",
        ),
        (("ran",), "No such command"),
        (("ran",), "; see `coterie --help`"),
        (("resume", "nowhere"), "nowhere holds no study"),
        (("show", "nowhere"), "nowhere holds no study"),
        (("methods", "dca"), "unknown method 'dca'"),
        (("studies", "digits"), "unknown study 'digits'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_and_writes_nothing(coterie, tmp_path, arguments, said):
    status, out, err = coterie(*arguments)
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("coterie: ")
    assert said in err
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.toml"]


@pytest.mark.full
def test_ctrl_c_leaves_a_study_that_the_printed_command_resumes(coterie, monkeypatch, tmp_path):
    from coterie.simulation import run as runs

    true_progress = runs._make_progress
    monkeypatch.setattr(runs, "_make_progress", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    status, _, err = run(coterie, "--quiet")
    assert status == 130
    command = err.strip().splitlines()[-1].removeprefix("stopped; continue with: ")
    assert command == "coterie resume runs/tiny"
    monkeypatch.setattr(runs, "_make_progress", true_progress)
    assert coterie(*command.split()[1:], "--workers", "1", "--quiet")[0] == 0
    assert (tmp_path / "runs/tiny/summary.json").exists()


def test_a_clock_that_is_not_set_yet_has_a_status_that_services_start_again_on(capsys):
    """2 is bad input, which they do not."""
    with pytest.raises(SystemExit) as ended:
        app_module._exit_with_error(ClockError("it is 1970: wait"))
    assert ended.value.code == app_module.EARLY == 4
    unit = Path("docs/how-to/deploy/coterie-node.service").read_text()
    assert "RestartPreventExitStatus=2\n" in unit
    assert "Restart=on-failure\n" in unit
    assert capsys.readouterr().err == "coterie: it is 1970: wait\n"


def test_a_quorum_that_is_over_has_a_status_of_its_own(capsys):
    with pytest.raises(SystemExit) as ended:
        app_module._exit_with_error(QuorumError("0 of 2 are here"))
    assert ended.value.code == app_module.TOO_FEW == 5
    assert capsys.readouterr().err == "coterie: 0 of 2 are here\n"


def test_a_note_is_shown_once_though_warnings_are_caught_in_between(coterie, monkeypatch):
    """What is caught in between makes Python forget what it has shown."""
    shown = []

    def warn(**_):
        for text in ("one", "two", "one"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
            warnings.warn(text, UserWarning, stacklevel=1)

    warnings.simplefilter("always")
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_, **__: shown.append(str(text)))
    monkeypatch.setattr(app_module, "app", warn)
    coterie("run")
    assert shown == ["one", "two"]


def test_a_full_disk_is_one_line_that_says_how_to_go_on(coterie, monkeypatch):

    replace_files = manifest.replace_files

    def full(folder, contents, **options):
        if "metrics.parquet" not in contents:
            return replace_files(folder, contents, **options)
        raise OSError(
            errno.ENOSPC, "No space left on device", "runs/tiny/Gossip/seed-0/metrics.parquet"
        )

    monkeypatch.setattr(manifest, "replace_files", full)
    status, _, err = run(coterie, "--quiet")
    assert status == 75
    assert err == (
        "coterie: cannot write: No space left on device: runs/tiny/Gossip/seed-0/metrics.parquet; "
        "when that is fixed, continue with: coterie resume runs/tiny\n"
    )


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory):
    """The study with three seeds and every round tested; tests copy it."""
    study = config.parse_study_text(STUDY.replace("seeds = [0]", "seeds = 3\neval_every = 1"))
    return run_study(study, out=tmp_path_factory.mktemp("runs")).folder


@pytest.fixture
def lacking(coterie, three_seeds):
    """A copy that lacks seed 1 of Gossip, with a truncated table of local's seed 2; seed 0 is common."""
    folder = Path(shutil.copytree(three_seeds, "runs/tiny"))
    shutil.rmtree(folder / "Gossip" / "seed-1")
    table = folder / "local" / "seed-2" / "metrics.parquet"
    table.write_bytes(table.read_bytes()[:-200])
    return folder


MISSING = "Gossip: seed 1 missing"
DAMAGED = "local: seed 2 damaged ("
COMPARED = "Means are over the seeds that all have: 0; left out: Gossip 2; local 1."


def accuracy(study, label, seed):
    """The mean over clients of the final test accuracy of a run, from its table."""
    table = pd.read_parquet(study / label / f"seed-{seed}" / "metrics.parquet")
    final = (
        (table["split"] == "test") & (table["model"] == "best") & (table["metric"] == "accuracy")
    )
    return float(table.loc[final, "value"].mean())


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("compare",),
        ("compare", "--equal-bytes"),
        ("report",),
        ("plot", "--figure", "bars", "--format", "svg"),
        ("plot", "--figure", "curves", "--format", "svg"),
    ],
    ids=" ".join,
)
def test_commands_say_which_runs_are_missing_or_damaged_and_which_seeds_are_compared(
    coterie, lacking, command
):
    """On one screen of 80 columns, with status 0: the rest of the study is shown."""
    # outside of tests they are notes on standard error
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", IncompleteStudyWarning)
        status, out, err = coterie(command[0], str(lacking), *command[1:])
    said = " ".join((out + err).split()) + " ".join(str(one.message) for one in warned)
    assert status == 0
    for line in (MISSING, DAMAGED, COMPARED):
        assert said.count(line) == 1, line
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.full
@pytest.mark.parametrize("command", [("show",), ("compare",)])
def test_the_numbers_shown_are_those_of_the_common_seeds(coterie, lacking, command):
    """Seed 0 alone, without a deviation; n stands at each method."""
    out = coterie(command[0], str(lacking))[1]
    for label in ("Gossip", "local"):
        row = next(
            line.split() for line in out.splitlines() if line.startswith(label) and ":" not in line
        )
        mean = 100 * accuracy(lacking, label, 0)
        assert "1" in row[1:3], "n"
        assert (f"{mean:.1f}" if command == ("show",) else f"{mean:.2f}") in row
    assert "±" not in out


@pytest.mark.full
def test_json_says_what_is_left_out(coterie, lacking):
    """Every run that is not in the means, with its state, and the seeds that are."""
    found = json.loads(coterie("show", str(lacking), "--json")[1])
    assert found["seeds"] == [0]
    assert [(one["label"], one["seed"], one["state"]) for one in found["left_out"]] == [
        ("Gossip", 1, "missing"), ("Gossip", 2, "finished"), ("local", 1, "finished"), ("local", 2, "damaged"),
    ]  # fmt: skip
    for row in found["rows"]:
        if (row["cluster"], row["metric"]) == ("all", "accuracy"):
            assert row["mean"] == pytest.approx(accuracy(lacking, row["label"], 0))
            assert (row["std"], row["seeds"]) == (None, 1)
    for option in ((), ("--equal-bytes",)):
        (compared,) = json.loads(coterie("compare", str(lacking), "--json", *option)[1])
        assert (compared["seeds"], compared["left_out"]) == (found["seeds"], found["left_out"])


@pytest.mark.full
def test_the_page_says_it_in_its_data_and_in_words(coterie, lacking):
    """Without a browser: what the scripts of the page read, and what stands above its tables."""
    assert coterie("report", str(lacking))[0] == 0
    text = (lacking / "report.html").read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert data["notes"][0] == MISSING
    assert data["notes"][1].startswith(DAMAGED)
    assert data["notes"][2] == COMPARED
    assert all(f"<li>{note}</li>" in text for note in data["notes"] if "'" not in note)
    assert data["results"]["seeds"] == [0]
    assert {curve["seeds"] for curve in data["curves"]} == {1}


def test_trackers_are_told_what_is_missing_too(coterie, lacking):
    """Every run that can be read is copied, so nothing is said of common seeds."""
    pytest.importorskip("tensorboard")
    status, out, err = coterie("track", str(lacking), "--to", "tensorboard")
    assert (status, out) == (0, "4 runs written to tracking\n")
    assert err.splitlines()[0] == f"note: tiny: {MISSING}"
    assert err.splitlines()[1].startswith(f"note: tiny: {DAMAGED}")
    assert len(err.splitlines()) == 2


def test_to_look_at_a_study_writes_nothing_into_it(coterie, lacking):
    """What it once came to stays in summary.json, though runs were deleted since."""
    before = {path: path.read_bytes() for path in lacking.rglob("*") if path.is_file()}
    for command in ("show", "compare", "list"):
        assert coterie(command, str(lacking))[0] == 0
    assert {path: path.read_bytes() for path in lacking.rglob("*") if path.is_file()} == before


def test_a_study_of_which_nothing_can_be_read_is_shown_as_such(coterie, lacking):
    """Also where no folder of a run is there."""
    for path in lacking.rglob("metrics.parquet"):
        path.write_bytes(b"PAR1 cut off")
    status, out, _ = coterie("show", str(lacking))
    assert status == 0
    assert "No run is finished: there is nothing to compare." in " ".join(out.split())
    for command in ("compare", "plot"):
        status, _, err = coterie(
            command, str(lacking), *(["--figure", "bars"] if command == "plot" else [])
        )
        assert (status, len(err.splitlines())) == (2, 1), err
    for label in ("Gossip", "local"):
        shutil.rmtree(lacking / label)
    status, out, _ = coterie("show", str(lacking))
    assert status == 0
    assert "Gossip, local: seeds 0-2 missing" in out


def test_two_studies_are_compared_over_the_seeds_that_both_have(coterie, lacking, three_seeds):
    """The whole study has seeds 0 to 2, the other seed 0: both show seed 0."""
    out = coterie("compare", str(lacking), str(three_seeds))[1]
    assert "Means are over the seeds that all studies have: 0; they have:" in " ".join(out.split())
    row = next(
        line.split() for line in out.splitlines() if line.startswith("Gossip") and ":" not in line
    )
    assert row == ["Gossip", f"{100 * accuracy(three_seeds, 'Gossip', 0):.2f}", "1", row[1], "1"]


def test_a_whole_study_has_its_best_models_test_accuracy_at_equal_bytes(coterie, three_seeds):
    """local uses no bytes and Gossip all of its own: both rows are those of `show`, mean and deviation."""
    (ranking,) = json.loads(coterie("compare", str(three_seeds), "--equal-bytes", "--json")[1])
    assert (ranking["split"], ranking["model"]) == ("test", "best")
    rows = json.loads(coterie("show", str(three_seeds), "--json")[1])["rows"]
    final = {
        row["label"]: row for row in rows if (row["cluster"], row["metric"]) == ("all", "accuracy")
    }
    for row in ranking["rows"]:
        assert row["value"] == pytest.approx(final[row["label"]]["mean"])
        assert row["std"] == pytest.approx(final[row["label"]]["std"])
        assert row["seeds"] == 3
    assert coterie("show", str(three_seeds))[1].startswith(
        "Test accuracy in %: mean ± std over 3 seeds"
    )


def test_list_tells_how_each_run_stands(coterie, lacking):
    """Finished, at round 1 of 2, missing, damaged: a line for each method."""
    stored = lacking / "Gossip/seed-2/provenance.json"
    told = json.loads(stored.read_text())
    manifest.replace_files(
        stored.parent, {stored.name: json.dumps(told | {"done": False, "round": 1}).encode()}
    )
    lines = coterie("list")[1].splitlines()
    assert lines[0] == "runs/tiny  tiny: 3 of 6 runs finished"
    assert lines[1] == "  Gossip: seed 0 finished; seed 1 missing; seed 2 unfinished (round 1 of 2)"
    assert lines[2].startswith("  local: seeds 0, 1 finished; seed 2 damaged (")
    assert len(lines) == 3


def test_list_names_a_damaged_study_beside_the_others(coterie, lacking):
    """Its file has another seed than it was written with."""
    shutil.copytree(lacking, "runs/other")
    path = Path("runs/tiny/config.toml")
    path.write_text(path.read_text().replace("seeds = [0", "seeds = [9"))
    status, out, _ = coterie("list")
    assert status == 0
    assert (
        "runs/tiny: config.toml is damaged: it is not what B2SUMS lists; `coterie run STUDY` writes it again"
        in out
    )
    for command in ("show", "compare", "report"):
        status, _, err = coterie(command, "runs/tiny")
        assert (status, err.count("\n")) == (2, 1), err
        assert "config.toml is damaged" in err


@pytest.mark.full
def test_list_and_show_tell_of_what_was_run(coterie):
    assert "no study in runs" in coterie("list")[1]
    run(coterie, "--quiet")
    assert coterie("list")[1] == "runs/tiny  tiny: finished\n  Gossip, local: seed 0 finished\n"
    assert coterie("list", "runs/tiny")[1] == coterie("list")[1]
    shown = coterie("show", "runs/tiny")
    assert shown[0] == 0
    assert "Gossip" in shown[1]
    assert coterie("show", "runs/tiny/Gossip/seed-0")[1] == shown[1]


def test_methods_lists_every_method_with_parameters_and_papers(coterie):
    _, out, _ = coterie("methods")
    for kind, method in METHODS.items():
        assert f"{kind}: " in out
        for reference in method.references:
            assert reference.split(",")[0] in out
    assert "num_peers = 5" in out


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_every_parameter_of_every_method_is_explained(coterie, kind):
    """What the docstring says of each field is what `coterie methods NAME` shows."""
    status, out, _ = coterie("methods", kind)
    assert status == 0
    for parameter in _catalog.list_parameters(METHODS[kind]):
        assert parameter.text, f"{kind}.{parameter.name} has no text in the Args of its class"
        assert parameter.name in out


@pytest.mark.full
def test_what_is_listed_without_importing_it_is_what_the_classes_and_files_say():
    listed, entries = (
        _catalog.load_methods(),
        {kind: _catalog.describe_method(kind, cls) for kind, cls in METHODS.items()},
    )
    assert listed == entries, "run make docs"
    sizes = {
        name: (len(one.methods), len(one.seeds), one.settings.rounds)
        for name, one in loaded().items()
    }
    assert _catalog.load_studies() == {
        name: (f"{methods} methods x {seeds} seeds, {rounds} rounds", loaded()[name].description)
        for name, (methods, seeds, rounds) in sizes.items()
    }, "run make docs"


@functools.cache
def loaded():
    """The built-in studies."""
    return {name: config.load_study(name) for name in config.find_builtin_studies()}


def test_methods_of_other_packages_are_listed_too(coterie, monkeypatch):
    """One that can be imported, and one that cannot: the rest of the list is there all the same."""
    offers = [
        EntryPoint("alone", "coterie.methods.local:Local", registry.GROUP),
        EntryPoint("broken", "nowhere.at_all:Method", registry.GROUP),
    ]
    for module in (registry, importlib.metadata):
        monkeypatch.setattr(
            module, "entry_points", lambda group: offers if group == registry.GROUP else []
        )
    _, out, _ = coterie("methods")
    assert f"alone: {METHODS['local'].summary}" in out
    assert "broken: " in out
    assert "there is no module 'nowhere'" in " ".join(out.split())
    assert METHODS["local"].summary in coterie("methods", "alone")[1]


HEAVY = ("torch", "numpy", "pandas", "pyarrow", "matplotlib", "scipy", "sklearn")
QUICK = """
import sys, time
from coterie.cli.app import main
sys.argv = ["coterie", *sys.argv[1:]]
try:
    main()
finally:
    print(time.process_time(), *sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "methods", "methods dac", "studies", "studies dac/tau"]
)
def test_what_is_only_listed_comes_at_once(arguments):
    """No large library is imported; a second of processor time is three times what the slowest takes."""
    script = QUICK.format(heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments.split()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    seconds, *imported = done.stderr.split()
    assert imported == []
    assert float(seconds) < 1.0
    assert len(done.stdout) > 10


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: out of memory"),
    ],
)
def test_memory_that_ends_outside_of_a_run_is_one_line(coterie, error, monkeypatch, tmp_path):
    """While data are built, or the report is written."""
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/config.toml").write_text("")

    def end(*args, **kwargs):
        raise error

    monkeypatch.setattr("coterie.studies.sweep.run_sweep", end)
    status, _, err = run(coterie)
    assert status == 2
    assert err == (
        "coterie: this machine has no more memory; use fewer --workers, fewer clients, or a smaller model\n"
    )


def test_the_version_is_that_of_the_package(coterie):
    assert coterie("--version")[:2] == (0, f"coterie {__version__}\n")


def test_studies_lists_them_and_prints_a_file_to_start_from(coterie, tmp_path):
    assert "rotated-digits" in coterie("studies")[1]
    _, out, _ = coterie("studies", "rotated-digits")
    (tmp_path / "mine.toml").write_text(out)
    assert config.load_study(tmp_path / "mine.toml") == config.load_study("rotated-digits")


def test_studies_prints_what_a_study_extends_and_all_that_runs(coterie):
    extends = 'extends = "dac/_base"'
    assert extends in coterie("studies", "dac/tau")[1]
    assert 'label = "PENS"' in coterie("studies", "dac/_base")[1]
    _, out, _ = coterie("studies", "dac/tau", "--resolved")
    assert "extends" not in out
    assert config.parse_study_text(out) == config.load_study("dac/tau")


@pytest.mark.parametrize("command", ["run", "resume", "methods", "list", "show", "studies"])
def test_every_command_explains_itself(coterie, command):
    status, out, _ = coterie(command, "--help")
    assert status == 0
    assert "Usage" in out


def list_helps(command, path=()):
    """The path of every command and the text of its help."""
    if not hasattr(command, "commands"):
        return [(path, command.help)]
    inner = command.commands.items()
    return [one for name, part in inner for one in list_helps(part, (*path, name))]


def test_the_examples_of_a_help_are_of_that_command():
    """Also where one function is two commands, such as `net join` and `federation join`."""
    helps = list_helps(typer.main.get_command(app_module.app))
    assert ("federation", "join") in dict(helps)
    for path, text in helps:
        examples = re.findall(r"^ *coterie (.*)$", text, re.MULTILINE)
        assert examples, path
        for example in examples:
            assert tuple(example.split()[: len(path)]) == path, example


@pytest.mark.slow
def test_a_renamed_study_is_shown_listed_compared_reported_and_resumed(coterie, tmp_path):
    assert run(coterie, "--quiet")[0] == 0
    shown = coterie("show", "runs/tiny")[1]
    (tmp_path / "runs/tiny").rename(tmp_path / "runs/Größe 2")
    assert coterie("show", "runs/Größe 2")[:2] == (0, shown)
    assert coterie("list")[1].startswith("runs/Größe 2  Größe 2: finished\n")
    assert coterie("report", "runs/Größe 2")[0] == 0
    status, out, err = coterie("resume", "runs/Größe 2", "--workers", "1", "--quiet")
    assert (status, err) == (0, "")
    renamed = tmp_path.resolve() / "runs/Größe 2"
    assert out.splitlines()[-2:] == [f"Runs:   {renamed}", f"Report: {renamed}/report.html"]
    assert run(coterie, "--quiet")[0] == 0
    status, out, _ = coterie("compare", "runs/tiny", "runs/Größe 2")
    assert status == 0
    assert out.split()[:2] == ["Test", "accuracy"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny", "Größe 2"}


def test_a_label_of_any_script_is_set_on_the_command_line(coterie, tmp_path):
    (tmp_path / "tiny.toml").write_text(STUDY.replace('label = "Gossip"', 'label = "Größe zwei"'))
    change = ("--set", "methods.Größe zwei.num_peers=1")
    status, out, err = run(coterie, "--quiet", *change)
    assert (status, err) == (0, "")
    assert "Größe zwei" in out
    assert "num_peers = 1\n" in (tmp_path / "runs/tiny/Größe zwei/seed-0/config.toml").read_text(
        "utf-8"
    )


@pytest.mark.slow
def test_names_that_a_terminal_cannot_write_are_spelled_out(coterie, tmp_path):
    """With ASCII for an encoding: other letters are written by their numbers, and nothing fails."""
    assert run(coterie, "--quiet", "--set", "methods.gossip.label=Größe")[0] == 0
    done = subprocess.run(
        [sys.executable, "-c", "from coterie.cli.app import main; main()", "show", "runs/tiny"], cwd=tmp_path,
        capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"Gr\xf6\xdfe" in done.stdout


@pytest.mark.slow
def test_published_models_are_attacked(coterie, tmp_path):
    """Of a study file and of a folder of results: a table, JSON in a file, one line for a mistake."""
    quick = ("--set", "engine=vmap", "--set", "rounds=1", "--shadows", "6", "--quiet")
    status, out, err = coterie(
        "audit-privacy", "tiny.toml", *quick, "--noise", "3", "--out", "audit.json"
    )
    assert (status, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [
        ["Gossip", "–"],
        ["Gossip", "–"],
    ]
    found = json.loads((tmp_path / "audit.json").read_text("utf-8"))
    assert found["study"] == "tiny"
    assert {(one["noise_multiplier"], one["attack"]) for one in found["attacks"]} == {
        (noise, attack) for noise in (None, 3.0) for attack in ("loss", "lira")
    }
    assert run(coterie, "--quiet")[0] == 0
    status, out, _ = coterie("audit-privacy", "runs/tiny", *quick, "--json")
    assert status == 0
    assert [one["epsilon"] for one in json.loads(out)["attacks"] if one["label"] == "Gossip"] == [
        None,
        None,
    ]
    status, out, err = coterie("audit-privacy", "tiny.toml", "--shadows", "3")
    assert (status, out) == (2, "")
    assert err == "coterie: shadows is 3; expected an even number, 6 or more\n"
