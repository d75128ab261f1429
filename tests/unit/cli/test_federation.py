"""The commands of a federation: what they sign, and what they refuse in a line. Without any service."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.net import roster as rosters
from coterie.net import servicefile
from coterie.net.service import Membership

NAMES = ("north", "south")
STUDY = """
name = "hearts"
rounds = 2
seeds = [0]
model = { kind = "linear" }
data = "heart"
[[methods]]
kind = "random"
num_peers = 1
"""
NODE = """
roster = "../organizer/roster.toml"
organizer = "../organizer/organizer.pub"
ca = "../organizer/ca.pem"
key = "{name}.key"
certificate = "../organizer/members/{name}.pem"
studies = "../{studies}"
[data.heart]
arrays = "data.npz"
classes = 2
"""


def coterie(*words: str) -> str:
    """What a command prints, or the line that it ends with."""
    told = CliRunner().invoke(app, list(words))
    if told.exception is None or isinstance(told.exception, SystemExit):
        return told.output
    return str(told.exception)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A federation of two, who write to one folder: what one says the other knows at once."""
    monkeypatch.chdir(tmp_path)
    coterie("federation", "create", "organizer", "--name", "two")
    for number, name in enumerate(NAMES):
        address = f"127.0.0.1:{7447 + number}"
        coterie("federation", "join", name, address, "--folder", name)
        coterie("federation", "sign", "organizer", f"{name}/{name}.csr", address, "--name", name)
        Path(name, "node.toml").write_text(NODE.format(name=name, studies="studies"))
        x = np.zeros((20, 3), "float32")
        np.savez(Path(name, "data.npz"), x=x, y=np.arange(20) % 2)
    Path("study.toml").write_text(STUDY)
    return tmp_path


def test_the_roster_grows_with_each_member_and_names_no_study(folder):
    made = rosters.load(Path("organizer/roster.toml"), Path("organizer/organizer.pub"))
    assert (made.run, made.version, made.host_of) == ("two", 2, {0: "north", 1: "south"})
    assert (made.study, made.schema) == ("", "")
    said = coterie("federation", "remove", "organizer", "south")
    assert "version 3, is without south" in said


def test_an_address_that_another_has_is_refused_before_anything_is_signed(folder):
    """Else it stays among the organizer's entries, and no roster can be signed any more."""
    for name in ("east", "west"):
        coterie("federation", "join", name, "127.0.0.1:7450", "--folder", name)
    sign = ("federation", "sign", "organizer")
    said = coterie(*sign, "east/east.csr", "127.0.0.1:7448", "--name", "east")
    assert said == "south has the address 127.0.0.1:7448; agree on another one for east"
    said = coterie(*sign, "east/east.csr", "127.0.0.1:7448", "--name", "east", "--relay")
    assert said.startswith("south has the address")
    assert not Path("organizer/members/east.pem").exists()
    assert "has 3 members" in coterie(*sign, "west/west.csr", "127.0.0.1:7450", "--name", "west")
    again = coterie(*sign, "west/west.csr", "127.0.0.1:7450", "--name", "west")
    assert "version 4, has 3 members" in again, "its own address is its own"
    for name in ("first", "second"):  # of members that only dial out there are many
        coterie("federation", "join", name, "outbound", "--folder", name)
        said = coterie(*sign, f"{name}/{name}.csr", "outbound", "--name", name)
    assert "has 5 members" in said


def test_a_study_is_proposed_looked_at_and_approved(folder):
    assert "proposed to north, south" in coterie(
        "propose", "study.toml", "--node", "north/node.toml"
    )
    said = coterie("studies", "--node", "south/node.toml")
    assert said == "hearts: proposed, proposed by north; 1 of 2 approved\n"
    said = coterie("studies", "hearts", "--node", "south/node.toml")
    # 3 inputs, 2 classes: (3 + 1) x 2 numbers of 4 bytes.
    assert "32 bytes of numbers" in said
    assert "to any of north" in said
    said = coterie("approve", "hearts", "--node", "south/node.toml")
    assert "hearts is approved" in said
    said = coterie("studies", "--node", "south/node.toml")
    assert (
        said
        == "hearts: queued, proposed by north; 2 of 2 approved; the service of this member does not run\n"
    )
    assert "signed" not in coterie("stop", "hearts", "--node", "south/node.toml")
    assert "hearts: stopped" in coterie("studies", "--node", "south/node.toml")


def test_what_a_member_may_not_do_is_refused_in_a_line(folder):
    coterie("propose", "study.toml", "--node", "north/node.toml")
    south = ("--node", "south/node.toml")
    refusals = {
        ("approve", "heart", *south): "did you mean 'hearts'",
        ("withdraw", "hearts", *south): "proposed by north, who alone withdraws it",
        ("propose", "study.toml", *south): "a name is used once: take another",
        ("propose", "study.toml", "--data", "lungs", *south): "unknown role of data 'lungs'",
        ("propose", "study.toml", "--members", "north,west", *south): "'west' is not on the roster",
        ("propose", "study.toml", "--members", "north", *south): "--members lacks south",
        ("propose", "study.toml", "--quorum", "3", *south): "3 of 2 members",
    }
    for words, said in refusals.items():
        assert said in coterie(*words)
    assert "declined" in coterie("decline", "hearts", *south)
    assert "approved" in coterie("approve", "hearts", *south)
    assert "end it here with: coterie stop hearts" in coterie("decline", "hearts", *south)
    assert "stopped" in coterie("stop", "hearts", *south)
    assert "south has stopped it before" in coterie("approve", "hearts", *south)


def test_nothing_is_said_to_be_done_with_a_study_that_is_over(folder):
    """A stop that came after the end would take the quorum from those in their last rounds."""
    coterie("propose", "study.toml", "--node", "north/node.toml")
    north, south = ("--node", "north/node.toml"), ("--node", "south/node.toml")
    membership = Membership.open(servicefile.load(Path("north/node.toml")))
    membership.say("end", membership.ledger.find("hearts"))
    for verb in ("stop", "approve", "decline"):
        assert "north has finished it before, and hearts runs here no more" in coterie(
            verb, "hearts", *north
        )
    assert not Path("studies/hearts/signed/stop-north").exists()
    assert "hearts is withdrawn" in coterie("withdraw", "hearts", *north), "it ends at the others"
    for verb in ("stop", "approve", "decline"):
        said = coterie(verb, "hearts", *south)
        assert said == "north has withdrawn hearts, which ended it at all members"
    assert {path.name for path in Path("studies/hearts/signed").iterdir()} == {
        "proposal", "approval-north", "end-north", "withdrawal-north",
    }  # fmt: skip


def test_a_study_that_loads_code_is_approved_with_that_word_only(folder):
    Path("study.toml").write_text(STUDY.replace('"linear"', '"coterie.testing:TinyNet"'))
    coterie("propose", "study.toml", "--node", "north/node.toml")
    south = ("--node", "south/node.toml")
    said = coterie("approve", "hearts", *south)
    assert "would load model.kind = coterie.testing:TinyNet" in said
    assert "--code" in said
    assert "proposed" in coterie("studies", "--node", "south/node.toml")


def test_data_that_are_not_such_as_a_study_expects_are_named(folder):
    coterie("propose", "study.toml", "--node", "north/node.toml")
    np.savez("south/data.npz", x=np.zeros((20, 4), "float32"), y=np.arange(20) % 2)
    said = coterie("approve", "hearts", "--node", "south/node.toml")
    assert "have features [4]; the study hearts expects [3]" in said
    assert "proposed" in coterie("studies", "--node", "south/node.toml")


def test_a_study_file_with_a_table_of_data_sends_only_the_role(folder):
    table = '[data]\ndataset = "table"\noptions = { path = "/secret/place.csv", target = "y" }\n'
    Path("study.toml").write_text(STUDY.replace('data = "heart"\n', "") + table)
    node = ("--node", "north/node.toml")
    assert "unknown role of data 'table'" in coterie("propose", "study.toml", *node)
    coterie("propose", "study.toml", "--data", "heart", *node)
    assert b"secret" not in Path("studies/hearts/signed/proposal").read_bytes()
