"""Sources: what becomes of arrays as they come, and where a mistake is."""

import numpy as np
import pandas as pd
import pytest
import torch

from coterie.data.coding import encode_labels
from coterie.data.source import InputPart, Source, make_samples
from coterie.errors import ConfigError, DataError


def test_whole_numbers_stay_whole_up_to_what_floats_hold_exactly():
    edge = 1 << 24
    for kind in (np.int8, np.int16, np.uint16, np.int64, ">i4"):
        x = np.array([[1, -0], [7, 100]], kind)
        assert make_samples(x, [0, 1], None).x.dtype == torch.int32
        assert make_samples(x, [0, 1], None).x.tolist() == x.tolist()
    assert make_samples(torch.tensor([[edge], [-edge]]), [0, 1], None).x.tolist() == [
        [edge],
        [-edge],
    ]
    for far in (edge + 1, -edge - 1):
        with pytest.raises(
            DataError, match=r"whole numbers up to 16,777,217; expected at most 16,777,216.* scale"
        ):
            make_samples([[0], [far]], [0, 1], None)


def test_true_and_false_are_numbers_and_never_an_image():
    flat = make_samples(np.array([[True, False]] * 2), [0, 1], None)
    assert (flat.x.dtype, flat.x.tolist()) == (torch.uint8, [[1, 0], [1, 0]])
    mask = make_samples(np.ones((2, 4, 4), bool), [0, 1], None)
    assert (mask.x.dtype, mask.x.shape, float(mask.x.max())) == (torch.float32, (2, 4, 4), 1.0)


def test_bytes_are_images_where_they_have_two_or_three_axes():
    assert Source.from_arrays(np.zeros((2, 5, 5), np.uint8), [0, 1]).is_images
    assert Source.from_arrays(np.zeros((2, 3, 5, 5), np.uint8), [0, 1]).is_images
    flat = Source.from_arrays(np.full((2, 5), 9, np.uint8), [0, 1])
    assert not flat.is_images
    assert flat.train.x.tolist() == [[9] * 5] * 2


@pytest.mark.parametrize(
    ("y", "classes", "kind", "shape", "found"),
    [
        ([0, 2, 1], None, torch.int64, (3,), 3),
        ([[0], [2], [1]], None, torch.int64, (3,), 3),
        ([True, False, True], None, torch.int64, (3,), 2),
        ([0.0, 2.0, 1.0], 3, torch.int64, (3,), 3),
        ([0, 2, 1], 0, torch.float32, (3,), 0),
        ([0.5, 2, 1], None, torch.float32, (3,), 0),
        (np.zeros((3, 2)), None, torch.float32, (3, 2), 0),
        (np.zeros((3, 4), int), None, torch.int64, (3, 4), 0),
        (np.zeros((3, 4), int), 0, torch.int64, (3, 4), 0),
        (np.zeros((3, 4), bool), None, torch.int64, (3, 4), 0),
        (np.zeros((3, 8, 8), np.uint8), None, torch.int64, (3, 8, 8), 0),
        (pd.Series([1, 0, 1], dtype="Int64"), None, torch.int64, (3,), 2),
    ],
)
def test_targets_of_any_shape_keep_their_kind(y, classes, kind, shape, found):
    source = Source.from_arrays(np.zeros((3, 2)), y, classes=classes)
    assert (source.train.y.dtype, tuple(source.train.y.shape), source.classes) == (
        kind,
        shape,
        found,
    )
    assert source.train.y.tolist() == np.asarray(y).reshape(shape).tolist()


def test_labels_of_text_become_named_classes_in_sorted_order():
    with pytest.warns(
        UserWarning, match="y is 'bee' in the test data alone: a class that no client"
    ):
        source = Source.from_arrays(
            np.zeros((4, 1)), ["é", "cat", "dog", "cat"], test=(np.zeros((1, 1)), ["bee"])
        )
    assert source.class_names == ("bee", "cat", "dog", "é")
    assert source.train.y.tolist() == [3, 1, 2, 1]
    assert source.test.y.tolist() == [0]
    given = Source.from_arrays(
        np.zeros((2, 1)), ["no", "yes"], class_names=["yes", "no", "perhaps"]
    )
    assert (given.classes, given.train.y.tolist()) == (3, [1, 0])
    categories = pd.Series(
        ["low", "high"], dtype=pd.CategoricalDtype(["low", "middle", "high"], ordered=True)
    )
    assert Source.from_arrays(np.zeros((2, 1)), categories).class_names == ("low", "middle", "high")
    per_token, names = encode_labels([[["N", "V"], ["V", "."]]])
    assert (per_token[0].tolist(), names) == ([[1, 2], [2, 0]], (".", "N", "V"))


@pytest.mark.parametrize(
    ("y", "names", "message"),
    [
        (["a", None], (), "y has no label in sample 1; .*fill or drop it"),
        (["a", float("nan")], (), "y has no label in sample 1"),
        (
            np.array(["a", 3], object),
            (),
            "y has 3, which is no text, among labels that are in sample 1",
        ),
        (["a", "b"], ("a", "c"), "y has the label 'b'; expected one of class_names: a, c"),
        (np.zeros((2, 3), int), (), "one class for each sample: leave classes out"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(y, names, message):
    with pytest.raises(DataError, match=message) as caught:
        Source.from_arrays(
            np.zeros((2, 1)),
            y,
            class_names=names,
            classes=None if names or isinstance(y, list) else 2,
        )
    assert "\n" not in str(caught.value)


def test_clients_keep_their_names_in_sorted_order_whatever_the_letters():
    source = Source.from_arrays(
        np.zeros((4, 1)), [0, 1, 0, 1], clients=["Zürich", "Åre", "東京", "Zürich"]
    )
    assert source.client_names == ("Zürich", "Åre", "東京")
    assert source.train.columns["client"].tolist() == [0, 1, 2, 0]
    assert Source.from_arrays(np.zeros((3, 1)), [0, 1, 0], clients=[2, 0, 1]).client_names == ()
    assert Source.from_arrays(np.zeros((3, 1)), [0, 1, 0], clients=[20, 3, 3]).client_names == (
        "3",
        "20",
    )
    assert Source.from_arrays(
        np.zeros((2, 1)), [0, 1], clients=pd.Categorical(["b", "a"])
    ).client_names == ("a", "b")


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (["a", None], "clients has no value for sample 1; fill it, or drop the sample"),
        ([0.0, float("nan")], "clients has no value for sample 1"),
        (["a", float("nan")], "clients has no value for sample 1"),
        (["a", " "], "clients has no value for sample 1"),
        (
            np.array(["a", 3], object),
            "clients mixes int and str; expected values that can be sorted: make all text",
        ),
        (["a"], "expected one value for each of the 2 samples"),
    ],
)
def test_clients_that_cannot_be_numbered_are_refused(clients, message):
    with pytest.raises(DataError, match=message):
        Source.from_arrays(np.zeros((2, 1)), [0, 1], clients=clients)


def test_a_mistake_is_named_by_client_and_column():
    table = pd.DataFrame({"age": [1.0, 2.0], "pulse": [60.0, float("nan")]})
    with pytest.raises(
        DataError, match=r"first in 'pulse' in sample 1, of client 'north'\); fill or drop"
    ):
        Source.from_arrays(table, [0, 1], clients=["south", "north"])
    with pytest.raises(
        DataError, match=r"targets \(first in sample 0, of client 1\); drop those samples"
    ):
        Source.from_arrays(np.zeros((2, 1)), [float("inf"), 0.0], clients=[1, 0])
    with pytest.raises(
        DataError, match=r"labels from -1 to 1; .*first other one is in sample 1, of client 'b'"
    ):
        Source.from_arrays(np.zeros((2, 1)), [1, -1], clients=["a", "b"], classes=2)


def test_several_tensors_are_packed_one_after_another_and_images_among_them_normalized():
    """Worked by hand: 255 is 1 and (1 - 0.5) / 0.5 = 1; 0 becomes -1."""
    image = np.zeros((3, 2, 2), np.uint8)
    image[1] = 255
    x = {
        "image": image,
        "age": np.array([0.5, 1.5, 2.5]),
        "words": np.array([[1, 2], [3, 4], [5, 6]]),
    }
    source = Source.from_arrays(
        x, [0, 1, 0], test=({key: value[:1] for key, value in x.items()}, [1])
    )
    half = {"mean": (0.5,), "std": (0.5,)}
    assert source.parts == (
        InputPart("image", (1, 2, 2), **half),
        InputPart("age", ()),
        InputPart("words", (2,), whole=True),
    )
    assert source.train.x.tolist() == [
        [-1, -1, -1, -1, 0.5, 1, 2],
        [1, 1, 1, 1, 1.5, 3, 4],
        [-1, -1, -1, -1, 2.5, 5, 6],
    ]
    assert source.test.x.tolist() == source.train.x[:1].tolist()
    assert (
        source.input_description
        == "image: 1 x 2 x 2 numbers + age: 1 numbers + words: 2 whole numbers"
    )
    unnamed = Source.from_arrays((np.zeros((3, 2)), np.ones((3, 1), int)), [0, 1, 0])
    assert unnamed.parts == (InputPart("", (2,)), InputPart("", (1,), whole=True))


def test_images_for_testing_are_normalized_by_those_for_training():
    """Half of the pixels are 0 and half 255: mean and deviation 0.5; the test image alone would have others."""
    train = np.repeat(np.array([0, 255], np.uint8), 8).reshape(4, 2, 2)
    source = Source.from_arrays(
        (train, np.zeros(4)), [0, 1] * 2, test=((train[:1], np.zeros(1)), [0]), normalize="standard"
    )
    assert source.test.x.tolist() == [[-1, -1, -1, -1, 0]]


def test_named_parts_of_a_test_set_come_in_any_order():
    image = np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2)
    a, b = np.array([[1.5], [2.5]]), np.array([[3], [4]])
    x = {"image": image, "a": a, "b": b}
    # The image of the test set, all of 0, is normalized by the training images: all parts move.
    held = {"b": b + 10, "a": a + 10, "image": image * 0}
    source = Source.from_arrays(x, [0, 1], test=(held, [1, 0]), normalize="standard")
    assert [part.name for part in source.parts] == ["image", "a", "b"]
    mean, std = image.mean() / 255, image.std() / 255
    assert source.test.x[:, 4:].tolist() == [[11.5, 13], [12.5, 14]]
    assert torch.allclose(source.test.x[:, :4], torch.tensor(-mean / std).float(), atol=0.02)
    with pytest.raises(DataError, match="test inputs are b: 1 whole numbers; training inputs are"):
        Source.from_arrays(x, [0, 1], test=({"b": b}, [1, 0]))
    with pytest.raises(DataError, match=r"test inputs are image: .* c: 1 numbers; training inputs"):
        Source.from_arrays(x, [0, 1], test=({**x, "c": a}, [1, 0]))


@pytest.mark.parametrize(
    ("x", "test", "message"),
    [
        (
            (np.zeros((3, 2)), np.zeros((2, 2))),
            None,
            r"the parts of x hold \[3, 2\] samples; expected as many in each",
        ),
        (
            {"a": np.zeros((3, 2))},
            {"a": np.zeros((3, 1))},
            "test inputs are a: 1 numbers; training inputs are a: 2",
        ),
        (
            {"a": np.zeros((3, 2))},
            np.zeros((3, 2)),
            "test inputs are one tensor; training inputs are a: 2 numbers",
        ),
        ({"a": np.array(["b"] * 3)}, None, r"x\['a'\] has type <U1; expected numbers"),
        (
            [[1, 2], [3], [4, 5]],
            None,
            "x has samples of different shapes .*; make them equal, such as by padding",
        ),
        (
            pd.DataFrame({"a": ["b"] * 3}),
            None,
            "expected numbers: coterie.from_table reads tables with text",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, test, message):
    with pytest.raises(DataError, match=message):
        Source.from_arrays(x, [0, 1, 0], test=None if test is None else (test, [0, 1, 0]))


def test_names_of_classes_are_as_many_as_the_classes():
    with pytest.raises(ConfigError, match="expected 3 names, one for each class"):
        Source.from_arrays(np.zeros((3, 1)), [0, 1, 2], class_names=["a"])
    assert Source.from_arrays(np.zeros((2, 1)), [0, 1], class_names=["a", "b", "c"]).classes == 3


def test_numbers_for_training_and_for_testing_are_of_one_type():
    whole, floats = np.ones((3, 2), int), np.full((2, 2), 0.5)
    for x, held in ((whole, floats), (floats, whole)):
        source = Source.from_arrays(
            x, np.zeros((len(x), 2)), test=(held, np.zeros((len(held), 2), int))
        )
        assert [one.x.dtype for one in (source.train, source.test)] == [torch.float32] * 2
        assert [one.y.dtype for one in (source.train, source.test)] == [torch.float32] * 2
    images = np.zeros((3, 4, 4), np.uint8)
    with pytest.raises(
        DataError, match=r"training inputs are torch.uint8, test inputs torch.float32; make both"
    ):
        Source.from_arrays(images, [0, 1, 1], test=(images / 255, [0] * 3))
    with pytest.raises(
        DataError, match=r"targets are \('int64', \(4,\)\), test targets \('int64', \(5,\)\); make"
    ):
        Source.from_arrays(whole, np.zeros((3, 4), int), test=(whole, np.zeros((3, 5), int)))


def test_a_table_names_the_features():
    assert Source.from_arrays(pd.DataFrame({"a": [1.0], "b": [2.0]}), [0]).feature_names == (
        "a",
        "b",
    )
    assert Source.from_arrays(np.zeros((1, 2)), [0], feature_names=["a", "b"]).feature_names == (
        "a",
        "b",
    )
    with pytest.raises(ConfigError, match="expected 2, one for each entry"):
        Source.from_arrays(np.zeros((1, 2)), [0], feature_names=["a"])
