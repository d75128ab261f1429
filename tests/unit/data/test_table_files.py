"""CSV files say what they hold: encoding, separator and decimals are found or asked, and types are decided once."""

import csv
import gzip
import io
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coterie
from coterie import from_table
from coterie.data.inputs import InputForm
from coterie.data.table_files import CsvFormat, load_table
from coterie.data.tables import read_inputs
from coterie.errors import ConfigError, DataError

OLD = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8)


def write(path: Path, rows, header=("c", "grade", "age", "y"), **form) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, **form).writerows([header, *rows])
    path.write_text(out.getvalue(), encoding="utf-8", newline="")
    return str(path)


def patients(grades=("1", "2", "3A"), labels=("0", "1"), rows=24):
    return [
        ("ab"[row % 2], grades[row % len(grades)], row, labels[row // 2 % len(labels)])
        for row in range(rows)
    ]


@OLD
@given(
    st.lists(st.lists(WORD, min_size=3, max_size=3), min_size=1, max_size=8),
    st.sampled_from(",;\t|"),
)
def test_every_text_comes_back_as_it_was_written(tmp_path, rows, separator):
    """Quotes, new lines, separators and spaces within an entry included, as the csv module of Python writes them."""
    path = write(
        tmp_path / "t.csv",
        rows,
        "pqr",
        delimiter=separator,
        quoting=csv.QUOTE_ALL,
        lineterminator="\n",
    )
    read = load_table(path, CsvFormat(separator))
    assert read.names == ["p", "q", "r"]
    assert (
        list(map(list, zip(*(read.arrow[name].to_pylist() for name in "pqr"), strict=True))) == rows
    )


@pytest.mark.parametrize(
    "ids",
    [
        ["89440000000000000001", "89440000000000000002", "89440000000000000003"],
        ["1.1", "1.10", "1.2"],
        ["10e4", "1e5", "2e5"],
        ["0x10", "16"],
        ["007", "07", "7"],
        ["False", "true"],
        ["2020-01-01", "2020-01-02"],
    ],
)
def test_ids_of_clients_are_text(ids, tmp_path):
    rows = [(one, "1", place, place % 2) for one in ids for place in range(12)]
    made = from_table(write(tmp_path / "t.csv", rows), target="y", client="c")
    assert sorted(made.client_names) == sorted(ids)
    assert made.count_samples("train").tolist() == [8] * len(ids)
    numbered = [(one, "1", place, place % 2) for one in (2, 0, 10, 1) for place in range(12)]
    made = from_table(write(tmp_path / "t.csv", numbered), target="y", client="c")
    assert made.client_names == ("0", "1", "2", "10"), "numbers sort as numbers"


def test_a_word_for_empty_entries_is_an_id_with_a_warning(tmp_path):
    rows = [(one, "1", place, place % 2) for one in ("NA", "DE") for place in range(12)]
    path = write(tmp_path / "t.csv", rows)
    with pytest.warns(UserWarning, match="column 'c' has 'NA', which programs write for an empty"):
        assert from_table(path, target="y", client="c").client_names == ("DE", "NA")
    with pytest.raises(DataError, match="column 'c' has no client in row 12"):
        from_table(
            write(tmp_path / "t.csv", [(one.strip("NA"), *more) for one, *more in reversed(rows)]),
            target="y",
            client="c",
        )


@settings(OLD, max_examples=25)
@given(st.data())
def test_a_later_file_is_read_as_the_first_one(tmp_path, data):
    """Any part of the rows, in any order of rows and columns, gives the entries that pandas says they have."""
    grades = data.draw(
        st.sampled_from(
            [("1", "2", "3A"), ("1.0", "2", "x"), ("true", "false", "unknown"), ("a", "b")]
        )
    )
    rows = patients(grades)
    made = from_table(write(tmp_path / "1.csv", rows), target="y", client="c")
    chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(4)))
    later = write(
        tmp_path / "2.csv",
        [[row[place] for place in order] for row in chosen],
        [("c", "grade", "age", "y")[place] for place in order],
        delimiter=data.draw(st.sampled_from(",;\t")),
    )
    found = InputForm.from_federation(made).prepare_inputs(later)
    table = pd.DataFrame(chosen, columns=["c", "grade", "age", "y"])
    kinds = pd.get_dummies(pd.Categorical(table["grade"], sorted(grades)), dtype=float)
    expected = {f"grade={name}": kinds[name] for name in kinds} | {"age": table["age"]}
    want = np.stack([expected[name] for name in made.feature_names], axis=1).astype("f4")
    np.testing.assert_array_equal(found.numpy(), want)
    # Typed by pandas, which takes 1 and 2 for numbers.
    typed = pd.read_csv(later, sep=None, engine="python")
    again = InputForm.from_federation(made).prepare_inputs(typed)
    np.testing.assert_array_equal(again.numpy(), want)


def test_types_are_those_of_the_first_file(tmp_path):
    first, later = (
        write(tmp_path / "1.csv", patients()),
        write(tmp_path / "2.csv", patients(("1", "2"))),
    )
    said = {"target": "y", "client": "c", "categories": {"grade": ["1", "2", "3A"]}, "classes": 2}
    assert from_table(later, **said).feature_names == from_table(first, **said).feature_names
    numbers = said | {"categories": {"grade": [1, 2, "3A"]}}
    assert torch.equal(from_table(later, **numbers).x, from_table(later, **said).x)
    shared = tmp_path / "3.csv"
    pd.read_csv(later, dtype=str).drop(columns="c").to_csv(shared, index=False)
    held = from_table(first, target="y", client="c", test=shared)
    assert held.features == (4,)
    assert torch.equal(
        held.tests[0].x,
        from_table(first, target="y", client="c", test=pd.read_csv(shared)).tests[0].x,
    )
    run = coterie.simulate(
        from_table(first, target="y", client="c"),
        coterie.Local(),
        model="linear",
        settings=coterie.Settings(rounds=1),
    )
    expected = run.predict("a", pd.read_csv(first, dtype={"grade": str}).iloc[:2])
    assert torch.equal(run.predict("a", later)[:2], expected)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "age",
            "old",
            "column 'age' is 'old' in row 1 of .*2.csv; expected numbers, as in training",
        ),
        ("age", "1,5", "column 'age' is '1,5' in row 1"),
        ("grade", "4", "column 'grade' is '4' in row 1; expected one of its categories: 1, 2, 3A"),
    ],
)
def test_a_later_file_that_differs_is_refused(column, value, message, tmp_path):
    made = from_table(write(tmp_path / "1.csv", patients()), target="y", client="c")
    table = pd.DataFrame(patients(rows=3), columns=["c", "grade", "age", "y"]).astype(str)
    table.loc[1, column] = value
    table.loc[0, "age"] = "0.5"
    table.to_csv(tmp_path / "2.csv", index=False)
    with pytest.raises(DataError, match=message):
        InputForm.from_federation(made).prepare_inputs(tmp_path / "2.csv")


def test_a_test_table_of_another_type_is_refused():
    table = pd.DataFrame({"c": list("ab") * 12, "a": range(24), "y": [0, 1] * 12})
    for held, name in (
        ({"a": ["low", "high"], "y": [0, 1]}, "a"),
        ({"a": [1, 2], "y": ["no", "yes"]}, "y"),
    ):
        with pytest.raises(DataError, match=f"column '{name}' of .* is text, .*expected numbers"):
            from_table(table, target="y", client="c", test=pd.DataFrame(held))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize("decimal", [",", "."])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_separators_decimals_and_encodings_are_found(separator, decimal, encoding, tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {"ort": ["Köln", 'Åre, "Süd"\n2'] * 20, "größe": rng.normal(0, 9, 40).round(2)}
    )
    table["krank"] = rng.choice(["ja", "nein"], 40)
    expected = from_table(table, target="krank", client="ort")
    path = tmp_path / "t.csv"
    table.to_csv(path, index=False, sep=separator, decimal=decimal, encoding=encoding)
    found = from_table(path, target="krank", client="ort")
    assert found.client_names == expected.client_names
    assert found.feature_names == ("größe",)
    assert torch.equal(found.x, expected.x)
    told = load_table(path).notes
    assert any("separated by" in note for note in told)
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert torch.equal(from_table(f"{path}.gz", target="krank", client="ort").x, expected.x)


def test_what_windows_wrote_is_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(
        "ort,größe,y\n".encode("cp1252")
        + "".join(f"{o},{k},{k % 2}\n" for o in ("Köln", "Ulm") for k in range(12)).encode("cp1252")
    )
    with pytest.warns(
        UserWarning, match=r"is not UTF-8 \(byte 0xf6 in line 1\); it is read as cp1252"
    ):
        made = from_table(path, target="y", client="ort")
    assert (made.client_names, made.feature_names) == (("Köln", "Ulm"), ("größe",))
    assert from_table(path, target="y", client="ort", encoding="cp1252").client_names[0] == "Köln"
    with pytest.raises(DataError, match="is not ascii"):
        from_table(path, target="y", client="ort", encoding="ascii")
    with pytest.raises(ConfigError, match="encoding is 'cp99'; expected one that Python knows"):
        from_table(path, target="y", client="ort", encoding="cp99")
    path.write_bytes(b"c,a,y\n\x81,1,1\n")
    with pytest.raises(DataError, match=r"not UTF-8 .* and not cp1252; name its encoding"):
        from_table(path, target="y", client="c")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("c;a;b;y\nx;1,5;2.5;0\nx;1,5;2.5;1\n", {}, "'a' has numbers with commas .*'b' with points"),
        ('c;a;y\nx;1,234;0\nx;22;1\n', {}, "'1,234': the comma may stand before a fraction or part"),
        ("c,a,y\nx,2020-01-01,0\nx,2020-01-02,1\n", {}, "column 'a' holds dates or times, such as '2020-01-01'"),
        ("c,a,y\nx,31.12.2020,0\nx,1.1.2020,1\n", {}, "column 'a' holds dates or times"),
        ("c,a,y\nx,12:30,0\nx,7:05,1\n", {}, "column 'a' holds dates or times"),
        ("c,a,a ,y\nx,1,2,0\n", {}, "two columns 'a'; give each a name of its own"),
        (",c,a,y\n0,x,1,0\n1,x,2,1\n", {}, "column 0 of the table has no name, such as an index"),
        ("c,a,y\nx,1\n", {}, "cannot be read .*; write it again"),
        ("# of 2026\nc,a,y\nx,1,0\n", {}, "begins with a comment .'# of 2026'.; expected .* take the comment out"),
        ("", {}, "is empty; expected a line with the names of the columns"),
        ("c,a,y\n", {}, "has 0 samples and no client"),
        ("c,a,y\nx,1,0\n", {"separator": "::"}, "separator is '::'; expected one character"),
        ("c,a,y\nx,1,0\n", {"separator": ";"}, "unknown column 'y'; valid: c,a,y"),
    ],
)  # fmt: skip
def test_files_that_do_not_say_what_they_mean_are_refused_in_one_line(
    text, options, message, tmp_path
):
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    with pytest.raises((DataError, ConfigError), match=message) as caught:
        from_table(tmp_path / "t.csv", target="y", client="c", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_first_line_that_names_the_separator_is_followed(end, tmp_path):
    """Excel writes `sep=;` before the names where the separator is not that of the language."""
    lines = ["c|a|y", *(f"x|{place}|{place % 2}" for place in range(12))]
    path = tmp_path / "t.csv"
    path.write_bytes(end.join(lines).encode())
    expected = from_table(path, target="y", client="c", separator="|")
    path.write_bytes(end.join(["sep=|", *lines]).encode())
    made = from_table(path, target="y", client="c")
    assert made.feature_names == ("a",)
    assert torch.equal(made.x, expected.x)
    assert load_table(path).notes == ("separated by bars",)


def test_rows_without_any_input_are_told(tmp_path):
    """A last line of separators, as spreadsheets leave it, would be one more patient."""
    rows = [("x", place, "ab"[place % 2], place % 2) for place in range(12)]
    write(path := tmp_path / "t.csv", rows, ("c", "a", "b", "y"))
    made = from_table(path, target="y", client="c", impute="most-frequent", indicate=["a"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(path, [("x", "", "a", 0), ("x", 3, "", 0)], ("c", "a", "b", "y"))
        assert len(read_inputs(path, made.table)) == 2
    write(path, [*rows[:3], ("", "", "", ""), ("", "", "", "")], ("c", "a", "b", "y"))
    with pytest.warns(
        UserWarning, match="has 2 rows without any input, the first in row 3: .*drop"
    ):
        assert len(read_inputs(path, made.table)) == 5


def test_what_is_named_is_used(tmp_path):
    rows = [("x", f"{place},{place % 10}00", place % 2) for place in range(12)]
    path = write(tmp_path / "t.csv", rows, ("c", "a", "y"), delimiter=";")
    made = from_table(path, target="y", client="c", decimal=",")
    assert sorted([*made.x[0][:, 0].tolist(), *made.tests[0].x[:, 0].tolist()]) == pytest.approx(
        [place + place % 10 / 10 for place in range(12)]
    )
    colon = write(
        tmp_path / "t.csv", [(a, b[:1], c) for a, b, c in rows], ("c", "a", "y"), delimiter=":"
    )
    assert from_table(colon, target="y", client="c", separator=":").features == (1,)


def test_empty_columns_and_words_for_empty_entries(tmp_path):
    words = ["", " ", "NA", "n/a", "NaN", "null"]
    rows = [("x", words[row % 6] if row > 5 else row + 0.5, "", row % 2) for row in range(12)]
    path = write(tmp_path / "t.csv", rows, ("c", "a", "b", "y"))
    with pytest.raises(DataError, match=r"column 'a' has 6 empty entries \(the first in row 6"):
        from_table(path, target="y", client="c")
    with pytest.warns(UserWarning, match="column 'b'.*what is empty there becomes 0"):
        made = from_table(path, target="y", client="c", impute="mean")
    assert set(made.x[0][:, 1].tolist()) == {0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_table(path, target="y", client="c", features=["a"], impute=0).features == (1,)


@pytest.mark.parametrize("word", ["None", "NA", "null", "nan"])
def test_a_category_called_as_an_empty_entry_is_asked_about_or_kept(tmp_path, word):
    """Filled without a word, each row of it would be trained as another category."""
    values = [word, "minor", "major"]
    rows = [("x", values[row % 3], row % 2) for row in range(12)]
    path, header = tmp_path / "t.csv", ("c", "a", "y")
    write(path, rows, header)
    with pytest.warns(
        UserWarning, match=f"'a' has '{word}' .4 rows.*categories = .* a = ..{word}'"
    ):
        made = from_table(path, target="y", client="c", impute="median")
    assert made.features == (2,)

    named = {"a": values}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = from_table(path, target="y", client="c", impute="median", categories=named)
    inputs = torch.cat([made.x[0], made.tests[0].x])
    assert inputs.sum(0).tolist() == [4, 4, 4], "each of the three has a column of its own"
    # A later file is read with the categories of the first.
    later = read_inputs(path, made.table)
    assert later.tolist() == [[float(value == one) for one in values] for _, value, _ in rows]


def test_an_index_that_is_no_feature_may_stay(tmp_path):
    rows = [(row, "x", row, row % 2) for row in range(12)]
    path = write(tmp_path / "t.csv", rows, ("", "c", "a", "y"))
    assert from_table(path, target="y", client="c", features=["a"]).features == (1,)


@pytest.mark.parametrize("names", [["true", "false"], ["false", "true"]])
@pytest.mark.parametrize("words", [("true", "false"), ("TRUE", "FALSE"), ("True", "False")])
def test_names_of_true_and_false_are_theirs_in_any_order(names, words, tmp_path):
    """A quarter is true."""
    rows = [("ab"[row % 2], "1", row, words[row // 2 % 4 > 0]) for row in range(48)]
    made = from_table(write(tmp_path / "t.csv", rows), target="y", client="c", class_names=names)
    labels = torch.cat([made.y[made.split >= 0], *(test.y for test in made.tests)])
    assert torch.bincount(labels).tolist() == [12, 36] if names[0] == "true" else [36, 12]


@pytest.mark.parametrize(
    "labels", [("1", "2"), ("10", "20"), ("7", "4711"), ("-1", "1"), ("1.0", "2.0")]
)
def test_labels_of_a_file_are_the_classes(labels, tmp_path):
    path = write(tmp_path / "t.csv", patients(labels=labels))
    options = {"class_names": ["1", "2"]} if "." in labels[0] else {}
    made = from_table(path, target="y", client="c", features=["age"], **options)
    assert made.class_names == tuple(one.removesuffix(".0") for one in labels)
    used = made.split >= 0
    assert torch.equal(made.y[used], made.x[used][:, 0].long() // 2 % 2)


@pytest.mark.parametrize("make", [pd.DataFrame, dict])
@pytest.mark.parametrize("first", [89440000000000000001, -(2**63) - 9, 10**40])
def test_ids_of_more_than_64_bits_keep_their_digits(make, first):
    """Numbers of Python, as a query of a database or of pandas gives them."""
    ids = [first + place % 3 for place in range(24)]
    table = make(
        {"client": ids, "a": list(range(24)), "y": [place // 3 % 2 for place in range(24)]}
    )
    data = coterie.from_table(table, target="y", client="client", features=["a"])
    assert sorted(data.client_names) == sorted({str(one) for one in ids})
