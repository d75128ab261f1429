"""The wire format: a signed manifest and a safetensors payload in chunks, checked before use.

A message is one client's row in one exchange of a round. Its manifest names the sender, the address
and the digest of the payload; the sender signs the manifest's bytes, so the payload is bound to
run, sender, incarnation, round, exchange and client. A reader knows what it asked for
(`Expectation`); a message that differs is `Refused` before it is used. docs/reference/wire.md
describes the format for other languages.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import Tensor

from coterie.net.payload import Refused, Template, decode, encode, parse_strict_json

VERSION = 1
# Bytes: what a node holds at most of an answer that its asker reads slowly.
CHUNK = 256 * 1024
# Fourteen fields, each of at most a hundred bytes or so.
MAX_MANIFEST = 4096
MAX_HEAD = 128 * 1024  # a thousand names of members are 66 kB
MAX_ROSTER = 8 * 1024 * 1024  # ten thousand members with certificates are 3.5 MB
# Two numbers of 32 bytes each: ECDSA on P-256.
SIGNATURE = 64
CODECS = ("safetensors", "safetensors-f16")
KINDS = ("model", "request", "reply", "cohort", "probe", "join")
NEWEST = "newest"
"""The kind of a question, of no message: the newest model of a client, from a round on."""
NAME = re.compile(r"[a-z0-9-]{1,63}")
# It precedes what is signed, so that a signature of another kind of text never counts here.
_DOMAIN = b"coterie manifest 1\n"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class Address:
    """The address of a message.

    Args:
        round: the round, -1 for the warm-up.
        exchange: number of the exchange in the round, from 0.
        client: id of the client that the message is from or for; -1 for a message of the server
            role.
        kind: "model" for peers, "request" for the server role, "reply" and "cohort" from it;
            "probe" for measuring; "join" for clients that join when the run has ended. A question
            may have the kind NEWEST: the newest "model" of this client whose round is not below
            that of the address.
    """

    round: int
    exchange: int
    client: int
    kind: str = "model"


@dataclass(frozen=True)
class Manifest:
    """The signed description of a message.

    Args:
        v: version of the format.
        run: id of the run, from the roster.
        peer: the sending node.
        inc: the sender's incarnation; increases with every start of the node.
        round: see `Address`, as exchange, client and kind.
        exchange: number of the exchange.
        client: id of the client.
        kind: kind of message.
        to: the only node that may use it; "" for all members.
        codec: "safetensors", or "safetensors-f16" when models travel in half precision.
        bytes: length of the payload.
        chunk: length of every chunk but the last, at most 262144.
        sha256: digest of the payload, in hexadecimal.
        schema: the model schema's hash, from the roster.
    """

    v: int
    run: str
    peer: str
    inc: int
    round: int
    exchange: int
    client: int
    kind: str
    to: str
    codec: str
    bytes: int
    chunk: int
    sha256: str
    schema: str

    @property
    def address(self) -> Address:
        """The address of the message."""
        return Address(self.round, self.exchange, self.client, self.kind)


@dataclass(frozen=True)
class Expectation:
    """The message that a reader asked for.

    Args:
        run: the run's id.
        peer: the sender.
        me: the reader.
        address: the address of the message.
        schema: the model schema's hash.
        template: the tensors that the payload must have.
        verify: (signature, signed bytes) -> whether the signature is by the roster's key of `peer`.
        min_inc: the newest incarnation seen of this peer; a message of an older one is a replay.
    """

    run: str
    peer: str
    me: str
    address: Address
    schema: str
    template: Template
    verify: Callable[[bytes, bytes], bool]
    min_inc: int = 0


@dataclass(frozen=True)
class Parcel:
    """A sealed message, as a node stores it to answer questions."""

    manifest: bytes
    signature: bytes
    payload: bytes
    chunk: int = CHUNK

    @property
    def size(self) -> int:
        """Bytes on the wire, without what the transport adds."""
        # An empty payload travels as one chunk, which has the manifest.
        count = max(1, -(-len(self.payload) // self.chunk))
        # 4 bytes in each chunk are its number.
        return len(self.payload) + len(self.manifest) + SIGNATURE + 4 * count

    def iterate_chunks(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield (attachment, part of the payload) at least once; the first has the manifest."""
        view = memoryview(self.payload)
        count = max(1, -(-len(view) // self.chunk))
        for number in range(count):
            head = number.to_bytes(4, "big")
            if number == 0:
                head += self.signature + self.manifest
            yield head, view[number * self.chunk : (number + 1) * self.chunk]


def seal_parcel(
    tensors: Mapping[str, Tensor],
    *,
    run: str,
    peer: str,
    inc: int,
    address: Address,
    schema: str,
    sign: Callable[[bytes], bytes],
    to: str = "",
    half: frozenset[str] = frozenset(),
    gaps: frozenset[str] = frozenset(),
    chunk: int = CHUNK,
) -> Parcel:
    """Encode and sign one message.

    Args:
        tensors: by name.
        run: the run's id.
        peer: the sender.
        inc: its incarnation.
        address: the address of the message.
        schema: the model schema's hash.
        sign: returns a signature of 64 bytes (r then s, big-endian) by the sender's key.
        to: the only node that may use it; "" for all members.
        half: names of tensors that travel as float16.
        gaps: names of tensors that may hold NaN.
        chunk: bytes in a chunk, at most 262144.

    Raises:
        Refused: when a value is not finite, or does not fit into half precision.
    """
    payload = encode(tensors, half=half, gaps=gaps)
    manifest = Manifest(
        VERSION, run, peer, inc, address.round, address.exchange, address.client, address.kind, to,
        CODECS[1] if half else CODECS[0], len(payload), chunk,
        hashlib.sha256(payload).hexdigest(), schema,
    )  # fmt: skip
    text = canonical_json(asdict(manifest))
    return Parcel(text, sign(bytes_to_sign(text)), payload, chunk)


def bytes_to_sign(text: bytes) -> bytes:
    """Return the bytes that a sender signs for a manifest."""
    return _DOMAIN + text


def canonical_json(document: Any) -> bytes:
    """Return a document as JSON with sorted keys and no spaces, for hashing and signing."""
    # NaN is no JSON, and programs in other languages must get the same text.
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_frame(attachment: bytes, chunk: bytes | memoryview) -> bytes:
    """Return a chunk as it travels: the length of its attachment (2 bytes), that, and the chunk."""
    return b"".join([len(attachment).to_bytes(2, "big"), attachment, chunk])


def read_frame(frame: bytes) -> tuple[bytes, memoryview]:
    """Return the attachment and the chunk of a frame.

    Raises:
        Refused: when it is too short.
    """
    end = 2 + int.from_bytes(frame[:2], "big")
    if len(frame) < max(2, end):
        raise Refused("chunk", f"a frame of {len(frame)} bytes; it says that it has {end} or more")
    return frame[2:end], memoryview(frame)[end:]


def parse_manifest(text: bytes) -> Manifest:
    """Read a manifest and check everything that does not depend on the question.

    Raises:
        Refused: with code "manifest" (or "duplicate_key", "version").
    """
    if len(text) > MAX_MANIFEST:
        raise Refused("manifest", f"{len(text)} bytes; expected at most {MAX_MANIFEST}")
    document = parse_strict_json(text, "manifest")
    if not isinstance(document, dict):
        raise Refused("manifest", "expected a JSON object")
    if document.get("v") != VERSION:
        raise Refused("version", f"version {str(document.get('v'))[:20]}; expected {VERSION}")
    for field in fields(Manifest):
        # The exact type: a bool is an int for `isinstance`.
        if type(document.get(field.name)) is not field.type:
            raise Refused("manifest", f"{field.name} is missing or not of type {field.type}")
    if len(document) != len(fields(Manifest)):
        raise Refused("manifest", "it has keys that no manifest has")
    m = Manifest(**document)
    # Upper bounds keep every number exact in other languages: 2^53 for a JSON reader, 2^31 for an
    # index.
    limits = {
        "inc": 0 <= m.inc < 1 << 53,
        "round": -1 <= m.round < 1 << 31,
        "exchange": 0 <= m.exchange < 1 << 16,
        "client": -1 <= m.client < 1 << 31,
        "kind": m.kind in KINDS,
        "codec": m.codec in CODECS,
        "bytes": 0 <= m.bytes < 1 << 40,
        "chunk": 1024 <= m.chunk <= CHUNK,
        "sha256": _HEX.fullmatch(m.sha256) is not None,
    }
    for name, fine in limits.items():
        if not fine:
            raise Refused("manifest", f"{name} is out of range")
    return m


class Assembler:
    """Assembles a message from its chunks, checks each, and stores no more than was announced.

    Args:
        expect: the message that was asked for.
    """

    def __init__(self, expect: Expectation) -> None:
        self.expect = expect
        self.manifest: Manifest | None = None
        self.sealed = b""
        self._payload, self._got, self._next = bytearray(), 0, 0
        self._digest = hashlib.sha256()

    def feed(self, attachment: bytes, chunk: bytes | memoryview) -> None:
        """Take the next chunk.

        Raises:
            Refused: at the first error.
        """
        if len(attachment) < 4:
            raise Refused("chunk", "an attachment of fewer than four bytes")
        number = int.from_bytes(attachment[:4], "big")
        if number != self._next:
            raise Refused("chunk", f"chunk {number} came; expected {self._next}")
        if number == 0:
            self._check_manifest(attachment[4:])
        elif len(attachment) != 4:
            raise Refused("chunk", "only the first chunk carries a manifest")
        assert self.manifest is not None
        left = self.manifest.bytes - self._got
        if len(chunk) != min(left, self.manifest.chunk) or (number > 0 and left == 0):
            raise Refused(
                "chunk",
                f"chunk {number} has {len(chunk)} bytes; expected {min(left, self.manifest.chunk)}",
            )
        # Memory is taken only now, when the signature and the announced size are checked.
        if number == 0:
            self._payload = bytearray(self.manifest.bytes)
        self._payload[self._got : self._got + len(chunk)] = chunk
        # Hashed as it comes, so that the payload is not read again.
        self._digest.update(chunk)
        self._got += len(chunk)
        self._next += 1

    def _check_manifest(self, envelope: bytes) -> None:
        expect, signature, text = self.expect, envelope[:SIGNATURE], envelope[SIGNATURE:]
        if len(text) > MAX_MANIFEST:
            raise Refused("manifest", f"{len(text)} bytes; expected at most {MAX_MANIFEST}")
        # No field is read before the signature is checked.
        if not expect.verify(signature, bytes_to_sign(text)):
            raise Refused(
                "signature", f"the manifest is not signed by {expect.peer}'s key of the roster"
            )
        m = parse_manifest(text)
        for name, found, wanted in (("run", m.run, expect.run), ("sender", m.peer, expect.peer)):
            if found != wanted:
                raise Refused(name, f"the manifest is of {name} {found[:64]}; expected {wanted}")
        if m.to not in ("", expect.me):
            raise Refused("reader", f"it is meant for {m.to[:64]}, not for {expect.me}")
        wanted = expect.address
        if wanted.kind == NEWEST:
            if m.round < wanted.round:
                raise Refused("rewound", f"it is of round {m.round}; expected {wanted.round} on")
            wanted = replace(wanted, round=m.round, kind="model")
        if m.address != wanted:
            raise Refused("address", f"it belongs to {m.address}; asked was {expect.address}")
        if m.inc < expect.min_inc:
            raise Refused(
                "replay", f"incarnation {m.inc} is over; the newest seen is {expect.min_inc}"
            )
        if m.schema != expect.schema:
            raise Refused("schema", f"model schema {m.schema[:16]}; expected {expect.schema[:16]}")
        if m.bytes > expect.template.max_bytes:
            raise Refused(
                "size", f"{m.bytes} bytes announced; expected at most {expect.template.max_bytes}"
            )
        self.manifest, self.sealed = m, envelope

    def finish(self) -> dict[str, Tensor]:
        """Return the tensors, in the types of the template.

        Raises:
            Refused: when chunks are missing or the payload does not match the template.
        """
        if self.manifest is None or self._got != self.manifest.bytes:
            raise Refused("truncated", f"{self._got} bytes came of those announced")
        if self._digest.hexdigest() != self.manifest.sha256:
            raise Refused("digest", "the payload does not hash to what its sender signed")
        return decode(self._payload, self.expect.template, half=self.manifest.codec == CODECS[1])
