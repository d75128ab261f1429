"""Federations from one's own arrays and PyTorch datasets."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from coterie import Federation, Split, from_arrays, from_dataset, from_datasets
from coterie.data.source import InputPart
from coterie.errors import ConfigError, DataError


def arrays(size: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Inputs whose first feature is the number of the sample, and labels that are its last digit."""
    x = np.stack([np.arange(size), np.zeros(size)], axis=1)
    return x, np.arange(size) % 10


class Pairs(Dataset):
    def __init__(self, pairs: list) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, place: int):
        return self.pairs[place]


def held(federation: Federation, client: int) -> set[int]:
    """The samples a client has, wherever they are used."""
    own = federation.x[client][federation.split[client] >= 0][:, 0].tolist()
    return set(map(int, own)) | set(
        map(int, federation.tests[int(federation.test_of[client])].x[:, 0].tolist())
    )


def test_arrays_with_client_ids_keep_every_sample_at_its_client():
    x, y = arrays()
    owner = np.array(["b"] * 10 + ["a"] * 25 + ["c"] * 5)
    federation = from_arrays(x, y, clients=owner)
    assert held(federation, 0) == set(range(10, 35))  # "a" is the first in sorted order
    assert held(federation, 1) == set(range(10))
    assert held(federation, 2) == set(range(35, 40))
    # 25: 5 tests, 4 validation; 10: 2 and 2; 5: 1 and 1
    assert federation.count_samples("train").tolist() == [16, 6, 3]
    assert federation.count_samples("validation").tolist() == [4, 2, 1]
    assert [len(test.x) for test in federation.tests] == [5, 2, 1]
    assert federation.classes == 10
    assert federation.truth is None
    assert federation.x.dtype == torch.float32


def test_labels_stay_with_their_inputs():
    federation = from_arrays(*arrays(), num_clients=4)
    used = federation.split >= 0
    assert torch.equal(federation.x[used][:, 0].long() % 10, federation.y[used])
    assert all(torch.equal(test.x[:, 0].long() % 10, test.y) for test in federation.tests)


def test_a_given_test_set_serves_everyone_and_nothing_is_held_out():
    x, y = arrays()
    federation = from_arrays(x, y, num_clients=4, test=(x[:6], y[:6]))
    assert len(federation.tests) == 1
    assert federation.tests[0].x[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert int((federation.split >= 0).sum()) == 40


def test_known_clusters_become_the_truth():
    x, y = arrays()
    owner = np.repeat([7, 3, 5, 9], 10)
    by_value = from_arrays(x, y, clients=owner, clusters={3: 1, 5: 0, 7: 1, 9: 2})
    assert by_value.truth is not None
    assert by_value.truth.cluster.tolist() == [1, 0, 1, 2]  # clients 3, 5, 7, 9
    by_order = from_arrays(x, y, clients=owner, clusters=[1, 0, 1, 2])
    assert by_order.compute_fingerprint() == by_value.compute_fingerprint()
    with pytest.raises(DataError, match="clusters has nothing for client 9"):
        from_arrays(x, y, clients=owner, clusters={3: 1, 5: 0, 7: 1})
    with pytest.raises(
        DataError, match="clusters has 3 values; expected one for each of the 4 clients"
    ):
        from_arrays(x, y, clients=owner, clusters=[0, 1, 1])
    with pytest.raises(ConfigError, match="clusters is given without clients"):
        from_arrays(x, y, num_clients=2, clusters=[0, 1])


def test_a_shift_can_be_planted_in_ones_own_images():
    x = np.random.Generator(np.random.Philox(0)).integers(0, 256, (40, 6, 6), dtype=np.uint8)
    federation = from_arrays(
        x,
        np.arange(40) % 2,
        num_clients=4,
        split=Split(shift=[{"kind": "rotation", "degrees": [0, 90]}]),
        normalize="standard",
    )
    assert federation.truth is not None
    assert federation.truth.cluster.tolist() == [0, 0, 1, 1]
    assert federation.origin is not None
    first = int(federation.origin[3, 0])
    np.testing.assert_array_equal(federation.x[3, 0, 0].numpy(), np.rot90(x[first]))
    assert abs(federation.mean[0] - x.mean() / 255) < 1e-4


def test_float_targets_make_a_regression():
    x, y = arrays()
    federation = from_arrays(x, y / 3, num_clients=4)
    assert federation.classes == 0
    assert federation.outputs == 1
    several = from_arrays(x, np.stack([y / 3, y / 2, y], axis=1), num_clients=4)
    assert several.outputs == 3
    assert several.y.shape[2:] == (3,)


def test_a_list_of_datasets_has_one_client_each():
    x, y = (torch.from_numpy(part) for part in arrays())
    federation = from_datasets([TensorDataset(x[:10], y[:10]), TensorDataset(x[10:], y[10:])])
    assert [held(federation, client) for client in (0, 1)] == [set(range(10)), set(range(10, 40))]


def test_a_dataset_with_ids_may_hold_pictures():
    pictures = [(Image.new("RGB", (4, 4), (place, 0, 200)), place % 3) for place in range(12)]
    federation = from_dataset(Pairs(pictures), [place // 6 for place in range(12)], classes=3)
    assert federation.features == (3, 4, 4)
    assert federation.x.dtype == torch.uint8
    assert set(federation.x[0][federation.split[0] >= 0][:, 0, 0, 0].tolist()) <= set(range(6))
    assert set(federation.x[1][federation.split[1] >= 0][:, 2].flatten().tolist()) == {200}


def test_numbers_as_inputs_are_vectors_of_no_axis():
    federation = from_datasets([Pairs([(float(i), 2.0 * i) for i in range(8)])])
    assert federation.features == ()
    assert federation.classes == 0


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ([], "there are no datasets"),
        ([Pairs([])], "dataset 0 is empty"),
        ([Pairs([torch.zeros(2)])], "dataset 0: item 0 is a Tensor; expected a pair"),
        (
            [Pairs([(torch.zeros(2), 0), (torch.zeros(3), 0)])],
            r"inputs of different shapes: \(2,\) and \(3,\)",
        ),
        ([Pairs([(torch.zeros(2), 0)]), Pairs([(torch.zeros(3), 0)])], "different types or shapes"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(datasets, message):
    with pytest.raises(DataError, match=message):
        from_datasets(datasets)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({}, ConfigError, "give either clients .* or num_clients"),
        ({"clients": [0] * 40, "num_clients": 2}, ConfigError, "give either clients"),
        ({"clients": [0] * 39}, DataError, "expected one value for each of the 40 samples"),
        ({"num_clients": 4, "classes": 5}, DataError, "labels from 0 to 9; expected 0 to 4"),
        ({"num_clients": 4, "class_names": ["a"]}, ConfigError, "10 names, one for each class"),
        ({"num_clients": 41}, DataError, "41 clients; the pool has 40 samples: lower num_clients"),
        ({"num_clients": 20}, DataError, "leaves none for training"),
        (
            {"num_clients": 4, "split": {"train": 20}},
            DataError,
            r"4 clients x \d+ samples = \d+; the pool has 40",
        ),
        (
            {"num_clients": 4, "test": (np.zeros((2, 3)), [0, 1])},
            DataError,
            r"training inputs have shape \(2,\)",
        ),
        (
            {"num_clients": 4, "test": (np.zeros((2, 2)), [0, 12])},
            DataError,
            "the test data have labels from 0 to 12",
        ),
        (
            {"num_clients": 4, "split": {"validation_fraction": 1.0}},
            ConfigError,
            "expected a number, 0 or more and below 1",
        ),
        (
            {"num_clients": 4, "split": {"test_fraction": 0.0}},
            DataError,
            "no samples are held out for testing",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, error, message):
    with pytest.raises(error, match=message) as caught:
        from_arrays(*arrays(), **{**change, "split": Split(**change.get("split", {}))})
    assert "\n" not in str(caught.value)


def test_each_fold_of_a_split_is_tested_once():
    """The seed chooses the fold, as it does with `folds` in a study file."""
    x, y = arrays()
    owners = np.repeat(["a", "b"], 20)
    tested = []
    for seed in range(5):
        federation = from_arrays(x, y, clients=owners, split=Split(folds=5, seed=seed))
        assert [len(test.x) for test in federation.tests] == [4, 4]
        tested += [value for test in federation.tests for value in test.x[:, 0].tolist()]
    assert sorted(tested) == list(range(40))


def test_nan_in_the_data_is_found():
    x, y = arrays()
    x[7, 1] = np.nan
    with pytest.raises(DataError, match="first in sample 7"):
        from_arrays(x, y, num_clients=4)


def test_empty_arrays_are_refused():
    with pytest.raises(DataError, match="the pool has 0 samples"):
        from_arrays(np.zeros((0, 2)), np.zeros(0, int), num_clients=2)


class Stream(IterableDataset):
    """Pairs that come one after another and have no places."""

    def __init__(self, pairs: list) -> None:
        self.pairs = pairs

    def __iter__(self):
        return iter(self.pairs)


def test_a_dataset_that_is_only_iterable_is_read_to_its_end():
    pairs = [(torch.tensor([float(place), 0.0]), place % 2) for place in range(12)]
    federation = from_dataset(Stream(pairs), ["b"] * 6 + ["a"] * 6)
    assert [held(federation, client) for client in (0, 1)] == [set(range(6, 12)), set(range(6))]
    assert federation.client_names == ("a", "b")


def test_pictures_of_several_sizes_are_made_equal_by_a_transform():
    labels = ["even", "odd"] * 5
    pictures = [
        (Image.new("RGB", (4 + place % 3, 9), (place, 0, 0)), labels[place]) for place in range(9)
    ]
    with pytest.raises(
        DataError,
        match=r"inputs of different shapes: \(3, 9, 4\) and \(3, 9, 5\); .*transform=lambda",
    ):
        from_datasets([Pairs(pictures)])
    federation = from_datasets([Pairs(pictures)], transform=lambda image: image.resize((4, 4)))
    assert (federation.features, federation.class_names) == ((3, 4, 4), ("even", "odd"))
    own = federation.split[0] >= 0
    assert torch.equal(federation.x[0][own][:, 0, 0, 0].long() % 2, federation.y[0][own])


def test_items_may_be_several_tensors_by_place_or_by_name():
    pairs = [
        ((torch.tensor([place / 2]), torch.tensor([place, 1])), place % 2) for place in range(10)
    ]
    federation = from_datasets([Pairs(pairs)])
    assert federation.parts == (InputPart("", (1,)), InputPart("", (2,), whole=True))
    assert sorted(held(federation, 0)) == sorted(
        int(place / 2) for place in range(10) if place % 2 == 0
    )
    named = [({"age": x[0], "words": x[1]}, y) for x, y in pairs]
    assert from_datasets([Pairs(named)]).parts == (
        InputPart("age", (1,)),
        InputPart("words", (2,), whole=True),
    )
    with pytest.raises(
        DataError, match="dataset 0: the input of item 1 has other parts than the first"
    ):
        from_datasets([Pairs([pairs[0], named[0]])])


def test_a_table_of_datasets_names_the_clients():
    x, y = (torch.from_numpy(part) for part in arrays())
    federation = from_datasets(
        {"west": TensorDataset(x[:10], y[:10]), "east": TensorDataset(x[10:], y[10:])}
    )
    assert federation.client_names == ("east", "west")
    assert held(federation, 1) == set(range(10))
    assert [test.name for test in federation.tests] == ["east", "west"]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            DataLoader(TensorDataset(torch.zeros(3, 2), torch.zeros(3)), 2),
            "is a DataLoader, which makes batches",
        ),
        (
            Pairs([("a word", 0)] * 3),
            "the input of item 0 is 'a word'; expected numbers or a picture",
        ),
        (3, "is a int; expected a dataset: with __len__ and __getitem__, or __iter__"),
        (Pairs([(torch.zeros(2), "a"), (torch.zeros(2), 1)]), "the targets mix text and numbers"),
        (Pairs([(torch.zeros(2), 1), (torch.zeros(2), "a")]), "the targets mix text and numbers"),
        (
            Pairs([(torch.zeros(2), torch.zeros(n)) for n in (1, 2)]),
            r"targets of different shapes: \(1,\) and \(2,\)",
        ),
    ],
)
def test_other_things_than_datasets_are_refused(dataset, message):
    with pytest.raises(DataError, match=message):
        from_dataset(dataset, [0] * 3)


def test_names_reach_the_test_sets_and_the_planted_clusters():
    x, y = arrays()
    federation = from_arrays(x, y, clients=["b", "a"] * 20, clusters={"a": 0, "b": 1})
    assert federation.client_names == ("a", "b")
    assert [test.name for test in federation.tests] == ["a", "b"]
    assert federation.truth is not None
    assert [shift.partition("; ")[2] for shift in federation.truth.shift] == [
        "client a",
        "client b",
    ]
    assert from_arrays(x, y, clients=[0, 1] * 20).client_names == ()


def test_three_rows_are_one_for_each_set_and_two_are_too_few():
    x, y = arrays(43)
    federation = from_arrays(x, y, clients=["large"] * 40 + ["tiny"] * 3)
    assert (
        federation.count_samples("train").tolist(),
        federation.count_samples("validation").tolist(),
    ) == ([26, 1], [6, 1])
    assert [len(test.x) for test in federation.tests] == [8, 1]
    with pytest.raises(
        DataError, match=r"client 'tiny' has 2 samples, .*give it more samples, leave it out, or"
    ):
        from_arrays(x[:-1], y[:-1], clients=["large"] * 40 + ["tiny"] * 2)


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        (
            {"kind": "rotation"},
            "rotation needs uint8 images; arrays has 1 numbers \\+ 1 whole numbers",
        ),
        ({"kind": "visual"}, "visual needs uint8 images"),
        (
            {"kind": "labels", "groups": [[0], [1]]},
            "the targets of arrays are not one class a sample",
        ),
        (
            {"kind": "label-swap", "swaps": [[], [[0, 1]]]},
            "the targets of arrays are not one class a sample",
        ),
        (
            {"kind": "dirichlet-per-client", "concentration_total": 1.0},
            "the targets of arrays are not one class",
        ),
        (
            {"kind": "k-fold"},
            "the targets of arrays are not one class a sample, which a shift of labels needs: leave",
        ),
        ({"kind": "regression-targets"}, "arrays is not a regression problem of one number"),
    ],
)
def test_shifts_that_need_images_or_classes_refuse_other_data_in_one_line(shift, message):
    x = (np.zeros((40, 1)), np.zeros((40, 1), int))
    with pytest.raises(DataError, match=message) as caught:
        from_arrays(x, np.zeros((40, 3), int), num_clients=6, split=Split(shift=[shift]))
    assert "\n" not in str(caught.value)


def test_a_client_with_too_few_samples_is_named():
    x, y = arrays(43)
    owners = ["large"] * 40 + ["tiny"] * 3
    with pytest.raises(
        DataError,
        match="client 'tiny' has 3 samples, and 1 of 2 clients fewer than the 15 that each",
    ):
        from_arrays(x, y, clients=owners, split=Split(train=10))
    with pytest.raises(
        DataError, match="client 'large': labels 0, 1: 40 samples are asked for; the pool has 8 of"
    ):
        from_arrays(
            x,
            y,
            clients=owners,
            split=Split(shift=[{"kind": "labels", "groups": [[0, 1], [5]], "sizes": [1, 1]}]),
        )


def test_deep_pictures_of_a_dataset_are_numbers_and_palettes_are_colors():
    pictures = [(Image.new("I;16", (3, 3), 300 + place), place % 2) for place in range(6)]
    with pytest.warns(UserWarning, match="is uint16 of shape 3 x 3: taken as whole numbers"):
        deep = from_datasets([Pairs(pictures)])
    assert (deep.x.dtype, int(deep.x.max()) >= 300) == (torch.int32, True)
    palette = Image.new("RGB", (3, 3), (200, 10, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    colors = from_datasets([Pairs([(palette, 0), (palette, 1)] * 3)])
    assert colors.x[0, 0, :, 0, 0].tolist() == [200, 10, 30]


@pytest.mark.parametrize("ids", [(1, "1"), ("2.0", 2.0), ("a", 7, "7")])
def test_clients_that_are_one_as_text_are_refused_and_not_joined(ids):
    made = {client: TensorDataset(torch.rand(6, 3), torch.arange(6) % 2) for client in ids}
    one, other = ids[-2:]
    with pytest.raises(DataError, match=f"clients {one!r} and {other!r} are both called '{one}'"):
        from_datasets(made)
    usual = {client: made[client] for client in ids[:-1]}
    usual["another"] = made[ids[-1]]
    with pytest.raises(DataError, match="are both called"):
        from_datasets(usual, test=made)
