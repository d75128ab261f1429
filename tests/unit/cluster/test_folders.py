"""What is new in a run's folder comes home, and the folder there is the folder here."""

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
