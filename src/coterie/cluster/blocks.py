"""One population in blocks, each of which hosts some clients; and the driver of the blocks.

`simulate_in_blocks` ends with the parameters, tables and checkpoints of `simulate`, to the byte,
however many blocks there are: a block runs the same loop (`runtime.loop`), and only its exchange
differs. The driver is a `Loop` too, of the whole population: it steps the blocks, merges what they
report, and checkpoints are written from and restored into it. So a run in three blocks can be
continued by one process, and the reverse.

When one block ends, all are ended and started again from the last checkpoint, which is one round of
the whole population and of which two generations are stored; without a folder, from the beginning.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util.mappings import map_values
from coterie._util.tensors import index_each
from coterie.cluster.block_records import BlockRecord, RecordCall, merge_calls
from coterie.cluster.exchange import (
    BlockExchange,
    BlockInterrupted,
    BlockLinks,
    Postbox,
    merge_snapshots,
)
from coterie.data.federation import Federation, Truth
from coterie.engine import EngineChoice
from coterie.engine.task import Task
from coterie.errors import ConfigError, CoterieError, require
from coterie.exchange.base import Message
from coterie.exchange.in_memory import InMemory
from coterie.functional import metrics
from coterie.methods.base import Method, State, concatenate_tensors, map_tensors
from coterie.models.layout import ModelSource
from coterie.rng import Rng
from coterie.runtime import checkpoint
from coterie.runtime.extensions import Extension
from coterie.runtime.loop import Loop, Tracker
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.simulation import attackers
from coterie.simulation.run import Note, Observer, Run, RunPlan, check_memory, simulate

# How often blocks are started without a new checkpoint in between.
_TRIES = 3


class BlockDied(CoterieError, RuntimeError):
    """A block, or the machine that it was on, ended in the middle of a run."""


class MachineGone(BlockDied):
    """A machine was lost while blocks were started: it had been counted, and had died before."""


# ---------------------------------------------------------------- one block


@dataclass(frozen=True)
class BlockSpec:
    """What a block is made of.

    Args:
        number: of the block.
        plan: of the run, with the data of this block's clients alone.
        owner: the block that hosts each member of the population.
        pool: the samples of all clients, for methods that need them in one place.
    """

    number: int
    plan: RunPlan
    owner: Int[Tensor, " population"]
    pool: Federation | None = None


@dataclass(frozen=True)
class RoundReport:
    """What a block reports of a round.

    Args:
        entries: of the tables.
        samples: trained in it.
        seconds: spent in training.
        stopped: whether all of its clients have stopped.
        sent: bytes sent to other blocks.
    """

    entries: list[RecordCall]
    samples: int
    seconds: float
    stopped: bool
    sent: int


@dataclass(frozen=True)
class FinalReport:
    """What a block reports of the final evaluation: its models, and what run metrics need."""

    last: RoundReport
    params: Tensor
    label: Tensor | None
    tested: Mapping[str, Tensor]


@dataclass(frozen=True)
class BlockState:
    """Everything that a later round of a block's clients depends on."""

    state: State
    extensions: Mapping[str, Any]
    tracker: Tracker
    validation: Mapping[str, Tensor]
    spent: Mapping[str, Tensor]
    exchange: Mapping[str, Tensor]


def _make_extensions(plan: RunPlan, task: Task) -> list[Extension]:
    groups, population = plan.attack_groups, task.population
    return attackers.make_all_extensions(plan.method, plan.settings, groups, population)


class BlockLoop(Loop):
    """The run's loop for the clients of a block."""

    recorder: BlockRecord

    def __init__(self, given: BlockSpec, links: BlockLinks) -> None:
        plan, self._final = given.plan, (None, {})
        task = make_task(plan.federation, plan.method, plan.model, plan.settings, pool=given.pool)
        check_memory(task, plan.federation, plan.method, plan.settings)
        inner = BlockExchange(links, task.ids, given.owner, server=plan.method.server)
        door = attackers.wrap_exchange(inner, plan.attack_groups, task, plan.seed)
        self.recorder = BlockRecord(task.population)
        super().__init__(
            task,
            plan.method,
            door,
            plan.settings,
            Rng(plan.seed),
            self.recorder,
            _make_extensions(plan, task),
        )

    @property
    def computes_run_metrics(self) -> bool:
        """True, so that values are gathered; the driver computes metrics of the run from them."""
        return True

    def _compute_run_metrics(
        self, label: Tensor | None, tested: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        self._final = label, tested
        return {}

    def _note_undefined(self, values: Mapping[str, Tensor]) -> None:
        self.recorder.add_undefined(self.task.ids, values)

    def final_results(self) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        """Return the found clusters, where known, and the metrics of the final test."""
        label, tested = self._final
        tested = map_values(Tensor.cpu, tested)
        return None if label is None else label.cpu(), tested


class Block:
    """Some of the clients of a run, wherever they are hosted.

    Args:
        given: what it is made of.
        links: to the other blocks.
    """

    def __init__(self, given: BlockSpec, links: BlockLinks) -> None:
        self.loop, self.links = BlockLoop(given, links), links
        # Samples, seconds and bytes up to the last report: a report has the differences.
        self._reported = (0, 0.0, 0)

    def run_round(self, index: int) -> RoundReport:
        """Run the warm-up or a round."""
        # The driver counts the rounds; a block may have restored a checkpoint since its last one.
        self.loop.next_round = index
        self.loop.run_next_round()
        return self._make_report()

    def _make_report(self) -> RoundReport:
        loop, before = self.loop, self._reported
        self._reported = now = loop.train_samples, loop.task.trainer.totals.seconds, self.links.sent
        samples, seconds, sent = now[0] - before[0], now[1] - before[1], now[2] - before[2]
        return RoundReport(
            loop.recorder.take_calls(), samples, seconds, bool(loop.tracker.stopped.all()), sent
        )

    def export_state(self) -> BlockState:
        """Return what a checkpoint needs."""
        loop = self.loop
        # Not part of the Exchange protocol, so a type checker does not know it.
        snapshot = getattr(loop.exchange, "snapshot")()  # noqa: B009
        # To the CPU: the state travels to the driver, and from there into a file.
        tracker = map_tensors(loop.tracker, lambda t: t.cpu())
        return BlockState(
            _move_state(loop.state, "cpu"),
            {one.name: one.state for one in loop.extensions},
            tracker,
            loop.validation,
            loop.task.trainer.totals.privacy.snapshot(),
            snapshot,
        )

    def import_state(self, kept: BlockState) -> None:
        """Continue from the state of a checkpoint."""
        loop = self.loop
        loop.state, loop.tracker = _move_state(kept.state, loop.task.device), kept.tracker
        # Only the best models are on the device; the other fields of the tracker stay on the CPU.
        if len(kept.tracker.best):
            loop.tracker = replace(kept.tracker, best=kept.tracker.best.to(loop.task.device))
        for one in loop.extensions:
            one.state = kept.extensions[one.name]
        loop.validation = dict(kept.validation)
        loop.task.trainer.totals.privacy.restore(kept.spent)
        getattr(loop.exchange, "restore")(kept.exchange)  # noqa: B009

    def evaluate_final(self, last: int) -> FinalReport:
        """Run the final evaluation after a round."""
        self.loop.next_round = last + 1
        params = self.loop.evaluate_final()
        return FinalReport(self._make_report(), params, *self.loop.final_results())


def _move_state(state: State, device: str) -> State:
    def move(part: Any) -> Any:
        return map_tensors(part, lambda t: t.to(device))

    return State(
        state.params.to(device), move(state.memory), move(state.shared), move(state.moments)
    )


# ---------------------------------------------------------------- where blocks are


@runtime_checkable
class BlockCrew(Protocol):
    """Blocks that have been started, wherever they are."""

    def call_all(self, name: str, *arguments: Sequence[Any]) -> list[Any]:
        """Call a function of every block at once; return the results in the order of blocks.

        Args:
            name: of the function.
            arguments: of each argument, that of every block.

        Raises:
            BlockDied: when a block has ended.
        """
        ...


StartBlocks = Callable[[Iterable[BlockSpec]], AbstractContextManager[BlockCrew]]
"""Starts blocks, for as long as the context lasts."""


class ThreadBlocks:
    """Blocks in threads of this process: the same program without a cluster, for tests.

    Args:
        given: what each is made of.
    """

    def __init__(self, given: Iterable[BlockSpec]) -> None:
        given = list(given)
        self.boxes = [Postbox(len(given)) for _ in given]
        self._pool = ThreadPoolExecutor(len(given), "coterie-block")
        with warnings.catch_warnings():  # the driver has given the same warnings already
            warnings.simplefilter("ignore")
            sends = [partial(_deliver_copy, box) for box in self.boxes]
            self.blocks = []
            for one in given:
                links = BlockLinks(one.number, sends, self.boxes[one.number])
                self.blocks.append(Block(one, links))

    def call_all(self, name: str, *arguments: Sequence[Any]) -> list[Any]:
        """Call a function of every block; see `BlockCrew`."""

        def call_block(number: int) -> Any:
            try:
                return getattr(self.blocks[number], name)(*(one[number] for one in arguments))
            except BaseException:
                # Other blocks may wait for a part that this one never sends.
                self.close()
                raise

        futures = [self._pool.submit(call_block, number) for number in range(len(self.blocks))]
        errors = [error for one in futures if (error := one.exception()) is not None]
        if errors:
            # BlockInterrupted is a consequence of another error, so it is raised only where it is
            # alone: False comes before True.
            raise min(errors, key=lambda error: isinstance(error, BlockInterrupted))
        return [one.result() for one in futures]

    def close(self) -> None:
        """Release blocks that wait for each other."""
        for box in self.boxes:
            box.close()

    @staticmethod
    @contextmanager
    def start(given: Iterable[BlockSpec]) -> Iterator["ThreadBlocks"]:
        """Start blocks in threads; see `StartBlocks`."""
        crew = ThreadBlocks(given)
        try:
            yield crew
        finally:
            # The boxes first: `shutdown` waits for the threads, and they may wait for parts.
            crew.close()
            crew._pool.shutdown()


def _deliver_copy(box: Postbox, address: Any, sender: int, part: Any) -> None:
    """Send a copy to a block of this process: the sender may change the original later."""
    if isinstance(part, Message):
        fields = map_values(Tensor.clone, part.fields)
        part = replace(part, params=part.params.clone(), fields=fields)
    box.put(address, sender, part)


# ---------------------------------------------------------------- the whole population


class _StoredExchange(InMemory):
    """The driver's exchange: it carries nothing, and holds the state of the blocks' exchanges."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.ids, task.population)
        self.tensors = dict[str, Tensor]()

    def snapshot(self) -> dict[str, Tensor]:
        """Return what was read of a checkpoint, or gathered."""
        return self.tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep it."""
        self.tensors = dict(tensors)


class DriverLoop(Loop):
    """The rounds of a population that is hosted in blocks.

    Its state is that of one client until it is gathered, so that the driver holds all models only
    while they are written.

    Args:
        plan: of the run.
        task: of all clients.
        record: where results go.
        crew: the blocks.
        rows: the clients of each block.
    """

    def __init__(
        self, plan: RunPlan, task: Task, record: Record, crew: BlockCrew, rows: Sequence[Tensor]
    ) -> None:
        self.crew, self.block_rows = crew, rows
        self._gathered, self._all_stopped, self._train_seconds = False, False, 0.0
        self.sent = 0
        """Bytes that blocks sent to each other so far."""
        self.stored_exchange = _StoredExchange(task)
        super().__init__(
            task,
            plan.method,
            self.stored_exchange,
            plan.settings,
            Rng(plan.seed),
            record,
            _make_extensions(plan, task),
        )

    def _init_state(self, task: Task) -> State:
        # The state of one client has all names and shapes of columns; the rows come with
        # `gather_state`.
        return super()._init_state(task.select_clients(torch.arange(1)))

    def check_translation(self, federation: Federation) -> tuple[str, ...]:
        """See `Loop.check_translation`; the driver has engine, module and data of all blocks."""
        checked_before = bool(self.translation)
        lines = super().check_translation(federation)
        if checked_before or not self.settings.check:
            return lines
        line = "checked once by the driver, for blocks of the same engine, module and data"
        self.translation = {**self.translation, "lines": [*lines, line]}
        return (*lines, line)

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are done, or every client has stopped."""
        return self.next_round >= self.settings.rounds or (
            self.next_round >= 0 and self._all_stopped
        )

    def run_next_round(self) -> None:
        """Let every block run the warm-up or one round."""
        if self._gathered:
            # The gathered rows have been written: one client's rows are enough until the next
            # gathering.
            self._gathered = False
            self.state = self.state.select_rows(torch.arange(1))
            self.tracker = map_tensors(self.tracker, lambda t: t[:1])
            for extension in self.extensions:
                extension.state = map_tensors(extension.state, lambda t: t[:1])
        self._merge_reports(
            self.crew.call_all("run_round", [self.next_round] * len(self.block_rows))
        )
        self.next_round += 1

    def _merge_reports(self, found: Sequence[RoundReport]) -> None:
        """Merge the reports of the blocks into the tables and this loop."""
        for entry in merge_calls([one.entries for one in found]):
            if entry.kind == "metrics":
                self.record.add_metrics(
                    entry.round, entry.ids, entry.split, entry.model, entry.values
                )
                if (entry.split, entry.model) == ("validation", "current"):
                    self.validation = dict(entry.values)
                if entry.split == "train":
                    seen = self.select_counted(entry.ids)
                    for name, value in entry.values.items():
                        if name in self.recorded_metrics:
                            self.mean_reports[name] = float(value[seen].double().nanmean())
                    if metrics.DIVERGED.name in entry.values:
                        self._note_diverged(entry.ids)
            elif entry.kind == "drop":
                self.record.drop_metrics(entry.round, entry.split, entry.model)
            elif entry.kind == "edges":
                self.record.add_edges(entry.round, entry.ids, entry.values)
            else:
                values = {}
                for name, lost in entry.values.items():
                    gaps = torch.isin(self.task.ids, entry.ids[lost])
                    # `_note_undefined` looks for NaN, so the flags become values that are NaN
                    # exactly there.
                    values[name] = torch.zeros(len(self.task)).masked_fill(gaps, torch.nan)
                self._note_undefined(values)
        self.train_samples += sum(one.samples for one in found)
        self._train_seconds += max(one.seconds for one in found)
        self._all_stopped = all(one.stopped for one in found)
        self.sent += sum(one.sent for one in found)

    @property
    def train_seconds(self) -> float:
        """Training seconds of the slowest block of each round, in all."""
        return self._train_seconds

    def gather_state(self) -> None:
        """Collect the state of all blocks."""
        if self._gathered:
            return
        found: list[BlockState] = self.crew.call_all("export_state")
        states = [one.state for one in found]
        # Blocks are ranges of clients, so concatenation has the rows in the order of `task.ids`.
        self.state = State(
            torch.cat([one.params for one in states]),
            concatenate_tensors([one.memory for one in states]),
            # Every block computes the same shared state, to the byte.
            states[0].shared,
            concatenate_tensors([one.moments for one in states]),
        )
        for extension in self.extensions:
            parts = [one.extensions[extension.name] for one in found]
            extension.state = extension.join_states(parts)
        self.tracker = concatenate_tensors([one.tracker for one in found])
        self.validation = _concatenate_tables([one.validation for one in found])
        # Blocks whose clients used no privacy have no table.
        spent = _concatenate_tables([one.spent for one in found if one.spent])
        self.task.trainer.totals.privacy.restore(spent)
        self.stored_exchange.restore(merge_snapshots([one.exchange for one in found]))
        self._gathered = True

    def scatter_state(self) -> None:
        """Send each block its part of the state."""
        spent, kept = self.task.trainer.totals.privacy.snapshot(), list[BlockState]()
        for rows in self.block_rows:
            of_rows = partial(_select_rows, rows)
            # The table has any number of rows for a client, so rows are found by id, not by
            # position.
            mine = torch.isin(spent["client"], self.task.ids[rows]) if spent else rows
            kept.append(
                BlockState(
                    self.state.select_rows(rows),
                    {one.name: map_tensors(one.state, of_rows) for one in self.extensions},
                    map_tensors(self.tracker, of_rows),
                    map_values(of_rows, self.validation),
                    index_each(spent, mine),
                    # Each block takes its own part; see `BlockExchange.restore`.
                    self.stored_exchange.snapshot(),
                )
            )
        self._gathered, self._all_stopped = True, bool(self.tracker.stopped.all())
        self.crew.call_all("import_state", kept)

    def evaluate_final(self) -> Float[Tensor, "clients params"]:
        """Let every block evaluate its clients' chosen models, and return the models."""
        self.gather_state()
        last = self.next_round - 1
        found: list[FinalReport] = self.crew.call_all(
            "evaluate_final", [last] * len(self.block_rows)
        )
        self._merge_reports([one.last for one in found])
        labels = [one.label for one in found if one.label is not None]
        tested = _concatenate_tables([one.tested for one in found])
        outcome = self._compute_run_metrics(torch.cat(labels) if labels else None, tested)
        model = "best" if self.settings.evaluate == "best_val" else "current"
        self.record.add_metrics(last, self.task.ids[self.counted], "test", model, outcome)
        self.evaluated_models = torch.cat([one.params for one in found]).to(self.task.device)
        return self.evaluated_models


def _select_rows(rows: Tensor, value: Tensor) -> Tensor:
    """Return some clients' rows; an empty tensor stays empty."""
    return value[rows] if len(value) else value


def _concatenate_tables(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tables of several blocks as one, by name; empty where no block has any."""
    names = parts[0] if parts else ()
    joined = {}
    for name in names:
        joined[name] = torch.cat([part[name] for part in parts])
    return joined


# ---------------------------------------------------------------- the run


def partition_clients(clients: int, blocks: int | Sequence[int]) -> list[Int[Tensor, " _"]]:
    """Return the rows of each block: ranges of clients.

    Args:
        clients: how many there are.
        blocks: how many blocks, whose sizes then differ by one at most; or the size of each.

    Raises:
        ConfigError: when a block would have no client, or the sizes are not those of all clients.

    Example:
        >>> [len(rows) for rows in partition_clients(7, 3)]
        [3, 2, 2]
        >>> [len(rows) for rows in partition_clients(7, [1, 6])]
        [1, 6]
    """
    if isinstance(blocks, int):
        require(1 <= blocks <= clients, "blocks", blocks, f"1 to {clients}, the number of clients")
        return list(torch.arange(clients).tensor_split(blocks))
    fits = all(size >= 1 for size in blocks) and sum(blocks) == clients
    require(fits, "blocks", list(blocks), f"sizes of 1 or more that are {clients} together")
    return list(torch.arange(clients).split(list(blocks)))


def check_block_settings(method: Method, settings: Settings) -> None:
    """Refuse settings that need all clients in one process.

    Raises:
        ConfigError: in one line.
    """
    if settings.schedule != "synchronous":
        raise ConfigError(
            f"schedule is {settings.schedule!r}: clients act one after another, which blocks "
            "cannot; use 'synchronous'"
        )
    if settings.time is not None:
        raise ConfigError("time is set: blocks do not know the times of each other; leave it out")
    looking = [str(attack.kind) for attack in settings.attack_list if attack.needs_honest_models]
    if looking and settings.patience is not None and not method.server:
        raise ConfigError(
            f"attack {looking[0]!r} looks at the honest models of all clients, which blocks do "
            "not gather when some "
            "stop; leave out patience, or --blocks"
        )


def iterate_block_specs(plan: RunPlan, rows: Sequence[Int[Tensor, " _"]]) -> Iterator[BlockSpec]:
    """Yield what each block is made of, one at a time, since all need the federation's memory."""
    federation = plan.federation
    # 32 bits: every block receives this table of the whole population.
    owner = torch.empty(federation.population, dtype=torch.int32)
    for number, mine in enumerate(rows):
        owner[federation.ids[mine]] = number
    pool = federation.pool_clients() if "pool" in plan.method.needs else None
    every_test = metrics.GLOBAL_ACCURACY.name in plan.settings.metrics
    for number, mine in enumerate(rows):
        part = federation.host(federation.ids[mine])
        # Without a metric of all test sets, a block needs only the ones that its own clients use.
        if not every_test:
            kept, test_of = part.test_of.unique(return_inverse=True)
            part = replace(
                part, tests=tuple(part.tests[one] for one in kept.tolist()), test_of=test_of
            )
        # Planted clusters go only to a method that declares them, as in `Federation.host`.
        if federation.truth is not None and "truth" in plan.method.needs:
            part = replace(part, truth=Truth(federation.truth.cluster[mine], (), ()))
        yield BlockSpec(number, replace(plan, federation=part), owner, pool)


def simulate_in_blocks(
    federation: Federation,
    method: Method,
    *,
    model: ModelSource,
    blocks: int | Sequence[int],
    start: StartBlocks,
    settings: Settings | None = None,
    seed: int = 0,
    label: str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    notes: Callable[[Note], None] | None = None,
    saved: Callable[[], None] | None = None,
    plan_engine: EngineChoice | None = None,
) -> Run:
    """Run a method over a federation hosted in blocks; the bytes are those of `simulate`.

    A block that dies costs the rounds since the last checkpoint: all blocks are started again from
    it, at most three times in a row without a new one.

    Args:
        federation: the data.
        method: the method.
        model: what clients train.
        blocks: how many blocks, or the number of clients of each.
        start: starts them: `ThreadBlocks.start`, or `actors.start_actors` on Ray.
        settings: the settings of the run.
        seed: of the run.
        label: name of the method in results.
        folder: folder for results and checkpoints; without one, a run whose block dies begins
            again.
        resume: continue from the checkpoint in `folder`, if there is one; one process or any blocks
            wrote it.
        observer: called after each round.
        notes: called when something takes seconds, and when blocks are started again.
        saved: called after the files in `folder` were written.
        plan_engine: that the plan of this run has chosen; see `simulate`.

    Raises:
        ConfigError: when something of the run needs all clients in one process.
        BlockDied: when blocks die repeatedly.
    """
    settings = settings or Settings()
    check_block_settings(method, settings)
    where, failed = None if folder is None else Path(folder), list[int | None]()
    while True:
        try:
            with _host_in_blocks(blocks, start) as host:
                return simulate(
                    federation, method, model=model, settings=settings, seed=seed, label=label,
                    folder=where, resume=resume, observer=observer, notes=notes, saved=saved,
                    host=host, plan_engine=plan_engine,
                )  # fmt: skip
        except BlockDied as died:
            done = None if where is None else checkpoint.count_stored_rounds(where)
            # A lost machine is not counted: each time there is one less, so it ends.
            if not isinstance(died, MachineGone):
                failed.append(done)
            # Three failures at one checkpoint are no accident of a machine: the run cannot get
            # past it.
            if failed[-_TRIES:].count(done) == _TRIES:
                raise
            resume = where is not None
            if notes is not None:
                begin = "the beginning" if done is None else f"round {done}"
                notes(Note(label or method.kind, seed, f"{died}; all blocks go on from {begin}"))


@contextmanager
def _host_in_blocks(
    blocks: int | Sequence[int], start: StartBlocks
) -> Iterator[Callable[[RunPlan, Task, Record], DriverLoop]]:
    """Yield a function that hosts a run in blocks, which end with the context."""
    with ExitStack() as stack:

        def make_driver(plan: RunPlan, task: Task, record: Record) -> DriverLoop:
            rows = partition_clients(len(task), blocks)
            return DriverLoop(
                plan,
                task,
                record,
                stack.enter_context(start(iterate_block_specs(plan, rows))),
                rows,
            )

        yield make_driver
