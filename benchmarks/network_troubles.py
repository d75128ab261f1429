"""Twelve nodes far apart that are killed, stopped, frozen, wrong about the time and out of disk.

Every call between two nodes goes through a relay that delays each direction. Needs root (for a
small file system) and Debian's faketime.
"""

import asyncio
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import netlab
import network_churn

from coterie.errors import CoterieError
from coterie.net import fleet
from coterie.net.process import locate_run

NODES, ROUNDS, PORT = 12, 40, 29500
DELAY = 0.1  # seconds of each direction: a question and its answer take 0.2 s
BEHIND = "-30d"  # what faketime adds to the clock of one node when it boots
DISK = 8 << 20  # bytes of one node's file system
LATE, FULL, FROZEN, KILLED, STOPPED, DEAD = (f"node-{number:02d}" for number in range(6))
WHAT = {
    LATE: "a clock 30 days behind at its first start",
    FULL: "no room on its disk; started again with room",
    FROZEN: "stopped for 20 s (SIGSTOP)",
    KILLED: "killed (SIGKILL); started again after 8 s",
    STOPPED: "ended (SIGTERM); started again after 6 s",
    DEAD: "killed for good",
}
NETWORK = {"deadline": 20.0, "start": 240.0, "linger": 60.0}


@contextmanager
def delayed(ports: dict[int, int]) -> Iterator[None]:
    """Relay connections in the block: what comes to a port goes on to another, and back, later.

    Args:
        ports: the port that is listened on, and the one to which it leads, both on loopback.
    """
    loop = asyncio.new_event_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def take() -> None:
            data = b"-"
            while data:
                try:
                    data = await reader.read(1 << 16)
                except OSError:
                    data = b""
                held.put_nowait((loop.time() + DELAY, data))

        taking = asyncio.ensure_future(take())
        while True:
            at, data = await held.get()
            # Later than it came, but at no lower rate: the queue holds what is on its way.
            await asyncio.sleep(max(0.0, at - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
        taking.cancel()
        writer.close()

    async def relay(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()  # nobody listens there at this time
            return
        await asyncio.gather(
            copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True
        )

    async def listen() -> None:
        for near, far in ports.items():
            await asyncio.start_server(lambda r, w, far=far: relay(far, r, w), "127.0.0.1", near)

    loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever, name="relay", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of `DISK` bytes in the block."""
    folder.mkdir(parents=True)
    size = ["-o", f"size={DISK}"]
    subprocess.run(["mount", "-t", "tmpfs", *size, "coterie", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Write a file until there is no more room."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def troubles(emit: netlab.Emit, folder: Path) -> None:
    """Run all twelve to their end, each with its own trouble, and repeat what they did."""
    if shutil.which("faketime") is None:
        raise CoterieError("faketime is missing; apt install faketime")
    options = {"clients": NODES, "rounds": ROUNDS, "train": 105, "epochs": 8}
    study, place = netlab.study_of(network_churn.METHODS["dac"], **options), folder / "troubles"
    files = fleet.lay_out(place, study, port=PORT, network=NETWORK)
    (place / "logs").mkdir()
    names, ports = list(files), dict[int, int]()
    for number, name in enumerate(names):
        # The roster names the relay; the node listens behind it.
        ports[PORT + number] = PORT + 100 + number
        text = files[name].read_text()
        files[name].write_text(f'listen = "127.0.0.1:{PORT + 100 + number}"\n{text}')
    text = files[FULL].read_text()
    files[FULL].write_text(text.replace('runs = "nodes"', 'runs = "disk"'))

    begun = threading.Event()
    rounds: dict[str, list[float]] = {name: [] for name in names}
    # Who was named slow, and all warnings, of nodes that nothing happens to.
    slow, warnings = Counter[str](), Counter[str]()

    def listen(name: str, event: Any) -> None:
        if name not in WHAT and event["level"] in ("warning", "error"):
            warnings[event["event"]] += 1
            slow[event.get("peer", "")] += event["event"] == "slow"
        if event["event"] == "round" and event["round"] >= 0:
            rounds[name].append(event["seconds"])
            if event["round"] >= 2:
                begun.set()

    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(place / "disk"))
        stack.enter_context(delayed(ports))
        nodes = stack.enter_context(
            fleet.Fleet(
                files,
                logs=place / "logs",
                listener=listen,
                behind={LATE: ["faketime", "-f", BEHIND]},
            )
        )
        for name in names:
            nodes.start(name)
        # As a service manager does: its clock is right when it is started again.
        late = nodes.processes[LATE].wait(200)
        nodes._behind = {}
        nodes.start(LATE)
        assert begun.wait(400), "the nodes have not begun"

        def act(at: float, what: str, function: Callable[[], Any]) -> None:
            while time.monotonic() - start < at:
                time.sleep(0.1)
            function()
            emit({"at": at, "event": what})

        start = time.monotonic()
        act(2, f"the disk of {FULL} is full", lambda: fill(disk))
        act(3, f"{KILLED} killed", lambda: nodes.kill(KILLED))
        act(4, f"{FROZEN} frozen", lambda: nodes.processes[FROZEN].send_signal(signal.SIGSTOP))
        act(6, f"{STOPPED} stopped", nodes.processes[STOPPED].terminate)
        act(11, f"{KILLED} started again", lambda: nodes.start(KILLED))
        full = nodes.processes[FULL].wait(300)
        stopped = nodes.processes[STOPPED].wait(300)
        act(12, f"{STOPPED} started again", lambda: nodes.start(STOPPED))
        (disk / "ballast").unlink()
        act(13, f"{FULL} started again, with room", lambda: nodes.start(FULL))
        act(19, f"{DEAD} killed for good", lambda: nodes.kill(DEAD))
        act(24, f"{FROZEN} goes on", lambda: nodes.processes[FROZEN].send_signal(signal.SIGCONT))
        statuses = nodes.wait(1200)
        places = [
            locate_run(place / ("disk" if name == FULL else "nodes") / name, study)
            for name in names
        ]
        ended = [number for number, name in enumerate(names) if name != DEAD]
        found: dict[int, float] = {}
        for number in ended:
            found |= netlab.final_accuracy(places[number])
        difference = netlab.difference_of_replay(study, places, set(ended))
    first = {LATE: late, FULL: full, STOPPED: stopped, KILLED: -9, DEAD: -9}
    whole = [name for name in names if name not in WHAT]
    emit({
        "nodes": NODES, "rounds": ROUNDS, "delay_s": DELAY, "clock": BEHIND,
        "troubles": [
            {"node": name, "what": what, "first": first.get(name), "named_slow": slow[name],
             "last": None if name == DEAD else statuses[name], "rounds": len(rounds[name])}
            for name, what in WHAT.items()
        ],
        "others": {
            "statuses": sorted({statuses[name] for name in whole}),
            "rounds": sorted({len(rounds[name]) for name in whole}),
            "named_slow": sum(slow[name] for name in whole), "warnings": dict(sorted(warnings.items())),
        },
        "median_round_s": round(statistics.median(s for n in whole for s in rounds[n]), 2),
        "longest_round_s": round(max(s for n in whole for s in rounds[n]), 2),
        "accuracy": round(statistics.mean(found.values()), 2),
        "replay_difference": difference,
    })  # fmt: skip
