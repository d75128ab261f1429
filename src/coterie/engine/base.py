"""What an engine does: gradients and outputs of many models at once.

An engine knows nothing of clients, rounds or data sets: it takes rows of the population's matrix and batches, and
returns losses, gradients and outputs. All engines compute the same numbers; they differ in how fast.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from coterie.models import Layout

Objective = Callable[[Tensor, Tensor], Tensor]
"""(outputs [samples ...], targets [samples ...]) -> one loss a sample."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits, one value a sample."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, one value a sample (the mean over a target's entries)."""
    difference = (outputs.reshape(targets.shape) - targets).square()
    return difference.reshape(len(targets), -1).mean(1)


class Engine(ABC):
    """Runs one module over rows of parameters.

    Args:
        layout: how the module's tensors lie in a row.
        objective: the loss of each sample.
    """

    name: ClassVar[str]

    def __init__(self, layout: Layout, objective: Objective) -> None:
        self.layout, self.objective = layout, objective

    @abstractmethod
    def gradients(
        self,
        rows: Float[Tensor, "clients params"],
        x: Float[Tensor, "clients samples *features"],
        y: Shaped[Tensor, "clients samples *targets"],
        inputs: Mapping[str, Shaped[Tensor, "clients *shape"]],
    ) -> tuple[Float[Tensor, " clients"], Float[Tensor, "clients trainable"], Float[Tensor, "clients state"]]:
        """Return the mean loss of each client's batch, its gradient, and the state that is not trained.

        Args:
            rows: a model for each client.
            x: a batch for each.
            y: its targets.
            inputs: values of the layout's input buffers.
        """

    @abstractmethod
    def forward(
        self,
        rows: Float[Tensor, "clients params"],
        x: Float[Tensor, "_clients samples *features"],
        inputs: Mapping[str, Shaped[Tensor, "clients *shape"]],
    ) -> Float[Tensor, "clients samples *outputs"]:
        """Return the outputs in evaluation mode; `x` with one leading entry is shared by all rows."""
