"""benchmarks/waiting.py: which clients are slow, and which way round a difference is."""

from types import SimpleNamespace

import pytest

from benchmarks import waiting
from coterie.results.pairs import Pair
from coterie.studies.config import load_study


def test_slow_clients_are_those_of_the_study():
    digits = waiting.list_seconds("stragglers/digits", 5)
    assert [client for client, seconds in enumerate(digits) if seconds == 5] == [3, 7, 11, 15, 19]
    assert waiting.list_seconds("stragglers/hospitals", 1) == [1, 1, 1, 1]


@pytest.mark.parametrize("study", waiting.STUDIES)
def test_all_methods_have_the_same_slow_clients_and_end_at_the_same_time(study):
    """In step a round takes as long as the slow clients; all others take a second for a record."""
    base = load_study(study)
    for slower in waiting.SLOWER:
        for method in load_study(study, waiting.list_changes(study, slower)).methods:
            time = method.settings.virtual_time
            assert list(time.round_seconds) == waiting.list_seconds(study, slower)
            waits = method.settings.schedule == "synchronous" and time.deadline_seconds is None
            assert waits == ("," not in method.label)
            length = slower if waits else time.deadline_seconds or time.record_seconds
            assert method.settings.rounds * length == base.settings.rounds


def make_pair(one, other, difference, low, high):
    return Pair(
        one, other, "accuracy", "all", difference, low, high, p=0.01, p_corrected=0.02, effect=1.0, gained=0.6, lost=0.3,
        seeds=2, clients=4, seeds_needed=None, established=True,
    )  # fmt: skip


def make_ranking(*pairs):
    rows = []
    for label, rounds, value in (
        ("A", 6.0, 0.7), ("A, no waiting", 60.0, 0.8), ("A, deadline", 60.0, 0.75), ("B", 6.0, 0.9), ("B, no waiting", 60.0, 0.6), ("C", 6.0, 0.5),
    ):  # fmt: skip
        rows.append(SimpleNamespace(label=label, rounds=rounds, value=value))
    return SimpleNamespace(rows=rows, pairs=pairs, budget=60.0, seeds=[0, 1])


def test_a_difference_above_zero_speaks_for_not_waiting():
    found = list(
        waiting.compare_ways(
            make_ranking(
                make_pair("A, no waiting", "A", 0.1, 0.05, 0.15),
                make_pair("A, deadline", "A", 0.05, -0.1, 0.2),
                make_pair("B", "B, no waiting", 0.3, -0.1, 0.7),
            )
        )
    )
    assert [(row["method"], row["way"]) for row in found] == [
        ("A", "no waiting"),
        ("A", "deadline"),
        ("B", "no waiting"),
    ]
    assert [(row["difference"], row["low"], row["high"]) for row in found] == [
        (0.1, 0.05, 0.15),
        (0.05, -0.1, 0.2),
        (-0.3, -0.7, 0.1),
    ]
    assert [row["in step"] for row in found] == [0.7, 0.7, 0.9]
    assert [row["value"] for row in found] == [0.8, 0.75, 0.6]


def test_a_pair_that_is_not_there_is_an_error():
    with pytest.raises(LookupError, match="A, no waiting and A"):
        list(waiting.compare_ways(make_ranking()))
