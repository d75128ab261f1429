"""What `python -m benchmarks.NAME | head` leaves on the terminal."""

import subprocess
import sys
from pathlib import Path

import benchmarks

PRINTS = """
import sys
for number in range(100_000):
    print(number)
if len(sys.argv) > 1:
    raise BrokenPipeError("of a node")
"""


def start(tmp_path, *words):
    """Start a program of a package that begins as the benchmarks do."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").write_bytes(Path(benchmarks.__file__).read_bytes())
    (package / "prints.py").write_text(PRINTS)
    command = [sys.executable, "-m", "benchmarks.prints", *words]
    return subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_reader_that_has_enough_ends_a_program_without_a_traceback(tmp_path):
    with start(tmp_path) as program:
        assert program.stdout.readline() == "0\n"
        program.stdout.close()
        assert program.stderr.read() == ""


def test_another_broken_pipe_keeps_its_traceback(tmp_path):
    with start(tmp_path, "broken") as program:
        assert program.stdout.read().endswith("99999\n")
        assert "BrokenPipeError: of a node" in program.stderr.read()
