"""Six nodes as processes with mutual TLS, and the simulation with the same seed: the same peers, the same models?"""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import netlab
import pandas as pd
import web_proxy

from coterie.net import fleet
from coterie.net.process import ALONE, locate_run
from coterie.studies.run import run_study

METHODS = {
    "local": 'kind = "local"',
    "random": 'kind = "random"\nnum_peers = 3',
    "fix-topology": 'kind = "fix-topology"\nnum_peers = 3',
    "oracle": 'kind = "oracle"\nnum_peers = 2',
    "dac": 'kind = "dac"\nnum_peers = 3',
    "dac, loss pushed": 'kind = "dac"\nnum_peers = 3\nloss_direction = "push"',
    "dac-var": 'kind = "dac-var"\nnum_peers = 3',
    "dac-no-two-hop": 'kind = "dac-no-two-hop"\nnum_peers = 3',
    "pens": 'kind = "pens"\nstage_one_rounds = 3\nnum_sampled = 3\nnum_kept = 2',
    "panm-loss": 'kind = "panm-loss"\nnum_peers = 2\nnum_candidates = 2\nstage_one_rounds = 3\ninterval = 2',
    "panm-grad": 'kind = "panm-grad"\nnum_peers = 2\nnum_candidates = 2\nstage_one_rounds = 3\ninterval = 2',
    "fedavg": 'kind = "fedavg"',
    "ifca": 'kind = "ifca"',
    "fedgwc": 'kind = "fedgwc"',
}
NODES, ROUNDS = 6, 8
OUTBOUND, RELAY, KILLS = range(2, 8), "relay-0", 5
NETWORK = {"deadline": 60.0, "start": 180.0, "linger": 30.0}


def compare(nodes: list[Path], simulated: Path) -> netlab.Result:
    """Compare what the nodes wrote with the simulation's: the peers of each round, what was measured, the models."""

    def plain(frames: list[pd.DataFrame]) -> pd.DataFrame:
        frame = pd.concat(
            f.astype({c: str for c in f.columns if isinstance(f[c].dtype, pd.CategoricalDtype)})
            for f in frames
        )
        return frame.sort_values(list(frame.columns)).reset_index(drop=True)

    equal = {}
    for name in ("edges", "metrics"):
        tables = [pd.DataFrame(pd.read_parquet(folder / f"{name}.parquet")) for folder in nodes]
        whole = pd.read_parquet(simulated / f"{name}.parquet")
        equal[name] = plain(tables).equals(plain([whole]))
        if name == "edges":
            keys = ["round", "reader", "read", "purpose"]
            equal["peers"] = plain([t.reindex(columns=keys) for t in tables]).equals(
                plain([whole.reindex(columns=keys)])
            )
    expected, worst = netlab.models_of(simulated), 0.0
    for row, folder in enumerate(nodes):
        for name, tensor in netlab.models_of(folder).items():
            worst = max(worst, float((tensor[0] - expected[name][row]).abs().max()))
    return {
        "same_peers": equal["peers"],
        "same_edges": equal["edges"],
        "same_metrics": equal["metrics"],
        "largest_difference": worst,
    }


def run_nodes(place: Path, study, port: int, kill: str | None = None) -> list[str]:
    """Run all nodes to their end.

    Args:
        place: their folder.
        study: of one run.
        port: of the first node.
        kill: a node that is killed after two rounds and started again.
    """
    files = fleet.lay_out(place, study, port=port, network=NETWORK)
    (place / "logs").mkdir()
    pending = {kill} if kill else set()

    def listen(name: str, event) -> None:
        if name in pending and event["event"] == "round" and event["round"] >= 2:
            pending.clear()
            nodes.processes[name].kill()

    with fleet.Fleet(files, logs=place / "logs", listener=listen) as nodes:
        for name in files:
            nodes.start(name)
        if kill:
            nodes.processes[kill].wait(300)
            nodes.start(kill)
        statuses = {name: nodes.processes[name].wait(900) for name in files}
    # Around a kill a round can pass without any message of others, which the status says.
    assert set(statuses.values()) <= ({0, ALONE} if kill else {0}), statuses
    return list(files)


def parity(emit: netlab.Emit, folder: Path, chosen: list[str], port: int = 27000) -> None:
    """Run every method both ways and compare."""
    for number, method in enumerate(chosen or METHODS):
        place, began = folder / f"parity-{number}", time.perf_counter()
        study = netlab.study_of(METHODS[method], clients=NODES, rounds=ROUNDS)
        names = run_nodes(place, study, port + 10 * number)
        run_study(study, out=place / "simulated")
        nodes = [locate_run(place / "nodes" / name, study) for name in names]
        found = compare(nodes, locate_run(place / "simulated", study))
        emit({"method": method, "nodes": NODES, "rounds": ROUNDS, **found,
              "seconds": round(time.perf_counter() - began, 1)})  # fmt: skip


def behind(emit: netlab.Emit, folder: Path, chosen: list[str], port: int = 7447) -> None:
    """Run every method between eight machines, of which six only dial out, by one proxy and one relay.

    Their firewalls let nothing in, and out to the proxy alone. The relay is killed and started again
    after each of the first rounds.
    """
    with netlab.bridges(10) as net:
        *hosts, proxy = net.hosts
        for number in OUTBOUND:
            net.close_door(number, proxy)
        for number, method in enumerate(chosen or METHODS):
            place, began = folder / f"behind-{number}", time.perf_counter()
            study = netlab.study_of(METHODS[method], clients=8, rounds=ROUNDS)
            place.mkdir()
            serve = [sys.executable, str(Path(web_proxy.__file__)), proxy, "3128"]
            with (place / "proxy.log").open("wb") as log:
                server = subprocess.Popen([*net.inside(9), *serve], stdout=log)
            try:
                names = run_behind(place / "fleet", study, net, hosts, port)
            finally:
                server.kill()
                server.wait()
            run_study(study, out=place / "simulated")
            nodes = [locate_run(place / "fleet/nodes" / name, study) for name in names]
            found = compare(nodes, locate_run(place / "simulated", study))
            asked = (place / "proxy.log").read_text().splitlines()
            emit({"method": method, "nodes": 8, "only dial out": len(OUTBOUND), "rounds": ROUNDS, **found,
                  "dialed by the proxy": len(set(asked)), "relay killed": KILLS,
                  "seconds": round(time.perf_counter() - began, 1)})  # fmt: skip


def run_behind(
    place: Path, study, net: netlab.Bridges, hosts: Sequence[str], port: int
) -> list[str]:
    """Run eight nodes and a relay in namespaces; those behind firewalls dial by the proxy of the tenth."""
    network = {**NETWORK, "deadline": 240.0, "proxy": "environment", "min_peers": 7, "slow": 0.0}
    files = fleet.lay_out(
        place, study, port=port, hosts=hosts, network=network, outbound=OUTBOUND, relays=1
    )
    (place / "logs").mkdir()
    reached = threading.Semaphore(0)
    rounds = set[int]()

    def listen(name: str, event) -> None:
        if (
            event["event"] == "round"
            and event["round"] in range(KILLS)
            and event["round"] not in rounds
        ):
            rounds.add(event["round"])
            reached.release()

    inside = {name: net.inside(number) for number, name in enumerate([*files, RELAY])}
    for number in OUTBOUND:
        inside[list(files)[number]] += ["env", f"https_proxy=http://{net.hosts[9]}:3128"]
    all_files = {**files, RELAY: place / f"{RELAY}.toml"}
    with fleet.Fleet(all_files, logs=place / "logs", listener=listen, behind=inside) as nodes:
        for name in all_files:
            nodes.start(name)
        for _ in range(KILLS):
            assert reached.acquire(timeout=300), "no further round"
            nodes.kill(RELAY)
            nodes.start(RELAY)
        statuses = {name: nodes.processes[name].wait(900) for name in files}
    assert set(statuses.values()) == {0}, statuses
    return list(files)


def replays(emit: netlab.Emit, folder: Path, port: int = 27200) -> None:
    """A node is killed and started again; the simulator, given the journals, ends with the same models?"""
    for number, method in enumerate(("dac", "random", "pens", "panm-loss")):
        place = folder / f"replay-{number}"
        study = netlab.study_of(METHODS[method], clients=NODES, rounds=40, train=105, epochs=8)
        names = run_nodes(place, study, port + 10 * number, kill="node-04")
        nodes = [locate_run(place / "nodes" / name, study) for name in names]
        events = [
            line for path in nodes for line in (path / "arrivals.jsonl").read_text().splitlines()
        ]
        missing = sum(
            '"missing": {}' not in line for line in events if '"pull"' in line or '"redraw"' in line
        )
        emit({"method": method, "nodes": NODES, "rounds": 40, "killed_and_restarted": 1,
              "pulls_with_missing_peers": missing,
              "largest_difference": netlab.difference_of_replay(study, nodes)})  # fmt: skip
