"""What server-based methods have in common: a round of reply, local training and aggregation.

In the first exchange of a round the cohort asks and the server replies with models; in the second
it sends what it trained and the server aggregates. `reply` and `aggregate` run where the server
role is: they are pure functions of the server's state, the cohort's message and the context, and
see nothing else of any client.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float, Int
from torch import Tensor

from coterie._util import pages
from coterie.engine.task import Task
from coterie.errors import ConfigError
from coterie.exchange import secure_sum, validity
from coterie.exchange.accepting import Acceptance
from coterie.exchange.base import (
    SAMPLES,
    Inbox,
    Message,
    Reply,
    ReplyForm,
    SecureAggregation,
    find_gather,
)
from coterie.exchange.narrowed import narrow_message
from coterie.functional import aggregation, metrics, robust, selection
from coterie.functional.metrics import Metric
from coterie.functional.robust import Aggregation
from coterie.methods.base import Info, Method, Round, State, map_tensors
from coterie.methods.cost import Cost, CostSetting, Phase, cost_of_moving
from coterie.models.layout import Layout, Slot
from coterie.models.part import ParameterSharing
from coterie.models.simplex_layers import compose_last_layer, last_layer_mask
from coterie.rng import Rng

MIN_UPDATES = 3
"""A cluster is averaged over at least so many clients, unless it has or asks for fewer."""

Weights = Literal["samples", "uniform"]
Momentum = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class ServerContext:
    """What the server role knows in addition to its state and the message.

    Args:
        index: number of the round; -1 while clients enroll.
        rng: the random streams of the round.
        layout: how models lie in rows.
        population: how many clients there are.
        cohort: how many of them take part in the round; all when None.
        part: which columns are shared and compared; models are 0 in columns that stay at home. All
            when not given.
        evaluating: whether clients ask for models to measure them; otherwise to train them.
        acceptance: the rules by which the server judges what came back; None where it believes it.
        sum_only: the terms under which it gets the weighted mean alone; None where it sees each.
    """

    index: int
    rng: Rng
    layout: Layout
    population: int
    cohort: int | None = None
    part: ParameterSharing = None  # type: ignore[assignment]
    evaluating: bool = False
    acceptance: Acceptance | None = None
    sum_only: SecureAggregation | None = None

    def __post_init__(self) -> None:
        if self.part is None:
            object.__setattr__(self, "part", ParameterSharing.from_patterns(self.layout))

    @property
    def min_updates(self) -> int:
        """The least number of updates that are averaged."""
        if self.cohort is None:
            return min(MIN_UPDATES, self.population)
        return min(MIN_UPDATES, self.cohort)


@dataclass(frozen=True)
class Clusters:
    r"""The server's models and who belongs to which; unclustered methods have one.

    Args:
        models: $\theta_c$.
        velocity: $v_c$ of the server's momentum, in float64; no columns without momentum.
        label: the cluster of each member of the population.
    """

    models: Float[Tensor, "clusters params"]
    velocity: Float[Tensor, "clusters _"]
    label: Int[Tensor, " population"]


@dataclass(frozen=True)
class Averaging:
    r"""How a server averages the models that came back.

    Args:
        weights: by training samples ($n_k / n_P$), or all alike.
        momentum: of the server ($\beta$).
        lr: of the server ($\eta_s$).
        nesterov: whether the momentum looks ahead.
        rule: merges what came back, instead of the mean; as `robust.make_rule` takes it.
    """

    weights: Weights = "samples"
    momentum: float = 0.0
    lr: float = 1.0
    nesterov: bool = False
    rule: Aggregation | None = None

    @property
    def is_plain_mean(self) -> bool:
        """Whether the new model is the mean itself."""
        return self.momentum == 0 and self.lr == 1

    def init_clusters(
        self, models: Float[Tensor, "clusters params"], population: int, layout: Layout
    ) -> Clusters:
        """Return clusters of which everybody is in the first."""
        # Without momentum no columns: nothing is kept in memory and in checkpoints.
        columns = layout.trainable * (not self.is_plain_mean)
        velocity = torch.zeros(len(models), columns, dtype=torch.float64)
        return Clusters(
            models, velocity.to(models.device), torch.zeros(population, dtype=torch.int64)
        )

    def client_weights(self, message: Message) -> Float[Tensor, " clients"]:
        """Return the weight of each row of a message."""
        samples = message.fields["samples"]
        if self.weights == "samples":
            return samples
        return torch.ones_like(samples)

    def merge_groups(
        self,
        message: Message,
        label: Int[Tensor, " clients"],
        models: Float[Tensor, "clusters params"],
        least: int | Tensor,
        context: ServerContext | None = None,
    ) -> Float[Tensor, "clusters params"]:
        """Return what came back merged group by group: the mean, or what the rule makes of it.

        Args:
            message: what came back.
            label: the group in which each row counts.
            models: of the groups; a group with too few updates keeps its own.
            least: updates that a group needs.
            context: says the names of the tensors to the rule; it sees none when not given.
        """
        if self.rule is None:
            weights = self.client_weights(message)
            return aggregation.average_models_by_group(
                message.params, label, weights, models, least
            )
        slots: Sequence[Slot] = ()
        if context is not None:
            slots = context.part.list_slots(context.layout)
        return aggregation.merge_groups_by_rule(
            robust.make_rule(self.rule), message.params, label, message.fields["samples"],
            models, least, f"aggregation {self.rule!r}", slots,
        )  # fmt: skip

    def update_models(
        self,
        shared: Any,
        message: Message,
        label: Int[Tensor, " clients"],
        least: int | Tensor,
        context: ServerContext | None = None,
    ) -> Any:
        """Move the models of a state like `Clusters`, except those with fewer than `least` updates.

        Args:
            shared: has `models` and `velocity`.
            message: what came back.
            label: the cluster in which each row counts.
            least: updates that a cluster needs.
            context: see `merge_groups`.
        """
        mean = self.merge_groups(message, label, shared.models, least, context)
        arrived = torch.bincount(label, minlength=len(mean))
        came = arrived >= torch.as_tensor(least)
        if bool(((arrived > 0) & ~came).any()):
            # The same text each time, so that it is shown once.
            warnings.warn(
                "too few clients of a cluster sent a model in a round, fewer than 3 and not all of "
                "the cluster or of the cohort: its model stays as it was, there and in other such "
                "rounds",
                TooFewUpdates,
                stacklevel=2,
            )
        if self.is_plain_mean:
            return replace(shared, models=mean)
        moved, velocity = aggregation.apply_server_momentum(
            shared.models,
            mean,
            shared.velocity,
            momentum=self.momentum,
            lr=self.lr,
            nesterov=self.nesterov,
        )
        # `least` is 0 for a cluster without members: no update at all would be enough.
        active = (came & (arrived > 0)).to(mean.device)[:, None]
        # A cluster without enough updates keeps its velocity too: its gap is 0, but momentum alone
        # would still move the model.
        return replace(
            shared,
            models=torch.where(active, moved, shared.models),
            velocity=torch.where(active, velocity, shared.velocity),
        )


class TooFewUpdates(UserWarning):
    """A model stayed as it was, since fewer clients than an average needs sent theirs."""


def describe_rare_averages(population: int, participation: float | int, clusters: int) -> str:
    """Describe how rarely clusters are averaged; "" where they are in half of the rounds or more.

    Args:
        population: how many clients there are.
        participation: of the run; the cohort is drawn among all clients, not in each cluster.
        clusters: how many, of about the same size.
    """
    cohort = selection.cohort_size(population, participation, least=MIN_UPDATES)
    members = population // min(clusters, population)
    least = min(MIN_UPDATES, members, cohort)
    chance = selection.chance_to_take_part(members, population, cohort, least)
    if chance >= 0.5:
        return ""
    return (
        f"{cohort} of {population} clients take part in a round, so that a cluster of {members} has "
        f"the {least} whose models are averaged in about {100 * chance:.0f} % of the rounds; in the "
        "others its model stays as it is: raise participation, or have fewer clusters"
    )


def cluster_sizes(label: Int[Tensor, " population"], clusters: int) -> Int[Tensor, " clusters"]:
    """Return how many members each cluster has."""
    return torch.bincount(label, minlength=clusters)


def explain_single_models(method: Method) -> str:
    """Say why a weighted mean of models is not enough for a method's server; "" where it is."""
    if not isinstance(method, ServerMethod):
        return method.needs_single_models
    if (rule := method.averaging.rule) is not None and not method.needs_single_models:
        return f"aggregation = {rule!r} merges single models"
    reason, kinds = method.needs_single_models, type(method).__mro__
    declares = next(
        place for place, kind in enumerate(kinds) if "needs_single_models" in vars(kind)
    )
    # A subclass that sends more, or aggregates otherwise, is not known to need the mean alone,
    # unless it says so itself.
    for kind in kinds[:declares]:
        if any(hook in vars(kind) for hook in ("aggregate", "publish", "round")):
            return reason or ServerMethod.needs_single_models
    return reason


ServerRule = Callable[[ServerContext, Any, Message], tuple[Any, Reply]]


NO_MODEL = ReplyForm(0)
"""An answer without a model: that the message has come."""


@dataclass(frozen=True)
class ServerMethod(Method):
    """A method with a server: subclasses write `aggregate`, and what else differs from FedAvg.

    The server's state is a frozen dataclass of tensors. `reply` reads its `models` and `label`, as
    `Clusters` has them: a state without these needs a `reply` of its own.
    """

    server: ClassVar[bool] = True
    exchanges: ClassVar[int] = 2
    reports: ClassVar[tuple[Metric, ...]] = (
        metrics.GRADIENT_VARIANCE,
        metrics.COMPOSED_GRADIENT_VARIANCE,
    )
    needs_single_models: ClassVar[str] = "its server makes use of single models"

    @property
    def averaging(self) -> Averaging:
        """How the server averages."""
        return Averaging()

    # ---------------------------------------------------------------- where the server role is

    def reply(self, context: ServerContext, shared: Any, message: Message) -> tuple[Any, Reply]:
        """Answer each client that asks with a model: that of its cluster.

        A client of the cohort trains the model. While `context.evaluating`, any client may ask for
        the model that serves it, and the state must not change.

        Args:
            context: what the server knows of the round.
            shared: the server's state.
            message: the questions of the clients.

        Returns:
            The server's new state, and the answer.
        """
        assert message.ids is not None
        # The server's models are the table; each client has one slot, which shows its cluster's
        # row.
        return shared, Reply(shared.models, shared.label[message.ids][:, None])

    def newcomer_candidates(
        self, context: ServerContext, shared: Any
    ) -> Float[Tensor, "models params"]:
        """Return the models that serve clients now, each once: a late client chooses among them."""
        # Ask on behalf of every member: only models that serve somebody are candidates.
        ids = torch.arange(context.population)
        context = replace(context, evaluating=True)
        _, reply = self.reply(context, shared, Message(torch.empty(len(ids), 0), ids=ids))
        # First by row, then by value: children of a split cluster begin with equal models.
        return reply.table[reply.index.unique().to(reply.table.device)].unique(dim=0)

    def add_members(self, shared: Any, models: Float[Tensor, "newcomers params"]) -> Any:
        """Return the server's state in a population with new members at its end.

        Args:
            shared: the state.
            models: of the server's models, the one with which each of them begins.

        Raises:
            ConfigError: when this method's state has no place for members that it has not known
                from the start.
        """
        # A subclass keeps more about each member, which cannot be extended here.
        if type(shared) is not Clusters:
            raise ConfigError(
                f"new_client_others is 'training'; what the server of {self.kind} remembers is "
                "of the clients that it "
                "knew from the start: use 'frozen'"
            )
        return replace(shared, label=extend_labels(shared, models))

    @abstractmethod
    def aggregate(self, context: ServerContext, shared: Any, message: Message) -> Any:
        """Return the server's new state; messages that are not valid are already left out."""

    # ---------------------------------------------------------------- where the clients are

    def reply_form(self) -> ReplyForm | None:
        """Return what `reply` shows each client: one model, unless a subclass overrides it.

        Between machines an answer of another form is refused. None: nothing is known of the form,
        and a node checks only that the parts of an answer fit each other.
        """
        if type(self).reply is not ServerMethod.reply:
            return None
        return ReplyForm(1)

    def init_memory(self, task: Task, rng: Rng) -> Any:
        """Return what clients remember before the first round."""
        return None

    def init_server_state(self, task: Task, rng: Rng) -> Any:
        """Return the server's state before the first round.

        Every process makes it, with the task of the clients that it hosts, so it must not depend on
        their data.
        """
        return self.averaging.init_clusters(task.draw_models(rng, 1), task.population, task.layout)

    def init_state(self, task: Task, rng: Rng) -> State:
        """Return the state before the first round."""
        return State(
            # Clients keep their own rows although the server offers models: columns that stay at
            # home live there.
            task.initial_models(rng),
            self.init_memory(task, rng),
            clear_home_columns(task, self.init_server_state(task, rng)),
        )

    def local_update(self, rnd: Round, state: State, reply: Inbox) -> tuple[State, Info]:
        """Do the local work of a round.

        Args:
            rnd: the round.
            state: before it; `state.params` are the models that the clients received.
            reply: the server's answer, with all that it shows each client.

        Returns:
            The state with the models that the clients send and with their new memory; the report.
        """
        return rnd.train(state)

    def publish(self, rnd: Round, state: State, info: Info) -> Message:
        """Return what clients send to the server, from their state and report of local work."""
        return Message(state.params, {"samples": rnd.task.num_samples})

    def round(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Ask for a model, train it, send it."""
        request = model_request(state)
        shared, reply = ask_server(rnd, self.reply, request, state.shared, self.reply_form())
        # What stays at home (statistics, personal tensors) replaces those columns before the
        # training.
        received = rnd.task.apply_buffer_policy(state.params, first_models(reply))
        new, info = self.local_update(rnd, replace(state, params=received), reply)
        message = limit_to_sum(self, rnd, self.publish(rnd, new, info))
        shared, refused = send_models(self, rnd, message, shared)
        return replace(new, shared=shared), {
            **info,
            **refused,
            **traffic_report(rnd, reply, request, message),
            **gradient_variance_report(rnd, received, new.params),
        }

    def serving_model(
        self, rnd: Round, state: State
    ) -> tuple[Float[Tensor, "clients params"], Info]:
        """Fetch the newest model of each client's cluster."""
        reply = fetch_served_models(self, rnd, state)
        received = rnd.task.apply_buffer_policy(state.params, first_models(reply))
        return received, {"label": reply.peers[:, 0]}

    def adapt_newcomer(
        self, rnd: Round, state: State, received: Float[Tensor, "clients params"]
    ) -> State:
        """Train clients that joined late for one round, while the server's models stay as they are.

        Args:
            rnd: the round, with these clients alone.
            state: their models, and what their optimizers keep.
            received: the models that they began with: each the server's that has the least loss on
                its data.
        """
        return rnd.train(state)[0]

    def cost(self, setting: CostSetting, phase: Phase) -> Cost:
        """Fetch the newest model, to train or to measure it; in a round, send a model too."""
        if phase == "enroll":
            return Cost()
        if phase == "evaluate":
            return cost_of_moving(setting, 1)
        return cost_of_moving(setting, 2)


# ---------------------------------------------------------------- what goes between them


def ask_server(
    rnd: Round,
    rule: ServerRule,
    message: Message,
    shared: Any,
    expects: ReplyForm | None = None,
    evaluating: bool = False,
) -> tuple[Any, Inbox]:
    """Send a message to the server and return its new state (where it is) and its answer.

    Args:
        rnd: the round.
        rule: what the server does with the messages.
        message: this one.
        shared: the server's state, where it is.
        expects: what the answer shows each client; None where its form is not known.
        evaluating: whether clients ask for models to measure, not to train.
    """
    message = replace(message, expects=expects)
    task, taking = rnd.task, int(rnd.reachable.sum())
    context = ServerContext(
        rnd.index, rnd.rng, task.layout, task.population, taking, task.sharing, evaluating,
        rnd.acceptance, rnd.sum_only,
    )  # fmt: skip
    return rnd.exchange.ask_server(message, partial(rule, context), shared)


def fetch_served_models(method: ServerMethod, rnd: Round, state: State) -> Inbox:
    """Ask the server for the models that serve the hosted clients; its state does not change."""
    request, form = model_request(state), method.reply_form()
    return ask_server(rnd, method.reply, request, state.shared, form, evaluating=True)[1]


def send_models(
    method: ServerMethod, rnd: Round, message: Message, shared: Any
) -> tuple[Any, Info]:
    """Send what clients trained; the server aggregates what is valid of it.

    Returns:
        The server's new state (where it is), and a report: where the server role is, and it
        left any message out, how many.
    """
    refused: dict[int, str] = {}
    rule = partial(_aggregate_valid, method, refused)
    if message.sum_only is not None:
        rule = partial(_aggregate_sum, method, refused)
    shared, _ = ask_server(rnd, rule, message, shared, NO_MODEL)
    if not refused:
        return shared, {}
    rnd.note_refused(refused)
    count = torch.full((len(message),), len(refused), dtype=torch.float64)
    return shared, {metrics.REFUSED.name: count}


def limit_to_sum(method: ServerMethod, rnd: Round, message: Message) -> Message:
    """Return a message of which the server gets the weighted mean alone, where that is set."""
    if rnd.sum_only is None:
        return message
    fields = {SAMPLES: method.averaging.client_weights(message)}
    return replace(message, fields=fields, sum_only=rnd.sum_only)


def _aggregate_valid(
    method: ServerMethod,
    refused: dict[int, str],
    context: ServerContext,
    shared: Any,
    message: Message,
) -> tuple[Any, Reply]:
    """Aggregate the valid messages; `refused` receives why the other clients are left out."""
    # One model with NaN would make the whole average NaN: it is left out before any rule sees
    # it.
    asked = message
    reasons = validity.find_invalid(message)
    message = take_valid(message, reasons)
    if context.acceptance is not None and len(message):
        message, far = validity.bound_messages(
            message, getattr(shared, "models", None), context.acceptance
        )
        reasons |= far
        message = take_valid(message, far)
    refused |= reasons
    if len(message):
        # Without any valid message the state stays as it is.
        shared = method.aggregate(context, shared, message)
        if shared is None:
            raise ConfigError(
                f"{method.kind}: aggregate returned None; expected the server's new state: is "
                "a `return` missing?"
            )
    return shared, empty_reply(asked)


def _aggregate_sum(
    method: ServerMethod,
    refused: dict[int, str],
    context: ServerContext,
    shared: Any,
    message: Message,
) -> tuple[Any, Reply]:
    """Aggregate the weighted mean of the models alone; see `exchange.secure_sum`."""
    asked = message
    # Between machines the exchange adds masked models, and the message is their sum already.
    if secure_sum.SUMMED not in message.fields:
        assert context.sum_only is not None
        message, unfit = secure_sum.sum_messages(message, context.sum_only)
        refused |= unfit
    # The mean stands for its cohort: it is the one model that there is.
    return method.aggregate(replace(context, cohort=1), shared, message), empty_reply(asked)


def extend_labels(
    shared: Clusters, models: Float[Tensor, "newcomers params"]
) -> Int[Tensor, " population"]:
    """Return the cluster of each member and, behind them, of newcomers by their models."""
    # newcomers x clusters: equal in every bit, because newcomers begin with copies of the server's
    # models. Of equal models argmax takes the first.
    same = (models[:, None] == shared.models).all(2).cpu()
    return torch.cat([shared.label, same.to(torch.int64).argmax(1)])


def clear_home_columns(task: Task, shared: Any) -> Any:
    """Return a server's state whose models are 0 in the columns that stay at home."""
    if task.sharing.shares_all:
        return shared

    def clear_columns(value: Tensor) -> Tensor:
        # A state's fields have no tags: a floating-point matrix as wide as a model holds models.
        model = value.ndim == 2 and value.shape[1] == task.layout.size and value.is_floating_point()
        if not model:
            return value
        return task.sharing.shared.expand_to_rows(task.sharing.shared.select_from(value))

    return map_tensors(shared, clear_columns)


def take_valid(message: Message, invalid: Mapping[int, str]) -> Message:
    """Return the rows of a message without some clients'."""
    if not invalid:
        return message
    assert message.ids is not None
    bad = torch.tensor(list(invalid), dtype=torch.int64)
    return message.take_rows((~torch.isin(message.ids, bad)).nonzero().flatten())


def model_request(state: State) -> Message:
    """Return the message that asks the server for a model; it carries nothing itself."""
    # A model without columns: the message exists, and costs no payload.
    return Message(state.params[:, :0])


def empty_reply(message: Message) -> Reply:
    """Answer a message with no model."""
    return Reply(message.params[:0], torch.zeros(len(message), 0, dtype=torch.int64))


def first_models(offer: Inbox) -> Float[Tensor, "clients params"]:
    """Return the first model offered to each client: a view, where all get the same one."""
    rows = offer.index[:, 0]
    # One view instead of clients x params copies.
    if len(rows) and bool((rows == rows[0]).all()):
        return offer.table[int(rows[0])].expand(len(rows), -1)
    return pages.take_rows(offer.table, rows)


def sees_whole_cohort(rnd: Round) -> bool:
    """Whether a round's whole cohort is here, or in blocks of one population that gather it."""
    # A node hosts fewer clients than take part and cannot gather the others: it reports nothing.
    return find_gather(rnd.exchange) is not None or len(rnd.ids) == int(rnd.reachable.sum())


def gradient_variance_report(
    rnd: Round, start: Float[Tensor, "clients params"], params: Float[Tensor, "clients params"]
) -> Info:
    """Return requested total variances of the last layer's updates, alike for the whole cohort.

    "gradient_variance" is of all endpoints where the layer has several,
    "composed_gradient_variance" of the layer at the barycenter; without endpoints they are one.
    Models that diverged do not count.

    Args:
        rnd: a round that is open to all.
        start: where each client started.
        params: what it returns.
    """
    asked = [one.name for one in ServerMethod.reports if one.name in rnd.metrics]
    if not asked or not sees_whole_cohort(rnd):
        return {}
    layout, updates, found, gather = rnd.task.layout, params - start, {}, find_gather(rnd.exchange)
    for name in asked:
        # All endpoints as they lie in the row, or their mean as one layer.
        if name == metrics.GRADIENT_VARIANCE.name:
            last = updates[:, last_layer_mask(layout).to(params.device)]
        else:
            last = compose_last_layer(layout, updates)
        # Blocks of one population gather the rows, so that the variance is over the whole cohort.
        if gather is not None:
            last = gather(last)
        value = metrics.total_variance(last[torch.isfinite(last).all(1)])
        found[name] = torch.full((len(params),), value, dtype=torch.float64)
    return found


def traffic_report(rnd: Round, offer: Inbox, *messages: Message) -> dict[str, Tensor]:
    """Return the bytes each client received and sent, of what is shared."""
    sent, received = 0, 0
    for message in messages:
        # Only shared columns and fields travel.
        narrow = narrow_message(rnd.task.sharing, message)
        if message.sum_only is None:
            sent += narrow.row_bytes
        else:
            up, down = secure_sum.count_bytes(narrow.params.shape[1], int(rnd.reachable.sum()))
            sent, received = sent + up, received + down
    return {
        "bytes_down": offer.bytes.sum(1) + received,
        "bytes_up": torch.full((len(offer.index),), sent, dtype=torch.int64),
    }
