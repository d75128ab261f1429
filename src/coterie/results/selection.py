"""Which stored runs of a study are compared: the seeds that all its methods finished."""

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from coterie.errors import DataError
from coterie.results import coverage
from coterie.results.coverage import RunStatus
from coterie.results.stored_runs import StoredRun, UnreadableRun, find_planned_runs, group_by_label


def list_run_statuses(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun], *folders: str | Path
) -> list[RunStatus]:
    """List the status of each run of a study: of its planned runs, and of others that exist.

    Args:
        runs: its runs, as `load_runs` returns them.
        problems: its folders that could not be read.
        folders: the study's folder, whose file lists its planned runs; or the folders of some
            methods or runs.
    """
    statuses = {(run.label, run.seed): _find_run_status(run) for run in runs}
    for problem in problems:
        statuses[problem.label, problem.seed] = problem.status
    planned = list(chain.from_iterable(find_planned_runs(Path(folder)) for folder in folders))
    # Methods stand in the order of the study, and unplanned ones after them.
    labels = list(dict.fromkeys(label for label, _ in (*planned, *statuses)))
    for label, seed in planned:
        statuses.setdefault((label, seed), RunStatus(label, seed, "missing"))
    return sorted(statuses.values(), key=lambda one: (labels.index(one.label), one.seed))


def _find_run_status(run: StoredRun) -> RunStatus:
    if run.is_finished:
        return RunStatus(run.label, run.seed, "finished")
    if run.provenance.get("done"):
        return RunStatus(run.label, run.seed, "unfinished", "it has no final test")
    known = run.provenance.get("round")
    reached = run.num_rounds if known is None else max(int(known), 0)
    reason = f"round {reached}"
    # A scaled run has fewer or more rounds than its file has.
    if "rounds" in run.config and float(run.config.get("scale", 1.0)) == 1.0:
        reason += f" of {run.config['rounds']}"
    return RunStatus(run.label, run.seed, "unfinished", reason)


def select_compared_runs(
    runs: Sequence[StoredRun],
    problems: Sequence[UnreadableRun] = (),
    seeds: Iterable[int] | None = None,
) -> list[StoredRun]:
    """Select the runs that methods are averaged over: finished, of common seeds.

    A method that finished no seed does not count. No other function decides what a mean over seeds
    is over.

    Args:
        runs: the runs of one study.
        problems: its folders that could not be read; a run with an unreadable part does not count.
        seeds: only these, if given.

    Raises:
        DataError: when they are of several studies.
    """
    check_one_study(runs)
    # One unreadable part of a run (a node's folder) makes the whole run incomplete.
    broken = {(problem.label, problem.seed) for problem in problems}
    done = [run for run in runs if run.is_finished and (run.label, run.seed) not in broken]
    finished: dict[str, list[int]] = {}
    for run in done:
        finished.setdefault(run.label, []).append(run.seed)
    chosen = set(coverage.find_common_seeds(finished))
    if seeds is not None:
        chosen &= set(seeds)
    return select_seeds(done, chosen)


def collect_seeds(runs: Iterable[StoredRun]) -> set[int]:
    """Return the seeds of some runs."""
    return {run.seed for run in runs}


def select_seeds(runs: Iterable[StoredRun], seeds: Container[int]) -> list[StoredRun]:
    """Select the runs of some seeds."""
    return [run for run in runs if run.seed in seeds]


def summarize_coverage(
    runs: Sequence[StoredRun],
    problems: Sequence[UnreadableRun],
    *folders: str | Path,
    seeds: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Return the compared `seeds`, what is `left_out`, and the labels of `rows`.

    The arguments are those of `list_run_statuses` and of `select_compared_runs`.
    """
    chosen = select_compared_runs(runs, problems, seeds)
    used = {(run.label, run.seed) for run in chosen}
    statuses = list_run_statuses(runs, problems, *folders)
    left = [one for one in statuses if (one.label, one.seed) not in used]
    return {
        "seeds": sorted(collect_seeds(chosen)),
        "left_out": coverage.statuses_to_json(left),
        "rows": [{"label": label} for label in group_by_label(chosen)],
    }


def group_by_study(
    folders: Sequence[str | Path], runs: Sequence[StoredRun], problems: Sequence[UnreadableRun]
) -> Iterator[tuple[list[StoredRun], list[UnreadableRun], dict[str, Any]]]:
    """Group what `load_runs` loaded by study, and summarize which runs each study has.

    Args:
        folders: the requested folders; when they are some methods or runs of a study, its other
            runs are not missing.
        runs: the runs that were loaded.
        problems: the folders that could not be read.

    Yields:
        The runs of a study, its folders that could not be read, and its coverage as
        `summarize_coverage` returns it, with the name of its `study`.
    """
    groups: dict[Path, tuple[list[StoredRun], list[UnreadableRun]]] = {}
    for run in runs:
        groups.setdefault(run.folder.parent.parent, ([], []))[0].append(run)
    for problem in problems:
        groups.setdefault(problem.folder.parent.parent, ([], []))[1].append(problem)
    for study, (own, broken) in groups.items():
        requested = _select_requested(study, list(map(Path, folders)))
        content = {"study": own[0].study_name if own else study.name}
        yield own, broken, content | summarize_coverage(own, broken, *requested)


def _select_requested(study: Path, folders: Sequence[Path]) -> list[Path]:
    """Return the study, if all of it was requested, else its requested methods and runs."""
    # A folder above the study asks for all of it.
    if {study, *study.parents} & set(folders):
        return [study]
    return [folder for folder in folders if study in folder.parents]


def select_charted_runs(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun] = ()
) -> list[StoredRun]:
    """Select the runs whose rounds are drawn: of compared seeds, finished or not.

    While no seed is compared these are all runs.
    """
    seeds = collect_seeds(select_compared_runs(runs, problems))
    return select_seeds(runs, seeds) or list(runs)


def check_one_study(runs: Iterable[StoredRun]) -> None:
    """Refuse runs of several studies: equal method names would be averaged together.

    Raises:
        DataError: when they are of several.
    """
    places: dict[tuple[str, int], Path] = {}
    names, folders = set(), []
    for run in runs:
        place = run.folder.parent.parent
        names.add(run.study_name)
        if place not in folders:
            folders.append(place)
        # Nodes of one run have folders of their own, but then their studies have the same name.
        several = len(names) > 1 and len(folders) > 1
        if several or (run.label, run.seed) in places:
            other = places.get((run.label, run.seed))
            if other is None:
                other = next(folder for folder in folders if folder != place)
            raise DataError(
                f"these runs are of several studies, such as {other} and {place}; give the "
                "folder of one"
            )
        places[run.label, run.seed] = place
