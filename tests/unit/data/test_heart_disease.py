"""The bundled federation of four hospitals, and FLamby's form of it."""

import csv
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from coterie import Split, from_table
from coterie.data import heart_disease
from coterie.data.build import DataConfig, build_federation
from coterie.data.datasets import load_dataset
from coterie.errors import ConfigError

HOSPITALS = ("cleveland", "hungary", "long-beach-va", "switzerland")


def raw() -> list[dict[str, str]]:
    with heart_disease.FILE.open("r", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_file_comes_with_its_credit():
    """What CC BY asks for: the authors, the licence, a link, and what was changed."""
    text = (files("coterie.data") / "bundled/LICENSE-heart_disease.txt").read_text("utf-8")
    for needed in (
        "Janosi",
        "Steinbrunn",
        "Pfisterer",
        "Detrano",
        "10.24432/C52P4X",
        "CC BY 4.0",
        "Changes:",
    ):
        assert needed in text
    assert len(raw()) == 920


def test_hospitals_have_their_patients_and_their_share_of_disease():
    """UCI's counts of patients and of those who are ill: 46, 36, 75 and 93 %."""
    rows = heart_disease.load_table()
    assert rows.groupby("hospital").size().to_dict() == dict(
        zip(HOSPITALS, (303, 294, 200, 123), strict=True)
    )
    ill = (rows["disease"] == "yes").groupby(rows["hospital"]).sum()
    assert [int(ill[name]) for name in HOSPITALS] == [139, 106, 149, 115]
    assert "num" not in rows, "it says who is ill"


def test_a_cholesterol_or_pressure_of_zero_was_not_measured():
    rows = heart_disease.load_table()
    zero = sum(row["chol"] == "0" for row in raw())
    empty = sum(row["chol"] == "" for row in raw())
    assert rows["chol"].isna().sum() == zero + empty == 172 + 30
    assert rows.loc[rows["hospital"] == "switzerland", "chol"].isna().all()
    assert rows["chol"].min() > 0
    assert rows["trestbps"].min() > 0


def test_the_dataset_is_a_table_like_ones_own():
    """`from_table` with the same options makes the same federation; clients are called by their hospitals."""
    bundled = build_federation(DataConfig("heart-disease"), 3)
    own = from_table(heart_disease.load_table(), **heart_disease.OPTIONS, split=Split(seed=3))
    assert torch.equal(bundled.x, own.x)
    assert bundled.client_names == HOSPITALS
    assert bundled.class_names == ("no", "yes")
    assert bundled.truth is None
    assert bundled.features == (32,)
    with pytest.raises(ConfigError, match="heart-disease has no options"):
        load_dataset("heart-disease", options={"path": "x"})


@pytest.mark.parametrize("fold", range(5))
def test_filling_and_scaling_know_the_own_training_rows_only(fold):
    """Worked anew from the file: age is standardized, and cholesterol filled, by the training rows of each hospital.

    Which rows those are is read off the ages and pressures of patients who have a combination of
    their own.
    """
    data = build_federation(DataConfig("heart-disease", folds=5), fold)
    place = data.feature_names.index
    for row, name in enumerate(HOSPITALS):
        own = heart_disease.load_table().query("hospital == @name").reset_index(drop=True)
        chosen = data.origin[row][data.split[row] == 0].numpy() - sum(
            (303, 294, 123, 200)[: order(name)]
        )
        train = own.iloc[chosen]
        age = train["age"].to_numpy(float)
        x = data.x[row][data.split[row] == 0]
        assert x[:, place("age")].numpy() == pytest.approx((age - age.mean()) / age.std(), abs=1e-5)
        filled = train["chol"].fillna(train["chol"].median()).fillna(0).to_numpy(float)
        spread = filled.std() or 1.0
        assert x[:, place("chol")].numpy() == pytest.approx(
            (filled - filled.mean()) / spread, abs=1e-5
        )
        assert x[:, place("chol is empty")].tolist() == train["chol"].isna().astype(float).tolist()
        test = (
            data.tests[int(data.test_of[row])].x[:, place("age")].double().numpy() * age.std()
            + age.mean()
        )
        assert np.abs(test - test.round()).max() < 1e-3, "test rows are scaled by the training rows"
        assert set(own["age"]) >= set(test.round().astype(int))


def order(name: str) -> int:
    """The place of a hospital in the file."""
    return ["cleveland", "hungary", "switzerland", "long-beach-va"].index(name)


def test_every_patient_is_tested_once_in_five_folds():
    """By age, pressure and heart rate, which the test rows still tell; and nobody is trained on and tested at once."""
    tested = {name: [] for name in HOSPITALS}
    for fold in range(5):
        data = build_federation(DataConfig("heart-disease", folds=5), 10 + fold)
        for row, name in enumerate(HOSPITALS):
            y = data.tests[row].y
            tested[name].append((len(y), int((y == 0).sum())))
            assert len(y) + int((data.split[row] >= 0).sum()) == (303, 294, 200, 123)[row]
    assert [sum(n for n, _ in tested[name]) for name in HOSPITALS] == [303, 294, 200, 123]
    assert [sum(well for _, well in tested[name]) for name in HOSPITALS] == [164, 188, 51, 8]
    assert {well for _, well in tested["switzerland"]} == {1, 2}, (
        "of eight, each fold has one or two"
    )


def test_flambys_split_has_its_counts():
    """Its README: train and test 199/104, 172/89, 30/16 and 85/45; 13 entries, scaled by the own training rows."""
    data = heart_disease.flamby()
    assert data.client_names == HOSPITALS
    assert data.count_samples("train").tolist() == [199, 172, 85, 30]
    assert [len(test.y) for test in data.tests] == [104, 89, 45, 16]
    assert data.count_samples("validation").sum() == 0
    assert data.features == (13,)
    for row in range(4):
        x = data.x[row][data.split[row] == 0]
        assert x.mean(0).abs().max() < 1e-5
        assert set(x.std(0).round(decimals=3).tolist()) <= {0.0, 1.0}


def test_flambys_split_is_that_of_its_code():
    """As its dataset module does it, from UCI's columns by number: the same rows in the same hospital's test set."""
    from sklearn.model_selection import train_test_split

    rows = pd.DataFrame(raw()).replace("", np.nan)
    rows = (
        rows[rows["hospital"] == "hungary"]
        .drop(columns=["hospital", "slope", "ca", "thal"])
        .dropna()
        .astype(float)
    )
    labels = (rows["num"] > 0).astype(int).to_numpy()
    train, test = train_test_split(
        np.arange(261),
        test_size=1 - 0.66,
        train_size=0.66,
        random_state=43,
        shuffle=True,
        stratify=labels,
    )
    ages = rows["age"].to_numpy()
    data = heart_disease.flamby()
    found = data.tests[1].x[:, 0].double().numpy() * ages[train].std(ddof=1) + ages[train].mean()
    assert sorted(found.round().astype(int)) == sorted(ages[test].astype(int))
    assert int(data.tests[1].y.sum()) == labels[test].sum()


def test_flambys_pooled_training_scales_by_all_training_rows():
    data = heart_disease.flamby("together")
    every = data.x[data.split == 0]
    assert every.mean(0).abs().max() < 1e-5
    assert [
        torch.equal(a.x, b.x) for a, b in zip(data.tests, heart_disease.flamby().tests, strict=True)
    ] == [True] * 4
    with pytest.raises(ConfigError, match="'own' or 'together'"):
        heart_disease.flamby("alone")


def test_disease_can_be_learned_from_the_entries():
    """scikit-learn's logistic regression on Cleveland's own training rows is right on four of five test patients."""
    data = build_federation(DataConfig("heart-disease", folds=5), 0)
    train = data.split[0] == 0
    model = LogisticRegression(max_iter=500).fit(data.x[0][train].numpy(), data.y[0][train].numpy())
    assert model.score(data.tests[0].x.numpy(), data.tests[0].y.numpy()) > 0.75
