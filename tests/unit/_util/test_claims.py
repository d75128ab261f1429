"""Claims: one process at a time, told who has it; the claim of a killed process is free."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest
from filelock import FileLock

from coterie._util.claims import claim_folder, find_owner
from coterie.errors import FolderInUse

HOLDER = """
import sys, time
from pathlib import Path
from coterie._util.claims import claim_folder
with claim_folder(Path(sys.argv[1])):
    print("claimed", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has claimed the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def test_a_folder_is_claimed_by_one_process(tmp_path, holder):
    """The second is told which process has it, and since when."""
    text = rf"is in use by process {holder.pid} on \S+ since \d{{4}}-"
    with pytest.raises(FolderInUse, match=text) as told, claim_folder(tmp_path, wait=0):
        pass
    assert "\n" not in str(told.value)
    assert f"process {holder.pid} " in find_owner(tmp_path)


def test_the_claim_of_a_killed_process_is_free(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert find_owner(tmp_path) == ""
    with claim_folder(tmp_path, wait=0):
        assert f"process {os.getpid()} " in find_owner(tmp_path)
    assert find_owner(tmp_path) == ""


def test_a_thread_may_claim_again_and_another_may_not(tmp_path):
    found = []

    def other():
        try:
            with claim_folder(tmp_path, wait=0):
                found.append("claimed")
        except FolderInUse:
            found.append("refused")

    def ask():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with claim_folder(tmp_path):
        with claim_folder(tmp_path, wait=0):
            ask()
        ask()
    ask()
    assert found == ["refused", "refused", "claimed"]


def test_a_claim_ends_with_its_block(tmp_path):
    """A second one of the same thread holds as the first did."""
    for _ in range(2):
        with claim_folder(tmp_path):
            assert f"process {os.getpid()} " in find_owner(tmp_path)
        assert find_owner(tmp_path) == ""


def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch):
    def none(_self):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "_acquire", none)
    with (
        pytest.warns(UserWarning, match="has no locks; start one process at a time"),
        claim_folder(tmp_path),
    ):
        pass


def test_a_claim_makes_the_folder(tmp_path):
    with claim_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert find_owner(tmp_path / "never") == ""
