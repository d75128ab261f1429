"""Sums modulo 2^40: worked by hand, and compared with fractions, which do not round."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError
from coterie.functional.fixed_point import (
    MOST_CLIENTS,
    WORD,
    decode_mean,
    divide_samples,
    encode_model,
    fraction_bits,
    largest_number,
    pack_words,
    unpack_words,
)


def test_a_number_is_its_value_times_two_to_the_places_rounded():
    assert fraction_bits(2) == 23
    words = encode_model(torch.tensor([1.0, -1.0, 0.25, 2.0**-25]), 0.5, 2)
    assert words.tolist() == [2**22, WORD - 2**22, 2**20, 0]


def test_negative_numbers_are_the_upper_half():
    total = np.array([0, WORD // 2 - 1, WORD // 2, WORD - 1])
    half, last = 2.0**39 / 2**23, 2.0**-23
    found = decode_mean(total, 1.0, 2, torch.float64)
    assert found.tolist() == [0.0, half - last, -half, -last]


def test_five_bytes_hold_a_number_the_lowest_first():
    words = np.array([0x0102030405, WORD - 1])
    assert pack_words(words).tolist() == [5, 4, 3, 2, 1, 255, 255, 255, 255, 255]
    assert unpack_words(pack_words(words)).tolist() == words.tolist()


def test_places_and_range_follow_from_the_cohort():
    found = {m: (fraction_bits(m), largest_number(m)) for m in (1, 2, 3, 4, 5, 128, 4096)}
    assert found == {
        1: (22, 131071), 2: (23, 65535), 3: (24, 32767), 4: (24, 32767), 5: (25, 16383),
        128: (29, 1023), 4096: (34, 31),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"over 4097 clients; expected at most 4096"):
        fraction_bits(MOST_CLIENTS + 1)


@pytest.mark.parametrize("cohort", [3, 7, 128])
def test_a_mean_of_the_largest_numbers_does_not_wrap_and_is_within_a_millionth(cohort):
    """The reference adds fractions of float64 values, without any rounding."""
    draw = np.random.default_rng(cohort)
    most = largest_number(cohort)
    models = torch.from_numpy(draw.uniform(-most, most, (cohort, 20)))
    models[:, 0], models[:, 1] = most, -most
    samples = torch.from_numpy(draw.integers(1, 10_000, cohort))
    shares, total = divide_samples(samples), np.zeros(20, dtype=np.int64)
    for model, share in zip(models, shares, strict=True):
        total = (total + encode_model(model, share, cohort)) % WORD
    found = decode_mean(total, sum(shares), cohort, torch.float64)
    whole = sum(samples.tolist())
    for column in range(20):
        terms = (
            Fraction(n) * Fraction(x)
            for n, x in zip(samples.tolist(), models[:, column].tolist(), strict=True)
        )
        exact = sum(terms) / whole
        assert abs(Fraction(float(found[column])) - exact) < Fraction(1, 10**6)


def test_shares_are_of_all_samples():
    assert divide_samples(torch.tensor([1.0, 3.0])) == [0.25, 0.75]
