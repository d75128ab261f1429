"""What is said of runs that are missing, damaged or not finished, and of the seeds that are compared."""

import pytest

from coterie.results import coverage
from coterie.results.coverage import RunStatus


@pytest.mark.parametrize(
    ("finished", "expected"),
    [
        ({"A": [0, 1, 2], "B": [2, 1]}, [1, 2]),
        ({"A": [0, 1], "B": []}, [0, 1]),
        ({"A": [0], "B": [1]}, []),
        ({"A": []}, []),
        ({}, []),
    ],
)
def test_the_seeds_that_all_have(finished, expected):
    """A method without any finished run does not empty the comparison of the others."""
    assert coverage.find_common_seeds(finished) == expected


def test_fifteen_seeds_of_eleven_methods_take_a_few_short_lines():
    """Ten methods lack the same seeds: one line; one is damaged at two seeds for one reason: another line."""
    standings = [RunStatus(f"M{m}", seed, "missing") for m in range(10) for seed in range(5, 15)]
    standings += [RunStatus("Bad", 0, "damaged", "torn"), RunStatus("Bad", 7, "damaged", "torn")]
    standings += [RunStatus("Bad", 8, "unfinished", "round 3 of 9")]
    assert coverage.format_statuses(standings) == [
        "M0, M1, M2, M3, M4, M5, M6, M7, M8, M9: seeds 5-14 missing",
        "Bad: seeds 0, 7 damaged (torn); seed 8 unfinished (round 3 of 9)",
    ]


def content(left_out, seeds=(0, 2), labels=("DAC", "Local")):
    return {
        "rows": [{"label": x} for x in labels],
        "seeds": list(seeds),
        "left_out": coverage.statuses_to_json(left_out),
    }


def test_where_every_run_counts_nothing_is_said():
    """Also of a summary that was stored before it told which seeds its means are over."""
    assert coverage.describe_coverage(content([])) == []
    assert coverage.describe_coverage({"rows": []}) == []


def test_what_is_left_out_is_named():
    """DAC lacks seed 1, so that of Local is left out; Late has no finished run."""
    found = content(
        [
            RunStatus("DAC", 1, "missing"),
            RunStatus("Local", 1, "finished"),
            RunStatus("Late", 0, "missing"),
        ]
    )
    assert coverage.describe_coverage(found) == [
        "DAC: seed 1 missing",
        "Late: seed 0 missing",
        "Means are over the seeds that all have: 0, 2; left out: Local 1; no finished run: Late.",
    ]
    assert coverage.describe_incomplete_runs(found) == [
        "DAC: seed 1 missing",
        "Late: seed 0 missing",
    ]


def test_where_no_seed_is_common_nothing_is_compared():
    """A has seed 0, B seed 1; or nobody has any."""
    apart = [
        RunStatus("A", 0, "finished"),
        RunStatus("A", 1, "missing"),
        RunStatus("B", 1, "finished"),
    ]
    assert coverage.describe_coverage(content(apart, (), ())) == [
        "A: seed 1 missing",
        "No seed was finished by all methods, so nothing is compared; finished: A 0; B 1.",
    ]
    assert coverage.describe_coverage(content([RunStatus("A", 0, "missing")], (), ())) == [
        "A: seed 0 missing",
        "No run is finished: there is nothing to compare.",
    ]


def test_rounds_that_a_node_left_out_are_said():
    """One line a run; a gap of a single round is one number."""
    found = {"skipped": [{"label": "DAC", "seed": 3, "rounds": [[4, 4], [7, 9]]}]}
    text = "DAC, seed 3: rounds 4, 7 to 9 were left out, not trained: the others went on."
    assert coverage.describe_skipped_rounds(found) == [text]
    assert coverage.describe_skipped_rounds({}) == []
