"""Payloads: named tensors as untrusted safetensors bytes, read strictly against a template.

Only the tensors of the template are accepted: no other tensor, type or shape, no key twice, no gap
between tensors, no NaN. safetensors is a JSON header and raw numbers, so reading runs no code; this
reader accepts a subset of the files that the safetensors library accepts, with the same values.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.errors import TransportError

# Bytes: a line of some 100 for each tensor. A message has few of them, as a model is one row.
MAX_HEADER = 64 * 1024
TENSOR = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_DTYPES = {  # in the order of safetensors, which writes the tensors of a later one first
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "F16": torch.float16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}


def escape_text(text: object, most: int = 200) -> str:
    """Return a text that comes from others, in at most so many characters that can be printed."""
    # Cut twice: before, so that little is escaped, and after, because an escape is longer.
    shown = str(text)[:most]
    if not (shown.isascii() and shown.isprintable()):
        shown = "".join(map(_escape_character, shown))
    return shown[:most]


def _escape_character(character: str) -> str:
    return character if " " <= character <= "~" else ascii(character)[1:-1]


class Refused(TransportError):
    """A message failed a check, and why.

    The text is escaped and cut, because it may quote what another member sent.

    Args:
        code: a short word for counting: "signature", "digest", "shape", ...
        text: what was found and what was expected.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {escape_text(text, 300)}")
        self.code = code


@dataclass(frozen=True)
class Template:
    """The tensors that a payload must have.

    Args:
        tensors: data type and shape of each tensor; a string in a shape is an axis whose length the
            message chooses, the same wherever the string occurs.
        free: further tensors are allowed if their names start with this (a server's extras); "" for
            none.
        lead: the first axis of those.
        halved: the tensors that travel as float16 under the codec "safetensors-f16".
        gaps: the tensors that may hold NaN, where it stands for "no value here"; infinity never.
        max_bytes: the payload's largest length.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int | str, ...]]]
    free: str = ""
    lead: str = ""
    halved: frozenset[str] = frozenset()
    gaps: frozenset[str] = frozenset()
    max_bytes: int = 1 << 30

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor],
        halved: frozenset[str] = frozenset(),
        gaps: frozenset[str] = frozenset(),
    ) -> "Template":
        """Return the template of messages with the same tensors as this one."""
        shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        return Template(
            shapes,
            halved=halved,
            gaps=gaps,
            # 8 bytes hold the length of the header.
            max_bytes=sum(t.nbytes for t in tensors.values()) + MAX_HEADER + 8,
        )


def encode(
    tensors: Mapping[str, Tensor],
    *,
    half: frozenset[str] = frozenset(),
    gaps: frozenset[str] = frozenset(),
) -> bytes:
    """Return tensors as safetensors bytes.

    Args:
        tensors: by name.
        half: the names that travel as float16.
        gaps: the names that may hold NaN.

    Raises:
        Refused: when a value is not finite, or does not fit into half precision.
    """
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # Before the check: a value beyond half precision becomes infinite, and is refused.
        tensor = tensor.half() if name in half else tensor
        if not _is_usable(tensor, name in gaps):
            raise Refused(
                "not_finite", f"{name} holds NaN, infinity or values beyond its type on the wire"
            )
        out[name] = tensor
    return _encode_safetensors(out)


def _encode_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of `safetensors.torch.save`, with one copy of the numbers, not three."""
    order = list(_DTYPES.values())
    # The order of the library, so that the bytes are the same: later types first, then by name.
    names = sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name))
    header, at = dict[str, Any](), 0
    for name in names:
        tensor = tensors[name]
        kind = next(word for word, dtype in _DTYPES.items() if dtype == tensor.dtype)
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces up to a multiple of 8 align the numbers that follow.
    text += b" " * (-len(text) % 8)
    # Views of the memory, which `join` copies once.
    parts = [tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in names]
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def tensor_names(payload: bytes) -> list[str]:
    """Return the sorted tensor names in safetensors bytes that this program made."""
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    return sorted(name for name in header if name != "__metadata__")


def parse_strict_json(text: bytes, what: str) -> Any:
    """Read untrusted JSON: no key twice, no NaN, no deep nesting.

    Raises:
        Refused: when it is not JSON of that kind.
    """

    def check_pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            raise Refused("duplicate_key", f"a key occurs twice in the {what}")
        return out

    def refuse_constant(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(
            text.decode(), object_pairs_hook=check_pairs, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise Refused(what, f"not JSON: {str(error)[:80]}") from None


def decode(payload: bytearray, template: Template, *, half: bool = False) -> dict[str, Tensor]:
    """Read safetensors bytes that must match a template.

    Args:
        payload: the bytes; the tensors share its memory.
        template: the template.
        half: whether the template's `halved` tensors came as float16; they are widened.

    Raises:
        Refused: with code "header", "duplicate_key", "names", "dtype", "shape", "layout", "boolean"
            or "not_finite".
    """
    entries, start = _decode_header(payload)
    missing = set(template.tensors) - set(entries)
    extra = set(entries) - set(template.tensors)
    if template.free:
        extra = {name for name in extra if not name.startswith(template.free)}
    if missing or extra:
        raise Refused("names", f"missing {sorted(missing)[:5]}, not expected {sorted(extra)[:5]}")
    axes: dict[str, int] = {}
    position, out = 0, {}
    # By place: each tensor begins where the one before ends, so no byte is unused or used twice.
    # By their ends too, since an empty tensor begins where the next one does.
    for name, (dtype, shape, begin, end) in sorted(
        entries.items(), key=lambda e: (e[1][2], e[1][3])
    ):
        _check_shape(name, dtype, shape, template, axes, half)
        count = math.prod(shape)
        if begin != position or end - begin != count * dtype.itemsize or end > len(payload) - start:
            raise Refused(
                "layout",
                f"{name} lies at {begin} to {end}; expected {count * dtype.itemsize} bytes",
            )
        position = end
        out[name] = _decode_tensor(name, payload, start + begin, dtype, shape, count)
        if not _is_usable(out[name], name in template.gaps):
            raise Refused("not_finite", f"{name} holds NaN or infinity")
        if half and name in template.halved:
            out[name] = out[name].to(template.tensors[name][0])
    if position != len(payload) - start:
        raise Refused("layout", f"{len(payload) - start - position} bytes belong to no tensor")
    return out


def _decode_tensor(
    name: str, payload: bytearray, at: int, dtype: torch.dtype, shape: tuple[int, ...], count: int
) -> Tensor:
    # `torch.frombuffer` refuses a count of 0.
    if not count:
        return torch.zeros(shape, dtype=dtype)
    if dtype == torch.bool:
        raw = torch.frombuffer(payload, dtype=torch.uint8, count=count, offset=at)
        # A bool that is neither 0 nor 1 has no defined meaning in torch.
        if bool((raw > 1).any()):
            raise Refused("boolean", f"{name} holds bytes that are neither 0 nor 1")
        return (raw == 1).reshape(shape)
    if at % dtype.itemsize:
        raise Refused("layout", f"{name} is not aligned")
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=at).reshape(shape)


def _is_usable(tensor: Tensor, gaps: bool) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if gaps:
        return not bool(torch.isinf(tensor).any())
    least, most = torch.aminmax(tensor)  # one pass without a copy; both are NaN when a value is
    return bool(torch.isfinite(least) & torch.isfinite(most))


def _decode_header(
    payload: bytearray,
) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...], int, int]], int]:
    # What the sender claims: it is bounded before anything of that length is read.
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or length > min(MAX_HEADER, len(payload) - 8):
        raise Refused("header", f"a header of {length} bytes in a payload of {len(payload)}")
    document = parse_strict_json(bytes(payload[8 : 8 + length]), "header")
    if not isinstance(document, dict):
        raise Refused("header", "expected a JSON object")
    out = {}
    for name, entry in document.items():
        if not TENSOR.fullmatch(name) or name == "__metadata__":
            raise Refused("names", f"{name[:40]!r} is no name of a tensor")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise Refused("header", f"{name} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise Refused(
                "dtype", f"{name} has type {str(dtype)[:20]}; expected one of {', '.join(_DTYPES)}"
            )
        if not (
            _are_naturals(shape)
            and _are_naturals(offsets)
            and len(shape) <= 8
            and len(offsets) == 2
        ):
            raise Refused("header", f"{name} has a shape or offsets that are not natural numbers")
        out[name] = (_DTYPES[dtype], tuple(shape), offsets[0], offsets[1])
    return out, 8 + length


def _are_naturals(value: Any) -> bool:
    # By the exact type, since a bool is an int, too.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in value)


def _check_shape(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    template: Template,
    axes: dict[str, int],
    half: bool,
) -> None:
    if name in template.tensors:
        wanted, pattern = template.tensors[name]
        wanted = torch.float16 if half and name in template.halved else wanted
    else:
        # A free tensor brings its own type and shape; the template knows its first axis alone.
        wanted, pattern = dtype, (template.lead, *shape[1:])
    if dtype != wanted:
        raise Refused("dtype", f"{name} is {dtype}; expected {wanted}")
    fits = len(shape) == len(pattern)
    # Unequal lengths do not fit, which the line before has noted.
    for found, axis in zip(shape, pattern, strict=False):
        # An axis with a name takes the first length that it meets.
        fits &= found == (axes.setdefault(axis, found) if isinstance(axis, str) else axis)
    if not fits:
        raise Refused("shape", f"{name} has shape {shape}; expected {pattern}")
