"""Programs of traced modules compute what the loop engine does, for modules of any kind, and say why they cannot."""

import inspect
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.selection import first_only, full
from torch import nn
from torch.nn import functional

from coterie.engine._augment import CropFlip
from coterie.engine._base import cross_entropy, squared_error
from coterie.engine._loop import LoopEngine
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork
from coterie.engine.native import compiler, library, lower
from coterie.engine.native.compiled import CompiledEngine
from coterie.engine.native.images import ImageLowering
from coterie.engine.native.loops import dense_strides, in_memory, reshape
from coterie.engine.native.sample_lanes import SampleLowering
from coterie.engine.native.trace import Dim, NotTraceableError, record
from coterie.engine.native.traced import TracedProgram, _cut
from coterie.engine.noise import InputNoise
from coterie.engine.task import LocalTraining
from coterie.models.layout import Layout, build_model
from coterie.models.simplex_layers import SimplexHead
from coterie.rng import Rng


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
        both = torch.cat(
            [functional.adaptive_avg_pool2d(x, 1), x.amax((2, 3), keepdim=True)], 1
        ).flatten(1)
        return self.last(torch.cat([both, x.flatten(1)[:, :4].softmax(1)], 1))


class Words(nn.Module):
    """An embedding, recurrent layers, attention and a causal mask."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.places = nn.Parameter(torch.randn(3, 6) / 9)
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
        x = (
            self.slope(functional.linear(x, self.middle.weight.t()))
            + torch.tanh(self.middle(x)) * self.frozen
        )
        y = x.clone()
        y[:, 2:5] *= 2
        y[:, 0] = x[:, 1] ** 2
        x = self.layer(y).index_select(1, self.order)
        x = torch.where(
            x > 0.5, functional.softplus(x), functional.mish(x)
        ) + functional.logsigmoid(x).clamp(-1, -0.2)
        x = (
            x / (1 + x.norm(dim=1, keepdim=True) + x.norm(1, dim=1, keepdim=True))
            + x.std(1, keepdim=True)
            + torch.roll(x, 1, 1).flip(1)
        )
        return self.last(
            functional.hardsigmoid(x) + functional.relu6(x) + torch.sigmoid(x) * functional.selu(x)
        )


class Wholes(nn.Module):
    """Whole numbers with decimal ones, numbers that are equal, and the ends of ranges."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.last = nn.Linear(18 * 6 + 8, 4)

    def forward(self, x):
        z = self.first(x)
        k = (3 * z.detach()).round().long()
        # A decimal number that whole ones are compared with is not rounded.
        compared = [k > 1.5, k >= 1.5, k < -0.5, k <= -0.5, k == 1.5, k != 2, k >= 2, k > 2]
        chosen = [torch.where(k > 0, k, 0), k.clamp(-1, 2), k.clamp(min=0)]
        computed = [2 - k, k // 2, k % 3, k.abs(), -k, k + 1, k * k]
        wholes = [part.to(z.dtype) for part in (*compared, *chosen, *computed)]
        # The first of equal numbers is the largest; equal ones share a gradient.
        r = z.detach().round().clamp(-1, 1)
        first = [
            r.argmax(1, keepdim=True),
            r.argmin(1, keepdim=True),
            (r == 0).any(1, keepdim=True),
        ]
        first += [(r >= 0).all(1, keepdim=True), (r > 0).sum(1, keepdim=True)]
        tied = [functional.relu(z).amax(1, keepdim=True), z.clamp(max=0.0).amin(1, keepdim=True)]
        ends = [z[:, -1:]]
        counted = [part.to(z.dtype) for part in first]
        return self.last(torch.cat([*wholes, *counted, *tied, *ends], 1))


class Rare(nn.Module):
    """What layers seldom have: the larger of two, sums by place, spreads, losses of entries, bits, filled tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 4)
        self.vector = nn.Parameter(torch.linspace(-0.7, 0.9, 6))

    def forward(self, x):
        z = self.first(x)
        # Places differ between samples, and occur more than once in a row.
        places = (3 * z.detach()).round().long() % 6
        y = z.gather(1, places) + torch.zeros_like(z).scatter_add(1, places, z.tanh())
        y = y + torch.maximum(z, x[:, :6]) + torch.minimum(z, self.vector)
        y = y + torch.clamp_max(z, 0.3) * torch.clamp_min(z, -0.2)
        variance, mean = torch.var_mean(z, 1, keepdim=True)
        y = y + variance * z.var(1, keepdim=True, correction=0) - mean
        y = y + z.logsumexp(1, keepdim=True) + z.min(1, keepdim=True).values
        y = y + (z @ self.vector)[:, None] * torch.dot(self.vector, self.vector)
        y = y + functional.mse_loss(z, x[:, 1:], reduction="none")
        y = y + functional.smooth_l1_loss(z, x[:, :6], reduction="none", beta=0.5)
        squares = torch.baddbmm(
            z.view(-1, 2, 3) @ z.view(-1, 3, 2),
            z.view(-1, 2, 3),
            z.view(-1, 3, 2),
            beta=0.5,
            alpha=2,
        )
        images, wanted = z.view(-1, 3, 1, 2), (places[:, :2] % 3).view(-1, 1, 2)
        losses = functional.cross_entropy(images, wanted, reduction="none").flatten(1)
        bits = (places << 2) + (places >> 1) - (~places) + (~(places > 2)).long()
        few, rest = z.split([2, 4], 1)
        made = torch.cat([torch.full_like(few, 0.5) * losses, rest * squares.flatten(1)], 1)
        filled = z.new_empty(len(x), 6).fill_(0.1) + torch.empty_like(z).zero_() + z.new_ones(6)
        chosen = torch.where(torch.logical_not(places > 3), made, filled)
        return self.last(y + chosen + 0.1 * bits.to(z) + torch.full((6,), 0.25, dtype=z.dtype))


class Curves(nn.Module):
    """Functions of a number that no layer of the others has, words of truth, and options that layers leave out."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 4)
        self.vector = nn.Parameter(torch.linspace(-0.7, 0.9, 6))
        self.one = nn.Parameter(torch.linspace(-1, 1, 36).sin().view(6, 6))

    def forward(self, x):
        z = self.first(x)
        y = z.atan() + z.cos() * z.erf() + 0.1 * (z.sinh() - z.cosh())
        y = y + z.expm1() * 0.1 + z.abs().log1p() + (1 + z * z).log2()
        y = y + (2 + z.sin()).rsqrt() * (0.5 + z * z).sqrt()
        y = y + 0.1 * (z.floor() - z.ceil() + (3 * z).trunc())
        high, low = z > 0.2, z < -0.1
        words = [high | low, torch.logical_or(high, low), torch.logical_xor(high, z > 0.4)]
        whole = (4 * z.detach()).round().long().abs()
        bits = torch.bitwise_left_shift(whole, 1) - torch.bitwise_right_shift(whole, 1)
        few, rest = torch.unsafe_split_with_sizes(y, [2, 4], 1)
        y = torch.cat([rest, few], 1) + 0.1 * (bits | 5).to(z)
        y = y + sum(one.to(z) for one in words)
        return self.last(y + 0.2 * self.use_options(z, x))

    def use_options(self, z, x):
        """Factors, powers, weights of classes and of entries, axes that are lost."""
        p, whole = 1 + z * z, (3 * z.detach()).round().long()
        y = torch.sub(z, x[:, :6], alpha=0.3) + torch.add(z, x[:, 1:], alpha=2)
        y = y + torch.rsub(z, p, alpha=0.5) + torch.ops.aten.add.Scalar(z, 0.5, 3)
        y = y + p**1.3 + p ** z.tanh() + p**2 + 0.1 * p**3
        y = y + p**-1 - p**0.5 + p**-0.5 + p**-2
        y = y + torch.remainder(z, 0.7) + functional.elu(z * 1, 0.7, inplace=True)
        y = y + functional.celu(z, 0.6) + functional.softplus(z, 2.0, 1.5)
        y = y + functional.hardtanh(z, -0.4, 0.6) + functional.leaky_relu(z)
        words = torch.logical_not(whole).to(z) + whole.bool().to(z)
        weight, classes = torch.tensor([0.5, 2.0, 1.0], dtype=z.dtype), whole[:, 0] % 3
        losses = functional.cross_entropy(z[:, :3], classes, weight, reduction="none")
        ignored = functional.cross_entropy(z[:, 3:], classes, ignore_index=1, reduction="none")
        wanted = torch.sigmoid(x[:, :6])
        entries = functional.binary_cross_entropy_with_logits(
            z, wanted, weight=0.5 + wanted, reduction="none", pos_weight=1 + wanted
        )
        gone = z.var(1) + z.logsumexp(1) + sum(torch.var_mean(z, 1)) + z[:, :1].argmax(1)
        chosen = torch.zeros_like(z).scatter(1, whole[:, :1] % 6, 0.5)
        added = z.index_add(1, torch.tensor([4, 1]), x[:, :2], alpha=0.3)
        odd = torch.arange(1, 13, 2).to(z) * self.vector.max() - self.vector.t().min()
        normal = functional.group_norm(z[:, :, None], 2).squeeze(2)
        turned = (self.one @ z.t()).t() + torch.empty_like(z).fill_(self.vector[3])
        y = y + 0.1 * words + (losses + ignored + gone)[:, None] + entries + chosen
        return y + added + odd + normal + turned


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


class Writes(nn.Module):
    """Writes in place, read through the views and the bases of what is written; views that are turned in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        base = self.first(x) * 1
        part = base[:, 1:7]
        base.t().add_(x.t().mean(0))
        part[:, ::2].mul_(3)
        pairs = base.view(-1, 2, 4)
        pairs[:, 1, 2:] = pairs[:, 0, :2] * 0.5 + part[:, 5:]
        left, right = (base * 0.3).unsafe_chunk(2, 1)
        base.addcmul_(torch.cat([left.sigmoid_(), right.tanh_()], 1), x[:, :1], value=0.5)
        turned = base.clone()
        column = turned[:, 3]
        turned.t_()
        column.sub_(2)
        turned[0] += column
        base[:, torch.tensor([6, -1])] = x[:, 2:4] + x.max(1, keepdim=True).values
        base.scatter_(1, torch.tensor([[0, 5, 2]]).expand(len(x), 3), x[:, 4:])
        return self.last(turned.t() + part.sum(1, keepdim=True) + base[:, -100:])


class Constants(nn.Module):
    """Tensors that the module makes while it runs, of which some are as long as the batch."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.last = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.first(x)
        steps = torch.arange(6, dtype=x.dtype) / 6
        mask = torch.ones(6, 6, dtype=x.dtype).triu_(1)
        mask[2] = torch.tensor([0.5, 0.0, 1.0, 0.0, -1.0, 2.0])
        mask.t_()
        largest = (x.argmax(1, keepdim=True) == torch.arange(6)).to(x)
        picked = functional.one_hot(x[:, :3].argmin(1), 6) * x.new_full((len(x), 1), 0.25)
        x = x @ mask + torch.sin(steps) * largest + picked + torch.zeros(len(x), 6, dtype=x.dtype)
        x = x.masked_fill(torch.arange(6) % 3 == 1, 0.1) + x[:, torch.tensor([0, -1, 3, 3, -6, 2])]
        x = x + functional.kl_div(x.log_softmax(1), x.softmax(1), reduction="none")
        return self.last(x.cumsum(1)) * self.scale[torch.tensor([-1, 0, 0, 2])]


class Products(nn.Module):
    """Products of turned, strided, reversed and broadcast matrices, and of many of them."""

    def __init__(self):
        super().__init__()
        self.many = nn.Parameter(torch.randn(5, 3, 4) / 2)
        self.one = nn.Parameter(torch.randn(4, 6) / 2)
        self.wide = nn.Parameter(torch.randn(3, 17) / 2)
        self.last = nn.Linear(17, 4)

    def forward(self, x):
        pairs = x[:, :6].view(-1, 2, 3)
        several = pairs[:, None] @ self.many
        own = pairs.transpose(1, 2) @ pairs
        turned = torch.einsum("nij,kj->nik", several.mean(1), self.one.t())
        strided = x[:, ::3] @ self.wide + x[:, 1:4].flip(1) @ self.wide.flip(1)
        mixed = (turned @ self.one.t() @ several[:, 1].mT).flatten(1) + several.amax((1, 2))
        every = torch.cat([mixed, own.flatten(1), turned[:, 1, :4]], 1)
        return self.last(strided + every)


class Repeats(nn.Module):
    """A layer in four steps of time, and dropout, whose masks go on from one part of a batch to the next."""

    def __init__(self):
        super().__init__()
        self.step, self.drop, self.head = nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 4)

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.step(x))
        return self.head(self.drop(x))


class Pools(nn.Module):
    """Windows that overlap, reach over the edge, have gaps and are not square; images made larger and smaller."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 1, padding=1)
        self.last = nn.Linear(24, 4)

    def forward(self, x):
        x = self.first(x)
        x = functional.max_pool2d(x, (3, 2), stride=(1, 2), padding=(1, 1), dilation=(1, 2))
        x = functional.avg_pool2d(
            x, (2, 3), stride=(2, 1), padding=(1, 1), ceil_mode=True, count_include_pad=False
        )
        x = functional.avg_pool2d(
            functional.interpolate(x, scale_factor=(2, 3)), 3, 2, divisor_override=5
        )
        return self.last(functional.adaptive_avg_pool2d(x, (4, 2)).flatten(1))


class Margins(nn.Module):
    """Padding wider than the reach of the kernel: gradients of its inputs lie inside the outputs'."""

    def __init__(self):
        super().__init__()
        self.first, self.wide = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 4, 3, padding=(1, 3))
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.wide(torch.tanh(self.first(x)))).mean((2, 3)))


class Rims(nn.Module):
    """Kernels with places that only ever meet padding, on both sides of an axis, on one, and with gaps."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(2, 6, 3, padding=1)  # over a single pixel
        self.wide = nn.Conv2d(6, 4, (5, 3), padding=(2, 1), groups=2)
        self.gaps = nn.Conv2d(3, 4, 3, padding=3, dilation=3)
        self.skips = nn.Conv2d(4, 4, 5, stride=2, padding=2)
        self.own = nn.Conv2d(4, 4, 7, padding=3, groups=4)
        self.line = nn.Conv1d(3, 4, 5, padding=2)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        middle = self.wide(torch.tanh(self.one(x[:, :2, :1, :1])))
        gaps = self.own(torch.tanh(self.skips(torch.tanh(self.gaps(x)))))
        line = self.line(x.mean(3)[:, :, :2])
        return self.last(
            torch.tanh(
                middle + gaps.mean((2, 3), keepdim=True) + line.mean(2)[..., None, None]
            ).flatten(1)
        )


def broad() -> nn.Module:
    """Return layers whose rows of weights are pages of memory, and so many rows that they are taken in parts."""
    return nn.Sequential(
        nn.Linear(7, 520), nn.Tanh(), nn.Linear(520, 150), nn.SiLU(), nn.Linear(150, 4)
    )


class Turned(nn.Module):
    """Samples lie across the vector: images made of rows, padding, pooling of every kind, results that others read."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(7, 60)
        self.one, self.two = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, (1, 3), padding=(0, 1))
        self.three, self.last = nn.Conv2d(3, 17, 2), nn.Linear(34, 4)

    def forward(self, x):
        images = torch.tanh(self.one(self.start(x).view(len(x), 2, 5, 6)))
        images = functional.avg_pool2d(images + self.two(images), (2, 1), ceil_mode=True)
        images = functional.max_pool2d(functional.gelu(images), 3, 1, padding=1)
        images = functional.leaky_relu(functional.max_pool2d(self.three(images), (1, 2)))
        return self.last(functional.adaptive_avg_pool2d(images, (2, 1)).flatten(1))


MODULES = {
    "turned": (Turned, (7,), cross_entropy, False),
    "lanes": (lambda: build_model("cnn-b", (2, 9, 8), 4), (2, 9, 8), cross_entropy, False),
    "broad": (broad, (7,), cross_entropy, False),
    "margins": (Margins, (2, 4, 16), cross_entropy, False),
    "rims": (Rims, (3, 2, 2), cross_entropy, False),
    "images": (Images, (3, 17, 15), cross_entropy, True),
    "words": (Words, (3,), cross_entropy, False),
    "table": (Table, (7,), cross_entropy, True),
    "wholes": (Wholes, (7,), cross_entropy, False),
    "rare": (Rare, (7,), cross_entropy, False),
    "curves": (Curves, (7,), cross_entropy, False),
    "mixed": (Mixed, (7,), squared_error, False),
    "writes": (Writes, (7,), cross_entropy, False),
    "constants": (Constants, (7,), several_targets, False),
    "products": (Products, (7,), squared_error, False),
    "pools": (Pools, (2, 9, 8), cross_entropy, False),
    "repeats": (Repeats, (6,), cross_entropy, False),
    "huber": (
        lambda: nn.Sequential(nn.Linear(7, 6), nn.Hardswish(), nn.Linear(6, 4)),
        (7,),
        robust,
        False,
    ),
}


COMPILED_OFTEN = ("images", "repeats", "words")
"""Modules that `make test` compiles in double precision, which takes seconds each."""
COMPILED_SOMETIMES = ("pools",)
"""Those that `make test-more` compiles besides."""


def data_of(features, classes, dtype):
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(40, *features, generator=stream)
    if features == (3,):
        x = torch.randint(0, 90, (40, 3), generator=stream).float()
    y = (
        torch.randint(0, 4, (40,), generator=stream)
        if classes
        else torch.randn(40, 4, generator=stream)
    )
    return RawSamples(x.to(dtype), y, dtype)


def training(layout, data, local, rows):
    stream = torch.Generator().manual_seed(2)
    clients = len(rows)
    length = torch.full((clients, 3), local.batch_size)
    length[1, 1], length[0, 2] = local.batch_size - 4, 0
    places = torch.randint(0, len(data), (clients, 3, local.batch_size), generator=stream)
    keys = torch.randint(0, 1 << 62, (clients,), generator=stream)
    inputs = {}
    for name, own in layout.zero_inputs(1).items():
        inputs[name] = torch.rand(clients, 3, own.shape[-1], generator=stream, dtype=layout.dtype)
    return TrainingWork(data, places, length, local, draw_keys=keys, inputs=inputs)


@pytest.mark.parametrize(
    "name",
    [
        name if name in COMPILED_OFTEN else full(name, slow=name not in COMPILED_SOMETIMES)
        for name in MODULES
    ],
)
def test_a_traced_module_trains_and_is_measured_as_by_the_loop_engine(name):
    check_against_the_loop_engine(name)


@pytest.mark.full
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="older processors of one family are tried"
)
@pytest.mark.parametrize("name", first_only(["lanes", "images", "broad", "turned"], slow=True))
@pytest.mark.parametrize(
    ("processor", "register"), first_only([("haswell", 32), ("x86-64", 16)], slow=True)
)
def test_it_does_on_processors_with_smaller_registers(name, processor, register, monkeypatch):
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if processor == "haswell" and not ("avx2" in flags and "fma" in flags):
        pytest.skip("this processor has no registers of 32 bytes")
    monkeypatch.setattr(compiler, "_processor_flag", lambda: f"-march={processor}")
    compiler.describe_target.cache_clear()
    try:
        assert compiler.vector_bytes() == register
        check_against_the_loop_engine(name)
    finally:
        compiler.describe_target.cache_clear()


def check_against_the_loop_engine(name):
    make, features, objective, together = MODULES[name]
    with Rng(0).temporary_torch_seed("init"):
        layout = Layout(make(), torch.float64)
    data = data_of(features, objective in (cross_entropy, several_targets), torch.float64)
    program = TracedProgram(
        layout,
        objective,
        data.prepare_inputs(torch.arange(2)),
        data.prepare_targets(torch.arange(2)),
    )
    assert (program.together, program.across) == (together, name in ("turned", "lanes"))
    for local in (
        LocalTraining(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.01, batch_size=19),
        LocalTraining(optimizer="sgd", lr=0.1, batch_size=6),
    ):
        row = layout.own_values()
        start = torch.stack([row, row + 0.1 * torch.sin(torch.arange(layout.size))])
        if not (together or program.across):  # batches in parts too, whose gradients are added
            program._samples = {"train": local.batch_size - 2, "judge": 12}
        places, count = torch.arange(40).reshape(2, 20), torch.tensor([20, 17])
        sets = EvaluationPairs(
            data, places, count, torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])
        )
        work, inputs = training(layout, data, local, start), layout.zero_inputs(2)
        rows = start.clone()
        loop = LoopEngine(layout, objective)
        found = (
            program.train(rows, work),
            rows,
            *program.measure(rows, sets, inputs)[: len(loop.metrics)],
        )
        results, rows = [found], start.clone()
        results.append(
            (loop.train(rows, work, 2), rows, *loop.measure_pairs(rows, sets, inputs, 2).values())
        )
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert float((ours - theirs).nan_to_num(0).abs().max()) < 1e-10 * max(
                1.0, float(theirs.nan_to_num(0).abs().max())
            )
        assert not torch.equal(results[0][1], start)


@pytest.mark.full
@pytest.mark.parametrize("name", first_only(["lanes", "turned", "writes", "pools"], slow=True))
def test_in_single_precision_it_is_the_loop_engine_to_four_digits(name):
    make, features, objective, _together = MODULES[name]
    with Rng(0).temporary_torch_seed("init"):
        layout = Layout(make())
    data = data_of(features, True, torch.float32)
    program = TracedProgram(
        layout,
        objective,
        data.prepare_inputs(torch.arange(2)),
        data.prepare_targets(torch.arange(2)),
    )
    start = layout.own_values().repeat(2, 1)
    work = training(layout, data, LocalTraining(optimizer="sgd", lr=0.1, batch_size=16), start)
    ours, theirs = start.clone(), start.clone()
    program.train(ours, work)
    LoopEngine(layout, objective).train(theirs, work, 2)
    assert float((theirs - start).abs().max()) > 1e-2
    assert float((ours - theirs).abs().max()) < 1e-4


@pytest.mark.full
def test_images_of_bytes_are_prepared_augmented_and_disturbed_as_by_the_loop_engine():
    with Rng(0).temporary_torch_seed("init"):
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(4 * 4 * 5, 4)
        )
    layout = Layout(model)
    stream = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (40, 2, 6, 7), generator=stream, dtype=torch.uint8)
    y = torch.randint(0, 4, (40,), generator=stream)
    data = RawSamples(x, y, torch.float32, (0.4, 0.5), (0.2, 0.3))
    program = TracedProgram(
        layout,
        cross_entropy,
        data.prepare_inputs(torch.arange(2)),
        data.prepare_targets(torch.arange(2)),
    )
    start = layout.own_values().repeat(2, 1)
    plain = training(layout, data, LocalTraining(optimizer="sgd", lr=0.1, batch_size=9), start)
    crops = CropFlip(torch.tensor([3, 1 << 60]), 2, data.black_pixel())
    noise = InputNoise(torch.tensor([5, 1 << 59]), torch.tensor([0.0, 0.7]), 20)
    found = []
    for work in (plain, replace(plain, augment=crops), replace(plain, augment=crops, noise=noise)):
        ours, theirs = start.clone(), start.clone()
        losses = program.train(ours, work), LoopEngine(layout, cross_entropy).train(theirs, work, 2)
        torch.testing.assert_close(*losses, rtol=0, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        found.append(ours)
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    assert torch.equal(found[1][0], found[2][0])  # without noise
    assert not torch.allclose(found[1][1], found[2][1], atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", first_only(["writes", "pools"]))
def test_no_bit_depends_on_threads_on_blocks_or_on_who_is_trained_beside(name):
    make, features, objective, _together = MODULES[name]
    with Rng(0).temporary_torch_seed("init"):
        layout = Layout(make())
    data = data_of(features, True, torch.float32)
    engine = CompiledEngine(
        layout,
        objective,
        data.prepare_inputs(torch.arange(2)),
        data.prepare_targets(torch.arange(2)),
    )
    local = LocalTraining(lr=0.01, batch_size=8)
    start = layout.own_values().repeat(5, 1)
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
        engine.train(alone, every.select_clients(slice(client, client + 1)), 1)
        assert torch.equal(alone[0], rows[client])


def test_every_operation_that_can_be_lowered_is_one_of_pytorch():
    handlers = {name.removeprefix("_op_") for name in dir(ImageLowering) if name.startswith("_op_")}
    own = {"write"}  # a view written into its base
    tables = [
        table for name, table in vars(lower).items() if name.isupper() and isinstance(table, dict)
    ]
    assert len(tables) == 6
    names = handlers.union(*tables) - own
    assert {
        "mm",
        "convolution",
        "exp",
        "tanh_backward",
        "add",
        "eq",
        "logical_or",
        "bitwise_and",
    } <= names
    assert [name for name in sorted(names) if not hasattr(torch.ops.aten, name)] == []
    assert all(map(ImageLowering.knows, names))


UNREACHED = {
    "_reshape_alias",
    "_unsafe_index_put",
    "empty",
    "empty_strided",
    "lift_fresh",
    "lift_fresh_copy",
}
"""Recorded by other versions of PyTorch, in the place of operations that are tried."""


def test_every_operation_that_can_be_lowered_is_in_a_module_that_is_compared():
    """Of operations that no module has, nothing notices a wrong result: forty were not tried."""
    names = set()
    for make, features, objective, _ in MODULES.values():
        layout = Layout(make(), torch.float64)
        data = data_of(features, objective in (cross_entropy, several_targets), torch.float64)
        some = torch.arange(2)
        traces = record(
            layout,
            objective,
            data.prepare_inputs(some),
            data.prepare_targets(some),
            ImageLowering.knows,
        )
        for trace in (traces.train, traces.judge):
            names |= {node.name for node in trace.nodes}
    handlers = {name.removeprefix("_op_") for name in dir(ImageLowering) if name.startswith("_op_")}
    assert sorted((handlers | lower.ELEMENTWISE) - names - UNREACHED) == []


class First(nn.Linear):
    """Compares each sample with the first one of its batch."""

    def forward(self, input):
        return super().forward(input - input[0])


class Alone(nn.Linear):
    """Puts samples into other orders and back."""

    def forward(self, input):
        return super().forward(input.flip(0)).flip(0)


@pytest.mark.parametrize(("module", "together"), [(First(7, 4), True), (Alone(7, 4), False)])
def test_samples_that_need_each_other_are_found(module, together):
    traces = record(Layout(module), cross_entropy, torch.randn(2, 7), torch.tensor([0, 1]))
    assert traces.together == together


class Chance(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"last": nn.Linear(7, 4)})

    def forward(self, x):
        return self.inner["last"](x + torch.poisson(torch.ones_like(x)))


class Branches(nn.Linear):
    def forward(self, input):
        return super().forward(input) * (2 if float(input.sum()) > 0 else 1)


class Pairwise(nn.Linear):
    def forward(self, input):
        y = super().forward(input)
        return (y @ y.t()).softmax(1) @ y


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Conv3d(1, 2, 1)
        self.last = nn.Linear(14, 4)

    def forward(self, x):
        return self.last(self.part(x[:, None, :, None, None]).flatten(1))


class Function(nn.Linear):
    """A layer behind a function."""

    def __init__(self, function):
        super().__init__(7, 4)
        self.function = function

    def forward(self, input):
        return super().forward(self.function(input))


def larger(x):
    return functional.interpolate(x[:, None, None], size=(1, 10))[:, 0, 0, :7]


LARGE_TENSOR = torch.linspace(0, 1, (1 << 16) + 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Chance(), "it draws random numbers of its own"),
        (Branches(7, 4), "what it computes depends on its data"),
        (Pairwise(7, 4), "every sample of a batch with every other"),
        (Volumes(), "three-dimensional convolution in 'part'"),
        (Function(larger), "factor that is no whole number"),
        (
            Function(lambda x: functional.avg_pool2d(x[:, None, :], 1)[:, 0]),
            "pooling of a single image",
        ),
        (Function(lambda x: x.view(torch.int64).to(x)), "bits of numbers as another type"),
        (
            Function(lambda x: x * functional.one_hot(x[:, 0].long() % 2)[:, :1]),
            "classes depends on its data",
        ),
        (Function(lambda x: x + torch.arange(len(x) + 1)[:-1, None]), "not as many as samples"),
        (Function(torch.erfinv), "the operation erfinv is not known"),
        (Function(lambda x: torch.roll(x, 1)), "roll over all axes"),
        (Function(lambda x: torch.roll(x, 1, 0)), "roll over the samples of a batch"),
        (Function(lambda x: x + x.argmax()), "argmax over all axes"),
        (Function(lambda x: x + x.argmin()), "argmin over all axes"),
        (Function(lambda x: x / x.norm(3, dim=1, keepdim=True)), "a norm of order 3"),
        (
            Function(lambda x: x + x[torch.arange(2), torch.arange(2)].sum()),
            "indexing with several tensors, or with a mask",
        ),
        (Function(lambda x: torch.addmm(x[0], x, torch.eye(7).to(x), beta=0.5)), "addmm with fact"),
        (Function(lambda x: x + functional.mse_loss(x, x.sin())), "the loss is not one a sample"),
        (Function(lambda x: x.float().double()), "numbers of type float32"),
        (
            Function(lambda x: x * LARGE_TENSOR[x.long() % 7]),
            "it holds a large tensor that is neith",
        ),
    ],
)
def test_what_cannot_be_traced_is_named(module, reason):
    layout = Layout(module, torch.float64)
    with pytest.raises(NotTraceableError, match=reason):
        TracedProgram(
            layout, cross_entropy, torch.randn(2, 7, dtype=torch.float64), torch.tensor([0, 1])
        )


@pytest.mark.full
def test_a_batch_of_one_sample_is_left_to_the_loop_engine_where_samples_need_each_other():
    layout = Layout(Table(), torch.float64)
    data = data_of((7,), True, torch.float64)
    engine = CompiledEngine(
        layout,
        cross_entropy,
        data.prepare_inputs(torch.arange(2)),
        data.prepare_targets(torch.arange(2)),
    )
    rows = layout.own_values()[None].clone()
    work = training(layout, data, LocalTraining(batch_size=8), rows.repeat(2, 1)).select_clients(
        slice(0, 1)
    )
    work.batch_sizes[:, 1] = 1
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        engine.train(rows, work, 1)


def test_the_number_of_samples_is_a_variable_of_a_trace():
    layout = Layout(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)))
    traces = record(layout, cross_entropy, torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))
    shapes = [kind.shape for kind in traces.train.kinds.values()]
    assert (Dim(1), 2, 2, 2) in shapes
    assert (Dim(1), 8) in shapes
    assert not traces.together


def test_views_are_taken_without_copies_where_strides_allow_it():
    images = in_memory(
        "b", (Dim(1), 6, 4, 5), dense_strides((Dim(1), 6, 4, 5), (0, 2, 3, 1)), torch.float32
    )
    rows = reshape(images, (Dim(1), 6, 20))
    assert rows is not None
    assert rows.leaves[0].strides == (120, 1, 6)
    assert reshape(images, (Dim(1), 120)) is None
    groups = reshape(images, (Dim(1), 2, 3, 20))
    assert groups is not None
    assert groups.leaves[0].strides == (120, 3, 1, 6)


def test_an_option_that_a_lowering_does_not_take_is_named(monkeypatch):
    """Whatever option a later PyTorch adds, it is not passed over."""
    monkeypatch.setattr(ImageLowering, "_op_gelu", lambda self, x: x)
    layout = Layout(Function(lambda x: functional.gelu(x, approximate="tanh")), torch.float64)
    with pytest.raises(NotTraceableError, match="gelu has an option that is not known"):
        TracedProgram(
            layout, cross_entropy, torch.randn(2, 7, dtype=torch.float64), torch.tensor([0, 1])
        )


def test_modules_of_other_numbers_are_refused():
    x, y = torch.randn(2, 7, dtype=torch.bfloat16), torch.tensor([0, 1])
    with pytest.raises(NotTraceableError, match=r"numbers of type torch\.bfloat16 are not known"):
        TracedProgram(Layout(nn.Linear(7, 4), torch.bfloat16), cross_entropy, x, y)


def test_what_an_option_is_when_it_is_left_out_is_what_it_is_in_pytorch():
    """The defaults of every lowering, against PyTorch's own list of operations."""
    compared = 0
    for cls in (ImageLowering, SampleLowering):
        for attribute in dir(cls):
            packet = getattr(torch.ops.aten, attribute.removeprefix("_op_"), None)
            if not attribute.startswith("_op_") or packet is None:
                continue
            known: dict[int | str, list[object]] = {}
            for overload in packet.overloads():
                for place, argument in enumerate(getattr(packet, overload)._schema.arguments):
                    if argument.has_default_value():
                        place_or_name = argument.name if argument.kwarg_only else place
                        known.setdefault(place_or_name, []).append(argument.default_value)
            parameters = list(inspect.signature(getattr(cls, attribute)).parameters.values())
            for place, parameter in enumerate(parameters[1:]):
                name = parameter.name if parameter.kind is parameter.KEYWORD_ONLY else place
                if parameter.default is parameter.empty or name not in known:
                    continue
                # An empty list, and a number for each axis, are none, and that number.
                same = [parameter.default, [parameter.default], [parameter.default] * 2]
                if parameter.default in (None, ()):
                    same += [None, [], False]
                assert any(value in same for value in known[name]), (attribute, name, known[name])
                compared += 1
    assert compared > 60


def test_statements_are_cut_into_functions_that_are_given_what_they_use():
    declarations = (
        "const Batch& batch",
        "T* row",
        "const bool more",
        "constexpr long n = 8;",
        "static const int64_t b0_[] = {1, 2};",
        "const int64_t* const b0 = b0_;",
        "T* const b1 = (T*)(batch.arena + batch.at[1]);",
    )
    first = ["b1[0] = row[b0[0]];", "b1[1] = n;", "b1[2] = part(b1[1]);", "row[0] = b1[2];"]
    calls = _cut([*first, "if (!more) row[1] = 0;"], declarations)
    assert calls == [
        "[](decltype(b1) b1, decltype(row) row, decltype(b0) b0) __attribute__((noinline)) "
        "{ b1[0] = row[b0[0]]; b1[1] = n; b1[2] = part(b1[1]); row[0] = b1[2]; }(b1, row, b0);",
        "[](decltype(more) more, decltype(row) row) __attribute__((noinline)) "
        "{ if (!more) row[1] = 0; }(more, row);",
    ]
