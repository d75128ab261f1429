"""Nodes with an audit log: what they write down, that others' logs say the same, and that a full disk loses nothing."""

import errno
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie._util import manifest
from coterie._util.lines import LineFile
from coterie.errors import DiskFull
from coterie.methods import METHODS
from coterie.net import audit, auditor, local
from coterie.net.audit import Audit
from coterie.net.identity import encode_public_key
from coterie.net.log import Log
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.post import Terms
from coterie.net.status import NetworkStatus
from coterie.net.transport import Hub, InProcess
from coterie.runtime import checkpoint
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

FEDERATION = tiny_federation()
SIZE = 6


class Audited:
    """Six nodes with one client each, inside one program, each with an audit log."""

    def __init__(self, folder: Path, plan: RunSpec) -> None:
        self.folder, self.plan, self.hub = folder, plan, Hub()
        self.roster, self.keys = local.make_members(
            [[i] for i in range(SIZE)], server="n0" if plan.method.server else ""
        )
        self.nodes: dict[int, Node] = {}

    def make_node(self, number: int, *, transport: InProcess, sign: Any, audit: Audit) -> Node:
        return Node(
            self.plan, FEDERATION.host([number]), self.roster, transport, sign,
            self.folder / f"n{number}" / "run",
            terms=Terms(deadline=60.0), patience=Patience(start=60.0, linger=60.0, ask=2.0, poll=0.02),
            log=Log(f"n{number}", stream=io.StringIO(), also=audit.record_event), audit=audit,
        )  # fmt: skip

    def run_one(self, number: int) -> None:
        """Run a node from its checkpoint or the start, as `process.open_node` does."""
        name, key = f"n{number}", self.keys[number]
        sign, place = local.make_signer(key), self.folder / name
        with Audit(place, name, "local", encode_public_key(key.public_key()), sign) as log:
            transport = InProcess(self.hub, name)
            transport.outbox.permit = log.record_answer
            node = self.make_node(number, transport=transport, sign=sign, audit=log)
            self.nodes[number] = node
            try:
                node.run()
            finally:
                node.close()
                transport.close()

    def run(self, again: Callable[[], None] = lambda: None) -> None:
        """Run all nodes to their end.

        Args:
            again: called when n0 has ended for want of room, before it is started again.
        """

        def first() -> None:
            try:
                self.run_one(0)
            except OSError as error:
                if not DiskFull.matches(error):
                    raise
                again()
                self.run_one(0)

        with ThreadPoolExecutor(SIZE) as pool:
            for done in [
                pool.submit(first),
                *(pool.submit(self.run_one, i) for i in range(1, SIZE)),
            ]:
                done.result()

    def reports(self) -> list[auditor.Report]:
        return [auditor.check_log(self.folder / f"n{i}", [self.roster]) for i in range(SIZE)]

    def models(self) -> torch.Tensor:
        return torch.cat([self.nodes[i].loop.tracker.best for i in range(SIZE)])


@pytest.fixture
def nodes(tmp_path) -> Iterator[Callable[..., Audited]]:
    def make(kind: str, **settings) -> Audited:
        options = {"num_peers": 2} if kind == "dac" else {}
        return Audited(
            tmp_path,
            RunSpec(
                METHODS[kind](**options), tiny_settings(**settings), "linear", "linear", seed=3
            ),
        )

    return make


def simulated(plan: RunSpec):
    return simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=plan.seed)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dac", "fedavg"])
def test_the_logs_of_all_nodes_are_whole_and_agree(nodes, kind):
    """And the run is what it is without them."""
    network = nodes(kind)
    network.run()
    run = simulated(network.plan)
    assert torch.equal(network.models(), run.params)
    reports = network.reports()
    assert [report.problems for report in reports] == [[]] * SIZE
    for number, a in enumerate(reports):
        others = [f"n{i}" for i in range(SIZE) if i != number]
        assert sorted(a.members) == others
        for b in reports[:number]:
            assert auditor.compare_logs(a, b) == ([], [])
            assert auditor.count_lost(a, b) == 0
    got = sum(len(of.received) for report in reports for of in report.traffic.values())
    assert got == sum(node.post.traffic.received for node in network.nodes.values())
    if kind == "dac":  # whom the simulation's clients read is who sent something
        edges = run.edges[run.edges["reader"] == 0]
        read = {(int(e.round), int(e.read)) for e in edges.itertuples()}
        told = {(key[1], key[3]) for of in reports[0].traffic.values() for key in of.received}
        assert told == read


@pytest.mark.slow
def test_models_that_a_client_refuses_and_its_quarantine_are_written_down(nodes):
    network = nodes("dac", acceptance={"worse": 1.0, "clip": 0.5})
    network.run()
    edges = simulated(network.plan).edges
    refused = {
        (int(e.round), int(e.reader), int(e.read))
        for e in edges[edges["purpose"] == "refused"].itertuples()
    }
    texts = [(network.folder / f"n{i}" / audit.FILE).read_text() for i in range(SIZE)]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    told = [line for line in lines if line["event"] == "rejected"]
    assert refused
    assert {(line["round"], line["reader"], line["client"]) for line in told} == refused
    assert all(
        line["peer"] == f"n{line['client']}" and line["until"] > line["round"] + 1 for line in told
    )
    assert sum(
        report.traffic_with(f"n{i}").refused["rejected"]
        for report in network.reports()
        for i in range(SIZE)
    ) == len(told)


@pytest.mark.filterwarnings("ignore::coterie.runtime.loop.ServerRefused")
def test_each_client_whose_message_a_server_leaves_out_is_named(nodes, monkeypatch):
    """N2 and n4 send models that are 200 times too long: both are, in each of two rounds."""
    network = nodes("fedavg", acceptance=True, rounds=2)
    make, status = network.make_node, NetworkStatus()

    def make_liar(number: int, **options) -> Node:
        node = make(number, **options)
        if number == 0:
            before = node.log.also
            node.log.also = lambda *event: (before(*event), status.note_event(*event))
        if number in (2, 4):
            ask = node.exchange.ask_server
            monkeypatch.setattr(
                node.exchange,
                "ask_server",
                lambda message, *rest: ask(replace(message, params=-200 * message.params), *rest),
            )
        return node

    monkeypatch.setattr(network, "make_node", make_liar)
    network.run()
    report = network.reports()[0]
    refused = {name: dict(of.refused) for name, of in report.traffic.items() if of.refused}
    assert refused == {name: {"message_refused": 2} for name in ("n2", "n4")}
    shown = {one["name"]: one["refused"] for one in status.collect(network.nodes[0])["members"]}
    assert {name: of for name, of in shown.items() if of} == refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "number"), [("checkpoint", 3), ("audit", 3), ("audit", 40), ("journal", 5)]
)
def test_a_server_whose_disk_is_full_goes_on_later_to_the_same_bytes(
    nodes, monkeypatch, where, number
):
    """The others wait for it; the disk is full from some moment on, until it is started again."""
    network, full, times = nodes("fedavg"), [False], [0]
    append, replace_files = LineFile.append, manifest.replace_files

    def counted(path: Path, wanted: bool) -> None:
        if path.is_relative_to(network.folder / "n0"):
            times[0] += wanted
            if full[0] or (wanted and times[0] == number):
                full[0] = True
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def adding(self, line):
        counted(
            self.path,
            self.path.name == {"audit": audit.FILE, "journal": "arrivals.jsonl"}.get(where),
        )
        append(self, line)

    def replacing(folder, contents, rotate=None):
        counted(folder, where == "checkpoint")
        replace_files(folder, contents, rotate)

    def room() -> None:
        times[0], full[0] = 1000, False
        before.append((network.folder / "n0" / "run" / checkpoint.FILE).exists())

    before: list[bool] = []
    monkeypatch.setattr(LineFile, "append", adding)
    monkeypatch.setattr(manifest, "replace_files", replacing)
    network.run(room)
    assert len(before) == 1
    run = simulated(network.plan)
    assert torch.equal(network.models(), run.params)
    reports = network.reports()
    assert [report.problems for report in reports] == [[]] * SIZE
    assert reports[0].starts == 2
    assert [auditor.compare_logs(reports[0], other) for other in reports[1:]] == [([], [])] * (
        SIZE - 1
    )
