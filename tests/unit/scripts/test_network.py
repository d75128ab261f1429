"""The page on the network is the one that the stored results make, and they show what it is there to show."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STORED = ROOT / "docs/reference/runs"


def results(name: str) -> list[dict]:
    return json.loads((STORED / f"{name}.json").read_text())["results"]


def test_the_page_is_up_to_date():
    made = runpy.run_path(str(ROOT / "scripts/network.py"))
    assert (ROOT / "docs/reference/network.md").read_text() == made["page"](), "make docs writes it"


def test_every_method_agreed_with_the_simulation():
    """The same peers in every round, models within 1e-6."""
    found = {r["method"]: r for r in results("network/parity")}
    assert found.keys() >= {
        "local", "random", "fix-topology", "oracle", "dac", "dac, loss pushed", "dac-var", "dac-no-two-hop", "pens",
        "panm-loss", "panm-grad", "fedavg", "ifca", "fedgwc",
    }  # fmt: skip
    assert all(r["same_peers"] and r["largest_difference"] <= 1e-6 for r in found.values())
    assert all(r["largest_difference"] == 0 for r in results("network/replay"))


@pytest.mark.parametrize("name", ["churn", "partition"])
def test_those_that_nothing_happened_to_finished_every_round_on_time(name):
    """Within the deadline of each exchange, memory flat, results within the spread of the unharmed runs."""
    (found,) = (r for r in results(f"network/{name}") if "rounds_finished" in r)
    harmed = {*found.get("killed", ()), found.get("cut_off")}
    assert {n for n in found["rounds_finished"].items() if n[0] not in harmed and n[1] != found["rounds"]} == set()
    assert set(found["statuses"].values()) == {0}
    assert found["longest_exchange_s"] <= found["deadline_s"] + 1
    assert max(found["memory_growth_mb"].values()) < 10
    assert min(found["unharmed_accuracy"]) <= found["accuracy"] <= max(found["unharmed_accuracy"])
    assert found["replay_difference"] == 0


def test_many_rounds_leave_memory_threads_and_open_files_as_they_are():
    """After the start less than a megabyte per 100 rounds, no thread and no file more."""
    found = results("network/soak")
    assert {r["method"] for r in found} == {"dac", "fedavg"}
    for r in found:
        assert r["rounds"] - r["watched_from"] >= 500
        assert r["slope_mb_per_100_rounds"] < 1
        assert r["threads"][1] - r["threads"][0] <= 4, "senders come and go, sixteen at most"
        assert r["open_files"][0] == r["open_files"][1]


def test_both_sides_of_a_partition_go_on_at_their_own_pace():
    """Once the links that are cut are known to be dead: one round waits for them, and several follow it."""
    (found,) = (r for r in results("network/partition") if "rounds_apart" in r)
    first, last = found["rounds_apart"]
    assert last - first >= 5


def test_a_slow_link_carried_the_model_near_the_rate_of_the_line():
    for found in results("network/slow"):
        assert max(found["seconds"]) < 1.5 * found["line_rate_s"]


def test_damaged_messages_crashed_nothing_and_left_nothing_behind():
    (found,) = results("network/fuzz")
    assert found["messages"] >= 20_000
    assert found["memory_growth_mb"] < 10


def test_predicted_bytes_are_within_two_percent_of_counted_ones():
    """Of every method, though the models are small and envelopes weigh."""
    found = {r["method"]: r["counted"] / r["predicted"] - 1 for r in results("network/bytes")}
    assert found.keys() >= {"random", "fix-topology", "dac", "pens", "panm-grad", "fedavg", "ifca", "fedgwc", "ditto"}
    assert all(abs(difference) < 0.02 for difference in found.values()), found
