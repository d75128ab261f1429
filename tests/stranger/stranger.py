"""One member of a run, written from the page "The wire format" alone; it imports nothing of Coterie.

    python stranger.py run FOLDER NAME DATA.npz [START [DEADLINE]]

takes part as the member NAME; START and DEADLINE are seconds to wait for the others, at the start
and in a round. The folder holds roster.toml, roster.toml.sig, organizer.pub, ca.pem, NAME.key and
NAME.pem; the data are x, y, x_validation and y_validation. What happens is told on standard output,
one JSON object a line. Each part is named after the section of the page that it follows.

It leaves out: more than one client a member, the server role, other methods than DAC and FedAvg and
other settings of these than the defaults, other models than the linear one on the bundled digits,
other training than plain gradient steps, frozen weights, `join`, and clients that stop.
"""

import hashlib
import ipaddress
import json
import math
import os
import random
import re
import struct
import sys
import threading
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)

Params = np.ndarray
Tensors = dict[str, np.ndarray]
# by name, type and shape; None: any length to the population
Expected = dict[str, tuple[str, tuple[int | None, ...]]]

# Limits and times
HEAD_WAIT, PAUSE, DEADLINE, SERVER_WAIT, START, LINGER = 2.0, 0.5, 30.0, 600.0, 60.0, 120.0
KEPT_ROUNDS, MAX_OPEN, CHUNK = 8, 8, 262144


class Refused(Exception):
    """What came failed a check."""

    def __init__(self, code: str, detail: object = ""):
        super().__init__(f"{code} {detail}".strip())
        self.code = code


class ErrorReply(Exception):
    """A question that was answered, or is to be answered, with an error reply; `nothing` is an answer without any part."""

    def __init__(self, code: str):
        super().__init__(code)
        self.code = code


def tell(event: str, **fields: Any) -> None:
    # one piece: threads tell, too
    print(json.dumps({"event": event, **fields}) + "\n", end="", flush=True)


# ---------------------------------------------------------------------------------------------- Words and notation


def canonical(value: Any) -> bytes:
    """Canonical JSON. Python writes floats and escapes as the page asks for."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def parse(data: bytes, code: str) -> dict[str, Any]:
    """The JSON object in `data`, without a key twice, NaN or infinity."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) < len(items):
            raise Refused("duplicate_key")
        return dict(items)

    def number(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text} is no number")
        return value

    try:
        found = json.loads(
            data.decode(), object_pairs_hook=pairs, parse_float=number, parse_constant=number
        )
    except (ValueError, RecursionError) as error:
        raise Refused(code, error) from None
    if type(found) is not dict:
        raise Refused(code, "is no object")
    return found


def require(found: dict[str, Any], types: dict[str, type], code: str) -> None:
    """Exactly these keys, with these types (`type`: true is no integer, 3 is no float)."""
    if found.keys() != types.keys():
        raise Refused(code, f"keys {sorted(found.keys() ^ types.keys())}")
    for key, kind in types.items():
        if type(found[key]) is not kind:
            raise Refused(code, f"{key} is no {kind.__name__}")


# -------------------------------------------------------------------------------------------- Keys and certificates


def key_text(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    ).hex()


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def sign(key: ec.EllipticCurvePrivateKey, what: str, data: bytes) -> bytes:
    r, s = decode_dss_signature(
        key.sign(f"coterie {what} 1\n".encode() + data, ec.ECDSA(hashes.SHA256()))
    )
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def verify(key: str, what: str, signature: bytes, data: bytes) -> None:
    try:
        if len(signature) != 64:
            raise ValueError("not 64 bytes")
        der = encode_dss_signature(
            int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
        )
        public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), bytes.fromhex(key))
        public.verify(der, f"coterie {what} 1\n".encode() + data, ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature) as error:
        raise Refused("signature", error) from None


def request(name: str, host: str, folder: Path) -> None:
    """Make NAME.key (mode 0600) and the certificate request NAME.csr."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    with open(
        os.open(folder / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
    ) as file:
        file.write(key.private_bytes(pem, private, serialization.NoEncryption()))
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject)
    csr = csr.add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
    (folder / f"{name}.csr").write_bytes(csr.sign(key, hashes.SHA256()).public_bytes(pem))


# ------------------------------------------------------------------------------------------------------- The roster

# the type of each field, and its value when it is absent; None: required
ROSTER = {
    "run": (str, None),
    "population": (int, None),
    "version": (int, 1),
    "protocol": (int, 1),
    "study": (str, ""),
    "schema": (str, ""),
    "server": (str, ""),
    "clusters": (list, []),
    "issued": (str, ""),
    "removed": (list, []),
    "members": (list, None),
}
MEMBER = {
    "name": (str, None),
    "address": (str, None),
    "clients": (list, None),
    "key": (str, ""),
    "certificate": (str, ""),
    "expires": (str, ""),
    "subject": (str, ""),
}
NAME = re.compile(r"[a-z0-9-]{1,63}")


def fields(table: Any, known: dict[str, tuple[type, Any]]) -> dict[str, Any]:
    if type(table) is not dict or table.keys() - known.keys():
        raise Refused("roster", "unknown fields")
    filled = {name: table.get(name, default) for name, (_, default) in known.items()}
    for name, (kind, _) in known.items():
        if type(filled[name]) is not kind:
            raise Refused("roster", f"{name} is no {kind.__name__}")
    return filled


@dataclass(frozen=True)
class Roster:
    data: bytes  # the bytes of the file
    signature: bytes
    top: dict[str, Any]
    members: dict[str, dict[str, Any]]

    @staticmethod
    def read(signature: bytes, data: bytes, organizer: str) -> "Roster":
        if len(data) > 2**20:
            raise Refused("roster", "is too long")
        verify(organizer, "roster", signature, data)
        try:
            top = fields(tomllib.loads(data.decode()), ROSTER)
        except ValueError as error:
            raise Refused("roster", error) from None
        members = [fields(member, MEMBER) for member in top["members"]]
        ids = [client for member in members for client in member["clients"]] + top["removed"]
        if any(type(client) is not int for client in ids) or sorted(ids) != list(
            range(top["population"])
        ):
            raise Refused("roster", "not every client once")
        if top["protocol"] != 1 or not 1 <= len(members) <= 1000:
            raise Refused("roster", "another protocol, or number of members")
        if not all(
            NAME.fullmatch(name) for name in [top["run"], *(member["name"] for member in members)]
        ):
            raise Refused("roster", "a name")
        for unique in ("name", "address", "key"):
            if len({member[unique] for member in members}) < len(members):
                raise Refused("roster", f"two members have the same {unique}")
        return Roster(data, signature, top, {member["name"]: member for member in members})

    @staticmethod
    def load(folder: Path, organizer: str) -> "Roster":
        signature = bytes.fromhex((folder / "roster.toml.sig").read_text().strip())
        return Roster.read(signature, (folder / "roster.toml").read_bytes(), organizer)


# -------------------------------------------------------------------------------------------------------- The links


SERVICE, MAX_FRAME = "coterie.v1", 524288
# what each kind of question holds, besides the run's id
QUESTIONS: dict[str, dict[str, Any]] = {
    "Message": {"kind": str, "round": int, "exchange": int, "client": int, "wait": float},
    "Head": {"nonce": str},
    "Roster": {},
    "Presence": {"here": bool},
}


def key_host(subject: str) -> str:
    """The name that a member's certificate has for its key."""
    return f"{subject[:32]}.{subject[32:]}.coterie"


def credentials(me: str, folder: Path) -> tuple[bytes, bytes, bytes]:
    key, certificate, ca = (
        (folder / name).read_bytes() for name in (f"{me}.key", f"{me}.pem", "ca.pem")
    )
    return key, certificate, ca


def dial(member: dict[str, Any], me: str, folder: Path) -> grpc.Channel:
    key, certificate, ca = credentials(me, folder)
    options = [
        ("grpc.ssl_target_name_override", key_host(member["subject"])),
        ("grpc.max_receive_message_length", MAX_FRAME),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 5000),
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.secure_channel(
        member["address"], grpc.ssl_channel_credentials(ca, key, certificate), options
    )


def asker_of(context: grpc.ServicerContext, roster: Roster) -> str:
    """The member whose key the caller's certificate has."""
    (pem,) = context.auth_context()["x509_pem_cert"]
    certificate = x509.load_pem_x509_certificate(pem)
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    over = certificate.not_valid_after_utc.timestamp() < time.time()
    for name, member in roster.members.items():
        if member["key"] == key_text(key) and not over:
            return name
    context.abort(grpc.StatusCode.PERMISSION_DENIED, "not a member")
    raise AssertionError("abort raises")


# ------------------------------------------------------------------------------------------------------ The payload

CODES = {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "BOOL": "?",
}
TYPES = {name: np.dtype(code) for name, code in CODES.items()}


def encode(tensors: Tensors) -> bytes:
    header, body = {}, b""
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        kind = next(kind for kind, dtype in TYPES.items() if dtype == tensor.dtype)
        data = tensor.astype(TYPES[kind]).tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def decode(payload: bytes, expected: Expected, population: int) -> Tensors:
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or length > min(65536, len(payload) - 8):
        raise Refused("header", "length")
    header, start = parse(payload[8 : 8 + length], "header"), 8 + length
    if header.keys() != expected.keys():
        raise Refused("names", sorted(header))
    tensors, ranges = {}, []
    for name, entry in header.items():
        if type(entry) is not dict:
            raise Refused("header", name)
        require(entry, {"dtype": str, "shape": list, "data_offsets": list}, "header")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if len(offsets) != 2 or any(
            type(number) is not int or not 0 <= number < 2**40 for number in shape + offsets
        ):
            raise Refused("header", name)
        kind, want = expected[name]
        if entry["dtype"] != kind:
            raise Refused("dtype", f"{name} {entry['dtype']}")
        fits = (
            n == w if w is not None else n <= population for n, w in zip(shape, want, strict=False)
        )
        if len(shape) != len(want) or not all(fits):
            raise Refused("shape", f"{name} {shape}")
        begin, end = offsets
        if end - begin != math.prod(shape) * TYPES[kind].itemsize or start + end > len(payload):
            raise Refused("layout", name)
        if (start + begin) % TYPES[kind].itemsize:
            raise Refused("layout", f"{name} is not aligned")
        ranges.append((begin, end))
        data = payload[start + begin : start + end]
        if kind == "BOOL" and set(data) - {0, 1}:
            raise Refused("boolean", name)
        tensor = np.frombuffer(data, TYPES[kind]).reshape(shape)
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise Refused("not_finite", name)
        tensors[name] = tensor.astype(np.float32) if kind == "F16" else tensor
    at = 0
    for begin, end in sorted(ranges):
        if begin != at:
            raise Refused("layout", "a gap or an overlap")
        at = end
    if start + at != len(payload):
        raise Refused("layout", "bytes behind the last tensor")
    return tensors


# ------------------------------------------------------------------------------------------------------- A message

MANIFEST = {
    "v": int,
    "run": str,
    "peer": str,
    "inc": int,
    "round": int,
    "exchange": int,
    "client": int,
    "kind": str,
    "to": str,
    "codec": str,
    "bytes": int,
    "chunk": int,
    "sha256": str,
    "schema": str,
}
RANGES = {
    "inc": (0, 2**53 - 1),
    "round": (-1, 2**31 - 1),
    "exchange": (0, 65535),
    "client": (-1, 2**31 - 1),
    "bytes": (0, 2**40 - 1),
    "chunk": (1024, 262144),
}
Part = tuple[bytes, bytes]  # the attachment and the payload of one reply


@dataclass(frozen=True)
class Address:
    """What a question for a message asks for."""

    kind: str
    round: int
    exchange: int
    client: int


def seal(
    key: ec.EllipticCurvePrivateKey, manifest: dict[str, Any], payload: bytes, chunk: int = CHUNK
) -> list[Part]:
    digest = hashlib.sha256(payload).hexdigest()
    text = canonical({**manifest, "v": 1, "bytes": len(payload), "chunk": chunk, "sha256": digest})
    chunks = [payload[at : at + chunk] for at in range(0, len(payload), chunk)] or [b""]
    parts = [(struct.pack(">I", number), data) for number, data in enumerate(chunks)]
    parts[0] = (parts[0][0] + sign(key, "manifest", text) + text, parts[0][1])
    return parts


# ------------------------------------------------------------------------------ What a reader checks, in this order


@dataclass
class Reader:
    """What a reader knows of those whom it asks."""

    me: str
    run: str
    schema: str
    population: int
    newest: dict[str, int] = field(default_factory=dict)  # incarnation, by sender

    def open(
        self, parts: Iterable[Part], sender: str, key: str, address: Address, expected: Expected
    ) -> Tensors:
        replies = iter(parts)
        attachment, data = next(replies, (b"", b""))
        # 1
        if attachment[:4] != b"\0\0\0\0" or len(attachment) < 68 or len(attachment) > 68 + 4096:
            raise Refused("chunk", "the first")
        verify(key, "manifest", attachment[4:68], attachment[68:])  # 2
        manifest = parse(attachment[68:], "manifest")  # 3
        require(manifest, MANIFEST, "manifest")
        for name, (low, high) in RANGES.items():
            if not low <= manifest[name] <= high:
                raise Refused("manifest", name)
        if manifest["codec"] not in ("safetensors", "safetensors-f16"):
            raise Refused("manifest", "codec")
        if manifest["v"] != 1:
            raise Refused("version", manifest["v"])
        if manifest["run"] != self.run:  # 4
            raise Refused("run", manifest["run"])
        if manifest["peer"] != sender:
            raise Refused("sender", manifest["peer"])
        if manifest["to"] != (self.me if address.kind == "reply" else ""):
            raise Refused("reader", manifest["to"])
        if (
            Address(manifest["kind"], manifest["round"], manifest["exchange"], manifest["client"])
            != address
        ):
            raise Refused("address", manifest)
        if manifest["inc"] < self.newest.get(sender, 0):
            raise Refused("replay", manifest["inc"])
        if manifest["schema"] != self.schema:
            raise Refused("schema", manifest["schema"])
        self.newest[sender] = manifest["inc"]
        if manifest["codec"] == "safetensors-f16":
            halves = expected.keys() & {"params", "table"}
            expected = {
                name: ("F16" if name in halves else kind, shape)
                for name, (kind, shape) in expected.items()
            }
        size, chunk = manifest["bytes"], manifest["chunk"]
        shapes = [
            (kind, [self.population if n is None else n for n in shape])
            for kind, shape in expected.values()
        ]
        # 5
        if (
            size
            > sum(TYPES[kind].itemsize * math.prod(shape) for kind, shape in shapes) + 65536 + 8
        ):
            raise Refused("size", size)
        payload = b""
        for number in range(max(1, -(-size // chunk))):  # 6
            if number:
                attachment, data = next(replies, (b"", b""))
                if not attachment:
                    raise Refused("truncated", f"{number} chunks")
                if attachment != struct.pack(">I", number):
                    raise Refused("chunk", number)
            if len(data) != min(chunk, size - len(payload)):
                raise Refused("truncated", f"chunk {number} has {len(data)} bytes")
            payload += data
        if next(replies, None) is not None:
            raise Refused("chunk", "one too many")
        if hashlib.sha256(payload).hexdigest() != manifest["sha256"]:
            raise Refused("digest")
        tensors = decode(payload, expected, self.population)  # 7
        if "index" in tensors and (tensors["index"] < 0).any():
            raise Refused("index")
        if "ids" in tensors:
            ids = tensors["ids"]
            if (np.diff(ids) <= 0).any() or (ids < 0).any() or (ids >= self.population).any():
                raise Refused("cohort", ids.tolist())
        return tensors


# ------------------------------------------------------------------------------- The order of params, and the model

FEATURES, CLASSES = 64, 10
SLOTS = [["1.weight", [CLASSES, FEATURES]], ["1.bias", [CLASSES]]]
PARAMS = CLASSES * (FEATURES + 1)


@dataclass
class Data:
    """The client's own data. What it learns is its own affair: here, a linear softmax model, by gradient descent."""

    x: np.ndarray
    y: np.ndarray
    x_validation: np.ndarray
    y_validation: np.ndarray

    @staticmethod
    def load(path: Path) -> "Data":
        with np.load(path) as arrays:
            x, x_validation = (
                arrays["x"].astype(np.float32),
                arrays["x_validation"].astype(np.float32),
            )
            return Data(x, arrays["y"], x_validation, arrays["y_validation"])

    @staticmethod
    def probabilities(params: Params, x: np.ndarray) -> np.ndarray:
        scores = x @ params[:-CLASSES].reshape(CLASSES, FEATURES).T + params[-CLASSES:]
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def similarity(self, params: Params) -> float:
        """The inverse of the loss of a model on the own data."""
        of_label = self.probabilities(params, self.x)[np.arange(len(self.y)), self.y]
        return float(1 / (1e-6 - np.log(of_label + 1e-12).mean()))

    def accuracy(self, params: Params) -> float:
        return float(
            (
                self.probabilities(params, self.x_validation).argmax(axis=1) == self.y_validation
            ).mean()
        )

    def train(self, params: Params) -> Params:
        """Twenty steps down the slope of the whole data: how a member trains is its own business."""
        for _ in range(20):
            error = (self.probabilities(params, self.x) - np.eye(CLASSES)[self.y]) / len(self.y)
            params = params - (
                0.1 * np.concatenate([(error.T @ self.x).ravel(), error.sum(axis=0)])
            ).astype(np.float32)
        return params


# ---------------------------------------------------------------------------------------------------------- Hashes


def study_hash(settings: dict[str, Any]) -> str:
    return hashlib.sha256(
        canonical({k: v for k, v in settings.items() if k != "model.frozen"})
    ).hexdigest()


def schema_hash(slots: list[Any], dtype: str, trainable: int, frozen: str | None = None) -> str:
    return hashlib.sha256(
        canonical([slots, dtype, trainable] + ([frozen] if frozen else []))
    ).hexdigest()


# ---------------------------------------------------------------------------------------------------------- A head

HEAD = {
    "run": str,
    "peer": str,
    "inc": int,
    "nonce": str,
    "round": int,
    "state": str,
    "protocol": int,
    "study": str,
    "schema": str,
    "roster": int,
    "time": float,
    "met": list,
    "settings": dict,
}


def read_head(reply: bytes, key: str, run: str, peer: str, nonce: str) -> dict[str, Any]:
    if not 64 < len(reply) <= 64 + 131072:
        raise Refused("head", "length")
    verify(key, "head", reply[:64], reply[64:])
    head = parse(reply[64:], "head")
    require(head, HEAD, "head")
    if (head["run"], head["peer"], head["nonce"], head["protocol"]) != (run, peer, nonce, 1):
        raise Refused("head", "not what was asked for")
    if head["state"] not in ("starting", "running", "done") or not -1 <= head["round"] < 2**31:
        raise Refused("head", "state or round")
    if any(type(name) is not str for name in head["met"]):
        raise Refused("head", "met")
    if any(
        value is not None and type(value) not in (str, int, float, bool)
        for value in head["settings"].values()
    ):
        raise Refused("head", "settings")
    return head


# ------------------------------------------------------------------------------------------- Questions and answers


class Node:
    """One member: its link to the others, what it has published, and what it knows of them."""

    def __init__(self, folder: Path, name: str, start: float = START, deadline: float = DEADLINE):
        self.folder, self.me = folder, name
        self.start_wait, self.deadline = start, deadline
        self.organizer = (folder / "organizer.pub").read_text().strip()
        private = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        self.key = private
        self.roster = Roster.load(folder, self.organizer)
        self.seen = folder / f"{name}.seen"  # the newest version that this node has seen
        if self.seen.exists() and self.roster.top["version"] < int(self.seen.read_text()):
            raise SystemExit("the roster is older than one that this node has seen")
        self.check_roster(self.roster)
        self.run: str = self.roster.top["run"]
        (self.client,) = self.roster.members[name]["clients"]  # this program hosts one
        self.population: int = self.roster.top["population"]
        self.server: str = self.roster.top["server"]
        if schema_hash(SLOTS, "torch.float32", PARAMS) != self.roster.top["schema"]:
            raise SystemExit("the roster has another model")
        self.inc = int(time.time())
        self.reader = Reader(name, self.run, self.roster.top["schema"], self.population)
        self.round, self.state, self.met = -1, "starting", list[str]()
        self.settings: dict[str, Any] = {}  # of the study: empty until some head has told them
        self.changed = threading.Condition()  # guards what follows
        self.newest = -2  # the newest round in which it has published
        # for whom, and its chunks; None: withheld
        self.messages: dict[Address, tuple[str, list[Part] | None]] = {}
        self.open_questions: dict[str, dict[Address, object]] = {}
        self.closing = False
        self.alive: set[str] = set()
        self.seen: set[str] = set()  # those that were alive at some time
        self.said: dict[str, int] = {}  # how often each said by itself whether it takes part
        self.left_out: set[str] = set()
        self.read_count = self.missed = 0
        # the last round in which it received a message, and when
        self.last_read = (0, time.monotonic())
        # of the round that it is in; seconds of the one before
        self.began, self.pace = time.monotonic(), 0.0
        self.announced = False
        self.channels: dict[str, grpc.Channel] = {}
        self.open_server()

    def check_roster(self, roster: Roster) -> None:
        """A member with its own key, certificate and clients."""
        member = roster.members.get(self.me)
        certificate = x509.load_pem_x509_certificate((self.folder / f"{self.me}.pem").read_bytes())
        if member is None or member["key"] != key_text(self.key.public_key()):
            raise Refused("roster", "this node is no member with its key")
        if member["certificate"] != certificate.fingerprint(hashes.SHA256()).hex():
            raise Refused("roster", "it names another certificate of this node")
        self.seen.write_text(str(roster.top["version"]))

    def open_server(self) -> None:
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1024)]
        self.listener = grpc.server(ThreadPoolExecutor(64), options=options)
        handlers = {
            method: grpc.unary_stream_rpc_method_handler(
                lambda body, context, method=method: self.answer(method, body, context)
            )
            for method in QUESTIONS
        }
        self.listener.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        key, certificate, ca = credentials(self.me, self.folder)
        self.listener.add_secure_port(
            self.roster.members[self.me]["address"],
            grpc.ssl_server_credentials([(key, certificate)], ca, True),
        )
        self.listener.start()

    def channel(self, member: str) -> grpc.Channel:
        """The link to a member, which is dialed when it is first asked."""
        with self.changed:
            if member not in self.channels:
                self.channels[member] = dial(self.roster.members[member], self.me, self.folder)
            return self.channels[member]

    def note_presence(self, member: str, there: bool) -> None:
        if there:
            self.alive.add(member)
            self.seen.add(member)
        else:
            self.alive.discard(member)

    def present(self) -> list[str]:
        """Those who are not known to be away: a member that was never seen may come at any moment."""
        return [name for name in self.others() if name in self.alive or name not in self.seen]

    def say_presence(self, member: str, here: bool) -> None:
        said = self.said.get(member)
        with suppress(grpc.RpcError, Refused, ErrorReply):
            (answer,) = self.ask(member, "Presence", {"here": here}, HEAD_WAIT)
            there = parse(answer, "presence").get("here")
            if self.said.get(member) == said:  # otherwise it has said something newer by itself
                self.note_presence(member, there is True)

    def say_to_all(self, here: bool) -> None:
        with ThreadPoolExecutor(max(1, len(self.others()))) as pool:
            list(pool.map(lambda name: self.say_presence(name, here), self.others()))

    def others(self) -> list[str]:
        return [
            name for name in self.roster.members if name != self.me and name not in self.left_out
        ]

    # Answers: a thread for each question, which waits until it can be answered.

    def answer(self, method: str, body: bytes, context: grpc.ServicerContext) -> Iterable[bytes]:
        asker = asker_of(context, self.roster)
        try:
            yield from self.reply(asker, method, body)
        except (ErrorReply, Refused) as error:
            code = error.code if isinstance(error, ErrorReply) else "forbidden"
            text = canonical({"code": code, "round": self.newest}).decode()
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)

    def reply(self, asker: str, method: str, body: bytes) -> Iterable[bytes]:
        question = parse(body, "question")
        if type(question.get("wait")) is int:  # a whole number of seconds
            question["wait"] = float(question["wait"])
        require(question, {"run": str, **QUESTIONS[method]}, "question")
        if question["run"] != self.run:
            raise ErrorReply("forbidden")
        if method == "Presence":
            self.said[asker] = self.said.get(asker, 0) + 1
            self.note_presence(asker, question["here"])
            yield canonical({"here": self.announced and not self.closing})
        elif method == "Head":
            if not re.fullmatch("[A-Za-z0-9]{1,64}", question["nonce"]):
                raise ErrorReply("forbidden")
            yield self.head(question["nonce"])
        elif method == "Roster":
            data = self.roster.signature + self.roster.data
            yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
        else:
            if question["kind"] not in ("model", "request", "reply", "cohort", "probe", "join"):
                raise ErrorReply("forbidden")
            address = Address(*(question[key] for key in ("kind", "round", "exchange", "client")))
            wait = max(0.0, min(question["wait"], 3600))
            yield from self.reply_message(asker, address, wait)

    def reply_message(self, asker: str, address: Address, wait: float) -> Iterable[bytes]:
        ticket, end = object(), time.monotonic() + wait
        with self.changed:
            mine = self.open_questions.setdefault(asker, {})
            if address not in mine and len(mine) >= MAX_OPEN:
                raise ErrorReply("busy")
            mine[address] = ticket  # ends an earlier question for the same message
            self.changed.notify_all()
        try:
            with self.changed:
                while (parts := self.find(address, asker)) is None:
                    if mine.get(address) is not ticket:
                        raise ErrorReply("busy")
                    if self.closing:
                        raise ErrorReply("closing")
                    if time.monotonic() >= end:
                        raise ErrorReply("not_ready")
                    self.changed.wait(end - time.monotonic())
            for attachment, data in parts:
                yield struct.pack(">H", len(attachment)) + attachment + data
        finally:
            with self.changed:
                if mine.get(address) is ticket:
                    del mine[address]

    def find(self, address: Address, asker: str) -> list[Part] | None:
        """The chunks of a message, None if it may still come, or the reason why there is none."""
        if address in self.messages:
            to, parts = self.messages[address]
            if to not in ("", asker):
                raise ErrorReply("forbidden")
            if parts is None:
                raise ErrorReply("withheld")
            return parts
        if (
            address.kind == "probe"
            and (address.exchange, address.client) == (0, -1)
            and address.round >= -1
        ):
            return self.sealed(address, "", {"probe": np.zeros(2**20, np.uint8)})
        if self.newest > address.round:
            raise ErrorReply("gone")
        return None

    def sealed(self, address: Address, to: str, tensors: Tensors) -> list[Part]:
        manifest = {
            "run": self.run,
            "peer": self.me,
            "inc": self.inc,
            "to": to,
            "codec": "safetensors",
        }
        manifest |= {"schema": self.roster.top["schema"], **vars(address)}
        return seal(self.key, manifest, encode(tensors))

    def publish(self, address: Address, to: str, tensors: Tensors) -> None:
        finite = all(np.isfinite(tensor).all() for tensor in tensors.values())
        parts = self.sealed(address, to, tensors) if finite else None
        with self.changed:
            self.messages[address] = (to, parts)
            self.newest = max(self.newest, address.round)
            for old in [old for old in self.messages if old.round <= self.newest - KEPT_ROUNDS]:
                del self.messages[old]
            self.changed.notify_all()
        if not self.announced:  # with the node's first message
            self.announced = True
            self.say_to_all(True)

    def head(self, nonce: str) -> bytes:
        if not self.settings:
            raise ErrorReply("not_ready")
        text = canonical(
            {
                "run": self.run,
                "peer": self.me,
                "inc": self.inc,
                "nonce": nonce,
                "round": self.round,
                "state": self.state,
                "protocol": 1,
                "study": study_hash(self.settings),
                "schema": self.roster.top["schema"],
                "roster": self.roster.top["version"],
                "time": float(time.time()),
                "met": self.met,
                "settings": self.settings,
            }
        )
        return sign(self.key, "head", text) + text

    # Questions.

    def ask(
        self, member: str, method: str, question: dict[str, Any], wait: float
    ) -> Iterable[bytes]:
        """The parts of the answer to one question. Why there is none is raised; so is an empty answer."""
        call = self.channel(member).unary_stream(f"/{SERVICE}/{method}")(
            canonical({"run": self.run, **question}), timeout=wait
        )
        count = 0
        try:
            for part in call:
                count += 1
                yield part
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            code = error.code().name
            if code == "FAILED_PRECONDITION":
                with suppress(Refused, KeyError):
                    code = str(parse((error.details() or "").encode(), "error")["code"])
            elif code == "UNAVAILABLE":
                self.note_presence(member, False)
            raise ErrorReply(code) from None
        finally:
            call.cancel()
        if not count:
            raise ErrorReply("nothing")

    def ask_parts(self, member: str, address: Address, wait: float) -> Iterable[Part]:
        """The attachments and chunks of a message."""
        question = {**vars(address), "wait": round(0.8 * wait, 3)}
        for frame in self.ask(member, "Message", question, wait):
            (length,) = struct.unpack(">H", frame[:2]) if len(frame) >= 2 else (0,)
            yield frame[2 : 2 + length], frame[2 + length :]

    def read(self, member: str, address: Address, expected: Expected, wait: float) -> Tensors:
        parts = self.ask_parts(member, address, wait)
        try:
            tensors = self.reader.open(
                parts, member, self.roster.members[member]["key"], address, expected
            )
        except Refused as error:
            tell("refused", peer=member, code=error.code, detail=str(error))
            raise
        self.note_presence(member, True)
        self.read_count += 1
        self.last_read = (address.round, time.monotonic())
        return tensors

    def ask_head(self, member: str) -> dict[str, Any] | None:
        nonce = os.urandom(8).hex()
        try:
            reply = b"".join(self.ask(member, "Head", {"nonce": nonce}, HEAD_WAIT))
            return read_head(reply, self.roster.members[member]["key"], self.run, member, nonce)
        except (ErrorReply, Refused) as error:
            if isinstance(error, Refused):
                tell("refused", peer=member, code=error.code, detail=str(error))
            return None

    def ask_heads(self) -> dict[str, dict[str, Any]]:
        """The signed heads of all other members that answer."""
        with ThreadPoolExecutor(max(1, len(self.others()))) as pool:
            found = dict(zip(self.others(), pool.map(self.ask_head, self.others()), strict=True))
        return {name: head for name, head in found.items() if head is not None}

    # The beginning of a round, where a node takes a new roster.

    def begin(self, round: int) -> None:
        if self.round >= 0:
            self.pace = time.monotonic() - self.began
        self.round, self.began = round, time.monotonic()
        candidates = []
        try:
            if (self.folder / "roster.toml").read_bytes() != self.roster.data:
                candidates.append(Roster.load(self.folder, self.organizer))
            member = random.choice(self.others())
            head = self.ask_head(member)
            if head is not None and head["roster"] > self.roster.top["version"]:
                reply = b"".join(self.ask(member, "Roster", {}, HEAD_WAIT))
                candidates.append(Roster.read(reply[:64], reply[64:], self.organizer))
        except (ErrorReply, Refused, ValueError, OSError) as error:
            tell("roster_refused", error=str(error))
        for roster in candidates:
            if roster.top["version"] > self.roster.top["version"] and roster.top["run"] == self.run:
                self.take(roster)

    def take(self, roster: Roster) -> None:
        same = ("population", "study", "schema", "server", "clusters")
        if any(roster.top[name] != self.roster.top[name] for name in same):
            raise Refused("roster", "another study")
        self.check_roster(roster)
        if roster.members[self.me]["clients"] != self.roster.members[self.me]["clients"]:
            raise Refused("roster", "this node has other clients")
        with self.changed:
            for name, channel in list(self.channels.items()):
                if roster.members.get(name) != self.roster.members[name]:
                    channel.close()
                    del self.channels[name]
            self.roster = roster
        self.alive &= roster.members.keys()
        tell("roster", version=roster.top["version"])

    # ---------------------------------------------------------------------------------------------- Start and end

    def start(self) -> bool:
        """Meet the others. True if they began without this node."""
        heads: dict[str, dict[str, Any]] = {}
        end, others = time.monotonic() + self.start_wait, self.others()
        while len(heads) < len(others) and time.monotonic() < end:
            asked = time.monotonic()
            heads |= self.ask_heads()
            for head in heads.values():
                if not self.settings and study_hash(head["settings"]) == self.roster.top["study"]:
                    self.settings = head["settings"]
            if 2 * sum(
                head["state"] == "running" and head["round"] > 0 for head in heads.values()
            ) > len(others):
                break
            time.sleep(max(0, asked + PAUSE - time.monotonic()))
        if not self.settings:
            raise SystemExit("nobody told the settings of the study")
        self.rounds: int = self.settings["rounds"]
        own = (self.roster.top["study"], self.roster.top["schema"])
        self.left_out = {
            name for name, head in heads.items() if (head["study"], head["schema"]) != own
        }
        self.met = [name for name in heads if name not in self.left_out]
        self.state = "running"
        tell("met", met=self.met, left_out=sorted(self.left_out))
        return any(
            head["state"] == "running" and self.me not in head["met"] for head in heads.values()
        )

    def stay(self) -> None:
        """Answer until nobody needs this node any more, and leave."""
        known, change = dict[str, tuple[str, int]](), time.monotonic()
        while time.monotonic() < change + LINGER:
            heads = {
                name: (head["state"], head["round"]) for name, head in self.ask_heads().items()
            }
            for name in set(known) - set(heads):
                if name in self.alive:  # it was busy; otherwise it has left
                    heads[name] = known[name]
            if all(state != "running" for state, _ in heads.values()):
                break
            if heads != known:
                known, change = heads, time.monotonic()
            time.sleep(PAUSE)
        self.leave()

    def leave(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.say_to_all(False)
        self.listener.stop(5).wait()
        for channel in self.channels.values():
            channel.close()

    # -------------------------------------------------------------------------------------------------- Catching up

    def catch_up(self, round: int) -> int:
        """The round to go to: the newest that more than half of the others have reached."""
        heads = self.ask_heads()
        half = (len(self.roster.members) - 1) // 2
        reached = sorted((head["round"] for head in heads.values()), reverse=True)
        target = reached[half] if len(reached) > half else round
        if self.pace:  # others are at most ten times as fast, and keep eight rounds
            last, when = self.last_read
            target = min(
                target, last + KEPT_ROUNDS + int(10 * (time.monotonic() - when) / self.pace)
            )
        target = max(round, min(target, self.rounds - 1))
        if target > round:
            tell("catch_up", round=round, to=target)
        return target


# -------------------------------------------------------------------------------------- Exchanges, without a server


def dac(node: Node, data: Data, late: bool) -> Params:
    num_peers = min(node.settings["method.num_peers"], node.population - 1)
    expected: Expected = {
        "params": ("F32", (PARAMS,)),
        "field.samples": ("F32", ()),
        "field.similarity": ("F32", (node.population,)),
        "field.known": ("BOOL", (node.population,)),
    }
    similarity, known = np.zeros(node.population, np.float32), np.zeros(node.population, bool)
    params = data.train(np.zeros(PARAMS, np.float32))  # the warm-up
    round = node.catch_up(0) if late else 0
    while round < node.rounds:
        node.begin(round)
        node.publish(
            Address("model", round, 0, node.client),
            "",
            {
                "params": params,
                "field.samples": np.array(len(data.y), np.float32),
                "field.similarity": similarity,
                "field.known": known,
            },
        )
        hosts = {
            client: name
            for name in node.present()
            for client in node.roster.members[name]["clients"]
        }
        count = min(num_peers, len(hosts))
        peers = np.random.default_rng().choice(sorted(hosts), count, replace=False).tolist()
        with ThreadPoolExecutor(max(1, len(peers))) as pool:
            asked = {
                peer: pool.submit(
                    node.read,
                    hosts[peer],
                    Address("model", round, 0, peer),
                    expected,
                    node.deadline,
                )
                for peer in peers
            }
        models, missing = [params], {}
        for peer, answer in asked.items():
            try:
                models.append(answer.result()["params"])
                similarity[peer], known[peer] = data.similarity(models[-1]), True
            except (ErrorReply, Refused) as error:
                missing[peer] = error.code
        node.missed += num_peers - (len(models) - 1)
        mixed = np.average(models, axis=0, weights=[data.similarity(model) for model in models])
        params = data.train(mixed.astype(np.float32))
        tell(
            "round",
            round=round,
            read=len(models) - 1,
            missing=missing,
            accuracy=data.accuracy(params),
        )
        round = node.catch_up(round + 1) if "gone" in missing.values() else round + 1
    return params


# ----------------------------------------------------------------------------------------- Exchanges, with a server


class LeftOut(Exception):
    """The server went on without this client."""


def ask_server(node: Node, address: Address, expected: Expected) -> Tensors:
    """Ask again and again, until it comes or the server's signed head has passed the round."""
    pause, heard = 0.2, time.monotonic()
    while time.monotonic() < heard + SERVER_WAIT:
        try:
            return node.read(node.server, address, expected, 2 * node.deadline + 1)
        except (ErrorReply, Refused) as error:
            code = error.code
        head = node.ask_head(node.server)
        if head is not None:
            heard = time.monotonic()
            if head["round"] > address.round or (
                code == "absent" and head["round"] == address.round
            ):
                raise LeftOut(code)
        time.sleep(pause)
        pause = min(2 * pause, 5)
    raise SystemExit("the server does not answer")


def fedavg(node: Node, data: Data) -> Params:
    params = np.zeros(PARAMS, np.float32)

    def in_cohort(round: int, number: int) -> bool:
        found = ask_server(node, Address("cohort", round, number, -1), {"ids": ("I64", (None,))})
        return node.client in found["ids"]

    def exchange(round: int, number: int, tensors: Tensors, models: int) -> np.ndarray:
        """Publish a request, and ask for the reply, which shows this many models."""
        node.publish(Address("request", round, number, node.client), node.server, tensors)
        expected: Expected = {"table": ("F32", (models, PARAMS)), "index": ("I64", (models,))}
        return ask_server(node, Address("reply", round, number, node.client), expected)["table"]

    def fetch(round: int, cohort: int) -> Params:
        return exchange(round, 1024 * (cohort + 1), {"params": np.zeros(0, np.float32)}, 1)[0]

    def learn(round: int) -> None:  # 1
        if round >= 0 and in_cohort(round, 0):
            trained = data.train(fetch(round, 0))
            exchange(
                round,
                1025,
                {"params": trained, "field.samples": np.array(len(data.y), np.float32)},
                0,
            )

    def measure(round: int) -> None:  # 2
        nonlocal params
        first, last = (0 if round == -1 else 1), round == node.rounds - 1
        validates = round == -1 or (round + 1) % node.settings["validate_every"] == 0 or last
        for number in range(
            first, first + validates + (last and node.settings["evaluate"] == "final")
        ):
            if in_cohort(round, number):
                params = fetch(round, number)

    round = -1
    while round < node.rounds:
        node.begin(round)
        before, left_out = node.read_count, None
        for step in (learn, measure):
            try:
                step(round)
            except LeftOut as error:
                left_out = str(error)
                node.missed += 1
                if left_out != "absent":  # otherwise it is in step again at the next cohort
                    break
        tell(
            "round",
            round=round,
            read=node.read_count - before,
            left_out=left_out,
            accuracy=data.accuracy(params),
        )
        round = node.catch_up(round + 1) if left_out == "gone" else round + 1
    return params


# ---------------------------------------------------------------------------------------------------- The whole run


def take_part(node: Node, data: Data) -> Params:
    """From the start to the last round; the node goes on answering."""
    late = node.start()
    method = node.settings["method"]
    if method not in ("dac", "fedavg"):
        raise SystemExit(f"this program does not know the method {method}")
    params = dac(node, data, late) if method == "dac" else fedavg(node, data)
    node.round, node.state = node.rounds, "done"
    return params


def main(folder: Path, name: str, path: Path, *times: float) -> None:
    data, node = Data.load(path), Node(folder, name, *times)
    params = take_part(node, data)
    node.stay()
    result = {"rounds": node.rounds, "read": node.read_count, "missed": node.missed}
    tell("done", **result, accuracy=data.accuracy(params))


if __name__ == "__main__":
    if not 5 <= len(sys.argv) <= 7 or sys.argv[1] != "run":
        raise SystemExit("usage: stranger.py run FOLDER NAME DATA.npz [START [DEADLINE]]")
    main(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *map(float, sys.argv[5:]))
