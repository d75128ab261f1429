"""Shamir's secret sharing of 32 bytes: any `threshold` shares give the secret, fewer say nothing.

A share is the value of a random polynomial of degree `threshold - 1`, whose value at 0 is the
secret, at a number that only its holder has (Shamir, How to share a secret, 1979).
"""

import secrets
from collections.abc import Mapping

from coterie.errors import ExchangeError

SECRET = 32
"""Bytes of a secret."""
SHARE = 33
"""Bytes of a share: the field is one bit larger than a secret."""
PRIME = 2**256 + 297
"""The smallest prime above 2^256: every secret is below it."""


def split_secret(secret: bytes, holders: int, threshold: int) -> list[bytes]:
    """Return a share of a secret for each holder; holder k has the value at k + 1.

    Args:
        secret: 32 bytes.
        holders: number of shares.
        threshold: how many of them give the secret.
    """
    if len(secret) != SECRET or not 1 <= threshold <= holders:
        raise ExchangeError(
            f"{len(secret)} bytes in {holders} shares with threshold {threshold}; expected "
            f"{SECRET} bytes, and a threshold of at most the shares"
        )
    # The lowest coefficient is the secret; the others are drawn for this secret alone.
    terms = [
        int.from_bytes(secret, "big"),
        *(secrets.randbelow(PRIME) for _ in range(threshold - 1)),
    ]
    shares = []
    # From 1: the value at 0 is the secret itself.
    for place in range(1, holders + 1):
        value = 0
        # Horner's scheme, from the highest coefficient down.
        for term in reversed(terms):
            value = (value * place + term) % PRIME
        shares.append(value.to_bytes(SHARE, "big"))
    return shares


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of some shares, by the number of their holder.

    Raises:
        ExchangeError: when they are shares of no secret: some of them are wrong.
    """
    places = {holder + 1: int.from_bytes(share, "big") for holder, share in shares.items()}
    # Lagrange's interpolation at 0, where the polynomial has the secret.
    value = 0
    for place, found in places.items():
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        value = (value + found * above * pow(below, -1, PRIME)) % PRIME
    if value >= 1 << 8 * SECRET:
        raise ExchangeError("shares fit no secret: some of them are wrong")
    return value.to_bytes(SECRET, "big")
