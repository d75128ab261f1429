"""A notebook as a page of the site."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
from scripts import site_notebooks


def test_cells_become_text_and_code():
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["a = 1\n", "a"], "outputs": ["never shown"]},
        {"cell_type": "code", "source": ["!coterie run"], "outputs": []},
    ]
    assert site_notebooks.page(json.dumps({"cells": cells}), "one.ipynb") == (
        "# Title\n\n*This page is [a notebook](one.ipynb), to be downloaded and run.*\n\nText.\n\n"
        "```python\na = 1\na\n```\n\n```sh\ncoterie run\n```\n"
    )


def test_links_lead_to_the_page_but_the_notebooks_own():
    link = '<a href="../x/one.ipynb">one</a> <a href="https://example.org/two.ipynb">two</a>'

    def led(generated_by):
        return site_notebooks.on_page_content(
            link, SimpleNamespace(file=SimpleNamespace(generated_by=generated_by))
        )

    assert led(None) == link.replace("one.ipynb", "one.html")
    assert led("scripts/site_notebooks.py") == link
