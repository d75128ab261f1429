"""Properties of similarities, choices and mixing weights, for any input."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.exchange.base import Message, make_inbox
from coterie.functional import aggregation, selection, similarity
from coterie.rng import Rng

seeds = st.integers(0, 2**31)
few = settings(max_examples=40, deadline=None)


def stream(seed):
    return Rng(seed).generator("test")


def draw(seed, *shape):
    return torch.from_numpy(stream(seed).normal(size=shape))


@few
@given(
    seed=seeds,
    clients=st.integers(1, 6),
    peers=st.integers(0, 5),
    kind=st.sampled_from(["avg", "sim"]),
)
def test_mixing_weights_are_a_distribution_over_what_arrived(seed, clients, peers, kind):
    """Invariant 1: rows sum to 1, no entry is negative, what did not arrive weighs nothing."""
    mask = torch.from_numpy(stream(seed).random((clients, peers)) < 0.6)
    values = draw(seed + 1, clients, peers)
    if kind == "avg":
        weights, own = aggregation.fedavg_weights(
            values.abs() + 1, draw(seed, clients).abs() + 0.1, mask
        )
    else:
        weights, own = aggregation.fedsim_weights(values, mask)
    torch.testing.assert_close(weights.sum(1) + own, torch.ones(clients).double())
    assert bool((weights >= 0).all())
    assert bool((own > 0).all())
    assert not weights[~mask].any()


@few
@given(seed=seeds, peers=st.integers(1, 5))
def test_the_order_of_the_slots_does_not_matter(seed, peers):
    """Invariant 28: permuting M_i permutes the weights."""
    order = torch.from_numpy(stream(seed).permutation(peers))
    s, mask = draw(seed, 2, peers), torch.ones(2, peers, dtype=torch.bool)
    weights, own = aggregation.fedsim_weights(s, mask)
    moved, same = aggregation.fedsim_weights(s[:, order], mask)
    torch.testing.assert_close(moved, weights[:, order])
    torch.testing.assert_close(same, own)


@few
@given(seed=seeds, clients=st.integers(2, 6), params=st.integers(1, 30))
def test_mix_is_the_product_with_the_mixing_matrix(seed, clients, params):
    """Invariant 2: merged = A W against a dense matrix; with equal models nothing changes."""
    w = draw(seed, clients, params)
    ids = torch.arange(clients)
    peers = selection.sample_uniformly(
        Rng(seed).gumbel("peers", ids, clients), 3, ids != ids[:, None]
    )
    inbox = make_inbox(Message(w, ids=ids), ids, peers, clients)
    weights, own = aggregation.fedavg_weights(
        draw(seed, *peers.shape).abs() + 1, torch.ones(clients).double(), inbox.mask
    )
    matrix = torch.diag(own).scatter_add(1, peers, weights)
    torch.testing.assert_close(inbox.mix(weights, own=w, own_weight=own), matrix @ w)
    same = w[:1].expand_as(w)
    inbox = make_inbox(Message(same, ids=ids), ids, peers, clients)
    torch.testing.assert_close(inbox.mix(weights, own=same, own_weight=own), same)


@few
@given(
    seed=seeds,
    population=st.integers(1, 9),
    tau=st.floats(0, 1e6),
    floor=st.sampled_from([0.0, 1e-6, 0.1]),
)
def test_probabilities_are_a_distribution_over_the_others(seed, population, tau, floor):
    """Rows sum to 1 (0 for a client that is alone), are finite, and nobody draws itself."""
    ids = torch.arange(population)
    considered = torch.from_numpy(stream(seed).random((population, population)) < 0.5)
    p = selection.selection_probabilities(
        draw(seed, population, population), tau, considered, ids, floor=floor
    )
    assert bool((p >= 0).all())
    assert not p.diagonal().any()
    torch.testing.assert_close(p.sum(1), torch.full((population,), float(population > 1)).double())


@few
@given(seed=seeds, population=st.integers(2, 8), count=st.integers(1, 4))
def test_relabeling_the_clients_relabels_the_choice(seed, population, count):
    """Invariant 4: permute who is who, draws included, and the same clients are chosen."""
    ids = torch.arange(population)
    order = torch.from_numpy(stream(seed).permutation(population))
    noise = draw(seed, population, population)
    allowed = ids != ids[:, None]
    before = selection.sample_peers(torch.zeros_like(noise), noise, count, allowed)
    after = selection.sample_peers(torch.zeros_like(noise), noise[order][:, order], count, allowed)
    assert torch.equal(order[after], before[order])


@few
@given(seed=seeds, pairs=st.integers(1, 4), params=st.integers(1, 300))
def test_similarities_agree_with_the_textbook(seed, pairs, params):
    """Cosine and L2 against torch's own, in float64."""
    own, table = draw(seed, pairs, params), draw(seed + 1, 3, params)
    index = torch.from_numpy(stream(seed).integers(0, 3, (pairs, 2)))
    mask = torch.ones(pairs, 2, dtype=torch.bool)
    cos = torch.nn.functional.cosine_similarity(own[:, None], table[index], dim=2)
    torch.testing.assert_close(similarity.cosine(own, table, index, mask), cos)
    gap = (own[:, None] - table[index]).norm(dim=2)
    torch.testing.assert_close(similarity.l2_distances(own, table, index, mask), gap)
