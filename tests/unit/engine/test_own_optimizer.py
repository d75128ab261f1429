"""Optimizers by import path: those that fit train on the loop engine, the others are refused."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.engine import LoopEngine, make_engine
from coterie.engine._base import cross_entropy
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.optim import LocalTraining, RowOptimizer
from coterie.engine.options import Workload
from coterie.errors import ConfigError
from coterie.methods.fedavg import FedAvg
from coterie.models.layout import Layout
from coterie.rng import Rng
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

# ragged batches; the last client has none
LENGTHS = torch.tensor([[7, 7, 4, 3], [5, 7, 7, 0], [0, 0, 0, 0]])
RATES = torch.tensor(
    [[0.02, 0.03, 0.01, 0.005], [0.04, 0.0, 0.02, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64
)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("NAdam", {"momentum_decay": 0.01}),
        ("RAdam", {}),
        ("Adamax", {"betas": [0.8, 0.9]}),
        ("Rprop", {}),
        ("ASGD", {}),
    ],
)
def test_any_elementwise_class_of_torch_optim_trains_on_the_loop_engine(kind, options):
    """Each client with a fresh one, at the rate of each step."""
    with Rng(0).temporary_torch_seed("module"):
        module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    stream = torch.Generator().manual_seed(5)
    x = torch.randn(40, 5, generator=stream, dtype=torch.float64)
    data = RawSamples(x, torch.randint(0, 3, (40,), generator=stream), torch.float64)
    layout = Layout(module, torch.float64)
    rows = layout.flatten_module(module) + 0.1 * torch.randn(
        3, layout.size, generator=stream, dtype=torch.float64
    )
    local = LocalTraining(optimizer=f"torch.optim:{kind}", lr=0.02, optimizer_options=options)
    local.check_imports()
    found = rows.clone()
    work = TrainingWork(
        data, torch.randint(0, 40, (3, 4, 7), generator=stream), LENGTHS, local, rates=RATES
    )
    LoopEngine(layout, cross_entropy).train(found, work, 1)
    made = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    for client in range(3):
        own = copy.deepcopy(module)
        with torch.no_grad():
            for key, value in layout.split_rows(rows[client]).items():
                dict(own.named_parameters())[key].copy_(value)
        optimizer = getattr(torch.optim, kind)(own.parameters(), lr=0.02, **made)
        for step, size in enumerate(LENGTHS[client].tolist()):
            if size:
                optimizer.param_groups[0]["lr"] = float(RATES[client, step])
                places = work.sample_indices[client, step, :size]
                optimizer.zero_grad()
                functional.cross_entropy(
                    own(work.samples.x[places]), work.samples.y[places]
                ).backward()
                optimizer.step()
        torch.testing.assert_close(found[client], layout.flatten_module(own), rtol=0, atol=1e-12)


class Clipped(torch.optim.SGD):
    """The gradient of each tensor has length 1: not elementwise."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        (
            "torch.optim:Nadam",
            {},
            "optimizer 'torch.optim:Nadam': module 'torch.optim' has no attribute",
        ),
        ("no.such:Thing", {}, "optimizer 'no.such:Thing': there is no module 'no'"),
        ("math:sqrt", {}, "expected a class that extends torch.optim.Optimizer"),
        (
            "torch.optim:NAdam",
            {"beta": 1},
            "cannot be made with lr and optimizer_options = {'beta': 1}",
        ),
        ("torch.optim:LBFGS", {}, "expected one that needs no closure"),
        ("torch.optim:SparseAdam", {}, "and takes dense gradients"),
        ("torch.optim:Adafactor", {}, "does not treat every parameter alone"),
        (f"{__name__}:Clipped", {}, "does not treat every parameter alone"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_before_the_first_round(path, options, said):
    local = LocalTraining(optimizer=path, optimizer_options=options or None)
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        make_task(tiny_federation(), FedAvg(), "linear", tiny_settings(local=local))
    assert "\n" not in str(error.value)


def test_auto_takes_the_loop_engine_for_it_and_says_why():
    local = LocalTraining(optimizer=torch.optim.NAdam, batch_size=5)
    assert local.optimizer == "torch.optim.nadam:NAdam"
    task = make_task(tiny_federation(), FedAvg(), "linear", tiny_settings(local=local))
    assert task.engine.reason == (
        "loop, one client after another: the optimizer torch.optim.nadam:NAdam has no faster program here"
    )
    for engine in ("vmap", "compiled"):
        with pytest.raises(
            ConfigError, match=f"trains one client after another; found engine = '{engine}'"
        ):
            make_task(
                tiny_federation(), FedAvg(), "linear", tiny_settings(local=local, engine=engine)
            )
    layout = Layout(nn.Linear(2, 2), torch.float32)
    x, y = torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)
    assert (
        make_engine(
            "loop", layout, cross_entropy, x, y, Workload(custom_optimizer=local.custom_optimizer)
        ).name
        == "loop"
    )
    with pytest.raises(ConfigError, match="expected engine = 'loop'"):
        RowOptimizer(local, torch.zeros(1, 1))


def test_a_run_goes_on_with_an_optimizer_of_its_own(tmp_path):
    """Resumed after two rounds, the run ends as if it had not been interrupted."""
    local = LocalTraining(
        optimizer="torch.optim:NAdam", batch_size=5, optimizer_options={"momentum_decay": 0.01}
    )

    def run(folder: str, rounds: int, resume: bool = False):
        settings = tiny_settings(rounds=rounds, local=local)
        return simulate(
            tiny_federation(),
            FedAvg(),
            model="linear",
            settings=settings,
            folder=tmp_path / folder,
            resume=resume,
        )

    run("parts", 2)
    assert torch.equal(run("parts", 3, resume=True).params, run("whole", 3).params)
