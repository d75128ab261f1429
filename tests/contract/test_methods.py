"""Every method keeps the promises that every method makes."""

import math
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import numpy as np
import pytest
import torch
from tests.selection import first_only, one_of_each_family
from torch import Tensor, nn

from coterie.data.federation import Federation
from coterie.engine.optim import LocalTraining
from coterie.engine.task import Task
from coterie.exchange.base import ExchangeWrapper, Inbox, Message, Rule
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.methods.base import Info, PeerMethod, Round, State, draw_peers_uniformly
from coterie.methods.registry import resolve_class
from coterie.rng import Rng
from coterie.simulation.run import simulate
from coterie.testing import check_method, run_grouped, run_method, tiny_federation, tiny_settings
from coterie.testing.methods import _RunFactory

# Settings that suit six clients, three classes and four rounds, where the defaults do not.
SETTINGS: dict[str, dict[str, Any]] = {
    "cfl": {"eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1},
    "fedgwc": {"eps": 1.0, "patience": 1, "min_pair_updates": 0.0},
    "fedper": {"personal_layers": 0},  # the model has one layer
    "fedrep": {"personal_layers": 0},
    "dfedalt": {"personal_layers": 0, "num_peers": 2},
    "ifca": {"clusters": 2},
    "one-shot": {"warmup_rounds": 2},
    "sosicfl": {"endpoints": 3, "regions": 2, "warmup_rounds": 1},
    "sosicfl-all": {"endpoints": 3, "regions": 2},
    "sosicfl-plus": {"endpoints": 3, "regions": 2},
}
# What draws by the clients' positions: servers' first memberships and seeds of clusterings, the
# order of a pool's rows.
BY_POSITION = {"fesem", "pooled", "sosicfl", "sosicfl-all", "sosicfl-plus"}


@pytest.mark.parametrize(
    "kind", one_of_each_family(sorted(METHODS), only=["dac", "fedavg"], slow=True)
)
def test_method_keeps_the_contract(kind: str):
    """With every check of `coterie.testing`."""
    check_method(METHODS[kind](**SETTINGS.get(kind, {})), relabel=kind not in BY_POSITION)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "settings"),
    first_only(
        [
            (
                "fedgwc",
                {"preset": "released", "eps": 1.0, "clients_per_round": 4, "aggregator": "fedavgm"},
            ),
            ("fedprox", {"sampling": "samples", "weights": "uniform"}),
            ("cfl", {"participation": "partial", "eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1}),
            ("ifca", {"clusters": 2, "start": "resample", "share_representation": True}),
            (
                "ifca",
                {
                    "clusters": 2,
                    "start": "random_groups",
                    "group_rounds": 2,
                    "averaging_of": "gradients",
                },
            ),
            ("sosicfl", {"preset": "released", "endpoints": 3, "warmup_rounds": 1}),
            (
                "sosicfl-plus",
                {"endpoints": 3, "regions": 2, "global_rounds": 2, "per_sample": True},
            ),
            ("sosicfl", {"endpoints": 3, "regions": 2, "topics": "classes", "test_samples": 3}),
        ],
        2,
        slow=True,
    ),
)
def test_options_keep_the_contract(kind: str, settings: dict[str, Any]):
    """Options that exchange something else or draw otherwise."""
    method, taken = resolve_class(METHODS[kind], settings)
    check_method(method(**taken), relabel=False)


class Net(nn.Module):
    """A body with a normalization, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options"),
    one_of_each_family([
        ("fedper", {}), ("fedrep", {"head_epochs": 2}), ("fedbn", {}),
        ("dfedalt", {"num_peers": 2, "head_epochs": 2}), ("apfl", {"adaptive": True}),
        ("pfedme", {"inner_steps": 2, "beta": 0.5}), ("per-fedavg", {"hessian": "free", "adapt_batch_size": 4}),
    ], slow=True),
)  # fmt: skip
def test_methods_with_something_of_their_own_keep_the_contract(kind: str, options: dict[str, Any]):
    """Layers that stay at home, running statistics, and options that need more gradients."""
    local = replace(tiny_settings().local, batch_size=4)
    settings = tiny_settings(rounds=2, local=local, engine="loop")
    check_method(METHODS[kind](**options), model=Net, settings=settings, relabel=False)


KEPT: dict[int, int] = {}
"""What a method must not use: it is outside the state."""


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
    breaks: Literal[
        "params", "memory", "grouping", "order", "none", "return", "pair", "shape", "type", "rows", "report", "hidden",
        "draws", "resume", "silence", "finite",
    ] = "none"  # fmt: skip

    def init_memory(self, task: Task, rng: Rng) -> Count:
        KEPT[rng.seed] = 0
        return Count(torch.zeros(len(task) + (self.breaks == "rows")))

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Take the mean with a client drawn at random, or what is wrong."""
        if self.breaks == "params":
            state.params.mul_(0.5)
        if self.breaks == "memory":
            state.memory.rounds.add_(1)
        peers = draw_peers_uniformly(rnd, 1, rnd.candidates)
        if self.breaks == "order":  # the first client is read by all others
            peers = torch.where(rnd.candidates[:, :1], 0, -1)
        inbox = rnd.exchange.pull(self.publish(rnd.task, state), peers)
        came = inbox.mask.double()
        mixed = inbox.mix(came / 2, own=state.params, own_weight=1 - came[:, 0] / 2)
        if self.breaks == "grouping":
            mixed = mixed * (1 - 0.01 * len(rnd.ids))
        if self.breaks == "hidden":  # told apart by nothing
            KEPT[-1] = KEPT.get(-1, 0) + 1
            mixed = mixed * (1 + 0.01 * KEPT[-1])
        if self.breaks == "resume":  # told apart by the run, and lost with the process
            KEPT[rnd.rng.seed] += 1
            mixed = mixed * (1 + 0.01 * KEPT[rnd.rng.seed])
        if self.breaks == "draws":
            mixed = mixed * float(np.random.default_rng().random())
        if self.breaks == "silence":
            mixed = (state.params + inbox.table[inbox.index[:, 0]]) / 2
        if self.breaks == "finite":
            mixed = mixed / 0
        wrong: Any = {
            "return": None,
            "pair": replace(state, params=mixed),
            "shape": (replace(state, params=mixed[:, 1:]), {}),
            "type": (replace(state, params=mixed.float()), {}),
            "report": (replace(state, params=mixed), {"trust": torch.ones(())}),
        }
        return wrong.get(self.breaks, (replace(state, params=mixed), {}))


PARAMS = (
    "a state whose params are {}; expected float64 of shape (6, 15), a row for each hosted client"
)
BROKEN = {
    "return": "exchange returned None; expected (state, info): is a `return` missing?",
    "pair": "exchange returned a State; expected (state, info), the second {} where nothing is reported",
    "shape": "exchange returned " + PARAMS.format("float64 of shape (6, 14)"),
    "type": "exchange returned " + PARAMS.format("float32 of shape (6, 15)"),
    "rows": "init_state returned memory.rounds as float32 of shape (7,); expected a tensor with a row for each of the 6",
    "report": "exchange reported 'trust' as float32 of shape (); expected a tensor with a row for each of the 6 hosted",
    "params": "round changed its argument state.params: return a new State",
    "memory": "round changed its argument state.memory: return a new State",
    "hidden": "a run during another run gave another result: something is kept outside the State",
    "draws": "a run during another run gave another result",
    "resume": "a resumed run has another checkpoint.safetensors: what a later round depends on is not in the State",
    "grouping": "hosting one client a host (server at host 0) changes the result: a client's result depends on which",
    "finite": "the models are not finite after the last round",
    "silence": "a peer that never answers has influence: give slots whose inbox.mask is False no weight",
    "order": "relabeling the clients changes the result by ",
}


def told(breaks: Any) -> str:
    """Return what is said of a method that breaks a promise."""
    with pytest.raises(AssertionError) as raised:
        check_method(Faithless(breaks))
    return str(raised.value)


@pytest.mark.parametrize("breaks", sorted(BROKEN))
def test_a_method_that_breaks_a_promise_is_named_with_it(breaks: Any):
    assert BROKEN[breaks] in told(breaks)


def test_a_method_that_no_seed_changes_is_told_so():
    """All start from the module's own values, and nobody trains."""
    still = replace(tiny_settings().local, epochs=0)
    with pytest.raises(AssertionError, match="another seed gave the same result: no client trains"):
        check_method(
            METHODS["local"](), model=small(), settings=tiny_settings(init="given", local=still)
        )


def test_the_page_lists_what_is_said():
    """Each message of its table is part of one above, or of one that another test checks."""
    page = Path(__file__).resolve().parents[2] / "docs/how-to/own-method.md"
    section = page.read_text("utf-8").split("## What `check_method` promises")[1].split("\n## ")[0]
    listed = re.findall(r"^\|[^|]*\| ([^|]*) \|$", section, re.MULTILINE)[1:]
    others = [
        "another seed gave the same result",
        "the same seed gave another result",
        "newcomer_model depends on the model or the memory of a client",
    ]
    assert len(listed) == 11
    known = "\n".join([*BROKEN.values(), *others])
    assert [row for row in listed if row not in known] == []


@pytest.mark.full
def test_without_its_breach_the_same_method_keeps_the_contract():
    check_method(Faithless())


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(kind for kind, method in METHODS.items() if method.server))
def test_the_server_may_be_at_any_host(kind: str):
    """Every host of each grouping; `check_method` tries the first, one in the middle and the last."""
    federation, method = tiny_federation(), METHODS[kind](**SETTINGS.get(kind, {}))
    whole = run_method(method).state.params
    for groups in (
        [[0], [1], [2], [3], [4], [5]],
        [[0], [1, 2, 3], [4, 5]],
        [[4, 2, 0], [1, 3, 5]],
    ):
        for server in range(len(groups)):
            assert torch.equal(run_grouped(federation, method, groups, server=server), whole)


@pytest.mark.parametrize("kind", one_of_each_family(sorted(METHODS), slow=True))
def test_clients_of_unequal_numbers_of_samples_depend_on_no_grouping(kind: str):
    """What a client draws does not depend on how many steps the others of its process take."""
    federation, method = tiny_federation(), METHODS[kind](**SETTINGS.get(kind, {}))
    split = federation.split.clone()
    for client in (1, 4):
        own = (split[client] == 0).nonzero().flatten()
        split[client, own[2:]] = -1
    unequal = replace(federation, split=split)
    settings = tiny_settings(rounds=3, local=LocalTraining(epochs=2, batch_size=4))
    whole = run_method(method, federation=unequal, settings=settings).state.params
    groups = [[1], [0, 4], [5, 3, 2]]
    assert torch.equal(run_grouped(unequal, method, groups, settings=settings), whole)


@pytest.mark.parametrize(
    "kind", one_of_each_family(sorted(METHODS), only=["dac", "fedavg"], slow=True)
)
def test_engines_agree(kind: str):
    """Three rounds with each engine end where the loop engine does: 1e-10 in float64, 1e-4 relative in float32.

    In blocks that do not divide the population the vmap engine ends with the same bytes.
    """
    federation, method = tiny_federation(), METHODS[kind](**SETTINGS.get(kind, {}))

    def trained(engine: str, dtype: Any, block: int | None = None) -> torch.Tensor:
        settings = tiny_settings(rounds=3, engine=engine, dtype=dtype, block=block)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="the vmap engine is used: the module cannot be compiled"
            )
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


PEERS = sorted(
    kind for kind, method in METHODS.items() if issubclass(method, PeerMethod) and kind != "local"
)
STRICT = {"acceptance": {"worse": 1.0, "clip": 0.5, "samples": 0.5}}
"""Rules so strict that something is refused and clipped in every run."""


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", one_of_each_family((k for k in PEERS if not METHODS[k].sums_groups), slow=True)
)
def test_a_method_whose_clients_judge_each_other_depends_on_no_grouping(kind: str):
    """No method has a line about it; hosting one client or all gives the same bits."""
    method, data = METHODS[kind](**SETTINGS.get(kind, {})), tiny_federation()
    whole = simulate(
        data, method, model="linear", settings=tiny_settings(**STRICT, evaluate="final"), seed=3
    )
    apart = run_grouped(
        data, method, [[0, 4], [1], [2, 3, 5]], settings=tiny_settings(**STRICT, evaluate="final")
    )
    assert torch.equal(whole.params, apart)
    free = simulate(data, method, model="linear", settings=tiny_settings(evaluate="final"), seed=3)
    assert not torch.equal(whole.params, free.params)
    assert kind == "oracle" or bool((whole.edges["purpose"] == "refused").any()), (
        "Oracle reads its cluster alone"
    )
    lenient = tiny_settings(
        acceptance={"worse": 1e9, "clip": 1e9, "samples": 1e9}, evaluate="final"
    )
    assert torch.equal(
        free.params, simulate(data, method, model="linear", settings=lenient, seed=3).params
    )


class _Spoiled(ExchangeWrapper[InMemory]):
    """An exchange in which the messages of client 2 hold NaN, or do not arrive."""

    def __init__(self, federation: Federation, bad: float | None) -> None:
        self.inner, self.bad = InMemory(federation.ids, federation.population), bad

    def _spoil(self, message: Message) -> Message:
        params = message.params.clone()
        params[self.inner.active == 2, :1] = torch.nan if self.bad is None else self.bad
        return replace(message, params=params)

    def pull(self, message: Message, peers: Tensor) -> Inbox:
        """Pull; an exchange of extras alone has no model to spoil, so that its message is lost."""
        whole = message.params.shape[1] > 0
        if whole and self.bad is not None:
            return self.inner.pull(self._spoil(message), peers)
        inbox = self.inner.pull(message, peers)
        arrived = inbox.mask & (inbox.peers != 2)
        return replace(inbox, mask=arrived, bytes=inbox.bytes * arrived)

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Ask with a spoiled model."""
        return self.inner.ask_server(self._spoil(message), rule, shared)


@pytest.mark.filterwarnings("ignore::coterie.runtime.loop.ServerRefused")
@pytest.mark.parametrize("kind", one_of_each_family(sorted(METHODS)))
def test_a_model_that_is_not_finite_reaches_nobody(kind: str):
    """The run is that in which the client's messages did not come; with a server all models stay finite."""
    federation, method = tiny_federation(), METHODS[kind](**SETTINGS.get(kind, {}))
    make = _RunFactory(federation, method, "linear", tiny_settings())
    found = [make.run_to_end(_Spoiled(federation, bad)) for bad in (None, math.nan, math.inf)]
    assert bool(torch.isfinite(found[0]).all())
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
