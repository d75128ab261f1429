"""The commands compare, analyze and tune."""

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coterie._util import origin
from coterie._util.files import show_path
from coterie._util.mappings import map_values
from coterie.cli import _cluster
from coterie.cli._options import DataDir, Quiet, Set, StudyName, Workers
from coterie.cli._stopping import explain_interruption
from coterie.errors import ConfigError


class TableFormat(StrEnum):
    """How tables for papers and pages are written."""

    latex = "latex"
    markdown = "markdown"


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("compare")(compare_studies)
    app.command("analyze")(analyze_run)
    app.command("tune")(tune_study)


def compare_studies(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of studies that have run.")
    ],
    metric: Annotated[
        str | None, typer.Option(help="The metric; by default accuracy, else the loss.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Compare each method only with this one: fewer pairs, a smaller correction.",
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="Clients to compare over: all, clusters, or the name of a planted cluster."
        ),
    ] = "all",
    test_share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=0.9,
            metavar="SHARE",
            help="Share of the samples that each seed tests, if all seeds split the same ones; "
            "intervals are then about new samples.",
        ),
    ] = 0.0,
    setting: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="One table over the values of a setting that the points of a sweep vary.",
        ),
    ] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Compare with published numbers.")] = False,
    equal_bytes: Annotated[
        bool, typer.Option("--equal-bytes", help="Rank the methods at equal bytes per client.")
    ] = False,
    at_bytes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="MB",
            help="Like --equal-bytes, at this number of megabytes per client.",
        ),
    ] = None,
    equal_time: Annotated[
        bool, typer.Option("--equal-time", help="Rank the methods at equal time.")
    ] = False,
    at_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="SECONDS", help="Like --equal-time, after this number of seconds."
        ),
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The trials that `coterie tune` wrote, to compare the effort of tuning.",
        ),
    ] = None,
    format_: Annotated[
        TableFormat | None,
        typer.Option("--format", help="Print tables for a paper or a page, with intervals."),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the comparison as JSON, for programs.")
    ] = False,
) -> None:
    """Compare methods in pairs, studies with each other, or with published numbers.

    Of several studies, a method of one is also compared with that of the same
    label in another, where their clients and seeds are the same. A difference is established when
    it is unlikely to be chance. The test pairs values by seed and client, takes Student's interval
    over the seeds, and corrects for the number of pairs. For a sweep over data or models, give the
    folder of one point; or the sweep and --setting, for one table of all points.

    [bold]Examples[/bold]

      coterie compare runs/rotated-digits
      coterie compare runs/rotated-digits --baseline Local --metric loss
      coterie compare runs/rotated-digits --format latex
      coterie compare runs/rotated-digits runs/my-study
      coterie compare runs/rotated-digits --equal-bytes
      coterie compare runs/stragglers/digits --equal-time
      coterie compare runs/my-sweep --setting data.num_clients --format latex
      coterie compare runs/similarity/synthetic --paper
    """
    from coterie.cli import _tables
    from coterie.functional.metrics import REGISTRY
    from coterie.papers import compare as comparing
    from coterie.results import conditions
    from coterie.results.equal_budget import Unit, rank_at_equal_budget
    from coterie.results.tables import build_pairs_table, format_latex, format_markdown
    from coterie.results.varied import tabulate_setting

    found: list[Any] = []
    shown: list[Any] = []
    notes: list[str] = []
    missing: list[str] = []
    # A number alone, such as --at-bytes 5, asks for the ranking too.
    by_bytes, by_time = equal_bytes or at_bytes is not None, equal_time or at_seconds is not None
    if by_bytes and by_time:
        raise ConfigError("methods are ranked at equal bytes or at equal time; give one of them")
    kinds = {"--paper": paper, "--setting": setting is not None}
    kinds |= {"--equal-bytes": by_bytes, "--equal-time": by_time}
    given = {"--metric": metric is not None, "--baseline": baseline is not None}
    given |= {"--cluster": cluster != "all", "--test-share": test_share > 0}
    _check_options(kinds, {**given, "--tuned": tuned is not None})
    # Four comparisons, of which one is made: with a paper, over a setting, at an equal budget, or
    # in pairs. Each fills `shown` with its tables, and `notes` and `missing` with lines around
    # them.
    if paper:
        for folder in folders:
            one = comparing.compare_with_paper(comparing.load_result(folder))
            found.append(one)
            shown += _tables.build_paper_tables(one)
            notes += [one.reference, *one.notes]
            missing += one.missing
    elif setting is not None:
        one = tabulate_setting(folders, setting, metric=metric, cluster=cluster)
        found, shown, missing = [one], [_tables.build_varied_table(one)], list(one.notes)
    elif by_bytes or by_time:
        unit: Unit = "bytes"
        # Megabytes of 1e6 bytes, as in all tables.
        budget = None if at_bytes is None else 1e6 * at_bytes
        if by_time:
            unit, budget = "seconds", at_seconds
        for folder in folders:
            one = rank_at_equal_budget(folder, budget, unit, baseline=baseline)
            found.append(one)
            shown.append(_tables.build_equal_budget_table(one))
            name = one.study if len(folders) > 1 else ""
            if one.pairs:
                known = REGISTRY[one.metric]
                shown.append(build_pairs_table(one.pairs, known, one.split, name))
            notes += _name_study(one.verdicts, name)
            missing += one.describe_coverage()
    else:
        loaded = list(map(comparing.load_result, folders))
        # Pairs are of equal seeds: others are named in a note and left out.
        results, missing = comparing.restrict_to_common_seeds(loaded)
        for folder in folders:
            missing += _describe_new_clients(folder)
        tried = conditions.count_tried_settings(tuned) if tuned is not None else None
        found = comparing.compare_in_pairs(
            results,
            metric=metric,
            baseline=baseline,
            cluster=cluster,
            share=test_share,
            tried=tried,
        )
        # Tables for a paper are of one study each.
        if format_ is None:
            shown = _tables.build_side_by_side([one.result for one in found], metric)
        for one in found:
            # Whole for a paper: the means with their intervals come before the pairs.
            name = ""
            if len(results) > 1:
                name = comparing.display_name(one.result, results)
            shown += _tables.build_study_tables(one, name, whole=format_ is not None)
            notes += _name_study(one.verdicts, name)
        # Two studies at a time: a method of one with that of the same label in the other.
        across = comparing.compare_each_two(
            results, metric=metric, baseline=baseline, cluster=cluster, share=test_share
        )
        for one in across:
            if one.metric is not None and one.pairs:
                both = " and ".join(one.studies)
                shown.append(build_pairs_table(one.pairs, one.metric, studies=both))
            notes += one.verdicts
            # Tables for a paper come without the verdicts: what differs must be said all the same.
            if format_ is not None:
                missing += one.notes
        found = [*found, *across]
    if json_:
        content = list(map(comparing.to_json, found))
        typer.echo(json.dumps(content, indent=1, ensure_ascii=False))
        return
    if format_ is not None:
        # Notes go to standard error: standard output holds the table alone, to be redirected.
        for note in missing:
            typer.echo(f"note: {note}", err=True)
        write = {"latex": format_latex, "markdown": format_markdown}[format_.value]
        # Each table ends its last line itself.
        typer.echo("\n".join(map(write, shown)), nl=False)
        return
    console = Console()
    for note in missing:
        console.print(note, markup=False, highlight=False, style="yellow")
    for table in shown:
        _print_table(console, table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _name_study(lines: Sequence[str], name: str) -> list[str]:
    """Begin each line with the study that it is about, where several are shown."""
    if not name:
        return list(lines)
    return [line if line.startswith(f"{name}:") else f"{name}: {line}" for line in lines]


_OPTIONS_OF_KINDS: Mapping[str, tuple[str, ...]] = {
    "--paper": (),
    "--setting": ("--metric", "--cluster"),
    "--equal-bytes": ("--baseline",),
    "--equal-time": ("--baseline",),
}
"""The options that each kind of comparison takes; one in pairs takes all."""


def _check_options(kinds: Mapping[str, bool], given: Mapping[str, bool]) -> None:
    """Refuse options that the asked kind of comparison would not heed.

    Args:
        kinds: whether each kind was asked for, by its option.
        given: whether each further option was given.
    """
    asked = [kind for kind, there in kinds.items() if there]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are different comparisons; give one of them")
    for kind in asked:
        taken = _OPTIONS_OF_KINDS[kind]
        for option, there in given.items():
            if there and option not in taken:
                raise ConfigError(
                    f"{kind} takes no {option}, and would compare as if it were not given; leave "
                    "out one of them"
                )


def _print_table(console: Console, shown: Any) -> None:
    # No markup: names may contain brackets.
    console.print(shown.title, style="italic", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for place, head in enumerate(shown.head):
        side = "left" if place == 0 else "right"
        table.add_column(escape(head), justify=side, overflow="fold")
    for i, row in enumerate(shown.rows):
        cells = []
        for j, cell in enumerate(row):
            cells.append(f"[bold]{escape(cell)}[/bold]" if (i, j) in shown.strong else escape(cell))
        table.add_row(*cells)
    console.print(table)
    if shown.foot:
        console.print(shown.foot, markup=False, highlight=False)
    console.print()


def analyze_run(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a study, or of one of its runs.")
    ],
    what: Annotated[
        str, typer.Option("--what", help="The analysis: simplex, interaction or beta.")
    ] = "",
    points: Annotated[int, typer.Option(help="For simplex: the number of points.")] = 2000,
    clients: Annotated[str, typer.Option(help="For simplex: clients to test on, e.g. 0,7.")] = "",
    betas: Annotated[str, typer.Option(help="For beta: the values.")] = "0.1,0.5,1,2,4",
    data_dir: DataDir = None,
) -> None:
    """Compute an analysis of a run and write it as a table; without --what, list them.

    The analysis starts from the run's checkpoint.

    [bold]Examples[/bold]

      coterie analyze runs/my-study --what interaction
      coterie analyze runs/my-study/SosicFL/seed-0 --what simplex --clients 0,7
      coterie analyze runs/my-study --what beta --betas 0.5,4
    """
    from coterie.papers import analyses

    # Without an analysis: the names and meanings of all.
    if not what:
        for name, one in analyses.ANALYSES.items():
            typer.echo(f"{name:<14}{one.text}")
        return
    options = analyses.AnalysisOptions(
        points, _parse_numbers("--clients", clients, int), _parse_numbers("--betas", betas, float)
    )
    for path in analyses.analyze_runs(folder, what, options, data_dir=data_dir):
        typer.echo(f"Table: {path}")


def _describe_new_clients(folder: Path) -> list[str]:
    """Describe the clients of a study that joined at the end; nothing when none did."""
    from coterie.functional.metrics import REGISTRY
    from coterie.results.summary import describe_new_clients, summarize_study
    from coterie.studies.run import load_stored_study

    study, out = load_stored_study(folder)
    # A summary reads all runs: only for studies that have such clients.
    if all(entry.settings.new_clients is None for entry in study.methods):
        return []
    content = summarize_study(out / study.name)
    if not content["rows"]:
        return []
    main = REGISTRY.choose_main([row["metric"] for row in content["rows"]])
    return [f"{study.name}: {line}" for line in describe_new_clients(content, main)]


def _parse_numbers(name: str, text: str, kind: type[Any]) -> list[Any]:
    """Parse numbers separated by commas."""
    numbers = []
    for part in text.split(","):
        # A comma at the end is no mistake.
        if not part.strip():
            continue
        try:
            numbers.append(kind(part))
        except ValueError as error:
            raise ConfigError(
                f"{name} is {text!r}; expected numbers separated by commas"
            ) from error
    return numbers


def tune_study(
    study: StudyName,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            "-g",
            metavar="SETTING=VALUES",
            help="Values to try, e.g. lr=0.001,0.003. Repeatable.",
        ),
    ] = None,
    set_: Set = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds of the trials: their number (3), or a list (100,101); the study keeps "
            "its own."
        ),
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder for the trials and the study file with the chosen values."
        ),
    ] = Path("tuned"),
    workers: Workers = None,
    widenings: Annotated[
        int, typer.Option(min=0, help="How often to extend a grid whose edge is best.")
    ] = 3,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Successive halving: train all trials of a method and seed for the rounds of N "
            "runs.",
        ),
    ] = None,
    on: _cluster.On = "local",
    cpus: _cluster.Cpus = 1,
    gpus: _cluster.Gpus = None,
    quiet: Quiet = False,
) -> None:
    """Tune every method on the clients' validation data, without the test data.

    Each trial is stored as it ends: after a stop, the same command goes on.

    [bold]Examples[/bold]

      coterie tune rotated-digits --grid lr=0.0003,0.001,0.003
      coterie tune similarity/synthetic --grid methods.L2.tau=10,20,40 --seeds 3
      coterie tune rotated-digits --grid lr=0.0003,0.001,0.003,0.01 --budget 2
    """
    from coterie.studies import config
    from coterie.studies import tune as tuning

    chosen = config.load_study(study, set_ or ())
    # A grid in the call replaces that of the study file, whole.
    axes: dict[str, list[Any]] = tuning.parse_grid(grid) if grid else map_values(list, chosen.tune)
    if seeds is not None:
        # Through a study, which reads a number of seeds and a list of them alike.
        axes["seeds"] = list(config.load_study(study, [f"seeds={config.parse_seeds(seeds)}"]).seeds)
    # The study's own seeds of tuning count when none are given.
    elif "seeds" in chosen.tune:
        axes.setdefault("seeds", list(chosen.tune["seeds"]))
    # Seeds repeat a trial; they are nothing to choose.
    if not set(axes) - {"seeds"}:
        why = "seeds alone repeat one trial" if "seeds" in axes else "there is nothing to tune"
        raise ConfigError(f"{why}; give --grid lr=0.001,0.003, or [tune] in the study file")
    # Stored with the trials: `coterie resume` continues with what was asked for here.
    asked = {"grid": axes, "widenings": widenings, "budget": budget}
    place = _cluster.RunLocation(on, cpus, gpus)
    run_tuning(chosen, asked, out, data_dir, workers, place, quiet=quiet)


def _format_point(point: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in point)


def run_tuning(
    study: Any,
    asked: dict[str, Any],
    out: Path,
    data_dir: Path | None,
    workers: int | None,
    place: _cluster.RunLocation,
    *,
    quiet: bool,
) -> None:
    """Tune a study, then write and print what was chosen.

    Args:
        study: the study.
        asked: `grid`, `widenings` and `budget`, as `tune_study` takes them.
        out: the folder for trials and results.
        data_dir: where datasets are.
        workers: processes.
        place: where trials are computed.
        quiet: show no progress.
    """
    from coterie.studies import tune as tuning
    from coterie.studies.run import FoundRuns

    # Before hours of trials: their result must have a place.
    tuning.check_result_files(study, out)
    # Progress goes to standard error: standard output holds what was chosen.
    console = Console(stderr=True)

    def show_trial(trial: tuning.Trial) -> None:
        values = _format_point(trial.point)
        # Successive halving trains trials for different numbers of rounds.
        values += f", {trial.rounds} rounds" * (trial.rounds is not None)
        text = (
            f"{trial.label}, seed {trial.seed}, {values}: validation {trial.metric} "
            f"{trial.value:.5g}"
        )
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show_note(note: object) -> None:
        # The compilation of each trial would be a line of noise for each of them.
        if isinstance(note, FoundRuns):
            console.print(str(note), markup=False, highlight=False, soft_wrap=True)

    with (
        explain_interruption(out / f"{study.name}-trials", origin.format_command()),
        place.open_executor(study.settings.device, workers) as (over, crew),
    ):
        tuned = tuning.tune_study(
            study,
            **asked,
            out=out,
            data_dir=data_dir,
            workers=crew,
            observer=None if quiet else show_trial,
            notes=None if quiet else show_note,
            over=over,
        )
    path = tuning.write_result(tuned, out)
    for one in tuned.choices:
        values = _format_point(one.point) or "nothing to tune"
        edge = f"; still at the edge: {', '.join(one.at_edge)}" if one.at_edge else ""
        typer.echo(f"{one.label}: {values} (validation {one.metric} {one.value:.5g}){edge}")
    typer.echo(f"Study: {show_path(path)}")
