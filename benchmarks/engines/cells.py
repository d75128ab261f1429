"""The cells of the benchmark: one piece of a round, done by an engine and by the usual loop on the same inputs."""

import copy
import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks._measured import flops
from coterie.data.federation import Federation
from coterie.engine._batches import draw_batches
from coterie.engine._choice import count_products
from coterie.engine.task import LocalTraining
from coterie.errors import CoterieError
from coterie.exchange.base import Inbox, Message, make_inbox
from coterie.exchange.in_memory import InMemory
from coterie.methods.base import Round, State
from coterie.methods.dac import Dac
from coterie.models.layout import NETS
from coterie.rng import Rng
from coterie.testing.tiny import build_task

from .usual import UsualClient

SHAPES = {"cnn-a": (3, 32, 32), "cnn-b": (1, 28, 28), "mlp": (1, 28, 28)}
WORKS = ("train", "inverse-loss", "mix", "dac-round")
CLASSES, PEERS, CHECKED = 10, 5, 8
_TOLERANCE = {"train": 2e-3, "inverse-loss": 1e-4, "mix": 1e-5, "dac-round": 2e-3}


class DifferentResultsError(CoterieError, RuntimeError):
    """The two sides of a cell do not compute the same: nothing is reported."""


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Args:
        net: the network; its input shape is in SHAPES.
        clients: the population.
        samples: training samples a client.
        work: a name of WORKS.
    """

    net: str
    clients: int
    samples: int
    work: str


def network(net: str) -> nn.Module:
    """Return a network of the benchmark; "mlp" has 512 hidden units and no dropout, whose draws would differ."""
    if net in NETS:
        return NETS[net](SHAPES[net], CLASSES)
    entries = math.prod(SHAPES[net])
    return nn.Sequential(nn.Flatten(), nn.Linear(entries, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def federation(cell: Cell) -> Federation:
    """Return random images of the network's shape, with random classes."""
    stream = Rng(0).generator(f"bench.{cell.net}.{cell.clients}.{cell.samples}")
    shape = (cell.clients, cell.samples, *SHAPES[cell.net])
    channels = SHAPES[cell.net][0]
    ids = torch.arange(cell.clients)
    return Federation(
        x=torch.from_numpy(stream.integers(0, 256, shape, dtype="uint8")),
        y=torch.from_numpy(stream.integers(0, CLASSES, shape[:2])),
        split=torch.zeros(shape[:2], dtype=torch.int64),
        tests=(),
        test_of=torch.zeros_like(ids),
        ids=ids,
        population=cell.clients,
        classes=CLASSES,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )


class Everyone(InMemory):
    """An exchange in which everybody's model can be read and the peers are given, so that both sides read the same.

    Args:
        params: the model of each client.
        peers: the clients that each acting client reads.
    """

    def __init__(
        self, params: Float[Tensor, "clients params"], peers: Int[Tensor, "acting peers"]
    ) -> None:
        super().__init__(torch.arange(len(params)), len(params))
        self.params, self.peers = params, peers

    def pull(self, message: Message, peers: Int[Tensor, "acting peers"]) -> Inbox:
        """Read the given peers; all say that they have as many samples as the first."""
        fields = {
            name: value[:1].expand(len(self.ids), *value.shape[1:])
            for name, value in message.fields.items()
        }
        return make_inbox(
            Message(self.params, fields, self.ids),
            self.ids[: len(peers)],
            self.peers,
            self.population,
        )


class Coterie:
    """The work as an engine does it, for some or all clients of a population.

    Args:
        cell: what to do.
        engine: which engine.
        limit: at most how many clients act; the others can be read.
    """

    def __init__(self, cell: Cell, engine: str, limit: int | None = None) -> None:
        self.cell, self.local, self.rng = cell, LocalTraining(), Rng(1).at_round(0)
        everybody = build_task(
            federation(cell), partial(network, cell.net), engine=engine, init="per_client"
        )
        if everybody.engine.name != engine:
            raise CoterieError(
                f"the {engine} engine cannot run {cell.net} here; {everybody.engine.name} would"
            )
        self.task = everybody.select_clients(torch.arange(min(limit or cell.clients, cell.clients)))
        self.params = everybody.initial_models(Rng(1))
        self.method = Dac(num_peers=min(PEERS, cell.clients - 1), two_hop=False)
        self.state = State(
            self.params[: len(self.task)], self.method.init_memory(self.task, Rng(1))
        )
        draws = Rng(1).uniform("bench.peers", self.task.ids, cell.clients)
        draws[torch.arange(len(self.task)), self.task.ids] = 2.0  # nobody reads itself
        self.peers = draws.argsort(1)[:, : self.method.num_peers]
        self.exchange = Everyone(self.params, self.peers)
        self.inbox = self.exchange.pull(Message(self.state.params, {}), self.peers)

    def run(self) -> Float[Tensor, "clients values"]:
        """Do the work once; return what the usual loop must find too."""
        return getattr(self, self.cell.work.replace("-", "_"))()

    def train(self) -> Tensor:
        """Train every acting client for one epoch; return the losses of the first steps."""
        _, info, _ = self.task.train(self.state.params, self.rng, self.local)
        return info["losses"][:, :CHECKED]

    def inverse_loss(self) -> Tensor:
        """Measure the models of the peers on each client's training data."""
        return self.task.score(self.inbox)

    def mix(self) -> Tensor:
        """Average with the peers; return some of the parameters."""
        share = 1 / (self.peers.shape[1] + 1)
        weights = torch.full(self.peers.shape, share)
        mixed = self.inbox.mix(weights, own=self.state.params, own_weight=weights[:, 0])
        return mixed[:, :: max(1, mixed.shape[1] // 100)]

    def dac_round(self) -> Tensor:
        """Run one round of DAC: draw, read, measure, average, train; return the losses of the first steps."""
        reachable = torch.ones(self.cell.clients, dtype=torch.bool)
        _, info = self.method.round(
            Round(0, self.task, self.exchange, self.rng, reachable, self.local), self.state
        )
        return info["losses"][:, :CHECKED]

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products of one client's share of the work."""
        x = torch.zeros(1, *SHAPES[self.cell.net])
        training = float(
            flops(network(self.cell.net), x, torch.zeros(1, dtype=torch.int64)) * self.cell.samples
        )
        peers = self.peers.shape[1]
        scoring = 2.0 * count_products(self.task.layout, x) * self.cell.samples * peers
        return {"train": training, "inverse-loss": scoring, "dac-round": training + scoring}.get(
            self.cell.work, 2.0 * (peers + 1) * self.task.layout.size
        )


class Usual:
    """The same work as research code does it, for the first few clients.

    Args:
        other: the engine's side, which fixes the models, the batches and the peers.
        clients: how many clients act; each costs the same.
    """

    def __init__(self, other: Coterie, clients: int) -> None:
        task = other.task.select_clients(torch.arange(min(clients, len(other.task))))
        self.cell, self.task, self.lr = other.cell, task, other.local.lr
        schedule = draw_batches(
            other.local, task.count_samples("train"), task.ids, other.rng, "batches"
        )
        self.batches = [
            [
                order[:size].tolist()
                for order, size in zip(orders, sizes.tolist(), strict=True)
                if size
            ]
            for orders, sizes in zip(schedule.sample_order, schedule.batch_sizes, strict=True)
        ]
        layout = task.layout
        data = federation(self.cell)
        x = data.x[: len(task)].to(torch.float32).div(255).sub(0.5).div(0.25)

        def module(row: int) -> nn.Module:
            new = network(self.cell.net)
            with torch.no_grad():
                for tensor, value in zip(
                    new.parameters(), layout.split_rows(other.params[row]).values(), strict=True
                ):
                    tensor.copy_(value)
            return new

        needed = sorted({*range(len(task)), *other.peers[: len(task)].flatten().tolist()})
        self.start = {row: module(row) for row in needed}
        self.peers = [[self.start[j] for j in row] for row in other.peers[: len(task)].tolist()]
        self.clients = [
            UsualClient(copy.deepcopy(self.start[i]), x[i], data.y[i]) for i in range(len(task))
        ]

    def reset(self) -> None:
        """Give every client its first model again."""
        for i, client in enumerate(self.clients):
            client.module.load_state_dict(self.start[i].state_dict())

    def run(self) -> Float[Tensor, "clients values"]:
        """Do the work once for each client."""
        return torch.stack([self._one(i, client) for i, client in enumerate(self.clients)])

    def _one(self, i: int, client: UsualClient) -> Tensor:
        work, peers = self.cell.work, self.peers[i]
        equal = 1 / (len(peers) + 1)
        if work in ("inverse-loss", "dac-round"):
            scores = client.score(peers)
            if work == "inverse-loss":
                return torch.tensor(scores)
        if work in ("mix", "dac-round"):
            client.mix(peers, [equal] * len(peers), equal)
            if work == "mix":
                flat = torch.cat([p.detach().flatten() for p in client.module.parameters()])
                return flat[:: max(1, len(flat) // 100)]
        return torch.tensor(client.train(self.batches[i], self.lr)[:CHECKED])


def compare(
    ours: Float[Tensor, "clients values"], theirs: Float[Tensor, "few values"], work: str
) -> None:
    """Check that both sides computed the same.

    Raises:
        DifferentResultsError: when they did not.
    """
    ours = ours[: len(theirs)].to(torch.float32)
    worst = float(((ours - theirs).abs() / theirs.abs().clamp(min=1e-2)).max())
    if not worst < _TOLERANCE[work]:
        found, expected = f"{worst:.1e}", f"{_TOLERANCE[work]:.0e}"
        raise DifferentResultsError(
            f"{work}: the two sides differ by {found}; expected at most {expected}"
        )
