"""Servers that do not wait: in step they are FedAvg, else what plain programs of FedBuff and FedAsync do."""

import heapq

import numpy as np
import pytest
import torch
from tests.selection import first_only

from coterie.data.federation import Federation, TestSet
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.methods import METHODS
from coterie.methods.fedavg import OneModel
from coterie.methods.sosicfl import SimplexMethod
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.runtime.virtual_time import FedAsyncRule, FedBuffRule
from coterie.simulation._asynchronous_server import AsynchronousServerLoop, _ServerDoor
from coterie.simulation.run import simulate
from coterie.testing.tiny import build_task, tiny_federation, tiny_settings

CLIENTS = 6
OF_TIME = {"elapsed_seconds", "own_rounds", "idle_share", "staleness", "staleness_seconds"}
AVERAGING = [
    kind
    for kind, method in METHODS.items()
    if issubclass(method, OneModel) and not issubclass(method, SimplexMethod)
]
UNEVEN = {
    "round_seconds": [2.0, 3.0, 4.0, 5.0, 7.0, 2.0],
    "jitter": 0.2,
    "latency": [0.1 * client for client in range(CLIENTS)],
    "bandwidth": 200.0,
    "pauses": [{"start": 4.0, "seconds": 3.0, "every": 9.0, "clients": [1, 2]}],
    "record_seconds": 5.0,
    "server": {"kind": "fedbuff", "buffer": 4},
}


def run(kind, *, server=None, seed=2, folder=None, observer=None, model="linear", **changes):
    time = {"time": {**UNEVEN, **({"server": server} if server else {})}}
    chosen = tiny_settings(**{"rounds": 4, "schedule": "asynchronous", **time, **changes})
    return simulate(
        tiny_federation(CLIENTS), METHODS[kind](), model=model, settings=chosen, seed=seed,
        folder=folder, resume=folder is not None, observer=observer,
    )  # fmt: skip


def without_times(result):
    table = result.metrics[~result.metrics["metric"].isin(OF_TIME)]
    table = table.astype(dict.fromkeys(("split", "model", "metric"), str))
    return table.sort_values(list(table.columns[:6])).reset_index(drop=True)


# ---------------------------------------------------------------- in step


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


@pytest.mark.parametrize("kind", first_only(AVERAGING))
def test_equal_speeds_and_a_buffer_for_all_are_the_synchronous_schedule(kind):
    """To the byte, and in the time that rounds in step take: models go over slow links."""
    changes = {
        "model": two_layers,
        "eval_every": 2,
        "local": LocalTraining(optimizer="adam", persistent_client_optimizer=True, epochs=1),
    }
    time = {"round_seconds": 0.5, "latency": 0.1, "bandwidth": 1000.0}
    plain = run(kind, schedule="synchronous", time=time, **changes)
    length = plain.metrics[plain.metrics["metric"] == "elapsed_seconds"]["value"].min()
    time |= {"record_seconds": float(length), "server": {"kind": "fedbuff", "buffer": CLIENTS}}
    free = run(kind, time=time, **changes)
    assert torch.equal(plain.params, free.params)
    assert without_times(plain).equals(without_times(free))
    done = free.metrics[free.metrics["metric"] == "own_rounds"]
    assert done.groupby("round")["value"].agg(["min", "max"]).to_numpy().tolist() == [
        [number, number] for number in (1, 2, 3, 4)
    ]


# ---------------------------------------------------------------- against plain programs


def run_plainly(work, rounds_until, take_in):
    """An event queue around one server: `take_in(model, updates)` returns its new model, or None."""
    federation, chosen = tiny_federation(CLIENTS), tiny_settings()
    task = build_task(federation.host(federation.ids), "linear", dtype=torch.float64)
    model = task.initial_models(Rng(5))[0]
    version, number = 0, [0] * CLIENTS
    begun = [(model, 0)] * CLIENTS
    queue = [(work[client], client) for client in range(CLIENTS)]
    heapq.heapify(queue)
    updates = []
    while queue[0][0] <= rounds_until:
        now, arrived = queue[0][0], []
        while queue[0][0] == now:
            client = heapq.heappop(queue)[1]
            arrived.append(client)
            start, at = begun[client]
            own = task.select_clients(torch.tensor([client]))
            trained = own.train(start[None], Rng(5).at_round(number[client]), chosen.local).params[
                0
            ]
            number[client] += 1
            updates.append((start, trained, version - at))
            new = take_in(model, updates)
            if new is not None:
                model, version, updates = new, version + 1, []
            queue.append((1e9, client))
        queue[:] = [one for one in queue if one[0] < 1e9]
        for client in arrived:
            begun[client] = (model, version)
            queue.append((now + work[client], client))
        heapq.heapify(queue)
    return model


def make_fedbuff(size):
    """Nguyen et al., algorithm 1, with a server step of 0.5 and the weight 1 / sqrt(1 + staleness)."""

    def take_in(model, updates):
        if len(updates) < size:
            return None
        total = sum((trained - start) / (1 + age) ** 0.5 for start, trained, age in updates)
        return model + 0.5 * total / size

    return take_in


def fedasync(model, updates):
    """Xie et al., algorithm 1, with alpha = 0.8 and the polynomial weight with a = 0.7."""
    ((_, trained, age),) = updates
    alpha = 0.8 * (1 + age) ** -0.7
    return (1 - alpha) * model + alpha * trained


@pytest.mark.parametrize(
    ("take_in", "server"),
    [
        (make_fedbuff(3), {"kind": "fedbuff", "buffer": 3, "server_lr": 0.5}),
        (make_fedbuff(8), {"kind": "fedbuff", "buffer": 8, "server_lr": 0.5}),
        (fedasync, {"kind": "fedasync", "mixing": 0.8, "exponent": 0.7}),
    ],
)
def test_a_server_that_does_not_wait_is_that_of_a_plain_program(take_in, server):
    """Client 0 is so fast that two of its updates meet in one buffer; one is larger than the population."""
    work = [1.0, 3.0, 4.0, 5.0, 7.0, 2.0]
    chosen = tiny_settings(
        rounds=5,
        evaluate="final",
        schedule="asynchronous",
        time={"round_seconds": work, "record_seconds": 4.0, "server": server},
    )
    result = simulate(
        tiny_federation(CLIENTS), METHODS["fedavg"](), model="linear", settings=chosen, seed=5
    )
    wanted = run_plainly(work, 20.0, take_in)
    assert torch.allclose(result.params, wanted.expand(CLIENTS, -1), rtol=0, atol=1e-12)


def test_the_rules_are_their_formulas():
    """Of numbers: a model of 10, a client that went from 4 to 6, three models later."""
    ten, four, six = (torch.tensor([value]) for value in (10.0, 4.0, 6.0))
    assert FedBuffRule(exponent=0.5).place(ten, four, six, 3).item() == 10 + 2 / 4**0.5
    assert FedBuffRule(server_lr=3.0).place(ten, ten, six, 0).item() == 10 - 3 * 4
    assert FedAsyncRule(mixing=0.5, exponent=1.0).place(ten, four, six, 3).item() == (
        pytest.approx(10 * 0.875 + 6 * 0.125)
    )


def test_staleness_is_counted_in_models_of_the_server():
    """The server makes a model of each update; client 1 of two takes five times as long as client 0."""
    time = {"round_seconds": [1.0, 5.0, 100.0, 100.0, 100.0, 100.0], "record_seconds": 5.5}
    result = run("fedavg", rounds=1, time={**time, "server": {"kind": "fedasync"}})
    table = result.metrics[result.metrics["round"] == 0].set_index(["metric", "client"])["value"]
    # in order of arrival: 0 at 1, 2, 3, 4 and 5 s, then 1 at 5 s
    assert table["staleness"].loc[:1].tolist() == [0.0, 5.0]
    assert table["staleness_seconds"].loc[:1].tolist() == [1.0, 5.0]
    assert table["own_rounds"].tolist() == [5, 1, 0, 0, 0, 0]


# ---------------------------------------------------------------- a problem whose answer is known


def pull_to_targets(targets, *, seconds, lr, spans, server, span=1.0):
    """FedAvg of one number w: client i has the loss (w - c_i)^2. Return w after each span of time."""
    number, samples = len(targets), 4
    y = torch.tensor(targets, dtype=torch.float64)[:, None, None].expand(number, samples, 1).clone()
    federation = Federation(
        x=torch.ones(number, samples, 1, dtype=torch.float64),
        y=y,
        split=torch.tensor([[0, 0, 0, 1]]).expand(number, -1).clone(),
        # of zeros, so that the loss is w^2
        tests=(TestSet(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1).double(), "zero"),),
        test_of=torch.zeros(number, dtype=torch.int64),
        ids=torch.arange(number),
        population=number,
        classes=0,
        name="targets",
    )
    chosen = Settings(
        rounds=spans,
        local=LocalTraining(steps=1, epochs=1, batch_size=samples, optimizer="sgd", lr=lr),
        dtype="float64",
        check=False,
        eval_every=1,
        schedule="asynchronous",
        time={"round_seconds": seconds, "record_seconds": span, "server": server},
    )
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    result = simulate(federation, METHODS["fedavg"](), model=model, settings=chosen)
    table = result.metrics
    keep = (table["split"] == "test") & (table["metric"] == "loss") & (table["client"] == 0)
    # w stays above zero in all that follows
    return table[keep & (table["model"] == "current")]["value"].to_numpy() ** 0.5


def test_in_step_fedbuff_finds_the_optimum():
    """Of the mean of the losses that is the mean of the targets, and each step goes 2 lr of the way."""
    found = pull_to_targets(
        [0.0, 1.0, 2.0, 5.0], seconds=1.0, lr=0.1, spans=30, server={"kind": "fedbuff", "buffer": 4}
    )
    assert found == pytest.approx(2 - 0.8 ** np.arange(1, 31), rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_slow_clients_count_by_their_rate_and_the_weight_of_their_staleness(exponent):
    """Nguyen et al.: an update weighs 1 / sqrt(1 + staleness). Four clients send an update a second,
    one does so every ten: where sums of weighted steps vanish, w = sum r s c / sum r s."""
    found = pull_to_targets(
        [0.0, 0.0, 0.0, 0.0, 1.0],
        seconds=[1.0, 1.0, 1.0, 1.0, 10.0],
        lr=0.01,
        spans=60,
        span=10.0,
        server={"kind": "fedbuff", "buffer": 4, "exponent": exponent},
    )
    # in ten seconds 41 updates make ten models
    weight = (1 + 10) ** -exponent
    assert found[-10:].mean() == pytest.approx(weight / (40 + weight), rel=0.15)


@pytest.mark.full
def test_a_buffer_takes_the_noise_of_single_clients_out_of_the_model():
    """FedAsync follows whoever came last; FedBuff's model is the mean over its buffer. Both are near
    the mean of the targets, 3, since all clients are nearly as fast."""
    given = {"seconds": [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07], "lr": 0.1, "spans": 150}
    targets = [1.0, 5.0] * 4
    mixed = pull_to_targets(targets, server={"kind": "fedasync", "exponent": 0.0}, **given)
    buffered = pull_to_targets(targets, server={"kind": "fedbuff", "exponent": 0.0, "buffer": 8}, **given)  # fmt: skip
    for found in (mixed, buffered):
        assert found[50:].mean() == pytest.approx(3.0, abs=0.3)
    assert buffered[50:].std() < mixed[50:].std() / 3


# ---------------------------------------------------------------- grouping and stops


class OneByOne(AsynchronousServerLoop):
    """Every training is computed when it ends and not before, every client alone."""

    def _choose_trainings(self, pending):
        chosen = np.zeros_like(pending)
        chosen[np.where(pending, self.end, np.iinfo(np.int64).max).argmin()] = True
        return chosen

    def _train_pending(self, until):
        while super()._train_pending(until):
            pass
        return False


@pytest.mark.parametrize("kind", first_only(["fedavg", "fedprox", "fedavgm"]))
def test_stacked_trainings_are_those_of_clients_one_by_one(monkeypatch, kind):
    stacked = run(kind, time={**UNEVEN, "latency": 0.0})
    monkeypatch.setattr("coterie.simulation._sequential.AsynchronousServerLoop", OneByOne)
    alone = run(kind, time={**UNEVEN, "latency": 0.0})
    assert torch.equal(stacked.params, alone.params)
    assert without_times(stacked).equals(without_times(alone))


@pytest.mark.parametrize(
    "server", first_only([{"kind": "fedbuff", "buffer": 4}, {"kind": "fedasync"}])
)
def test_a_killed_server_goes_on_to_the_same_bytes(tmp_path, server):
    """Killed after its second record, with updates in the buffer and others on their way."""

    class Killed(Exception):
        pass

    def kill(progress):
        if progress.round == 1:
            raise Killed

    local = LocalTraining(optimizer="adam", persistent_client_optimizer=True)
    more = {"server": server, "checkpoint_seconds": 0.0, "local": local}
    run("fedavg", folder=tmp_path / "whole", **more)
    with pytest.raises(Killed):
        run("fedavg", folder=tmp_path / "killed", observer=kill, **more)
    run("fedavg", folder=tmp_path / "killed", **more)
    for name in ("metrics.parquet", "edges.parquet", "models.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


def test_private_columns_stay_with_their_client():
    """The first layer is shared; in the last all clients are apart."""
    result = run("fedavg", model=two_layers, shared=["0.*"], evaluate="final", init="per_client")
    shared = 4 * 5 + 5
    assert (result.params[:, :shared] == result.params[0, :shared]).all()
    assert len(result.params[:, shared:].unique(dim=0)) == CLIENTS


def test_an_update_that_is_not_finite_is_left_out():
    """All updates overflow: none is taken in, and the server's model stays as it was."""
    with pytest.warns(UserWarning, match="the server left out the message"):
        result = run(
            "fedavg",
            local=LocalTraining(lr=1e300, epochs=1),
            rounds=2,
            check=False,
            dtype="float32",
        )
    assert result.params.isfinite().all()
    # 2 and 2 rounds of 2 and 5 s are over after 5 s, and 1 of 3 and of 4 s: one buffer of 4
    time = {"round_seconds": [2.0, 3.0, 4.0, 5.0, 7.0, 2.0], "record_seconds": 5.0}
    with pytest.warns(UserWarning, match="the server left out the message"):
        result = run(
            "fedavg",
            local=LocalTraining(lr=1e300, epochs=1),
            dtype="float32",
            rounds=1,
            check=False,
            time={**time, "server": {"kind": "fedbuff", "buffer": 4}},
        )
    left_out = result.metrics[result.metrics["metric"] == "refused"]["value"]
    assert left_out.tolist() == [4.0] * CLIENTS


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("ifca", {}, "ifca does more in a round; use 'synchronous'"),
        ("fedavg", {"metrics": ["gradient_variance"]}, "there is none: leave it out"),
        ("fedavg", {"time": {"max_staleness": 3}}, "a server weighs updates by their staleness"),
        ("fedavg", {"participation": 0.5}, "participation is set"),
    ],
)
def test_what_a_server_cannot_do_without_rounds_is_refused(kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(kind, **{"time": {}, **changes})


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"kind": "fedbuf"}, "unknown rule of a server 'fedbuf'"),
        ({"buffer": 3}, "server: kind is missing; valid: fedasync, fedbuff"),
        ({"kind": "fedasync", "mixing": 1.5}, "mixing"),
    ],
)
def test_a_rule_is_checked_where_it_is_given(server, message):
    with pytest.raises(ConfigError, match=message):
        tiny_settings(schedule="asynchronous", time={"server": server})


def test_the_way_to_the_server_leads_nowhere_else():
    door = _ServerDoor(torch.tensor([0]))
    with pytest.raises(Exception, match="nobody to read from"):
        door.pull(Message(torch.zeros(1, 2)), torch.zeros(1, 1, dtype=torch.int64))


def test_a_server_that_has_made_no_model_says_so():
    """Each client sends one update; the server waits for one more."""
    time = {"round_seconds": 1.0, "server": {"kind": "fedbuff", "buffer": CLIENTS + 1}}
    with pytest.warns(UserWarning, match=f"has {CLIENTS} of the {CLIENTS + 1} updates"):
        run("fedavg", rounds=1, time=time)
