"""Whether methods were compared under equal conditions: bytes, participation, and tuning effort."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from coterie._util.mappings import drop_keys, map_values
from coterie.errors import DataError

ALIKE = 0.01
"""Two methods spend the same where they are apart by no more than this share of the larger."""
TRAINED = "trained_rounds"
"""The rounds of a trial of tuning with a budget: a share of the method's, which nobody tried."""
MOST_BYTES = 64_000_000
"""The largest file with the trials of a tuning: it is read whole, and a wrong file may be huge."""


def count_tried_settings(path: str | Path) -> dict[str, int]:
    """Return how many settings tuning tried for each method.

    Args:
        path: the trials that `coterie tune` wrote next to the study with the chosen values,
            `<study>-tuned.json`.

    Raises:
        DataError: when it is not such a file.
    """
    file = Path(path)
    wrong = f"{path} holds no trials; expected the .json that `coterie tune` wrote"
    try:
        # Before it is read: any file can be named here.
        if file.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{path} has more than {MOST_BYTES:,} bytes; expected the trials of a tuning"
            )
        trials = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(wrong) from error
    if not isinstance(trials, list):
        raise DataError(wrong)
    points: dict[str, set[str]] = {}
    for one in trials:
        if not isinstance(one, dict) or "label" not in one:
            raise DataError(wrong)
        # What is left of a trial is the setting; each seed tried it once.
        point = drop_keys(one, {"label", "seed", "metric", "value", TRAINED})
        points.setdefault(str(one["label"]), set()).add(json.dumps(point, sort_keys=True))
    return map_values(len, points)


def describe_unequal_conditions(
    spent: Iterable[Mapping[str, Any]],
    labels: Iterable[str],
    settings: Mapping[str, int] | None = None,
) -> str:
    """Describe in one line which conditions of the compared methods differ.

    Args:
        spent: what each method spent, as a summary has it.
        labels: the methods that are compared.
        settings: how many settings were tried for each method; None when that is not known.

    Example:
        >>> spent = [{"label": "A", "bytes": 2e6, "client_rounds": 9}]
        >>> spent += [{"label": "B", "bytes": 0, "client_rounds": 9}]
        >>> describe_unequal_conditions(spent, "AB")
        'Not equal: bytes of a client (A 2 MB, B 0 MB); --equal-bytes ranks at equal bytes.'
    """
    names = list(labels)
    sent, trained, seconds = {}, {}, {}
    for row in spent:
        if row["label"] in names:
            sent[row["label"]] = row["bytes"]
            trained[row["label"]] = row["client_rounds"]
            # Of nodes and of runs in virtual time.
            if "seconds" in row:
                seconds[row["label"]] = row["seconds"]
    # A method without trials was tried with none.
    tried = dict.fromkeys(names, 0)
    tried |= {label: count for label, count in (settings or {}).items() if label in tried}
    parts = []
    hint = ""
    if _are_unequal(sent):
        parts.append(_format_values("bytes of a client", sent, lambda v: f"{v / 1e6:.3g} MB"))
        hint = "; --equal-bytes ranks at equal bytes"
    if _are_unequal(seconds):
        parts.append(_format_values("time", seconds, lambda v: f"{v:.4g} s"))
        hint += "; --equal-time ranks at equal time"
    for what, values in (
        ("client-rounds of training", trained),
        ("settings tried in tuning", tried),
    ):
        if _are_unequal(values):
            parts.append(_format_values(what, values, lambda v: f"{v:g}"))
    return f"Not equal: {'; '.join(parts)}{hint}." if parts else ""


def _are_unequal(values: Mapping[str, float]) -> bool:
    if not values:
        return False
    largest = max(values.values())
    # All zero: not unequal.
    return largest - min(values.values()) > ALIKE * largest


def _format_values(
    what: str, values: Mapping[str, float], format_value: Callable[[float], str]
) -> str:
    listed = ", ".join(f"{label} {format_value(value)}" for label, value in values.items())
    return f"{what} ({listed})"
