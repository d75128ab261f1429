"""What a node does between its rounds: newer rosters, certificates that end, starts and who is here."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coterie.errors import ConfigError, TransportError
from coterie.exchange.accepting import Reputation
from coterie.methods import METHODS
from coterie.net import local
from coterie.net import node as nodes
from coterie.net.head import Head
from coterie.net.log import Log
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.post import Terms
from coterie.net.transport import Hub, InProcess
from coterie.testing import tiny_federation, tiny_settings

FEDERATION = tiny_federation()


@pytest.fixture
def node(tmp_path) -> Iterator[Node]:
    """A node of six, which has a place for a keeper of its roster."""
    made = make_node(tmp_path)
    yield made
    made.close()
    made.transport.close()


def make_node(folder: Path, method: str = "random", **roster: Any) -> Node:
    who, keys = local.make_members([[i] for i in range(6)])
    hub = Hub()
    return Node(
        RunSpec(METHODS[method](), tiny_settings(), "linear", "linear", seed=3),
        FEDERATION.host([0]), replace(who, **roster), InProcess(hub, "n0"), local.make_signer(keys[0]),
        folder / "n0", terms=Terms(deadline=20.0),
        patience=Patience(0.0, 1, linger=1.0, ask=2.0, poll=0.02), log=Log("n0", stream=io.StringIO()),
    )  # fmt: skip


def events(node: Node) -> list[dict[str, Any]]:
    return [json.loads(line) for line in node.log.stream.getvalue().splitlines()]


def head(**changes: Any) -> Head:
    given = {
        "run": "local", "peer": "n1", "inc": 5, "nonce": "", "round": 2, "state": "running",
        "protocol": 1, "study": "s", "schema": "x", "roster": 1, "time": 0.0, "met": [], "settings": {},
    }  # fmt: skip
    return Head(**{**given, **changes})


# ---------------------------------------------------------------- starts


def test_each_start_has_a_larger_number_also_where_the_clock_was_set_back(node, monkeypatch):
    path = node.folder / "incarnation.json"
    assert json.loads(path.read_text()) == {"incarnation": node.incarnation}
    monkeypatch.setattr(nodes.time, "time", lambda: node.incarnation + 100.9)
    assert node._new_incarnation() == node.incarnation + 100
    monkeypatch.setattr(nodes.time, "time", lambda: 17.0)
    assert node._new_incarnation() == node.incarnation + 101
    assert json.loads(path.read_text()) == {"incarnation": node.incarnation + 101}
    path.unlink()
    assert node._new_incarnation() == 17, "a node without its folder has the time"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"incarnation": null}', '{"incarnation": "x"}'])
def test_a_damaged_number_of_starts_says_what_to_do(node, text):
    (node.folder / "incarnation.json").write_text(text)
    with pytest.raises(ConfigError, match=r"incarnation\.json is damaged; delete it"):
        node._new_incarnation()


def test_an_unfinished_line_of_the_journal_is_removed_and_said(tmp_path):
    first = make_node(tmp_path)
    first.close()
    with (tmp_path / "n0" / nodes.ARRIVALS).open("ab") as file:
        file.write(b'{"half')
    second = make_node(tmp_path)
    second.close()
    (told,) = [one for one in events(second) if one["event"] == "journal_repaired"]
    assert told["text"] == "6 bytes of an unfinished line are removed"


def test_the_time_between_questions_is_longer_for_many(node):
    assert node._pause_for(1) == max(0.02, nodes._PAUSE_EACH)
    assert node._pause_for(1000) == 1000 * nodes._PAUSE_EACH
    assert node._pause_for(0) == 0.02


def test_another_process_with_the_key_of_this_member_is_refused(node, monkeypatch):
    found = {"n0": head(inc=node.incarnation)}
    monkeypatch.setattr(node, "ask_heads", lambda names: {n: found[n] for n in names if n in found})
    node._check_alone()
    found["n0"] = head(inc=86_400, state="running", round=7)
    with pytest.raises(
        TransportError,
        match=r"^n0 runs already: .* started on 1970-01-02 00:00:00 UTC \(running, round 7\)",
    ):
        node._check_alone()
    found.clear()
    node._check_alone()


# ---------------------------------------------------------------- newer rosters


class Keeper:
    """The keeper of a roster, with what a test puts into its file."""

    def __init__(self) -> None:
        self.file: Any = None
        self.offers: list[Any] = []
        self.accepts: Any = None

    def reload_file(self) -> Any:
        found, self.file = self.file, None
        return found

    def accept_offer(self, data: bytes, peer: str) -> Any:
        self.offers.append((peer, data))
        return self.accepts


@pytest.fixture
def adopted(node, monkeypatch):
    """The rosters that a node takes, and its keeper."""
    took: list[Any] = []
    monkeypatch.setattr(node, "_adopt_roster", took.append)
    node.keeper = Keeper()
    return took, node.keeper


def test_without_a_keeper_nobody_is_asked_for_a_roster(node, monkeypatch):
    monkeypatch.setattr(node, "_check_certificates", lambda: pytest.fail("nobody asks"))
    node.update_roster()
    assert node._fetch_newer_roster({"n1": head(roster=9)}) is None


def test_the_file_comes_first_and_a_question_goes_on_in_a_thread(node, adopted, monkeypatch):
    """Its answer is taken at the next look that finds it done; then another member is asked."""
    took, keeper = adopted
    asked: list[int] = []

    def ask(number: int) -> Any:
        asked.append(number)
        return ("n4", b"roster") if len(asked) == 1 else None

    monkeypatch.setattr(node, "_ask_around", ask)
    keeper.file = "from the file"
    node.update_roster()
    assert took == ["from the file"]
    node._scouted.result(10)
    keeper.accepts = "from n4"
    node.update_roster()
    assert keeper.offers == [("n4", b"roster")]
    assert took == ["from the file", "from n4"]
    assert node._scouted is None
    node.update_roster()
    node._scouted.result(10)
    node.update_roster()
    assert asked == [-1, -1], "of the round that comes"
    assert len(took) == 2


def test_what_a_keeper_does_not_accept_is_not_taken(node, adopted):
    took, keeper = adopted
    node._take_roster("n2", b"bad")
    assert (took, keeper.offers) == ([], [("n2", b"bad")])


def test_another_member_is_asked_in_every_round(node, adopted, monkeypatch):
    alive: set[str] = set()
    asked: list[Any] = []
    monkeypatch.setattr(node.transport, "alive_members", lambda: alive)
    monkeypatch.setattr(node, "ask_heads", lambda names: asked.append(names) or {})
    assert node._ask_around(3) is None
    alive |= {"n3", "n1", "n2"}
    for number in range(4):
        assert node._ask_around(number) is None
    assert asked == [["n1"], ["n2"], ["n3"], ["n1"]]


def test_the_member_with_the_newest_roster_is_asked_for_it(node, adopted, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(
        node.transport,
        "ask_roster",
        lambda name, seconds: asked.append((name, seconds)) or b"roster",
    )
    now = node.roster.version
    same = {"n1": head(roster=now), "n2": head(roster=now)}
    assert node._fetch_newer_roster(same) is None
    assert node._fetch_newer_roster({}) is None
    newer = {**same, "n3": head(roster=now + 2), "n4": head(roster=now + 1)}
    assert node._fetch_newer_roster(newer) == ("n3", b"roster")
    assert asked == [("n3", 2.0)]


def test_a_new_roster_is_followed_by_post_and_transport_and_told(node, monkeypatch):
    """A member less, one with another key, and another address for this node."""
    used: list[Any] = []
    monkeypatch.setattr(node.post, "use_roster", lambda roster: used.append(("post", roster)))
    monkeypatch.setattr(
        node.transport, "use_roster", lambda roster: used.append(("transport", roster))
    )
    before = node.roster
    members = [replace(before.members[0], address="10.0.0.9:1"), *before.members[1:5]]
    members[2] = replace(members[2], key=before.members[5].key)
    new = replace(before, version=before.version + 1, members=tuple(members), removed=(5,))
    monkeypatch.setattr(nodes, "check_same_run", lambda *given: used.append(given))
    recorded: list[Any] = []
    node.audit = SimpleNamespace(
        record_roster=lambda roster, **more: recorded.append((roster, more))
    )
    node._adopt_roster(new)
    node.audit = None
    assert used[0] == (before, new, "n0")
    # Keys first: no message by an old key counts under the new roster.
    assert [one[0] for one in used[1:]] == ["post", "transport"]
    assert used[1][1] == replace(new, schema=node.schema)
    assert node.roster is used[2][1] is new
    assert recorded == [(new, {"removed": ["n5"], "rekeyed": ["n2"]})]
    told = {one["event"]: one for one in events(node)}
    assert told["roster"]["removed"] == ["n5"]
    assert told["moved"]["level"] == "warning"
    assert "has the address 10.0.0.9:1 for this node" in told["moved"]["text"]


def test_the_move_of_another_member_is_no_warning(node, monkeypatch):
    monkeypatch.setattr(node.transport, "use_roster", lambda roster: None)
    monkeypatch.setattr(node.post, "use_roster", lambda roster: None)
    first, second, *rest = node.roster.members
    moved = replace(second, address="10.0.0.9:1")
    new = replace(node.roster, version=node.roster.version + 1, members=(first, moved, *rest))
    node._adopt_roster(new)
    assert "moved" not in {one["event"] for one in events(node)}


# ---------------------------------------------------------------- certificates


def with_ends(node: Node, **days: float) -> None:
    """Let the certificates of members end in so many days."""
    now = datetime.now(UTC)
    members = []
    for one in node.roster.members:
        end = now + timedelta(days=days.get(one.name, 1000.0))
        members.append(replace(one, expires=end.isoformat(), certificate=f"of {one.name}"))
    # Signed long ago: its organizer knew of no end.
    long_ago = (now - timedelta(days=400)).isoformat()
    node.roster = replace(node.roster, members=tuple(members), issued=long_ago)


def test_certificates_that_end_soon_are_told_once_each_notice(node):
    with_ends(node, n1=25.0, n2=3.0, n3=-1.0)
    node._check_certificates()
    node._check_certificates()
    told = {one["peer"]: one for one in events(node) if one["event"] == "certificate"}
    assert len([one for one in events(node) if one["event"] == "certificate"]) == len(told) == 3
    assert {name: one["level"] for name, one in told.items()} == {
        "n1": "warning",
        "n2": "error",
        "n3": "error",
    }
    assert {name: one["days"] for name, one in told.items()} == {"n1": 25.0, "n2": 3.0, "n3": -1.0}
    assert "its certificate ends on 20" in told["n1"]["text"]
    with_ends(node, n1=3.0, n2=3.0, n3=-1.0)
    node._check_certificates()
    assert len([one for one in events(node) if one["event"] == "certificate"]) == 4, "a new notice"


def test_a_node_whose_own_certificate_is_over_ends_and_says_what_to_do(node):
    with_ends(node, n0=-1.0)
    with pytest.raises(TransportError, match=r"^the certificate of n0 ended on .* new request"):
        node._check_certificates()


# ---------------------------------------------------------------- numbers


def test_the_numbers_of_a_node_are_those_that_it_has(node, monkeypatch):
    with_ends(node, n1=25.0)
    node.post.traffic.received, node.post.traffic.bytes, node.post.traffic.seconds = 3, 400, 1.5
    node.post.traffic.missing["late"] = 2
    node.is_waiting = True
    monkeypatch.setattr(node.transport, "alive_members", lambda: {"n1", "n2"})
    monkeypatch.setattr(
        node.post.pace, "describe", lambda: {"n2": (1.25, True), "n1": (0.5, False)}
    )
    found = {(name, labels.get("member", labels.get("reason"))): value
             for name, _, labels, value in node.prometheus_samples()}  # fmt: skip
    expected = {
        ("coterie_round", None): -1, ("coterie_peers_alive", None): 2, ("coterie_waiting", None): 1,
        ("coterie_alone_rounds", None): 0, ("coterie_received_total", None): 3,
        ("coterie_received_bytes_total", None): 400, ("coterie_exchange_seconds_total", None): 1.5,
        ("coterie_member_seconds", "n1"): 0.5, ("coterie_member_slow", "n1"): 0,
        ("coterie_member_seconds", "n2"): 1.25, ("coterie_member_slow", "n2"): 1,
        ("coterie_missing_total", "late"): 2, ("coterie_diverged", None): 0,
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert found["coterie_certificate_days", "n1"] == pytest.approx(25.0, abs=0.01)
    assert found["coterie_certificate_days", "n5"] == pytest.approx(1000.0, abs=0.01)
    assert {labels["node"] for _, _, labels, _ in node.prometheus_samples()} == {"n0"}


def test_the_models_that_a_round_refused_are_written_down_before_its_checkpoint(node, monkeypatch):
    """Without reputations those of the record; with them the new terms, with the round of the end."""
    recorded: list[Any] = []
    node.audit = SimpleNamespace(
        record_rejections=lambda index, refused: recorded.append((index, refused)),
        end_round=lambda index: recorded.append(index),
    )
    monkeypatch.setattr(node.loop.record, "list_refused", lambda index: [(0, 4)])
    start = Reputation.from_first_losses(torch.zeros(1, dtype=torch.float64))
    nobody = torch.zeros(1, 0, dtype=torch.int64)
    # Member 5 was refused before, and its term is no news.
    before = start.after_round(6, torch.tensor([[5]]), nobody)
    after = before.after_round(7, torch.tensor([[2]]), nobody)
    reputations = iter([None, before, after, after])
    monkeypatch.setattr(Node, "_reputation", property(lambda self: next(reputations)))
    node._write_down(3, None)
    node._write_down(4, before)
    node._write_down(5, before)
    node._write_down(6, None)
    node.audit = None
    node._write_down(7, None)
    of_record, of_terms = [(0, 4, "n4", None)], [(0, 2, "n2", 9)]
    assert recorded == [(3, of_record), 3, (4, of_record), 4, (5, of_terms), 5, (6, of_record), 6]


def test_a_stop_before_the_rounds_runs_none(node):
    node.stop()
    node.run()
    assert node.loop.next_round == -1
    assert "stopped" in {one["event"] for one in events(node)}


# ---------------------------------------------------------------- in step with its readers


@pytest.mark.parametrize(
    ("lags", "slow", "waits"),
    [
        ({}, [], 0),
        ({"n1": 4}, [], 4),  # its only reader: until it is three rounds behind
        ({"n1": 3}, [], 0),
        ({"n1": 9, "n2": 0}, [], 24),
        ({"n1": 9, "n2": 0, "n3": 1}, [], 0),  # one of three: it catches up, or is left behind
        ({"n1": 6, "n2": 5, "n3": 0}, [], 8),  # until only one of three is far behind
        ({"n1": 9}, ["n1"], 0),
        ({"n0": 9}, [], 0),  # a question of its own
    ],
)
def test_a_node_waits_when_half_of_its_readers_are_rounds_behind(
    node, monkeypatch, lags, slow, waits
):
    """After every fourth look each reader has come a round nearer."""
    now, looks = [100.0], []
    known = node.transport.outbox.lags
    known |= {name: (lag, now[0]) for name, lag in lags.items()}

    def wait(seconds):
        now[0] += seconds
        looks.append(seconds)
        if not len(looks) % 4:
            known.update({name: (lag - 1, now[0]) for name, (lag, _) in known.items()})
        return False

    monkeypatch.setattr(
        node, "_stop", SimpleNamespace(wait=wait, set=lambda: None, is_set=lambda: False)
    )
    monkeypatch.setattr("coterie.net.node.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(node.post.pace, "list_slow", lambda round: slow)
    monkeypatch.setattr(node.post.pace, "local", lambda: 0.5)
    node._keep_step()
    assert len(looks) == waits


@pytest.mark.parametrize(("asked", "ends"), [(99.0, 102.0), (None, 110.0), (90.0, 100.0)])
def test_no_reader_holds_a_node_up(node, monkeypatch, asked, ends):
    """n1 is always far behind: three seconds after its last question it is left; at most as long as a training."""
    now = [100.0]
    node.transport.outbox.lags["n1"] = 20, asked or 100.0
    monkeypatch.setattr(node.post.pace, "local", lambda: 10.0 if asked is None else 9.0)
    monkeypatch.setattr(nodes, "KEEP", 0)

    def wait(seconds):
        now[0] += seconds
        if asked is None:
            node.transport.outbox.lags["n1"] = 20, now[0]
        return False

    monkeypatch.setattr(
        node, "_stop", SimpleNamespace(wait=wait, set=lambda: None, is_set=lambda: False)
    )
    monkeypatch.setattr("coterie.net.node.time", SimpleNamespace(monotonic=lambda: now[0]))
    node._keep_step()
    assert now[0] == pytest.approx(ends, abs=0.05)
