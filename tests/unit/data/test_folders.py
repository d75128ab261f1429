"""Folders of images by client and class."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coterie import from_folder
from coterie.errors import ConfigError, DataError


def picture(path: Path, value: int, size=(6, 4), mode="RGB") -> None:
    """A picture of one value in every pixel; the size is width x height, as Pillow has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(
        mode, size, value if mode in ("L", "I;16") else (value, 0, 9) if mode == "RGB" else value
    ).save(path)


@pytest.fixture
def folder(tmp_path):
    """Two clients; "Åre" has no dogs. The red of each picture is its number."""
    number = iter(range(100))
    for client, labels in {"Zürich": ["cat", "dog"], "Åre": ["cat"]}.items():
        for label in labels:
            for place in range(6):
                picture(tmp_path / "pets" / client / label / f"{place}.png", next(number))
    return tmp_path / "pets"


def test_folders_name_clients_and_classes(folder):
    (folder / "Åre" / "cat" / "notes.txt").write_text("no picture")
    (folder / ".hidden").mkdir()
    made = from_folder(folder)
    assert (made.name, made.client_names, made.class_names) == (
        "pets",
        ("Zürich", "Åre"),
        ("cat", "dog"),
    )
    assert (made.x.dtype, made.features) == (torch.uint8, (3, 4, 6))
    for client, numbers, label in (
        (0, range(12), lambda red: red >= 6),
        (1, range(12, 18), lambda red: False),
    ):
        own = made.split[client] >= 0
        red = torch.cat([made.x[client][own], made.tests[client].x])[:, 0, 0, 0].tolist()
        labels = torch.cat([made.y[client][own], made.tests[client].y]).tolist()
        assert sorted(red) == list(numbers)
        assert labels == [int(label(value)) for value in red]


def test_pictures_of_several_sizes_are_resized_or_transformed(folder):
    picture(folder / "Åre" / "cat" / "large.jpg", 200, size=(30, 20))
    with pytest.raises(
        DataError, match=r"pictures of 2 sizes, such as \(3, 4, 6\) and \(3, 20, 30\); .*size=64"
    ):
        from_folder(folder)
    assert from_folder(folder, size=8).features == (3, 8, 8)
    assert from_folder(folder, size=(4, 8)).features == (3, 4, 8)
    assert from_folder(folder, transform=lambda image: image.resize((5, 7))).features == (3, 7, 5)
    numbers = from_folder(
        folder, transform=lambda image: np.asarray(image.resize((5, 7)), np.float32).mean((0, 1))
    )
    assert (numbers.x.dtype, numbers.features) == (torch.float32, (3,))


def test_gray_pictures_stay_gray_unless_others_have_colors(tmp_path):
    for place in range(5):
        picture(tmp_path / "a" / "x" / f"{place}.png", place, mode="L")
    assert from_folder(tmp_path).features == (1, 4, 6)
    picture(tmp_path / "a" / "x" / "clear.png", (7, 8, 9, 0), mode="RGBA")
    mixed = from_folder(tmp_path)
    assert mixed.features == (3, 4, 6)
    own = torch.cat([mixed.x[0][mixed.split[0] >= 0], mixed.tests[0].x])[:, :, 0, 0].tolist()
    assert sorted(own) == [[value] * 3 for value in range(5)] + [[7, 8, 9]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: (f / "Åre/cat/0.png").write_bytes(b"x"),
            "0.png cannot be read as a picture .*replace or remove it",
        ),
        (
            lambda f: picture(f / "Åre/cat/deep.png", 300, mode="I;16"),
            "deep.png has more than 8 bits .*transform=",
        ),
        (
            lambda f: (f / "Malmö").mkdir(),
            "client 'Malmö' has no pictures in folders of classes; expected Malmö/CLASS",
        ),
        (
            lambda f: picture(f / "Malmö/1.png", 3),
            "client 'Malmö' has no pictures in folders of classes",
        ),
    ],
)
def test_folders_that_cannot_be_used_are_refused(folder, spoil, message):
    spoil(folder)
    with pytest.raises(DataError, match=message):
        from_folder(folder)


def test_known_clusters_of_clients_become_the_truth(folder):
    made = from_folder(folder, clusters={"Åre": 0, "Zürich": 1})
    assert made.truth is not None
    assert made.truth.cluster.tolist() == [1, 0]


def test_classes_can_be_named_so_that_machines_agree(folder):
    assert from_folder(folder, class_names=["dog", "cat", "cow"]).classes == 3
    with pytest.raises(
        DataError, match="client 'Zürich' has a folder 'dog'; expected one of the classes cat, cow"
    ):
        from_folder(folder, class_names=["cat", "cow"])


def test_a_folder_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"there is no folder .*none; expected one with a folder of pictures"
    ):
        from_folder(tmp_path / "none")
    with pytest.raises(DataError, match=r"has no pictures; expected .*/CLIENT/CLASS/picture.png"):
        from_folder(tmp_path)
    with pytest.raises(ConfigError, match="size and transform are both given"):
        from_folder(tmp_path, size=3, transform=lambda image: image)


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("loop", "loop"),
        ("gone", "nowhere"),
        ("all", "."),
        ("Åre/loop", "loop"),
        ("Åre/up", ".."),
        ("Åre/same", "../Åre"),
    ],
)
def test_a_link_in_a_circle_or_to_nothing_is_no_client_and_no_class(folder, place, target):
    (folder / place).symlink_to(target)
    with pytest.raises(DataError, match=rf"{place} is a link to '{target}', which is not there or"):
        from_folder(folder)


def test_a_link_to_a_folder_elsewhere_is_a_client(folder, tmp_path):
    (folder / "Zürich").rename(tmp_path / "elsewhere")
    (folder / "Zürich").symlink_to(tmp_path / "elsewhere")
    assert from_folder(folder).client_names == ("Zürich", "Åre")
