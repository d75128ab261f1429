"""Three members fine-tune one frozen model as processes on loopback, as the page on fine-tuning says, with the bytes of the simulation."""

import importlib
import re
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.e2e.test_net_own_table import plain
from tests.hugging import require_peft

from coterie.net import fleet
from coterie.runtime.models import load_models
from coterie.studies import config
from coterie.studies.run import run_study

pytestmark = pytest.mark.e2e
require_peft()

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/fine-tune.md").read_text()
MEMBERS = ["ann", "bob", "cleo"]
QUICK = {"deadline": 120.0, "start": 300.0, "linger": 10.0}
# A node divides the texts of its member by itself: the simulation gets them as they are divided there.
WHOLE = """
from dataclasses import replace

import torch
from my_texts import federation as divide


def federation(names):
    first, *others = parts = [divide([name]) for name in names]
    joined = {one: torch.cat([getattr(part, one) for part in parts]) for one in ("x", "y", "split", "origin")}
    tests = tuple(test for part in parts for test in part.tests)
    places = torch.arange(len(names))
    return replace(
        first, **joined, tests=tests, test_of=places, ids=places, population=len(names), client_names=tuple(names)
    )
"""
# Nodes import transformers, which imports a torchvision that may be of another PyTorch.
HIDDEN = "import sys\nsys.modules['torchvision'] = None\n"


def read_file(name):
    """The text of a file that the page has its reader write."""
    (found,) = re.findall(rf'```\w+ title="{name}"\n(.*?)```', PAGE, re.DOTALL)
    return found


@pytest.mark.full
def test_three_nodes_end_with_the_adapters_of_the_simulation(tmp_path, monkeypatch, port):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("my_texts.py", "together.toml"):
        Path(name).write_text(read_file(name))
    Path("sitecustomize.py").write_text(HIDDEN)
    Path("whole.py").write_text(WHOLE)
    importlib.import_module("my_texts").build_model().save_pretrained("small-llama")
    study = config.load_study("together.toml", ["data.dataset=whole:federation"])
    simulated = run_study(study, out=tmp_path / "runs")

    files = fleet.lay_out(tmp_path / "nodes", study, port=port, network=QUICK)
    own = tomllib.loads(read_file("node.toml"))["data"]
    assert own == {"dataset": "my_texts:federation", "options": {"names": ["ann"]}}
    for file, member in zip(files.values(), MEMBERS, strict=True):
        data = f'dataset = "{own["dataset"]}"\noptions = {{ names = ["{member}"] }}'
        text = file.read_text()
        assert text.count('study = "own rows"') == 1
        file.write_text(text.replace('study = "own rows"', data))
    with fleet.Fleet(files, logs=tmp_path / "nodes") as nodes:
        for name in files:
            nodes.start(name)
        statuses = nodes.wait(300)
    logs = {name: (tmp_path / f"nodes/{name}.log").read_text() for name in files}
    assert statuses == dict.fromkeys(files, 0), logs
    assert all('"absent": []' in log for log in logs.values()), logs

    (label,) = (one.label for one in study.methods)
    joined = fleet.join_results(tmp_path / "nodes", study, list(files), label)
    folder = simulated.folder / label / "seed-0"
    for name in ("metrics", "edges"):
        expected = pd.read_parquet(folder / f"{name}.parquet")
        pd.testing.assert_frame_equal(plain(joined[name]), plain(expected))
    # A and B of rank 4 for two layers of two projections of 16 x 16, two buffers of four rotary
    # frequencies, the number of samples, and the similarity to each of three members with whether
    # it is known.
    numbers = 2 * 2 * 2 * 4 * 16 + 2 * 4 + 1
    assert set(joined["edges"]["bytes"]) == {4 * numbers + 3 * (4 + 1)}
    expected = load_models(folder)
    for name, member in zip(files, MEMBERS, strict=True):
        found = load_models(next((tmp_path / "nodes/nodes" / name).rglob("seed-0")))
        for tensor, value in expected.state_dict(member).items():
            assert torch.equal(found.state_dict(member)[tensor], value)
