"""The [data] table, and the federations it describes."""

import math
import subprocess
import sys
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from coterie._util.settings import parse_settings
from coterie.data import build as building
from coterie.data._partition import SampleRequest, allocate_samples
from coterie.data.arrays import from_arrays
from coterie.data.build import DataConfig, SampleLayout, Split, build_federation, build_from_sources
from coterie.data.datasets import load_dataset
from coterie.data.shifts import Rotation
from coterie.data.source import Samples, Source
from coterie.errors import ConfigError, DataError
from coterie.rng import Rng

DIGITS = {"dataset": "digits", "num_clients": 8, "train": 20, "validation": 5}


def build(seed: int = 0, **change: object):
    return build_federation(parse_settings(DataConfig, DIGITS | change, "data"), seed)


def test_the_table_of_a_study_file_is_read_as_it_stands():
    table = DIGITS | {"shift": [{"kind": "rotation", "degrees": [0, 90], "sizes": [4, 4]}]}
    config = parse_settings(DataConfig, table, "data")
    assert config == DataConfig("digits", 8, 20, 5, [Rotation([0, 90], sizes=[4, 4])])
    assert config.shift == (
        {"kind": "rotation", "degrees": [0, 90], "sizes": [4, 4], "assign": "blocks", "fill": 128},
    )


def test_every_setting_is_explained():
    assert DataConfig.__doc__ is not None
    for name in DataConfig.__dataclass_fields__:
        assert f"        {name}:" in DataConfig.__doc__


def test_other_seeds_give_other_data_unless_the_seed_is_fixed():
    assert build(0).compute_fingerprint() == build(0).compute_fingerprint()
    assert build(0).compute_fingerprint() != build(1).compute_fingerprint()
    assert (
        build(0, fixed_seed=7).compute_fingerprint() == build(1, fixed_seed=7).compute_fingerprint()
    )
    assert build(1, fixed_seed=0).compute_fingerprint() == build(0).compute_fingerprint()


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process():
    shift = [
        {"kind": "regression-targets", "clusters": 2},
        {"kind": "quantity", "concentration_per_client": 1.0},
    ]
    table = {
        "dataset": "synthetic-regression",
        "num_clients": 6,
        "train": 20,
        "validation": 5,
        "shift": shift,
    }
    code = (
        "from coterie.data.build import DataConfig, build_federation;"
        f"print(build_federation(DataConfig(**{table!r}), 3).compute_fingerprint())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        out.stdout.strip()
        == build_federation(parse_settings(DataConfig, table, "data"), 3).compute_fingerprint()
    )


def test_without_sizes_the_pool_is_shared_evenly():
    """1,500 digits over 20 clients: 75 each, a fifth of them for validation."""
    federation = build_federation(DataConfig("digits"), 0)
    assert federation.count_samples("train").tolist() == [60] * 20
    assert federation.count_samples("validation").tolist() == [15] * 20


def test_validation_may_be_nothing_or_a_part():
    assert build(validation=0).count_samples("validation").tolist() == [0] * 8
    # 30 x 0.2 / 0.8
    assert (
        build_federation(DataConfig("digits", 8, 30), 0).count_samples("validation").tolist()
        == [8] * 8
    )


def test_normalization_can_be_chosen():
    assert build().mean == (0.5,)
    assert build(normalize="none").mean == ()
    standard = build(normalize="standard")
    assert 0.2 < standard.mean[0] < 0.4
    assert standard.std[0] > 0.3


def test_each_client_may_have_a_test_set_of_its_own_samples():
    federation = build(test="client", test_samples=6)
    assert [len(test.x) for test in federation.tests] == [6] * 8
    assert federation.test_of.tolist() == list(range(8))
    assert federation.count_samples("train").tolist() == [20] * 8
    own = torch.cat([federation.x[c][federation.split[c] >= 0] for c in range(8)]).flatten(1)
    tests = torch.cat([test.x for test in federation.tests]).flatten(1)
    assert float(torch.cdist(tests.float(), own.float()).min()) > 0  # no sample is in both


def test_each_client_may_be_tested_on_the_test_set_in_its_own_class_shares():
    """A client whose pool is one class is tested on that class; no test sample serves two clients."""
    shift = [{"kind": "labels", "groups": [[0], [1], [2, 3], [4, 5, 6, 7, 8, 9]]}]
    federation = build(shift=shift, test="client", test_source="test", test_samples=9)
    assert set(federation.tests[0].y.tolist()) == {0}
    assert set(federation.tests[3].y.tolist()) == {1}
    assert set(federation.tests[4].y.tolist()) <= {2, 3}
    tests = torch.cat([test.x for test in federation.tests]).flatten(1).float()
    distances = torch.cdist(tests, tests) + torch.eye(len(tests)) * 1e9
    assert float(distances.min()) > 0


def test_own_shares_of_a_test_set_are_exact_for_the_last_client_too():
    """Clients of Dirichlet shares that together take all of the test set, whose popular classes run out.

    The reference is the quota rule: each count is the floor or the ceiling of the exact share.
    """
    shift = [{"kind": "dirichlet-per-client", "concentration_per_class": 0.1}]
    whole = build_federation(
        parse_settings(
            DataConfig,
            {"dataset": "digits", "num_clients": 12, "train": 40, "validation": 0, "shift": shift,
             "test": "client", "test_source": "test", "test_samples": 24},
            "data",
        ),
        3,
    )  # fmt: skip
    used: dict[tuple[int, bytes], int] = {}
    for client in range(12):
        own = whole.y[client][whole.split[client] >= 0]
        share = 24 * torch.bincount(own, minlength=10) / len(own)
        test = whole.tests[client]
        counts = torch.bincount(test.y, minlength=10)
        assert ((counts >= share.floor()) & (counts <= share.ceil())).all(), client
        samples = {(int(y), x.numpy().tobytes()) for x, y in zip(test.x, test.y, strict=True)}
        assert len(samples) == 24, "no client is tested twice on a sample"
        for sample in samples:
            used[sample] = used.get(sample, 0) + 1
    # A sample serves again only when all others of its class have served.
    present = torch.bincount(load_dataset("digits").test.y, minlength=10)
    for label, there in enumerate(present.tolist()):
        times = [count for (y, _), count in used.items() if y == label]
        assert max(times, default=0) <= math.ceil(sum(times) / there)


def test_a_class_of_the_test_set_that_is_too_small_for_one_client_is_an_error():
    shift = [{"kind": "labels", "groups": [[0], [1]]}]
    with pytest.raises(DataError, match=r"client 0 is to be tested on 500 samples of class 0, its"):
        build(shift=shift, test="client", test_source="test", test_samples=500)


@pytest.mark.parametrize("source", ["train", "test"])
def test_the_test_fraction_is_one_of_all_samples_of_a_client(source):
    """25 samples for training and validation are half of 50, and 80 % of 31."""
    half = build(test="client", test_source=source, test_fraction=0.5)
    assert [len(test.x) for test in half.tests] == [25] * 8
    assert half.count_samples("train").tolist() == [20] * 8
    fifth = build(test="client", test_source=source, test_fraction=0.2)
    assert [len(test.x) for test in fifth.tests] == [6] * 8


def test_own_test_sets_are_transformed_like_the_client():
    plain = build(test="client", test_samples=6)
    turned = build(test="client", test_samples=6, shift=[{"kind": "rotation", "degrees": [90]}])
    np.testing.assert_array_equal(
        turned.tests[2].x.numpy(), np.rot90(plain.tests[2].x.numpy(), axes=(2, 3))
    )
    assert torch.equal(turned.tests[2].y, plain.tests[2].y)


def test_shared_test_sets_can_be_limited_and_are_the_same_samples_for_every_cluster():
    federation = build(test_samples=50, shift=[{"kind": "rotation", "degrees": [0, 180]}])
    assert [len(test.x) for test in federation.tests] == [50, 50]
    assert torch.equal(federation.tests[1].x, torch.rot90(federation.tests[0].x, 2, (-2, -1)))


def test_test_sets_are_stored_once():
    federation = build(shift=[{"kind": "rotation", "degrees": [0, 90]}])
    assert len(federation.tests) == 2
    assert federation.test_of.tolist() == [0] * 4 + [1] * 4


def test_a_label_group_without_test_samples_is_an_error(tmp_path):
    from coterie.data.arrays import from_arrays

    with pytest.raises(
        DataError, match='arrays has no test samples for "labels 1"; hold some out: test = "client"'
    ):
        from_arrays(
            np.zeros((20, 2)), np.arange(20) % 2, num_clients=2, test=(np.zeros((3, 2)), np.zeros(3, int)),
            split=Split(shift=[{"kind": "labels", "groups": [[0], [1]]}]),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"num_client": 3},
            ConfigError,
            "data: unknown key 'num_client'; did you mean 'num_clients'",
        ),
        (
            {"num_clients": "8"},
            ConfigError,
            "data: num_clients is '8'; expected a whole number, 1 or more, or .none",
        ),
        ({"num_clients": 0}, ConfigError, "num_clients is 0; expected a whole number, 1 or more"),
        ({"train": None}, ConfigError, "validation is 5 but train is not given"),
        (
            {"train": None, "validation": None, "test": "client", "test_samples": 6},
            ConfigError,
            "test_samples is 6 but train is not given; give both, or test_fraction",
        ),
        ({"normalize": "full"}, ConfigError, "expected 'half', 'standard' or 'none'"),
        ({"dataset": "digit"}, ConfigError, "did you mean 'digits'"),
        ({"dataset": []}, ConfigError, "expected text, or a list of texts, 1 or more of them"),
        ({"options": {"dim": 3}}, ConfigError, "digits has no options"),
        (
            {"train": 200},
            DataError,
            "8 clients x 205 samples = 1,640; the pool has 1,500: lower num_clients",
        ),
        (
            {"shift": [{"kind": "rotation", "sizes": [1, 1, 1, 1]}]},
            ConfigError,
            "add to 4; expected .* 8",
        ),
        (
            {"shift": [{"kind": "rotation"}] * 2, "num_clients": 3, "train": 2},
            ConfigError,
            "each of the 4 clusters",
        ),
        ({"shift": "rotation"}, ConfigError, "shift is 'rotation'; expected a list"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change, error, message):
    with pytest.raises(error, match=message) as caught:
        build(**change)
    assert "\n" not in str(caught.value)


def test_the_synthetic_problem_of_the_papers():
    """99 clients in three clusters, 50 + 100 samples of 10 features, 1,000 test samples a cluster."""
    config = DataConfig(
        "synthetic-regression", 99, 50, 100, [{"kind": "regression-targets", "sizes": [33, 33, 33]}]
    )
    federation = build_federation(config, 0)
    assert federation.x.shape == (99, 150, 10)
    assert [len(test.x) for test in federation.tests] == [1000] * 3
    assert federation.truth is not None
    assert torch.bincount(federation.truth.cluster).tolist() == [33] * 3
    x, y = federation.x[:33].reshape(-1, 10).double(), federation.y[:33].reshape(-1, 1).double()
    theta = torch.linalg.lstsq(x, y).solution
    error = (federation.tests[0].x.double() @ theta)[:, 0] - federation.tests[0].y.double()
    # the noise floor, sigma^2 = 9
    assert abs(float((error**2).mean()) - 9) < 5 * 9 * (2 / 1000) ** 0.5
    wider = build_federation(
        DataConfig("synthetic-regression", 3, 5, 5, options={"dim": 4, "test": 10}), 0
    )
    assert wider.features == (4,)


@pytest.mark.parametrize(
    ("given", "total", "parts"),
    [
        # of the samples that there are: a fifth, and a fifth of the others
        ({}, None, (0.64, 0.16, 0.2)),
        ({"test_fraction": 0.5, "validation_fraction": 0.0}, None, (0.5, 0.0, 0.5)),
        ({"train": 60, "validation": 20}, 100, (0.6, 0.2, 0.2)),  # 20 are a fifth of 100
        ({"train": 60, "validation": 20, "test_fraction": 0.5}, 160, (0.375, 0.125, 0.5)),
        # 60 and 40, and a fifth of 125
        ({"train": 60, "validation_fraction": 0.4}, 125, (0.48, 0.32, 0.2)),
        ({"train": 60, "validation": 20, "test_samples": 40}, 120, (0.5, 1 / 6, 1 / 3)),
        ({"train": 60, "validation": 20, "test_source": "test"}, 80, (0.75, 0.25, 0.0)),
        ({"test_source": "test"}, None, (0.8, 0.2, 0.0)),
    ],
)
def test_fractions_are_of_what_they_say(given, total, parts):
    """Testing takes a part of all samples of a client, validation a part of the others."""
    found, shares = DataConfig("digits", test="client", **given).split_shares()
    assert found == total
    assert shares == pytest.approx(parts)


def made_whole(seed: int = 0):
    return build_federation(parse_settings(DataConfig, DIGITS, "data"), seed)


def made_source():
    """Forty rows of five clients with names, the third of which has one class."""
    x = np.arange(80.0).reshape(40, 2)
    return Source.from_arrays(
        x, np.arange(40) % 2 * (np.arange(40) % 5 != 2), clients=[f"né {i % 5}" for i in range(40)]
    )


def own(name: str, **change: object):
    return build_federation(
        parse_settings(DataConfig, {"dataset": f"{__name__}:{name}", **change}, "data"), 1
    )


def test_a_federation_that_a_function_returns_is_used_as_it_is():
    assert own("made_whole").compute_fingerprint() == made_whole(1).compute_fingerprint()
    assert (
        own("made_whole", fixed_seed=4).compute_fingerprint() == made_whole(4).compute_fingerprint()
    )
    assert (
        own("made_whole", options={"seed": 5}).compute_fingerprint()
        == made_whole(5).compute_fingerprint()
    )
    with pytest.raises(
        ConfigError, match=r"data.num_clients is set, but .*used as it is; return a coterie.Source"
    ):
        own("made_whole", num_clients=3)
    with pytest.raises(ConfigError, match=r"data.shift is set, but"):
        own("made_whole", shift=[{"kind": "iid"}])


def test_a_source_that_a_function_returns_is_divided_by_its_clients():
    """Each holds samples out for testing, since the source has no test set; fewer clients than there are keep names."""
    federation = own("made_source")
    assert federation.client_names == tuple(f"né {i}" for i in range(5))
    assert [len(test.x) for test in federation.tests] == [2] * 5
    assert set(federation.y[2][federation.split[2] >= 0].tolist()) == {0}
    three = own("made_source", num_clients=3)
    for row, name in enumerate(three.client_names):
        used = three.x[row][three.split[row] >= 0][:, 0]
        assert {int(value) // 2 % 5 for value in used} == {int(name[-1])}
    shifted = own(
        "made_source", shift=[{"kind": "label-swap", "swaps": [[], [[0, 1]]], "sizes": [4, 1]}]
    )
    assert set(shifted.y[4][shifted.split[4] >= 0].tolist()) <= {0, 1}


def halves(samples, num_clients, generator):
    """A partition: the first rows are the first client's."""
    return np.arange(len(samples)) * num_clients // len(samples)


def test_a_partition_comes_before_the_clients_of_the_data():
    shift = [{"kind": "partition", "function": f"{__name__}:halves"}]
    federation = own("made_source", num_clients=2, shift=shift)
    assert (len(federation), federation.client_names) == (2, ())
    assert int(federation.x[0].max()) < 40


def test_natural_groups_are_called_by_their_values():
    source = Source("notes", Samples(torch.zeros(20, 1), torch.arange(20) % 2, {"user": torch.arange(20) // 5 * 7}),
                    Samples(torch.zeros(0, 1), torch.arange(0)), 2)  # fmt: skip
    config = DataConfig("notes", shift=[{"kind": "natural", "column": "user"}])
    assert build_from_sources(config, (source,), Rng(0)).client_names == (
        "user 0",
        "user 7",
        "user 14",
        "user 21",
    )


def test_several_datasets_have_targets_of_one_shape():
    def of(y):
        return Source.from_arrays(np.zeros((40, 2)), y, test=(np.zeros((2, 2)), y[:2]))

    with pytest.raises(DataError, match="have other targets or columns; make them alike"):
        build_from_sources(
            DataConfig(["a", "b"]), (of(np.zeros((40, 2))), of(np.zeros((40, 3)))), Rng(0)
        )
    named = of(np.array(["cat", "dog"] * 20))
    swapped = replace(named, name="pets", class_names=("dog", "cat"))
    with pytest.raises(DataError, match="arrays and pets have the same classes in another order"):
        build_from_sources(DataConfig(["a", "b"]), (named, swapped), Rng(0))


def told_apart():
    """Thirty-eight rows of three clients, each known by its one value; the last has four of one class, ten more."""
    clients = ["a"] * 17 + ["b"] * 7 + ["c"] * 14
    return Source.from_arrays(
        np.arange(38.0)[:, None], [0, 1] * 12 + [0] * 4 + [1] * 10, clients=clients
    )


def in_folds(seed: int, **change: object):
    """The values that a client of `told_apart` trains with, validates with, and tests."""
    data = build_federation(
        parse_settings(
            DataConfig, {"dataset": f"{__name__}:told_apart", "folds": 4, **change}, "data"
        ),
        seed,
    )
    parts = [[sorted(x[split == part][:, 0].int().tolist()) for part in (0, 1)]
             for x, split in zip(data.x, data.split, strict=True)]  # fmt: skip
    return [
        (*own, sorted(test.x[:, 0].int().tolist()))
        for own, test in zip(parts, data.tests, strict=True)
    ]


def test_in_as_many_seeds_as_folds_every_sample_is_tested_once():
    """Each seed uses all samples; the next four seeds divide them anew; a fold more or less holds one sample."""
    members = [set(range(17)), set(range(17, 24)), set(range(24, 38))]
    divisions = []
    for first in (0, 4):
        found = [in_folds(seed) for seed in range(first, first + 4)]
        for row, everything in enumerate(members):
            tested = [one[row][2] for one in found]
            assert sorted(chain(*tested)) == sorted(everything)
            assert max(map(len, tested)) - min(map(len, tested)) <= 1
            for one in found:
                assert sorted(chain(*one[row])) == sorted(everything), (
                    "nothing is left out, or used twice"
                )
        divisions.append([one[0][2] for one in found])
    assert divisions[0] != divisions[1]
    assert in_folds(2) == in_folds(2)


def test_folds_have_every_class_in_the_clients_share():
    """Of 4 and 10 samples, each of four folds tests one and two or three; and validation has both classes too."""
    for seed in range(4):
        _, validation, test = in_folds(seed, validation_fraction=0.25)[2]
        assert sum(value < 28 for value in test) == 1
        assert sum(value >= 28 for value in test) in (2, 3)
        assert 0 < sum(value < 28 for value in validation) < len(validation)


def test_a_client_is_divided_alike_whoever_is_beside_it():
    """The third client alone, with its own id, is tested on what it is tested on among the others."""
    whole = build_federation(DataConfig(f"{__name__}:told_apart", folds=4), 2)
    source = told_apart()
    rows = np.arange(24, 38)
    alone = Source.from_arrays(source.train.x[rows], source.train.y[rows], clients=["c"] * 14)
    config = DataConfig("alone", folds=4)
    seed, fold = config.data_seed_and_fold(2)
    found = build_from_sources(config, (alone,), Rng(seed), fold, [2])
    assert torch.equal(found.tests[0].x, whole.tests[2].x)
    other = build_from_sources(config, (alone,), Rng(seed), fold, [1])
    assert not torch.equal(other.tests[0].x, whole.tests[2].x)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"folds": 1}, "folds is 1; expected a whole number, 2 or more"),
        ({"train": 5}, "folds is 4 and train is 5; leave out train"),
        ({"fixed_seed": 5}, "folds is 4 and fixed_seed is 5; leave out fixed_seed"),
        ({"test_source": "test"}, "test_source is 'test'; expected 'train' with folds"),
        (
            {"dataset": "digits"},
            "folds is 4, and digits has a test set of its own; test = 'client' leaves that unused",
        ),
    ],
)
def test_settings_that_folds_contradict_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        in_folds(0, **change)


def test_a_client_with_fewer_samples_than_folds_is_named():
    with pytest.raises(
        DataError, match="client 'b' has 7 samples; expected 8 at least, one for each of the folds"
    ):
        in_folds(0, folds=8)
    with pytest.raises(DataError, match="client 'b' has 7 samples, which leaves none for training"):
        in_folds(0, validation_fraction=0.95)


def test_folds_of_digits_are_those_of_its_pool():
    """The test set is left alone, as `test = "client"` says."""
    data = build_federation(DataConfig("digits", 5, test="client", folds=3), 1)
    assert [len(test.x) for test in data.tests] == [100] * 5
    assert int((data.split >= 0).sum()) == 1000


def test_each_dataset_is_normalized_its_own_way():
    """All pixels are 51, so 0.2: with 0.1 and 0.5 it is 0.2; with halves -0.6. Two clients of each, and their tests."""
    pixels, classes = torch.full((8, 1, 2, 2), 51, dtype=torch.uint8), torch.tensor([0, 1] * 4)
    sources = [
        Source(
            name, Samples(pixels, classes), Samples(pixels, classes), 2, standard=((0.1,), (0.5,))
        )
        for name in ("one", "other")
    ]
    shift = [{"kind": "domain", "sizes": [2, 2], "offset_labels": True}]
    data = {
        "dataset": ["one", "other"],
        "num_clients": 4,
        "train": 2,
        "validation": 1,
        "shift": shift,
    }
    made = build_from_sources(
        parse_settings(DataConfig, data | {"normalize": ["standard", "half"]}, "data"),
        sources,
        Rng(0),
    )
    assert made.x.dtype == torch.float16
    assert made.mean == (), "images are held normalized"
    wanted = torch.tensor([0.2, 0.2, -0.6, -0.6], dtype=torch.float16)
    assert torch.equal(made.x[:, :3], wanted.reshape(4, 1, 1, 1, 1).expand(4, 3, 1, 2, 2))
    assert [round(float(made.tests[int(place)].x.float().mean()), 3) for place in made.test_of] == [
        0.2,
        0.2,
        -0.6,
        -0.6,
    ]
    same = build_from_sources(
        parse_settings(DataConfig, data | {"normalize": ["half", "half"]}, "data"), sources, Rng(0)
    )
    plain = build_from_sources(
        parse_settings(DataConfig, data | {"normalize": "half"}, "data"), sources, Rng(0)
    )
    assert same.compute_fingerprint() == plain.compute_fingerprint(), (
        "where constants agree, images stay bytes"
    )
    with pytest.raises(
        ConfigError, match="normalize has 1 entries for 2 datasets; give one for each"
    ):
        build_from_sources(
            parse_settings(DataConfig, data | {"normalize": ["half"]}, "data"), sources, Rng(0)
        )
    with pytest.raises(ConfigError, match="normalize"):
        parse_settings(DataConfig, data | {"normalize": ["half", "own"]}, "data")


def test_many_clients_are_made_as_one_by_one(monkeypatch):
    """Copying all samples at once, and whole groups without a draw of counts, change no byte."""
    g = np.random.Generator(np.random.Philox(3))
    x, y = g.normal(size=(300, 4)).astype("float32"), g.integers(0, 3, 300)
    owners = g.permutation(np.repeat(np.arange(40), [3] * 20 + [12] * 20))
    fast = from_arrays(x, y, clients=owners)
    monkeypatch.setattr(SampleLayout, "keeps_samples", lambda *_: False)
    monkeypatch.setattr(building, "order_by_class", _allocate_all)
    assert from_arrays(x, y, clients=owners).compute_fingerprint() == fast.compute_fingerprint()


def _allocate_all(labels: np.ndarray, stream: np.random.Generator) -> np.ndarray:
    return allocate_samples([SampleRequest(len(labels))], labels, stream)[0]
