"""Who is accused: members that signed two messages for one address, always; and nobody else, whatever others say."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import CheckpointError
from coterie.net import audit, auditor, local
from coterie.net.audit import Audit
from coterie.net.identity import encode_public_key
from coterie.net.roster import Roster
from coterie.net.transport import Delivery
from coterie.net.wire import Address, Parcel, parse_manifest, seal_parcel

ROSTER, KEYS = local.make_members([[0], [1], [2], [3]])
NEW = ec.generate_private_key(ec.SECP256R1())
"""A key that n0 gets in version 2 of the roster, or that a thief or liar has made."""


def with_key(roster: Roster, name: str, key: ec.EllipticCurvePrivateKey, version: int) -> Roster:
    text = encode_public_key(key.public_key())
    members = tuple(replace(m, key=text) if m.name == name else m for m in roster.members)
    return replace(roster, members=members, version=version)


REKEYED = with_key(ROSTER, "n0", NEW, 2)
REMOVED = replace(ROSTER, members=ROSTER.members[1:], removed=(0,), version=2)


def message(
    value: float,
    round: int = 0,
    *,
    sender: int = 0,
    inc: int = 1,
    kind: str = "model",
    to: str = "",
    key: ec.EllipticCurvePrivateKey | None = None,
    client: int | None = None,
) -> Parcel:
    """What a member signs: a model of one value."""
    at = Address(round, 0, sender if client is None else client, kind)
    return seal_parcel(
        {"params": torch.full((4,), value)}, run="local", peer=f"n{sender}", inc=inc, address=at, schema="",
        sign=local.make_signer(key or KEYS[sender]), to=to,
    )  # fmt: skip


@dataclass
class Logs:
    """Logs of four members, who write down what a test says."""

    folder: Path
    open_: dict[int, Audit] = field(default_factory=dict)

    def log(self, node: int, key: ec.EllipticCurvePrivateKey | None = None, **options) -> Audit:
        if node not in self.open_:
            key = key or KEYS[node]
            own = encode_public_key(key.public_key())
            folder = self.folder / f"n{node}"
            made = Audit(folder, f"n{node}", "local", own, local.make_signer(key), **options)
            self.open_[node] = made
            made.record_start(ROSTER, inc=1)
        return self.open_[node]

    def received(self, node: int, sealed: Parcel, sender: int = 0) -> None:
        manifest = parse_manifest(sealed.manifest)
        found = Delivery(
            manifest, {"params": torch.zeros(4)}, 1, 0.1, sealed.signature + sealed.manifest
        )
        self.log(node).record_delivery(f"n{sender}", manifest.address, found)

    def sent(self, node: int, to: int, sealed: Parcel) -> None:
        self.log(node).record_answer(f"n{to}", parse_manifest(sealed.manifest).address, sealed)

    def both(self, sealed: Parcel, to: int, sender: int = 0) -> None:
        """An honest sender and an honest reader."""
        self.sent(sender, to, sealed)
        self.received(to, sealed, sender)

    def end(self, *nodes: int) -> None:
        """These nodes, or all that are open, stop in order."""
        for node in nodes or list(self.open_):
            self.open_.pop(node).__exit__(None, None, None)

    def reports(self, *given: Roster) -> list[auditor.Report]:
        self.end()
        return [auditor.check_log(path, given) for path in sorted(self.folder.glob("n?"))]


@pytest.fixture
def logs(tmp_path) -> Logs:
    return Logs(tmp_path)


def verify_by_hand(document: Mapping) -> None:
    """Check a proof without any of the program's own functions: two signatures, one address, two digests."""
    point = ec.EllipticCurvePublicKey.from_encoded_point(
        ec.SECP256R1(), bytes.fromhex(document["key"])
    )
    manifests = []
    for one in document["signed"]:
        raw = bytes.fromhex(one["signature"])
        r, s = int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big")
        text = one["manifest"].encode()
        point.verify(
            encode_dss_signature(r, s), b"coterie manifest 1\n" + text, ec.ECDSA(hashes.SHA256())
        )
        manifests.append(json.loads(text))
    a, b = manifests
    for name in ("run", "peer", "inc", "round", "exchange", "client", "kind"):
        assert a[name] == b[name]
    assert a["peer"] == document["member"]
    assert a["sha256"] != b["sha256"]


# ---------------------------------------------------------------- the guilty


def two_readers(logs: Logs) -> None:
    logs.received(1, message(1.0))
    logs.received(2, message(2.0))


def in_a_late_round_among_honest_ones(logs: Logs) -> None:
    for round in range(5):
        for reader in (1, 2):
            logs.received(reader, message(float(round), round))
            logs.log(reader).end_round(round)
    logs.received(1, message(7.0, 5))
    logs.received(2, message(8.0, 5))


def one_reader_twice(logs: Logs) -> None:
    logs.received(1, message(1.0))
    logs.received(1, message(2.0))


def the_third_of_three_readers(logs: Logs) -> None:
    logs.received(1, message(1.0))
    logs.received(2, message(1.0))
    logs.received(3, message(3.0))


def whose_own_log_says_the_same_to_both(logs: Logs) -> None:
    logs.sent(0, 1, message(1.0))
    logs.sent(0, 2, message(2.0))
    two_readers(logs)


def under_two_names_of_readers(logs: Logs) -> None:
    """Addressed to one reader each, as a server's answers are."""
    logs.received(1, message(1.0, kind="reply", client=1, to="n1"))
    logs.received(2, message(2.0, kind="reply", client=1, to="n2"))


def a_server_that_names_two_cohorts(logs: Logs) -> None:
    logs.received(1, message(1.0, kind="cohort", client=-1))
    logs.received(2, message(2.0, kind="cohort", client=-1))


def with_a_new_key(logs: Logs) -> None:
    for reader in (1, 2):
        logs.log(reader).record_roster(REKEYED)
    logs.received(1, message(1.0, 3, key=NEW, inc=2))
    logs.received(2, message(2.0, 3, key=NEW, inc=2))


def before_it_was_removed(logs: Logs) -> None:
    two_readers(logs)
    for reader in (1, 2):
        logs.log(reader).record_roster(REMOVED)
        logs.log(reader).end_round(1)


def in_files_that_were_put_aside(logs: Logs) -> None:
    for reader in (1, 2):
        log = logs.log(reader, max_bytes=2000)
        logs.received(reader, message(float(reader)))
        for round in range(9):
            log.end_round(round)
        assert len(audit.list_files(log.folder)) > 1


def after_a_restart_of_a_reader(logs: Logs) -> None:
    logs.received(1, message(1.0))
    logs.end(1)
    logs.received(1, message(2.0))


def in_a_log_that_its_owner_has_changed(logs: Logs) -> None:
    """n1 takes out a line, and its log is wrong; what n0 signed stays signed."""
    two_readers(logs)
    logs.end()
    path = logs.folder / "n1" / audit.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))


GUILTY = (
    two_readers, in_a_late_round_among_honest_ones, one_reader_twice, the_third_of_three_readers,
    whose_own_log_says_the_same_to_both, under_two_names_of_readers, a_server_that_names_two_cohorts,
    with_a_new_key, before_it_was_removed, in_files_that_were_put_aside, after_a_restart_of_a_reader,
    in_a_log_that_its_owner_has_changed,
)  # fmt: skip


@pytest.fixture
def large(monkeypatch) -> None:
    """A roster of four counts as large: logs have the keys of the members that they met alone."""
    monkeypatch.setattr(audit, "MAX_LISTED", 3)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("plant", GUILTY, ids=lambda f: f.__name__)
def test_of_a_large_roster_they_are_proved_as_well(logs, plant):
    plant(logs)
    given = (ROSTER, REMOVED if plant is before_it_was_removed else REKEYED)
    (proof,) = auditor.find_equivocations(logs.reports(*given), given)
    assert proof.member == "n0"
    verify_by_hand(proof.make_document())


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("plant", "proofs"), [(two_readers, 1), (one_reader_twice, 0)])
def test_without_a_large_roster_two_logs_have_to_name_the_key(logs, plant, proofs):
    """What one log alone says of a key may be its own invention."""
    plant(logs)
    assert len(auditor.find_equivocations(logs.reports())) == proofs


@pytest.mark.parametrize("plant", GUILTY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("given", [(), (ROSTER, REKEYED)], ids=["without rosters", "with rosters"])
def test_two_messages_for_one_address_are_proved_with_both_signatures(logs, plant, given):
    plant(logs)
    if plant is before_it_was_removed and given:
        given = (ROSTER, REMOVED)
    (proof,) = auditor.find_equivocations(logs.reports(*given), given)
    assert proof.member == "n0"
    verify_by_hand(proof.make_document())


# ---------------------------------------------------------------- the innocent


def a_run_of_honest_members(logs: Logs) -> None:
    for round in range(3):
        for sender in range(4):
            for reader in range(4):
                if reader != sender:
                    logs.both(message(float(round), round, sender=sender), reader, sender)
        for node in range(4):
            logs.log(node).end_round(round)


def the_same_message_signed_twice(logs: Logs) -> None:
    """Peers were drawn again: published anew, with another signature and the same content."""
    logs.both(message(1.0), 1)
    logs.both(message(1.0), 2)
    logs.both(message(1.0), 1)


def another_model_after_a_restart_from_an_older_checkpoint(logs: Logs) -> None:
    logs.both(message(1.0, 4), 1)
    logs.end(0)
    logs.log(0).record_start(ROSTER, inc=2)
    logs.both(message(2.0, 4, inc=2), 2)


def answers_of_a_server_to_two_clients(logs: Logs) -> None:
    for reader in (1, 2):
        answer = message(float(reader), kind="reply", client=reader, to=f"n{reader}")
        logs.both(answer, reader)


def a_message_that_one_reader_passed_on_to_another(logs: Logs) -> None:
    """n1 has it from n0; n2 says that it has it from n0 as well, who never sent it there."""
    logs.both(message(1.0), 1)
    logs.received(2, message(1.0))


def a_new_key_in_the_middle_of_the_run(logs: Logs) -> None:
    logs.both(message(1.0), 1)
    logs.end(0)
    logs.log(1).record_roster(REKEYED)
    own = logs.log(0, NEW)
    own.record_start(REKEYED, inc=2)
    logs.both(message(2.0, 1, key=NEW, inc=2), 1)


def a_member_that_was_removed(logs: Logs) -> None:
    """It answered honestly while it was a member, and its log ends there."""
    logs.both(message(1.0), 1)
    logs.end(0)
    logs.log(1).record_roster(REMOVED)
    logs.both(message(1.0, 1, sender=2), 1, 2)


def a_member_that_came_late(logs: Logs) -> None:
    logs.both(message(1.0, sender=1), 2, 1)
    logs.log(1).end_round(0)
    logs.both(message(1.0, 1, sender=3), 1, 3)
    logs.both(message(1.0, 1, sender=1), 3, 1)


def a_reader_that_forges_the_members_key(logs: Logs) -> None:
    """n1 writes a roster of its own, with a key for n0 that n1 has made, and signs in n0's name."""
    logs.both(message(1.0), 2)
    log = logs.log(1)
    log.record_roster(with_key(ROSTER, "n0", NEW, 1))
    logs.received(1, message(8.0, key=NEW))
    logs.received(1, message(9.0, key=NEW))


def a_thief_who_goes_on_with_the_old_key(logs: Logs) -> None:
    """n0's old key was stolen and replaced; n1 and the thief write down what it signs after that."""
    logs.both(message(1.0), 1)
    logs.end(0)
    logs.log(0, NEW).record_start(REKEYED, inc=2)
    for reader in (1, 2):
        logs.log(reader).record_roster(REKEYED)
    logs.received(1, message(5.0, 4))
    logs.received(2, message(6.0, 4))


def a_reader_that_invents_an_earlier_roster(logs: Logs) -> None:
    """Its version 0 names a key for n0 that n1 has made; version 1 follows as it should."""
    logs.both(message(1.0), 2)
    own = encode_public_key(KEYS[1].public_key())
    log = Audit(logs.folder / "n1", "n1", "local", own, local.make_signer(KEYS[1]))
    logs.open_[1] = log
    log.record_start(with_key(ROSTER, "n0", NEW, 0), inc=1)
    logs.received(1, message(8.0, key=NEW))
    log.record_roster(ROSTER)


INNOCENT = (
    a_run_of_honest_members, the_same_message_signed_twice,
    another_model_after_a_restart_from_an_older_checkpoint, answers_of_a_server_to_two_clients,
    a_message_that_one_reader_passed_on_to_another, a_new_key_in_the_middle_of_the_run,
    a_member_that_was_removed, a_member_that_came_late, a_reader_that_forges_the_members_key,
    a_thief_who_goes_on_with_the_old_key, a_reader_that_invents_an_earlier_roster,
)  # fmt: skip
LIARS = (
    a_reader_that_forges_the_members_key, a_thief_who_goes_on_with_the_old_key,
    a_reader_that_invents_an_earlier_roster,
)  # fmt: skip


@pytest.mark.parametrize("plant", INNOCENT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("listed", [1000, 3])
def test_no_innocent_member_is_accused(logs, plant, listed, monkeypatch):
    """Also where the logs have only some of the roster's keys."""
    monkeypatch.setattr(audit, "MAX_LISTED", listed)
    plant(logs)
    reports = logs.reports()
    known = {report.node: report for report in reports}
    for a in reports:
        for b in reports:
            wrong, _ = auditor.compare_logs(a, b)
            assert all("have other members or keys" in text for text in wrong), wrong
    if plant is a_reader_that_invents_an_earlier_roster:
        # One log alone says so, and without the organizer's roster it is its word.
        assert known["n0"].problems == []
    else:
        assert auditor.find_equivocations(reports) == []
    given = (ROSTER, REKEYED) if "key" in plant.__name__ else (ROSTER,)
    if plant is a_member_that_was_removed:
        given = (ROSTER, REMOVED)
    checked = [auditor.check_log(report.path, given) for report in reports]
    assert auditor.find_equivocations(checked, given) == []
    wrong_logs = {report.node for report in checked if report.problems}
    if plant not in LIARS:
        assert wrong_logs == set()
    else:
        assert "n0" not in wrong_logs, (
            "whoever lies or goes on with what the roster took away is named"
        )
        assert wrong_logs or plant is a_reader_that_invents_an_earlier_roster


def test_restarts_that_changed_messages_are_told_and_accuse_nobody(logs):
    another_model_after_a_restart_from_an_older_checkpoint(logs)
    assert auditor.count_changed_by_restarts(logs.reports()) == {"n0": 1}


@pytest.fixture
def clock(logs) -> list[float]:
    """The time of two readers."""
    now = [1e9]
    for reader in (1, 2):
        logs.log(reader, clock=lambda: now[0])
    return now


def sign_as_two_starts(logs: Logs, clock: list[float]) -> None:
    """n0 never starts again: it sends n1 the models of one start and n2 others of a later one, in turn."""
    for round in range(5):
        logs.received(2, message(2.0 + round, round, inc=2))
        clock[0] += 10.0
        logs.received(1, message(1.0 + round, round, inc=1))


def test_a_member_that_is_another_start_for_each_reader_is_named_and_not_accused(
    logs, clock, tmp_path
):
    sign_as_two_starts(logs, clock)
    status, said = run(tmp_path / "n1", tmp_path / "n2")
    assert status == 3
    said = " ".join(said.split())
    assert "OPEN n0 signed as its start 1 for n1 after" in said
    assert "its later start 2 for n2" in said
    assert "innocent" not in said
    assert "WRONG" not in said


def test_a_member_that_starts_again_is_not_two(logs, clock):
    """Also where the readers' clocks differ by half a minute."""
    for round in range(3):
        logs.received(1, message(1.0 + round, round, inc=1))
        clock[0] += 60.0
    clock[0] -= 60.0 + 29.0
    logs.received(2, message(5.0, 1, inc=2))
    clock[0] += 60.0
    logs.received(1, message(6.0, 3, inc=2))
    logs.received(2, message(6.0, 3, inc=2))
    reports = logs.reports()
    assert auditor.count_changed_by_restarts(reports) == {"n0": 1}
    assert auditor.find_overlapping_starts(reports) == {}


def test_messages_of_a_member_that_was_removed_or_has_a_new_key_count_no_more(logs):
    """Each log is judged by the roster that counted in it then; the log that took such a message is wrong."""
    for node, roster in ((1, REMOVED), (2, REKEYED)):
        logs.received(node, message(1.0))
        logs.log(node).record_roster(roster)
        logs.received(node, message(1.0, 1))
    removed, rekeyed = logs.reports()
    assert "n0 is no member by version 2 of the roster, which counted then" in removed.problems[0]
    assert "is not signed by n0's key of the roster that counted then" in rekeyed.problems[0]
    assert [len(r.traffic["n0"].received) for r in (removed, rekeyed)] == [1, 1]


# ---------------------------------------------------------------- logs that are not complete


def run_of_two(logs: Logs, rounds: int) -> None:
    for round in range(rounds):
        logs.both(message(float(round), round), 1)
        for node in (0, 1):
            logs.log(node).end_round(round)


def copy_while_it_runs(logs: Logs) -> str:
    """n0's log was copied after round 2; n1's after round 5."""
    run_of_two(logs, 3)
    path = logs.folder / "n0" / audit.FILE
    early = path.read_bytes()
    for round in range(3, 6):
        logs.both(message(float(round), round), 1)
    logs.end()
    path.write_bytes(early)
    return "which ends after round 2: it goes on, or was cut off; ask for the rest"


def copy_before_a_restart(logs: Logs) -> str:
    run_of_two(logs, 2)
    logs.end(0)
    path = logs.folder / "n0" / audit.FILE
    early = path.read_bytes()
    logs.log(0).record_start(ROSTER, inc=2)
    logs.both(message(9.0, 2, inc=2), 1)
    logs.end()
    path.write_bytes(early)
    return "which ends before that start of the node"


def lose_the_lines_of_a_round(logs: Logs) -> None:
    """N0 is killed in round 2, and its log ends with the round before."""
    run_of_two(logs, 2)
    path = logs.folder / "n0" / audit.FILE
    synced = path.read_bytes()
    logs.both(message(2.0, 2), 1)
    logs.open_.pop(0)._lines.close()
    path.write_bytes(synced)


def a_power_cut_that_takes_the_lines_of_a_round(logs: Logs) -> str:
    lose_the_lines_of_a_round(logs)
    logs.log(0).record_start(ROSTER, inc=2)
    return "which may have lost lines after its last signature, since the node was killed"


def fail_to_start(logs: Logs) -> None:
    """N0's node fails before it begins."""
    own = encode_public_key(KEYS[0].public_key())
    with (
        pytest.raises(CheckpointError),
        Audit(logs.folder / "n0", "n0", "local", own, local.make_signer(KEYS[0])),
    ):
        raise CheckpointError("other data")


def a_power_cut_and_a_start_that_fails(logs: Logs) -> str:
    """Such as with another table than before: that start says why it ends, and nothing of the other."""
    lose_the_lines_of_a_round(logs)
    fail_to_start(logs)
    report = auditor.check_log(logs.folder / "n0")
    assert (report.starts, report.unended, report.problems) == (1, 0, [])
    logs.log(0)
    assert auditor.check_log(logs.folder / "n0").unended == 1, "the first was killed"
    logs.log(0).record_start(ROSTER, inc=2)
    return "which may have lost lines after its last signature, since the node was killed"


def a_later_file_alone(logs: Logs) -> str:
    logs.log(0, max_bytes=900)
    run_of_two(logs, 6)
    logs.end()
    files = audit.list_files(logs.folder / "n0")
    assert len(files) > 2
    for path in files[:-1]:
        path.unlink()
    return "which begins later"


OPEN = (
    copy_while_it_runs,
    copy_before_a_restart,
    a_power_cut_that_takes_the_lines_of_a_round,
    a_power_cut_and_a_start_that_fails,
    a_later_file_alone,
)


@pytest.mark.parametrize("make", OPEN, ids=lambda f: f.__name__)
def test_a_log_that_is_not_complete_accuses_nobody_and_that_is_said(logs, make):
    why = make(logs)
    a, b = logs.reports()
    wrong, unsettled = auditor.compare_logs(a, b)
    assert wrong == []
    assert any(why in text for text in unsettled), unsettled


def test_what_a_complete_log_lacks_is_a_contradiction(logs):
    """n0 stopped in order and did not write down what it signed and n1 has."""
    run_of_two(logs, 2)
    logs.received(1, message(5.0, 2))
    wrong, unsettled = auditor.compare_logs(*logs.reports())
    assert wrong == [
        "1 message that n1 received from n0 are not in n0's log: model of client 0, round 2, exchange 0"
    ]
    assert unsettled == []


def test_a_start_that_fails_excuses_nothing_that_was_signed_long_before(logs):
    """Of round 2 a log that was signed in round 11 is complete, however its node ended."""
    run_of_two(logs, 12)
    logs.received(1, message(5.0, 2, client=3))
    logs.open_.pop(0)._lines.close()
    fail_to_start(logs)
    logs.log(0).record_start(ROSTER, inc=2)
    wrong, _ = auditor.compare_logs(*logs.reports())
    assert wrong == [
        "1 message that n1 received from n0 are not in n0's log: model of client 3, round 2, exchange 0"
    ]


# ---------------------------------------------------------------- the command


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["net", "audit", *map(str, arguments)])
    return result.exit_code, result.stdout


def test_the_command_prints_the_proof_as_json(logs, tmp_path):
    two_readers(logs)
    logs.end()
    status, said = run(tmp_path / "n1", tmp_path / "n2")
    assert status == 1
    assert "WRONG  n0 signed two messages for one address, which n1 and n2 received." in said
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    verify_by_hand(json.loads(line))
    assert {one["log"] for one in json.loads(line)["signed"]} == {"n1", "n2"}


def test_the_command_says_with_its_status_that_something_is_open(logs, tmp_path):
    copy_while_it_runs(logs)
    status, said = run(tmp_path / "n0", tmp_path / "n1")
    assert status == 3
    assert "OPEN   3 messages that n1 received from n0" in said
    assert "WRONG" not in said


FORGED = "n0\n\x1b[2Jok     the chain is whole, and signed by n0 [bold red]x[/]"


@pytest.mark.parametrize(
    "where", ["peer", "reason", "node", "run", "to", "code", "members", "text"]
)
def test_a_log_of_somebody_else_prints_no_line_of_its_own(logs, tmp_path, where):
    """Whoever hands in a log writes what it likes into it: the terminal shows none of it as a line or a command."""
    log = logs.log(1)
    words: dict[str, Callable[[], object]] = {
        "peer": lambda: log.write_event("refused", peer=FORGED, code="x"),
        "reason": lambda: log.write_event("missing", peer="n0", reason=FORGED),
        "node": lambda: log.write_event("file", format=1, node=FORGED, run="local", key="00"),
        "run": lambda: log.write_event("file", format=1, node="n1", run=FORGED, key="00"),
        "to": lambda: log.write_event("declined", to=FORGED, reason="gone"),
        "code": lambda: log.write_event("refused", peer="n0", code=FORGED),
        "members": lambda: log.write_event("roster", version=2, members={FORGED: {"key": ""}}),
        "text": lambda: log.write_event(
            "broken", format=1, node="n1", run="local", key="00", text=FORGED
        ),
    }
    words[where]()
    logs.end()
    status, said = run(tmp_path / "n1")
    assert status == 1
    assert "\x1b" not in said
    assert not any(line.startswith("ok") for line in said.splitlines())
