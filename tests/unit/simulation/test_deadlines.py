"""Rounds with a deadline (`simulation._deadlines`): late is missing, long is none, killed goes on."""

import pytest
import torch
from tests.drifting import build
from tests.selection import first_only, one_of_each_family

from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.methods import METHODS
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.runtime.extensions import TimeExtension
from coterie.simulation._deadlines import PunctualExchange
from coterie.simulation.run import simulate
from coterie.testing.tiny import build_task, tiny_federation, tiny_settings

pytestmark = pytest.mark.filterwarnings("ignore:.*while clients start from different models")
CLIENTS = 6
FILES = ("metrics.parquet", "edges.parquet")
KINDS = [kind for kind in METHODS if kind != "pooled"]
SERVERS = [kind for kind in KINDS if METHODS[kind].server]
QUARTERS = [{"kind": "rotation", "degrees": [0, 90, 180, 270], "sizes": [2, 2, 2, 2]}]
UNEVEN = {
    "round_seconds": [1.0, 2.0, 1.5, 6.5, 1.2, 3.0],
    "jitter": 0.2,
    "latency": [0.05 * client for client in range(CLIENTS)],
    "bandwidth": 2000.0,
    "pauses": [{"start": 4.0, "seconds": 3.0, "every": 9.0, "clients": [1, 2]}],
}


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def make(kind):
    """A method that fits three classes."""
    if kind.startswith("sosicfl"):
        return METHODS[kind](endpoints=3, regions=2)
    return METHODS[kind]()


def go(method, time, *, folder=None, clients=CLIENTS, seed=3, model="linear", observer=None, **changes):  # fmt: skip
    chosen = tiny_settings(**{"rounds": 5, "init": "per_client", "time": time, **changes})
    return simulate(
        tiny_federation(clients), method, model=model, settings=chosen, seed=seed, folder=folder,
        resume=folder is not None, observer=observer,
    )  # fmt: skip


def by_round(result, name, split="train"):
    """A metric of the newest models as rounds x clients; NaN where there is no row."""
    table = result.metrics
    keep = (table["metric"] == name) & (table["model"] == "current") & (table["split"] == split)
    own = table[keep]
    return own.pivot(index="round", columns="client", values="value")


# ---------------------------------------------------------------- nobody is late


@pytest.mark.parametrize("kind", one_of_each_family(KINDS, only=("fedavg",), slow=True))
@pytest.mark.parametrize("order", ["exchange_first", "train_first"])
def test_a_deadline_for_which_nobody_is_late_changes_no_byte(tmp_path, kind, order):
    changes = {
        "order": order,
        "eval_every": 2,
        "validate_every": 2,
        "model": two_layers,
        "local": LocalTraining(optimizer="adam", persistent_client_optimizer=True, epochs=1),
    }
    if METHODS[kind].server:
        changes.pop("order")
    plain = go(make(kind), UNEVEN, folder=tmp_path / "plain", **changes)
    long = {**UNEVEN, "deadline_seconds": 1000.0}
    limited = go(make(kind), long, folder=tmp_path / "limited", **changes)
    assert torch.equal(plain.params, limited.params)
    for name in FILES:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "limited" / name).read_bytes()  # fmt: skip


@pytest.mark.parametrize("kind", ["oracle", "fedavg"])
def test_data_may_change_during_rounds_with_a_deadline(tmp_path, kind):
    """What a late client began on its old data it ends on these: the rounds of others go on."""
    data = build({"kind": "move", "at": 3, "clients": [0, 2, 7]}, shift=QUARTERS)

    def run(folder, span):
        time = {"round_seconds": [1.0] * 6 + [3.5] * 2, "deadline_seconds": span}
        chosen = tiny_settings(rounds=6, time={k: v for k, v in time.items() if v}, eval_every=2)
        result = simulate(
            data, make(kind), model="linear", settings=chosen, folder=tmp_path / folder
        )
        return result, (tmp_path / folder / FILES[0]).read_bytes()

    plain, limited = run("plain", None), run("limited", 50.0)
    assert torch.equal(plain[0].params, limited[0].params)
    assert plain[1] == limited[1]
    result = run("late", 1.0)[0]
    late = by_round(result, "late")
    assert late[7].dropna().index.tolist() == [0, 4], "begins at 0 s, and at 4 s after 3.5 s"
    if kind == "oracle":
        clusters = data.phases[0].truth.cluster
        edges = result.edges[result.edges["round"] >= 3]
        assert 7 in set(edges["reader"])
        for reader, read in zip(edges["reader"], edges["read"], strict=True):
            assert clusters[reader] == clusters[read]


# ---------------------------------------------------------------- peers


def run_plainly(federation, chosen, seed, work, delays, num_peers, span):
    """Gossip in rounds that end after a span, one client at a time, in seconds."""
    task = build_task(
        federation.host(federation.ids), "linear", dtype=torch.float64, init="per_client"
    )
    rng = Rng(seed)

    def train(client, model, round):
        own = task.select_clients(torch.tensor([client]))
        return own.train(model[None], rng.at_round(round), chosen.local).params[0]

    first = task.initial_models(rng)
    model = [train(client, first[client], -1) for client in range(CLIENTS)]
    coming, now, reads, ends = {}, 0.0, [], []
    for index in range(chosen.rounds):
        here = [client for client in range(CLIENTS) if client not in coming]
        trained = {}
        for client in here:
            noise = rng.at_round(index).uniform("peers", torch.tensor([client]), CLIENTS)[0]
            order = [peer for peer in noise.argsort().tolist() if peer in here and peer != client]
            mixed, start = [model[client]], now
            for peer in order[:num_peers]:
                takes = delays[client] + delays[peer]
                start = max(start, now + min(takes, span))
                reads.append((index, client, peer, takes <= span))
                if takes <= span:
                    mixed.append(model[peer])
            trained[client] = (
                start + work[client],
                train(client, torch.stack(mixed).mean(0), index),
            )
        latest = max([end for end, _ in trained.values()], default=now + span)
        coming |= trained
        now = min(now + span, latest)
        for client in [client for client, (end, _) in coming.items() if end <= now]:
            model[client] = coming.pop(client)[1]
        ends.append(now)
    return torch.stack(model), reads, ends


@pytest.mark.option("VirtualTime.deadline_seconds")
@pytest.mark.parametrize("delays", [[0.0] * CLIENTS, [0.25, 1.5, 0.25, 0.25, 0.5, 1.0]])
def test_gossip_with_a_deadline_is_that_of_a_plain_program(delays):
    """With slow links some messages come after the deadline, and in some rounds nobody is free."""
    federation, work = tiny_federation(CLIENTS), [2.0, 2.0, 1.5, 9.0, 1.0, 4.5]
    chosen = tiny_settings(
        rounds=7,
        init="per_client",
        evaluate="final",
        time={"round_seconds": work, "latency": delays, "deadline_seconds": 2.0},
    )
    result = simulate(federation, Random(3), model="linear", settings=chosen, seed=5)
    params, reads, ends = run_plainly(federation, chosen, 5, work, delays, 3, 2.0)
    assert torch.allclose(result.params, params, rtol=0, atol=1e-12)
    edges = result.edges
    came = (edges["purpose"] == "mix").tolist()
    found = zip(edges["round"], edges["reader"], edges["read"], came, strict=True)
    assert sorted(found) == sorted(reads)
    assert by_round(result, "elapsed_seconds").max(axis=1).tolist() == ends
    if any(delays):
        assert not all(came)
    else:
        assert len(reads) < 7 * CLIENTS * 3, "the slow ones were read in every round"


def test_a_slow_client_takes_part_when_it_is_free_and_counts_when_it_is_done():
    """Client 5 trains for 5 s, and rounds end after 2 s, or after 1 s when all are done: it begins at
    0 s and at 5 s, and its models are new at 5 s and at 10 s. Until then nobody reads or judges them."""
    time = {"round_seconds": [1.0] * 5 + [5.0], "deadline_seconds": 2.0}
    result = go(Random(2), time, rounds=8, eval_every=1)
    late, elapsed = by_round(result, "late"), by_round(result, "elapsed_seconds")
    assert elapsed[0].tolist() == [2, 3, 4, 5, 7, 8, 9, 10]
    assert late.index.tolist() == [0, 4]
    assert late.to_numpy().tolist() == [[0, 0, 0, 0, 0, 1]] * 2
    read = result.edges[result.edges["read"] == 5]
    assert set(read["round"]) <= {0, 4}
    assert set(result.edges[result.edges["reader"] == 5]["round"]) == {0, 4}
    for name, split in (("loss", "validation"), ("accuracy", "test")):
        found = by_round(result, name, split)[5]
        assert found.loc[0] == found.loc[2], "judged before its training was over"
        assert found.loc[3] == found.loc[6]
    loss = by_round(result, "loss", "validation")[5]
    assert loss.loc[2] != loss.loc[3]
    assert loss.loc[6] != loss.loc[7]
    # of the others 1 s of the first 2; of the late one at 5 s the 5 s before, and before 0 s nothing
    idle = by_round(result, "idle_share")
    assert idle[0].loc[[0, 4]].tolist() == [0.5, pytest.approx(1 - 5 / 7)]
    assert idle[5].dropna().to_dict() == {4: 0.0}


def test_who_trains_first_and_is_late_reads_nobody_and_is_not_read():
    """Its message would come after the round; what it trains is what it trains alone."""
    time = {"round_seconds": [1.0] * 5 + [5.0], "deadline_seconds": 2.0}
    changes = {"rounds": 4, "order": "train_first", "evaluate": "final"}
    result, alone = (go(method, time, **changes) for method in (Random(5), METHODS["local"]()))
    edges = result.edges
    first = edges[edges["round"] == 0]
    assert set(first[first["read"] == 5]["purpose"]) == {"missing"}
    assert (first[first["read"] == 5]["bytes"] > 0).all(), "a late message costs its bytes"
    assert set(first[first["reader"] == 5]["purpose"]) == {"missing"}
    assert (first[first["reader"] == 5]["bytes"] == 0).all()
    assert set(edges[edges["round"] > 0]["purpose"]) == {"mix"}
    assert torch.equal(result.params[5], alone.params[5])
    assert not torch.equal(result.params[0], alone.params[0])
    # 2 s for the round in which somebody waits for it, then 1 s each
    assert by_round(result, "elapsed_seconds")[0].tolist() == [2, 3, 4, 5]


# ---------------------------------------------------------------- servers


def test_a_server_averages_what_came():
    """A client that is never in time leaves the server's models as they are without that client."""
    time = {"round_seconds": [1.0] * 5 + [5.0], "deadline_seconds": 2.0}
    changes = {"init": "shared", "evaluate": "final", "rounds": 6}
    result = go(METHODS["fedavg"](), time, **changes)
    without = go(METHODS["fedavg"](), None, clients=5, **changes)
    assert torch.equal(result.params[:5], without.params)
    assert by_round(result, "late")[5].dropna().tolist() == [1, 1]
    # it has begun twice, and its own loss is that of the server's model of the round
    assert by_round(result, "loss")[5].dropna().index.tolist()[-2:] == [0, 4]


def test_a_late_client_keeps_what_it_trained_for_itself():
    """Ditto's personal model of a client whose updates all come too late is trained all the same."""
    time = {"round_seconds": [1.0] * 5 + [5.0], "deadline_seconds": 2.0}
    loss = by_round(go(METHODS["ditto"](), time, rounds=5), "loss", "validation")[5]
    assert loss.loc[-1] == loss.loc[2]
    assert loss.loc[2] != loss.loc[3] == loss.loc[4]


@pytest.mark.parametrize("kind", first_only(SERVERS))
def test_the_server_drops_the_messages_of_the_clients_that_are_late(monkeypatch, kind):
    """What the exchange decides before the report is what the clock says after it, links included."""
    dropped, late = [], []
    leave_out, finish = PunctualExchange.ask_server, TimeExtension.finish_round

    def spy(self, message, rule, shared):
        found = leave_out(self, message, rule, shared)
        if self._round is not None and self._round.asked == self.exchanges:
            dropped.append(self._round.clients[self._round.is_late_at_server()].tolist())
        return found

    def note(self, rnd, rows, info):
        info = finish(self, rnd, rows, info)
        late.append(rnd.ids[torch.from_numpy(self.late)].tolist())
        return info

    monkeypatch.setattr(PunctualExchange, "ask_server", spy)
    monkeypatch.setattr(TimeExtension, "finish_round", note)
    time = {
        "round_seconds": 1.0,
        "latency": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5],
        "bandwidth": [1e6, 1e6, 2000.0, 1e6, 200.0, 1e6],
        "deadline_seconds": 1.9,
    }
    go(make(kind), time, model=two_layers)
    assert 4 in late[0]
    assert dropped == late


def test_nothing_comes_in_time_and_the_server_keeps_its_model():
    time = {"round_seconds": 1.0, "latency": 0.5, "deadline_seconds": 1.5}
    result = go(METHODS["fedavg"](), time, rounds=3, evaluate="final", init="shared")
    first = go(METHODS["fedavg"](), None, rounds=0, evaluate="final", init="shared")
    assert torch.equal(result.params, first.params)
    # begun at 0 s and done at 2 s: nobody is free in the round from 1.5 to 3 s
    assert by_round(result, "elapsed_seconds").to_numpy().tolist() == [
        [end] * CLIENTS for end in (1.5, 3.0, 4.5)
    ]
    assert by_round(result, "late").index.tolist() == [0, 2]


# ---------------------------------------------------------------- kills


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("kind", "order", "more"),
    [
        ("random", "exchange_first", {"acceptance": True}),
        ("ditto", None, {}),
        pytest.param("dac", "train_first", {"participation": 0.7}, marks=pytest.mark.full),
        pytest.param("panm-grad", "exchange_first", {}, marks=pytest.mark.full),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, kind, order, more):
    changes = {
        **more,
        "rounds": 7,
        "order": order,
        "validate_every": 2,
        "checkpoint_seconds": 0.0,
        "local": LocalTraining(optimizer="adam", persistent_client_optimizer=True, epochs=1),
    }
    time = {**UNEVEN, "deadline_seconds": 2.0}

    def run(folder, at=None):
        def kill(progress):
            if progress.round == at:
                raise Killed

        return go(make(kind), time, folder=tmp_path / folder, observer=kill, **changes)

    whole = run("whole")
    assert by_round(whole, "late").max().max() == 1
    for at in range(-1, 7):
        with pytest.raises(Killed):
            run("killed", at)
    assert torch.equal(whole.params, run("killed").params)
    for name in (*FILES, "checkpoint.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "asynchronous"}, "nobody waits, so that there is no round to end"),
        ({"patience": 3}, "patience is set; with time.deadline_seconds it is not"),
        ({"secure_aggregation": True}, "a masked sum is of clients that all stay"),
    ],
)
def test_settings_that_need_everybody_in_a_round_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_settings(time={"deadline_seconds": 2.0}, **changes)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 2e9])
def test_a_deadline_that_is_no_time_is_refused(seconds):
    with pytest.raises(ConfigError, match="deadline_seconds"):
        tiny_settings(time={"deadline_seconds": seconds})


def test_a_deadline_before_the_fastest_client_is_done_is_refused():
    with pytest.raises(
        ConfigError, match=r"deadline_seconds is 0\.5; expected at least 2, the sec"
    ):
        go(Random(2), {"round_seconds": [3.0] * 5 + [2.0], "deadline_seconds": 0.5})
    # exactly in time is in time
    result = go(Random(2), {"round_seconds": 2.0, "deadline_seconds": 2.0})
    assert "late" not in set(result.metrics["metric"])


def test_a_method_without_rounds_of_clients_is_refused():
    with pytest.raises(ConfigError, match="pooled has the data of all clients in one place"):
        go(METHODS["pooled"](), {"deadline_seconds": 2.0})
