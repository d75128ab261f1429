"""What the measurements of the network share: studies, namespaces joined by bridges, memory, how results are kept."""

import os
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _measured
import pandas as pd
import torch
from replay import replay
from safetensors.torch import load_file

from coterie.net import local, roster
from coterie.net.identity import Identity
from coterie.net.node import RunSpec
from coterie.net.roster import Roster
from coterie.net.transport import Transport
from coterie.studies import config

STUDY = """
name = "network"
rounds = {rounds}
seeds = [{seed}]
engine = "loop"
acceptance = true
model = {{ kind = "cnn-b" }}

[data]
dataset = "digits"
num_clients = {clients}
train = {train}
validation = 15
shift = [{{ kind = "rotation", degrees = [0, 180] }}]

[local]
epochs = {epochs}
lr = 0.003

[[methods]]
{method}
"""
FIREWALL = """
table inet firewall {{
    chain from_outside {{
        type filter hook input priority 0; policy drop;
        iif lo accept
        ct state established,related accept
    }}
    chain to_outside {{
        type filter hook output priority 0; policy drop;
        oif lo accept
        ip daddr {way} accept
    }}
}}
"""
Result = dict[str, Any]
Emit = Callable[[Result], None]


def study_of(
    method: str, *, clients: int, rounds: int, seed: int = 0, train: int = 60, epochs: int = 1
) -> config.StudyConfig:
    """Return a study of one run on the bundled digits in two rotations.

    Args:
        method: the entry of the method, as in a study file.
        clients: how many.
        rounds: how many.
        seed: of all random streams.
        train: training samples of a client.
        epochs: of local training.
    """
    text = STUDY.format(
        clients=clients, rounds=rounds, seed=seed, train=train, epochs=epochs, method=method
    )
    study = config.parse_study_text(text)
    return study.select_run(study.methods[0].label, seed)


def models_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the newest and the best models of a run."""
    tensors = load_file(folder / "checkpoint.safetensors")
    return {name: tensors[name] for name in ("state.params", "tracker.best")}


def final_accuracy(folder: Path) -> dict[int, float]:
    """Return the test accuracy of each client of a run at its end, in percent."""
    frame = pd.read_parquet(folder / "metrics.parquet")
    rows = frame[(frame["split"] == "test") & (frame["metric"] == "accuracy")]
    last = rows[rows["round"] == rows["round"].max()]
    pairs = zip(last["client"].tolist(), last["value"].tolist(), strict=True)
    return {int(client): 100 * float(value) for client, value in pairs}


def resident(pid: int) -> float | None:
    """Return the resident memory of a process in MB; None when it is gone."""
    found = _measured.resident(pid)
    return found and found / 1e6


def growth(values: list[float]) -> float:
    """Return the mean of the last quarter less that of the second, in MB: growth after the start."""
    quarter = max(1, len(values) // 4)
    return statistics.mean(values[-quarter:]) - statistics.mean(values[quarter : 2 * quarter])


def credentials(folder: Path, number: int) -> tuple[Roster, str, Identity]:
    """Return the roster, the name and the identity of one member of a provisioned folder."""
    who = roster.load(folder / "roster.toml", folder / "organizer.pub")
    name = who.members[number].name
    own = Identity.load(
        folder / f"{name}.key", folder / "members" / f"{name}.pem", folder / "ca.pem"
    )
    return who, name, own


def provision(
    folder: Path, nodes: int, *, port: int, hosts: list[str] | None = None, relays: int = 0
) -> None:
    """Make keys, certificates and a roster of nodes n0, n1, ..., which only dial out if there are relays."""
    outbound = range(nodes if relays else 0)
    groups = [[i] for i in range(nodes)]
    who, _ = local.make_members(groups, port=port, outbound=outbound, relays=relays)
    if hosts is not None:
        made = tuple(
            roster.Member(m.name, f"{host}:{port}", m.clients, m.key)
            for m, host in zip(who.members, hosts, strict=True)
        )
        who = Roster(who.run, made, who.population)
    local.create_credentials(folder, who)


def ready(transports: list[Transport], names: list[str]) -> None:
    """Wait until everybody here has a link to everybody named."""
    for transport in transports:
        transport.serve_head(lambda nonce: b"here")
    for transport in transports:
        for name in names:
            while name != transport.name and not isinstance(
                transport.ask_head(name, "0", 2.0), bytes
            ):
                threading.Event().wait(0.05)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Bridges:
    """Network namespaces, one a node, on two bridges joined by one cable. Needs root and iproute2.

    Args:
        nodes: how many; even ones hang on the first bridge, odd ones on the second.
        rate: as in tc's tbf, of each node's sending; "" for no limit.
    """

    def __init__(self, nodes: int, *, rate: str = "") -> None:
        self._base = f"coterie{os.getpid()}"
        self.hosts = [f"10.77.0.{number + 1}" for number in range(nodes)]
        self._spaces = [f"{self._base}-{number}" for number in range(nodes)]
        self._switches = [f"{self._base}-br{side}" for side in range(2)]
        try:
            self._build(rate)
        except BaseException:
            self.close()
            raise

    def _build(self, rate: str) -> None:
        for switch in self._switches:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
        first, second = self._switches
        _ip(
            "link",
            "add",
            "cable",
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            second,
        )
        for switch in self._switches:
            _ip("-n", switch, "link", "set", "cable", "master", "br0", "up")
        for number, (space, host) in enumerate(zip(self._spaces, self.hosts, strict=True)):
            switch, port = self._switches[number % 2], f"w{number}"
            _ip("netns", "add", space)
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                space,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            if rate:
                shape = [
                    "dev",
                    "eth0",
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "64kb",
                    "latency",
                    "400ms",
                ]
                subprocess.run([*self.inside(number), "tc", "qdisc", "add", *shape], check=True)

    def inside(self, number: int) -> list[str]:
        """Return the command that puts another into a node's namespace."""
        return ["ip", "netns", "exec", self._spaces[number]]

    def close_door(self, number: int, way: str) -> None:
        """Let no connection into a node's namespace, and out of it only to one address."""
        rules = FIREWALL.format(way=way)
        subprocess.run([*self.inside(number), "nft", "-f", "-"], check=True, input=rules, text=True)

    def plug(self, number: int, state: str) -> None:
        """Pull ("down") or replug ("up") a node's cable."""
        _ip("-n", self._switches[number % 2], "link", "set", f"w{number}", state)

    def join(self, state: str) -> None:
        """Pull ("down") or replug ("up") the cable between the bridges."""
        _ip("-n", self._switches[0], "link", "set", "cable", state)

    def close(self) -> None:
        """Remove everything."""
        for space in [*self._spaces, *self._switches]:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@contextmanager
def bridges(nodes: int, *, rate: str = "") -> Iterator[Bridges]:
    """Namespaces that are removed in the end."""
    made = Bridges(nodes, rate=rate)
    try:
        yield made
    finally:
        made.close()


def difference_of_replay(
    study: config.StudyConfig, places: list[Path], ended: set[int] | None = None
) -> float:
    """Replay a run from its nodes' journals and return the largest difference to the models that they ended with.

    Args:
        study: of one run, with a client a node.
        places: the run's folder of each node.
        ended: the nodes that came to the end; all when None.
    """
    plan, federation = plan_and_data(study)
    # The nodes train with one thread each, and sums of the loop engine are rounded by the number.
    torch.set_num_threads(1)
    loop = replay(plan, federation, {place: [number] for number, place in enumerate(places)})
    worst = 0.0
    for number, place in enumerate(places):
        if ended is None or number in ended:
            models = models_of(place)
            for name, whole in (
                ("state.params", loop.state.params),
                ("tracker.best", loop.tracker.best),
            ):
                worst = max(worst, float((models[name][0] - whole[number]).abs().max()))
    return worst


def plan_and_data(study: config.StudyConfig) -> tuple[RunSpec, Any]:
    """Return what all nodes of a study of one run have in common, and the data of all of them."""
    from coterie.data.build import build_federation
    from coterie.net import nodefile

    return nodefile.make_run_spec(study), build_federation(study.data, study.seeds[0], None)
