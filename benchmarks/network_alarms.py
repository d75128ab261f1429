"""Many honest nodes at once on a machine that is too small for them: nobody may be turned away, refused or missed."""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import netlab

from coterie.net import fleet
from coterie.net.process import locate_run
from coterie.studies import config

NODES, ROUNDS = 32, 6
PORT = 23700
STUDY = """
name = "alarms"
rounds = {rounds}
seeds = [0]
engine = "loop"
acceptance = true
model = {{ kind = "linear" }}
data = {{ dataset = "digits", num_clients = {nodes}, train = 24, validation = 8 }}

[[methods]]
kind = "dac"
num_peers = 5
"""
NETWORK = {"deadline": 60.0, "start": 600.0, "linger": 120.0}
ALARMS = ("turned_away", "refused", "mismatch", "roster_refused", "not_backed")


def run_fleet(
    folder: Path, *, nodes: int, rounds: int, port: int, network: Mapping[str, Any] = NETWORK
) -> tuple[dict[str, list[Mapping[str, Any]]], dict[str, int]]:
    """Run a fleet to its end and return the events of each node, and the exit statuses."""
    files = fleet.lay_out(
        folder,
        config.parse_study_text(STUDY.format(nodes=nodes, rounds=rounds)),
        port=port,
        network=network,
    )
    (folder / "logs").mkdir()
    events: dict[str, list[Mapping[str, Any]]] = {name: [] for name in files}
    with fleet.Fleet(
        files, logs=folder / "logs", listener=lambda name, event: events[name].append(event)
    ) as running:
        for name in files:
            running.start(name)
        statuses = running.wait(1800)
    return events, statuses


def alarms(emit: netlab.Emit, folder: Path) -> None:
    """Thirty-two processes with mutual TLS, all started at once; every event that accuses somebody is counted."""
    began = time.perf_counter()
    events, statuses = run_fleet(folder / "alarms", nodes=NODES, rounds=ROUNDS, port=PORT)
    found: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    rounds, longest = set(), 0.0
    for name, told in events.items():
        for event in told:
            if event["event"] in ALARMS:
                kind = " ".join(
                    str(event[key]) for key in ("event", "reason", "code", "text") if key in event
                )
                found[re.sub(r"node-\d\d", "node-..", kind)] += event.get("times", 1)
            if event["event"] == "round" and event["round"] >= 0:
                longest = max(longest, event["exchanging"])
        rounds.add(len({e["round"] for e in told if e["event"] == "round" and e["round"] >= 0}))
        journal = locate_run(folder / "alarms/nodes" / name, _study()) / "arrivals.jsonl"
        for line in journal.read_text().splitlines():
            missing.update((json.loads(line).get("missing") or {}).values())
    emit({
        "nodes": NODES, "rounds": ROUNDS, "rounds_finished": sorted(rounds), "alarms": dict(found),
        "missing": dict(missing), "statuses": sorted(set(statuses.values())), "deadline_s": NETWORK["deadline"],
        "longest_exchange_s": round(longest, 2), "seconds": round(time.perf_counter() - began, 1),
    })  # fmt: skip


def _study() -> config.StudyConfig:
    study = config.parse_study_text(STUDY.format(nodes=NODES, rounds=ROUNDS))
    return study.select_run(study.methods[0].label, 0)
