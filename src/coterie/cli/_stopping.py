"""The message of a command that is stopped, or cannot write: how to go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from coterie.errors import ConfigError, CoterieError, DiskFull, OutOfMemory


@contextmanager
def explain_interruption(folder: Path, command: str) -> Iterator[None]:
    """Print the command that continues if the block is interrupted, or the disk is full.

    Args:
        folder: of the study that is run.
        command: goes on with it.
    """
    from coterie.studies.run import CONFIG

    try:
        yield
    except KeyboardInterrupt:
        # Without the study's file there is nothing to continue.
        text = "stopped before anything was written"
        if (folder / CONFIG).exists():
            text = f"stopped; continue with: {command}"
        typer.echo(f"\n{text}", err=True)
        raise
    except Exception as error:
        full = DiskFull.matches(error)
        # Other errors are not about writing; the library's own have a message of their own.
        if not full and (not isinstance(error, OSError) or isinstance(error, CoterieError)):
            raise
        # A lack of memory can be an OSError too; then no file is at fault.
        if not (folder / CONFIG).exists() or OutOfMemory.matches(error):
            raise
        kind = DiskFull if full else ConfigError
        raise kind(
            f"cannot write: {describe_os_error(error)}; when that is fixed, continue with: "
            f"{command}"
        ) from error


def describe_os_error(error: Exception) -> str:
    """Return what the system says of an error, and the file that it is about."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror + (f": {error.filename}" if error.filename else "")
