"""Study files: TOML to one checked, fully resolved `StudyConfig`, and back.

Everything a study file can say is a field of the dataclasses that the library itself runs on
(`Settings`, `LocalTraining`, `DataConfig`, the methods), so that a file, `--set path=value` and
Python can say the same things and are checked by the same rules.
"""

import copy
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from coterie._util import settings as tables
from coterie._util.files import expand_home, resolve_path
from coterie._util.mappings import drop_keys, select_keys
from coterie._util.toml import parse_toml
from coterie.data.build import DataConfig
from coterie.data.datasets import OWN_KINDS
from coterie.engine.optim import ADDED_FIELDS, LocalTraining
from coterie.errors import ConfigError, describe_unknown, require
from coterie.functional.metrics import split_requested
from coterie.methods import METHODS, registry
from coterie.methods.base import Method
from coterie.models.pretrained import PREFIX
from coterie.runtime.settings import Settings
from coterie.studies.builtin_studies import find_builtin_studies
from coterie.studies.definition import (
    LABEL,
    MethodConfig,
    ModelConfig,
    StudyConfig,
    fold_name,
    is_label,
    match_methods,
    normalize_name,
)

DEFAULT_STUDY = "rotated-digits"
_MAX_SEEDS = 10_000  # a larger "number of seeds" is more likely meant to be one seed
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# These two are tables of a study file: [local] and [stopping].
_RUN_KEYS = [key for key in tables.settable_fields(Settings) if key not in ("local", "patience")]
# A name alone stands for a table with nothing else in it: `model = "linear"`.
_NAMED = {"data": "dataset", "model": "kind"}
_PARTS = ("data", "model", "methods", "settings")
_FREE = [key for key in tables.settable_fields(StudyConfig) if key not in _PARTS]


def load_study(source: str | Path = DEFAULT_STUDY, overrides: Iterable[str] = ()) -> StudyConfig:
    """Load a study from a study file or by the name of a built-in study.

    Args:
        source: path of a TOML file, or the name of a built-in study. What it `extends` is read
            first.
        overrides: assignments such as "methods.dac.tau=30"; they win over the file.

    Raises:
        ConfigError: with what was found, what was expected and what to do, in one line.

    Example:
        >>> load_study("rotated-digits", ["rounds=3"]).settings.rounds
        3
    """
    name, file = _find_study(str(source), find_builtin_studies())
    # A name in the file itself wins over that of the file.
    return parse_study({"name": name, **_load_file(file)}, overrides)


def parse_study_text(
    text: str,
    where: str = "the study",
    overrides: Iterable[str] = (),
    *,
    name: str = "study",
    to_run: bool = True,
) -> StudyConfig:
    """Parse the text of a study file; see `load_study`.

    Args:
        text: TOML.
        where: what to call it in messages.
        overrides: assignments.
        name: of the study, when the text has none.
        to_run: whether it will be run. Otherwise no module is imported: methods that are not built
            in are `registry.StoredMethod`, which suffices to read results.
    """
    return parse_study({"name": name, **_parse_text(text, where)}, overrides, to_run=to_run)


def parse_study(
    content: Mapping[str, Any], overrides: Iterable[str] = (), *, to_run: bool = True
) -> StudyConfig:
    """Check the table of a study file and return the study; see `parse_study_text`."""
    # A copy: the caller's table stays as it is.
    content = copy.deepcopy(dict(content))
    for assignment in overrides:
        apply_assignment(content, assignment)
    # After the assignments, which may change or name methods.
    if "use_methods" in content:
        _extend_study(content, {"use_methods": content.pop("use_methods")})
    _join_extra_metrics(content)
    known = {"data", "model", "local", "stopping", "methods", *_RUN_KEYS, *_FREE}
    for key in content:
        if key not in known:
            raise ConfigError(describe_unknown("setting", key, known))
    free = select_keys(content, _FREE)
    if isinstance(number := free.get("seeds"), int) and not isinstance(number, bool):
        require(
            1 <= number <= _MAX_SEEDS,
            "seeds",
            number,
            f"a number of seeds, 1 to {_MAX_SEEDS}, or a list of seeds",
        )
        # A number n stands for the seeds 0 to n - 1.
        free["seeds"] = list(range(number))
    for grid in {"sweep", "tune"} & set(free):
        free[grid] = _flatten_grid(grid, free[grid])
    run = select_keys(content, _RUN_KEYS)
    local = tables.parse_settings(LocalTraining, _get_section(content, "local"), "local")
    stopping = _get_section(content, "stopping")
    for key in stopping:
        if key != "patience":
            raise ConfigError(f"stopping: {describe_unknown('key', key, ['patience'])}")
    settings = tables.parse_settings(Settings, {**run, **stopping, "local": local}, "study")
    for section in _NAMED:
        _expand_name(content, section)
    free["data"] = tables.parse_settings(DataConfig, _get_section(content, "data"), "data")
    free["model"] = tables.parse_settings(ModelConfig, _get_section(content, "model"), "model")
    free["methods"] = _parse_methods(content.get("methods", []), settings, to_run)
    return tables.parse_settings(StudyConfig, {**free, "settings": settings}, "study")


def _join_extra_metrics(content: dict[str, Any]) -> None:
    """Read the former setting `extra_metrics` as a part of `metrics`, in place.

    Where the study has it, `metrics` of a method are metrics of outputs alone, and both settings of
    the study apply to a method one by one.
    """
    methods = content.get("methods")
    entries = []
    # Anything else is refused later, with a message of its own.
    if isinstance(methods, list):
        entries = [one for one in methods if isinstance(one, dict)]
    tables_with_it = [one for one in (content, *entries) if "extra_metrics" in one]
    if not tables_with_it:
        return
    for table in (content, *tables_with_it):
        for key in ("metrics", "extra_metrics"):
            found = table.get(key, [])
            if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
                raise ConfigError(f"{key} is {found!r}; expected a list of names of metrics")
    is_of_study = "extra_metrics" in content
    content["metrics"] = [*content.get("metrics", ()), *content.pop("extra_metrics", ())]
    outputs, of_runs = split_requested(content["metrics"])
    for entry in entries:
        if "extra_metrics" in entry or (is_of_study and "metrics" in entry):
            own = entry.get("metrics", outputs)
            entry["metrics"] = [*own, *entry.pop("extra_metrics", of_runs)]


def parse_seeds(text: str) -> int | list[int]:
    """Parse the seeds of a command line: their number, or a list of seeds.

    Raises:
        ConfigError: when it is neither.

    Example:
        >>> parse_seeds("5"), parse_seeds("0,3,7"), parse_seeds("7,")
        (5, [0, 3, 7], [7])
    """
    parts = [part.strip() for part in text.strip().removesuffix(",").split(",")]
    if not all(part.isdecimal() and len(part) < 100 for part in parts):
        raise ConfigError(
            f"--seeds is {text!r}; expected a number of seeds (5), a list (0,3,7), or a list of "
            "one seed (7,)"
        )
    return list(map(int, parts)) if "," in text else int(parts[0])


def make_study_table(study: StudyConfig, *, decided: bool = True) -> dict[str, Any]:
    """Return the study as plain values: `parse_study` of it gives the same study.

    Args:
        study: the study.
        decided: fully resolved, with what the presets of its methods set. Otherwise a preset that
            is changed in the table sets its values again.
    """
    parts = tables.to_plain(study)
    settings = parts.pop("settings")
    # The order is that of the file: single values, then tables.
    sections = drop_keys(parts, _PARTS)
    sections |= select_keys(settings, _RUN_KEYS)
    sections["data"] = parts["data"]
    sections["model"] = {key: value for key, value in parts["model"].items() if value != {}}
    sections["local"] = settings["local"]
    if settings.get("patience") is not None:
        sections["stopping"] = {"patience": settings["patience"]}
    sections["methods"] = []
    for entry in study.methods:
        sections["methods"].append(_make_method_table(entry, study.settings, decided))
    # Empty tables and texts are the defaults.
    return {key: value for key, value in sections.items() if value not in ({}, "")}


def format_study(study: StudyConfig, *, decided: bool = True) -> str:
    """Return the study as the text of a study file; see `make_study_table`."""
    return tables.to_toml(make_study_table(study, decided=decided))


def make_identity(study: StudyConfig) -> dict[str, Any]:
    """Return the settings that determine the results as a flat table.

    Names and settings that only change the speed are left out.
    """
    content = make_study_table(study)
    # Words and grids belong to the study, not to a run; speed changes no result.
    words = ("name", "description", "paper", "sweep", "tune", "trials_of")
    speed = ("engine", "block", "cuda_graphs")
    for key in (*words, *speed, "checkpoint_seconds", "check"):
        content.pop(key, None)
    # Defaults are left out, so that studies older than the setting stay the same.
    for name, default in (("precision", "full"), ("pace", "common")):
        if content.get(name) == default:
            del content[name]
    if not content.get("portable"):
        content.pop("portable", None)
    # `extra_metrics` was a setting of its own when stored studies got their identity.
    outputs, of_runs = split_requested(content.pop("metrics"))
    content["extra_metrics"] = list(of_runs)
    if outputs:
        content["metrics"] = list(outputs)
    for entry in content["methods"]:
        own_outputs, own_of_runs = split_requested(entry.pop("metrics", (*outputs, *of_runs)))
        if own_outputs != outputs:
            entry["metrics"] = own_outputs
        if own_of_runs != of_runs:
            entry["extra_metrics"] = own_of_runs
    # Set or not, the optimizer's default is the same value.
    if not study.settings.local.custom_optimizer:
        content["local"]["weight_decay"] = study.settings.local.optimizer_arguments["weight_decay"]
    # Where a method comes from does not change what it computes.
    for entry in content["methods"]:
        entry.pop("paper", None)
        entry.pop("package", None)
        entry.pop("check", None)
    # Sorted: the hash must not depend on the order of keys.
    return dict(sorted(_iterate_leaves("", content)))


def hash_study(study: StudyConfig) -> str:
    """Hash the settings that determine the results."""
    # As long as a run's identity: 64 bits.
    return hashlib.sha256(json.dumps(make_identity(study)).encode()).hexdigest()[:16]


def describe_difference(found: StudyConfig, wanted: StudyConfig, *, of_methods: bool = True) -> str:
    """Describe the first setting in which two studies differ; "" when results would be equal.

    Args:
        found: a stored study.
        wanted: the study that it is compared with.
        of_methods: compare seeds and the settings of single methods, too.
    """
    a, b = make_identity(found), make_identity(wanted)
    for key in sorted({*a, *b}):
        if not of_methods and (key == "seeds" or key.startswith("methods.")):
            continue
        if a.get(key) != b.get(key):
            return f"{key} is {a.get(key)!r} there and {b.get(key)!r} here"
    return ""


def _find_study(
    source: str, named: Mapping[str, Traversable], folder: Path = Path()
) -> tuple[str, Traversable]:
    """Return the name and file of a study: a built-in one, or one at a path from a folder."""
    # A built-in name wins over a file of that name.
    if source in named:
        return source, named[source]
    path = folder / source
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder; expected a study file or a name (`coterie studies` lists them)"
        )
    if not path.exists():
        if path.suffix == ".toml":
            raise ConfigError(
                f"there is no study file {path}; `coterie studies` lists the built-in ones"
            )
        raise ConfigError(describe_unknown("study", source, named))
    return path.stem, path


def _load_file(file: Traversable, readers: Sequence[Path] = ()) -> dict[str, Any]:
    """Load the table of a study file with everything that it extends.

    Args:
        file: where it is.
        readers: the files that extend it, the nearest last.
    """
    here = resolve_path(str(file))
    # Each file knows who reads it, so that a circle ends with its whole way and not in a deep
    # recursion.
    if here in readers:
        circle = " extends ".join(path.name for path in (*readers[readers.index(here) :], here))
        raise ConfigError(f"{file} extends itself: {circle}")
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    content = _parse_text(text, str(file), Path(str(file)).parent, (*readers, here))
    # What this file extends is resolved already, from its own folder.
    _resolve_data_paths(content.get("data"), here.parent)
    _resolve_model_path(content, here.parent)
    return content


def _resolve_data_paths(data: object, folder: Path) -> None:
    """Resolve paths of custom data relative to the study file, in place.

    A path that exists from the current folder stays.
    """
    if not isinstance(data, dict) or data.get("dataset") not in OWN_KINDS:
        return
    options = data.get("options")
    if not isinstance(options, dict):
        return
    for key in {"path", "test", "schema"} & set(options):
        value = options[key]
        if isinstance(value, str) and not expand_home(value).exists() and (folder / value).exists():
            options[key] = str(folder / value)


def _resolve_model_path(content: dict[str, Any], folder: Path) -> None:
    """Resolve the folder of a model of transformers relative to the study file, in place."""
    model = content.get("model")
    table = {"kind": model} if isinstance(model, str) else model
    if not isinstance(table, dict) or not str(table.get("kind")).startswith(PREFIX):
        return
    path = str(table["kind"]).removeprefix(PREFIX)
    # A path from where the command runs comes first, as for all paths that are given there.
    if not expand_home(path).exists() and (folder / path).exists():
        content["model"] = {**table, "kind": f"{PREFIX}{folder / path}"}


def _parse_text(
    text: str, where: str, folder: Path = Path(), readers: Sequence[Path] = ()
) -> dict[str, Any]:
    """Parse a study file's text with everything that it extends; see `_load_file`."""
    try:
        content = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    if "extends" not in content:
        return content
    source = content.pop("extends")
    try:
        require(
            isinstance(source, str),
            "extends",
            source,
            "the name of a study or the path of a file, as text",
        )
        base = _load_file(_find_study(source, find_builtin_studies(bases=True), folder)[1], readers)
        # A study has a name of its own, or that of its file.
        base.pop("name", None)
        _extend_study(base, content)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return base


def _extend_study(base: dict[str, Any], own: dict[str, Any]) -> None:
    """Change the table of a study, in place, as a file that extends it says.

    First what it unsets goes. Then tables merge key by key, and any other value replaces.
    `methods.NAME.key` changes methods as `--set` does; a [[methods]] entry changes the method of
    its label, or is added when there is none. Last, `use_methods` says which run, in which order.
    """
    unset, used = own.pop("unset", []), own.pop("use_methods", None)
    methods = own.pop("methods", {})
    # Before the own settings: a table can be emptied and filled again in one file.
    for path in _check_names("unset", unset):
        _unset_path(base, parse_path(path), path)
    _merge_tables(base, own, "")
    merged = base.setdefault("methods", [])
    _require_methods(merged)
    if isinstance(methods, Mapping):
        _merge_methods(merged, methods)
    else:
        _require_methods(methods)
        # Labels are folders, and some file systems ignore case.
        there = {fold_name(_entry_label(entry)): entry for entry in merged}
        for entry in methods:
            label = _entry_label(entry)
            if fold_name(label) in there:
                changed = drop_keys(entry, {"label"})
                _merge_tables(there[fold_name(label)], changed, f"methods.{label}")
            elif "kind" in entry:
                merged.append(entry)
            else:
                raise ConfigError(
                    f"{describe_unknown('method', label, map(_entry_label, merged))}; a new one "
                    "needs a kind"
                )
    if used is not None:
        base["methods"] = []
        for name in _check_names("use_methods", used):
            base["methods"] += _find_methods(merged, name)


def _check_names(key: str, value: Any) -> list[str]:
    require(
        isinstance(value, list) and all(isinstance(name, str) for name in value),
        key,
        value,
        "a list of names",
    )
    return value


def _unset_path(content: dict[str, Any], parts: Sequence[str], path: str) -> None:
    """Remove what is at a path; `methods.NAME` reaches methods as in `--set`."""
    first, *rest = parts
    if first not in content:
        raise ConfigError(f"unset {path}: {describe_unknown('key', first, content)}")
    inner = content[first]
    if not rest:
        del content[first]
    elif first == "methods":
        _require_methods(inner)
        found, key = _find_methods(inner, rest[0]), rest[1:]
        if not key:
            content["methods"] = [entry for entry in inner if entry not in found]
        else:
            # The methods that have the key; where none has it, the first one gives the error.
            for entry in [entry for entry in found if key[0] in entry] or found[:1]:
                _unset_path(entry, key, path)
    else:
        require(isinstance(inner, dict), f"unset {path}: {first}", inner, "a table")
        _unset_path(inner, rest, path)


def _require_methods(value: object) -> None:
    fits = isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)
    require(fits, "methods", value, "[[methods]] tables, each with a kind")


def _entry_label(entry: Mapping[str, Any]) -> str:
    return str(entry.get("label") or _entry_kind(entry))


def _expand_name(content: dict[str, Any], section: str) -> None:
    """Replace a name that stands for a table by that table, in place."""
    if isinstance(name := content.get(section), str):
        content[section] = {_NAMED[section]: name}


def _get_section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; expected a table: [{name}]")
    return value


def _flatten_grid(name: str, grid: object) -> dict[str, list[Any]]:
    """Return a grid by dotted path, whether its paths were quoted or not."""
    if not isinstance(grid, Mapping):
        raise ConfigError(
            f"{name} is {grid!r}; expected a table with a list of values for each setting"
        )
    flat = dict(_iterate_leaves("", grid))
    for path, values in flat.items():
        require(
            isinstance(values, list) and bool(values), f"{name}.{path}", values, "a list of values"
        )
    return flat


def _iterate_leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted path; methods by their labels."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iterate_leaves(f"{prefix}.{key}" if prefix else key, inner)
    elif prefix == "methods":
        for entry in value:
            yield from _iterate_leaves(f"methods.{entry['label']}", entry)
    else:
        yield prefix, value


def _parse_methods(value: object, settings: Settings, to_run: bool) -> tuple[MethodConfig, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"methods is {value!r}; expected [[methods]] tables, each with a kind")
    found = []
    for place, entry in enumerate(value):
        found.append(_parse_method(entry, settings, f"methods[{place}]", to_run))
    return tuple(found)


@dataclass(frozen=True)
class _MethodHead(tables.Configurable):
    """The keys of a [[methods]] table that are not settings."""

    kind: str
    label: str | None = None
    paper: str | None = None
    package: str = ""


_HEAD_KEYS = tuple(tables.settable_fields(_MethodHead))


def _parse_method(entry: object, settings: Settings, where: str, to_run: bool) -> MethodConfig:
    """Parse one [[methods]] table: its own fields, any key of [local], any setting of the study.

    Where a method has a field of the same name, the key means that field; `local.NAME` still
    reaches the setting of local training.
    """
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {entry!r}; expected a table with a kind")
    found = select_keys(entry, _HEAD_KEYS)
    head = tables.parse_settings(_MethodHead, found, where)
    # Reading results imports nothing: None stands for a method that is not built in.
    kind = registry.find_method(head.kind, head.package) if to_run else METHODS.get(head.kind)
    label = head.label or head.kind
    # An import path is no name of a folder.
    if not head.label and kind is not None and ":" in head.kind:
        label = kind.kind
    label = normalize_name(label)
    require(is_label(label), f"{where}: label", label, LABEL)
    own = _guess_own_keys(entry) if kind is None else _option_names(kind)
    local = set(tables.settable_fields(LocalTraining)) - own
    run = set(tables.settable_fields(Settings)) - {"local"} - own
    where = f"methods.{label}"
    for key in entry:
        if key not in own | local | run | {"local", *_HEAD_KEYS}:
            raise ConfigError(f"{where}: {describe_unknown('key', key, own | local | run)}")

    def select_given(keys: set[str]) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if key in keys}

    # Later ones win: the study's settings, then keys of the method's table, then its `local`
    # table.
    given = {**_field_values(settings.local), **select_given(local), **_get_section(entry, "local")}
    trained = tables.parse_settings(LocalTraining, given, where)
    merged = {**_field_values(settings), **select_given(run), "local": trained}
    settings = tables.parse_settings(Settings, merged, where)
    # Kept as it is: results can be read where the method is not installed.
    if kind is None:
        rest = drop_keys(entry, ("kind", "label", "paper"))
        return MethodConfig(label, registry.StoredMethod(head.kind, rest), settings, head.paper)
    given = select_given(own)
    kind, table = registry.resolve_class(kind, given)
    method = tables.parse_settings(kind, table, where)
    registry.remember_given(method, given)
    return MethodConfig(label, method, settings, head.paper)


def _option_names(method: type[Method]) -> set[str]:
    """The settings of a method, and options of published code that its table may set as well."""
    published = registry.find_published(method) or method
    return {*tables.settable_fields(method), *tables.settable_fields(published)}


def _guess_own_keys(entry: Mapping[str, Any]) -> set[str]:
    """Return the keys of a [[methods]] table that may be fields of a method not imported here.

    These are the keys that neither [local] nor the study has as a setting, or whose value does not
    fit that setting.
    """
    known: dict[str, type[Any]] = dict.fromkeys(
        tables.settable_fields(LocalTraining), LocalTraining
    )
    known |= dict.fromkeys(tables.settable_fields(Settings), Settings)
    # Newer than stored studies: in those the key is a field of the method.
    for key in ADDED_FIELDS:
        known.pop(key, None)
    own = set(entry) - set(known) - {"local", *_HEAD_KEYS}
    for key in set(entry) & set(known) - {"local"}:
        try:
            tables.parse_settings(known[key], {key: entry[key]}, key)
        except ConfigError:
            # A value that is wrong for the setting is that of a field of the same name.
            own.add(key)
    return own


def _field_values(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _make_method_table(entry: MethodConfig, study: Settings, decided: bool) -> dict[str, Any]:
    """Return one [[methods]] table: its fields, and settings that differ from the study's."""
    method, paper = entry.method, {"paper": entry.paper} if entry.paper else {}
    if isinstance(method, registry.StoredMethod):
        return {"kind": entry.kind, "label": entry.label, **paper, **method.settings}
    own = _option_names(type(method))

    def find_changes(mine: Any, theirs: Any) -> dict[str, Any]:
        changes = {}
        for name, value in _field_values(mine).items():
            if value != getattr(theirs, name):
                # TOML has no null; this text stands for it.
                changes[name] = tables.NONE if value is None else value
        return changes

    local = find_changes(entry.settings.local, study.local)
    run = find_changes(entry.settings, study)
    run.pop("local", None)
    # A method's field of the same name has the key, so the setting goes under `local`.
    hidden = {}
    for name in list(local):
        if name in own:
            hidden[name] = local.pop(name)
    kind, package = registry.name_of(type(method))
    head = {"kind": kind, "label": entry.label, **paper}
    if package:
        head["package"] = package
    # Undecided, only a preset among these options makes a difference.
    published = registry.with_published_options(method)
    if decided or isinstance(published, tables.WithPresets):
        method = published
    own_said = tables.to_plain(method, decided=decided)
    # `head` comes first for the order of keys, and again so that no field replaces it.
    table = {**head, **own_said, **head, **run, **local}
    if hidden:
        table["local"] = hidden
    return table


def apply_assignment(content: dict[str, Any], assignment: str) -> None:
    """Apply one `path=value` to the table of a study file, in place.

    The value is TOML; what is not TOML is taken as text. `methods.NAME.key` reaches the method of
    that label, or else all methods of that kind; see `definition.match_methods`.

    Raises:
        ConfigError: when it is no assignment, or leads nowhere.

    Example:
        >>> content = {"methods": [{"kind": "dac"}]}
        >>> apply_assignment(content, "methods.dac.tau=30")
        >>> content
        {'methods': [{'kind': 'dac', 'tau': 30}]}
    """
    path, equals, value = assignment.partition("=")
    if not equals or not path.strip():
        raise ConfigError(
            f"--set got {assignment!r}; expected path=value, such as methods.dac.tau=30"
        )
    text, bare = json.dumps(value.strip(), ensure_ascii=False), path.strip()
    # Labels may have spaces and letters of any script, which TOML takes in quotes alone.
    if bare.startswith("methods.") and '"' not in bare:
        parts = bare.split(".")
        for place, part in enumerate(parts):
            if not _BARE_KEY.fullmatch(part):
                parts[place] = json.dumps(part, ensure_ascii=False)
        bare = ".".join(parts)
    # As it is; with the value as text; with a quoted path; with both.
    for line in (assignment, f"{path} = {text}", f"{bare} = {value}", f"{bare} = {text}"):
        try:
            nested = parse_toml(line)
            break
        except tomllib.TOMLDecodeError:
            continue
    else:
        raise ConfigError(
            f"--set got {assignment!r}; quote names with spaces: 'methods.\"my DAC\".tau=3'"
        )
    _merge_tables(content, nested, "")


def set_path(content: dict[str, Any], path: str | Sequence[str], value: Any) -> None:
    """Set a plain value at a path, dotted or in parts, in the table of a study file, in place."""
    nested: Any = value
    for key in reversed(parse_path(path) if isinstance(path, str) else path):
        nested = {key: nested}
    _merge_tables(content, nested, "")


def parse_path(path: str) -> list[str]:
    """Return the parts of a dotted path, as TOML reads it.

    Example:
        >>> parse_path('methods."my DAC".tau')
        ['methods', 'my DAC', 'tau']
    """
    try:
        nested: Any = parse_toml(f"{path} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path!r} is no path of a setting, such as methods.dac.tau: {error}"
        ) from error
    parts = []
    while isinstance(nested, dict):
        parts.append(next(iter(nested)))
        nested = nested[parts[-1]]
    return parts


def _merge_tables(content: dict[str, Any], nested: Mapping[str, Any], path: str) -> None:
    for key, value in nested.items():
        here = f"{path}.{key}" if path else key
        # What is said of a model or of data is added to a name that was given alone.
        if here in _NAMED and isinstance(value, Mapping):
            _expand_name(content, here)
        if here == "methods" and isinstance(value, Mapping):
            _merge_methods(content.get("methods", []), value)
        elif isinstance(value, Mapping) and isinstance(content.get(key), dict):
            _merge_tables(content[key], value, here)
        elif isinstance(value, Mapping) and isinstance(content.get(key), list):
            _merge_items(content[key], value, here)
        else:
            content[key] = value


def _merge_items(items: list[Any], changes: Mapping[str, Any], path: str) -> None:
    """Change items of a list by their number, from 0: `data.shift.0.degrees`."""
    for key, value in changes.items():
        if not key.isdecimal() or int(key) >= len(items):
            known = f"0 to {len(items) - 1}" if items else "none: it is empty"
            raise ConfigError(
                f"{path} is a list and has no item {key!r} (its items are {known}); expected "
                f"{path}.NUMBER, or the whole list, as in --set '{path}=[...]'"
            )
        item = items[int(key)]
        if isinstance(value, Mapping) and isinstance(item, dict):
            _merge_tables(item, value, f"{path}.{key}")
        elif isinstance(value, Mapping) and isinstance(item, list):
            _merge_items(item, value, f"{path}.{key}")
        else:
            items[int(key)] = value


def _merge_methods(methods: Sequence[dict[str, Any]], changes: Mapping[str, Any]) -> None:
    for name, change in changes.items():
        if not isinstance(change, Mapping):
            raise ConfigError(
                f"methods.{name} is a method, not a setting; expected methods.{name}.SETTING=value"
            )
        for entry in _find_methods(methods, name):
            _merge_tables(entry, change, f"methods.{name}")


def _find_methods(methods: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the methods of a label, or else all of a kind; see `match_methods`."""
    names = [(_entry_label(entry), str(entry.get("kind"))) for entry in methods]
    found = [methods[place] for place in match_methods(name, names)]
    if not found:
        raise ConfigError(describe_unknown("method of this study", name, set().union(*names)))
    return found


def _entry_kind(entry: Mapping[str, Any]) -> str:
    """Return a method's kind, which is its label by default, also for an import path."""
    kind = str(entry.get("kind"))
    return registry.find_method(kind).kind if ":" in kind else kind
