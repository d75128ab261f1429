"""Modules that do what few do are trained as plain PyTorch trains them, or refused in one line."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.errors import ModelError, TranslationError
from coterie.rng import Rng

TOKENS = torch.randint(20, (40, 5), generator=torch.Generator().manual_seed(0))
LABELS = (TOKENS[:, 0] > 9).long()
DATA = coterie.from_arrays(TOKENS, LABELS, clients=["north", "south"] * 20)
NUMBERS = coterie.from_arrays(TOKENS[:, :4].float(), LABELS, clients=["north", "south"] * 20)


class Embedded(nn.Module):
    """An embedding with options, and a linear layer on its mean."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(20, 4, **options)
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(self.embedding(x).mean(1))


class Cells(nn.Module):
    """An LSTM cell whose first state is made in forward, in float32."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(20, 4), nn.LSTMCell(4, 3)
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        state = torch.zeros(len(x), 3), torch.zeros(len(x), 3)
        for place in range(x.shape[1]):
            state = self.cell(self.embedding(x[:, place]), state)
        return self.linear(state[0])


def train_plainly(module, x, y, steps, lr):
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module


@pytest.mark.full
@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
@pytest.mark.parametrize(
    "make",
    [lambda: Embedded(max_norm=0.5), lambda: Embedded(sparse=True), Cells],
    ids=["max_norm", "sparse", "own-state"],
)
@pytest.mark.filterwarnings("ignore:the .* engine is used", "ignore:.*performance drop")
def test_it_is_trained_as_in_plain_pytorch(make, engine):
    with Rng(0).temporary_torch_seed("test"):
        module = make()
    given = copy.deepcopy(module.state_dict())
    local = coterie.LocalTraining(optimizer="sgd", lr=0.5, steps=2, batch_size=100)
    settings = coterie.Settings(rounds=1, engine=engine, local=local, evaluate="final")
    run = coterie.simulate(DATA, coterie.Local(), model=module, settings=settings)
    assert all(torch.equal(given[name], one) for name, one in module.state_dict().items())
    count = int(DATA.count_samples("train")[1])
    # Before the first round, and in it.
    expected = train_plainly(module, DATA.x[1, :count], DATA.y[1, :count], 4, 0.5)
    found = run.model("south").state_dict()
    for name, one in expected.state_dict().items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6)


def start(module, data=NUMBERS):
    settings = coterie.Settings(rounds=1, local=coterie.LocalTraining(steps=1))
    return coterie.simulate(data, coterie.Local(), model=module, settings=settings)


class Remembers(nn.Module):
    """A linear layer that does something with `times`, the number of passes so far."""

    def __init__(self):
        super().__init__()
        self.linear, self.times, self.last = nn.Linear(4, 2), 0, torch.zeros(4)

    def forward(self, x):
        self.times += 1
        return self.use(self.linear(self.see(x)))

    def see(self, x):
        return x

    def use(self, outputs):
        return outputs


class WarmsUp(Remembers):
    def use(self, outputs):
        return outputs * min(1.0, 0.4 + 0.3 * self.times)  # the same from the second pass on


class Follows(Remembers):
    def see(self, x):
        self.last = (0.9 * self.last + 0.1 * x.mean(0)).detach()
        return x - self.last


class DrawsElsewhere(Remembers):
    def use(self, outputs):
        return outputs + float(np.random.default_rng().normal())


class Narrows(Remembers):
    """Its outputs are so large that a limit relative to them is no small number."""

    def use(self, outputs):
        return 1e9 * outputs[:, : 1 + self.times % 2]


@pytest.mark.parametrize(
    ("kind", "named"),
    [(WarmsUp, r" \(times\)"), (Follows, ""), (DrawsElsewhere, ""), (Narrows, r" \(times\)")],
)
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_a_module_that_remembers_its_last_pass_outside_of_its_tensors_is_refused(
    kind, named, engine
):
    with pytest.raises(ModelError, match=rf"remembers .* parameters and buffers{named}"):
        start(kind())


def test_an_attribute_that_changes_no_output_is_a_line(tmp_path):
    settings = coterie.Settings(rounds=1, local=coterie.LocalTraining(steps=1))
    coterie.simulate(
        NUMBERS, coterie.Local(), model=Remembers(), settings=settings, folder=tmp_path
    )
    told = (tmp_path / "provenance.json").read_text("utf-8")
    assert "forward changes attributes of the module that are no buffers (times)" in told


def hooked(module, how):
    getattr(module.weight, how)(lambda given: None)
    return module


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_which_no_copy_keeps_is_refused(how):
    assert not copy.deepcopy(hooked(nn.Linear(4, 2), how)).weight._backward_hooks
    for model in (hooked(nn.Linear(4, 2), how), lambda: hooked(nn.Linear(4, 2), how)):
        with pytest.raises(ModelError, match="hook on the gradient of 'weight'"):
            start(model)


class TwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.linear = nn.Linear(4, 3).double(), nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(self.wide(x.double()).float())


def test_weights_of_several_types_that_forward_converts_by_hand_are_named():
    with pytest.raises(ModelError, match=r"'wide.weight' is float64, 'linear.weight' is float32"):
        start(TwoTypes())


class Holds(nn.Module):
    """A linear layer, and something else."""

    def __init__(self, other):
        super().__init__()
        self.linear, self.other = nn.Linear(4, 2), other

    def forward(self, x):
        return self.linear(x)


def test_a_module_that_cannot_be_copied_is_one_line():
    for model in (Holds(threading.Lock()), lambda: Holds(threading.Lock())):
        with pytest.raises(ModelError, match=r"cannot be copied \(cannot pickle .*lock"):
            start(model)


class TrainsTheHead(Holds):
    def parameters(self, recurse=True):
        return self.linear.parameters()


def test_a_module_whose_parameters_are_others_than_the_named_ones_is_refused():
    with pytest.raises(ModelError, match=r"other parameters\(\) than named_parameters\(\)"):
        start(TrainsTheHead(nn.Linear(2, 2)))


@pytest.mark.parametrize("keep", [lambda one: [one], lambda one: (one,), lambda one: {"a": one}])
def test_a_layer_that_pytorch_does_not_see_is_said(keep):
    with pytest.warns(UserWarning, match="a Linear in 'other', .* neither trains nor stores it"):
        start(Holds(keep(nn.Linear(4, 2))))
    start(Holds(keep(nn.Linear(4, 2).requires_grad_(False))))
    start(Holds(nn.ModuleList([nn.Linear(4, 2)])))


def test_weights_without_values_are_one_line():
    with torch.device("meta"):
        empty = nn.Linear(4, 2)
    with pytest.raises(ModelError, match="no values for 'weight', which is on the device 'meta'"):
        start(empty)
    broken = nn.Linear(4, 2)
    with torch.no_grad():
        broken.weight[0, 0] = torch.nan
    with pytest.raises(TranslationError, match="'weight' of the module has NaN or infinity before"):
        start(broken)
