"""Whole runs of the models of `zoo` next to a lean loop that trains, averages and validates the same.

Both validate the first model of each client and all later ones, and test the last one.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo import Entry

from coterie import FedAvg, Settings, simulate
from coterie.data.federation import Federation, TestSet
from coterie.engine import EngineChoice
from coterie.engine.task import LocalTraining
from coterie.runtime.task import make_task
from coterie.studies.engine_choice import PlanWork

TRAIN, VALIDATION, BATCH = 128, 32, 32
LONGEST = 100  # seconds of the lean loop, above which a cell is left out
ENOUGH = 20  # seconds of the lean loop in all turns of a cell
STUDY = 40  # runs of a study; what is built is built for all


def judge(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Measure the loss and the accuracy of a model."""
    with torch.no_grad():
        outputs = model.eval()(x)
        float(functional.cross_entropy(outputs, y))
        float((outputs.argmax(1) == y).float().mean())


def measure_runs(
    name: str,
    entry: Entry,
    rounds: int,
    clients: int,
    turns: int,
    make: Callable[[Entry], nn.Module],
    train: Callable[[nn.Module, Tensor, Tensor, int, str], None],
) -> dict[str, Any]:
    """Return how long runs take, alone and as one of a study, in units of a lean loop.

    Native programs are compiled before, as those of a study are for all but its first run. Times are
    medians of turns in which all sides run; `processor` compares processor time, which other
    processes on the machine do not make longer.

    Args:
        name: of the model.
        entry: the model.
        rounds: of a run.
        clients: how many.
        turns: of which times are medians; fewer where they take long.
        make: returns a new module.
        train: trains a module for an epoch in plain PyTorch: (module, x, y, batch, form of Adam).
    """
    number = TRAIN + VALIDATION
    x, y = entry.data(clients * number, torch.Generator().manual_seed(0))
    x, y = x.unflatten(0, (clients, number)), y.unflatten(0, (clients, number))
    ids = torch.arange(clients)
    split = (torch.arange(number) >= TRAIN).long().expand(clients, -1)
    test_x, test_y = entry.data(VALIDATION, torch.Generator().manual_seed(1))
    data = Federation(
        x=x, y=y, split=split, tests=(TestSet(test_x, test_y, "all"),), test_of=torch.zeros_like(ids), ids=ids, population=clients,
        classes=entry.classes,
    )  # fmt: skip
    local = LocalTraining(batch_size=BATCH, optimizer="adam", lr=1e-3)

    settings = Settings(rounds=rounds, local=local, warmup_epochs=0, check=False, evaluate="final")
    plan, method = PlanWork[str](), FedAvg()
    task = make_task(data, method, entry.make, replace(settings, engine="loop"))
    plan.add_method(name, task, settings, STUDY, name)
    of_study = plan.choose_engines()[name]

    def run(plan_engine: EngineChoice | None = None) -> str:
        return simulate(
            data, method, model=entry.make, settings=settings, plan_engine=plan_engine
        ).engine

    def lean() -> None:
        module = make(entry)
        for own_x, own_y in zip(x, y, strict=True):
            judge(module, own_x[TRAIN:], own_y[TRAIN:])
        for _ in range(rounds):
            models = [copy.deepcopy(module) for _ in range(clients)]
            for model, own_x, own_y in zip(models, x, y, strict=True):
                train(model.train(), own_x[:TRAIN], own_y[:TRAIN], BATCH, "foreach")
                judge(model, own_x[TRAIN:], own_y[TRAIN:])
            states = [model.state_dict() for model in models]
            module.load_state_dict(
                {k: sum(state[k] for state in states) / clients for k in states[0]}
            )
        judge(module, test_x, test_y)

    sides: dict[str, Callable[[], object]] = {
        "lean": lean,
        "alone": run,
        "in a study": lambda: run(of_study),
    }
    seconds = math.inf
    for _ in range(3):  # the first training loads parts of PyTorch
        began = time.perf_counter()
        train(make(entry), x[0, :TRAIN], y[0, :TRAIN], BATCH, "foreach")
        seconds = min(seconds, (time.perf_counter() - began) * clients * rounds)
    if seconds > LONGEST:
        return {
            "model": name, "clients": clients, "rounds": rounds,
            "skipped": f"the lean loop would take about {seconds:.0f} s",
        }  # fmt: skip
    # What is compiled is compiled before, in short runs.
    alone = PlanWork[str]()
    alone.add_method(name, task, settings, 1, name)
    built = [alone.choose_engines()[name], of_study]
    for chosen in built:
        simulate(
            data, method, model=entry.make, settings=replace(settings, rounds=1), plan_engine=chosen
        )
    engines = dict(zip(sides, ["lean", *(chosen.reason for chosen in built)], strict=True))
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(max(1, min(turns, round(ENOUGH / seconds)))):
        for side, function in sides.items():
            began, used = time.perf_counter(), time.process_time()
            function()
            times[side].append((time.perf_counter() - began, time.process_time() - used))
    found: dict[str, Any] = {
        "model": name,
        "clients": clients,
        "rounds": rounds,
        "engines": engines,
    }
    found["seconds"] = {side: statistics.median(t for t, _ in own) for side, own in times.items()}
    for which, place in (("times lean", 0), ("processor", 1)):
        found[which] = {
            side: statistics.median(
                a[place] / b[place] for a, b in zip(times["lean"], own, strict=True)
            )
            for side, own in times.items()
        }
    return found
