"""Finished runs by what their results depend on: a run that another study has is not run again.

Two runs are equal when their settings, their data and names, the code, the versions of the packages
and the kind of machine are equal; the names of their studies do not count. An equal run is taken:
its files are linked into the new folder, and its provenance names the folder that they came from.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coterie._util import manifest, origin
from coterie._util.claims import claim_folder
from coterie._util.importing import MAIN, compute_definition_digest, compute_module_digest
from coterie._util.mappings import drop_empty
from coterie.errors import ConfigError
from coterie.methods.registry import METHODS
from coterie.results.stored_runs import CONFIG
from coterie.runtime import checkpoint
from coterie.studies import config
from coterie.studies.definition import OWN, StudyConfig

OWN_CODE = "own-code.json"
"""The digests of the code of import paths that a run was made with; runs without any lack it."""
# Settings that change results by rounding alone, which makes other bytes.
_SPEED = ("engine", "block", "cuda_graphs", "precision")


@dataclass
class RunStore:
    """The finished runs below a folder.

    Args:
        out: the folder under which the folders of studies are.
    """

    out: Path
    _by_name: dict[tuple[str, str], list[Path]] | None = field(default=None, init=False, repr=False)

    def find_equal_run(
        self, run: StudyConfig, folder: Path, compute_digest: Callable[[], str]
    ) -> Path | None:
        """Return the folder of a finished run with the same results; None without one.

        Args:
            run: a study of one method and one seed.
            folder: where it would be run; not searched.
            compute_digest: returns the digest of its data, `Federation.compute_digest`; called
                where a run of the same settings was found.
        """
        # Code behind an import path can change without a change of its name.
        if _uses_own_code(run):
            return None
        recipe = _make_recipe(run)
        for found in self._list_candidates(folder):
            noted = checkpoint.load_provenance(found)
            # The cheap checks first: the digest needs the data, and the last reads every file.
            if (
                noted.get("done")
                and _was_made_here(noted)
                and _load_recipe(found) == recipe
                and noted.get("data") == compute_digest()
                and _is_whole(found)
            ):
                return found
        return None

    def _list_candidates(self, folder: Path) -> list[Path]:
        """Return the runs of the same label and seed, which their paths show."""
        if self._by_name is None:
            self._by_name = {}
            # Sorted: of several equal runs the same one is taken every time.
            for path in sorted(self.out.rglob(f"seed-*/{checkpoint.PROVENANCE}")):
                label, seed = path.parent.parts[-2:]
                self._by_name.setdefault((label, seed), []).append(path.parent)
        label, seed = folder.parts[-2:]
        return [one for one in self._by_name.get((label, seed), []) if one != folder]


def take_run(source: Path, folder: Path, run: StudyConfig) -> None:
    """Link the files of a finished run into the folder of an equal one.

    Args:
        source: the folder of the finished run.
        folder: of the new one; it is made if missing.
        run: the new one, whose configuration differs by names.

    Raises:
        FolderInUse: when another process works in the new folder.
    """
    noted = checkpoint.load_provenance(source) | {"taken_from": os.path.relpath(source, folder)}
    with claim_folder(folder):
        files: dict[str, manifest.Content] = {CONFIG: config.format_study(run).encode()}
        for name in manifest.load_digests(source):
            if name not in (CONFIG, checkpoint.BEFORE, checkpoint.PROVENANCE):
                files[name] = partial(_link_file, source / name)
        # Last, since it says that the run is done.
        files[checkpoint.PROVENANCE] = json.dumps(noted, indent=2).encode()
        manifest.replace_files(folder, files)


def _uses_own_code(run: StudyConfig) -> bool:
    """Whether a run depends on code outside Coterie, or on a module given from Python."""
    if run.model.kind == OWN or any(entry.kind not in METHODS for entry in run.methods):
        return True
    return bool(_list_import_paths(run))


def _list_import_paths(run: StudyConfig) -> list[str]:
    """Return the import paths in a study's settings."""
    return sorted(text for text in _iterate_texts(config.make_study_table(run)) if ":" in text)


def compute_own_code(run: StudyConfig) -> dict[str, str]:
    """Return the digest of the code of each module in a run's import paths, where it has one.

    Of a script or notebook it is that of what the path names: the rest is often changed.
    """
    digests = {}
    for path in _list_import_paths(run):
        module, _, name = path.partition(":")
        if module == MAIN:
            digests[path] = compute_definition_digest(name)
        else:
            digests[module] = compute_module_digest(module)
    return drop_empty(digests)


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield every text in a table of settings, but for names and descriptions."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("name", "description", "label", "paper"):
                yield from _iterate_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _iterate_texts(inner)


def _make_recipe(run: StudyConfig) -> str:
    """Return the settings of a run that its bytes depend on, as text."""
    table = config.make_study_table(run)
    content = config.make_identity(run) | {name: table.get(name) for name in _SPEED}
    return json.dumps(content, sort_keys=True, default=str)


def _load_recipe(folder: Path) -> str:
    """Return the recipe of a stored run; "" where its configuration cannot be read."""
    path = folder / CONFIG
    if manifest.describe_fault(folder, CONFIG):
        return ""
    try:
        return _make_recipe(config.parse_study_text(path.read_text(encoding="utf-8"), str(path)))
    except ConfigError:  # of an older version
        return ""


def _is_whole(folder: Path) -> bool:
    """Whether every file in the manifest of a run is as it was written."""
    names = manifest.load_digests(folder)
    # The checkpoint before the last is of no use once the run has ended.
    needed = [name for name in names if name != checkpoint.BEFORE]
    faults = (manifest.describe_fault(folder, name) for name in needed)
    return checkpoint.FILE in names and not any(faults)


def _was_made_here(noted: dict[str, Any]) -> bool:
    """Whether a run was made by the present code, packages and kind of machine."""
    present = {
        "code": origin.compute_code_digest(),
        "python": sys.version.split()[0],
        "packages": origin.get_versions(*noted.get("packages", ())),
        "hardware": origin.describe_hardware(),
    }
    return all(noted.get(name) == value for name, value in present.items())


def _link_file(source: Path, path: Path) -> None:
    """Give a file a second name; a copy where the file system has no links."""
    # `os.link` replaces no file.
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
