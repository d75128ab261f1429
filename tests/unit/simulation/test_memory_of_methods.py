"""What tensors take at one time, of every method, against the forecast of its run."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import memory
from coterie.engine.task import LocalTraining
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate

CLIENTS = 1000
# Time that grows with the square of the clients or faster, or a method that refuses so many.
FEWER = {"cfl": 500, "fedgwc": 500, "ppdl": 20}
# What is computed for some clients at a time, however many there are: messages with clusters, and
# tables with those of the peers.
AT_ONCE = {"oracle": 24 << 20, "dac, table = 64": 32 << 20, "dac, table = 64, own rule": 32 << 20}


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that operations read or write, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, out)):
            if isinstance(one, torch.Tensor):
                self._note(one.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        if storage.nbytes() and place not in self.sizes:
            self.sizes[place] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, place).atexit = False

    def _forget(self, place: int) -> None:
        self.now -= self.sizes.pop(place)


METHODS = dict(memory.list_methods())


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
def test_no_method_holds_more_than_was_forecast(name):
    """Nor less than a quarter of it. The data of clients, four images each, count apart."""
    method, clients = METHODS[name], FEWER.get(name, CLIENTS)
    settings = Settings(
        rounds=2, engine="compiled", local=LocalTraining(batch_size=4), evaluate="final"
    )
    data, model = memory.planted(clients), memory.choose_model(method.kind)
    forecast = memory.told(data, method, settings)
    assert forecast is not None
    with LiveTensors() as seen:
        simulate(data, method, model=model, settings=settings)
    held = seen.most - data.nbytes
    assert forecast / 4 < held < forecast + AT_ONCE.get(name, 0)
