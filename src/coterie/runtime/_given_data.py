"""The data that a task trains and tests on, compared with the given data.

One part of the check of the translation: no model is needed for it.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from coterie.data.federation import SPLITS, TRAIN, Federation
from coterie.data.rows import Inputs, read_inputs
from coterie.engine.client_data import RawSamples
from coterie.engine.task import Task
from coterie.errors import TranslationError

_MAX_INPUTS = 1 << 22  # numbers of inputs that are compared one by one


def compare_data(task: Task, federation: Federation) -> float:
    """Compare clients, samples and targets of the task with the data that it was built from."""
    data = task.data
    if not torch.equal(data.ids, federation.ids):
        found, wanted = data.ids.tolist(), federation.ids.tolist()
        odd = sorted({*found} ^ {*wanted})[:5] or "in another order"
        raise TranslationError(
            f"ids of clients: {len(found)} train, and the data have {len(wanted)} (other: {odd})"
        )
    for split, number in SPLITS.items():
        inside, count = federation.split == number, data.count_samples(split)
        wrong = inside.sum(1) != count
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise TranslationError(
                f"samples of {data.client_name(row)}, {split}: {int(count[row])} are used, and "
                f"the data have {int(inside[row].sum())} (clients with another number: "
                f"{int(wrong.sum())}); make the federation again from the data"
            )
        indices = data.sample_indices(split)
        # One after another in both: positions keep the order of the data.
        used = indices[torch.arange(indices.shape[1]) < count[:, None]]
        owner = torch.repeat_interleave(torch.arange(len(data)), count)
        where = f"{split} samples"
        _require_equal(
            data.samples,
            used,
            federation.x[inside],
            federation.y[inside],
            owner,
            data.client_name,
            where,
        )
    for number, (test, given) in enumerate(zip(data.tests, federation.tests, strict=True)):
        owner = torch.full((len(test),), number)
        _require_equal(
            test,
            torch.arange(len(test)),
            given.x,
            given.y,
            owner,
            lambda _row, name=given.name: name,
            "the test set",
        )
    return 0.0


def _require_equal(
    samples: RawSamples, used: Tensor, x: Inputs, y: Tensor, owner: Tensor,
    name: Callable[[int], str], where: str,
) -> None:  # fmt: skip
    """Compare samples that are used with those of the data, one by one."""
    if len(used) != len(y):
        raise TranslationError(f"{where}: {len(used)} are used, and the data have {len(y)}")
    ours = samples.prepare_targets(used).cpu()
    # Numbers are rounded to the type of the models once.
    limit = 2.0**-23 if ours.is_floating_point() else 0.0
    given = y.double()
    wrong = ~torch.isclose(ours.double(), given, rtol=limit, atol=0.0, equal_nan=True)
    wrong = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        mine = owner == owner[row]
        raise TranslationError(
            f"targets of {name(int(owner[row]))}, {where}: {_describe(ours[mine].double())} are "
            "used, "
            f"and the data have {_describe(given[mine])}; the first of {int(wrong.sum())} that "
            "differ is "
            f"{ours[row].flatten()[0]:g}, expected {given[row].flatten()[0]:g}: make the "
            "federation "
            "again from the data"
        )
    # All targets are compared, and inputs up to so many numbers.
    few = slice(max(1, _MAX_INPUTS // max(1, math.prod(x.shape[1:]))))
    if len(used) and not _equal_inputs(samples, used[few], x[few]):
        raise TranslationError(
            f"inputs of {name(int(owner[0]))} or later clients, {where}: they are not the "
            "data's own; make the federation again from the data"
        )


def _equal_inputs(samples: RawSamples, used: Tensor, x: Inputs) -> bool:
    found = samples.x[used.to(samples.x.device) if isinstance(samples.x, Tensor) else used]
    return torch.equal(read_inputs(found).cpu(), read_inputs(x))


def _describe(targets: Tensor) -> str:
    """Describe targets in a few words: how many there are of each value, or their mean."""
    values, number = targets.unique(return_counts=True)
    if len(values) > 8:
        return f"{targets.numel()} of mean {float(targets.mean()):.6g}"
    each = (f"{n} x {v:g}" for v, n in zip(values.tolist(), number.tolist(), strict=True))
    return ", ".join(each)


def take_samples(federation: Federation, rows: Int[Tensor, " rows"], count: int) -> Federation:
    """Return some training samples of some clients as a federation without anything else."""
    places = []
    for row in rows.tolist():
        own = (federation.split[row] == TRAIN).nonzero().flatten()
        # Evenly spread: data are often sorted by class.
        places.append(own[torch.linspace(0, len(own) - 1, count).long()])
    chosen = torch.stack(places)
    return strip_federation(
        federation,
        read_inputs(federation.x[rows[:, None], chosen]),
        federation.y[rows[:, None], chosen],
    )


def strip_federation(federation: Federation, x: Tensor, y: Tensor) -> Federation:
    clients = len(x)
    return replace(
        federation, x=x, y=y, split=torch.full(x.shape[:2], TRAIN), tests=(),
        test_of=torch.zeros(clients, dtype=torch.int64), ids=torch.arange(clients),
        population=clients, origin=None, truth=None, noise=None, client_names=(), fitted=(),
        table=(),
    )  # fmt: skip
