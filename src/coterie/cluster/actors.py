"""Blocks as actors of Ray: one process each, on any machine that has room.

What a block sends to another one is an argument of a call, which Ray carries: small ones with the
call itself, larger ones through the object stores of the two machines. No process in between relays
it.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._util import pages
from coterie._util.mappings import map_values
from coterie.cluster import doctor, folders, packing, place
from coterie.cluster.blocks import (
    Block,
    BlockDied,
    BlockSpec,
    MachineGone,
    StartBlocks,
    simulate_in_blocks,
)
from coterie.cluster.exchange import Address, BlockInterrupted, BlockLinks, BlockPart, Postbox
from coterie.cluster.packing import Packed
from coterie.cluster.place import Place, connect_ray
from coterie.engine import use_threads
from coterie.errors import CoterieError, require
from coterie.exchange.base import Message
from coterie.simulation.run import RunPlan
from coterie.simulation.workers import Emit, FanOut, use_one_thread

# Seconds between two checks, while waiting for blocks, that all machines are still there.
_TURN = 2.0


def encode_part(part: BlockPart) -> Any:
    """Return what a block sends as arrays, which Ray carries without a copy."""
    if part is None:
        return None
    if isinstance(part, Tensor):
        return part.cpu().numpy()
    assert part.ids is not None
    return (
        part.params.cpu().numpy(),
        {k: v.cpu().numpy() for k, v in part.fields.items()},
        part.ids.numpy(),
    )


def decode_part(part: Any) -> BlockPart:
    """Invert `encode_part`; the arrays cannot be written to."""
    if part is None:
        return None
    if isinstance(part, np.ndarray):
        return torch.from_numpy(part)
    params, fields, ids = part
    return Message(
        torch.from_numpy(params), map_values(torch.from_numpy, fields), torch.from_numpy(ids)
    )


class BlockActor:
    """A block in a process of its own; the class of the actors.

    Args:
        given: what the block is made of, packed.
        carried: custom modules that are not installed.
        threads: of the compiled engine.
    """

    def __init__(self, given: Packed, carried: Mapping[str, bytes], threads: int) -> None:
        torch.set_num_threads(1)  # so that sums are added in the same order everywhere
        use_threads(threads)
        # Ray maps large arrays read-only into the process; torch warns of that, and no code here
        # writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._modules = ExitStack()
        if carried:
            packing.install_modules(
                carried, self._modules.enter_context(folders.temporary_folder())
            )
        self._given: BlockSpec = packing.unpack(given)
        self._block: Block | None = None
        # Blocks are numbered from 0, so the largest owner is the last block.
        self._postbox = Postbox(int(self._given.owner.max()) + 1)
        # Entered and never left: it holds for the life of the process, which ends with `ray.kill`.
        self._store = pages.reuse_pages()
        self._store.__enter__()

    def receive(self, address: Address, sender: int, part: Any) -> None:
        """Receive what another block sends."""
        self._postbox.put(address, sender, decode_part(part))

    def place(self) -> tuple[str, int]:
        """Return the machine of this process, as Ray names it, and its number there."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def meet(self, hosts: Sequence[Any]) -> tuple[Any, list[Warning | str]]:
        """Make the block with links to these other ones."""
        sends = [partial(_send_part, host) for host in hosts]

        def make_block() -> None:
            self._block = Block(self._given, BlockLinks(self._given.number, sends, self._postbox))
            # The block does not need what it was made of any more: release that memory.
            del self._given

        return _call_with_warnings(make_block)

    def call(self, name: str, *arguments: Any) -> tuple[Any, list[Warning | str]]:
        """Call a function of the block."""
        return _call_with_warnings(partial(getattr(self._block, name), *arguments))


def _send_part(host: Any, address: Address, sender: int, part: BlockPart) -> None:
    # Ray sends it again where the connection breaks and the block lives: without a result, a loss
    # would go unnoticed.
    post = host.receive.options(concurrency_group="post", num_returns=0, max_task_retries=-1)
    post.remote(address, sender, encode_part(part))


def _call_with_warnings(work: Any) -> tuple[Any, list[Warning | str]]:
    """Return a function's result, or the expected error that it raises, and its warnings."""
    with warnings.catch_warnings(record=True) as said:
        # Every warning, also one that this process gave before: the driver removes repetitions.
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            # An expected error is returned as a value: raised, it would arrive inside a
            # RayTaskError.
            found = work()
        except (CoterieError, OSError, MemoryError) as error:
            found = error
    return found, [one.message for one in said]


class BlockActors:
    """Blocks that have been started as actors.

    Args:
        hosts: their handles.
        fewer: whether machines have gone since room for the blocks was counted: some blocks might
            wait forever.
    """

    def __init__(self, hosts: Sequence[Any], fewer: Callable[[], bool]) -> None:
        self.hosts, self._fewer, self._said = hosts, fewer, set[str]()
        # The driver has warned already.
        self.wait_for([host.meet.remote(list(hosts)) for host in hosts], show=False)
        self._fewer = lambda: False  # all blocks run now: Ray raises an error when one dies

    def call_all(self, name: str, *arguments: Sequence[Any]) -> list[Any]:
        """Call a function of every block; see `blocks.BlockCrew`."""
        calls = []
        for row, host in enumerate(self.hosts):
            own = [one[row] for one in arguments]
            calls.append(host.call.remote(name, *own))
        return self.wait_for(calls)

    def wait_for(self, calls: Sequence[Any], *, show: bool = True) -> list[Any]:
        """Return the results of calls, one of each block.

        Raises:
            BlockDied: as soon as one has ended.
            MachineGone: when a machine has gone before all blocks were started.
            CoterieError, OSError, MemoryError: that of a block.
        """
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        found, left = dict[Any, Any](), list(calls)
        while left:
            # One result at a time: the death of a block must be noticed while the others still
            # wait for it.
            ready, left = ray.wait(left, num_returns=1, timeout=_TURN)
            if not ready:
                if self._fewer():
                    raise MachineGone("a machine has gone")
                continue
            try:
                result, said = ray.get(ready[0])
            except RayTaskError:
                # A fault in the code of a block. RayTaskError is a kind of RayError, so this case
                # comes first.
                raise
            except RayError as error:
                who = f"block {calls.index(ready[0])} of {len(calls)}"
                # Ray reports an error of the actor's constructor only with the first call.
                if isinstance(error, RayActorError) and error.actor_init_failed:
                    last = str(error).strip().splitlines()[-1][:400]
                    raise CoterieError(f"{who} cannot be made: {last}") from error
                raise BlockDied(f"{who} has died ({' '.join(str(error).split())[:160]})") from None
            # BlockInterrupted is a consequence: the call of the block that ended brings the cause.
            if isinstance(result, Exception) and not isinstance(result, BlockInterrupted):
                raise result
            found[ready[0]] = result
            for text in said if show else ():
                if str(text) not in self._said:
                    self._said.add(str(text))
                    warnings.warn(text, stacklevel=3)
        return [found[call] for call in calls]


def divide_resource(machines: Sequence[float], blocks: int, most: float) -> float:
    """Return the largest share of a resource with which all blocks find a place at once.

    Args:
        machines: how much of it each machine has.
        blocks: how many blocks.
        most: the largest share that a block can use.

    Returns:
        As much as possible up to `most`; 0 where no machine has any.

    Example:
        >>> [divide_resource(*each) for each in (([2, 2], 4, 1), ([2], 4, 1), ([3, 1], 3, 2))]
        [1, 0.5, 1.0]
    """
    # The best share fills some machine exactly, so size / count are the only candidates.
    sizes = {most}
    for size in machines:
        sizes |= {size / count for count in range(1, blocks + 1)}
    best = 0.0
    for one in sizes:
        if not best < one <= most:
            continue
        # 1e-9: rounding must not turn 2 / (2 / 3) into less than 3 places.
        places = sum(int(size / one + 1e-9) for size in machines)
        if places >= blocks:
            best = one
    return best


@contextmanager
def start_actors(
    given: Iterable[BlockSpec], *, cpus: int = 1, gpus: float | None = None
) -> Iterator[BlockActors]:
    """Start blocks as actors of the connected Ray; see `blocks.StartBlocks`.

    Args:
        given: what each is made of.
        cpus: processors of each, which are threads of the compiled engine; less where the machines
            have fewer in all.
        gpus: GPUs of each; all are shared evenly when None and the run is on one.
    """
    import ray

    refs, device, carried = list[Any](), "cpu", dict[str, bytes]()
    for one in given:
        device = one.plan.settings.device
        # All blocks have the same method, model and settings, so the modules are collected once.
        carried = carried or packing.collect_modules(_find_modules(one.plan))
        # Into Ray's store at once: `given` yields one part at a time, so only one is in this
        # process.
        refs.append(ray.put(packing.pack(one)))

    def list_machines() -> list[Mapping[str, float]]:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    alive = list_machines()
    options: dict[str, Any] = {
        **_choose_resources(alive, len(refs), device, cpus, gpus),
        # A thread of its own receives parts while the main thread computes or waits for them.
        "concurrency_groups": {"post": 1},
        # A restarted actor would have lost its state: the driver restarts all blocks from a
        # checkpoint.
        "max_restarts": 0,
        # Blocks need memory, so they go to as many machines as there are.
        "scheduling_strategy": "SPREAD",
    }
    actor: Any = ray.remote(**options)(BlockActor)
    hosts = [actor.remote(ref, carried, cpus) for ref in refs]
    # The arguments of the actors keep the packed data until they are made; then Ray may free it.
    del refs
    try:
        yield BlockActors(hosts, lambda: len(list_machines()) < len(alive))
    finally:
        if ray.is_initialized():
            # Killed, not asked to end: a block may wait for a part that never comes.
            for host in hosts:
                ray.kill(host)


def _choose_resources(
    machines: Sequence[Mapping[str, float]], blocks: int, device: str, cpus: int, gpus: float | None
) -> dict[str, float]:
    """Return the processors and GPUs of each block, by Ray's names; see `start_actors`."""
    processors = [one.get("CPU", 0) for one in machines]
    chosen = {"num_cpus": _round_resource(divide_resource(processors, blocks, cpus))}
    if gpus is None and device.startswith("cuda"):
        cards = [one.get("GPU", 0) for one in machines]
        gpus = _round_resource(divide_resource(cards, blocks, 1))
    if gpus:
        chosen["num_gpus"] = gpus
    return chosen


def _find_modules(plan: RunPlan) -> set[str]:
    """Return the modules that the method, the model and the settings of a run come from."""
    parts = [
        dataclasses.asdict(plan.method),
        dataclasses.asdict(plan.settings),
        {"model": plan.model},
    ]
    names = set[str]().union(*map(packing.find_named_modules, parts))
    return (
        names
        | packing.find_defining_modules(plan.method)
        | packing.find_defining_modules(plan.model)
    )


@contextmanager
def open_ray_blocks(
    where: Place | str, blocks: int, *, cpus: int = 1, gpus: float | None = None, **started: Any
) -> Iterator["BlockRuns"]:
    """Connect to a Ray cluster for the block, and yield what does a study's runs in blocks.

        with open_ray_blocks("ray:auto", 4) as over:
            run_study("study.toml", over=over)

    Args:
        where: a place of Ray, or a value of `--on`.
        blocks: of each run.
        cpus: processors of a block.
        gpus: GPUs of a block; see `start_actors`.
        started: further arguments of `ray.init` for "ray:local".

    Raises:
        ConfigError: when no Ray answers, or a machine has another version of Coterie or torch.
    """
    require(blocks >= 1, "blocks", blocks, "1 or more")
    with connect_ray(place.parse_place(where) if isinstance(where, str) else where, **started):
        doctor.check_equal_software(doctor.look_at_machines())
        yield BlockRuns(blocks, partial(start_actors, cpus=cpus, gpus=gpus))


@dataclass(frozen=True)
class BlockRuns(FanOut):
    """Does the runs of a study one after another, each in blocks.

    Args:
        blocks: of each run.
        start: starts them.
        far: that workers see no files of this machine: this process reads and writes them all.
    """

    blocks: int
    start: StartBlocks
    far: bool = False

    def __call__(
        self, work: Any, jobs: Iterable[Any], workers: int, emit: Emit
    ) -> Iterator[tuple[Any, Any]]:
        """Run every job and yield (job, result).

        Args:
            work: does the runs of a study; its `run` takes the place of `simulate`.
            jobs: the jobs.
            workers: not used: the blocks of a run share the machines.
            emit: receives what jobs emit.
        """
        hosted = replace(
            work, run=partial(simulate_in_blocks, blocks=self.blocks, start=self.start)
        )
        # The driver computes metrics of the run; one thread adds its sums in the order of
        # `simulate`.
        with use_one_thread():
            for job in jobs:
                yield job, hosted(job, emit)


def _round_resource(amount: float) -> float:
    """Round to what Ray can count: integers, and ten thousandths below one."""
    # Down, never up: the shares of all blocks together must fit into their machine.
    return int(amount) if amount >= 1 else int(amount * 10_000) / 10_000
