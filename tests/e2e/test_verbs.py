"""Each verb of the command line once, as a process of its own, on one small study.

The verbs between machines are in test_net.py, test_net_outbound.py and test_federation.py, and `tune` in test_own_data.py; what verbs do in
particular is tested in process, in tests/unit/cli.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import typer

from coterie.cli import app
from coterie.net import fleet
from coterie.results.stored_runs import load_runs
from coterie.studies import config

pytestmark = pytest.mark.e2e

STUDY = """
name = "tiny"
rounds = 2
seeds = [0]
model = { kind = "linear" }

[data]
dataset = "digits"
num_clients = 4
train = 24
validation = 8
shift = [{ kind = "rotation", degrees = [0, 180] }]

[[methods]]
kind = "random"
num_peers = 2

[[methods]]
kind = "local"
"""
RUN = "runs/tiny/random/seed-0"
VERBS = {
    "resume": (("runs/tiny", "--quiet"), "Report: "),
    "methods": (("dac",), "tau"),
    "studies": ((), "rotated-digits"),
    "list": ((), "tiny: finished"),
    "show": (("runs/tiny",), "Gain over local of each client"),
    "report": (("runs/tiny",), "report.html"),
    "plot": (("runs/tiny", "--figure", "bars", "--format", "svg"), "Data:   bars.csv"),
    "track": (("runs/tiny", "--to", "tensorboard"), "2 runs written to tracking"),
    "compare": (("runs/tiny",), "random"),
    "analyze": ((RUN,), "interaction"),
    "export": ((RUN, "--client", "0", "--out", "model"), "model"),
    "audit-privacy": (("study.toml", "--shadows", "6", "--set", "rounds=1", "--quiet"), "random"),
    "status": (("runs/tiny",), "2 runs: 2 done"),
}
"""The words that follow each verb, and what its output has in it."""
ELSEWHERE = {"run", "watch", "up"} | {"tune", "node", "doctor", "net", "relay"}
ELSEWHERE |= {"federation", "propose", "approve", "decline", "withdraw", "stop"}
"""Verbs with a test of their own: below, and in the files that the docstring names."""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "coterie", *words]


def coterie(folder: Path, *words: str) -> str:
    """Return what a command prints; it must succeed."""
    done = subprocess.run(command(*words), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_main(folder: Path, words: Sequence[str], out: Path, err: Path) -> None:
    """Be the command: its folder, its words, its output and its exit status."""
    os.chdir(folder)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["coterie", *words]
    app.main()


@pytest.fixture(scope="module")
def run_imported(folder, tmp_path_factory) -> Callable[..., str]:
    """Run a command as a process of its own, in which PyTorch and the package are imported already.

    Importing them is three quarters of the time of such a command, and `run`, `watch` and `up`
    below begin as a shell begins them.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["coterie.cli.app", "coterie.studies.run"])
    here = tmp_path_factory.mktemp("output")

    def run(*words: str) -> str:
        out, err = here / "out", here / "err"
        process = processes.Process(target=run_main, args=(folder, words, out, err))
        process.start()
        process.join()
        assert process.exitcode == 0, err.read_text()
        return out.read_text()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a finished study."""
    path = tmp_path_factory.mktemp("verbs")
    (path / "study.toml").write_text(STUDY)
    assert "Report: " in coterie(path, "run", "study.toml", "--workers", "1", "--quiet")
    return path


@pytest.mark.full
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_does_what_it_says(verb, run_imported):
    words, expected = VERBS[verb]
    assert expected in run_imported(verb, *words)


@pytest.mark.full
def test_watch_serves_the_report_until_it_is_interrupted(folder):
    with subprocess.Popen(
        command("watch", "runs/tiny"), cwd=folder, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        address = next((line.strip() for line in lines if line.startswith("http")), "")
        with urllib.request.urlopen(address) as page:
            assert "tiny" in page.read().decode()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode in (0, 130)


@pytest.mark.full
def test_up_runs_the_nodes_of_this_machine_to_their_end(tmp_path, port):
    study = config.parse_study_text(
        STUDY, overrides=["data.num_clients=2", "methods.random.num_peers=1"]
    )
    network = {"start": 120.0, "linger": 4.0}
    files = fleet.lay_out(tmp_path, study.select_run("random", 0), port=port, network=network)
    coterie(tmp_path, "up", "keys/roster.toml", "--nodes", ".", "--logs", "logs")
    for name in files:
        (run,), _ = load_runs([tmp_path / "nodes" / name / "tiny"])
        assert set(run.metrics["round"]) >= {0, 1}


def test_every_verb_has_a_test():
    commands = typer.main.get_command(app.app).commands  # type: ignore[attr-defined]
    assert commands.keys() == VERBS.keys() | ELSEWHERE
