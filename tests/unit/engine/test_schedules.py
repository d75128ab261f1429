"""Learning-rate schedules, against torch.optim.lr_scheduler, by hand, and over the rounds and steps of runs."""

import dataclasses
import re
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from coterie.engine.optim import LocalTraining
from coterie.engine.schedules import (
    SCHEDULES,
    CosineSchedule,
    ExponentialSchedule,
    LinearSchedule,
    StepSchedule,
    WarmupSchedule,
    compute_learning_rates,
    parse_schedules,
)
from coterie.errors import CheckpointError, ConfigError
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.runtime import checkpoint
from coterie.runtime.task import make_task
from coterie.simulation.run import simulate
from coterie.studies import config
from coterie.testing import check_method, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

TORCH = {
    "warmup": ({"length": 5}, lambda o: lr_scheduler.LinearLR(o, total_iters=5)),
    "warmup, start": (
        {"length": 7, "start": 0.1},
        lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=7),
    ),
    "linear": (
        {"start": 0.5, "end": 0.2, "length": 9},
        lambda o: lr_scheduler.LinearLR(o, 0.5, 0.2, 9),
    ),
    "linear, all": ({"end": 0.0}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 12)),
    "cosine": ({"end": 0.1}, lambda o: lr_scheduler.CosineAnnealingLR(o, 12, eta_min=0.02)),
    "exponential": ({"gamma": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "step": ({"every": 5, "gamma": 0.5}, lambda o: lr_scheduler.StepLR(o, 5, 0.5)),
    "step, at": ({"at": [2, 9]}, lambda o: lr_scheduler.MultiStepLR(o, [2, 9])),
}


def thirds(number: int, total: int) -> float:
    """A function of one's own: whole, a half, a quarter."""
    return 0.5 ** (3 * number // total)


def negative(number: int, total: int) -> float:
    return -1.0


def of_one(number: int) -> float:
    return 1.0


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("over", ["rounds", "steps"])
def test_a_schedule_is_pytorchs(name, over):
    """Twelve rounds, and twelve steps, at the rate 0.2."""
    arguments, kind = TORCH[name]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2)
    theirs, expected = kind(optimizer), []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    schedules = parse_schedules({"kind": name.partition(",")[0], "over": over, **arguments})
    if over == "steps":
        found = compute_learning_rates(
            schedules, 0.2, torch.ones(1, 12, dtype=torch.int64), 3, None
        )[0].tolist()
    else:
        found = [
            float(
                compute_learning_rates(schedules, 0.2, torch.ones(1, 1, dtype=torch.int64), r, 12)
            )
            for r in range(12)
        ]
    assert found == pytest.approx(expected, abs=1e-15)


def test_after_its_length_a_schedule_stays():
    assert [
        CosineSchedule(length=2, end=0.25).lr_factor(n, 99) for n in (2, 3, 50)
    ] == pytest.approx([0.25] * 3)
    assert [
        LinearSchedule(length=2, end=0.25).lr_factor(n, 99) for n in (2, 3, 50)
    ] == pytest.approx([0.25] * 3)
    assert [WarmupSchedule(length=2).lr_factor(n, 99) for n in (2, 3, 50)] == pytest.approx(
        [1.0] * 3
    )


@pytest.mark.option("LrSchedule.over", "rounds", "steps")
def test_a_schedule_counts_rounds_or_steps_and_several_multiply():
    """Rate 1 in round 2 of 4, three steps and one: 1/2 ** 2; 1, 1/2, 1/4; and both."""
    length, by_round, by_step = (
        torch.tensor([[4, 4, 1], [2, 0, 0]]),
        ExponentialSchedule(gamma=0.5),
        ExponentialSchedule(gamma=0.5, over="steps"),
    )
    assert compute_learning_rates([by_round], 1.0, length, 2, 4)[0].tolist() == [0.25] * 3
    assert compute_learning_rates([by_step], 1.0, length, 2, 4).tolist() == [
        [1.0, 0.5, 0.25],
        [1.0, 0.0, 0.0],
    ]
    assert compute_learning_rates([by_round, by_step], 1.0, length, 2, 4)[0].tolist() == [
        0.25,
        0.125,
        0.0625,
    ]


def test_what_is_trained_before_the_first_exchange_has_the_rate_of_round_0():
    """At most one rate a round: the warm-up, round -1, has the first."""
    length = torch.tensor([[4]])
    assert [
        float(compute_learning_rates([LinearSchedule()], 1.0, length, r, 4)) for r in range(-1, 4)
    ] == [1.0, 1.0, 0.75, 0.5, 0.25]


def test_a_function_of_ones_own_is_a_schedule():
    """By import path, in a table, or as it is; it is stored by its path."""
    path = f"{__name__}:thirds"
    for given in (path, {"kind": path}, thirds, [thirds]):
        local = LocalTraining(lr=1.0, lr_schedule=given)
        found = local.learning_rates(torch.tensor([[1]]), 2, 6)
        assert found is not None
        assert float(found) == 0.5
    assert LocalTraining(lr_schedule=thirds).lr_schedule == {"kind": path}
    found = LocalTraining(lr=1.0, lr_schedule={"kind": path, "over": "steps"}).learning_rates(
        torch.ones(1, 3).int(), 0, None
    )
    assert found is not None
    assert found.tolist() == [[1.0, 0.5, 0.25]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("cosin", "lr_schedule: unknown schedule 'cosin'; did you mean 'cosine'"),
        (
            {"gamma": 0.5},
            "lr_schedule: kind is missing; valid: cosine, exponential, linear, step, warmup; or package",
        ),
        (
            {"kind": "cosine", "length": 0},
            "lr_schedule: length is 0; expected a whole number, 1 or more",
        ),
        (
            {"kind": "cosine", "over": "epochs"},
            "lr_schedule: over is 'epochs'; expected 'rounds' or 'steps'",
        ),
        ({"kind": "exponential"}, "lr_schedule: gamma is missing; expected a number, above 0"),
        (
            ["cosine", {"kind": "step"}],
            "lr_schedule[1]: every is None and at is []; expected one of the two",
        ),
        (
            {"kind": "step", "every": 2, "at": [1]},
            "every is 2 and at is [1]; expected one of the two",
        ),
        (
            {"kind": "cosine", "lenght": 3},
            "lr_schedule: unknown key 'lenght'; did you mean 'length'",
        ),
        ({"kind": f"{__name__}:thirds", "path": "no.such:thing"}, "unknown key 'path'"),
        (lambda number, total: 1.0, "expected one that is defined at the top of a module"),
    ],
)
def test_a_mistake_is_one_line(wrong, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        LocalTraining(lr_schedule=wrong)
    assert "\n" not in str(error.value)


def test_a_function_that_is_not_there_or_does_not_fit_is_refused():
    """Before the first round; what it returns when it is asked."""
    for path, said in (
        ("no.such:thing", "there is no module 'no'"),
        (f"{__name__}:of_one", r"\(number: int\) -> float; expected \(number, total\)"),
        (f"{__name__}:TORCH", "expected a function"),
    ):
        settings = tiny_settings(local=LocalTraining(lr_schedule=path))
        with pytest.raises(ConfigError, match=said):
            make_task(tiny_federation(), FedAvg(), "linear", settings)
    local = LocalTraining(lr_schedule=negative)
    local.check_imports()
    with pytest.raises(
        ConfigError, match=r"returned -1.0 for \(0, 3\); expected a factor on the learning rate"
    ):
        local.learning_rates(torch.ones(1, 1).int(), 0, 3)


def test_a_task_that_does_not_know_the_number_of_rounds_says_so():
    task = build_task(tiny_federation().host(range(6)), "linear")
    local = LocalTraining(lr_schedule="cosine")
    with pytest.raises(ConfigError, match=r"runs over all rounds; expected Task\(rounds=...\)"):
        task.train(task.initial_models(Rng(0)), Rng(0), local)
    task.train(
        task.initial_models(Rng(0)),
        Rng(0),
        dataclasses.replace(local, lr_schedule={"kind": "cosine", "over": "steps"}),
    )


@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_a_run_has_the_rates_of_its_rounds_and_steps(engine):
    """SGD by hand on each client's batches: a warm-up over rounds times a line over the three steps of a training."""
    schedule = [{"kind": "warmup", "length": 2, "start": 0.5}, {"kind": "linear", "over": "steps"}]
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1, lr_schedule=schedule)
    settings = tiny_settings(rounds=3, local=local, engine=engine, evaluate="final")
    federation = tiny_federation()
    task = make_task(federation, Local(), "linear", settings)
    expected = []
    for row in range(6):
        weights = task.initial_models(Rng(3))[row].clone()
        x, y = federation.x[row, :12], federation.y[row, :12]
        for index, by_round in zip(range(-1, 3), (0.5, 0.5, 0.75, 1.0), strict=True):
            order = torch.from_numpy(
                Rng(3).at_round(index).generator("batches", row).permutation(12)
            )
            for batch, by_step in zip(order.split(5), (1, 2 / 3, 1 / 3), strict=True):
                weights.requires_grad_()
                outputs = x[batch] @ weights[:12].reshape(3, 4).T + weights[12:]
                (gradient,) = torch.autograd.grad(
                    functional.cross_entropy(outputs, y[batch]), weights
                )
                weights = weights.detach() - 0.1 * by_round * by_step * gradient
        expected.append(weights)
    result = simulate(federation, Local(), model="linear", settings=settings, seed=3)
    torch.testing.assert_close(result.params, torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_promises_of_methods_hold_with_schedules():
    """Repeats, resumes, any grouping of hosts, cohorts, and two trainings a round: see `check_method`."""
    schedule = [{"kind": "cosine", "length": 3}, {"kind": "linear", "over": "steps"}]
    local = dataclasses.replace(tiny_settings().local, lr_schedule=schedule)
    check_method(Ditto(), settings=tiny_settings(local=local), relabel=False)
    check_method(Random(2), settings=tiny_settings(local=local), relabel=False)


def test_a_run_is_made_longer_where_its_schedule_does_not_depend_on_its_length(tmp_path):
    """Four rounds and two more are six; a cosine over four rounds is not one over six."""

    def run(folder: str, rounds: int, schedule: str | dict, resume: bool = False):
        local = dataclasses.replace(tiny_settings().local, lr_schedule=schedule)
        settings = tiny_settings(rounds=rounds, local=local)
        where = tmp_path / folder
        simulate(
            tiny_federation(),
            FedAvg(),
            model="linear",
            settings=settings,
            folder=where,
            resume=resume,
        )
        return (where / checkpoint.FILE).read_bytes()

    steps = {"kind": "step", "every": 2}
    run("parts", 4, steps)
    assert run("parts", 6, steps, resume=True) == run("whole", 6, steps)
    run("cosine", 4, "cosine")
    with pytest.raises(CheckpointError, match="belongs to a run with other settings"):
        run("cosine", 6, "cosine", resume=True)


def test_a_study_file_says_it_and_reads_back_as_it_was():
    text = """
        [data]
        dataset = "digits"
        [local]
        optimizer = "adamw"
        lr_schedule = [{ kind = "warmup", length = 3 }, { kind = "cosine", end = 0.1 }]
        [[methods]]
        kind = "fedavg"
        [[methods]]
        kind = "local"
        optimizer = "torch.optim:NAdam"
        optimizer_options = { momentum_decay = 0.01 }
        lr_schedule = "none"
    """
    study = config.parse_study_text(text)
    first, second = (entry.settings.local for entry in study.methods)
    assert first.schedules == (WarmupSchedule(length=3), CosineSchedule(end=0.1))
    assert (second.schedules, second.optimizer_arguments) == ((), {"momentum_decay": 0.01})
    assert config.parse_study_text(config.format_study(study)) == study
    changed = config.parse_study_text(
        text, overrides=["local.lr_schedule=[{kind='step', every=2}]"]
    )
    assert changed.methods[0].settings.local.schedules == (StepSchedule(every=2),)


def test_the_hash_of_a_study_is_the_same_whether_a_default_is_said_or_not():
    """Stored studies say `weight_decay = 0.0`, which was the default."""
    head = '[data]\ndataset = "digits"\n[[methods]]\nkind = "fedavg"\n[local]\n'
    plain = config.parse_study_text(head)
    assert config.hash_study(
        config.parse_study_text(head + "weight_decay = 0.0")
    ) == config.hash_study(plain)
    assert config.hash_study(
        config.parse_study_text(head + "weight_decay = 0.1")
    ) != config.hash_study(plain)
    assert config.hash_study(
        config.parse_study_text(head + 'lr_schedule = "cosine"')
    ) != config.hash_study(plain)
    assert config.describe_difference(
        config.parse_study_text(head + 'lr_schedule = "cosine"'), plain
    ).startswith("local.lr_schedule is")


def test_an_own_schedule_is_imported_when_a_run_begins_and_not_when_it_is_read():
    """So that results are shown where its module is not."""
    module = types.ModuleType("away_from_here")
    assert "away_from_here" not in sys.modules
    local = LocalTraining(
        lr_schedule=f"{module.__name__}:schedule", optimizer="away_from_here:Lion"
    )
    assert local.needs_rounds
    with pytest.raises(ConfigError, match="there is no module 'away_from_here'"):
        local.check_imports()


def test_every_schedule_has_a_kind_and_a_summary():
    assert {"warmup", "linear", "cosine", "exponential", "step"} == set(SCHEDULES)
    assert all(one.summary for one in SCHEDULES.values())
