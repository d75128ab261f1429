"""The README's example runs, and its tables are those of the stored run and of the methods."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def test_the_examples_of_own_model_and_data_run_in_ten_lines(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    scope = {}
    exec(code, scope)
    metrics = scope["run"].metrics
    assert isinstance(metrics, pd.DataFrame)
    assert set(metrics[metrics.split == "test"].client) == set(range(6))
    assert "value" in capsys.readouterr().out


def test_the_study_file_of_the_readme_is_valid(tmp_path):
    from coterie.studies.config import load_study

    (text,) = re.findall(r"```toml\n(.*?)```", README, re.S)
    (tmp_path / "mine.toml").write_text(text)
    study = load_study(tmp_path / "mine.toml")
    assert [m.label for m in study.methods] == ["dac", "local"]


@pytest.mark.full
def test_the_generated_tables_of_the_readme_are_current():
    script = ROOT / "scripts" / "readme.py"
    told = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert told.returncode == 0, "run make docs"


def test_the_readme_lists_every_method_with_its_papers():
    from coterie.methods import METHODS

    for kind, method in METHODS.items():
        lines = [line for line in README.splitlines() if line.startswith(f"| `{kind}` |")]
        assert len(lines) == 1, f"the table has {len(lines)} lines of {kind}: run make docs"
        (line,) = lines
        for reference in method.references:
            author = reference.split(",")[0]
            year = re.search(r", (\d{4})(,|$)", reference)[1]
            assert author in line
            assert year in line
            address = re.search(r"https?://\S+", reference)
            assert address is None or address.group() in line


def test_the_readme_names_the_five_papers():
    from coterie.papers.numbers import SOURCES

    papers = README.split("| paper | methods |")[1].split("\n\n")[0]
    assert papers.count("https://") == len(SOURCES)
    for source in SOURCES.values():
        assert re.search(r"arxiv.org/abs/[\d.]+\d{4}", source).group() in papers


def test_every_file_the_readme_links_to_exists():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [t for t in targets if not t.startswith("http") and not (ROOT / t).exists()]
    assert not missing
