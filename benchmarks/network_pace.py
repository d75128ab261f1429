"""One slow member of eight: what do the others lose, and who is named?

Eight nodes inside one program, with certificates and mutual TLS. Each node is that of `coterie
node`, with its default settings.
"""

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import netlab

from coterie.net import fleet, nodefile
from coterie.net.node import Node
from coterie.net.process import open_node
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
