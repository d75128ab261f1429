"""A node of another speed: the wrapper that makes trainings longer, and the words it passes on."""

import subprocess
import sys
import time
from pathlib import Path

import _slow_node
import pytest

from coterie.engine.task import Task

ROOT = Path(__file__).resolve().parents[3]


def test_a_training_takes_at_least_so_long_and_returns_what_it_returned(monkeypatch):
    monkeypatch.setattr(Task, "train", lambda self, *given, **more: (given, more))
    monkeypatch.setattr(
        sys, "argv", ["_slow_node.py", "0.3", "x", "-m", "coterie", "node", "n.toml"]
    )
    seen = []

    def run() -> None:
        began = time.monotonic()
        found = Task.train(None, 1, local=2)  # type: ignore[arg-type]
        seen.append((sys.argv, found, time.monotonic() - began))

    monkeypatch.setattr(_slow_node.app, "main", run)
    _slow_node.main()
    ((words, found, seconds),) = seen
    assert words == ["coterie", "node", "n.toml"]
    assert found == ((1,), {"local": 2})
    assert 0.3 <= seconds < 2


@pytest.mark.full
def test_it_runs_the_command():
    script = ROOT / "benchmarks/_slow_node.py"
    done = subprocess.run(
        [sys.executable, str(script), "1", sys.executable, "-m", "coterie", "node", "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "node.toml" in done.stdout
