"""Study files: TOML to one checked, fully resolved `StudyConfig`, and back.

Everything a study file can say is a field of the
dataclasses that the library itself runs on (`Settings`, `LocalTraining`, `DataConfig`, the methods), so that a file,
`--set path=value` and Python can say the same things and are checked by the same rules.
"""

import copy
import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from coterie._util import settings as tables
from coterie.data.build import DataConfig
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError, require, unknown
from coterie.methods import METHODS
from coterie.simulation.settings import Settings
from coterie.studies.definition import NAME, MethodConfig, ModelConfig, StudyConfig

DEFAULT_STUDY = "rotated-digits"
_RUN_KEYS = tuple(f.name for f in fields(Settings) if f.name not in ("local", "patience"))
_FREE = tuple(f.name for f in fields(StudyConfig) if f.name not in ("data", "model", "methods", "settings"))


def load(source: str | Path = DEFAULT_STUDY, overrides: Iterable[str] = ()) -> StudyConfig:
    """Read a study.

    Args:
        source: path of a TOML file, or the name of a built-in study.
        overrides: assignments such as "methods.dac.tau=30"; they win over the file.

    Raises:
        ConfigError: with what was found, what was expected and what to do, in one line.

    Example:
        >>> load("rotated-digits", ["rounds=3"]).settings.rounds
        3
    """
    text, name = _read(str(source))
    return loads(text, str(source), overrides, name=name)


def loads(text: str, where: str = "the study", overrides: Iterable[str] = (), *, name: str = "study") -> StudyConfig:
    """Read a study from the text of a study file; see `load`.

    Args:
        text: TOML.
        where: what to call it in messages.
        overrides: assignments.
        name: of the study, when the text has none.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    return parse({"name": name, **content}, overrides)


def parse(content: Mapping[str, Any], overrides: Iterable[str] = ()) -> StudyConfig:
    """Check the table of a study file and return the study; see `load`."""
    content = copy.deepcopy(dict(content))
    for assignment in overrides:
        assign(content, assignment)
    known = {"data", "model", "local", "stopping", "methods", *_RUN_KEYS, *_FREE}
    for key in content:
        if key not in known:
            raise ConfigError(unknown("setting", key, known))
    free = {key: content[key] for key in _FREE if key in content}
    if isinstance(free.get("seeds"), int):
        free["seeds"] = list(range(free["seeds"]))
    for grid in {"sweep", "tune"} & set(free):
        free[grid] = _flat(grid, free[grid])
    run = {key: content[key] for key in _RUN_KEYS if key in content}
    local = tables.parse(LocalTraining, _section(content, "local"), "local")
    stopping = _section(content, "stopping")
    for key in stopping:
        if key != "patience":
            raise ConfigError(f"stopping: {unknown('key', key, ['patience'])}")
    settings = tables.parse(Settings, {**run, **stopping, "local": local}, "study")
    free["data"] = tables.parse(DataConfig, _section(content, "data"), "data")
    free["model"] = tables.parse(ModelConfig, _section(content, "model"), "model")
    free["methods"] = _methods(content.get("methods", []), settings)
    return tables.parse(StudyConfig, {**free, "settings": settings}, "study")


def table(study: StudyConfig, *, decided: bool = True) -> dict[str, Any]:
    """Return the study as plain values: `parse` of it gives the same study.

    Args:
        study: the study.
        decided: fully resolved: with what the presets of its methods decide. Without, another preset in the table
            decides anew.
    """
    parts = tables.plain(study)
    settings = parts.pop("settings")
    patience = settings.pop("patience", None)
    sections = {
        **{key: value for key, value in parts.items() if key not in ("data", "model", "methods")},
        **{key: settings[key] for key in _RUN_KEYS if key in settings},
        "data": parts["data"],
        "model": parts["model"],
        "local": settings["local"],
        "stopping": {} if patience is None else {"patience": patience},
        "methods": [_entry(entry, study.settings, decided) for entry in study.methods],
    }
    return {key: value for key, value in sections.items() if value not in ({}, "")}


def dumps(study: StudyConfig, *, decided: bool = True) -> str:
    """Return the study as the text of a study file; see `table`."""
    return tables.dumps(table(study, decided=decided))


def identity(study: StudyConfig) -> dict[str, Any]:
    """Return what decides the results, as a flat table: no names, and nothing that only changes the speed."""
    content = table(study)
    words, speed = ("name", "description", "paper", "sweep", "tune"), ("engine", "block", "cuda_graphs")
    for key in (*words, *speed, "checkpoint_seconds"):
        content.pop(key, None)
    if content.get("precision") == "full":  # so that studies from before it was a setting are the same
        del content["precision"]
    for entry in content["methods"]:
        entry.pop("paper", None)
    return dict(sorted(_leaves("", content)))


def digest(study: StudyConfig) -> str:
    """Hash what decides the results."""
    return hashlib.sha256(json.dumps(identity(study)).encode()).hexdigest()[:16]


def difference(found: StudyConfig, wanted: StudyConfig) -> str:
    """Name the first setting in which two studies differ, or "" when they give the same results."""
    a, b = identity(found), identity(wanted)
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key):
            return f"{key} is {a.get(key)!r} there and {b.get(key)!r} here"
    return ""


def builtin() -> dict[str, Traversable]:
    """Return the built-in studies by name."""

    def walk(folder: Traversable, prefix: str) -> dict[str, Traversable]:
        found: dict[str, Traversable] = {}
        for item in folder.iterdir():
            if item.is_dir():
                found |= walk(item, f"{prefix}{item.name}/")
            elif item.name.endswith(".toml"):
                found[prefix + item.name.removesuffix(".toml")] = item
        return found

    return dict(sorted(walk(resources.files("coterie.studies") / "builtin", "").items()))


def _read(source: str) -> tuple[str, str]:
    """The text of a study and its name."""
    studies = builtin()
    if source in studies:
        return studies[source].read_text(encoding="utf-8"), source
    path = Path(source)
    if path.is_dir():
        raise ConfigError(f"{source} is a folder; expected a study file or a name (`coterie studies` lists them)")
    if not path.exists():
        if path.suffix == ".toml":
            raise ConfigError(f"there is no study file {source}; `coterie studies` lists those that have a name")
        raise ConfigError(unknown("study", source, studies))
    try:
        return path.read_text(encoding="utf-8"), path.stem
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"cannot read {source}: {error}") from error


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; expected a table: [{name}]")
    return value


def _flat(name: str, grid: object) -> dict[str, list[Any]]:
    """A grid by dotted path, whether the paths were quoted or not."""
    if not isinstance(grid, Mapping):
        raise ConfigError(f"{name} is {grid!r}; expected a table with a list of values for each setting")
    flat = dict(_leaves("", grid))
    for path, values in flat.items():
        require(isinstance(values, list) and bool(values), f"{name}.{path}", values, "a list of values")
    return flat


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted path; methods by their labels."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else key, inner)
    elif prefix == "methods":
        for entry in value:
            yield from _leaves(f"methods.{entry['label']}", entry)
    else:
        yield prefix, value


def _methods(value: object, settings: Settings) -> tuple[MethodConfig, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"methods is {value!r}; expected [[methods]] tables, each with a kind")
    return tuple(_method(entry, settings, f"methods[{i}]") for i, entry in enumerate(value))


@dataclass(frozen=True)
class _Head(tables.Configurable):
    """The keys of a [[methods]] table that are not settings."""

    kind: str
    label: str | None = None
    paper: str | None = None


_HEAD = tuple(f.name for f in fields(_Head))


def _method(entry: object, settings: Settings, where: str) -> MethodConfig:
    """One [[methods]] table: its own fields, any key of [local], and any setting of the study.

    Where a method has a field of the same name, its own is meant; `local.NAME` says local training's all the same.
    """
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {entry!r}; expected a table with a kind")
    head = tables.parse(_Head, {key: entry[key] for key in _HEAD if key in entry}, where)
    if head.kind not in METHODS:
        raise ConfigError(unknown("method", head.kind, METHODS))
    label = head.label or head.kind
    require(bool(NAME.fullmatch(label)), f"{where}: label", label, "letters, digits and ' ._+=,()-'")
    kind = METHODS[head.kind]
    own = {f.name for f in fields(kind) if f.init}
    local = {f.name for f in fields(LocalTraining)} - own
    run = {f.name for f in fields(Settings)} - {"local"} - own
    where = f"methods.{label}"
    for key in entry:
        if key not in own | local | run | {"local", *_HEAD}:
            raise ConfigError(f"{where}: {unknown('key', key, own | local | run)}")

    def part(keys: set[str]) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if key in keys}

    given = {**_every(settings.local), **part(local), **_section(entry, "local")}
    trained = tables.parse(LocalTraining, given, where)
    settings = tables.parse(Settings, {**_every(settings), **part(run), "local": trained}, where)
    return MethodConfig(label, tables.parse(kind, part(own), where), settings, head.paper)


def _every(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _entry(entry: MethodConfig, study: Settings, decided: bool) -> dict[str, Any]:
    """One [[methods]] table: all its hyperparameters, and where its settings differ from the study's."""
    own = {f.name for f in fields(entry.method)}

    def changed(mine: Any, theirs: Any) -> dict[str, Any]:
        differs = {name: value for name, value in _every(mine).items() if value != getattr(theirs, name)}
        return {name: tables.NONE if value is None else value for name, value in differs.items()}

    local, run = changed(entry.settings.local, study.local), changed(entry.settings, study)
    hidden = {name: value for name, value in local.items() if name in own}
    said = {name: value for name, value in {**run, **local}.items() if name not in {"local", *hidden}}
    head = {"kind": entry.kind, "label": entry.label, **({"paper": entry.paper} if entry.paper else {})}
    own_said = tables.plain(entry.method, decided=decided)
    return {**head, **own_said, **head, **said, **({"local": hidden} if hidden else {})}


def assign(content: dict[str, Any], assignment: str) -> None:
    """Put one `path=value` into the table of a study file, in place.

    The value is TOML; what is not TOML is taken as text. `methods.NAME.key` reaches the method of that label, or else
    all methods of that kind.

    Raises:
        ConfigError: when it is no assignment, or leads nowhere.

    Example:
        >>> content = {"methods": [{"kind": "dac"}]}
        >>> assign(content, "methods.dac.tau=30")
        >>> content
        {'methods': [{'kind': 'dac', 'tau': 30}]}
    """
    path, equals, value = assignment.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set got {assignment!r}; expected path=value, such as methods.dac.tau=30")
    try:
        nested = tomllib.loads(assignment)
    except tomllib.TOMLDecodeError:
        try:
            nested = tomllib.loads(f"{path} = {json.dumps(value.strip())}")
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"--set got {assignment!r}; quote names with spaces: 'methods.\"my DAC\".tau=3'"
            ) from error
    _merge(content, nested, "")


def put(content: dict[str, Any], path: str | Sequence[str], value: Any) -> None:
    """Put a plain value at a path, dotted or in parts, into the table of a study file; see `assign`."""
    nested: Any = value
    for key in reversed(keys(path) if isinstance(path, str) else path):
        nested = {key: nested}
    _merge(content, nested, "")


def keys(path: str) -> list[str]:
    """Return the parts of a dotted path, as TOML reads it.

    Example:
        >>> keys('methods."my DAC".tau')
        ['methods', 'my DAC', 'tau']
    """
    try:
        nested: Any = tomllib.loads(f"{path} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path!r} is no path of a setting, such as methods.dac.tau: {error}") from error
    parts = []
    while isinstance(nested, dict):
        parts.append(next(iter(nested)))
        nested = nested[parts[-1]]
    return parts


def _merge(content: dict[str, Any], nested: Mapping[str, Any], path: str) -> None:
    for key, value in nested.items():
        here = f"{path}.{key}" if path else key
        if here == "methods" and isinstance(value, Mapping):
            _merge_methods(content.get("methods", []), value)
        elif isinstance(value, Mapping) and isinstance(content.get(key), dict):
            _merge(content[key], value, here)
        elif isinstance(value, Mapping) and isinstance(content.get(key), list):
            raise ConfigError(f"{here} is a list; give the whole list, as in --set '{here}=[...]'")
        else:
            content[key] = value


def _merge_methods(methods: Sequence[dict[str, Any]], changes: Mapping[str, Any]) -> None:
    for name, change in changes.items():
        if not isinstance(change, Mapping):
            raise ConfigError(f"methods.{name} is a method, not a setting; expected methods.{name}.SETTING=value")
        for entry in _named(methods, name):
            _merge(entry, change, f"methods.{name}")


def _named(methods: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The methods of a label, or else those of a kind."""
    labels = [str(entry.get("label", entry.get("kind"))) for entry in methods]
    kinds = [str(entry.get("kind")) for entry in methods]
    for names in (labels, kinds):
        found = [entry for entry, own in zip(methods, names, strict=True) if own.lower() == name.lower()]
        if found:
            return found
    raise ConfigError(unknown("method of this study", name, {*labels, *kinds}))
