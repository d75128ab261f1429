"""Steps that are captured and replayed have the results of steps that run one by one."""

import warnings

import pytest
import torch
from tests.contract.test_device import Net, images
from torch import Tensor

from coterie.engine._graphs import _FIRST, _MOST, ReplayedFunction
from coterie.engine.task import LocalTraining
from coterie.rng import Rng
from coterie.testing.tiny import build_task


class Recorder:
    """Captures without a device: a replay computes anew from what the held tensors have, into the same memory."""

    def __init__(self) -> None:
        self.captured: list[tuple[int, ...]] = []

    def __call__(self, function, tensors):
        self.captured.append(tuple(tensors[0].shape))
        results = function(*tensors)

        def replay():
            for place, value in zip(results, function(*tensors), strict=True):
                place.copy_(value)
            return results

        return replay


def squares(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x * x).sum(1), x + y


def test_a_shape_is_captured_once_it_has_come_often_and_results_have_memory_of_their_own():
    recorder = Recorder()
    replayed = ReplayedFunction(squares, recorder)
    given = [(torch.full((2, 3), float(k)), torch.ones(2, 1)) for k in range(2 * _FIRST)]
    found = [replayed(*each) for each in given]
    assert recorder.captured == [(2, 3)]
    # after all calls: none has overwritten another
    for each, results in zip(given, found, strict=True):
        for result, expected in zip(results, squares(*each), strict=True):
            assert torch.equal(result, expected)


def test_each_shape_and_type_has_a_graph_up_to_a_number():
    recorder = Recorder()
    replayed = ReplayedFunction(squares, recorder)
    for width in range(1, _MOST + 3):
        for dtype in (torch.float32, torch.float64):
            for _ in range(_FIRST + 2):
                x = torch.rand(2, width, dtype=dtype)
                assert torch.equal(replayed(x, x)[0], (x * x).sum(1))
    assert recorder.captured == [(2, 1 + number // 2) for number in range(_MOST)]


def test_what_cannot_be_captured_runs_one_by_one_and_one_line_says_so():
    def refuse(function, tensors):
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    replayed, x = ReplayedFunction(squares, refuse), torch.rand(2, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert all(torch.equal(replayed(x, x)[0], (x * x).sum(1)) for _ in range(_FIRST + 3))
    assert [str(one.message) for one in said] == [
        "cuda_graphs: steps cannot be captured, and run one by one (operation not permitted when stream is capturing)"
    ]


def test_memory_that_is_too_small_is_told_to_the_engine_which_takes_smaller_blocks():
    """Graphs of larger blocks do not keep their memory then."""
    recorder = Recorder()

    def fail_at_three(function, tensors):
        if len(tensors[0]) == 3:
            raise torch.OutOfMemoryError("no memory")
        return recorder(function, tensors)

    replayed, small, large = (
        ReplayedFunction(squares, fail_at_three),
        torch.rand(2, 3),
        torch.rand(3, 3),
    )
    for x in [*[small] * (_FIRST + 1), *[large] * _FIRST]:
        replayed(x, x)
    assert len(replayed._captured) == 1
    with pytest.raises(torch.OutOfMemoryError):
        replayed(large, large)
    assert not replayed._captured
    assert torch.equal(replayed(small, small)[0], (small * small).sum(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_a_training_that_is_replayed_is_that_which_is_not():
    """Clients of unequal size, dropout, batch normalization and noise, over rounds in which graphs are replayed."""
    trained = []
    for graphs in (False, True):
        task = build_task(
            images().host(range(6)), Net, engine="vmap", device="cuda", cuda_graphs=graphs
        )
        rows = task.initial_models(Rng(0)).clone()
        for number in range(4):
            rows, _, _ = task.train(
                rows, Rng(0).at_round(number), LocalTraining(epochs=4, batch_size=4, lr=0.01)
            )
        trained.append(rows)
        replayed = task.engine._replayed
        assert (replayed is not None and len(replayed._captured) > 1) == graphs
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=1e-5)
