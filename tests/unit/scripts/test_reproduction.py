"""The page with the papers' tables is the one that the stored summaries make."""

import json
from pathlib import Path

import reproduction
import stored

from coterie.studies import config
from coterie.studies.run import run_study
from coterie.testing import tiny_federation

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/reference/reproduction.md").read_text() == reproduction.page(), "make docs writes it"


def test_a_stored_study_is_told_with_what_its_tables_hold_though_it_was_not_asked_for(tmp_path, monkeypatch):
    """The clusters that IFCA ended with and its best round, of a study that repeats no paper."""
    study = config.loads("""
        name = "small"
        rounds = 2
        seeds = [0]
        eval_every = 1
        evaluate = "final"
        model = { kind = "linear" }
        data = { dataset = "digits" }
        local = { batch_size = 5, optimizer = "sgd", lr = 0.1 }
        methods = [{ kind = "ifca", clusters = 2 }]
    """)
    run = run_study(study, out=tmp_path / "runs", federation=tiny_federation())
    kept = stored.keep(run.folder, where=tmp_path / "kept")
    rows = {row["metric"]: row["mean"] for row in json.loads((kept / "summary.json").read_text())["rows"]}
    assert rows["accuracy_max"] >= rows["accuracy"]
    assert rows["n_clusters"] in (1.0, 2.0)
    assert 0 <= rows["rand"] <= 1
    monkeypatch.setattr(reproduction, "STORED", tmp_path / "kept")
    assert "| ifca | n clusters | " in reproduction.section(kept)
