"""The check of the translation: the untouched module in plain PyTorch against what will train.

Training runs on rows of a matrix, on samples that were copied and cast, and in an engine that
may be a native program. Before the first round `check_translation` compares, on real samples of
one or two clients, what that computes with what the given module computes by `forward` and
`backward` alone: the weights, the inputs and targets, outputs, losses, gradients, buffers, and the
step of the optimizer. After the last round `check_models_home` lets the models that are taken home
predict the test sets again. A difference is a TranslationError; what is meant is a line.

Nothing here uses a layout's modules, engines or optimizers on the plain side, so that a fault of
theirs is on one side alone. No draw comes from a stream of the run, and no state of it is changed.
"""

import math
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

import coterie.engine
from coterie.data.federation import Federation
from coterie.data.rows import read_inputs
from coterie.engine.optim import LocalTraining
from coterie.engine.task import Task
from coterie.errors import CoterieError, ModelError, OutOfMemory, TranslationError, first_line
from coterie.models.given import copy_deeply
from coterie.models.layout import Layout
from coterie.rng import Rng
from coterie.runtime import _plain
from coterie.runtime._given_data import compare_data, strip_federation, take_samples
from coterie.runtime._plain import PURPOSE, PlainModule, PlainOptimizer, Values, prepare_inputs
from coterie.runtime._random_layers import compare_draws, compare_random_loss, require_repeatable
from coterie.runtime._trained import ADVICE, MANY_PARAMS, TrainedSide

_SAMPLES = 16  # of each client: half a usual batch, so that all comes to about two steps of one
_SLOW_STEP = 0.05  # seconds of a plain step from which samples, draws and steps are fewer
# What rounding leaves of a quantity, as a share of its scale. Products of a few thousand terms lose
# about a hundred units of the last place (2^-23 of float32); float64 has six digits to spare, since
# an operation that is left out, or another constant, is never as small as 1e-10. Products in
# bfloat16 and TF32 have 8 and 11 digits of the base 2.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10, "bf16": 5e-2, "tf32": 5e-3}
# Weights are moved by about two units of the last place of products to see what rounding does.
UNITS = {torch.float32: 2.0**-22, torch.float64: 2.0**-51, "bf16": 2.0**-8, "tf32": 2.0**-10}


@dataclass(frozen=True)
class Translation:
    """What a check has found.

    Args:
        compared: the largest difference of each kind of quantity, as a share of its scale.
        lines: what differs and is meant, or was not compared and why.
        engine: that computed.
        samples: how many of each client were used.
        seconds: that it took.
    """

    compared: Mapping[str, float]
    lines: tuple[str, ...] = ()
    engine: str = ""
    samples: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the plain values that provenance.json stores."""
        numbers = {name: float(f"{value:.2g}") for name, value in self.compared.items()}
        return {
            "engine": self.engine, "samples": self.samples, "seconds": round(self.seconds, 3),
            "compared": numbers, "lines": list(self.lines),
        }  # fmt: skip


def check_translation(
    task: Task, federation: Federation, local: LocalTraining, rng: Rng
) -> Translation:
    """Compare what will train with the untouched module in plain PyTorch.

    Args:
        task: of the clients that this process hosts.
        federation: their data, from which the task was built.
        local: how they train.
        rng: the streams of the run, from which only the first weights are drawn again.

    Raises:
        TranslationError: when something differs by more than rounding; it names the quantity, the
            size of the difference, and the layer or tensor where it is.
        ModelError: when private training cannot train the module, whose samples are joined.
    """
    started, lines, engine = time.perf_counter(), list[str](), task.engine.name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself warns of the same
            compared, samples = _compare(task, federation, local, rng, lines)
    except CoterieError:
        raise
    except Exception as error:
        if OutOfMemory.matches(error):
            raise
        raise TranslationError(_name_culprit(error, engine)) from error
    seconds = time.perf_counter() - started
    return Translation(compared, tuple(lines), engine, samples, seconds)


def _name_culprit(error: Exception, engine: str) -> str:
    """Say which side has raised an error: the files that it came through show it."""
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    said = f"raises {type(error).__name__} ({first_line(error)})"
    if _plain.__file__ in files:
        # A module that trains, and fails here, is another than what trains.
        return f"the module in plain PyTorch {said} on samples that the {engine} engine trains; {ADVICE}"
    folder = str(Path(coterie.engine.__file__).parent)
    if any(file.startswith(folder) for file in files):
        return f"the {engine} engine {said} on samples that the module in plain PyTorch takes; {ADVICE}"
    return f"the check of the translation {said}; check = false runs without it: please report it"


def _compare(
    task: Task, federation: Federation, local: LocalTraining, rng: Rng, lines: list[str]
) -> tuple[dict[str, float], int]:
    """Compare everything; return the largest differences, and how many samples were used."""
    compared = {"samples": compare_data(task, federation)}
    counts = task.count_samples("train")
    if not int(counts.max()):
        lines.append("no client has training samples")
        return compared, 0
    most = 1 if task.layout.size > MANY_PARAMS else 2
    rows = torch.argsort(-counts.clamp(max=_SAMPLES), stable=True)[:most]
    rows = rows[counts[rows] > 0]
    sample = take_samples(
        federation, rows, min(_SAMPLES, local.batch_size, int(counts[rows].min()))
    )
    plain = PlainModule.build(task, rng, int(task.ids[rows[0]]), lines)
    # In this order: a forward pass may change the module, in place or outside of its tensors.
    first = task.select_clients(rows).initial_models(rng).detach()
    compared["weights"] = _compare_weights(plain, task.layout, first[0], lines)
    if line := plain.require_no_memory(
        sample, plain.inputs(sample, read_inputs(sample.x)[0]), LIMITS[plain.roundoff]
    ):
        lines.append(line)
    slow = _step_seconds(plain, sample) > _SLOW_STEP
    if slow:
        first, few = first[:1], slice(_SAMPLES // 2)
        sample = strip_federation(sample, read_inputs(sample.x[:1, few]), sample.y[:1, few])
    ours = TrainedSide.build(task, sample, rng)
    compared["inputs"] = _compare_inputs(ours, sample)
    _compare_values(plain, ours, first, local, lines, compared, slow)
    return compared, sample.x.shape[1]


def _step_seconds(plain: PlainModule, sample: Federation) -> float:
    """Return about how long a plain step takes: the shorter of two, the first of which may load."""
    x, y = plain.inputs(sample, read_inputs(sample.x)[0]), plain.targets(sample.y[0])
    found = float("inf")
    for _ in range(2):
        # Not the time of the clock, which other processes make longer.
        begun = time.process_time()
        plain.train(sample, x, y)
        found = min(found, (time.process_time() - begun) / torch.get_num_threads())
        if found <= _SLOW_STEP:
            break
    return found


# ---------------------------------------------------------------- comparisons


def _find_largest(values: Tensor) -> float:
    """Return the largest absolute value; NaN where one is, and 0.0 of no values."""
    return float(values.detach().abs().max()) if values.numel() else 0.0


def _compare_inputs(ours: TrainedSide, sample: Federation) -> float:
    """Compare prepared inputs with what plain operations make."""
    found = ours.inputs().cpu()
    expected = torch.stack([prepare_inputs(sample, x, found.dtype) for x in read_inputs(sample.x)])
    gap, scale = _find_largest(found - expected), _find_largest(expected)
    # `not <=` also catches NaN; 1e-30 keeps 0 of 0 from being one.
    if not gap <= LIMITS[found.dtype] * max(scale, 1e-30):
        raise TranslationError(f"inputs differ by {gap:.3g} of {scale:.3g} from the data's own")
    return gap / max(scale, 1e-30)


def _kind(name: str) -> str:
    """Return the kind of a quantity: "gradient of 0.weight" is a gradient."""
    first = name.partition(" ")[0]
    return first if first in ("gradient", "buffer") else name


@dataclass(frozen=True)
class _Gap:
    """A quantity that differs, by how much, and what its scale and the limit are."""

    name: str
    size: float
    scale: float
    limit: float
    text: str = ""

    @property
    def relative(self) -> float:
        """The difference as a share of the scale."""
        return self.size / max(self.scale, 1e-30)

    def __str__(self) -> str:
        return f"{self.name}: " + (
            self.text
            or f"what trains differs by {self.size:.3g} from the module in plain PyTorch, whose largest "
            f"entry is {self.scale:.3g} (rounding explains {self.limit:.2g})"
        )


def find_gaps(
    ours: Values, plain: Values, limit: float, moved: Values | None, compared: dict[str, float]
) -> list[_Gap]:
    """Return the quantities that differ by more than rounding.

    The scale of a gradient is at least a tenth of the largest one's: where a normalization follows,
    that of a bias is 0, and only rounding is left of it.

    Args:
        ours: what will train.
        plain: what the module computes.
        limit: share of the scale that rounding explains.
        moved: `plain` at weights that were moved by a unit of the last place: rounding may move
            results by eight times as much.
        compared: receives the largest difference of each kind, as a share of the scale.
    """
    gaps = list[_Gap]()
    slopes = [_find_largest(v) for n, v in plain.items() if n.startswith("gradient")]
    for name, expected in plain.items():
        if name not in ours:
            text = "it changes in a step, and no row holds it"
            gaps.append(_Gap(name, torch.inf, 0.0, 0.0, text))
            continue
        expected, found = expected.detach().cpu().double(), ours[name].detach().cpu().double()
        if found.shape != expected.shape:
            shapes = f"its shape is {tuple(found.shape)}, expected {tuple(expected.shape)}"
            gaps.append(_Gap(name, torch.inf, 0.0, 0.0, shapes))
            continue
        scale = _find_largest(expected)
        size = _find_largest((found - expected).nan_to_num(nan=torch.inf))
        floor = 0.1 * max(slopes, default=0.0) if name.startswith("gradient") else 0.0
        allowed = limit * max(scale, floor, 1e-30)
        if "loss" in name or "score" in name:  # means: their terms may be larger than they are
            allowed = limit * max(scale, 1.0)
        if moved is not None:
            allowed += 8 * _find_largest(moved[name].cpu().double() - expected)
        if not size <= allowed:  # NaN is a gap, too
            gaps.append(_Gap(name, size, scale, allowed))
        kind = _kind(name)
        compared[kind] = max(compared.get(kind, 0.0), size / max(scale, floor, 1e-30))
    return gaps


def _compare_weights(
    plain: PlainModule, layout: Layout, row: Float[Tensor, " params"], lines: list[str]
) -> float:
    """Compare a row of round 0 with the values of the module that was given."""
    if not plain.given:
        return 0.0
    ours, largest = layout.split_rows(row), 0.0
    named = {name: one for name, one in plain.module.named_parameters() if one.requires_grad}
    named |= {
        name: one for name, one in plain.module.named_buffers()
        if one.is_floating_point() and name not in layout.inputs
    }  # fmt: skip
    for name, given in named.items():
        if name not in ours:
            raise TranslationError(f"{name!r} of the module is not among what trains")
        size, scale = _find_largest(ours[name].to(given) - given), _find_largest(given)
        if not math.isfinite(scale):
            raise TranslationError(
                f"weights: {name!r} of the module has NaN or infinity before the first round"
            )
        # One rounding to the type of the rows.
        if not size <= 2.0**-22 * scale:
            raise TranslationError(
                f"weights: {name!r} differs by {size:.3g} in round 0 from the module's own, whose "
                f"largest entry is {scale:.3g}; give a factory that draws from torch's generator "
                "alone, or a module with init = 'given'"
            )
        largest = max(largest, size / max(scale, 1e-30))
    return largest


def shake_module(module: nn.Module, size: float, seed: int) -> nn.Module:
    """Move the parameters of a module by a share of each, at random; return the module."""
    stream = Rng(seed).generator(PURPOSE)
    with torch.no_grad():
        for one in module.parameters():
            if one.is_floating_point():
                noise = torch.from_numpy(stream.standard_normal(tuple(one.shape)))
                one.mul_(1 + size * noise.to(one))
    return module


@dataclass
class _Comparison:
    """Both sides on the samples of the check, and what was found."""

    plain: PlainModule
    ours: TrainedSide
    limit: float
    unit: float
    stream: np.random.Generator
    compared: dict[str, float]

    def shake(self, rows: Tensor, size: float) -> Tensor:
        """Return models whose trained parameters are moved by a share of each, at random."""
        # Running statistics stay: a variance must not become negative, nor a counter a fraction.
        trained = slice(self.ours.task.layout.trainable)
        out = rows.clone()
        noise = torch.from_numpy(self.stream.standard_normal(tuple(out[:, trained].shape)))
        out[:, trained] += size * out[:, trained] * noise.to(out)
        return out

    def run_plain(self, rows: Tensor, *, training: bool, private: bool = False) -> list[Values]:
        """Return what the module computes at each of some rows; no buffers, where it is private."""
        found, layout = [], self.ours.task.layout
        for row, x, y in zip(rows, self.ours.inputs(), self.ours.targets(), strict=True):
            self.plain.load(layout, row)
            run = self.plain.train if training else self.plain.evaluate
            values = run(self.ours.federation, x, y)
            left_out = "buffer" if private else "none"
            found.append({k: v for k, v in values.items() if not k.startswith(left_out)})
        return found

    def compare(
        self,
        rows: Tensor,
        own: Callable[[Tensor], list[Values]],
        *,
        training: bool,
        private: bool = False,
    ) -> None:
        """Compare at some weights, and where it differs, at others near them.

        Rounding opens or shuts a gate (a ReLU, a maximum) that stands at its edge, and a gradient
        jumps. At weights a thousandth away none may stand there, and a fault still shows.
        """
        first: _Gap | None = None
        # Twice, since a gate may stand at its edge there too.
        for size in (0.0, 1e-3, 1e-3):
            at = self.shake(rows, size) if size else rows
            seen: dict[str, float] = {}
            plain = self.run_plain(at, training=training, private=private)
            pairs = list(zip(own(at), plain, strict=True))
            gaps = [gap for a, b in pairs for gap in find_gaps(a, b, self.limit, None, seen)]
            if gaps:
                moved = self.run_plain(self.shake(at, self.unit), training=training)
                gaps = []
                for (a, b), c in zip(pairs, moved, strict=True):
                    gaps += find_gaps(a, b, self.limit, c, seen)
            if not gaps:
                for kind, size in seen.items():
                    self.compared[kind] = max(self.compared.get(kind, 0.0), size)
                return
            if private:
                self.require_single_samples(at, pairs, gaps[0])
            # A score follows from outputs, and is less clear.
            first = first or max(gaps, key=lambda one: ("outputs" in one.name, one.relative))
        where = self.find_layer(rows[0], training)
        raise TranslationError(f"{first}; engine {self.ours.task.engine.name}{where}: {ADVICE}")

    def require_single_samples(
        self, rows: Tensor, pairs: Sequence[tuple[Values, Values]], gap: _Gap
    ) -> None:
        """Refuse a module whose samples alone have the gradients that private training takes.

        Of the whole batch they are others, so that something in it joins the samples.

        Raises:
            ModelError: when that explains the difference.
        """
        for row, (own, _) in enumerate(pairs):
            self.plain.load(self.ours.task.layout, rows[row])
            x, y = self.ours.inputs()[row], self.ours.targets()[row]
            each = [
                self.plain.train(self.ours.federation, x[at : at + 1], y[at : at + 1])
                for at in range(len(x))
            ]
            names = [name for name in each[0] if not name.startswith("buffer")]
            means = {name: torch.stack([one[name] for one in each]).mean(0) for name in names}
            if find_gaps(own, means, 10 * self.limit, None, {}):
                return
        raise ModelError(
            f"local.dp trains by gradients of single samples, and samples alone have others than in "
            f"a batch ({gap.name} differs by {gap.size:.3g} of {gap.scale:.3g}): something in the "
            "module joins the samples of a batch, such as a choice by their values; take what looks "
            "at each sample, or train without dp"
        )

    def list_changed_buffers(self, row: Tensor) -> str:
        """Return the names of the buffers that a plain step changes; "" where it changes none."""
        before = self.ours.task.layout.split_rows(row)
        self.plain.load(self.ours.task.layout, row)
        after = self.plain.train(
            self.ours.federation, self.ours.inputs()[0], self.ours.targets()[0]
        )
        changed = [
            name for name, value in before.items()
            if not torch.equal(after.get(f"buffer {name}", value).to(value), value)
        ]  # fmt: skip
        return ", ".join(changed)

    def find_layer(self, row: Tensor, training: bool) -> str:
        """Name the first layer of the trained copy that takes or returns something else."""
        layout, x = self.ours.task.layout, self.ours.inputs()[0]
        own = copy_deeply(layout.train_module if training else layout.eval_module)
        self.plain.load(layout, row)
        self.plain.module.train(training)
        inputs = {name: value[0] for name, value in layout.zero_inputs(1).items()}
        with torch.no_grad():
            theirs = _trace_layers(
                self.plain.module, lambda: self.plain._run(self.ours.federation, x)
            )
            mine = _trace_layers(
                own, lambda: functional_call(own, {**layout.split_rows(row), **inputs}, (x,))
            )
        for path, (kind, *expected) in theirs.items():
            for word, one, other in zip(
                ("before", "in"), expected, mine.get(path, ("",))[1:], strict=False
            ):
                far = one.shape != other.shape or float(
                    (one - other).abs().max()
                ) > 10 * self.limit * max(1e-30, float(one.abs().max()))
                if far:
                    return f", {word} layer {kind} {path!r}"
        return ""

    # ------------------------------------------------------------------ batches, the optimizer

    def compare_epoch(self, row: Tensor) -> None:
        """Compare the mean loss over the batches of an epoch that moves nothing with that of all.

        A sample that is lost, or used twice, changes it. Only where the mean loss of the whole and
        its gradients are those of its halves: not where a layer or the loss joins the samples of a
        batch.
        """
        federation, x, y = self.ours.federation, self.ours.inputs()[0], self.ours.targets()[0]
        self.plain.load(self.ours.task.layout, row)
        count, half = len(x), len(x) // 2

        def step(part: slice) -> Values:
            found = self.plain.train(federation, x[part], y[part])
            return {name: one for name, one in found.items() if not name.startswith("buffer")}

        # Halves of one sample are no batches: a normalization refuses them, as it does in a run.
        if half < 2:
            return
        values = step(slice(None))
        one, other = step(slice(half)), step(slice(half, None))
        joined = {k: (half * one[k] + (count - half) * other[k]) / count for k in values}
        # Not by the loss alone: of two halves it can be that of the whole by chance.
        if find_gaps(joined, values, 10 * self.limit, None, {}):
            return
        whole = float(values["training loss"])
        limit = 10 * self.limit * max(1.0, abs(whole))
        # Nor where the loss depends on the buffers that the batch before left, such as a counter.
        self.plain.load(self.ours.task.layout, self.take_buffers(row, x, y))
        if not abs(float(step(slice(None))["training loss"]) - whole) <= limit:
            return
        size = max(1, count * 2 // 3)  # two batches of unequal size
        info = self.ours.run_epoch(row[None], size)
        sizes = torch.tensor([size, count - size], dtype=torch.float64)
        used, losses = int(info["train_samples"][0]), info["losses"][0].double()
        found = float((losses[: len(sizes)] * sizes[: len(losses)]).sum() / count)
        if used != count or len(losses) != 2 or not abs(found - whole) <= limit:
            raise TranslationError(
                f"batches: an epoch of {count} samples uses {used} in {len(losses)} batches, of "
                "mean loss "
                f"{found:.6g}; expected each once, of mean loss {whole:.6g} as in plain PyTorch"
            )

    def take_buffers(self, row: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return a model with the buffers that a step on some samples leaves."""
        layout, after = self.ours.task.layout, row.clone()
        left = self.plain.train(self.ours.federation, x, y)
        for slot in layout.slots:
            if slot.start >= layout.trainable:
                after[slot.start : slot.stop] = left[f"buffer {slot.name}"].flatten().to(row)
        return after

    def compare_steps(self, rows: Tensor, local: LocalTraining, steps: int) -> None:
        """Compare steps of the engine's optimizer with torch.optim's, on the engine's gradients."""
        layout = self.ours.task.layout
        # Steps are proportional to the rate; one that is too large for numbers proves nothing.
        local = replace(local, dp=None, lr=min(local.lr, 1.0))
        slots = [slot for slot in layout.slots if slot.stop <= layout.trainable]
        kept = [slot for slot in layout.slots if slot.start >= layout.trainable]
        after, _, _ = self.ours.step(rows, local, steps)
        at, clear = rows.clone(), torch.ones_like(rows[:, : layout.trainable], dtype=torch.bool)
        views = [[row[s.start : s.stop].view(s.shape) for s in slots] for row in at]
        optimizers = [PlainOptimizer(local, tensors) for tensors in views]
        # Adam makes steps of equal size of gradients that are rounding alone: these are left out.
        least = min(1e4 * self.unit, 0.5)
        for _ in range(steps):
            for number, values in enumerate(self.ours.train(at)):
                for slot in kept:  # the next step starts from the buffers that this one left
                    at[number, slot.start : slot.stop] = values[f"buffer {slot.name}"].flatten()
                slopes = [values[f"gradient of {slot.name}"] for slot in slots]
                flat = torch.cat([slope.flatten() for slope in slopes]).abs()
                clear[number] &= flat > least * flat.max()
                optimizers[number].step(slopes)
                for view, one in zip(views[number], optimizers[number].tensors, strict=True):
                    view.copy_(one.detach())
        expected = (at - rows)[:, : layout.trainable]
        gap = ((after - at)[:, : layout.trainable] * clear).abs()
        scale = float(expected.abs().max())
        # What is compared are differences of weights, which round as the weights do.
        limit = max(1e-3, self.limit) * scale + 4 * torch.finfo(rows.dtype).eps * float(
            rows.abs().max()
        )
        size = float(gap.nan_to_num(nan=torch.inf).max())
        if not size <= limit:
            place = int(gap.amax(0).argmax())
            name = next(slot.name for slot in slots if slot.start <= place < slot.stop)
            raise TranslationError(
                f"{steps} step{'s' * (steps > 1)} of the optimizer {local.optimizer}: {name!r} "
                "differs by "
                f"{size:.3g} from torch.optim's, whose largest step is {scale:.3g} (rounding "
                "explains "
                f"{limit:.2g}); engine {self.ours.task.engine.name}: {ADVICE}"
            )
        self.compared["optimizer"] = size / max(scale, 1e-30)


def _trace_layers(module: nn.Module, run: Callable[[], Any]) -> dict[str, tuple[Any, ...]]:
    """Return kind, first input and output of each layer by its path, in the order of first calls."""
    found: dict[str, tuple[Any, ...]] = {}

    def note(path: str, part: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            found.setdefault(
                path, (type(part).__name__, args[0].clone().float(), out.clone().float())
            )

    handles = []
    for path, part in module.named_modules():
        if path:  # not the module itself
            handles.append(part.register_forward_hook(partial(note, path)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _compare_values(
    plain: PlainModule, ours: TrainedSide, first: Tensor, local: LocalTraining, lines: list[str],
    compared: dict[str, float],
    slow: bool,
) -> None:  # fmt: skip
    """Compare what is computed in evaluation and in training."""
    stream = Rng(0).generator(PURPOSE)
    both = _Comparison(plain, ours, LIMITS[plain.roundoff], UNITS[plain.roundoff], stream, compared)
    # Clients of different models, so that a mix-up of rows shows.
    rows = torch.cat([first[:1], both.shake(first[1:], 0.1)])
    plain.load(ours.task.layout, rows[0])
    x = ours.inputs()[0]
    if plain.is_random(ours.federation, x, training=False):
        lines.append("outputs are random in evaluation: only their mean loss is compared")
        require_repeatable(ours, rows, training=False)
        compare_random_loss(plain, ours, rows, both.limit)
    else:
        both.compare(rows, ours.evaluate, training=False)
    random = plain.draws(ours.federation, x) or plain.is_random(ours.federation, x, training=True)
    if random:
        lines.append("layers are random in training: means over draws are compared")
        require_repeatable(ours, rows, training=True)
        draws = compare_draws(plain, ours, rows[0], both.limit, slow=slow)
        compared["random draws"] = float(draws)
    else:
        both.compare(rows, ours.train, training=True)
        if not slow:
            both.compare_epoch(rows[0])
        if local.dp is not None:
            both.compare(rows, lambda at: ours.train(at, private=True), training=True, private=True)
    if local.dp is not None:
        lines.append("private training: gradients are compared before clipping and noise")
        kept = both.list_changed_buffers(rows[0])
        if kept:
            lines.append(
                f"private training leaves {kept} as they are, and others would change them"
            )
    if plain.moved:
        lines.append(
            f"forward changes the parameters {', '.join(sorted(plain.moved)[:3])} in place: steps of "
            "the optimizer are not compared"
        )
    elif local.lr > 0:
        both.compare_steps(rows, local, steps=1 if random or slow else 2)
