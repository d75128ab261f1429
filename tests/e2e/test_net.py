"""Real nodes as processes on loopback, with mutual TLS."""

import json
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.selection import full
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.net import fleet, setup
from coterie.report.watch import FolderFollower
from coterie.studies import config
from coterie.studies.run import run_study

pytestmark = pytest.mark.e2e

STUDY = """
name = "four"
rounds = 4
seeds = [0]
model = { kind = "linear" }
engine = "loop"

[data]
dataset = "digits"
num_clients = 4
train = 24
validation = 8
shift = [{ kind = "rotation", degrees = [0, 180] }]

[local]
lr = 0.01

[[methods]]
kind = "dac"
num_peers = 2

[[methods]]
kind = "fedavg"

[[methods]]
kind = "ifca"
clusters = 2
"""
QUICK = {"deadline": 60.0, "start": 200.0, "linger": 10.0}


def table(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.astype(
        {c: str for c in frame.columns if isinstance(frame[c].dtype, pd.CategoricalDtype)}
    )
    return frame.sort_values(list(frame.columns)).reset_index(drop=True)


def judging(study: config.StudyConfig) -> config.StudyConfig:
    """The study with what nodes do unless they are told otherwise: judge what they receive."""
    return config.parse_study_text(config.format_study(study), overrides=["acceptance=true"])


@pytest.mark.parametrize("label", [full("dac"), full("fedavg", slow=True), full("ifca", slow=True)])
def test_four_nodes_end_with_the_bytes_of_the_simulation(tmp_path, port, label):
    """The same peers, weights, bytes and metrics in every round, whether four processes or one.

    Peers that read each other, a server with one model, and one with several that clients fetch
    again to measure them; tests/unit/net/test_node.py has every method, in one process.

    While a node works, the live page of its folder follows it.
    """
    study = config.parse_study_text(STUDY).select_run(label, 0)
    files = fleet.lay_out(tmp_path, study, port=port, network=QUICK)
    (tmp_path / "logs").mkdir()
    follower, pages = FolderFollower(tmp_path / "nodes" / "node-01"), []

    def look(name: str, event: Mapping[str, Any]) -> None:
        if name == "node-01" and event["event"] == "round" and event["round"] >= 1:
            pages.append(follower.load_message())

    with fleet.Fleet(files, logs=tmp_path / "logs", listener=look) as nodes:
        for name in files:
            nodes.start(name)
        assert nodes.wait(120) == dict.fromkeys(files, 0), (
            tmp_path / "logs" / "node-00.log"
        ).read_text()
    assert "unfinished (round" in pages[0]["overview"]
    assert pages[0]["data"]["curves"][0]["rounds"][:2] == [-1, 0]
    assert len({page["signature"] for page in pages}) > 1
    joined = fleet.join_results(tmp_path, study, list(files), "nodes")
    run_study(judging(study), out=tmp_path / "simulated")
    run = tmp_path / "simulated" / "four" / label / "seed-0"
    for name in ("metrics", "edges"):
        assert table(joined[name]).equals(table(pd.read_parquet(run / f"{name}.parquet")))


@pytest.mark.slow
def test_four_nodes_that_wait_for_nobody_are_repeated_to_the_byte(tmp_path, port):
    """One is killed in the middle and started again; the command says that all are equal, and what is not."""
    free = "rounds = 12\npace = 'free'\nmax_staleness = 6\n"
    study = config.parse_study_text(STUDY.replace("rounds = 4\n", free)).select_run("dac", 0)
    files = fleet.lay_out(tmp_path, study, port=port, network=QUICK)
    (tmp_path / "logs").mkdir()
    pending = {"node-02"}

    def look(name: str, event: Mapping[str, Any]) -> None:
        if name in pending and event["event"] == "round" and event["round"] >= 3:
            pending.clear()
            nodes.processes[name].kill()

    with fleet.Fleet(files, logs=tmp_path / "logs", listener=look) as nodes:
        for name in files:
            nodes.start(name)
        nodes.processes["node-02"].wait(120)
        nodes.start("node-02")
        assert nodes.wait(120) == dict.fromkeys(files, 0), (
            tmp_path / "logs" / "node-00.log"
        ).read_text()
    command = ["net", "replay", *map(str, files.values())]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [f"{name}: 12 rounds, equal to the byte" for name in files]
    logs = [str(tmp_path / "nodes" / name) for name in files]
    audit = CliRunner().invoke(app, ["net", "audit", *logs])
    assert "WRONG" not in audit.output
    part = CliRunner().invoke(app, command[:-1])
    assert "nobody made it" in str(part.exception)
    edges = next((tmp_path / "nodes" / "node-01").rglob("edges.parquet"))
    edges.write_bytes(edges.read_bytes() + b"!")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "node-01: 12 rounds, differs in edges.parquet" in done.output


@pytest.mark.parametrize("label", [full(kind, slow=True) for kind in ("dac", "fedavg", "ifca")])
def test_a_member_that_joins_late_ends_with_the_bytes_of_the_simulation(tmp_path, port, label):
    """Three nodes end their run; the process of a fourth starts only then, and its results are the simulation's.

    With IFCA the three are gone by then, and are started again to answer it.
    """
    held_out = "rounds = 4\nnew_clients = [3]\nnew_client_rounds = 2\n"
    study = config.parse_study_text(STUDY.replace("rounds = 4\n", held_out)).select_run(label, 0)
    files = fleet.lay_out(
        tmp_path, study, port=port, network={**QUICK, "start": 90.0, "linger": "unlimited"}
    )
    (tmp_path / "logs").mkdir()
    *early, late = files
    over = {name: threading.Event() for name in early}

    def look(name: str, event: Mapping[str, Any]) -> None:
        if event["event"] == "done" and name in over:
            over[name].set()

    with fleet.Fleet(files, logs=tmp_path / "logs", listener=look) as nodes:
        for name in early:
            nodes.start(name)
        assert all(event.wait(240) for event in over.values()), (
            tmp_path / "logs" / "node-00.log"
        ).read_text()
        for name in early if label == "ifca" else []:
            nodes.processes[name].terminate()
            nodes.processes[name].wait(30)
            nodes.start(name)
        nodes.start(late)
        assert nodes.wait(240) == dict.fromkeys(files, 0), (
            tmp_path / "logs" / f"{late}.log"
        ).read_text()
    joined = fleet.join_results(tmp_path, study, list(files), "nodes")
    run_study(judging(study), out=tmp_path / "simulated")
    run = tmp_path / "simulated" / "four" / label / "seed-0"
    for name in ("metrics", "edges"):
        assert table(joined[name]).equals(table(pd.read_parquet(run / f"{name}.parquet")))
    assert set(joined["metrics"].query("split == 'new_clients'")["client"]) == {3}
    own = tmp_path / "nodes" / late / "four"
    told = json.loads((own / "summary.json").read_text())["new_clients"]
    assert {(row["clients"], row["rounds"]) for row in told} == {(1, 2)}
    assert "New clients: 1 client took part in no round" in " ".join(coterie("show", own).split())
    assert "report.html" in coterie("report", own)


TOKENS = """
name = "tokens"
rounds = 3
seeds = [0]
loss = "tokens"
metrics = ["perplexity"]
local.optimizer = "adamw"

[data]
dataset = "coterie.testing:tiny_federation"
options = { num_clients = 3, clusters = 1, kind = "tokens" }

[model]
kind = "coterie.testing:TinyTokens"

[[methods]]
kind = "random"
num_peers = 1
"""


@pytest.mark.slow
def test_three_nodes_train_a_model_of_tokens_to_the_bytes_of_the_simulation(tmp_path, port):
    """Data and model by import path, a loss for each position, and a metric of all outputs."""
    study = config.parse_study_text(TOKENS)
    files = fleet.lay_out(tmp_path, study, port=port, network=QUICK)
    (tmp_path / "logs").mkdir()
    with fleet.Fleet(files, logs=tmp_path / "logs") as nodes:
        for name in files:
            nodes.start(name)
        assert nodes.wait(120) == dict.fromkeys(files, 0), (
            tmp_path / "logs" / "node-00.log"
        ).read_text()
    joined = fleet.join_results(tmp_path, study, list(files), "nodes")
    run_study(judging(study), out=tmp_path / "simulated")
    run = tmp_path / "simulated" / "tokens" / "random" / "seed-0"
    for name in ("metrics", "edges"):
        assert table(joined[name]).equals(table(pd.read_parquet(run / f"{name}.parquet")))
    assert {"loss", "token_accuracy", "perplexity"} <= set(joined["metrics"]["metric"])


def coterie(*arguments: str | Path) -> str:
    """What a command prints, or the error it ends with."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return (
        result.stdout
        if result.exception is None or isinstance(result.exception, SystemExit)
        else str(result.exception)
    )


@pytest.mark.full
def test_an_organizer_and_two_members_set_up_a_run_and_the_doctor_finds_what_is_missing(
    tmp_path, port
):
    """Keys are made where they are used; the roster is signed; the doctor says who is away and what is wrong."""
    organizer, north, study = tmp_path / "organizer", tmp_path / "north", tmp_path / "study.toml"
    north.mkdir()
    study.write_text(STUDY.split('[[methods]]\nkind = "fedavg"')[0])
    assert "ca.key and organizer.key stay here" in coterie("net", "init", organizer, "--run", "two")
    for name, number in (("north", 0), ("south", 1)):
        address = f"127.0.0.1:{port + number}"
        assert "stays on this machine" in coterie("net", "join", name, address, "--folder", north)
        assert "fingerprint" in coterie(
            "net", "sign", organizer, north / f"{name}.csr", address, "--name", name
        )
    assert "never overwritten" in coterie(
        "net", "join", "north", f"127.0.0.1:{port}", "--folder", north
    )
    written = coterie(
        "net", "roster", organizer, "--study", study, "--features", "1,8,8", "--classes", "10"
    )
    assert "version 1" in written
    file = north / "node.toml"
    file.write_text(
        'study = "../study.toml"\nroster = "../organizer/roster.toml"\norganizer = "../organizer/organizer.pub"\n'
        'key = "north.key"\ncertificate = "../organizer/members/north.pem"\nca = "../organizer/ca.pem"\n'
        '[data]\narrays = "data.npz"\nclasses = 10\n'
    )
    check = coterie("net", "roster", organizer / "roster.toml", "--check", "--node", file)
    assert check == "the roster is in order\n"
    draw = np.random.default_rng(0)
    np.savez(
        north / "data.npz",
        x=draw.integers(0, 255, (40, 1, 8, 8), dtype=np.uint8),
        y=draw.integers(0, 10, 40),
    )
    told = coterie("doctor", file)
    assert "ok     data: [26] training and [6] validation samples" in told
    assert f"WRONG  south at 127.0.0.1:{port + 1}: no answer (nothing listens there" in told
    assert "one round: " in told
    (north / "north.key").chmod(0o644)
    assert "run chmod 600" in coterie("node", file)


@pytest.mark.full
def test_a_node_ends_in_order_when_it_is_told_to(tmp_path, port):
    """SIGTERM while it waits for the others: the session is closed, the status says which signal it was."""
    study = config.parse_study_text(STUDY).select_run("dac", 0)
    files = fleet.lay_out(tmp_path, study, port=port, network={**QUICK, "start": 100.0})
    events: list = []
    with fleet.Fleet(
        files, logs=tmp_path, listener=lambda name, event: events.append(event)
    ) as nodes:
        nodes.start("node-00", "--insecure-loopback")
        process = nodes.processes["node-00"]
        while not events and process.poll() is None:
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        assert events[0]["event"] == "insecure"
        process.terminate()
        assert process.wait(20) == 143
    assert events[-1]["event"] == "stopped"
    assert json.loads((tmp_path / "node-00.log").read_text().splitlines()[0])["level"] == "warning"


@pytest.mark.full
def test_a_member_is_removed_while_the_others_run(tmp_path, port):
    """After round 1 the organizer removes node-03: it ends, and three nodes come to their end without a restart."""
    study = config.parse_study_text(STUDY.replace("rounds = 4", "rounds = 10")).select_run("dac", 0)
    files = fleet.lay_out(tmp_path, study, port=port, network=QUICK)
    events: list[tuple[str, Mapping[str, Any]]] = []
    removed = threading.Event()

    def look(name: str, event: Mapping[str, Any]) -> None:
        events.append((name, event))
        if (
            name == "node-01"
            and event["event"] == "round"
            and event["round"] == 1
            and not removed.is_set()
        ):
            removed.set()
            setup.remove_member(tmp_path / "keys", "node-03")

    with fleet.Fleet(files, logs=tmp_path, listener=look) as nodes:
        for name in files:
            nodes.start(name)
        statuses = nodes.wait(120)
    assert statuses == {"node-00": 0, "node-01": 0, "node-02": 0, "node-03": 2}
    told = {name: e for name, e in events if e["event"] == "roster"}
    assert {name: e["removed"] for name, e in told.items()} == {
        name: ["node-03"] for name in list(files)[:3]
    }
    for name in list(files)[:3]:
        edges = pd.read_parquet(
            tmp_path / "nodes" / name / "four" / "dac" / "seed-0" / "edges.parquet"
        )
        assert max(edges["round"].tolist()) == 9
        later = edges[(edges["round"] > told[name]["round"]) & (edges["weight"] > 0)]
        assert 3 not in later["read"].tolist()
