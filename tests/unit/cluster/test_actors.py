"""Blocks as actors of Ray: the bytes of one process, on several nodes, whatever dies."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.cluster import actors
from coterie.cluster.actors import Actors, packed, share, unpacked
from coterie.cluster.blocks import BlockDied, Given, simulate_in_blocks
from coterie.cluster.place import connect, read
from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.methods import METHODS
from coterie.rng import Rng
from coterie.simulation.run import Run, simulate
from coterie.testing import tiny_federation, tiny_settings

from ...contract.test_blocks import of, same

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files and sockets to the collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]
SETTINGS: dict[str, Any] = {"rounds": 4, "participation": 0.5, "patience": 2, "engine": "vmap", "checkpoint_seconds": 0}
STORE = 80 << 20  # bytes, the least that Ray takes
IN_CI = ("dac", "fedavg", "ifca")


@contextmanager
def nodes(count: int) -> Iterator[Any]:
    """A Ray cluster of several nodes on this machine, and a connection to it."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    size = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(**size)
        cluster.wait_for_nodes()
        with connect(read(f"ray:{cluster.address}")):
            yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    """Three nodes of one processor each."""
    with nodes(3) as cluster:
        yield cluster


def both(folder: Path, kind: str, start: Any, blocks: Any) -> tuple[Run, Run]:
    """One run in this process, and one in blocks."""
    more: dict[str, Any] = {"model": "linear", "settings": tiny_settings(**SETTINGS), "seed": 3}
    whole = simulate(tiny_federation(), of(kind), folder=folder / "whole", **more)
    split = simulate_in_blocks(tiny_federation(), of(kind), folder=folder / "split", blocks=blocks, start=start, **more)
    return whole, split


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(METHODS))
def test_blocks_on_three_nodes_end_with_the_bytes_of_one_process(tmp_path: Path, three: Any, kind: str):
    assert same(*both(tmp_path, kind, actors.start, [1, 4, 1]))


class Killing:
    """Starts actors, one of which is killed in the middle of some rounds: the first time that each comes.

    Args:
        rounds: in which one is killed.
        draws: say which.
    """

    def __init__(self, rounds: Iterable[int], draws: np.random.Generator) -> None:
        self.left, self.draws, self.starts = set(rounds), draws, 0

    @contextmanager
    def start(self, given: Iterable[Given]) -> Iterator[Actors]:
        """Start actors, as `actors.start` does."""
        import ray

        with actors.start(given) as crew:
            self.starts += 1
            each, wait = crew.each, crew.wait

            def fragile(name: str, *arguments: Any) -> list[Any]:
                if name == "step" and arguments[0][0] in self.left:
                    self.left.discard(arguments[0][0])
                    victim = crew.hosts[int(self.draws.integers(len(crew.hosts)))]

                    def kill(calls: Any, **options: Any) -> list[Any]:
                        ray.kill(victim)
                        return wait(calls, **options)

                    crew.wait = kill
                return each(name, *arguments)

            crew.each = fragile
            yield crew


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(METHODS))
def test_a_killed_actor_changes_nothing(tmp_path: Path, three: Any, kind: str):
    """In a round drawn for each method, in the middle of it."""
    draws = Rng(0).generator(f"kills.{kind}")
    killing = Killing([int(draws.integers(-1, 4))], draws)
    assert same(*both(tmp_path, kind, killing.start, 3))
    assert killing.starts == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", IN_CI)
def test_the_blocks_of_a_dead_node_go_on_on_those_that_are_left(tmp_path: Path, kind: str):
    with nodes(3) as cluster:
        others = list(cluster.worker_nodes)
        starts = list[int]()

        @contextmanager
        def start(given: Iterable[Given]) -> Iterator[Actors]:
            with actors.start(given) as crew:
                starts.append(len(crew.hosts))
                each = crew.each

                def fragile(name: str, *arguments: Any) -> list[Any]:
                    if name == "step" and arguments[0][0] == 2 and others:
                        cluster.remove_node(others.pop(), allow_graceful=False)
                        others.clear()
                    return each(name, *arguments)

                crew.each = fragile
                yield crew

        assert same(*both(tmp_path, kind, start, 3))
        assert starts in ([3, 3], [3, 3, 3]), "once more where Ray had not noticed yet"


@pytest.mark.slow
def test_what_is_wrong_in_a_block_is_said_in_one_line(three: Any):
    """An error of the method's own, which is the same in one process."""
    method, data = METHODS["fedavg"](aggregation="coterie.nowhere:rule"), tiny_federation()
    with pytest.raises(ConfigError, match="nowhere"):
        simulate_in_blocks(data, method, model="linear", settings=tiny_settings(), seed=3, blocks=2, start=actors.start)


@pytest.mark.slow
def test_blocks_that_always_die_are_given_up(three: Any):
    class Always(Killing):
        @contextmanager
        def start(self, given: Iterable[Given]) -> Iterator[Actors]:
            """With all rounds again."""
            self.left = {0}
            with super().start(given) as crew:
                yield crew

    killing = Always([0], np.random.default_rng(0))
    with pytest.raises(BlockDied, match=r"block \d of 2 has died"):
        simulate_in_blocks(
            tiny_federation(), of("dac"), model="linear", settings=tiny_settings(), blocks=2, start=killing.start
        )
    assert killing.starts == 3


def test_what_a_block_tells_is_packed_without_a_loss():
    message = Message(torch.rand(2, 3), {"samples": torch.tensor([1, 2])}, torch.tensor([4, 7]))
    found = unpacked(packed(message))
    assert isinstance(found, Message)
    assert torch.equal(found.params, message.params)
    assert torch.equal(found.fields["samples"], message.fields["samples"])
    assert found.ids is not None
    assert found.ids.tolist() == [4, 7]
    ids = unpacked(packed(torch.tensor([3, 1])))
    assert isinstance(ids, torch.Tensor)
    assert ids.tolist() == [3, 1]
    assert unpacked(packed(None)) is None


@pytest.mark.parametrize(
    ("machines", "blocks", "most", "expected"),
    [
        ([4], 4, 1, 1),
        ([1, 1], 3, 1, 0.5),  # two on one machine
        ([1, 2], 2, 2, 1),  # not 1.5, which the first has not
        ([8, 8], 2, 4, 4),
        ([], 2, 1, 0),
        ([0], 2, 1, 0),
    ],
)
def test_each_block_gets_what_all_can_have_at_once(machines: list[float], blocks: int, most: float, expected: float):
    assert share(machines, blocks, most) == pytest.approx(expected)
