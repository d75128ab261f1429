"""Import paths: what a study file names that is not built in, `package.module:name`, and how an object is named so."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from coterie.errors import ConfigError, describe_unknown

T = TypeVar("T")


def import_object(path: str, what: str, package: str = "") -> Any:
    """Return what an import path names. Its module is imported, which runs the code in it.

    Args:
        path: "package.module:name"; the name may have dots.
        what: how messages call it, such as "loss 'my.losses:focal'".
        package: what to install when the module is not there, where that is known.

    Raises:
        ConfigError: when there is no such module or name, or the module fails while it is imported.

    Example:
        >>> imported("math:pi", "a number")
        3.141592653589793
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        advice = f"install {package or 'the package that has it'}, or add its folder to PYTHONPATH"
        raise ConfigError(f"{what}: there is no module {error.name!r}; {advice}") from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{what}: {error}; expected package.module:name, importable from here"
        ) from error
    return found


def import_class(path: str, what: str, base: type[T], known_as: str, package: str = "") -> type[T]:
    """Return the class that an import path names, which can be made and has a `kind`; see `import_object`.

    Args:
        path: "package.module:Name".
        what: how messages call it.
        base: what it extends.
        known_as: how messages call the base.
        package: what to install when the module is not there.

    Raises:
        ConfigError: when there is none, or it lacks something.
    """
    found = import_object(path, what, package)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{what} is {found!r}; expected a subclass of {known_as}")
    if inspect.isabstract(found) or not hasattr(found, "kind"):
        lacking = sorted(getattr(found, "__abstractmethods__", ())) or ["kind"]
        raise ConfigError(
            f"{what} lacks {', '.join(lacking)}; a {base.__name__.lower()} defines them all"
        )
    return found


def import_function(path: str, what: str) -> Any:
    """Return the function that an import path names; see `import_object`.

    Raises:
        ConfigError: when there is none.
    """
    found = import_object(path, what)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{what} is {found!r}; expected a function")
    return found


def parse_kind(
    given: str | Mapping[str, Any] | Callable[..., Any],
    known: Mapping[str, Any],
    what: str,
    where: str,
) -> tuple[str, dict[str, Any]]:
    """Return the kind that a name, a table or a function says, and the other keys of the table; nothing is imported.

    Args:
        given: a name; an import path; a table with one of these as `kind`; or a function or class.
        known: what is built in, by name.
        what: how messages call one of these, such as "loss".
        where: how the user finds it.

    Returns:
        A name of `known`, or else an import path.

    Raises:
        ConfigError: when there is no kind, or it is neither.

    Example:
        >>> kind_of({"kind": "dice", "smooth": 1}, {"dice": ...}, "loss", "loss")
        ('dice', {'smooth': 1})
    """
    if not isinstance(given, str | Mapping):
        given = find_import_path(given, where)
    rest = {"kind": given} if isinstance(given, str) else dict(given)
    kind = rest.pop("kind", None)
    if not isinstance(kind, str):
        found = "missing" if kind is None else repr(kind)
        raise ConfigError(
            f"{where}: kind is {found}; valid: {', '.join(sorted(known))}; or package.module:name"
        )
    if kind not in known and ":" not in kind:
        raise ConfigError(f"{where}: {describe_unknown(what, kind, known)}; or package.module:name")
    return kind, rest


def find_import_path(found: Any, what: str) -> str:
    """Return the import path under which a function or class is found again, by another process too.

    Raises:
        ConfigError: when there is none: a lambda, or something made inside a function.

    Example:
        >>> path_of(path_of, "a function")
        'coterie._util.importing:path_of'
    """
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    path = f"{module}:{name}"
    reachable = module is not None and name is not None and "<" not in name
    if not reachable or import_object(path, what) is not found:
        raise ConfigError(
            f"{what} is {found!r}; expected one that is defined at the top of a module, with a name"
        )
    return path
