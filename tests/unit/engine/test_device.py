"""A device that is not here is refused in one line that says why and what to do."""

import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from tests.selection import first_only

from coterie.engine.device import check_device, describe_devices
from coterie.errors import ConfigError
from coterie.methods import FedAvg
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task


@pytest.fixture
def machine(monkeypatch):
    """Make this a machine with some CUDA devices, or a PyTorch without CUDA (None)."""

    def make(number: int | None) -> None:
        monkeypatch.setattr(torch.version, "cuda", None if number is None else "13.0")
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", Mock(return_value=bool(number)))
        monkeypatch.setattr(torch.cuda, "device_count", Mock(return_value=number or 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", "NVIDIA A{}".format)

    return make


@pytest.mark.parametrize(
    ("number", "device", "line"),
    [
        (
            None,
            "cuda",
            r"device is 'cuda', but PyTorch \S+ is built without CUDA: install .*, or set device = 'cpu'$",
        ),
        (None, "cuda:1", "device is 'cuda:1', but PyTorch .* is built without CUDA: install"),
        (
            0,
            "cuda",
            r"device is 'cuda', but PyTorch \S+ finds no CUDA device: look at its driver .*, or set device =",
        ),
        (1, "cuda:1", "device is 'cuda:1'; this machine has 'cuda'$"),
        (4, "cuda:4", "device is 'cuda:4'; this machine has 'cuda:0' to 'cuda:3'$"),
        (1, "mps", "device is 'mps'; expected 'cpu', 'cuda', .*; 'mps' has no float64"),
        (
            1,
            "gpu",
            "device is 'gpu'; expected 'cpu', 'cuda', or 'cuda:1' for the second device of several$",
        ),
        (1, "cuda:-1", "device is 'cuda:-1'; expected"),
        (1, "", "device is ''; expected"),
        (1, "meta", "device is 'meta'; expected"),
    ],
)
def test_what_is_not_here_is_refused_in_a_line(machine, number, device, line):
    machine(number)
    with pytest.raises(ConfigError, match=line) as caught:
        check_device(device)
    assert "\n" not in str(caught.value)


def test_what_is_here_is_taken(machine):
    machine(2)
    for device in ("cpu", "cuda", "cuda:0", "cuda:1"):
        check_device(device)
    assert describe_devices() == "CUDA: NVIDIA A0, NVIDIA A1"
    machine(None)
    check_device("cpu")
    assert describe_devices().startswith("no CUDA: PyTorch ")


def test_tasks_and_simulations_refuse_it_before_they_begin(machine, tmp_path):
    machine(None)
    with pytest.raises(ConfigError, match="device is 'cuda', but"):
        build_task(tiny_federation().host(range(6)), "linear", device="cuda")
    with pytest.raises(ConfigError, match="device is 'cuda', but"):
        simulate(
            tiny_federation(),
            FedAvg(),
            model="linear",
            settings=tiny_settings(device="cuda"),
            folder=tmp_path / "x",
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "said"),
    first_only(
        [("cuda", "device is 'cuda', but"), ("graphics", "device is 'graphics'; expected")],
        slow=True,
    ),
)
def test_the_command_line_says_it_in_one_line_and_ends_with_2(device, said, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        device, said = "cuda:99", "device is 'cuda:99'; this machine has"
    command = [
        sys.executable,
        "-m",
        "coterie",
        "run",
        "--set",
        f"device={device}",
        "--out",
        str(tmp_path / "runs"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"coterie: {said}")
    assert not (tmp_path / "runs").exists()
