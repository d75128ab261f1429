"""Own data from the command line: run, resume, tune and report of a table, a folder of images, and a function."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from tests.selection import first_only
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.studies.run import load_study_results

pytestmark = pytest.mark.e2e

HEAD = 'rounds = 2\nseeds = [0]\n[local]\nbatch_size = 8\n[[methods]]\nkind = "random"\nnum_peers = 1\n'


def command(*words: str) -> str:
    told = CliRunner().invoke(
        app, [*words, *([] if words[0] == "report" else ["--workers", "1", "--quiet"])]
    )
    assert told.exception is None, f"{words}: {told.output} {told.exception!r}"
    return told.output


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def patients() -> pd.DataFrame:
    """Four hospitals of 3 to 120 rows, with text and empty entries."""
    sizes = {"Åre": 3, "Zürich": 40, "東京": 120, "São Paulo": 60}
    draw = np.random.default_rng(0)
    site = np.repeat(list(sizes), list(sizes.values()))
    sex = draw.choice(["f", "m"], len(site))
    table = pd.DataFrame({"site": site, "age": draw.normal(50, 9, len(site)), "sex": sex})
    table["ill"] = np.where(table["age"] > 50, "yes", "no")
    table.loc[draw.random(len(site)) < 0.1, "age"] = None
    table.loc[(draw.random(len(site)) < 0.1) & (site != "Åre"), "sex"] = None
    return table


@pytest.mark.parametrize("suffix", first_only(["csv", "parquet"]))
@pytest.mark.filterwarnings("ignore:.*without any value:UserWarning")
def test_a_table_runs_resumes_tunes_and_is_reported(suffix, here):
    table = patients()
    table.to_csv("patients.csv", index=False) if suffix == "csv" else table.to_parquet(
        "patients.parquet"
    )
    options = f'path = "patients.{suffix}"\ntarget = "ill"\nclient = "site"\nimpute = "median"\nscale = "standard"\n'
    data = f'[data]\ndataset = "table"\n[data.options]\n{options}'
    (here / "mine.toml").write_text(f'model.kind = "linear"\n{HEAD}\n{data}')
    command("run", "mine.toml")
    found = load_study_results("runs/mine").rows.set_index(["cluster", "metric"])["mean"]
    assert 0 <= found["all", "accuracy"] <= 1
    before = (here / "runs/mine/random/seed-0/metrics.parquet").read_bytes()
    command("resume", "runs/mine")
    assert (here / "runs/mine/random/seed-0/metrics.parquet").read_bytes() == before
    command("report", "runs/mine")
    assert (here / "runs/mine/report.html").exists()
    command("tune", "mine.toml", "--grid", "lr=0.01,0.1", "--widenings", "0")
    assert (here / "tuned/mine-tuned.toml").exists()


def test_a_folder_of_images_by_client_runs(here):
    draw = np.random.default_rng(0)
    for client in ("north", "söder"):
        for label in ("cat", "dog"):
            for place in range(8):
                path = here / "pets" / client / label / f"{place}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                height, width = draw.integers(8, 20, 2)
                Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
                    path
                )
    data = '[data]\ndataset = "folder"\n[data.options]\npath = "pets"\nsize = 8\n'
    (here / "pets.toml").write_text(f'model.kind = "linear"\n{HEAD}\n{data}')
    command("run", "pets.toml")
    assert len(load_study_results("runs/pets").rows)


def test_a_function_by_import_path_runs_and_resumes(here):
    (here / "own_hospitals.py").write_text(
        "import numpy as np\nimport coterie\n\n\n"
        "def two(rows):\n"
        "    x = np.arange(2.0 * rows).reshape(rows, 2)\n"
        "    return coterie.Source.from_arrays(x, ['no', 'yes'] * (rows // 2), clients=np.repeat(['a', 'b'], rows // 2))\n"
    )
    data = '[data]\ndataset = "own_hospitals:two"\noptions.rows = 40\n'
    (here / "own.toml").write_text(f'model.kind = "linear"\n{HEAD}\n{data}')
    command("run", "own.toml")
    command("resume", "runs/own")
    assert (here / "runs/own/summary.json").exists()
