"""Mixing weights: FedAvg and the two definitions of FedSim."""

import torch

from coterie.functional import aggregation

HERE = torch.ones(1, 3, dtype=torch.bool)


def test_fedavg_weighs_by_samples_with_the_own_model_included():
    """n = (1, 2, 4) of peers and 1 of its own: eighths."""
    weights, own = aggregation.fedavg_weights(
        torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([1.0]), HERE
    )
    assert weights.tolist() == [[0.125, 0.25, 0.5]]
    assert own.tolist() == [0.125]


def test_fedavg_shares_what_did_not_arrive_among_the_rest():
    weights, own = aggregation.fedavg_weights(
        torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([1.0]), torch.tensor([[True, True, False]])
    )
    assert weights.tolist() == [[0.25, 0.5, 0.0]]
    assert own.tolist() == [0.25]


def test_fedsim_with_equal_similarities_is_the_plain_mean():
    """Invariant 23: which is FedAvg exactly when all have the same number of samples."""
    weights, own = aggregation.fedsim_weights(torch.full((1, 3), 0.7), HERE)
    torch.testing.assert_close(weights, torch.full((1, 3), 0.25))
    torch.testing.assert_close(own, torch.tensor([0.25]))
    equal = aggregation.fedavg_weights(torch.full((1, 3), 9.0), torch.tensor([9.0]), HERE)
    torch.testing.assert_close((weights, own), equal)
    assert not torch.equal(
        aggregation.fedavg_weights(torch.full((1, 3), 9.0), torch.tensor([1.0]), HERE)[1], own
    )


def test_fedsim_does_not_depend_on_the_scale():
    """Invariant 24."""
    s = torch.tensor([[0.2, 0.5, 0.1]])
    torch.testing.assert_close(
        aggregation.fedsim_weights(s, HERE), aggregation.fedsim_weights(1000 * s, HERE)
    )


def test_fedsim_weighs_the_own_model_like_the_best_peer():
    """Invariant 25: u = (2, 5, 1) and 5 for itself: thirteenths."""
    weights, own = aggregation.fedsim_weights(torch.tensor([[2.0, 5.0, 1.0]]), HERE)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 5.0, 1.0]]) / 13)
    assert float(own) == float(weights.max())


def test_fedsim_without_a_similar_peer_keeps_the_own_model():
    """Invariant 26: all similarities 0 or below, or nothing arrived, or no slot at all."""
    for weights, own in (
        aggregation.fedsim_weights(torch.tensor([[-0.5, 0.0, -1.0]]), HERE),
        aggregation.fedsim_weights(torch.tensor([[0.5, 0.7, 0.9]]), ~HERE),
        aggregation.fedsim_weights(torch.zeros(1, 0), HERE[:, :0]),
    ):
        assert not weights.any()
        assert own.tolist() == [1.0]


def test_fedsim_clips_negative_similarities():
    """(-1, 1, 3) counts as (0, 1, 3), and 3 for itself: sevenths."""
    weights, own = aggregation.fedsim_weights(torch.tensor([[-1.0, 1.0, 3.0]]), HERE)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 1.0, 3.0]]) / 7)
    torch.testing.assert_close(own, torch.tensor([3 / 7]))


def test_fedsim_does_not_count_whom_it_has_not_heard():
    """Two peers with 0.1 and 0.3 answered; itself counts 0.3: sevenths."""
    heard = torch.tensor([[True, True, False]])
    weights, own = aggregation.fedsim_weights(torch.tensor([[0.1, 0.3, 0.6]]), heard)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 3.0, 0.0]]) / 7)
    torch.testing.assert_close(own, torch.tensor([3 / 7]))
