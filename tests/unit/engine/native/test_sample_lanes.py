"""Networks that are computed with samples across the vector, and those that are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.engine._base import cross_entropy
from coterie.engine.native.images import ImageLowering
from coterie.engine.native.sample_lanes import samples_pay
from coterie.engine.native.trace import record
from coterie.models.layout import Layout, build_model


def small(*layers) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, nn.Flatten(), nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: build_model("cnn-b", (1, 12, 12), 3), True),
        (lambda: small(nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.AvgPool2d(2)), True),
        (lambda: small(nn.MaxPool2d(3, 2)), True),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), False),
        (lambda: small(nn.GroupNorm(2, 4)), False),
        (lambda: small(nn.BatchNorm2d(4)), False),
        (lambda: small(nn.Conv2d(4, 4, 3, stride=2)), False),
        (lambda: small(nn.Conv2d(4, 4, 3, dilation=2)), False),
        (lambda: small(nn.Conv2d(4, 4, 3, groups=2)), False),
        (lambda: small(nn.Conv2d(4, 4, 3, padding=3)), False),
        (lambda: small(nn.Flatten(), nn.Linear(400, 2500)), False),
    ],
    ids=[
        "net B", "average pooling", "windows that overlap", "no images", "group norm", "batch norm", "stride", "dilation",
        "groups", "wide padding", "a million numbers",
    ],
)  # fmt: skip
def test_samples_lie_across_the_vector_where_every_layer_has_a_kernel_for_that(make, expected):
    x = torch.randn(3, 1, 12, 12)
    module = make()
    module(x)
    layout = Layout(module)
    traces = record(layout, cross_entropy, x, torch.tensor([0, 1, 2]), ImageLowering.knows)
    assert (not traces.together and samples_pay(traces.train, layout.size)) == expected


class Turned(nn.Module):
    """Layers whose inputs and outputs are copied between the two orders of memory."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(7, 2 * 5 * 6)
        self.one, self.two = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, (1, 3), padding=(0, 1))
        self.last = nn.Linear(3 * 2 * 3, 4)

    def forward(self, x):
        images = self.start(x).view(len(x), 2, 5, 6)
        images = torch.tanh(self.one(images))
        images = functional.avg_pool2d(images + self.two(images), 2)
        return self.last(images.flatten(1))
