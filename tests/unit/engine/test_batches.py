"""The batches of a local training."""

import pytest
import torch

from coterie.engine._batches import BatchPlan, draw_batches, last_epoch_mean
from coterie.engine.optim import LocalTraining
from coterie.rng import Rng


def test_batches_use_every_sample_once_an_epoch_and_are_keyed_by_client():
    local = LocalTraining(epochs=2, batch_size=5)
    counts, ids = torch.tensor([12, 3]), torch.tensor([4, 9])
    schedule = draw_batches(local, counts, ids, Rng(0), "batches")
    assert schedule.batch_sizes.tolist() == [[5, 5, 2, 5, 5, 2], [3, 3, 0, 0, 0, 0]]
    assert schedule.last_epoch.tolist() == [3, 1]
    for half in (schedule.sample_order[0, :3], schedule.sample_order[0, 3:]):
        assert sorted(half[half >= 0].tolist()) == list(range(12))
    alone = draw_batches(local, counts[1:], ids[1:], Rng(0), "batches")
    assert torch.equal(alone.sample_order[0, :2, :3], schedule.sample_order[1, :2, :3])


@pytest.mark.option("LocalTraining.drop_last", False, True)
def test_a_smaller_last_batch_is_used_or_left_out():
    """Twelve samples in batches of five, twice: 5, 5, 2 or 5, 5. Three samples are one batch, which is not smaller."""
    for drop_last, lengths in (
        (False, [[5, 5, 2, 5, 5, 2], [3, 3, 0, 0, 0, 0]]),
        (True, [[5, 5, 5, 5], [3, 3, 0, 0]]),
    ):
        local = LocalTraining(epochs=2, batch_size=5, drop_last=drop_last)
        schedule = draw_batches(
            local, torch.tensor([12, 3]), torch.tensor([4, 9]), Rng(0), "batches"
        )
        assert schedule.batch_sizes.tolist() == lengths


def test_no_two_clients_and_no_two_rounds_share_an_order():
    """Eight clients with as many samples, in three rounds, in two trainings of a round: 48 orders of 12."""
    counts, ids = torch.full((8,), 12), torch.arange(8)
    local = LocalTraining(batch_size=12)
    orders = [
        draw_batches(local, counts, ids, Rng(0).at_round(index), purpose).sample_order[:, 0]
        for index in range(3)
        for purpose in ("batches", "batches.personal")
    ]
    assert len(torch.cat(orders).unique(dim=0)) == 48


def test_every_epoch_draws_another_order():
    schedule = draw_batches(
        LocalTraining(epochs=3, batch_size=20),
        torch.tensor([20]),
        torch.tensor([0]),
        Rng(0),
        "batches",
    )
    orders = {tuple(order.tolist()) for order in schedule.sample_order[0]}
    assert len(orders) == 3
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_a_number_of_steps_ends_in_the_middle_of_an_epoch():
    """Twelve samples in batches of five: an epoch has three steps, the fourth begins the next."""
    schedule = draw_batches(
        LocalTraining(steps=4, batch_size=5),
        torch.tensor([12]),
        torch.tensor([0]),
        Rng(0),
        "batches",
    )
    assert schedule.batch_sizes.tolist() == [[5, 5, 2, 5]]
    assert sorted(schedule.sample_order[0, :3][schedule.sample_order[0, :3] >= 0].tolist()) == list(
        range(12)
    )


def test_the_training_loss_is_the_mean_over_the_batches_of_the_last_epoch():
    """Of six steps the last epoch has three, 10, 20 and 60; a client with two steps has 4 in its last."""
    nan = torch.nan
    losses = torch.tensor(
        [[1.0, 2.0, 3.0, 10.0, 20.0, 60.0], [9.0, 4.0, nan, nan, nan, nan], [nan] * 6]
    )
    length = torch.tensor([[5, 5, 2, 5, 5, 2], [3, 3, 0, 0, 0, 0], [0] * 6])
    schedule = BatchPlan(torch.zeros(3, 6, 5, dtype=torch.int64), length, torch.tensor([3, 1, 0]))
    means = last_epoch_mean(losses, schedule)
    assert means[:2].tolist() == [30.0, 4.0]
    assert bool(means[2].isnan())


@pytest.mark.parametrize("steps", [3, 4, 7, 8, 15, 33, 100])
def test_the_training_loss_of_a_client_does_not_depend_on_the_steps_of_others(steps: int):
    """Bit by bit, next to clients that take more steps."""
    losses = torch.from_numpy(Rng(steps).generator("losses").normal(size=(5, steps)))

    def means_beside(more: int) -> list[float]:
        wide = torch.full((5, steps + more), torch.nan, dtype=torch.float64)
        wide[:, :steps] = losses
        length = (~wide.isnan()).to(torch.int64)
        order = torch.zeros(*wide.shape, 1, dtype=torch.int64)
        first = torch.tensor([0, 0, 1, 1, 2])
        return last_epoch_mean(wide, BatchPlan(order, length, first)).tolist()

    for more in (1, 2, 5, 9, 16, 31, 64, 200):
        assert means_beside(more) == means_beside(0)
