"""Manifests: what is missing, damaged or not listed is said; files are replaced together."""

import hashlib
import os
import subprocess
from shutil import which

import pytest

from coterie._util import manifest


@pytest.fixture
def folder(tmp_path):
    manifest.replace_files(tmp_path, {"a.txt": b"old a", "b.txt": b"old b"})
    return tmp_path


def test_a_line_is_that_of_b2sum(folder):
    """The digest is BLAKE2b with 32 bytes, computed here from the same definition, and b2sum itself agrees."""
    lines = (folder / "B2SUMS").read_text().splitlines()
    assert lines == [
        f"{hashlib.blake2b(f'old {n}'.encode(), digest_size=32).hexdigest()}  {n}.txt" for n in "ab"
    ]
    if which("b2sum"):
        subprocess.run(["b2sum", "--check", "--quiet", "B2SUMS"], cwd=folder, check=True)


def test_what_is_wrong_with_a_file_is_said(folder):
    assert [manifest.describe_fault(folder, name) for name in ("a.txt", "b.txt")] == ["", ""]
    (folder / "a.txt").write_bytes(b"old A")
    (folder / "b.txt").unlink()
    (folder / "c.txt").write_bytes(b"new")
    assert (
        manifest.describe_fault(folder, "a.txt") == "a.txt is damaged: it is not what B2SUMS lists"
    )
    assert manifest.describe_fault(folder, "b.txt") == "b.txt is missing"
    assert (
        manifest.describe_fault(folder, "c.txt") == "c.txt is damaged: it is not what B2SUMS lists"
    )
    (folder / "B2SUMS").unlink()
    assert (
        manifest.describe_fault(folder, "a.txt")
        == "B2SUMS is missing, which has the digest of a.txt"
    )


@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xfe", b"no digest  a.txt\n", b"0" * 64 + b"  a.txt\n"]
)
def test_a_damaged_manifest_lists_nothing_that_it_should_not(folder, damage):
    (folder / "B2SUMS").write_bytes(damage)
    assert "damaged" in manifest.describe_fault(folder, "a.txt")


def test_files_that_changed_places_are_not_whole(folder):
    (folder / "a.txt").rename(folder / "x")
    (folder / "b.txt").rename(folder / "a.txt")
    (folder / "x").rename(folder / "b.txt")
    assert all("damaged" in manifest.describe_fault(folder, name) for name in ("a.txt", "b.txt"))


def test_an_earlier_file_is_kept_under_its_other_name(folder):
    manifest.replace_files(folder, {"a.txt": b"new a"}, rotate={"a.txt": "a-before.txt"})
    assert (folder / "a.txt").read_bytes() == b"new a"
    assert (folder / "a-before.txt").read_bytes() == b"old a"
    assert not any(
        manifest.describe_fault(folder, name) for name in ("a.txt", "a-before.txt", "b.txt")
    )


def test_a_damaged_file_does_not_take_the_place_of_a_whole_one(folder):
    manifest.replace_files(folder, {"a.txt": b"new a"}, rotate={"a.txt": "a-before.txt"})
    (folder / "a.txt").write_bytes(b"damage")
    manifest.replace_files(folder, {"a.txt": b"newest a"}, rotate={"a.txt": "a-before.txt"})
    assert (folder / "a-before.txt").read_bytes() == b"old a"


@pytest.mark.parametrize("number", range(6))
def test_a_folder_is_whole_whenever_its_writer_stops(folder, number, monkeypatch):
    """Stopped before each of the renames (two manifests, a rotation, two files) and after the last."""
    renames, replace = 0, os.replace

    def stops(*args):
        nonlocal renames
        if renames == number:
            raise KeyboardInterrupt
        renames += 1
        replace(*args)

    monkeypatch.setattr(os, "replace", stops)
    contents = {"a.txt": b"new a", "b.txt": b"new b"}
    if number < 5:
        with pytest.raises(KeyboardInterrupt):
            manifest.replace_files(folder, contents, rotate={"a.txt": "a-before.txt"})
    else:
        manifest.replace_files(folder, contents, rotate={"a.txt": "a-before.txt"})
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "B2SUMS"}
    assert found.get("a.txt", b"old a") == (b"new a" if number >= 3 else b"old a")
    assert found["b.txt"] == (b"new b" if number >= 4 else b"old b")
    assert b"old a" in (found.get("a.txt"), found.get("a-before.txt"))
    assert not any(manifest.describe_fault(folder, name) for name in found)
