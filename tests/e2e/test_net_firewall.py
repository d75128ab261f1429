"""Behind firewalls that let nothing in: a page of the documentation, run on machines with networks of their own."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.docs.test_docs import DOCS, Block, blocks, commands
from tests.e2e.test_net_outbound import table
from tests.lab import Machine, connect_machines, need_namespaces

from coterie.data import heart_disease

pytestmark = [pytest.mark.e2e, pytest.mark.full]

PAGE = DOCS / "how-to/no-open-port.md"
GUIDE = DOCS / "how-to/bring-a-hospital-in.md"
COTERIE = str(Path(sys.executable).with_name("coterie"))
ADDRESSES = {
    "organizer": "203.0.113.1",
    "north": "192.0.2.7",
    "south": "198.51.100.8",
    "east": "203.0.113.9",
    "relay": "192.0.2.9",
}
BEHIND = ("south", "east")
MEMBERS = ("north", *BEHIND)
PLACES = {
    "# at North": "north",
    "# at South": "south",
    "# at East": "east",
    "# at Cleveland": "cleveland",
    "# at Switzerland": "switzerland",
    "# on the relay's machine": "relay",
}
HOSPITALS = {
    "organizer": "203.0.113.1",
    "cleveland": "198.51.100.8",
    "hungary": "203.0.113.9",
    "switzerland": "203.0.113.4",
    "relay": "192.0.2.9",
}
LISTEN = "import socket, time; s = socket.create_server(('0.0.0.0', 7447)); time.sleep(60)"
DIAL = "import socket; socket.create_connection(('{}', 7447), 2).close()"


def find_place(line: str) -> str:
    """On which machine the page runs a command."""
    return next((name for comment, name in PLACES.items() if comment in line), "organizer")


def send(machines: dict[str, Machine], source: str, target: str, *names: str) -> None:
    """Bring files from one machine's folder to another's, as people do by mail."""
    for name in names:
        shutil.copy(machines[source].folder / name, machines[target].folder / Path(name).name)


def test_the_page_of_a_closed_door_works_behind_firewalls(tmp_path: Path):
    """Commands, files and addresses are the page's; results are those of the simulation."""
    need_namespaces()
    shells = blocks(PAGE, "sh")
    files = {block.title: block.text for block in blocks(PAGE, "toml") if block.title}
    with connect_machines(tmp_path, ADDRESSES) as machines:
        for name in BEHIND:
            machines[name].close_the_door()
        (machines["organizer"].folder / "study.toml").write_text(files["study.toml"])

        keys, signing, relay, nodes = shells
        for line, words in zip(
            (line for line in keys.text.splitlines() if line), commands(keys), strict=True
        ):
            machines[find_place(line)].run([COTERIE, *words[1:]])
        for name in (*MEMBERS, "relay"):
            send(machines, name, "organizer", f"{name}.csr")
        for words in commands(signing):
            found = machines["organizer"].run([COTERIE, *words[1:]])
        assert found == "the roster is in order\n"

        common = ["ca.pem", "organizer.pub", "roster.toml", "roster.toml.sig"]
        for name in (*MEMBERS, "relay"):
            sent = [f"organizer/{file}" for file in (*common, f"members/{name}.pem")]
            send(machines, "organizer", name, *sent)
        (machines["relay"].folder / "relay.toml").write_text(files["relay.toml"])
        page = blocks(PAGE, "toml")
        own = next(block.text for block in page if 'key = "south.key"' in block.text)
        for name in MEMBERS:
            send(machines, "organizer", name, "study.toml")
            text = own.replace("south.", f"{name}.")
            (machines[name].folder / "node.toml").write_text(text)

        # The firewalls do what they should: out, and not in.
        listening = {n: machines[n].start([sys.executable, "-c", LISTEN], "l") for n in MEMBERS}
        try:
            dial = [sys.executable, "-c", DIAL.format(ADDRESSES["south"])]
            with pytest.raises(AssertionError, match="timed out"):
                machines["north"].run(dial)
            machines["south"].run([sys.executable, "-c", DIAL.format(ADDRESSES["north"])])
        finally:
            for one in listening.values():
                one.kill()
                one.wait()

        running = [machines["relay"].start([COTERIE, *commands(relay)[0][1:]], "relay.log")]
        try:
            for words in commands(nodes):
                started = {
                    name: machines[name].start([COTERIE, *words[1:]], f"{words[1]}.log")
                    for name in MEMBERS
                }
                running += started.values()
                for name, one in started.items():
                    status = one.wait(timeout=240)
                    said = (machines[name].folder / f"{words[1]}.log").read_text()
                    assert status == 0, f"{name}: {words}: {said[-3000:]}"
                    assert "Traceback" not in said
        finally:
            for one in running:
                one.kill()
                one.wait()
        machines["organizer"].run([COTERIE, "run", "study.toml", "--out", "runs", "--quiet"], 300)

    check_equal([tmp_path / name / "runs" for name in MEMBERS], tmp_path / "organizer/runs")


def check_equal(runs: list[Path], simulation: Path) -> None:
    """The results of members are those of a simulation, to the byte."""
    results = [next(folder.rglob("metrics.parquet")) for folder in runs]
    joined = pd.concat([pd.read_parquet(path) for path in results])
    simulated = next(simulation.rglob("metrics.parquet"))
    own, other = table(joined), table(pd.read_parquet(simulated))
    columns = ["round", "client", "split", "model", "metric"]
    together = own.merge(other, on=columns, suffixes=("", " simulated"), validate="1:1")
    assert len(together) == len(own) == len(other)
    assert np.array_equal(together["value"].to_numpy(), together["value simulated"].to_numpy())


def find_block(start: str) -> Block:
    """The commands of the guide that begin so."""
    return next(block for block in blocks(GUIDE, "sh") if block.text.startswith(start))


def wait_until(run: Callable[[], str], expected: str, seconds: float = 90.0) -> str:
    """Repeat a command until it says something; return all that it says."""
    end = time.monotonic() + seconds
    while expected not in (found := run()):
        assert time.monotonic() < end, f"{expected!r} is not in {found}"
        time.sleep(3)  # a command takes as long of a processor's time
    return found


class Hospitals:
    """The machines of the guide, with the files that people send each other.

    Args:
        machines: by name.
        stack: ends what was started.
    """

    members = ("cleveland", "hungary", "switzerland")

    def __init__(self, machines: dict[str, Machine], stack: ExitStack) -> None:
        self.machines, self._stack = machines, stack
        self.files = {block.title: block.text for block in blocks(GUIDE, "toml")}
        for name in self.members:
            machines[name].close_the_door()

    def say(self, name: str, words: list[str]) -> str:
        """Run a command, whatever its exit status, and return what it says."""
        inside = ["ip", "netns", "exec", self.machines[name].name, COTERIE, *words[1:]]
        folder = self.machines[name].folder
        return subprocess.run(
            inside, cwd=folder, capture_output=True, text=True, timeout=120, check=False
        ).stdout

    def run(self, name: str, words: list[str]) -> str:
        """Run a command that succeeds."""
        return self.machines[name].run([COTERIE, *words[1:]])

    def start(self, name: str, words: list[str]) -> None:
        """Start a command that runs to the end of the test."""
        one = self.machines[name].start([COTERIE, *words[1:]], "service.log")
        self._stack.callback(one.wait)
        self._stack.callback(one.kill)

    def set_up(self) -> None:
        """Keys, signatures, and what each gets from the organizer."""
        self.run("hungary", commands(find_block("coterie federation join"))[0])
        organizing = find_block("coterie federation create")
        lines = [line for line in organizing.text.splitlines() if line]
        for line, words in zip(lines, commands(organizing), strict=True):
            if words[2] == "sign":
                send(self.machines, words[4].removesuffix(".csr"), "organizer", words[4])
            self.run(find_place(line), words)
        common = ["ca.pem", "organizer.pub", "roster.toml", "roster.toml.sig"]
        for name in (*self.members, "relay"):
            sent = [f"organizer/{file}" for file in (*common, f"members/{name}.pem")]
            send(self.machines, "organizer", name, *sent)
        (self.machines["relay"].folder / "relay.toml").write_text(self.files["relay.toml"])
        patients = heart_disease.load_table()
        for name in self.members:
            folder = self.machines[name].folder
            own = patients[patients["hospital"] == name]
            own.to_csv(folder / "patients.csv", index=False)
            (folder / "node.toml").write_text(self.files["node.toml"].replace("hungary", name))

    def simulate_rehearsal(self) -> None:
        """Run the rehearsal as a simulation, on a table of all hospitals."""
        folder = self.machines["organizer"].folder
        patients = heart_disease.load_table()
        patients[patients["hospital"].isin(self.members)].to_csv(folder / "all.csv", index=False)
        _, data = self.files["node.toml"].split("[data.heart]")
        data = data.replace("[data.heart.options]", "[data.options]").replace("patients", "all")
        study = self.files["rehearsal.toml"].replace('data = "heart"\n', "")
        (folder / "simulated.toml").write_text(f"{study}\n[data]{data}")
        self.run("organizer", ["coterie", "run", "simulated.toml", "--out", "runs", "--quiet"])


def test_the_guide_for_a_hospital_works_behind_firewalls(tmp_path: Path):
    """What hospitals and their organizer do, each on its machine; nobody opens a port."""
    need_namespaces()
    with connect_machines(tmp_path, HOSPITALS) as machines, ExitStack() as stack:
        hall = Hospitals(machines, stack)
        hall.set_up()
        hall.start("relay", commands(find_block("coterie relay"))[0])
        check = commands(find_block("coterie federation check"))[0]
        found = wait_until(partial(hall.say, "hungary", check), ": its port is open")
        assert found == next(block.text for block in blocks(GUIDE, "text"))

        for name in hall.members:
            hall.start(name, commands(find_block("coterie federation serve"))[0])
        for name in ("cleveland", "switzerland"):
            wait_until(partial(hall.say, "hungary", check), f"{name}: here")

        (machines["cleveland"].folder / "rehearsal.toml").write_text(hall.files["rehearsal.toml"])
        hall.run("cleveland", commands(find_block("coterie propose"))[0])
        listing = ["coterie", "studies", "--node", "node.toml"]
        for name in ("hungary", "switzerland"):
            wait_until(partial(hall.say, name, listing), "rehearsal: proposed")
            for words in commands(find_block("coterie studies")):
                # A linear model of 14 numbers and two classes has 30 numbers of 4 bytes.
                assert "120 bytes" in hall.run(name, words)
        for name in hall.members:
            wait_until(partial(hall.say, name, listing), "rehearsal: done")
        hall.simulate_rehearsal()
        runs = [tmp_path / name / "studies/rehearsal" for name in hall.members]
        check_equal(runs, tmp_path / "organizer/runs")
        assert all(
            "Traceback" not in (one.folder / "service.log").read_text()
            for one in machines.values()
            if (one.folder / "service.log").exists()
        )
