"""An exported file is read again: what it computes is what the model of the run computes."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.errors import TranslationError
from coterie.results import _exported, export
from coterie.results.export import export_model
from coterie.testing import tiny_federation

ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
FORMATS = ["safetensors", "pt", *(["onnx"] if ONNX else [])]


class Net(nn.Module):
    """Statistics, a constant that no state dict has, and outputs that dropout leaves alone."""

    offset: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)
        self.register_buffer("offset", torch.linspace(1, 2, 4), persistent=False)

    def forward(self, x):
        return self.head(self.layers(x * self.offset))


@pytest.fixture(scope="module")
def models():
    local = coterie.LocalTraining(batch_size=4, lr=0.1)
    run = coterie.simulate(
        tiny_federation(), coterie.Local(), model=Net(),
        settings=coterie.Settings(rounds=2, local=local, engine="loop"),
    )  # fmt: skip
    assert run.models is not None
    return run.models


@pytest.mark.full
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_the_model_is_kept(models, tmp_path, format):
    for samples in (None, tiny_federation().x[2, :5]):
        path = export_model(models, 2, tmp_path / "m", format=format, samples=samples, force=True)
        assert path.exists()


@pytest.mark.parametrize("format", ["safetensors", "pt"])
@pytest.mark.parametrize("name", ["head.bias", "layers.1.running_mean", "layers.0.weight"])
def test_a_file_of_another_model_is_refused_and_not_kept(
    models, tmp_path, monkeypatch, format, name
):
    save = {"safetensors": export.save_file, "pt": torch.save}[format]

    def save_wrong(tensors, *given, **more):
        wrong = {key: one.clone() for key, one in tensors.items()}
        wrong[name].view(-1)[0] += 1e-3
        save(wrong, *given, **more)

    module, function = (torch, "save") if format == "pt" else (export, "save_file")
    monkeypatch.setattr(module, function, save_wrong)
    with pytest.raises(TranslationError, match=f"tensor '{name}' is not the run's"):
        export_model(models, 2, tmp_path / "m", format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.skipif(not ONNX, reason="the extra onnx is not installed")
@pytest.mark.parametrize("drawn", [True, False])
def test_a_graph_of_another_model_is_refused_and_not_kept(models, tmp_path, monkeypatch, drawn):
    build = export._build_onnx_program
    other = next(one for one in models.clients if one != 2)
    monkeypatch.setattr(
        export, "_build_onnx_program", lambda models, _client, which: build(models, other, which)
    )
    samples = None if drawn else tiny_federation().x[2, :5]
    with pytest.raises(TranslationError, match="another model than that of client 2, outputs"):
        export_model(models, 2, tmp_path / "m.onnx", samples=samples)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.skipif(not ONNX, reason="the extra onnx is not installed")
def test_the_reference_of_onnx_serves_without_its_runtime(models, tmp_path, monkeypatch):
    path = export_model(models, 1, tmp_path / "m.onnx")
    x = torch.randn(4, 4)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    found = _exported._run_onnx(path, (x,), {})
    assert np.allclose(found, models.predict(1, x).numpy(), atol=1e-5)


def test_a_model_that_diverged_is_written_all_the_same(tmp_path):
    local = coterie.LocalTraining(batch_size=4, optimizer="sgd", lr=1e38, epochs=4)
    run = coterie.simulate(
        tiny_federation(), coterie.Local(), model="linear",
        settings=coterie.Settings(rounds=2, local=local, evaluate="final", engine="loop"),
    )  # fmt: skip
    assert run.models is not None
    with pytest.warns(UserWarning, match="diverged"):
        assert export_model(run.models, 0, tmp_path / "m.pt").exists()
