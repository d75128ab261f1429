"""node.toml of a standing federation's member: local data by role, and rules for approvals."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie._util.files import resolve_path
from coterie._util.settings import Configurable, NonNegativeFloat, PositiveInt, parse_settings
from coterie._util.toml import load_toml
from coterie.errors import ConfigError, describe_unknown, require
from coterie.net.nodefile import DataSource, NetworkSettings, NodeFile, take_tables
from coterie.net.processfile import ProcessFile
from coterie.net.statements import ROLE

_HOURS = re.compile(r"([01]?\d|2[0-4])-([01]?\d|2[0-4])")


@dataclass(frozen=True)
class Rules(Configurable):
    """What is approved without a person; nothing unless proposers and methods are named.

    A study that loads code, a model of transformers or a file is never approved by a rule.

    Args:
        proposers: members whose proposals these rules may approve.
        methods: kinds of methods that they may have.
        rounds: the most rounds, with the study's `scale`.
        epochs: the most epochs of local training in a round, also of a method's own, such as
            `personal_epochs`. A study that counts it in steps is left to a person.
        secure_aggregation: whether it must have masked sums.
        noise: the least `noise_multiplier` of differential privacy (`local.dp`); 0 for none.
        hours: hours of the day, by this machine's clock, in which studies begin here, as "20-6",
            whether rules or a person approved them; "" for all. A study that has begun goes on.
    """

    proposers: Sequence[str] = ()
    methods: Sequence[str] = ()
    rounds: PositiveInt = 100
    epochs: PositiveInt = 10
    secure_aggregation: bool = False
    noise: NonNegativeFloat = 0.0
    hours: str = ""

    def check(self) -> None:
        """Hours are two numbers."""
        fits = not self.hours or _HOURS.fullmatch(self.hours) is not None
        require(fits, "hours", self.hours, "two hours of the day, as '20-6'")

    def allows_hour(self, now: float) -> bool:
        """Whether studies begin at a time, in seconds since 1970."""
        if (found := _HOURS.fullmatch(self.hours)) is None:
            return True
        first, last = int(found[1]), int(found[2])
        hour = time.localtime(now).tm_hour
        # Over midnight the last hour is the smaller number.
        return first <= hour < last if first < last else hour >= first or hour < last


@dataclass(frozen=True)
class ServiceFile(ProcessFile):
    """The content of node.toml of a federation's member. Paths are relative to the file.

    Args:
        studies: the folder of studies: a folder for each, with what was signed, results and log.
        data: tables `[data.ROLE]`, each with what [data] of a node's file has: the sources of this
            node's own data, by the role under which studies name them.
        rules: what is approved without a person.
        network: deadlines and options.
    """

    studies: str = "studies"
    data: Mapping[str, Any] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    network: NetworkSettings = field(default_factory=NetworkSettings)

    def find_source(self, role: str) -> DataSource:
        """Return the source of the data of a role.

        Raises:
            ConfigError: when this node has none.
        """
        if role not in self.data:
            raise ConfigError(f"{describe_unknown('role of data', role, self.data)}: [data.{role}]")
        return self.data[role]

    def make_node_file(self, name: str, role: str, *, server: bool, quorum: int) -> NodeFile:
        """Return the node file of a study.

        Args:
            name: the study's.
            role: of the data.
            server: whether this node has the server role.
            quorum: members that must be there.
        """
        least = max(self.network.min_peers, quorum - 1)
        return NodeFile(
            roster=self.roster,
            organizer=self.organizer,
            key=self.key,
            certificate=self.certificate,
            ca=self.ca,
            role="server" if server else "peer",
            runs=f"{self.studies}/{name}",
            log=self.log,
            data=self.find_source(role),
            network=replace(self.network, min_peers=least),
            folder=self.folder,
        )


def load(path: Path) -> ServiceFile:
    """Read node.toml of a federation's member.

    Raises:
        ConfigError: with what was found, what was expected and what to do.
    """
    table = load_toml(path)
    parts = take_tables(table, {"rules": Rules, "network": NetworkSettings}, path)
    data = table.pop("data", {})
    require(isinstance(data, Mapping), f"{path}: data", data, "tables: [data.ROLE]")
    parts["data"] = {}
    for role, part in data.items():
        where = f"{path}: data.{role}"
        require(isinstance(part, Mapping), where, part, f"a table: [data.{role}]")
        fits = ROLE.fullmatch(role) is not None
        require(fits, f"{path}: a role of data", role, "letters, digits, - and _")
        parts["data"][role] = source = parse_settings(DataSource, part, where)
        if source.study:
            raise ConfigError(f"{where}: study is for demonstrations; name this node's own data")
    folder = resolve_path(path).parent
    return parse_settings(ServiceFile, {**table, **parts}, str(path), folder=folder)
