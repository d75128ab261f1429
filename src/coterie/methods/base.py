"""What a method is: State, Round, Method and PeerMethod.

A method is written over the clients this process hosts and knows nothing of the others but what its
exchange brings. It is a frozen dataclass: its fields are its hyperparameters, so it is its own
configuration. All that evolves is in `State`, which goes in and comes out; `round` never changes
its arguments.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util import pages
from coterie._util.importing import import_function
from coterie._util.mappings import index_by_name, select_keys
from coterie._util.settings import Configurable
from coterie.engine.optim import OptimizerState
from coterie.engine.stepwise import StepwiseTraining
from coterie.engine.task import LocalTraining, Task
from coterie.errors import RETURN_HINT, ConfigError, require
from coterie.exchange.accepting import Acceptance, AcceptingExchange
from coterie.exchange.base import Exchange, Inbox, Message, PeersMissing, SecureAggregation
from coterie.functional import aggregation, metrics, robust, selection
from coterie.functional.member_lists import (
    MemberLists,
    align_lists,
    find_columns,
    trim_lists,
)  # fmt: skip
from coterie.functional.metrics import Metric
from coterie.functional.peer_sampling import PeerSampling
from coterie.functional.robust import Aggregation
from coterie.methods.cost import Cost, CostSetting, Phase
from coterie.models.layout import Layout, ModelFactory
from coterie.rng import Rng

Info = Mapping[str, Tensor]
"""Everything a round reports, a row for each hosted client. Nothing later depends on it.

Kept as metrics: `loss` (training), `diverged`, what a method may count of its cost
(`metrics.COSTS`; `extra_models` and `extra_floats` are traffic in addition to the pulled models, in
`bytes` or not, `extra_bytes` are received outside the slots), and the metrics that the method
declares in `reports`, one number a client.

With a meaning of their own (`RESERVED_REPORT_KEYS`): `peers` (ids read), `arrived`, `weights`
(mixing weight of each slot), `own_weight`, `bytes`, `similarities` and `probabilities` (of each
slot, see `similarity_report`), `label` (found cluster; what is kept is what `serving_model`
returns, of methods with a server), `losses` and `train_samples` of `Task.train`, `trained` (the
models before the exchange that ends a round, which are the ones to judge). The loop adds
`slots_refused`, which of the `peers` the client refused, and in virtual time `ages` and
`age_seconds`, how old each message was.
"""

RESERVED_REPORT_KEYS = frozenset(
    {
        "peers",
        "arrived",
        "weights",
        "own_weight",
        "bytes",
        metrics.LABEL.name,
        "losses",
        "train_samples",
        "trained",
    }
    | {"slots_refused", "similarities", "probabilities", "ages", "age_seconds"}
)
"""Names of a report that are no metrics."""

SLOT_FILLS = {
    **{"peers": -1, "arrived": 0, "weights": 0, "bytes": 0, "slots_refused": 0},
    **{"similarities": torch.nan, "probabilities": torch.nan, "losses": torch.nan},
    **{"ages": -1, "age_seconds": torch.nan},
}
"""Entries of a report with a column for each slot or step, and the value of what a client lacks."""


def concatenate_rows(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Join the rows of several groups of clients in an entry of a report.

    Clients with fewer slots than others read nobody in those, with fewer steps train in none.

    Args:
        name: of the entry.
        parts: its rows in each group.

    Example:
        >>> concatenate_rows("peers", [torch.tensor([[1, 2]]), torch.tensor([[0]])]).tolist()
        [[1, 2], [0, -1]]
    """
    if name not in SLOT_FILLS or parts[0].ndim < 2:
        return torch.cat(list(parts))
    width, padded = max(part.shape[1] for part in parts), []
    for part in parts:
        missing = (0, width - part.shape[1])
        padded.append(torch.nn.functional.pad(part, missing, value=SLOT_FILLS[name]))
    return torch.cat(padded)


Order = Literal["exchange_first", "train_first"]

ROWS_AT_ONCE = 32
"""Clients per pass where each needs a number for every member: few rows fit the cache."""
_ROWS_OF_VIEWS = 512


@dataclass(frozen=True)
class State:
    """Everything a later round depends on. A checkpoint is this and the number of the round.

    Args:
        params: the personal model of each hosted client.
        memory: the method's memory: a frozen dataclass of tensors with a leading clients axis, or
            None. One that keeps lists of members is a `member_lists.MemberLists`.
        shared: what the server role keeps: a frozen dataclass of tensors, or None.
        moments: the state of the clients' optimizers, where it outlasts a round; `Round.train`
            starts from it and replaces it.
    """

    params: Float[Tensor, "clients params"]
    memory: Any = None
    shared: Any = None
    moments: OptimizerState | None = None

    def select_rows(self, rows: Int[Tensor, " rows"]) -> "State":
        """Return the state of some hosted clients."""
        # `shared` belongs to the server role and has no clients axis: it stays whole.
        memory = map_tensors(self.memory, lambda t: pages.take_rows(t, rows))
        moments = map_tensors(self.moments, lambda t: pages.take_rows(t, rows))
        return State(pages.take_rows(self.params, rows), memory, self.shared, moments)

    def replace_rows(self, rows: Int[Tensor, " rows"], new: "State") -> "State":
        """Return this state with some rows replaced, and the new shared part."""

        def place_rows(old: Tensor, update: Tensor) -> Tensor:
            # `rows` are indices on the CPU; the state may be on a device.
            return old.index_copy(0, rows.to(old.device), update)

        memory, update = align_lists([self.memory, new.memory])
        memory = trim_lists(zip_tensors(memory, update, place_rows))
        moments = zip_tensors(self.moments, new.moments, place_rows)
        return State(place_rows(self.params, new.params), memory, new.shared, moments)

    def assign_rows(self, rows: Int[Tensor, " rows"], new: "State") -> "State":
        """Write the state of some clients into this one, whose tensors belong to the caller.

        Returns:
            It with the same tensors, but for lists of members that have become longer.
        """
        self.params[rows] = new.params
        memory, update = align_lists([self.memory, new.memory])
        for own, other in ((memory, update), (self.moments, new.moments)):
            for mine, value in zip(list_tensors(own), list_tensors(other), strict=True):
                mine[rows] = value
        return replace(self, memory=memory)


def map_tensors(value: Any, function: Any) -> Any:
    """Apply a function to every tensor of a dataclass; None stays None."""
    if value is None:
        return None
    return _replace_tensors(value, map(function, list_tensors(value)))


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a dataclass; none of None."""
    if value is None:
        return []
    return [getattr(value, item.name) for item in dataclasses.fields(value)]


def zip_tensors(a: Any, b: Any, function: Any) -> Any:
    """Apply a function to the matching tensors of two dataclasses; None stays None."""
    if a is None:
        return None
    return _replace_tensors(a, map(function, list_tensors(a), list_tensors(b)))


def concatenate_tensors(parts: Sequence[Any]) -> Any:
    """Return the dataclasses of several groups of clients as one; None where they have none."""
    if parts[0] is None:
        return None
    parts = align_lists(parts)
    joined = map(torch.cat, zip(*map(list_tensors, parts), strict=True))
    return trim_lists(_replace_tensors(parts[0], joined))


def _replace_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    names = [item.name for item in dataclasses.fields(value)]
    return replace(value, **dict(zip(names, tensors, strict=True)))


@dataclass(frozen=True)
class Round:
    """What a method is given for one round.

    Args:
        index: number of the round, from 0.
        task: model and data of the clients that take part and are hosted here.
        exchange: the only door to other clients.
        rng: the random streams of this round.
        reachable: which members of the population can be read in this round; with a clients axis
            where that differs.
        local: how clients train.
        order: whether the exchange or the local training comes first.
        metrics: names of the metrics that `Settings.metrics` requests.
        record_similarities: whether the settings ask to report similarities and probabilities of
            draws.
        acceptance: the rules by which a server judges what came back; None where it believes it.
        sum_only: the terms under which a server gets the weighted mean of the models alone; None
            where it sees each.
        unread: ids of members that each client does not read in this round although they are
            reachable, -1 elsewhere; None for nobody.
        note_refused: called where the server role is with the clients whose message it left out,
            and why.
        sampling: how views are drawn, where clients choose among few members; None where they
            choose among all.
    """

    index: int
    task: Task
    exchange: Exchange
    rng: Rng
    reachable: Bool[Tensor, "*clients population"]
    local: LocalTraining = field(default_factory=LocalTraining)
    order: Order = "exchange_first"
    metrics: frozenset[str] = frozenset()
    record_similarities: bool = False
    acceptance: Acceptance | None = None
    sum_only: SecureAggregation | None = None
    unread: Int[Tensor, "clients members"] | None = None
    note_refused: Callable[[Mapping[int, str]], None] = lambda refused: None
    sampling: PeerSampling | None = None

    def train(
        self,
        state: State,
        *,
        local: LocalTraining | None = None,
        anchor: Float[Tensor, "clients params"] | None = None,
        prox: float = 0.0,
        inputs: Mapping[str, Tensor] | None = None,
        purpose: str = "batches",
        track: int = 0,
        in_place: bool = False,
    ) -> tuple[State, Info]:
        """Train the models of a state with the clients' data, with the options of `Task.train`.

        Args:
            state: `state.params` are the models to start from, and `state.moments` the state of
                the optimizers.
            local: how to train; as the run trains when None.
            anchor: models that a proximal term pulls to.
            prox: weight of the proximal term.
            inputs: values of the model's input buffers, a row for each step.
            purpose: names the random stream of the batches.
            track: which of a client's optimizers to use, for methods that train several models.
            in_place: whether `state.params` may be overwritten.

        Returns:
            The state with the trained models and their optimizers, and the report of the training.
        """
        params, info, moments = self.task.train(
            state.params, self.rng, local or self.local, optimizer=state.moments, anchor=anchor,
            prox=prox, inputs=inputs, purpose=purpose, track=track, in_place=in_place,
        )  # fmt: skip
        return replace(state, params=params, moments=moments), info

    def train_stepwise(
        self,
        state: State,
        *,
        local: LocalTraining | None = None,
        purpose: str = "batches",
        only: Bool[Tensor, " trainable"] | None = None,
    ) -> StepwiseTraining:
        """Return a training whose steps a method takes itself; see `Trainer.train_stepwise`.

        Its optimizers start from `state.moments`. After `finish` their new state is `optimizer` of
        what is returned.
        """
        return self.task.train_stepwise(
            self.rng, local or self.local, optimizer=state.moments, purpose=purpose, only=only
        )

    @property
    def ids(self) -> Int[Tensor, " clients"]:
        """The ids of the clients that take part and are hosted here."""
        return self.task.ids

    @property
    def candidates(self) -> Bool[Tensor, "clients population"]:
        """Which members each client may pull from.

        All that are reachable but itself; those in its view, where clients have views.
        """
        return self.candidates_of(torch.arange(len(self.ids)))

    def readable_by(self, rows: Int[Tensor, " rows"]) -> Bool[Tensor, "*rows population"]:
        """Return which members some clients may read, themselves included, views left aside.

        One row where they all may read the same.
        """
        reachable = self.reachable
        if reachable.ndim > 1:
            reachable = reachable[rows]
        if self.unread is None:
            return reachable
        unread = self.unread[rows]
        if not bool((unread >= 0).any()):
            return reachable
        barred = selection.mask_from_ids(unread, reachable.shape[-1])
        return barred.logical_not_().logical_and_(reachable)

    def candidates_of(
        self, rows: Int[Tensor, " rows"], known: Bool[Tensor, "rows population"] | None = None
    ) -> Bool[Tensor, "rows population"]:
        """Return those of some clients: of a large population, all at once take much memory.

        Args:
            rows: of the clients.
            known: members that each has found itself, which it may read outside of its view.
        """
        # Where everybody reads the same members, only a view is expanded, then copied.
        allowed = pages.copy(self.readable_by(rows).expand(len(rows), -1))
        if self.sampling is not None:
            open_to = selection.mask_from_ids(self.views_of(rows), allowed.shape[-1])
            if known is not None:
                open_to |= known
            allowed &= open_to
        # A client never reads itself.
        return allowed.scatter_(1, self.ids[rows, None], False)

    def keep_candidates(self, peers: Int[Tensor, "clients peers"]) -> Int[Tensor, "clients peers"]:
        """Set the slots of members that a client cannot read in this round to -1.

        Outside of its view it can read the members that it has found itself.
        """
        # The clamp makes -1 a legal index; its value is not used.
        at, reachable = peers.clamp(min=0), self.reachable
        fits = reachable[at] if reachable.ndim == 1 else reachable.gather(1, at)
        fits = fits & (peers >= 0) & (peers != self.ids[:, None])
        if self.unread is not None:
            fits &= ~selection.find_listed(peers, self.unread)
        return peers.masked_fill(~fits, -1)

    def views_of(self, rows: Int[Tensor, " rows"]) -> Int[Tensor, "rows view"]:
        """Return the members in the views of some clients, -1 in empty slots.

        Called only where `sampling` is given. Who turns out to be missing in a round is replaced.
        """
        assert self.sampling is not None
        return self.sampling.draw_views(self.rng, self.ids[rows], self.readable_by(rows))


@dataclass(frozen=True)
class Method(Configurable, ABC):
    """A federated method; concrete ones are final frozen dataclasses in a file of their own.

    Class attributes:
        kind: the name in METHODS, in study files and on the command line.
        summary: one line on what it does.
        references: the papers, as "Authors, title, year, link".
        needs: what it asks of the run beyond a client's own knowledge: "truth", the planted
            clusters (Oracle), or "pool", the data of all clients in one place (Pooled). It is then
            a reference, no real federation.
        exchanges: how many exchanges a round makes, always the same, so that nodes stay in step.
        server: whether it needs a server.
        order: which comes first in a round when the run does not say.
        tracks: how many models each client trains in a round.
        sums_groups: whether clients read means of groups of peers alone, and never one model: then
            nothing that looks at single models goes with it, and there is no such exchange between
            machines yet.
        timed_against: the kind of method against whose best accuracy the time to accuracy is
            measured.
        reports: the metrics of its own that its rounds report, in addition to those of the classes
            that it extends.
        needs_single_models: why a weighted mean of models is not enough for its server, which is
            the reason for which `secure_aggregation` is refused; "" where it is enough.
    """

    kind: ClassVar[str]
    summary: ClassVar[str] = ""
    references: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset()
    exchanges: ClassVar[int] = 1
    server: ClassVar[bool] = False
    order: ClassVar[Order] = "exchange_first"
    tracks: ClassVar[int] = 1
    timed_against: ClassVar[str] = "fedavg"
    sums_groups: ClassVar[bool] = False
    reports: ClassVar[tuple[Metric, ...]] = ()
    needs_single_models: ClassVar[str] = "it has no server that averages"

    def _check_rules(self) -> None:
        # The settings of an aggregation rule in a table; names and paths are checked by their type.
        if isinstance(table := getattr(self, "aggregation", None), Mapping):
            robust.make_table_rule(table)
        super()._check_rules()

    @property
    def privacy_leak(self) -> str:
        """Describe what others learn of training data except by trained models; "" for nothing.

        Differential privacy of local training (`LocalTraining.dp`) does not cover it: what is sent
        that was computed from the data, and choices made by it that show in what is sent later.
        """
        return ""

    @property
    def memory_bound(self) -> int | None:
        """Return the most columns that a table of a client's memory has in any population.

        None where tables grow with the population. The forecast of a run's memory needs it.
        """
        return None

    def count_step_models(self, moments: int) -> int:
        """Return how many rows as large as a model each client has in a step that it takes itself.

        Gradients, models at which they are taken, and optimizers, in addition to a model that
        trains; 0 where the engine trains, a few clients at a time. The forecast of a run's memory
        needs it.

        Args:
            moments: rows of an optimizer.
        """
        return 0

    def count_list_bytes(self, rounds: int, others: int) -> int:
        """Return the most bytes of a client's lists of members after some rounds.

        Lists grow in a run, so that the first state does not show them. The forecast of a run's
        memory needs it.

        Args:
            rounds: in which the client takes part.
            others: how many other clients there are.
        """
        return 0

    @property
    def reads_everybody(self) -> str:
        """Explain why its clients cannot choose peers in views; "" where they can.

        Then `Settings.peer_sampling` is refused.
        """
        return "its clients draw no peers"

    @property
    def needs_positive_loss(self) -> str:
        """Explain why losses below 0 would rank models wrongly, and what to take instead.

        "" where they would not. Otherwise a loss that can be below 0 is refused.
        """
        return ""

    def describe_standstill(self, population: int, participation: float | int, rounds: int) -> str:
        """Describe what a run with these settings would leave undone; "" for nothing.

        A run warns of it before the first round, since its results look like others.

        Args:
            population: how many clients there are.
            participation: a share in (0, 1], or a count of clients above 1.
            rounds: of the run.
        """
        return ""

    @abstractmethod
    def init_state(self, task: Task, rng: Rng) -> State:
        """Return the state before the first round."""

    @abstractmethod
    def round(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Run one round for the hosted clients and return the new state and what happened."""

    def build_model(self, source: ModelFactory) -> ModelFactory:
        """Return the model that clients train: the run's, or a changed form (as in SosicFL)."""
        return source

    def personal_tensors(self, layout: Layout) -> Sequence[str]:
        """Return which tensors never leave a client, in addition to those the run does not share.

        Args:
            layout: of the model; `layer_tensors` and `normalization_tensors` name tensors.

        Returns:
            Names of tensors or of modules, or patterns of them; see `models.part.match_patterns`.
        """
        return ()

    def enroll(self, rnd: Round, state: State) -> State:
        """Exchange what is needed once, with every client, before round 0 (`rnd.index` is -1)."""
        return state

    def select_cohort(
        self, shared: Any, rng: Rng, population: int, participation: float | int
    ) -> Int[Tensor, " active"]:
        """Choose who takes part in a round; called at the server role, or everywhere without one.

        The draw is keyed by the round alone, so that methods see the same participants. Methods
        with clusters draw in each cluster.

        Args:
            shared: what the server role keeps, from before the round.
            rng: the random streams of the round.
            population: how many clients there are.
            participation: a share in (0, 1], or a count of clients above 1.

        Returns:
            Ids in ascending order.
        """
        # With a server at least 3, as many as an average needs (`server.MIN_UPDATES`).
        count = selection.cohort_size(population, participation, least=3 if self.server else 1)
        return selection.draw_cohort(draw_cohort_noise(rng, population), count)

    def serving_model(
        self, rnd: Round, state: State
    ) -> tuple[Float[Tensor, "clients params"], Info]:
        """Return the model that serves each hosted client now, for evaluation, and a report.

        Called only where the method has a server, from which it fetches the newest models; clients
        of other methods are tested with `State.params`. It is called between rounds with all
        hosted clients, those outside the last cohort included; `label` in the second value is the
        found cluster.
        """
        return state.params, {}

    def newcomer_model(self, rnd: Round, state: State) -> Float[Tensor, "clients params"]:
        """Return the model for a newcomer in each hosted client's cluster: never a personal one.

        Called only where the method has a server.
        """
        return self.serving_model(rnd, state)[0]

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Predict what a phase of a run costs a client that takes part, when everybody answers.

        Where a cost depends on chance (which peers are asked), predict the expected one under
        uniform draws. Where it depends on what was found (PANM's bag, PENS's neighbors), assume
        that a client has found its own cluster.

        Args:
            setting: population, model and data.
            phase: the number of a round, from 0; "enroll" for `enroll`; "evaluate" for one
                measurement of the newest model, in addition to the rounds.

        Raises:
            ConfigError: when the settings do not determine the cost.
        """
        # A method without exchanges costs nothing; "enroll" and "evaluate" of a peer method move
        # nothing.
        if self.exchanges and not isinstance(phase, str):
            raise ConfigError(
                f"no prediction of what {self.kind} costs; count what a run of it cost"
            )
        return Cost()


def list_report_metrics(method: Method) -> dict[str, Metric]:
    """Return the metrics of a method's reports: training loss, costs, and those it declares.

    Raises:
        ConfigError: when a declared name means something else in every run.
    """
    own: list[Metric] = []
    # From the base class on, so that a subclass may declare a metric of one name again; `vars`
    # takes only what a class declares itself, so that an inherited metric is not listed twice.
    for base in reversed(type(method).__mro__):
        own += vars(base).get("reports", ())
    for one in own:
        # A metric that the registry knows under this name must be the same in all its fields.
        fits = one.name not in RESERVED_REPORT_KEYS and metrics.REGISTRY.get(one.name, one) == one
        where = f"{type(method).__name__}.reports"
        require(fits, where, one.name, "a name that nothing else in a run has")
    return index_by_name((metrics.LOSS, *metrics.COSTS, *own))


@dataclass(frozen=True)
class PeerMethod(Method):
    """A peer-to-peer method: it defines the exchange; the loop trains locally between exchanges.

    A subclass defines `exchange` (sample peers, pull, score, update the memory, mix). It overrides
    `publish` if clients send more than a model, or if a round has several exchanges; `init_memory`
    and `remember_update` if clients remember something; `local_update` if the local training is not
    the run's own.
    """

    @property
    def reads_everybody(self) -> str:
        """See `Method.reads_everybody`."""
        return ""

    def init_memory(self, task: Task, rng: Rng) -> Any:
        """Return the memory of the hosted clients before the first round."""
        return None

    def publish(self, task: Task, state: State, exchange: int = 0) -> Message:
        """Return what the hosted clients publish in an exchange, from their state before the round.

        Schedules in which clients act one after another ask for every exchange: what a client
        published stands until it acts.

        Args:
            task: of the clients.
            state: theirs.
            exchange: its number in the round, from 0.

        Raises:
            ConfigError: when it is not known before the round, since it answers what others ask in
                the round.
        """
        if exchange:
            raise ConfigError(
                f"{self.kind} makes {self.exchanges} exchanges a round, and its `publish` does "
                "not say what clients "
                f"publish in exchange {exchange}"
            )
        return Message(state.params, {"samples": task.num_samples})

    @abstractmethod
    def exchange(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Sample peers, pull, score, update the memory, mix."""

    def local_update(
        self, rnd: Round, state: State, *, in_place: bool = False
    ) -> tuple[State, Info]:
        """Train the hosted clients once, from `state.params`; `in_place` as for `Task.train`."""
        return rnd.train(state, in_place=in_place)

    def remember_update(self, state: State, before: Float[Tensor, "clients params"]) -> State:
        """Remember something of the local training that led from `before` to `state.params`."""
        return state

    @final
    def init_state(self, task: Task, rng: Rng) -> State:
        """Return the first models and the first memory."""
        return State(task.initial_models(rng), self.init_memory(task, rng))

    @final
    def round(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Exchange and train, in the order of the run."""
        if rnd.order == "train_first":
            state, trained = train_locally(self, rnd, state)
            # The models before the exchange are reported under "trained", because these are judged.
            after = state.params
            state, info = exchange_with_retries(self, rnd, state)
            trained = {**trained, "trained": after}
        else:
            mixed, info = exchange_with_retries(self, rnd, state)
            alone = can_train_in_place(self, mixed, state)
            state, trained = train_locally(self, rnd, mixed, in_place=alone)
        return state, {**info, **trained}


# ---------------------------------------------------------------- what a loop does with a method


def publish_all(method: PeerMethod, task: Task, state: State) -> list[Message]:
    """Return what the hosted clients publish in each exchange of a round; see `publish`."""
    # A method without exchanges (Local) has one message too.
    return [method.publish(task, state, number) for number in range(max(1, method.exchanges))]


def train_locally(
    method: PeerMethod, rnd: Round, state: State, in_place: bool = False
) -> tuple[State, Info]:
    """Train the hosted clients once; `in_place` when their first models are not needed."""
    judge = rnd.exchange if isinstance(rnd.exchange, AcceptingExchange) else None
    # The judge compares the models before and after the training: nothing is overwritten then.
    new, info = method.local_update(rnd, state, in_place=in_place and judge is None)
    if judge is not None:
        judge.note_training(state.params, new.params)
    # A method may build its State without the moments: those of the training stay.
    new = replace(method.remember_update(new, state.params), moments=new.moments)
    return new, info


def exchange_with_retries(method: PeerMethod, rnd: Round, state: State) -> tuple[State, Info]:
    """Exchange, then apply the policy for running statistics.

    When peers turn out to be missing, the method draws again among the others: its own rule
    names the replacements.
    """
    while True:
        try:
            new, info = check_returned_round(
                method, "exchange", method.exchange(rnd, state), rnd.task
            )
            break
        except PeersMissing as missing:
            # The missing members are excluded, so that a retry cannot ask them again and the
            # loop ends.
            rnd = replace(rnd, reachable=rnd.reachable.index_fill(-1, missing.ids, False))
    # An exchange moves no optimizer, even where a method builds its State without the moments.
    params = rnd.task.apply_buffer_policy(state.params, new.params)
    return replace(new, params=params, moments=state.moments), info


def can_train_in_place(method: PeerMethod, mixed: State, before: State) -> bool:
    """Return whether training may change an exchange's models: nothing else uses them."""
    # `remember_update` compares with the models from before the training, so they must survive
    # it.
    if type(method).remember_update is not PeerMethod.remember_update:
        return False
    kept = [before.params, *list_tensors(before.memory), *list_tensors(mixed.memory)]
    # Two tensors share memory when their storages begin at the same address, views included.
    used = {tensor.untyped_storage().data_ptr() for tensor in kept}
    return mixed.params.untyped_storage().data_ptr() not in used


LARGE_POPULATION = 20_000
"""Population above which a uniform choice does not draw a number for each pair of clients."""

LARGEST_WITH_PAIRS = 50_000
"""The same of methods that once held a matrix of all pairs, of 20 GB and more from here on."""

RowsOfMembers = Callable[[Int[Tensor, " rows"]], Bool[Tensor, "rows population"]]
"""Members of the population for some of the hosted clients: a mask for all would be large."""


def draw_peers_uniformly(
    rnd: Round,
    count: int,
    allowed: Bool[Tensor, "clients population"] | RowsOfMembers | None = None,
    purpose: str = "peers",
    *,
    large: int | None = None,
    found: bool = False,
) -> Int[Tensor, "clients peers"]:
    """Draw peers uniformly among a client's candidates, a few clients at a time.

    In a large population a client draws members until it has enough, so that its cost does not grow
    with the population: the same distribution, by other draws.

    Args:
        rnd: the round.
        count: how many; at most population - 1.
        allowed: which of its candidates each client may choose, or a function that returns this for
            some rows; all when None.
        purpose: names the stream.
        large: the population above which that is so; `LARGE_POPULATION` when None.
        found: whether each client has found its allowed members itself, so that it may read them
            outside of its view.
    """
    if rnd.sampling is not None and not found:
        return _draw_peers_from_views(rnd, count, allowed, purpose)
    narrow: RowsOfMembers | None = allowed.__getitem__ if isinstance(allowed, Tensor) else allowed

    def find_choice(rows: Tensor) -> Tensor:
        # The client itself is left out by the draw.
        choice = rnd.readable_by(rows)
        return choice if narrow is None else choice & narrow(rows)

    return draw_members_uniformly(
        rnd.rng, rnd.ids, count, find_choice, rnd.task.population, purpose, large=large
    )


def draw_members_uniformly(
    rng: Rng,
    ids: Int[Tensor, " clients"],
    count: int,
    find_choice: Callable[[Int[Tensor, " rows"]], Bool[Tensor, "*rows population"]],
    population: int,
    purpose: str,
    *,
    large: int | None = None,
) -> Int[Tensor, "clients peers"]:
    """Draw members of the population for each client, uniformly and never itself.

    Args:
        rng: the random streams.
        ids: the clients.
        count: how many; at most population - 1.
        find_choice: returns the members among which some of the clients choose; one row where they
            are the same.
        population: number of clients in all.
        purpose: names the stream.
        large: see `draw_peers_uniformly`.
    """
    if large is None:
        large = LARGE_POPULATION
    # Written into one tensor: many small ones between the large arrays of the passes would keep the
    # allocator from reusing the memory of these.
    peers = torch.full((len(ids), _count_slots(count, population)), -1)
    # clients x population at once would not fit the cache.
    for rows in torch.arange(len(ids)).split(ROWS_AT_ONCE):
        own, choice = ids[rows], find_choice(rows)
        if population > large:
            peers[rows] = _draw_in_turn(rng, own, count, choice, purpose)
            continue
        choice = pages.copy(choice.expand(len(own), -1)).scatter_(1, own[:, None], False)
        # the smallest has the largest Gumbel
        draws = rng.pairs(purpose, own, population).neg_()
        peers[rows] = selection.sample_uniformly(draws, count, choice)
    return peers


def _no_peers(count: int, population: int) -> Int[Tensor, "0 peers"]:
    """Return the peers of no clients, with as many slots as those of one have."""
    return torch.zeros(0, _count_slots(count, population), dtype=torch.int64)


def _count_slots(count: int, population: int) -> int:
    """Return how many others a client can draw."""
    return max(0, min(count, population - 1))


def _draw_peers_from_views(
    rnd: Round,
    count: int,
    allowed: Bool[Tensor, "clients population"] | RowsOfMembers | None,
    purpose: str,
) -> Int[Tensor, "clients peers"]:
    """Draw members of each client's view, by one draw for each slot of it.

    So the others stay as they were drawn when one who is missing is replaced.
    """
    parts = [_no_peers(count, rnd.task.population)]
    for rows in torch.arange(len(rnd.ids)).split(_ROWS_OF_VIEWS):
        views = rnd.views_of(rows)
        choice = views >= 0
        if allowed is not None:
            narrow = allowed[rows] if isinstance(allowed, Tensor) else allowed(rows)
            choice &= narrow.gather(1, views.clamp(min=0))
        draws = rnd.rng.uniform(purpose, rnd.ids[rows], views.shape[1])
        slots = selection.sample_uniformly(draws.neg_(), parts[0].shape[1], choice)
        peers = torch.where(slots < 0, -1, views.gather(1, slots.clamp(min=0)))
        # A view can have fewer slots than there are peers to read.
        missing = (0, parts[0].shape[1] - peers.shape[1])
        parts.append(torch.nn.functional.pad(peers, missing, value=-1))
    return torch.cat(parts)


def _draw_in_turn(
    rng: Rng,
    ids: Int[Tensor, " clients"],
    count: int,
    choice: Bool[Tensor, "*clients population"],
    purpose: str,
) -> Int[Tensor, "clients peers"]:
    """Draw members of a large population one by one, without those drawn before or not allowed.

    Where a client may choose so few that this would take long, its choice is among the list of
    them.
    """
    population, common = choice.shape[-1], choice.numpy()
    peers = np.full((len(ids), max(0, min(count, population - 1))), -1)
    # Counted once where all clients choose among the same members; the client itself is subtracted
    # below.
    sizes = np.broadcast_to(np.count_nonzero(common, axis=-1), len(ids)).tolist()
    streams = rng.iterate_generators(purpose, ids.tolist())
    for row, (client, stream) in enumerate(zip(ids.tolist(), streams, strict=True)):
        fits = common
        if fits.ndim > 1:
            fits = fits[row]
        number = sizes[row] - int(fits[client])
        wanted, found = min(peers.shape[1], number), []
        # Rejection is slow where a client wants more than a quarter of its choice, or may choose
        # less than an eighth of the population: then list the choice and permute it.
        if 4 * wanted > number or 8 * number < population:
            members = np.flatnonzero(fits)
            found = members[members != client][stream.permutation(number)[:wanted]].tolist()
        while len(found) < wanted:
            # In batches: a call of the generator costs far more than the numbers that it returns.
            for member in stream.integers(population, size=2 * wanted).tolist():
                if (
                    len(found) < wanted
                    and member != client
                    and fits[member]
                    and member not in found
                ):
                    found.append(member)
        # Slots behind stay -1 where a client has too few candidates.
        peers[row, : len(found)] = found
    return torch.from_numpy(peers)


def draw_cohort_noise(rng: Rng, population: int) -> Float[Tensor, " population"]:
    """Return a standard Gumbel draw for each client, which ranks the cohort in every method."""
    return torch.from_numpy(rng.generator("cohort").gumbel(size=population))


def mixing_report(
    inbox: Inbox, weights: Float[Tensor, "clients peers"], own_weight: Float[Tensor, " clients"]
) -> dict[str, Tensor]:
    """Return the record of an exchange: who was read, what arrived, how it was weighed."""
    return {
        "peers": inbox.peers,
        "arrived": inbox.mask,
        "weights": weights,
        "own_weight": own_weight,
        "bytes": inbox.bytes,
    }


def similarity_report(
    rnd: Round,
    similarity: Float[Tensor, "clients peers"],
    probability: Float[Tensor, "clients peers"],
) -> dict[str, Tensor]:
    """Return what a report says of similarities, where the run records them; else nothing.

    Args:
        rnd: the round.
        similarity: that the client found of the peer in each slot of the report; NaN where it did
            not measure it.
        probability: with which one draw of the client chose that peer; NaN where it is not known.
    """
    if not rnd.record_similarities:
        return {}
    return {"similarities": similarity, "probabilities": probability}


# ---------------------------------------------------------------- what a method returns


def check_returned_state(method: Method, name: str, found: Any, task: Task) -> State:
    """Check the state that a function of a method returned.

    Args:
        method: the method.
        name: of the function.
        found: what it returned.
        task: of the clients that it was for.

    Raises:
        ConfigError: in one line, when it is no state of these clients.
    """
    who = f"{method.kind}: {name} returned"
    if not isinstance(found, State):
        hint = RETURN_HINT * (found is None)
        raise ConfigError(f"{who} {_describe_value(found)}; expected a State{hint}")
    rows, params = len(task), found.params
    shape = (rows, task.layout.size)
    if not isinstance(params, Tensor) or tuple(params.shape) != shape or params.dtype != task.dtype:
        kind = str(task.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{who} a state whose params are {_describe_value(params)}; expected {kind} of shape "
            f"{shape}, a row for each hosted "
            "client"
        )
    for part, owner in (("memory", found.memory), ("shared", found.shared)):
        if owner is None:
            continue
        if isinstance(owner, type) or not dataclasses.is_dataclass(owner):
            raise ConfigError(
                f"{who} a state whose {part} is {_describe_value(owner)}; expected a frozen "
                "dataclass of tensors"
            )
        for item in dataclasses.fields(owner):
            value, wanted = getattr(owner, item.name), "a tensor"
            fits = isinstance(value, Tensor)
            # What the server role keeps has no axis of clients.
            if part == "memory":
                fits = fits and value.ndim > 0 and len(value) == rows
                wanted = f"a tensor with a row for each of the {rows} hosted clients"
            if not fits:
                raise ConfigError(
                    f"{who} {part}.{item.name} as {_describe_value(value)}; expected {wanted}"
                )
    return found


def check_returned_round(method: Method, name: str, found: Any, task: Task) -> tuple[State, Info]:
    """Check the state and report that a method's function returned; see `check_returned_state`."""
    if not isinstance(found, tuple) or len(found) != 2:
        hint = ", the second {} where nothing is reported"
        if found is None:
            hint = RETURN_HINT
        raise ConfigError(
            f"{method.kind}: {name} returned {_describe_value(found)}; expected (state, info){hint}"
        )
    state, info = found
    check_returned_state(method, name, state, task)
    if not isinstance(info, Mapping):
        raise ConfigError(
            f"{method.kind}: {name} returned {_describe_value(info)} as its info; expected a "
            "dictionary of tensors"
        )
    for key, value in info.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != len(task):
            raise ConfigError(
                f"{method.kind}: {name} reported {key!r} as {_describe_value(value)}; expected a "
                "tensor with a row for each of "
                f"the {len(task)} hosted clients"
            )
    return state, info


def _describe_value(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"{str(found.dtype).removeprefix('torch.')} of shape {tuple(found.shape)}"
    if found is None:
        return "None"
    return f"a {type(found).__name__}"


# ---------------------------------------------------------------- custom rules


@dataclass(frozen=True)
class RememberedPeers:
    """What one client remembers of the members of the population, for a selection rule.

    Args:
        count: how often it has read each.
        last: the round in which it last did; -1 for never.
        similarity: to each; 0 where unknown.
        status: 2 where it has measured the similarity, 1 where a peer has reported it, else 0.
    """

    count: Int[Tensor, " population"]
    last: Int[Tensor, " population"]
    similarity: Float[Tensor, " population"]
    status: Int[Tensor, " population"]


@runtime_checkable
class PeerMemory(Protocol):
    """A memory of which a selection rule may see a client's part."""

    def recall(self, row: int, population: int) -> RememberedPeers:
        """Return what the client of a row remembers, in tensors that nothing else refers to."""
        ...


@final
@dataclass(frozen=True)
class ReadHistory(MemberLists):
    """What a selection rule may know of the peers that a client has read: 12 bytes for each.

    Args:
        members: the members that it has read, in the order in which it first did; -1 behind the
            last.
        count: how often it has read each of them.
        last: the round in which it last did; -1 in an empty column.
    """

    fills: ClassVar[Mapping[str, int]] = {"members": -1, "count": 0, "last": -1}
    members: Int[Tensor, "clients slots"]
    count: Int[Tensor, "clients slots"]
    last: Int[Tensor, "clients slots"]

    @staticmethod
    def new_history(clients: int) -> "ReadHistory":
        """Return the memory of clients that have read nobody."""
        return ReadHistory(*(torch.zeros(clients, 0, dtype=torch.int32) for _ in range(3)))

    @staticmethod
    def count_bytes(members: int) -> int:
        """Return the bytes of a list of so many members."""
        return 3 * torch.int32.itemsize * members

    def record_reads(self, inbox: Inbox, round: int) -> "ReadHistory":
        """Return the memory after a round."""
        # Only messages that arrived count: a peer that was asked and stayed silent was not read.
        columns = find_columns(self.members, inbox.peers, inbox.mask)
        needed = 1 + int(columns.max()) if columns.numel() else 0
        wide = self.pad_to(needed)
        members, count, last = map(pages.copy, (wide.members, wide.count, wide.last))
        rows, slots = inbox.mask.nonzero(as_tuple=True)
        at = rows, columns[rows, slots]
        members[at] = inbox.peers[rows, slots].to(members.dtype)
        # Peers of a row are distinct, so that no index occurs twice and each read counts.
        count[at] += 1
        last[at] = round
        return ReadHistory(members, count, last)

    def recall(self, row: int, population: int) -> RememberedPeers:
        """See `PeerMemory.recall`."""
        listed = self.members[row] >= 0
        at = self.members[row][listed].long()
        count = torch.zeros(population, dtype=torch.int64)
        last = torch.full((population,), -1, dtype=torch.int64)
        count[at], last[at] = self.count[row][listed].long(), self.last[row][listed].long()
        similarity = torch.zeros(population, dtype=torch.float64)
        return RememberedPeers(count, last, similarity, torch.zeros(population, dtype=torch.int8))


def choose_peers_by_rule(
    path: str | Callable[..., Any], rnd: Round, count: int, memory: PeerMemory
) -> Int[Tensor, "clients peers"]:
    """Choose the peers of each client by a custom rule.

    Args:
        path: its import path.
        rnd: the round.
        count: how many each client reads at most.
        memory: what the clients remember.
    """
    what = f"selection {path!r}"
    rule, population = import_function(str(path), what, ("known",)), rnd.task.population
    peers = torch.full((len(rnd.ids), _count_slots(count, population)), -1)
    # A rule sees one client at a time, so that it cannot use what another client knows, and so that
    # nothing has a number for each pair of clients.
    for row, client in enumerate(rnd.ids.tolist()):
        mine = memory.recall(row, population)
        found = ((mine.last >= 0) | (mine.status > 0))[None]
        known = selection.PeerKnowledge(
            client=client,
            round=rnd.index,
            candidates=rnd.candidates_of(torch.tensor([row]), found)[0],
            similarity=mine.similarity,
            measured=mine.status == 2,
            reported=mine.status == 1,
            count=mine.count,
            age=torch.where(mine.last < 0, -1, rnd.index - mine.last),
            # The same noise as the built-in draws use: keyed by round, client and member.
            noise=rnd.rng.gumbel("peers", rnd.ids[row : row + 1], population)[0],
        )
        peers[row] = selection.select_by_rule(rule, known, count, what)
    return peers


def merge_by_rule(
    given: Aggregation,
    rnd: Round,
    state: State,
    inbox: Inbox,
    keep: Bool[Tensor, "clients peers"],
    similarity: Float[Tensor, "clients peers"] | None = None,
) -> tuple[State, dict[str, Tensor]]:
    """Merge what each client received by a rule; without anything it keeps its own model.

    The rule sees what is shared of the models.

    Args:
        given: the rule, as `robust.make_rule` takes it.
        rnd: the round.
        state: before the exchange.
        inbox: with the numbers of samples in a field.
        keep: which slots are merged.
        similarity: of each slot.

    Returns:
        The new state, and what the record wants to know: each merged model has weight 1, for a rule
        states none.
    """
    what = f"aggregation {given!r}"
    rule, own, out = robust.make_rule(given), state.params, state.params.clone()
    columns = rnd.task.sharing.shared
    tensors = rnd.task.sharing.list_slots(rnd.task.layout, packed=True)
    # Models are passed to the rule in the order of sender ids, as `Inbox.mix` adds them: the order
    # of the slots changes no bit.
    order, samples = torch.argsort(inbox.peers, dim=1, stable=True), inbox.field_by_slot("samples")
    for row in range(len(own)):
        slots = order[row][keep[row][order[row]]]
        if not len(slots):
            continue
        # Row 0 is the client's own model.
        models = torch.cat([own[row : row + 1], inbox.limited_models(row, slots)])
        models = columns.select_from(models)
        counts = torch.cat([rnd.task.num_samples[row : row + 1].to(samples), samples[row, slots]])
        alike = None
        if similarity is not None:
            # A client has no similarity to itself: its own model takes the largest of the received
            # ones.
            alike = torch.cat([similarity[row, slots].max()[None], similarity[row, slots]]).to(own)
        received = aggregation.ReceivedModels(
            models, counts.to(own), alike, models[0].clone(), tensors
        )
        merged = aggregation.merge_by_rule(rule, received, what)
        if not rnd.task.sharing.shares_all:
            merged = columns.replace_in(out[row : row + 1], merged[None])[0]
        out[row] = merged
    # A rule reports no weights: each merged model counts as 1.
    return replace(state, params=out), mixing_report(
        inbox, keep.double(), torch.ones(len(own), dtype=torch.float64)
    )


def average_models(
    rnd: Round,
    state: State,
    inbox: Inbox,
    rule: Aggregation | None = None,
    keep: Bool[Tensor, "clients peers"] | None = None,
) -> tuple[State, dict[str, Tensor]]:
    """Average each client's model with received ones by samples, or merge by a rule.

    Args:
        rnd: the round.
        state: before the exchange.
        inbox: what arrived, with the numbers of samples in a field.
        rule: as `robust.make_rule` takes it; None for the average.
        keep: which slots are merged; all that arrived when None.

    Returns:
        The new state, and what the record wants to know.
    """
    if keep is None:
        keep = inbox.mask
    if rule is not None:
        return merge_by_rule(rule, rnd, state, inbox, keep)
    weights, own_weight = aggregation.fedavg_weights(
        inbox.field_by_slot("samples"), rnd.task.num_samples, keep
    )
    mixed = inbox.mix(weights, own=state.params, own_weight=own_weight)
    return replace(state, params=mixed), mixing_report(inbox, weights, own_weight)


M = TypeVar("M", bound=Method)


def make_variant(
    base: type[M], name: str, kind: str, summary: str, *, fixed: bool = False, **defaults: Any
) -> type[M]:
    """Return a method that differs from another in the defaults of some settings.

    Args:
        base: the other method.
        name: of the new class, and of the variable it is bound to.
        kind: its name in METHODS.
        summary: one line on what it does.
        fixed: these settings are no settings of the variant: it has always these values.
        defaults: by the name of the setting.
    """
    # A ClassVar annotation removes the field from the dataclass: a fixed value is no setting.
    hints: dict[str, Any] = {item.name: item.type for item in dataclasses.fields(base)}
    if fixed:
        hints = {name: ClassVar[hint] for name, hint in hints.items()}
    settings = ", ".join(f"{key} = {value!r}" for key, value in defaults.items() if key in hints)
    body = {
        "__module__": base.__module__,
        "__doc__": f"{summary[0].upper()}{summary[1:]}: {base.kind} with {settings}; "
        f"see `{base.__name__}`.",
        "__annotations__": select_keys(hints, defaults),
    }
    # `type(base)` is the metaclass (ABCMeta). `dataclass` runs on the new class, because the
    # annotations only now redefine the fields.
    made = type(base)(name, (base,), {**body, **defaults, "kind": kind, "summary": summary})
    return dataclass(frozen=True)(made)
