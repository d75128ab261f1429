"""The asynchronous schedule: in step it is the synchronous one, stacked it is one by one, killed it goes on."""

import dataclasses
import heapq
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.selection import first_only, one_of_each_family

from coterie.data.build import DataConfig
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.methods.base import PeerMethod, average_models, draw_peers_uniformly
from coterie.methods.random_gossip import Random
from coterie.results.summary import count_client_rounds
from coterie.rng import Rng
from coterie.runtime.extensions import TimeExtension
from coterie.runtime.loop import Loop
from coterie.simulation import _asynchronous
from coterie.simulation.run import reopen_loop, simulate
from coterie.studies.definition import MethodConfig, StudyConfig
from coterie.testing.tiny import build_task, tiny_federation, tiny_settings

pytestmark = pytest.mark.filterwarnings("ignore:.*while clients start from different models")
CLIENTS = 8
NEW_METRICS = {"elapsed_seconds", "own_rounds", "idle_share", "staleness", "staleness_seconds"}
PEERS = [kind for kind, method in METHODS.items() if issubclass(method, PeerMethod)]
UNEVEN = {
    "round_seconds": {"kind": "lognormal", "median": 0.7, "sigma": 0.6},
    "jitter": 0.3,
    "latency": [0.05 * client for client in range(CLIENTS)],
    "bandwidth": 1000.0,
    "pause_share": 0.1,
    "pause_seconds": 0.3,
    "pauses": [{"start": 1.0, "seconds": 0.5, "every": 2.0, "clients": [1, 2]}],
    "max_staleness": 2,
}


def run(method, *, time=None, seed=3, model="linear", **changes):
    """A run of a few rounds from different models; asynchronous with a table of time."""
    if time is not None:
        changes |= {"schedule": "asynchronous", "time": time}
    chosen = tiny_settings(**{"rounds": 5, "init": "per_client", **changes})
    federation = tiny_federation(CLIENTS)
    if model != "linear":
        federation = tiny_federation(CLIENTS, features=(6, 6))
    return simulate(federation, method, model=model, settings=chosen, seed=seed)


def comparable(result):
    """The tables of a run without what only virtual time has, names as text."""
    metrics = result.metrics[~result.metrics["metric"].isin(NEW_METRICS)].reset_index(drop=True)
    names = {name: str for name in ("split", "model", "metric")}
    edges = result.edges.drop(columns=["age", "age_seconds"], errors="ignore")
    return metrics.astype(names), edges.astype({"purpose": str})


def assert_equal_runs(a, b):
    assert torch.equal(a.params, b.params)
    for one, other in zip(comparable(a), comparable(b), strict=True):
        assert one.equals(other)


# ---------------------------------------------------------------- in step


@pytest.mark.parametrize("kind", ["random"])
def test_equal_speeds_are_the_synchronous_schedule(kind):
    check_in_step(kind, None, {"patience": 1})


@pytest.mark.full
@pytest.mark.parametrize("order", ["exchange_first", "train_first"])
@pytest.mark.parametrize("kind", one_of_each_family(PEERS, slow=True))
@pytest.mark.parametrize(
    "changes",
    [
        {"eval_every": 2},
        {"patience": 1},
        {"patience": 1, "stopped_broadcast": "last", "evaluate": "final"},
        {"local": LocalTraining(optimizer="adam", persistent_client_optimizer=True)},
        {"shared": ["0.*"], "model": "two"},
    ],
    ids=["tests", "stop", "stop-last", "moments", "part"],
)
def test_equal_speeds_are_the_synchronous_schedule_for_every_method(kind, order, changes):
    check_in_step(kind, order, changes)


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def check_in_step(kind, order, changes):
    changes = dict(changes)
    model = "linear"
    if changes.pop("model", None) or kind == "dfedalt":
        model = two_layers
    if kind == "dfedalt":
        changes.pop("shared", None)

    def go(**more):
        chosen = tiny_settings(
            **{"rounds": 5, "init": "per_client", "order": order, **changes, **more}
        )
        return simulate(
            tiny_federation(CLIENTS), METHODS[kind](), model=model, settings=chosen, seed=3
        )

    in_step = go()
    free = go(schedule="asynchronous", time={"round_seconds": 0.1, "record_seconds": 0.1})
    assert_equal_runs(in_step, free)
    if "patience" in changes and kind == "random":
        last = in_step.metrics["round"].max()
        done = free.metrics[
            (free.metrics["metric"] == "own_rounds") & (free.metrics["round"] == last)
        ]
        assert done["value"].min() < 5, "nobody stopped early"
    if len(free.edges):
        assert (free.edges["age"] == 0).all()


# ---------------------------------------------------------------- in step, with times


def times_of(result):
    table = result.metrics
    own = table[table["metric"].isin(["elapsed_seconds", "idle_share"])]
    return own.set_index(["metric", "round", "client"])["value"]


def go_in_step(kind, folder=None, **changes):
    chosen = tiny_settings(**{"rounds": 3, "init": "per_client", **changes})
    return simulate(
        tiny_federation(CLIENTS), METHODS[kind](), model="linear", settings=chosen, seed=3, folder=folder, resume=True
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["random", "fedavg", "local"])
def test_in_step_a_round_lasts_as_long_as_its_slowest_client(kind):
    """Results are those without times; clients of 1 to 8 seconds wait for the one of 8."""
    work = [float(client + 1) for client in range(CLIENTS)]
    plain, timed = go_in_step(kind), go_in_step(kind, time={"round_seconds": work})
    assert_equal_runs(plain, timed)
    times = times_of(timed)
    for number in range(3):
        assert times["elapsed_seconds"].loc[number].tolist() == [8.0 * (number + 1)] * CLIENTS
        assert times["idle_share"].loc[number].tolist() == pytest.approx(
            [1 - seconds / 8 for seconds in work]
        )


def test_rounds_of_a_cohort_wait_for_the_cohort_alone():
    """Against a sum over what the table says of who took part."""
    work = [float(client + 1) for client in range(CLIENTS)]
    result = go_in_step("fedavg", participation=3, rounds=5, time={"round_seconds": work})
    elapsed, total = times_of(result)["elapsed_seconds"].unstack(), 0.0
    for number in range(5):
        there = elapsed.loc[number].dropna()
        assert len(there) == 3
        total += max(work[client] for client in there.index)
        assert set(there) == {total}
    assert total < 8 * 5, "the slowest took part in every round"


def test_equal_speeds_take_as_long_in_step_as_without_waiting():
    time = {"round_seconds": 0.25, "record_seconds": 0.25}
    in_step = times_of(go_in_step("random", time=time))
    free = times_of(go_in_step("random", schedule="asynchronous", time=time))
    assert in_step["elapsed_seconds"].equals(free["elapsed_seconds"].loc[:2])


def test_times_of_a_run_in_step_go_on_after_a_stop(tmp_path, monkeypatch):
    time = {
        "round_seconds": [1.0] * 7 + [2.5],
        "jitter": 0.3,
        "pause_share": 0.2,
        "pause_seconds": 1.0,
    }
    whole = go_in_step("random", rounds=4, time=time)

    class Stop(Exception):
        pass

    before = Loop.run_next_round

    def stop(self):
        if self.next_round == 2:
            raise Stop
        before(self)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "run_next_round", stop)
        with pytest.raises(Stop):
            go_in_step("random", tmp_path, rounds=4, time=time, checkpoint_seconds=0.0)
    resumed = go_in_step("random", tmp_path, rounds=4, time=time, checkpoint_seconds=0.0)
    assert times_of(whole).equals(times_of(resumed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "sequential"}, "expected it with schedule = 'synchronous' or 'asynchronous'"),
        ({"new_clients": 2}, "they join after the last round, where virtual time ends"),
    ],
)
def test_times_that_have_no_meaning_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_settings(time={}, **changes)


def test_times_need_all_clients_in_one_process():
    task = build_task().select_clients(torch.arange(2))
    with pytest.raises(ConfigError, match="needs one process that hosts all clients"):
        TimeExtension(tiny_settings(time={})).start(task, Rng(0), torch.zeros(2, 3))


def test_a_study_may_hold_methods_in_step_and_methods_that_do_not_wait():
    """Both are on one axis of time; rounds without times are not."""
    time = {"round_seconds": 2.0}
    settings = tiny_settings(time=time)
    free = {"schedule": "asynchronous", "time": {**time, "record_seconds": 3.0}}
    timed = MethodConfig("in step", Random(2), settings)
    study = StudyConfig(
        "both",
        DataConfig(dataset="digits"),
        (timed, MethodConfig("free", Random(2), tiny_settings(**free))),
    )
    assert len(study.methods) == 2
    plain = MethodConfig("no times", Random(2), tiny_settings())
    with pytest.raises(ConfigError, match="is one of all clients, and of 'free' 3 seconds"):
        replace(study, methods=(timed, plain, study.methods[1]))


# ---------------------------------------------------------------- one by one


class OneByOne(_asynchronous.AsynchronousLoop):
    """Every training is computed when it ends and not before, every client acts alone."""

    def _choose_trainings(self, pending):
        chosen = np.zeros_like(pending)
        chosen[np.where(pending, self.end, np.iinfo(np.int64).max).argmin()] = True
        return chosen

    def _act(self, what, rows, rounds, function):
        found = []
        for place in range(len(rows)):
            row = rows[place : place + 1]
            found.append((row, function(row, rounds[place : place + 1])))
        return found


def check_one_by_one(monkeypatch, kind, **changes):
    stacked = run(METHODS[kind](), time=UNEVEN, **changes)
    with monkeypatch.context() as patched:
        patched.setattr("coterie.simulation._sequential.AsynchronousLoop", OneByOne)
        alone = run(METHODS[kind](), time=UNEVEN, **changes)
    assert torch.equal(stacked.params, alone.params)
    assert stacked.metrics.equals(alone.metrics)
    assert stacked.edges.equals(alone.edges)
    return stacked


@pytest.mark.full
def test_stacked_is_one_by_one(monkeypatch):
    result = check_one_by_one(monkeypatch, "random", patience=3)
    # the case has something of everything
    assert {"mix", "missing"} <= set(result.edges["purpose"])
    assert set(result.edges["age"]) == {-1, 0, 1, 2}
    done = result.metrics[result.metrics["metric"] == "own_rounds"].groupby("client")["value"].max()
    assert done.max() >= 3 * done.min()


@pytest.mark.full
@pytest.mark.parametrize("order", ["exchange_first", "train_first"])
@pytest.mark.parametrize(
    "kind", one_of_each_family([kind for kind in PEERS if kind != "dfedalt"], slow=True)
)
@pytest.mark.parametrize("engine", first_only(["compiled", "loop", "vmap"], slow=True))
def test_stacked_is_one_by_one_for_every_method(monkeypatch, kind, order, engine):
    check_one_by_one(monkeypatch, kind, order=order, engine=engine, dtype="float32", patience=3)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=CLIENTS, max_size=CLIENTS),
    st.lists(st.integers(0, 6), min_size=CLIENTS, max_size=CLIENTS),
    st.sampled_from(["exchange_first", "train_first"]),
)
def test_the_order_of_events_does_not_depend_on_who_acts_together(speeds, latencies, order):
    """Many clients end at equal times here, and messages arrive at the very time of a reading."""
    time = {
        "round_seconds": [0.1 * speed for speed in speeds],
        "latency": [0.1 * late for late in latencies],
    }
    stacked = run(Random(3), time=time, rounds=3, order=order)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("coterie.simulation._sequential.AsynchronousLoop", OneByOne)
        alone = run(Random(3), time=time, rounds=3, order=order)
    assert torch.equal(stacked.params, alone.params)
    assert stacked.edges.equals(alone.edges)


# ---------------------------------------------------------------- against a plain program


def run_plainly(federation, chosen, seed, work, delays, num_peers, until):
    """Gossip without rounds, in the words of the paper: a queue, lists of messages, one client at a time."""
    task = build_task(
        federation.host(federation.ids), "linear", dtype=torch.float64, init="per_client"
    )
    rng = Rng(seed)

    def train(client, model, round):
        own = task.select_clients(torch.tensor([client]))
        return own.train(model[None], rng.at_round(round), chosen.local).params[0]

    first = task.initial_models(rng)
    model = [train(client, first[client], -1) for client in range(CLIENTS)]
    messages = [[(0, model[client])] for client in range(CLIENTS)]
    round = [0] * CLIENTS
    queue = [(0, client) for client in range(CLIENTS)]
    heapq.heapify(queue)
    reads = []
    while queue and queue[0][0] < until:
        now = queue[0][0]
        acting = []
        while queue and queue[0][0] == now:
            acting.append(heapq.heappop(queue)[1])
        for client in acting:  # all publish before anybody reads
            if now:
                messages[client].append((now, model[client]))
        training = {}
        for client in acting:
            noise = rng.at_round(round[client]).uniform("peers", torch.tensor([client]), CLIENTS)[0]
            noise[client] = torch.inf
            received = []
            for peer in noise.argsort()[:num_peers].tolist():
                arrived = [
                    one for at, one in messages[peer] if at + delays[client] + delays[peer] <= now
                ]
                reads.append((client, round[client], peer, bool(arrived)))
                received += arrived[-1:]
            mixed = torch.stack([messages[client][-1][1], *received]).mean(0)
            training[client] = train(client, mixed, round[client])
        for client, trained in training.items():
            end = now + work[client]
            if end <= until:
                model[client] = trained
            round[client] += 1
            heapq.heappush(queue, (end, client))
    return torch.stack(model), reads


@pytest.mark.option("Settings.schedule", "asynchronous")
def test_gossip_without_rounds_is_that_of_a_plain_program():
    """All clients have the same number of samples, so an average by samples is the mean."""
    federation = tiny_federation(CLIENTS)
    work = [2, 3, 4, 5, 7, 9, 4, 2]
    delays = [0, 1, 0, 2, 0, 0, 1, 0]
    chosen = tiny_settings(
        rounds=4,
        init="per_client",
        evaluate="final",
        schedule="asynchronous",
        time={"round_seconds": work, "latency": delays, "record_seconds": 5.0},
    )
    result = simulate(federation, Random(3), model="linear", settings=chosen, seed=5)
    params, reads = run_plainly(federation, chosen, 5, work, delays, 3, 20)
    assert torch.allclose(result.params, params, rtol=0, atol=1e-12)
    # of the rounds that have ended: every reading, and whether something had arrived
    edges = result.edges
    done = {c: 20 // seconds for c, seconds in enumerate(work)}
    wanted = sorted((c, peer, came) for c, number, peer, came in reads if number < done[c])
    found = sorted(
        zip(edges["reader"], edges["read"], (edges["purpose"] == "mix").tolist(), strict=True)
    )
    assert found == wanted
    last = result.metrics[
        (result.metrics["metric"] == "own_rounds") & (result.metrics["round"] == 3)
    ]
    assert last["value"].tolist() == list(done.values())


# ---------------------------------------------------------------- what is recorded


def test_costs_of_several_rounds_in_a_span_add_up():
    """Client 0 does four rounds in a span, client 1 one in two of them; PENS counts passes."""
    work = [0.25, 2.0] + [1.0] * 6
    result = run(METHODS["pens"](), time={"round_seconds": work}, rounds=4)
    edges = result.edges
    assert (edges.groupby(["round", "reader"]).size().loc[0]).to_dict() == {
        0: 28,
        **dict.fromkeys(range(2, 8), 7),
    }
    per_round = result.metrics[(result.metrics["metric"] == "passes")].set_index(
        ["round", "client"]
    )
    # seven models, twelve samples
    assert per_round.loc[(0, 0), "value"] == 4 * 7 * 12
    assert (0, 1) not in per_round.index
    assert per_round.loc[(1, 1), "value"] == 7 * 12
    assert not result.metrics.duplicated(["round", "client", "split", "model", "metric"]).any()
    assert result.timing["train_samples"] == 12 * (CLIENTS + 16 + 2 + 6 * 4)
    assert edges["bytes"].nunique() == 1
    assert count_client_rounds(result.metrics) == 16 + 2 + 6 * 4


def test_pauses_are_time_without_work():
    """Client 2 pauses in the second half of every second: a round of one second takes two."""
    pauses = [{"start": 0.5, "seconds": 0.5, "every": 1.0, "clients": [2]}]
    result = run(Random(2), time={"pauses": pauses}, rounds=4)
    table = result.metrics.set_index(["metric", "round", "client"])["value"]
    assert table["own_rounds"].unstack().loc[3].tolist() == [4, 4, 2] + [4] * 5
    # its first round ends at 1.5 and its second at 3.5, each after a pause of half a second twice
    assert table["idle_share"].loc[3].tolist() == [0, 0, pytest.approx(1.5 / 4)] + [0] * 5


def test_the_age_of_what_was_read_is_in_the_readers_rounds():
    """Client 0 is four times as fast as the rest: it reads what is 0 to 4 of its rounds old."""
    work = [0.25] + [1.0] * 7
    result = run(Random(7), time={"round_seconds": work}, rounds=3)
    table = result.metrics.set_index(["metric", "round", "client"])["value"]
    # rounds begin at 0, 0.25, 0.5, 0.75: messages of the others are 0, 1, 2, 3 rounds old
    assert table["staleness"].loc[1, 0] == 1.5
    assert table["staleness_seconds"].loc[1, 0] == pytest.approx(0.375)
    assert table["staleness"].loc[1, 3] == 0
    ages = result.edges[(result.edges["round"] == 1) & (result.edges["reader"] == 0)]
    assert sorted(ages["age"]) == [age for age in range(4) for _ in range(7)]


def test_a_client_stops_by_its_own_rounds_and_not_by_the_records():
    """However often results are recorded, the models are the same."""
    time = dict(UNEVEN, round_seconds={"kind": "uniform", "low": 0.2, "high": 1.5})
    often = run(
        Random(3), time={**time, "record_seconds": 0.25}, rounds=24, patience=2, engine="vmap"
    )
    seldom = run(
        Random(3), time={**time, "record_seconds": 3.0}, rounds=2, patience=2, engine="vmap"
    )
    assert torch.equal(often.params, seldom.params)
    tests = [one.metrics[one.metrics["split"] == "test"] for one in (often, seldom)]
    assert tests[0]["value"].tolist() == tests[1]["value"].tolist()
    stopped = often.metrics[often.metrics["metric"] == "own_rounds"].pivot(
        index="round", columns="client", values="value"
    )
    assert (stopped.loc[23] == stopped.loc[15]).any(), "nobody stopped early"


# ---------------------------------------------------------------- kills


# ---------------------------------------------------------------- stages of a method


STAGES = {
    "pens": {"num_sampled": 3, "num_kept": 1, "num_peers": 1, "stage_one_rounds": 2},
    "panm-loss": {"num_peers": 2, "num_candidates": 3, "stage_one_rounds": 2, "interval": 2},
}


def test_a_client_in_a_methods_second_stage_reports_no_cost_of_the_first():
    """Fast clients are in PENS's second stage while slow ones are in its first; spans hold a round each."""
    work = [0.2, 0.9, 0.3, 0.5, 0.2, 0.7, 1.0, 0.4]
    result = run(
        METHODS["pens"](**STAGES["pens"]),
        time={"round_seconds": work, "record_seconds": 0.1},
        rounds=32,
    )
    edges, table = result.edges, result.metrics[result.metrics["metric"] == "passes"]
    assert edges.groupby(["round", "reader"]).size().isin([1, 3]).all()
    for client in range(CLIENTS):
        own = edges[edges["reader"] == client]
        began = sorted(own["round"].unique())
        first = own[own["round"].isin(began[:2]) & (own["purpose"] != "missing")]
        passes = table[table["client"] == client].dropna(subset="value")
        assert passes["value"].sum() == 12 * len(first)
        assert set(passes["round"]) <= set(began[:2])
    # In one long span a client has rounds of both stages: those of the first still count.
    long = run(
        METHODS["pens"](**STAGES["pens"]),
        time={"round_seconds": work, "record_seconds": 3.2},
        rounds=1,
    )
    whole = long.metrics[long.metrics["metric"] == "passes"]
    assert whole.set_index("client")["value"].equals(table.groupby("client")["value"].sum())


@pytest.mark.parametrize("kind", first_only(STAGES))
def test_clients_in_different_stages_act_together_as_one_by_one(monkeypatch, tmp_path, kind):
    method = METHODS[kind](**STAGES[kind])
    monkeypatch.setitem(METHODS, kind, lambda: method)
    check_one_by_one(monkeypatch, kind)
    chosen = {"rounds": 5, "schedule": "asynchronous", "time": UNEVEN, "checkpoint_seconds": 0}
    check_kills(tmp_path, method, tiny_settings(**chosen))


class Killed(Exception):
    pass


def check_kills(tmp_path, method, chosen):
    """Kill a run in each of its rounds: it goes on to the bytes of one that was not killed."""

    def go(folder, at=None):
        def kill(progress):
            # before this round's checkpoint is written
            if progress.round == at:
                raise Killed

        return simulate(
            tiny_federation(CLIENTS), method, model="linear", settings=chosen, seed=2,
            folder=tmp_path / folder, resume=True, observer=kill,
        )  # fmt: skip

    whole = go("whole")
    for at in range(-1, 5):
        with pytest.raises(Killed):
            go("killed", at)
    again = go("killed")
    assert torch.equal(whole.params, again.params)
    for name in ("metrics.parquet", "edges.parquet", "checkpoint.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("random", "exchange_first"),
        pytest.param("dac", "exchange_first", marks=pytest.mark.full),
        pytest.param("panm-grad", "train_first", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, kind, order):
    chosen = tiny_settings(
        rounds=5,
        schedule="asynchronous",
        time=UNEVEN,
        order=order,
        patience=3,
        checkpoint_seconds=0,
    )
    check_kills(tmp_path, METHODS[kind](), chosen)


@pytest.mark.full
def test_a_run_can_be_made_longer(tmp_path):
    """What began before the end and ends after it goes on."""
    federation = tiny_federation(CLIENTS)

    def go(folder, rounds):
        chosen = tiny_settings(rounds=rounds, schedule="asynchronous", time=UNEVEN)
        return simulate(
            federation, Random(3), model="linear", settings=chosen, seed=2,
            folder=tmp_path / folder, resume=True,
        )  # fmt: skip

    go("grown", 2)
    assert torch.equal(go("grown", 5).params, go("whole", 5).params)
    chosen = tiny_settings(rounds=5, schedule="asynchronous", time=UNEVEN)
    loop = reopen_loop(
        tmp_path / "whole", federation, Random(3), model="linear", settings=chosen, seed=2
    )
    assert loop.is_finished


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": None}, "time is None; expected it with schedule = 'asynchronous'"),
        ({"participation": 0.5}, "participation is set; with schedule = 'asynchronous' it is not"),
        ({"new_clients": 2}, "new_clients is set"),
        ({"validate_every": 2}, "each client validates after each of its own rounds"),
        ({"acceptance": True}, "acceptance"),
        ({"attacks": [{"kind": "noise", "clients": [0]}]}, "attacks"),
        ({"local": LocalTraining(lr_schedule="cosine")}, "clients do not know how many"),
    ],
)
def test_settings_that_need_common_rounds_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_settings(**{"schedule": "asynchronous", "time": {}, **changes})


def test_a_method_with_one_model_for_all_and_no_server_is_refused():
    with pytest.raises(ConfigError, match="pooled has one model for all and no server"):
        run(METHODS["pooled"](), time={})


def test_other_exchanges_and_too_much_time_are_refused():
    federation = tiny_federation(CLIENTS)
    chosen = tiny_settings(schedule="asynchronous", time={})
    door = Faulty(InMemory(federation.ids, CLIENTS), drop=0.5)
    with pytest.raises(ConfigError, match="found another exchange"):
        simulate(federation, Random(2), model="linear", settings=chosen, exchange=door)
    with pytest.raises(ConfigError, match="at most 1000000000 seconds"):
        run(Random(2), time={"record_seconds": 1e9}, rounds=2)


def test_a_method_that_is_answered_within_the_round_is_refused():
    with pytest.raises(ConfigError, match=r"answered by peers in the round.*use 'synchronous'"):
        run(METHODS["dac"](loss_direction="push", similarity="inv_loss"), time={})


@dataclass(frozen=True)
class Hasty(PeerMethod):
    """Sends in its exchange what its `publish` did not say."""

    kind: ClassVar[str] = "hasty"

    def exchange(self, rnd, state):
        message = self.publish(rnd.task, replace(state, params=state.params + 1))
        inbox = rnd.exchange.pull(message, draw_peers_uniformly(rnd, 2))
        return average_models(rnd, state, inbox)


def test_a_method_that_sends_something_else_is_refused():
    with pytest.raises(ConfigError, match="sends what the method's `publish` did not say"):
        run(Hasty(), time={})


def test_rates_by_the_number_of_the_round_are_those_of_the_own_round():
    """A rate that falls to 0 after two rounds: who is twice as fast stops to learn twice as early."""
    local = dataclasses.replace(
        tiny_settings().local, lr_schedule={"kind": "step", "at": [2], "gamma": 1e-300}
    )
    time = {"round_seconds": [0.5] * 4 + [1.0] * 4}
    by_time = [
        run(METHODS["local"](), time=time, rounds=rounds, local=local, evaluate="final").params
        for rounds in (1, 2, 3)
    ]
    assert torch.equal(by_time[0][:4], by_time[2][:4])
    assert not torch.equal(by_time[0][4:], by_time[1][4:])
    assert torch.equal(by_time[1][4:], by_time[2][4:])


def test_a_run_that_is_over_before_a_round_has_ended_says_so():
    """A round of the results is a second, and one of a client a minute."""
    with pytest.warns(UserWarning, match=r"first models: no client has ended a round in the 3 sec"):
        run(Random(2), time={"round_seconds": 60.0}, rounds=3)
