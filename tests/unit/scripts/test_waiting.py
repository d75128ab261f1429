"""The page on waiting for slow clients is that of the stored runs, and says of each cell what its interval says."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made():
    return runpy.run_path(str(ROOT / "scripts/waiting.py"))


def test_the_page_is_that_of_the_stored_runs(made):
    page = ROOT / "docs/explanation/when-to-wait.md"
    assert page.read_text("utf-8") == made["page"](), "run make docs"


def test_every_method_ran_both_ways_at_every_speed():
    stored = json.loads((ROOT / "docs/reference/runs/waiting/stragglers.json").read_text())
    cells = [(row["study"], row["times slower"], row["method"]) for row in stored["results"]]
    assert len(cells) == len(set(cells)) == 2 * 4 * 6
    for row in stored["results"]:
        assert row["rounds that wait"] == 60 / row["times slower"]
        assert row["difference"] == pytest.approx(row["no waiting"] - row["in step"])


def test_a_cell_has_its_interval_and_is_bold_by_the_side_of_zero(made):
    def row(low, high):
        return {"method": "A", "difference": 0.1, "low": low, "high": high}

    show, side = made["show_difference"], made["side_of_zero"]
    assert show(row(0.05, 0.15)) == "+10.0 [+5.0, +15.0]"
    assert show(row(-0.05, 0.25)) == "+10.0 [-5.0, +25.0]"
    assert [side(row(*ends)) for ends in ((0.1, 0.2), (-0.2, -0.1), (0.0, 0.1), (-0.1, 0.1))] == [
        1,
        -1,
        0,
        0,
    ]
    assert side(row(None, None)) == 0


def test_lessons_name_each_method_once(made):
    rows = []
    for method, low, high in (
        ("PENS", 0.1, 0.2),
        ("DAC", 0.1, 0.3),
        ("Local", -0.2, -0.1),
        ("Ditto", -0.1, 0.1),
    ):
        rows.append({"study": "stragglers/digits", "times slower": 5, "method": method, "low": low, "high": high})  # fmt: skip
    line = made["draw_lessons"](rows).split("\n")[0]
    said = "not waiting is better for DAC and PENS; waiting is better for Local; not distinguished for Ditto"
    assert line.endswith(f"{said}.")
