"""Heads: a signed answer about a node's state, for one question of one member."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.errors import PeerMismatch
from coterie.net import identity, local
from coterie.net.head import (
    Head,
    check_study,
    describe_difference,
    parse_head,
    study_hash,
    with_table,
)
from coterie.net.payload import Refused
from coterie.net.wire import MAX_HEAD, SIGNATURE
from coterie.testing import tiny_federation

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
    "change",
    [
        {"round": -1}, {"round": 2**31 - 1}, {"inc": 0}, {"inc": 2**53 - 1}, {"roster": 0}, {"protocol": 2**53 - 1},
        {"time": 0.0}, {"time": 2.0**40 - 1}, {"met": []}, {"settings": {"rounds": 2**53 - 1, "lr": 1e300, "a": None}},
        {"settings": {"rounds": 1 - 2**53}},
    ],
)  # fmt: skip
def test_numbers_of_a_head_reach_to_the_ends_of_their_ranges(change):
    assert answered(replace(HEAD, **change)) == replace(HEAD, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"round": 2**31}, "in round 2147483648"),
        ({"inc": 2**53}, "a number is out of range"),
        ({"roster": -1}, "a number is out of range"),
        ({"protocol": -1}, "a number is out of range"),
        ({"time": 2.0**40}, "a number is out of range"),
        ({"settings": {"rounds": -(2**53)}}, "a setting is neither"),
        ({"nonce": "earlier"}, "answers another question"),
        ({"peer": "n2"}, "it is of n2 in run run"),
        ({"run": "other"}, "in run other"),
        ({"state": "asleep"}, "state 'asleep' in round 3"),
        ({"round": -2}, "in round -2"),
        ({"met": [1]}, "met is not a list of names"),
        ({"met": ["n0\n"]}, "met is not a list of names"),
        ({"inc": 10**4000}, "a number is out of range"),
        ({"inc": -1}, "a number is out of range"),
        ({"roster": 1 << 53}, "a number is out of range"),
        ({"protocol": 10**4000}, "a number is out of range"),
        ({"time": 1e300}, "a number is out of range"),
        ({"time": -1.0}, "a number is out of range"),
        ({"round": 10**4000}, "state 'running' in round 1000"),
        ({"settings": {"rounds": 10**4000}}, "a setting is neither"),
        ({"settings": {"rounds": [30]}}, "a setting is neither"),
        ({"settings": {"rounds": {"a": {"b": 1}}}}, "a setting is neither"),
    ],
)
def test_a_head_of_another_question_member_or_run_or_without_sense_is_refused(change, said):
    """Each of them is signed with the right key: an answer to an earlier question cannot be sent again."""
    with pytest.raises(Refused, match=said):
        answered(replace(HEAD, **change))


def test_a_head_that_another_key_signed_is_refused():
    with pytest.raises(Refused, match="is not signed by n1's key"):
        answered(HEAD, ec.generate_private_key(ec.SECP256R1()))


FORGED = 'rounds\n{"event": "refused", "peer": "n0"}\x1b[31m\u202e'


def test_what_a_member_says_of_its_settings_is_shown_in_characters_that_can_be_printed():
    """Names and values of its choice: in an error, in the log, and on the terminal of the doctor."""
    theirs = {FORGED: 1, "rounds": FORGED, "x" * 5000: "y" * 5000}
    text = describe_difference({"rounds": 30}, theirs)
    assert text.isprintable()
    assert text.isascii()
    assert "\\n" in text
    assert len(text) < 1000
    who, _ = local.make_members([[0], [1]])
    odd = replace(HEAD, study=study_hash(theirs), schema=FORGED, settings=theirs)
    with pytest.raises(PeerMismatch) as found:
        check_study(who, {"rounds": 30}, "schema", {"n1": odd})
    assert str(found.value).isprintable()
    with pytest.raises(PeerMismatch) as found:
        check_study(who, {"rounds": 30}, "schema", {"n1": replace(odd, settings={"rounds": 30})})
    assert str(found.value).isprintable()


def test_no_text_of_a_refusal_has_a_line_of_its_sender():
    refused = Refused("head", f"it is of {FORGED}" + "x" * 10**6)
    assert str(refused).isprintable()
    assert len(str(refused)) < 400


ROWS = tiny_federation()


class Columns:
    """A table whose columns have the longest names and categories that are told of, in other letters."""

    def list_coding(self) -> dict[str, str]:
        long = "\u0416" * 300
        return {f"column {number} {long}": long for number in range(60)}


def test_a_head_of_a_thousand_members_and_a_wide_table_stays_below_its_limit(monkeypatch):
    monkeypatch.setattr("coterie.net.head.TableSchema.from_federation", lambda rows: Columns())
    settings = with_table({f"setting {n}": "x" * 100 for n in range(100)}, ROWS)
    names = [f"{n:063d}" for n in range(999)]
    head = replace(HEAD, met=names, settings=settings)
    assert len(head.seal(local.make_signer(KEY))) < MAX_HEAD + SIGNATURE
    assert answered(head) == head
    monkeypatch.setattr(Columns, "list_coding", lambda self: {"inputs": "age"})
    assert with_table({}, ROWS) == {"table.inputs": "age"}
