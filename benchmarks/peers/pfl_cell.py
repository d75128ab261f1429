"""The cell through pfl: its simulated backend with PyTorch, one process a core.

Started by torchrun, as pfl's guide to distributed simulation says; the first process reports.
"""

from importlib.metadata import version

import numpy as np
import torch
from cell import Cell, Report, asked
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from usual import network


class Net(nn.Sequential):
    """Net A with the two functions that pfl asks for."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict:
        """Measure nothing."""
        return {}


class Clock(TrainingProcessCallback):
    """Reports the rounds.

    Args:
        report: receives them.
    """

    def __init__(self, report: Report) -> None:
        self.report, self.number = report, 0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Begin."""
        self.report.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """End a round."""
        self.report.round()
        self.number = central_iteration + 1
        return False, Metrics()


def users(cell: Cell, clock: Clock) -> FederatedDataset:
    """Return every client's data in the order of the round that the clock shows."""

    def dataset(user: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset(
            list(map(torch.from_numpy, cell.data(user, clock.number))), user_id=str(user)
        )

    return FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(cell.clients))))


def main() -> None:
    """Run the cell; the first process reports."""
    cell, folder = asked()
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: TID251  pfl draws from it which process takes a client: all must draw the same
    report = Report(folder)
    clock = Clock(report)
    module = Net(*network().children())
    module.load_state_dict({name: torch.from_numpy(value) for name, value in cell.start.items()})
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = users(cell, clock)
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    FederatedAveraging().run(
        NNAlgorithmParams(cell.rounds, cell.rounds + 1, cell.clients, None),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=cell.batch_size, local_num_epochs=1, local_learning_rate=cell.lr
        ),
        callbacks=[clock],
    )
    if get_framework_module().distributed.global_rank == 0:
        final = {name: value.numpy() for name, value in module.state_dict().items()}
        report.write(final, {name: version(name) for name in ("pfl", "torch")})


if __name__ == "__main__":
    main()
