"""Frozen weights are one tensor for all clients: in no row, in no message, the same in every engine and process."""

import pytest
import torch
from tests.selection import first_only
from torch import nn

from coterie.engine._base import cross_entropy
from coterie.engine._flat import FlatModel
from coterie.engine._work import EvaluationPairs, RawSamples
from coterie.engine.native.compiled import CompiledEngine
from coterie.engine.task import LocalTraining
from coterie.methods import METHODS
from coterie.models.layout import Layout, draw_initial_params
from coterie.net.head import schema_hash
from coterie.rng import Rng
from coterie.runtime.checkpoint import compute_identity
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate
from coterie.testing import check_method, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task


class Backbone(nn.Module):
    """A frozen body with a trained bias in its middle and a trained head."""

    def __init__(self, inputs: int = 5, width: int = 8, outputs: int = 3):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width)
        )
        self.head = nn.Linear(width, outputs)
        self.body.requires_grad_(False)
        self.body[3].bias.requires_grad_(True)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Images(nn.Module):
    """Frozen convolutions and a frozen normalization, whose running statistics are the clients' own."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 3, 3)
        )
        self.head = nn.Linear(3 * 4 * 4, 3)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def drawn(make, seed=0):
    with Rng(seed).temporary_torch_seed("test"):
        return make()


def test_a_row_holds_what_is_trained_and_what_a_client_counts_itself():
    layout = Layout(drawn(Images))
    assert list(layout.frozen) == ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.3.weight",
                                   "body.3.bias"]  # fmt: skip
    names = [
        "head.weight",
        "head.bias",
        "body.1.running_mean",
        "body.1.running_var",
        "body.1.num_batches_tracked",
    ]
    assert [slot.name for slot in layout.slots] == names
    assert (layout.trainable, layout.size) == (3 * 48 + 3, 3 * 48 + 3 + 4 + 4 + 1)


def test_a_module_of_a_row_has_the_frozen_weights_of_the_layout():
    module = drawn(Backbone)
    layout = Layout(module)
    again = layout.build_module(layout.flatten_module(module))
    assert all(
        torch.equal(a, b)
        for a, b in zip(module.state_dict().values(), again.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        again.body[1].weight.add_(1)  # a user's change of it changes nothing here
    assert torch.equal(layout.frozen["body.1.weight"], module.body[1].weight)


def test_the_copies_that_engines_work_on_have_the_same_tensors_of_frozen_weights():
    layout = Layout(drawn(Images))
    flat = FlatModel(layout, torch.device("cpu"))
    for module in (layout.train_module, layout.eval_module, flat.train_module, flat.eval_module):
        own = dict(module.named_parameters())
        assert all(own[name] is tensor for name, tensor in layout.frozen.items())


def test_what_a_client_starts_from_has_nothing_to_do_with_frozen_weights():
    """A factory that is drawn anew gives every client another first model, and all of them one backbone."""
    federation = tiny_federation(features=(5,))
    task = build_task(federation.host(federation.ids), Backbone, init="per_client", engine="loop")
    rows = task.initial_models(Rng(7))
    assert len(rows.unique(dim=0)) == len(federation)
    assert rows.shape[1] == 8 + 8 * 3 + 3
    other = build_task(federation.host([0]), Backbone, init="per_client", engine="loop")
    assert task.layout.frozen_digest == other.layout.frozen_digest
    module = drawn(Backbone)
    layout, kept = Layout(module), module.body[1].weight.clone()
    draw_initial_params(module, layout, Rng(1))  # every layer draws again, but what is frozen
    assert torch.equal(layout.frozen["body.1.weight"], kept)


def test_the_digest_is_that_of_the_values():
    one, same, other = (Layout(drawn(Backbone, seed)) for seed in (0, 0, 1))
    assert one.frozen_digest == same.frozen_digest != other.frozen_digest
    assert schema_hash(one) == schema_hash(same) != schema_hash(other)
    assert Layout(nn.Linear(2, 2)).frozen_digest == ""


@pytest.mark.full
@pytest.mark.parametrize(("make", "features"), first_only([(Backbone, (5,)), (Images, (2, 6, 6))]))
def test_engines_agree(make, features):
    federation = tiny_federation(num_clients=3, features=features, train=10)
    module, found = drawn(make), {}
    for engine in ("loop", "vmap", "compiled"):
        settings = tiny_settings(engine=engine, init="given", rounds=2)
        task = build_task(
            federation.host(federation.ids), module, engine=engine, dtype=torch.float64
        )
        assert task.engine.name == engine
        found[engine] = simulate(
            federation, METHODS["fedavg"](), model=module, settings=settings
        ).params
    start = Layout(module, torch.float64).flatten_module(module)
    assert not torch.equal(found["loop"][0], start)
    assert torch.allclose(found["vmap"], found["loop"], rtol=0, atol=1e-10)
    assert torch.allclose(found["compiled"], found["loop"], rtol=0, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("engine", first_only(["compiled", "loop", "vmap"], slow=True))
def test_the_result_of_a_client_depends_on_nobody_beside_it(engine):
    """Frozen weights are shared by all clients of a block: a product with them must not be one for all clients."""
    check_method(
        METHODS["dac"](num_peers=2),
        federation=tiny_federation(features=(5,)),
        model=Backbone,
        settings=tiny_settings(engine=engine),
    )


@pytest.mark.full
def test_a_program_made_for_one_backbone_computes_with_the_next_one():
    """The text of the program is that of the first, so that it is not compiled again; the weights are not in it."""
    programs, losses = [], []
    x, y = (
        torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double(),
        torch.tensor([0, 1, 2, 0]),
    )
    for seed in (0, 1):
        layout = Layout(drawn(Backbone, seed), torch.float64)
        engine = CompiledEngine(layout, cross_entropy, x, y)
        programs.append(engine.program)
        row = torch.linspace(-1, 1, layout.size, dtype=torch.float64)[None]
        sets = EvaluationPairs(
            RawSamples(x, y, torch.float64),
            torch.arange(4)[None],
            torch.tensor([4]),
            *[torch.zeros(1).long()] * 2,
        )
        losses.append(engine.measure_pairs(row, sets, {}, 1)["loss"])
        expected = torch.nn.functional.cross_entropy(
            layout.build_module(row[0], dtype=torch.float64)(x), y
        ).detach()
        assert torch.allclose(losses[-1], expected[None], atol=1e-12)
    assert programs[0].text == programs[1].text
    assert not torch.equal(*losses)


def test_a_read_model_costs_what_is_trained():
    """The example of a frozen body of 260,000 weights and a head of 8,002: a read was 1,072,012 bytes."""
    net = nn.Sequential(nn.Linear(64, 4000), nn.Tanh(), nn.Linear(4000, 2))
    net[0].requires_grad_(False)
    federation = tiny_federation(features=(64,), classes=2, num_clients=3, train=4)
    settings = Settings(rounds=1, engine="loop", local=LocalTraining(batch_size=4), warmup_epochs=0)
    run = simulate(federation, METHODS["random"](num_peers=1), model=net, settings=settings)
    assert sum(one.numel() for one in net.parameters()) == 268_002
    assert set(run.edges["bytes"].tolist()) == {4 * 8_002 + 4}  # and the number of samples
    assert run.params.shape == (3, 8_002)


def test_a_checkpoint_belongs_to_the_frozen_weights_of_its_run():
    federation, settings = tiny_federation(features=(5,)), tiny_settings()
    found = set()
    for seed in (0, 0, 1):
        task = build_task(
            federation.host(federation.ids),
            drawn(Backbone, seed),
            engine="loop",
            dtype=torch.float64,
        )
        found.add(compute_identity(METHODS["local"](), settings, 0, federation, task))
    assert len(found) == 2
