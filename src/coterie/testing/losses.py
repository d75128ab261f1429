"""Contract tests of losses, and of metrics of outputs, your own included."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.func import vmap

from coterie.errors import first_line
from coterie.functional.losses import Loss, make_loss
from coterie.functional.metrics import Metric, Undefined, find_metric
from coterie.rng import Rng


def _are_close(one: Tensor, other: Tensor) -> bool:
    # Looser than rounding of float32: sums of another length may round differently.
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def check_loss(
    loss: str | Loss | Callable[[Tensor, Tensor], Tensor],
    outputs: Float[Tensor, "samples *outputs"],
    targets: Shaped[Tensor, "samples *targets"],
    *,
    whole: bool = False,
) -> str:
    """Check the guarantees that every loss must give.

    It returns one finite value a sample. Its gradient is finite, and not zero everywhere. It
    changes neither outputs nor targets. The loss of a sample does not depend on the samples next to
    it, unless it is declared `whole`.

    Args:
        loss: a name or import path, a `Loss`, or a function (outputs, targets) -> one loss a
            sample.
        outputs: of a module, for two or more samples; random ones do.
        targets: of these samples.
        whole: whether the loss of a sample may depend on the others; of a `Loss`, its own `whole`
            counts.

    Returns:
        Which engines can run it.

    Raises:
        AssertionError: naming the broken guarantee.
        CoterieError: when a loss does not take these shapes.
    """
    found = loss
    if isinstance(found, str | Loss):
        found = make_loss(found)
    if isinstance(found, Loss):
        found.check_data(outputs, targets)
        whole = found.whole or whole
    number = len(outputs)
    assert number > 1, f"outputs are of {number} samples; expected 2 or more"
    leaf, before = outputs.detach().clone().requires_grad_(), targets.clone()
    seen = leaf * 1  # no leaf, so that a loss may try to change it
    kept = seen.detach().clone()
    values = found(seen, targets)
    _check_values(values, number)
    assert torch.equal(seen, kept), "the loss changes the outputs that it gets: compute with copies"
    assert torch.equal(targets, before), (
        "the loss changes the targets that it gets: compute with copies"
    )
    _check_gradient(values, leaf)
    # A loss of the whole batch depends on the others by definition.
    if not whole:
        _check_alone(found, outputs.detach(), targets, values.detach())
    return _describe_engines(found, outputs.detach(), targets, values.detach())


def _check_values(values: Any, number: int) -> None:
    assert values is not None, (
        f"the loss returned None for {number} samples: return the loss of each"
    )
    assert isinstance(values, Tensor), (
        f"the loss returned {values!r}; expected a tensor, one loss a sample"
    )
    shape = tuple(values.shape)
    advice = "take the mean over all other axes, and not over samples"
    assert shape == (number,), (
        f"the loss returned shape {shape} for {number} samples; expected ({number},): {advice}"
    )
    assert values.is_floating_point(), (
        f"the loss returned {values.dtype}; expected the numbers of the outputs"
    )
    lost = (~torch.isfinite(values)).nonzero().flatten().tolist()
    assert not lost, (
        f"the loss of sample {lost[0]} is {float(values.detach()[lost[0]])}; expected a finite "
        "number"
    )


def _check_gradient(values: Tensor, leaf: Tensor) -> None:
    advice = "compute with torch's operations on the outputs, "
    advice += "without .item(), .detach(), argmax or numpy"
    slope = None
    if values.requires_grad:
        (slope,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True)
    assert slope is not None, f"the loss has no gradient: {advice}"
    assert bool(torch.isfinite(slope).all()), (
        "the gradient of the loss is not finite: 0 * log(0) and sqrt(0) do that"
    )

    assert bool(slope.any()), f"the gradient of the loss is zero everywhere: {advice}"


def _check_alone(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, values: Tensor
) -> None:
    # Engines split batches, and weigh samples one by one: both need the loss of a sample to be its
    # own.
    for i in range(len(outputs)):
        alone = loss(outputs[i : i + 1].clone(), targets[i : i + 1].clone())
        same = _are_close(alone, values[i : i + 1])
        assert same, (
            f"the loss of sample {i} is {float(values[i]):.6g} among the others and "
            f"{float(alone):.6g} alone: "
            "leave the mean over samples to Coterie, or make it a subclass of Loss with whole = "
            "True"
        )


def _describe_engines(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor, values: Tensor
) -> str:
    # The client in question is the second: a value kept from the first would show.
    many, labels = torch.stack([outputs.flip(0), outputs]), torch.stack([targets.flip(0), targets])
    try:
        found = vmap(loss)(many, labels)
    # `vmap` refuses operations that depend on values; the loop engine still can run them.
    except Exception as error:  # of whatever kind: the function is not ours
        return f"runs on the loop engine only, one client after another: {first_line(error)}"
    assert _are_close(found[1], values), (
        "the loss of many clients at once (torch.func.vmap) is not that of one after another: "
        "it may not keep values from one call to the next"
    )
    return "runs on every engine"


def check_metric(
    metric: str | Metric | Callable[[Tensor, Tensor], Any],
    outputs: Float[Tensor, "samples *outputs"],
    targets: Shaped[Tensor, "samples *targets"],
) -> float:
    """Check the guarantees that every metric of outputs must give.

    It returns a number, in its range if it says one. The order of the samples does not matter. Sets
    of a single sample, and of samples with equal targets, have a value too or are NaN. It is NaN
    only with a warning of class `Undefined`. It changes neither outputs nor targets.

    Args:
        metric: a name or import path, a `Metric`, or a function (outputs, targets) -> number.
        outputs: of a module, for two or more samples; random ones do.
        targets: of these samples.

    Returns:
        Its value.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    if isinstance(metric, str | Metric):
        found = find_metric(metric)
    else:
        found = Metric("own", function=metric)
    number = len(outputs)
    assert number > 1, f"outputs are of {number} samples; expected 2 or more"
    seen, before = outputs.detach().clone(), targets.clone()
    value = _compute_value(found, seen, before)
    assert torch.equal(seen, outputs), (
        "the metric changes the outputs that it gets: compute with copies"
    )
    assert torch.equal(before, targets), (
        "the metric changes the targets that it gets: compute with copies"
    )
    order = torch.from_numpy(Rng(0).generator("testing.order").permutation(number))
    # A draw may be the identity; the reverse order never is.
    for other in (order, torch.arange(number).flip(0)):
        again = _compute_value(found, outputs.detach()[other], targets[other])
        # A sum in another order ends with other digits: float32 holds seven.
        same = math.isclose(again, value, rel_tol=1e-4, abs_tol=1e-6) or (
            math.isnan(again) and math.isnan(value)
        )
        assert same, f"the metric is {value:.6g}, and {again:.6g} with the samples in another order"
    # A client may have a single sample, or samples of one class.
    _compute_value(found, outputs.detach()[:1], targets[:1], "of a single sample")
    _compute_value(
        found, outputs.detach(), targets[:1].expand_as(targets).clone(), "of equal targets"
    )
    return value


def _compute_value(metric: Metric, outputs: Tensor, targets: Tensor, which: str = "") -> float:
    """Return the metric of a set, which is a number in its range, or NaN with a reason."""
    words = f"the metric {which}".strip()
    assert metric.function is not None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = metric.function(outputs, targets)
        except Exception as error:
            # On the given samples an error is the caller's to see; on unusual sets it breaks the
            # guarantee.
            if not which:
                raise
            raise AssertionError(
                f"{words} fails ({type(error).__name__}: {error}): a client may have such data; "
                "return NaN, and warn with coterie.functional.metrics.Undefined"
            ) from error
    if metric.each:
        shape = tuple(getattr(found, "shape", ()))
        advice = "take the mean over all other axes, and return it"
        assert found is not None, f"{words} returned None; expected one value a sample: {advice}"
        assert shape == (len(outputs),), (
            f"{words} returned shape {shape} for {len(outputs)} samples: {advice}"
        )
        found = found.double().mean()
    assert found is not None, f"{words} returned None: return the number"
    try:
        value = float(found)
    except (TypeError, ValueError, RuntimeError):
        what = repr(found)
        if hasattr(found, "shape"):
            what = f"shape {tuple(found.shape)}"
        raise AssertionError(
            f"{words} returned {what}; expected one number (or one a sample, with each=True)"
        ) from None
    if math.isnan(value):
        reasons = [one for one in said if issubclass(one.category, Undefined)]
        assert reasons, (
            f"{words} is NaN without a reason: warn with coterie.functional.metrics.Undefined"
        )
        return value
    # Rounding may carry a value just over the end of its range.
    slack, inside, ends = 1e-6 * max(1.0, abs(value)), True, []
    if metric.least is not None:
        inside = value >= metric.least - slack
        ends.append(f"{metric.least:g} or more")
    if metric.most is not None:
        inside = inside and value <= metric.most + slack
        ends.append(f"at most {metric.most:g}")
    assert inside, f"{words} is {value:.6g}; expected {' and '.join(ends)}, as it says itself"
    return value
