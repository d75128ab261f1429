"""A hook of mkdocs: a notebook is a page of the site too, without what it prints; links to it lead to that page."""

import json
import re
from typing import Any

from mkdocs.structure.files import File, Files

NOTEBOOK = ".ipynb"
HEAD = "\n\n*This page is [a notebook]({name}), to be downloaded and run.*\n"


def page(notebook: str, name: str) -> str:
    """Return a notebook as a page in Markdown; below its title a link to the file.

    Args:
        notebook: its JSON.
        name: of its file.
    """
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif text.startswith("!"):
            parts.append(f"```sh\n{text.removeprefix('!')}\n```")
        else:
            parts.append(f"```python\n{text}\n```")
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}{HEAD.format(name=name)}{rest}\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook."""
    for file in [file for file in files if file.src_uri.endswith(NOTEBOOK)]:
        text = page(file.content_string, file.name + NOTEBOOK)
        files.append(
            File.generated(config, file.src_uri.removesuffix(NOTEBOOK) + ".md", content=text)
        )
    return files


def on_page_content(text: str, page: Any, **_: object) -> str:
    """Return a page's HTML with its links to notebooks leading to their pages, but for a notebook's own."""
    if page.file.generated_by:
        return text
    return re.sub(rf'(href="[^":]*){re.escape(NOTEBOOK)}"', r'\1.html"', text)
