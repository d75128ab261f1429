"""Products at lower precision: what it changes, what it leaves, and where it is refused."""

import pytest
import torch
from torch import nn

from coterie import engine as engines
from coterie.engine import precision
from coterie.engine.task import LocalTraining, Task
from coterie.errors import ConfigError
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.studies import config
from coterie.testing import tiny_federation
from coterie.testing.tiny import build_task


class Net(nn.Module):
    """Convolutions on one-channel images made of four numbers, with batch normalization."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv2d(1, 5, 3, padding=1),
            nn.BatchNorm2d(5),
            nn.Linear(5, 3),
        )

    def forward(self, x):
        image = x.unflatten(1, (1, 2, 2)).repeat(1, 1, 2, 2)
        return self.head(torch.relu(self.norm(self.conv(image))).mean((2, 3)))


def trained(engine: str, wanted: str) -> tuple[Task, torch.Tensor, torch.Tensor]:
    task = build_task(tiny_federation().host(range(6)), Net, engine=engine, precision=wanted)
    params, info, _ = task.train(
        task.initial_models(Rng(0)),
        Rng(0).at_round(0),
        LocalTraining(batch_size=5, optimizer="sgd", lr=0.1),
    )
    return task, params, info["losses"]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_bfloat16_products_leave_parameters_and_losses_in_float32(engine):
    """Models and losses are near those of full precision (bfloat16 keeps 8 bits), and are no bfloat16 numbers."""
    _, full, losses = trained(engine, "full")
    task, params, rough = trained(engine, "bf16")
    assert params.dtype == rough.dtype == task.loss(params, "train").dtype == torch.float32
    assert not torch.equal(params, params.bfloat16().float())
    assert not torch.equal(rough, rough.bfloat16().float())
    assert 1e-5 < float((params - full).abs().max()) < 0.05
    assert 0 < float((rough - losses).abs().max()) < 0.05
    assert not torch.is_autocast_enabled("cpu")


def test_engines_agree_at_lower_precision_as_far_as_it_goes(loss_table):
    """And measure alike: eight bits are about 0.4 %."""
    (loop, one, _), (vmap, other, _) = (trained(engine, "bf16") for engine in ("loop", "vmap"))
    assert torch.allclose(one, other, atol=0.02)
    assert torch.allclose(loss_table(loop, one), loss_table(vmap, one), rtol=0.01, atol=0.01)


def test_auto_does_not_compile_at_lower_precision_and_compiled_refuses_it():
    federation = tiny_federation().host(range(6))
    assert (
        build_task(
            federation, "linear", engine="auto", train_samples=1e6, precision="bf16"
        ).engine.name
        == "vmap"
    )
    with pytest.raises(
        ConfigError, match="engine = 'compiled' computes in full; found precision = 'bf16'"
    ):
        build_task(federation, "linear", engine="compiled", precision="bf16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "tf32"}, "precision = 'tf32' is for a CUDA device; found device 'cpu'"),
        (
            {"precision": "bf16", "dtype": torch.float64},
            "is for dtype = 'float32'; found torch.float64",
        ),
        ({"cuda_graphs": True}, "cuda_graphs is for a CUDA device; found device 'cpu'"),
        ({"precision": "half"}, "precision is 'half'"),
    ],
)
def test_what_a_device_cannot_do_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_task(tiny_federation().host(range(6)), "linear", **options)


@pytest.mark.parametrize(("wanted", "on"), [("full", False), ("tf32", True)])
def test_tf32_is_on_where_it_is_asked_for_and_nowhere_else(wanted, on):
    """Convolutions of cuDNN would take it by default. What was set before comes back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    inside = []
    with precision.product_precision(wanted, torch.device("cuda")):
        inside += [matmul.allow_tf32, cudnn.allow_tf32]
    assert inside == [on, on]
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before


def test_cuda_graphs_are_for_a_device_alone():
    """On a CPU nothing is captured; tests/unit/engine/test_graphs.py says what is on a device."""
    task = build_task(tiny_federation().host(range(6)), "linear")
    loss = torch.nn.functional.cross_entropy
    plain, replaying = (
        engines.VmapEngine(task.layout, loss, cuda_graphs=wanted) for wanted in (False, True)
    )
    assert plain._replayed is None
    rows, x, y = (
        task.initial_models(Rng(0)),
        torch.rand(6, 4, 4),
        torch.zeros(6, 4, dtype=torch.int64),
    )
    for _ in range(9):
        torch.testing.assert_close(
            replaying.compute_gradients(rows, x, y, {}), plain.compute_gradients(rows, x, y, {})
        )
    assert replaying._replayed is not None
    assert not replaying._replayed._captured


def test_a_study_says_its_precision_and_one_that_does_not_is_what_it_was():
    study = config.load_study("rotated-digits", ["precision='bf16'"])
    assert study.settings.precision == "bf16"
    assert config.hash_study(study) != config.hash_study(config.load_study("rotated-digits"))
    assert "precision" not in config.make_identity(config.load_study("rotated-digits"))
    assert Settings().precision == "full"
