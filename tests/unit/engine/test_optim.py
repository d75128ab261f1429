"""Optimizers over rows of parameters, in every engine, against torch.optim's own classes."""

import copy
import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.engine import CompiledEngine, Engine, LoopEngine, VmapEngine
from coterie.engine._base import cross_entropy
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.optim import OPTIMIZERS, LocalTraining, RowOptimizer
from coterie.errors import ConfigError
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.models.layout import Layout
from coterie.rng import Rng
from coterie.testing import check_method, run_grouped, run_method, tiny_federation, tiny_settings

NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
CASES = {
    "sgd": {},
    "sgd, damped": {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05},
    "sgd, nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
    "adam": {},
    "adam, set": {"betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.05},
    "adamw": {},
    "adamw, set": {"betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    "rmsprop": {},
    "rmsprop, set": {
        "alpha": 0.8,
        "eps": 1e-3,
        "momentum": 0.6,
        "centered": True,
        "weight_decay": 0.05,
    },
    "rmsprop, centered": {"centered": True},
    "rmsprop, momentum": {"momentum": 0.6},
    "adagrad": {},
    "adagrad, set": {
        "lr_decay": 0.3,
        "initial_accumulator_value": 0.2,
        "eps": 1e-3,
        "weight_decay": 0.05,
    },
}
ALONE = {
    "momentum": 0.8,
    "dampening": 0.3,
    "weight_decay": 0.05,
    "lr_decay": 0.3,
    "initial_accumulator_value": 0.2,
}
# Each argument without the others, since some count only next to another one.
CASES |= {
    f"{kind}, {name} alone": {name: value}
    for kind, arguments in OPTIMIZERS.items()
    for name, value in ALONE.items()
    if name in arguments
}
# ragged batches; the last client has none
LENGTHS = torch.tensor([[7, 7, 4, 3], [5, 7, 7, 0], [0, 0, 0, 0]])
RATES = torch.tensor(
    [[0.02, 0.03, 0.01, 0.005], [0.04, 0.0, 0.02, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
)
STATES = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "adagrad": ("sum",),
}


def module_of_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def settings_of(name: str, **changes) -> LocalTraining:
    """The local training of a case: every argument that it does not set has PyTorch's default."""
    return LocalTraining(optimizer=name.partition(",")[0], lr=0.02, **CASES[name], **changes)


def optimizer_of(name: str, parameters) -> torch.optim.Optimizer:
    """The same by PyTorch."""
    return getattr(torch.optim, NAMES[name.partition(",")[0]])(parameters, lr=0.02, **CASES[name])


def problem(make_module) -> tuple[nn.Module, Layout, torch.Tensor, TrainingWork]:
    """A module, its layout, the models of three clients, and their work in ragged batches."""
    with Rng(0).temporary_torch_seed("module"):
        module = make_module().double()
    stream = torch.Generator().manual_seed(5)
    x = torch.randn(40, 5, generator=stream, dtype=torch.float64)
    data = RawSamples(x, torch.randint(0, 3, (40,), generator=stream), torch.float64)
    layout = Layout(module, torch.float64)
    row = layout.flatten_module(module)
    rows = row + 0.1 * torch.randn(3, len(row), generator=stream, dtype=torch.float64)
    return (
        module,
        layout,
        rows,
        TrainingWork(
            data, torch.randint(0, 40, (3, 4, 7), generator=stream), LENGTHS, settings_of("sgd")
        ),
    )


def by_torch(module, layout, row, work: TrainingWork, client: int, name: str, rates=None):
    """Train one client as the documentation of PyTorch says; return its row and the optimizer."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for key, value in layout.split_rows(row).items():
            dict(module.named_parameters())[key].copy_(value)
    optimizer = optimizer_of(name, module.parameters())
    for step, size in enumerate(work.batch_sizes[client].tolist()):
        if not size:
            continue
        if rates is not None:
            optimizer.param_groups[0]["lr"] = float(rates[client, step])
        places = work.sample_indices[client, step, :size]
        optimizer.zero_grad()
        functional.cross_entropy(module(work.samples.x[places]), work.samples.y[places]).backward()
        optimizer.step()
    return layout.flatten_module(module), optimizer


def engine_of(kind: str, layout: Layout, work: TrainingWork) -> Engine:
    if kind == "compiled":
        few = torch.arange(4)
        return CompiledEngine(
            layout,
            cross_entropy,
            work.samples.prepare_inputs(few),
            work.samples.prepare_targets(few),
        )
    return {"loop": LoopEngine, "vmap": VmapEngine}[kind](layout, cross_entropy)


@pytest.fixture(scope="module", params=["loop", "vmap", "compiled"])
def trained(request):
    """An engine with a problem."""
    module, layout, rows, work = problem(module_of_layers)
    return engine_of(request.param, layout, work), module, layout, rows, work


@pytest.mark.parametrize("name", CASES)
def test_every_engine_trains_as_torch_optim_does(trained, name):
    """Ragged batches, at one rate and at one of each step, to 1e-12."""
    engine, module, layout, rows, work = trained
    for rates in (None, RATES):
        found = rows.clone()
        engine.train(found, dataclasses.replace(work, local=settings_of(name), rates=rates), 3)
        for client in range(3):
            wanted = by_torch(module, layout, rows[client], work, client, name, rates)[0]
            torch.testing.assert_close(found[client], wanted, rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if settings_of(name).num_moments])
def test_what_an_optimizer_remembers_is_torch_optims_and_training_goes_on_from_it(trained, name):
    """Two steps, and the steps after them from their moments, are all steps by one optimizer."""
    engine, module, layout, rows, work = trained
    local = settings_of(name, persistent_client_optimizer=True)
    assert local.num_moments == len(
        moments_of(name, by_torch(module, layout, rows[0], work, 0, name)[1])
    )
    found, taken = rows.clone(), torch.zeros(3, dtype=torch.int64)
    moments = rows.new_full(
        (3, local.num_moments, layout.trainable), local.initial_accumulator_value
    )
    for steps in (slice(0, 2), slice(2, 4)):
        length = work.batch_sizes[:, steps]
        part = dataclasses.replace(
            work,
            local=local,
            sample_indices=work.sample_indices[:, steps].contiguous(),
            batch_sizes=length,
        )
        engine.train(
            found,
            dataclasses.replace(part, moments=moments, steps_taken=taken, rates=RATES[:, steps]),
            3,
        )
        taken = taken + (length > 0).sum(1)
    for client in range(2):
        wanted, optimizer = by_torch(module, layout, rows[client], work, client, name, RATES)
        torch.testing.assert_close(found[client], wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(moments[client], moments_of(name, optimizer), rtol=0, atol=1e-12)
    assert torch.equal(moments[2], torch.full_like(moments[2], local.initial_accumulator_value))


def moments_of(name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """What PyTorch's optimizer remembers, one row each."""
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    known = [key for key in STATES[name.partition(",")[0]] if states[0].get(key) is not None]
    return torch.stack([torch.cat([state[key].reshape(-1) for state in states]) for key in known])


@pytest.mark.parametrize("name", CASES)
def test_a_row_ends_with_the_same_bits_alone_and_beside_others(name):
    """Rates and steps taken of its own, in single precision."""
    stream = torch.Generator().manual_seed(0)
    local = settings_of(name)
    rows, taken = torch.randn(3, 37, generator=stream), torch.tensor([0, 4, 9])
    moments = 0.1 * torch.rand(3, local.num_moments, 37, generator=stream)
    moments[:, :1] += 1  # a mean square is no less than the square of the mean
    alone, lr = rows[1:2].clone(), torch.tensor([[0.1], [0.02], [0.3]], dtype=torch.float64)
    whole = RowOptimizer(local, rows, moments.clone(), taken)
    one = RowOptimizer(local, alone, moments[1:2].clone(), taken[1:2])
    for step in range(1, 6):
        grads = torch.randn(3, 37, generator=stream)
        one.step(alone, grads[1:2].clone(), step, lr[1:2])
        whole.step(rows, grads, step, lr)
    assert torch.equal(rows[1], alone[0])


@pytest.mark.option("LocalTraining.optimizer", "adam", "sgd", "adamw", "rmsprop", "adagrad")
def test_two_steps_of_each_optimizer_by_hand():
    """Gradients 2 and -1, lr 0.1, from 1.

    SGD: -0.2, then +0.1. Adam: m = 0.2 and v = 0.004 are 2 and 4 without their bias: a step of 0.1.
    Then m = 0.08 and v = 0.004996 are 0.08 / 0.19 and 0.004996 / 0.001999. AdamW: the same after
    shrinking by 0.1 * 0.01. RMSprop: mean squares 0.04 and 0.0496. Adagrad: sums of squares 4 and
    5.
    """
    second = 0.1 * (0.08 / 0.19) / (0.004996 / 0.001999) ** 0.5
    for optimizer, expected in (
        ("sgd", [0.8, 0.9]),
        ("adam", [0.9, 0.9 - second]),
        ("adamw", [0.999 - 0.1, 0.999 * (0.999 - 0.1) - second]),
        ("rmsprop", [1 - 0.2 / 0.2, 0.1 / 0.0496**0.5]),
        ("adagrad", [0.9, 0.9 + 0.1 / 5**0.5]),
    ):
        local, row, found = (
            LocalTraining(optimizer=optimizer, lr=0.1),
            torch.ones(1, 1, dtype=torch.float64),
            [],
        )
        rows = RowOptimizer(local, row)
        for number, gradient in enumerate((2.0, -1.0), start=1):
            rows.step(row, torch.full((1, 1), gradient, dtype=torch.float64), number)
            found.append(float(row))
        assert found == pytest.approx(expected, abs=1e-7)


@pytest.mark.option("LocalTraining.nesterov", False, True)
def test_nesterov_looks_one_momentum_ahead():
    """Gradients 1 and 1 at momentum 0.5 and rate 1: momenta 1 and 1.5; ahead, steps 1.5 and 1.75."""
    for ahead, expected in ((False, [-1.0, -2.5]), (True, [-1.5, -3.25])):
        local = LocalTraining(optimizer="sgd", lr=1.0, momentum=0.5, nesterov=ahead)
        row, found = torch.zeros(1, 1, dtype=torch.float64), []
        rows = RowOptimizer(local, row)
        for number in (1, 2):
            rows.step(row, torch.ones(1, 1, dtype=torch.float64), number)
            found.append(float(row))
        assert found == expected


@pytest.mark.option("LocalTraining.centered", False, True)
def test_a_centered_mean_square_is_a_variance():
    """Gradient 2 at alpha 0.75: mean square 1, mean 0.5, variance 0.75."""
    for centered, expected in ((False, -2.0), (True, -2 / 0.75**0.5)):
        local = LocalTraining(optimizer="rmsprop", lr=1.0, alpha=0.75, eps=0.0, centered=centered)
        row = torch.zeros(1, 1, dtype=torch.float64)
        RowOptimizer(local, row).step(row, torch.full((1, 1), 2.0, dtype=torch.float64), 1)
        assert float(row) == pytest.approx(expected, abs=1e-15)


def test_defaults_are_those_of_torch_optim():
    """Except the rate, which is 0.001 for all."""
    for optimizer, kind in NAMES.items():
        theirs = getattr(torch.optim, kind)([nn.Parameter(torch.zeros(1))]).defaults
        arguments = LocalTraining(optimizer=optimizer).optimizer_arguments
        assert arguments == {name: theirs[name] for name in arguments}
        assert set(arguments) == set(OPTIMIZERS[optimizer])
        assert LocalTraining(optimizer=optimizer).lr == 0.001
    assert (
        dataclasses.replace(LocalTraining(), optimizer="adamw").optimizer_arguments["weight_decay"]
        == 0.01
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": "adma"}, "unknown optimizer 'adma'; did you mean 'adam'"),
        (
            {"momentum": 0.5},
            "momentum is 0.5; optimizer = 'adam' has no such setting: leave it out, or take one of",
        ),
        ({"optimizer": "sgd", "eps": 1e-3}, "eps is 0.001; optimizer = 'sgd' has no such setting"),
        (
            {"optimizer": "adagrad", "betas": (0.5, 0.5)},
            "betas is (0.5, 0.5); optimizer = 'adagrad' has no such",
        ),
        ({"betas": (0.5,)}, "betas is (0.5,); expected two numbers"),
        (
            {"betas": (0.5, 1)},
            "betas is (0.5, 1); expected a list of numbers, each 0 or more and below 1",
        ),
        (
            {"optimizer": "sgd", "nesterov": True},
            "nesterov is True; expected momentum above 0 and dampening 0 with it",
        ),
        ({"optimizer_options": {"eps": 1}}, "optimizer_options is {'eps': 1}; expected none"),
        (
            {"optimizer": "torch.optim:NAdam", "eps": 1.0},
            "no such setting: put it into optimizer_options",
        ),
        (
            {"optimizer": "torch.optim:NAdam", "persistent_client_optimizer": True},
            "persistent_client_optimizer is True; expected one of sgd, adam, adamw, rmsprop, adagrad with it",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(wrong, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        LocalTraining(**wrong)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize(
    "name", ["adamw, set", "rmsprop, set", "adagrad, set", "torch.optim:NAdam"]
)
def test_who_hosts_whom_changes_no_byte(name):
    """Three hosts against one, two trainings a round; on the loop engine, byte for byte."""
    local = (
        LocalTraining(optimizer=name, batch_size=5)
        if ":" in name
        else settings_of(name, batch_size=5)
    )
    local = dataclasses.replace(local, lr_schedule={"kind": "cosine"})
    federation, settings = tiny_federation(), tiny_settings(local=local, rounds=2, engine="loop")
    apart = run_grouped(federation, Ditto(), [[0, 4], [1, 2, 5], [3]], settings=settings)
    assert torch.equal(
        apart, run_method(Ditto(), federation=federation, settings=settings).state.params
    )


@pytest.mark.slow
def test_the_promises_of_methods_hold_with_kept_sums_of_squares():
    """Repeats, resumes with the same bytes, any grouping of hosts, cohorts: see `check_method`."""
    local = settings_of("adagrad, set", batch_size=5, persistent_client_optimizer=True)
    check_method(Ditto(), settings=tiny_settings(local=local), relabel=False)


def test_a_client_that_diverged_starts_again_from_the_first_sum_of_squares():
    federation = tiny_federation()
    federation.x[2] *= 1e200
    local = settings_of("adagrad, set", batch_size=5, persistent_client_optimizer=True)
    loop = run_method(
        FedAvg(), federation=federation, settings=tiny_settings(local=local, rounds=1)
    )
    moments = loop.state.moments
    assert moments is not None
    assert moments.taken.flatten().tolist() == [3, 3, 0, 3, 3, 3]
    assert torch.equal(moments.values[2], torch.full_like(moments.values[2], 0.2))


def test_an_identity_is_that_of_runs_from_before_there_were_more_optimizers():
    """The table that was hashed then, written out."""
    before = {
        "epochs": 1, "steps": None, "batch_size": 8, "optimizer": "adam", "lr": 1e-3, "momentum": 0.0,
        "weight_decay": 0.0, "drop_last": False, "augment": "none", "padding": 4,
    }  # fmt: skip
    assert LocalTraining().result_settings() == before
    assert LocalTraining(weight_decay=0.0).result_settings() == before
    kept = LocalTraining(persistent_client_optimizer=True).result_settings()
    assert kept == before | {"persistent_client_optimizer": True}
    assert LocalTraining(eps=1e-3).result_settings() == before | {"eps": 1e-3}
