"""The loop engine trains as a plain loop of nn.Module and torch.optim does; no bit depends on who is beside."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.engine import LocalTraining, LoopEngine, VmapEngine, make_engine
from coterie.engine._base import cross_entropy, squared_error
from coterie.engine._work import RawSamples, TrainingWork
from coterie.models.layout import Layout

CLASSES = 3
IMAGE, TOKENS = (2, 6, 6), (5,)
# ragged batches; the last client has none
LENGTHS = torch.tensor([[7, 7, 4, 0], [5, 7, 7, 7], [0, 0, 0, 0]])


class Residual(nn.Module):
    """A block with a shortcut around two convolutions, one with groups and stride."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(4, 8, 3, 2, 1, groups=2, bias=False),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.norm, self.short = nn.BatchNorm2d(8), nn.Conv2d(4, 8, 1, 2)

    def forward(self, x):
        return functional.silu(self.norm(self.two(functional.silu(self.one(x)))) + self.short(x))


class Recurrent(nn.Module):
    """An embedding and a recurrent net on tokens, which come as floats."""

    def __init__(self, kind):
        super().__init__()
        self.embed, self.net, self.head = (
            nn.Embedding(9, 6),
            kind(6, 7, batch_first=True),
            nn.Linear(7, CLASSES),
        )

    def forward(self, x):
        return self.head(self.net(self.embed(tokens(x)))[0][:, -1])


class Attention(nn.Module):
    """Causal self-attention over tokens, with layer normalization, whose scores share the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.attention, self.back = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 9, bias=False),
        )
        self.back.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(5, 5).triu(1).bool())

    def forward(self, x):
        z = self.norm(self.embed(tokens(x)))
        z = z + self.attention(z, z, z, attn_mask=self.mask, need_weights=False)[0]
        return self.back(z.mean(1))[:, :CLASSES]


class Counts(nn.Module):
    """A buffer of integers that is changed in place, one of floats that is replaced, and a parameter not used."""

    def __init__(self):
        super().__init__()
        self.layer, self.idle = nn.Linear(5, CLASSES), nn.Parameter(torch.ones(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean) / (1 + self.steps)


def tokens(x):
    return x.abs().mul(4).long().clamp(max=8)


def frozen():
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(72, 6), nn.SiLU(), nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, CLASSES)
    )
    return net.requires_grad_(True) if not net[3].requires_grad_(False) else net


def images(*layers):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Flatten(), nn.LazyLinear(CLASSES)
    )


def ready(module, features):
    """Let lazy layers find their shapes, in float64, with batches of two that leave the statistics as they were."""
    with torch.no_grad():
        module.eval()(torch.zeros(2, *features))
    return module.train().double()


MODELS = {
    "linear": (lambda: nn.Linear(5, CLASSES), TOKENS),
    "batch norm, 1d": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 3)),
        TOKENS,
    ),
    "batch norm, 2d": (lambda: images(nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2)), IMAGE),
    "batch norm, averages": (lambda: images(nn.BatchNorm2d(4, momentum=None), nn.SiLU()), IMAGE),
    "batch norm, no affine": (lambda: images(nn.BatchNorm2d(4, affine=False), nn.SiLU()), IMAGE),
    "batch norm, no statistics": (
        lambda: images(nn.BatchNorm2d(4, track_running_stats=False), nn.SiLU()),
        IMAGE,
    ),
    "two batch norms": (
        lambda: images(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, 0.1, 0.3)),
        IMAGE,
    ),
    "group norm": (lambda: images(nn.GroupNorm(2, 4), nn.GELU(), nn.AvgPool2d(2)), IMAGE),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
        TOKENS,
    ),
    "residual": (lambda: images(Residual(), nn.AdaptiveAvgPool2d(1)), IMAGE),
    "transposed": (lambda: images(nn.ConvTranspose2d(4, 2, 2, 2), nn.Tanh()), IMAGE),
    "gru": (lambda: Recurrent(nn.GRU), TOKENS),
    "lstm": (lambda: Recurrent(nn.LSTM), TOKENS),
    "attention, tied": (Attention, TOKENS),
    "frozen": (frozen, IMAGE),
    "counts": (Counts, TOKENS),
}
LOCAL = {
    "sgd": LocalTraining(optimizer="sgd", lr=0.1),
    "momentum": LocalTraining(optimizer="sgd", lr=0.1, momentum=0.8, weight_decay=0.05),
    "adam": LocalTraining(lr=0.01),
    "adam, decay": LocalTraining(lr=0.01, weight_decay=0.05),
}


def case(name):
    """A module, its layout, the samples, and three clients' models with their training."""
    make, features = MODELS[name]
    torch.manual_seed(3)  # noqa: TID251
    module = ready(make(), features)
    stream = torch.Generator().manual_seed(5)
    x = torch.randn(60, *features, generator=stream, dtype=torch.float64)
    samples = RawSamples(x, torch.randint(0, CLASSES, (60,), generator=stream), torch.float64)
    layout = Layout(module, torch.float64)
    row = layout.flatten_module(module)
    rows = row + 0.01 * torch.randn(3, len(row), generator=stream, dtype=torch.float64)
    rows[:, layout.trainable :] = row[layout.trainable :]
    places = torch.randint(0, 60, (3, 4, 7), generator=stream)
    return module, layout, rows, TrainingWork(samples, places, LENGTHS, LOCAL["sgd"])


def plain(module, layout, row, work, client, loss=functional.cross_entropy, before=0):
    """Train as the documentation of PyTorch says; return the row, the losses and the optimizer."""
    module = copy.deepcopy(module)
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for slot, value in layout.split_rows(row).items():
            named[slot].copy_(value)
    local, trained = work.local, [p for p in module.parameters() if p.requires_grad]
    kind = {"lr": local.lr, "weight_decay": local.optimizer_arguments["weight_decay"]}
    optimizer = torch.optim.Adam(trained, **kind)
    if local.optimizer == "sgd":
        optimizer = torch.optim.SGD(trained, momentum=local.momentum, **kind)
    losses = []
    for step, size in enumerate(work.batch_sizes[client].tolist()):
        if size:
            at = work.sample_indices[client, step, :size]
            optimizer.zero_grad(set_to_none=False)
            for p in trained:  # as a parameter that is not used is decayed with the others
                p.grad = torch.zeros_like(p)
            value = loss(module(work.samples.x[at]), work.samples.y[at])
            losses.append(float(value.detach()))
            if work.anchor is not None:
                there = layout.split_rows(work.anchor[client])
                names = [name for name, p in module.named_parameters() if p.requires_grad]
                away = sum((named[name] - there[name]).square().sum() for name in names)
                value = value + work.prox / 2 * away
            value.backward()
            optimizer.step()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    after = torch.cat([tensors[slot.name].detach().reshape(-1).double() for slot in layout.slots])
    return after, losses, optimizer


def compare(found, losses, expected, wanted, tolerance=1e-10):
    assert torch.allclose(found, expected, rtol=0, atol=tolerance)
    assert losses[~losses.isnan()].tolist() == pytest.approx(wanted, abs=tolerance)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_trained_as_by_pytorch_alone(name, channels_last):
    module, layout, rows, work = case(name)
    trained = rows.clone()
    engine = LoopEngine(layout, cross_entropy, channels_last=channels_last)
    losses = engine.train(trained, work, 1)
    for client in range(2):
        after, wanted, _ = plain(module, layout, rows[client], work, client)
        assert not torch.allclose(trained[client], rows[client], atol=1e-6)
        compare(trained[client], losses[client], after, wanted)
    assert torch.equal(trained[2], rows[2])
    assert bool(losses[2].isnan().all())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", ["batch norm, 2d", "attention, tied", "counts"])
@pytest.mark.parametrize("kind", LOCAL)
def test_each_optimizer_is_that_of_pytorch(kind, name, channels_last):
    module, layout, rows, work = case(name)
    work = replace(work, local=LOCAL[kind], anchor=rows.flip(0) + 0.1, prox=0.3)
    trained = rows.clone()
    losses = LoopEngine(layout, cross_entropy, channels_last=channels_last).train(trained, work, 1)
    for client in range(2):
        after, wanted, _ = plain(module, layout, rows[client], work, client)
        compare(
            trained[client],
            losses[client],
            after,
            wanted,
            1e-12 if work.local.optimizer == "sgd" else 1e-10,
        )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_moments_that_are_kept_are_those_of_the_optimizer_and_training_goes_on_from_them(
    kind, channels_last
):
    """Two steps and two steps after them are four steps; the moments lie in the order of a row.

    No bias lies before a batch normalization, where its gradient would be nothing but the rounding
    of others.
    """
    module, layout, rows, work = case("group norm")
    work = replace(work.select_clients(slice(1, 2)), local=LOCAL[kind])
    engine = LoopEngine(layout, cross_entropy, channels_last=channels_last)
    moments = rows.new_zeros(1, work.local.num_moments, layout.trainable)
    there = rows[1:2].clone()
    for number, steps in enumerate((slice(0, 2), slice(2, 4))):
        taken = torch.tensor([2 * number])
        part = replace(
            work,
            sample_indices=work.sample_indices[:, steps],
            batch_sizes=work.batch_sizes[:, steps],
            moments=moments,
            steps_taken=taken,
        )
        engine.train(there, part, 1)
    after, _, optimizer = plain(module, layout, rows[1], work, 0)
    assert torch.allclose(there[0], after, rtol=0, atol=1e-12)
    names = {"momentum": ["momentum_buffer"], "adam": ["exp_avg", "exp_avg_sq"]}[kind]
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    wanted = torch.stack(
        [torch.cat([state[name].reshape(-1) for state in states]) for name in names]
    )
    assert torch.allclose(moments[0], wanted, rtol=0, atol=1e-12)


def test_regression_is_trained_as_by_pytorch_alone():
    """The mean over samples of the mean squared error of their targets is the mean over all entries."""
    module, layout, rows, work = case("layer norm")
    y = torch.randn(60, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    work = replace(work, samples=RawSamples(work.samples.x, y, torch.float64))
    trained = rows.clone()
    losses = LoopEngine(layout, squared_error).train(trained, work, 1)
    compare(
        trained[0], losses[0], *plain(module, layout, rows[0], work, 0, functional.mse_loss)[:2]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name",
    ["batch norm, 2d", "batch norm, averages", "residual", "gru", "attention, tied", "counts"],
)
def test_no_bit_depends_on_who_is_hosted_or_where_a_row_lies(name, dtype):
    module, _, rows, work = case(name)
    layout = Layout(module, dtype)
    work = replace(work, samples=replace(work.samples, dtype=dtype), local=LOCAL["adam"])
    engine = LoopEngine(layout, cross_entropy, channels_last=True)
    together, apart = (
        rows.to(dtype),
        torch.zeros(3, rows.shape[1] + 3, dtype=dtype)[:, 3:].copy_(rows),
    )
    losses = engine.train(together, work, 1)
    for client in (2, 1, 0):
        alone = slice(client, client + 1)
        own = engine.train(apart[alone], work.select_clients(alone), 4)
        assert own.nan_to_num().equal(losses[alone].nan_to_num())
    assert apart.equal(together)
    x, inputs = work.samples.prepare_inputs(torch.arange(9))[None], layout.zero_inputs(3)
    values = engine.forward(together, x, inputs)
    assert all(values[i].equal(engine.forward(apart[i : i + 1], x, inputs)[0]) for i in range(3))


def test_channels_lie_last_only_where_no_kernel_writes_beyond_its_memory():
    """A 1x1 convolution with a stride and few channels, as in a shortcut."""
    channels_last = {}
    for name in ("residual", "two batch norms"):
        _, layout, _, _ = case(name)
        channels_last[name] = LoopEngine(layout, cross_entropy, channels_last=True).channels_last
    assert channels_last == {"residual": False, "two batch norms": True}


def test_dropout_draws_the_same_masks_as_the_vmap_engine():
    torch.manual_seed(3)  # noqa: TID251
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.Dropout2d(0.4),
        nn.SiLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64, 3),
    )
    _, _, _, work = case("group norm")
    layout = Layout(module, torch.float64)
    work = replace(work, draw_keys=torch.tensor([3, 1 << 62, 5]))
    rows = layout.flatten_module(module).repeat(3, 1)
    one, other, without = rows.clone(), rows.clone(), rows.clone()
    LoopEngine(layout, cross_entropy, channels_last=True).train(one, work, 1)
    VmapEngine(layout, cross_entropy).train(other, work, 3)
    LoopEngine(layout, cross_entropy).train(without, replace(work, draw_keys=None), 1)
    assert torch.allclose(one, other, rtol=0, atol=1e-10)
    assert not torch.allclose(one, without, atol=1e-4)


def test_what_a_module_keeps_beside_its_row_starts_anew_for_each_client():
    """Each client's first outputs are divided by 1 + 1 steps, whoever trained before."""
    _, layout, rows, work = case("counts")
    engine = LoopEngine(layout, cross_entropy)
    alone = engine.train(rows[1:2].clone(), work.select_clients(slice(1, 2)), 1)
    assert torch.equal(engine.train(rows.clone(), work, 1)[1:2], alone)
    assert int(layout.train_module.steps) == 0


def test_batches_of_several_steps_that_are_gathered_at_once_are_those_of_each_step(monkeypatch):
    """Two steps at most at once, of sizes 7, 7, 4 and none, and 5, 7, 7, 7."""
    _, _, _, work = case("linear")
    monkeypatch.setattr("coterie.engine._work._STEPS", 2)
    for client in range(3):
        found = [(x, y) for x, y, _ in work.iterate_batches(client)]
        assert len(found) == int((LENGTHS[client] > 0).sum())
        for step, (x, y) in enumerate(found):
            wanted = work.gather_batch(torch.tensor([client]), step, int(LENGTHS[client, step]))
            assert torch.equal(x, wanted[0][0])
            assert torch.equal(y, wanted[1][0])


def test_one_value_a_channel_cannot_be_normalized_while_training():
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    layout = Layout(module, torch.float64)
    rows, x = layout.flatten_module(module)[None], torch.zeros(1, 1, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        LoopEngine(layout, cross_entropy).compute_gradients(
            rows, x, torch.zeros(1, 1, dtype=torch.int64), {}
        )


def test_a_tried_engine_keeps_none_of_the_hooks_of_the_trial():
    layout = Layout(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    engine = make_engine("loop", layout, cross_entropy, torch.randn(2, 5), torch.tensor([0, 1]))
    for module in engine.modules:
        for part in module.modules():
            assert not part._forward_pre_hooks
            # What takes the output of the module stays; it is of no trial.
            assert set(part._forward_hooks.values()) <= {layout.output}
    assert isinstance(engine, LoopEngine)
    assert engine._flat_model(torch.device("cpu")).train_module is engine.modules[0]
