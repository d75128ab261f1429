"""Tables of pandas, polars and arrow, and files: what becomes of each kind of column."""

import datetime
import re
import warnings
from collections import Counter
from dataclasses import astuple
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from coterie import Split, from_table
from coterie._util.settings import parse_settings
from coterie.data.federation import parse_columns
from coterie.data.inputs import InputForm
from coterie.data.schema import TableSchema
from coterie.data.source import InputPart
from coterie.data.tables import TableOptions, read_inputs, read_table
from coterie.errors import ConfigError, DataError

NAN = float("nan")


def patients(rows: int = 12) -> pd.DataFrame:
    """Three hospitals in turn; ages from 0, and a color that repeats every two rows."""
    place = np.arange(rows)
    return pd.DataFrame(
        {
            "age": place.astype(float),
            "color": np.where(place % 2 == 0, "red", "blue"),
            "smokes": place % 3 == 0,
            "site": np.array(["Zürich", "Åre", "東京"])[place % 3],
            "ill": np.where(place % 4 == 0, "yes", "no"),
        }
    )


def ages(federation, client: int) -> dict[str, list[float]]:
    """The first entries of a client's training, validation and test rows."""
    own = {
        split: federation.x[client][federation.split[client] == number][:, 0]
        for split, number in SPLIT.items()
    }
    return {name: values.tolist() for name, values in own.items()} | {
        "test": federation.tests[int(federation.test_of[client])].x[:, 0].tolist()
    }


SPLIT = {"train": 0, "validation": 1}


@pytest.mark.parametrize("form", ["pandas", "polars", "arrow", "columns", "csv", "parquet"])
def test_every_kind_of_table_gives_the_same_federation(form, tmp_path):
    table = patients()
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_parquet(tmp_path / "t.parquet")
    given = {
        "pandas": table.set_index(table.index + 5),
        "polars": pl.from_pandas(table),
        "arrow": pa.Table.from_pandas(table),
        "columns": {name: table[name].to_numpy() for name in table},
        "csv": tmp_path / "t.csv",
        "parquet": str(tmp_path / "t.parquet"),
    }[form]
    made = from_table(given, target="ill", client="site")
    assert made.client_names == ("Zürich", "Åre", "東京")
    assert made.class_names == ("no", "yes")
    assert made.feature_names == ("age", "color=blue", "color=red", "smokes")
    assert [test.name for test in made.tests] == list(made.client_names)
    assert (
        made.compute_fingerprint()
        == from_table(table, target="ill", client="site").compute_fingerprint()
    )
    assert sorted(age for own in ages(made, 1).values() for age in own) == [1, 4, 7, 10]
    for row in made.x[made.split >= 0].tolist():
        age = int(row[0])
        assert row[1:] == [age % 2, 1 - age % 2, float(age % 3 == 0)]


def as_type(values: list, kind: str) -> pa.Array:
    """Text as a type of arrow; "dictionary of ..." makes categories of it."""
    name = kind.removeprefix("dictionary of ")
    made = pa.array(values, getattr(pa, name)())
    if name == kind:
        return made
    words = sorted({value for value in values if value is not None})
    codes = [None if value is None else words.index(value) for value in values]
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), pa.array(words, made.type))


TEXT_TYPES = ["string", "large_string", "string_view"]


TEXT_CASES = [
    (kind, form)
    for kind in (*TEXT_TYPES, *[f"dictionary of {name}" for name in TEXT_TYPES])
    for form in ("arrow", "parquet")
    # Arrow writes no such column to parquet.
    if (kind, form) != ("dictionary of string_view", "parquet")
]


@pytest.mark.parametrize(("kind", "form"), TEXT_CASES)
def test_every_type_of_text_is_read_alike(kind, form, tmp_path):
    """Also where an entry is empty, and an empty text is a category of its own."""
    rows = [
        (["red", "", "blue"][place % 3], f"{place % 2}", "ab"[place // 10]) for place in range(20)
    ]
    color, ill, site = map(list, zip(*rows, strict=True))
    color[3] = color[13] = None
    parts = [("train", "test")[place % 4 == 0] for place in range(20)]
    columns = {"color": color, "ill": ill, "site": site, "part": parts}
    made = pa.table({name: as_type(values, kind) for name, values in columns.items()})
    # Of two chunks, the second of which starts in the middle of its memory.
    made = pa.concat_tables([made.slice(0, 7), made.slice(7)])
    if form == "parquet":
        pq.write_table(made, tmp_path / "t.parquet")
        made = tmp_path / "t.parquet"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "column 'color' has '' ")
        federation = from_table(
            made, target="ill", client="site", split_column="part", impute="most-frequent"
        )
    assert federation.client_names == ("a", "b")
    assert federation.class_names == ("0", "1")
    assert federation.feature_names == ("color=", "color=blue", "color=red")
    for client in range(2):
        held = federation.tests[int(federation.test_of[client])]
        pools = federation.x[client][federation.split[client] >= 0], held.x
        for part, entries in zip(("train", "test"), pools, strict=True):
            mine = [place for place in range(20) if place // 10 == client and parts[place] == part]
            words = [color[place] for place in mine]
            known = Counter(
                (word == "", word == "blue", word == "red") for word in words if word is not None
            )
            found = Counter(map(tuple, entries.tolist()))
            # What is more than the known entries fills the empty ones.
            assert known <= found
            assert (found - known).total() == words.count(None)
            assert all(sum(row) == 1 for row in entries.tolist())


@pytest.mark.parametrize("packed", [False, True])
def test_categories_that_are_decimals_are_stored_and_known_again_as_other_numbers(packed, tmp_path):
    """1.50 is 1.5 later, and an id of 21 digits keeps them."""
    large = 10**20 + 1
    values = [Decimal("1.50"), Decimal("2.00"), Decimal(large)]
    column = pa.array([values[n % 3] for n in range(12)], pa.decimal128(38, 2))
    if packed:
        column = column.dictionary_encode()
    table = pa.Table.from_pandas(patients())
    table = table.set_column(0, "age", column)
    made = from_table(
        table, target="ill", client="site", features=["age"], encode={"age": "one-hot"}
    )
    assert made.feature_names == ("age=1.5", "age=2", f"age={large}")
    schema = TableSchema.from_federation(made)
    assert schema is not None
    schema.save(tmp_path / "table.json")
    assert TableSchema.load(tmp_path / "table.json").columns == schema.columns
    later = read_inputs({"age": [2.0, 1.5]}, made.table)
    assert later.tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()])
def test_an_ordered_dictionary_of_any_text_keeps_its_order_and_all_of_its_categories(kind):
    words = pa.array(["low", "high", "never"], kind)
    color = pa.DictionaryArray.from_arrays(pa.array([1, 0] * 6), words, ordered=True)
    table = pa.Table.from_pandas(patients()).set_column(1, "color", color)
    made = from_table(table, target="ill", client="site", features=["color"])
    assert made.feature_names == ("color=low", "color=high", "color=never")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pa.array([b"x", b"y"] * 6), "holds bytes .binary.; decode them to text first"),
        (pa.array([b"x", b"y"] * 6, pa.large_binary()), "holds bytes .large_binary."),
        (pa.array([b"x", b"y"] * 6, pa.binary_view()), "holds bytes .binary_view."),
        (pa.array([b"x", b"y"] * 6, pa.binary(1)), "holds bytes .fixed_size_binary.1.."),
        (pa.array([b"x", b"y"] * 6).dictionary_encode(), "holds bytes .binary."),
        (pa.array([datetime.date(2026, 1, 1 + n % 2) for n in range(12)]).dictionary_encode(), "dates or times .date32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["color", "ill"])
def test_categories_are_text_or_numbers(name, values, message):
    """Others would be a name such as "b'x'", and no schema could store them."""
    table = pa.Table.from_pandas(patients())
    table = table.set_column(table.column_names.index(name), name, values)
    with pytest.raises(
        DataError, match=f"column '{name}' {message}|column '{name}' holds {message}"
    ):
        from_table(table, target="ill", client="site")


def test_codes_beside_numbers_are_an_input_of_two_tensors():
    made = from_table(patients(), target="ill", client="site", encode="codes")
    assert made.parts == (InputPart("", (2,)), InputPart("", (1,), whole=True))
    assert made.feature_names == ("age", "smokes", "color")
    # blue is 0, red 1
    assert all(int(row[2]) == 1 - int(row[0]) % 2 for row in made.x[made.split >= 0].tolist())
    alone = from_table(
        patients(), target="ill", client="site", features=["color"], encode={"color": "codes"}
    )
    assert (alone.x.dtype, alone.parts, alone.features) == (torch.int32, (), (1,))
    mixed = from_table(
        patients(), target="ill", client="site", encode={"smokes": "one-hot", "color": "codes"}
    )
    assert mixed.feature_names == ("age", "smokes=False", "smokes=True", "color")


def test_categories_are_those_of_the_whole_table_or_the_given_ones_in_their_order():
    table = patients()
    table["color"] = pd.Categorical(table["color"], ["red", "green", "blue"], ordered=True)
    assert from_table(table, target="ill", client="site").feature_names[1:4] == (
        "color=red", "color=green", "color=blue",
    )  # fmt: skip
    held = patients(4).assign(color="white").drop(columns="site")
    with pytest.warns(
        UserWarning, match="'color' is 'white' in the test table alone: no client tra"
    ):
        made = from_table(patients(), target="ill", client="site", test=held)
    assert "color=white" in made.feature_names
    said = from_table(
        patients(), target="ill", client="site", categories={"color": ["white", "red", "blue"]}
    )
    assert said.feature_names[1] == "color=white"
    with pytest.raises(
        DataError,
        match=r"column 'color' is 'blue' in row 1, of client 'Åre'; expected one of .*: red",
    ):
        from_table(patients(), target="ill", client="site", categories={"color": ["red"]})


def test_whole_numbers_of_a_column_can_be_categories():
    table = pd.DataFrame({"day": [10, 2, 10, 2] * 3, "y": np.arange(12) / 4, "c": [0] * 12})
    made = from_table(table, target="y", client="c", encode={"day": "one-hot"})
    assert made.feature_names == ("day=2", "day=10")


@pytest.mark.parametrize(
    ("target", "values", "kind", "classes"),
    [
        ("y", {"y": [0, 2] * 6}, torch.int64, 2),
        ("y", {"y": [True, False] * 6}, torch.int64, 2),
        ("y", {"y": [0.5, 2.0, 3.0] * 4}, torch.float32, 0),
        (["y", "z"], {"y": [0.5, 2.0] * 6, "z": [1, 2] * 6}, torch.float32, 0),
        (["y", "z"], {"y": [True, False] * 6, "z": [1, 0] * 6}, torch.int64, 0),
    ],
)
def test_targets_are_classes_or_numbers(target, values, kind, classes):
    made = from_table(
        pd.DataFrame({"a": range(12), "c": ["x"] * 12, **values}), target=target, client="c"
    )
    assert (made.y.dtype, made.classes, made.y.shape[2:]) == (
        kind,
        classes,
        () if target == "y" else (2,),
    )


def test_whole_numbers_can_be_a_regression():
    table = pd.DataFrame({"a": range(24), "c": ["x"] * 24, "price": range(0, 240_000, 10_000)})
    with pytest.raises(
        DataError, match=r"24 different whole numbers, from 0 to 230,000: .*classes = 0"
    ):
        from_table(table, target="price", client="c")
    assert from_table(table, target="price", client="c", classes=0).y.dtype == torch.float32


def test_each_client_fills_and_scales_by_its_own_training_rows_alone():
    """Validation and test rows count for nothing: the mean and deviation are those of the training rows as drawn."""
    table = pd.DataFrame(
        {"age": np.arange(60.0), "site": ["a"] * 40 + ["b"] * 20, "y": np.arange(60) / 3}
    )
    plain = from_table(table, target="y", client="site")
    table.loc[[3, 47], "age"] = NAN
    made = from_table(table, target="y", client="site", impute="mean", scale="standard")
    for client in (0, 1):
        raw, found = ages(plain, client), ages(made, client)
        known = [age for age in raw["train"] if age not in (3, 47)]
        filled = [age if age in known else np.mean(known) for age in raw["train"]]
        for split in ("train", "validation", "test"):
            values = [np.mean(known) if age in (3, 47) else age for age in raw[split]]
            expected = (np.array(values) - np.mean(filled)) / np.std(filled)
            np.testing.assert_allclose(found[split], expected, rtol=1e-5, atol=1e-6)


def test_a_test_table_with_the_clients_column_says_that_it_is_one_set_for_all():
    with pytest.warns(UserWarning, match=r"'site' of the test table is not used: .* on all 4 rows"):
        made = from_table(patients(), target="ill", client="site", test=patients(4))
    assert {len(test.y) for test in made.tests} == {4}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_table(patients(), target="ill", client="site", test=patients(4).drop(columns="site"))


def test_a_shared_test_set_is_prepared_for_each_client_by_its_own_rows():
    table = pd.DataFrame(
        {"age": [10.0] * 10 + [30.0] * 10, "site": ["a"] * 10 + ["b"] * 10, "y": np.arange(20) / 3}
    )
    held = pd.DataFrame({"age": [NAN, 20.0], "y": [0.0, 1.0]})
    made = from_table(table, target="y", client="site", impute="median", test=held)
    assert [test.x.tolist() for test in made.tests] == [[[10.0], [20.0]], [[30.0], [20.0]]]
    assert [test.name for test in made.tests] == ["a", "b"]
    plain = from_table(table, target="y", client="site", test=held.assign(age=[1.0, 2.0]))
    assert len(plain.tests) == 1


@pytest.mark.parametrize(
    ("impute", "expected"), [("most-frequent", "red"), ("mean", "red"), ({"color": "blue"}, "blue")]
)
@pytest.mark.parametrize("encode", ["one-hot", "codes"])
def test_an_empty_category_is_filled_with_the_most_frequent_or_the_named_one(
    impute, expected, encode
):
    table = pd.DataFrame(
        {
            "color": ["red", "red", "blue", "red"] * 5,
            "site": "a",
            "y": np.arange(20) / 3,
            "n": range(20),
        }
    )
    table.loc[7, "color"] = None
    made = from_table(table, target="y", client="site", impute=impute, encode=encode)
    own = torch.cat([made.x[0][made.split[0] >= 0], made.tests[0].x])
    number = made.feature_names.index("n")
    entries = own[own[:, number] == 7][0].tolist()
    if encode == "codes":
        assert entries[made.feature_names.index("color")] == (expected == "red")
    else:
        assert entries[made.feature_names.index(f"color={expected}")] == 1


def test_a_client_that_never_saw_a_column_fills_it_with_zero_and_is_named():
    table = pd.DataFrame(
        {"age": [NAN] * 10 + [30.0] * 10, "site": ["a"] * 10 + ["b"] * 10, "y": np.arange(20) / 3}
    )
    with pytest.warns(UserWarning, match="1 of 2 clients .* client 'a', column 'age'.*becomes 0"):
        made = from_table(table, target="y", client="site", impute="mean")
    assert set(made.x[0].flatten().tolist()) == {0.0}


@pytest.mark.parametrize("impute", ["mean", {"age": "mean", "color": "blue"}])
def test_a_column_that_was_full_is_filled_later_as_impute_says(impute):
    """Training does not change; each client fills with the mean age of its own training rows."""
    made = from_table(patients(30), target="ill", client="site", impute=impute)
    plain = from_table(patients(30), target="ill", client="site")
    assert torch.equal(made.x, plain.x)
    later = pd.DataFrame({"age": [NAN, 4.0], "color": ["blue", None], "smokes": [True, False]})
    form = InputForm.from_federation(made)
    for client in range(3):
        train = plain.x[client][plain.split[client] == 0]
        blue = int(train[:, 1].mean() >= 0.5) if impute == "mean" else 1
        found = form.prepare_inputs(later, made.fitted[client])
        mean = train[:, 0].double().mean().item()
        assert found[0].tolist() == pytest.approx([mean, 1, 0, 1])
        assert found[1].tolist() == [4, blue, 1 - blue, 0]
    named = from_table(patients(30), target="ill", client="site", impute={"age": 7})
    with pytest.raises(DataError, match="'color' is empty in row 1; it was full in training, and"):
        InputForm.from_federation(named).prepare_inputs(later, named.fitted[0])


def test_whole_numbers_that_float32_does_not_hold_are_said_unless_they_are_scaled():
    """2^24 + 1 is the first: float32 reads it as 2^24; so is every odd number after it."""
    large = patients().assign(income=np.arange(12) + 2**24 - 11, age=[NAN, *range(11)])
    settings = {"target": "ill", "client": "site", "impute": "mean"}
    line = (
        "column 'income' has whole numbers such as 16,777,217, which becomes 16,777,216 as float32: "
        "models see no difference; give scale='standard', or leave them out"
    )
    fits = large.assign(income=large["income"] - 1)
    read_table(fits, parse_settings(TableOptions, settings, ""))
    assert from_table(large, **settings, scale="standard").x.dtype == torch.float32
    large["income"] += 1
    with pytest.warns(UserWarning, match=f"^{re.escape(line)}$") as said:
        from_table(large, **settings)
    assert len(said) == 1
    with pytest.warns(
        UserWarning, match=r"column 'age' \(and 1 further columns\) has whole"
    ) as said:
        from_table(large.assign(age=large["age"] + 2.0**25), **settings)
    assert len(said) == 1
    # A table for testing is read into the same columns.
    with pytest.warns(UserWarning, match=r"column 'income' has whole numbers such as 16,777,217"):
        from_table(fits, test=large.drop(columns="site"), **settings)


def test_from_three_to_thousands_of_rows_a_client():
    """With text, empty entries and a client of one class; 3 rows are one for each of the three sets."""
    sizes = {"tiny": 3, "one class": 9, "large": 5000}
    draw = np.random.default_rng(0)
    site = np.repeat(list(sizes), list(sizes.values()))
    color = draw.choice(["r", "g"], len(site))
    table = pd.DataFrame({"site": site, "age": draw.normal(50, 9, len(site)), "color": color})
    table["ill"] = np.where((draw.random(len(site)) < 0.5) | (site == "one class"), "yes", "no")
    table.loc[(draw.random(len(site)) < 0.1) & (site == "large"), ["age", "color"]] = None
    made = from_table(table, target="ill", client="site", impute="median", scale="standard")
    assert made.client_names == ("large", "one class", "tiny")
    assert made.count_samples("train").tolist() == [3200, 6, 1]
    assert made.count_samples("validation").tolist() == [800, 1, 1]
    assert [len(test.x) for test in made.tests] == [1000, 2, 1]
    assert set(made.y[1][made.split[1] >= 0].tolist()) == {1}
    two = table.groupby("site").head(2)
    with pytest.raises(
        DataError, match="client 'large' has 2 samples, which leaves none for training"
    ):
        from_table(two, target="ill", client="site", impute="median")


def bad(**columns):
    return patients().assign(**columns)


def bad30(**columns):
    return patients(30).assign(**columns)


@pytest.mark.parametrize(
    "values",
    [
        [f"{place % 20} mg" for place in range(30)],  # doses: few
        [f"P{place}" for place in range(30)],
        [f"{place} {'mg' if place % 2 else 'ml'}" for place in range(30)],
    ],
)
def test_few_doses_names_with_numbers_and_mixed_units_are_categories(values):
    with warnings.catch_warnings():
        # Of as many categories as rows it is said that they may be ids.
        warnings.simplefilter("ignore")
        made = from_table(bad30(age=values), target="ill", client="site", features=["age"])
    assert made.features == (len(set(values)),)


@pytest.mark.parametrize(
    ("table", "change", "error", "message"),
    [
        (bad(age=[NAN, *range(11)]), {}, DataError, r"'age' has 1 empty entries \(the first in row 0, of client 'Zü"),
        (bad(age=[NAN, *range(11)]), {"impute": {"color": "red"}}, DataError, 'impute = "mean", "median" or a number'),
        (bad(color=[None, *"abcdefghijk"]), {}, DataError, "column 'color' has 1 empty .* impute = \"most-frequent\""),
        (bad(color=[None, *"abcdefghijk"]), {"impute": 0}, DataError, "column 'color' has 1 empty"),
        (bad(color=[None, *"abcdefghijk"]), {"impute": {"color": "mean"}}, ConfigError, "'most-frequent' or one of"),
        (bad(age=[float("inf"), *range(11)]), {}, DataError, "column 'age' is infinite in row 0, of client 'Zürich'"),
        (bad(ill=[None, *"abcdefghijk"]), {}, DataError, "target 'ill' is empty in 1 rows .* drop those rows"),
        (bad(ill=[NAN, *range(11)]), {}, DataError, "target 'ill' is empty in 1 rows"),
        (bad(site=[None, *"abcdefghijk"]), {}, DataError, "column 'site' has no client in row 0; fill it, or drop"),
        (bad(seen=datetime.datetime(2026, 1, 1)), {}, DataError, "column 'seen' holds dates or times .*days since the"),
        (bad(more=[[1, 2]] * 12), {}, DataError, "column 'more' holds list<.*leave it out of features"),
        (bad(age=[1, "x", *range(10)]), {}, DataError, "a column cannot be read .*age"),
        (patients(), {"target": "sick"}, ConfigError, "unknown column 'sick'; .*valid: age, color, ill"),
        (patients(), {"features": ["agee"]}, ConfigError, "unknown column 'agee'; did you mean 'age'"),
        (patients(), {"features": ["site"]}, ConfigError, "'site' is among the features, and is what is learned"),
        (patients(), {"impute": {"hue": 1}}, ConfigError, "unknown column 'hue'"),
        (patients(), {"impute": "average"}, ConfigError, "from_table: impute is 'average'; expected 'mean'"),
        (patients(), {"target": ["ill", "age"]}, DataError, "target 'ill' is text; expected numbers where several"),
        (patients(), {"client": None}, ConfigError, "give either client .* or num_clients"),
        (patients(0), {}, DataError, "table has 0 samples and no client; every client needs data"),
        (patients()[["site", "ill"]], {}, ConfigError, "none is left as an input"),
        (patients().rename(columns={"age": "color"}), {}, DataError, "Duplicate column names|two columns 'color'"),
        (pd.DataFrame({"id": [f"p{n}" for n in range(1500)], "site": "a", "ill": 0.5}), {}, DataError, "1,500 different values"),
        (bad30(age=["?", *map(str, range(29))]), {}, DataError, r"'age' is text, though .*it has '\?' in row 0"),
        (bad30(age=[f"{place},5" for place in range(30)]), {}, DataError, "it has '0,5' in row 0, of client 'Zürich'"),
        (bad30(ill=["?", *map(str, range(29))]), {}, DataError, r"'ill' is text, though .*; correct that, leave"),
        (bad30(age=[f"{place}.5%" for place in range(30)]), {}, DataError, "'age' is text: numbers with '%', such as '0.5%'"),
        (bad30(age=[f"-{place} mg" for place in range(30)]), {}, DataError, "numbers with 'mg', .*write the numbers alone"),
        (bad30(ill=[f"${place},000.50" for place in range(30)]), {}, DataError, r"'ill' is text: numbers with '\$'"),
        ("none.csv", {}, DataError, "there is no file none.csv; expected a CSV or parquet file"),
        (3, {}, DataError, "the table is a int .*expected one of pandas, polars or arrow"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_used_are_refused_in_one_line(table, change, error, message):
    with pytest.raises(error, match=message) as caught:
        from_table(table, **{"target": "ill", "client": "site", **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"encode": "dummy"},
            "data.options: encode is 'dummy'; expected 'one-hot' or 'codes' or a table",
        ),
        (
            {"encode": {"age": "dummy"}},
            "data.options: encode of 'age' is 'dummy'; expected 'one-hot' or 'codes'",
        ),
        ({"scale": "minmax"}, "data.options: scale is 'minmax'; expected 'standard'"),
        (
            {"categories": {"color": ["red", "red"]}},
            "categories of 'color' is .*expected a list of values, each once",
        ),
        (
            {"class_name": ["a"]},
            "data.options: unknown key 'class_name'; did you mean 'class_names'",
        ),
        ({"target": []}, "data.options: target is .*expected text, or a list of texts"),
    ],
)
def test_options_of_a_study_file_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(TableOptions, {"target": "ill", **options}, "data.options")


def test_codes_that_are_written_as_numbers_are_categories():
    codes = patients(30).assign(zip=[f"{place:05}" for place in range(30)])
    with pytest.warns(UserWarning, match="column 'zip' has another value in each row, and becomes"):
        made = from_table(codes, target="ill", client="site")
    assert "zip=00007" in made.feature_names
    mixed = patients(60).assign(age=["?", *map(str, range(29))] * 2)
    assert (
        "age=?"
        in from_table(mixed, target="ill", client="site", encode={"age": "one-hot"}).feature_names
    )


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "a.xlsx").write_bytes(b"x")
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match=r"is no table; expected a file .csv, .tsv or .parquet"):
        from_table(tmp_path / "a.xlsx", target="y", client="c")
    with pytest.raises(DataError, match=r"a.parquet cannot be read"):
        from_table(tmp_path / "a.parquet", target="y", client="c")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"target": "ill"},
            "the categories of 'color' are missing; every machine must name the same",
        ),
        ({"target": "ill", "features": ["age"]}, "the classes of 'ill' are missing; .*class_names"),
        (
            {"target": "n", "features": ["age"]},
            "classes is missing; every machine must say how many 'n' has",
        ),
    ],
)
def test_machines_that_read_tables_of_their_own_must_name_what_text_means(columns, message):
    table = patients().assign(n=1)
    with pytest.raises(ConfigError, match=message):
        read_table(table, TableOptions(**columns), shared=True)
    said = {
        "class_names": ["no", "yes"],
        "categories": {"color": ["red", "blue"]},
        "features": ["age", "color"],
    }
    assert read_table(table, TableOptions("ill", **said), shared=True).classes == 2


def test_known_clusters_of_clients_become_the_truth():
    made = from_table(
        patients(), target="ill", client="site", clusters={"Åre": 1, "Zürich": 0, "東京": 1}
    )
    assert made.truth is not None
    assert made.truth.cluster.tolist() == [0, 1, 1]
    with pytest.raises(DataError, match="clusters has nothing for client 'Zürich'"):
        from_table(patients(), target="ill", client="site", clusters={"Åre": 1})
    with pytest.raises(ConfigError, match="clusters is given without client"):
        from_table(patients(), target="ill", num_clients=2, clusters={"Åre": 1})


def test_without_clients_a_table_is_divided():
    made = from_table(
        patients(),
        target="ill",
        num_clients=3,
        features=["age"],
        split=Split(shift=[{"kind": "iid"}]),
    )
    assert (len(made), made.client_names) == (3, ())


def test_an_entry_says_where_a_column_is_empty():
    """Beside the filled and scaled one, and not scaled itself; no warning of a client without any value."""
    table = patients(30)
    table.loc[::3, "age"] = NAN  # all of one hospital
    table.loc[4, "age"] = NAN
    made = from_table(
        table, target="ill", client="site", impute="median", indicate=["age"], scale="standard"
    )
    assert made.feature_names == ("age", "color=blue", "color=red", "smokes", "age is empty")
    assert made.x[0][made.split[0] >= 0][:, [0, 4]].tolist() == [[0.0, 1.0]] * 8
    used = made.x[1][made.split[1] >= 0]
    assert used[:, 4].sum() + made.tests[1].x[:, 4].sum() == 1
    read = read_inputs(table[["age", "color", "smokes"]], made.table)
    assert read[:, 4].tolist() == table["age"].isna().tolist(), "of rows that come later too"
    assert np.isnan(read[:, 0]).tolist() == table["age"].isna().tolist()
    assert parse_columns([astuple(column) for column in made.table]) == made.table
    with pytest.warns(UserWarning, match="1 of 3 clients have columns without any value"):
        from_table(table, target="ill", client="site", impute="median")


def test_what_is_indicated_is_a_column_of_numbers_among_the_inputs():
    with pytest.raises(
        ConfigError, match="indicate: unknown column of the inputs 'agee'; did you mean 'age'"
    ):
        from_table(patients(), target="ill", client="site", indicate=["agee"])
    with pytest.raises(
        ConfigError,
        match="indicate: 'color' is a column of categories; give its empty entries one of",
    ):
        from_table(patients(), target="ill", client="site", indicate=["color"])


def test_ids_with_leading_zeros_stay_what_they_are(tmp_path):
    """007 and 7 are two clients of a CSV file; plain numbers stay numbers."""
    table = patients(20)
    table["site"] = np.where(np.arange(20) < 10, "007", "7")
    table.to_csv(tmp_path / "t.csv", index=False)
    assert from_table(tmp_path / "t.csv", target="ill", client="site").client_names == ("007", "7")
    table["site"] = np.arange(20) % 2
    table.to_csv(tmp_path / "t.csv", index=False)
    assert from_table(tmp_path / "t.csv", target="ill", client="site").client_names == ()


def test_test_rows_that_are_training_rows_too_are_said():
    """In a table of its own, and in the same one; other values are other rows."""
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({"age": draw.normal(size=30), "ill": draw.choice(["no", "yes"], 30)})
    copied = rows[:12]
    line = "12 of 12 test samples are training samples as well, input and target"
    with pytest.warns(UserWarning, match=line):
        from_table(rows, target="ill", num_clients=2, test=copied)
    both = pd.concat([rows.assign(part="train"), copied.assign(part="test")])
    with pytest.warns(UserWarning, match=line):
        from_table(both, target="ill", num_clients=2, split_column="part")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_table(rows[12:], target="ill", num_clients=2, test=copied)
