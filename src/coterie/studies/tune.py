"""tune_study(): choose each method's settings by its clients' own validation data alone.

The test sets are taken out of the federation before anything runs: no choice here can have seen
them.
"""

import copy
import hashlib
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from coterie._util import manifest
from coterie._util.files import check_file, prepare_file, write_atomically
from coterie._util.mappings import map_values
from coterie._util.settings import settable_fields
from coterie._util.toml import parse_toml
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError, CoterieError, describe_unknown, require
from coterie.functional.metrics import LOSS, REGISTRY
from coterie.models.layout import ModelSource
from coterie.results import stored_runs
from coterie.results.conditions import TRAINED
from coterie.runtime.settings import Settings
from coterie.simulation.run import Note, check_run
from coterie.simulation.workers import FanOut, end_unguarded_import
from coterie.studies import config
from coterie.studies.config import StudyConfig
from coterie.studies.definition import is_label, match_methods
from coterie.studies.inputs import FederationSource, StudyInputs
from coterie.studies.run import (
    FoundRuns,
    FoundTable,
    Job,
    Study,
    list_jobs,
    load_stored_study,
    run_folder,
    run_studies,
)
from coterie.studies.sweep import Plan, format_setting, run_sweep

TUNING = "tuning.json"
"""The file of a study of trials with what was asked for."""
_TUNED = "-tuned"  # ends the name of the study with the chosen values
Point = tuple[tuple[str, Any], ...]
"""One choice: (setting, value) for each axis of the grid."""


@dataclass(frozen=True)
class Trial:
    """The validation result of one choice.

    Args:
        label: the method.
        point: the choice.
        seed: of the data and the run.
        metric: accuracy or loss.
        value: of the best models on the clients' validation data, mean over clients; NaN when some
            diverged.
        rounds: of training where a budget sets them; None for those of the study.
    """

    label: str
    point: Point
    seed: int
    metric: str
    value: float
    rounds: int | None = None


@dataclass(frozen=True)
class Choice:
    """The best point of a method.

    Args:
        label: the method.
        point: the best choice.
        metric: by which it was chosen.
        value: mean over clients and seeds.
        at_edge: settings whose best value still lies on the edge of what was tried.
    """

    label: str
    point: Point
    metric: str
    value: float
    at_edge: tuple[str, ...]


@dataclass(frozen=True)
class TuningResult:
    """The outcome of tuning.

    Args:
        study: the study with the chosen values, under the name "<study>-tuned".
        choices: the best of each method.
        trials: everything that was run.
    """

    study: StudyConfig
    choices: Sequence[Choice]
    trials: Sequence[Trial]


def parse_grid(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Parse a grid from texts such as "lr=0.001,0.003" or "methods.DAC.tau=[10, 30]".

    Raises:
        ConfigError: when one is not a list of values.

    Example:
        >>> parse_grid(["lr=0.001,0.003", "similarity=inv_loss,cos_grad"])
        {'lr': [0.001, 0.003], 'similarity': ['inv_loss', 'cos_grad']}
    """
    grid: dict[str, list[Any]] = {}
    for text in assignments:
        path, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise ConfigError(
                f"--grid got {text!r}; expected setting=value,value, such as lr=0.001,0.003"
            )
        path = path.strip()
        if path in grid:
            raise ConfigError(f"--grid has {path} twice; expected all of its values in one")
        grid[path] = _parse_values(values.strip())
    return grid


def _parse_values(text: str) -> list[Any]:
    bare = text.removeprefix("[").removesuffix("]")
    try:
        return parse_toml(f"v = [{bare}]")["v"]
    except tomllib.TOMLDecodeError:
        return [_parse_value(part.strip()) for part in bare.split(",")]


def _parse_value(text: str) -> Any:
    # A word without quotes, as a shell leaves it, is a text; numbers next to it stay numbers.
    try:
        return parse_toml(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def tune_study(
    study: StudyConfig,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    widenings: int = 3,
    budget: float | None = None,
    federation: FederationSource | None = None,
    model: ModelSource | None = None,
    observer: Callable[[Trial], None] | None = None,
    notes: Callable[[Note | FoundRuns | FoundTable], None] | None = None,
    over: FanOut | None = None,
) -> TuningResult:
    """Choose settings of every method by the clients' own validation data.

    A setting is a key of a [[methods]] table; a method that has no such key leaves it out. Where
    the best value of a numeric axis is the smallest or the largest that was tried, the axis is
    continued by its own ratio (or step).

    Trials are the runs of a study of their own, `<out>/<study>-trials`: each is stored as it ends,
    and the same call goes on after a stop.

    Args:
        study: what to tune. It keeps its own seeds, over which results are reported.
        grid: values to try, by setting ("lr", "tau") or for one method ("methods.DAC.tau"); under
            "seeds" the seeds of the trials.
        seeds: seeds of the trials; those of the grid when None, and those of the study where it has
            none. Other seeds than the study's separate the choice from the data that results are
            reported on.
        out: the folder that holds the trials; they are deleted at the end when None.
        data_dir: where datasets lie on disk.
        workers: processes.
        widenings: how often a grid is continued at most; not with a budget.
        budget: the rounds of a method's trials with each seed, in full runs: successive halving
            trains all choices for few rounds, and of each rung the better half for more.
        federation: your own data instead of the study's, or a function from seed to data.
        model: your own module, or a factory of modules, instead of the study's [model].
        observer: is called with each trial as it ends, and with stored ones.
        notes: is called when a trial begins something that takes seconds, and with the trials that
            are there.
        over: runs the trials instead of processes of this machine; see `run_study`.

    Raises:
        ConfigError: when a setting fits no method, or the clients have no validation data.
        CheckpointError: when trials in `out` had other settings or data.
    """
    end_unguarded_import()
    grid = dict(grid)
    own = grid.pop("seeds", study.seeds)
    tried = replace(study, seeds=tuple(own if seeds is None else seeds)).seeds  # which checks them
    grids = {entry.label: _make_method_grid(study, entry.label, grid) for entry in study.methods}
    for path in grid:
        if not any(_find_setting(path, label, study) in axes for label, axes in grids.items()):
            raise ConfigError(
                f"--grid: no method of the study has a setting {path!r}, and it is none of a run "
                "or of local training; coterie methods lists those of methods"
            )
    # The rounds of the trials of each pass.
    passes: dict[str, list[int | None]] = dict.fromkeys(grids, [None] * (widenings + 1))
    if budget is not None:
        passes = {label: _plan_rungs(study, label, axes, budget) for label, axes in grids.items()}
    inputs = StudyInputs(study, data_dir, federation, model)
    planned = _TrialPlan(inputs, tried)
    request = {"grid": {**grid, "seeds": list(tried)}, "widenings": widenings, "budget": budget}
    request["study"] = config.format_study(study, decided=False)
    trials: dict[Job, Trial] = {}
    choices: dict[str, Choice] = {}
    jobs: list[Job] = []
    with ExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory()) if out is None else out)

        def add_trial(job: Job) -> None:
            if job not in trials:
                trials[job] = planned.load_trial(home, job)
                if observer is not None:
                    observer(trials[job])

        points = map_values(_list_points, grids)
        for number in range(max(map(len, passes.values()))):
            trained = {}
            for label, own_passes in passes.items():
                if number < len(own_passes):
                    trained[label] = own_passes[number]
            for label, rounds in trained.items():
                planned.add_points(label, points[label], rounds)
            plan = {"": planned.make_study()}
            jobs = list_jobs(plan)
            run_studies(
                plan, home / planned.name, out=home, workers=workers,
                files={TUNING: json.dumps(request, indent=1)}, federation=inputs.without_tests(),
                model=inputs.model_source, finished=add_trial, over=over,
                # Later passes would count the trials of this call.
                notes=None if trials else notes,
            )  # fmt: skip
            # The trials of earlier calls, too.
            for job in jobs:
                add_trial(job)
            wider = dict(grids)
            for label, rounds in trained.items():
                # In the order of the plan, not in that in which they ended: the first of equals
                # wins.
                found = []
                for job in jobs:
                    trial = trials[job]
                    is_of_pass = trial.label == label and trial.rounds == rounds
                    if is_of_pass and trial.point in points[label]:
                        found.append(trial)
                ranked = _rank_points(label, found, grids[label])
                choices[label] = ranked[0]
                if budget is None:
                    wider[label] = _widen_grid(grids[label], ranked[0], planned.can_run)
                    points[label] = _list_points(wider[label])
                else:
                    # The better half is trained again for longer; its other half is done.
                    better = ranked[: math.ceil(len(ranked) / 2)]
                    points[label] = [one.point for one in better]
            # No axis was extended, so another pass would try nothing new.
            if budget is None and wider == grids:
                break
            grids = wider
    chosen = [choices[entry.label] for entry in study.methods]
    found = tuple(trials[job] for job in jobs)
    tuned = _apply_choices(study, {choice.label: choice.point for choice in chosen})
    return TuningResult(replace(tuned, name=f"{study.name}{_TUNED}", tune={}), chosen, found)


def _plan_rungs(
    study: StudyConfig, label: str, axes: Mapping[str, Sequence[Any]], budget: float
) -> list[int | None]:
    """Return the rounds of each rung of successive halving of a method.

    Each rung trains the same share of the budget; half of the choices, rounded up, go on.
    """
    require(0 < budget < math.inf, "--budget", budget, "more than 0 full runs, and not infinite")
    if "rounds" in axes:
        raise ConfigError("--budget sets the rounds of trials; leave rounds out of the grid")
    left, rounds = len(_list_points(axes)), study.find_method(label).settings.rounds
    # As many halvings as leave one choice; each gets an equal share of the budget.
    number = max(1, math.ceil(math.log2(left)))
    if budget * rounds < left * number:
        raise ConfigError(
            f"--budget is {budget:g} full runs of {rounds} rounds; expected at least "
            f"{left * number / rounds:.3g}: each of {left} choices of {label} needs a round"
        )
    rungs: list[int | None] = []
    for _ in range(number):
        rungs.append(min(rounds, int(budget * rounds / (left * number))))
        left = math.ceil(left / 2)
    return rungs


class _TrialPlan:
    """The study whose runs are the trials: a method for each choice of each tuned method.

    Args:
        inputs: of what is tuned.
        seeds: of the trials.
    """

    def __init__(self, inputs: StudyInputs, seeds: Sequence[int]) -> None:
        study, self._inputs = inputs.study, inputs
        self.name = f"{study.name}-trials"
        # Undecided: a preset of a method sets its values again after a choice.
        content = config.make_study_table(study, decided=False)
        self._entries = {entry["label"]: entry for entry in content.pop("methods")}
        # They are of the study, whose settings the trials only vary.
        for key in ("sweep", "tune", "paper", "description"):
            content.pop(key, None)
        named = {"name": self.name, "trials_of": study.name, "seeds": list(seeds)}
        self._content, self._methods = {**content, **named}, list[dict[str, Any]]()
        self._choices: dict[str, tuple[str, Point, int | None]] = {}

    def add_points(self, label: str, points: Sequence[Point], rounds: int | None) -> None:
        """Add the choices of a method that have no trial yet, trained for so many rounds."""
        for point in points:
            if (label, point, rounds) in self._choices.values():
                continue
            # There are no test samples to evaluate on.
            entry = copy.deepcopy(self._entries[label]) | {"eval_every": 0}
            entry.pop("paper", None)
            changes = point if rounds is None else (*point, ("rounds", rounds))
            for key, value in changes:
                config.set_path(entry, [key], value)
            entry["label"] = _name_trial(label, changes, self._choices)
            self._choices[entry["label"]] = label, point, rounds
            self._methods.append(entry)

    def make_study(self) -> StudyConfig:
        """Return the study of all trials so far."""
        return config.parse_study({**self._content, "methods": self._methods})

    def can_run(self, label: str, changes: Mapping[str, Any]) -> bool:
        """Return whether a method can be run with other settings on the data of the first seed."""
        entry = copy.deepcopy(self._entries[label])
        for key, value in changes.items():
            config.set_path(entry, [key], value)
        try:
            found = config.parse_study({**self._content, "methods": [entry]}).methods[0]
            quick = replace(found.settings, engine="loop", portable=False)
            data = self._inputs.without_tests()(self._content["seeds"][0])
            check_run(data, found.method, self._inputs.model_source, quick)
        except CoterieError:
            return False
        return True

    def load_trial(self, out: Path, job: Job) -> Trial:
        """Return the result of a finished run."""
        label, point, rounds = self._choices[job.label]
        return Trial(label, point, job.seed, *load_trial_value(out / self.name, job), rounds)


def load_trial_value(trials: Path, job: Job) -> tuple[str, float]:
    """Return the validation metric of a finished trial and its mean over clients.

    Args:
        trials: the folder of the study of trials.
        job: one of its runs.

    Raises:
        ConfigError: when it cannot be read.
    """
    folder = run_folder(trials, job)
    run = stored_runs.load_run(folder)
    if isinstance(run, stored_runs.UnreadableRun):
        raise ConfigError(f"{folder}: {run.reason}; the same command runs it again")
    best = run.method_settings.get("evaluate", run.config.get("evaluate")) == "best_val"
    metric, values = _find_validation_values(run.metrics, "best" if best else "current")
    # A client that diverged makes the mean NaN: it must not be hidden.
    return metric, float(values.mean(skipna=False))


def load_trial_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the finished trials in a folder: `label`, `metric`, `mean` over seeds, and `seeds`.

    The mean is None where a client diverged.
    """
    # Trials sweep nothing, so that there is one point.
    (standings,) = plan.list_standings().values()
    values: dict[tuple[str, str], list[float]] = {}
    for one in standings:
        if one.state == "finished":
            metric, value = load_trial_value(plan.folder, Job(one.label, one.seed))
            values.setdefault((one.label, metric), []).append(value)
    rows = []
    for (label, metric), found in values.items():
        mean = float(np.mean(found))
        known = mean if math.isfinite(mean) else None
        rows.append({"label": label, "metric": metric, "mean": known, "seeds": len(found)})
    return rows


def load_request(trials: Path) -> tuple[StudyConfig, dict[str, Any]]:
    """Return what `tune_study` was called with: the study, and grid, widenings and budget by name.

    Args:
        trials: the folder of the study of trials.

    Raises:
        ConfigError: when its file is missing or damaged.
    """
    if fault := manifest.describe_fault(trials, TUNING):
        raise ConfigError(f"{trials}: {fault}; go on with the same `coterie tune` command")
    found = json.loads((trials / TUNING).read_text("utf-8"))
    return config.parse_study_text(found.pop("study"), str(trials / TUNING)), found


def _name_trial(label: str, point: Point, others: Container[str]) -> str:
    """Return the label of a trial, such as "DAC tau=30", which also names its folder."""
    parts = [label]
    for key, value in point:
        parts.append(format_setting(key, value))
    name = " ".join(parts)
    if is_label(name) and name not in others:
        return name
    # Too long, or two values are equal as names: a digest keeps them apart.
    digest = hashlib.blake2b(repr(point).encode(), digest_size=8).hexdigest()
    # 60 characters keep the folder's name short, and no dot or space ends it, as Windows drops
    # both.
    return f"{label[:60].rstrip(' .')} {digest}"


def check_result_files(study: StudyConfig, folder: str | Path) -> None:
    """Check that `write_result` can write its files.

    Args:
        study: what is tuned.
        folder: of the files.

    Raises:
        ConfigError: when one of them cannot be written.
    """
    for path in _locate_result(f"{study.name}{_TUNED}", folder):
        check_file(path)


def _locate_result(name: str, folder: str | Path) -> tuple[Path, Path]:
    """Return the files of a tuned study and of its trials."""
    path = Path(folder) / f"{name}.toml"
    return path, path.with_suffix(".json")


def write_result(tuned: TuningResult, folder: str | Path) -> Path:
    """Write the tuned study and a JSON file of all trials; return the path of the study file.

    A trial in which a client diverged has no value, and counts as tried.
    """
    path, trials_path = map(prepare_file, _locate_result(tuned.study.name, folder))
    head = ""
    for one in tuned.choices:
        if one.point:
            chosen = ", ".join(f"{key} = {value!r}" for key, value in one.point)
            head += f"# {one.label}: {chosen} (validation {one.metric} {one.value:.6g})\n"
    write_atomically(path, (head + config.format_study(tuned.study)).encode())
    trials = []
    for trial in tuned.trials:
        row = {"label": trial.label, "seed": trial.seed, "metric": trial.metric}
        # JSON has no NaN.
        row["value"] = trial.value if math.isfinite(trial.value) else None
        row |= dict(trial.point)
        if trial.rounds is not None:
            row[TRAINED] = trial.rounds
        trials.append(row)
    write_atomically(trials_path, (json.dumps(trials, indent=1) + "\n").encode())
    return path


def _find_validation_values(metrics: pd.DataFrame, model: str) -> tuple[str, pd.Series]:
    """Return the main metric, and its final validation value of each client."""
    last = (metrics["split"] == "validation") & (metrics["round"] == metrics["round"].max())
    rows = metrics.loc[(last & (metrics["model"] == model)).to_numpy()]
    metric = REGISTRY.choose_main(rows["metric"].unique())
    return metric, rows.loc[(rows["metric"] == metric).to_numpy()].groupby("client")["value"].last()


def _make_method_grid(
    study: StudyConfig, label: str, grid: Mapping[str, Sequence[Any]]
) -> dict[str, tuple[Any, ...]]:
    """Return the axes of one method; values given for it alone replace those for all methods."""
    entry = study.find_method(label)
    training = {*settable_fields(LocalTraining), *settable_fields(Settings)} - {"local"}
    known = set(settable_fields(type(entry.method))) | training
    axes: dict[str, tuple[Any, ...]] = {}
    # Values for one method come last, and replace those for all methods.
    for path, values in sorted(grid.items(), key=lambda item: item[0].startswith("methods.")):
        require(len(values) > 0, f"grid of {path}", list(values), "at least one value")
        key = _find_setting(path, label, study)
        if key in known:
            axes[key] = tuple(values)
        elif key is not None and path.startswith("methods."):
            raise ConfigError(describe_unknown(f"setting of {label}", key, known))
    return axes


def _find_setting(path: str, label: str, study: StudyConfig) -> str | None:
    """Return the setting that an axis names for a method; None where it is for another method."""
    if not path.startswith("methods."):
        return path.removeprefix("local.")  # as a study file writes how clients train
    head, _, key = path.removeprefix("methods.").rpartition(".")
    names = [(entry.label, entry.kind) for entry in study.methods]
    for place in match_methods(head.strip('"'), names):
        if study.methods[place].label == label:
            return key
    return None


def _list_points(axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    points = []
    for values in itertools.product(*axes.values()):
        points.append(tuple(zip(axes, values, strict=True)))
    return points


def _rank_points(
    label: str, trials: Sequence[Trial], axes: Mapping[str, Sequence[Any]]
) -> list[Choice]:
    """Return the points from the best mean over seeds on; the first of equals comes first."""
    metric = trials[0].metric
    judged = sorted({trial.metric for trial in trials})
    # A loss is another function for each value of the setting; half a square is no better.
    if len(judged) > 1 or (metric == LOSS.name and len(axes.get("loss", ())) > 1):
        raise ConfigError(
            f"{label}: trials with different losses have no value in common (they have "
            f"{' and '.join(judged)}), so that none of them is the best; leave loss out of the grid, "
            "and compare losses by a test metric in a study"
        )
    sign = REGISTRY[metric].sign
    values: dict[Point, list[float]] = {}
    for trial in trials:
        values.setdefault(trial.point, []).append(trial.value)
    means = {point: float(np.mean(found)) for point, found in values.items()}

    def rate_point(point: Point) -> float:
        # NaN counts as the worst, whatever the metric.
        return -sign * means[point] if math.isfinite(means[point]) else math.inf

    # The sort is stable: the first of equals comes first.
    ranked = sorted(means, key=rate_point)
    if not math.isfinite(means[ranked[0]]):
        raise ConfigError(f"every setting tried for {label} diverged; try smaller learning rates")
    choices = []
    for point in ranked:
        edge = tuple(key for key, value in point if _find_edge(axes[key], value))
        choices.append(Choice(label, point, metric, means[point], edge))
    return choices


def _find_edge(values: Sequence[Any], chosen: Any) -> int:
    """Return -1 or 1 where a value is the smallest or largest of a numeric axis, else 0."""
    # A bool is an int too.
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    # One value has no edge, and words have no order.
    if len(values) < 2 or len(numbers) < len(values):
        return 0
    return int(chosen == max(values)) - int(chosen == min(values))


def _widen_grid(
    axes: Mapping[str, tuple[Any, ...]],
    choice: Choice,
    can_run: Callable[[str, Mapping[str, Any]], bool],
) -> dict[str, tuple[Any, ...]]:
    """Extend the axes at whose edge the best point lies, where there is such a value.

    Args:
        axes: of a method.
        choice: the best point.
        can_run: whether a method, by its label, can be run with other settings.
    """
    chosen, wider = dict(choice.point), dict(axes)
    for key, values in axes.items():
        longer = _extend_axis(values, chosen[key])
        # Above 1 it is a number of clients, and no larger share.
        is_count = key == "participation" and max(values) <= 1 < longer[-1]
        if longer != values and not is_count and can_run(choice.label, {**chosen, key: longer[-1]}):
            wider[key] = longer
    return wider


def _extend_axis(values: tuple[Any, ...], chosen: Any) -> tuple[Any, ...]:
    """Add one value beyond the edge.

    It continues the ratio of the last two values when all are positive, else their step.
    """
    side = _find_edge(values, chosen)
    if not side:
        return values
    ordered = sorted(values, reverse=side < 0)
    # The edge, and the value next to it.
    last, before = ordered[-1], ordered[-2]
    new = last * (last / before) if min(values) > 0 else last + (last - before)
    # Six digits remove the rounding errors of the ratio.
    new = round(new) if all(isinstance(v, int) for v in values) else float(f"{new:.6g}")
    # A positive axis stays positive; another one goes below zero only if it was there.
    sensible = new > 0 if min(values) > 0 else new >= min(0, *values)
    return (*values, new) if sensible and new not in values else values


def _apply_choices(study: StudyConfig, choices: Mapping[str, Point]) -> StudyConfig:
    # Undecided: a preset of a method sets its values again after the choice.
    content = config.make_study_table(study, decided=False)
    for label, point in choices.items():
        for key, value in point:
            # In parts, because a label may have dots and spaces.
            config.set_path(content, ["methods", label, key], value)
    return config.parse_study(content)


def resume_plan(
    folder: str | Path,
    *,
    data_dir: str | Path | None = None,
    workers: int = 1,
    federation: FederationSource | None = None,
    model: ModelSource | None = None,
    observer: Callable[[Any], None] | None = None,
    notes: Callable[[Note | FoundRuns | FoundTable], None] | None = None,
    over: FanOut | None = None,
) -> tuple[Study, ...] | TuningResult:
    """Continue what is in a folder: a study, a sweep or a tuning, as `coterie resume` does.

    Args:
        folder: of a study, a sweep or trials, or of one of their runs.
        data_dir: as in `run_study`, like all that follow.
        workers: processes.
        federation: the data, again where they were given from Python.
        model: the module, again where it was given from Python.
        observer: is called after each round; of a tuning with each trial.
        notes: is called with what is found and begun.
        over: runs the runs instead of processes of this machine.

    Returns:
        The studies, of which a sweep over the data or the model has several; the choices of a
        tuning.

    Raises:
        ConfigError: when there is no plan in the folder.
    """
    study, out = load_stored_study(folder, to_run=True)
    if study.trials_of:
        tuned, asked = load_request(out / study.name)
        return tune_study(
            tuned, **asked, out=out, data_dir=data_dir, workers=workers, federation=federation,
            model=model, observer=observer, notes=notes, over=over,
        )  # fmt: skip
    return run_sweep(
        study, out=out, data_dir=data_dir, workers=workers, federation=federation, model=model,
        observer=observer, notes=notes, over=over,
    )  # fmt: skip
