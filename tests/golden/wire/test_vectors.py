"""Stored messages, so that a client in another language can be checked against them; see docs/reference/wire.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from tests.golden.keeping import REWRITES, read_entries, write_entries

from coterie.net import identity
from coterie.net.payload import Refused, Template
from coterie.net.wire import Address, Assembler, Expectation, Parcel, canonical_json, seal_parcel

FILE = Path(__file__).with_name("vectors.json")
KEY = ec.derive_private_key(20240917, ec.SECP256R1())
SHAPES = {
    "params": torch.zeros(3),
    "field.samples": torch.tensor(0.0),
    "field.seen": torch.zeros(2, dtype=torch.int64),
}
TYPES = {torch.float32: "float32", torch.int64: "int64"}


def sign(data: bytes) -> bytes:
    return identity.sign(KEY, data)


def parts(parcel: Parcel) -> list[dict]:
    return [
        {"attachment": attachment.hex(), "payload": bytes(chunk).hex()}
        for attachment, chunk in parcel.iterate_chunks()
    ]


def cut_signatures(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of the document without the signatures of its messages: 64 bytes behind the length."""
    out = json.loads(json.dumps(document))
    for case in out["accepted"] + out["refused"]:
        attachment = case["parts"][0]["attachment"]
        case["parts"][0]["attachment"] = attachment[:8] + attachment[8 + 128 :]
    return out


def is_signed(case: dict[str, Any]) -> bool:
    """Whether the signature of a message is one of its manifest."""
    attachment = bytes.fromhex(case["parts"][0]["attachment"])
    return identity.verify(
        KEY.public_key(), attachment[4:68], b"coterie manifest 1\n" + attachment[68:]
    )


def is_same(stored: dict[str, Any], fresh: dict[str, Any]) -> bool:
    """Whether stored messages are those of today: ECDSA draws a number for each signature."""
    if cut_signatures(stored) != cut_signatures(fresh):
        return False
    pairs = zip(
        stored["accepted"] + stored["refused"], fresh["accepted"] + fresh["refused"], strict=True
    )
    return all(is_signed(old) == is_signed(new) for old, new in pairs)


def write(file: Path = FILE) -> None:
    """Write the messages, unless the stored ones differ from them in signatures alone."""
    stored, fresh = read_entries(file), make_document()
    if not stored or not is_same(stored, fresh):
        write_entries(file, fresh)


def make_document() -> dict[str, Any]:
    tensors = {
        "params": torch.tensor([0.5, -1.25, 3.0]),
        "field.samples": torch.tensor(12.0),
        "field.seen": torch.tensor([1, -2]),
    }
    options = {
        "run": "three-hospitals",
        "peer": "north",
        "inc": 1,
        "address": Address(4, 0, 2),
        "schema": "5" * 64,
    }
    plain = seal_parcel(tensors, sign=sign, **options)
    half = seal_parcel(tensors, sign=sign, half=frozenset({"params"}), **options)
    long = {**tensors, "params": torch.arange(600.0)}
    chunked = seal_parcel(long, sign=sign, chunk=1024, **options)
    accepted = [
        ("float32", plain, tensors),
        ("float16 on the wire", half, tensors),
        ("three chunks", chunked, long),
    ]

    def damaged(change) -> Parcel:
        text = canonical_json({**json.loads(plain.manifest), **change})
        return Parcel(text, sign(b"coterie manifest 1\n" + text), plain.payload)

    refused = [
        ("an earlier round's message, replayed", damaged({"round": 3}), "address"),
        ("another run's", damaged({"run": "two-banks"}), "run"),
        ("under another's name", damaged({"peer": "south"}), "sender"),
        ("another model", damaged({"schema": "6" * 64}), "schema"),
        ("a later format", damaged({"v": 2}), "version"),
        ("a digest that does not fit", damaged({"sha256": "0" * 64}), "digest"),
        (
            "a signature that does not fit",
            Parcel(plain.manifest, bytes(64), plain.payload),
            "signature",
        ),
    ]
    return {
        "about": "messages of run three-hospitals, from north (client 2) to any member, round 4, exchange 0",
        "public_key": identity.encode_public_key(KEY.public_key()),
        "accepted": [
            {"name": name, "parts": parts(parcel),
             "tensors": {n: {"dtype": TYPES[t.dtype], "shape": list(t.shape), "values": t.flatten().tolist()}
                         for n, t in values.items()}}
            for name, parcel, values in accepted
        ],
        "refused": [{"name": name, "parts": parts(parcel), "code": code} for name, parcel, code in refused],
    }  # fmt: skip


if REWRITES:
    write()
VECTORS = json.loads(FILE.read_text())
assert VECTORS["accepted"]
assert VECTORS["refused"]


def opened(case: dict) -> dict[str, torch.Tensor]:
    key = identity.decode_public_key(VECTORS["public_key"])
    shapes = dict(SHAPES)
    if "tensors" in case:
        shapes["params"] = torch.zeros(case["tensors"]["params"]["shape"])
    expect = Expectation(
        "three-hospitals", "north", "south", Address(4, 0, 2), "5" * 64,
        Template.of(shapes, halved=frozenset({"params"})), lambda s, data: identity.verify(key, s, data),
    )  # fmt: skip
    assembler = Assembler(expect)
    for part in case["parts"]:
        assembler.feed(bytes.fromhex(part["attachment"]), bytes.fromhex(part["payload"]))
    return assembler.finish()


@pytest.mark.parametrize("case", VECTORS["accepted"], ids=lambda case: case["name"])
def test_stored_messages_are_read_as_they_were_written(case):
    found = opened(case)
    assert found.keys() == case["tensors"].keys()
    for name, tensor in found.items():
        told = case["tensors"][name]
        assert tensor.tolist() == torch.tensor(told["values"]).reshape(told["shape"]).tolist()
        assert TYPES[tensor.dtype] == told["dtype"]


@pytest.mark.parametrize("case", VECTORS["refused"], ids=lambda case: case["name"])
def test_stored_messages_that_are_wrong_are_refused_for_the_stored_reason(case):
    with pytest.raises(Refused) as caught:
        opened(case)
    assert caught.value.code == case["code"]


def test_messages_are_written_again_where_more_than_the_draw_of_a_signature_differs(tmp_path):
    file = tmp_path / "vectors.json"
    write_entries(file, VECTORS)
    before = file.read_bytes()
    write(file)
    assert file.read_bytes() == before

    def damage(change) -> None:
        document = json.loads(before)
        change(document)
        write_entries(file, document)
        write(file)
        assert is_same(read_entries(file), VECTORS)
        assert read_entries(file) != VECTORS, "all messages are signed again"

    def flip_signature(document) -> None:
        part = document["accepted"][1]["parts"][0]
        first = "0" if part["attachment"][8] != "0" else "1"
        part["attachment"] = part["attachment"][:8] + first + part["attachment"][9:]

    damage(lambda document: document["refused"][0].update(code="run"))
    damage(lambda document: document["accepted"].pop())
    damage(flip_signature)
