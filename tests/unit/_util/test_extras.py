"""What to install where an optional package is missing: commands that work without a release of Coterie."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from coterie._util import extras

ROOT = Path(__file__).resolve().parents[3]
STATED = [
    "torch>=2.6",
    "torchvision>=0.21; extra == 'vision'",
    'cryptography>=43 ; extra == "net"',
    'grpcio<2,>=1.66; extra == "net"',
    "mkdocstrings[python]>=0.26; extra == 'docs'",
    "other; extra == 'internet'",
]


@pytest.fixture
def stated(monkeypatch):
    """What the installed package's metadata say, in both ways of writing a name."""
    monkeypatch.setattr(extras, "requires", {"coterie": STATED}.get)


@pytest.mark.usefixtures("stated")
def test_the_packages_of_an_extra_are_named_as_a_shell_takes_them():
    assert extras.install_command("vision") == "pip install 'torchvision>=0.21'"
    assert extras.install_command("net") == "pip install 'cryptography>=43' 'grpcio<2,>=1.66'"
    assert extras.install_command("docs") == "pip install 'mkdocstrings[python]>=0.26'"


def test_where_coterie_is_not_installed_the_command_names_its_folder(monkeypatch):
    """As a folder on Python's path, or installed before there was such an extra."""

    def nothing(name):
        raise PackageNotFoundError(name)

    for answer in (nothing, {"coterie": STATED}.get, {}.get):
        monkeypatch.setattr(extras, "requires", answer)
        assert (
            extras.install_command("wandb")
            == "pip install '.[wandb]' in the folder of Coterie's pyproject.toml"
        )


def test_every_extra_that_a_message_names_is_one_of_the_package():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {
        name
        for text in sources
        for name in re.findall(r"extras\.install_command\([\"'](\w+)", text)
    }
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"net", "hub", "vision"} <= named <= known.keys()


def test_no_file_says_to_install_from_an_index_that_does_not_have_it():
    """Before a release, `pip install coterie` finds nothing, or something else."""
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.*"), ROOT / "README.md"]
    texts = {
        path: path.read_text(encoding="utf-8", errors="replace")
        for path in places
        if "runs" not in path.parts
    }
    wrong = re.compile(r"(?:pip install|install) [\"'`]?coterie(?:\[|\b(?!-\d))")
    assert wrong.search("pip install 'coterie[net]'")
    assert not wrong.search("pip install 'coterie-0.1.0-py3-none-any.whl[net]'")
    assert [str(path) for path, text in texts.items() if wrong.search(text)] == []
