"""Low-rank adapters: their products, merged and compared without forming them.

An adapter of a layer is a pair of matrices, A (r x inputs) and B (outputs x r); the layer's weight
changes by a multiple of B A. The mean of the clients' B times the mean of their A is not the mean
of their products, and A and B may be scaled or turned against each other without a change of B A.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.mappings import index_by_name
from coterie._util.settings import Configurable
from coterie.errors import ConfigError
from coterie.functional.aggregation import ReceivedModels, average_models, view_tensors
from coterie.models.layout import Slot

# What the names of A and of its B have, as peft calls them.
_PARTS = (("lora_embedding_A", "lora_embedding_B"), ("lora_A", "lora_B"))


@dataclass(frozen=True)
class AdapterPair:
    """Where the two matrices of an adapter lie in a row.

    Args:
        a: of A; its first axis is the rank.
        b: of B; its second axis is the rank.
    """

    a: Slot
    b: Slot

    def read(
        self, rows: Float[Tensor, "models params"]
    ) -> tuple[Float[Tensor, "models rank inputs"], Float[Tensor, "models outputs rank"]]:
        """Return A and B of models in float64; those of a convolution as matrices."""
        views = view_tensors(rows, (self.a, self.b))
        a, b = views[self.a.name].flatten(2), views[self.b.name].flatten(2)
        return a.double(), b.flatten(1).unflatten(1, (b.shape[1], -1)).double()


def find_pairs(slots: Sequence[Slot], what: str) -> tuple[AdapterPair, ...]:
    """Return the adapters among tensors.

    Args:
        slots: the tensors.
        what: what needs adapters, for the message.

    Raises:
        ConfigError: when there is none.
    """
    by_name, found = index_by_name(slots), []
    for name, slot in by_name.items():
        for first, second in _PARTS:
            other = by_name.get(name.replace(first, second))
            if first in name and other is not None and _fit_together(slot, other):
                found.append(AdapterPair(slot, other))
                break
    if not found:
        names = ", ".join(list(by_name)[:3]) or "no names"
        raise ConfigError(
            f"{what} is for adapters, pairs of tensors with 'lora_A' and 'lora_B' in their names "
            f"that are trained and shared together; found {names}{', ...' * (len(by_name) > 3)}: "
            "give a model with [model.adapter] kind = 'lora', or share both"
        )
    return tuple(found)


def _fit_together(a: Slot, b: Slot) -> bool:
    """Return whether two tensors are of one rank; endpoints of a simplex of adapters are not."""
    return len(a.shape) > 1 and len(b.shape) > 1 and a.shape[0] == math.prod(b.shape[1:])


def merge_products(
    a: Float[Tensor, "models rank inputs"],
    b: Float[Tensor, "models outputs rank"],
    weights: Float[Tensor, " models"],
) -> tuple[Float[Tensor, "rank inputs"], Float[Tensor, "outputs rank"]]:
    r"""Return the adapter of the same rank whose product is nearest to the mean of the products.

    $\sum_k w_k B_k A_k$ is the product of the stacks $[w_1 B_1, w_2 B_2, \ldots]$ and $[A_1; A_2;
    \ldots]$. By the QR decompositions of both, its singular values are those of a matrix as small
    as the ranks together; nothing of outputs x inputs is formed. The error is that of the singular
    values behind the rank (Eckart, Young 1936).

    The rows of the new A are orthogonal, and as long as those of the clients on average, so that
    training goes on at the pace that it had; B has the singular values.

    Args:
        a: A of each model.
        b: B of each model.
        weights: of the models; they sum to 1.
    """
    rank = a.shape[1]
    tall = (weights[:, None, None] * b).transpose(0, 1).flatten(1)
    wide = a.flatten(0, 1)
    left, up = torch.linalg.qr(tall)
    right, down = torch.linalg.qr(wide.T)
    core = up @ down.T
    new_a, new_b = a.new_zeros(a.shape[1:]), b.new_zeros(b.shape[1:])
    if not bool(torch.isfinite(core).all()):
        # as a mean of such models is
        return new_a.fill_(torch.nan), new_b.fill_(torch.nan)
    u, values, v = torch.linalg.svd(core, full_matrices=False)
    kept = min(rank, len(values))
    u, values, v = left @ u[:, :kept], values[:kept], v[:kept] @ right.T
    # A singular vector has no sign of its own: the largest entry of each is made positive.
    signs = v.gather(1, v.abs().argmax(1, keepdim=True)).sign()
    norms = torch.linalg.vector_norm(a, dim=2)
    # The mean of a model is over the rows that it uses: those behind its own rank are 0.
    used = (norms > 0).sum(1, keepdim=True).clamp(min=1)
    length = (weights[:, None] * norms * (rank / used)).sum() / rank
    new_a[:kept] = signs * v * length
    if float(length) > 0:
        new_b[:, :kept] = u * signs.T * (values / length)
    return new_a, new_b


def product_norms(
    rows: Float[Tensor, "models params"], pairs: Sequence[AdapterPair]
) -> Float[Tensor, " models"]:
    r"""Return the norm of all products of each model: $\sqrt{\sum \lVert B A \rVert_F^2}$."""
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for pair in pairs:
        a, b = pair.read(rows)
        squares += ((b.transpose(1, 2) @ b) * (a @ a.transpose(1, 2))).sum((1, 2))
    return squares.clamp(min=0).sqrt()


def cosine_of_products(
    own: Float[Tensor, "clients params"],
    table: Float[Tensor, "senders params"],
    index: Int[Tensor, "clients peers"],
    mask: Bool[Tensor, "clients peers"],
    pairs: Sequence[AdapterPair],
) -> Float[Tensor, "clients peers"]:
    r"""Return the cosine of the products of adapters of each pair of models, all layers together.

    $\langle B_i A_i, B_j A_j \rangle = \sum (B_i^\top B_j) \circ (A_i A_j^\top)$, of matrices as
    small as the rank. Scaling A against B, or turning them, does not change it.

    Args:
        own: models of the hosted clients.
        table: models of the senders.
        index: row of the table of each slot.
        mask: which slots arrived.
        pairs: where the adapters lie in a row.

    Returns:
        Cosines in float64; 0 where nothing arrived, or a product is 0 or not finite.
    """
    out = torch.zeros(mask.shape, dtype=torch.float64)
    clients, slots = mask.nonzero(as_tuple=True)
    norms: dict[tuple[str, int], float] = {}

    def read(which: str, rows: Tensor, row: int) -> list[tuple[Tensor, Tensor]]:
        found = []
        for pair in pairs:
            a, b = pair.read(rows[row : row + 1])
            found.append((a[0], b[0]))
        if (which, row) not in norms:
            norms[which, row] = _inner_product(found, found) ** 0.5
        return found

    # Pair by pair: a product of its own does not depend on which other clients are hosted.
    for client, slot in zip(clients.tolist(), slots.tolist(), strict=True):
        sender = int(index[client, slot])
        product = _inner_product(read("own", own, client), read("table", table, sender))
        scale = norms["own", client] * norms["table", sender]
        if scale > 0:
            out[client, slot] = product / scale
    return torch.nan_to_num(out, nan=0.0).clamp(-1, 1)


def _inner_product(
    one: Sequence[tuple[Tensor, Tensor]], other: Sequence[tuple[Tensor, Tensor]]
) -> float:
    total = 0.0
    for (a, b), (a_too, b_too) in zip(one, other, strict=True):
        total += float(((b.T @ b_too) * (a @ a_too.T)).sum())
    # rounding may leave a square below 0, whose root would be complex
    return total if one is not other else max(total, 0.0)


@dataclass(frozen=True)
class ProductMean(Configurable):
    """The mean of the products of adapters, by samples, cut to the rank by singular values.

    All else that is shared, such as heads, is averaged by samples. Bai et al., Federated
    fine-tuning of large language models under heterogeneous tasks and client resources (FlexLoRA),
    2024, https://arxiv.org/abs/2402.11505, whose server does so.
    """

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`."""
        pairs = find_pairs(received.slots, "aggregation 'product-mean'")
        weights = received.shares
        merged = average_models(received.models, weights)
        views = view_tensors(merged, received.slots)
        for pair in pairs:
            for slot, value in zip(
                (pair.a, pair.b), merge_products(*pair.read(received.models), weights), strict=True
            ):
                views[slot.name].copy_(value.reshape(slot.shape))
        return merged


@dataclass(frozen=True)
class NormWeighted(Configurable):
    """The mean of A and of B, each model weighted by the norm of its products.

    All else that is shared is averaged with the same weights; where all products are 0, by samples.
    Cho et al., Heterogeneous LoRA for federated fine-tuning of on-device foundation models
    (HetLoRA), 2024, https://arxiv.org/abs/2401.06432
    """

    def __call__(self, received: ReceivedModels) -> Float[Tensor, " params"]:
        """Merge models; see `ReceivedModels`."""
        pairs = find_pairs(received.slots, "aggregation 'norm-weighted'")
        weights = product_norms(received.models, pairs)
        if not float(weights.sum()) > 0:
            weights = received.shares
        return average_models(received.models, weights)
