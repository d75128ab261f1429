"""The options and arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

StudyName = Annotated[
    str, typer.Argument(metavar="STUDY", help="A study file, or the name of a built-in study.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="PATH=VALUE",
        help="Change a setting, e.g. methods.dac.tau=30. Repeatable.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar="COTERIE_DATA",
        help="Folder with datasets, in the Hugging Face layout.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", min=1, help="Processes; by default one per core, or one on a GPU."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any free one.")]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]
