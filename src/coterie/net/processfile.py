"""What node.toml and relay.toml have in common: who a process is, and where it listens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from coterie._util.settings import Configurable
from coterie.net.identity import Identity


@dataclass(frozen=True)
class ProcessFile(Configurable):
    """The settings that every process on a roster has. Paths are relative to the file.

    Args:
        roster: the signed roster.
        organizer: the organizer's public key.
        key: this member's private key.
        certificate: its certificate.
        ca: the authority's certificate.
        listen: host:port to listen on, when it is not the roster's address.
        metrics_port: port on 127.0.0.1 that answers /metrics for Prometheus; 0 for none.
        log: the lowest level that is written: "debug", "info", "warning" or "error".
        folder: the file's folder.
    """

    roster: str = "roster.toml"
    organizer: str = "organizer.pub"
    key: str = "node.key"
    certificate: str = "node.pem"
    ca: str = "ca.pem"
    listen: str = ""
    metrics_port: Annotated[int, Ge(0), Le(65535)] = 0
    log: Literal["debug", "info", "warning", "error"] = "info"
    folder: Path = Path(".")

    def resolve_path(self, name: str) -> Path:
        """Return a path of the file, relative to the file's folder."""
        return self.folder / name

    def load_identity(self) -> Identity:
        """Return the identity of this process, from its three files."""
        return Identity.load(*map(self.resolve_path, (self.key, self.certificate, self.ca)))
