"""The example with manual pages of six languages: its data, its pretraining and its study, on made-up pages."""

import importlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tests.hugging  # noqa: F401
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.data.federation import TRAIN, VALIDATION
from coterie.results.stored_runs import load_run

pytest.importorskip("transformers")
FOLDER = Path(__file__).resolve().parents[2] / "examples/manual_pages"


@pytest.fixture
def example(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delenv("MANUAL_PAGES", raising=False)
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("manual_pages")


def test_each_client_has_pages_of_one_language_that_nobody_else_has(example, tmp_path):
    """Each page is one byte again and again, so that a sample says whose it is."""
    rows, page = [], 0
    for language in example.LANGUAGES:
        for _ in range(12):
            rows.append({"language": language, "text": chr(33 + page) * 200})
            page += 1
    pd.DataFrame(rows).to_parquet(tmp_path / "pages.parquet")
    data = example.federation(str(tmp_path / "pages.parquet"))
    assert len(data) == 24
    assert data.truth.cluster.tolist() == [place // 4 for place in range(24)]
    seen = []
    for client in range(24):
        assert [int((data.split[client] == one).sum()) for one in (TRAIN, VALIDATION)] == [60, 10]
        test = data.tests[data.test_of[client]]
        assert test.x.shape == (example.TESTED, example.LENGTH)
        own, tested = (set(np.unique(x)) - {ord("\n")} for x in (data.x[client], test.x))
        assert not own & tested
        assert {(int(one) - 33) // 12 for one in own | tested} == {client // 4}
        seen += own
    assert len(seen) == len(set(seen)) == 48
    mixed = {ord(one[:1]) for k in example.PRETRAINED for one in example.share_pages(
        example.load_pages(str(tmp_path / "pages.parquet"))[k], 0)}  # fmt: skip
    assert not mixed & set(seen)
    # The public set is two samples of each language, of pages that are no client's.
    public = set(np.unique(data.public.x).astype(int)) - {ord("\n")}
    assert {(one - 33) // 12 for one in public} == set(range(6))
    assert not public & set(map(int, seen))
    assert len(data.public.x) == 12


@pytest.mark.slow
def test_the_study_runs_on_made_up_pages(example, tmp_path):
    losses = example.pretrain("small-gpt2", steps=60)
    assert np.mean(losses[-5:]) < losses[0] - 1
    sent = {}
    for name, methods in {"manual-pages": 12, "manual-pages-ffa": 2}.items():
        (tmp_path / f"{name}.toml").write_text((FOLDER / f"{name}.toml").read_text())
        given = ["run", f"{name}.toml", "--set", "rounds=1", "--set", "seeds=[0]"]
        # In this process, where tests.hugging has been imported.
        told = CliRunner().invoke(app, [*given, "--out", "runs", "--workers", "1"])
        assert told.exit_code == 0, told.output
        runs = list((tmp_path / "runs" / name).glob("*/seed-0"))
        assert len(runs) == methods
        sent |= {run.parent.name: load_run(run).edges["bytes"].max() for run in runs}
    # Rank 4: A of c_attn and of c_fc is 4 x 64, B is 192 x 4 and 256 x 4; in two layers. A message
    # also has the number of samples, and DAC's the similarity to each of 24 clients.
    a, b = 2 * 2 * 4 * 64 * 4, 2 * 4 * (192 + 256) * 4
    assert sent["Random (Dec-LoRA)"] == a + b + 4
    assert sent["DAC, by loss"] - sent["DAC, by loss, FedSA"] == b
    assert sent["DAC, by loss"] - sent["DAC, by loss, FFA"] == a
