"""The tutorial's second study takes the runs of its first that do not differ, and runs the others."""

import re
import shlex
from pathlib import Path

import pytest

from coterie.studies import config
from coterie.studies.run import FoundRuns, run_study

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/first-study.md"
SMALL = ["rounds=1", "local.epochs=1", "data.train=16", "check=false", "engine=loop"]


@pytest.mark.slow
def test_of_the_32_runs_of_the_second_study_8_are_run(tmp_path):
    """DAC with the other value and each of eight seeds; Random, Local and Oracle are there."""
    (words,) = re.findall(r"^coterie run (--set .*)$", PAGE.read_text(), re.MULTILINE)
    changes = shlex.split(words.replace("--set ", ""))
    assert changes == ["methods.dac.tau=3", "name=cooler"]
    run_study(config.load_study("rotated-digits", SMALL), out=tmp_path)
    trained, notes = set(), []
    run_study(
        config.load_study("rotated-digits", [*SMALL, *changes]), out=tmp_path, notes=notes.append,
        observer=lambda step: trained.add((step.label, step.seed)),
    )  # fmt: skip
    assert trained == {("DAC", seed) for seed in range(8)}
    (found,) = [note for note in notes if isinstance(note, FoundRuns)]
    said = f"24 of 32 runs are there (24 taken from {tmp_path / 'rotated-digits'}, trained by "
    assert str(found).startswith(said)
