"""How each run of a study stands: which of several signs counts, and how it is written."""

from types import SimpleNamespace

import pytest

from coterie.cluster import status
from coterie.cluster.status import JobStatus, format_statuses, load_statuses
from coterie.methods import METHODS
from coterie.results.selection import RunStatus
from coterie.studies.definition import make_study
from coterie.studies.run import FAILURE_FILE, Job, run_folder

JOB = Job("DAC", 3)


@pytest.fixture
def stand(monkeypatch, tmp_path):
    """Return the state and the reason of a run of which the given signs are there."""

    def run(stored=None, slurm=None, turn=None, over=False, owner="", failure=""):
        folder = run_folder(tmp_path, JOB)
        folder.mkdir(parents=True, exist_ok=True)
        if failure:
            (folder / FAILURE_FILE).write_text(failure)
        standings = {"": [RunStatus("DAC", 3, *stored)]} if stored else {}
        study = make_study({JOB.label: METHODS["dac"]()}, seeds=[JOB.seed])
        plan = SimpleNamespace(
            folder=tmp_path, points={"": study}, list_standings=lambda: standings
        )
        monkeypatch.setattr(status, "load_plan", lambda given: plan)
        # Jobs of a point lie in the folder of its sweep; those of this study win.
        tables = {tmp_path.parent: {folder: ("OLD", "old")}, tmp_path: {folder: slurm}}
        if slurm is None:
            tables = {tmp_path.parent: {}, tmp_path: {}}
        monkeypatch.setattr(status.slurm, "load_job_states", tables.__getitem__)
        claim = {"job": turn, "host": "n1", "since": "now"} if turn else {}
        monkeypatch.setattr(
            status.turns, "find_holder", lambda given: (int(turn is not None), claim)
        )
        monkeypatch.setattr(status.slurm, "is_over", lambda job: over)
        monkeypatch.setattr(status, "find_owner", lambda given: owner)
        (found,) = load_statuses(tmp_path)
        assert found.job == JOB
        return found.state, found.reason

    return run


HALF = ("unfinished", "round 5 of 9")
CLAIM = "job 17 on n1 since now"


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ({}, ("waiting", "")),
        ({"stored": ("finished", "")}, ("done", "")),
        # Whatever claim or job is left over.
        (
            {"stored": ("finished", ""), "turn": "17", "owner": "process 3", "failure": "x"},
            ("done", ""),
        ),
        ({"turn": "17"}, ("running", CLAIM)),
        ({"turn": "17", "stored": HALF}, ("running", f"round 5 of 9, {CLAIM}")),
        ({"turn": "17", "owner": "process 3"}, ("running", CLAIM)),
        ({"turn": "17", "over": True, "owner": "process 3"}, ("running", "process 3")),
        ({"turn": "17", "over": True, "stored": HALF}, ("stopped", "round 5 of 9")),
        # A claim of an unknown owner says nothing of who works.
        ({"turn": "", "stored": HALF}, ("stopped", "round 5 of 9")),
        ({"owner": "process 3", "slurm": ("PENDING", "")}, ("running", "process 3")),
        ({"slurm": ("PENDING", "")}, ("queued", "")),
        ({"slurm": ("REQUEUED", ""), "stored": HALF}, ("queued", "round 5 of 9")),
        ({"slurm": ("CONFIGURING", ""), "failure": "of yesterday"}, ("queued", "")),
        ({"slurm": ("RUNNING", "")}, ("running", "it begins")),
        ({"slurm": ("COMPLETING", ""), "stored": HALF}, ("running", "round 5 of 9, it begins")),
        ({"stored": ("damaged", "bad digest"), "failure": "x"}, ("damaged", "bad digest")),
        ({"failure": "the disk is full"}, ("failed", "the disk is full")),
        (
            {"failure": "the disk is full", "stored": HALF},
            ("failed", "round 5 of 9, the disk is full"),
        ),
        ({"slurm": ("FAILED", "no memory"), "failure": "x"}, ("failed", "no memory")),
        ({"slurm": ("COMPLETED", ""), "failure": "x"}, ("failed", "x")),
        ({"stored": HALF}, ("stopped", "round 5 of 9")),
        ({"stored": ("missing", "")}, ("waiting", "")),
    ],
)
def test_the_first_sign_that_applies_says_how_a_run_stands(stand, signs, expected):
    assert stand(**signs) == expected


def test_runs_of_one_state_and_reason_share_a_line_in_the_order_of_states():
    stands = [
        JobStatus(Job("DAC", 4), "failed", "no memory"),
        JobStatus(Job("DAC", 0), "done"),
        JobStatus(Job("DAC", 1), "done"),
        JobStatus(Job("DAC", 3), "done"),
        JobStatus(Job("IFCA", 0, "lr=0.1"), "done"),
        JobStatus(Job("DAC", 5), "failed", "no disk"),
        JobStatus(Job("DAC", 6), "running"),
    ]
    assert format_statuses(stands) == [
        "7 runs: 4 done, 1 running, 2 failed",
        "done     DAC: seeds 0, 1, 3",
        "done     IFCA, lr=0.1: seed 0",
        "running  DAC: seed 6",
        "failed   DAC: seed 4 (no memory)",
        "failed   DAC: seed 5 (no disk)",
    ]


def test_a_long_reason_goes_on_below_within_the_width():
    lines = format_statuses([JobStatus(JOB, "failed", "word " * 12 + "a-b")], width=40)
    assert lines[1] == "failed   DAC: seed 3 (word word word"
    assert all(len(line) <= 40 for line in lines)
    assert [line[:9].strip() for line in lines[1:]] == ["failed", *[""] * (len(lines) - 2)]
    joined = " ".join(line[9:] for line in lines[1:])
    assert joined == "DAC: seed 3 (" + "word " * 12 + "a-b)"
