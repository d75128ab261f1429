"""Sums whose bits do not depend on how clients are grouped.

The reductions of a tensor library may choose the order of their additions by the whole shape, so
`(g * p).sum(1)` of one client can differ in the last bit when other clients are hosted with it. A
method that needs a scalar a client, such as a squared norm, uses `sum_rows` instead.
"""

import torch
from jaxtyping import Float
from torch import Tensor

COLUMNS = 1 << 13
"""Columns that are summed at once. A part of the result: another width adds in another order."""


def sum_rows(values: Float[Tensor, "rows columns"]) -> Float[Tensor, " rows"]:
    """Sum each row in float64, in an order that depends only on the number of columns.

    So a client's sum has the same bits whatever other clients are hosted with it, in any block and
    with any number of threads.

    Args:
        values: of any floating-point type; they stay unchanged.

    Example:
        >>> gradients, params = torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.ones(2, 2)
        >>> sum_rows(gradients * params)
        tensor([3., 3.], dtype=torch.float64)
    """
    total = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for first in range(0, values.shape[1], COLUMNS):
        # copy=True: the sum overwrites its argument, which for float64 values would be the
        # caller's.
        block = values[:, first : first + COLUMNS]
        total += sum_rows_in_place(block.to(torch.float64, copy=True))
    return total


def sum_rows_in_place(values: Float[Tensor, "rows columns"]) -> Float[Tensor, " rows"]:
    """Sum each row by adding its second half to its first until one column is left.

    Additions of whole columns are elementwise: no row changes the order of another's. `values` is
    overwritten.
    """
    count = values.shape[1]
    while count > 1:
        half = count // 2
        values[:, :half].add_(values[:, half : 2 * half])
        # The odd last column moves behind the half sums and waits for the next pass.
        if count % 2:
            values[:, half] = values[:, count - 1]
        count = half + count % 2
    return values[:, 0]
