"""The Hugging Face layout: files made here, a stand-in for the Hub's library, and the real files where they are."""

import importlib.util
import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from coterie.data import hub
from coterie.data.build import DataConfig, build_federation
from coterie.data.datasets import load_dataset
from coterie.errors import ConfigError, DataError


def picture(value: int, mode: str = "L", size: int = 3) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (size, size), value if mode == "L" else (value, 0, 9)).save(out, "PNG")
    return out.getvalue()


def table(
    values: list[int],
    labels: list[int] | None = None,
    names: tuple[str, ...] = ("a", "b"),
    **more: object,
) -> pa.Table:
    images = more.pop("images", None) or [picture(value) for value in values]
    columns = {
        "image": pa.array(
            [{"bytes": image, "path": None} for image in images],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        ),
        "label": pa.array(labels if labels is not None else [value % 2 for value in values]),
        **{name: pa.array(column) for name, column in more.items()},
    }
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    return pa.table(columns).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    place = tmp_path / "data" / "flowers"
    place.mkdir(parents=True)
    pq.write_table(table([0, 10, 21], writer=[5, 6, 7]), place / "train-00000-of-00002.parquet")
    pq.write_table(table([30], writer=[8]), place / "train-00001-of-00002.parquet")
    pq.write_table(table([41], writer=[9]), place / "test-00000-of-00001.parquet")
    return place


def test_a_folder_is_read_with_its_shards_columns_and_names(folder):
    source = load_dataset("flowers", data_dir=folder.parent)
    assert source.train.x.shape == (4, 1, 3, 3)
    assert source.train.x[:, 0, 0, 0].tolist() == [0, 10, 21, 30]
    assert source.train.y.tolist() == [0, 0, 1, 0]
    assert source.train.columns["writer"].tolist() == [5, 6, 7, 8]
    assert source.test.x[0, 0, 1, 1] == 41
    assert source.class_names == ("a", "b")
    assert source.classes == 2


def test_images_are_decoded_once_and_again_when_a_file_changes(folder, cache, monkeypatch):
    first = load_dataset("flowers", data_dir=folder.parent)
    assert len(list(cache.rglob("*.safetensors"))) == 1
    with monkeypatch.context() as patched:
        patched.setattr(hub, "_decode_images", lambda *_: pytest.fail("decoded again"))
        second = load_dataset("flowers", data_dir=folder.parent)
    assert torch.equal(first.train.x, second.train.x)
    assert second.class_names == first.class_names
    assert second.train.columns["writer"].tolist() == [5, 6, 7, 8]
    pq.write_table(table([99, 99], writer=[1, 1]), folder / "test-00000-of-00001.parquet")
    assert load_dataset("flowers", data_dir=folder.parent).test.x[:, 0, 0, 0].tolist() == [99, 99]
    assert len(list(cache.rglob("*"))) == 2  # the folder and one file: the older one is gone


def test_a_damaged_cache_is_decoded_again(folder, cache):
    load_dataset("flowers", data_dir=folder.parent)
    file = next(cache.rglob("*.safetensors"))
    whole = file.read_bytes()
    for damage in (whole[:100], b"", whole[:-1]):
        file.write_bytes(damage)
        assert load_dataset("flowers", data_dir=folder.parent).train.x[1, 0, 0, 0] == 10
        assert file.read_bytes() == whole


def test_without_a_cache_folder_it_works_and_says_so(folder, cache):
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="decoded images are not kept.*COTERIE_CACHE"):
        source = load_dataset("flowers", data_dir=folder.parent)
    assert len(source.train) == 4


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("COTERIE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_folder() == tmp_path / "coterie"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_folder() == tmp_path / ".cache" / "coterie"


def test_gray_images_among_colored_ones_become_colored(folder):
    pq.write_table(
        table([41, 7], images=[picture(41), picture(7, "RGB")], writer=[1, 2]),
        folder / "test-00000-of-00001.parquet",
    )
    for file in folder.glob("train-*"):
        file.unlink()
    pq.write_table(
        table([1], images=[picture(3, "RGB")], writer=[1]), folder / "train-00000-of-00001.parquet"
    )
    source = load_dataset("flowers", data_dir=folder.parent)
    assert source.test.x[:, :, 0, 0].tolist() == [[41, 41, 41], [7, 0, 9]]


def test_another_column_can_be_the_label(folder):
    assert load_dataset("flowers", data_dir=folder.parent, label="writer").train.y.tolist() == [
        5,
        6,
        7,
        8,
    ]
    assert load_dataset("flowers", data_dir=folder.parent, label="writer").classes == 10
    with pytest.raises(ConfigError, match="unknown label column 'writr'; did you mean 'writer'"):
        load_dataset("flowers", data_dir=folder.parent, label="writr")


def test_validation_files_serve_when_there_are_no_test_files(folder):
    (folder / "test-00000-of-00001.parquet").rename(folder / "validation-00000-of-00001.parquet")
    assert len(load_dataset("flowers", data_dir=folder.parent).test) == 1
    (folder / "validation-00000-of-00001.parquet").unlink()
    assert len(load_dataset("flowers", data_dir=folder.parent).test) == 0


def damage(folder: Path, what: str) -> None:
    train = folder / "train-00001-of-00002.parquet"
    if what == "missing shard":
        train.unlink()
    elif what == "no training files":
        for file in folder.glob("train-*"):
            file.unlink()
    elif what == "not parquet":
        train.write_bytes(b"PAR1 no")
    elif what == "not an image":
        pq.write_table(table([1], images=[b"\x89PNG no"], writer=[1]), train)
    elif what == "a path only":
        broken = table([1], writer=[1])
        column = pa.array([{"bytes": None, "path": "x.png"}], broken.schema.field("image").type)
        pq.write_table(broken.set_column(0, "image", column), train)
    elif what == "another size":
        pq.write_table(table([1], images=[picture(1, size=4)], writer=[1]), train)
    elif what == "label out of range":
        pq.write_table(table([1], labels=[2], writer=[1]), train)
    elif what == "other names":
        swapped = table([1], writer=[1], names=("b", "a"))
        pq.write_table(swapped, folder / "test-00000-of-00001.parquet")
    elif what == "empty label":
        pq.write_table(table([1, 2], labels=[0, None], writer=[1, 2]), train)  # type: ignore[list-item]
    else:
        for file in folder.glob("*.parquet"):
            pq.write_table(pq.read_table(file).drop_columns(["image"]), file)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing shard", "has 1 of the 2 files of the split 'train'"),
        ("no training files", r"has no train-\*.parquet"),
        ("not parquet", "cannot be read as parquet"),
        ("not an image", "flowers/train: image 3 cannot be decoded"),
        ("a path only", "image 3 is a path, not bytes"),
        ("another size", "flowers/train has images of 2 sizes"),
        ("label out of range", "labels from 0 to 2; expected 0 to 1"),
        ("empty label", "column label has 1 empty values"),
        ("other names", "classes of 'label' are a, b in the training files and b, a in the test"),
        ("no images", "flowers/train has 0 image columns"),
    ],
)
def test_files_that_cannot_be_used_are_refused(folder, what, message):
    damage(folder, what)
    with pytest.raises(DataError, match=message):
        load_dataset("flowers", data_dir=folder.parent)


class FakeHub(types.ModuleType):
    """What this package uses of the `datasets` library: one dataset of two splits, kept in a file."""

    class Image:
        def __init__(self, decode: bool = True) -> None:
            self.decode = decode

    class Data:
        def __init__(self, content: pa.Table, file: Path) -> None:
            self.content, self.cache_files = content, [{"filename": str(file)}]
            kinds = {name: object() for name in content.schema.names} | {"image": FakeHub.Image()}
            self.features = type("Features", (dict,), {"arrow_schema": content.schema})(kinds)

        def cast_column(self, column: str, kind: "FakeHub.Image") -> "FakeHub.Data":
            assert (column, kind.decode) == ("image", False)
            return self

        def with_format(self, name: str) -> "FakeHub.Data":
            assert name == "arrow"
            return self

        def __getitem__(self, rows: slice) -> pa.Table:
            return self.content.replace_schema_metadata(None)[rows]

    def __init__(self, folder: Path) -> None:
        super().__init__("datasets")
        self.asked: list[str] = []
        self.folder = folder

    def load_dataset(self, repository: str) -> dict[str, "FakeHub.Data"]:
        self.asked.append(repository)
        file = self.folder / "kept.arrow"
        file.touch()
        return {"train": self.Data(table([1, 2]), file), "test": self.Data(table([3]), file)}


def test_the_hub_is_asked_only_when_allowed(tmp_path, cache, monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    fake = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(DataError, match="dataset 'mnist' is not here"):
        load_dataset("mnist")
    assert fake.asked == []
    source = load_dataset("mnist", download=True)
    assert fake.asked == ["ylecun/mnist"]
    assert source.train.x[:, 0, 0, 0].tolist() == [1, 2]
    assert source.class_names == ("a", "b")
    assert source.standard == ((0.1307,), (0.3081,))
    assert load_dataset("someone/flowers", download=True).test.y.tolist() == [1]
    assert fake.asked[-1] == "someone/flowers"


@pytest.mark.option("DataConfig.download", False, True)
def test_a_study_allows_the_hub_or_does_not(tmp_path, cache, monkeypatch):
    """Two images for two clients, or a line that says that they are not here."""
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", fake := FakeHub(tmp_path))

    def pixels(**settings):
        try:
            return build_federation(DataConfig("mnist", 2, 1, 0, **settings), 0).x.unique().tolist()
        except DataError:
            return None

    assert pixels() is None
    assert fake.asked == []
    assert pixels(download=True) == [1, 2]


def test_a_folder_comes_before_the_hub(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(tmp_path))
    assert len(load_dataset("flowers", data_dir=folder.parent, download=True).train) == 4


def test_without_the_extra_the_hub_says_what_to_install(monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs: pip install 'datasets>=.*'; or give --data-dir"):
        load_dataset("mnist", download=True)


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the extra hub is not installed"
)
def test_the_real_library_reads_the_same_as_the_folder(folder, cache, monkeypatch):
    """The Hub's library, pointed at the same files, gives the same source; no network."""
    datasets = importlib.import_module("datasets")
    files = {
        split: [str(f) for f in sorted(folder.glob(f"{split}-*"))] for split in ("train", "test")
    }
    original = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda _: original("parquet", data_files=files, cache_dir=str(cache / "hub")),
    )
    expected, found = (
        load_dataset("flowers", data_dir=folder.parent),
        hub.download_dataset("someone/flowers", "flowers"),
    )
    assert torch.equal(found.train.x, expected.train.x)
    assert torch.equal(found.test.y, expected.test.y)
    assert found.class_names == expected.class_names


def real(data_dir: Path, name: str) -> Path:
    if not (data_dir / name).is_dir():
        pytest.skip(f"{data_dir} has no folder {name}")
    return data_dir


def test_omniglot_has_writers_as_clients_and_held_out_writers_for_testing(data_dir):
    """Every client is one writer of one alphabet; the test set of an alphabet was drawn by other writers."""
    shift = {"kind": "natural", "column": "client", "cluster": "alphabet"}
    federation = build_federation(
        DataConfig("omniglot8", shift=[shift]), 0, real(data_dir, "omniglot8")
    )
    source = load_dataset("omniglot8", data_dir=data_dir)
    assert federation.truth is not None
    assert federation.origin is not None
    assert sorted(set(federation.truth.cluster.tolist())) == list(range(8))
    for client in range(len(federation)):
        own = federation.origin[client][federation.split[client] >= 0]
        alphabet = int(federation.truth.cluster[client])
        assert len(set(source.train.columns["client"][own].tolist())) == 1
        assert set(source.train.columns["alphabet"][own].tolist()) == {alphabet}
        test = federation.tests[int(federation.test_of[client])]
        assert set(test.y.tolist()) == set(
            source.test.y[source.test.columns["alphabet"] == alphabet].tolist()
        )
    assert not set(source.train.columns["writer"].tolist()) & set(
        source.test.columns["writer"].tolist()
    )
    assert int((federation.split >= 0).sum()) == len(source.train)


@pytest.mark.slow
def test_tiny_imagenet_is_colored_and_mnist_is_gray(data_dir):
    tiny = load_dataset("tiny_imagenet10", data_dir=real(data_dir, "tiny_imagenet10"))
    assert tiny.train.x.shape == (5000, 3, 64, 64)
    assert tiny.class_names[0] == "goldfish"
    mnist = load_dataset("mnist", data_dir=real(data_dir, "mnist"))
    assert mnist.train.x.shape == (60000, 1, 28, 28)
    mean, std = mnist.train.x.float().mean() / 255, mnist.train.x.float().std() / 255
    assert abs(float(mean) - 0.1307) < 1e-4  # the published constants: every pixel is right
    assert abs(float(std) - 0.3081) < 1e-4
    assert mnist.train.y[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]


@pytest.mark.slow
def test_cifar100_has_its_coarse_labels_as_a_column(data_dir):
    source = load_dataset("cifar100", data_dir=real(data_dir, "cifar100"))
    assert source.classes == 100
    assert int(source.train.columns["coarse_label"].max()) == 19
    pairs = np.unique(
        np.stack([source.train.y.numpy(), source.train.columns["coarse_label"].numpy()]), axis=1
    )
    assert pairs.shape[1] == 100  # each class has one superclass


@pytest.mark.slow
def test_a_hundred_clients_of_cifar10_by_label_groups(data_dir):
    groups = [[0, 1, 8, 9], [2, 3, 4, 5, 6, 7]]
    config = DataConfig(
        "cifar10", 100, 400, 100, [{"kind": "labels", "groups": groups, "sizes": [40, 60]}]
    )
    federation = build_federation(config, 1, real(data_dir, "cifar10"))
    assert federation.origin is not None
    assert len(federation.origin.unique()) == 50_000
    assert [len(test.x) for test in federation.tests] == [4000, 6000]
    with pytest.raises(DataError, match="100 clients x 600 samples = 60,000; the pool has 50,000"):
        build_federation(DataConfig("cifar10", 100, 500, 100), 1, data_dir)
