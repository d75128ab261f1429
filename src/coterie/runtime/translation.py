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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

import coterie.engine
from coterie._util.tensors import index_each
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
from coterie.runtime.rounding import (
    LIMITS,
    UNITS,
    OtherForms,
    Rounding,
    find_distance,
    find_largest,
    find_scales,
)

_SAMPLES = 16  # of each client: half a usual batch, so that all comes to about two steps of one
# How far weights are moved to where modules are compared, the next where the one before differs:
# twice, since a gate may stand at its edge there too.
_PLACES = (0.0, 1e-3, 1e-3)
_OVER = object()  # after the last way to measure rounding
_UNCLEAR = 0.1  # share of a quantity's scale from which a difference that rounding explains is said
_SLOW_STEP = 0.05  # seconds of a plain step from which samples, draws and steps are fewer
# Samples of a try; a slow module is compared on twice as many, a very slow one on these. With fewer
# a batch normalization of one place a channel would have nothing left of what it subtracts.
_FEW = 4


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
        where = f"on samples that the {engine} engine trains"
        return f"the module in plain PyTorch {said} {where}; {ADVICE}"
    folder = str(Path(coterie.engine.__file__).parent)
    if any(file.startswith(folder) for file in files):
        where = "on samples that the module in plain PyTorch takes"
        return f"the {engine} engine {said} {where}; {ADVICE}"
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
    # Two clients where memory allows it, so that a mix-up of rows shows.
    most = 1 if task.layout.size > MANY_PARAMS else 2
    # Clients with enough samples first, in the order of their rows: more than enough is no better.
    rows = torch.argsort(-counts.clamp(max=_SAMPLES), stable=True)[:most]
    rows = rows[counts[rows] > 0]
    sample = take_samples(
        federation, rows, min(_SAMPLES, local.batch_size, int(counts[rows].min()))
    )
    plain = PlainModule.build(task, rng, int(task.ids[rows[0]]), lines)
    # In this order: a forward pass may change the module, in place or outside of its tensors.
    first = task.select_clients(rows).initial_models(rng).detach()
    compared["weights"] = _compare_weights(plain, task.layout, first[0], lines)
    tried = _take_few(sample, _FEW)
    x = plain.inputs(tried, read_inputs(tried.x)[0])
    if line := plain.require_no_memory(tried, x, LIMITS[plain.roundoff]):
        lines.append(line)
    seconds = _step_seconds(plain, tried) * _SAMPLES / _FEW
    slow = seconds > _SLOW_STEP
    if slow:
        number = _FEW if seconds > 2 * _SLOW_STEP else 2 * _FEW
        first, sample = first[:1], _take_few(sample, number)
    ours = TrainedSide.build(task, sample, rng)
    compared["inputs"] = _compare_inputs(ours, sample)
    _compare_values(plain, ours, first, local, lines, compared, slow)
    return compared, sample.x.shape[1]


def _take_few(sample: Federation, number: int) -> Federation:
    """Return the first samples of the first client."""
    few = slice(number)
    return strip_federation(sample, read_inputs(sample.x[:1, few]), sample.y[:1, few])


def _step_seconds(plain: PlainModule, sample: Federation) -> float:
    """Return about how long a plain step takes: the shorter of two, the first of which may load."""
    x, y = plain.inputs(sample, read_inputs(sample.x)[0]), plain.targets(sample.y[0])
    found = float("inf")
    for _ in range(2):
        # Not the time of the clock, which other processes make longer.
        begun = time.process_time()
        plain.train(sample, x, y)
        found = min(found, (time.process_time() - begun) / torch.get_num_threads())
        # Loading takes at most about a tenth of a second, since forward ran before.
        if found * _SAMPLES <= _SLOW_STEP * _FEW or found > 0.1:
            break
    return found


# ---------------------------------------------------------------- comparisons


def _compare_inputs(ours: TrainedSide, sample: Federation) -> float:
    """Compare prepared inputs with what plain operations make."""
    found = ours.inputs().cpu()
    expected = torch.stack([prepare_inputs(sample, x, found.dtype) for x in read_inputs(sample.x)])
    gap, scale = find_largest(found - expected), find_largest(expected)
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
            or f"what trains differs by {self.size:.3g} from the module in plain PyTorch, whose "
            f"largest entry is {self.scale:.3g} (rounding explains {self.limit:.2g})"
        )


def find_gaps(
    ours: Values, plain: Values, limit: float, rounding: Rounding | None, compared: dict[str, float]
) -> list[_Gap]:
    """Return the quantities that differ by more than rounding.

    Args:
        ours: what will train.
        plain: what the module computes.
        limit: share of the scale that rounding explains.
        rounding: what it explains beyond that share.
        compared: receives the largest difference of each kind, as a share of the scale.
    """
    gaps = list[_Gap]()
    scales = find_scales(plain)
    for name, expected in plain.items():
        if name not in ours:
            text = "it changes in a step, and no row holds it"
            gaps.append(_Gap(name, torch.inf, 0.0, 0.0, text))
            continue
        found = ours[name]
        if found.shape != expected.shape:
            shapes = f"its shape is {tuple(found.shape)}, expected {tuple(expected.shape)}"
            gaps.append(_Gap(name, torch.inf, 0.0, 0.0, shapes))
            continue
        size = find_distance(found, expected)
        allowed = limit * scales[name]
        if rounding is not None:
            allowed += rounding.explain(name)
        if not size <= allowed:  # NaN is a gap, too
            gaps.append(_Gap(name, size, find_largest(expected), allowed))
        kind = _kind(name)
        compared[kind] = max(compared.get(kind, 0.0), size / scales[name])
    return gaps


def _compare_weights(
    plain: PlainModule, layout: Layout, row: Float[Tensor, " params"], lines: list[str]
) -> float:
    """Compare a row of round 0 with the values of the module that was given."""
    if not plain.given:
        return 0.0
    ours, largest = layout.split_rows(row), 0.0
    named = dict[str, Tensor]()
    for name, one in plain.module.named_parameters():
        if one.requires_grad:
            named[name] = one
    for name, one in plain.module.named_buffers():
        if one.is_floating_point() and name not in layout.inputs:
            named[name] = one
    for name, given in named.items():
        if name not in ours:
            raise TranslationError(f"{name!r} of the module is not among what trains")
        size, scale = find_largest(ours[name].to(given) - given), find_largest(given)
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
    lines: list[str]
    forms: OtherForms
    rounding: Rounding = field(default_factory=Rounding)

    def shake(self, rows: Tensor, size: float) -> Tensor:
        """Return models whose trained parameters are moved by a share of each, at random."""
        # Running statistics stay: a variance must not become negative, nor a counter a fraction.
        trained = slice(self.ours.task.layout.trainable)
        out = rows.clone()
        noise = torch.from_numpy(self.stream.standard_normal(tuple(out[:, trained].shape)))
        out[:, trained] += size * out[:, trained] * noise.to(out)
        return out

    def run_plain(
        self,
        rows: Tensor,
        *,
        training: bool,
        private: bool = False,
        form: PlainModule | None = None,
    ) -> list[Values]:
        """Return what the module computes at each of some rows; no buffers, where it is private.

        Args:
            rows: the models.
            training: in a step, or in evaluation.
            private: whether a private step is compared with it.
            form: of the module, such as that of float64.
        """
        found, layout, plain = [], self.ours.task.layout, form or self.plain
        for row, x, y in zip(rows, self.ours.inputs(), self.ours.targets(), strict=True):
            plain.load(layout, row)
            run = plain.train if training else plain.evaluate
            values = run(self.ours.federation, *plain.cast(x, y))
            found.append(_drop_buffers(values) if private else values)
        return found

    def measure_rounding(
        self, at: Tensor, plain: Sequence[Values], *, training: bool
    ) -> Iterator[None]:
        """Add how far the module is from itself, where it computes `plain`; yield after each way."""

        def run(form: PlainModule) -> list[Values]:
            return self.run_plain(at, training=training, form=form)

        self.rounding.add(plain, self.run_plain(self.shake(at, self.unit), training=training))
        yield
        yield from self.forms.measure(self.rounding, plain, run, self.limit)

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
        jumps. At weights a thousandth away none may stand there, and a fault still shows. What is
        rounding is measured where something differs by more than it usually explains.
        """
        first: _Gap | None = None
        for size in _PLACES:
            at = self.shake(rows, size) if size else rows
            seen: dict[str, float] = {}
            plain = self.run_plain(at, training=training, private=private)
            pairs = list(zip(own(at), plain, strict=True))
            ways = self.measure_rounding(at, plain, training=training)
            gaps = self._find_all_gaps(pairs, seen)
            # Each way costs a step or two, so the next is taken only where it is needed.
            while gaps and next(ways, _OVER) is not _OVER:
                gaps = self._find_all_gaps(pairs, seen)
            if not gaps:
                for kind, size in seen.items():
                    self.compared[kind] = max(self.compared.get(kind, 0.0), size)
                self.name_unclear(plain)
                return
            if private:
                self.require_single_samples(at, pairs, gaps[0])
            # A score follows from outputs, and is less clear.
            first = first or max(gaps, key=lambda one: ("outputs" in one.name, one.relative))
        where = self.find_layer(rows[0], training)
        raise TranslationError(f"{first}; engine {self.ours.task.engine.name}{where}: {ADVICE}")

    def _find_all_gaps(
        self, pairs: Sequence[tuple[Values, Values]], seen: dict[str, float]
    ) -> list[_Gap]:
        found = list[_Gap]()
        for own, plain in pairs:
            found += find_gaps(own, plain, self.limit, self.rounding, seen)
        return found

    def name_unclear(self, plain: Sequence[Values]) -> None:
        """Say which quantity rounding decides so much that a fault could hide in it."""
        if not self.rounding.sizes:
            return
        shares = {}
        for values in plain:
            for name, scale in find_scales(values).items():
                shares[name] = self.rounding.explain(name) / scale
        name = max(shares, key=lambda one: shares[one])
        if shares[name] > _UNCLEAR:
            self.lines.append(
                f"rounding moves the {name} so much (an input that hardly varies, or has more "
                f"digits than its type) that a fault up to {shares[name]:.0%} of its scale is not "
                "seen in it"
            )

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
            each = []
            for at in range(len(x)):
                sample = slice(at, at + 1)
                values = self.plain.train(self.ours.federation, x[sample], y[sample])
                each.append(_drop_buffers(values))
            means = {name: torch.stack([one[name] for one in each]).mean(0) for name in each[0]}
            if find_gaps(own, means, 10 * self.limit, None, {}):
                return
        raise ModelError(
            "local.dp trains by gradients of single samples, and samples alone have others than "
            f"in a batch ({gap.name} differs by {gap.size:.3g} of {gap.scale:.3g}): something in "
            "the module joins the samples of a batch, such as a choice by their values; take what "
            "looks at each sample, or train without dp"
        )

    def list_changed_buffers(self, row: Tensor) -> str:
        """Return the names of the buffers that a plain step changes; "" where it changes none."""
        before = self.ours.task.layout.split_rows(row)
        self.plain.load(self.ours.task.layout, row)
        after = self.plain.train(
            self.ours.federation, self.ours.inputs()[0], self.ours.targets()[0]
        )
        changed = []
        for name, value in before.items():
            if not torch.equal(after.get(f"buffer {name}", value).to(value), value):
                changed.append(name)
        return ", ".join(changed)

    def find_layer(self, row: Tensor, training: bool) -> str:
        """Name the first layer of the trained copy that takes or returns something else."""
        layout, x = self.ours.task.layout, self.ours.inputs()[0]
        own = copy_deeply(layout.train_module if training else layout.eval_module)
        self.plain.load(layout, row)
        self.plain.module.train(training)
        inputs = index_each(layout.zero_inputs(1), 0)
        with torch.no_grad():
            theirs = _trace_layers(
                self.plain.module, lambda: self.plain._run(self.ours.federation, x)
            )
            mine = _trace_layers(
                own, lambda: functional_call(own, {**layout.split_rows(row), **inputs}, (x,))
            )
        for path, (kind, *expected) in theirs.items():
            # Not strict: a layer that ran on one side alone has nothing to be compared with.
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
            return _drop_buffers(self.plain.train(federation, x[part], y[part]))

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
        # Cut to the shorter one: another number of batches is a fault that is raised below.
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
        for slot in layout.state_slots:
            after[slot.start : slot.stop] = left[f"buffer {slot.name}"].flatten().to(row)
        return after

    def compare_steps(self, rows: Tensor, local: LocalTraining, steps: int) -> None:
        """Compare steps of the engine's optimizer with torch.optim's, on the engine's gradients.

        Each gradient is taken where the engine stands, so that the rounding of a step before is in
        both.
        """
        # Steps are proportional to the rate; one that is too large for numbers proves nothing.
        local = replace(local, dp=None, lr=min(local.lr, 1.0))
        first: TranslationError | None = None
        for size in _PLACES:
            try:
                self._compare_steps_from(self.shake(rows, size) if size else rows, local, steps)
                return
            except TranslationError as error:
                first = first or error
        assert first is not None
        raise first

    def _compare_steps_from(self, rows: Tensor, local: LocalTraining, steps: int) -> None:
        layout = self.ours.task.layout
        optimizers: list[PlainOptimizer] = []
        # In which entries the gradients are no rounding: Adam makes steps of equal size of these.
        clear = torch.ones_like(rows[:, : layout.trainable], dtype=torch.bool)
        at = rows
        for number in range(1, steps + 1):
            expected, slopes = self._step_plain(at, optimizers, local)
            # At most half of the largest entry: in a low precision 1e4 units would leave none.
            clear &= slopes > min(1e4 * self.unit, 0.5) * slopes.amax(1, keepdim=True)
            after, _, _ = self.ours.step(rows, local, number)
            gap = ((after[:, : layout.trainable] - expected) * clear).abs()
            gap = gap.nan_to_num(nan=torch.inf)
            scale = find_distance(expected, at[:, : layout.trainable])
            if not math.isfinite(scale):
                # torch.optim's own step leaves all numbers, as one with eps = 0 may: nothing can be compared.
                return
            # What is compared are differences of weights, which round as the weights do.
            limit = max(1e-3, self.limit) * scale + 4 * torch.finfo(at.dtype).eps * find_largest(at)
            allowed, ways = torch.full_like(gap, limit), iter(list[None]())
            # The first step has the engine's own gradients, which rounding does not make others.
            if number > 1 and not bool((gap <= limit).all()):
                plain = self.run_plain(at, training=True)
                ways = self.measure_rounding(at, plain, training=True)
            while not bool((gap <= allowed).all()) and next(ways, _OVER) is not _OVER:
                allowed = limit + scale * self._list_explained(slopes)
            if not bool((gap <= allowed).all()):
                place = int((gap - allowed).amax(0).argmax())
                name = next(slot.name for slot in layout.slots if slot.start <= place < slot.stop)
                raise TranslationError(
                    f"step {number} of the optimizer {local.optimizer}: {name!r} differs by "
                    f"{float(gap[:, place].max()):.3g} from torch.optim's, whose largest change is "
                    f"{scale:.3g} (rounding explains {float(allowed[:, place].max()):.2g}); engine "
                    f"{self.ours.task.engine.name}: {ADVICE}"
                )
            share = find_largest(gap) / max(scale, 1e-30)
            self.compared["optimizer"] = max(self.compared.get("optimizer", 0.0), share)
            at = after

    def _list_explained(self, slopes: Tensor) -> Tensor:
        """Return the share of a step of each trained parameter that rounding of its gradient is.

        The engine's first step has the very gradient; its next ones take the samples, and add, in
        another order.
        """
        shares = torch.zeros_like(slopes)
        for slot in self.ours.task.layout.trained_slots:
            part = slice(slot.start, slot.stop)
            size = self.rounding.explain(f"gradient of {slot.name}")
            shares[:, part] = size / slopes[:, part].clamp(min=1e-30)
        return shares

    def _step_plain(
        self, at: Tensor, optimizers: list[PlainOptimizer], local: LocalTraining
    ) -> tuple[Tensor, Tensor]:
        """Take a step of torch.optim from some weights, along the engine's gradients there.

        Args:
            at: the models.
            optimizers: of each client; made in the first step, and kept.
            local: the optimizer.

        Returns:
            The trained parameters afterwards, and the size of each entry of the gradients.
        """
        layout = self.ours.task.layout
        slots = layout.trained_slots
        after = at[:, : layout.trainable].clone()
        sizes = torch.zeros_like(after)
        for row, values in enumerate(self.ours.train(at)):
            views = [after[row, s.start : s.stop].view(s.shape) for s in slots]
            if len(optimizers) == row:
                optimizers.append(PlainOptimizer(local, [view.clone() for view in views]))
            slopes = [values[f"gradient of {slot.name}"] for slot in slots]
            sizes[row] = torch.cat([slope.flatten() for slope in slopes]).abs()
            # The optimizer keeps its tensors, to which its state belongs: values go in and out.
            own = optimizers[row].tensors
            with torch.no_grad():
                for view, one in zip(views, own, strict=True):
                    one.copy_(view)
                optimizers[row].step(slopes)
                for view, one in zip(views, own, strict=True):
                    view.copy_(one)
        return after, sizes


def _drop_buffers(values: Values) -> Values:
    return {name: one for name, one in values.items() if not name.startswith("buffer")}


def _trace_layers(module: nn.Module, run: Callable[[], Any]) -> dict[str, tuple[Any, ...]]:
    """Return kind, first input and output of each layer by its path, in order of first calls."""
    found: dict[str, tuple[Any, ...]] = {}

    def note(path: str, part: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            # Copies, since a later layer may work in place.
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
    # What the loop engine says of itself; others add as PyTorch does, or with fewer errors.
    forms = OtherForms(plain, getattr(ours.task.engine, "channels_last", False))
    both = _Comparison(
        plain, ours, LIMITS[plain.roundoff], UNITS[plain.roundoff], stream, compared, lines, forms
    )
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
            f"forward changes the parameters {', '.join(sorted(plain.moved)[:3])} in place: steps "
            "of the optimizer are not compared"
        )
    elif local.lr > 0:
        both.compare_steps(rows, local, steps=1 if random or slow else 2)
