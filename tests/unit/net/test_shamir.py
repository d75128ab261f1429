"""Shares of a secret: any enough of them give it, one fewer say nothing of it."""

from itertools import combinations

import pytest

from coterie.errors import ExchangeError
from coterie.net import shamir
from coterie.net.shamir import PRIME, combine_shares, split_secret


def test_the_modulus_is_a_prime_above_every_secret():
    """By Miller and Rabin, whose test a composite number passes once in four for each base."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 60):
        found = pow(base, odd, PRIME)
        assert found == 1 or PRIME - 1 in {pow(found, 2**k, PRIME) for k in range(twos)}
    assert PRIME > 2**256


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, bytes(range(32))])
def test_any_three_of_five_shares_give_the_secret(secret):
    shares = split_secret(secret, 5, 3)
    for holders in combinations(range(5), 3):
        assert combine_shares({k: shares[k] for k in holders}) == secret
    assert combine_shares(dict(enumerate(shares))) == secret


def test_a_line_worked_by_hand(monkeypatch):
    """Of the secret 7 with the drawn slope 2: 9 at 1, 11 at 2."""
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda bound: 2)
    shares = split_secret((7).to_bytes(32, "big"), 2, 2)
    assert [int.from_bytes(share, "big") for share in shares] == [9, 11]


def test_two_shares_of_three_fit_every_secret():
    """For any other secret there is a third share with which the same two give it."""
    shares = split_secret(bytes(32), 3, 3)
    others = {
        combine_shares({0: shares[0], 1: shares[1], 2: guess.to_bytes(33, "big")})
        for guess in range(20)
        if _fits(shares, guess)
    }
    assert len(others) == sum(_fits(shares, guess) for guess in range(20)) > 10


def _fits(shares, guess: int) -> bool:
    try:
        combine_shares({0: shares[0], 1: shares[1], 2: guess.to_bytes(33, "big")})
    except ExchangeError:
        return False
    return True


def test_shares_of_one_secret_differ_every_time():
    one, other = (split_secret(bytes(32), 3, 2) for _ in range(2))
    assert not set(one) & set(other)


def test_what_is_no_secret_or_no_threshold_is_refused():
    for secret, holders, threshold in ((b"short", 3, 2), (bytes(32), 3, 4), (bytes(32), 3, 0)):
        with pytest.raises(ExchangeError, match="expected 32 bytes"):
            split_secret(secret, holders, threshold)
