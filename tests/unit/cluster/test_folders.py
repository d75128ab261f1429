"""What is new in a run's folder comes home, and the folder there is the folder here."""

import os
import time

import pytest

from coterie._util import manifest
from coterie.cluster import folders
from coterie.cluster.folders import apply_update, collect_update, load_files, write_files


def write(folder, rotate=None, **files):
    folder.mkdir(exist_ok=True)
    names = {
        "checkpoint": "checkpoint.safetensors",
        "metrics": "metrics.parquet",
        "provenance": "provenance.json",
    }
    manifest.replace_files(folder, {names.get(k, k): v.encode() for k, v in files.items()}, rotate)


def same(one, other):
    return {p.name: p.read_bytes() for p in one.iterdir()} == {
        p.name: p.read_bytes() for p in other.iterdir()
    }


def test_only_what_is_new_travels_and_the_checkpoint_before_is_kept_there(tmp_path):
    away, home = tmp_path / "away", tmp_path / "home"
    home.mkdir()
    rotate = {"checkpoint.safetensors": "checkpoint-before.safetensors"}
    write(away, config="same")
    first, known = collect_update(away, {})
    apply_update(first, home)
    write(away, rotate, checkpoint="one", metrics="m1", provenance="p1")
    second, known = collect_update(away, known)
    apply_update(second, home)
    assert list(second.files) == ["checkpoint.safetensors", "metrics.parquet", "provenance.json"]
    write(away, rotate, checkpoint="two", metrics="m1", provenance="p2")
    third, known = collect_update(away, known)
    apply_update(third, home)
    assert list(third.files) == ["checkpoint.safetensors", "provenance.json"]
    assert third.kept == rotate
    assert same(away, home)
    fourth, _ = collect_update(away, known)
    assert not fourth.files
    apply_update(fourth, home)
    assert same(away, home)


def test_a_folder_is_laid_out_as_it_is_without_what_belongs_to_this_machine(tmp_path):
    here, there = tmp_path / "here", tmp_path / "deep" / "there"
    write(here, checkpoint="one")
    (here / ".lock").touch()
    write_files(load_files(here), there)
    (here / ".lock").unlink()
    assert same(here, there)
    assert load_files(tmp_path / "none") == {}


def test_a_file_that_is_not_what_was_written_does_not_count_as_known(tmp_path):
    """A manifest that lists two digests of a file was left by a process that was killed on the way."""
    write(tmp_path / "run", checkpoint="one")
    line = manifest.load_digests(tmp_path / "run")["checkpoint.safetensors"]
    listed = (tmp_path / "run" / "B2SUMS").read_text()
    (tmp_path / "run" / "B2SUMS").write_text(listed + listed.replace(line, "0" * 64))
    assert manifest.load_digests(tmp_path / "run") == {}
    with pytest.raises(KeyError):
        folders.collect_update(tmp_path / "run", {})[1]["checkpoint.safetensors"]


def test_what_a_killed_worker_left_is_removed_and_what_is_in_use_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "_YOUNG", -1.0)
    left = tmp_path / "coterie-worker-left"
    left.mkdir()
    (left / "model.bin").write_bytes(b"much")
    with folders.temporary_folder() as one:
        assert not left.exists()
        with folders.temporary_folder() as other:
            assert one.exists()
            assert one != other
        assert not other.exists()
    assert list(tmp_path.iterdir()) == []


def test_files_are_put_into_place_so_that_a_copy_that_breaks_off_looks_unfinished(tmp_path):
    """The configuration and the checkpoint first, the provenance last; folders are not files."""
    names = ("provenance.json", "edges.parquet", "metrics.parquet", "other.bin",
             "checkpoint.safetensors", "config.toml")  # fmt: skip
    manifest.replace_files(tmp_path, {name: name.encode() for name in names})
    (tmp_path / "folder").mkdir()
    update, known = collect_update(tmp_path, {})
    first, second, *rest = update.files
    assert {first, second} == {"config.toml", "checkpoint.safetensors"}
    assert rest == ["other.bin", "metrics.parquet", "edges.parquet", "provenance.json"]
    assert set(known) == set(names)
    assert set(load_files(tmp_path)) == {*names, "B2SUMS"}


def test_a_checkpoint_that_the_receiver_lacks_travels_whole(tmp_path):
    """The one before is not what it has under the newest name: both go."""
    rotate = {"checkpoint.safetensors": "checkpoint-before.safetensors"}
    write(tmp_path / "run", checkpoint="one")
    write(tmp_path / "run", rotate, checkpoint="two")
    update, _ = collect_update(tmp_path / "run", {"checkpoint.safetensors": "another"})
    assert sorted(update.files) == ["checkpoint-before.safetensors", "checkpoint.safetensors"]
    assert update.kept == {}


@pytest.mark.parametrize(
    ("age", "mine", "removed"),
    [(61, True, True), (59, True, False), (61, False, False)],
    ids=["old", "young", "of another account"],
)
def test_only_old_folders_of_this_account_are_removed(tmp_path, monkeypatch, age, mine, removed):
    """A young one may not be claimed yet."""
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "coterie-worker-left"
    left.mkdir()
    os.utime(left, (time.time() - age,) * 2)
    if not mine:
        monkeypatch.setattr(folders.os, "getuid", lambda: left.stat().st_uid + 1)
    with folders.temporary_folder():
        assert left.exists() is not removed


def test_a_temporary_folder_is_claimed_while_it_is_used_and_gone_after_an_error(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    seen = []

    def use():
        with folders.temporary_folder() as made:
            seen.append((made.parent, bool(folders.find_owner(made))))
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert seen == [(tmp_path, True)]
    assert list(tmp_path.iterdir()) == []


def test_an_update_without_files_writes_nothing(tmp_path):
    apply_update(folders.FolderUpdate({}, {}), tmp_path / "none")
    assert not (tmp_path / "none").exists()
