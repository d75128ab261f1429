"""Finding groups: rewards, interaction matrix, affinity, splits."""

import itertools
import math

import pytest
import torch
from sklearn.metrics import rand_score
from torch import Tensor

from coterie.functional import clustering
from coterie.rng import Rng


def draws(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal draws in float64."""
    return torch.from_numpy(Rng(seed).generator("test").normal(size=shape))


def naive_rewards(losses: Tensor, ddof: int) -> list[float]:
    """Two loops over the definition."""
    clients, steps = losses.shape
    out = []
    for k in range(clients):
        total = 0.0
        for s in range(steps):
            column = losses[:, s].tolist()
            mean = sum(column) / clients
            variance = sum((x - mean) ** 2 for x in column) / (clients - ddof)
            total += math.exp(-((column[k] - mean) ** 2) / (2 * variance))
        out.append(total / steps)
    return out


@pytest.mark.parametrize("ddof", [0, 1])
def test_rewards_are_their_definition(ddof: int):
    """Against loops; for each step the sum of -2 ln r is |P| - 1 (or |P| with the biased variance)."""
    losses = draws(6, 4)
    rewards = clustering.gaussian_rewards(losses, ddof=ddof)
    assert rewards.tolist() == pytest.approx(naive_rewards(losses, ddof), abs=1e-12)
    for s in range(4):
        single = clustering.gaussian_rewards(losses[:, s : s + 1], ddof=ddof)
        assert float((-2 * single.log()).sum()) == pytest.approx(6 - ddof, abs=1e-9)


def test_two_clients_always_get_the_same_reward():
    """With |P| = 2 every r is exp(-1/4): two losses cannot say who is typical."""
    assert clustering.gaussian_rewards(draws(2, 5)).tolist() == pytest.approx([math.exp(-0.25)] * 2)


def test_rewards_ignore_scale_and_level():
    """l -> a l + b changes nothing."""
    losses = draws(5, 3)
    moved = clustering.gaussian_rewards(7 * losses - 3)
    torch.testing.assert_close(moved, clustering.gaussian_rewards(losses), rtol=1e-10, atol=1e-12)


def test_equal_losses_are_all_typical():
    """No variance: every reward is 1; so it is when one client took the step alone."""
    assert clustering.gaussian_rewards(torch.full((4, 3), 2.5)).tolist() == [1.0] * 4
    assert clustering.gaussian_rewards(torch.tensor([[0.3], [math.nan]])).tolist() == [1.0, 0.0]


def test_a_shorter_trace_is_averaged_over_its_own_steps():
    """The client with one step counts in that step alone; the second step is that of the other two."""
    losses = torch.tensor([[1.0, 1.0], [2.0, 5.0], [6.0, math.nan]])
    first = clustering.gaussian_rewards(losses[:, :1])
    second = clustering.gaussian_rewards(losses[:2, 1:])
    got = clustering.gaussian_rewards(losses)
    assert got.tolist() == pytest.approx([*((first[:2] + second) / 2).tolist(), float(first[2])])


def test_weights_repeat_clients():
    """Weights 2, 1, 1 give the mean and (biased) variance of a client counted twice."""
    losses = torch.tensor([[1.0], [4.0], [7.0]])
    doubled = clustering.gaussian_rewards(losses[[0, 0, 1, 2]], ddof=0)
    weighted = clustering.gaussian_rewards(losses, weights=torch.tensor([2.0, 1.0, 1.0]))
    assert weighted.tolist() == pytest.approx(doubled[[0, 2, 3]].tolist())


def test_synthetic_losses_join_mean_and_variance():
    """Losses 0 and 2 have mean 1 and variance 2; draws of +1 and -1 add 1 +- sqrt 2: variance (1+1+2+2)/3 = 2."""
    losses, synthetic = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [-1.0]])
    got = clustering.gaussian_rewards(losses, synthetic=synthetic)
    assert got.tolist() == pytest.approx([math.exp(-1 / 4)] * 2)
    wider = clustering.gaussian_rewards(losses, synthetic=2 * synthetic)  # variance (1+1+8+8)/3 = 6
    assert wider.tolist() == pytest.approx([math.exp(-1 / 12)] * 2)


def test_only_pairs_sampled_together_move():
    """Rows take their own client's reward, the rest stays 0: P = alpha * w_k on the block."""
    matrix = clustering.update_interactions(
        torch.zeros(4, 4, dtype=torch.float64), torch.tensor([0, 2]), torch.tensor([0.5, 1.0]), 0.1
    )
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[0, 0] = expected[0, 2] = 0.05
    expected[2, 0] = expected[2, 2] = 0.1
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-8)


def naive_affinity(matrix: Tensor, beta: float, axis: str) -> Tensor:
    """Two loops over clients, with the entries left out by hand."""
    size = len(matrix)
    out = torch.ones(size, size, dtype=torch.float64)
    for k, j in itertools.permutations(range(size), 2):
        others = [i for i in range(size) if i not in (k, j)]
        a, b = (matrix[k], matrix[j]) if axis == "row" else (matrix[:, k], matrix[:, j])
        out[k, j] = math.exp(-beta * sum(float(a[i] - b[i]) ** 2 for i in others))
    return out


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("size", [3, 7])
def test_affinity_is_its_definition(axis: str, size: int):
    """Against a double loop, also for three clients, whose vectors have one entry; symmetric and in (0, 1]."""
    matrix = draws(size, size, seed=3).sigmoid()
    got = clustering.affinity_matrix(matrix, 0.5, axis=axis)  # type: ignore[arg-type]
    torch.testing.assert_close(got, naive_affinity(matrix, 0.5, axis), rtol=0, atol=1e-12)
    assert torch.equal(got, got.T)
    assert float(got.min()) > 0
    assert float(got.max()) == 1.0


def test_affinity_can_scale_first_and_leave_the_diagonal_empty():
    """Scaling by a factor is undone by min-max; the diagonal is what is asked."""
    matrix = draws(5, 5, seed=4).sigmoid()
    scaled = clustering.affinity_matrix(3 * matrix + 1, 0.5, minmax=True, diagonal=0.0)
    torch.testing.assert_close(
        scaled, clustering.affinity_matrix(matrix, 0.5, minmax=True, diagonal=0.0)
    )
    assert scaled.diagonal().tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("space", "labels"), [("rows", "cluster_qr"), ("embedding", "cluster_qr"), ("rows", "kmeans")]
)
def test_two_planted_blocks_are_found(space: str, labels: str):
    """A block matrix splits in two, exactly as planted; with tiny parts refused."""
    truth = torch.tensor([0, 1] * 6)
    matrix = 0.2 + 0.6 * (truth[:, None] == truth[None, :]).double() + 0.01 * draws(12, 12, seed=5)
    graph = clustering.affinity_matrix(matrix, 2.0)
    label = clustering.propose_split(graph, space=space, labels=labels)  # type: ignore[arg-type]
    assert label is not None
    assert label.tolist() == truth.tolist()
    assert clustering.propose_split(graph, min_cluster_size=7, space=space) is None  # type: ignore[arg-type]


def test_constant_rows_of_two_levels_are_two_groups():
    """Rows of P that are constant, at 0.2 and 0.8, split by level when rows are compared."""
    level = torch.tensor([0.2] * 5 + [0.8] * 4, dtype=torch.float64)
    label = clustering.propose_split(
        clustering.affinity_matrix(level[:, None].expand(9, 9), 1.0, axis="row")
    )
    assert label is not None
    assert label.tolist() == [0] * 5 + [1] * 4


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("space", ["rows", "embedding"])
def test_noise_is_not_split(axis: str, space: str):
    """Independent entries have no groups."""
    matrix = 0.6 + 0.1 * draws(40, 40, seed=6)
    graph = clustering.affinity_matrix(matrix, 0.5, axis=axis)  # type: ignore[arg-type]
    assert clustering.propose_split(graph, space=space) is None  # type: ignore[arg-type]


def test_coinciding_centroids_are_no_clusters():
    """scikit-learn's index of 0 for these points would be perfect; here it is infinite."""
    points = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert clustering.davies_bouldin(points, torch.tensor([0, 0, 1, 1])) == math.inf
    assert (
        clustering.davies_bouldin(
            points + torch.tensor([[0.0], [0.0], [5.0], [5.0]]), torch.tensor([0, 0, 1, 1])
        )
        < 1
    )


def cut(similarity: Tensor, part: tuple[int, ...]) -> float:
    inside = torch.zeros(len(similarity), dtype=torch.bool)
    inside[list(part)] = True
    return float(similarity[inside][:, ~inside].max())


@pytest.mark.parametrize("seed", range(20))
def test_single_linkage_beats_every_other_bipartition(seed: int):
    """Of all 31 ways to cut six clients in two, none has a smaller largest similarity across."""
    similarity = draws(6, 6, seed=seed).tanh()
    similarity = (similarity + similarity.T) / 2
    part = clustering.find_bipartition(similarity)
    ways = [c for size in (1, 2, 3) for c in itertools.combinations(range(6), size)]
    assert (
        clustering.max_cross_similarity(similarity, part)
        <= min(cut(similarity, c) for c in ways) + 1e-12
    )


def test_antipodal_groups_are_cut_exactly():
    """Updates of two opposite directions; the cosines are +1 inside and -1 across."""
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0])
    updates = sign[:, None] * torch.tensor([[3.0, 4.0]])
    cosines = clustering.compute_update_cosines(updates)
    torch.testing.assert_close(cosines, (sign[:, None] * sign).double(), rtol=0, atol=1e-12)
    assert clustering.find_bipartition(cosines).tolist() == [False, True, True, False, True]
    assert clustering.find_bipartition(cosines, "complete").tolist() == [
        False,
        True,
        True,
        False,
        True,
    ]


def test_the_similarity_across_a_cut_is_the_largest():
    """Of the pairs (0, 2), (1, 2) across, 0.5 and -0.2."""
    similarity = torch.tensor([[1.0, 0.9, 0.5], [0.9, 1.0, -0.2], [0.5, -0.2, 1.0]]).double()
    assert clustering.max_cross_similarity(similarity, torch.tensor([False, False, True])) == 0.5


def test_ties_still_give_two_parts():
    """All similarities equal: some bipartition, never one part."""
    assert 0 < int(clustering.find_bipartition(torch.ones(4, 4)).sum()) < 4


def test_an_update_of_zero_is_similar_to_nobody():
    """The denominator is floored."""
    assert clustering.compute_update_cosines(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))[
        0
    ].tolist() == [0.0, 0.0]


def test_nearest_center_and_its_ties():
    """|1 - 0|^2 = 1 < |1 - 3|^2; the point in the middle goes to the first center."""
    points, centers = torch.tensor([[1.0], [2.5], [1.5]]), torch.tensor([[0.0], [3.0]])
    assert clustering.nearest_centers(points, centers).tolist() == [0, 1, 0]


def test_k_means_numbers_groups_by_first_members():
    """Well-separated points; as many groups as distinct points at most."""
    points = torch.tensor([[9.0], [0.0], [9.1], [0.1]])
    assert clustering.k_means(points, 2, seed=0).tolist() == [0, 1, 0, 1]
    assert clustering.k_means(torch.ones(3, 2), 2, seed=0).tolist() == [0, 0, 0]


def simulate_interactions(truth: Tensor, rounds: int, gap: float) -> Tensor:
    """FedGWC's matrix after rounds in which each client draws a loss around its group's level."""
    population, steps, alpha = len(truth), 7, 0.1
    stream = Rng(0).generator("toy")
    matrix = torch.zeros(population, population, dtype=torch.float64)
    for _ in range(rounds):
        ids = torch.from_numpy(stream.permutation(population)[:10].copy())
        losses = torch.from_numpy(stream.normal(size=(10, steps))) + gap * truth[ids, None]
        pairs = ids[:, None], ids[None, :]
        rewards = clustering.gaussian_rewards(losses)
        matrix[pairs] = (1 - alpha) * matrix[pairs] + alpha * rewards[:, None]
    return matrix


@pytest.mark.full
@pytest.mark.parametrize("groups", [(50, 50), (90, 10)])
def test_two_loss_levels_are_recovered_from_columns(groups: tuple[int, int]):
    """After 4,000 simulated rounds the columns of P hold the planted groups, equal or not: Rand 1."""
    truth = torch.repeat_interleave(torch.arange(2), torch.tensor(groups))
    matrix = simulate_interactions(truth, 4000, gap=3.0)
    label = clustering.propose_split(clustering.affinity_matrix(matrix, 0.5))
    assert label is not None
    assert rand_score(truth.numpy(), label.numpy()) == 1.0


def test_interactions_of_a_few_rows_at_a_time_are_those_of_all_at_once(monkeypatch):
    """The formula over the whole block, to the bit; pairs that did not meet stay."""
    monkeypatch.setattr(clustering, "_ROWS_AT_ONCE", 2)
    draw = torch.Generator().manual_seed(0)
    matrix = torch.rand(9, 9, generator=draw, dtype=torch.float64)
    ids, rewards = torch.tensor([7, 0, 3, 8, 2]), torch.rand(5, generator=draw)
    found = clustering.update_interactions(matrix, ids, rewards, 0.3)
    expected = matrix.clone()
    for k, reward in zip(ids.tolist(), rewards.double().tolist(), strict=True):
        for j in ids.tolist():
            expected[k, j] = 0.7 * float(matrix[k, j]) + 0.3 * reward
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    met = torch.zeros(9, 9, dtype=torch.bool)
    met[ids[:, None], ids] = True
    assert torch.equal(found[~met], matrix[~met])
