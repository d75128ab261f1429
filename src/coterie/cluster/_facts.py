"""The facts of a machine for `doctor`.

The text of this file is executed on the other machine, so it needs nothing of the package.
"""

import hashlib
import os
import platform
import shutil
import socket
import subprocess
from importlib import util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def collect_facts() -> dict[str, str]:
    """Return the facts of this machine by name, "" where one is missing; see `doctor.NAMES`."""

    def run_command(*words: str) -> str:
        try:
            return subprocess.run(
                words, capture_output=True, text=True, timeout=60, check=False
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            return ""

    def hash_short(text: str | bytes) -> str:
        return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:12]

    found: dict[str, str] = dict.fromkeys(
        ("coterie", "code", "torch", "numpy", "vectors", "features", "compiler", "gpus"), ""
    )
    for name in ("torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    spec = util.find_spec("coterie")
    if spec is not None and spec.origin:
        import coterie

        folder = Path(spec.origin).parent
        found["coterie"] = coterie.__version__
        found["code"] = hash_short(
            b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
        )
    if found["torch"]:
        import torch

        found["vectors"] = torch.backends.cpu.get_cpu_capability()
        cards = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        found["gpus"] = ", ".join(f"{cards.count(card)} x {card}" for card in sorted({*cards}))
    compilers = (
        shutil.which(name) for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name
    )
    compiler = next(filter(None, compilers), None)
    if compiler is not None:
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        found["compiler"] = run_command(compiler, "--version").partition("\n")[0]
        found["features"] = hash_short(
            run_command(compiler, native, "-dM", "-E", "-x", "c++", os.devnull)
        )
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found["processor"] = names[0] if names else platform.machine()
    return {**found, "python": platform.python_version(), "host": socket.gethostname()}
