"""Datasets of PyTorch, Hugging Face and Flower, read item by item."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from coterie import from_dataset, from_datasets
from coterie._util.mappings import drop_keys
from coterie.errors import ConfigError, DataError


class Items(Dataset):
    """A list as a dataset."""

    def __init__(self, items: list, length: int | None = None) -> None:
        self.items, self.length = items, length

    def __len__(self) -> int:
        return len(self.items) if self.length is None else self.length

    def __getitem__(self, place: int):
        return self.items[place]


def tables(size: int = 12, **more) -> list[dict]:
    """Items as Hugging Face has them; the input is the number of the sample."""
    return [{"pixels": [place + 0.5, 0.0], "label": place % 3, **more} for place in range(size)]


def numbers(federation) -> list[list[float]]:
    """The numbers of the samples of each client, wherever they are used."""
    out = []
    for row in range(len(federation)):
        own = federation.x[row][federation.split[row] >= 0][:, 0].tolist()
        out.append(sorted(own + federation.tests[int(federation.test_of[row])].x[:, 0].tolist()))
    return out


class Flipped(Dataset):
    """Images that are mirrored at random, as an image pipeline does."""

    def __init__(self, size: int = 40, noisy: bool = False) -> None:
        self.x = torch.arange(size * 4).reshape(size, 1, 2, 2) / 8
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int):
        x = self.x[place]
        if torch.rand(()) < 0.5:
            x = x.flip(2)
        return (x + torch.randn_like(x) if self.noisy else x), place % 2


def test_a_random_dataset_is_said_once_and_read_to_the_same_samples():
    message = (
        r"dataset 0: the input of item \d+ differs when it is read again \(and 2 further datasets\)"
        r": the dataset is random, .* LocalTraining\(augment='module:function'\)"
    )
    found = []
    for _ in range(2):
        torch.rand(7)  # the state of PyTorch's own generator changes nothing
        with pytest.warns(UserWarning, match=message) as said:
            found.append(from_datasets([Flipped() for _ in range(3)]).compute_fingerprint())
        assert len(said) == 1
    assert found[0] == found[1]


def test_clients_with_equal_random_datasets_draw_apart():
    with pytest.warns(UserWarning, match="the dataset is random"):
        federation = from_datasets([Flipped(noisy=True) for _ in range(2)])
    assert federation.origin is not None
    places = [row.argsort() for row in federation.origin]
    one, other = (federation.x[row][places[row]] for row in (0, 1))
    assert not torch.equal(one, other)


def test_a_random_target_and_a_random_transform_are_said():
    g = np.random.Generator(np.random.Philox(0))

    class Labels(Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, place: int):
            return torch.zeros(2), int(g.integers(1000)) % 2

    with pytest.warns(UserWarning, match="the target of item 0 differs"):
        from_datasets([Labels()])
    with pytest.warns(UserWarning, match="the input of item 0 differs"):
        from_datasets([Items(list(zip(torch.zeros(9, 2), [0, 1, 2] * 3, strict=True)))],
                      transform=lambda x: x + g.standard_normal())  # fmt: skip


def test_a_transform_of_some_classes_alone_is_noticed():
    """The last 10 of 40 items are random: 16 items, evenly over all, are read again."""

    class Late(Flipped):
        def __getitem__(self, place: int):
            return super().__getitem__(place) if place >= 30 else (self.x[place], place % 2)

    with pytest.warns(UserWarning, match=r"the input of item 3\d differs when it is read again: "):
        from_dataset(Late(noisy=True), num_clients=2)


def test_a_dataset_that_stays_the_same_is_not_called_random():
    # Warnings are errors here. NaN is unequal to itself, and is refused for what it is.
    from_datasets([Items([(torch.tensor([place + 0.5, 1.0]), place % 2) for place in range(50)])])
    with pytest.raises(DataError, match="NaN"):
        from_datasets([Items([(torch.tensor([float("nan")]), place % 2) for place in range(5)])])


def test_a_length_that_lies_is_one_line():
    with pytest.raises(DataError, match=r"dataset 0 has no item 12 \(.*\), and its length is 20"):
        from_datasets([Items([(torch.zeros(2), 0)] * 12, length=20)])

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(2), place % 2) for place in range(9)])

        def __len__(self) -> int:
            return 12

    with pytest.warns(UserWarning, match="has length 12 and yields 9 items; these are used"):
        from_datasets([Stream()])


def test_items_that_are_tables_need_names_only_where_these_could_be_mistaken():
    plain = from_datasets([Items(tables()), Items(tables(9))])
    assert numbers(plain) == [[place + 0.5 for place in range(size)] for size in (12, 9)]
    assert plain.classes == 3
    # A column beside the input is no feature unless it is named.
    with pytest.raises(
        ConfigError, match="has the keys pixels, label, writer; say which are the i"
    ):
        from_datasets([Items(tables(writer=7))])
    named = from_datasets([Items(tables(writer=7))], inputs="pixels")
    assert named.features == (2,)
    both = from_datasets([Items(tables(writer=7.5))], inputs=["pixels", "writer"])
    assert [part.name for part in both.parts] == ["pixels", "writer"]
    other = [{"pixels": item["pixels"], "fine": item["label"]} for item in tables()]
    with pytest.raises(ConfigError, match="has the keys pixels, fine; say which is learned"):
        from_datasets([Items(other)])
    assert from_datasets([Items(other)], target="fine").classes == 3
    with pytest.raises(ConfigError, match="unknown key 'image'"):
        from_datasets([Items(tables())], inputs="image")
    with pytest.raises(ConfigError, match="target is 'label', and dataset 0: item 0 is a pair"):
        from_datasets([Items([(torch.zeros(2), 0)] * 4)], target="label")


def test_an_item_of_three_says_how_several_inputs_are_given():
    with pytest.raises(DataError, match=r"a tuple of 3; .* tuple: \(\(first, second\), target\)"):
        from_datasets([Items([(1.0, 2.0, 0)] * 4)])


def test_parts_of_datasets_of_pytorch_are_clients():
    x = torch.stack([torch.arange(30) + 0.5, torch.zeros(30)], 1)
    whole = TensorDataset(x, torch.arange(30) % 2)
    subset = Subset(whole, [29, 3, 5, 7, 11, 13])
    joined = ConcatDataset([Subset(whole, range(15, 20)), Subset(whole, range(20, 25))])
    federation = from_datasets({"subset": subset, "joined": joined})
    assert federation.client_names == ("joined", "subset")
    assert numbers(federation) == [
        [place + 0.5 for place in range(15, 25)],
        [place + 0.5 for place in (3, 5, 7, 11, 13, 29)],
    ]


class Partitioner:
    """A partitioner of Flower: by number, or by the number and the split of its dataset."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    @property
    def num_partitions(self) -> int:
        return len(self.sizes)

    def load_partition(self, partition_id: int) -> Dataset:
        return Items(tables(self.sizes[partition_id]))


class FederatedDataset:
    """A federated dataset of Flower, which knows its partitions when the first is loaded."""

    def __init__(self, sizes: dict[str, list[int]]) -> None:
        self.sizes, self.partitioners = sizes, {split: Partitioner([]) for split in sizes}

    def load_partition(self, partition_id: int, split: str | None = None) -> Dataset:
        assert split is not None or len(self.sizes) == 1
        own = split or next(iter(self.sizes))
        self.partitioners[own] = Partitioner(self.sizes[own])
        return self.partitioners[own].load_partition(partition_id)

    def load_split(self, split: str) -> Dataset:
        return Items(tables(5 if split == "test" else 50))


def test_partitions_of_flower_are_clients():
    held = FederatedDataset({"train": [9, 12, 6]})
    federation = from_datasets(held, test=held.load_split("test"))
    assert [len(own) for own in numbers(federation)] == [9 + 5, 12 + 5, 6 + 5]
    assert len(federation.tests) == 1
    alone = from_datasets(Partitioner([9, 12]), test=Partitioner([3, 4]))
    assert [len(one.x) for one in alone.tests] == [3, 4]
    with pytest.raises(ConfigError, match="partitions of a, b; expected those of 'train'"):
        from_datasets(FederatedDataset({"a": [3], "b": [3]}))


_PARTITIONERS: dict[str, dict[str, object]] = {
    "ContinuousPartitioner": {"num_partitions": 4, "partition_by": "score", "strictness": 0.5},
    "DirichletPartitioner": {"num_partitions": 4, "partition_by": "label", "alpha": 1.0},
    "DistributionPartitioner": {
        "distribution_array": np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0], [3.0, 2.0]]),
        "num_partitions": 4, "num_unique_labels_per_partition": 2, "partition_by": "label",
        "preassigned_num_samples_per_label": 5,
    },
    "ExponentialPartitioner": {"num_partitions": 4},
    "GroupedNaturalIdPartitioner": {"partition_by": "who", "group_size": 2},
    "IdToSizeFncPartitioner": {"num_partitions": 4, "partition_id_to_size_fn": lambda place: place + 1},
    "IidPartitioner": {"num_partitions": 4},
    "InnerDirichletPartitioner": {"partition_sizes": [100] * 4, "partition_by": "label", "alpha": 1.0},
    "LinearPartitioner": {"num_partitions": 4},
    "NaturalIdPartitioner": {"partition_by": "who"},
    "PathologicalPartitioner": {"num_partitions": 4, "partition_by": "label", "num_classes_per_partition": 2},
    "ShardPartitioner": {"num_partitions": 4, "partition_by": "label", "num_shards_per_partition": 2},
    "SizePartitioner": {"partition_sizes": [100, 50, 150, 100]},
    "SquarePartitioner": {"num_partitions": 4},
}  # fmt: skip


# A warning of pyarrow about how the package sorts.
@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")
@pytest.mark.parametrize("name", _PARTITIONERS)
def test_each_partitioner_of_flower_gives_its_own_rows(name):
    """The package itself, which no extra has: its newest version does not take the newest datasets."""
    partitioners = pytest.importorskip(
        "flwr_datasets.partitioner", reason="no flwr_datasets: it takes no newest datasets"
    )
    datasets = pytest.importorskip("datasets")
    drawn = np.random.default_rng(0)
    rows = datasets.Dataset.from_dict(
        {
            "row": np.arange(400.0),
            "label": drawn.integers(0, 4, 400),
            "score": drawn.normal(size=400),
            "who": [f"c{one}" for one in drawn.integers(0, 5, 400)],
        }
    )
    partitioner = getattr(partitioners, name)(**_PARTITIONERS[name])
    partitioner.dataset = rows
    federation = from_datasets(partitioner, inputs="row", target="label")
    own = [
        sorted(partitioner.load_partition(place)["row"])
        for place in range(partitioner.num_partitions)
    ]
    assert len(own) == len(federation)
    for place, expected in enumerate(own):
        inside = federation.x[place][federation.split[place] >= 0].flatten().tolist()
        held = federation.tests[int(federation.test_of[place])].x.flatten().tolist()
        assert sorted(inside + held) == expected


def test_datasets_of_hugging_face_are_read_by_their_keys():
    datasets = pytest.importorskip("datasets", reason="the extra hub is not installed")
    features = datasets.Features(
        {
            "pixels": datasets.Sequence(datasets.Value("float32")),
            "label": datasets.ClassLabel(names=["cat", "dog", "owl"]),
            "writer": datasets.Value("string"),
        }
    )

    def make(size: int):
        rows = tables(size)
        columns = {key: [row[key] for row in rows] for key in ("pixels", "label")}
        columns["writer"] = [("w1", "w0")[place % 2] for place in range(size)]
        return datasets.Dataset.from_dict(columns, features=features)

    splits = datasets.DatasetDict({"train": make(30), "test": make(7)})
    for form in (splits, splits.with_format("torch"), splits.with_format("numpy")):
        federation = from_dataset(form, "writer", inputs="pixels")
        assert federation.client_names == ("w0", "w1")
        assert federation.class_names == ("cat", "dog", "owl")
        assert federation.tests[0].x[:, 0].tolist() == [1.5, 3.5, 5.5]
        assert federation.tests[1].x[:, 0].tolist() == [0.5, 2.5, 4.5, 6.5]
    train = splits["train"].remove_columns("writer")
    assert from_dataset(train, num_clients=3).class_names == ("cat", "dog", "owl")
    with pytest.warns(UserWarning, match="the splits validation are not used"):
        from_dataset(
            datasets.DatasetDict({**splits, "validation": make(4)}), "writer", inputs="pixels"
        )


def test_named_parts_of_items_come_in_any_order():
    first = [({"a": [float(n)], "b": [n, -n]}, n % 2) for n in range(10)]
    turned = [({"b": x["b"], "a": x["a"]}, y) for x, y in first]
    mixed = [*first[:5], *turned[5:]]
    plain = from_datasets([Items(first), Items(first)])
    for one, other in ([first, turned], [first, mixed]):
        made = from_datasets([Items(one), Items(other)])
        assert made.parts == plain.parts
        assert made.x.tolist() == plain.x.tolist()
    more = [({**x, "c": [0.0]}, y) for x, y in first]
    # A part that one dataset alone has is not left out without a word.
    for datasets in ([first, more], [more, first]):
        with pytest.raises(DataError, match="inputs of different types or shapes"):
            from_datasets(list(map(Items, datasets)))


def pad(items: list[dict]) -> dict[str, torch.Tensor]:
    """A collator that takes what a model takes, and nothing else."""
    assert {key for item in items for key in item} == {"input_ids", "labels"}
    rows = [torch.tensor(item["input_ids"]) for item in items]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


def words(size: int, longest: int) -> list[dict]:
    """Items of unequal length with two columns that could name their clients: a and b, x and y."""
    return [
        {"input_ids": [n + 1] * (1 + n % longest), "labels": n % 2, "user": "ab"[n % 2], "uid": "xy"[n % 2]}
        for n in range(size)
    ]  # fmt: skip


def test_training_and_test_items_that_are_padded_together_name_their_clients_by_keys_of_their_own():
    test = [{**item, "uid": item["user"], "user": "?"} for item in words(8, 3)]
    federation = from_dataset(
        Items(words(20, 5)), "user", collate=pad, test=(Items(test), "uid"), classes=2
    )
    assert federation.client_names == ("a", "b")
    assert federation.features == (5,)
    for row, held in enumerate(federation.tests):
        # The first of an item's numbers is its place, and every second item is of client b.
        assert held.x[:, 0].tolist() == [1 + row, 3 + row, 5 + row, 7 + row]
        own = federation.x[row][federation.split[row] >= 0][:, 0].tolist()
        assert sorted(own) == [n + 1 for n in range(20) if n % 2 == row]


def test_clients_of_training_items_may_be_a_list_where_those_of_test_items_are_a_key():
    names = ["xy"[n % 2] for n in range(20)]
    federation = from_dataset(
        Items([{**item, "user": 0} for item in words(20, 5)]),
        names,
        transform=lambda x: x.float(),
        collate=lambda items: pad([drop_keys(item, {"user"}) for item in items]),
        inputs="input_ids",
        test=(Items(words(8, 3)), "uid"),
    )
    assert [held.x[:, 0].tolist() for held in federation.tests] == [[1, 3, 5, 7], [2, 4, 6, 8]]


def test_an_item_without_a_client_is_named_where_items_are_padded():
    items = words(20, 5)
    items[3]["user"] = None
    with pytest.raises(DataError, match="clients has no value for sample 3"):
        from_dataset(
            Items(items),
            "user",
            collate=lambda rows: pad([drop_keys(r, {"uid"}) for r in rows]),
            inputs="input_ids",
        )


def test_files_of_items_are_padded(tmp_path):
    for name, size in (("train", 20), ("test", 8)):
        items = [{**item, "uid": item["user"]} for item in words(size, 1)]
        pq.write_table(pa.Table.from_pylist(items), tmp_path / f"{name}.parquet")
    files = str(tmp_path / "train.parquet"), tmp_path / "test.parquet"
    federation = from_dataset(files[0], "user", collate=pad, test=(files[1], "uid"), classes=2)
    assert federation.client_names == ("a", "b")
