"""The command `coterie bench`."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this command to the program's."""
    app.command()(bench)


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="One small cell of each kind.")] = False,
    nets: Annotated[str, typer.Option(help="Networks: cnn-a, cnn-b, mlp.")] = "cnn-a,cnn-b,mlp",
    clients: Annotated[str, typer.Option(help="Populations.")] = "100,1000",
    engines: Annotated[str, typer.Option(help="Engines: compiled, vmap, loop.")] = "compiled",
    samples: Annotated[int, typer.Option(min=1, help="Training samples of each client.")] = 80,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of timings of each cell; the median counts.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of native programs. The usual loop has one.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A JSON file for the results.")] = None,
) -> None:
    """Measure the engines on this machine beside the usual loop of research code.

    The usual loop has one module, one DataLoader and one torch.optim.Adam per client. Both sides do the same work on
    the same inputs, in turn; where their results differ, nothing is reported.
    """
    import torch

    from coterie.bench import cells, measure
    from coterie.engine import ENGINES
    from coterie.errors import ConfigError, unknown

    torch.set_num_threads(1)
    chosen = nets.split(",") if not quick else ["cnn-b"]
    for net in chosen:
        if net not in cells.SHAPES:
            raise ConfigError(unknown("network", net, cells.SHAPES))
    for engine in engines.split(","):
        if engine not in ENGINES:
            raise ConfigError(unknown("engine", engine, ENGINES))
    populations = [int(number) for number in clients.split(",")] if not quick else [10]
    rows = []
    for cell in measure.cells(chosen, populations, samples if not quick else 24):
        for engine in engines.split(","):
            row = measure.measure(cell, engine, repeats, threads)
            typer.echo(
                f"{row.net:6} {row.clients:5} clients  {row.work:12} {row.engine:8} {row.ratio:6.1f}x the usual loop "
                f"({row.low:.1f} to {row.high:.1f}); {row.milliseconds:.2f} against {row.usual_milliseconds:.2f} ms a "
                f"client-round; {row.roofline:.0%} of the matrix-product speed; {row.memory_mb:.0f} MB"
            )
            rows.append(row)
    if out is not None:
        measure.write(rows, out)
        typer.echo(f"written to {out}", err=True)
