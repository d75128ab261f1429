"""Write docs/reference/tasks.md, what can be trained, from the programs in examples/; with --check, compare it.

    python scripts/tasks.py

Each example is run up to its call of `simulate`; each engine is then made for what it asks to
train. Native programs are compiled for this, which takes minutes where they are not in the cache.
"""

import re
import runpy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _pages import REFERENCE, ROOT, table, write
from torch import nn

import coterie
from coterie.engine import ENGINES
from coterie.errors import CoterieError, ModelError
from coterie.functional.losses import LOSSES
from coterie.functional.metrics import REGISTRY
from coterie.runtime.task import make_task

MADE = "<!-- made by scripts/tasks.py; do not edit -->\n"
EXAMPLES = tuple(sorted((ROOT / "examples").glob("*.py")))
LONG = 1_000_000  # rounds of a run that is worth compiling for
WORDS = {
    "images": "images, one class each",
    "multi_label": "several yes or no a sample",
    "pictures": "pictures of several sizes",
    "regression": "two numbers",
    "segmentation": "a class for each pixel",
    "survival": "times of events, censored",
    "table": "a table with text and empty cells",
    "tokens_gru": "tokens of texts that end",
    "tokens_transformer": "tokens",
    "two_inputs": "a picture and numbers",
}
MODELS = {
    "images": "residual network, BatchNorm",
    "multi_label": "linear layers, BatchNorm",
    "pictures": "`cnn-b`",
    "regression": "linear layers",
    "segmentation": "convolutions",
    "survival": "linear",
    "table": "linear layers",
    "tokens_gru": "embedding, GRU",
    "tokens_transformer": "embedding, transformer",
    "two_inputs": "convolution and linear layers, two arguments",
}


class _AskedError(Exception):
    """Carries what an example asks to train."""


@dataclass(frozen=True)
class Asked:
    """The arguments of a call of `simulate`."""

    federation: Any
    method: Any
    model: Any
    settings: Any


def asked(path: Path) -> Asked:
    """Return what an example asks to train, without training it."""

    def simulate(federation: Any, method: Any, *, model: Any, settings: Any) -> None:
        raise _AskedError(Asked(federation, method, model, settings))

    own = coterie.__dict__.get("simulate")
    coterie.__dict__["simulate"] = simulate
    try:
        runpy.run_path(str(path))
    except _AskedError as found:
        return found.args[0]
    finally:
        del coterie.__dict__["simulate"]
        if own is not None:
            coterie.__dict__["simulate"] = own
    raise ValueError(f"{path} does not call coterie.simulate")


def lines(path: Path) -> int:
    """Return how many lines of an example are Coterie's: those after its comment that says so."""
    own = path.read_text(encoding="utf-8").partition("# Coterie\n")[2]
    return sum(bool(line.strip()) for line in own.splitlines())


def engines(what: Asked) -> dict[str, str]:
    """Return, by engine, "yes" or why it does not train this."""
    found = {}
    for name in ENGINES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            settings = replace(what.settings, engine=name, rounds=LONG)
            try:
                engine = make_task(what.federation, what.method, what.model, settings).engine
            except ModelError as error:
                found[name] = str(error)
                continue
        found[name] = "yes" if engine.name == name else engine.reason
    return found


def reason(found: str) -> str:
    """Return why an engine is not the one that was asked for, in the words of the reason of the one that runs."""
    text = found.partition(": ")[2].removeprefix("the module cannot be compiled: ")
    return re.sub(r"\s+", " ", text.partition("; ")[0]).replace("|", "\\|")


def chosen(what: Asked) -> str:
    """Return the engine that "auto" takes for a long run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = replace(what.settings, engine="auto", rounds=LONG)
        return make_task(what.federation, what.method, what.model, settings).engine.name


# ---------------------------------------------------------------- what is refused


def _small(x: Any = None, y: Any = None, **more: Any) -> Any:
    x = torch.randn(24, 4) if x is None else x
    return coterie.from_arrays(
        x, torch.arange(24) % 3 if y is None else y, clients=torch.arange(24) % 2, **more
    )


def _run(federation: Any, model: Any = "linear", method: str = "fedavg", **settings: Any) -> None:
    coterie.simulate(
        federation,
        coterie.METHODS[method](),
        model=model,
        settings=coterie.Settings(rounds=1, **settings),
    )


REFUSED: dict[str, Callable[[], object]] = {
    "0 and 1 in several columns, without a loss": lambda: _run(
        _small(y=(torch.arange(96).reshape(24, 4) % 2).float())
    ),
    "whole numbers at several positions, without a loss": lambda: _run(
        _small(y=torch.arange(96).reshape(24, 4))
    ),
    "a metric that does not fit the loss": lambda: _run(_small(), metrics=["r2"]),
    "fewer outputs than classes": lambda: _run(_small(), nn.Linear(4, 2)),
    "a method that compares class counts, without classes": lambda: _run(
        _small(y=torch.randn(24)), method="sosicfl"
    ),
    "an optimizer that is not elementwise": lambda: _run(
        _small(), local=coterie.LocalTraining(optimizer="torch.optim:LBFGS")
    ),
    "NaN in the inputs": lambda: _small(torch.full((24, 4), torch.nan)),
    "whole numbers beyond 2^24 as inputs": lambda: _small(torch.full((24, 4), 1 << 25)),
}


def refused() -> list[tuple[str, str]]:
    """Return what is refused, and the message."""
    found = []
    for what, call in REFUSED.items():
        try:
            with torch.random.fork_rng():
                call()
        except CoterieError as error:
            found.append((what, re.sub(r"\s+", " ", str(error)).replace("|", "\\|")))
        else:
            raise ValueError(f"not refused: {what}")
    return found


def left(text: str) -> str:
    """Return a Markdown table with its columns of text on the left."""
    return text.replace("---:", "---")


def page() -> str:
    """Return the page."""
    rows, notes = [], []
    for path in EXAMPLES:
        name, what = path.stem, asked(path)
        found = engines(what)
        task = make_task(
            what.federation, what.method, what.model, replace(what.settings, engine="loop")
        )
        for engine, why in found.items():
            if why != "yes":
                notes.append(f"* `{name}`, engine `{engine}`: {reason(why)}.")
        shown = [REGISTRY[one].title for one in task.engine.metrics[1:]] + [
            one.title for one in task.evaluator.metrics
        ]
        rows.append(
            (
                f"{WORDS[name]} (`{path.name}`)",
                MODELS[name],
                f"`{task.trainer.loss.kind}`",
                ", ".join(shown) or "-",
                *("yes" if found[engine] == "yes" else "no" for engine in ENGINES),
                f"`{chosen(what)}`",
                lines(path),
            )
        )
    head = (
        "task",
        "model",
        "loss",
        "metrics",
        *(f"`{engine}`" for engine in ENGINES),
        "`auto` takes",
        "lines",
    )
    losses = [(f"`{name}`", one.summary) for name, one in LOSSES.items()]
    of_outputs = [one for one in REGISTRY.values() if one.function is not None]
    metrics = [(f"`{one.name}`", one.title, one.text) for one in of_outputs]
    return "\n".join(
        [
            "# What can be trained",
            "",
            MADE,
            "Any module whose loss can be written as a function of its outputs and the targets. Each row is a",
            "program of `examples/`: its task, which engines train it, which one `auto` takes for a long run, and how",
            "many lines of the program are Coterie's; the others make the data and the module.",
            "",
            left(table(head, rows)),
            "",
            *notes,
            "",
            "An engine that cannot run a module is never used for it: the run says so at its start, and names the",
            "one that trains. Optimizers with a name (`sgd`, `adam`, `adamw`, `rmsprop`, `adagrad`) run in every",
            "engine, others by import path in `loop` alone.",
            "",
            "## Losses",
            "",
            left(table(("`loss`", "for"), losses)),
            "",
            "Your own: [a loss](../how-to/own-loss.md).",
            "",
            "## Metrics",
            "",
            left(table(("`metrics`", "shown as", "what it is"), metrics)),
            "",
            "Your own: [a metric](../how-to/own-metric.md).",
            "",
            "## What is refused",
            "",
            "In one line, before the first round:",
            "",
            left(table(("what", "message"), refused())),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(write({REFERENCE / "tasks.md": page()}))
