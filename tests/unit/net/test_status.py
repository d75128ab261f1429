"""What a node writes of its network for its live page: members, since when, how slow, refused and why, certificates."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coterie.methods import METHODS
from coterie.net import local
from coterie.net.node import Node, RunSpec
from coterie.net.outbox import Missing
from coterie.net.status import NetworkStatus
from coterie.net.transport import Hub, InProcess
from coterie.net.wire import Address
from coterie.report.network import render_networks
from coterie.results.stored_runs import NETWORK
from coterie.testing import tiny_federation, tiny_settings

PLAN = RunSpec(METHODS["random"](**{"num_peers": 1}), tiny_settings(), "linear", "linear")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """n0 of three, whose certificates end in 5, 90 and -1 days."""
    who, keys = local.make_members([[0], [1], [2]])
    ends = [datetime.now(UTC) + timedelta(days=days, hours=1) for days in (90, 5, -1)]
    members = tuple(
        replace(m, expires=end.isoformat()) for m, end in zip(who.members, ends, strict=True)
    )
    hub = Hub()
    roster = replace(who, version=4, members=members)
    rows = tiny_federation(num_clients=3)
    made = Node(
        PLAN, rows.host([0]), roster, InProcess(hub, "n0"), local.make_signer(keys[0]), tmp_path / "n0"
    )  # fmt: skip
    other = InProcess(hub, "n1")
    other.publish(Address(0, 0, 1), Missing("withheld", 0))
    yield made
    other.close()
    made.close()
    made.transport.close()


def test_the_page_shows_who_is_here_since_when_how_slow_and_who_is_refused_why(node):
    status = NetworkStatus(clock=lambda: 1_000_000.0)
    status.note_event("peer_up", "info", {"peer": "n1"})
    status.note_event("refused", "warning", {"peer": "n2", "code": "signature"})
    status.note_event("turned_away", "warning", {"peer": "n2", "reason": "too_many", "times": 7})
    status.note_event("round", "info", {"seconds": 1.0})
    node.post.pace._members.clear()
    status.write(node)
    found = json.loads((node.folder / NETWORK).read_text())
    assert (found["node"], found["roster"], found["state"], found["round"]) == (
        "n0",
        4,
        "starting",
        -1,
    )
    one, two, three = found["members"]
    assert (one["here"], one["days"], one["refused"]) == (True, 90, {})
    assert (two["here"], two["since"], two["days"]) == (True, 1_000_000.0, 5)
    assert (three["here"], three["since"], three["days"]) == (False, None, -1)
    assert three["refused"] == {"signature": 1, "too_many": 7}
    said = render_networks(node.folder.parent)
    assert "1 of 2 other members are here. Version 4 of the roster." in said
    assert "<small>since 1970-01-12 13:46:40 UTC</small>" in said
    assert "1 signature, 7 too_many" in said
    assert '<span class="worse">5 days</span>' in said
    assert '<span class="worse">over</span>' in said
    assert ">90 days</td>" in said


def test_a_member_that_is_slow_is_marked_with_its_seconds(node, monkeypatch):
    monkeypatch.setattr(
        node.post.pace, "describe", lambda: {"n1": (12.345, True), "n2": (0.5, False)}
    )
    status = NetworkStatus()
    status.write(node)
    said = render_networks(node.folder)
    assert '>12 s <span class="worse">slow</span></td>' in said
    assert ">0.5 s</td>" in said


def test_the_file_is_written_when_something_has_changed(node):
    clock = iter(range(100))
    status = NetworkStatus(clock=lambda: float(next(clock)))
    status.write(node)
    first = (node.folder / NETWORK).read_bytes()
    status.write(node)
    assert (node.folder / NETWORK).read_bytes() == first, "an idle node writes nothing"
    node.is_waiting = True
    status.write(node)
    assert json.loads((node.folder / NETWORK).read_text())["state"] == "waiting"
    assert "Fewer than 1 other members are here" in render_networks(node.folder)


def test_it_follows_the_node_until_it_is_closed(node, monkeypatch):
    monkeypatch.setattr("coterie.net.status._EVERY", 0.01)
    status = NetworkStatus()
    status.follow(node)
    try:
        for _ in range(500):
            if (node.folder / NETWORK).exists():
                break
            status._stop.wait(0.01)
        monkeypatch.setattr("coterie.net.status._EVERY", 60.0)
        status._stop.wait(0.05)
        node._state = "done"
    finally:
        status.close()
    assert json.loads((node.folder / NETWORK).read_text())["state"] == "done", "its end, too"
    assert status._thread is not None
    assert not status._thread.is_alive()


FORGED = "<script>alert(1)</script>\n<b>x"


def test_names_and_reasons_are_escaped_and_a_damaged_file_hides_nothing_else(tmp_path):
    """Names are those of a roster, and reasons are words; the page does not rely on it."""
    one = {"name": FORGED, "here": False, "since": None, "seconds": None, "slow": False,
           "refused": {FORGED: 1}, "days": None}  # fmt: skip
    found = {"node": FORGED, "run": FORGED, "roster": 1, "state": FORGED, "round": 0,
             "min_peers": 1, "time": 0, "members": [one]}  # fmt: skip
    (tmp_path / NETWORK).write_text(json.dumps(found))
    said = render_networks(tmp_path)
    assert "<script" not in said
    assert "<b>" not in said
    assert said.count("&lt;script&gt;") == 5
    for damaged in ("", "[]", "{", '{"members": 3}', json.dumps({**found, "time": "x"})):
        (tmp_path / NETWORK).write_text(damaged)
        assert render_networks(tmp_path) == ""
