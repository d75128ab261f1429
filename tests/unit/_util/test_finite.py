"""Rows with a NaN or an infinity, and rows whose sum alone overflows."""

import torch

from coterie._util.finite import not_finite

LARGEST = torch.finfo(torch.float32).max


def test_rows_with_nan_or_infinity_are_found_and_an_overflowing_sum_is_none():
    rows = torch.tensor(
        [
            [1.0, 2.0],
            [float("nan"), 0.0],
            [0.0, float("inf")],
            [float("-inf"), float("inf")],
            [LARGEST, LARGEST],  # finite, though the sum is not
            [-LARGEST, -LARGEST],
        ]
    )
    assert not_finite(rows).tolist() == [False, True, True, True, False, False]
    assert not_finite(rows[:, :, None]).tolist() == [False, True, True, True, False, False]
    assert not_finite(rows[:, 1]).tolist() == [False, False, True, True, False, False]


def test_a_table_without_entries_has_none():
    assert not_finite(torch.zeros(3, 0)).tolist() == [False] * 3
