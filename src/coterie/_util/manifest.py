"""Manifests: the digests of a folder's files, in the folder, so that no damage goes unseen.

`B2SUMS` has a line "<BLAKE2b-256 in hexadecimal>  <name>" for each file, as `b2sum --check` reads
it. The files of a folder are replaced together: first the manifest, with the old and the new
digests, then the files, then the manifest with the new digests alone. So a folder is whole at every
moment, also for a reader and after a kill.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from coterie._util.files import replace_atomically, write_atomically

FILE = "B2SUMS"
Content = bytes | Callable[[Path], None]
"""The bytes of a file, or a function that writes them to a path."""

# Two spaces, as `b2sum` writes them for a file read as text.
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
_Digests = dict[str, frozenset[str]]


def replace_files(
    folder: Path, contents: Mapping[str, Content], rotate: Mapping[str, str] | None = None
) -> None:
    """Replace files of a folder, and list their digests in its manifest.

    One process at a time may do so: the caller has claimed the folder (`claims.claim_folder`).

    Args:
        folder: an existing folder.
        contents: the new files, by name; they are put into place in this order.
        rotate: names under which the previous versions of some files are stored, if they are
            whole.

    Raises:
        OSError: from the system; every file is then the old or the new one, and the manifest knows
            both.
    """
    before = _load_manifest(folder)
    kept = {}
    for name, older in (rotate or {}).items():
        if not describe_fault(folder, name):  # a damaged file must not replace a whole one
            kept[name] = older
    with ExitStack() as files:
        fresh: _Digests = {}
        # the stack closes in reverse: the file that is opened last is put into place first
        for name, content in reversed(list(contents.items())):
            temporary = files.enter_context(replace_atomically(folder / name))
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                content(temporary)
            fresh[name] = frozenset({_compute_digest(temporary)})
        for name, older in kept.items():
            fresh[older] = before[name]
        # until all files are in place, both the old and the new version of each count as whole
        both = dict(before)
        for name, digests in fresh.items():
            both[name] = before.get(name, frozenset()) | digests
        _write_manifest(folder, both)
        for name, older in kept.items():
            os.replace(folder / name, folder / older)
    # All files are in place: the digests of their old versions go.
    _write_manifest(folder, before | fresh)


def describe_fault(folder: Path, name: str) -> str:
    """Describe what is wrong with a file: missing, not listed, or not as written; "" if whole.

    A folder without a manifest lists nothing.
    """
    listed = _load_manifest(folder)
    while True:
        try:
            found = _compute_digest(folder / name)
        except FileNotFoundError:
            found = ""
        if found in listed.get(name, ()):
            return ""
        read, listed = listed, _load_manifest(folder)
        if read == listed:  # otherwise another process replaced files meanwhile: look again
            break
    if not found:
        return f"{name} is missing"
    if not (folder / FILE).exists():
        return f"{FILE} is missing, which has the digest of {name}"
    return f"{name} is damaged: it is not what {FILE} lists"


def load_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file in a folder's manifest; no process may be writing there."""
    digests = {}
    for name, found in sorted(_load_manifest(folder).items()):
        if len(found) == 1:
            (digests[name],) = found
    return digests


def _compute_digest(path: Path) -> str:
    # 32 bytes: as many hexadecimal digits as `_LINE` reads, and `b2sum -l 256` writes.
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _load_manifest(folder: Path) -> _Digests:
    """Return the digests of each file: two while it is being replaced."""
    try:
        # A damaged manifest lists fewer files; it does not raise here.
        text = (folder / FILE).read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return {}
    out: _Digests = {}
    for line in map(_LINE.fullmatch, text.splitlines()):
        if line:
            out[line[2]] = out.get(line[2], frozenset()) | {line[1]}
    return out


def _write_manifest(folder: Path, listed: _Digests) -> None:
    lines = []
    for name in sorted(listed):
        lines += [f"{digest}  {name}\n" for digest in sorted(listed[name])]
    write_atomically(folder / FILE, "".join(lines).encode())
