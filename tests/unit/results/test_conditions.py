import json

import pytest

from coterie.errors import DataError
from coterie.results import conditions


def spent(**used):
    return [
        {"label": label, "bytes": sent, "client_rounds": rounds}
        for label, (sent, rounds) in used.items()
    ]


def test_what_is_alike_is_not_said():
    """Within one in a hundred; and only of the methods that are compared."""
    assert (
        conditions.describe_unequal_conditions(
            spent(A=(1000, 20), B=(1009, 20), C=(0, 5)), ["A", "B"]
        )
        == ""
    )
    assert conditions.describe_unequal_conditions([], ["A", "B"]) == ""
    assert (
        conditions.describe_unequal_conditions(
            spent(A=(0, 20), B=(0, 20)), ["A", "B"], {"A": 3, "B": 3}
        )
        == ""
    )


def test_what_differs_is_said_in_one_line():
    said = conditions.describe_unequal_conditions(
        spent(A=(1.5e6, 20), B=(3e6, 40)), ["A", "B"], {"A": 9}
    )
    assert said == (
        "Not equal: bytes of a client (A 1.5 MB, B 3 MB); client-rounds of training (A 20, B 40); settings tried in "
        "tuning (A 9, B 0); --equal-bytes ranks at equal bytes."
    )
    assert "bytes" not in conditions.describe_unequal_conditions(
        spent(A=(5, 20), B=(5, 40)), ["A", "B"]
    )


def test_unequal_times_are_named():
    """Within a hundredth they are equal, as bytes are."""
    rows = [{"label": "A", "bytes": 1, "client_rounds": 1, "seconds": 80.0}]
    rows.append({"label": "B", "bytes": 1, "client_rounds": 1, "seconds": 20.0})
    assert conditions.describe_unequal_conditions(rows, "AB") == (
        "Not equal: time (A 80 s, B 20 s); --equal-time ranks at equal time."
    )
    assert (
        conditions.describe_unequal_conditions([rows[0], {**rows[1], "seconds": 80.1}], "AB") == ""
    )


def test_settings_tried_are_counted_once_for_all_seeds(tmp_path):
    """Two learning rates over two seeds are two settings."""
    trials = [
        {"label": label, "seed": seed, "metric": "accuracy", "value": 0.5, "lr": lr}
        for label, rates in {"A": (0.1, 0.2), "B": (0.1,)}.items()
        for lr in rates
        for seed in (0, 1)
    ]
    (tmp_path / "x-tuned.json").write_text(json.dumps(trials))
    assert conditions.count_tried_settings(tmp_path / "x-tuned.json") == {"A": 2, "B": 1}


@pytest.mark.parametrize("text", ["{", "{}", '["A"]', '[{"lr": 1}]', None])
def test_a_file_without_trials_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match="holds no trials"):
        conditions.count_tried_settings(path)
