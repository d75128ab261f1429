"""Counts of verdicts, on tables made by hand: by what a number passes, on which side, on how many seeds."""

from dataclasses import replace

import pytest

from coterie.cli import _tables
from coterie.papers import compare, counting
from coterie.papers.compare import ComparedNumber, PaperComparison
from coterie.papers.counting import SeedDeviations, VerdictCounts


def number(ours, paper, *, std=None, paper_std=None, seeds=3, metric="accuracy", **more):
    """A number that is compared, of a row of its own; accuracies from 0 to 1."""
    line = ComparedNumber(
        "M", "m/fedavg", "all", metric, ours, std, seeds, paper, paper_std, ours - paper, None
    )  # fmt: skip
    return replace(compare._judge_number(line, [line], chosen=False), **more)


def comparison(*lines, source="dac"):
    return PaperComparison("s", f"{source}/e", "", 1.0, lines, (), (), ())


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        # 3 points from 60 ± 1.5: just twice the paper's deviation.
        (number(0.63, 0.60, std=0.1, paper_std=0.0151), "paper"),
        (number(0.57, 0.60, std=0.0, paper_std=0.0151), "paper"),
        # 3 points from 60 ± 1: more than twice that, and less than 2 hypot(1, 1.5) = 3.6.
        (number(0.63, 0.60, std=0.015, paper_std=0.01), "ours"),
        (number(0.63, 0.60, std=0.01, paper_std=0.01), "outside"),  # 2 hypot(1, 1) = 2.8
        # Nine tenths of a point, which needs no deviation at all.
        (number(0.609, 0.60), "point"),
        (number(0.609, 0.60, std=0.2, paper_std=0.004), "point"),
        (number(0.611, 0.60), "outside"),
        # No deviation in the paper: ours counts twice, 2 hypot(1, 1) = 2.8 points.
        (number(0.627, 0.60, std=0.01), "ours"),
        (number(0.63, 0.60, std=0.01), "outside"),
        # No point is allowed where numbers are no percentages, and what is equal is equal.
        (number(2.0, 2.0, metric="n_clusters"), "point"),
        (number(2.001, 2.0, metric="n_clusters"), "outside"),
        (number(60.0, 100.0, paper_std=50.0, metric="mse"), "undecided"),
    ],
)
def test_a_verdict_says_by_what_a_number_is_within(line, verdict):
    assert line.verdict == verdict
    assert line.within is {"outside": False, "undecided": None}.get(verdict, True)


@pytest.mark.parametrize(
    ("line", "few"),
    [
        (number(0.7, 0.6, seeds=3), False),
        (number(0.601, 0.6, seeds=3), False),
        (number(0.601, 0.6, seeds=2), True),  # within, on two seeds
        (number(0.601, 0.6, seeds=1), True),
        # Seeds move this paper's accuracies by 2 points at most: three times that are 6.
        (number(0.661, 0.6, seeds=1), False),
        (number(0.659, 0.6, seeds=1), True),
        (number(0.539, 0.6, seeds=1), False),
        (number(0.541, 0.6, seeds=1), True),
        # What two seeds say of each other is no measure.
        (number(0.62, 0.6, std=0.0001, seeds=2), True),
        # Of this error nothing is known, however large the difference.
        (number(900.0, 1.0, seeds=1, metric="mse"), True),
        # Another percentage: the largest of any paper, 5 points.
        (number(0.7, 0.6, seeds=1, metric="accuracy_max"), True),
        (number(0.76, 0.6, seeds=1, metric="accuracy_max"), False),
        # No verdict, and a prediction, which no seed moves.
        (number(60.0, 100.0, paper_std=50.0, seeds=1, metric="mse"), False),
        (number(600.0, 600.0, seeds=0, metric="models_moved", predicted=True), False),
    ],
)
def test_a_verdict_needs_three_seeds_or_three_times_what_seeds_move(line, few):
    deviations = SeedDeviations({("dac", "accuracy"): 0.02, ("similarity", "accuracy"): 0.05})
    assert deviations.rests_on_few_seeds(line, "dac") is few


def test_what_seeds_move_is_the_largest_deviation_over_three_seeds_of_a_paper():
    dac = comparison(
        number(0.6, 0.6, std=0.03), number(0.6, 0.6, std=0.01), number(0.6, 0.6, std=0.2, seeds=2),
        number(0.6, 0.6), number(9.0, 9.0, std=4.0, metric="mse"),
    )  # fmt: skip
    other = comparison(number(0.6, 0.6, std=0.02, seeds=15), source="similarity")
    found = SeedDeviations.measure([dac, other])
    assert found.find("dac", "accuracy") == 0.03
    assert found.find("similarity", "accuracy") == 0.02
    assert found.find("panm", "accuracy") == 0.03, "the largest of the papers that have some"
    assert found.find("similarity", "mse") == 4.0
    assert found.find("panm", "accuracy_max") == 0.03, "another percentage"
    assert found.find("panm", "rand") is None
    assert SeedDeviations({}).find("dac", "accuracy") is None


def test_a_table_is_told_with_its_mean_difference_its_side_and_its_verdicts():
    """Ten numbers from 60: nine below, of which one each by the paper's deviation, a point and ours; two on one seed."""
    lines = [
        number(0.57, 0.60, paper_std=0.02),  # paper
        number(0.595, 0.60),  # point
        number(0.58, 0.60, std=0.02),  # ours
        *[number(0.50, 0.60)] * 4,
        number(0.50, 0.60, seeds=1),  # ten points: more than three times 2
        number(0.55, 0.60, seeds=1),  # five: less
        number(0.64, 0.60),
        number(0.99, 0.60, chosen=True),
        number(60.0, 100.0, paper_std=50.0, metric="mse"),
    ]
    (bias,) = counting.measure_bias(
        comparison(*lines), SeedDeviations.measure([comparison(*lines)])
    )
    assert bias.verdicts == VerdictCounts(
        paper=1, point=1, ours=1, outside=7, undecided=0, few_seeds=1
    )
    assert (bias.verdicts.strict, bias.verdicts.within, bias.compared) == (2, 3, 10)
    # -3 -0.5 -2 -4 x 10 -10 -5 + 4 = -56.5 points
    assert bias.difference == pytest.approx(-0.0565)
    assert (bias.side, bias.seeds, bias.is_one_sided) == (("below", 9), 1, True)
    assert _tables.describe_bias(bias) == (
        "On average -5.65 from the paper, 9 of 10 below it; 1 within by the paper's own deviation, "
        "1 within one point, 1 by ours alone."
    )


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [(6, 0, True), (5, 0, False), (1, 9, True), (2, 9, False), (0, 20, True), (9, 2, False)],
)
def test_a_table_is_one_sided_with_nine_tenths_of_six_numbers(below, above, expected):
    counts = VerdictCounts(0, 0, 0, below + above, 0, 0)
    lines = [number(0.5, 0.6)] * below + [number(0.7, 0.6)] * above
    bias = counting.TableBias("s", lines, counts)
    assert bias.is_one_sided is expected


def test_tables_of_text_say_by_what_a_number_is_within_and_mark_few_seeds():
    lines = [
        number(0.57, 0.60, std=0.01, paper_std=0.02),
        number(0.50, 0.60, std=0.01, cluster="rotation 0"),
        number(0.595, 0.60, seeds=1, label="N"),
    ]
    long, *_ = _tables.build_paper_tables(comparison(*lines))
    assert [row[-1] for row in long.rows] == [
        "paper's deviation", "no", "one point*",
    ]  # fmt: skip
    assert "2 of 3 numbers are within the rule." in long.foot
    assert "1 of 3 verdicts rest on fewer than three seeds (*)." in long.foot
    short, *_ = _tables.build_paper_tables(comparison(*lines), compact=True)
    assert short.head == ("method", "mean over clients", "rotation 0")
    assert short.rows == [
        ("M", "57.00 ± 1.00 / 60.00 ± 2.00 p (n 3)", "50.00 ± 1.00 / 60.00 x (n 3)"),
        ("N", "59.50 / 60.00 1* (n 1)", ""),
    ]
    alike, *_ = _tables.build_paper_tables(comparison(*lines[:2]), compact=True)
    assert alike.rows[0][2] == "50.00 ± 1.00 / 60.00 x"
    assert alike.foot.startswith("3 seeds. 1 of 2 numbers")
