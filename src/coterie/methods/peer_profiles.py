"""Profiles: what clients publish of their models so that others compare them without reading them.

A profile is a sketch of the model, or the classes that it predicts for a public set.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from coterie.engine.task import Task
from coterie.exchange.base import Inbox
from coterie.functional import adapters, similarity, sketches

Sketched = Literal["cos_weight", "cos_grad", "cos_product", "inv_l2"]
"""The similarities that a sketch estimates."""

Profile = Mapping[str, Shaped[Tensor, "clients ..."]]
"""Extras of a message that describe its client's model."""

_SKETCH, _CLASSES, _PUBLIC = "sketch", "predicted", "public"


def predict_profile(task: Task, params: Float[Tensor, "clients params"]) -> Profile:
    """Return the predictions of models for the public set, and a checksum of the set."""
    code = torch.full((len(params),), task.data.public_code, dtype=torch.int64)
    return {_CLASSES: task.predict_public(params).cpu(), _PUBLIC: code}


def sketch_profile(
    task: Task,
    params: Float[Tensor, "clients params"],
    kind: Sketched,
    width: int,
    origin: Float[Tensor, "clients width"],
) -> Profile:
    """Return sketches of models, of their updates or of the products of their adapters.

    Args:
        task: of the clients.
        params: their models.
        kind: the similarity that is estimated.
        width: numbers of a sketch.
        origin: sketches of their first models, for "cos_grad".
    """
    if kind == "cos_product":
        slots = task.sharing.list_compared_slots(task.layout)
        pairs = adapters.find_pairs(slots, "similarity 'cos_product'")
        found = sketches.sketch_products(params, pairs, width)
    else:
        found = sketches.count_sketch(task.sharing.compared.select_from(params), width)
        if kind == "cos_grad":
            # A sketch is linear: that of an update is the difference of those of the models.
            found -= origin
    return {_SKETCH: found.to(params.dtype)}


def compare_profiles(
    own: Profile, inbox: Inbox, kind: str, eps: float
) -> Float[Tensor, "clients peers"]:
    r"""Return the similarity of each client to the senders of its inbox, from their profiles.

    Args:
        own: profiles of the clients.
        inbox: messages with the extras of a profile.
        kind: of the similarity.
        eps: $\varepsilon$ of the inverse distance.

    Returns:
        Similarities in float64; 0 where nothing arrived, or predictions are for another public set.
    """
    if _CLASSES in own:
        same = inbox.field_by_slot(_PUBLIC) == own[_PUBLIC][:, None]
        return similarity.share_of_equal_classes(
            own[_CLASSES], inbox.fields[_CLASSES], inbox.index, inbox.mask & same
        )
    pair = (own[_SKETCH], inbox.fields[_SKETCH], inbox.index, inbox.mask)
    if kind == "inv_l2":
        return similarity.invert_cost(similarity.l2_distances(*pair), eps)
    return similarity.cosine(*pair)


def count_numbers(profile: Profile) -> int:
    """Return how many numbers one profile has."""
    return sum(value[:1].numel() for value in profile.values())
