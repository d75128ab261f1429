"""The engines of a plan's runs: chosen once, by the work of all of them, and stored with the plan.

Runs that share a graph share its program, so what it saves is summed over them: all methods, seeds
and points of a sweep with the same model, whether a store has some of their results or not. The
choice follows from the settings and from the data of the first seed of each point alone, so that a
plan and its repetition agree anywhere.
"""

import json
from collections.abc import Container, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from coterie._util import manifest
from coterie.engine import EngineChoice, LoopEngine, choose_engine
from coterie.engine.task import Task, Workload
from coterie.runtime import checkpoint
from coterie.runtime.settings import Settings

FILE = "engines.json"
"""The file of a study with the engine of each method, by label."""


K = TypeVar("K", bound=Hashable)


class PlanWork(Generic[K]):
    """How much the runs of a plan train, by the graph of what they train."""

    def __init__(self) -> None:
        # One module of each graph: the others are equal, and may be large.
        self._modules: dict[str, tuple[LoopEngine, Tensor, Tensor]] = {}
        self._runs: dict[str, list[Workload]] = {}
        self._methods: dict[K, tuple[str, Workload, str]] = {}

    def add_method(self, key: K, task: Task, settings: Settings, seeds: int, model: object) -> None:
        """Add the runs of a method of a study, unless its settings name an engine.

        Args:
            key: of the method.
            task: of one of its runs, with the loop engine.
            settings: of its runs.
            seeds: how many runs there are; the data of all have the size of the task's.
            model: what says which module it is, such as the settings of a study's model.
        """
        loop = task.engine
        if settings.engine != "auto" or settings.portable or not isinstance(loop, LoopEngine):
            return
        x, y = task.data.make_trial_batch()
        # Methods may change the module, as SosicFL does, which its text and its tensors show.
        tensors = [(slot.name, slot.shape) for slot in task.layout.slots]
        graph = repr(
            (model, str(task.layout.train_module), tensors, [*task.layout.frozen], loop.objective,
             task.dtype, x.shape, y.shape, y.dtype, task.device, settings.precision)
        )  # fmt: skip
        work = Workload.of_run(
            settings.local, settings.rounds, task.data.federation, settings.participation
        )
        self._modules.setdefault(graph, (loop, x, y))
        self._runs.setdefault(graph, []).extend([work] * seeds)
        self._methods[key] = graph, work, settings.precision

    def choose_engines(self, stored: Container[K] = ()) -> dict[K, EngineChoice]:
        """Return the engine of each method; one with a stored engine counts, but is left out."""
        known: dict[tuple[str, Workload], EngineChoice] = {}
        found = {}
        for key, (graph, own, precision) in self._methods.items():
            if key in stored:
                continue
            work = own.in_plan(self._runs[graph])
            # To record a graph takes as long as a short run, so it is done once.
            same = graph, work
            if same not in known:
                known[same] = choose_engine(*self._modules[graph], work, precision)
            found[key] = known[same]
        return found


def load_choices(folder: Path) -> dict[str, EngineChoice]:
    """Return the engines that the study in a folder has begun with, by label.

    A study that is continued, with more seeds too, keeps them. One that was begun before plans
    stored them has the engines of its runs.
    """
    if not manifest.describe_fault(folder, FILE):
        stored = json.loads((folder / FILE).read_text("utf-8"))
        return {label: EngineChoice(**one) for label, one in stored.items()}
    found = {}
    for run in sorted(folder.glob("*/seed-*")):
        if name := checkpoint.load_engine_name(run):
            choice = EngineChoice(name, checkpoint.load_engine_reason(run))
            found.setdefault(run.parent.name, choice)
    return found


def format_choices(choices: Mapping[str, EngineChoice]) -> str:
    """Return the text of the file."""
    return json.dumps({label: asdict(one) for label, one in choices.items()}, indent=1) + "\n"
