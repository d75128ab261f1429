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
