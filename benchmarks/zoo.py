"""Small and middle-sized models of every kind that users train in federations: what engines are compared on.

    >>> entry = ZOO["gru"]
    >>> module, (x, y) = entry.make(), entry.data(8, torch.Generator().manual_seed(0))

Sequences of tokens are stored as floats, as a federation keeps its inputs; their modules turn them
into integers.
"""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from coterie.models.layout import NETS

Samples = tuple[Float[Tensor, "samples *features"], Int[Tensor, " samples"]]
TOKENS, LENGTH = 90, 32  # of the vocabulary, and in a sequence


@dataclass(frozen=True)
class Entry:
    """A model with what it is trained on.

    Args:
        make: returns a new module, with weights from PyTorch's global generator.
        data: (number of samples, generator) -> random inputs and classes.
        note: what it is, for people.
        classes: how many.
    """

    make: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], Samples]
    note: str
    classes: int = 10


# ---------------------------------------------------------------- inputs


def numbers(*shape: int, classes: int = 10) -> Callable[[int, torch.Generator], Samples]:
    """Return a maker of normally distributed inputs of one shape."""

    def data(samples: int, generator: torch.Generator) -> Samples:
        x = torch.randn(samples, *shape, generator=generator)
        return x, torch.randint(classes, (samples,), generator=generator)

    return data


def tokens(classes: int) -> Callable[[int, torch.Generator], Samples]:
    """Return a maker of sequences of tokens."""

    def data(samples: int, generator: torch.Generator) -> Samples:
        x = torch.randint(TOKENS, (samples, LENGTH), generator=generator)
        return x.to(torch.get_default_dtype()), torch.randint(
            classes, (samples,), generator=generator
        )

    return data


digits, pictures = numbers(1, 28, 28), numbers(3, 32, 32)


# ---------------------------------------------------------------- plain stacks


def linear() -> nn.Module:
    """Return logistic regression on digits; 7,850 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp() -> nn.Module:
    """Return a network with one hidden layer of 128; 101,770 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp_layer_norm() -> nn.Module:
    """Return two hidden layers of 128 with LayerNorm and GELU; 118,794 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.LayerNorm(128), nn.GELU(),
        nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10),
    )  # fmt: skip


def mlp_batch_norm() -> nn.Module:
    """Return two hidden layers of 128 with BatchNorm and ReLU; 118,794 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def tabular_batch_norm() -> nn.Module:
    """Return a network for 20 columns and 2 classes; 5,890 parameters."""
    return nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2),
    )  # fmt: skip


def lenet_batch_norm() -> nn.Module:
    """Return LeNet (net A) with BatchNorm after its convolutions; 62,050 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def vgg_small() -> nn.Module:
    """Return six 3x3 convolutions in three stages and a hidden layer of 384; 1,077,674 parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 384), nn.ReLU(), nn.Linear(384, 10))


def femnist_cnn() -> nn.Module:
    """Return LEAF's CNN for FEMNIST; 6,603,710 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(3136, 2048), nn.ReLU(), nn.Linear(2048, 62),
    )  # fmt: skip


def conv1d() -> nn.Module:
    """Return three convolutions over 128 moments of 6 sensors; 24,298 parameters."""
    return nn.Sequential(
        nn.Conv1d(6, 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def strided() -> nn.Module:
    """Return three convolutions with stride 2 in place of pooling; 33,834 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def average_pool() -> nn.Module:
    """Return LeNet (net A) with average pooling; 62,006 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


# ---------------------------------------------------------------- residual networks


class Residual(nn.Module):
    """Two 3x3 convolutions with normalization, and a way around them.

    Args:
        inputs: channels.
        outputs: channels.
        stride: of the first convolution.
        norm: channels -> a normalization layer.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add the two ways."""
        return functional.relu(self.body(x) + self.around(x))


def four_groups(channels: int) -> nn.Module:
    """Return GroupNorm with four groups."""
    return nn.GroupNorm(4, channels)


def resnet(
    blocks: int, norm: Callable[[int], nn.Module], widths: Sequence[int] = (16, 32, 64)
) -> nn.Module:
    """Return a residual network for small images.

    Args:
        blocks: of a stage: with the three stages 1 is ResNet-8, and 3 is ResNet-20.
        norm: channels -> a normalization layer.
        widths: channels of each stage.
    """
    channels = widths[0]
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 3, 1, 1, bias=False),
        norm(channels),
        nn.ReLU(),
    ]
    for width in widths:
        for _ in range(blocks):
            layers.append(Residual(channels, width, width // channels, norm))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Inverted(nn.Module):
    """MobileNetV2's block with GroupNorm and SiLU: wide, a depthwise convolution, narrow.

    Args:
        inputs: channels.
        outputs: channels.
        stride: of the depthwise convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), four_groups(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), four_groups(wide), nn.SiLU(),
            nn.Conv2d(wide, outputs, 1, bias=False), four_groups(outputs),
        )  # fmt: skip
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Add the input where shapes allow."""
        return x + self.body(x) if self.residual else self.body(x)


def mobile_group_norm() -> nn.Module:
    """Return a small network of MobileNetV2's kind with GroupNorm; 15,050 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), four_groups(16), nn.SiLU(),
        Inverted(16, 16, 1), Inverted(16, 24, 2), Inverted(24, 24, 1), Inverted(24, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def from_torchvision(kind: str) -> nn.Module:
    """Return a network of torchvision for 3x32x32 and ten classes.

    torchvision is not imported where its compiled operators do not fit PyTorch, unless the two that
    it asks for are declared; these networks use neither.

    Args:
        kind: its name in `NETS`.

    Raises:
        ModelError: when torchvision is not installed.
    """
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("torchvision") is not None:
            importlib.import_module("torchvision")
    return NETS[kind]((3, 32, 32), 10)


_declared: list[torch.library.Library] = []  # what a library declares goes with it


# ---------------------------------------------------------------- sequences


class Recurrent(nn.Module):
    """An embedding, a recurrent layer of 64, and the classes from its last state.

    Args:
        layer: `nn.GRU` or `nn.LSTM`.
    """

    def __init__(self, layer: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        self.layer = layer(32, 64, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes of each sequence of tokens."""
        return self.out(self.layer(self.embedding(x.long()))[0][:, -1])


class Attention(nn.Module):
    """A transformer's layer: causal attention and two linear layers, each after LayerNorm and with a way around.

    Args:
        width: of a token.
        heads: of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, z: Tensor) -> Tensor:
        """Return the tokens after the layer."""
        samples, length, width = z.shape
        parts = self.queries_keys_values(self.first(z)).chunk(3, -1)
        q, k, v = (part.reshape(samples, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z = z + self.mixed(seen.transpose(1, 2).reshape(samples, length, width))
        return z + self.narrow(functional.gelu(self.wide(self.second(z))))


class Transformer(nn.Module):
    """Two layers of width 64 with four heads, and the mean over the sequence of the next token's scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 64)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, 64))
        self.layers = nn.Sequential(Attention(64, 4), Attention(64, 4))
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the classes of each sequence of tokens."""
        z = self.layers(self.embedding(x.long()) + self.position)
        return self.out(self.norm(z)).mean(1)


ZOO: dict[str, Entry] = {
    "linear": Entry(linear, digits, "logistic regression, 8 thousand parameters"),
    "mlp-128": Entry(mlp, digits, "one hidden layer of 128"),
    "lenet": Entry(
        partial(NETS["cnn-a"], (3, 32, 32), 10), pictures, "net A, 62 thousand parameters"
    ),
    "lenet-bn": Entry(lenet_batch_norm, pictures, "net A with BatchNorm"),
    "simple-cnn": Entry(
        partial(NETS["simple-cnn"], (3, 32, 32), 10), pictures, "SosicFL's SimpleCNN"
    ),
    "cnn-y": Entry(
        partial(NETS["cnn-y"], (3, 32, 32), 100),
        numbers(3, 32, 32, classes=100),
        "FedGWC's CNN-100",
        classes=100,
    ),
    "vgg-small": Entry(vgg_small, pictures, "six 3x3 convolutions, 1.1 million parameters"),
    "mlp-ln-gelu": Entry(mlp_layer_norm, digits, "two hidden layers of 128, LayerNorm, GELU"),
    "mlp-bn": Entry(mlp_batch_norm, digits, "two hidden layers of 128, BatchNorm"),
    "tabular-bn": Entry(
        tabular_batch_norm, numbers(20, classes=2), "20 columns, BatchNorm", classes=2
    ),
    "femnist-cnn": Entry(
        femnist_cnn,
        numbers(1, 28, 28, classes=62),
        "LEAF's CNN, 6.6 million parameters",
        classes=62,
    ),
    "resnet8-bn": Entry(partial(resnet, 1, nn.BatchNorm2d), pictures, "ResNet-8, BatchNorm"),
    "resnet8-gn": Entry(partial(resnet, 1, four_groups), pictures, "ResNet-8, GroupNorm"),
    "resnet20-bn": Entry(partial(resnet, 3, nn.BatchNorm2d), pictures, "ResNet-20, BatchNorm"),
    "mobile-gn": Entry(mobile_group_norm, pictures, "small, of MobileNetV2's kind, GroupNorm"),
    "mobilenet-v2": Entry(
        partial(from_torchvision, "mobilenet-v2"), pictures, "torchvision's, 2.2 million parameters"
    ),
    "resnet-18": Entry(
        partial(from_torchvision, "resnet-18"), pictures, "torchvision's, 11.2 million parameters"
    ),
    "squeezenet": Entry(
        partial(from_torchvision, "squeezenet"),
        pictures,
        "torchvision's 1.1, 0.7 million parameters",
    ),
    "gru": Entry(partial(Recurrent, nn.GRU), tokens(10), "GRU of 64 over 32 tokens"),
    "lstm": Entry(partial(Recurrent, nn.LSTM), tokens(10), "LSTM of 64 over 32 tokens"),
    "transformer": Entry(
        Transformer, tokens(TOKENS), "two layers of width 64 over 32 tokens", classes=TOKENS
    ),
    "conv1d": Entry(conv1d, numbers(6, 128), "three convolutions over 128 moments of 6 sensors"),
    "strided": Entry(strided, pictures, "three convolutions with stride 2"),
    "avgpool": Entry(average_pool, pictures, "net A with average pooling"),
}
"""The models by name."""
