"""Task: the model with the data of the clients hosted here. The only place where gradients are taken."""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie import engine as engines
from coterie.engine.base import Objective, cross_entropy, squared_error
from coterie.engine.batches import last_epoch_mean, plan
from coterie.engine.optim import LocalTraining
from coterie.engine.training import Batch, train_block
from coterie.errors import ModelError, require
from coterie.exchange import Inbox
from coterie.federation import SPLITS, Federation
from coterie.models import BUFFER_POLICIES, Layout, ModelSource, initial, source, template
from coterie.rng import EVERYONE, Rng

__all__ = ["LocalTraining", "Task"]

InitMode = Literal["shared", "per_client", "given"]
_CHUNK = 1 << 24  # input entries of one evaluation call: a few hundred MB of activations at most
_GOLDEN = 0x1F123BB5159A55E5  # an odd constant that spreads the keys of successive steps


@dataclass(frozen=True)
class _Positions:
    """Where the samples of one split lie in each client's row, padded with 0."""

    at: Int[Tensor, "clients samples"]
    count: Int[Tensor, " clients"]


@dataclass
class _Shared:
    """What all views of a task have in common: the data, stored once, and what is computed once."""

    federation: Federation
    x: Tensor  # every sample of every client, one after another
    y: Tensor
    positions: dict[str, _Positions]
    mean: Tensor | None
    std: Tensor | None
    origins: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    train_seconds: float = 0.0


def _positions(split: Tensor, wanted: int) -> _Positions:
    chosen = split == wanted
    count = chosen.sum(1)
    order = torch.argsort((~chosen).to(torch.int8), dim=1, stable=True)[:, : max(1, int(count.max()))]
    inside = torch.arange(order.shape[1]) < count[:, None]
    return _Positions(torch.where(inside, order, 0), count)


class Task:
    """A model and the data of the clients hosted here.

    Args:
        federation: the hosted rows, without truth (see `Federation.host`).
        model: a name of `models.NETS`, an nn.Module, or a factory of modules.
        init: "shared": one model drawn for all; "per_client": one drawn for each; "given": the module's own values.
        buffers: what a merge does with running statistics: "average" mixes them like parameters, "local" keeps each
            client's own, "reset" puts back the initial ones.
        engine: "auto", "loop" or "vmap".
        block: how many clients are trained at once; chosen from the size of the model when None. It changes the
            speed, never the result.
        dtype: floating-point type of models and inputs.
        device: where models and data live.
        objective: (outputs, targets) -> one loss a sample; cross-entropy for classes and squared error else.
        clusters: planted cluster of each hosted client, for methods that declare the need.

    Attributes:
        ids: the hosted clients, in the order of all rows.
        samples: training samples of each, as floats: the $n_i$ of the papers.
        layout: how the model's tensors lie in a row.
    """

    def __init__(
        self,
        federation: Federation,
        model: ModelSource,
        *,
        init: InitMode = "shared",
        buffers: str = "average",
        engine: str = "auto",
        block: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        objective: Objective | None = None,
        clusters: Int[Tensor, " clients"] | None = None,
    ) -> None:
        require(init in ("shared", "per_client", "given"), "init", init, "'shared', 'per_client' or 'given'")
        require(buffers in BUFFER_POLICIES, "buffers", buffers, f"one of {', '.join(BUFFER_POLICIES)}")
        require(block is None or block >= 1, "block", block, "at least 1")
        federation.validate()
        self.model = source(model, federation.features, federation.outputs)
        module = template(self.model)
        self.layout = Layout(module, dtype)
        self.init_mode, self.buffers, self.device, self.dtype = init, buffers, device, dtype
        self.ids, self.population, self.classes = federation.ids, federation.population, federation.classes
        self.clusters = clusters
        positions = {name: _positions(federation.split, number) for name, number in SPLITS.items()}
        self._shared = _Shared(
            federation,
            federation.x.reshape(-1, *federation.features).to(device),
            federation.y.reshape(-1, *federation.y.shape[2:]).to(device),
            positions,
            _per_channel(federation.mean, federation.features, dtype, device),
            _per_channel(federation.std, federation.features, dtype, device),
        )
        self._at = torch.arange(len(federation))
        self.samples = positions["train"].count.to(dtype)
        objective = objective or (cross_entropy if self.classes else squared_error)
        probe = torch.arange(2) % max(1, len(self._shared.x))
        self.engine = engines.make(engine, self.layout, objective, self._prepare(probe), self._targets(probe))
        self._check_outputs(self.engine, probe)
        self.block = block or (1 if self.engine.name == "loop" else engines.default_block(self.layout, device))

    def __len__(self) -> int:
        return len(self.ids)

    def _check_outputs(self, engine: engines.Engine, probe: Tensor) -> None:
        rows = self.layout.flatten_copy(self.layout.train_module)[None]
        outputs = engine.forward(rows, self._prepare(probe)[None], self.layout.zero_inputs(1))
        if self.classes and outputs.shape[-1] < self.classes:
            raise ModelError(f"the module has {outputs.shape[-1]} outputs; expected {self.classes}, one a class")

    @property
    def train_seconds(self) -> float:
        """Seconds spent in `train` so far, all views of this task together."""
        return self._shared.train_seconds

    def counts(self, split: str) -> Int[Tensor, " clients"]:
        """Return how many samples each hosted client has in a split."""
        return self._shared.positions[split].count[self._at]

    def rows(self, rows: Int[Tensor, " rows"]) -> "Task":
        """Return a view of some of the hosted clients; the data are not copied."""
        part = copy.copy(self)
        part._at = self._at[rows]
        part.ids, part.samples = self.ids[rows], self.samples[rows]
        part.clusters = None if self.clusters is None else self.clusters[rows]
        return part

    # ------------------------------------------------------------------ models

    def init(self, rng: Rng) -> Float[Tensor, "clients params"]:
        """Return the first model of each hosted client: $w^0$, whatever round `rng` is in."""
        return self.origin(rng)

    def origin(self, rng: Rng) -> Float[Tensor, "clients params"]:
        """Return the first models again; with a shared start, a view of one row."""
        key = (rng.seed, self.init_mode)
        if self.init_mode != "per_client":
            if key not in self._shared.origins:
                self._shared.origins[key] = self._draw(rng.at(-1), EVERYONE)
            return self._shared.origins[key].expand(len(self), -1)
        return torch.stack([self._draw(rng.at(-1), client) for client in self.ids.tolist()])

    def _draw(self, rng: Rng, client: int) -> Tensor:
        if self.init_mode == "given":
            return self.layout.flatten_copy(self.layout.train_module).to(self.device)
        return initial(self.model, self.layout, rng, client).to(self.device)

    def settle(
        self, before: Float[Tensor, "clients params"], merged: Float[Tensor, "clients params"]
    ) -> Float[Tensor, "clients params"]:
        """Apply the policy for running statistics to a merge that led from `before` to `merged`."""
        start = self.layout.trainable
        if self.buffers == "average" or start == self.layout.size:
            return merged
        own = before[:, start:]
        if self.buffers == "reset":
            own = self.layout.flatten_copy(self.layout.train_module)[start:].to(merged).expand(len(merged), -1)
        return torch.cat([merged[:, :start], own], dim=1)

    # ------------------------------------------------------------------ data

    def _prepare(self, flat: Int[Tensor, "..."]) -> Tensor:
        """Return samples as the model takes them: floats, images scaled and normalised."""
        x = self._shared.x[flat.to(self._shared.x.device)]
        return self._normalise(x)

    def _normalise(self, x: Tensor) -> Tensor:
        if x.dtype != torch.uint8:
            return x.to(self.dtype)
        x = x.to(self.dtype).div_(255)
        if self._shared.mean is not None and self._shared.std is not None:
            x = x.sub_(self._shared.mean).div_(self._shared.std)
        return x

    def _targets(self, flat: Int[Tensor, "..."]) -> Tensor:
        y = self._shared.y[flat.to(self._shared.y.device)]
        return y.to(torch.int64) if self.classes else y.to(self.dtype)

    def _flat(self, clients: Tensor, places: Tensor, split: str) -> Tensor:
        """Return where the samples at `places` of a split of some hosted clients lie among all samples."""
        rows = self._at[clients]
        width = self._shared.federation.split.shape[1]
        places = self._shared.positions[split].at[rows].gather(1, places.clamp(min=0))
        return rows[:, None] * width + places

    # ------------------------------------------------------------------ training

    def train(
        self,
        params: Float[Tensor, "clients params"],
        rng: Rng,
        local: LocalTraining,
        *,
        anchor: Float[Tensor, "clients params"] | None = None,
        prox: float = 0.0,
        inputs: Mapping[str, Shaped[Tensor, "clients steps *shape"]] | None = None,
        purpose: str = "batches",
    ) -> tuple[Float[Tensor, "clients params"], dict[str, Tensor]]:
        r"""Train every hosted client on its own training data, with a fresh optimiser.

        Args:
            params: where each client starts; not changed.
            rng: the streams of the round.
            local: epochs, batches, optimiser.
            anchor: models to stay near; needed when `prox` is not 0.
            prox: weight $\mu$ of the penalty $\frac{\mu}{2} \lVert w - anchor \rVert^2$ on trained parameters.
            inputs: values of the layout's input buffers in every step.
            purpose: names the stream of batch orders; a second training in one round takes another name.

        Returns:
            The new models, and a report: `loss` (mean batch loss of the last epoch), `losses` (of each step, before
            its update; NaN after a client's last step), `train_samples` (processed), `diverged` (a loss or a
            parameter is not finite).
        """
        if inputs is not None and (unknown := set(inputs) - set(self.layout.inputs)):
            known = list(self.layout.inputs)
            raise ModelError(f"the module has no input buffer {sorted(unknown)[0]!r}; it has {known}")
        started = time.perf_counter()
        schedule = plan(local, self.counts("train"), self.ids, rng, purpose)
        keys = rng.keys(f"{purpose}.dropout", self.ids) if self.layout.keys else None
        out = params.detach().clone()
        losses = torch.full((len(self), schedule.steps), torch.nan, dtype=self.dtype)
        for start in range(0, len(self), self.block):
            rows = slice(start, min(start + self.block, len(self)))

            def batch(members: Tensor, step: int, size: int, start: int = start) -> Batch:
                members = members + start
                flat = self._flat(members, schedule.order[members, step, :size], "train")
                values = {name: value[members, step] for name, value in (inputs or {}).items()}
                if keys is not None:
                    values |= dict.fromkeys(self.layout.keys, (keys[members] + step * _GOLDEN).to(self.device))
                return self._prepare(flat), self._targets(flat), values

            near = None if anchor is None or not prox else (anchor[rows], prox)
            job = partial(train_block, self.engine, out[rows], schedule.length[rows], local, batch, near)
            if self.engine.name == "loop":  # foreign modules may draw from PyTorch's own generator
                with rng.torch_globals(f"{purpose}.torch", int(self.ids[start])):
                    losses[rows] = job()
            else:
                losses[rows] = job()
        taken = schedule.length > 0
        info = {
            "loss": last_epoch_mean(losses, schedule),
            "losses": losses,
            "train_samples": schedule.length.sum(1),
            "diverged": ~torch.isfinite(out).all(1).cpu()
            | torch.isinf(losses).any(1)
            | (losses.isnan() & taken).any(1),
        }
        self._shared.train_seconds += time.perf_counter() - started
        return out, info

    # ------------------------------------------------------------------ evaluation

    def loss(
        self, params: Float[Tensor, "clients params"], split: str, inputs: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, " clients"]:
        """Return the mean loss of each client's model on its own data; NaN for a client without such data."""
        return self.measure(params, split, inputs)["loss"]

    def measure(
        self, params: Float[Tensor, "clients params"], split: str, inputs: Mapping[str, Tensor] | None = None
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return loss and (for classes) accuracy of each client's model on its own data. No random draw is made."""
        return self._measure(params, torch.arange(len(self)), torch.arange(len(self)), split, inputs)

    def loss_table(
        self, table: Float[Tensor, "clusters params"], split: str, inputs: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "clients clusters"]:
        """Return the mean loss of each model of a table on each client's own data."""
        models = torch.arange(len(table)).repeat(len(self))
        clients = torch.arange(len(self)).repeat_interleave(len(table))
        return self._measure(table, models, clients, split, inputs)["loss"].reshape(len(self), len(table))

    def score(self, inbox: Inbox, split: str = "train") -> Float[Tensor, "clients peers"]:
        """Return the mean loss of each received model on the receiver's own data; +inf where nothing came."""
        out = torch.full(inbox.mask.shape, torch.inf, dtype=self.dtype, device=self.device)
        clients, slots = inbox.mask.nonzero(as_tuple=True)
        if len(clients):
            out[clients, slots] = self._measure(inbox.table, inbox.index[clients, slots], clients, split)["loss"]
        return out

    def _measure(
        self,
        table: Tensor,
        models: Int[Tensor, " pairs"],
        clients: Int[Tensor, " pairs"],
        split: str,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Float[Tensor, " pairs"]]:
        """Measure pairs of (row of the table, hosted client) on the client's own data."""
        where = self._shared.positions[split]
        width = where.at.shape[1]
        extra = dict(inputs) if inputs is not None else self.layout.zero_inputs(len(table))
        out: dict[str, list[Tensor]] = {"loss": [], **({"accuracy": []} if self.classes else {})}
        features = max(1, self._shared.x[0].numel())
        step = max(1, min(self.block if self.engine.name != "loop" else 64, _CHUNK // (width * features)))
        for start in range(0, len(models), step):
            model, client = models[start : start + step], clients[start : start + step]
            flat = self._flat(client, torch.arange(width).expand(len(client), width), split)
            outputs = self.engine.forward(table[model], self._prepare(flat), {k: v[model] for k, v in extra.items()})
            inside = torch.arange(width) < where.count[self._at[client]][:, None]
            for name, value in self._values(outputs, self._targets(flat)).items():
                total = torch.where(inside.to(value.device), value, 0).sum(1)
                out[name].append(total / where.count[self._at[client]].to(value))
        empty = torch.zeros(0, dtype=self.dtype)
        return {name: torch.cat(parts) if parts else empty for name, parts in out.items()}

    def _values(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return loss and correctness of every sample: [pairs, samples]."""
        pairs, samples = targets.shape[:2]
        flat_targets = targets.reshape(pairs * samples, *targets.shape[2:])
        losses = self.engine.objective(outputs.reshape(pairs * samples, *outputs.shape[2:]), flat_targets)
        values = {"loss": losses.reshape(pairs, samples)}
        if self.classes:
            values["accuracy"] = (outputs.argmax(-1) == targets).to(self.dtype)
        return values

    def evaluate(
        self, params: Float[Tensor, "clients params"], inputs: Mapping[str, Tensor] | None = None
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return each client's metrics on the test set that serves it.

        "loss", and "accuracy" for classes; for regression "mse", the mean squared error. No random draw is made.
        """
        federation = self._shared.federation
        names = ["loss", "accuracy"] if self.classes else ["loss", "mse"]
        out = {name: torch.full((len(self),), torch.nan, dtype=self.dtype) for name in names}
        serves = federation.test_of[self._at]
        for number, test in enumerate(federation.tests):
            rows = (serves == number).nonzero().flatten()
            for part in rows.split(max(1, self.block)):
                for name, value in self.outputs_on(params, part, test.x, test.y, inputs).items():
                    out[name][part] = value.cpu()
        return out

    def outputs_on(
        self, params: Tensor, part: Tensor, x: Tensor, y: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the mean of each metric of some hosted clients' models on one set of samples."""
        extra = dict(inputs) if inputs is not None else self.layout.zero_inputs(len(self))
        totals: dict[str, Tensor] = {}
        step = max(1, min(len(x), (_CHUNK // max(1, x[0].numel())) // max(1, len(part))))
        for start in range(0, len(x), step):
            batch = self._normalise(x[start : start + step].to(self.device))
            target = y[start : start + step].to(self.device)
            target = target.to(torch.int64) if self.classes else target.to(self.dtype)
            outputs = self.engine.forward(params[part], batch[None], {k: v[part] for k, v in extra.items()})
            values = self._values(outputs, target.expand(len(part), *target.shape))
            if not self.classes:
                values["mse"] = self._squared(outputs, target.expand(len(part), *target.shape))
            for name, value in values.items():
                totals[name] = totals.get(name, 0) + value.sum(1)
        return {name: total / len(x) for name, total in totals.items()}

    @staticmethod
    def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
        error = (outputs.reshape(targets.shape) - targets).square()
        return error.reshape(*error.shape[:2], -1).mean(2)


def _per_channel(
    values: tuple[float, ...], features: tuple[int, ...], dtype: torch.dtype, device: str
) -> Tensor | None:
    if not values:
        return None
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, *(1 for _ in features[1:]))
