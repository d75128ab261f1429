"""The wire format: round trips, and everything that must be refused."""

import json
import os
import random
from collections import Counter
from dataclasses import replace

import hostile
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from coterie.net import identity
from coterie.net.payload import Refused, Template, decode, encode
from coterie.net.wire import Address, Assembler, Expectation, Parcel, canonical_json, seal_parcel

KEY = ec.derive_private_key(7, ec.SECP256R1())
STRANGER = ec.derive_private_key(8, ec.SECP256R1())
AT = Address(3, 0, 1)
TENSORS = {
    "params": torch.arange(5.0),
    "field.samples": torch.tensor(12.0),
    "field.seen": torch.tensor([1, -2]),
}


def sealed(tensors=TENSORS, key=KEY, **changes) -> Parcel:
    options = {"run": "r", "peer": "a", "inc": 2, "address": AT, "schema": "5" * 64, **changes}
    return seal_parcel(tensors, sign=lambda data: identity.sign(key, data), **options)


def expected(tensors=TENSORS, **changes) -> Expectation:
    template = Template.of(tensors, halved=frozenset({"params"}))
    verify = lambda signature, data: identity.verify(KEY.public_key(), signature, data)  # noqa: E731
    return replace(Expectation("r", "a", "b", AT, "5" * 64, template, verify), **changes)


def opened(parts, expect=None):
    assembler = Assembler(expect or expected())
    for attachment, chunk in parts:
        assembler.feed(bytes(attachment), bytes(chunk))
    return assembler.finish()


def refusal(parts, expect=None) -> str:
    with pytest.raises(Refused) as caught:
        opened(parts, expect)
    return caught.value.code


def signed(manifest: dict, payload: bytes = b"", key=KEY) -> list:
    """A message whose manifest is whatever one likes, properly signed."""
    text = canonical_json(manifest)
    return list(
        Parcel(text, identity.sign(key, b"coterie manifest 1\n" + text), payload).iterate_chunks()
    )


def manifest(**changes) -> dict:
    return {**json.loads(sealed().manifest), **changes}


def with_header(header: str, data: bytes = b"") -> bytearray:
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text + data)


def test_a_message_comes_out_as_it_went_in():
    found = opened(sealed().iterate_chunks())
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, TENSORS[name])
        assert tensor.dtype == TENSORS[name].dtype


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
            ),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=5,
    )
)
def test_any_tensors_round_trip_and_the_library_reads_the_same(kinds):
    """Our strict reader and the safetensors library agree on every payload that ours accepts."""
    tensors = {
        f"t{i}": torch.randint(0, 2, shape).to(dtype) for i, (dtype, shape) in enumerate(kinds)
    }
    payload = encode(tensors)
    ours, theirs = decode(bytearray(payload), Template.of(tensors)), load(payload)
    assert set(ours) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)


def test_a_large_message_travels_in_chunks_of_at_most_256_kib():
    """1.5 million bytes: five full chunks and a rest; each but the first carries four bytes of number."""
    tensors = {"params": torch.arange(375_000.0)}
    parts = list(sealed(tensors).iterate_chunks())
    assert [len(chunk) for _, chunk in parts] == [262144] * 5 + [189360]
    assert [len(attachment) for attachment, _ in parts[1:]] == [4] * 5
    assert torch.equal(opened(parts, expected(tensors))["params"], tensors["params"])


def test_half_precision_halves_the_models_and_not_the_extras():
    """Values that float16 holds exactly come back as they were; the extras keep their own type."""
    parcel = sealed(half=frozenset({"params"}))
    out = opened(parcel.iterate_chunks())
    assert torch.equal(out["params"], TENSORS["params"])
    assert out["params"].dtype == torch.float32
    assert load(parcel.payload)["params"].dtype == torch.float16
    assert load(parcel.payload)["field.seen"].dtype == torch.int64


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_what_cannot_be_sent_is_refused_by_the_sender(bad):
    """NaN and infinity never; a million not in float16, whose largest number is 65504."""
    half = frozenset({"params"}) if bad == 1e6 else frozenset()
    with pytest.raises(Refused, match="not_finite"):
        sealed({"params": torch.tensor([0.0, bad])}, half=half)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_where_values_may_be_missing_nan_passes_and_infinity_never(bad):
    """Neither a sender lets it out nor a reader in, who gets the bytes of one that does."""
    gaps, trace = frozenset({"trace"}), torch.tensor([1.0, torch.nan])
    template = Template.of({"trace": trace}, gaps=gaps)
    came = decode(bytearray(encode({"trace": trace}, gaps=gaps)), template)["trace"]
    assert torch.equal(came.isnan(), trace.isnan())
    wrong = {"trace": torch.tensor([1.0, bad])}
    with pytest.raises(Refused, match="not_finite"):
        encode(wrong, gaps=gaps)
    with pytest.raises(Refused, match="not_finite"):
        decode(bytearray(save(wrong)), template)


@pytest.mark.parametrize(
    ("code", "expect"),
    [
        ("signature", {"verify": lambda s, d: identity.verify(STRANGER.public_key(), s, d)}),
        ("run", {"run": "another"}),
        ("sender", {"peer": "c"}),
        ("address", {"address": Address(4, 0, 1)}),
        ("address", {"address": Address(3, 1, 1)}),
        ("address", {"address": Address(3, 0, 2)}),
        ("address", {"address": Address(3, 0, 1, "request")}),
        ("replay", {"min_inc": 3}),
        ("schema", {"schema": "6" * 64}),
    ],
)
def test_a_message_that_is_not_what_was_asked_is_refused(code, expect):
    """A replayed message belongs to another round, exchange or incarnation, which its sender signed."""
    assert refusal(sealed().iterate_chunks(), expected(**expect)) == code


def test_a_message_for_another_reader_is_refused():
    assert refusal(sealed(to="c").iterate_chunks()) == "reader"
    assert torch.equal(opened(sealed(to="b").iterate_chunks())["params"], TENSORS["params"])


def test_one_changed_bit_is_noticed_wherever_it_is():
    """In the payload the digest differs; in the manifest or the signature the signature does not hold."""
    (attachment, chunk), *_ = sealed().iterate_chunks()
    for place, code in ((4, "signature"), (80, "signature"), (len(attachment) - 1, "signature")):
        changed = bytearray(attachment)
        changed[place] ^= 1
        assert refusal([(changed, chunk)]) == code
    for place in (0, 20, len(chunk) - 1):
        changed = bytearray(chunk)
        changed[place] ^= 1
        assert refusal([(attachment, changed)]) == "digest"


def test_missing_doubled_and_swapped_chunks_are_refused():
    tensors = {"params": torch.arange(375_000.0)}
    parts, expect = list(sealed(tensors).iterate_chunks()), expected(tensors)
    assert refusal(parts[:2], expect) == "truncated"
    assert refusal([], expect) == "truncated"
    assert refusal(parts[1:], expect) == "chunk"
    assert refusal([parts[0], parts[0]], expect) == "chunk"
    assert refusal([parts[0], parts[2]], expect) == "chunk"
    assert refusal([parts[0], (parts[1][0] + b"x", parts[1][1])], expect) == "chunk"
    assert refusal([parts[0], (parts[1][0], parts[1][1][:-1])], expect) == "chunk"
    assert refusal([*parts, (b"\0\0\0\3", b"more")], expect) == "chunk"
    assert refusal([(b"\0", b"")], expect) == "chunk"


def test_more_bytes_than_the_model_has_are_refused_before_they_are_kept():
    assembler = Assembler(expected())
    with pytest.raises(Refused, match="size"):
        assembler.feed(signed(manifest(bytes=1 << 30))[0][0], b"x")
    with pytest.raises(Refused, match="truncated: 0 bytes came"):
        assembler.finish()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"v": 2}, "version"), ({"round": "3"}, "manifest"), ({"round": True}, "manifest"), ({"round": -2}, "manifest"),
        ({"inc": -1}, "manifest"), ({"bytes": 1.0}, "manifest"), ({"chunk": 0}, "manifest"),
        ({"chunk": 1 << 20}, "manifest"), ({"kind": "pickle"}, "manifest"), ({"codec": "torch"}, "manifest"),
        ({"sha256": "00"}, "manifest"), ({"more": 1}, "manifest"), ({"sha256": "0" * 64}, "digest"),
    ],
)  # fmt: skip
def test_a_signed_manifest_that_makes_no_sense_is_refused(change, code):
    assert refusal(signed(manifest(**change), sealed().payload)) == code


def test_a_signed_manifest_must_be_one_json_object():
    for text, code in ((b"[1]", "manifest"), (b"{", "manifest"), (b"\xff", "manifest"), (b"[" * 4000, "manifest"),
                       (b'{"v":1,"v":1}', "duplicate_key"), (b'{"v":NaN}', "manifest"),
                       (b" " * 5000, "manifest")):  # fmt: skip
        signature = identity.sign(KEY, b"coterie manifest 1\n" + text)
        assert refusal([(bytes(4) + signature + text, b"")]) == code


LIKE = Template.of({"params": torch.zeros(2)}, halved=frozenset({"params"}))
ENTRY = '"params":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (bytearray(), "header"),
        (bytearray(b"\xff" * 8), "header"),
        (with_header("{" + ENTRY + "," + ENTRY + "}", bytes(8)), "duplicate_key"),
        (
            with_header(
                "{" + ENTRY.replace("params", "p\\u0061rams") + "," + ENTRY + "}", bytes(8)
            ),
            "duplicate_key",
        ),
        (with_header("[]"), "header"),
        (with_header("{}"), "names"),
        (
            with_header(
                "{" + ENTRY + ',"x":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}', bytes(8)
            ),
            "names",
        ),
        (with_header('{"__metadata__":{"a":"b"},' + ENTRY + "}", bytes(8)), "names"),
        (with_header("{" + ENTRY.replace("F32", "F64") + "}", bytes(8)), "dtype"),
        (with_header("{" + ENTRY.replace("F32", "F16") + "}", bytes(8)), "dtype"),
        (with_header("{" + ENTRY.replace("F32", "Q9") + "}", bytes(8)), "dtype"),
        (with_header("{" + ENTRY.replace("[2]", "[1,2]") + "}", bytes(8)), "shape"),
        (with_header("{" + ENTRY.replace("[2]", "[3]") + "}", bytes(8)), "shape"),
        (with_header("{" + ENTRY.replace("[2]", "[-2]") + "}", bytes(8)), "header"),
        (with_header("{" + ENTRY.replace("[2]", "[2.0]") + "}", bytes(8)), "header"),
        (with_header("{" + ENTRY.replace("[2]", "[true]") + "}", bytes(8)), "header"),
        (with_header("{" + ENTRY.replace("[0,8]", "[4,12]") + "}", bytes(12)), "layout"),
        (with_header("{" + ENTRY.replace("[0,8]", "[0,12]") + "}", bytes(12)), "layout"),
        (with_header("{" + ENTRY + "}", bytes(7)), "layout"),
        (with_header("{" + ENTRY + "}", bytes(9)), "layout"),
        (
            with_header("{" + ENTRY + "}", torch.tensor([1.0, torch.nan]).numpy().tobytes()),
            "not_finite",
        ),
        (
            with_header("{" + ENTRY + "}", torch.tensor([1.0, -torch.inf]).numpy().tobytes()),
            "not_finite",
        ),
        (bytearray(b"\x80\x04cos\nsystem\n(S'true'\ntR."), "header"),
    ],
)
def test_payloads_that_are_not_what_they_should_be_are_refused(payload, code):
    """Pickle, truncated and overlapping tensors, wrong names, types and shapes, NaN, keys twice: all by name."""
    with pytest.raises(Refused) as caught:
        decode(payload, LIKE)
    assert caught.value.code == code


def test_a_boolean_is_zero_or_one():
    template = Template.of({"seen": torch.zeros(2, dtype=torch.bool)})
    header = '{"seen":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}'
    assert decode(with_header(header, b"\0\1"), template)["seen"].tolist() == [False, True]
    with pytest.raises(Refused, match="boolean"):
        decode(with_header(header, b"\0\2"), template)


def test_a_servers_answer_may_have_as_many_rows_as_it_likes_but_the_same_everywhere():
    template = Template({"table": (torch.float32, ("senders", 2))}, free="field.", lead="senders")
    good = {"table": torch.zeros(3, 2), "field.label": torch.zeros(3, dtype=torch.int64)}
    assert set(decode(bytearray(encode(good)), template)) == set(good)
    for bad in (
        {**good, "field.label": torch.zeros(2)},
        {**good, "field.label": torch.tensor(0.0)},
    ):
        with pytest.raises(Refused, match="shape"):
            decode(bytearray(encode(bad)), template)


def test_damaged_messages_are_refused_and_nothing_else_happens():
    """Bits flipped, bytes cut or inserted, in envelope or payload, properly signed or not; COTERIE_FUZZ of them."""
    draw, refused = random.Random(0), Counter()
    number = int(os.environ.get("COTERIE_FUZZ", "400"))
    for _ in range(number):
        parts = hostile.message(sealed(), lambda data: identity.sign(KEY, data), draw)
        try:
            out = opened(parts)
        except Refused as error:
            refused[error.code] += 1
            continue
        assert {n: (t.dtype, t.shape) for n, t in out.items()} == {
            n: (t.dtype, t.shape) for n, t in TENSORS.items()
        }
    assert refused.total() > 0.8 * number
    assert {"signature", "digest", "manifest", "chunk", "header"} <= set(refused)


@pytest.mark.parametrize("seed", range(5))
def test_payloads_have_the_bytes_that_the_safetensors_library_writes(seed):
    """Of every type on the wire, of no, one and several axes, some empty, in any order of names."""
    draw = random.Random(seed)
    types = (
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    names = draw.sample(
        ["params", "a.b", "field.x", "Z", "z", "m-1", "q", "field.samples", "0", "_"], 8
    )
    tensors = {
        name: torch.full(draw.choice([(), (0, 4), (3,), (2, 5)]), draw.randrange(2)).to(
            draw.choice(types)
        )
        for name in names
    }
    assert encode(tensors) == save(tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_single_value_that_is_not_finite_is_found_wherever_it_lies(dtype, bad):
    for place in (0, 500, 999):
        tensor = torch.linspace(-1, 1, 1000).to(dtype)
        encode({"params": tensor})
        tensor[place] = bad
        with pytest.raises(Refused, match="params holds NaN"):
            encode({"params": tensor})
