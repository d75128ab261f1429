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


def test_every_method_ran_in_every_way_at_every_speed():
    """Local has no deadline: nobody waits for it."""
    stored = json.loads((ROOT / "docs/reference/runs/waiting/stragglers.json").read_text())
    cells = [
        (row["study"], row["times slower"], row["method"], row["way"]) for row in stored["results"]
    ]
    # Of digits and hospitals six methods, of CIFAR-10 five (without PENS).
    assert len(cells) == len(set(cells)) == 4 * (2 * (2 * 6 - 1) + 2 * 5 - 1)
    for row in stored["results"]:
        seconds = 30 if row["study"] == "stragglers/cifar10" else 60
        assert row["seconds"] == seconds
        assert row["rounds that wait"] == seconds / row["times slower"]
        assert row["difference"] == pytest.approx(row["value"] - row["in step"])
        if row["way"] == "deadline" and row["times slower"] == 1:
            assert row["difference"] == 0, "nobody was late"


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
        rows.append({"study": "stragglers/digits", "times slower": 5, "method": method, "way": "no waiting", "low": low, "high": high})  # fmt: skip
    late = {"study": "stragglers/digits", "times slower": 5, "method": "DAC", "way": "deadline", "low": -0.1, "high": 0.1}  # fmt: skip
    first, second = made["draw_lessons"]([*rows, late]).split("\n")
    said = "Not waiting: better for DAC and PENS; worse for Local; not distinguished for Ditto"
    assert first.endswith(f"{said}.")
    assert second.endswith("second: no difference from waiting is shown for any method.")
