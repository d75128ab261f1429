"""Given weights stay, a factory is called under a stream, and modules that cannot be trained are refused."""

import copy
import warnings

import numpy as np
import pytest
import torch
from tests.selection import first_only
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import coterie
from coterie.errors import CheckpointError, ConfigError, ModelError
from coterie.methods import METHODS
from coterie.models.given import list_kept_tensors
from coterie.testing import tiny_federation

ENGINES = ("loop", "vmap", "compiled")
STILL = coterie.LocalTraining(epochs=1, batch_size=4, lr=0.0)


def start(model, method=None, data=None, seed=0, **given):
    """A run that trains nothing: its models are the first ones."""
    given = {"rounds": 0, "warmup_epochs": 0, "local": STILL, "evaluate": "final", **given}
    return coterie.simulate(
        data or tiny_federation(),
        method or coterie.Local(),
        model=model,
        settings=coterie.Settings(**given),
        seed=seed,
    )


def filled(module, seed=0):
    """The module with weights that no initialization draws."""
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.from_numpy(random.uniform(2, 3, tensor.shape)))
    return module


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, whose second factor is zero: it starts as the frozen layer."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class Attentive(nn.Module):
    """Attention, whose layer draws by another name, and a parameter that no layer draws."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.full((4,), 2.5))

    def forward(self, x):
        x = x[:, None] * self.scale
        return self.head(self.attention(x, x, x)[0][:, 0])


MODULES = {
    "linear": lambda: nn.Linear(4, 3),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    "attention": Attentive,
    "adapter": Adapted,
    "embedded in another": lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 3)), nn.LayerNorm(3)),
}


@pytest.mark.option("Settings.init", "shared", "given")
@pytest.mark.parametrize("init", ["shared", "given"])
@pytest.mark.parametrize("what", MODULES)
def test_all_clients_start_from_the_weights_of_a_module(what, init):
    """Whatever the seed and whichever engine; the module itself is left alone."""
    module = filled(MODULES[what]())
    before = copy.deepcopy(module.state_dict())
    for engine, seed in (("loop", 0), ("vmap", 0), ("loop", 5)):
        run = start(module, init=init, engine=engine, seed=seed)
        for client in (0, 5):
            for name, tensor in run.model(client).state_dict().items():
                assert torch.equal(tensor, before[name]), name
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


ONE_MODEL = sorted({"fedavg", "fedprox", "fedper", "ditto", "apfl", "pfedme", "scaffold", "cfl", "fedgwc", "dac",
                    "random", "local", "panm", "pens", "pooled"} & set(METHODS))  # fmt: skip


@pytest.mark.parametrize("kind", ONE_MODEL)
def test_every_method_of_one_model_starts_from_given_weights(kind):
    run = start(filled(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))), METHODS[kind]())
    assert run.params.min() >= 2


def test_an_adapter_starts_at_zero():
    run = start(Adapted())
    assert not run.model(0).lora_B.weight.any()


def test_a_trained_module_scores_before_the_first_round_what_it_scores_itself():
    x = torch.randn(300, 6)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    y = net(x).argmax(1)
    # All three: where an output is never the largest, the labels that occur are not its numbers.
    data = coterie.from_arrays(x, y, clients=[i % 3 for i in range(300)], classes=3)
    run = start(net, coterie.FedAvg(), data)
    final = run.metrics.query("split == 'test' and metric == 'accuracy'")["value"]
    assert (final == 1).all()


class Narrow(nn.Linear):
    """An initialization of its own: standard deviation 0.02, as in GPT-2."""

    def __init__(self):
        super().__init__(60, 40)
        nn.init.normal_(self.weight, std=0.02)


def renumbered(labels=(0, 2), **given):
    """Data of two clients whose labels are not the numbers from 0."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 4))).float()
    y = [labels[i // 2 % len(labels)] for i in range(40)]
    return coterie.from_arrays(x, y, clients=[i % 2 for i in range(40)], **given)


def test_given_outputs_of_labels_as_they_are_are_not_trained_as_other_classes():
    """Labels 0 and 2 are the classes 0 and 1, and output 2 of the module says that it is label 2."""
    module = nn.Linear(4, 3)
    words = r"3 outputs, and the labels 0, 2 are the classes 0 to 1 .*output 1 is that of label 2"
    with pytest.raises(ModelError, match=words):
        start(module, data=renumbered())
    with pytest.warns(UserWarning, match="'redrawn'"), pytest.warns(UserWarning, match=words):
        start(module, data=renumbered(), init="redrawn")
    with pytest.raises(ModelError, match=r"give classes = 3, which keeps labels as they are, or"):
        start(lambda: module, data=renumbered(), init="given")
    with pytest.warns(UserWarning, match=r"classes = 3"):
        start(lambda: nn.Linear(4, 3), data=renumbered())
    # Label 10 is not the number of an output: no output can mean it.
    with pytest.warns(UserWarning, match=r"labels 5, 10 are .*; give a module of 2 outputs"):
        start(module, data=renumbered((5, 10)))


@pytest.mark.parametrize("init", ["shared", "redrawn"])
@pytest.mark.parametrize(
    ("labels", "given", "outputs"),
    [((0, 2), {"classes": 3}, 3), ((0, 2), {}, 2), ((0, 1), {}, 3), (("a", "c"), {}, 3)],
)
def test_outputs_that_can_mean_their_classes_alone_are_nothing_to_say(labels, given, outputs, init):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*init = 'redrawn'")
        run = start(nn.Linear(4, outputs), data=renumbered(labels, **given), init=init)
    assert run.params.isfinite().all()


def in_days(outputs, targets):
    return (outputs.reshape(-1) - targets.to(outputs.dtype)).square()


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "poisson", {"kind": "quantile"}])
def test_a_loss_of_numbers_does_not_get_the_numbers_of_classes(loss):
    """Days of 30, 60 and 90 are the classes 0, 1 and 2: an error of 0.3 would be of no day."""
    days = (30, 60, 90)
    said = r"numbers of classes, from 0 to 2, and not the labels 30, 60, 90: it has 0 for 30; for"
    with pytest.raises(ConfigError, match=said + r" a regression make the data with classes = 0"):
        start(nn.Linear(4, 1 if isinstance(loss, str) else 3), data=renumbered(days), loss=loss)


def test_a_regression_of_whole_numbers_is_in_their_unit():
    """A model that says 0 is off by 30, 60 or 90 days, and by 60 on average."""
    zero = nn.Linear(4, 1)
    for one in zero.parameters():
        nn.init.zeros_(one)
    data = renumbered((30, 60, 90), classes=0)
    truth = [float(test.y.mean()) for test in data.tests]
    run = start(zero, data=data, loss="mae", local=coterie.LocalTraining(lr=1e-12))
    found = run.metrics.query("split == 'test' and metric == 'loss'")["value"].tolist()
    assert found[-2:] == pytest.approx(truth)
    # Labels that are the numbers of their classes mean the same as either.
    start(nn.Linear(4, 1), data=renumbered((0, 1, 2)), loss="mse")


def test_a_loss_of_ones_own_with_one_output_is_told_of_labels_it_does_not_get():
    def run_on(labels, outputs):
        start(nn.Linear(4, outputs), data=renumbered(labels), loss=loss)

    loss = f"{__name__}:in_days"
    with pytest.warns(UserWarning, match=r"in_days' takes the numbers of .* labels 30, 60, 90"):
        run_on((30, 60, 90), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_on((1, 2), 1)  # a yes or no with one logit
        loss = f"{__name__}:of_classes"
        run_on((30, 60, 90), 3)


def of_classes(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_an_initialization_of_ones_own_holds_for_a_module_and_for_a_class():
    """For a class too under each client's stream, where models differ."""
    x, y = torch.randn(60, 60), torch.arange(60) % 40
    data = coterie.from_arrays(x, y, clients=[i % 2 for i in range(60)], classes=40)
    for model, init in ((Narrow(), "shared"), (Narrow, "shared"), (Narrow, "per_client")):
        run = start(model, data=data, init=init)
        first, second = (run.model(client).weight.detach() for client in range(2))
        for weight in (first, second):
            # 2,400 draws: the standard error of their deviation is 0.0003
            assert abs(float(weight.std()) - 0.02) < 0.0015
        assert torch.equal(first, second) == (init == "shared")


def test_a_factory_is_called_under_the_runs_or_the_clients_stream():
    """What it draws, it draws from there: equal for equal seeds, another for others, in any order of calls."""
    calls = []

    def make():
        calls.append(torch.rand(()).item())
        return nn.Linear(4, 3)

    one, again, other = (start(make, seed=seed).params for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.isclose(one, other).any()
    own = start(make, seed=1, init="per_client").params
    assert len(own.unique(dim=0)) == len(own)
    given = [start(make, seed=seed, init="given").params for seed in (1, 2)]
    assert torch.equal(*given)


def test_a_function_that_returns_one_module_gives_its_weights():
    module = filled(nn.Linear(4, 3))
    assert torch.equal(start(lambda: module).params, start(module).params)


# ---------------------------------------------------------------- fresh weights are asked for


@pytest.mark.option("Settings.init", "redrawn")
def test_weights_of_a_module_are_drawn_anew_when_asked_and_it_is_said():
    """By each layer's own law, attention's too; what no layer draws stays, and is named."""
    module = filled(Attentive())
    with pytest.warns(
        UserWarning, match=r"are not used; .* reset_parameters; as given stay scale, whose"
    ):
        run = start(module, init="redrawn")
    for name, tensor in run.model(0).named_parameters():
        kept = torch.equal(tensor, module.get_parameter(name))
        assert kept == (name == "scale"), name
        assert name == "scale" or tensor.abs().max() < 1
    assert list_kept_tensors(module) == ["scale"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, other = (start(module, init="redrawn", seed=seed).params for seed in (0, 1))
    assert torch.equal(run.params, again)
    assert not torch.equal(run.params, other)


def test_a_frozen_normalization_keeps_its_statistics_where_the_rest_is_drawn_anew():
    """Those of a pretrained body are a part of it; a normalization that is trained starts again."""
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.BatchNorm1d(3))
    for norm in (module[1], module[3]):
        norm.running_mean.fill_(2.0)
        norm.running_var.fill_(3.0)
    module[:2].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"are not used; .* frozen weights stay as given"):
        run = start(module, init="redrawn")
    got = run.model(0)
    for name in ("0.weight", "1.weight", "1.running_mean", "1.running_var"):
        assert torch.equal(got.state_dict()[name], module.state_dict()[name]), name
    assert torch.equal(got[3].running_mean, torch.zeros(3))
    assert torch.equal(got[3].running_var, torch.ones(3))
    assert not torch.equal(got[2].weight, module[2].weight)


def test_settings_that_contradict_the_model_are_refused():
    with pytest.raises(
        ConfigError, match="init is 'per_client', and the model is a module, which has one set"
    ):
        start(nn.Linear(4, 3), init="per_client")
    with pytest.raises(
        ConfigError, match=r"init is 'redrawn', .* made by a function, which draws its own"
    ):
        start(lambda: nn.Linear(4, 3), init="redrawn")
    with pytest.raises(ConfigError, match="init is 'redrawn'"):
        start("linear", init="redrawn")


# ---------------------------------------------------------------- several first models


SEVERAL = {"ifca": {"clusters": 3}, "fesem": {"clusters": 2}}


@pytest.mark.parametrize("kind", SEVERAL)
def test_methods_that_need_different_models_refuse_one_set_of_weights(kind):
    """Equal clusters would stay equal: a module, and a function that draws nothing. A class draws different ones."""
    method, module = METHODS[kind](**SEVERAL[kind]), filled(nn.Linear(4, 3))
    text = f"starts from {method.clusters} different models, .* give the class .* in each call"
    # A function is refused with init = 'redrawn', so that is no advice for it.
    for model, end in (
        (module, ", or set init = 'redrawn'"),
        (lambda: filled(nn.Linear(4, 3)), "$"),
    ):
        with pytest.raises(ModelError, match=text + end):
            start(model, method)
    assert start(lambda: nn.Linear(4, 3), method).params.isfinite().all()
    with pytest.warns(UserWarning, match="drawn|draw new ones"):
        assert start(module, method, init="redrawn").params.abs().max() < 2


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sosicfl", "sosicfl-all", "sosicfl-plus"])
def test_a_simplex_of_a_given_module_starts_at_its_weights_and_spreads(kind):
    """All endpoints are the given weights, so each served mixture is the given model; training parts them."""
    if kind not in METHODS:
        pytest.skip(f"no method {kind}")
    module = filled(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    method = METHODS[kind](endpoints=3, regions=2)
    first = start(module, method)
    for client in (0, 3):
        for name, tensor in first.model(client).state_dict().items():
            assert torch.allclose(tensor, module.state_dict()[name], atol=1e-6), name
    local = coterie.LocalTraining(epochs=2, batch_size=4, lr=0.1)
    trained = start(module, method, rounds=2, local=local)
    heads = torch.stack([trained.model(client)[2].weight for client in range(6)])
    assert len(heads.flatten(1).unique(dim=0)) > 1


# ---------------------------------------------------------------- resume


def test_a_run_is_not_resumed_with_other_weights(tmp_path):
    """The same module goes on to the same model; another one is another run."""
    data, module = tiny_federation(), filled(nn.Linear(4, 3))
    local = coterie.LocalTraining(epochs=1, batch_size=4)

    def run(rounds, model, resume=False):
        settings = coterie.Settings(rounds=rounds, local=local, evaluate="final")
        folder = tmp_path / "run" if resume or rounds == 1 else None
        return coterie.simulate(
            data,
            coterie.Dac(num_peers=2),
            model=model,
            settings=settings,
            folder=folder,
            resume=resume,
        )

    run(1, module)
    with pytest.raises(CheckpointError):
        run(3, filled(nn.Linear(4, 3), seed=1), resume=True)
    assert torch.equal(run(3, copy.deepcopy(module), resume=True).params, run(3, module).params)


def test_newcomers_start_from_given_weights_too():
    run = start(filled(nn.Linear(4, 3)), new_clients=[4], new_client_rounds=0)
    assert run.params.min() >= 2


# ---------------------------------------------------------------- lazy layers


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def sized():
    """The same with sizes."""
    net = Lazy()
    net.first, net.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
    return net


LAZY = {
    "a module": Lazy,
    "lazy convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.LazyConv2d(3, 2), nn.Flatten(), nn.LazyLinear(3)
    ),
    "an embedding before": lambda: nn.Sequential(
        nn.Embedding(9, 3), nn.Flatten(), nn.LazyLinear(3)
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("engine", first_only(ENGINES, slow=True))
@pytest.mark.parametrize("what", LAZY)
def test_lazy_layers_are_materialized(what, engine, tmp_path):
    """As a class and as a module: trained, and taken home from the folder in the shapes of the data."""
    x = torch.randint(0, 9, (60, 4)) if "embedding" in what else torch.randn(60, 4)
    data = coterie.from_arrays(x, torch.arange(60) % 3, clients=[i % 3 for i in range(60)])
    settings = coterie.Settings(rounds=1, engine=engine, local=coterie.LocalTraining(batch_size=5))
    for number, model in enumerate((LAZY[what], LAZY[what]())):
        folder = tmp_path / str(number)
        run = coterie.simulate(
            data, coterie.FedAvg(), model=model, settings=settings, folder=folder
        )
        home = coterie.load_models(folder, model=model)
        assert torch.equal(home.predict(0, x[:4]), run.predict(0, x[:4]))
        assert run.predict(0, x[:4]).isfinite().all()
    assert "Uninitialized" in str(type(next(LAZY["a module"]().parameters())))


def test_a_lazy_layer_draws_what_a_sized_one_draws_and_given_weights_stay():
    lazy = Lazy()
    with torch.no_grad():
        lazy.last.weight.fill_(2.5)
    first, second = (start(lazy, seed=seed).model(0) for seed in (0, 1))
    for run in (first, second):
        assert (run.last.weight == 2.5).all()
        assert run.first.weight.shape == (6, 4)
        assert 0 < run.first.weight.abs().max() <= 0.5  # uniform within 1 / sqrt(4)
    assert not torch.equal(first.first.weight, second.first.weight)


def test_a_lazy_layer_that_a_forward_pass_does_not_reach_is_one_line():
    net = nn.Linear(4, 3)
    net.aside = nn.LazyLinear(2)
    with pytest.raises(
        ModelError, match=r"the lazy layers of the module, such as 'aside.weight', got no shape"
    ):
        start(net)
    with pytest.raises(ModelError, match="got no shape"):
        start(lambda: nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(3)))


# ---------------------------------------------------------------- what cannot be trained


def traced():
    return torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4))


def pruned():
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    prune.l1_unstructured(net[0], "weight", 0.5)
    return net


def used_spectral():
    net = spectral_norm(nn.Linear(4, 3))
    net(torch.zeros(2, 4))
    return net


def old_weight_norm():
    return nn.Sequential(nn.Linear(4, 5), weight_norm(nn.Linear(5, 3)))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*torch.jit.*")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: torch.jit.script(nn.Linear(4, 3)),
            "is TorchScript, .* give the module that was scripted or traced",
        ),
        (traced, "is TorchScript"),
        (lambda: nn.Sequential(nn.Linear(4, 4), traced()), "has a layer, '1', that is TorchScript"),
        (
            lambda: torch.compile(nn.Linear(4, 3)),
            "was compiled by torch.compile; give the module that was compiled",
        ),
        (
            old_weight_norm,
            r"has a layer, '1', that computes its 'weight' .*parametrizations.weight_norm",
        ),
        (
            pruned,
            r"has a layer, '0', that computes its 'weight' from other tensors .* prune.remove",
        ),
        (used_spectral, r"computes its 'weight' from other tensors in a hook"),
    ],
)
def test_modules_that_cannot_be_trained_are_one_line(make, text):
    for model in (make(), make):
        with pytest.raises(ModelError, match=text) as said:
            start(model)
        assert "\n" not in str(said.value)


def test_parametrized_weight_norm_is_trained():
    run = start(lambda: parametrizations.weight_norm(nn.Linear(4, 3)), rounds=1)
    assert run.params.isfinite().all()


class Sequence(nn.Module):
    """A recurrent layer, whose weights PyTorch lists a second time."""

    def __init__(self, normalized=True):
        super().__init__()
        self.layer, self.head = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 3)
        if normalized:
            parametrizations.weight_norm(self.layer, "weight_hh_l0")

    def forward(self, x):
        return self.head(self.layer(x[:, :, None])[0][:, -1])


def test_a_recurrent_layer_with_computed_weights_is_trained_as_pytorch_does():
    data, module = tiny_federation(), Sequence()
    module(torch.zeros(2, 4)).sum().backward()  # its list has what autograd computed
    module.zero_grad()
    local = coterie.LocalTraining(steps=3, batch_size=100, optimizer="sgd", lr=0.5)
    given = {"rounds": 1, "local": local, "dtype": "float64", "engine": "loop"}
    run = start(module, data=data, **given)
    plain = Sequence().double()
    plain.load_state_dict(module.state_dict())
    own = data.split[0] == 0
    x, y = data.x[0, own].double(), data.y[0, own]
    for _ in range(3):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        with torch.no_grad():
            for one in plain.parameters():
                one -= 0.5 * one.grad
    found = run.model(0)
    for name, value in plain.state_dict().items():
        assert torch.allclose(found.state_dict()[name].double(), value, atol=1e-6), name


@pytest.mark.parametrize(
    "make",
    [Sequence, lambda: Sequence(False), lambda: parametrizations.weight_norm(nn.Linear(4, 3))],
    ids=["computed weights", "recurrent", "weight norm"],
)
def test_a_simplex_of_all_layers_is_taken_home_as_it_was_trained(make):
    """Endpoints of tensors that are parametrized themselves; the check at the end compares scores."""
    method = METHODS["sosicfl-all"](endpoints=3, regions=2)
    local = coterie.LocalTraining(epochs=2, batch_size=4, optimizer="sgd", lr=0.3)
    run = start(make, method, rounds=2, local=local, engine="loop")
    x, y = tiny_federation().tests[0].x, tiny_federation().tests[0].y
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(run.model(0)(x.float()), y))
    table = run.metrics[(run.metrics["split"] == "test") & (run.metrics["client"] == 0)]
    assert loss == pytest.approx(table[table["metric"] == "loss"]["value"].iloc[-1], abs=1e-5)


@pytest.mark.parametrize("made", [None, 3, "linear", [nn.Linear(4, 3)]])
def test_a_factory_that_returns_no_module_is_one_line(made):
    with pytest.raises(
        ModelError, match=r"the model factory returned .*; expected a torch\.nn\.Module"
    ):
        start(lambda: made)
