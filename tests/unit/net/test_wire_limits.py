"""Limits and times of the protocol are those that its page tells other programs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coterie.net import audit, catchup, exchange, head, outbox, payload, post, wire
from coterie.net import grpc_server as grpc
from coterie.net.node import Patience
from coterie.net.nodefile import NetworkSettings

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "reference/wire.md").read_text("utf-8")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def look_up(row: str) -> str:
    """Return the last cell of the row of a table whose first cell begins with a text, or has it in brackets."""
    rows = [one for one in PAGE.splitlines() if one.startswith("| ")]
    (line,) = [
        one for one in rows if one.startswith(f"| {row}") or f"({row})" in one.split(" | ")[0]
    ]
    return line.strip("| ").split(" | ", 1)[1]


def numbers(row: str) -> list[int]:
    return [int(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?<!,)", look_up(row))]


def sizes(text: str) -> list[int]:
    return [int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+) (bytes|[KMG]iB)", text)]


def test_sizes_of_what_is_sent_are_bounded_as_the_page_says():
    own = [wire.MAX_MANIFEST, payload.MAX_HEADER, wire.MAX_HEAD, wire.MAX_ROSTER]
    assert sizes(look_up("manifest; header; head; roster")) == own
    assert sizes(look_up("a `reply`; a `cohort`")) == [exchange.MAX_REPLY, exchange._MAX_COHORT]
    assert numbers("bytes of a question") == [grpc.MAX_QUESTION]
    assert numbers("bytes of a call that are taken") == [grpc.LOOKAHEAD]
    assert numbers("bytes of one message of an answer") == [grpc.MAX_FRAME]
    # A chunk with what belongs to it, and a little room.
    assert grpc.MAX_FRAME >= wire.CHUNK + wire.MAX_MANIFEST + wire.SIGNATURE
    assert numbers("bytes of a head, of a roster") == [wire.MAX_HEAD, wire.MAX_ROSTER]
    assert numbers("bytes of how a table is read, in a head") == [head._MAX_TABLE]


def test_what_is_kept_and_how_much_is_open_is_what_the_page_says():
    assert numbers("bytes of standing messages") == [outbox.KEEP_SEALED]
    kept = look_up("messages that a node keeps")
    assert ("last eight rounds" in kept, sizes(kept)) == (True, [outbox.KEEP_BYTES])
    assert outbox.KEEP == 8
    assert numbers("open questions of an asker at a node") == [outbox.Outbox.PER_ASKER]
    assert numbers("calls that one member may have open") == [grpc.CALLS, outbox.Outbox.PER_ASKER]
    assert "up to four questions for messages open at each member" in PAGE
    assert post._OF_A_MEMBER == 4
    assert "others trained at most ten times as fast as it does itself" in " ".join(PAGE.split())
    assert catchup.MAX_SPEED_RATIO == 10


def test_times_are_what_the_page_says():
    """Those of node.toml are its defaults, which reach the node."""
    given = NetworkSettings()
    assert numbers("`linger`") == [given.linger]
    assert numbers("`start`") == [given.start]
    assert numbers("`server_wait`") == [given.server_wait]
    assert numbers("`lease`") == [given.lease]
    assert numbers("`slow`")[0] == given.slow
    assert numbers("wait for a head or a roster") == [Patience().ask]
    assert float(look_up("between two questions for heads")) == Patience().poll
    assert numbers("seconds in which a question must have come")[0] == grpc._LISTEN
    assert given.patience == Patience()
    endless = replace(given, start="unlimited", linger="unlimited").patience
    assert endless == Patience(start=float("inf"), linger=float("inf"))


def test_an_audit_log_goes_on_in_another_file_above_the_size_of_its_page():
    (said,) = re.findall(
        r"A file of more than (\d+ MiB) is put aside", (DOCS / "how-to/audit-log.md").read_text()
    )
    assert sizes(said) == [audit.MAX_BYTES]


MANIFEST = {
    "v": 1, "run": "run", "peer": "n1", "inc": 1, "round": 3, "exchange": 0, "client": 2, "kind": "model", "to": "",
    "codec": "safetensors", "bytes": 10, "chunk": 1024, "sha256": "0" * 64, "schema": "s",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("inc", 0, 2**53 - 1), ("round", -1, 2**31 - 1), ("exchange", 0, 65535), ("client", -1, 2**31 - 1),
        ("bytes", 0, 2**40 - 1), ("chunk", 1024, 262144),
    ],
)  # fmt: skip
def test_numbers_of_a_manifest_reach_to_both_ends_of_their_range_and_no_further(field, least, most):
    for value in (least, most):
        assert getattr(parse(**{field: value}), field) == value
    for value in (least - 1, most + 1):
        with pytest.raises(wire.Refused, match=f"{field} is out of range"):
            parse(**{field: value})
    # 1.0 and true are no integers.
    for value in (float(most), True, str(most), None):
        with pytest.raises(wire.Refused, match=f"{field} is missing or not of type"):
            parse(**{field: value})


def parse(**changed: object) -> wire.Manifest:
    return wire.parse_manifest(json.dumps({**MANIFEST, **changed}).encode())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "gossip"}, "kind is out of range"), ({"codec": "pickle"}, "codec is out of range"),
        ({"sha256": "0" * 63}, "sha256 is out of range"), ({"sha256": "G" * 64}, "sha256 is out of range"),
        ({"v": 2}, "version 2; expected 1"), ({"more": 1}, "it has keys that no manifest has"),
    ],
)  # fmt: skip
def test_a_manifest_of_another_form_is_refused(changed, said):
    with pytest.raises(wire.Refused, match=said):
        parse(**changed)


def test_a_manifest_is_as_long_as_it_may_be_and_no_longer():
    room = wire.MAX_MANIFEST - len(json.dumps(MANIFEST).encode())
    assert parse(run="r" * (room + 3)).run == "r" * (room + 3)
    with pytest.raises(wire.Refused, match="4097 bytes; expected at most 4096"):
        parse(run="r" * (room + 4))


def header(shape: object, offsets: object = (0, 8)) -> bytearray:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": list(offsets)}
    text = json.dumps({"params": entry}).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + bytes(8))


@pytest.mark.parametrize(
    ("shape", "offsets", "fine"),
    [
        ([1] * 8, (0, 4), True), ([1] * 9, (0, 4), False), ([2**40 - 1], (0, 8), True), ([2**40], (0, 8), False),
        ([-1], (0, 8), False), ([0], (0, 0), True), ([1.0], (0, 8), False), ([True], (0, 8), False),
        ([2], (0, 2**40), False), ([2], (0, 4, 8), False), ([2], (0,), False), ({"0": 1}, (0, 8), False),
    ],
)  # fmt: skip
def test_shapes_and_offsets_are_natural_numbers_of_at_most_eight_axes(shape, offsets, fine):
    if fine:
        found, end = payload._decode_header(header(shape, offsets))
        assert found["params"] == (torch.float32, tuple(shape), *offsets)
        assert end == len(header(shape, offsets)) - 8
        return
    with pytest.raises(wire.Refused, match="shape or offsets that are not natural numbers"):
        payload._decode_header(header(shape, offsets))
