"""Pieces of one's own by import path: run, stop, resume, sweep, tune and report; then read without them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from tests.selection import full
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import CheckpointError
from coterie.studies.run import run_study

pytestmark = pytest.mark.e2e

PIECES = '''
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from coterie import DacNoTwoHop
from coterie.data.plan import Shift


class Net(torch.nn.Sequential):
    def __init__(self, features, outputs, width=4):
        layers = torch.nn.Linear(math.prod(features), width), torch.nn.ReLU(), torch.nn.Linear(width, outputs)
        super().__init__(torch.nn.Flatten(), *layers)


@dataclass(frozen=True)
class Negative:
    def __call__(self, x):
        return 255 - x


@dataclass(frozen=True)
class Film(Shift):
    """Every second client has negatives."""

    kind: ClassVar[str] = "film"
    every: int = 2

    def apply(self, clients, sources, streams):
        odd = [int(row % self.every == 1) for row in range(len(clients))]
        names = ("print", "film")
        return tuple(c.plant_cluster(o, names[o], transforms=(Negative(),) * o) for c, o in zip(clients, odd))


def in_turn(samples, num_clients, generator):
    return generator.permutation(len(samples)) % num_clients


def median(received):
    return received.models.median(0).values


def seldom(known):
    return known.noise - 10 * known.count


def focal(outputs, targets):
    likely = torch.log_softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
    return -((1 - likely.exp()) ** 2) * likely


def second_best(outputs, targets):
    """Share of samples whose class has one of the two largest outputs."""
    return float((outputs.topk(2, 1).indices == targets[:, None]).any(1).double().mean())


def saw(number, total):
    return 1.0 if number % 2 else 0.5


class Half(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(group["lr"] / 2 * one.grad.sign())


@dataclass(frozen=True)
class Mine(DacNoTwoHop):
    kind: ClassVar[str] = "mine"
'''
STUDY = """
name = "{name}"
rounds = 4
seeds = [0]
checkpoint_seconds = 0
model = {model}
{study}

[data]
dataset = "digits"
num_clients = 4
train = 12
validation = 4
shift = [{shift}]

[[methods]]
kind = "{kind}"
label = "own"
{setting}
"""
PLAIN = {
    "study": "",
    "model": "{ kind = 'linear' }",
    "shift": "",
    "kind": "random",
    "setting": "num_peers = 2",
}
WHOLE_WAY = {"method", "aggregation", "loss"}
"""Pieces that `make test-more` takes from run to report; `make test-all` takes every one."""
OWN = {
    "loss": {"study": "loss = 'own_pieces:focal'"},
    "metric": {"study": "metrics = ['own_pieces:second_best']\neval_every = 2"},
    "schedule": {"study": "local.lr_schedule = 'own_pieces:saw'"},
    "optimizer": {"study": "local.optimizer = 'own_pieces:Half'"},
    "model": {"model": "{ kind = 'own_pieces:Net', options = { width = 5 } }"},
    "shift": {"shift": "{ kind = 'own_pieces:Film', every = 2 }"},
    "partition": {"shift": "{ kind = 'partition', function = 'own_pieces:in_turn' }"},
    "aggregation": {"setting": "aggregation = 'own_pieces:median'"},
    "selection": {"kind": "dac", "setting": "num_peers = 2\nselection = 'own_pieces:seldom'"},
    "server": {"kind": "fedavg", "setting": "aggregation = 'own_pieces:median'"},
    "method": {"kind": "own_pieces:Mine", "setting": "num_peers = 2"},
}
FILES = ("checkpoint.safetensors", "metrics.parquet", "edges.parquet")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder, with the pieces in it; returns what takes them away."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_pieces.py").write_text(PIECES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def take_away():
        (tmp_path / "own_pieces.py").unlink()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        monkeypatch.delitem(sys.modules, "own_pieces", raising=False)

    yield take_away
    sys.modules.pop("own_pieces", None)


def coterie(*words: str) -> str:
    told = CliRunner().invoke(app, [*words])
    assert told.exception is None, (words, told.exception)
    return told.stdout


class Stop(Exception):
    """Ends a run in the middle."""


def stop(progress):
    if progress.round == 1:
        raise Stop


@pytest.mark.parametrize("piece", [full(piece, slow=piece not in WHOLE_WAY) for piece in OWN])
def test_an_own_piece_goes_from_run_to_resume_to_report(piece, place):
    """What resumes ends with the bytes of what was not stopped; what is stored is read without the piece."""
    Path("study.toml").write_text(STUDY.format(**{**PLAIN, **OWN[piece]}, name="own"))
    run_study("study.toml", out="whole")
    with pytest.raises(Stop):
        run_study("study.toml", observer=stop)
    coterie("resume", "runs/own", "--workers", "1", "--quiet")
    for file in FILES:
        assert (
            Path("runs/own/own/seed-0", file).read_bytes()
            == Path("whole/own/own/seed-0", file).read_bytes()
        )
    coterie("report", "runs/own")
    shown = coterie("show", "runs/own", "--json")
    assert {row["label"] for row in json.loads(shown)["rows"]} == {"own"}
    place()
    Path("runs/own/report.html").unlink()
    coterie("report", "runs/own")
    assert Path("runs/own/report.html").stat().st_size > 10_000
    assert coterie("show", "runs/own", "--json") == shown


@pytest.mark.slow
def test_own_pieces_are_swept_and_tuned(place):
    everything = {**PLAIN, **OWN["model"], **OWN["shift"], **OWN["selection"]}
    Path("study.toml").write_text(STUDY.format(**everything, name="own"))
    short = ("--set", "rounds=1", "--workers", "1", "--quiet")
    grid = ("--grid", "num_peers=1,2", "--set", "methods.own.aggregation=own_pieces:median")
    assert "own: num_peers = " in coterie("tune", "study.toml", *grid, *short)
    coterie("run", "study.toml", *short, "--set", 'sweep={"model.options.width" = [2, 3]}')
    folders = sorted(path.name for path in Path("runs/own").iterdir() if path.is_dir())
    assert folders == ["width=2", "width=3"]


@pytest.mark.full
@pytest.mark.parametrize("change", ["model.options.width=6", "data.shift=[{kind='own_pieces:Film', every=3}]",
                                    "methods.own.aggregation=own_pieces:median"])  # fmt: skip
def test_a_study_with_another_own_piece_is_another_study(change, place):
    from coterie.studies import config

    everything = {**PLAIN, **OWN["model"], **OWN["shift"], **OWN["selection"], "name": "own"}
    Path("study.toml").write_text(STUDY.format(**everything))
    run_study(config.load_study("study.toml", ["rounds=0"]))
    with pytest.raises(CheckpointError, match="was run with other settings"):
        run_study(config.load_study("study.toml", ["rounds=0", change]), resume=True)
