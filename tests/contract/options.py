"""The options of the package, the tests that name their values, and a pytest plugin that has values ignored.

A test that works a value of an option by hand says so: `@pytest.mark.option("Dac.two_hop_relay",
"direct", "any")`. Loaded as a plugin (`-p tests.contract.options`), this module runs such tests
once for each value they name, with a package that takes that value for another: the test has to
fail, or it says nothing of the value.
"""

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

TESTS = Path(__file__).resolve().parents[1]
Option = tuple[str, str]
"""The class that declares an option, and its name."""


def values(hint: Any) -> list[Any]:
    """Return the values of a literal or boolean annotation, or of a list of them; none for others.

    Example:
        >>> values(bool), values(Literal["a", "b"] | None), values(Sequence[Literal["c"]]), values(float | None)
        ([False, True], ['a', 'b', None], ['c'], [])
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return [False, True]
    if origin is Literal:
        return list(inner)
    if origin in (types.UnionType, typing.Union):
        found = [value for part in inner for value in values(part)]
        return found + [None] * bool(found and type(None) in inner)
    listed = isinstance(origin, type) and issubclass(origin, Sequence)
    return values(inner[0]) if origin is Annotated or listed else []


def configured() -> dict[str, type[Any]]:
    """Return the classes with options by name: methods and what they extend, settings, local training, data, shifts."""
    from coterie._util.settings import Configurable
    from coterie.data.build import DataConfig
    from coterie.data.shifts import SHIFTS
    from coterie.engine.optim import LocalTraining
    from coterie.engine.schedules import SCHEDULES
    from coterie.methods import METHODS, registry
    from coterie.runtime.settings import Settings

    published = [registry.find_published(method) for method in METHODS.values()]
    every = [
        *METHODS.values(),
        *filter(None, published),
        *SHIFTS.values(),
        *SCHEDULES.values(),
        Settings,
        LocalTraining,
        DataConfig,
    ]
    return {
        base.__name__: base
        for cls in every
        for base in cls.__mro__
        if issubclass(base, Configurable) and dataclasses.is_dataclass(base)
    }


def options() -> dict[Option, list[Any]]:
    """Return the values of every literal or boolean option; its default comes first.

    An option belongs to the class that declares it. A class that has another default, or fixes the
    value, has that one as an option of its own.
    """
    from coterie._util.settings import settable_fields
    from coterie.engine import ENGINE_NAMES
    from coterie.engine.optim import OPTIMIZERS
    from coterie.functional.metrics import GROUPS, REGISTRY

    known: dict[Option, list[Any]] = {  # declared as texts
        ("Settings", "engine"): list(ENGINE_NAMES),
        ("LocalTraining", "optimizer"): ["adam", *(name for name in OPTIMIZERS if name != "adam")],
        ("Settings", "metrics"): [
            *(one.name for one in REGISTRY.values() if one.on_request),
            *GROUPS,
        ],
    }
    for name, cls in configured().items():
        above: dict[str, Any] = {}
        for base in filter(dataclasses.is_dataclass, cls.__bases__):
            above |= settable_fields(base)
        for key, hint in (above | settable_fields(cls)).items():
            choices, default = known.get((name, key)) or values(hint), vars(cls).get(key)
            if choices and key in above and key in vars(cls):
                # a subclass may take more values than the class above
                more = [one for one in choices if one not in values(above[key])]
                known[name, key] = [default, *more]
            elif choices and key not in above:
                known[name, key] = [default] * (default in choices) + [
                    one for one in choices if one != default
                ]
    return known


def read_mark(names: str | Sequence[str], *known: Any) -> Iterator[tuple[Option, tuple[Any, ...]]]:
    """Yield each option that a mark names, and the values: several options may share them."""
    for name in [names] if isinstance(names, str) else names:
        owner, _, field = name.partition(".")
        yield (owner, field), known


def marked(tests: Path = TESTS) -> dict[tuple[str, str], list[tuple[Any, str]]]:
    """Return what the tests say of options, read from their text: values and where, by class and name."""
    found: dict[Option, list[tuple[Any, str]]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.option(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.option":
                where = f"{path.relative_to(tests.parent)}:{node.lineno}"
                for option, known in read_mark(*map(ast.literal_eval, node.args)):
                    found.setdefault(option, []).extend((value, where) for value in known)
    return found


# ---------------------------------------------------------------- the plugin


class Ignoring:
    """Stands in for a field of a dataclass: reads another value where one is set."""

    def __init__(self, name: str, default: Any, value: Any, other: Any) -> None:
        self.name, self.default, self.value, self.other = name, default, value, other

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        """Return what is set, unless it is the value to ignore."""
        if instance is None:
            return self.default
        found = instance.__dict__.get(self.name, self.default)
        if isinstance(found, tuple):
            return tuple(one for one in found if one != self.value) or (self.other,)
        return self.other if type(found) is type(self.value) and found == self.value else found

    def __set__(self, instance: Any, value: Any) -> None:
        """Keep what is set."""
        instance.__dict__[self.name] = value


SAME: dict[Option, dict[Any, Any]] = {("PublishedSimplex", "preset"): {"paper": "coterie"}}
"""Values that mean the same as another one: neither can be noticed when it is taken for the other."""

Case = tuple[str, str, Any, Any]
"""Class, name of the option, the value to ignore and the one that is taken for it."""
noticed: dict[tuple[str, Case], str] = {}
"""What came of each test of each case: "noticed", "passed", or the error that is no failed assertion."""


def cases(
    known: Mapping[Option, Sequence[Any]], owner: str, name: str, chosen: Sequence[Any]
) -> Iterator[Case]:
    """Yield what is taken for each chosen value: the default, and for the default each other value.

    What is in a list is left out of it. For the default of a class that changes it, it is that of
    the class above.
    """
    same = SAME.get((owner, name), {})
    first, *others = (value for value in known[owner, name] if value not in same)
    if not others:
        above = next(
            base for base in configured()[owner].__mro__[1:] if (base.__name__, name) in known
        )
        others = [known[above.__name__, name][0]]
    for value in chosen:
        if isinstance(vars(configured()[owner]).get(name), tuple):
            yield owner, name, value, others[0]
        elif value not in same:
            is_first = value == first and type(value) is type(first)
            yield from ((owner, name, value, other) for other in (others if is_first else [first]))


@pytest.fixture(scope="session", autouse=True)
def ignored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the package ignore a value while a test runs."""
    if not hasattr(request, "param"):  # a test that names no value
        yield
        return
    owner, name, value, other = request.param
    cls = configured()[owner]
    places = [
        cls,
        *(sub for sub in configured().values() if cls in sub.__mro__[1:] and name in vars(sub)),
    ]
    before = {place: vars(place).get(name, dataclasses.MISSING) for place in places}
    for place, default in before.items():
        setattr(place, name, Ignoring(name, default, value, other))
    yield
    for place, default in before.items():
        delattr(place, name) if default is dataclasses.MISSING else setattr(place, name, default)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each value that it names."""
    known = options()
    listed = [
        case
        for mark in metafunc.definition.iter_markers("option")
        for option, chosen in read_mark(*mark.args)
        for case in cases(known, *option, chosen)
    ]
    if listed:
        metafunc.parametrize(
            "ignored",
            listed,
            ids=[f"{c}.{n}={v!r} as {o!r}" for c, n, v, o in listed],
            indirect=True,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Note what a test says of a package that ignores a value."""
    from beartype.roar import BeartypeCallHintViolation

    from coterie.errors import CoterieError
    from coterie.methods import METHODS

    place = pyfuncitem.nodeid.partition("[")[0], pyfuncitem.callspec.params["ignored"]
    if noticed.get(place) == "noticed":  # with other parameters
        return True
    method = METHODS.get(pyfuncitem.callspec.params.get("kind", ""))
    if method and not issubclass(method, configured()[place[1][0]]):
        return True  # a test of a method that has no such option
    try:
        pyfuncitem.obj(
            **{
                name: pyfuncitem.funcargs[name]
                for name in inspect.signature(pyfuncitem.obj).parameters
            }
        )
        outcome = "passed"
    except (CoterieError, BeartypeCallHintViolation) as error:  # refused before it could be ignored
        outcome = f"{type(error).__name__}: {error}".partition("\n")[0]
    except (Exception, pytest.fail.Exception):
        outcome = "noticed"
    noticed[place] = outcome
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that do not notice."""
    for (test, (owner, name, value, other)), outcome in noticed.items():
        if outcome != "noticed":
            terminalreporter.write_line(
                f"NOT NOTICED {test}: {owner}.{name} = {value!r} taken for {other!r}: {outcome}"
            )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail when a test does not notice."""
    if any(outcome != "noticed" for outcome in noticed.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
