"""tune_study(): choose each method's settings by its clients' own validation data alone.

The test sets are taken out of the federation before anything runs: no choice here can have seen
them.
"""

import itertools
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from coterie._util.files import write_atomically
from coterie.data.federation import Federation, TestSet
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError, describe_unknown, require
from coterie.functional.metrics import REGISTRY
from coterie.models.layout import ModelSource
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate
from coterie.simulation.workers import FanOut, fan_out
from coterie.studies import config
from coterie.studies.config import StudyConfig
from coterie.studies.definition import match_methods
from coterie.studies.inputs import FederationSource, StudyInputs

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
    """

    label: str
    point: Point
    seed: int
    metric: str
    value: float


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
        grid[path.strip()] = _parse_values(values.strip())
    return grid


def _parse_values(text: str) -> list[Any]:
    bare = text.removeprefix("[").removesuffix("]")
    try:
        return tomllib.loads(f"v = [{bare}]")["v"]
    except tomllib.TOMLDecodeError:
        return [part.strip() for part in bare.split(",")]


def tune_study(
    study: StudyConfig,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    widenings: int = 3,
    federation: FederationSource | None = None,
    model: ModelSource | None = None,
    observer: Callable[[Trial], None] | None = None,
    over: FanOut | None = None,
) -> TuningResult:
    """Choose settings of every method by the clients' own validation data.

    A setting is a key of a [[methods]] table; a method that has no such key leaves it out. Where
    the best value of a numeric axis is the smallest or the largest that was tried, the axis is
    continued by its own ratio (or step).

    Args:
        study: what to tune. It keeps its own seeds, over which results are reported.
        grid: values to try, by setting ("lr", "tau") or for one method ("methods.DAC.tau"); under
            "seeds" the seeds of the trials.
        seeds: seeds of the trials; those of the grid when None, and those of the study where it has
            none. Other seeds than the study's separate the choice from the data that results are
            reported on.
        data_dir: where datasets lie on disk.
        workers: processes.
        widenings: how often a grid is continued at most.
        federation: your own data instead of the study's, or a function from seed to data.
        model: your own module, or a factory of modules, instead of the study's [model].
        observer: is called with each trial.
        over: runs the trials instead of processes of this machine; see `run_study`.

    Raises:
        ConfigError: when a setting fits no method, or the clients have no validation data.
    """
    grid = dict(grid)
    own = grid.pop("seeds", study.seeds)
    tried = replace(study, seeds=tuple(own if seeds is None else seeds)).seeds  # which checks them
    grids = {entry.label: _make_method_grid(study, entry.label, grid) for entry in study.methods}
    for path in grid:
        if not any(_find_setting(path, label, study) in axes for label, axes in grids.items()):
            raise ConfigError(
                f"--grid: no method of the study has a setting {path!r}; coterie methods lists them"
            )
    inputs = StudyInputs(study, data_dir, federation, model)
    far = over is not None and over.far
    # Without grids: a trial is a single run.
    work = _TuningWork(replace(study, sweep={}, tune={}), inputs.without_data() if far else inputs)
    trials: list[Trial] = []
    choices: list[Choice] = []
    for _ in range(widenings + 1):
        done = {(trial.label, trial.point) for trial in trials}
        # Seed by seed, because the inputs keep the data of one seed.
        jobs = (
            _TrialJob(label, point, seed, inputs.make_federation(seed) if far else None)
            for seed in tried
            for label, axes in grids.items()
            for point in _list_points(axes)
            if (label, point) not in done
        )
        for _, trial in (over or fan_out)(work, jobs, workers, lambda _: None):
            trials.append(trial)
            if observer is not None:
                observer(trial)
        choices = [
            _choose_best(label, [t for t in trials if t.label == label], axes)
            for label, axes in grids.items()
        ]
        wider = {one.label: _widen_grid(grids[one.label], one) for one in choices}
        # No axis was extended, so another pass would try nothing new.
        if wider == grids:
            break
        grids = wider
    return TuningResult(_apply_choices(study, choices), choices, trials)


def write_result(tuned: TuningResult, folder: str | Path) -> Path:
    """Write the tuned study and a JSON file of all trials; return the path of the study file.

    A trial in which a client diverged has no value, and counts as tried.
    """
    path = Path(folder) / f"{tuned.study.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "".join(
        f"# {one.label}: {', '.join(f'{k} = {v!r}' for k, v in one.point)} (validation "
        f"{one.metric} {one.value:.6g})\n"
        for one in tuned.choices
        if one.point
    )
    write_atomically(path, (head + config.format_study(tuned.study)).encode())
    trials = [
        {
            "label": t.label, "seed": t.seed, "metric": t.metric,
            "value": t.value if math.isfinite(t.value) else None, **dict(t.point),
        }
        for t in tuned.trials
    ]  # fmt: skip
    write_atomically(path.with_suffix(".json"), (json.dumps(trials, indent=1) + "\n").encode())
    return path


def remove_test_sets(federation: Federation) -> Federation:
    """Return a federation whose test sets hold one sample of zeros each."""
    x, y = federation.x[0, :1], federation.y[0, :1]
    empty = tuple(
        TestSet(torch.zeros_like(x), torch.zeros_like(y), test.name) for test in federation.tests
    )
    return replace(federation, tests=empty)


@dataclass(frozen=True)
class _TrialJob:
    """A trial to run, with its data where the worker cannot have them."""

    label: str
    point: Point
    seed: int
    federation: Federation | None = None

    def __str__(self) -> str:
        return ", ".join(
            [self.label, f"seed {self.seed}", *(f"{key} = {value}" for key, value in self.point)]
        )


@dataclass(frozen=True)
class _TuningWork:
    """What a worker needs to do any trial; a call does one."""

    study: StudyConfig
    inputs: StudyInputs

    def __call__(self, job: _TrialJob, emit: Callable[[object], None]) -> Trial:
        label, point, seed = job.label, job.point, job.seed
        federation = job.federation or self.inputs.make_federation(seed)
        without = (federation.count_samples("validation") == 0).nonzero().flatten().tolist()
        if without:
            raise ConfigError(
                "tuning needs validation data of every client, and "
                f"{federation.client_name(without[0])} has none; give "
                "data.validation, or validation= where the federation is made"
            )
        entry = _apply_point(self.study, label, point).scale_method(label)
        # There are no test samples to evaluate on.
        settings = replace(entry.settings, eval_every=0)
        run = simulate(
            remove_test_sets(federation),
            entry.method,
            model=self.inputs.model_source,
            settings=settings,
            seed=seed,
        )
        metric, values = _find_validation_values(
            run.metrics, "best" if settings.evaluate == "best_val" else "current"
        )
        # A client that diverged makes the mean NaN: it must not be hidden.
        return Trial(label, point, seed, metric, float(values.mean(skipna=False)))


def _find_validation_values(metrics: pd.DataFrame, model: str) -> tuple[str, pd.Series]:
    """Return the main metric, and its final validation value of each client."""
    last = (metrics["split"] == "validation") & (metrics["round"] == metrics["round"].max())
    rows = metrics.loc[(last & (metrics["model"] == model)).to_numpy()]
    metric = REGISTRY.choose_main(rows["metric"].unique())
    return metric, rows.loc[(rows["metric"] == metric).to_numpy()].groupby("client")["value"].last()


def _apply_point(study: StudyConfig, label: str, point: Point) -> StudyConfig:
    # Undecided: a preset of the method sets its values again after the choice.
    content = config.make_study_table(study, decided=False)
    for key, value in point:
        # Quoted, because a label may have dots and spaces.
        config.set_path(content, f"methods.{json.dumps(label)}.{key}", value)
    return config.parse_study(content)


def _make_method_grid(
    study: StudyConfig, label: str, grid: Mapping[str, Sequence[Any]]
) -> dict[str, tuple[Any, ...]]:
    """Return the axes of one method; values given for it alone replace those for all methods."""
    entry = study.find_method(label)
    own = {f.name for f in fields(entry.method) if f.init}
    known = own | {
        f.name for kind in (LocalTraining, Settings) for f in fields(kind) if f.name != "local"
    }
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
        return path
    head, _, key = path.removeprefix("methods.").rpartition(".")
    reached = match_methods(head.strip('"'), [(entry.label, entry.kind) for entry in study.methods])
    return key if label in (study.methods[place].label for place in reached) else None


def _list_points(axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    return [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _choose_best(label: str, trials: Sequence[Trial], axes: Mapping[str, Sequence[Any]]) -> Choice:
    """Return the point with the best mean over seeds; the first of equals."""
    metric = trials[0].metric
    sign = REGISTRY[metric].sign
    values: dict[Point, list[float]] = {}
    for trial in trials:
        values.setdefault(trial.point, []).append(trial.value)
    means = {point: float(np.mean(found)) for point, found in values.items()}
    # `max` returns the first of equals. NaN counts as the worst, whatever the metric.
    best = max(
        means, key=lambda point: sign * means[point] if math.isfinite(means[point]) else -math.inf
    )
    if not math.isfinite(means[best]):
        raise ConfigError(f"every setting tried for {label} diverged; try smaller learning rates")
    edge = tuple(key for key, value in best if _find_edge(axes[key], value))
    return Choice(label, best, metric, means[best], edge)


def _find_edge(values: Sequence[Any], chosen: Any) -> int:
    """Return -1 or 1 where a value is the smallest or largest of a numeric axis, else 0."""
    if len(values) < 2 or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    ):
        return 0
    return int(chosen == max(values)) - int(chosen == min(values))


def _widen_grid(axes: Mapping[str, tuple[Any, ...]], choice: Choice) -> dict[str, tuple[Any, ...]]:
    """Extend the axes at whose edge the best point lies."""
    return {key: _extend_axis(axes[key], dict(choice.point)[key]) for key in axes}


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


def _apply_choices(study: StudyConfig, choices: Sequence[Choice]) -> StudyConfig:
    for choice in choices:
        study = _apply_point(study, choice.label, choice.point)
    return replace(study, name=f"{study.name}-tuned", tune={})
