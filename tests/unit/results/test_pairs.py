import json
import math
from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from coterie.functional.metrics import ACCURACY, LOSS, Metric
from coterie.results import pairs, summary
from coterie.results.pairs import Pair

FIELDS = {
    "method_a", "method_b", "metric", "cluster", "difference", "low", "high", "p", "p_corrected", "effect", "gained",
    "lost", "seeds", "clients", "seeds_needed", "established", "overlap",
}  # fmt: skip


def study(values, clusters=None):
    """What `compare` takes, from arrays of seeds x clients by method."""
    rows = {
        label: {s: pd.Series(list(own)) for s, own in enumerate(table)}
        for label, table in values.items()
    }
    first = next(iter(rows.values()))
    return rows, {s: pd.Series(clusters or [-1] * len(own)) for s, own in first.items()}


def made(seed=0, seeds=6, clients=4, **levels):
    """Methods around some levels of accuracy, on seeds that they share."""
    rng = np.random.default_rng(seed)
    shared = 0.1 * rng.standard_normal((seeds, clients))
    return {
        label: level + shared + 0.02 * rng.standard_normal((seeds, clients))
        for label, level in levels.items()
    }


def one(found, a, b, cluster="all"):
    """The pair of two methods."""
    (pair,) = [pair for pair in found if pair.key == {a, b} and pair.cluster == cluster]
    return pair


def test_a_pair_is_the_paired_t_test_of_the_means_of_the_seeds():
    values = made(A=0.8, B=0.75, C=0.78)
    found = pairs.compare_pairs(*study(values), ACCURACY, {})
    assert len(found) == 3
    for pair in found:
        first, second = values[pair.method_a], values[pair.method_b]
        test = stats.ttest_rel(first.mean(1), second.mean(1))
        low, high = test.confidence_interval()
        assert (pair.p, pair.low, pair.high) == pytest.approx((test.pvalue, low, high))
        assert pair.difference == pytest.approx((first - second).mean())
        assert pair.difference > 0
        assert (pair.gained, pair.lost) == ((first > second).mean(), (first < second).mean())
        assert (pair.seeds, pair.clients) == (6, 4)
    raw = sorted(pair.p for pair in found)
    by_hand = sorted(pair.p_corrected for pair in found)
    assert by_hand[0] == pytest.approx(3 * raw[0])
    assert all(pair.established == (pair.p_corrected <= 0.05) for pair in found)


def test_the_better_method_comes_first_also_where_less_is_better():
    (pair,) = pairs.compare_pairs(
        *study({"A": [[3.0, 2.0], [2.0, 2.5]], "B": [[1.0, 1.0], [1.0, 2.5]]}), LOSS, {}
    )
    assert (pair.method_a, pair.method_b, pair.difference) == (
        "B",
        "A",
        pytest.approx((1.5 + 0.5) / 2),
    )
    assert (pair.gained, pair.lost) == (0.75, 0.0)


def test_clusters_are_compared_each_and_with_equal_weight():
    """Seed by seed: A is better by .1 .1 .1 .5 in clusters of three and one: .2 over clients, .3 over clusters."""
    values = {"A": [[0.6, 0.6, 0.6, 1.0], [0.6, 0.6, 0.6, 0.9]], "B": [[0.5] * 4, [0.5] * 4]}
    found = pairs.compare_pairs(*study(values, [0, 0, 0, 2]), ACCURACY, {0: "upright"})
    assert [pair.cluster for pair in found] == ["upright", "2", "all", "clusters"]
    assert [pair.difference for pair in found] == pytest.approx([0.1, 0.45, 0.1875, 0.275])
    assert [pair.clients for pair in found] == [3, 1, 4, 4]
    assert (found[0].p, found[0].established) == (None, False), (
        "both seeds gave the same: they count as one"
    )


def test_over_clusters_nothing_is_compared_where_no_client_of_one_has_a_value():
    """Client 3 is alone in its cluster, and its samples define the metric in seed 1 alone."""
    values, planted = study(
        {"A": [[0.6, 0.6, 0.6, 0.6], [0.6, 0.6, 0.6, 1.0]], "B": [[0.5] * 4, [0.5] * 4]},
        [0, 0, 0, 1],
    )
    for own in values.values():
        own[0] = own[0].drop(3)
    found = {pair.cluster: pair for pair in pairs.compare_pairs(values, planted, ACCURACY, {})}
    assert (found["clusters"].seeds, found["all"].seeds) == (1, 2)
    assert found["clusters"].difference == pytest.approx((0.1 + 0.5) / 2)
    for own in values.values():
        own[1] = own[1].drop(3)
    found = {pair.cluster for pair in pairs.compare_pairs(values, planted, ACCURACY, {})}
    assert found == {"0", "all"}


def test_clients_without_a_value_are_left_out_in_pairs_and_a_diverged_one_is_not():
    """Client 1 of seed 0 has no value under either; client 0 of C diverged in seed 1."""
    values, planted = study(made(A=0.8, B=0.7, C=0.6, seeds=3))
    for own in values.values():
        own[0] = own[0].drop(1)
    values["C"][1][0] = math.nan
    found = pairs.compare_pairs(values, planted, ACCURACY, {})
    kept = one(found, "A", "B")
    assert kept.clients == 3
    expected = [
        np.mean([values["A"][s][i] - values["B"][s][i] for i in values["A"][s].index])
        for s in range(3)
    ]
    assert kept.difference == pytest.approx(np.mean(expected))
    lost = one(found, "A", "C")
    assert (lost.difference, lost.low, lost.p, lost.gained, lost.established) == (
        None,
        None,
        None,
        None,
        False,
    )
    assert "diverged" in pairs.describe_pair(lost, ACCURACY)
    assert kept.p_corrected == kept.p, "the only pair with a test"


def test_only_seeds_that_both_have_are_compared():
    values, planted = study(made(A=0.8, B=0.7, C=0.6, seeds=4))
    del values["B"][3], values["C"]
    values["C"] = {9: pd.Series([0.1] * 4)}
    planted[9] = planted[0]
    (pair,) = pairs.compare_pairs(values, planted, ACCURACY, {})
    assert (pair.method_a, pair.method_b, pair.seeds) == ("A", "B", 3)


def test_one_value_of_a_whole_run_is_compared_over_all_alone():
    whole = Metric("share", better="higher", over="run")
    (pair,) = pairs.compare_pairs(*study({"A": [[2.0, 2.0]], "B": [[1.0, 1.0]]}, [0, 1]), whole, {})
    assert (pair.cluster, pair.difference, pair.low) == ("all", 1.0, None)


def test_fewer_pairs_have_a_smaller_correction():
    found = pairs.compare_pairs(*study(made(A=0.8, B=0.78, C=0.76, D=0.74)), ACCURACY, {})
    against = pairs.select_pairs(found, metric="accuracy", baseline="A")
    assert [pair.method_b for pair in against] == ["A"] * 3
    assert all(pair.difference < 0 and pair.low < pair.high and pair.effect < 0 for pair in against)
    alone = sorted(pair.p for pair in against)
    assert min(pair.p_corrected for pair in against) == pytest.approx(3 * alone[0])
    assert all(pair.p_corrected <= one(found, *pair.key).p_corrected for pair in against)
    back = [pair.swap_methods() for pair in against]
    assert [(pair.gained, pair.low) for pair in back] == [
        (one(found, *pair.key).gained, one(found, *pair.key).low) for pair in back
    ]


def test_shared_training_data_make_intervals_wider_as_nadeau_and_bengio_say():
    values = made(A=0.8, B=0.75)
    (pair,) = pairs.compare_pairs(*study(values), ACCURACY, {})
    (wider,) = pairs.widen_intervals([pair], 0.2)
    own = (values["A"] - values["B"]).mean(1)
    error = own.std(ddof=1) * math.sqrt(1 / 6 + 0.2 / 0.8)
    assert wider.high - wider.difference == pytest.approx(stats.t.ppf(0.975, 5) * error)
    assert wider.p == pytest.approx(2 * stats.t.sf(own.mean() / error, 5))
    assert pairs.widen_intervals([pair], 0.0) == pairs.select_pairs([pair]) == [pair]


def test_seeds_that_are_folds_are_widened_once_whoever_asks():
    values = made(A=0.8, B=0.75)
    (plain,) = pairs.compare_pairs(*study(values), ACCURACY, {})
    (folds,) = pairs.compare_pairs(*study(values), ACCURACY, {}, 0.25)  # five folds
    wider = math.sqrt(1 + 6 * 0.25)
    assert folds.high - folds.low == pytest.approx(wider * (plain.high - plain.low))
    assert folds.p > plain.p
    assert folds.difference == plain.difference
    (asked,) = pairs.widen_intervals([plain], 0.2)
    assert (asked.low, asked.high, asked.p) == pytest.approx((folds.low, folds.high, folds.p))
    assert asked.seeds_needed == folds.seeds_needed
    assert pairs.widen_intervals([folds], 0.2) == pairs.select_pairs([folds]) == [folds]
    assert pairs.parse_pairs({"pairs": pairs.pairs_to_json([folds])}) == [folds]
    assert "folds, 5 a division" in pairs.describe_interval_scope(
        {"data": {"dataset": "heart-disease", "folds": 5}}, {0: "cleveland"}
    )


def test_who_leads():
    """B is close to A, D is far; Oracle is better than all and is not ranked."""
    values = made(A=0.80, B=0.795, D=0.5, Oracle=0.95, seeds=5)
    found = pairs.compare_pairs(*study(values), ACCURACY, {})
    rows = [
        {
            "method": label.lower(),
            "label": label,
            "cluster": "all",
            "metric": "accuracy",
            "mean": float(own.mean()),
        }
        for label, own in values.items()
    ]
    leading = pairs.find_leaders(rows, found, ACCURACY, "all")
    assert set(leading) == {"A", "B"}
    said = pairs.describe_leaders(rows[:-1], found, ACCURACY)
    assert (
        said
        == f"{leading[0]} has the best mean, but {leading[1]} cannot be distinguished from it with 5 seeds."
    )
    assert (
        pairs.describe_leaders(rows, found, ACCURACY)
        == f"{said} Oracle, which knows the clusters, is not ranked."
    )
    own = [
        {**row, "method": "mine:Own", "needs": ["pool"]} if row["label"] == "D" else row
        for row in rows[:-1]
    ]
    assert (
        pairs.describe_leaders(own, found, ACCURACY)
        == f"{said} D, which has everybody's data in one place, is not ranked."
    )
    without = [row for row in rows if row["label"] != leading[1]]
    assert pairs.find_leaders(without, found, ACCURACY, "all") == [leading[0]]
    assert pairs.describe_leaders(without, found, ACCURACY).startswith(f"{leading[0]} is the best")
    assert pairs.find_leaders(rows[:1], found, ACCURACY, "all") == []
    assert pairs.find_leaders(rows, [], ACCURACY, "all") == [], (
        "a summary that was stored without pairs"
    )
    single = [
        replace(pair, seeds=1, low=None, high=None, p=None, established=False) for pair in found
    ]
    assert pairs.find_leaders(rows, single, ACCURACY, "all") == []
    assert pairs.describe_leaders(rows, single, ACCURACY).startswith("One seed settles nothing")
    diverged = [{**row, "mean": math.nan if row["label"] == "A" else row["mean"]} for row in rows]
    assert "A" not in pairs.find_leaders(diverged, found, ACCURACY, "all")


NUMBERS = {
    "p": 0.01,
    "p_corrected": 0.03,
    "effect": 1.0,
    "gained": 0.7,
    "lost": 0.3,
    "seeds": 5,
    "clients": 20,
}


@pytest.mark.parametrize(
    ("difference", "low", "high", "more", "said"),
    [
        (0.021, 0.004, 0.038, {"established": True}, "A is better than B by 2.1 (0.4 to 3.8)"),
        (-0.021, -0.038, -0.004, {"established": True}, "A is worse than B by 2.1 (0.4 to 3.8)"),
        (
            0.011, -0.036, 0.058, {"seeds_needed": 14},
            "A over B: not established: +1.1 (-3.6 to 5.8); about 14 seeds would settle a difference of this size",
        ),
        (
            0.011, -0.036, 0.058, {},
            "A over B: not established: +1.1 (-3.6 to 5.8); more than 1,000 seeds would be needed for a difference of "
            "this size",
        ),
        (
            0.021, 0.001, 0.041, {"seeds_needed": 9, "p_corrected": 0.12},
            "A over B: not established: +2.1 (0.1 to 4.1), p = 0.12 after correction; about 9 seeds would settle a "
            "difference of this size",
        ),
        (
            0.011, None, None, {"seeds": 1},
            "A over B: +1.1 in one seed; 70 % of clients gained; one seed settles nothing about others",
        ),
        (
            0.011, None, None, {"seeds": 3},
            "A over B: +1.1 in each of 3 seeds; seeds that do not differ count as one",
        ),
    ],
)  # fmt: skip
def test_verdicts_in_words(difference, low, high, more, said):
    numbers = {**NUMBERS, "seeds_needed": None, "established": False, **more}
    assert (
        pairs.describe_pair(
            Pair("A", "B", "accuracy", "all", difference, low, high, **numbers), ACCURACY
        )
        == said
    )


@pytest.mark.parametrize(
    ("metric", "difference", "low", "high", "expected"),
    [
        (ACCURACY, 0.0003, 0.0001, 0.0005, ("+0.03", "0.01 to 0.05")),
        (ACCURACY, 0.12, 0.01, 0.23, ("+12.0", "1.0 to 23.0")),
        (LOSS, 123.4, 100.4, 146.4, ("+123", "100 to 146")),
        (ACCURACY, None, None, None, ("–", None)),
        (LOSS, 0.0, None, None, ("+0.0", None)),
    ],
)
def test_a_difference_has_as_many_decimals_as_its_interval_can_tell(
    metric, difference, low, high, expected
):
    numbers = {**NUMBERS, "seeds_needed": None, "established": False}
    assert (
        pairs.format_difference(
            Pair("A", "B", metric.name, "all", difference, low, high, **numbers), metric
        )
        == expected
    )


def test_what_intervals_are_about():
    assert "same clients" in pairs.describe_interval_scope(
        {"data": {"dataset": "table"}}, {0: "Oslo"}
    )
    assert "same split" in pairs.describe_interval_scope(
        {"data": {"dataset": "digits", "fixed_seed": 1}}, {}
    )
    assert "other clients from the same data set" in pairs.describe_interval_scope(
        {"data": {"dataset": "digits"}}, {}
    )
    assert "that it was given" in pairs.describe_interval_scope({"data": {"dataset": "own"}}, {})


def test_a_summary_has_the_pairs(small):
    """Seed 0: DAC - Local is .2 .1 .3 -.1, mean .125; seed 1: .2 .2 .2 0, mean .15. Names are those of the rows."""
    (small / "federation.json").write_text(json.dumps({"clusters": ["upright", "turned"]}))
    stored = json.loads(summary.write_summary(small).read_text())
    assert {field.name for field in fields(Pair)} == FIELDS == set(stored["pairs"][0])
    by = {(pair.metric, pair.cluster): pair for pair in pairs.parse_pairs(stored)}
    assert set(by) == {("accuracy", c) for c in ("upright", "turned", "all", "clusters")} | {
        ("loss", "all")
    }
    pair = by["accuracy", "all"]
    assert (pair.method_a, pair.method_b, pair.seeds, pair.clients) == ("DAC", "Local", 2, 4)
    assert pair.difference == pytest.approx(0.1375)
    assert (pair.gained, pair.lost) == (0.75, 0.125)
    test = stats.ttest_1samp([0.125, 0.15], 0.0)
    assert (pair.p, pair.p_corrected) == (pytest.approx(test.pvalue), pytest.approx(test.pvalue))
    assert by["loss", "all"].difference == pytest.approx(0.1375)


def test_a_summary_that_was_stored_before_has_none():
    assert pairs.parse_pairs({"rows": []}) == []


def test_a_diverged_client_leaves_other_clusters_alone():
    """Of two clusters of two clients, one client of the first has no value: the second is as without it."""
    values = made(A=0.9, B=0.8)
    rows, planted = study(values, [0, 0, 1, 1])
    whole = pairs.compare_pairs(rows, planted, ACCURACY, {0: "a", 1: "b"})
    for bad in (math.nan, math.inf):
        rows["B"][2][0] = bad
        found = pairs.compare_pairs(rows, planted, ACCURACY, {0: "a", 1: "b"})
        assert one(found, "A", "B", "b") == one(whole, "A", "B", "b")
        for cluster in ("a", "all", "clusters"):
            assert one(found, "A", "B", cluster).difference is None


def test_a_method_without_a_mean_is_not_ranked_and_named():
    rows = [
        {"method": "random", "label": label, "cluster": "all", "metric": "accuracy", "mean": mean}
        for label, mean in (("Healthy", 0.7), ("Broken", None))
    ]
    assert pairs.find_leaders(rows, [], ACCURACY, "all") == []
    assert pairs.describe_leaders(rows, [], ACCURACY) == (
        "Broken is not ranked: in some seed a client of it has no finite accuracy (it diverged)."
    )
    rows[1]["undefined"] = True
    assert pairs.describe_leaders(rows, [], ACCURACY) == (
        "Broken is not ranked: in some seed accuracy is undefined."
    )


def test_of_many_planted_clusters_only_the_means_are_compared(monkeypatch):
    """60 clusters of two clients and one unknown client: over clients and over clusters, by numpy."""
    values = made(A=0.8, B=0.75, clients=121)
    clusters = [-1, *np.repeat(np.arange(60), 2).tolist()]
    found = pairs.compare_pairs(*study(values, clusters), ACCURACY, {})
    assert [pair.cluster for pair in found] == ["all", "clusters"]
    difference = values["A"] - values["B"]
    by_cluster = difference[:, 1:].reshape(6, 60, 2).mean(2).mean(1)
    for pair, expected in zip(found, (difference.mean(1), by_cluster), strict=True):
        assert pair.difference == pytest.approx(expected.mean())
        assert pair.p == pytest.approx(stats.ttest_1samp(expected, 0).pvalue)
        assert (pair.gained, pair.lost) == ((difference > 0).mean(), (difference < 0).mean())
        assert pair.clients == 121
    # As if they were few: the same two pairs at the end.
    monkeypatch.setattr(pairs, "MOST_CLUSTERS", 60)
    each = pairs.compare_pairs(*study(values, clusters), ACCURACY, {})
    assert [pair.cluster for pair in each[:-2]] == [str(number) for number in range(60)]
    assert [pair.difference for pair in each[-2:]] == pytest.approx(
        [pair.difference for pair in found]
    )


def test_a_cluster_of_other_seeds_is_no_part_of_the_mean_over_clusters():
    """Cluster 1 is in seed 0 alone; the differences there are .1 and .3, in the other seeds .1 and .2."""
    levels = {"A": [[0.6, 0.8], [0.6, 0.6], [0.7, 0.7]], "B": [[0.5] * 2] * 3}
    values, _ = study(levels)
    planted = {0: pd.Series([0, 1]), 1: pd.Series([0, 0]), 2: pd.Series([0, 0])}
    pair = one(pairs.compare_pairs(values, planted, ACCURACY, {}), "A", "B", "clusters")
    expected = stats.ttest_1samp([0.2, 0.1, 0.2], 0.0)
    assert (pair.difference, pair.p) == pytest.approx((0.5 / 3, expected.pvalue))
    assert (pair.seeds, pair.gained) == (3, 1.0)


def test_a_seed_without_planted_clusters_has_no_mean_over_them():
    """Two seeds remain, as in the rows of a summary, whose means of that seed are over all clients alone."""
    values, _ = study({"A": [[0.6, 0.8]] * 3, "B": [[0.5, 0.5], [0.5, 0.6], [0.1, 0.1]]})
    planted = {0: pd.Series([0, 1]), 1: pd.Series([0, 1]), 2: pd.Series([-1, -1])}
    found = pairs.compare_pairs(values, planted, ACCURACY, {})
    assert one(found, "A", "B", "clusters").difference == pytest.approx((0.2 + 0.15) / 2)
    assert one(found, "A", "B", "clusters").seeds == 2
    assert one(found, "A", "B").seeds == 3


def test_a_mean_over_fewer_clients_does_not_win_over_what_pairs_establish():
    """A has a value for the easy client alone, with which B does better: the mean of B is lower, and B is better."""
    rng = np.random.default_rng(1)
    noise = 0.01 * rng.standard_normal((4, 3))
    values = {
        "A": {s: pd.Series([0.8 + noise[s][0]], index=[1]) for s in range(4)},
        "B": {s: pd.Series([0.3, 0.9 + noise[s][1]]) for s in range(4)},
        "C": {s: pd.Series([0.1, 0.2 + noise[s][2]]) for s in range(4)},
    }
    planted = {s: pd.Series([-1, -1]) for s in range(4)}
    found = pairs.compare_pairs(values, planted, ACCURACY, {})
    assert one(found, "A", "B").method_a == "B"
    assert all(pair.established for pair in found)
    rows = [
        {"method": "own", "label": label, "cluster": "all", "metric": "accuracy",
         "mean": float(np.mean([series.mean() for series in seeds.values()])), "needs": []}
        for label, seeds in values.items()
    ]  # fmt: skip
    assert pairs.find_leaders(rows, found, ACCURACY, "all") == []
    assert pairs.describe_leaders(rows, found, ACCURACY).startswith(
        "No method is shown as the best: A has the best mean, but B is better over the clients"
    )
    # Whichever of them stands first in a pair.
    swapped = [pair.swap_methods() for pair in found]
    assert pairs.find_leaders(rows, swapped, ACCURACY, "all") == []
    assert pairs.find_leaders(rows[1:], swapped, ACCURACY, "all") == ["B"]


def test_all_pairs_of_a_study_are_widened_column_by_column():
    """Each column is corrected by itself; without a share nothing changes."""
    values, planted = study(made(A=0.8, B=0.78, C=0.6), [0, 0, 1, 1])
    found = pairs.compare_pairs(values, planted, ACCURACY, {})
    wider = pairs.widen_intervals(found, 0.2)
    assert [(pair.key, pair.cluster) for pair in wider] == [(p.key, p.cluster) for p in found]
    for cluster in ("0", "1", "all", "clusters"):
        own = [pair for pair in wider if pair.cluster == cluster]
        column = [pair for pair in found if pair.cluster == cluster]
        assert own == pairs.widen_intervals(column, 0.2)
        raw = sorted(pair.p for pair in own)
        assert min(pair.p_corrected for pair in own) == pytest.approx(min(1.0, 3 * raw[0]))
    assert pairs.widen_intervals(found, 0.0) == found
