"""Which tests `make test` runs: one method of each family, and one case where many say the same.

`make test` runs what is marked neither `full` nor `slow`; `make test-more`, which `.ci/run` runs
as well, what is marked `full`; `make test-all` everything. What notices a fault of `tests/mutants`
is in `make test`: `tests/unit/scripts/test_mutants.py` checks it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

FAMILIES: dict[str, Sequence[str]] = {
    # peers that exchange once in a round
    "dac": ["dac-no-two-hop", "dac-var", "dfedalt", "fix-topology", "oracle", "pens", "random"],
    # peers that exchange several times
    "panm-grad": ["panm-loss"],
    # a server with one model
    "fedavg": ["fairavg", "fedavgm", "fedprox", "per-fedavg"],
    # a server with a model for each cluster
    "ifca": ["cfl", "feddrift", "fedgwc", "fesem", "one-shot"],
    # a server and a personal model on each client
    "ditto": ["apfl", "pfedme"],
    # a server, and layers that stay on the client
    "fedper": ["fedbn", "fedrep"],
    # nobody
    "local": ["pooled"],
    # a server with a simplex of models
    "sosicfl": ["sosicfl-all", "sosicfl-plus"],
}
"""The methods that each family's representative stands for in `make test`.

A method that is not listed, such as a new one, stands for itself.
"""
STOOD_FOR = {kind for kinds in FAMILIES.values() for kind in kinds}


def full(*values: Any, slow: bool = False, id: str | None = None) -> Any:
    """Return a case of a parametrized test that `make test` leaves out.

    Args:
        values: the case's values.
        slow: leave it out of `make test-more` too.
        id: the case's name.
    """
    return pytest.param(*values, marks=pytest.mark.slow if slow else pytest.mark.full, id=id)


def one_of_each_family(
    cases: Iterable[Any], *, also: Sequence[str] = (), only: Sequence[str] = (), slow: bool = False
) -> list[Any]:
    """Return cases of which `make test` runs the first of each family's representative.

    Args:
        cases: kinds of methods, or tuples that begin with one.
        also: further kinds that `make test` runs, because they notice a fault of `tests/mutants`.
        only: the representatives that `make test` runs, where a case takes seconds and the others
            notice no fault that these do not; `make test-more` has the others. A method of no family
            runs in both.
        slow: leave the others of a family out of `make test-more` too.
    """
    seen: set[str] = set()
    chosen = []
    for case in cases:
        values = (case,) if isinstance(case, str) else case
        kind = values[0]
        is_first = kind not in seen and (kind not in STOOD_FOR or kind in also)
        seen.add(kind)
        is_new = kind not in FAMILIES and kind not in STOOD_FOR
        if is_first and (not only or kind in only or is_new):
            chosen.append(case)
        else:
            chosen.append(full(*values, slow=slow and not is_first))
    return chosen


def first_only(cases: Iterable[Any], count: int = 1, *, slow: bool = False) -> list[Any]:
    """Return cases of which `make test` runs the first ones.

    Args:
        cases: values of one parameter, or tuples of several.
        count: how many `make test` runs.
        slow: leave the others out of `make test-more` too.
    """
    chosen = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        if isinstance(case, type(pytest.param())):  # one that `full` has made
            values = case.values
        chosen.append(case if number < count else full(*values, slow=slow))
    return chosen
