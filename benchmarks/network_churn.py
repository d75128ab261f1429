"""Nodes that are killed, restarted and cut off, in network namespaces; the others go on."""

import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import netlab
import pandas as pd

from coterie.net import fleet
from coterie.net.process import locate_run
from coterie.studies import config
from coterie.studies.run import run_study

METHODS = {
    "dac": 'kind = "dac"\nnum_peers = 3',
    "pens": 'kind = "pens"\nstage_one_rounds = 15\nnum_sampled = 4\nnum_kept = 2\nnum_peers = 3',
}
DEADLINE = 10.0
NETWORK = {"deadline": DEADLINE, "start": 240.0, "linger": 60.0}
SEEDS = range(5)


@dataclass
class Watched:
    """What was seen of a fleet while it ran.

    Args:
        rounds: (round, seconds, of which exchanging) of each node.
        memory: resident memory of each node, in MB, every half second.
        statuses: the exit status of each node that was not left dead.
    """

    rounds: dict[str, list[tuple[int, float, float]]]
    memory: dict[str, list[float]]
    statuses: dict[str, int | None] = field(default_factory=dict)

    def growth(self, names: list[str]) -> dict[str, float]:
        """Return how each node's memory grew after its start, in MB."""
        return {name: round(netlab.growth(self.memory[name]), 1) for name in names}

    def longest(self, names: list[str]) -> float:
        """Return the longest time that a round of some nodes spent exchanging, in seconds."""
        return round(max(e for name in names for r, _, e in self.rounds[name] if r >= 0), 2)


Step = tuple[float, str, Callable[[fleet.Fleet], Any]]


def watch(
    folder: Path,
    study: config.StudyConfig,
    net: netlab.Bridges,
    steps: list[Step],
    dead: set[str],
    emit: netlab.Emit,
) -> Watched:
    """Run a fleet in namespaces and do something to it at given seconds after its third round."""
    files = fleet.lay_out(folder, study, port=7447, hosts=net.hosts, network=NETWORK)
    (folder / "logs").mkdir()
    names, begun = list(files), threading.Event()
    seen = Watched({n: [] for n in names}, {n: [] for n in names})

    def listen(name: str, event: Any) -> None:
        if event["event"] == "round":
            seen.rounds[name].append((event["round"], event["seconds"], event["exchanging"]))
            if event["round"] >= 2:
                begun.set()

    def look(nodes: fleet.Fleet) -> None:
        threading.Event().wait(0.5)
        for name, process in nodes.processes.items():
            memory = netlab.resident(process.pid) if process.poll() is None else None
            if memory is not None:
                seen.memory[name].append(memory)

    behind = {name: net.inside(number) for number, name in enumerate(names)}
    with fleet.Fleet(files, logs=folder / "logs", listener=listen, behind=behind) as nodes:
        for name in names:
            nodes.start(name)
        assert begun.wait(400), "the nodes have not begun"
        start = time.monotonic()
        for at, what, act in sorted(steps, key=lambda step: step[0]):
            while time.monotonic() - start < at:
                look(nodes)
            act(nodes)
            emit({"at": round(at, 1), "event": what})
        until = time.monotonic() + 1200
        while (
            any(p.poll() is None for n, p in nodes.processes.items() if n not in dead)
            and time.monotonic() < until
        ):
            look(nodes)
        seen.statuses = {n: p.poll() for n, p in nodes.processes.items() if n not in dead}
    return seen


def accuracies(folder: Path, study: config.StudyConfig, names: list[str]) -> dict[int, float]:
    """Return the final accuracy of the clients of some nodes."""
    out: dict[int, float] = {}
    for name in names:
        out |= netlab.final_accuracy(locate_run(folder / "nodes" / name, study))
    return out


def unharmed(folder: Path, method: str, seen: list[int], **options: Any) -> list[float]:
    """Return the mean final accuracy of some clients in simulations that nothing happens to, seed by seed."""
    out = []
    for seed in SEEDS:
        study = netlab.study_of(METHODS[method], seed=seed, **options)
        run_study(study, out=folder / f"unharmed-{seed}")
        found = netlab.final_accuracy(locate_run(folder / f"unharmed-{seed}", study))
        out.append(round(statistics.mean(found[c] for c in seen), 2))
    return out


def outcome(
    folder: Path,
    study: config.StudyConfig,
    seen: Watched,
    ended: list[str],
    method: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return what every run reports: rounds, accuracy of it and of unharmed runs, and the replay."""
    names = list(seen.rounds)
    found = accuracies(folder, study, ended)
    places = [locate_run(folder / "nodes" / name, study) for name in names]
    return {
        "method": method, "nodes": len(names), "rounds": options["rounds"], "deadline_s": DEADLINE,
        "statuses": seen.statuses,
        "rounds_finished": {n: len({r for r, *_ in v if r >= 0}) for n, v in seen.rounds.items()},
        "accuracy": round(statistics.mean(found.values()), 2), "clients": sorted(found),
        "unharmed_accuracy": unharmed(folder.parent, method, sorted(found), **options),
        "replay_difference": netlab.difference_of_replay(study, places, {names.index(name) for name in ended}),
    }  # fmt: skip


def churn(emit: netlab.Emit, folder: Path, *, method: str = "dac") -> None:
    """Twelve nodes; four killed at random moments, two of them started again, one cut off for 20 s."""
    options = {"clients": 12, "rounds": 40, "train": 105, "epochs": 8}
    study, draw = netlab.study_of(METHODS[method], **options), random.Random(1)
    names = [f"node-{number:02d}" for number in range(12)]
    victims, cut = draw.sample(names, 4), 0
    cut = next(n for n in range(12) if names[n] not in victims)
    with netlab.bridges(12) as net:
        steps: list[Step] = [
            (12.0, f"{names[cut]} cut off", lambda nodes: net.plug(cut, "down")),
            (32.0, f"{names[cut]} connected again", lambda nodes: net.plug(cut, "up")),
        ]
        for number, victim in enumerate(victims):
            at = draw.uniform(0, 40)
            steps.append((at, f"{victim} killed", lambda nodes, victim=victim: nodes.kill(victim)))
            if number < 2:
                again = (
                    at + 8,
                    f"{victim} started again",
                    lambda nodes, victim=victim: nodes.start(victim),
                )
                steps.append(again)
        dead = set(victims[2:])
        seen = watch(folder / "churn", study, net, steps, dead, emit)
    whole = [n for n in names if n not in victims and n != names[cut]]
    ended = [n for n in names if n not in dead]
    emit({
        **outcome(folder / "churn", study, seen, ended, method, options),
        "killed": victims, "restarted": victims[:2], "cut_off": names[cut],
        "longest_exchange_s": seen.longest(whole), "median_round_s": round(statistics.median(
            s for n in whole for r, s, _ in seen.rounds[n] if r >= 0), 2),
        "memory_mb": {n: round(max(seen.memory[n]), 1) for n in whole}, "memory_growth_mb": seen.growth(whole),
    })  # fmt: skip


def partition(emit: netlab.Emit, folder: Path) -> None:
    """Six nodes in two halves; the cable between the halves is pulled for 20 s: both go on, and meet again."""
    options = {"clients": 6, "rounds": 40, "train": 105, "epochs": 8}
    study, names = (
        netlab.study_of(METHODS["dac"], **options),
        [f"node-{number:02d}" for number in range(6)],
    )
    times: dict[str, float] = {}

    def pull(state: str) -> Callable[[fleet.Fleet], None]:
        def act(nodes: fleet.Fleet) -> None:
            net.join(state)
            times[state] = time.time()

        return act

    with netlab.bridges(6) as net:
        steps: list[Step] = [
            (3.0, "the halves are parted", pull("down")),
            (23.0, "joined again", pull("up")),
        ]
        seen = watch(folder / "partition", study, net, steps, set(), emit)
    edges = pd.concat(
        pd.read_parquet(locate_run(folder / "partition/nodes" / name, study) / "edges.parquet")
        for name in names
    )
    arrived = edges[edges["purpose"].astype(str) != "missing"]
    across = arrived[arrived["reader"] % 2 != arrived["read"] % 2]["round"].tolist()
    alone = sorted(set(range(40)) - set(across))
    assert alone, "the halves were never apart"
    emit({
        **outcome(folder / "partition", study, seen, names, "dac", options),
        "rounds_apart": [alone[0], alone[-1]], "reads_across_after": sum(round > alone[-1] for round in across),
        "longest_exchange_s": seen.longest(names), "memory_growth_mb": seen.growth(names),
    })  # fmt: skip
