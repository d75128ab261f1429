"""`--on` and what belongs to it, for the commands that run something; `coterie doctor --on`; `coterie status`."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.errors import ConfigError

On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="PLACE",
        help="Where runs are computed: local, ray:auto, ray://HOST:10001, slurm:PARTITION.",
    ),
]
Cpus = Annotated[
    int, typer.Option(min=1, help="With --on: processors of a run, which are its threads.")
]
Gpus = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --on: GPUs of a run, such as 0.5; by default 1 where the study's device is one.",
    ),
]
Blocks = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Host each run in so many blocks, over --on; by default on a Ray of this machine.",
    ),
]
MANY = 1_000_000
"""Runs under way at most, where the cluster decides."""


@dataclass(frozen=True)
class RunLocation:
    """Where runs are computed, as the command line says it.

    Args:
        on: the value of --on.
        cpus: processors of a run.
        gpus: GPUs of a run; None for what the study's device needs.
        blocks: in how many blocks each run is hosted; None for one process. The others are then of
            a block.
    """

    on: str
    cpus: int
    gpus: float | None
    blocks: int | None = None

    @property
    def option_words(self) -> list[str]:
        """The options, to be given again; nothing for this machine."""
        more = [] if self.blocks is None else ["--blocks", str(self.blocks)]
        more += [] if self.gpus is None else ["--gpus", f"{self.gpus:g}"]
        more += ["--cpus", str(self.cpus)] if self.cpus > 1 else []
        return ["--on", self.on, *more] if self.on != "local" else more

    @contextmanager
    def open_executor(self, device: str, workers: int | None) -> Iterator[tuple[Any, int]]:
        """Be connected to what does the runs, for the block.

        Args:
            device: of the study.
            workers: how many runs are under way at most; None for what fits.

        Yields:
            What does them, None for processes of this machine; and the number of workers.

        Raises:
            ConfigError: when the place is none, or nobody answers there.
        """
        from coterie.cluster import place

        found = place.parse_place(
            "ray:local" if self.on == "local" and self.blocks is not None else self.on
        )
        if self.blocks is not None:
            if found.kind != "ray":
                raise ConfigError(
                    f"--blocks is {self.blocks}, with --on {self.on}; expected a place of Ray"
                )
            from coterie.cluster import actors

            with actors.open_ray_blocks(found, self.blocks, cpus=self.cpus, gpus=self.gpus) as over:
                yield over, 1
            return
        if found.kind == "local":
            if self.cpus > 1 or self.gpus is not None:
                raise ConfigError("--cpus and --gpus are of runs on a cluster; give --on too")
            from coterie.simulation.workers import default_workers

            yield None, workers or default_workers(device)
            return
        gpus = (1.0 if device.startswith("cuda") else 0.0) if self.gpus is None else self.gpus
        if found.kind == "slurm":
            from coterie.cluster import slurm

            yield slurm.SlurmRuns(found, cpus=self.cpus, gpus=gpus), workers or MANY
            return
        from coterie.cluster import runs

        with runs.open_ray_runs(found, cpus=self.cpus, gpus=gpus) as over:
            yield over, workers or MANY


def add_commands(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("status")(show_status)


def check_cluster(on: str) -> int:
    """Say what differs on the machines of a cluster from this one; return the exit status."""
    from coterie.cluster import doctor

    machines, own = _examine_machines(on), doctor.describe_this_machine()
    wrong = doctor.describe_differences(machines, own, doctor.REFUSED)
    for line in wrong:
        typer.echo(f"WRONG  {line}")
    rest = [key for key in doctor.NAMES if key not in doctor.REFUSED]
    unequal = doctor.describe_differences(machines, own, rest)
    for line in unequal:
        typer.echo(f"other  {line}")
    count = f"{len(machines)} machine{'s' * (len(machines) != 1)}"
    if wrong:
        typer.echo(f"WRONG  {count}: install the same on all")
    elif unequal:
        typer.echo(
            f"ok     {count}: results agree within the tolerance of an engine; their bytes may differ"
        )
    else:
        typer.echo(f"ok     {count}, equal to this one: runs leave the same bytes")
    return int(bool(wrong))


def _examine_machines(on: str) -> Any:
    """The machines of a place: all of a Ray cluster; of Slurm one of the partition, whichever is free first."""
    from coterie.cluster import doctor, place

    found = place.parse_place(on)
    if found.kind == "local":
        raise ConfigError(
            "--on local is this machine, which has nothing to differ from; expected ray:auto, ..."
        )
    if found.kind == "slurm":
        from coterie.cluster import slurm

        facts = slurm.run_question(found, doctor.make_probe())
        return [doctor.Machine(facts["host"], facts)]
    with place.connect_ray(found):
        return doctor.look_at_machines()


def show_status(
    folder: Annotated[
        Path, typer.Argument(metavar="STUDY", help="Folder of a study, wherever its runs are made.")
    ],
) -> None:
    """Say of each run of a study whether it is queued, running, done or failed, and why.

    Exit status: 0 when all are done; 1 when one failed or is damaged; 3 when there is more to do.

    [bold]Example[/bold]

      coterie status runs/rotated-digits
    """
    from coterie.cluster import status as state

    found = state.load_statuses(folder)
    for line in state.format_statuses(found):
        typer.echo(line)
    if not all(one.state == "done" for one in found):
        typer.echo(f"Continue with: {shlex.join(['coterie', 'resume', str(folder)])}")
    raise typer.Exit(state.exit_status(found))
