"""What the network costs: against raw TCP, over a slow link, and against the prediction of the cost ledger."""

import argparse
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import netlab
import network_parity
import numpy as np
import torch

from coterie.exchange.base import Message
from coterie.net.exchange import RemoteExchange
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.post import Post, Terms
from coterie.results import traffic
from coterie.rng import Rng

RAW_PORT = 28500
WARM_UP = 4  # rounds that are not counted


def peers_of(number: int, round: int, count: int, population: int) -> list[int]:
    """Return the peers of a node in a round: others in turn, so that each is read equally often."""
    return [(number + 1 + (round + k) % (population - 1)) % population for k in range(count)]


def exchanging_node(folder: Path, number: int, size: int, rounds: int, count: int) -> None:
    """Publish a model and pull some of the others', round after round, as a node does."""
    torch.set_num_threads(1)
    who, name, own = netlab.credentials(folder, number)
    with GrpcTransport(who, name, own) as transport:
        netlab.ready([transport], [member.name for member in who.members])
        post = Post(transport, who, own.sign, terms=Terms(redraws=0))
        exchange, times = RemoteExchange(post), []
        message = Message(torch.rand(1, size // 4), {"samples": torch.ones(1)})
        for round in range(rounds):
            exchange.begin_round(Rng(0).at_round(round))
            exchange.set_active(exchange.ids)
            chosen = torch.tensor([peers_of(number, round, count, who.population)])
            started = time.perf_counter()
            inbox = exchange.pull(message, chosen)
            times.append(time.perf_counter() - started)
            assert bool(inbox.mask.all()), post.traffic.missing
        post.close()
        result = {"times": times, "bytes": post.traffic.bytes}
        (folder / f"result-{number}.json").write_text(json.dumps(result))
        threading.Event().wait(2.0)  # others may still read the last round


def raw_node(folder: Path, number: int, size: int, rounds: int, count: int) -> None:
    """The same bytes over plain sockets with mutual TLS 1.3: a thread a connection, connections kept open."""
    who, name, _ = netlab.credentials(folder, number)
    contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
    for context in contexts:
        context.load_cert_chain(
            str(folder / "members" / f"{name}.pem"), str(folder / f"{name}.key")
        )
        context.load_verify_locations(str(folder / "ca.pem"))
        context.verify_mode = ssl.CERT_REQUIRED
    server, client = contexts
    blob = os.urandom(size)
    listener = socket.create_server(("127.0.0.1", RAW_PORT + number), backlog=64)

    def serve(connection: socket.socket) -> None:
        with server.wrap_socket(connection, server_side=True) as stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while stream.recv(1):
                stream.sendall(blob)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    streams: dict[int, ssl.SSLSocket] = {}

    def pull(peer: int) -> int:
        if peer not in streams:
            streams[peer] = client.wrap_socket(_dial(RAW_PORT + peer), server_hostname="127.0.0.1")
        stream, buffer = streams[peer], bytearray(size)
        stream.sendall(b"x")
        view, got = memoryview(buffer), 0
        while got < size:
            got += stream.recv_into(view[got:], 1 << 20)
        return got

    times = []
    with ThreadPoolExecutor(4) as pool:
        for round in range(rounds):
            chosen = peers_of(number, round, count, who.population)
            # all start a round together, as the exchange makes them
            (folder / f"raw-{number}-{round}").touch()
            while not all((folder / f"raw-{n}-{round}").exists() for n in range(who.population)):
                threading.Event().wait(0.001)
            started = time.perf_counter()
            assert sum(pool.map(pull, chosen)) == count * size
            times.append(time.perf_counter() - started)
    (folder / f"result-{number}.json").write_text(
        json.dumps({"times": times, "bytes": rounds * count * size})
    )
    threading.Event().wait(2.0)
    os._exit(0)  # the listening thread never ends


def _dial(port: int) -> socket.socket:
    """Connect, and try again until somebody listens."""
    while True:
        try:
            stream = socket.create_connection(("127.0.0.1", port))
        except OSError:
            threading.Event().wait(0.05)
        else:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return stream


def together(
    kind: str,
    keys: Path,
    nodes: int,
    *,
    size: int,
    rounds: int,
    count: int,
    inside: Callable[[int], list[str]] | None = None,
    program: Sequence[str] = (sys.executable, __file__),
) -> list[dict[str, Any]]:
    """Run all nodes of a measurement as processes and return what each measured."""
    for old in [*keys.glob("raw-*"), *keys.glob("result-*")]:
        old.unlink()
    running = []
    for number in range(nodes):
        prefix = inside(number) if inside else []
        numbers = [str(value) for value in (number, size, rounds, count)]
        running.append(subprocess.Popen([*prefix, *program, kind, str(keys), *numbers]))
    assert [process.wait(600) for process in running] == [0] * nodes
    return [json.loads((keys / f"result-{number}.json").read_text()) for number in range(nodes)]


def efficiency(emit: netlab.Emit, folder: Path, *, before: Path | None = None) -> None:
    """Eight processes, models of 4 MB, three peers a round, in turn with the same bytes over raw TCP.

    Args:
        emit: receives the results.
        folder: for keys.
        before: a checkout of an earlier version with its environment in .venv, whose nodes have
            their turn too: 403d6c1a is the last one with Zenoh.
    """
    nodes, size, rounds, count = 8, 4_000_000, 28, 3
    netlab.provision(folder / "keys", nodes, port=28400)
    own = (folder / "keys", (sys.executable, __file__))
    turns = [("raw", "raw", *own), ("coterie", "coterie", *own)]
    if before is not None:
        before = before.absolute()
        here = before / "benchmarks"
        python = str(before / ".venv/bin/python")
        make = f"import netlab, pathlib; netlab.provision(pathlib.Path({str(folder / 'before')!r}), {nodes}, port=28600)"
        subprocess.run([python, "-c", make], cwd=here, check=True)
        program = (python, str(here / "network_links.py"))
        turns.append(("before", "coterie", folder / "before", program))
    for name, kind, keys, program in turns * (3 if before is None else 5):
        found = together(kind, keys, nodes, size=size, rounds=rounds, count=count, program=program)
        times = [1000 * t for f in found for t in f["times"][WARM_UP:]]
        payload = rounds * count * size
        emit({
            "kind": name, "nodes": nodes, "model_bytes": size, "peers": count, "rounds": rounds - WARM_UP,
            "median_ms": round(statistics.median(times), 1), "p90_ms": round(float(np.quantile(times, 0.9)), 1),
            "bytes_a_node": found[0]["bytes"], "overhead": round(found[0]["bytes"] / payload - 1, 6),
        })  # fmt: skip


def relayed(emit: netlab.Emit, folder: Path) -> None:
    """Eight processes, models of 1 MB, three peers a round: all dial each other, or all by one relay.

    The relay is a process of its own on the same machine, through which every byte passes twice.
    """
    nodes, size, rounds, count = 8, 1_000_000, 28, 3
    netlab.provision(folder / "direct", nodes, port=28400)
    netlab.provision(folder / "relay", nodes, port=28600, relays=1)
    (folder / "relay/relay.toml").write_text('key = "r0.key"\ncertificate = "members/r0.pem"\n')
    command = [sys.executable, "-m", "coterie", "relay", str(folder / "relay/relay.toml")]
    relay = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for kind in ("direct", "relay") * 3:
            found = together("coterie", folder / kind, nodes, size=size, rounds=rounds, count=count)
            times = [1000 * t for f in found for t in f["times"][WARM_UP:]]
            middle = statistics.median(times)
            emit({
                "kind": kind, "nodes": nodes, "model_bytes": size, "peers": count, "rounds": rounds - WARM_UP,
                "median_ms": round(middle, 1), "p90_ms": round(float(np.quantile(times, 0.9)), 1),
                "mb_a_second": round(count * size / middle / 1000, 1),
            })  # fmt: skip
    finally:
        relay.terminate()
        relay.wait()


def slow(emit: netlab.Emit, folder: Path) -> None:
    """Two nodes send each other a model of 20 MB over links of 20 Mbit/s, with default settings."""
    size, rate = 20_000_000, 20e6
    with netlab.bridges(2, rate="20mbit") as net:
        netlab.provision(folder / "keys", 2, port=7447, hosts=net.hosts)
        found = together(
            "coterie", folder / "keys", 2, size=size, rounds=2, count=1, inside=net.inside
        )
    for number, result in enumerate(found):
        emit({
            "node": number, "model_bytes": size, "mbit_per_s": rate / 1e6, "deadline_s": Terms().deadline,
            "seconds": [round(t, 2) for t in result["times"]], "line_rate_s": round(8 * size / rate, 2),
        })  # fmt: skip


BYTES = {
    "random": 'kind = "random"\nnum_peers = 3',
    "fix-topology": 'kind = "fix-topology"\nnum_peers = 3',
    "dac": 'kind = "dac"\nnum_peers = 3',
    "pens": 'kind = "pens"\nstage_one_rounds = 9\nnum_sampled = 3\nnum_kept = 2',
    "panm-grad": 'kind = "panm-grad"\nnum_peers = 2\nnum_candidates = 2\nalpha = 0.5',
    "fedavg": 'kind = "fedavg"',
    "ifca": 'kind = "ifca"',
    "fedgwc": 'kind = "fedgwc"',
    "ditto": 'kind = "ditto"',
}


def predicted_bytes(emit: netlab.Emit, folder: Path) -> None:
    """Bytes that six nodes counted on the wire, and what the cost ledger predicts for the same run."""
    rounds = 4
    for place, method in enumerate(BYTES):
        study = netlab.study_of(BYTES[method], clients=network_parity.NODES, rounds=rounds)
        names = network_parity.run_nodes(folder / f"bytes-{place}", study, 27400 + 10 * place)
        plan, federation = netlab.plan_and_data(study)
        task = plan.make_task(federation)
        setting = traffic.CostSetting(
            population=network_parity.NODES,
            params=task.layout.size,
            samples=int(task.num_samples[0]),
            group=3,
        )
        counted = 0
        for name in names:
            log = (folder / f"bytes-{place}/logs/{name}.log").read_text().splitlines()
            counted += json.loads(next(line for line in log if '"event": "done"' in line))["bytes"]
        # the client on the server's node needs no network
        away = network_parity.NODES - plan.method.server
        predicted = away * traffic.predict_network_bytes(plan.method, setting, rounds)
        emit({"method": method, "nodes": network_parity.NODES, "rounds": rounds, "counted": counted,
              "predicted": predicted})  # fmt: skip


def main() -> None:
    """One process of a measurement."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("kind", choices=["coterie", "raw"])
    parser.add_argument("folder", type=Path)
    for name in ("number", "size", "rounds", "count"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    node = exchanging_node if given.kind == "coterie" else raw_node
    node(given.folder, given.number, given.size, given.rounds, given.count)


if __name__ == "__main__":
    main()
