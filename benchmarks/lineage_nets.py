"""Networks of the repositories that the papers' code came from, for benchmarks/lineage.toml."""

from collections.abc import Sequence

from torch import nn


def build_pooled_cnn(
    features: tuple[int, ...], outputs: int, channels: Sequence[int], hidden: int = 64
) -> nn.Module:
    """Build blocks of a 3 x 3 convolution without padding, ReLU and pooling by two, then a hidden layer.

    Args:
        features: the shape of an image: channels, height, width.
        outputs: number of classes.
        channels: of each block.
        hidden: width of the hidden layer.
    """
    depth, height, width = features
    layers: list[nn.Module] = []
    for wide in channels:
        layers += [nn.Conv2d(depth, wide, 3), nn.ReLU(), nn.MaxPool2d(2)]
        depth, height, width = wide, (height - 2) // 2, (width - 2) // 2
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(depth * height * width, hidden), nn.ReLU(),
        nn.Linear(hidden, outputs),
    )  # fmt: skip
