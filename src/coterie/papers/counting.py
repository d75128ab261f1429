"""Count verdicts on published numbers, by paper and by table, and how many rest on few seeds.

A count of single numbers can flatter: a wide deviation of ours lets any number pass, many small
differences of one sign are a difference of the experiment, and one seed may be a lucky one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from coterie.functional.metrics import REGISTRY
from coterie.papers import numbers
from coterie.papers.compare import (
    ComparedNumber,
    PaperComparison,
    StudyResult,
    compare_with_paper,
    is_full_size,
    predict_paper_costs,
)

MIN_SEEDS = 3
"""A verdict on so many seeds rests on enough of them."""
SEED_DEVIATIONS = 3.0
"""With fewer, a difference must be more than so many times what seeds move."""


@dataclass(frozen=True)
class SeedDeviations:
    """How far seeds move a number: the largest deviation over three seeds or more.

    The largest and not the mean: whether a single seed is an unlucky one, it cannot say.

    Args:
        largest: by paper (a name of `numbers.SOURCES`) and metric, in the units of the metric.
    """

    largest: Mapping[tuple[str, str], float]

    @staticmethod
    def measure(comparisons: Iterable[PaperComparison]) -> "SeedDeviations":
        """Return the deviations of the numbers that studies compare."""
        largest: dict[tuple[str, str], float] = {}
        for comparison in comparisons:
            for line in comparison.lines:
                if line.seeds >= MIN_SEEDS and line.std is not None:
                    key = comparison.source, line.metric
                    largest[key] = max(largest.get(key, 0.0), line.std)
        return SeedDeviations(largest)

    def find(self, source: str, metric: str) -> float | None:
        """Return the deviation of a metric.

        Of the paper where it has one, else the largest of all papers, else the largest of all
        metrics that are percentages, if this is one; None where nothing is known.
        """
        own = self.largest.get((source, metric))
        if own is not None:
            return own
        alike = [value for (_, name), value in self.largest.items() if name == metric]
        if not alike and REGISTRY[metric].unit == "%":
            alike = [
                value for (_, name), value in self.largest.items() if REGISTRY[name].unit == "%"
            ]
        return max(alike, default=None)

    def rests_on_few_seeds(self, line: ComparedNumber, source: str) -> bool:
        """Return whether a verdict has fewer than three seeds, and no difference that outweighs it.

        A prediction has no seeds, and nothing that they could move.
        """
        if line.predicted or line.within is None or line.seeds >= MIN_SEEDS:
            return False
        moved = self.find(source, line.metric)
        return moved is None or abs(line.difference) <= SEED_DEVIATIONS * moved


@dataclass(frozen=True)
class VerdictCounts:
    """How many numbers have each verdict; see `compare.VERDICTS`.

    Args:
        paper: within by the paper's own deviation.
        point: within one point of accuracy, or equal.
        ours: within by our own deviation alone.
        outside: not within.
        undecided: not judged.
        few_seeds: those of the judged ones that rest on few seeds.
    """

    paper: int
    point: int
    ours: int
    outside: int
    undecided: int
    few_seeds: int

    @property
    def strict(self) -> int:
        """How many are within without our deviation."""
        return self.paper + self.point

    @property
    def within(self) -> int:
        """How many are within the rule."""
        return self.strict + self.ours

    @property
    def judged(self) -> int:
        """How many are within or outside."""
        return self.within + self.outside


def count_verdicts(
    lines: Iterable[tuple[str, ComparedNumber]], deviations: SeedDeviations
) -> VerdictCounts:
    """Count verdicts of numbers, each given with its paper."""
    verdicts: Counter[str] = Counter()
    few = 0
    for source, line in lines:
        verdicts[line.verdict] += 1
        few += deviations.rests_on_few_seeds(line, source)
    return VerdictCounts(
        verdicts["paper"], verdicts["point"], verdicts["ours"], verdicts["outside"],
        verdicts["undecided"], few,
    )  # fmt: skip


@dataclass(frozen=True)
class TableBias:
    """Whether the numbers of a study lie to one side of the published ones.

    Many small differences of one sign are a difference of the experiment, though each of them may
    be within the rule.

    Args:
        study: its name.
        lines: its numbers by one metric, over rows and clusters; without undecided, chosen or
            predicted ones.
        verdicts: of the numbers.
    """

    study: str
    lines: Sequence[ComparedNumber]
    verdicts: VerdictCounts

    @property
    def metric(self) -> str:
        """The name of the metric."""
        return self.lines[0].metric

    @property
    def difference(self) -> float:
        """The mean of ours - paper, in the units of the metric (accuracies: 0 to 1)."""
        return float(np.mean([line.difference for line in self.lines]))

    @property
    def below(self) -> int:
        """How many numbers are less than the paper's."""
        return sum(line.difference < 0 for line in self.lines)

    @property
    def above(self) -> int:
        """How many are more."""
        return sum(line.difference > 0 for line in self.lines)

    @property
    def seeds(self) -> int:
        """The fewest seeds of a number."""
        return min(line.seeds for line in self.lines)

    @property
    def compared(self) -> int:
        """How many numbers there are."""
        return self.verdicts.judged

    @property
    def side(self) -> tuple[str, int]:
        """The side with more numbers, and how many; "below" where both have as many."""
        return ("above", self.above) if self.above > self.below else ("below", self.below)

    @property
    def is_one_sided(self) -> bool:
        """Whether nine tenths of at least six numbers have one sign."""
        # Six of one sign come by chance in 3 % of tables, if their numbers were independent.
        return self.compared >= 6 and self.side[1] >= 0.9 * self.compared


def measure_bias(comparison: PaperComparison, deviations: SeedDeviations) -> list[TableBias]:
    """Return how far the numbers of a study lie to one side, for each metric."""
    by_metric: dict[str, list[ComparedNumber]] = {}
    for line in comparison.lines:
        if line.within is not None and not line.chosen and not line.predicted:
            by_metric.setdefault(line.metric, []).append(line)
    found = []
    for lines in by_metric.values():
        verdicts = count_verdicts([(comparison.source, line) for line in lines], deviations)
        found.append(TableBias(comparison.study, lines, verdicts))
    return found


@dataclass(frozen=True)
class PaperCoverage:
    """How many of a paper's numbers are compared with ours.

    Args:
        source: the paper, a name of `numbers.SOURCES`.
        published: its numbers.
        full: numbers compared with a result of full size; see `compare.is_full_size`.
        reduced: numbers compared with a smaller result only.
        predicted: costs compared with what the ledger predicts for the built-in study; see
            `compare.predict_costs`.
        none: numbers compared with nothing.
        verdicts: of the numbers that are compared.
    """

    source: str
    published: int
    full: int
    reduced: int
    predicted: int
    none: int
    verdicts: VerdictCounts


def count_coverage(
    results: Sequence[StudyResult], deviations: SeedDeviations | None = None
) -> list[PaperCoverage]:
    """Count, by paper, the published numbers that stored studies compare, without chosen rows.

    Args:
        results: the studies.
        deviations: how far seeds move numbers; those of the studies themselves when not given.
    """
    compared: dict[str, dict[tuple[str, ...], tuple[bool, ComparedNumber]]] = {}
    for source in numbers.SOURCES:
        compared[source] = {}
    comparisons = []
    for result in results:
        if result.experiment is None:
            continue
        comparison, full = compare_with_paper(result), is_full_size(result.study)
        comparisons.append(comparison)
        own = compared[comparison.source]
        for line in comparison.lines:
            key = (result.experiment, line.row, line.cluster, line.metric)
            # A result of full size replaces one of reduced size, never the other way.
            if not line.chosen and not line.predicted and (full or key not in own):
                own[key] = full, line
    deviations = deviations or SeedDeviations.measure(comparisons)
    out = []
    for source, own in compared.items():
        published, full = len(numbers.load_table(source)), sum(one for one, _ in own.values())
        ledger = list(chain(*predict_paper_costs(source).values()))
        # What the ledger predicts has no result, and is in no study's lines here.
        lines = [*(line for _, line in own.values()), *ledger]
        out.append(
            PaperCoverage(
                source, published, full, len(own) - full, len(ledger), published - len(lines),
                count_verdicts([(source, line) for line in lines], deviations),
            )
        )  # fmt: skip
    return out
