"""The forecast of a run's memory against what a process grows by."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import memory
from coterie.methods import METHODS
from coterie.runtime.settings import Settings

STORED = Path(__file__).parents[3] / "docs/reference/runs/performance/memory-methods.json"
MEASURED = {"dac": 3000, "fedgwc": 3000, "random": 10_000, "random, own rule": 3000}


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="what a process grows by is read from /proc")
@pytest.mark.parametrize("kind", MEASURED)
def test_a_run_grows_by_what_was_forecast(kind):
    """By a third to one and a half of it, and by 64 MiB, in which steps the C library grows its heap."""
    clients = MEASURED[kind]
    asked = [sys.executable, memory.__file__, "methods", "--row", str(clients), "--only", kind]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=200)
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    name = f"{clients:,} clients"
    forecast = 1024 * clients * row[f"{name}: forecast, KiB a client"]
    grown = 1024 * clients * row[f"{name}: measured"]
    assert forecast / 3 < grown < 1.5 * forecast + (64 << 20)


def test_a_method_that_refuses_a_population_has_no_forecast():
    """PPDL has an arm for each group of three: 1,293,699 of 199 others are too many."""
    data, settings = memory.planted(200), Settings(rounds=1, engine="loop")
    assert memory.told(data, METHODS["ppdl"](), settings) is None
    assert memory.told(data, METHODS["local"](), settings) is not None


def test_what_was_measured_is_half_to_one_and_a_half_of_the_stored_forecasts():
    """Of 10,000 clients and more, where the steps of the heap are small; and pairs show where there are any."""
    rows = {row["method"]: row for row in json.loads(STORED.read_text("utf-8"))["results"]}
    assert set(METHODS) < set(rows)
    checked = 0
    for row in rows.values():
        for clients in ("10,000", "100,000"):
            if f"{clients} clients: measured" in row:
                ratio = row[f"{clients} clients: measured"]
                ratio /= row[f"{clients} clients: forecast, KiB a client"]
                assert 0.5 < ratio < 1.5, (row["method"], clients)
                checked += 1
    assert checked >= 25
    name = "{} clients: forecast, KiB a client"
    for kind, growth in (
        ("dac", 7),
        ("pens", 1),
        ("panm-loss", 1),
        ("dac, table = 64", 1),
        ("random, own rule", 1),
    ):
        assert rows[kind][name.format("10,000")] / rows[kind][name.format("1,000")] == (
            pytest.approx(growth, rel=0.15)
        )
