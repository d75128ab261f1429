"""A member gets a new key and another one is removed while everybody exchanges as fast as it can."""

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import netlab
import network_alarms

from coterie.net import fleet, identity, setup
from coterie.net.process import locate_run
from coterie.studies import config

NODES, ROUNDS, PORT = 8, 120, 23900
REKEYED, REMOVED = "node-06", "node-07"
REKEY_AT, REMOVE_AT = 20, 50  # rounds of the first node
DEADLINE = 30.0


def renewals(emit: netlab.Emit, folder: Path) -> None:
    """Eight processes; the organizer signs a new key for one at round 20, and leaves another one out at round 50."""
    study = config.parse_study_text(network_alarms.STUDY.format(nodes=NODES, rounds=ROUNDS))
    place = folder / "renewals"
    network = {"deadline": DEADLINE, "start": 300.0, "linger": 60.0}
    files = fleet.lay_out(place, study, port=PORT, network=network)
    (place / "logs").mkdir()
    request = identity.make_request(place / "new", REKEYED, f"127.0.0.1:{PORT + 6}")
    events: dict[str, list[Mapping[str, Any]]] = {name: [] for name in files}
    signed: dict[str, float] = {}
    due = {"rekeyed": threading.Event(), "removed": threading.Event()}

    def listen(name: str, event: Mapping[str, Any]) -> None:
        events[name].append(event)
        if name == "node-00" and event["event"] == "round":
            for what, at in (("rekeyed", REKEY_AT), ("removed", REMOVE_AT)):
                if event["round"] >= at:
                    due[what].set()

    with fleet.Fleet(files, logs=place / "logs", listener=listen) as nodes:
        for name in files:
            nodes.start(name)
        assert due["rekeyed"].wait(600), "the nodes have not come so far"
        signed["rekeyed"] = time.time()
        setup.rekey_member(place / "keys", REKEYED, request)
        first = nodes.processes[REKEYED].wait(120)  # it ends, and says what to do
        (place / "keys" / f"{REKEYED}.key").write_bytes(
            (place / "new" / f"{REKEYED}.key").read_bytes()
        )
        nodes.start(REKEYED)
        assert due["removed"].wait(600), "the nodes have not come so far"
        signed["removed"] = time.time()
        setup.remove_member(place / "keys", REMOVED)
        statuses = nodes.wait(900)
    honest = [name for name in files if name not in (REKEYED, REMOVED)]
    emit({
        "nodes": NODES, "rounds": ROUNDS, "deadline_s": DEADLINE, "rekeyed_at": REKEY_AT, "removed_at": REMOVE_AT,
        "statuses": {**statuses, f"{REKEYED} (old key)": first},
        "rounds_finished": {n: len(_rounds(events[n])) for n in files},
        "seconds_to_take": {what: _taken(events, honest, signed, what) for what in signed},
        "longest_exchange_s": round(max(e["exchanging"] for n in honest for e in _rounds(events[n])), 2),
        "missing": dict(_missing(place, study, honest)), "refused": sum(
            e["event"] == "refused" for n in honest for e in events[n]),
        "turned_away": dict(Counter(
            f"{e['reason']} {e.get('peer', '')}".strip() for n in honest for e in events[n]
            if e["event"] == "turned_away")),
    })  # fmt: skip


def _rounds(told: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({e["round"]: e for e in told if e["event"] == "round" and e["round"] >= 0}.values())


def _taken(
    events: Mapping[str, list[Mapping[str, Any]]],
    names: list[str],
    signed: Mapping[str, float],
    what: str,
) -> list[float]:
    """Seconds from the organizer's signature until each node goes on under the new roster, and its rounds meanwhile."""
    out = []
    for name in names:
        at = next(e["time"] for e in events[name] if e["event"] == "roster" and e[what])
        out.append(round(at - signed[what], 2))
    return out


def _missing(place: Path, study: config.StudyConfig, names: list[str]) -> Counter[str]:
    """Why messages of the nodes that stayed did not come to each other."""
    found: Counter[str] = Counter()
    for name in names:
        journal = (
            locate_run(place / "nodes" / name, study.select_run(study.methods[0].label, 0))
            / "arrivals.jsonl"
        )
        for line in journal.read_text().splitlines():
            for client, why in (json.loads(line).get("missing") or {}).items():
                of = "of the two" if int(client) in (6, 7) else "of the others"
                found[f"{why}, {of}"] += 1
    return found
