"""The documentation as pages: they build without a warning, load nothing from elsewhere, and are searched from disk."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("material", "mkdocstrings", "latex2mathml")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; with --strict, a broken link, anchor or reference is an error."""
    missing = [tool for tool in TOOLS if importlib.util.find_spec(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    told = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    return folder


@pytest.mark.full
def test_every_public_name_that_the_page_on_python_lists_is_there(site):
    page = (site / "reference/api.html").read_text(encoding="utf-8")
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert len(named) > 20
    assert [name for name in named if f'id="{name}"' not in page] == []


@pytest.mark.full
def test_formulas_are_shown_without_a_script(site):
    page = (site / "reference/methods.html").read_text(encoding="utf-8")
    assert "<math" in page
    assert "arithmatex" not in page
    assert r"\tau" not in page


@pytest.mark.full
def test_tables_that_are_folded_are_tables(site):
    """Inside <details> Markdown is read only where the page asks for it."""
    for name in ("similarity", "dac", "panm", "fedgwc", "sosicfl"):
        page = (site / f"reference/reproduction/{name}.html").read_text(encoding="utf-8")
        folded = re.findall(r"<details>(.*?)</details>", page, re.DOTALL)
        assert folded
        numbers = [part for part in folded if "compared with the paper" in part]
        assert numbers
        assert all("<table>" in part for part in numbers)
        assert "| ---" not in page


@pytest.mark.full
def test_no_page_loads_anything_from_another_machine(site):
    """No remote font, script, style or picture; the reports of stored runs are pages of their own, and tested too."""
    loads = re.compile(
        r"""(?:<(?:script|img|iframe)[^>]*\ssrc|<link[^>]*\shref)=["']?(?:https?:)?//[^"' >]*"""
    )
    found = {
        page.name: loads.findall(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")
    }
    assert len(found) > 20
    assert {name: urls for name, urls in found.items() if urls} == {}


@pytest.mark.full
def test_the_search_works_where_the_pages_are_opened_from_disk(site, browser):
    """What a reader would do: open a page of a folder, and type. Browsers start no worker there."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "how-to/tune.html").as_uri())
    assert browser.execute_script("return location.protocol") == "file:"
    search = "const box = document.querySelector('input.md-search__input'); box.focus(); box.value = arguments[0];"
    browser.execute_script(
        search + "box.dispatchEvent(new Event('input', {bubbles: true}))", "organizer roster"
    )
    found = WebDriverWait(browser, 30, poll_frequency=0.05).until(
        lambda page: page.execute_script(
            "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        )
    )
    assert (site / "how-to/deploy-in-three-hospitals.html").as_uri() in {
        address.partition("#")[0] for address in found
    }
    browser.get(found[0])
    assert "roster" in browser.find_element("tag name", "article").text
