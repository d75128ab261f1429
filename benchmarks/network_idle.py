"""What it costs to wait for the 999 other members of a large roster, and how soon 40 members meet."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import netlab

from coterie.methods import METHODS
from coterie.net import local
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.log import Log
from coterie.net.node import Node, Patience, RunSpec
from coterie.testing import tiny_federation, tiny_settings

MEMBERS, SECONDS, PORT = 1000, 120.0, 26000
PARTS = (30.0, 60.0, SECONDS)


def idle(emit: netlab.Emit, folder: Path, *, members: int = MEMBERS) -> None:
    """A node with default settings, from its start on: processor time of the whole process."""
    who, _ = local.make_members([[number] for number in range(members)], port=PORT)
    who, people = local.create_credentials(folder / "keys", who)
    plan = RunSpec(METHODS["random"](num_peers=2), tiny_settings(), "linear", "linear", seed=0)
    federation = tiny_federation(members).host([0])
    own = people[0]
    log = Log(own.name, stream=SimpleNamespace(write=lambda text: None, flush=lambda: None))
    with GrpcTransport(who, own.name, own) as transport:
        node = Node(
            plan, federation, who, transport, own.sign, folder / "run", patience=Patience(), log=log
        )
        running = threading.Thread(target=node.run)
        began, before = time.monotonic(), time.process_time()
        running.start()
        shares, last = [], 0.0
        for end in PARTS:
            threading.Event().wait(began + end - time.monotonic())
            now = time.process_time()
            shares.append(round(100 * (now - before) / (end - last), 2))
            before, last = now, end
        waiting = node.is_waiting
        node.stop()
        running.join()
        node.close()
    lasted = [end - start for start, end in zip((0.0, *PARTS), PARTS, strict=False)]
    total = sum(share * length for share, length in zip(shares, lasted, strict=True)) / SECONDS
    emit({
        "members": members, "seconds": SECONDS, "parts": list(PARTS), "percent_of_a_core": shares,
        "percent_in_all": round(total, 2), "waiting": waiting,
    })  # fmt: skip


def meet(emit: netlab.Emit, folder: Path, *, members: int = 40) -> None:
    """All nodes inside one program, started together, over mutual TLS: until each has every other one's signed head."""
    who, _ = local.make_members([[number] for number in range(members)], port=PORT + 1100)
    who, people = local.create_credentials(folder / "keys", who)
    plan = RunSpec(METHODS["random"](num_peers=2), tiny_settings(), "linear", "linear", seed=0)
    federation = tiny_federation(members)
    met: list[int] = []

    def log(event: str, level: str, details: dict) -> None:
        if event == "met":
            met.append(len(details["peers"]))

    for _ in range(3):
        met.clear()
        with ExitStack() as stack:
            nodes = []
            for number, own in enumerate(people):
                transport = stack.enter_context(GrpcTransport(who, own.name, own))
                node = Node(
                    plan, federation.host([number]), who, transport, own.sign, folder / own.name,
                    log=Log(own.name, also=log, level="error"),
                )  # fmt: skip
                stack.callback(node.close)
                nodes.append(node)
            wall, cpu = time.monotonic(), time.process_time()
            with ThreadPoolExecutor(members) as pool:
                for meeting in [pool.submit(node.meet_others) for node in nodes]:
                    meeting.result()
            emit({
                "meet": members, "seconds": round(time.monotonic() - wall, 2),
                "processor_s": round(time.process_time() - cpu, 2), "least_met": min(met),
            })  # fmt: skip
