"""Losses: what training minimizes, one value a sample, by name or import path.

A loss is a function of outputs and targets. A bundled one is a frozen dataclass whose fields are
its arguments, so that a study file can set them: `loss = { kind = "cross-entropy", label_smoothing
= 0.1 }`. Each names its usual metric, which is measured on each sample together with the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, final

import torch
from annotated_types import Gt, Lt, MinLen
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from coterie._util.importing import find_import_path, import_object, parse_kind
from coterie._util.settings import (
    Configurable,
    NonNegativeFloat,
    PositiveFloat,
    Share,
    parse_settings,
    to_plain,
)
from coterie.errors import ConfigError, CoterieError, DataError, ModelError
from coterie.functional.metrics import (
    ACCURACY,
    LABEL_ACCURACY,
    MAE,
    MSE,
    PIXEL_ACCURACY,
    REGISTRY,
    TOKEN_ACCURACY,
    Metric,
)
from coterie.functional.scores import UNCOUNTED, Form, flatten_entries, has_form

Targets = Literal["class", "labels", "integers", "numbers"]
"""The target of a sample: one class; one or several yes or no; integers of any shape; numbers."""


@dataclass(frozen=True)
class Loss(Configurable):
    """The base of losses.

    Attributes:
        kind: its name in study files.
        summary: what it is, in a line.
        targets: what it takes as a target.
        form: the form in which `to_metric_form` gives outputs and targets to metrics, see
            `functional.scores`; None where it follows from the type and the shape of the targets.
        whole: whether the loss of a sample depends on the others of its batch: evaluations then
            take all samples of a set at once.
        metric: name of what `measure_samples` measures; None for nothing.
        class_axis: the axis of the classes among those of the outputs, where an output is a class.
        can_be_negative: whether the mean over samples may be below 0; then methods are refused
            that compare models by its inverse.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]
    targets: ClassVar[Targets]
    form: ClassVar[Form | None] = None
    whole: ClassVar[bool] = False
    metric: ClassVar[str | None] = None
    class_axis: ClassVar[int] = -1
    can_be_negative: ClassVar[bool] = False

    def __call__(
        self,
        outputs: Float[Tensor, "samples *outputs"],
        targets: Shaped[Tensor, "samples *targets"],
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        raise NotImplementedError

    def measure_samples(
        self,
        outputs: Float[Tensor, "samples *outputs"],
        targets: Shaped[Tensor, "samples *targets"],
    ) -> Float[Tensor, " samples"]:
        """Return the value of `metric` for each sample; the metric is their mean."""
        if self.metric is None:
            raise NotImplementedError(f"loss {self.kind!r} names no metric")
        return REGISTRY[self.metric].measure_samples(*self.to_metric_form(outputs, targets))

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets in the form that metrics take.

        The default puts numbers into the shape of their targets.
        """
        # (samples, 1) outputs fit (samples,) targets: equally many numbers are one form.
        alike = targets.is_floating_point() and outputs.numel() == targets.numel()
        if self.form is None and alike:
            outputs = outputs.reshape(targets.shape)
        return outputs, targets

    def metric_inputs(
        self, metric: Metric, outputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and targets as a metric takes them: in this loss's form, or unchanged."""
        # A custom function without declared forms gets what the module and the data have.
        if not metric.takes:
            return outputs, targets
        # (samples, 1) outputs are one for each time, too.
        if self.form is None and "times" in metric.takes and outputs.numel() == len(outputs):
            outputs = outputs.reshape(-1)
        return self.to_metric_form(outputs, targets)

    def find_form(self, outputs: Tensor, targets: Tensor) -> Form:
        """Return the form of some outputs and their targets; "numbers" where no other is theirs."""
        if self.form is not None:
            return self.form
        given = self.to_metric_form(outputs, targets)
        for form in self.possible_forms(targets):
            if has_form(form, *given):
                return form
        return "numbers"

    def possible_forms(self, targets: Tensor) -> tuple[Form, ...]:
        """Return the forms that outputs and targets may have."""
        if self.form is not None:
            return (self.form,)
        if targets.is_floating_point():
            return "numbers", "labels", "times"
        if targets.dim() == 1:
            return ("class",)
        return "positions", "labels"

    def check_metric_fits(
        self, metric: Metric, targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """Refuse a metric that cannot be computed from the outputs that this loss trains.

        Args:
            metric: the metric.
            targets: the targets of the run.

        Raises:
            ConfigError: with the metrics that can.
        """
        forms = self.possible_forms(targets)
        if metric.takes and not set(metric.takes) & set(forms):
            fitting = [one.name for one in REGISTRY.values() if set(one.takes) & set(forms)]
            raise ConfigError(
                f"metric {metric.name!r} is of {_describe_forms(metric.takes)}; "
                f"loss {self.kind!r} trains outputs for {_describe_forms(forms)}: "
                f"take one of {', '.join(fitting)}, or a custom function"
            )

    def check_metric_shapes(
        self, metric: Metric, outputs: Tensor, targets: Tensor, classes: int
    ) -> None:
        """Refuse a metric of outputs of other shapes, of which it would make some number.

        Args:
            metric: the metric.
            outputs: of the module for some samples.
            targets: of these samples.
            classes: number of classes, where each target is one; else 0.

        Raises:
            ConfigError: with the shapes that it takes.
        """
        if self.form is not None or not metric.takes:
            return
        given = self.metric_inputs(metric, outputs, targets)
        fitting = [form for form in metric.takes if has_form(form, *given)]
        if not fitting or ("class" in fitting and given[0].shape[1] < classes):
            expected = ", or ".join(_SHAPES[form] for form in metric.takes)
            raise ConfigError(
                f"metric {metric.name!r} takes outputs and targets {expected}; found "
                f"{_describe_shape(outputs)} and {_describe_shape(targets)}: take a bundled loss "
                "of such outputs, or a custom metric"
            )

    def num_outputs(self, y: Shaped[Tensor, "samples *targets"], classes: int) -> int:
        """Return how many outputs a network that Coterie makes has for this loss.

        Args:
            y: targets.
            classes: number of classes, where each target is one; else 0.
        """
        return classes or _num_entries(y)

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """Refuse outputs and targets that this loss does not take.

        Args:
            outputs: of the module for a few samples.
            targets: of these samples, or of all so that every value is checked.

        Raises:
            ModelError: when their shapes do not fit.
            DataError: when a target has an unexpected value.
        """

    def _check_shapes(
        self, fit: bool, expected: str, outputs: Tensor, targets: Tensor, advice: str
    ) -> None:
        if not fit:
            found = f"{_describe_shape(outputs)} and {_describe_shape(targets)}"
            raise ModelError(f"loss {self.kind!r} takes {expected}; found {found}: {advice}")

    def _check_values(
        self, fit: Bool[Tensor, "samples *targets"], expected: str, targets: Tensor
    ) -> None:
        if not bool(fit.all()):
            found = targets[~fit].flatten()[0].item()
            raise DataError(f"loss {self.kind!r}: a target is {found}; expected {expected}")


def to_probabilities(
    form: Form, outputs: Float[Tensor, "samples *outputs"], class_axis: int = -1
) -> Float[Tensor, "samples *found"]:
    """Return the probabilities that outputs stand for: of the classes, or of a yes to each label.

    Probabilities of classes sum to 1.

    Args:
        form: of the outputs, see `functional.scores`.
        outputs: logits. Where two classes have one logit between them, it is that of the second.
        class_axis: see `Loss`.

    Raises:
        ConfigError: where outputs are not logits of classes or labels.

    Example:
        >>> to_probabilities("class", torch.tensor([[0.0], [30.0]])).round(decimals=3).tolist()
        [[0.5, 0.5], [0.0, 1.0]]
    """
    if form == "labels":
        return outputs.sigmoid()
    if form not in ("class", "positions"):
        raise ConfigError(
            f"the outputs are {_FORMS[form]}, which have no probabilities; request the outputs"
        )
    if form == "class" and outputs.numel() == len(outputs):
        # One logit a sample, as the loss "binary" trains it: the second of two classes.
        yes = outputs.reshape(-1).sigmoid()
        return torch.stack([1 - yes, yes], 1)
    return outputs.softmax(class_axis)


_FORMS: dict[Form, str] = {
    "class": "one class a sample",
    "labels": "yes or no in each column",
    "positions": "a class at each position",
    "numbers": "numbers",
    "times": "times of events",
}


_SHAPES: dict[Form, str] = {
    "class": "(samples, classes) and (samples,)",
    "labels": "(samples, labels) and (samples, labels)",
    "positions": "(samples, positions, classes) and (samples, positions)",
    "numbers": "of one shape",
    "times": "(samples,) and (samples, 2)",
}


def _describe_forms(forms: Sequence[Form]) -> str:
    return ", or ".join(_FORMS[form] for form in forms)


def _num_entries(y: Tensor) -> int:
    """Return the number of entries of a sample's target."""
    return int(torch.Size(y.shape[1:]).numel())


def _describe_shape(values: Tensor) -> str:
    axes = ", ".join(["samples", *map(str, values.shape[1:])])
    if values.dim() == 1:
        axes += ","
    return f"({axes})"


def _to_tensor(values: Sequence[float], like: Tensor) -> Tensor | None:
    """Return arguments of a loss as a tensor like its outputs; None if there are none."""
    if not values:
        return None
    return torch.tensor(values, dtype=like.dtype, device=like.device)


# ---------------------------------------------------------------- classes and labels


@final
@dataclass(frozen=True)
class CrossEntropy(Loss):
    r"""Cross-entropy of logits, for one class a sample: $-\sum_c w_c q_c \log p_c$.

    $p$ is the softmax of the outputs. $q_c$ is 1 for the class and 0 else, or with label smoothing
    $\varepsilon$ that times $1 - \varepsilon$, plus $\varepsilon$ / classes (Szegedy et al.,
    Rethinking the Inception architecture, CVPR 2016).

    Args:
        weight: factor on the loss of the samples of each class ($w$); 1 for all when empty. The
            mean over samples is not divided by the mean weight.
        label_smoothing: share of the target that is spread evenly over all classes ($\varepsilon$),
            in [0, 1].
    """

    kind: ClassVar[str] = "cross-entropy"
    summary: ClassVar[str] = "one class a sample: cross-entropy of logits"
    targets: ClassVar[Targets] = "class"
    form: ClassVar[Form | None] = "class"
    metric: ClassVar[str | None] = ACCURACY.name
    weight: Sequence[NonNegativeFloat] = ()
    label_smoothing: Share = 0.0

    def __call__(
        self, outputs: Float[Tensor, "samples classes"], targets: Shaped[Tensor, " samples"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        weight = _to_tensor(self.weight, outputs)
        return functional.cross_entropy(
            outputs, targets, weight, reduction="none", label_smoothing=self.label_smoothing
        )

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        expected = "outputs (samples, classes) and targets (samples,), one class a sample"
        advice = (
            "a class at each position is for 'tokens' or 'segmentation', "
            "columns of 0 and 1 are for 'multi-label'"
        )
        self._check_shapes(
            outputs.dim() == 2 and targets.dim() == 1, expected, outputs, targets, advice
        )
        classes = outputs.shape[1]
        whole = "whole numbers: numbers are for a loss such as 'mse'"
        self._check_values(targets == targets.round(), whole, targets)
        self._check_values(
            (targets >= 0) & (targets < classes), f"a class from 0 to {classes - 1}", targets
        )
        if self.weight and len(self.weight) != classes:
            raise ConfigError(
                f"loss {self.kind!r}: weight has {len(self.weight)} entries; "
                f"expected {classes}, one a class"
            )


@final
@dataclass(frozen=True)
class Binary(Loss):
    r"""Cross-entropy of one logit $z$ a sample, of two classes.

    It is $-w y \log \sigma(z) - (1 - y) \log(1 - \sigma(z))$. Targets are 0 and 1, as numbers or as
    two classes.

    Args:
        pos_weight: factor on the loss of the samples whose target is 1 ($w$).
    """

    kind: ClassVar[str] = "binary"
    summary: ClassVar[str] = "one yes or no a sample: cross-entropy of one logit"
    targets: ClassVar[Targets] = "labels"
    form: ClassVar[Form | None] = "class"
    metric: ClassVar[str | None] = ACCURACY.name
    pos_weight: PositiveFloat = 1.0

    def __call__(
        self, outputs: Float[Tensor, "samples *one"], targets: Shaped[Tensor, "samples *one_too"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        logits, wanted = outputs.reshape(-1), targets.reshape(-1).to(outputs.dtype)
        losses = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        # The factor is w where the target is 1 and 1 where it is 0.
        if self.pos_weight != 1:
            losses = losses * (1 + (self.pos_weight - 1) * wanted)
        return losses

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`: as two classes, of which the logit of the first is 0."""
        logits = outputs.reshape(-1)
        # The softmax of (0, z) is the sigmoid of z.
        return torch.stack([torch.zeros_like(logits), logits], 1), targets.reshape(-1).to(
            torch.int64
        )

    def num_outputs(self, y: Shaped[Tensor, "samples *targets"], classes: int) -> int:
        """See `Loss.num_outputs`."""
        return 1

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        expected = "outputs (samples, 1) and targets (samples,), one yes or no a sample"
        advice = (
            "one output a class is for 'cross-entropy', "
            "several columns of 0 and 1 are for 'multi-label'"
        )
        self._check_shapes(
            _num_entries(outputs) == 1 and _num_entries(targets) == 1,
            expected,
            outputs,
            targets,
            advice,
        )
        self._check_values((targets == 0) | (targets == 1), "0 or 1", targets)


@final
@dataclass(frozen=True)
class MultiLabel(Loss):
    r"""Cross-entropy of a logit $z_c$ for each label, the mean over labels.

    It is $-w_c y_c \log \sigma(z_c) - (1 - y_c) \log(1 - \sigma(z_c))$. The loss of a sample is the
    mean over labels. Targets are 0 and 1, as numbers or as integers.

    Args:
        pos_weight: factor on the loss of a label where its target is 1 ($w$), one a label; 1 for
            all when empty.
    """

    kind: ClassVar[str] = "multi-label"
    summary: ClassVar[str] = (
        "a yes or no in each column: cross-entropy of a logit each, the mean over columns"
    )
    targets: ClassVar[Targets] = "labels"
    form: ClassVar[Form | None] = "labels"
    metric: ClassVar[str | None] = LABEL_ACCURACY.name
    pos_weight: Sequence[PositiveFloat] = ()

    def __call__(
        self, outputs: Float[Tensor, "samples *labels"], targets: Shaped[Tensor, "samples *labels"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        logits, wanted = self.to_metric_form(outputs, targets.to(outputs.dtype))
        weight = _to_tensor(self.pos_weight, outputs)
        every = functional.binary_cross_entropy_with_logits(
            logits, wanted, pos_weight=weight, reduction="none"
        )
        return every.mean(1)

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`."""
        return flatten_entries(outputs), flatten_entries(targets)

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        expected = "outputs (samples, labels) and targets (samples, labels)"
        advice = "the module needs one output a label, its logit"
        self._check_shapes(
            outputs.shape[1:] == targets.shape[1:], expected, outputs, targets, advice
        )
        self._check_values((targets == 0) | (targets == 1), "0 or 1 in each column", targets)
        labels = _num_entries(targets)
        if self.pos_weight and len(self.pos_weight) != labels:
            found = len(self.pos_weight)
            raise ConfigError(
                f"loss {self.kind!r}: pos_weight has {found} entries; "
                f"expected {labels}, one a label"
            )


# ---------------------------------------------------------------- a class at each position


def _mask_uncounted(targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return which positions count, and targets with a class everywhere."""
    counted = targets != ignored
    # Class 0 stands in where nothing counts: gather needs a legal index.
    return counted, torch.where(counted, targets, 0)


def _mean_over_positions(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of each sample over the positions that count, 0 where none does."""
    shares = flatten_entries(counted.to(values.dtype))
    # `where` drops a value that is not finite; a product with 0 would keep NaN.
    every = flatten_entries(torch.where(counted, values, 0.0))
    return every.sum(1) / shares.sum(1).clamp(min=1)


@dataclass(frozen=True)
class _Positions(Loss):
    """A class at each position; positions whose target is `ignore_index` do not count."""

    targets: ClassVar[Targets] = "integers"
    form: ClassVar[Form | None] = "positions"
    ignore_index: int = UNCOUNTED

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`."""
        # Metrics know one ignored target, whatever the loss's own is.
        return outputs, torch.where(targets == self.ignore_index, UNCOUNTED, targets)

    def _check_classes(self, classes: int, targets: Tensor) -> None:
        """Refuse targets that are no class."""
        self._check_values(
            targets == targets.round(), "whole numbers, the class of each position", targets
        )
        fit = (targets == self.ignore_index) | ((targets >= 0) & (targets < classes))
        ignored = f"or {self.ignore_index} where a position does not count (ignore_index)"
        self._check_values(fit, f"a class from 0 to {classes - 1}, {ignored}", targets)


@final
@dataclass(frozen=True)
class Tokens(_Positions):
    r"""Cross-entropy of the class at each position, the mean over a sample's counted positions.

    A sample where no position counts has the loss 0.

    Args:
        ignore_index: the target of a position that does not count.
        label_smoothing: see `CrossEntropy`.
    """

    kind: ClassVar[str] = "tokens"
    summary: ClassVar[str] = (
        "a class at each position of a sequence: cross-entropy, the mean over counted positions"
    )
    metric: ClassVar[str | None] = TOKEN_ACCURACY.name
    label_smoothing: Share = 0.0

    def __call__(
        self,
        outputs: Float[Tensor, "samples positions classes"],
        targets: Int[Tensor, "samples positions"],
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        log = functional.log_softmax(outputs, -1)
        counted, known = _mask_uncounted(targets, self.ignore_index)
        losses = -log.gather(-1, known.unsqueeze(-1)).squeeze(-1)
        if self.label_smoothing:
            # The spread share of the target is 1 / classes for each class: the mean of the log-
            # probabilities.
            losses = (1 - self.label_smoothing) * losses - self.label_smoothing * log.mean(-1)
        return _mean_over_positions(losses, counted)

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        fit = outputs.dim() == 3 and targets.dim() == 2 and outputs.shape[1] == targets.shape[1]
        expected = "outputs (samples, positions, classes) and targets (samples, positions)"
        advice = "the module needs one output a class at each position, the classes last"
        self._check_shapes(fit, expected, outputs, targets, advice)
        self._check_classes(outputs.shape[2], targets)


@final
@dataclass(frozen=True)
class CausalLm(_Positions):
    """Cross-entropy of the next token, the mean over a sample's counted tokens.

    Targets are the tokens of the input themselves, as models of `transformers` take `labels`: the
    output at a position predicts the target of the position after it. A sample where no token
    counts has the loss 0. Samples count alike, however many of their tokens count.

    Args:
        ignore_index: the target of a token that does not count, such as padding.
    """

    kind: ClassVar[str] = "causal-lm"
    summary: ClassVar[str] = (
        "the next token of a sequence: cross-entropy, the mean over counted tokens"
    )
    metric: ClassVar[str | None] = TOKEN_ACCURACY.name

    def __call__(
        self,
        outputs: Float[Tensor, "samples positions classes"],
        targets: Int[Tensor, "samples positions"],
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        # The last output predicts a token that is not there, and the first token is predicted by
        # none.
        log = functional.log_softmax(outputs[:, :-1], -1)
        counted, known = _mask_uncounted(targets[:, 1:], self.ignore_index)
        losses = -log.gather(-1, known.unsqueeze(-1)).squeeze(-1)
        return _mean_over_positions(losses, counted)

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`: each output with the target that it predicts."""
        return super().to_metric_form(outputs[:, :-1], targets[:, 1:])

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        fit = outputs.dim() == 3 and targets.dim() == 2 and outputs.shape[1] == targets.shape[1]
        expected = "outputs (samples, positions, tokens) and targets (samples, positions)"
        advice = "targets are the tokens of the input, and the loss shifts them"
        fit = fit and targets.shape[1] > 1
        self._check_shapes(fit, expected, outputs, targets, advice)
        self._check_classes(outputs.shape[2], targets)


@dataclass(frozen=True)
class _Pixels(_Positions):
    """A class at each pixel; outputs have the classes first."""

    metric: ClassVar[str | None] = PIXEL_ACCURACY.name
    class_axis: ClassVar[int] = 1

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`."""
        # (samples, classes, height, width) becomes (samples, positions, classes).
        return super().to_metric_form(outputs.flatten(2).transpose(1, 2), targets.flatten(1))

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        fit = outputs.dim() > 2 and outputs.shape[2:] == targets.shape[1:]
        expected = "outputs (samples, classes, height, width) and targets (samples, height, width)"
        advice = (
            "the module needs one output a class at each pixel, the classes before height and width"
        )
        self._check_shapes(fit, expected, outputs, targets, advice)
        self._check_classes(outputs.shape[1], targets)


def _pixel_cross_entropy(outputs: Tensor, counted: Tensor, known: Tensor) -> Tensor:
    """Return the cross-entropy of each sample."""
    log = functional.log_softmax(outputs, 1)
    return _mean_over_positions(-log.gather(1, known.unsqueeze(1)).squeeze(1), counted)


@final
@dataclass(frozen=True)
class Segmentation(_Pixels):
    """Cross-entropy of the class of each pixel, the mean over the pixels of a sample that count.

    A sample where no pixel counts has the loss 0. Volumes, with a third axis behind height and
    width, are taken too.

    Args:
        ignore_index: the target of a pixel that does not count.
    """

    kind: ClassVar[str] = "segmentation"
    summary: ClassVar[str] = "a class at each pixel: cross-entropy, the mean over pixels that count"

    def __call__(
        self,
        outputs: Float[Tensor, "samples classes *places"],
        targets: Int[Tensor, "samples *places"],
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        return _pixel_cross_entropy(outputs, *_mask_uncounted(targets, self.ignore_index))


@final
@dataclass(frozen=True)
class Dice(_Pixels):
    r"""Soft Dice loss over the classes of a sample's pixels.

    1 - the mean over classes of $(2 \sum p_c y_c + s) / (\sum p_c + \sum y_c + s)$, where $p$ is
    the softmax of the outputs and $y_c$ is 1 at pixels of the class; sums are over the pixels of a
    sample that count (Milletari et al., V-Net, 3DV 2016; Sudre et al., Generalised Dice overlap,
    DLMIA 2017).

    Args:
        ignore_index: the target of a pixel that does not count.
        smooth: $s$; the larger it is, the less those classes count that have few pixels in a
            sample.
        cross_entropy: weight of the mean cross-entropy of pixels that is added.
    """

    kind: ClassVar[str] = "dice"
    summary: ClassVar[str] = (
        "a class at each pixel: soft Dice over classes, on request with cross-entropy"
    )
    # Without it a class that neither targets nor outputs have would be 0 / 0.
    smooth: PositiveFloat = 1.0
    cross_entropy: NonNegativeFloat = 0.0

    def __call__(
        self,
        outputs: Float[Tensor, "samples classes *places"],
        targets: Int[Tensor, "samples *places"],
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        counted, known = _mask_uncounted(targets, self.ignore_index)
        # Shape (classes, 1, ...): it meets (samples, 1, places) in one comparison.
        classes = torch.arange(outputs.shape[1], device=outputs.device).reshape(
            -1, *[1] * (targets.dim() - 1)
        )
        there = counted.unsqueeze(1).to(outputs.dtype)
        wanted = (known.unsqueeze(1) == classes).to(outputs.dtype) * there
        found = functional.softmax(outputs, 1) * there
        # Per sample and class; the loss is the mean over classes.
        both = (found * wanted).flatten(2).sum(2)
        either = (found + wanted).flatten(2).sum(2)
        loss = 1 - ((2 * both + self.smooth) / (either + self.smooth)).mean(1)
        if not self.cross_entropy:
            return loss
        return loss + self.cross_entropy * _pixel_cross_entropy(outputs, counted, known)


# ---------------------------------------------------------------- numbers


@dataclass(frozen=True)
class _Numbers(Loss):
    """As many outputs as a target has entries; the loss of a sample is the mean over them."""

    targets: ClassVar[Targets] = "numbers"
    form: ClassVar[Form | None] = "numbers"
    metric: ClassVar[str | None] = MAE.name

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`."""
        return outputs.reshape(targets.shape), targets

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        expected = "as many outputs as a target has entries"
        advice = "the module needs one output for each entry of a target"
        self._check_shapes(
            _num_entries(outputs) == _num_entries(targets), expected, outputs, targets, advice
        )


@final
@dataclass(frozen=True)
class SquaredError(_Numbers):
    """Mean squared error over the entries of a sample's target."""

    kind: ClassVar[str] = "mse"
    summary: ClassVar[str] = "numbers: squared error, the mean over a target's entries"
    metric: ClassVar[str | None] = MSE.name

    def __call__(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Float[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        difference = (outputs.reshape(targets.shape) - targets).square()
        return flatten_entries(difference).mean(1)


@final
@dataclass(frozen=True)
class AbsoluteError(_Numbers):
    """Mean absolute error over the entries of a sample's target."""

    kind: ClassVar[str] = "mae"
    summary: ClassVar[str] = "numbers: absolute error, the mean over a target's entries"

    def __call__(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Float[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        return flatten_entries((outputs.reshape(targets.shape) - targets).abs()).mean(1)


@final
@dataclass(frozen=True)
class Huber(_Numbers):
    r"""Half the squared error up to an error of $\delta$, then linear; the mean over entries.

    The linear part is $\delta (|e| - \delta / 2)$. P. J. Huber, Robust estimation of a location
    parameter, Annals of Mathematical Statistics 35, 1964.

    Args:
        delta: $\delta$, where the square ends.
    """

    kind: ClassVar[str] = "huber"
    summary: ClassVar[str] = (
        "numbers: squared error where it is small, absolute error where it is large"
    )
    delta: PositiveFloat = 1.0

    def __call__(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Float[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        every = functional.huber_loss(
            outputs.reshape(targets.shape), targets, reduction="none", delta=self.delta
        )
        return flatten_entries(every).mean(1)


@final
@dataclass(frozen=True)
class Poisson(_Numbers):
    r"""Negative log-likelihood of counts: $e^z - y z$.

    The outputs $z$ are the logarithms of the means of the counts $y$. The mean over entries; $\log
    y!$, which depends on the targets alone, is left out. Metrics see $e^z$.
    """

    kind: ClassVar[str] = "poisson"
    summary: ClassVar[str] = "counts: Poisson likelihood, outputs are logarithms of means"
    can_be_negative: ClassVar[bool] = True

    def __call__(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Float[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        logs = outputs.reshape(targets.shape)
        return flatten_entries(logs.exp() - targets * logs).mean(1)

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`: the means."""
        return outputs.reshape(targets.shape).exp(), targets

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        super().check_data(outputs, targets)
        self._check_values(targets >= 0, "a count, 0 or more", targets)


@final
@dataclass(frozen=True)
class Quantile(_Numbers):
    r"""Pinball loss of quantiles $q$: $\max(q e, (q - 1) e)$ with $e$ the target minus the output.

    The loss is the mean over quantiles and entries. A target's entry has an output for each
    quantile; the outputs of an entry are adjacent. Metrics see the quantile nearest to the median
    (R. Koenker and G. Bassett, Regression quantiles, Econometrica 46, 1978).

    Args:
        quantiles: $q$, each between 0 and 1.
    """

    kind: ClassVar[str] = "quantile"
    summary: ClassVar[str] = "numbers: pinball loss, an output for each quantile of each entry"
    quantiles: Annotated[Sequence[Annotated[float, Gt(0), Lt(1)]], MinLen(1)] = (0.1, 0.5, 0.9)

    def __call__(
        self, outputs: Float[Tensor, "samples *outputs"], targets: Float[Tensor, "samples *targets"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        away = targets.unsqueeze(-1) - self._split_quantiles(outputs, targets)
        every = []
        for i, q in enumerate(self.quantiles):
            # Too low an output costs q for each unit, too high a one 1 - q.
            every.append(torch.maximum(q * away[..., i], (q - 1) * away[..., i]))
        return flatten_entries(torch.stack(every, -1)).mean(1)

    def _split_quantiles(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(*targets.shape, len(self.quantiles))

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`: the quantile nearest to the median."""
        # Metrics take one number an entry.
        nearest = min(range(len(self.quantiles)), key=lambda i: abs(self.quantiles[i] - 0.5))
        return self._split_quantiles(outputs, targets)[..., nearest], targets

    def num_outputs(self, y: Shaped[Tensor, "samples *targets"], classes: int) -> int:
        """See `Loss.num_outputs`."""
        return _num_entries(y) * len(self.quantiles)

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        number = len(self.quantiles)
        expected = f"{number} outputs, one a quantile, for each entry of a target"
        fit = _num_entries(outputs) == number * _num_entries(targets)
        self._check_shapes(
            fit,
            expected,
            outputs,
            targets,
            f"the module needs {number * _num_entries(targets)} outputs",
        )


# ---------------------------------------------------------------- times of events


@final
@dataclass(frozen=True)
class Cox(Loss):
    r"""Negative partial log-likelihood of proportional hazards.

    The loss at an event is $\log \sum_{t_j \ge t_i} e^{z_j} - z_i$. A target is a time, and 1 where
    the event took place then, 0 where it had not yet (censored); an output $z$ is the logarithm of
    a hazard, up to a constant. The loss of a censored sample is 0. Ties are handled as by Breslow:
    all events of one time see the same samples at risk. The mean over all n samples of a set is 1/n
    of the negative partial log-likelihood of the set; in training only the samples of the batch are
    at risk, so take large batches.

    D. R. Cox, Regression models and life-tables, J. R. Stat. Soc. B 34, 1972; N. Breslow,
    discussion of it.
    """

    kind: ClassVar[str] = "cox"
    summary: ClassVar[str] = "times of events, some censored: Cox's partial likelihood"
    targets: ClassVar[Targets] = "numbers"
    form: ClassVar[Form | None] = "times"
    whole: ClassVar[bool] = True

    def __call__(
        self, outputs: Float[Tensor, "samples *one"], targets: Float[Tensor, "samples 2"]
    ) -> Float[Tensor, " samples"]:
        """Return the loss of each sample."""
        logs, time, event = outputs.reshape(-1), targets[:, 0], targets[:, 1]
        # from the last time to the first, the cumulative sum is over the samples at risk
        order = torch.argsort(time, descending=True, stable=True)
        sums = torch.logcumsumexp(logs.gather(0, order), 0)
        # searchsorted takes ascending values, and warns about a view. All samples at the last place
        # of an equal time are at risk at once (Breslow).
        later = (-time).contiguous()
        last = torch.searchsorted(later.gather(0, order).contiguous(), later, right=True) - 1
        return event * (sums.gather(0, last) - logs)

    def to_metric_form(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Loss.to_metric_form`."""
        return outputs.reshape(-1), targets

    def num_outputs(self, y: Shaped[Tensor, "samples *targets"], classes: int) -> int:
        """See `Loss.num_outputs`."""
        return 1

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`."""
        expected = (
            "outputs (samples, 1) and targets (samples, 2): "
            "a time, and 1 for an event or 0 for none"
        )
        advice = "the module needs one output, the logarithm of a hazard"
        fit = _num_entries(outputs) == 1 and targets.shape[1:] == (2,)
        self._check_shapes(fit, expected, outputs, targets, advice)
        event = targets[:, 1]
        self._check_values(
            (event == 0) | (event == 1), "1 for an event or 0 for none, in the second column", event
        )


# ---------------------------------------------------------------- by name or import path


@final
@dataclass(frozen=True)
class CustomLoss(Loss):
    """A custom function, (outputs, targets) -> one loss a sample, by its import path.

    Args:
        path: "package.module:function".
    """

    kind: ClassVar[str] = "own"
    summary: ClassVar[str] = "a custom function"
    targets: ClassVar[Targets] = "numbers"
    path: str

    def check(self) -> None:
        """Check that the import path names a function."""
        found = import_object(self.path, f"loss {self.path!r}")
        if not callable(found):
            raise ConfigError(
                f"loss {self.path!r} is {found!r}; expected a function (outputs, targets)"
            )

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample."""
        found = import_object(self.path, f"loss {self.path!r}")(outputs, targets)
        shape = getattr(found, "shape", None)
        if shape != (len(outputs),):
            what = repr(found)
            if shape is not None:
                what = f"a tensor of shape {tuple(shape)}"
            raise ConfigError(
                f"loss {self.path!r} returned {what} for {len(outputs)} samples; "
                "expected one loss a sample: take the mean over all other axes, and return it"
            )
        return found

    def check_data(
        self, outputs: Shaped[Tensor, "batch *outputs"], targets: Shaped[Tensor, "samples *targets"]
    ) -> None:
        """See `Loss.check_data`: try the function."""
        # `outputs` are of a first batch, `targets` of all samples, which may be fewer.
        count = min(len(outputs), len(targets))
        try:
            self(outputs[:count], targets[:count])
        except CoterieError:
            raise
        # A custom function may raise anything; the shapes help its author more than a traceback.
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            shapes = (
                f"outputs {(count, *outputs.shape[1:])} and targets {(count, *targets.shape[1:])}"
            )
            raise ModelError(f"loss {self.path!r} fails on {shapes}: {reason}") from error


_BUNDLED = (
    *(CrossEntropy, Binary, MultiLabel, Tokens, CausalLm, Segmentation, Dice),
    *(SquaredError, AbsoluteError, Huber, Poisson, Quantile, Cox),
)
LOSSES: dict[str, type[Loss]] = {one.kind: one for one in _BUNDLED}
"""Every bundled loss by its name."""


def make_loss(given: str | Mapping[str, Any] | Loss | Callable[..., Any]) -> Loss:
    """Make a loss.

    Args:
        given: a name of LOSSES; an import path "package.module:name" of a function or of a subclass
            of `Loss`; a table with one of these as `kind` and the fields of the loss; a loss; or a
            function.

    Raises:
        ConfigError: on an unknown name or key, or a value that does not fit.

    Example:
        >>> make_loss("cross-entropy") == CrossEntropy()
        True
    """
    if isinstance(given, Loss):
        return given
    kind, table = parse_kind(given, LOSSES, "loss", "loss")
    if kind in LOSSES:
        return parse_settings(LOSSES[kind], table, "loss")
    found = import_object(kind, f"loss {kind!r}")
    if isinstance(found, Loss):
        return found
    if isinstance(found, type) and issubclass(found, Loss):
        return parse_settings(found, table, "loss")
    return parse_settings(CustomLoss, table, "loss", path=kind)


def normalize_loss_setting(given: Any) -> dict[str, Any] | None:
    """Return a setting of a loss as the plain table that `make_loss` takes; None for None.

    An import path is not imported.
    """
    if given is None:
        return None
    table = given
    if isinstance(given, str):
        table = {"kind": given}
    # A study file can be read where the code of its custom loss is not installed.
    if isinstance(table, Mapping) and ":" in str(table.get("kind")):
        return dict(table)
    if not (isinstance(table, Loss | Mapping) or callable(table)):
        raise ConfigError(
            f"loss is {given!r}; "
            f"expected one of {', '.join(LOSSES)}, package.module:function, or a table"
        )
    return loss_to_table(make_loss(table))


def loss_to_table(loss: Loss) -> dict[str, Any]:
    """Return a loss as the table from which `make_loss` makes it again."""
    if isinstance(loss, CustomLoss):
        return {"kind": loss.path}
    kind = loss.kind
    if LOSSES.get(kind) is not type(loss):
        kind = find_import_path(type(loss), "loss")
    return {**to_plain(loss), "kind": kind}


def default_loss(y: Shaped[Tensor, "samples *targets"], classes: int) -> Loss:
    """Return the loss for targets when no loss is set.

    Args:
        y: targets.
        classes: number of classes, where each target is one.

    Raises:
        ConfigError: when several losses would fit: whole numbers that are not classes, or 0 and 1
            in several columns.
    """
    if classes:
        return CrossEntropy()
    entries = _num_entries(y)
    # A target that is 0 everywhere says nothing about its kind.
    answers = bool(((y == 0) | (y == 1)).all()) and bool((y == 1).any())
    if not y.is_floating_point():
        # By the number of axes: one integer, a sequence, an image.
        fitting = {
            1: ["poisson", "mse"],
            2: ["tokens", "causal-lm"],
            3: ["segmentation", "dice"],
        }.get(y.dim(), [])
        if answers and entries > 1:
            fitting = ["multi-label", *fitting]
        many = f"{entries} whole numbers"
        if entries == 1:
            many = "a whole number"
        raise ConfigError(
            f"the targets are {many} a sample, which fits several losses: set loss to "
            f"{' or '.join(map(repr, fitting or ['mse']))}, or to a custom function"
        )
    if entries > 1 and answers:
        raise ConfigError(
            f"the targets are 0 and 1 in {entries} columns: set loss = 'multi-label' "
            "(each column is a yes or no), or loss = 'mse' (they are numbers)"
        )
    return SquaredError()


def cast_targets(
    loss: Loss, y: Shaped[Tensor, "*shape"], dtype: torch.dtype
) -> Shaped[Tensor, "*shape"]:
    """Return targets as the losses take them: whole numbers as int64, numbers as `dtype`.

    Targets of yes and no, and those of a custom function, stay whole numbers or floating-point
    numbers, as they are stored.

    Args:
        loss: the loss that takes them.
        y: targets as they are stored.
        dtype: floating-point type of models.
    """
    numbers = loss.targets == "numbers"
    # Yes and no are stored as either type, and a custom function says nothing of its targets.
    if loss.targets == "labels" or isinstance(loss, CustomLoss):
        numbers = y.is_floating_point()
    if numbers:
        return y.to(dtype)
    return y.to(torch.int64)
