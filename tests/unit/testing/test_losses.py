"""The checks of losses and metrics accept the bundled ones, and name what is broken in others."""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn import functional

from coterie.errors import ModelError
from coterie.functional.losses import Cox, Loss, Targets
from coterie.functional.metrics import Metric, Undefined
from coterie.rng import Rng
from coterie.testing import check_loss, check_metric

DRAW = Rng(0).generator("checks")
OUTPUTS, TARGETS = (
    torch.from_numpy(DRAW.normal(size=(8, 3))),
    torch.from_numpy(DRAW.integers(0, 3, 8)),
)
SURVIVAL = torch.from_numpy(DRAW.integers(0, 2, (8, 2))).double() + torch.tensor([1.0, 0.0])


def plain(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True)
class Centered(Loss):
    """Compares each sample with the mean of its batch."""

    kind: ClassVar[str] = "centered"
    targets: ClassVar[Targets] = "class"
    whole: ClassVar[bool] = True

    def __call__(self, outputs, targets):
        return plain(outputs - outputs.mean(0), targets)


def centered(outputs, targets):
    return Centered()(outputs, targets)


def hard(outputs, targets):
    """Which classes there are depends on the data."""
    return plain(outputs, targets) * len(targets.unique()) ** 0


@pytest.mark.parametrize("loss", ["cross-entropy", plain, f"{__name__}:plain", Centered()])
def test_losses_that_keep_the_contract_run_on_every_engine(loss):
    assert check_loss(loss, OUTPUTS, TARGETS) == "runs on every engine"


def test_others_are_declared_whole():
    assert check_loss(Cox(), OUTPUTS[:, :1], SURVIVAL) == "runs on every engine"
    assert check_loss(centered, OUTPUTS, TARGETS, whole=True) == "runs on every engine"


def test_a_loss_that_depends_on_the_data_runs_on_the_loop_engine():
    assert check_loss(hard, OUTPUTS, TARGETS).startswith(
        "runs on the loop engine only, one client after another: "
    )


def forgotten(outputs, targets):
    plain(outputs, targets)


def averaged(outputs, targets):
    return plain(outputs, targets).mean()


def number(outputs, targets):
    return plain(outputs, targets).mean().item()


def infinite(outputs, targets):
    return plain(outputs, targets).masked_fill(targets == TARGETS[0], math.inf)


def detached(outputs, targets):
    return plain(outputs.detach(), targets)


def counted(outputs, targets):
    return (outputs.argmax(1) != targets).long()


def stepwise(outputs, targets):
    return (outputs * 0).sum(1) + (outputs.argmax(1) != targets)


def rooted(outputs, targets):
    return (outputs * 0).sum(1).sqrt()


def overwriting(outputs, targets):
    return plain(outputs.mul_(2), targets)


def relabeling(outputs, targets):
    return plain(outputs, targets.fill_(0))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (forgotten, "the loss returned None for 8 samples: return the loss of each"),
        (
            averaged,
            r"returned shape \(\) for 8 samples; expected \(8,\): take the mean over all other axes",
        ),
        (number, r"returned \d.*; expected a tensor, one loss a sample"),
        (infinite, "the loss of sample 0 is inf; expected a finite number"),
        (detached, "has no gradient: compute with torch's operations"),
        (counted, "returned torch.int64; expected the numbers of the outputs"),
        (stepwise, "gradient of the loss is zero everywhere"),
        (rooted, "gradient of the loss is not finite"),
        (
            centered,
            "the loss of sample 0 is .* among the others and .* alone: leave the mean over samples to Coterie",
        ),
        (overwriting, "changes the outputs that it gets"),
        (relabeling, "changes the targets that it gets"),
    ],
)
def test_a_broken_guarantee_of_a_loss_is_named(loss, said):
    with pytest.raises(AssertionError, match=said):
        check_loss(loss, OUTPUTS, TARGETS.clone())


def test_a_loss_is_checked_on_what_it_takes():
    with pytest.raises(ModelError, match="'tokens' takes outputs"):
        check_loss("tokens", OUTPUTS, TARGETS)
    with pytest.raises(AssertionError, match="outputs are of 1 samples; expected 2 or more"):
        check_loss("cross-entropy", OUTPUTS[:1], TARGETS[:1])


class Remembers:
    """Adds how often it was called."""

    calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return plain(outputs, targets) + (self.calls > 9)


def test_a_loss_that_remembers_is_named():
    with pytest.raises(AssertionError, match="may not keep values from one call to the next"):
        check_loss(Remembers(), OUTPUTS, TARGETS)


# ---------------------------------------------------------------- metrics


def recall(outputs, targets):
    """Share of the samples of class 1 that are found."""
    there = targets == 1
    if not there.any():
        warnings.warn("no sample is of class 1", Undefined, stacklevel=2)
        return math.nan
    return (outputs.argmax(1)[there] == 1).double().mean()


def test_metrics_that_keep_the_contract_have_their_value():
    expected = (OUTPUTS.argmax(1) == 1)[TARGETS == 1].double().mean()
    assert check_metric(recall, OUTPUTS, TARGETS) == pytest.approx(float(expected))
    assert check_metric(f"{__name__}:recall", OUTPUTS, TARGETS) == pytest.approx(float(expected))
    assert 0 <= check_metric("auroc", OUTPUTS, TARGETS) <= 1
    assert (
        check_metric("accuracy", OUTPUTS, TARGETS) == (OUTPUTS.argmax(1) == TARGETS).double().mean()
    )
    assert check_metric("concordance", OUTPUTS[:, 0], SURVIVAL) <= 1


def no_value(outputs, targets):
    recall(outputs, targets)


def many_values(outputs, targets):
    return plain(outputs, targets)


def silent(outputs, targets):
    return math.nan


def first(outputs, targets):
    return outputs[0, 0]


def strict(outputs, targets):
    if len(targets.unique()) < 2:
        raise ValueError("only one class")
    return 0.5


def doubling(outputs, targets):
    return outputs.mul_(2).mean()


def clearing(outputs, targets):
    return targets.zero_().double().mean()


def nothing(outputs, targets):
    return None


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (no_value, "the metric returned None: return the number"),
        (
            many_values,
            r"returned shape \(8,\); expected one number \(or one a sample, with each=True\)",
        ),
        (
            silent,
            "the metric is NaN without a reason: warn with coterie.functional.metrics.Undefined",
        ),
        (first, "the metric is .* and .* with the samples in another order"),
        (
            strict,
            r"the metric of a single sample fails \(ValueError: only one class\): a client may have such data",
        ),
        (doubling, "the metric changes the outputs"),
        (clearing, "the metric changes the targets"),
        (
            Metric("large", function=lambda o, t: 3.0, most=1.0),
            "is 3; expected at most 1, as it says itself",
        ),
        (
            Metric("small", function=lambda o, t: -3.0, least=0.0, most=1.0),
            "expected 0 or more and at most 1",
        ),
        (Metric("each", function=averaged, each=True), r"returned shape \(\) for 8 samples"),
        (Metric("none", function=nothing, each=True), "returned None; expected one value a sample"),
    ],
)
def test_a_broken_guarantee_of_a_metric_is_named(metric, said):
    with pytest.raises(AssertionError, match=said):
        check_metric(metric, OUTPUTS, TARGETS)
