"""Traces that tests make by hand, and their values by PyTorch's operations."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.engine.native.trace import ArrayKind, Operation, Ref, Trace


def build(
    shapes: Mapping[int, tuple[int, ...]],
    *nodes: tuple[Any, ...],
    outputs: Sequence[int],
    inputs: Sequence[int] | None = None,
) -> Trace:
    """Return a trace.

    Args:
        shapes: of values; those that are missing are computed.
        nodes: name, numbers of the values it reads, numbers of those it makes, and further arguments.
        outputs: numbers of its results.
        inputs: numbers of its inputs; the values of `shapes` when None.
    """
    found = []
    for name, reads, makes, *more in nodes:
        made = makes if isinstance(makes, tuple) else (makes,)
        found.append(Operation(name, (*map(Ref, reads), *more), {}, tuple(map(Ref, made))))
    taken = [Ref(number) for number in (shapes if inputs is None else inputs)]
    kinds = {number: ArrayKind(tuple(shape), torch.float64) for number, shape in shapes.items()}
    trace = Trace(found, kinds, taken, [Ref(number) for number in outputs])
    values = [torch.ones(trace.kind_of(ref).shape, dtype=torch.float64) for ref in taken]
    for ref, value in evaluate(trace, values).items():
        trace.kinds[ref.number] = ArrayKind(tuple(value.shape), value.dtype)
    return trace


def evaluate(trace: Trace, inputs: Sequence[Tensor]) -> dict[Ref, Tensor]:
    """Return all values of a trace: PyTorch's operation of the name of each node, in order."""
    values: dict[Ref, Tensor] = dict(zip(trace.inputs, inputs, strict=True))

    def take(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value]
        return [take(part) for part in value] if isinstance(value, list) else value

    for node in trace.nodes:
        operation = getattr(torch.ops.aten, node.name)
        made = operation(*map(take, node.args), **{k: take(v) for k, v in node.kwargs.items()})
        for ref, value in zip(node.outs, made if isinstance(made, tuple) else (made,), strict=True):
            if ref is not None:
                values[ref] = value
    return values
