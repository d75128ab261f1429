"""Sums of groups: a client reads the weighted mean of a group's models and no single one.

In one process the mean is computed here, in fixed point, before a method sees anything. Between
machines no exchange does so yet: a message under such terms is refused by it.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie.exchange.base import SAMPLES, Exchange, Inbox, Message, SecureAggregation
from coterie.exchange.secure_sum import find_unfit
from coterie.functional.fixed_point import WORD, decode_mean, divide_samples, encode_model

LEAST = 2
"""Members of the smallest group: the mean of one would be its model."""


@dataclass(frozen=True)
class GroupMeans:
    """What clients received of their groups.

    Args:
        table: the weighted mean of each group's models; zeros where it did not arrive.
        samples: of each group's members together.
        members: ids of the members of each client's group; -1 where it asked none.
        shares: of each member in the mean, by samples.
        mask: whether the mean arrived: it does when all members send.
        bytes: payload that arrived, for each member's part.
    """

    table: Float[Tensor, "clients params"]
    samples: Float[Tensor, " clients"]
    members: Int[Tensor, "clients members"]
    shares: Float[Tensor, "clients members"]
    mask: Bool[Tensor, " clients"]
    bytes: Int[Tensor, "clients members"]


def pull_group_means(
    exchange: Exchange, message: Message, members: Int[Tensor, "clients members"]
) -> GroupMeans:
    """Publish, and read the weighted mean of the models of a group for each client.

    Args:
        exchange: the door to other clients.
        message: a model and a number of samples of each hosted client.
        members: ids of the group of each client, two or more; -1 in all slots for none.
    """
    size = members.shape[1]
    terms = SecureAggregation(threshold=1.0)
    inbox = exchange.pull(replace(message, sum_only=terms), members)
    mask = inbox.mask.all(1) & ~_find_unfit_slots(inbox, size).any(1)
    samples, table = inbox.field_by_slot(SAMPLES).double(), torch.zeros_like(message.params)
    shares = torch.zeros(members.shape, dtype=torch.float64)
    for row in mask.nonzero().flatten().tolist():
        # By ascending ids, so that the order of the slots changes no bit of the shares.
        order = torch.argsort(members[row])
        parts = divide_samples(samples[row, order])
        shares[row, order] = torch.tensor(parts, dtype=torch.float64)
        total = np.zeros(table.shape[1], dtype=np.int64)
        for slot, part in zip(order.tolist(), parts, strict=True):
            total = (total + encode_model(inbox.table[inbox.index[row, slot]], part, size)) % WORD
        mean = decode_mean(total, math.fsum(parts), size, table.dtype)
        if inbox.part is not None:  # columns that stay at home are the client's own
            mean = inbox.part.keep_local(message.params[row][None].cpu(), mean[None])[0]
        table[row] = mean.to(table)
    return GroupMeans(
        table=table,
        samples=torch.where(mask, samples.sum(1), 0),
        members=members,
        shares=shares,
        mask=mask,
        bytes=torch.where(mask[:, None], inbox.bytes, 0),
    )


def _find_unfit_slots(inbox: Inbox, size: int) -> Bool[Tensor, "clients members"]:
    """Return which slots show a model that its sender could not add to a sum."""
    rows = torch.arange(len(inbox.table))
    message = Message(inbox.table, {SAMPLES: inbox.fields[SAMPLES]}, rows)
    bad = torch.zeros(len(rows), dtype=torch.bool)
    bad[torch.tensor(list(find_unfit(message, size)), dtype=torch.int64)] = True
    return bad[inbox.index]
