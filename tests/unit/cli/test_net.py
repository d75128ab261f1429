"""The commands for setting up a network, without starting one."""

import importlib.util
from pathlib import Path

import pytest
import torch
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
def organizer(tmp_path) -> Path:
    """The folder of a run with two members whose keys were made here."""
    members = ("--member", "north=127.0.0.1:21990", "--member", "south=127.0.0.1:21991")
    assert "stay here" in coterie("init", tmp_path / "organizer", "--run", "two", *members)
    return tmp_path / "organizer"


def write(organizer: Path, kind: str, *more: str) -> str:
    study = organizer.parent / "study.toml"
    study.write_text(STUDY % kind)
    return coterie(
        "roster", organizer, "--study", study, "--features", "1,8,8", "--classes", "10", *more
    )


def test_members_get_their_clients_in_the_order_in_which_they_were_signed(organizer):
    assert "version 1" in write(organizer, "random")
    made = roster.load(organizer / "roster.toml", organizer / "organizer.pub")
    assert [(m.name, m.address, m.clients) for m in made.members] == [
        ("north", "127.0.0.1:21990", (0,)),
        ("south", "127.0.0.1:21991", (1,)),
    ]
    assert (made.run, made.server, setup.load_run_id(organizer)) == ("two", "", "two")


def test_every_roster_has_a_higher_version_and_the_hash_of_its_study(organizer):
    write(organizer, "random")
    first = roster.load(organizer / "roster.toml", organizer / "organizer.pub")
    assert "version 2" in write(organizer, "local")
    second = roster.load(organizer / "roster.toml", organizer / "organizer.pub")
    assert first.study != second.study
    assert first.schema == second.schema


def test_a_method_with_a_server_needs_a_member_in_that_role(organizer):
    assert "fedavg needs a server; name the member in that role: --server north" in write(
        organizer, "fedavg"
    )
    write(organizer, "fedavg", "--server", "south")
    assert roster.load(organizer / "roster.toml", organizer / "organizer.pub").server == "south"
    assert "the server 'west' is not a member" in write(organizer, "fedavg", "--server", "west")


def test_mistakes_are_told_in_a_line(organizer, tmp_path):
    assert "a roster names its study" in coterie("roster", organizer)
    assert "never overwritten" in coterie("init", organizer, "--run", "two")
    odd = coterie(
        "roster", organizer, "--study", "rotated-digits", "--features", "1,b", "--classes", "2"
    )
    assert "--features is '1,b'; expected the shape of one input" in odd
    assert "run 'Two'; expected 1 to 63" in coterie("init", tmp_path / "x", "--run", "Two")
    assert not (tmp_path / "x").exists(), "nothing is made before everything is checked"
    assert "--days is -1; expected more than 0" in coterie(
        "init", tmp_path / "x", "--run", "two", "--days", "-1"
    )
    coterie("join", "east", "127.0.0.1:22001", "--folder", tmp_path)
    sign, named = ("sign", organizer, tmp_path / "east.csr"), ("--name", "east")
    assert "--days is 0; expected" in coterie(*sign, "127.0.0.1:22001", *named, "--days", "0")
    assert "asks for 127.0.0.1; agreed was 10.0.0.1:22001" in coterie(
        *sign, "10.0.0.1:22001", *named
    )
    assert "--name NAME" in coterie(*sign, "127.0.0.1:22001")
    coterie("init", tmp_path / "empty", "--run", "one")
    assert "has signed no member yet" in coterie(
        "roster",
        tmp_path / "empty",
        "--study",
        "rotated-digits",
        "--features",
        "1",
        "--classes",
        "2",
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "is not empty" in coterie("demo", "--folder", tmp_path / "full")


def test_a_roster_without_problems_says_so_and_one_with_lists_them(organizer):
    write(organizer, "random")
    checked = (
        "roster",
        organizer / "roster.toml",
        "--check",
        "--organizer",
        organizer / "organizer.pub",
    )
    assert coterie(*checked) == "the roster is in order\n"
    text = (organizer / "roster.toml").read_text()
    (organizer / "roster.toml").write_text(text.replace("21990", "21999"))
    assert "is not signed by the organizer" in coterie(*checked)


def test_without_the_extra_the_commands_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "real peers need it: pip install 'cryptography>=" in coterie(
        "init", tmp_path, "--run", "one"
    )


def test_up_names_the_files_it_looked_for(organizer):
    write(organizer, "random")
    result = CliRunner().invoke(app, ["up", str(organizer / "roster.toml")])
    assert "expected one of north.toml, south.toml; or give their folder: --nodes" in str(
        result.exception
    )


def told(*arguments: str) -> str:
    """What the doctor says of a model, or the error it ends with."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    ended = result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout.strip() if ended else str(result.exception)


def test_the_doctor_says_which_engine_trains_a_model_and_why(monkeypatch):
    """A module that an import path leads to, with a layer that no native program knows."""
    short = ("--features", "1,8,8", "--samples", "10", "--batch-size", "1")
    assert (
        told("--model", "linear", *short)
        == "linear: vmap, many clients at once: too little work to compile"
    )
    many = told(
        "--model", "cnn-b", "--features", "1,28,28", "--samples", "10", "--batch-size", "64"
    )
    assert many.startswith(
        "cnn-b: loop, one client after another: too little work to compile; the products of a batch"
    )
    nn = torch.nn
    layers = nn.Linear(5, 10), nn.Unflatten(1, (1, 10, 1, 1)), nn.Conv3d(1, 1, 1), nn.Flatten()
    monkeypatch.setattr(nn, "Odd", lambda: nn.Sequential(*layers), False)
    odd = told("--model", "torch.nn:Odd", "--features", "5", "--batch-size", "1")
    wanted = "the module cannot be compiled: a transposed or three-dimensional convolution in '2'"
    assert odd == f"torch.nn:Odd: vmap, many clients at once: {wanted}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "doctor takes one of a node file, --model and --on"),
        (("node.toml", "--model", "linear"), "doctor takes one of a node file, --model and --on"),
        (("--model", "linaer"), "unknown model 'linaer'"),
        (
            ("--model", "linear", "--features", "8x8"),
            "--features is '8x8'; expected the shape of one input",
        ),
        (
            ("--model", "linear", "--features", "8²"),
            "--features is '8²'; expected the shape of one input",
        ),
        (
            ("--model", "nowhere:Net"),
            "model 'nowhere:Net': there is no module 'nowhere'; install the package that has",
        ),
        (
            ("--model", "torch:pi"),
            "model 'torch:pi' is a float; expected a subclass of torch.nn.Module, or a function",
        ),
    ],
)
def test_what_the_doctor_cannot_make_a_model_of_is_one_line(arguments, message):
    assert message in told(*arguments)
