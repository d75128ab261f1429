"""Optimizers whose state outlasts a round: against torch.optim, over cohorts, tracks, hosts and checkpoints."""

import dataclasses

import pytest
import torch

from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.in_memory import InMemory
from coterie.methods.base import Method
from coterie.methods.dac import Dac
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.ifca import Ifca
from coterie.methods.local import Local
from coterie.methods.sosicfl import SosicFlPlus
from coterie.rng import Rng
from coterie.runtime import checkpoint
from coterie.runtime.loop import Loop
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.testing import check_method, run_grouped, run_method, tiny_federation, tiny_settings

SGD = LocalTraining(
    batch_size=5, optimizer="sgd", lr=0.1, momentum=0.5, persistent_client_optimizer=True
)
ADAM = dataclasses.replace(SGD, optimizer="adam", momentum=0.0, lr=0.01)


def finished(method: Method, settings: Settings) -> Loop:
    """The loop of a run of the tiny federation, at its end."""
    federation = tiny_federation()
    task = make_task(federation, method, "linear", settings)
    loop = Loop(
        task, method, InMemory(federation.ids, 6), settings, Rng(3), Record(torch.full((6,), -1))
    )
    while not loop.is_finished:
        loop.run_next_round()
    return loop


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
@pytest.mark.parametrize("local", [SGD, ADAM], ids=["sgd", "adam"])
def test_rounds_of_local_training_are_one_training_of_torch_optim(
    engine: str, local: LocalTraining
):
    """One optimizer of PyTorch for each client, never reset, on the batches of the same streams."""
    federation, settings = tiny_federation(), tiny_settings(rounds=3, local=local, engine=engine)
    task = make_task(federation, Local(), "linear", settings)
    expected = []
    for row in range(6):
        weights = task.initial_models(Rng(3))[row].clone().requires_grad_()
        kind = (
            torch.optim.Adam([weights], lr=0.01)
            if local is ADAM
            else torch.optim.SGD([weights], 0.1, momentum=0.5)
        )
        x, y = federation.x[row, :12], federation.y[row, :12]
        for index in range(-1, 3):
            order = torch.from_numpy(
                Rng(3).at_round(index).generator("batches", row).permutation(12)
            )
            for batch in order.split(5):
                kind.zero_grad()
                outputs = x[batch] @ weights[:12].reshape(3, 4).T + weights[12:]
                torch.nn.functional.cross_entropy(outputs, y[batch]).backward()
                kind.step()
        expected.append(weights.detach())
    result = simulate(
        federation,
        Local(),
        model="linear",
        settings=dataclasses.replace(settings, evaluate="final"),
        seed=3,
    )
    torch.testing.assert_close(result.params, torch.stack(expected), rtol=0, atol=1e-12)


def test_the_state_stays_with_the_client_whatever_model_it_trains():
    """One full batch a round: v_k = v_k / 2 + g_k(theta), and the mean of theta - lr v_k, written out."""
    local = dataclasses.replace(SGD, batch_size=12)
    task = make_task(tiny_federation(), FedAvg(), "linear", tiny_settings())
    plain = dataclasses.replace(local, persistent_client_optimizer=False)
    theta, velocity = task.initial_models(Rng(3)), torch.zeros(6, 15, dtype=torch.float64)
    for index in range(4):
        gradient = (theta - task.train(theta, Rng(3).at_round(index), plain)[0]) / 0.1
        velocity = velocity / 2 + gradient
        theta = (theta - 0.1 * velocity).mean(0).expand(6, -1)
    found = finished(FedAvg(), tiny_settings(local=local)).state.shared.models
    torch.testing.assert_close(found, theta[:1], rtol=0, atol=1e-12)


def test_who_is_not_in_the_cohort_keeps_the_state_it_had():
    """Three of six clients a round: those train three steps more, the others' moments are the same bits."""
    settings = tiny_settings(local=ADAM, participation=0.5)
    federation = tiny_federation()
    task = make_task(federation, FedAvg(), "linear", settings)
    loop = Loop(
        task, FedAvg(), InMemory(federation.ids, 6), settings, Rng(3), Record(torch.full((6,), -1))
    )
    loop.run_next_round()
    assert not loop.is_finished
    while not loop.is_finished:
        before = loop.state.moments
        cohort = FedAvg().select_cohort(None, Rng(3).at_round(loop.next_round), 6, 0.5)
        loop.run_next_round()
        after, rest = loop.state.moments, torch.ones(6, dtype=torch.bool)
        rest[cohort] = False
        assert before is not None
        assert after is not None
        assert torch.equal(after.values[rest], before.values[rest])
        assert torch.equal(after.taken - before.taken, torch.where(rest, 0, 3)[:, None])
        assert bool((after.values != before.values).any(3)[cohort].all())


def test_a_personal_model_has_a_state_of_its_own():
    """Ditto: two tracks that differ, and a global model that is FedAvg's bit for bit."""
    settings = tiny_settings(local=SGD)
    loop = finished(Ditto(), settings)
    assert loop.state.moments is not None
    assert loop.state.moments.values.shape == (6, 2, 1, 15)
    assert (
        float((loop.state.moments.values[:, 0] - loop.state.moments.values[:, 1]).abs().min()) > 0
    )
    assert torch.equal(loop.state.shared.models, finished(FedAvg(), settings).state.shared.models)
    fresh = finished(Ditto(), tiny_settings()).state.memory.model
    assert float((loop.state.memory.model - fresh).abs().max()) > 1e-3


def test_the_promises_of_methods_hold_with_it():
    """Repeats, resumes with the same bytes, any grouping of hosts, cohorts, for two tracks: see `check_method`."""
    check_method(Ditto(), settings=tiny_settings(local=ADAM), relabel=False)


@pytest.mark.parametrize(
    "method", [Ifca(2), SosicFlPlus(endpoints=2, regions=2), Dac(2)], ids=lambda m: m.kind
)
def test_who_hosts_whom_does_not_matter(method: Method):
    """Three hosts against one."""
    federation, settings = tiny_federation(), tiny_settings(local=ADAM, rounds=2)
    apart = run_grouped(federation, method, [[0, 4], [1, 2, 5], [3]], settings=settings)
    whole = run_method(method, federation=federation, settings=settings).state.params
    torch.testing.assert_close(apart, whole, rtol=0, atol=1e-10)


def test_a_resumed_run_ends_with_the_same_bytes(tmp_path):
    """The state is in the checkpoint: without it two more rounds give another model."""
    federation = tiny_federation()

    def run(folder: str, rounds: int, resume: bool = False):
        settings = tiny_settings(rounds=rounds, local=ADAM, participation=0.5)
        return simulate(
            federation,
            Ditto(),
            model="linear",
            settings=settings,
            seed=1,
            folder=tmp_path / folder,
            resume=resume,
        )

    run("whole", 5)
    run("parts", 3)
    run("parts", 5, resume=True)
    whole, parts = (checkpoint_bytes(tmp_path / name) for name in ("whole", "parts"))
    assert whole == parts
    other = simulate(
        federation, Ditto(), model="linear", seed=1,
        settings=tiny_settings(rounds=5, local=dataclasses.replace(ADAM, persistent_client_optimizer=False)),
        folder=tmp_path / "fresh",
    )  # fmt: skip
    assert other.params.shape == (6, 15)
    assert checkpoint_bytes(tmp_path / "fresh") != whole


def checkpoint_bytes(folder) -> bytes:
    """The checkpoint of a run."""
    return (folder / checkpoint.FILE).read_bytes()


def test_a_client_that_diverged_starts_afresh():
    """An infinite moment would spoil every later model of that client."""
    federation = tiny_federation()
    federation.x[2] *= 1e200
    loop = run_method(Local(), federation=federation, settings=tiny_settings(local=SGD, rounds=2))
    moments = loop.state.moments
    assert moments is not None
    assert moments.taken.flatten().tolist() == [9, 9, 0, 9, 9, 9]
    assert bool(torch.isfinite(moments.values).all())
    assert float(moments.values[2].abs().max()) == 0


def test_where_there_is_no_state_or_no_order_it_is_refused():
    """One line each."""
    with pytest.raises(
        ConfigError, match=r"persistent_client_optimizer is True; expected momentum above 0, or"
    ):
        LocalTraining(optimizer="sgd", persistent_client_optimizer=True)
    with pytest.raises(
        ConfigError, match=r"persistent_client_optimizer is True; expected schedule = 'synchronous'"
    ):
        tiny_settings(local=SGD, schedule="sequential")


@pytest.mark.option("LocalTraining.persistent_client_optimizer", False, True)
def test_the_velocity_begins_again_each_round_or_goes_on():
    """One full batch a round at momentum 1/2: v = g, or v = v / 2 + g; the model moves by -0.1 v."""
    for persistent in (False, True):
        local = LocalTraining(
            batch_size=12,
            optimizer="sgd",
            lr=0.1,
            momentum=0.5,
            persistent_client_optimizer=persistent,
        )
        loop = finished(Local(), tiny_settings(local=local))
        task = make_task(tiny_federation(), Local(), "linear", tiny_settings())
        plain = LocalTraining(batch_size=12, optimizer="sgd", lr=0.1, momentum=0.5)
        params, velocity = task.initial_models(Rng(3)), torch.zeros(6, 15, dtype=torch.float64)
        for index in range(-1, 4):
            gradient = (params - task.train(params, Rng(3).at_round(index), plain)[0]) / 0.1
            velocity = gradient + velocity / 2 * persistent
            params = params - 0.1 * velocity
        torch.testing.assert_close(loop.state.params, params, rtol=0, atol=1e-12)
