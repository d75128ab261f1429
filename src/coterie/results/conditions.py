"""Whether methods were compared under equal conditions: bytes, participation, and settings tried in tuning."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from coterie.errors import DataError

ALIKE = 0.01
"""Two methods spend the same where they are apart by no more than this share of the larger."""
MOST_BYTES = 64_000_000
"""Of a file with the trials of a tuning."""


def count_tried_settings(path: str | Path) -> dict[str, int]:
    """Return how many settings tuning tried for each method.

    Args:
        path: the trials that `coterie tune` wrote beside the study with the chosen values,
            `<study>-tuned.json`.

    Raises:
        DataError: when it is not such a file.
    """
    file, wrong = (
        Path(path),
        f"{path} holds no trials; expected the .json that `coterie tune` wrote",
    )
    try:
        if file.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{path} has more than {MOST_BYTES:,} bytes; expected the trials of a tuning"
            )
        trials = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(wrong) from error
    if not isinstance(trials, list) or not all(
        isinstance(one, dict) and "label" in one for one in trials
    ):
        raise DataError(wrong)
    points: dict[str, set[str]] = {}
    for one in trials:
        point = {
            key: value
            for key, value in one.items()
            if key not in ("label", "seed", "metric", "value")
        }
        points.setdefault(str(one["label"]), set()).add(json.dumps(point, sort_keys=True))
    return {label: len(found) for label, found in points.items()}


def describe_unequal_conditions(
    spent: Iterable[Mapping[str, Any]],
    labels: Iterable[str],
    settings: Mapping[str, int] | None = None,
) -> str:
    """Say in a line what the methods that are compared did not have alike; empty where all was, or nothing is known.

    Args:
        spent: what each method spent, as a summary has it.
        labels: the methods that are compared.
        settings: how many settings were tried for each; None where nobody says.

    Example:
        >>> unequal([{"label": "A", "bytes": 2e6, "client_rounds": 9}, {"label": "B", "bytes": 0, "client_rounds": 9}], "AB")
        'Not equal: bytes of a client (A 2 MB, B 0 MB); --equal-bytes ranks at equal bytes.'
    """
    names = list(labels)
    rows = {row["label"]: row for row in spent if row["label"] in names}
    parts = []
    kinds: tuple[tuple[str, dict[str, float], Callable[[float], str]], ...] = (
        (
            "bytes of a client",
            {label: row["bytes"] for label, row in rows.items()},
            lambda v: f"{v / 1e6:.3g} MB",
        ),
        (
            "client-rounds of training",
            {label: row["client_rounds"] for label, row in rows.items()},
            lambda v: f"{v:g}",
        ),
        (
            "settings tried in tuning",
            {label: (settings or {}).get(label, 0) for label in names},
            lambda v: f"{v:g}",
        ),
    )
    for what, values, shown in kinds:
        if values and max(values.values()) - min(values.values()) > ALIKE * max(values.values()):
            parts.append(
                f"{what} ({', '.join(f'{label} {shown(value)}' for label, value in values.items())})"
            )
    if not parts:
        return ""
    hint = "; --equal-bytes ranks at equal bytes" if parts[0].startswith("bytes") else ""
    return f"Not equal: {'; '.join(parts)}{hint}."
