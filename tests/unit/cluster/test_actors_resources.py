"""What of a cluster each block gets: as much as lets all blocks start at once, in units that Ray can count."""

import random
from fractions import Fraction

import pytest

pytest.importorskip("ray")

from coterie.cluster.actors import _choose_resources, _round_resource, divide_resource


def fits(machines: list[Fraction], blocks: int, share: Fraction) -> bool:
    return sum(size // share for size in machines) >= blocks


def test_a_share_is_the_largest_with_which_all_find_a_place():
    """In exact fractions, over every share that fills a machine by a whole number of blocks."""
    stream = random.Random(4)
    for _ in range(300):
        machines = [stream.randint(0, 6) for _ in range(stream.randint(1, 4))]
        blocks, most = stream.randint(1, 7), stream.choice([1, 2, 3, 8])
        whole = [Fraction(size) for size in machines]
        candidates = {Fraction(most)} | {
            size / count for size in whole if size for count in range(1, 30)
        }
        fitting = [one for one in candidates if one <= most and fits(whole, blocks, one)]
        expected = max(fitting, default=Fraction(0))
        assert divide_resource(machines, blocks, most) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("amount", "expected"),
    [(1, 1), (2.7, 2), (1.0, 1), (2 / 3, 0.6666), (0.99999, 0.9999), (0.5, 0.5), (0.00009, 0.0), (0, 0)],
)  # fmt: skip
def test_shares_are_rounded_down_to_what_ray_counts(amount, expected):
    assert _round_resource(amount) == expected


MACHINES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}]


@pytest.mark.parametrize(
    ("blocks", "device", "cpus", "gpus", "expected"),
    [
        (2, "cpu", 4, None, {"num_cpus": 2}),
        (1, "cpu", 3, None, {"num_cpus": 3}),
        (9, "cpu", 1, None, {"num_cpus": 0.6666}),
        (2, "cuda", 4, None, {"num_cpus": 2, "num_gpus": 0.5}),
        (3, "cuda:0", 1, None, {"num_cpus": 1, "num_gpus": 0.3333}),
        (1, "cuda", 1, None, {"num_cpus": 1, "num_gpus": 1}),
        (2, "cuda", 1, 0.25, {"num_cpus": 1, "num_gpus": 0.25}),
        (2, "cuda", 1, 0, {"num_cpus": 1}),
        (2, "cpu", 1, 0.25, {"num_cpus": 1, "num_gpus": 0.25}),
    ],
)
def test_processors_and_cards_are_divided_each(blocks, device, cpus, gpus, expected):
    assert _choose_resources(MACHINES, blocks, device, cpus, gpus) == expected


def test_without_cards_a_block_has_none():
    assert _choose_resources([{"CPU": 2.0}], 2, "cuda", 4, None) == {"num_cpus": 1}
    assert _choose_resources([{}], 2, "cpu", 4, None) == {"num_cpus": 0}
