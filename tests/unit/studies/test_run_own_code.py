"""Code of the user behind an import path: a stored run of other code is no run of this study."""

import copy
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from coterie._util import importing
from coterie.data.arrays import from_arrays
from coterie.errors import CheckpointError
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate
from coterie.studies import config
from coterie.studies.definition import make_study
from coterie.studies.run import run_study
from coterie.testing import tiny_federation

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


LOADED = """
from pathlib import Path
import torch
from torch import nn

def make_net(features, outputs, file):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs))
    net[1].load_state_dict(torch.load(file))
    return net

def freeze(features, outputs, file):
    net = make_net(features, outputs, file)
    net[1].requires_grad_(False)
    return net
"""


@pytest.mark.parametrize("maker", ["make_net", "freeze"])
def test_runs_of_a_study_begin_with_the_same_loaded_weights(tmp_path, monkeypatch, maker):
    """The code and the settings stay while the file changes: seeds of two pretrained models would be averaged."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importing, "_imported_code", {})
    (tmp_path / "loading_net_of_a_test.py").write_text(LOADED)
    file = tmp_path / "weights.pt"
    kind = f'"loading_net_of_a_test:{maker}", options = {{ file = "{file}" }}'

    def run(seeds: list[int]) -> None:
        text = STUDY.format(seeds=seeds).replace('"own_net_of_a_test:make_net"', kind)
        run_study(config.parse_study_text(text), out=tmp_path / "runs")

    first, other = (nn.Linear(64, 8).state_dict() for _ in range(2))
    torch.save(first, file)
    run([0])
    # Written again with the same content.
    torch.save(first, file)
    run([0, 1])
    torch.save(other, file)
    for seeds in ([0, 1], [0, 1, 2], [2]):
        with pytest.raises(
            CheckpointError, match=r"seed-\d was run with (other w|another m).*--overw"
        ):
            run(seeds)
    torch.save(first, file)
    run([2])


def test_a_single_run_goes_on_with_the_weights_that_it_began_with(tmp_path):
    first, other = nn.Linear(4, 3).state_dict(), nn.Linear(4, 3).state_dict()

    def run(state, rounds):
        def make():
            net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
            net[0].load_state_dict(state)
            return net

        settings = Settings(rounds=rounds, check=False)
        simulate(
            tiny_federation(),
            Local(),
            model=make,
            settings=settings,
            folder=tmp_path / "run",
            resume=True,
        )

    run(first, 1)
    with pytest.raises(CheckpointError, match="was run with other weights"):
        run(other, 2)
    run(first, 2)


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


PROGRAM = """
from dataclasses import dataclass, replace
from coterie.methods.local import Local

FACTOR = {factor}

def shrink(params):
    return params * FACTOR

@dataclass(frozen=True)
class Mine(Local):
    kind = "mine"

    def round(self, rnd, state):
        new, info = super().round(rnd, state)
        return replace(new, params=shrink(new.params)), info

seeds = {seeds}
"""


def run_program(file: Path, name: str, seeds: list[int], factor: float) -> set[str]:
    """Run a script that defines a method and starts a study of it; return the seeds that are there."""
    file.write_text(PROGRAM.format(factor=factor, seeds=seeds))
    importing._load_definitions.cache_clear()
    program = ModuleType(name)
    program.__file__ = str(file)
    with pytest.MonkeyPatch.context() as patch:
        # In a worker process, the program has both names.
        for one in {"__main__", name}:
            patch.setitem(sys.modules, one, program)
        exec(file.read_text(), vars(program))
        run_study(
            make_study({"Mine": program.Mine()}, seeds=seeds, settings=QUICK, model="linear"),
            out=file.parent / "runs",
            federation=DATA,
        )
    return {path.name for path in (file.parent / "runs/mine/Mine").iterdir()}


QUICK = Settings(rounds=1, engine="loop", check=False)
DATA = from_arrays(torch.eye(12, 3), [0, 1, 1] * 4, clients=[0, 1] * 6)


def test_a_method_of_a_script_is_the_same_method_in_worker_processes(tmp_path):
    """A worker imports the script as `__mp_main__`; the study goes on without workers."""
    file = tmp_path / "study_of_a_test.py"
    assert run_program(file, "__mp_main__", [0], 1.0) == {"seed-0"}
    assert 'kind = "__main__:Mine"' in (tmp_path / "runs/mine/Mine/seed-0/config.toml").read_text()
    assert run_program(file, "__main__", [0, 1], 1.0) == {"seed-0", "seed-1"}


def test_a_changed_method_of_a_script_is_refused_and_the_rest_of_the_script_may_change(tmp_path):
    """Seeds of two methods would be averaged. The constant is of a function that the method calls."""
    file = tmp_path / "study_of_a_test.py"
    run_program(file, "__main__", [0], 1.0)
    assert run_program(file, "__main__", [0, 1], 1.0) == {"seed-0", "seed-1"}
    with pytest.raises(CheckpointError, match=r"other code of '__main__:Mine'.*--overwrite"):
        run_program(file, "__main__", [0, 1, 2], 0.5)


def test_stored_runs_of_another_model_from_python_are_refused(tmp_path):
    """No setting says which it is: results of the first would be shown as those of the second."""
    study = make_study([Local()], seeds=[0], settings=QUICK)
    folder = run_study(study, out=tmp_path, federation=DATA, model=lambda: nn.Linear(3, 2)).folder

    def deep():
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    with pytest.raises(CheckpointError, match=r"seed-0 was run with another model.*--overwrite"):
        run_study(replace(study, seeds=[0, 1]), out=tmp_path, federation=DATA, model=deep)
    assert not (folder / "local/seed-1").exists()
    # An equal one from another function goes on.
    equal = run_study(
        replace(study, seeds=[0, 1]),
        out=tmp_path,
        federation=DATA,
        model=lambda: nn.Linear(3, 2, bias=True),
    )
    assert equal.summary["seeds"] == [0, 1]


def test_stored_runs_of_other_weights_from_python_are_refused(tmp_path):
    study = make_study([Local()], seeds=[0], settings=QUICK)
    module = nn.Linear(3, 2)
    run_study(study, out=tmp_path, federation=DATA, model=module)
    run_study(study, out=tmp_path, federation=DATA, model=copy.deepcopy(module))
    with torch.no_grad():
        module.weight[0, 0] += 1
    with pytest.raises(CheckpointError, match="another model"):
        run_study(study, out=tmp_path, federation=DATA, model=module)


def test_runs_of_a_module_from_python_with_attackers_or_new_clients_go_on(tmp_path):
    """Their data are not those that were given: labels are flipped, and some clients are left out."""
    data = from_arrays(torch.eye(40, 3), [0, 1, 1, 0] * 10, clients=[0, 1, 2, 3, 4] * 8)
    changes = {
        "attacked": {"attacks": [{"kind": "label-flip", "clients": [1]}]},
        "joined": {"new_clients": 2, "new_client_rounds": 1},
    }
    for name, change in changes.items():
        study = make_study([FedAvg()], name=name, seeds=[0], settings=replace(QUICK, **change))
        module = nn.Linear(3, 2)
        run_study(study, out=tmp_path, federation=data, model=module)
        again = run_study(study, out=tmp_path, federation=data, model=module)
        assert again.summary["seeds"] == [0]
