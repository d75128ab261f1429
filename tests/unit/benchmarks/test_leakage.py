"""The page on privacy has the numbers that are stored."""

import json
from pathlib import Path

import leakage

DOCS = Path(__file__).resolve().parents[3] / "docs/reference"


def test_the_page_has_the_stored_attacks():
    stored = json.loads((DOCS / "runs/privacy/leakage.json").read_text("utf-8"))["results"]
    lines = leakage.table(stored)
    assert len(lines) == 2 + 2 * len(leakage.KINDS)
    assert "\n".join(lines) in (DOCS / "privacy.md").read_text("utf-8")


def test_the_study_that_is_attacked_can_be_made():
    study = leakage.study()
    assert [entry.label for entry in study.methods] == list(leakage.KINDS)
    assert study.settings.local.batch_size == 32
