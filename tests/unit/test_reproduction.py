"""The page with the papers' tables is the one that the stored summaries make."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date():
    made = runpy.run_path(str(ROOT / "scripts/reproduction.py"))
    assert (ROOT / "docs/reference/reproduction.md").read_text() == made["page"](), "make docs writes it"
