"""What programs are given: addresses, numbers of the optimizer, tables of bytes, and ranges for threads."""

import ctypes
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coterie.engine import native
from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.native import library
from coterie.engine.noise import InputNoise
from coterie.engine.optim import OPTIMIZERS
from coterie.engine.task import LocalTraining

SAMPLES = RawSamples(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]), torch.float32)


def work(local: LocalTraining, rates: torch.Tensor | None = None) -> TrainingWork:
    places, sizes = torch.zeros(2, 3, 4, dtype=torch.int64), torch.full((2, 3), 4)
    return TrainingWork(SAMPLES, places, sizes, local, rates=rates)


GIVEN = {
    "sgd": ({"momentum": 0.5, "dampening": 0.1, "weight_decay": 0.2}, {"momentum": 0.5, "dampening": 0.1}),
    "adam": ({"betas": (0.8, 0.7), "eps": 0.3, "weight_decay": 0.2}, {"beta1": 0.8, "beta2": 0.7, "eps": 0.3}),
    "adamw": ({"betas": (0.8, 0.7), "eps": 0.3, "weight_decay": 0.2}, {"beta1": 0.8, "beta2": 0.7, "eps": 0.3}),
    "rmsprop": (
        {"alpha": 0.6, "eps": 0.3, "momentum": 0.5, "centered": True, "weight_decay": 0.2},
        {"alpha": 0.6, "eps": 0.3, "momentum": 0.5, "centered": 1},
    ),
    "adagrad": (
        {"lr_decay": 0.4, "initial_accumulator_value": 0.9, "eps": 0.3, "weight_decay": 0.2},
        {"lr_decay": 0.4, "initial": 0.9, "eps": 0.3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_passed_on_with_its_own_numbers_and_zeros_for_those_of_others(name):
    options, expected = GIVEN[name]
    rule, rates = library.convert_optimizer(work(LocalTraining(optimizer=name, lr=0.25, **options)))
    found = {field: getattr(rule, field) for field, _type in rule._fields_}
    assert rates is None
    assert found.pop("rates") is None
    # The program numbers the kinds as `enum Kind` does.
    text = (Path(native.__file__).parent / "samples.h").read_text()
    kinds = (
        re.search(r"enum Kind : int64_t \{(.*?)\}", text)
        .group(1)
        .replace(" ", "")
        .lower()
        .split(",")
    )
    assert [kinds[found.pop("kind")], found.pop("moments")] == [
        name, {"sgd": 1, "adam": 2, "adamw": 2, "rmsprop": 3, "adagrad": 1}[name],
    ]  # fmt: skip
    nothing = dict.fromkeys(found, 0)
    assert found == {**nothing, "lr": 0.25, "decay": 0.2, **expected}


def test_nesterov_and_rates_of_steps_are_passed_on():
    local = LocalTraining(optimizer="sgd", momentum=0.5, nesterov=True)
    rates = torch.rand(3, 2).T
    rule, kept = library.convert_optimizer(work(local, rates))
    assert rule.nesterov == 1
    assert (kept.dtype, kept.is_contiguous(), rule.rates) == (torch.float64, True, kept.data_ptr())
    assert torch.equal(kept, rates.double())


# ---------------------------------------------------------------- threads


@pytest.fixture
def threads() -> Iterator[None]:
    yield
    library.use_threads(0)


class Job(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int64),)


def ranges(number: int, together: int = 1) -> tuple[list[tuple[int, int]], int]:
    """Return the ranges of so many clients, and how many threads ran them; `together` must meet."""
    found, names = [], set()
    meeting = threading.Barrier(together)

    def function(_job: object, start: int, stop: int) -> None:
        if threading.current_thread() not in names:
            names.add(threading.current_thread())
            meeting.wait(10)
        found.append((start, stop))

    library.run_on_threads(function, Job(5), number)
    assert (threading.main_thread() in names) == (len(names) == 1)
    return sorted(found), len(names)


@pytest.mark.usefixtures("threads")
def test_each_client_is_in_one_range_of_four_for_each_thread(monkeypatch):
    library.use_threads(2)
    found, used = ranges(100, together=2)
    # 13 = 100 / 8, rounded up
    assert found == [(start, min(start + 13, 100)) for start in range(0, 100, 13)]
    assert used == 2
    # As many as PyTorch has where no number was set, and never more than clients.
    library.use_threads(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert ranges(3, together=3) == ([(0, 1), (1, 2), (2, 3)], 3)
    assert ranges(2, together=2) == ([(0, 1), (1, 2)], 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert ranges(100) == ([(0, 100)], 1)
    library.use_threads(3)
    assert ranges(1) == ([(0, 1)], 1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("number", [1, 2])
def test_what_goes_wrong_in_a_range_is_not_lost(number):
    library.use_threads(number)

    def fail(_job: object, start: int, _stop: int) -> None:
        if start == 0:
            raise RuntimeError("range 0")

    with pytest.raises(RuntimeError, match="range 0"):
        library.run_on_threads(fail, Job(5), 100)


# ---------------------------------------------------------------- samples


def test_bytes_of_images_are_looked_up_in_a_table_of_each_channel():
    x = torch.arange(2 * 3 * 2 * 2, dtype=torch.uint8).reshape(2, 3, 2, 2)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    samples = RawSamples(x, torch.tensor([1, 0], dtype=torch.int32), torch.float64, mean, std)
    found = library.convert_targets(samples, torch.float64)
    levels = torch.arange(256, dtype=torch.float64) / 255
    expected = torch.stack([(levels - m) / s for m, s in zip(mean, std, strict=True)])
    torch.testing.assert_close(found.values, expected)
    assert found.values.is_contiguous()
    assert (found.classes.dtype, found.classes.tolist(), found.targets) == (
        torch.int64,
        [1, 0],
        None,
    )
    inputs = library.convert_inputs(x, samples, torch.float64)
    assert inputs.dtype == torch.uint8
    store = found.join_inputs(inputs)
    held = inputs.data_ptr(), found.values.data_ptr(), found.classes.data_ptr(), None, 1
    assert tuple(getattr(store, name) for name, _type in store._fields_) == held


def test_numbers_are_given_in_the_type_of_the_model():
    x, y = torch.arange(6).reshape(3, 2).T, torch.tensor([0.5, 1.5])
    samples = RawSamples(x, y, torch.float64)
    found = library.convert_targets(samples, torch.float64)
    assert (found.values, found.classes, found.targets.dtype) == (None, None, torch.float64)
    inputs = library.convert_inputs(x, samples, torch.float32)
    assert (inputs.dtype, inputs.is_contiguous(), inputs.tolist()) == (
        torch.float32,
        True,
        x.tolist(),
    )
    store = found.join_inputs(inputs)
    assert (store.values, store.targets, store.bytes) == (None, found.targets.data_ptr(), 0)


def test_rows_are_copied_only_where_their_entries_lie_apart():
    rows = torch.rand(1, 5).expand(3, 5)
    assert library.make_rows_contiguous(rows) is rows, "rows may be shared"
    turned = torch.rand(5, 3).T
    found = library.make_rows_contiguous(turned)
    assert (found.stride(), found.tolist()) == ((5, 1), turned.tolist())


def test_noise_is_given_by_its_keys_and_deviations():
    job, owners = library.convert_noise(None)
    assert (job.keys, job.sigma, job.width, owners) == (None, None, 1, ())
    noise = InputNoise(torch.tensor([5, 6], dtype=torch.int32), torch.tensor([0.25, 0.5]), 7)
    job, (keys, sigma) = library.convert_noise(noise)
    assert (job.keys, job.sigma, job.width) == (keys.data_ptr(), sigma.data_ptr(), 7)
    assert (keys.dtype, keys.tolist(), sigma.dtype, sigma.tolist()) == (
        torch.int64, [5, 6], torch.float64, [0.25, 0.5],
    )  # fmt: skip
