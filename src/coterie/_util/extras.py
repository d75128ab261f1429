"""Optional packages: what to install where one is missing."""

import shlex
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages, not `coterie[EXTRA]`: pip would look for that in an index, also where
    Coterie was installed from a clone or a wheel.

    Args:
        extra: its name in pyproject.toml, such as "net".

    Example:
        >>> install_command("vision")
        "pip install 'torchvision>=0.21'"
    """
    try:
        stated = [line.partition(";") for line in requires("coterie") or []]
    except PackageNotFoundError:
        stated = []
    packages = [
        name.strip()
        for name, _, where in stated
        if where.replace('"', "'").strip() == f"extra == '{extra}'"
    ]
    # without metadata: Coterie is a folder on Python's path, or its installation lacks this extra
    if not packages:
        return f"pip install '.[{extra}]' in the folder of Coterie's pyproject.toml"
    return shlex.join(["pip", "install", *packages])
