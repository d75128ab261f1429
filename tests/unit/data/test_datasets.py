"""Sources: the bundled datasets, one's own arrays, names that are not there."""

import numpy as np
import pytest
import torch

from coterie.data.datasets import (
    GATHERED,
    load_dataset,
    load_digits_source,
    make_synthetic_regression,
)
from coterie.data.source import Samples, Source, make_samples
from coterie.errors import ConfigError, DataError
from coterie.rng import Rng


def test_digits_are_split_once_and_for_all():
    source = load_digits_source()
    assert (len(source.train), len(source.test)) == (1500, 297)
    assert source.train.x.shape[1:] == (1, 8, 8)
    assert source.is_images
    assert source.train.x.max() == 255
    assert torch.equal(load_digits_source().test.x, source.test.x)
    assert torch.bincount(torch.cat([source.train.y, source.test.y])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_digits_can_be_learned():
    """Nearest class mean on the pool is right on most of the test set: pixels and labels belong together."""
    source = load_digits_source()
    means = torch.stack(
        [source.train.x[source.train.y == label].float().mean(0).flatten() for label in range(10)]
    )
    guess = torch.cdist(source.test.x.flatten(1).float(), means).argmin(1)
    assert float((guess == source.test.y).float().mean()) > 0.85


def test_synthetic_regression_has_the_noise_asked_for():
    """Residuals of least squares on 4,000 samples have deviation 3; inputs fill -10 to 10."""
    source = make_synthetic_regression(Rng(2), 4000, test=50)
    x, y = source.train.x.double(), source.train.y.double()
    theta = torch.linalg.lstsq(x, y[:, None]).solution
    assert abs(float((x @ theta - y[:, None]).std()) - 3) < 5 * 3 / 8000**0.5
    assert x.shape == (4000, 10)
    assert float(x.abs().max()) <= 10
    assert abs(float(x.var()) - 400 / 12) < 1
    assert len(source.test) == 50
    assert source.classes == 0


def test_synthetic_regression_is_drawn_from_the_seed():
    assert torch.equal(
        make_synthetic_regression(Rng(2), 9).train.y, make_synthetic_regression(Rng(2), 9).train.y
    )
    assert not torch.equal(
        make_synthetic_regression(Rng(2), 9).train.y, make_synthetic_regression(Rng(3), 9).train.y
    )


def test_constants_of_images():
    """Half the pixels black and half white: mean 0.5, standard deviation 0.5; three quarters: 0.75 and 0.433."""
    x = torch.tensor([0, 255, 255, 255], dtype=torch.uint8).reshape(2, 1, 1, 2)
    source = Source("toy", Samples(x, torch.zeros(2).long()), Samples(x, torch.zeros(2).long()), 1)
    assert source.channel_constants("half") == ((0.5,), (0.5,))
    assert source.channel_constants("standard") == ((0.75,), (0.433,))
    assert source.channel_constants("none") == ((), ())
    with pytest.raises(ConfigError, match="'half', 'standard' or 'none'"):
        source.channel_constants("full")


def test_float_inputs_are_not_normalized():
    assert make_synthetic_regression(Rng(0), 5).channel_constants("half") == ((), ())


def test_arrays_take_their_form_from_their_types():
    gray = make_samples(np.zeros((5, 8, 8), np.uint8), np.arange(5) % 2, None)
    assert gray.x.shape == (5, 1, 8, 8)
    assert gray.y.dtype == torch.int64
    vectors = make_samples(np.zeros((5, 3)), np.ones((5, 1), np.int32), None)
    assert vectors.x.dtype == torch.float32
    assert vectors.y.shape == (5,)
    regression = make_samples(np.zeros((5, 3), np.float16), np.zeros((5, 2)), None)
    assert regression.x.dtype == torch.float16
    assert regression.y.dtype == torch.float32
    whole = make_samples(torch.zeros(2, 3), torch.tensor([0.0, 1.0]), 2)
    assert whole.y.dtype == torch.int64


@pytest.mark.parametrize(
    ("x", "y", "classes", "message"),
    [
        (
            np.zeros((5, 8, 8, 3), np.uint8),
            np.zeros(5, int),
            None,
            r"channels last; .* x.transpose\(0, 3, 1, 2\)",
        ),
        (np.zeros((5, 3)), np.full(5, 0.5), 3, "y has fractions"),
        (np.zeros((5, 3)), np.zeros((5, 2), int), 2, "expected one class for each sample"),
        (np.array(["a"]), np.zeros(1), None, "x has type <U1; expected numbers"),
        (
            np.zeros(()),
            np.zeros(3),
            None,
            "there are 1 inputs and 3 targets; expected one target for each input",
        ),
        (torch.zeros(3, 2), torch.tensor(1), None, "3 inputs and 1 targets"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(x, y, classes, message):
    with pytest.raises(DataError, match=message):
        make_samples(x, y, classes)


def toy(
    x: torch.Tensor, y: torch.Tensor, classes: int, test_x: torch.Tensor | None = None
) -> Source:
    empty = x[:0] if test_x is None else test_x
    return Source("toy", Samples(x, y), Samples(empty, y[: len(empty)]), classes)


def test_bad_values_are_found_at_the_door():
    x, y = torch.zeros(3, 2), torch.tensor([0, 1, 2])
    assert toy(x, y, 3).check().classes == 3
    with pytest.raises(DataError, match="labels from 0 to 2; expected 0 to 1: raise `classes`"):
        toy(x, y, 2).check()
    with pytest.raises(DataError, match="labels from -1 to 1"):
        toy(x, y - 1, 3).check()
    bad = x.clone()
    bad[1, 0] = torch.nan
    with pytest.raises(DataError, match=r"NaN or infinity in the inputs \(first in sample 1\)"):
        toy(bad, y, 3).check()
    with pytest.raises(DataError, match="NaN or infinity in the targets"):
        toy(x, torch.tensor([0.0, torch.inf, 1]), 0).check()
    with pytest.raises(DataError, match=r"training inputs have shape \(2,\), test inputs \(4,\)"):
        toy(x, y, 3, torch.zeros(1, 4)).check()


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    with pytest.raises(ConfigError, match="unknown dataset 'digts'; did you mean 'digits'"):
        load_dataset("digts")
    (tmp_path / "flowers").mkdir()
    with pytest.raises(ConfigError, match="did you mean 'flowers'"):
        load_dataset("flower", data_dir=tmp_path)


def test_a_known_dataset_that_is_not_here_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    expected = r"there is no data folder; give --data-dir .*mnist/train-\*.parquet, or pip install 'datasets>="
    with pytest.raises(DataError, match=expected):
        load_dataset("mnist")
    with pytest.raises(DataError, match="has no folder mnist"):
        load_dataset("mnist", data_dir=tmp_path)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"the data folder .*nowhere does not exist"):
        load_dataset("mnist")


@pytest.mark.parametrize("name", sorted(GATHERED))
def test_a_dataset_that_users_bring_says_what_to_get_and_where_to_put_it(
    name, tmp_path, monkeypatch
):
    """With or without a folder, and also where the Hub may be asked: it has no such short name."""
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    expected = rf"dataset '{name}' is not here; get .*; put it as {name}/train-\*.parquet"
    for options in ({}, {"data_dir": tmp_path}, {"data_dir": tmp_path, "download": True}):
        with pytest.raises(DataError, match=expected):
            load_dataset(name, **options)


def test_options_are_for_the_datasets_that_have_them():
    assert load_dataset(
        "synthetic-regression", samples=7, options={"dim": 2, "test": 3}
    ).train.x.shape == (7, 2)
    with pytest.raises(ConfigError, match="unknown key 'dims'; did you mean 'dim'"):
        load_dataset("synthetic-regression", samples=7, options={"dims": 2})
    with pytest.raises(ConfigError, match="digits has no options"):
        load_dataset("digits", options={"dim": 2})


def hospitals(beds: int = 12, seed: int = 7):
    """Own data, as a study file names them: the seed is that of the data, unless an option gives another."""
    x = torch.full((beds, 2), float(seed))
    return Source.from_arrays(
        x, torch.arange(beds) % 3, clients=["north", "south"] * (beds // 2), name="hospitals"
    )


def pair():
    return torch.zeros(4, 2), torch.arange(4) % 2


def with_test():
    return (torch.zeros(4, 2), torch.arange(4) % 2), (torch.ones(2, 2), torch.arange(2))


def two_tensors():
    return (torch.zeros(4, 2), torch.zeros(4, 1, dtype=torch.int64)), torch.arange(4) % 2


def nothing():
    return [1, 2, 3]


def own_path(name: str) -> str:
    return f"{__name__}:{name}"


def test_a_function_by_import_path_is_a_dataset():
    found = load_dataset(own_path("hospitals"), rng=Rng(3), options={"beds": 6})
    assert (len(found.train), found.client_names, found.train.x.unique().tolist()) == (
        6,
        ("north", "south"),
        [3],
    )
    assert load_dataset(own_path("hospitals"), options={"seed": 5}).train.x.unique().tolist() == [5]
    assert len(load_dataset(own_path("pair")).test) == 0
    assert load_dataset(own_path("with_test")).test.x.unique().tolist() == [1]
    assert len(load_dataset(own_path("two_tensors")).parts) == 2


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "hospitals",
            {"bed": 3},
            ConfigError,
            "data.options do not fit the arguments of .*:hospitals': .*'bed'",
        ),
        (
            "nothing",
            {},
            DataError,
            ":nothing' returned list; expected a coterie.Source, a federation, a pair",
        ),
        ("GATHERED", {}, ConfigError, "expected a function"),
        ("no_such", {}, ConfigError, "no_such"),
    ],
)
def test_a_function_that_makes_no_data_is_refused(name, options, error, message):
    with pytest.raises(error, match=message):
        load_dataset(own_path(name), options=options)
    with pytest.raises(ConfigError, match=r"there is no module 'nowhere'.*PYTHONPATH"):
        load_dataset("nowhere:data")


def test_a_path_of_own_data_is_found_from_here_or_in_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    options = {"path": "t.csv", "target": "y", "client": "c"}
    with pytest.raises(
        DataError, match=r"data.options.path: there is no t.csv in .*; give a path that leads to it"
    ):
        load_dataset("table", options=options)
    (tmp_path / "t.csv").write_text("a,y,c\n1,0,x\n2,1,x\n3,0,y\n")
    assert load_dataset("table", options=options, data_dir=tmp_path).client_names == ("x", "y")
    monkeypatch.chdir(tmp_path)
    assert load_dataset("table", options=options).name == "t"
    (tmp_path / "held.csv").write_text("a,y\n1,0\n2,1\n3,0\n")
    assert len(load_dataset("table", options={**options, "test": "held.csv"}).test) == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("table", {"target": "y"}, "data.options: path is missing; expected that of the table"),
        ("table", {"path": 3}, "data.options.path is 3; expected a path, as text"),
        ("table", {"path": "."}, "data.options: target is missing; expected text"),
        ("folder", {"path": ".", "target": "y"}, "data.options: unknown key 'target'"),
        (
            "folder",
            {"path": ".", "size": 0},
            "data.options: size is 0; expected a whole number, 1 or more",
        ),
        ("folder", {"path": ".", "size": [8, 8, 3]}, "expected a number, or height and width"),
        (
            "folder",
            {"path": ".", "size": 8, "transform": "m:f"},
            "size and transform are both given",
        ),
    ],
)
def test_options_of_own_data_are_checked(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(name, options=options)
