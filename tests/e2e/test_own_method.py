"""A method and a metric of another package: run, kill, resume, tune and every command that reads; then without it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

RING = '''
import os, signal
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from coterie.functional import aggregation, selection
from coterie.functional.metrics import Metric
from coterie.methods.base import PeerMethod, mixing_report


@dataclass(frozen=True)
class Ring(PeerMethod):
    """Average with the next client.

    Args:
        step: how far the next one is.
    """

    kind: ClassVar[str] = "ring"
    summary: ClassVar[str] = "average with the next client"
    reports = (Metric("trust", title="trust in the next", better="higher", unit="%", scale=100, digits=1),)
    step: int = 1

    def exchange(self, rnd, state):
        if rnd.index == 3 and "KILLED" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        peers = selection.keep_allowed(((rnd.ids + self.step) % rnd.task.population)[:, None], rnd.candidates)
        inbox = rnd.exchange.pull(self.publish(rnd.task, state), peers)
        weights, own = aggregation.fedavg_weights(inbox.field_by_slot("samples"), rnd.task.num_samples, inbox.mask)
        state = replace(state, params=inbox.mix(weights, own=state.params, own_weight=own))
        return state, {**mixing_report(inbox, weights, own), "trust": torch.full((len(rnd.ids),), 0.1 * rnd.index)}


@dataclass(frozen=True)
class Other(Ring):
    """No package offers it under a name."""

    kind: ClassVar[str] = "other"
'''
STUDY = """
name = "rings"
rounds = 6
seeds = [0]
checkpoint_seconds = 0
model = { kind = "linear" }

[data]
dataset = "digits"
num_clients = 5
train = 12
validation = 4

[[methods]]
kind = "ring"

[[methods]]
kind = "ring_package.ring:Other"
step = 2

[[methods]]
kind = "local"
"""

DRIVER = """
import contextlib, io, json, sys
from coterie.cli.app import main
texts = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            main()
        except SystemExit as end:
            assert not end.code, (words, end.code)
    texts.append(text.getvalue())
print(json.dumps(texts))
"""


class Place:
    """A folder with a study, and a folder of installed packages with the package in it."""

    def __init__(self, folder: Path):
        self.folder, self.site = folder, folder / "site"
        package, info = self.site / "ring_package", self.site / "ring_package-1.0.dist-info"
        package.mkdir(parents=True)
        info.mkdir()
        (package / "__init__.py").write_text("")
        (package / "ring.py").write_text(RING)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ring-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[coterie.methods]\nring = ring_package.ring:Ring\n")
        (folder / "study.toml").write_text(STUDY)

    def process(self, *words: str, installed: bool = True, **more: str) -> subprocess.Popen[str]:
        paths = [*([str(self.site)] if installed else []), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "COLUMNS": "200",
            **more,
        }
        return subprocess.Popen(
            [sys.executable, *words], cwd=self.folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def commands(self, *commands: tuple[str, ...], installed: bool) -> list[str]:
        """Run some commands in one process; the output of each."""
        process = self.process("-c", DRIVER, json.dumps(commands), installed=installed)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return json.loads(out)


@pytest.mark.slow
def test_a_method_of_another_package_goes_everywhere_and_is_read_without_it(tmp_path):
    place = Place(tmp_path)
    killed = place.process(
        "-m", "coterie", "run", "study.toml", "--workers", "1", "--quiet", KILLED="yes"
    )
    found = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, found
    stored = tmp_path / "runs/rings/ring/seed-0/provenance.json"
    assert json.loads(stored.read_text())["round"] == 3, "it was killed in the middle"
    config = (tmp_path / "runs/rings/config.toml").read_text()
    assert 'kind = "ring"\nlabel = "ring"\npackage = "ring-package==1.0"' in config
    assert 'kind = "ring_package.ring:Other"\nlabel = "other"' in config

    missing = place.process("-m", "coterie", "resume", "runs/rings", installed=False)
    _, told = missing.communicate(timeout=300)
    assert missing.returncode == 2
    assert told.count("\n") == 1
    assert "'ring'" in told
    assert "install ring-package==1.0" in told

    reading = [("show", "runs/rings", "--json"), ("list",), ("compare", "runs/rings", "--json")]
    tune = (
        "tune",
        "study.toml",
        "--set",
        "rounds=2",
        "--grid",
        "methods.other.step=1,2",
        "--workers",
        "1",
        "--quiet",
    )
    resume = ("resume", "runs/rings", "--workers", "1", "--quiet")
    *_, tuned, methods, shown, listed, compared = place.commands(
        resume, tune, ("methods",), *reading, installed=True
    )
    assert json.loads(stored.read_text())["done"] is True
    assert "other: step = " in tuned
    assert "ring: average with the next client" in methods
    rows = json.loads(shown)["rows"]
    assert {row["label"] for row in rows} == {"ring", "other", "local"}
    trust = {
        row["label"]: row["mean"]
        for row in rows
        if row["metric"] == "trust" and row["cluster"] == "all"
    }
    assert trust == {"ring": pytest.approx(0.5), "other": pytest.approx(0.5)}, (
        "what the last round reported"
    )
    assert "trust" in compared

    plot = ("plot", "runs/rings", "--figure", "curves", "--format", "svg", "--out", "curves.svg")
    *without, table, _, _ = place.commands(
        *reading, ("show", "runs/rings"), ("report", "runs/rings"), plot, installed=False
    )
    assert without == [shown, listed, compared]
    assert "trust in the next" in table
    page = (tmp_path / "runs/rings/report.html").read_text()
    assert "rust in the next in %, higher is better" in page
    assert "50.0" in page
    assert (tmp_path / "curves.svg").exists()
