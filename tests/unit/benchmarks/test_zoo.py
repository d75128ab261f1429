"""The models that engines are compared on take the inputs that come with them, and every engine trains them alike."""

import warnings

import pytest
import torch
from torch.nn import functional

from benchmarks.zoo import ZOO
from coterie.data.federation import Federation
from coterie.engine import ENGINES
from coterie.engine.task import LocalTraining
from coterie.rng import Rng
from coterie.testing.tiny import build_task

PARAMETERS = {
    "linear": 784 * 10 + 10,
    "mlp-128": 784 * 128 + 128 + 128 * 10 + 10,
    "lenet": 62_006,
    "lenet-bn": 62_006 + 2 * (6 + 16),
    "simple-cnn": 107_690,  # SosicFL's table
    "femnist-cnn": 6_603_710,  # LEAF's
    # He et al.: 0.27 million, with 1x1 convolutions around the wider stages
    "resnet20-bn": 272_474,
    "mobilenet-v2": 2_236_682,
    "resnet-18": 11_181_642,
    "tabular-bn": 20 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2 + 2 * 128,
    "gru": 90 * 32 + 3 * 64 * (32 + 64 + 2) + 64 * 10 + 10,
    "lstm": 90 * 32 + 4 * 64 * (32 + 64 + 2) + 64 * 10 + 10,
}


@pytest.mark.parametrize("name", ZOO)
def test_a_model_takes_its_own_inputs(name: str):
    entry = ZOO[name]
    with Rng(0).temporary_torch_seed("test"):
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


def trained(
    name: str, engine: str, dtype: torch.dtype, **settings
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return models and losses after a step and a ragged one; None where the engine does not run the model.

    Batches are of 12 and 8: with three or four samples, batch normalization over single pixels
    magnifies rounding to percents within a few steps of MobileNetV2.
    """
    entry, stream = ZOO[name], torch.Generator().manual_seed(0)
    x, y = entry.data(2 * 20, stream)
    x, y = x.unflatten(0, (2, 20)), y.unflatten(0, (2, 20))
    ids = torch.arange(2)
    federation = Federation(
        x=x, y=y, split=torch.zeros_like(y), tests=(), test_of=torch.zeros_like(ids), ids=ids, population=2,
        classes=entry.classes,
    )  # fmt: skip
    local = LocalTraining(optimizer="sgd", lr=0.01, momentum=0.9, batch_size=12)
    with warnings.catch_warnings():
        # an engine that does not run a model says so, and PyTorch where vmap is slow
        warnings.simplefilter("ignore")
        task = build_task(
            federation, entry.make, engine=engine, dtype=dtype, batch_size=12, **settings
        )
        if task.engine.name != engine:
            return None
        params, info, _ = task.train(task.initial_models(Rng(0)).clone(), Rng(0).at_round(0), local)
    return params, info["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "loop"])
@pytest.mark.parametrize("name", ZOO)
def test_every_engine_trains_a_model_as_the_loop_engine_does(name: str, engine: str):
    found, loop = trained(name, engine, torch.float64), trained(name, "loop", torch.float64)
    assert loop is not None
    if found is None:
        # PyTorch has no rule for batching them
        assert (name, engine) in {("gru", "vmap"), ("lstm", "vmap")}
        return
    for ours, theirs in zip(found, loop, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        apart = (ours - theirs).nan_to_num(0).abs().max() / theirs.nan_to_num(0).abs().max()
        assert float(apart) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["lenet-bn", "resnet8-gn", "gru", "transformer"])
def test_no_bit_of_a_model_depends_on_who_is_trained_in_the_same_block(name: str, engine: str):
    both, alone = (trained(name, engine, torch.float32, block=block) for block in (2, 1))
    if both is None or alone is None:
        assert (name, engine) == ("gru", "vmap")
        return
    for one, other in zip(both, alone, strict=True):
        assert torch.equal(one.nan_to_num(9), other.nan_to_num(9))
