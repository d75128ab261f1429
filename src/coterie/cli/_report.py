"""The commands that show stored runs: report, watch, plot, track."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie._util.files import prepare_folder, show_path
from coterie.cli._options import Open, Port

if TYPE_CHECKING:  # pages are imported when one is shown
    from coterie.report.server import PageServer

Folders = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Folders of studies, or of runs.", show_default=False),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("report")(write_reports)
    app.command("watch")(watch_folder)
    app.command("plot")(plot_figure)
    app.command("track")(track_runs)


def write_reports(
    runs: Folders,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file: the report of one RUN, or the page with several."
        ),
    ] = None,
) -> None:
    """Write the report of stored runs: a page that opens from disk.

    For several studies, also write one page that shows all of them.

    [bold]Examples[/bold]

      coterie report runs/rotated-digits
      coterie report runs/rotated-digits --out page.html
      coterie report runs/rotated-digits runs/cooler --out both.html
    """
    from coterie.report.page import write_report_with_notes
    from coterie.report.studies import write_studies

    paths = []
    for folder in runs:
        # With several studies --out names the page of all; each report stays in its folder.
        path, notes = write_report_with_notes(folder, out if len(runs) == 1 else None)
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        typer.echo(f"Report: {show_path(path)}")
        paths.append(path)
    if len(runs) > 1:
        typer.echo(f"Studies: {show_path(write_studies(runs, paths, out))}")


def watch_folder(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a study, a run or a node.")
    ],
    port: Port = 0,
    open_: Open = False,
) -> None:
    """Serve the report on 127.0.0.1 and update it during a run; Ctrl-C ends it.

    [bold]Example[/bold]

      coterie watch runs/rotated-digits --open
    """
    from coterie.report.watch import WatchServer

    with WatchServer(folder, port=port) as page:
        state = "" if folder.exists() else " (nothing is there yet; the page waits for it)"
        show_page(page, f"{show_path(folder)}{state}", open_=open_)


def show_page(page: "PageServer", followed: str, *, open_: bool) -> None:
    """Print the address of a page, and serve it until Ctrl-C.

    Args:
        page: its server.
        followed: what it shows, in words.
        open_: whether to open it in the browser.
    """
    typer.echo(f"Following {followed}; Ctrl-C ends it\n{page.address}")
    # After the server is there: a browser that came first would find nothing.
    if open_:
        webbrowser.open(page.address)
    try:
        page.wait()
    # Ctrl-C is the way to end it, hence no error.
    except KeyboardInterrupt:
        typer.echo("ended", err=True)


def plot_figure(
    runs: Folders,
    figure: Annotated[
        str,
        typer.Option("--figure", "-f", help="A kind of figure, or a published figure: dac-3, ..."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; by default the figure's name.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="pdf, svg or png.")] = "pdf",
    metric: Annotated[
        str | None, typer.Option(help="The metric; by default accuracy, else the loss.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="For learning curves: validation, train or test.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Clients to average over: all, clusters, or the name of a planted cluster."
        ),
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option(
            help="For sweeps: the name or path of the setting; two, with a comma, for a grid."
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Labels to show, with commas; * matches anything.")
    ] = None,
) -> None:
    """Draw a figure of stored runs for a paper; without --figure, list the figures.

    The numbers of the figure are written to a CSV file.

    [bold]Examples[/bold]

      coterie plot runs/rotated-digits --figure curves --format svg
      coterie plot runs/dac/tau --figure dac-3 --out tau.pdf
      coterie plot runs/my-sweep --figure sweep --setting num_clusters,rho
      coterie plot runs/my-study --figure heatmap --methods "DAC*,Random"
    """
    import coterie.papers.figures  # noqa: F401 (adds those of the papers)
    from coterie.report import figures

    if not figure:
        for name, kind in figures.FIGURES.items():
            typer.echo(f"{name:<14}{kind.text}")
        for name, published in figures.PUBLISHED.items():
            typer.echo(f"{name:<14}{published.figure} of {published.study}")
        for name, reason in figures.NOT_STORED.items():
            typer.echo(f"{name:<14}not from stored runs: {reason}")
        return
    options = {
        "metric": metric,
        "split": split,
        "cluster": cluster,
        "setting": setting,
        "methods": methods,
    }
    # Options that were not given leave the figure's own defaults.
    given = {name: value for name, value in options.items() if value is not None}
    path = figures.plot(runs, figure, out=out, format=format_, **given)
    data = show_path(path.with_suffix(".csv"))
    typer.echo(f"Figure: {show_path(path)}\nData:   {data}")


def track_runs(
    runs: Folders,
    to: Annotated[
        str, typer.Option("--to", help="tensorboard, mlflow or wandb (offline); each is an extra.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the tracker's files.")
    ] = Path("tracking"),
) -> None:
    """Copy stored runs into local files of an experiment tracker; nothing is sent.

    [bold]Example[/bold]

      coterie track runs/rotated-digits --to tensorboard
    """
    from coterie.report.trackers import export_runs, make_opener
    from coterie.results.coverage import describe_incomplete_runs
    from coterie.results.selection import group_by_study
    from coterie.results.stored_runs import load_runs

    found, problems = load_runs(runs)
    # Incomplete studies are exported all the same; a note lists the runs that are not there.
    for _, _, content in group_by_study(runs, found, problems):
        for note in describe_incomplete_runs(content):
            typer.echo(f"note: {content['study']}: {note}", err=True)
    # Before the folder is made: an unknown tracker leaves nothing behind.
    opener = make_opener(to, out)
    prepare_folder(out)
    typer.echo(f"{export_runs(found, opener)} runs written to {show_path(out)}")
