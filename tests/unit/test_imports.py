"""Imports go one way, and importing the package is light."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import coterie

LAYERS = (
    ("errors", "rng", "tables", "pages"),
    ("nets", "federation", "datasets", "hub", "transforms", "plan", "partition", "label_shifts", "shifts", "assemble",
     "data", "own_data", "models", "metrics", "similarity", "selection", "mixture", "topology", "aggregation",
     "clustering", "simplex"),
    ("exchange", "mailbox"),
    ("task", "hosted", "engine", "heads"),
    ("methods",),
    ("run", "memory", "record", "settings", "checkpoint", "sequential", "outcome", "loop", "testing"),
    ("overrides", "definition", "config", "catalogue", "fanout", "cost", "ledger", "graph", "cluster", "papers",
     "histories", "summary"),
    ("gallery", "payload", "report", "drawings", "drawings_swept", "analysed", "watch", "figures", "trackers"),
    ("study", "sweep", "compare", "sheets", "tune", "analysis"),
    ("display", "display_rounds"),
    ("cli_report", "cli_compare", "net", "bench"),
    ("cli", "__main__"),
)  # fmt: skip
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ROOT = Path(coterie.__file__).parent
MODULES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def top(module: str) -> str:
    return module.split(".")[1] if module.startswith("coterie.") else ""


def imported(source: str) -> set[str]:
    """The top-level modules of the package that a file imports, those for type checkers left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(top(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "coterie":
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(top(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found - {""}


def test_imports_inside_functions_and_of_names_are_seen_and_those_for_types_are_not():
    source = """
from coterie import errors
def f():
    import coterie.rng
if TYPE_CHECKING:
    from coterie.cli import main
"""
    assert imported(source) == {"errors", "rng"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_module_imports_only_from_its_own_layer_or_below(path):
    """The layers of the design: what a module needs never needs the module."""
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert own in LEVEL, f"give {own} a place in LAYERS"
    upward = {name for name in imported(path.read_text()) if LEVEL.get(name, 0) > LEVEL[own]}
    assert not upward, f"{own} imports {sorted(upward)}, which stand above it"


def test_importing_the_package_loads_no_heavy_library():
    """`import coterie` alone is quick: torch and pandas come with the first name that needs them."""
    code = "import sys, coterie; sys.exit(any(m in sys.modules for m in ('torch', 'pandas', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (("--help",), ("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "pyarrow", "zenoh")),
        (("run", "--help"), ("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "pyarrow", "zenoh")),
        (("methods",), ("scipy", "sklearn", "matplotlib", "zenoh")),
        (("studies",), ("sklearn", "matplotlib", "zenoh")),
    ],
    ids=["help", "run-help", "methods", "studies"],
)
def test_a_command_loads_only_the_libraries_it_needs(words, heavy):
    """Help loads none of them; the lists load torch, but not the libraries that a few methods cluster with."""
    code = f"import sys; sys.argv[1:] = {list(words)!r}\nfrom coterie.cli.app import main\n"
    code += f"try:\n    main()\nfinally:\n    print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stderr == "[]\n"


@pytest.mark.parametrize("name", coterie.__all__)
def test_every_public_name_exists(name):
    assert getattr(coterie, name) is not None


def test_type_checkers_are_told_the_same_names():
    """The stub imports each public name under its name, from where it is found at run time."""
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    told = {
        alias.asname: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == {name: (home, coterie._NAMES.get(name, name)) for name, home in coterie._HOME.items()}


def test_every_method_is_a_public_name():
    assert {method.__name__ for method in coterie.METHODS.values()} <= set(coterie.__all__)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Fedration'"):
        coterie.Fedration  # noqa: B018


def test_the_package_ships_its_type_marker():
    spec = importlib.util.find_spec("coterie")
    assert spec is not None
    assert (ROOT / "py.typed").exists()
