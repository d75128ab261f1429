"""Measure the network on this machine; the stored results make docs/reference/network.md.

    python benchmarks/network.py alarms       32 honest nodes as processes: none is turned away
    python benchmarks/network.py floods       held connections and floods, by strangers, by a member
    python benchmarks/network.py renewals     a new key and a removal while all members exchange
    python benchmarks/network.py parity       six nodes and the simulation, method by method
    python benchmarks/network.py behind       eight, of which six only dial out by one proxy and one relay
    python benchmarks/network.py replay       a run with a killed node, replayed in the simulator
    python benchmarks/network.py churn        twelve nodes: four killed, two restarted, one cut off
    python benchmarks/network.py churn-pens   the same with PENS instead of DAC
    python benchmarks/network.py partition    six nodes: the link between two halves fails for 20 s
    python benchmarks/network.py troubles     twelve nodes 200 ms apart: killed, frozen, disk full
    python benchmarks/network.py soak         three nodes, 800 rounds: memory, threads, open files
    python benchmarks/network.py hour         three nodes for `--minutes`: the same, and logs
    python benchmarks/network.py slow         a model of 20 MB over a link of 20 Mbit/s
    python benchmarks/network.py fuzz         20,000 damaged messages to and from a running node
    python benchmarks/network.py members      a member attacks two honest nodes, attack by attack
    python benchmarks/network.py pace         one slow member of eight: what the others lose
    python benchmarks/network.py free         twelve that wait for nobody, two of them ten times slower
    python benchmarks/network.py idle         processor time of a node that waits for 999 others
    python benchmarks/network.py meet         forty nodes: until each has met all others
    python benchmarks/network.py views        a roster of 10,000 of which 40 processes run
    python benchmarks/network.py rosters      what a node holds of a roster of up to 100,000 members
    python benchmarks/network.py inside       200 nodes in one program: a whole run, and its bytes
    python benchmarks/network.py efficiency   compared with the same bytes over TCP with mutual TLS
    python benchmarks/network.py relayed      by one relay, compared with direct links
    python benchmarks/network.py bytes        bytes that the cost model predicts, and bytes counted

Results are JSON in docs/reference/runs. `behind`, `churn`, `partition` and `slow` need root and iproute2,
for network namespaces, `behind` also nftables; `troubles` needs root and faketime.
"""

import argparse
import json
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import floods
import netlab
import network_alarms
import network_attack
import network_churn
import network_idle
import network_links
import network_members
import network_pace
import network_parity
import network_roster
import network_soak
import network_troubles
import network_views
import torch

from coterie._util.origin import describe_machine, write_results

STORED = Path(__file__).resolve().parent.parent / "docs/reference/runs"
MEASUREMENTS = {
    "alarms": network_alarms.alarms,
    "floods": floods.floods,
    "renewals": network_roster.renewals,
    "parity": network_parity.parity,
    "behind": network_parity.behind,
    "replay": network_parity.replays,
    "churn": network_churn.churn,
    "churn-pens": partial(network_churn.churn, method="pens"),
    "partition": network_churn.partition,
    "troubles": network_troubles.troubles,
    "soak": network_soak.soak,
    "hour": network_soak.soak_for,
    "slow": network_links.slow,
    "fuzz": network_attack.fuzz,
    "members": network_members.members,
    "pace": network_pace.pace,
    "free": network_pace.free,
    "idle": network_idle.idle,
    "meet": network_idle.meet,
    "views": network_views.views,
    "rosters": network_views.rosters,
    "inside": network_idle.inside,
    "efficiency": network_links.efficiency,
    "relayed": network_links.relayed,
    "bytes": network_links.predicted_bytes,
}


def main() -> None:
    """Measure, and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--methods", nargs="*", default=[], help="parity, behind: only these")
    parser.add_argument("--minutes", type=float, default=60.0, help="hour: how long")
    parser.add_argument(
        "--before", type=Path, help="efficiency: an older checkout with its .venv, measured in turn"
    )
    parser.add_argument(
        "--out", type=Path, help="where the results are kept; the repository's own place by default"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: list[netlab.Result] = []

    def emit(result: netlab.Result) -> None:
        print(json.dumps(result), flush=True)
        results.append(result)

    began, folder = time.perf_counter(), Path(tempfile.mkdtemp(prefix="coterie-network-"))
    try:
        if given.what in ("parity", "behind"):
            MEASUREMENTS[given.what](emit, folder, given.methods)
        elif given.what == "hour":
            network_soak.soak_for(emit, folder, minutes=given.minutes)
        elif given.what == "efficiency":
            network_links.efficiency(emit, folder, before=given.before)
        else:
            MEASUREMENTS[given.what](emit, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    place = (
        "performance/network.json" if given.what == "efficiency" else f"network/{given.what}.json"
    )
    seconds, where = round(time.perf_counter() - began, 1), describe_machine("grpcio")
    seeds = network_churn.SEEDS if given.what in ("churn", "churn-pens", "partition") else (0,)
    out = given.out or STORED / place
    write_results(
        out, results, ("exchange", "net"), vars(given), seeds=seeds, where=where, seconds=seconds
    )


if __name__ == "__main__":
    main()
