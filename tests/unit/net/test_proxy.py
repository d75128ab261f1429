"""The way out through an HTTP proxy: what is asked of it, what goes through it, what is said when it refuses."""

import asyncio
import gc
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
from tests.outbound import Net, until

from benchmarks.web_proxy import WebProxy
from coterie.errors import ConfigError
from coterie.net import doctor, local, proxy
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.nodefile import NetworkSettings
from coterie.net.outbox import Missing
from coterie.net.proxy import ProxyRefusedError, connect, find_proxy
from coterie.net.roster import Member

VARIABLES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "all_proxy", "no_proxy", "NO_PROXY")


@pytest.fixture(autouse=True)
def _no_proxy_of_this_machine(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stack():
    with ExitStack() as made:
        yield made


# ---------------------------------------------------------------- which one


@pytest.mark.parametrize(
    "value", ["", "http://proxy:3128", "http://10.0.0.1:80/", "http://[::1]:8080", "environment"]
)
def test_a_proxy_that_can_be_used_is_taken(value):
    assert NetworkSettings(proxy=value).proxy == value


@pytest.mark.parametrize(
    "value",
    ["proxy:3128", "https://proxy:443", "http://proxy", "http://proxy:0", "http://proxy:65536", "http://a b:1",
     "http://proxy:3128/path", "socks5://proxy:1080", "http://proxy:3128\nx", "none"],
)  # fmt: skip
def test_anything_else_is_one_line(value):
    with pytest.raises(
        ConfigError, match=r"NetworkSettings: proxy is .*; expected 'http://host:port'"
    ):
        NetworkSettings(proxy=value)


def test_a_password_belongs_in_the_environment_and_is_not_repeated():
    with pytest.raises(ConfigError, match="https_proxy") as caught:
        NetworkSettings(proxy="http://south:geheim@proxy:3128")
    assert "geheim" not in str(caught.value)


def test_the_environment_names_the_proxy_and_whom_to_dial_directly(monkeypatch):
    assert find_proxy("environment", "north.example.org") is None
    monkeypatch.setenv("https_proxy", "http://south:geheim@proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "example.org,10.0.0.7")
    assert find_proxy("environment", "north.example.org") is None
    assert find_proxy("environment", "10.0.0.7") is None
    assert (
        find_proxy("environment", "east.example.net")
        == "http://south:geheim@proxy.example.org:3128"
    )
    # Nobody asked for it: members of one network are not dialed through the proxy by accident.
    assert find_proxy("", "east.example.net") is None
    monkeypatch.setenv("https_proxy", "proxy.example.org")
    assert find_proxy("environment", "east.example.net") == "http://proxy.example.org:80"
    monkeypatch.setenv("https_proxy", "https://south:geheim@proxy:443")
    with pytest.raises(ConfigError, match="https_proxy of the environment is no http://") as caught:
        NetworkSettings(proxy="environment")
    assert "geheim" not in str(caught.value)


# ---------------------------------------------------------------- one connection


def test_a_connection_is_made_where_the_proxy_knows_the_host(port):
    with (
        WebProxy(port, {"north.invalid": "127.0.0.1"}) as web,
        socket.create_server(("127.0.0.1", port + 1)) as far,
    ):
        with connect(("north.invalid", port + 1), f"http://127.0.0.1:{port}", 5.0) as near:
            near.sendall(b"hello")
            with far.accept()[0] as end:
                assert end.recv(5) == b"hello"
                end.sendall(b"you")
                assert near.recv(3) == b"you"
        assert web.asked == [f"CONNECT north.invalid:{port + 1}"]


def test_user_and_password_are_sent(port):
    with WebProxy(port, user="south:ge%heim") as _, socket.create_server(("127.0.0.1", port + 1)):
        connect(("127.0.0.1", port + 1), f"http://south:ge%25heim@127.0.0.1:{port}", 5.0).close()
        with pytest.raises(ProxyRefusedError, match=r"the proxy refuses it: .*407"):
            connect(("127.0.0.1", port + 1), f"http://south:wrong@127.0.0.1:{port}", 5.0)


def test_why_there_is_no_connection_is_told_apart(port):
    url, far = f"http://127.0.0.1:{port}", Member("n", f"north.invalid:{port + 1}", ())
    assert doctor.explain_silence(far, url) == "no proxy listens at 127.0.0.1 of the proxy"
    with WebProxy(port, {"north.invalid": "127.0.0.1"}, refused=[port + 1]):
        said = doctor.explain_silence(far, url)
        assert "the proxy refuses it: Tunnel connection failed: 403 Forbidden" in said
        assert f"allow CONNECT to north.invalid at port {port + 1}" in said
    with (
        WebProxy(port, {"north.invalid": "127.0.0.1"}),
        socket.create_server(("127.0.0.1", port + 1)),
    ):
        assert "does not answer as this member" in doctor.explain_silence(far, url)
        assert doctor.check_relay(far, url)[1]


def test_what_speaks_no_http_is_said(port):
    with socket.create_server(("127.0.0.1", port)) as other:

        def answer():
            with other.accept()[0] as end:
                end.recv(1000)
                end.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ProxyRefusedError, match="does not speak HTTP"):
            connect(("127.0.0.1", port + 1), f"http://127.0.0.1:{port}", 5.0)


@pytest.mark.parametrize("late", ["a connection", "an error"])
def test_a_connection_that_comes_too_late_is_closed(monkeypatch, late):
    near, far = socket.socketpair()
    go_on, reports = threading.Event(), []

    def connect_slowly(*_):
        go_on.wait(5.0)
        if late == "an error":
            raise ProxyRefusedError("no")
        return near

    monkeypatch.setattr(proxy, "connect", connect_slowly)

    async def give_up():
        asyncio.get_running_loop().set_exception_handler(lambda _, found: reports.append(found))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await proxy.connect_in_thread(("north.invalid", 1), None, 5.0)
        go_on.set()
        while late == "a connection" and near.fileno() >= 0:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(give_up(), 5.0))
    with near, far:
        far.settimeout(5.0)
        assert late == "an error" or far.recv(1) == b""
    gc.collect()
    assert not reports


# ---------------------------------------------------------------- members


def test_members_that_only_dial_out_take_part_through_a_proxy_alone(tmp_path, port, stack):
    """n0 can be reached; n1 and n2 only dial out, by the proxy: to n0 and to the relay."""
    proxy = stack.enter_context(WebProxy(port + 50))
    net = Net(
        stack, tmp_path, 3, port=port, outbound=(1, 2), relays=1, proxies={1: proxy, 2: proxy}
    )
    for asker in net.nodes:
        for peer in net.nodes:
            assert net.ask(asker, peer) == f"{peer} 1".encode(), (asker, peer)
    relay = net.roster.relays[0].host_and_port[1]
    assert set(proxy.asked) == {f"CONNECT 127.0.0.1:{port}", f"CONNECT 127.0.0.1:{relay}"}
    # TLS between the members: a client's hello and nothing that anybody could read.
    assert proxy.seen.startswith(b"\x16\x03")
    assert b"/coterie" not in proxy.seen
    proxy.close()
    until(lambda: isinstance(net.nodes["n1"].ask_head("n0", "1", 1.0), Missing))


def test_a_name_that_only_the_proxy_knows_is_dialed(tmp_path, port, stack):
    stack.enter_context(WebProxy(port + 50, {"north.invalid": "127.0.0.1"}))
    who, _ = local.make_members([[0], [1]], port=port)
    members = (replace(who.members[0], address=f"north.invalid:{port}"), who.members[1])
    roster, people = local.create_credentials(tmp_path, replace(who, members=members))
    north = stack.enter_context(GrpcTransport(roster, "n0", people[0], listen=f"127.0.0.1:{port}"))
    north.serve_head(lambda nonce: b"north")
    away = stack.enter_context(GrpcTransport(roster, "n1", people[1]))
    found = away.ask_head("n0", "1", 3.0)
    assert isinstance(found, Missing)
    away.close()
    url = f"http://127.0.0.1:{port + 50}"
    south = stack.enter_context(GrpcTransport(roster, "n1", people[1], proxy=url))
    until(lambda: south.ask_head("n0", "1", 3.0) == b"north")


def test_a_proxy_of_the_environment_is_not_taken_unasked(tmp_path, port, stack, monkeypatch):
    proxy = stack.enter_context(WebProxy(port + 50))
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port + 50}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port + 50}")
    net = Net(stack, tmp_path, 2, port=port)
    assert net.ask("n1", "n0") == b"n0 1"
    assert proxy.asked == []


def test_somebody_else_at_the_address_is_named_through_the_proxy(tmp_path, port, stack):
    """n0's name, which the proxy alone knows, leads to n2, with a certificate of the run and another key."""
    stack.enter_context(WebProxy(port + 50, {"north.invalid": "127.0.0.1"}))
    net = Net(stack, tmp_path, 3, port=port)
    members = [replace(net.roster.members[0], address=f"north.invalid:{port + 2}")]
    members += [replace(net.roster.members[2], address=f"north.invalid:{port + 9}")]
    wrong = replace(net.roster, members=(members[0], net.roster.members[1], members[1]))
    turned = stack.enter_context(
        GrpcTransport(
            wrong, "n1", net.people["n1"], listen=f"127.0.0.1:{port + 20}",
            proxy=f"http://127.0.0.1:{port + 50}",
        )
    )  # fmt: skip
    for _ in range(3):
        turned.ask_head("n0", "1", 2.0)
    until(lambda: turned.turned_away["wrong_key"] > 0)
