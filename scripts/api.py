"""Write docs/reference/api.md, the tables of public names; with --check, compare it.

    python scripts/api.py

The tables can be read where the repository is browsed. The last part is for the site, which shows
signatures and arguments in its place.
"""

import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from _pages import REFERENCE, write

import coterie
from coterie.methods import METHODS

HEAD = """<!-- made by scripts/api.py; do not edit -->
# Python

The names that most programs use. Names with one dot, such as `coterie.simulate`, are imported from `coterie`; the
others from the module named. Type checkers know the same names and the shapes of all tensors. `coterie` also has the
class of each [method](methods.md), such as `coterie.Dac`.
"""
SECTIONS = {
    "Run": ["simulate", "Run", "Settings", "LocalTraining", "Models", "load_models"],
    "Studies": [
        "load_study",
        "make_study",
        "run_study",
        "resume_study",
        "resume_plan",
        "run_sweep",
        "Study",
        "StudyConfig",
    ],
    "Data": [
        "from_arrays",
        "from_table",
        "from_folder",
        "from_dataset",
        "from_datasets",
        "from_leaf",
        "Split",
        "Federation",
        "TestSet",
        "Truth",
        "Source",
        "DataConfig",
        "build_federation",
    ],
    "Results": [
        "results.summary.summarize_study",
        "results.gains.compute_study_gains",
        "write_report",
        "plot",
        "results.graph",
        "report.trackers",
    ],
    "Custom methods, rules and data": [
        "Method",
        "PeerMethod",
        "Round",
        "State",
        "Task",
        "Rng",
        "Exchange",
        "Message",
        "Inbox",
        "InMemory",
        "Faulty",
        "data.plan.Shift",
        "functional.aggregation.ReceivedModels",
        "functional.selection.PeerKnowledge",
        "testing.check_method",
        "testing.check_model",
        "testing.check_shift",
        "testing.check_partition",
        "testing.check_aggregation",
        "testing.check_selection",
        "testing.check_transport",
    ],
    "Errors": ["errors"],
}
"""The names of each section, below `coterie`; of a module every public function and class is listed."""
SITE = """## Signatures

`help(coterie.simulate)` prints signatures and arguments; the site that `make site` builds has them below.
"""


def find_object(name: str) -> Any:
    """Return the object or module with a name below `coterie`."""
    if name in coterie.__all__:
        return getattr(coterie, name)
    module, _, last = f"coterie.{name}".rpartition(".")
    found = getattr(importlib.import_module(module), last, None)
    return importlib.import_module(f"coterie.{name}") if found is None else found


def summarize(thing: Any) -> str:
    """Return the first paragraph of a docstring, as one line."""
    paragraph = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def list_arguments(thing: Any) -> str:
    """Return the names of the arguments of a function, or of the fields of a dataclass."""
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing) if field.init]
    elif inspect.isfunction(thing):
        names = list(inspect.signature(thing).parameters)
    else:
        names = []
    return ", ".join(f"`{name}`" for name in names)


def iterate_rows(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the row of a name, or a row for each public member of a module."""
    thing = find_object(name)
    if not isinstance(thing, types.ModuleType):
        yield f"`coterie.{name}`", summarize(thing), list_arguments(thing)
        return
    for member, value in vars(thing).items():
        if not member.startswith("_") and getattr(value, "__module__", "") == thing.__name__:
            yield f"`coterie.{name}.{member}`", summarize(value), list_arguments(value)


def find_missing() -> set[str]:
    """Return the names that `coterie` exports and no section has."""
    listed = {name for names in SECTIONS.values() for name in names}
    methods = {method.__name__ for method in METHODS.values()}
    return set(coterie.__all__) - listed - methods - {"METHODS", "CoterieError", "__version__"}


def page() -> str:
    """Return the page."""
    lines, directives = [HEAD], []
    for title, names in SECTIONS.items():
        lines += [f"## {title}", "", "| name | what it is | arguments or fields |", "|---|---|---|"]
        for name in names:
            lines += [f"| {' | '.join(row)} |" for row in iterate_rows(name)]
            directives.append(f"::: coterie.{name}")
        lines.append("")
    return "\n".join([*lines, SITE, *directives]) + "\n"


def pages() -> dict[Any, str]:
    """Return the generated page by its path."""
    return {REFERENCE / "api.md": page()}


if __name__ == "__main__":
    sys.exit(write(pages()))
