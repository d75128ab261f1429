"""Code of the user behind an import path: a stored run of other code is no run of this study."""

import importlib
import json
import sys

import pytest

from coterie._util import importing
from coterie.errors import CheckpointError
from coterie.studies import config
from coterie.studies.run import run_study

MODEL = """
from torch import nn

def make_net(features, outputs):
    # {comment}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.{activation}(), nn.Linear(8, outputs))
"""
STUDY = """
name = "own"
rounds = 1
seeds = {seeds}
engine = "loop"
check = false
model = {{ kind = "own_net_of_a_test:make_net" }}
data = {{ dataset = "digits", num_clients = 2, train = 20, validation = 5 }}
local = {{ epochs = 1, lr = 0.1 }}

[[methods]]
kind = "fedavg"
"""


def test_a_run_goes_on_with_the_code_that_it_was_made_with(tmp_path, monkeypatch):
    """Seeds of two models would be averaged; a comment changes nothing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importing, "_imported_code", {})
    file = tmp_path / "own_net_of_a_test.py"

    def run(seeds: list[int], **code: str) -> int:
        file.write_text(MODEL.format(**code))
        # As in another process.
        importing._imported_code.clear()
        sys.modules.pop(file.stem, None)
        importlib.invalidate_caches()
        study = config.parse_study_text(STUDY.format(seeds=seeds))
        run_study(study, out=tmp_path / "runs")
        return len(list((tmp_path / "runs").rglob("checkpoint.safetensors")))

    assert run([0], activation="Tanh", comment="first") == 1
    stored = tmp_path / "runs/own/fedavg/seed-0/own-code.json"
    assert list(json.loads(stored.read_text())) == ["own_net_of_a_test"]
    assert run([0, 1], activation="Tanh", comment="a comment, and another size of the file") == 2
    with pytest.raises(CheckpointError, match=r"other code in module 'own_net_of_a_test'.*--overw"):
        run([0, 1, 2], activation="ReLU", comment="first")


def test_a_run_without_code_of_ones_own_depends_on_no_earlier_import(tmp_path):
    """Other studies of this process may have imported modules by their paths."""
    importing.import_object("tests.hugging:attach_lora", "a function")
    text = STUDY.format(seeds=[0]).replace("own_net_of_a_test:make_net", "linear")
    run_study(config.parse_study_text(text), out=tmp_path / "runs")
    assert not list(tmp_path.rglob("own-code.json"))


def test_the_digest_of_a_module_is_that_of_its_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file, digests = tmp_path / "own_module_of_a_test.py", []
    for text in ("x = 1", "x  =  1  # one", "x = 2"):
        file.write_text(text)
        importlib.invalidate_caches()
        digests.append(importing.compute_module_digest(file.stem))
    assert digests[0] == digests[1] != digests[2]
    for installed in ("coterie.cli", "torch.optim", "json"):
        assert importing.compute_module_digest(installed) == ""
    assert importing.compute_module_digest("there_is_no_such_module.inside") == ""
