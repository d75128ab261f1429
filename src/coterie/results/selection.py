"""Which stored runs of a study are compared: the status of each run, and the seeds that all methods finished."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coterie.errors import DataError
from coterie.results import coverage
from coterie.results.coverage import RunStatus
from coterie.results.stored_runs import StoredRun, UnreadableRun, find_planned_runs, group_by_label


def list_run_statuses(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun], *folders: str | Path
) -> list[RunStatus]:
    """Say how each run of a study stands: those that it should have, and others that are there.

    Args:
        runs: its runs, as `load_runs` returns them.
        problems: its folders that could not be read.
        folders: the study's folder, whose file says which runs it should have; or those of some
            methods or runs.
    """
    found = {(run.label, run.seed): _find_run_status(run) for run in runs}
    for problem in problems:
        found[problem.label, problem.seed] = problem.status
    wanted = [key for folder in folders for key in find_planned_runs(Path(folder))]
    missing = {key: RunStatus(*key, "missing") for key in wanted if key not in found}
    order = list(dict.fromkeys([*(label for label, _ in wanted), *(label for label, _ in found)]))
    whole = {**found, **missing}
    return [whole[key] for key in sorted(whole, key=lambda key: (order.index(key[0]), key[1]))]


def _find_run_status(run: StoredRun) -> RunStatus:
    if run.is_finished:
        return RunStatus(run.label, run.seed, "finished")
    if run.provenance.get("done"):
        return RunStatus(run.label, run.seed, "unfinished", "it has no final test")
    known = run.provenance.get("round")
    rounds = run.num_rounds if known is None else max(int(known), 0)
    # then the rounds in its file are not those that it has
    scaled = float(run.config.get("scale", 1.0)) != 1.0
    of = f" of {run.config['rounds']}" if "rounds" in run.config and not scaled else ""
    return RunStatus(run.label, run.seed, "unfinished", f"round {rounds}{of}")


def select_compared_runs(
    runs: Sequence[StoredRun],
    problems: Sequence[UnreadableRun] = (),
    seeds: Iterable[int] | None = None,
) -> list[StoredRun]:
    """Return the runs over which methods are averaged: finished ones, of the seeds that all methods finished.

    A method that finished none does not count. This is the one place that decides what a mean over
    seeds is over.

    Args:
        runs: the runs of one study.
        problems: its folders that could not be read; a run of which a part could not be read does
            not count.
        seeds: only these, where given.

    Raises:
        DataError: when they are not of one study.
    """
    check_one_study(runs)
    broken = {(problem.label, problem.seed) for problem in problems}
    done = [run for run in runs if run.is_finished and (run.label, run.seed) not in broken]
    chosen = set(
        coverage.find_common_seeds(
            {label: [run.seed for run in group] for label, group in group_by_label(done).items()}
        )
    )
    if seeds is not None:
        chosen &= set(seeds)
    return [run for run in done if run.seed in chosen]


def summarize_coverage(
    runs: Sequence[StoredRun],
    problems: Sequence[UnreadableRun],
    *folders: str | Path,
    seeds: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Return what `coverage.describe_coverage` tells about: the compared `seeds`, what is `left_out`, and the labels of `rows`.

    The arguments are those of `list_run_statuses` and of `select_compared_runs`.
    """
    chosen = select_compared_runs(runs, problems, seeds)
    used = {(run.label, run.seed) for run in chosen}
    left = [
        one
        for one in list_run_statuses(runs, problems, *folders)
        if (one.label, one.seed) not in used
    ]
    rows = [{"label": label} for label in group_by_label(chosen)]
    return {
        "seeds": sorted({seed for _, seed in used}),
        "left_out": coverage.statuses_to_json(left),
        "rows": rows,
    }


def group_by_study(
    folders: Sequence[str | Path], runs: Sequence[StoredRun], problems: Sequence[UnreadableRun]
) -> Iterator[tuple[list[StoredRun], list[UnreadableRun], dict[str, Any]]]:
    """Sort what `load_runs` read by studies, and say of each which runs there are.

    Args:
        folders: those that were asked for; of a study of which only some methods or runs were, no
            others are missing.
        runs: the runs that were read.
        problems: the folders that could not be read.

    Yields:
        The runs of a study, its folders that could not be read, and what is `summarize_coverage`, with the
        name of its `study_name`.
    """
    for study in dict.fromkeys(one.folder.parent.parent for one in (*runs, *problems)):
        own = [run for run in runs if run.folder.parent.parent == study]
        broken = [problem for problem in problems if problem.folder.parent.parent == study]
        asked = [Path(folder) for folder in folders]
        parts = [folder for folder in asked if study in folder.parents]
        whole = any(folder in (study, *study.parents) for folder in asked)
        name = own[0].study_name if own else study.name
        yield (
            own,
            broken,
            {"study": name, **summarize_coverage(own, broken, *([study] if whole else parts))},
        )


def select_charted_runs(
    runs: Sequence[StoredRun], problems: Sequence[UnreadableRun] = ()
) -> list[StoredRun]:
    """Return the runs whose rounds are drawn: the compared seeds, also of methods that have not finished one yet.

    While no seed is compared these are all runs.
    """
    seeds = {run.seed for run in select_compared_runs(runs, problems)}
    return [run for run in runs if run.seed in seeds] or list(runs)


def check_one_study(runs: Iterable[StoredRun]) -> None:
    """Refuse runs that are of several studies: their methods have the same names, and would be averaged together.

    Raises:
        DataError: when they are.
    """
    places: dict[tuple[str, int], Path] = {}
    studies: dict[tuple[str, Path], None] = {}
    for run in runs:
        place = run.folder.parent.parent
        studies[run.study_name, place] = None
        several = (
            len({name for name, _ in studies}) > 1 and len({folder for _, folder in studies}) > 1
        )
        if several or (run.label, run.seed) in places:
            other = places.get((run.label, run.seed)) or next(
                folder for _, folder in studies if folder != place
            )
            raise DataError(
                f"these runs are of several studies, such as {other} and {place}; give the folder of one"
            )
        places[run.label, run.seed] = place
