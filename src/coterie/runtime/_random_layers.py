"""The comparison of modules that draw random numbers: by means over draws, not entry by entry.

One part of the check of the translation: the two sides draw from streams of their own, so that no
draw of one is a draw of the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie._util.mappings import map_values
from coterie.data.rows import read_inputs
from coterie.errors import ModelError, TranslationError
from coterie.runtime._given_data import strip_federation
from coterie.runtime._plain import PlainModule, Values
from coterie.runtime._trained import ADVICE, MANY_PARAMS, TrainedSide

_ENTRIES = 1024  # about as many of a gradient show how far draws are from each other


def require_repeatable(ours: TrainedSide, rows: Tensor, *, training: bool) -> None:
    """Refuse a module whose draws, or whose memory, the seed does not decide.

    Raises:
        ModelError: when the same pass twice, with the same keys, has another loss.
    """
    run = ours.train if training else ours.evaluate
    name = "training loss" if training else "evaluation loss"
    first, second = _stack_values(run(rows), name), _stack_values(run(rows), name)
    if not torch.allclose(first, second, equal_nan=True):
        raise ModelError(
            f"the {name} is another when the same pass is repeated: the module draws random "
            "numbers that PyTorch does not make (numpy's, Python's), or keeps something outside "
            "its parameters and buffers, so that no seed repeats a run; draw with torch, keep it "
            "in a buffer, or set check = false"
        )


def compare_random_loss(plain: PlainModule, ours: TrainedSide, rows: Tensor, limit: float) -> None:
    """Compare the loss in evaluation, where outputs are random, with that of some draws.

    Raises:
        TranslationError: when it is too far from their mean.
    """
    x, y, found = ours.inputs()[0], ours.targets()[0], ours.evaluate(rows)[0]
    plain.load(ours.task.layout, rows[0])
    name = "evaluation loss"
    # The deviation of sixteen draws is known to a fifth.
    draws = torch.stack(
        [plain.evaluate(ours.federation, x, y, seed)[name] for seed in range(16)]
    ).double()
    gap = abs(float(found[name]) - float(draws.mean()))
    if not gap <= 8 * float(draws.std()) + limit * max(1.0, float(draws.abs().max())):
        raise TranslationError(
            f"{name} is {float(found[name]):.4g}, and random in plain PyTorch: "
            f"{float(draws.mean()):.4g} +- {float(draws.std()):.2g}: {ADVICE}"
        )


def compare_draws(
    plain: PlainModule, ours: TrainedSide, row: Tensor, limit: float, *, slow: bool
) -> int:
    """Compare a training step whose layers are random, by means over draws.

    Of the loss, of gradients along those of evaluation, of buffers, and of how far each draw is
    from the mean of its side, which differs between shares of dropout. A mean that is 5
    standard errors away, which 1 of 50,000 is by chance, is measured again with more draws, of
    which 1 of 10^8 is 6 away.

    Returns:
        The number of draws of each side.

    Raises:
        TranslationError: when a mean is too far away.
    """
    federation, layout = ours.federation, ours.task.layout
    x, y = ours.inputs()[0], ours.targets()[0]
    plain.load(layout, row)
    toward = plain.train(federation, x, y, mode=False)
    # Each draw is a step: of slow and of large modules there are fewer, of fewer samples.
    slow = slow or layout.size > MANY_PARAMS >> 6
    few = max(2, len(x) // 8) if slow else len(x)
    own = read_inputs(federation.x)
    federation = strip_federation(federation, own[:1, :few], federation.y[:1, :few])
    number, gap, count = 12 if slow else 32, None, 0
    for attempt, (count, errors) in enumerate(((number, 5.0), (4 * number, 6.0))):
        # Seeds 0 and 1 have shown that the module is random; attempts share no draw.
        seeds = range(2 + 1000 * attempt, 2 + 1000 * attempt + count)
        mine, theirs = list[Values](), list[Values]()
        for seed in seeds:
            theirs.append(_summarize(plain.train(federation, x[:few], y[:few], seed), toward))
        # As many copies at once as have the numbers of one large model.
        size = max(1, min(count, MANY_PARAMS // layout.size))
        for start in range(0, count, size):
            many = min(size, count - start)
            copies = strip_federation(
                federation,
                own[:1, :few].expand(many, -1, *own.shape[2:]),
                federation.y.expand(many, *federation.y.shape[1:]),
            )
            # Each copy is a client of its own, and each attempt a round.
            rng = ours.rng.at_round(seeds[start])
            side = TrainedSide.build(ours.task, copies, rng)
            for values in side.train(row.repeat(many, 1)):
                mine.append(_summarize(values, toward))
        gap = _find_distant_mean(mine, theirs, errors, limit)
        if gap is None:
            return count
    raise TranslationError(
        f"{gap}, over {count} draws of the random layers; engine {ours.task.engine.name}: {ADVICE}"
    )


def _summarize(values: Values, toward: Values) -> Values:
    """Return what is compared of a draw: loss, gradients along others and in part, buffers."""
    out = {"training loss": values["training loss"].double()[None]}
    for name, value in values.items():
        if name.startswith("gradient"):
            # All entries as one number, in whose mean a bias of many small parts adds up; and some
            # entries alone, whose variance shows draws that are too alike.
            flat, along = value.flatten(), toward[name].flatten()
            out[name] = (flat.dot(along) / along.norm().clamp(min=1e-30)).double()[None]
            out[f"{name}: some entries"] = flat[:: max(1, len(flat) // _ENTRIES)].double()
        elif name.startswith("buffer"):
            out[name] = value.double().mean()[None]
    return map_values(Tensor.cpu, out)


def _stack_values(draws: Sequence[Values], name: str) -> Tensor:
    """Return one quantity of several draws or models, a row for each."""
    return torch.stack([one[name] for one in draws])


def _find_distant_mean(
    ours: Sequence[Values], plain: Sequence[Values], errors: float, limit: float
) -> str | None:
    """Return what differs in the mean by more than some standard errors; None for nothing."""
    slopes = []
    for values in plain:
        for name, value in values.items():
            if "gradient" in name:
                slopes.append(float(value.abs().max()))
    for name in plain[0]:
        both = [_stack_values(ours, name), _stack_values(plain, name)]
        # Squares of the distance from the mean of a side; their mean is its variance.
        squares = [(one - one.mean(0)).square().sum(1) * len(one) / (len(one) - 1) for one in both]
        means = [] if "entries" in name else [one[:, 0] for one in both]
        # The gradient of a bias before a normalization is rounding alone, see `find_gaps`.
        least = 0.1 * max(slopes, default=0.0) if "gradient" in name else 0.0
        floor = 10 * limit * max(least, *(float(one.abs().max()) for one in both))
        for what, (a, b), least in (
            ("", means or squares, floor), (" of its variance", squares, floor**2),
        ):  # fmt: skip
            error = float((a.var() / len(a) + b.var() / len(b)).sqrt())
            if not abs(float(a.mean() - b.mean())) <= errors * error + least:
                return (
                    f"{name}: the mean{what} is {float(a.mean()):.4g}, and {float(b.mean()):.4g} "
                    "in plain "
                    f"PyTorch ({errors:g} standard errors are {errors * error:.2g})"
                )
    return None
