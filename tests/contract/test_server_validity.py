"""What a server leaves out: the same in one process, between blocks, threads and nodes; counted and said."""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.selection import first_only
from torch import Tensor

from coterie.cluster.exchange import BlockExchange, BlockLinks, Postbox
from coterie.exchange import validity
from coterie.exchange.accepting import Acceptance
from coterie.exchange.base import ExchangeWrapper, Message
from coterie.exchange.in_memory import InMemory
from coterie.exchange.mailbox import Mailbox, PostOffice
from coterie.methods import METHODS
from coterie.net import local
from coterie.net.nodefile import between_machines
from coterie.net.post import Terms
from coterie.rng import Rng
from coterie.runtime.loop import Loop, ServerRefused
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.methods import _RunFactory

GROUPS = [[0, 2], [1], [3, 4, 5]]
LIAR = 4


@dataclass
class Lie:
    """How a client changes what it sends to the server: its row of models, or of its samples."""

    model: Callable[[Tensor], Tensor] = lambda row: row
    samples: Callable[[Tensor], Tensor] = lambda row: row


class Lying(ExchangeWrapper[Any]):
    """Changes the messages of one client on their way, wherever it is hosted."""

    def __init__(self, inner: Any, lie: Lie) -> None:
        self.inner, self.lie, self.active = inner, lie, torch.empty(0)

    def set_active(self, ids: Tensor) -> None:
        self.active = ids
        self.inner.set_active(ids)

    def ask_server(self, message: Message, rule: Any, shared: Any) -> Any:
        at = (self.active == LIAR).nonzero().flatten().tolist()
        if at and message.params.shape[1]:
            params, fields = message.params.clone(), dict(message.fields)
            samples = fields["samples"].clone()
            params[at[0]], samples[at[0]] = (
                self.lie.model(params[at[0]]), self.lie.samples(samples[at[0]])
            )  # fmt: skip
            message = replace(message, params=params, fields={**fields, "samples": samples})
        return self.inner.ask_server(message, rule, shared)


@contextmanager
def doors(where: str) -> Iterator[tuple[list[Any], list[list[int]]]]:
    """The exchanges of one place, and the clients that each hosts."""
    if where == "process":
        yield [InMemory(torch.arange(6), 6)], [list(range(6))]
    elif where == "threads":
        office = PostOffice(6, timeout=30)
        yield (
            [Mailbox(office, torch.tensor(g), server=n == 0) for n, g in enumerate(GROUPS)],
            GROUPS,
        )
    elif where == "blocks":
        owner, boxes = torch.empty(6, dtype=torch.int32), [Postbox(3) for _ in GROUPS]
        for number, group in enumerate(GROUPS):
            owner[torch.tensor(group)] = number
        links = [BlockLinks(n, [box.put for box in boxes], box) for n, box in enumerate(boxes)]
        yield (
            [
                BlockExchange(links[n], torch.tensor(g), owner, server=True)
                for n, g in enumerate(GROUPS)
            ],
            GROUPS,
        )
    else:
        _, exchanges = local.connect_in_process(GROUPS, terms=Terms(deadline=30.0))
        yield list(exchanges), GROUPS
        for exchange in exchanges:
            exchange.post.close()
            exchange.post.transport.close()


def run(where: str, method: Any, lie: Lie, **settings: Any) -> tuple[Tensor, list[Loop]]:
    """The models of all clients by id, and the loops: that of the server role is the first."""
    given = tiny_settings(rounds=2, **settings)
    make = _RunFactory(tiny_federation(), method, "linear", given)
    with doors(where) as (exchanges, groups), warnings.catch_warnings():
        warnings.simplefilter("ignore", ServerRefused)

        def run_host(number: int) -> Loop:
            loop = make.make_loop(Lying(exchanges[number], lie), Rng(3), groups[number])
            while not loop.is_finished:
                loop.run_next_round()
            return loop

        with ThreadPoolExecutor(len(groups)) as pool:
            loops = list(pool.map(run_host, range(len(groups))))
    ids = torch.tensor([client for group in groups for client in group])
    return torch.cat([loop.state.params for loop in loops])[torch.argsort(ids)], loops


LIES = {
    "no samples": (Lie(samples=lambda own: own * 0), {}, "claims 0 samples"),
    "negative samples": (Lie(samples=lambda own: own * -5), {}, "claims -60 samples"),
    "a model that overflows": (Lie(model=lambda own: own * 0 + 1e200), {}, "squares overflow"),
    "-5 times the model": (
        Lie(model=lambda own: -5 * own), {"acceptance": True}, "typical steps away",
    ),
}  # fmt: skip
NOT_FINITE = {
    "samples that are NaN": Lie(samples=lambda own: own * float("nan")),
    "infinite samples": Lie(samples=lambda own: own * float("inf")),
    "a model with NaN": Lie(model=lambda own: own * float("nan")),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("kind", first_only(["fedavg", "ifca"]))
def test_a_lie_is_left_out_counted_and_the_same_everywhere(name, kind):
    """The server's models are the means of the other five, by hand."""
    lie, settings, why = LIES[name]
    results = {
        where: run(where, METHODS[kind](), lie, **settings)
        for where in ("process", "threads", "blocks", "nodes")
    }
    expected, (whole,) = results["process"]
    for where, (found, loops) in results.items():
        assert torch.equal(found, expected), where
        # every block does what a server does; elsewhere the server's host alone knows
        for number, loop in enumerate(loops):
            knows = number == 0 or where == "blocks"
            assert set(loop.refused) == ({LIAR} if knows else set()), where
            if knows:
                assert why in loop.refused[LIAR]
    table = whole.record.metrics
    rows = table[(table["metric"] == "refused").to_numpy()]
    assert rows["round"].unique().tolist() == [0, 1]
    assert set(rows["value"]) == {1.0}
    assert len(rows) == 12
    if kind == "fedavg":
        # what the clients trained last, and their numbers of samples
        others = [client for client in range(6) if client != LIAR]
        samples = whole.task.num_samples[others].double()
        mean = (whole.state.params[others].double() * samples[:, None]).sum(0) / samples.sum()
        torch.testing.assert_close(whole.state.shared.models[0], mean.to(expected))


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_is_left_out_in_one_process_and_in_blocks(name):
    """Between nodes its sender withholds it, and misses the round: the others go on the same."""
    lie = NOT_FINITE[name]
    (expected, (whole,)), (blocks, loops) = (
        run(where, METHODS["fedavg"](), lie) for where in ("process", "blocks")
    )
    assert torch.equal(expected, blocks)
    for loop in [whole, *loops]:
        assert "not finite" in loop.refused[LIAR]
    others = [client for client in range(6) if client != LIAR]
    samples = whole.task.num_samples[others].double()
    mean = (whole.state.params[others].double() * samples[:, None]).sum(0) / samples.sum()
    torch.testing.assert_close(whole.state.shared.models[0], mean.to(expected))


def test_each_client_that_is_left_out_is_said_once_with_its_name():
    data, lie = tiny_federation(), LIES["negative samples"][0]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ServerRefused)
        simulate(
            data, METHODS["fedavg"](), model="linear", settings=tiny_settings(rounds=3), seed=3,
            exchange=Lying(InMemory(data.ids, 6), lie),
        )  # fmt: skip
    assert [str(one.message) for one in said if one.category is ServerRefused] == [
        "the server left out the message of client 4 in round 0: it claims -60 samples"
    ]


def test_which_messages_are_not_valid():
    """Each alone, and what is valid beside it: gaps in an extra of several numbers."""
    nan, inf = float("nan"), float("inf")
    params = torch.ones(7, 3)
    params[1, 2], params[2, 0], params[3, 1] = nan, -inf, 2e19
    samples = torch.tensor([1.0, 1, 1, 1, -1, nan, 1])
    traces = torch.ones(7, 2)
    traces[0, 1], traces[6, 0] = nan, inf
    ids = torch.tensor([3, 5, 6, 8, 11, 12, 20])
    found = validity.find_invalid(Message(params, {"samples": samples, "trace": traces}, ids))
    assert found == {
        5: "its model is not finite",
        6: "its model is not finite",
        8: "its model has numbers up to 2e+19, whose squares overflow",
        11: "it claims -1 samples",
        12: "its samples are not finite",
        20: "its trace are not finite",
    }


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2e19, -2e19])
def test_one_number_among_all_models_is_found(number: float):
    """In any place; 1.8e19 is the root of the largest float32, and smaller ones are nobody's fault."""
    for place in ((0, 0), (6, 2), (3, 1)):
        params = torch.full((7, 3), -1.8e19)
        params[place] = number
        assert list(validity.find_invalid(Message(params, {}, torch.arange(7)))) == [place[0]]


def test_steps_are_measured_from_the_nearest_model_and_claims_by_their_median():
    """Steps 1, 1, 2, 10 of the nearest of two models: the last is 10 / 1 typical steps away (lower median)."""
    models = torch.tensor([[0.0, 0.0], [100.0, 0.0]])
    params = torch.tensor([[1.0, 0.0], [100.0, 1.0], [98.0, 0.0], [0.0, -10.0]])
    message = Message(params, {"samples": torch.tensor([10.0, 30.0, 20.0, 1e6])}, torch.arange(4))
    bounded, refused = validity.bound_messages(message, models, Acceptance())
    assert refused == {3: "its model is 10 typical steps away; at most 9 are accepted"}
    assert bounded.fields["samples"].tolist() == [10.0, 30.0, 20.0, 80.0]
    assert validity.bound_messages(message, models, Acceptance(clip=4.0))[1] == {}
    # of two messages none is typical
    two = message.take_rows(torch.tensor([0, 3]))
    assert validity.bound_messages(two, models, Acceptance())[0] is two


def test_servers_judge_between_machines_and_in_a_simulation_on_request():
    settings = tiny_settings()
    judging = between_machines(METHODS["fedavg"](), settings).acceptance_rules
    assert judging is not None
    # A large site counts for what it has.
    assert judging == replace(Acceptance(), samples=judging.samples)
    assert judging.samples > 1e6
    assert (
        between_machines(METHODS["fedavg"](), replace(settings, acceptance=False)).acceptance_rules
        is None
    )
    lie = LIES["-5 times the model"][0]
    believed, (loop,) = run("process", METHODS["fedavg"](), lie)
    assert loop.refused == {}
    assert not torch.equal(believed, run("process", METHODS["fedavg"](), lie, acceptance=True)[0])
