"""The cell through Flower's simulation: Ray, one actor a core, its FedAvg.

`run_simulation` is the engine behind `flwr run`, started from Python.
"""

from importlib.metadata import version

import torch
from cell import Cell, Report, asked
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from usual import epoch, network


def client(cell: Cell) -> ClientApp:
    """Return what a client does."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        number = int(context.node_config["partition-id"])
        x, y = map(
            torch.from_numpy, cell.data(number, int(message.content["config"]["server-round"]) - 1)
        )
        module = network()
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        epoch(module, x, y, cell.batch_size, cell.lr)
        content = {
            "arrays": ArrayRecord(module.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def main() -> None:
    """Run the cell and report."""
    cell, folder = asked()
    report = Report(folder)
    final: dict[str, torch.Tensor] = {}
    server = ServerApp()

    @server.main()
    def lead(grid: Grid, context: Context) -> None:
        def after(number: int, arrays: ArrayRecord) -> None:
            report.round() if number else report.begin()

        strategy = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=cell.clients, min_available_nodes=cell.clients
        )
        first = ArrayRecord({name: torch.from_numpy(value) for name, value in cell.start.items()})
        result = strategy.start(grid, first, num_rounds=cell.rounds, evaluate_fn=after)
        final.update(result.arrays.to_torch_state_dict())

    resources = {
        "init_args": {"num_cpus": cell.cores},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, client(cell), cell.clients, backend_config=resources)
    versions = {name: version(name) for name in ("flwr", "ray", "torch")}
    report.write({name: value.numpy() for name, value in final.items()}, versions)


if __name__ == "__main__":
    main()
