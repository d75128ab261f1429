"""What a module may return, and that one entry of it is trained, scored, predicted and exported alike."""

import collections
import dataclasses
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tests.selection import first_only
from torch import nn

import coterie
from coterie.errors import ConfigError, ModelError
from coterie.models.layout import NamedModel
from coterie.results.export import export_model
from coterie.runtime.models import load_models
from coterie.studies.config import format_study, hash_study, parse_study_text

ENGINES = ("loop", "vmap", "compiled")
Pair = collections.namedtuple("Pair", "scores hidden")


@dataclasses.dataclass
class Found:
    """As models of `transformers` return it."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Net(nn.Module):
    """A linear model whose output is packed."""

    def __init__(self, pack):
        super().__init__()
        self.inner, self.outer, self.pack = nn.Linear(4, 6), nn.Linear(6, 3), pack

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        return self.pack(self.outer(hidden), hidden, self.training)


PACKED = {
    "a tensor": (lambda y, h, _: y, None),
    "an object with logits": (lambda y, h, _: Found(y, h), None),
    "a dict with logits": (lambda y, h, _: {"hidden": h, "logits": y}, None),
    "a tuple of one": (lambda y, h, _: (y,), None),
    "a dict with one tensor": (lambda y, h, _: {"y": y, "loss": None}, None),
    "a named dict entry": (lambda y, h, _: {"hidden": h, "y": y}, "y"),
    "a place in a tuple": (lambda y, h, _: (h, y), 1),
    "a place in a list": (lambda y, h, _: [h, y], "1"),
    "a name of a named tuple": (lambda y, h, _: Pair(y, h), "scores"),
    "a place in a named tuple": (lambda y, h, _: Pair(y, h), 0),
    "an attribute": (lambda y, h, _: Found(h, y), "hidden"),
    "a tuple in training alone": (lambda y, h, training: (y, h) if training else y, "0"),
    "an object in training alone": (lambda y, h, training: Found(y, h) if training else y, None),
}


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(90, 4)).astype("float32"), random.integers(0, 3, 90)
    return coterie.from_arrays(x, y, clients=np.arange(90) % 3)


def train(data, net, engine="loop", folder=None, **given):
    local = coterie.LocalTraining(epochs=1, batch_size=8, lr=0.05)
    settings = coterie.Settings(rounds=1, engine=engine, local=local, evaluate="final", **given)
    return coterie.simulate(data, coterie.FedAvg(), model=net, settings=settings, folder=folder)


def weights_of(pack):
    """A net of always the same weights."""
    net = Net(pack)
    with torch.no_grad():
        for number, tensor in enumerate(net.parameters()):
            tensor.copy_(torch.linspace(-0.5, 0.4 + number / 10, tensor.numel()).view_as(tensor))
    return net


@pytest.mark.full
@pytest.mark.parametrize("engine", first_only(["compiled", "loop", "vmap"], slow=True))
def test_an_entry_is_trained_scored_and_predicted_as_the_tensor_itself(data, engine, subtests):
    plain = train(data, weights_of(PACKED["a tensor"][0]), engine)
    for what, (pack, output) in PACKED.items():
        with subtests.test(what=what):
            run = train(data, weights_of(pack), engine, output=output)
            assert torch.equal(run.params, plain.params)
            assert run.metrics["value"].equals(plain.metrics["value"])
            x = torch.randn(5, 4)
            assert torch.equal(run.predict(0, x), plain.predict(0, x))
            assert torch.equal(
                run.predict(0, x, "probabilities"), plain.predict(0, x, "probabilities")
            )


def detached(y, h, _):
    return y.argmax(1)


@pytest.mark.parametrize(
    ("pack", "output", "error", "text"),
    [
        (lambda y, h, _: None, None, ModelError, "forward returned None; expected its output, a tensor: is a `return`"),
        (lambda y, h, _: 3, None, ModelError, "returned a int without a tensor in it; expected its output"),
        (lambda y, h, _: (), None, ModelError, "returned a tuple without a tensor in it; expected its output"),
        (lambda y, h, _: (y, h), None, ModelError,
         r"a tuple with the tensors '0' \(8, 3\), '1' \(8, 6\); name the one that is its output: output = \"0\""),
        (lambda y, h, _: {"a": y, "b": h}, None, ModelError,
         r"a dict with the tensors 'a' \(8, 3\), 'b' \(8, 6\); name the one"),
        (lambda y, h, _: {"a": y, "b": h}, "c", ModelError, "output is 'c'; .* name one of them"),
        (lambda y, h, _: (y, h), 2, ModelError, "output is '2'; .* name one of them"),
        (lambda y, h, _: y, "a", ConfigError, "output is 'a', which names an entry .* returns a tensor, so leave"),
        (detached, None, ModelError, "a tensor of torch.int64 .* expected floating-point"),
        (lambda y, h, _: y.mean(), None, ModelError, r"and shape \(\); expected .* a row a sample"),
    ],
)  # fmt: skip
def test_anything_else_is_one_line_that_says_what_came(data, pack, output, error, text):
    with pytest.raises(error, match=text) as said:
        train(data, Net(pack), output=output)
    assert "\n" not in str(said.value)


class Embedded(nn.Module):
    """Takes whole numbers alone, and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.table, self.outer = nn.Embedding(10, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.table(x).mean(1)
        return hidden, self.outer(hidden)


def test_a_module_of_whole_numbers_that_returns_a_tuple_is_told_to_name_its_output():
    """Not that it cannot take floating-point numbers, which is tried next for modules that refuse whole ones."""
    ids = torch.randint(0, 10, (60, 5))
    data = coterie.from_arrays(ids, torch.arange(60) % 3, clients=[i % 3 for i in range(60)])
    with pytest.raises(ModelError, match="name the one that is its output"):
        train(data, Embedded)
    assert train(data, Embedded, output=1).predict(0, ids[:2]).shape == (2, 3)


STUDY = """
rounds = 1
seeds = [0]
data = { dataset = "digits", num_clients = 3, train = 20 }
[model]
kind = "MODULE:packed"
output = OUTPUT
[[methods]]
kind = "random"
num_peers = 1
"""


class Packed(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(features)), outputs))

    def forward(self, x):
        y = self.net(x)
        return y.mean(1), y


def packed(features, outputs):
    return Packed(features, outputs)


def test_a_study_file_names_the_output_with_its_model(tmp_path):
    """As a number or a text; it is stored, is part of what a run is, and predicts from the folder alone."""
    texts = [
        STUDY.replace("MODULE", __name__).replace("OUTPUT", one) for one in ("1", '"1"', '"0"')
    ]
    number, text, other = (parse_study_text(one) for one in texts)
    assert number == text == parse_study_text(format_study(number))
    assert hash_study(number) != hash_study(other)
    assert number.model.named_model == NamedModel(f"{__name__}:packed", {}, "1")
    assert str(number.model.named_model) == f"{__name__}:packed output=1"
    data = coterie.build_federation(number.data, 0)
    folder = tmp_path / "run"
    run = train(data, number.model.named_model, folder=folder)
    x = data.x[0, :4]
    there = load_models(folder)
    assert there.predict(0, x).shape == (4, 10)
    assert torch.equal(there.predict(0, x), run.predict(0, x))


def test_two_names_for_the_output_contradict_each_other(data):
    model = NamedModel(f"{__name__}:packed", {}, "1")
    assert train(data, model, output=1).params.isfinite().all()
    with pytest.raises(ConfigError, match="output is '0' in the settings and '1' in the model"):
        train(data, model, output=0)


@pytest.mark.full
@pytest.mark.skipif(find_spec("onnxscript") is None, reason="the extra onnx is not installed")
@pytest.mark.parametrize(
    "what", ["an object with logits", "a place in a tuple", "a named dict entry"]
)
def test_onnx_has_the_output_alone(data, tmp_path, what):
    onnxruntime = pytest.importorskip("onnxruntime")
    pack, output = PACKED[what]
    run = train(data, Net(pack), output=output)
    assert run.models is not None
    file = export_model(run.models, 1, tmp_path / "m.onnx", format="onnx")
    session = onnxruntime.InferenceSession(str(file))
    assert [one.name for one in session.get_outputs()] == ["output"]
    x = torch.randn(7, 4)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert np.allclose(found, run.predict(1, x).numpy(), atol=1e-6)
