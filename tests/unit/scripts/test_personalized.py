"""The page of the personalized methods is the one that the stored studies and trials make."""

import json
import math
from pathlib import Path

import personalized
import pytest

from coterie.studies import config

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/reference/personalized.md").read_text() == personalized.page(), (
        "run make docs"
    )


@pytest.mark.parametrize("name", personalized.STUDIES)
def test_the_bundled_study_is_the_one_that_was_tuned_and_stored(name):
    """Its methods have the values that tuning found, its trials were as many for each, over seeds of their own."""
    study, found = config.load_study(f"personalized/{name}"), personalized.trials(name)
    assert {label: len(points) for label, points in found.items()} == dict.fromkeys(
        [entry.label for entry in study.methods], 18
    )
    seeds = {one["seed"] for one in personalized.stored(name, "trials.json")}
    assert seeds == set(study.tune["seeds"])
    assert not seeds & set(study.seeds)
    assert set(study.seeds) == {one["seed"] for one in personalized.stored(name, "runs.json")}
    stored = config.load_study(personalized.STORED / "personalized" / name / "config.toml")
    for entry in study.methods:
        kept = stored.find_method(entry.label)
        assert (entry.method, entry.settings.local, entry.settings.buffers) == (
            kept.method, kept.settings.local, kept.settings.buffers
        )  # fmt: skip
    personalized.check(name)


def test_the_best_setting_is_never_one_that_diverged(tmp_path, monkeypatch):
    """Means are over seeds; a client that diverged in one of them leaves none."""
    monkeypatch.setattr(personalized, "STORED", tmp_path)
    folder = tmp_path / "personalized" / "made"
    folder.mkdir(parents=True)
    values = {
        (0.1, 1): 0.5,
        (0.1, 2): 0.7,
        (0.2, 1): 0.65,
        (0.2, 2): 0.65,
        (0.3, 1): 0.9,
        (0.3, 2): None,
    }
    trials = [
        {
            "label": "A",
            "seed": seed,
            "metric": "accuracy",
            "value": value,
            "lr": lr,
            "buffers": "local",
        }
        for (lr, seed), value in values.items()
    ]
    (folder / "trials.json").write_text(json.dumps(trials))
    points = personalized.trials("made")["A"]
    point, value = personalized.best(points)
    assert dict(point) == {"lr": 0.2, "buffers": "local"}
    assert value == pytest.approx(0.65)
    assert sum(math.isnan(one) for one in points.values()) == 1
    assert personalized.edges(points) == []
    assert personalized.edges({p: v for p, v in points.items() if dict(p)["lr"] != 0.1}) == [
        "lr 0.2"
    ]
