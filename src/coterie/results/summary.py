"""Stored runs, and what they come down to: the rows of summary.json and the gain over training alone.

Everything here reads run folders only (config.toml, metrics.parquet, edges.parquet, provenance.json), so a finished
study, one that is still running and one made on another machine are reduced by the same code.
"""

import json
import math
import tomllib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from jaxtyping import Int
from scipy import stats

from coterie._util import manifest
from coterie._util.claims import claimed
from coterie.errors import DataError
from coterie.functional import metrics
from coterie.functional.metrics import Metrics
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.simulation.checkpoint import PROVENANCE
from coterie.simulation.record import EDGE_COLUMNS, EDGES, METRIC_COLUMNS, METRICS

CONFIG, FEDERATION, SUMMARY = "config.toml", "federation.json", "summary.json"
CONFIDENCE = 0.95
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
    def known(self) -> Metrics:
        """The metrics that are built in, and those that its method declared."""
        return metrics.REGISTRY.with_stored(self.provenance.get("metrics") or {})

    @property
    def method(self) -> dict[str, Any]:
        """The settings of the method."""
        methods = self.config.get("methods") or [self.config.get("method") or {}]
        return methods[0]

    @property
    def kind(self) -> str:
        """The kind of method, such as "dac"."""
        return str(self.method.get("kind", self.folder.parent.name))

    @property
    def label(self) -> str:
        """The name of the method in this study."""
        return str(self.method.get("label", self.folder.parent.name))

    @property
    def study(self) -> str:
        """The name of the study."""
        return str(self.config.get("name", self.folder.parent.parent.name))

    @property
    def seed(self) -> int:
        """The seed, from the folder's name or the configuration."""
        text = self.folder.name.removeprefix("seed-")
        return int(text) if text.isdigit() else int((self.config.get("seeds") or [0])[0])

    @cached_property
    def clients(self) -> pd.Series:
        """The planted cluster of each client (-1 where unknown), indexed by client id."""
        first = self.metrics.drop_duplicates("client")
        return pd.Series(first["cluster"].to_numpy(), index=first["client"].to_numpy()).sort_index()

    @cached_property
    def population(self) -> int:
        """How many clients there are, as far as the tables tell: a node's own are not all of them."""
        read = [self.edges[name].to_numpy(np.int64) for name in ("reader", "read")]
        return max(int(ids.max()) for ids in (self.clients.index.to_numpy(np.int64), *read) if len(ids)) + 1

    @cached_property
    def planted(self) -> Int[np.ndarray, " population"]:
        """The planted cluster of each member of the population; -1 where it is not known."""
        return self.clients.reindex(range(self.population), fill_value=-1).to_numpy(np.int64)

    @property
    def rounds(self) -> int:
        """How many rounds the tables hold."""
        return int(self.metrics["round"].to_numpy().max()) + 1

    @cached_property
    def finished(self) -> bool:
        """Whether the run came to its final evaluation."""
        return bool(self.provenance.get("done")) and not self.final_rows.empty

    @cached_property
    def final_rows(self) -> pd.DataFrame:
        """The rows of the final test evaluation, of the best models where those were kept, else of the last."""
        table = self.metrics
        tests = table.loc[((table["split"] == "test") & (table["round"] == table["round"].max())).to_numpy()]
        best = tests.loc[(tests["model"] == "best").to_numpy()]
        return tests if best.empty else best

    @property
    def results(self) -> list[str]:
        """The metrics of its result: those of the final test, and those that its rounds reported as results."""
        rounds = self.metrics.loc[(self.metrics["split"] == "train").to_numpy(), "metric"].unique()
        reported = [str(name) for name in rounds if self.known.get(name, metrics.LABEL).shown in ("result", "further")]
        return list(dict.fromkeys([*map(str, self.final_rows["metric"]), *reported]))

    def final(self, metric: str) -> pd.Series:
        """The final test value of a metric per client, indexed by client id; else the last that rounds reported."""
        rows = self.final_rows
        rows = rows.loc[(rows["metric"] == metric).to_numpy()]
        if rows.empty and not self.known[metric].on_samples:
            reported = (self.metrics["split"] == "train") & (self.metrics["metric"] == metric)
            rows = self.metrics.loc[reported.to_numpy()].drop_duplicates("client", keep="last")
        return pd.Series(rows["value"].to_numpy(float), index=rows["client"].to_numpy()).sort_index()


@dataclass(frozen=True)
class Problem:
    """A folder that could not be read, and why, in one line."""

    folder: Path
    reason: str


def find_runs(paths: Iterable[str | Path]) -> tuple[list[StoredRun], list[Problem]]:
    """Read the runs in some folders, each of them a run, a method of a study, a study, or a folder of studies.

    Returns:
        The runs, and the folders that look like a run but could not be read; both in order of study, method, seed.
        The folders of nodes that each hosted some clients of one run are one run.

    Raises:
        DataError: when a path is missing, or holds no run at all.
    """
    runs, problems = [], []
    for path in map(Path, paths):
        if not path.is_dir():
            raise DataError(f"{path} is not a folder; give a run folder or a study folder")
        folders = _run_folders(path)
        if not folders:
            raise DataError(f"{path} holds no run; expected {CONFIG} and {METRICS} in <study>/<method>/seed-<n>")
        for folder in folders:
            run = read_run(folder)
            (runs if isinstance(run, StoredRun) else problems).append(run)
    return _joined(runs), problems


def _joined(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Put together what several nodes hosted of one run: same study, method and seed, and no client twice."""
    out: list[StoredRun] = []
    for run in runs:
        key, ids = (run.study, run.label, run.seed), set(run.clients.index)
        for place, other in enumerate(out):
            if (other.study, other.label, other.seed) == key and ids.isdisjoint(other.clients.index):
                out[place] = _join(other, run)
                break
        else:
            out.append(run)
    return out


def _join(a: StoredRun, b: StoredRun) -> StoredRun:
    times = [run.provenance.get("timing") or {} for run in (a, b)]
    timing = {name: sum(time.get(name, 0) for time in times) for name in ("train_s", "train_samples")}
    timing["wall_s"] = max(time.get("wall_s", 0.0) for time in times)
    done = all(run.provenance.get("done") for run in (a, b))
    return replace(
        a,
        provenance={**a.provenance, "done": done, "timing": timing},
        metrics=pd.concat([a.metrics, b.metrics], ignore_index=True),
        edges=pd.concat([run.edges for run in (a, b) if len(run.edges)] or [a.edges], ignore_index=True),
    )


def _run_folders(path: Path) -> list[Path]:
    if (path / METRICS).is_file() or ((path / CONFIG).is_file() and path.name.startswith("seed-")):
        return [path]
    marks = [*path.rglob(METRICS), *path.rglob(f"seed-*/{CONFIG}")]
    folders = {mark.parent for mark in marks}
    places = {study: _places(study) for study in {folder.parent.parent for folder in folders}}

    def order(folder: Path) -> tuple[str, int, str, int]:
        study, label, number = folder.parent.parent, folder.parent.name, folder.name.removeprefix("seed-")
        place = places[study].get(label, len(places[study]))
        return str(study), place, label, int(number) if number.isdigit() else -1

    return sorted(folders, key=order)


def _places(study: Path) -> dict[str, int]:
    """The place of each method in the study's own configuration; nothing where there is none."""
    try:
        methods = tomllib.loads((study / CONFIG).read_text("utf-8")).get("methods", [])
    except (OSError, ValueError):
        return {}
    return {str(method.get("label", method.get("kind"))): place for place, method in enumerate(methods)}


def read_run(folder: Path) -> StoredRun | Problem:
    """Read one run folder, or say in one line what is missing or damaged."""
    missing = [name for name in (CONFIG, METRICS) if not (folder / name).is_file()]
    if missing:
        return Problem(folder, f"{missing[0]} is not there (yet)")
    for name in (CONFIG, METRICS, EDGES, PROVENANCE):
        if fault := manifest.fault(folder, name):
            return Problem(folder, fault)
    try:
        config = tomllib.loads((folder / CONFIG).read_text("utf-8"))
        provenance = json.loads((folder / PROVENANCE).read_text("utf-8")) if (folder / PROVENANCE).is_file() else {}
        measured = pq.ParquetFile(folder / METRICS).read().to_pandas()
        edges = pd.DataFrame(columns=EDGE_COLUMNS)
        if (folder / EDGES).is_file():
            edges = pq.ParquetFile(folder / EDGES).read().to_pandas()
        metrics.REGISTRY.with_stored(provenance.get("metrics") or {})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return Problem(folder, f"a file is damaged: {str(error).splitlines()[0]}")
    for name, table, columns in ((METRICS, measured, METRIC_COLUMNS), (EDGES, edges, EDGE_COLUMNS)):
        lacking = [column for column in columns if column not in table.columns]
        if lacking:
            return Problem(folder, f"{name} has no column {lacking[0]!r}; it is not the table of a run")
    if not len(measured):
        return Problem(folder, f"{METRICS} is empty: no round has ended yet")
    return StoredRun(folder, config, provenance, measured, edges)


def main_metric(runs: Sequence[StoredRun]) -> str:
    """The metric by which methods are compared: accuracy where there is one, else the loss.

    Validation data have no squared error, so regression is compared by its loss.
    """
    names = {str(name) for run in runs for name in run.metrics["metric"].unique()} - {metrics.MSE.name}
    return metrics.REGISTRY.main([*sorted(names), metrics.LOSS.name])


def metrics_of(runs: Iterable[StoredRun]) -> Metrics:
    """The metrics that are built in, and those that the methods of some runs declared."""
    return Metrics({name: one for run in runs for name, one in run.known.items()})


def description(folder: str | Path) -> dict[str, Any]:
    """Return what federation.json in a study's folder tells of the data; nothing where there never was one.

    Raises:
        DataError: when it is missing or damaged.
    """
    folder = Path(folder)
    if (fault := manifest.fault(folder, FEDERATION)) and (folder / manifest.FILE).exists():
        raise DataError(f"{folder}: {fault}; `coterie resume {folder}` writes it again")
    path = folder / FEDERATION
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def cluster_names(folder: str | Path, clusters: Iterable[int]) -> dict[int, str]:
    """The name of each planted cluster: from the study's federation.json where there is one, else its number."""
    known = description(folder).get("clusters", [])
    return {c: str(known[c]) if 0 <= c < len(known) else str(c) for c in sorted(set(clusters))}


def summarize(study: str | Path) -> dict[str, Any]:
    """Reduce the finished runs of a study to the content of summary.json.

    Args:
        study: the study's folder.

    Returns:
        `study`, `rows` and `timing`. A row is the final test value of one metric of one method: the mean over the
        clients of one planted cluster, over all clients ("all"), or the unweighted mean over clusters ("clusters");
        then mean and population standard deviation over the seeds. `participation`, `time_to_accuracy` and `undefined`
        are those of the functions below. `metrics` is there when methods declared some, and `scale` when the rounds
        were scaled.

    Raises:
        DataError: when the folder holds no run.
    """
    runs, _ = find_runs([study])
    return summary_of(runs, study)


def summary_of(runs: Sequence[StoredRun], study: str | Path) -> dict[str, Any]:
    """As `summarize`, of runs that were read already."""
    names = cluster_names(study, (int(c) for run in runs for c in run.clients.unique() if c >= 0))
    rows: list[dict[str, Any]] = []
    for label, group in by_label(runs).items():
        done = [run for run in group if run.finished]
        for metric in dict.fromkeys(name for run in done for name in run.results):
            reduced = pd.DataFrame([cluster_means(run, metric) for run in done])
            for cluster in reduced.columns:
                values = reduced[cluster].to_numpy(float)
                rows.append(
                    {
                        "method": group[0].kind,
                        "label": label,
                        "cluster": names.get(cluster, str(cluster)),
                        "metric": metric,
                        "mean": float(values.mean()),
                        "std": float(values.std()),
                        "seeds": len(values),
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
    content: dict[str, Any] = {"study": runs[0].study if runs else Path(study).name, "rows": rows, "timing": timing}
    finished = [run for run in runs if run.finished]
    content |= {one.__name__: one(finished) for one in (participation, time_to_accuracy, undefined)}
    if declared := metrics.stored(metrics_of(runs).values()):
        content["metrics"] = declared
    scales = {float(run.config.get("scale", 1.0)) for run in runs} - {1.0}
    return {**content, "scale": min(scales)} if scales else content


def cluster_means(run: StoredRun, metric: str) -> dict[int | str, float]:
    """The final test value of a run: per planted cluster, over all clients, and over clusters."""
    values, cluster = run.final(metric), run.clients
    planted = cluster.reindex(values.index).to_numpy()
    out: dict[int | str, float] = {
        int(c): float(values.to_numpy()[planted == c].mean()) for c in np.unique(planted) if c >= 0
    }
    over = float(np.mean(list(out.values()))) if out else None
    out["all"] = float(values.mean(skipna=False))
    if over is not None:
        out["clusters"] = over
    return out


def by_label(runs: Iterable[StoredRun]) -> dict[str, list[StoredRun]]:
    """The runs of each method, by label, in the order in which they were found."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def gains(study: str | Path) -> dict[str, Any]:
    """What collaboration was worth to each client: the gain over training alone.

    The gain of a client is the final test value of its model minus that of the same client under the study's method
    of kind "local" with the same seed, turned round for a loss, so that above zero is always better.

    Args:
        study: the study's folder.

    Returns:
        `baseline` (the label, or None when the study has no such method: then there are no rows), `metric`,
        `confidence`, and a row for each other method: `label`, `seeds` (how many pairs), and for each of `mean`
        (over clients), `worst_tenth` (mean over the tenth of the clients that gained least, at least one client) and
        `lost` (share of clients with a gain below zero) the mean over the seeds with the ends of Student's interval,
        `<name>_low` and `<name>_high`; None with a single seed.

    Raises:
        DataError: when the folder holds no run.
    """
    runs, _ = find_runs([study])
    return gains_of(runs)


def gains_of(runs: Sequence[StoredRun]) -> dict[str, Any]:
    """As `gains`, of runs that were read already."""
    done = [run for run in runs if run.finished]
    metric = main_metric(runs)
    baseline = next((run.label for run in runs if run.kind == "local"), None)
    out: dict[str, Any] = {"baseline": baseline, "metric": metric, "confidence": CONFIDENCE, "rows": []}
    for label, per_seed in client_gains(done, baseline, metric).items():
        reduced = [_reduce_gains(values.to_numpy()) for values in per_seed.values()]
        row: dict[str, Any] = {"label": label, "seeds": len(reduced)}
        for name in ("mean", "worst_tenth", "lost"):
            row |= interval(name, np.array([one[name] for one in reduced]))
        out["rows"].append(row)
    return out


def client_gains(runs: Sequence[StoredRun], baseline: str | None, metric: str) -> dict[str, dict[int, pd.Series]]:
    """The gain of each client over the baseline, by label and seed; only seeds that both have."""
    sign = metrics_of(runs)[metric].sign or 1
    alone = {run.seed: run.final(metric) for run in runs if run.label == baseline}
    found: dict[str, dict[int, pd.Series]] = {}
    for run in runs:
        if run.label != baseline and run.seed in alone:
            found.setdefault(run.label, {})[run.seed] = sign * (run.final(metric) - alone[run.seed])
    return found


def _reduce_gains(values: np.ndarray) -> dict[str, float]:
    tenth = np.sort(values)[: math.ceil(len(values) / 10)]
    return {"mean": float(values.mean()), "worst_tenth": float(tenth.mean()), "lost": float((values < 0).mean())}


def interval(name: str, values: np.ndarray) -> dict[str, float | None]:
    """Mean over seeds, with the ends of Student's confidence interval (None with fewer than two seeds)."""
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return {name: mean, f"{name}_low": None, f"{name}_high": None}
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * values.std(ddof=1) / math.sqrt(count))
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


def json_ready(value: Any) -> Any:
    """Replace what JSON cannot say (NaN and infinity) by None, at any depth."""
    if isinstance(value, dict):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_summary(study: str | Path) -> Path:
    """Write summary.json into a study's folder, and return its path."""
    folder = Path(study)
    text = json.dumps(json_ready(summarize(study)), indent=1, ensure_ascii=False)
    with claimed(folder, wait=STUDY_WAIT):
        manifest.replace_files(folder, {SUMMARY: text.encode()})
    return folder / SUMMARY


TIMED = (metrics.ACCURACY.name, metrics.GLOBAL_ACCURACY.name)


def declared(run: "StoredRun", name: str) -> Any:
    """Return what the class of a run's method declares, as the run noted it: `server` or `timed_against`."""
    return run.provenance.get(name, getattr(METHODS.get(run.kind, Method), name))


def client_rounds(table: pd.DataFrame) -> int:
    """Return the total participation: how many local trainings there were in all rounds, over all clients.

    Args:
        table: the metrics table of a run.
    """
    trained = (table["split"] == "train") & (table["metric"] == metrics.LOSS.name) & (table["round"] >= 0)
    return int(trained.to_numpy().sum())


def curve(table: pd.DataFrame, metric: str) -> tuple[list[int], list[float]]:
    """Return the evaluated rounds, and the mean over clients of a test metric of the newest models in each.

    Args:
        table: the metrics table of a run.
        metric: such as "accuracy".
    """
    wanted = (table["split"] == "test") & (table["model"] == "current") & (table["metric"] == metric)
    means = table.loc[wanted.to_numpy()].groupby("round")["value"].mean()
    return [int(index) for index in means.index], [float(value) for value in means.to_numpy()]


def participation(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return the total participation of each run: `label`, `seed`, `client_rounds`."""
    return [{"label": run.label, "seed": run.seed, "client_rounds": client_rounds(run.metrics)} for run in runs]


def time_to_accuracy(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    r"""Return how much sooner each method reaches the largest accuracy of a baseline than the baseline did.

    The baseline is what the method declares (`Method.timed_against`): Ditto for SosicFL+, FedAvg for most others. Both
    need evaluations over the rounds (`eval_every`).

    Args:
        runs: finished runs of one study.

    Returns:
        A row for each method and metric ("accuracy" over the clients' own test sets, "global_accuracy"): `label`,
        `base`, `metric`, `ratio` (the baseline's time over the method's, mean over seeds; 0 in a seed in which the
        method never gets there), `std`, `seeds`, `reached` (in how many of them it got there), `tta` (the method's
        first round with that accuracy, mean over the seeds in which it got there) and `reason` (why the ratio is NaN).
    """
    bases: dict[tuple[str, int], StoredRun] = {(run.kind, run.seed): run for run in runs}
    found: dict[tuple[str, str, str], list[tuple[float, float, str]]] = {}
    for run in runs:
        base = bases.get((declared(run, "timed_against"), run.seed))
        for metric in TIMED if base is not None and base.label != run.label else ():
            own, theirs = curve(run.metrics, metric), curve(base.metrics, metric)  # type: ignore[union-attr]
            if own[0] and theirs[0]:
                entry = _ratio(own, theirs)
                found.setdefault((run.label, base.label, metric), []).append(entry)  # type: ignore[union-attr]
    rows = []
    for (label, name, metric), entries in found.items():
        ratios = np.array([ratio for ratio, _, _ in entries])
        times = [time for _, time, _ in entries if math.isfinite(time)]
        row = {
            "label": label,
            "base": name,
            "metric": metric,
            "ratio": float(ratios.mean()),
            "std": float(ratios.std()),
        }
        more = {"seeds": len(entries), "reached": len(times), "tta": float(np.mean(times)) if times else math.inf}
        rows.append({**row, **more, "reason": next((reason for _, _, reason in entries if reason), "")})
    return rows


def _ratio(own: tuple[list[int], list[float]], base: tuple[list[int], list[float]]) -> tuple[float, float, str]:
    """The ratio of one seed, the method's time, and why there is no ratio."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", metrics.Undefined)
        ratio = metrics.tta_ratio(*own, *base)
        time = metrics.time_to_accuracy(*own, metrics.acc_max(base[1]))
    return ratio, time, str(said[0].message) if said and math.isnan(ratio) else ""


def undefined(runs: Sequence["StoredRun"]) -> list[dict[str, Any]]:
    """Return why final metrics are NaN: `label`, `metric` and `reason`, each once."""
    rows = []
    for run in runs:
        for metric, reason in (run.provenance.get("undefined") or {}).items():
            row = {"label": run.label, "metric": metric, "reason": reason}
            if row not in rows:
                rows.append(row)
    return rows
