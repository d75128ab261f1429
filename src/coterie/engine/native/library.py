"""Native programs: the whole local training of a stack of layers as one compiled C++ program, client by client.

One call gathers the batch, normalizes it, runs the layers forward and backward and updates the
parameters, for every step of every client of a range. Clients share nothing, so threads take ranges
of them and no result depends on how many threads there are, on the block or on who is hosted.
"""

import ctypes
import math
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork
from coterie.engine.native import compiler, program, stack
from coterie.engine.noise import InputNoise
from coterie.engine.optim import OPTIMIZERS, LocalTraining
from coterie.models.layout import Layout

_threads = 0

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def use_threads(number: int) -> None:
    """Set the number of threads of native programs in this process; 0 for that of PyTorch. No result depends on it."""
    global _threads
    _threads = number


class Store(ctypes.Structure):
    """Samples as they are stored: bytes with a table of their values for each channel, or numbers."""

    _fields_ = (
        ("x", _POINTER), ("values", _POINTER), ("classes", _POINTER), ("targets", _POINTER), ("bytes", _LONG),
    )  # fmt: skip


class CropFlip(ctypes.Structure):
    """Random crops and flips of a training; see `engine._augment`."""

    _fields_ = (("keys", _POINTER), ("fill", _POINTER), ("padding", _LONG))


class NoiseJob(ctypes.Structure):
    """Noise that is drawn at every access; see `engine.noise`."""

    _fields_ = (("keys", _POINTER), ("sigma", _POINTER), ("width", _LONG))


class Rule(ctypes.Structure):
    """The optimizer; see `engine.optim`."""

    _fields_ = (
        ("rates", _POINTER), ("kind", _LONG), ("moments", _LONG), ("nesterov", _LONG), ("centered", _LONG),
        ("lr", _DOUBLE), ("momentum", _DOUBLE), ("decay", _DOUBLE), ("dampening", _DOUBLE), ("beta1", _DOUBLE),
        ("beta2", _DOUBLE), ("eps", _DOUBLE), ("alpha", _DOUBLE), ("lr_decay", _DOUBLE), ("initial", _DOUBLE),
    )  # fmt: skip


class _Training(ctypes.Structure):
    _fields_ = (
        ("store", Store), ("augment", CropFlip), ("noise", NoiseJob), ("rows", _POINTER), ("anchor", _POINTER),
        ("alpha", _POINTER),
        ("places", _POINTER), ("length", _POINTER), ("keys", _POINTER), ("losses", _POINTER), ("moments", _POINTER),
        ("taken", _POINTER), ("rule", Rule), ("row", _LONG), ("anchor_row", _LONG), ("steps", _LONG), ("width", _LONG),
        ("trained", _LONG), ("prox", _DOUBLE),
    )  # fmt: skip


class _Measuring(ctypes.Structure):
    _fields_ = (
        ("store", Store), ("noise", NoiseJob), ("table", _POINTER), ("alpha", _POINTER), ("places", _POINTER),
        ("count", _POINTER), ("models", _POINTER), ("sets", _POINTER), ("loss", _POINTER), ("score", _POINTER),
        ("row", _LONG), ("width", _LONG),
    )  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """Samples in the form that the program reads, with the tensors that own the memory."""

    store: Store
    owners: tuple[Tensor | None, ...]


def at(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's memory."""
    return None if tensor is None else tensor.data_ptr()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as contiguous 64-bit integers."""
    return tensor.to(torch.int64).contiguous()


def rows_of(tensor: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous; rows may be shared."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def noise_of(noise: InputNoise | None) -> tuple[NoiseJob, tuple[Tensor, ...]]:
    """Return noise in the form the program reads, and the tensors that own the memory."""
    if noise is None:
        return NoiseJob(None, None, 1), ()
    owners = (whole(noise.keys), noise.sigma.to(torch.float64).contiguous())
    return NoiseJob(at(owners[0]), at(owners[1]), noise.samples_per_row), owners


def rule_of(work: TrainingWork) -> tuple[Rule, Tensor | None]:
    """Return the optimizer in the form the program reads, and the tensor that owns the memory of its rates."""
    local, given = work.local, work.local.optimizer_arguments
    rates = None if work.rates is None else work.rates.to(torch.float64).contiguous()
    beta1, beta2 = given.get("betas", (0.0, 0.0))
    rule = Rule(
        at(rates), list(OPTIMIZERS).index(local.optimizer), local.num_moments, given.get("nesterov", False),
        given.get("centered", False), local.lr, given.get("momentum", 0.0), given["weight_decay"],
        given.get("dampening", 0.0), beta1, beta2, given.get("eps", 0.0), given.get("alpha", 0.0),
        given.get("lr_decay", 0.0), local.initial_accumulator_value,
    )  # fmt: skip
    return rule, rates


def _usual(local: LocalTraining) -> bool:
    """Whether an optimizer is SGD, with or without momentum, or Adam with the usual betas."""
    plain = local.optimizer == "sgd" and not local.dampening and not local.nesterov
    return plain or (
        local.optimizer == "adam" and tuple(local.betas) == OPTIMIZERS["adam"]["betas"]
    )


def stored(samples: RawSamples, dtype: torch.dtype) -> Kept:
    """Return samples in the form that programs read."""
    values = None
    if samples.is_images:
        x, channels = samples.x.contiguous(), samples.input_shape[0]
        every = torch.arange(256, dtype=torch.uint8).reshape(256, *(1 for _ in samples.input_shape))
        levels = RawSamples(
            every.expand(256, channels, *every.shape[2:]), every, dtype, samples.mean, samples.std
        )
        values = levels.prepare_inputs(torch.arange(256)).reshape(256, channels).T.contiguous()
    else:
        x = samples.x.to(dtype).contiguous()
    numbers = samples.y.is_floating_point()
    classes, targets = (
        None if numbers else whole(samples.y),
        samples.y.to(dtype).contiguous() if numbers else None,
    )
    store = Store(at(x), at(values), at(classes), at(targets), int(values is not None))
    return Kept(store, (None if x is samples.x else x, values, classes, targets))


def on_threads(function: Callable[..., None], job: ctypes.Structure, number: int) -> None:
    """Run a function of the program over ranges of clients or pairs."""
    threads = min(_threads or torch.get_num_threads(), number)
    if threads <= 1:
        function(ctypes.byref(job), 0, number)
        return
    size = math.ceil(number / (4 * threads))
    with ThreadPoolExecutor(threads) as pool:
        starts = range(0, number, size)
        for done in [
            pool.submit(function, ctypes.byref(job), s, min(s + size, number)) for s in starts
        ]:
            done.result()


class NativeProgram:
    """The compiled program of one stack.

    Args:
        layout: of a module that is a plain stack, on a CPU.
        features: the shape of one input.

    Attributes:
        seconds: time of compiling; 0 when the program was in the cache.

    Raises:
        NotAStackError: when the module is no stack.
        CompilerError: when it cannot be compiled.
    """

    def __init__(self, layout: Layout, features: tuple[int, ...]) -> None:
        if layout.dtype not in (torch.float32, torch.float64):
            raise stack.NotAStackError(f"numbers of type {layout.dtype} are not known here")
        layers = stack.layers(layout.train_module)
        self.alpha = next((part.alpha for part in layers if isinstance(part, stack.Simplex)), None)
        if len(layout.inputs) > len(layout.keys) + (self.alpha is not None):
            raise stack.NotAStackError("it has input buffers")
        self.layout, self.seconds = layout, 0.0
        self._text = partial(program.write, layers, layout, features)
        # for every optimizer, or for the most usual ones alone
        self._libraries: dict[bool, ctypes.CDLL] = {}
        self._library(False)
        self._kept: weakref.WeakKeyDictionary[RawSamples, Kept] = weakref.WeakKeyDictionary()

    def _library(self, any_optimizer: bool) -> ctypes.CDLL:
        """Return the program; that for every optimizer is compiled when the first of them trains."""
        if any_optimizer not in self._libraries:
            library, seconds = compiler.load(self._text(any_optimizer))
            for name in ("train", "measure"):
                function = getattr(library, name)
                function.argtypes, function.restype = (_POINTER, _LONG, _LONG), None
            self._libraries[any_optimizer] = library
            self.seconds += seconds
        return self._libraries[any_optimizer]

    def _store(self, samples: RawSamples) -> Store:
        kept = self._kept.get(samples)
        if kept is None:
            kept = self._kept[samples] = stored(samples, self.layout.dtype)
        return kept.store

    def _mixtures(self, inputs: Mapping[str, Tensor], *shape: int) -> Tensor | None:
        """Return the weights of the endpoints, those of the module where none are given."""
        if self.alpha is None:
            return None
        given = inputs.get(self.alpha)
        if given is None:
            given = self.layout.zero_inputs(1)[self.alpha].expand(*shape, -1)
        return given.to(self.layout.dtype).contiguous()

    def fits(self, work: TrainingWork) -> bool:
        """Return whether the program can do a training: no sample has a mixture of endpoints of its own."""
        return not any(name == self.alpha and value.ndim > 3 for name, value in work.inputs.items())

    def train(
        self, rows: Float[Tensor, "clients params"], work: TrainingWork
    ) -> Float[Tensor, "clients steps"]:
        """Train clients in place; see `Engine.train`."""
        losses = torch.full(work.batch_sizes.shape, torch.nan, dtype=rows.dtype)
        places, length = whole(work.sample_indices), whole(work.batch_sizes)
        keys = None if work.dropout_keys is None else whole(work.dropout_keys[0])
        taken = None if work.steps_taken is None else whole(work.steps_taken)
        anchor = None if work.anchor is None or not work.prox else rows_of(work.anchor)
        draws, fill = None, None
        if work.augment is not None:
            draws, fill = whole(work.augment.keys), work.augment.fill.to(rows.dtype).contiguous()
        alpha = self._mixtures(work.inputs, *work.batch_sizes.shape)
        assert rows.stride(1) == 1
        assert work.moments is None or work.moments.is_contiguous()
        augment = CropFlip(at(draws), at(fill), work.augment.padding if work.augment else 0)
        noise, _draws = noise_of(work.noise)
        rule, _rates = rule_of(work)
        job = _Training(
            self._store(work.samples), augment, noise, at(rows), at(anchor), at(alpha), at(places), at(length),
            at(keys), at(losses), at(work.moments), at(taken), rule, rows.stride(0),
            0 if anchor is None else anchor.stride(0), work.num_steps, places.shape[2], self.layout.trainable, work.prox,
        )  # fmt: skip
        on_threads(self._library(not _usual(work.local)).train, job, len(rows))
        return losses

    def measure(
        self,
        table: Float[Tensor, "models params"],
        pairs: EvaluationPairs,
        inputs: Mapping[str, Tensor],
    ) -> Float[Tensor, "values pairs"]:
        """Return the mean loss and score of each pair; see `Engine.measure_pairs`."""
        values = torch.empty(2, len(pairs.models), dtype=torch.float64)
        table, alpha = rows_of(table), self._mixtures(inputs, len(table))
        places, count, models, sets = (
            whole(t) for t in (pairs.sample_indices, pairs.set_sizes, pairs.models, pairs.sets)
        )
        noise, _draws = noise_of(pairs.noise)
        job = _Measuring(
            self._store(pairs.samples), noise, at(table), at(alpha), at(places), at(count), at(models), at(sets),
            at(values[0]), at(values[1]), table.stride(0), places.shape[1],
        )  # fmt: skip
        on_threads(self._library(False).measure, job, len(pairs.models))
        return values.to(self.layout.dtype)
