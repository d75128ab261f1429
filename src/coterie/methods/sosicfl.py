r"""SosicFL, its variant with endpoints in all layers (SosicFL-All) and with personal models (SosicFL+)."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from coterie.engine.task import Task
from coterie.errors import require
from coterie.exchange.base import Inbox, Message
from coterie.methods._simplex_server import Regions, SimplexMethod
from coterie.methods.base import Info, Round, State
from coterie.methods.ditto import personal_info, personal_training
from coterie.methods.server import Desk, first
from coterie.models import simplex_layers
from coterie.models.layout import ModelFactory
from coterie.rng import Rng

REFERENCES = (
    "Grinwald, Wiesner, Nakajima, Federated learning over connected modes, 2024, https://arxiv.org/abs/2403.03333",
)


@final
@dataclass(frozen=True)
class SosicFl(SimplexMethod):
    """Federated averaging of a simplex of heads; groups of clients train and use their own region of it.

    See `SimplexMethod` for the settings.

    References:
        Grinwald, Wiesner, Nakajima, Federated learning over connected modes, 2024.
    """

    kind: ClassVar[str] = "sosicfl"
    summary: ClassVar[str] = "FedAvg of a simplex of heads; groups of clients train and use their own region of it"
    references: ClassVar[tuple[str, ...]] = REFERENCES


@final
@dataclass(frozen=True)
class SosicFlAll(SimplexMethod):
    """SosicFL with endpoints of every trained tensor and one mixture for all layers; M times the traffic.

    Running statistics stay single. See `SimplexMethod` for the settings; the head has no scale of its own here.
    """

    kind: ClassVar[str] = "sosicfl-all"
    summary: ClassVar[str] = "SosicFL with endpoints in all layers"
    references: ClassVar[tuple[str, ...]] = REFERENCES
    scope: ClassVar = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, only in (("per_sample", False), ("test_samples", 1), ("head_lr_scale", 1.0)):
            require(getattr(self, name) == only, f"{self.kind}.{name}", getattr(self, name), f"{only}")

    def model(self, source: ModelFactory) -> ModelFactory:
        """Give every layer endpoints."""
        return simplex_layers.simplex_all(source, self.rules.endpoints)


@dataclass(frozen=True)
class PersonalSimplex:
    """The personal simplex model of each client, and whether it has one yet."""

    model: Float[Tensor, "clients params"]
    started: Bool[Tensor, " clients"]


@final
@dataclass(frozen=True)
class SosicFlPlus(SimplexMethod):
    r"""SosicFL with a personal simplex for each client, kept near the global one as in Ditto.

    The personal step adds $\lambda (v - w^t)$ on all parameters; mixtures are drawn from the client's region. A
    client is served its personal model at its centre. See `SimplexMethod` for the other settings.

    Args:
        lam: $\lambda$.
        global_rounds: train personal models only from this round on, each from the global model as it is then, which
            no longer changes; None trains both in every round.
        personal_epochs: epochs of the personal model; those of the run when None.
        personal_steps: steps of the personal model instead.
    """

    kind: ClassVar[str] = "sosicfl-plus"
    tracks: ClassVar[int] = 2
    summary: ClassVar[str] = "SosicFL with a personal simplex for each client, near the global one"
    references: ClassVar[tuple[str, ...]] = REFERENCES
    lam: float = 1.0
    global_rounds: int | None = None
    personal_epochs: int | None = None
    personal_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lam >= 0, f"{self.kind}.lam", self.lam, "0 or more")
        valid = self.global_rounds is None or self.global_rounds >= 1
        require(valid, f"{self.kind}.global_rounds", self.global_rounds, "at least 1, or nothing")

    def _posthoc(self, index: int) -> bool:
        return self.global_rounds is not None and index >= self.global_rounds

    def memory(self, task: Task, rng: Rng) -> PersonalSimplex:
        """Everybody starts at the first model."""
        first_model = self.start(task, rng).expand(len(task), -1).clone()
        return PersonalSimplex(first_model, torch.full((len(task),), self.global_rounds is None))

    def train(self, rnd: Round, start: Float[Tensor, "clients params"], offer: Inbox) -> tuple[Tensor, Info]:
        """Train the global simplex, unless its time is over."""
        if self._posthoc(rnd.index):
            rnd = replace(rnd, local=replace(rnd.local, steps=0))
        return super().train(rnd, start, offer)

    def merge(self, desk: Desk, shared: Regions, message: Message) -> Regions:
        """Average, unless the global model is final."""
        return shared if self._posthoc(desk.index) else super().merge(desk, shared, message)

    def remember(
        self, rnd: Round, memory: PersonalSimplex, start: Float[Tensor, "clients params"], offer: Inbox
    ) -> tuple[PersonalSimplex, Info]:
        """Train the personal simplexes."""
        if self.global_rounds is not None and not self._posthoc(rnd.index):
            return memory, {}
        local = personal_training(rnd.local, self.personal_epochs, self.personal_steps)
        inputs = self.mixtures(rnd, offer, "alpha.personal", rnd.task.steps(local))
        own = torch.where(memory.started.to(start.device)[:, None], memory.model, start)
        model, info = rnd.task.train(
            own, rnd.rng, local, anchor=start, prox=self.lam, inputs=inputs, purpose="batches.personal", track=1
        )
        return PersonalSimplex(model, torch.ones_like(memory.started)), personal_info(info)

    def served(self, rnd: Round, state: State) -> tuple[Float[Tensor, "clients params"], Info]:
        """Stand at one's centre of one's own simplex, or of the global one before there is an own."""
        _, offer = self.ask(rnd, self.deliver, self.request(rnd, state), state.shared)
        received = rnd.task.settle(state.params, first(offer))
        own = torch.where(state.memory.started.to(received.device)[:, None], state.memory.model, received)
        return self.placed(rnd, own, offer), {"label": offer.peers[:, 0]}
