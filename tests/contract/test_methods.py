"""Every method keeps the promises that every method makes."""

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, final

import pytest
import torch
from torch import Tensor, nn

from coterie.engine.task import Task
from coterie.methods import METHODS
from coterie.methods.base import Info, PeerMethod, Round, State, drawn_uniformly
from coterie.rng import Rng
from coterie.simulation.run import simulate
from coterie.testing import check_method, follow, run_grouped, tiny_federation, tiny_settings

# Settings that suit six clients, three classes and four rounds, where the defaults do not.
SETTINGS: dict[str, dict[str, Any]] = {
    "cfl": {"eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1},
    "fedgwc": {"eps": 1.0, "patience": 1, "min_pair_updates": 0.0},
    "ifca": {"clusters": 2},
    "one-shot": {"warmup_rounds": 2},
    "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
    "sosicfl-all": {"endpoints": 3, "regions": 2},
    "sosicfl-plus": {"endpoints": 3, "regions": 2},
}
# Their servers draw by the clients' positions: first memberships, seeds of clusterings.
BY_POSITION = {"fesem", "sosicfl", "sosicfl-all", "sosicfl-plus"}


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_method_keeps_the_contract(kind: str):
    """With every check of `coterie.testing`."""
    check_method(METHODS[kind](**SETTINGS.get(kind, {})), relabel=kind not in BY_POSITION)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("fedgwc", {"preset": "released", "eps": 1.0, "clients_per_round": 4, "aggregator": "fedavgm"}),
        ("fedprox", {"sampling": "samples", "weights": "uniform"}),
        ("cfl", {"participation": "partial", "eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1}),
        ("ifca", {"clusters": 2, "start": "resample", "share_representation": True}),
        ("ifca", {"clusters": 2, "start": "random_groups", "group_rounds": 2, "averaging_of": "gradients"}),
        ("sosicfl", {"preset": "released", "endpoints": 3, "warmup_rounds": 1}),
        ("sosicfl-plus", {"endpoints": 3, "regions": 2, "global_rounds": 2, "per_sample": True}),
        ("sosicfl", {"endpoints": 3, "regions": 2, "topics": "classes", "test_samples": 3}),
    ],
)
def test_options_keep_the_contract(kind: str, settings: dict[str, Any]):
    """Options that exchange something else or draw otherwise."""
    check_method(METHODS[kind](**settings), relabel=False)


@dataclass(frozen=True)
class Count:
    """The memory of `Faithless`."""

    rounds: Tensor


@final
@dataclass(frozen=True)
class Faithless(PeerMethod):
    """Breaks one promise of methods.

    Args:
        breaks: which.
    """

    kind: ClassVar[str] = "faithless"
    summary: ClassVar[str] = "breaks one promise of methods"
    breaks: Literal["params", "memory", "grouping", "order", "none"] = "none"

    def memory(self, task: Task, rng: Rng) -> Count:
        return Count(torch.zeros(len(task)))

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Take the mean with a client drawn at random, or what is wrong."""
        if self.breaks == "params":
            state.params.mul_(0.5)
        if self.breaks == "memory":
            state.memory.rounds.add_(1)
        peers = drawn_uniformly(rnd, 1, rnd.candidates)
        if self.breaks == "order":  # the first client is read by all others
            peers = torch.where(rnd.candidates[:, :1], 0, -1)
        inbox = rnd.exchange.pull(self.message(rnd.task, state), peers)
        came = inbox.mask.double()
        mixed = inbox.mix(came / 2, own=state.params, own_weight=1 - came[:, 0] / 2)
        if self.breaks == "grouping":
            mixed = mixed * (1 - 0.01 * len(rnd.ids))
        return replace(state, params=mixed), {}


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("params", "round changed its argument state.params"),
        ("memory", "round changed its argument state.memory"),
        ("grouping", "changes the result"),
        ("order", "relabeling the clients changes the result"),
    ],
)
def test_a_method_that_breaks_a_promise_is_named_with_it(breaks: Any, said: str):
    with pytest.raises(AssertionError, match=said):
        check_method(Faithless(breaks))


def test_without_its_breach_the_same_method_keeps_the_contract():
    check_method(Faithless())


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(kind for kind, method in METHODS.items() if method.server))
def test_the_server_may_be_at_any_host(kind: str):
    """Every host of each grouping; `check_method` tries the first, one in the middle and the last."""
    federation, method = tiny_federation(), METHODS[kind](**SETTINGS.get(kind, {}))
    whole = follow(method).state.params
    for groups in ([[0], [1], [2], [3], [4], [5]], [[0], [1, 2, 3], [4, 5]], [[4, 2, 0], [1, 3, 5]]):
        for server in range(len(groups)):
            assert torch.equal(run_grouped(federation, method, groups, server=server), whole)


@pytest.mark.parametrize("kind", sorted(METHODS))
def test_engines_agree(kind: str):
    """Three rounds with each engine end where the loop engine does: 1e-10 in float64, 1e-4 relative in float32.

    In blocks that do not divide the population the vmap engine ends with the same bytes.
    """
    federation, method = tiny_federation(), METHODS[kind](**SETTINGS.get(kind, {}))

    def trained(engine: str, dtype: Any, block: int | None = None) -> torch.Tensor:
        settings = tiny_settings(rounds=3, engine=engine, dtype=dtype, block=block)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the vmap engine is used: the module cannot be compiled")
            return simulate(federation, method, model=small, settings=settings).params

    limits: dict[Any, float] = {"float64": 1e-10, "float32": 1e-4}
    for dtype, limit in limits.items():
        loop, vmap, compiled = (trained(engine, dtype) for engine in ("loop", "vmap", "compiled"))
        scale = float(loop.abs().max())
        assert float((vmap - loop).abs().max()) < limit * scale
        assert float((compiled - loop).abs().max()) < limit * scale
    assert torch.equal(*(trained("vmap", "float32", block) for block in (4, 6)))


def small() -> nn.Module:
    """A network of one hidden layer."""
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
