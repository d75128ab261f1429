"""The program of a module in Triton against plain PyTorch in double precision: one module, one optimizer a client.

Without a CUDA device Triton interprets the programs here (conftest.py); its compiler makes machine code of some.
"""

import os
import subprocess
import sys

import pytest
import torch
from tests.kernels import DEVICE, EPS, assert_steps_are_those_of_torch, numbers
from torch import Tensor, nn
from torch.nn import functional

from coterie.engine._base import cross_entropy, squared_error
from coterie.engine.native.trace import NotTraceableError
from coterie.engine.optim import LocalTraining
from coterie.models.layout import Layout

pytest.importorskip("triton", reason="no Triton: it is for Linux")

from coterie.engine.kernels.lower import KernelLowering, split_index
from coterie.engine.kernels.programs import ClientProgram, can_run_on

# Entries that a mask leaves out are computed as of zeros.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


class Reused(nn.Module):
    """One layer twice, a residual, a parameter that nothing uses, a frozen layer, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 9).requires_grad_(False)
        self.inner, self.head = nn.Linear(9, 9, bias=False), nn.Linear(9, 3)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.linspace(0.5, 2, 9), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.frozen(x)) * self.scale
        hidden = hidden + torch.tanh(self.inner(hidden))
        return self.head(functional.silu(self.inner(hidden)))


class Steps(nn.Module):
    """Layers on an axis of time, whose mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(2, 5), nn.LayerNorm((3, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x.reshape(-1, 3, 2))))
        return self.head(
            hidden.mean(1) + hidden.amax(1) + hidden.softmax(2).transpose(1, 2)[..., 0]
        )


class Scaled(nn.Module):
    """A weight whose gradient reads another parameter, which moves in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.linspace(0.5, 2, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


class Chosen(nn.Module):
    """Entries that two numbers choose, neither of which is 0: 1 and 2 have no bit in common."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.logical_and(x.round(), (2 * x).round())
        return self.head(x * torch.logical_or(both, (x > 0.2) & (x < 0.3)))


NETS = {
    "scaled": Scaled,
    "chosen": Chosen,
    # wider than a tile of a product in every direction
    "mlp": lambda: nn.Sequential(nn.Linear(6, 70), nn.ReLU(), nn.Linear(70, 3)),
    "no bias": lambda: nn.Linear(6, 3, bias=False),
    "layer norm": lambda: nn.Sequential(
        nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)
    ),
    "plain norm": lambda: nn.Sequential(
        nn.Linear(6, 7), nn.LayerNorm(7, elementwise_affine=False), nn.GELU(), nn.Linear(7, 3)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(6, 7), nn.BatchNorm1d(7), nn.LeakyReLU(), nn.Linear(7, 3)
    ),
    "reused": Reused,
    "steps": Steps,
}


@pytest.fixture(scope="module")
def programs():
    made = {}

    def program_of(name, loss=cross_entropy):
        if (name, loss) not in made:
            with torch.random.fork_rng():
                torch.random.manual_seed(1)
                net = NETS[name]()
            layout = Layout(net)
            x, y = numbers(5, 6, seed=1), torch.tensor([0, 1, 2, 0, 1])
            if loss is squared_error:
                y = numbers(5, 3, seed=2)
            made[name, loss] = net, layout, ClientProgram(layout, loss, x, y)
        return made[name, loss]

    return program_of


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("size", [2, 17])
def test_forward_backward_and_update_are_those_of_pytorch(programs, name, size):
    """By plain SGD, where a step is the gradient: each client from its own weights, on its own batch."""
    local = LocalTraining(optimizer="sgd", lr=0.5)
    assert_steps_are_those_of_torch(programs(name), local, size, (6,))


def test_one_program_takes_batches_of_any_size(programs):
    local = LocalTraining(optimizer="sgd", lr=0.5)
    for size in (1, 16, 70):
        assert_steps_are_those_of_torch(programs("mlp"), local, size, (6,), steps=1)


def test_larger_tiles_of_more_threads_come_to_the_same(programs):
    net, layout, program = programs("mlp")
    before = program.text
    program.set_warps(8)
    assert program.text != before
    try:
        assert_steps_are_those_of_torch(
            (net, layout, program), LocalTraining(optimizer="sgd", lr=0.5), 17, (6,), steps=1
        )
    finally:
        program.set_warps(4)
    assert program.text == before


def test_numbers_are_predicted_by_the_squared_error(programs):
    local = LocalTraining(optimizer="sgd", lr=0.1)
    made = programs("layer norm", squared_error)
    assert_steps_are_those_of_torch(made, local, 5, (6,), loss=squared_error)


@pytest.mark.parametrize("prox", [0.0, 0.3])
@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "sgd", "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.05},
        {"optimizer": "sgd", "momentum": 0.8, "nesterov": True},
        # An eps that bounds what rounding does to the quotient of small gradients.
        {"optimizer": "adam", "eps": 0.1, "weight_decay": 0.05},
        {"optimizer": "adamw", "eps": 0.1, "betas": (0.4, 0.9), "weight_decay": 0.3},
    ],
    ids=["damped", "nesterov", "adam", "adamw"],
)
def test_optimizers_decay_and_the_proximal_term_are_those_of_pytorch(programs, given, prox):
    local = LocalTraining(lr=0.05, **given)
    assert_steps_are_those_of_torch(programs("reused"), local, 5, (6,), prox=prox, steps=3)


def test_clients_have_rates_and_counts_of_their_own(programs):
    _, layout, program = programs("mlp")
    local = LocalTraining(optimizer="adamw", lr=0.1)
    rows = layout.own_values().repeat(3, 1).to(DEVICE)
    moments = torch.rand(3, 2, layout.trainable, generator=torch.Generator().manual_seed(0))
    x, y = numbers(3, 4, 6, seed=1), torch.tensor([[0, 1, 2, 0]] * 3)
    rates, counts = [0.1, 0.0, 0.3], [1, 5, 9]
    members = torch.arange(3)
    together, kept = rows.clone(), moments.clone().to(DEVICE)
    each = [torch.tensor(one).double()[:, None].to(DEVICE) for one in (rates, counts)]
    given = [one.to(DEVICE) for one in (members, x, y)]
    program.step(together, kept, *given, local, *each)
    for client in range(3):
        only = slice(client, client + 1)
        alone, own = rows.clone(), moments.clone().to(DEVICE)
        some = [one[only] for one in given]
        program.step(alone, own, *some, local, rates[client], counts[client])
        torch.testing.assert_close(together[client], alone[client], rtol=4 * EPS, atol=32 * EPS)
        assert torch.equal(kept[client], own[client])
    assert torch.equal(together[1], rows[1])


# ---------------------------------------------------------------------- refusals


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(x).sort(1).values


class OwnDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.poisson(x.abs()))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)[:, self.order]


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Sorted(), "the operation sort is not known"),
        (Table(), "a table of whole numbers"),
        (OwnDraws(), "draws random numbers of its own"),
        (nn.Linear(6, 3).double(), "numbers of type float64"),
    ],
)
def test_what_no_kernel_does_is_refused_by_name(net, why):
    layout = Layout(net, next(net.parameters()).dtype)
    x = numbers(4, 6, seed=0).to(layout.dtype)
    with pytest.raises(NotTraceableError, match=why):
        ClientProgram(layout, cross_entropy, x, torch.tensor([0, 1, 2, 0]))


def test_kernels_run_on_a_gpu_and_interpreted_ones_anywhere():
    assert can_run_on(torch.device("cuda"))
    assert can_run_on(torch.device("cpu")) == (os.environ.get("TRITON_INTERPRET") == "1")


def test_the_index_of_an_entry_is_that_of_every_axis():
    for number in range(24):
        found = [
            eval(text, {"i": number}) for text in split_index("({})".format, "i", (2, 3, 1, 4))
        ]
        place = torch.arange(24).reshape(2, 3, 1, 4) == number
        assert found == place.nonzero()[0].tolist()


def test_each_operation_of_a_table_is_known():
    assert all(map(KernelLowering.knows, ("neg", "mul", "eq", "logical_or", "mm")))
    assert not KernelLowering.knows("sort")


# ---------------------------------------------------------------------- the compiler

_COMPILE = """
import re, sys, torch, triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from coterie.engine._base import cross_entropy
from coterie.engine.kernels.programs import ClientProgram
from coterie.engine.kernels.rules import LAUNCH
from coterie.models.layout import Layout

net = nn.Sequential(
    nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
    nn.Conv2d(8, 20, 2, stride=2, groups=4), nn.GELU(), nn.AvgPool2d(2, 1, 1), nn.Flatten(), nn.Dropout(0.2),
    nn.LayerNorm(80), nn.Linear(80, 3),
)
small = nn.Sequential(nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(128, 3))
x, y = torch.randn(4, 36, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
for precision in ("full", "tf32", "bf16"):
    program = ClientProgram(Layout(net if precision == "full" else small), cross_entropy, x, y, precision)
    program.set_warps({"full": 4, "tf32": 8, "bf16": 4}[precision])
    kernel = program._kernel
    kinds, fixed = {}, {name: name in ("ADAM", "NEAR") for name in kernel.arg_names if name.isupper()}
    fixed |= program.flags
    for name in kernel.arg_names:
        kinds[name] = "fp32"
        if name in fixed:
            kinds[name] = "constexpr"
        elif name in ("y", "members", "keys"):
            kinds[name] = "*i64"
        elif name.endswith(("stride", "size")) or name == "n":
            kinds[name] = "i32"
        elif name in ("rows", "anchor", "first", "second", "numbers", "x", "losses", "scratch", "constants"):
            kinds[name] = "*fp32"
    source = ASTSource(kernel, signature=kinds, constexprs=fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**LAUNCH, "num_warps": program.warps})
    assert made.asm["cubin"]
    print(precision, *sorted(set(re.findall(r"mma\\.sync\\S*?\\.f32\\.(\\w+)\\.", made.asm["ptx"]))))
"""


@pytest.mark.full
def test_the_compiler_makes_machine_code_with_the_products_that_were_asked_for(tmp_path):
    """For an H100, which need not be there: tensor cores of TF32 or bfloat16, or none in full precision."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["full", "tf32 tf32", "bf16 bf16"]
