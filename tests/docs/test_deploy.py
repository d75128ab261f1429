"""The guide for three hospitals does what it says: commands run, files are read, the unit is the one shipped."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from scripts import requirements
from typer.testing import CliRunner

from coterie.cli.app import EARLY, NO_ROOM, TOO_FEW, app
from coterie.net import nodefile, process, roster
from coterie.studies import config

DOCS = Path(__file__).resolve().parents[2] / "docs/how-to"
ROOT = DOCS.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GUIDE = (DOCS / "deploy-in-three-hospitals.md").read_text()


def blocks(language: str) -> list[str]:
    """The guide's blocks of code in a language."""
    return re.findall(rf"```{language}(?: title=[^\n]*)?\n(.*?)```", GUIDE, re.DOTALL)


def commands() -> list[list[str]]:
    """The guide's `coterie net` commands, in order."""
    lines = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        # A rehearsal needs the other members: tests/unit/net/test_rehearsal.py has them.
        if line.startswith("coterie net") and "rehearse" not in line
    ]
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
    changes = ("remove", "rekey", "move")
    later = [command for command in commands() if command[1] in changes]
    for command in (command for command in commands() if command[1] not in changes):
        if "--check" in command:
            for sent in (
                "ca.pem",
                "organizer.pub",
                "members/cleveland.pem",
                "roster.toml",
                "roster.toml.sig",
            ):
                Path(Path(sent).name).write_bytes((tmp_path / "organizer" / sent).read_bytes())
        said = run(*command)
    assert said == "the roster is in order\n"
    assert [m.name for m in roster.load(Path("roster.toml"), Path("organizer.pub")).members] == [
        "cleveland",
        "hungary",
        "switzerland",
    ]
    remove, rekey, move, both = later
    run("net", "join", "hungary", "198.51.100.9:7447", "--folder", "new")
    run(*rekey)
    assert "version 3, has hungary at 198.51.100.20:7447" in run(*move)
    shutil.rmtree("new")
    run("net", "join", "hungary", "new.example.org:7447", "--folder", "new")
    run(*both)
    moved = roster.load(Path("organizer/roster.toml"), Path("organizer.pub"))
    assert moved.member("hungary").address == "new.example.org:7447"
    run(*remove)
    newest = roster.load(Path("organizer/roster.toml"), Path("organizer.pub"))
    assert (newest.version, newest.host_of, newest.removed) == (
        5,
        {0: "cleveland", 2: "switzerland"},
        (1,),
    )
    assert Path("cleveland.key").stat().st_mode & 0o777 == 0o600
    assert nodefile.load(Path("node.toml")).metrics_port == 9464
    assert config.load_study(Path("study.toml")).methods[0].label == "DAC"


def test_the_unit_is_the_one_of_the_guide():
    shipped = (DOCS / "deploy/coterie-node.service").read_text()
    (shown,) = blocks("ini")
    assert (
        shown.strip()
        == "\n".join(line for line in shipped.splitlines() if not line.startswith("#")).strip()
    )
    unit = configparser.ConfigParser(strict=False)
    unit.read_string(shown)
    assert unit["Service"]["RestartPreventExitStatus"] == "2"
    assert unit["Service"]["SuccessExitStatus"] == str(process.ALONE), "it would start again"


def restarts(unit: configparser.ConfigParser, status: int) -> bool:
    """Whether systemd starts a service again that has ended with a status, by systemd.service(5)."""
    service = unit["Service"]
    if str(status) in service.get("SuccessExitStatus", "").split():
        return False
    never, always = (
        service.get(f"Restart{kind}ExitStatus", "").split() for kind in ("Prevent", "Force")
    )
    if str(status) in never:
        return False
    return (
        str(status) in always
        or service["Restart"] == "always"
        or (service["Restart"] == "on-failure" and status != 0)
    )


def test_the_service_starts_again_after_what_passes_and_not_after_bad_input_or_the_end():
    """However long the disk stays full or the clock is not set: there is no limit on the number of starts."""
    unit = configparser.ConfigParser(strict=False)
    unit.read_string((DOCS / "deploy/coterie-node.service").read_text())
    expected = {0: False, 1: True, 2: False, 137: True}
    expected |= {process.ALONE: False, EARLY: True, TOO_FEW: True, NO_ROOM: True}
    assert {status: restarts(unit, status) for status in expected} == expected
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"


def test_the_compose_file_starts_a_node_that_comes_back_may_do_little_and_installs_nothing():
    """Every key is one of the format's; what it works in is what is mounted."""
    yaml = pytest.importorskip("yaml")
    document = yaml.safe_load((DOCS / "deploy/compose.yaml").read_text())
    assert document.keys() == {"services"}
    (node,) = document["services"].values()
    assert node.keys() == {
        "build", "image", "pull_policy", "user", "working_dir", "environment", "volumes", "network_mode", "restart",
        "stop_grace_period", "healthcheck", "mem_limit", "pids_limit", "logging", "read_only", "tmpfs", "security_opt",
        "cap_drop",
    }  # fmt: skip
    assert node["build"] == {
        "context": ".", "dockerfile": "Containerfile", "args": {"TORCH_INDEX": "${TORCH_INDEX:-}"}
    }  # fmt: skip
    assert node["image"] == f"coterie-node:{PROJECT['version']}"
    assert node["pull_policy"] == "never"
    assert node["volumes"] == [f"./node:{node['working_dir']}"]
    assert all(isinstance(value, str) for value in node["environment"].values())
    assert node["restart"] == "on-failure"
    assert node["cap_drop"] == ["ALL"]
    assert node["read_only"]
    assert node["tmpfs"] == ["/tmp"]
    assert node["logging"]["options"].keys() == {"max-size", "max-file"}


def test_the_federation_of_containers_has_members_that_meet_the_relay_alone():
    """What each container runs is a command of the program; members share no network."""
    yaml = pytest.importorskip("yaml")
    document = yaml.safe_load((DOCS / "deploy/compose-federation.yaml").read_text())
    node = yaml.safe_load((DOCS / "deploy/compose.yaml").read_text())["services"]["node"]
    services, members = document["services"], ("cleveland", "hungary", "switzerland")
    assert services.keys() == {"relay", *members} == {*document["networks"], "relay"}
    assert services["relay"]["networks"] == list(members)
    for name, one in services.items():
        if name in members:
            assert one["networks"] == [name]
        assert one["volumes"] == [f"./{name}:{one['working_dir']}"]
        # As careful as a node of one run.
        for key in (
            "build",
            "image",
            "user",
            "read_only",
            "tmpfs",
            "security_opt",
            "cap_drop",
            "mem_limit",
        ):
            assert one[key] == node[key], key
        program, *words = one["command"]
        assert program == "coterie"
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)
    assert all(network == {"internal": True} for network in document["networks"].values())


@pytest.mark.parametrize("name", ["compose.yaml", "compose-federation.yaml"])
def test_the_compose_file_is_one_by_the_schema_of_its_format(name):
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    ended = subprocess.run(
        [*checker, DOCS / "deploy" / name], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout


@pytest.fixture
def objects() -> dict[str, dict]:
    """The objects of the Kubernetes manifest, by kind."""
    yaml = pytest.importorskip("yaml")
    return {
        one["kind"]: one
        for one in yaml.safe_load_all((DOCS / "deploy/kubernetes.yaml").read_text())
    }


def test_the_kubernetes_manifest_has_objects_that_a_cluster_takes(objects):
    validate = pytest.importorskip("kubernetes_validate")
    assert objects.keys() == {"Service", "StatefulSet"}
    for version in ("1.31", "1.37"):
        for one in objects.values():
            validate.validate(one, version, strict=True)


def test_the_pod_keeps_the_key_to_itself_and_runs_once(objects):
    """The key is copied with a mode that a node takes, to memory; all that is mounted is there."""
    spec = objects["StatefulSet"]["spec"]
    assert spec["replicas"] == 1
    pod = spec["template"]["spec"]
    (copy,), (node,) = pod["initContainers"], pod["containers"]
    assert "install -m 0600 /secret/*.key" in copy["command"][-1]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["work"]["emptyDir"]["medium"] == "Memory"
    claims = {one["metadata"]["name"] for one in spec["volumeClaimTemplates"]}
    for container in (copy, node):
        assert {one["name"] for one in container["volumeMounts"]} <= volumes.keys() | claims
        assert container["image"] == f"coterie-node:{PROJECT['version']}"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= node.keys()
    labels = spec["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"] == labels


def test_the_probes_ask_what_a_node_serves(objects):
    """The same question in both files, answered by the metrics of a node on that port alone."""
    yaml = pytest.importorskip("yaml")
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    compose = yaml.safe_load((DOCS / "deploy/compose.yaml").read_text())["services"]["node"]
    probes = [
        pod[f"{name}Probe"]["exec"]["command"] for name in ("startup", "liveness", "readiness")
    ]
    probes.append(compose["healthcheck"]["test"][1:])
    assert all(one == probes[0] for one in probes)
    assert "http://127.0.0.1:9464/metrics" in probes[0][-1]
    shown = next(text for text in blocks("toml") if "metrics_port" in text)
    assert tomllib.loads(shown)["metrics_port"] == 9464


def test_the_unit_gives_a_node_little_of_the_machine():
    """By systemd's own measure of 0 to 10."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager"]
    ended = subprocess.run(
        [*command, DOCS / "deploy/coterie-node.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    rated = re.search(r"exposure level for coterie-node.service: (\d\.\d)", ended.stdout)
    assert rated
    assert f"rates its exposure {rated[1]} of 10" in GUIDE


def instructions() -> list[tuple[str, str]]:
    """The instructions of the image, in order."""
    lines = (DOCS / "deploy/Containerfile").read_text().splitlines()
    return [
        (line.split(" ", 1)[0], line.split(" ", 1)[1])
        for line in lines
        if line and not line.startswith("#")
    ]


def test_the_image_installs_what_has_a_digest_and_the_wheel_and_nothing_else():
    found = instructions()
    assert [name for name, _ in found] == [
        "ARG", "FROM", "ENV", "ARG", "COPY", "RUN", "COPY", "RUN", "USER", "WORKDIR", "CMD"
    ]  # fmt: skip
    assert re.fullmatch(r"PYTHON=python:3\.1[1-4]-slim", found[0][1])
    runs = [what for name, what in found if name == "RUN"]
    for command in runs:
        assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0
    assert runs[0].startswith("pip install --require-hashes --only-binary :all: ")
    assert runs[0].endswith("-r /tmp/requirements.txt")
    wheel = f"{PROJECT['name']}-{PROJECT['version']}-py3-none-any.whl"
    assert runs[1] == f"pip install --no-index --no-deps /tmp/{wheel} && pip check"
    copied = [what.split() for name, what in found if name == "COPY"]
    assert copied == [["requirements.txt", "/tmp/requirements.txt"], [wheel, "/tmp/"]]
    assert found[-1][1] == '["coterie", "node", "node.toml"]', "signals reach the node"


def test_every_package_of_the_image_has_a_version_and_a_digest():
    """All that the package asks for is there, in the tested versions, and nothing says where it comes from."""
    lines = [
        line
        for line in (DOCS / "deploy/requirements.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    found = {}
    for line in lines:
        match = re.fullmatch(
            r"([A-Za-z0-9_.-]+)==([A-Za-z0-9_.+!]+) --hash=sha256:[0-9a-f]{64}", line
        )
        assert match, line
        found[plain(match[1])] = match[2]
    assert len(found) == len(lines)
    tested = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line[0] != "#"
    )
    tested = {plain(name): version for name, version in tested.items()}
    assert {
        name: version.partition("+")[0] for name, version in found.items() if name in tested
    } == {name: version for name, version in tested.items() if name in found}
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["net"]]
    assert {plain(re.split("[<>=]", one)[0]) for one in asked} <= found.keys()


def plain(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub("[-_.]+", "-", name).lower()


def test_the_list_of_packages_is_made_of_what_pip_reports():
    def one(name: str, **hashes: str) -> dict:
        return {
            "metadata": {"name": name, "version": "1.0"},
            "download_info": {"archive_info": {"hashes": hashes}},
        }

    made = requirements.text(
        {"install": [one("b", sha256="22"), one("A", sha256="11")]}, "Python 3.11"
    )
    assert made.splitlines()[2:] == ["A==1.0 --hash=sha256:11", "b==1.0 --hash=sha256:22"]
    with pytest.raises(SystemExit, match=r"no SHA-256 of b 1\.0"):
        requirements.text({"install": [one("b", md5="22")]}, "Python 3.11")
