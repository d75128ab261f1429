"""Programs of attackers that hold connections open or flood a node, and what honest members notice of them.

    python benchmarks/floods.py               every attack in turn; prints a line for each
    python benchmarks/network.py floods       the same, and keeps the results

Strangers have no certificate; members have one that is valid, and keep to no rule. Two honest nodes
exchange models all the time, each in a process of its own; a third one joins in the middle of every
attack, so that new links are tried as well.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import netlab
import outlaw
import torch

from coterie.exchange.base import Message
from coterie.net.exchange import RemoteExchange
from coterie.net.grpc_server import raise_file_limit
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.log import Log
from coterie.net.outbox import Missing
from coterie.net.post import Post, Terms
from coterie.rng import Rng

PORT = 28900
ELSEWHERE = "127.0.0.9"  # where strangers come from; Linux has the whole network on loopback
# n0 and n1 exchange, n2's certificate is the attacker's, n3 joins in the middle
MEMBERS, ATTACKER, LATE = 4, 2, 3
SIZE = 400_000  # bytes of a model
DEADLINE = 10.0
SECONDS = 12.0  # of an attack
CONNECTIONS = 1500
MANY = 100  # links of one member
Stop = Callable[[], bool]
Attack = Callable[[Path, Stop], None]


# ---------------------------------------------------------------------- strangers


def _connect() -> socket.socket | None:
    with suppress(OSError):
        found = socket.create_connection(
            ("127.0.0.1", PORT), timeout=0.2, source_address=(ELSEWHERE, 0)
        )
        found.settimeout(2.0)
        return found
    return None


def _hold(stop: Stop, drip: Callable[[socket.socket, int], None]) -> None:
    """Keep many connections to n0; use each again and again, and replace closed ones."""
    held: list[socket.socket] = []
    beat = 0
    while not stop():
        while len(held) < CONNECTIONS and not stop():
            found = _connect()
            if found is None:
                break
            held.append(found)
        alive = []
        for stream in held:
            try:
                drip(stream, beat)
                stream.setblocking(False)
                with suppress(BlockingIOError):
                    if not stream.recv(4096):
                        raise OSError("closed")
                alive.append(stream)
            except OSError:
                stream.close()
        held, beat = alive, beat + 1
        threading.Event().wait(0.1)
    for stream in held:
        stream.close()


def idle_connections(folder: Path, stop: Stop) -> None:
    """A stranger connects and says nothing."""
    _hold(stop, lambda stream, beat: None)


def a_byte_at_a_time(folder: Path, stop: Stop) -> None:
    """A stranger begins the handshake, one byte at a time."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    hello = outgoing.read()
    _hold(
        stop,
        lambda stream, beat: stream.sendall(hello[beat : beat + 1]) if beat < len(hello) else None,
    )


def broken_handshakes(folder: Path, stop: Stop) -> None:
    """A stranger sends what is no handshake, as fast as it can."""
    while not stop():
        stream = _connect()
        if stream is not None:
            with suppress(OSError):
                stream.sendall(os.urandom(600))
            stream.close()


# ---------------------------------------------------------------------- members


def silent_links(folder: Path, stop: Stop) -> None:
    """A member completes handshakes and then says nothing."""
    _, name, _ = netlab.credentials(folder, ATTACKER)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_cert_chain(str(folder / "members" / f"{name}.pem"), str(folder / f"{name}.key"))
    context.load_verify_locations(str(folder / "ca.pem"))
    held: list[ssl.SSLSocket] = []
    while not stop():
        while len(held) < 300 and not stop():
            stream = _connect()
            if stream is None:
                break
            with suppress(OSError):
                held.append(context.wrap_socket(stream))
        alive = []
        for stream in held:
            stream.setblocking(False)
            try:
                with suppress(ssl.SSLWantReadError):
                    if not stream.recv(1):
                        raise OSError("closed")
                alive.append(stream)
            except OSError:
                stream.close()
        held = alive
        threading.Event().wait(0.05)
    for stream in held:
        stream.close()


def _questions(
    folder: Path, stop: Stop, method: str, body: Callable[[int], bytes], *, read: bool = True
) -> None:
    """Ask n0 without waiting for the answer, as long as not too many questions are open."""
    who, _, own = netlab.credentials(folder, ATTACKER)
    open_ = threading.Semaphore(512)
    with outlaw.channel_to(own, who.members[0]) as channel:
        ask = channel.unary_stream(f"/{outlaw.SERVICE}/{method}")
        number = 0
        while not stop():
            if open_.acquire(timeout=0.5):
                call = ask(body(number), timeout=2.0)
                call.add_done_callback(lambda done: open_.release())
                if read:
                    threading.Thread(target=_read, args=(call,), daemon=True).start()
                number += 1


def _read(call: Any) -> None:
    with suppress(outlaw.grpc.RpcError):
        for _ in call:
            pass


def questions_how_it_is(folder: Path, stop: Stop) -> None:
    """A member asks for signed heads, 512 questions at a time."""
    _questions(folder, stop, "Head", lambda number: outlaw.question("local", nonce=str(number)))


def questions_for_models(folder: Path, stop: Stop) -> None:
    """A member asks for the models of rounds that are coming, and for the newest, 512 questions at a time."""
    _questions(folder, stop, "Message", lambda n: outlaw.message("local", n % 400, 0, wait=3.0))


def questions_for_the_roster(folder: Path, stop: Stop) -> None:
    """A member asks for the roster, 512 questions at a time."""
    _questions(folder, stop, "Roster", lambda number: outlaw.question("local"))


def questions_for_a_megabyte(folder: Path, stop: Stop) -> None:
    """A member measures its link to a node without end, 512 questions at a time; each answer is 1 MB."""
    _questions(
        folder, stop, "Message", lambda n: outlaw.message("local", -1, -1, wait=3.0, kind="probe")
    )


def answers_that_nobody_reads(folder: Path, stop: Stop) -> None:
    """A member asks for 512 MB and stops reading."""
    who, _, own = netlab.credentials(folder, ATTACKER)
    with outlaw.channel_to(own, who.members[0]) as channel:
        outlaw.call(channel, "Head", outlaw.question("local", nonce="1"))
        ask = channel.unary_stream(f"/{outlaw.SERVICE}/Message")
        calls = [
            ask(outlaw.message("local", number, -1, wait=3.0, kind="probe"), timeout=20.0)
            for number in range(512)
        ]
        os.kill(os.getpid(), signal.SIGSTOP)
        del calls


def questions_without_a_body(folder: Path, stop: Stop) -> None:
    """A member begins calls, and never asks."""
    who, _, own = netlab.credentials(folder, ATTACKER)
    over = threading.Event()

    def silent() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with outlaw.channel_to(own, who.members[0]) as channel:
        ask = channel.stream_stream(f"/{outlaw.SERVICE}/Head")
        while not stop():
            calls = [ask(silent(), timeout=10.0) for _ in range(100)]
            threading.Event().wait(1.0)
            for call in calls:
                call.cancel()
    over.set()


def questions_that_cannot_be_read(folder: Path, stop: Stop) -> None:
    """A member asks with lines of its choice in every field."""
    line = '\n{"level": "error", "event": "refused", "peer": "n1"}\n'
    _questions(folder, stop, "Message", lambda n: outlaw.question(f"local{line}", **{line: n}))


def large_questions(folder: Path, stop: Stop) -> None:
    """A member asks questions of 4 MB each."""
    _questions(folder, stop, "Head", lambda number: bytes(4 << 20))


def presence(folder: Path, stop: Stop) -> None:
    """A member comes and goes as fast as it can say so."""
    _questions(folder, stop, "Presence", lambda n: outlaw.question("local", here=n % 2 == 0))


def many_links(folder: Path, stop: Stop) -> None:
    """A member opens links without end, each with a question that waits, and opens again those that are closed."""
    who, _, own = netlab.credentials(folder, ATTACKER)
    with ExitStack() as stack:
        channels = [
            stack.enter_context(outlaw.channel_to(own, who.members[0])) for _ in range(MANY)
        ]
        open_: dict[int, Any] = {}
        while not stop():
            for number, channel in enumerate(channels):
                if number not in open_ or open_[number].done():
                    ask = channel.unary_stream(f"/{outlaw.SERVICE}/Message")
                    open_[number] = ask(outlaw.message("local", 1 << 20, 0, wait=60.0), timeout=60)
                    threading.Thread(target=_read, args=(open_[number],), daemon=True).start()
            threading.Event().wait(0.1)
        for call in open_.values():
            call.cancel()


def handshakes(folder: Path, stop: Stop) -> None:
    """A member connects anew for every question."""
    who, _, own = netlab.credentials(folder, ATTACKER)
    while not stop():
        outlaw.ask(own, who.members[0], "Head", outlaw.question("local", nonce="1"), 2.0)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        idle_connections,
        a_byte_at_a_time,
        broken_handshakes,
        silent_links,
        questions_how_it_is,
        questions_for_models,
        questions_for_the_roster,
        questions_for_a_megabyte,
        answers_that_nobody_reads,
        questions_without_a_body,
        questions_that_cannot_be_read,
        large_questions,
        presence,
        many_links,
        handshakes,
    )
}


# ---------------------------------------------------------------------- honest members


def _node(stack: ExitStack, folder: Path, number: int) -> tuple[GrpcTransport, Post]:
    who, name, own = netlab.credentials(folder, number)
    raise_file_limit()
    log = Log(name, stream=stack.enter_context((folder / f"{name}.log").open("a")))
    transport = stack.enter_context(GrpcTransport(who, name, own, log=log))
    post = Post(transport, who, own.sign, terms=Terms(deadline=DEADLINE, redraws=0))
    stack.callback(post.close)
    sealed, settings = (folder / "roster.toml").read_bytes(), bytes(2000)
    transport.serve_head(lambda nonce: own.sign(nonce.encode() + settings))
    transport.serve_roster(lambda: sealed)
    post.serve_probe()
    return transport, post


def honest(folder: Path, number: int) -> None:
    """Exchange models with the other honest node until the file `over` is there."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        transport, post = _node(stack, folder, number)
        other, out = 1 - number, stack.enter_context((folder / f"seen-{number}.jsonl").open("a"))
        while isinstance(transport.ask_head(f"n{other}", "0", 2.0), Missing):
            threading.Event().wait(0.05)
        exchange = RemoteExchange(post)
        message = Message(torch.rand(1, SIZE // 4), {"samples": torch.ones(1)})
        index = 0
        while not (folder / "over").exists():
            exchange.begin_round(Rng(0).at_round(index))
            exchange.set_active(exchange.ids)
            began = time.perf_counter()
            arrived = bool(exchange.pull(message, torch.tensor([[other]])).mask.all())
            line = {"at": time.time(), "seconds": time.perf_counter() - began, "arrived": arrived,
                    "memory": netlab.resident(os.getpid())}  # fmt: skip
            out.write(json.dumps(line) + "\n")
            out.flush()
            index += 1
            threading.Event().wait(0.05)
        threading.Event().wait(2.0)


def joining(folder: Path) -> None:
    """Join as n3, say how long it takes until n0 answers, and leave."""
    began = time.perf_counter()
    with ExitStack() as stack:
        transport, _ = _node(stack, folder, LATE)
        while (
            isinstance(transport.ask_head("n0", "0", 2.0), Missing)
            and time.perf_counter() - began < 60.0
        ):
            threading.Event().wait(0.05)
        (folder / "joined").write_text(str(time.perf_counter() - began))


def attacking(folder: Path, name: str) -> None:
    """Attack until the file `enough` is there."""
    raise_file_limit()
    ATTACKS[name](folder, (folder / "enough").exists)


# ---------------------------------------------------------------------- the measurement


def measured(folder: Path, attack: str, seconds: float = SECONDS) -> dict[str, Any]:
    """Run the honest nodes through one attack ("" for none) and return what they noticed."""
    netlab.provision(folder, MEMBERS, port=PORT)
    spawn = multiprocessing.get_context("spawn")
    nodes = [spawn.Process(target=honest, args=(folder, number)) for number in (0, 1)]
    for node in nodes:
        node.start()
    try:
        while _lines(folder, 0)[3:] == [] or _lines(folder, 1)[3:] == []:
            assert all(node.is_alive() for node in nodes), "an honest node has ended"
            threading.Event().wait(0.1)
        began = time.time()
        enemy = spawn.Process(target=attacking, args=(folder, attack)) if attack else None
        if enemy is not None:
            enemy.start()
        threading.Event().wait(seconds)
        late = spawn.Process(target=joining, args=(folder,))
        late.start()
        threading.Event().wait(3.0)
        late.join(90)
        ended = time.time()
        (folder / "enough").touch()
        if enemy is not None:
            enemy.join(10)
            enemy.kill()  # one that has stopped ends by this alone
    finally:
        (folder / "over").touch()
        for node in nodes:
            node.join(60)
    seen = [
        line
        for number in (0, 1)
        for line in _lines(folder, number)
        if began + 2 < line["at"] < ended
    ]
    memory = [line["memory"] or 0.0 for line in _lines(folder, 0)]
    times = [line["seconds"] for line in seen]
    return {
        "attack": attack, "exchanges": len(seen), "missed": sum(not line["arrived"] for line in seen),
        "median_ms": round(1000 * statistics.median(times), 1) if times else None,
        "longest_s": round(max(times), 2) if times else None, "deadline_s": DEADLINE,
        "joined_s": round(float((folder / "joined").read_text()), 2) if (folder / "joined").exists() else None,
        "memory_mb": [round(memory[0]), round(max(memory)), round(memory[-1])],
        "log_lines": len((folder / "n0.log").read_text().splitlines()),
        "statuses": [node.exitcode for node in nodes],
    }  # fmt: skip


def _lines(folder: Path, number: int) -> list[dict[str, Any]]:
    path = folder / f"seen-{number}.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )


def floods(emit: netlab.Emit, folder: Path, names: list[str] | None = None) -> None:
    """Every attack in turn, after a time without one."""
    for name in names or ["", *ATTACKS]:
        (folder / (name or "none")).mkdir(parents=True)
        emit(measured(folder / (name or "none"), name))


def main() -> None:
    """Print what honest members notice of each attack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attacks", nargs="*", help="only these")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coterie-floods-") as folder:
        floods(lambda result: print(json.dumps(result), flush=True), Path(folder), given.attacks)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
