"""Hospitals with a table each, as processes on loopback: what their nodes compute is what the simulation did."""

import re
from pathlib import Path

import pandas as pd
import pytest

from coterie.data import heart_disease
from coterie.net import fleet
from coterie.studies import config
from coterie.studies.run import run_study

pytestmark = pytest.mark.e2e

HOSPITALS = ["cleveland", "hungary", "switzerland"]
OPTIONS = """
target = "disease"
client = "hospital"
class_names = ["no", "yes"]
features = ["age", "sex", "cp", "trestbps", "chol"]
categories = { cp = [1, 2, 3, 4] }
impute = "median"
indicate = ["trestbps", "chol"]
scale = "standard"
"""
STUDY = f"""
name = "hearts"
rounds = 3
seeds = [6]
engine = "loop"
metrics = ["auroc"]
model = {{ kind = "linear" }}

[data]
dataset = "table"
folds = 5

[data.options]
path = "hospitals.csv"
{OPTIONS}
[[methods]]
kind = "dac"
label = "DAC"
num_peers = 1
"""
QUICK = {"deadline": 60.0, "start": 200.0, "linger": 10.0}


@pytest.mark.full
def test_nodes_with_a_table_each_end_where_the_simulation_of_the_whole_table_does(
    tmp_path, monkeypatch, port
):
    """The same patients are tested, values filled and scaled by the same training rows; no node has another's file."""
    monkeypatch.chdir(tmp_path)
    rows = heart_disease.load_table()
    rows = rows[rows["hospital"].isin(HOSPITALS)]
    rows.to_csv("hospitals.csv", index=False)
    Path("study.toml").write_text(STUDY)
    study = config.load_study("study.toml")
    judging = config.load_study(
        "study.toml", ["acceptance=true"]
    )  # as nodes do unless told otherwise
    simulated = run_study(judging, out=tmp_path / "runs")

    files = fleet.lay_out(tmp_path / "nodes", study, port=port, network=QUICK)
    for name, file, hospital in zip(files, files.values(), HOSPITALS, strict=True):
        rows[rows["hospital"] == hospital].to_csv(tmp_path / "nodes" / f"{name}.csv", index=False)
        own = f'dataset = "table"\nfolds = 5\n\n[data.options]\npath = "{name}.csv"\n{OPTIONS}'
        file.write_text(file.read_text().replace('study = "own rows"', own))
    Path("hospitals.csv").unlink()
    with fleet.Fleet(files, logs=tmp_path / "nodes") as nodes:
        for name in files:
            nodes.start(name)
        statuses = nodes.wait(240)
    logs = {name: (tmp_path / f"nodes/{name}.log").read_text() for name in files}
    assert statuses == dict.fromkeys(files, 0), logs
    assert all('"absent": []' in log for log in logs.values()), logs

    joined = fleet.join_results(tmp_path / "nodes", study, list(files), "DAC")
    for name in ("metrics", "edges"):
        expected = pd.read_parquet(simulated.folder / f"DAC/seed-6/{name}.parquet")
        pd.testing.assert_frame_equal(plain(joined[name]), plain(expected))
    told = (tmp_path / "nodes/nodes/node-01/hearts/DAC/seed-6/provenance.json").read_text()
    assert re.search(r'"client_names": \{[^}]*"1": "hungary"', told)


def plain(table: pd.DataFrame) -> pd.DataFrame:
    """Rows in one order, text as text."""
    table = table.astype(
        {c: str for c in table.columns if isinstance(table[c].dtype, pd.CategoricalDtype)}
    )
    return table.sort_values(list(table.columns)).reset_index(drop=True)
