"""Write docs/reference/wire-messages.md, what nodes of each method send each other; with --check, compare it.

    python scripts/wire.py

Each method runs for three rounds on a tiny population whose sizes are all different, so that each
axis of each tensor is recognized by its length.
"""

import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from _pages import REFERENCE, table, write
from jaxtyping import Int
from torch import Tensor, nn

from coterie.engine.task import LocalTraining
from coterie.exchange.base import COHORT, Inbox, Message, Reply, Rule
from coterie.exchange.in_memory import InMemory
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.methods.registry import resolve_class
from coterie.rng import Rng
from coterie.runtime.loop import Loop
from coterie.runtime.record import Record
from coterie.runtime.task import make_task
from coterie.testing import tiny_federation, tiny_settings

MADE = "<!-- made by scripts/wire.py; do not edit -->\n"
POPULATION, CLASSES, ROUNDS = 8, 5, 3
TYPES = {
    torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.int32: "I32",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "cfl": {"eps1": 10.0, "eps2": 0.0, "warmup_rounds": 1},
    "feddrift": {"every": 2, "most": 3},
    "fedgwc": {"trace": 7},
    "fedrep": {"head_epochs": 1},
    "fesem": {"clusters": 2},
    "ifca": {"clusters": 2},
    "one-shot": {"warmup_rounds": 2},
    "panm-grad": {"num_peers": 3, "num_candidates": 2, "stage_one_rounds": 2, "interval": 1},
    "panm-loss": {"num_peers": 3, "num_candidates": 2, "stage_one_rounds": 2, "interval": 1},
    "pens": {"num_sampled": 3, "num_kept": 1, "num_peers": 2, "stage_one_rounds": 2},
    **{kind: {"endpoints": 3, "regions": 2} for kind in ("sosicfl", "sosicfl-all", "sosicfl-plus")},
    **{kind: {"num_peers": 3} for kind in ("dac", "dac-var", "dac-no-two-hop")},
}
"""Settings for a tiny population, with a different length for each axis."""
VARIANTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("dac", {"two_hop_scope": "history"}, {}),
    ("dac", {"loss_direction": "push"}, {}),
    ("dac", {"similarity": "cos_grad"}, {"init": "per_client"}),
    ("fedprox", {"sampling": "samples"}, {}),
    ("ifca", {"start": "resample", "candidates": 6}, {}),
    ("ifca", {"start": "random_groups", "group_rounds": 2}, {}),
    ("panm-grad", {}, {"init": "per_client"}),
    ("sosicfl", {"assignment": "gradient", "warmup_rounds": 1}, {}),
)
"""Settings that change what is sent: (method, its settings, settings of the run)."""


def network() -> nn.Module:
    """A model of 90 numbers, of which 77 are trained."""
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))


@dataclass(frozen=True)
class Sent:
    """One kind of message.

    Args:
        kind: as in the key of the question.
        exchange: its number.
        tensors: type and shape, by name.
    """

    kind: str
    exchange: int
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class Recorder(InMemory):
    """An exchange of a simulation that numbers and notes messages as nodes do.

    Attributes:
        sent: the rounds in which each kind of message was sent.
    """

    def __init__(self, ids: Int[Tensor, " clients"], population: int) -> None:
        super().__init__(ids, population)
        self.sent: dict[Sent, list[int]] = defaultdict(list)

    def begin_round(self, rng: Rng) -> None:
        """Start a round: exchanges and cohorts are numbered from 0."""
        super().begin_round(rng)
        self._round, self._next, self._groups = rng.round, 0, 0

    def _note(self, kind: str, exchange: int, tensors: Mapping[str, Tensor]) -> None:
        shapes = tuple(
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        )
        self.sent[Sent(kind, exchange, shapes)].append(self._round)

    def _message(self, kind: str, message: Message) -> int:
        number, self._next = self._next, self._next + 1
        extras = {f"field.{name}": value[0] for name, value in message.fields.items()}
        self._note(kind, number, {"params": message.params[0], **extras})
        return number

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Note the message."""
        self._message("model", message)
        return super().pull(message, peers)

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Note the message and the answer to one client."""
        number = self._message("request", message)

        def noted(state: Any, cohort: Message) -> tuple[Any, Reply]:
            state, reply = rule(state, cohort)
            used = torch.unique(reply.index[0])
            extras = {f"field.{name}": value[used] for name, value in reply.fields.items()}
            self._note(
                "reply", number, {"table": reply.table[used], "index": reply.index[0], **extras}
            )
            return state, reply

        return super().ask_server(message, noted, shared)

    def agree_on_cohort(self, compute: Any) -> Int[Tensor, " active"]:
        """Note the cohort; what follows it has numbers of its own."""
        ids = super().agree_on_cohort(compute)
        self._note("cohort", self._groups, {"ids": ids})
        self._groups += 1
        self._next = self._groups * COHORT
        return ids


def sent(method: Method, **settings: Any) -> tuple[dict[Sent, list[int]], dict[int, str]]:
    """Run a method, and return what was sent in which rounds, and what the lengths of axes are called.

    Args:
        method: the method.
        settings: of the run.
    """
    federation = tiny_federation(POPULATION, classes=CLASSES)
    local = LocalTraining(epochs=1, batch_size=12)
    chosen = replace(
        tiny_settings(rounds=ROUNDS, engine="loop"), local=local, dtype="float32", **settings
    )
    with warnings.catch_warnings():
        # settings that are chosen for what is sent, not for its use
        warnings.simplefilter("ignore", UserWarning)
        task = make_task(federation, method, network, chosen)
        recorder = Recorder(task.ids, POPULATION)
        loop = Loop(task, method, recorder, chosen, Rng(0), Record(torch.full((POPULATION,), -1)))
        while not loop.is_finished:
            loop.run_next_round()
    names = {
        item.name: value
        for item in fields(method)  # type: ignore[arg-type]
        if isinstance(value := getattr(method, item.name), int) and not isinstance(value, bool)
    }
    lengths = {value: name for name, value in names.items() if name in AXES}
    if hasattr(method, "candidates") and hasattr(method, "clusters"):
        lengths[names["candidates"] * names["clusters"]] = "candidates · clusters"
    lengths |= {POPULATION: "population", CLASSES: "classes"}
    lengths |= {
        task.sharing.compared.num_columns: "compared",
        task.sharing.shared.num_columns: "params",
    }
    return dict(recorder.sent), lengths


AXES = ("num_peers", "clusters", "candidates", "endpoints", "trace")


MEANINGS = {
    "samples": "how many training samples the client has",
    "similarity": "its similarity to each member, 0 where `known` is false",
    "known": 'which of these it measured itself (with `two_hop_relay = "any"`: or received)',
    "origin": "its first model, in what is compared",
    "update": "the change of its model in the last training, in what is compared",
    "asked": "the members that it asks to measure its model; -1 for none",
    "round": "the round, so that what a member that stopped goes on sending does not count",
    "loss": "the loss of each member's model on its data",
    "given": "for which members it says that",
    "cluster": "its planted cluster",
    "losses": "the losses of its first steps, then NaN",
    "place": "the number of each model at the server",
    "drifted": "1 where its loss rose by more than delta, else 0",
    "model_losses": "the loss of each model that it received, on its training data",
    "label": "the model that it chose, by its number at the server; of each candidate start, where there are several",
    "counts": "how many training samples of each class it has",
    "center": "the center of the client's region in the simplex",
    "radius": "the radius of the region",
}
"""What the extras are."""


def told(one: Sent, lengths: Mapping[int, str]) -> str:
    """Return the tensors of a message in words."""

    def shape(name: str, axes: tuple[int, ...]) -> str:
        if one.kind == "cohort":
            return "active"
        first = (
            ["models", *axes[1:]]
            if one.kind == "reply" and name != "index" and axes[0]
            else list(axes)
        )
        return ", ".join(
            axis if isinstance(axis, str) else lengths.get(axis, str(axis)) for axis in first
        )

    for name, _, _ in one.tensors:
        if name.startswith("field.") and name.removeprefix("field.") not in MEANINGS:
            raise KeyError(f"{name} is sent; say in MEANINGS what it is")
    parts = [f"`{name}` {TYPES[dtype]} [{shape(name, axes)}]" for name, dtype, axes in one.tensors]
    return ", ".join(parts)


def when(rounds: list[int]) -> str:
    """Return the rounds of a message in words."""
    seen = set(rounds)
    every = seen >= set(range(ROUNDS))
    if every:
        return "-1 and each" if -1 in seen else "each"
    return ", ".join(str(number) for number in sorted(seen))


def rows() -> list[tuple[str, ...]]:
    """Return the lines of the table; methods that send the same share theirs."""
    plain = [
        (kind, {}, {})
        for kind, found in sorted(METHODS.items())
        if "pool" not in found.needs and found.exchanges != 0 and not found.sums_groups
    ]
    same: dict[tuple[tuple[str, ...], ...], list[str]] = defaultdict(list)
    for kind, options, settings in sorted([*plain, *VARIANTS], key=lambda one: one[0]):
        cls, values = resolve_class(METHODS[kind], SMALL.get(kind, {}) | options)
        method = cls(**values)
        found, lengths = sent(method, **settings)
        label = " ".join(f"{name}={value}" for name, value in {**options, **settings}.items())
        lines = tuple(
            (when(rounds), one.kind, str(one.exchange), told(one, lengths))
            for one, rounds in sorted(found.items(), key=_order)
        )
        same[lines].append(f"`{kind}`" + (f" with {label}" if label else ""))
    return [
        ("; ".join(who) if number == 0 else "", *line)
        for lines, who in same.items()
        for number, line in enumerate(lines)
    ]


def _order(item: tuple[Sent, list[int]]) -> tuple[Any, ...]:
    one, rounds = item
    base = one.exchange * COHORT - 0.5 if one.kind == "cohort" else one.exchange
    return (min(rounds) >= 0, base, one.kind == "reply", min(rounds))


HEAD = f"""{MADE}# What nodes of each method send

The tensors of each message of [the wire format](wire.md), as nodes of each method send them with its default settings,
and with the settings that change what is sent. `kind` and `x` (the number of the exchange) are as in the key of the question.
Methods without exchanges (`local`, `pooled`) send nothing, and means of groups (`ppdl`) are not sent between machines yet.

Types are those of safetensors, with `dtype = "float32"`; with `dtype = "float64"`, what is F32 here is F64. Lengths of
axes: `params`, the shared numbers of a model ([their order](wire.md#the-order-of-params)); `compared`, the trained ones
of those (or what `similarity_on` chooses of them); `population`, all clients on the roster, removed ones included;
`classes`, of the task; `models`, the models that one client is shown, each once; `active`, the clients of the cohort;
other names are settings of the method. `[]` is a single number. An axis of length `num_peers` is never longer than the
population less one.

Rounds are counted from 0; -1 is before the first. "Each" is each round of the run; lists of rounds are those of a run
of {ROUNDS} rounds with `warmup_rounds = 1`, `group_rounds = 2`. The last cohort of a round, and what follows it, is
everybody fetching the newest model to measure it: in rounds that validate (`validate_every`) and, as the first, in
round -1.

"""


def page() -> str:
    """Return the page."""
    messages = table(("method", "rounds", "kind", "x", "tensors"), rows())
    extras = table(
        ("extra", "of one client or model"),
        [(f"`field.{name}`", text) for name, text in MEANINGS.items()],
    )
    return f"{HEAD}{messages}\n\n{extras}\n".replace("---:", "---")


if __name__ == "__main__":
    sys.exit(write({REFERENCE / "wire-messages.md": page()}))
