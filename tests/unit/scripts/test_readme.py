"""The README's example runs, and its table is that of the stored run."""

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd

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
    from coterie.studies.config import load

    (text,) = re.findall(r"```toml\n(.*?)```", README, re.S)
    (tmp_path / "mine.toml").write_text(text)
    study = load(tmp_path / "mine.toml")
    assert [m.label for m in study.methods] == ["dac", "local"]


def test_the_results_of_the_readme_come_from_the_stored_run():
    script = ROOT / "scripts" / "readme.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def test_every_file_the_readme_links_to_exists():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [t for t in targets if not t.startswith("http") and not (ROOT / t).exists()]
    assert not missing
