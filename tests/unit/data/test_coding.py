"""Ids of clients stay the text they are, and classes are the labels that occur, with their names."""

import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import LabelEncoder

import coterie
from coterie import from_arrays, from_dataset, from_datasets
from coterie.data.coding import code_targets, number_clients
from coterie.errors import ConfigError, DataError

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
IDS = TEXT.filter(lambda text: bool(text.strip()))


@settings(deadline=None)
@given(st.lists(IDS | st.sampled_from(["1.1", "1.10", "1e5", "10e4", "007", "7", "NA", "nan"])))
def test_ids_come_back_as_the_text_they_were(ids):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "clients .* differ in spaces")
        columns, names = number_clients(ids, len(ids))
    assert list(names) == sorted(set(ids))
    assert [names[code] for code in columns["client"].tolist()] == ids


@settings(deadline=None)
@given(st.lists(st.integers(-(10**25), 10**25), min_size=1))
def test_whole_numbers_of_any_size_are_clients_of_their_own(ids):
    columns, names = number_clients(ids, len(ids))
    found = sorted(set(ids))
    assert names == (() if found == list(range(len(found))) else tuple(map(str, found)))
    assert [found[code] for code in columns["client"].tolist()] == ids


@pytest.mark.parametrize("kind", [list, np.array, pd.Series])
@pytest.mark.parametrize("ids", [[False, True] * 10, [False] * 20, [True] * 20])
def test_true_and_false_are_ids_with_names(ids, kind):
    """Python takes False and True for equal to 0 and 1, which need no names."""
    found = tuple(sorted(set(map(str, ids))))
    federation = from_arrays(torch.rand(20, 2), torch.arange(20) // 10, clients=kind(ids))
    assert federation.client_names == found
    table = pd.DataFrame({"x": np.arange(20) / 7, "y": ["no", "yes"] * 10, "s": ids})
    assert coterie.from_table(table, target="y", client="s").client_names == found
    owned = {one: [(torch.rand(2), place % 2) for place in range(8)] for one in set(ids)}
    assert from_datasets(owned).client_names == found


def test_true_and_false_are_no_test_samples_of_the_clients_0_and_1():
    x, y = torch.rand(20, 2), torch.arange(20) // 10
    with pytest.raises(DataError, match="client 'False' has test samples and no training samples"):
        from_arrays(x, y, clients=[0, 1] * 10, test=(x + 1, y, [False, True] * 10))
    with pytest.raises(DataError, match="client '0' has test samples and no training samples"):
        from_arrays(x, y, clients=[False, True] * 10, test=(x + 1, y, [0, 1] * 10))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, "1"], "clients mixes int and str; expected values that can be sorted: make all text"),
        ([8.9e19, 8.9e19 + 1], "has the float 8.9e[+]19, at which several whole numbers are one"),
        ([b"a", b"b"], "clients are bytes, such as b'a'; decode them"),
        ([{}, {}], "clients are values of type dict; expected values that can be sorted"),
        (["a", " "], "clients has no value for sample 1"),
        (["a", float("nan")], "clients has no value for sample 1"),
        (["a", None], "clients has no value for sample 1"),
    ],
)
def test_ids_that_cannot_be_told_apart_are_refused(ids, message):
    with pytest.raises(DataError, match=message):
        number_clients(ids, 2)


@pytest.mark.parametrize(
    "ids", [["Lund", "Lund "], ["Åre", "A\u030are"], ["a b", "a  b"], ["Lund", "LUND"]]
)
def test_two_clients_that_look_the_same_are_named(ids):
    with pytest.warns(UserWarning, match="differ in spaces, in case or in how accents are written"):
        assert len(number_clients(ids, 2)[1]) == 2


@settings(deadline=None)
@given(st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=40, unique=True), st.data())
def test_labels_that_occur_are_the_classes(values, data):
    """As scikit-learn's LabelEncoder numbers them; without names where they are the numbers from 0."""
    more = data.draw(st.lists(st.sampled_from(values), max_size=20))
    labels = [*values, *more]
    [found, held], names, classes = code_targets([np.array(labels), np.array(more, int)])
    encoder = LabelEncoder().fit(labels)
    assert classes == len(encoder.classes_)
    assert np.asarray(found).tolist() == encoder.transform(labels).tolist()
    assert np.asarray(held).tolist() == [encoder.classes_.tolist().index(one) for one in more]
    numbered = encoder.classes_.tolist() == list(range(classes))
    assert names == (() if numbered else tuple(map(str, encoder.classes_.tolist())))


@settings(deadline=None)
@given(st.permutations(["7", "4711", "100000"]))
def test_class_names_that_are_labels_may_have_any_order(names):
    labels = [100000, 7, 4711, 7]
    for kind in (np.int64, np.float64, object):
        [found], told, classes = code_targets([np.array(labels, kind)], None, names)
        assert (told, classes) == (tuple(names), 3)
        assert [int(names[code]) for code in found] == labels


@pytest.mark.parametrize("names", [["true", "false"], ["FALSE", "True"]])
@pytest.mark.parametrize("values", [[True, False, False], [1, 0, 0]])
def test_true_and_false_are_coded_by_name(names, values):
    [found], _, _ = code_targets([values], None, names)
    assert [names[code].lower() == "true" for code in found] == [bool(one) for one in values]


def test_names_that_are_no_labels_are_those_of_the_numbers_from_0():
    assert code_targets([[True, False]], None, ["no", "yes"])[0][0].tolist() == [1, 0]
    assert code_targets([[1, 0, 1]], None, ["no", "yes", "unknown"])[2] == 3
    with pytest.raises(ConfigError, match=r"'no', 'yes'\).*expected 3 names.*or the labels"):
        code_targets([[1, 2]], None, ["no", "yes"])
    with pytest.raises(DataError, match="has the label 3; expected one of 1, 2"):
        code_targets([[1, 2], [3]])
    with pytest.raises(DataError, match="has the label 0; expected one of 1, 2A: name all"):
        code_targets([[1, 0]], None, ["1", "2A"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.0, 1.0], "y has the two numbers 0.0 and 1.0 alone, .*classes = 2 for classes, or clas"),
        ([2.0, 1.0], r'numbers 1.0 and 2.0 .*class_names = \["1", "2"\] for classes'),
        ([[0.5], [2.5]], "numbers 0.5 and 2.5 .*make them text for classes, or classes = 0"),
    ],
)
def test_floats_of_two_values_are_asked_about(values, message):
    with pytest.raises(DataError, match=message):
        code_targets([np.array(values * 4)])
    assert code_targets([np.array(values * 4)], 0)[2] == 0
    assert (
        code_targets([np.array([*values, values[0], [7.5] if values[0] == [0.5] else 7.5])])[2] == 0
    )


def test_what_cannot_be_learned_or_is_too_much_is_said():
    with pytest.warns(UserWarning, match="y is 3 in all samples, which leaves nothing to learn"):
        assert code_targets([[3, 3, 3]])[1:] == (("3",), 1)
    with pytest.warns(UserWarning, match=r"y is 2.5 in all samples"):
        code_targets([[2.5, 2.5]])
    assert code_targets([[3, 3, 3]], 5)[2] == 5
    with pytest.raises(
        DataError,
        match=r"1,001 different whole numbers, from 0 to 2,000.*classes = 0 .*classes = 2001",
    ):
        code_targets([list(range(0, 2001, 2))])
    with pytest.raises(DataError, match="y is text; expected numbers, as classes = 0"):
        code_targets([["a", "b"]], 0)
    with pytest.raises(ConfigError, match=r"class_names is .*expected none for a regression"):
        code_targets([[1, 2]], 0, ["a", "b"])
    with pytest.raises(ConfigError, match="expected 3, one for each class"):
        code_targets([[0, 1]], 3, ["a", "b"])


@pytest.mark.full
@pytest.mark.parametrize("first", [[0, 1], [1, 2], [10, 20], [7, 100000], ["no", "yes"], [-1, 1]])
def test_the_coding_of_two_classes_changes_no_number(first):
    """Metrics of the same samples, whatever the two labels are called."""
    x = np.random.default_rng(0).normal(size=(120, 3)).astype("f4")
    ill = (x[:, 0] > 0).astype(int)
    settings = coterie.Settings(rounds=3, metrics=["brier", "auroc", "f1", "average_precision"])

    def measure(y):
        made = from_arrays(x, y, clients=np.arange(120) % 3)
        assert made.classes == 2
        run = coterie.simulate(made, coterie.FedAvg(), model="linear", settings=settings, seed=0)
        return run.metrics.query("split == 'test'")["value"].to_numpy()

    np.testing.assert_array_equal(measure(np.array(first)[ill]), measure(ill))


def test_every_way_in_codes_labels_alike():
    x, y = torch.arange(24.0)[:, None], [10, 20] * 12
    pairs = [(x[place], y[place]) for place in range(24)]
    made = [
        from_arrays(x, torch.tensor(y), num_clients=2),
        from_dataset(pairs, ["a", "b"] * 12),
        from_datasets({"a": pairs[:12], "b": pairs[12:]}),
        coterie.from_table(pd.DataFrame({"x": x[:, 0].numpy(), "y": y}), target="y", num_clients=2),
    ]
    for one in made:
        assert (one.classes, one.class_names) == (2, ("10", "20"))
        used = one.split >= 0
        assert (one.y[used] == one.x[used][:, 0] % 2).all()


@settings(max_examples=30, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(1, 40))
def test_constant_columns_scale_to_zero(value, rows):
    """And others as scikit-learn's StandardScaler scales them."""
    from sklearn.preprocessing import StandardScaler

    from coterie.data.preparation import ColumnPreparation

    column = ColumnPreparation("a", 0, scale=True)
    fitted = column.fit(np.full((rows, 1), value))
    assert fitted is not None
    assert (value - fitted[1]) / fitted[2] == 0
    assert fitted[2] == 1
    nearly = np.where(np.arange(rows) % 2, value, np.nextafter(value, np.inf))[:, None]
    other = np.arange(rows + 2.0)[:, None] + value
    for values in (nearly, other):
        found = column.fit(values)
        assert found is not None
        expected = StandardScaler().fit(values)
        if expected.scale_ is not None and values is other:
            assert found[1:] == pytest.approx((expected.mean_[0], expected.scale_[0]), rel=1e-9)
        assert np.abs((values - found[1]) / found[2]).max() < 10


def test_a_few_whole_numbers_as_floats_are_said_to_be_no_classes():
    """A column of whole numbers becomes one of floats by a gap, or of decimals in a database."""
    targets = np.array([0.0, 1.0, 2.0] * 5)
    said = "has the numbers 0, 1, 2 alone, as floats: .* for classes say classes = 3$"
    with pytest.warns(UserWarning, match=f"^y {said}"):
        _, names, classes = code_targets([targets])
    assert (names, classes) == ((), 0)
    table = pd.DataFrame({"x": np.arange(15.0), "y": [Decimal(place % 3) for place in range(15)]})
    with pytest.warns(UserWarning, match=f"^target 'y' {said}"):
        assert coterie.from_table(table, target="y", num_clients=1).classes == 0
    assert coterie.from_table(table, target="y", num_clients=1, classes=3).classes == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code_targets([targets], classes=0)
        assert code_targets([targets], classes=3)[2] == 3
        code_targets([np.arange(11.0).repeat(9)])  # as many as no class has names for
        code_targets([np.array([1.0, 2.5, 4.0]).repeat(9)])
        code_targets([np.arange(4.0)])  # a few samples
    with pytest.warns(UserWarning, match=r'for classes say class_names = \["1", "5", "9"\]$'):
        code_targets([np.array([1.0, 5.0, 9.0]).repeat(5)])
