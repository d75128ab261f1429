"""What looks right and is hardly meant is said: words for nothing, numbers as text, lost digits."""

import time
import warnings

import numpy as np
import pandas as pd
import pytest

import coterie
from coterie.data.coding import encode_labels
from coterie.data.schema import TableSchema
from coterie.data.tables import read_inputs
from coterie.errors import DataError

ROWS = 60
HOSPITALS = np.repeat(["north", "south", "west"], ROWS // 3)
RNG = np.random.default_rng(0)
WHOLE = RNG.integers(1000, 99_999, ROWS)


def table(**columns):
    return pd.DataFrame(
        {"hospital": HOSPITALS, "age": np.linspace(20, 80, ROWS), **columns,
         "ill": np.arange(ROWS) % 2}
    )  # fmt: skip


def read(frame, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return coterie.from_table(frame, client="hospital", target="ill", **options)


def as_text(form):
    return [form(int(one)) for one in WHOLE]


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (as_text(lambda one: f"{one:,}".replace(",", "'")), "most of it are numbers: it has"),
        (as_text(lambda one: f"{one:,}".replace(",", "\u00a0")), "most of it are numbers"),
        (as_text(lambda one: f"{one:,}".replace(",", " ")), "most of it are numbers"),
        (as_text(lambda one: f"{one * 1000:,}".replace(",", ".")), "most of it are numbers"),
        (as_text(lambda one: f"{one % 28 + 1:02}.{one % 12 + 1:02}.2020"), "holds dates or times"),
        (as_text(lambda one: f"2020-{one % 12 + 1:02}-{one % 28 + 1:02}"), "holds dates or times"),
        (as_text(lambda one: f"{one % 24:02}:{one % 60:02}"), "holds dates or times"),
    ],
)
def test_numbers_and_dates_that_are_written_as_text_are_refused(values, said, from_file, tmp_path):
    given = table(v=values)
    if from_file:
        given.to_csv(tmp_path / "v.csv", index=False)
        given = tmp_path / "v.csv"
    with pytest.raises(DataError, match=f"column 'v' .*{said}"):
        read(given)


@pytest.mark.parametrize("form", [str, " {} ".format, lambda one: f"{one / 7:.3e}"])
def test_text_that_is_numbers_alone_is_refused_in_a_data_frame_unless_it_is_said_to_be_codes(form):
    given = table(v=as_text(form))
    with pytest.raises(DataError, match="column 'v' is text, all of it numbers, such as"):
        read(given)
    given["v"] = [form(int(one) // 10_000) for one in WHOLE]  # each in several rows
    assert len(read(given, categories={"v": sorted(set(given.v))}).feature_names) > 5


def test_few_numbers_and_codes_with_leading_zeros_stay_categories():
    few = table(grade=[str(place % 5) for place in range(ROWS)])
    assert "grade=4" in read(few).feature_names
    codes = table(zip=[f"{place % 30:05}" for place in range(ROWS)])
    assert "zip=00007" in read(codes).feature_names


@pytest.mark.parametrize("word", ["", " ", "nan", "None", "NA", "<NA>"])
def test_a_word_that_programs_write_for_nothing_is_said_where_it_is_a_category(word):
    values = np.where(np.arange(ROWS) % 4 == 0, word, np.where(np.arange(ROWS) % 2, "x", "y"))
    for given in (table(v=values), table(v=pd.Categorical(values))):
        with pytest.warns(
            UserWarning, match=rf"column 'v' has '{word}' \(15 rows with such text\)"
        ):
            coterie.from_table(given, client="hospital", target="ill")
        named = read(given, categories={"v": [word, "x", "y"]})
        assert named.feature_names == ("age", f"v={word}", "v=x", "v=y")


def test_a_label_that_stands_for_nothing_is_said():
    x = RNG.normal(size=(ROWS, 2))
    text = np.where(np.arange(ROWS) % 4 == 0, "nan", np.where(np.arange(ROWS) % 2, "x", "y"))
    with pytest.warns(UserWarning, match="y has the label 'nan', which programs write where"):
        coterie.from_arrays(x, text, clients=HOSPITALS)
    for missing in (-1, -100):
        whole = np.where(np.arange(ROWS) == 3, missing, np.arange(ROWS) % 3)
        with pytest.warns(UserWarning, match=f"y has the label {missing}, .*a class of its own"):
            coterie.from_arrays(x, whole, clients=HOSPITALS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = coterie.from_arrays(x, np.where(np.arange(ROWS) % 2, -1, 1), clients=HOSPITALS)
        assert both.class_names == ("-1", "1")
        named = coterie.from_arrays(x, text, clients=HOSPITALS, class_names=["nan", "x", "y"])
        assert named.class_names == ("nan", "x", "y")


START = 1.6e9  # seconds since 1970; float32 has steps of 128 there
SECONDS = START + RNG.uniform(0, 3600, ROWS)


def test_differences_that_float32_rounds_away_are_said():
    said = "numbers near 1.6e.09 that differ by .* of which float32 keeps steps of 1.3e.02"
    with pytest.warns(UserWarning, match=f"x has {said}"):
        coterie.from_arrays(SECONDS[:, None], np.arange(ROWS) % 2, clients=HOSPITALS)
    with pytest.warns(UserWarning, match=f"y has {said}"):
        coterie.from_arrays(RNG.normal(size=(ROWS, 2)), SECONDS, clients=HOSPITALS)
    with pytest.warns(UserWarning, match=f"column 'v' has {said}"):
        coterie.from_table(table(v=SECONDS), client="hospital", target="ill")
    with pytest.warns(UserWarning, match=f"target 'v' has {said}"):
        coterie.from_table(table(v=SECONDS), client="hospital", target="v")
    # Scaled in float64, so nothing is lost; and what float32 holds is nothing to say.
    scaled = read(table(v=SECONDS), scale="standard")
    assert len(np.unique(scaled.x[..., 1].numpy())) > 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coterie.from_arrays((SECONDS - START)[:, None], SECONDS - START, clients=HOSPITALS)


def test_a_column_of_true_and_false_has_no_other_numbers_later(tmp_path):
    fever = table(fever=np.arange(ROWS) % 3 == 0)
    later = fever.head(6).assign(fever=[0, 1, 2, 0, 1, 0])
    with pytest.raises(DataError, match=r"'fever' .* is 2 in row 2; expected true or false"):
        coterie.from_table(
            fever, client="hospital", target="ill", test=later.drop(columns="hospital")
        )
    data = read(fever)
    settings = coterie.Settings(rounds=1, local=coterie.LocalTraining(steps=1))
    run = coterie.simulate(data, coterie.Local(), model="linear", settings=settings)
    with pytest.raises(DataError, match=r"'fever' .* is 2 in row 2; expected true or false"):
        run.predict("north", later)
    right = later.assign(fever=[0, 1, 1, 0, 1, 0])
    same = right.assign(fever=right.fever.astype(bool))
    assert (run.predict("north", right) == run.predict("north", same)).all()


def test_an_indicator_does_not_make_numbers_of_a_column_of_true_and_false():
    given = pd.array([[True, False, None][row % 3] for row in range(ROWS)], "boolean")
    data = read(table(fever=given), impute="most-frequent", indicate=["fever"])
    assert data.feature_names[-1] == "fever is empty"
    later = table(fever=[0, 1, 2] * (ROWS // 3))
    with pytest.raises(DataError, match=r"'fever' .* is 2 in row 2; expected true or false"):
        read_inputs(later, data.table)


def test_many_labels_of_the_test_data_alone_take_no_time():
    own, held = ([f"{part} {row}" for row in range(20_000)] for part in "ab")
    began = time.process_time()
    with pytest.warns(UserWarning, match=r"y is 'b 0', .*, \.\.\. in the test data alone"):
        encode_labels([own, held])
    # Looking each label up takes 0.05 s; half a minute where all are compared with each.
    assert time.process_time() - began < 5


def test_a_class_of_the_test_data_alone_is_said():
    held = table().head(6).drop(columns="hospital").assign(ill=["well", "ill", "dead"] * 2)
    told = table().assign(ill=np.where(np.arange(ROWS) % 2, "ill", "well"))
    with pytest.warns(UserWarning, match="target 'ill' is 'dead' in the test data alone"):
        coterie.from_table(told, client="hospital", target="ill", test=held)


def test_another_hospitals_table_means_the_same_by_the_schema_or_says_what_may_not(tmp_path):
    told = table(fever=np.arange(ROWS) % 3 == 0)
    told = told.assign(ill=np.where(told.ill == 1, "ill", "well"))
    data = read(told)
    assert data.class_names == ("ill", "well")
    TableSchema.from_federation(data).save(tmp_path / "table.json")
    options = {"client": "hospital", "schema": str(tmp_path / "table.json")}
    numbered = told.assign(
        ill=(told.ill == "ill").astype(int)
    )  # 1 is ill, which the schema has first
    with pytest.warns(
        UserWarning, match=r"is numbers, .* words: 0 is 'ill', 1 is 'well', in the order"
    ):
        coterie.from_table(numbered, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = coterie.from_table(told, **options)
    assert (same.y == data.y).all()
    with pytest.raises(DataError, match=r"'fever' .* is 2 in row 0; expected .* as in the schema"):
        coterie.from_table(told.assign(fever=told.fever.astype(int) + 1), **options)


@pytest.mark.parametrize("written", ["Fru\u0308her", " früher", "FRÜHER"])
def test_a_category_that_only_looks_like_a_known_one_says_in_what_it_differs(written):
    told = table(smokes=np.where(np.arange(ROWS) % 2, "früher", "nie"))
    later = told.drop(columns="hospital").head(4).assign(smokes=["nie", written, "nie", "nie"])
    with pytest.raises(
        DataError, match=r"in row 1; .* differs from 'früher' in case, spaces or how"
    ):
        coterie.from_table(
            told,
            client="hospital",
            target="ill",
            test=later,
            categories={"smokes": ["früher", "nie"]},
        )
