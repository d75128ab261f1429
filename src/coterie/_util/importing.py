"""Import paths, `package.module:name`: how study files name what is not built in."""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coterie.errors import ConfigError, describe_unknown

T = TypeVar("T")
MAIN = "__main__"
"""The module of the program that runs: a script, or a notebook."""
_imported_code: dict[str, str] = {}  # the digest of each module when it was imported by a path


def import_object(path: str, what: str, package: str = "") -> Any:
    """Return the object that an import path names. Importing its module runs the module's code.

    Args:
        path: "package.module:name"; the name may have dots.
        what: the object's name in error messages, such as "loss 'my.losses:focal'".
        package: the package to install when the module is missing, if it is known.

    Raises:
        ConfigError: when there is no such module or name, or importing the module fails.

    Example:
        >>> import_object("math:pi", "a number")
        3.141592653589793
    """
    module, _, name = path.partition(":")
    # Before the import: a file that changes afterwards is not what runs.
    _imported_code[module] = compute_module_digest(module)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        advice = f"install {package or 'the package that has it'}, or add its folder to PYTHONPATH"
        raise ConfigError(f"{what}: there is no module {error.name!r}; {advice}") from error
    # importlib raises TypeError or ValueError for relative and empty names.
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{what}: {error}; expected package.module:name, importable from here"
        ) from error
    return found


def compute_module_digest(module: str) -> str:
    """Return a digest of the code that an import path of a module runs here, comments aside.

    It is "" for Coterie's own modules, for installed ones, which have versions, and where no file
    of Python code is found.
    """
    # What was imported runs on, whatever its file holds by now.
    if module in sys.modules and module in _imported_code:
        return _imported_code[module]
    if module.partition(".")[0] == "coterie":
        return ""
    try:
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None or is_installed(Path(found.origin)):
            return ""
        text = ast.dump(ast.parse(Path(found.origin).read_bytes()))
    # A module that cannot be found or read is refused where it is imported, in words of its own.
    except (ImportError, AttributeError, TypeError, ValueError, OSError, SyntaxError):
        return ""
    return _digest_text(text)


def name_module(found: Any) -> str | None:
    """Return the name of the module that defines a function or class, the same in all processes."""
    module = getattr(found, "__module__", None)
    # Worker processes import the program that started them under a name of their own.
    return MAIN if module == "__mp_main__" else module


def compute_definition_digest(name: str) -> str:
    """Return a digest of what defines a name in the program that runs, comments aside.

    It is of the definitions at the top of the program's file that the name depends on; the rest
    may change. "" where there are none, as in a notebook.
    """
    known = _load_definitions(str(getattr(sys.modules[MAIN], "__file__", "")))
    texts, waiting = dict[str, list[str]](), [name.partition(".")[0]]
    while waiting:
        one = waiting.pop()
        if one in known and one not in texts:
            texts[one] = list(map(ast.dump, known[one]))
            for statement in known[one]:
                waiting += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return _digest_text(json.dumps(texts, sort_keys=True)) if texts else ""


# Cached: a file that changes afterwards is not what runs.
@functools.cache
def _load_definitions(file: str) -> Mapping[str, list[ast.stmt]]:
    """Return the top statements of a program by the names that they define."""
    found: dict[str, list[ast.stmt]] = {}
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return found
    for statement in body:
        names = []
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [statement.name]
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.append(node.id)
        for name in names:
            found.setdefault(name, []).append(statement)
    return found


def _digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def is_installed(file: Path) -> bool:
    """Return whether a file lies where Python and packages are installed."""
    if not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
        return True
    places = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    # Environments are often made of links, so the real paths are compared.
    real = Path(os.path.realpath(file))
    return any(map(real.is_relative_to, map(os.path.realpath, places)))


def import_class(path: str, what: str, base: type[T], known_as: str, package: str = "") -> type[T]:
    """Return the class that an import path names: a concrete subclass of a base, with a `kind`.

    Args:
        path: "package.module:Name".
        what: the class's name in error messages.
        base: the class that it has to extend.
        known_as: the base's name in error messages.
        package: the package to install when the module is missing.

    Raises:
        ConfigError: when there is no such class, or it is abstract or has no `kind`.
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


def import_function(path: str, what: str, takes: Sequence[str] | None = None) -> Any:
    """Return the function that an import path names; see `import_object`.

    Args:
        path: as for `import_object`.
        what: as for `import_object`.
        takes: the names of the arguments that it is called with, by their place; not checked when
            None.

    Raises:
        ConfigError: when there is none, or it cannot be called so.
    """
    found = import_object(path, what)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{what} is {found!r}; expected a function")
    if takes is not None:
        check_arguments(found, what, takes)
    return found


def check_arguments(function: Callable[..., Any], what: str, takes: Sequence[str]) -> None:
    """Check that a function can be called with arguments, without a call.

    Args:
        function: any; one whose arguments are not known, such as a built-in one, passes.
        what: as for `import_object`.
        takes: the names of the arguments, by their place.

    Raises:
        ConfigError: when it takes others.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a wrong call of it fails by itself
    try:
        signature.bind(*takes)
    except TypeError:
        raise ConfigError(
            f"{what} has the arguments {signature}; expected ({', '.join(takes)})"
        ) from None


def parse_kind(
    given: str | Mapping[str, Any] | Callable[..., Any],
    known: Mapping[str, Any],
    what: str,
    where: str,
) -> tuple[str, dict[str, Any]]:
    """Split a setting into its kind and its other keys; nothing is imported.

    Args:
        given: a name; an import path; a table with one of these as `kind`; or a function or class.
        known: the built-in kinds, by name.
        what: the word for one of these in error messages, such as "loss".
        where: the setting's name in error messages.

    Returns:
        The kind, a name of `known` or else an import path; and the other keys.

    Raises:
        ConfigError: when there is no kind, or it is neither.

    Example:
        >>> parse_kind({"kind": "dice", "smooth": 1}, {"dice": ...}, "loss", "loss")
        ('dice', {'smooth': 1})
    """
    if not isinstance(given, str | Mapping):
        given = find_import_path(given, where)
    if isinstance(given, str):
        given = {"kind": given}
    rest = dict(given)
    kind = rest.pop("kind", None)
    if not isinstance(kind, str):
        found = "missing"
        if kind is not None:
            found = repr(kind)
        raise ConfigError(
            f"{where}: kind is {found}; valid: {', '.join(sorted(known))}; or package.module:name"
        )
    if kind not in known and ":" not in kind:
        raise ConfigError(f"{where}: {describe_unknown(what, kind, known)}; or package.module:name")
    return kind, rest


def find_import_path(found: Any, what: str) -> str:
    """Return the import path of a function or class, by which any process can import it.

    Raises:
        ConfigError: when there is none: it is a lambda, or was defined inside a function.

    Example:
        >>> find_import_path(find_import_path, "a function")
        'coterie._util.importing:find_import_path'
    """
    module, name = name_module(found), getattr(found, "__qualname__", None)
    path = f"{module}:{name}"
    if name is None:
        raise ConfigError(
            f"{what} is an object, {found!r}; expected a name, or a class or function that is "
            "defined at the top of a module: settings of one stand next to its kind, such as "
            "{'kind': NAME, 'option': 1}"
        )
    # "<locals>" and "<lambda>" are in names that no import reaches.
    reachable = module is not None and "<" not in name
    if not reachable or import_object(path, what) is not found:
        raise ConfigError(
            f"{what} is {found!r}; expected one that is defined at the top of a module, with a name"
        )
    return path
