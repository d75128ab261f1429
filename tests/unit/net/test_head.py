"""Heads: a signed answer about a node's state, for one question of one member."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.net import identity, local
from coterie.net.head import Head, parse_head
from coterie.net.payload import Refused

KEY = ec.generate_private_key(ec.SECP256R1())
HEAD = Head(
    "run", "n1", 7, "nonce", 3, "running", 1, "study", "schema", 2, 12.5, ["n0"], {"rounds": 30}
)


def answered(head: Head, key: ec.EllipticCurvePrivateKey = KEY) -> Head:
    """Read a sealed head as the member that asked n1 with this nonce."""
    data = head.seal(local.make_signer(key))
    return parse_head(
        data,
        lambda s, d: identity.verify(KEY.public_key(), s, d),
        run="run",
        peer="n1",
        nonce="nonce",
    )


def test_a_head_is_read_as_it_was_sealed():
    assert answered(HEAD) == HEAD


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nonce": "earlier"}, "answers another question"),
        ({"peer": "n2"}, "it is of n2 in run run"),
        ({"run": "other"}, "in run other"),
        ({"state": "asleep"}, "state 'asleep' in round 3"),
        ({"round": -2}, "in round -2"),
        ({"met": [1]}, "met is not a list of names"),
    ],
)
def test_a_head_of_another_question_member_or_run_or_without_sense_is_refused(change, said):
    """Each of them is signed with the right key: an answer to an earlier question cannot be sent again."""
    with pytest.raises(Refused, match=said):
        answered(replace(HEAD, **change))


def test_a_head_that_another_key_signed_is_refused():
    with pytest.raises(Refused, match="is not signed by n1's key"):
        answered(HEAD, ec.generate_private_key(ec.SECP256R1()))
