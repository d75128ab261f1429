"""Total participation, time to accuracy and reasons, by hand on made-up tables; and how they are shown."""

import io
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from coterie.cli import _display
from coterie.methods import METHODS
from coterie.results import summary
from coterie.results.stored_runs import StoredRun
from coterie.runtime.record import EDGE_COLUMNS, METRIC_COLUMNS
from coterie.studies.definition import make_study
from coterie.studies.run import Study


def run(
    kind: str,
    accuracy: dict[int, tuple[float, float]],
    *,
    seed: int = 0,
    trained: int = 0,
    label: str = "",
    **provenance: Any,
):
    """A finished run of two clients with these test accuracies, and so many rows of local training."""
    rows = [
        (t, c, -1, "test", "current", "accuracy", v)
        for t, pair in accuracy.items()
        for c, v in enumerate(pair)
    ]
    rows += [
        (-1, 0, -1, "train", "current", "loss", 1.0),
        (0, 0, -1, "train", "current", "bytes_up", 8.0),
    ]
    rows += [(t, 0, -1, "train", "current", "loss", 1.0) for t in range(trained)]
    table = pd.DataFrame(rows, columns=METRIC_COLUMNS)
    config = {"methods": [{"kind": kind, "label": label or kind}]}
    return StoredRun(
        Path(f"seed-{seed}"), config, provenance, table, pd.DataFrame(columns=EDGE_COLUMNS)
    )


BASE = {9: (0.2, 0.4), 19: (0.5, 0.7), 29: (0.4, 0.6)}  # means 0.3, 0.6, 0.5: the best in round 19


def test_total_participation_counts_local_trainings():
    """Rounds in which a client trained; neither the warm-up nor other reports."""
    assert summary.list_participation([run("fedavg", BASE, trained=7)]) == [
        {"label": "fedavg", "seed": 0, "client_rounds": 7}
    ]


def test_mean_rounds_are_over_clients_and_runs():
    runs = [run("fedavg", BASE, trained=7), run("fedavg", BASE, seed=1, trained=4)]
    assert summary.compute_mean_rounds(runs) == (7 + 4) / (2 * 2)  # two clients each


def test_time_to_accuracy_by_hand():
    """0.6 in round 9 against 19: 19/9 times sooner; in another seed never: 0, and one of two reached."""
    runs = [
        run("fedavg", BASE),
        run("fedavg", BASE, seed=1),
        run("sosicfl", {9: (0.6, 0.6), 19: (0.1, 0.1)}),
        run("sosicfl", {9: (0.5, 0.6), 19: (0.1, 0.1)}, seed=1),
    ]
    (row,) = summary.compute_time_to_accuracy(runs)
    assert (row["label"], row["base"], row["metric"]) == ("sosicfl", "fedavg", "accuracy")
    assert row["ratio"] == pytest.approx(19 / 9 / 2)
    assert (row["seeds"], row["reached"], row["tta"], row["reason"]) == (2, 1, 9.0, "")


def test_rounds_of_different_length_are_timed_in_seconds():
    """FedAvg is at 0.6 after 20 rounds of 10 s, IFCA after 30 of 1 s: 1.5 times the rounds, 200 / 30 sooner."""
    slow = run("fedavg", BASE, timing={"ends": [5.0 + 10 * n for n in range(31)]})
    quick = run("ifca", {9: (0.1, 0.1), 29: (0.6, 0.7)})
    assert "seconds" not in summary.compute_time_to_accuracy([slow, quick])[0]
    ends = [100.0, *[None] * 9, *(110.0 + n for n in range(21))]
    timed = run("ifca", {9: (0.1, 0.1), 29: (0.6, 0.7)}, timing={"ends": ends})
    (row,) = summary.compute_time_to_accuracy([slow, timed])
    assert (row["tta"], row["ratio"]) == (29.0, pytest.approx(19 / 29))
    assert (row["seconds"], row["seconds_ratio"]) == (30.0, pytest.approx(200 / 30))


def test_sosicfl_plus_is_timed_against_ditto():
    """Ditto's best mean is 0.3 in round 9, reached at once; Ditto itself is timed against FedAvg, and never arrives."""
    ditto = run("ditto", {9: (0.3, 0.3), 19: (0.2, 0.2)})
    rows = summary.compute_time_to_accuracy([run("fedavg", BASE), ditto, run("sosicfl-plus", BASE)])
    found = {row["label"]: row for row in rows}
    assert (found["sosicfl-plus"]["base"], found["sosicfl-plus"]["ratio"]) == ("ditto", 1.0)
    assert (found["ditto"]["ratio"], found["ditto"]["reached"], found["ditto"]["tta"]) == (
        0.0,
        0,
        math.inf,
    )


def test_of_two_baselines_the_first_of_the_study_counts():
    """Another rate of FedAvg, added at the end, never gets to 0.6: what others took is of the first all the same."""
    other = run("fedavg", {9: (0.2, 0.2), 19: (0.3, 0.3)}, label="FedAvg, lr=1")
    rows = summary.compute_time_to_accuracy([run("fedavg", BASE), run("ifca", BASE), other])
    assert {row["label"]: row["base"] for row in rows} == {
        "ifca": "fedavg",
        "FedAvg, lr=1": "fedavg",
    }
    assert {row["label"]: row["reached"] for row in rows} == {"ifca": 1, "FedAvg, lr=1": 0}


def test_a_method_of_another_package_is_timed_against_what_it_declared_when_it_ran():
    """Its class is not here: the run's provenance says "ditto"."""
    mine = run("ring", BASE, timed_against="ditto")
    rows = summary.compute_time_to_accuracy([run("fedavg", BASE), run("ditto", BASE), mine])
    assert {row["label"]: row["base"] for row in rows} == {"ring": "ditto", "ditto": "fedavg"}


def test_no_ratio_has_a_reason():
    """Who is there in round 0 has no ratio; without evaluations, or without the baseline, there is no row at all."""
    (row,) = summary.compute_time_to_accuracy([run("fedavg", BASE), run("ifca", {0: (0.9, 0.9)})])
    assert math.isnan(row["ratio"])
    assert "round 0" in row["reason"]
    assert summary.compute_time_to_accuracy([run("fedavg", BASE), run("ifca", {})]) == []
    assert summary.compute_time_to_accuracy([run("ifca", BASE)]) == []


def test_reasons_are_told_once():
    """Two seeds with the same reason are one line."""
    runs = [
        run("cfl", BASE, seed=s, undefined={"was": "WAS is undefined: one cluster"})
        for s in range(2)
    ]
    assert summary.list_undefined_metrics(runs) == [
        {"label": "cfl", "metric": "was", "reason": "WAS is undefined: one cluster"}
    ]


def test_what_the_command_line_shows():
    """Metrics in short, the reason beside what is undefined, times and participation; nothing without a server."""
    rows = [
        {
            "method": "cfl",
            "label": "CFL",
            "cluster": "all",
            "metric": metric,
            "mean": mean,
            "std": 0.0,
            "seeds": 1,
        }
        for metric, mean in (
            ("accuracy", 0.5),
            ("accuracy_max", 0.625),
            ("n_clusters", 1.0),
            ("was", None),
        )
    ]
    summary = {
        "rows": rows,
        "undefined": [{"label": "CFL", "metric": "was", "reason": "WAS is undefined: one cluster"}],
        "time_to_accuracy": [{"label": "CFL", "base": "FedAvg", "metric": "accuracy", "ratio": 0.0, "std": 0.0,
                              "seeds": 1, "reached": 0, "tta": None, "reason": ""},
                             {"label": "CFL", "base": "FedAvg", "metric": "global_accuracy", "ratio": None, "std": 0.0,
                              "seeds": 1, "reached": 1, "tta": 0.0, "reason": "no ratio: it was there in round 0"}],
        "participation": [{"label": "CFL", "seed": seed, "client_rounds": 100 + seed} for seed in (0, 2)],
    }  # fmt: skip

    def shown(kind: str) -> str:
        study = Study(Path(), make_study([METHODS[kind]()]), summary, {}, METHODS[kind].server)
        out = io.StringIO()
        _display.print_round_results(study, Console(file=out, width=80))
        return out.getvalue()

    text = [" ".join(line.split()) for line in shown("cfl").splitlines()]
    assert "n max, % clusters WAS" in text
    assert "CFL 1 62.5 1 undefined" in text
    assert "CFL: WAS is undefined: one cluster" in text
    assert "CFL FedAvg accuracy never 0.00 0 of 1" in text
    assert "CFL FedAvg global accuracy 0 undefined 1 of 1" in text
    assert "CFL: no ratio: it was there in round 0" in text
    assert text[-1] == "CFL 101"
    assert "participation" not in shown("dac")
