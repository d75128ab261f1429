"""The layout of LEAF: JSON files of users."""

import json

import numpy as np
import pytest
from PIL import Image

from coterie import Split, from_leaf
from coterie.errors import DataError

KEEP = Split(validation_fraction=0)


def table(**sizes) -> dict:
    """Users whose samples are [size, place], with the classes 0 and 1 in turn."""
    data = {
        user: {
            "x": [[size, place + 0.5] for place in range(size)],
            "y": [place % 2 for place in range(size)],
        }
        for user, size in sizes.items()
    }
    return {"users": list(sizes), "num_samples": list(sizes.values()), "user_data": data}


def write(folder, train, test=None, text=None):
    """Write a dataset of LEAF: a table for each file."""
    for part, files in {"train": train, "test": test or []}.items():
        for number, found in enumerate(files):
            (folder / "data" / part).mkdir(parents=True, exist_ok=True)
            (folder / "data" / part / f"all_{number}.json").write_text(text or json.dumps(found))
    return folder


def rows(federation) -> dict[str, tuple[list, list]]:
    """The training and the test inputs of each client, sorted."""
    found = {}
    for row, client in enumerate(federation.client_names):
        own = federation.x[row][federation.split[row] >= 0].tolist()
        found[client] = sorted(own), sorted(federation.tests[federation.test_of[row]].x.tolist())
    return found


def test_each_user_is_a_client_with_the_samples_of_its_own_files(tmp_path):
    # Test files list users in another order, and JSON may write 1.0 as 1.
    first, second = table(zoe=4, bob=5), table(ann=3)
    first["user_data"]["bob"]["x"] = [[5, place] for place in range(5)]
    write(tmp_path, [first, second], [table(ann=2, zoe=2, bob=3)])
    expected = {
        "ann": ([[3, 0.5], [3, 1.5], [3, 2.5]], [[2, 0.5], [2, 1.5]]),
        "bob": ([[5, 0], [5, 1], [5, 2], [5, 3], [5, 4]], [[3, 0.5], [3, 1.5], [3, 2.5]]),
        "zoe": ([[4, 0.5], [4, 1.5], [4, 2.5], [4, 3.5]], [[2, 0.5], [2, 1.5]]),
    }
    made = from_leaf(tmp_path, split=KEEP)
    assert rows(made) == expected
    assert (made.name, made.classes) == (tmp_path.name, 2)
    # The folder of the files will do too.
    assert rows(from_leaf(tmp_path / "data", split=KEEP)) == expected
    own = made.split[0] >= 0
    assert dict(zip(made.x[0][own][:, 1].tolist(), made.y[0][own].tolist(), strict=True)) == {
        0.5: 0,
        1.5: 1,
        2.5: 0,
    }


def test_without_test_files_clients_hold_out_their_own(tmp_path):
    made = from_leaf(write(tmp_path, [table(ann=10, bob=20)]))
    assert [len(test.x) for test in made.tests] == [2, 4]


def test_text_is_coded_by_a_transform_and_targets_that_are_text_are_classes(tmp_path):
    def speak(*lines):
        own = {"x": list(lines), "y": [line[-1] for line in lines]}
        return {"users": ["ROMEO"], "num_samples": [len(lines)], "user_data": {"ROMEO": own}}

    write(tmp_path, [speak("ab", "cb", "ba")], [speak("ca")])
    with pytest.raises(DataError, match=r"user 'ROMEO': input 0 is 'ab'; expected numbers: code"):
        from_leaf(tmp_path)
    made = from_leaf(tmp_path, transform=lambda text: [ord(one) for one in text], split=KEEP)
    assert rows(made) == {"ROMEO": ([[97, 98], [98, 97], [99, 98]], [[99, 97]])}
    assert made.class_names == ("a", "b")
    assert made.tests[0].y.tolist() == [0]


def test_a_transform_gives_pixels_their_shape_or_opens_pictures(tmp_path):
    write(tmp_path, [table(ann=4)], [table(ann=2)])
    made = from_leaf(tmp_path, transform=lambda row: np.reshape(row, (1, 1, 2)))
    assert made.features == (1, 1, 2)
    made = from_leaf(tmp_path, transform=lambda row: Image.new("L", (9, 8), int(10 * row[1])))
    assert made.features == (1, 8, 9)
    assert made.tests[0].x[:, 0, 0, 0].tolist() == [5, 15]


def damaged(change) -> dict:
    found = table(ann=3, bob=3)
    change(found)
    return found


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t["num_samples"].__setitem__(1, 4), "'bob' has 3 inputs and 3 targets, .* says 4"),
        (lambda t: t["user_data"]["bob"]["y"].pop(), "'bob' has 3 inputs and 2 targets"),
        (lambda t: t["num_samples"].pop(), "has 2 users and 1 num_samples"),
        (lambda t: t["user_data"].pop("ann"), "users and user_data differ in 'ann'"),
        (lambda t: t["user_data"].update(eve={}), "users and user_data differ in 'eve'"),
        (
            lambda t: t.update(users=["ann", "bob", "bob"], num_samples=[3, 3, 3]),
            "differ in 'one that is listed twice'",
        ),
        (lambda t: t.pop("users"), "expected a table of users, num_samples, user_data"),
        (lambda t: t.update(users="ann"), "expected lists users and num_samples"),
        (lambda t: t["user_data"]["bob"].pop("x"), "'bob' has no lists x and y"),
        (
            lambda t: t.update(num_samples=[3, 0], user_data={**t["user_data"], "bob": {"x": [], "y": []}}),
            "'bob' has no samples",
        ),
        (lambda t: t["user_data"]["bob"]["y"].__setitem__(1, {"id": 1}), "target 1 is .*'id': 1"),
        (lambda t: t["user_data"]["bob"]["x"].__setitem__(1, [1.0]), "samples of different shapes"),
        (
            lambda t: t["user_data"]["bob"].update(x=[[1.0]] * 3),
            r"user 'ann' has inputs of shape \(2,\), user 'bob' of \(1,\)",
        ),
        (lambda t: t["user_data"]["bob"]["x"].__setitem__(1, None), "samples of different shapes"),
        (lambda t: t["user_data"]["bob"]["x"].__setitem__(1, [1, "b"]), r"'bob': input 1 is .*'b'"),
        (lambda t: t["user_data"]["bob"]["x"].__setitem__(2, [1, None]), "'bob': input 2 is .*None"),
    ],
)  # fmt: skip
def test_a_file_that_says_otherwise_is_refused(tmp_path, change, line):
    with pytest.raises(DataError, match=line) as found:
        from_leaf(write(tmp_path, [damaged(change)], [table(ann=3, bob=3)]))
    assert "\n" not in str(found.value)


def test_users_in_one_part_alone_or_in_two_files_are_refused(tmp_path):
    write(tmp_path / "a", [table(ann=3, bob=3)], [table(bob=2)])
    with pytest.raises(DataError, match=r"'ann' has training samples and no test .*\(1 of 2 users"):
        from_leaf(tmp_path / "a")
    write(tmp_path / "b", [table(ann=3)], [table(ann=2, bob=2, eve=2)])
    with pytest.raises(DataError, match=r"'bob' has test samples and no training .*\(2 of 3 users"):
        from_leaf(tmp_path / "b")
    write(tmp_path / "c", [table(ann=3), table(ann=4)])
    with pytest.raises(DataError, match=r"user 'ann' is in .*all_0\.json and in all_1\.json"):
        from_leaf(tmp_path / "c")


def test_missing_and_unreadable_files_are_one_line(tmp_path):
    with pytest.raises(DataError, match=r"there is no folder .*train; expected LEAF's"):
        from_leaf(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"has no file \*\.json"):
        from_leaf(tmp_path)
    with pytest.raises(DataError, match=r"all_0\.json cannot be read as JSON"):
        from_leaf(write(tmp_path / "d", [{}], text="{"))
