"""The choice of an engine: the requested one, or what "auto" expects to be fastest."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.engine._base import MODULE_ERRORS, Engine, Objective
from coterie.engine._client_axis import NoClientAxisError
from coterie.engine._loop import LoopEngine, TrialStep
from coterie.engine._shared_backbone import SharedBackboneEngine
from coterie.engine._triton import TritonEngine
from coterie.engine._vmap import VmapEngine
from coterie.engine.native.compiled import CompiledEngine
from coterie.engine.native.compiler import CompilerError
from coterie.engine.native.trace import NotTraceableError, Traces
from coterie.engine.native.traced import trace_module
from coterie.engine.options import Workload
from coterie.errors import ConfigError, ModelError, OutOfMemory, describe_unknown, first_line
from coterie.models.draws import KEY, DispatchMode, KeyedDraws
from coterie.models.layout import Layout
from coterie.rng import Rng

ENGINES: dict[str, type[Engine]] = {
    "loop": LoopEngine,
    "vmap": VmapEngine,
    "compiled": CompiledEngine,
    "shared-backbone": SharedBackboneEngine,
}
GPU_ENGINES: dict[str, type[Engine]] = {"triton": TritonEngine}
"""Engines for a CUDA device alone."""
ENGINE_NAMES = ("auto", *ENGINES, *GPU_ENGINES)
"""What a setting may say."""

# Predicted seconds, within a factor of two of what benchmarks/building.py measures. Building a
# program: to begin, for a node of its graphs, for a convolution in them.
_BUILD, _BUILD_NODE, _BUILD_CONVOLUTION = 2.3, 0.004, 0.1
# What each run takes to record a node and to find the program again: 0.2 to 0.7 ms in trials that
# are not stored.
_RECORD_NODE = 3e-4
# What a program saves: a node of the graph of a step is a call of PyTorch, whatever the batch, and
# a product of a sample in the forward pass is faster, together with two in the backward pass.
_CALL, _PRODUCT = 4e-6, 5e-11
_FEW = 2000  # samples that are trained on before building a program could be worthwhile


_NO_BATCHING_RULE = re.compile(r"not yet implemented the batching rule for ([\w:]+)")

# products of a client's batch above which a CPU is faster with one client after another
_MAX_BATCH_PRODUCTS = 500_000
# clients of a round below which it is so too: a batched program takes as long for one as for eight
_FEW_CLIENTS = 16
# share of a module's weights that is frozen, from which one pass over it serves all clients
_FROZEN_SHARE = 0.5
# Of the largest gradient of a tensor: how far a pass of several clients may differ from one alone,
# which is far above what sums round and far below what samples that join change.
_TOLERANCE = {"full": 1e-3, "tf32": 5e-2, "bf16": 5e-2}


def count_products(layout: Layout, x: Tensor) -> int:
    """Return the approximate number of multiplications in the forward pass of one sample.

    Args:
        layout: of the module.
        x: a small batch of prepared inputs.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
        >>> count_products(Layout(net), torch.zeros(5, 1, 4, 4))
        96
    """
    x = x.to(next(layout.eval_module.parameters()).device)
    # What the module draws is made of a key outside the counter, so that it does not count.
    draws = KeyedDraws(torch.tensor(0, device=x.device))
    with torch.no_grad(), draws, _ProductCounter() as counted:
        layout.eval_module(x)
    return counted.count // len(x)


class _ProductCounter(DispatchMode):
    """Counts the multiplications of matrix products and convolutions while it is active.

    Attributes:
        count: multiplications.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count."""
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in ("mm", "bmm"):
            self.count += out.numel() * args[0].shape[-1]
        # Their first argument is what the product is added to.
        elif name in ("addmm", "baddbmm"):
            self.count += out.numel() * args[1].shape[-1]
        # Each output is a sum over the kernel of its channel.
        elif name == "convolution":
            self.count += out.numel() * args[1][0].numel()
        # A recurrent layer is one operation on a CPU: in each step of time and for each sample,
        # input and hidden state are multiplied by a matrix each.
        elif name == "mkldnn_rnn_layer":
            self.count += args[0].shape[0] * args[0].shape[1] * (args[1].numel() + args[2].numel())
        return out


@dataclass(frozen=True)
class CompilingForecast:
    """What compiling is predicted to cost and to save, in seconds.

    It follows from the graphs of the module and the work of a plan alone, never from a clock or
    from what was compiled before, so that a plan and its repetition choose the same engines.
    """

    cost: float
    saving: float

    @staticmethod
    def predict(traces: Traces, products: int, work: Workload) -> "CompilingForecast":
        """Return the forecast of a module.

        Args:
            traces: the graphs of its training step and its evaluation.
            products: multiplications in the forward pass of a sample; see `count_products`.
            work: of all runs that share the program.
        """
        nodes = [*traces.train.nodes, *traces.judge.nodes]
        convolutions = sum(node.name.startswith("convolution") for node in nodes)
        of_nodes = (_BUILD_NODE + _RECORD_NODE * work.runs) * len(nodes)
        cost = _BUILD + of_nodes + _BUILD_CONVOLUTION * convolutions
        calls = _CALL * len(traces.train.nodes) * work.num_steps
        return CompilingForecast(cost, calls + _PRODUCT * products * (work.train_samples or 0.0))

    @staticmethod
    def bound_share(products: int, work: Workload) -> float | None:
        """Return at most which share of its cost compiling saves, whatever the graphs are.

        Each node costs and saves, and so do the beginning and the products: their sums have a ratio
        that is no larger than the larger of the two.

        Returns:
            The share; None where it depends on the graphs whether compiling is worthwhile. To
            record them takes as long as a short run.
        """
        of_nodes = _CALL * work.num_steps / (_BUILD_NODE + _RECORD_NODE * work.runs)
        of_products = _PRODUCT * products * (work.train_samples or 0.0) / _BUILD
        share = max(of_nodes, of_products)
        return share if share < 1 else None

    @property
    def is_worthwhile(self) -> bool:
        """Whether compiling saves more than it costs."""
        return self.saving > self.cost


def explain_one_by_one(
    products: int, batch_size: int | None = None, clients: int | None = None
) -> str | None:
    """Return why one client after another is expected to be faster on a CPU than many at once.

    With small products a CPU waits for the interpreter, and a batched program shares that cost
    between clients, if they are several; large products are faster one by one. `benchmarks/auto.py`
    measures the thresholds.

    Args:
        products: multiplications in the forward pass of a sample; see `count_products`.
        batch_size: samples of a client's step; None for unknown.
        clients: that train in a round; None for unknown.

    Returns:
        The reason; None where a batched program is expected to be faster.
    """
    if batch_size is not None and batch_size * products > _MAX_BATCH_PRODUCTS:
        return "the products of a batch are too large for many clients at once"
    if clients is not None and clients < _FEW_CLIENTS:
        return f"{clients} clients in a round are too few for many at once"
    return None


def make_engine(
    name: str,
    layout: Layout,
    objective: Objective,
    x: Tensor,
    y: Tensor,
    work: Workload | None = None,
    *,
    precision: str = "full",
    cuda_graphs: bool = False,
    portable: bool = False,
) -> Engine:
    """Return an engine that can run a module, tried on a sample batch.

    Args:
        name: "auto", or a name of ENGINES.
        layout: the module's layout.
        objective: the loss of each sample.
        x: a small batch of prepared inputs, [samples, *features].
        y: its targets.
        work: how much is trained; "auto" compiles, and batches clients, only where that is expected
            to be faster. A few samples when None.
        precision: see `engine.precision.product_precision`.
        cuda_graphs: see `VmapEngine`.
        portable: take the compiled engine, with a program for all processors of a kind.

    Raises:
        ConfigError: for an unknown name, or an engine that does not compute at that precision or
            with the optimizer of the work.
        ModelError: when the module cannot be run on such inputs at all.
    """
    work = work or Workload()
    _check_engine_fits(name, work.custom_optimizer, precision, portable)
    # The loop engine runs any module: what it cannot run is wrong with the module or its inputs.
    layout.draws = {True: True, False: True}
    loop, problem = _make_loop_engine(layout, objective, x, y, precision)
    if problem is not None:
        layer, error = problem
        shape = tuple(x.shape[1:])
        raise ModelError(
            f"the module cannot be trained on inputs of shape {shape}: {layer}: {error}"
            + _describe_types(layout)
        ) from error
    layout.draws = dict(loop.drew)
    if unstored := loop.changed_buffers(x.device):
        warnings.warn(
            f"the module's forward pass changes {', '.join(map(repr, unstored))}, which is not "
            "kept from round to round: make it a persistent buffer of floating-point numbers, or "
            "of one whole number",
            stacklevel=3,
        )
    only = _why_only_loop(loop, x, work)
    if name == "shared-backbone":
        engine, why = _make_shared(loop, x, y) if not only else (None, only[0])
        if engine is None:
            raise ModelError(
                f"engine = 'shared-backbone' cannot train the module: {why}; take engine = 'auto'"
            )
        return _set_reason(engine, name)
    if only or name == "loop":
        return _set_reason(loop, name, *only)
    if name == "triton":
        try:
            engine = TritonEngine(layout, objective, x, y, precision)
        except NotTraceableError as error:
            raise ModelError(
                f"engine = 'triton' cannot train the module: {error}; take engine = 'auto'"
            ) from error
        return _set_reason(engine, name)
    against = []  # what speaks against a faster engine
    products = 0
    if x.device.type == "cpu" and name != "vmap":
        products = count_products(layout, x)
    if name in ("auto", "compiled"):
        unfit, traces = None, None
        if name == "auto" and not portable:
            unfit, traces = _why_not_compile(loop, x, y, products, work, precision)
        if unfit is None:
            try:
                engine = CompiledEngine(layout, objective, x, y, traces, portable)
                return _set_reason(engine, name)
            except (NotTraceableError, CompilerError) as error:
                unfit = f"the module cannot be compiled: {error}"
                if portable:
                    raise ConfigError(
                        f"portable = true takes the compiled engine: {unfit}"
                    ) from error
                # A compiler can be installed, so its absence is worth a warning. A module that
                # cannot be traced is usual, and a warning only where a program was asked for.
                if name == "compiled" or isinstance(error, CompilerError):
                    other = "loop" if _why_one_by_one(x, products, work) else "vmap"
                    warnings.warn(f"the {other} engine is used: {unfit}", stacklevel=3)
        against.append(unfit)
    return _make_uncompiled(name, loop, x, y, products, work, against, precision, cuda_graphs)


@dataclass(frozen=True)
class EngineChoice:
    """The engine that runs of a plan take, and why.

    Args:
        name: of the engine.
        reason: see `Engine.reason`.
    """

    name: str
    reason: str


def choose_engine(
    loop: LoopEngine, x: Tensor, y: Tensor, work: Workload, precision: str = "full"
) -> EngineChoice:
    """Return what `make_engine` takes for "auto", as far as that is known without compiling.

    Args:
        loop: a loop engine of the module that `make_engine` returned.
        x: a small batch of prepared inputs.
        y: its targets.
        work: of a run, with what all runs that share the program train.
        precision: see `make_engine`.
    """
    only = _why_only_loop(loop, x, work)
    if only:
        engine = _set_reason(loop, "auto", *only)
    else:
        products = count_products(loop.layout, x) if x.device.type == "cpu" else 0
        unfit, _ = _why_not_compile(loop, x, y, products, work, precision)
        if unfit is None:
            name, what = CompiledEngine.name, CompiledEngine.description
            return EngineChoice(name, f"{name}, {what}")
        engine = _make_uncompiled("auto", loop, x, y, products, work, [unfit], precision, False)
    return EngineChoice(engine.name, engine.reason)


def _check_engine_fits(
    name: str, custom_optimizer: str | None, precision: str, portable: bool
) -> None:
    """Refuse an engine that is unknown, or does not compute as asked."""
    if name not in ENGINE_NAMES:
        raise ConfigError(describe_unknown("engine", name, ENGINE_NAMES))
    if name == "compiled" and precision != "full":
        raise ConfigError(
            f"engine = 'compiled' computes in full; found precision = {precision!r}: take another "
            "engine"
        )
    if custom_optimizer and name not in ("auto", "loop"):
        raise ConfigError(
            f"optimizer = {custom_optimizer!r} trains one client after another; found engine = "
            f"{name!r}, expected 'auto' or 'loop'"
        )
    if portable and (custom_optimizer or name not in ("auto", "compiled")):
        what = f"optimizer = {custom_optimizer!r}" if custom_optimizer else f"engine = {name!r}"
        raise ConfigError(f"portable = true takes the compiled engine; found {what}: leave it out")


def _why_only_loop(loop: LoopEngine, x: Tensor, work: Workload) -> list[str]:
    """Return why no other engine can run a module at all; nothing where one can."""
    unstored = loop.changed_buffers(x.device)
    if unstored:
        return [f"forward changes {unstored[0]!r}, which no row holds"]
    if work.custom_optimizer:
        return [f"the optimizer {work.custom_optimizer} has no faster program here"]
    return []


def _why_one_by_one(x: Tensor, products: int, work: Workload) -> str | None:
    """See `explain_one_by_one`; only a CPU is faster with one client after another."""
    if x.device.type != "cpu":
        return None
    return explain_one_by_one(products, work.batch_size, work.clients)


def _make_uncompiled(
    requested: str,
    loop: LoopEngine,
    x: Tensor,
    y: Tensor,
    products: int,
    work: Workload,
    against: list[str],
    precision: str,
    cuda_graphs: bool,
) -> Engine:
    """Return the fastest of the other engines that runs the module."""
    if requested == "auto" and _is_mostly_frozen(loop.layout):
        shared, why = _make_shared(loop, x, y)
        if shared is not None:
            return _set_reason(shared, requested, *against)
        against = [*against, f"clients cannot share a pass: {why}"]
    if requested != "vmap" and (why := _why_one_by_one(x, products, work)):
        return _set_reason(loop, requested, *against, why)
    engine = VmapEngine(loop.layout, loop.objective, precision, cuda_graphs)
    # vmap warns where an operation has no batching rule: it then loops over clients, and the loop
    # engine is the better choice. All other warnings are passed on below.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        problem = _find_failure(engine, x, y)
    slow = []
    for one in said:
        found = _NO_BATCHING_RULE.search(str(one.message))
        if found:
            slow.append(found[1])
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if problem is None and slow and requested != "vmap":
        against = [*against, f"{slow[0]} runs over one client after another all the same"]
        return _set_reason(loop, requested, *against)
    if problem is None:
        if requested == "auto":
            faster, why = _try_triton(engine, x, y, work)
            if faster is not None:
                return _set_reason(faster, requested, *against)
            against = [*against, *why]
        return _set_reason(engine, requested, *against)
    layer, error = problem
    why = f"{layer} cannot be run over many clients at once ({first_line(error)})"
    warnings.warn(f"the loop engine is used: {why}", stacklevel=4)
    return _set_reason(loop, requested, *against, why)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _try_triton(
    engine: VmapEngine, x: Tensor, y: Tensor, work: Workload
) -> tuple[TritonEngine | None, list[str]]:
    """Return the engine of kernels where a short trial on a CUDA device says that it is faster.

    A device has no bits to keep: engines agree within rounding there, so that the choice may depend
    on a clock.
    """
    if not _is_on_gpu(x):
        return None, []
    if work.train_samples is None or work.train_samples < _FEW:
        return None, ["too little work to compile a kernel"]
    clients, size = work.clients or _FEW_CLIENTS, work.batch_size or len(x)
    try:
        found = TritonEngine(engine.layout, engine.objective, x, y, engine.precision)
        why = found.why_not_faster(engine, x, y, clients, size)
    except NotTraceableError as error:
        return None, [f"the module has no kernel: {error}"]
    return (None, [why]) if why else (found, [])


def _is_mostly_frozen(layout: Layout) -> bool:
    """Return whether the frozen share of the weights is large enough for one pass of all clients."""
    frozen = sum(one.numel() for one in layout.frozen.values())
    return frozen >= _FROZEN_SHARE * (frozen + layout.trainable)


def _make_shared(loop: LoopEngine, x: Tensor, y: Tensor) -> tuple[SharedBackboneEngine | None, str]:
    """Return the engine that runs clients in one pass, or why it cannot run a module.

    It is tried on three clients, the second of which is that of the trial of the loop engine: its
    loss and its gradients must not depend on those before and behind it, who have other weights,
    other samples and other draws.
    """
    layout = loop.layout
    if loop.tried is None:
        loop.tried = _run_trial(loop, x, y)
    alone = loop.tried
    for slot in layout.state_slots:
        if not torch.equal(alone.row[slot.start : slot.stop], alone.after[slot.start : slot.stop]):
            return None, f"training changes {slot.name!r}, of which one pass has one for all"
    try:
        engine = SharedBackboneEngine(loop)
    except NoClientAxisError as error:
        return None, str(error)
    trial = _surround_client(layout, alone, x, y)
    with warnings.catch_warnings(), _follow_layers(engine) as trail:
        warnings.simplefilter("ignore")  # given in the trial of the loop engine
        try:
            losses, gradients, _ = engine.compute_gradients(*trial)
        except MODULE_ERRORS as error:
            if OutOfMemory.matches(error):
                raise
            return None, f"{trail[-1]}: {first_line(error)}"
    found = layout.split_rows(torch.cat([gradients[1], alone.row[layout.trainable :]]))
    wanted = layout.split_rows(torch.cat([alone.gradient, alone.row[layout.trainable :]]))
    limit = _TOLERANCE[loop.precision]
    largest = float(alone.gradient.abs().max())
    # `not <=` also catches NaN.
    if not abs(float(losses[1] - alone.loss)) <= limit * max(1.0, abs(float(alone.loss))):
        return None, "the loss of a client depends on the other clients of a pass"
    for slot in layout.trained_slots:
        gap = float((found[slot.name] - wanted[slot.name]).abs().max())
        # What is next to nothing compared with other gradients is rounding.
        scale = max(float(wanted[slot.name].abs().max()), 1e-3 * largest)
        if not gap <= limit * scale:
            return None, f"the gradient of {slot.name!r} depends on the other clients of a pass"
    return engine, ""


def _surround_client(
    layout: Layout, alone: TrialStep, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return the client of a trial between two others: rows, inputs, targets and keys."""
    rows = torch.stack([alone.row] * 3)
    noise = Rng(0).generator("engine.trial").standard_normal((2, layout.trainable))
    # Moved far enough that what leaks into the client shows there.
    rows[::2, : layout.trainable] += 0.1 * torch.from_numpy(noise).to(rows)
    # One sample, repeated: then means over the samples of a batch are others too.
    batches = torch.stack([x[:1].expand_as(x), x, x[-1:].expand_as(x)])
    targets = torch.stack([y[:1].expand_as(y), y, y[-1:].expand_as(y)])
    # 0 is the key of trials.
    return rows, batches, targets, {KEY: torch.tensor([1, 0, 2])}


def _set_reason(engine: Engine, requested: str, *against: str) -> Engine:
    """Let an engine say why it runs: as requested, or what speaks against the faster ones."""
    engine.reason = f"{engine.name}, {engine.description}"
    if against:
        engine.reason += ": " + "; ".join(against)
    elif engine.name == requested:
        engine.reason += ": as set"
    return engine


def _why_not_compile(
    loop: LoopEngine, x: Tensor, y: Tensor, products: int, work: Workload, precision: str
) -> tuple[str | None, Traces | None]:
    """Return why "auto" does not compile a module; otherwise its graphs."""
    if x.device.type != "cpu":
        return "native programs run on a CPU", None
    if precision != "full":
        return "native programs compute in full precision", None
    if work.train_samples is None or work.train_samples < _FEW:
        return "too little work to compile", None
    share = CompilingForecast.bound_share(products, work)
    little = "too little work to compile, which takes"
    if share is not None:
        return f"{little} over {_BUILD} s and would save at most {share:.1%} of what it takes", None
    try:
        traces = trace_module(loop.layout, loop.objective, x, y)
    except NotTraceableError as error:
        return f"the module cannot be compiled: {error}", None
    found = CompilingForecast.predict(traces, products, work)
    if not found.is_worthwhile:
        return f"{little} about {found.cost:.1f} s and would save {found.saving:.2g} s", None
    return None, traces


def _describe_types(layout: Layout) -> str:
    """Say which types the module's weights had, where they were others than those of the rows."""
    first: dict[torch.dtype, str] = {}
    for name, parameter in layout.original.named_parameters():
        if parameter.is_floating_point():
            first.setdefault(parameter.dtype, name)
    if not first.keys() - {layout.dtype}:
        return ""
    found = ", ".join(f"{name!r} is {str(dtype)[6:]}" for dtype, name in first.items())
    return (
        f"; rows hold all weights as {str(layout.dtype)[6:]}, and of the module {found}: convert "
        "by the type of a layer's weight, x.to(self.layer.weight.dtype), or with dtype = 'float64' "
        "give the module in that"
    )


def _make_loop_engine(
    layout: Layout, objective: Objective, x: Tensor, y: Tensor, precision: str
) -> tuple[LoopEngine, tuple[str, Exception] | None]:
    """Return the loop engine, with channels last where that works, and why it cannot be run."""
    # A module that views what a convolution returns fails with channels last, so this is a trial.
    convolves = any(isinstance(part, nn.Conv2d) for part in layout.train_module.modules())
    if convolves and x.device.type == "cpu":
        loop = LoopEngine(layout, objective, precision, channels_last=True)
        if _find_failure(loop, x, y) is None:
            return loop, None
    loop = LoopEngine(layout, objective, precision)
    return loop, _find_failure(loop, x, y)


def _find_failure(engine: Engine, x: Tensor, y: Tensor) -> tuple[str, Exception] | None:
    """Try an engine on equal clients; return the layer at which it failed and the error."""
    error = _try_engine(engine, x, y)
    if error is None:
        return None
    # Once more, to name the layer: hooks take longer than the trial of a small module, which
    # usually passes.
    with warnings.catch_warnings(), _follow_layers(engine) as trail:
        warnings.simplefilter("ignore")  # given in the first trial
        error = _try_engine(engine, x, y) or error
    return trail[-1], error


def _try_engine(engine: Engine, x: Tensor, y: Tensor) -> Exception | None:
    """Return why an engine fails on equal clients; None when it does not."""
    try:
        trial = _run_trial(engine, x, y)
    except MODULE_ERRORS as error:
        if OutOfMemory.matches(error):  # of the machine at this moment, not of the module
            raise
        return error
    if isinstance(engine, LoopEngine):
        # What another engine computes is compared with it, so that it need not run again.
        engine.tried = trial
    return None


def _run_trial(engine: Engine, x: Tensor, y: Tensor) -> TrialStep:
    """Run an engine on equal clients; return what the first has."""
    layout = engine.layout
    clients = 1 if engine.runs_one_by_one(x.device) else 2
    rows = torch.cat([layout.own_values()[None]] * clients)
    inputs = layout.zero_inputs(clients)
    batches, targets = torch.stack([x] * clients), torch.stack([y] * clients)
    # a foreign module must not draw from anybody's stream
    with Rng(0).temporary_torch_seed("engine.trial"):
        losses, gradients, state = engine.compute_gradients(rows, batches, targets, inputs)
        engine.forward(rows, batches, inputs)
    after = torch.cat([rows[0, : layout.trainable], state[0]])
    return TrialStep(rows[0], after, losses[0], gradients[0])


@contextmanager
def _follow_layers(engine: Engine) -> Iterator[list[str]]:
    """Give the names of the layers of an engine's modules that are running, the innermost last.

    One that fails stays at the end, as its second hook is not called. An error outside of all
    layers is the module's own, whose name is the first.
    """
    trail = [type(engine.layout.train_module).__name__]
    handles = []
    for module in engine.modules:
        for path, part in module.named_modules():
            name = f"{type(part).__name__} {path!r}" if path else type(part).__name__
            handles.append(
                part.register_forward_pre_hook(lambda _m, _a, name=name: trail.append(name))
            )
            # What a hook returns would replace the layer's output: `and None` returns nothing.
            handles.append(part.register_forward_hook(lambda _m, _a, _o: trail.pop() and None))
    try:
        yield trail
    finally:
        for handle in handles:
            handle.remove()


def default_block(layout: Layout, device: str) -> int:
    """Return how many clients to train at once: parameters, gradients, moments near 32 MB."""
    # Numbers of all rows of a block. Parameters, gradients and two moments of 4 bytes each make 32
    # MB, near the caches of a CPU; a device gets a hundred times as much.
    budget, most = 200_000_000, 4096
    if device == "cpu":
        budget, most = 2_000_000, 128
    return max(4, min(most, budget // layout.size))
