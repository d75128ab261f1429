"""Secure sums: what a server gets that may learn the weighted mean of models and no single one.

Between machines each client's vector is masked (`net.masking`); in one process the same sum is
computed without masks, which cancel, to the same bytes.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from coterie.errors import ExchangeError
from coterie.exchange import validity
from coterie.exchange.base import SAMPLES, Message, SecureAggregation
from coterie.functional.fixed_point import (
    WORD,
    WORD_BYTES,
    decode_mean,
    divide_samples,
    encode_model,
    largest_number,
)

SUMMED = "summed"
"""The extra of a message that is a sum already: of how many clients."""
KEYS, SIGNATURE = 96, 64
"""Bytes of a client's two public keys and the digest of its seed, and of the signature of them."""
SEALED_SHARES = 82
"""Bytes of two shares that one client encrypts for another: 33 of each, and 16 that prove them."""
SHARE = 33
"""Bytes of one share."""
_DIGEST = 32
_ENTRY = 8  # of a number of samples, or of a client's id


def count_bytes(params: int, clients: int) -> tuple[int, int]:
    """Return the bytes that a client sends for a sum and receives for it, when nobody leaves.

    Args:
        params: numbers in the vector.
        clients: in the sum.

    Example:
        >>> count_bytes(1_000_000, 32)
        (5003944, 8768)
    """
    up = KEYS + SIGNATURE + _ENTRY + 3 * _DIGEST + clients * (SEALED_SHARES + SHARE)
    listed = _ENTRY + KEYS + _ENTRY + SIGNATURE
    return up + params * WORD_BYTES, clients * (listed + _ENTRY + SEALED_SHARES + _ENTRY)


class TooFewToSum(ExchangeError):
    """Fewer clients than the threshold are in a sum: nothing of it is revealed."""


def find_unfit(message: Message, cohort: int) -> dict[int, str]:
    """Return why messages cannot be terms of a sum, by the client's id.

    Args:
        message: with ids.
        cohort: number of clients in the round.
    """
    assert message.ids is not None
    found, most = validity.find_invalid(message), largest_number(cohort)
    if not message.params.numel():
        return found
    largest = message.params.abs().amax(dim=1).cpu()
    for row in (largest > most).nonzero().flatten().tolist():
        found.setdefault(
            int(message.ids[row]),
            f"its model has numbers up to {float(largest[row]):.6g}; a secure sum over {cohort} "
            f"clients holds at most {most}",
        )
    return found


def sum_messages(message: Message, terms: SecureAggregation) -> tuple[Message, dict[int, str]]:
    """Return what a secure sum shows of a cohort's messages, and why clients are left out of it.

    Args:
        message: a model and a number of samples of each client, by ascending ids.
        terms: of the sum.

    Returns:
        A message with one row: the weighted mean, all samples, and how many clients it is of. By
        id, why other clients are left out.

    Raises:
        TooFewToSum: when fewer than the threshold are left.
    """
    assert message.ids is not None
    cohort = len(message)
    refused = find_unfit(message, cohort)
    bad = torch.tensor(list(refused), dtype=torch.int64)
    rows = (~torch.isin(message.ids, bad)).nonzero().flatten().tolist()
    check_enough(len(rows), cohort, terms)
    samples = message.fields[SAMPLES][rows]
    shares, total = divide_samples(samples), np.zeros(message.params.shape[1], dtype=np.int64)
    for row, share in zip(rows, shares, strict=True):
        total = (total + encode_model(message.params[row], share, cohort)) % WORD
    mean = decode_mean(total, math.fsum(shares), cohort, message.params.dtype)
    return make_summed(message, mean, samples), refused


def check_enough(found: int, cohort: int, terms: SecureAggregation) -> None:
    """Check that enough clients take part in a sum.

    Raises:
        TooFewToSum: with both numbers.
    """
    least = terms.smallest_sum(cohort)
    if found < least:
        raise TooFewToSum(
            f"{found} of {cohort} clients can be summed; at least {least} must be, so that no "
            "model is revealed (`secure_aggregation`)"
        )


def make_summed(
    like: Message, mean: Float[Tensor, " params"], samples: Shaped[Tensor, " clients"]
) -> Message:
    """Return the message that a server's rule gets of a sum.

    Args:
        like: has the type of a message's parts.
        mean: the weighted mean.
        samples: of the clients in it.
    """
    fields = {
        SAMPLES: samples.double().sum()[None].to(like.fields[SAMPLES]),
        SUMMED: torch.tensor([len(samples)]),
    }
    params = mean[None].to(like.params)
    # The sum is of no client.
    return replace(like, params=params, fields=fields, ids=torch.tensor([-1]), sum_only=None)
