"""Frozen weights on the disk: one file for all runs of a study, or of all points of a sweep.

Each run's folder has the file under its own name, so that it can be moved, copied and deleted like
any other. The runs of a study link one file, which lies in the study's folder, or in that of its
sweep, under the digest of its tensors. Where the file system has no links, each run has a copy.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

MIN_BYTES = 1 << 16
"""Smaller frozen weights are stored with the other values of each run."""

PREFIX = "frozen-"
"""With which the names of these files begin."""

FOLDER = ".frozen"
"""The folder of a study or a sweep with the files that its runs link."""


def name_file(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the file of some frozen weights; "" where they are small.

    Args:
        tensors: the weights, by name.

    Example:
        >>> name_file({"bias": torch.zeros(3)})
        ''
    """
    if sum(tensor.nbytes for tensor in tensors.values()) < MIN_BYTES:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().data)
    return f"{PREFIX}{digest.hexdigest()}.safetensors"


def find_shared_folder(run: Path) -> Path | None:
    """Return where the runs of a plan keep what they share; None for a run outside a study.

    Args:
        run: the folder of a run.
    """
    if not run.name.startswith("seed-"):
        return None
    study = run.absolute().parents[1]
    above = study.parent
    # The rule of `find_studies`: a sweep has a configuration, and no data.
    is_sweep = (above / "config.toml").exists() and not (above / "federation.json").exists()
    return (above if is_sweep else study) / FOLDER


def write_file(tensors: Mapping[str, Tensor], name: str, folder: Path | None, path: Path) -> None:
    """Write frozen weights into a file, which is a link where another run has them already.

    Args:
        tensors: the weights, by name.
        name: of the file; see `name_file`.
        folder: of the run; None for a file of its own.
        path: the file.
    """
    shared = None if folder is None else find_shared_folder(folder)
    if shared is None or folder is None:
        _save(tensors, path)
        return
    # A rename of one link onto another of the same file would leave both.
    (folder / name).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    if not _holds(shared / name, tensors):
        shared.mkdir(exist_ok=True)
        _place_shared(tensors, shared / name)
    try:
        os.link(shared / name, path)
    except OSError:
        shutil.copyfile(shared / name, path)


def load_file(path: Path) -> dict[str, Tensor]:
    """Load frozen weights, by name."""
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _place_shared(tensors: Mapping[str, Tensor], place: Path) -> None:
    """Write the file that runs link; the first of several processes that do so counts."""
    temporary = place.with_name(f".{uuid.uuid4().hex[:12]}.tmp")
    try:
        _save(tensors, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if place.exists() and not _holds(place, tensors):  # damaged
            os.replace(temporary, place)
            return
        try:
            os.link(temporary, place)
        except FileExistsError:
            return  # another process was first
        except OSError:  # no links here
            os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a file is there and holds these tensors, bit by bit."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError):
        return False
    if found.keys() != tensors.keys():
        return False
    return all(_is_same(found[name], tensor) for name, tensor in tensors.items())


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # As bytes: NaN is equal to itself.
    pair = (each.detach().cpu().contiguous().flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(*pair)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    # Views and tied weights share memory, which safetensors refuses.
    plain = {}
    for name, tensor in tensors.items():
        plain[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    save_file(plain, path)
