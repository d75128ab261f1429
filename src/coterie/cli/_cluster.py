"""Where runs are computed: `--on` and its options, `doctor --on`, and `status`."""

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
        help="Where to compute runs: local, ray:auto, ray://HOST:10001, slurm:PARTITION.",
    ),
]
Cpus = Annotated[int, typer.Option(min=1, help="With --on: processors per run, one thread each.")]
Gpus = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --on: GPUs per run, such as 0.5; by default 1 if the study's device is a GPU.",
    ),
]
Blocks = Annotated[
    int | None,
    typer.Option(
        min=1, help="Split each run into this many blocks on --on; by default on a local Ray."
    ),
]
# The cluster decides how many runs are in progress, so the number here must not limit it.
MANY = 1_000_000


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
        # Only what differs from the defaults, so that the command stays short.
        words = [] if self.on == "local" else ["--on", self.on]
        if self.blocks is not None:
            words += ["--blocks", str(self.blocks)]
        if self.gpus is not None:
            words += ["--gpus", f"{self.gpus:g}"]
        if self.cpus > 1:
            words += ["--cpus", str(self.cpus)]
        return words

    @contextmanager
    def open_executor(self, device: str, workers: int | None) -> Iterator[tuple[Any, int]]:
        """Connect to the place that executes the runs, for the block.

        Args:
            device: of the study.
            workers: how many runs are in progress at most; None for what fits.

        Yields:
            The executor of the runs, None for processes of this machine; and the number of workers.

        Raises:
            ConfigError: when the place does not exist, or does not answer.
        """
        from coterie.cluster import place

        # Blocks need Ray: without --on, a Ray on this machine.
        needs_ray = self.on == "local" and self.blocks is not None
        found = place.parse_place("ray:local" if needs_ray else self.on)
        if self.blocks is not None:
            if found.kind != "ray":
                raise ConfigError(
                    f"--blocks is {self.blocks}, with --on {self.on}; expected a place of Ray"
                )
            from coterie.cluster import actors

            with actors.open_ray_blocks(found, self.blocks, cpus=self.cpus, gpus=self.gpus) as over:
                # One run at a time: it has all the blocks.
                yield over, 1
            return
        if found.kind == "local":
            # Processes of this machine reserve nothing: all of them take what there is.
            if self.cpus > 1 or self.gpus is not None:
                raise ConfigError("--cpus and --gpus apply to runs on a cluster; give --on too")
            from coterie.simulation.workers import default_workers

            yield None, workers or default_workers(device)
            return
        # A run on the CPU must not reserve a GPU.
        gpus = self.gpus
        if gpus is None:
            gpus = float(device.startswith("cuda"))
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
    """Print how the machines of a cluster differ from this one; return the exit status."""
    from coterie.cluster import doctor

    machines, own = _examine_machines(on), doctor.describe_this_machine()
    # Facts in which a difference keeps a run from starting.
    wrong = doctor.describe_differences(machines, own, doctor.REFUSED)
    for line in wrong:
        typer.echo(f"WRONG  {line}")
    # Facts that may differ: they change bytes, not what can run.
    rest = [key for key in doctor.NAMES if key not in doctor.REFUSED]
    unequal = doctor.describe_differences(machines, own, rest)
    for line in unequal:
        typer.echo(f"other  {line}")
    count = f"{len(machines)} machine{'s' * (len(machines) != 1)}"
    if wrong:
        typer.echo(f"WRONG  {count}: install the same on all")
    elif unequal:
        typer.echo(
            f"ok     {count}: results agree within the tolerance of an engine; their bytes "
            "may differ"
        )
    else:
        typer.echo(f"ok     {count}, equal to this one: runs leave the same bytes")
    # Only what refuses a run is a failure.
    return int(bool(wrong))


def _examine_machines(on: str) -> Any:
    """Examine all machines of a Ray cluster, or the first free machine of a Slurm partition."""
    from coterie.cluster import doctor, place

    found = place.parse_place(on)
    if found.kind == "local":
        raise ConfigError("--on local is this machine alone; expected a cluster, such as ray:auto")
    if found.kind == "slurm":
        from coterie.cluster import slurm

        facts = slurm.run_question(found, doctor.make_probe())
        # Slurm chooses the machine: one answers for the partition.
        return [doctor.Machine(facts["host"], facts)]
    with place.connect_ray(found):
        return doctor.look_at_machines()


def show_status(
    folder: Annotated[
        Path, typer.Argument(metavar="STUDY", help="Folder of a study, wherever it runs.")
    ],
) -> None:
    """Show for each run of a study whether it is queued, running, done or failed.

    Exit status: 0 when all are done; 1 when one failed or is damaged; 3 when
    there is more to do.

    [bold]Example[/bold]

      coterie status runs/rotated-digits
    """
    from coterie.cluster import status as state
    from coterie.studies.run import is_of_node

    found = state.load_statuses(folder)
    for line in state.format_statuses(found):
        typer.echo(line)
    if not all(one.state == "done" for one in found):
        words = ["coterie", "resume", str(folder)]
        # The run of a node continues when its node is started again.
        if is_of_node(folder):
            words = ["coterie", "node", "NODE.toml"]
        typer.echo(f"Continue with: {shlex.join(words)}")
    # A script reads from the status whether to wait, to resume, or to look.
    raise typer.Exit(state.exit_status(found))
