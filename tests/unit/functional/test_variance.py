"""The mean of models that began apart keeps the spread of their weights."""

import pytest
import torch

import coterie
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError
from coterie.functional.aggregation import ReceivedModels, merge_by_rule
from coterie.functional.robust import make_rule
from coterie.models.layout import Slot
from coterie.testing import tiny_federation, tiny_settings

SLOTS = (Slot("weight", (30, 40), 0, 1200), Slot("bias", (40,), 1200, 1240))


LOCAL = LocalTraining(batch_size=5, optimizer="sgd", lr=1e-6)


def merge(models: torch.Tensor, samples: list[float]) -> torch.Tensor:
    received = ReceivedModels(models, torch.tensor(samples), None, models[0].clone(), SLOTS)
    return merge_by_rule(make_rule("variance-corrected"), received, "it")


def draw(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 1240, generator=torch.Generator().manual_seed(seed))


def test_weights_are_as_wide_as_those_merged_and_biases_are_averaged():
    models = draw(4) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None] + 5
    samples = [1.0, 1.0, 1.0, 5.0]
    merged = merge(models, samples)
    share = torch.tensor(samples) / 8
    plain = (share[:, None] * models).sum(0)
    torch.testing.assert_close(merged[1200:], plain[1200:])
    wanted = (share * models[:, :1200].var(1, correction=0)).sum()
    torch.testing.assert_close(merged[:1200].var(correction=0), wanted)
    torch.testing.assert_close(merged[:1200].mean(), plain[:1200].mean())
    # Of four unrelated models the plain mean lost most of it.
    assert float(plain[:1200].var()) < 0.6 * float(wanted)
    # Only stretched: each entry stays where it was along the line through the mean.
    factor = (merged - merged[:1200].mean())[:1200] / (plain - plain[:1200].mean())[:1200]
    assert float(factor.max() - factor.min()) < 1e-3


def test_equal_models_are_left_as_they_are():
    model = draw(1)
    torch.testing.assert_close(merge(model.repeat(3, 1), [1.0, 2.0, 3.0]), model[0])


def test_a_matrix_of_equal_entries_is_the_mean():
    """It has no spread: nothing is divided by zero."""
    models = torch.ones(2, 1240)
    models[1] = -1
    assert torch.equal(merge(models, [1.0, 1.0]), torch.zeros(1240))


def test_models_without_a_matrix_are_refused():
    with pytest.raises(ConfigError, match="corrects weight matrices, and no shared tensor is"):
        coterie.simulate(
            tiny_federation(),
            coterie.Random(num_peers=2, aggregation="variance-corrected"),
            model="linear",
            settings=tiny_settings(rounds=1, shared=["1.bias"]),
        )


@pytest.mark.full
def test_a_layer_keeps_its_spread_where_models_began_apart():
    """The claim of the paper: in averages of unlike first models it shrinks, corrected it does not."""

    def measure_spread(method: coterie.methods.Method) -> float:
        settings = tiny_settings(rounds=1, init="per_client", local=LOCAL, evaluate="final")
        run = coterie.simulate(tiny_federation(16), method, model="mlp-c", settings=settings)
        layers = [next(p for p in run.model(c).parameters() if p.dim() > 1) for c in range(16)]
        return sum(float(layer.detach().double().var()) for layer in layers) / 16

    before = measure_spread(coterie.Local())
    # Six unrelated models are merged, so that the plain mean has a sixth of the variance.
    plain = measure_spread(coterie.Random(num_peers=5))
    assert plain == pytest.approx(before / 6, rel=0.1)
    corrected = measure_spread(coterie.Random(num_peers=5, aggregation="variance-corrected"))
    assert corrected == pytest.approx(before, rel=0.1)
