"""A member of a run that was written from docs/reference/wire.md alone: it imports nothing of Coterie.

    python stranger.py request NAME HOST FOLDER       make NAME.key and NAME.csr
    python stranger.py run FOLDER NAME DATA.npz       take part in the run of FOLDER/roster.toml

The folder holds roster.toml, roster.toml.sig, organizer.pub, ca.pem, NAME.key and NAME.pem. DATA.npz holds x, y,
x_validation and y_validation; the model is one linear layer. What happens is told on standard output, one JSON object a
line. It knows the peer-to-peer methods with one exchange a round, and FedAvg.
"""

import hashlib
import ipaddress
import json
import math
import secrets
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import zenoh
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.oid import NameOID

CHUNK = 512 * 1024
KEPT = 8
TYPES = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
NAMES = {np.dtype(code): name for name, code in TYPES.items()}
Tensors = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[str, tuple[int | None, ...]]]


class Refused(Exception):
    """What a member sent is not as it must be; the code is that of the page."""

    def __init__(self, code: str, text: str = "") -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


# ---------------------------------------------------------------- JSON, keys, signatures, hashes


def canonical(document: Any) -> bytes:
    """Canonical JSON."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def strict(text: bytes, code: str) -> Any:
    """Read JSON without a key that occurs twice, NaN or infinity."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) != len(items):
            raise Refused("duplicate_key", code)
        return dict(items)

    def constant(word: str) -> Any:
        raise ValueError(word)

    try:
        return json.loads(text.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Refused(code, str(error)) from None


def text_of(key: ec.EllipticCurvePublicKey) -> str:
    """The text of a public key."""
    form = serialization.PublicFormat.CompressedPoint
    return key.public_bytes(serialization.Encoding.X962, form).hex()


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """The fingerprint of a public key."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def sign(key: ec.EllipticCurvePrivateKey, what: str, data: bytes) -> bytes:
    """Sign data of some sort: "manifest", "head" or "roster"."""
    r, s = decode_dss_signature(key.sign(f"coterie {what} 1\n".encode() + data, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def signed_by(key: str, what: str, signature: bytes, data: bytes) -> bool:
    """Whether a signature is by the key of a text."""
    if len(signature) != 64:
        return False
    public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), bytes.fromhex(key))
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
    try:
        public.verify(encode_dss_signature(r, s), f"coterie {what} 1\n".encode() + data, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def study_hash(settings: Mapping[str, Any]) -> str:
    """The hash of the settings in a head."""
    return hashlib.sha256(canonical({k: v for k, v in settings.items() if k != "model.frozen"})).hexdigest()


def schema_hash(slots: list[tuple[str, list[int]]], dtype: str, trainable: int, *frozen: str) -> str:
    """The hash of a model's tensors."""
    return hashlib.sha256(canonical([slots, dtype, trainable, *frozen])).hexdigest()


def frozen_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """The digest of frozen weights; their types are those of PyTorch."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.shape} torch.{tensor.dtype}\n".encode() + tensor.tobytes())
    return digest.hexdigest()


def request(name: str, host: str, folder: Path) -> Path:
    """Make a key and a request for its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    try:
        where: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        where = x509.DNSName(host)
    csr = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.SubjectAlternativeName([where]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / f"{name}.key").touch(mode=0o600)
    (folder / f"{name}.key").write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    (folder / f"{name}.csr").write_bytes(csr.public_bytes(pem))
    return folder / f"{name}.csr"


# ---------------------------------------------------------------- the roster and the links


FIELDS: dict[str, type] = {
    "run": str, "population": int, "version": int, "protocol": int, "study": str, "schema": str, "server": str,
    "clusters": list, "issued": str, "removed": list, "members": list,
}  # fmt: skip
MEMBER: dict[str, type] = {
    "name": str, "address": str, "clients": list, "key": str, "certificate": str, "expires": str, "subject": str,
}  # fmt: skip


def read_roster(data: bytes, organizer: str) -> dict[str, Any]:
    """Read a roster as it travels: the signature, then the file."""
    if not signed_by(organizer, "roster", data[:64], data[64:]):
        raise Refused("signature", "the roster is not the organizer's")
    roster = tomllib.loads(data[64:].decode())
    for table, known in [(roster, FIELDS), *((member, MEMBER) for member in roster.get("members", []))]:
        for name, value in table.items():
            if type(value) is not known.get(name):
                raise Refused("roster", f"{name} is unknown or of another type")
    roster = {"version": 1, "protocol": 1, "server": "", "removed": [], **roster}
    clients = sorted([*roster["removed"], *(c for member in roster["members"] for c in member["clients"])])
    if roster["protocol"] != 1 or clients != list(range(roster["population"])):
        raise Refused("roster", "another protocol, or clients that are missing")
    return roster


def configuration(roster: Mapping[str, Any], me: str, folder: Path) -> dict[str, Any]:
    """The configuration of the engine, as on the page."""
    base = f"coterie/1/{roster['run']}"
    names = [member["name"] for member in roster["members"]]
    common = {member["name"]: member.get("subject") or member["name"] for member in roster["members"]}
    addresses = [f"tls/{member['address']}" for member in roster["members"]]
    place = names.index(me)
    watch = ["liveliness_query", "declare_liveliness_subscriber"]
    own = ["reply", "declare_queryable", "liveliness_token"]

    def rule(id: str, flow: str, messages: list[str], key: str) -> dict[str, Any]:
        return {"id": id, "permission": "allow", "flows": [flow], "messages": messages, "key_exprs": [f"{base}/{key}"]}

    rules = [
        rule("watch", "ingress", watch, "*/alive"), rule("out-mine", "egress", own, f"{me}/**"),
        rule("out-watch", "egress", watch, "*/alive"),
    ]  # fmt: skip
    subjects = [{"id": "members", "cert_common_names": [common[name] for name in names]}]
    policies = [{"rules": [one["id"] for one in rules], "subjects": ["members"]}]
    for name in names:
        rules.append(rule(f"own-{name}", "ingress", own, f"{name}/**"))
        rules.append(rule(f"ask-{name}", "ingress", ["query"], f"{me}/*/{name}"))
        subjects.append({"id": f"cn-{name}", "cert_common_names": [common[name]]})
        rules.append(rule(f"out-ask-{name}", "egress", ["query"], f"{name}/*/{me}"))
        own_rules = [f"own-{name}", f"ask-{name}", f"out-ask-{name}"]
        policies.append({"rules": own_rules, "subjects": [f"cn-{name}"]})
    pair = {"private_key": str(folder / f"{me}.key"), "certificate": str(folder / f"{me}.pem")}
    return {
        "mode": "peer",
        "listen": {"endpoints": [addresses[place]]},
        "connect": {
            "endpoints": addresses[:place], "timeout_ms": -1, "exit_on_failure": False,
            "retry": {"period_init_ms": 500, "period_max_ms": 2000, "period_increase_factor": 1.5},
        },
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "adminspace": {"enabled": False},
        "transport": {
            "unicast": {"accept_pending": 1000},
            "shared_memory": {"enabled": False},
            "link": {
                "protocols": ["tls"],
                "rx": {"max_message_size": 8388608},
                "tx": {"lease": 10000},
                "tls": {
                    "root_ca_certificate": str(folder / "ca.pem"),
                    **{f"{side}_{what}": path for side in ("listen", "connect") for what, path in pair.items()},
                    "enable_mtls": True, "verify_name_on_connect": True, "close_link_on_expiration": True,
                },
            },
        },
        "low_pass_filter": [
            {"id": f"cap-{kind}", "flows": ["ingress"], "messages": [kind], "key_exprs": ["coterie/**"],
             "size_limit": limit} for kind, limit in (("query", 65536), ("reply", 1048576))
        ],
        "access_control": {
            "enabled": True, "default_permission": "deny",
            "rules": rules, "subjects": subjects, "policies": policies,
        },
    }  # fmt: skip


# ---------------------------------------------------------------- messages


@dataclass(frozen=True)
class Place:
    """Round, exchange, client and kind of a message."""

    round: int
    exchange: int
    client: int
    kind: str = "model"


def write_payload(tensors: Tensors) -> bytes:
    """Write a payload: the tensors of the largest types first, so that each is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, position = {}, 0
    for name in order:
        tensor = tensors[name]
        end = position + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensors[name].tobytes() for name in order)


def read_payload(payload: bytes, shapes: Shapes, *, half: bool = False, gaps: bool = False) -> Tensors:
    """Read a payload of expected tensors; None in a shape is any length.

    Args:
        payload: the bytes.
        shapes: type and shape of each tensor.
        half: whether models travel as F16.
        gaps: whether extras with an axis may hold NaN.
    """
    size = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or size > min(65536, len(payload) - 8):
        raise Refused("header")
    header, data = strict(payload[8 : 8 + size], "header"), payload[8 + size :]
    if not isinstance(header, dict):
        raise Refused("header")
    if set(header) != set(shapes):
        raise Refused("names", f"{sorted(header)}")
    position, out = 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise Refused("header", name)
        kind, shape = shapes[name]
        sent = "F16" if half and name in ("params", "table") else kind
        if entry["dtype"] != sent:
            raise Refused("dtype", name)
        found, (begin, end) = entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and 0 <= number < 1 << 40 for number in [*found, begin, end]):
            raise Refused("header", name)
        if len(found) != len(shape) or any(w is not None and w != f for w, f in zip(shape, found, strict=True)):
            raise Refused("shape", f"{name} {found}")
        dtype = np.dtype(TYPES[sent])
        if begin != position or end - begin != math.prod(found) * dtype.itemsize or end > len(data):
            raise Refused("layout", name)
        position = end
        if sent == "BOOL" and any(byte > 1 for byte in data[begin:end]):
            raise Refused("boolean", name)
        value = np.frombuffer(data[begin:end], dtype).reshape(found)
        padded = gaps and name.startswith("field.") and value.ndim > 0
        if dtype.kind == "f" and not (np.isfinite(value) | (padded & np.isnan(value))).all():
            raise Refused("not_finite", name)
        out[name] = value.astype(TYPES[kind])
    if position != len(data):
        raise Refused("layout", "bytes that belong to no tensor")
    return out


MANIFEST: dict[str, tuple[type, Callable[[Any], bool]]] = {
    "v": (int, lambda v: True),
    "run": (str, lambda v: True),
    "peer": (str, lambda v: True),
    "inc": (int, lambda v: 0 <= v < 1 << 53),
    "round": (int, lambda v: -1 <= v < 1 << 31),
    "exchange": (int, lambda v: 0 <= v < 1 << 16),
    "client": (int, lambda v: -1 <= v < 1 << 31),
    "kind": (str, lambda v: v in ("model", "request", "reply", "cohort", "probe", "join")),
    "to": (str, lambda v: True),
    "codec": (str, lambda v: v in ("safetensors", "safetensors-f16")),
    "bytes": (int, lambda v: 0 <= v < 1 << 40),
    "chunk": (int, lambda v: 1024 <= v <= CHUNK),
    "sha256": (str, lambda v: len(v) == 64 and set(v) <= set("0123456789abcdef")),
    "schema": (str, lambda v: True),
}


@dataclass
class Reader:
    """Reads one message that was asked for, in the order of checks of the page.

    Args:
        run: the run's id.
        peer: who was asked.
        key: the text of its key.
        me: who asks.
        place: what was asked for.
        schema: of the roster.
        shapes: of the tensors.
        largest: the largest length of a payload.
        inc: the newest incarnation seen of the sender.
    """

    run: str
    peer: str
    key: str
    me: str
    place: Place
    schema: str
    shapes: Shapes
    largest: int
    inc: int = 0
    manifest: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    next: int = 0

    def feed(self, attachment: bytes, chunk: bytes) -> None:
        """Take the next chunk."""
        if len(attachment) < 4 or int.from_bytes(attachment[:4], "big") != self.next:
            raise Refused("chunk")
        if self.next == 0:
            self._open(attachment[4:68], attachment[68:])
        elif len(attachment) != 4:
            raise Refused("chunk")
        left = self.manifest["bytes"] - len(self.payload)
        if len(chunk) != min(left, self.manifest["chunk"]) or (self.next and not left):
            raise Refused("chunk")
        self.payload += chunk
        self.next += 1

    def _open(self, signature: bytes, text: bytes) -> None:
        if len(text) > 4096:
            raise Refused("manifest")
        if not signed_by(self.key, "manifest", signature, text):
            raise Refused("signature")
        m = strict(text, "manifest")
        if not isinstance(m, dict):
            raise Refused("manifest")
        if m.get("v") != 1:
            raise Refused("version")
        if set(m) != set(MANIFEST) or any(type(m[k]) is not t or not fits(m[k]) for k, (t, fits) in MANIFEST.items()):
            raise Refused("manifest")
        asked = self.place
        for code, fine in (
            ("run", m["run"] == self.run),
            ("sender", m["peer"] == self.peer),
            ("reader", m["to"] in ("", self.me)),
            ("address", Place(m["round"], m["exchange"], m["client"], m["kind"]) == asked),
            ("replay", m["inc"] >= self.inc),
            ("schema", m["schema"] == self.schema),
            ("size", m["bytes"] <= self.largest),
        ):
            if not fine:
                raise Refused(code)
        self.manifest = m

    def tensors(self) -> Tensors:
        """The tensors, when all chunks have come."""
        if not self.manifest or len(self.payload) != self.manifest["bytes"]:
            raise Refused("truncated")
        if hashlib.sha256(self.payload).hexdigest() != self.manifest["sha256"]:
            raise Refused("digest")
        half, gaps = self.manifest["codec"] == "safetensors-f16", self.place.kind == "request"
        return read_payload(self.payload, self.shapes, half=half, gaps=gaps)


@dataclass
class _Asked:
    """A question that waits for its message."""

    query: Any
    asker: str
    place: Place
    until: float


class Member:
    """A member of a run: links, questions, answers.

    Args:
        folder: its files.
        name: its name.
        tell: told what happens.
    """

    def __init__(self, folder: Path, name: str, tell: Callable[..., None]) -> None:
        self.folder, self.name, self.tell = folder, name, tell
        self.organizer = (folder / "organizer.pub").read_text().strip()
        signature = bytes.fromhex((folder / "roster.toml.sig").read_text().strip())
        self.sealed = signature + (folder / "roster.toml").read_bytes()
        self.roster = read_roster(self.sealed, self.organizer)
        key = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self.key = key
        self.members = {member["name"]: member for member in self.roster["members"]}
        self.others = [other for other in self.members if other != name]
        self.clients = self.members[name]["clients"]
        self.host = {client: other["name"] for other in self.members.values() for client in other["clients"]}
        if self.members[name]["key"] != text_of(key.public_key()):
            raise SystemExit(f"the roster has another key for {name}")
        self.base = f"coterie/1/{self.roster['run']}"
        self.inc = int(time.time())
        self.round, self.state, self.met, self.settings = -1, "starting", list[str](), dict[str, Any]()
        self.reasons: list[str] = []
        self._incs: dict[str, int] = {}
        self._kept: dict[Place, tuple[str, list[tuple[bytes, bytes]]]] = {}
        self.newest, self._waiting = -2, list[_Asked]()
        self._change, self._closing, self._token = threading.Condition(), False, None
        self.session = zenoh.open(zenoh.Config.from_json5(json.dumps(self.configuration())))
        channel = zenoh.handlers.FifoChannel(64)
        self._questions = self.session.declare_queryable(f"{self.base}/{name}/**", channel)
        self._threads = [threading.Thread(target=run) for run in (self._listen, self._give_up)]
        for thread in self._threads:
            thread.start()

    def configuration(self) -> dict[str, Any]:
        """The configuration of the engine."""
        return configuration(self.roster, self.name, self.folder)

    # ------------------------------------------------------------ answers

    def head(self, nonce: str) -> bytes:
        """How this member is."""
        text = canonical({
            "run": self.roster["run"], "peer": self.name, "inc": self.inc, "nonce": nonce, "round": self.round,
            "state": self.state, "protocol": 1, "study": self.roster["study"], "schema": self.roster["schema"],
            "roster": self.roster["version"], "time": time.time(), "met": self.met, "settings": self.settings,
        })  # fmt: skip
        return sign(self.key, "head", text) + text

    def _listen(self) -> None:
        for query in self._questions.handler:
            key = str(query.key_expr)
            parts = key.removeprefix(f"{self.base}/").split("/")
            if len(parts) != 3 or parts[0] != self.name or parts[2] not in self.members:
                self._refuse(query, "forbidden")
            elif parts[1] == "head":
                self._send(query, [(None, self.head(str(query.parameters).removeprefix("n=")))])
            elif parts[1] == "roster":
                self._send(query, [(None, self.sealed)])
            else:
                self._question(query, parts[1], parts[2])

    def _question(self, query: Any, kind: str, asker: str) -> None:
        try:
            given = dict(part.split("=", 1) for part in str(query.parameters).split(";"))
            place = Place(int(given["r"]), int(given["x"]), int(given["c"]), kind)
            until = time.monotonic() + min(float(given["w"]), 3600.0)
        except (ValueError, KeyError):
            self._refuse(query, "forbidden")
            return
        with self._change:
            self._waiting.append(_Asked(query, asker, place, until))
            self._change.notify_all()

    def _give_up(self) -> None:
        """Answer the questions that can be answered, and those that have waited long enough."""
        while True:
            with self._change:
                if self._closing:
                    return
                due = [(asked, found) for asked in self._waiting if (found := self.answer(asked)) is not None]
                for asked, _ in due:
                    self._waiting.remove(asked)
                if not due:
                    first = min((asked.until for asked in self._waiting), default=None)
                    self._change.wait(None if first is None else max(0.0, first - time.monotonic()))
            for asked, found in due:
                if isinstance(found, str):
                    self._refuse(asked.query, found)
                else:
                    self._send(asked.query, found)

    def answer(self, asked: _Asked) -> str | list[tuple[bytes, bytes]] | None:
        """The chunks of a message, the code of an error, or None while the question waits."""
        if asked.place in self._kept:
            to, chunks = self._kept[asked.place]
            return chunks if to in ("", asked.asker) else "forbidden"
        if asked.place.round < self.newest:
            return "gone"
        return "not_ready" if asked.until <= time.monotonic() else None

    def _send(self, query: Any, chunks: Any) -> None:
        try:
            with query:
                for attachment, chunk in chunks:
                    query.reply(query.key_expr, chunk, attachment=attachment)
        except zenoh.ZError as error:
            self.tell("not_sent", text=str(error))

    def _refuse(self, query: Any, code: str) -> None:
        try:
            with query:
                query.reply_err(canonical({"code": code, "round": self.newest}))
        except zenoh.ZError as error:
            self.tell("not_sent", text=str(error))

    def seal(self, place: Place, tensors: Tensors, to: str = "", **changes: Any) -> list[tuple[bytes, bytes]]:
        """Sign a message, and cut it into chunks; `changes` are other entries of the manifest."""
        payload = write_payload(tensors)
        manifest = canonical({
            "v": 1, "run": self.roster["run"], "peer": self.name, "inc": self.inc, "round": place.round,
            "exchange": place.exchange, "client": place.client, "kind": place.kind, "to": to, "codec": "safetensors",
            "bytes": len(payload), "chunk": CHUNK, "sha256": hashlib.sha256(payload).hexdigest(),
            "schema": self.roster["schema"], **changes,
        })  # fmt: skip
        first = sign(self.key, "manifest", manifest) + manifest
        return [
            (number.to_bytes(4, "big") + (first if number == 0 else b""), payload[number * CHUNK :][:CHUNK])
            for number in range(max(1, -(-len(payload) // CHUNK)))
        ]

    def publish(self, place: Place, tensors: Tensors, to: str = "") -> None:
        """Publish a message."""
        self.keep(place, self.seal(place, tensors, to), to)

    def keep(self, place: Place, chunks: list[tuple[bytes, bytes]], to: str = "") -> None:
        """Keep the chunks of a message for those who ask; from the first one on, the token says that this one lives."""
        with self._change:
            self._kept[place] = (to, chunks)
            self.newest = max(self.newest, place.round)
            rounds = sorted({known.round for known in self._kept})[-KEPT:]
            self._kept = {known: what for known, what in self._kept.items() if known.round in rounds}
            self._change.notify_all()
        if self._token is None:
            self._token = self.session.liveliness().declare_token(f"{self.base}/{self.name}/alive")

    # ------------------------------------------------------------ questions

    def _replies(self, selector: str, seconds: float) -> Iterator[Any]:
        channel = zenoh.handlers.FifoChannel(16)
        mode = zenoh.ConsolidationMode.NONE
        yield from self.session.get(f"{self.base}/{selector}", channel, timeout=seconds, consolidation=mode)

    def ask(self, place: Place, shapes: Shapes, seconds: float, peer: str = "") -> Tensors | str:
        """Ask for a message; return its tensors, or why there is none."""
        peer = peer or self.host[place.client]
        largest = 72 * 1024 + sum(
            np.dtype(TYPES[kind]).itemsize * math.prod(n if n is not None else 1 << 20 for n in shape)
            for kind, shape in shapes.values()
        )
        reader = Reader(
            self.roster["run"], peer, self.members[peer]["key"], self.name, place, self.roster["schema"], shapes,
            largest, self._incs.get(peer, 0),
        )  # fmt: skip
        question = f"r={place.round};x={place.exchange};c={place.client};w={0.8 * seconds:.3f}"
        try:
            for reply in self._replies(f"{peer}/{place.kind}/{self.name}?{question}", seconds):
                if reply.ok is None:
                    return self._why(reply.err.payload.to_bytes())
                attachment = reply.ok.attachment
                reader.feed(b"" if attachment is None else attachment.to_bytes(), reply.ok.payload.to_bytes())
            if not reader.next:
                return "unreachable"
            tensors = reader.tensors()
        except Refused as refused:
            return f"refused:{refused.code}"
        self._incs[peer] = reader.manifest["inc"]
        return tensors

    @staticmethod
    def _why(payload: bytes) -> str:
        try:
            return str(strict(payload, "error")["code"])
        except (Refused, KeyError, TypeError):
            return "unreachable"

    def head_of(self, peer: str) -> dict[str, Any] | None:
        """Ask a member for its head; None when none came, or one that is not right."""
        nonce = secrets.token_hex(8)
        for reply in self._replies(f"{peer}/head/{self.name}?n={nonce}", 2.0):
            if reply.ok is None:
                return None
            data = reply.ok.payload.to_bytes()
            if len(data) > 65600 or not signed_by(self.members[peer]["key"], "head", data[:64], data[64:]):
                return None
            head = strict(data[64:], "head")
            right = (head["run"], head["peer"], head["nonce"]) == (self.roster["run"], peer, nonce)
            return head if right and type(head["time"]) is float else None
        return None

    def meet(self, seconds: float = 300.0) -> None:
        """Wait for the others, and learn the settings of the study from one of them."""
        until, found = time.monotonic() + seconds, dict[str, dict[str, Any]]()
        while len(found) < len(self.others) and time.monotonic() < until:
            for peer in self.others:
                if peer not in found and (head := self.head_of(peer)) is not None:
                    found[peer] = head
            if len(found) < len(self.others):
                time.sleep(0.5)
        same = [head for head in found.values() if (head["study"], head["schema"]) == self.agreed]
        right = [head["settings"] for head in same if study_hash(head["settings"]) == self.roster["study"]]
        if not right:
            raise SystemExit("nobody runs the study of the roster")
        self.settings, self.met, self.state = right[0], sorted(found), "running"
        self.tell("met", peers=self.met)

    @property
    def agreed(self) -> tuple[str, str]:
        """The hashes on the roster."""
        return self.roster["study"], self.roster["schema"]

    def close(self, seconds: float = 120.0) -> None:
        """Say that this one is done, stay until nobody is running any more or nobody makes progress, and leave."""
        self.state = "done"
        until, before = time.monotonic() + seconds, None
        while time.monotonic() < until:
            heads = [self.head_of(peer) for peer in self.others]
            now = [(head["state"], head["round"]) for head in heads if head is not None]
            if all(state != "running" for state, _ in now):
                break
            if now != before:
                before, until = now, time.monotonic() + seconds
            time.sleep(0.5)
        self.leave()

    def leave(self) -> None:
        """Undeclare all, and close."""
        with self._change:
            self._closing = True
            waiting, self._waiting = self._waiting, []
            self._change.notify_all()
        for asked in waiting:
            self._refuse(asked.query, "closing")
        if self._token is not None:
            self._token.undeclare()
        self._questions.undeclare()
        for thread in self._threads:
            thread.join()
        self.session.close()


# ---------------------------------------------------------------- the model, and the rounds


class Linear:
    """One linear layer with softmax and cross-entropy: a row of the weights (outputs × inputs), then the biases."""

    def __init__(self, inputs: int, classes: int) -> None:
        self.shape, self.size = (classes, inputs), classes * (inputs + 1)
        self.slots = [("1.weight", [classes, inputs]), ("1.bias", [classes])]

    def outputs(self, row: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Logarithms of the probabilities."""
        cut = self.shape[0] * self.shape[1]
        z = x @ row[:cut].reshape(self.shape).T.astype(np.float64) + row[cut:]
        z = z - z.max(1, keepdims=True)
        return z - np.log(np.exp(z).sum(1, keepdims=True))

    def loss(self, row: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        """Mean cross-entropy."""
        return float(-self.outputs(row, x)[np.arange(len(y)), y].mean())

    def accuracy(self, row: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
        """Share of right answers."""
        return float((self.outputs(row, x).argmax(1) == y).mean())

    def trained(self, row: np.ndarray, x: np.ndarray, y: np.ndarray, steps: int = 20, lr: float = 0.1) -> np.ndarray:
        """The model after some steps of gradient descent on all samples."""
        row, truth = row.astype(np.float64), np.eye(self.shape[0])[y]
        for _ in range(steps):
            error = (np.exp(self.outputs(row, x)) - truth) / len(y)
            row = row - lr * np.concatenate([(error.T @ x).ravel(), error.sum(0)])
        return row.astype(np.float32)


class Player:
    """Takes part in a run with one client.

    Args:
        member: the member.
        data: x, y, x_validation, y_validation.
    """

    def __init__(self, member: Member, data: Mapping[str, np.ndarray]) -> None:
        self.member, self.data = member, data
        (self.client,) = member.clients
        self.model = Linear(data["x"].shape[1], int(data["classes"]))
        dtype = "torch.float32"
        if schema_hash(self.model.slots, dtype, self.model.size) != member.roster["schema"]:
            raise SystemExit("the run has another model")
        self.row = np.zeros(self.model.size, np.float32)
        self.first = self.row
        self.read = self.missed = 0
        self.random = np.random.default_rng(self.client)

    def train(self) -> None:
        """Train on the own data."""
        self.row = self.model.trained(self.row, self.data["x"], self.data["y"])

    def wanted(self) -> Shapes:
        """The tensors of a message of this method, by the table of the documents."""
        shapes: dict[str, tuple[str, tuple[int | None, ...]]] = {
            "params": ("F32", (self.model.size,)), "field.samples": ("F32", ())
        }  # fmt: skip
        if self.member.settings["method"] in ("dac", "dac-var"):
            everybody = (self.member.roster["population"],)
            shapes |= {"field.similarity": ("F32", everybody), "field.known": ("BOOL", everybody)}
        return shapes

    def message(self, row: np.ndarray, **changes: Any) -> Tensors:
        """What this client publishes: it has measured nobody yet, as far as others hear."""
        plain = {name: np.zeros([n or 0 for n in shape], TYPES[kind]) for name, (kind, shape) in self.wanted().items()}
        return {**plain, "params": row, "field.samples": np.array(len(self.data["y"]), "<f4"), **changes}

    def publish(self, round: int) -> None:
        """Publish this round's message."""
        self.member.publish(Place(round, 0, self.client), self.message(self.row))

    def round(self, round: int) -> None:
        """Publish, read peers, average those that are no worse than a model that has learned nothing, train."""
        settings, population = self.member.settings, self.member.roster["population"]
        self.publish(round)
        peers = [c for c in range(population) if c != self.client and c in self.member.host]
        count = min(settings["method.num_peers"], len(peers))
        models, weights = [self.row], [float(len(self.data["y"]))]
        bound = self.model.loss(self.first, self.data["x_validation"], self.data["y_validation"])
        for peer in self.random.choice(peers, count, replace=False).tolist():
            found = self.member.ask(Place(round, 0, peer), self.wanted(), 60.0)
            if isinstance(found, str):
                self.missed += 1
                self.member.tell("missing", round=round, client=peer, reason=found)
                continue
            self.read += 1
            loss = self.model.loss(found["params"], self.data["x_validation"], self.data["y_validation"])
            if loss <= bound:
                models.append(found["params"])
                weights.append(float(found["field.samples"]))
        self.row = np.average(models, axis=0, weights=weights).astype(np.float32)
        self.train()

    # ------------------------------------------------------------ with a server

    def cohort(self, round: int, number: int) -> list[int]:
        """Ask the server for a cohort."""
        found = self.insist(Place(round, number, -1, "cohort"), {"ids": ("I64", (None,))})
        return found["ids"].tolist()

    def insist(self, place: Place, shapes: Shapes) -> Tensors:
        """Ask the server until it answers."""
        pause = 0.2
        while isinstance(found := self.member.ask(place, shapes, 61.0, self.member.roster["server"]), str):
            self.member.tell("waiting", round=place.round, reason=found)
            self.missed += 1
            time.sleep(pause)
            pause = min(2 * pause, 5.0)
        self.read += 1
        return found

    def serve(self, round: int, exchange: int, tensors: Tensors, models: int) -> Tensors:
        """Send a request, and return the answer, which shows some models."""
        place = Place(round, exchange, self.client, "request")
        self.member.publish(place, tensors, to=self.member.roster["server"])
        shapes: Shapes = {
            "table": ("F32", (models or None, self.model.size)), "index": ("I64", (models,))
        }  # fmt: skip
        return self.insist(Place(round, exchange, self.client, "reply"), shapes)

    def fetch(self, round: int, exchange: int) -> np.ndarray:
        """Fetch the server's model."""
        return self.serve(round, exchange, {"params": np.zeros(0, np.float32)}, 1)["table"][0]

    def served_round(self, round: int) -> None:
        """A round of FedAvg; round -1 is the warm-up."""
        number = 0
        if round >= 0:
            if self.client in self.cohort(round, 0):
                self.row = self.fetch(round, 1024)
                self.train()
                self.serve(round, 1025, self.message(self.row), 0)
            number = 1
        if round < 0 or (round + 1) % self.member.settings["validate_every"] == 0:
            self.cohort(round, number)
            self.row = self.fetch(round, 1024 * (number + 1))

    # ------------------------------------------------------------ the whole run

    def run(self) -> None:
        """Take part from the start to the end."""
        member, served = self.member, bool(self.member.roster["server"])
        member.meet()
        if served:
            self.served_round(-1)
        else:
            self.train()
        for round in range(member.settings["rounds"]):
            member.round = round
            self.served_round(round) if served else self.round(round)
            member.tell("round", round=round, read=self.read)
        member.round = member.settings["rounds"]
        score = self.model.accuracy(self.row, self.data["x_validation"], self.data["y_validation"])
        member.tell("done", read=self.read, missed=self.missed, accuracy=score)


def tell(event: str, **details: Any) -> None:
    """Tell what happens."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"time": now, "event": event, **details}), flush=True)


def main(arguments: list[str]) -> None:
    """Run a command."""
    command, *rest = arguments
    if command == "request":
        name, host, folder = rest
        request(name, host, Path(folder))
        return
    folder, name, data = rest
    member = Member(Path(folder), name, tell)
    try:
        Player(member, dict(np.load(data))).run()
        member.close()
    except BaseException:
        member.leave()
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
