"""The notebooks: they run from top to bottom, as a reader would run them, and keep no output that could go stale."""

import ast
import json
import re
import shlex
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from coterie.cli.app import app

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[str]:
    """The texts of a notebook's cells of a kind."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == kind]


def run_cell(text: str, scope: dict[str, object]) -> object:
    """Run a cell as a notebook does, a line of the shell or Python; return what it shows."""
    if text.startswith("!"):
        program, *arguments = shlex.split(text[1:])
        assert program == "coterie"
        told = CliRunner().invoke(app, arguments)
        assert told.exception is None, f"{text}: {told.exception!r}"
        return told.stdout
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), scope)
    return (
        None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), scope)
    )


def shown(value: object) -> str:
    """What a notebook shows of a value."""
    html = getattr(value, "_repr_html_", None)
    return html() if html is not None else repr(value)


def test_there_is_a_notebook():
    assert [path.name for path in NOTEBOOKS] == ["compare-and-take-home.ipynb"]


@each
def test_a_notebook_is_stored_without_outputs(path):
    """They would be another run's; and the file is of the format that all programs read."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    for cell in content["cells"]:
        code = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        assert {
            key: cell[key] for key in cell if key not in ("cell_type", "id", "metadata", "source")
        } == code
    names = [cell["id"] for cell in content["cells"]]
    assert len(set(names)) == len(names)


@each
def test_the_links_of_a_notebook_lead_to_pages(path):
    links = [link for text in cells(path, "markdown") for link in re.findall(r"\]\(([^)#]+)", text)]
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.slow
def test_the_notebook_compares_methods_and_takes_a_model_home(tmp_path, monkeypatch):
    """Every cell runs; what it shows is short enough to be read, and true of what was planted."""
    monkeypatch.chdir(tmp_path)
    path = DOCS / "tutorials/compare-and-take-home.ipynb"
    scope: dict[str, object] = vars(types.ModuleType("notebook"))
    told = {text: run_cell(text, scope) for text in cells(path, "code")}
    values = [value for value in told.values() if value is not None]
    assert len(values) >= 8
    assert all(len(shown(value)) < 12_000 for value in values)

    compared = next(said for text, said in told.items() if text.startswith("!coterie compare"))
    pairs = next(value for text, value in told.items() if text.startswith("pairs ="))
    assert "seeds" in compared
    assert len(pairs) == 6  # of four methods
    assert {"difference", "low", "high", "established"} <= set(pairs.columns)
    assert (pairs.loc[pairs["established"], "low"] > 0).all()  # else 0 would be in the interval

    reads = next(value for text, value in told.items() if text.startswith("edges ="))
    alike = reads.iloc[:4, :4].to_numpy().sum() + reads.iloc[4:, 4:].to_numpy().sum()
    assert alike > 1.5 * 3 / 7 * reads.to_numpy().sum()  # 3 of the 7 peers of a site are like it

    classes, chances = next(value for text, value in told.items() if text.startswith("new ="))
    assert set(classes) <= {"ill", "well"}
    torch.testing.assert_close(chances.sum(1), torch.ones(3))
    assert (tmp_path / "north.safetensors").stat().st_size > 0
    assert (tmp_path / "runs/sites/report.html").exists()
