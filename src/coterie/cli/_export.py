"""The command export, which writes trained models for other programs."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from coterie._util.files import prepare_file, show_path
from coterie._util.names import to_one_line
from coterie.errors import ConfigError, CoterieError, describe_unknown, require


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("export")(export_models)


def export_models(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, a study, or a node.")
    ],
    client: Annotated[
        str | None, typer.Option("--client", "-c", help="Name or number of the client.")
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Export the models of all clients into the folder --out.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file, by default named after the client; with --all a folder."
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="safetensors, pt, onnx, or peft (a folder with the adapter); by default that of "
            "the name of --out, else safetensors.",
        ),
    ] = None,
    which: Annotated[
        str, typer.Option(help="Which model: evaluated (in the final test), best_val or final.")
    ] = "evaluated",
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help="The label of the method, if RUN is a study."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed, if RUN is a study.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For ONNX: import path of the module, if it was given from Python."),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            help="Leave out frozen weights; with --all they are in one file, frozen.safetensors.",
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Check the files on samples of the client in this federation (.safetensors) or "
            "study; by default on drawn inputs."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write a client's trained model to a file for other programs: weights, or ONNX.

    Each file is read again, and has the tensors and the outputs of the run's model.

    [bold]Examples[/bold]

      coterie export runs/hospitals/DAC/seed-0 --client north
      coterie export runs/hospitals --method DAC --seed 0 --all --out models
      coterie export runs/hospitals/DAC/seed-0 --client north --out north.onnx
    """
    from coterie.results.export import FORMATS, choose_format, export_frozen, export_model
    from coterie.runtime.models import Which, load_models

    if format_ is not None and format_ not in (*FORMATS, "peft"):
        raise ConfigError(describe_unknown("--format", format_, [*FORMATS, "peft"]))
    # The format of peft is a folder for each client, with the adapter and its configuration.
    folders = format_ == "peft"
    require(not (folders and adapter), "--adapter", True, "no --format peft with it, which is one")
    # With --all the name is that of a folder, which may have a dot in it.
    named = None if all_ or folders else out
    chosen = choose_format(named, None if folders else format_)  # type: ignore[arg-type]
    require(which in get_args(Which), "--which", which, "evaluated, best_val or final")
    run = _find_run_folder(folder, method, seed)
    models = load_models(run, model=model)
    clients = [client] if client is not None else list(models.clients)
    # One client and all clients contradict each other.
    require(not (all_ and client is not None), "--all", True, "to be given without --client")
    if len(clients) > 1 and not all_:
        few = ", ".join(map(str, clients[:8])) + ", ..." * (len(clients) > 8)
        raise ConfigError(
            f"this run has {len(clients)} clients: {few}; choose one with --client, or give --all"
        )
    if folders:
        files = _choose_files(models, clients, out, all_, "", ())
        _write_folders(models, clients, files, which, force, data)
        return
    frozen = []
    if adapter and all_ and models.fixed:
        frozen.append((out or Path("models")) / f"{_FROZEN}{FORMATS[chosen]}")
    files = _choose_files(models, clients, out, all_, FORMATS[chosen], {_FROZEN} if frozen else ())
    # All files first: nothing is written when one of them is in the way.
    for path in (*files, *frozen):
        prepare_file(path)
    _refuse_existing([*files, *frozen], force)
    study = _find_study_name(run)
    for name, path in zip(clients, files, strict=True):
        export_model(
            models,
            name,
            path,
            format=chosen,
            which=which,  # type: ignore[arg-type]
            study=study,
            force=force,
            adapter=adapter,
            samples=None if data is None else _load_samples(data, models, name),
        )
        typer.echo(f"{to_one_line(str(models.client_name(name)))}: {show_path(path)}")
    # Last: a file that all clients share is of use only where theirs were written.
    for path in frozen:
        export_frozen(models, path, format=chosen, force=force)
        typer.echo(f"the frozen weights of all: {show_path(path)}")


_FROZEN = "frozen"  # the file of the weights that all clients share, which no client's may replace


def _load_samples(data: str, models: Any, client: str | int) -> Any:
    """Return inputs of a client, as a federation holds them."""
    from coterie.data.build import build_federation
    from coterie.data.federation import Federation
    from coterie.data.rows import read_inputs
    from coterie.studies.config import load_study

    # A file of `Federation.save`; anything else names a study, whose data are built as in the run.
    if data.endswith(".safetensors"):
        federation = Federation.load(data)
    else:
        federation = build_federation(load_study(data).data, models.spec.seed)
    # By the client's id in the run: rows of the stored models may be of some clients only.
    number = models.spec.ids[models.find_row(client)]
    fits = number < len(federation) and federation.features == models.spec.inputs.features
    require(fits, "--data", data, f"data of the run, with {models.client_name(client)}")
    # Samples that exist, since a client's row is padded; sixteen show a difference as well as all
    # would.
    return read_inputs(federation.x[number][federation.split[number] >= 0][:16])


def _refuse_existing(paths: Sequence[Path], force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            raise ConfigError(
                f"{show_path(path)} exists; choose another place with --out, or replace it with "
                "--force"
            )


def _write_folders(
    models: Any,
    clients: Sequence[str | int],
    folders: Sequence[Path],
    which: Any,
    force: bool,
    data: str | None,
) -> None:
    """Write a folder of peft for each client."""
    from coterie.results.adapter_folder import export_adapter_folder

    _refuse_existing(folders, force)
    for name, path in zip(clients, folders, strict=True):
        samples = None if data is None else _load_samples(data, models, name)
        export_adapter_folder(models, name, path, which=which, force=force, samples=samples)
        typer.echo(f"{to_one_line(str(models.client_name(name)))}: {show_path(path)}")


def _find_run_folder(folder: Path, method: str | None, seed: int | None) -> Path:
    """Find the folder of the one run that the options select."""
    from coterie.runtime import checkpoint, models

    # A run's own folder, or one without any: loading it says what is missing.
    if (folder / models.FILE).exists() or not folder.is_dir() or checkpoint.has_run(folder):
        return folder
    runs = [path.parent for path in folder.glob(f"*/seed-*/{models.FILE}")]
    if not runs:
        return folder  # which says what is missing
    labels = sorted({run.parent.name for run in runs})
    if method is not None and method not in labels:
        raise ConfigError(describe_unknown("method", method, labels))
    kept = []
    for run in runs:
        if method in (None, run.parent.name) and (seed is None or run.name == f"seed-{seed}"):
            kept.append(run)
    # None or several: a guess could export the wrong model.
    if len(kept) != 1:
        seeds = sorted({int(run.name.removeprefix("seed-")) for run in runs})
        said = ", ".join(map(str, seeds[:8])) + ", ..." * (len(seeds) > 8)
        raise ConfigError(
            f"{folder} has {len(kept) or 'no'} finished run{'s' * (len(kept) > 1)} that match; "
            "its methods are "
            f"{', '.join(labels)}, its seeds {said}: choose with --method and --seed"
        )
    return kept[0]


def _find_study_name(run: Path) -> str:
    """Return the name of the study of a run; "" for one outside a study."""
    from coterie.studies.run import load_stored_study

    try:
        return load_stored_study(run)[0].name
    # A run outside a study, of a node for example, has no study file.
    except CoterieError:
        return ""


def _choose_files(
    models: Any,
    clients: Sequence[str | int],
    out: Path | None,
    all_: bool,
    ending: str,
    reserved: Collection[str],
) -> list[Path]:
    """Return the file of each client: the given one, or one named after the client."""
    if out is not None and not all_:
        return [out / f"{_make_file_name(clients[0])}{ending}" if out.is_dir() else out]
    # One file goes to the current folder, and the files of all clients to one of their own.
    folder, taken = (out or Path("models")) if all_ else Path(), set(reserved)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"--out is {show_path(folder)}, a file; with --all expected a folder: choose another"
        )
    files = []
    for client in clients:
        name = _make_file_name(client)
        # Two names may differ in case, or in signs that no file has.
        while name.casefold() in taken:
            name = f"{name}-{models.spec.ids[models.find_row(client)]}"
        taken.add(name.casefold())
        files.append(folder / f"{name}{ending}")
    return files


def _make_file_name(client: str | int) -> str:
    """Make a file name from the name of a client."""
    text = str(client)
    # A client without a name of its own: a file called 7 would say nothing.
    if text.isdecimal():
        return f"client-{text}"
    # No separator of folders, and nothing that a shell or another system reads as more than a
    # sign; dots at the ends hide a file, or lead out of its folder.
    safe = re.sub(r"[^\w.-]", "_", text).strip(".")
    # Most file systems allow 255 bytes; a character that the cut splits is left out.
    return safe.encode()[:120].decode(errors="ignore") or "client"
