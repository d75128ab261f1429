"""Averages the server takes."""

import pytest
import torch

from coterie.functional import aggregation


def test_weights_are_renormalized_over_the_rows_that_came():
    """(2 * [0, 3] + 1 * [3, 0]) / 3 = [1, 2]."""
    mean = aggregation.average_models(torch.tensor([[0.0, 3.0], [3.0, 0.0]]), torch.tensor([2, 1]))
    assert mean.tolist() == [1.0, 2.0]


def test_the_mean_of_identical_models_is_that_model():
    """Bit for bit, whatever the weights."""
    model = torch.randn(7, generator=torch.Generator().manual_seed(0))
    mean = aggregation.average_models(model.expand(5, 7), torch.tensor([1.0, 2.0, 3.0, 4.0, 7.0]))
    assert torch.equal(mean, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_mean_has_the_type_of_the_models(dtype: torch.dtype):
    """It is summed in float64 and cast back."""
    mean = aggregation.average_models(
        torch.tensor([[1.0], [2.0]], dtype=dtype), torch.tensor([1, 3])
    )
    assert mean.dtype == dtype
    assert mean.tolist() == [1.75]


def test_wide_models_are_averaged_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """The pieces join to the same mean."""
    params = torch.randn(3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = aggregation.average_models(params, torch.tensor([1, 2, 3]))
    monkeypatch.setattr(aggregation, "_CHUNK", 6)
    torch.testing.assert_close(
        aggregation.average_models(params, torch.tensor([1, 2, 3])), whole, rtol=0, atol=1e-15
    )


def test_groups_are_averaged_apart_and_empty_ones_keep_their_model():
    """Group 0 is (1 * 2 + 3 * 6) / 4 = 5, group 1 had nobody, group 2 has one member where two are asked."""
    params, label = torch.tensor([[2.0], [6.0], [9.0]]), torch.tensor([0, 0, 2])
    empty = torch.tensor([[-1.0], [-2.0], [-3.0]])
    weights = torch.tensor([1.0, 3.0, 1.0])
    assert aggregation.average_models_by_group(params, label, weights, empty).tolist() == [
        [5.0],
        [-2.0],
        [9.0],
    ]
    assert aggregation.average_models_by_group(params, label, weights, empty, least=2).tolist() == [
        [5.0],
        [-2.0],
        [-3.0],
    ]


def step(beta: float, lr: float, rounds: int, *, nesterov: bool = False) -> list[float]:
    """Follow a server that always receives its own model minus 1, and a running statistic of 7."""
    model, velocity = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    path = []
    for _ in range(rounds):
        mean = torch.cat([model[:, :1] - 1, torch.full((1, 1), 7.0, dtype=torch.float64)], dim=1)
        model, velocity = aggregation.apply_server_momentum(
            model, mean, velocity, momentum=beta, lr=lr, nesterov=nesterov
        )
        path.append(float(model[0, 0]))
    assert float(model[0, 1]) == 7.0
    return path


def test_without_momentum_the_server_takes_the_mean():
    """Steps of exactly d = 1, and running statistics are the mean."""
    assert step(0.0, 1.0, 3) == [-1.0, -2.0, -3.0]


def test_momentum_reaches_the_step_of_a_geometric_series():
    """For a constant d the step tends to d / (1 - beta) = 2, by 1, 1.5, 1.75, ...; the first round is not lost."""
    assert step(0.5, 1.0, 3) == [-1.0, -2.5, -4.25]
    long = step(0.5, 1.0, 40)
    assert long[-2] - long[-1] == pytest.approx(2.0, abs=1e-9)


def test_nesterov_looks_ahead():
    """The first step is d + beta * d = 1.5, scaled by the server's lr 2."""
    assert step(0.5, 2.0, 1, nesterov=True) == [-3.0]
