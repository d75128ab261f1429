"""What is not shared never leaves a client, with any method; all other promises hold as they do for whole models."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.contract.test_methods import SETTINGS
from torch import Tensor, nn

from coterie.errors import ConfigError
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.rng import Rng
from coterie.simulation.loop import Loop
from coterie.testing import check_method, follow, run_grouped, tiny_federation, tiny_settings
from coterie.testing.methods import _Maker


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


@pytest.mark.parametrize("kind", ["dac", "ifca"])
def test_methods_keep_the_contract_when_a_part_is_shared(kind: str):
    """Any hosting, resumed runs, small cohorts, peers that are silent: with every check of `coterie.testing`."""
    settings = tiny_settings(shared=PATTERNS["scattered"], engine="loop", rounds=2)
    check_method(METHODS[kind](**changed(kind)), federation=tiny_federation(4), model=Net, settings=settings)


@pytest.mark.parametrize("kind", EXCHANGING)
def test_the_result_is_the_same_for_any_hosting(kind: str):
    federation, method = tiny_federation(), METHODS[kind](**changed(kind))
    settings = tiny_settings(shared=PATTERNS["scattered"], engine="loop", rounds=3)
    whole = follow(method, federation=federation, model=Net, settings=settings).state.params
    apart = run_grouped(federation, method, [[4, 0], [1, 2, 3], [5]], model=Net, settings=settings, server=2)
    assert torch.equal(whole, apart)


class Spy(InMemory):
    """An exchange that keeps every number that passes it, and the widths of models."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__(ids, len(ids))
        self.seen: list[Tensor] = []
        self.widths: set[int] = set()

    def look(self, params: Tensor, fields: Any) -> None:
        self.widths.add(params.shape[1])
        self.seen += [one.flatten() for one in (params, *fields.values()) if one.is_floating_point()]

    def pull(self, message, peers):
        self.look(message.params, message.fields)
        return super().pull(message, peers)

    def serve(self, message, rule, shared):
        def heard(state, cohort):
            state, reply = rule(state, cohort)
            self.look(reply.table, reply.fields)
            return state, reply

        self.look(message.params, message.fields)
        return super().serve(message, heard, shared)

    def retire(self, ids, params):
        self.look(params, {})
        super().retire(ids, params)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("kind", "options"), [*((kind, changed(kind)) for kind in EXCHANGING), *MORE])
def test_what_stays_at_home_is_in_no_message_and_no_exchange_changes_it(
    kind: str, options: dict[str, Any], pattern: str
):
    """Nobody trains, so what is at home has the values of the beginning, which nothing else has."""
    shared, apart = PATTERNS[pattern], kind == "dac"
    settings = tiny_settings(shared=shared, engine="loop", init="per_client" if apart else "shared", rounds=3)
    settings = replace(settings, local=replace(settings.local, steps=0), patience=1)
    federation = tiny_federation()
    spy, method = Spy(federation.ids), METHODS[kind](**options)
    with pytest.warns() if apart and "similarity" in options else _nothing():
        loop: Loop = _Maker(federation, method, Net, settings).loop(exchange=spy)
    noise = torch.from_numpy(Rng(1).generator("noise").normal(size=loop.state.params.shape))
    loop.state = replace(loop.state, params=loop.state.params + noise / 4)
    part, before = loop.task.part, loop.state.params.clone()
    while not loop.finished:
        loop.step()
    loop.final()
    assert spy.widths <= {0, part.shared.count}
    assert part.shared.count in spy.widths
    assert not torch.isin(torch.cat(spy.seen), part.home.of(before)).any()
    assert torch.equal(part.home.of(loop.state.params), part.home.of(before))


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("kind", ["dac", "fedavg", "ifca"])
def test_patterns_that_choose_everything_give_the_bytes_of_no_pattern(kind: str):
    groups, method = [[0, 1, 2, 3], [4, 5]], METHODS[kind](**changed(kind))
    found = [
        run_grouped(tiny_federation(), method, groups, model=Net, settings=tiny_settings(shared=shared, engine="loop"))
        for shared in ([], ["*"], ["body", "head"])
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_method_that_compares_what_stays_at_home_alone_says_so():
    settings = tiny_settings(shared=["!head"], engine="loop")
    with pytest.raises(ConfigError, match="features is 'last_layer'; expected 'all': the last layer stays at home"):
        follow(METHODS["fesem"](features="last_layer"), model=Net, settings=settings)
    gradient = METHODS["sosicfl"](**SETTINGS["sosicfl"], assignment="gradient")
    with pytest.raises(ConfigError, match="places clients by the updates of the endpoints, which stay at home"):
        follow(gradient, model=Net, settings=settings)
