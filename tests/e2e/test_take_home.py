"""Models taken home: trained, exported, loaded by a script without Coterie, with the same test numbers."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from tests.selection import first_only

import coterie
from coterie.cli.app import app
from coterie.results.export import export_model
from coterie.runtime.models import load_models

pytestmark = pytest.mark.e2e

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, features, outputs, width=4):
        super().__init__()
        channels, height, wide = features
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout2d(0.2),
            nn.MaxPool2d(2), nn.Flatten(),
        )
        self.head = nn.Linear(width * (height // 2) * (wide // 2), outputs)

    def forward(self, x):
        return self.head(self.body(x))
"""

STUDY = """
name = "home"
rounds = 2
seeds = [0]
engine = "loop"
evaluate = "{evaluate}"
data = {{ dataset = "digits", num_clients = 3, train = 40, shift = [{{ kind = "rotation", degrees = [0, 90, 180] }}] }}
model = {{ kind = "home_nets:Net", options = {{ width = 6 }} }}
local = {{ lr = 0.01 }}
[[methods]]
kind = "{method}"
label = "Meth"
"""


def plain_script(folder, text):
    """Run a script where Coterie is not imported, and read what it prints as JSON."""
    path = folder / "plain.py"
    end = 'import sys\nassert "coterie" not in sys.modules\nprint(json.dumps(found))\n'
    path.write_text("import json\n" + textwrap.dedent(text) + end)
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def recorded(folder, client):
    """Accuracy and loss of a client's final test, from the table of the run."""
    table = pd.read_parquet(folder / "metrics.parquet")
    rows = table[
        (table["split"] == "test")
        & (table["round"] == table["round"].max())
        & (table["client"] == client)
    ]
    assert rows["model"].nunique() == 1
    values = rows.set_index("metric")["value"]
    return {"accuracy": values["accuracy"], "loss": values["loss"]}


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "home_nets.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("home_nets", None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "evaluate"), first_only([("random", "best_val"), ("fedavg", "final")], slow=True)
)
def test_a_network_with_batch_norm_and_dropout_has_the_recorded_numbers_in_a_plain_script(
    nets, method, evaluate
):
    (nets / "home.toml").write_text(STUDY.format(method=method, evaluate=evaluate))
    study = coterie.run_study("home.toml", out="runs")
    run = study.folder / "Meth" / "seed-0"
    data = coterie.build_federation(study.config.data, 0)
    test = data.tests[data.test_of[2]]
    np.savez(nets / "test.npz", x=test.x.numpy(), y=test.y.numpy())
    for ending in ("safetensors", "pt"):
        with pytest.raises(SystemExit) as ended:
            app(["export", str(run), "--client", "2", "--format", ending, "--out", f"two.{ending}"])
        assert ended.value.code in (0, None)
    found = plain_script(
        nets,
        """
        import numpy as np, torch
        from safetensors import safe_open
        from safetensors.torch import load_file
        from home_nets import Net

        with safe_open("two.safetensors", "pt") as file:
            told = file.metadata()
        scale, options = json.loads(told["normalization"]), json.loads(told["options"])
        net = Net(json.loads(told["features"]), len(json.loads(told["class_names"])), **options)
        net.load_state_dict(load_file("two.safetensors"), strict=True)
        again = torch.load("two.pt", weights_only=True)
        assert all(torch.equal(tensor, again[name]) for name, tensor in net.state_dict().items())
        test = np.load("test.npz")
        x = (torch.from_numpy(test["x"]).float() / 255 - scale["mean"][0]) / scale["std"][0]
        y = torch.from_numpy(test["y"])
        with torch.no_grad():
            outputs = net.eval()(x)
        loss = torch.nn.functional.cross_entropy(outputs, y).item()
        found = {"accuracy": (outputs.argmax(1) == y).double().mean().item(), "loss": loss, "told": told}
        """,
    )
    wanted = recorded(run, 2)
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    told = found["told"]
    assert (told["study"], told["method"], told["seed"], told["client"]) == (
        "home",
        "Meth",
        "0",
        "2",
    )
    assert (told["kind"], told["model"]) == ("home_nets:Net", evaluate)


def patients(rows, seed):
    stream = np.random.default_rng(seed)
    found = pd.DataFrame({"site": np.array(["Lund", "Åre"])[np.arange(rows) % 2]})
    found["age"] = stream.normal(50, 10, rows)
    found["pulse"] = np.where(stream.random(rows) < 0.3, np.nan, stream.normal(70, 5, rows))
    found["smokes"] = stream.choice(["never", "once", "daily"], rows)
    found["ill"] = np.where(found["age"] > 50, "yes", "no")
    return found


@pytest.fixture
def table_run(tmp_path):
    test = patients(80, 5)
    data = coterie.from_table(
        patients(120, 4),
        target="ill",
        client="site",
        impute={"pulse": "mean"},
        scale="standard",
        test=test.drop(columns="site"),
    )
    settings = coterie.Settings(rounds=3, engine="loop")
    run = coterie.simulate(
        data,
        coterie.METHODS["fedavg"](),
        model="linear",
        settings=settings,
        folder=tmp_path / "run",
    )
    test.to_csv(tmp_path / "test.csv", index=False)
    return run


@pytest.mark.slow
def test_a_model_of_a_table_comes_with_what_its_client_did_to_the_rows(table_run, tmp_path):
    export_model(load_models(tmp_path / "run"), "Åre", tmp_path / "one.safetensors")
    found = plain_script(
        tmp_path,
        """
        import numpy as np, pandas as pd, torch
        from safetensors import safe_open
        from safetensors.torch import load_file

        with safe_open("one.safetensors", "pt") as file:
            told = {name: json.loads(text) for name, text in file.metadata().items() if text[:1] in ("[", "{")}
        rows, entries = pd.read_csv("test.csv", keep_default_na=True), []
        for column in told["columns"]:
            values = rows[column["name"]].to_numpy()
            if "categories" in column:
                entries += [(values == one).astype(float) for one in column["categories"]]
            else:
                entries.append(values)
        x = np.stack(entries, 1).astype(float)
        x = np.where(np.isnan(x), told["fill"], x)
        x = torch.from_numpy((x - np.array(told["subtract"])) / np.array(told["divide"])).float()
        names = told["class_names"]
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(x.shape[1], len(names))).eval()
        net.load_state_dict(load_file("one.safetensors"), strict=True)
        y = torch.tensor([names.index(one) for one in rows["ill"]])
        with torch.no_grad():
            outputs = net(x)
        loss = torch.nn.functional.cross_entropy(outputs, y).item()
        found = {"accuracy": (outputs.argmax(1) == y).double().mean().item(), "loss": loss}
        """,
    )
    wanted = recorded(tmp_path / "run", 1)
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-6)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    rows = pd.read_csv(tmp_path / "test.csv")
    said = table_run.predict("Åre", rows, "classes")
    assert np.mean(said == rows["ill"]) == pytest.approx(wanted["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_onnx_runtime_has_the_same_numbers(nets, table_run):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    (nets / "home.toml").write_text(STUDY.format(method="random", evaluate="final"))
    study = coterie.run_study("home.toml", out="runs")
    data = coterie.build_federation(study.config.data, 0)
    images = load_models(study.folder / "Meth" / "seed-0")
    for models, client, x in (
        (images, 1, data.tests[data.test_of[1]].x),
        (table_run.models, "Lund", patients(80, 5)),
    ):
        path = export_model(models, client, nets / f"{client}.onnx", format="onnx")
        session = runtime.InferenceSession(path)
        (arguments, _), module = (
            models.make_forward_arguments(models.convert_inputs(client, x), torch.nn.Linear(1, 1)),
            models.model(client),
        )
        with torch.no_grad():
            wanted = module(*arguments).numpy()
        for size in (1, 3, len(wanted)):
            found = session.run(None, {"input": arguments[0][:size].numpy()})[0]
            assert np.allclose(found, wanted[:size], atol=1e-5)


def test_all_clients_go_into_a_folder_and_nothing_is_overwritten(nets, capsys):
    (nets / "home.toml").write_text(STUDY.format(method="random", evaluate="final"))
    coterie.run_study("home.toml", out="runs")

    def call(*arguments):
        with pytest.raises((SystemExit, coterie.CoterieError)) as ended:
            app(["export", *arguments])
        return str(ended.value)

    assert call("runs/home", "--all", "--out", "models") == "0"
    files = sorted(path.name for path in (nets / "models").iterdir())
    assert files == [f"client-{client}.safetensors" for client in range(3)]
    kept = {name: (nets / "models" / name).read_bytes() for name in files}
    with safe_open(nets / "models" / files[1], "pt") as file:
        assert file.metadata()["client"] == "1"
    assert "models/client-0.safetensors exists" in call("runs/home", "--all", "--out", "models")
    assert {name: (nets / "models" / name).read_bytes() for name in files} == kept
    assert call("runs/home", "--all", "--out", "models", "--force") == "0"
    assert "3 clients: 0, 1, 2; choose one with --client" in call("runs/home")
    assert "unknown method 'meth'; did you mean 'Meth'" in call(
        "runs/home", "--method", "meth", "-c", "0"
    )
    assert "has no finished run that match" in call("runs/home", "--seed", "9", "-c", "0")
    assert "unknown --format 'onx'; did you mean 'onnx'" in call(
        "runs/home", "-c", "0", "-f", "onx"
    )
    assert "--which is 'last'; expected" in call("runs/home", "-c", "0", "--which", "last")
    assert "nothing has no models.safetensors; expected the folder of a finished run" in call(
        "nothing", "-c", "0"
    )
