"""Masked sums between processes, with TLS: the bytes of the simulation, and servers and members that are killed."""

import json
import threading
from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest
from tests.e2e.test_net import QUICK, STUDY, table
from tests.selection import full

from coterie.net import fleet
from coterie.studies import config
from coterie.studies.run import run_study

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("killed", [full(""), full("node-00"), full("node-02")])
def test_four_processes_mask_their_models(tmp_path, port, killed):
    """Whole, the bytes are those of one process. Killed in a round, the node goes on, and so do all others."""
    text = STUDY.replace("rounds = 4", "rounds = 6") + "\n[secure_aggregation]\nthreshold = 0.6\n"
    study = config.parse_study_text(text).select_run("fedavg", 0)
    # The others wait longer for the one that comes back than it takes to start on a busy machine.
    network = QUICK | ({"deadline": 20.0, "linger": 120.0} if killed else {})
    files = fleet.lay_out(tmp_path, study, port=port, network=network)
    (tmp_path / "logs").mkdir()
    past = threading.Event()

    def look(name: str, event: Mapping[str, Any]) -> None:
        if name == killed and event["event"] == "round" and event["round"] == 1:
            past.set()

    with fleet.Fleet(files, logs=tmp_path / "logs", listener=look) as nodes:
        for name in files:
            nodes.start(name)
        if killed:
            assert past.wait(120)
            nodes.kill(killed)
            nodes.start(killed)
        assert nodes.wait(180) == dict.fromkeys(files, 0), (
            tmp_path / "logs" / "node-00.log"
        ).read_text()
    (arrivals,) = (tmp_path / "nodes" / "node-00").rglob("arrivals.jsonl")
    events = [json.loads(line) for line in arrivals.read_text().splitlines()]
    sums = [event for event in events if event["event"] == "sum"]
    # A node that was killed may miss a round; three of four are enough for a sum.
    assert len({event["round"] for event in sums}) >= 5
    assert all(len(event["arrived"]) >= 3 for event in sums)
    if not killed:
        joined = fleet.join_results(tmp_path, study, list(files), "nodes")
        run_study(study, out=tmp_path / "simulated")
        run = tmp_path / "simulated" / "four" / "fedavg" / "seed-0"
        for name in ("metrics", "edges"):
            assert table(joined[name]).equals(table(pd.read_parquet(run / f"{name}.parquet")))
