import errno
import os

import pytest

from coterie._util.lines import LineFile


@pytest.fixture
def lines(tmp_path):
    found = LineFile(tmp_path / "some.log")
    yield found
    found.close()


def test_a_line_is_added_at_the_end(lines):
    lines.append(b"one")
    lines.append(b"two")
    assert lines.path.read_bytes() == b"one\ntwo\n"
    assert lines.size == 8


@pytest.mark.parametrize(
    ("content", "kept", "cut"),
    [
        (b"", b"", b""),
        (b"one\ntwo\n", b"one\ntwo\n", b""),
        (b"one\ntw", b"one\n", b"tw"),
        (b"tw", b"", b"tw"),
        (b"one\n\0\0\0", b"one\n", b"\0\0\0"),
        (b"one\n\0wo\n\0\0\n", b"one\n", b"\0wo\n\0\0\n"),
        (b"\0\n", b"", b"\0\n"),
        (b"o\0e\ntwo\n", b"o\0e\ntwo\n", b""),  # damage in the middle is not for this to hide
        (b"one\n" + b"x" * (3 << 20), b"one\n", b"x" * (3 << 20)),
    ],
)
def test_what_a_kill_or_a_power_cut_left_at_the_end_is_removed_and_returned(
    lines, content, kept, cut
):
    lines.path.write_bytes(content)
    assert lines.trim_partial_line() == cut
    assert lines.path.read_bytes() == kept
    lines.append(b"next")
    assert lines.path.read_bytes() == kept + b"next\n"


def test_a_line_for_which_the_disk_has_no_room_leaves_nothing_behind(lines, monkeypatch):
    """The system takes a part of it, and then says that the disk is full."""
    write = os.write
    lines.append(b"one")
    left = [4]

    def full(handle, data):
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, bytes(data)[: left.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left") as error:
        lines.append(b"a longer line")
    assert error.value.filename == str(lines.path)
    assert lines.path.read_bytes() == b"one\n"
    monkeypatch.undo()
    lines.append(b"two")
    assert lines.path.read_bytes() == b"one\ntwo\n"
