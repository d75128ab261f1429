"""Runs with differentially private training: every method, resumed runs, and epsilon beside accuracy."""

import warnings
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tests.selection import first_only, one_of_each_family
from torch import nn

from coterie.cli._display import print_round_results
from coterie.engine.privacy import PrivacyLedger, PrivateQuery
from coterie.engine.task import Task
from coterie.errors import ConfigError, ModelError
from coterie.functional.losses import Cox
from coterie.functional.metrics import EPSILON
from coterie.methods.registry import METHODS
from coterie.report.page import write_report
from coterie.results.stored_runs import load_runs
from coterie.runtime.extensions import Unprotected
from coterie.simulation.run import simulate
from coterie.studies.definition import make_study
from coterie.studies.run import load_study_results, run_study
from coterie.testing import check_method, tiny_federation, tiny_settings

DP = {"clip": 0.5, "noise_multiplier": 1.5, "delta": 1e-3}
SETTINGS = tiny_settings(rounds=3)
SETTINGS = replace(SETTINGS, local=replace(SETTINGS.local, batch_size=4, dp=DP), engine="vmap")


class Interrupt(Exception):
    """The process was killed."""


class TwoLayers(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def epsilons(run):
    rows = run.metrics[(run.metrics["metric"] == EPSILON.name) & (run.metrics["split"] == "test")]
    return torch.tensor(rows.sort_values("client")["value"].to_numpy())


@pytest.mark.full
@pytest.mark.parametrize("kind", one_of_each_family(sorted(METHODS), slow=True))
def test_every_method_says_what_is_not_covered(kind, monkeypatch):
    """Whoever asks the task for losses or labels in a round, or sends losses, declares it; others do not."""
    method = METHODS[kind](**({"endpoints": 3, "regions": 2} if kind.startswith("sosicfl") else {}))
    federation, asked = tiny_federation(), set()
    for name in ("score", "class_counts"):
        plain = getattr(Task, name)

        def told(self, *args, plain=plain, name=name, **kwargs):
            asked.add(name)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(Task, name, told)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = simulate(federation, method, model=TwoLayers, settings=SETTINGS)
    told = [one for one in said if issubclass(one.category, Unprotected)]
    # PPDL chooses by what it measures of the mixed model itself, as each run measures its models.
    sends = kind in ("fedgwc", "ppdl")
    assert bool(asked) or sends == bool(method.privacy_leak)
    assert len(told) == bool(method.privacy_leak)
    assert torch.isfinite(run.params).all()
    found = epsilons(run)
    assert len(found) == 6
    assert bool(((found > 0) & torch.isfinite(found)).all())


def test_epsilon_is_that_of_the_steps_of_all_rounds():
    """12 samples in batches of 4: three steps an epoch, in the warm-up and each round."""
    local = replace(SETTINGS.local, epochs=1, steps=None)
    run = simulate(
        tiny_federation(),
        METHODS["random"](),
        model="linear",
        settings=replace(SETTINGS, local=local),
    )
    spent = PrivacyLedger()
    spent.add_uses(0, PrivateQuery(1 / 3, 1.5), 3 * 4)
    expected = float(spent.compute_epsilon(torch.tensor([0]), 1e-3))
    assert epsilons(run).tolist() == pytest.approx([expected] * 6)
    history = run.metrics[(run.metrics["metric"] == "epsilon") & (run.metrics["split"] == "train")]
    growing = history[history["client"] == 0].sort_values("round")["value"].tolist()
    assert growing == sorted(set(growing))
    assert len(growing) == 4


def test_the_report_and_the_terminal_show_epsilon(tmp_path, capsys):
    """The mean over clients and seeds, and the largest; and the settings among those of the training."""
    study = make_study(
        {"Random": METHODS["random"]()},
        settings=replace(SETTINGS, participation=3),
        seeds=2,
        model="linear",
    )
    done = run_study(study, out=tmp_path, federation=tiny_federation())
    values = torch.cat(
        [
            torch.tensor(run.final_values("epsilon").to_numpy())
            for run in load_runs([done.folder])[0]
        ]
    )
    assert len(values) == 12
    page = write_report(done.folder).read_text("utf-8")
    said = f"Random {values.mean():.2f} ({values.max():.2f})"
    assert (
        f"Epsilon of differential privacy, mean over clients and seeds (largest): {said}." in page
    )
    assert "differentially private (clip 0.5, noise_multiplier 1.5, delta 0.001)" in page
    print_round_results(load_study_results(done.folder), Console(width=80))
    assert ["Random", "2", f"{values.mean():.1f}"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dac", "pfedme"])
def test_a_killed_run_ends_with_the_same_bytes(kind, tmp_path):
    settings = replace(SETTINGS, checkpoint_seconds=0.0)

    def run(folder, **more):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Unprotected)
            return simulate(
                tiny_federation(),
                METHODS[kind](),
                model="linear",
                settings=settings,
                folder=folder,
                **more,
            )

    def stop(progress):
        if progress.round == 1:
            raise Interrupt

    whole = run(tmp_path / "whole")
    with pytest.raises(Interrupt):
        run(tmp_path / "killed", observer=stop)
    again = run(tmp_path / "killed", resume=True)
    assert torch.equal(whole.params, again.params)
    for name in ("metrics.parquet", "edges.parquet"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    assert bool((epsilons(whole) > 0).all())


@pytest.mark.full
@pytest.mark.parametrize("kind", first_only(["fedavg", "random", "apfl"], slow=True))
def test_methods_keep_their_promises(kind):
    """The contract of methods: equal for any hosting, no hidden state, the same with clients renumbered."""
    check_method(METHODS[kind](), settings=SETTINGS)


def test_a_participation_costs_only_who_takes_part():
    settings = replace(SETTINGS, participation=3)
    run = simulate(tiny_federation(), METHODS["fedavg"](), model="linear", settings=settings)
    assert len(set(epsilons(run).tolist())) > 1


def test_what_cannot_be_private_is_refused_before_the_first_round(monkeypatch):
    federation = tiny_federation()
    cox = replace(SETTINGS, loss=Cox())
    times = torch.stack([federation.y.double() + 1, (federation.y > 0).double()], -1)
    tests = tuple(
        replace(one, y=torch.stack([one.y.double() + 1, (one.y > 0).double()], -1))
        for one in federation.tests
    )
    survival = replace(federation, y=times, tests=tests, classes=0)
    with pytest.raises(ModelError, match=r"loss 'cox' joins those of a batch"):
        simulate(survival, METHODS["local"](), model="linear", settings=cox)
    monkeypatch.setattr(
        "coterie.engine.privacy._load_accountant",
        lambda: (_ for _ in ()).throw(ImportError("no opacus")),
    )
    with pytest.raises(
        ConfigError, match=r"opacus, which cannot be imported \(no opacus\); pip install"
    ):
        simulate(federation, METHODS["local"](), model="linear", settings=SETTINGS)
