"""What crosses between CPU and device in a training and in a measurement does not grow with its steps or pieces."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.contract.pretend_device import Crossings, pretended_cuda
from tests.contract.test_device import Net, images

from coterie.engine import _base
from coterie.engine.task import LocalTraining
from coterie.exchange.base import Message, make_inbox
from coterie.rng import Rng
from coterie.testing import tiny_federation
from coterie.testing.tiny import build_task


def trained(engine: str, steps: int, **changes: Any) -> Crossings:
    """What crosses in a training with everything that a step may need: see `images` and `Net`."""
    local = LocalTraining(steps=steps, batch_size=4, lr=0.01, augment="crop-flip", padding=1, weight_decay=0.1,
                          persistent_client_optimizer=True, **changes)  # fmt: skip
    with pretended_cuda() as crossings:
        task = build_task(images().host(range(6)), Net, engine=engine, device="cuda")
        start = task.initial_models(Rng(0)).clone()
        optimizer = task.trainer.init_optimizer_state(local)
        crossings.clear()
        task.train(start, Rng(0).at_round(0), local, optimizer=optimizer, anchor=start, prox=0.5)
        return Crossings(crossings)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_training_crosses_as_often_with_two_steps_as_with_nine(engine: str):
    """Batches of four, three and two: clients in groups, in which they change places from step to step."""
    few, many = trained(engine, 2), trained(engine, 9)
    assert few == many
    assert many.kinds()["wait"] == 0, str(many)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_real_device_is_waited_for_as_often_with_two_steps_as_with_nine(engine: str):
    """By PyTorch's own count; a first training, in which libraries start, does not count."""

    def waits(steps: int) -> int:
        local = LocalTraining(steps=steps, batch_size=4, lr=0.01, augment="crop-flip", padding=1)
        task = build_task(images().host(range(6)), Net, engine=engine, device="cuda")
        start = task.initial_models(Rng(0)).clone()
        task.train(start, Rng(0).at_round(0), local)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                task.train(start, Rng(0).at_round(1), local)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing CUDA operation" in str(one.message) for one in said)

    assert 0 < waits(2) == waits(9)


def test_a_plain_training_of_a_block_uploads_three_tables_and_downloads_two():
    """Places of samples, members of groups and the rows' keys go up once; losses and what diverged come down once."""
    with pretended_cuda() as crossings:
        task = build_task(tiny_federation().host(range(6)), "mlp-c", engine="vmap", device="cuda")
        start = task.initial_models(Rng(0))
        crossings.clear()
        task.train(start, Rng(0).at_round(0), LocalTraining(epochs=3, batch_size=5))
    assert crossings.kinds() == {"upload": 3, "download": 2}, str(crossings)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("work", ["measure", "evaluate", "score", "evaluate_by_class"])
def test_a_measurement_crosses_as_often_in_one_piece_as_in_many(
    engine: str, work: str, monkeypatch
):
    """Pieces of one sample against whole sets."""
    federation = replace(images(), noise=torch.full((6,), 0.3, dtype=torch.float64))

    def crossings(piece: int) -> Crossings:
        monkeypatch.setattr(_base, "_SAMPLES_MANY_MODELS", {"cuda": piece})
        monkeypatch.setattr(_base, "_SAMPLES_ONE_MODEL", piece)
        with pretended_cuda() as found:
            task = build_task(federation.host(range(6)), Net, engine=engine, device="cuda")
            params = task.initial_models(Rng(0)) + torch.linspace(-1, 1, 6, device="cuda")[:, None]
            peers = torch.tensor([[(i + 1) % 6, (i + 2) % 6] for i in range(6)])
            inbox = make_inbox(Message(params, {}, torch.arange(6)), torch.arange(6), peers, 6)
            found.clear()
            if work == "score":
                task.score(inbox)
            elif work == "measure":
                task.evaluator.evaluate_split(params, "train")
            else:
                getattr(task.evaluator, work)(params)
            return Crossings(found)

    assert crossings(1) == crossings(100)


def test_equal_models_are_found_in_one_question():
    """As often with two equal models as with six."""

    def crossings(number: int) -> Crossings:
        with pretended_cuda() as found:
            task = build_task(tiny_federation().host(range(6)), "linear", device="cuda")
            params = task.initial_models(Rng(0)).clone()
            params[number:] += torch.arange(6.0 - number, device="cuda")[:, None] + 1
            found.clear()
            task.evaluate(params)
            return Crossings(found)

    assert crossings(2).total() == crossings(6).total()
