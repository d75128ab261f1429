"""The guide for three hospitals does what it says: commands run, files are read, the unit is the one shipped."""

import configparser
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.net import nodefile, roster
from coterie.studies import config

DOCS = Path(__file__).resolve().parents[2] / "docs/how-to"
GUIDE = (DOCS / "deploy-in-three-hospitals.md").read_text()


def blocks(language: str) -> list[str]:
    """The guide's blocks of code in a language."""
    return re.findall(rf"```{language}(?: title=[^\n]*)?\n(.*?)```", GUIDE, re.DOTALL)


def commands() -> list[list[str]]:
    """The guide's `coterie net` commands, in order."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("coterie net")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_commands_of_the_guide_lead_to_a_roster_that_is_in_order(tmp_path, monkeypatch):
    """Organizer and three members in one folder; what the guide sends about is where it has to be."""
    monkeypatch.chdir(tmp_path)
    study, node = blocks("toml")
    Path("study.toml").write_text(study)
    Path("node.toml").write_text(node)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output + str(result.exception)
        return result.stdout

    said = ""
    later = {command[1]: command for command in commands() if command[1] in ("remove", "rekey")}
    for command in (command for command in commands() if command[1] not in later):
        if "--check" in command:
            for sent in ("ca.pem", "organizer.pub", "members/cleveland.pem", "roster.toml", "roster.toml.sig"):
                Path(Path(sent).name).write_bytes((tmp_path / "organizer" / sent).read_bytes())
        said = run(*command)
    assert said == "the roster is in order\n"
    assert [m.name for m in roster.load(Path("roster.toml"), Path("organizer.pub")).members] == [
        "cleveland",
        "hungary",
        "switzerland",
    ]
    run("net", "join", "hungary", "198.51.100.9:7447", "--folder", "new")
    run(*later["rekey"])
    run(*later["remove"])
    newest = roster.load(Path("organizer/roster.toml"), Path("organizer.pub"))
    assert (newest.version, newest.host_of, newest.removed) == (3, {0: "cleveland", 2: "switzerland"}, (1,))
    assert Path("cleveland.key").stat().st_mode & 0o777 == 0o600
    assert nodefile.load(Path("node.toml")).metrics_port == 9464
    assert config.load(Path("study.toml")).methods[0].label == "DAC"


def test_the_unit_is_the_one_of_the_guide():
    shipped = (DOCS / "deploy/coterie-node.service").read_text()
    (shown,) = blocks("ini")
    assert shown.strip() == "\n".join(line for line in shipped.splitlines() if not line.startswith("#")).strip()
    unit = configparser.ConfigParser(strict=False)
    unit.read_string(shown)
    assert unit["Service"]["RestartPreventExitStatus"] == "2"


def test_the_compose_file_starts_a_node_that_comes_back_and_may_do_little():
    """Every key is one of the format's; the shell can read the command; what it works in is what is mounted."""
    yaml = pytest.importorskip("yaml")
    document = yaml.safe_load((DOCS / "deploy/compose.yaml").read_text())
    assert document.keys() == {"services"}
    (node,) = document["services"].values()
    assert node.keys() == {
        "image", "user", "working_dir", "command", "environment", "volumes", "network_mode", "restart",
        "stop_grace_period", "security_opt", "cap_drop",
    }  # fmt: skip
    shell, option, command = node["command"]
    assert (shell, option) == ("sh", "-c")
    assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0
    install, start = command.split(" && ")[1:]
    wanted = tomllib.loads((DOCS.parents[1] / "pyproject.toml").read_text())["project"]
    wheel = f"{wanted['name']}-{wanted['version']}-py3-none-any.whl"  # beside it, where the container works
    assert install == f"/tmp/v/bin/pip install './{wheel}[net]'"
    assert "net" in wanted["optional-dependencies"]
    assert start == "exec /tmp/v/bin/coterie node node.toml", "signals reach the node"
    assert re.fullmatch(r"python:3\.1[1-4]-slim", node["image"])
    assert node["volumes"] == [f"./:{node['working_dir']}"]
    assert all(isinstance(value, str) for value in node["environment"].values())
    assert node["restart"].startswith("on-failure")
    assert node["cap_drop"] == ["ALL"]
