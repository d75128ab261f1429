"""The step of an optimizer as one kernel of Triton, against torch.optim in double precision.

Without a CUDA device Triton interprets its kernels here (conftest.py), a program after the other; its
compiler still makes machine code of them.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from coterie.engine import optim
from coterie.engine.optim import LocalTraining, RowOptimizer

pytest.importorskip("triton", reason="no Triton: it is for Linux")

from coterie.engine.kernels import update
from coterie.engine.kernels.update import update_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, SIZE, STEPS, RATE = 3, 1030, 4, 0.02  # two programs a client
CASES = {
    "sgd": {},
    "sgd, decay": {"weight_decay": 0.3},
    "sgd, damped": {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05},
    "sgd, momentum": {"momentum": 0.8},
    "sgd, nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
    "adam": {},
    "adam, set": {"betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.05},
    "adam, forgetful": {"betas": (0.2, 0.95)},
    "adam, without memory": {"betas": (0.0, 0.0)},
    "adamw": {},
    "adamw, set": {"betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.3},
}
NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
EPS = torch.finfo(torch.float32).eps


def settings_of(name: str) -> LocalTraining:
    return LocalTraining(optimizer=name.partition(",")[0], lr=RATE, **CASES[name])


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def by_torch(name: str, start: Tensor, gradients: list[Tensor], rates: list[float]) -> Tensor:
    """Return each client's parameters after steps of torch.optim in double precision."""
    rows = []
    for client, rate in enumerate(rates):
        row = nn.Parameter(start[client].double())
        kind = getattr(torch.optim, NAMES[name.partition(",")[0]])
        optimizer = kind([row], lr=rate, **CASES[name])
        for gradient in gradients:
            row.grad = gradient[client].double()
            optimizer.step()
        rows.append(row.detach())
    return torch.stack(rows)


def rounding(start: Tensor, gradients: list[Tensor], rate: float) -> float:
    """Return how far float32 may be from double precision after all steps.

    A step rounds the parameters once or twice, by eps times their size each. What it adds is at most the rate
    times 5 times the largest gradient, or for Adam the rate times a quotient that 1 / sqrt(1 - beta2) = 32
    bounds; either is of ten operations, whose roundings momentum carries on for 1 / (1 - 0.9) steps.
    """
    largest = float(torch.stack(gradients).abs().max())
    moved = rate * max(5 * largest, 32.0)
    return len(gradients) * EPS * (2 * float(start.abs().max()) + 10 * moved)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_torch_optim(name):
    local = settings_of(name)
    start = numbers(CLIENTS, SIZE, seed=0)
    gradients = [numbers(CLIENTS, SIZE, seed=step) for step in range(1, STEPS + 1)]
    # Parameters and moments are parts of wider rows, which must stay as they are.
    wide = torch.cat([start, torch.full((CLIENTS, 3), 7.0, device=DEVICE)], 1)
    memory = torch.full((CLIENTS, local.num_moments, SIZE + 2), 7.0, device=DEVICE)
    memory[:, :, :SIZE] = 0
    for number, gradient in enumerate(gradients, 1):
        moments = list(memory[:, :, :SIZE].unbind(1))
        before = gradient.clone()
        update_rows(
            local.optimizer, local.optimizer_arguments, wide[:, :SIZE], gradient, moments, RATE, number
        )  # fmt: skip
        assert torch.equal(gradient, before)
    wanted = by_torch(name, start, gradients, [RATE] * CLIENTS)
    found = wide[:, :SIZE].double()
    assert float((found - wanted).abs().max()) <= rounding(start, gradients, RATE)
    assert float((found - start).abs().max()) > RATE / 2
    assert bool((wide[:, SIZE:] == 7).all())
    assert bool((memory[:, :, SIZE:] == 7).all())


@pytest.mark.parametrize("name", CASES)
def test_each_client_has_its_own_rate_and_number_of_steps(name):
    """Clients that took other numbers of steps before, with other rates, as single clients do."""
    local = settings_of(name)
    start, gradient = numbers(CLIENTS, SIZE, seed=0), numbers(CLIENTS, SIZE, seed=9)
    moments = [numbers(CLIENTS, SIZE, seed=5 + number).abs() for number in range(local.num_moments)]
    rates, counts = [0.01, 0.02, 0.04], [1, 5, 900]
    together, remembered = start.clone(), [one.clone() for one in moments]
    arguments = local.optimizer_arguments
    each = (torch.tensor(rates).double()[:, None], torch.tensor(counts).double()[:, None])
    update_rows(
        local.optimizer,
        arguments,
        together,
        gradient,
        remembered,
        *(one.to(DEVICE) for one in each),
    )
    for client in range(CLIENTS):
        only = slice(client, client + 1)
        alone, own = start[only].clone(), [one[only].clone() for one in moments]
        update_rows(
            local.optimizer, arguments, alone, gradient[only], own, rates[client], counts[client]
        )
        # A rate is rounded to float32 on another way.
        torch.testing.assert_close(together[only], alone, rtol=2 * EPS, atol=RATE * 32 * EPS)
        for one, other in zip(remembered, own, strict=True):
            assert torch.equal(one[only], other)
    # The same with the operations of PyTorch.
    rows, kept = start.clone(), [one.clone() for one in moments]
    optimizer = RowOptimizer(local, rows)
    optimizer.state = kept
    optimizer._step_by_operations(rows, gradient.clone(), *(one.to(DEVICE) for one in each))
    torch.testing.assert_close(together, rows, rtol=4 * EPS, atol=RATE * 320 * EPS)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("sgd")])
@pytest.mark.parametrize("each", [False, True])
def test_sgd_ends_with_the_bits_of_the_operations_it_replaces(name, each):
    local = settings_of(name)
    rows = numbers(CLIENTS, SIZE, seed=0)
    fused, by_operations = rows.clone(), rows.clone()
    optimizers = RowOptimizer(local, fused), RowOptimizer(local, by_operations)
    rate = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64).to(DEVICE) if each else 0.1
    for number in range(1, STEPS + 1):
        gradient = numbers(CLIENTS, SIZE, seed=number)
        update_rows(
            "sgd", local.optimizer_arguments, fused, gradient, optimizers[0].state, rate, number
        )
        optimizers[1]._step_by_operations(by_operations, gradient.clone(), rate, number)
    assert torch.equal(fused, by_operations)
    assert all(map(torch.equal, optimizers[0].state, optimizers[1].state))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_is_not_finite_stays_where_it_is(optimizer):
    """A client that diverged has no effect on the others, and an infinite weight is not made a NaN by a decay of 0."""
    local = LocalTraining(optimizer=optimizer, lr=0.1, weight_decay=0.0)
    rows, gradient = numbers(CLIENTS, SIZE, seed=0), numbers(CLIENTS, SIZE, seed=1)
    rows[1, 3], gradient[1, 4] = torch.inf, torch.nan
    optimizer_of_rows = RowOptimizer(local, rows)
    update_rows(
        optimizer, local.optimizer_arguments, rows, gradient, optimizer_of_rows.state, 0.1, 1
    )
    assert rows[1, 3] == torch.inf
    assert (~rows.isfinite()).nonzero().tolist() == [[1, 3], [1, 4]]


def test_no_clients_and_no_parameters_are_no_work():
    arguments = LocalTraining(optimizer="sgd").optimizer_arguments
    for shape in ((0, 5), (2, 0)):
        update_rows("sgd", arguments, torch.zeros(shape), torch.zeros(shape), [], 0.1, 1)


# ---------------------------------------------------------------------- where it is used


@pytest.fixture
def on_gpu(monkeypatch):
    """Rows count as a GPU's; what was found before is forgotten."""
    monkeypatch.setattr(optim, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(optim, "_FUSED", {})


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_rows_is_the_kernels(name, each, monkeypatch):
    local, called = settings_of(name), []
    monkeypatch.setattr(
        update, "update_rows", lambda *given: (called.append(given[0]), update_rows(*given))
    )
    rate = torch.full((CLIENTS, 1), 0.05, dtype=torch.float64).to(DEVICE) if each else None
    rows = numbers(CLIENTS, SIZE, seed=0)
    other = rows.clone()
    for number in (1, 2):
        gradient = numbers(CLIENTS, SIZE, seed=number)
        if number == 1:
            one, two = RowOptimizer(local, rows), RowOptimizer(local, other)
        one.step(rows, gradient.clone(), number, rate)
        two._step_by_operations(other, gradient, RATE if rate is None else rate, number)
    # Two steps of the trial, and two of these.
    assert called == [local.optimizer] * 4
    torch.testing.assert_close(rows, other, rtol=4 * EPS, atol=0.05 * 320 * EPS)


def fail_to_compile(*_: object) -> None:
    raise RuntimeError("Failed to find C compiler.\nmore")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda *_: None, "it computes another step"),
        (fail_to_compile, "RuntimeError: Failed to find C compiler."),
    ],
)
def test_a_kernel_that_fails_or_is_wrong_is_not_used_and_said_once(fault, why, monkeypatch):
    monkeypatch.setattr(update, "update_rows", fault)
    local = LocalTraining(optimizer="adam", lr=0.1)
    rows = numbers(CLIENTS, SIZE, seed=0)
    other, gradient = rows.clone(), numbers(CLIENTS, SIZE, seed=1)
    with pytest.warns(UserWarning, match=f"take the steps of 'adam'.*{why}"):
        RowOptimizer(local, rows).step(rows, gradient.clone(), 1)
    RowOptimizer(local, rows).step(rows, gradient.clone(), 1)  # a second warning would be an error
    for _ in range(2):
        RowOptimizer(local, other)._step_by_operations(other, gradient.clone(), 0.1, 1)
    assert torch.equal(rows, other)


@pytest.mark.usefixtures("on_gpu")
def test_without_triton_nothing_is_said(monkeypatch, recwarn):
    monkeypatch.setitem(sys.modules, "coterie.engine.kernels.update", None)
    rows = numbers(CLIENTS, SIZE, seed=0)
    RowOptimizer(LocalTraining(lr=0.1), rows).step(rows, rows.clone(), 1)
    assert not recwarn.list


def test_other_optimizers_types_and_devices_take_pytorchs_operations(monkeypatch):
    rows = torch.zeros(2, 3)
    for kind in ("rmsprop", "adagrad"):
        assert optim.find_fused_update(LocalTraining(optimizer=kind), rows, 0.1, 1) is None
    # Its rows would be on a GPU.
    monkeypatch.setattr(optim, "_is_on_gpu", lambda _: True)
    assert optim.find_fused_update(LocalTraining(), rows.double(), 0.1, 1) is None
    assert optim.find_fused_update(LocalTraining(), torch.zeros(3, 2).T, 0.1, 1) is None
    monkeypatch.undo()
    assert optim.find_fused_update(LocalTraining(), rows, 0.1, 1) is None


# ---------------------------------------------------------------------- the compiler

_COMPILE = """
import itertools, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from coterie.engine.kernels.rules import LAUNCH
from coterie.engine.kernels.update import _update

flags = "ADAM", "EACH", "SHRINK", "DECAY", "PROX", "MOMENTUM", "NESTEROV", "NEAR"
for chosen in ("ADAM NEAR EACH SHRINK", "ADAM DECAY", "MOMENTUM NESTEROV DECAY EACH", ""):
    fixed = {flag: flag in chosen.split() for flag in flags} | {"BLOCK": 1024}
    pointers = dict.fromkeys(("rows", "grads", "first", "second", "numbers"), "*fp32")
    whole = dict.fromkeys(("row_stride", "grad_stride", "first_stride", "second_stride", "size", "pieces"), "i32")
    kinds = dict.fromkeys(_update.arg_names, "fp32") | pointers | whole | dict.fromkeys(fixed, "constexpr")
    source = ASTSource(_update, signature=kinds, constexprs=fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH)
    text = made.asm["ptx"]
    assert "st.global" in text and made.asm["cubin"]
    assert not re.search(r"\\bfma\\.rn", text), "a product and a sum are rounded once"
    print(bool(re.search(r"sqrt\\.rn\\.f32", text)), bool(re.search(r"sqrt\\.approx", text)))
"""


def test_the_compiler_makes_machine_code_that_rounds_each_operation(tmp_path):
    """For an H100, which need not be there: no fused multiply-add, and exact roots."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"] * 2 + ["False", "False"] * 2
