"""A member that was written from the documents alone takes part in runs of real nodes, with mutual TLS."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.selection import full
from typer.testing import CliRunner

import stranger
from coterie.cli.app import app
from coterie.data.build import build_federation
from coterie.net import fleet
from coterie.studies import config

pytestmark = pytest.mark.e2e
ROUNDS = 4
STUDY = f"""
name = "three"
rounds = {ROUNDS}
seeds = [0]
model = {{ kind = "linear" }}
engine = "loop"
data = {{ dataset = "digits", num_clients = 3, train = 60, validation = 60 }}
local = {{ lr = 0.01 }}

[[methods]]
"""
NODE = """study = "study.toml"
roster = "roster.toml"
organizer = "organizer.pub"
key = "{name}.key"
certificate = "members/{name}.pem"
ca = "ca.pem"
role = "{role}"
runs = "nodes"
data = {{ study = "own rows" }}
network = {{ deadline = 60.0, start = 300.0, linger = 60.0 }}
"""


def coterie(*arguments: str | Path) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + str(result.exception)


def rows(study: config.StudyConfig, client: int) -> dict[str, np.ndarray]:
    """A client's samples as plain arrays, scaled as the model of a node gets them."""
    federation = build_federation(study.data, 0, None).host([client])
    x = (federation.x[0].flatten(1).numpy() / 255 - federation.mean[0]) / federation.std[0]
    y, held = federation.y[0].numpy(), federation.split[0].numpy() == 1
    kept = federation.split[0].numpy() == 0
    return {"x": x[kept], "y": y[kept], "x_validation": x[held], "y_validation": y[held]}


@pytest.mark.parametrize(
    "method",
    [full("kind = 'dac'\nnum_peers = 2"), full("kind = 'fedavg'", slow=True)],
    ids=["dac", "fedavg"],
)
def test_a_client_written_from_the_documents_joins_publishes_and_reads(tmp_path, port, method):
    """Its key and request are its own; it dials the node before it, and the one after it dials it.

    The nodes read it in every round, refuse nothing, turn nothing away and leave nobody out; it
    reads them in every round, and its model learns.
    """
    (tmp_path / "study.toml").write_text(STUDY + method)
    study, server = config.load_study(tmp_path / "study.toml"), "fedavg" in method
    coterie("net", "init", tmp_path, "--run", "three")
    for number, name in enumerate(["north", "stranger", "west"]):
        address = f"127.0.0.1:{port + number}"
        if name == "stranger":
            stranger.request(name, "127.0.0.1", tmp_path)
        else:
            coterie("net", "join", name, address, "--folder", tmp_path)
        coterie("net", "sign", tmp_path, tmp_path / f"{name}.csr", address, "--name", name)
    options = ["--features", "1,8,8", "--classes", "10", *(["--server", "north"] if server else [])]
    coterie("net", "roster", tmp_path, "--study", tmp_path / "study.toml", *options)
    (tmp_path / "stranger.pem").write_bytes((tmp_path / "members/stranger.pem").read_bytes())
    np.savez(tmp_path / "data.npz", **rows(study, 1))  # type: ignore[arg-type]
    files = {name: tmp_path / f"{name}.toml" for name in ("north", "west")}
    for name, file in files.items():
        file.write_text(
            NODE.format(name=name, role="server" if server and name == "north" else "peer")
        )

    events: dict[str, list[Mapping[str, Any]]] = {name: [] for name in files}
    command = [
        sys.executable,
        stranger.__file__,
        "run",
        tmp_path,
        "stranger",
        tmp_path / "data.npz",
        "300",
        "60",
    ]
    with fleet.Fleet(
        files, logs=tmp_path, listener=lambda name, event: events[name].append(event)
    ) as nodes:
        for name in files:
            nodes.start(name)
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        try:
            out, _ = process.communicate(timeout=600)
        finally:
            process.kill()
        statuses = nodes.wait(300)
    assert (process.returncode, statuses) == (0, {"north": 0, "west": 0}), out
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert told[-1]["event"] == "done"
    assert told[-1]["missed"] == 0
    assert told[-1]["accuracy"] > 0.5
    for name in files:
        odd = [event for event in events[name] if event["level"] in ("warning", "error")]
        assert odd == []
        met = next(event for event in events[name] if event["event"] == "met")
        assert "stranger" in met["peers"]
    if server:
        # the cohort and the newest model, in the warm-up and after every round
        answers = 1 + ROUNDS
        assert told[-1]["read"] == 2 * answers + 3 * ROUNDS
        (run,) = (tmp_path / "nodes" / "north").glob("three/*/seed-0")
        journal = [json.loads(line) for line in (run / "arrivals.jsonl").read_text().splitlines()]
        served = [entry for entry in journal if entry["event"] == "serve"]
        assert len(served) == answers + 2 * ROUNDS
        assert all(entry["arrived"] == [0, 1, 2] for entry in served)
    else:
        assert told[-1]["read"] == 2 * ROUNDS
        for name, client in (("north", 0), ("west", 2)):
            (run,) = (tmp_path / "nodes" / name).glob("three/*/seed-0")
            edges = pd.read_parquet(run / "edges.parquet")
            mine = edges[(edges["reader"] == client) & (edges["read"] == 1) & (edges["weight"] > 0)]
            assert set(mine["round"].tolist()) == set(range(ROUNDS)), (
                "read and mixed in every round"
            )
