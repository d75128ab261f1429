"""What each setting of a run changes, worked out beside the loop with the streams of the run."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.data.federation import Federation
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.in_memory import InMemory
from coterie.functional.metrics import Metric
from coterie.methods.base import Method
from coterie.methods.local import Local
from coterie.methods.panm import PanmLoss
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.runtime.record import Record
from coterie.runtime.settings import Settings
from coterie.runtime.task import make_task
from coterie.simulation._sequential import select_loop
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

EVERYBODY = Random(num_peers=5)
"""Six clients that all read all others: a merge is the mean."""


def normalized() -> nn.Module:
    """A network with running statistics."""
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def started(
    method: Method = EVERYBODY,
    model: Any = "linear",
    federation: Federation | None = None,
    **settings: Any,
) -> Loop:
    """A run after its warm-up, which is none unless it is asked for."""
    federation = federation or tiny_federation()
    chosen = tiny_settings(**{"warmup_epochs": 0, **settings})
    task = make_task(federation, method, model, chosen)
    door = InMemory(federation.ids, len(federation))
    record = Record(torch.full((len(federation),), -1))
    loop = select_loop(chosen, method)(task, method, door, chosen, Rng(3), record)
    loop.run_next_round()
    return loop


def trained(loop: Loop, params: Tensor, index: int, rows: list[int] | None = None) -> Tensor:
    """The models of some clients after the local training of a round."""
    task = loop.task.for_round(Rng(3).at_round(index))
    task = task if rows is None else task.select_clients(torch.tensor(rows))
    return task.train(params.contiguous(), Rng(3).at_round(index), loop.settings.local)[0]


@pytest.mark.option("Settings.init", "shared", "per_client", "given")
def test_first_models_are_one_or_each_clients_own_or_given():
    """Equal rows, of the run's seed; six different ones, of which a client alone has the same; those of the module."""
    module = nn.Linear(4, 3).double()
    first = {init: started(init=init, model=module if init == "given" else "linear").state.params
             for init in ("shared", "per_client", "given")}  # fmt: skip
    assert torch.equal(first["shared"], first["shared"][:1].expand(6, -1))
    assert len(first["per_client"].unique(dim=0)) == 6
    task = make_task(tiny_federation(), EVERYBODY, "linear", tiny_settings(init="shared"))
    assert torch.equal(task.initial_models(Rng(3)), first["shared"])
    assert not torch.isclose(task.initial_models(Rng(4)), first["shared"]).any()
    own = torch.cat([part.detach().flatten() for part in (module.weight, module.bias)])
    assert torch.equal(first["given"], own.expand(6, -1))
    assert not torch.isclose(first["shared"], own).any()
    alone = build_task(
        tiny_federation().host([4]), "linear", init="per_client", dtype=torch.float64
    ).initial_models(Rng(3))
    assert torch.equal(alone[0], first["per_client"][4])


@pytest.mark.option("Settings.order", None, "exchange_first", "train_first")
@pytest.mark.parametrize(
    ("method", "order", "training_comes_first"),
    [
        (EVERYBODY, None, False),
        (EVERYBODY, "exchange_first", False),
        (EVERYBODY, "train_first", True),
        (PanmLoss(num_peers=5, num_candidates=5), None, True),
        (PanmLoss(num_peers=5, num_candidates=5), "exchange_first", False),
    ],
)
def test_models_are_merged_before_or_after_they_are_trained(
    method: Method, order: Any, training_comes_first: bool
):
    """Two rounds of a mean of all; where training comes first there is no warm-up."""
    loop = started(method, order=order, init="per_client", warmup_epochs=1)
    params = build_task(
        tiny_federation().host(range(6)), "linear", init="per_client", dtype=torch.float64
    ).initial_models(Rng(3))
    if not training_comes_first:
        params = trained(loop, params, -1)
    for index in range(2):
        if training_comes_first:
            params = trained(loop, params, index).mean(0).expand(6, -1)
        else:
            params = trained(loop, params.mean(0).expand(6, -1), index)
        loop.run_next_round()
    torch.testing.assert_close(loop.state.params, params, rtol=0, atol=1e-12)


@pytest.mark.option("Settings.schedule", "synchronous", "sequential_exchange", "sequential")
@pytest.mark.parametrize("schedule", ["synchronous", "sequential_exchange", "sequential"])
def test_clients_act_at_once_or_one_after_another(schedule: str):
    """Three rounds of a mean of all, each in an order of its own."""
    loop = started(init="per_client", schedule=schedule)
    params, orders = loop.state.params.clone(), []
    for index in range(3):
        orders.append(Rng(3).at_round(index).generator("order").permutation(6).tolist())
        if schedule == "synchronous":
            params = trained(loop, params.mean(0).expand(6, -1), index)
        else:
            for client in orders[-1]:
                params[client] = params.mean(0)
                if schedule == "sequential":
                    params[client] = trained(loop, params[client : client + 1], index, [client])[0]
            if schedule == "sequential_exchange":
                params = trained(loop, params, index)
        loop.run_next_round()
        torch.testing.assert_close(loop.state.params, params, rtol=0, atol=1e-12)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.option("Settings.stopped_broadcast", "best", "last")
@pytest.mark.parametrize("schedule", ["synchronous", "sequential_exchange"])
@pytest.mark.parametrize("broadcast", ["best", "last"])
def test_a_stopped_client_goes_on_publishing_its_best_or_its_last_model(
    broadcast: str, schedule: str
):
    """Steps that are too long: some clients stop before others, which read them in the next rounds."""
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=3.0)
    loop = started(
        local=local, rounds=30, patience=2, stopped_broadcast=broadcast, schedule=schedule
    )
    best, least = loop.state.params.clone(), loop.validation["loss"].clone()
    checked = 0
    while not loop.is_finished:
        stopped, before = loop.tracker.stopped.clone(), loop.state.params.clone()
        index, active = loop.next_round, (~loop.tracker.stopped).nonzero().flatten().tolist()
        loop.run_next_round()
        if bool(stopped.any()) and active:
            shown = torch.where(stopped[:, None], best if broadcast == "best" else before, before)
            order = Rng(3).at_round(index).generator("order").permutation(len(active)).tolist()
            for client in [active[row] for row in order] if schedule != "synchronous" else ():
                shown[client] = shown.mean(0)
            merged = (
                shown[active]
                if schedule != "synchronous"
                else shown.mean(0).expand(len(active), -1)
            )
            torch.testing.assert_close(
                loop.state.params[active], trained(loop, merged, index, active)
            )
            assert torch.equal(loop.state.params[stopped], before[stopped])
            assert not torch.allclose(best[stopped], before[stopped]), "otherwise both would be one"
            checked += 1
        better = (loop.validation["loss"] < least) & ~stopped
        best[better], least[better] = loop.state.params[better], loop.validation["loss"][better]
    assert checked > 0


@pytest.mark.option("Settings.evaluate", "best_val", "final")
@pytest.mark.parametrize("evaluate", ["best_val", "final"])
def test_the_tested_model_is_the_best_on_validation_data_or_the_last(evaluate: str):
    """Against the models after each round and their losses on the validation data, by plain PyTorch."""
    federation = tiny_federation()
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=3.0)
    loop = started(local=local, rounds=6, evaluate=evaluate)
    best, least = loop.state.params.clone(), torch.full((6,), torch.inf, dtype=torch.float64)
    while True:
        for client, row in enumerate(loop.state.params):
            x, y = federation.x[client, 12:], federation.y[client, 12:]
            loss = functional.cross_entropy(x @ row[:12].reshape(3, 4).T + row[12:], y)
            if loss < least[client]:
                best[client], least[client] = row, loss
        if loop.is_finished:
            break
        loop.run_next_round()
    last = loop.state.params
    assert not torch.equal(best, last)
    assert torch.equal(loop.evaluate_final(), best if evaluate == "best_val" else last)


@pytest.mark.option("Settings.buffers", "average", "local", "reset")
@pytest.mark.parametrize("buffers", ["average", "local", "reset"])
def test_running_statistics_are_merged_kept_or_begun_again(buffers: str):
    """One round of a mean of all: three means, three variances and a count of steps behind 21 parameters."""
    loop = started(model=normalized, buffers=buffers, warmup_epochs=1)
    before = loop.state.params.clone()
    merged = before.mean(0).expand(6, -1).clone()
    start = torch.tensor([0.0] * 3 + [1.0] * 3 + [0.0], dtype=torch.float64).expand(6, -1)
    assert float((before[:, 21:] - start).abs().min()) > 0, "training has changed them"
    merged[:, 21:] = {"average": merged[:, 21:], "local": before[:, 21:], "reset": start}[buffers]
    loop.run_next_round()
    torch.testing.assert_close(loop.state.params, trained(loop, merged, 0), rtol=0, atol=1e-12)


@pytest.mark.option("Settings.dtype", "float32", "float64")
def test_numbers_have_the_asked_precision():
    """One full-batch step of a linear classifier by numpy: to 1e-14 in float64, only to 1e-7 in float32."""
    federation = tiny_federation()
    local = LocalTraining(batch_size=12, optimizer="sgd", lr=0.5)
    for dtype, kind in (("float32", torch.float32), ("float64", torch.float64)):
        loop = started(Local(), dtype=dtype, local=local)
        start = loop.state.params.double().numpy()
        loop.run_next_round()
        assert loop.state.params.dtype == kind
        gaps = []
        for client in range(6):
            x, y = federation.x[client, :12].numpy(), np.eye(3)[federation.y[client, :12]]
            scores = np.exp(x @ start[client, :12].reshape(3, 4).T + start[client, 12:])
            gradient = (scores / scores.sum(1, keepdims=True) - y) / 12
            expected = start[client] - 0.5 * np.concatenate(
                [(gradient.T @ x).ravel(), gradient.sum(0)]
            )
            gaps.append(np.abs(loop.state.params[client].double().numpy() - expected).max())
        assert max(gaps) < (1e-14 if dtype == "float64" else 1e-6)
        assert max(gaps) > (0 if dtype == "float64" else 1e-9)


def refused(**settings: Any) -> bool:
    """Whether a run with these settings is refused on a CPU."""
    try:
        make_task(tiny_federation(), Local(), "linear", Settings(**settings))
    except ConfigError as error:
        return "is for a CUDA device; found device 'cpu'" in str(error)
    return False


@pytest.mark.option("Settings.precision", "full", "tf32", "bf16")
def test_products_have_the_asked_precision():
    """Outputs at the first step: those of inputs and weights that were rounded to 8 bits, or not; no TF32 on a CPU."""
    assert [refused(precision=precision) for precision in ("full", "tf32", "bf16")] == [
        False,
        True,
        False,
    ]
    federation = tiny_federation()
    start = make_task(federation, Local(), "linear", Settings()).initial_models(Rng(3))[0]
    x, y = federation.x[0, :12].float(), federation.y[0, :12]
    local = LocalTraining(batch_size=12, optimizer="sgd")
    for precision in ("full", "bf16"):
        rounded = (lambda value: value.bfloat16()) if precision == "bf16" else (lambda value: value)
        outputs = functional.linear(
            rounded(x), rounded(start[:12].reshape(3, 4)), rounded(start[12:])
        ).float()
        task = make_task(
            federation, Local(), "linear", Settings(precision=precision, engine="loop")
        )
        _, info, _ = task.train(task.initial_models(Rng(3)), Rng(3).at_round(0), local)
        expected = float(functional.cross_entropy(outputs, y))
        assert float(info["losses"][0, 0]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.option("Settings.cuda_graphs", False, True)
def test_graphs_of_steps_need_a_cuda_device():
    """Where there is one, tests/unit/engine/test_precision.py says how steps are captured."""
    assert [refused(cuda_graphs=wanted) for wanted in (False, True)] == [False, True]


class Decides(nn.Linear):
    """A module that cannot be run over many clients at once."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute one of two things."""
        return super().forward(x) if x.sum() > 0 else super().forward(2 * x)


@pytest.mark.option("Settings.engine", "auto", "loop", "vmap", "compiled")
def test_a_run_trains_with_the_engine_that_it_names():
    """Left alone, a long run takes "compiled", and a short one "vmap", or "loop" with few clients.

    What decides by its input runs in the loop.
    """
    for name in ("loop", "vmap", "compiled"):
        for rounds in (1, 10**6):
            settings = Settings(engine=name, rounds=rounds)
            assert make_task(tiny_federation(), Local(), "linear", settings).engine.name == name
    for rounds, name in ((1, "loop"), (10**6, "compiled")):
        assert (
            make_task(tiny_federation(), Local(), "linear", Settings(rounds=rounds)).engine.name
            == name
        )
    many = tiny_federation(16)
    assert make_task(many, Local(), "linear", Settings(rounds=1)).engine.name == "vmap"
    few_a_round = Settings(rounds=1, participation=0.5)
    assert make_task(many, Local(), "linear", few_a_round).engine.name == "loop"
    with pytest.warns(UserWarning, match="the loop engine is used: Decides"):
        assert make_task(many, Local(), lambda: Decides(4, 3), Settings()).engine.name == "loop"


@pytest.mark.parametrize(("warmup", "samples"), [(None, 12), (0, 0), (2, 24)])
def test_the_warm_up_is_counted_in_epochs_where_it_is_given(warmup: int | None, samples: int):
    """Rounds of three steps (5, 5 and 2 samples), and a warm-up of as many, of none, or of two passes over twelve."""
    loop = started(
        local=LocalTraining(steps=3, batch_size=5, optimizer="sgd", lr=0.1), warmup_epochs=warmup
    )
    assert loop.train_samples == 6 * samples


def half(outputs: Tensor, targets: Tensor) -> float:
    return 0.5


HALF = Metric("half", function=lambda outputs, targets: 0.25)


def test_two_metrics_of_one_name_are_refused():
    """Their values would be one column, of which the last stays."""
    names = [f"{__name__}:half", f"{__name__}:HALF"]
    with pytest.raises(ConfigError, match=r"two of the name 'half', .*:half and .*:HALF; give one"):
        started(metrics=names)
    assert started(metrics=names[:1]).task.evaluator.metrics[0].name == "half"
