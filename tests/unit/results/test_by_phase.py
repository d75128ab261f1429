"""Results by phase, worked by hand: two phases of four clients, of which one moves."""

import io
import json
import math
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from coterie.cli._display import _build_phase_table
from coterie.functional.metrics import ACCURACY
from coterie.report.data import build_payload
from coterie.report.page import render_phase_table, render_study_description
from coterie.results import by_phase, stored_runs, summary

CLUSTERS = {0: [0, 0, 1, 1], 4: [0, 1, 1, 1]}
"""From round 4 on, client 1 is of the other cluster."""


def make_metrics(accuracy):
    """Validation in each round, and tests in those that have an accuracy, the same for all clients."""
    found = []
    for number in range(8):
        clusters = CLUSTERS[0 if number < 4 else 4]
        for client, cluster in enumerate(clusters):
            for name in ("accuracy", "loss"):
                found.append((number, client, cluster, "validation", "current", name, 1.0))
            if number in accuracy:
                value = accuracy[number] + 0.1 * (client == 0)
                found.append((number, client, cluster, "test", "current", "accuracy", value))
                found.append((number, client, cluster, "test", "current", "loss", 1.0))
    for client, cluster in enumerate(CLUSTERS[4]):
        found.append((7, client, cluster, "test", "best", "accuracy", 0.9))
        found.append((7, client, cluster, "test", "best", "loss", 0.5))
    return found


EDGES = [
    # Client 1 reads client 0 in each round, and from round 6 on client 2.
    *((number, 1, 0 if number < 6 else 2, "mix", 1.0, 8) for number in range(8)),
    # Client 2 reads client 3, of its own cluster, all the time; a message that is missing counts not.
    *((number, 2, 3, "mix", 1.0, 8) for number in range(8)),
    (5, 3, 0, "missing", 0.0, 0),
]


@pytest.fixture
def runs(tmp_path, write_run):
    tested = {3: 0.8, 4: 0.3, 7: 0.7}
    for seed in (0, 1):
        rows = make_metrics({number: value + 0.1 * seed for number, value in tested.items()})
        folder = tmp_path / "s" / "A" / f"seed-{seed}"
        write_run(folder, kind="random", label="A", seed=seed, metrics=rows, edges=EDGES)
    return stored_runs.load_runs([tmp_path / "s"])[0]


def test_each_phase_has_its_tests_and_its_reads(runs):
    first, second = by_phase.summarize_phases(runs, "accuracy")
    assert (first["first"], first["last"], second["first"], second["last"]) == (0, 3, 4, 7)
    assert (first["moved"], second["moved"]) == (0, 1)
    # A mean over four clients, of which one is 0.1 better, and over two seeds, 0.1 apart.
    assert math.isnan(first["begins"])
    assert first["mean"] == pytest.approx(0.8 + 0.025 + 0.05)
    assert second["begins"] == pytest.approx(0.3 + 0.075)
    assert (second["mean"], second["std"]) == (pytest.approx(0.775), pytest.approx(0.05))
    # All reads are within clusters before; then one of two, until client 1 reads client 2.
    assert first["share"] == second["share_before"] == 1.0
    assert second["share_begins"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert second["share"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert second["recovered"] == [None, None]


def test_reads_have_recovered_after_three_rounds_in_a_row():
    share = pd.Series([1.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0])
    assert by_phase.find_recovery(share, 1.0, first=1, last=6) == 5
    assert by_phase.find_recovery(share, 0.5, first=1, last=6) == 3
    assert math.isnan(by_phase.find_recovery(share, 1.0, first=1, last=4))
    # Shares of the phase before do not count, and neither does a method without reads.
    assert by_phase.find_recovery(pd.Series([1.0] * 6), 1.0, first=3, last=5) == 3
    assert math.isnan(by_phase.find_recovery(pd.Series(dtype=float), math.nan, first=1, last=6))


def test_of_methods_that_find_groups_pairs_of_one_model_are_counted(tmp_path, write_run):
    """Pairs by hand: two groups of two, then one of three and one alone; in round 7 nobody shares a model."""
    groups = [[5, 5, 2, 2]] * 4 + [[5, 5, 5, 2]] * 3 + [[0, 1, 2, 3]]
    rows = make_metrics({3: 0.8, 7: 0.7})
    for number, labels in enumerate(groups):
        for client, label in enumerate(labels):
            cluster = CLUSTERS[0 if number < 4 else 4][client]
            rows.append((number, client, cluster, "train", "current", "label", float(label)))
    # Who takes no part in a round has no group in it.
    rows.append((2, 3, 1, "train", "current", "label", math.nan))
    write_run(tmp_path / "s" / "A" / "seed-0", kind="ifca", label="A", seed=0, metrics=rows)
    (run,), _ = stored_runs.load_runs([tmp_path / "s"])
    first, second = by_phase.summarize_phases([run], "accuracy")
    assert first["share"] == second["share_before"] == 1.0
    # Of the pairs 0-1, 0-2 and 1-2 the last one is of a cluster.
    assert second["share_begins"] == second["share"] == pytest.approx(1 / 3)
    assert second["recovered"] == [None]


def test_a_run_whose_data_stay_has_no_phases(small):
    content = summary.summarize_study(small)
    assert "phases" not in content
    assert by_phase.summarize_phases(stored_runs.load_runs([small])[0], "accuracy") == []


def test_rows_of_the_table(runs):
    content = summary.replace_nonfinite(summary.summarize_study(runs[0].folder.parent.parent))
    found = by_phase.build_phase_rows(content["phases"], ACCURACY)
    assert found == [
        ("A", "0 to 3", "–", "–", "87.5 ±5.0", "100 → 100 (33)", "–"),
        ("A", "4 to 7", "1", "37.5", "77.5 ±5.0", "100 → 67 → 83 (50)", "no"),
    ]
    # Of three others one is of the cluster; later two, and none for the client that is alone.
    assert [row["chance"] for row in content["phases"]] == [pytest.approx(1 / 3), 0.5]
    some = [{**content["phases"][1], "recovered": [4, None]}]
    assert by_phase.build_phase_rows(some, ACCURACY)[0][-1] == "4 rounds (1 of 2 seeds)"
    # A third of random reads were of the own cluster in the phase before.
    for before, said in (
        (0.41, "at chance"),
        (0.42, "4 rounds (1 of 2 seeds)"),
        (None, "4 rounds (1 of 2 seeds)"),
    ):
        later = {**some[0], "share_before": before}
        assert by_phase.build_phase_rows([content["phases"][0], later], ACCURACY)[1][-1] == said


def test_the_terminal_and_the_page_show_the_table(runs):
    content = summary.replace_nonfinite(summary.summarize_study(runs[0].folder.parent.parent))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(_build_phase_table(content["phases"], ACCURACY))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == [
        "A", "4", "to", "7", "1", "37.5", "77.5", "±5.0", "100", "→", "67", "→", "83", "(50)", "no",
    ]  # fmt: skip
    page = render_phase_table(content["phases"], ACCURACY)
    assert page.count("<tr>") == 3
    assert "<td>100 → 67 → 83 (50)</td>" in page
    drift = [{"kind": "move", "at": 4, "clients": [1]}]
    words = render_study_description({"data": {"drift": drift}}, build_payload(runs))
    assert "<dt>Drift</dt><dd>move: at 4, clients 1</dd>" in words
    evil = [{**content["phases"][0], "label": "<b>"}]
    assert "&lt;b&gt;" in render_phase_table(evil, ACCURACY)


def test_the_guide_has_the_numbers_of_the_stored_run():
    root = Path(__file__).parents[3] / "docs"
    page = (root / "how-to/drift.md").read_text("utf-8")
    stored = json.loads((root / "reference/runs/drift/move/summary.json").read_text("utf-8"))
    found = [by_phase.HEAD, *by_phase.build_phase_rows(stored["phases"], ACCURACY)]
    assert len(found) == 25
    for row in found:
        assert f"| {' | '.join(row)} |" in page
    (dac,) = (row for row in stored["phases"] if (row["label"], row["phase"]) == ("DAC", 1))
    shares = [round(100 * dac[name]) for name in ("share_before", "share_begins", "share")]
    assert shares == [61, 34, 52]
    other = json.loads((root / "reference/runs/drift/new-clusters/summary.json").read_text("utf-8"))
    later = by_phase.build_phase_rows(other["phases"], ACCURACY)[1::2]
    assert len(later) == 12
    for row in later:
        assert f"| {' | '.join(row)} |" in page
    rows = {(row["label"], row["phase"]): row for row in other["phases"]}
    ends = [rows[name, 1]["mean"] for name in ("IFCA", "FedAvg", "FedDrift", "PANM")]
    words = (
        "it falls from {:.1f} to {:.1f} %, and ends at {:.1f} %. One model for all, FedAvg, ends at {:.1f} %. FedDrift gives\n"
        "clients whose loss rises models of their own, and ends at {:.1f} %, near DAC, PENS and Random. PANM ends at {:.1f} %."
    )
    falls = rows["IFCA", 0]["mean"], rows["IFCA", 1]["begins"]
    assert words.format(*(100 * value for value in (*falls, *ends))) in page
    near = [abs(rows[name, 1]["mean"] - ends[2]) for name in ("DAC", "PENS", "Random")]
    assert max(near) < 0.015
