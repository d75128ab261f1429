"""Let something else happen when a task trains, for tests of what a run does meanwhile."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from coterie.engine.task import Task
from coterie.runtime.loop import Loop


def intercept_training(loop: Loop, function: Callable[..., Any]) -> None:
    """Call `function(train, params, rng, ...)` in place of the training of a loop's task and of its views."""

    class Intercepted(Task):
        def train(self, *arguments: Any, **options: Any) -> Any:
            return function(super().train, *arguments, **options)

    parts = {field.name: getattr(loop.task, field.name) for field in fields(loop.task)}
    loop._tasks = [(-1, Intercepted(**parts))]
