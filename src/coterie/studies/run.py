"""run_study(): methods x seeds over one federation for each seed, in folders that can be resumed.

    runs/<study>/config.toml                  the study, fully resolved
    runs/<study>/engines.json                 the engine of each method, where "auto" chose it
    runs/<study>/federation.json              the first seed's data: clusters, labels, some samples
    runs/<study>/summary.json                 the results, reduced
    runs/<study>/<method-label>/seed-<n>/     one run: config, metrics, edges, checkpoint,
                                              provenance; own-code.json, of import paths

Runs are independent: they may be done in any order, in any number of processes, at once or after an
interruption, and leave the same bytes. Each is claimed by the process that works on it, so that
several processes can share a study. Each folder has a manifest with the digests of its files
(`_util/manifest.py`).
"""

import copy
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd

from coterie._util import manifest
from coterie._util.claims import LOCK, claim_folder, find_owner
from coterie._util.facts import Described
from coterie._util.files import check_folder, resolve_path, write_atomically
from coterie.data.federation import Federation
from coterie.data.schema import FILE as SCHEMA_FILE
from coterie.data.schema import TableSchema
from coterie.engine import ENGINE_NAMES, EngineChoice
from coterie.engine.task import Task
from coterie.errors import (
    CheckpointError,
    ConfigError,
    CoterieError,
    FolderInUse,
    RunExistsError,
    describe_unknown,
    require,
)
from coterie.models.layout import ModelSource, is_bundled
from coterie.results import gains, selection, stored_runs, summary
from coterie.results.coverage import RunStatus
from coterie.results.stored_runs import CONFIG
from coterie.runtime import checkpoint, models
from coterie.runtime.final_metrics import list_diverged_clients
from coterie.runtime.loop import Loop
from coterie.simulation.run import (
    FilesSaved,
    Note,
    Observer,
    Progress,
    check_run,
    compute_run_identity,
    reopen_loop,
    simulate,
)
from coterie.simulation.workers import FanOut, end_unguarded_import, fan_out
from coterie.studies import config, engine_choice
from coterie.studies.definition import LABEL, MethodConfig, StudyConfig, is_label
from coterie.studies.describe import describe_federation
from coterie.studies.inputs import FederationSource, StudyInputs, TrialData
from coterie.studies.jobs import FoundRuns, FoundTable, Job
from coterie.studies.notebook import watch_in_notebook
from coterie.studies.store import OWN_CODE, RunStore, compute_own_code, take_run

# Hidden, so that a folder with it alone counts as one without a run.
FAILURE_FILE = ".failure.txt"
# PyTorch sends tensors to worker processes through files in this folder.
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, repr=False)
class Study(Described):
    """A study that has run.

    Args:
        folder: where everything is.
        config: what was run.
        summary: the content of summary.json: `rows` and `timing`, the `seeds` that rows are means
            over, and how each run stands that is `left_out`.
        diverged: for each run that lost clients to NaN or infinity: which clients.
        names: the names of the clients by id; empty where clients are numbers.
        server: whether a method of it has a server.
        elsewhere: the runs that other processes were working on, and which processes; the summary
            does not have them yet.
    """

    folder: Path
    config: StudyConfig
    summary: Mapping[str, Any]
    diverged: Mapping[Job, tuple[int, ...]]
    server: bool = False
    elsewhere: Mapping[Job, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)

    def facts(self) -> tuple[str, dict[str, Any]]:
        """Return a title and a short description by name."""
        left_out = len(self.summary.get("left_out", ()))
        return f"Study {self.config.name!r}", {
            "methods": ", ".join(method.label for method in self.config.methods),
            "seeds": ", ".join(map(str, self.summary["seeds"])) or "none that all methods have",
            "runs": f"{len(self.summary['timing'])} finished"
            + f", {left_out} left out" * bool(left_out),
            "folder": self.folder,
        }

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of the summary as a data frame."""
        columns = ("method", "label", "cluster", "metric", "mean", "std", "seeds")
        return pd.DataFrame(self.summary["rows"], columns=columns)

    def gains(self) -> dict[str, Any]:
        """Return what each client gained by collaboration; see `gains.compute_study_gains`."""
        return gains.compute_study_gains(self.folder)


@dataclass(frozen=True)
class _JobWithData:
    """A job with the data that all workers share; None where shared memory is too small."""

    job: Job
    federation: Federation | None

    def __str__(self) -> str:
        return str(self.job)


@dataclass(frozen=True)
class _PlanWork:
    """What a worker needs to do any run of a plan; a call does one.

    Args:
        folder: of the plan: that of its study, or of the sweep whose points are studies.
        studies: the study of each point; of "" where the plan is one study.
        inputs: the data and the model.
        run: does one run.
        engines: what the plan has chosen for engine = "auto", by point and label.
    """

    folder: Path
    studies: Mapping[str, StudyConfig]
    inputs: StudyInputs
    run: Callable[..., object] = simulate
    engines: Mapping[tuple[str, str], EngineChoice] = field(default_factory=dict)

    def __call__(self, given: _JobWithData, emit: Callable[[object], None]) -> bool:
        """Do a job unless another process has it; return whether this process did it."""
        job, folder, study = given.job, self.job_folder(given), self.studies[given.job.point]
        entry, inputs = study.scale_method(job.label), self.inputs.select_study(study)

        def report(message: Progress | Note) -> None:
            emit(replace(message, point=job.point))

        try:
            with claim_folder(folder):
                if _is_complete(folder):  # another process has done it since it was listed
                    return False
                (folder / FAILURE_FILE).unlink(missing_ok=True)
                own = study.select_run(job.label, job.seed)
                # Under the claim: nothing changes between this check and the new configuration.
                _check_same_settings(own, self.folder / job.point)
                files = {CONFIG: config.format_study(own).encode()}
                # What import paths lead to has no version: its text says whether a run can go on.
                if code := compute_own_code(own):
                    files[OWN_CODE] = json.dumps(code, indent=1).encode()
                manifest.replace_files(folder, files)
                # A copy on another machine has the configuration before the first checkpoint.
                emit(FilesSaved(folder))
                self.run(
                    given.federation or inputs.make_federation(job.seed),
                    entry.method,
                    model=inputs.model_source,
                    settings=entry.settings,
                    seed=job.seed,
                    label=job.label,
                    folder=folder,
                    resume=True,
                    observer=report,
                    notes=report,
                    saved=lambda: emit(FilesSaved(folder)),
                    plan_engine=self.engines.get((job.point, job.label)),
                )
        except FolderInUse:
            return False
        except (CoterieError, OSError, MemoryError) as error:
            write_failure(folder, error)
            raise
        return True

    def job_folder(self, given: _JobWithData) -> Path:
        """Return the folder of a job."""
        return run_folder(self.folder, given.job)

    def relocate(self, folder: Path) -> "_PlanWork":
        """Return the same work in another folder, on another machine; its jobs carry their data."""
        return replace(self, folder=folder, inputs=self.inputs.without_data())

    def make_federation(self, job: Job) -> Federation:
        """Return the data of a job."""
        return self.inputs.select_study(self.studies[job.point]).make_federation(job.seed)

    def check_methods(
        self,
        point: str,
        federation: Federation,
        work: engine_choice.PlanWork[tuple[str, str]],
        stored: int | None = None,
    ) -> None:
        """Check before anything is written: one training step of each method's model.

        Args:
            point: whose methods they are.
            federation: the data of its first seed.
            work: to which the runs are added.
            stored: that seed, where its stored runs must have begun with the same models; None
                where there are none.

        Raises:
            CheckpointError: when a stored run had another model.
        """
        study = self.studies[point]
        model = self.inputs.select_study(study).model_source
        for entry in study.methods:
            engine = entry.settings.engine
            if engine not in ENGINE_NAMES:
                raise ConfigError(describe_unknown("engine", engine, ENGINE_NAMES))
            # The loop engine needs no compilation, and the check is of the model and the data.
            quick = replace(entry.settings, engine="loop", portable=False)
            task = check_run(federation, entry.method, model, quick, study.seeds)
            key = point, entry.label
            scaled = study.scale_method(entry.label)
            work.add_method(key, task, scaled.settings, len(study.seeds), study.model)
            if stored is not None:
                folder = run_folder(self.folder, Job(entry.label, stored, point))
                _check_model(folder, task, federation, scaled, model, stored)
                # Of all seeds: no setting shows what a model loads from a file.
                for run in (self.folder / point / entry.label).glob("seed-*"):
                    checkpoint.check_weights(run, task.model.undrawn_digest)

    def data_to_send(self, job: Job, over: FanOut | None, crew: int) -> Federation | None:
        """Return the data of a job if it must carry them, else None.

        None where the worker makes the data itself, or they do not fit into shared memory.
        """
        if over is None:
            return _fit_shared_memory(self.make_federation(job)) if crew > 1 else None
        return self.make_federation(job) if over.far else None


def _fit_shared_memory(federation: Federation) -> Federation | None:
    """Return the federation if shared memory has room for it: containers often have little."""
    room = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else federation.nbytes
    return federation if federation.nbytes <= room else None


def run_study(
    study: StudyConfig | str | Path,
    *,
    out: str | Path = "runs",
    data_dir: str | Path | None = None,
    workers: int = 1,
    resume: bool = True,
    overwrite: bool = False,
    federation: FederationSource | None = None,
    model: ModelSource | None = None,
    observer: Observer | None = None,
    notes: Callable[[Note | FoundRuns | FoundTable], None] | None = None,
    finished: Callable[[Job], None] | None = None,
    over: FanOut | None = None,
) -> Study:
    """Run every method of a study with every seed, as far as these runs are not there yet.

    A study that was stopped goes on with the same call. A run that another study below `out` has,
    with the same settings, data and code, is taken from there; see `studies.store`.

    Args:
        study: a study, the path of a study file, or the name of a built-in one.
        out: the folder under which the study's folder is made.
        data_dir: where datasets lie on disk; COTERIE_DATA when None.
        workers: processes to share the runs among; the results do not depend on it. From 2 on, a
            script needs the usual `if __name__ == "__main__":`.
        resume: continue a stored study: finished runs stay, unfinished ones continue; if False,
            the study's folder must not exist.
        overwrite: delete the study's folder first, and run every run.
        federation: your own data instead of the study's [data], or a function from seed to data.
        model: your own module, or a factory of modules, instead of the study's [model].
        observer: is called after each round of any run.
        notes: is called when a run begins something that takes seconds, before its first round,
            and at first with the schema of a table, and with the runs that are there.
        finished: is called with each run of this call as it ends.
        over: runs the jobs instead of processes of this machine, such as
            `coterie.cluster.runs.open_ray_runs` gives; `workers` is then the largest number of runs
            at the same time.

    Raises:
        RunExistsError: when the study's folder is there and `resume` is False, or it is no study.
        CheckpointError: when a checkpoint to resume is damaged, or what is there is another study.
    """
    study = study if isinstance(study, StudyConfig) else config.load_study(study)
    if study.sweep:
        raise ConfigError(f"{study.name} is a sweep; run it with run_sweep")
    if study.trials_of and not isinstance(federation, TrialData):
        raise ConfigError(
            f"{study.name} holds trials of tuning {study.trials_of}; go on with "
            f"`coterie resume {Path(out) / study.name}`, or with tune_study"
        )
    (done,) = run_studies(
        {"": study}, Path(out) / study.name, out=Path(out), data_dir=data_dir, workers=workers,
        resume=resume,
        overwrite=overwrite, federation=federation, model=model, observer=observer, notes=notes,
        finished=finished, over=over,
    )  # fmt: skip
    return done


def run_studies(
    studies: Mapping[str, StudyConfig],
    folder: Path,
    *,
    out: Path,
    files: Mapping[str, str] | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    resume: bool = True,
    overwrite: bool = False,
    federation: FederationSource | None = None,
    model: ModelSource | None = None,
    observer: Observer | None = None,
    notes: Callable[[Note | FoundRuns | FoundTable], None] | None = None,
    finished: Callable[[Job], None] | None = None,
    over: FanOut | None = None,
) -> tuple[Study, ...]:
    """Run all runs of several studies as one plan: what is there is taken, the rest is done.

    Args:
        studies: by their folders below `folder`, such as "num_clients=8"; "" is the folder itself.
        folder: of the plan.
        out: where equal runs are looked for.
        files: further files of the plan's folder, written before the first run.
        data_dir: as in `run_study`, like all that follow.
        workers: processes.
        resume: continue what is stored.
        overwrite: delete the folders of the studies first.
        federation: the data.
        model: the module.
        observer: is called after each round.
        notes: is called with what is found and begun.
        finished: is called with each run of this call.
        over: runs the jobs.
    """
    end_unguarded_import()
    require(workers >= 1, "workers", workers, "at least 1")
    first = next(iter(studies.values()))
    plan = _PlanWork(folder, studies, StudyInputs(first, data_dir, federation, model))
    resume = resume and not overwrite

    def notify_observers(message: object) -> None:
        if observer is not None and isinstance(message, Progress):
            observer(message)
        elif notes is not None and isinstance(message, Note | FoundRuns | FoundTable):
            notes(message)
        elif finished is not None and isinstance(message, Job):
            finished(message)

    # All checks come before anything is written or deleted.
    check_folder(folder)
    described: dict[str, tuple[int, dict[str, str]]] = {}
    tables: dict[FoundTable, None] = {}
    work = engine_choice.PlanWork[tuple[str, str]]()
    engines: dict[tuple[str, str], EngineChoice] = {}
    # The first point last: its data are at hand for the first run.
    for point, study in [*studies.items()][::-1]:
        _check_folder(study, folder / point, resume, overwrite)
        first = study.seeds[0]
        # Where seeds are added, the one that the study began with shows whether its data are the
        # same. A federation that is given itself may be of the added seed alone.
        if resume and not isinstance(federation, Federation):
            first = _with_stored_seeds(study, folder / point).seeds[0]
        data = plan.inputs.select_study(study).make_federation(first)
        if resume:
            _check_data(folder / point, first, data)
        plan.check_methods(point, data, work, first if resume else None)
        if resume:
            stored = engine_choice.load_choices(folder / point)
            for label, choice in stored.items():
                engines[point, label] = choice
        described[point] = first, _describe_data(data)
        schema = TableSchema.from_federation(data)
        if schema is not None:
            tables[FoundTable(tuple(schema.describe(data.notes)))] = None
    engines |= work.choose_engines(engines)
    plan = replace(plan, engines=engines)
    if overwrite:
        # The folder of a sweep may have points that this one has not.
        for place in [folder] if (folder / CONFIG).exists() else map(folder.joinpath, studies):
            _delete_folder(place)
    for point, study in studies.items():
        _prepare_folder(study, folder / point, *described[point], resume=resume)
        own = {}
        for (where, label), choice in engines.items():
            if where == point:
                own[label] = choice
        if own:
            text = engine_choice.format_choices(own)
            summary.write_study_files(folder / point, {engine_choice.FILE: text})
    if files:
        summary.write_study_files(folder, files)
    # They were read from the last point to the first.
    for table in reversed(tables):
        notify_observers(table)
    # Who observes shows progress; else a notebook does.
    silent = observer is None and notes is None
    with watch_in_notebook(len(list_jobs(studies))) if silent else nullcontext() as bar:

        def notify(message: object) -> None:
            notify_observers(message)
            if bar is not None:
                bar(message)

        _do_runs(plan, RunStore(out), notify, workers=workers, overwrite=overwrite, over=over)
    return tuple(_finish_study(study, folder / point) for point, study in studies.items())


def _do_runs(
    plan: _PlanWork, store: RunStore, notify: Callable[[object], None], *, workers: int,
    overwrite: bool, over: FanOut | None,
) -> None:  # fmt: skip
    """Take the equal runs of other studies, and do the runs that are left."""
    folder, jobs = plan.folder, list_jobs(plan.studies)
    left = [job for job in jobs if not _is_complete(run_folder(folder, job))]
    for job in jobs:
        if job not in left and _has_lost_models(run_folder(folder, job)):
            warnings.warn(
                f"{job}: {models.FILE} was deleted, and so was the checkpoint to write it from; "
                "delete the folder of the run to run it again",
                stacklevel=4,
            )
    # `overwrite` asks for runs, not for results.
    taken = {} if overwrite else _take_equal_runs(plan, left, store)
    left = [job for job in left if job not in taken]
    if len(left) < len(jobs):
        sources = Counter(str(source.parent.parent) for source in taken.values())
        engines = set(map(checkpoint.load_engine_name, taken.values())) - {""}
        notify(FoundRuns(len(jobs), len(jobs) - len(left), sources, engines))
    # Repeated, since a run that another process began and left is taken over here.
    while waiting := [job for job in left if not find_owner(run_folder(folder, job))]:
        crew = min(workers, len(waiting))
        # A generator: data are made, and claims are looked at, when a worker becomes free.
        still_open = (job for job in waiting if _is_open(run_folder(folder, job)))
        given = (_JobWithData(job, plan.data_to_send(job, over, crew)) for job in still_open)
        mine = set()
        for one, did in (over or fan_out)(plan, given, crew, notify):
            if did:
                mine.add(one.job)
                notify(one.job)
        # Others may have finished the rest meanwhile; those of this process it has seen itself.
        others = [job for job in left if job not in mine]
        left = [job for job in others if not _is_complete(run_folder(folder, job))]


def _finish_study(study: StudyConfig, folder: Path) -> Study:
    """Write the summary of a study; it names the runs that other processes still compute."""
    elsewhere = {}
    for job in list_jobs({"": study}):
        if owner := find_owner(run_folder(folder, job)):
            elsewhere[job] = owner
    if study.trials_of:  # there are no test results to reduce
        return Study(folder, study, {"seeds": [], "rows": [], "timing": []}, {}, False, elsewhere)
    done = _summarize_runs(study, folder)
    summary.write_study_files(
        folder, {summary.SUMMARY: json.dumps(done.summary, indent=1, ensure_ascii=False)}
    )
    return replace(done, elsewhere=elsewhere)


def _take_equal_runs(plan: _PlanWork, jobs: Sequence[Job], store: RunStore) -> dict[Job, Path]:
    """Take the runs that other studies have, and return where each came from."""
    taken: dict[Job, Path] = {}
    for job in jobs:
        folder = run_folder(plan.folder, job)
        # A run that has begun goes on from its checkpoint.
        if checkpoint.has_run(folder):
            continue
        run = plan.studies[job.point].select_run(job.label, job.seed)

        # A default binds the job of this turn.
        def compute_digest(job: Job = job) -> str:
            return plan.make_federation(job).compute_digest()

        found = store.find_equal_run(run, folder, compute_digest)
        if found is not None:
            # Another process does this run; it is not taken a second time.
            with suppress(FolderInUse):
                take_run(found, folder, run)
                taken[job] = found
    return taken


def _is_complete(folder: Path) -> bool:
    """Whether a run is finished and undamaged; its checkpoint may have been deleted.

    Models that were deleted are written again as long as there is a checkpoint to do it from.
    """
    listed = (checkpoint.FILE, *models.list_files(folder))
    optional = [name for name in listed if (folder / name).exists()]
    # With its checkpoint the models can be written again: the run goes on to its end.
    if checkpoint.FILE in optional and _has_lost_models(folder):
        return False
    if not checkpoint.is_finished(folder):
        return False
    return not any(manifest.describe_fault(folder, name) for name in (CONFIG, *optional))


def _has_lost_models(folder: Path) -> bool:
    """Whether the models of a run were written and are not there."""
    return any(not (folder / name).exists() for name in models.list_files(folder))


def _is_open(folder: Path) -> bool:
    """Whether a run is still to be done, and no other process is doing it."""
    return not _is_complete(folder) and not find_owner(folder)


def resume_study(
    folder: str | Path,
    *,
    data_dir: str | Path | None = None,
    workers: int = 1,
    federation: FederationSource | None = None,
    model: ModelSource | None = None,
    observer: Observer | None = None,
    over: FanOut | None = None,
) -> Study:
    """Continue the study in a folder (that of a study, or of one of its runs).

    `folder` is what `coterie run` named at its end, or when it was interrupted; the other arguments
    are those of `run_study`: a study with its own data or module needs `federation` or `model`
    again. `resume_plan` continues sweeps and tunings too.

    Raises:
        ConfigError: when there is no study in the folder, or a package that has one of its methods
            is missing.
    """
    study, out = load_stored_study(folder, to_run=True)
    return run_study(
        study, out=out, data_dir=data_dir, workers=workers, resume=True, federation=federation,
        model=model, observer=observer, over=over,
    )  # fmt: skip


def load_stored_study(folder: str | Path, *, to_run: bool = False) -> tuple[StudyConfig, Path]:
    """Return the study in a folder, and the folder under which it was started.

    A renamed folder gives its name to the study; the files of its runs retain the earlier name.

    Args:
        folder: of a study, or of one of its runs.
        to_run: whether it will be continued; to read its results needs no method, see
            `config.parse_study_text`.

    Raises:
        ConfigError: when there is none, or it is to be continued and a package of one of its
            methods is missing.
    """
    study, path = _read_study(folder, to_run=to_run)
    # A name may have several parts, each of which is a folder.
    depth = len(Path(study.name).parts)
    if to_run and stored_runs.is_node_folder(path, study.name):
        raise ConfigError(
            f"{folder} is the folder of a node, whose data are its own: start the node again, "
            "coterie node NODE.toml, and it goes on"
        )
    if path.parts[-depth:] == Path(study.name).parts:
        return study, path.parents[depth - 1]
    if to_run:
        require(
            is_label(path.name), f"{path}: the name of the folder", path.name, f"{LABEL}: rename it"
        )
    renamed = copy.copy(study)
    # For reading results any name of a folder is valid, which `replace` would check.
    object.__setattr__(renamed, "name", path.name)
    return renamed, path.parent


def is_of_node(folder: str | Path) -> bool:
    """Return whether a node between machines writes the study in a folder, or that of a run.

    Raises:
        ConfigError: when there is no study in the folder.
    """
    study, path = _read_study(folder, to_run=False)
    return stored_runs.is_node_folder(path, study.name)


def _read_study(folder: str | Path, *, to_run: bool) -> tuple[StudyConfig, Path]:
    """Return the study in a folder under its stored name, and its folder without links."""
    # Resolved, so that "." has a name too.
    path = resolve_path(folder)
    if path.name.startswith("seed-") and (path.parent.parent / CONFIG).exists():
        path = path.parent.parent
    if not (path / CONFIG).exists():
        raise ConfigError(
            f"{folder} holds no study: no {CONFIG}; expected a folder that `coterie run` made"
        )
    if (path / manifest.FILE).exists() and (fault := manifest.describe_fault(path, CONFIG)):
        raise ConfigError(f"{path}: {fault}; `coterie run STUDY` writes it again")
    text = (path / CONFIG).read_text(encoding="utf-8")
    return config.parse_study_text(text, str(path / CONFIG), to_run=to_run), path


def reopen_run(
    folder: str | Path,
    *,
    data_dir: str | Path | None = None,
    federation: FederationSource | None = None,
    model: ModelSource | None = None,
) -> Loop:
    """Return the loop of a stored run as its checkpoint left it, with its data and model.

    Args:
        folder: of the run, `<study>/<method-label>/seed-<n>`.
        data_dir: as in `run_study`.
        federation: as in `run_study`, for a study with data of its own.
        model: as in `run_study`, for a study with a module of its own.

    Raises:
        ConfigError: when the folder is not that of a run.
        CheckpointError: when the run has not begun, or had other data or settings.
    """
    path = Path(folder)
    if not (path / CONFIG).exists():
        raise ConfigError(f"{folder} holds no run: no {CONFIG}; expected <study>/<method>/seed-<n>")
    found = config.parse_study_text((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))
    if len(found.methods) != 1 or len(found.seeds) != 1:
        raise ConfigError(
            f"{folder} is a study; expected the folder of one run of it, <study>/<method>/seed-<n>"
        )
    inputs = StudyInputs(found, data_dir, federation, model)
    entry, seed = found.scale_method(found.methods[0].label), found.seeds[0]
    return reopen_loop(
        path,
        inputs.make_federation(seed),
        entry.method,
        model=inputs.model_source,
        settings=entry.settings,
        seed=seed,
    )


def load_study_results(folder: str | Path) -> Study:
    """Load the finished runs of a study and summarize them; nothing is written.

    Args:
        folder: of a study, or of one of its runs.

    Raises:
        ConfigError: when there is no study in the folder.
        DataError: when no run of it is there.
    """
    study, out = load_stored_study(folder)
    return _summarize_runs(study, out / study.name)


def find_studies(out: str | Path) -> list[Path]:
    """Return the folders of the studies under a folder; of a sweep, the one with its points."""
    found = {}
    for path in sorted(Path(out).rglob(stored_runs.FEDERATION)):
        folder, above = path.parent, path.parents[1]
        # A sweep has a file of its own, and no data.
        if (above / CONFIG).exists() and not (above / stored_runs.FEDERATION).exists():
            found[above] = None
        elif (folder / CONFIG).exists():
            found[folder] = None
    return [*found]


def list_standings(study: StudyConfig, folder: Path) -> list[RunStatus]:
    """Return how each run of a study in a folder stands; every file of them is read."""
    if not study.trials_of and stored_runs.has_runs(folder):
        return selection.list_run_statuses(*stored_runs.load_runs([folder]), folder)
    stands = []
    for job in list_jobs({"": study}):
        run = run_folder(folder, job)
        state = "unfinished" if checkpoint.has_run(run) else "missing"
        # Trials have no results to read.
        stands.append(RunStatus(job.label, job.seed, "finished" if _is_complete(run) else state))
    return stands


def list_jobs(studies: Mapping[str, StudyConfig]) -> list[Job]:
    """Return every run of a plan, point by point, and seed by seed.

    Args:
        studies: the study of each point; of "" where the plan is one study.
    """
    # Seed by seed, since a process keeps the data of one seed alone.
    jobs = []
    for point, study in studies.items():
        for seed in study.seeds:
            for entry in study.methods:
                jobs.append(Job(entry.label, seed, point))
    return jobs


def run_folder(folder: Path, job: Job) -> Path:
    """Return the folder of one run of the plan in a folder."""
    return folder / job.point / job.label / f"seed-{job.seed}"


def write_failure(folder: Path, error: BaseException) -> None:
    """Write the error of a run into its folder, for `coterie status`; its next start removes it."""
    with suppress(OSError):  # the disk may be the reason of the failure
        text = " ".join(str(error).split()) or type(error).__name__
        write_atomically(folder / FAILURE_FILE, text.encode(errors="replace"))


def load_failure(folder: Path) -> str:
    """Return the error with which the last start of a run ended; "" without one."""
    try:
        # Cut, as it is shown in one line of a table.
        return (folder / FAILURE_FILE).read_text(encoding="utf-8", errors="replace")[:300]
    except OSError:
        return ""


def _summarize_runs(study: StudyConfig, folder: Path) -> Study:
    """Load finished runs and summarize."""
    runs, problems = stored_runs.load_runs([folder])
    content = summary.replace_nonfinite(summary.summarize_runs(runs, folder, problems))
    diverged = {}
    for run in runs:
        if lost := list_diverged_clients(run.metrics):
            diverged[Job(run.label, run.seed)] = lost
    server = any(stored_runs.find_declared_value(run, "server") for run in runs)
    return Study(
        folder, study, content, diverged, server, names=stored_runs.merge_client_names(runs)
    )


def _check_folder(study: StudyConfig, folder: Path, resume: bool, overwrite: bool) -> None:
    """Refuse to change an existing folder without permission, or one of another study."""
    names = set[str]()
    for path in folder.glob("*"):
        if not path.name.startswith("."):
            names.add(path.name)
    # A process may have been killed before it wrote more than the manifest.
    if not names - {manifest.FILE}:
        return
    if not (folder / CONFIG).exists():
        raise RunExistsError(f"{folder} exists and is no study; choose another folder with --out")
    if resume:
        # Those of other seeds too: tables are of all seeds that the study has.
        _check_same_settings(_with_stored_seeds(study, folder), folder)
        _check_shared_settings(study, folder)
    elif not overwrite:
        raise RunExistsError(
            f"{folder} exists; expected a new folder: start again with overwrite, or choose "
            "another "
            "--out"
        )


def _check_same_settings(study: StudyConfig, folder: Path) -> None:
    """Refuse stored runs that were made with other settings than the study's."""
    for entry in study.methods:
        for seed in study.seeds:
            path = run_folder(folder, Job(entry.label, seed)) / CONFIG
            found = _load_run_settings(path)
            if found is None:
                continue
            wanted = study.select_run(entry.label, seed)
            if config.hash_study(found) != config.hash_study(wanted):
                _refuse_settings(path, config.describe_difference(found, wanted))
            _check_own_code(wanted, path.parent)


def _check_shared_settings(study: StudyConfig, folder: Path) -> None:
    """Refuse stored runs of methods that the study no longer has, if they had other settings.

    Tables have them next to its own methods.
    """
    labels = {entry.label for entry in study.methods}
    for path in sorted(folder.glob(f"*/seed-*/{CONFIG}")):
        if path.parents[1].name in labels:
            continue
        found = _load_run_settings(path)
        if found is None:
            continue
        if change := config.describe_difference(found, study, of_methods=False):
            _refuse_settings(path, change)


def _load_run_settings(path: Path) -> StudyConfig | None:
    """Return the study in the file of a stored run; None where it is missing or damaged."""
    # It is written again.
    if manifest.describe_fault(path.parent, CONFIG):
        return None
    # The settings can be compared without the code of the methods.
    try:
        return config.parse_study_text(path.read_text(encoding="utf-8"), str(path), to_run=False)
    except ConfigError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); delete its folder to run it again"
        ) from error


def _refuse_settings(path: Path, change: str) -> NoReturn:
    raise CheckpointError(
        f"{path.parent} was run with other settings ({change}); --overwrite starts again, --out "
        "keeps both"
    )


def _check_own_code(run: StudyConfig, folder: Path) -> None:
    """Refuse a stored run whose model, method, loss or other import path had other code."""
    if manifest.describe_fault(folder, OWN_CODE):  # none, or damaged: it is written again
        return
    noted = json.loads((folder / OWN_CODE).read_text(encoding="utf-8"))
    # A module that cannot be read is not among them: importing it says so.
    for place, digest in compute_own_code(run).items():
        if noted.get(place, digest) != digest:
            what = f"of {place!r}" if ":" in place else f"in module {place!r}"
            raise CheckpointError(
                f"{folder} was run with other code {what}, which has changed since; "
                "--overwrite starts again, --out keeps both"
            )


def _check_model(
    folder: Path,
    task: Task,
    federation: Federation,
    entry: MethodConfig,
    model: ModelSource,
    seed: int,
) -> None:
    """Refuse a stored run that began with another model of one's own than the one given now."""
    if is_bundled(model):
        return
    there = checkpoint.load_provenance(folder).get("config_hash")
    if there is None:
        return
    here = compute_run_identity(task, federation, entry.method, model, entry.settings, seed)
    if there != here:
        raise CheckpointError(
            f"{folder} was run with another model or other data (its identity is {there} there and "
            f"{here} here); --overwrite starts again, --out keeps both"
        )


def _check_data(folder: Path, seed: int, data: Federation) -> None:
    """Refuse other data of a seed than the study began with.

    Settings cannot show it where data come from a file.
    """
    if any(manifest.describe_fault(folder, name) for name in (CONFIG, stored_runs.FEDERATION)):
        # Both are written again. Its runs have noted a digest of their data, too.
        runs = sorted(folder.glob(f"*/seed-{seed}"))
        here = data.compute_digest() if runs else ""
        for run in runs:
            _compare_data(run, checkpoint.load_provenance(run).get("data", here), here)
        return
    if load_stored_study(folder)[0].seeds[0] != seed:
        return
    content = json.loads((folder / stored_runs.FEDERATION).read_text(encoding="utf-8"))
    _compare_data(folder, content["fingerprint"], data.compute_fingerprint())


def _compare_data(folder: Path, there: str, here: str) -> None:
    if there != here:
        raise CheckpointError(
            f"{folder} was run with other data (their fingerprint is {there} there and {here} "
            "here); --overwrite starts again, --out keeps both"
        )


def _with_stored_seeds(study: StudyConfig, folder: Path) -> StudyConfig:
    """Return the study with its stored seeds first: continuing with other seeds adds to them."""
    if manifest.describe_fault(folder, CONFIG):  # missing or damaged: it is written again
        return study
    there = load_stored_study(folder)[0].seeds
    return replace(study, seeds=list(dict.fromkeys([*there, *study.seeds])))


def _describe_data(federation: Federation) -> dict[str, str]:
    """Return the files that describe the data of a study."""
    files = {stored_runs.FEDERATION: json.dumps(describe_federation(federation)) + "\n"}
    schema = TableSchema.from_federation(federation)
    return files if schema is None else {**files, SCHEMA_FILE: schema.to_text()}


def _delete_folder(folder: Path) -> None:
    """Delete a folder, if it exists; nothing that a process works on."""
    if folder.exists():
        # All runs are claimed first.
        with ExitStack() as all_of_it:
            for lock in folder.rglob(LOCK):
                all_of_it.enter_context(claim_folder(lock.parent))
            shutil.rmtree(folder)


def _prepare_folder(
    study: StudyConfig, folder: Path, first: int, files: dict[str, str], *, resume: bool
) -> None:
    """Make the study's folder, with the study and the files that describe its first seed's data."""
    # No other process may change the stored seeds between reading and writing.
    with claim_folder(folder, wait=summary.STUDY_WAIT):
        kept = _with_stored_seeds(study, folder) if resume else study
        # Another process has begun the study meanwhile, with another first seed.
        whole = not manifest.describe_fault(folder, stored_runs.FEDERATION)
        if whole and kept.seeds[0] != first:
            files = {}
        summary.write_study_files(folder, {CONFIG: config.format_study(kept), **files})
