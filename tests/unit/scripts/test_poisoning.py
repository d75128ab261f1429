"""The page on poisoning is that of the stored runs."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made():
    return runpy.run_path(str(ROOT / "scripts/poisoning.py"))


def test_the_page_is_that_of_the_stored_runs(made):
    assert (ROOT / "docs/reference/poisoning.md").read_text("utf-8") == made["page"](), (
        "run make docs"
    )


def test_every_cell_was_measured_with_and_without_acceptance():
    """Each method without attackers, and under six attacks by two shares of the clients."""
    stored = {
        path.stem: json.loads(path.read_text())
        for path in (ROOT / "docs/reference/runs").glob("poisoning*.json")
    }
    for one in stored.values():
        cells = [
            (row["method"], row["attack"], row["attackers"], row["acceptance"], row["seed"])
            for row in one["results"]
        ]
        config = one["origin"]["config"]
        assert (
            len(cells)
            == len(set(cells))
            == len(config["methods"]) * len(config["seeds"]) * 2 * (1 + 2 * 6)
        )


def test_points_lost_are_against_the_method_without_attackers_and_acceptance(made):
    """Two methods that lose 10 and 30 points, and 2 and -4 with acceptance: on average 20 and -1, at worst 30 and 2."""

    def row(method, attackers, acceptance, accuracy):
        attack = "noise" if attackers else "none"
        return {
            "method": method, "attack": attack, "attackers": attackers, "acceptance": acceptance, "accuracy": accuracy,
            "seed": 1,
        }  # fmt: skip

    rows = [
        *(
            row("a", 0, False, 0.9),
            row("a", 0, True, 0.5),
            row("a", 0.3, False, 0.8),
            row("a", 0.3, True, 0.88),
        ),
        *(
            row("b", 0, False, 0.8),
            row("b", 0, True, 0.5),
            row("b", 0.3, False, 0.5),
            row("b", 0.3, True, 0.84),
        ),
    ]
    assert "| noise, 30% | 20.0 -> -1.0 | 30.0 -> 2.0 |" in made["reading"](rows)


@pytest.fixture(scope="module")
def aggregations():
    return json.loads((ROOT / "docs/reference/runs/aggregations.json").read_text())


def test_every_rule_was_measured_under_every_attack_and_with_every_seed(aggregations):
    """Two methods with a server and two without, seven defenses, seven attacks and none."""
    names = ("method", "attack", "attackers", "aggregation", "acceptance", "seed")
    cells = [tuple(row[name] for name in names) for row in aggregations["results"]]
    assert len(cells) == len(set(cells)) == 4 * 7 * 8 * len(aggregations["origin"]["seeds"])
    assert {"fedavg", "dac"} < {cell[0] for cell in cells}


def test_what_the_page_says_of_the_rules_holds(aggregations):
    """Rules refuse nothing; a server's tests see neither "a little" nor labels; of four models two rules are one."""
    names = ("method", "attack", "attackers", "seed", "aggregation", "acceptance")
    rows = {tuple(row[name] for name in names): row for row in aggregations["results"]}
    refused = "refused share of reads"
    for (method, attack, share, seed, rule, accepts), row in rows.items():
        same = None
        if not accepts:
            assert row[refused] == 0
        elif method in ("fedavg", "ifca") and attack in ("a-little-is-enough", "label-flip"):
            assert row[refused] == 0
            same = ("mean", False)
        if method in ("random", "dac") and rule == "trimmed-mean":
            same = ("median", False)
        if same is not None:
            assert row["accuracy"] == rows[method, attack, share, seed, *same]["accuracy"]


def make_rows(values, *, attack="noise", attackers=0.3, aggregation="mean", acceptance=False):
    return [
        {
            "method": "a", "attack": attack, "attackers": attackers, "aggregation": aggregation,
            "acceptance": acceptance, "accuracy": value, "refused share of reads": value / 2,
        }
        for value in values
    ]  # fmt: skip


def test_tables_of_rules_have_means_and_deviations_over_seeds(made):
    """50, 60 and 70 %: 60, and a sample deviation of 10. No attack may leave more than there was without any."""
    rows = [
        *make_rows([0.9, 0.9, 0.9], attack="none", attackers=0),
        *make_rows([0.5, 0.6, 0.7]),
        *make_rows([0.7, 0.7, 0.7], attack="none", attackers=0, aggregation="krum"),
        *make_rows([0.8, 0.8, 0.8], aggregation="krum"),
        *make_rows([0.9, 0.9, 0.9], attack="none", attackers=0, acceptance=True),
        *make_rows([0.88, 0.88, 0.88], acceptance=True),
    ]
    table = made["rules_of_method"](rows, "a")
    assert "| none | 90 ± 0 | 70 ± 0 | 90 ± 0 |" in table
    assert "| noise, 30% | 60 ± 10 | 80 ± 0 | 88 ± 0 |" in table
    short = made["rules_in_short"](rows)
    assert "| mean | 90 -> 60 (noise, 30%) |" in short
    assert "| krum | 70 -> 80 (noise, 30%) |" in short
    assert "| noise, 30% | 44 |" in made["refused_by_acceptance"](rows)
