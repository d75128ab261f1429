"""Stored runs, and what they come down to: the rows of summary.json and the gain over training alone.

Everything here reads run folders only (config.toml, metrics.parquet, edges.parquet,
provenance.json), so a finished study, one that is still running and one made on another machine are
reduced by the same code.
"""

import json
import math
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from jaxtyping import Float, Int

from coterie._util import manifest
from coterie._util.claims import claim_folder
from coterie.errors import DataError
from coterie.functional import metrics
from coterie.functional.metrics import Metrics
from coterie.functional.paired import CONFIDENCE, correct_holm, mean_difference, overlap_from_share
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.results import coverage, pairs
from coterie.results.coverage import RunState, RunStatus
from coterie.results.traffic import count_traffic
from coterie.runtime import checkpoint, newcomers
from coterie.runtime.checkpoint import PROVENANCE
from coterie.runtime.final_metrics import select_defined, select_final_tests
from coterie.runtime.record import EDGE_COLUMNS, EDGES, METRIC_COLUMNS, METRICS
from coterie.runtime.settings import Settings

CONFIG, FEDERATION, SUMMARY = "config.toml", "federation.json", "summary.json"
STUDY_WAIT = 60.0
"""Seconds to wait for another process that writes the files of the same study: it takes milliseconds."""
MEANS = {"all": "mean over clients", "clusters": "mean over clusters"}
"""What the means in a summary are over."""


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


def list_run_statuses(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun], *folders: str | Path
) -> list[RunStatus]:
    """Say how each run of a study stands: those that it should have, and others that are there.

    Args:
        runs: its runs, as `load_runs` returns them.
        problems: its folders that could not be read.
        folders: the study's folder, whose file says which runs it should have; or those of some
            methods or runs.
    """
    found = {(run.label, run.seed): _find_run_status(run) for run in runs}
    for problem in problems:
        found[problem.label, problem.seed] = problem.status
    wanted = [key for folder in folders for key in find_planned_runs(Path(folder))]
    missing = {key: RunStatus(*key, "missing") for key in wanted if key not in found}
    order = list(dict.fromkeys([*(label for label, _ in wanted), *(label for label, _ in found)]))
    whole = {**found, **missing}
    return [whole[key] for key in sorted(whole, key=lambda key: (order.index(key[0]), key[1]))]


def _find_run_status(run: StoredRun) -> RunStatus:
    if run.is_finished:
        return RunStatus(run.label, run.seed, "finished")
    if run.provenance.get("done"):
        return RunStatus(run.label, run.seed, "unfinished", "it has no final test")
    known = run.provenance.get("round")
    rounds = run.num_rounds if known is None else max(int(known), 0)
    # then the rounds in its file are not those that it has
    scaled = float(run.config.get("scale", 1.0)) != 1.0
    of = f" of {run.config['rounds']}" if "rounds" in run.config and not scaled else ""
    return RunStatus(run.label, run.seed, "unfinished", f"round {rounds}{of}")


def select_compared_runs(
    runs: Sequence[StoredRun],
    problems: Sequence[UnreadableRun] = (),
    seeds: Iterable[int] | None = None,
) -> list[StoredRun]:
    """Return the runs over which methods are averaged: finished ones, of the seeds that all methods finished.

    A method that finished none does not count. This is the one place that decides what a mean over
    seeds is over.

    Args:
        runs: the runs of one study.
        problems: its folders that could not be read; a run of which a part could not be read does
            not count.
        seeds: only these, where given.

    Raises:
        DataError: when they are not of one study.
    """
    check_one_study(runs)
    broken = {(problem.label, problem.seed) for problem in problems}
    done = [run for run in runs if run.is_finished and (run.label, run.seed) not in broken]
    chosen = set(
        coverage.find_common_seeds(
            {label: [run.seed for run in group] for label, group in group_by_label(done).items()}
        )
    )
    if seeds is not None:
        chosen &= set(seeds)
    return [run for run in done if run.seed in chosen]


def summarize_coverage(
    runs: Sequence[StoredRun],
    problems: Sequence[UnreadableRun],
    *folders: str | Path,
    seeds: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Return what `coverage.describe_coverage` tells about: the compared `seeds`, what is `left_out`, and the labels of `rows`.

    The arguments are those of `list_run_statuses` and of `select_compared_runs`.
    """
    chosen = select_compared_runs(runs, problems, seeds)
    used = {(run.label, run.seed) for run in chosen}
    left = [
        one
        for one in list_run_statuses(runs, problems, *folders)
        if (one.label, one.seed) not in used
    ]
    rows = [{"label": label} for label in group_by_label(chosen)]
    return {
        "seeds": sorted({seed for _, seed in used}),
        "left_out": coverage.statuses_to_json(left),
        "rows": rows,
    }


def group_by_study(
    folders: Sequence[str | Path], runs: Sequence[StoredRun], problems: Sequence[UnreadableRun]
) -> Iterator[tuple[list[StoredRun], list[UnreadableRun], dict[str, Any]]]:
    """Sort what `load_runs` read by studies, and say of each which runs there are.

    Args:
        folders: those that were asked for; of a study of which only some methods or runs were, no
            others are missing.
        runs: the runs that were read.
        problems: the folders that could not be read.

    Yields:
        The runs of a study, its folders that could not be read, and what is `summarize_coverage`, with the
        name of its `study_name`.
    """
    for study in dict.fromkeys(one.folder.parent.parent for one in (*runs, *problems)):
        own = [run for run in runs if run.folder.parent.parent == study]
        broken = [problem for problem in problems if problem.folder.parent.parent == study]
        asked = [Path(folder) for folder in folders]
        parts = [folder for folder in asked if study in folder.parents]
        whole = any(folder in (study, *study.parents) for folder in asked)
        name = own[0].study_name if own else study.name
        yield (
            own,
            broken,
            {"study": name, **summarize_coverage(own, broken, *([study] if whole else parts))},
        )


def select_charted_runs(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun] = ()
) -> list[StoredRun]:
    """Return the runs whose rounds are drawn: the compared seeds, also of methods that have not finished one yet.

    While no seed is compared these are all runs.
    """
    seeds = {run.seed for run in select_compared_runs(runs, problems)}
    return [run for run in runs if run.seed in seeds] or list(runs)


def check_one_study(runs: Iterable[StoredRun]) -> None:
    """Refuse runs that are of several studies: their methods have the same names, and would be averaged together.

    Raises:
        DataError: when they are.
    """
    places: dict[tuple[str, int], Path] = {}
    studies: dict[tuple[str, Path], None] = {}
    for run in runs:
        place = run.folder.parent.parent
        studies[run.study_name, place] = None
        several = (
            len({name for name, _ in studies}) > 1 and len({folder for _, folder in studies}) > 1
        )
        if several or (run.label, run.seed) in places:
            other = places.get((run.label, run.seed)) or next(
                folder for _, folder in studies if folder != place
            )
            raise DataError(
                f"these runs are of several studies, such as {other} and {place}; give the folder of one"
            )
        places[run.label, run.seed] = place


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


def summarize_study(study: str | Path, seeds: Iterable[int] | None = None) -> dict[str, Any]:
    """Reduce the finished runs of a study to the content of summary.json.

    Args:
        study: the study's folder.
        seeds: average over no others than these.

    Returns:
        `study_name`, `seeds`, `left_out`, `rows`, `pairs` and `timing`. A row is the final test value of
        one metric of one
        method: the mean over the clients of one planted cluster, over all clients ("all"), or the
            unweighted mean over
        clusters ("clusters"); then mean and population standard deviation over seeds, the same
        `seeds` for every method (see `select_compared_runs`); a single seed has no deviation; `needs` is there
        for a method that declares some. `left_out` tells how each run stands that is not among
        them. A pair has the fields of `pairs.Pair` (see `compare_methods`); `about` says what their
        intervals speak of. `list_participation`, `compute_spending`, `compute_time_to_accuracy`, `list_undefined_metrics` and, where a
        node left out rounds, `list_skipped_rounds` are those of the functions below. `metrics` is there when
        methods declared some, and `scale` when the rounds were scaled.

    Raises:
        DataError: when the folder holds no run, or several studies.
    """
    runs, problems = load_runs([study])
    return summarize_runs(runs, study, problems, seeds)


def summarize_runs(
    runs: Sequence[StoredRun],
    study: str | Path,
    problems: Sequence[UnreadableRun] = (),
    seeds: Iterable[int] | None = None,
) -> dict[str, Any]:
    """As `summarize_study`, of runs that were read already, and of the folders that could not be read."""
    home = runs[0].folder.parent.parent if runs and runs[0].folder == Path(study) else study
    names = load_cluster_names(
        home, (int(c) for run in runs for c in run.client_clusters.unique() if c >= 0)
    )
    chosen = select_compared_runs(runs, problems, seeds)
    rows: list[dict[str, Any]] = []
    for group in group_by_label(chosen).values():
        for metric in dict.fromkeys(name for run in group for name in run.result_metrics):
            reduced = pd.DataFrame([compute_cluster_means(run, metric) for run in group])
            for cluster in reduced.columns:
                mean, deviation = mean_std_over_seeds(reduced[cluster].to_numpy(float))
                rows.append(
                    {
                        **describe_method(group[0]),
                        "cluster": names.get(cluster, str(cluster)),
                        "metric": metric,
                        "mean": mean,
                        "std": deviation,
                        "seeds": len(reduced),
                    }
                )
    timing = [
        {
            "label": run.label,
            "seed": run.seed,
            "wall_s": float(times.get("wall_s", math.nan)),
            "train_s": float(times.get("train_s", math.nan)),
            "train_samples": int(times.get("train_samples", 0)),
        }
        for run in runs
        if (times := run.provenance.get("timing"))
    ]
    name = runs[0].study_name if runs else Path(study).name
    content: dict[str, Any] = {
        "study": name,
        **summarize_coverage(runs, problems, study, seeds=seeds),
    }
    found = pairs.pairs_to_json(compare_methods(chosen, names))
    about = (
        {"about": pairs.describe_interval_scope(chosen[0].config, merge_client_names(chosen))}
        if found
        else {}
    )
    content |= {"rows": rows, "pairs": found, **about, "timing": timing}
    content |= {
        "participation": list_participation(chosen),
        "spent": compute_spending(chosen),
        "time_to_accuracy": compute_time_to_accuracy(chosen),
        "undefined": list_undefined_metrics(chosen),
    }
    content |= {"skipped": rows} if (rows := list_skipped_rounds(chosen)) else {}
    if declared := metrics.metrics_to_store(collect_metrics(runs).values()):
        content["metrics"] = declared
    if joined := summarize_new_clients(chosen):
        content["new_clients"] = joined
    scales = {float(run.config.get("scale", 1.0)) for run in runs} - {1.0}
    return {**content, "scale": min(scales)} if scales else content


def describe_method(run: StoredRun) -> dict[str, Any]:
    """Return what a row of a summary says of its method: kind and label, and `needs` where it declares some."""
    needs = sorted(find_declared_value(run, "needs"))
    return {"method": run.method_kind, "label": run.label, **({"needs": needs} if needs else {})}


def compare_methods(runs: Sequence[StoredRun], names: Mapping[int, str]) -> list[pairs.Pair]:
    """Compare the methods of a study in pairs: by the main metric in each cluster, by others over all clients.

    Args:
        runs: those that are `select_compared_runs`.
        names: of the planted clusters.
    """
    if not runs:
        return []
    known, main = collect_metrics(runs), main_metric(runs)
    overlap = compute_seed_overlap(runs[0])
    planted: dict[int, pd.Series] = {}
    for run in runs:
        planted[run.seed] = (
            run.client_clusters.combine_first(planted[run.seed])
            if run.seed in planted
            else run.client_clusters
        )
    nowhere = {seed: clusters * 0 - 1 for seed, clusters in planted.items()}
    out = []
    for metric in dict.fromkeys([main, *(name for run in runs for name in run.result_metrics)]):
        if known[metric].sign:
            values: dict[str, dict[int, pd.Series]] = {}
            for run in runs:
                counted = select_defined(
                    run.final_values(metric),
                    run.final_values(metrics.LOSS.name),
                    run.known_metrics[metric],
                )
                values.setdefault(run.label, {})[run.seed] = counted
            groups = planted if metric == main else nowhere
            out += pairs.compare_pairs(values, groups, known[metric], names, overlap)
    return out


def compute_seed_overlap(run: StoredRun) -> float:
    """Return by how much seeds of a study share training data, as `functional.paired.mean_difference` takes it.

    Where seeds are folds of the same samples: tested samples over those trained on; else 0.
    """
    folds = (run.config.get("data") or {}).get("folds")
    return overlap_from_share(1 / folds) if folds else 0.0


def mean_std_over_seeds(values: Float[np.ndarray, " seeds"]) -> tuple[float, float | None]:
    """Return mean and population standard deviation over seeds; None for the deviation of a single seed.

    Example:
        >>> over_seeds(np.array([0.25, 0.75])), over_seeds(np.array([0.5]))
        ((0.5, 0.25), (0.5, None))
    """
    return float(values.mean()), float(values.std()) if len(values) > 1 else None


def compute_cluster_means(run: StoredRun, metric: str) -> dict[int | str, float]:
    """The final test value of a run: per planted cluster, over all clients, and over clusters.

    Clients whose test samples leave a metric undefined are left out; see
    `final_metrics.select_defined`.
    """
    every, cluster = run.final_values(metric), run.client_clusters
    values = select_defined(every, run.final_values(metrics.LOSS.name), run.known_metrics[metric])
    planted, found = (cluster.reindex(one.index).to_numpy() for one in (every, values))
    out: dict[int | str, float] = {
        int(c): float(values.to_numpy()[found == c].mean()) if (found == c).any() else math.nan
        for c in np.unique(planted)
        if c >= 0
    }
    over = float(np.mean(list(out.values()))) if out else None
    out["all"] = float(values.mean(skipna=False))
    if over is not None:
        out["clusters"] = over
    return out


def group_by_label(runs: Iterable[StoredRun]) -> dict[str, list[StoredRun]]:
    """The runs of each method, by label, in the order in which they were found."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def compute_study_gains(study: str | Path) -> dict[str, Any]:
    """What collaboration was worth to each client: the gain over training alone.

    The gain of a client is the final test value of its model minus that of the same client under
    the study's method of kind "local" with the same seed, turned round for a loss, so that above
    zero is always better.

    Args:
        study: the study's folder.

    Returns:
        `baseline` (the label, or None when the study has no such method: then there are no rows),
        `metric`, `confidence`, and a row for each other method: `label`, `seeds` (the number of
        those that are `select_compared_runs`), and for each of `mean` (over clients), `worst_tenth` (mean over
        the tenth of the clients that gained least, rounded up to whole clients) and `lost` (share
        of clients with a gain below zero) the mean over the seeds with the ends of Student's
        interval, `<name>_low` and `<name>_high`; None with a single seed, or where all seeds gave
        the same. `mean_established` says whether the mean differs from 0, by Student's t test and
        with Holm's correction for the number of rows. Nothing like it is said of the worst tenth:
        the worst of several clients that neither gain nor lose is below 0.

    Raises:
        DataError: when the folder holds no run.
    """
    runs, problems = load_runs([study])
    return compute_gains(runs, problems)


def compute_gains(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun] = ()
) -> dict[str, Any]:
    """As `compute_study_gains`, of runs that were read already, and of the folders that could not be read."""
    done = select_compared_runs(runs, problems)
    metric = main_metric(runs)
    baseline = next((run.label for run in runs if run.method_kind == "local"), None)
    out: dict[str, Any] = {
        "baseline": baseline,
        "metric": metric,
        "confidence": CONFIDENCE,
        "rows": [],
    }
    tests: list[float] = []
    overlap = compute_seed_overlap(runs[0]) if runs else 0.0
    for label, per_seed in compute_client_gains(done, baseline, metric).items():
        reduced = [_reduce_gains(own.to_numpy()) for own in per_seed.values()]
        row: dict[str, Any] = {"label": label, "seeds": len(reduced)}
        for name in ("mean", "worst_tenth", "lost"):
            row |= mean_with_interval(name, np.array([one[name] for one in reduced]), overlap)
        tests.append(
            float(mean_difference(np.array([one["mean"] for one in reduced]), overlap=overlap).p)
        )
        out["rows"].append(row)
    for row, p in zip(out["rows"], correct_holm(np.array(tests)) if tests else (), strict=True):
        row["mean_established"] = bool(p <= 1 - CONFIDENCE)
    return out


def compute_client_gains(
    runs: Sequence[StoredRun], baseline: str | None, metric: str
) -> dict[str, dict[int, pd.Series]]:
    """The gain of each client over the baseline, by label and seed; only seeds that both have."""
    sign = collect_metrics(runs)[metric].sign or 1
    alone = {run.seed: run.final_values(metric) for run in runs if run.label == baseline}
    found: dict[str, dict[int, pd.Series]] = {}
    for run in runs:
        if run.label != baseline and run.seed in alone:
            found.setdefault(run.label, {})[run.seed] = sign * (
                run.final_values(metric) - alone[run.seed]
            )
    return found


def _reduce_gains(values: np.ndarray) -> dict[str, float]:
    tenth = np.sort(values)[: math.ceil(len(values) / 10)]
    return {
        "mean": float(values.mean()),
        "worst_tenth": float(tenth.mean()),
        "lost": float((values < 0).mean()),
    }


def mean_with_interval(
    name: str, values: np.ndarray, overlap: float = 0.0
) -> dict[str, float | None]:
    """Mean over seeds, with the ends of Student's interval; None for one seed, or where all gave the same."""
    found = mean_difference(values, overlap=overlap)
    ends = (None if np.isnan(end) else float(end) for end in (found.low, found.high))
    return dict(zip((name, f"{name}_low", f"{name}_high"), (float(found.mean), *ends), strict=True))


def replace_nonfinite(value: Any) -> Any:
    """Replace what JSON cannot say (NaN and infinity) by None, at any depth."""
    if isinstance(value, dict):
        return {str(key): replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_summary(study: str | Path) -> Path:
    """Write summary.json into a study's folder, and return its path."""
    write_study_files(
        Path(study),
        {
            SUMMARY: json.dumps(
                replace_nonfinite(summarize_study(study)), indent=1, ensure_ascii=False
            )
        },
    )
    return Path(study) / SUMMARY


def write_study_files(study: Path, texts: Mapping[str, str]) -> None:
    """Write files of a study by name, one after the other, while no other process writes some of the same study."""
    with claim_folder(study, wait=STUDY_WAIT):
        for name, text in texts.items():
            manifest.replace_files(study, {name: text.encode()})


TIMED_METRICS = (metrics.ACCURACY.name, metrics.GLOBAL_ACCURACY.name)


def find_declared_value(run: "StoredRun", name: str) -> Any:
    """Return what the class of a run's method declares, as the run noted it: `server`, `needs` or `timed_against`."""
    return run.provenance.get(name, getattr(METHODS.get(run.method_kind, Method), name))


def count_client_rounds(table: pd.DataFrame) -> int:
    """Return the total participation: how many local trainings there were in all rounds, over all clients.

    Args:
        table: the metrics table of a run.
    """
    trained = (
        (table["split"] == "train") & (table["metric"] == metrics.LOSS.name) & (table["round"] >= 0)
    )
    return int(trained.to_numpy().sum())


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


def list_participation(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return the total participation of each run: `label`, `seed`, `count_client_rounds`."""
    return [
        {"label": run.label, "seed": run.seed, "client_rounds": count_client_rounds(run.metrics)}
        for run in runs
    ]


def compute_spending(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return what each method spent, mean over runs.

    Returns:
        A row for each method: `label`, `bytes` (of a client, received and sent to a server) and
        `count_client_rounds` (of training, over all clients).
    """
    rows = []
    for label, group in group_by_label(runs).items():
        used = [
            sum(
                part.sum() for part in count_traffic(run.metrics, run.edges, max(1, run.num_rounds))
            )
            for run in group
        ]
        per_client = np.mean(
            [total / len(run.client_clusters) for total, run in zip(used, group, strict=True)]
        )
        trained = np.mean([count_client_rounds(run.metrics) for run in group])
        rows.append({"label": label, "bytes": float(per_client), "client_rounds": float(trained)})
    return rows


def compute_time_to_accuracy(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    r"""Return how much sooner each method reaches the largest accuracy of a baseline than the baseline did.

    The baseline is what the method declares (`Method.timed_against`): Ditto for SosicFL+, FedAvg
    for most others. Both need evaluations over the rounds (`eval_every`).

    Args:
        runs: finished runs of one study.

    Returns:
        A row for each method and metric ("accuracy" over the clients' own test sets,
        "global_accuracy"): `label`, `base`, `metric`, `ratio` (the baseline's time over the
        method's, mean over seeds; 0 in a seed in which the method never gets there), `std`,
        `seeds`, `reached` (in how many of them it got there), `tta` (the method's first round with
        that accuracy, mean over the seeds in which it got there) and `reason` (why the ratio is
        NaN).
    """
    bases: dict[tuple[str, int], StoredRun] = {(run.method_kind, run.seed): run for run in runs}
    found: dict[tuple[str, str, str], list[tuple[float, float, str]]] = {}
    for run in runs:
        base = bases.get((find_declared_value(run, "timed_against"), run.seed))
        for metric in TIMED_METRICS if base is not None and base.label != run.label else ():
            own, theirs = run.test_curve(metric), base.test_curve(metric)  # type: ignore[union-attr]
            if own[0] and theirs[0]:
                entry = _compute_time_ratio(own, theirs)
                found.setdefault((run.label, base.label, metric), []).append(entry)  # type: ignore[union-attr]
    rows = []
    for (label, name, metric), entries in found.items():
        ratios = np.array([ratio for ratio, _, _ in entries])
        times = [time for _, time, _ in entries if math.isfinite(time)]
        mean, deviation = mean_std_over_seeds(ratios)
        row = {"label": label, "base": name, "metric": metric, "ratio": mean, "std": deviation}
        more = {
            "seeds": len(entries),
            "reached": len(times),
            "tta": float(np.mean(times)) if times else math.inf,
        }
        rows.append(
            {**row, **more, "reason": next((reason for _, _, reason in entries if reason), "")}
        )
    return rows


def summarize_new_clients(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return the final tests of clients that were in no round and joined at the end; see `runtime.newcomers`.

    A row for each method, metric and `model`: "joined" (after they trained), or "received" (with a
    server: before). It has `mean` and `std` over seeds of the mean over these clients, the number
    of `seeds`, of `client_clusters` in the first of them, and of the `num_rounds` that each trained; and
    `others` where the others did not stay as they were: "training".
    """
    rows = []
    for label, group in group_by_label(runs).items():
        found: dict[tuple[str, str], list[float]] = {}
        for run in group:
            own = run.metrics.loc[(run.metrics["split"] == newcomers.SPLIT).to_numpy()]
            joined = (
                own["model"]
                .astype(str)
                .where((own["model"] == newcomers.RECEIVED).to_numpy(), "joined")
            )
            for (metric, model), table in own.groupby(
                [own["metric"].astype(str), joined], sort=False
            ):
                found.setdefault((str(metric), str(model)), []).append(float(table["value"].mean()))
        for (metric, model), values in found.items():
            mean, deviation = mean_std_over_seeds(np.array(values))
            first = group[0].metrics
            new = first.loc[(first["split"] == newcomers.SPLIT).to_numpy(), "client"].nunique()
            rounds = int(group[0].config.get("new_client_rounds", _ROUNDS))
            others = str(group[0].config.get("new_client_others", _OTHERS))
            rows.append(
                {
                    "label": label, "metric": metric, "model": model, "mean": mean, "std": deviation,
                    "seeds": len(values), "clients": int(new), "rounds": rounds,
                    **({} if others == _OTHERS else {"others": others}),
                }
            )  # fmt: skip
    return rows


_ROUNDS, _OTHERS = Settings.new_client_rounds, Settings.new_client_others


def describe_new_clients(content: Mapping[str, Any], metric: str) -> list[str]:
    """Say what a summary has on clients that joined at the end, in a line; none where nobody did.

    Args:
        content: the summary.
        metric: the one to name.
    """
    rows = [row for row in content.get("new_clients", ()) if row["metric"] == metric]
    if not rows:
        return []
    known = metrics.REGISTRY.add_stored(content.get("metrics") or {})[metric]
    received = {row["label"]: row["mean"] for row in rows if row["model"] == newcomers.RECEIVED}
    parts = []
    for row in rows:
        if row["model"] == "joined":
            spread = (
                f" ± {known.format_value(row['std'], brief=True)}" if row["std"] is not None else ""
            )
            before = received.get(row["label"])
            was = (
                "" if before is None else f" ({known.format_value(before, brief=True)} as received)"
            )
            parts.append(
                f"{row['label']} {known.format_value(row['mean'], brief=True)}{spread}{was}"
            )
    many = f"{rows[0]['clients']} client{'s' * (rows[0]['clients'] > 1)}"
    beside = " while the others trained on" if rows[0].get("others") == "training" else ""
    return [
        f"New clients: {many} took part in no round, joined at the end and trained {rows[0]['rounds']} rounds{beside}; "
        f"{known.heading('test')}: {', '.join(parts)}"
    ]


def _compute_time_ratio(
    own: tuple[list[int], list[float]], base: tuple[list[int], list[float]]
) -> tuple[float, float, str]:
    """The ratio of one seed, the method's time, and why there is no ratio."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", metrics.Undefined)
        ratio = metrics.time_to_accuracy_ratio(*own, *base)
        time = metrics.time_to_accuracy(*own, metrics.max_accuracy(base[1]))
    return ratio, time, str(said[0].message) if said and math.isnan(ratio) else ""


def list_undefined_metrics(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return why final metrics are NaN: `label`, `metric` and `reason`, each once."""
    rows = []
    for run in runs:
        for metric, reason in (run.provenance.get("undefined") or {}).items():
            row = {"label": run.label, "metric": metric, "reason": reason}
            if row not in rows:
                rows.append(row)
    return rows


def list_skipped_rounds(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return the rounds that nodes left out: `label`, `seed` and `num_rounds`, pairs of the first and last of each gap."""
    return [
        {"label": run.label, "seed": run.seed, "rounds": left_out}
        for run in runs
        if (left_out := run.provenance.get("skipped"))
    ]
