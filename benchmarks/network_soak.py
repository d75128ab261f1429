"""Nodes that go through many rounds: do memory, threads and open files stay what they are after the start?"""

import os
import statistics
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
