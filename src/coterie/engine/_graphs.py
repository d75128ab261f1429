"""CUDA graphs: a function is captured once for each shape of its arguments and replayed."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.engine._base import MODULE_ERRORS
from coterie.errors import first_line

Results = tuple[Tensor, ...]
# calls with a shape before it is captured, as they settle what is chosen once; shapes captured
# Each graph keeps the memory of its activations for good, so their number is bounded.
_FIRST, _MOST = 3, 16


class GraphCapture:
    """Captures calls, in one pool of memory: of its graphs, no two may run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(
        self, function: Callable[..., Results], tensors: Sequence[Tensor]
    ) -> Callable[[], Results]:
        """Capture a call; return a function that runs it on the present values of `tensors`.

        Args:
            function: of tensors, without a step that waits for the device.
            tensors: its arguments, which keep their memory.

        Returns:
            A function whose results are overwritten by its next call.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA during the capture, which the default error mode refuses.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = function(*tensors)

        def replay() -> Results:
            graph.replay()
            return results

        return replay


class ReplayedFunction:
    """A function of tensors that is replayed as CUDA graphs: one launch for all kernels.

    A function that cannot be captured is called as it is from then on.

    Args:
        function: of tensors on one device, whose results depend on the values of its arguments
            alone.
        capture: see `GraphCapture.__call__`; that of a new `GraphCapture` when None.
    """

    def __init__(
        self,
        function: Callable[..., Results],
        capture: Callable[..., Callable[[], Results]] | None = None,
    ) -> None:
        self._function, self._capture = function, capture or GraphCapture()
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._captured: dict[tuple[Any, ...], tuple[list[Tensor], Callable[[], Results]]] = {}
        self._works = True

    def __call__(self, *tensors: Tensor) -> Results:
        """Return the results of the function, in memory of their own."""
        shape = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        self._seen[shape] += 1
        if shape not in self._captured and not self._try_capture(shape, tensors):
            return self._function(*tensors)
        held, replay = self._captured[shape]
        # A graph reads and writes fixed addresses: arguments are copied in, and results are copied
        # out before the next replay overwrites them.
        for place, tensor in zip(held, tensors, strict=True):
            place.copy_(tensor)
        return tuple(result.clone() for result in replay())

    def _try_capture(self, shape: tuple[Any, ...], tensors: Sequence[Tensor]) -> bool:
        """Capture a shape that has come often enough; return whether that was done."""
        if not self._works or self._seen[shape] <= _FIRST or len(self._captured) >= _MOST:
            return False
        held = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        try:
            self._captured[shape] = held, self._capture(self._function, held)
        except torch.OutOfMemoryError:
            self._captured.clear()  # what they hold may be what is missing; smaller blocks come
            raise
        except MODULE_ERRORS as error:
            self._works = False
            warnings.warn(
                f"cuda_graphs: steps cannot be captured, and run one by one ({first_line(error)})",
                stacklevel=2,
            )
        return self._works
