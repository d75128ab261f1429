"""What the auditor finds: every kind of change to a log, and logs that contradict each other."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError
from coterie.net import audit, auditor, identity, local
from coterie.net import roster as rosters
from coterie.net.audit import Audit
from coterie.net.identity import encode_public_key
from coterie.net.outbox import Missing
from coterie.net.payload import Template
from coterie.net.transport import Delivery, assemble_delivery
from coterie.net.wire import Address, Expectation, Parcel, parse_manifest, seal_parcel

ROSTER, KEYS = local.make_members([[0], [1]])


def parcel(sender: int, round: int) -> Parcel:
    return seal_parcel(
        {"params": torch.full((4,), float(round))}, run="local", peer=f"n{sender}", inc=1,
        address=Address(round, 0, sender), schema="", sign=local.make_signer(KEYS[sender]),
    )  # fmt: skip


def delivered(sent: Parcel, sender: int, round: int) -> Delivery:
    template = Template({"params": (torch.float32, (4,))})
    at = Address(round, 0, sender)
    expect = Expectation(
        "local", f"n{sender}", f"n{1 - sender}", at, "", template, lambda signature, data: True
    )
    found = assemble_delivery(
        expect, [(a, bytes(chunk)) for a, chunk in sent.iterate_chunks()], 0.1
    )
    assert isinstance(found, Delivery)
    return found


def opened(
    folder: Path, node: int, key: ec.EllipticCurvePrivateKey | None = None, **options
) -> Audit:
    key = key or KEYS[node]
    return Audit(
        folder,
        f"n{node}",
        "local",
        encode_public_key(key.public_key()),
        local.make_signer(key),
        **options,
    )


def written(folder: Path, rounds: int = 3, **options) -> list[Path]:
    """Two nodes that send each other a model in every round; the folders of their logs."""
    folders = [folder / "n0", folder / "n1"]
    with opened(folders[0], 0, **options) as a, opened(folders[1], 1, **options) as b:
        for node, peer in ((a, 1), (b, 0)):
            node.record_start(ROSTER, inc=1)
            node.record_join(f"n{peer}", ROSTER, inc=1)
        for round in range(rounds):
            for node, other, sender in ((a, b, 0), (b, a, 1)):
                message = parcel(sender, round)
                assert node.record_answer(f"n{1 - sender}", Address(round, 0, sender), message)
                other.record_delivery(
                    f"n{sender}", Address(round, 0, sender), delivered(message, sender, round)
                )
            a.end_round(round)
            b.end_round(round)
    return folders


@pytest.fixture
def logs(tmp_path):
    return written(tmp_path)


def rewritten(folder: Path, change: Callable[[list[dict]], None]) -> None:
    """Change the lines of a log, and make the chain fit again, as somebody would who has no key."""
    path = folder / audit.FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    before, out = audit.NOTHING, []
    for number, line in enumerate(lines):
        text = json.dumps({**line, "n": number, "prev": before}, separators=(",", ":"))
        before = hashlib.sha256(text.encode()).hexdigest()
        out.append(text)
    path.write_text("\n".join(out) + "\n")


def test_an_honest_log_is_whole_and_summed_up(logs):
    found = auditor.check_log(logs[0], [ROSTER])
    assert found.problems == []
    assert (found.node, found.run, found.rosters, found.confirmed) == ("n0", "local", [1], {1})
    assert (found.lines, found.heads, found.unsigned, found.starts, found.unended) == (
        15,
        4,
        0,
        1,
        0,
    )
    of = found.traffic["n1"]
    assert {key[1]: sha for key, sha in of.sent.items()} == {
        round: hashlib.sha256(parcel(0, round).payload).hexdigest() for round in range(3)
    }
    assert of.sent_bytes == of.received_bytes == 3 * len(parcel(0, 0).payload)
    assert len(of.received) == 3


def test_any_changed_byte_is_found(logs):
    """Wherever it is: the line does not follow, or the last signature does not fit."""
    path = logs[0] / audit.FILE
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert auditor.check_log(logs[0]).problems, place


@pytest.mark.parametrize("number", range(1, 14))
def test_a_line_that_was_taken_out_is_found_and_named(logs, number):
    path = logs[0] / audit.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
    assert (
        auditor.check_log(logs[0])
        .problems[0]
        .startswith(f"audit.log line {number + 1}: it does not follow")
    )


def test_a_chain_that_was_made_to_fit_again_lacks_the_nodes_signature(logs):
    """A refusal is taken out, a digest is changed, a line is added: each time all hashes are computed anew."""
    whole = (logs[0] / audit.FILE).read_bytes()
    changes: list[Callable[[list[dict]], object]] = [
        lambda lines: lines.pop(4),
        lambda lines: next(line for line in lines if line["event"] == "sent").update(
            sha256="0" * 64
        ),
        lambda lines: lines.insert(4, {**lines[4], "event": "joined", "peer": "n9", "key": ""}),
    ]
    for change in changes:
        rewritten(logs[0], change)
        assert "the signature is not that of n0's key" in auditor.check_log(logs[0]).problems[0]
        (logs[0] / audit.FILE).write_bytes(whole)


def test_a_chain_written_anew_with_another_key_is_not_that_of_the_organizers_roster(tmp_path):
    """Without the roster, the log's own word is all there is."""
    other = ec.generate_private_key(ec.SECP256R1())
    mine = replace(ROSTER.members[0], key=encode_public_key(other.public_key()))
    forged = replace(ROSTER, members=(mine, ROSTER.members[1]))
    with opened(tmp_path, 0, other) as log:
        log.record_start(forged, inc=1)
        log.end_round(0)
    assert auditor.check_log(tmp_path).problems == []
    assert (
        "not those of version 1 of the organizer's roster"
        in auditor.check_log(tmp_path, [ROSTER]).problems[0]
    )
    with opened(tmp_path / "2", 0, other) as log:
        log.record_start(replace(forged, version=7), inc=1)
    assert auditor.check_log(tmp_path / "2", [ROSTER]).problems == [
        "it has versions 7 of the roster; given was 1"
    ]


STUDY = "study-" + "0a" * 16
"""A run of a standing federation, whose rosters name the federation alone."""


def studied(folder: Path, node: int, *values: float, roster: rosters.Roster = ROSTER) -> Path:
    """The log of a member of a study, who got messages of n0 for one address, of these values."""
    own = encode_public_key(KEYS[node].public_key())
    with Audit(folder / f"n{node}", f"n{node}", STUDY, own, local.make_signer(KEYS[node])) as log:
        log.record_start(replace(roster, run=STUDY, study="s" * 64), inc=1)
        for value in values:
            sealed = seal_parcel(
                {"params": torch.full((4,), value)}, run=STUDY, peer="n0", inc=1,
                address=Address(0, 0, 0), schema="", sign=local.make_signer(KEYS[0]),
            )  # fmt: skip
            manifest = parse_manifest(sealed.manifest)
            found = Delivery(
                manifest, {"params": torch.zeros(4)}, 1, 0.1, sealed.signature + sealed.manifest
            )
            log.record_delivery("n0", Address(0, 0, 0), found)
        log.end_round(0)
    return folder / f"n{node}"


def test_the_log_of_a_study_is_checked_with_the_roster_of_its_federation(tmp_path):
    """The members of a study are some of the federation's, with the same keys."""
    more, _ = local.make_members([[0], [1], [2]])
    federation = replace(
        ROSTER, run="hearts", members=(*ROSTER.members, more.members[2]), population=3
    )
    found = auditor.check_log(studied(tmp_path / "honest", 1, 1.0), [federation])
    assert (found.problems, found.confirmed) == ([], {1})
    for wrong, said in (
        (replace(federation, members=federation.members[1:], removed=(0,)), "organizer's roster"),
        (replace(federation, members=(more.members[0], *federation.members[1:])), "organizer's"),
        (replace(federation, version=2), "it has versions 1 of the roster; given was 2"),
        # The roster of one run says nothing of another.
        (replace(federation, study="s" * 64), f"it is of run {STUDY}; the roster"),
    ):
        assert said in auditor.check_log(tmp_path / "honest/n1", [wrong]).problems[0]
    other = replace(federation, run="lungs", version=1, study="s" * 64)
    assert auditor.check_log(tmp_path / "honest/n1", [federation, other]).problems == []


def test_two_messages_of_a_study_are_proved_with_the_roster_of_its_federation(tmp_path):
    federation = replace(ROSTER, run="hearts")
    reports = [auditor.check_log(studied(tmp_path, 1, 1.0, 2.0), [federation])]
    (proof,) = auditor.find_equivocations(reports, [federation])
    assert (proof.run, proof.member) == (STUDY, "n0")
    more, _ = local.make_members([[0], [1]])
    assert auditor.find_equivocations(reports, [replace(more, run="hearts")]) == []


def test_the_end_of_a_log_can_be_taken_away_unseen_but_not_from_the_others(logs):
    """What no chain can show: the others' logs do."""
    path = logs[0] / audit.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7]))
    a, b = map(auditor.check_log, logs)
    assert a.problems == []
    assert auditor.compare_logs(a, b) == (
        [],
        [
            "2 messages that n1 received from n0 are not in n0's log, which ends after round 0: it goes on, or "
            "was cut off; ask for the rest: model of client 0, round 1, exchange 0"
        ],
    )


def test_honest_logs_agree_and_a_message_that_did_not_arrive_is_no_contradiction(logs):
    with opened(logs[0], 0) as log:
        log.record_answer("n1", Address(9, 0, 0), parcel(0, 9))
    a, b = map(auditor.check_log, logs)
    assert auditor.compare_logs(a, b) == ([], [])
    assert auditor.count_lost(a, b) == 1


def test_a_message_that_its_sender_wrote_down_otherwise_is_found(logs):
    """The sender has its own key, and signs a log that says something else; the reader has its signed manifest."""
    folder = logs[0].with_name("anew")
    with opened(folder, 0) as log:
        log.record_start(ROSTER, inc=1)
        for round in range(3):
            log.record_answer(
                "n1",
                Address(round, 0, 0),
                replace(parcel(0, round), manifest=parcel(0, 1).manifest),
            )
            log.record_delivery("n1", Address(round, 0, 1), delivered(parcel(1, round), 1, round))
    found, _ = auditor.compare_logs(auditor.check_log(folder), auditor.check_log(logs[1]))
    assert "2 messages that n1 received from n0 have another digest in n0's log" in found[0]


def test_nobody_can_say_that_a_member_sent_what_it_did_not_sign(tmp_path):
    """n0 has its own key alone: it signs a manifest in n1's name."""
    fake = seal_parcel(
        {"params": torch.zeros(4)}, run="local", peer="n1", inc=1, address=Address(0, 0, 1), schema="",
        sign=local.make_signer(KEYS[0]),
    )  # fmt: skip
    with opened(tmp_path, 0) as log:
        log.record_start(ROSTER, inc=1)
        log.record_delivery("n1", Address(0, 0, 1), delivered(fake, 1, 0))
    assert "is not signed by n1's key of the roster" in auditor.check_log(tmp_path).problems[0]


def test_a_member_with_a_new_key_is_believed_from_its_roster_on(tmp_path):
    new = ec.generate_private_key(ec.SECP256R1())
    second = replace(
        ROSTER,
        version=2,
        members=(
            ROSTER.members[0],
            replace(ROSTER.members[1], key=encode_public_key(new.public_key())),
        ),
    )
    message = seal_parcel(
        {"params": torch.zeros(4)}, run="local", peer="n1", inc=2, address=Address(0, 0, 1), schema="",
        sign=local.make_signer(new),
    )  # fmt: skip
    for name, versions in (("good", (ROSTER, second)), ("bad", (ROSTER,))):
        with opened(tmp_path / name, 0) as log:
            log.record_start(ROSTER, inc=1)
            for one in versions[1:]:
                log.record_roster(one, rekeyed=["n1"])
            log.record_delivery("n1", Address(0, 0, 1), delivered(message, 1, 0))
    assert auditor.check_log(tmp_path / "good", [ROSTER, second]).problems == []
    assert auditor.check_log(tmp_path / "good", [ROSTER, second]).confirmed == {1, 2}
    assert "not signed by n1's key" in auditor.check_log(tmp_path / "bad").problems[0]


@pytest.fixture
def large(monkeypatch) -> None:
    """Rosters of two members count as large."""
    monkeypatch.setattr(audit, "MAX_LISTED", 1)


def read_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / audit.FILE).read_text().splitlines()]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("max_bytes", [1 << 20, 100])
@pytest.mark.parametrize("given", [[], [ROSTER]])
def test_of_a_large_roster_a_log_has_the_digest_and_the_members_that_it_met(
    tmp_path, max_bytes, given
):
    folders = written(tmp_path, max_bytes=max_bytes)
    lines = [
        json.loads(line)
        for path in audit.list_files(folders[0])
        for line in path.read_text().splitlines()
    ]
    assert {line["event"] for line in lines} >= {"roster", "member", "received"}
    assert not any("members" in line for line in lines)
    text = json.dumps(
        {m.name: m.key for m in ROSTER.members}, separators=(",", ":"), sort_keys=True
    )
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert {line["digest"] for line in lines if line["event"] == "roster"} == {digest}
    found = [auditor.check_log(folder, given) for folder in folders]
    assert [report.problems for report in found] == [[], []]
    assert found[0].keys == {1: {m.name: m.key for m in ROSTER.members}}
    assert found[0].confirmed == ({1} if given else set())
    assert auditor.compare_logs(*found) == ([], [])


@pytest.mark.usefixtures("large")
def test_a_key_that_is_not_that_of_a_large_roster_is_found(tmp_path):
    """In the line of the member, or in the digest of all."""
    folders = written(tmp_path)
    other = encode_public_key(ec.generate_private_key(ec.SECP256R1()).public_key())

    def give_another_key(lines: list[dict]) -> None:
        for line in lines:
            if line["event"] == "member" and line["peer"] == "n1":
                line["key"] = other

    honest = (folders[0] / audit.FILE).read_bytes()
    rewritten(folders[0], give_another_key)
    assert any("not signed by n1's key" in p for p in auditor.check_log(folders[0]).problems)
    told = auditor.check_log(folders[0], [ROSTER]).problems
    assert any("another key for n1 than this line" in problem for problem in told)
    own = auditor.check_log(folders[0]), auditor.check_log(folders[1])
    assert "have other members or keys in version 1" in auditor.compare_logs(*own)[0][0]

    (folders[0] / audit.FILE).write_bytes(honest)

    def give_another_digest(lines: list[dict]) -> None:
        for line in lines:
            if line["event"] == "roster":
                line["digest"] = "0" * 64

    rewritten(folders[0], give_another_digest)
    told = auditor.check_log(folders[0], [ROSTER]).problems
    assert any("not those of version 1 of the organizer's roster" in problem for problem in told)
    own = auditor.check_log(folders[0]), auditor.check_log(folders[1])
    assert "have other members or keys in version 1" in auditor.compare_logs(*own)[0][0]


@pytest.mark.usefixtures("large")
def test_a_member_that_is_asked_without_having_been_met_is_named_before_its_message(tmp_path):
    with opened(tmp_path, 0) as log:
        log.record_start(ROSTER, inc=1)
        log.record_delivery("n1", Address(0, 0, 1), delivered(parcel(1, 0), 1, 0))
    named = [(line["event"], line.get("peer")) for line in read_lines(tmp_path)]
    assert named[1:5] == [("start", None), ("roster", None), ("member", "n0"), ("member", "n1")]
    assert auditor.check_log(tmp_path).problems == []


def test_a_roster_of_ten_thousand_takes_a_short_line(tmp_path):
    first = ROSTER.members[0]
    some = [
        replace(
            first, name=f"m{i}", address=f"127.9.{i // 250}.{i % 250 + 1}:1", clients=(i,), key=""
        )
        for i in range(2, 10_000)
    ]
    who = replace(ROSTER, members=(*ROSTER.members, *some), population=10_000)
    with opened(tmp_path, 0) as log:
        log.record_start(who, inc=1)
    lines = (tmp_path / audit.FILE).read_text().splitlines()
    (roster,) = [line for line in map(json.loads, lines) if line["event"] == "roster"]
    assert roster["count"] == 10_000
    assert max(map(len, lines)) < 600


def test_what_was_refused_is_summed_up_by_member_and_reason(tmp_path):
    with opened(tmp_path, 0) as log:
        log.record_start(ROSTER, inc=1)
        for _ in range(3):
            log.record_delivery(
                "n1", Address(0, 0, 1), Missing("refused:not_finite", None, "params")
            )
            log.record_delivery("n1", Address(0, 0, 1), Missing("timeout"))
            log.record_answer("n1", Address(0, 0, 0), Missing("gone"))
            log.record_event("turned_away", "warning", {"reason": "certificate", "times": 2})
            log.record_event("not_sent", "warning", {"peer": "n1", "text": "closed"})
            # That its certificate ends soon refuses nothing of it.
            log.record_event("certificate", "warning", {"peer": "n1", "days": 3.0})
        log.record_rejections(0, [(0, 1, "n1", 4)])
        log.end_round(0)
    found = auditor.check_log(tmp_path)
    assert found.problems == []
    assert found.traffic["n1"].refused == {"not_finite": 3, "rejected": 1, "not_sent": 3}
    assert found.traffic["n1"].missing == {"timeout": 3}
    assert found.traffic["n1"].declined == {"gone": 3}
    assert found.traffic[""].refused == {"certificate": 6}


def test_starts_without_an_end_and_torn_lines_are_counted(logs):
    path = logs[0] / audit.FILE
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]) + b'{"half')
    assert "it is torn" in auditor.check_log(logs[0]).problems[0]
    with opened(logs[0], 0) as log:
        log.record_start(ROSTER, inc=2)
    found = auditor.check_log(logs[0])
    assert found.problems == []
    assert (found.starts, found.unended, found.repaired) == (2, 1, 1)


def test_the_files_of_a_chain_are_read_as_one_and_one_alone_says_where_it_begins(tmp_path):
    folder = written(tmp_path, rounds=9, max_bytes=4000)[0]
    assert len(audit.list_files(folder)) > 2
    assert auditor.check_log(folder, [ROSTER]).problems == []
    assert auditor.check_log(folder / audit.FILE).lines == auditor.check_log(folder).lines
    second = audit.list_files(folder)[1]
    alone = auditor.check_log(second, [ROSTER])
    assert alone.problems == []
    assert alone.begins == len((folder / "audit-000001.log").read_text().splitlines())
    second.unlink()
    assert "it does not follow the line before" in auditor.check_log(folder).problems[0]


NO_LOGS = (
    b"",
    b"\n",
    b"[]\n",
    b"{}\n",
    b'{"n":0}\n',
    b"\xff\xfe\n",
    b"[" * 9999 + b"\n",
    b'{"n":1e999}\n',
    b"x" * (5 << 20),
)


@pytest.mark.parametrize("content", NO_LOGS, ids=range(len(NO_LOGS)))
def test_what_is_no_log_is_said_to_be_none(tmp_path, content):
    (tmp_path / audit.FILE).write_bytes(content)
    assert auditor.check_log(tmp_path).problems


FIELDS = (
    "n",
    "prev",
    "event",
    "time",
    "node",
    "members",
    "manifest",
    "signature",
    "version",
    "to",
    "sha256",
)


@pytest.mark.full
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, -1, "x", [], {}, 1e308, {"n1": 3}], ids=str)
def test_no_value_of_a_field_makes_it_fall_over(logs, field, value):
    def change(lines):
        for line in lines:
            line.update({field: value} if field in line else {})

    rewritten(logs[0], change)
    if field in ("n", "prev"):
        path = logs[0] / audit.FILE
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, field: value}) + "\n" for line in lines))
    assert auditor.check_log(logs[0]).problems


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["net", "audit", *map(str, arguments)])
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_a_log_that_nobody_signed_yet_is_open_and_no_accusation(tmp_path):
    """A node signs at the end of each round; one that was killed while it waited has signed nothing."""
    with opened(tmp_path / "n0", 0) as log:
        log.record_start(ROSTER, inc=1)
    # Closing writes a line in order; a kill leaves the log before it.
    lines = (tmp_path / "n0" / audit.FILE).read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"event":"stop"' not in line and b'"head"' not in line]
    (tmp_path / "n0" / audit.FILE).write_bytes(b"".join(kept))
    status, said = run(tmp_path / "n0")
    assert "OPEN   no line of it is signed yet: n0 ended before its first round did" in said
    assert "WRONG" not in said
    assert status == 3


def test_the_command_says_what_is_in_logs_and_whether_they_agree(logs, tmp_path):
    status, said = run(*logs)
    assert status == 0
    assert max(map(len, said.replace(str(tmp_path), "").splitlines())) <= 80
    assert "ok     n0 and n1 agree on what they sent each other" in said
    assert said.count("the chain is whole, and signed by") == 2
    assert "see --roster" in said
    identity.make_authority(tmp_path, "local")
    rosters.write_signed(tmp_path / "roster.toml", ROSTER, tmp_path / "organizer.key")
    status, said = run(
        *logs, "--roster", tmp_path / "roster.toml", "--organizer", tmp_path / "organizer.pub"
    )
    assert status == 0
    assert said.count("keys are those of the organizer's version 1") == 2
    path = logs[0] / audit.FILE
    path.write_bytes(path.read_bytes().replace(b'"joined"', b'"jolned"'))
    status, said = run(*logs)
    assert status == 1
    assert "WRONG  audit.log line 5: it does not follow" in said
    assert run(tmp_path)[0] == 2
    assert "holds no audit.log" in run(tmp_path)[1]


def test_logs_of_two_runs_are_not_compared(logs, tmp_path):
    assert "are not compared" in " ".join(run(logs[0], logs[0])[1].split())
