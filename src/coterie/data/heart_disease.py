"""Heart disease in four hospitals: 920 bundled patients of 1988, and FLamby's protocol.

Whether a coronary vessel is narrowed by more than half, from what is known of a patient. Cleveland
(303 patients, 46 % ill), Hungary (Budapest, 294, 36 %), Switzerland (Zurich and Basel, 123, 93 %)
and Long Beach VA (200, 75 %) differ in how many are ill, in who comes, and in what was measured.
Credit and licence: bundled/LICENSE-heart_disease.txt.
"""

from importlib.resources import files
from typing import Any

import torch

from coterie._util.settings import parse_settings
from coterie.data.federation import PADDING, TRAIN, Federation, TestSet
from coterie.data.source import Source
from coterie.data.tables import TableOptions, read_table
from coterie.errors import require

FILE = files("coterie.data") / "bundled/heart_disease.csv"
"""The file as published."""

UNKNOWN = "unknown"
"""The category of values that were not recorded."""

OPTIONS: dict[str, Any] = {
    "target": "disease",
    "client": "hospital",
    "class_names": ["no", "yes"],
    "categories": {
        "cp": [1, 2, 3, 4],
        "restecg": [0, 1, 2, UNKNOWN],
        "slope": [1, 2, 3, UNKNOWN],
        "thal": [3, 6, 7, UNKNOWN],
    },
    "impute": {
        **dict.fromkeys(("trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "ca"), "median"),
        **dict.fromkeys(("restecg", "slope", "thal"), UNKNOWN),
    },
    "indicate": ["trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "ca"],
    "scale": "standard",
}
"""The options of `load_table`'s columns: 32 entries of an input."""


def load_table() -> Any:
    """Load the patients as a table of pandas, with the target `disease`, "no" or "yes".

    Where blood pressure or cholesterol is 0 it was not measured: the entry is empty.

    Example:
        >>> load_table().groupby("hospital").size().to_dict()
        {'cleveland': 303, 'hungary': 294, 'long-beach-va': 200, 'switzerland': 123}
    """
    rows = _load_rows()
    # `num` is 0 where no vessel is narrowed by more than half, and 1 to 4 where one is.
    rows["disease"] = (rows.pop("num") > 0).map({False: "no", True: "yes"})
    # 0 stands for "not measured" in the published file.
    for name in ("trestbps", "chol"):
        rows[name] = rows[name].mask(rows[name] == 0)
    return rows


def load_source() -> Source:
    """Return the dataset "heart-disease": every patient, at the client of the hospital.

    A number that is missing is filled with the median of the client's own training rows, and a
    further entry says that it was; a missing category is one of its own. Numbers are standardized
    by the client's own training rows.
    """
    return read_table(
        load_table(), parse_settings(TableOptions, OPTIONS, "heart-disease"), name="heart-disease"
    )


def flamby(scale: str = "own") -> Federation:
    """Return FLamby's Fed-Heart-Disease: 740 patients, 10 columns, always the same split.

    Columns slope, ca and thal are left out, and then every patient with a missing value; a
    cholesterol of 0 counts as a value. Chest pain and electrocardiogram become entries less the
    first category, which makes 13. Each hospital holds out 34 % for testing, in the shares of ill
    and healthy where there are more than two of both, and standardizes by its own training rows.
    There are no validation rows.

    Args:
        scale: "own", as FLamby's federated and local training; "together": training rows are
            standardized by those of all hospitals, and test rows still by those of their own, as in
            its pooled training and the tests by hospital that it reports of it.

    References:
        Ogier du Terrail et al., FLamby: datasets and benchmarks for cross-silo federated learning
        in realistic healthcare settings, 2022, https://arxiv.org/abs/2210.04620
    """
    import pandas as pd

    require(scale in ("own", "together"), "scale", scale, "'own' or 'together'")
    from sklearn.model_selection import train_test_split

    # A cholesterol of 0 stays, unlike in `load_table`: FLamby takes it for a value.
    rows = _load_rows().drop(columns=["slope", "ca", "thal"]).dropna()
    wide: pd.DataFrame = pd.get_dummies(
        rows.astype({"restecg": int}), columns=["cp", "restecg"], drop_first=True, dtype=float
    )
    names = sorted(wide["hospital"].unique())
    entries = wide.columns.drop(["hospital", "num"]).tolist()
    parts, raw = [], []
    for name in names:
        own = wide.loc[wide["hospital"] == name]
        x = torch.from_numpy(own[entries].to_numpy("float32"))
        y = torch.from_numpy((own["num"] > 0).to_numpy("int64"))
        strata = y.numpy() if int(y.bincount(minlength=2).min()) > 2 else None
        halves = train_test_split(  # with FLamby's arguments, for the same split
            range(len(own)),
            test_size=1.0 - 0.66,
            train_size=0.66,
            random_state=43,
            shuffle=True,
            stratify=strata,
        )
        train, test = map(sorted, halves)
        raw.append(x[train])
        # A column that is constant in the training rows must not divide by 0.
        x = (x - x[train].mean(0)) / (x[train].std(0) + 1e-9)
        parts.append((x[train], y[train], TestSet(x[test], y[test], name)))
    if scale == "together":
        rows = torch.cat(raw)
        for place, (x, (_, y, test)) in enumerate(zip(raw, parts, strict=True)):
            # Test rows stay as they were scaled above, by their own hospital.
            parts[place] = ((x - rows.mean(0)) / (rows.std(0) + 1e-9), y, test)
    width = max(len(y) for _, y, _ in parts)
    x = torch.zeros(len(parts), width, len(entries))
    y = torch.zeros(len(parts), width, dtype=torch.int64)
    split = torch.full((len(parts), width), PADDING)
    for row, (own_x, own_y, _) in enumerate(parts):
        x[row, : len(own_x)], y[row, : len(own_y)], split[row, : len(own_y)] = own_x, own_y, TRAIN
    ids = torch.arange(len(parts))
    return Federation(
        x,
        y,
        split,
        tuple(test for *_, test in parts),
        ids,
        ids,
        len(parts),
        classes=2,
        name="flamby-heart-disease",
        class_names=("no", "yes"),
        client_names=tuple(names),
        feature_names=tuple(entries),
    ).validate()


def _load_rows() -> Any:
    import pandas as pd

    with FILE.open("rb") as file:
        return pd.read_csv(file)
