"""Methods by name: built in, offered by an installed package, or anywhere that can be imported.

A package offers a method under a short name by an entry point in the group "coterie.methods":

    [project.entry-points."coterie.methods"]
    ring = "ring_package.ring:Ring"
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from coterie._util.importing import import_class, name_module
from coterie._util.mappings import drop_keys
from coterie._util.settings import WithPresets, accepts, settable_fields
from coterie.engine.task import Task
from coterie.errors import ConfigError, describe_unknown
from coterie.methods import METHODS
from coterie.methods.base import Method, Round, State
from coterie.rng import Rng

GROUP = "coterie.methods"

PUBLISHED = {
    "dac": "coterie.papers.dac:PublishedDac",
    "dac-var": "coterie.papers.dac:PublishedDacVar",
    "dac-no-two-hop": "coterie.papers.dac:PublishedDacNoTwoHop",
    "fedgwc": "coterie.papers.fedgwc:PublishedFedGwc",
    "sosicfl": "coterie.papers.sosicfl:PublishedSosicFl",
    "sosicfl-all": "coterie.papers.sosicfl:PublishedSosicFlAll",
    "sosicfl-plus": "coterie.papers.sosicfl:PublishedSosicFlPlus",
}
"""Import paths of built-in methods' subclasses with the options of published code, by kind."""


def find_method(kind: str, package: str = "") -> type[Method]:
    """Return the class of a method. Its module is imported, which runs the code in it.

    Args:
        kind: a name in METHODS, one that an installed package offers, or an import path,
            "package.module:Ring".
        package: what to install when it is not there, where that is known, such as
            "ring-package==1.0".

    Raises:
        ConfigError: when there is no such method, or what is there is none.

    Example:
        >>> find_method("dac").__name__, find_method("coterie.methods.local:Local").__name__
        ('Dac', 'Local')
    """
    if kind in METHODS:
        return METHODS[kind]
    if ":" in kind:
        return _import_method(kind, f"method {kind!r}", package)
    offers = list_installed()
    # This message first: the package is known, so its name helps more than similar names.
    if kind not in offers and package:
        raise ConfigError(
            f"method {kind!r} is of a package that is not installed; install {package}"
        )
    if kind not in offers:
        raise ConfigError(describe_unknown("method", kind, {*METHODS, *offers}))
    first, *others = offers[kind]
    if others:
        raise ConfigError(
            f"method {kind!r} is offered by "
            f"{' and by '.join(map(_describe_origin, offers[kind]))}; say which by its import "
            f"path, such as {first.value!r}"
        )
    return _import_method(first.value, f"method {kind!r} of {_describe_origin(first)}", package)


def find_published(method: type[Method]) -> type[Method] | None:
    """Return the class of a method's kind with the options of published code, or None."""
    path = PUBLISHED.get(method.kind, "")
    # Another class of the same kind, from elsewhere, has no published options.
    built_in = METHODS.get(method.kind) is method
    if not path or not (built_in or path == f"{method.__module__}:{method.__qualname__}"):
        return None
    return _import_method(path, f"method {method.kind!r}", "")


_GIVEN = "_given_settings"


def resolve_class(
    method: type[Method], table: Mapping[str, Any]
) -> tuple[type[Method], dict[str, Any]]:
    """Return the class that takes a table of settings, and what it takes of the table.

    A table that sets an option of published code to another value than its default takes the class
    with these options. A table that sets them all to their defaults, as stored configurations do,
    takes the method itself, which always behaves so; the options are left out.

    Args:
        method: the class of the table's kind.
        table: the settings by name; other keys are kept.
    """
    published = find_published(method)
    if published is None or published is method:
        return method, dict(table)
    # Settings that both have but with other bounds or choices are wider in the published class.
    own, more = settable_fields(method), settable_fields(published)
    extra = {key: value for key, value in table.items() if key in more and key not in own}
    wider = [key for key in table if key in own and own[key] != more[key]]
    # Needed where an extra option is off its default, or a common one has a value that only the
    # published class accepts.
    needed = [key for key, value in extra.items() if value != getattr(published, key)]
    for key in wider:
        if accepts(table[key], more[key]) and not accepts(table[key], own[key]):
            needed.append(key)
    if needed:
        return published, dict(table)
    return method, drop_keys(table, extra)


def with_published_options(method: Method) -> Method:
    """Return a method with the options of published code at their defaults, if its kind has any.

    Stored configurations and the identities of runs contain these options. A preset that is chosen
    later decides the settings that `remember_given` has not recorded, or else those at their
    defaults.
    """
    published = find_published(type(method))
    if published is None or isinstance(method, published):
        return method
    made = published(**{item.name: getattr(method, item.name) for item in fields(method)})
    if isinstance(made, WithPresets):
        changed = {f.name for f in fields(method) if getattr(method, f.name) != f.default}
        object.__setattr__(made, "given", frozenset(getattr(method, _GIVEN, changed)))
    return made


def remember_given(method: Method, table: Mapping[str, Any]) -> None:
    """Record which settings a table gave, for presets of the published class that are chosen later.

    An explicit value wins over a preset even where it is the default, or an option that only the
    published class has. It is no setting: methods with equal settings stay equal.
    """
    object.__setattr__(method, _GIVEN, frozenset(table))


def all_settings(method: Method) -> dict[str, Any]:
    """Return the settings of a method by name, with the options of published code of its kind."""
    return asdict(with_published_options(method))


def list_installed() -> dict[str, list[EntryPoint]]:
    """Return what installed packages offer, by name, except under built-in names."""
    found: dict[str, dict[str, EntryPoint]] = {}
    # Keyed by value: the same class, offered by two packages, is one offer.
    for point in entry_points(group=GROUP):
        if point.name not in METHODS:
            found.setdefault(point.name, {})[point.value] = point
    return {name: list(points.values()) for name, points in sorted(found.items())}


def name_of(method: type[Method]) -> tuple[str, str]:
    """Return the name by which `find_method` finds a class, and the package that offers it.

    The name is its kind where that is known, else its import path; the package is "" for both ends.
    """
    if METHODS.get(method.kind) is method or method is find_published(method):
        return method.kind, ""
    path = f"{name_module(method)}:{method.__qualname__}"
    offers = list_installed().get(method.kind, [])
    # The short name is unambiguous only when one package offers it, with this very class.
    if [point.value for point in offers] != [path]:
        return path, ""
    dist = offers[0].dist
    if dist is None:
        return method.kind, ""
    return method.kind, f"{dist.name}=={dist.version}"


def _describe_origin(point: EntryPoint) -> str:
    if point.dist is None:
        return point.value
    return f"{point.dist.name} ({point.value})"


def _import_method(path: str, what: str, package: str) -> type[Method]:
    """Import a class and check that it is a method."""
    return import_class(path, what, Method, "coterie.Method", package)


@dataclass(frozen=True)
class StoredMethod(Method):
    """A method as stored in a file, without its class: enough to read results, not to run.

    Args:
        name: its kind in the file.
        settings: the other keys of its table.
    """

    kind = "stored"
    summary = "a method whose results are read without its class"
    name: str
    settings: Mapping[str, Any]

    def init_state(self, task: Task, rng: Rng) -> NoReturn:
        """Refuse to run."""
        raise ConfigError(
            f"the method {self.name!r} was read for its results alone; load its study to run it"
        )

    def round(self, rnd: Round, state: State) -> NoReturn:
        """Refuse to run."""
        self.init_state(rnd.task, rnd.rng)
