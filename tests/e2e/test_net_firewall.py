"""Behind firewalls that let nothing in: a page of the documentation, run on machines with networks of their own."""

import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from tests.docs.test_docs import DOCS, blocks, commands
from tests.e2e.test_net_outbound import table
from tests.lab import Machine, connect_machines, need_namespaces

pytestmark = [pytest.mark.e2e, pytest.mark.full]

PAGE = DOCS / "how-to/no-open-port.md"
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
PLACES = {"# at North": "north", "# at South": "south", "# at East": "east",
          "# on the relay's machine": "relay"}  # fmt: skip
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

    results = [next((tmp_path / name / "runs").rglob("metrics.parquet")) for name in MEMBERS]
    joined = pd.concat([pd.read_parquet(path) for path in results])
    simulated = next((tmp_path / "organizer/runs").rglob("metrics.parquet"))
    own, other = table(joined), table(pd.read_parquet(simulated))
    columns = ["round", "client", "split", "model", "metric"]
    together = own.merge(other, on=columns, suffixes=("", " simulated"), validate="1:1")
    assert len(together) == len(own) == len(other)
    assert (together["value"] == together["value simulated"]).all()
