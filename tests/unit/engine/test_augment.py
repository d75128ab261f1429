"""Random crops and flips: against naive padding, keyed by client and step."""

import pytest
import torch
from torch import Tensor

from coterie.engine._augment import CropFlip
from coterie.engine._work import RawSamples
from coterie.engine.optim import LocalTraining
from coterie.errors import ModelError
from coterie.methods.fedavg import FedAvg
from coterie.rng import Rng
from coterie.testing import run_grouped, run_method, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task


def candidates(image: Tensor, padding: int, fill: Tensor) -> list[Tensor]:
    """Every crop of the padded image, plain and mirrored."""
    channels, height, width = image.shape
    padded = fill[:, None, None].expand(channels, height + 2 * padding, width + 2 * padding).clone()
    padded[:, padding : padding + height, padding : padding + width] = image
    places = [(d, r) for d in range(2 * padding + 1) for r in range(2 * padding + 1)]
    crops = [padded[:, d : d + height, r : r + width] for d, r in places]
    return crops + [crop.flip(-1) for crop in crops]


def test_every_result_is_a_crop_of_the_padded_image():
    """All 2 x 5 x 5 results occur over 2,000 samples, each about equally often, and nothing else does."""
    image = torch.arange(2 * 3 * 4, dtype=torch.float64).reshape(2, 3, 4) + 1
    fill = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    batch = image.expand(2, 1000, 2, 3, 4)
    moved = CropFlip(torch.tensor([11, 12]), 2, fill)(batch, torch.arange(2), step=3).flatten(0, 1)
    found = torch.stack([(moved == one).flatten(1).all(1) for one in candidates(image, 2, fill)])
    assert bool(found.any(0).all())
    counts = found.sum(1)
    assert int(counts.min()) > 40 - 5 * 40**0.5
    assert int(counts.max()) < 40 + 5 * 40**0.5


def test_draws_belong_to_the_client_and_the_step():
    """Neither the other members nor the rest of the batch matter; another step and another client do."""
    x = torch.from_numpy(Rng(0).generator("x").normal(size=(3, 8, 1, 6, 6)))
    augment = CropFlip(torch.tensor([5, 6, 7]), 2, torch.zeros(1))
    whole = augment(x, torch.arange(3), 0)
    assert torch.equal(augment(x[1:2, :4], torch.tensor([1]), 0), whole[1:2, :4])
    assert not torch.equal(augment(x, torch.arange(3), 1), whole)
    same = augment(x[:1].expand(3, -1, -1, -1, -1), torch.arange(3), 0)
    assert not torch.equal(same[0], same[1])


@pytest.mark.full
def test_training_with_augmentation_is_the_same_everywhere():
    """In any grouping and with each engine; and it changes the result."""
    federation = tiny_federation(4, features=(1, 4, 4))
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1, augment="crop-flip", padding=1)
    results = [
        run_method(
            FedAvg(), federation=federation, settings=tiny_settings(local=local, engine=engine)
        ).state.params
        for engine in ("loop", "vmap", "compiled")
    ]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=1e-10)
    grouped = run_grouped(
        federation, FedAvg(), [[0, 2], [1], [3]], settings=tiny_settings(local=local)
    )
    torch.testing.assert_close(grouped, results[0], rtol=0, atol=1e-10)
    plain = run_method(FedAvg(), federation=federation, settings=tiny_settings()).state.params
    assert float((plain - results[0]).abs().max()) > 1e-3


def test_the_added_pixels_are_black_as_the_model_takes_it():
    """A pixel of 0, less the mean and over the deviation: (0 - 0.5) / 0.5 and (0 - 0.25) / 0.125; else plain 0."""
    x, y = torch.zeros(1, 2, 3, 3, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    samples = RawSamples(x, y, torch.float64, mean=(0.5, 0.25), std=(0.5, 0.125))
    assert samples.black_pixel().tolist() == [-1.0, -2.0]
    assert torch.equal(samples.prepare_inputs(torch.tensor([0]))[0, :, 1, 1], samples.black_pixel())
    assert RawSamples(x, y, torch.float64).black_pixel().tolist() == [0.0, 0.0]


def test_only_images_are_cropped():
    """One line that says what was found."""
    local = LocalTraining(augment="crop-flip")
    with pytest.raises(
        ModelError, match=r"local.augment is 'crop-flip'; it takes images, found shape \(4,\)"
    ):
        run_method(FedAvg(), settings=tiny_settings(local=local))


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_what_a_client_trains_on_is_its_image_or_a_crop_of_it(engine: str):
    """One sample, all weights 0: the step on the row of the true class is lr x 2/3 times what the model saw."""
    federation = tiny_federation(20, features=(1, 4, 4))
    for augment, padding in (("none", 1), ("crop-flip", 1), ("crop-flip", 0)):
        local = LocalTraining(
            steps=1, batch_size=1, optimizer="sgd", lr=0.3, augment=augment, padding=padding
        )
        task = build_task(federation.host(range(20)), "linear", dtype=torch.float64, engine=engine)
        after, _, _ = task.train(
            torch.zeros(20, task.layout.size, dtype=torch.float64), Rng(0).at_round(0), local
        )
        moved, kinds = 0, set()
        for client in range(20):
            place = int(Rng(0).at_round(0).generator("batches", client).permutation(12)[0])
            image, label = federation.x[client, place], int(federation.y[client, place])
            seen = after[client, :48].reshape(3, 1, 4, 4)[label] / (0.3 * 2 / 3)
            crops = candidates(image, padding, torch.zeros(1, dtype=torch.float64))
            found = [number for number, crop in enumerate(crops) if torch.allclose(seen, crop)]
            assert found, "neither the image nor a crop of it"
            moved += not torch.allclose(seen, image)
            kinds.add(found[0])
        if augment == "none":
            assert moved == 0
        elif padding == 0:
            assert (kinds, 4 < moved < 16) == ({0, 1}, True), "half of the images are mirrored"
        else:
            assert moved > 10
            assert len(kinds) > 8, "each client draws its own"
