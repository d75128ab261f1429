"""What native programs take (samples, noise and the optimizer as C++ reads them), and threads.

Clients share nothing, so threads take ranges of them and no result depends on how many threads
there are, on the block or on who is hosted.
"""

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.engine._work import RawSamples, TrainingWork
from coterie.engine.noise import InputNoise
from coterie.engine.optim import OPTIMIZERS

_threads = 0

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def use_threads(number: int) -> None:
    """Set the threads of native programs in this process, 0 for PyTorch's; results stay equal."""
    global _threads
    _threads = number


class Store(ctypes.Structure):
    """Samples as stored: bytes with a table of their values for each channel, or numbers."""

    _fields_ = (
        ("x", _POINTER), ("values", _POINTER), ("classes", _POINTER), ("targets", _POINTER),
        ("bytes", _LONG),
    )  # fmt: skip


class CropFlipJob(ctypes.Structure):
    """Random crops and flips of a training; see `engine._augment`."""

    _fields_ = (("keys", _POINTER), ("fill", _POINTER), ("padding", _LONG))


class NoiseJob(ctypes.Structure):
    """Noise that is drawn at every access; see `engine.noise`."""

    _fields_ = (("keys", _POINTER), ("sigma", _POINTER), ("width", _LONG))


class Rule(ctypes.Structure):
    """The optimizer; see `engine.optim`."""

    _fields_ = (
        ("rates", _POINTER), ("kind", _LONG), ("moments", _LONG), ("nesterov", _LONG), ("centered",
        _LONG),
        ("lr", _DOUBLE), ("momentum", _DOUBLE), ("decay", _DOUBLE), ("dampening", _DOUBLE),
        ("beta1", _DOUBLE),
        ("beta2", _DOUBLE), ("eps", _DOUBLE), ("alpha", _DOUBLE), ("lr_decay", _DOUBLE), ("initial",
        _DOUBLE),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class StoredTargets:
    """Targets, and the values of bytes of images, in the form that programs read."""

    values: Tensor | None
    classes: Tensor | None
    targets: Tensor | None

    def join_inputs(self, x: Tensor) -> Store:
        """Return the samples with inputs from `convert_inputs`, which must outlive their use."""
        return Store(
            address_of(x),
            address_of(self.values),
            address_of(self.classes),
            address_of(self.targets),
            int(self.values is not None),
        )


def address_of(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's memory."""
    if tensor is None:
        return None
    return tensor.data_ptr()


def to_int64(tensor: Tensor) -> Tensor:
    """Return a tensor as contiguous 64-bit integers."""
    return tensor.to(torch.int64).contiguous()


def make_rows_contiguous(tensor: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous; rows may be shared."""
    if tensor.stride(1) != 1:
        return tensor.contiguous()
    return tensor


def convert_noise(noise: InputNoise | None) -> tuple[NoiseJob, tuple[Tensor, ...]]:
    """Return noise in the form the program reads, and the tensors that own the memory."""
    if noise is None:
        return NoiseJob(None, None, 1), ()
    owners = (to_int64(noise.keys), noise.sigma.to(torch.float64).contiguous())
    return NoiseJob(address_of(owners[0]), address_of(owners[1]), noise.samples_per_row), owners


def convert_optimizer(work: TrainingWork) -> tuple[Rule, Tensor | None]:
    """Return the optimizer in the program's form, and the tensor that owns its rates' memory."""
    local, given = work.local, work.local.optimizer_arguments
    rates = work.rates
    if rates is not None:
        rates = rates.to(torch.float64).contiguous()
    beta1, beta2 = given.get("betas", (0.0, 0.0))
    # Kinds are numbered in the order of OPTIMIZERS: that of `enum Kind` in samples.h.
    rule = Rule(
        address_of(rates), list(OPTIMIZERS).index(local.optimizer), local.num_moments,
        given.get("nesterov", False),
        given.get("centered", False), local.lr, given.get("momentum", 0.0), given["weight_decay"],
        given.get("dampening", 0.0), beta1, beta2, given.get("eps", 0.0), given.get("alpha", 0.0),
        given.get("lr_decay", 0.0), local.initial_accumulator_value,
    )  # fmt: skip
    return rule, rates


def convert_inputs(x: Tensor, samples: RawSamples, dtype: torch.dtype) -> Tensor:
    """Return inputs in the form that programs read: bytes of images as they are, or numbers.

    Args:
        x: some inputs of the samples, as stored.
        samples: say whether they are images.
        dtype: of models.
    """
    return (x if samples.is_images else x.to(dtype)).contiguous()


def convert_targets(samples: RawSamples, dtype: torch.dtype) -> StoredTargets:
    """Return targets in the form that programs read."""
    values = None
    if samples.is_images:
        channels = samples.input_shape[0]
        # A byte has 256 values: each is prepared once for every channel, by the code that prepares
        # images, and programs look them up (channels x 256).
        every = torch.arange(256, dtype=torch.uint8).reshape(256, *[1] * len(samples.input_shape))
        levels = RawSamples(
            every.expand(256, channels, *every.shape[2:]), every, dtype, samples.mean, samples.std
        )
        values = levels.prepare_inputs(torch.arange(256)).reshape(256, channels).T.contiguous()
    if samples.y.is_floating_point():
        return StoredTargets(values, None, samples.y.to(dtype).contiguous())
    return StoredTargets(values, to_int64(samples.y), None)


def run_on_threads(function: Callable[..., None], job: ctypes.Structure, number: int) -> None:
    """Run a function of the program over ranges of clients or pairs."""
    threads = min(_threads or torch.get_num_threads(), number)
    if threads <= 1:
        function(ctypes.byref(job), 0, number)
        return
    # Four ranges for each thread, so that threads which are done early take more.
    size = math.ceil(number / (4 * threads))
    # ctypes releases the interpreter's lock during a call.
    with ThreadPoolExecutor(threads) as pool:
        calls = []
        for start in range(0, number, size):
            stop = min(start + size, number)
            calls.append(pool.submit(function, ctypes.byref(job), start, stop))
        for call in calls:
            call.result()
