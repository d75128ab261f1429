"""The page on the network is the one that the stored results make, and shows what was stored.

What was measured once is not tested here: tests/unit/net has every method beside the simulation,
damaged messages and counted bytes, live.
"""

import json
from pathlib import Path

import network
import pytest
import stored

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/reference/network.md").read_text() == network.page(), "run make docs"


HEADER = {
    "commit": "0123456789abc", "made": "2026-01-01", "version": "0.1", "dirty": False, "command": "python it.py",
    "machine": {"cores": 4, "processor": "P", "python": "3.11", "torch": "2", "eclipse-zenoh": "1"},
}  # fmt: skip


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """The page of one made-up measurement."""
    monkeypatch.setattr(network, "STORED", tmp_path)
    monkeypatch.setattr(stored, "AGES", tmp_path / "ages.json")
    commits = {"network/parity": {"commits": {"net": 12}, "golden": ["wire"]}}
    (tmp_path / "ages.json").write_text(json.dumps({"date": "2026-01-02", "results": commits}))

    def make(name: str, *results: dict) -> str:
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"origin": HEADER, "seconds": 1234.4, "results": results}))
        return network.page()

    return make


def test_what_differed_from_the_simulation_is_shown_and_how_old_the_result_is(shown):
    row = {
        "method": "dac",
        "nodes": 6,
        "rounds": 8,
        "same_edges": True,
        "same_metrics": True,
        "seconds": 1.0,
    }
    page = shown(
        "network/parity",
        {**row, "same_peers": True, "largest_difference": 0.0},
        {
            **row,
            "method": "pens",
            "same_peers": False,
            "same_metrics": False,
            "largest_difference": 0.00123,
        },
    )
    assert "6 nodes as processes, 8 rounds" in page
    assert "| dac | yes | yes | 0 |" in page
    assert "| pens | NO | NO | 1.2e-03 |" in page
    assert (
        "`python it.py`, 1,234 s on 4 cores (P), Python 3.11, torch 2, zenoh 1. Commit `012345678`"
        in page
    )
    assert "Commits since to the code that it speaks of: 12 to `net`" in page
    assert "**The golden results of wire have changed since.**" in page


def test_bytes_that_were_not_predicted_are_shown(shown):
    row = {"method": "dac", "nodes": 6, "rounds": 4, "counted": 1_030_000, "predicted": 1_000_000.0}
    assert "| dac | 1.000 | 1.030 | +3.00 % |" in shown("network/bytes", row)


def test_damaged_messages_that_were_accepted_are_counted_apart(shown):
    page = shown("network/fuzz", {
        "messages": 20, "answers": 12, "questions": 7, "heads": 1, "refused": {"refused:digest": 9},
        "read_all_the_same": 3, "questions_ended": {"gone": 7}, "honest_exchanges": 4, "let_down": 0,
        "memory_mb": {"start": 100.0, "end": 101.5}, "memory_growth_mb": 1.5,
    })  # fmt: skip
    assert "| answer refused: digest | 9 |" in page
    assert "| answer accepted, because the damage left a valid message | 3 |" in page
    assert "| question ended: gone | 7 |" in page
    assert "memory went from 100 to 101.5 MB" in page


def test_a_node_that_failed_is_shown(shown):
    """The churn of four nodes, one of them killed: one of the others stopped early, with another exit status."""
    page = shown("network/churn", {"at": 4.7, "event": "n3 killed"}, {
        "nodes": 4, "method": "dac", "rounds": 9, "killed": ["n3"], "statuses": {"n0": 0, "n1": 1, "n2": 0},
        "rounds_finished": {"n0": 9, "n1": 5, "n2": 9, "n3": 2}, "longest_exchange_s": 7.5, "deadline_s": 6.0,
        "memory_growth_mb": {"n0": 1.0, "n1": 2.0, "n2": 20.0}, "accuracy": 71.25, "unharmed_accuracy": [80.0, 82.0],
        "replay_difference": 0.5,
    })  # fmt: skip
    for row in (
        "| undisturbed nodes | 3 |",
        "| rounds that each of them finished | 5 to 9 of 9 |",
        "| longest exchange in one of their rounds | 7.5 s; deadline 6 s |",
        "| growth of their memory, second to last quarter of the run | 1 to 20 MB |",
        "| exit status of all nodes but those killed for good | 0, 1 |",
        "| test accuracy of all nodes that finished | 71.25 % |",
        "| replay from the journals, largest difference | 5.0e-01 |",
    ):
        assert row in page


def test_what_every_trouble_ended_with_is_shown(shown):
    """A node that was blamed though nothing happened to it is in the last line of the table."""
    trouble = {
        "node": "node-01",
        "what": "no room",
        "first": 75,
        "last": 3,
        "rounds": 9,
        "named_slow": 0,
    }
    dead = {
        **trouble,
        "node": "node-05",
        "what": "killed",
        "first": -9,
        "last": None,
        "named_slow": 4,
    }
    page = shown(
        "network/troubles",
        {"at": 2, "event": "the disk of node-01 is full"},
        {
            "nodes": 12, "rounds": 10, "delay_s": 0.1, "troubles": [trouble, dead],
            "others": {"statuses": [0, 5], "rounds": [9, 10], "named_slow": 2, "warnings": {"slow": 6}},
            "median_round_s": 1.5, "longest_round_s": 4.25, "accuracy": 91.0,
            "replay_difference": 0.5,
        },
    )  # fmt: skip
    assert "third round: the disk of node-01 is full (2 s)." in page
    assert "| node-01 | no room | 75 | 3 (rounds without a message) | 9 | 0 |" in page
    assert "| node-05 | killed | -9 | – | 9 | 4 |" in page
    assert "| the others | none | – | 0, 5 (too few others) | 9 to 10 | 2 |" in page
    assert "took 1.5 s (median) and at most 4.25 s; their warnings: slow: 6." in page
    assert "nodes that finished: 91.00 %" in page
    assert "largest difference: 5.0e-01." in page


def test_an_attack_that_ends_a_node_is_shown(shown):
    """Two attacks: one that both nodes live through, one after which a node has no results."""
    lived = {
        "attack": "1e30", "what": "A model of 1e30.", "method": "dac", "of": 9, "statuses": [0, 0],
        "done": [True, True], "events": {"redraw: gone": 3}, "rounds": [9, 8], "mixed": [0, 1], "refused": [7, 6],
        "validation": [90.0, 80.5], "test": [70.0, 71.0],
    }  # fmt: skip
    ended = {
        **lived,
        "attack": "server, wide",
        "method": "fedavg",
        "statuses": [0, 2],
        "done": [True, False],
    }
    for what in ("rounds", "mixed", "refused", "validation", "test"):
        del ended[what]
    page = shown("network/members", lived, ended)
    assert "with dac; where it has the server role, fedavg, 9 rounds" in page
    assert "| done | 9, 8 | 0, 1 | 7, 6 | 90.0, 80.5 | 70.0, 71.0 | redraw: gone (3) |" in page
    assert "| exit status 0, 2 | – | – | – | – | – | redraw: gone (3) |" in page


def test_what_accuses_somebody_in_an_honest_run_is_shown(shown):
    row = {"nodes": 32, "rounds": 6, "rounds_finished": [5, 6], "alarms": {}, "missing": {"timeout": 2},
           "statuses": [0], "deadline_s": 60.0, "longest_exchange_s": 2.8, "seconds": 1.0}  # fmt: skip
    page = shown("network/alarms", row)
    assert (
        "or roster): none. Messages that did not come: timeout: 2. Every node finished 5 to 6 rounds"
        in page
    )
    assert "or roster): refused replay: 3." in shown(
        "network/alarms", {**row, "alarms": {"refused replay": 3}}
    )


def test_what_honest_members_notice_of_a_flood_is_shown(shown):
    row = {"attack": "", "exchanges": 300, "missed": 0, "median_ms": 12.7, "longest_s": 0.03, "deadline_s": 10.0,
           "joined_s": 0.53, "memory_mb": [389, 395, 395], "log_lines": 1, "statuses": [0, 0]}  # fmt: skip
    held = {**row, "attack": "idle_connections", "missed": 1, "joined_s": 60.01}
    page = shown("network/floods", row, held)
    assert "| none | 300 | 0 | 12.7 | 0.03 | 0.53 | 6 | 1 |" in page
    assert "| idle connections | 300 | 1 | 12.7 | 0.03 | over 60 | 6 | 1 |" in page


def test_what_a_renewal_of_the_roster_cost_is_shown(shown):
    page = shown("network/renewals", {
        "nodes": 8, "rounds": 120, "deadline_s": 30.0, "rekeyed_at": 20, "removed_at": 50,
        "statuses": {"node-00": 0, "node-07": 2}, "rounds_finished": {"node-00": 120, "node-07": 51},
        "seconds_to_take": {"rekeyed": [0.1, 0.4], "removed": [0.2]}, "longest_exchange_s": 1.5,
        "missing": {"removed, of the two": 3}, "refused": 0, "turned_away": {},
    })  # fmt: skip
    assert "| seconds until the others had the new key | 0.1 to 0.4 |" in page
    assert "| messages that did not come | removed, of the two: 3 |" in page
    assert "| connections and messages turned away | none |" in page


def test_the_pace_of_nodes_that_wait_for_nobody_is_compared_with_each_run_without_slow_ones(shown):
    """0.99 s against 0.9 and 1.1 s: a tenth longer, and a tenth less."""
    row = {"nodes": 12, "slow": 0, "times": 10, "training_s": 0.8, "rounds": 20, "after": 5, "s_a_round": 0.9,
           "slowest_s_a_round": 0.95, "s_a_round_of_the_slow": [], "read": 90, "missing": 10, "mean_age": 0.5,
           "oldest": 3, "equal_to_the_byte": 12, "replay_s": 2.0}  # fmt: skip
    slowed = {
        "slow": 2,
        "s_a_round": 0.99,
        "s_a_round_of_the_slow": [8.1, 8.0],
        "equal_to_the_byte": 11,
    }
    page = shown("network/free", row, {**row, **slowed}, {**row, "s_a_round": 1.1})
    assert "a round takes the others +10.0 % and -10.0 % longer" in page
    assert "| 2 | 0.990 | 0.950 | 8 to 8.1 | 10 of 100 | 0.5 | 3 | 11 of 12 | 2 |" in page
    assert "| 0 | 1.100 | 0.950 | – |" in page
