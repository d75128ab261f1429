"""The cell through Coterie: `simulate` with the engine it chooses, and the threads that `coterie run` gives one run."""

from importlib.metadata import version

import numpy as np
import torch
from cell import Cell, Report, asked

import coterie
from coterie import FedAvg, Federation, LocalTraining, Settings, simulate
from coterie.data.federation import TestSet
from coterie.engine import use_threads
from coterie.engine._batches import draw_batches
from coterie.models.layout import NETS, Layout
from coterie.rng import Rng
from coterie.simulation import workers
from coterie.simulation.run import Progress

SEED = 0


def network() -> torch.nn.Module:
    """Return net A."""
    return NETS["cnn-a"]((3, 32, 32), 10)


def orders(clients: int, samples: int, rounds: int, batch_size: int) -> torch.Tensor:
    """Return the order in which every client goes through its samples in each round (rounds, clients, samples).

    Samples beyond the last whole batch are left out, other ones in each round: FedJAX knows no
    smaller batch.
    """
    local, ids = LocalTraining(batch_size=batch_size, drop_last=True), torch.arange(clients)
    counts = torch.full((clients,), samples)
    plans = [
        draw_batches(local, counts, ids, Rng(SEED).at_round(number), "batches")
        for number in range(rounds)
    ]
    return torch.stack([each.sample_order.flatten(1) for each in plans])


def federation(cell: Cell) -> Federation:
    """Return the cell's data; the test set that a federation needs is small."""
    x, y = torch.from_numpy(np.array(cell.x)), torch.from_numpy(np.array(cell.y))
    ids = torch.arange(cell.clients)
    return Federation(
        x=x, y=y, split=torch.zeros_like(y), tests=(TestSet(x[0, :8], y[0, :8], "few"),), test_of=torch.zeros_like(ids),
        ids=ids, population=cell.clients, classes=10,
    )  # fmt: skip


def main() -> None:
    """Run the cell and report."""
    cell, folder = asked()
    report = Report(folder)
    module = network()
    module.load_state_dict({name: torch.from_numpy(value) for name, value in cell.start.items()})
    settings = Settings(
        rounds=cell.rounds, init="given", evaluate="final",
        local=LocalTraining(batch_size=cell.batch_size, optimizer="sgd", lr=cell.lr, drop_last=True),
    )  # fmt: skip
    data = federation(cell)

    def after(progress: Progress) -> None:
        report.round() if progress.round >= 0 else report.begin()

    with workers.use_one_thread():
        use_threads(cell.cores)
        run = simulate(data, FedAvg(), model=module, settings=settings, seed=SEED, observer=after)
    final = {
        name: value.numpy() for name, value in Layout(module).split_rows(run.params[0]).items()
    }
    report.write(final, {"coterie": coterie.__version__, "torch": version("torch")})


if __name__ == "__main__":
    main()
