"""Signed statements about studies: whose they are, and what a member refuses to read."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.net import identity, statements
from coterie.net.local import make_members, make_signer
from coterie.net.payload import Refused
from coterie.net.roster import Roster
from coterie.net.statements import Proposal, Word

NOW = 1_900_000_000.0
ORGANIZER = "02" * 33
STUDY = """
name = "hearts"
rounds = 3
seeds = [0]
[data]
dataset = "heart"
[model]
kind = "linear"
[[methods]]
kind = "dac"
"""


@pytest.fixture(scope="module")
def federation() -> tuple[Roster, list[Callable[[bytes], bytes]]]:
    roster, keys = make_members([[0], [1], [2]])
    return roster, [make_signer(key) for key in keys]


def proposal(**changes) -> Proposal:
    made = Proposal(
        federation="local", organizer=ORGANIZER, by="n0", time=NOW, name="hearts", study=STUDY,
        role="heart", features=[14], classes=2, outputs=2, table={}, members=["n0", "n1", "n2"],
        quorum=2, server="",
    )  # fmt: skip
    return replace(made, **changes)


def word(**changes) -> Word:
    return replace(Word("local", ORGANIZER, "n1", NOW, "approval", "0" * 64), **changes)


def opened(data: bytes, roster: Roster) -> Proposal | Word:
    return statements.open_statement(data, roster, ORGANIZER, NOW)


def test_a_statement_is_read_as_it_was_signed(federation):
    roster, (sign, other, _) = federation
    assert opened(statements.seal(proposal(), sign), roster) == proposal()
    assert opened(statements.seal(word(), other), roster) == word()


def test_a_statement_that_was_changed_or_is_of_somebody_else_is_refused(federation):
    roster, (sign, other, _) = federation
    sealed = statements.seal(proposal(), sign)
    for place in (0, 63, 64, len(sealed) // 2, len(sealed) - 1):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(Refused):
            opened(bytes(changed), roster)
    with pytest.raises(Refused, match="not signed by n0's key"):
        opened(statements.seal(proposal(), other), roster)
    with pytest.raises(Refused, match="nobody is not on the roster"):
        opened(statements.seal(proposal(by="nobody"), sign), roster)
    left = replace(roster, members=roster.members[1:], removed=(0,))
    with pytest.raises(Refused, match="n0 is not on the roster"):
        opened(sealed, left)


def test_a_second_signature_under_a_text_names_the_same_statement(federation):
    """Of an ECDSA signature (r, s) anybody can make (r, n - s), which is as good."""
    roster, (sign, _, _) = federation
    sealed = statements.seal(proposal(), sign)
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    s = order - int.from_bytes(sealed[32:64], "big")
    again = sealed[:32] + s.to_bytes(32, "big") + sealed[64:]
    found = opened(again, roster)
    assert again != sealed
    assert found.digest == proposal().digest


def test_a_statement_of_another_federation_or_of_tomorrow_is_refused(federation):
    roster, (sign, _, _) = federation
    wrong = {
        "of another federation": [{"federation": "other"}, {"organizer": "03" * 33}],
        "by this clock": [{"time": NOW + 90_000}, {"time": -1.0}],
    }
    for said, changes in wrong.items():
        for change in changes:
            with pytest.raises(Refused, match=said):
                opened(statements.seal(proposal(**change), sign), roster)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "../../etc"}, "expected 1 to 40 of a-z"),
        ({"name": "<b>hearts</b>"}, "expected 1 to 40 of a-z"),
        ({"name": "hearts\x1b[2J"}, "expected 1 to 40 of a-z"),
        ({"name": "other"}, "its file is of the study"),
        ({"role": "../heart"}, "expected a role"),
        ({"members": ["n0"]}, "each once"),
        ({"members": ["n0", "n0"]}, "each once"),
        ({"members": ["n0", "../n1"]}, "each once"),
        ({"quorum": 1}, "1 of 3 members"),
        ({"quorum": 4}, "4 of 3 members"),
        ({"server": "n9"}, "none of the members"),
        ({"features": [True]}, "whole numbers"),
        ({"features": [1 << 40]}, "whole numbers"),
        ({"features": [1] * 9}, "at most 8"),
        ({"outputs": 0}, "whole numbers"),
        ({"study": "x = 1\n" * 20_000}, "over 65536 bytes"),
        ({"study": STUDY.replace("seeds = [0]", "seeds = [0, 1]")}, "one method and one seed"),
        ({"study": 'extends = "/etc/passwd"\n' + STUDY}, "complete in itself"),
        ({"study": "x = " + "[" * 5000}, "study"),
        ({"study": "[" + "a." * 20_000 + "a]"}, "in each other more than 50 times"),
        ({"study": STUDY + "\nrounds = true"}, "study"),
        ({"study": STUDY.replace('"dac"', '"dac"\nlabel = "../../x"')}, "label"),
        ({"table": {"column": "x" * 70_000}}, "columns in over"),
    ],
)  # fmt: skip
def test_a_proposal_that_is_not_well_formed_is_refused_in_one_line(federation, change, said):
    roster, (sign, _, _) = federation
    with pytest.raises(Refused, match=said) as caught:
        opened(statements.seal(proposal(**change), sign), roster)
    assert str(caught.value).isprintable()


def test_a_statement_with_other_fields_or_types_is_refused(federation):
    roster, (sign, _, _) = federation
    good = json.loads(statements.make_text(proposal()))
    for change in (
        {"more": 1}, {"statement": "head"}, {"statement": ["proposal"]}, {"quorum": 2.0},
        {"quorum": True}, {"members": "n0"}, {"time": "now"}, {"by": ["n0"]},
    ):  # fmt: skip
        text = json.dumps(good | change, sort_keys=True, separators=(",", ":")).encode()
        with pytest.raises(Refused):
            opened(sign(statements._DOMAIN + text) + text, roster)
    nested = b'{"a":' * 500 + b"1" + b"}" * 500
    text = json.dumps(good, sort_keys=True, separators=(",", ":")).encode()
    deep = text.replace(b'"table":{}', b'"table":' + nested)
    with pytest.raises(Refused):
        opened(sign(statements._DOMAIN + deep) + deep, roster)
    spaced = json.dumps(good, sort_keys=True).encode()
    with pytest.raises(Refused, match="canonical"):
        opened(sign(statements._DOMAIN + spaced) + spaced, roster)
    head = statements.seal(proposal(), lambda data: sign(b"coterie head 1\n" + data[20:]))
    with pytest.raises(Refused, match="not signed"):
        opened(head, roster)


def test_what_a_study_would_load_is_listed_and_not_loaded(federation):
    roster, (sign, _, _) = federation
    for line, said in (
        ('kind = "linear"', 'kind = "no_such_package.nets:Net"'),
        ('kind = "dac"', 'kind = "no_such_package.methods:Mine"\nlabel = "Mine"'),
        ("rounds = 3", 'rounds = 3\nloss = "no_such_package:loss"'),
        ('kind = "linear"', 'kind = "hf:some/model"'),
        ('kind = "linear"', 'kind = "linear"\noptions = { file = "/etc/passwd" }'),
    ):
        study = STUDY.replace(line, said)
        assert study != STUDY
        found = statements.find_code(study)
        assert len(found) == 1, found
        # It is read, passed on and shown, and nothing is imported for that.
        opened(statements.seal(proposal(study=study), sign), roster)
    assert statements.find_code(STUDY) == []


def test_a_member_says_only_what_it_may(federation):
    made = proposal()
    for kind, by, allowed in (
        ("approval", "n1", True),
        ("approval", "n9", False),
        ("withdrawal", "n0", True),
        ("withdrawal", "n1", False),
        ("stop", "n2", True),
    ):
        said = word(kind=kind, by=by, proposal=made.digest)
        if allowed:
            statements.check_signer(said, made)
        else:
            with pytest.raises(Refused, match="has no say"):
                statements.check_signer(said, made)


def test_the_run_of_a_study_is_named_by_all_of_its_text():
    runs = {proposal(**change).run for change in ({}, {"quorum": 3}, {"study": STUDY + "\n"})}
    assert len(runs) == 3
    assert all(identity.check_name(run) for run in runs)


def test_a_key_of_a_stranger_signs_nothing(federation):
    roster, _ = federation
    stranger = make_signer(ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(Refused, match="not signed"):
        opened(statements.seal(proposal(), stranger), roster)
