"""Losses: what a model is trained to make small, one value a sample, by name or import path.

A loss is a function of outputs and targets. A bundled one is a frozen dataclass whose fields are its arguments, so
that a study file can set them: `loss = { kind = "cross-entropy", label_smoothing = 0.1 }`. Each names the metric by
which it is usually judged, measured on each sample beside the loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from coterie._util.importing import imported, path_of
from coterie._util.settings import Configurable, parse, plain
from coterie.errors import ConfigError, unknown
from coterie.functional.metrics import ACCURACY, MSE

Targets = Literal["class", "integers", "numbers"]
"""What a loss takes as the target of a sample: one class; integers of any shape; or numbers of any shape."""


@dataclass(frozen=True)
class Loss(Configurable):
    """The base of losses.

    Attributes:
        kind: its name in study files.
        summary: what it is, in a line.
        targets: what it takes as a target.
        whole: whether the loss of a sample depends on the others of its batch: evaluations then take all samples of a
            set at once.
        metric: name of what `score` measures; None for nothing.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]
    targets: ClassVar[Targets]
    whole: ClassVar[bool] = False
    metric: ClassVar[str | None] = None

    def __call__(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        raise NotImplementedError

    def score(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return what `metric` says of each sample; its mean over samples is the metric."""
        raise NotImplementedError


@final
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy of logits, for one class a sample.

    Args:
        weight: factor on the loss of the samples of each class; 1 for all when empty. The mean over samples is not
            divided by the mean weight.
        label_smoothing: share of the target that is spread evenly over all classes, in [0, 1].
    """

    kind: ClassVar[str] = "cross-entropy"
    summary: ClassVar[str] = "one class a sample: cross-entropy of logits"
    targets: ClassVar[Targets] = "class"
    metric: ClassVar[str] = ACCURACY.name

    def __call__(
        self, outputs: Float[Tensor, "samples classes"], targets: Shaped[Tensor, " samples"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        return functional.cross_entropy(outputs, targets, reduction="none")

    def score(
        self, outputs: Float[Tensor, "samples classes"], targets: Shaped[Tensor, " samples"]
    ) -> Float[Tensor, " samples"]:
        """Return 1 where the largest output is that of the class, else 0."""
        return (outputs.argmax(-1) == targets).to(outputs.dtype)


@final
@dataclass(frozen=True)
class SquaredError(Loss):
    """Mean squared error over the entries of a sample's target."""

    kind: ClassVar[str] = "mse"
    summary: ClassVar[str] = "numbers: squared error, the mean over a target's entries"
    targets: ClassVar[Targets] = "numbers"
    metric: ClassVar[str] = MSE.name

    def __call__(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Float[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        difference = (outputs.reshape(targets.shape) - targets).square()
        return difference.reshape(len(targets), -1).mean(1)

    def score(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Float[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return the same as the loss."""
        return self(outputs, targets)


@final
@dataclass(frozen=True)
class Own(Loss):
    """A function of yours, (outputs, targets) -> one loss a sample, by its import path.

    Args:
        path: "package.module:function".
    """

    kind: ClassVar[str] = "own"
    summary: ClassVar[str] = "a function of yours"
    targets: ClassVar[Targets] = "numbers"
    path: str

    def check(self) -> None:
        """Find the function."""
        found = imported(self.path, f"loss {self.path!r}")
        if not callable(found):
            raise ConfigError(f"loss {self.path!r} is {found!r}; expected a function (outputs, targets)")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample."""
        found = imported(self.path, f"loss {self.path!r}")(outputs, targets)
        shape = getattr(found, "shape", None)
        if shape != (len(outputs),):
            said = f"a tensor of shape {tuple(shape)}" if shape is not None else repr(found)
            raise ConfigError(
                f"loss {self.path!r} returned {said} for {len(outputs)} samples; expected one loss a sample: "
                "take the mean over all other axes, and return it"
            )
        return found


LOSSES: dict[str, type[Loss]] = {one.kind: one for one in (CrossEntropy, SquaredError)}
"""Every bundled loss by its name."""


def read_loss(given: str | Mapping[str, Any] | Loss | Callable[..., Any], where: str = "loss") -> Loss:
    """Make a loss.

    Args:
        given: a name of LOSSES; an import path "package.module:name" of a function or of a subclass of `Loss`; a table
            with one of these as `kind` and the fields of the loss; a loss; or a function.
        where: how the user finds it.

    Raises:
        ConfigError: on an unknown name or key, or a value that does not fit.

    Example:
        >>> read_loss("cross-entropy")
        CrossEntropy()
    """
    if isinstance(given, Loss):
        return given
    if callable(given):
        given = path_of(given, where)
    table = {"kind": given} if isinstance(given, str) else dict(given)
    kind = table.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: kind is missing; valid: {', '.join(LOSSES)}, or package.module:name")
    if kind in LOSSES:
        return parse(LOSSES[kind], table, where)
    if ":" not in kind:
        raise ConfigError(f"{where}: {unknown('loss', kind, LOSSES)}")
    found = imported(kind, f"loss {kind!r}")
    if isinstance(found, type) and issubclass(found, Loss):
        return parse(found, table, where)
    return parse(Own, {"path": kind, **table}, where)


def loss_table(given: Any, where: str = "loss") -> dict[str, Any] | None:
    """Return what sets a loss as a plain table, `kind` first, that `read_loss` takes; None for None.

    What has an import path is not imported.
    """
    table = {"kind": given} if isinstance(given, str) else given
    if given is None or (isinstance(table, Mapping) and ":" in str(table.get("kind"))):
        return None if table is None else dict(table)
    if not (isinstance(table, Loss | Mapping) or callable(table)):
        raise ConfigError(
            f"{where} is {given!r}; expected one of {', '.join(LOSSES)}, package.module:function, or a table"
        )
    return stored_loss(read_loss(table, where))


def stored_loss(loss: Loss) -> dict[str, Any]:
    """Return a loss as the table from which `read_loss` makes it again."""
    if isinstance(loss, Own):
        return {"kind": loss.path}
    kind = loss.kind if LOSSES.get(loss.kind) is type(loss) else path_of(type(loss), "loss")
    return {"kind": kind, **plain(loss)}


def usual_loss(y: Shaped[Tensor, "samples *targets"], classes: int) -> Loss:
    """Return the loss that targets call for when none is set.

    Args:
        y: targets.
        classes: number of classes, where each target is one.

    Raises:
        ConfigError: when several losses would fit: whole numbers of several a sample, or 0 and 1 in several columns.
    """
    if classes:
        return CrossEntropy()
    entries = y[0].numel() if len(y) else 1
    if not y.is_floating_point():
        raise ConfigError(
            f"the targets are {entries} whole numbers a sample, which several losses fit; "
            f"set loss to one of {', '.join(LOSSES)}, or to a function of yours"
        )
    if entries > 1 and bool(((y == 0) | (y == 1)).all()) and bool((y == 1).any()):
        raise ConfigError(
            f"the targets are 0 and 1 in {entries} columns: set loss = 'multi-label' (each column is a yes or no), "
            "or loss = 'mse' (they are numbers)"
        )
    return SquaredError()


def loss_targets(loss: Loss, y: Shaped[Tensor, "*shape"], dtype: torch.dtype) -> Shaped[Tensor, "*shape"]:
    """Return targets as the losses take them: whole numbers as int64, numbers as `dtype`.

    Args:
        loss: which of the two.
        y: targets as they are stored.
        dtype: floating-point type of models.
    """
    numbers = loss.targets == "numbers" and not (isinstance(loss, Own) and not y.is_floating_point())
    return y.to(dtype) if numbers else y.to(torch.int64)
