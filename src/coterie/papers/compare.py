"""Compare stored studies with each other, and with the published numbers.

Only stored files are read: config.toml and the tables of the runs; summary.json where the runs are
not there.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, combinations, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from coterie.errors import ConfigError, DataError, describe_unknown
from coterie.functional import metrics
from coterie.functional.metrics import REGISTRY, Metric, Metrics
from coterie.methods.cost import CostSetting
from coterie.papers import numbers
from coterie.papers.numbers import PublishedNumber
from coterie.results import conditions, coverage, pairs, stored_runs, summary
from coterie.results.across import CrossComparison, compare_across, correct_together
from coterie.results.coverage import find_common_seeds, format_seed_ranges
from coterie.results.equal_budget import EqualBudget
from coterie.results.pairs import Pair
from coterie.results.varied import VariedResults
from coterie.studies import config
from coterie.studies.builtin_studies import find_builtin_studies
from coterie.studies.config import StudyConfig
from coterie.studies.sweep import SUMMARY, expand_sweep, join_summaries, load_sweep_results

TRIALS_UNKNOWN = (
    "How many settings were tried in tuning each method is not known; --tuned FILE compares that."
)
MIN_ACCURACY_GAP = 0.01
"""The smallest difference of accuracies that counts."""
TIME_RATIOS = {"tta_ratio": metrics.ACCURACY.name, "global_tta_ratio": metrics.GLOBAL_ACCURACY.name}
"""Published ratios of the times to the baseline's accuracy, and by which metric."""
Verdict = Literal["paper", "point", "ours", "outside", "undecided"]
VERDICTS: Mapping[Verdict, str] = MappingProxyType(
    {
        "paper": "within by the paper's own deviation",
        "point": "within one point, or equal",
        "ours": "within by ours alone",
        "outside": "outside",
        "undecided": "undecided",
    }
)
"""Verdicts on a number, in words. Equal is what the paper prints, where no point is allowed."""
SIGNED_METRICS = (metrics.WAS.name,)
"""Metrics that may be negative, for which zero is no end of the scale."""


@dataclass(frozen=True)
class StudyResult:
    """The results of a study.

    Args:
        folder: its folder.
        study: the study.
        rows: the rows of its summary.
        known: the metrics that are built in, and the declared ones of its methods.
        seeds: the seeds that the rows are means over; None where a stored summary lacks them.
        left_out: how each run stands that is not among them.
        archived: whether the runs are not there, and all is as summary.json has it.
        pairs: of its methods; none of a sweep over data or models, whose points are studies of
            their own, or of a summary that was stored before there were any.
        about: what the intervals of these speak of; empty where it is not known.
        spent: what each method spent; see `summary.compute_spending`.
        times: how much sooner each method reached its baseline's accuracy; see
            `summary.compute_time_to_accuracy`.
        undefined: why clients have no value of a metric; see `summary.list_undefined_metrics`.
    """

    folder: Path
    study: StudyConfig
    rows: Sequence[Mapping[str, Any]]
    known: Metrics = field(default_factory=lambda: REGISTRY)
    seeds: Sequence[int] | None = None
    left_out: Sequence[Mapping[str, Any]] = ()
    archived: bool = False
    pairs: Sequence[Pair] = ()
    about: str = ""
    spent: Sequence[Mapping[str, Any]] = ()
    times: Sequence[Mapping[str, Any]] = ()
    undefined: Sequence[Mapping[str, Any]] = ()

    @property
    def experiment(self) -> str | None:
        """The published experiment that it repeats."""
        return self.study.paper or numbers.EXPERIMENTS.get(self.study.name)

    @property
    def main_metric(self) -> str:
        """By which metric methods are compared."""
        return self.known.choose_main(str(row["metric"]) for row in self.rows)

    @property
    def method_labels(self) -> list[str]:
        """Its methods, and those of the points of a sweep."""
        there = dict.fromkeys(str(row["label"]) for row in self.rows)
        own = [] if self.study.sweep else [entry.label for entry in self.study.methods]
        return list(dict.fromkeys([*own, *there]))

    def describe_gaps(self) -> list[str]:
        """Return what must be known with its numbers: which runs are not in them."""
        content = {"rows": self.rows, "seeds": self.seeds, "left_out": self.left_out}
        said = []
        if self.archived:
            said.append("No run is there: the numbers are from summary.json.")
        # Without the runs, seeds can only be counted from the rows of the summary.
        if self.archived and self.seeds is None and not self.study.sweep:
            wanted = len(self.study.seeds)
            for label in self.method_labels:
                count = max((int(r["seeds"]) for r in self.rows if r["label"] == label), default=0)
                if count < wanted:
                    said.append(f"{label}: {count} of {wanted} seeds.")
        return [*said, *coverage.describe_coverage(content)]

    def find_row(self, label: str, cluster: str, metric: str) -> Mapping[str, Any] | None:
        """Return a row of the summary; None when there is none."""
        wanted = (label, cluster, metric)
        return next(
            (r for r in self.rows if (r["label"], r["cluster"], r["metric"]) == wanted), None
        )


@dataclass(frozen=True)
class ComparedNumber:
    """One number compared with the published one.

    Args:
        label: the method here.
        row: the published row.
        cluster: "all" for the mean over clients, "clusters" for the mean over clusters.
        metric: its name; accuracies are from 0 to 1.
        ours: mean over seeds.
        std: population standard deviation over seeds; None for a single seed.
        seeds: number of seeds.
        paper: the published mean.
        paper_std: its deviation; None when not given.
        difference: ours - paper.
        within: whether the difference is within the rule, see `allowed_difference`; None where the
            published deviation is so large that nothing can be said, see `is_too_uncertain`.
        verdict: by what it is within, or not: one of `VERDICTS`. What needs no deviation of ours
            comes first: a wide one makes any number pass.
        pooled: what stood for the deviation that the paper does not print: ours, pooled; see
            `compare_with_paper`.
        chosen: whether the row was chosen here (tuned, say) and is compared with a published row
            that the study repeats already.
        predicted: whether ours is no result but what the cost ledger predicts; see `predict_costs`.
    """

    label: str
    row: str
    cluster: str
    metric: str
    ours: float
    std: float | None
    seeds: int
    paper: float
    paper_std: float | None
    difference: float
    within: bool | None
    verdict: Verdict = "undecided"
    pooled: float | None = None
    chosen: bool = False
    predicted: bool = False


@dataclass(frozen=True)
class Ordering:
    """Two rows of which the paper's numbers put one before the other.

    Args:
        better: a role of `numbers.ROLES`, or a published row.
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
class PaperComparison:
    """A study compared with the published numbers.

    Args:
        study: its name.
        experiment: the published one.
        reference: the paper.
        scale: factor on the rounds that was used.
        lines: number by number.
        chain: the orderings of `numbers.ROLES` that the paper shows.
        pairs: pairs of rows that are further apart in the paper than the rule allows.
        notes: notes on the published numbers.
        seeds: the seeds that our means are over; None where a stored summary lacks them.
        left_out: how each run stands that is not among them.
        missing: which runs are not in the numbers, in words.
    """

    study: str
    experiment: str
    reference: str
    scale: float
    lines: Sequence[ComparedNumber]
    chain: Sequence[Ordering]
    pairs: Sequence[Ordering]
    notes: Sequence[str]
    seeds: Sequence[int] | None = None
    left_out: Sequence[Mapping[str, Any]] = ()
    missing: Sequence[str] = ()

    @property
    def source(self) -> str:
        """The paper, a name of `numbers.SOURCES`."""
        return self.experiment.partition("/")[0]


def load_result(folder: str | Path) -> StudyResult:
    """Read a study, or a sweep, from its folder (or that of one of its runs).

    The runs are read, since summary.json may be older than they are; where none is there,
    summary.json.

    Raises:
        DataError: when no study is there, or it has no finished run.
    """
    path = Path(folder)
    # A run's folder is <study>/<method>/seed-<n>.
    if path.name.startswith("seed-"):
        path = path.parent.parent
    if not (path / stored_runs.CONFIG).is_file():
        raise DataError(
            f"{folder} holds no study: no {stored_runs.CONFIG}; give a folder that `coterie run` "
            "made"
        )
    # Reading results must neither need nor run the modules of own methods.
    study = config.parse_study_text(
        stored_runs.load_study_text(path, stored_runs.CONFIG),
        str(path / stored_runs.CONFIG),
        to_run=False,
    )
    # The runs win over summary.json, which may be older than they are.
    archived = not stored_runs.has_runs(path) and (path / SUMMARY).is_file()
    if archived:
        content = json.loads(stored_runs.load_study_text(path, SUMMARY))
    elif study.sweep:
        content = join_summaries(load_sweep_results(path))
    else:
        content = summary.summarize_study(path)
    result = _make_result(path, study, content, archived=archived)
    if not result.rows:
        # The notes become one sentence of the error.
        said = "; ".join(note.removesuffix(".") for note in result.describe_gaps())
        why = f" ({said})" if said else ""
        raise DataError(
            f"{folder} has no finished run to compare{why}; `coterie resume {folder}` goes on "
            "with it"
        )
    return result


def _make_result(
    path: Path, study: StudyConfig, content: Mapping[str, Any], *, archived: bool
) -> StudyResult:
    known = REGISTRY.add_stored(content.get("metrics") or {})
    found = pairs.parse_pairs(summary.replace_nonfinite(dict(content)))
    about = str(content.get("about", ""))
    return StudyResult(
        path,
        study,
        content["rows"],
        known,
        content.get("seeds"),
        content.get("left_out", ()),
        archived,
        found,
        about,
        content.get("spent", ()),
        content.get("time_to_accuracy", ()),
        content.get("undefined", ()),
    )


def restrict_to_common_seeds(results: Sequence[StudyResult]) -> tuple[list[StudyResult], list[str]]:
    """Return studies averaged over their common seeds, and what must be known with their numbers.

    Where they have none in common, or a summary without its runs has other seeds, each keeps its
    own, and that is said.
    """
    notes: list[str] = []
    ranges: dict[str, str] = {}
    known: dict[str, Sequence[int]] = {}
    for one in results:
        name = display_name(one, results)
        lead = f"{name}: " if len(results) > 1 else ""
        notes += [lead + note for note in one.describe_gaps()]
        ranges[name] = "unknown" if one.seeds is None else format_seed_ranges(one.seeds)
        known[name] = one.seeds or ()
    if len(set(ranges.values())) < 2:
        return list(results), notes
    own = "; ".join(f"{name} {seeds}" for name, seeds in ranges.items())
    shared = find_common_seeds(known)
    # Without its runs a study cannot be averaged over other seeds; a sweep joins the summaries of
    # its points.
    differ = [one for one in results if list(one.seeds or ()) != shared]
    fixed = any(one.archived or one.study.sweep for one in differ)
    # Then studies keep their own seeds, which the note lists.
    if not shared or fixed:
        return list(results), [*notes, f"Each study is averaged over seeds of its own: {own}."]
    out = list(results)
    for place, one in enumerate(results):
        if list(one.seeds or ()) != shared:
            content = summary.summarize_study(one.folder, shared)
            out[place] = _make_result(one.folder, one.study, content, archived=False)
    return out, [
        *notes,
        f"Means are over the seeds that all studies have: {format_seed_ranges(shared)}; they "
        f"have: {own}.",
    ]


@dataclass(frozen=True)
class PairComparison:
    """The methods of a study, compared in pairs.

    Args:
        result: the study; its pairs are widened where that was asked for.
        metric: by which they are compared.
        pairs: the requested pairs, corrected for their number.
        verdicts: what they establish, in words.
    """

    result: StudyResult
    metric: Metric
    pairs: Sequence[Pair]
    verdicts: Sequence[str]


def compare_in_pairs(
    results: Sequence[StudyResult],
    *,
    metric: str | None = None,
    baseline: str | None = None,
    cluster: str = "all",
    share: float = 0.0,
    tried: Mapping[str, int] | None = None,
) -> list[PairComparison]:
    """Compare the methods of each study in pairs.

    Args:
        results: the studies, as `restrict_to_common_seeds` returned them.
        metric: by which; by default by the study's main metric.
        baseline: with this method alone.
        cluster: over which clients: "all", "clusters", or the name of a planted cluster.
        share: see `results.pairs.widen_intervals`.
        tried: how many settings were tried for each method in tuning, where that is known.

    Raises:
        ConfigError: when no study has the metric, the method or the cluster, or no value of the
            metric is better.
    """
    rows = list(chain.from_iterable(one.rows for one in results))
    for kind, name, key in (
        ("metric", metric, "metric"),
        ("method", baseline, "label"),
        ("cluster", cluster, "cluster"),
    ):
        there = {str(row[key]) for row in rows}
        # Refused only when no study has it: studies may differ in methods and metrics.
        if name is not None and rows and name not in there:
            raise ConfigError(describe_unknown(kind, name, there))
    out = []
    for one in results:
        # All of its pairs: what is shown as the best follows from them too. Those of folds are
        # widened already, by what the folds say.
        widened = 0.0 if any(pair.overlap for pair in one.pairs) else share
        one = replace(one, pairs=pairs.widen_intervals(one.pairs, widened))
        entry = one.known[metric or one.main_metric]
        # A main metric always has a direction; a metric that was asked for may have none.
        if metric is not None and not entry.sign:
            raise ConfigError(
                f"of the metric {metric!r} neither higher nor lower is better; methods cannot be "
                "compared"
            )
        own = pairs.select_pairs(one.pairs, metric=entry.name, cluster=cluster, baseline=baseline)
        said = _describe_verdicts(one, entry, own, cluster, widened, display_name(one, results))
        paired = {pair.method_a for pair in own} | {pair.method_b for pair in own}
        labels = [label for label in one.method_labels if label in paired]
        line = conditions.describe_unequal_conditions(one.spent, labels, tried)
        # A winner may be the method that was tuned most: not knowing it is said.
        effort = TRIALS_UNKNOWN if own and tried is None else ""
        out.append(PairComparison(one, entry, own, [*said, *filter(None, (line, effort))]))
    return out


def compare_each_two(
    results: Sequence[StudyResult],
    *,
    metric: str | None = None,
    baseline: str | None = None,
    cluster: str = "all",
    share: float = 0.0,
) -> list[CrossComparison]:
    """Compare all pairs of studies, corrected for all of these pairs.

    See `results.across`. The arguments are those of `compare_in_pairs`.
    """
    found = []
    for a, b in combinations(results, 2):
        sides = []
        for one in (a, b):
            name = display_name(one, results)
            # Pairs need the values of each client, which a summary does not have.
            if one.archived:
                why = f"of {name} the summary alone is stored, without its runs."
            elif one.study.sweep and not one.pairs:
                why = f"{name} is a sweep; give the folder of one of its points."
            else:
                sides.append((name, stored_runs.load_runs([one.folder])[0]))
                continue
            two = display_name(a, results), display_name(b, results)
            note = f"{two[0]} and {two[1]} cannot be paired: {why}"
            found.append(CrossComparison(two, None, (), (note,)))
            break
        if len(sides) == 2:
            found.append(
                compare_across(
                    *sides, metric=metric, cluster=cluster, baseline=baseline, share=share
                )
            )
    return correct_together(found)


def _describe_verdicts(
    one: StudyResult, metric: Metric, own: Sequence[Pair], cluster: str, share: float, name: str
) -> list[str]:  # fmt: skip
    """What is established in a study, a line a pair, then what that speaks of."""
    if not own:
        # A single method has no pair; that needs no explanation.
        if len({row["label"] for row in one.rows if row["metric"] == metric.name}) < 2:
            return []
        if one.study.sweep and not one.pairs:
            points = (
                f"give the folder of one, such as {expand_sweep(one.study, to_run=False)[0].name}"
            )
            return [
                f"{name}: methods at different points of a sweep are not compared in pairs; "
                f"{points}."
            ]
        if said := pairs.describe_leaders(one.rows, one.pairs, metric, cluster):
            return [f"{name}: {said}"]
        if not one.pairs:
            return [
                f"{name}: its summary was stored without pairs, so nothing is said of what is "
                "established."
            ]
        return [
            f"{name}: pairs are compared by {one.main_metric} in each cluster, by other metrics "
            "over all clients."
        ]
    last = [
        pairs.describe_leaders(one.rows, one.pairs, metric, cluster),
        one.about if any(p.p is not None for p in own) else "",
    ]
    if share:
        last[1] = (
            "Seeds split the same samples: intervals are about new samples too, corrected for "
            "training data that "
            f"seeds share ({100 * share:g} % tested; Nadeau and Bengio, 2003)."
        )
    # A mean is over the clients that have a value, which need not be those of another method.
    # Of several seeds, the reason of the first says enough.
    reasons: dict[str, str] = {}
    for row in one.undefined:
        if row["metric"] == metric.name:
            reasons.setdefault(row["label"], f"{row['label']}: {row['reason']}.")
    last += reasons.values()
    return [*(pairs.describe_pair(pair, metric) for pair in own), *filter(None, last)]


def display_name(one: StudyResult, results: Sequence[StudyResult]) -> str:
    """The name of a study, or its folder where several have that name."""
    # It counts itself, too.
    namesakes = sum(one.study.name == other.study.name for other in results)
    return one.study.name if namesakes < 2 else str(one.folder)


def ranking_metric(lines: Sequence[ComparedNumber]) -> str | None:
    """Return the metric that orders a paper's methods; None when it prints no such number."""
    printed = {line.metric for line in lines}
    return next((one.name for one in metrics.MAIN if one.name in printed), None)


def allowed_difference(metric: str, std: float | None, paper_std: float | None) -> float:
    """Return the allowed difference of two means: twice its deviation, at least one point.

    The least difference of one point is for accuracies. A deviation that is not known counts as
    zero; `compare_with_paper` puts ours in the place of the paper's.

    Example:
        >>> round(allowed_difference("accuracy", 0.006, 0.008), 3)
        0.02
        >>> allowed_difference("accuracy", 0.0, None), allowed_difference("mse", 3.0, 4.0)
        (0.01, 10.0)
    """
    # Our mean and the paper's are independent: their variances add.
    # Twice: the usual bound of what chance explains.
    spread = 2 * math.hypot(std or 0.0, paper_std or 0.0)
    return max(spread, MIN_ACCURACY_GAP) if REGISTRY[metric].unit == "%" else spread


def is_too_uncertain(metric: str, mean: float, std: float | None) -> bool:
    """Whether a published deviation is too large to judge by: at least half of the number.

    Twice that deviation reaches zero, so that any small number would be within the rule. Only
    metrics that are never negative, such as errors and shares, are judged in this way. The clusters
    of a row, for which no deviation is printed, share what is said of its mean.

    Example:
        >>> is_too_uncertain("mse", 1494.84, 1973.0), is_too_uncertain("mse", 30.26, 1.73)
        (True, False)
        >>> is_too_uncertain("accuracy", 0.5, None)
        False
    """
    # Of metrics that may be negative zero is an ordinary value, so that the rule says nothing.
    return std is not None and metric not in SIGNED_METRICS and 0 < abs(mean) <= 2 * std


def compare_with_paper(result: StudyResult) -> PaperComparison:
    """Compare a study with the published numbers.

    The first method of the study that repeats a published row stands for it; others that name the
    same row were chosen here and are marked so. Where the paper prints no deviation, ours of the
    same row stands for it: the root mean square over the clusters that are compared (nothing where
    there is one seed).

    Raises:
        ConfigError: when it repeats no published experiment.
    """
    experiment = result.experiment
    if experiment is None:
        raise ConfigError(
            f"the study {result.study.name!r} names no published experiment; expected `paper` in "
            "its file, one of: "
            f"{', '.join(sorted(set(numbers.EXPERIMENTS.values())))}"
        )
    published = numbers.load_published(experiment)
    by_row: dict[str, list[PublishedNumber]] = {}
    for one in published:
        by_row.setdefault(one.row, []).append(one)
    lines: list[ComparedNumber] = []
    standing: dict[str, str] = {}
    undefined: dict[str, None] = {}
    for entry in result.study.methods:
        row = entry.paper or ""
        found = []
        for one in by_row.get(row, ()):
            line = _compare_number(result, entry.label, one)
            if line is not None:
                found.append(line)
            elif unknown := result.find_row(entry.label, one.cluster, one.metric):
                title = REGISTRY[one.metric].title
                why = f"a client of it has no finite {title} (it diverged)"
                if unknown.get("undefined"):
                    why = f"{title} is undefined"
                said = f"{entry.label} is not compared by {title}: in some seed {why}."
                undefined[said] = None
        if found:
            chosen = standing.setdefault(row, entry.label) != entry.label
            lines += [_judge_number(line, found, chosen=chosen) for line in found]
    # After the measured ones: they need no run, and have a table of their own.
    lines += predict_costs(result.study)
    roles, rows = _find_orderings(lines)
    reference = numbers.SOURCES[experiment.partition("/")[0]]
    notes = numbers.find_notes(experiment)
    return PaperComparison(
        result.study.name, experiment, reference, result.study.scale, lines, roles, rows, notes,
        result.seeds, result.left_out, [*result.describe_gaps(), *undefined],
    )  # fmt: skip


PREDICTED_COSTS = {metrics.MODELS_MOVED.name: 0.5, metrics.BANDWIDTH.name: 0.005}
"""Published metrics that the cost ledger predicts, with half of their last printed digit."""


def predict_costs(study: StudyConfig) -> list[ComparedNumber]:
    """Compare a paper's printed costs with the cost ledger's for a study; that needs no run.

    A prediction is exact where nothing depends on chance or on what is found: PANM's bag is taken
    for the own cluster, or for everybody where the study does not say the sizes of clusters. It is
    within the rule when it is what is printed, rounded alike.
    """
    experiment = study.paper or numbers.EXPERIMENTS.get(study.name)
    # Natural groups are counted only when the data are read; costs are predicted without data.
    if experiment is None or study.data.num_clients is None:
        return []
    printed = [p for p in numbers.load_published(experiment) if p.metric in PREDICTED_COSTS]
    lines = []
    for entry in study.methods:
        own = [one for one in printed if one.row == entry.paper]
        if not own:
            continue
        found = _predict_moved_models(study, entry.label)
        for one in own:
            ours = found[one.metric]
            difference = ours - one.mean
            within = abs(difference) <= PREDICTED_COSTS[one.metric]
            verdict: Verdict = "point" if within else "outside"
            lines.append(
                ComparedNumber(
                    # No run, so no deviation and no seed.
                    entry.label, one.row, one.cluster, one.metric, ours, None, 0, one.mean, one.std,
                    difference, within, verdict, predicted=True,
                )
            )  # fmt: skip
    return lines


def _predict_moved_models(study: StudyConfig, label: str) -> dict[str, float]:
    """Return the models that move in a whole run and the largest bandwidth, in models."""
    entry, population = study.scale_method(label), study.data.num_clients
    assert population is not None
    shift_sizes = (getattr(shift, "sizes", None) for shift in study.data.build_shifts())
    sizes: Sequence[int] = next(filter(None, shift_sizes), ())
    # The expected size of a client's cluster: larger clusters have more clients.
    group = round(sum(size**2 for size in sizes) / sum(sizes)) if sizes else None
    # One parameter and no samples: only models are counted.
    setting = CostSetting(population, params=1, samples=0, group=group)
    # A round can cost more than the next, as the rounds in which PANM corrects its bags.
    rounds = [entry.method.cost(setting, index).models for index in range(entry.settings.rounds)]
    most = max(rounds, default=0.0)
    # The bandwidth is what one client receives. Of the models that move at a server's client one
    # is the model that it sends; a peer's models move only when it reads them.
    bandwidth = max(0.0, most - 1) if entry.method.server else most / population
    return {metrics.MODELS_MOVED.name: sum(rounds), metrics.BANDWIDTH.name: bandwidth}


def is_full_size(study: StudyConfig) -> bool:
    """Whether a study has the clients, samples, model, steps and rounds of the built-in one.

    Of a sweep over such sizes each point counts. Seeds and the settings of methods may differ,
    swept or not. A study whose name is not built in is not of full size.
    """
    # Without the published settings there is nothing to be smaller than.
    if study.name not in find_builtin_studies():
        return False
    both = study, config.load_study(study.name)
    here, published = ([*map(_list_sizes, expand_sweep(one, to_run=False))] for one in both)
    return here == published


def _list_sizes(study: StudyConfig) -> tuple[Any, ...]:
    local, data = study.settings.local, study.data
    return (
        study.scale * study.settings.rounds, study.settings.participation, local.epochs,
        local.steps, local.batch_size, data.dataset, data.num_clients, data.train, study.model.kind,
    )  # fmt: skip


def predict_paper_costs(source: str) -> dict[str, list[ComparedNumber]]:
    """Return the predicted costs of a paper by the name of its built-in study of full size."""
    costs = {}
    for name, experiment in numbers.EXPERIMENTS.items():
        if experiment.partition("/")[0] != source:
            continue
        # Loading a built-in study takes longer than looking at the table, and few print costs.
        if any(one.metric in PREDICTED_COSTS for one in numbers.load_published(experiment)):
            costs[name] = predict_costs(config.load_study(name))
    return costs


def _compare_number(result: StudyResult, label: str, one: PublishedNumber) -> ComparedNumber | None:
    """Compare one published number with ours; None when we have none."""
    # The deviation over clusters is not stored: it is computed from the clusters' means.
    if one.metric == metrics.STD_OVER_CLUSTERS.name:
        means = _cluster_means(result, label)
        if not means or not np.isfinite(means).all():
            return None
        accuracies = [r for r in result.rows if r["metric"] == metrics.ACCURACY.name]
        row = next(r for r in accuracies if r["label"] == label)
        mean, std, seeds = float(np.std(means)), None, int(row["seeds"])
    else:
        row = _find_time_ratio(result, label, one.metric) or result.find_row(
            label, one.cluster, one.metric
        )
        if row is None or row["mean"] is None or not math.isfinite(row["mean"]):
            return None
        mean, seeds = float(row["mean"]), int(row["seeds"])
        # One seed has no deviation.
        std = None if seeds < 2 or row["std"] is None else float(row["std"])
    difference = mean - one.mean
    return ComparedNumber(
        label,
        one.row,
        one.cluster,
        one.metric,
        mean,
        std,
        seeds,
        one.mean,
        one.std,
        difference,
        None,
    )


def _find_time_ratio(result: StudyResult, label: str, metric: str) -> Mapping[str, Any] | None:
    """Return how much sooner a method reached its baseline's accuracy, as a row of a summary."""
    found = next(
        (t for t in result.times if (t["label"], TIME_RATIOS.get(metric)) == (label, t["metric"])),
        None,
    )
    # A row of a summary has its number under "mean".
    return found and {**found, "mean": found["ratio"]}


def _judge_number(
    line: ComparedNumber, row: Sequence[ComparedNumber], *, chosen: bool
) -> ComparedNumber:
    """Say whether a number is within the rule, among those of its row."""
    pooled, paper_std, printed = None, line.paper_std, [line]
    if paper_std is None:
        # Without a deviation of its own, a number is judged only if the row's printed ones allow.
        printed = [one for one in row if one.metric == line.metric]
        # A mean over all clients varies less than that of a cluster: the two are not pooled.
        of_mean = line.cluster in summary.MEANS
        alike = [one for one in printed if (one.cluster in summary.MEANS) == of_mean]
        variances = [one.std**2 for one in alike if one.std is not None]
        if variances:
            # Variances, not deviations, average without bias.
            pooled = paper_std = math.sqrt(sum(variances) / len(variances))
    verdict = _find_verdict(line, paper_std)
    if any(is_too_uncertain(one.metric, one.paper, one.paper_std) for one in printed):
        verdict = "undecided"
    within = None if verdict == "undecided" else verdict != "outside"
    return replace(line, within=within, verdict=verdict, pooled=pooled, chosen=chosen)


def _find_verdict(line: ComparedNumber, paper_std: float | None) -> Verdict:
    """Return by what a number is within: what allows it without our deviation comes first."""
    distance = abs(line.difference)
    if line.paper_std is not None and distance <= 2 * line.paper_std:
        return "paper"
    if distance <= allowed_difference(line.metric, None, None):
        return "point"
    return "ours" if distance <= allowed_difference(line.metric, line.std, paper_std) else "outside"


def _cluster_means(result: StudyResult, label: str) -> list[float]:
    """Return the accuracy of each cluster; NaN for one that has none."""
    means = []
    for row in result.rows:
        is_own = (row["label"], row["metric"]) == (label, metrics.ACCURACY.name)
        if is_own and row["cluster"] not in summary.MEANS:
            # A stored summary has None where a mean is not finite.
            means.append(math.nan if row["mean"] is None else float(row["mean"]))
    return means


def _find_orderings(lines: Sequence[ComparedNumber]) -> tuple[list[Ordering], list[Ordering]]:
    """Return the chain of roles and the clear pairs, of means over clients or else clusters."""
    # A paper prints means over clients or over clusters; orders need one kind of them.
    where = "all" if any(line.cluster == "all" for line in lines) else "clusters"
    metric = ranking_metric(lines)
    means: dict[str, ComparedNumber] = {}
    for line in lines:
        if line.cluster == where and line.metric == metric:
            # The first method of a row stands for it, as in `compare_with_paper`.
            means.setdefault(line.row, line)
    if not means:
        return [], []
    sign = REGISTRY[str(metric)].sign
    orderings = []
    roles = [(name, _best_numbers(means, members, sign)) for name, members in numbers.ROLES]
    there = [(name, best) for name, best in roles if best is not None]
    for (better, a), (worse, b) in pairwise(there):
        # Only an order that the paper's numbers themselves show.
        if sign * (a[0] - b[0]) >= 0:
            orderings.append(
                Ordering(better, worse, (a[0], b[0]), (a[1], b[1]), sign * (a[1] - b[1]) >= 0)
            )
    pairs = []
    for first, a in means.items():
        for second, b in means.items():
            apart = sign * (a.paper - b.paper)
            # Ties of the paper say nothing: only pairs further apart than its own deviations.
            if apart > allowed_difference(a.metric, a.paper_std or 0.0, b.paper_std):
                ours = (a.ours, b.ours)
                pairs.append(
                    Ordering(
                        first, second, (a.paper, b.paper), ours, sign * (ours[0] - ours[1]) > 0
                    )
                )
    return orderings, pairs


def _best_numbers(
    means: Mapping[str, ComparedNumber], methods: Sequence[str], sign: int
) -> tuple[float, float] | None:
    """Return the best published and the best of our numbers of some methods."""
    lines = [line for row, line in means.items() if row.partition("/")[0] in methods]
    if not lines:
        return None
    # For errors the least number is the best.
    choose = max if sign > 0 else min
    return choose(line.paper for line in lines), choose(line.ours for line in lines)


def to_json(
    value: PaperComparison
    | EqualBudget
    | PairComparison
    | CrossComparison
    | StudyResult
    | VariedResults,
) -> dict[str, Any]:
    """Return plain values, for JSON."""
    if isinstance(value, VariedResults):
        own = {"pairs": pairs.pairs_to_json(value.pairs), "metric": value.metric.name}
        return summary.replace_nonfinite({**vars(value), **own})
    if isinstance(value, CrossComparison):
        return {
            "studies": list(value.studies),
            "pairs": pairs.pairs_to_json(value.pairs),
            "verdicts": value.verdicts,
        }
    # First: it contains a StudyResult, whose own JSON it extends.
    if isinstance(value, PairComparison):
        return {
            **to_json(value.result),
            "pairs": pairs.pairs_to_json(value.pairs),
            "verdicts": list(value.verdicts),
        }
    if isinstance(value, StudyResult):
        return summary.replace_nonfinite(
            {
                "study": value.study.name, "folder": str(value.folder), "archived": value.archived,
                "seeds": value.seeds, "left_out": list(value.left_out), "rows": list(value.rows),
                "pairs": pairs.pairs_to_json(value.pairs),
            }
        )  # fmt: skip
    return summary.replace_nonfinite(asdict(value))
