"""Validity: which messages a server leaves out of what it aggregates, and why.

A member of a run is known, not trusted. What cannot be of an honest client is left out before any
rule of a method sees it: in a simulation, in blocks and between machines alike.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from coterie._util.finite import not_finite
from coterie.exchange.accepting import Acceptance
from coterie.exchange.base import SAMPLES, Message

FAR = 3.0
"""A model is refused from this many times `Acceptance.clip` of the cohort's typical step on.

Honest clients with ten times the samples of others take steps a few times as long; -5 times a model
is many steps away."""
_FEWEST = 3  # of fewer messages none is typical


def find_invalid(message: Message) -> dict[int, str]:
    """Return why messages are not valid, by the client's id.

    A model must be finite, and its numbers so small that their squares are finite too. An extra
    must be finite; NaN may stand for "no value" in an extra of several numbers, as between
    machines. A number of samples is above 0.
    """
    assert message.ids is not None
    found: dict[int, str] = {}
    ids, params = message.ids.tolist(), message.params
    limit = torch.finfo(params.dtype).max ** 0.5
    if params.numel() and not _is_within(params, limit):
        lost = not_finite(params)
        for row in lost.nonzero().flatten().tolist():
            found[ids[row]] = "its model is not finite"
        largest = params.abs().amax(dim=1).cpu()
        for row in ((largest > limit) & ~lost).nonzero().flatten():
            found[ids[int(row)]] = (
                f"its model has numbers up to {float(largest[row]):.3g}, whose squares overflow"
            )
    for name, value in message.fields.items():
        if value.is_floating_point():
            # A gap is allowed in extra vectors; see `net.post.nan_tensors`.
            given = value.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
            for row in not_finite(given if value.ndim > 1 else value).nonzero().flatten().tolist():
                found.setdefault(ids[row], f"its {name} are not finite")
        if name == SAMPLES:
            for row in (value <= 0).nonzero().flatten().tolist():
                found.setdefault(ids[row], f"it claims {float(value[row]):.6g} samples")
    return found


def _is_within(params: Float[Tensor, "clients params"], limit: float) -> bool:
    """Return whether all numbers are finite and at most `limit` from 0."""
    # The extremes of the whole table: a CPU takes ten to twenty times as long for
    # those of each row.
    least, most = torch.aminmax(params)
    return max(-float(least), float(most)) <= limit  # false where one is NaN: both are NaN then


def bound_messages(
    message: Message, models: Float[Tensor, "models params"] | None, rules: Acceptance
) -> tuple[Message, dict[int, str]]:
    """Bound what the messages of a cohort can do, by the acceptance rules of a server.

    A client's step is the distance of its model from the nearest one of the server; a typical step
    is the median of the cohort. A model farther than `FAR * rules.clip` typical steps is refused. A
    claimed number of samples counts for at most `rules.samples` times the median of the claims.

    Args:
        message: valid messages.
        models: of the server; steps are not measured without them.
        rules: the rules.

    Returns:
        The messages with bounded samples, and why some are refused, by the client's id.
    """
    assert message.ids is not None
    refused: dict[int, str] = {}
    if len(message) < _FEWEST:
        return message, refused
    if SAMPLES in message.fields:
        samples = message.fields[SAMPLES]
        most = rules.samples * samples.double().median()
        bounded = samples.clamp(max=most.to(samples.dtype))
        message = replace(message, fields={**message.fields, SAMPLES: bounded})
    if isinstance(models, Tensor) and models.shape[1:] == message.params.shape[1:]:
        distances = []
        for row in message.params:
            # One row at a time: all pairs at once would take a table of as many models.
            away = torch.linalg.vector_norm((models - row).double(), dim=1)
            distances.append(away.min().cpu())
        steps = torch.stack(distances)
        typical = steps.median()
        limit = FAR * rules.clip
        assert message.ids is not None
        for row in ((typical > 0) & (steps > limit * typical)).nonzero().flatten().tolist():
            refused[int(message.ids[row])] = (
                f"its model is {float(steps[row] / typical):.3g} typical steps away; at most "
                f"{limit:g} are accepted"
            )
    return message, refused
