"""The page with the papers' tables is the one that the stored summaries make."""

import json
from pathlib import Path

import pytest
import reproduction
import stored

from coterie.studies import config, sweep
from coterie.studies.run import run_study
from coterie.testing import tiny_federation

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_page_is_up_to_date():
    assert (ROOT / "docs/reference/reproduction.md").read_text() == reproduction.page(), (
        "run make docs"
    )


def test_a_stored_study_is_told_with_what_its_tables_hold_though_it_was_not_asked_for(
    tmp_path, monkeypatch
):
    """The clusters that IFCA ended with and its best round, of a study that repeats no paper."""
    study = config.parse_study_text("""
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
    rows = {
        row["metric"]: row["mean"]
        for row in json.loads((kept / "summary.json").read_text())["rows"]
    }
    assert rows["accuracy_max"] >= rows["accuracy"]
    assert rows["n_clusters"] in (1.0, 2.0)
    assert 0 <= rows["rand"] <= 1
    monkeypatch.setattr(reproduction, "STORED", tmp_path / "kept")
    assert "| ifca | n clusters | " in reproduction.section(kept)


def test_a_stored_sweep_is_one_table_with_a_column_for_each_point(tmp_path, monkeypatch):
    """A row for a method, however many points it has, and the time that its runs took over all of them."""
    (tmp_path / "small.toml").write_text(
        'rounds = 1\nseeds = [0, 1]\nmodel.kind = "linear"\nmethods = [{ kind = "local", label = "Alone, one" }]\n'
        'data = { dataset = "digits", num_clients = 2, train = 5, validation = 5 }\nsweep = { "data.train" = [5, 8] }\n'
    )
    sweep.run_sweep(tmp_path / "small.toml", out=tmp_path)
    kept = stored.keep(tmp_path / "small", where=tmp_path / "kept")
    rows = json.loads((kept / "summary.json").read_text())["rows"]
    means = {
        row["label"]: row for row in rows if (row["cluster"], row["metric"]) == ("all", "accuracy")
    }
    cells = [
        f"{100 * means[f'Alone, one, train={n}'][k]:.2f}" for n in (5, 8) for k in ("mean", "std")
    ]
    monkeypatch.setattr(reproduction, "STORED", tmp_path / "kept")
    page = reproduction.section(kept)
    assert "| method | train=5 | train=8 |" in page
    assert "| Alone, one | {} ± {} | {} ± {} |".format(*cells) in page
    assert page.count("Alone, one") == 2
    assert page.endswith("The test accuracy in %, mean over clients; 2 seeds.\n")
