"""The check of the translation names faults that are put in, and nothing else."""

import json
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.selection import first_only
from torch import nn
from torch.nn import functional

import coterie
from coterie.data.build import Split
from coterie.engine import _batches
from coterie.engine.client_model import ClientModel
from coterie.engine.optim import OPTIMIZERS, LocalTraining
from coterie.engine.task import Task
from coterie.errors import ModelError, TranslationError
from coterie.functional.losses import LOSSES
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.models.layout import NETS
from coterie.rng import Rng
from coterie.runtime import loop as loops
from coterie.runtime import models as stored
from coterie.runtime import translation
from coterie.runtime._plain import PlainOptimizer
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.runtime.translation import check_translation

ENGINES = ("loop", "vmap")


def federation(count=96, classes=3):
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=stream)
    return coterie.from_arrays(
        x, torch.arange(count) // 3 % classes, clients=[i % 3 for i in range(count)]
    )


DATA = federation()
LOCAL = LocalTraining(batch_size=16, lr=0.01)


def build(model, engine="loop", data=DATA, **changes) -> Task:
    settings = Settings(engine=engine, rounds=1, local=LOCAL, **changes)
    return make_task(data, FedAvg(), model, settings)


def check(task, data=DATA, local=LOCAL):
    return check_translation(task, data, local, Rng(0))


def stack(*middle: Callable[[], nn.Module], width=12):
    return lambda: nn.Sequential(
        nn.Linear(6, width), *(make() for make in middle), nn.Linear(width, 3)
    )


class Detached(nn.Module):
    def forward(self, x):
        return x.detach() if self.training else x


class Constant(nn.Module):
    """Dropout that has the same mask in every step."""

    def forward(self, x):
        keep = torch.arange(x.shape[1], device=x.device) % 2 == 0
        return x * keep * 2 if self.training else x


def relu(): return nn.ReLU()  # fmt: skip


def norm(**options): return lambda: nn.BatchNorm1d(12, **options)  # fmt: skip


def drop(p): return lambda: nn.Dropout(p)  # fmt: skip


WRONG = {
    "an activation": (stack(relu), stack(nn.GELU), "evaluation outputs.*in layer GELU '1'"),
    "a constant of a layer": (stack(norm()), stack(norm(eps=1e-3)), "evaluation outputs.*BatchNorm1d '1'"),
    "a statistic": (stack(norm()), stack(norm(momentum=0.2)), "buffer 1.running_"),
    "a gradient": (stack(relu, nn.Identity), stack(relu, Detached), "gradient of 0.weight"),
    "a share of dropout": (stack(relu, drop(0.2)), stack(relu, drop(0.5)), "gradient|loss"),
    "dropout that is left out": (stack(relu, nn.Identity), stack(relu, drop(0.5)), "gradient|loss"),
    "dropout that was not there": (stack(relu, drop(0.5)), stack(relu, nn.Identity), "training loss|gradient"),
    "dropout of one mask": (stack(relu, Constant), stack(relu, drop(0.5)), "gradient|loss"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", WRONG)
def test_an_engine_form_that_is_another_model_is_named(fault, engine):
    trains, given, words = WRONG[fault]
    task = build(trains, engine)
    wrong = replace(task, model=replace(task.model, make=given))
    assert check(task).compared
    with pytest.raises(TranslationError, match=words):
        check(wrong)


class ByType(nn.Module):
    """ReLU after every batch normalization, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.BatchNorm1d):
                x = torch.relu(x)
        return x


class Counter(nn.Module):
    """A count of steps, by which the output is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.last(x)


@pytest.mark.parametrize("model", [ByType, Counter])
def test_a_module_is_trained_as_it_is_or_the_check_says_what_differs(model):
    """Either the engines run these modules as they are, or a run of them is refused."""
    task, said = build(model), ""
    try:
        check(task)
    except TranslationError as error:
        said = str(error)
    if said:
        assert "layers.2" in said or "buffer seen" in said
        return
    plain = model()
    row = task.layout.flatten_module(plain)[None]
    x = DATA.x[0, :8]
    found = task.engine.forward(row, x[None], task.layout.zero_inputs(1))[0]
    assert torch.allclose(found, plain.eval()(x), atol=1e-6)


def wrap_training(monkeypatch, task, change):
    """Change what an engine's training returns or leaves."""
    kind = type(task.engine)
    train = kind.train

    def wrong(self, rows, work, block):
        before = rows.clone()
        losses = train(self, rows, work, block)
        return change(before, rows, work, losses)

    monkeypatch.setattr(kind, "train", wrong)


def mix_up_rows(_before, _rows, work, losses):
    if work.moments is not None and len(work.moments) > 1:
        work.moments.copy_(work.moments.flip(0))
    return losses


def drift(_before, rows, work, losses):
    if work.local.lr:
        rows[:, 0] += 1e-3
    return losses


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (mix_up_rows, "gradient of"),
        (drift, "step 1 of the optimizer adam: '0.weight'"),
        (lambda _b, _r, _w, losses: losses * 1.001, "training loss"),
    ],
    ids=["rows are mixed up", "the optimizer drifts", "the loss is another mean"],
)
def test_a_fault_of_an_engine_is_named(monkeypatch, engine, change, words):
    task = build(stack(relu), engine)
    wrap_training(monkeypatch, task, change)
    with pytest.raises(TranslationError, match=words):
        check(task)


def fail(*_given, **_more):
    raise ZeroDivisionError("no\nreason")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_is_put_to_the_side_that_raises_it(monkeypatch, engine):
    task = build(stack(relu), engine)
    with monkeypatch.context() as patch:
        patch.setattr(type(task.engine), "train", fail)
        with pytest.raises(TranslationError, match=f"^the {engine} engine raises Zero.*no"):
            check(task)
    with monkeypatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", fail)
        wrong = replace(task, model=replace(task.model, make=stack(relu)))
        with pytest.raises(TranslationError, match=r"^the module in plain PyTorch raises Zero"):
            check(wrong)
    monkeypatch.setattr(translation, "take_samples", fail)
    with pytest.raises(TranslationError, match=r"^the check of the translation raises Zero"):
        check(task)


def test_a_fault_of_evaluation_alone_is_named(monkeypatch):
    task = build(stack(relu))
    forward = type(task.engine).forward
    monkeypatch.setattr(
        type(task.engine), "forward", lambda self, *given: forward(self, *given) * 1.0001
    )
    with pytest.raises(TranslationError, match=r"evaluation (outputs|loss)"):
        check(task)


def test_two_swapped_labels_are_named():
    y = DATA.y.clone()
    places = (DATA.split[1] == 0).nonzero().flatten()
    place = torch.stack([places[y[1, places] == label][0] for label in (0, 1)])
    y[1, place] = y[1, place.flip(0)]
    with pytest.raises(
        TranslationError, match=r"targets of client 1, train samples.*2 that differ"
    ):
        check(build(stack(relu)), replace(DATA, y=y))


def test_a_label_of_a_test_set_is_named():
    test = DATA.tests[0]
    other = replace(test, y=(test.y + 1) % 3)
    with pytest.raises(TranslationError, match=r"targets of .*test set"):
        check(build(stack(relu)), replace(DATA, tests=(other, *DATA.tests[1:])))


def test_a_lost_sample_is_named():
    split = DATA.split.clone()
    place = int((split[2] == 0).nonzero()[0])
    split[2, place] = -1
    count = int((DATA.split[2] == 0).sum())
    task = build(stack(relu), data=replace(DATA, split=split))
    words = f"samples of client 2, train: {count - 1} are used, and the data have {count}"
    with pytest.raises(TranslationError, match=words):
        check(task)


def test_inputs_of_other_samples_are_named():
    with pytest.raises(TranslationError, match="inputs of"):
        check(build(stack(relu)), replace(DATA, x=DATA.x.flip(1)))


def test_a_lost_client_is_named():
    with pytest.raises(TranslationError, match="ids of clients: 2 train, and the data have 3"):
        check(build(stack(relu), data=DATA.host([0, 1])))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sample_that_no_batch_has_is_named(monkeypatch, engine):
    draw = _batches._draw_client_batches

    def lose_one(local, samples, stream):
        batches, last = draw(local, samples, stream)
        if len(batches) == 1:
            return batches, last
        return [batch.copy() for batch in batches[:-1]] + [
            batches[-1][:1].repeat(len(batches[-1]))
        ], last

    monkeypatch.setattr(_batches, "_draw_client_batches", lose_one)
    task = build(stack(relu), engine)
    with pytest.raises(TranslationError, match="batches: an epoch of"):
        check(task)


def test_weights_that_are_drawn_anew_are_named(monkeypatch):
    first = ClientModel.initial_models
    monkeypatch.setattr(ClientModel, "initial_models", lambda *given: first(*given) * 1.01)
    with pytest.raises(TranslationError, match=r"weights: '0.weight' differs by .* in round 0"):
        check(build(stack(relu)(), init="given"))


def test_a_factory_that_gives_other_weights_each_time_is_named():
    numbers = iter(range(100))

    def make():
        module = nn.Linear(6, 3)
        nn.init.constant_(module.weight, next(numbers) / 10)
        return module

    with pytest.raises(TranslationError, match="weights: 'weight' differs"):
        check(build(make))


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_an_export_that_is_another_model_is_named(monkeypatch, metric):
    evaluated = Settings(rounds=2, local=replace(LOCAL, lr=0.05), warmup_epochs=0)
    collect = stored.Models.model

    def turn(self, client, which="evaluated"):
        module = collect(self, client, which)
        with torch.no_grad():
            bias = list(module.parameters())[-1]
            bias.copy_(
                bias.roll(1) + torch.arange(3.0) * 10
                if metric == "accuracy"
                else bias + torch.arange(3.0) / 1e3
            )
        return module

    assert coterie.simulate(DATA, Local(), model=stack(relu), settings=evaluated).models is not None
    monkeypatch.setattr(stored.Models, "model", turn)
    with pytest.raises(TranslationError, match="taken home of client 0 has"):
        coterie.simulate(DATA, Local(), model=stack(relu), settings=evaluated)


HUGE = Settings(
    rounds=1, dtype="float64", warmup_epochs=0, evaluate="final",
    local=replace(LOCAL, optimizer="sgd", momentum=0.0, lr=1e60),
)  # fmt: skip


def test_weights_beyond_the_range_of_the_modules_type_are_a_line_and_no_error(tmp_path):
    """A float64 run that diverges to 1e60 has a finite loss; no module of float32 can have its weights."""
    run = coterie.simulate(DATA, Local(), model=stack(relu), settings=HUGE, folder=tmp_path / "r")
    assert run.metrics["value"].abs().max() > 1e40
    told = json.loads((tmp_path / "r" / "provenance.json").read_text())["check"]["home"]
    assert any("too large for the module's type (torch.float32)" in one for one in told["lines"])
    # A module of the run's own type takes them home.
    wide = coterie.simulate(DATA, Local(), model=lambda: stack(relu)().double(), settings=HUGE)
    assert all(one.isfinite().all() for one in wide.model(0).parameters())


def test_weights_that_an_export_makes_no_numbers_are_named(monkeypatch):
    collect = stored.Models.model

    def spoil(self, client, which="evaluated"):
        module = collect(self, client, which)
        with torch.no_grad():
            list(module.parameters())[-1].fill_(torch.nan)
        return module

    monkeypatch.setattr(stored.Models, "model", spoil)
    settings = Settings(rounds=1, local=LOCAL, warmup_epochs=0)
    with pytest.raises(TranslationError, match="taken home of client 0 has"):
        coterie.simulate(DATA, Local(), model=stack(relu), settings=settings)


# ---------------------------------------------------------------- no false alarm

IMAGES = coterie.from_arrays(
    torch.randint(
        0, 256, (120, 1, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    ),
    torch.arange(120) % 10,
    clients=[i % 3 for i in range(120)],
)
BUILT_IN = [name for name in NETS if name in ("cnn-b", "mlp-c", "mlp-bn", "linear")]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.full)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("net", BUILT_IN)
def test_built_in_networks_give_no_alarm(net, engine, dtype):
    assert check(build(net, engine, IMAGES, dtype=dtype), IMAGES).samples == 16


@pytest.mark.parametrize(("seconds", "samples"), [(0.012, 16), (0.013, 8), (0.025, 8), (0.026, 4)])
def test_a_slow_module_is_compared_on_fewer_samples(monkeypatch, seconds, samples):
    """Of 16 samples a step may take 0.05 s; what it takes is measured on 4 of them."""
    monkeypatch.setattr(
        translation, "_step_seconds", lambda plain, sample: seconds * (sample.x.shape[1] == 4)
    )
    assert check(build("cnn-b", "vmap", IMAGES), IMAGES).samples == samples


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fault_is_seen_on_the_few_samples_of_a_slow_module(monkeypatch, engine):
    monkeypatch.setattr(translation, "_step_seconds", lambda plain, sample: 1.0)
    task = build("cnn-b", engine, IMAGES)
    assert check(task, IMAGES).samples == 4
    wrap_training(monkeypatch, task, drift)
    with pytest.raises(TranslationError, match="differs by"):
        check(task, IMAGES)


@pytest.mark.full
@pytest.mark.parametrize("net", first_only(["mlp-bn", "cnn-b", "mlp-c", "linear"], slow=True))
def test_native_programs_of_built_in_networks_give_no_alarm(net):
    task = build(net, "compiled", IMAGES)
    assert task.engine.name == "compiled"
    assert check(task, IMAGES).engine == "compiled"


def targets_of(kind: str):
    """Targets and a module for a loss."""
    stream = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 4, (96, 5), generator=stream)
    numbers = torch.rand(96, 1, generator=stream) + 0.1
    either = torch.randint(0, 2, (96, 3), generator=stream).float()
    hidden = (nn.Linear(6, 8), nn.Tanh())
    maps = (nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 1))
    cases = {
        "binary": (torch.arange(96) % 2, (*hidden, nn.Linear(8, 1))),
        "multi-label": (either, (*hidden, nn.Linear(8, 3))),
        "tokens": (tokens, (nn.Linear(6, 20), nn.Unflatten(1, (5, 4)))),
        "causal-lm": (tokens, (nn.Linear(6, 20), nn.Unflatten(1, (5, 4)))),
        "segmentation": (torch.randint(0, 2, (96, 2, 3), generator=stream), maps),
        "dice": (torch.randint(0, 2, (96, 2, 3), generator=stream), maps),
        "quantile": (numbers, (*hidden, nn.Linear(8, 3))),
        "cox": (torch.stack([numbers[:, 0], torch.arange(96) % 2], 1), (*hidden, nn.Linear(8, 1))),
    }
    if LOSSES[kind].targets == "class":
        return torch.arange(96) % 3, (*hidden, nn.Linear(8, 3))
    return cases.get(kind, (numbers, (*hidden, nn.Linear(8, 1))))


@pytest.mark.parametrize("engine", ["loop", pytest.param("vmap", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_give_no_alarm(kind, engine):
    y, layers = targets_of(kind)
    stream = torch.Generator().manual_seed(2)
    data = coterie.from_arrays(
        torch.randn(96, 6, generator=stream), y, clients=[i % 3 for i in range(96)]
    )
    found = check(build(nn.Sequential(*layers), engine, data, loss=kind), data)
    assert {"training loss", "gradient", "evaluation loss"} <= set(found.compared)


@pytest.mark.parametrize("precision", ["bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_lower_precision_gives_no_alarm(engine, precision):
    assert check(build(stack(norm(), relu), engine, precision=precision)).compared


def test_private_training_is_compared_by_gradients_of_single_samples():
    local = replace(LOCAL, dp={"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5})
    task = make_task(DATA, FedAvg(), stack(relu), Settings(engine="vmap", local=local))
    found = check(task, local=local)
    assert "before clipping and noise" in found.lines[-1]
    # What the check trained is charged to nobody.
    assert task.trainer.totals.seconds == 0
    assert not any(value.numel() for value in task.trainer.totals.privacy.snapshot().values())


class Running(nn.Module):
    """A buffer that a step changes, and of which the outputs of the next step depend."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((12,), 0.5))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean += 0.3 * (x.mean(0) - self.mean)
        return x * (1 + self.mean)


class Watching(Running):
    """A buffer that a step changes, and of which training does not depend."""

    def forward(self, x):
        super().forward(x)
        return x if self.training else x * (1 + self.mean)


class Counting(nn.Module):
    """A buffer that counts batches, and on which the loss of the next one depends."""

    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen += 0.5
        return x * self.seen


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_depends_on_the_batch_before_gives_no_alarm(engine):
    """The second batch of an epoch then has another loss than the same samples in a first one."""
    assert "buffer" in check(build(stack(Counting, relu), engine)).compared


class FaintlyNormalized(nn.Module):
    """Normalized over the batch, and so small that losses of different batches are often alike."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x):
        return 0.003 * self.norm(x)


def test_halves_of_a_batch_whose_losses_are_alike_by_chance_give_no_alarm():
    """A third of these seeds have such halves, while batches of other samples differ by more."""
    for seed in range(12):
        with Rng(seed).temporary_torch_seed("test"):
            task = build(stack(relu, FaintlyNormalized)())
        assert "buffer" in check_translation(task, DATA, LOCAL, Rng(seed)).compared


class LeftOut(nn.Module):
    """A layer that a whole pass in training leaves out with a probability, as LayerDrop does."""

    def __init__(self, share):
        super().__init__()
        self.inner, self.share = nn.Linear(12, 12), share

    def forward(self, x):
        is_out = self.training and bool(torch.rand(()) < self.share)
        return x if is_out else x + torch.tanh(self.inner(x))


@pytest.mark.full
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_layer_that_is_left_out_of_whole_passes_gives_no_alarm(share):
    """Two passes are often alike, or differ in all: either way means over draws are compared."""
    task = build(stack(relu, lambda: LeftOut(share)))
    for seed in range(6):
        assert "random draws" in check_translation(task, DATA, LOCAL, Rng(seed)).compared


def test_a_layer_that_is_left_out_too_often_is_named():
    task = build(stack(relu, lambda: LeftOut(0.05)))
    wrong = replace(task, model=replace(task.model, make=stack(relu, lambda: LeftOut(0.95))))
    with pytest.raises(TranslationError, match="over 128 draws"):
        check(wrong)


class Unseeded(nn.Module):
    """Noise that is not PyTorch's, or a memory that is no buffer: no seed repeats it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.python, self.numpy = kind, random.Random(0), np.random.default_rng(0)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        if self.kind == "python":
            return x * self.python.random()
        if self.kind == "numpy":
            return x * torch.from_numpy(self.numpy.random(x.shape[-1])).to(x)
        if self.kind == "numpy in training" and self.training:
            return x * self.numpy.random()
        return x / (1 + 0.01 * self.passes) if self.kind == "memory" else x


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["python", "numpy", "numpy in training", "memory"])
def test_what_no_seed_repeats_is_refused(kind, engine):
    """On average it may be the given module; a second run of the same seed is another one."""
    task = build(stack(lambda: Unseeded(kind)), engine)
    with pytest.raises(
        ModelError, match=r"another when the same pass is repeated.*draw with torch"
    ):
        check(task)


class Deciding(nn.Module):
    """A choice by the values of a batch: of a sample alone it is another one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x):
        return self.inner(x) if float(x.detach().sum()) > 0 else x


def test_private_training_of_a_module_that_joins_samples_is_refused():
    """It is no fault of an engine, which the message would say of any other difference."""
    local = replace(LOCAL, dp={"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5})
    settings = Settings(engine="loop", local=local, dtype="float64")
    words = "samples alone have others than in a batch .* joins the samples of a batch"
    with pytest.raises(ModelError, match=words):
        check(make_task(DATA, FedAvg(), stack(Deciding), settings), local=local)


def test_wrong_gradients_of_single_samples_are_a_fault_of_the_engine(monkeypatch):
    local = replace(LOCAL, dp={"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5})
    task = make_task(DATA, FedAvg(), stack(relu), Settings(engine="loop", local=local))

    def double(_before, _rows, work, losses):
        if work.local.dp is not None and work.moments is not None:
            work.moments.mul_(2)
        return losses

    wrap_training(monkeypatch, task, double)
    with pytest.raises(TranslationError, match="gradient of"):
        check(task, local=local)


IMPORTED = ("NAdam", "RAdam", "Adamax", "Rprop", "ASGD", "Adadelta")


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *(f"torch.optim:{one}" for one in IMPORTED)])
def test_steps_from_changed_buffers_give_no_alarm_with_any_optimizer(optimizer):
    """The second step of an engine starts from the buffers that its first one left."""
    for engine in ENGINES[: 1 if ":" in optimizer else 2]:
        local = LocalTraining(optimizer=optimizer, lr=0.05, batch_size=16)
        data = make_task(DATA, FedAvg(), stack(Running, relu), Settings(engine=engine, local=local))
        assert check(data, local=local).compared["optimizer"] < 1e-3


def test_an_imported_optimizer_that_takes_other_steps_is_named(monkeypatch):
    local = LocalTraining(optimizer="torch.optim:NAdam", lr=0.05, batch_size=16)
    task = make_task(DATA, FedAvg(), stack(relu), Settings(engine="loop", local=local))
    wrap_training(monkeypatch, task, drift)
    with pytest.raises(TranslationError, match=r"optimizer torch.optim:NAdam: '0.weight'"):
        check(task, local=local)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (4, 3), (5, 5), (9, 9), (30, 2)])
@pytest.mark.parametrize("layer", [norm(), lambda: nn.GroupNorm(3, 12)], ids=["batch", "group"])
def test_clients_of_few_samples_give_no_alarm(layer, sizes):
    """Batches that a run makes, and no others, go through a normalization over them."""
    stream = torch.Generator().manual_seed(2)
    owners = [client for client, size in enumerate(sizes) for _ in range(size)]
    x = torch.randn(len(owners), 6, generator=stream)
    split = Split(validation_fraction=0.0)
    data = coterie.from_arrays(
        x, torch.arange(len(owners)) % 3, clients=owners, classes=3, split=split,
        test=(x[:2], torch.arange(2)),
    )  # fmt: skip
    local = LocalTraining(batch_size=8, drop_last=True)
    task = make_task(data, FedAvg(), stack(layer, relu), Settings(engine="loop", local=local))
    assert check(task, data, local).samples == min(8, *sizes)


def test_private_training_says_which_buffers_it_leaves():
    local = replace(LOCAL, dp={"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5})
    for engine in ENGINES:
        settings = Settings(engine=engine, local=local)
        task = make_task(DATA, FedAvg(), stack(Watching), settings)
        found = check(task, local=local)
        assert "private training leaves 1.mean as they are" in found.lines[-1]


def test_inputs_of_several_tensors_and_frozen_weights_give_no_alarm():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names, self.numbers = nn.Embedding(4, 5), nn.Linear(6, 5)
            self.last = nn.Linear(5, 3)
            self.numbers.weight.requires_grad_(False)

        def forward(self, numbers, codes):
            return self.last(torch.relu(self.names(codes[:, 0]) + self.numbers(numbers)))

    stream = torch.Generator().manual_seed(2)
    x = (torch.randn(96, 6, generator=stream), torch.randint(0, 4, (96, 1), generator=stream))
    data = coterie.from_arrays(x, torch.arange(96) % 3, clients=[i % 3 for i in range(96)])
    for engine in ENGINES:
        assert check(build(Two, engine, data), data).compared


# ---------------------------------------------------------------- in runs


def test_a_run_is_the_same_with_and_without_its_check(tmp_path):
    found = []
    for given in (True, False):
        settings = Settings(rounds=2, local=LOCAL, check=given)
        folder, model = tmp_path / str(given), stack(norm(), relu, drop(0.3))
        with Rng(4).temporary_torch_seed("test"):
            run = coterie.simulate(DATA, FedAvg(), model=model, settings=settings, folder=folder)
            state = torch.get_rng_state()
        told = json.loads((folder / "provenance.json").read_text())
        assert ("check" in told) is given
        files = {
            name: (folder / name).read_bytes()
            for name in ("checkpoint.safetensors", "metrics.parquet")
        }
        found.append((files, run.params, state))
    (files, params, state), (other, same, after) = found
    assert files == other
    assert torch.equal(params, same)
    assert torch.equal(state, after)
    assert (
        told["config_hash"]
        == json.loads((tmp_path / "True/provenance.json").read_text())["config_hash"]
    )


def test_a_run_is_checked_once_and_again_where_no_result_was_written(tmp_path, monkeypatch):
    calls = []

    def count(*given):
        calls.append(given)
        return check_translation(*given)

    monkeypatch.setattr(loops, "check_translation", count)

    def go(rounds, **more):
        settings = Settings(rounds=rounds, local=LOCAL, checkpoint_seconds=0, **more)
        return coterie.simulate(
            DATA, FedAvg(), model="linear", settings=settings, folder=tmp_path / "run", resume=True
        )

    class Killed(Exception):
        pass

    def kill(*_given):
        raise Killed

    monkeypatch.setattr(loops.Loop, "run_next_round", kill)
    with pytest.raises(Killed):
        go(2)
    monkeypatch.undo()
    monkeypatch.setattr(loops, "check_translation", count)
    go(2, check=False)
    assert len(calls) == 1
    go(3)
    assert len(calls) == 2
    go(4)
    assert len(calls) == 2
    told = json.loads((tmp_path / "run" / "provenance.json").read_text())["check"]
    assert told["home"]["clients"] == [0, 1, 2]
    assert told["engine"]


@pytest.mark.option("Settings.check", True, False)
def test_check_false_trains_what_differs(monkeypatch):
    monkeypatch.setattr(
        loops, "check_translation", lambda *_given: pytest.fail("check = false was checked")
    )
    assert coterie.simulate(
        DATA, FedAvg(), model="linear", settings=Settings(rounds=1, check=False)
    )
    with pytest.raises(pytest.fail.Exception, match="was checked"):
        coterie.simulate(DATA, FedAvg(), model="linear", settings=Settings(rounds=1))


# ---------------------------------------------------------------- the plain side

CHOICES = [
    {}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1}, {"centered": True}, {"lr_decay": 0.1, "initial_accumulator_value": 0.2},
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (kind, given)
        for kind in OPTIMIZERS
        for given in CHOICES
        if set(given) <= set(OPTIMIZERS[kind])
    ],
    ids=str,
)
def test_plain_steps_are_those_of_the_classes_of_torch(kind, given):
    local = LocalTraining(optimizer=kind, lr=0.1, **given)
    names = {
        "sgd": "SGD",
        "adam": "Adam",
        "adamw": "AdamW",
        "rmsprop": "RMSprop",
        "adagrad": "Adagrad",
    }
    stream = torch.Generator().manual_seed(0)
    start = torch.randn(5, dtype=torch.float64, generator=stream)
    theirs, ours = nn.Parameter(start.clone()), start.clone()
    optimizer = getattr(torch.optim, names[kind])([theirs], lr=0.1, **local.optimizer_arguments)
    plain = PlainOptimizer(local, [ours])
    for _ in range(4):
        slope = torch.randn(5, dtype=torch.float64, generator=stream)
        theirs.grad = slope.clone()
        optimizer.step()
        plain.step([slope])
    assert torch.allclose(theirs.detach(), ours, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_gradient_that_is_rounding_alone_gives_no_alarm(share):
    """The bias before a normalization has the gradient 0, of which rounding leaves something else in each engine."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = (
                nn.Linear(6, 12),
                nn.BatchNorm1d(12),
                nn.Linear(12, 3),
            )
            self.drop = nn.Dropout(share)

        def forward(self, x):
            return self.last(self.drop(functional.relu(self.norm(self.first(x * 100)))))

    for engine in ENGINES:
        assert check(build(Biased, engine)).compared
