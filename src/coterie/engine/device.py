"""Devices: where models are trained and measured, and what this machine has."""

import re

import torch

from coterie.errors import ConfigError

_KNOWN = "'cpu', 'cuda', or 'cuda:1' for the second device of several"


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have, or on which Coterie does not compute.

    Args:
        device: as a setting names it.

    Raises:
        ConfigError: with what was found and what to use instead.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if found is None:
        hint = ""
        if device.startswith("mps"):
            hint = "; 'mps' has no float64, in which models are averaged"
        raise ConfigError(f"device is {device!r}; expected {_KNOWN}{hint}")
    if device == "cpu":
        return
    number = _count_cuda_devices()
    if not number:
        raise ConfigError(f"device is {device!r}, but {_why_no_cuda()}, or set device = 'cpu'")
    if int(found[1] or 0) >= number:
        known = "'cuda'" if number == 1 else f"'cuda:0' to 'cuda:{number - 1}'"
        raise ConfigError(f"device is {device!r}; this machine has {known}")


def _count_cuda_devices() -> int:
    # The driver may count devices that this build of PyTorch cannot use.
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


def _why_no_cuda() -> str:
    """Say why there is no CUDA device, and what to do."""
    # A build for ROCm answers to the name of CUDA as well.
    if torch.version.cuda is None and torch.version.hip is None:
        advice = "install a build with it (pytorch.org/get-started)"
        return f"PyTorch {torch.__version__} is built without CUDA: {advice}"
    return f"PyTorch {torch.__version__} finds no CUDA device: look at its driver (nvidia-smi)"


def describe_devices() -> str:
    """Say in a line which CUDA devices this machine has, or why it has none."""
    names = list(map(torch.cuda.get_device_name, range(_count_cuda_devices())))
    if not names:
        return f"no CUDA: {_why_no_cuda()}"
    return f"CUDA: {', '.join(names)}"
