"""What the scripts that write pages share: places, tables, and writing a page or checking it."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coterie.results.tables import TextTable, format_markdown

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs/reference"
STORED = REFERENCE / "runs"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    return markdown(TextTable("", head, [[str(cell) for cell in row] for row in rows]))


def markdown(table: TextTable) -> str:
    """Return a table as Markdown, without blank lines around it."""
    return format_markdown(table).strip()


def write(pages: Mapping[Path, str]) -> int:
    """Write pages and return 0; with --check on the command line write none, and return 1 when one would change."""
    if "--check" in sys.argv:
        return int(
            any(
                not path.exists() or path.read_text("utf-8") != text for path, text in pages.items()
            )
        )
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0
