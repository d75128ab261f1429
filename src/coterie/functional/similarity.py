"""Similarities of clients and the peers they received models from, as pure functions.

A similarity is a float64 number for each slot of an inbox, 0 where nothing arrived; larger means more similar. Only
sampled pairs are computed. Products are accumulated in float64 in an order that depends on the number of parameters
only: hosting, block size and threads change no bit, and no array of clients x peers x params is ever built.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_COLUMNS = 1 << 13  # parameters taken at once
_ENTRIES = 1 << 19  # float64 entries of a temporary: 4 MB
_ZERO = 1e-12  # norms below this count as zero

Term = Callable[[Tensor, Tensor], Tensor]


def inverse(cost: Float[Tensor, "clients peers"], eps: float = 1e-6) -> Float[Tensor, "clients peers"]:
    r"""Turn a loss or a distance into a similarity: $1 / (x + \varepsilon)$.

    Args:
        cost: not negative; infinite where nothing arrived.
        eps: $\varepsilon$; identical models have similarity $1 / \varepsilon$ under L2.

    Returns:
        Similarities; 0 where the cost is infinite or not a number.

    Example:
        >>> inverse(torch.tensor([[0.5, torch.inf, torch.nan]]), eps=0.0)
        tensor([[2., 0., 0.]], dtype=torch.float64)
    """
    return torch.nan_to_num(1 / (cost.double().cpu() + eps), nan=0.0)


def distance(
    own: Float[Tensor, "clients params"],
    table: Float[Tensor, "senders params"],
    index: Int[Tensor, "clients peers"],
    mask: Bool[Tensor, "clients peers"],
) -> Float[Tensor, "clients peers"]:
    r"""Return $\lVert w_i - w_j \rVert_2$ of each pair.

    Args:
        own: trained parameters of the hosted clients.
        table: trained parameters of the senders.
        index: row of the table of each slot.
        mask: which slots arrived.

    Returns:
        Distances in float64; infinite where nothing arrived.

    Example:
        >>> own, table = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
        >>> distance(own, table, torch.tensor([[0, 0]]), torch.tensor([[True, False]]))
        tensor([[5., inf]], dtype=torch.float64)
    """
    clients, slots = mask.nonzero(as_tuple=True)
    out = torch.full(mask.shape, torch.inf, dtype=torch.float64)
    squares = _sums((own, clients, None), (table, index[clients, slots], None), lambda a, b: (a - b).square())
    out[clients, slots] = squares.sqrt()
    return out


def cosine(
    own: Float[Tensor, "clients params"],
    table: Float[Tensor, "senders params"],
    index: Int[Tensor, "clients peers"],
    mask: Bool[Tensor, "clients peers"],
    *,
    origin: Float[Tensor, "clients params"] | None = None,
    origins: Float[Tensor, "senders params"] | None = None,
) -> Float[Tensor, "clients peers"]:
    r"""Return the cosine of each pair of models, or of each pair of updates since some origin.

    $s_{ij} = \langle u_i, u_j \rangle / (\lVert u_i \rVert \lVert u_j \rVert)$ with $u = w$ or $u = w - w^0$.

    Args:
        own: trained parameters of the hosted clients.
        table: trained parameters of the senders.
        index: row of the table of each slot.
        mask: which slots arrived.
        origin: models subtracted from `own` ($w_i^0$); none when None.
        origins: models subtracted from `table` ($w_j^0$); none when None.

    Returns:
        Cosines in [-1, 1], in float64; 0 where nothing arrived or a norm is below 1e-12.

    Example:
        >>> own, table = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0], [-2.0, 0.0]])
        >>> cosine(own, table, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool))
        tensor([[ 0.6000, -1.0000]], dtype=torch.float64)
    """
    clients, slots = mask.nonzero(as_tuple=True)
    senders = index[clients, slots]
    products = _sums((own, clients, origin), (table, senders, origins), torch.mul)
    norms = _norms(own, clients, origin) * _norms(table, senders, origins)
    out = torch.zeros(mask.shape, dtype=torch.float64)
    values = torch.where(norms > 0, products / norms.clamp(min=_ZERO**2), 0)
    out[clients, slots] = torch.nan_to_num(values, nan=0.0).clamp(-1, 1)
    return out


def _norms(matrix: Tensor, rows: Tensor, base: Tensor | None) -> Tensor:
    """Return the norm of each row asked for, computed once for each; 0 where it counts as zero."""
    distinct, place = rows.unique(return_inverse=True)
    norms = _sums((matrix, distinct, base), (matrix, distinct, base), torch.mul).sqrt()
    return torch.where(norms < _ZERO, 0, norms)[place]


_Rows = tuple[Tensor, Tensor, Tensor | None]  # a matrix, the rows of it, what is subtracted from them


def _sums(left: _Rows, right: _Rows, term: Term) -> Float[Tensor, " pairs"]:
    """Sum a term over the columns of pairs of rows, in float64 and in an order fixed by the number of columns."""
    pairs, params = len(left[1]), left[0].shape[1]
    out = torch.zeros(pairs, dtype=torch.float64, device=left[0].device)
    step = max(1, _ENTRIES // min(_COLUMNS, max(1, params)))
    for start in range(0, pairs, step):
        part = slice(start, start + step)
        for first in range(0, params, _COLUMNS):
            columns = slice(first, first + _COLUMNS)
            out[part] += _tree_sum(term(_take(left, part, columns), _take(right, part, columns)))
    return out.cpu()


def _take(rows: _Rows, part: slice, columns: slice) -> Tensor:
    matrix, index, base = rows
    values = matrix[index[part], columns].double()
    return values if base is None else values - base[index[part], columns].double()


def _tree_sum(values: Tensor) -> Tensor:
    """Sum each row by adding its halves, in an order that does not depend on the other rows."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        folded = values[:, :half] + values[:, half : 2 * half]
        values = torch.cat([folded, values[:, 2 * half :]], dim=1) if values.shape[1] % 2 else folded
    return values[:, 0]
