"""The command line as a user meets it: real processes, real interruptions, real images."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from coterie.results import graph

pytestmark = pytest.mark.e2e

TINY = """
name = "tiny"
rounds = 8
seeds = [0, 1]
checkpoint_seconds = 0
model = { kind = "linear" }

[data]
dataset = "digits"
num_clients = 6
train = 24
validation = 8
shift = [{ kind = "rotation", degrees = [0, 180] }]

[[methods]]
kind = "random"
num_peers = 2

[[methods]]
kind = "local"
"""
MNIST = """
name = "rotated-mnist"
rounds = 16
seeds = [0]

[data]
dataset = "mnist"
num_clients = 16
train = 80
validation = 20
test_samples = 1000
shift = [{ kind = "rotation", degrees = [0, 90, 180, 270], sizes = [4, 4, 4, 4] }]

[[methods]]
kind = "dac"
label = "DAC"
num_peers = 3

[[methods]]
kind = "random"
label = "Random"
num_peers = 3

[[methods]]
kind = "oracle"
label = "Oracle"
num_peers = 3
"""


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the command line in a folder, in a process group of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "COTERIE_DATA"}
    return subprocess.Popen(
        [sys.executable, "-m", "coterie", *arguments],
        cwd=folder,
        env=environment | {"NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]", timeout: float = 240) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for(process: "subprocess.Popen[str]", run: Path, rounds: int) -> None:
    """Wait until a run has written a checkpoint after so many rounds."""
    for _ in range(24_000):
        if (run / "provenance.json").exists() and json.loads((run / "provenance.json").read_text())[
            "round"
        ] >= rounds:
            return
        try:
            process.wait(0.005)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"no checkpoint of round {rounds} in {run}")


def results(folder: Path) -> dict[str, bytes]:
    names = {"checkpoint.safetensors", "metrics.parquet", "edges.parquet"}
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.name in names
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a study that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tiny.toml").write_text(TINY)
    status, _, err = finish(start(folder, "run", "tiny.toml", "--workers", "1"))
    assert status == 0, err
    return folder / "runs" / "tiny"


@pytest.mark.slow
def test_ctrl_c_leaves_a_study_that_goes_on_to_the_same_bytes(tmp_path, whole):
    (tmp_path / "tiny.toml").write_text(TINY)
    process = start(tmp_path, "run", "tiny.toml", "--workers", "1")
    wait_for(process, tmp_path / "runs/tiny/random/seed-0", 4)
    os.killpg(process.pid, signal.SIGINT)
    status, out, err = finish(process)
    assert status == 130
    assert "Traceback" not in out + err
    command = err.strip().splitlines()[-1]
    assert command == "stopped; continue with: coterie resume runs/tiny"
    assert results(tmp_path / "runs/tiny") != results(whole)
    status, out, err = finish(start(tmp_path, "resume", "runs/tiny", "--workers", "1"))
    assert status == 0, err
    assert results(tmp_path / "runs/tiny") == results(whole)


@pytest.mark.full
def test_kill_9_leaves_a_study_that_goes_on_to_the_same_bytes(tmp_path, whole):
    (tmp_path / "tiny.toml").write_text(TINY)
    process = start(tmp_path, "run", "tiny.toml", "--workers", "2")
    wait_for(process, tmp_path / "runs/tiny/random/seed-0", 6)
    os.killpg(process.pid, signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    status, _, err = finish(start(tmp_path, "run", "tiny.toml", "--resume"))
    assert status == 0, err
    assert results(tmp_path / "runs/tiny") == results(whole)


@pytest.mark.slow
def test_a_file_that_cannot_grow_is_one_line_and_the_study_goes_on_later(tmp_path, whole):
    """As on a full disk: every write beyond 4 kB fails, until the limit is lifted."""
    (tmp_path / "tiny.toml").write_text(TINY)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    code = f"{limit}; from coterie.cli.app import main; main()"
    arguments = [sys.executable, "-c", code, "run", "tiny.toml", "--workers", "1", "--quiet"]
    full = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert full.returncode == 75
    assert len(full.stderr.splitlines()) == 1, full.stderr
    assert "cannot write: File too large: runs/tiny/" in full.stderr
    assert "continue with: coterie resume runs/tiny" in full.stderr
    status, _, err = finish(start(tmp_path, "resume", "runs/tiny", "--workers", "1"))
    assert status == 0, err
    assert results(tmp_path / "runs/tiny") == results(whole)


@pytest.mark.slow
def test_rotated_mnist_dac_beats_random_and_everybody_reads_whom_they_should(tmp_path, data_dir):
    """DAC's mean over clusters is above Random's, Oracle never leaves its cluster, Random leaves it as chance says."""
    (tmp_path / "mnist.toml").write_text(MNIST)
    arguments = ["run", "mnist.toml", "--data-dir", str(data_dir), "--json", "--workers", "1"]
    status, out, err = finish(start(tmp_path, *arguments))
    assert status == 0, err
    rows = pd.DataFrame(json.loads(out)["rows"]).set_index(["label", "cluster", "metric"])["mean"]
    assert rows["DAC", "clusters", "accuracy"] > rows["Random", "clusters", "accuracy"]

    truth = np.repeat([0, 1, 2, 3], 4)
    oracle, random = (
        pd.read_parquet(tmp_path / "runs/rotated-mnist" / label / "seed-0/edges.parquet")
        for label in ("Oracle", "Random")
    )
    assert np.array_equal(truth[oracle["reader"]], truth[oracle["read"]])
    assert len(oracle) == 16 * 16 * 3
    inside = int((truth[random["reader"]] == truth[random["read"]]).sum())
    chance = graph.expected_share(truth)
    assert chance == pytest.approx(0.2)
    assert stats.binomtest(inside, len(random), chance).pvalue > 1e-3
