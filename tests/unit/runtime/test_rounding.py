"""Rounding is no alarm of the check of the translation, however large it is in a net, and a fault is one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.engine.optim import LocalTraining
from coterie.engine.task import Task
from coterie.errors import TranslationError
from coterie.functional.losses import LOSSES
from coterie.methods.fedavg import FedAvg
from coterie.rng import Rng
from coterie.runtime._plain import PlainModule
from coterie.runtime.rounding import OtherForms, Rounding, find_distance, find_scales
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.runtime.translation import check_translation

BATCH = 8


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.last = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.last(self.b(torch.relu(self.norm(self.a(x))))))


class Last(nn.Module):
    def forward(self, x):
        return x[0][:, -1]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attend = nn.MultiheadAttention(12, 3, batch_first=True)
        self.last = nn.Linear(12, 4)

    def forward(self, x):
        y = self.norm(x)
        return self.last((x + self.attend(y, y, y, need_weights=False)[0]).mean(1))


def head(channels):
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4)


def cnn():
    """The gradient of the second convolution's bias is a sum of 3,200 numbers that are nearly alike."""
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, nn.Conv2d(8, 16, 3), nn.ReLU(), *head(16))


def resnet():
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, Residual(8), Residual(8), *head(8))


def conv1d():
    first = nn.Conv1d(4, 8, 5), nn.BatchNorm1d(8), nn.ReLU()
    last = nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4)
    return nn.Sequential(*first, nn.Conv1d(8, 8, 5), nn.ReLU(), *last)


def deep(norm):
    def make():
        layers, width = list[nn.Module](), 10
        for _ in range(6):
            layers += [nn.Linear(width, 24), norm(24), nn.ReLU()]
            width = 24
        return nn.Sequential(*layers, nn.Linear(24, 4))

    return make


NETS = {
    "cnn": (cnn, (3, 24, 24)),
    "resnet": (resnet, (3, 24, 24)),
    "conv1d": (conv1d, (4, 400)),
    "deep": (deep(nn.Identity), (10,)),
    "deep and normalized": (deep(nn.BatchNorm1d), (10,)),
    "normalized first": (
        lambda: nn.Sequential(nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4)),
        (10,),
    ),
    "gru": (
        lambda: nn.Sequential(nn.GRU(6, 16, batch_first=True), Last(), nn.Linear(16, 4)),
        (12, 6),
    ),
    "attention": (lambda: nn.Sequential(nn.Linear(6, 12), Attention()), (12, 6)),
}
KINDS = {
    "usual": lambda x: x,
    "large": lambda x: x * 1e3,
    "small": lambda x: x * 1e-3,
    "offset": lambda x: x - 100,  # which a normalization subtracts again
}


def make_data(net, kind="usual", seed=0, dtype="float32"):
    stream = np.random.default_rng(seed)
    x = KINDS[kind](stream.normal(size=(60, *NETS[net][1]))).astype(dtype)
    return coterie.from_arrays(x, stream.integers(0, 4, 60), clients=np.arange(60) // 20)


def build(net, data, seed=0, engine="loop", dtype: Any = "float32") -> Task:
    with Rng(seed).temporary_torch_seed("test"):
        module = NETS[net][0]()
    local = LocalTraining(batch_size=BATCH)
    settings = Settings(engine=engine, rounds=1, local=local, dtype=dtype)
    return make_task(data, FedAvg(), module, settings)


def check(task, data, seed=0):
    return check_translation(task, data, LocalTraining(batch_size=BATCH), Rng(seed))


@pytest.mark.parametrize(("net", "kind", "seed"), [("cnn", "usual", 0), ("resnet", "offset", 1)])
def test_nets_whose_rounding_is_large_give_no_alarm(net, kind, seed):
    data = make_data(net, kind, seed)
    assert "optimizer" in check(build(net, data, seed), data, seed).compared


WITH_ENGINES = [
    # vmap has no rule for a GRU, and falls back on the loop with a warning.
    (net, engine)
    for net in NETS
    for engine in ("loop", "vmap")
    if (net, engine) != ("gru", "vmap")
]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("net", "engine"), WITH_ENGINES)
def test_ordinary_nets_give_no_alarm(net, kind, engine, dtype):
    give_no_alarm(net, kind, engine, dtype, range(3 if dtype == "float32" else 1))


def give_no_alarm(net, kind, engine, dtype, seeds):
    for seed in seeds:
        data = make_data(net, kind, seed, dtype)
        found = check(build(net, data, seed, engine, dtype), data, seed)
        assert {"gradient", "training loss", "optimizer"} <= set(found.compared)


@pytest.mark.slow
@pytest.mark.parametrize(("net", "engine"), WITH_ENGINES)
def test_nor_do_they_with_more_seeds(net, engine):
    for kind in KINDS:
        give_no_alarm(net, kind, engine, "float32", range(3, 10))


@pytest.mark.slow
@pytest.mark.parametrize("net", ["cnn", "resnet", "deep and normalized", "gru"])
def test_ordinary_nets_give_no_alarm_in_native_programs(net):
    for seed in range(5):
        for kind in KINDS:
            data = make_data(net, kind, seed)
            task = build(net, data, seed, "compiled")
            assert task.engine.name == "compiled"
            check(task, data, seed)


def wrap_gradients(monkeypatch, task, change):
    """Change the gradients of an engine where they alone are asked for."""
    train = type(task.engine).train

    def wrong(self, rows, work, block):
        losses = train(self, rows, work, block)
        if work.moments is not None and not work.local.lr:
            change(work.moments)
        return losses

    monkeypatch.setattr(type(task.engine), "train", wrong)


FAULTS = {
    "a thousandth of all gradients": lambda moments: moments.mul_(1.001),
    "a hundredth of some gradients": lambda moments: moments[..., -20:].mul_(1.01),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("net", "engine", "kind"),
    [
        ("cnn", "loop", "offset"),
        *(
            pytest.param(net, engine, kind, marks=pytest.mark.full)
            for net, engine in WITH_ENGINES
            for kind in KINDS
        ),
    ],
)
def test_a_fault_is_named_however_large_rounding_is(monkeypatch, net, engine, kind, fault):
    data = make_data(net, kind)
    task = build(net, data, engine=engine)
    wrap_gradients(monkeypatch, task, FAULTS[fault])
    with pytest.raises(TranslationError, match="gradient of"):
        check(task, data)


@pytest.mark.parametrize("net", ["cnn", pytest.param("resnet", marks=pytest.mark.full)])
def test_another_momentum_of_a_batch_normalization_is_named(net):
    data = make_data(net, "offset")
    task = build(net, data)
    module = task.model.make
    assert isinstance(module, nn.Module)
    for part in module.modules():  # the given module, which trains as it was a moment ago
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.101
    with pytest.raises(TranslationError, match=r"buffer .*running_"):
        check(task, data)


class Edge(nn.Module):
    """A ReLU that is shut in float32, where 1e8 + 1e-4 is 1e8, and open in float64."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.full((10,), 1e-4))

    def forward(self, x):
        return x + torch.relu((self.bias + 1e8) - 1e8)


def test_a_quantity_that_rounding_decides_is_said(monkeypatch):
    monkeypatch.setitem(NETS, "edge", (lambda: nn.Sequential(Edge(), nn.Linear(10, 4)), (10,)))
    data = make_data("edge")
    task = build("edge", data)
    assert not check(task, data).lines
    wrap_gradients(monkeypatch, task, lambda moments: moments[..., 0].add_(1e-4))
    (line,) = check(task, data).lines
    assert line.startswith("rounding moves the gradient of 0.bias so much")


# ---------------------------------------------------------------- how it is measured


def values(gradient, outputs=1.0):
    return {
        "gradient of a": torch.tensor([gradient]),
        "evaluation outputs": torch.tensor([outputs]),
    }


def make_plain(module, dtype=torch.float32):
    return PlainModule(module, LOSSES["cross-entropy"](), "cpu", dtype)


def test_distances_are_the_largest_of_all_runs_and_of_one_quantity():
    rounding = Rounding()
    assert rounding.explain("gradient of a") == 0
    rounding.add([values(1.0), values(2.0)], [values(1.0), values(2.25)])
    rounding.add([values(1.0)], [values(1.125)])
    assert rounding.explain("gradient of a") == 8 * 0.25
    assert rounding.explain("evaluation outputs") == 0


def test_what_is_not_finite_or_beyond_a_share_of_the_scale_is_no_rounding():
    rounding = Rounding()
    rounding.add([values(1.0)], [values(float("nan"))])
    rounding.add([values(float("inf"))], [values(1.0)])
    rounding.add([values(1.0)], [values(1.5)], 0.1)
    assert not rounding.sizes.get("gradient of a")
    rounding.add([values(1.0)], [values(1.0625)], 0.1)
    assert rounding.sizes["gradient of a"] == 0.0625


def test_a_scale_is_the_largest_entry_and_a_gradients_a_tenth_of_the_largest_ones():
    scales = find_scales({
        "gradient of a": torch.tensor([-5.0, 2.0]), "gradient of b": torch.tensor([1e-7]),
        "training loss": torch.tensor(0.25), "evaluation loss": torch.tensor(4.0),
        "buffer c": torch.tensor([0.5]), "evaluation outputs": torch.zeros(2),
    })  # fmt: skip
    assert scales == pytest.approx({
        "gradient of a": 5.0, "gradient of b": 0.5, "training loss": 1.0, "evaluation loss": 4.0,
        "buffer c": 0.5, "evaluation outputs": 1e-30,
    })  # fmt: skip
    assert find_distance(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])) == 2
    assert find_distance(torch.tensor([torch.nan]), torch.tensor([1.0])) == float("inf")


def measure(plain, channels_last=False, limit=1e-5, found=None):
    """Measure the distance of the outputs of a module at 1/3, and return it."""
    x = torch.full((1, 1, 1, 1), 1 / 3, dtype=torch.float64)

    def run(form):
        with torch.no_grad():
            return [{"evaluation outputs": form.module(x.to(form.dtype))}]

    rounding = Rounding()
    list(OtherForms(plain, channels_last).measure(rounding, found or run(plain), run, limit))
    return rounding.sizes.get("evaluation outputs")


class Half(nn.Module):
    """In float64 it returns something else, or refuses."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(1, 2, 2, 2))

    def forward(self, x):
        wide = x.dtype == torch.float64
        if wide and self.kind == "refuses":
            raise RuntimeError("float32 alone")
        last = self.weight.is_contiguous(memory_format=torch.channels_last)
        if last and not self.weight.is_contiguous():
            x = x * {"turned": 1.5, "a little": 1 + 1 / 16}.get(self.kind, 1)
        return x * (2 if wide and self.kind == "other" else 1)


def test_a_module_is_measured_against_itself_in_float64():
    third = abs(float(torch.tensor(1 / 3)) - 1 / 3)
    assert measure(make_plain(Half("same"))) == pytest.approx(third)
    assert third > 0


@pytest.mark.parametrize("kind", ["refuses", "other"])
def test_a_module_that_refuses_float64_or_is_another_one_there_is_not_measured_by_it(kind):
    assert not measure(make_plain(Half(kind)))


def test_channels_last_is_measured_unless_pytorch_is_wrong_there():
    """oneDNN has written beyond its memory with channels last: that is no rounding."""
    exact = measure(make_plain(Half("same")))
    for kind, size in (("a little", 1 / 3 / 16), ("turned", exact)):
        found = measure(make_plain(Half(kind)), channels_last=True)
        assert found == pytest.approx(size, rel=1e-3)
        assert measure(make_plain(Half(kind))) == exact


def test_there_is_nothing_wider_than_float64():
    assert not measure(make_plain(Half("same").double(), torch.float64))


def test_what_the_layers_of_a_module_return_is_moved_by_a_unit():
    """Of two layers in a row by at most one each; by the same numbers again the next time."""
    plain = make_plain(nn.Sequential(Half("refuses"), Half("refuses")))
    found = measure(plain)
    assert found is not None
    assert 0 < found <= 2 * 2.0**-22 / 3 * 1.01 + 2.0**-25  # and what float32 rounds of it
    assert measure(plain) == found
