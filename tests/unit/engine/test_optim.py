"""Optimizers over rows of parameters, against torch.optim."""

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
