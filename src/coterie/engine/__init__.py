"""How the population is trained: engines differ in speed, never in result.

`loop` trains one client after another with PyTorch's own modules, on one flat vector, and takes any
module; `vmap` runs a block of clients as one batched program; `compiled` writes the whole step as a
native program; `shared-backbone` runs a module that is mostly frozen once for the batches of many
clients; `triton`, on a CUDA device, writes the whole step as a kernel. `make_engine` chooses by the
model and the amount of work; `Engine.reason` says which engine it is, and why.
"""

from coterie.engine._base import Engine, cross_entropy
from coterie.engine._choice import (
    ENGINE_NAMES,
    ENGINES,
    GPU_ENGINES,
    EngineChoice,
    choose_engine,
    default_block,
    make_engine,
)
from coterie.engine._loop import LoopEngine
from coterie.engine._shared_backbone import SharedBackboneEngine
from coterie.engine._triton import TritonEngine
from coterie.engine._vmap import VmapEngine
from coterie.engine.native.compiled import CompiledEngine
from coterie.engine.native.library import use_threads
from coterie.engine.optim import LocalTraining, RowOptimizer

__all__ = [
    "ENGINES", "ENGINE_NAMES", "GPU_ENGINES", "CompiledEngine", "Engine", "EngineChoice", "LocalTraining", "LoopEngine",
    "RowOptimizer", "SharedBackboneEngine", "TritonEngine", "VmapEngine",
    "choose_engine", "cross_entropy", "default_block", "make_engine", "use_threads",
]  # fmt: skip
