"""How long native programs take to build: what "auto" forecasts by the size of their graphs.

    python benchmarks/building.py --out docs/reference/runs/performance/building.json

Each model is built once, with nothing compiled before. Times are processor time, the compiler's
included, which other programs on the machine lengthen less than they lengthen seconds.
"""

import argparse
import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models import ZOO, Size, samples, task
from zoo import Entry

from coterie._util.origin import write_results
from coterie.engine._choice import CompilingForecast, count_products
from coterie.engine.native.compiled import CompiledEngine
from coterie.engine.native.traced import trace_module
from coterie.engine.options import Workload


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it ran."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def build(name: str, entry: Entry) -> dict[str, Any]:
    """Build the program of a model and return what it took and what was forecast."""
    x, y = samples(entry, Size(1, 1, 2))
    engine = task(entry, x, y, 2, "loop")[0].engine
    layout, loss = engine.layout, engine.objective
    traces = trace_module(layout, loss, x[0], y[0])
    nodes = [*traces.train.nodes, *traces.judge.nodes]
    products = count_products(layout, x[0])
    forecast = CompilingForecast.predict(traces, products, Workload(runs=0))
    began = processor_seconds()
    CompiledEngine(layout, loss, x[0], y[0], traces)
    took = processor_seconds() - began
    return {
        "model": name,
        "nodes": len(nodes),
        "convolutions": sum(node.name.startswith("convolution") for node in nodes),
        "built in, s": took,
        "forecast, s": forecast.cost,
        "forecast over measured": forecast.cost / took,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Build every model and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["COTERIE_CACHE"] = cache
        rows = [build(name, ZOO[name]) for name in options.only]
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    write_results(options.out, rows, ("engine", "models"), settings, order=51)


if __name__ == "__main__":
    main()
