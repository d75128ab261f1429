"""Aggregation: mixing weights and averages of received models, as pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from coterie._util import pages
from coterie.errors import RETURN_HINT, ConfigError
from coterie.models.layout import Slot

# Entries that are averaged at once in float64 (128 MB): a wider table is averaged in column blocks,
# so that the float64 copy of a large population never exists as a whole.
_CHUNK = 1 << 24


def fedavg_weights(
    samples: Float[Tensor, "clients peers"],
    own: Float[Tensor, " clients"],
    mask: Bool[Tensor, "clients peers"],
) -> tuple[Float[Tensor, "clients peers"], Float[Tensor, " clients"]]:
    r"""Weight models by their numbers of training samples, the client's own model included.

    The weight of peer $j$ is $n_j / \sum_{k \in M_i \cup i} n_k$.

    Args:
        samples: $n_j$ of the peer in each slot.
        own: $n_i$ of the client itself.
        mask: which messages arrived; the others get weight 0.

    Returns:
        Weights of the slots and of the client's own model; a row sums to 1.

    Example:
        >>> samples, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]])
        >>> fedavg_weights(samples, torch.tensor([1.0]), mask)
        (tensor([[0.2500, 0.5000]]), tensor([0.2500]))
    """
    return normalize_weights(torch.where(mask, samples, 0), own)


def normalize_weights(
    weights: Shaped[Tensor, "clients peers"], own: Shaped[Tensor, " clients"]
) -> tuple[Shaped[Tensor, "clients peers"], Shaped[Tensor, " clients"]]:
    """Scale weights so that each row, own weight included, sums to 1.

    A client whose weights are all 0 keeps its own model: its own weight becomes 1.
    """
    total = weights.sum(1) + own
    alone = total <= 0
    # 1 in place of 0: a client without weights divides 0 by 1.
    total = torch.where(alone, torch.ones_like(total), total)
    return weights / total[:, None], torch.where(alone, torch.ones_like(own), own / total)


def fedsim_weights(
    similarity: Float[Tensor, "clients peers"], mask: Bool[Tensor, "clients peers"]
) -> tuple[Float[Tensor, "clients peers"], Float[Tensor, " clients"]]:
    r"""Weight by similarity, the client itself like its most similar peer.

    $A_{ij} = u_j / \sum u$ with $u_j = \max(s_{ij}, 0)$ and $u_i = \max_j u_j$. The numbers of
    samples are not used. A client whose peers all have $s_{ij} \le 0$ keeps its own model.

    Args:
        similarity: $s_{ij}$ of this round; or the probability with which each peer was drawn.
        mask: which messages arrived; the others get weight 0.

    Returns:
        Weights of the slots and of the client's own model; a row sums to 1.

    Example:
        >>> fedsim_weights(torch.tensor([[2.0, 1.0, -3.0]]), torch.ones(1, 3, dtype=torch.bool))
        (tensor([[0.4000, 0.2000, 0.0000]]), tensor([0.4000]))
    """
    useful = torch.where(mask, similarity.clamp(min=0), 0)
    # amax has no value over no slots; the sum is 0.
    best = useful.amax(1) if useful.shape[1] else useful.sum(1)
    return normalize_weights(useful, best)


@dataclass(frozen=True)
class ReceivedModels:
    """The models that a custom aggregation rule merges, for one client or for a server.

    Args:
        models: on a client, its own model first, then the received ones by ascending client id; on
            a server, the returned ones. A running statistic of the module is an entry like a
            parameter.
        samples: the number of training samples behind each of them.
        similarity: of each to the client's own model, where the method measures it (DAC); the own
            model counts like the most similar other, as in `fedsim_weights`. Else None.
        before: the model that stays in use where nothing is merged: the client's own, or the
            server's.
        slots: the names, shapes and positions of the shared tensors in the rows of `models`; none
            where rows are only numbers.
    """

    models: Float[Tensor, "models params"]
    samples: Float[Tensor, " models"]
    similarity: Float[Tensor, " models"] | None
    before: Float[Tensor, " params"]
    slots: Sequence[Slot] = ()

    @property
    def shares(self) -> Float[Tensor, " models"]:
        """Each model's share of all samples; equal ones where no model has samples."""
        samples = self.samples.double()
        if float(samples.sum()) <= 0:
            samples = torch.ones_like(samples)
        return samples / samples.sum()

    @property
    def tensors(self) -> dict[str, Float[Tensor, "models *shape"]]:
        """The models' tensors by name, as views of `models`."""
        return view_tensors(self.models, self.slots)


def view_tensors(
    rows: Shaped[Tensor, "*batch params"], slots: Sequence[Slot]
) -> dict[str, Shaped[Tensor, "..."]]:
    """Return tensors by name, as views of rows: what is written into them is written into the rows.

    Args:
        rows: one row, or several.
        slots: where each tensor lies in a row.

    Example:
        >>> row = torch.zeros(4)
        >>> view_tensors(row, [Slot("bias", (2,), 2, 4)])["bias"].fill_(1.0)
        tensor([1., 1.])
        >>> row
        tensor([0., 0., 1., 1.])
    """
    found = {}
    for slot in slots:
        part = rows[..., slot.start : slot.stop]
        found[slot.name] = part.unflatten(-1, slot.shape or (1,))
        if not slot.shape:
            found[slot.name] = found[slot.name].squeeze(-1)
    return found


AggregationRule = Callable[[ReceivedModels], Tensor]
"""A pure function of the received models; it returns the merged model, [params]."""


def merge_by_rule(
    rule: AggregationRule, received: ReceivedModels, what: str
) -> Float[Tensor, " params"]:
    """Merge models by a custom rule.

    Args:
        rule: the rule.
        received: the models that it merges.
        what: the rule's name in error messages.

    Raises:
        ConfigError: when the rule returns something other than a model.

    Example:
        >>> models = torch.tensor([[0.0, 1.0], [2.0, 1.0], [9.0, 4.0]])
        >>> received = ReceivedModels(models, torch.ones(3), None, models[0])
        >>> merge_by_rule(lambda r: r.models.median(0).values, received, "median")
        tensor([2., 1.])
    """
    found = rule(received)
    shape = tuple(received.before.shape)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"{what} returned {found!r:.60}; "
            f"expected the merged model, a tensor of shape {shape}" + RETURN_HINT * (found is None)
        )
    if tuple(found.shape) != shape or not found.is_floating_point():
        dtype = str(found.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{what} returned {dtype} of shape {tuple(found.shape)}; "
            f"expected the merged model, floats of shape {shape}"
        )
    return found.to(received.before)


def average_models(
    params: Float[Tensor, "clients params"], weights: Shaped[Tensor, " clients"]
) -> Float[Tensor, " params"]:
    r"""Average models: $\sum_k (n_k / n_P) \theta_k$ with $n_P = \sum_k n_k$.

    The sum is accumulated in float64 and cast back.

    Args:
        params: the models, in a fixed order (by client id): the order of the sum is part of the
            result.
        weights: not negative, their sum above 0; renormalized over the rows given.

    Example:
        >>> average_models(torch.tensor([[0.0, 4.0], [4.0, 0.0]]), torch.tensor([3.0, 1.0]))
        tensor([1., 3.])
    """
    # Weights are normalized before the product, in float64.
    share = (weights.double() / weights.double().sum())[None, :].to(params.device)
    width = max(1, _CHUNK // max(1, len(params)))
    # One float64 buffer serves all blocks of columns.
    room = pages.empty(
        len(params) * min(width, params.shape[1]), dtype=torch.float64, device=params.device
    )
    parts = []
    for part in params.split(width, dim=1):
        wide = room[: part.numel()].view(part.shape).copy_(part)
        parts.append((share @ wide)[0].to(params.dtype))
    return torch.cat(parts)


def average_models_by_group(
    params: Float[Tensor, "clients params"],
    label: Int[Tensor, " clients"],
    weights: Shaped[Tensor, " clients"],
    empty: Float[Tensor, "clusters params"],
    least: int | Int[Tensor, " clusters"] = 1,
) -> Float[Tensor, "clusters params"]:
    """Average models group by group.

    Args:
        params: the models.
        label: the group of each.
        weights: not negative; a group whose weights sum to 0 counts as empty.
        empty: the models of empty groups.
        least: a group with fewer models counts as empty too.
    """

    def average_rows(rows: Tensor, group: int) -> Tensor:
        # Clients without samples have no mean.
        if float(weights[rows].sum()) <= 0:
            return empty[group]
        if bool(rows.all()):  # indexing with a mask would copy every model
            return average_models(params, weights)
        return average_models(params[rows], weights[rows])

    return _merge_groups(average_rows, label, empty, least)


def _merge_groups(
    merge: Callable[[Tensor, int], Tensor],
    label: Int[Tensor, " clients"],
    empty: Float[Tensor, "clusters params"],
    least: int | Int[Tensor, " clusters"],
) -> Float[Tensor, "clusters params"]:
    """Merge the rows of each group that has enough of them; see `average_models_by_group`."""
    table = empty.clone()
    floor = torch.as_tensor(least).expand(len(empty))
    for group in range(len(table)):
        rows = label == group
        # A group without models keeps its own, even where none is required.
        if int(rows.sum()) >= max(1, int(floor[group])):
            table[group] = merge(rows, group)
    return table


def merge_groups_by_rule(
    rule: AggregationRule,
    params: Float[Tensor, "clients params"],
    label: Int[Tensor, " clients"],
    samples: Shaped[Tensor, " clients"],
    empty: Float[Tensor, "clusters params"],
    least: int | Int[Tensor, " clusters"],
    what: str,
    slots: Sequence[Slot] = (),
) -> Float[Tensor, "clusters params"]:
    """Merge models group by group with a custom rule; see `average_models_by_group`."""

    def merge_rows(rows: Tensor, group: int) -> Tensor:
        return merge_by_rule(
            rule,
            # The rule gets a copy of the old model, which it may overwrite.
            ReceivedModels(
                params[rows], samples[rows].to(params), None, empty[group].clone(), slots
            ),
            what,
        )

    return _merge_groups(merge_rows, label, empty, least)


def apply_server_momentum(
    model: Float[Tensor, "clusters params"],
    mean: Float[Tensor, "clusters params"],
    velocity: Float[Tensor, "clusters trainable"],
    *,
    momentum: float,
    lr: float = 1.0,
    nesterov: bool = False,
) -> tuple[Float[Tensor, "clusters params"], Float[Tensor, "clusters trainable"]]:
    r"""Move each model towards the mean of the returned models, with server momentum (FedAvgM).

    $d = \theta - \bar\theta$, $v \leftarrow \beta v + d$, $\theta \leftarrow \theta - \eta_s v$;
    with Nesterov $\theta \leftarrow \theta - \eta_s (d + \beta v)$. Running statistics, which lie
    behind the trained entries, follow the plain mean.

    Args:
        model: the models sent out ($\theta^t$).
        mean: the averages of the returned models.
        velocity: $v$, of the trained entries; 0 at the start.
        momentum: $\beta$, in [0, 1).
        lr: $\eta_s$.
        nesterov: use Nesterov momentum.

    Returns:
        The new models and the new velocity.

    References:
        Hsu, Qi, Brown, Measuring the effects of non-identical data distribution for federated
        visual classification, 2019, https://arxiv.org/abs/1909.06335
    """
    trainable = velocity.shape[1]
    # Models are close to their mean: the gap is taken in float64 before it is accumulated.
    gap = model[:, :trainable].double() - mean[:, :trainable].double()
    velocity = momentum * velocity + gap
    step = gap + momentum * velocity if nesterov else velocity
    moved = (model[:, :trainable].double() - lr * step).to(model.dtype)
    return torch.cat([moved, mean[:, trainable:]], dim=1), velocity
