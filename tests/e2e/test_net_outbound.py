"""Members that accept no connection, as processes: the bytes of the simulation, through relays that die and come back."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tests.selection import full

from benchmarks.web_proxy import WebProxy
from coterie.net import fleet
from coterie.studies import config
from coterie.studies.run import run_study

pytestmark = pytest.mark.e2e

STUDY = """
name = "four"
rounds = 6
seeds = [0]
model = { kind = "linear" }
engine = "loop"
acceptance = true

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
"""
PATIENT = {
    "deadline": 60.0,
    "start": 200.0,
    "linger": 20.0,
    "slow": 0.0,
    "lease": 2.0,
    "min_peers": 3,
}


def table(frame: pd.DataFrame) -> pd.DataFrame:
    texts = [c for c in frame.columns if isinstance(frame[c].dtype, pd.CategoricalDtype)]
    frame = frame.astype(dict.fromkeys(texts, str))
    return frame.sort_values(list(frame.columns)).reset_index(drop=True)


def check_equal(folder: Path, study: config.StudyConfig, names: list[str]) -> None:
    """The results of the nodes are those of a simulation, to the byte."""
    joined = fleet.join_results(folder, study, names, "nodes")
    run_study(study, out=folder / "simulated")
    label = study.methods[0].label
    run = folder / "simulated" / "four" / label / "seed-0"
    for name in ("metrics", "edges"):
        assert table(joined[name]).equals(table(pd.read_parquet(run / f"{name}.parquet"))), name


def relay_files(folder: Path, number: int) -> dict[str, Path]:
    return {f"relay-{i}": folder / f"relay-{i}.toml" for i in range(number)}


@pytest.mark.parametrize(
    ("label", "outbound", "relays"),
    [
        full("dac", [0, 1, 2, 3], 1, slow=True),
        full("fedavg", [1, 2, 3], 0, slow=True),
        full("fedavg", [0, 1, 3], 1, slow=True),
    ],
)
def test_members_that_only_dial_out_end_with_the_bytes_of_the_simulation(
    tmp_path, port, label, outbound, relays
):
    """Peers that nobody can dial; a server with clients that only dial out, and no relay; a server that does too."""
    study = config.parse_study_text(STUDY).select_run(label, 0)
    files = fleet.lay_out(
        tmp_path, study, port=port, network=PATIENT, outbound=outbound, relays=relays
    )
    more = relay_files(tmp_path, relays)
    with fleet.Fleet({**files, **more}, logs=tmp_path) as nodes:
        for name in (*more, *files):
            nodes.start(name)
        for name in files:
            assert nodes.processes[name].wait(120) == 0, (tmp_path / f"{name}.log").read_text()
    check_equal(tmp_path, study, list(files))


@pytest.mark.slow
@pytest.mark.parametrize("label", ["dac", "fedavg"])
def test_eight_members_of_which_six_dial_out_through_one_proxy_and_one_relay(tmp_path, port, label):
    """The bytes of the simulation; all connections to others are made by the proxy."""
    text = STUDY.replace("num_clients = 4", "num_clients = 8")
    study = config.parse_study_text(text).select_run(label, 0)
    with WebProxy(port + 50) as proxy:
        network = {**PATIENT, "min_peers": 7, "proxy": proxy.url}
        files = fleet.lay_out(
            tmp_path, study, port=port, network=network, outbound=[2, 3, 4, 5, 6, 7], relays=1
        )
        more = relay_files(tmp_path, 1)
        with fleet.Fleet({**files, **more}, logs=tmp_path) as nodes:
            for name in (*more, *files):
                nodes.start(name)
            for name in files:
                assert nodes.processes[name].wait(240) == 0, (tmp_path / f"{name}.log").read_text()
        # Two members and the relay are dialed; nobody else can be.
        assert len(set(proxy.asked)) == 3
    check_equal(tmp_path, study, list(files))


@pytest.mark.slow
def test_a_relay_is_killed_again_and_again_and_one_of_two_for_good(tmp_path, port):
    """Three of four members only dial out. One relay dies in round 0; the other is killed and started in each round after."""
    study = config.parse_study_text(STUDY).select_run("dac", 0)
    files = fleet.lay_out(tmp_path, study, port=port, network=PATIENT, outbound=[1, 2, 3], relays=2)
    more, killed, reached = relay_files(tmp_path, 2), [], threading.Semaphore(0)

    def look(name: str, event: Mapping[str, Any]) -> None:
        if name == "node-01" and event["event"] == "round":
            reached.release()

    with fleet.Fleet({**files, **more}, logs=tmp_path, listener=look) as nodes:
        for name in (*more, *files):
            nodes.start(name)
        for number in range(5):
            assert reached.acquire(timeout=120)
            nodes.kill("relay-1" if number == 0 else "relay-0")
            killed.append(number)
            if number:
                nodes.start("relay-0")
        for name in files:
            assert nodes.processes[name].wait(240) == 0, (tmp_path / f"{name}.log").read_text()
    assert len(killed) == 5
    check_equal(tmp_path, study, list(files))
