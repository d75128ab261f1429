"""Nodes that go through many rounds: do memory, threads and open files stay what they are after the start?"""

import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import netlab

from coterie.net import fleet

METHODS = {"dac": 'kind = "dac"\nnum_peers = 2', "fedavg": 'kind = "fedavg"'}
NODES, ROUNDS, LOOKS = 3, 1000, 40
NETWORK = {"deadline": 30.0, "start": 120.0, "linger": 60.0}


def count(pid: int) -> tuple[float, int, int] | None:
    """Return a process's resident memory in MB, its threads and its open files; None when it is gone."""
    memory = netlab.resident(pid)
    try:
        places = Path(f"/proc/{pid}")
        threads, files = len(os.listdir(places / "task")), len(os.listdir(places / "fd"))
    except OSError:
        return None
    return None if memory is None else (memory, threads, files)


def slope(rounds: list[int], values: list[float]) -> float:
    """Return by how much values grow in 100 rounds: the line of least squares."""
    return 100 * statistics.linear_regression(rounds, values).slope


def soak(emit: netlab.Emit, folder: Path, *, rounds: int = ROUNDS, port: int = 27600) -> None:
    """Three nodes, many rounds of a small model; each node is looked at after every round."""
    for number, (name, method) in enumerate(METHODS.items()):
        study = netlab.study_of(method, clients=NODES, rounds=rounds, train=30)
        place = folder / f"soak-{name}"
        files = fleet.lay_out(place, study, port=port + 10 * number, network=NETWORK)
        (place / "logs").mkdir()
        seen: dict[str, list[tuple[int, float, int, int]]] = {node: [] for node in files}

        def listen(
            node: str, event: Any, seen: dict[str, list[tuple[int, float, int, int]]] = seen
        ) -> None:
            if event["event"] == "round" and (found := count(nodes.processes[node].pid)):
                seen[node].append((event["round"], *found))

        with fleet.Fleet(files, logs=place / "logs", listener=listen) as nodes:
            for node in files:
                nodes.start(node)
            statuses = nodes.wait(3000)
        assert set(statuses.values()) == {0}, statuses
        for node, looks in seen.items():
            half = [look for look in looks if look[0] >= rounds // 2]
            at, memory, threads, open_files = (list(column) for column in zip(*half, strict=True))
            every = looks[:: max(1, len(looks) // LOOKS)]
            emit({
                "method": name, "node": node, "rounds": rounds, "watched_from": rounds // 2,
                "slope_mb_per_100_rounds": round(slope(at, memory), 3),
                "range_mb": [round(min(memory), 1), round(max(memory), 1)],
                "threads": [min(threads), max(threads)], "open_files": [min(open_files), max(open_files)],
                "looks": [[r, round(m, 1)] for r, m, *_ in every],
            })  # fmt: skip


def written_bytes(place: Path, node: str) -> int:
    """Return the bytes of a node's log, journal and audit log."""
    own = [place / "logs" / f"{node}.log", *(place / "nodes" / node).rglob("*.jsonl")]
    own += (place / "nodes" / node).glob("audit*.log")
    return sum(path.stat().st_size for path in own)


def soak_for(emit: netlab.Emit, folder: Path, *, minutes: float = 60.0, port: int = 27660) -> None:
    """Three nodes for as long as it says, then ended by SIGTERM: memory, open files, bytes of logs a round."""
    study = netlab.study_of(METHODS["dac"], clients=NODES, rounds=1_000_000, train=30)
    place = folder / "hour"
    files = fleet.lay_out(place, study, port=port, network=NETWORK)
    (place / "logs").mkdir()
    reached, warnings = dict.fromkeys(files, -1), dict.fromkeys(files, 0)

    def listen(node: str, event: Any) -> None:
        if event["event"] == "round":
            reached[node] = event["round"]
        warnings[node] += event["level"] in ("warning", "error")

    looks: dict[str, list[tuple[float, int, float, int, int, int]]] = {node: [] for node in files}
    with fleet.Fleet(files, logs=place / "logs", listener=listen) as nodes:
        for node in files:
            nodes.start(node)
        began = time.monotonic()
        while (passed := time.monotonic() - began) < 60 * minutes:
            threading.Event().wait(15.0)
            for node, process in nodes.processes.items():
                found = count(process.pid)
                assert found is not None, f"{node} has ended"
                looks[node].append((passed, reached[node], *found, written_bytes(place, node)))
        for process in nodes.processes.values():
            process.terminate()
        statuses = nodes.wait(60)
    for node, seen in looks.items():
        half = [look for look in seen if look[0] > 30 * minutes]
        rounds = half[-1][1] - half[0][1]
        every = seen[:: max(1, len(seen) // LOOKS)]
        emit({
            "method": "dac", "node": node, "minutes": minutes, "rounds": seen[-1][1], "status": statuses[node],
            "warnings": warnings[node],
            "mb_per_hour_second_half": round(60 * 60 * statistics.linear_regression(
                [look[0] for look in half], [look[2] for look in half]).slope, 2),
            "range_mb": [round(min(look[2] for look in half), 1), round(max(look[2] for look in half), 1)],
            "threads": [min(look[3] for look in half), max(look[3] for look in half)],
            "open_files": [min(look[4] for look in half), max(look[4] for look in half)],
            "log_bytes_a_round": round((half[-1][5] - half[0][5]) / rounds),
            "rounds_a_second": [round(part[-1][1] / part[-1][0], 2) for part in (seen[: len(seen) // 2], seen)],
            "looks": [[look[1], round(look[2], 1)] for look in every],
        })  # fmt: skip
