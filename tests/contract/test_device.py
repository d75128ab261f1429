"""Every method runs on a device other than the CPU, and comes to what it comes to there.

The device is a pretended one (pretend_device.py), since CI has no GPU; where there is one, `pytest
-m gpu` takes it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.pretend_device import pretended_cuda
from tests.contract.test_methods import SETTINGS
from tests.selection import first_only, one_of_each_family
from torch import Tensor, nn
from torch.nn import functional

from coterie.data.federation import Federation
from coterie.engine.task import LocalTraining
from coterie.exchange.faulty import Faulty
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS, Dac, FedAvg, Ifca, PanmGrad, Pens, Random, SosicFlPlus
from coterie.methods.base import Method
from coterie.papers.dac import PublishedDac
from coterie.papers.fedgwc import PublishedFedGwc
from coterie.papers.sosicfl import PublishedSosicFl
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

Cuda = Callable[[], AbstractContextManager[Any]]
ALL_METRICS = ["balanced_accuracy", "train_prior_accuracy", "global_accuracy", "clusters", "maxima", "reductions",
               "gradient_variance", "composed_gradient_variance", "interaction_change"]  # fmt: skip


class Net(nn.Module):
    """What users bring: a convolution, batch normalization, dropout, and a table of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(12, 3)
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, in another order."""
        hidden = functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.head(self.drop(hidden.flatten(1)))[:, self.order]


def images() -> Federation:
    """Six clients with 12, 11, 7, 5, 3 and 2 images of bytes; those of every second client are noisy."""
    plain = tiny_federation(features=(2, 4, 4))
    split = plain.split.clone()
    for client, count in enumerate((12, 11, 7, 5, 3, 2)):
        split[client, count:12] = -1

    def bytes_of(x: Tensor) -> Tensor:
        return (x * 40 + 128).clamp(0, 255).to(torch.uint8)

    clean, noisy = (replace(test, x=bytes_of(test.x)) for test in plain.tests)
    noise = torch.tensor([0.0, 0.4] * 3, dtype=torch.float64)
    tests = (clean, replace(noisy, noise=0.3))
    return replace(
        plain,
        x=bytes_of(plain.x),
        split=split,
        mean=(0.5, 0.4),
        std=(0.2, 0.3),
        tests=tests,
        noise=noise,
    )


def numbers() -> Federation:
    """Targets that are numbers."""
    plain = tiny_federation()
    tests = tuple(replace(test, y=test.x[:, :2] * 2) for test in plain.tests)
    return replace(plain, y=plain.x[..., :2] * 2, tests=tests, classes=0)


@pytest.fixture(
    params=[
        pytest.param(pretended_cuda, id="pretended"),
        pytest.param(
            nullcontext,
            id="real",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
            ],
        ),
    ]
)
def cuda(request: pytest.FixtureRequest) -> Cuda:
    """A CUDA device for a while: a pretended one, and where a real one is, that too (`pytest -m gpu`)."""
    return request.param


def compared(
    cuda: Cuda,
    method: Method,
    settings: Settings,
    federation: Federation | None = None,
    *,
    model: Any = "linear",
    faults: Any = None,
    folder: Path | None = None,
) -> None:
    """Run on the CPU and on the device: the same models, metrics and reads; with a folder, the same after a resume."""
    federation = federation or tiny_federation()

    def run(device: str, rounds: int = settings.rounds, **options: Any) -> Any:
        exchange = (
            None if faults is None else Faulty(InMemory(federation.ids, len(federation)), **faults)
        )
        changed = replace(settings, device=device, rounds=rounds)
        return simulate(
            federation, method, model=model, settings=changed, exchange=exchange, seed=1, **options
        )

    here = run("cpu")
    with cuda():
        there = run("cuda", folder=None if folder is None else folder / "whole")
        assert there.params.device.type == "cuda"
        if folder is not None:
            run("cuda", settings.rounds // 2, folder=folder / "parts")
            again = run("cuda", folder=folder / "parts", resume=True)
            # the sums of a real one may be added in another order
            atol = 0 if cuda is pretended_cuda else 1e-9
            torch.testing.assert_close(again.params, there.params, rtol=0, atol=atol)
            assert abs(again.metrics["value"] - there.metrics["value"]).max() <= atol
    torch.testing.assert_close(there.params.cpu(), here.params, rtol=0, atol=1e-9)
    keys = ["round", "client", "cluster", "split", "model", "metric"]
    assert there.metrics[keys].equals(here.metrics[keys])
    assert abs(there.metrics["value"] - here.metrics["value"]).max() < 1e-6
    assert there.edges.drop(columns="weight").equals(here.edges.drop(columns="weight"))


@pytest.mark.parametrize(
    "kind",
    one_of_each_family(sorted(METHODS), also=["cfl"], only=["cfl", "dac", "sosicfl"], slow=True),
)
def test_every_method_runs_on_a_device_as_on_a_cpu(cuda: Cuda, kind: str, tmp_path: Path):
    """With a cohort of half the clients, every metric, and a resume that ends with the same bits."""
    settings = tiny_settings(rounds=2, participation=0.5, eval_every=1, metrics=ALL_METRICS)
    compared(cuda, METHODS[kind](**SETTINGS.get(kind, {})), settings, folder=tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("kind", first_only(["dac", "sosicfl-plus"], slow=True))
def test_every_engine_runs_on_a_device(cuda: Cuda, kind: str, engine: str):
    """Batches of unequal size of noisy bytes, cropped; layers of every kind; an optimizer's state that is kept."""
    local = LocalTraining(
        batch_size=4, lr=0.01, augment="crop-flip", padding=1, persistent_client_optimizer=True
    )
    settings = tiny_settings(
        rounds=2, local=local, engine=engine, eval_every=1, metrics=["balanced_accuracy"]
    )
    compared(cuda, METHODS[kind](**SETTINGS.get(kind, {})), settings, images(), model=Net)


def test_on_a_device_nothing_is_compiled_and_one_line_says_so():
    with pretended_cuda():
        with pytest.warns(
            UserWarning,
            match="the vmap engine is used: .* native programs run on a CPU, not on cuda",
        ):
            task = build_task(
                tiny_federation().host(range(6)), "linear", device="cuda", engine="compiled"
            )
        assert task.engine.name == "vmap"
        assert (
            build_task(
                tiny_federation().host(range(6)), "linear", device="cuda", train_samples=1e9
            ).engine.name
            == "vmap"
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "changes"),
    first_only(
        [
            (Dac(2, similarity="cos_grad", aggregation="fedsim"), {"init": "per_client"}),
            (
                PublishedDac(
                    2, similarity="inv_l2", two_hop_scope="history", tau_schedule="entropy"
                ),
                {},
            ),
            (
                PublishedDac(
                    2, loss_direction="push", scaling="minmax", aggregation="fedsim_prior"
                ),
                {"patience": 1},
            ),
            (
                PanmGrad(2, 3, stage_one_rounds=1, interval=2),
                {"init": "per_client", "participation": 0.7},
            ),
            (Pens(4, 2, 2, stage_one_rounds=2), {"schedule": "sequential", "patience": 1}),
            (
                Random(2),
                {
                    "schedule": "sequential_exchange",
                    "order": "train_first",
                    "stopped_broadcast": "last",
                },
            ),
            (Ifca(2, start="resample", share_representation=True), {"participation": 0.5}),
            (Ifca(2, start="random_groups", group_rounds=2, averaging_of="gradients"), {}),
            (
                PublishedFedGwc(
                    preset="released", eps=1.0, clients_per_round=4, aggregator="fedavgm"
                ),
                {},
            ),
            (
                METHODS["cfl"](participation="partial", eps1=10.0, eps2=0.0, warmup_rounds=1),
                {"participation": 0.7},
            ),
            (METHODS["fedprox"](sampling="samples", weights="uniform"), {"participation": 0.5}),
            (METHODS["fesem"](clusters=2, features="last_layer"), {}),
            (PublishedSosicFl(endpoints=3, regions=2, topics="classes", test_samples=3), {}),
            (
                PublishedSosicFl(preset="released", endpoints=3, warmup_rounds=1),
                {"metrics": ALL_METRICS, "eval_every": 1},
            ),
            (SosicFlPlus(endpoints=3, regions=2, global_rounds=2, per_sample=True), {}),
        ],
        5,
        slow=True,
    ),
    ids=lambda part: part.kind if isinstance(part, Method) else "-".join(part),
)
@pytest.mark.filterwarnings("ignore:.* while clients start from different models")
@pytest.mark.filterwarnings("ignore:cfl. once it has split, 4 of 6 clients take part")
def test_what_methods_can_do_otherwise_runs_on_a_device(
    cuda: Cuda, method: Method, changes: dict[str, Any]
):
    compared(cuda, method, tiny_settings(rounds=3, **changes))


@pytest.mark.full
@pytest.mark.parametrize("buffers", ["average", "local", "reset"])
def test_policies_for_running_statistics_run_on_a_device(cuda: Cuda, buffers: Any):
    compared(
        cuda,
        FedAvg(),
        tiny_settings(rounds=2, buffers=buffers, evaluate="final"),
        images(),
        model=Net,
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* while clients start from different models")
def test_lost_late_and_repeated_messages_and_stopped_clients_survive_a_resume_on_a_device(
    cuda: Cuda, tmp_path: Path
):
    """What an exchange remembers of earlier rounds comes back to where it was."""
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.5)
    faults = {"drop": 0.2, "delay": 0.4, "duplicate": 0.2}
    settings = tiny_settings(rounds=8, patience=1, local=local)
    compared(cuda, Dac(2), settings, faults=faults, folder=tmp_path)
    compared(
        cuda,
        PanmGrad(2, 3, stage_one_rounds=3),
        replace(settings, init="per_client"),
        faults=faults,
    )


def test_regression_runs_on_a_device(cuda: Cuda):
    compared(cuda, Dac(2), tiny_settings(rounds=2, eval_every=1), numbers())


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_starts_on_a_device(cuda: Cuda, precision: Any):
    """The pretended device computes with full mantissas; the settings are taken, and taken back."""
    settings = tiny_settings(rounds=1, dtype="float32", precision=precision, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32, torch.is_autocast_enabled("cuda")
    with cuda():
        simulate(tiny_federation(), FedAvg(), model="linear", settings=settings)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.is_autocast_enabled("cuda")) == before


def test_foreign_randomness_on_a_device_is_that_of_the_client():
    """A module that draws from PyTorch's own generator: the device's is seeded too. Otherwise the device refuses."""

    class Foreign(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(super().forward(x), 0.5, self.training)

    results = []
    for clients in ([0, 1, 2, 3, 4, 5], [4]):
        with pretended_cuda():
            torch.cuda.manual_seed(0)  # the trial of an engine draws too
            task = build_task(
                tiny_federation().host(clients), lambda: Foreign(4, 3), engine="loop", device="cuda"
            )
            torch.cuda.set_rng_state(torch.cuda.get_rng_state())
            results.append(
                task.train(task.initial_models(Rng(0)), Rng(0).at_round(0), LocalTraining())[
                    0
                ].cpu()
            )
            # its state of before is back
            with pytest.raises(RuntimeError, match="which nobody has seeded"):
                torch.rand(2, device="cuda")
    assert torch.equal(results[0][4], results[1][0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda there, here: there + here, "Expected all tensors to be on the same device"),
        (
            lambda there, here: torch.cat([there, here]),
            "Expected all tensors to be on the same device",
        ),
        (
            lambda there, here: there.index_copy(0, torch.tensor([0]), there[:1]),
            "on the same device",
        ),
        (
            lambda there, here: here[(there > 0).long()],
            "indices should be either on cpu or on the same device",
        ),
        (lambda there, here: there.numpy(), "can't convert cuda:0 device type tensor to numpy"),
        (lambda there, here: there.long() @ there.long(), "not implemented for torch.int64"),
        (lambda there, here: torch.rand(2, device="cuda"), "which nobody has seeded"),
    ],
)
def test_the_pretended_device_refuses_what_cuda_refuses(wrong: Any, message: str):
    """Otherwise the tests above could not fail."""
    with pretended_cuda(), pytest.raises((RuntimeError, TypeError), match=message):
        wrong(torch.ones(3, device="cuda"), torch.ones(3))


def test_the_pretended_device_counts_what_crosses():
    """Three uploads: the tensor and two indices; three downloads; seven waits for a number or a shape."""
    with pretended_cuda() as crossings:
        there = torch.ones(3).to("cuda")
        there = there + torch.tensor(1.0) * there[torch.tensor([0])]
        assert there.cpu().tolist() == there.tolist() == there.to("cpu").tolist()
        assert [bool(there[0]), there.sum().item(), len(there.unique()), len(there[there > 0])] == [
            True,
            6.0,
            1,
            3,
        ]
        there[there > 1] = 0.0
        assert len(there.nonzero()) == 0
        there[[0, 2]] = there[1] + 1
        assert there[0].item() + there[2].item() == 2
    assert crossings.kinds() == {"upload": 3, "download": 3, "wait": 7}
