"""A file that only grows, by a line at a time. A line is in it whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path

_TAIL = 1 << 20  # bytes at the end in which the last line break is looked for first


class LineFile:
    """A file of lines, open for appending. The caller makes sure that one thread at a time appends.

    Args:
        path: the file; created if missing.
        mode: its permissions when it is created.

    Raises:
        OSError: from the system; it names the file.
    """

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path = path
        # O_APPEND puts each write at the end; reading serves `trim_partial_line`.
        self._handle: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._open_handle).st_size

    @property
    def _open_handle(self) -> int:
        if self._handle is None:
            raise ValueError(f"{self.path} is closed")
        return self._handle

    def append(self, line: bytes) -> None:
        """Add a line.

        Args:
            line: without the line break at its end, and with no other.

        Raises:
            OSError: from the system, such as for a full disk; the file is then as it was before.
        """
        handle, data, before = self._open_handle, memoryview(line + b"\n"), self.size
        try:
            # A write may take a part only.
            while data:
                data = data[os.write(handle, data) :]
        except OSError as error:
            with suppress(OSError):
                # A partial line would join the next one.
                os.ftruncate(handle, before)
            error.filename = str(self.path)
            raise

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        try:
            os.fsync(self._open_handle)
        except OSError as error:
            error.filename = str(self.path)
            raise

    def trim_partial_line(self) -> bytes:
        """Remove an incomplete last line, as a kill or a power cut leaves it, and return it."""
        handle, size = self._open_handle, self.size
        start = max(0, size - _TAIL)
        found = os.pread(handle, size - start, start)
        # The last line is longer than the tail: read the whole file.
        if start and b"\n" not in found:
            start, found = 0, os.pread(handle, size, 0)
        whole = len(found[: found.rfind(b"\n") + 1])
        # after a power cut, a file system may have grown the file with zeros in place of the data
        while (
            line := found[found.rfind(b"\n", 0, max(0, whole - 1)) + 1 : whole]
        ) and b"\0" in line:
            whole -= len(line)
        if found[whole:]:
            os.ftruncate(handle, start + whole)
        return found[whole:]

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
