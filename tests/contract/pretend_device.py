"""A CUDA device that is only pretended: computes on the CPU, refuses what CUDA refuses, counts what crosses over.

    with pretended_cuda() as crossings:
        simulate(federation, method, model="linear", settings=Settings(device="cuda"))
    print(crossings)

Tensors of the device wrap one of the CPU. Every operation passes through `_computed`, which knows
the rules of CUDA: operands lie on one device, but for single numbers; a CPU tensor may index one of
the device, at the price of a copy; what depends on values (a number read, a mask's places,
`unique`) makes the CPU wait. Each crossing is counted for the line of the package that caused it.
To C++ the device is "meta", whose gradients need no device; Python sees "cuda:0".
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten

_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default,
            _aten._unsafe_index.Tensor, _aten._unsafe_index_put.default}  # fmt: skip
_WAITS = {_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten._unique, _aten._unique2, _aten.equal,
          _aten.unique_dim, _aten.unique_consecutive, _aten.unique_dim_consecutive, _aten.bincount}  # fmt: skip
_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.dot}


class Crossings(Counter[tuple[str, str]]):
    """How often something crossed between CPU and device, by kind and line of the package.

    Kinds: "upload" (to the device), "download" (to the CPU, which waits for it) and "wait" (for a
    number or a shape).
    """

    def __str__(self) -> str:
        return "\n".join(
            f"{number:6} {kind:8} {line}" for (kind, line), number in self.most_common()
        )

    def kinds(self) -> Counter[str]:
        """Return how often each kind occurred, on any line."""
        return Counter(kind for (kind, _), number in self.items() for _ in range(number))

    def note(self, kind: str) -> None:
        """Count one crossing for the line of the package that is being run."""
        frame: Any = sys._getframe(1)
        while frame is not None and "/src/coterie/" not in frame.f_code.co_filename:
            frame = frame.f_back
        line = (
            f"{frame.f_code.co_filename.split('/src/coterie/')[1]}:{frame.f_lineno}"
            if frame
            else "a test"
        )
        self[kind, line] += 1


class OnDevice(Tensor):
    """A tensor of the device; `held` has its values."""

    held: Tensor
    crossings: Crossings | None = None  # of the device that is pretended now
    seeded = False  # its generator, which is the CPU's

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        new = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device="meta", requires_grad=False,
        )  # fmt: skip
        new.held = held
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        """The device as the package sees it."""
        return CUDA

    @property
    def data(self) -> Tensor:
        """The values, without a history."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: "OnDevice") -> None:
        """Take over the memory of another tensor."""
        Tensor.data.__set__(self, values)  # type: ignore[attr-defined]
        self.held = values.held

    def untyped_storage(self) -> Any:
        """Return the memory, by which the package tells whether two tensors share it."""
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        """Download."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse, as CUDA does."""
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first"
        )


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to the entries of a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, one) for one in value])
    return function(value)


def _values(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def _note(kind: str) -> None:
    if OnDevice.crossings is not None:
        OnDevice.crossings.note(kind)


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do one operation by the rules of the device."""
    tensors: list[Tensor] = []
    _mapped(
        lambda one: tensors.append(one) if isinstance(one, Tensor) else None,
        [*args, *kwargs.values()],
    )
    remote = [one for one in tensors if isinstance(one, OnDevice)]
    wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    # Operations name the device as it is; functions are renamed by `_Names`.
    there = bool(remote) if wanted is None else wanted in ("meta", "cuda")
    if not there and not remote:
        return func(*args, **kwargs)
    if any(one.device.type == "meta" for one in tensors if not isinstance(one, OnDevice)):
        raise NotImplementedError(
            f"{func} has an operand that C++ made on the device: the pretended one knows no values"
        )
    if func is _aten._to_copy.default:
        if there != bool(remote):
            _note("upload" if there else "download")
    elif func is _aten.copy_.default:
        into, source = (isinstance(one, OnDevice) for one in args[:2])
        if into != source:
            _note("upload" if into else "download")
    elif remote:
        _check(func, args, kwargs, tensors, remote)
    if there and torch.Tag.nondeterministic_seeded in func.tags and not OnDevice.seeded:
        raise RuntimeError(f"{func} draws from the device's own generator, which nobody has seeded")
    if wanted in ("meta", "cuda"):
        kwargs = kwargs | {"device": torch.device("cpu")}
    out = func(
        *_mapped(_values, args), **{name: _mapped(_values, value) for name, value in kwargs.items()}
    )
    if not there:
        return out
    known = {id(one.held): one for one in remote}

    def wrapped(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        # what is changed in place stays the same tensor
        return known[id(one)] if id(one) in known else OnDevice(one)

    return _mapped(wrapped, out)


def _check(
    func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], remote: list[OnDevice]
) -> None:
    """Refuse an operation with tensors of the device as CUDA does, and count what it costs."""
    local = [one for one in tensors if not isinstance(one, OnDevice)]
    if func.overloadpacket in _PRODUCTS and not remote[0].is_floating_point():
        raise RuntimeError(f'"{func}_cuda" not implemented for {remote[0].dtype}')
    repeats = func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if func.overloadpacket in _WAITS or repeats:
        _note("wait")
    if func in _INDEXED:
        if not isinstance(args[0], OnDevice):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        # one number at the places of a mask: they need not be known
        filled = len(args) > 2 and args[2].ndim == 0
        for index in (one for one in args[1] if one is not None):
            if not isinstance(index, OnDevice):
                _note("upload")
            elif index.dtype == torch.bool and not filled:
                _note("wait")
        local = [one for one in args[2:3] if not isinstance(one, OnDevice)]
    numbers = (
        torch.Tag.pointwise in func.tags or func in _INDEXED or func.overloadpacket is _aten.fill_
    )
    if any(one.ndim or not numbers for one in local):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {func}"
        )


class _Operations(TorchDispatchMode):
    """What makes tensors of the device out of none: factories and copies."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: PyTorch need not load its compiler to leave this out."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Names(TorchFunctionMode):
    """In calls, "cuda" is the pretended device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": _renamed(kwargs["device"])}
        if func is Tensor.to:
            args = (args[0], *map(_renamed, args[1:]))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _indices(args[1]), *args[2:])
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == torch.device("meta"):
            return func(*args, **kwargs | {"device": "cpu"}).to("meta")
        return func(*args, **kwargs)


def _indices(index: Any) -> Any:
    """Return an index with tensors for lists, of which C++ would make tensors of "meta"."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _renamed(value: Any) -> Any:
    """Return the device under which C++ knows what a call names, and anything else as it is."""
    if not isinstance(value, str | torch.device):
        return value
    device = torch.device(value)
    return torch.device("meta") if device.type == "cuda" else device


@contextmanager
def pretended_cuda() -> Iterator[Crossings]:
    """Pretend that this machine has one CUDA device, and count what crosses over."""
    found = Crossings()
    state = torch.zeros(1, dtype=torch.uint8)
    cuda = {"is_available": True, "device_count": 1, "is_bf16_supported": True, "mem_get_info": (1 << 40, 1 << 40),
            "device": nullcontext(), "get_rng_state": state}  # fmt: skip
    patched: dict[str, Any] = {name: mock.Mock(return_value=value) for name, value in cuda.items()}
    patched |= {"manual_seed": lambda _: _seed(True), "set_rng_state": lambda *_: _seed(False)}
    with (
        mock.patch.multiple(torch.cuda, **patched),
        mock.patch.object(OnDevice, "crossings", found),
        _Operations(),
        _Names(),
    ):
        yield found


def _seed(seeded: bool) -> None:
    OnDevice.seeded = seeded
