"""The simplex of models: regions, uniform draws, assignment."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor

from coterie.errors import ConfigError
from coterie.functional import simplex
from coterie.rng import Rng


def stream(seed: int = 0) -> np.random.Generator:
    return Rng(seed).generator("test")


CENTERS = {2: [0.8, 0.2], 3: [0.6, 0.3, 0.1], 4: [0.7, 0.1, 0.1, 0.1], 10: [1.0] + [0.0] * 9}


@pytest.mark.parametrize("size", sorted(CENTERS))
@pytest.mark.parametrize("radius", [0.0, 0.2, 1.1, 2.0])
def test_draws_lie_in_the_region(size: int, radius: float):
    """On the simplex, within the radius, whatever way they were drawn (a vertex of ten corners needs the chain)."""
    center = torch.tensor(CENTERS[size], dtype=torch.float64)
    points = simplex.sample_region(stream(), center, radius, 50)
    assert points.shape == (50, size)
    assert float((points.sum(1) - 1).abs().max()) < 1e-12
    assert float(points.min()) >= 0
    assert float((points - center).abs().sum(1).max()) <= radius + 1e-9


@pytest.mark.parametrize("size", [3, 5])
def test_a_radius_of_two_is_the_whole_simplex(size: int):
    """Moments of Dirichlet(1): mean 1/M, variance (M-1)/(M^2 (M+1)), to 5 standard errors of 20,000 draws."""
    points = simplex.sample_region(stream(), torch.full((size,), 1 / size), 2.0, 20_000)
    variance = (size - 1) / (size**2 * (size + 1))
    assert float((points.mean(0) - 1 / size).abs().max()) < 5 * math.sqrt(variance / 20_000)
    assert points.var(0).tolist() == pytest.approx([variance] * size, rel=0.06)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("radius", [0.4, 0.9])
def test_chain_and_rejection_have_one_law(size: int, radius: float):
    """Each coordinate of the Gibbs chain against plain rejection from the whole simplex (Kolmogorov-Smirnov)."""
    center = torch.tensor(CENTERS[size], dtype=torch.float64)
    whole = stream(1).dirichlet(np.ones(size), 60_000)
    plain = whole[np.abs(whole - center.numpy()).sum(1) <= radius][:3000]
    chain = simplex._run_gibbs_chains(stream(2), center.numpy(), radius, 3000)
    drawn = simplex.sample_region(stream(3), center, radius, 3000).numpy()
    for axis in range(size):
        assert ks_2samp(chain[:, axis], plain[:, axis]).pvalue > 1e-3
        assert ks_2samp(drawn[:, axis], plain[:, axis]).pvalue > 1e-3


def test_two_corners_are_an_interval():
    """alpha_1 is uniform on [0.8 - 0.3, 1]: mean 0.75, range inside."""
    points = simplex.sample_region(stream(), torch.tensor(CENTERS[2]), 0.6, 4000)[:, 0]
    assert 0.5 <= float(points.min()) < 0.51
    assert 0.99 < float(points.max()) <= 1
    assert float(points.mean()) == pytest.approx(0.75, abs=5 * 0.5 / math.sqrt(12 * 4000))


def test_one_corner_has_one_point():
    """M = 1: alpha is 1."""
    assert simplex.sample_region(stream(), torch.ones(1), 0.5, 3).tolist() == [[1.0]] * 3


def test_the_released_sampler_leaves_the_simplex():
    """Its draws do not sum to 1: kept only to compare with published runs."""
    center = torch.tensor(CENTERS[3], dtype=torch.float64)
    steps = simplex.sample_released(stream(), center, 0.5, 1000) - center
    assert float(steps.sum(1).abs().mean()) > 0.05
    length = steps.abs().sum(1)
    assert float(length.max()) <= 0.5, "the radius bounds the L1 length"
    assert float(length.mean()) == pytest.approx(0.25, abs=0.03), "lengths are uniform"
    assert float((steps < 0).double().mean()) == pytest.approx(0.5, abs=0.05), (
        "directions are of both signs"
    )


@pytest.mark.parametrize("center", [*CENTERS.values(), [0.25] * 4])
def test_mean_distance_is_the_integral(center: list[float]):
    """The closed form against 200,000 uniform points (5 standard errors)."""
    points = torch.from_numpy(stream().dirichlet(np.ones(len(center)), 200_000))
    gaps = (points - torch.tensor(center, dtype=torch.float64)).abs().sum(1)
    error = 5 * float(gaps.std()) / math.sqrt(len(gaps))
    assert float(simplex.mean_distance(torch.tensor(center, dtype=torch.float64))) == pytest.approx(
        float(gaps.mean()), abs=error
    )


def test_mean_distance_at_a_vertex_and_the_barycenter():
    """2 (1 - 1/M) and 2 (1 - 1/M)^M, and against a grid for M = 2."""
    vertex, middle = torch.tensor([1.0, 0, 0, 0]), torch.full((4,), 0.25)
    assert float(simplex.mean_distance(vertex)) == pytest.approx(1.5)
    assert float(simplex.mean_distance(middle)) == pytest.approx(2 * 0.75**4)
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    by_grid = float((2 * (grid - 0.8).abs()).mean())
    assert float(
        simplex.mean_distance(torch.tensor([0.8, 0.2], dtype=torch.float64))
    ) == pytest.approx(by_grid, abs=1e-6)


def fold_counts(folds: int, clients: int = 20, classes: int = 10) -> Tensor:
    """400 samples from the client's own block of classes and 100 over all classes."""
    counts = torch.full((clients, classes), 100 // classes)
    width = classes // folds
    for k in range(clients):
        block = slice(k % folds * width, (k % folds + 1) * width)
        counts[k, block] += 400 // width
    return counts


@pytest.mark.parametrize("folds", [2, 5])
def test_folds_are_grouped_perfectly(folds: int):
    """Clients of one fold have one mixture; as many distinct ones as folds; the groups are the folds."""
    mixtures = simplex.topic_mixtures(fold_counts(folds), folds, seed=0)
    assert mixtures.sum(1).tolist() == pytest.approx([1.0] * 20)
    for k in range(20):
        torch.testing.assert_close(mixtures[k], mixtures[k % folds], rtol=0, atol=1e-12)
    label, centers = simplex.cluster_points(mixtures, folds, stream())
    truth = torch.arange(20) % folds
    assert torch.equal(label[:, None] == label, truth[:, None] == truth)
    torch.testing.assert_close(centers[label], mixtures, rtol=0, atol=1e-12)


def test_more_topics_than_classes_are_refused():
    """One line that names the limit."""
    with pytest.raises(ConfigError, match="endpoints is 4; expected at most the 3 classes"):
        simplex.topic_mixtures(torch.ones(5, 3, dtype=torch.int64), 4, seed=0)


@pytest.mark.parametrize("metric", ["l1", "hilbert"])
@pytest.mark.parametrize("center", ["medoid", "mean"])
def test_separated_points_are_grouped(metric: str, center: str):
    """Points near three corners; medoids are members and means are means."""
    corners = torch.eye(3, dtype=torch.float64) * 0.7 + 0.1
    noise = torch.from_numpy(stream().dirichlet(np.ones(3) * 5, 15))
    points = 0.9 * corners[torch.arange(15) % 3] + 0.1 * noise
    label, centers = simplex.cluster_points(points, 3, stream(), distance=metric, center=center)  # type: ignore[arg-type]
    truth = torch.arange(15) % 3
    assert torch.equal(label[:, None] == label, truth[:, None] == truth)
    if center == "medoid":
        assert all(bool((points == c).all(1).any()) for c in centers)
    else:
        torch.testing.assert_close(centers[label[0]], points[truth == 0].mean(0))


def test_the_best_of_several_restarts_is_kept():
    """Ten restarts draw from one stream what ten calls with one restart draw: the least sum of distances is kept."""

    def cost(points: Tensor, centers: Tensor) -> float:
        return float(simplex.l1_distances(points, centers).amin(1).sum())

    lower = 0
    for seed in range(8):
        points = torch.from_numpy(Rng(seed).generator("points").dirichlet(np.ones(4), 15))
        single = Rng(seed).generator("starts")
        costs = [
            cost(points, simplex.cluster_points(points, 4, single, restarts=1)[1])
            for _ in range(10)
        ]
        kept = simplex.cluster_points(points, 4, Rng(seed).generator("starts"), restarts=10)[1]
        assert cost(points, kept) == pytest.approx(min(costs), abs=1e-9)
        lower += min(costs) < costs[-1] - 1e-6
    assert lower > 0, "the last restart was not always the best"


def test_seeds_are_drawn_by_squared_distances():
    """From the first corner, points at L1 distances 1 and 2 follow in odds 1 to 4 (4 standard errors)."""
    points = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]).double()
    stream = Rng(0).generator("seeds")
    drawn = [
        simplex._draw_seeds_far_apart(points, 2, stream, simplex.l1_distances) for _ in range(3000)
    ]
    far = [float(seeds[1, 1]) for seeds in drawn if float(seeds[0, 0]) == 1]
    assert len(far) > 900
    assert sum(value == 1 for value in far) / len(far) == pytest.approx(
        0.8, abs=4 * (0.16 / len(far)) ** 0.5
    )


def test_fewer_points_than_groups_is_refused_and_twins_are_not():
    """Two groups of equal points work: one stays empty."""
    label, _ = simplex.cluster_points(torch.full((3, 2), 0.5, dtype=torch.float64), 2, stream())
    assert label.tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="regions is 4; expected between 1 and the 3 clients"):
        simplex.cluster_points(torch.full((3, 2), 0.5, dtype=torch.float64), 4, stream())


def test_hilbert_distance_is_projective():
    """0 to itself, symmetric, and blind to scale: ln(p/q) runs from ln 1/2 to ln 2, so d = ln 4."""
    a, b = torch.tensor([[0.2, 0.4, 0.4]]), torch.tensor([[0.4, 0.2, 0.4]])
    assert float(simplex.hilbert_distances(a, a)) == 0.0
    assert float(simplex.hilbert_distances(a, b)) == pytest.approx(math.log(4), rel=1e-6)
    assert float(simplex.hilbert_distances(b, 3 * a)) == pytest.approx(math.log(4), rel=1e-6)


def brute_project(point: Tensor, total: float) -> Tensor:
    """The best of all supports: on each the solution is a common shift."""
    size, best = len(point), (math.inf, point)
    for mask in range(1, 1 << size):
        support = torch.tensor([bool(mask >> i & 1) for i in range(size)])
        shifted = torch.where(support, point - (point[support].sum() - total) / support.sum(), 0)
        gap = float((shifted - point).square().sum())
        if float(shifted.min()) >= -1e-12 and gap < best[0]:
            best = gap, shifted
    return best[1]


@pytest.mark.parametrize("total", [0.01, 0.5, 1.0])
def test_projection_is_the_nearest_point(total: float):
    """Against every support of four coordinates."""
    points = torch.from_numpy(stream().normal(size=(6, 4)))
    got = simplex.project_on_simplex(points, total)
    expected = torch.stack([brute_project(p, total) for p in points])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_riesz_energy_by_hand():
    """Distances 1, 1, sqrt 2: ln((1 + 1 + 1/2) / 3); coinciding points count as 1e-4 apart."""
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert simplex.riesz_energy(points) == pytest.approx(math.log(2.5 / 3))
    assert simplex.riesz_energy(torch.zeros(2, 2)) == pytest.approx(math.log(1e8))


def test_gradients_place_groups_apart():
    """Three groups of updates take three places; points are on the simplex; the sign of the updates matters."""
    directions = torch.from_numpy(stream().normal(size=(3, 20)))
    updates = directions[torch.arange(12) % 3] + 0.01 * torch.from_numpy(
        stream(1).normal(size=(12, 20))
    )
    points = simplex.gradient_points(updates, 3)
    assert points.sum(1).tolist() == pytest.approx([1.0] * 12)
    within = float((points[:3] - points[3:6]).abs().sum(1).max())
    between = float(torch.pdist(points[:3]).min())
    assert between > 5 * within
    assert float((simplex.gradient_points(-updates, 3) - points).abs().max()) > 0.1


@pytest.mark.parametrize("update", [0.0, 0.3])
def test_clients_with_equal_updates_stand_in_the_middle(update):
    """Warnings are errors here: no variance is divided by."""
    points = simplex.gradient_points(torch.full((5, 7), update), 4)
    assert points.tolist() == [[0.25] * 4] * 5
