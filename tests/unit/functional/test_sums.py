"""Sums of rows: right, and the same bits in any grouping."""

import pytest
import torch

from coterie.functional.sums import COLUMNS, sum_rows


@pytest.mark.parametrize("columns", [0, 1, 2, 3, 1000, COLUMNS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_summed(columns, dtype):
    values = torch.randint(-9, 10, (4, columns), dtype=dtype)
    kept = values.clone()
    found = sum_rows(values)
    assert found.dtype == torch.float64
    assert torch.equal(found, values.double().sum(1))  # whole numbers: exact in any order
    assert torch.equal(values, kept)


def test_other_rows_change_no_bit_of_a_row():
    """A plain sum fails this for some shapes: its order depends on the number of rows."""
    values = torch.randn(64, 3 * COLUMNS + 17, generator=torch.Generator().manual_seed(0))
    whole = sum_rows(values)
    for rows in (1, 2, 7, 33):
        parts = [sum_rows(part) for part in values.split(rows)]
        assert torch.equal(torch.cat(parts), whole)
