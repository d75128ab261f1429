"""Each shift on a small dataset whose pixels say which sample they belong to."""

from dataclasses import dataclass, fields
from typing import ClassVar, final

import numpy as np
import pytest
import torch

from coterie._util.settings import parse_settings, to_plain
from coterie.data.build import DataConfig, build_federation, build_from_sources
from coterie.data.federation import Federation
from coterie.data.plan import Client, Shift, assign_clusters, spread_evenly
from coterie.data.shifts import (
    SHIFTS,
    DirichletPerClient,
    Domain,
    KFold,
    Labels,
    LabelSwap,
    Partition,
    RegressionTargets,
    Rotation,
    Visual,
    draw_dirichlet,
    parse_shift,
)
from coterie.data.source import Samples, Source
from coterie.errors import ConfigError, DataError
from coterie.rng import Rng


def source(
    classes: int = 10, per_class: int = 40, tests: int = 6, name: str = "toy", side: int = 4
) -> Source:
    """Random images in random order; every class has the same number."""
    generator = np.random.Generator(np.random.Philox(1))

    def draw(size: int) -> Samples:
        y = torch.from_numpy(generator.permutation(np.repeat(np.arange(classes), size)))
        x = torch.from_numpy(generator.integers(0, 256, (len(y), 1, side, side), dtype=np.uint8))
        return Samples(x, y, {"part": torch.arange(len(y)) % 8})

    return Source(name, draw(per_class), draw(tests), classes)


def build(
    *shifts: dict, sources: tuple[Source, ...] | None = None, seed: int = 0, **settings: object
) -> Federation:
    sources = sources or (source(),)
    names = [one.name for one in sources] if len(sources) > 1 else sources[0].name
    given = {
        "dataset": names,
        "num_clients": 8,
        "train": 12,
        "validation": 3,
        "shift": shifts,
        **settings,
    }
    config = parse_settings(DataConfig, given, "data")
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
    assert federation.count_samples("train").tolist() == [12] * 8
    assert federation.count_samples("validation").tolist() == [3] * 8


def test_rotation_turns_training_and_test_data_of_each_cluster():
    toy = source()
    federation = build(
        {"kind": "rotation", "degrees": [0, 90, 270], "sizes": [4, 3, 1]}, sources=(toy,)
    )
    assert cluster(federation) == [0, 0, 0, 0, 1, 1, 1, 2]
    assert federation.truth is not None
    assert federation.truth.names == ("rotation 0", "rotation 90", "rotation 270")
    assert federation.origin is not None
    for client, turns in enumerate([0, 0, 0, 0, 1, 1, 1, 3]):
        original = toy.train.x[federation.origin[client]].numpy()
        np.testing.assert_array_equal(
            federation.x[client].numpy(), np.rot90(original, turns, axes=(2, 3))
        )
        test = federation.tests[int(federation.test_of[client])]
        np.testing.assert_array_equal(
            test.x.numpy(), np.rot90(toy.test.x.numpy(), turns, axes=(2, 3))
        )


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
    config = DataConfig(
        "synthetic-regression",
        6,
        30,
        5,
        [{"kind": "regression-targets", "clusters": 3, "noise": 0}],
    )
    federation = build_federation(config, seed=4)
    found = [
        torch.linalg.lstsq(federation.x[c].double(), federation.y[c].double()).solution
        for c in range(6)
    ]
    for client in range(6):
        test = federation.tests[int(federation.test_of[client])]
        torch.testing.assert_close(
            test.x.double() @ found[client], test.y.double(), atol=1e-3, rtol=1e-5
        )
        assert bool((found[client].abs() <= 10 + 1e-6).all())
    assert cluster(federation) == [0, 0, 1, 1, 2, 2]
    assert float((found[0] - found[2]).norm()) > 1
    assert federation.classes == 0


@pytest.mark.option("Domain.offset_labels", True, False)
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
    # samples of the second dataset have ids of their own
    assert int(federation.origin[3:].min()) >= len(first.train)


def test_several_datasets_without_a_domain_shift_are_shared_evenly():
    federation = build(sources=(source(name="a"), source(name="b")))
    assert cluster(federation) == [0] * 4 + [1] * 4


def test_datasets_of_different_shapes_cannot_be_together():
    with pytest.raises(DataError, match="a has 1x4x4 uint8 inputs, b has 1x5x5 uint8 inputs"):
        build(sources=(source(name="a"), source(name="b", side=5)))


def test_visual_domains_blur_and_disturb_normalized_float16_images_where_noise_is_fixed():
    toy = source()
    federation = build(
        {"kind": "visual", "sizes": [3, 3, 2], "sigma": 0.5, "noise": "fixed"}, sources=(toy,)
    )
    assert federation.x.dtype == torch.float16
    assert federation.mean == ()
    assert federation.origin is not None
    clean = (toy.train.x[federation.origin].float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(federation.x[0].float(), clean[0], atol=5e-4, rtol=5e-4)
    noise = federation.x[3:6].float() - clean[3:6]
    assert abs(float(noise.std()) - 0.5) < 0.05  # 720 draws: standard deviation 0.013
    assert abs(float(federation.x[7].float().std())) < float(clean[7].std())
    again = build(
        {"kind": "visual", "sizes": [3, 3, 2], "sigma": 0.5, "noise": "fixed"}, sources=(toy,)
    )
    assert torch.equal(again.x, federation.x)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"kind": "visual", "sigma": 0.5}, {"kind": "visual", "sigma": 0.4}),
        ({"kind": "visual", "noise": "fixed"}, {"kind": "visual", "noise": "redrawn"}),
        ({"kind": "visual", "radius": 1}, {"kind": "visual", "radius": 2}),
        ({"kind": "rotation", "degrees": [0, 10]}, {"kind": "rotation", "degrees": [0, 11]}),
        (
            {"kind": "rotation", "degrees": [0, 10]},
            {"kind": "rotation", "degrees": [0, 10], "fill": 0},
        ),
        (
            {"kind": "label-swap", "swaps": [[], [[0, 1]]]},
            {"kind": "label-swap", "swaps": [[], [[0, 2]]]},
        ),
    ],
)
def test_the_fingerprint_tells_strengths_apart(first, second):
    assert build(first).compute_fingerprint() != build(second).compute_fingerprint()


def test_the_fingerprint_of_noisy_images_tells_how_they_were_normalized():
    shift = {"kind": "visual", "noise": "fixed"}
    assert (
        build(shift).compute_fingerprint()
        != build(shift, normalize="standard").compute_fingerprint()
    )


def test_fixed_noise_is_drawn_for_every_client():
    """What is left when the prepared images are taken away is a draw of its own for each client, of the deviation."""
    toy = source()
    federation = build(
        {"kind": "visual", "domains": ["noise"], "sigma": 2.0, "noise": "fixed"}, sources=(toy,)
    )
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
    federation = build(
        {"kind": "dirichlet-per-client", "concentration_total": [1000, 0], "sizes": [4, 4]}
    )
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
    ("given", "expected"),
    [({"concentration_total": 1.0}, 1.1 / 2), ({"concentration_per_class": 1.0}, 2 / 11)],
)
def test_a_total_concentration_is_divided_among_the_classes_and_one_per_class_is_not(
    given, expected
):
    """Dirichlet(a, ..., a) of ten classes: the squares of the shares add up to (a + 1) / (10 a + 1) on average."""
    rng, everybody = Rng(2), (Client(10, (1.0, 0.0, 0.0)),) * 2000
    planned = DirichletPerClient(**given).apply(
        everybody, (source(),), lambda client: rng.generator("x", client)
    )
    assert abs(np.square([client.mixture for client in planned]).sum(1).mean() - expected) < 0.02


def test_a_dirichlet_within_label_groups_stays_within_them():
    labels = {"kind": "labels", "groups": ["0-4", "5-9"]}
    federation = build(labels, {"kind": "dirichlet-per-client", "concentration_total": 1.0})
    for client in range(8):
        assert {label // 5 for label in labels_of(federation, client)} == {client // 4}


def test_dirichlet_moments_are_those_of_the_distribution():
    """Dirichlet(2, 1, 1): means 1/2, 1/4, 1/4; variance of the first (1/2 x 1/2) / 5 = 0.05."""
    generator = np.random.Generator(np.random.Philox(0))
    draws = np.stack(
        [draw_dirichlet(np.array([2.0, 1, 1]), np.ones(3) / 3, generator) for _ in range(4000)]
    )
    np.testing.assert_allclose(draws.mean(0), [0.5, 0.25, 0.25], atol=5 * (0.05 / 4000) ** 0.5)
    assert abs(draws[:, 0].var() - 0.05) < 0.005


def test_concentrations_too_small_to_draw_with_give_one_class_by_the_prior():
    generator = np.random.Generator(np.random.Philox(0))
    draws = np.stack(
        [
            draw_dirichlet(np.array([3e-320, 1e-320]), np.array([0.75, 0.25]), generator)
            for _ in range(2000)
        ]
    )
    assert set(draws.flatten()) == {0.0, 1.0}
    assert abs(draws[:, 0].mean() - 0.75) < 5 * (0.75 * 0.25 / 2000) ** 0.5


def test_dirichlet_per_class_gives_everyone_the_minimum_and_uses_as_many_samples_as_without():
    federation = build(
        {"kind": "dirichlet-per-class", "concentration_per_client": 0.1, "minimum": 5}
    )
    sizes = (federation.split >= 0).sum(1)
    assert int(sizes.sum()) == 8 * 15
    assert int(sizes.min()) >= 5
    assert int(sizes.max()) > 15
    assert int(federation.count_samples("validation").min()) >= 1
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
    federation = build(
        {"kind": "k-fold", "folds": 5}, sources=(wide,), num_clients=10, train=400, validation=100
    )
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
    columns = {
        "writer": torch.arange(6).repeat_interleave(10),
        "alphabet": torch.arange(6).repeat_interleave(10) // 3,
    }
    test_columns = {"writer": torch.full((8,), 9), "alphabet": torch.arange(8) % 2}
    x = torch.arange(68, dtype=torch.uint8).reshape(68, 1, 1, 1)
    own = Source(
        "toy",
        Samples(x[:60], torch.zeros(60).long(), columns),
        Samples(x[60:], torch.zeros(8).long(), test_columns),
        1,
    )
    shift = {"kind": "natural", "column": "writer", "cluster": "alphabet"}
    config = DataConfig(dataset="toy", shift=[shift], validation_fraction=0.2)
    federation = build_from_sources(config, (own,), Rng(0))
    assert cluster(federation) == [0, 0, 0, 1, 1, 1]
    assert federation.origin is not None
    assert (federation.origin // 10).unique(dim=1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert federation.count_samples("validation").tolist() == [2] * 6
    assert federation.tests[1].x.flatten().tolist() == [61, 63, 65, 67]
    # 10 samples each
    all_of_them = build_from_sources(DataConfig("toy", 6, 8, 2, shift=[shift]), (own,), Rng(0))
    assert (all_of_them.origin // 10).unique(dim=1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    unknown = build_from_sources(
        DataConfig("toy", shift=[{"kind": "natural", "column": "writer"}]), (own,), Rng(0)
    )
    assert unknown.truth is None
    with pytest.raises(
        DataError,
        match="0 of 6 groups of column 'writer' have 12 samples or more; 2 clients ask for that",
    ):
        build_from_sources(DataConfig("toy", 2, 10, 2, shift=[shift]), (own,), Rng(0))
    with pytest.raises(ConfigError, match="unknown column 'writter'; did you mean 'writer'"):
        build_from_sources(
            DataConfig("toy", shift=[{"kind": "natural", "column": "writter"}]), (own,), Rng(0)
        )


def test_two_shifts_cross_when_one_is_interleaved():
    federation = build(
        {"kind": "rotation", "degrees": [0, 180]},
        {"kind": "labels", "groups": ["0-4", "5-9"], "assign": "interleaved"},
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
    assert assign_clusters(3, 7, None, "blocks", stream) == [0, 0, 0, 1, 1, 2, 2]
    assert assign_clusters(2, 4, [3, 1], "interleaved", stream) == [0, 1, 0, 0]
    assert sorted(assign_clusters(2, 4, [3, 1], "shuffled", stream)) == [0, 0, 0, 1]
    with pytest.raises(
        ConfigError, match=r"sizes \(3, 2\) add to 5; expected the number of clients, 4"
    ):
        assign_clusters(2, 4, [3, 2], "blocks", stream)
    with pytest.raises(ConfigError, match="one size for each of the 2 clusters"):
        assign_clusters(2, 4, [4], "blocks", stream)


def test_what_is_left_over_goes_around_the_end():
    assert spread_evenly(7, slots=5, start=4).tolist() == [2, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        (
            [{"kind": "rotaton"}],
            r"data: shift\[0\]: unknown shift 'rotaton'; did you mean 'rotation'",
        ),
        ([{"kind": "iid"}, {"degrees": [0]}], r"data: shift\[1\]: kind is missing"),
        ([{"kind": "rotation", "degree": [0]}], "unknown key 'degree'; did you mean 'degrees'"),
        (
            [{"kind": "rotation", "degrees": []}],
            "degrees is .*expected a list of numbers, 1 or more of them",
        ),
        (
            [{"kind": "dirichlet-per-client", "alpha": 0.5}],
            "alpha means different things .* concentration_total",
        ),
        ([{"kind": "dirichlet-per-class", "alpha": 0.5}], "use one of: concentration_per_client"),
        (
            [{"kind": "dirichlet-per-client"}],
            "needs one of concentration_total and concentration_per_class; 0 given",
        ),
        (
            [{"kind": "dirichlet-per-class", "concentration_per_client": 0}],
            "expected a number, above 0",
        ),
        ([{"kind": "labels", "groups": [[0, 12]]}], "label 12 is not in toy; expected 0 to 9"),
        (
            [{"kind": "labels", "groups": ["0-x"]}],
            'labels as a list or as text such as "0-9, 35-44"',
        ),
        (
            [{"kind": "labels", "groups": ["0-3²"]}],
            'labels as a list or as text such as "0-9, 35-44"',
        ),
        ([{"kind": "label-swap", "swaps": [[[1, 1]]]}], "pairs of two labels"),
        ([{"kind": "label-swap", "swaps": [[[0, 1], [1, 2]]]}], "at most one pair"),
        ([{"kind": "k-fold", "folds": 11}], "at most the 10 classes"),
        ([{"kind": "k-fold", "rest": "odd"}], "'even' or 'released'"),
        (
            [{"kind": "k-fold"}, {"kind": "labels", "groups": [[0]]}],
            "comes after a shift that has set every client's",
        ),
        ([{"kind": "labels", "groups": [[0]]}, {"kind": "k-fold"}], "leave out the labels shift"),
        (
            [{"kind": "k-fold"}, {"kind": "natural", "column": "part"}],
            "k-fold draws from the whole pool",
        ),
        (
            [
                {"kind": "quantity", "concentration_per_client": 1},
                {"kind": "natural", "column": "part"},
            ],
            "cannot change",
        ),
        ([{"kind": "regression-targets"}], "toy is not a regression problem"),
        (
            [{"kind": "visual", "domains": ["fog"]}],
            "domains is .*expected a list of 'clean', 'noise' or 'blur'",
        ),
        ([{"kind": "visual", "domains": []}], r"domains is \[\]; expected .*, 1 or more of them"),
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
    with pytest.raises(
        DataError, match="rotation needs uint8 images; vectors has 3 float32 inputs"
    ):
        build({"kind": "rotation"}, sources=(floats,), num_clients=4, train=1, validation=1)


def test_quarter_turns_need_square_images():
    flat = Source(
        "flat",
        Samples(torch.zeros(9, 1, 2, 3, dtype=torch.uint8), torch.zeros(9).long()),
        source().test,
        1,
    )
    with pytest.raises(
        DataError, match="flat has images of 2x3; a quarter turn needs square images"
    ):
        build(
            {"kind": "rotation", "degrees": [90]},
            sources=(flat,),
            num_clients=2,
            train=1,
            validation=1,
        )


@pytest.mark.parametrize("kind", sorted(SHIFTS))
def test_every_shift_explains_itself_and_each_of_its_fields(kind):
    cls = SHIFTS[kind]
    assert cls.__doc__
    for field in fields(cls):
        assert f"        {field.name}:" in cls.__doc__, (
            f"{cls.__name__} does not explain {field.name}"
        )


NEEDED = {"label-swap": {"swaps": [[[0, 1]]]}, "labels": {"groups": ["0-4"]}}
SIZED = [kind for kind in sorted(SHIFTS) if "sizes" in {one.name for one in fields(SHIFTS[kind])}]


@pytest.mark.parametrize("kind", SIZED)
def test_no_sizes_are_refused(kind):
    with pytest.raises(ConfigError, match=r"sizes is \[\]; expected"):
        parse_shift({"kind": kind, "sizes": [], **NEEDED.get(kind, {})})


def test_a_shift_becomes_its_table_and_back():
    for shift in (
        Rotation([0, 45], sizes=[1, 2]),
        DirichletPerClient(concentration_total=[0.5, 3]),
    ):
        table = to_plain(shift)
        assert parse_shift(table) == shift
        assert table["kind"] == shift.kind
        assert "concentration_per_class" not in table


def applied(shift: Shift, clients: int, *sources: Source) -> tuple[Client, ...]:
    """The plan after a shift, with a stream for everyone (-1) and for each client."""
    start = (Client(10, (0.8, 0.2, 0.0)),) * clients
    return shift.apply(
        start, sources or (source(),), lambda client: np.random.default_rng(client + 1)
    )


def flat() -> Source:
    """A regression problem."""
    return Source(
        "flat",
        Samples(torch.zeros(60, 2), torch.zeros(60)),
        Samples(torch.zeros(1, 2), torch.zeros(1)),
        0,
    )


@pytest.mark.option("Rotation.assign", "blocks", "interleaved", "shuffled")
@pytest.mark.option("Visual.assign", "blocks", "interleaved", "shuffled")
@pytest.mark.option("Labels.assign", "blocks", "interleaved", "shuffled")
@pytest.mark.option("LabelSwap.assign", "blocks", "interleaved", "shuffled")
@pytest.mark.option("RegressionTargets.assign", "blocks", "interleaved", "shuffled")
@pytest.mark.option("Domain.assign", "blocks", "interleaved", "shuffled")
@pytest.mark.option("DirichletPerClient.assign", "blocks", "interleaved", "shuffled")
@pytest.mark.parametrize(
    ("make", "sources"),
    [
        (lambda **given: Rotation((0, 90), **given), 1),
        (lambda **given: Visual(("clean", "blur"), **given), 1),
        (lambda **given: Labels(("0-4", "5-9"), **given), 1),
        (lambda **given: LabelSwap(((), ((0, 1),)), **given), 1),
        (lambda **given: RegressionTargets(**given), 0),
        (lambda **given: Domain(**given), 2),
        (lambda **given: DirichletPerClient(concentration_total=(1, 2), **given), 1),
    ],
    ids=[
        "rotation",
        "visual",
        "labels",
        "label-swap",
        "regression-targets",
        "domain",
        "dirichlet-per-client",
    ],
)
def test_clusters_are_dealt_in_blocks_in_turn_or_by_chance(make, sources):
    """Three and five of eight clients; by chance: the blocks in the order of the stream for everyone."""
    pools = tuple(source(name=str(number)) for number in range(sources)) or (flat(),)
    order = np.random.default_rng(0).permutation(8).tolist()
    blocks = [0, 0, 0, 1, 1, 1, 1, 1]
    for assign, expected in (
        ("blocks", blocks),
        ("interleaved", [0, 1, 0, 1, 0, 1, 1, 1]),
        ("shuffled", [blocks[place] for place in order]),
    ):
        plan = applied(make(sizes=(3, 5), assign=assign), 8, *pools)
        assert [client.cluster_places for client in plan] == [(place,) for place in expected]
    assert [client.cluster_places for client in applied(make(sizes=(3, 5)), 8, *pools)] == [
        (place,) for place in blocks
    ]


@pytest.mark.option("Visual.domains", "clean", "noise", "blur")
def test_each_cluster_has_the_domain_of_its_place():
    """Blur, noise and clean, in this order."""
    plan = applied(Visual(("blur", "noise", "clean"), sigma=0.25, radius=1.5), 3)
    assert [client.cluster_name for client in plan] == ["blur", "noise", "clean"]
    assert [client.recipe.noise for client in plan] == [0.0, 0.25, 0.0]
    assert [[blur.radius for blur in client.recipe.transforms] for client in plan] == [
        [1.5],
        [],
        [],
    ]  # type: ignore[union-attr]


@pytest.mark.option("Visual.noise", "redrawn", "fixed")
def test_noise_is_in_the_images_or_left_to_every_access():
    """Pixels stay whole numbers and each client has its deviation, or the federation holds disturbed numbers."""
    toy, shift = (
        source(),
        {"kind": "visual", "domains": ["clean", "noise"], "sizes": [3, 5], "sigma": 0.5},
    )
    later = build(shift, sources=(toy,))
    assert later.origin is not None
    assert torch.equal(later.x, toy.train.x[later.origin])
    assert later.noise is not None
    assert later.noise.tolist() == [0.0] * 3 + [0.5] * 5
    now = build({**shift, "noise": "fixed"}, sources=(toy,))
    assert now.noise is None
    gap = now.x.double() - (toy.train.x[later.origin].double() / 127.5 - 1)
    assert float(gap[:3].abs().max()) < 1e-3
    assert float(gap[3:].std()) == pytest.approx(0.5, abs=0.05)
    assert float((gap[3] - gap[4]).std()) == pytest.approx(0.5 * 2**0.5, abs=0.1), (
        "each client has noise of its own"
    )


@pytest.mark.option("KFold.rest", "even", "released")
def test_the_rest_is_spread_over_all_classes_or_left_to_the_last():
    """Of 28 samples 14 come from 5 main classes: 3, 3, 3, 3 and 2. The other 14 are one of each of 10 classes and 4.

    Even: the 4 go to the classes 0 to 3, and with the second client to 4 to 7; released: all to
    class 9.
    """
    for rest, expected in (
        ("even", [[5, 5, 5, 5, 3, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 5, 5, 5, 4, 3]]),
        ("released", [[4, 4, 4, 4, 3, 1, 1, 1, 1, 5], [1, 1, 1, 1, 1, 4, 4, 4, 4, 7]]),
    ):
        shift = KFold(folds=2, primary=0.5, rest=rest)
        plan = shift.apply((Client(28, (1.0, 0.0, 0.0)),) * 2, (source(),), np.random.default_rng)
        assert [list(client.counts) for client in plan] == expected


@pytest.mark.parametrize(
    ("name", "prior"), [("concentration_total", True), ("concentration_per_class", False)]
)
def test_a_concentration_is_the_sum_over_classes_or_that_of_each(name, prior):
    """A pool with 30, 20 and 10 samples of three classes; 4 in total is 2, 4 / 3 and 2 / 3."""
    y = torch.tensor([0] * 30 + [1] * 20 + [2] * 10)
    pool = Source("uneven", Samples(torch.zeros(60, 1), y), Samples(torch.zeros(1, 1), y[:1]), 3)
    plan = applied(DirichletPerClient(**{name: 4.0}), 5, pool)
    alpha = [2.0, 4 / 3, 2 / 3] if prior else [4.0, 4.0, 4.0]
    for client, planned in enumerate(plan):
        expected = np.random.default_rng(client + 1).dirichlet(alpha)
        np.testing.assert_allclose(np.array(planned.mixture), expected, rtol=1e-12)
    assert len({planned.mixture for planned in plan}) == 5


def test_the_first_label_that_is_no_class_is_refused():
    """Ten classes are 0 to 9."""
    for label in (10, -1):
        for shift in (Labels(((0, label),)), LabelSwap((((0, label),),))):
            with pytest.raises(ConfigError, match=f"label {label} is not in toy; expected 0 to 9"):
                applied(shift, 2)


@pytest.mark.option("DataConfig.normalize", "half", "standard", "none")
def test_pixels_are_normalized_as_asked():
    """v / 127.5 - 1; minus the mean and by the deviation of the pool; or v / 255."""
    toy = source()
    pixels = toy.train.x.double() / 255
    shift = {
        "kind": "visual",
        "domains": ["noise", "clean"],
        "sizes": [1, 7],
        "sigma": 0.001,
        "noise": "fixed",
    }
    for normalize, expected in (
        ("half", pixels * 2 - 1),
        ("standard", (pixels - pixels.mean()) / pixels.std(correction=0)),
        ("none", pixels),
    ):
        federation = build(shift, sources=(toy,), normalize=normalize)
        assert federation.origin is not None
        torch.testing.assert_close(
            federation.x[1].double(), expected[federation.origin[1]], rtol=0, atol=2e-3
        )
        # keeps whole pixels, and what to do with them
        whole = build(sources=(toy,), normalize=normalize)
        seen = (pixels - whole.mean[0]) / whole.std[0] if whole.mean else pixels
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-3)


@pytest.mark.option("DataConfig.test", "cluster", "client")
@pytest.mark.option("DataConfig.test_source", "train", "test")
def test_tests_are_shared_or_each_clients_own_from_the_pool_or_the_test_set():
    """Which images are in them: all 60 of the test set; 5 of the pool that nobody trains on; 5 of the test set."""
    toy = source()
    images = {"pool": toy.train.x.flatten(1), "test": toy.test.x.flatten(1)}

    def places(federation, name):
        tests = [test.x.flatten(1) for test in federation.tests]
        return [
            [(images[name] == one).all(1).nonzero().flatten().tolist() for one in rows]
            for rows in tests
        ]

    shared = build(sources=(toy,))
    assert places(shared, "test") == [[[place] for place in range(60)]]
    assert shared.test_of.tolist() == [0] * 8
    for where in ("pool", "test"):
        chosen = {"pool": "train", "test": "test"}[where]
        own = build(sources=(toy,), test="client", test_source=chosen, test_samples=5)
        found = [place for rows in places(own, where) for one in rows for place in one]
        assert [len(test.x) for test in own.tests] == [5] * 8
        assert own.test_of.tolist() == list(range(8))
        assert len(found) == len(set(found)) == 40
        if where == "pool":
            assert own.origin is not None
            assert not set(found) & set(own.origin.flatten().tolist())


def test_coefficients_are_drawn_from_their_range():
    """Each cluster's own stream, between 2 and 3."""
    plan = applied(RegressionTargets(clusters=2, low=2.0, high=3.0), 2, flat())
    for cluster, client in enumerate(plan):
        assert client.recipe.targets is not None
        expected = np.random.default_rng(cluster + 1).uniform(2.0, 3.0, 2)
        assert client.recipe.targets.theta == pytest.approx(expected.tolist())


def parts(samples, num_clients, generator):
    """Client k has part k of the data; the parts beyond the clients go to nobody."""
    part = samples.columns["part"].numpy()
    return np.where(part < num_clients, part, -1)


def test_a_partition_gives_each_client_the_samples_that_the_function_says():
    """All of them, split into training and validation; no sample twice, and those of nobody to nobody."""
    shift = {"kind": "partition", "function": f"{__name__}:parts"}
    federation = build(shift, num_clients=5, train=None, validation=None)
    assert federation.origin is not None
    for client in range(5):
        own = federation.origin[client][federation.split[client] >= 0]
        assert sorted(own.tolist()) == list(range(client, 400, 8))
    assert federation.count_samples("train").tolist() == [40] * 5
    assert federation.truth is None


def test_a_partition_limits_where_samples_are_drawn_when_their_number_is_given():
    federation = build(
        {"kind": "partition", "function": f"{__name__}:parts"},
        {"kind": "rotation", "degrees": [0, 90]},
    )
    assert federation.origin is not None
    for client in range(8):
        own = federation.origin[client][federation.split[client] >= 0]
        assert len(own) == len(set(own.tolist())) == 15
        assert set((own % 8).tolist()) == {client}
    assert cluster(federation) == [0] * 4 + [1] * 4


def test_the_test_set_of_a_partition_is_not_divided():
    """Its clients draw from all of it, in the class shares of their own."""
    shift = {"kind": "partition", "function": f"{__name__}:parts"}
    federation = build(shift, test="client", test_source="test", test_samples=5)
    assert [len(test.x) for test in federation.tests] == [5] * 8


def test_a_client_with_fewer_samples_than_asked_for_is_named():
    with pytest.raises(
        DataError,
        match=r"gives client 0 50 samples; 75 are asked for: lower train or validation, or",
    ):
        build({"kind": "partition", "function": f"{__name__}:parts"}, train=60, validation=15)


@final
@dataclass(frozen=True)
class Inverted(Shift):
    """Negatives, for everyone."""

    kind: ClassVar[str] = "inverted"
    scale: int = 1

    def apply(self, clients, sources, streams):
        return tuple(
            c.plant_cluster(0, "negative", transforms=(torch.bitwise_not,)) for c in clients
        )


def test_a_shift_keeps_its_import_path_when_it_is_stored_and_a_function_too():
    given = DataConfig("digits", shift=[Inverted(), Partition(parts), Rotation()])  # type: ignore[arg-type]
    kinds = [one["kind"] for one in given.shift]  # type: ignore[index]
    assert kinds == [f"{__name__}:Inverted", "partition", "rotation"]
    assert [type(one) for one in given.build_shifts()] == [Partition, Inverted, Rotation]
    assert given.build_shifts()[0].function == f"{__name__}:parts"  # type: ignore[attr-defined]


def test_an_own_transform_is_applied_to_training_and_test_data():
    """Any function of a batch that has a hash is one."""
    toy = source()
    federation = build({"kind": f"{__name__}:Inverted"}, sources=(toy,))
    assert federation.origin is not None
    np.testing.assert_array_equal(
        federation.x[0].numpy(), 255 - toy.train.x[federation.origin[0]].numpy()
    )
    np.testing.assert_array_equal(federation.tests[0].x.numpy(), 255 - toy.test.x.numpy())


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (
            {"kind": f"{__name__}:Inverted", "scael": 2},
            "shift[0]: unknown key 'scael'; did you mean 'scale'?",
        ),
        (
            {"kind": f"{__name__}:Inverted", "scale": "x"},
            "shift[0]: scale is 'x'; expected a whole number",
        ),
        ({"kind": f"{__name__}:Nowhere"}, "Nowhere': module"),
        ({"kind": f"{__name__}:parts"}, "expected a subclass of coterie.data.plan.Shift"),
        (
            {"kind": "coterie.data.plan:Shift"},
            "'coterie.data.plan:Shift' lacks apply; a shift defines",
        ),
        (
            {"kind": "partition", "function": "parts"},
            "function is 'parts'; expected an import path",
        ),
    ],
)
def test_what_is_no_shift_is_one_line(shift, said):
    with pytest.raises(ConfigError) as raised:
        build(shift)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
