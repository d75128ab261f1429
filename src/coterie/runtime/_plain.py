"""The untouched module in plain PyTorch: the reference of the check of the translation.

It uses no layout's copies of a module, no engine and no optimizer of the package, so that a fault
of theirs is not here too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from coterie._util.importing import import_object
from coterie._util.mappings import prefix_keys
from coterie.data.federation import Federation
from coterie.data.rows import read_inputs
from coterie.data.source import is_images
from coterie.engine.optim import LocalTraining
from coterie.engine.task import Task
from coterie.errors import ModelError
from coterie.functional.losses import Loss, cast_targets
from coterie.models.given import copy_deeply
from coterie.models.layout import Layout, copy_module, join_path, make_template
from coterie.rng import EVERYONE, Rng

PURPOSE = "translation"
"""The purpose of the random streams of the check: no other module draws from them."""

Values = dict[str, Tensor]
"""Quantities by name: "training loss", "gradient of 0.weight", "buffer 1.running_mean"."""


@dataclass
class PlainModule:
    """The untouched module, and what PyTorch alone computes with it.

    Args:
        module: the module as it was given.
        loss: of each sample.
        device: where it runs.
        dtype: in which it runs.
        precision: of products.
        whole: whether it takes inputs as whole numbers.
        held: names of the tensors that rows hold.
        given: whether round 0 must have its values.
        output: which entry of what it returns is the output; "" where that is not said.

    Attributes:
        moved: the trained parameters that a forward pass changes in place, such as those of an
            embedding with `max_norm`; known after `require_no_memory`.
    """

    module: nn.Module
    loss: Loss
    device: str
    dtype: torch.dtype
    precision: str = "full"
    whole: bool = False
    held: frozenset[str] = frozenset()
    given: bool = True
    output: str = ""
    moved: frozenset[str] = frozenset()

    @staticmethod
    def build(task: Task, rng: Rng, client: int, lines: list[str]) -> "PlainModule":
        """Take a copy of the given module, or make one as round 0 does."""
        make, init, given = task.model.make, task.model.init, True
        if isinstance(make, nn.Module):
            module, given = copy_deeply(make), init != "redrawn"
            if not given:
                lines.append("the given module's weights are drawn again (init = 'redrawn')")
        elif init == "given":
            module = copy_deeply(make_template(make))
        else:
            stream = client if init == "per_client" else EVERYONE
            # The stream from which a run draws its first models.
            with rng.at_round(-1).temporary_torch_seed("init", stream):
                module = make()
        plain = PlainModule.wrap(module, task)
        plain.given = given
        return plain

    @staticmethod
    def wrap(module: nn.Module, task: Task) -> "PlainModule":
        """Run a module where a task runs, in its type and with its loss."""
        # Not `to(dtype)`, which would cut complex numbers to their real part.
        module = module.double() if task.dtype == torch.float64 else module.float()
        plain = PlainModule(
            module.to(task.device), task.trainer.loss, task.device, task.dtype,
            task.engine.precision, held=frozenset(slot.name for slot in task.layout.slots),
            output=task.layout.output.name,
        )  # fmt: skip
        plain.whole = plain._takes_whole_numbers(task.data.federation)
        return plain

    @property
    def roundoff(self) -> torch.dtype | str:
        """What decides rounding: the type of the models, or a lower precision of products."""
        return self.dtype if self.precision == "full" else self.precision

    def inputs(self, federation: Federation, x: Tensor) -> Tensor:
        """Return samples of a federation as a module takes them."""
        return prepare_inputs(federation, x, self.dtype).to(self.device)

    def targets(self, y: Tensor) -> Tensor:
        """Return targets as the loss takes them."""
        return cast_targets(self.loss, y, self.dtype).to(self.device)

    def cast(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets in the type of the module; whole numbers stay."""
        x, y = (one.to(self.dtype) if one.is_floating_point() else one for one in (x, y))
        return x, y

    def _takes_whole_numbers(self, federation: Federation) -> bool:
        """Return whether the module takes whole numbers as they are, as an embedding does."""
        x = read_inputs(federation.x[0, :2])
        if federation.parts or x.is_floating_point() or is_images(x[0]):
            return False
        # A copy, since a forward pass may change what the module holds.
        trial = copy_module(self.module).eval()
        try:
            with self._quiet():
                trial(x.long().to(self.device))
        except Exception:  # a module may refuse in any way
            return False
        return True

    @contextmanager
    def _quiet(self, seed: int = 0) -> Iterator[None]:
        """Draw from a stream of the check, without gradients."""
        with torch.no_grad(), Rng(seed).temporary_torch_seed(PURPOSE, device=self.device):
            yield

    def load(self, layout: Layout, row: Float[Tensor, " params"]) -> None:
        """Take over a row, name by name; frozen weights are those of all clients."""
        values = {**layout.frozen, **layout.split_rows(row)}
        with torch.no_grad():
            for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
                if name in values:
                    tensor.copy_(values[name])

    def _run(self, federation: Federation, x: Tensor) -> Tensor:
        args, named = make_arguments(federation, x.long() if self.whole else x)
        with torch.autocast(
            torch.device(self.device).type, torch.bfloat16, enabled=self.precision == "bf16"
        ):
            found = _select_output(self.module(*args, **named), self.output)
        return found.to(self.dtype)

    def _mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        # The mean by hand: engines have theirs.
        return self.loss(outputs, y).sum() / len(y)

    def require_no_memory(self, federation: Federation, x: Tensor, limit: float) -> str:
        """Refuse a module that remembers a forward pass outside of its tensors.

        All clients share the attributes of one module, and engines do not follow them. To be called
        before anything else has run the module.

        Args:
            federation: that the samples are from.
            x: the samples.
            limit: the share of the largest output that is rounding.

        Returns:
            A line on attributes that a pass changes and no output shows; "" where there are none.

        Raises:
            ModelError: when the same pass gives other outputs the second time.
        """
        self.module.train()
        before, outputs = _list_plain_attributes(self.module), []
        kept = {name: one.detach().clone() for name, one in self._list_tensors().items()}
        for _ in range(2):
            with self._quiet():
                outputs.append(self._run(federation, x))
                now = self._list_tensors()
                self.moved |= {n for n, one in now.items() if not torch.equal(one, kept[n])}
                # Undone, so that the second pass has the same tensors: what then still differs
                # was kept outside of them.
                for name, one in now.items():
                    one.copy_(kept[name])
        # Buffers may change in a pass, as running statistics do.
        self.moved &= {name for name, _ in self.module.named_parameters()}
        changed = []
        for name, value in _list_plain_attributes(self.module).items():
            if name not in before or before[name] != value:
                changed.append(name)
        first, second = outputs
        # NaN at the same places says nothing here: the run itself finds what is not finite.
        gap = math.inf
        if first.shape == second.shape:
            gap = float((first - second).nan_to_num().abs().max())
        named = f" ({', '.join(changed[:3])})" if changed else ""
        if gap > limit * float(first.nan_to_num().abs().max()):
            raise ModelError(
                f"the module remembers its last forward pass outside of its parameters and "
                f"buffers{named}, or draws random numbers that PyTorch does not make (numpy's, "
                "Python's): with the same weights, samples and seed its output is another when the "
                "same pass is repeated, and all clients share one module; keep what it remembers "
                "in a buffer (register_buffer), and draw with torch"
            )
        if not named:
            return ""
        return (
            f"forward changes attributes of the module that are no buffers{named}: they are not "
            "kept from round to round, and are not those of one client; register_buffer keeps them"
        )

    def _list_tensors(self) -> dict[str, Tensor]:
        """Return what a forward pass may change in place: trained parameters, and buffers."""
        trained = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        return trained | dict(self.module.named_buffers())

    def evaluate(
        self, federation: Federation, x: Tensor, y: Tensor, seed: int = 0, pieces: int = 1 << 30
    ) -> Values:
        """Return outputs, loss and score in evaluation mode; `pieces` samples are run at once."""
        self.module.eval()
        with self._quiet(seed):
            outputs = torch.cat([self._run(federation, some) for some in x.split(pieces)])
            found = {"outputs": outputs, "loss": self._mean_loss(outputs, y)}
            # Of a loss that is its own metric there is one value.
            if self.loss.metric not in (None, self.loss.kind):
                score = self.loss.measure_samples(outputs, y).to(self.dtype)
                found["score"] = score.sum() / len(y)
        return prefix_keys("evaluation ", found)

    def _copy_buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers, from which a pass that was only tried is undone."""
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    @contextmanager
    def _try(self, seed: int = 0) -> Iterator[None]:
        """As `_quiet`; buffers are restored at the end."""
        kept = self._copy_buffers()
        with self._quiet(seed):
            yield
            for name, buffer in self.module.named_buffers():
                buffer.copy_(kept[name])

    def is_random(self, federation: Federation, x: Tensor, training: bool) -> bool:
        """Return whether outputs depend on a seed."""
        self.module.train(training)
        outputs = []
        # Two seeds: what does not depend on them, depends on none of them but by an accident.
        for seed in range(2):
            with self._try(seed):
                outputs.append(self._run(federation, x))
        return not torch.allclose(*outputs, equal_nan=True)

    def draws(self, federation: Federation, x: Tensor) -> bool:
        """Return whether a forward pass in training takes numbers of PyTorch's generator.

        Its outputs for two seeds need not show that: dropout before a weight that is 0, as in a
        fresh adapter, changes gradients alone, and a layer that is left out of one pass in twenty
        changes most pairs of passes not at all.
        """
        self.module.train()
        with self._try():
            before = self._generator_state()
            self._run(federation, x)
            after = self._generator_state()
        return not torch.equal(before, after)

    def _generator_state(self) -> Tensor:
        device = torch.device(self.device)
        if device.type == "cuda":
            return torch.cuda.get_rng_state(device)
        return torch.get_rng_state()

    def train(
        self, federation: Federation, x: Tensor, y: Tensor, seed: int = 0, *, mode: bool = True
    ) -> Values:
        """Return loss, gradients and buffers of one step; `mode` False takes that of evaluation."""
        self.module.train(mode)
        self.module.zero_grad()
        kept = self._copy_buffers()
        with Rng(seed).temporary_torch_seed(PURPOSE, device=self.device):
            loss = self._mean_loss(self._run(federation, x), y)
        loss.backward()
        found = {"training loss": loss.detach()}
        for name, one in self.module.named_parameters():
            if one.requires_grad:
                slope = torch.zeros_like(one) if one.grad is None else one.grad
                if slope.layout is not torch.strided:  # of an embedding with sparse=True
                    slope = slope.to_dense()
                found[f"gradient of {name}"] = slope.detach().clone()
        for name, buffer in list(self.module.named_buffers()):
            # What a step leaves alone need not be in a row.
            if name in self.held or not torch.equal(buffer, kept[name]):
                found[f"buffer {name}"] = buffer.detach().clone()
            buffer.detach().copy_(kept[name])
        self.module.zero_grad()
        return found


def _list_plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the numbers, texts, and yes and no, that layers have as attributes, by path."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            # `training` and the like are the module's own, and a pass does not change them.
            if isinstance(value, bool | int | float | str):
                found[join_path(path, name)] = value
    return found


def _select_output(returned: Any, name: str) -> Tensor:
    """Return the named entry of what a module returned: of a tensor itself, else its `logits`."""
    if isinstance(returned, Tensor):
        return returned
    if not name and isinstance(returned, list | tuple) and not hasattr(returned, "logits"):
        return next(one for one in returned if isinstance(one, Tensor))
    key = name or "logits"
    if isinstance(returned, Mapping):
        tensors = [one for one in returned.values() if isinstance(one, Tensor)]
        return returned[key] if key in returned else tensors[0]
    if isinstance(returned, list | tuple) and key.isdecimal():
        return returned[int(key)]
    return getattr(returned, key)


def prepare_inputs(federation: Federation, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return samples as a module takes them: images scaled and normalized, numbers as they are."""
    if not is_images(x[0]):
        return x.to(dtype)
    x = x.to(dtype) / 255
    if not federation.mean:
        return x
    # One number for each channel, whose axis comes before rows and columns.
    mean = torch.tensor(federation.mean, dtype=dtype)[:, None, None]
    std = torch.tensor(federation.std, dtype=dtype)[:, None, None]
    return (x - mean) / std


def make_arguments(federation: Federation, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the arguments of `forward`: the input, or its parts one after another."""
    if not federation.parts:
        return [x], {}
    given, named, start = list[Tensor](), dict[str, Tensor](), 0
    for part in federation.parts:
        size = int(torch.tensor(part.shape).prod()) if part.shape else 1
        value = x[:, start : start + size].reshape(len(x), *part.shape)
        value = value.long() if part.whole else value
        start += size
        if part.name:
            named[part.name] = value
        else:
            given.append(value)
    return given, named


class PlainOptimizer:
    """An optimizer of torch.optim, on the tensors of one model.

    Its functions are called, and not its classes, the first of which takes seconds in a fresh
    process: it loads PyTorch's compiler. An optimizer that is given by its import path is that
    class itself.

    Args:
        local: which optimizer, and its settings.
        tensors: the parameters, changed in place.
    """

    def __init__(self, local: LocalTraining, tensors: Sequence[Tensor]) -> None:
        self.local = local
        self.tensors: list[Tensor] = list(tensors)
        self.given = dict(local.optimizer_arguments)
        # Adagrad's sums begin with it: the function that takes a step gets them as its state.
        start = self.given.pop("initial_accumulator_value", 0.0)
        # Up to three tensors of state for each parameter, and the steps taken.
        self.state = []
        for _ in range(3):
            self.state.append([torch.full_like(one, start) for one in tensors])
        self.taken = [torch.tensor(0.0) for _ in tensors]
        self.momenta: list[Tensor | None] = [None for _ in tensors]
        self.own: torch.optim.Optimizer | None = None
        if local.custom_optimizer:
            parameters = list(map(nn.Parameter, tensors))
            self.tensors = list(parameters)
            arguments = dict(local.optimizer_arguments)
            for name, value in arguments.items():
                # Study files have lists where torch.optim has pairs, such as betas.
                if isinstance(value, list):
                    arguments[name] = tuple(value)
            kind = import_object(local.custom_optimizer, "optimizer")
            self.own = kind(parameters, lr=local.lr, **arguments)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take a step along the gradients."""
        slopes = [slope.clone() for slope in gradients]
        if self.own is not None:
            for one, slope in zip(self.tensors, slopes, strict=True):
                one.grad = slope
            self.own.step()
            return
        kind, (first, second, third) = self.local.optimizer, self.state
        # foreach=False: one tensor after another, the plainest of PyTorch's ways.
        given = {**self.given, "lr": self.local.lr, "maximize": False, "foreach": False}
        if kind in ("adam", "adamw"):
            given["beta1"], given["beta2"] = given.pop("betas")
            take = adamw if kind == "adamw" else adam
            take(self.tensors, slopes, first, second, [], self.taken, amsgrad=False, **given)
        elif kind == "rmsprop":
            rmsprop(self.tensors, slopes, first, second, third, self.taken, **given)
        elif kind == "adagrad":
            adagrad(self.tensors, slopes, first, self.taken, **given)
        else:
            sgd(self.tensors, slopes, self.momenta, **given)
