"""Attacks: an exchange in which some clients publish changed models, for experiments and tests.

It simulates members that are hostile, broken or idle. They train and read as the method does; only
their outgoing messages are changed. "label-flip" changes their training data instead, see
`simulation.attackers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import MinLen
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.importing import import_function
from coterie._util.mappings import prefix_keys
from coterie._util.settings import Configurable, CustomFunction, PositiveFloat
from coterie.errors import ConfigError, describe_unknown, require
from coterie.exchange.base import SAMPLES, Exchange, ExchangeWrapper, Inbox, Message, Rule
from coterie.rng import Rng

LABEL_FLIP, COPY, LITTLE = "label-flip", "copy", "a-little-is-enough"
# Factors: of the model (sign-flip, scale), of its root mean square (noise), of the honest models'
# deviation (a-little-is-enough).
STRENGTHS = {"sign-flip": 5.0, "noise": 3.0, "scale": 10.0, LITTLE: 1.5}
"""The strength of each kind that has one, where none is given."""
KINDS = (*STRENGTHS, LABEL_FLIP, COPY)


@dataclass(frozen=True)
class Attack(Configurable):
    """An attack by some clients.

    Args:
        kind: "sign-flip", -`strength` times the own model; "scale", `strength` times; "noise", the
            own model and in each number a normal draw of deviation `strength` times the root mean
            square of its numbers; "a-little-is-enough" (Baruch et al., 2019,
            https://arxiv.org/abs/1902.06156), in each number the mean of the honest models of the
            exchange less `strength` deviations over them; "label-flip", an honest model of training
            data in which class c of C is C - 1 - c; "copy", a free rider: the model that arrived in
            its last exchange from the peer of the lowest number, and its first model until one
            arrived. Or the import path of a custom function, (AttackContext) -> models.
        clients: the attackers: a share of all below 1, a count from 1 on, or a list of names or
            numbers. Several attacks draw one after another, each among the clients still honest.
        strength: 5 for "sign-flip", 3 for "noise", 10 for "scale", 1.5 for "a-little-is-enough"
            when None.
        samples: the number of training samples that they claim; their own when None.
    """

    kind: str | CustomFunction
    clients: PositiveFloat | Annotated[Sequence[int | str], MinLen(1)]
    strength: PositiveFloat | None = None
    samples: PositiveFloat | None = None

    def check(self) -> None:
        """Validate the kind, and that a strength is given only for kinds that have one."""
        if ":" not in str(self.kind) and self.kind not in KINDS:
            known = describe_unknown("kind", str(self.kind), KINDS)
            raise ConfigError(f"{known}, or an import path (package.module:name)")
        fits = self.strength is None or self.kind not in (LABEL_FLIP, COPY)
        require(fits, "strength", self.strength, f"none for {self.kind!r}")

    def load_function(self) -> Any:
        """Return the function of a custom attack; None for the kinds that are built in.

        Raises:
            ConfigError: when there is none, or it cannot be called with an `AttackContext`.
        """
        if str(self.kind) in KINDS:
            return None
        return import_function(str(self.kind), f"attack {self.kind!r}", ("context",))

    @property
    def needs_honest_models(self) -> bool:
        """Whether the attack depends on the models that honest clients publish."""
        return str(self.kind) not in KINDS or self.kind == LITTLE

    @property
    def effective_strength(self) -> float:
        """The strength, given or not."""
        if self.strength is not None:
            return self.strength
        return STRENGTHS.get(str(self.kind), 1.0)


@dataclass(frozen=True)
class AttackContext:
    """What a custom attack gets.

    Args:
        models: the models that the attackers would publish if they were honest.
        honest: the models that the honest clients publish in the same exchange.
        round: its number; -1 for the warm-up.
        ids: of the attackers.
        strength: of the attack; 1 when not given.
        rng: the streams of the round: `rng.generator("my purpose", client)`.
    """

    models: Float[Tensor, "attackers params"]
    honest: Float[Tensor, "honest params"]
    round: int
    ids: Int[Tensor, " attackers"]
    strength: float
    rng: Rng


class AttackingExchange(ExchangeWrapper[Exchange]):
    """A wrapper of another exchange of all clients, in which some attack.

    Args:
        inner: the exchange underneath.
        groups: the attacks, each with the ids of its clients, ascending.
        first: the shared part of the first model of each client hosted here, for "copy".
        population: number of clients.
        ids: the clients hosted here; all when None.
    """

    def __init__(
        self,
        inner: Exchange,
        groups: Sequence[tuple[Attack, Int[Tensor, " attackers"]]],
        first: Float[Tensor, "clients params"],
        population: int,
        ids: Int[Tensor, " clients"] | None = None,
    ) -> None:
        self.inner, self.groups, self.population = inner, list(groups), population
        self.attackers: Bool[Tensor, " population"] = torch.zeros(population, dtype=torch.bool)
        for _, members in self.groups:
            self.attackers[members] = True
        copying = set()
        for attack, members in self.groups:
            if attack.kind == COPY:
                copying |= set(members.tolist())
        if ids is None:
            ids = torch.arange(population)
        self._copied = {}
        for row, client in enumerate(ids.tolist()):
            if client in copying:
                # An attacker that has read nothing yet publishes its first model.
                self._copied[client] = first[row].clone()
        self._rng, self._number, self._active = Rng(0), 0, torch.arange(population)

    def begin_round(self, rng: Rng) -> None:
        """Start a round."""
        self._rng, self._number = rng, 0
        self.inner.begin_round(rng)

    def set_active(self, ids: Int[Tensor, " active"]) -> None:
        """Set the clients that take part in this round."""
        self._active = ids
        self.inner.set_active(ids)

    def pull(self, message: Message, peers: Int[Tensor, "clients peers"]) -> Inbox:
        """Publish, with the attackers' models replaced, and read."""
        inbox = self.inner.pull(self._attack_message(message), peers)
        if message.params.shape[1]:
            for row, client in enumerate(self._active.tolist()):
                arrived = inbox.mask[row].nonzero().flatten()
                if client in self._copied and len(arrived):
                    # The copied model does not depend on the order of slots.
                    lowest = arrived[inbox.peers[row, arrived].argmin()]
                    self._copied[client] = inbox.table[inbox.index[row, lowest]].clone()
        return inbox

    def ask_server(self, message: Message, rule: Rule, shared: Any) -> tuple[Any, Inbox]:
        """Send to the server, with the attackers' models replaced."""
        return self.inner.ask_server(self._attack_message(message), rule, shared)

    def skip_round(self, exchanges: int) -> None:
        """Pass a round without clients of this process.

        Other processes still gather the models that attacks look at, and wait for this one's.
        """
        if not self._needs_gather:
            return self.inner.skip_round(exchanges)
        # `gather` is collective: without this process the others would wait.
        for _ in range(exchanges):
            self._gather_published(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
            self.inner.skip_round(1)
        return None

    def retire_clients(
        self, ids: Int[Tensor, " stopped"], params: Float[Tensor, "stopped params"]
    ) -> None:
        """Make stopped clients keep publishing; an attacker keeps its replaced model of now."""
        self.inner.retire_clients(ids, self._replace_models(params, ids))

    def _attack_message(self, message: Message) -> Message:
        number, self._number = self._number, self._number + 1
        fields = dict(message.fields)
        if SAMPLES in fields:
            fields[SAMPLES] = fields[SAMPLES].clone()
            for attack, ids in self.groups:
                if attack.samples is not None:
                    fields[SAMPLES][torch.isin(self._active, ids)] = attack.samples
        models = self._replace_models(
            message.params,
            self._active,
            number,
            self._gather_published(message.params, self._active),
        )
        return replace(message, params=models, fields=fields)

    @property
    def _needs_gather(self) -> bool:
        """Whether an attack depends on models that other processes host."""
        # To gather means that all processes wait for each other: only for attacks that need it.
        needs = any(attack.needs_honest_models for attack, _ in self.groups)
        return self.gather is not None and needs

    def _gather_published(self, params: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return all published models and their clients' ids, if an attack needs them.

        Otherwise only the models of this process.
        """
        if self.gather is None or not self._needs_gather:
            return params, ids
        # `gather` takes floats; float64 holds every id exactly.
        return self.gather(params), self.gather(ids[:, None].double()).flatten().long()

    def _replace_models(
        self,
        params: Tensor,
        ids: Tensor,
        number: int = 0,
        everybody: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return models with the attackers' replaced; a message without models stays as it is."""
        out = params.clone()
        if not params.shape[1]:
            return out
        for attack, members in self.groups:
            known, whose = params, ids
            if everybody is not None and attack.needs_honest_models:
                known, whose = everybody
            rows = torch.isin(whose, members).nonzero().flatten()
            if len(rows):
                honest = known[~self.attackers[whose].to(known.device)]
                made = self._make_models(attack, known[rows], honest, whose[rows], number).to(out)
                # Both sides are in the order of ids. Only the attackers that this process hosts are
                # written.
                out[torch.isin(ids, members)] = made[torch.isin(whose[rows], ids)]
        return out

    def _make_models(
        self, attack: Attack, own: Tensor, honest: Tensor, ids: Tensor, number: int
    ) -> Tensor:
        kind, power = str(attack.kind), attack.effective_strength
        # The attackers train on exchanged labels; what they publish is that model.
        if kind == LABEL_FLIP:
            return own
        if kind == COPY:
            return torch.stack([self._copied[client] for client in ids.tolist()])
        if kind == "scale":
            return own * power
        if kind == "sign-flip":
            return own * -power
        if kind == "noise":
            draws = []
            for client in ids.tolist():
                # Keyed by the client and the number of the exchange, not by what is hosted here.
                stream = self._rng.generator(f"attack.noise.{number}", client)
                draws.append(stream.standard_normal(own.shape[1]))
            noise = torch.from_numpy(np.stack(draws)).to(own.device)
            return own + power * own.double().square().mean(1, keepdim=True).sqrt() * noise
        if kind == LITTLE:
            # Mean minus z deviations of the honest models (Baruch et al., A little is enough,
            # 2019).
            others = honest
            if not len(others):  # the attackers know their own models alone
                others = own
            little = others.double().mean(0) - power * others.double().std(0, correction=0)
            return little.expand(len(own), -1)
        function = attack.load_function()
        # Copies: a custom attack may write into what it gets.
        made = function(
            AttackContext(own.clone(), honest.clone(), self._rng.round, ids, power, self._rng)
        )
        if not isinstance(made, Tensor) or made.shape != own.shape:
            found = type(made).__name__
            if isinstance(made, Tensor):
                found = str(tuple(made.shape))
            raise ConfigError(
                f"attack {kind!r} returned {found}; expected a tensor of shape {tuple(own.shape)}"
            )
        return made

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state that a later round depends on."""
        inner = getattr(self.inner, "snapshot", dict)()
        return inner | prefix_keys("copied.", self._copied)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""
        if (restore := getattr(self.inner, "restore", None)) is not None:
            restore(tensors)
        for name, model in tensors.items():
            # Only the attackers that this process hosts are taken from a checkpoint.
            if name.startswith("copied.") and (client := int(name.split(".")[1])) in self._copied:
                self._copied[client] = model
