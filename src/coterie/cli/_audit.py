"""The command audit-privacy, which attacks the published models of a study."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli._options import DataDir, Quiet, Set


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("audit-privacy")(audit_privacy)


def audit_privacy(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY",
            help="A study file, the name of a built-in study, or a folder of results.",
        ),
    ] = "rotated-digits",
    set_: Set = None,
    shadows: Annotated[
        int, typer.Option(help="Runs of each method: an even number, at least 6.")
    ] = 8,
    clip: Annotated[
        float, typer.Option(help="With --noise: the largest norm of a sample's gradient.")
    ] = 1.0,
    noise: Annotated[
        float | None,
        typer.Option(
            help="Train with DP-SGD and this noise multiplier; by default only if the study "
            "sets it."
        ),
    ] = None,
    delta: Annotated[
        float, typer.Option(help="With --noise: the delta of the privacy guarantee.")
    ] = 1e-5,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the result as JSON to this file too.")
    ] = None,
    quiet: Quiet = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, for programs.")
    ] = False,
) -> None:
    """Measure how much published models reveal about their training data.

    The attack is membership inference. Halves of each client's training samples
    are held out in turn. Two attacks guess from the newest model that a client
    published which half it was trained on: by the loss (Yeom et al. 2018), and by
    likelihood ratios with the other runs as shadow models (LiRA, Carlini et al.
    2022). Guessing has an AUC of 0.5 and finds 1 % at 1 % false alarms.

    [bold]Examples[/bold]

      coterie audit-privacy rotated-digits --set rounds=5
      coterie audit-privacy my-study.toml --noise 2 --out audit.json
    """
    from coterie._util.files import check_file, check_replaceable, prepare_file, write_atomically
    from coterie.engine.privacy import DPSGD
    from coterie.studies import config, leakage
    from coterie.studies.run import load_stored_study

    # Before the runs, which take long: the result must have a place, and replaces nothing but JSON.
    if out is not None:
        check_file(out)
        check_replaceable(out, b"{")
    if Path(study).is_dir():
        # A folder of results has its resolved study, to which --set applies as to a file.
        stored = load_stored_study(study, to_run=True)[0]
        chosen = config.parse_study(config.make_study_table(stored), set_ or ())
    else:
        chosen = config.load_study(study, set_ or ())
    private = None if noise is None else DPSGD(clip, noise, delta)

    def report_progress(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    # All attacks first: a table and a JSON text are written whole.
    found = list(
        leakage.audit_study(
            chosen, shadows=shadows, private=private, data_dir=data_dir, notify=report_progress
        )
    )
    content = {"study": chosen.name, "shadows": shadows, "attacks": leakage.make_table(found)}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    if out is not None:
        write_atomically(prepare_file(out), f"{text}\n".encode())
    if json_:
        typer.echo(text)
    else:
        _print_attacks(found)


def _print_attacks(attacks: Sequence[Any]) -> None:
    """Print a table of attacks."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("method", "noise", "ε", "attack", "AUC (95 %)", "found at 1 % FPR (95 %)"):
        table.add_column(head)
    for one in attacks:
        # Without DP-SGD there is neither noise nor epsilon.
        noise = "–" if one.noise_multiplier is None else f"{one.noise_multiplier:g}"
        epsilon = "–" if one.epsilon is None else f"{one.epsilon:.2f}"
        label = one.label + (" *" if one.target == "unpublished" else "")
        # A part of a model cannot be evaluated, so that there is no loss to attack.
        if one.target == "part":
            table.add_row(
                label, noise, epsilon, "–", "only a part of the model is sent; not attacked", ""
            )
            continue
        area = f"{one.auc:.3f} ({one.auc_low:.3f} to {one.auc_high:.3f})"
        share = f"{100 * one.tpr:.1f} % ({100 * one.tpr_low:.1f} to {100 * one.tpr_high:.1f})"
        table.add_row(label, noise, epsilon, one.attack, area, share)
    Console().print(table)
    # The star is explained only where a row has one.
    if any(one.target == "unpublished" for one in attacks):
        typer.echo("* sends no model; the attack is on the last one")
