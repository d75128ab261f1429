"""Studies that differ in a setting, such as points of a sweep, as one table: methods by values."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.errors import DataError
from coterie.functional.metrics import REGISTRY, Metric
from coterie.results import pairs
from coterie.results.coverage import describe_coverage, find_common_seeds
from coterie.results.pairs import Pair
from coterie.results.selection import group_by_study
from coterie.results.stored_runs import StoredRun, load_runs
from coterie.results.summary import summarize_study


@dataclass(frozen=True)
class VariedResults:
    """Final test values of methods at each value of a setting.

    Args:
        setting: its name or path.
        metric: what is shown.
        rows: as those of a summary, over the same seeds; `cluster` is the value, "alpha = 0.1".
        pairs: of the methods at one value, in the same form, corrected for all of them.
        notes: which runs are not in them.
    """

    setting: str
    metric: Metric
    rows: Sequence[Mapping[str, Any]]
    pairs: Sequence[Pair]
    notes: Sequence[str]


def tabulate_setting(
    folders: Sequence[str | Path], setting: str, *, metric: str | None = None, cluster: str = "all"
) -> VariedResults:
    """Collect the results of studies by the value of a setting.

    Args:
        folders: of studies, or of a sweep, which holds them; a setting of methods varies in one.
        setting: its name, or its path in a study file: `data.shift.0.concentration`; or "NAME=PATH"
            to show it under another name.
        metric: the one by which methods are compared when None.
        cluster: over which clients.

    Raises:
        DataError: when there is no finished run, the setting does not vary, or several are given.
    """
    if "," in setting:
        raise DataError(
            f"--setting {setting}: a table has one setting in its columns; give one of them, and "
            "the others of a grid stand with the names of the methods"
        )
    setting, called = split_setting(setting)
    runs, problems = load_runs(folders)
    studies: dict[Path, dict[str, Any]] = {}
    notes: list[str] = []
    for own, _, content in group_by_study(folders, runs, problems):
        notes += [f"{content['study']}: {note}" for note in describe_coverage(content)]
        if own:
            folder = own[0].folder.parent.parent
            studies[folder] = {run.label: find_value(run.config, setting) for run in own}
    contents = {}
    for folder in studies:
        content = summarize_study(folder)
        # A point without results must not empty the seeds of the others.
        if content["rows"]:
            contents[folder] = content
    seeds = find_common_seeds({str(folder): one["seeds"] for folder, one in contents.items()})
    found: list[tuple[Any, Path, dict[str, Any]]] = []
    compared: list[tuple[str, Path, Pair]] = []
    for folder, content in contents.items():
        # Seeds that all points have: means over other seeds would differ by them, too.
        if list(content["seeds"]) != seeds:
            content = summarize_study(folder, seeds)
        values = studies[folder]
        for row in content["rows"]:
            if row["cluster"] == cluster and (value := values.get(row["label"])) is not None:
                label = strip_settings(row["label"], [setting])
                place = format_value(called, value)
                found.append((value, folder, {**row, "label": label, "cluster": place}))
        for pair in pairs.parse_pairs(content):
            a, b = values.get(pair.method_a), values.get(pair.method_b)
            # Only methods at the same value: a column of the table has one.
            if pair.cluster == cluster and a is not None and a == b:
                first = strip_settings(pair.method_a, [setting])
                second = strip_settings(pair.method_b, [setting])
                pair = replace(pair, method_a=first, method_b=second)
                compared.append((format_value(called, a), folder, pair))
    if not found:
        raise DataError(
            f"no finished run here has a setting {setting}; give its path, as in [sweep]"
        )
    # Numbers in ascending order; other values as they come.
    if all(isinstance(value, int | float) for value, *_ in found):
        found.sort(key=lambda one: one[0])
    points = []
    for _, folder, row in found:
        points.append((folder, row["label"], (row["cluster"], row["metric"])))
    rest = name_other_settings(points, [setting])
    rows = []
    for _, folder, row in found:
        rows.append({**row, "label": row["label"] + rest[folder]})
    if len({row["cluster"] for row in rows}) < 2:
        raise DataError(
            f"the finished runs here do not vary {setting}; give the folders of all points of a "
            "sweep"
        )
    known = REGISTRY
    for content in contents.values():
        known = known.add_stored(content.get("metrics") or {})
    name = metric or known.choose_main(row["metric"] for row in rows)
    own = [one for one in compared if one[2].metric == name]
    placed = _correct_pairs(own, rest, name, cluster)
    return VariedResults(setting, known[name], rows, placed, notes)


def _correct_pairs(
    compared: Sequence[tuple[str, Path, Pair]], rest: Mapping[Path, str], metric: str, cluster: str
) -> list[Pair]:
    """Correct the pairs of a table for their number, and name them as its rows are named.

    Args:
        compared: the value of the setting, the folder of the study, and the pair.
        rest: what the label of each study's methods ends with.
        metric: of all pairs.
        cluster: of all pairs.
    """
    # Corrected again for all pairs of the table, which is read as a whole.
    corrected = pairs.select_pairs([pair for *_, pair in compared], metric=metric, cluster=cluster)
    placed = []
    for (place, folder, _), pair in zip(compared, corrected, strict=True):
        a, b = pair.method_a + rest[folder], pair.method_b + rest[folder]
        placed.append(replace(pair, method_a=a, method_b=b, cluster=place))
    return placed


def name_other_settings(
    points: Iterable[tuple[Path, str, Hashable]], settings: Sequence[str]
) -> dict[Path, str]:
    """Return what distinguishes studies with a method at the same values; "" where none do.

    Of a grid the folder of each point names its other settings. Without them one point would stand
    for another, or a mean over seeds would be one over points.

    Args:
        points: the folder of a study, the label of a method without the settings, and what must be
            there once: the values of the settings, a seed.
        settings: their names or paths.

    Raises:
        DataError: when the names of the folders do not distinguish them.

    Example:
        >>> grid = [(Path("lr=1,beta=2"), "A", 1), (Path("lr=1,beta=3"), "A", 1)]
        >>> list(name_other_settings(grid, ["local.lr"]).values())
        [', beta=2', ', beta=3']
    """
    points = list(points)

    def find_double(named: Mapping[Path, str]) -> tuple[Path, Path] | None:
        seen: dict[tuple[str, Hashable], Path] = {}
        for folder, label, point in points:
            first = seen.setdefault((label + named[folder], point), folder)
            if first != folder:
                return first, folder
        return None

    named = dict.fromkeys((folder for folder, *_ in points), "")
    if find_double(named) is None:
        return named
    names = [one.rpartition(".")[-1] for one in settings]
    for folder in named:
        other = strip_settings(folder.name, names).strip(" ,")
        # `strip_settings` returns the first name when nothing else is there.
        named[folder] = "" if other == names[0] else f", {other}"
    if (double := find_double(named)) is not None:
        raise DataError(
            f"{double[0]} and {double[1]} have the same methods at the same values of "
            f"{', '.join(settings)}, and differ in something else; give the folders of one of them"
        )
    return named


def find_value(config: Mapping[str, Any], name: str) -> Any:
    """Find the value of a setting of a run; None where there is none.

    Args:
        config: of the run.
        name: the name of the setting, or its path: `data.shift.0.concentration`.
    """
    method = (config.get("methods") or [config.get("method") or {}])[0]
    if "." not in name:
        # In this order: what a method sets for itself wins over the study's.
        for place in (method, config.get("local") or {}, config.get("data") or {}, config):
            if name in place:
                return place[name]
        return None
    value: Any = config
    path = name.split(".")
    if path[0] == "methods":
        # A path of one method has no value in the runs of another.
        if path[1] not in (method.get("kind"), strip_settings(str(method.get("label")), path[-1:])):
            return None
        value, path = method, path[2:]
    # What a sweep sets of local training is in the method's table, and wins over the study's.
    elif path[0] == "local" and len(path) == 2 and path[1] in method:
        return method[path[1]]
    for key in path:
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def split_setting(text: str) -> tuple[str, str]:
    """Return the path of a setting and its name: "NAME=PATH", or the last part of the path.

    Example:
        >>> split_setting("alpha=data.shift.0.concentration"), split_setting("local.lr")
        (('data.shift.0.concentration', 'alpha'), ('local.lr', 'lr'))
    """
    name, _, path = text.rpartition("=")
    path = path.strip()
    return path, name.strip() or path.rpartition(".")[-1]


def format_value(name: str, value: Any) -> str:
    """Return a setting with its value, such as "alpha = 0.1"."""
    return f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"


def strip_settings(label: str, settings: Sequence[str]) -> str:
    """Return the label of a point of a sweep without the values of some settings.

    Example:
        >>> strip_settings("Inverse loss, tau=30", ["tau"])
        'Inverse loss'
    """
    for one in settings:
        # A label has the last part of a path.
        name = re.escape(one.rpartition(".")[-1])
        label = re.sub(rf"[\s,]*\b{name}=[^\s,]*", "", label)
    return label or settings[0].rpartition(".")[-1]


def name_runs(
    found: Sequence[tuple[StoredRun, Sequence[Hashable]]], settings: Sequence[str]
) -> list[tuple[str, str]]:
    """Return what names each run in addition to some settings.

    Args:
        found: runs with their values of the settings.
        settings: their names or paths.

    Returns:
        The label of each without the settings, and what is to be added to it; see
        `name_other_settings`.
    """
    points = []
    for run, values in found:
        label = strip_settings(run.label, settings)
        points.append((run.folder.parent.parent, label, (*values, run.seed)))
    rest = name_other_settings(points, settings)
    return [(label, rest[folder]) for folder, label, _ in points]
