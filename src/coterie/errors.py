"""The exceptions of Coterie, and their messages for bad input.

    CoterieError
    ├── ConfigError       (ValueError)       a setting is unknown, of the wrong type, or impossible
    ├── DataError         (ValueError)       unusable data: missing, out of range, too little
    ├── ModelError        (ValueError)       a module that cannot be trained with these settings
    ├── TranslationError  (RuntimeError)     what trains is not what was given
    ├── ExchangeError     (RuntimeError)     an exchange was used against its contract
    │   └── PeerMismatch                     another node runs another method, model or study
    ├── TransportError    (ConnectionError)  the network, an identity or a message failed
    │   └── ClockError                       the clock of this machine is not set yet
    ├── RunExistsError    (FileExistsError)  the run folder exists already
    ├── OutOfMemory       (MemoryError)      the machine or the device has no more memory
    ├── DiskFull          (OSError)          there is no more room to write
    ├── FolderInUse       (RuntimeError)     another process works in the folder
    └── CheckpointError   (ValueError)       a checkpoint is damaged or belongs to another run

Every message has three parts: what was found, what was expected and what to do. Expected failures
during a run (a missing peer, a diverged client) are values, not exceptions.
"""

import difflib
import errno
import re
from collections.abc import Iterable

RETURN_HINT = ": is a `return` missing?"
"""Ends the message where a custom function returned None."""
# A full disk, a quota, and a limit of the size of files.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries in Rust, such as safetensors, put the system's number into their text.
_NO_ROOM_TEXT = re.compile(r"no space left on device|os error (\d+)", re.IGNORECASE)
# As the allocators of PyTorch say it, for the CPU and for CUDA, in lower case.
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")


class CoterieError(Exception):
    """The base class of all exceptions of Coterie."""


class ConfigError(CoterieError, ValueError):
    """A setting is unknown, of the wrong type, or impossible."""


class DataError(CoterieError, ValueError):
    """The data cannot be used: missing, out of range, or too few."""


class ModelError(CoterieError, ValueError):
    """The module cannot be trained with these settings."""


class TranslationError(CoterieError, RuntimeError):
    """What trains differs from the module, the data or the settings that were given."""


class ExchangeError(CoterieError, RuntimeError):
    """An exchange was used against its contract."""


class PeerMismatch(ExchangeError):
    """Another node runs another method, model, study or protocol than this one."""


class TransportError(CoterieError, ConnectionError):
    """The network, an identity or a message failed."""


class ClockError(TransportError):
    """The clock of this machine is before what was made earlier: it is not set yet.

    A machine without a battery begins in the past when it is switched on; started again later,
    the same command works.
    """


class QuorumError(TransportError):
    """Too few other members are there, or not the server, and a run does not go on alone."""


class RunExistsError(CoterieError, FileExistsError):
    """The run folder exists; it is overwritten only on request."""


class OutOfMemory(CoterieError, MemoryError):
    """The machine or the device has no more memory."""

    @staticmethod
    def matches(error: BaseException) -> bool:
        """Return whether an error of any library means that memory is exhausted.

        PyTorch raises a RuntimeError with a text, the system an OSError with a number.

        Example:
            >>> OutOfMemory.matches(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
            True
        """
        if isinstance(error, OSError):
            return error.errno == errno.ENOMEM
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError)
            and any(text in str(error).lower() for text in _NO_MEMORY)
        )


class DiskFull(CoterieError, OSError):
    """There is no more room to write: a full disk, a quota, or a limit of the size of files.

    Nothing is lost: the same command continues when it is started again with room.
    """

    @staticmethod
    def matches(error: BaseException) -> bool:
        """Return whether an error of any library means that there is no room to write.

        Some libraries hide the system's error number in their text.

        Example:
            >>> DiskFull.matches(OSError(errno.ENOSPC, "No space left on device"))
            True
            >>> DiskFull.matches(RuntimeError("I/O error: No space left on device (os error 28)"))
            True
            >>> DiskFull.matches(PermissionError(errno.EACCES, "Permission denied"))
            False
        """
        if isinstance(error, DiskFull):
            return True
        # Its text is ours, and may quote any other.
        if isinstance(error, CoterieError):
            return False
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno in _NO_ROOM
        found = _NO_ROOM_TEXT.search(str(error))
        return found is not None and (found[1] is None or int(found[1]) in _NO_ROOM)


class FolderInUse(CoterieError, RuntimeError):
    """Another process works in the folder."""


class CheckpointError(CoterieError, ValueError):
    """A checkpoint is damaged, or belongs to another run."""


def require(
    condition: bool,
    name: str,
    found: object,
    expected: str,
    *,
    error: type[CoterieError] = ConfigError,
) -> None:
    """Check one setting.

    Args:
        condition: whether its value is valid.
        name: the setting, as it is written in a study file.
        found: its value.
        expected: the valid values, in words.
        error: the exception to raise.

    Raises:
        ConfigError: (or `error`) when the condition does not hold.
    """
    if not condition:
        raise error(f"{name} is {found!r}; expected {expected}")


def first_line(error: Exception) -> str:
    r"""Return the first line of a foreign error's message; its type if it has no message.

    Example:
        >>> first_line(RuntimeError("not there\nlook elsewhere")), first_line(KeyError())
        ('not there', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_MANY_NAMES, _FEW_NAMES = 40, 6  # of more names than the first, so many are listed


def describe_unknown(kind: str, name: str, valid: Iterable[str]) -> str:
    """Describe an unknown name and the nearest valid one.

    Example:
        >>> describe_unknown("method", "dca", ["dac", "local"])
        "unknown method 'dca'; did you mean 'dac'? valid: dac, local"
    """
    names = sorted(set(valid))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    # Nobody finds a name in dozens of them.
    closest = difflib.get_close_matches(name, names, n=_FEW_NAMES, cutoff=0.3)
    if len(names) > _MANY_NAMES and closest:
        return f"unknown {kind} {name!r}{hint} the closest of {len(names)}: {', '.join(closest)}"
    return f"unknown {kind} {name!r}{hint} valid: {', '.join(names)}"
