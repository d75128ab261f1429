"""Damaged messages, questions and heads for tests; the same ones for the same random stream."""

import hashlib
import json
import random
from collections.abc import Callable

from coterie.net.wire import Parcel, canonical_json

Parts = list[tuple[bytes, bytes]]
_ODD = (
    "",
    "0",
    "-1",
    "1e9",
    "99999999999999999999",
    "nan",
    "inf",
    "x",
    "\u00e9",
    "1;1",
    "=",
    "*",
    "a" * 300,
)
_DOMAIN = b"coterie manifest 1\n"


def damage(part: bytes, draw: random.Random) -> bytes:
    """Flip bits of some bytes, cut some out, put some in: one to four times, half of them near the beginning."""
    out = bytearray(part)
    for _ in range(draw.randint(1, 4)):
        out += b"" if out else b"x"
        at, kind = draw.randrange(min(len(out), draw.choice([200, len(out)]))), draw.randrange(3)
        if kind == 0:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del out[at : at + draw.randint(1, 9)]
        else:
            out[at:at] = draw.randbytes(draw.randint(1, 9))
    return bytes(out)


def message(good: Parcel, sign: Callable[[bytes], bytes], draw: random.Random) -> Parts:
    """Return a damaged answer.

    Args:
        good: a message that would be read.
        sign: signs with the sender's key: half of the damage is signed, so that it gets as far as
            the payload's checks.
        draw: the random stream.
    """
    parts = [(attachment, bytes(chunk)) for attachment, chunk in good.iterate_chunks()]
    at = draw.randrange(len(parts))
    attachment, chunk = parts[at]
    kind = draw.randrange(8)
    if kind < 2:  # what a stranger on the way could change
        parts[at] = (damage(attachment, draw), chunk) if kind else (attachment, damage(chunk, draw))
    elif kind < 6:  # what a member signs
        payload = damage(good.payload, draw) if kind < 5 else good.payload
        manifest = {
            **json.loads(good.manifest),
            "bytes": len(payload),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        if kind == 5:
            key = draw.choice(sorted(manifest))
            manifest[key] = draw.choice(
                [None, -1, 1.5, 1 << 70, "", "x" * 70, [], {}, True, manifest[key]]
            )
        text = canonical_json(manifest)
        parts = [
            (a, bytes(c))
            for a, c in Parcel(text, sign(_DOMAIN + text), payload, good.chunk).iterate_chunks()
        ]
    elif kind == 6:
        parts = [
            *draw.sample(parts, draw.randint(0, len(parts))),
            (draw.randbytes(4), draw.randbytes(60)),
        ]
    else:
        parts = [(draw.randbytes(draw.randrange(200)), draw.randbytes(draw.randrange(400)))]
    return parts


def question(run: str, draw: random.Random) -> tuple[str, bytes]:
    """Return a damaged question: its method and its bytes."""
    method = draw.choice(["Message", "Message", "Message", "Head", "Roster", "Presence", "Pickle"])
    kind = draw.choice(["model", "request", "reply", "cohort", "probe", "head", "pickle"])
    fields: dict[str, object] = {
        "run": run, "kind": kind, "round": draw.randrange(-2, 9), "exchange": 0, "client": 0, "wait": 1.0,
    }  # fmt: skip
    if method != "Message":
        fields = {"run": run, "nonce": "abc", "here": True}
    for _ in range(draw.randrange(3)):
        odd = draw.choice([*_ODD, None, -1, 1.5, 1 << 70, [], {}, True, draw.randrange(-2, 9)])
        fields[draw.choice([*sorted(fields), *_ODD])] = odd
    text = json.dumps(fields).encode()
    return method, damage(text, draw) if draw.randrange(3) == 0 else text
