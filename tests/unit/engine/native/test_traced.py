"""Programs of traced modules compute what the loop engine does, for modules of any kind, and say why they cannot."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.engine._base import cross_entropy, squared_error
from coterie.engine._loop import LoopEngine
from coterie.engine._work import Pairs, RawSamples, Training
from coterie.engine.native import library
from coterie.engine.native.compiled import CompiledEngine
from coterie.engine.native.loops import dense, in_memory, reshaped
from coterie.engine.native.trace import Dim, NotTraceableError, record
from coterie.engine.native.traced import TracedProgram
from coterie.engine.task import LocalTraining
from coterie.models.layout import Layout
from coterie.models.simplex_layers import SimplexHead


class Images(nn.Module):
    """Strides, dilation, groups, depthwise and pointwise convolutions, every norm, every pooling, a residual."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.point = nn.Conv2d(8, 18, 1)
        self.groups = nn.GroupNorm(3, 18)
        self.wide = nn.Conv2d(18, 18, 3, padding=2, dilation=2, groups=2)
        self.down = nn.Conv2d(18, 5, 3, stride=2, padding=1, bias=False)
        self.odd = nn.Conv2d(5, 4, (2, 3), stride=(1, 2), padding=(0, 1))
        self.own = nn.InstanceNorm2d(4, affine=True)
        self.last = nn.Linear(12, 4)

    def forward(self, x):
        x = functional.relu(self.norm(self.first(x)), inplace=True)
        x = functional.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True)
        x = functional.silu(self.point(functional.hardswish(self.deep(x))))
        x = self.groups(x + functional.elu(self.wide(x)))
        x = functional.avg_pool2d(functional.interpolate(x, scale_factor=2), 3, stride=2, padding=1)
        x = self.down(functional.pad(x, (1, 0, 1, 0)))
        x = functional.gelu(self.own(self.odd(functional.adaptive_avg_pool2d(x, (3, 3)))))
        both = torch.cat([functional.adaptive_avg_pool2d(x, 1), x.amax((2, 3), keepdim=True)], 1).flatten(1)
        return self.last(torch.cat([both, x.flatten(1)[:, :4].softmax(1)], 1))


class Words(nn.Module):
    """An embedding, recurrent layers, attention and a causal mask."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.places = nn.Parameter(torch.randn(5, 6) / 9)
        self.gru = nn.GRU(6, 7, batch_first=True)
        self.lstm = nn.LSTM(7, 6)
        self.layer = nn.TransformerEncoderLayer(
            6, 2, 9, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.last = nn.Linear(12, 4)

    def forward(self, x):
        z = self.table(x.long() % 11) + self.places
        z = self.lstm(self.gru(z)[0].transpose(0, 1))[0].transpose(0, 1)
        q, k = z.chunk(2, -1)
        z = z + functional.scaled_dot_product_attention(q, k, z, is_causal=True)
        z = self.layer(z)
        return self.last(torch.cat([z[:, -1], z.mean(1)], -1))


class Table(nn.Module):
    """Norms over features, dropout, many activations, writes in place, picked and repeated columns, tied weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 10)
        self.batch = nn.BatchNorm1d(10, momentum=None)
        self.middle = nn.Linear(10, 10, bias=False)
        self.layer = nn.LayerNorm(10, elementwise_affine=False)
        self.slope = nn.PReLU(10)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(10, 4)
        self.register_buffer("order", torch.tensor([3, 1, 1, 9, 0, 5, 8, 7, 2, 6]))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 10), requires_grad=False)

    def forward(self, x):
        x = self.drop(functional.leaky_relu(self.batch(self.first(x)), 0.1))
        x = self.slope(functional.linear(x, self.middle.weight.t())) + torch.tanh(self.middle(x)) * self.frozen
        y = x.clone()
        y[:, 2:5] *= 2
        y[:, 0] = x[:, 1] ** 2
        x = self.layer(y).index_select(1, self.order)
        x = torch.where(x > 0.5, functional.softplus(x), functional.mish(x)) + functional.logsigmoid(x).clamp(-1, -0.2)
        x = x / (1 + x.norm(dim=1, keepdim=True)) + x.std(1, keepdim=True) + torch.roll(x, 1, 1).flip(1)
        return self.last(functional.hardsigmoid(x) + functional.relu6(x) + torch.sigmoid(x) * functional.selu(x))


class Mixed(nn.Module):
    """A head between endpoints, behind a layer that no plain stack has."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 8), nn.LayerNorm(8), nn.GELU("tanh"))
        self.head = SimplexHead(nn.Linear(8, 4), 3)

    def forward(self, x):
        return self.head(self.body(x))


def several_targets(outputs, targets):
    wanted = functional.one_hot(targets, 4).to(outputs)
    return functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none").mean(1)


def robust(outputs, targets):
    return functional.huber_loss(outputs, targets, reduction="none").sum(1)


MODULES = {
    "images": (Images, (3, 17, 15), cross_entropy, True),
    "words": (Words, (5,), cross_entropy, False),
    "table": (Table, (7,), cross_entropy, True),
    "mixed": (Mixed, (7,), squared_error, False),
    "huber": (lambda: nn.Sequential(nn.Linear(7, 6), nn.Hardswish(), nn.Linear(6, 4)), (7,), robust, False),
}


def data_of(features, classes, dtype):
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(40, *features, generator=stream)
    if features == (5,):
        x = torch.randint(0, 90, (40, 5), generator=stream).float()
    y = torch.randint(0, 4, (40,), generator=stream) if classes else torch.randn(40, 4, generator=stream)
    return RawSamples(x.to(dtype), y, 4 if classes else 0, dtype)


def training(layout, data, local, rows):
    stream = torch.Generator().manual_seed(2)
    clients = len(rows)
    length = torch.full((clients, 3), local.batch_size)
    length[1, 1], length[0, 2] = local.batch_size - 4, 0
    places = torch.randint(0, len(data), (clients, 3, local.batch_size), generator=stream)
    keys = (torch.randint(0, 1 << 62, (clients,), generator=stream), layout.keys) if layout.keys else None
    inputs = {}
    for name, own in layout.zero_inputs(1).items():
        if name not in layout.keys:
            inputs[name] = torch.rand(clients, 3, own.shape[-1], generator=stream, dtype=layout.dtype)
    return Training(data, places, length, local, keys=keys, inputs=inputs)


@pytest.mark.parametrize("name", MODULES)
def test_a_traced_module_trains_and_is_measured_as_by_the_loop_engine(name):
    torch.manual_seed(0)
    make, features, objective, together = MODULES[name]
    layout = Layout(make(), torch.float64)
    data = data_of(features, objective is cross_entropy, torch.float64)
    program = TracedProgram(layout, objective, data.inputs(torch.arange(2)), data.targets(torch.arange(2)))
    assert program.together == together
    for local in (
        LocalTraining(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.01, batch_size=19),
        LocalTraining(optimizer="sgd", lr=0.1, batch_size=6),
    ):
        row = layout.flatten_copy(layout.train_module)
        start = torch.stack([row, row + 0.1 * torch.sin(torch.arange(layout.size))])
        results = []
        for engine in (program, LoopEngine(layout, objective)):
            rows = start.clone()
            work = training(layout, data, local, rows)
            losses = engine.train(rows, work) if engine is program else engine.train(rows, work, 2)
            sets = Pairs(
                data,
                torch.arange(40).reshape(2, 20),
                torch.tensor([20, 17]),
                torch.tensor([0, 1, 1]),
                torch.tensor([0, 1, 0]),
            )
            inputs = layout.zero_inputs(2)
            values = engine.measure(rows, sets, inputs) if engine is program else engine.measure(rows, sets, inputs, 2)
            results.append((losses, rows, *values.values()))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert float((ours - theirs).nan_to_num(0).abs().max()) < 1e-10 * max(
                1.0, float(theirs.nan_to_num(0).abs().max())
            )
        assert not torch.equal(results[0][1], start)


@pytest.mark.parametrize("name", ["images", "words"])
def test_no_bit_depends_on_threads_on_blocks_or_on_who_is_trained_beside(name):
    torch.manual_seed(0)
    make, features, objective, _together = MODULES[name]
    layout = Layout(make())
    data = data_of(features, True, torch.float32)
    engine = CompiledEngine(layout, objective, data.inputs(torch.arange(2)), data.targets(torch.arange(2)))
    local = LocalTraining(lr=0.01, batch_size=8)
    start = layout.flatten_copy(layout.train_module).repeat(5, 1)
    every = training(layout, data, local, start)
    rows = start.clone()
    engine.train(rows, every, 5)
    library.use_threads(2)
    try:
        again = start.clone()
        engine.train(again, every, 2)
    finally:
        library.use_threads(0)
    assert torch.equal(rows, again)
    for client in (0, 1, 4):
        alone = start[client : client + 1].clone()
        engine.train(alone, every.part(slice(client, client + 1)), 1)
        assert torch.equal(alone[0], rows[client])


class Chance(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"noise": nn.RReLU(), "last": nn.Linear(7, 4)})

    def forward(self, x):
        return self.inner["last"](self.inner["noise"](x) + torch.rand_like(x))


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if float(x.sum()) > 0 else 1)


class Pairwise(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return (y @ y.t()).softmax(1) @ y


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Conv3d(1, 2, 1)
        self.last = nn.Linear(14, 4)

    def forward(self, x):
        return self.last(self.part(x[:, None, :, None, None]).flatten(1))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Chance(), "it draws random numbers of its own"),
        (Branches(7, 4), "what it computes depends on its data"),
        (Pairwise(7, 4), "every sample of a batch with every other"),
        (Volumes(), "three-dimensional convolution in 'part'"),
    ],
)
def test_what_cannot_be_traced_is_named(module, reason):
    layout = Layout(module, torch.float64)
    with pytest.raises(NotTraceableError, match=reason):
        TracedProgram(layout, cross_entropy, torch.randn(2, 7, dtype=torch.float64), torch.tensor([0, 1]))


def test_a_batch_of_one_sample_is_left_to_the_loop_engine_where_samples_need_each_other():
    layout = Layout(Table(), torch.float64)
    data = data_of((7,), True, torch.float64)
    engine = CompiledEngine(layout, cross_entropy, data.inputs(torch.arange(2)), data.targets(torch.arange(2)))
    rows = layout.flatten_copy(layout.train_module)[None].clone()
    work = training(layout, data, LocalTraining(batch_size=8), rows.repeat(2, 1)).part(slice(0, 1))
    work.length[:, 1] = 1
    with pytest.raises(ValueError, match="more than one value"):
        engine.train(rows, work, 1)


def test_the_number_of_samples_is_a_variable_of_a_trace():
    layout = Layout(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)))
    traces = record(layout, cross_entropy, torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))
    shapes = [kind.shape for kind in traces.train.kinds.values()]
    assert (Dim(1), 2, 2, 2) in shapes
    assert (Dim(1), 8) in shapes
    assert not traces.together


def test_views_are_taken_without_copies_where_strides_allow_it():
    images = in_memory("b", (Dim(1), 6, 4, 5), dense((Dim(1), 6, 4, 5), (0, 2, 3, 1)), torch.float32)
    rows = reshaped(images, (Dim(1), 6, 20))
    assert rows is not None
    assert rows.leaves[0].strides == (120, 1, 6)
    assert reshaped(images, (Dim(1), 120)) is None
    groups = reshaped(images, (Dim(1), 2, 3, 20))
    assert groups is not None
    assert groups.leaves[0].strides == (120, 3, 1, 6)
