"""The cell through FedJAX: its FedAvg with the backend that is named, "jit" (one device, XLA's threads) or "pmap".

With "pmap" each core is a device of XLA and trains one client at a time. Inputs and kernels have
their channels last, which XLA prefers on a processor.
"""

import os
import sys
from importlib.metadata import version

import numpy as np
from cell import Cell, Report, asked

BACKEND = sys.argv[3]
if BACKEND == "pmap":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={asked()[0].cores}"

import fedjax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

KERNEL = (2, 3, 1, 0)  # (out, in, height, width) to (height, width, in, out)


def to_jax(model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return PyTorch's tensors as this script's: kernels with channels last, matrices applied from the right."""
    return {
        name: value.transpose(KERNEL) if value.ndim == 4 else value.T
        for name, value in model.items()
    }


def to_torch(model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Invert `to_jax`."""
    back = np.argsort(KERNEL)
    return {
        name: value.transpose(back) if value.ndim == 4 else value.T for name, value in model.items()
    }


def forward(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return net A's outputs."""
    for name in ("0", "3"):
        x = jax.lax.conv_general_dilated(
            x, model[f"{name}.weight"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + model[f"{name}.bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    for name in ("7", "9", "11"):
        x = x @ model[f"{name}.weight"] + model[f"{name}.bias"]
        x = x if name == "11" else jax.nn.relu(x)
    return x


def loss(model: dict[str, jax.Array], batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
    """Return the mean loss of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(
        forward(model, batch["x"]), batch["y"]
    ).mean()


def main() -> None:
    """Run the cell and report."""
    cell, folder = asked()
    report = Report(folder)
    fedjax.set_for_each_client_backend(BACKEND)
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(cell.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(cell.batch_size, num_epochs=1, skip_shuffle=True),
    )
    state = algorithm.init(jax.tree_util.tree_map(jnp.asarray, to_jax(cell.start)))
    inputs = np.ascontiguousarray(np.moveaxis(cell.x, 2, -1))
    keys = jax.random.split(jax.random.PRNGKey(0), cell.clients)
    report.begin()
    for number in range(cell.rounds):
        state, _ = algorithm.apply(state, clients(cell, inputs, number, keys))
        jax.block_until_ready(state.params)
        report.round()
    final = to_torch({name: np.asarray(value) for name, value in state.params.items()})
    report.write(final, {name: version(name) for name in ("fedjax", "jax", "jaxlib")})


def clients(cell: Cell, inputs: np.ndarray, number: int, keys: jax.Array) -> list:
    """Return every client's data in the order of a round."""
    out = []
    for client in range(cell.clients):
        order = cell.order[number, client]
        data = fedjax.ClientDataset({"x": inputs[client][order], "y": cell.y[client][order]})
        out.append((client, data, keys[client]))
    return out


if __name__ == "__main__":
    main()
