"""`--on` and what belongs to it: what is asked for wrongly is one line, and nothing is written."""

from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from coterie.cli import _cluster
from coterie.cli._cluster import MANY, RunLocation
from coterie.cli.app import app
from coterie.cluster import doctor, runs
from coterie.cluster.doctor import NAMES, Machine
from coterie.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--on", "moon"), r"--on is 'moon'; expected local, ray:auto, "),
        (("run", "--cpus", "2"), r"--cpus and --gpus apply to runs on a cluster; give --on too"),
        (("run", "--gpus", "0.5"), r"--cpus and --gpus apply to runs on a cluster; give --on too"),
        (("run", "--on", "slurm:cpu", "--gpus", "0.5"), r"--gpus is 0.5; expected a whole number"),
        (
            ("run", "--on", "ray:127.0.0.1:1"),
            r"--on ray:127.0.0.1:1: no Ray answers at 127.0.0.1:1",
        ),
        (("doctor", "--on", "local"), r"--on local is this machine alone"),
        (
            ("doctor", "--on", "ray:auto", "--model", "cnn-b"),
            r"doctor takes one of a node file, --model and --on",
        ),
        (("status", "nothing"), r"nothing holds no study"),
    ],
)
def test_what_is_asked_for_wrongly_is_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).count("\n") == 0
    with pytest.raises(ConfigError, match=said):
        raise done.exception
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (RunLocation("local", 1, None), []),
        (RunLocation("ray:auto", 1, None), ["--on", "ray:auto"]),
        (RunLocation("slurm:gpu", 4, 1.0), ["--on", "slurm:gpu", "--gpus", "1", "--cpus", "4"]),
    ],
)
def test_the_command_that_goes_on_names_the_same_place(where, words):
    assert where.option_words == words


@pytest.mark.parametrize(
    ("device", "given", "gpus"),
    [("cpu", None, 0), ("cuda", None, 1), ("cuda", 0.25, 0.25)],
    ids=str,
)
def test_a_study_on_a_gpu_takes_one_if_nothing_is_said(device, given, gpus, monkeypatch):
    asked = []

    @contextmanager
    def open_ray_runs(place, **options):
        asked.append(options)
        yield "over"

    monkeypatch.setattr(runs, "open_ray_runs", open_ray_runs)
    with RunLocation("ray:auto", 2, given).open_executor(device, None) as found:
        assert found == ("over", MANY)
    assert asked == [{"cpus": 2, "gpus": gpus}]


@pytest.mark.parametrize(
    ("changed", "status", "last"),
    [
        ({}, 0, "ok     2 machines, equal to this one: runs leave the same bytes"),
        (
            {"numpy": "1"},
            0,
            "ok     2 machines: results agree within the tolerance of an engine; their bytes may differ",
        ),
        ({"torch": "1"}, 1, "WRONG  2 machines: install the same on all"),
    ],
)
def test_doctor_says_what_differs_a_line_each(changed, status, last, monkeypatch):
    own = Machine("here", dict.fromkeys(NAMES, "same"))
    far = [Machine("a", own.facts), Machine("b", {**own.facts, **changed})]
    monkeypatch.setattr(doctor, "describe_this_machine", lambda: own)
    monkeypatch.setattr(_cluster, "_examine_machines", lambda on: far)
    done = CliRunner().invoke(app, ["doctor", "--on", "ray:auto"])
    assert done.exit_code == status
    first, *_ = lines = done.output.splitlines()
    assert lines[-1] == last
    assert len(lines) == 1 + len(changed)
    for name, value in changed.items():
        assert first.endswith(f"{NAMES[name]}: b has {value}, this machine has same")
