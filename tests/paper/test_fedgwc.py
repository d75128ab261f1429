"""FedGWC: identities of its rewards and interactions, its clock, its splits, and the authors' settings."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import SpectralClustering
from sklearn.manifold import SpectralEmbedding
from sklearn.metrics import davies_bouldin_score
from torch import Tensor, nn

from coterie import testing
from coterie.engine.task import LocalTraining
from coterie.errors import ConfigError
from coterie.exchange.base import Message
from coterie.functional import clustering
from coterie.methods.base import State
from coterie.methods.fedavg import FairAvg, FedAvg, FedAvgM
from coterie.methods.fedgwc import FedGwc, FedGwcClusters
from coterie.methods.fedprox import FedProx
from coterie.methods.server import ServerContext
from coterie.models.layout import Layout
from coterie.papers.fedgwc import PublishedFedGwc
from coterie.rng import Rng
from coterie.runtime.loop import Loop

pytestmark = pytest.mark.paper
LAYOUT = Layout(nn.Linear(1, 1, bias=False), torch.float64)


def begin(method: FedGwc, population: int, *, models: int = 1) -> FedGwcClusters:
    """The server's state before anything happened, with one parameter."""
    uniform = getattr(method, "start", "zero") == "uniform"
    level = 1 / population**2 if uniform else 0.0
    return FedGwcClusters(
        models=torch.arange(float(models), dtype=torch.float64)[:, None],
        velocity=torch.zeros(
            models, 0 if method.averaging.is_plain_mean else 1, dtype=torch.float64
        ),
        label=torch.zeros(population, dtype=torch.int64),
        matrix=torch.full((population, population), level, dtype=torch.float64),
        sampled=torch.zeros(population, dtype=torch.int64),
        pairs=torch.zeros(population, population, dtype=torch.int32),
        mse=torch.ones(models, dtype=torch.float64),
        patience=torch.zeros(models, dtype=torch.int64),
    )


def merge(
    method: FedGwc, shared: FedGwcClusters, ids: Tensor, losses: Tensor, index: int = 0
) -> FedGwcClusters:
    """One round in which the clients `ids` report these losses and return the model 0."""
    fields = {"samples": torch.arange(1.0, len(ids) + 1, dtype=torch.float64), "losses": losses}
    message = Message(torch.zeros(len(ids), 1, dtype=torch.float64), fields, ids)
    return method.aggregate(
        ServerContext(index, Rng(0).at_round(index), LAYOUT, len(shared.label)), shared, message
    )


def play(
    method: FedGwc,
    rounds: int,
    population: int = 20,
    *,
    gap: float = 0.0,
    participation: float = 0.3,
) -> list[FedGwcClusters]:
    """Rounds of iid losses around two levels `gap` apart; the state after each."""
    shared, states = begin(method, population), []
    truth = torch.arange(population) % 2
    for index in range(rounds):
        rng = Rng(1).at_round(index)
        ids = method.select_cohort(shared, rng, population, participation)
        losses = (
            torch.from_numpy(rng.generator("losses").normal(size=(len(ids), 5)))
            + gap * truth[ids, None]
        )
        shared = merge(method, shared, ids, losses, index)
        states.append(shared)
    return states


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 7), min_size=2), min_size=1, max_size=12), st.floats(0.05, 0.5)
)
def test_interactions_are_bounded_by_how_often_pairs_met(cohorts: list[set[int]], alpha: float):
    """0 <= P_kj <= 1 - (1 - alpha)^N_kj; pairs that never met are 0; a round changes P only on P x P."""
    method, population = FedGwc(alpha=alpha, eps=1e-300), 8
    shared = begin(method, population)
    for index, cohort in enumerate(cohorts):
        ids = torch.tensor(sorted(cohort))
        losses = torch.from_numpy(
            Rng(0).at_round(index).generator("losses").normal(size=(len(ids), 3))
        )
        after = merge(method, shared, ids, losses, index)
        outside = torch.ones(population, population, dtype=torch.bool)
        outside[ids[:, None], ids[None, :]] = False
        assert torch.equal(after.matrix[outside], shared.matrix[outside])
        step = (after.matrix - (1 - alpha) * shared.matrix)[ids[:, None], ids[None, :]] / alpha
        rewards = clustering.gaussian_rewards(losses)
        torch.testing.assert_close(step, rewards[:, None].expand_as(step), rtol=0, atol=1e-12)
        shared = after
    bound = 1 - (1 - alpha) ** shared.pairs.double()
    assert bool((shared.matrix >= 0).all())
    assert bool((shared.matrix <= bound + 1e-12).all())
    assert torch.equal(shared.pairs.diagonal().long(), shared.sampled)


def test_constant_rewards_fill_the_matrix_geometrically():
    """Equal losses have reward 1: P_kj = 1 - (1 - alpha)^N_kj, and the diagonal is the running mean of the reward."""
    method, shared = FedGwc(alpha=0.2, eps=1e-300), begin(FedGwc(), 4)
    for cohort in ([0, 1], [0, 1, 2], [1, 3], [0, 1]):
        shared = merge(
            method,
            shared,
            torch.tensor(cohort),
            torch.full((len(cohort), 2), 0.7, dtype=torch.float64),
        )
    torch.testing.assert_close(shared.matrix, 1 - 0.8 ** shared.pairs.double())
    assert shared.sampled.tolist() == [3, 4, 1, 1]


def test_running_rewards_are_unbiased_with_the_stated_variance():
    """E[gamma] = mu and Var(gamma) = alpha / (2 - alpha) Var(omega) for 4,000 clients after 120 rounds."""
    alpha, stream = 0.1, Rng(0).generator("rewards")
    gamma = torch.zeros(4000, dtype=torch.float64)
    for _ in range(120):
        gamma = (1 - alpha) * gamma + alpha * torch.from_numpy(stream.beta(2, 3, 4000))
    small = clustering.update_interactions(
        torch.zeros(1, 1, dtype=torch.float64), torch.tensor([0]), torch.tensor([0.4]), alpha
    )
    assert float(small[0, 0]) == pytest.approx(0.04)
    variance = alpha / (2 - alpha) * 0.04  # Beta(2, 3): mean 0.4, variance 0.04
    assert float(gamma.mean()) == pytest.approx(0.4, abs=4 * math.sqrt(variance / 4000) + 0.9**120)
    assert float(gamma.var()) == pytest.approx(variance, rel=4 * math.sqrt(2 / 4000))


def test_the_clock_cannot_strike_before_round_110():
    """At alpha = 0.1 the running mean of the change starts at 1 and falls by 0.9 a round at best: 0.9^110 < 1e-5."""
    method = FedGwc(eps=1e-5, patience=1, min_pair_updates=0.0)
    shared, ids, equal = (
        begin(method, 12),
        torch.arange(12),
        torch.zeros(12, 3, dtype=torch.float64),
    )
    # nothing changes any more
    shared = dataclasses.replace(shared, matrix=torch.ones_like(shared.matrix))
    struck = None
    for index in range(120):
        after = merge(method, shared, ids, equal, index)
        if struck is None and after.mse[0] > shared.mse[0]:
            struck = index + 1
        shared = after
    assert struck == math.ceil(math.log(1e-5) / math.log(0.9)) == 110


def test_a_refused_split_winds_the_clock_again():
    """No part of noise has ten members: mse is back at 1 and patience at 0, and the cluster stays whole."""
    states = play(FedGwc(eps=1.0, patience=2, min_pair_updates=0.0, min_cluster_size=10), 6)
    assert [int(s.patience[0]) for s in states[:4]] == [1, 0, 1, 0]
    assert [float(s.mse[0]) for s in states if int(s.patience[0]) == 0] == [1.0] * 3
    assert all(len(s.models) == 1 for s in states)


def test_patience_is_rounded_to_the_nearest_number_of_rounds():
    """Cohorts of 8 of 20: 2.5 rounds are 3; of 9: 2.2 rounds are 2. An attempt sets the count back to 0."""
    for cohort, counts in ((8, [1, 2, 0]), (9, [1, 0, 1])):
        method = FedGwc(eps=10.0, min_pair_updates=0.0, min_cluster_size=10)
        shared, found = begin(method, 20), []
        for index in range(3):
            losses = torch.arange(float(cohort), dtype=torch.float64)[:, None]
            shared = merge(method, shared, torch.arange(cohort), losses, index)
            found.append(int(shared.patience[0]))
        assert found == counts


def test_pairs_must_have_met_before_a_split():
    """With the guard the clock runs on, but nothing is tried before pairs met once on average."""
    method = FedGwc(eps=1.0, patience=1, min_pair_updates=1.0)
    often = []
    for state in play(method, 20, participation=0.5):
        met = state.pairs.double()
        often.append(float(met.sum() - met.diagonal().sum()) / (20 * 19) >= 1)
        assert (int(state.patience[0]) == 0) == often[-1]
    assert often[0] is False
    assert often[-1] is True


def planted(method: FedGwc) -> FedGwcClusters:
    """A state about to split: P has two planted blocks of ten, interleaved."""
    truth = torch.arange(20) % 2
    matrix = 0.2 + 0.5 * (truth[:, None] == truth).double()
    noise = torch.from_numpy(Rng(0).generator("noise").normal(size=(20, 20)))
    shared = begin(method, 20)
    return dataclasses.replace(
        shared, matrix=matrix + 0.01 * noise, models=torch.full((1, 1), 5.0).double()
    )


@pytest.mark.parametrize("aggregator", ["fedavg", "fedavgm", "fedprox", "fairavg"])
def test_a_split_copies_everything_to_disjoint_children(aggregator: str):
    """Two planted blocks: both children have the parent's merged model and velocity, new clocks, and their own
    blocks of P; together they are everybody."""
    method = FedGwc(aggregator=aggregator, eps=1.0, patience=1, min_pair_updates=0.0, beta=2.0)  # type: ignore[arg-type]
    shared = planted(method)
    ids = torch.arange(6)
    after = merge(method, shared, ids, torch.zeros(6, 3, dtype=torch.float64))
    assert after.label.tolist() == [0, 1] * 10
    assert after.models.flatten().tolist() == [0.0, 0.0]  # all that came back was 0
    assert after.mse.tolist() == [1.0, 1.0]
    assert after.patience.tolist() == [0, 0]
    if aggregator == "fedavgm":
        assert after.velocity.tolist() == [[5.0], [5.0]]  # d = 5 - 0
        apart = merge(
            method, after, torch.tensor([0, 2, 4]), torch.zeros(3, 3, dtype=torch.float64)
        )
        assert apart.velocity[1].tolist() == [5.0]
        assert apart.velocity[0].tolist() == [0.9 * 5.0 + 0.0]


def test_children_are_sampled_and_merged_apart():
    """Each cluster has its own cohort, at least three, and moves only by its own clients; the sum is reported."""
    method = FedGwc(min_pair_updates=0.0)
    shared = dataclasses.replace(begin(method, 40, models=2), label=(torch.arange(40) < 30).long())
    ids = method.select_cohort(shared, Rng(0).at_round(0), 40, 0.2)
    # max(0.2 * 10, 3) and 0.2 * 30
    assert sorted(torch.bincount(shared.label[ids]).tolist()) == [3, 6]
    by_count = PublishedFedGwc(clients_per_round=5).select_cohort(
        shared, Rng(0).at_round(0), 40, 0.2
    )
    assert torch.bincount(shared.label[by_count]).tolist() == [5, 5]
    ones = (shared.label[ids] == 1).nonzero().flatten()
    after = merge(method, shared, ids[ones], torch.zeros(len(ones), 2, dtype=torch.float64))
    assert after.models.flatten().tolist() == [0.0, 0.0]
    assert int(after.sampled.sum()) == len(ones)


@pytest.mark.option("FedGwc.cohort_of", "cluster", "population")
def test_a_share_of_the_population_is_fedavgs_however_many_clusters_there_are():
    """Ten of 100 in twenty clusters of five, where each cluster for itself draws three; clusters that wait stay."""
    one = PublishedFedGwc(cohort_of="population", explore=False)
    assert torch.equal(
        one.select_cohort(begin(one, 100), Rng(2).at_round(0), 100, 0.1),
        FedAvg().select_cohort(None, Rng(2).at_round(0), 100, 0.1),
    )
    shared = dataclasses.replace(begin(FedGwc(), 100, models=20), label=torch.arange(100) % 20)
    assert len(FedGwc().select_cohort(shared, Rng(2).at_round(0), 100, 0.1)) == 60
    method = FedGwc(cohort_of="population")
    assert len(method.select_cohort(shared, Rng(2).at_round(0), 100, 7)) == 7
    ids = method.select_cohort(shared, Rng(2).at_round(0), 100, 0.1)
    drawn = torch.bincount(shared.label[ids], minlength=20)
    assert sorted(drawn.tolist())[16:] == [0, 3, 3, 4]  # the tenth place is too few for another
    after = merge(method, shared, ids, torch.zeros(10, 2, dtype=torch.float64))
    still = torch.where(drawn > 0, 0.0, shared.models[:, 0])  # all that came back was 0
    assert torch.equal(after.models[:, 0], still)
    assert torch.equal(after.mse == 1.0, drawn == 0)


def test_exploring_evens_out_the_whole_population_too():
    """Over 400 rounds of ten clients in all, everybody takes part about 40 times, in clusters of 3, 7, 10 and 80."""
    method = FedGwc(cohort_of="population")
    label = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 7, 10, 80]))
    shared = dataclasses.replace(begin(method, 100, models=4), label=label)
    for index in range(400):
        ids = method.select_cohort(shared, Rng(0).at_round(index), 100, 0.1)
        assert len(ids) == 10
        shared = dataclasses.replace(
            shared, sampled=shared.sampled.index_add(0, ids, torch.ones_like(ids))
        )
    assert int((shared.sampled - 40).abs().max()) <= 8


def test_small_clusters_are_left_whole():
    """Five members cannot give two parts of three: the planted block of 2 + 3 is not tried."""
    truth = torch.tensor([0, 0, 1, 1, 1])
    method = FedGwc(eps=1.0, patience=1, min_pair_updates=0.0, beta=4.0)
    shared = dataclasses.replace(
        begin(method, 5), matrix=0.2 + 0.6 * (truth[:, None] == truth).double()
    )
    assert (
        len(merge(method, shared, torch.arange(5), torch.zeros(5, 2, dtype=torch.float64)).models)
        == 1
    )


def test_exploring_keeps_participation_even():
    """Over 1,000 rounds with 10 of 100 clients, counts stay within 8 of each other; without it they spread."""
    spread = {}
    for explore in (True, False):
        method = PublishedFedGwc(explore=explore)
        shared = begin(method, 100)
        for index in range(1000):
            ids = method.select_cohort(shared, Rng(0).at_round(index), 100, 0.1)
            assert len(ids) == 10
            shared = dataclasses.replace(
                shared, sampled=shared.sampled.index_add(0, ids, torch.ones_like(ids))
            )
        spread[explore] = int(shared.sampled.max() - shared.sampled.min())
    assert spread[True] <= 8
    assert spread[False] > 30


def test_unexplored_cohorts_are_those_of_fedavg():
    """While there is one cluster and no preference, everybody's participants are FedAvg's."""
    method = PublishedFedGwc(explore=False)
    for index in range(5):
        rng = Rng(2).at_round(index)
        assert torch.equal(
            method.select_cohort(begin(method, 50), rng, 50, 0.1),
            FedAvg().select_cohort(None, rng, 50, 0.1),
        )


@pytest.mark.parametrize(
    ("aggregator", "alone"),
    [("fedavg", FedAvg()), ("fedavgm", FedAvgM()), ("fedprox", FedProx()), ("fairavg", FairAvg())],
)
@pytest.mark.option("FedGwc.aggregator", "fedavg", "fedavgm", "fedprox", "fairavg")
def test_unclustered_fedgwc_is_its_aggregator(aggregator: str, alone: Any):
    """Until it splits, the model is the aggregator's, bit for bit; clients have 12, 11, ... 7 samples."""
    method, federation = FedGwc(aggregator=aggregator), testing.tiny_federation()  # type: ignore[arg-type]
    for client in range(6):
        federation.split[client, :client] = -1
    ours, plain = (
        testing.run_method(m, federation=federation, settings=testing.tiny_settings(rounds=2))
        for m in (method, alone)
    )
    assert torch.equal(ours.state.shared.models, plain.state.shared.models)
    assert float(ours.state.shared.matrix.min()) > 0


def test_losses_are_padded_to_a_common_length():
    """Epochs: the first `trace` losses, NaN behind a client's last; steps: one each."""

    def sent(method: FedGwc, **changes: Any) -> Tensor:
        setup = testing.tiny_settings(rounds=1, **changes)
        loop: Loop = testing.run_method(method, settings=dataclasses.replace(setup, rounds=0))
        rnd = dataclasses.replace(loop._make_round(0, torch.arange(6), torch.arange(6)))
        new, info = rnd.train(State(loop.task.initial_models(Rng(3))))
        return method.publish(rnd, new, info).fields["losses"]

    three = sent(FedGwc(trace=5))  # 12 samples in batches of 5: three steps
    assert three.shape == (6, 5)
    assert bool(torch.isfinite(three[:, :3]).all())
    assert bool(torch.isnan(three[:, 3:]).all())
    assert sent(FedGwc(trace=2)).shape == (6, 2)
    assert sent(FedGwc(), local=LocalTraining(steps=4, batch_size=5, optimizer="sgd")).shape == (
        6,
        4,
    )


def test_the_first_losses_are_sent():
    """Of the losses 1, 2, 3 of three steps, two are sent: 1 and 2."""
    loop: Loop = testing.run_method(FedGwc(), settings=testing.tiny_settings(rounds=0))
    rnd, losses = (
        loop._make_round(0, torch.arange(6), torch.arange(6)),
        torch.tensor([[1.0, 2.0, 3.0]]).expand(6, 3),
    )
    message = FedGwc(trace=2).publish(rnd, loop.state, {"losses": losses})
    assert message.fields["losses"].tolist() == [[1.0, 2.0]] * 6


@pytest.mark.option("PublishedFedGwc.alpha_rule", "constant", "local_rate", "decay")
def test_step_sizes_of_the_running_means():
    """Constant 0.1; |P| / K_c = 6 / 20; 0.2 (1 + 3)^-0.75."""
    assert FedGwc()._step_size(7, 6, 20) == 0.1
    assert PublishedFedGwc(alpha_rule="local_rate")._step_size(7, 6, 20) == 0.3
    assert PublishedFedGwc(alpha_rule="decay", alpha=0.2, kappa=0.75)._step_size(
        3, 6, 20
    ) == pytest.approx(0.2 * 4**-0.75)


def one_round(losses: list[float], **options: Any) -> FedGwcClusters:
    """The state after a round in which the first clients of 20 report a loss each; they have 1, 2, 3 ... samples."""
    method = PublishedFedGwc(min_pair_updates=0.0, **options)
    column = torch.tensor(losses, dtype=torch.float64)[:, None]
    return merge(method, begin(method, 20), torch.arange(len(losses)), column)


@pytest.mark.option("PublishedFedGwc.reward_weights", "samples")
def test_rewards_may_weigh_clients_by_their_samples():
    """Losses 0, 4 with 1, 2 samples: mean 8/3, biased variance 32/9, so rewards exp(-1) and exp(-1/4)."""
    gamma = one_round([0.0, 4.0], reward_weights="samples").matrix.diagonal()[:2]
    assert gamma.tolist() == pytest.approx([0.1 * math.exp(-1), 0.1 * math.exp(-1 / 4)])


@pytest.mark.option("PublishedFedGwc.reward_weights", "uniform")
@pytest.mark.option("PublishedFedGwc.normalize_rewards", False)
def test_the_variance_of_rewards_may_be_the_biased_one():
    """Losses 0, 2: sample variance 2 gives exp(-1/4), biased variance 1 gives exp(-1/2)."""
    assert float(one_round([0.0, 2.0]).matrix[0, 1]) == pytest.approx(0.1 * math.exp(-1 / 4))
    assert float(one_round([0.0, 2.0], ddof=0).matrix[0, 1]) == pytest.approx(
        0.1 * math.exp(-1 / 2)
    )


@pytest.mark.option("PublishedFedGwc.normalize_rewards", True)
def test_rewards_may_be_divided_by_their_sum():
    """Four equal losses have reward 1, or 1/4 each."""
    assert float(one_round([1.0] * 4, normalize_rewards=True).matrix[0, 1]) == pytest.approx(
        0.1 / 4
    )


def test_draws_fill_the_losses_of_a_small_cohort_only():
    """Draws join the losses of a step up to the size that is asked for; a cohort that is large enough gets none."""
    plain = one_round([0.0, 2.0]).matrix[0, 0]
    assert float(one_round([0.0, 2.0], loss_sampling_size=2).matrix[0, 0]) == float(plain)
    filled = one_round([0.0, 2.0], loss_sampling_size=10).matrix[0, 0]
    assert 0 < float(filled) < 0.1
    assert float(filled) != float(plain)


@pytest.mark.option("PublishedFedGwc.mse_scope", "matrix", "sampled")
def test_the_clock_may_look_at_the_sampled_part_only():
    """Four of 20 clients with reward 1: each of 16 entries changes by 0.1; the mean is over 400 entries, or 16."""
    assert float(one_round([1.0] * 4).mse[0]) == pytest.approx(0.9 + 0.1 * 16 * 0.01 / 400)
    assert float(one_round([1.0] * 4, mse_scope="sampled").mse[0]) == pytest.approx(
        0.9 + 0.1 * 0.01
    )


@pytest.mark.parametrize(("n_max_by", "children"), [("size", 4), ("cohort", 2)])
@pytest.mark.option("PublishedFedGwc.n_max_by", "size", "cohort")
def test_children_are_at_most_so_many(n_max_by: str, children: int):
    """Four planted blocks of five: all four, or with a cohort of 10 of 20 only two."""
    method = PublishedFedGwc(eps=1.0, patience=1, min_pair_updates=0.0, beta=4.0, n_max_by=n_max_by)  # type: ignore[arg-type]
    truth = torch.arange(20) % 4
    noise = torch.from_numpy(Rng(0).generator("noise").normal(size=(20, 20)))
    matrix = 0.1 + 0.8 * (truth[:, None] == truth).double() + 0.01 * noise
    shared = dataclasses.replace(begin(method, 20), matrix=matrix)
    assert (
        len(merge(method, shared, torch.arange(10), torch.zeros(10, 3, dtype=torch.float64)).models)
        == children
    )


def test_presets_fill_what_is_not_given():
    """A field that is given wins over the preset; an unknown preset is refused."""
    assert PublishedFedGwc(preset="paper").upv_axis == "row"
    assert PublishedFedGwc(preset="paper", upv_axis="column").upv_axis == "column"
    assert PublishedFedGwc(preset="released").clients_per_round == 10
    with pytest.raises(
        ConfigError, match=r"fedgwc: preset is 'papers'; expected 'coterie', 'paper' or 'released'"
    ):
        PublishedFedGwc(preset="papers")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"fedgwc: alpha is 1\.0; expected a number, above 0 and below 1"
    ):
        FedGwc(alpha=1.0)


def released_trace(
    rounds: int, population: int, cohort: int
) -> tuple[np.ndarray, float, np.ndarray]:
    """The authors' settings written out once more, with loops: P, its running change, and the affinity at the end.

    Weighted biased variance, rewards divided by their sum, P from 1/K^2, alpha = |P| / K, change
    over the sampled part, columns of P scaled to [0, 1], no diagonal.
    """
    matrix, mse, alpha = (
        np.full((population, population), 1 / population**2),
        1.0,
        cohort / population,
    )
    for index in range(rounds):
        ids, losses, samples = recorded(index, population, cohort)
        weights = samples / samples.sum()
        rewards = np.zeros(cohort)
        for s in range(losses.shape[1]):
            mean = (weights * losses[:, s]).sum()
            variance = (weights * (losses[:, s] - mean) ** 2).sum()
            rewards += np.exp(-((losses[:, s] - mean) ** 2) / (2 * variance)) / losses.shape[1]
        rewards /= rewards.sum()
        old = matrix.copy()
        for a, k in enumerate(ids):
            for j in ids:
                matrix[k, j] = (1 - alpha) * old[k, j] + alpha * rewards[a]
        mse = (1 - alpha) * mse + alpha * np.mean(
            [(matrix[k, j] - old[k, j]) ** 2 for k in ids for j in ids]
        )
    scaled = (matrix - matrix.min()) / (matrix.max() - matrix.min())
    affinity = np.zeros_like(matrix)
    for k in range(population):
        for j in range(population):
            others = [i for i in range(population) if i not in (k, j)]
            if k != j:
                affinity[k, j] = math.exp(
                    -0.5 * sum((scaled[i, k] - scaled[i, j]) ** 2 for i in others)
                )
    return matrix, mse, affinity


def recorded(index: int, population: int, cohort: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The participants of a round, their losses at one of two levels, and their samples."""
    stream = Rng(5).at_round(index).generator("recorded")
    ids = np.sort(stream.permutation(population)[:cohort])
    return (
        ids,
        stream.normal(size=(cohort, 4)) + 4.0 * (ids % 2)[:, None],
        np.arange(1.0, cohort + 1),
    )


def test_the_released_preset_is_the_authors_code():
    """The same P, running change, affinity and split on a recorded trace of 60 rounds."""
    rounds, population, cohort = 60, 40, 10
    matrix, mse, affinity = released_trace(rounds, population, cohort)
    never = PublishedFedGwc(preset="released", eps=1e-300)
    shared = begin(never, population)
    for index in range(rounds):
        ids, losses, _ = recorded(index, population, cohort)
        shared = merge(never, shared, torch.from_numpy(ids), torch.from_numpy(losses), index)
    np.testing.assert_allclose(shared.matrix.numpy(), matrix, atol=1e-14)
    assert float(shared.mse[0]) == pytest.approx(mse)
    ours = clustering.affinity_matrix(shared.matrix, 0.5, minmax=True, diagonal=0.0).numpy()
    np.testing.assert_allclose(ours, affinity, atol=1e-12)
    found = {}
    for n in range(2, min(4, population // cohort) + 1):
        label = SpectralClustering(
            n, affinity="precomputed", assign_labels="cluster_qr", random_state=0
        )
        space = SpectralEmbedding(
            n_components=n, affinity="precomputed", random_state=0
        ).fit_transform(affinity)
        groups = label.fit_predict(affinity)
        found[n] = (davies_bouldin_score(space, groups), groups)
    best = min(found, key=lambda n: found[n][0])
    now = PublishedFedGwc(preset="released", eps=1.0, patience=1)
    after = merge(now, shared, torch.from_numpy(ids), torch.from_numpy(losses), rounds)
    expected = (
        torch.from_numpy(found[best][1])
        if found[best][0] < 1
        else torch.zeros(population, dtype=torch.int64)
    )
    assert torch.equal(after.label[:, None] == after.label, expected[:, None] == expected)


@pytest.mark.full
def test_fedgwc_finds_two_loss_levels_by_itself():
    """End to end on the server: 40 clients at two loss levels; the clock strikes and the split is the planted one."""
    method = PublishedFedGwc(eps=3e-5, min_pair_updates=1.0, explore=False)
    states = play(method, 700, 40, gap=4.0, participation=0.25)
    final = states[-1]
    truth = torch.arange(40) % 2
    assert torch.equal(final.label[:, None] == final.label, truth[:, None] == truth)


def affinity_by_loops(matrix: np.ndarray, axis: str, minmax: bool) -> np.ndarray:
    """exp(-|v_k - v_j|^2) without the entries k and j, of rows or columns, scaled first or not."""
    vectors = matrix if axis == "row" else matrix.T
    if minmax:
        vectors = (vectors - vectors.min()) / (vectors.max() - vectors.min())
    out = np.ones_like(matrix)
    for k in range(len(matrix)):
        for j in range(len(matrix)):
            others = [i for i in range(len(matrix)) if i not in (k, j)]
            out[k, j] = (
                math.exp(-((vectors[k, others] - vectors[j, others]) ** 2).sum()) if k != j else 1.0
            )
    return out


def parts_by_hand(matrix: np.ndarray, options: dict[str, Any], seed: int) -> set[frozenset[int]]:
    """The parts of the split with the least Davies-Bouldin index, if it is one; everybody together otherwise."""
    affinity = affinity_by_loops(
        matrix, options.get("upv_axis", "column"), options.get("minmax", False)
    )
    found = []
    for count in range(2, min(4, len(matrix) // 3) + 1):
        how = options.get("labels", "cluster_qr")
        model = SpectralClustering(
            count, affinity="precomputed", assign_labels=how, random_state=seed
        )
        label, space = model.fit_predict(affinity), affinity
        if options.get("db_space") == "embedding":
            space = SpectralEmbedding(
                count, affinity="precomputed", random_state=seed
            ).fit_transform(affinity)
        found.append(
            (
                davies_bouldin_score(space, label),
                [frozenset(np.flatnonzero(label == i)) for i in range(count)],
            )
        )
    index, parts = min(found, key=lambda one: one[0])
    return (
        set(parts) if index < 1 and min(map(len, parts)) >= 3 else {frozenset(range(len(matrix)))}
    )


@pytest.mark.option("PublishedFedGwc.upv_axis", "column", "row")
@pytest.mark.option("PublishedFedGwc.minmax", False, True)
@pytest.mark.option("PublishedFedGwc.labels", "cluster_qr", "kmeans")
@pytest.mark.option("PublishedFedGwc.db_space", "rows", "embedding")
@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"upv_axis": "row"}, 0),
        ({"minmax": True}, 44),
        ({"labels": "kmeans"}, 8),
        ({"db_space": "embedding"}, 0),
    ],
)
def test_a_split_is_the_one_of_the_options(options: dict[str, Any], place: int):
    """Twelve clients in two blurred groups, on a matrix on which the option decides: against scikit-learn."""
    stream = np.random.default_rng(place)
    rows, columns = np.arange(12) % 2, np.arange(12) // 6
    matrix = 0.3 + 0.15 * (rows[:, None] + columns[None, :]) + 0.12 * stream.normal(size=(12, 12))
    split_seed = int(Rng(0).at_round(0).generator("fedgwc.split.0").integers(1 << 31))
    parts = {}
    for chosen in ({}, options):
        method = PublishedFedGwc(
            alpha=1e-12, beta=1.0, eps=1.0, patience=1, min_pair_updates=0.0, **chosen
        )
        shared = dataclasses.replace(begin(method, 12), matrix=torch.from_numpy(matrix))
        label = merge(
            method, shared, torch.arange(4), torch.zeros(4, 3, dtype=torch.float64)
        ).label.numpy()
        parts[str(chosen)] = {frozenset(np.flatnonzero(label == i)) for i in np.unique(label)}
        assert parts[str(chosen)] == parts_by_hand(matrix, chosen, split_seed)
    assert len(parts) == 2
    assert parts["{}"] != parts[str(options)]


@pytest.mark.option("PublishedFedGwc.start", "zero", "uniform")
def test_the_matrix_starts_empty_or_even():
    """Six clients: 0, or 1 / 36."""
    for start, level in (("zero", 0.0), ("uniform", 1 / 36)):
        loop = testing.run_method(
            PublishedFedGwc(start=start), settings=testing.tiny_settings(rounds=0)
        )
        assert bool((loop.state.shared.matrix == level).all())


@pytest.mark.option("PublishedFedGwc.explore", False, True)
def test_who_took_part_least_comes_first():
    """Three of ten never took part, the others 100 times: exp(-100) against 1. Without it the noise alone decides."""
    for explore in (True, False):
        method = PublishedFedGwc(explore=explore)
        sampled = torch.where(torch.arange(10) % 4 == 1, 0, 100)
        shared = dataclasses.replace(begin(method, 10), sampled=sampled)
        drawn = [
            method.select_cohort(shared, Rng(0).at_round(index), 10, 0.3).tolist()
            for index in range(5)
        ]
        plain = [
            FedAvg().select_cohort(None, Rng(0).at_round(index), 10, 0.3).tolist()
            for index in range(5)
        ]
        assert drawn == ([[1, 5, 9]] * 5 if explore else plain)


@pytest.mark.option("PublishedFedGwc.preset", "coterie", "paper", "released")
def test_presets_are_the_paper_and_the_code():
    """The paper's text: rows, no guards. The code: its list of differences G1 to G16 of the specification."""
    guarded = PublishedFedGwc()
    assert (
        guarded.upv_axis,
        guarded.patience,
        guarded.min_pair_updates,
        guarded.min_cluster_size,
    ) == ("column", 0, 1.0, 3)
    paper = PublishedFedGwc(preset="paper")
    assert (paper.upv_axis, paper.patience, paper.min_pair_updates, paper.minmax) == (
        "row",
        1,
        0.0,
        False,
    )
    code = PublishedFedGwc(preset="released")
    assert (code.reward_weights, code.ddof, code.loss_sampling_size, code.normalize_rewards) == (
        "samples",
        0,
        10,
        True,
    )
    assert (code.start, code.alpha_rule, code.upv_axis, code.minmax) == (
        "uniform",
        "local_rate",
        "column",
        True,
    )
    assert (code.diagonal, code.db_space, code.n_max_by, code.mse_scope) == (
        0.0,
        "embedding",
        "cohort",
        "sampled",
    )
    assert (code.clients_per_round, code.explore, code.min_pair_updates, code.patience) == (
        10,
        False,
        0.0,
        0,
    )
