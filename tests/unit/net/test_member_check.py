"""Checks of a federation's member: what is wrong is named, and what is right is said."""

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.net.test_service import Hall

from coterie._util.claims import claim_folder
from coterie.net import roster as rosters
from coterie.net import servicefile
from coterie.net.member_check import check_member
from coterie.net.service import CLAIM, STATE


@pytest.fixture
def hall(tmp_path: Path, port: int) -> Iterator[Hall]:
    made = Hall(tmp_path, port)
    yield made
    made.close()


def check(hall: Hall, name: str) -> tuple[bool, dict[str, bool]]:
    """Whether all is well, and each line with whether it is good."""
    said: dict[str, bool] = {}
    fine = check_member(servicefile.load(hall.folder / name / "node.toml"), said.__setitem__)
    return fine, said


def test_what_is_in_order_is_said_and_who_listens_is_found(hall):
    north = hall.roster.member("north")
    with socket.create_server(north.host_and_port):
        fine, said = check(hall, "south")
    assert not fine, "nobody listens at east"
    good = [line for line, right in said.items() if right]
    # 40 samples, of which a fifth are for testing and a fifth of the rest for validation.
    assert any(line.startswith("[data.heart]: ") and "2 classes" in line for line in good)
    assert any("members: north, south, east" in line for line in good)
    assert f"{north}: its port is open" in good
    (wrong,) = (line for line, right in said.items() if not right and "east" in line)
    assert "nothing listens there" in wrong


def test_while_the_service_runs_it_knows_who_is_here(hall):
    folder = hall.folder / "south/studies"
    with claim_folder(folder / CLAIM):
        (folder / STATE).write_text(json.dumps({"here": ["north"]}))
        _, said = check(hall, "south")
        assert said["the service runs"]
        assert said["north: here"]
        assert [right for line, right in said.items() if line.startswith("east: ")] == [False]
        (folder / STATE).write_text("{damaged")
        _, said = check(hall, "south")
        assert "north: here" not in said


def test_the_newest_roster_that_a_member_has_got_counts(hall, port):
    """North has moved: south's service has that roster from another member, and its file does not."""
    north, *others = hall.roster.members
    moved = replace(north, address=f"127.0.0.1:{port + 10}")
    newer = replace(hall.roster, members=(moved, *others), version=hall.roster.version + 1)
    path = hall.folder / "newer.toml"
    rosters.write_signed(path, newer, hall.folder / "keys/organizer.key")
    (hall.folder / "south/studies").mkdir()
    (hall.folder / "south/studies/roster.seen").write_bytes(rosters.load_signed(path))
    with socket.create_server(moved.host_and_port):
        _, said = check(hall, "south")
    assert said[f"{moved}: its port is open"]
    assert any(line.startswith("federation hall: roster 2 is signed") for line in said)
    assert any("roster.toml has version 1 of the roster" in line for line in said)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("data.npz", "gone.npz", "[data.heart]: "),
        ("south.pem", "north.pem", "key"),
        ('[data.heart]\narrays = "data.npz"\nclasses = 2\n', "", "no data"),
    ],
)
def test_each_fault_is_named(hall, before, after, expected):
    path = hall.folder / "south/node.toml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    fine, said = check(hall, "south")
    assert not fine
    assert any(expected in line for line, right in said.items() if not right), said
