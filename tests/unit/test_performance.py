"""The page on speed is the one that the stored measurements make."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def made():
    """The script's names."""
    return runpy.run_path(str(ROOT / "scripts/performance.py"))


def test_the_page_is_up_to_date(made):
    assert (ROOT / "docs/reference/performance.md").read_text() == made["page"](), "make docs writes it"


def test_a_measurement_is_a_section_with_a_column_for_each_key(made, tmp_path):
    rows = [{"peers": 5, "median_ms": 1234.5}, {"peers": 20, "share": 0.12345, "kept": True}]
    content = {"command": "measure it", "machine": {"cores": 2}, "results": rows}
    (tmp_path / "links.json").write_text(json.dumps(content))
    (tmp_path / "links.md").write_text("## Links\n\nWhat was measured.\n")
    assert made["section"](tmp_path / "links.json") == (
        "## Links\n\nWhat was measured.\n\n```console\n$ measure it\n```\n\nMeasured with cores 2.\n\n"
        "| peers | median ms | share | kept |\n| --- | ---: | ---: | ---: |\n"
        "| 5 | 1,234 | - | - |\n| 20 | - | 0.123 | yes |\n"
    )
