"""The programs of examples/: each trains what it says, in at most ten lines of Coterie."""

import runpy
from pathlib import Path

import pytest
from tests.selection import full

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONG = {"table", "images", "multi_label"}
"""Examples that `make test` leaves out."""
# what must be in the tables beside the loss, and what a model that learned nothing would have
METRICS = {
    "images": {"accuracy": 0.25},
    "multi_label": {"label_accuracy": 0.5, "auroc": 0.5, "average_precision": 0.0, "f1": 0.0},
    "pictures": {"accuracy": 0.5},
    "regression": {"r2": 0.0, "mae": None},
    "segmentation": {"pixel_accuracy": 0.5, "iou": 0.0},
    "survival": {"concordance": 0.5},
    "table": {"accuracy": 0.5, "auroc": 0.5, "balanced_accuracy": 0.5},
    "tokens_gru": {"token_accuracy": 1 / 16, "perplexity": None},
    "tokens_transformer": {"token_accuracy": 1 / 16},
    "two_inputs": {"accuracy": 0.5},
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the loop engine is used")
@pytest.mark.parametrize(
    "name", [full(path.stem, slow=True) if path.stem in LONG else path.stem for path in EXAMPLES]
)
def test_an_example_trains_its_task(name, capsys):
    path = ROOT / "examples" / f"{name}.py"
    coteries = [line for line in path.read_text().partition("# Coterie\n")[2].splitlines() if line]
    assert 3 <= len(coteries) <= 10
    run = runpy.run_path(str(path))["run"]
    assert "clients" in capsys.readouterr().out
    table = run.metrics
    loss = table[
        (table["metric"] == "loss")
        & (table["split"] == "validation")
        & (table["model"] == "current")
    ]
    middle = loss.groupby("round")["value"].median()
    assert middle.iloc[-1] < middle.iloc[0]
    tests = table[table["split"] == "test"].groupby("metric", observed=True)["value"].mean()
    assert set(tests.index) == {"loss", *METRICS[name]}
    for metric, nothing in METRICS[name].items():
        assert nothing is None or tests[metric] > nothing


def test_every_example_is_told_of():
    page = (ROOT / "docs/reference/tasks.md").read_text("utf-8")
    assert sorted(METRICS) == [path.stem for path in EXAMPLES]
    assert all(f"`{path.name}`" in page for path in EXAMPLES)
