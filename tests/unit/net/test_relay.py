"""A relay: what one that lies can do, what a member can do to one, and its file."""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from tests.outbound import ROW, Net, until

from coterie.errors import ConfigError, TransportError
from coterie.net import relay as relays
from coterie.net import setup, tunnel
from coterie.net.local import create_credentials, make_members
from coterie.net.outbox import Missing
from coterie.net.relay import Relay, RelayFile
from coterie.net.roster import check_own
from coterie.net.transport import Delivery
from coterie.net.tunnel import HandlerEnd
from coterie.net.wire import Address

MODEL = torch.tensor([0.1234, 5.678, 9.1011, 12.1314])
AT = Address(0, 0, 1)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Wrapped:
    """One end of a tunnel, in the hands of a relay."""

    def __init__(self, end: HandlerEnd, change) -> None:
        self._end, self._change, self.number = end, change, 0

    async def read(self) -> bytes:
        self.number += 1
        return await self._change(self.number, await self._end.read())

    def __getattr__(self, name: str):
        return getattr(self._end, name)


def take_hold(monkeypatch, change) -> None:
    """Let relays pass what they read to `change`, which returns what they pass on."""
    splice = tunnel.splice

    async def held(one, other, spend):
        await splice(Wrapped(one, change), Wrapped(other, change), spend)

    monkeypatch.setattr(relays, "splice", held)


@pytest.fixture
def net(tmp_path, port, stack) -> Net:
    """n0 and n1 only dial out; n1 has a model for n0."""
    made = Net(stack, tmp_path, 2, port=port, outbound=(0, 1), relays=1)
    made.posts()["n1"].publish({"params": MODEL}, AT)
    until(lambda: made.relays["r0"].switchboard.attached == {"n0", "n1"})
    return made


def fetch(net: Net, seconds: float = 20.0) -> Delivery | Missing:
    return net.made["n0"].fetch("n1", AT, ROW, seconds)


def test_a_relay_that_reads_sees_neither_questions_nor_answers(net, monkeypatch):
    """The keys of the connection are agreed on by X25519 and ML-KEM together (group 0x11ec)."""
    seen: list[bytes] = []

    async def read(number, data):
        seen.append(data)
        return data

    take_hold(monkeypatch, read)
    assert torch.equal(fetch(net).tensors["params"], MODEL)
    everything = b"".join(seen)
    assert len(everything) > 2000
    clear = (
        b"model",
        b"local",
        b"params",
        # As in a question, and as in a certificate: two bytes alone come by chance in so many.
        b'"n1"',
        b"\x0c\x02n1",
        b"manifest",
        b"coterie.v1",
        MODEL.numpy().tobytes(),
    )
    assert [word for word in clear if word in everything] == []
    # Each end speaks first in a record of TLS; that of the server chooses the group of the keys.
    hello = next(data for data in seen if data[:1] == b"\x16" and data[5:6] == b"\x02")
    assert b"\x00\x33" in hello
    assert hello[hello.index(b"\x00\x33") + 4 :][:2] == b"\x11\xec"


@pytest.mark.full
@pytest.mark.parametrize("what", ["a bit", "again", "one less", "the order"])
def test_what_a_relay_changes_never_arrives(what, net, monkeypatch):
    """From the third part on: a bit, a part again, a part left out, two parts in another order."""
    kept: list[bytes] = []

    async def change(number, data):
        if number < 3 or not data:
            return data
        if what == "a bit":
            return data[:-1] + bytes([data[-1] ^ 1])
        if what == "again":
            return data + data
        if what == "one less":
            return data[:5] + data[6:]
        kept.append(data)
        return data[len(data) // 2 :] + data[: len(data) // 2]

    take_hold(monkeypatch, change)
    found = fetch(net, 3.0)
    assert isinstance(found, Missing)
    assert found.reason in ("unreachable", "timeout")
    assert net.nodes["n1"].outbox.current_load[1] == 0, "no question came"
    monkeypatch.undo()
    assert torch.equal(fetch(net).tensors["params"], MODEL), "by tunnels that are left alone"


def test_what_a_relay_has_recorded_says_nothing_a_second_time(net, monkeypatch):
    """It plays what n0 said into a new tunnel to n1: the same question is not answered again, and none comes."""
    said: list[bytes] = []

    def keep(end):
        async def read(number, data):
            said.append(data)
            return data

        return Wrapped(end, read)

    splice, relay = tunnel.splice, net.relays["r0"]

    async def held(one, other, spend):
        await splice(keep(one), other, spend)

    monkeypatch.setattr(relays, "splice", held)
    answered: list[str] = []
    net.nodes["n1"].outbox.permit = lambda asker, address, what: answered.append(asker) or True
    assert isinstance(fetch(net), Delivery)
    assert answered == ["n0"]

    async def play() -> bytes:
        end = await relay.switchboard.call_up("n1")
        heard = b""
        for part in list(said):
            await end.write(part)
        try:
            async with asyncio.timeout(2.0):
                while data := await end.read():
                    heard += data
        except TimeoutError:
            pass
        end.close()
        return heard

    heard = relay._run(play())
    assert MODEL.numpy().tobytes() not in heard
    assert answered == ["n0"]


def test_a_relay_that_connects_the_wrong_members_is_named(tmp_path, port, stack, monkeypatch):
    """It puts n0 through to n2 instead of n1: no question comes there, and n0 says that it is another key."""
    net = Net(stack, tmp_path, 3, port=port, outbound=(0, 1, 2), relays=1)
    relay = net.relays["r0"]
    until(lambda: len(relay.switchboard.attached) == 3)
    call_up = relay.switchboard.call_up
    monkeypatch.setattr(relay.switchboard, "call_up", lambda member, wait: call_up("n2", wait))
    found = net.nodes["n0"].ask_head("n1", "1", 3.0)
    assert isinstance(found, Missing)
    until(lambda: net.nodes["n0"].turned_away["wrong_key"])
    assert "n0" not in net.nodes["n2"].last_questions
    (told,) = net.told("n0", "turned_away")
    assert (told["reason"], told["peer"]) == ("wrong_key", "n1")


def test_a_relay_is_no_member_and_gets_no_answer(net):
    """With its own certificate, through its own tunnel."""
    relay, member = net.relays["r0"], net.roster.members[1]

    async def ask() -> str:
        going = set()

        async def carry(reader, writer):
            going.add(asyncio.current_task())
            near = tunnel.SocketEnd(reader, writer)
            try:
                await tunnel.splice(near, await relay.switchboard.call_up("n1"))
            finally:  # the library may dial a second time, and the test be over then
                near.close()

        door = await asyncio.start_server(carry, "127.0.0.1", 0)
        channel = relay.dial(member, door.sockets[0].getsockname(), 5.0)
        call = channel.unary_stream("/coterie.v1/Head")(relay.encode({"nonce": "1"}))
        try:
            async for _ in call:
                return "answered"
        except tunnel.grpc.aio.AioRpcError as error:
            return error.code().name
        finally:
            await channel.close()
            door.close()
            for task in going:
                task.cancel()
            await asyncio.gather(*going, return_exceptions=True)
        return "nothing"

    assert relay._run(ask()) == "PERMISSION_DENIED"
    assert net.nodes["n1"].turned_away == {"not_on_roster": 1}


@pytest.mark.full
def test_a_relay_that_calls_for_nobody_costs_a_member_no_more_than_a_bound(net):
    """A thousand numbers of no tunnel: each is called back once, in vain; what is no number is not."""
    relay, node = net.relays["r0"], net.nodes["n1"]
    stream = relay.switchboard._streams["n1"]

    async def flood() -> None:
        for number in range(1000):
            stream.put_nowait(f"{number:032x}".encode())
        stream.put_nowait(b"../../etc/passwd")

    relay._run(flood())
    most = 0
    for _ in range(100):
        most = max(most, node._tunnels._num_accepted)
        threading.Event().wait(0.01)
    assert most <= 4 * 2 + 16
    until(lambda: node._tunnels._num_accepted == 0)
    assert torch.equal(fetch(net, 30.0).tensors["params"], MODEL)


@pytest.mark.full
def test_a_relay_that_drops_or_delays_is_harmless(net, monkeypatch):
    async def late(number, data):
        await asyncio.sleep(0.05)
        return data

    take_hold(monkeypatch, late)
    assert torch.equal(fetch(net).tensors["params"], MODEL)
    net.nodes["n0"]._run(net.nodes["n0"]._close_link("n1"))

    async def drop(number, data):
        return b"" if number > 2 else data

    take_hold(monkeypatch, drop)
    assert isinstance(fetch(net, 2.0), Missing)


# ---------------------------------------------------------------- what a member can do


def test_a_member_has_so_many_tunnels_and_no_more(net):
    """Four to one member; the fifth is told so at once, in one event of that member."""
    relay, node = net.relays["r0"], net.nodes["n0"]

    async def open_many() -> list:
        return await asyncio.gather(*(node._tunnels._open("n1") for _ in range(10)))

    found = node._run(open_many())
    missing = [one for one in found if isinstance(one, Missing)]
    assert [one.reason for one in missing] == ["busy"] * 6
    assert relay.turned_away == {"too_many": 6}
    for one in found:
        if not isinstance(one, Missing):
            one._call.cancel()
    until(lambda: not relay._open)
    assert torch.equal(fetch(net).tensors["params"], MODEL)


@pytest.mark.full
def test_a_reader_that_does_not_read_stops_who_sends(net, monkeypatch):
    """n1 writes into a tunnel that n0 does not read: it may write some hundred kilobytes more than are read."""
    relay, sent = net.relays["r0"], 0
    held = net.nodes["n0"]._run(net.nodes["n0"]._tunnels._open("n1"))
    assert not isinstance(held, Missing)

    async def write() -> None:
        nonlocal sent
        near = await relay.switchboard.call_up("n0")
        while True:
            await near.write(bytes(65536))
            sent += 65536

    # n0's own server does not read more than a handshake from it either.
    task = asyncio.run_coroutine_threadsafe(write(), relay._loop)
    threading.Event().wait(2.0)
    assert sent < 16 << 20
    task.cancel()
    held._call.cancel()


def test_a_rate_is_kept(tmp_path, port, stack):
    net = Net(stack, tmp_path, 2, port=port, outbound=(0, 1))
    assert net.roster.relays == ()
    relay = object.__new__(Relay)
    relay.carried, relay._paid, relay._rate = relays.Counter(), {}, 1000.0
    slept: list[float] = []

    async def spend() -> None:
        for _ in range(5):
            await relay._spend("n0", 1000)

    with pytest.MonkeyPatch.context() as patch:

        async def sleep(seconds):
            slept.append(round(seconds, 1))

        patch.setattr(relays.asyncio, "sleep", sleep)
        net.nodes["n0"]._run(spend())
    assert slept == [1.0, 2.0, 3.0, 4.0]
    assert relay.carried == {"n0": 5000}


def test_a_tunnel_to_nobody_on_the_roster_is_refused(net):
    found = net.nodes["n0"]._run(net.nodes["n0"]._tunnels._open("n9\n"))
    assert found.reason == "forbidden"
    (told,) = net.told("r0", "turned_away")
    assert (told["reason"], told["peer"]) == ("not_allowed", "n0")
    assert "n9" not in told["text"]


def test_numbers_for_prometheus(net):
    assert isinstance(fetch(net), Delivery)
    found = {name: value for name, _, _, value in net.relays["r0"].prometheus_samples()}
    assert found["coterie_relay_attached"] == 2
    assert found["coterie_relay_tunnels"] == 1
    assert found["coterie_relay_bytes_total"] > 2000


# ---------------------------------------------------------------- its file


def test_a_relays_file_is_read_strictly(tmp_path):
    path = tmp_path / "relay.toml"
    path.write_text('listen = "0.0.0.0:443"\nrate = 2.5\n')
    file = RelayFile.load(path)
    assert (file.listen, file.rate, file.folder, file.tunnels) == (
        "0.0.0.0:443",
        2.5,
        tmp_path,
        256,
    )
    path.write_text("tunnel = 3\n")
    with pytest.raises(ConfigError, match=re.escape("tunnel")):
        RelayFile.load(path)
    path.write_text('folder = "elsewhere"\n')
    with pytest.raises(ConfigError, match="unknown key 'folder'"):
        RelayFile.load(path)
    with pytest.raises(ConfigError, match="cannot read"):
        RelayFile.load(tmp_path / "none.toml")


def test_a_relay_is_that_of_the_roster(tmp_path, port):
    who, _ = make_members([[0], [1]], port=port, relays=1, outbound=(0,))
    roster, people = create_credentials(tmp_path, who)
    assert check_own(roster, people[2]) == []
    with pytest.raises(TransportError, match="names no relay n0"):
        Relay(roster, "n0", people[0])


def test_the_organizer_takes_a_relay_off_and_gives_its_name_to_no_member(tmp_path, port):
    who, _ = make_members([[0], [1]], port=port, relays=2, outbound=(0,))
    roster, _ = create_credentials(tmp_path, who)
    for relay in roster.relays:
        setup.add_relay(tmp_path, relay.name, relay.address)
    with pytest.raises(ConfigError, match="r0 is a relay"):
        setup.check_member(tmp_path, "r0")
    made = setup.remove_member(tmp_path, "r0")
    assert (made.version, made.relays) == (2, roster.relays[1:])
    assert made.members == roster.members
    assert setup.load_relays(tmp_path) == {"r1": roster.relays[1].address}
    moved = setup.move_member(tmp_path, "n1", "outbound")
    assert moved.member("n1").is_outbound
