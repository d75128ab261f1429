"""Similarities of clients and the peers they received models from, as pure functions.

A similarity is a float64 number for each slot of an inbox, 0 where nothing arrived; larger means
more similar. Only sampled pairs are computed. Products are accumulated in float64 in an order that
depends on the number of parameters only: hosting, block size and threads change no bit, and no
array of clients x peers x params is ever built.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie.errors import ConfigError
from coterie.functional.scores import UNCOUNTED, Form
from coterie.functional.sums import COLUMNS, sum_rows_in_place

_CACHED = 1 << 17  # float64 entries of a temporary on a CPU, 1 MB: it stays in a core's cache
_ENTRIES = 1 << 19  # and on a device, 4 MB: fewer launches
_ZERO = 1e-12  # norms below this count as zero
_LARGEST = 1e30  # a similarity; products with temperatures and sums of many stay finite
_ROUNDING = 1e-3  # losses that are never negative come out below 0 by rounding, but by less


def invert_cost(
    cost: Float[Tensor, "clients peers"], eps: float = 1e-6
) -> Float[Tensor, "clients peers"]:
    r"""Turn a loss or a distance into a similarity: $1 / (x + \varepsilon)$.

    Args:
        cost: not negative; infinite where nothing arrived.
        eps: $\varepsilon$; identical models have similarity $1 / \varepsilon$ under L2.

    Returns:
        Similarities, at most 1e30; 0 where the cost is infinite or not a number.

    Raises:
        ConfigError: for a cost below 0, of which a lower one would have the lower similarity.

    Example:
        >>> invert_cost(torch.tensor([[0.5, torch.inf, torch.nan]]), eps=0.0)
        tensor([[2., 0., 0.]], dtype=torch.float64)
    """
    cost = check_not_negative(cost.double().cpu(), "a similarity that is 1 over the loss")
    # 1 / infinity is 0: what did not arrive needs no case of its own. Without a bound the sum of
    # several similarities to equal models could be infinite with an epsilon of 0.
    return torch.nan_to_num(1 / (cost + eps), nan=0.0).clamp(max=_LARGEST)


def check_not_negative(losses: Float[Tensor, "*shape"], what: str) -> Float[Tensor, "*shape"]:
    """Return losses, none of which is below 0.

    Args:
        losses: NaN where a model diverged.
        what: what is made of them.

    Raises:
        ConfigError: when one is below 0 by more than rounding.
    """
    if bool((losses < -_ROUNDING).any()):
        found = float(losses.nan_to_num(nan=torch.inf).min())
        raise ConfigError(
            f"{what} needs losses of 0 and more; found {found:.4g}: choose another similarity or "
            "reward, or add a constant to the loss"
        )
    return losses


def agree_on_predictions(
    form: Form,
    one: Float[Tensor, "samples *outputs"],
    other: Float[Tensor, "samples *outputs"],
    targets: Shaped[Tensor, "samples *targets"],
) -> float:
    r"""Return how far two models predict the same: $1 - \frac12 \sum_c |p_c - q_c|$ on average.

    Args:
        form: of the outputs, see `functional.scores`: "class", "positions" or "labels"; a label is
            two classes, yes and no.
        one: outputs of a model.
        other: outputs of the other model.
        targets: say which positions count.

    Returns:
        A number in [0, 1]; NaN where no position counts, or an output is not a number.

    Raises:
        ConfigError: for outputs that are no classes.

    Example:
        >>> yes, no = torch.tensor([[0.0, 50.0]]), torch.tensor([[50.0, 0.0]])
        >>> some = torch.tensor([1])
        >>> agree_on_predictions("class", yes, yes, some)
        1.0
        >>> agree_on_predictions("class", yes, no, some)
        0.0

    References:
        Wagner, Fan, Jaggi, Personalized collaborative fine-tuning for on-device large language
        models, 2024, https://arxiv.org/abs/2404.09753, where clients compare predictions for a
        public set.
    """
    check_predicts_classes("agreement", form)
    if form == "labels":
        return float(1 - (one.double().sigmoid() - other.double().sigmoid()).abs().mean())
    gap = (one.double().softmax(-1) - other.double().softmax(-1)).abs().sum(-1) / 2
    if form == "positions":
        gap = gap[targets != UNCOUNTED]
    return float(1 - gap.mean())


NO_CLASS = -1
"""What stands for a class where a model predicts none, or none counts."""


def check_predicts_classes(name: str, form: Form) -> None:
    """Refuse outputs that are no classes.

    Args:
        name: of the similarity that compares them.
        form: of the outputs.

    Raises:
        ConfigError: with what to take instead.
    """
    if form not in ("class", "positions", "labels"):
        raise ConfigError(
            f"similarity {name!r} compares predicted classes, and these outputs are no classes; "
            "take 'inv_loss'"
        )


def predict_classes(
    form: Form,
    outputs: Float[Tensor, "samples *outputs"],
    targets: Shaped[Tensor, "samples *targets"],
) -> Int[Tensor, "samples *predictions"]:
    """Return predicted classes; `NO_CLASS` where an output is not finite or does not count.

    Args:
        form: of the outputs, see `functional.scores`: "class", "positions" or "labels".
        outputs: of a model.
        targets: say which positions count.

    Example:
        >>> predict_classes("class", torch.tensor([[0.0, 2.0], [1.0, torch.nan]]), torch.zeros(2))
        tensor([ 1, -1])
    """
    if form == "labels":
        return (outputs > 0).long().masked_fill(~torch.isfinite(outputs), NO_CLASS)
    found = outputs.argmax(-1).masked_fill(~torch.isfinite(outputs).all(-1), NO_CLASS)
    return found.masked_fill(targets == UNCOUNTED, NO_CLASS) if form == "positions" else found


def share_of_equal_classes(
    own: Int[Tensor, "clients predictions"],
    table: Int[Tensor, "senders predictions"],
    index: Int[Tensor, "clients peers"],
    mask: Bool[Tensor, "clients peers"],
) -> Float[Tensor, "clients peers"]:
    """Return the share of the receiver's predictions that the sender made too.

    Args:
        own: predicted classes of the hosted clients; `NO_CLASS` does not count.
        table: those of the senders.
        index: row of the table of each slot.
        mask: which slots arrived.

    Returns:
        Shares in float64; 0 where nothing arrived.

    Example:
        >>> own, table = torch.tensor([[1, 2, -1]]), torch.tensor([[1, 0, -1]])
        >>> one = torch.tensor([[0]])
        >>> share_of_equal_classes(own, table, one, one == 0)
        tensor([[0.5000]], dtype=torch.float64)
    """
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for client, slots in enumerate(mask):
        mine = own[client]
        counted = mine != NO_CLASS
        if bool(counted.any()):
            same = (table[index[client, slots]] == mine) & counted
            out[client, slots] = same.sum(1).double() / counted.sum()
    return out


def l2_distances(
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
        >>> l2_distances(own, table, torch.tensor([[0, 0]]), torch.tensor([[True, False]]))
        tensor([[5., inf]], dtype=torch.float64)
    """
    clients, slots = mask.nonzero(as_tuple=True)
    out = torch.full(mask.shape, torch.inf, dtype=torch.float64)
    squares = torch.zeros(len(clients), dtype=torch.float64, device=own.device)
    for part, left, place, right in _iterate_blocks(
        (own, clients, None), (table, index[clients, slots], None)
    ):
        # Blocks of columns come one after the other, so each pair's sum grows in a fixed order.
        squares[part] += sum_rows_in_place(right.sub_(left.index_select(0, place)).square_())
    out[clients, slots] = squares.cpu().sqrt()
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

    $s_{ij} = \langle u_i, u_j \rangle / (\lVert u_i \rVert \lVert u_j \rVert)$ with $u = w$ or $u =
    w - w^0$.

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
    # Rows: squared norms of own models, squared norms of the senders' models, products.
    sums = torch.zeros(3, len(clients), dtype=torch.float64, device=own.device)
    for part, left, place, right in _iterate_blocks(
        (own, clients, origin), (table, index[clients, slots], origins)
    ):
        # A client's own norm is computed once and copied to its pairs. The squares are copies, and
        # the product, which overwrites `right`, comes last.
        sums[0, part] += sum_rows_in_place(left.square())[place]
        sums[1, part] += sum_rows_in_place(right.square())
        sums[2, part] += sum_rows_in_place(right.mul_(left.index_select(0, place)))
    mine, theirs, products = sums.cpu()
    norms = _norms_from_squares(mine) * _norms_from_squares(theirs)
    out = torch.zeros(mask.shape, dtype=torch.float64)
    # A norm is 0 or at least _ZERO, so the clamp only avoids the 0 / 0 of pairs that are dropped.
    values = torch.where(norms > 0, products / norms.clamp(min=_ZERO**2), 0)
    # A model that is not finite resembles none; rounding may lead beyond 1.
    out[clients, slots] = torch.nan_to_num(values, nan=0.0).clamp(-1, 1)
    return out


def _norms_from_squares(squares: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
    """Return norms from sums of squares; 0 where one counts as zero."""
    norms = squares.sqrt()
    return torch.where(norms < _ZERO, 0, norms)


# a matrix, the row of it for each pair, what is subtracted from rows
_Rows = tuple[Tensor, Tensor, Tensor | None]


def _iterate_blocks(own: _Rows, table: _Rows) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Iterate over pairs of rows, a block of pairs and columns at a time.

    The order of the columns depends on their number only.

    Yields:
        The pairs; the distinct rows of `own` among them, in float64; the place of each pair's row
        among these; the row of `table` of each pair, in float64. The caller may overwrite both
        arrays.
    """
    (matrix, rows, origin), (others, senders, origins) = own, table
    params = matrix.shape[1]
    entries = _ENTRIES
    if matrix.device.type == "cpu":
        entries = _CACHED
    step = max(1, entries // min(COLUMNS, max(1, params)))
    rows, senders = rows.to(matrix.device), senders.to(matrix.device)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        # A client reads several peers: its row is converted to float64 once a block.
        distinct, place = rows[part].unique(return_inverse=True)
        for first in range(0, params, COLUMNS):
            columns = slice(first, first + COLUMNS)
            left = _take_rows(matrix, origin, distinct, columns)
            yield part, left, place, _take_rows(others, origins, senders[part], columns)


def _take_rows(matrix: Tensor, base: Tensor | None, rows: Tensor, columns: slice) -> Tensor:
    values = matrix[:, columns].index_select(0, rows).double()
    if base is not None:
        values = values.sub_(base[:, columns].index_select(0, rows))
    return values
