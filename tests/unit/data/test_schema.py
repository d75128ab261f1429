"""The schema of a table is decided once, kept with the federation and in a file, and used for every later table."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coterie
from coterie import Split, from_table
from coterie.data.datasets import load_table_or_folder
from coterie.data.federation import Federation
from coterie.data.inputs import InputForm
from coterie.data.schema import TableSchema, apply_schema
from coterie.errors import ConfigError, DataError
from coterie.studies.config import parse_study_text
from coterie.studies.run import run_study


def patients(rows: int = 48) -> pd.DataFrame:
    place = np.arange(rows)
    return pd.DataFrame(
        {
            "site": np.array(["Lund", "Åre"])[place % 2],
            "age": place + 0.5,
            "grade": np.array(["1", "2", "3A"])[place % 3],
            "smokes": place % 5 == 0,
            "day": place % 7,
            "ill": np.array(["yes", "no"])[place // 2 % 2],
        }
    )


OPTIONS = {
    "client": "site",
    "encode": {"grade": "one-hot", "day": "codes"},
    "scale": "standard",
    "indicate": ["age"],
}


def read_schema(federation: Federation) -> TableSchema:
    schema = TableSchema.from_federation(federation)
    assert schema is not None
    return schema


def test_the_schema_is_kept_with_the_federation_and_in_a_file(tmp_path):
    made = from_table(patients(), target="ill", class_names=["yes", "no"], **OPTIONS)
    schema = read_schema(made)
    made.save(tmp_path / "f.safetensors")
    assert read_schema(Federation.load(tmp_path / "f.safetensors")) == schema
    schema.save(tmp_path / "table.json")
    assert TableSchema.load(tmp_path / "table.json") == schema
    assert schema.describe(["separated by tabs"]) == [
        "target: ill, 2 classes (yes, no)",
        "numbers, scaled by each client's training rows: age",
        "true or false, scaled by each client's training rows: smokes",
        "text: grade (1, 2, 3A)",
        "text: day (0, 1, 2, 3, 4, 5, 6, codes)",
        "marked where empty: age",
        "read with: separated by tabs",
    ]
    assert (
        TableSchema.from_federation(coterie.from_arrays(np.eye(6), [0, 1] * 3, num_clients=2))
        is None
    )


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_another_hospital_codes_its_rows_as_the_whole_table_does(tmp_path, data):
    """Whatever rows, columns' order and file it has: entries, classes and names are those of the first table."""
    whole = patients()
    made = from_table(whole, target="ill", **OPTIONS)
    read_schema(made).save(tmp_path / "table.json")
    rows = data.draw(st.lists(st.integers(0, 47), min_size=5, max_size=9, unique=True))
    own = whole.iloc[rows].assign(site="Umeå")
    own = own[data.draw(st.permutations(list(own)))]
    own.to_csv(tmp_path / "own.csv", index=False, sep=data.draw(st.sampled_from(",;")))
    options = {
        "path": str(tmp_path / "own.csv"),
        "client": "site",
        "schema": str(tmp_path / "table.json"),
    }
    source = load_table_or_folder("table", options, shared=True)
    assert (source.feature_names, source.class_names) == (made.feature_names, made.class_names)
    assert source.table == made.table
    expected = InputForm.from_federation(made).prepare_inputs(whole.iloc[rows])
    assert torch.equal(source.train.x.float(), expected)
    assert source.train.y.tolist() == [made.class_names.index(one) for one in own["ill"]]
    # By `from_table` too, from any kind of table.
    again = from_table(own, client="site", schema=tmp_path / "table.json")
    assert (again.table, again.class_names) == (made.table, made.class_names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"class_names": ["yes", "no"]},
            r"class_names is \['yes', 'no'\], and \['no', 'yes'\] in the schema",
        ),
        ({"target": "age"}, r"target is \['age'\], and \['ill'\] in the schema"),
        ({"classes": 0}, "classes is 0, and 2 in the schema"),
        ({"categories": {"grade": ["1", "2"]}}, "categories is .* in the schema"),
        ({"features": ["age"]}, "features is .* in the schema"),
    ],
)
def test_settings_that_contradict_the_schema_are_refused(options, message, tmp_path):
    made = from_table(patients(), target="ill", client="site")
    read_schema(made).save(tmp_path / "table.json")
    with pytest.raises(ConfigError, match=message):
        from_table(patients(), client="site", schema=tmp_path / "table.json", **options)
    same = {"target": "ill", "class_names": ["no", "yes"], "classes": 2}
    assert apply_schema(same, tmp_path / "table.json")["categories"] == {"grade": ["1", "2", "3A"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"age": "old"},
            "column 'age' of table is text, such as 'old'; expected numbers, as in the schema",
        ),
        ({"grade": "4"}, "column 'grade' is '4' in row 0"),
        (
            {"ill": "maybe"},
            "target 'ill' has the label 'maybe'; expected one of class_names: no, yes",
        ),
    ],
)
def test_a_table_that_is_not_of_the_schema_is_refused(change, message, tmp_path):
    read_schema(from_table(patients(), target="ill", client="site")).save(tmp_path / "table.json")
    with pytest.raises(DataError, match=message):
        from_table(patients().assign(**change), client="site", schema=tmp_path / "table.json")
    with pytest.raises(ConfigError, match="unknown column 'grade'"):
        from_table(patients().drop(columns="grade"), client="site", schema=tmp_path / "table.json")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"coterie table": 2}', '{"coterie table": 1, "columns": [{}]}']
)
def test_a_file_that_is_no_schema_is_refused(text, tmp_path):
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(DataError, match=r"is no schema of a table .*; expected the table.json of"):
        TableSchema.load(tmp_path / "table.json")
    with pytest.raises(DataError, match="cannot read the schema"):
        TableSchema.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="target is missing; name the column to learn"):
        from_table(patients(), client="site")


@pytest.mark.full
def test_a_wide_table_is_coded_in_few_words():
    wide = pd.DataFrame(np.zeros((12, 3000)), columns=[f"gene {place}" for place in range(3000)])
    made = from_table(wide.assign(c="a", y=[0, 1] * 6), target="y", client="c")
    coding = read_schema(made).list_coding()
    assert len(json.dumps(coding)) < 10_000
    other = from_table(
        wide.rename(columns={"gene 2999": "gene 3000"}).assign(c="a", y=[0, 1] * 6),
        target="y",
        client="c",
    )
    assert read_schema(other).list_coding() != coding


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_time_of_a_wide_table_grows_with_its_columns_and_not_with_their_square(tmp_path):
    """10,000 columns of genes take two seconds; a look through all names for each took two minutes."""
    wide = pd.DataFrame(np.zeros((6, 10_000)), columns=[f"gene {place}" for place in range(10_000)])
    wide.assign(c="a", y=[0, 1] * 3).to_csv(tmp_path / "wide.csv", index=False)
    made = from_table(tmp_path / "wide.csv", target="y", client="c")
    assert TableSchema.from_federation(made).columns[-1].name == "gene 9999"
    form = InputForm.from_federation(made)
    assert form.prepare_inputs(wide).shape == (6, 10_000)


@pytest.mark.parametrize(
    ("other", "equal"),
    [([1.0, 2.0], True), (["1", "2"], True), ([2, 1], False), ([1, 2.5, 2], False)],
)
def test_nodes_code_alike_however_each_writes_its_categories(other, equal):
    rows = pd.DataFrame({"grade": [1, 2] * 6, "site": "a", "ill": [0, 1] * 6})
    coding = []
    for categories in ([1, 2], other):
        made = from_table(rows, target="ill", client="site", categories={"grade": categories})
        coding.append(read_schema(made).list_coding())
    assert (coding[0] == coding[1]) is equal


def measured() -> pd.DataFrame:
    """Two sites of 12 patients; age and dose are empty once, and stage too; pulse is full."""
    table = pd.DataFrame(
        {
            "site": ["Lund"] * 12 + ["Åre"] * 12,
            "age": [20.0, 40.0, 90.0] * 8,
            "pulse": [60.0, 70.0, 80.0] * 8,
            "stage": [2, 1, 2] * 8,
            "color": ["red", "red", "blue"] * 8,
            "y": np.arange(24) / 5,
        }
    )
    table.loc[3, "age"] = np.nan
    return table


FILLS = {"age": "median", "pulse": 7, "stage": 1, "color": "most-frequent"}
FILLING = {"target": "y", "client": "site", "categories": {"stage": [1, 2]}}


def test_what_fills_empty_entries_is_kept_and_fills_another_hospitals_table(tmp_path):
    """Its own median and most frequent color, as the first hospital's; the number and the stage of all."""
    made = from_table(measured(), impute=FILLS, **FILLING)
    schema = read_schema(made)
    assert {one.name: one.impute for one in schema.columns} == {**FILLS, "stage": "1"}
    schema.save(tmp_path / "table.json")
    assert TableSchema.load(tmp_path / "table.json") == schema
    assert "filled where empty: age (median), pulse (7), stage (1), color (most-frequent)" in (
        schema.describe()
    )
    made.save(tmp_path / "f.safetensors")
    assert read_schema(Federation.load(tmp_path / "f.safetensors")) == schema
    form = InputForm.from_federation(made)
    assert InputForm.from_json(json.loads(json.dumps(form.to_json()))) == form

    # The other's rows are all alike, so that 30 and blue are its own values whatever it trains on.
    own = pd.DataFrame({"age": [30.0] * 11, "pulse": 50.0, "stage": 2, "color": "blue", "y": 1.0})
    empty = pd.DataFrame(
        {"age": [None], "pulse": [None], "stage": [None], "color": [None], "y": 1.0}
    )
    other = from_table(
        own.assign(site="Umeå"), test=empty, client="site", schema=tmp_path / "table.json"
    )
    assert other.table == made.table
    assert other.feature_names == ("age", "pulse", "stage=1", "stage=2", "color=blue", "color=red")
    assert other.tests[0].x.tolist() == [[30, 7, 1, 0, 1, 0]]


def test_rows_for_prediction_and_a_test_table_are_filled_by_the_schema():
    held = pd.DataFrame({"age": [np.nan], "pulse": [np.nan], "stage": [2], "color": [None]})
    table = measured().iloc[:9]
    made = from_table(
        table, test=held.assign(y=0.0), impute=FILLS, split=Split(validation_fraction=0), **FILLING
    )
    # Ages are 20, 40, 90, none, 40, 90, 20, 40, 90: in order, the fourth and fifth of eight are 40.
    expected = [40.0, 7.0, 0.0, 1.0, 0.0, 1.0]
    assert made.tests[0].x.tolist() == [expected]
    found = InputForm.from_federation(made).prepare_inputs(held, made.fitted[0])
    assert found.tolist() == [expected]


@pytest.mark.parametrize(
    ("first", "own", "is_equal"),
    [
        ("median", None, True),
        ("median", "median", True),
        ("median", "mean", False),
        ("mean", FILLS, False),
        (FILLS, {**FILLS, "stage": "1", "pulse": 7.0}, True),
        (FILLS, {**FILLS, "stage": 2}, False),
        (FILLS, "median", False),
        (0, 0.0, True),
        ({"age": "mean"}, {"age": "mean"}, True),
        ({"age": "mean"}, "mean", False),
    ],
)
def test_what_is_filled_otherwise_than_in_the_schema_is_refused(first, own, is_equal, tmp_path):
    read_schema(from_table(measured(), impute=first, **FILLING)).save(tmp_path / "table.json")
    options = {"client": "site", "schema": tmp_path / "table.json", "impute": own}
    if is_equal:
        again = from_table(measured(), **options)
        assert read_schema(again) == TableSchema.load(tmp_path / "table.json")
        return
    with pytest.raises(
        ConfigError, match=r"impute is \{.*, and \{.* in the schema .*; leave it out"
    ):
        from_table(measured(), **options)


def test_a_column_that_the_schema_does_not_fill_must_be_full_later(tmp_path):
    """What fills it would be decided twice: it is decided where the first table is read."""
    full = measured().fillna({"age": 20.0})
    read_schema(from_table(full, **FILLING)).save(tmp_path / "table.json")
    options = {"client": "site", "schema": tmp_path / "table.json"}
    line = (
        r"column 'age' has 1 empty entries \(the first in row 3, of client 'Lund'\); fill or drop "
        r"them, or choose what fills them: impute = \"mean\", \"median\" or a number where the "
        r"first table is read, since the schema has no impute"
    )
    with pytest.raises(DataError, match=f"^{line}"):
        from_table(measured(), **options)
    with pytest.raises(ConfigError, match=r"impute is \{'age': 'mean'.*, and \{\} in the schema"):
        from_table(measured(), impute="mean", **options)


def test_a_schema_of_before_impute_takes_the_settings_own(tmp_path):
    schema = json.loads(read_schema(from_table(measured(), impute="mean", **FILLING)).to_text())
    for column in schema["columns"]:
        del column["impute"]
    (tmp_path / "table.json").write_text(json.dumps(schema))
    options = {"client": "site", "schema": tmp_path / "table.json"}
    made = from_table(measured(), impute="median", **options)
    expected = ["median", "median", "most-frequent", "most-frequent"]
    assert [one.impute for one in made.table] == expected
    with pytest.raises(DataError, match="column 'age' has 1 empty entries"):
        from_table(measured(), **options)


def test_nodes_that_fill_otherwise_code_otherwise():
    codings = [
        read_schema(from_table(measured(), impute=one, **FILLING)).list_coding()
        for one in ("mean", "median", {**FILLS, "age": "mean"})
    ]
    assert codings[0]["column age"] == "numbers, empty: mean"
    assert codings[2]["column stage"] == "one-hot of 1, 2, empty: 1"
    assert codings[0] != codings[1]
    assert codings[0] != codings[2]


def test_predictions_follow_names_of_columns_and_not_their_order():
    """A frame given as arrays keeps its names: a table, a frame in another order and an array give the same."""
    x = pd.DataFrame({"a": np.arange(12.0), "b": np.arange(12.0) ** 2})
    form = InputForm.from_federation(coterie.from_arrays(x, [0, 1] * 6, num_clients=2))
    want = torch.tensor(x.to_numpy(), dtype=torch.float32)
    for given_x in (x, x[["b", "a"]], {"b": x["b"].tolist(), "a": x["a"].to_numpy()}, x.to_numpy()):
        assert torch.equal(form.prepare_inputs(given_x), want)
    for wrong in ({"a": [1.0]}, x.rename(columns={"b": "c"})):
        with pytest.raises(ConfigError, match="x: unknown column 'b'"):
            form.prepare_inputs(wrong)
    with pytest.raises(DataError, match="x is the path of a file"):
        form.prepare_inputs("x.csv")


def split_rows() -> pd.DataFrame:
    """Of each client's twelve rows, six for training, two for validation and four for testing."""
    table = patients(24)
    words = ["train"] * 6 + ["Validation"] * 2 + ["test"] * 4
    table["part"] = np.repeat(words, 2)
    return table[["site", "age", "ill", "part"]]


def test_a_column_divides_the_rows():
    table = split_rows()
    made = from_table(table, target="ill", client="site", split_column="part", scale="standard")
    assert made.feature_names == ("age",)
    for client, name in enumerate(made.client_names):
        own = table[table["site"] == name]
        parts = {word: group["age"].to_numpy() for word, group in own.groupby("part")}
        center, spread = parts["train"].mean(), parts["train"].std()
        found = {
            "train": made.x[client][made.split[client] == 0],
            "Validation": made.x[client][made.split[client] == 1],
            "test": made.tests[int(made.test_of[client])].x,
        }
        for word, values in found.items():
            ages = np.sort(values[:, 0].double().numpy() * spread + center)
            np.testing.assert_allclose(ages, parts[word], rtol=1e-6)


def test_without_validation_rows_some_training_rows_are_taken():
    table = split_rows().replace({"part": {"Validation": "train"}})
    made = from_table(table, target="ill", client="site", split_column="part")
    assert made.count_samples("train").tolist() == [6, 6]
    assert made.count_samples("validation").tolist() == [2, 2]
    assert [len(test.x) for test in made.tests] == [4, 4]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"part": "hold-out"},
            {},
            "column 'part' is 'hold-out' in row 0, of client 'Lund'; expected tr",
        ),
        (
            {"part": "train"},
            {},
            "column 'part' says test in no row; expected each client's test rows",
        ),
        (
            {"site": [*["Lund"] * 12, *["Åre"] * 12]},
            {},
            "says train in no row of client 'Åre'; expected one",
        ),
        ({}, {"test": split_rows()}, "split_column and test are both given; leave one out"),
        ({}, {"split": coterie.Split(folds=2)}, "folds is 2, and table says which rows are for"),
        ({}, {"split_column": "parts"}, "unknown column 'parts'; did you mean 'part'"),
        ({"part": ["train"] * 2 + ["val"] * 10 + ["test"] * 12, "site": ["a", "b"] * 12}, {}, ""),
    ],
)
def test_rows_that_cannot_be_divided_are_refused(change, options, message):
    table = split_rows().assign(**change)
    given_options = {"split_column": "part", **options}
    if not message:
        assert from_table(table, target="ill", client="site", **given_options).count_samples(
            "train"
        ).tolist() == [1, 1]
        return
    with pytest.raises((DataError, ConfigError), match=message):
        from_table(table, target="ill", client="site", **given_options)


def test_a_study_shows_and_stores_its_schema_and_another_follows_it(tmp_path):
    patients().to_csv(tmp_path / "p.csv", index=False, sep="\t")
    text = f"""
        name = "first"
        rounds = 1
        seeds = [0]
        model.kind = "linear"
        [data]
        dataset = "table"
        options = {{ path = "{tmp_path / "p.csv"}", target = "ill", client = "site" }}
        [[methods]]
        kind = "local"
    """
    study = parse_study_text(text)
    told: list[str] = []
    run_study(study, out=tmp_path, notes=lambda note: told.append(str(note)))
    assert told[0].splitlines()[0] == "table: target: ill, 2 classes (no, yes)"
    assert told[0].splitlines()[-1] == "table: read with: separated by tabs"
    stored = TableSchema.load(tmp_path / "first" / "table.json")
    assert stored == read_schema(from_table(patients(), target="ill", client="site"))
