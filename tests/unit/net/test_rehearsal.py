"""Rehearsals: members on their own machines learn what gets through in each direction, before the run."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.net import fleet, nodefile, rehearsal
from coterie.net import roster as rosters
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.identity import Identity
from coterie.net.rehearsal import rehearse
from coterie.net.relay import Relay
from coterie.studies import config

STUDY = """
name = "rehearsed"
rounds = 2
seeds = [0]
model = { kind = "linear" }
data = { dataset = "digits", num_clients = 2, train = 24, validation = 8 }

[[methods]]
kind = "dac"
num_peers = 1
"""


@pytest.fixture
def files(tmp_path: Path, port: int, monkeypatch) -> dict[str, Path]:
    monkeypatch.setattr(rehearsal, "_PAUSE", 0.1)
    monkeypatch.setattr(rehearsal, "_STAY", 1.0)
    return fleet.lay_out(tmp_path, config.parse_study_text(STUDY), port=port, days=9.0)


def told(file: Path, seconds: float = 30.0) -> tuple[bool, dict[str, bool]]:
    """Rehearse with a node file: whether all is well, and what was said."""
    said: dict[str, bool] = {}
    fine = rehearse(nodefile.load(file), said.__setitem__, seconds=seconds)
    return fine, said


def both(files: dict[str, Path], late: float = 0.0, seconds: float = 30.0):
    """Both members rehearse; the second begins later."""

    def second() -> tuple[bool, dict[str, bool]]:
        threading.Event().wait(late)
        return told(files["node-01"], seconds)

    with ThreadPoolExecutor(2) as pool:
        runs = pool.submit(told, files["node-00"], seconds), pool.submit(second)
        return [run.result(120) for run in runs]


def find(said: dict[str, bool], begin: str) -> tuple[str, bool]:
    (found,) = [(text, good) for text, good in said.items() if text.startswith(begin)]
    return found


def test_two_members_see_both_directions_whoever_begins(files, port):
    for number, (fine, said) in enumerate(both(files, late=1.5)):
        other = f"node-{1 - number:02d}"
        assert fine, said
        assert find(said, f"from {other}: its questions come in")[1]
        text, good = find(
            said, f"to {other} at 127.0.0.1:{port + 1 - number}: starting in round -1"
        )
        assert good
        assert "MB/s" in text


@pytest.mark.full
def test_a_member_that_only_dials_out_rehearses_by_a_relay(tmp_path, port, monkeypatch):
    monkeypatch.setattr(rehearsal, "_PAUSE", 0.1)
    monkeypatch.setattr(rehearsal, "_STAY", 1.0)
    study = config.parse_study_text(STUDY)
    files = fleet.lay_out(tmp_path, study, port=port, days=9.0, outbound=[0, 1], relays=1)
    fine, said = told(files["node-00"], 1.0)
    assert not fine
    assert find(said, "only dials out: no port is opened; on the roster: relay-0")[1]
    assert "no stream" in find(said, "to node-01, which only dials out: ")[0]
    assert "nothing came in by a stream or a relay" in find(said, "from node-01")[0]
    keys = tmp_path / "keys"
    own = Identity.load(keys / "relay-0.key", keys / "members/relay-0.pem", keys / "ca.pem")
    who = rosters.load(keys / "roster.toml", keys / "organizer.pub")
    with Relay(who, "relay-0", own):
        for number, (fine, said) in enumerate(both(files)):
            other = f"node-{1 - number:02d}"
            assert fine, said
            assert find(said, f"to {other}, which only dials out: starting in round -1")[1]


@pytest.mark.full
def test_alone_it_says_that_nothing_comes_in_and_why_nothing_goes_out(files):
    began = time.monotonic()
    fine, said = told(files["node-00"], 1.0)
    assert time.monotonic() - began < 20
    assert not fine
    assert "nothing listens there" in find(said, "to node-01 at")[0]
    assert "nothing came in at port" in find(said, "from node-01")[0]


def cut_direction(monkeypatch, name: str, address: str) -> None:
    """Let dials to a member lead to where nobody listens."""
    locate = GrpcTransport._locate

    async def cut(self, member):
        return await locate(
            self, replace(member, address=address) if member.name == name else member
        )

    monkeypatch.setattr(GrpcTransport, "_locate", cut)


@pytest.mark.slow
def test_a_firewall_that_lets_one_direction_through_is_named_on_both_sides(
    files, port, monkeypatch
):
    """Nothing reaches node-01: node-00 cannot go out to it, and node-01 sees that nothing comes in."""
    cut_direction(monkeypatch, "node-01", f"127.0.0.1:{port + 7}")

    def dropped(address, timeout=None):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", dropped)
    (a_fine, a), (b_fine, b) = both(files, seconds=6.0)
    assert (a_fine, b_fine) == (False, False)
    assert find(a, "from node-01: its questions come in")[1]
    assert "a firewall drops packets" in find(a, "to node-01 at")[0]
    assert find(b, "to node-00 at")[1]
    text, good = find(b, "from node-00")
    assert (good, f"nothing came in at port {port + 1}" in text) == (False, True)


def test_a_port_that_is_taken_ends_it(files, port):
    with socket.create_server(("127.0.0.1", port)):
        fine, said = told(files["node-00"])
    assert not fine
    assert said[f"127.0.0.1:{port} is taken: the node runs already, or another program"] is False
