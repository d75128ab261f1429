"""Files are replaced whole; links, permissions and what is no file are left as they are."""

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from coterie._util import files
from coterie.errors import ConfigError, DiskFull


@pytest.fixture
def umask():
    """Set the umask for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "expected"), [(0o077, 0o600), (0o002, 0o664), (0o022, 0o644)])
def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path, umask, mask, expected):
    umask(mask)
    files.write_atomically(tmp_path / "new", b"x")
    assert mode(tmp_path / "new") == expected


@pytest.mark.parametrize("kept", [0o600, 0o640, 0o755])
def test_a_file_keeps_its_permissions(tmp_path, kept):
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(kept)
    files.write_atomically(path, b"new")
    assert (mode(path), path.read_bytes()) == (kept, b"new")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_account_stays_its_own(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")
    os.chown(path, 1234, 1235)
    files.write_atomically(path, b"new")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("there/file")
    (tmp_path / "to nothing yet").symlink_to(tmp_path / "there/fresh")
    for name, file in (("link", "file"), ("to nothing yet", "fresh")):
        files.write_atomically(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "there" / file).read_bytes() == b"new"
    assert len(list(tmp_path.rglob("*"))) == 5, "no temporary file is left"


def make_special(kind: str, path: Path) -> None:
    """Make something at a path that is no regular file."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path.name)
    elif kind == "a device":
        path.symlink_to("/dev/null")
    else:
        path.symlink_to(path.name)


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a socket", "a device", "a loop of links"])
def test_what_is_no_file_is_refused_and_left(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "out"
    make_special(kind, path)
    before = path.lstat()
    for write in (lambda: files.write_atomically(path, b"x"), lambda: files.prepare_file(path)):
        with pytest.raises(ConfigError, match=f"out is {kind}; expected a file: choose another"):
            write()
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")

    def stop_halfway() -> None:
        with files.replace_atomically(path) as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_halfway()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_the_system_names_the_file_that_was_wanted(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        files.write_atomically(tmp_path / "no folder/file", b"x")
    assert error.value.filename == str(tmp_path / "no folder/file")


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """After a power cut a name must not lead to an empty file."""
    done, sync, replace = [], os.fsync, os.replace

    def note_sync(handle: int) -> None:
        # The file that is synchronized is complete.
        assert os.fstat(handle).st_size == 3
        done.append(("sync", os.fstat(handle).st_ino))
        sync(handle)

    def note_replace(old: Path, new: Path) -> None:
        done.append(("name", os.stat(old).st_ino))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    files.write_atomically(tmp_path / "file", b"abc")
    inode = (tmp_path / "file").stat().st_ino
    assert done == [("sync", inode), ("name", inode)]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for folder in ("file", "file/deeper", "loop", "loop/deeper"):
        for check in (files.prepare_folder, files.check_folder):
            first = tmp_path / folder.partition("/")[0]
            with pytest.raises(ConfigError, match=rf"cannot write into .*: {first} is no folder"):
                check(tmp_path / folder)
    with pytest.raises(ConfigError, match=r"cannot write .*name: .*file is no folder; choose"):
        files.prepare_file(tmp_path / "file/name")
    # A file system that takes no files, whatever the permissions say.
    with pytest.raises(ConfigError, match=r"cannot write /proc/nope/name: /proc"):
        files.prepare_file("/proc/nope/name")


def test_a_read_only_folder_is_one_line(tmp_path, monkeypatch):
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o555)
    if os.geteuid() == 0:  # root writes everywhere: what the system answers to others

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(shut))

        monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
        monkeypatch.setattr(files.Path, "mkdir", refuse)
    for check in (files.prepare_folder, files.check_folder):
        with pytest.raises(ConfigError, match="Permission denied; choose another place") as caught:
            check(shut / "new")
        assert str(shut) in str(caught.value)


def test_a_full_disk_is_said_as_such(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", fail)
    with pytest.raises(DiskFull, match="the disk is full; make room"):
        files.prepare_file(tmp_path / "file")


def test_places_are_made_or_only_looked_at(tmp_path):
    files.check_folder(tmp_path / "a/b")
    files.check_file(tmp_path / "a/b/file")
    assert list(tmp_path.iterdir()) == []
    assert files.prepare_file(str(tmp_path / "a/b/file")) == tmp_path / "a/b/file"
    files.prepare_folder(tmp_path / "c/d")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c", "d"]


def test_names_with_line_breaks_are_shown_on_one_line():
    assert files.show_path("a\nb\x1b[31m/c") == "a b [31m/c"


def test_paths_that_python_cannot_resolve_are_paths(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert files.resolve_path(tmp_path / "loop/x").name == "x"
    assert files.expand_home("~no-such-account/x") == Path("~no-such-account/x")
    assert files.expand_home("~") == Path.home()


def test_a_file_of_another_kind_is_not_replaced(tmp_path):
    study, page = tmp_path / "study.toml", tmp_path / "page.html"
    files.check_replaceable(study, b"<!doctype html>")
    study.touch()
    files.check_replaceable(study, b"<!doctype html>")
    study.write_text('name = "mine"\n')
    page.write_text("<!doctype html><p>")
    files.check_replaceable(page, b"<!doctype html>")
    with pytest.raises(ConfigError, match=r"study.toml exists and is another kind of file; choose"):
        files.check_replaceable(study, b"<!doctype html>")


def make_folder(path, **files):
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def read_folder(path):
    return {one.name: one.read_text() for one in path.iterdir()}


@pytest.mark.parametrize("old", [None, {}, {"a": "old", "b": "old"}])
def test_a_folder_takes_the_place_of_another(tmp_path, old):
    path = tmp_path / "kept"
    if old is not None:
        make_folder(path, **old)
    files.replace_folder(make_folder(tmp_path / "made", a="new"), path)
    assert read_folder(path) == {"a": "new"}
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_a_folder_is_replaced_where_a_link_leads(tmp_path):
    target = make_folder(tmp_path / "target", a="old")
    (tmp_path / "link").symlink_to("target")
    files.replace_folder(make_folder(tmp_path / "made", a="new"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_folder(target) == {"a": "new"}


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [0, 1])
def test_an_error_brings_the_old_folder_back(tmp_path, monkeypatch, kind, call):
    """At each of the two renames."""
    path = make_folder(tmp_path / "kept", a="old")
    made = make_folder(tmp_path / "made", a="new")
    rename, calls = os.replace, []

    def stop(source, target):
        calls.append(source)
        if len(calls) == call + 1:
            raise kind("stopped")
        rename(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(kind, match="stopped"):
        files.replace_folder(made, path)
    assert read_folder(path) == {"a": "old"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["kept", "made"]


def test_a_killed_process_loses_no_folder(tmp_path):
    """It is killed before the system call `number`, for each of those that change a folder."""
    code = """
import os, sys
from pathlib import Path
from coterie._util import files
left = int(sys.argv[2])
def watch(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir"):
        left -= 1
        if left < 0:
            os._exit(9)
sys.addaudithook(watch)
files.replace_folder(Path(sys.argv[1], "made"), Path(sys.argv[1], "kept"))
"""
    number, status = -1, 9
    while status:
        number += 1
        folder = make_folder(tmp_path / str(number))
        make_folder(folder / "kept", a="old")
        make_folder(folder / "made", a="new")
        done = subprocess.run([sys.executable, "-c", code, str(folder), str(number)], check=False)
        found = [read_folder(one) for one in folder.iterdir()]
        assert {"a": "new"} in found
        # The old one is removed only when the new one has its name.
        assert {"a": "old"} in found or read_folder(folder / "kept") == {"a": "new"}
        assert done.returncode in (0, 9)
        assert done.returncode or [one.name for one in folder.iterdir()] == ["kept"]
        status = done.returncode
    # Two renames, and at least a file and a folder that are removed.
    assert number >= 4
