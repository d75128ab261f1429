"""Pages that are written by hand have a row for every method, and for every metric that can be asked for."""

import re
from pathlib import Path

import pytest

from coterie.functional.metrics import REGISTRY
from coterie.methods import METHODS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def letters(name: str) -> str:
    """A name as its letters and digits: DAC-no-two-hop and dac_no_two_hop are one."""
    return re.sub("[^a-z0-9]", "", name.lower())


def first_column(page: str) -> set[str]:
    """The names in the first columns of a page's tables; several are separated by commas."""
    found = set()
    for line in (DOCS / page).read_text("utf-8").splitlines():
        if line.startswith("| "):
            found |= {letters(name) for name in line.split("|")[1].split(",")}
    return found


@pytest.mark.parametrize("kind", METHODS)
def test_the_privacy_page_says_what_each_method_reveals(kind: str):
    assert letters(kind) in first_column("reference/privacy.md"), (
        f"docs/reference/privacy.md has no row of {kind}: what leaves a client, and who receives it"
    )


@pytest.mark.parametrize("kind", METHODS)
def test_the_page_of_methods_explains_each(kind: str):
    text = (DOCS / "explanation/methods.md").read_text("utf-8")
    named = re.findall(r"\*+([^*\n]+)\*+|`([^`\n]+)`", text)
    assert letters(kind) in {letters(name) for pair in named for name in pair}, (
        f"docs/explanation/methods.md does not name {kind} in italics, bold or code"
    )


@pytest.mark.parametrize(
    "name", [name for name, one in REGISTRY.items() if one.function or one.on_request]
)
def test_the_page_of_metrics_explains_what_a_study_can_ask_for(name: str):
    text = (DOCS / "explanation/metrics.md").read_text("utf-8")
    assert f"`{name}`" in text, f"docs/explanation/metrics.md does not explain `{name}`"
    if REGISTRY[name].function:
        assert letters(name) in first_column("explanation/metrics.md")
        assert letters(name) in first_column("reference/tasks.md"), "run make docs"
