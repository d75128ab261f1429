"""How many tunnels a node opens for others: no network, and quick."""

import asyncio

from coterie.net import local
from coterie.net.grpc_server import GrpcServer
from coterie.net.tunnel import Tunnels


def test_a_relay_that_asks_for_more_tunnels_than_members_can_want_gets_none(monkeypatch):
    """Of three members 28: four for each, and 16. What ends makes room."""
    node = object.__new__(GrpcServer)
    node.roster = local.make_members([[0], [1], [2]], port=1)[0]
    node.log_event = lambda *_, **__: None
    tunnels, used = Tunnels(node), []

    async def ask(count):
        begun, free = [], asyncio.Event()

        async def connect(host, port):
            begun.append(port)
            await free.wait()
            raise OSError

        monkeypatch.setattr(asyncio, "open_connection", connect)
        tasks = [
            asyncio.create_task(tunnels._accept(None, str(one), used.append))
            for one in range(count)
        ]
        await asyncio.sleep(0.05)
        free.set()
        await asyncio.gather(*tasks)
        return len(begun)

    assert asyncio.run(ask(40)) == 28
    assert asyncio.run(ask(5)) == 5
    assert sum(used) == 0
