"""What differs on the machines of a cluster."""

import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import coterie
from coterie import __version__
from coterie.cluster import _facts
from coterie.cluster.doctor import (
    NAMES,
    Machine,
    check_equal_software,
    check_same_software,
    describe_differences,
    describe_this_machine,
    look_at_machines,
    make_probe,
)
from coterie.errors import ConfigError

OWN = Machine("here", dict.fromkeys(NAMES, "same"))


def other(name, **facts):
    return Machine(name, {**OWN.facts, **facts})


def test_this_machine_tells_what_it_has():
    import torch

    facts = describe_this_machine().facts
    assert set(NAMES) <= set(facts)
    assert facts["coterie"] == __version__
    assert facts["vectors"] == torch.backends.cpu.get_cpu_capability()


def test_machines_that_differ_alike_share_a_line():
    far = [other(f"n{n}", compiler="g++ 9") for n in range(6)] + [other("a", torch=""), OWN]
    assert describe_differences(far, OWN) == [
        "torch: a has none, this machine has same",
        "C++ compiler: n0, n1, n2 and 3 more have g++ 9, this machine has same",
    ]


def test_other_software_is_refused_and_other_processors_are_said():
    check_equal_software([OWN], OWN)
    with pytest.raises(
        ConfigError, match=r"other software .torch: n1 has 2.0, .* install the same on all machines"
    ) as told:
        check_equal_software([other("n1", torch="2.0", processor="old")], OWN)
    assert "\n" not in str(told.value)
    with pytest.warns(
        UserWarning,
        match=r"processor: n1 has old, this machine has same: results agree within the tol",
    ):
        check_equal_software([other("n1", processor="old")], OWN)


def test_a_job_refuses_a_machine_with_other_software_than_the_one_that_asked():
    check_same_software({"torch": describe_this_machine().facts["torch"]})
    with pytest.raises(ConfigError, match=r"torch: .* has .*, the one that asked has 1.0"):
        check_same_software({"torch": "1.0"})


def test_the_facts_of_a_machine_are_read_from_what_is_there(monkeypatch):
    """The digest of the files is that of all of them in the order of their paths."""
    facts = _facts.collect_facts()
    package = Path(coterie.__file__).parent
    content = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    assert facts["code"] == hashlib.sha256(content).hexdigest()[:12]
    assert (facts["python"], facts["host"]) == (platform.python_version(), platform.node())
    listed = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = re.search(r"^model name\s*:\s*(.*)$", listed, re.MULTILINE)
    assert facts["processor"] == (named[1].strip() if named else platform.machine())
    assert re.fullmatch(r"[0-9a-f]{12}", facts["features"])
    assert "\n" not in facts["compiler"]


def pretend_commands(monkeypatch, found, answer):
    """Let a machine have some compilers; return the commands that were run."""
    asked = []

    def run(words, **given):
        asked.append(words)
        return SimpleNamespace(stdout=answer(words))

    monkeypatch.setattr(_facts.shutil, "which", found)
    monkeypatch.setattr(_facts.subprocess, "run", run)
    return asked


@pytest.mark.parametrize(
    ("machine", "option"), [("x86_64", "-march=native"), ("arm64", "-mcpu=native")]
)
def test_the_first_compiler_is_asked_for_its_version_and_its_features(monkeypatch, machine, option):
    monkeypatch.setenv("CXX", "mine++")
    there = {"g++": "/usr/bin/g++", "clang++": "/usr/bin/clang++"}
    monkeypatch.setattr(_facts.platform, "machine", lambda: machine)
    asked = pretend_commands(monkeypatch, there.get, lambda words: "first 9\nsecond\n")
    facts = _facts.collect_facts()
    assert facts["compiler"] == "first 9"
    assert facts["features"] == hashlib.sha256(b"first 9\nsecond\n").hexdigest()[:12]
    assert asked == [
        ("/usr/bin/g++", "--version"),
        ("/usr/bin/g++", option, "-dM", "-E", "-x", "c++", os.devnull),
    ]
    there["mine++"] = "/opt/mine++"
    asked.clear()
    _facts.collect_facts()
    assert asked[0][0] == "/opt/mine++", "what the user names comes first"


def test_a_machine_without_a_compiler_or_with_one_that_hangs_tells_the_rest(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    pretend_commands(monkeypatch, lambda name: None, print)
    facts = _facts.collect_facts()
    assert (facts["compiler"], facts["features"]) == ("", "")
    assert facts["torch"]

    def hang(words):
        raise subprocess.TimeoutExpired(words, 60)

    pretend_commands(monkeypatch, lambda name: "/usr/bin/c++", hang)
    facts = _facts.collect_facts()
    assert (facts["compiler"], facts["features"]) == ("", hashlib.sha256(b"").hexdigest()[:12])


def test_a_machine_without_torch_and_without_coterie_tells_the_rest(monkeypatch):
    def missing(name):
        raise _facts.PackageNotFoundError(name)

    monkeypatch.setattr(_facts, "version", missing)
    monkeypatch.setattr(_facts.util, "find_spec", lambda name: None)
    facts = _facts.collect_facts()
    empty = {
        name for name in ("coterie", "code", "torch", "numpy", "vectors", "gpus") if facts[name]
    }
    assert empty == set()
    assert set(NAMES) <= set(facts)


def test_equal_cards_are_counted(monkeypatch):
    import torch

    cards = ["H100", "A10", "H100"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", cards.__getitem__)
    assert _facts.collect_facts()["gpus"] == "1 x A10, 2 x H100"


def test_the_question_to_a_machine_needs_nothing_of_this_package_there():
    probe = make_probe()
    assert not any(name.startswith("coterie") for name in probe.__globals__.get("__all__", ()))
    assert probe()["coterie"] == __version__


@pytest.fixture
def cluster(monkeypatch):
    """A pretended Ray with two machines that have processors; and what it was asked for."""
    ray = pytest.importorskip("ray")
    asked = {"tasks": []}

    def node(name, alive=True, **resources):
        return {"Alive": alive, "NodeID": f"{name:0>56}", "NodeManagerHostname": f"host {name}",
                "Resources": resources}  # fmt: skip

    nodes = [
        node("a", CPU=2.0),
        node("b", alive=False, CPU=2.0),
        node("c", GPU=1.0),
        node("d", CPU=1.0),
    ]

    def remote(**options):
        asked["options"] = options

        def place(scheduling_strategy):
            where = scheduling_strategy
            asked["tasks"].append((where.node_id.lstrip("0"), where.soft))
            return SimpleNamespace(remote=lambda: where.node_id.lstrip("0"))

        return lambda function: SimpleNamespace(options=place)

    def wait(answers, num_returns, timeout):
        asked["wait"] = (list(answers), num_returns, timeout > 60)

    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: {"torch": f"of {answer}"})
    return ray, nodes, asked


def test_each_machine_with_processors_answers_for_itself(cluster):
    _, _, asked = cluster
    found = look_at_machines()
    assert found == [Machine("host a", {"torch": "of a"}), Machine("host d", {"torch": "of d"})]
    assert asked["tasks"] == [("a", False), ("d", False)], "with soft, another one would answer"
    assert asked["options"] == {"num_cpus": 0, "max_retries": 0}, "a busy machine answers too"
    assert asked["wait"] == (["a", "d"], 2, True)


def test_a_cluster_without_processors_and_a_machine_that_is_silent_are_refused(
    cluster, monkeypatch
):
    ray, nodes, _ = cluster

    def silent(answer, timeout):
        raise ray.exceptions.GetTimeoutError("no\nanswer")

    monkeypatch.setattr(ray, "get", silent)
    with pytest.raises(
        ConfigError, match=r"^host a, a machine .* does not answer .*no answer"
    ) as told:
        look_at_machines()
    assert "\n" not in str(told.value)
    del nodes[0], nodes[-1]
    with pytest.raises(ConfigError, match="no machine of the Ray cluster has processors"):
        look_at_machines()


@pytest.mark.parametrize(("count", "who"), [(1, "n0 has"), (2, "n0 and n1 have"),
                                            (4, "n0, n1, n2 and n3 have"),
                                            (5, "n0, n1, n2 and 2 more have")])  # fmt: skip
def test_up_to_four_machines_are_named(count, who):
    far = [other(f"n{n}", torch="2.0") for n in range(count)]
    # A name that comes twice is said once.
    assert describe_differences([*far, far[0]], OWN) == [f"torch: {who} 2.0, this machine has same"]
