import numpy as np
import pytest

from coterie.data._partition import (
    SampleRequest,
    allocate_samples,
    apportion_total,
    draw_class_counts,
)
from coterie.errors import DataError


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


LABELS = np.repeat(np.arange(4), 10)


def test_no_sample_serves_two_clients_and_every_wish_is_served():
    wishes = [
        SampleRequest(7),
        SampleRequest(5, labels=(1,)),
        SampleRequest(6, mixture=(0.5, 0.5, 0.0, 0.0)),
        SampleRequest(4, counts=(0, 0, 1, 3)),
        SampleRequest(18),
    ]
    parts = allocate_samples(wishes, LABELS, stream())
    together = np.concatenate(parts)
    assert sorted(together) == list(range(40))  # the wishes add to the whole pool
    assert [len(part) for part in parts] == [7, 5, 6, 4, 18]
    assert set(LABELS[parts[1]]) == {1}
    assert np.bincount(LABELS[parts[3]], minlength=4).tolist() == [0, 0, 1, 3]


def test_samples_without_a_wish_for_classes_are_a_uniform_draw():
    """Each of 40 samples is drawn with probability 10/40: 2,000 draws of 10 give each 500, standard deviation 19.4."""
    generator, seen = stream(), np.zeros(40)
    for _ in range(2000):
        seen[allocate_samples([SampleRequest(10)], LABELS, generator)[0]] += 1
    assert np.abs(seen - 500).max() < 5 * 19.4


def test_a_mixture_is_followed_while_its_classes_last():
    """2,000 samples of a mixture (0.8, 0.2): the first class gets 1,600, standard deviation 18."""
    labels = np.repeat(np.arange(3), 5000)
    part = allocate_samples([SampleRequest(2000, mixture=(0.8, 0.2, 0.0))], labels, stream())[0]
    counts = np.bincount(labels[part], minlength=3)
    assert abs(counts[0] - 1600) < 5 * 18
    assert counts[2] == 0


def test_a_class_that_runs_out_is_replaced_by_the_clients_others_and_then_by_any():
    """30 samples of (1/2, 1/2, 0, 0): both classes are used up, and 10 come from the two others."""
    part = allocate_samples([SampleRequest(30, mixture=(0.5, 0.5, 0.0, 0.0))], LABELS, stream())[0]
    counts = np.bincount(LABELS[part], minlength=4)
    assert counts[:2].tolist() == [10, 10]
    assert counts[2:].sum() == 10


def test_many_extreme_mixtures_end():
    """One-class mixtures of a tiny pool that all want the same class are served, each in full."""
    parts = allocate_samples(
        [SampleRequest(1, mixture=(1.0, 0.0, 0.0, 0.0))] * 40, LABELS, stream()
    )
    assert len(np.unique(np.concatenate(parts))) == 40


def test_overlapping_groups_are_divided_when_a_greedy_order_fails():
    """{0,1} and {1,2} want 10 each and {2} wants 10 of a pool of 10 per class: only one division of class 1 works."""
    labels = np.repeat(np.arange(3), 10)
    wishes = [
        SampleRequest(10, labels=(0, 1)),
        SampleRequest(10, labels=(1, 2)),
        SampleRequest(10, labels=(2, 0)),
    ]
    for seed in range(20):
        parts = allocate_samples(wishes, labels, stream(seed))
        assert len(np.unique(np.concatenate(parts))) == 30
        for wish, part in zip(wishes, parts, strict=True):
            assert set(labels[part]) <= set(wish.labels or ())


def test_what_is_impossible_is_said_with_numbers():
    with pytest.raises(
        DataError,
        match=r"100 clients x 600 samples = 60,000; the pool has 50,000: lower num_clients",
    ):
        allocate_samples([SampleRequest(600)] * 100, np.zeros(50_000, np.int64), stream())
    with pytest.raises(DataError, match="2 clients ask for 41 samples; the pool has 40"):
        allocate_samples([SampleRequest(20), SampleRequest(21)], LABELS, stream())
    with pytest.raises(
        DataError, match="labels 0, 2: 21 samples are asked for; the pool has 20 of them"
    ):
        allocate_samples([SampleRequest(21, labels=(2, 0))], LABELS, stream())
    with pytest.raises(DataError, match="class 3: 12 samples are asked for; the pool has 10 of it"):
        allocate_samples([SampleRequest(6, counts=(0, 0, 0, 6))] * 2, LABELS, stream())
    with pytest.raises(
        DataError, match="overlapping label groups ask for 25 samples; only 20 can be served"
    ):
        draw_class_counts(
            [
                SampleRequest(10, labels=(0,)),
                SampleRequest(10, labels=(1,)),
                SampleRequest(5, labels=(0, 1)),
            ],
            np.array([10, 10, 10]),
            stream(),
        )
    with pytest.raises(DataError, match="1 client x 1 samples = 1; the pool has 0"):
        allocate_samples([SampleRequest(1)], np.zeros(0, np.int64), stream())


def test_shares_add_up_and_the_minimum_comes_first():
    assert apportion_total(10, np.array([0.5, 0.25, 0.25]), minimum=2).tolist() == [4, 3, 3]
    assert apportion_total(7, np.array([1.0, 0.0])).tolist() == [7, 0]
    assert apportion_total(3, np.array([1.0, 1.0])).tolist() == [2, 1]
    # 5, 2.6 and 2.4: one more for the 0.6
    assert apportion_total(10, np.array([0.5, 0.26, 0.24])).tolist() == [5, 3, 2]
    with pytest.raises(DataError, match="3 clients x a minimum of 4 = 12 samples; there are 11"):
        apportion_total(11, np.ones(3), minimum=4)
