"""A roster of ten thousand of which forty processes run: whom they find, how many links each keeps, and how they end."""

import json
import multiprocessing
import os
import statistics
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import _measured
import netlab
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from replay import replay

from coterie._util.mappings import index_by_name
from coterie.data.federation import Federation
from coterie.methods.dac import Dac
from coterie.net import identity, local, roster
from coterie.net.grpc_transport import GrpcTransport
from coterie.net.log import Log
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.post import Terms
from coterie.testing import tiny_federation, tiny_settings

MEMBERS, RUNNING, ROUNDS, PORT = 10_000, 40, 40, 21_733
VIEWS = {"view": 10, "shuffle": 4}
_LOOK = 0.2  # seconds between two counts of the links


def address_of(number: int) -> str:
    """Return an address of this machine for each member, where nobody listens but those that run."""
    place, last = divmod(number, 250)
    return f"127.{9 + place // 250}.{place % 250}.{last + 1}:{PORT}"


def make_roster(folder: Path, members: int, running: list[int]) -> roster.Roster:
    """Sign a roster in which the members that run have certificates, and the others keys."""
    made, _ = local.make_members([range(members)])
    identity.make_authority(folder, made.run, days=1.0)
    entries, end = [], (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for number in range(members):
        public = ec.generate_private_key(ec.SECP256R1()).public_key()
        key = identity.encode_public_key(public)
        member = roster.Member(f"n{number}", address_of(number), (number,), key)
        if number in running:
            request = identity.make_request(folder, member.name, member.address)
            certificate = identity.sign_request(
                folder, request, member.name, member.address, days=1.0
            )
            entries.append(roster.add_certificate(member, certificate))
            continue
        subject = identity.key_fingerprint(public)
        entries.append(replace(member, certificate=subject, expires=end, subject=subject))
    signed = replace(made, members=tuple(entries))
    roster.write_signed(folder / "roster.toml", signed, folder / "organizer.key")
    return signed


def count_links(own: str) -> tuple[int, int]:
    """Return how many connections this process has dialed, and how many of others it has."""
    inodes = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    host, port = own.split(":")
    here = "".join(f"{int(part):02X}" for part in reversed(host.split("."))) + f":{int(port):04X}"
    dialed = accepted = 0
    for table in ("tcp", "tcp6"):  # the library's sockets are of IPv6, with mapped addresses
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "01" and words[9] in inodes:  # established
                accepted += words[1].endswith(here)
                dialed += not words[1].endswith(here)
    return dialed, accepted


def run_one(folder: Path, number: int, plan: RunSpec, who: roster.Roster, mine: Federation) -> None:
    """Run a node to its end, and write what it took."""
    torch.set_num_threads(1)
    name = who.members[number].name
    own = identity.Identity.load(
        folder / f"{name}.key", folder / "members" / f"{name}.pem", folder / "ca.pem"
    )
    most, ended, reached = [0, 0], threading.Event(), set[str]()
    with GrpcTransport(who, name, own) as transport:

        def look() -> None:
            while not ended.wait(_LOOK):
                for place, links in enumerate(count_links(who.members[number].address)):
                    most[place] = max(most[place], links)
                reached.update(transport.alive_members())

        watching = threading.Thread(target=look)
        watching.start()
        silent = SimpleNamespace(write=lambda text: None, flush=lambda: None)
        node = Node(
            plan, mine, who, transport, own.sign, folder / "runs" / name,
            terms=Terms(deadline=120.0, slow=0.0),
            patience=Patience(start=90.0, ask=5.0, linger=30.0, poll=1.0), log=Log(name, stream=silent),
        )  # fmt: skip
        began, before = time.monotonic(), time.process_time()
        try:
            node.run()
        finally:
            seconds, cpu = time.monotonic() - began, time.process_time() - before
            ended.set()
            watching.join()
            node.close()
        assert node._neighbors is not None
        found = {
            "dialed": most[0], "accepted": most[1], "found": len(reached),
            "asked_in_vain": len(node._neighbors.absent), "alone": node.loop.num_alone,
            "skipped": len(node.loop.skipped_rounds), "seconds": round(seconds, 1),
            "processor_s": round(cpu, 1),
            "resident_mb": round((_measured.resident("self", "VmHWM") or 0) / 1e6, 1),
        }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(found))


def views(
    emit: netlab.Emit, folder: Path, *, members: int = MEMBERS, running: int = RUNNING
) -> None:
    """All over mutual TLS, each a process; then the simulator repeats the run from the journals."""
    folder.mkdir(exist_ok=True)
    numbers = [place * (members // running) for place in range(running)]
    began = time.monotonic()
    make_roster(folder, members, numbers)
    made = time.monotonic()
    who = roster.load(folder / "roster.toml", folder / "organizer.pub")
    loaded = time.monotonic()
    # For the population and for one client "auto" takes engines with other rounding.
    settings = tiny_settings(rounds=ROUNDS, peer_sampling=VIEWS, engine="vmap")
    plan = RunSpec(Dac(num_peers=3, table=8), settings, "linear", "linear", seed=0)
    federation = tiny_federation(members)
    before = (_measured.resident() or 0) / 1e6
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=run_one, args=(folder, number, plan, who, federation.host([number])))
        for number in numbers
    ]
    started = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    ended = time.monotonic()
    assert [process.exitcode for process in processes] == [0] * running
    names = [who.members[number].name for number in numbers]
    found = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    torch.set_num_threads(1)
    places = {folder / "runs" / name: [number] for name, number in zip(names, numbers, strict=True)}
    loop = replay(plan, federation, places)
    equal = 0
    for place, (number,) in places.items():
        models = netlab.models_of(place)
        equal += torch.equal(models["state.params"][0], loop.state.params[number])

    def spread(name: str) -> list[float]:
        values = sorted(one[name] for one in found)
        return [values[0], statistics.median(values), values[-1]]

    emit({
        "views": members, "running": running, "rounds": ROUNDS, **VIEWS,
        "roster_mb": round((folder / "roster.toml").stat().st_size / 1e6, 2),
        "sign_s": round(made - began, 1), "load_s": round(loaded - made, 1),
        "run_s": round(ended - started, 1), "equal_to_replay": equal,
        "resident_before_mb": round(before, 1),
        **{name: spread(name) for name in found[0]},
    })  # fmt: skip


SIZES = (1000, 10_000, 100_000)


def load_one(folder: Path, members: int, out: Path) -> None:
    """Load a roster as a node does when it starts, and write what that takes."""
    # The bound is raised for the measurement alone.
    roster.MAX_MEMBERS = max(roster.MAX_MEMBERS, members)
    before, began, cpu = _measured.resident() or 0, time.monotonic(), time.process_time()
    found = roster.load(folder / "roster.toml", folder / "organizer.pub")
    seconds, processor = time.monotonic() - began, time.process_time() - cpu
    file = (folder / "roster.toml").stat().st_size
    # What the parts of a node keep of it, as they make it.
    kept = (
        index_by_name(found.members), {m.key: m.name for m in found.members},
        found.host_of, found.client_names, frozenset(m.name for m in found.members),
    )  # fmt: skip
    now, most = _measured.resident() or 0, _measured.resident("self", "VmHWM") or 0
    line = {
        "members": len(kept[0]), "file_bytes": file, "load_s": round(seconds, 2),
        "processor_s": round(processor, 2), "kept_mb": round((now - before) / 1e6, 1),
        "while_loading_mb": round((most - before) / 1e6, 1),
    }  # fmt: skip
    out.write_text(json.dumps(line))


def rosters(emit: netlab.Emit, folder: Path) -> None:
    """Signed rosters of several sizes, each read by a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    for members in SIZES:
        place = folder / str(members)
        place.mkdir(parents=True)
        roster.MAX_MEMBERS = max(roster.MAX_MEMBERS, members)
        make_roster(place, members, [])
        one = spawn.Process(target=load_one, args=(place, members, place / "found.json"))
        one.start()
        one.join()
        emit(json.loads((place / "found.json").read_text()))
