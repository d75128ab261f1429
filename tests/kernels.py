"""Steps of a kernel against plain PyTorch in double precision: one module, one optimizer a client."""

import copy

import torch
from torch import Tensor

from coterie.engine._base import cross_entropy, squared_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_torch(net, layout, row, x, y, loss, local, steps, anchor=None, prox=0.0):
    """Return row, mean losses and moments after steps with torch.optim in double precision."""
    module = copy.deepcopy(net).double().train()
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for slot in layout.slots:
        value = row[slot.start : slot.stop].reshape(slot.shape)
        named[slot.name].data.copy_(value)
    trained = [named[slot.name] for slot in layout.trained_slots]
    pulls = []
    for slot in layout.trained_slots:
        pulls.append(None if anchor is None else anchor[slot.start : slot.stop].reshape(slot.shape))
    kind = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[local.optimizer]
    optimizer = getattr(torch.optim, kind)(trained, lr=local.lr, **local.optimizer_arguments)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(module(x.double()), y).mean()
        value.backward()
        for one, pull in zip(trained, pulls, strict=True):
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
            if pull is not None:
                one.grad += prox * (one.detach() - pull)
        optimizer.step()
        losses.append(value.detach())
    found = [named[slot.name].detach().double().flatten() for slot in layout.slots]
    return torch.cat(found), torch.stack(losses)


def assert_steps_are_those_of_torch(
    made, local, size, features, loss=cross_entropy, prox=0.0, steps=2, terms=70, members=(0, 2, 3)
):
    """Compare steps of some of four clients with `by_torch`.

    Args:
        made: module, layout and program.
        local: the optimizer.
        size: samples of a batch.
        features: shape of one.
        loss: of each sample.
        prox: weight of the proximal term.
        steps: how many.
        terms: of the longest sum, each rounded once.
        members: the clients; the second is none of them.
    """
    net, layout, program = made
    clients, members = 4, torch.tensor(members)
    rows = layout.own_values() + 0.2 * numbers(clients, layout.size, seed=3)
    for slot in layout.state_slots:
        rows[:, slot.start : slot.stop] = 2  # positive, and whole where it counts
    x = numbers(len(members), size, *features, seed=4)
    y = torch.randint(0, 3, (len(members), size), generator=torch.Generator().manual_seed(5))
    if loss is squared_error:
        y = numbers(len(members), size, 3, seed=6)
    anchor = numbers(clients, layout.size, seed=7) if prox else None
    found, moments = rows.clone(), torch.zeros(clients, local.num_moments, layout.trainable)
    given = [one.to(DEVICE) for one in (found, moments, members, x, y)]
    losses = []
    for number in range(1, steps + 1):
        made_losses = program.step(
            *given, local, local.lr, number, None if anchor is None else anchor.to(DEVICE), prox
        )
        losses.append(made_losses.cpu())
    found = given[0].cpu()
    assert torch.equal(found[1], rows[1])  # who is no member
    for place, member in enumerate(members.tolist()):
        wanted, wanted_losses = by_torch(
            net, layout, rows[member], x[place], y[place], loss, local, steps,
            None if anchor is None else anchor[member], prox,
        )  # fmt: skip
        # Sums of terms of order 1 to 10, each rounded, through four layers and back.
        limit = 2 * terms * EPS * max(1.0, float(wanted.abs().max()))
        assert float((found[member] - wanted).abs().max()) <= limit
        got = torch.stack([one[place] for one in losses])
        assert float((got - wanted_losses).abs().max()) <= limit
    assert float((found - rows).abs().max()) > 1e-3
