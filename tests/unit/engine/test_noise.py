"""Noise that is drawn anew at every access: its distribution, its keys, and the same numbers everywhere."""

import dataclasses

import pytest
import torch

from coterie.data.build import DataConfig, build_federation
from coterie.data.federation import Federation
from coterie.engine.noise import InputNoise, draw_gaussian
from coterie.engine.task import LocalTraining
from coterie.errors import DataError
from coterie.methods.fedavg import FedAvg
from coterie.methods.ifca import Ifca
from coterie.models.draws import splitmix
from coterie.rng import Rng
from coterie.runtime import checkpoint
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.studies.describe import describe_federation
from coterie.testing import run_grouped, run_method, tiny_federation, tiny_settings


def noisy_federation() -> Federation:
    """The tiny federation as images, with noise on clients 1, 3 and 5 and on their test set."""
    federation = tiny_federation(features=(1, 3, 3))
    clean, noisy = federation.tests
    return dataclasses.replace(
        federation,
        noise=torch.tensor([0.0, 0.8] * 3, dtype=torch.float64),
        tests=(clean, dataclasses.replace(noisy, noise=0.8)),
    )


def test_draws_are_standard_normal_and_independent():
    """Moments 0, 1, 0, 3 of 200,000 draws, and correlations 0 between entries of one pair and of two keys."""
    keys = splitmix(torch.arange(2000) + 1)
    draws = draw_gaussian(keys, 100)
    assert draws.shape == (2000, 100)
    flat, size = draws.flatten(), 200_000
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float(flat.pow(power).mean()) - expected) < 5 * (variance / size) ** 0.5
    for one, other in ((draws[:, :50], draws[:, 50:]), (draws[1:], draws[:-1])):
        assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5
    assert torch.equal(draw_gaussian(keys[5:7], 100), draws[5:7])
    assert torch.equal(draw_gaussian(keys[:3], 7)[:, :4], draw_gaussian(keys[:3], 8)[:, :4])


def test_a_draw_belongs_to_the_client_the_step_and_the_sample():
    """Neither the other members nor the batch matter; places of another row with the same number do not either."""
    noise = InputNoise(torch.tensor([5, 6, 7]), torch.tensor([1.0, 0.0, 2.0]), 10)

    def drawn(members: list[int], places: list[list[int]], step: int = 0) -> torch.Tensor:
        x = torch.zeros(len(members), len(places[0]), 2, 3, dtype=torch.float64)
        return noise.add_to(x, torch.tensor(members), step, torch.tensor(places))

    whole = drawn([0, 1, 2], [[0, 3], [10, 13], [20, 23]])
    assert float(whole[1].abs().max()) == 0
    assert torch.equal(drawn([2], [[3]])[0, 0], whole[2, 1])
    assert not torch.equal(drawn([2], [[3]], step=1)[0, 0], whole[2, 1])
    assert not torch.equal(whole[0], whole[2] / 2)
    assert len(whole.flatten().unique()) == 24 + 1


def test_every_step_and_every_round_see_other_noise():
    """A client without momentum or shuffling that takes the same full batch twice has two losses that differ."""
    local = LocalTraining(batch_size=12, epochs=2, optimizer="sgd", lr=0.0)
    task = make_task(noisy_federation(), FedAvg(), "linear", tiny_settings())
    params = task.initial_models(Rng(0))
    losses = task.train(params, Rng(0).at_round(1), local)[1]["losses"]
    assert torch.allclose(losses[0::2, 0], losses[0::2, 1])
    assert float((losses[1::2, 0] - losses[1::2, 1]).abs().min()) > 1e-4
    for measure in (lambda t: t.loss(params, "validation"), lambda t: t.evaluate(params)["loss"]):
        first, again, later = (measure(task.for_round(Rng(0).at_round(r))) for r in (1, 1, 2))
        assert torch.equal(first, again)
        assert torch.equal(first[0::2], later[0::2])
        assert float((first[1::2] - later[1::2]).abs().min()) > 1e-4


def test_all_metrics_of_a_round_are_of_the_same_noisy_images():
    """Accuracy, recalls and pooled accuracy see one drawing of a test set: the recalls add up to the accuracy."""
    federation = noisy_federation()
    task = make_task(federation, FedAvg(), "linear", tiny_settings()).for_round(Rng(2).at_round(3))
    params = task.initial_models(Rng(0)) + torch.linspace(-1, 1, 30, dtype=torch.float64)
    _, recall, number = task.evaluator.evaluate_by_class(params)
    accuracy = task.evaluate(params)["accuracy"]
    torch.testing.assert_close((recall.nan_to_num() * number).sum(1) / number.sum(1), accuracy)
    torch.testing.assert_close(
        task.evaluator.accuracy_on_all_tests(params[:1])[0], accuracy[:2].mean()
    )


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_engines_and_hosts_agree(augment):
    """Loop, vmap and compiled, in any grouping, with IFCA's choice by noisy losses."""
    federation = noisy_federation()
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1, augment=augment, padding=1)
    results = [
        run_method(
            Ifca(2), federation=federation, settings=tiny_settings(local=local, engine=engine)
        ).state.params
        for engine in ("loop", "vmap", "compiled")
    ]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=1e-10)
    grouped = run_grouped(
        federation, Ifca(2), [[0, 2], [1, 5], [3, 4]], settings=tiny_settings(local=local)
    )
    torch.testing.assert_close(grouped, results[0], rtol=0, atol=1e-10)
    clean = dataclasses.replace(federation, noise=None)
    plain = run_method(Ifca(2), federation=clean, settings=tiny_settings(local=local)).state.params
    assert float((plain - results[0]).abs().max()) > 1e-3


def test_measurements_of_engines_agree():
    """Losses on the training data and on test sets, whatever the block."""
    federation, settings = noisy_federation(), tiny_settings()
    found = []
    for engine, block in (("loop", None), ("vmap", 1), ("vmap", 4), ("compiled", None)):
        task = make_task(
            federation,
            FedAvg(),
            "linear",
            dataclasses.replace(settings, engine=engine, block=block),
        )
        params = task.initial_models(Rng(0)) + torch.linspace(-1, 1, 30, dtype=torch.float64)
        found.append(
            torch.stack(
                [
                    task.evaluator.evaluate_split(params, "train")["loss"],
                    task.evaluate(params)["loss"],
                ]
            )
        )
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-10)


def test_a_resumed_run_ends_with_the_same_bytes(tmp_path):
    """The noise of a round is keyed, not stored."""

    def run(folder: str, rounds: int, resume: bool = False) -> bytes:
        settings = tiny_settings(rounds=rounds, participation=0.5, eval_every=1)
        simulate(
            noisy_federation(), FedAvg(), model="linear", settings=settings, seed=1, folder=tmp_path / folder,
            resume=resume,
        )  # fmt: skip
        return (tmp_path / folder / checkpoint.FILE).read_bytes()

    whole = run("whole", 5)
    run("parts", 3)
    assert run("parts", 5, resume=True) == whole


def test_the_visual_shift_keeps_bytes_and_says_where_noise_is():
    """uint8 images, sigma of each client and test set; hosting and saving keep it; pictures show it."""
    shift = [{"kind": "visual", "domains": ["clean", "noise"], "sizes": [2, 2], "sigma": 0.7}]
    federation = build_federation(DataConfig("digits", 4, 20, 5, shift), 0)
    assert federation.x.dtype == torch.uint8
    assert federation.noise is not None
    assert federation.noise.tolist() == [0, 0, 0.7, 0.7]
    assert [test.noise for test in federation.tests] == [0, 0.7]
    assert federation.truth is not None
    assert federation.truth.shift[2:] == ("noise; sigma 0.7, drawn anew at every access",) * 2
    hosted = federation.host([2, 1]).noise
    assert hosted is not None
    assert hosted.tolist() == [0.7, 0]
    clean, noisy = (describe_federation(federation)["images"][cluster][0] for cluster in (0, 1))
    plain = describe_federation(dataclasses.replace(federation, noise=None))["images"]
    assert clean == plain[0][0]
    assert noisy != plain[1][0]


def test_a_federation_keeps_its_noise_on_disk(tmp_path):
    """Rows and test sets; noise that is no deviation is refused."""
    federation = noisy_federation()
    federation.save(tmp_path / "f.safetensors")
    again = Federation.load(tmp_path / "f.safetensors")
    assert again.compute_fingerprint() == federation.compute_fingerprint()
    assert again.noise is not None
    assert federation.noise is not None
    assert torch.equal(again.noise, federation.noise)
    assert again.tests[1].noise == 0.8
    assert (
        dataclasses.replace(federation, noise=None).compute_fingerprint()
        != federation.compute_fingerprint()
    )
    with pytest.raises(
        DataError, match=r"noise from -1\.0 to 0\.8; expected finite numbers, not negative"
    ):
        dataclasses.replace(
            federation, noise=torch.full((6,), -1.0, dtype=torch.float64)
        ).validate()
