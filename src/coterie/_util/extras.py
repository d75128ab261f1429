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
        requirements = requires("coterie") or []
    except PackageNotFoundError:
        requirements = []
    packages = []
    for requirement in requirements:
        name, _, marker = requirement.partition(";")
        # build tools quote the name of an extra in one or the other way
        if marker.replace('"', "'").strip() == f"extra == '{extra}'":
            packages.append(name.strip())
    # without metadata: Coterie is a folder on Python's path, or its installation lacks this extra
    if not packages:
        return f"pip install '.[{extra}]' in the folder of Coterie's pyproject.toml"
    return shlex.join(["pip", "install", *packages])
