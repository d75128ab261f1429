"""Runs of nodes with masked sums: the models of the simulation, and a server that is started again."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.selection import first_only

from coterie.methods import METHODS
from coterie.net import local
from coterie.net.log import Log
from coterie.net.masking import MaskingClient
from coterie.net.node import Node, Patience, RunSpec
from coterie.net.post import RoundMissed, Terms
from coterie.net.transport import Hub, InProcess
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

FEDERATION = tiny_federation()


class Six:
    """Six nodes of one client inside one program; the server's is n0."""

    def __init__(self, folder: Path, kind: str, deadline: float = 20.0, **settings) -> None:
        self.folder, self.hub, self.deadline = folder, Hub(), deadline
        given = tiny_settings(secure_aggregation=True, **settings)
        self.plan = RunSpec(METHODS[kind](), given, "linear", "linear", seed=3)
        self.who, self.keys = local.make_members([[i] for i in range(6)], server="n0")
        self.nodes: dict[int, Node] = {}
        self.logs = {number: io.StringIO() for number in range(6)}

    def node(self, number: int) -> Node:
        name = f"n{number}"
        self.nodes[number] = Node(
            self.plan, FEDERATION.host([number]), self.who, InProcess(self.hub, name),
            local.make_signer(self.keys[number]), self.folder / name,
            terms=Terms(deadline=self.deadline), log=Log(name, stream=self.logs[number]),
            patience=Patience(20.0, 1, linger=20.0, ask=2.0, poll=0.02),
        )  # fmt: skip
        return self.nodes[number]

    def run(self) -> None:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(Node.run, [self.node(i) for i in range(6)]))

    def events(self, number: int, *names: str) -> list[dict]:
        lines = [json.loads(line) for line in self.logs[number].getvalue().splitlines()]
        return [event for event in lines if event["event"] in names]

    def simulate(self):
        plan = self.plan
        return simulate(FEDERATION, plan.method, model="linear", settings=plan.settings, seed=3)

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
            node.transport.close()


@pytest.fixture
def six(tmp_path):
    made: list[Six] = []

    def make(*args, **settings) -> Six:
        made.append(Six(tmp_path, *args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "settings"),
    first_only(
        [
            ("ditto", {}),
            ("fedavg", {"participation": 0.5, "dtype": "float32"}),
            ("fedprox", {"shared": ["!1.bias"]}),
        ]
    ),
)
def test_nodes_that_mask_their_models_end_with_the_bits_of_the_simulation(six, kind, settings):
    some = six(kind, **settings)
    some.run()
    run = some.simulate()
    best = torch.cat([some.nodes[i].loop.tracker.best for i in range(6)])
    assert torch.equal(best, run.params)
    assert not some.nodes[0].loop.skipped_rounds


@pytest.mark.full
def test_a_round_without_a_sum_is_an_error_in_the_servers_log_and_the_run_goes_on(six, monkeypatch):
    act = MaskingClient.mask_model

    def leave(self, *args):
        if self.context.round == 1 and self.client in (2, 3):
            raise RoundMissed("gone")
        return act(self, *args)

    monkeypatch.setattr(MaskingClient, "mask_model", leave)
    some = six("fedavg", 2.0)
    some.run()
    (event,) = some.events(0, "no_sum")
    assert event["level"] == "error"
    assert "4 of 6 clients can be summed; at least 5 must be" in event["text"]
    assert some.nodes[0].loop.skipped_rounds == [(1, 1)]
    assert some.nodes[0].loop.is_finished
