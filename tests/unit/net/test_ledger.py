"""What a member keeps of what others have signed, and how much of it."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.net.test_statements import ORGANIZER, STUDY, proposal

from coterie._util import claims
from coterie.errors import ConfigError
from coterie.net import ledger as ledgers
from coterie.net import statements
from coterie.net.ledger import Ledger
from coterie.net.local import make_members, make_signer
from coterie.net.payload import Refused
from coterie.net.roster import Roster
from coterie.net.statements import Proposal, Word


class Federation:
    """Members with their keys, and the ledger of n1."""

    def __init__(self, folder: Path) -> None:
        self.roster, keys = make_members([[0], [1], [2]])
        self.sign: dict[str, Callable[[bytes], bytes]] = {
            member.name: make_signer(key)
            for member, key in zip(self.roster.members, keys, strict=True)
        }
        # Files have the time of this machine.
        self.now = float(int(time.time()))
        self.ledger = self.open(folder)

    def open(self, folder: Path) -> Ledger:
        return Ledger(folder, "n1", ORGANIZER, lambda: self.now)

    def seal(self, statement: Proposal | Word) -> bytes:
        return statements.seal(statement, self.sign[statement.by])

    def propose(self, name: str, by: str = "n0", **changes) -> Proposal:
        study = STUDY.replace('"hearts"', f'"{name}"')
        made = proposal(name=name, study=study, by=by, time=self.now, **changes)
        self.ledger.add(self.seal(made), self.roster)
        return made

    def say(self, kind: str, by: str, about: Proposal) -> Word | Proposal | None:
        word = Word("local", ORGANIZER, by, self.now, kind, about.digest)
        return self.ledger.add(self.seal(word), self.roster)


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return Federation(tmp_path / "studies")


def test_a_study_has_its_quorum_when_as_many_on_the_roster_have_approved_it(federation):
    made = federation.propose("hearts", quorum=2)
    roster: Roster = federation.roster

    def taking_part(of: Roster = roster) -> list[str]:
        return federation.ledger.find("hearts").list_taking_part(of)

    assert taking_part() == []
    federation.say("approval", "n2", made)
    assert not federation.ledger.find("hearts").has_quorum(roster)
    federation.say("approval", "n0", made)
    assert taking_part() == ["n0", "n2"]
    assert federation.ledger.find("hearts").has_quorum(roster)
    without = replace(roster, members=roster.members[:2], removed=(2,))
    assert not federation.ledger.find("hearts").has_quorum(without)
    federation.say("stop", "n2", made)
    assert taking_part() == ["n0"]


def test_a_study_without_its_server_has_no_quorum(federation):
    made = federation.propose("hearts", quorum=2, server="n2")
    for by in ("n0", "n1"):
        federation.say("approval", by, made)
    entry = federation.ledger.find
    assert not entry("hearts").has_quorum(federation.roster)
    federation.say("approval", "n2", made)
    assert entry("hearts").has_quorum(federation.roster)
    federation.say("stop", "n2", made)
    assert not entry("hearts").has_quorum(federation.roster)


def test_a_folder_of_another_name_than_its_studys_is_named(federation, tmp_path):
    """Its results and what is said of it are found by the study's name."""
    federation.propose("hearts")
    (tmp_path / "studies/hearts").rename(tmp_path / "studies/hearts-old")
    with pytest.raises(ConfigError, match="hearts-old holds the proposal of hearts; a study's"):
        federation.open(tmp_path / "studies")
    with pytest.raises(ConfigError, match="rename it, or move it out of"):
        federation.ledger.reload()


def test_what_was_taken_is_on_disk_for_the_next_start(federation, tmp_path):
    made = federation.propose("hearts")
    federation.say("approval", "n2", made)
    federation.say("refusal", "n1", made)
    again = federation.open(tmp_path / "studies")
    assert again.entries == federation.ledger.entries
    assert again.find("hearts").says("refusal", "n1")
    assert again.list_digests() == federation.ledger.list_digests()


def test_another_process_of_the_member_adds_statements_to_the_same_folder(federation, tmp_path):
    made = federation.propose("hearts")
    other = federation.open(tmp_path / "studies")
    federation.say("approval", "n2", made)
    other.reload()
    assert other.find("hearts").says("approval", "n2")


def test_a_statement_that_is_sent_again_changes_nothing(federation, tmp_path):
    """Also one that says at another time what its signer has said before."""
    made = federation.propose("hearts")
    assert federation.say("approval", "n2", made) is not None
    before = {p: p.read_bytes() for p in tmp_path.rglob("signed/*")}
    assert federation.ledger.add(federation.seal(made), federation.roster) is None
    federation.now += 5
    assert federation.say("approval", "n2", made) is None
    assert {p: p.read_bytes() for p in tmp_path.rglob("signed/*")} == before


def test_a_second_proposal_of_a_name_is_refused_whoever_makes_it(federation):
    first = federation.propose("hearts")
    for by, quorum in (("n0", 3), ("n2", 2)):
        with pytest.raises(Refused, match="n0 has proposed another study named hearts before"):
            federation.propose("hearts", by=by, quorum=quorum)
    # Withdrawn or not: who looks up a name finds the study that had it.
    federation.say("withdrawal", "n0", first)
    with pytest.raises(Refused, match="a name is used once"):
        federation.propose("hearts", by="n2")
    assert federation.ledger.find("hearts").proposal == first


def test_a_hundred_proposals_of_a_member_leave_room_for_others(federation):
    taken, refused = 0, set[str]()
    for number in range(100):
        try:
            federation.propose(f"flood-{number}")
            taken += 1
        except Refused as error:
            refused.add(str(error))
    assert taken == ledgers.MAX_OPEN == 8
    assert len(refused) == 1
    assert "n0 has 8 studies open here" in refused.pop()
    federation.propose("honest", by="n2")


def test_a_member_that_proposes_and_withdraws_is_bounded_by_the_day(federation):
    for number in range(ledgers.MAX_A_DAY):
        federation.say("withdrawal", "n0", federation.propose(f"flood-{number}"))
    with pytest.raises(Refused, match="within a day"):
        federation.propose("one-more")
    federation.propose("honest", by="n2")


def test_a_proposal_of_long_ago_is_neither_taken_nor_passed_on(federation):
    federation.propose("hearts")
    assert len(federation.ledger.list_digests()) == 1
    federation.now += ledgers.MAX_AGE + 1
    assert federation.ledger.list_digests() == []
    with pytest.raises(Refused, match="over 90 days ago"):
        federation.ledger.add(
            federation.seal(proposal(name="old", study=STUDY.replace("hearts", "old"), time=1.7e9)),
            federation.roster,
        )


def test_proposals_are_passed_on_before_what_is_said_about_them(federation):
    made = federation.propose("hearts")
    said = federation.say("approval", "n2", made)
    other = federation.propose("lungs")
    digests = federation.ledger.list_digests()
    assert set(digests[:2]) == {made.digest, other.digest}
    assert digests[2:] == [said.digest]
    assert federation.ledger.find_new([*digests, "f" * 64]) == ["f" * 64]
    opened = statements.reopen_statement(federation.ledger.find_sealed(said.digest))
    assert opened == said
    assert federation.ledger.find_sealed("../../etc/passwd") == b""


def test_a_word_about_an_unknown_study_is_refused(federation):
    with pytest.raises(Refused, match="not known here"):
        federation.say("approval", "n2", proposal(name="other"))


def test_a_damaged_file_is_named(federation, tmp_path):
    federation.propose("hearts")
    path = tmp_path / "studies/hearts/signed/proposal"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="signed/proposal is damaged"):
        federation.open(tmp_path / "studies")


def test_a_kill_between_the_folder_and_its_proposal_leaves_room_for_the_proposal(
    federation, tmp_path
):
    (tmp_path / "studies/hearts/signed").mkdir(parents=True)
    assert federation.open(tmp_path / "studies").entries == {}
    federation.propose("hearts")
    assert list(federation.ledger.entries) == ["hearts"]
    shutil.rmtree(tmp_path / "studies/hearts")


def test_threads_of_a_member_wait_for_each_other_on_a_slow_disk(federation, monkeypatch):
    """Eight of them ask others at a time; each writes for longer than another process is waited for."""
    write = claims.write_atomically

    def write_slowly(path: Path, data: bytes) -> None:
        time.sleep(0.05)
        write(path, data)

    monkeypatch.setattr(ledgers, "write_atomically", write_slowly)
    monkeypatch.setattr(ledgers, "_WAIT", 0.03)
    made = []
    for number in range(8):
        study = STUDY.replace('"hearts"', f'"study-{number}"')
        made.append(proposal(name=f"study-{number}", study=study, by="n0", time=federation.now))
    with ThreadPoolExecutor(8) as pool:
        added = pool.map(
            lambda one: federation.ledger.add(federation.seal(one), federation.roster), made
        )
        assert sorted(one.name for one in added) == sorted(federation.ledger.entries)
    assert len(federation.ledger.entries) == 8
