"""A standing federation as processes on loopback: propose, approve, run, kill, results of the simulation."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.data.build import build_federation
from coterie.studies import config
from coterie.studies.run import run_study

pytestmark = pytest.mark.e2e

NAMES = ("north", "south", "east")
STUDY = """
name = "digits"
rounds = 4
seeds = [0]
acceptance = true
model = { kind = "linear" }
engine = "loop"

[data]
dataset = "digits"
num_clients = 3
train = 24
validation = 8
shift = [{ kind = "rotation", degrees = [0, 180], sizes = [2, 1] }]

[local]
lr = 0.01

[[methods]]
kind = "dac"
num_peers = 2
"""
NODE = """
roster = "roster.toml"
key = "{name}.key"
certificate = "{name}.pem"
{more}
[data.digits]
federation = "rows.safetensors"
{rules}
[network]
deadline = 60.0
start = 200.0
linger = 10.0
lease = 3.0
"""


def coterie(*words: str | Path) -> str:
    """What a command prints; it must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, f"{words}: {result.output} {result.exception}"
    return result.stdout


def refused(*words: str | Path) -> str:
    """The line that a command ends with."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is not None, result.output
    return str(result.exception)


class Members:
    """Members of a federation on this machine, each in a folder of its own."""

    def __init__(self, folder: Path, port: int, names: Sequence[str] = NAMES) -> None:
        self.folder, self.names = folder, names
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        organizer = folder / "organizer"
        coterie("federation", "create", organizer, "--name", "hearts")
        for number, name in enumerate(names):
            address = f"127.0.0.1:{port + number}"
            coterie("federation", "join", name, address, "--folder", folder / name)
            request = folder / name / f"{name}.csr"
            said = coterie("federation", "sign", organizer, request, address, "--name", name)
            has = "1 member" if number == 0 else f"{number + 1} members"
            assert f"version {number + 1}, has {has}:" in said
        study = config.parse_study_text(STUDY)
        rows = build_federation(study.data, 0)
        for number, name in enumerate(names):
            own = folder / name
            for file in ("ca.pem", "organizer.pub", "roster.toml", "roster.toml.sig"):
                (own / file).write_bytes((organizer / file).read_bytes())
            (own / f"{name}.pem").write_bytes((organizer / f"members/{name}.pem").read_bytes())
            # Rows without numbers: what a member's client is in a study, the study says.
            rows.host([number]).save(own / "rows.safetensors")
            self.write_node(name)
        (folder / "study.toml").write_text(STUDY)

    def write_node(self, name: str, more: str = "", rules: str = "") -> None:
        text = NODE.format(name=name, more=more, rules=rules)
        (self.folder / name / "node.toml").write_text(text)

    def node(self, name: str) -> Path:
        return self.folder / name / "node.toml"

    def start(self, name: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        command = [sys.executable, "-m", "coterie", "federation", "serve", str(self.node(name))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        log.close()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def state(self, name: str, study: str = "digits") -> str:
        lines = coterie("studies", "--node", self.node(name)).splitlines()
        found = [line for line in lines if line.startswith(f"{study}: ")]
        return found[0].removeprefix(f"{study}: ").partition(",")[0] if found else ""

    def wait_for(self, name: str, state: str, study: str = "digits", seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while (now := self.state(name, study)) != state:
            assert self.processes[name].poll() is None, self.log(name)
            assert time.monotonic() < until, f"{name}: {study} is {now!r}\n{self.log(name)}"
            time.sleep(0.2)

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(30)


@pytest.fixture
def members(tmp_path: Path, port: int) -> Iterator[Members]:
    made = Members(tmp_path, port)
    yield made
    made.close()


def table(frame: pd.DataFrame) -> pd.DataFrame:
    kinds = {c: str for c in frame.columns if isinstance(frame[c].dtype, pd.CategoricalDtype)}
    frame = frame.astype(kinds)
    return frame.sort_values(list(frame.columns)).reset_index(drop=True)


def check_simulation(members: Members, study: str, label: str, folder: Path) -> None:
    """The members' results are those of a simulation of the same study, to the byte."""
    run_study(config.parse_study_text(study), out=folder)
    run = Path(f"digits/{label}/seed-0")
    for kind in ("metrics", "edges"):
        parts = []
        for name in members.names:
            place = members.folder / name / "studies/digits" / name / run
            parts.append(pd.read_parquet(place / f"{kind}.parquet"))
        expected = pd.read_parquet(folder / run / f"{kind}.parquet")
        # Planted clusters are what a simulation alone knows.
        drop = ["cluster"] if "cluster" in expected else []
        # Only peers read each other.
        assert len(expected) > 20 or (kind, label) == ("edges", "fedavg")
        assert table(pd.concat(parts).drop(columns=drop)).equals(table(expected.drop(columns=drop)))


@pytest.mark.full
def test_a_study_that_is_proposed_and_approved_ends_with_the_bytes_of_the_simulation(
    members, tmp_path
):
    """South's service is killed after its approval: it approves, and trains, when it is back."""
    for name in NAMES:
        members.start(name)
    said = coterie("propose", tmp_path / "study.toml", "--node", members.node("north"))
    assert "proposed to north, south, east" in said
    members.wait_for("south", "proposed")
    said = coterie("approve", "digits", "--node", members.node("south"))
    assert "message   2600 bytes of numbers" in said, "(64 + 1) x 10 numbers of 4 bytes"
    assert "1.weight [10, 64], 1.bias [10]" in said
    members.kill("south")
    members.wait_for("east", "proposed")
    coterie("approve", "digits", "--node", members.node("east"))
    members.wait_for("north", "approved")
    members.start("south")
    for name in NAMES:
        members.wait_for(name, "done")
    check_simulation(members, STUDY, "dac", tmp_path / "simulated")
    for name in NAMES:
        place = members.folder / name / "studies/digits" / name
        organizer = members.folder / "organizer"
        said = coterie(
            "net", "audit", place, "--roster", organizer / "roster.toml",
            "--organizer", organizer / "organizer.pub",
        )  # fmt: skip
        assert "keys are those of the organizer's version 3" in said
        assert f"ok     the chain is whole, and signed by {name}" in said
    members.kill("east")
    members.start("east")
    members.wait_for("east", "done")


@pytest.mark.full
def test_a_service_that_is_killed_while_it_trains_goes_on_to_the_bytes_of_the_simulation(
    members, tmp_path
):
    """North has the server role: the others wait for it, and it repeats what it had not stored."""
    study = STUDY.replace("rounds = 4", "rounds = 40").replace("acceptance = true\n", "")
    study = study.replace('"dac"\nnum_peers = 2', '"fedavg"')
    (tmp_path / "study.toml").write_text(study)
    for name in NAMES:
        members.start(name)
    node = members.node("north")
    coterie("propose", tmp_path / "study.toml", "--node", node, "--server", "north")
    for name in ("south", "east"):
        members.wait_for(name, "proposed")
        coterie("approve", "digits", "--node", members.node(name))
    until = time.monotonic() + 60
    while '"event": "round"' not in members.log("north") and time.monotonic() < until:
        time.sleep(0.05)
    members.kill("north")
    assert members.state("north") != "done", "it was over before it was killed"
    members.start("north")
    for name in NAMES:
        members.wait_for(name, "done")
    judged = study.replace("seeds = [0]", "seeds = [0]\nacceptance = { samples = 1e9 }")
    check_simulation(members, judged, "fedavg", tmp_path / "simulated")


def study(name: str, rounds: int) -> str:
    text = STUDY.replace('"digits"\nrounds = 4', f'"{name}"\nrounds = {rounds}')
    assert text != STUDY
    return text


@pytest.mark.full
def test_studies_wait_in_line_and_one_that_is_withdrawn_makes_room(members, tmp_path):
    """Rules approve; the first runs long, is withdrawn while it runs, and the second ends.

    In the second, east stops for itself: two of three are its quorum, and go on.
    """
    rules = '[rules]\nproposers = ["north"]\nmethods = ["dac"]\nrounds = 100000\n'
    for name in ("south", "east"):
        members.write_node(name, rules=rules)
    for name in NAMES:
        members.start(name)
    (tmp_path / "study.toml").write_text(study("endless", 100_000))
    coterie("propose", tmp_path / "study.toml", "--node", members.node("north"), "--data", "digits")
    for name in NAMES:
        members.wait_for(name, "running", "endless")
    (tmp_path / "study.toml").write_text(study("second", 300))
    coterie(
        "propose", tmp_path / "study.toml", "--node", members.node("north"), "--data", "digits",
        "--quorum", "2",
    )  # fmt: skip
    members.wait_for("south", "queued", "second")
    refusal = refused("withdraw", "endless", "--node", members.node("south"))
    assert "proposed by north, who alone withdraws it" in refusal
    coterie("withdraw", "endless", "--node", members.node("north"))
    for name in NAMES:
        members.wait_for(name, "withdrawn", "endless")
        members.wait_for(name, "running", "second")
    coterie("stop", "second", "--node", members.node("east"))
    members.wait_for("east", "stopped", "second")
    for name in ("north", "south"):
        members.wait_for(name, "done", "second")
    stored = tmp_path / "north/studies/endless/north/endless/dac/seed-0/checkpoint.safetensors"
    assert stored.exists(), "what was trained before the end stays"
    for name in NAMES:
        events = [json.loads(line) for line in members.log(name).splitlines()]
        slowest = max(one["seconds"] for one in events if one["event"] == "round")
        assert slowest < 30, "nobody waits for the deadline of 60 seconds for who has left"
        assert "Traceback" not in members.log(name)
        assert members.processes[name].poll() is None
