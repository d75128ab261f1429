"""The built-in studies by name: their files, which need not be read to be listed."""

from importlib import resources
from importlib.resources.abc import Traversable


def find_builtin_studies(*, bases: bool = False) -> dict[str, Traversable]:
    """Return the files of the built-in studies by name.

    With `bases`, files called `_NAME` are included, which other studies extend.
    """

    def find_files(folder: Traversable, prefix: str) -> dict[str, Traversable]:
        found: dict[str, Traversable] = {}
        for item in folder.iterdir():
            if item.is_dir():
                found |= find_files(item, f"{prefix}{item.name}/")
            elif item.name.endswith(".toml") and (bases or not item.name.startswith("_")):
                found[prefix + item.name.removesuffix(".toml")] = item
        return found

    return dict(sorted(find_files(resources.files("coterie.studies") / "builtin", "").items()))
