"""What a client fills in and scales by, beside scikit-learn's imputer and scaler."""

import json

import numpy as np
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from coterie.data.preparation import ColumnPreparation, Preparation


@pytest.mark.parametrize(
    ("impute", "strategy"),
    [("mean", "mean"), ("median", "median"), ("most-frequent", "most_frequent")],
)
@pytest.mark.parametrize("scale", [True, False])
def test_numbers_are_filled_and_scaled_as_scikit_learn_does(impute, strategy, scale):
    draw = np.random.default_rng(0)
    rows = np.round(draw.normal(50, 9, (40, 3)))
    rows[draw.random(rows.shape) < 0.2] = np.nan
    train, rest = rows[:25], rows[25:]
    steps = [SimpleImputer(strategy=strategy), *([StandardScaler()] if scale else [])]
    expected = make_pipeline(*steps).fit(train).transform(rest)
    columns = tuple(
        ColumnPreparation(f"c{place}", place, impute=impute, scale=scale) for place in range(3)
    )
    fitted = Preparation(columns).fit(torch.from_numpy(train))
    np.testing.assert_allclose(
        fitted(torch.from_numpy(rest)).numpy(), expected, rtol=1e-6, atol=1e-6
    )


def test_a_constant_column_is_centered_and_not_divided_by_zero():
    fitted = Preparation((ColumnPreparation("a", 0, scale=True),)).fit(torch.full((3, 1), 7.0))
    assert fitted(torch.tensor([[7.0], [9.0]])).tolist() == [[0.0], [2.0]]


def test_a_category_is_filled_with_the_most_frequent_or_the_named_one():
    """Three entries: two rows of the third category, one of the first, and one that is empty."""
    nan = float("nan")
    x = torch.tensor([[0.0, 0, 1], [0, 0, 1], [1, 0, 0], [nan, nan, nan]])
    usual = Preparation((ColumnPreparation("color", 0, 3, impute="most-frequent"),)).fit(x)
    assert usual(x[3:]).tolist() == [[0, 0, 1]]
    named = Preparation((ColumnPreparation("color", 0, 3, impute=1.0),)).fit(x)
    assert named(x[3:]).tolist() == [[0, 1, 0]]
    assert named(x[2:3]).tolist() == [[1, 0, 0]]


def test_codes_stay_whole_numbers():
    fitted = Preparation((ColumnPreparation("color", 0, impute="most-frequent"),), whole=True).fit(
        torch.tensor([[2.0], [2], [1]])
    )
    filled = fitted(torch.tensor([[float("nan")], [1.0]]))
    assert (filled.dtype, filled.tolist()) == (torch.int32, [[2], [1]])


def test_a_column_without_any_value_is_named_and_becomes_zero():
    nan = float("nan")
    fitted = Preparation(
        (ColumnPreparation("a", 0, impute="mean"), ColumnPreparation("b", 1, impute=3.0))
    ).fit(torch.full((2, 2), nan))
    assert fitted.empty == ("a",)
    assert fitted(torch.tensor([[nan, nan], [5.0, 6.0]])).tolist() == [[0, 3], [5, 6]]


@pytest.mark.parametrize("impute", ["median", 7.0])
def test_a_column_of_unknown_scale_is_0_whatever_is_there(impute):
    """No training row has it, and 262 next to numbers of about 1 would decide each prediction."""
    columns = (
        ColumnPreparation("age", 0, scale=True),
        ColumnPreparation("chol", 1, impute=impute, scale=True, indicated=True),
    )
    nan = float("nan")
    fitted = Preparation(columns).fit(torch.tensor([[1.0, nan], [3.0, nan]]))
    rows = torch.tensor([[3.0, 262.0], [1.0, nan]], dtype=torch.float64)
    assert fitted(rows).tolist() == [[1, 0], [-1, 0]]
    json.dumps(fitted.spread.tolist(), allow_nan=False)  # as `coterie export` writes it
