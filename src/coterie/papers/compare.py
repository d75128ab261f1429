"""Compare stored studies with each other, with the published numbers, and at equal bytes.

Only stored files are read: summary.json and config.toml, and for equal bytes the tables of the runs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import ConfigError, DataError
from coterie.functional import metrics
from coterie.functional.metrics import REGISTRY, Metrics
from coterie.papers import numbers
from coterie.papers.numbers import PublishedNumber
from coterie.results import summary
from coterie.results.summary import StoredRun
from coterie.results.traffic import traffic
from coterie.studies import config
from coterie.studies.config import StudyConfig

POINT = 0.01
"""The smallest difference of accuracies that counts."""

ROLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("oracle", ("oracle",)),
    (
        "best adaptive method",
        ("inv_loss", "inv_l2", "cos_grad", "cos_weight", "dac", "dac_var", "dac_no_two_hop", "panm_loss", "panm_grad"),
    ),
    ("random", ("random",)),
    ("local", ("local",)),
)
"""The chain of the papers: the oracle, the best of the methods that look for peers, random gossip, no exchange."""


@dataclass(frozen=True)
class Result:
    """The results of a study.

    Args:
        folder: its folder.
        study: the study.
        rows: the rows of its summary.
        known: the metrics that are built in, and those that its methods declared.
    """

    folder: Path
    study: StudyConfig
    rows: Sequence[Mapping[str, Any]]
    known: Metrics = field(default_factory=lambda: REGISTRY)

    @property
    def experiment(self) -> str | None:
        """The published experiment that it repeats."""
        return self.study.paper or numbers.EXPERIMENTS.get(self.study.name)

    @property
    def metric(self) -> str:
        """By which metric methods are compared."""
        return self.known.main(str(row["metric"]) for row in self.rows)

    def value(self, label: str, cluster: str, metric: str) -> Mapping[str, Any] | None:
        """Return a row of the summary; None when there is none."""
        wanted = (label, cluster, metric)
        return next((r for r in self.rows if (r["label"], r["cluster"], r["metric"]) == wanted), None)


@dataclass(frozen=True)
class Line:
    """One number compared with the published one.

    Args:
        label: the method here.
        row: the published row.
        cluster: "all" for the mean over clients, "clusters" for the mean over clusters.
        metric: its name; accuracies are from 0 to 1.
        ours: mean over seeds.
        std: population standard deviation over seeds.
        seeds: number of seeds.
        paper: the published mean.
        paper_std: its deviation; None when not given.
        difference: ours - paper.
        within: whether the difference is within the rule; see `allowed`.
    """

    label: str
    row: str
    cluster: str
    metric: str
    ours: float
    std: float
    seeds: int
    paper: float
    paper_std: float | None
    difference: float
    within: bool


@dataclass(frozen=True)
class Ordering:
    """Two rows of which the paper's numbers put one before the other.

    Args:
        better: a role of ROLES, or a published row.
        worse: likewise.
        paper: the two published numbers.
        ours: the two numbers here.
        kept: whether the order here is the same.
    """

    better: str
    worse: str
    paper: tuple[float, float]
    ours: tuple[float, float]
    kept: bool


@dataclass(frozen=True)
class Comparison:
    """A study beside the published numbers.

    Args:
        study: its name.
        experiment: the published one.
        reference: the paper.
        scale: factor on the rounds that was used.
        lines: number by number.
        chain: the orderings of ROLES that the paper shows.
        pairs: pairs of rows that are further apart in the paper than the rule allows.
        notes: notes on the published numbers.
    """

    study: str
    experiment: str
    reference: str
    scale: float
    lines: Sequence[Line]
    chain: Sequence[Ordering]
    pairs: Sequence[Ordering]
    notes: Sequence[str]


def read(folder: str | Path) -> Result:
    """Read a study from its folder (or that of one of its runs).

    Raises:
        DataError: when no study is there, or it has no finished run.
    """
    path = Path(folder)
    if path.name.startswith("seed-"):
        path = path.parent.parent
    if not (path / summary.CONFIG).is_file():
        raise DataError(f"{folder} holds no study: no {summary.CONFIG}; give a folder that `coterie run` made")
    stored = path / "summary.json"
    content = json.loads(stored.read_text("utf-8")) if stored.is_file() else summary.summarize(path)
    if not content["rows"]:
        raise DataError(f"{folder} has no finished run; `coterie resume {folder}` goes on with it")
    study = config.loads((path / summary.CONFIG).read_text("utf-8"), str(path / summary.CONFIG), to_run=False)
    return Result(path, study, content["rows"], REGISTRY.with_stored(content.get("metrics") or {}))


def ranked(lines: Sequence[Line]) -> str | None:
    """Return the metric by which the methods of a paper are put into order; None when it prints no such number."""
    printed = {line.metric for line in lines}
    return next((one.name for one in metrics.MAIN if one.name in printed), None)


def allowed(metric: str, std: float, paper_std: float | None) -> float:
    """Return the allowed difference of two means: twice its standard deviation, at least one point of accuracy.

    Example:
        >>> round(allowed("accuracy", 0.006, 0.008), 3), allowed("accuracy", 0.0, None), allowed("mse", 3.0, 4.0)
        (0.02, 0.01, 10.0)
    """
    spread = 2 * math.hypot(std, paper_std or 0.0)
    return max(spread, POINT) if REGISTRY[metric].unit == "%" else spread


def with_paper(result: Result) -> Comparison:
    """Compare a study with the published numbers.

    Raises:
        ConfigError: when it repeats no published experiment.
    """
    experiment = result.experiment
    if experiment is None:
        raise ConfigError(
            f"the study {result.study.name!r} names no published experiment; expected `paper` in its file, one of: "
            f"{', '.join(sorted(numbers.EXPERIMENTS.values()))}"
        )
    published = numbers.published(experiment)
    by_row: dict[str, list[PublishedNumber]] = {}
    for one in published:
        by_row.setdefault(one.row, []).append(one)
    found = [
        _line(result, entry.label, one) for entry in result.study.methods for one in by_row.get(entry.paper or "", [])
    ]
    lines = [line for line in found if line is not None]
    chain, pairs = _orderings(lines)
    reference = numbers.SOURCES[experiment.partition("/")[0]]
    notes = numbers.notes(experiment)
    return Comparison(result.study.name, experiment, reference, result.study.scale, lines, chain, pairs, notes)


def _line(result: Result, label: str, one: PublishedNumber) -> Line | None:
    """Set one published number beside ours; None when we have none."""
    if one.metric == metrics.STD_OVER_CLUSTERS.name:
        means = _cluster_means(result, label)
        if not means:
            return None
        mean, std, seeds = float(np.std(means)), 0.0, 0
    else:
        row = result.value(label, one.cluster, one.metric)
        if row is None or row["mean"] is None:
            return None
        mean, std, seeds = float(row["mean"]), float(row["std"]), int(row["seeds"])
    difference = mean - one.mean
    within = abs(difference) <= allowed(one.metric, std, one.std)
    return Line(
        label, one.row, one.cluster, one.metric, mean, std, seeds, one.mean, one.std, difference, within
    )  # fmt: skip


def _cluster_means(result: Result, label: str) -> list[float]:
    planted = [r for r in result.rows if r["cluster"] not in ("all", "clusters")]
    return [float(r["mean"]) for r in planted if r["label"] == label and r["metric"] == metrics.ACCURACY.name]


def _orderings(lines: Sequence[Line]) -> tuple[list[Ordering], list[Ordering]]:
    """Return the chain of roles and the clear pairs, of the means over clients (or else over clusters)."""
    where = "all" if any(line.cluster == "all" for line in lines) else "clusters"
    metric = ranked(lines)
    means: dict[str, Line] = {}
    for line in lines:
        if line.cluster == where and line.metric == metric:
            means.setdefault(line.row, line)
    if not means:
        return [], []
    sign = REGISTRY[str(metric)].sign
    chain = []
    roles = [(name, _best(means, members, sign)) for name, members in ROLES]
    there = [(name, best) for name, best in roles if best is not None]
    for (better, a), (worse, b) in pairwise(there):
        if sign * (a[0] - b[0]) >= 0:
            chain.append(Ordering(better, worse, (a[0], b[0]), (a[1], b[1]), sign * (a[1] - b[1]) >= 0))
    pairs = []
    for first, a in means.items():
        for second, b in means.items():
            apart = sign * (a.paper - b.paper)
            if apart > allowed(a.metric, a.paper_std or 0.0, b.paper_std):
                ours = (a.ours, b.ours)
                pairs.append(Ordering(first, second, (a.paper, b.paper), ours, sign * (ours[0] - ours[1]) > 0))
    return chain, pairs


def _best(means: Mapping[str, Line], methods: Sequence[str], sign: int) -> tuple[float, float] | None:
    """Return the best published and the best of our numbers of some methods."""
    lines = [line for row, line in means.items() if row.partition("/")[0] in methods]
    if not lines:
        return None
    return sign * max(sign * line.paper for line in lines), sign * max(sign * line.ours for line in lines)


@dataclass(frozen=True)
class AtBytes:
    """A method at the point where every method has used the same number of bytes.

    Args:
        label: the method.
        rounds: its rounds by then.
        used: bytes of a client, received and sent to a server, mean over clients and seeds.
        value: the metric then, mean over clients and seeds.
    """

    label: str
    rounds: float
    used: float
    value: float


@dataclass(frozen=True)
class EqualBytes:
    """A ranking at equal bytes.

    Args:
        study: its name.
        metric: accuracy or loss.
        split: "test" where that was measured during the runs (`eval_every`), else "validation".
        budget: bytes per client: the total of the communicating method that uses the fewest.
        rows: best first.
    """

    study: str
    metric: str
    split: str
    budget: float
    rows: Sequence[AtBytes]


def at_equal_bytes(folder: str | Path) -> EqualBytes:
    """Rank the methods of a stored study when each of their clients has used the same number of bytes.

    Bytes are those of all messages received and of those sent to a server (messages sent to peers are counted as
    received by them). The model of a client is its best so far by validation loss, or with `eval_every` its current
    one on the test set.

    Raises:
        DataError: when there is no run.
    """
    runs, _ = summary.find_runs([folder])
    metric = summary.main_metric(runs)
    split = "test" if all(_rounds_measured(run, metric) > 1 for run in runs) else "validation"
    totals = {label: [bytes_per_client(run)[-1] for run in group] for label, group in summary.by_label(runs).items()}
    spent = [float(np.mean(values)) for values in totals.values() if np.mean(values) > 0]
    budget = min(spent, default=0.0)
    rows = []
    for label, group in summary.by_label(runs).items():
        points = [_at(run, metric, split, budget) for run in group]
        rounds, used, value = (float(np.mean(part)) for part in zip(*points, strict=True))
        rows.append(AtBytes(label, rounds, used, value))
    rows.sort(key=lambda row: -REGISTRY[metric].sign * row.value)
    return EqualBytes(runs[0].study, metric, split, budget, rows)


def bytes_per_client(run: StoredRun) -> np.ndarray:
    """Return the bytes of a client after each round from the first: received, and sent to a server.

    They are means over clients, cumulated over rounds.
    """
    rounds, clients = max(1, run.rounds), len(run.clients)
    received, sent = traffic(run.metrics, run.edges, rounds)
    return np.cumsum(received + sent) / clients


def _rounds_measured(run: StoredRun, metric: str) -> int:
    rows = run.metrics
    tests = ((rows["split"] == "test") & (rows["metric"] == metric) & (rows["model"] == "current")).to_numpy()
    return int(rows.loc[tests, "round"].nunique())


def _at(run: StoredRun, metric: str, split: str, budget: float) -> tuple[float, float, float]:
    """Return rounds, bytes and metric of a run at a budget; all of it where it stays below."""
    cumulated = bytes_per_client(run)
    last = int(np.searchsorted(cumulated, budget * (1 + 1e-9), side="right")) - 1
    used = float(cumulated[last]) if last >= 0 else 0.0
    rows = run.metrics
    keep = ((rows["split"] == split) & (rows["model"] == "current") & (rows["round"] <= last)).to_numpy()
    table = rows.loc[keep]
    wanted = table.loc[(table["metric"] == metric).to_numpy()].pivot(index="round", columns="client", values="value")
    if split == "test":
        return last + 1, used, float(wanted.iloc[-1].mean())
    loss = table.loc[(table["metric"] == metrics.LOSS.name).to_numpy()].pivot(
        index="round", columns="client", values="value"
    )
    best = loss.ffill().fillna(np.inf).to_numpy().argmin(0)
    values = wanted.ffill().to_numpy()[best, np.arange(len(best))]
    return last + 1, used, float(np.nanmean(values))


def as_json(value: Comparison | EqualBytes | Result) -> dict[str, Any]:
    """Return plain values, for JSON."""
    if isinstance(value, Result):
        return summary.json_ready({"study": value.study.name, "rows": list(value.rows)})
    return summary.json_ready(asdict(value))
