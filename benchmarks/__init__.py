"""Measurements of Coterie; a package, so that `python -m benchmarks.engines` finds no installed namesake."""

import atexit
import os
import select
import sys
from types import TracebackType


def _reader_is_gone() -> bool:
    """Whether nobody reads the output any more, as in `python -m benchmarks.lineage | head`."""
    output, state = 1, select.poll()
    state.register(output, 0)
    if not any(event & select.POLLERR for _, event in state.poll(0)):
        return False
    # What is left is written nowhere, or Python would report it once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A broken pipe can also be the connection to a node, which is worth a traceback.
    if not (isinstance(error, BrokenPipeError) and _reader_is_gone()):
        sys.__excepthook__(kind, error, trace)


# Python looks for a module to run; in tests the package is imported like any other.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _report
    atexit.register(_reader_is_gone)
