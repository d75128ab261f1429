"""One job at a time works on a run, also where the file system passes no locks on."""

import json
import os
import threading
from pathlib import Path

import pytest

from coterie.cluster import turns
from coterie.cluster.turns import claim_turn, find_holder
from coterie.errors import FolderInUse


def never(job):
    return False


def test_a_job_has_a_run_until_it_is_done(tmp_path):
    with claim_turn(tmp_path / "run", "17_0", never):
        number, owner = find_holder(tmp_path / "run")
        assert (number, owner["job"]) == (1, "17_0")
        with (
            pytest.raises(FolderInUse, match=r"is in use by job 17_0 on .* since ") as told,
            claim_turn(tmp_path / "run", "18", never),
        ):
            pass
        assert "\n" not in str(told.value)
    assert find_holder(tmp_path / "run") == (0, {})
    assert list((tmp_path / "run").iterdir()) == []
    with claim_turn(tmp_path / "run", "18", never):
        pass


def test_the_turn_of_a_job_that_is_over_is_taken_over(tmp_path):
    (tmp_path / ".turn-1.json").write_text(
        json.dumps({"job": "17_0", "host": "a", "since": "today"})
    )
    asked = []
    with claim_turn(tmp_path, "18", lambda job: not asked.append(job)):
        assert (find_holder(tmp_path)[0], find_holder(tmp_path)[1]["job"]) == (2, "18")
    assert asked == ["17_0"]
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_was_handed_in_again_goes_on(tmp_path):
    """It has the same id, and its earlier life is over."""
    (tmp_path / ".turn-3.json").write_text(
        json.dumps({"job": "17_0", "host": "a", "since": "today"})
    )
    with claim_turn(tmp_path, "17_0", never):
        assert find_holder(tmp_path)[0] == 4


def test_of_many_that_take_over_at_once_one_gets_the_run(tmp_path):
    """All have seen that the job before is over when the first makes its link."""
    (tmp_path / ".turn-1.json").write_text(json.dumps({"job": "0", "host": "a", "since": "today"}))
    crowd = 8
    at_once, done = threading.Barrier(crowd), threading.Event()
    got, refused = [], []

    def over(job):
        at_once.wait()
        return True

    def try_it(name):
        try:
            with claim_turn(tmp_path, name, over):
                got.append(name)
                done.wait()
        except FolderInUse as error:
            refused.append(str(error))
            if len(refused) == crowd - 1:
                done.set()

    threads = [threading.Thread(target=try_it, args=(str(n + 1),)) for n in range(crowd)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert (len(got), len(refused)) == (1, crowd - 1)


def test_what_no_job_wrote_belongs_to_nobody(tmp_path):
    (tmp_path / ".turn-2.json").write_text("not JSON")
    (tmp_path / ".turn-x.json").write_text("{}")
    assert find_holder(tmp_path) == (2, {})
    assert turns.describe_owner({}) == "another job"
    with claim_turn(tmp_path, "17", never):
        assert find_holder(tmp_path)[0] == 3


def test_a_claim_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """On another machine a name must not lead to an empty file."""
    done, sync, link = [], os.fsync, os.link

    def note_sync(handle: int) -> None:
        done.append(("sync", os.fstat(handle).st_ino, os.fstat(handle).st_size > 10))
        sync(handle)

    def note_link(old: str, new: Path) -> None:
        done.append(("name", os.stat(old).st_ino, True))
        link(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "link", note_link)
    with claim_turn(tmp_path, "17", never):
        inode = (tmp_path / ".turn-1.json").stat().st_ino
    assert done == [("sync", inode, True), ("name", inode, True)]
