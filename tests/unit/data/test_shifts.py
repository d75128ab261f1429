"""Each shift on a small dataset whose pixels say which sample they belong to."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from coterie._util.settings import parse, plain
from coterie.data.build import DataConfig, build_federation, build_from_sources
from coterie.data.federation import Federation
from coterie.data.plan import Client, members, spread
from coterie.data.shifts import SHIFTS, DirichletPerClient, Rotation, dirichlet, read_shift
from coterie.data.source import Samples, Source
from coterie.errors import ConfigError, DataError
from coterie.rng import Rng


def source(classes: int = 10, per_class: int = 40, tests: int = 6, name: str = "toy", side: int = 4) -> Source:
    """Random images in random order; every class has the same number."""
    generator = np.random.Generator(np.random.Philox(1))

    def draw(size: int) -> Samples:
        y = torch.from_numpy(generator.permutation(np.repeat(np.arange(classes), size)))
        x = torch.from_numpy(generator.integers(0, 256, (len(y), 1, side, side), dtype=np.uint8))
        return Samples(x, y, {"part": torch.arange(len(y)) % 8})

    return Source(name, draw(per_class), draw(tests), classes)


def build(*shifts: dict, sources: tuple[Source, ...] | None = None, seed: int = 0, **settings: object) -> Federation:
    sources = sources or (source(),)
    names = [one.name for one in sources] if len(sources) > 1 else sources[0].name
    given = {"dataset": names, "num_clients": 8, "train": 12, "validation": 3, "shift": shifts, **settings}
    config = parse(DataConfig, given, "data")
    return build_from_sources(config, sources, Rng(seed))


def cluster(federation: Federation) -> list[int]:
    assert federation.truth is not None
    return federation.truth.cluster.tolist()


def labels_of(federation: Federation, client: int) -> list[int]:
    return federation.y[client][federation.split[client] >= 0].tolist()


def test_without_a_shift_there_is_one_cluster_and_one_test_set():
    federation = build()
    assert cluster(federation) == [0] * 8
    assert federation.truth is not None
    assert federation.truth.names == ("all clients",)
    assert federation.truth.shift == ("none",) * 8
    assert [len(test.x) for test in federation.tests] == [60]
    assert federation.counts("train").tolist() == [12] * 8
    assert federation.counts("validation").tolist() == [3] * 8


def test_rotation_turns_training_and_test_data_of_each_cluster():
    toy = source()
    federation = build({"kind": "rotation", "degrees": [0, 90, 270], "sizes": [4, 3, 1]}, sources=(toy,))
    assert cluster(federation) == [0, 0, 0, 0, 1, 1, 1, 2]
    assert federation.truth is not None
    assert federation.truth.names == ("rotation 0", "rotation 90", "rotation 270")
    assert federation.origin is not None
    for client, turns in enumerate([0, 0, 0, 0, 1, 1, 1, 3]):
        original = toy.train.x[federation.origin[client]].numpy()
        np.testing.assert_array_equal(federation.x[client].numpy(), np.rot90(original, turns, axes=(2, 3)))
        test = federation.tests[int(federation.test_of[client])]
        np.testing.assert_array_equal(test.x.numpy(), np.rot90(toy.test.x.numpy(), turns, axes=(2, 3)))


def test_label_groups_hold_only_their_labels_in_training_and_testing():
    federation = build({"kind": "labels", "groups": [[0, 1, 8, 9], "2-7"], "sizes": [3, 5]})
    assert federation.truth is not None
    assert federation.truth.names == ("labels 0-1,8-9", "labels 2-7")
    for client in range(8):
        allowed = {0, 1, 8, 9} if client < 3 else {2, 3, 4, 5, 6, 7}
        assert set(labels_of(federation, client)) <= allowed
        assert set(federation.tests[int(federation.test_of[client])].y.tolist()) == allowed


def test_label_swap_exchanges_labels_everywhere_and_nothing_else():
    toy = source()
    federation = build({"kind": "label-swap", "swaps": [[], [[0, 1], [5, 3]]]}, sources=(toy,))
    assert cluster(federation) == [0] * 4 + [1] * 4
    assert federation.truth is not None
    assert federation.truth.names == ("no swap", "swap 0-1 5-3")
    assert federation.origin is not None
    swapped = torch.tensor([1, 0, 2, 5, 4, 3, 6, 7, 8, 9])
    assert torch.equal(federation.y[2], toy.train.y[federation.origin[2]])
    assert torch.equal(federation.y[5], swapped[toy.train.y[federation.origin[5]]])
    assert torch.equal(federation.tests[1].y, swapped[toy.test.y])


def test_regression_targets_follow_each_clusters_own_coefficients():
    """With noise 0, least squares on any client of a cluster finds the coefficients that fit its test set exactly."""
    config = DataConfig("synthetic-regression", 6, 30, 5, [{"kind": "regression-targets", "clusters": 3, "noise": 0}])
    federation = build_federation(config, seed=4)
    found = [torch.linalg.lstsq(federation.x[c].double(), federation.y[c].double()).solution for c in range(6)]
    for client in range(6):
        test = federation.tests[int(federation.test_of[client])]
        torch.testing.assert_close(test.x.double() @ found[client], test.y.double(), atol=1e-3, rtol=1e-5)
        assert bool((found[client].abs() <= 10 + 1e-6).all())
    assert cluster(federation) == [0, 0, 1, 1, 2, 2]
    assert float((found[0] - found[2]).norm()) > 1
    assert federation.classes == 0


def test_several_datasets_keep_their_classes_apart():
    first, second = source(classes=4, name="a"), source(classes=3, name="b", per_class=60)
    federation = build({"kind": "domain", "sizes": [3, 5]}, sources=(first, second))
    assert federation.classes == 7
    assert set(labels_of(federation, 0)) <= {0, 1, 2, 3}
    assert set(labels_of(federation, 3)) <= {4, 5, 6}
    assert [test.name for test in federation.tests] == ["a", "b"]
    assert set(federation.tests[1].y.tolist()) == {4, 5, 6}
    together = build({"kind": "domain", "offset_labels": False}, sources=(first, second))
    assert together.classes == 4
    assert set(labels_of(together, 7)) <= {0, 1, 2}
    assert federation.origin is not None
    assert int(federation.origin[3:].min()) >= len(first.train)  # samples of the second dataset have ids of their own


def test_several_datasets_without_a_domain_shift_are_shared_evenly():
    federation = build(sources=(source(name="a"), source(name="b")))
    assert cluster(federation) == [0] * 4 + [1] * 4


def test_datasets_of_different_shapes_cannot_be_together():
    with pytest.raises(DataError, match="a has 1x4x4 uint8 inputs, b has 1x5x5 uint8 inputs"):
        build(sources=(source(name="a"), source(name="b", side=5)))


def test_visual_domains_blur_and_disturb_normalized_float16_images_where_noise_is_fixed():
    toy = source()
    federation = build({"kind": "visual", "sizes": [3, 3, 2], "sigma": 0.5, "noise": "fixed"}, sources=(toy,))
    assert federation.x.dtype == torch.float16
    assert federation.mean == ()
    assert federation.origin is not None
    clean = (toy.train.x[federation.origin].float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(federation.x[0].float(), clean[0], atol=5e-4, rtol=5e-4)
    noise = federation.x[3:6].float() - clean[3:6]
    assert abs(float(noise.std()) - 0.5) < 0.05  # 720 draws: standard deviation 0.013
    assert abs(float(federation.x[7].float().std())) < float(clean[7].std())
    again = build({"kind": "visual", "sizes": [3, 3, 2], "sigma": 0.5, "noise": "fixed"}, sources=(toy,))
    assert torch.equal(again.x, federation.x)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kind": "visual", "sigma": 0.5}, {"kind": "visual", "sigma": 0.4}),
        ({"kind": "visual", "noise": "fixed"}, {"kind": "visual", "noise": "redrawn"}),
        ({"kind": "visual", "radius": 1}, {"kind": "visual", "radius": 2}),
        ({"kind": "rotation", "degrees": [0, 10]}, {"kind": "rotation", "degrees": [0, 11]}),
        ({"kind": "rotation", "degrees": [0, 10]}, {"kind": "rotation", "degrees": [0, 10], "fill": 0}),
        ({"kind": "label-swap", "swaps": [[], [[0, 1]]]}, {"kind": "label-swap", "swaps": [[], [[0, 2]]]}),
    ],
)
def test_the_fingerprint_tells_strengths_apart(first, second):
    assert build(first).fingerprint() != build(second).fingerprint()


def test_the_fingerprint_of_noisy_images_tells_how_they_were_normalized():
    shift = {"kind": "visual", "noise": "fixed"}
    assert build(shift).fingerprint() != build(shift, normalize="standard").fingerprint()


def test_fixed_noise_is_drawn_for_every_client():
    """What is left when the prepared images are taken away is a draw of its own for each client, of the deviation."""
    toy = source()
    federation = build({"kind": "visual", "domains": ["noise"], "sigma": 2.0, "noise": "fixed"}, sources=(toy,))
    assert federation.origin is not None
    clean = (toy.train.x[federation.origin].float() / 255 - 0.5) / 0.5
    noise = (federation.x.float() - clean).flatten(1)
    assert abs(float(noise.std()) - 2.0) < 0.15  # 8 x 15 x 16 draws: 4.6 standard errors
    likeness = torch.corrcoef(noise) - torch.eye(8)
    assert float(likeness.abs().max()) < 0.33  # 240 draws each: five standard errors


def test_blur_alone_keeps_uint8():
    federation = build({"kind": "visual", "domains": ["clean", "blur"]})
    assert federation.x.dtype == torch.uint8
    assert federation.mean == (0.5,)


def test_dirichlet_levels_plant_clusters_and_zero_gives_one_class():
    federation = build({"kind": "dirichlet-per-client", "concentration_total": [1000, 0], "sizes": [4, 4]})
    assert cluster(federation) == [0] * 4 + [1] * 4
    assert all(len(set(labels_of(federation, client))) >= 4 for client in range(4))
    assert all(len(set(labels_of(federation, client))) == 1 for client in range(4, 8))
    assert len(federation.tests) == 1  # both levels are tested on everything


def test_a_dirichlet_shift_plants_no_cluster_but_says_what_was_done():
    federation = build({"kind": "dirichlet-per-client", "concentration_per_class": 0.5})
    assert cluster(federation) == [0] * 8
    assert federation.truth is not None
    assert federation.truth.shift[3] == "dirichlet 0.5 per class"


@pytest.mark.parametrize(
    ("given", "expected"), [({"concentration_total": 1.0}, 1.1 / 2), ({"concentration_per_class": 1.0}, 2 / 11)]
)
def test_a_total_concentration_is_divided_among_the_classes_and_one_per_class_is_not(given, expected):
    """Dirichlet(a, ..., a) of ten classes: the squares of the shares add up to (a + 1) / (10 a + 1) on average."""
    rng, everybody = Rng(2), (Client(10, (1.0, 0.0, 0.0)),) * 2000
    planned = DirichletPerClient(**given).apply(everybody, (source(),), lambda client: rng.generator("x", client))
    assert abs(np.square([client.mixture for client in planned]).sum(1).mean() - expected) < 0.02


def test_a_dirichlet_within_label_groups_stays_within_them():
    labels = {"kind": "labels", "groups": ["0-4", "5-9"]}
    federation = build(labels, {"kind": "dirichlet-per-client", "concentration_total": 1.0})
    for client in range(8):
        assert {label // 5 for label in labels_of(federation, client)} == {client // 4}


def test_dirichlet_moments_are_those_of_the_distribution():
    """Dirichlet(2, 1, 1): means 1/2, 1/4, 1/4; variance of the first (1/2 x 1/2) / 5 = 0.05."""
    generator = np.random.Generator(np.random.Philox(0))
    draws = np.stack([dirichlet(np.array([2.0, 1, 1]), np.ones(3) / 3, generator) for _ in range(4000)])
    np.testing.assert_allclose(draws.mean(0), [0.5, 0.25, 0.25], atol=5 * (0.05 / 4000) ** 0.5)
    assert abs(draws[:, 0].var() - 0.05) < 0.005


def test_concentrations_too_small_to_draw_with_give_one_class_by_the_prior():
    generator = np.random.Generator(np.random.Philox(0))
    draws = np.stack([dirichlet(np.array([3e-320, 1e-320]), np.array([0.75, 0.25]), generator) for _ in range(2000)])
    assert set(draws.flatten()) == {0.0, 1.0}
    assert abs(draws[:, 0].mean() - 0.75) < 5 * (0.75 * 0.25 / 2000) ** 0.5


def test_dirichlet_per_class_gives_everyone_the_minimum_and_uses_as_many_samples_as_without():
    federation = build({"kind": "dirichlet-per-class", "concentration_per_client": 0.1, "minimum": 5})
    sizes = (federation.split >= 0).sum(1)
    assert int(sizes.sum()) == 8 * 15
    assert int(sizes.min()) >= 5
    assert int(sizes.max()) > 15
    assert int(federation.counts("validation").min()) >= 1
    with pytest.raises(DataError, match="8 clients x a minimum of 16 = 128 samples; there are 120"):
        build({"kind": "dirichlet-per-class", "concentration_per_client": 0.1, "minimum": 16})


def test_quantity_skew_changes_sizes_only():
    federation = build({"kind": "quantity", "concentration_per_client": 0.3, "minimum": 4})
    sizes = (federation.split >= 0).sum(1)
    assert int(sizes.sum()) == 8 * 15
    assert int(sizes.min()) >= 4
    assert len(set(sizes.tolist())) > 1
    assert federation.truth is not None
    assert federation.truth.shift[0] == f"{sizes[0]} samples"


def test_five_folds_of_many_classes_give_no_class_above_its_share():
    """200 classes, 10 clients of 500: 10 from each of 40 main classes, and 100 of the 200 classes once more."""
    wide = source(classes=200, per_class=60, tests=1, side=1)
    federation = build({"kind": "k-fold", "folds": 5}, sources=(wide,), num_clients=10, train=400, validation=100)
    total = np.zeros(200, dtype=int)
    for client in range(10):
        counts = np.bincount(labels_of(federation, client), minlength=200)
        total += counts
        main = np.zeros(200, dtype=bool)
        main[40 * (client % 5) : 40 * (client % 5 + 1)] = True
        assert set(counts[main]) <= {10, 11}
        assert set(counts[~main]) <= {0, 1}
        assert counts.sum() == 500
    assert set(total) == {25}  # two clients x 10 + ten clients x 1/2: exactly even


def test_the_released_folds_give_all_that_is_left_to_the_last_class_and_use_samples_again():
    """200 classes, 500 samples a client: no class gets one of the even 100, so the last gets all; 60 of it exist."""
    wide = source(classes=200, per_class=60, tests=1, side=1)
    shift = {"kind": "k-fold", "folds": 5, "rest": "released"}
    federation = build(shift, sources=(wide,), num_clients=10, train=400, validation=100)
    for client in range(10):
        counts = np.bincount(labels_of(federation, client), minlength=200)
        main = np.arange(40 * (client % 5), 40 * (client % 5 + 1))
        expected = np.zeros(200, dtype=int)
        expected[main] = 10
        expected[199] += 100
        assert counts.tolist() == expected.tolist()


def test_the_released_folds_are_the_even_ones_where_the_classes_divide_the_rest():
    """Of 50 samples 40 come from 5 main classes, 10 from all 10: one of each."""
    released = build({"kind": "k-fold", "folds": 2, "rest": "released"}, train=40, validation=10)
    even = build({"kind": "k-fold", "folds": 2}, train=40, validation=10)
    for client in range(8):
        assert sorted(labels_of(released, client)) == sorted(labels_of(even, client))


def test_a_fold_partition_may_use_the_whole_pool():
    """Two folds, 8 clients of 50: exactly the 400 samples there are."""
    federation = build({"kind": "k-fold", "folds": 2}, train=40, validation=10)
    assert federation.origin is not None
    assert sorted(federation.origin.flatten().tolist()) == list(range(400))
    assert cluster(federation) == [0, 1] * 4


def test_the_shared_test_set_of_a_fold_has_the_folds_mixture():
    """6 samples a class: main classes (share 0.8/5 + 0.02) are used up, of the others 6 x 0.02/0.18 = 0.67 each."""
    federation = build({"kind": "k-fold", "folds": 2})
    counts = np.bincount(federation.tests[0].y.numpy(), minlength=10)
    assert set(counts[:5]) <= {5, 6}
    assert set(counts[5:]) <= {0, 1}
    assert counts.sum() == 33  # 6 / 0.18


def test_natural_groups_are_whole_and_have_test_samples_of_their_cluster():
    columns = {"writer": torch.arange(6).repeat_interleave(10), "alphabet": torch.arange(6).repeat_interleave(10) // 3}
    test_columns = {"writer": torch.full((8,), 9), "alphabet": torch.arange(8) % 2}
    x = torch.arange(68, dtype=torch.uint8).reshape(68, 1, 1, 1)
    own = Source(
        "toy", Samples(x[:60], torch.zeros(60).long(), columns), Samples(x[60:], torch.zeros(8).long(), test_columns), 1
    )
    shift = {"kind": "natural", "column": "writer", "cluster": "alphabet"}
    config = DataConfig(dataset="toy", shift=[shift], validation_fraction=0.2)
    federation = build_from_sources(config, (own,), Rng(0))
    assert cluster(federation) == [0, 0, 0, 1, 1, 1]
    assert federation.origin is not None
    assert (federation.origin // 10).unique(dim=1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert federation.counts("validation").tolist() == [2] * 6
    assert federation.tests[1].x.flatten().tolist() == [61, 63, 65, 67]
    all_of_them = build_from_sources(DataConfig("toy", 6, 8, 2, shift=[shift]), (own,), Rng(0))  # 10 samples each
    assert (all_of_them.origin // 10).unique(dim=1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    unknown = build_from_sources(DataConfig("toy", shift=[{"kind": "natural", "column": "writer"}]), (own,), Rng(0))
    assert unknown.truth is None
    with pytest.raises(
        DataError, match="0 of 6 groups of column 'writer' have 12 samples or more; 2 clients ask for that"
    ):
        build_from_sources(DataConfig("toy", 2, 10, 2, shift=[shift]), (own,), Rng(0))
    with pytest.raises(ConfigError, match="unknown column 'writter'; did you mean 'writer'"):
        build_from_sources(DataConfig("toy", shift=[{"kind": "natural", "column": "writter"}]), (own,), Rng(0))


def test_two_shifts_cross_when_one_is_interleaved():
    federation = build(
        {"kind": "rotation", "degrees": [0, 180]}, {"kind": "labels", "groups": ["0-4", "5-9"], "assign": "interleaved"}
    )
    assert federation.truth is not None
    assert cluster(federation) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert federation.truth.names == (
        "rotation 0 + labels 0-4",
        "rotation 0 + labels 5-9",
        "rotation 180 + labels 0-4",
        "rotation 180 + labels 5-9",
    )


def test_members_by_blocks_in_turn_and_shuffled():
    stream = np.random.Generator(np.random.Philox(0))
    assert members(3, 7, None, "blocks", stream) == [0, 0, 0, 1, 1, 2, 2]
    assert members(2, 4, [3, 1], "interleaved", stream) == [0, 1, 0, 0]
    assert sorted(members(2, 4, [3, 1], "shuffled", stream)) == [0, 0, 0, 1]
    with pytest.raises(ConfigError, match=r"sizes \(3, 2\) add to 5; expected the number of clients, 4"):
        members(2, 4, [3, 2], "blocks", stream)
    with pytest.raises(ConfigError, match="one size for each of the 2 clusters"):
        members(2, 4, [4], "blocks", stream)


def test_what_is_left_over_goes_around_the_end():
    assert spread(7, slots=5, start=4).tolist() == [2, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        ([{"kind": "rotaton"}], r"data: shift\[0\]: unknown shift 'rotaton'; did you mean 'rotation'"),
        ([{"kind": "iid"}, {"degrees": [0]}], r"data: shift\[1\]: kind is missing"),
        ([{"kind": "rotation", "degree": [0]}], "unknown key 'degree'; did you mean 'degrees'"),
        ([{"kind": "rotation", "degrees": []}], "degrees is .*expected a list of numbers, 1 or more of them"),
        ([{"kind": "dirichlet-per-client", "alpha": 0.5}], "alpha means different things .* concentration_total"),
        ([{"kind": "dirichlet-per-class", "alpha": 0.5}], "use one of: concentration_per_client"),
        ([{"kind": "dirichlet-per-client"}], "needs one of concentration_total and concentration_per_class; 0 given"),
        ([{"kind": "dirichlet-per-class", "concentration_per_client": 0}], "expected a number, above 0"),
        ([{"kind": "labels", "groups": [[0, 12]]}], "label 12 is not in toy; expected 0 to 9"),
        ([{"kind": "labels", "groups": ["0-x"]}], 'labels as a list or as text such as "0-9, 35-44"'),
        ([{"kind": "label-swap", "swaps": [[[1, 1]]]}], "pairs of two labels"),
        ([{"kind": "label-swap", "swaps": [[[0, 1], [1, 2]]]}], "at most one pair"),
        ([{"kind": "k-fold", "folds": 11}], "at most the 10 classes"),
        ([{"kind": "k-fold", "rest": "odd"}], "'even' or 'released'"),
        ([{"kind": "k-fold"}, {"kind": "labels", "groups": [[0]]}], "comes after a shift that has set every client's"),
        ([{"kind": "labels", "groups": [[0]]}, {"kind": "k-fold"}], "leave out the labels shift"),
        ([{"kind": "k-fold"}, {"kind": "natural", "column": "part"}], "k-fold draws from the whole pool"),
        ([{"kind": "quantity", "concentration_per_client": 1}, {"kind": "natural", "column": "part"}], "cannot change"),
        ([{"kind": "regression-targets"}], "toy is not a regression problem"),
        ([{"kind": "visual", "domains": ["fog"]}], "domains is .*expected a list of 'clean', 'noise' or 'blur'"),
    ],
)
def test_a_shift_that_cannot_be_is_refused_in_one_line(shifts, message):
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        build(*shifts)
    assert "\n" not in str(caught.value)


def test_shifts_of_images_need_images():
    floats = Source(
        "vectors",
        Samples(torch.zeros(9, 3), torch.zeros(9).long()),
        Samples(torch.zeros(1, 3), torch.zeros(1).long()),
        1,
    )
    with pytest.raises(DataError, match="rotation needs uint8 images; vectors has 3 float32 inputs"):
        build({"kind": "rotation"}, sources=(floats,), num_clients=4, train=1, validation=1)


def test_quarter_turns_need_square_images():
    flat = Source("flat", Samples(torch.zeros(9, 1, 2, 3, dtype=torch.uint8), torch.zeros(9).long()), source().test, 1)
    with pytest.raises(DataError, match="flat has images of 2x3; a quarter turn needs square images"):
        build({"kind": "rotation", "degrees": [90]}, sources=(flat,), num_clients=2, train=1, validation=1)


@pytest.mark.parametrize("kind", sorted(SHIFTS))
def test_every_shift_explains_itself_and_each_of_its_fields(kind):
    cls = SHIFTS[kind]
    assert cls.__doc__
    for field in fields(cls):
        assert f"        {field.name}:" in cls.__doc__, f"{cls.__name__} does not explain {field.name}"


def test_a_shift_becomes_its_table_and_back():
    for shift in (Rotation([0, 45], sizes=[1, 2]), DirichletPerClient(concentration_total=[0.5, 3])):
        table = plain(shift)
        assert read_shift(table) == shift
        assert table["kind"] == shift.kind
        assert "concentration_per_class" not in table
