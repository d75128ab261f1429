"""Local training gradient by gradient: what `Task.train` does in one call, and what it cannot do."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.data.build import build_federation
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError
from coterie.methods.apfl import Apfl
from coterie.rng import Rng
from coterie.studies import config
from coterie.testing import check_method, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

ENGINES = ["loop", "vmap", "compiled"]
SGD = LocalTraining(epochs=2, batch_size=4, optimizer="sgd", lr=0.1, drop_last=True)
LOCALS = {
    "sgd": SGD,
    "nesterov": replace(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": replace(
        SGD, optimizer="adam", lr=0.01, lr_schedule={"kind": "cosine", "over": "steps"}
    ),
    "adamw": replace(SGD, optimizer="adamw", lr=0.01),
}


class Custom(nn.Module):
    """Dropout and batch normalization; no bias before it, whose gradient of 0 Adam would divide by 0."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = (
            nn.Linear(4, 6, bias=False),
            nn.BatchNorm1d(6),
            nn.Dropout(0.4),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.first(x)))))


def task(engine="vmap", model="linear", **kwargs):
    """A task of clients with 12, 11, 7, 5, 3 and 2 training samples."""
    federation = tiny_federation()
    split = federation.split.clone()
    for client, count in enumerate((12, 11, 7, 5, 3, 2)):
        split[client, count:12] = -1
    noise = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.0, 0.1], dtype=torch.float64)
    federation = replace(federation, split=split, noise=noise)
    return build_task(
        federation.host(range(6)), model, engine=engine, dtype=torch.float64, **kwargs
    )


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
def test_step_by_step_is_train(engine, local):
    """Equal batches, dropout masks, noise, rates and running statistics; clients with fewer steps stop."""
    own = task(engine, Custom)
    start, rng = own.initial_models(Rng(0)).clone(), Rng(0).at_round(2)
    expected, told, _ = own.train(start, rng, local)
    params, steps = start.clone(), own.train_stepwise(rng, local)
    for step in range(steps.num_steps):
        steps.apply_gradient(params, steps.compute_gradient(params, step), step)
    found = steps.finish(params)
    torch.testing.assert_close(params, expected, rtol=0, atol=1e-12)
    assert found.keys() == told.keys()
    for name, value in told.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, equal_nan=True)
    assert steps.active_clients(4).tolist() == [True, False, False, False, False, False]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gradient_is_that_of_the_mean_loss_of_the_batch(engine):
    """By autograd on the linear model, at another point than the start; nothing moves, and who has no batch gets 0."""
    own, local = task(engine), replace(SGD, epochs=1, batch_size=12, drop_last=False)
    params = own.initial_models(Rng(0)) * 3 + 0.1
    steps, before = (
        own.train_stepwise(Rng(0).at_round(0), replace(local, batch_size=6)),
        params.clone(),
    )
    gradients = [steps.compute_gradient(params, step) for step in range(2)]
    assert torch.equal(params, before)
    federation = tiny_federation()
    for row, count in ((0, 12), (2, 7)):
        order = torch.from_numpy(Rng(0).at_round(0).generator("batches", row).permutation(count))
        for step in range(2):
            batch = order[6 * step : 6 * step + 6]
            weights = params[row].clone().requires_grad_()
            outputs = federation.x[row, batch] @ weights[:12].reshape(3, 4).T + weights[12:]
            torch.nn.functional.cross_entropy(outputs, federation.y[row, batch]).backward()
            torch.testing.assert_close(gradients[step][row], weights.grad, rtol=0, atol=1e-12)
    assert not gradients[1][5].any()


@pytest.mark.full
def test_images_are_cropped_and_flipped_as_in_training():
    """Draws of an augmentation depend on the step, which a single gradient knows."""
    federation = build_federation(config.load_study("rotated-digits").data, 0)
    for engine in ENGINES:
        own = build_task(federation.host(range(3)), "cnn-b", engine=engine, dtype=torch.float64)
        local = replace(SGD, batch_size=20, augment="crop-flip", padding=1)
        expected, _, _ = own.train(own.initial_models(Rng(0)), Rng(0).at_round(1), local)
        params, steps = (
            own.initial_models(Rng(0)).clone(),
            own.train_stepwise(Rng(0).at_round(1), local),
        )
        for step in range(steps.num_steps):
            steps.apply_gradient(params, steps.compute_gradient(params, step), step)
        torch.testing.assert_close(params, expected, rtol=0, atol=1e-11)


def test_two_models_of_a_client_have_optimizers_of_their_own():
    """With momentum 0.5 and a gradient of 1: both move by 1 and 1.5, however their steps alternate."""
    own, local = task(), replace(SGD, steps=2, lr=1.0, momentum=0.5)
    steps = own.train_stepwise(Rng(0), local)
    one, other = torch.zeros(2, 6, own.layout.size, dtype=torch.float64)
    ones = torch.ones(6, own.layout.trainable, dtype=torch.float64)
    for step in range(2):
        steps.apply_gradient(one, ones.clone(), step)
        steps.apply_gradient(other, ones.clone(), step, track=1)
    assert torch.equal(one, -2.5 * torch.ones_like(one))
    assert torch.equal(other, one)


@pytest.mark.parametrize(
    "chosen", [[0, 1, 2], [3, 4, 5], [0, 7, 14]], ids=["first", "inside", "apart"]
)
@pytest.mark.parametrize(
    "local", [SGD, replace(LOCALS["adam"], lr_schedule=None)], ids=["sgd", "adam"]
)
def test_only_some_parameters_move(chosen, local):
    """The others keep their bits; those that move do so by PyTorch's own optimizer with a mask on the gradient."""
    own, local = task(), replace(local, epochs=1, batch_size=12, drop_last=False)
    only = torch.zeros(own.layout.trainable, dtype=torch.bool)
    only[chosen] = True
    start = own.initial_models(Rng(0)).clone()
    params, steps = start.clone(), own.train_stepwise(Rng(0), replace(local, steps=3), only=only)
    inner = start.clone().requires_grad_()
    kind = torch.optim.Adam if local.optimizer == "adam" else torch.optim.SGD
    theirs = kind([inner], lr=local.lr)
    for step in range(3):
        gradient = steps.compute_gradient(params, step)
        inner.grad = torch.where(only, gradient, 0)
        theirs.step()
        steps.apply_gradient(params, gradient, step)
    assert torch.equal(params[:, ~only], start[:, ~only])
    assert bool((params[:, only] != start[:, only]).all())
    torch.testing.assert_close(params, inner.detach(), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_state_that_is_kept_between_rounds_goes_on():
    """Steps of a part too: two rounds of one step are two steps of one optimizer."""
    local = replace(SGD, steps=1, lr=1.0, momentum=0.5, persistent_client_optimizer=True)
    only = torch.zeros(15, dtype=torch.bool)
    only[[2, 9]] = True
    own = task()
    moments, params = (
        own.trainer.init_optimizer_state(local),
        torch.zeros(6, 15, dtype=torch.float64),
    )
    for _ in range(2):
        steps = own.train_stepwise(Rng(0), local, optimizer=moments, only=only)
        steps.apply_gradient(params, torch.ones(6, 15, dtype=torch.float64), 0)
        steps.finish(params)
        moments = steps.optimizer
    assert torch.equal(params, torch.where(only, -2.5, 0.0).double().expand(6, -1))
    assert moments.taken.flatten().tolist() == [2] * 6
    check_method(
        Apfl(adaptive=True),
        settings=tiny_settings(local=replace(local, steps=None, lr=0.1)),
        relabel=False,
    )


def test_samples_of_all_gradients_count_and_a_lost_model_is_told():
    """Batches of 4, 4, 3 and the like, each asked for twice; client 1 becomes NaN."""
    own = task()
    steps, params = (
        own.train_stepwise(Rng(0), replace(SGD, epochs=1, drop_last=False)),
        own.initial_models(Rng(0)).clone(),
    )
    params[1] = torch.inf
    for step in [*range(steps.num_steps)] * 2:
        steps.compute_gradient(params, step)
    report = steps.finish(params)
    assert report["train_samples"].tolist() == [24, 22, 14, 10, 6, 4]
    assert report["diverged"].tolist() == [False, True, False, False, False, False]
    assert own.trainer.totals.seconds > 0


def test_an_optimizer_by_import_path_is_refused():
    """It steps on a module of its own."""
    with pytest.raises(
        ConfigError,
        match=r"'torch\.optim:NAdam' is not known here; this method takes its steps itself",
    ):
        task("loop").train_stepwise(Rng(0), LocalTraining(optimizer="torch.optim:NAdam"))
