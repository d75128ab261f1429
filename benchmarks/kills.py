"""What deaths cost a run in blocks: an actor, a worker process and a machine are killed in every method's run.

    python benchmarks/kills.py --out docs/reference/runs/performance/kills.json

Three nodes of Ray run on this machine, and two blocks on them. In rounds that are drawn for each
method, one block's actor is killed by Ray, one's process by the system, and one's node with all of
its processes, which does not come back before the run has ended. A block dies while the other is in
the middle of the round and waits for it.
"""

import argparse
import json
import os
import signal
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from coterie._util.origin import write_results
from coterie.cluster import actors
from coterie.cluster.actors import BlockActors
from coterie.cluster.blocks import BlockSpec, simulate_in_blocks
from coterie.cluster.place import connect_ray, parse_place
from coterie.methods import METHODS
from coterie.rng import Rng
from coterie.simulation.run import Run, simulate
from coterie.testing import tiny_federation, tiny_settings

KINDS = ("actor", "worker process", "node")
STORE = 80 << 20  # bytes, the least that Ray takes
RUN: dict[str, Any] = {
    "rounds": 6,
    "participation": 0.5,
    "patience": 4,
    "engine": "vmap",
    "checkpoint_seconds": 0,
}
"""Settings of a run: there is a checkpoint after every round."""
OWN: dict[str, dict[str, Any]] = {
    "cfl": {"eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1},
    "fedgwc": {"eps": 1.0, "patience": 1, "min_pair_updates": 0.0},
    "fedper": {"personal_layers": 0},  # the model has one layer
    "fedrep": {"personal_layers": 0},
    "dfedalt": {"personal_layers": 0, "num_peers": 2},
    "ifca": {"clusters": 2},
    "one-shot": {"warmup_rounds": 2},
    "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
    "sosicfl-all": {"endpoints": 3, "regions": 2},
    "sosicfl-plus": {"endpoints": 3, "regions": 2},
}
"""Settings of methods that suit six clients, and make servers split them."""
FILES = ("checkpoint.safetensors", "metrics.parquet", "edges.parquet")


class Nodes:
    """A Ray of several nodes on this machine.

    Args:
        count: how many; one of them, which is never killed, is the head.
    """

    def __init__(self, count: int) -> None:
        from ray import cluster_utils

        # a busy machine is slow to begin
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "300")
        self.count, self._size = count, {"num_cpus": 1, "object_store_memory": STORE}
        self.cluster = cluster_utils.Cluster(
            initialize_head=True, head_node_args={**self._size, "include_dashboard": False}
        )
        self.fill()

    def fill(self) -> None:
        """Start as many nodes as are missing, and wait for them."""
        for _ in range(self.count - len(self.cluster.list_all_nodes())):
            self.cluster.add_node(wait=False, **self._size)
        self.cluster.wait_for_nodes(timeout=300)

    @property
    def mortal(self) -> list[str]:
        """The ids of the nodes that can be killed."""
        return [node.node_id for node in self.cluster.worker_nodes]

    def kill(self, name: str) -> None:
        """Kill a node with all of its processes at once, as when its machine loses power."""
        node = next(one for one in self.cluster.worker_nodes if one.node_id == name)
        (raylet,) = [
            one.process.pid
            for kind, all_ in node.all_processes.items()
            for one in all_
            if kind == "raylet"
        ]
        below = children(raylet)
        for process in (raylet, *below):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)


def children(process: int) -> list[int]:
    """Return the processes below one, as Linux knows them."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, new = list[int](), [process]
    while new:
        new = [one for one, parent in parents.items() if parent in new]
        found += new
    return found


@contextmanager
def three() -> Iterator[Nodes]:
    """Three nodes, and a connection to them."""
    nodes = Nodes(3)
    try:
        with connect_ray(parse_place(f"ray:{nodes.cluster.address}")):
            yield nodes
    finally:
        nodes.cluster.shutdown()


class Killing:
    """Starts blocks as actors, and kills one in some rounds: the first time that each comes.

    Args:
        nodes: where they are.
        deaths: what is killed, by round.
        draws: say which of the blocks.

    Attributes:
        starts: how often blocks were started, or tried to be.
        steps: the rounds that were begun, one after another.
        killed: what was killed, by round.
    """

    def __init__(self, nodes: Nodes, deaths: Mapping[int, str], draws: np.random.Generator) -> None:
        self.nodes, self.left, self.draws = nodes, dict(deaths), draws
        self.starts, self.steps, self.killed = 0, list[int](), dict[int, str]()

    @contextmanager
    def start(self, given: Iterable[BlockSpec]) -> Iterator[BlockActors]:
        """Start actors, as `actors.start_actors` does."""
        self.starts += 1
        with actors.start_actors(given) as crew:
            each = crew.call_all

            def fragile(name: str, *arguments: Sequence[Any]) -> list[Any]:
                if name != "run_round":
                    return each(name, *arguments)
                index = arguments[0][0]
                self.steps.append(index)
                if index not in self.left:
                    return each(name, *arguments)
                victim = self._victim(crew, self.left[index])
                calls = {
                    row: host.call.remote(name, *(one[row] for one in arguments))
                    for row, host in enumerate(crew.hosts)
                    if row != victim
                }
                self._kill(crew.hosts[victim], self.left[index])
                self.killed[index] = self.left.pop(index)
                calls[victim] = crew.hosts[victim].call.remote(
                    name, *(one[victim] for one in arguments)
                )
                return crew.wait_for([calls[row] for row in range(len(crew.hosts))])

            crew.call_all = fragile
            yield crew

    def _victim(self, crew: BlockActors, kind: str) -> int:
        """Draw a block; one on a node that can be killed, where that is to die."""
        import ray

        where = ray.get([host.place.remote() for host in crew.hosts])
        rows = [
            row
            for row, (node, _) in enumerate(where)
            if kind != "node" or node in self.nodes.mortal
        ]
        return rows[int(self.draws.integers(len(rows)))]

    def _kill(self, host: Any, kind: str) -> None:
        """Kill a block, and wait until Ray knows."""
        import ray
        from ray.exceptions import RayActorError

        node, process = ray.get(host.place.remote())
        if kind == "actor":
            ray.kill(host)
        elif kind == "node":
            self.nodes.kill(node)
        else:
            os.kill(process, signal.SIGKILL)
        with suppress(RayActorError):
            while True:
                ray.get(host.place.remote())


def deaths_of(kind: str, rounds: int) -> dict[int, str]:
    """Draw for a method the rounds, of which the warm-up is -1, in which an actor, a worker process and a node die."""
    draws = Rng(0).generator(f"kills.{kind}")
    return {
        int(one) - 1: what for one, what in zip(draws.permutation(rounds + 1), KINDS, strict=False)
    }


def run_with(
    kind: str, folder: Path, killing: Killing | None, blocks: Any = 2, **changes: Any
) -> Run:
    """Run a method in this process; or in blocks on the nodes, some of which are killed."""
    more: dict[str, Any] = {
        "model": "linear",
        "settings": tiny_settings(**RUN | changes),
        "seed": 3,
        "folder": folder,
    }
    method, data = METHODS[kind](**OWN.get(kind, {})), tiny_federation()
    if killing is None:
        return simulate(data, method, **more)
    return simulate_in_blocks(data, method, blocks=blocks, start=killing.start, **more)


def losses(steps: Sequence[int]) -> list[int]:
    """Return how many rounds were begun again after each death, that in which it happened included.

    Example:
        >>> losses([-1, 0, 1, 1, 2, 1, 2])
        [1, 2]
    """
    return [before + 1 - after for before, after in pairwise(steps) if after <= before]


def unequal(one: Path, other: Path) -> list[str]:
    """Return the files of two runs whose bytes differ."""
    return [name for name in FILES if (one / name).read_bytes() != (other / name).read_bytes()]


def row(kind: str, nodes: Nodes, folder: Path) -> dict[str, Any]:
    """Run a method here, and in blocks of which an actor, a process and a node are killed; say what was lost."""
    nodes.fill()
    deaths = deaths_of(kind, RUN["rounds"])
    killing = Killing(nodes, deaths, Rng(0).generator(f"victims.{kind}"))
    whole, split = run_with(kind, folder / "whole", None), run_with(kind, folder / "split", killing)
    assert killing.killed == deaths, f"{kind}: {killing.killed} were killed of {deaths}"
    same = (
        whole.params.equal(split.params)
        and whole.metrics.equals(split.metrics)
        and whole.edges.equals(split.edges)
    )
    return {
        "method": kind,
        **{
            f"{what} in round": when
            for what in KINDS
            for when, died in deaths.items()
            if died == what
        },
        "most rounds lost by one": max(losses(killing.steps)),
        "starts of all blocks": killing.starts,
        "bytes equal": same and not unequal(folder / "whole", folder / "split"),
    }


def main() -> None:
    """Kill, compare and write after each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=sorted(METHODS), metavar="KIND")
    parser.add_argument(
        "--resume", action="store_true", help="leave out the methods that the file has"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=ResourceWarning)
    found = arguments.resume and arguments.out is not None and arguments.out.exists()
    results = json.loads(arguments.out.read_text())["results"] if found else []
    left = [kind for kind in arguments.methods if kind not in {one["method"] for one in results}]
    with three() as nodes:
        for kind in left:
            with tempfile.TemporaryDirectory() as folder:
                results.append(row(kind, nodes, Path(folder)))
            print(json.dumps(results[-1]), flush=True)
            results.sort(key=lambda one: one["method"])
            if arguments.out is not None:
                parts = ("cluster", "exchange", "simulation")
                write_results(arguments.out, results, parts, vars(arguments), seeds=(0,), order=92)


if __name__ == "__main__":
    main()
