"""What the measurements share: random images, the memory of a process, and how results are kept."""

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from coterie._util.files import write_atomically
from coterie.data.federation import Federation, TestSet


def images(clients: int, samples: int, side: int, channels: int) -> Federation:
    """Return random bytes as images for every client, a fifth of them for validation."""
    stream = torch.Generator().manual_seed(0)

    def bytes_(*shape: int) -> torch.Tensor:
        return torch.randint(256, (*shape, channels, side, side), generator=stream, dtype=torch.uint8)

    def labels(*shape: int) -> torch.Tensor:
        return torch.randint(10, shape, generator=stream)

    split = (torch.arange(samples) >= samples * 4 // 5).to(torch.int64).expand(clients, -1)
    ids = torch.arange(clients)
    test = TestSet(bytes_(32), labels(32), "all")
    return Federation(
        x=bytes_(clients, samples), y=labels(clients, samples), split=split, tests=(test,),
        test_of=torch.zeros_like(ids), ids=ids, population=clients, classes=10,
    )  # fmt: skip


def resident(process: int | str = "self", name: str = "VmRSS") -> int | None:
    """Return the memory of a process in bytes, now ("VmRSS") or at most so far ("VmHWM"); None when it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def machine(*packages: str) -> dict[str, Any]:
    """Describe the machine and the versions of Python, torch and other packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", *packages)},
    }


def keep(
    path: Path, command: Sequence[str], results: Sequence[Mapping[str, Any]], where: Mapping[str, Any], **more: Any
) -> None:
    """Write measurements as JSON, with the command that repeats them and the machine.

    Args:
        path: the file.
        command: the words of the command.
        results: the rows.
        where: the machine; see `machine`.
        more: further entries.
    """
    content = {"command": shlex.join(command), **more, "machine": where, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
