"""What waiting for the 999 other members of a roster costs, how soon 40 members meet, and 200 in one program."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import netlab
import torch

from coterie.methods import METHODS
from coterie.net import local
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.log import Log
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.post import Terms
from coterie.net.transport import Hub, InProcess
from coterie.simulation.run import simulate
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


def inside(emit: netlab.Emit, folder: Path, *, members: int = 200) -> None:
    """All nodes inside one program, without sockets: a whole run of DAC, and the same run in simulation."""
    who, keys = local.make_members([[number] for number in range(members)])
    plan = RunSpec(METHODS["dac"](), tiny_settings(), "linear", "linear", seed=0)
    federation, hub = tiny_federation(members), Hub()
    met: list[float] = []

    def log(event: str, level: str, details: dict) -> None:
        if event == "met":
            met.append(time.monotonic())

    # Two cores for all of them: nobody is slow because of itself.
    terms, patience = Terms(deadline=600.0, slow=0.0), Patience(start=600.0, ask=60.0, linger=600.0)
    with ExitStack() as stack:
        nodes, began = [], time.monotonic()
        for number, member in enumerate(who.members):
            transport = stack.enter_context(InProcess(hub, member.name))
            node = Node(
                plan, federation.host([number]), who, transport, local.make_signer(keys[number]),
                folder / member.name, terms=terms, patience=patience,
                log=Log(member.name, also=log, level="error"),
            )  # fmt: skip
            stack.callback(node.close)
            nodes.append(node)
        built = time.monotonic()
        with ThreadPoolExecutor(members) as pool:
            for run in [pool.submit(node.run) for node in nodes]:
                run.result()
        ended = time.monotonic()
        expected = simulate(
            federation, plan.method, model=plan.model, settings=plan.settings, seed=plan.seed
        )
        equal = sum(
            torch.equal(node.loop.tracker.best[0], expected.params[number])
            for number, node in enumerate(nodes)
        )
        emit({
            "inside": members, "rounds": plan.settings.rounds, "build_s": round(built - began, 1),
            "meet_s": round(max(met) - built, 1), "run_s": round(ended - max(met), 1),
            "equal": equal, "threads": threading.active_count(),
        })  # fmt: skip
