"""What a program takes to build is forecast within a factor of two, in the stored table too."""

import json
from pathlib import Path

import pytest

from benchmarks import building

STORED = Path(__file__).parents[3] / "docs/reference/runs/performance/building.json"


def test_the_stored_forecasts_are_within_a_factor_of_two():
    rows = json.loads(STORED.read_text("utf-8"))["results"]
    assert len(rows) >= 20
    for row in rows:
        by_hand = 2.3 + row["nodes"] / 250 + row["convolutions"] / 10
        assert row["forecast, s"] == pytest.approx(by_hand), "the constants of the stored run"
        assert 0.5 < by_hand / row["built in, s"] < 2, row["model"]


@pytest.mark.full
def test_a_model_is_built_and_counted(tmp_path):
    out = tmp_path / "building.json"
    building.main(["--only", "linear", "--out", str(out)])
    (row,) = json.loads(out.read_text("utf-8"))["results"]
    assert (row["model"], row["convolutions"]) == ("linear", 0)
    assert row["nodes"] > 10
    assert row["built in, s"] > 0.1
