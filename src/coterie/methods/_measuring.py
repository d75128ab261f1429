"""Measuring: how similar a client finds the peers it asked, and what finding out costs."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.exchange.base import Inbox, Message
from coterie.functional import selection, similarity
from coterie.methods.base import Info, Round, State

Metric = Literal["inv_loss", "inv_l2", "cos_weight", "cos_grad"]


@dataclass(frozen=True)
class Measured:
    """What came of asking peers.

    Args:
        inbox: what arrived from them.
        similarity: of each slot, float64; 0 where nothing arrived.
        cost: for the record.
    """

    inbox: Inbox
    similarity: Float[Tensor, "clients peers"]
    cost: Info


def pull(
    rnd: Round,
    state: State,
    message: Message,
    peers: Int[Tensor, "clients peers"],
    metric: Metric,
    eps: float,
) -> Measured:
    r"""Read the peers and measure at home: the loss of $w_j$ on the own data, or a product of parameters.

    Args:
        rnd: the round.
        state: of the hosted clients, from before the exchange.
        message: what they publish; with "origin" ($w^0$) where clients start from different models.
        peers: whom they read.
        metric: the similarity.
        eps: $\varepsilon$ of the inverse metrics.
    """
    inbox = rnd.exchange.pull(message, peers)
    mask, arrived = inbox.mask, inbox.mask.sum(1)
    if metric == "inv_loss":
        value = similarity.inverse(rnd.task.score(inbox), eps)
        return Measured(inbox, value, {"passes": arrived * rnd.task.counts("train")})
    trained = slice(rnd.task.layout.trainable)
    pair = (state.params[:, trained], inbox.table[:, trained], inbox.index, mask)
    if metric == "inv_l2":
        return Measured(inbox, similarity.inverse(similarity.distance(*pair), eps), {})
    if metric == "cos_weight":
        return Measured(inbox, similarity.cosine(*pair), {})
    cost = {"extra_models": arrived} if "origin" in message.fields else {}
    return Measured(inbox, cosine_since_start(rnd, state, inbox), cost)


def cosine_since_start(rnd: Round, state: State, inbox: Inbox) -> Float[Tensor, "clients peers"]:
    """Return the cosine of the whole way each pair of models has gone since its start.

    Where clients start from different models the memory has `origin`, and messages carry it; else all know it.
    """
    trained = slice(rnd.task.layout.trainable)
    origin: Tensor = state.memory.origin
    if origin.shape[1]:
        origins = inbox.fields["origin"]
    else:
        origin = rnd.task.origin(rnd.rng)[:, trained]
        origins = origin[:1].expand(len(inbox.table), -1)
    own, table = state.params[:, trained], inbox.table[:, trained]
    return similarity.cosine(own, table, inbox.index, inbox.mask, origin=origin, origins=origins)


def push(
    rnd: Round,
    state: State,
    message: Message,
    peers: Int[Tensor, "clients peers"],
    metric: Metric,
    eps: float,
) -> Measured:
    r"""Let the peers measure: $\ell(w_i; D_j)$, answered by $j$. Three exchanges.

    First everybody hears, in messages without a model, who asks whom; then models are read, those of the peers by
    the asking client and its own by the peers; then the answers. An answer to an older question does not count, so
    that a peer that stopped, or whose message is late, has not arrived.

    Args:
        rnd: the round.
        state: of the hosted clients, from before the exchange.
        message: what they publish.
        peers: whom they ask.
        metric: "inv_loss"; parameters are compared at home.
        eps: $\varepsilon$ of the inverse loss.
    """
    ids, count = rnd.ids, peers.shape[1]
    now = torch.full_like(ids, rnd.index)
    nothing = state.params[:, :0]
    everybody = torch.arange(rnd.task.population).expand(len(ids), -1)
    requests = rnd.exchange.pull(
        Message(nothing, {"asked": peers, "round": now}), selection.within(everybody, rnd.candidates)
    )
    asks = (requests.fields["asked"][:, :, None] == ids).any(1) & (requests.fields["round"] == rnd.index)[:, None]
    asked_by = asks[requests.index, torch.arange(len(ids))[:, None]] & requests.mask
    further = selection.listed(asked_by & ~selection.among(peers, rnd.task.population))

    models = rnd.exchange.pull(message, torch.cat([peers, further], dim=1))
    judged = models.mask & asked_by.gather(1, models.peers.clamp(min=0))
    loss = rnd.task.score(replace(models, mask=judged)).cpu()
    answers, given = _spread(models.peers, judged & torch.isfinite(loss), loss, rnd.task.population)

    replies = rnd.exchange.pull(Message(nothing, {"loss": answers, "given": given, "round": now}), peers)
    column = ids[:, None]
    valid = replies.fields["given"][replies.index, column] & (replies.field("round") == rnd.index)
    heard = replies.mask & models.mask[:, :count] & valid
    value = torch.where(heard, replies.fields["loss"][replies.index, column].double(), torch.inf)

    inbox = replace(
        models,
        index=models.index[:, :count],
        peers=peers,
        mask=heard,
        age=models.age[:, :count],
        bytes=models.bytes[:, :count] + replies.bytes,
    )
    cost = {
        "passes": judged.sum(1) * rnd.task.counts("train"),
        "extra_models": models.mask[:, count:].sum(1),
        "extra_floats": requests.mask.sum(1) * count + replies.mask.sum(1) * rnd.task.population,
        "extra_bytes": requests.bytes.sum(1) + models.bytes[:, count:].sum(1),
    }
    return Measured(inbox, similarity.inverse(value, eps), cost)


def _spread(peers: Tensor, mask: Tensor, value: Tensor, population: int) -> tuple[Tensor, Tensor]:
    """Return values of slots as one number for each member of the population, and for whom there is one."""
    rows, slots = mask.nonzero(as_tuple=True)
    out = torch.zeros(len(peers), population, dtype=value.dtype)
    given = torch.zeros(len(peers), population, dtype=torch.bool)
    out[rows, peers[rows, slots]] = value[rows, slots]
    given[rows, peers[rows, slots]] = True
    return out, given
