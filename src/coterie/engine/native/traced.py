"""The program of any module: the C++ of its traced training step and evaluation, and its calls."""

import ctypes
import math
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from coterie.engine._augment import CropFlip
from coterie.engine._base import Objective
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork
from coterie.engine.native import compiler
from coterie.engine.native.images import ImageLowering
from coterie.engine.native.library import (
    CropFlipJob,
    NoiseJob,
    Rule,
    Store,
    StoredTargets,
    address_of,
    convert_inputs,
    convert_noise,
    convert_optimizer,
    convert_targets,
    make_rows_contiguous,
    run_on_threads,
    to_int64,
)
from coterie.engine.native.loops import Leaf, Program, Value, c_type, dense_strides, in_memory
from coterie.engine.native.pooling import join_convolutions_with_pooling, pool_before_activations
from coterie.engine.native.sample_lanes import LANES, SampleLowering, samples_pay
from coterie.engine.native.simple import LARGE, is_simple
from coterie.engine.native.sums import join_products
from coterie.engine.native.tiles import Tile, iterate_measuring_tiles, iterate_training_tiles
from coterie.engine.native.trace import NotTraceableError, Trace, Traces, evaluate_size, record
from coterie.models.layout import Layout, Slot

# Places in the arena hold several types in turn; selects and sums of vectors ignore traps and the
# sign of zero; keys wrap; VECTORIZE is an OpenMP pragma.
_FLAGS = (
    "-fno-strict-aliasing",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fwrapv",
    "-fopenmp-simd",
)
_CACHE = 768 << 10  # bytes of an arena that leave room for parameters in the cache of a core
_VECTOR = 64  # numbers behind the frozen weights, which loads of whole vectors may read
_MOST = 64  # samples of one call, where they do not need each other
_BATCH_NAMES = (
    "const T* const x = batch.x;", "const Target* const y = batch.y;",
    "T* const losses = batch.losses;",
    "const T* const frozen = batch.frozen;",
)  # fmt: skip
_TRAIN_NAMES = ("const int64_t key[] = {now};",)
_TRAIN_PARAMETERS = (
    "const Batch& batch", "T* row", "T* g", "const int64_t now", "const T* const weight",
    "const long size",
    "const long from", "const bool more",
)  # fmt: skip
_JUDGE_PARAMETERS = ("const Batch& batch", "const T* row", "const long size")
_JUDGE_NAMES = (
    "T* const scores = batch.scores;",
    "const int64_t key[] = {0};",
    "static constexpr long from = 0;",
)
# operations of the usual losses and their scores
_LOSSES = {
    "_log_softmax", "nll_loss_forward", "argmax", "eq", "_to_copy", "sub", "pow", "mean", "sum",
    "div",
}  # fmt: skip
_DECLARED = re.compile(r"\b[a-z]\w*")  # names of variables, among other words
# Statements of one small function. A compiler's time grows faster than the length of a function:
# with 4, an LSTM is ready after a quarter of the time; with 32, after a third.
_PART = 4
_TYPICAL = 16  # samples for which kernels are chosen
_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def _flags() -> tuple[str, ...]:
    """Return the compiler's flags; by default it uses half of registers of 64 bytes."""
    if compiler.vector_bytes() == 64:
        return (*_FLAGS, "-mprefer-vector-width=512")
    return _FLAGS


class _Memory(ctypes.Structure):
    _fields_ = (("at", _POINTER), ("bytes", _LONG), ("samples", _LONG))


class _Training(ctypes.Structure):
    _fields_ = (
        ("store", Store), ("augment", CropFlipJob), ("noise", NoiseJob), ("memory", _Memory),
        ("rows", _POINTER), ("frozen", _POINTER), ("anchor", _POINTER), ("inputs", _POINTER),
        ("places", _POINTER),
        ("length", _POINTER), ("keys", _POINTER), ("where", _POINTER), ("losses", _POINTER),
        ("moments", _POINTER),
        ("taken", _POINTER), ("rule", Rule), ("row", _LONG), ("anchor_row", _LONG), ("steps",
        _LONG), ("width", _LONG),
        ("trained", _LONG), ("prox", _DOUBLE), ("first", _LONG), ("last", _LONG),
    )  # fmt: skip


class _Measuring(ctypes.Structure):
    _fields_ = (
        ("store", Store), ("noise", NoiseJob), ("memory", _Memory),
        ("table", _POINTER), ("frozen", _POINTER), ("inputs", _POINTER), ("places", _POINTER),
        ("count", _POINTER),
        ("models", _POINTER), ("sets", _POINTER), ("where", _POINTER), ("loss", _POINTER), ("score",
        _POINTER),
        ("row", _LONG), ("width", _LONG), ("first", _LONG), ("last", _LONG),
    )  # fmt: skip


class _Function:
    """One traced function as C++.

    Args:
        trace: the function.
        layout: of the module.
        across: whether samples lie across the vector; calls then have `LANES` samples.

    Attributes:
        results: the outputs of the trace, as values; None where one is no tensor.
    """

    def __init__(self, trace: Trace, layout: Layout, across: bool) -> None:
        self.layout = layout
        self.program = Program(number_bytes=layout.dtype.itemsize)
        lowering, samples = ImageLowering, _TYPICAL
        if across:
            lowering, samples = SampleLowering, LANES
        self.lowering = lowering(self.program, trace, samples, layout.dtype)
        kinds = trace.kinds
        # In the order of the inputs of `trace._train_once` and `_judge_once`.
        values: list[Value] = []
        for slot in layout.slots:
            values.append(
                in_memory("row", slot.shape, dense_strides(slot.shape), layout.dtype, slot.start)
            )
        # One after another, as `TracedProgram` joins them.
        place = 0
        for tensor in layout.frozen.values():
            values.append(
                in_memory("frozen", tensor.shape, dense_strides(tensor.shape), layout.dtype, place)
            )
            place += tensor.numel()
        first = len(values)
        for number, ref in enumerate(trace.inputs[first : first + len(layout.inputs)]):
            kind = kinds[ref.number]
            values.append(
                in_memory(f"input{number}", kind.shape, dense_strides(kind.shape), kind.dtype)
            )
        values.append(in_memory("key", (), (), torch.int64))
        for buffer, ref in zip(("x", "y", "weight"), trace.inputs[len(values) :], strict=False):
            kind = kinds[ref.number]
            order = list(range(len(kind.shape)))
            if across and buffer == "x":
                order.append(order.pop(0))  # samples are innermost
            strides = dense_strides(kind.shape, order)
            # One weight serves all samples of a piece; across the vector each has its own, 0 for
            # copies.
            if buffer == "weight" and not across:
                strides = [0]
            values.append(in_memory(buffer, kind.shape, strides, kind.dtype))
        self.lowering.values.update(zip(trace.inputs, values, strict=True))
        self.lowering.run()
        self.results = [ref and self.lowering.operand(ref) for ref in trace.outputs]
        self._memory: dict[int, tuple[Tensor, int]] = {}

    def write_vector(self, name: str, result: Value | None) -> None:
        """Write one value a sample."""
        assert result is not None
        self.program.assign(Leaf(name, 0, (1,)), result)

    def write_gradients(self, results: Sequence[Value | None]) -> None:
        """Write or add each trained tensor's gradient; a kernel that can add writes it itself."""
        for slot, result in zip(self.layout.trained_slots, results, strict=True):
            # The loss does not depend on the tensor. `more` says that an earlier piece of the batch
            # has written the gradient, to which this one is added.
            if result is None:
                self._clear(slot)
                continue
            leaf, buffer = result.leaf, ""
            if leaf is not None:
                buffer = leaf.buffer
            if buffer in self.lowering.inner and self._is_only_written(buffer):
                self._write_inner(slot, buffer)
                continue
            # A kernel may write into the gradient itself if nothing else reads its result, which
            # lies as the slot does.
            plain = (
                leaf is not None and leaf.offset == 0 and result.is_dense(range(len(result.shape)))
            )
            if (
                plain
                and buffer in self.lowering.more
                and self._is_only_written(buffer)
                and not self.program.buffers[buffer].place
            ):
                self.program.buffers[buffer].place = f"T* const {buffer} = g + {slot.start};"
                self.lowering.more[buffer] = "more"
                continue
            self.program.assign(
                Leaf("g", slot.start, tuple(dense_strides(slot.shape))), result, add="more"
            )

    def _clear(self, slot: Slot) -> None:
        """Write a gradient of zeros, unless an earlier piece of the batch has written it."""
        text = f"if (!more) memset(g + {slot.start}, 0, sizeof(T) * {slot.stop - slot.start});"
        self.program.emit(text, [], ["g"])

    def _is_only_written(self, buffer: str) -> bool:
        readers = [one for one in self.program.statements if buffer in one.reads]
        return all(buffer in one.writes for one in readers)

    def _write_inner(self, slot: Slot, buffer: str) -> None:
        """Write a gradient that is zero but in the middle, without a copy of it elsewhere."""
        self.program.statements = [s for s in self.program.statements if buffer not in s.writes]
        inner, shape, start = self.lowering.inner[buffer], slot.shape, slot.start
        if len(shape) < len(inner.shape):  # over a sequence: images of one row
            shape = (*shape[:2], 1, *shape[2:])
        strides = dense_strides(shape)
        # The cut is the same on both sides.
        for size, all_, stride in zip(inner.shape, shape, strides, strict=True):
            start += (all_ - evaluate_size(size, 1)) // 2 * stride
        self._clear(slot)
        self.program.assign(Leaf("g", start, tuple(strides)), inner, add="more")

    def write_state(self, results: Sequence[Value | None]) -> None:
        """Write the new untrained tensors, when all of them are known."""
        slots = self.layout.state_slots
        # All are copied before one is written, since an expression may read what another replaces.
        copies = []
        for slot, result in zip(slots, results, strict=True):
            if result is not None and not _is_there(result, slot.start):
                copies.append((slot, self.program.store(result, range(len(result.shape)))))
        for slot, copy in copies:
            self.program.assign(Leaf("row", slot.start, tuple(dense_strides(slot.shape))), copy)

    def declarations(self) -> list[str]:
        """Return what declares the buffers."""
        lines = []
        for number, (name, buffer) in enumerate(self.program.buffers.items()):
            if buffer.place.startswith("static"):
                lines += [buffer.place, f"const {buffer.type}* const {name} = {name}_;"]
            elif buffer.place:
                lines.append(buffer.place)
            else:
                lines.append(
                    f"{buffer.type}* const {name} = ({buffer.type}*)(batch.arena + "
                    f"batch.at[{number}]);"
                )
        return lines

    def statements(self) -> list[str]:
        """Return the statements in order."""
        body = []
        for statement in self.program.statements:
            text = statement.text
            for name in statement.writes:
                if f"MORE_{name}" in text:
                    # A kernel that writes into a buffer of its own has nothing to add to.
                    more = self.lowering.more[name].replace("MORE", "false")
                    text = text.replace(f"MORE_{name}", more)
            body.append(text)
        return body

    def memory(self, samples: int) -> tuple[Tensor, int]:
        """Return each buffer's place in the arena for calls of so many samples, and its size.

        The function has to be complete: the places are planned once for each number of samples.
        """
        if samples not in self._memory:
            # Every training asks for it: planning in each call takes time that small works notice.
            places, top = self.program.arena(samples)
            found = [places.get(name, 0) for name in self.program.buffers] or [0]
            self._memory[samples] = torch.tensor(found, dtype=torch.int64), top
        return self._memory[samples]


def _is_there(value: Value, start: int) -> bool:
    """Return whether a value is an unmodified part of the row from the entry `start`."""
    return (
        value.is_dense(range(len(value.shape)))
        and value.memory.buffer == "row"
        and value.memory.offset == start
    )


def _cut(statements: Sequence[str], declarations: Sequence[str]) -> list[str]:
    """Return statements as calls of small functions, which compile far sooner than one large one.

    Args:
        statements: of a function, in order.
        declarations: of its parameters and variables.
    """
    known = set()
    for declaration in declarations:
        # A small function sees these without being given them.
        if not declaration.startswith(("static", "constexpr")):
            known.add(_DECLARED.findall(declaration.split(" = ")[0])[-1])
    calls = []
    for start in range(0, len(statements), _PART):
        part = " ".join(statements[start : start + _PART])
        used = [name for name in dict.fromkeys(_DECLARED.findall(part)) if name in known]
        # Parameters rather than captures: what is captured lies in memory, where a store might
        # change it, and is read again at every use; programs then take up to twice as long.
        given = ", ".join(f"decltype({name}) {name}" for name in used)
        calls.append(f"[]({given}) __attribute__((noinline)) {{ {part} }}({', '.join(used)});")
    return calls


def trace_module(
    layout: Layout, objective: Objective, x: Float[Tensor, "samples *features"], y: Tensor
) -> Traces:
    """Return the graphs of a module's training step and evaluation.

    Args:
        layout: of the module, on a CPU.
        objective: the loss of each sample.
        x: some prepared inputs.
        y: their targets.

    Raises:
        NotTraceableError: when the module cannot be traced.
    """
    if layout.dtype not in (torch.float32, torch.float64):
        raise NotTraceableError(f"numbers of type {layout.dtype} are not known here")
    return record(layout, objective, x, y, ImageLowering.knows)


class TracedProgram:
    """The compiled program of one module and objective.

    Args:
        layout: of the module, on a CPU.
        objective: the loss of each sample.
        x: some prepared inputs.
        y: their targets.
        traces: what `trace_module` returned for these arguments; traced here when None.

    Attributes:
        seconds: time of compiling; 0 when the program was in the cache.
        together: whether samples of a batch need each other, as with batch normalization.
        across: whether samples lie across the vector.
        simple: whether the module has simple layers alone, and is not large.

    Raises:
        NotTraceableError: when the module cannot be traced.
        CompilerError: when the program cannot be compiled.
    """

    def __init__(
        self,
        layout: Layout,
        objective: Objective,
        x: Float[Tensor, "samples *features"],
        y: Tensor,
        traces: Traces | None = None,
    ) -> None:
        if traces is None:
            traces = trace_module(layout, objective, x, y)
        self.layout, self.together = layout, traces.together
        train = pool_before_activations(join_products(traces.train))
        judge = pool_before_activations(traces.judge)
        others = [node for node in judge.nodes if node.name not in _LOSSES]
        is_small = layout.size <= LARGE
        self.simple = is_small and all(is_simple(node.name, node.args) for node in others)
        # A call across the vector has exactly `LANES` samples, and so never a whole batch of
        # another size.
        self.across = not traces.together and samples_pay(train, layout.size)
        if self.across:
            train, judge = map(join_convolutions_with_pooling, (train, judge))
        self._train = _Function(train, layout, self.across)
        trained = len(layout.trained_slots)
        self._train.write_vector("losses", self._train.results[0])
        self._train.write_gradients(self._train.results[1 : 1 + trained])
        self._train.write_state(self._train.results[1 + trained :])
        self._judge = _Function(judge, layout, self.across)
        self._judge.write_vector("losses", self._judge.results[0])
        self._judge.write_vector("scores", self._judge.results[1])
        self.inputs = layout.inputs
        own = layout.zero_inputs(1)
        if any(not own[name].is_floating_point() for name in self.inputs):
            raise NotTraceableError("it has input buffers of integers")
        room = torch.zeros(_VECTOR, dtype=layout.dtype)
        self._frozen = torch.cat(
            [*(one.detach().reshape(-1) for one in layout.frozen.values()), room]
        )
        self.text = self._written(x, y)
        self._library, self.seconds = compiler.load(self.text, _flags())
        for name in ("train", "measure"):
            function = getattr(self._library, name)
            function.argtypes, function.restype = (_POINTER, _LONG, _LONG), None
        # What samples were converted to lives as long as they do.
        self._inputs: weakref.WeakKeyDictionary[RawSamples, Tensor] = weakref.WeakKeyDictionary()
        self._targets: weakref.WeakKeyDictionary[RawSamples, StoredTargets] = (
            weakref.WeakKeyDictionary()
        )
        self._samples = {"train": self._fitting(self._train), "judge": self._fitting(self._judge)}

    def _fitting(self, function: _Function) -> int:
        """Return how many samples a call takes: they fit the cache, or need less than two models.

        Each call passes over the model and its gradient, so fewer calls pay where these are large.
        """
        if self.across:
            return LANES
        samples, fixed = _MOST, function.memory(1)[1]
        numbers = function.layout.size + sum(one.numel() for one in function.layout.frozen.values())
        room = max(_CACHE, 2 * numbers * function.program.number_bytes)
        while samples > 4 and function.memory(samples)[1] - fixed > room:
            samples //= 2
        return samples

    def _written(self, x: Tensor, y: Tensor) -> str:
        """Return the C++ of the program: kernels, both functions, and the loops that call them."""
        layout = self.layout
        number, integer = "double", "int64_t"
        if layout.dtype == torch.float32:
            number, integer = "float", "int32_t"
        here = Path(__file__).parent
        features, own = tuple(x.shape[1:]), layout.zero_inputs(1)
        sizes = ", ".join(str(own[name][0].numel()) for name in self.inputs) or "0"
        # Of inputs without such axes, 1, the product of none.
        channels, width = math.prod(features[:1]), math.prod(features[1:][-1:])
        entries, plane = math.prod(features), math.prod(features[1:])
        targets = math.prod(y.shape[1:])
        driver = (here / "steps.h").read_text()
        # The generated functions take a Batch, so its declaration goes before them.
        start = driver.index("struct Batch {")
        stop = driver.index("};", start) + len("};\n")
        head = [
            f"#include <cstdint>\n#define VECTOR {compiler.vector_bytes()}\ntypedef {number} "
            f"T;\ntypedef {integer} I;",
            (here / "samples.h").read_text(),
            (here / "blocks.h").read_text(),
            *self._lanes(here),
            f"constexpr int64_t PARAMS = {layout.size}, ENTRIES = {entries}, CHANNELS = "
            f"{channels}, PLANE = {plane};",
            f"constexpr int64_t WIDTH = {width}, TARGETS = {targets};",
            f"constexpr int INPUTS = {len(self.inputs)};",
            f"constexpr int64_t INPUT_SIZES[] = {{{sizes}}};",
            f"typedef {c_type(y.dtype)} Target;",
            f"constexpr int64_t TOGETHER = {LANES * self.across};",
            "struct Batch;\n",
            driver[start:stop],
        ]
        train = self._body("train_batch", _TRAIN_PARAMETERS, self._train, _TRAIN_NAMES)
        judge = self._body("judge_batch", _JUDGE_PARAMETERS, self._judge, _JUDGE_NAMES)
        return "\n".join([*head, *train, *judge, driver[:start] + driver[stop:]])

    def _lanes(self, here: Path) -> list[str]:
        """Return the C++ of the kernels with samples across the vector, where they are called."""
        if not self.across:
            return []
        return [f"constexpr int N = {LANES};", (here / "sample_lanes.h").read_text()]

    def _body(
        self, name: str, parameters: Sequence[str], function: _Function, names: Sequence[str]
    ) -> list[str]:
        """Return the C++ of one function."""
        inputs = [f"const T* const input{k} = batch.inputs[{k}];" for k in range(len(self.inputs))]
        samples = "const long n = size;"
        if self.across:
            # Static, or clang 14 wants a small function to capture what a loop of it depends on.
            samples = "static constexpr long n = TOGETHER;"
        declared = [samples, *_BATCH_NAMES, *names, *inputs, *function.declarations()]
        lines = [*declared, *_cut(function.statements(), [*parameters, *declared])]
        body = [f"  {line}" for line in lines]
        return [f"static void {name}({', '.join(parameters)}) {{", *body, "}"]

    def _store(self, samples: RawSamples, tile: Tile) -> tuple[Store, Tensor]:
        """Return the samples of a tile, and the tensor that owns the memory of its inputs."""
        targets = self._targets.get(samples)
        if targets is None:
            targets = self._targets[samples] = convert_targets(samples, self.layout.dtype)
        # Converted once where all of them are in memory.
        x = self._inputs.get(samples) if tile.is_all else None
        if x is None:
            x = convert_inputs(tile.x, samples, self.layout.dtype)
        if tile.is_all:
            self._inputs[samples] = x
        return targets.join_inputs(x), x

    def _values(
        self, inputs: Mapping[str, Tensor], *lead: int
    ) -> tuple[ctypes.Array, list[Tensor]]:
        """Return the values of the input buffers, those of the module where none are given."""
        own = self.layout.zero_inputs(1)
        values = []
        for name in self.inputs:
            given = inputs.get(name)
            shape = own[name].shape[1:]
            if given is None:
                given = own[name].reshape(*[1] * len(lead), *shape).expand(*lead, *shape)
            values.append(given.to(self.layout.dtype).contiguous())
        return (_POINTER * len(values))(*map(address_of, values)), values

    def fits(self, work: TrainingWork) -> bool:
        """Return whether the program can do a training.

        Each input must have one value a step, and where samples need each other no batch may be of
        a single one.
        """
        own = self.layout.zero_inputs(1)
        for name in work.inputs.keys() & set(self.inputs):
            if work.inputs[name].shape[2:] != own[name].shape[1:]:
                return False
        return not (self.together and bool((work.batch_sizes == 1).any()))

    def train(
        self, rows: Float[Tensor, "clients params"], work: TrainingWork
    ) -> Float[Tensor, "clients steps"]:
        """Train clients in place; see `Engine.train`."""
        losses = torch.full(work.batch_sizes.shape, torch.nan, dtype=rows.dtype)
        own = work
        for tile in iterate_training_tiles(work):
            if tile.part.start == 0:
                own = work.select_clients(tile.owners)
            if own.moments is None and tile.part != slice(0, work.num_steps):
                # What optimizers remember is kept from one part of the steps to the next.
                own = self._begin_moments(own)
            self._train_tile(rows[tile.owners], own, tile, losses[tile.owners])
        return losses

    def _begin_moments(self, work: TrainingWork) -> TrainingWork:
        """Return a training with the state of fresh optimizers, which it changes."""
        local, clients = work.local, len(work.batch_sizes)
        shape = clients, local.num_moments, self.layout.trainable
        moments = torch.full(shape, local.initial_accumulator_value, dtype=self.layout.dtype)
        taken = torch.zeros(clients, dtype=torch.int64)
        return replace(work, moments=moments, steps_taken=taken)

    def _train_tile(
        self,
        rows: Float[Tensor, "clients params"],
        work: TrainingWork,
        tile: Tile,
        losses: Float[Tensor, "clients steps"],
    ) -> None:
        """Take the steps of a tile with its clients in place, and set their losses."""
        places, length = to_int64(work.sample_indices), to_int64(work.batch_sizes)
        lies = None
        if tile.where is not None:
            lies = to_int64(tile.where[tile.owners])
        keys = taken = anchor = draws = fill = None
        padding = anchor_stride = 0
        if work.draw_keys is not None:
            keys = to_int64(work.draw_keys)
        if work.steps_taken is not None:
            taken = to_int64(work.steps_taken)
        if work.anchor is not None and work.prox:
            anchor = make_rows_contiguous(work.anchor)
            anchor_stride = anchor.stride(0)
        crops = work.augment
        if crops is not None:
            assert isinstance(crops, CropFlip), "functions are called before: `split_for_programs`"
            draws, fill = to_int64(crops.keys), crops.fill.to(rows.dtype).contiguous()
            padding = crops.padding
        # Tensors whose names begin with an underscore own memory that the job points to, and have
        # to live until the call returns.
        inputs, _values = self._values(work.inputs, *work.batch_sizes.shape)
        assert rows.stride(1) == 1
        assert work.moments is None or work.moments.is_contiguous()
        noise, _draws = convert_noise(work.noise)
        rule, _rates = convert_optimizer(work)
        # Samples that need each other are computed in one call, however many they are.
        samples = self._samples["train"]
        if self.together and length.numel():
            samples = max(1, int(length.max()))
        where, size = self._train.memory(samples)
        augment = CropFlipJob(address_of(draws), address_of(fill), padding)
        store, _x = self._store(work.samples, tile)
        job = _Training(
            store, augment, noise, _Memory(address_of(where), size, samples),
            address_of(rows), address_of(self._frozen), address_of(anchor), ctypes.cast(inputs,
            _POINTER),
            address_of(places), address_of(length), address_of(keys), address_of(lies),
            address_of(losses),
            address_of(work.moments), address_of(taken), rule, rows.stride(0), anchor_stride,
            work.num_steps,
            places.shape[2], self.layout.trainable, work.prox, tile.part.start, tile.part.stop,
        )  # fmt: skip
        run_on_threads(self._library.train, job, len(rows))

    def measure(
        self,
        table: Float[Tensor, "models params"],
        pairs: EvaluationPairs,
        inputs: Mapping[str, Tensor],
    ) -> Float[Tensor, "values pairs"]:
        """Return the mean loss and score of each pair; see `Engine.measure_pairs`."""
        # Programs add up losses and scores in double precision.
        values = torch.zeros(2, len(pairs.models), dtype=torch.float64)
        for tile in iterate_measuring_tiles(pairs, self._samples["judge"]):
            inside = (pairs.sets >= tile.owners.start) & (pairs.sets < tile.owners.stop)
            chosen = inside.nonzero().flatten()
            own = replace(pairs, models=pairs.models[chosen], sets=pairs.sets[chosen])
            # A later part of a set adds to the sums of the earlier ones.
            values[:, chosen] = self._measure_tile(table, own, inputs, tile, values[:, chosen])
        return values.to(self.layout.dtype)

    def _measure_tile(
        self,
        table: Float[Tensor, "models params"],
        pairs: EvaluationPairs,
        inputs: Mapping[str, Tensor],
        tile: Tile,
        values: Float[Tensor, "values pairs"],
    ) -> Float[Tensor, "values pairs"]:
        """Return loss and score of pairs, or their sums where a set is not at its end."""
        table, values = make_rows_contiguous(table), values.contiguous()
        # See `_train_tile`: the tensors must outlive the call.
        given, _values = self._values(inputs, len(table))
        places, count = to_int64(pairs.sample_indices), to_int64(pairs.set_sizes)
        models, sets = to_int64(pairs.models), to_int64(pairs.sets)
        lies = None
        if tile.where is not None:
            lies = to_int64(tile.where)
        noise, _draws = convert_noise(pairs.noise)
        samples = self._samples["judge"]
        where, size = self._judge.memory(samples)
        store, _x = self._store(pairs.samples, tile)
        job = _Measuring(
            store, noise, _Memory(address_of(where), size, samples),
            address_of(table), address_of(self._frozen), ctypes.cast(given, _POINTER),
            address_of(places),
            address_of(count), address_of(models), address_of(sets), address_of(lies),
            address_of(values[0]),
            address_of(values[1]), table.stride(0), places.shape[1], tile.part.start,
            tile.part.stop,
        )  # fmt: skip
        run_on_threads(self._library.measure, job, len(pairs.models))
        return values
