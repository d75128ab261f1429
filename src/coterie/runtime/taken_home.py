"""The check of models that are taken home: each predicts its test set again, in plain PyTorch."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coterie.data.federation import Federation, TestSet
from coterie.data.rows import read_inputs
from coterie.engine.task import Task
from coterie.errors import TranslationError
from coterie.functional.metrics import LOSS
from coterie.models.given import copy_deeply
from coterie.runtime._plain import PlainModule
from coterie.runtime.final_metrics import select_final_tests
from coterie.runtime.loop import Loop
from coterie.runtime.models import Models
from coterie.runtime.rounding import LIMITS, UNITS
from coterie.runtime.translation import shake_module

_ENTRIES = 1 << 24  # at most so many numbers of inputs are evaluated, beyond the first test set
_TRIALS = 3


def check_models_home(models: Models, loop: Loop) -> dict[str, Any]:
    """Compare what was reported of a few clients with what their exported modules score.

    Args:
        models: what is taken home and exported.
        loop: the run after its final evaluation.

    Returns:
        Which clients, the largest differences by metric, and lines about what was not compared.

    Raises:
        TranslationError: when a module scores something else than was reported.
    """
    task, spec = loop.task, models.spec
    if spec.missing:
        return {"lines": [f"models taken home are not compared: {spec.missing}"]}
    table = select_final_tests(loop.record.metrics)
    reported: dict[int, dict[str, float]] = {}
    for client, metric, value in zip(
        table["client"].tolist(), table["metric"].tolist(), table["value"].tolist(), strict=True
    ):
        reported.setdefault(client, {})[metric] = value
    found: dict[str, Any] = {"clients": [], "compared": {}, "lines": []}
    entries = 0
    for row in _choose_rows(loop):
        test = task.data.federation.tests[int(task.data.test_set_numbers[row])]
        entries += test.x.numel()
        if not len(test.x) or (found["clients"] and entries > _ENTRIES):
            continue
        if entries > _ENTRIES and not isinstance(test.x, Tensor):
            line = f"test set {test.name}: too large to be read from the disk at once"
            found["lines"] += [line] if line not in found["lines"] else []
            continue
        client = spec.ids[row]
        given = spec.names[row] if spec.names else client
        values = reported.get(client, {})
        line = _compare_scores(
            models.model(given), task, test, values, str(given), found["compared"]
        )
        found["clients"].append(given)
        if line and line not in found["lines"]:
            found["lines"].append(line)
    return found


def _choose_rows(loop: Loop) -> list[int]:
    """Return rows of clients that count in results: the first, the last, and one between."""
    # In a set, since of one or two clients these places are the same.
    rows = loop.counted.nonzero().flatten().tolist()
    return [rows[place] for place in sorted({0, len(rows) // 2, len(rows) - 1})] if rows else []


def _compare_scores(
    module: nn.Module,
    task: Task,
    test: TestSet,
    reported: Mapping[str, float],
    name: str,
    compared: dict[str, float],
) -> str:
    """Compare a client's scores with the reported ones; return a line where that cannot be."""
    if test.noise:
        return f"test set {test.name}: its inputs have noise, drawn again at every access"
    federation = task.data.federation
    # Its weights are the trained ones, rounded to the module's own type.
    types = {one.dtype for one in module.parameters() if one.is_floating_point()} - {torch.float64}
    plain = PlainModule.wrap(module, task)
    roundoff = plain.roundoff
    if types:
        single = types == {torch.float32} and plain.precision == "full"
        roundoff = torch.float32 if single else "bf16"
    if plain.is_random(
        federation, plain.inputs(federation, read_inputs(test.x[:16])), training=False
    ):
        return "outputs are random in evaluation: scores at home are others"
    scores = _score(plain, federation, test)
    # Rounding makes no number infinite that the type can hold: what became so was beyond its range.
    if types and not math.isfinite(scores[LOSS.name]) and _has_infinite_weights(module):
        return (
            f"the weights of client {name} are too large for the module's type "
            f"({', '.join(sorted(map(str, types)))}): its model diverged, and at home it has none"
        )
    if not math.isfinite(scores[LOSS.name]) and not math.isfinite(reported.get(LOSS.name, 0.0)):
        return f"the outputs of client {name} are not finite: its model diverged"
    for metric, value in scores.items():
        if metric not in reported:
            continue
        gap, given = abs(value - reported[metric]), reported[metric]
        # Relative to a large loss; near 0 the rounding of the outputs stays, and the limit too.
        limit = LIMITS[roundoff] * max(1.0, abs(value))
        if not gap <= limit:
            # What rounding does: the same module with weights off by some units of the last place.
            for seed in range(_TRIALS):
                plain.module = shake_module(copy_deeply(module), 4 * UNITS[roundoff], seed)
                again = _score(plain, federation, test)[metric]
                limit = max(limit, 8 * abs(again - value))
        if not gap <= limit:
            raise TranslationError(
                f"the model taken home of client {name} has {metric} {value:.6g} on its test set, "
                f"and {given:.6g} was reported (rounding explains {limit:.2g}); load it by `model` "
                "and compare its tensors, or set check = false to keep it as it is"
            )
        compared[metric] = max(compared.get(metric, 0.0), gap)
    return ""


def _has_infinite_weights(module: nn.Module) -> bool:
    return any(one.isinf().any() for one in module.parameters() if one.is_floating_point())


def _score(plain: PlainModule, federation: Federation, test: TestSet) -> dict[str, float]:
    """Return the loss and its metric over a test set."""
    x, y = plain.inputs(federation, read_inputs(test.x)), plain.targets(test.y)
    # In pieces: the activations of a whole test set may not fit into memory.
    values = plain.evaluate(federation, x, y, pieces=256)
    names = {"evaluation loss": LOSS.name, "evaluation score": plain.loss.metric or ""}
    return {names[name]: float(value) for name, value in values.items() if name in names}
