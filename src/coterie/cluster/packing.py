"""Pack what goes to a worker: objects as bytes and arrays, and custom modules.

Arrays and tensors are separate from the other bytes (pickle's protocol 5), so that Ray holds each
once a machine and every worker there reads it in place. Everything here is sent between processes
of one user's own cluster, over connections that Ray makes; nothing is unpickled that a stranger
could have sent.
"""

import ast
import importlib
import io
import pickle
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie._util.importing import is_installed
from coterie.errors import ConfigError

LARGEST = 64 * 2**20
"""The largest size in bytes of custom modules that are sent."""


@dataclass(frozen=True)
class Packed:
    """An object as bytes.

    Args:
        head: the pickled object without its arrays.
        arrays: the bytes of its arrays and tensors, which must not be changed.
    """

    head: bytes
    arrays: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return len(self.head) + sum(array.nbytes for array in self.arrays)


def pack(value: Any) -> Packed:
    """Return an object as bytes; its arrays are not copied.

    Functions and classes of a script or a notebook are included; those of a module are found by its
    name.
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            # The exact type: a Parameter or another subclass would come back as a plain Tensor.
            if type(obj) is torch.Tensor and _fits_numpy(obj):
                return _make_tensor, (obj.numpy(),)
            return super().reducer_override(obj)

    arrays: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    # Protocol 5 gives large buffers to the callback, instead of copying them into the stream.
    Pickler(file, protocol=5, buffer_callback=arrays.append).dump(value)
    return Packed(file.getvalue(), tuple(np.frombuffer(array.raw(), np.uint8) for array in arrays))


def unpack(packed: Packed) -> Any:
    """Return the object; it shares the memory of `packed`, so its arrays must not be changed."""
    # Only bytes of the own cluster come here; see the module.
    return pickle.loads(packed.head, buffers=packed.arrays)


def _fits_numpy(tensor: torch.Tensor) -> bool:
    """Whether numpy can hold a tensor in place."""
    # numpy has no bfloat16, and no lazy conjugation or negation.
    known = tensor.dtype != torch.bfloat16 and not (tensor.is_conj() or tensor.is_neg())
    return (
        known
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
    )


def _make_tensor(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch warns that the array cannot be written to, which no code here does.
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def find_named_modules(settings: Any) -> set[str]:
    """Return the modules that the import paths in a table of settings name.

    Example:
        >>> settings = {"methods": [{"kind": "lab.rules:Mine"}], "loss": "lab.losses:focal"}
        >>> sorted(find_named_modules({**settings, "name": "a: b"}))
        ['lab.losses', 'lab.rules']
    """
    if isinstance(settings, Mapping):
        # An import path can stand anywhere in the settings, so all values are searched.
        return set().union(*map(find_named_modules, settings.values()))
    if isinstance(settings, list | tuple):
        return set().union(*map(find_named_modules, settings))
    if not isinstance(settings, str):
        return set()
    module, colon, name = settings.partition(":")
    is_path = all(part.isidentifier() for part in f"{module}.{name}".split("."))
    return {module} if colon and is_path else set()


def find_defining_modules(value: Any) -> set[str]:
    """Return the names of the modules that a function, a class or an object comes from.

    Example:
        >>> sorted(find_defining_modules(np.load))
        ['builtins', 'numpy']
    """
    # An instance names the module of its class, and a function its own.
    return {getattr(value, "__module__", None) or type(value).__module__, type(value).__module__}


def collect_modules(names: Iterable[str]) -> dict[str, bytes]:
    """Return the files of modules that are not installed, by path, with what they import.

    What is in the folders of installed packages must be installed on every machine; other modules,
    such as a method file next to a study, are sent.

    Args:
        names: modules that this process has imported.

    Raises:
        ConfigError: when they are more than `LARGEST` bytes.
    """
    files: dict[str, bytes] = {}
    # The root of a dotted name: a package travels as a whole.
    waiting = [name.partition(".")[0] for name in names]
    seen = {"coterie"}  # which every machine has; see `doctor`
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        module = sys.modules.get(name)
        # A namespace package has no `__file__`, only `__path__`.
        place = getattr(module, "__file__", None) or next(
            iter(getattr(module, "__path__", [])), None
        )
        if place is None or is_installed(Path(place)):
            continue
        path = Path(place)
        package = hasattr(module, "__path__")
        # The `__file__` of a package is its `__init__.py`: the folder around it is the package.
        root = path.parent if package and path.suffix else path
        own = sorted(root.rglob("*.py")) if package else [root]
        for file in own:
            files[str(file.relative_to(root.parent))] = content = file.read_bytes()
            waiting += _find_imports(content)
        total = sum(map(len, files.values()))
        if total > LARGEST:
            raise ConfigError(
                f"the modules next to the study are {total} bytes with those they import; "
                f"expected at most {LARGEST}: "
                "install them on the machines of the cluster"
            )
    return files


def install_modules(files: Mapping[str, bytes], folder: Path) -> None:
    """Write modules into a folder and add it to the import path; without files, do nothing."""
    if not files:
        return
    for name, content in files.items():
        path = folder / name
        # The names come from another machine: none may lead out of the folder.
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"a module is called {name!r}; expected a path inside its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sys.path.insert(0, str(folder))
    # Python caches the listing of import folders, and would not see the new files.
    importlib.invalidate_caches()


def _find_imports(source: bytes) -> set[str]:
    """Return the roots of the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        # A relative import stays inside the package, which travels anyway.
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
