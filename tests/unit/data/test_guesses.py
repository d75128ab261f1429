"""Inputs that may mean something else than they are taken for: one line, or a refusal."""

import io
import re
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy import sparse

from coterie import from_arrays, from_table
from coterie.data.hub import load_folder
from coterie.errors import DataError

G = np.random.Generator(np.random.Philox(5))
Y = np.arange(60) % 2


def make(x, **more):
    size = x.shape[0] if hasattr(x, "shape") else 60
    return from_arrays(x, np.arange(size) % 2, num_clients=2, **more)


def pixels(*shape: int, high: int = 255) -> np.ndarray:
    found = G.integers(0, high + 1, (60, *shape))
    found.flat[0] = high
    return found


@pytest.mark.parametrize(
    ("x", "line"),
    [
        (pixels(30, 4, high=1).astype("uint8"), "is uint8 of shape 30 x 4 and holds 0 and 1 alone"),
        (pixels(1, 9, 9, high=1).astype("uint8"), "holds 0 and 1 alone: taken as images"),
        (pixels(9, 9, high=65535).astype("uint16"), "taken as whole numbers up to 65,535, .* 65535"),
        (torch.from_numpy(pixels(3, 9, 9, high=4000)).to(torch.uint16), "is uint16 of shape 3 x 9"),
        (pixels(3, 9, 9), "numbers from 0 to 255: taken as whole numbers, such as tokens"),
        (pixels(9, 9).astype("int32"), "taken as whole numbers, such as tokens"),
        (pixels(3, 9, 9).astype("float32"), "taken as numbers, which are not scaled"),
        (pixels(9, 9, 3).astype("float64"), "taken as numbers, which are not scaled"),
        (G.normal(size=(60, 9, 9, 3)), "taken as 9 channels of 9 x 3; if channels are last"),
        (pixels(2) + 1700000000.0, r"whole numbers such as 1,700,000,\d+, which becomes 1,7"),
        (
            np.stack([G.permutation(60), Y], 1),
            r"another whole number for each of the 60 samples in the feature x\[:, 0\]",
        ),
        (
            pd.DataFrame({"age": G.normal(size=100), "id": G.permutation(9000)[:100] + 7.0}),
            "in the feature 'id'",
        ),
    ],
)  # fmt: skip
def test_what_is_assumed_is_said_in_one_line(x, line):
    with pytest.warns(UserWarning, match=line) as said:
        make(x)
    assert len(said) == 1


def test_a_part_of_an_input_is_said_by_its_name():
    with pytest.warns(UserWarning, match=r"x\['scan'\] has shape 3 x 9 x 9 and numbers from 0"):
        make({"scan": pixels(3, 9, 9), "age": G.normal(size=(60, 1))})


@pytest.mark.parametrize(
    "x",
    [
        pixels(9, 9).astype("uint8"),
        pixels(3, 9, 9).astype("uint8"),
        np.zeros((60, 1, 9, 9), dtype="uint8"),
        pixels(3, 9, 9).astype("float32") / 255,
        pixels(12, high=500),  # tokens
        pixels(9, 5, high=200),
        G.normal(size=(60, 9, 9)),
        G.normal(size=(60, 4)) * 1e9,
        np.arange(60.0)[:, None],  # one feature is what is learned from
        np.stack([np.arange(60) // 2, Y], 1),
        np.stack([np.arange(30), Y[:30]], 1),
        np.stack([Y > 0, Y < 1], 1),
        (pixels(3) + 0.0) * 2**30,  # float32 holds these exactly
    ],
)
def test_usual_inputs_are_taken_without_a_word(x):
    make(x)  # warnings are errors


def test_types_that_are_kept_and_types_that_are_refused():
    assert make(np.stack([Y > 0, Y < 1], 1)).x.unique().tolist() == [0, 1]
    assert make(G.normal(size=(60, 3))).x.dtype == torch.float32
    assert make(pixels(5, high=900).astype("int64")).x.dtype == torch.int32
    for x, message in (
        (torch.ones(60, 2, dtype=torch.complex64), "x is complex64; expected real numbers"),
        (np.ones((60, 2), dtype=complex), "x has type complex128; expected numbers"),
        (torch.eye(60).to_sparse(), "x is sparse_coo; .* .to_dense"),
        (sparse.csr_matrix(np.eye(60)), r"x is a sparse csr_matrix; give x.toarray\(\)"),
        (np.ma.masked_less(G.normal(size=(60, 2)), 0), r"x is masked in \d+ places; fill or drop"),
        (pixels(2) + (1 << 25), "x has whole numbers up to .*; expected at most 16,777,216"),
    ):
        with pytest.raises(DataError, match=message):
            make(x)


def test_samples_in_both_sets_are_said():
    x = G.normal(size=(60, 3))
    line = "arrays: 10 of 12 test samples are training samples as well"
    held = np.concatenate([x[:10], G.normal(size=(2, 3))]), np.arange(12) % 2
    with pytest.warns(UserWarning, match=line):
        make(x, test=held)
    make(x, test=(G.normal(size=(12, 3)), np.arange(12) % 2))
    # Another target is another sample; few values repeat by chance.
    make(x, test=(x[:10], 1 - np.arange(10) % 2))
    few = pixels(2, high=1)
    make(few, test=(few[:10], np.arange(10) % 2))


def test_columns_of_pandas_in_another_order_are_not_paired_by_place():
    x = pd.DataFrame({"a": G.normal(size=60), "b": G.normal(size=60)})
    y = pd.Series(Y)
    from_arrays(x, y, num_clients=2)
    with pytest.raises(DataError, match=r"x and y have the same index in another order; .*y.loc\["):
        from_arrays(x, y.sort_values(), num_clients=2)
    with pytest.raises(DataError, match="x and clients have the same index in another order"):
        from_arrays(x.iloc[::-1], y[::-1], clients=y)
    from_arrays(x.iloc[::-1], y[::-1].to_numpy(), num_clients=2)


def test_a_list_of_clusters_needs_clients_in_the_order_of_their_names():
    x, owners = G.normal(size=(60, 2)), np.repeat(["b", "a", "c"], 20)
    with pytest.raises(DataError, match=r"clients occur as b, a, .*such as \{'a': 0, ...\}"):
        from_arrays(x, Y, clients=owners, clusters=[0, 0, 1])
    named = from_arrays(x, Y, clients=owners, clusters={"a": 1, "b": 0, "c": 1})
    assert named.truth is not None
    assert named.truth.cluster.tolist() == [1, 0, 1]
    assert from_arrays(x, Y, clients=np.sort(owners), clusters=[0, 0, 1]).truth is not None


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "PNG"), ("I", "TIFF"), ("F", "TIFF")])
def test_deep_gray_images_of_the_hub_are_not_clipped(tmp_path, mode, kind):
    files = [io.BytesIO() for _ in range(4)]
    for place, file in enumerate(files):
        Image.new(mode, (8, 8), 300 + place).save(file, kind)
    images = [{"bytes": file.getvalue(), "path": ""} for file in files]
    pq.write_table(pa.table({"image": images, "label": [0, 1, 0, 1]}), tmp_path / "train-0.parquet")
    with pytest.raises(
        DataError, match=re.escape(f"image 0 has more than 8 bits a pixel ({mode})")
    ):
        load_folder(tmp_path)


@pytest.mark.parametrize("scale", [None, "standard"])
def test_a_column_of_ids_in_a_table_is_said(scale):
    table = pd.DataFrame(
        {"id": G.permutation(120), "age": G.normal(size=120), "y": np.arange(120) % 2}
    )
    with pytest.warns(
        UserWarning, match="column 'id' has another whole number for each of the 120 rows"
    ) as said:
        from_table(table, target="y", num_clients=2, scale=scale)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_table(table, target="y", features=["age"], num_clients=2, scale=scale)


@pytest.mark.parametrize(
    ("names", "said"),
    [(("Yes", "yes", "no"), "'Yes' and 'yes'"), (("no ", "no", "yes"), "'no' and 'no '")],
)
def test_classes_and_categories_that_look_the_same_are_said(names, said):
    """They would be classes of their own, and accuracy that of another task."""
    values = np.array(names)[np.arange(60) % 3]
    other = np.arange(60) / 7
    for columns in ({"x": other, "y": values}, {"x": values, "z": other, "y": np.arange(60) % 2}):
        table = pd.DataFrame(columns)
        with pytest.warns(UserWarning, match=rf"{said} differ in spaces, in case"):
            from_table(table, target="y", num_clients=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What is listed is meant, and single letters may be characters to tell apart.
        from_table(
            pd.DataFrame({"x": other, "y": values}),
            target="y",
            num_clients=2,
            class_names=sorted(names),
        )
        from_table(
            pd.DataFrame({"x": other, "y": np.array(["a", "A"])[np.arange(60) % 2]}),
            target="y",
            num_clients=2,
        )
