"""The networks of the server-based papers: shapes, sizes, pretrained features, a missing torchvision."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from coterie.errors import ModelError
from coterie.methods.sosicfl import SosicFl
from coterie.models import networks
from coterie.models.layout import NETS, Layout, build_model
from coterie.rng import Rng
from coterie.testing import run_method, tiny_federation, tiny_settings

VISION = {"squeezenet": 727_626, "mobilenet-v2": 2_236_682, "resnet-18": 11_181_642}


@pytest.mark.parametrize(
    ("kind", "features", "outputs", "size"),
    [
        ("cnn-y", (3, 32, 32), 100, 815_332),
        ("lenet-5", (1, 28, 28), 47, 64_851),
        ("simple-cnn", (3, 32, 32), 10, 107_690),
        ("simple-cnn", (3, 64, 64), 200, 0),
        ("cnn-y", (1, 28, 28), 10, 0),
    ],
)
def test_networks_have_the_papers_sizes(
    kind: str, features: tuple[int, ...], outputs: int, size: int
):
    """The number of parameters where it is known, and an output for each class, for other images too."""
    module = build_model(kind, features, outputs)
    assert module(torch.zeros(2, *features)).shape == (2, outputs)
    if size:
        assert sum(p.numel() for p in module.parameters()) == size


@pytest.mark.parametrize("kind", ["cnn-a", "cnn-b", "cnn-y", "lenet-5", "simple-cnn"])
@pytest.mark.parametrize("size", [(32, 44), (44, 32)])
def test_images_need_not_be_square(kind: str, size: tuple[int, int]):
    """Height and width are taken each for itself."""
    assert build_model(kind, (3, *size), 7)(torch.zeros(2, 3, *size)).shape == (2, 7)


def test_cnn_y_pools_before_relu():
    """As the authors' code does."""
    names = [type(part).__name__ for part in networks.cnn_y((3, 32, 32), 10)]
    assert names[:3] == ["Conv2d", "MaxPool2d", "ReLU"]


def test_simple_cnn_has_xavier_normal_weights():
    """Standard deviation sqrt(2 / (fan in + fan out)) of the largest layer, within 3 %."""
    with Rng(0).temporary_torch_seed("test"):
        layer = networks.simple_cnn((3, 32, 32), 10)[10]
    assert layer.weight.shape == (128, 576)
    assert float(layer.weight.detach().std()) == pytest.approx((2 / (128 + 576)) ** 0.5, rel=0.03)


@pytest.fixture
def torchvision() -> Iterator[None]:
    """torchvision, also where its compiled operators are missing: the two it asks for on import are declared first."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    library = None
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torchvision")
    yield
    del library


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("kind", sorted(VISION))
def test_networks_of_torchvision(kind: str):
    """Sizes with ten classes; a layout separates running statistics from parameters."""
    module = build_model(kind, (3, 32, 32), 10)
    assert sum(p.numel() for p in module.parameters()) == VISION[kind]
    layout = Layout(module)
    assert layout.trainable == VISION[kind]
    assert (layout.size > layout.trainable) == (kind != "squeezenet")


@pytest.mark.usefixtures("torchvision")
def test_a_simplex_of_squeezenets_last_convolution_trains():
    """One round of SosicFL and one of FedAvg with running statistics, on tiny images."""
    federation = tiny_federation(3, 1, train=4, validation=2, features=(3, 32, 32))
    settings = tiny_settings(rounds=1, engine="loop", dtype="float32")
    loop = run_method(
        SosicFl(endpoints=2, regions=1),
        federation=federation,
        model="squeezenet",
        settings=settings,
    )
    assert bool(torch.isfinite(loop.state.shared.models).all())
    slots = {slot.name: slot.shape for slot in loop.task.layout.slots}
    assert slots["classifier.1.weight"] == (2, 3, 512, 1, 1)


def test_a_missing_torchvision_is_explained(monkeypatch: pytest.MonkeyPatch):
    """One line that names the extra, and wrong inputs before that."""

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(networks.importlib, "import_module", missing)
    with pytest.raises(
        ModelError,
        match=r"resnet18 needs torchvision, .* pip install 'torchvision>=.*', the one that was built for your PyTorch",
    ):
        build_model("resnet-18", (3, 32, 32), 10)
    with pytest.raises(ModelError, match="color images of at least 3x32x32; found 1x28x28"):
        build_model("resnet-18", (1, 28, 28), 10)
    assert set(networks.NETS) < set(NETS)


@pytest.mark.parametrize("kind", sorted(VISION))
def test_a_torchvision_built_for_another_pytorch_is_explained(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Its operators are missing on import, as with a registry's build beside a CPU build: the fix is named."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    found = r"cannot be imported \(operator torchvision::nms does not exist\); "
    fix = r"pip install 'torchvision>=.*', the one that was built for your PyTorch"
    for _ in range(2):
        with pytest.raises(ModelError, match=found + fix) as caught:
            build_model(kind, (3, 32, 32), 10)
        assert "\n" not in str(caught.value)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)


def two_layers(outputs: int) -> nn.Module:
    """A backbone of one layer and a head."""
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, outputs))


def test_pretrained_features_are_taken_and_the_head_is_not(tmp_path: Path):
    """Another number of classes is fine; a missing tensor, another shape and a damaged file are named."""
    source, path = two_layers(7), tmp_path / "weights.safetensors"
    save_file(dict(source.state_dict()), path)
    module = two_layers(2)
    head = module[2].weight.detach().clone()
    assert networks.load_features(module, path) is module
    assert torch.equal(module[0].weight, source[0].weight)
    assert torch.equal(module[2].weight, head)
    save_file({"0.weight": source[0].weight.detach(), "0.bias": torch.zeros(5)}, path)
    with pytest.raises(ModelError, match=r"has shape \(5,\) for '0.bias'; expected shape \(3,\)"):
        networks.load_features(two_layers(2), path)
    save_file({"0.weight": source[0].weight.detach()}, path)
    with pytest.raises(ModelError, match=r"has nothing for '0.bias'; expected shape \(3,\)"):
        networks.load_features(two_layers(2), path)
    path.write_bytes(b"damaged")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        networks.load_features(two_layers(2), path)
