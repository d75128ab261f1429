"""The wheel that strangers install: it holds the whole package, says what it needs, and is the same from one commit.

`make dist` does the rest, which takes minutes: the source archive, and the wheel in a fresh
environment.
"""

import re
import shutil
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from scripts.try_wheel import files

import coterie

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = re.compile(r"[\w.-]*coterie-\d[\w.]*-py3-none-any\.whl")
pytestmark = pytest.mark.e2e


def built(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of a folder with a pyproject.toml, made by the project's own builder without an environment."""
    builder = pytest.importorskip("hatchling.build", reason="hatchling is not installed")
    out.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(source)
        return out / builder.build_wheel(str(out))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        return built(ROOT, tmp_path_factory.mktemp("wheel") / "dist", patch)


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel by their names."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_every_file_of_the_package(wheel):
    """Found in the folder, not listed: studies, tables of papers, the report's parts, headers, types, bundled data."""
    package = ROOT / "src/coterie"
    inside = {name: text for name, text in contents(wheel).items() if name.startswith("coterie/")}
    assert {f"coterie/{name}" for name in files(package)} == set(inside)
    assert {".toml", ".csv", ".html", ".js", ".css", ".h", ".json", ".pyi"} <= {
        Path(name).suffix for name in inside
    }
    assert "coterie/py.typed" in inside
    assert (
        inside["coterie/report/assets/report.html"]
        == (package / "report/assets/report.html").read_bytes()
    )


def test_files_of_every_kind_are_found_and_compiled_ones_are_not(tmp_path):
    for name in ("a.py", "data/b.bin", "data/c", "__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert files(tmp_path) == {"a.py", "data/b.bin", "data/c"}


def test_the_wheel_is_the_same_bytes_wherever_and_whenever_it_is_built(
    wheel, tmp_path, monkeypatch
):
    """So that two parties, who build it from the same commit, can compare digests."""
    again = tmp_path / "elsewhere"
    again.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copyfile(ROOT / name, again / name)
    # with the time of now
    shutil.copytree(ROOT / "src", again / "src", copy_function=shutil.copyfile)
    assert built(again, tmp_path / "dist", monkeypatch).read_bytes() == wheel.read_bytes()


def test_the_wheel_says_what_it_is_and_needs(wheel):
    found = contents(wheel)
    folder = f"coterie-{coterie.__version__}.dist-info"
    stated = HeaderParser().parsestr(found[f"{folder}/METADATA"].decode())
    assert stated["Version"] == coterie.__version__
    assert set(stated.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert stated["Description-Content-Type"] == "text/markdown"
    licenses = {Path(name).name for name in stated.get_all("License-File")}
    parts = {
        "echarts-LICENSE.txt",
        "echarts-LICENSE-d3.txt",
        "echarts-NOTICE.txt",
        "LICENSE-heart_disease.txt",
    }
    assert licenses == {"LICENSE", *parts}
    assert set(stated["License-Expression"].split(" AND ")) == {
        "Apache-2.0",
        "BSD-3-Clause",
        "CC-BY-4.0",
    }
    shipped = {
        name
        for name in found
        if "/" in name and re.search("LICEN[CS]E|NOTICE", name.rpartition("/")[2])
    }
    assert {name.rpartition("/")[2] for name in shipped if name.startswith("coterie/")} == parts, (
        "and no other"
    )
    assert all(f"{folder}/licenses/{name}" in found for name in stated.get_all("License-File"))
    assert b"coterie = coterie.cli.app:main" in found[f"{folder}/entry_points.txt"]


def test_the_page_on_installing_names_every_extra_with_its_packages():
    page = (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    needed = {
        extra: {re.match(r"[\w-]+", package)[0] for package in packages}
        for extra, packages in PROJECT["optional-dependencies"].items()
    }
    assert {extra: set(names.strip().split(", ")) for extra, names in rows.items()} == needed


def test_the_pages_name_the_file_that_is_built(wheel):
    """A version that is raised is raised there too."""
    pages = [
        page
        for page in (ROOT / "docs").rglob("*")
        if page.suffix in (".md", ".yaml") and "runs" not in page.parts
    ]
    named = {name for page in pages for name in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert named == {wheel.name}
