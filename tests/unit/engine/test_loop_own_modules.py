"""Every engine trains the module that it is given: compared with the untouched module in plain PyTorch.

The reference is a loop over a deep copy of the module, with PyTorch's own optimizer; what it draws
comes from the same keys, whose distributions tests/unit/models/test_draws.py has.
"""

import copy
import warnings

import pytest
import torch
from tests.selection import first_only, full
from torch import nn
from torch.nn import functional

from coterie.engine._base import cross_entropy
from coterie.engine._choice import make_engine
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork, step_keys
from coterie.engine.optim import LocalTraining
from coterie.errors import ModelError
from coterie.models.draws import KeyedDraws, splitmix
from coterie.models.layout import Layout

FEATURES, SAMPLES, RATE = 6, 90, 0.1
KEYS = torch.tensor([3, 1 << 61, -77])
# of three clients in three steps
LENGTHS = torch.tensor([[8, 8, 5], [8, 8, 8], [3, 8, 0]])


class Body(nn.Module):
    """Layers of several kinds; subclasses say what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.4), nn.Linear(8, 3)


class AsksType(Body):
    """Activates after batch normalizations, as VGGs written by hand do."""

    def forward(self, x):
        for layer in (self.first, self.norm, self.drop, self.last):
            x = layer(x)
            if isinstance(layer, nn.BatchNorm1d):
                x = torch.tanh(x)
            if type(layer) is nn.Dropout:
                x = 2 * x
        return x


class AsksName(Body):
    """Leaves out layers by the name of their class, and reads their attributes."""

    def forward(self, x):
        for layer in self.children():
            if "Norm" in type(layer).__name__:
                assert layer.num_features == 8
                x = x / layer.num_features
            x = layer(x)
            if layer.__class__.__name__ == "Dropout":
                x = x * layer.p
        return x


class FrozenNorm(Body):
    """Keeps its statistics, by type, as in fine-tuning."""

    def train(self, mode: bool = True):
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()
        return self

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class AsksConvolution(nn.Module):
    """Branches on the types of layers that engines compute in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.Dropout2d(0.3)]
        )
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = x.unflatten(1, (1, 2, 3))
        for layer in self.layers:
            x = layer(x)
            if type(layer) is nn.Conv2d:
                x = torch.sin(x)
            if isinstance(layer, nn.MaxPool2d):
                x = x + layer.kernel_size
        return self.last(x.flatten(1))


class Calls(nn.Module):
    """Calls functions instead of layers, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        x = functional.batch_norm(
            self.first(x), self.mean, self.var, None, None, self.training, 0.2
        )
        x = functional.dropout(torch.tanh(x), 0.25, self.training)
        x = functional.alpha_dropout(x, 0.1, self.training)
        return self.last(functional.dropout1d(x[:, :, None], 0.2, self.training)[..., 0])


class Attention(nn.Module):
    """Three words of four numbers; dropout inside the attention, and where the layer has more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.last = kind, nn.Linear(4, 3)
        if kind in ("encoder", "words first"):
            self.layer: nn.Module = nn.TransformerEncoderLayer(
                4, 2, 8, dropout=0.3, batch_first=kind == "encoder"
            )
        elif kind == "multihead":
            self.layer = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        else:
            self.layer = nn.Linear(4, 12)

    def forward(self, x):
        x = torch.cat([x, x.sin()], 1).unflatten(1, (3, 4))
        if self.kind == "words first":
            x = self.layer(x.transpose(0, 1)).transpose(0, 1)
        elif self.kind == "encoder":
            x = self.layer(x)
        elif self.kind == "multihead":
            x = self.layer(x, x, x)[0]
        else:
            parts = self.layer(x).chunk(3, -1)
            x = functional.scaled_dot_product_attention(*parts, dropout_p=0.3 * self.training)
        return self.last(x.mean(1))


class Noisy(nn.Module):
    """Draws in `forward`, in evaluation too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        if self.kind == "normal":
            x = x + 0.3 * torch.randn_like(x)
        elif self.kind == "uniform":
            x = x * torch.rand(x.shape, dtype=x.dtype) + torch.empty_like(x).uniform_(-1, 1)
        elif self.kind == "gumbel":
            x = functional.gumbel_softmax(x, tau=0.7)
        elif self.kind == "bernoulli":
            x = x * torch.bernoulli(torch.sigmoid(x))
        elif self.kind == "depth" and bool(torch.rand(()) < 0.5):  # stochastic depth
            x = x + torch.sin(x)
        elif self.kind == "order":
            x = x[:, torch.randperm(8)]
        elif self.kind == "poisson":
            x = x * torch.poisson(torch.full_like(x, 4.0))
        return self.last(x)


class Counts(nn.Module):
    """Counts its steps, in place or not, and has a flag; each of them decides what it returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("by_class", torch.zeros(8, dtype=torch.int32))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("table", torch.arange(2000), persistent=True)
        self.register_buffer("places", torch.arange(8), persistent=False)

    def forward(self, x):
        x = self.first(x)[:, self.places] * (1 + self.table[3])
        if self.training:
            if self.kind == "in place":
                self.seen += 1
                self.by_class[2] += 2
                self.ready.fill_(True)
            else:
                self.seen = self.seen + 1
        return self.last(x / (1 + self.seen) + self.by_class - torch.where(self.ready, 1, 0))


class Cumulative(Body):
    """Statistics that are the plain mean over batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


MODULES = {
    "asks for types": AsksType,
    "asks for names": AsksName,
    "frozen norm": FrozenNorm,
    "asks for convolutions": AsksConvolution,
    "calls functions": Calls,
    "plain mean": Cumulative,
    "tied": tied,
    "all dropped": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(1.0), nn.Linear(8, 3)),
    "one layer twice": lambda: nn.Sequential(*[nn.Linear(6, 6), nn.Dropout(0.5)] * 2, nn.Linear(6, 3)),
    "alpha": lambda: nn.Sequential(nn.Linear(6, 8), nn.AlphaDropout(0.2), nn.Linear(8, 3)),
    "feature alpha": lambda: nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.FeatureAlphaDropout(0.2), nn.Flatten(), nn.Linear(8, 3)),
    "leaky slopes": lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3)),
    **{f"attention: {kind}": lambda kind=kind: Attention(kind) for kind in ("encoder", "words first", "multihead", "function")},
    **{f"noise: {kind}": lambda kind=kind: Noisy(kind) for kind in ("normal", "uniform", "gumbel", "bernoulli", "depth", "order", "poisson")},
    **{f"counts: {kind}": lambda kind=kind: Counts(kind) for kind in ("in place", "replaced")},
}  # fmt: skip
# what an engine leaves to another one, with a part of its reason
LEFT = {
    ("vmap", "leaky slopes"): "rrelu_with_noise",
    ("vmap", "noise: depth"): "data-dependent",
    ("compiled", "noise: depth"): "depends on its data",
    ("vmap", "noise: order"): "randperm",
    ("compiled", "noise: order"): "the operation sort",
    ("vmap", "noise: poisson"): "poisson",
    ("compiled", "noise: poisson"): "poisson",
}


def case(name, dtype=torch.float64):
    """Return a module, its layout, three models and their training."""
    torch.manual_seed(7)  # noqa: TID251
    module = MODULES[name]().to(dtype)
    layout = Layout(module, dtype)
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=stream, dtype=dtype)
    y = torch.randint(0, 3, (SAMPLES,), generator=stream)
    places = torch.randint(0, SAMPLES, (3, 3, 8), generator=stream)
    local = LocalTraining(optimizer="sgd", lr=RATE)
    work = TrainingWork(RawSamples(x, y, dtype), places, LENGTHS, local, draw_keys=KEYS)
    rows = layout.own_values().repeat(3, 1)
    rows[:, : layout.trainable] += 0.1 * torch.randn(
        3, layout.trainable, generator=stream, dtype=dtype
    )
    return module, layout, rows, work


def train_plainly(layout, rows, work):
    """Train the untouched module in plain PyTorch."""
    found = []
    for client, row in enumerate(rows):
        module = layout.build_module(row, dtype=row.dtype).train()
        optimizer = torch.optim.SGD(module.parameters(), RATE)
        for step, size in enumerate(LENGTHS[client].tolist()):
            if not size:
                continue
            chosen = work.sample_indices[client, step, :size]
            optimizer.zero_grad()
            with KeyedDraws(step_keys(KEYS[client : client + 1], step)[0]):
                outputs = module(work.samples.x[chosen])
            functional.cross_entropy(outputs, work.samples.y[chosen]).backward()
            optimizer.step()
        found.append(module)
    return found


def engine_of(name, layout, work, module):
    """Return an engine and what it warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = make_engine(name, layout, cross_entropy, work.samples.x[:6], work.samples.y[:6])
    expected = LEFT.get((name, module))
    assert (engine.name != name) == (expected is not None), engine.reason
    assert expected is None or expected in engine.reason
    if module.startswith("counts: "):
        return engine
    assert bool(said) == (expected is not None)
    return engine


COMPILED_OFTEN = {
    "asks for types", "noise: normal",
}  # fmt: skip
"""Modules that `make test` compiles, which takes seconds; of the others it compiles none."""
COMPILED_SOMETIMES = {
    "tied",
    "attention: encoder",
    "counts: in place",
    "frozen norm",
    "leaky slopes",
}
"""Those that `make test-more` compiles besides."""


def engines_of(name, often=COMPILED_OFTEN):
    cases = []
    for engine in ("loop", "vmap", "compiled"):
        title = f"{engine}-{name}"
        # What the compiled engine refuses takes no time.
        if engine == "compiled" and name not in often and (engine, name) not in LEFT:
            cases.append(full(engine, name, slow=name not in COMPILED_SOMETIMES, id=title))
        else:
            cases.append(pytest.param(engine, name, id=title))
    return cases


EVERY = [one for name in MODULES for one in engines_of(name)]


@pytest.mark.parametrize(("engine", "name"), EVERY)
def test_an_engine_trains_the_module_as_plain_pytorch_does(engine, name):
    """Parameters, statistics and counts, also as they are taken home."""
    _, layout, rows, work = case(name)
    plain = train_plainly(layout, rows, work)
    engine_of(engine, layout, work, name).train(rows, work, 2)
    for row, module in zip(rows, plain, strict=True):
        torch.testing.assert_close(row, layout.flatten_module(module), rtol=0, atol=1e-10)
        home = layout.build_module(row).state_dict()
        for key, value in module.state_dict().items():
            torch.testing.assert_close(home[key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("engine", "name"), EVERY)
def test_models_are_measured_as_plain_pytorch_does(engine, name):
    """Over two calls of 32 samples and one of 26, each with the key of its first sample where the module draws."""
    _, layout, rows, work = case(name)
    engine = engine_of(engine, layout, work, name)
    assert layout.draws[False] == name.startswith("noise: ")
    keys = torch.tensor([11]) if layout.draws[False] else None
    everything, number = torch.arange(SAMPLES)[None], torch.tensor([SAMPLES])
    pairs = EvaluationPairs(
        work.samples, everything, number, torch.arange(3), torch.zeros(3, dtype=torch.int64),
        draw_keys=keys,
    )  # fmt: skip
    found = engine.measure_pairs(rows, pairs, {}, 2)["loss"]
    for row, loss in zip(rows, found, strict=True):
        module = layout.build_module(row, dtype=row.dtype)
        outputs = []
        for start in range(0, SAMPLES, 32):
            with torch.no_grad(), KeyedDraws(splitmix(torch.tensor(11) + start)):
                outputs.append(module(work.samples.x[start : start + 32]))
        expected = functional.cross_entropy(torch.cat(outputs), work.samples.y)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        one
        for name in ("asks for types", "asks for convolutions", "attention: encoder", "noise: normal", "counts: in place")
        for one in engines_of(name, ["noise: normal"])
    ],
)  # fmt: skip
def test_no_bit_depends_on_which_clients_are_hosted(engine, name):
    _, layout, rows, work = case(name, torch.float32)
    engine = engine_of(engine, layout, work, name)
    together, apart = rows.clone(), rows.clone()
    engine.train(together, work, 3)
    for client in (2, 0, 1):
        alone = slice(client, client + 1)
        engine.train(apart[alone], work.select_clients(alone), 1)
    assert torch.equal(together, apart)


@pytest.mark.parametrize(
    "name",
    first_only(
        ["asks for types", "noise: normal", "attention: encoder", "attention: words first"],
        2,
        slow=True,
    ),
)
def test_a_program_draws_for_a_large_batch_what_the_loop_engine_draws(name):
    """A batch of 150 samples takes a program several calls, whose draws go on where those before end."""
    _, layout, rows, work = case(name)
    places = torch.arange(150).remainder(SAMPLES).repeat(3, 1, 1)
    sizes = torch.full((3, 1), 150)
    work = TrainingWork(work.samples, places, sizes, work.local, draw_keys=KEYS)
    results = []
    for engine in ("loop", "compiled"):
        own = rows.clone()
        engine_of(engine, layout, work, name).train(own, work, 1)
        results.append(own)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)


def test_a_module_and_its_layers_are_copied_and_not_changed():
    module = AsksType()
    before = copy.deepcopy(module.state_dict())
    layout = Layout(module, torch.float64)
    for copied in (layout.train_module, layout.eval_module):
        assert type(copied) is AsksType
        assert [type(one) for one in copied.modules()] == [type(one) for one in module.modules()]
        assert copied.norm.num_features == 8
        assert copied.state_dict().keys() == before.keys()
    x, y = torch.randn(6, FEATURES, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    for name in ("loop", "vmap", "compiled"):
        engine = make_engine(name, layout, cross_entropy, x, y)
        for one in engine.modules:
            assert type(one) is AsksType
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_buffer_that_no_row_holds_and_forward_changes_is_said():
    class Caches(nn.Linear):
        def __init__(self):
            super().__init__(FEATURES, 3)
            self.register_buffer("calls", torch.tensor(0), persistent=False)

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    x, y = torch.randn(6, FEATURES), torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.warns(UserWarning, match="changes 'calls', which is not kept"):
        engine = make_engine("vmap", Layout(Caches()), cross_entropy, x, y)
    assert engine.name == "loop"


def test_complex_weights_are_refused_and_complex_constants_stay_complex():
    class Fourier(nn.Module):
        def __init__(self, trained: bool):
            super().__init__()
            self.last = nn.Linear(FEATURES, 3)
            turns = torch.polar(torch.ones(FEATURES), torch.arange(FEATURES) * 1.0)
            if trained:
                self.turns = nn.Parameter(turns)
            else:
                self.register_buffer("turns", turns)

        def forward(self, x):
            return self.last((x * self.turns).real + (x * self.turns).imag)

    with pytest.raises(ModelError, match="'turns' is complex"):
        Layout(Fourier(True))
    module = Fourier(False)
    layout = Layout(module)
    assert layout.size == 3 * FEATURES + 3
    x = torch.randn(4, FEATURES)
    assert torch.equal(layout.try_module(x), module(x))
