"""Stored runs of studies, loaded from their folders.

Everything here reads run folders only (config.toml, metrics.parquet, edges.parquet,
provenance.json), so a finished study, one that is still running and one made on another machine are
read by the same code.
"""

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from jaxtyping import Int

from coterie._util import manifest
from coterie.errors import DataError
from coterie.functional import metrics
from coterie.functional.metrics import Metrics
from coterie.functional.paired import overlap_from_share
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.results.coverage import RunState, RunStatus
from coterie.runtime import checkpoint, newcomers
from coterie.runtime.checkpoint import PROVENANCE
from coterie.runtime.final_metrics import select_final_tests
from coterie.runtime.record import EDGE_COLUMNS, EDGES, METRIC_COLUMNS, METRICS

CONFIG = "config.toml"


FEDERATION = "federation.json"


@dataclass(frozen=True)
class StoredRun:
    """One run as its folder tells it.

    Args:
        folder: where it lies, `<study>/<label>/seed-<n>` as the study wrote it.
        config: config.toml, resolved.
        provenance: provenance.json; empty while there is none.
        metrics: the metrics table.
        edges: the edges table.
    """

    folder: Path
    config: dict[str, Any]
    provenance: dict[str, Any]
    metrics: pd.DataFrame
    edges: pd.DataFrame

    @cached_property
    def known_metrics(self) -> Metrics:
        """The metrics that are built in, and those that its method declared."""
        return metrics.REGISTRY.add_stored(self.provenance.get("metrics") or {})

    @property
    def method_settings(self) -> dict[str, Any]:
        """The settings of the method."""
        methods = self.config.get("methods") or [self.config.get("method") or {}]
        return methods[0]

    @property
    def method_kind(self) -> str:
        """The kind of method, such as "dac"."""
        return str(self.method_settings.get("kind", self.folder.parent.name))

    @property
    def label(self) -> str:
        """The name of the method in this study."""
        return str(self.method_settings.get("label", self.folder.parent.name))

    @property
    def study_name(self) -> str:
        """The name of the study."""
        return str(self.config.get("name", self.folder.parent.parent.name))

    @property
    def seed(self) -> int:
        """The seed, from the folder's name or the configuration."""
        seed = _parse_seed(self.folder)
        return int((self.config.get("seeds") or [0])[0]) if seed is None else seed

    @cached_property
    def client_names(self) -> dict[int, str]:
        """The name of each client that has one, by its id."""
        return {
            int(client): str(name)
            for client, name in (self.provenance.get("client_names") or {}).items()
        }

    @cached_property
    def client_clusters(self) -> pd.Series:
        """The planted cluster of each client (-1 where unknown), indexed by client id."""
        first = self.metrics.drop_duplicates("client")
        return pd.Series(first["cluster"].to_numpy(), index=first["client"].to_numpy()).sort_index()

    @cached_property
    def population(self) -> int:
        """How many clients there are, as far as the tables tell: a node's own are not all of them."""
        read = [self.edges[name].to_numpy(np.int64) for name in ("reader", "read")]
        return (
            max(
                int(ids.max())
                for ids in (self.client_clusters.index.to_numpy(np.int64), *read)
                if len(ids)
            )
            + 1
        )

    @cached_property
    def planted_clusters(self) -> Int[np.ndarray, " population"]:
        """The planted cluster of each member of the population; -1 where it is not known."""
        return self.client_clusters.reindex(range(self.population), fill_value=-1).to_numpy(
            np.int64
        )

    @property
    def num_rounds(self) -> int:
        """How many rounds the tables hold; while a run works, one of them may be ahead of the other."""
        tables = [table for table in (self.metrics, self.edges) if len(table)]
        return max(int(table["round"].to_numpy().max()) for table in tables) + 1

    @cached_property
    def is_finished(self) -> bool:
        """Whether the run came to its final evaluation."""
        return bool(self.provenance.get("done")) and not self.final_rows.empty

    @cached_property
    def final_rows(self) -> pd.DataFrame:
        """The rows of the final test evaluation, of the best models where those were kept, else of the last.

        In the folder of a node that joined late they are those of its own clients, which were in no
        round.
        """
        rows = select_final_tests(self.metrics)
        if not rows.empty:
            return rows
        joined = (self.metrics["split"] == newcomers.SPLIT) & (
            self.metrics["model"] != newcomers.RECEIVED
        )
        return self.metrics.loc[joined.to_numpy()]

    @property
    def result_metrics(self) -> list[str]:
        """The metrics of its result: those of the final test, and those that its rounds reported as results."""
        rounds = self.metrics.loc[(self.metrics["split"] == "train").to_numpy(), "metric"].unique()
        reported = [
            str(name)
            for name in rounds
            if self.known_metrics.get(name, metrics.LABEL).shown in ("result", "further")
        ]
        return list(dict.fromkeys([*map(str, self.final_rows["metric"]), *reported]))

    def final_values(self, metric: str) -> pd.Series:
        """The final test value of a metric per client, indexed by client id; else the last that rounds reported."""
        if metric not in self._final_value_cache:
            rows = self.final_rows
            rows = rows.loc[(rows["metric"] == metric).to_numpy()]
            if rows.empty and not self.known_metrics[metric].on_samples:
                reported = (self.metrics["split"] == "train") & (self.metrics["metric"] == metric)
                rows = self.metrics.loc[reported.to_numpy()].drop_duplicates("client", keep="last")
            values = pd.Series(rows["value"].to_numpy(float), index=rows["client"].to_numpy())
            self._final_value_cache[metric] = values.sort_index()
        return self._final_value_cache[metric].copy()

    @cached_property
    def _final_value_cache(self) -> dict[str, pd.Series]:
        """What `final_values` has found, by metric: summaries and pages ask many times."""
        return {}

    def test_curve(self, metric: str) -> tuple[list[int], list[float]]:
        """As the function `compute_test_curve`, of its metrics."""
        if metric not in self._test_curve_cache:
            self._test_curve_cache[metric] = compute_test_curve(self.metrics, metric)
        return self._test_curve_cache[metric]

    @cached_property
    def _test_curve_cache(self) -> dict[str, tuple[list[int], list[float]]]:
        """What `compute_test_curve` has found, by metric: that of a baseline is asked for by each method."""
        return {}


@dataclass(frozen=True)
class UnreadableRun:
    """A folder of a run that holds no results that can be read.

    Args:
        folder: the folder, `<study>/<label>/seed-<n>`.
        reason: why, in one line.
        state: "unfinished" where the run has begun and measured nothing yet, else "damaged".
    """

    folder: Path
    reason: str
    state: RunState = "damaged"

    @property
    def label(self) -> str:
        """The name of the method, by the folder."""
        return self.folder.parent.name

    @property
    def seed(self) -> int:
        """The seed, by the folder; 0 where it does not tell."""
        return _parse_seed(self.folder) or 0

    @property
    def status(self) -> RunStatus:
        """How the run stands, with the first sentence of the reason."""
        reason = self.reason.removeprefix("a file is damaged: ").partition(". ")[0]
        return RunStatus(self.label, self.seed, self.state, reason)


def load_runs(paths: Iterable[str | Path]) -> tuple[list[StoredRun], list[UnreadableRun]]:
    """Read the runs in some folders, each of them a run, a method of a study, a study, or a folder of studies.

    Returns:
        The runs, and the folders that look like a run but could not be read; both in order of
        study, method, seed. The folders of nodes that each hosted some clients of one run are one
        run.

    Raises:
        DataError: when a path is missing, or holds no run at all.
    """
    runs, problems = [], []
    for path in map(Path, paths):
        if not path.is_dir():
            raise DataError(f"{path} is not a folder; give a run folder or a study folder")
        folders = _find_run_folders(path)
        if not folders:
            raise DataError(
                f"{path} holds no run; expected {CONFIG} and {METRICS} in <study>/<method>/seed-<n>"
            )
        for folder in folders:
            run = load_run(folder)
            (runs if isinstance(run, StoredRun) else problems).append(run)
    return _join_node_runs(runs), problems


def has_runs(path: str | Path) -> bool:
    """Whether there are run folders in a folder, readable or not."""
    return bool(_find_run_folders(Path(path)))


def _join_node_runs(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Put together what several nodes hosted of one run: same study, method and seed, and no client twice."""
    out: list[StoredRun] = []
    for run in runs:
        key, ids = (run.study_name, run.label, run.seed), set(run.client_clusters.index)
        for place, other in enumerate(out):
            if (other.study_name, other.label, other.seed) == key and ids.isdisjoint(
                other.client_clusters.index
            ):
                out[place] = _join_two_runs(other, run)
                break
        else:
            out.append(run)
    return out


def _join_two_runs(a: StoredRun, b: StoredRun) -> StoredRun:
    times = [run.provenance.get("timing") or {} for run in (a, b)]
    timing = {
        name: sum(time.get(name, 0) for time in times) for name in ("train_s", "train_samples")
    }
    timing["wall_s"] = max(time.get("wall_s", 0.0) for time in times)
    done = all(run.provenance.get("done") for run in (a, b))
    names = {**(a.provenance.get("client_names") or {}), **(b.provenance.get("client_names") or {})}
    return replace(
        a,
        provenance={
            **a.provenance,
            "done": done,
            "timing": timing,
            **({"client_names": names} if names else {}),
        },
        metrics=pd.concat([a.metrics, b.metrics], ignore_index=True),
        edges=pd.concat(
            [run.edges for run in (a, b) if len(run.edges)] or [a.edges], ignore_index=True
        ),
    )


def _find_run_folders(path: Path) -> list[Path]:
    if (path / METRICS).is_file() or ((path / CONFIG).is_file() and path.name.startswith("seed-")):
        return [path]
    marks = [*path.rglob(METRICS), *path.rglob(f"seed-*/{CONFIG}")]
    folders = {mark.parent for mark in marks}
    places = {
        study: _order_methods(study) for study in {folder.parent.parent for folder in folders}
    }

    def sort_key(folder: Path) -> tuple[str, int, str, int]:
        study, label, number = (
            folder.parent.parent,
            folder.parent.name,
            folder.name.removeprefix("seed-"),
        )
        place = places[study].get(label, len(places[study]))
        return str(study), place, label, int(number) if number.isdigit() else -1

    return sorted(folders, key=sort_key)


def _parse_seed(folder: Path) -> int | None:
    """The seed that the name of a run's folder tells."""
    text = folder.name.removeprefix("seed-")
    return int(text) if text.isdigit() else None


def _order_methods(study: Path) -> dict[str, int]:
    """The place of each method in the study's own configuration; nothing where there is none."""
    return {
        label: place
        for place, label in enumerate(dict.fromkeys(label for label, _ in find_planned_runs(study)))
    }


def find_planned_runs(folder: Path) -> list[tuple[str, int]]:
    """Return the runs that a folder should hold, by label and seed: method by method, as its study's file has them.

    Args:
        folder: of a study, of a run, or of a method of a study. Of any other, such as one of
            several studies, nothing is known.
    """
    for place, only in ((folder, None), (folder.parent, folder.name)):
        text = load_study_text(place, CONFIG)
        try:
            content = tomllib.loads(text)
        except ValueError:
            continue
        if not content:
            continue
        if content.get("sweep"):  # its points are studies of their own
            return []
        seeds, methods = content.get("seeds", [0]), content.get("methods", [])
        labels = [str(method.get("label", method.get("kind"))) for method in methods]
        return [(label, int(seed)) for label in labels for seed in seeds if only in (None, label)]
    return []


def load_run(folder: Path) -> StoredRun | UnreadableRun:
    """Read one run folder, or say in one line what is missing or damaged."""
    missing = [name for name in (CONFIG, METRICS) if not (folder / name).is_file()]
    if missing:
        begun = missing[0] == METRICS and not checkpoint.is_done(folder)
        return UnreadableRun(
            folder, f"{missing[0]} is not there (yet)", "unfinished" if begun else "damaged"
        )
    for name in (CONFIG, METRICS, EDGES, PROVENANCE):
        if fault := manifest.describe_fault(folder, name):
            return UnreadableRun(folder, fault)
    try:
        config = tomllib.loads((folder / CONFIG).read_text("utf-8"))
        provenance = (
            json.loads((folder / PROVENANCE).read_text("utf-8"))
            if (folder / PROVENANCE).is_file()
            else {}
        )
        measured = pq.ParquetFile(folder / METRICS).read().to_pandas()
        edges = pd.DataFrame(columns=EDGE_COLUMNS)
        if (folder / EDGES).is_file():
            edges = pq.ParquetFile(folder / EDGES).read().to_pandas()
        metrics.REGISTRY.add_stored(provenance.get("metrics") or {})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return UnreadableRun(folder, f"a file is damaged: {str(error).splitlines()[0]}")
    for name, table, columns in ((METRICS, measured, METRIC_COLUMNS), (EDGES, edges, EDGE_COLUMNS)):
        lacking = [column for column in columns if column not in table.columns]
        if lacking:
            return UnreadableRun(
                folder, f"{name} has no column {lacking[0]!r}; it is not the table of a run"
            )
    if not len(measured):
        return UnreadableRun(folder, f"{METRICS} is empty: no round has ended yet", "unfinished")
    return StoredRun(folder, config, provenance, measured, edges)


def main_metric(runs: Sequence[StoredRun]) -> str:
    """The metric by which methods are compared: accuracy where there is one, else the loss.

    One that validation data lack does not count, such as the squared error of regression, or what
    was asked for of the test sets alone.
    """
    tables = [run.metrics for run in runs]
    names = {str(name) for table in tables for name in table["metric"].unique()}
    chosen = [table.loc[(table["split"] == "validation").to_numpy(), "metric"] for table in tables]
    validated = {str(name) for column in chosen for name in column.unique()}
    if validated:
        names = {
            name for name in names if name in validated or not metrics.REGISTRY[name].on_samples
        }
    return metrics.REGISTRY.choose_main([*sorted(names - {metrics.MSE.name}), metrics.LOSS.name])


def collect_metrics(runs: Iterable[StoredRun]) -> Metrics:
    """The metrics that are built in, and those that the methods of some runs declared."""
    return Metrics({name: one for run in runs for name, one in run.known_metrics.items()})


def load_federation_description(folder: str | Path) -> dict[str, Any]:
    """Return what federation.json in a study's folder tells of the data; nothing where there never was one.

    Raises:
        DataError: when it is missing or damaged.
    """
    return json.loads(load_study_text(Path(folder), FEDERATION) or "{}")


def load_study_text(folder: Path, name: str) -> str:
    """Return the text of a file of a study, "" where there never was one.

    A folder without a manifest, such as one of stored results, is taken as it is.

    Raises:
        DataError: when the file is missing or damaged.
    """
    if (folder / manifest.FILE).exists() and (fault := manifest.describe_fault(folder, name)):
        raise DataError(f"{folder}: {fault}; `coterie run STUDY --resume` writes it again")
    path = folder / name
    return path.read_text("utf-8") if path.is_file() else ""


def load_cluster_names(folder: str | Path, clusters: Iterable[int]) -> dict[int, str]:
    """The name of each planted cluster: from the study's federation.json where there is one, else its number."""
    known = load_federation_description(folder).get("clusters", [])
    return {c: str(known[c]) if 0 <= c < len(known) else str(c) for c in sorted(set(clusters))}


def merge_client_names(runs: Iterable[StoredRun]) -> dict[int, str]:
    """Return the names of clients by id, as far as some runs agree: seeds may be of other clients."""
    found: dict[int, str] = {}
    differ = set()
    for run in runs:
        differ |= {
            client
            for client, name in run.client_names.items()
            if found.setdefault(client, name) != name
        }
    return {client: name for client, name in sorted(found.items()) if client not in differ}


def compute_seed_overlap(run: StoredRun) -> float:
    """Return by how much seeds of a study share training data, as `functional.paired.mean_difference` takes it.

    Where seeds are folds of the same samples: tested samples over those trained on; else 0.
    """
    folds = (run.config.get("data") or {}).get("folds")
    return overlap_from_share(1 / folds) if folds else 0.0


def group_by_label(runs: Iterable[StoredRun]) -> dict[str, list[StoredRun]]:
    """The runs of each method, by label, in the order in which they were found."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def find_declared_value(run: StoredRun, name: str) -> Any:
    """Return what the class of a run's method declares, as the run noted it: `server`, `needs` or `timed_against`."""
    return run.provenance.get(name, getattr(METHODS.get(run.method_kind, Method), name))


def compute_test_curve(table: pd.DataFrame, metric: str) -> tuple[list[int], list[float]]:
    """Return the evaluated rounds, and the mean over clients of a test metric of the newest models in each.

    Args:
        table: the metrics table of a run.
        metric: such as "accuracy".
    """
    wanted = (
        (table["split"] == "test") & (table["model"] == "current") & (table["metric"] == metric)
    )
    means = table.loc[wanted.to_numpy()].groupby("round")["value"].mean()
    return [int(index) for index in means.index], [float(value) for value in means.to_numpy()]
