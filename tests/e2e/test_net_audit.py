"""Audit logs of real nodes over mutual TLS, one of which ends on a full disk and goes on."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from coterie.cli.app import NO_ROOM, app
from coterie.net import fleet
from coterie.studies import config
from coterie.studies.run import run_study

pytestmark = pytest.mark.e2e

STUDY = """
name = "three"
rounds = 5
seeds = [0]
acceptance = true
model = { kind = "linear" }
engine = "loop"
data = { dataset = "digits", num_clients = 3, train = 16, validation = 8 }

[[methods]]
kind = "fedavg"
"""
QUICK = {"deadline": 60.0, "start": 90.0, "linger": 20.0}
SMALL = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (15000, 15000))
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a program that cannot write a file of more than 15 kB: its disk is full in the middle of the run."""


def table(path: Path) -> pd.DataFrame:
    frame = pd.read_parquet(path)
    frame = frame.astype(
        {c: str for c in frame.columns if isinstance(frame[c].dtype, pd.CategoricalDtype)}
    )
    return frame.sort_values(list(frame.columns)).reset_index(drop=True)


@pytest.mark.slow
def test_a_server_on_a_full_disk_ends_with_75_goes_on_to_the_same_bytes_and_all_logs_agree(
    tmp_path, port
):
    study = config.parse_study_text(STUDY)
    files = fleet.lay_out(tmp_path, study, port=port, network=QUICK)
    (tmp_path / "logs").mkdir()
    behind = {"node-00": [sys.executable, "-c", SMALL]}
    with fleet.Fleet(files, logs=tmp_path / "logs", behind=behind) as nodes:
        for name in files:
            nodes.start(name)
        assert nodes.processes["node-00"].wait(270) == NO_ROOM
        del behind["node-00"]
        nodes.start("node-00")
        assert nodes.wait(270) == dict.fromkeys(files, 0), (
            tmp_path / "logs" / "node-00.log"
        ).read_text()
    said = (tmp_path / "logs" / "node-00.log").read_text().splitlines()
    events = [json.loads(line) for line in said if line.startswith("{")]
    names = [event["event"] for event in events]
    assert names.index("round") < names.index("disk_full"), "it ended in the middle of the run"
    full = names.index("disk_full")
    last = max(event["time"] for event in events[:full] if event["event"] == "round")
    assert events[full]["time"] - last < QUICK["deadline"] / 3, "and waited for nobody's answer"
    (line,) = [line for line in said if line.startswith("coterie: ")]
    assert "cannot write: File too large" in line
    assert "when there is room, start again" in line

    fleet.join_results(tmp_path, study, list(files), "nodes")
    run_study(study, out=tmp_path / "simulated")
    run = Path("seed-0", "metrics.parquet")
    simulated = table(tmp_path / "simulated/three/fedavg" / run)
    assert table(tmp_path / "runs/three/nodes" / run).equals(simulated)

    logs = [tmp_path / "nodes" / name for name in files]
    arguments = [
        *logs,
        "--roster",
        tmp_path / "keys/roster.toml",
        "--organizer",
        tmp_path / "keys/organizer.pub",
    ]
    result = CliRunner().invoke(app, ["net", "audit", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert result.output.count("the chain is whole") == 3
    assert result.output.count("agree on what they sent each other") == 3
    assert "starts: 2" in result.output
