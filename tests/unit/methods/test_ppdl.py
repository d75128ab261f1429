"""PPDL: rounds worked by hand, what it refuses, and the claim of its paper on a planted problem."""

import statistics
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.methods.ppdl import Played, Ppdl
from coterie.net import local
from coterie.net.node import Node, RunSpec
from coterie.net.transport import Hub, InProcess
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.simulation.run import simulate
from coterie.studies import leakage
from coterie.studies.definition import make_study
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.methods import _RunFactory

FEDERATION = tiny_federation()


def start(method: Ppdl, federation=FEDERATION, **settings) -> Loop:
    """A run after its warm-up."""
    make = _RunFactory(federation, method, "linear", tiny_settings(**settings))
    loop = make.make_loop(
        InMemory(torch.arange(federation.population), federation.population), Rng(3),
        list(range(federation.population)),
    )  # fmt: skip
    loop.run_next_round()
    return loop


def exchange(loop: Loop):
    """The state and the report of the exchange of the next round."""
    everybody = torch.arange(len(loop.task))
    loop.exchange.begin_round(loop.rng.at_round(loop.next_round))
    rnd = loop._make_round(loop.next_round, everybody, everybody)
    return loop.method.exchange(rnd, loop.state)


def test_a_client_averages_with_the_mean_of_its_group_by_samples():
    loop = start(Ppdl(group_size=2))
    before = loop.state.params.double()
    new, info = exchange(loop)
    samples = loop.task.num_samples.double()
    for row in range(6):
        members = info["peers"][row].tolist()
        assert row not in members
        assert len(set(members)) == 2
        rows = [row, *members]
        weights = samples[rows] / samples[rows].sum()
        plain = (before[rows] * weights[:, None]).sum(0)
        assert float((new.params[row].double() - plain).abs().max()) < 1e-6
        assert float(info["own_weight"][row]) == pytest.approx(float(weights[0]))
        assert info["weights"][row].tolist() == pytest.approx(weights[1:].tolist())


@pytest.mark.option("Ppdl.reward", "accuracy", "likelihood", None)
@pytest.mark.parametrize("reward", ["accuracy", "likelihood", None])
def test_what_a_group_earned_is_what_the_average_does_on_the_validation_data(reward):
    loop = start(Ppdl(group_size=2, reward=reward, num_remembered=3))
    new, info = exchange(loop)
    data = loop.task.data
    for row in range(6):
        inside = FEDERATION.split[row] == 1
        x, y = FEDERATION.x[row][inside], FEDERATION.y[row][inside]
        weight, bias = new.params[row, :12].reshape(3, 4), new.params[row, 12:]
        outputs = x @ weight.T + bias
        earned = float((outputs.argmax(1) == y).double().mean())
        if reward == "likelihood":
            earned = float(torch.exp(-torch.nn.functional.cross_entropy(outputs, y)))
        # Four samples: the two rewards differ.
        assert float(new.memory.rewards[row, 0]) == pytest.approx(earned, abs=1e-6)
    assert data is loop.task.data
    assert info["passes"].tolist() == [4] * 6
    assert new.memory.members[:, 0].tolist() == info["peers"].sort(1).values.tolist()
    assert new.memory.chances[:, 0].tolist() == pytest.approx([0.1] * 6)  # of ten groups
    assert new.memory.spreads[:, 0].tolist() == pytest.approx([0.5] * 6)
    assert (new.memory.members[:, 1:] == -1).all()


@pytest.mark.parametrize("buffers", ["local", "average"])
def test_a_group_earns_what_the_model_does_that_is_used_with_its_own_statistics(buffers):
    """Inputs of clients are apart, so that statistics of batch normalizations are too."""
    apart = 3.0 * torch.arange(6)[:, None, None]
    federation = replace(FEDERATION, x=FEDERATION.x + apart)
    method = Ppdl(group_size=2, reward="likelihood")
    make = _RunFactory(federation, method, make_normalized, tiny_settings(buffers=buffers))
    loop = make.make_loop(InMemory(torch.arange(6), 6), Rng(3), list(range(6)))
    loop.run_next_round()
    before, (new, _) = loop.state.params, exchange(loop)
    used, trained = new.params.clone(), loop.task.layout.trainable
    if buffers == "local":
        used[:, trained:] = before[:, trained:]
        assert not torch.equal(before[0, trained:], before[1, trained:])
    loss = loop.task.loss(used, "validation").double()
    torch.testing.assert_close(new.memory.rewards[:, 0], torch.exp(-loss), rtol=0, atol=1e-6)


def make_normalized():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_a_client_remembers_so_many_rounds_the_newest_first():
    loop = start(Ppdl(group_size=2, num_remembered=2))
    seen = []
    for _ in range(3):
        loop.run_next_round()
        seen.append(loop.state.memory.members[:, 0].clone())
    assert torch.equal(loop.state.memory.members, torch.stack([seen[2], seen[1]], dim=1))
    assert loop.state.memory.count.tolist() == [3] * 6
    assert {item.name for item in fields(Played)} >= {"members", "rewards"}


def test_tasks_without_an_accuracy_are_rated_by_their_likelihood_unless_that_is_refused():
    federation = tiny_federation(kind="labels")
    loop = start(Ppdl(group_size=2), federation, loss="multi-label")
    new, _ = exchange(loop)
    loss = loop.task.loss(new.params, "validation").double()
    torch.testing.assert_close(new.memory.rewards[:, 0], torch.exp(-loss), rtol=0, atol=1e-6)
    loop = start(Ppdl(group_size=2, reward="accuracy"), federation, loss="multi-label")
    with pytest.raises(ConfigError, match="reward is 'accuracy', and this task has none"):
        exchange(loop)


def test_the_spread_falls_from_the_first_value_to_the_least():
    method = Ppdl(spread=0.5, least_spread=0.1)
    assert [method.spread_at(t) for t in (0, 1, 2)] == pytest.approx([0.5, 0.46, 0.424])
    assert method.spread_at(500) == pytest.approx(0.1)
    with pytest.raises(ConfigError, match=r"least_spread is 0.3; expected at most spread = 0.2"):
        Ppdl(spread=0.2, least_spread=0.3)


def test_groups_of_one_are_refused_and_with_one_other_client_nobody_is_read():
    with pytest.raises(ConfigError, match="group_size is 1; expected a whole number, 2 or more"):
        Ppdl(group_size=1)
    run = simulate(tiny_federation(2), Ppdl(), model="linear", settings=tiny_settings())
    assert not len(run.edges)


def test_too_many_groups_are_refused_before_a_round():
    with pytest.raises(
        ConfigError, match=r"other members make 1,2\d\d,\d\d\d groups of 3; expected at most"
    ):
        simulate(tiny_federation(200, train=4), Ppdl(), model="linear", settings=tiny_settings())


@pytest.mark.parametrize(
    "other", [{"acceptance": True}, {"attacks": [{"kind": "noise", "clients": 1}]}]
)
def test_what_looks_at_single_models_is_refused(other):
    line = r"is set; ppdl cannot have it: its clients see means of groups, and no single model"
    with pytest.raises(ConfigError, match=line):
        simulate(FEDERATION, Ppdl(), model="linear", settings=tiny_settings(**other))


def test_an_audit_of_the_models_that_clients_send_is_refused():
    study = make_study([Ppdl()], seeds=1)
    with pytest.raises(ConfigError, match="with ppdl nobody sees a single one"):
        next(leakage.audit_study(study, federation=FEDERATION, model="linear"))


def test_nodes_refuse_it_in_one_line(tmp_path):
    plan = RunSpec(Ppdl(), tiny_settings(), "linear", "linear")
    who, keys = local.make_members([[i] for i in range(6)])
    transport = InProcess(Hub(), "n0")
    with pytest.raises(ConfigError, match="ppdl reads means of groups, and between machines there"):
        Node(plan, FEDERATION.host([0]), who, transport, local.make_signer(keys[0]), tmp_path)
    transport.close()


def accuracy_and_share(kind: str, seed: int, **options) -> tuple[float, float]:
    """The test accuracy, and the share of the own cluster among peers read in the last 15 of 60 rounds."""
    federation = tiny_federation(10, 2, train=8, validation=60, features=(8,), seed=seed)
    settings = tiny_settings(
        rounds=60, evaluate="final", local=LocalTraining(epochs=1, batch_size=8, lr=0.1)
    )
    run = simulate(
        federation, METHODS[kind](**options), model="linear", settings=settings, seed=seed
    )
    rows = run.metrics[(run.metrics["split"] == "test") & (run.metrics["metric"] == "accuracy")]
    late = run.edges[run.edges["round"] >= 45]
    same = late["reader"].to_numpy() % 2 == late["read"].to_numpy() % 2
    return float(rows["value"].mean()), float(same.mean())


@pytest.mark.paper
@pytest.mark.full
def test_it_finds_the_own_cluster_without_seeing_a_model():
    """Four of nine others are in it; of groups of two drawn at random, that is the share."""
    found = [accuracy_and_share("ppdl", seed, group_size=2) for seed in range(2)]
    assert statistics.mean(share for _, share in found) > 0.8
    chance = [accuracy_and_share("random", seed, num_peers=2) for seed in range(2)]
    assert abs(statistics.mean(share for _, share in chance) - 4 / 9) < 0.08
    assert statistics.mean(a for a, _ in found) > statistics.mean(a for a, _ in chance) + 0.05


@pytest.mark.paper
@pytest.mark.slow
def test_it_beats_random_peers_and_keeps_up_with_choices_that_see_models():
    """The paper: as good as methods that see models, or better, and far better than random peers.

    Two clusters with other labels, 8 training samples a client, all methods with two peers a round;
    means over five problems.
    """
    accuracy = {
        kind: statistics.mean(accuracy_and_share(kind, seed, **options)[0] for seed in range(5))
        for kind, options in {
            "ppdl": {"group_size": 2}, "random": {"num_peers": 2}, "dac": {"num_peers": 2},
            "oracle": {"num_peers": 2},
        }.items()
    }  # fmt: skip
    assert accuracy["ppdl"] > accuracy["random"] + 0.08
    assert accuracy["ppdl"] > accuracy["dac"]
    assert accuracy["ppdl"] > accuracy["oracle"] - 0.08
