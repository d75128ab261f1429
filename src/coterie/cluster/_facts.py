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
        # A program that is missing or hangs leaves its fact empty: the other facts still count.
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
    # `find_spec` finds the package without running it, so a machine without Coterie reports the
    # rest.
    spec = util.find_spec("coterie")
    if spec is not None and spec.origin:
        import coterie

        folder = Path(spec.origin).parent
        found["coterie"] = coterie.__version__
        # Two checkouts of one version may differ, so the files count. Sorted: the order in which a
        # file system lists them must not change the digest.
        found["code"] = hash_short(
            b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
        )
    if found["torch"]:
        import torch

        found["vectors"] = torch.backends.cpu.get_cpu_capability()
        cards = list(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
        found["gpus"] = ", ".join(f"{cards.count(card)} x {card}" for card in sorted({*cards}))
    # In the order in which the compiled engine looks for one; see `engine.native.compiler`.
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    compilers = map(shutil.which, names)
    compiler = next(filter(None, compilers), None)
    if compiler is not None:
        # x86 compilers take -march=native; ARM compilers need -mcpu=native for the same choice.
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        found["compiler"] = run_command(compiler, "--version").partition("\n")[0]
        # `-dM -E` prints the predefined macros, which name the instruction sets that compiled
        # programs use.
        found["features"] = hash_short(
            run_command(compiler, native, "-dM", "-E", "-x", "c++", os.devnull)
        )
    # Linux alone has this file, and on ARM it often names no model.
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found["processor"] = names[0] if names else platform.machine()
    return {**found, "python": platform.python_version(), "host": socket.gethostname()}
