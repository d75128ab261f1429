"""What results say about where they come from."""

import multiprocessing
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from coterie._util import origin


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a package in it; the code is asked for anew in each test."""
    package = tmp_path / "src/coterie"
    package.mkdir(parents=True)
    for path in (package / "__init__.py", tmp_path / "notes.md"):
        path.write_text("one\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(origin, "PACKAGE", package)
    monkeypatch.setattr(origin, "_STARTED", time.time() + 60)
    origin.describe_code.cache_clear()
    yield tmp_path
    origin.describe_code.cache_clear()


def test_the_commit_is_that_of_the_package(repository):
    assert origin.describe_code() == {
        "commit": git(repository, "rev-parse", "HEAD").strip(),
        "dirty": False,
    }


@pytest.mark.parametrize(
    ("file", "dirty"),
    [
        ("src/coterie/__init__.py", True),
        ("src/coterie/new.py", True),
        ("notes.md", False),
        ("docs/result.json", False),
    ],
)
def test_changed_and_new_files_of_the_code_make_it_dirty_and_others_do_not(repository, file, dirty):
    (repository / file).parent.mkdir(exist_ok=True)
    (repository / file).write_text("two\n")
    assert origin.describe_code()["dirty"] is dirty


@pytest.mark.parametrize(
    ("file", "dirty"), [("src/coterie/__init__.py", True), ("notes.md", False)]
)
def test_code_that_was_committed_while_a_process_ran_is_not_what_it_ran(repository, file, dirty):
    """The commit at the end of a run has another file than the one that was loaded at its start."""
    (repository / file).write_text("two\n")
    git(repository, "commit", "--quiet", "-am", "second")
    os.utime(repository / file, (origin._STARTED + 60,) * 2)
    assert origin.describe_code()["dirty"] is dirty


def test_the_repository_is_left_as_it_is(repository):
    """A process that is stopped while git refreshes the index would leave a lock, which stops whoever works there."""
    index = repository / ".git/index"
    os.utime(repository / "src/coterie/__init__.py", (1, 1))
    before = index.read_bytes()
    assert origin.describe_code()["dirty"] is False
    assert index.read_bytes() == before


def test_the_repository_around_an_installed_package_is_not_its_own(repository, monkeypatch):
    """An environment in the user's project: the commit of that project says nothing about the package."""
    installed = repository / ".venv/coterie"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("one\n")
    monkeypatch.setattr(origin, "PACKAGE", installed)
    assert origin.describe_code() == {"commit": None, "dirty": None}


def test_without_git_there_is_no_commit(repository, monkeypatch):
    monkeypatch.setenv("PATH", str(repository))
    assert origin.describe_code() == {"commit": None, "dirty": None}


SAY = "from coterie._util import origin; print(origin.format_command())\n"


def test_the_command_is_the_one_that_was_given(tmp_path):
    """A script, a module and an entry point; words with spaces stay one word."""
    (tmp_path / "measure.py").write_text(SAY)
    (tmp_path / "coterie-like").write_text(SAY)
    (tmp_path / "speed/cells").mkdir(parents=True)
    (tmp_path / "speed/__init__.py").write_text("")
    (tmp_path / "speed/cells/__main__.py").write_text(SAY)

    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    assert said("measure.py", "--out", "a b") == "python measure.py --out 'a b'"
    assert said(str(tmp_path / "measure.py"), "x") == "python measure.py x"
    assert (
        said(str(tmp_path / "coterie-like"), "run", "study.toml") == "coterie-like run study.toml"
    )
    assert said("-m", "speed.cells", "--quick") == "python -m speed.cells --quick"
    assert said("-c", SAY) == "python -c"


def test_a_worker_process_tells_the_command_of_the_one_that_started_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(origin.PACKAGE / "__main__.py"), "run", "--workers", "2"])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(origin.format_command) == "coterie run --workers 2"


def test_the_head_of_a_stored_result_has_all_that_it_depends_on():
    found = origin.make_origin(
        ["net", "engine"],
        config={"rounds": 3},
        seeds=[0, 1],
        where=origin.describe_machine("pandas"),
    )
    assert list(found) == [
        "commit", "dirty", "version", "made", "command", "config", "seeds", "machine", "speaks_of",
    ]  # fmt: skip
    assert found["version"] == version("coterie")
    assert (found["config"], found["seeds"], found["speaks_of"]) == (
        {"rounds": 3},
        [0, 1],
        ["engine", "net"],
    )
    assert found["machine"]["pandas"] == version("pandas")
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["vectors"] == torch.backends.cpu.get_cpu_capability()


def test_a_package_that_is_not_installed_has_no_version():
    assert origin.get_versions("no-such-package") == {"no-such-package": "unknown"}


def test_a_module_that_is_run_by_its_name_is_named_so(tmp_path):
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "own.py").write_text(
        "from coterie._util.origin import format_command\nprint(format_command())\n"
    )
    for given, said in (
        (["-m", "group.own", "--n", "3"], "python -m group.own --n 3"),
        (["group/own.py"], "python group/own.py"),
    ):
        done = subprocess.run(
            [sys.executable, *given], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.stdout.strip() == said, done.stderr
