r"""Fixed point: weighted means as sums of whole numbers modulo 2^40, in which masks cancel exactly.

A sum of whole numbers has one value, whatever the order of its terms. Each client of a cohort of
$m$ multiplies its model by its share of all samples, so that the sum is a mean and needs no room
for the number of clients, and rounds it to $22 + \lceil \log_2 m \rceil$ binary places.
"""

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie.errors import ConfigError

WORD_BYTES = 5
"""Bytes of a number of a sum: 1.25 times those of float32."""
WORD = 1 << 8 * WORD_BYTES
"""Sums are modulo this number, 2^40."""
MOST_CLIENTS = 4096
"""The largest cohort of a sum: beyond it the range of the models would be below 31."""
# Binary places for one client: its rounding, half of the last place, is below 2^-23.
_PLACES = 22


def fraction_bits(cohort: int) -> int:
    r"""Return the binary places of a sum over a cohort: $22 + \lceil \log_2 m \rceil$.

    Raises:
        ConfigError: for a cohort of more than `MOST_CLIENTS`.
    """
    if cohort > MOST_CLIENTS:
        raise ConfigError(
            f"a secure sum over {cohort} clients; expected at most {MOST_CLIENTS} in a round: "
            "lower `participation`, or leave secure_aggregation out"
        )
    return _PLACES + (cohort - 1).bit_length()


def largest_number(cohort: int) -> int:
    """Return the largest absolute value that a model of a cohort may hold.

    Example:
        >>> [largest_number(cohort) for cohort in (8, 128, 4096)]
        [16383, 1023, 31]
    """
    # One below the half of the modulus: the rounding of all clients together stays below 1.
    return WORD // 2 // (1 << fraction_bits(cohort)) - 1


def encode_model(
    model: Float[Tensor, " params"], share: float, cohort: int
) -> Int[np.ndarray, " params"]:
    """Return a client's term of a sum, modulo 2^40.

    Args:
        model: finite, and within `largest_number`.
        share: the client's share of all samples.
        cohort: number of clients from which the places follow.
    """
    scaled = model.detach().cpu().double().numpy() * share
    # A product with a power of two is exact.
    return np.rint(scaled * float(1 << fraction_bits(cohort))).astype(np.int64) % WORD


def decode_mean(
    total: Int[np.ndarray, " params"], share: float, cohort: int, dtype: torch.dtype
) -> Float[Tensor, " params"]:
    """Return the mean of the clients in a sum.

    Args:
        total: the sum of their terms modulo 2^40.
        share: the sum of their shares.
        cohort: number of clients from which the places follow.
        dtype: of the model.
    """
    # The upper half of the range holds the negative numbers.
    centered = np.where(total >= WORD // 2, total - WORD, total)
    mean = centered.astype(np.float64) / float(1 << fraction_bits(cohort)) / share
    return torch.from_numpy(mean).to(dtype)


def pack_words(words: Int[np.ndarray, " params"]) -> Tensor:
    """Return numbers modulo 2^40 as five bytes each, the lowest first."""
    wide = np.ascontiguousarray(words.astype("<i8")).view(np.uint8).reshape(-1, 8)
    return torch.from_numpy(wide[:, :WORD_BYTES].reshape(-1).copy())


def unpack_words(packed: Shaped[Tensor, " bytes"]) -> Int[np.ndarray, " params"]:
    """Invert `pack_words`."""
    wide = np.zeros((len(packed) // WORD_BYTES, 8), dtype=np.uint8)
    wide[:, :WORD_BYTES] = packed.numpy().reshape(-1, WORD_BYTES)
    return wide.reshape(-1).view("<i8").astype(np.int64)


def divide_samples(samples: Shaped[Tensor, " clients"]) -> list[float]:
    """Return each client's share of all samples, in float64; the order of the clients counts."""
    counts = samples.double()
    return (counts / counts.sum()).tolist()
