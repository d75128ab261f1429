"""A metric that a method declares: from its rounds to tables, pages and trackers, also where the method is unknown."""

import json
import warnings
from dataclasses import dataclass
from typing import ClassVar, final

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError
from coterie.functional.metrics import LOSS, Metric
from coterie.methods import METHODS
from coterie.methods.base import Info, PeerMethod, Round, State, list_report_metrics
from coterie.methods.local import Local
from coterie.report import trackers
from coterie.report.data import build_payload
from coterie.report.page import write_report
from coterie.results import gains, stored_runs, summary
from coterie.runtime.loop import Undeclared
from coterie.simulation.run import Progress, simulate
from coterie.studies.definition import make_study
from coterie.studies.run import run_study
from coterie.testing import check_method, tiny_federation, tiny_settings

TRUST = Metric(
    "trust",
    "how much a client trusts its peers",
    "trust in peers",
    better="higher",
    unit="%",
    scale=100.0,
    digits=1,
)


@final
@dataclass(frozen=True)
class Trusting(PeerMethod):
    """Client i trusts by (i + 1 + round) / 100, times `factor`."""

    kind: ClassVar[str] = "trusting"
    summary: ClassVar[str] = "reports what nobody else does"
    reports: ClassVar[tuple[Metric, ...]] = (TRUST,)
    factor: float = 1.0

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        return state, {"trust": self.factor * (rnd.ids + 1 + rnd.index).double() / 100}


@final
@dataclass(frozen=True)
class Silent(PeerMethod):
    """Of the same kind, with no word of its metric: what somebody has who reads the run elsewhere."""

    kind: ClassVar[str] = "trusting"
    summary: ClassVar[str] = "declares nothing"
    factor: float = 1.0

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        return state, {"trust": torch.ones(len(rnd.ids)), "mood": torch.ones(len(rnd.ids))}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two labels of the method, of which the first trusts less; two rounds of six clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "trusting", Trusting)
        told: list[Progress] = []
        methods = {"Careful": Trusting(0.5), "Careless": Trusting(), "Local": Local()}
        made = make_study(methods, seeds=[0], settings=tiny_settings(rounds=2), model="linear")
        out = tmp_path_factory.mktemp("runs")
        done = run_study(made, out=out, federation=tiny_federation(), observer=told.append)
        patch.setitem(METHODS, "trusting", Silent)
        yield done.folder, told


@pytest.mark.full
def test_a_method_keeps_its_promises_with_a_metric_of_its_own():
    check_method(Trusting())


def test_what_is_declared_is_recorded_and_described_in_the_run(study):
    """Means over six clients: 3.5 % in round 0, 4.5 % in round 1. The description lies beside the tables."""
    folder, told = study
    table = pd.read_parquet(folder / "Careless" / "seed-0" / "metrics.parquet")
    own = table[table["metric"] == "trust"]
    assert own.groupby("round")["value"].mean().tolist() == pytest.approx([0.035, 0.045])
    stored = json.loads((folder / "Careless" / "seed-0" / "provenance.json").read_text())["metrics"]
    assert {name: stored["trust"][name] for name in ("title", "unit", "better")} == {
        "title": "trust in peers", "unit": "%", "better": "higher"
    }  # fmt: skip
    assert "metrics" not in json.loads(
        (folder / "Local" / "seed-0" / "provenance.json").read_text()
    )
    last = [step for step in told if step.label == "Careless"][-1]
    assert last.reported["trust"] == pytest.approx(0.045)


def test_its_result_is_what_clients_reported_last(study):
    """In round 1: (2 + ... + 7) / 6 = 4.5 %; half of that for those who trust half as much; a gain is above 0."""
    folder, _ = study
    rows = {row["label"]: row["mean"] for row in summary.summarize_study(folder)["rows"] if row["metric"] == "trust"
            if row["cluster"] == "all"}  # fmt: skip
    assert rows == pytest.approx({"Careful": 0.0225, "Careless": 0.045})
    runs, _ = stored_runs.load_runs([folder])
    (gain,) = gains.compute_client_gains(runs, "Careful", "trust")["Careless"].values()
    assert gain.mean() == pytest.approx(0.0225)


def test_it_is_shown_compared_and_reported_where_nobody_knows_it(study):
    """With its title and unit; of one seed nothing is shown as the best."""
    folder, _ = study
    shown = CliRunner().invoke(app, ["show", str(folder)], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert "trust in peers, %" in shown.output
    assert "Careless 1 4.5" in " ".join(shown.output.split())
    compared = CliRunner().invoke(app, ["compare", str(folder)], env={"COLUMNS": "80"})
    assert "Trust in peers in %, higher is better, mean over clients" in compared.output
    page = write_report(folder, folder.parent / "page.html").read_text()
    table = page[page.index('data-metric="trust"') :]
    table = table[: table.index("</table>")]
    assert "Trust in peers in %, higher is better" in table
    best = [row.split('"')[0] for row in table.split('data-label="')[1:] if "'best'" in row]
    assert best == []
    assert "One seed settles nothing" in page
    runs, problems = stored_runs.load_runs([folder])
    data = build_payload(runs, problems, folder)
    assert data["metrics"]["trust"]["heading"] == "trust in peers in %"
    assert "trust" in {curve["metric"] for curve in data["curves"]}


def test_trackers_are_told_what_it_is(study):
    folder, _ = study
    settings: dict[str, dict] = {}
    values: dict[str, list[float]] = {}

    class Kept:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, step, found):
            values.setdefault(self.name, []).extend(
                v for k, v in found.items() if k == "train/trust"
            )

        def close(self):
            pass

    def opener(name, given):
        settings[name] = dict(given)
        return Kept(name)

    runs, _ = stored_runs.load_runs([folder])
    trackers.export_runs(runs, opener)
    (name,) = (one for one in settings if "Careless" in one)
    assert settings[name]["metrics.trust"] == "trust in peers, times 100 in %, higher is better"
    assert values[name] == pytest.approx([0.035, 0.045])


def test_what_is_not_declared_is_named_once_and_breaks_a_promise():
    """A run goes on; the line says how to declare it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", Undeclared)
        run = simulate(
            tiny_federation(), Silent(), model="linear", settings=tiny_settings(rounds=3)
        )
    texts = [str(one.message) for one in said if issubclass(one.category, Undeclared)]
    assert [text.split("'")[1] for text in texts] == ["mood", "trust"]
    assert "declare it in `reports` of its class" in texts[0]
    assert "trust" not in set(run.metrics["metric"])
    with pytest.raises(AssertionError, match="mood"):
        check_method(Silent())


@final
@dataclass(frozen=True)
class Grouped(PeerMethod):
    kind: ClassVar[str] = "grouped"

    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        rnd.exchange.pull(self.publish(rnd.task, state), torch.full((len(rnd.ids), 1), -1))
        return state, {"label": rnd.ids % 2}


def test_a_cluster_that_clients_found_without_a_server_is_said_to_be_dropped():
    settings = tiny_settings(rounds=2, metrics=["clusters"])
    line = "grouped reports 'label', which is not recorded: a found cluster is known of methods"
    with pytest.warns(Undeclared, match=line) as said:
        run = simulate(tiny_federation(), Grouped(), model="linear", settings=settings)
    assert len(said) == 1
    assert not {"label", "n_clusters", "rand"} & set(run.metrics["metric"])


@pytest.mark.parametrize("name", ["weights", LOSS.name])
def test_a_name_that_means_something_else_is_refused(name):
    class Wrong(PeerMethod):
        reports: ClassVar[tuple[Metric, ...]] = (Metric(name),)

        def exchange(self, rnd, state):
            return state, {}

    with pytest.raises(ConfigError, match=f"{name}.*nothing else in a run has"):
        list_report_metrics(Wrong())


def test_a_damaged_description_is_a_problem_of_that_run(small, listed):
    path = small / "DAC" / "seed-0" / "provenance.json"
    damaged = {"trust": {"name": "trust", "better": "up"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "metrics": damaged}))
    listed(path.parent)
    runs, (problem,) = stored_runs.load_runs([small])
    assert len(runs) == 3
    assert "trust: better is 'up'" in problem.reason
