"""Faults are put in, tried and taken out as said; the listed ones fit the code; the stored results are of them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mutants

ROOT = Path(__file__).resolve().parents[3]
FAULTS = mutants.load(ROOT)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.package}: {fault.name}")
def test_a_listed_fault_changes_the_code_and_has_tests(fault: mutants.Fault):
    text = fault.applied(ROOT)
    assert fault.new != fault.old
    if fault.file.endswith(".py"):
        compile(text, fault.file, "exec")
    assert fault.tests
    for test in fault.tests:
        file, *names = test.split("::")
        assert (ROOT / file).exists(), test
        for name in names:
            words = (f"def {name.partition('[')[0]}(", f"class {name}")
            assert any(word in (ROOT / file).read_text() for word in words), test


def test_the_stored_results_are_of_the_listed_faults():
    stored = json.loads((ROOT / mutants.STORED).read_text())
    found = {row["name"]: row["digest"] for row in stored["results"]}
    assert found == {fault.name: fault.digest for fault in FAULTS}, "make mutants writes them"
    assert len(found) == len(stored["results"])
    assert stored["totals"] == mutants.totals(stored["results"])
    assert stored["totals"]["all"]["kill_rate"] >= mutants.AIM
    reasons = {fault.name: fault.survives for fault in FAULTS if fault.survives}
    assert {
        row["name"]: row.get("survives")
        for row in stored["results"]
        if row["outcome"] == "survived"
    } == reasons


def test_make_test_notices_every_fault(request: pytest.FixtureRequest, collected: dict[str, bool]):
    """Each fault has tests that `make test` runs, and what noticed it is one of them.

    Only files that were collected with this one are looked at: all of them in `make test`. A
    stored result of another text of its fault says nothing; the test below reports it.
    """
    files = {name.partition("::")[0] for name in collected}
    if any("::" in argument for argument in request.config.args):
        files = set()  # of their files only some tests were collected
    stored = json.loads((ROOT / mutants.STORED).read_text())["results"]
    digests = {fault.name: fault.digest for fault in FAULTS}
    noticed_by = {
        row["name"]: row["by"] for row in stored if row["digest"] == digests.get(row["name"])
    }

    def is_run(test: str) -> bool:
        """Whether `make test` runs a file, a test or a case; a stored case ends at its first space."""
        found = [fast for name, fast in collected.items() if name.startswith(test)]
        if not found:  # the case has another name since then
            function = test.partition("[")[0]
            found = [fast for name, fast in collected.items() if name.startswith(function)]
        return any(found)

    for fault in FAULTS:
        known = [test for test in fault.tests if test.partition("::")[0] in files]
        assert not known or any(map(is_run, known)), f"{fault.name}: {fault.tests}"
        by = noticed_by.get(fault.name, "")
        if by.partition("::")[0] in files:
            assert is_run(by), f"{fault.name} was noticed by {by}, which make test leaves out"


def test_make_test_runs_what_faults_are_tried_with():
    assert f'$(PYTEST) -m "{mutants.FAST}"\n' in (ROOT / "Makefile").read_text()


SOURCE = """import time


def larger(a, b):
    return a if a > b else b


def count(limit):
    return time.sleep(0) or limit
"""
TESTS = """import tiny


def test_larger():
    assert tiny.larger(1, 2) == 2


def test_count():
    assert tiny.count(3) == 3
"""
FOUND = """[[fault]]
name = "the smaller one"
file = "src/tiny.py"
old = '''a > b'''
new = '''a < b'''
tests = ["tests/test_tiny.py"]

[[fault]]
name = "the second of equals"
file = "src/tiny.py"
old = '''a > b'''
new = '''a >= b'''
tests = ["tests/test_tiny.py::test_larger"]
survives = "equal numbers are one number"

[[fault]]
name = "never done"
file = "src/tiny.py"
old = '''sleep(0)'''
new = '''sleep(600)'''
tests = ["tests/test_tiny.py::test_count"]
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one module with two tests and three faults, which needs no package but pytest."""
    monkeypatch.setattr(mutants, "WARM", ("pytest",))
    root = tmp_path / "tiny project"
    (root / "tests/mutants").mkdir(parents=True)
    (root / "src").mkdir()
    (root / "src/tiny.py").write_text(SOURCE)
    (root / "tests/test_tiny.py").write_text(TESTS)
    (root / "tests/mutants/tiny.toml").write_text(FOUND)
    return root


def run(root: Path, *words: str) -> int:
    return mutants.main(["--root", str(root), "--workers", "1", "--limit", "10", *words])


@pytest.mark.slow
def test_each_fault_is_tried_by_itself(tiny: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tiny) == 1, "two of three are fewer than 95 %"
    stored = json.loads((tiny / mutants.STORED).read_text())
    rows = {row["name"]: row for row in stored["results"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "the smaller one": "noticed",
        "the second of equals": "survived",
        "never done": "timed out",
    }
    assert rows["the smaller one"]["by"] == "tests/test_tiny.py::test_larger"
    assert rows["the second of equals"]["survives"] == "equal numbers are one number"
    assert stored["totals"]["all"] == {
        "faults": 3,
        "noticed": 1,
        "timed out": 1,
        "survived": 1,
        "kill_rate": 0.6667,
    }
    assert {"command", "version", "commit", "machine"} <= stored["origin"].keys()
    assert stored["origin"]["speaks_of"] == ["src/tiny.py"]
    assert (tiny / "src/tiny.py").read_text() == SOURCE
    said = capsys.readouterr()
    assert "66.7% of 3 faults were noticed" in said.err
    assert said.err.count("\n") == 5, "a line a fault, one before and one after"


@pytest.mark.slow
def test_a_part_leaves_the_stored_results_of_the_rest_but_those_of_another_text(tiny: Path):
    path = tiny / mutants.STORED
    assert run(tiny, "--only", "SMALLER") == 0
    assert run(tiny, "--only", "equals") == 1, "the only one was not noticed"
    assert [row["name"] for row in json.loads(path.read_text())["results"]] == [
        "the smaller one",
        "the second of equals",
    ]
    faults = tiny / "tests/mutants/tiny.toml"
    faults.write_text(
        faults.read_text().replace("a < b", "b > a").partition('[[fault]]\nname = "never')[0]
    )
    assert run(tiny, "--new") == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["results"]}
    assert {name: row["digest"] for name, row in rows.items()} == {
        f.name: f.digest for f in mutants.load(tiny)
    }
    assert run(tiny, "--package", "tiny", "--only", "smaller", "--dry") == 0


def test_a_fault_that_does_not_fit_the_code_is_named(
    tiny: Path, capsys: pytest.CaptureFixture[str]
):
    (tiny / "src/tiny.py").write_text(SOURCE.replace("a > b", "b < a"))
    assert run(tiny) == 2
    assert capsys.readouterr().err.startswith(
        "stale fault: 'the smaller one' of tests/mutants/tiny.toml"
    )
    assert run(tiny, "--only", "nothing like it") == 2
    assert not (tiny / mutants.STORED).exists()


@pytest.mark.full
def test_a_test_that_fails_without_a_fault_is_named(tiny: Path, capsys: pytest.CaptureFixture[str]):
    (tiny / "tests/test_tiny.py").write_text(TESTS.replace("== 3", "== 4"))
    assert run(tiny) == 2
    assert (
        "fails without any fault; mend it first: tests/test_tiny.py::test_count"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("old = ", "odd = ", "check the key 'odd'"),
        ("the smaller one", "never done", "two faults are named 'never done'"),
    ],
)
def test_an_entry_that_cannot_be_meant_is_named(
    tiny: Path, before: str, after: str, said: str, capsys: pytest.CaptureFixture[str]
):
    faults = tiny / "tests/mutants/tiny.toml"
    faults.write_text(FOUND.replace(before, after, 1))
    assert run(tiny) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary folder with a short name: sockets lie in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
def test_an_interrupt_leaves_no_folder_and_no_process(tiny: Path, place: Path):
    words = [
        sys.executable,
        "scripts/mutants.py",
        "--root",
        str(tiny),
        "--only",
        "never",
        "--limit",
        "60",
    ]
    environment = {**os.environ, "TMPDIR": str(place)}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr is not None
        assert "the code as it is" in process.stderr.readline()
        deadline = time.monotonic() + 60
        while not any("600" in path.read_text() for path in place.glob("*/*/*/src/tiny.py")):
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert said == "stopped; nothing was written\n"
    assert list(place.iterdir()) == []
