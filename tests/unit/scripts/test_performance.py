"""The page on speed is the one that the stored measurements make."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def made():
    """The script's names."""
    return runpy.run_path(str(ROOT / "scripts/performance.py"))


def test_the_page_is_up_to_date(made):
    assert (ROOT / "docs/reference/performance.md").read_text() == made["page"](), "run make docs"


def test_a_measurement_is_a_section_with_a_column_for_each_key(made, tmp_path):
    rows = [{"peers": 5, "median_ms": 1234.5}, {"peers": 20, "share": 0.12345, "kept": True}]
    head = {
        "command": "measure it",
        "machine": {"cores": 2},
        "commit": "0123456789abc",
        "made": "2026-01-01",
    }
    content = {"origin": {**head, "version": "0.1", "dirty": False}, "results": rows}
    (tmp_path / "links.json").write_text(json.dumps(content))
    (tmp_path / "links.md").write_text("## Links\n\nWhat was measured.\n")
    assert made["section"](tmp_path / "links.json") == (
        "## Links\n\nWhat was measured.\n\n```console\n$ measure it\n```\n\nMeasured with cores 2. "
        "Commit `012345678` of 2026-01-01, version 0.1.\n\n"
        "| peers | median ms | share | kept |\n| --- | ---: | ---: | ---: |\n"
        "| 5 | 1,234 | - | - |\n| 20 | - | 0.123 | yes |\n"
    )


def test_models_below_the_aim_stand_under_the_table_with_reasons(made):
    """Numbers of what auto takes, the other engines beside the lean loop, and a dash for one that does not run it."""

    def row(model: str, lean: dict[str, float], reason: str) -> dict[str, object]:
        spread = {
            name: {"median": value, "low": value / 2, "high": 2 * value}
            for name, value in lean.items()
        }
        return {
            "model": model, "batch": 8, "mflop": 1234.5, "auto": next(iter(lean)), "reason": reason,
            "ms": {"usual": 40.0, "lean": 30.0, **{name: 30 / value for name, value in lean.items()}},
            "share": {"usual": 0.1, "lean": 0.2, **dict.fromkeys(lean, 0.256)},
            "usual": {name: {**each, "median": 4 / 3 * each["median"]} for name, each in spread.items()},
            "lean": spread, "ready_s": dict.fromkeys(lean, 3.14159),
        }  # fmt: skip

    rows = [
        row("fast", {"compiled": 12.0, "loop": 1.5}, ""),
        row("slow", {"loop": 1.04}, "its layer 'x' is unknown"),
    ]
    table = made["models"](rows)
    assert table.rows[0] == (
        "fast", "8", "1,234", "40", "30", "compiled", "2.5", "16", "12", "6.00, 24", "26%", "3.14", "12", "1.50",
    )  # fmt: skip
    assert table.rows[1][5:] == (
        "loop",
        "28.8",
        "1.39",
        "1.04",
        "0.52, 2.08",
        "26%",
        "3.14",
        "-",
        "1.04",
    )
    assert len(table.head) == len(table.rows[0])
    below, reason = table.foot.split("\n\n")
    assert below == "Below 1.1 times the lean loop with what auto takes: 1 of 2: slow (8) 1.04."
    assert reason == "slow (8): its layer 'x' is unknown"
    assert (
        made["models"](rows[:1]).foot == "Below 1.1 times the lean loop with what auto takes: none."
    )


def test_a_population_is_compared_with_the_first_of_its_own_pass():
    """Medians of times and of ratios; the largest of the peaks."""
    script = runpy.run_path(str(ROOT / "benchmarks/population.py"))

    def cell(clients: int, cost: float, peak: float) -> dict[str, object]:
        return {
            "clients": clients, "seconds a round": cost * clients / 1000, "ms a client-round": cost,
            "peak memory, GiB": peak, "report, s": 2 * cost,
        }  # fmt: skip

    small, large = script["rows"](
        [[cell(100, 1.0, 0.5), cell(1000, 1.5, 3.0)], [cell(100, 2.0, 0.5), cell(1000, 2.5, 2)]]
    )
    name = "times that of the first"
    assert (small["ms a client-round"], small[name], small["to"]) == (1.5, 1.0, 1.0)
    assert (large["ms a client-round"], large["seconds a round"], large["peak memory, GiB"]) == (
        2.0,
        2.0,
        3.0,
    )
    assert (small["report, s"], large["report, s"]) == (3.0, 4.0)
    assert (large[name], large["from"], large["to"]) == (1.375, 1.25, 1.5)


def test_a_million_clients_are_on_the_line_through_the_two_largest_populations(made):
    """A line by hand: 1 + 2e-5 a client is 3 at 100,000 and 21 at a million; a small population is not in it."""
    line = {
        "seconds a round": (9.0, 1.2, 3.0),
        "peak memory, GiB": (9.0, 3.0, 12.0),  # 1e-4 a client: 102 at a million, five machines
        "checkpoint, MB": (9.0, 7.0, 7.0),
        "report, s": (9.0, 1.0, 10.0),  # 1e-4: 100
        "report, MB": (9.0, 1.0, 1.9),  # 1e-5: 10.9
    }
    rows = [
        {"model": "net", "clients": clients, **{name: each[place] for name, each in line.items()}}
        for place, clients in ((2, 100_000), (0, 1000), (1, 10_000))
    ]
    table = made["million"](rows)
    assert len(table.rows) == 3
    (found,) = [part for part in table.foot.split("\n") if part.startswith("* net")]
    assert found == (
        "* net: 21 s a round, 102 GiB, 7 MB of a checkpoint, 100 s of the report, 10.9 MB of the "
        "report. That takes blocks on 5 machines or more, of 24 GiB."
    )
    small = [row | {"peak memory, GiB": 1.0} for row in rows]
    assert "That takes one machine, of 24 GiB." in made["million"](small).foot
