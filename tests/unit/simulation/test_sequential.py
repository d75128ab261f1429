"""Sequential schedules: acting in waves is acting one after another, whatever number of exchanges a round has."""

import dataclasses
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.selection import first_only

from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.base import Inbox, Message
from coterie.exchange.in_memory import InMemory
from coterie.methods.dac import Dac
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.methods.panm import PanmGrad, PanmLoss
from coterie.methods.random_gossip import Random
from coterie.papers.dac import PublishedDac
from coterie.rng import Rng
from coterie.runtime.record import Record
from coterie.simulation import _sequential
from coterie.simulation._sequential import select_loop
from coterie.simulation.run import simulate
from coterie.testing.tiny import build_task, tiny_federation, tiny_settings


@st.composite
def _rounds(draw):
    size = draw(st.integers(1, 8))
    order = draw(st.permutations(range(size)))
    others = st.lists(st.integers(0, size - 1), max_size=4)
    readings = [[j for j in draw(others) if j != row] for row in range(size)]
    return order, readings


@given(_rounds())
def test_everybody_sees_in_waves_what_they_see_one_after_another(case):
    """Clients publish a text of what they have read; the texts are the same however they are grouped."""
    order, readings = case

    def play(groups):
        board = [str(row) for row in range(len(order))]
        for group in groups:
            said = {
                row: f"{row}({','.join(board[other] for other in readings[row])})" for row in group
            }
            for row, text in said.items():
                board[row] = text
        return board

    waves = [wave.tolist() for wave in _sequential.group_into_waves(order, readings)]
    assert sorted(row for wave in waves for row in wave) == sorted(order)
    assert play(waves) == play([[row] for row in order])


def test_clients_that_read_nobody_act_in_one_wave():
    assert [wave.tolist() for wave in _sequential.group_into_waves([2, 0, 1], [[], [], []])] == [
        [0, 1, 2]
    ]


def test_a_chain_of_readers_acts_one_by_one():
    assert [wave.tolist() for wave in _sequential.group_into_waves([0, 1, 2], [[], [0], [1]])] == [
        [0],
        [1],
        [2],
    ]


@pytest.mark.full
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("schedule", ["sequential", "sequential_exchange"])
def test_a_run_in_waves_is_a_run_one_by_one(schedule, equal, monkeypatch):
    """Clients of unequal size take other numbers of steps, in every grouping."""
    federation = tiny_federation(train=40)
    if not equal:
        split = federation.split.clone()
        for row, left_out in enumerate([0, 39, 20, 35, 3, 30]):
            split[row, :left_out] = -1
        federation = dataclasses.replace(federation, split=split)
    settings = tiny_settings(
        schedule=schedule, init="per_client", local=LocalTraining(lr=0.01), rounds=4, patience=2
    )

    def run():
        return simulate(federation, Random(2), model="linear", settings=settings, seed=3)

    in_waves = run()
    monkeypatch.setattr(
        _sequential, "group_into_waves", lambda order, _: [torch.tensor([row]) for row in order]
    )
    one_by_one = run()
    assert torch.allclose(in_waves.params, one_by_one.params, rtol=1e-12, atol=0)
    assert in_waves.edges.equals(one_by_one.edges)
    assert (
        in_waves.metrics[["round", "client", "metric"]]
        == one_by_one.metrics[["round", "client", "metric"]]
    ).all(axis=None)


def test_the_order_is_drawn_anew_in_every_round():
    """With lr = 0 and everyone reading everyone, three rounds of means taken one after another, by hand."""
    federation, number = tiny_federation(), 3
    settings = tiny_settings(
        schedule="sequential",
        init="per_client",
        local=LocalTraining(lr=0.0),
        rounds=number,
        evaluate="final",
    )
    result = simulate(federation, Random(5), model="linear", settings=settings, seed=1)
    live = (
        build_task(federation.host(range(6)), "linear", dtype=torch.float64, init="per_client")
        .initial_models(Rng(1))
        .clone()
    )
    orders = [
        Rng(1).at_round(index).generator("order").permutation(6).tolist() for index in range(number)
    ]
    assert len(set(map(tuple, orders))) == number
    for client in chain.from_iterable(orders):
        live[client] = live.mean(0)
    assert torch.allclose(result.params, live, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- several exchanges a round, in plain loops

SEED, CLIENTS = 3, 8


def started(method, **settings):
    """The rounds of a run, after its warm-up."""
    federation = tiny_federation(CLIENTS)
    task = build_task(federation.host(federation.ids), "linear", dtype=torch.float64)
    door, record = InMemory(federation.ids, CLIENTS), Record(torch.full((CLIENTS,), -1))
    chosen = tiny_settings(**{"rounds": 100, **settings})
    loop = select_loop(chosen, method)(task, method, door, chosen, Rng(SEED), record)
    loop.run_next_round()
    return loop


class Plain:
    """A population whose clients act one after another, in the words of the papers: no tables, no waves, no exchange.

    Args:
        loop: of which the data, the local training and the settings are taken.
    """

    def __init__(self, loop):
        self.task, self.local, self.data = loop.task, loop.settings.local, tiny_federation(CLIENTS)
        self.schedule, self.early = loop.settings.schedule, loop.order == "train_first"
        self.first = self.task.initial_models(Rng(SEED))[0].numpy()
        self.models = [self.first.copy() for _ in range(CLIENTS)]
        self.updates = [np.zeros_like(self.first) for _ in range(CLIENTS)]
        if not self.early:
            for client in range(CLIENTS):
                self.train(client, -1)

    def train(self, client, index):
        task = self.task.select_clients(torch.tensor([client]))
        before = torch.from_numpy(self.models[client])[None]
        after = task.train(before, Rng(SEED).at_round(index), self.local)[0][0].numpy().copy()
        self.updates[client], self.models[client] = after - self.models[client], after

    def loss(self, model, client):
        """Cross-entropy of a linear model on a client's training samples."""
        mine = (self.data.split[client] == 0).numpy()
        x, y = self.data.x[client].numpy()[mine], self.data.y[client].numpy()[mine]
        scores = x @ model[:12].reshape(3, 4).T + model[12:]
        return float(
            np.mean([np.log(np.exp(row - row[k]).sum()) for row, k in zip(scores, y, strict=True)])
        )

    def drawn(self, client, index, count, allowed, purpose):
        """The client draws members that it may choose, all with the same probability."""
        noise = (
            Rng(SEED).at_round(index).pairs(purpose, torch.tensor([client]), CLIENTS)[0].tolist()
        )
        return sorted(
            (j for j in range(CLIENTS) if j in allowed and j != client), key=lambda j: noise[j]
        )[:count]

    def merge(self, client, peers):
        """All have as many samples."""
        self.models[client] = np.mean([self.models[j] for j in [client, *peers]], axis=0)

    def round(self, index):
        order = Rng(SEED).at_round(index).generator("order").permutation(CLIENTS).tolist()
        whole = self.schedule == "sequential"
        if self.early and not whole:
            for client in range(CLIENTS):
                self.train(client, index)
        for client in order:
            if whole and self.early:
                self.train(client, index)
            self.exchange(client, index)
            if whole and not self.early:
                self.train(client, index)
        if not whole and not self.early:
            for client in range(CLIENTS):
                self.train(client, index)


def cosine(a, b):
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norms) if norms > 1e-24 else 0.0


def split_in_two(scores, start):
    """Hard EM over two Gaussians: whose scores are in the one with the larger mean; None where it finds nothing."""
    members, floor = set(start), max(0.01 * np.std(list(scores.values())), 1e-8)
    if not members or len(members) == len(scores):
        return None
    for _ in range(100):
        parts = [
            [s for j, s in scores.items() if (j in members) == inside] for inside in (True, False)
        ]
        if not all(parts):
            break

        def log(s, part):
            deviation = max(float(np.std(part)), floor)
            return (
                np.log(len(part) / len(scores))
                - np.log(deviation)
                - ((s - np.mean(part)) / deviation) ** 2 / 2
            )

        new = {j for j, s in scores.items() if log(s, parts[0]) > log(s, parts[1])}
        if new == members:
            break
        members = new
    if not members:
        return None
    others = set(scores) - members
    mean = lambda who: np.mean([scores[j] for j in who])  # noqa: E731
    return others if others and mean(others) > mean(members) else members


class PlainPanm(Plain):
    """PANM: k of the candidates and neighbors in stage one; in stage two a bag, corrected in every second round."""

    def __init__(self, loop):
        super().__init__(loop)
        self.method = loop.method
        self.bags = [set() for _ in range(CLIENTS)]

    def score(self, client, peer):
        if isinstance(self.method, PanmLoss):
            return 1 / (self.loss(self.models[peer], client) + 1e-6)
        last = cosine(self.updates[client], self.updates[peer])
        way = cosine(self.models[client] - self.first, self.models[peer] - self.first)
        return 0.5 * last + 0.5 * way

    def exchange(self, client, index):
        m, bag, number = self.method, self.bags[client], index + 1
        outside = set(range(CLIENTS)) - bag
        if number <= m.stage_one_rounds:
            seen = [*bag, *self.drawn(client, index, m.num_candidates, outside, "candidates")]
            scores = {j: self.score(client, j) for j in seen}
            # ties go to the lowest id
            neighbors = sorted(seen, key=lambda j: (-scores[j], j))[: m.num_peers]
            self.bags[client] = set(neighbors)
        else:
            if number % m.interval == 0:
                candidates = self.drawn(client, index, m.num_candidates, outside, "candidates")
                believed = self.drawn(client, index, m.num_candidates, bag, "believed")
                scores = {j: self.score(client, j) for j in [*believed, *candidates]}
                found = split_in_two(scores, believed)
                self.bags[client] = bag if found is None else found | (bag - set(believed))
            neighbors = self.drawn(client, index, m.num_peers, self.bags[client], "peers")
        self.merge(client, neighbors)


@pytest.mark.parametrize(
    ("kind", "candidates", "schedule", "order"),
    first_only(
        [
            (PanmLoss, 1, "sequential", "exchange_first"),
            (PanmGrad, 3, "sequential_exchange", "train_first"),
            (PanmLoss, 1, "sequential", "train_first"),
            (PanmLoss, 1, "sequential_exchange", "exchange_first"),
            (PanmLoss, 1, "sequential_exchange", "train_first"),
            (PanmGrad, 3, "sequential", "exchange_first"),
            (PanmGrad, 3, "sequential", "train_first"),
            (PanmGrad, 3, "sequential_exchange", "exchange_first"),
        ],
        2,
        slow=True,
    ),
)
def test_panm_one_after_another_is_the_plain_loop(kind, candidates, schedule, order):
    """Models and bags of eight clients through both stages, with two corrections of the bag.

    With one candidate a client averages, in a correction, with members of the bag that it did not
    score.
    """
    method = kind(num_peers=2, num_candidates=candidates, stage_one_rounds=3, interval=2)
    loop = started(method, schedule=schedule, order=order)
    plain, sizes = PlainPanm(loop), set()
    for index in range(7):
        plain.round(index)
        loop.run_next_round()
        np.testing.assert_allclose(
            loop.state.params.numpy(), np.array(plain.models), rtol=0, atol=1e-10
        )
        bags = [set(row) - {-1} for row in loop.state.memory.members.tolist()]
        assert bags == plain.bags
        sizes |= {len(bag) for bag in bags}
    assert len(sizes) > 1, "corrections changed bags"


class PlainHistory(Plain):
    """DAC that draws uniformly (tau = 0) and asks all that it ever read what they measured."""

    def __init__(self, loop):
        super().__init__(loop)
        self.measured = [{} for _ in range(CLIENTS)]
        self.told = [{} for _ in range(CLIENTS)]

    def exchange(self, client, index):
        others = set(range(CLIENTS)) - {client}
        peers, mine = self.drawn(client, index, 2, others, "peers"), self.measured[client]
        for j in peers:
            mine[j] = 1 / (self.loss(self.models[j], client) + 1e-6)
        for j in others - set(mine):
            relays = [k for k in mine if j in self.measured[k]]
            if relays:
                self.told[client][j] = self.measured[max(relays, key=lambda k: mine[k])][j]
        self.merge(client, peers)


@pytest.mark.parametrize("schedule", ["sequential", "sequential_exchange"])
def test_what_earlier_peers_measured_is_the_newest_that_they_know(schedule):
    """DAC's second exchange: a peer that acted before in the round tells what it measured in it."""
    loop = started(PublishedDac(num_peers=2, tau=0.0, two_hop_scope="history"), schedule=schedule)
    plain, estimates = PlainHistory(loop), 0
    for index in range(3):
        plain.round(index)
        loop.run_next_round()
        np.testing.assert_allclose(
            loop.state.params.numpy(), np.array(plain.models), rtol=0, atol=1e-10
        )
        memory = loop.state.memory
        for client in range(CLIENTS):
            mine, told = plain.measured[client], plain.told[client]
            assert set((memory.status[client] == 2).nonzero().flatten().tolist()) == set(mine)
            told = {j: value for j, value in told.items() if j not in mine}
            assert set((memory.status[client] == 1).nonzero().flatten().tolist()) == set(told)
            for j, value in (mine | told).items():
                assert float(memory.similarity[client, j]) == pytest.approx(value, rel=1e-10)
            estimates += len(told)
    assert estimates > 0


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["sequential", "sequential_exchange"])
def test_a_run_of_two_exchanges_goes_on_to_the_same_bytes(schedule, tmp_path):
    """Interrupted in stage one and in stage two; a client that stopped early goes on publishing in both exchanges."""
    method = PanmGrad(num_peers=2, num_candidates=2, stage_one_rounds=3, interval=2)
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=3.0)
    settings = tiny_settings(schedule=schedule, local=local, rounds=7, patience=2)

    def run(folder, rounds, *, resume=False):
        changed = dataclasses.replace(settings, rounds=rounds)
        return simulate(
            tiny_federation(CLIENTS),
            method,
            model="linear",
            settings=changed,
            seed=1,
            folder=folder,
            resume=resume,
        )

    whole = run(tmp_path / "whole", 7)
    for rounds in (2, 5, 7):
        run(tmp_path / "parts", rounds, resume=rounds > 2)
    trained = whole.metrics.loc[
        ((whole.metrics["split"] == "train") & (whole.metrics["metric"] == "loss")).to_numpy()
    ]
    assert 0 < int((trained["round"] == 6).sum()) < CLIENTS, "some stopped, and not all"
    for name in ("metrics.parquet", "edges.parquet", "checkpoint.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_answers_to_a_question_of_the_same_round_cannot_have_been_published():
    with pytest.raises(
        ConfigError, match="schedule = 'sequential': dac with loss_direction = 'push' is answered"
    ):
        started(Dac(loss_direction="push"), schedule="sequential")


@dataclass(frozen=True)
class Silent(Random):
    """A method of a user's with two exchanges that does not say what it publishes."""

    kind: ClassVar[str] = "silent"
    exchanges: ClassVar[int] = 2

    def exchange(self, rnd, state):
        rnd.exchange.pull(Message(state.params[:, :0]), torch.full((len(rnd.ids), 1), -1))
        return super().exchange(rnd, state)


@dataclass(frozen=True)
class Wrong(Silent):
    """Another one, that says something else than it does."""

    kind: ClassVar[str] = "wrong"

    def publish(self, task, state, exchange=0):
        return super().publish(task, state)


@dataclass(frozen=True)
class Told(Silent):
    """One that says it."""

    kind: ClassVar[str] = "told"

    def publish(self, task, state, exchange=1):
        return super().publish(task, state) if exchange else Message(state.params[:, :0])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Silent(2), "silent makes 2 exchanges a round, and its `publish` does not say"),
        (
            Wrong(2),
            r"exchange 0 of a round publishes models of 0 numbers with nothing; by `publish` it is models of",
        ),
    ],
)
def test_a_method_says_what_it_publishes_in_each_exchange(method, said):
    with pytest.raises(ConfigError, match=said):
        started(method, schedule="sequential").run_next_round()


def test_an_exchange_that_asks_nobody_changes_nothing():
    """Two exchanges, of which the first is empty, are run in waves like the second alone."""
    loops = [
        started(method, schedule="sequential", init="shared") for method in (Told(2), Random(2))
    ]
    for loop in loops:
        loop.run_next_round()
        loop.run_next_round()
    assert torch.equal(loops[0].state.params, loops[1].state.params)


@pytest.mark.parametrize("schedule", ["sequential", "sequential_exchange"])
def test_training_comes_first_where_it_is_asked_for(schedule):
    """Everyone reads everyone, by hand; what is judged are the models before the exchange that ends a round."""
    loop = started(Random(CLIENTS - 1), schedule=schedule, order="train_first", init="shared")
    plain = Plain(loop)
    plain.exchange = lambda client, index: plain.merge(
        client, [j for j in range(CLIENTS) if j != client]
    )
    for index in range(2):
        plain.round(index)
        loop.run_next_round()
        np.testing.assert_allclose(
            loop.state.params.numpy(), np.array(plain.models), rtol=0, atol=1e-10
        )
    if schedule == "sequential":
        last = Rng(SEED).at_round(1).generator("order").permutation(CLIENTS).tolist()[-1]
        merged = torch.from_numpy(plain.models[last])[None]
        judged = loop.task.select_clients(torch.tensor([last])).evaluator.evaluate_split(
            merged, "validation"
        )["loss"]
        assert float(loop.validation["loss"][last]) != pytest.approx(float(judged[0]))


def test_clients_that_ask_nobody_act_together(monkeypatch):
    """One look at who is read, and one wave: alone they would act in six."""
    calls, exchange = [], Local.exchange

    def count(self, rnd, state):
        calls.append(len(rnd.ids))
        return exchange(self, rnd, state)

    monkeypatch.setattr(Local, "exchange", count)
    simulate(
        tiny_federation(), Local(), model="linear",
        settings=tiny_settings(schedule="sequential_exchange", rounds=1, check=False), seed=0,
    )  # fmt: skip
    assert calls == [6, 6]


# ---------------------------------------------------------------- boards


@pytest.mark.parametrize("broadcast", ["best", "last"])
def test_stopped_clients_keep_publishing_their_best_or_their_last_models(broadcast):
    loop = started(Told(2), schedule="sequential", patience=1, stopped_broadcast=broadcast)
    assert loop._make_standing_messages(loop.method) == []
    stopped = torch.zeros(CLIENTS, dtype=torch.bool)
    stopped[[1, 6]] = True
    best = loop.state.params + 1
    loop.tracker = dataclasses.replace(loop.tracker, stopped=stopped, best=best)
    shown = (best if broadcast == "best" else loop.state.params)[[1, 6]]
    empty, models = loop._make_standing_messages(loop.method)
    assert (empty.ids.tolist(), models.ids.tolist()) == ([1, 6], [1, 6])
    assert empty.params.shape == (2, 0)
    assert torch.equal(models.params, shown)
    # Those who go on read them, and nobody changes them.
    before = loop.state.params.clone()
    loop.run_next_round()
    assert torch.equal(loop.state.params[[1, 6]], before[[1, 6]])
    assert not torch.equal(loop.state.params[0], before[0])


def message(first: float, *ids: int) -> Message:
    rows = torch.tensor([[first + row, 0.0] for row in range(len(ids))])
    return Message(rows, {"loss": rows[:, 0] * 10}, torch.tensor(ids))


def test_a_board_has_those_who_act_and_then_those_who_stopped():
    board = dataclasses.replace(message(1.0, 0, 2), ids=None)
    ids = torch.tensor([0, 2])
    alone = _sequential._add_standing_message(board, ids, None)
    assert alone.ids.tolist() == [0, 2]
    both = _sequential._add_standing_message(board, ids, message(7.0, 5, 3))
    assert both.ids.tolist() == [0, 2, 5, 3]
    assert both.params[:, 0].tolist() == [1, 2, 7, 8]
    assert both.fields["loss"].tolist() == [10, 20, 70, 80]


def read(inbox: Inbox) -> list[float]:
    """The first number of each model that the first reader received."""
    return inbox.table[inbox.index[0], 0].tolist()


def test_a_table_shows_what_was_published_until_its_owner_acts():
    source = message(1.0, 0, 1, 2)
    live = _sequential.LiveExchange([source, source], 3)
    assert live.boards[0].params.data_ptr() == live.boards[1].params.data_ptr(), "one copy"
    live.begin_round(Rng(0))
    live.set_active(torch.tensor([0]))
    peers = torch.tensor([[2, 1]])
    own = Message(source.params[:1], {"loss": source.fields["loss"][:1]})
    assert read(live.pull(own, peers)) == [3, 2]
    live.update(torch.tensor([1]), [message(9.0, 1)] * 2)
    found = live.pull(own, peers)
    assert read(found) == [3, 9]
    assert found.field_by_slot("loss")[0].tolist() == [30, 90]
    assert source.params[:, 0].tolist() == [1, 2, 3], "a copy of what was given"
    with pytest.raises(ConfigError, match="more often in a round than the 2 exchanges"):
        live.pull(own, peers)
    live.set_active(torch.tensor([1]))
    for wrong in (Message(source.params[:1]), Message(source.params[:1, :1], own.fields)):
        live.set_active(torch.tensor([0]))
        with pytest.raises(ConfigError, match="exchange 0 of a round publishes models of"):
            live.pull(wrong, peers)


def test_a_table_has_no_server_and_lets_everybody_take_part():
    live = _sequential.LiveExchange([message(1.0, 0)], 1)
    with pytest.raises(ConfigError, match="a sequential schedule is for peer-to-peer methods"):
        live.ask_server(message(1.0, 0), print, None)
    assert live.agree_on_cohort(lambda: torch.tensor([0])).tolist() == [0]


def test_a_method_with_a_server_has_no_such_schedule():
    with pytest.raises(ConfigError, match="'sequential' is for peer-to-peer methods; fedavg has"):
        started(FedAvg(), schedule="sequential")


def test_reports_of_waves_are_in_the_order_of_rows():
    rows = [torch.tensor([2, 0]), torch.tensor([1])]
    infos = [{"x": torch.tensor([20, 0])}, {"x": torch.tensor([10])}]
    assert _sequential._join_reports(infos, rows)["x"].tolist() == [0, 10, 20]
    assert _sequential._join_reports([], []) == {}


def test_who_is_read_is_known_before_where_only_the_last_exchange_reads_anybody():
    board = Message(torch.zeros(2, 3), {}, torch.arange(2))
    live = _sequential.LiveExchange([board, board], 2)
    nobody, others = torch.full((2, 1), -1), torch.tensor([[1], [0]])

    def begin():
        live.set_active(torch.arange(2))
        return _sequential._PeerProbe(live)

    with pytest.raises(_sequential._PeersAsked) as asked:
        begin().pull(board, others)
    assert not asked.value.last
    for second in (others, nobody):
        probe = begin()
        assert not bool(probe.pull(board, nobody).mask.any())
        with pytest.raises(_sequential._PeersAsked) as asked:
            probe.pull(board, second)
        assert asked.value.last
        assert torch.equal(asked.value.peers, second)
