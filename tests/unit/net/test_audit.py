"""The audit log as a node writes it: a chain of hashes, signed, whole after a kill and on a full disk."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from coterie.net import audit, local
from coterie.net.audit import Audit
from coterie.net.identity import encode_public_key
from coterie.net.log import Log
from coterie.net.outbox import Missing, Outbox
from coterie.net.payload import Template
from coterie.net.transport import Delivery, assemble_delivery
from coterie.net.wire import Address, Expectation, seal_parcel

ROSTER, KEYS = local.make_members([[0], [1]])
AT = Address(3, 0, 1)


def log(folder: Path, **options) -> Audit:
    return Audit(
        folder,
        "n0",
        "local",
        encode_public_key(KEYS[0].public_key()),
        local.make_signer(KEYS[0]),
        **options,
    )


def lines(folder: Path) -> list[dict]:
    return [
        json.loads(line)
        for path in audit.list_files(folder)
        for line in path.read_text().splitlines()
    ]


def parcel(sender: int = 0, values: int = 5, at: Address = AT):
    return seal_parcel(
        {"params": torch.zeros(values), "field.count": torch.tensor(7)}, run="local", peer=f"n{sender}", inc=9,
        address=at, schema="", sign=local.make_signer(KEYS[sender]),
    )  # fmt: skip


def delivery() -> Delivery:
    template = Template({"params": (torch.float32, (5,)), "field.count": (torch.int64, ())})
    expect = Expectation("local", "n1", "n0", AT, "", template, lambda signature, data: True)
    found = assemble_delivery(
        expect, [(a, bytes(chunk)) for a, chunk in parcel(1).iterate_chunks()], 0.1
    )
    assert isinstance(found, Delivery)
    return found


def chain(folder: Path) -> None:
    """Every line names the hash of the one before, by a count of its own."""
    before, n = "0" * 64, 0
    for path in audit.list_files(folder):
        for line in path.read_bytes().split(b"\n")[:-1]:
            found = json.loads(line)
            assert (found["n"], found["prev"]) == (n, before)
            before, n = hashlib.sha256(line).hexdigest(), n + 1


def test_every_line_names_the_hash_of_the_one_before(tmp_path):
    with log(tmp_path) as own:
        own.record_start(ROSTER, inc=9)
        own.record_join("n1", ROSTER, version=1)
        own.record_answer("n1", AT, parcel())
        own.record_delivery("n1", AT, delivery())
        own.end_round(3)
    chain(tmp_path)
    events = [line["event"] for line in lines(tmp_path)]
    assert events == [
        "file",
        "start",
        "roster",
        "joined",
        "sent",
        "received",
        "head",
        "stop",
        "head",
    ]
    assert (tmp_path / audit.FILE).stat().st_mode & 0o777 == 0o600


def test_it_says_what_was_sent_and_received_and_holds_no_payload(tmp_path):
    with log(tmp_path) as own:
        assert own.record_answer("n1", AT, sent := parcel())
        own.record_delivery("n1", AT, got := delivery())
    told = {line["event"]: line for line in lines(tmp_path)}
    assert told["sent"]["to"] == "n1"
    assert told["sent"]["bytes"] == len(sent.payload)
    assert told["sent"]["sha256"] == hashlib.sha256(sent.payload).hexdigest()
    assert told["sent"]["tensors"] == told["received"]["tensors"] == ["field.count", "params"]
    assert [told["sent"][name] for name in ("inc", "round", "exchange", "client", "kind")] == [
        9,
        3,
        0,
        1,
        "model",
    ]
    assert told["received"]["from"] == "n1"
    assert (
        bytes.fromhex(told["received"]["signature"]) + told["received"]["manifest"].encode()
        == got.sealed
    )
    assert (
        json.loads(told["received"]["manifest"])["sha256"]
        == hashlib.sha256(parcel(1).payload).hexdigest()
    )


def test_the_end_of_a_round_is_signed_with_the_nodes_key(tmp_path):
    """Checked as somebody would who has the public key and the page about it alone."""
    with log(tmp_path) as own:
        own.end_round(7)
    (line,) = [
        line for line in (tmp_path / audit.FILE).read_bytes().split(b"\n") if b'"round":7' in line
    ][:1]
    text, _, signed = line.partition(b',"signature":"')
    assert signed.endswith(b'"}')
    signature = bytes.fromhex(signed[:-2].decode())
    r, s = (int.from_bytes(part, "big") for part in (signature[:32], signature[32:]))
    KEYS[0].public_key().verify(
        encode_dss_signature(r, s), b"coterie audit 1\n" + text + b"}", ec.ECDSA(hashes.SHA256())
    )


def test_what_happens_again_in_a_round_is_counted(tmp_path):
    """Thousands of questions, refusals and floods add two lines a round each, whoever sends them."""
    with log(tmp_path) as own:
        for number in range(2000):
            own.record_answer("n1", Address(number, 0, 0), Missing("gone"))
            own.record_delivery("n1", AT, Missing("refused:signature", None, f"no {number}"))
            own.record_event(
                "turned_away", "warning", {"reason": "certificate", "text": "x" * 5000, "times": 10}
            )
        own.end_round(3)
        own.record_answer("n1", AT, Missing("gone"))
    found = [
        line
        for line in lines(tmp_path)
        if line["event"] in ("declined", "refused", "turned_away", "again")
    ]
    assert [line["event"] for line in found] == [
        "declined",
        "refused",
        "turned_away",
        *["again"] * 3,
        "declined",
    ]
    assert [line["times"] for line in found if line["event"] == "again"] == [1999, 1999, 19990]
    assert len(found[2]["text"]) == 300
    assert sum(len(json.dumps(line)) for line in found) < 3000


def test_events_of_the_log_are_written_down_whatever_its_level(tmp_path):
    """Refusals and peers that come and go; not what only tells of the run, and no refusal twice."""
    with log(tmp_path) as own:
        said = Log("n0", level="error", stream=open(os.devnull, "w"), also=own.record_event)  # noqa: SIM115
        said("peer_up", peer="n1")
        said("round", seconds=1.0)
        said("pull", level="warning", missing={"1": "timeout"})
        said(
            "refused",
            level="warning",
            peer="n1",
            code="shape",
            text="a model",
            about="of a message",
        )
        said("refused", level="warning", peer="n1", code="head", text="a head")
        said.stream.close()
    assert [(line["event"], line.get("code")) for line in lines(tmp_path)][1:3] == [
        ("peer_up", None),
        ("refused", "head"),
    ]


def test_a_restart_goes_on_with_the_chain(tmp_path):
    for round in range(3):
        with log(tmp_path) as own:
            own.record_start(ROSTER)
            own.end_round(round)
    chain(tmp_path)
    assert [line["event"] for line in lines(tmp_path)].count("file") == 1


def test_half_a_line_of_a_killed_node_is_removed_and_that_is_a_line(tmp_path):
    with log(tmp_path) as own:
        own.record_start(ROSTER)
    path = tmp_path / audit.FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n":5,"time"\0\0')
    with log(tmp_path) as own:
        own.record_start(ROSTER)
    chain(tmp_path)
    assert path.read_bytes().startswith(whole)
    repaired = lines(tmp_path)[len(whole.splitlines())]
    assert (repaired["event"], repaired["bytes"], repaired["cut"]) == (
        "repaired",
        15,
        '{"n":5,"time"\\0\\0',
    )
    assert repaired["sha256"] == hashlib.sha256(b'{"n":5,"time"\0\0').hexdigest()


def test_a_log_whose_end_is_none_is_put_aside_and_a_new_chain_says_so(tmp_path):
    with log(tmp_path) as own:
        own.record_start(ROSTER)
    path = tmp_path / audit.FILE
    damaged = path.read_bytes() + b"something else\n"
    path.write_bytes(damaged)
    with log(tmp_path) as own:
        own.record_start(ROSTER)
    assert (tmp_path / "audit-000001.log").read_bytes() == damaged
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["event"], first["n"], first["prev"]) == ("broken", 0, "0" * 64)
    assert "audit-000001.log" in first["text"]


def test_a_large_file_is_put_aside_and_the_chain_goes_on_in_the_next(tmp_path):
    """Each file begins with whose it is and which roster counts."""
    with log(tmp_path, max_bytes=2500) as own:
        own.record_start(ROSTER)
        for round in range(6):
            own.record_answer("n1", Address(round, 0, 0), parcel(at=Address(round, 0, 0)))
            own.end_round(round)
    names = [path.name for path in audit.list_files(tmp_path)]
    assert names == ["audit-000001.log", "audit-000002.log", "audit.log"]
    chain(tmp_path)
    for path in audit.list_files(tmp_path)[1:]:
        assert [json.loads(line)["event"] for line in path.read_text().splitlines()[:2]] == [
            "file",
            "roster",
        ]


def test_a_kill_between_two_files_loses_nothing(tmp_path):
    with log(tmp_path) as own:
        own.record_start(ROSTER)
    (tmp_path / audit.FILE).rename(tmp_path / "audit-000001.log")
    with log(tmp_path) as own:
        own.record_start(ROSTER)
    chain(tmp_path)


def test_what_cannot_be_written_down_is_not_sent_and_the_round_does_not_end(tmp_path, monkeypatch):
    outbox, given = Outbox(), []
    own = log(tmp_path)
    outbox.permit = own.record_answer
    outbox.publish(AT, parcel())
    outbox.ask("n1", AT, 0, given.append)
    before = (tmp_path / audit.FILE).read_bytes()
    monkeypatch.setattr(
        os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
    )
    outbox.ask("n2", AT, 0, given.append)
    monkeypatch.undo()
    outbox.ask("n3", AT, 0, given.append)  # there is room again, but the log lacks a line
    with pytest.raises(OSError, match="No space left"):
        own.end_round(3)
    own.__exit__(OSError, OSError(), None)
    outbox.close()
    assert [getattr(what, "reason", "") for what in given] == ["", "closing", "closing"]
    assert (tmp_path / audit.FILE).read_bytes() == before
    with log(tmp_path) as own:
        own.record_start(ROSTER)
    chain(tmp_path)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "in order"),
        (SystemExit(143), "a signal"),
        (ValueError("no\nroom"), "ValueError: no\nroom"),
    ],
)
def test_its_last_line_says_why_the_node_ended(tmp_path, error, why):
    try:
        with log(tmp_path):
            if error is not None:
                raise error
    except (SystemExit, ValueError):
        pass
    assert [line.get("why") for line in lines(tmp_path)][-2] == why


def test_a_round_is_on_the_disk_when_it_ends_and_a_new_name_with_its_folder(tmp_path, monkeypatch):
    """A node stores a round after its log: after a power cut no stored round is missing in it."""
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def note_sync(handle: int) -> None:
        state = os.fstat(handle)
        synced.append((state.st_ino, state.st_size))
        sync(handle)

    monkeypatch.setattr(os, "fsync", note_sync)
    with log(tmp_path, max_bytes=600) as own:
        own.end_round(0)
        state = (tmp_path / audit.FILE).stat()
        assert synced == [(state.st_ino, state.st_size)], "the whole file, when the round ends"
        own.write_event("round", text="x" * 700)
        own.end_round(1)
        # The file, then the folder in which it has another name.
        aside = next(path for path in audit.list_files(tmp_path) if path.name != audit.FILE)
        assert [inode for inode, _ in synced[1:]] == [aside.stat().st_ino, tmp_path.stat().st_ino]
        assert synced[1][1] == aside.stat().st_size
