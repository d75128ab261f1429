"""The batches of a local training."""

import torch

from coterie.engine._batches import plan
from coterie.engine.optim import LocalTraining
from coterie.rng import Rng


def test_batches_use_every_sample_once_an_epoch_and_are_keyed_by_client():
    local = LocalTraining(epochs=2, batch_size=5)
    counts, ids = torch.tensor([12, 3]), torch.tensor([4, 9])
    schedule = plan(local, counts, ids, Rng(0), "batches")
    assert schedule.length.tolist() == [[5, 5, 2, 5, 5, 2], [3, 3, 0, 0, 0, 0]]
    assert schedule.last_epoch.tolist() == [3, 1]
    for half in (schedule.order[0, :3], schedule.order[0, 3:]):
        assert sorted(half[half >= 0].tolist()) == list(range(12))
    alone = plan(local, counts[1:], ids[1:], Rng(0), "batches")
    assert torch.equal(alone.order[0, :2, :3], schedule.order[1, :2, :3])
