"""Import paths: what a study file names that is not built in, `package.module:name`, and how an object is named so."""

import importlib
import inspect
from typing import Any, TypeVar

from coterie.errors import ConfigError

T = TypeVar("T")


def imported(path: str, what: str, package: str = "") -> Any:
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
        raise ConfigError(f"{what}: {error}; expected package.module:name, importable from here") from error
    return found


def imported_class(path: str, what: str, base: type[T], known_as: str, package: str = "") -> type[T]:
    """Return the class that an import path names, which can be made and has a `kind`; see `imported`.

    Args:
        path: "package.module:Name".
        what: how messages call it.
        base: what it extends.
        known_as: how messages call the base.
        package: what to install when the module is not there.

    Raises:
        ConfigError: when there is none, or it lacks something.
    """
    found = imported(path, what, package)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{what} is {found!r}; expected a subclass of {known_as}")
    if inspect.isabstract(found) or not hasattr(found, "kind"):
        lacking = sorted(getattr(found, "__abstractmethods__", ())) or ["kind"]
        raise ConfigError(f"{what} lacks {', '.join(lacking)}; a {base.__name__.lower()} defines them all")
    return found


def imported_function(path: str, what: str) -> Any:
    """Return the function that an import path names; see `imported`.

    Raises:
        ConfigError: when there is none.
    """
    found = imported(path, what)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{what} is {found!r}; expected a function")
    return found


def path_of(found: Any, what: str) -> str:
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
    if not reachable or imported(path, what) is not found:
        raise ConfigError(f"{what} is {found!r}; expected one that is defined at the top of a module, with a name")
    return path
