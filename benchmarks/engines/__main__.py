"""The command `python -m benchmarks.engines`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from coterie.errors import ConfigError, CoterieError, describe_unknown

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command()
def bench(
    cells: Annotated[
        str,
        typer.Option(
            help="Which cells, as NETWORK/CLIENTS/WORK with * for all; several with commas."
        ),
    ] = "*/*/*",
    engines: Annotated[
        str, typer.Option(help="Engines: compiled, vmap, loop.")
    ] = "compiled,vmap,loop",
    quick: Annotated[
        bool, typer.Option("--quick", help="cnn-b/10/* with few samples and repeats.")
    ] = False,
    samples: Annotated[int, typer.Option(min=1, help="Training samples of each client.")] = 80,
    repeats: Annotated[
        int, typer.Option(min=1, help="Pairs of timings of each cell; the median counts.")
    ] = 5,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads; the usual loop: or so many processes.")
    ] = 1,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Keep the results as JSON.")
    ] = None,
) -> None:
    """Measure the engines on this machine, compared with the usual loop of research code.

    A cell is one piece of a round: a network (cnn-a, cnn-b, mlp), a population (100, 1000,
    or any number) and a work:

      train          one epoch of every client's local training, batches of 8, Adam
      inverse-loss   every client measures 5 peers' models on its training data
      mix            every client averages its model with 5 peers'
      dac-round      all of it: draw, read, measure, average, train

    The usual loop has one module, one DataLoader and one torch.optim.Adam per client. Both
    sides do the same work on the same inputs, in turn; where their results differ, nothing
    is reported. The ratio is a median, with the smallest and the largest. The share of peak
    compares the work's matrix products with the fused multiply-adds that the cores can do.
    With several threads the usual loop runs in its best form: one process, many threads, or
    many processes.

    [bold]Examples[/bold]

      python -m benchmarks.engines --quick                      half a minute
      python -m benchmarks.engines --cells cnn-a/100/train      one cell, all engines
      python -m benchmarks.engines --cells '*/100/*' --engines compiled
      python -m benchmarks.engines --json results.json          a quarter of an hour
    """
    import torch

    from coterie.engine import ENGINES

    from . import measure

    for engine in engines.split(","):
        if engine not in ENGINES:
            raise ConfigError(describe_unknown("engine", engine, ENGINES))
    chosen = measure.cells("cnn-b/10/*", 24) if quick else measure.cells(cells, samples)
    torch.set_num_threads(1)
    rows = []
    for cell in chosen:
        for engine in engines.split(","):
            row = measure.measure(cell, engine, 3 if quick else repeats, threads)
            typer.echo(measure.line(row))
            rows.append(row)
    if threads == 1 and min(row.processor_share for row in rows) < measure.FREE:
        typer.echo(
            "other work shared the processor with some cells: take their numbers with care",
            err=True,
        )
    if json is not None:
        given = {
            "cells": cells,
            "engines": engines,
            "quick": quick,
            "samples": samples,
            "repeats": repeats,
        }
        measure.write(rows, json, {**given, "threads": threads})
        typer.echo(f"written to {json}", err=True)


def main() -> None:
    """Run the command; bad input is one line and exit status 2."""
    try:
        app(prog_name="python -m benchmarks.engines")
    except CoterieError as error:
        typer.echo(f"python -m benchmarks.engines: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
