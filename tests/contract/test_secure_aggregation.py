"""Secure aggregation: the plain mean to a millionth for methods that need no more, a line for all others."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from tests.contract.test_server_validity import doors

from coterie.errors import ConfigError
from coterie.exchange.base import ExchangeWrapper
from coterie.exchange.in_memory import InMemory
from coterie.exchange.secure_sum import TooFewToSum, count_bytes
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.methods.fedavg import FedAvg, OneModel
from coterie.methods.server import Averaging
from coterie.net.nodefile import between_machines
from coterie.rng import Rng
from coterie.runtime.loop import ServerRefused
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.methods import _RunFactory

FEDERATION = tiny_federation()
SUMS = {  # methods that need a weighted mean alone, with settings that suit a model of one layer
    "fedavg": {}, "fedavgm": {}, "fairavg": {}, "fedprox": {"sampling": "samples"}, "ditto": {}, "apfl": {},
    "pfedme": {"beta": 0.5}, "per-fedavg": {}, "fedper": {"personal_layers": 0},
    "fedrep": {"personal_layers": 0}, "fedbn": {},
}  # fmt: skip
WHY = {
    "cfl": "its server splits clusters by the updates of single clients",
    "feddrift": "its server averages the groups that single clients chose",
    "fedgwc": "its server compares the losses of single clients",
    "fesem": "its server puts each client into the cluster whose model is nearest",
    "ifca": "its server averages the groups that single clients chose",
    "one-shot": "its server groups single models by k-means",
    "sosicfl": "its server groups clients by what each sends of its labels or gradients",
    "sosicfl-all": "its server groups clients by what each sends of its labels or gradients",
    "sosicfl-plus": "its server groups clients by what each sends of its labels or gradients",
}


def run(method: Method, exchange=None, **settings):
    return simulate(
        FEDERATION, method, model="linear", settings=tiny_settings(**settings), exchange=exchange
    )


@pytest.mark.parametrize("kind", list(SUMS))
@pytest.mark.option("Settings.secure_aggregation", None, False, True)
def test_models_are_those_of_plain_averages_to_a_millionth(kind):
    method = METHODS[kind](**SUMS[kind])
    plain = run(method, dtype="float64", evaluate="final")
    same = run(method, dtype="float64", evaluate="final", secure_aggregation=False)
    summed = run(method, dtype="float64", evaluate="final", secure_aggregation=True)
    assert torch.equal(plain.params, same.params)
    far = float((plain.params - summed.params).abs().max())
    # They differ: the sum is in fixed point. Four rounds of training pass an error of 1e-7 on.
    assert 0 < far < 1e-6


@pytest.mark.parametrize("kind", sorted(set(METHODS) - set(SUMS)))
def test_every_other_method_is_refused_in_one_line_that_says_why(kind):
    why = WHY.get(kind, "it has no server that averages")
    line = f"secure_aggregation is set; {kind} cannot have it: {why}"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        run(METHODS[kind](), secure_aggregation=True)


@pytest.mark.parametrize("rule", ["krum", "median", {"kind": "trimmed-mean", "share": 0.2}])
def test_rules_that_merge_single_models_are_refused(rule):
    with pytest.raises(ConfigError, match=r"fedavg cannot have it: aggregation = .* merges single"):
        run(FedAvg(aggregation=rule), secure_aggregation=True)


def test_a_method_of_ones_own_is_refused_unless_its_server_only_averages():
    @dataclass(frozen=True)
    class Curious(OneModel):
        kind: ClassVar[str] = "curious"

        def aggregate(self, context, shared, message):
            return super().aggregate(context, shared, message)

    @dataclass(frozen=True)
    class Slow(OneModel):
        kind: ClassVar[str] = "slow"

        @property
        def averaging(self) -> Averaging:
            return Averaging(lr=0.5)

    assert run(Slow(), secure_aggregation=True).params.isfinite().all()
    with pytest.raises(ConfigError, match="curious cannot have it: its server makes use of single"):
        run(Curious(), secure_aggregation=True)

    @dataclass(frozen=True)
    class Honest(Curious):
        kind: ClassVar[str] = "honest"
        needs_single_models: ClassVar[str] = ""

    # Who aggregates otherwise may say that the mean is enough; a subclass of it inherits the word.
    class Same(Honest):
        pass

    for method in (Honest(), Same()):
        assert run(method, secure_aggregation=True).params.isfinite().all()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"acceptance": True}, "acceptance is set; with secure_aggregation it is not: its rules"),
        ({"attacks": [{"kind": "noise", "clients": 1}]}, "attacks is set; with secure_aggregation"),
        (
            {"schedule": "asynchronous", "time": {"round_seconds": 1.0}},
            "a sum is of the clients of one round",
        ),
    ],
)
def test_settings_that_need_single_models_are_refused(other, said):
    with pytest.raises(ConfigError, match=said):
        run(FedAvg(), secure_aggregation=True, **other)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"threshold": 0.5}, "threshold is 0.5; expected a number, above 0.5"),
        ({"min_clients": 2}, "min_clients is 2; expected a whole number, 3 or more"),
        ({"least": 3}, "least"),
    ],
)
def test_settings_of_a_sum_are_checked(table, said):
    with pytest.raises(ConfigError, match=said):
        tiny_settings(secure_aggregation=table)


def test_servers_that_see_a_sum_judge_nothing_between_machines():
    settings = tiny_settings(secure_aggregation=True)
    assert between_machines(FedAvg(), settings) == settings
    assert between_machines(FedAvg(), tiny_settings()).acceptance is not None


@pytest.mark.parametrize("where", ["threads", "blocks", "nodes"])
def test_the_sum_has_the_same_bytes_everywhere(where):
    """Also with half of the clients in a round, and with a part of the model that stays at home."""
    options = {
        "participation": 0.5,
        "shared": ["!1.bias"],
        "secure_aggregation": {"threshold": 0.6},
    }
    settings = tiny_settings(**options)
    wanted = simulate(FEDERATION, FedAvg(), model="linear", settings=settings, seed=3)
    with doors(where) as (exchanges, groups):
        made = _RunFactory(FEDERATION, FedAvg(), "linear", settings)

        def go(place: int):
            loop = made.make_loop(exchanges[place], Rng(3), groups[place])
            while not loop.is_finished:
                loop.run_next_round()
            return loop

        with ThreadPoolExecutor(len(groups)) as pool:
            loops = list(pool.map(go, range(len(groups))))
    for loop, group in zip(loops, groups, strict=True):
        assert torch.equal(loop.tracker.best, wanted.params[group])


# ---------------------------------------------------------------- clients that do not fit


class Spoiled(ExchangeWrapper[InMemory]):
    """Makes numbers of some clients' models too large, in one round."""

    def __init__(self, inner: InMemory, clients: list[int]) -> None:
        self.inner, self.clients, self.round = inner, clients, -1

    def begin_round(self, rng) -> None:
        self.round = rng.round
        self.inner.begin_round(rng)

    def snapshot(self):
        return self.inner.snapshot()

    def ask_server(self, message, rule, shared):
        if message.params.shape[1] and self.round == 1:
            params = message.params.clone()
            params[self.clients, 0] = 20_000.0
            message = replace(message, params=params)
        return self.inner.ask_server(message, rule, shared)


def spoiled(clients: list[int]) -> Spoiled:
    return Spoiled(InMemory(torch.arange(6), 6), clients)


def test_a_model_out_of_range_is_left_out_by_name_and_counted():
    line = (
        "the server left out the message of client 2 in round 1: its model has numbers up to 20000"
    )
    with pytest.warns(ServerRefused, match=line):
        found = run(FedAvg(), spoiled([2]), secure_aggregation=True)
    rows = found.metrics[found.metrics["metric"] == "refused"]
    assert set(rows["round"]) == {1}
    assert found.params.isfinite().all()
    assert float(found.params.abs().max()) < 100


def test_a_simulated_sum_of_fewer_than_the_threshold_ends_the_run():
    with pytest.raises(TooFewToSum, match="4 of 6 clients can be summed; at least 5 must be"):
        run(FedAvg(), spoiled([2, 3]), secure_aggregation=True)


def test_what_a_round_reports_of_its_bytes_is_what_a_sum_sends():
    metrics = {}
    for secure in (None, True):
        found = run(FedAvg(), secure_aggregation=secure, dtype="float32")
        rows = found.metrics[(found.metrics["round"] == 0)]
        metrics[secure] = {
            name: set(rows.loc[rows["metric"] == name, "value"])
            for name in ("bytes_up", "bytes_down")
        }
    columns = found.params.shape[1]
    up, down = count_bytes(columns, 6)
    assert metrics[None]["bytes_up"] == {4 * columns + 4}
    assert metrics[True]["bytes_up"] == {up}
    assert metrics[True]["bytes_down"] == {next(iter(metrics[None]["bytes_down"])) + down}
