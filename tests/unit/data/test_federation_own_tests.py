"""Each client's own test set, by every way data come in."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from coterie import (
    DataConfig,
    FedAvg,
    Federation,
    Settings,
    Source,
    Split,
    from_arrays,
    from_dataset,
    from_datasets,
    from_folder,
    simulate,
)
from coterie.data.build import build_federation, build_from_sources
from coterie.errors import ConfigError, DataError
from coterie.rng import Rng

# Clients in another order than their names, with test sets of different sizes. The first entry of
# an input numbers the samples, so that each can be found again.
NAMES = ("lund", "åre", "boden")
SIZES = {"lund": 5, "åre": 3, "boden": 4}


def samples(start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.stack([np.arange(start, start + size) + 0.5, np.zeros(size)], axis=1)
    return x, np.arange(start, start + size) % 2


TRAIN = {name: samples(100 * place, 20) for place, name in enumerate(NAMES)}
TEST = {name: samples(1000 + 100 * place, SIZES[name]) for place, name in enumerate(NAMES)}


def joined(by_client: dict) -> tuple[np.ndarray, np.ndarray, list[str]]:
    owners: list[str] = []
    for name, (_, y) in by_client.items():
        owners += [name] * len(y)
    parts = list(by_client.values())
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), owners


def tensors(by_client: dict) -> dict:
    return {
        name: TensorDataset(torch.tensor(x), torch.tensor(y)) for name, (x, y) in by_client.items()
    }


def check_own_tests(federation: Federation) -> None:
    """Every client has its own test samples, all of them and in order, and holds out none."""
    assert federation.client_names == ("boden", "lund", "åre")
    for row, name in enumerate(federation.client_names):
        test = federation.tests[int(federation.test_of[row])]
        x, y = TEST[name]
        torch.testing.assert_close(test.x, torch.tensor(x).float(), rtol=0, atol=0)
        assert test.y.tolist() == y.tolist()
        assert test.name == name
        own = federation.x[row][federation.split[row] >= 0][:, 0]
        assert sorted(own.tolist()) == TRAIN[name][0][:, 0].tolist()
    assert federation.count_samples("train").tolist() == [16, 16, 16]


def with_items(by_client: dict) -> list[dict]:
    x, y, owners = joined(by_client)
    return [
        {"pixels": one, "label": int(label), "site": owner}
        for one, label, owner in zip(x, y, owners, strict=True)
    ]


class Items(torch.utils.data.Dataset):
    def __init__(self, items: list) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int):
        return self.items[place]


def shuffled(by_client: dict) -> dict:
    """The same clients in another order."""
    return dict(sorted(by_client.items(), reverse=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_arrays(*joined(TRAIN)[:2], clients=joined(TRAIN)[2], test=joined(TEST)),
        lambda: from_arrays(
            *joined(TRAIN)[:2], clients=joined(TRAIN)[2], test=joined(shuffled(TEST))
        ),
        lambda: from_datasets(tensors(TRAIN), test=tensors(TEST)),
        lambda: from_datasets(tensors(TRAIN), test=tensors(shuffled(TEST))),
        lambda: from_datasets(tensors(TRAIN), test=joined(TEST)),
        lambda: from_dataset(Items(with_items(TRAIN)), "site", test=Items(with_items(TEST))),
        lambda: from_dataset(
            {"train": Items(with_items(TRAIN)), "test": Items(with_items(TEST))}, clients="site"
        ),
        lambda: from_dataset(
            TensorDataset(*map(torch.tensor, joined(TRAIN)[:2])),
            joined(TRAIN)[2],
            test=(TensorDataset(*map(torch.tensor, joined(TEST)[:2])), joined(TEST)[2]),
        ),
    ],
)
def test_each_client_is_tested_on_its_own_test_samples(make):
    check_own_tests(make())


def test_lists_of_datasets_go_by_place():
    train, test = list(tensors(TRAIN).values()), list(tensors(TEST).values())
    federation = from_datasets(train, test=test)
    assert [len(one.x) for one in federation.tests] == [SIZES[name] for name in NAMES]
    assert [one.x[0, 0].item() for one in federation.tests] == [1000.5, 1100.5, 1200.5]


def test_what_is_reported_is_measured_on_the_clients_own_test_set():
    federation = from_datasets(tensors(TRAIN), test=tensors(TEST))
    run = simulate(federation, FedAvg(), model="linear", settings=Settings(rounds=1))
    told = run.metrics.query("split == 'test' and metric == 'accuracy' and round == 0")
    for client in range(3):
        model, test = run.model(client), federation.tests[client]
        with torch.no_grad():
            right = float((model(test.x).argmax(1) == test.y).double().mean())
        found = float(told.query("client == @client")["value"].iloc[0])
        assert found == pytest.approx(right, abs=1e-6)  # reported as float32


def test_a_limit_takes_some_of_the_own_test_samples():
    x, y, owners = joined(TRAIN)
    federation = from_arrays(
        x, y, clients=owners, test=joined(TEST), split=Split(train=10, validation=2, test_samples=3)
    )
    for row, name in enumerate(federation.client_names):
        found = federation.tests[row].x[:, 0].tolist()
        assert len(found) == 3
        assert set(found) <= set(TEST[name][0][:, 0].tolist())
    assert federation.count_samples("train").tolist() == [10, 10, 10]


def test_a_shift_changes_the_own_test_samples_as_it_changes_the_others():
    g = np.random.Generator(np.random.Philox(0))
    x, held = (g.integers(0, 256, (size, 1, 4, 4), dtype=np.uint8) for size in (40, 8))
    split = Split(shift=[{"kind": "rotation", "degrees": [0, 90]}])
    federation = from_arrays(
        x,
        np.arange(40) % 2,
        clients=np.arange(40) // 20,
        test=(held, np.arange(8) % 2, np.arange(8) // 4),
        split=split,
    )
    np.testing.assert_array_equal(federation.tests[0].x.numpy(), held[:4])
    np.testing.assert_array_equal(federation.tests[1].x.numpy(), np.rot90(held[4:], axes=(-2, -1)))


def test_folders_of_test_pictures_are_of_their_clients(tmp_path):
    for part, sizes in (("train", (6, 8)), ("test", (2, 3))):
        for client, size in zip(("b", "a"), sizes, strict=True):
            for place in range(size):
                folder = tmp_path / part / client / ("cat", "dog")[place % 2]
                folder.mkdir(parents=True, exist_ok=True)
                value = {"b": 10, "a": 100}[client] + place + (50 if part == "test" else 0)
                Image.new("L", (4, 4), value).save(folder / f"{place}.png")
    federation = from_folder(tmp_path / "train", test=tmp_path / "test")
    assert [sorted(one.x[:, 0, 0, 0].tolist()) for one in federation.tests] == [
        [150, 151, 152],
        [60, 61],
    ]
    options = {"path": str(tmp_path / "train"), "test": str(tmp_path / "test")}
    again = build_federation(DataConfig("folder", options=options), 0)
    assert [len(one.x) for one in again.tests] == [3, 2]


def make_source() -> Source:
    """The source of a study."""
    x, y, owners = joined(TRAIN)
    return Source.from_arrays(x, y, clients=owners, test=joined(TEST))


def test_a_study_takes_own_test_sets_and_can_hold_out_instead():
    function = f"{__name__}:make_source"
    check_own_tests(build_federation(DataConfig(function), 0))
    held_out = build_federation(DataConfig(function, test="client"), 0)
    assert [len(one.x) for one in held_out.tests] == [4, 4, 4]


@pytest.mark.option("DataConfig.test", "own")
def test_natural_groups_of_a_dataset_take_the_test_samples_of_their_column():
    source = make_source()
    # A dataset of the Hub has such a column in both splits, and no clients of its own.
    unowned = Source("hub", source.train, source.test, 2)
    shift = [{"kind": "natural", "column": "client"}]
    own = build_from_sources(DataConfig("hub", shift=shift, test="own"), (unowned,), Rng(0))
    assert [len(one.x) for one in own.tests] == [SIZES[name] for name in ("boden", "lund", "åre")]
    shared = build_from_sources(DataConfig("hub", shift=shift), (unowned,), Rng(0))
    assert [len(one.x) for one in shared.tests] == [12]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"test": joined({name: TEST[name] for name in NAMES[:2]})},
            DataError,
            "client 'boden' has training samples and no test samples",
        ),
        (
            {"test": joined({**TEST, "umeå": samples(5000, 3)})},
            DataError,
            "client 'umeå' has test samples and no training samples",
        ),
        ({"test": (*joined(TEST)[:2], joined(TEST)[2][:3])}, DataError, "clients has shape"),
        (
            {"clients": None, "num_clients": 3, "test": joined(TEST)},
            ConfigError,
            "test has clients, and the training samples have none",
        ),
        (
            {"split": Split(shift=[{"kind": "labels", "groups": [[0], [1]]}], folds=2)},
            ConfigError,
            "folds is 2, and arrays has a test set of its own",
        ),
        ({"test": (1, 2, 3, 4)}, DataError, r"test has 4 parts; expected \(x, y\) or"),
    ],
)
def test_test_sets_that_do_not_fit_the_clients_are_refused(change, error, message):
    x, y, owners = joined(TRAIN)
    with pytest.raises(error, match=message):
        from_arrays(x, y, **{"clients": owners, "test": joined(TEST), **change})


def test_a_table_of_test_sets_names_the_same_clients():
    test = tensors({"lund": TEST["lund"], "åre": TEST["åre"], "Boden": TEST["boden"]})
    with pytest.raises(DataError, match="client 'Boden' has only one of training and test data"):
        from_datasets(tensors(TRAIN), test=test)
    with pytest.raises(ConfigError, match="which are splits and not clients"):
        from_datasets({"train": tensors(TRAIN)["lund"], "test": tensors(TEST)["lund"]})


def test_clients_that_a_shift_makes_have_no_own_test_samples():
    with pytest.raises(ConfigError, match="do not say whose they are"):
        build_from_sources(
            DataConfig("own", shift=[{"kind": "partition", "function": f"{__name__}:halves"}]),
            (make_source(),),
            Rng(0),
        )


def halves(samples, num_clients, generator):
    """Every second sample to every second client."""
    return np.arange(len(samples)) % num_clients
