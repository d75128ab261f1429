"""The direction of the table on poisoning, on other data than the stored ones."""

import runpy
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(Path(__file__).parents[3] / "benchmarks/poisoning.py"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "dac"])
def test_judging_undoes_what_turned_models_do(bench, kind):
    """A third publish -5 times their model: most of the accuracy is lost, and hardly any where clients judge."""
    rows = bench["measure"]([kind], ["sign-flip"], [7], 8)
    found = {(row["attackers"], row["acceptance"]): row for row in rows}
    clean = found[0.0, False]["accuracy"]
    assert found[0.3, False]["accuracy"] < clean - 0.15
    assert found[0.3, True]["accuracy"] > clean - 0.05
    assert found[0.0, True]["accuracy"] > clean - 0.03
    assert found[0.3, True]["attackers' weight"] < 0.02 < found[0.3, False]["attackers' weight"]
