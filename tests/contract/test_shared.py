"""What is not shared never leaves a client, with any method; all other promises hold as they do for whole models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import pytest
import torch
from tests.contract.test_methods import SETTINGS
from tests.selection import first_only, one_of_each_family
from torch import Tensor, nn
from torch.nn import functional

from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.methods.dac import pull_and_measure
from coterie.methods.fedavg import OneModel
from coterie.methods.registry import resolve_class
from coterie.methods.server import ServerContext
from coterie.models.layout import Layout
from coterie.models.part import match_patterns
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.simulation import _sequential
from coterie.simulation._sequential import LiveExchange
from coterie.testing import check_method, run_grouped, run_method, tiny_federation, tiny_settings
from coterie.testing.methods import _RunFactory


class Net(nn.Module):
    """A body with a normalization, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


PATTERNS = {
    "fedper": ["!head"],
    "lg-fedavg": ["head"],
    "fedbn": ["!body.1"],
    "scattered": ["body", "head.bias", "!*.running_mean", "!body.1.weight"],
}
EXCHANGING = sorted(kind for kind in METHODS if METHODS[kind].exchanges)
MORE: list[tuple[str, dict[str, Any]]] = [
    ("dac", {"similarity": "cos_grad"}),
    ("dac", {"similarity": "inv_l2", "two_hop_scope": "history"}),
    ("dac", {"loss_direction": "push"}),
    ("cfl", {"participation": "partial", "eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1}),
    ("ifca", {"clusters": 2, "start": "resample", "share_representation": True}),
]


def changed(kind: str) -> dict[str, Any]:
    return SETTINGS.get(kind, {})


@pytest.mark.full
@pytest.mark.parametrize("kind", first_only(["dac", "ifca"]))
def test_methods_keep_the_contract_when_a_part_is_shared(kind: str):
    """Any hosting, resumed runs, small cohorts, peers that are silent: with every check of `coterie.testing`."""
    settings = tiny_settings(shared=PATTERNS["scattered"], engine="loop", rounds=2)
    check_method(
        METHODS[kind](**changed(kind)), federation=tiny_federation(4), model=Net, settings=settings
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", one_of_each_family(EXCHANGING, slow=True))
def test_the_result_is_the_same_for_any_hosting(kind: str):
    federation, method = tiny_federation(), METHODS[kind](**changed(kind))
    settings = tiny_settings(shared=PATTERNS["scattered"], engine="loop", rounds=3)
    whole = run_method(method, federation=federation, model=Net, settings=settings).state.params
    apart = run_grouped(
        federation, method, [[4, 0], [1, 2, 3], [5]], model=Net, settings=settings, server=2
    )
    assert torch.equal(whole, apart)


class Spy(InMemory):
    """An exchange that keeps every number that passes it, and the widths of models."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__(ids, len(ids))
        self.seen: list[Tensor] = []
        self.widths: set[int] = set()

    def look(self, params: Tensor, fields: Any) -> None:
        self.widths.add(params.shape[1])
        self.seen += [
            one.flatten() for one in (params, *fields.values()) if one.is_floating_point()
        ]

    def pull(self, message, peers):
        self.look(message.params, message.fields)
        return super().pull(message, peers)

    def ask_server(self, message, rule, shared):
        def heard(state, cohort):
            state, reply = rule(state, cohort)
            self.look(reply.table, reply.fields)
            return state, reply

        self.look(message.params, message.fields)
        return super().ask_server(message, heard, shared)

    def retire_clients(self, ids, params):
        self.look(params, {})
        super().retire_clients(ids, params)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("kind", "options"),
    one_of_each_family([*((kind, changed(kind)) for kind in EXCHANGING), *MORE]),
)
def test_what_stays_at_home_is_in_no_message_and_no_exchange_changes_it(
    kind: str, options: dict[str, Any], pattern: str
):
    """Nobody trains, so what is at home has the values of the beginning, which nothing else has."""
    shared, apart = PATTERNS[pattern], kind == "dac"
    settings = tiny_settings(
        shared=shared, engine="loop", init="per_client" if apart else "shared", rounds=3
    )
    settings = replace(settings, local=replace(settings.local, steps=0), patience=1)
    federation = tiny_federation()
    found, taken = resolve_class(METHODS[kind], options)
    spy, method = Spy(federation.ids), found(**taken)
    with pytest.warns() if apart and "similarity" in options else _nothing():
        loop: Loop = _RunFactory(federation, method, Net, settings).make_loop(exchange=spy)
    noise = torch.from_numpy(Rng(1).generator("noise").normal(size=loop.state.params.shape))
    loop.state = replace(loop.state, params=loop.state.params + noise / 4)
    part, before = loop.task.sharing, loop.state.params.clone()
    while not loop.is_finished:
        loop.run_next_round()
    loop.evaluate_final()
    assert spy.widths <= {0, part.shared.num_columns}
    assert part.shared.num_columns in spy.widths
    assert not torch.isin(torch.cat(spy.seen), part.local.select_from(before)).any()
    assert torch.equal(part.local.select_from(loop.state.params), part.local.select_from(before))


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dac", "fedavg", "ifca"])
def test_patterns_that_choose_everything_give_the_bytes_of_no_pattern(kind: str):
    groups, method = [[0, 1, 2, 3], [4, 5]], METHODS[kind](**changed(kind))
    found = [
        run_grouped(
            tiny_federation(),
            method,
            groups,
            model=Net,
            settings=tiny_settings(shared=shared, engine="loop"),
        )
        for shared in ([], ["*"], ["body", "head"])
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_method_that_compares_what_stays_at_home_alone_says_so():
    settings = tiny_settings(shared=["!head"], engine="loop")
    with pytest.raises(
        ConfigError, match="features is 'last_layer'; expected 'all': the last layer stays at home"
    ):
        run_method(METHODS["fesem"](features="last_layer"), model=Net, settings=settings)
    gradient = METHODS["sosicfl"](**SETTINGS["sosicfl"], assignment="gradient")
    with pytest.raises(
        ConfigError, match="places clients by the updates of the endpoints, which stay at home"
    ):
        run_method(gradient, model=Net, settings=settings)


def test_fedavg_with_a_personal_head_is_what_pytorch_computes():
    """Two rounds of two clients by hand: one step of SGD each, then the mean of the bodies; heads are never mixed."""
    federation = tiny_federation(2, train=8, validation=2)
    local = LocalTraining(optimizer="sgd", lr=0.1, batch_size=8)
    settings = tiny_settings(shared=["0"], engine="loop", rounds=2, local=local)
    found = run_method(
        METHODS["fedavg"](), federation=federation, model=_two_layers, settings=settings
    ).state
    with Rng(3).at_round(-1).temporary_torch_seed("init"):
        start = _two_layers().double()
    body = [one.detach().clone() for one in start[0].parameters()]
    heads = [[one.detach().clone() for one in start[1].parameters()] for _ in range(2)]
    for _ in range(2):
        returned = []
        for client in range(2):
            x, y = federation.x[client][:8], federation.y[client][:8]
            leaves = [one.clone().requires_grad_() for one in (*body, *heads[client])]
            outputs = functional.linear(functional.linear(x, *leaves[:2]), *leaves[2:])
            grads = torch.autograd.grad(functional.cross_entropy(outputs, y), leaves)
            after = [leaf.detach() - 0.1 * grad for leaf, grad in zip(leaves, grads, strict=True)]
            returned.append(after[:2])
            heads[client] = after[2:]
        body = [(one + other) / 2 for one, other in zip(*returned, strict=True)]
    for client in range(2):
        own = torch.cat([one.flatten() for one in heads[client]])
        assert torch.allclose(found.params[client, 15:], own, rtol=0, atol=1e-12)
    wanted = torch.cat([one.flatten() for one in body])
    assert torch.allclose(found.shared.models[0, :15], wanted, rtol=0, atol=1e-12)
    assert not found.shared.models[0, 15:].any()


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))


@final
@dataclass(frozen=True)
class OwnHead(OneModel):
    """FedPer as a method of a user's.

    Args:
        layers: how many layers stay at home.
    """

    kind: ClassVar[str] = "own-head"
    summary: ClassVar[str] = "FedAvg of all layers but the last"
    layers: int = 1

    def personal_tensors(self, layout: Layout) -> Sequence[str]:
        """The last layers."""
        return [
            name
            for names in list(layout.layer_tensors().values())[-self.layers :]
            for name in names
        ]


def test_what_a_method_declares_is_what_a_pattern_says():
    settings = tiny_settings(engine="loop")
    declared = run_method(OwnHead(), model=Net, settings=settings)
    written = run_method(
        METHODS["fedavg"](), model=Net, settings=replace(settings, shared=["!head"])
    )
    assert torch.equal(declared.state.params, written.state.params)
    both = run_method(
        OwnHead(), model=Net, settings=replace(settings, shared=["!body.1"])
    ).task.sharing
    layout = declared.task.layout
    assert torch.equal(both.local.mask, match_patterns(layout, ["head", "body.1"], ""))


@pytest.mark.parametrize("schedule", ["sequential", "sequential_exchange"])
def test_clients_that_act_one_after_another_publish_what_is_shared(schedule: str, monkeypatch):
    boards = []

    class Watched(LiveExchange):
        def pull(self, message, peers):
            boards.append((message.params.shape[1], self.boards[0].params.clone()))
            return super().pull(message, peers)

    monkeypatch.setattr(_sequential, "LiveExchange", Watched)
    local = replace(tiny_settings().local, steps=0)
    settings = tiny_settings(
        shared=["!body.1"], engine="loop", init="per_client", schedule=schedule, local=local
    )
    loop = run_method(METHODS["dac"](num_peers=2), model=Net, settings=settings)
    part, start = loop.task.sharing, loop.task.initial_models(Rng(3))
    assert {width for width, _ in boards} == {part.shared.num_columns}
    assert {board.shape for _, board in boards} == {(6, part.shared.num_columns)}
    assert torch.equal(part.local.select_from(loop.state.params), part.local.select_from(start))
    assert not torch.equal(loop.state.params, start)


def test_similarities_compare_the_part_that_they_are_told_to():
    """Peers are near in the body and far in the head, or the other way round: each part ranks them its own way."""
    federation = tiny_federation(3)
    rows = {}
    for part in ("body", "head", ""):
        settings = tiny_settings(engine="loop", similarity_on=[part] if part else [])
        for metric in ("inv_l2", "cos_weight", "cos_grad"):
            method = METHODS["dac"](num_peers=2, similarity=metric, two_hop=False)
            loop = _RunFactory(federation, method, Net, settings).make_loop()
            layout, start = loop.task.layout, loop.task.initial_models(Rng(3))
            body, head = (
                match_patterns(layout, [one], "").nonzero().flatten() for one in ("body.0", "head")
            )
            params = start + 1.0
            params[1, body], params[2, head] = start[1, body] - 1.0, start[2, head] - 1.0
            # statistics never count
            params[:, layout.trainable :] = torch.tensor([[0.0], [50.0], [90.0]])
            state = replace(loop.state, params=params)
            rnd = loop._make_round(0, torch.arange(3), torch.arange(3))
            rnd.exchange.begin_round(Rng(3).at_round(0))
            rnd.exchange.set_active(torch.arange(3))
            measured = pull_and_measure(
                rnd,
                state,
                method.publish(rnd.task, state),
                torch.tensor([[1, 2], [0, 2], [0, 1]]),
                metric,
                1,
            )
            rows[part, metric] = measured.similarity[0].tolist()
    for metric in ("inv_l2", "cos_weight", "cos_grad"):
        assert rows["body", metric][0] < rows["body", metric][1] == pytest.approx(1.0)
        assert rows["head", metric][1] < rows["head", metric][0] == pytest.approx(1.0)
        assert max(rows["", metric]) < 1
    assert rows["head", "cos_grad"] == pytest.approx([1.0, -1.0])
    assert rows["body", "inv_l2"] == pytest.approx([1 / (1 + 2 * 25**0.5), 1.0])


def test_the_server_of_cfl_compares_the_same_part():
    """Updates that point the same way in all but the head are split by the head alone; the rest decides otherwise."""
    found = {}
    federation = tiny_federation(4)
    for on in (["0"], ["1"]):
        settings = tiny_settings(engine="loop", similarity_on=on)
        method = METHODS["cfl"](eps1=1e9, eps2=0.0, warmup_rounds=0, min_cluster_size=1)
        task = _RunFactory(federation, method, _two_layers, settings).make_task(range(4))
        shared = method.init_server_state(task, Rng(3))
        updates = torch.zeros(4, task.layout.size, dtype=torch.float64)
        updates[:, 0], updates[:, 15] = (
            torch.tensor([1.0, 1, -1, -1]),
            torch.tensor([1.0, -1, 1, -1]),
        )
        message = Message(
            shared.models + updates,
            {"samples": torch.ones(4, dtype=torch.float64)},
            torch.arange(4),
        )
        context = ServerContext(0, Rng(3), task.layout, 4, None, task.sharing)
        found[on[0]] = method.aggregate(context, shared, message).label.tolist()
    assert found["0"] in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert found["1"] in ([0, 1, 0, 1], [1, 0, 1, 0])
