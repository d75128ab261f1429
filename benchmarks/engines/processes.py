"""The usual loop in several processes, one a core: how research code uses a whole machine at its best."""

import multiprocessing
from multiprocessing.connection import Connection
from time import perf_counter

import torch

from .cells import Cell, Coterie, Usual


class Processes:
    """The usual loop of a cell in processes of their own, each with its own clients and one thread.

    Args:
        cell: what to do.
        number: how many processes.
        clients: of each; every client costs the same.

    Attributes:
        clients: of all processes together.
        waited: seconds that this process waited for the others in all timings.
    """

    def __init__(self, cell: Cell, number: int, clients: int) -> None:
        # threads of this process would be missing in a fork
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.workers = []
        for _ in range(number):
            here, there = context.Pipe()
            worker = context.Process(target=serve, args=(cell, clients, there), daemon=True)
            worker.start()
            there.close()
            self.pipes.append(here)
            self.workers.append(worker)
        self.clients: int = sum(pipe.recv() for pipe in self.pipes)
        self.waited = 0.0

    def seconds(self, times: int) -> float:
        """Let all processes do the work of their clients at once; return the seconds of one client-round.

        Args:
            times: how often, for a timing that is long enough.
        """
        started = perf_counter()
        for pipe in self.pipes:
            pipe.send(times)
        for pipe in self.pipes:
            pipe.recv()
        passed = perf_counter() - started
        self.waited += passed
        return per_client(passed, self.clients, times)

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.send(0)
        for worker in self.workers:
            worker.join()


def per_client(seconds: float, clients: int, times: int) -> float:
    """Return the seconds of one client-round.

    Args:
        seconds: until the last process was done.
        clients: of all processes together.
        times: how often each process did the work of its clients.
    """
    return seconds / (clients * times)


def serve(cell: Cell, clients: int, pipe: Connection) -> None:
    """Do the work as often as asked, until asked for no time.

    Args:
        cell: what to do.
        clients: how many.
        pipe: receives the number of repeats, and sends when it is done; first, the number of clients.
    """
    torch.set_num_threads(1)
    usual = Usual(Coterie(cell, "loop", clients), clients)
    usual.run()
    pipe.send(len(usual.clients))
    while times := pipe.recv():
        usual.reset()
        for _ in range(times):
            usual.run()
        pipe.send(times)
