"""Fleets: nodes on one host as processes, and the demonstration."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from coterie._util import manifest
from coterie._util.files import prepare_folder, resolve_path, write_atomically
from coterie._util.mappings import drop_empty, select_keys
from coterie.data.build import build_federation
from coterie.errors import ConfigError, TransportError
from coterie.functional.metrics import ACCURACY
from coterie.net import head, local, nodefile
from coterie.net.identity import OUTBOUND
from coterie.net.roster import Member, Roster
from coterie.results import stored_runs, summary
from coterie.studies import config
from coterie.studies.config import StudyConfig
from coterie.studies.run import run_study

Listener = Callable[[str, Mapping[str, Any]], None]


class Fleet:
    """Processes of `coterie node`, one for each node file, and of `coterie relay`.

    Use it as a context manager: at the end it stops processes that still run.

    Args:
        files: node.toml of each member, by name; relay.toml of a relay, whose name begins with
            "relay".
        logs: folder for the stderr of each process; stderr of this process when None.
        listener: called with (name, event) for every line of a node's log.
        arguments: further arguments of `coterie node`.
        threads: threads of each process.
        behind: prefix of each node's command, by name, for example to run it in a network
            namespace.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        *,
        logs: Path | None = None,
        listener: Listener = lambda name, event: None,
        arguments: Sequence[str] = (),
        threads: int = 1,
        behind: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._behind = behind or {}
        self.files, self.logs, self._listener, self._arguments = (
            files,
            logs,
            listener,
            list(arguments),
        )
        # The processes share the cores: by default each would start a thread for every core.
        self._environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str, *arguments: str) -> None:
        """Start or restart a node."""
        command = [
            *self._behind.get(name, ()),
            sys.executable,
            "-m",
            "coterie",
            "relay" if name.startswith("relay") else "node",
            str(self.files[name]),
        ]
        command += [*self._arguments, *arguments]
        # what is printed on stdout is kept apart from the node's own log
        with ExitStack() as stack:
            out = None
            if self.logs is not None:
                out = stack.enter_context((self.logs / f"{name}.out").open("a"))
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.PIPE, text=True, env=self._environment
            )
        # No daemon thread below: what a node says last is read before this program ends.
        self.processes[name] = process
        reader = threading.Thread(
            target=self._copy_log, args=(name, process), name=f"coterie-log-{name}"
        )
        reader.start()
        self._readers.append(reader)

    def _copy_log(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        path = None if self.logs is None else self.logs / f"{name}.log"
        out = sys.stderr if path is None else path.open("a")
        try:
            for line in process.stderr:
                out.write(line)
                out.flush()
                # The node's own lines are JSON; others, such as a traceback, are copied only.
                if line.startswith("{"):
                    self._listener(name, json.loads(line))
        finally:
            # after a fault of the listener: a closed pipe would end the node
            for line in process.stderr:
                out.write(line)
            process.stderr.close()
            if path is not None:
                out.close()

    def kill(self, name: str) -> None:
        """Kill a node without warning, as a power cut does."""
        self.processes[name].kill()
        self.processes[name].wait()

    def wait(self, timeout: float) -> dict[str, int]:
        """Wait for all nodes and return their exit statuses.

        Raises:
            TransportError: when some have not ended after `timeout` seconds.
        """
        # One deadline for all of them, not one for each.
        until = time.monotonic() + timeout
        for name, process in self.processes.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TransportError(
                    f"{name} has not ended after {timeout:.0f} s; see its log"
                ) from None
        for reader in self._readers:
            reader.join()
        return {name: process.returncode for name, process in self.processes.items()}

    def close(self) -> None:
        """Stop processes that still run: SIGTERM, and SIGKILL after ten seconds."""
        running = [p for p in self.processes.values() if p.poll() is None]
        # All signals first, so that the nodes end at the same time.
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        for reader in self._readers:
            reader.join()


def lay_out(
    folder: Path,
    study: StudyConfig,
    *,
    port: int = 21700,
    hosts: Sequence[str] = (),
    network: Mapping[str, Any] | None = None,
    days: float = 1.0,
    data_dir: Path | None = None,
    outbound: Collection[int] = (),
    relays: int = 0,
) -> dict[str, Path]:
    """Create the files for a run of a study on this host: keys, certificates, roster, node files.

    Relays are relay-0, relay-1, ..., their files relay-0.toml, ..., and their ports follow.

    Args:
        folder: the folder of these files.
        study: a study of one run, with a [data] table; one node per client.
        port: port of the first node, below 32768; the others follow.
        hosts: an address for each node, then for each relay; loopback by default.
        network: the [network] table of every node.
        days: validity of the certificates.
        data_dir: the folder of the study's datasets.
        outbound: numbers of the nodes that only dial out.
        relays: number of relays.

    Returns:
        The node files by member.
    """
    plan, seed = nodefile.make_run_spec(study), study.seeds[0]
    federation = build_federation(study.data, seed, data_dir)
    population = federation.population
    # From 32768 on, Linux takes ports for outgoing connections.
    if port < 1024 or port + population + relays > 32768:
        raise ConfigError(
            f"ports {port} to {port + population + relays}; expected some between 1024 and 32768"
        )
    # With a leading zero, so that logs and folders are listed in the order of the clients.
    names = [f"node-{i:02d}" for i in range(population)]
    hosts = hosts or ["127.0.0.1"] * (population + relays)
    addresses = [f"{hosts[i]}:{port + i}" for i in range(population)]
    for i in outbound:
        addresses[i] = OUTBOUND
    members = tuple(Member(n, addresses[i], (i,)) for i, n in enumerate(names))
    others = []
    for i in range(relays):
        number = population + i
        others.append(Member(f"relay-{i}", f"{hosts[number]}:{port + number}", ()))
    truth = federation.truth.cluster.tolist() if federation.truth is not None else []
    server = names[0] if plan.method.server else ""
    who = Roster(
        "demo", members, population, server=server, clusters=tuple(truth), relays=tuple(others)
    )
    layout = plan.make_task(federation).layout
    keys = folder / "keys"
    local.create_credentials(
        keys,
        who,
        days=days,
        study=head.study_hash(plan.common_settings(population)),
        schema=head.schema_hash(layout),
    )
    write_atomically(folder / "study.toml", config.format_study(study).encode())
    files = {}
    for name in (*names, *(relay.name for relay in others)):
        files[name] = folder / f"{name}.toml"
        own = {
            "roster": "keys/roster.toml",
            "organizer": "keys/organizer.pub",
            "ca": "keys/ca.pem",
            "key": f"keys/{name}.key",
            "certificate": f"keys/members/{name}.pem",
        }
        if name not in names:
            # A relay has no data and no study, and is not among the nodes that are returned.
            write_atomically(files.pop(name), ("\n".join(_format_keys(own)) + "\n").encode())
            continue
        own |= {
            "study": "study.toml",
            "role": "server" if name == server else "peer",
            "runs": "nodes",
        }
        data = {"study": "own rows"}
        if data_dir:
            data["data_dir"] = str(resolve_path(data_dir))
        lines = [*_format_keys(own), "", "[data]", *_format_keys(data)]
        lines += ["", "[network]", *_format_keys(network or {})]
        write_atomically(files[name], ("\n".join(lines) + "\n").encode())
    return files


def _format_keys(table: Mapping[str, Any]) -> list[str]:
    """Return a line of TOML for each key; JSON writes these plain values as TOML does."""
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]


def join_results(
    folder: Path, study: StudyConfig, names: Sequence[str], label: str
) -> dict[str, pd.DataFrame]:
    """Join the results of the nodes into one run, next to the simulated one in its study.

    Args:
        folder: the fleet's folder.
        study: a study of one run.
        names: the nodes.
        label: label of the run.

    Returns:
        The tables, by name.
    """
    run = Path(study.methods[0].label) / f"seed-{study.seeds[0]}"
    sources = [folder / "nodes" / name / study.name / run for name in names]
    target = folder / "runs" / study.name / label / f"seed-{study.seeds[0]}"
    prepare_folder(target)
    tables, files = {}, dict[str, manifest.Content]()
    for name in ("metrics", "edges"):
        parts = []
        for source in sources:
            part = pd.read_parquet(source / f"{name}.parquet")
            # Category columns of several files have different categories: they are joined as text.
            categories = part.select_dtypes("category").columns
            parts.append(part.astype(dict.fromkeys(categories, str)))
        # In the order in which one process writes them, so that both tables can be compared.
        tables[name] = pd.concat(parts).sort_values(
            ["round", *(["client"] if name == "metrics" else ["reader"])]
        )
        # Categories again, as in the files of a run: these columns hold few words many times.
        words = tables[name].columns.intersection(["split", "model", "metric", "purpose"])
        kinds = dict.fromkeys(words, "category")
        files[f"{name}.parquet"] = partial(tables[name].astype(kinds).to_parquet, index=False)
    named = replace(study, methods=(replace(study.methods[0], label=label),))
    files[stored_runs.CONFIG] = config.format_study(named).encode()
    # Of one node: the study's summary needs one, and the others' say the same of the run.
    files["provenance.json"] = (sources[0] / "provenance.json").read_bytes()
    manifest.replace_files(target, files)
    return tables


def demo_study(clients: int, rounds: int) -> StudyConfig:
    """Return the study of the demonstration: DAC on the bundled digits in two rotations."""
    sizes = f"[{clients - clients // 2}, {clients // 2}]"
    return config.load_study(
        "rotated-digits",
        [
            'name="net-demo"',
            f"rounds={rounds}",
            "seeds=[0]",
            f"data.num_clients={clients}",
            f'data.shift=[{{kind="rotation", degrees=[0, 180], sizes={sizes}}}]',
        ],
    ).select_run("DAC", 0)


def run_demo(
    folder: Path, *, clients: int, rounds: int, port: int, say: Callable[[str], None]
) -> Path:
    """Run the demonstration: nodes with mutual TLS, one of them restarted, against the simulation.

    Args:
        folder: an empty folder.
        clients: number of nodes.
        rounds: number of rounds.
        port: port of the first node.
        say: called with messages on the progress.

    Returns:
        The folder of the study with both runs.
    """
    study = demo_study(clients, rounds)
    # Shorter than the defaults, so that a demonstration that hangs ends within minutes.
    files = lay_out(
        folder, study, port=port, network={"deadline": 20.0, "start": 60.0, "linger": 20.0}
    )
    names, victim = list(files), list(files)[-1]
    (folder / "logs").mkdir()
    killed = threading.Event()
    reached: dict[str, int] = {}

    def handle_event(name: str, event: Mapping[str, Any]) -> None:
        # The warm-up is round -1.
        if event["event"] == "round" and event["round"] > reached.get(name, -2):
            reached[name] = event["round"]
            # A third: it has checkpoints by then, and time to catch up before the end.
            if name == victim and event["round"] >= rounds // 3:
                killed.set()
            if name == names[0]:
                accuracy = 100 * event.get(ACCURACY.name, float("nan"))
                say(
                    f"{name}: round {event['round'] + 1} of {rounds}, {event['seconds']:.2f} s, "
                    f"{accuracy:.0f} %"
                )
        elif event["event"] in ("catch_up", "redraw", "peer_down"):
            if reached.get(event.get("peer", ""), -1) == rounds - 1:
                return  # that one is done and has left
            what = drop_empty(select_keys(event, ("peer", "missing", "came_from", "goes_to")))
            say(f"{name}: {event['event']} {json.dumps(what)}")

    say(
        f"{clients} nodes with mutual TLS on 127.0.0.1:{port} to {port + clients - 1}; logs in "
        f"{folder / 'logs'}"
    )
    with Fleet(files, logs=folder / "logs", listener=handle_event) as fleet:
        for name in names:
            fleet.start(name)
        # Ten minutes, as for the end: many times what a demonstration takes.
        if killed.wait(600):
            fleet.kill(victim)
            say(f"{victim}: killed without warning; started again")
            fleet.start(victim)
        statuses = fleet.wait(600)
    if any(statuses.values()):
        raise TransportError(f"nodes ended with {statuses}; see {folder / 'logs'}")
    return compare_with_simulation(folder, study, names)


def compare_with_simulation(folder: Path, study: StudyConfig, names: Sequence[str]) -> Path:
    """Simulate the same study and put both runs into one study's folder.

    Returns:
        The folder of the study.
    """
    # As in the nodes: another number of threads can change the bits of sums.
    torch.set_num_threads(1)
    simulated = replace(study, methods=(replace(study.methods[0], label="simulated"),))
    run_study(simulated, out=folder / "runs", overwrite=True)
    join_results(folder, study, names, "nodes")
    # One study with two labels, so that a report shows both runs next to each other.
    both = tuple(replace(study.methods[0], label=label) for label in ("nodes", "simulated"))
    top = folder / "runs" / study.name
    written = config.format_study(replace(study, methods=both)).encode()
    manifest.replace_files(top, {stored_runs.CONFIG: written})
    summary.write_summary(top)
    return top
