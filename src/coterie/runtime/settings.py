"""Settings: everything about a run that does not depend on its method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from annotated_types import MinLen

from coterie._util.settings import (
    NONE,
    Configurable,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    parse_settings,
    to_plain,
)
from coterie.engine.precision import Precision
from coterie.engine.task import InitMode, LocalTraining
from coterie.errors import ConfigError, require
from coterie.exchange.accepting import Acceptance
from coterie.exchange.attacking import Attack
from coterie.exchange.base import SecureAggregation
from coterie.functional.losses import Loss, make_loss, normalize_loss_setting
from coterie.functional.metrics import (
    GROUPS,
    Metric,
    find_metric,
    normalize_metric_setting,
    split_requested,
)
from coterie.functional.peer_sampling import PeerSampling
from coterie.methods.base import Method, Order, PeerMethod
from coterie.runtime.virtual_time import VirtualTime

DTYPES = {"float32": torch.float32, "float64": torch.float64}
Schedule = Literal["synchronous", "asynchronous", "sequential_exchange", "sequential"]
# Why settings do not go with clients that have rounds of their own.
_NEEDS_STEP = {
    "participation": "every client goes on by itself, and nobody draws a cohort",
    "new_clients": "they join after the last round, where virtual time ends",
    "validate_every": "each client validates after each of its own rounds",
    "peer_sampling": "views change with the rounds of all clients",
    "local.lr_schedule": "it runs over all rounds, and clients do not know how many they will do",
    "local.dp": "epsilon is counted by rounds of all clients",
}
# Why settings do not go with a server that sees a sum alone.
_NEEDS_MODELS = {
    "acceptance": "its rules measure single models, which a sum hides",
    "attacks": "a masked vector may hold anything, and no rule of a simulation bounds it",
}
# Why settings do not go with rounds that end at a deadline.
_NEEDS_EVERYBODY = {
    "patience": "a client that is late stops by rounds in which it took no part",
    "secure_aggregation": "a masked sum is of clients that all stay to the end of the round",
}
# Why settings do not go with nodes that wait for nobody.
_NEEDS_COMMON_ROUNDS = {
    "participation": "every node goes on by itself, and nobody draws a cohort",
    "new_clients": "they join when all have ended, and nodes end at different times",
    "peer_sampling": "views change with the rounds of all nodes",
    "secure_aggregation": "a sum is of the clients of one round",
}

_Kind = TypeVar("_Kind", bound=Configurable)


def refuse_settings(given: Mapping[str, Any], reasons: Mapping[str, str], what: str) -> None:
    """Refuse settings that do not go with another one.

    Args:
        given: what is found under each name; nothing where it is not set.
        reasons: why it must not be set, by name.
        what: the other setting, for messages.

    Raises:
        ConfigError: for the first one that is set.
    """
    for name, found in given.items():
        if found:
            raise ConfigError(f"{name} is set; with {what} it is not: {reasons[name]}")


@dataclass(frozen=True)
class Settings(Configurable):
    """Everything about a run that does not depend on its method.

    A method of a study may override any of these settings.

    Args:
        rounds: rounds of exchange and training after the warm-up ($T$).
        local: how clients train.
        loss: what clients minimize: a name of `functional.losses.LOSSES`, an import path
            "package.module:function", or a table with one of these as `kind` and the loss's own
            settings; from Python a function or a `Loss` too. When None: cross-entropy for classes,
            squared error for numbers; other targets call for a choice.
        init: the first models. Of a model by name, a class or a function: "shared" (it is called
            once, under the run's stream, for all), "per_client" (once for each, under the client's
            stream), or "given" (once, under a stream that is the same in all runs). A module keeps
            the weights that it has, for all clients; "redrawn" draws them again by its layers'
            `reset_parameters`.
        output: which entry of what the module returns is its output, where that is no tensor: a
            name of an object or a dict, or a place in a tuple. When None: `logits`, or the only
            tensor. A model by name can say it too.
        order: "exchange_first" or "train_first"; the method's own order when None.
        schedule: "synchronous"; with "asynchronous" nobody waits: each client has rounds of its own
            in virtual time (see `time`), in simulation only; "sequential_exchange" and "sequential"
            let clients act one after another on each other's newest models, as some published code
            does, in simulation only.
        time: how long things take in virtual time, a table of settings of
            `runtime.virtual_time.VirtualTime`: with schedule = "asynchronous" it is needed; with
            "synchronous" each round lasts as long as its slowest client, and results are the same
            with their times.
        pace: of the nodes of a run between machines: "common", rounds have a common end; "free",
            nobody waits: each node has rounds of its own, and reads the newest messages that
            others have published. Simulations have schedule = "asynchronous" for it.
        max_staleness: with pace = "free": rounds of the reader after which a message is too old to
            be read, and counts as missing; none when None.
        warmup_epochs: local epochs before the first exchange, whatever `local.steps`; as many
            epochs or steps as in a round when None. Not for "train_first".
        participation: share of clients in (0, 1], or a count above 1, that takes part in a round.
        patience: rounds without a better validation loss after which a client stops; None for
            never.
        stopped_broadcast: the model that a stopped client keeps publishing.
        evaluate: the model of each client in the final test: the best on its validation data, or
            the last.
        new_clients: clients that take no part in the rounds and join after the last one, unseen
            until then: a share of all below 1, a count from 1 on, or a list of their names or
            numbers; see `runtime.newcomers`.
        new_client_rounds: rounds for which each of them then trains.
        new_client_others: what all others do meanwhile: "frozen", they stay as they are;
            "training", their run goes on for these rounds with the new clients in it. Their own
            results are those of the last round in any case.
        buffers: BatchNorm statistics after a merge: averaged like parameters, the client's own, or
            initial values.
        shared: what clients share: names of tensors or modules of the model, or patterns such as
            "features.*"; "!" before one takes it out, and where all have it the rest is shared.
            Everything when empty. What is not shared never leaves a client.
        similarity_on: patterns of the tensors in which similarities compare models and updates; all
            that are trained and shared when empty.
        engine: "auto" or a name of `engine.ENGINE_NAMES`.
        block: number of clients trained at once; chosen when None.
        device: "cpu", "cuda", or "cuda:1" for the second of several.
        dtype: "float32" or "float64".
        precision: of matrix products in training and evaluation: "full" is that of `dtype`; "tf32"
            needs a CUDA device; "bf16" is bfloat16 with parameters in float32. Optimizers, merges
            and losses keep `dtype`.
        cuda_graphs: on a CUDA device: capture the steps of a block of clients and replay them (vmap
            engine).
        portable: train the same bytes on all processors of a kind, with the same compiler and
            PyTorch: programs are compiled for x86-64-v3 (AVX2) or ARM v8.2, and PyTorch takes its
            kernels for AVX2. Needs the compiled engine. Where PyTorch computed before this was
            read, an error asks for ATEN_CPU_CAPABILITY=avx2 in the environment.
        validate_every: rounds between two evaluations on the validation data.
        eval_every: rounds between two evaluations on the test sets, a multiple of `validate_every`;
            0 for the end only.
        metrics: what test evaluations measure in addition to the loss and its usual metric: names
            of metrics of outputs, such as "auroc", or import paths of functions (outputs, targets)
            -> a value. Of classification runs also "train_prior_accuracy" and, with a server,
            "global_accuracy", that of the global model (or of the client's cluster) on all test
            sets together. At the end: "clusters" (number of clusters, Rand, WAS, WADB), "maxima"
            over the evaluated rounds, and "reductions" of the final accuracy, weighted by samples
            and by clusters. In every round of a simulation with a server: "gradient_variance", the
            total variance of the last layer's updates over the cohort (of all endpoints of a
            simplex); "composed_gradient_variance", that of the layer composed at the simplex's
            barycenter; with FedGWC "interaction_change", the running mean that decides whether a
            cluster is split. In study files the former name of the latter, `extra_metrics`, adds
            to this list.
        record_similarities: record of each model that a client asks for the similarity that it
            found and the probability with which it drew that peer, as two more columns of
            edges.parquet; of methods that have them (DAC, PANM).
        acceptance: how clients of peer-to-peer methods, and servers, judge what they receive before
            they merge it: true, or a table of settings of `exchange.accepting.Acceptance`; false
            for not at all. When None, they judge between machines and not in a simulation. What
            cannot be of an honest client is left out by servers in any case.
        secure_aggregation: let the server of a method that only averages learn the weighted mean of
            a round's models and no single one: true, or a table of settings of
            `exchange.base.SecureAggregation`. Models are added in fixed point, within 1e-6 of the
            plain mean. Methods whose servers look at single models, and `acceptance`, are refused.
        peer_sampling: let clients of peer-to-peer methods choose new peers among few members: true,
            or a table of settings of `functional.peer_sampling.PeerSampling`. A client can then draw
            the members of its view, which changes from round to round, and the members that its
            method has measured or learned of. Methods that ask all members are refused.
        attacks: what some clients do to the others, in simulation only: tables, each with the
            `kind`, the `clients` and the further settings of an `exchange.attacking.Attack`.
            Results are then those of the honest clients.
        check: before the first round, compare what will train with the module in plain PyTorch, and
            at the end what is taken home with what was reported; see `runtime.translation`. It
            takes about a second, draws nothing and changes no result.
        checkpoint_seconds: shortest time between two checkpoints; 0 for one after every round. The
            interval grows where writing takes long: at most a twentieth of the time is spent on it.
    """

    rounds: NonNegativeInt = 30
    local: LocalTraining = field(default_factory=LocalTraining)
    loss: str | Mapping[str, Any] | Callable[..., Any] | None = None
    init: InitMode = "shared"
    output: str | int | None = None
    order: Order | None = None
    schedule: Schedule = "synchronous"
    time: Mapping[str, Any] | None = None
    pace: Literal["common", "free"] = "common"
    max_staleness: PositiveInt | None = None
    warmup_epochs: NonNegativeInt | None = None
    participation: PositiveFloat = 1.0
    patience: PositiveInt | None = None
    stopped_broadcast: Literal["best", "last"] = "best"
    evaluate: Literal["best_val", "final"] = "best_val"
    new_clients: PositiveFloat | Annotated[Sequence[int | str], MinLen(1)] | None = None
    new_client_rounds: NonNegativeInt = 5
    new_client_others: Literal["frozen", "training"] = "frozen"
    buffers: Literal["average", "local", "reset"] = "average"
    shared: Sequence[str] = ()
    similarity_on: Sequence[str] = ()
    engine: str = "auto"
    block: PositiveInt | None = None
    device: str = "cpu"
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "full"
    cuda_graphs: bool = False
    portable: bool = False
    validate_every: PositiveInt = 1
    eval_every: NonNegativeInt = 0
    metrics: Sequence[str | Callable[..., Any]] = ()
    record_similarities: bool = False
    acceptance: bool | Mapping[str, Any] | None = None
    secure_aggregation: bool | Mapping[str, Any] | None = None
    peer_sampling: bool | Mapping[str, Any] | None = None
    attacks: Sequence[Mapping[str, Any]] | None = None
    check: bool = True  # type: ignore[assignment]  # the field, in place of the method
    checkpoint_seconds: NonNegativeFloat = 30.0

    def _check_rules(self) -> None:
        """Check settings that depend on each other.

        Test evaluations coincide with validation; optimizer states can outlast a round where
        clients do not act one after another. Losses and metrics are stored as plain values. What
        has an import path is imported when a run begins, so that results can be read where it
        cannot be.
        """
        # The class is frozen; `check` runs when it is created.
        loss, output = self.loss, self.output
        if loss == NONE:
            loss = None
        if output is not None:  # a place in a tuple is a number in TOML
            output = str(output)
        object.__setattr__(self, "loss", normalize_loss_setting(loss))
        object.__setattr__(self, "output", output)
        # A dictionary removes repetitions and keeps the order.
        requested = dict.fromkeys(map(normalize_metric_setting, self.metrics))
        object.__setattr__(self, "metrics", tuple(requested))
        every = self.validate_every
        require(
            self.eval_every % every == 0,
            "eval_every",
            self.eval_every,
            f"a multiple of validate_every ({every})",
        )
        self._check_time()
        self._check_pace()
        sequential = self.schedule.startswith("sequential")
        keeps = self.local.persistent_client_optimizer and sequential
        expected = "schedule = 'synchronous' or 'asynchronous' with it"
        require(not keeps, "local.persistent_client_optimizer", True, expected)
        # "acceptance = true" and a table of its defaults are stored in the same form.
        judges = self.acceptance_rules
        if judges is not None:
            object.__setattr__(self, "acceptance", to_plain(judges))
        self._check_secure_aggregation()
        views = self.views
        object.__setattr__(self, "peer_sampling", None if views is None else to_plain(views))
        # None without attacks, so that identities of runs without them stay the same.
        object.__setattr__(self, "attacks", tuple(map(to_plain, self.attack_list)) or None)
        for name in ("acceptance", "attacks"):
            fits = not getattr(self, name) or self.schedule == "synchronous"
            require(fits, name, getattr(self, name), "schedule = 'synchronous' with it")
        fits = self.attacks is None or self.new_clients is None
        require(fits, "attacks", self.attacks, "no new_clients with it")

    def _check_secure_aggregation(self) -> None:
        """Check what cannot be where a server sees a sum alone."""
        terms = self.secure_terms
        # Not set and switched off are one.
        object.__setattr__(self, "secure_aggregation", None if terms is None else to_plain(terms))
        if terms is None:
            return
        given = {name: getattr(self, name) for name in _NEEDS_MODELS}
        refuse_settings(given, _NEEDS_MODELS, "secure_aggregation")
        if self.schedule != "synchronous":
            raise ConfigError(
                f"schedule is {self.schedule!r}; expected 'synchronous' with secure_aggregation: a "
                "sum is of the clients of one round"
            )

    def _check_time(self) -> None:
        """Check the table of virtual time, and what clients with rounds of their own cannot do."""
        time, free = self.virtual_time, self.schedule == "asynchronous"
        if time is None:
            require(not free, "time", None, "it with schedule = 'asynchronous'")
            return
        fits = free or self.schedule == "synchronous"
        expected = "it with schedule = 'synchronous' or 'asynchronous' alone"
        require(fits, "time", self.time, expected)
        object.__setattr__(self, "time", to_plain(time))
        newcomers = {"new_clients": self.new_clients is not None}
        refuse_settings(newcomers, _NEEDS_STEP, "a table of time")
        if time.deadline_seconds is not None:
            self._check_deadline()
        if not free:
            return
        # A round of the results is a span of virtual time, in which clients do several rounds or
        # none: what counts rounds of all clients together has no meaning.
        refused = {
            "participation": self.participation != 1,
            "validate_every": self.validate_every != 1,
            "peer_sampling": self.peer_sampling is not None,
            "local.lr_schedule": self.local.needs_rounds,
            "local.dp": self.local.dp_settings is not None,
        }
        refuse_settings(refused, _NEEDS_STEP, "schedule = 'asynchronous'")

    def _check_deadline(self) -> None:
        """Check what cannot be where rounds end at a deadline."""
        if self.schedule != "synchronous":
            raise ConfigError(
                f"time.deadline_seconds is set; with schedule = {self.schedule!r} it is not: nobody "
                "waits, so that there is no round to end"
            )
        given = {name: getattr(self, name) for name in _NEEDS_EVERYBODY}
        refuse_settings(given, _NEEDS_EVERYBODY, "time.deadline_seconds")

    @property
    def warmup_training(self) -> LocalTraining:
        """How clients train before the first exchange."""
        if self.warmup_epochs is None:
            return self.local
        return replace(self.local, epochs=self.warmup_epochs, steps=None)

    @property
    def has_deadline(self) -> bool:
        """Whether rounds end at a deadline."""
        time = self.virtual_time
        return time is not None and time.deadline_seconds is not None

    def _check_pace(self) -> None:
        """Check what nodes that wait for nobody cannot do."""
        if self.pace == "common":
            expected = "it with pace = 'free' alone; time.max_staleness is that of virtual time"
            require(self.max_staleness is None, "max_staleness", self.max_staleness, expected)
            return
        expected = "'synchronous' with pace = 'free', which is of nodes on machines"
        require(self.schedule == "synchronous", "schedule", self.schedule, expected)
        refused = {
            "participation": self.participation != 1,
            "new_clients": self.new_clients is not None,
            "peer_sampling": self.peer_sampling is not None,
            "secure_aggregation": self.secure_terms is not None,
        }
        refuse_settings(refused, _NEEDS_COMMON_ROUNDS, "pace = 'free'")

    @property
    def virtual_time(self) -> VirtualTime | None:
        """How long things take; None where rounds have no time."""
        if self.time is None:
            return None
        return parse_settings(VirtualTime, self.time, "time")

    @property
    def output_metrics(self) -> tuple[Metric, ...]:
        """The requested metrics that are computed from outputs and targets."""
        found = [find_metric(name) for name in self.metrics if name not in GROUPS]
        seen: dict[str, Metric] = {}
        for one in found:
            other = seen.setdefault(one.name, one)
            if other is not one:  # of two columns of one name the last would stay
                raise ConfigError(
                    f"metrics has two of the name {one.name!r}, {other.path} and {one.path}; give "
                    "one of them another name"
                )
        return tuple(one for one in found if one.function is not None)

    def to_identity(self) -> dict[str, Any]:
        """Return the fields as stored identities of runs and messages between nodes name them.

        `extra_metrics` was a setting of its own when these were made; see `split_requested`.
        """
        outputs, of_runs = split_requested(map(str, self.metrics))
        # Under the names of older versions, since identities that are stored contain them.
        found = {**asdict(self), "metrics": outputs, "extra_metrics": of_runs}
        del found["check"]  # results do not depend on it
        if self.pace == "common":  # younger than identities that are stored
            del found["pace"], found["max_staleness"]
        if self.peer_sampling is None:
            del found["peer_sampling"]
        return found

    @property
    def custom_loss(self) -> Loss | None:
        """The loss of the settings; None for the usual one of the targets."""
        if self.loss is None:
            return None
        return make_loss(self.loss)

    def _parse_switch(self, name: str, kind: type[_Kind]) -> _Kind | None:
        """Return what a table says, or the defaults where it is true; None where it is off."""
        given = getattr(self, name)
        if given is None or given is False:
            return None
        return parse_settings(kind, {} if given is True else given, name)

    @property
    def acceptance_rules(self) -> Acceptance | None:
        """The rules by which clients judge what they receive; None where they accept everything."""
        return self._parse_switch("acceptance", Acceptance)

    @property
    def views(self) -> PeerSampling | None:
        """How the views of clients are drawn; None where they choose among all members."""
        return self._parse_switch("peer_sampling", PeerSampling)

    def views_among(self, population: int) -> PeerSampling | None:
        """Return how views are drawn, where they do not hold all others."""
        if (views := self.views) is None or views.view >= population - 1:
            return None
        return views

    @property
    def secure_terms(self) -> SecureAggregation | None:
        """How a server gets a sum of models alone; None where it sees each."""
        return self._parse_switch("secure_aggregation", SecureAggregation)

    def acceptance_rules_for(self, method: Method) -> Acceptance | None:
        """Return the acceptance rules of a method's clients; None with a server or no exchange."""
        if not isinstance(method, PeerMethod) or not method.exchanges:
            return None
        return self.acceptance_rules

    @property
    def attack_list(self) -> tuple[Attack, ...]:
        """The attacks."""
        found = []
        for place, one in enumerate(self.attacks or ()):
            found.append(parse_settings(Attack, one, f"attacks[{place}]"))
        return tuple(found)

    def keeps_best_models(self, server: bool) -> bool:
        """Return whether each client's best model is needed, in the final test or when it stops.

        Args:
            server: whether the method has a server; then nobody stops early.
        """
        # With a server nobody stops on its own: its model serves all of them.
        stops = self.patience is not None and not server
        return self.evaluate == "best_val" or (stops and self.stopped_broadcast == "best")
