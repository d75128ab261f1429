"""Load the stored runs of studies from their folders.

Everything here reads run folders only (config.toml, metrics.parquet, edges.parquet,
provenance.json), so a finished study, one that is still running and one made on another machine are
loaded by the same code.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from jaxtyping import Float, Int

from coterie._util import manifest
from coterie._util.mappings import drop_keys, number_items
from coterie._util.toml import parse_toml
from coterie.errors import DataError, first_line
from coterie.functional import metrics
from coterie.functional.losses import CrossEntropy, SquaredError
from coterie.functional.metrics import Metrics
from coterie.functional.paired import overlap_from_share
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.results.coverage import RunState, RunStatus
from coterie.results.planted import PlantedPhases
from coterie.runtime import checkpoint, newcomers
from coterie.runtime.checkpoint import PROVENANCE
from coterie.runtime.final_metrics import find_diverged, select_defined, select_final_tests
from coterie.runtime.record import EDGE_COLUMNS, EDGES, METRIC_COLUMNS, METRICS

CONFIG = "config.toml"
OVERALL: Sequence[str] = ("all", "clusters")
"""What stands in results in place of a cluster: means over clients, and over clusters."""

FEDERATION = "federation.json"
# Of a node between machines: its network as it is now.
NETWORK = "network.json"
# The newest roster that it has seen, in the folder above that of its study.
ROSTER_SEEN = "roster.seen"


@dataclass(frozen=True)
class StoredRun:
    """One run, as its folder describes it.

    Args:
        folder: its folder, `<study>/<label>/seed-<n>` as the study wrote it.
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
        """The built-in metrics, and the metrics that its method declared."""
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
        stored = self.provenance.get("client_names") or {}
        # Keys of JSON are text.
        return {int(client): str(name) for client, name in stored.items()}

    @cached_property
    def client_clusters(self) -> pd.Series:
        """The planted cluster of each client (-1 when unknown), indexed by client id.

        Where the data change over the rounds, the one at the end.
        """
        # The planted cluster repeats in each row of a client. Rows are in the order of rounds.
        last = self.metrics.drop_duplicates("client", keep="last")
        return pd.Series(last["cluster"].to_numpy(), index=last["client"].to_numpy()).sort_index()

    @cached_property
    def late_clients(self) -> Int[np.ndarray, " late"]:
        """The ids of clients that joined at the end: they were in no round, and nobody read them."""
        late = (self.metrics["split"] == newcomers.SPLIT).to_numpy()
        client = self.metrics["client"].to_numpy(np.int64)
        return np.setdiff1d(client[late], client[~late])

    @cached_property
    def num_counted(self) -> int:
        """The number of clients that a cost per client is a mean over: in rounds, with results.

        Attackers have no results, and clients that joined at the end were in no round.
        """
        # Of a node that joined late nobody was in a round, and nothing is counted.
        return max(1, len(self.client_clusters) - len(self.late_clients))

    @cached_property
    def counted_edges(self) -> pd.DataFrame:
        """The edges of these clients: attackers read too."""
        known = np.isin(self.edges["reader"].to_numpy(), self.client_clusters.index.to_numpy())
        return self.edges if known.all() else self.edges.loc[known]

    @property
    def known_clusters(self) -> set[int]:
        """The planted clusters that occur, without the unknown one."""
        return {int(cluster) for cluster in self.client_clusters.unique() if cluster >= 0}

    @cached_property
    def population(self) -> int:
        """The number of clients that the tables name, hosted or read by a node."""
        # Clients of other nodes have no metrics here, but may stand in the edges.
        columns = [self.client_clusters.index, self.edges["reader"], self.edges["read"]]
        return max(int(ids.to_numpy(np.int64).max()) for ids in columns if len(ids)) + 1

    @cached_property
    def planted_clusters(self) -> Int[np.ndarray, " population"]:
        """The planted cluster of each member of the population; -1 when it is unknown."""
        return self.client_clusters.reindex(range(self.population), fill_value=-1).to_numpy(
            np.int64
        )

    @cached_property
    def planted_phases(self) -> PlantedPhases:
        """The planted clusters by round: several phases where the data change over the rounds."""
        rows = self.metrics
        changed = (
            self.client_clusters.reindex(rows["client"].to_numpy()).to_numpy()
            != rows["cluster"].to_numpy()
        )
        if not changed.any():
            return PlantedPhases(np.zeros(1, np.int64), self.planted_clusters[None])
        # In the first round of a phase all clients are validated.
        rows = rows.loc[(rows["split"] == "validation").to_numpy()]
        firsts, found = list[int](), list[np.ndarray]()
        for number, own in rows.groupby("round", sort=True):
            planted = found[-1].copy() if found else self.planted_clusters.copy()
            planted[own["client"].to_numpy(np.int64)] = own["cluster"].to_numpy(np.int64)
            if not found or not np.array_equal(planted, found[-1]):
                # The warm-up, round -1, has the data of round 0.
                firsts.append(max(0, int(str(number))))
                found.append(planted)
        return PlantedPhases(np.array(firsts), np.stack(found))

    @property
    def num_rounds(self) -> int:
        """The number of rounds in the longer table: one may be ahead during a run."""
        tables = [table for table in (self.metrics, self.edges) if len(table)]
        return max(int(table["round"].to_numpy().max()) for table in tables) + 1

    @cached_property
    def elapsed_seconds(self) -> Float[np.ndarray, " rounds"] | None:
        """When each round from the first ended, in seconds since the warm-up; None if unknown.

        They are virtual in a simulation, and real on nodes: of several, when the last one ended it.
        """
        own = self.metrics.loc[(self.metrics["metric"] == metrics.ELAPSED.name).to_numpy()]
        ends = np.zeros(self.num_rounds)
        if len(own):
            np.maximum.at(ends, own["round"].to_numpy(np.int64), own["value"].to_numpy(float))
        else:
            # Real times are not in the tables, which are the same bytes in every repetition.
            begun, *rest = (self.provenance.get("timing") or {}).get("ends") or [None]
            if begun is None or not rest:
                return None
            for round, end in enumerate(rest[: len(ends)]):
                ends[round] = 0.0 if end is None else end - begun
        # A round in which nobody took part took no time.
        return np.maximum.accumulate(ends)

    @cached_property
    def is_finished(self) -> bool:
        """Whether the run has its final evaluation."""
        return bool(self.provenance.get("done")) and not self.final_rows.empty

    @cached_property
    def final_rows(self) -> pd.DataFrame:
        """The rows of the final test: of the best models if stored, else of the last.

        In the folder of a node that joined late they are the rows of its own clients, which were in
        no round.
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
        """The metrics of its result: of the final test, and reported as results."""
        rounds = self.metrics.loc[(self.metrics["split"] == "train").to_numpy(), "metric"].unique()
        names = list(map(str, self.final_rows["metric"]))
        for name in rounds:
            # A metric that is not known here is shown no more than labels are.
            if self.known_metrics.get(name, metrics.LABEL).shown in ("result", "further"):
                names.append(str(name))
        return list(dict.fromkeys(names))

    def final_values(self, metric: str) -> pd.Series:
        """Return the final test value of a metric per client; else its last report."""
        if metric not in self._final_value_cache:
            rows = self.final_rows
            rows = rows.loc[(rows["metric"] == metric).to_numpy()]
            if rows.empty and not self.known_metrics[metric].on_samples:
                reported = (self.metrics["split"] == "train") & (self.metrics["metric"] == metric)
                # The table is in the order of rounds: the last row is the last report.
                rows = self.metrics.loc[reported.to_numpy()].drop_duplicates("client", keep="last")
            values = pd.Series(rows["value"].to_numpy(float), index=rows["client"].to_numpy())
            self._final_value_cache[metric] = values.sort_index()
        # A copy: callers may change the series.
        return self._final_value_cache[metric].copy()

    @cached_property
    def _final_value_cache(self) -> dict[str, pd.Series]:
        """What `final_values` has found, by metric: summaries and pages ask many times."""
        return {}

    def defined_values(self, metric: str) -> pd.Series:
        """Return the final values of the clients over which a mean of a metric is taken.

        A client whose test samples leave the metric undefined is left out; one whose model
        diverged is there, with NaN. See `final_metrics.select_defined`.
        """
        losses = self.final_values(metrics.LOSS.name)
        return select_defined(self.final_values(metric), losses, self.known_metrics[metric])

    def test_curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Return what `compute_test_curve` computes from its metrics."""
        if metric not in self._test_curve_cache:
            self._test_curve_cache[metric] = compute_test_curve(self.metrics, metric)
        return self._test_curve_cache[metric]

    @cached_property
    def _test_curve_cache(self) -> dict[str, tuple[list[int], list[float]]]:
        """What `test_curve` has found, by metric: each method asks for the curve of a baseline."""
        return {}


@dataclass(frozen=True)
class UnreadableRun:
    """The folder of a run without results that can be read.

    Args:
        folder: the folder, `<study>/<label>/seed-<n>`.
        reason: why, in one line.
        state: "unfinished" when the run has begun and measured nothing yet, else "damaged".
    """

    folder: Path
    reason: str
    state: RunState = "damaged"

    @property
    def label(self) -> str:
        """The name of the method, from the folder."""
        return self.folder.parent.name

    @property
    def seed(self) -> int:
        """The seed, from the folder; 0 when its name has none."""
        return _parse_seed(self.folder) or 0

    @property
    def status(self) -> RunStatus:
        """The status of the run, with the first sentence of the reason."""
        reason = self.reason.removeprefix("a file is damaged: ").partition(". ")[0]
        return RunStatus(self.label, self.seed, self.state, reason)


def load_runs(paths: Iterable[str | Path]) -> tuple[list[StoredRun], list[UnreadableRun]]:
    """Load the runs in folders: of a run, a method, a study, or of several studies.

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
            if isinstance(run, StoredRun) and run.config.get("trials_of"):
                raise DataError(
                    f"{folder} is a trial of tuning {run.config['trials_of']}, which has no test "
                    "data; `coterie tune` writes the chosen study and all trials as JSON"
                )
            (runs if isinstance(run, StoredRun) else problems).append(run)
    return _join_node_runs(runs), problems


def is_node_folder(folder: Path, name: str) -> bool:
    """Return whether a node between machines writes the study in this folder.

    Args:
        folder: of the study, without links.
        name: of the study. Each of its parts is a folder.
    """
    # The node's roster lies next to its study. Folders further up are not asked: a relay keeps a
    # roster next to its settings, where somebody may have a folder of simulations too.
    return (folder.parents[len(Path(name).parts) - 1] / ROSTER_SEEN).exists()


def has_runs(path: str | Path) -> bool:
    """Whether there are run folders in a folder, readable or not."""
    return bool(_find_run_folders(Path(path)))


def _join_node_runs(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Join the parts of one run that several nodes hosted, with different clients."""
    out: list[StoredRun] = []
    for run in runs:
        # Runs are compared with joined ones, so that a run of three nodes becomes one.
        for place, other in enumerate(out):
            if _are_parts_of_one_run(run, other):
                out[place] = _join_two_runs(other, run)
                break
        else:
            out.append(run)
    return out


def _are_parts_of_one_run(a: StoredRun, b: StoredRun) -> bool:
    """Whether two folders hold different clients of the same study, method and seed."""
    if (a.study_name, a.label, a.seed) != (b.study_name, b.label, b.seed):
        return False
    # Equal names with shared clients are two runs: `check_one_study` refuses them later.
    return set(a.client_clusters.index).isdisjoint(b.client_clusters.index)


def _join_two_runs(a: StoredRun, b: StoredRun) -> StoredRun:
    """Join two parts of a run: nodes work at the same time, so the longer duration counts."""
    first, second = (run.provenance.get("timing") or {} for run in (a, b))
    timing: dict[str, Any] = {}
    # Training adds up over the nodes.
    for name in ("train_s", "train_samples"):
        timing[name] = first.get(name, 0) + second.get(name, 0)
    if ends := _join_ends(first.get("ends"), second.get("ends")):
        timing["ends"] = ends
    timing["wall_s"] = max(first.get("wall_s", 0.0), second.get("wall_s", 0.0))
    done = all(run.provenance.get("done") for run in (a, b))
    provenance = {**a.provenance, "done": done, "timing": timing}
    # Each node knows the names of its own clients.
    names = {**(a.provenance.get("client_names") or {}), **(b.provenance.get("client_names") or {})}
    if names:
        provenance["client_names"] = names
    # pandas warns about empty tables in a concatenation.
    edges = list(filter(len, (a.edges, b.edges))) or [a.edges]
    return replace(
        a,
        provenance=provenance,
        metrics=pd.concat([a.metrics, b.metrics], ignore_index=True),
        edges=pd.concat(edges, ignore_index=True),
    )


def _join_ends(
    first: Sequence[float | None] | None, second: Sequence[float | None] | None
) -> list[float | None]:
    """Return when the last of two nodes ended each round, on the clock of the first.

    Clocks of machines differ, so that each node's times count from the end of its own warm-up.
    """
    if not first or not second or first[0] is None or second[0] is None:
        return []
    begun, other = first[0], second[0]
    out: list[float | None] = [begun]
    for a, b in zip_longest(first[1:], second[1:]):
        known = []
        if a is not None:
            known.append(a)
        if b is not None:
            known.append(begun + b - other)
        out.append(max(known, default=None))
    return out


def _find_run_folders(path: Path) -> list[Path]:
    # Before the first measurement a run has its configuration alone, as a study has: the name
    # says which it is.
    if (path / METRICS).is_file() or ((path / CONFIG).is_file() and path.name.startswith("seed-")):
        return [path]
    # The configuration too: a run that has measured nothing yet is found by it.
    marks = [*path.rglob(METRICS), *path.rglob(f"seed-*/{CONFIG}")]
    folders = {mark.parent for mark in marks}
    orders: dict[Path, dict[str, int]] = {}
    for folder in folders:
        study = folder.parent.parent
        if study not in orders:
            orders[study] = number_items(dict.fromkeys(one for one, _ in find_planned_runs(study)))

    # Methods stand in the order of the study's file, unplanned ones behind them.
    def sort_key(folder: Path) -> tuple[str, int, str, int]:
        study, label = folder.parent.parent, folder.parent.name
        place = orders[study].get(label, len(orders[study]))
        seed = _parse_seed(folder)
        return str(study), place, label, -1 if seed is None else seed

    return sorted(folders, key=sort_key)


def _parse_seed(folder: Path) -> int | None:
    """Return the seed in the name of a run's folder; None without one."""
    text = folder.name.removeprefix("seed-")
    return int(text) if text.isdecimal() else None


def find_planned_runs(folder: Path) -> list[tuple[str, int]]:
    """Return the runs that a folder should hold, by label and seed, in study order.

    Args:
        folder: of a study, of a run, or of a method of a study. For any other folder, such as one
            of several studies, nothing is planned.
    """
    # The folder itself may be a study; or a method, whose study is its parent.
    for place, only in ((folder, None), (folder.parent, folder.name)):
        text = load_study_text(place, CONFIG)
        try:
            content = parse_toml(text)
        except ValueError:  # damaged: what was planned is not known
            continue
        if not content:
            continue
        # The points of a sweep are studies of their own.
        if content.get("sweep"):
            return []
        planned = []
        for method in content.get("methods", []):
            label = str(method.get("label", method.get("kind")))
            if only in (None, label):
                for seed in content.get("seeds", [0]):
                    planned.append((label, int(seed)))
        return planned
    return []


def load_run(folder: Path) -> StoredRun | UnreadableRun:
    """Load one run folder, or return what is missing or damaged in it."""
    for name in (CONFIG, METRICS):
        if not (folder / name).is_file():
            # Before the first round ends there is no table; after the end a missing one is damage.
            begun = name == METRICS and not checkpoint.is_done(folder)
            state: RunState = "unfinished" if begun else "damaged"
            return UnreadableRun(folder, f"{name} is not there (yet)", state)
    # Digests first: a file with a wrong digest is not read at all.
    for name in (CONFIG, METRICS, EDGES, PROVENANCE):
        if fault := manifest.describe_fault(folder, name):
            return UnreadableRun(folder, fault)
    provenance: dict[str, Any] = {}
    edges = pd.DataFrame(columns=EDGE_COLUMNS)
    try:
        config = parse_toml((folder / CONFIG).read_text("utf-8"))
        if (folder / PROVENANCE).is_file():
            provenance = json.loads((folder / PROVENANCE).read_text("utf-8"))
        measured = pq.ParquetFile(folder / METRICS).read().to_pandas()
        if (folder / EDGES).is_file():
            edges = pq.ParquetFile(folder / EDGES).read().to_pandas()
        # Raises where the metrics that the method declared are damaged.
        metrics.REGISTRY.add_stored(provenance.get("metrics") or {})
    # JSON, TOML and pyarrow raise ValueError or OSError; the others come from JSON of another form.
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return UnreadableRun(folder, f"a file is damaged: {first_line(error)}")
    seed = _parse_seed(folder) if folder.name.startswith("seed-") else None
    seeds = config.get("seeds")
    # A copy of another run's folder would count as one more seed.
    if seed is not None and isinstance(seeds, list) and seed not in seeds:
        own = ", ".join(map(str, seeds))
        return UnreadableRun(folder, f"its name says seed {seed}, and {CONFIG} says {own}")
    for name, table, columns in ((METRICS, measured, METRIC_COLUMNS), (EDGES, edges, EDGE_COLUMNS)):
        for column in columns:
            if column not in table.columns:
                reason = f"{name} has no column {column!r}; it is not the table of a run"
                return UnreadableRun(folder, reason)
    if not len(measured):
        return UnreadableRun(folder, f"{METRICS} is empty: no round has ended yet", "unfinished")
    return StoredRun(folder, config, provenance, measured, edges)


def main_metric(runs: Sequence[StoredRun]) -> str:
    """Return the metric by which methods are compared: accuracy if there is one, else the loss.

    A metric without validation values does not count, such as the squared error of regression, or a
    metric that was requested for the test sets alone.
    """
    names: set[str] = set()
    validated: set[str] = set()
    for run in runs:
        names |= set(map(str, run.metrics["metric"].unique()))
        rows = (run.metrics["split"] == "validation").to_numpy()
        validated |= set(map(str, run.metrics.loc[rows, "metric"].unique()))
    # Metrics that are computed without samples have no validation values and still count.
    if validated:
        without = {name for name in names if not metrics.REGISTRY[name].on_samples}
        names &= validated | without
    # Sorted: the first one counts where none is a usual main metric.
    return metrics.REGISTRY.choose_main([*sorted(names - {metrics.MSE.name}), metrics.LOSS.name])


def can_compare(runs: Iterable[StoredRun], metric: str) -> bool:
    """Return whether the values of a metric can be compared between runs.

    Those of the loss can where all minimize the same one: each is in a unit of its own.
    """
    return metric != metrics.LOSS.name or len({_describe_loss(run) for run in runs}) < 2


def _describe_loss(run: StoredRun) -> str:
    """Return the loss of a run as text, "" for the usual one of its targets."""
    loss = run.method_settings.get("loss", run.config.get("loss"))
    if isinstance(loss, str):
        loss = {"kind": loss}
    # On the same targets, only one of the two can be set: that which also follows from them.
    if loss in (None, *({"kind": kind} for kind in ("none", CrossEntropy.kind, SquaredError.kind))):
        return ""
    return json.dumps(loss, sort_keys=True, default=str)


def collect_metrics(runs: Iterable[StoredRun]) -> Metrics:
    """Return the built-in metrics, and the metrics that the methods of some runs declared."""
    known = {}
    for run in runs:
        known |= run.known_metrics
    return Metrics(known)


def load_federation_description(folder: str | Path) -> dict[str, Any]:
    """Load federation.json, which describes a study's data; {} when it never existed.

    Raises:
        DataError: when it is missing or damaged.
    """
    return json.loads(load_study_text(Path(folder), FEDERATION) or "{}")


def load_study_text(folder: Path, name: str) -> str:
    """Load the text of a file of a study, "" when there never was one.

    A folder without a manifest, such as one of stored results, is taken as it is.

    Raises:
        DataError: when the file is missing or damaged.
    """
    if (folder / manifest.FILE).exists() and (fault := manifest.describe_fault(folder, name)):
        # The folder of a sweep has a study in each subfolder, and no federation of its own.
        points = sorted(path.parent.name for path in folder.glob(f"*/{FEDERATION}"))
        if points and not (folder / name).exists():
            raise DataError(
                f"{folder} is a sweep of several studies; give one of them: {', '.join(points)}"
            )
        raise DataError(f"{folder}: {fault}; `coterie run STUDY` writes it again")
    path = folder / name
    return path.read_text("utf-8") if path.is_file() else ""


def load_cluster_names(folder: str | Path, clusters: Iterable[int]) -> dict[int, str]:
    """Load the name of each planted cluster of a study; without one, its number.

    A name that several clusters have, or that stands for a mean in results, gets the number too.
    """
    known = load_federation_description(folder).get("clusters", [])
    names = {}
    for cluster in sorted(set(clusters)):
        has_name = 0 <= cluster < len(known)
        names[cluster] = str(known[cluster]) if has_name else str(cluster)
    # Of the whole study: a cluster has one name whichever others are asked for.
    taken = Counter([*map(str, known), *OVERALL])
    for cluster, name in names.items():
        if taken[name] > 1:
            names[cluster] = f"{name} (cluster {cluster})"
    return names


def merge_client_names(runs: Iterable[StoredRun]) -> dict[int, str]:
    """Return the names of clients by id on which some runs agree: seeds may have other clients."""
    found: dict[int, str] = {}
    differing: set[int] = set()
    for run in runs:
        for client, name in run.client_names.items():
            if found.setdefault(client, name) != name:
                differing.add(client)
    return drop_keys(dict(sorted(found.items())), differing)


def compute_seed_overlap(run: StoredRun) -> float:
    """Return how much training data seeds share, as `functional.paired.mean_difference` takes it.

    When seeds are folds of the same samples: tested samples over trained samples; else 0.
    """
    folds = (run.config.get("data") or {}).get("folds")
    return overlap_from_share(1 / folds) if folds else 0.0


def group_by_label(runs: Iterable[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return the runs of each method, by label, in the order in which they were found."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def find_declared_value(run: StoredRun, name: str) -> Any:
    """Return what the method of a run declares as `server`, `needs` or `timed_against`.

    The run recorded it; for older runs its class says it.
    """
    return run.provenance.get(name, getattr(METHODS.get(run.method_kind, Method), name))


def compute_test_curve(table: pd.DataFrame, metric: str) -> tuple[list[int], list[float]]:
    """Return the evaluated rounds, and the mean test metric of the newest models.

    A client without a value is left out; the mean of a round in which a model diverged is NaN.

    Args:
        table: the metrics table of a run.
        metric: such as "accuracy".
    """
    wanted = (
        (table["split"] == "test") & (table["model"] == "current") & (table["metric"] == metric)
    )
    rows = table.loc[wanted.to_numpy()]
    means = rows.groupby("round")["value"].mean()
    means[rows.loc[find_diverged(table)[wanted.to_numpy()], "round"].unique()] = math.nan
    return means.index.tolist(), means.to_numpy(float).tolist()
