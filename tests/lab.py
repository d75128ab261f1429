"""Machines with networks of their own, and firewalls that let nothing in: Linux namespaces and nftables.

It needs the rights of root. A machine has one address and one folder; every address is reached over one
switch, so that pages may name addresses of documentation (RFC 5737) and be run as they are.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

FIREWALL = """
table inet firewall {
    chain from_outside {
        type filter hook input priority 0; policy drop;
        iif lo accept
        ct state established,related accept
    }
}
"""
"""What hospitals have: connections to the outside and their answers, and nothing from outside."""


def run_quietly(*command: str, text: str | None = None) -> None:
    """Run a command that has to succeed."""
    subprocess.run(command, check=True, capture_output=True, input=text, text=True)


@dataclass(frozen=True)
class Machine:
    """A machine of the laboratory.

    Args:
        name: of its namespace.
        folder: in which its commands run.
    """

    name: str
    folder: Path

    def start(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        """Start a command, whose output goes to a file of the folder."""
        inside = ["ip", "netns", "exec", self.name, *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self.folder / log).open("wb") as output:
            return subprocess.Popen(
                inside, cwd=self.folder, stdout=output, stderr=output, env=environment
            )

    def run(self, command: Sequence[str], seconds: float = 120.0) -> str:
        """Run a command and return its output.

        Raises:
            AssertionError: when it fails, with its output.
        """
        inside = ["ip", "netns", "exec", self.name, *command]
        done = subprocess.run(
            inside, cwd=self.folder, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def close_the_door(self) -> None:
        """Let nothing in from outside."""
        run_quietly("ip", "netns", "exec", self.name, "nft", "-f", "-", text=FIREWALL)


@contextmanager
def connect_machines(folder: Path, addresses: dict[str, str]) -> Iterator[dict[str, Machine]]:
    """Make machines on one switch, and remove them in the end.

    Args:
        folder: gets a folder for each machine.
        addresses: of each machine by its name.
    """
    base = f"lab{os.getpid()}"
    machines = {}
    try:
        run_quietly("ip", "netns", "add", base)
        run_quietly("ip", "-n", base, "link", "add", "switch", "type", "bridge")
        run_quietly("ip", "-n", base, "link", "set", "switch", "up")
        for number, (name, address) in enumerate(addresses.items()):
            machine = Machine(f"{base}-{name}", folder / name)
            machine.folder.mkdir(parents=True)
            machines[name] = machine
            run_quietly("ip", "netns", "add", machine.name)
            cable = ["type", "veth", "peer", "name", f"port{number}", "netns", base]
            run_quietly("ip", "link", "add", "eth0", "netns", machine.name, *cable)
            run_quietly("ip", "-n", base, "link", "set", f"port{number}", "master", "switch", "up")
            run_quietly("ip", "-n", machine.name, "addr", "add", f"{address}/32", "dev", "eth0")
            for link in ("lo", "eth0"):
                run_quietly("ip", "-n", machine.name, "link", "set", link, "up")
            run_quietly("ip", "-n", machine.name, "route", "add", "default", "dev", "eth0")
        yield machines
    finally:
        for name in [base, *(machine.name for machine in machines.values())]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def need_namespaces() -> None:
    """Skip a test where machines cannot be made."""
    missing = [name for name in ("ip", "nft") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no namespaces: {missing[0]} is not installed")
    name = f"lab{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    if tried.returncode:
        pytest.skip("no namespaces: they need the rights of root")
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
