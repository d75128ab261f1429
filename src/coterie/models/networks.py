"""Reference networks of the server-based papers; `layout.NETS` lists all networks.

SqueezeNet, MobileNetV2 and ResNet-18 are torchvision's, which the extra `vision` installs.
"""

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import init

from coterie._util import extras
from coterie.errors import ModelError


def pooled_side(side: int, *kernels: int, pad: int = 0) -> int:
    """Return the side of images after convolutions, padded alike, each with a pooling by 2."""
    for kernel in kernels:
        # The pooling drops an odd last place.
        side = (side + 2 * pad - kernel + 1) // 2
    return side


def cnn_y(features: tuple[int, ...], outputs: int) -> nn.Module:
    """The CNN of FedGWC's code; 815,332 parameters at 3x32x32 and 100 outputs (CNN-100)."""
    channels, height, width = features
    flat = 64 * pooled_side(height, 5, 5) * pooled_side(width, 5, 5)
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(64, 64, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(flat, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, outputs),
    )  # fmt: skip


def lenet_5(features: tuple[int, ...], outputs: int) -> nn.Module:
    """LeNet-5 as FedGWC uses it on EMNIST; 64,851 parameters at 1x28x28 and 47 outputs."""
    channels, height, width = features
    # The first convolution is padded and keeps the size, the second takes 4 places.
    flat = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, outputs),
    )  # fmt: skip


def simple_cnn(features: tuple[int, ...], outputs: int) -> nn.Module:
    """SosicFL's SimpleCNN, Xavier-normal; 107,690 parameters at 3x32x32 and 10 outputs."""
    channels, height, width = features

    # The kernels of 5 take 4 places, and 2 where they are padded; that of 3 is padded and takes
    # none. Each is pooled by 2.
    def conv_output_side(n: int) -> int:
        return (((n - 4) // 2 - 2) // 2) // 2

    module = nn.Sequential(
        nn.Conv2d(channels, 16, 5), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * conv_output_side(height) * conv_output_side(width), 128), nn.LeakyReLU(),
        nn.Linear(128, outputs),
    )  # fmt: skip
    for part in module:
        if isinstance(part, nn.Conv2d | nn.Linear):
            init.xavier_normal_(part.weight)
    return module


def build_from_torchvision(name: str, features: tuple[int, ...], outputs: int) -> nn.Module:
    """Build a network of torchvision with random weights.

    Args:
        name: the function's name in `torchvision.models`.
        features: three channels, and a height and width of at least 32.
        outputs: number of classes.

    Raises:
        ModelError: when torchvision is not installed, or for inputs of another shape.
    """
    if features[0] != 3 or min(features[1:]) < 32:
        shape = "x".join(map(str, features))
        raise ModelError(f"{name} takes color images of at least 3x32x32; found {shape}")
    try:
        models = importlib.import_module("torchvision.models")
    # torchvision raises RuntimeError where it was built for another PyTorch.
    except (ImportError, RuntimeError) as error:
        raise ModelError(
            f"{name} needs torchvision, which cannot be imported ({error}); "
            f"{extras.install_command('vision')}, the one that "
            "was built for your PyTorch (see https://pytorch.org/get-started)"
        ) from error
    return getattr(models, name)(num_classes=outputs)


def load_features(module: nn.Module, path: str | Path) -> nn.Module:
    """Load weights from a safetensors file into all layers but the last; for `init="given"`.

    Args:
        module: changed in place and returned. Its last layer, which depends on the number of
            classes, is not changed.
        path: the file; its tensors have the names of the module's state.

    Raises:
        ModelError: when the file is damaged, or lacks a tensor of the module or has it in another
            shape.
    """
    try:
        values = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
    own: dict[str, Tensor] = module.state_dict()
    # The last layer has the outputs of ImageNet in the file, and those of the task here.
    last = list(dict(module.named_parameters()))[-1].rpartition(".")[0]
    for name, tensor in own.items():
        if name.rpartition(".")[0] == last:
            continue
        found = values.get(name)
        if found is None or found.shape != tensor.shape:
            there = "nothing"
            if found is not None:
                there = f"shape {tuple(found.shape)}"
            raise ModelError(
                f"{path} has {there} for {name!r}; expected shape {tuple(tensor.shape)}"
            )
        # `state_dict` shares its tensors with the module.
        tensor.copy_(found)
    return module


PRETRAINED = {
    "squeezenet": "squeezenet1_1",
    "mobilenet-v2": "mobilenet_v2",
    "resnet-18": "resnet18",
}
"""torchvision's names of the networks that can start from a file of pretrained weights."""


def build_pretrained(kind: str, features: tuple[int, ...], outputs: int) -> nn.Module:
    """Build a torchvision network with weights from a file and a new last layer.

    Args:
        kind: a name of PRETRAINED.
        features: the shape of one input.
        outputs: number of classes.

    Raises:
        ModelError: when the environment variable COTERIE_RESNET18 (_SQUEEZENET, _MOBILENETV2) names
            no such file.
    """
    variable = f"COTERIE_{kind.replace('-', '').upper()}"
    path = os.environ.get(variable)
    if not path or not Path(path).is_file():
        found = f"{variable} is not set"
        if path:
            found = f"{variable} is {path!r}"
        raise ModelError(
            f"{kind}-pretrained: {found}; expected a safetensors file with torchvision's "
            f"{PRETRAINED[kind]} for "
            f"ImageNet (or run it from scratch: {kind})"
        )
    return load_features(build_from_torchvision(PRETRAINED[kind], features, outputs), path)


NETS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "cnn-y": cnn_y,
    "lenet-5": lenet_5,
    "simple-cnn": simple_cnn,
    **{kind: partial(build_from_torchvision, name) for kind, name in PRETRAINED.items()},
    **{f"{kind}-pretrained": partial(build_pretrained, kind) for kind in PRETRAINED},
}
"""Networks for images; see `layout.NETS`."""
