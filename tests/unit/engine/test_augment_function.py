"""A function that augments batches: keyed, in every engine, in training alone, and checked."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import coterie
from coterie.engine._augment import FunctionAugmentation
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.methods.fedavg import FedAvg
from coterie.models.draws import splitmix
from coterie.rng import Rng
from coterie.testing import run_grouped, run_method, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

HERE = __name__


def disturb(batch: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror some samples and add noise, as augmentation does."""
    mirrored = torch.rand(len(batch), generator=generator) < 0.5
    batch = torch.where(mirrored.reshape(-1, *(1 for _ in batch.shape[1:])), batch.flip(-1), batch)
    return batch + 0.1 * torch.randn(batch.shape, generator=generator, dtype=batch.dtype)


def erase(batch: Tensor, generator: torch.Generator) -> Tensor:
    """Leave nothing, in place."""
    return batch.zero_()


SGD = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1, augment=disturb)


@pytest.mark.slow
def test_training_is_the_same_with_every_engine_and_in_every_grouping():
    federation = tiny_federation(4, features=(1, 4, 4))
    assert SGD.augment == f"{HERE}:disturb"
    found = {}
    for local in (SGD, replace(SGD, dp={"clip": 1.0, "noise_multiplier": 0.5, "delta": 1e-3})):
        for engine in ("loop", "vmap", "compiled"):
            settings = tiny_settings(local=local, engine=engine)
            found[engine] = run_method(FedAvg(), federation=federation, settings=settings)
        for engine in ("vmap", "compiled"):
            torch.testing.assert_close(
                found[engine].state.params, found["loop"].state.params, rtol=0, atol=1e-10
            )
        grouped = run_grouped(
            federation, FedAvg(), [[0, 2], [1], [3]], settings=tiny_settings(local=local)
        )
        torch.testing.assert_close(grouped, found["loop"].state.params, rtol=0, atol=1e-10)
    plain = run_method(FedAvg(), federation=federation, settings=tiny_settings()).state.params
    assert float((plain - found["loop"].state.params).abs().max()) > 1e-3


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_the_steps_are_those_of_plain_pytorch(engine: str):
    """Three steps of a linear model by hand, with the generator that the keys say."""
    federation = tiny_federation(3)
    rng = Rng(4).at_round(2)
    local = LocalTraining(steps=3, batch_size=12, optimizer="sgd", lr=0.1, augment=disturb)
    task = build_task(federation.host(range(3)), "linear", dtype=torch.float64, engine=engine)
    start = torch.zeros(3, task.layout.size, dtype=torch.float64)
    after = task.train(start, rng, local)[0]
    for client in range(3):
        own = federation.split[client] == 0
        x, y = federation.x[client][own].double(), federation.y[client][own]
        model = torch.nn.Linear(x.shape[1], federation.classes, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        key = rng.draw_keys("batches.augment", torch.tensor([client]))
        for step in range(3):
            order = rng.generator("batches", client) if step == 0 else order
            places = torch.from_numpy(order.permutation(12))
            seed = int(splitmix(key + step)) & ((1 << 63) - 1)
            batch = disturb(x[places], torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), y[places]).backward()
            optimizer.step()
        by_hand = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
        torch.testing.assert_close(after[client], by_hand, rtol=0, atol=1e-10)


def test_draws_belong_to_the_client_and_the_step():
    x = torch.from_numpy(Rng(0).generator("x").normal(size=(3, 8, 6)))
    augment = FunctionAugmentation(torch.tensor([5, 6, 7]), f"{HERE}:disturb")
    whole = augment(x, torch.arange(3), 0)
    assert torch.equal(augment(x[1:2], torch.tensor([1]), 0), whole[1:2])
    assert not torch.equal(augment(x, torch.arange(3), 1), whole)
    assert not torch.equal(whole[0] - x[0], whole[1] - x[1])
    # One step as a training of its own has the draws of that step.
    alone = replace(augment, keys=augment.keys + 4)
    assert torch.equal(alone(x, torch.arange(3), 0), augment(x, torch.arange(3), 4))


def test_another_seed_and_another_round_draw_otherwise():
    federation, found = tiny_federation(2), []
    task = build_task(federation.host(range(2)), "linear", dtype=torch.float64)
    start = torch.zeros(2, task.layout.size, dtype=torch.float64)
    # One batch of all samples: only the draws of the function differ.
    local = LocalTraining(epochs=1, batch_size=100, optimizer="sgd", lr=0.1, augment=disturb)
    for rng in (Rng(0).at_round(0), Rng(0).at_round(1), Rng(1).at_round(0), Rng(0).at_round(0)):
        found.append(task.train(start, rng, local)[0])
    assert torch.equal(found[0], found[3])
    assert min(float((found[0] - other).abs().max()) for other in found[1:3]) > 1e-4


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_evaluation_sees_the_data_as_they_are(engine: str):
    """Training on nothing moves the bias alone; what is measured is of the true inputs."""
    federation = tiny_federation(3)
    local = LocalTraining(optimizer="sgd", lr=0.5, augment=f"{HERE}:erase")
    settings = coterie.Settings(rounds=1, local=local, engine=engine)
    run = coterie.simulate(federation, coterie.Local(), model="linear", settings=settings)
    told = run.metrics.query("round == 0 and split == 'test' and metric == 'loss'")
    start = coterie.simulate(
        federation, coterie.Local(), model="linear", settings=replace(settings, rounds=0)
    )
    for client in range(3):
        model, test = run.model(client), federation.tests[int(federation.test_of[client])]
        weights = [dict(m.named_parameters()) for m in (model, start.model(client))]
        for name, tensor in weights[0].items():
            assert torch.equal(tensor, weights[1][name]) == ("weight" in name)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(test.x.float()), test.y)
        value = float(told.query("client == @client")["value"].iloc[0])
        assert value == pytest.approx(float(loss), abs=1e-5)


def shorten(batch, generator):
    return batch[1:]


def widen(batch, generator):
    return batch.double().half()


def spoil(batch, generator):
    return batch / 0


def forget(batch, generator):
    batch.flip(-1)


def draw_elsewhere(batch, generator):
    return batch + torch.randn_like(batch)


def fail(batch, generator):
    raise KeyError("no such thing")


def take_one(batch):
    return batch


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shorten", r"returned torch.float32 of shape \(4, 4\) on cpu; expected finite torch.fl"),
        ("widen", r"returned torch.float16 of shape \(5, 4\)"),
        ("spoil", "returned NaN or infinity; expected finite"),
        ("forget", "returned a NoneType; expected finite"),
        ("draw_elsewhere", "returned two results for the same batch and generator"),
        ("fail", r"failed on a batch of shape \(5, 4\): KeyError: 'no such thing'"),
        ("take_one", r"has the arguments \(batch\); expected \(batch, generator\)"),
        ("absent", "has no attribute 'absent'; expected package.module:name"),
        ("HERE", "is 'tests.unit.engine.test_augment_function'; expected a function"),
    ],
)
def test_what_breaks_the_contract_is_one_line(name: str, message: str):
    settings = coterie.Settings(
        rounds=1, local=LocalTraining(batch_size=5, augment=f"{HERE}:{name}"), engine="loop"
    )
    with pytest.raises(ConfigError, match=message) as raised:
        coterie.simulate(tiny_federation(2), FedAvg(), model="linear", settings=settings)
    assert "local.augment" in str(raised.value)


def test_names_that_are_no_augmentation_are_refused():
    with pytest.raises(
        ConfigError, match=r"unknown augment 'crop'; .*, or package.module:function"
    ):
        LocalTraining(augment="crop")
    with pytest.raises(ConfigError, match=r"augment is <function .*lambda.*defined at the top"):
        LocalTraining(augment=lambda batch, generator: batch)  # type: ignore[arg-type]


def test_inputs_of_several_tensors_are_refused():
    x = {"a": torch.rand(30, 2), "b": torch.rand(30, 3)}
    federation = coterie.from_arrays(x, torch.arange(30) % 2, num_clients=2)
    settings = coterie.Settings(rounds=1, local=SGD)
    with pytest.raises(ConfigError, match="takes inputs of one tensor; found a: 2 numbers"):
        coterie.simulate(federation, FedAvg(), model="linear", settings=settings)
