"""A network of members that only dial out, for the tests of tunnels and relays."""

import asyncio
import threading
from contextlib import ExitStack

import torch

from coterie.net import local
from coterie.net.grpc_server import GrpcServer
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.local import make_signer
from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.post import Post
from coterie.net.relay import Relay

ROW = Template({"params": (torch.float32, (4,))})


def until(condition, seconds: float = 20.0) -> None:
    pause = threading.Event()
    for _ in range(int(20 * seconds)):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("it did not come to be")


def settle(node: GrpcServer) -> None:
    """Wait until a node or a relay has logged all that has happened: it logs in a thread of its own."""
    node._run(asyncio.sleep(0))
    node._logger.submit(lambda: None).result()


class Net:
    """Members and relays with certificates, inside this program; some dial by a proxy."""

    def __init__(self, stack: ExitStack, folder, groups: int, proxies=None, **options) -> None:
        self.proxies = {f"n{i}": one.url for i, one in (proxies or {}).items()}
        who, _ = local.make_members([[i] for i in range(groups)], **options)
        self.roster, people = local.create_credentials(folder, who)
        self.people = {own.name: own for own in people}
        self.made: dict[str, Post] = {}
        self.stack, self.events = stack, list[tuple[str, str, dict]]()
        self.relays = {one.name: self.start_relay(one.name) for one in who.relays}
        self.nodes = {one.name: self.start(one.name) for one in who.members}

    def _log(self, name: str):
        return lambda event, **details: self.events.append((name, event, details))

    def told(self, name: str, event: str) -> list[dict]:
        """What a member or a relay has logged under one name of an event, until now."""
        settle(self.nodes.get(name) or self.relays[name])
        return [about for who, what, about in self.events if (who, what) == (name, event)]

    def start(self, name: str) -> GrpcTransport:
        made = GrpcTransport(
            self.roster, name, self.people[name], proxy=self.proxies.get(name, ""),
            log=self._log(name),
        )  # fmt: skip
        made.serve_head(lambda nonce: f"{name} {nonce}".encode())
        return self.stack.enter_context(made)

    def start_relay(self, name: str, **options) -> Relay:
        made = Relay(self.roster, name, self.people[name], log=self._log(name), **options)
        return self.stack.enter_context(made)

    def ask(self, asker: str, peer: str, seconds: float = 10.0) -> bytes | Missing:
        """The answer; asked again for so long as there is none."""
        pause, found = threading.Event(), None
        for _ in range(int(5 * seconds)):
            found = self.nodes[asker].ask_head(peer, "1", 3.0)
            if isinstance(found, bytes):
                return found
            pause.wait(0.2)
        return found

    def posts(self) -> dict[str, Post]:
        """The mail of each member."""
        for name, node in self.nodes.items():
            signer = make_signer(self.people[name].key)
            self.made[name] = Post(node, self.roster, signer)
            self.stack.callback(self.made[name].close)
        return self.made
