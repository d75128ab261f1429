"""Whom the engine turns away before the node sees it: each is an event of the node's own log, with the reason."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import zenoh

from coterie.net import fleet, identity, roster
from coterie.net.identity import Identity
from coterie.net.zenoh_transport import ZenohTransport, build_config, key_prefix
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
_pause = threading.Event()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(900):
        if condition():
            return
        _pause.wait(0.1)
    raise AssertionError("it did not come to be")


class Victim:
    """The events of node-00, a process that waits for the three others, whose places attackers take."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.events = folder, port, list[Mapping[str, Any]]()
        self.who = roster.load(folder / "keys/roster.toml", folder / "keys/organizer.pub")

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

    @contextmanager
    def attacked(self, own: Identity, number: int) -> Iterator[zenoh.Session]:
        """A session with some credentials that keeps to no rule, and dials node-00."""
        settings = build_config(
            self.who, "node-03", own, listen=f"127.0.0.1:{self.port + 50 + number}"
        )
        settings["connect"]["endpoints"] = [f"tls/127.0.0.1:{self.port}"]
        del settings["access_control"], settings["low_pass_filter"]
        with zenoh.open(zenoh.Config.from_json5(json.dumps(settings))) as session:
            yield session


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
    """Under a member's name; the attacker does not mind whom it talks to."""
    identity.make_authority(folder, "demo", days=1)
    stranger = replace(victim.member("node-03"), **made(folder, "node-03", folder))
    with victim.attacked(stranger, 0):
        until(lambda: victim.told("certificate", "invalid peer certificate: "))


def one_that_is_over(victim: Victim, folder: Path) -> None:
    """A certificate of the right authority, a day late."""
    for name in ("ca.key", "ca.pem"):
        (folder / name).write_bytes((victim.folder / "keys" / name).read_bytes())
    (folder / "ca.key").chmod(0o600)
    past = datetime.now(UTC) - timedelta(hours=25)
    with victim.attacked(
        replace(victim.member("node-03"), **made(folder, "node-03", folder, past)), 1
    ):
        until(lambda: victim.told("certificate", "certificate expired"))


def beyond_its_rights(victim: Victim, _: Path) -> None:
    """It asks, answers and announces as node-02; then its own question and answer are too large."""
    base = key_prefix("demo")
    with victim.attacked(victim.member("node-03"), 2) as session:
        until(lambda: bool(session.info.transports()))
        list(session.get(f"{base}/node-00/model/node-02?r=0;x=0;c=0;w=1", timeout=0.5))
        until(
            lambda: victim.told("not_allowed", f"Query on {base}/node-00/model/node-02", "node-03")
        )
        with session.declare_queryable(f"{base}/node-02/**", lambda query: None):
            until(
                lambda: victim.told(
                    "not_allowed", f"Declare Queryable on {base}/node-02/**", "node-03"
                )
            )
        with session.liveliness().declare_token(f"{base}/node-02/alive"):
            until(
                lambda: victim.told(
                    "not_allowed", f"Liveliness Token on {base}/node-02/alive", "node-03"
                )
            )
        assert (
            list(
                session.get(f"{base}/node-00/head/node-03?n=1", payload=bytes(1 << 20), timeout=0.5)
            )
            == []
        )
        until(lambda: victim.told("too_large", peer="node-03"))
        asked = threading.Event()

        def answer(query: zenoh.Query) -> None:
            with query:
                query.reply(query.key_expr, bytes(2 << 20))
            asked.set()

        with session.declare_queryable(f"{base}/node-03/**", answer):
            assert asked.wait(30), "node-00 asks everybody how it is"
            _pause.wait(0.5)


def not_on_the_roster(victim: Victim, folder: Path) -> None:
    """A valid certificate of the right authority, of somebody whom the roster does not name."""
    for name in ("ca.key", "ca.pem"):
        (folder / name).write_bytes((victim.folder / "keys" / name).read_bytes())
    (folder / "ca.key").chmod(0o600)
    with victim.attacked(
        replace(victim.member("node-03"), **made(folder, "mallory", folder)), 3
    ) as session:
        until(lambda: victim.told("not_on_roster"))
        # told to everybody
        with session.declare_queryable(f"{key_prefix('demo')}/mallory/**", lambda query: None):
            until(lambda: victim.told("dropped"))


@pytest.mark.full
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
        with ZenohTransport(victim.who, "node-01", victim.member("node-01")) as honest:
            until(lambda: isinstance(honest.ask_head("node-00", "1", 2.0), bytes))
            for attack in (
                another_authority,
                one_that_is_over,
                beyond_its_rights,
                not_on_the_roster,
            ):
                own = tmp_path / attack.__name__
                own.mkdir()
                attack(victim, own)
            assert isinstance(honest.ask_head("node-00", "2", 5.0), bytes), (
                "honest members are unharmed"
            )
        nodes.processes["node-00"].terminate()
        nodes.processes["node-00"].wait(30)
    assert sum(e["times"] for e in victim.events if e.get("reason") == "too_large") >= 2, (
        "both, though only one told"
    )
    engine = (folder / "node-00.engine.log").read_text()
    assert "zenoh_link_tls" in engine
    assert "TRACE" not in engine, "what the engine traces is read and goes no further"
    assert "zenoh_link_tls" not in (folder / "node-00.log").read_text()
