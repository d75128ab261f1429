"""One slow member of eight, and two of twelve that wait for nobody: what do the others lose?

Eight nodes inside one program, with certificates and mutual TLS. Each node is that of `coterie
node`, with its default settings. The twelve are processes.
"""

import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import netlab
import pandas as pd

from coterie.net import fleet, nodefile
from coterie.net import replay as replays
from coterie.net.node import Node
from coterie.net.process import locate_run, open_node
from coterie.net.transport import WAIT

NODES, AFTER, PORT = 8, 5, 30100
NETWORK = {"start": 120.0, "linger": 10.0}
STUDY = """
name = "pace"
rounds = {rounds}
seeds = [0]
engine = "loop"
acceptance = true
model = {{ kind = "linear" }}
data = {{ dataset = "digits", num_clients = {nodes}, train = 60, validation = 60 }}
local = {{ epochs = 1, lr = 0.003 }}

[[methods]]
{method}
"""
DAC, FEDAVG = "kind = 'dac'\nnum_peers = 2", "kind = 'fedavg'"
LATE = 25.0  # seconds


def nothing(node: Node) -> None:
    """Takes part as it should."""


def drip(node: Node) -> None:
    """Answers every question for a model at 0.95 of the asker's wait."""
    outbox = node.transport.outbox  # type: ignore[attr-defined]
    ask = outbox.ask

    def late(asker: str, address: Any, wait: float, answer: Any) -> None:
        later = threading.Timer(0.95 * wait / WAIT, ask, (asker, address, 1.0, answer))
        later.daemon = True
        later.start()

    outbox.ask = late


def tarpit(node: Node) -> None:
    """Never answers a question for a model, and says in its heads that it keeps pace."""
    node.transport.outbox.ask = lambda asker, address, wait, answer: None  # type: ignore[attr-defined]


def behind(node: Node) -> None:
    """Comes to every round 25 s after the others."""
    run_next = node.loop.run_next_round

    def late() -> None:
        node._stop.wait(LATE)
        run_next()

    node.loop.run_next_round = late  # type: ignore[method-assign]


# what the last member does, with which method, and in how many rounds
KINDS: dict[str, tuple[Callable[[Node], None], str, int]] = {
    "none": (nothing, DAC, 120),
    "drip": (drip, DAC, 120),
    "tarpit": (tarpit, DAC, 120),
    "late client": (behind, FEDAVG, 12),
}


def play(folder: Path, name: str, port: int) -> netlab.Result:
    """Run all nodes to their end and return the pace of the honest ones, and who is named."""
    slow, method, rounds = KINDS[name]
    study = netlab.config.parse_study_text(STUDY.format(rounds=rounds, nodes=NODES, method=method))
    files = fleet.lay_out(folder, study, port=port, network=NETWORK)
    names = list(files)
    lines: dict[str, list[dict[str, Any]]] = {node: [] for node in names}
    ended: dict[tuple[str, int], float] = {}

    def host(own: str) -> None:
        with ExitStack() as stack:
            node = stack.enter_context(open_node(nodefile.load(files[own])))
            node.log.stream = _Lines(lines[own], ended)
            if own == names[-1]:
                slow(node)
            nodes.append(node)
            node.run()

    nodes: list[Node] = []
    with ThreadPoolExecutor(NODES) as pool:
        running = {own: pool.submit(host, own) for own in names}
        for own in names[:-1]:
            running[own].result(1200)
        for node in nodes:
            node.close()  # one that was left out would wait for its server for ten minutes
    honest = [ended[own, rounds - 1] - ended[own, AFTER - 1] for own in names[:-1]]
    warned = [e for own in names[:-1] for e in lines[own] if e["level"] in ("warning", "error")]
    waits = [
        e["exchanging"] for own in names[:-1] for e in lines[own]
        if e["event"] == "round" and e["round"] >= AFTER
    ]  # fmt: skip
    return {
        "kind": name, "what": " ".join((slow.__doc__ or "").split()), "nodes": NODES, "rounds": rounds,
        "after": AFTER, "ms_a_round": round(1000 * statistics.median(honest) / (rounds - AFTER), 1),
        "longest_exchange_s": round(max(waits), 2),
        "warnings": len(warned), "warnings_that_name_it": sum(names[-1] in json.dumps(e) for e in warned),
        "slow": dict(Counter(e["peer"] for e in warned if e["event"] == "slow")),
        "events": dict(Counter(e["event"] for e in warned)),
    }  # fmt: skip


class _Lines:
    """Takes what a log writes, and when a round has ended."""

    def __init__(self, lines: list[dict[str, Any]], ended: dict[tuple[str, int], float]) -> None:
        self._lines, self._ended = lines, ended

    def write(self, text: str) -> None:
        """Take a line."""
        event = json.loads(text)
        self._lines.append(event)
        if event["event"] == "round":
            self._ended[event["node"], event["round"]] = time.monotonic()

    def flush(self) -> None:
        """Nothing is held back."""


def pace(emit: netlab.Emit, folder: Path, names: list[str] | None = None) -> None:
    """Every kind in turn, twice with and without the member that drips."""
    order = names or ["none", "drip", "none", "drip", "tarpit", "late client"]
    for number, name in enumerate(order):
        emit(play(folder / str(number), name, PORT + 10 * number))


# ---------------------------------------------------------------- nodes that wait for nobody

FREE_NODES, FREE_SLOW, FREE_ROUNDS = 12, 2, 20
TRAINING, TIMES = 0.8, 10  # seconds of a training; how many times as long a slow one takes
FREE = """
pace = "free"
max_staleness = 30
"""


def _wait_for_nobody(folder: Path, slow: int, port: int) -> netlab.Result:
    """Run twelve processes, of which the last ones are slow, and repeat the run from the journals."""
    text = STUDY.format(rounds=FREE_ROUNDS, nodes=FREE_NODES, method=DAC)
    study = netlab.config.parse_study_text(FREE + text)
    files = fleet.lay_out(folder, study, port=port, network={**NETWORK, "linger": 60.0})
    names, script = list(files), Path(__file__).parent / "_slow_node.py"
    seconds = {name: TRAINING for name in names}
    for name in names[FREE_NODES - slow :]:
        seconds[name] *= TIMES
    behind = {name: [sys.executable, str(script), str(seconds[name])] for name in names}
    (folder / "logs").mkdir()
    with fleet.Fleet(files, logs=folder / "logs", behind=behind) as nodes:
        for name in names:
            nodes.start(name)
        nodes.wait(900)
    runs = [locate_run(folder / "nodes" / name, study) for name in names]
    took, ages, missing = [], list[float](), 0
    for run in runs:
        frame = pd.read_parquet(run / "metrics.parquet")
        ends = frame.loc[(frame["metric"] == "elapsed_seconds").to_numpy(), "value"].to_numpy()
        took.append(float(ends[-1] - ends[AFTER - 1]) / (FREE_ROUNDS - AFTER))
        edges = pd.read_parquet(run / "edges.parquet")
        missing += int((edges["purpose"].to_numpy() == "missing").sum())
        ages += [float(age) for age in edges["age"].to_numpy() if age >= 0]
    began = time.perf_counter()
    plan, roster, members = replays.load_members(list(files.values()))
    loops = replays.replay(plan, roster, members)
    equal = [not replays.compare_with_stored(one, loops[one.name]) for one in members]
    fast = took[: FREE_NODES - slow]
    return {
        "nodes": FREE_NODES, "slow": slow, "times": TIMES, "training_s": TRAINING,
        "rounds": FREE_ROUNDS, "after": AFTER,
        "s_a_round": round(statistics.median(fast), 4), "slowest_s_a_round": round(max(fast), 4),
        "s_a_round_of_the_slow": [round(each, 3) for each in took[FREE_NODES - slow :]],
        "read": len(ages), "missing": missing, "mean_age": round(statistics.mean(ages), 2),
        "oldest": int(max(ages)), "equal_to_the_byte": sum(equal),
        "replay_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def free(emit: netlab.Emit, folder: Path) -> None:
    """Twelve nodes that wait for nobody: all alike, two of them slow, and all alike again."""
    for number, slow in enumerate((0, FREE_SLOW, 0)):
        emit(_wait_for_nobody(folder / str(number), slow, PORT + 100 + 20 * number))
