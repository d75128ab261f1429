"""Imports go one way, and importing the package is light."""

import ast
import graphlib
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest
from scripts.design import MODULES, PICTURE, entry, imported, picture
from tests.selection import first_only

import coterie

ORDER = (
    "errors", "rng", "_util", "data", "models", "functional", "exchange", "engine", "methods", "runtime",
    "simulation", "results", "studies", "report", "papers", "cluster", "net", "testing", "cli", "__main__",
)  # fmt: skip
"""The entries of the package, bottom up: each imports only from those before it."""
BESIDE = {("report", "studies")}
"""Entries that import nothing from those before them either."""
ROOT = Path(coterie.__file__).parent


@cache
def imports_of_modules() -> dict[str, set[str]]:
    """What each module imports; read when a test needs it, since every worker collects this file."""
    return {name: imported(path.read_text()) for name, path in MODULES.items()}


def circles(imports: Mapping[str, Collection[str]]) -> list[str]:
    """One circle of imports, as the names along it; a package and its own modules are one house."""
    inner = {
        name: sorted(other for other in found if not name.startswith(f"{other}."))
        for name, found in imports.items()
    }
    try:
        tuple(graphlib.TopologicalSorter(inner).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_imports_inside_functions_of_names_and_for_types_are_seen():
    source = """
from coterie import errors
def f():
    import coterie.rng
if TYPE_CHECKING:
    from coterie.cli.app import main
"""
    assert imported(source) == {"coterie.errors", "coterie.rng", "coterie.cli.app"}


def test_a_circle_is_found():
    assert set(circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]})) == {"a", "b", "c"}
    assert circles({"a": ["b"], "b": ["c"], "c": [], "a.d": ["a"]}) == []


@pytest.mark.slow
def test_the_picture_of_the_design_is_that_of_the_imports():
    assert PICTURE.read_text("utf-8") == picture(), "run make docs"


def test_no_two_modules_import_each_other_by_any_way():
    assert circles(imports_of_modules()) == []


def test_the_order_names_what_is_there():
    """No entry is missing and none is named that does not exist."""
    assert {entry(name) for name in MODULES} - {""} == set(ORDER)


def test_a_module_imports_only_from_its_own_entry_or_those_below():
    """What a module needs never needs the module."""
    pairs = {
        (entry(name), entry(other), name)
        for name, found in imports_of_modules().items()
        if entry(name)
        for other in found
    }
    upward = {(name, other) for own, other, name in pairs if ORDER.index(other) > ORDER.index(own)}
    assert not upward
    assert not {name for own, other, name in pairs if (own, other) in BESIDE}


def test_a_module_with_an_underscore_is_imported_by_its_own_package_alone():
    private = {
        (name, other)
        for name, found in imports_of_modules().items()
        for other in found
        if "._" in other.removeprefix("coterie._util")
        and not f"{name}.".startswith(f"{other.rpartition('.')[0]}.")
    }
    assert not private


def test_importing_the_package_loads_no_heavy_library():
    """`import coterie` alone is quick: torch and pandas come with the first name that needs them."""
    code = "import sys, coterie; sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "heavy"),
    first_only(
        [
            (
                ("--help",),
                ("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "pyarrow", "grpc"),
            ),
            (
                ("run", "--help"),
                ("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "pyarrow", "grpc"),
            ),
            (("methods",), ("scipy", "sklearn", "matplotlib", "grpc")),
            (("studies",), ("sklearn", "matplotlib", "grpc")),
        ]
    ),
    ids=["help", "run-help", "methods", "studies"],
)
def test_a_command_loads_only_the_libraries_it_needs(words, heavy):
    """Help loads none of them; the lists load torch, but not the libraries that a few methods cluster with."""
    code = f"import sys; sys.argv[1:] = {list(words)!r}\nfrom coterie.cli.app import main\n"
    code += f"try:\n    main()\nfinally:\n    print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stderr == "[]\n"


def test_training_and_reading_results_load_no_statistics_of_scipy():
    """They are half a second of each command, worker and node; Student's t is in scipy.special."""
    code = "import sys, coterie.studies.run, coterie.net.node, coterie.studies.sweep\n"
    code += "print([m for m in ('scipy.stats', 'scipy.optimize', 'sklearn') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout == "[]\n"


@pytest.mark.parametrize("name", coterie.__all__)
def test_every_public_name_exists(name):
    assert getattr(coterie, name) is not None


def test_type_checkers_and_the_program_find_the_same_objects():
    """Each name is re-exported under its own name, which type checkers require, from a module that has it."""
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    aliases = [
        alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert all(alias.name == "*" or alias.asname == alias.name for alias in aliases)
    assert coterie.load_study is importlib.import_module("coterie.studies.config").load_study
    assert "isabstract" not in coterie.__all__


def test_every_method_is_a_public_name():
    assert {method.__name__ for method in coterie.METHODS.values()} <= set(coterie.__all__)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Fedration'"):
        coterie.Fedration  # noqa: B018


def test_the_package_ships_its_type_marker():
    spec = importlib.util.find_spec("coterie")
    assert spec is not None
    assert (ROOT / "py.typed").exists()
