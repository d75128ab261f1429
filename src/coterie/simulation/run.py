"""simulate(): warm-up, rounds and final evaluation of a whole population, with checkpoints."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from coterie._util import pages
from coterie._util.claims import claim_folder
from coterie._util.facts import Described
from coterie._util.mappings import index_by_name
from coterie._util.names import format_client, format_clients, shorten_text
from coterie._util.settings import format_brief
from coterie.data.federation import Federation
from coterie.engine import EngineChoice
from coterie.engine.device import check_device
from coterie.engine.native.compiler import report_compiling
from coterie.engine.task import Task
from coterie.errors import CheckpointError, ConfigError, RunExistsError, require
from coterie.exchange import accepting
from coterie.exchange.base import Exchange
from coterie.exchange.in_memory import InMemory
from coterie.functional.metrics import ACCURACY, DIVERGED, LOSS, REGISTRY, Metrics
from coterie.methods.base import Method, list_report_metrics
from coterie.methods.cost import CostSetting
from coterie.models.layout import ModelSource, NamedModel, custom_model_name
from coterie.rng import Rng
from coterie.runtime import checkpoint
from coterie.runtime.final_metrics import list_diverged_clients, select_defined, select_final_tests
from coterie.runtime.loop import Loop
from coterie.runtime.models import Kind, Models, Which, collect_models
from coterie.runtime.newcomers import (
    NewcomerSplit,
    find_newcomers,
    join_newcomers,
    separate_newcomers,
)
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings
from coterie.runtime.taken_home import check_models_home
from coterie.runtime.task import make_task
from coterie.runtime.virtual_time import Clock
from coterie.simulation import _memory, attackers
from coterie.simulation._phases import check_phases
from coterie.simulation._sequential import select_loop
from coterie.simulation.notebook import Bar, open_bar
from coterie.simulation.workers import end_unguarded_import

__all__ = ["Note", "Observer", "Progress", "Run", "Settings", "simulate"]


@dataclass(frozen=True)
class Progress:
    """The state of a run after a round, as an observer receives it.

    `score` is the mean over clients of the validation metric that goes with the loss, and `metric`
    its name; NaN where there is none. Of `diverged` clients the loss is not finite: then both means
    are NaN. `reported` has means over clients of what the method reported; `engine` says which
    engine trains, and why; `point` is that of a sweep.
    """

    label: str
    seed: int
    round: int
    rounds: int
    loss: float
    score: float
    seconds: float
    reported: Mapping[str, float] = field(default_factory=dict)
    engine: str = ""
    metric: str = ACCURACY.name
    point: str = ""
    diverged: int = 0

    @property
    def run_name(self) -> str:
        """The name of the run, such as "DAC, seed 0"."""
        return name_run(self.label, self.seed, self.point)

    def describe_score(self) -> str:
        """Describe the validation metric or loss in a few words; "" if it was not evaluated."""
        if np.isnan(self.score):
            return "" if np.isnan(self.loss) else f"val. loss {self.loss:.4g}"
        metric = REGISTRY[self.metric]
        title = "acc." if metric == ACCURACY else metric.short
        return f"val. {title} {metric.format_value(self.score, brief=True)} {metric.unit}".rstrip()

    def describe_round(self) -> str:
        """Describe the round and what it reached in a few words."""
        rounds = f"round {self.round + 1}/{self.rounds}"
        return ", ".join(filter(None, (rounds, self.describe_score())))

    @property
    def accuracy(self) -> float:
        """The mean validation accuracy; NaN where another metric goes with the loss."""
        if self.metric != ACCURACY.name:
            return math.nan
        return self.score


@dataclass(frozen=True)
class Note:
    """What a run does before its first round where that takes seconds: it compiles the model."""

    label: str
    seed: int
    text: str
    point: str = ""

    def __str__(self) -> str:
        return f"{name_run(self.label, self.seed, self.point)}: {self.text} ..."


@dataclass(frozen=True)
class FilesSaved:
    """A run of a study has written its files: a checkpoint, or its results."""

    folder: Path


def name_run(label: str, seed: int, point: str = "") -> str:
    """Return the name of a run in messages: its method, its seed, and its point of a sweep."""
    return f"{label}, seed {seed}" + f", {point}" * bool(point)


Observer = Callable[[Progress], None]


@dataclass(frozen=True)
class RunPlan:
    """What a run consists of, for a process that hosts its clients elsewhere.

    Args:
        federation: of the clients that take part in the rounds, with their planted clusters.
        method: of the run.
        model: what they train.
        settings: of the run, with the engine and the block that the whole population calls for.
        seed: of the run.
        attack_groups: the attackers, and how they attack.
    """

    federation: Federation
    method: Method
    model: ModelSource
    settings: Settings
    seed: int
    attack_groups: attackers.AttackGroups


HostClients = Callable[[RunPlan, Task, Record], Loop]
"""Returns the loop of a run whose clients other processes host; see `cluster.blocks`."""


@dataclass(frozen=True, repr=False)
class Run(Described):
    """The result of a run.

    Attributes:
        metrics: data frame with the columns round, client, cluster, split, model, metric, value.
        edges: data frame with the columns round, reader, read, purpose, weight, bytes.
        timing: wall_s, train_s and train_samples.
        params: the evaluated model of each client.
        diverged: ids of the clients whose model became NaN or infinite.
        folder: where its files are; None when nothing was written.
        names: the names of the clients by id; empty where clients are numbers.
        models: the trained models of the clients.
        engine: what trained them, and why no faster engine did.
    """

    label: str
    seed: int
    method: Method
    settings: Settings
    metrics: pd.DataFrame
    edges: pd.DataFrame
    timing: dict[str, float]
    params: Float[Tensor, "clients params"]
    diverged: tuple[int, ...]
    folder: Path | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    models: Models | None = None
    engine: str = ""

    def model(self, client: int | str, which: Which = "evaluated") -> nn.Module:
        """Return a client's trained model, by its name or number; see `Models.model`."""
        return self._available_models.model(client, which)

    def predict(
        self,
        client: int | str,
        x: Any,
        kind: Kind = "outputs",
        *,
        which: Which = "evaluated",
        batch_size: int = 256,
    ) -> Tensor | np.ndarray:
        """Return what a client's model predicts for samples; see `Models.predict`."""
        return self._available_models.predict(client, x, kind, which=which, batch_size=batch_size)

    @property
    def _available_models(self) -> Models:
        if self.models is None:
            raise ConfigError("this run has no models; expected one that simulate returned")
        return self.models

    @property
    def metrics_by_name(self) -> pd.DataFrame:
        """The metrics with the name of each client in place of its id."""
        ids = self.metrics["client"].to_numpy()
        known = {client: format_client(self.names, client) for client in sorted({*ids.tolist()})}
        return self.metrics.assign(client=pd.Series(known, dtype=object).loc[ids].to_numpy())

    def facts(self) -> tuple[str, dict[str, Any]]:
        """Return a title and a summary of the results by name; `print` and notebooks show it."""
        table = self.metrics
        last = int(table["round"].to_numpy().max())
        known, final = Metrics({**REGISTRY, **list_report_metrics(self.method)}), {}
        known |= index_by_name(self.settings.output_metrics)
        tests = select_final_tests(table).set_index("client")
        losses = tests.loc[(tests["metric"] == LOSS.name).to_numpy(), "value"]
        for name, rows in tests.groupby("metric", sort=False, observed=True):
            metric = known[str(name)]
            # The same clients are left out as in reports.
            value = select_defined(pd.Series(rows["value"]), losses, metric).to_numpy(float)
            mean = away = math.nan
            if len(value):
                mean, away = float(value.mean()), float(value.std())
            spread = f"{metric.format_value(mean)} ± {metric.format_value(away)}"
            final[metric.heading("test")] = f"{spread} (mean ± std over clients)"
        lost = "no client"
        if self.diverged:
            lost = f"{len(self.diverged)} of {len(self.params)} clients"
        if self.diverged and self.names:
            lost += f" ({format_clients(self.names, self.diverged)})"
        return f"Run of {self.label!r} with seed {self.seed}", {
            "method": format_brief(self.method),
            "clients": len(self.params),
            "rounds": last + 1,
            **final,
            DIVERGED.title: lost,
            "engine": self.engine or "unknown",
            "folder": self.folder or "none: nothing was written",
        }


def simulate(
    federation: Federation,
    method: Method,
    *,
    model: ModelSource,
    settings: Settings | None = None,
    seed: int = 0,
    label: str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    exchange: Exchange | None = None,
    notes: Callable[[Note], None] | None = None,
    saved: Callable[[], None] | None = None,
    host: HostClients | None = None,
    plan_engine: EngineChoice | None = None,
) -> Run:
    """Run a method over a whole federation in this process.

    Args:
        federation: the data.
        method: a method of METHODS, or your own.
        model: a name of `models.NETS`, an import path, an nn.Module, or a factory of modules.
        settings: the settings of the run.
        seed: the seed of all random streams of the run, 0 or larger.
        label: name of the method in results; its kind when None.
        folder: folder for metrics, edges, checkpoint and provenance; nothing is written when None.
        resume: continue from the checkpoint in `folder`, if there is one.
        observer: called after each round. In a notebook a bar shows the rounds where there is
            neither an observer nor `notes`.
        exchange: an exchange other than `InMemory`, for example `Faulty`.
        notes: called when the run begins something that takes seconds, before its first round.
        saved: called after the files in `folder` were written: with each checkpoint, and at the
            end.
        host: hosts the clients elsewhere; results do not depend on it.
        plan_engine: what engine = "auto" takes, chosen by the work of all runs of the plan that
            this one is of, such as a study; chosen by the work of this run alone when None.

    Raises:
        ConfigError: when the run cannot fit into memory.
        OutOfMemory: when the memory was used up during the run.
        RunExistsError: when the folder holds a run and `resume` is False.
        FolderInUse: when another process runs in the folder.
        CheckpointError: when every checkpoint in the folder is damaged, or they belong to another
            run.
    """
    end_unguarded_import()
    settings = settings or Settings()
    _check_types(federation, method, model, settings)
    label = label or method.kind
    # Seeds are stored as 64-bit integers with a sign.
    require(
        isinstance(seed, Integral) and 0 <= seed < 2**63,
        "seed",
        seed,
        "a whole number, 0 or more and below 2^63",
    )
    check_phases(federation, method, settings, hosted_here=host is None)
    check_device(settings.device)
    started = time.perf_counter()
    claim: AbstractContextManager[Any] = nullcontext()
    showing: AbstractContextManager[Bar | None] = nullcontext()
    if observer is None and notes is None:
        advice = "with a folder, resume=True goes on where it was"
        showing = open_bar(settings.rounds, "rounds", advice)
    if folder is not None:
        folder = Path(folder)
        claim = claim_folder(folder)
    # The claim is inside: a library may run out of memory anywhere in it.
    with _memory.translate_memory_errors(settings.device), claim, showing as bar:
        # Under the claim: no other process can begin a run in between.
        if folder is not None and not resume and checkpoint.has_run(folder):
            raise RunExistsError(
                f"{folder} holds a run already; resume it, overwrite it, or choose another folder"
            )
        began, why, data = {}, "", ""
        if settings.engine == "auto" and not settings.portable and plan_engine is not None:
            began, why = {"engine": plan_engine.name}, plan_engine.reason
        # Engines agree up to rounding only: a resumed run keeps the one that it began with.
        stored = {}
        if folder is not None and settings.engine == "auto" and resume:
            stored = checkpoint.load_engine(folder)
        if folder is not None and stored:
            began, why = stored, checkpoint.load_engine_reason(folder)
        # Of the data as they were given, before anything is changed in them.
        if folder is not None:
            data = federation.compute_digest()
        parts, attacked, federation, taking = _select_participants(
            federation, settings, method, seed
        )
        reporting: AbstractContextManager[Any] = nullcontext()
        if notes is not None:
            reporting = report_compiling(lambda text: notes(Note(label, seed, text)))
        with reporting:
            own = dataclasses.replace(settings, **began)
            task = make_task(taking, method, model, own, follows_phases=True)
            # A compiler may be missing here: then another engine runs, for a reason of its own.
            if why and task.engine.name == began["engine"]:
                task.engine.reason = why
        # The engine and the block of the whole population: neither a block of clients nor newcomers
        # may choose others, since engines agree only up to rounding.
        fixed = dataclasses.replace(settings, engine=task.engine.name, block=task.block)
        if host is None:
            check_memory(task, taking, method, settings, stored=folder is not None)
            loop = _make_loop(
                task, federation, method, settings, seed, exchange, parts, attacked, data
            )
        else:
            check_driver_memory(task, taking, method, settings)
            plan = RunPlan(taking, method, model, fixed, seed, attacked)
            hidden = attackers.make_attacker_mask(attacked, task.population)
            loop = host(plan, task, _make_record(federation, settings, parts, hidden, data))
        identity, earlier = "", {}
        if folder is not None:
            identity = checkpoint.compute_identity(
                method, settings, seed, taking, task, custom_model_name(model)
            )
        if folder is not None and resume:
            earlier = checkpoint.load(folder, loop, identity)
            # Where the file of the times was lost, those of the rounds so far are not known.
            if loop.next_round >= 0:
                earlier = {"wall_s": math.nan, "train_s": math.nan, **earlier}
        for line in loop.check_translation(taking):
            if notes is not None:
                notes(Note(label, seed, line))
        written, pause = time.perf_counter(), settings.checkpoint_seconds
        # Large tensors of a round are reused in the next one.
        with pages.reuse_pages():
            while not loop.is_finished:
                loop.run_next_round()
                if observer is not None:
                    observer(_make_progress(loop, label, seed, started))
                elif bar is not None:
                    now = _make_progress(loop, label, seed, started)
                    bar.done = now.round + 1
                    bar.draw_sometimes(f"{now.run_name}: {now.describe_round()}")
                # Not after the last round: the checkpoint below follows at once.
                if (
                    folder is not None
                    and time.perf_counter() - written >= pause
                    and not loop.is_finished
                ):
                    begun = time.perf_counter()
                    checkpoint.save(folder, loop, identity, _collect_timing(loop, started, earlier))
                    if saved is not None:
                        saved()
                    written = time.perf_counter()
                    # With a large population or a slow disk, writing must not take more than a
                    # twentieth of the time.
                    if pause:
                        pause = max(settings.checkpoint_seconds, 20 * (written - begun))
            # Before the final evaluation, so that the run can be made longer later.
            if folder is not None:
                checkpoint.save(folder, loop, identity, _collect_timing(loop, started, earlier))
                if saved is not None:
                    saved()
            params = loop.evaluate_final()
            if bar is not None:  # why no faster engine, and what compiling would gain
                now = _make_progress(loop, label, seed, started)
                bar.results.append(f"engine: {now.engine}")
                bar.draw(f"{now.run_name}: {now.describe_round()}")
            if parts is not None:
                join_newcomers(loop, make_task(parts.all_clients, method, model, fixed), parts)
        timing = _collect_timing(loop, started, earlier)
        models = collect_models(loop, model, label, folder)
        if settings.check:
            loop.translation = {**loop.translation, "home": check_models_home(models, loop)}
        if folder is not None:
            checkpoint.finish_run(folder, loop, identity, timing, models.make_files())
            if saved is not None:
                saved()
    metrics = loop.record.metrics
    return Run(
        label, seed, method, settings, metrics, loop.record.edges, timing, params,
        list_diverged_clients(metrics), folder, federation.names_by_id, models, task.engine.reason,
    )  # fmt: skip


def reopen_loop(
    folder: str | Path,
    federation: Federation,
    method: Method,
    *,
    model: ModelSource,
    settings: Settings,
    seed: int,
) -> Loop:
    """Return a stored run's loop as its checkpoint left it: after its last round when finished.

    Args:
        folder: the run's folder.
        federation: its data.
        method: its method.
        model: its model.
        settings: its settings.
        seed: its seed.

    Raises:
        CheckpointError: when the checkpoint is missing, damaged, or belongs to another run.
    """
    # Without this, an empty folder would look like a run before its first round.
    if not checkpoint.has_run(Path(folder)):
        raise CheckpointError(
            f"{folder} has no {checkpoint.FILE}; expected the folder of a run that has begun"
        )
    parts, attacked, federation, taking = _select_participants(federation, settings, method, seed)
    own = dataclasses.replace(settings, **checkpoint.load_engine(Path(folder)))
    task = make_task(taking, method, model, own, follows_phases=True)
    loop = _make_loop(task, federation, method, settings, seed, None, parts, attacked)
    checkpoint.load(
        Path(folder),
        loop,
        checkpoint.compute_identity(method, settings, seed, taking, task, custom_model_name(model)),
    )
    return loop


def compute_run_identity(
    task: Task,
    federation: Federation,
    method: Method,
    model: ModelSource,
    settings: Settings,
    seed: int,
) -> str:
    """Return the identity of the run of a task, as its checkpoint and provenance have it.

    Args:
        task: of the model; its engine does not matter.
        federation: the data of all clients, as they were given.
        method: of the run.
        model: of the run.
        settings: of the run.
        seed: of the run.
    """
    *_, taking = _select_participants(federation, settings, method, seed)
    return checkpoint.compute_identity(
        method, settings, seed, taking, task, custom_model_name(model)
    )


def _select_participants(
    federation: Federation, settings: Settings, method: Method, seed: int
) -> tuple[NewcomerSplit | None, attackers.AttackGroups, Federation, Federation]:
    """Return the newcomers, the attackers, all data as the run sees them, and participants' data."""
    # Newcomers first: the rest of the run is that of a federation without them.
    parts = separate_newcomers(federation, settings, method, seed)
    attacked = attackers.choose_attackers(federation, settings.attack_list, seed)
    flipped = attackers.flip_labels(federation, attacked)
    return parts, attacked, flipped, flipped if parts is None else parts.participants


def _make_loop(
    task: Task,
    federation: Federation,
    method: Method,
    settings: Settings,
    seed: int,
    exchange: Exchange | None,
    parts: NewcomerSplit | None,
    attacked: attackers.AttackGroups,
    data: str = "",
) -> Loop:
    # Attackers replace what they publish: a method sees them like all others.
    door = attackers.wrap_exchange(
        exchange or InMemory(task.ids, task.population), attacked, task, seed
    )
    hidden = attackers.make_attacker_mask(attacked, task.population)
    record = _make_record(federation, settings, parts, hidden, data)
    loop = select_loop(settings, method)
    extensions = attackers.make_all_extensions(method, settings, attacked, task.population)
    return loop(task, method, door, settings, Rng(seed), record, extensions)


def _make_record(
    federation: Federation,
    settings: Settings,
    parts: NewcomerSplit | None,
    hidden: Tensor | None,
    data: str = "",
) -> Record:
    truth, ids = torch.full((federation.population,), -1), None
    if federation.truth is not None:
        truth = federation.truth.cluster
    if parts is not None:
        ids = parts.ids
    later = []
    for phase in federation.phases:
        planted = torch.full_like(truth, -1)
        if phase.truth is not None:
            planted = phase.truth.cluster
        later.append((phase.first, planted))
    return Record(
        truth, federation.names_by_id, ids, hidden, settings.record_similarities, data,
        ages=settings.schedule == "asynchronous", later_clusters=later,
    )  # fmt: skip


def _check_types(federation: object, method: object, model: object, settings: object) -> None:
    """Refuse arguments of a wrong type, which would fail somewhere inside."""
    named = isinstance(model, str | NamedModel)
    for name, found, fits, words in (
        (
            "federation",
            federation,
            isinstance(federation, Federation),
            "a Federation, as `from_arrays` makes one",
        ),
        (
            "method",
            method,
            isinstance(method, Method),
            "a method, such as METHODS['dac'](num_peers=5)",
        ),
        (
            "model",
            model,
            named or callable(model),
            "a name, an nn.Module, or a function that makes one",
        ),
        ("settings", settings, isinstance(settings, Settings), "Settings(...)"),
    ):
        if not fits:
            raise ConfigError(f"{name} is {shorten_text(repr(found), 80)}; expected {words}")


def check_run(
    federation: Federation,
    method: Method,
    model: ModelSource,
    settings: Settings,
    seeds: Sequence[int] = (0,),
) -> Task:
    """Check a run before anything is written: one training step, and the method's first state.

    The arguments and errors are those of `make_task`; a method may refuse data that it cannot use.
    With each of the seeds there must be the clients that attack or join late.
    """
    _check_types(federation, method, model, settings)
    check_phases(federation, method, settings)
    for seed in seeds:
        find_newcomers(federation, settings, method, seed)
        attackers.choose_attackers(federation, settings.attack_list, seed)
    for attack in settings.attack_list:
        attack.load_function()
    # The forecast makes the method's first state, of two small populations.
    task = make_task(federation, method, model, settings, follows_phases=True)
    if settings.virtual_time is not None:
        Clock(settings.virtual_time, task.count_steps(settings.local), seeds[0])
    _forecast_run(task, federation, method, settings, stored=False)
    return task


def check_memory(
    task: Task, federation: Federation, method: Method, settings: Settings, *, stored: bool = False
) -> None:
    """Refuse a run that cannot fit into the memory of a process that hosts the clients of a task.

    Args:
        task: of all clients, or of a block of the population.
        federation: their data.
        method: the method.
        settings: of the run.
        stored: whether this process writes checkpoints.

    Raises:
        ConfigError: with the numbers.
    """
    wanted = _forecast_run(task, federation, method, settings, stored=stored)
    _memory.check_forecast(wanted, settings.device, _memory.available_bytes(settings.device))


def check_driver_memory(
    task: Task, federation: Federation, method: Method, settings: Settings
) -> None:
    """Refuse a run whose blocks' driver needs more memory than there is; see `check_memory`."""
    moments = (
        method.tracks * settings.local.num_moments * settings.local.persistent_client_optimizer
    )
    wanted = _memory.forecast_driver_memory(
        clients=len(task),
        params=task.layout.size,
        itemsize=task.dtype.itemsize,
        kept=1 + settings.keeps_best_models(method.server) + moments,
        data=federation.nbytes,
        remembered=_memory.estimate_method_memory(method, task)[0]
        + _growing_lists(task, method, settings),
        rounds=settings.rounds,
        reads=_expected_reads(method, task),
    )
    _memory.check_forecast(wanted, "cpu", _memory.available_bytes("cpu"))


def _forecast_run(
    task: Task, federation: Federation, method: Method, settings: Settings, *, stored: bool
) -> _memory.Forecast:
    remembered, published = _memory.estimate_method_memory(method, task)
    judges = settings.acceptance_rules_for(method) is not None
    remembered += _growing_lists(task, method, settings)
    elsewhere = task.population - len(task)
    reads = _expected_reads(method, task)
    free = settings.schedule == "asynchronous"
    # Of late clients the state from before the round stays until their training is over.
    late = settings.has_deadline
    if free or late:  # of what clients remember before their round, and at its end
        remembered *= 2
    share = settings.participation
    if share > 1:  # a count of clients
        share /= task.population
    # From elsewhere come at most as many models as there are clients.
    received = min(elsewhere, reads * len(task))
    if method.server:
        received = share * elsewhere
    steps = _memory.count_step_copies(method, settings.local)
    return _memory.forecast_memory(
        clients=len(task),
        params=task.layout.size,
        itemsize=task.dtype.itemsize,
        block=task.block,
        data=federation.nbytes,
        keeps_best=settings.keeps_best_models(method.server),
        further=_memory.count_model_copies(
            server=method.server,
            whole=settings.participation == 1,
            narrowed=not task.sharing.shares_all,
            # All models of a method that takes the steps itself are counted as those of steps.
            tracks=1 if steps else method.tracks,
            train_first=(settings.order or method.order) == "train_first",
        )
        + judges
        + steps
        # In virtual time: of rounds that have begun, and on the boards, where messages are also on
        # their way.
        + 3 * free
        + 2 * late,
        # Optimizer values count only where they outlast a round.
        moments=method.tracks
        * settings.local.num_moments
        * settings.local.persistent_client_optimizer,
        remembered=remembered,
        published=published,
        rounds=0 if elsewhere else settings.rounds,  # the driver has the tables of blocks
        reads=reads,
        stored=stored,
        received=received,
    )


def _growing_lists(task: Task, method: Method, settings: Settings) -> int:
    """Return the most bytes of the lists that grow in a run: a method's, and of peers refused.

    Every client that judges refuses every model that it reads, each time another peer's.
    """
    # Lists are as wide as that of the client that took part most often.
    rounds, others = _most_rounds(task, settings), task.population - 1
    size = method.count_list_bytes(rounds, others)
    if settings.acceptance_rules_for(method) is not None:
        refused = min(others, math.ceil(_expected_reads(method, task) * rounds))
        size += accepting.BYTES_OF_STRIKES * refused
    return len(task) * size


def _most_rounds(task: Task, settings: Settings) -> int:
    """Return in how many rounds the client takes part that does so most often, nearly."""
    if settings.schedule == "asynchronous":
        # Each client has rounds of its own, as many as it ends in the time of the run.
        time = settings.virtual_time
        assert time is not None
        fastest = float(Clock(time, task.count_steps(settings.local), seed=0).work.min())
        return math.ceil(settings.rounds * time.record_seconds / fastest)
    share = settings.participation
    if share > 1:  # a count of clients
        share /= task.population
    # Of a million clients, one is in five standard deviations more than the mean.
    mean = share * settings.rounds
    spread = math.sqrt(mean * max(0.0, 1 - share))
    return min(settings.rounds, math.ceil(mean + 5 * spread))


def _expected_reads(method: Method, task: Task) -> float:
    """Return how many peers' models a client reads in the first round; ten where not known."""
    if method.server:
        return 0.0
    try:
        return method.cost(CostSetting.from_task(task), 0).models
    except ConfigError:
        return 10.0


def _collect_timing(loop: Loop, started: float, earlier: dict[str, float]) -> dict[str, float]:
    return {
        "wall_s": time.perf_counter() - started + earlier.get("wall_s", 0.0),
        "train_s": loop.train_seconds + earlier.get("train_s", 0.0),
        "train_samples": loop.train_samples,
    }


def _make_progress(loop: Loop, label: str, seed: int, started: float) -> Progress:
    means = loop.mean_validation()
    # The last metric is the one that goes with the loss.
    metric = loop.task.engine.metrics[-1]
    return Progress(
        label=label,
        seed=seed,
        round=loop.next_round - 1,
        rounds=loop.settings.rounds,
        loss=means.get(LOSS.name, math.nan),
        score=math.nan if metric == LOSS.name else means.get(metric, math.nan),
        seconds=time.perf_counter() - started,
        reported=dict(loop.mean_reports),
        engine=loop.task.engine.reason,
        metric=metric,
        diverged=int(loop.diverged_on_validation.sum()),
    )
