"""The cell that every framework runs: its files, and what a script hands back. NumPy alone: all environments read it.

A folder holds x.npy (clients, samples, 3, 32, 32), y.npy (clients, samples), order.npy (rounds,
clients, whole batches of samples: the order in which a client goes through its data in each round),
start.npz (the first model) and cell.json.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Cell:
    """What is run: FedAvg, every client in every round, plain SGD.

    Args:
        folder: where its files are.
        rounds: how many.
        batch_size: samples of one step.
        lr: step size.
        cores: how many the framework may use.
    """

    folder: Path
    rounds: int
    batch_size: int
    lr: float
    cores: int

    @staticmethod
    def load(folder: Path) -> "Cell":
        """Read the settings of a cell."""
        return Cell(folder, **json.loads((folder / "cell.json").read_text()))

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.y)

    @property
    def x(self) -> np.ndarray:
        """All inputs, mapped: processes share one copy."""
        return np.load(self.folder / "x.npy", mmap_mode="r")

    @property
    def y(self) -> np.ndarray:
        """All classes, mapped."""
        return np.load(self.folder / "y.npy", mmap_mode="r")

    @property
    def order(self) -> np.ndarray:
        """The order of the samples in each round, mapped."""
        return np.load(self.folder / "order.npy", mmap_mode="r")

    @property
    def start(self) -> dict[str, np.ndarray]:
        """The first model, as PyTorch names and shapes it."""
        with np.load(self.folder / "start.npz") as stored:
            return dict(stored)

    def data(self, client: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's inputs and classes in the order of a round, counted from 0."""
        order = self.order[number, client]
        return self.x[client][order], self.y[client][order]


def asked() -> tuple[Cell, Path]:
    """Return the cell and the folder for results that the command line names."""
    return Cell.load(Path(sys.argv[1])), Path(sys.argv[2])


class Report:
    """What a script hands back.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.times = folder, [time.time()]

    def begin(self) -> None:
        """Call before the first round."""
        self.times = [time.time()]

    def round(self) -> None:
        """Call after each round."""
        self.times.append(time.time())

    def write(self, model: dict[str, np.ndarray], versions: dict[str, str]) -> None:
        """Write the last model, as PyTorch names and shapes it, the times of the rounds and the versions."""
        np.savez(self.folder / "model.npz", **model)  # type: ignore[arg-type]
        (self.folder / "report.json").write_text(
            json.dumps({"times": self.times, "versions": versions})
        )
