"""The models that engines are compared on take the inputs that come with them."""

import pytest
import torch
from benchmarks.zoo import ZOO
from torch.nn import functional

from coterie.rng import Rng

PARAMETERS = {
    "linear": 784 * 10 + 10,
    "mlp-128": 784 * 128 + 128 + 128 * 10 + 10,
    "lenet": 62_006,
    "lenet-bn": 62_006 + 2 * (6 + 16),
    "simple-cnn": 107_690,  # SosicFL's table
    "femnist-cnn": 6_603_710,  # LEAF's
    "resnet20-bn": 272_474,  # He et al.: 0.27 million, with 1x1 convolutions around the wider stages
    "mobilenet-v2": 2_236_682,
    "resnet-18": 11_181_642,
    "tabular-bn": 20 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2 + 2 * 128,
    "gru": 90 * 32 + 3 * 64 * (32 + 64 + 2) + 64 * 10 + 10,
    "lstm": 90 * 32 + 4 * 64 * (32 + 64 + 2) + 64 * 10 + 10,
}


@pytest.mark.parametrize("name", ZOO)
def test_a_model_takes_its_own_inputs(name: str):
    entry = ZOO[name]
    with Rng(0).torch_globals("test"):
        module = entry.make()
    x, y = entry.data(3, torch.Generator().manual_seed(0))
    assert x.dtype == torch.get_default_dtype()
    assert 0 <= int(y.min()) <= int(y.max()) < entry.classes
    outputs = module(x)
    assert outputs.shape == (3, entry.classes)
    functional.cross_entropy(outputs, y).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())
    if name in PARAMETERS:
        assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name]
