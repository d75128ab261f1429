"""Whom a node turns away, and what it tells of that: an event with the reason, and not a byte of theirs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from outlaw import ask, call, channel_to, message, question, wait_until

from coterie.net import fleet, identity, roster
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.identity import Identity
from coterie.studies import config

pytestmark = pytest.mark.e2e
STUDY = """
name = "away"
rounds = 2
seeds = [0]
model = { kind = "linear" }
data = { dataset = "digits", num_clients = 4, train = 24, validation = 8 }

[[methods]]
kind = "dac"
num_peers = 2
"""
FORGED = '\n{"time": 1, "level": "error", "node": "node-00", "event": "refused", "peer": "node-01", "text": "FORGED"}\n'


class Victim:
    """The events of node-00, a process that waits for the three others, whose places attackers take."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.events = folder, port, list[Mapping[str, Any]]()
        self.who = roster.load(folder / "keys/roster.toml", folder / "keys/organizer.pub")
        self.node = self.who.members[0]

    def member(self, name: str) -> Identity:
        keys = self.folder / "keys"
        return Identity.load(
            keys / f"{name}.key", keys / "members" / f"{name}.pem", keys / "ca.pem"
        )

    def told(self, reason: str, text: str = "", peer: str | None = None) -> bool:
        """Whether the log has such a refusal, as a warning."""
        return any(
            e["event"] == "turned_away" and e["reason"] == reason and text in e["text"] and e.get("peer") == peer
            for e in self.events if e["level"] == "warning"
        )  # fmt: skip

    def refuses(self, own: Identity, status: str) -> None:
        """Whatever is asked with these credentials, nothing comes but that status."""
        for method, body in (
            ("Head", question("demo", nonce="1")),
            ("Message", message("demo", 0, 0)),
            ("Presence", question("demo", here=True)),
        ):
            found = ask(own, self.node, method, body)
            assert (found.parts, found.status) == ([], status)


def made(folder: Path, name: str, authority: Path, now: datetime | None = None) -> dict[str, Path]:
    """A certificate of a name by some authority, whose folder may be a copy."""
    (folder / "members").mkdir(parents=True, exist_ok=True)
    request = identity.make_request(folder, name, "127.0.0.1:1")
    identity.sign_request(authority, request, name, "127.0.0.1:1", days=1.0, now=now)
    return {
        "key_file": folder / f"{name}.key",
        "certificate_file": authority / "members" / f"{name}.pem",
    }


def another_authority(victim: Victim, folder: Path) -> None:
    """Under a member's name: the connection ends before anybody is known, and leaves no line."""
    identity.make_authority(folder, "demo", days=1)
    stranger = replace(victim.member("node-03"), **made(folder, "node-03", folder))
    for _ in range(20):
        victim.refuses(stranger, "UNAVAILABLE")


def one_that_is_over(victim: Victim, folder: Path) -> None:
    """A certificate of the right authority, a day late."""
    for name in ("ca.key", "ca.pem"):
        (folder / name).write_bytes((victim.folder / "keys" / name).read_bytes())
    (folder / "ca.key").chmod(0o600)
    past = datetime.now(UTC) - timedelta(hours=25)
    own = replace(victim.member("node-03"), **made(folder, "node-03", folder, past))
    victim.refuses(own, "UNAVAILABLE")


def beyond_its_rights(victim: Victim, _: Path) -> None:
    """A member asks what cannot be read, with lines of another event in it, of another run, and too much."""
    own = victim.member("node-03")
    for method, body in (
        ("Message", message("demo", 0, 0, kind="model" + FORGED)),
        ("Message", message("demo" + FORGED, 0, 0)),
        ("Head", question("demo", nonce="1", **{FORGED: 1})),
        ("Head", FORGED.encode()),
        ("Head", bytes(1 << 20)),
    ):
        assert ask(own, victim.node, method, body).parts == []
    wait_until(lambda: victim.told("not_allowed", peer="node-03"))


def not_on_the_roster(victim: Victim, folder: Path) -> None:
    """A valid certificate of the right authority, of somebody whom the roster does not name."""
    for name in ("ca.key", "ca.pem"):
        (folder / name).write_bytes((victim.folder / "keys" / name).read_bytes())
    (folder / "ca.key").chmod(0o600)
    own = replace(victim.member("node-03"), **made(folder, "mallory", folder))
    victim.refuses(own, "PERMISSION_DENIED")
    wait_until(lambda: victim.told("not_on_roster", identity.encode_public_key(
        identity.load_key(own.key_file).public_key())[:16]))  # fmt: skip


def a_thousand_times(victim: Victim, _: Path) -> None:
    """The same refusals again and again: the log grows by an event in ten seconds, which counts them."""
    before = len(victim.events)
    with channel_to(victim.member("node-02"), victim.node) as channel:
        for _ in range(1000):
            assert call(channel, "Head", b"{}").parts == []
    assert len(victim.events) - before <= 10


@pytest.mark.slow
def test_who_is_turned_away_and_why(tmp_path, port):
    """One node meets them all, one after another: some of what it tells depends on whom it has met before."""
    folder = tmp_path / "victim"
    network = {"deadline": 20.0, "start": 200.0, "linger": 10.0}
    files = fleet.lay_out(folder, config.parse_study_text(STUDY), port=port, network=network)
    victim = Victim(folder, port)
    with fleet.Fleet(
        {"node-00": files["node-00"]},
        logs=folder,
        listener=lambda name, event: victim.events.append(event),
    ) as nodes:
        nodes.start("node-00")
        with GrpcTransport(victim.who, "node-01", victim.member("node-01")) as honest:
            wait_until(lambda: isinstance(honest.ask_head("node-00", "1", 2.0), bytes), 900)
            for attack in (
                another_authority,
                one_that_is_over,
                beyond_its_rights,
                not_on_the_roster,
                a_thousand_times,
            ):
                own = tmp_path / attack.__name__
                own.mkdir()
                attack(victim, own)
            assert isinstance(honest.ask_head("node-00", "2", 5.0), bytes), (
                "honest members are unharmed"
            )
        nodes.processes["node-00"].terminate()
        nodes.processes["node-00"].wait(30)
    for peer, times in (("node-02", 1000), ("node-03", 5)):
        told = [event["times"] for event in victim.events if event.get("peer") == peer]
        assert sum(told) == times, "each is counted, though few are told"
    assert (folder / "node-00.out").read_bytes() == b"", "the library writes nothing"
    lines = (folder / "node-00.log").read_text().splitlines()
    for line in lines:
        assert json.loads(line)["node"] in ("", "node-00"), "and nobody else writes a line"
    audited = (folder / "nodes/node-00/audit.log").read_text()
    assert "FORGED" not in "".join(lines) + audited
    assert all(
        event.get("peer") != "node-01" for event in victim.events if event["level"] != "info"
    )
