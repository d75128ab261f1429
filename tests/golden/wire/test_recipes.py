"""Hashes, signatures, heads and rosters: stored ones, found again by code that shares nothing with Coterie.

Signatures are verified here by the arithmetic of the curve itself; hashes, rosters and messages are
read by the member in tests/stranger, which was written from docs/reference/wire.md.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from tests.golden.keeping import REWRITES, keep_stored, read_entries, write_entries
from torch import nn

import stranger
from coterie.models.layout import Layout
from coterie.net import head, identity
from coterie.net import roster as rosters
from coterie.net.head import Head
from coterie.net.payload import Refused
from coterie.net.roster import Member, Roster
from coterie.net.wire import canonical_json

FOLDER = Path(__file__).parent
FILE = FOLDER / "recipes.json"
KEY, ORGANIZER = (ec.derive_private_key(number, ec.SECP256R1()) for number in (20240917, 20250101))
DOCUMENT = {
    "b": [1, 1.0, 0.1, 1e-4, 1e-5, 1.5e-05, 1e15, 1e16, 1e22, -0.0, 123456789.125],
    "a": {"é": "ä\U0001f600\u007f", "quote": '"\\/\n\t\u0001', "Z": None, "_": [True, False]},
}
SETTINGS = {"method": "dac", "seed": 0, "method.tau": 30.0, "local.lr": 0.001, "method.eps": 1e-6, "patience": None,
            "dtype": "float32", "metrics": "()", "model.frozen": "0123456789abcdef"}  # fmt: skip


def network() -> nn.Module:
    """A frozen layer, a batch normalization with its counter, and a linear layer, with values that are no draws."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 4)
    module[0].requires_grad_(False)
    return module


def is_same_head(stored: str, fresh: str) -> bool:
    """Whether a stored head is that of today, signed: ECDSA draws a number for each signature."""
    old, new = bytes.fromhex(stored), bytes.fromhex(fresh)
    signed = identity.verify(KEY.public_key(), old[:64], b"coterie head 1\n" + old[64:])
    return signed and old[64:] == new[64:]


def is_same_roster(stored: dict[str, str], fresh: dict[str, str]) -> bool:
    """Whether a stored roster is that of today, signed."""
    text, signature = stored["text"].encode(), bytes.fromhex(stored["sig"])
    signed = identity.verify(ORGANIZER.public_key(), signature, b"coterie roster 1\n" + text)
    return signed and stored["text"] == fresh["text"]


SIGNED: dict[str, Callable[[Any, Any], bool]] = {"head": is_same_head, "roster": is_same_roster}


def write(file: Path = FILE) -> None:
    """Write the recipes that are not those of today."""
    stored, fresh = read_entries(file), make_document()
    kept = keep_stored(stored, fresh, lambda old, new: old == new)
    for name, is_same in SIGNED.items():
        if name in stored and is_same(stored[name], fresh[name]):
            kept[name] = stored[name]
    write_entries(file, kept)


def make_document() -> dict[str, Any]:
    layout, public = Layout(network()), KEY.public_key()
    member = Member(
        "north", "192.0.2.7:7447", (0, 2), identity.encode_public_key(public), "ab" * 32, "2026-12-31T00:00:00+00:00",
        identity.key_fingerprint(public),
    )  # fmt: skip
    roster = Roster(
        "three-hospitals", (member,), 4, version=2, study=head.study_hash(SETTINGS), schema=head.schema_hash(layout),
        issued="2026-11-23T00:00:00+00:00", removed=(1, 3),
    )  # fmt: skip
    text = rosters.dumps(roster).encode()
    made = Head(
        "three-hospitals", "north", 1763856000, "0011223344556677", 3, "running", 1, roster.study, roster.schema, 2,
        1763856123.0, ["south"], SETTINGS,
    ).seal(lambda data: identity.sign(KEY, data))  # fmt: skip
    return {
        "about": "keys, canonical JSON, hashes, a head of north, and a roster, signed by the organizer",
        "key": {"private": 20240917, "public": identity.encode_public_key(public),
                "fingerprint": identity.key_fingerprint(public)},
        "organizer": {"private": 20250101, "public": identity.encode_public_key(ORGANIZER.public_key())},
        "canonical": {"document": DOCUMENT, "bytes": canonical_json(DOCUMENT).decode()},
        "study": {"settings": SETTINGS, "sha256": head.study_hash(SETTINGS)},
        "schema": {
            "slots": [[slot.name, list(slot.shape)] for slot in layout.slots], "dtype": "torch.float32",
            "trainable": layout.trainable, "sha256": head.schema_hash(layout),
            "frozen": {name: {"shape": list(value.shape), "values": value.flatten().tolist()}
                       for name, value in layout.frozen.items()},
            "frozen_sha256": layout.frozen_digest,
        },
        "head": made.hex(),
        "roster": {"text": text.decode(), "sig": identity.sign(ORGANIZER, b"coterie roster 1\n" + text).hex()},
    }  # fmt: skip


if REWRITES:
    write()
RECIPES = read_entries(FILE)
VECTORS = read_entries(FOLDER / "vectors.json")


# ---------------------------------------------------------------- the curve, from its equation


P = 2**256 - 2**224 + 2**192 + 2**96 - 1
B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
Point = tuple[int, int] | None


def added(a: Point, b: Point) -> Point:
    if a is None or b is None:
        return b if a is None else a
    if a[0] == b[0] and (a[1] + b[1]) % P == 0:
        return None
    slope = (
        (3 * a[0] ** 2 - 3) * pow(2 * a[1], -1, P)
        if a == b
        else (b[1] - a[1]) * pow(b[0] - a[0], -1, P)
    )
    x = (slope**2 - a[0] - b[0]) % P
    return x, (slope * (a[0] - x) - a[1]) % P


def times(number: int, point: Point) -> Point:
    out: Point = None
    while number:
        out = added(out, point) if number & 1 else out
        point, number = added(point, point), number >> 1
    return out


def point(text: str) -> tuple[int, int]:
    """The point of a key's text."""
    x = int(text[2:], 16)
    y = pow(x**3 - 3 * x + B, (P + 1) // 4, P)
    return x, y if y % 2 == int(text[:2], 16) % 2 else P - y


def verified(text: str, signature: bytes, data: bytes) -> bool:
    """ECDSA, as FIPS 186 has it."""
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    w = pow(s, -1, N)
    e = int.from_bytes(hashlib.sha256(data).digest(), "big")
    found = added(times(e * w % N, G), times(r * w % N, point(text)))
    return found is not None and found[0] % N == r


def test_keys_are_the_points_of_their_numbers_and_fingerprints_are_of_their_der():
    for owner in ("key", "organizer"):
        told = RECIPES[owner]
        assert times(told["private"], G) == point(told["public"])
    x, y = point(RECIPES["key"]["public"])
    # EC key, P-256, not compressed
    start = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
    der = start + x.to_bytes(32, "big") + y.to_bytes(32, "big")
    assert hashlib.sha256(der).hexdigest() == RECIPES["key"]["fingerprint"]


def test_the_stored_head_and_roster_are_signed_under_their_prefix_alone():
    sealed = bytes.fromhex(RECIPES["head"])
    assert verified(RECIPES["key"]["public"], sealed[:64], b"coterie head 1\n" + sealed[64:])
    assert not verified(
        RECIPES["key"]["public"], sealed[:64], b"coterie manifest 1\n" + sealed[64:]
    )
    roster = RECIPES["roster"]
    text, signature = roster["text"].encode(), bytes.fromhex(roster["sig"])
    assert verified(RECIPES["organizer"]["public"], signature, b"coterie roster 1\n" + text)
    assert not verified(
        RECIPES["organizer"]["public"], signature, b"coterie roster 1\n" + text + b"\n"
    )
    first = bytes.fromhex(VECTORS["accepted"][0]["parts"][0]["attachment"])
    assert verified(VECTORS["public_key"], first[4:68], b"coterie manifest 1\n" + first[68:])


def test_what_coterie_signs_now_holds_by_the_curve():
    signature = identity.sign(KEY, b"coterie head 1\nabc")
    assert verified(RECIPES["key"]["public"], signature, b"coterie head 1\nabc")
    assert not verified(RECIPES["key"]["public"], signature, b"coterie head 1\nabd")


def test_canonical_json_is_what_the_page_says_by_hand():
    """Each rule of the page in one text, typed here and not taken from a program."""
    assert RECIPES["canonical"]["bytes"] == (
        r'{"a":{"Z":null,"_":[true,false],"quote":"\"\\/\n\t\u0001","\u00e9":"\u00e4\ud83d\ude00\u007f"},'
        r'"b":[1,1.0,0.1,0.0001,1e-05,1.5e-05,1000000000000000.0,1e+16,1e+22,-0.0,123456789.125]}'
    )
    assert (
        canonical_json(RECIPES["canonical"]["document"]).decode() == RECIPES["canonical"]["bytes"]
    )


def test_a_stranger_finds_the_stored_hashes():
    study, schema = RECIPES["study"], RECIPES["schema"]
    assert (
        stranger.study_hash(study["settings"])
        == study["sha256"]
        == head.study_hash(study["settings"])
    )
    frozen = {
        name: torch.tensor(told["values"]).reshape(told["shape"]).numpy()
        for name, told in schema["frozen"].items()
    }
    written = b"".join(  # the member in tests/stranger knows no frozen weights
        f"{name} {value.shape} torch.{value.dtype}\n".encode() + value.tobytes()
        for name, value in frozen.items()
    )
    digest = hashlib.sha256(written).hexdigest()
    assert digest == schema["frozen_sha256"]
    assert (
        stranger.schema_hash(schema["slots"], schema["dtype"], schema["trainable"], digest)
        == schema["sha256"]
    )
    assert head.schema_hash(Layout(network())) == schema["sha256"]


def test_the_row_of_a_model_has_the_order_of_the_page():
    """Trained parameters, then statistics, the counter among them; frozen ones are in no row."""
    names = [name for name, _ in RECIPES["schema"]["slots"]]
    assert names == [
        "1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"
    ]  # fmt: skip
    assert list(RECIPES["schema"]["frozen"]) == ["0.weight", "0.bias"]
    assert RECIPES["schema"]["trainable"] == 3 + 3 + 6 + 2


def test_a_stranger_reads_the_stored_roster_and_refuses_a_changed_one():
    text, signature = RECIPES["roster"]["text"].encode(), bytes.fromhex(RECIPES["roster"]["sig"])
    organizer = RECIPES["organizer"]["public"]
    found = stranger.Roster.read(signature, text, organizer)
    assert (found.top["run"], found.top["version"], found.top["removed"]) == (
        "three-hospitals",
        2,
        [1, 3],
    )
    assert found.members["north"]["clients"] == [0, 2]
    assert found.members["north"]["subject"] == RECIPES["key"]["fingerprint"]
    with pytest.raises(stranger.Refused):
        stranger.Roster.read(signature, text.replace(b"version = 2", b"version = 3"), organizer)


@pytest.mark.parametrize(
    "case", [*VECTORS["accepted"], *VECTORS["refused"]], ids=lambda case: case["name"]
)
def test_a_stranger_reads_the_stored_messages_and_refuses_the_wrong_ones_for_the_same_reasons(case):
    size = case["tensors"]["params"]["shape"] if "tensors" in case else [3]
    expected: stranger.Expected = {
        "params": ("F32", tuple(size)), "field.samples": ("F32", ()), "field.seen": ("I64", (2,))
    }  # fmt: skip
    reader = stranger.Reader("south", "three-hospitals", "5" * 64, 4)

    def opened() -> stranger.Tensors:
        parts = [
            (bytes.fromhex(part["attachment"]), bytes.fromhex(part["payload"]))
            for part in case["parts"]
        ]
        return reader.open(
            parts, "north", VECTORS["public_key"], stranger.Address("model", 4, 0, 2), expected
        )

    if "code" in case:
        with pytest.raises(stranger.Refused) as caught:
            opened()
        assert caught.value.code == case["code"]
        return
    for name, tensor in opened().items():
        told = case["tensors"][name]
        assert (tensor.tolist(), tensor.dtype.name) == (
            torch.tensor(told["values"]).reshape(told["shape"]).tolist(),
            told["dtype"],
        )


def test_a_head_says_its_time_as_a_float():
    """Also at a whole second: 1763856123.0, which a reader of another language must write so, too."""
    sealed = bytes.fromhex(RECIPES["head"])
    assert b'"time":1763856123.0' in sealed[64:]

    def read(data: bytes) -> Head:
        return head.parse_head(
            data, lambda *_: True, run="three-hospitals", peer="north", nonce="0011223344556677"
        )

    assert read(sealed).time == 1763856123.0
    with pytest.raises(Refused, match="time is not of type"):
        read(sealed.replace(b"1763856123.0", b"1763856123"))


def test_recipes_are_written_again_where_more_than_the_draw_of_a_signature_differs(tmp_path):
    file = tmp_path / "recipes.json"
    write_entries(file, RECIPES)
    before = file.read_bytes()
    write(file)
    assert file.read_bytes() == before
    head, roster = RECIPES["head"], RECIPES["roster"]
    # Another digit of a signature, another text, another hash, and an entry that is missing.
    other = "0" if head[0] != "0" else "1"
    for name, damaged in (
        ("head", other + head[1:]),
        ("roster", {**roster, "text": roster["text"] + "\n"}),
        ("study", {**RECIPES["study"], "sha256": "0" * 64}),
        ("schema", None),
    ):
        write_entries(
            file, {key: value for key, value in {**RECIPES, name: damaged}.items() if value}
        )
        write(file)
        after = read_entries(file)
        assert list(after) == list(RECIPES)
        assert (
            SIGNED[name](after[name], RECIPES[name])
            if name in SIGNED
            else after[name] == RECIPES[name]
        )
        assert {**after, name: RECIPES[name]} == RECIPES, "all others stay"
