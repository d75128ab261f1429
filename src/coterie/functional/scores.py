"""How well outputs fit their targets: the formulas of the metrics of a set of samples.

They take outputs and targets in one of five forms; each loss converts its own into one
(`Loss.to_metric_form`):

* class: outputs [samples, classes], logits or log-probabilities; targets [samples], whole numbers;
* labels: outputs [samples, columns], the logit of yes in each; targets [samples, columns], 0 or 1;
* positions: outputs [samples, positions, classes]; targets [samples, positions], `UNCOUNTED` where
  one does not count;
* numbers: outputs and targets of one shape, [samples, ...];
* times: outputs [samples], larger where the event is expected sooner; targets [samples, 2]: a time,
  and 1 where the event took place then, 0 where it had not yet (censored).

A function returns a value for each sample, or one for all samples. Where a value is not defined, it
is NaN with a warning of class `Undefined`.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Form = Literal["class", "labels", "positions", "numbers", "times"]
"""What outputs and targets are; see above."""

UNCOUNTED = -100
"""The target of a position that does not count; what PyTorch takes as `ignore_index`."""

# Entries of a table of pairs, or of log-probabilities, in memory at once (128 MB in float64): all
# pairs of a large test set, or all positions of its sequences, would not fit.
_AT_ONCE = 1 << 24


def has_form(form: Form, outputs: Tensor, targets: Tensor) -> bool:
    """Whether outputs and targets have the shapes of a form; a class needs an output of its own."""
    if form == "class":
        return outputs.dim() == 2 and outputs.shape[1] > 1 and targets.dim() == 1
    if form == "positions":
        return outputs.dim() == 3 and targets.dim() == 2 and outputs.shape[:2] == targets.shape
    if form == "times":
        return outputs.dim() == 1 and targets.shape == (len(outputs), 2)
    return outputs.shape == targets.shape and (form == "numbers" or targets.dim() == 2)


class Undefined(UserWarning):
    """A metric is NaN; the message says why."""


def flatten_entries(
    values: Shaped[Tensor, "samples *entries"],
) -> Shaped[Tensor, "samples entries_in_all"]:
    """Return the entries of each sample in one axis, of no samples too."""
    # The size of an axis of -1 is ambiguous where there are no samples.
    return values.reshape(len(values), math.prod(values.shape[1:]))


def warn_undefined(metric: str, reason: str) -> float:
    """Return NaN, and warn with the reason."""
    warnings.warn(f"{metric} is undefined: {reason}", Undefined, stacklevel=3)
    return math.nan


def mark_not_finite(outputs: Shaped[Tensor, "samples *outputs"]) -> Float[Tensor, " samples"]:
    """Return 0 for each sample whose outputs are all finite, else NaN.

    Added to a score, it makes that of a sample without finite outputs undefined and leaves others
    as they are.
    """
    # NaN times 0 and infinity times 0 are NaN. Engines trace this line, so it has no branch on
    # values.
    zeros = outputs * 0.0
    if zeros.dim() > 1:
        zeros = zeros.flatten(1).sum(1)
    return zeros


# ---------------------------------------------------------------- classes, and columns of yes or no


def accuracy(
    outputs: Float[Tensor, "*samples classes"], targets: Shaped[Tensor, "*samples"]
) -> Float[Tensor, "*samples"]:
    """Return 1 where the largest output is that of the class, else 0."""
    return (outputs.argmax(-1) == targets).to(outputs.dtype)


def balanced_accuracy(
    outputs: Float[Tensor, "samples classes"], targets: Int[Tensor, " samples"]
) -> float:
    """Return the mean recall of the classes among the targets."""
    number = targets.bincount(minlength=outputs.shape[1])
    right = targets[outputs.argmax(1) == targets].bincount(minlength=outputs.shape[1])
    # A class without targets has no recall.
    there = number > 0
    return float((right[there].double() / number[there]).mean())


def label_accuracy(
    outputs: Float[Tensor, "samples columns"], targets: Shaped[Tensor, "samples columns"]
) -> Float[Tensor, " samples"]:
    """Return the share of each sample's columns that are right; an output above 0 is a yes."""
    return ((outputs > 0) == (targets > 0.5)).to(outputs.dtype).mean(1)


def _one_against_others(
    outputs: Tensor, targets: Tensor
) -> tuple[Bool[Tensor, "samples columns"], Float[Tensor, "samples columns"]]:
    """Return which samples are a yes in each column, and scores that are larger for a yes.

    A column is one class against all others; of two classes, the second against the first.
    """
    if targets.dim() == 2:
        return targets > 0.5, outputs.double()
    if outputs.shape[1] == 2:
        # These scores depend on the order of samples only, and p_1 rises with the difference of the
        # logits. The logits of more than two classes have no common zero: probabilities do.
        return (targets == 1)[:, None], (outputs[:, 1:] - outputs[:, :1]).double()
    return targets[:, None] == torch.arange(outputs.shape[1]), outputs.double().softmax(1)


def _mean_over_columns(
    name: str,
    outputs: Tensor,
    targets: Tensor,
    usable: Callable[[Tensor], Tensor],
    lacking: str,
    one: Callable[[Any, Any], Any],
) -> float:
    """Return the mean of a score over the columns for which it is defined."""
    yes, score = _one_against_others(outputs, targets)
    if not bool(torch.isfinite(score).all()):
        return warn_undefined(name, "an output is not finite")
    chosen = usable(yes.double().mean(0)).nonzero().flatten().tolist()
    if not chosen:
        return warn_undefined(name, lacking)
    return sum(float(one(yes[:, c].numpy(), score[:, c].numpy())) for c in chosen) / len(chosen)


def auroc(
    outputs: Float[Tensor, "samples columns"], targets: Shaped[Tensor, "samples *columns"]
) -> float:
    """Return the area under the ROC curve: how often a yes scores above a no, ties as one half.

    Of two classes the second counts as yes; of more, it is the mean over classes, each against all
    others; of labels, the mean over columns. Classes and columns that all samples have, or none,
    do not count.
    """
    from sklearn.metrics import roc_auc_score

    def has_yes_and_no(share: Tensor) -> Tensor:
        return (share > 0) & (share < 1)

    return _mean_over_columns(
        "AUROC",
        outputs,
        targets,
        has_yes_and_no,
        "there is no class that only some samples have",
        roc_auc_score,
    )


def average_precision(
    outputs: Float[Tensor, "samples columns"], targets: Shaped[Tensor, "samples *columns"]
) -> float:
    r"""Return the average precision, $\sum_n (R_n - R_{n-1}) P_n$ over thresholds.

    Classes and columns are averaged as in `auroc`. Classes and columns that no sample has do not
    count.
    """
    from sklearn.metrics import average_precision_score

    lacking = "no sample is a yes"
    return _mean_over_columns(
        "average precision",
        outputs,
        targets,
        lambda share: share > 0,
        lacking,
        average_precision_score,
    )


def f1(
    outputs: Float[Tensor, "samples columns"], targets: Shaped[Tensor, "samples *columns"]
) -> float:
    """Return F1, 2 TP / (2 TP + FP + FN), the mean over classes (of two classes both) or columns.

    Classes and columns that neither targets nor predictions have do not count.
    """
    if targets.dim() == 2:
        found, wanted = outputs > 0, targets > 0.5
    else:
        classes = torch.arange(outputs.shape[1])
        found, wanted = outputs.argmax(1)[:, None] == classes, targets[:, None] == classes
    right, all_of_both = (found & wanted).sum(0), found.sum(0) + wanted.sum(0)
    there = all_of_both > 0
    if not bool(there.any()):
        return warn_undefined("F1", "neither targets nor predictions have a yes")
    return float((2 * right[there].double() / all_of_both[there]).mean())


def calibration_error(
    outputs: Float[Tensor, "samples classes"], targets: Int[Tensor, " samples"], bins: int = 15
) -> float:
    r"""Return the expected calibration error.

    It is $\sum_b \frac{n_b}{n} |\text{accuracy}_b - \text{confidence}_b|$. Samples are put into
    bins of equal width by the probability of the predicted class.
    """
    confidence, found = outputs.double().softmax(1).max(1)
    if not bool(torch.isfinite(confidence).all()):
        return warn_undefined("the calibration error", "an output is not finite")
    # A bin holds its upper edge; a confidence of 0 belongs to the first.
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    # Right minus confidence, summed over a bin, is n_b (accuracy_b - confidence_b).
    away = torch.zeros(bins, dtype=torch.float64).index_add_(
        0, place, (found == targets).double() - confidence
    )
    return float(away.abs().sum() / len(targets))


def brier(
    outputs: Float[Tensor, "samples columns"], targets: Shaped[Tensor, "samples *columns"]
) -> Float[Tensor, " samples"]:
    """Return the squared error of the probabilities of each sample.

    Of more than two classes the sum over them (0 to 2); of two, that of the second; of labels, the
    mean over columns.
    """
    if targets.dim() == 2:
        return (outputs.sigmoid() - targets.to(outputs.dtype)).square().mean(1)
    wanted = (targets[:, None] == torch.arange(outputs.shape[1], device=outputs.device)).to(
        outputs.dtype
    )
    every = (outputs.softmax(1) - wanted).square().sum(1)
    # Of two classes both have the same squared error.
    return every / 2 if outputs.shape[1] == 2 else every


# ---------------------------------------------------------------- a class at each position


def position_accuracy(
    outputs: Float[Tensor, "samples positions classes"], targets: Int[Tensor, "samples positions"]
) -> Float[Tensor, " samples"]:
    """Return the share of each sample's positions that are right; 0 where no position counts."""
    counted = (targets != UNCOUNTED).to(outputs.dtype)
    return (accuracy(outputs, targets) * counted).sum(1) / counted.sum(1).clamp(min=1)


def exact_match(
    outputs: Float[Tensor, "samples positions classes"], targets: Int[Tensor, "samples positions"]
) -> Float[Tensor, " samples"]:
    """Return 1 for each sample all of whose counted positions are right, else 0.

    A sample where no position counts is 0, as in `position_accuracy`.
    """
    counted = targets != UNCOUNTED
    wrong = (accuracy(outputs, targets) < 0.5) & counted
    return (counted.any(1) & ~wrong.any(1)).to(outputs.dtype)


def perplexity(
    outputs: Float[Tensor, "samples positions classes"], targets: Int[Tensor, "samples positions"]
) -> float:
    """Return the exponential of the mean cross-entropy of all positions that count."""
    counted = targets != UNCOUNTED
    if not bool(counted.any()):
        return warn_undefined("the perplexity", "no position counts")
    # Samples at once, each of positions x classes log-probabilities.
    total, step = 0.0, max(1, _AT_ONCE // max(1, outputs[0].numel()))
    for rows, wanted, counts in zip(
        outputs.split(step), targets.split(step), counted.split(step), strict=True
    ):
        losses = -rows[counts].double().log_softmax(1).gather(1, wanted[counts][:, None])
        total += float(losses.sum())
    # The exponential of a tensor overflows to infinity, where math.exp raises.
    return float(torch.tensor(total / int(counted.sum()), dtype=torch.float64).exp())


def iou(
    outputs: Float[Tensor, "samples positions classes"], targets: Int[Tensor, "samples positions"]
) -> float:
    """Return the intersection over union of predicted and true positions, the mean over classes.

    The positions of all samples count together. Classes that neither targets nor predictions have
    do not count.
    """
    counted, classes = targets != UNCOUNTED, outputs.shape[2]
    if not bool(counted.any()):
        return warn_undefined("the intersection over union", "no position counts")
    found, wanted = outputs.argmax(2)[counted], targets[counted]
    # Hits of each class; found and wanted positions count them twice.
    both = wanted[found == wanted].bincount(minlength=classes)
    either = found.bincount(minlength=classes) + wanted.bincount(minlength=classes) - both
    there = either > 0
    return float((both[there].double() / either[there]).mean())


# ---------------------------------------------------------------- numbers


def squared_error(
    outputs: Float[Tensor, "samples *targets"], targets: Float[Tensor, "samples *targets"]
) -> Float[Tensor, " samples"]:
    """Return the squared error of each sample, the mean over a target's entries."""
    return flatten_entries((outputs - targets).square()).mean(1)


def absolute_error(
    outputs: Float[Tensor, "samples *targets"], targets: Float[Tensor, "samples *targets"]
) -> Float[Tensor, " samples"]:
    """Return the absolute error of each sample, the mean over a target's entries."""
    return flatten_entries((outputs - targets).abs()).mean(1)


def r2(
    outputs: Float[Tensor, "samples *targets"], targets: Float[Tensor, "samples *targets"]
) -> float:
    r"""Return the coefficient of determination, the mean over a target's entries.

    It is $1 - \sum (y - \hat y)^2 / \sum (y - \bar y)^2$. Entries whose targets are all equal do
    not count.
    """
    from sklearn.metrics import r2_score

    found, wanted = flatten_entries(outputs.double()), flatten_entries(targets.double())
    # scikit-learn would count an entry without variance as 0 or 1.
    varies = (wanted != wanted[:1]).any(0)
    if not bool(varies.any()):
        return warn_undefined("R²", "the targets do not vary")
    if not bool(torch.isfinite(found).all()):
        return warn_undefined("R²", "an output is not finite")
    return float(r2_score(wanted[:, varies].numpy(), found[:, varies].numpy()))


# ---------------------------------------------------------------- times of events


def concordance(outputs: Float[Tensor, " samples"], targets: Float[Tensor, "samples 2"]) -> float:
    """Return Harrell's C: the share of comparable pairs whose outputs are in the right order.

    The output of the sample that had the event first has to be the larger one. A pair is compared
    where the earlier time is that of an event; of equal times, where one is of an event and the
    other censored. Equal outputs count one half.

    F. E. Harrell et al., Evaluating the yield of medical tests, JAMA 247, 1982.
    """
    if not bool(torch.isfinite(outputs).all()):
        return warn_undefined("the concordance", "an output is not finite")
    time, event = targets[:, 0], targets[:, 1] > 0.5
    pairs = right = 0.0
    for chosen in event.nonzero().flatten().split(max(1, _AT_ONCE // max(1, len(time)))):
        # Rows are events, columns all samples.
        own, risk = time[chosen, None], outputs[chosen, None]
        later = (time > own) | ((time == own) & ~event)
        pairs += float(later.sum())
        right += float((later & (risk > outputs)).sum()) + 0.5 * float(
            (later & (risk == outputs)).sum()
        )
    if not pairs:
        return warn_undefined("the concordance", "there is no event before another time")
    return right / pairs
