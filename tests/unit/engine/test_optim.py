"""Optimizers over rows of parameters, against torch.optim."""

import pytest
import torch
from torch import nn

from coterie.engine.optim import LocalTraining, RowOptimizer


def test_row_optimizers_equal_torch_optim_over_many_steps():
    stream = torch.Generator().manual_seed(0)
    for local in (LocalTraining(lr=0.01), LocalTraining(optimizer="sgd", lr=0.01, momentum=0.9, weight_decay=1e-3)):
        rows = torch.randn(3, 7, generator=stream)
        params = [nn.Parameter(row.clone()) for row in rows]
        kind = torch.optim.Adam if local.optimizer == "adam" else torch.optim.SGD
        extra = {} if local.optimizer == "adam" else {"momentum": 0.9, "weight_decay": 1e-3}
        theirs = kind(params, lr=0.01, **extra)
        ours = RowOptimizer(local, rows)
        for step in range(1, 51):
            grads = torch.randn(3, 7, generator=stream)
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            theirs.step()
            ours.step(rows, grads, step)
        assert torch.allclose(rows, torch.stack(list(params)), atol=1e-6)


@pytest.mark.option("LocalTraining.optimizer", "adam", "sgd")
def test_two_steps_of_each_optimizer_by_hand():
    """Gradients 2 and -1, lr 0.1.

    SGD: -0.2, then +0.1. Adam: m = 0.2 and v = 0.004 are 2 and 4 without their bias: a step of 0.1. Then m = 0.08 and
    v = 0.004996 are 0.08 / 0.19 and 0.004996 / 0.001999.
    """
    for optimizer, expected in (
        ("sgd", [-0.2, -0.1]),
        ("adam", [-0.1, -0.1 - 0.1 * (0.08 / 0.19) / (0.004996 / 0.001999) ** 0.5]),
    ):
        local, row, found = LocalTraining(optimizer=optimizer, lr=0.1), torch.zeros(1, 1, dtype=torch.float64), []
        rows = RowOptimizer(local, row)
        for number, gradient in enumerate((2.0, -1.0), start=1):
            rows.step(row, torch.full((1, 1), gradient, dtype=torch.float64), number)
            found.append(float(row))
        assert found == pytest.approx(expected, abs=1e-8)
