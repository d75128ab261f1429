"""The command line. Heavy libraries are imported inside the commands, so that help is quick.

Exit status: 0; 2 for bad input, with one line on standard error; 75 when the disk is full, and 4
when the clock of the machine is not set yet, also with one line: the same command continues later;
5 when too few other members are there for a run between machines; 130 after Ctrl-C. Results go to
standard output, progress and messages to standard error.
"""

import dataclasses
import io
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coterie import __version__
from coterie._util.files import show_path
from coterie._util.names import to_one_line
from coterie.cli import _audit, _cluster, _compare, _export, _federation, _net, _report
from coterie.cli._options import DataDir, Quiet, Set, StudyName, Workers
from coterie.cli._stopping import describe_os_error, explain_interruption
from coterie.errors import (
    ClockError,
    ConfigError,
    CoterieError,
    DiskFull,
    OutOfMemory,
    QuorumError,
    describe_unknown,
)

app = typer.Typer(
    name="coterie",
    no_args_is_help=True,
    rich_markup_mode="rich",
    # Rich tracebacks would show local variables, and errors get one line in `main` anyway.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
NO_ROOM = 75
"""The exit status when the disk is full: a temporary failure, EX_TEMPFAIL of sysexits.h."""
EARLY = 4
"""The exit status when the clock is not set yet: a service manager starts the program again."""
TOO_FEW = 5
"""The exit status of a node whose run has begun and that has waited in vain for enough others."""
# Every mistake in how a command was called: click's ClickException, wherever this version of typer
# keeps it.
_Usage: type[typer.BadParameter] = typer.BadParameter.__mro__[2]  # type: ignore[assignment]

Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder in which the study's folder is created.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, for programs.")]
Seeds = Annotated[
    str | None,
    typer.Option(help="The number of seeds (5), or a list (0,3,7); `7,` means only seed 7."),
]


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"coterie {__version__}")
        # `is_eager`: the version is shown before other options are checked.
        raise typer.Exit
    return asked


@app.callback()
def _set_up(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and stop."
        ),
    ] = False,
) -> None:
    """Simulate, compare and deploy personalized and clustered federated learning.

    [bold]Start here[/bold]

      coterie run              the bundled study, digits in four rotations: a minute
      coterie studies          list the built-in studies
      coterie methods          list the methods
      coterie methods dac      describe one
      coterie run STUDY.toml --set methods.dac.tau=30 --seeds 5
    """


@app.command("run")
def run_study(
    study: StudyName = "rotated-digits",
    set_: Set = None,
    seeds: Seeds = None,
    data_dir: DataDir = None,
    out: Out = Path("runs"),
    workers: Workers = None,
    engine: Annotated[
        str | None, typer.Option(help="The engine that trains: auto, loop, vmap, ...")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Multiply the rounds, e.g. 0.1 for a quick test.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the study's folder first.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what is there; this is the default.")
    ] = False,
    on: _cluster.On = "local",
    cpus: _cluster.Cpus = 1,
    gpus: _cluster.Gpus = None,
    blocks: _cluster.Blocks = None,
    quiet: Quiet = False,
    json_: AsJson = False,
) -> None:
    """Run every method of a study with every seed; write a table, summary and report.

    Runs that are there stay, and the same command goes on after a stop.

    [bold]Examples[/bold]

      coterie run
      coterie run my-study.toml --seeds 5 --out results
      coterie run rotated-digits --set rounds=60 --set methods.dac.tau=10
      coterie run similarity/cifar10-label-2 --data-dir ~/data --scale 0.1
      coterie run my-study.toml --on ray:auto
      coterie run my-study.toml --on ray:auto --blocks 4
    """
    from coterie.studies import config

    changes = list(set_ or ())
    if seeds is not None:
        # As changes of the study, so that the stored settings are the ones that were used.
        changes.append(f"seeds={config.parse_seeds(seeds)}")
    if engine is not None:
        # The text of a change is TOML, in which a JSON text is a text too.
        changes.append(f"engine={json.dumps(engine)}")
    if scale is not None:
        # `repr` keeps all digits.
        changes.append(f"scale={float(scale)!r}")
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume exclude each other; give one of them")
    # Checked whole before anything runs: a wrong setting must not show after hours.
    chosen = config.load_study(study, changes)
    where = _cluster.RunLocation(on, cpus, gpus, blocks)
    _run_and_show(
        chosen, out, data_dir, workers, where, overwrite=overwrite, quiet=quiet, as_json=json_
    )


@app.command("resume")
def resume_study(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="Folder of a study, a sweep or trials, or of one of its runs."
        ),
    ],
    data_dir: DataDir = None,
    workers: Workers = None,
    on: _cluster.On = "local",
    cpus: _cluster.Cpus = 1,
    gpus: _cluster.Gpus = None,
    blocks: _cluster.Blocks = None,
    quiet: Quiet = False,
    json_: AsJson = False,
) -> None:
    """Continue an interrupted study, sweep or tuning; results equal those of an uninterrupted one.

    [bold]Examples[/bold]

      coterie resume runs/rotated-digits
      coterie resume tuned/rotated-digits-trials
    """
    from coterie.studies.run import load_stored_study
    from coterie.studies.tune import load_request

    # To run: its methods are imported and checked, which the commands that only read leave out.
    study, out = load_stored_study(folder, to_run=True)
    where = _cluster.RunLocation(on, cpus, gpus, blocks)
    # The trials of a tuning are no study of their own: the whole tuning continues.
    if study.trials_of:
        tuned, asked = load_request(out / study.name)
        _compare.run_tuning(tuned, asked, out, data_dir, workers, where, quiet=quiet)
        return
    _run_and_show(study, out, data_dir, workers, where, overwrite=False, quiet=quiet, as_json=json_)


@app.command("methods")
def list_methods(
    name: Annotated[str | None, typer.Argument(help="The method to describe.")] = None,
) -> None:
    """List the methods with their parameters and papers; with a name, describe one.

    [bold]Examples[/bold]

      coterie methods
      coterie methods dac
    """
    from coterie.cli import _catalog

    # The catalog describes built-in methods, so that listing them imports no method.
    console, known = Console(soft_wrap=False), _catalog.load_methods()
    if name is None:
        # A plugin cannot take the name of a built-in method: those come first.
        for kind in sorted({*known, *_find_plugin_methods(known)}):
            try:
                method = known[kind] if kind in known else _describe_plugin_method(kind)
            # Of another package: the rest of the list is wanted all the same.
            except ConfigError as error:
                console.print(f"[bold]{kind}[/bold]: {escape(str(error))}", highlight=False)
                continue
            settings = ", ".join(f"{p.name} = {p.default}" for p in method.parameters)
            # Escaped: brackets in texts of others would be read as styles.
            console.print(f"[bold]{kind}[/bold]: {escape(method.summary)}")
            console.print(
                f"    {escape(settings or 'no parameters')}", style="dim", highlight=False
            )
            for reference in method.references:
                console.print(f"    {escape(reference)}", highlight=False)
        return
    method = known[name] if name in known else _describe_plugin_method(name)
    # Lines of one paragraph are joined; rich breaks them at the terminal's width.
    paragraphs = re.sub(r"(?<!\n)\n(?=\w)", " ", method.description)
    console.print(f"[bold]{name}[/bold]: {escape(method.summary)}\n\n{escape(paragraphs)}\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("parameter", "default", "meaning"):
        table.add_column(head, overflow="fold")
    for p in method.parameters:
        table.add_row(p.name, p.default, escape(f"{p.text} ({p.expects})"))
    console.print(table)
    for reference in method.references:
        console.print(f"\n{escape(reference)}", highlight=False)


def _find_plugin_methods(known: Iterable[str]) -> set[str]:
    """Return the methods that installed packages offer; the packages are not imported."""
    from importlib.metadata import entry_points

    return {point.name for point in entry_points(group="coterie.methods")} - set(known)


def _describe_plugin_method(kind: str) -> Any:
    """Describe a method that is not built in."""
    from coterie.cli import _catalog
    from coterie.methods import registry

    return _catalog.describe_method(kind, registry.find_method(kind))


@app.command("studies")
def list_studies(
    name: Annotated[str | None, typer.Argument(help="Print one study's file.")] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Include inherited settings and all defaults.")
    ] = False,
    node: Annotated[
        Path | None,
        typer.Option(
            "--node",
            metavar="NODE.toml",
            help="Instead: the studies proposed to this member of a federation, and how they "
            "stand; with a name, what of that one would leave it.",
        ),
    ] = None,
) -> None:
    """List the built-in studies; with a name, print its file, to copy and change.

    With --node, list the studies that were proposed to a member of a federation.

    [bold]Examples[/bold]

      coterie studies rotated-digits > my-study.toml
      coterie studies --node node.toml
      coterie studies hearts --node node.toml
    """
    if node is not None:
        _federation.list_studies(node, name)
        return
    from coterie.cli import _catalog
    from coterie.studies import builtin_studies

    if name is not None:
        # A base file is no whole study: it can be printed, but not resolved.
        found = builtin_studies.find_builtin_studies(bases=not resolved)
        if name not in found:
            raise ConfigError(describe_unknown("study", name, found))
        text = found[name].read_text(encoding="utf-8")
        if resolved:
            from coterie.studies import config

            text = config.format_study(config.load_study(name))
        typer.echo(text, nl=False)
        return
    console = Console()
    for title, (size, description) in _catalog.load_studies().items():
        console.print(f"[bold]{title}[/bold]  [dim]{size}[/dim]", highlight=False)
        console.print(f"    {escape(description)}", highlight=False)


@app.command("list")
def list_runs(
    folder: Annotated[
        Path | None, typer.Argument(help="The folder to search; by default that of --out.")
    ] = None,
    out: Out = Path("runs"),
) -> None:
    """List the studies, sweeps and tunings in a folder, and which runs are finished.

    [bold]Examples[/bold]

      coterie list
      coterie list tuned
    """
    from coterie.results import coverage
    from coterie.studies.run import find_studies
    from coterie.studies.sweep import load_plan

    console = Console()
    out = folder or out
    known = find_studies(out)
    if not known:
        console.print(
            f"no study in {show_path(out)}; `coterie run` makes one", markup=False, highlight=False
        )
    for place in known:
        try:
            plan = load_plan(place)
            standings = plan.list_standings()
        except CoterieError as error:  # the others are wanted all the same
            console.print(to_one_line(str(error)), markup=False, highlight=False, soft_wrap=True)
            continue
        # Missing and damaged runs count as not finished.
        runs = list(chain.from_iterable(standings.values()))
        done = sum(run.state == "finished" for run in runs)
        state = "finished" if done == len(runs) else f"{done} of {len(runs)} runs finished"
        lines = [f"{show_path(place)}  {plan.study.name}: {state}"]
        for point, of_point in standings.items():
            head = f"  {point}: " if point else "  "
            for text in coverage.format_statuses(of_point):
                lines.append(head + text)
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command("show")
def show_results(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a study, or of one of its runs.")
    ],
    clients: Annotated[
        bool, typer.Option("--clients", help="Print the final test result of each client.")
    ] = False,
    json_: AsJson = False,
) -> None:
    """Print the results of a stored study, of each point of a sweep, or the trials of a tuning.

    A dozen clients with names or fewer are always shown; `--clients` pages through more.

    [bold]Examples[/bold]

      coterie show runs/four-hospitals
      coterie show runs/rotated-digits --clients
      coterie show runs/rotated-digits --clients --json
    """
    from coterie.studies.sweep import load_plan, load_sweep_results

    plan = load_plan(folder)
    if plan.study.trials_of:
        _print_trials(plan, json_)
        return
    studies = load_sweep_results(folder)
    if clients:
        _print_clients(studies, json_)
    else:
        _print_studies(studies, json_)


def _print_trials(plan: Any, as_json: bool) -> None:
    """Print the validation results of the trials of a tuning that have ended."""
    from coterie.functional.metrics import DIVERGED
    from coterie.results import coverage
    from coterie.studies.tune import load_trial_rows

    # "": trials are of one point, as a tuning has no sweep.
    standings, rows = plan.list_standings()[""], load_trial_rows(plan)
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    console = Console()
    for line in coverage.format_statuses(one for one in standings if one.state != "finished"):
        console.print(line, markup=False, highlight=False, style="yellow")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("trial", overflow="fold")
    for head in ("n", "metric", "validation"):
        table.add_column(head, justify="right")
    for row in rows:
        # JSON has no NaN, so that a mean that is none is None here.
        value = DIVERGED.name if row["mean"] is None else f"{row['mean']:.5g}"
        table.add_row(row["label"], str(row["seeds"]), row["metric"], value)
    console.print(table)


def _print_clients(studies: Sequence[Any], as_json: bool) -> None:
    """Print the results of each client; in pages on a terminal."""
    from coterie.cli import _display
    from coterie.results.clients import load_client_rows
    from coterie.results.coverage import describe_coverage

    if as_json:
        found = {}
        for study in studies:
            rows = load_client_rows(study.folder) if study.summary["rows"] else []
            found[study.config.name] = rows
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    console = Console()
    # A program that reads the output must not be asked to page it.
    with console.pager(styles=True) if console.is_terminal else nullcontext():
        for study in studies:
            if len(studies) > 1:
                console.print(f"{study.config.name}\n", markup=False, highlight=False)
            for note in describe_coverage(study.summary):
                console.print(note, markup=False, highlight=False, style="yellow")
            if study.summary["rows"]:
                console.print(_display.build_client_table(study, console.width))


_report.add_commands(app)
_compare.add_commands(app)
_export.add_commands(app)
_audit.add_commands(app)
_cluster.add_commands(app)
_net.add_commands(app)
_federation.add_commands(app)


def _run_and_show(
    study: Any,
    out: Path,
    data_dir: Path | None,
    workers: int | None,
    where: _cluster.RunLocation,
    *,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run a study with progress, then show it."""
    from coterie.cli import _display
    from coterie.report.page import write_report
    from coterie.studies.sweep import expand_sweep, run_sweep

    console = Console(stderr=True)
    # The command that continues, for the message after an interruption.
    again = [
        "coterie",
        "resume",
        str(out / study.name),
        # Where it was set in the environment, it may not be when the command is given again.
        *(["--data-dir", str(data_dir)] if data_dir else []),
    ]
    with (
        # First, so that it sees an interruption in the other two as well.
        explain_interruption(out / study.name, shlex.join([*again, *where.option_words])),
        where.open_executor(study.settings.device, workers) as (over, crew),
        _display.show_progress(expand_sweep(study), console, quiet) as observer,
    ):
        done = run_sweep(
            study,
            out=out,
            data_dir=data_dir,
            workers=crew,
            overwrite=overwrite,
            observer=observer,
            notes=observer,
            over=over,
        )
    # Before the tables: a report exists even if printing fails.
    reports = [write_report(one.folder) for one in done]
    _print_studies(done, as_json)
    for one in done:
        # Another process has claimed these runs.
        for job, who in one.elsewhere.items():
            console.print(
                f"{job}: {who} works on it; not in these results yet", markup=False, highlight=False
            )
    # Standard output then holds the JSON alone.
    if not as_json:
        for one, report in zip(done, reports, strict=True):
            typer.echo(f"Runs:   {show_path(one.folder)}\nReport: {show_path(report)}")


def _print_studies(studies: Sequence[Any], as_json: bool) -> None:
    from coterie.cli import _display
    from coterie.studies.sweep import join_summaries

    if as_json:
        typer.echo(json.dumps(join_summaries(studies), indent=1, ensure_ascii=False))
        return
    for study in studies:
        if len(studies) > 1:
            typer.echo(f"{study.config.name}\n")
        console = Console()
        _display.print_results(study, console)
        _display.print_round_results(study, console)


def _exit_with_error(error: Exception) -> NoReturn:
    """Exit with one line and the status of an error; raise an unexpected error again."""
    # 2 is bad input, after which a service manager does not start the program again.
    status, text = 2, str(error)
    if DiskFull.matches(error):
        status = NO_ROOM
        # An error of the library says itself how to go on.
        if not isinstance(error, DiskFull):
            text = f"cannot write: {describe_os_error(error)}; when there is room, start again"
    # Before the cases of the system: the library's own errors can also be OSError or MemoryError.
    elif isinstance(error, CoterieError):
        for kind, own in ((ClockError, EARLY), (QuorumError, TOO_FEW)):
            if isinstance(error, kind):
                status = own
    # Before those of the system: some of them are RuntimeErrors of PyTorch, known by their text.
    elif OutOfMemory.matches(error):
        text = (
            "this machine has no more memory; use fewer --workers, fewer clients, or a "
            "smaller model"
        )
    elif isinstance(error, OSError):
        text = describe_os_error(error)
    else:
        raise error
    try:
        # One line, whatever the message holds: programs read standard error by lines.
        typer.echo(f"coterie: {to_one_line(text)}", err=True)
    except OSError:  # standard error is a file on the disk that is full
        sys.stderr = None
    sys.exit(status)


def _format_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"note: {to_one_line(str(message))}\n"


def _show_once(show: Callable[..., None]) -> Callable[..., None]:
    """Return what shows each note once.

    Python forgets what it has shown whenever a part of a program catches warnings.
    """
    shown = set()

    def show_new(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if (category, str(message)) not in shown:
            shown.add((category, str(message)))
            show(message, category, *place, **more)

    return show_new


def _check_words(words: Sequence[str]) -> None:
    """Refuse an empty text in place of a value, as an unset variable of a script leaves it.

    No option has one as a value; an empty path, for example, would be the current folder.
    """
    before = "the command"
    for word in words:
        if not word:
            raise ConfigError(f"the word after {before!r} is empty; expected a value")
        # `--out=$UNSET` becomes `--out=`, which would be read as the present folder.
        if re.fullmatch(r"--[\w-]+=", word):
            raise ConfigError(f"{word[:-1]} is empty; expected a value")
        before = word


def _suggest_setting(error: Exception) -> str:
    """Return how to give a setting of a study, where one was given as an option."""
    option = str(getattr(error, "option_name", ""))
    name = option.lstrip("-").replace("-", "_")
    words = [word for word in sys.argv[1:] if word.partition("=")[0] == option]
    # Only these two have --set.
    if not name or not words or sys.argv[1] not in ("run", "tune"):
        return ""
    from coterie.engine.optim import LocalTraining
    from coterie.runtime.settings import Settings

    known = {}
    for item in dataclasses.fields(LocalTraining):
        known[item.name] = f"local.{item.name}"
    for item in dataclasses.fields(Settings):
        known[item.name] = item.name
    after = sys.argv[sys.argv.index(words[0]) + 1 :]
    value = words[0].partition("=")[2] or next(iter(after), "VALUE")
    return f"; {name} is a setting: --set {known[name]}={value}" if name in known else ""


def main() -> NoReturn:
    """Run the command line."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process per core; see simulation/workers.py
    # Without the place in the source, which says nothing to who gives a command.
    warnings.formatwarning = _format_warning
    warnings.showwarning = _show_once(warnings.showwarning)
    # Names may have letters that a terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        # A stream that replaces the usual one, as in tests, may have no encoding to set.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _check_words(sys.argv[1:])
        # Errors are raised here instead of printed by click, so that all have one form.
        status = app(standalone_mode=False)
    except _Usage as error:
        # Empty when a group of commands has shown its help.
        if text := error.format_message().rstrip("."):
            # A mistake behind a command is explained by the help of that command.
            context = getattr(error, "ctx", None)
            root = context.find_root().command_path if context else ""
            place = context.command_path.removeprefix(root) if context else ""
            text = to_one_line(text) + _suggest_setting(error)
            typer.echo(f"coterie: {text}; see `coterie{place} --help`", err=True)
        sys.exit(2)
    except Exception as error:
        _exit_with_error(error)
    # Commands return None; `typer.Exit` inside one gives its status.
    sys.exit(status if isinstance(status, int) else 0)
