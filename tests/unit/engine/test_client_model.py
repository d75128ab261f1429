"""The model that clients train: which first weights must be equal, buffers, and what a module may not do."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from coterie.errors import ConfigError, ModelError
from coterie.methods import METHODS
from coterie.models.layout import NamedModel
from coterie.rng import Rng
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings
from coterie.testing.tiny import build_task


def make_net():
    """Two layers, drawn."""
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def digest_of(model, **options):
    """What nodes compare."""
    return build_task(model=model, **options).model.common_digest


def test_weights_that_a_factory_loads_are_named_and_those_that_it_draws_are_not(tmp_path):
    """Two members load the body from files of one content, a third from another one; each draws its head."""
    first, other = nn.Linear(4, 5), nn.Linear(4, 5)
    for name, layer in {"a": first, "copy": first, "b": other}.items():
        torch.save(layer.state_dict(), tmp_path / name)

    def load(name):
        def make():
            net = make_net()
            net[0].load_state_dict(torch.load(tmp_path / name))
            return net

        return make

    digests = {name: digest_of(load(name)) for name in ("a", "copy", "b")}
    assert digests["a"] == digests["copy"] != ""
    assert digests["b"] not in ("", digests["a"])
    # What stays at home may differ, and what each client draws too.
    at_home = [digest_of(load(name), shared=["2.*"]) for name in ("a", "b")]
    assert at_home == ["", ""]
    assert [digest_of(load(name), init="per_client") for name in ("a", "b")] == ["", ""]
    # All is drawn: nothing to compare. A module that is given counts with all of its weights.
    assert digest_of(make_net) == ""
    given = make_net()
    assert digest_of(given) != ""
    with torch.no_grad():
        given[2].bias[0] += 1e-7
    assert digest_of(given) != digest_of(make_net())


BUILT: list[tuple[int, ...]] = []


def counted_net(features: tuple[int, ...]) -> nn.Module:
    """A model that notes when it is made; one that is loaded from a file takes seconds."""
    BUILT.append(features)
    return make_net()


def test_a_model_by_name_is_made_once_and_drawn_once_for_each_seed():
    """The template serves shapes, trials and frozen weights; the first model clients, server and forecast."""
    BUILT.clear()
    name = NamedModel(f"{__name__}:counted_net")
    task = make_task(tiny_federation(), METHODS["fedavg"](), name, tiny_settings())
    assert BUILT == [(4,)]
    for seed, count in ((0, 2), (0, 2), (1, 3)):
        METHODS["fedavg"]().init_state(task, Rng(seed))
        assert len(BUILT) == count


class Fourier(nn.Module):
    """Random features: a buffer that is drawn."""

    def __init__(self):
        super().__init__()
        self.register_buffer("phase", torch.randn(4, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.cos(x @ self.phase))


def test_buffers_that_are_drawn_cannot_be_reset():
    """Each first model has its own; the template's are nobody's. Those of a given module, and of normalizations, can."""
    with pytest.raises(ConfigError, match="buffers is 'reset', and the model draws values of its"):
        digest_of(Fourier, buffers="reset")
    digest_of(Fourier(), buffers="reset")
    digest_of(Fourier, buffers="local")
    digest_of(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), buffers="reset")


def test_reset_restores_the_buffers_of_the_module_that_was_given():
    """Its own running mean, 2, not that of a new layer."""
    norm = nn.BatchNorm1d(4)
    norm.running_mean.fill_(2.0)
    result = simulate(
        tiny_federation(), METHODS["random"](num_peers=2),
        model=nn.Sequential(norm, nn.Linear(4, 3)),
        settings=tiny_settings(rounds=2, buffers="reset", evaluate="final", order="train_first"),
        seed=1,
    )  # fmt: skip
    models = [result.model(client) for client in range(6)]
    assert all(
        torch.equal(m[0].running_mean, torch.full_like(m[0].running_mean, 2)) for m in models
    )


@pytest.mark.parametrize("track", [True, False])
def test_normalization_by_the_batch_of_an_evaluation_is_said(track, recwarn):
    digest_of(
        lambda: nn.Sequential(
            nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=track)
        )
    )  # fmt: skip
    said = [str(one.message) for one in recwarn if "running statistics" in str(one.message)]
    assert len(said) == (0 if track else 1)
    if said:
        assert said[0].startswith("1: batch normalization without running statistics")
        assert "how many samples are measured at once" in said[0]


class Checkpointed(nn.Module):
    """Computes its first layer again in the backward pass, with or without noise in it."""

    noise, reentrant = 0.5, False

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(self.noise)

    def forward(self, x):
        return self.head(checkpoint(self.run_body, x, use_reentrant=self.reentrant))

    def run_body(self, x):
        return self.drop(torch.relu(self.body(x)))


class Quiet(Checkpointed):
    """Without noise."""

    noise = 0.0


class Plain(Quiet):
    """The same, computed once."""

    def forward(self, x):
        return self.head(self.run_body(x))


@pytest.mark.filterwarnings("ignore:the loop engine is used")
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_noise_that_a_backward_pass_would_draw_again_is_refused(engine):
    """Its gradient would be of other draws than its outputs; without noise, nothing is drawn again."""

    def run(model):
        return simulate(
            tiny_federation(), METHODS["local"](), model=model,
            settings=tiny_settings(rounds=1, engine=engine), seed=1,
        )  # fmt: skip

    with pytest.raises(ModelError, match="draws random numbers again in its backward pass"):
        run(Checkpointed)
    torch.testing.assert_close(run(Quiet).params, run(Plain).params)
