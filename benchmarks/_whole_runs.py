"""Whole runs of the models of `zoo` next to a lean loop that trains, averages and validates the same."""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from zoo import Entry

from coterie import FedAvg, Settings, simulate
from coterie.data.federation import Federation
from coterie.engine.task import LocalTraining

CLIENTS, TRAIN, VALIDATION, BATCH, TURNS = 8, 128, 32, 32, 3
STUDY = 40  # runs of a study; what is built is built for all


def measure_runs(
    name: str,
    entry: Entry,
    rounds: int,
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
        make: returns a new module.
        train: trains a module for an epoch in plain PyTorch: (module, x, y, batch, form of Adam).
    """
    number = TRAIN + VALIDATION
    x, y = entry.data(CLIENTS * number, torch.Generator().manual_seed(0))
    x, y = x.unflatten(0, (CLIENTS, number)), y.unflatten(0, (CLIENTS, number))
    ids = torch.arange(CLIENTS)
    split = (torch.arange(number) >= TRAIN).long().expand(CLIENTS, -1)
    data = Federation(
        x=x, y=y, split=split, tests=(), test_of=torch.zeros_like(ids), ids=ids, population=CLIENTS,
        classes=entry.classes,
    )  # fmt: skip
    local = LocalTraining(batch_size=BATCH, optimizer="adam", lr=1e-3)
    settings = Settings(rounds=rounds, local=local, warmup_epochs=0, check=False, evaluate="final")

    def run(plan_runs: int) -> str:
        return simulate(
            data, FedAvg(), model=entry.make, settings=settings, plan_runs=plan_runs
        ).engine

    def lean() -> str:
        module = make(entry)
        for _ in range(rounds):
            models = [copy.deepcopy(module) for _ in range(CLIENTS)]
            for model, own_x, own_y in zip(models, x, y, strict=True):
                train(model.train(), own_x[:TRAIN], own_y[:TRAIN], BATCH, "foreach")
                with torch.no_grad():
                    outputs = model.eval()(own_x[TRAIN:])
                    float(functional.cross_entropy(outputs, own_y[TRAIN:]))
                    float((outputs.argmax(1) == own_y[TRAIN:]).float().mean())
            states = [model.state_dict() for model in models]
            module.load_state_dict(
                {k: sum(state[k] for state in states) / CLIENTS for k in states[0]}
            )
        return "lean"

    sides = {"lean": lean, "alone": lambda: run(1), "in a study": lambda: run(STUDY)}
    engines = {side: function() for side, function in sides.items()}
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(TURNS):
        for side, function in sides.items():
            began, used = time.perf_counter(), time.process_time()
            function()
            times[side].append((time.perf_counter() - began, time.process_time() - used))
    found: dict[str, Any] = {"model": name, "rounds": rounds, "engines": engines}
    found["seconds"] = {side: statistics.median(t for t, _ in own) for side, own in times.items()}
    for which, place in (("times lean", 0), ("processor", 1)):
        found[which] = {
            side: statistics.median(
                a[place] / b[place] for a, b in zip(times["lean"], own, strict=True)
            )
            for side, own in times.items()
        }
    return found
