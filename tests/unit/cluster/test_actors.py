"""Blocks as actors of Ray: the bytes of one process, on several nodes, whatever dies."""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import kills
from benchmarks.kills import Killing, Nodes, losses
from coterie.cluster import actors
from coterie.cluster.actors import BlockActors, decode_part, divide_resource, encode_part
from coterie.cluster.blocks import BlockDied, BlockSpec, simulate_in_blocks
from coterie.errors import ConfigError, CoterieError
from coterie.exchange.base import Message
from coterie.methods import METHODS
from coterie.rng import Rng
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

from ...contract.test_blocks import LargestStorage, of, same

pytestmark = [
    # Ray leaves files and sockets to the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]
METHOD = """
from dataclasses import dataclass
from coterie.methods import Local


@dataclass(frozen=True)
class Mine(Local):
    kind = "mine"
"""
IN_CI = {"dac": "node", "fedavg": "worker process", "ifca": "actor"}
"""What is killed in each of the methods that `make test` runs."""
ROUNDS = kills.RUN["rounds"]


@pytest.fixture(scope="module")
def three() -> Iterator[Nodes]:
    """Three nodes of one processor each."""
    pytest.importorskip("ray")
    with kills.three() as nodes:
        yield nodes


def without_losses(folder: Path, kind: str, killing: Killing, blocks: Any) -> None:
    """Run a method in one process and in blocks, some of which are killed; compare them."""
    killing.nodes.fill()
    deaths = dict(killing.left)
    whole = kills.run_with(kind, folder / "whole", None)
    assert same(whole, kills.run_with(kind, folder / "split", killing, blocks))
    assert killing.killed == deaths
    assert all(lost <= 1 for lost in losses(killing.steps)), (
        "there is a checkpoint after each round"
    )
    assert killing.starts > len(deaths)


@pytest.mark.slow
@pytest.mark.parametrize("kind", IN_CI)
def test_what_is_killed_in_a_round_drawn_for_the_method_changes_nothing(
    tmp_path: Path, three: Nodes, kind: str
):
    """An actor, a process, and a node with all that runs on it: where it was, two blocks go on on the two left."""
    draws = Rng(0).generator(f"kill.{kind}")
    killing = Killing(three, {int(draws.integers(-1, ROUNDS)): IN_CI[kind]}, draws)
    without_losses(tmp_path, kind, killing, [2, 4])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(METHODS))
def test_an_actor_a_process_and_a_node_are_killed_in_one_run(
    tmp_path: Path, three: Nodes, kind: str
):
    draws = Rng(0).generator(f"victims.{kind}")
    without_losses(tmp_path, kind, Killing(three, kills.deaths_of(kind, ROUNDS), draws), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(METHODS))
def test_blocks_on_three_nodes_end_with_the_bytes_of_one_process(
    tmp_path: Path, three: Nodes, kind: str
):
    three.fill()
    whole = kills.run_with(kind, tmp_path / "whole", None, rounds=3)
    for number, blocks in enumerate((1, 3, [1, 4, 1])):
        killing = Killing(three, {}, Rng(0).generator("nobody"))
        assert same(whole, kills.run_with(kind, tmp_path / str(number), killing, blocks, rounds=3))


@pytest.mark.slow
def test_what_is_wrong_in_a_block_is_said_in_one_line(three: Nodes):
    """An error of the method's own, which is the same in one process."""
    method, data = METHODS["fedavg"](aggregation="coterie.nowhere:rule"), tiny_federation()
    with pytest.raises(ConfigError, match="nowhere"):
        simulate_in_blocks(
            data,
            method,
            model="linear",
            settings=tiny_settings(),
            seed=3,
            blocks=2,
            start=actors.start_actors,
        )


@pytest.mark.slow
def test_blocks_that_always_die_are_given_up(three: Nodes):
    class Always(Killing):
        @contextmanager
        def start(self, given: Iterable[BlockSpec]) -> Iterator[BlockActors]:
            """With the same round again."""
            self.left = {0: "actor"}
            with super().start(given) as crew:
                yield crew

    killing = Always(three, {}, np.random.default_rng(0))
    more: dict[str, Any] = {
        "model": "linear",
        "settings": tiny_settings(),
        "blocks": 2,
        "start": killing.start,
    }
    with pytest.raises(BlockDied, match=r"block \d of 2 has died"):
        simulate_in_blocks(tiny_federation(), of("dac"), **more)
    assert killing.starts == 3


@pytest.mark.slow
def test_a_block_that_cannot_be_made_is_no_death(
    three: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The method is of a module that workers do not find: it is said once, in one line."""
    monkeypatch.setattr("coterie.cluster.packing.collect_modules", lambda names: {})
    (tmp_path / "nowhere_else.py").write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    method = importlib.import_module("nowhere_else").Mine()
    killing = Killing(three, {}, np.random.default_rng(0))
    more: dict[str, Any] = {
        "model": "linear",
        "settings": tiny_settings(),
        "blocks": 2,
        "start": killing.start,
    }
    with pytest.raises(CoterieError, match=r"block \d of 2 cannot be made: .*nowhere_else"):
        simulate_in_blocks(tiny_federation(), method, **more)
    assert killing.starts == 1


def watch(actor: Any) -> None:
    """Let an actor note the largest storage, in bytes, that any operation of its rounds uses.

    Ray sends it to the actor as it is, with all that it needs within.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LargestStorage(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            for one in tree_leaves((args, kwargs, out)):
                if isinstance(one, torch.Tensor):
                    actor.seen.append(one.untyped_storage().nbytes())
            return out

    class Watched:
        """The block; what is called of it is watched in the thread that does it."""

        def __init__(self, block: Any) -> None:
            self.block = block

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                with LargestStorage():
                    return getattr(self.block, name)(*arguments)

            return call

    actor.seen = []
    actor._block = Watched(actor._block)


def report(actor: Any) -> dict[str, Any]:
    """Return what an actor holds between its rounds, and the largest that it used in them."""
    import gc

    import numpy as np
    import torch

    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    state = actor._block.block.loop.state
    return {
        "shapes": [tuple(one.shape) for one in tensors],
        "held": [one.untyped_storage().nbytes() for one in tensors],
        "arrays": [one.nbytes for one in gc.get_objects() if isinstance(one, np.ndarray)],
        "used": max(actor.seen),
        "operations": len(actor.seen),
        "memory": {name: tuple(value.shape) for name, value in vars(state.memory).items()},
        "clients": len(state.params),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"table": 16}, True),
        ({"table": 16, "explore": 1}, True),
        # What the test would notice: a memory of all pairs.
        ({}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:the vmap engine is used")
def test_with_tables_no_process_holds_a_byte_for_each_pair(
    tmp_path: Path, three: Nodes, changes: dict[str, Any], fits: bool
):
    """1,000 clients on three nodes, in blocks of 400, 350 and 250: the bytes of one process, and each says what it has.

    Neither a block nor the driver has a tensor or an array of as many bytes as pairs of its clients and all others.
    """
    import ray

    three.fill()
    clients, reports = 1000, list[dict[str, Any]]()
    more: dict[str, Any] = {
        "model": "linear",
        "settings": tiny_settings(rounds=3, engine="vmap", check=False),
        "seed": 5,
    }
    data = tiny_federation(clients, 4, train=4, validation=2)
    method = METHODS["dac"](num_peers=2, similarity="cos_weight", **changes)

    @contextmanager
    def start(given: Iterable[BlockSpec]) -> Iterator[BlockActors]:
        with actors.start_actors(given) as crew:
            ray.get([host.__ray_call__.remote(watch) for host in crew.hosts])
            each = crew.call_all

            def report_after(name: str, *arguments: Any) -> list[Any]:
                found = each(name, *arguments)
                if name == "run_round":
                    reports.extend(ray.get([h.__ray_call__.remote(report) for h in crew.hosts]))
                return found

            crew.call_all = report_after
            yield crew

    whole = simulate(data, method, folder=tmp_path / "whole", **more)
    seen: list[int] = []
    with LargestStorage(seen):
        split = simulate_in_blocks(
            data, method, folder=tmp_path / "split", blocks=[400, 350, 250], start=start, **more
        )
    assert same(whole, split)
    assert [one["clients"] for one in reports] == [400, 350, 250] * 4, "the warm-up and each round"
    for one in reports:
        pairs = one["clients"] * clients
        assert one["operations"] > 1000
        assert one["held"], "it sees tensors"
        assert (max(one["used"], *one["held"], *one["arrays"]) < pairs) == fits
        assert ((one["clients"], clients) not in one["shapes"]) == fits
        wide = [shape for shape in one["memory"].values() if len(shape) > 1 and shape[1] >= clients]
        assert (not wide) == fits
    assert (max(seen) < 250 * clients) == fits, "the driver has results and checkpoints"


def test_what_a_block_tells_is_packed_without_a_loss():
    message = Message(torch.rand(2, 3), {"samples": torch.tensor([1, 2])}, torch.tensor([4, 7]))
    found = decode_part(encode_part(message))
    assert isinstance(found, Message)
    assert torch.equal(found.params, message.params)
    assert torch.equal(found.fields["samples"], message.fields["samples"])
    assert found.ids is not None
    assert found.ids.tolist() == [4, 7]
    ids = decode_part(encode_part(torch.tensor([3, 1])))
    assert isinstance(ids, torch.Tensor)
    assert ids.tolist() == [3, 1]
    assert decode_part(encode_part(None)) is None


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
def test_each_block_gets_what_all_can_have_at_once(
    machines: list[float], blocks: int, most: float, expected: float
):
    assert divide_resource(machines, blocks, most) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("cpu", None, {"num_cpus": 2}),
        ("cuda", None, {"num_cpus": 2, "num_gpus": 0.5}),
        ("cuda:0", 0.25, {"num_cpus": 2, "num_gpus": 0.25}),
        ("cpu", 0.25, {"num_cpus": 2, "num_gpus": 0.25}),
        ("cuda", 0, {"num_cpus": 2}),
    ],
)
def test_blocks_on_a_device_share_the_gpus_unless_somebody_says_otherwise(device, gpus, expected):
    """Four blocks on machines of 8 and 4 processors and one GPU each: half a GPU, and 2 of 12."""
    machines = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}]
    found = actors._choose_resources(machines, 4, device, 2, gpus)
    assert found == pytest.approx(expected)
