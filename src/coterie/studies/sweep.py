"""Sweeps: one study for each point of a grid over its settings.

Settings of methods and of training vary inside a study: a method comes once for each value, on the
same data. Settings of the data or the model make studies of their own, in folders under that of the
sweep:

    runs/<sweep>/config.toml, summary.json         the sweep, and the rows of all its studies
    runs/<sweep>/num_clients=20/                   a study like any other
"""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, RunExistsError, describe_unknown
from coterie.models.layout import ModelSource
from coterie.results.coverage import RunStatus, find_common_seeds, statuses_to_json
from coterie.results.stored_runs import has_runs
from coterie.results.summary import SUMMARY, replace_nonfinite, summarize_study, write_study_files
from coterie.simulation.run import Note, Observer
from coterie.simulation.workers import FanOut, end_unguarded_import
from coterie.studies import config
from coterie.studies.config import parse_path, set_path
from coterie.studies.definition import StudyConfig, match_methods
from coterie.studies.inputs import FederationSource
from coterie.studies.run import (
    CONFIG,
    FoundRuns,
    FoundTable,
    Study,
    list_standings,
    load_stored_study,
    load_study_results,
    run_studies,
)

_FEDERATED = ("data", "model")
_NOT_IN_NAMES = re.compile(r"[^\w.+-]+")
_NOT_AT_ENDS = re.compile(r"^[^\w.+-]+|[^\w.+-]+$")


def format_setting(name: str, value: Any) -> str:
    """Return a setting and its value as part of a folder's name, such as "tau=30"."""
    # As JSON, which writes true and lists as a study file does.
    text = json.dumps(value) if isinstance(value, (list, dict, bool)) else str(value)
    # Brackets go before their places become hyphens, which would look like the sign of a number.
    text = _NOT_IN_NAMES.sub("-", _NOT_AT_ENDS.sub("", text))
    # A sign at the end of a word says nothing; before a number it is its minus.
    if isinstance(value, str):
        text = text.strip("-.")
    return f"{name}={text}"


@dataclass(frozen=True)
class _SweepAxis:
    """A setting that varies, or several that vary together.

    Args:
        paths: each setting, as parts of its dotted path.
        values: for each point, a value of each setting.
    """

    paths: tuple[tuple[str, ...], ...]
    values: Sequence[tuple[Any, ...]]

    @property
    def makes_studies(self) -> bool:
        """Whether each point makes a separate study."""
        return any(path[0] in _FEDERATED for path in self.paths)

    def format_tag(self, value: tuple[Any, ...]) -> str:
        """Return a point as part of a folder's name."""
        parts = zip(self.paths, value, strict=True)
        return ",".join(format_setting(path[-1], one) for path, one in parts)


def _parse_axis(text: str, values: Sequence[Any]) -> _SweepAxis:
    """Parse the path of a setting and its values, or paths with commas and lists of values."""
    paths = tuple(tuple(parse_path(path.strip())) for path in _split_paths(text))
    if len(paths) == 1:
        return _SweepAxis(paths, [(value,) for value in values])
    for value in values:
        if not isinstance(value, list | tuple) or len(value) != len(paths):
            raise ConfigError(
                f"sweep over {text}: found {value!r}; expected a list of {len(paths)} values, one "
                "for each setting"
            )
    return _SweepAxis(paths, list(map(tuple, values)))


def _split_paths(text: str) -> list[str]:
    """Split at commas that are not inside quotes: a label may have some."""
    return re.findall(r"""(?:[^,"']|"[^"]*"|'[^']*')+""", text)


def expand_sweep(study: StudyConfig, *, to_run: bool = True) -> tuple[StudyConfig, ...]:
    """Return the studies of a sweep; the study itself when it sweeps nothing.

    Args:
        study: the sweep.
        to_run: whether they will be run; to read their results needs no method, see
            `config.parse_study_text`.

    Raises:
        ConfigError: when a setting does not exist, or a value does not fit.
    """
    if not study.sweep:
        return (study,)
    # Undecided: at each point, a preset of a method sets its values again.
    content = config.make_study_table(study, decided=False)
    # Each point is a study that sweeps nothing.
    content.pop("sweep")
    outer, inner = [], []
    for path, values in study.sweep.items():
        axis = _parse_axis(path, values)
        if axis.makes_studies:
            outer.append(axis)
        else:
            inner.append(axis)
    # Methods first: all studies of the sweep have the same ones.
    content["methods"] = list(_expand_methods(content["methods"], inner))
    studies = []
    for point in _iterate_points(outer):
        # A deep copy: a value that is set at one point must not reach the others.
        changed = copy.deepcopy(content)
        for axis, values in point:
            for path, value in zip(axis.paths, values, strict=True):
                set_path(changed, path, value)
        tag = ",".join(_format_tags(point))
        named = {**changed, "name": f"{study.name}/{tag}" if tag else study.name}
        one = config.parse_study(named, to_run=to_run)
        # Signs that no name of a folder has are left out of it, so that two values can have one.
        if any(other.name == one.name and other != one for other in studies):
            raise ConfigError(
                f"two points of the sweep would have the folder {tag!r}; expected values that "
                "differ in letters, digits or the signs . _ + -"
            )
        studies.append(one)
    return tuple(studies)


def run_sweep(
    study: StudyConfig | str | Path,
    *,
    out: str | Path = "runs",
    data_dir: str | Path | None = None,
    workers: int = 1,
    resume: bool = True,
    overwrite: bool = False,
    federation: FederationSource | None = None,
    model: ModelSource | None = None,
    observer: Observer | None = None,
    notes: Callable[[Note | FoundRuns | FoundTable], None] | None = None,
    over: FanOut | None = None,
) -> tuple[Study, ...]:
    """Run a study for each point of its sweep; a study without one is run as it is.

    The arguments are those of `run_study`; the sweep's folder is made under `out`.

    Returns:
        One study, or one for each choice of the settings of data and model.

    Raises:
        RunExistsError: when the sweep's folder is there and `resume` is False, or it varies other
            settings.
    """
    end_unguarded_import()
    study = study if isinstance(study, StudyConfig) else config.load_study(study)
    points = _expand_by_point(study)
    folder, files = Path(out) / study.name, {}
    # A sweep over settings of methods alone is one study, under its own name.
    if [*points] != [""]:
        _check_sweep_folder(study, folder, resume=resume, overwrite=overwrite)
        files[CONFIG] = config.format_study(study, decided=False)
    done = run_studies(
        points, folder, out=Path(out), files=files, data_dir=data_dir, workers=workers,
        resume=resume, overwrite=overwrite, federation=federation, model=model, observer=observer,
        notes=notes, over=over,
    )  # fmt: skip
    if files:
        write_study_files(folder, {SUMMARY: json.dumps(join_summaries(done), indent=1) + "\n"})
    return done


def _expand_by_point(study: StudyConfig, *, to_run: bool = True) -> dict[str, StudyConfig]:
    """Return the studies of a sweep by their points; the arguments are those of `expand_sweep`."""
    return {_find_point(one, study): one for one in expand_sweep(study, to_run=to_run)}


def _find_point(study: StudyConfig, sweep: StudyConfig) -> str:
    """Return the name of a study in its sweep, such as "num_clients=8"; "" for the sweep itself."""
    return study.name.removeprefix(sweep.name).removeprefix("/")


def _check_sweep_folder(study: StudyConfig, folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse to write a sweep over one that varies other settings, or over a study."""
    if overwrite or not (folder / CONFIG).exists():
        return
    if not resume:
        raise RunExistsError(f"{folder} exists; expected a new folder, or overwrite")
    found = load_stored_study(folder)[0]
    for path in sorted({*study.sweep, *found.sweep}):
        there, here = found.sweep.get(path), study.sweep.get(path)
        # More values of a setting continue the sweep.
        if there is None or here is None or any(value not in here for value in there):
            raise RunExistsError(
                f"{folder} is a sweep with other values of {path} ({there} there, {here} here); "
                "--overwrite starts again, --out keeps both"
            )


@dataclass(frozen=True)
class Plan:
    """All runs of a study, of a sweep, or of the trials of a tuning, in a folder.

    Args:
        folder: of it.
        study: the study or the sweep.
        points: the studies of a sweep by their folders below; of a study, itself under "".
    """

    folder: Path
    study: StudyConfig
    points: Mapping[str, StudyConfig]

    def list_standings(self) -> dict[str, list[RunStatus]]:
        """Return how each run stands, by point; every file of them is read."""
        standings = {}
        for point, one in self.points.items():
            standings[point] = list_standings(one, self.folder / point)
        return standings


def load_plan(folder: str | Path) -> Plan:
    """Return the plan in a folder, whether its runs have begun or not.

    Args:
        folder: of a sweep, of a study, or of one of its runs.

    Raises:
        ConfigError: when there is none in the folder.
    """
    study, out = load_stored_study(folder)
    return Plan(out / study.name, study, _expand_by_point(study, to_run=False))


def load_sweep_results(folder: str | Path) -> tuple[Study, ...]:
    """Load the finished runs of a sweep, or of a study, and summarize them; nothing is written.

    Args:
        folder: of a sweep, of a study, or of one of its runs.

    Raises:
        ConfigError: when there is none in the folder.
    """
    plan = load_plan(folder)
    return tuple(_load_point(study, plan.folder / point) for point, study in plan.points.items())


def _load_point(study: StudyConfig, folder: Path) -> Study:
    """Load one point of a sweep under its present name: the sweep may have been renamed."""
    if has_runs(folder):
        found = load_study_results(folder)
        return replace(found, config=replace(found.config, name=study.name))
    # Nothing has begun at this point: all of its runs are listed as left out.
    absent = statuses_to_json(list_standings(study, folder))
    content = {"study": study.name, "seeds": [], "left_out": absent, "rows": [], "timing": []}
    return Study(folder, study, content, {})


def join_summaries(studies: Sequence[Study]) -> dict[str, Any]:
    """Return one summary.json for several studies of a sweep, with their points in the labels.

    All means are over the same seeds, the ones that every study has.
    """
    if len(studies) == 1:
        return dict(studies[0].summary)
    name = studies[0].config.name.rpartition("/")[0]
    seeds = find_common_seeds({one.config.name: one.summary["seeds"] for one in studies})
    # Without pairs: methods at different points of a sweep are not compared in pairs.
    content: dict[str, Any] = {
        "study": name,
        "seeds": seeds,
        "left_out": [],
        "rows": [],
        "timing": [],
    }
    for one in studies:
        point = one.config.name.removeprefix(f"{name}/")
        found = one.summary
        # Its means are over other seeds, so it is summarized again over the common ones.
        if found["rows"] and list(found["seeds"]) != seeds:
            found = replace_nonfinite(summarize_study(one.folder, seeds))
        for part in ("left_out", "rows", "timing"):
            for row in found[part]:
                content[part].append({**row, "label": f"{row['label']}, {point}"})
        if declared := found.get("metrics"):
            content["metrics"] = {**content.get("metrics", {}), **declared}
    return content


def _iterate_points(
    axes: Sequence[_SweepAxis],
) -> Iterator[list[tuple[_SweepAxis, tuple[Any, ...]]]]:
    """Yield every choice of one value for each axis."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield list(zip(axes, values, strict=True))


def _format_tags(point: Iterable[tuple[_SweepAxis, tuple[Any, ...]]]) -> list[str]:
    """Return each value of a point as part of a name, such as "tau=30"."""
    return [axis.format_tag(value) for axis, value in point]


def _expand_methods(
    entries: Sequence[dict[str, Any]], axes: Sequence[_SweepAxis]
) -> Iterator[dict[str, Any]]:
    """Yield each method once for every point of the axes that apply to it, with a new label."""
    # An axis that reaches no method is refused at the end.
    used = set()
    for entry in entries:
        concerning = []
        for axis in axes:
            if _list_paths_for(axis, entry, entries):
                concerning.append(axis)
                used.add(axis.paths)
        # Without an axis there is one empty point: the method comes once, under its own label.
        for point in _iterate_points(concerning):
            changed = copy.deepcopy(entry)
            for axis, values in point:
                reached = _list_paths_for(axis, entry, entries)
                for path, value in zip(axis.paths, values, strict=True):
                    if path in reached:
                        # Without "methods" and the name of the method.
                        set_path(changed, path[2:] if path[0] == "methods" else path, value)
            if point:
                changed["label"] = " ".join([entry["label"], *_format_tags(point)])
                changed.pop("paper", None)  # the published row is of one setting
            yield changed
    for axis in axes:
        if axis.paths not in used:
            names = set[str]()
            for entry in entries:
                names |= {entry["label"], entry["kind"]}
            raise ConfigError(
                describe_unknown("method of this study in sweep", axis.paths[0][1], names)
            )


def _list_paths_for(
    axis: _SweepAxis, entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> list[tuple[str, ...]]:
    """Return the settings of an axis that vary a method: the name in their path reaches it."""
    names = [(other["label"], other["kind"]) for other in entries]
    found = []
    for path in axis.paths:
        # A setting outside the methods varies all of them.
        reached = entries
        if path[0] == "methods":
            reached = [entries[place] for place in match_methods(path[1], names)]
        # By identity: two entries may be equal.
        if any(other is entry for other in reached):
            found.append(path)
    return found
