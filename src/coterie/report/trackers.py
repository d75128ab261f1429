"""Experiment trackers, as extras: TensorBoard, MLflow, Weights & Biases; none by default.

A writer is any object with the two methods of `Writer`. `feed_while_running` feeds writers while a
study runs, as its observer; `export_runs` feeds them from stored runs. Every writer here writes
files in a local folder and sends nothing: MLflow a local store, Weights & Biases in offline mode
(`wandb sync` would send them).
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from coterie._util import extras
from coterie._util.mappings import flatten, map_values
from coterie._util.names import format_clients
from coterie.errors import ConfigError, DataError
from coterie.functional.metrics import DIVERGED, LOSS, Metric, metrics_to_store
from coterie.results.stored_runs import StoredRun
from coterie.runtime.final_metrics import find_diverged
from coterie.simulation.run import Observer, Progress

PROJECT = "coterie"


@runtime_checkable
class Writer(Protocol):
    """Receives the values of one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step: 0 is the warm-up, round r is step r + 1."""

    def close(self) -> None:
        """End the run."""


Opener = Callable[[str, Mapping[str, Any]], Writer]
"""Opens the writer of a run, given its name and its settings (plain values, by dotted path)."""


class _TensorBoard:
    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        # Imported here: each tracker is an optional package.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / name))
        lines = [f"    {key} = {value}" for key, value in settings.items()]
        self._writer.add_text("settings", "\n".join(lines))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        folder.mkdir(parents=True, exist_ok=True)
        # A database file in the folder, no server.
        self._client = MlflowClient(tracking_uri=f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        found = self._client.get_experiment_by_name(PROJECT)
        if found:
            experiment = found.experiment_id
        else:
            # By default MLflow puts artifacts into the working directory.
            place = (folder / "artifacts").resolve().as_uri()
            experiment = self._client.create_experiment(PROJECT, artifact_location=place)
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _WeightsAndBiases:
    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        folder.mkdir(parents=True, exist_ok=True)
        # Offline and without git or system statistics: nothing about the machine is stored.
        quiet = wandb.Settings(
            mode="offline", silent=True, console="off", disable_git=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=PROJECT,
            name=name,
            dir=str(folder),
            config=dict(settings),
            reinit="create_new",
            settings=quiet,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS = {"tensorboard": _TensorBoard, "mlflow": _MLflow, "wandb": _WeightsAndBiases}


def make_opener(tracker: str, folder: str | Path) -> Opener:
    """Return a function that opens the writers of a tracker.

    Args:
        tracker: "tensorboard", "mlflow" or "wandb".
        folder: folder of its files.

    Raises:
        ConfigError: for an unknown tracker, or when a writer is opened whose package is not
            installed.
    """
    if tracker not in _KINDS:
        raise ConfigError(f"tracker is {tracker!r}; expected one of: {', '.join(_KINDS)}")

    def open_writer(name: str, settings: Mapping[str, Any]) -> Writer:
        try:
            return _KINDS[tracker](Path(folder), name, settings)
        except ImportError as error:
            raise ConfigError(
                f"{tracker} is not installed ({error.name or error} is missing); "
                f"{extras.install_command(tracker)}"
            ) from error

    return open_writer


@contextmanager
def feed_while_running(
    open_writer: Opener, settings: Mapping[str, Any] | None = None
) -> Iterator[Observer]:
    """Feed a writer for each run while a study runs, and close the writers at the end of the block.

    Args:
        open_writer: opens the writers; see `make_opener`.
        settings: passed to each of them.

    Yields:
        The observer for `run_study` or `simulate`. Values are means over clients.
    """
    writers: dict[tuple[str, int], Writer] = {}

    def observe(step: Progress) -> None:
        key = step.label, step.seed
        if key not in writers:
            writers[key] = open_writer(
                f"{step.label}-seed-{step.seed}", {**(settings or {}), "seed": step.seed}
            )
        values = {f"validation/{LOSS.name}": step.loss, f"validation/{step.metric}": step.score}
        values["seconds"] = step.seconds
        for name, value in step.reported.items():
            values[f"train/{name}"] = value
        if step.diverged:
            values[f"validation/{DIVERGED.name}"] = step.diverged
        # NaN differs from itself: a round without an evaluation has no score, and neither has one
        # in which a model diverged, which is counted.
        known = {name: value for name, value in values.items() if value == value}
        writers[key].log(step.round + 1, known)

    try:
        yield observe
    finally:
        # Also after an error: a writer that is not closed loses its last values.
        for writer in writers.values():
            writer.close()


def export_runs(runs: Sequence[StoredRun], open_writer: Opener) -> int:
    """Feed writers from stored runs: each metric by round, over clients and clusters.

    Returns:
        The number of runs written.

    Raises:
        DataError: when two runs have one name in a tracker, which would show them as one.
    """
    places: dict[str, Path] = {}
    for run in runs:
        first = places.setdefault(_name_run(run), run.folder)
        if first != run.folder:
            raise DataError(
                f"{first} and {run.folder} would both be {_name_run(run)!r} in a tracker; write "
                "them into different folders, one after the other"
            )
    for run in runs:
        declared = {}
        for name in metrics_to_store(run.known_metrics.values()):
            declared[name] = describe_metric(run.known_metrics[name])
        config = {**run.config, "metrics": declared} if declared else run.config
        settings = map_values(_to_scalar, flatten(config))
        if run.client_names:
            settings["client_names"] = format_clients(run.client_names, run.client_names, 50)
        writer = open_writer(_name_run(run), settings)
        for index, values in _iterate_round_means(run):
            # Steps begin at 0, rounds with the warm-up at -1.
            writer.log(index + 1, values)
        writer.close()
    return len(runs)


def _name_run(run: StoredRun) -> str:
    """Return the name of a run in a tracker."""
    return f"{run.study_name}-{run.label}-seed-{run.seed}".replace(os.sep, "-")


def describe_metric(metric: Metric) -> str:
    """Describe a metric: its title and unit, and which values are better.

    Example:
        >>> from coterie.functional.metrics import ACCURACY
        >>> describe_metric(ACCURACY)
        'accuracy, times 100 in %, higher is better'
    """
    scale = f", times {metric.scale:g}" if metric.scale != 1 else ""
    unit = f" in {metric.unit}" if metric.unit else ""
    better = f", {metric.better} is better" if metric.better else ""
    return metric.title + scale + unit + better


def _iterate_round_means(run: StoredRun) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the means of each round, by name."""
    columns = ["round", "split", "model", "metric", "cluster", "value"]
    sums: dict[int, dict[str, list[float]]] = {}
    lost = find_diverged(run.metrics)
    for row, entry in enumerate(run.metrics[columns].itertuples(index=False)):
        index, split, model, metric, cluster, value = entry
        # A client without a value does not count, unless its model diverged: then no mean may
        # hide it.
        if math.isnan(value) and not lost[row]:
            continue
        # The newest models are the usual case and have no prefix.
        name = f"{split}/{metric}" if model == "current" else f"{model} {split}/{metric}"
        # A client without a planted cluster counts in the overall mean alone.
        for key in (name, f"{name}/cluster {cluster}") if cluster >= 0 else (name,):
            total = sums.setdefault(index, {}).setdefault(key, [0.0, 0.0])
            # Sum and count of each mean.
            total[0] += value
            total[1] += 1
    # Ascending: Weights & Biases drops a step that is before the last one.
    for index in sorted(sums):
        yield index, {name: total / count for name, (total, count) in sums[index].items()}


def _to_scalar(value: Any) -> int | float | str:
    return value if isinstance(value, int | float | str) else str(value)
