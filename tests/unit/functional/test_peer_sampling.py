"""Views of few members: rings, their neighbors, and the graph that they make."""

import itertools

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from coterie.errors import ConfigError
from coterie.functional.peer_sampling import PeerSampling, Rings
from coterie.rng import Rng

MANY = 10_000


def everybody(population: int) -> torch.Tensor:
    return torch.ones(population, dtype=torch.bool)


def place_in_plain_python(member: int, keys: list[int], population: int) -> int:
    """The place of a member on a ring, in whole numbers of any size."""
    words = 1 << 64

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % words
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % words
        return word ^ (word >> 31)

    low = next(n for n in range(1, population + 1) if n * n >= population)
    high = -(-population // low)
    while True:
        left, right = member % low, member // low
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + mix((right + key) % words) % low) % low
            else:
                right = (right + mix((left + key) % words) % high) % high
        member = left + low * right
        if member < population:
            return member


@pytest.mark.parametrize("population", [2, 3, 7, 16, 17, 101])
def test_a_ring_is_an_order_of_the_whole_population(population):
    rings = Rings.make(Rng(5), range(4), population)
    members = np.arange(population)[:, None]
    places = rings.locate(members)
    assert places.shape == (population, 4)
    for ring, keys in enumerate(rings.keys.tolist()):
        expected = [place_in_plain_python(m, keys, population) for m in range(population)]
        assert places[:, ring].tolist() == expected
        assert sorted(expected) == list(range(population))
    assert (rings.members_at(places) == members).all()


def views_by_hand(rng, sampling, ids, masks):
    """Views from whole rings, member by member."""
    population = masks.shape[1]
    rings = Rings.make(rng, sampling.list_rings(rng.round), population)
    orders = rings.locate(np.arange(population)[:, None]).argsort(0).T.tolist()
    found = []
    for client, mask in zip(ids, masks.tolist(), strict=True):
        view = []
        for order in orders:
            left = [m for m in order if mask[m] or m == client]
            at = left.index(client)
            for neighbor in (left[(at + 1) % len(left)], left[at - 1]):
                view.append(-1 if neighbor in view else neighbor)
        found.append(view)
    return found


@pytest.mark.parametrize("share", [1.0, 0.6, 0.1, 0.01])
@pytest.mark.parametrize("by_client", [False, True])
def test_a_view_has_the_next_reachable_members_on_both_sides_of_each_ring(share, by_client):
    population, sampling, rng = 400, PeerSampling(view=6, shuffle=2), Rng(2).at_round(7)
    stream = np.random.default_rng(int(share * 100))
    masks = stream.random((population if by_client else 1, population)) < share
    masks[:, :3] = True
    ids = torch.tensor([0, 3, 57, 399])
    reachable = torch.from_numpy(masks[ids] if by_client else masks[0])
    views = sampling.draw_views(rng, ids, reachable)
    expected = views_by_hand(rng, sampling, ids.tolist(), np.broadcast_to(masks, (400, 400))[ids])
    assert [
        row[: len(want)] for row, want in zip(views.tolist(), expected, strict=True)
    ] == expected


@pytest.mark.parametrize("left", [0, 1, 2])
def test_one_who_reaches_few_has_them_in_its_view(left):
    reachable = torch.zeros(50, dtype=torch.bool)
    reachable[10 : 10 + left] = True
    views = PeerSampling(view=6, shuffle=2).draw_views(Rng(0), torch.tensor([3, 10]), reachable)
    for client, row in zip((3, 10), views.tolist(), strict=True):
        others = [m for m in range(10, 10 + left) if m != client]
        assert sorted(set(row) - {-1}) == others
        assert len(row) - row.count(-1) == len(others)


def test_members_that_are_not_next_can_be_unknown():
    """Who knows the members of its view alone has the same view as one who knows all."""
    sampling, rng = PeerSampling(view=8, shuffle=2), Rng(5).at_round(3)
    for client in range(40):
        own = torch.tensor([client])
        view = sampling.draw_views(rng, own, everybody(40))
        known = torch.zeros(40, dtype=torch.bool)
        known[view[view >= 0]] = True
        assert torch.equal(sampling.draw_views(rng, own, known), view)


def links_of(views: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    rows, slots = np.nonzero(views.numpy() >= 0)
    return rows, views.numpy()[rows, slots]


def check_overlay(views: torch.Tensor, present: np.ndarray, view: int, lost: float) -> None:
    """In-degrees are narrow, nobody absent is in a view, and the graph of those present is one."""
    readers, read = links_of(views[present])
    readers = np.flatnonzero(present)[readers]
    assert (readers != read).all()
    assert present[read].all()
    degrees = np.bincount(read, minlength=len(present))[present]
    # Who is in whose view is mutual, so a member is in as many views as it has members in its own.
    assert (degrees == (views.numpy()[present] >= 0).sum(1)).all()
    assert degrees.max() <= view
    assert degrees.min() >= view - 5
    assert degrees.mean() >= view - lost
    graph = coo_array((np.ones(len(read)), (readers, read)), shape=(len(present),) * 2)
    _, label = connected_components(graph, connection="strong")
    assert len(set(label[present])) == 1


def test_after_a_hundred_shuffles_in_degrees_are_narrow_and_the_overlay_is_connected():
    """Two of the 30 slots of a client hold the same member with probability 30 * 29 / 2 / 10,000."""
    sampling = PeerSampling(view=30, shuffle=8)
    for index in (0, 100):
        views = sampling.draw_views(Rng(4).at_round(index), torch.arange(MANY), everybody(MANY))
        check_overlay(views, np.ones(MANY, dtype=bool), 30, lost=0.1)


@pytest.mark.parametrize("population", [100, MANY])
def test_views_heal_in_the_round_in_which_a_third_have_left(population):
    sampling, rng = PeerSampling(view=30, shuffle=8), Rng(4).at_round(100)
    present = np.random.default_rng(1).random(population) >= 0.3
    views = sampling.draw_views(rng, torch.arange(population), torch.from_numpy(present))
    if population == MANY:
        check_overlay(views, present, 30, lost=0.1)
    else:  # of 70 members, 30 slots name some twice
        rows, read = links_of(views[present])
        assert present[read].all()
        graph = coo_array((np.ones(len(read)), (rows, read)), shape=(population,) * 2)
        assert (views[present] >= 0).sum(1).min() >= 15
        assert set(np.bincount(read, minlength=population)[~present]) == {0}
        assert graph.sum() == len(read)
    before = sampling.draw_views(rng, torch.arange(population), everybody(population))
    stayed = torch.from_numpy(present)[before.clamp(min=0)] & (before >= 0)
    stayed &= torch.from_numpy(present)[:, None]
    # Who has not left keeps its slot, but where a neighbor found anew has an earlier one.
    same = (views == before)[stayed].double().mean()
    assert same > (0.99 if population == MANY else 0.8)


def test_two_members_are_connected_by_any_single_ring():
    views = PeerSampling(view=2, shuffle=2).draw_views(
        Rng(0).at_round(3), torch.arange(MANY), everybody(MANY)
    )
    check_overlay(views, np.ones(MANY, dtype=bool), 2, lost=0)


def test_the_oldest_members_are_replaced_in_each_round():
    sampling, ids = PeerSampling(view=12, shuffle=4), torch.arange(MANY)
    views = [sampling.draw_views(Rng(1, index), ids, everybody(MANY)) for index in (-1, 0, 1, 2)]
    for before, after in itertools.pairwise(views):
        both = (before[:, 4:] >= 0) & (after[:, :-4] >= 0)
        assert (before[:, 4:] == after[:, :-4])[both].all()
        assert both.double().mean() > 0.99
    # After three rounds of four no ring is left.
    assert (views[0] == views[3]).double().mean() < 0.01


def test_without_a_shuffle_views_stay():
    sampling, ids = PeerSampling(view=4, shuffle=0), torch.arange(90)
    first, later = (sampling.draw_views(Rng(1, k), ids, everybody(90)) for k in (0, 50))
    assert torch.equal(first, later)


def test_a_view_does_not_depend_on_who_else_is_asked_for_and_on_the_number_of_clients_at_once():
    sampling, rng = PeerSampling(view=8, shuffle=2), Rng(6).at_round(2)
    reachable = torch.from_numpy(np.random.default_rng(3).random(MANY) < 0.02)
    whole = sampling.draw_views(rng, torch.arange(MANY), reachable)
    for ids in (torch.tensor([4711]), torch.arange(5, MANY, 13)):
        assert torch.equal(sampling.draw_views(rng, ids, reachable), whole[ids])


def test_each_member_is_as_likely_a_neighbor_as_any_other():
    """Both neighbors of one client on 5,000 rings: chi-square with 39 degrees, mean 39."""
    rings = Rings.make(Rng(9), range(5000), 41)
    at = rings.locate(np.array([17]))
    seen = sum(np.bincount(rings.members_at((at + step) % 41), minlength=41) for step in (1, 40))
    assert seen[17] == 0
    # 39 + 4 * sqrt(2 * 39) = 74
    assert ((np.delete(seen, 17) - 250) ** 2 / 250).sum() < 74


@pytest.mark.parametrize(
    ("view", "shuffle", "text"),
    [
        (7, 2, "view is 7; expected an even number"),
        (6, 3, r"shuffle is 3; expected an even number, at most view \(6\)"),
        (6, 8, r"shuffle is 8; expected an even number, at most view \(6\)"),
    ],
)
def test_odd_numbers_are_refused(view, shuffle, text):
    with pytest.raises(ConfigError, match=text):
        PeerSampling(view=view, shuffle=shuffle)
