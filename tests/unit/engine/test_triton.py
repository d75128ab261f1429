"""The engine of kernels in Triton: it trains as the loop engine does, says what it cannot train, and is chosen by a trial."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import coterie
from coterie.engine import TritonEngine, VmapEngine, _choice, _triton, make_engine
from coterie.engine._base import cross_entropy
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.options import Workload
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError, ModelError
from coterie.models.layout import Layout
from coterie.rng import Rng
from coterie.testing import run_grouped, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

pytest.importorskip("triton", reason="no Triton: it is for Linux")

from coterie.engine.kernels import programs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Entries that a mask leaves out are computed as of zeros.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]
LOCALS = {
    "sgd": LocalTraining(epochs=2, batch_size=5, optimizer="sgd", lr=0.1, momentum=0.5),
    "adam": LocalTraining(epochs=2, batch_size=5, lr=0.01, eps=1e-3),
    "adamw, schedule": LocalTraining(
        steps=7, batch_size=5, optimizer="adamw", lr=0.02, eps=1e-3,
        lr_schedule={"kind": "linear", "over": "steps"},
    ),
    # no kernel: the step of this engine, with gradients of vmap
    "rmsprop": LocalTraining(batch_size=5, optimizer="rmsprop", lr=0.01, eps=1e-2),
    "private": LocalTraining(
        batch_size=5, optimizer="sgd", lr=0.1,
        dp={"clip": 1.0, "noise_multiplier": 0.5, "delta": 1e-5},
    ),
}  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))


def small(features, outputs):
    return nn.Sequential(nn.Linear(*features, 5), nn.Tanh(), nn.Linear(5, outputs))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(1).values


def convolutional() -> nn.Module:
    """Draws in the first and in the last layer: each has draws of its own."""
    return nn.Sequential(
        nn.Dropout(0.25), nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 5, 2, padding=1), nn.ReLU(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(5 * 2 * 2, 3),
    )  # fmt: skip


def task(engine="triton", model=net, counts=(12, 11, 7, 5, 3, 2), **options):
    """A task of clients with unequal numbers of training samples, three of them with noisy inputs."""
    federation = tiny_federation()
    split = federation.split.clone()
    for client, count in enumerate(counts):
        split[client, count:12] = -1
    noise = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.0, 0.1], dtype=torch.float64)
    federation = replace(federation, split=split, noise=noise)
    return build_task(
        federation.host(range(6)),
        model,
        engine=engine,
        dtype=torch.float32,
        device=DEVICE,
        **options,
    )


@pytest.fixture(scope="module")
def tasks():
    return {engine: task(engine) for engine in ("triton", "loop")}


@pytest.mark.parametrize("name", LOCALS)
def test_a_round_of_training_is_that_of_the_loop_engine(tasks, name, monkeypatch):
    """Batches of unequal sizes, noise, rates of each step; clients with fewer steps stop."""
    taken = []
    step = programs.ClientProgram.step
    monkeypatch.setattr(
        programs.ClientProgram, "step", lambda *given: taken.append(1) or step(*given)
    )
    found = {}
    for engine, own in tasks.items():
        start = own.initial_models(Rng(0)).clone()
        found[engine] = own.train(start, Rng(0).at_round(2), LOCALS[name])
    assert bool(taken) == (name not in ("rmsprop", "private"))
    mine, theirs = found["triton"], found["loop"]
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=2e-5)
    assert float((mine[0] - tasks["loop"].initial_models(Rng(0))).abs().max()) > 1e-2
    assert mine[1].keys() == theirs[1].keys()
    for key, value in mine[1].items():
        torch.testing.assert_close(value, theirs[1][key], rtol=0, atol=2e-5, equal_nan=True)


def test_convolutions_and_dropout_of_unequal_batches_are_the_loop_engines():
    """Each client and step draws other entries, which are those that the loop engine draws."""
    found, local = {}, LOCALS["adam"]
    for engine in ("triton", "loop"):
        own = task(engine, convolutional)
        start = own.initial_models(Rng(0)).clone()
        found[engine] = own.train(start, Rng(0).at_round(1), local)[0]
    torch.testing.assert_close(found["triton"], found["loop"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_proximal_term_and_an_optimizer_that_is_kept_are_the_loop_engines(tasks, optimizer):
    local = LocalTraining(
        batch_size=5, optimizer=optimizer, lr=0.05, persistent_client_optimizer=True,
        **({"momentum": 0.5} if optimizer == "sgd" else {"eps": 1e-3}),
    )  # fmt: skip
    found = {}
    for engine, own in tasks.items():
        rows = own.initial_models(Rng(0)).clone()
        anchor = own.initial_models(Rng(1)).clone() + 0.3
        state = own.trainer.init_optimizer_state(local)
        for number in range(2):
            rows, _, state = own.train(
                rows, Rng(0).at_round(number), local, optimizer=state, anchor=anchor, prox=0.4
            )
        found[engine] = rows, state
    (mine, own_state), (theirs, other_state) = found["triton"], found["loop"]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-5)
    torch.testing.assert_close(own_state.values, other_state.values, rtol=0, atol=5e-5)
    assert torch.equal(own_state.taken, other_state.taken)


def test_running_statistics_are_the_loop_engines_and_one_sample_is_not_normalized():
    local, found = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1), {}
    for engine in ("triton", "loop"):
        own = task(engine, normalized, counts=(12, 12, 7, 5, 3, 2))
        found[engine] = own.train(own.initial_models(Rng(0)).clone(), Rng(0).at_round(0), local)[0]
    torch.testing.assert_close(found["triton"], found["loop"], rtol=0, atol=2e-5)
    alone = task("triton", normalized, counts=(12, 11, 7, 5, 3, 2))
    with pytest.raises(ModelError, match="more than 1 value per channel"):
        alone.train(alone.initial_models(Rng(0)).clone(), Rng(0).at_round(0), local)


@pytest.mark.option("Settings.engine", "triton")
def test_hosts_of_any_clients_end_with_the_same_bytes(monkeypatch):
    """On a GPU too: the program of a client knows no other client."""
    taken, step = [], programs.ClientProgram.step
    monkeypatch.setattr(
        programs.ClientProgram, "step", lambda *given: taken.append(1) or step(*given)
    )
    data, method = tiny_federation(4), coterie.Random(num_peers=2)
    settings = tiny_settings(
        rounds=2, engine="triton", dtype="float32", device=DEVICE, evaluate="final"
    )
    model = f"{__name__}:small"
    whole = coterie.simulate(data, method, model=model, settings=settings, seed=3)
    assert taken
    for groups in ([[0, 1], [2], [3]],):
        found = run_grouped(data, method, groups, model=model, settings=settings)
        assert torch.equal(found, whole.params)


# ---------------------------------------------------------------------- refusals


def given(module=None):
    layout = Layout(module or net()).to(DEVICE)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return layout, cross_entropy, x, (torch.arange(8) % 3).to(DEVICE)


def test_what_it_cannot_train_is_said_in_a_line(monkeypatch):
    def refused(why, module=None):
        with pytest.raises(ModelError, match=f"^engine = 'triton' cannot train the module: {why}"):
            make_engine("triton", *given(module))

    refused("the operation sort is not known in '1'", nn.Sequential(nn.Linear(4, 3), Sorted()))
    with monkeypatch.context() as patch:
        patch.setattr(programs, "can_run_on", lambda _: False)
        refused(f"its kernels run on a CUDA device, not on {DEVICE}; take engine = 'auto'$")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "coterie.engine.kernels.programs", None)
        refused("this build of PyTorch has no Triton")
    with pytest.raises(ConfigError, match="unknown engine 'tritn'; did you mean 'triton'"):
        make_engine("tritn", *given())


def test_a_kernel_that_is_wrong_or_fails_is_refused(monkeypatch):
    step = programs.ClientProgram.step

    def slightly_wrong(self, rows, *rest):
        before = rows.clone()
        losses = step(self, rows, *rest)
        rows.copy_(before + 1.05 * (rows - before))
        return losses

    def fail(*_):
        raise RuntimeError("Failed to find C compiler.\nmore")

    for fault, why in (
        (slightly_wrong, "its kernel does not compute what it does"),
        (fail, r"its kernel fails \(RuntimeError: Failed to find C compiler.\)"),
    ):
        monkeypatch.setattr(programs.ClientProgram, "step", fault)
        with pytest.raises(ModelError, match=why):
            make_engine("triton", *given())


# ---------------------------------------------------------------------- choice

WORK = Workload(train_samples=1e6, batch_size=4, clients=3)


@pytest.fixture
def times(monkeypatch):
    """Seconds of each engine's trial, by name and warps; tensors count as a GPU's."""
    found = {("triton", 4): 0.2, ("triton", 8): 0.2, "vmap": 1.0}

    def measure(engine, rows, work):
        assert rows.shape[0] == work.batch_sizes.shape[0] == 3
        assert work.batch_sizes.unique().tolist() == [4]
        engine.train(rows.clone(), work, 3)
        return found["vmap"] if engine.name == "vmap" else found["triton", engine.program.warps]

    monkeypatch.setattr(_choice, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(_choice, "_why_one_by_one", lambda *_: None)
    monkeypatch.setattr(_choice, "_why_not_compile", lambda *_: ("programs run on a CPU", None))
    monkeypatch.setattr(_triton, "_measure", measure)
    return found


def test_auto_takes_the_kernel_where_a_trial_says_that_it_is_faster(times):
    times["triton", 8] = 0.1
    engine = make_engine("auto", *given(), WORK)
    assert isinstance(engine, TritonEngine)
    assert engine.program.warps == 8
    assert engine.reason.startswith("triton, a kernel of the whole step")
    times["triton", 8] = times["triton", 4] = 1.5
    engine = make_engine("auto", *given(), WORK)
    assert isinstance(engine, VmapEngine)
    said = "in a trial the kernel took 1.5e+03 ms for 4 steps of 3 clients, and vmap 1e+03 ms"
    assert said in engine.reason


def test_a_kernel_that_fails_or_is_wrong_in_a_trial_is_not_taken(times, monkeypatch):
    """The kernel for more threads has other tiles: what the first one computed says little of it."""
    times["triton", 8] = 0.1
    step = programs.ClientProgram.step

    def fail(self, rows, *rest):
        if self.warps == 8:
            raise RuntimeError("out of resource: shared memory")
        return step(self, rows, *rest)

    def move(self, rows, *rest):
        before = rows.clone()
        losses = step(self, rows, *rest)
        if self.warps == 8:
            rows.copy_(before + 1.05 * (rows - before))
        return losses

    for fault in (fail, move):
        monkeypatch.setattr(programs.ClientProgram, "step", fault)
        engine = make_engine("auto", *given(), WORK)
        assert isinstance(engine, TritonEngine)
        assert engine.program.warps == 4


def test_auto_says_why_a_module_has_no_kernel_and_does_not_try_for_little_work(times, recwarn):
    engine = make_engine("auto", *given(nn.Sequential(nn.Linear(4, 3), Sorted())), WORK)
    assert "the module has no kernel: the operation sort is not known" in engine.reason
    engine = make_engine("auto", *given(), replace(WORK, train_samples=100.0))
    assert "too little work to compile a kernel" in engine.reason
    assert make_engine("vmap", *given(), WORK).name == "vmap"
    assert not recwarn.list


def test_a_trial_is_timed_after_a_first_training(monkeypatch):
    clock = iter([0, 100, 1, 4, 10, 12, 20, 29])
    monkeypatch.setattr(_triton, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    trained = []
    layout, objective, x, y = given()
    engine = VmapEngine(layout, objective)
    monkeypatch.setattr(engine, "train", lambda rows, work, block: trained.append(block))
    work = TrainingWork(
        RawSamples(x, y, x.dtype), torch.zeros(3, 1, 2, dtype=torch.int64),
        torch.full((3, 1), 2), LocalTraining(),
    )  # fmt: skip
    assert _triton._measure(engine, torch.zeros(3, 2), work) == 3
    assert trained == [3] * 4
