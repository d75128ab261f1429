"""Count sketches: a few numbers of a model, of which inner products can be estimated.

Each of many numbers is added to one of a few with a random sign, both drawn once for all. The inner
product of two sketches is that of the vectors on average, with a deviation of at most about
|x| |y| sqrt(2 / width). Charikar, Chen, Farach-Colton, Finding frequent items in data streams, 2002.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.functional.adapters import AdapterPair
from coterie.rng import Rng

_COLUMNS = 1 << 20  # numbers whose places are in memory at once, 16 MB


def count_sketch(
    rows: Float[Tensor, "models numbers"], width: int, name: str = ""
) -> Float[Tensor, "models width"]:
    """Return a sketch of each row, in float64 on the CPU.

    It is linear, and a row's own: no other row changes a bit of it.

    Args:
        rows: what is sketched.
        width: numbers of a sketch.
        name: of the draw of places and signs; sketches of one name and width can be compared.

    Example:
        >>> rows = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
        >>> rows[1] += rows[0]
        >>> exact, found = rows[0] @ rows[1], count_sketch(rows, 4096)
        >>> bool(abs(found[0] @ found[1] / exact - 1) < 0.1)
        True
    """
    out = torch.zeros(len(rows), width, dtype=torch.float64)
    for first, place, sign in _draw_places(rows.shape[1], width, name):
        part = rows[:, first : first + len(place)].cpu()
        # `bincount` adds in the order of the columns, row by row.
        for row, into in zip(part, out, strict=True):
            into += torch.bincount(place, weights=row.double() * sign, minlength=width)
    return out


def _draw_places(
    count: int, width: int, name: str
) -> Iterator[tuple[int, Int[Tensor, " numbers"], Float[Tensor, " numbers"]]]:
    """Yield the first column of a block, and for each of its columns the place and the sign."""
    # Of no run and no round: what was published earlier can be compared with what is new.
    stream = Rng(0).generator(f"sketch.{name}")
    for first in range(0, count, _COLUMNS):
        size = min(_COLUMNS, count - first)
        place = torch.from_numpy(stream.integers(width, size=size))
        sign = torch.from_numpy(2.0 * stream.integers(2, size=size) - 1)
        yield first, place, sign


def sketch_products(
    rows: Float[Tensor, "models params"], pairs: Sequence[AdapterPair], width: int
) -> Float[Tensor, "models width"]:
    r"""Return a sketch of the products of the adapters of each model, without forming them.

    A column b of B and a row a of A have the product $b a^\top$, whose sketch is the circular
    convolution of those of b and a: an entry lies at the sum of both places, with both signs. Pham,
    Pagh, Fast and scalable polynomial kernels via explicit feature maps, 2013. Sketches of several
    layers are added.

    Args:
        rows: the models.
        pairs: where the adapters lie in a row.
        width: numbers of a sketch.
    """
    out = torch.zeros(len(rows), width, dtype=torch.float64)
    for pair in pairs:
        for number in range(len(rows)):
            a, b = pair.read(rows[number : number + 1])
            left = torch.fft.rfft(count_sketch(b[0].T, width, pair.b.name))
            right = torch.fft.rfft(count_sketch(a[0], width, pair.a.name))
            out[number] += torch.fft.irfft(left * right, n=width).sum(0)
    return out
