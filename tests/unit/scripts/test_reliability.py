"""The page on reliability is that of the stored experiments, and counts what went wrong in them."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def made():
    return runpy.run_path(str(ROOT / "scripts/reliability.py"))


def test_the_page_is_up_to_date(made):
    assert (ROOT / "docs/reference/reliability.md").read_text("utf-8") == made["page"](), (
        "run make docs"
    )


def test_nothing_that_was_stored_went_wrong_without_a_word(made):
    for name, least in (("corruptions", 1000), ("kills", 200), ("faults", 200)):
        rows = json.loads((ROOT / f"docs/reference/runs/reliability/{name}.json").read_text())[
            "results"
        ]
        assert len(rows) >= least
        assert {row["outcome"] for row in rows} <= {"right", "right, and said", "refused"}


def test_other_bytes_are_counted_and_named(made):
    rows = [
        {"kind": "flip", "then": "go on", "outcome": outcome}
        for outcome in ("right", "WRONG", "WRONG")
    ]
    text = made["corruptions"](rows)
    assert "other bytes, no word" in text
    assert "| 1 to 4 bits of a file flipped, then gone on with | 3 | 1 | 0 | 0 | 2 | 0 |" in text


def test_a_survivor_is_named_with_its_reason(made):
    rows = [
        {
            "package": "net",
            "name": "a late answer",
            "outcome": "survived",
            "survives": "nobody waits",
        },
        {"package": "net", "name": "a wrong key", "outcome": "noticed"},
    ]
    text = made["mutants"](rows)
    assert "* net: a late answer: nobody waits." in text
    assert "| net | 2 | 1 | 0 | 1 | 50.0 % |" in text


def test_what_the_adversary_found_is_counted_and_listed(made):
    kind = {"trial": 7, "check": "blocks", "said": "other metrics", "times": 2}
    rows = [
        {"check": "run", "result": "held", "times": 5},
        {"check": "run", "result": "refused", "times": 4},
        {"check": "blocks", "result": "held", "times": 3},
        {"check": "blocks", "result": "FOUND", "times": 2, "kinds": [kind]},
    ]
    text = made["adversary"](rows)
    assert "5 studies ran, 4 draws were refused" in text
    assert "| hosted in blocks of clients: equal bytes | 3 | 0 | 0 | 0 | 2 |" in text
    assert "* hosted in blocks of clients: equal bytes: other metrics" in text
    assert "Still open" not in made["adversary"](rows[:3])


def test_every_check_of_the_adversary_has_a_row(made):
    from benchmarks.adversary import CHECKS

    assert [*made["CHECKS"]] == ["run", *CHECKS]


def test_changes_that_make_no_difference_are_in_no_share(made):
    row = {"package": "net", "file": "src/a.py", "line": 3, "kind": "off by one"}
    rows = [
        {**row, "before": "a[0]", "after": "a[1]", "outcome": outcome}
        for outcome in ("noticed", "timed out", "noticed", "survived", "equivalent")
    ]
    text = made["sampled"](rows)
    assert "| net | 4 | 2 | 1 | 1 | 75.0 % | 1 |" in text
    assert "| all | 4 | 2 | 1 | 1 | 75.0 % | 1 |" in text
    assert text.count("* `src/a.py` line 3, off by one: `a[0]` became `a[1]`") == 1
