"""The commands for setting up a network, without starting one."""

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.net import roster, setup

STUDY = 'seeds = [0]\nmodel = { kind = "linear" }\n[data]\ndataset = "digits"\n[[methods]]\nkind = "%s"\n'


def coterie(*arguments: str | Path) -> str:
    """What a command prints, or the error it ends with."""
    result = CliRunner().invoke(app, ["net", *(str(argument) for argument in arguments)])
    ended = result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout if ended else str(result.exception)


@pytest.fixture
def organiser(tmp_path) -> Path:
    """The folder of a run with two members whose keys were made here."""
    members = ("--member", "north=127.0.0.1:21990", "--member", "south=127.0.0.1:21991")
    assert "stay here" in coterie("init", tmp_path / "organiser", "--run", "two", *members)
    return tmp_path / "organiser"


def write(organiser: Path, kind: str, *more: str) -> str:
    study = organiser.parent / "study.toml"
    study.write_text(STUDY % kind)
    return coterie("roster", organiser, "--study", study, "--features", "1,8,8", "--classes", "10", *more)


def test_members_get_their_clients_in_the_order_in_which_they_were_signed(organiser):
    assert "version 1" in write(organiser, "random")
    made = roster.load(organiser / "roster.toml", organiser / "organiser.pub")
    assert [(m.name, m.address, m.clients) for m in made.members] == [
        ("north", "127.0.0.1:21990", (0,)),
        ("south", "127.0.0.1:21991", (1,)),
    ]
    assert (made.run, made.server, setup.run_of(organiser)) == ("two", "", "two")


def test_every_roster_has_a_higher_version_and_the_hash_of_its_study(organiser):
    write(organiser, "random")
    first = roster.load(organiser / "roster.toml", organiser / "organiser.pub")
    assert "version 2" in write(organiser, "local")
    second = roster.load(organiser / "roster.toml", organiser / "organiser.pub")
    assert first.study != second.study
    assert first.schema == second.schema


def test_a_method_with_a_server_needs_a_member_in_that_role(organiser):
    assert "fedavg needs a server; name the member in that role: --server north" in write(organiser, "fedavg")
    write(organiser, "fedavg", "--server", "south")
    assert roster.load(organiser / "roster.toml", organiser / "organiser.pub").server == "south"
    assert "the server 'west' is not a member" in write(organiser, "fedavg", "--server", "west")


def test_mistakes_are_told_in_a_line(organiser, tmp_path):
    assert "a roster names its study" in coterie("roster", organiser)
    assert "never overwritten" in coterie("init", organiser, "--run", "two")
    odd = coterie("roster", organiser, "--study", "rotated-digits", "--features", "1,b", "--classes", "2")
    assert "--features is '1,b'; expected whole numbers" in odd
    assert "run 'Two'; expected 1 to 63" in coterie("init", tmp_path / "x", "--run", "Two")
    assert not (tmp_path / "x").exists(), "nothing is made before everything is checked"
    assert "--days is -1; expected more than 0" in coterie("init", tmp_path / "x", "--run", "two", "--days", "-1")
    coterie("join", "east", "127.0.0.1:22001", "--folder", tmp_path)
    request = tmp_path / "east.csr"
    assert "--days is 0; expected" in coterie("sign", organiser, request, "127.0.0.1:22001", "--days", "0")
    assert "asks for 127.0.0.1; agreed was 10.0.0.1:22001" in coterie("sign", organiser, request, "10.0.0.1:22001")
    coterie("init", tmp_path / "empty", "--run", "one")
    assert "has signed no member yet" in coterie(
        "roster", tmp_path / "empty", "--study", "rotated-digits", "--features", "1", "--classes", "2"
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "is not empty" in coterie("demo", "--folder", tmp_path / "full")


def test_a_roster_without_problems_says_so_and_one_with_lists_them(organiser):
    write(organiser, "random")
    checked = ("roster", organiser / "roster.toml", "--check", "--organiser", organiser / "organiser.pub")
    assert coterie(*checked) == "the roster is in order\n"
    text = (organiser / "roster.toml").read_text()
    (organiser / "roster.toml").write_text(text.replace("21990", "21999"))
    assert "is not signed by the organiser" in coterie(*checked)


def test_without_the_extra_the_commands_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'coterie[net]'" in coterie("init", tmp_path, "--run", "one")


def test_up_names_the_files_it_looked_for(organiser):
    write(organiser, "random")
    result = CliRunner().invoke(app, ["up", str(organiser / "roster.toml")])
    assert "expected one of north.toml, south.toml; they may lie elsewhere: --nodes" in str(result.exception)
