"""Methods at equal bytes: which model is scored on which data, in which order, over which seeds."""

import json
import math

import pandas as pd
import pytest

from coterie._util import manifest
from coterie.errors import DataError
from coterie.results import summary
from coterie.results.equal_budget import rank_at_equal_budget
from coterie.runtime.record import EDGE_COLUMNS

BOTH = ("validation", "test")


def write_run(
    folder, label, validation, test=(), *, per_round=0, seed=0, evaluate="best_val", **more
):
    """A run of two clients that each receive `per_round` bytes a round, with the same values at both.

    `validation` and `test` are accuracies of the newest models by round; the loss is 1 - accuracy,
    unless `loss` gives the losses on validation data by round. The result of the run is `final`,
    else the test in the round with the lowest loss.
    """
    folder = folder / label / f"seed-{seed}"
    folder.mkdir(parents=True)
    text = (
        f'name = "bytes"\nseeds = [{seed}]\nevaluate = "{evaluate}"\n[[methods]]\nkind = "random"\n'
    )
    (folder / "config.toml").write_text(f'{text}label = "{label}"\n')
    (folder / "provenance.json").write_text(json.dumps({"done": True}))
    metrics, edges, last = [], [], len(validation) - 1
    loss = more.get("loss", [1 - value for value in validation])
    for client in (0, 1):
        head = {"client": client, "cluster": 0}
        for split, values in zip(BOTH, (validation, test), strict=True):
            for number, value in enumerate(values):
                row = head | {"round": number, "split": split, "model": "current"}
                if more.get("classes", True):
                    metrics.append(row | {"metric": "accuracy", "value": value})
                metrics.append(
                    row
                    | {
                        "metric": "loss",
                        "value": loss[number] if split == "validation" else 1 - value,
                    }
                )
        final = head | {
            "round": last,
            "split": "test",
            "model": "best" if evaluate == "best_val" else "current",
        }
        if evaluate == "best_val" or not len(test):
            value = more.get("final", test[loss.index(min(loss))] if len(test) else 0.5)
            metrics += [final | {"metric": "accuracy", "value": value}] * more.get("classes", True)
            metrics.append(final | {"metric": "loss", "value": 1 - value})
        for number in range(last + 1):
            row = head | {"round": number, "split": "train", "model": "current"}
            served = zip(
                ("extra_bytes", "bytes_down", "bytes_up"),
                more.get("counted", (0, 0, 0)),
                strict=True,
            )
            metrics += [row | {"metric": name, "value": size} for name, size in served if size]
            if per_round:
                edges.append((number, client, 1 - client, "mix", 0.5, per_round))
    pd.DataFrame(metrics).to_parquet(folder / "metrics.parquet")
    pd.DataFrame(edges, columns=EDGE_COLUMNS).to_parquet(folder / "edges.parquet")
    manifest.replace_files(folder, {path.name: path.read_bytes() for path in folder.iterdir()})
    return folder


def told(ranking):
    return [(row.label, row.rounds, row.used, pytest.approx(row.value)) for row in ranking.rows]


def test_methods_are_ranked_when_they_have_received_the_same(tmp_path):
    """Thrifty has 4 x 10 bytes in all; by then the dear one, of 10 + 10 bytes a round, has had two rounds.

    Rounds were not tested, so each model is the newest one: the best of four on validation data
    would be scored on the data that chose it (0.6 of the one that is alone).
    """
    write_run(tmp_path, "thrifty", [0.1, 0.3, 0.6, 0.5], per_round=10)
    write_run(tmp_path, "dear", [0.2, 0.4, 0.8, 0.9], per_round=10, counted=(10, 0, 0))
    write_run(tmp_path, "alone", [0.3, 0.6, 0.1, 0.1])
    found = rank_at_equal_budget(tmp_path)
    assert (found.budget, found.split, found.model, found.metric) == (
        40,
        "validation",
        "current",
        "accuracy",
    )
    assert told(found) == [("thrifty", 4, 40, 0.5), ("dear", 2, 40, 0.4), ("alone", 4, 0, 0.1)]
    assert found.heading == "validation accuracy in % of the newest models"
    assert "not tested" in found.describe_coverage()[-1]


def test_the_best_model_is_chosen_on_validation_data_and_scored_on_test_data(tmp_path):
    """Three rounds of A are within the 30 bytes of the thrifty one.

    Of those, validation is best in round 1 (0.9), where the test says 0.6; in round 2 it says 0.8,
    and nobody knows.
    """
    write_run(tmp_path, "A", [0.1, 0.9, 0.7, 0.95], [0.1, 0.6, 0.8, 0.3], per_round=10)
    write_run(tmp_path, "thrifty", [0.1, 0.1], [0.2, 0.2], per_round=15)
    found = rank_at_equal_budget(tmp_path)
    assert (found.split, found.model) == ("test", "best")
    assert told(found) == [("A", 3, 30, 0.6), ("thrifty", 2, 30, 0.2)]
    assert found.heading == "test accuracy in % of each client's best model by validation"
    assert found.describe_coverage() == []


def test_a_whole_run_has_the_number_of_the_final_evaluation(tmp_path):
    """One name, one number: with every round tested, what is within the budget as a whole is what the summary says."""
    write_run(tmp_path, "A", [0.1, 0.9, 0.7, 0.2], [0.1, 0.6, 0.8, 0.3], per_round=10, final=0.6)
    write_run(tmp_path, "B", [0.5, 0.4], [0.25, 0.7], final=0.25)
    rows = {
        row["label"]: row["mean"]
        for row in summary.summarize_study(tmp_path)["rows"]
        if row["metric"] == "accuracy"
    }
    assert {row.label: row.value for row in rank_at_equal_budget(tmp_path).rows} == pytest.approx(
        rows
    )
    assert rows == {"A": 0.6, "B": 0.25}


def test_later_rounds_than_the_budget_choose_nothing(tmp_path):
    """The dear one has had two rounds of four when the bytes are used: its best validation is in round 0 of them."""
    write_run(tmp_path, "thrifty", [0.1, 0.2], [0.3, 0.4], per_round=20)
    write_run(tmp_path, "dear", [0.5, 0.4, 0.9, 0.9], [0.7, 0.1, 0.9, 0.9], per_round=20)
    assert told(rank_at_equal_budget(tmp_path)) == [("dear", 2, 40, 0.7), ("thrifty", 2, 40, 0.4)]


def test_where_the_last_model_is_evaluated_in_the_end_it_is_evaluated_here(tmp_path):
    """`evaluate = "final"`: the newest model, whatever validation says."""
    write_run(tmp_path, "A", [0.9, 0.2], [0.8, 0.3], per_round=10, evaluate="final")
    found = rank_at_equal_budget(tmp_path)
    assert (found.model, found.split) == ("current", "test")
    assert told(found) == [("A", 2, 20, 0.3)]


def test_of_losses_the_lowest_comes_first(tmp_path):
    """Regression: a loss of 0.2 is better than one of 0.7, and what has no value is last."""
    write_run(tmp_path, "high", [0.3, 0.3], [0.3, 0.3], per_round=10, classes=False)
    write_run(tmp_path, "low", [0.8, 0.8], [0.8, 0.8], per_round=10, classes=False)
    write_run(
        tmp_path, "none", [0.8, 0.8], [0.8, math.nan], per_round=10, classes=False, loss=[0.5, 0.2]
    )
    found = rank_at_equal_budget(tmp_path)
    assert found.metric == "loss"
    assert told(found)[:2] == [("low", 2, 20, 0.2), ("high", 2, 20, 0.7)]
    assert found.rows[2].label == "none"
    assert math.isnan(found.rows[2].value), (
        "its model of round 1 was chosen, and diverged on the test"
    )


def test_what_goes_to_and_from_a_server_is_counted(tmp_path):
    """A server's client receives 6 and sends 4 bytes a round: as much as one that reads 10 from peers."""
    write_run(tmp_path, "peers", [0.1, 0.3], per_round=10)
    write_run(tmp_path, "server", [0.2, 0.4, 0.8, 0.9], counted=(0, 6, 4))
    found = rank_at_equal_budget(tmp_path)
    assert found.budget == 20
    assert [(row.label, row.rounds, row.used) for row in found.rows] == [
        ("server", 2, 20),
        ("peers", 2, 20),
    ]


def test_the_seeds_are_those_that_all_have(tmp_path):
    """A has seeds 0 and 1 (0.2 and 0.6), B seed 1 alone (0.5): compared is seed 1, and A's seed 0 is named."""
    write_run(tmp_path, "A", [0.2, 0.2], [0.2, 0.2], per_round=10, seed=0)
    write_run(tmp_path, "A", [0.6, 0.6], [0.6, 0.6], per_round=10, seed=1)
    write_run(tmp_path, "B", [0.5, 0.5], [0.5, 0.5], per_round=10, seed=1)
    found = rank_at_equal_budget(tmp_path)
    assert [(row.label, row.value, row.std, row.seeds) for row in found.rows] == [
        ("A", 0.6, None, 1), ("B", 0.5, None, 1)
    ]  # fmt: skip
    assert found.describe_coverage() == [
        "Means are over the seeds that all have: 1; left out: A 0."
    ]


# ---------------------------------------------------------------- equal time


def put_on_time(folder, seconds):
    """Give a run that was written rounds that last so many seconds each."""
    table = pd.read_parquet(folder / "metrics.parquet")
    rows = table[(table["split"] == "validation") & (table["metric"] == "loss")].copy()
    rows["split"], rows["metric"] = "train", "elapsed_seconds"
    rows["value"] = [sum(seconds[: number + 1]) for number in rows["round"]]
    whole = pd.concat([table, rows], ignore_index=True)
    whole.to_parquet(folder / "metrics.parquet")
    name = "metrics.parquet"
    manifest.replace_files(folder, {name: (folder / name).read_bytes()})


def test_methods_are_ranked_after_the_same_time(tmp_path):
    """The quick one is over after 4 s; by then the slow one, whose rounds last 2 and 3 s, has had one."""
    put_on_time(write_run(tmp_path, "quick", [0.1, 0.3, 0.6, 0.5]), [1, 1, 1, 1])
    put_on_time(write_run(tmp_path, "slow", [0.2, 0.9]), [2, 3])
    found = rank_at_equal_budget(tmp_path, unit="seconds")
    assert (found.unit, found.budget) == ("seconds", 4)
    assert told(found) == [("quick", 4, 4, 0.5), ("slow", 1, 2, 0.2)]
    later = rank_at_equal_budget(tmp_path, 5.0, unit="seconds")
    assert told(later) == [("slow", 2, 5, 0.9), ("quick", 4, 4, 0.5)]
    early = rank_at_equal_budget(tmp_path, 1.5, unit="seconds")
    assert told(early)[0] == ("quick", 1, 1, 0.1)
    assert math.isnan(early.rows[1].value)
    assert early.pairs == [], "of what is not measured there is no difference"


def test_methods_are_paired_at_equal_time_by_seed(tmp_path):
    """At 4 s the quick one is better by 0.3, 0.2 and 0.4: Student's interval of these, by hand."""
    for seed, value in enumerate((0.5, 0.4, 0.6)):
        put_on_time(write_run(tmp_path, "quick", [0.1, value], seed=seed), [2, 2])
        put_on_time(write_run(tmp_path, "slow", [0.2, 0.9], seed=seed), [3, 3])
    (pair,) = rank_at_equal_budget(tmp_path, unit="seconds").pairs
    assert (pair.method_a, pair.method_b, pair.seeds) == ("quick", "slow", 3)
    assert pair.difference == pytest.approx(0.3)
    # 4.3027 is Student's quantile for two degrees of freedom, 0.1 the deviation of the three
    assert pair.high - pair.low == pytest.approx(2 * 4.3027 * 0.1 / 3**0.5, rel=1e-4)
    (pair,) = rank_at_equal_budget(tmp_path, unit="seconds", baseline="quick").pairs
    assert (pair.method_a, pair.difference) == ("slow", pytest.approx(-0.3))


def test_runs_without_times_are_not_ranked_by_time(tmp_path):
    write_run(tmp_path, "A", [0.1, 0.2])
    with pytest.raises(DataError, match="has no times"):
        rank_at_equal_budget(tmp_path, unit="seconds")


def test_methods_with_different_losses_are_not_ranked_by_these(tmp_path):
    """Half of a loss is no better: the methods stay in their order, without pairs, and a line says why."""
    for label, loss, kind in (("first", [0.9, 0.8], "a:whole"), ("second", [0.5, 0.4], "a:half")):
        for seed in (0, 1):
            write_run(
                tmp_path, label, [0.5, 0.5], per_round=10, seed=seed, classes=False, loss=loss
            )
            config = tmp_path / label / f"seed-{seed}" / "config.toml"
            manifest.replace_files(
                config.parent, {"config.toml": f'{config.read_text()}loss = "{kind}"\n'.encode()}
            )
    ranking = rank_at_equal_budget(tmp_path)
    assert ranking.metric == "loss"
    assert [(row.label, row.value) for row in ranking.rows] == [("first", 0.8), ("second", 0.4)]
    assert not ranking.pairs
    assert "each in a unit of its own" in ranking.verdicts[0]
