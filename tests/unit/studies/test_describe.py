import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from coterie.data.federation import Federation, TestSet, Truth
from coterie.studies.describe import describe_federation


def federation(x, y, split, *, classes, cluster=None, **options):
    """A federation of a few rows, with the test set it must have."""
    clients = len(x)
    truth = None
    if cluster is not None:
        names = tuple(f"cluster {c}" for c in range(max(cluster) + 1))
        truth = Truth(torch.tensor(cluster), names, tuple(names[c] for c in cluster))
    return Federation(
        x=x, y=y, split=split, tests=(TestSet(x[0], y[0], "test"),), test_of=torch.zeros(clients, dtype=torch.int64),
        ids=torch.arange(clients), population=clients, classes=classes, truth=truth, **options,
    )  # fmt: skip


@pytest.fixture
def images():
    """Two clients of one cluster and one of another, five samples of 8 x 8 pixels; the last is padding."""
    x = torch.arange(3 * 5 * 64).remainder(251).to(torch.uint8).reshape(3, 5, 1, 8, 8)
    y = torch.tensor([[0, 0, 1, 1, 0], [2, 2, 2, 0, 0], [1, 1, 1, 1, 0]])
    split = torch.tensor([[0, 0, 0, 1, -1], [0, 0, 1, 1, -1], [0, 0, 0, 0, -1]])
    return federation(
        x, y, split, classes=3, cluster=[0, 0, 1], name="letters", class_names=("a", "b", "c")
    )


def test_label_counts_are_of_training_samples_only(images):
    """Client 0: two of class 0 and one of class 1; validation and padding are left out."""
    told = describe_federation(images)
    assert told["classes"] == ["a", "b", "c"]
    assert told["labels"] == [[2, 1, 0], [0, 0, 2], [0, 4, 0]]
    assert (told["train"], told["validation"]) == ([3, 2, 4], [1, 2, 0])
    assert told["clusters"] == ["cluster 0", "cluster 1"]


def test_sample_images_are_the_clients_own_pixels(images):
    """The first image of cluster 0 is a sample of class 0 of client 0, pixel by pixel."""
    shown = describe_federation(images)["images"]
    assert [len(cluster) for cluster in shown] == [8, 4]
    raw = base64.b64decode(shown[0][0].removeprefix("data:image/png;base64,"))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(raw))), images.x[0, 0, 0])


def test_samples_show_every_class_before_a_second_of_any(images):
    """Classes 0, 1 and 2 come first, as client 0's samples 0 and 2 and client 1's sample 0."""
    first = describe_federation(images)["images"][0][:3]
    pixels = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(one.split(",")[1])))) for one in first
    ]
    for found, expected in zip(
        pixels, (images.x[0, 0, 0], images.x[0, 2, 0], images.x[1, 0, 0]), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_regression_is_counted_in_bins_and_has_no_images():
    """Targets 0 to 11 fall one into each of the twelve bins of width 11/12."""
    y = torch.arange(12.0).reshape(1, 12, 1)
    told = describe_federation(
        federation(torch.zeros(1, 12, 10), y, torch.zeros(1, 12, dtype=torch.int64), classes=0)
    )
    assert told["labels"] == [[1] * 12]
    assert told["classes"][0] == "0 to 0.917"
    assert (told["images"], told["clusters"]) == ([], [])


def test_color_images_of_floats_are_stretched():
    """Values from -1 to 1 use the whole range from 0 to 255, channels last."""
    x = torch.linspace(-1, 1, 3 * 16).reshape(1, 1, 3, 4, 4)
    told = describe_federation(
        federation(
            x, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), classes=2
        )
    )
    picture = np.asarray(
        Image.open(io.BytesIO(base64.b64decode(told["images"][0][0].split(",")[1])))
    )
    assert picture.shape == (4, 4, 3)
    assert (picture[0, 0, 0], picture[3, 3, 2]) == (0, 255)


def test_the_description_is_plain_json(images):
    """Nothing in it needs a library to be read."""
    assert json.loads(json.dumps(describe_federation(images)))["name"] == "letters"


def test_names_of_clients_and_of_the_numbers_of_an_input_are_told(images):
    assert (
        describe_federation(images)["client_names"],
        describe_federation(images)["features"],
    ) == ([], [])
    named = replace(
        images, client_names=("Oslo", "Lima", "مستشفى"), feature_names=("age", "<b>weight</b>")
    )
    told = json.loads(json.dumps(describe_federation(named)))
    assert told["client_names"] == ["Oslo", "Lima", "مستشفى"]
    assert told["features"] == ["age", "<b>weight</b>"]
