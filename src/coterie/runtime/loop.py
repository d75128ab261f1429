"""Loop: the rounds of one run, for the clients that one process hosts, over any exchange.

A simulation hosts all clients in memory and a node hosts one over the network; both run this same
loop.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from coterie._util.mappings import index_by_name
from coterie._util.names import format_client, format_clients
from coterie.data.federation import Federation
from coterie.engine.task import Task
from coterie.errors import ConfigError, require
from coterie.exchange.base import Exchange
from coterie.exchange.narrowed import narrow_exchange
from coterie.functional import metrics
from coterie.methods.base import (
    RESERVED_REPORT_KEYS,
    Info,
    Method,
    Order,
    PeerMethod,
    Round,
    State,
    check_returned_round,
    check_returned_state,
    list_report_metrics,
)
from coterie.rng import Rng
from coterie.runtime import final_metrics
from coterie.runtime.extensions import Extension, make_extensions
from coterie.runtime.record import Record
from coterie.runtime.settings import Schedule, Settings
from coterie.runtime.translation import check_translation


class Undeclared(UserWarning):
    """A method reports a value that it does not declare: it is not recorded."""


class ServerRefused(UserWarning):
    """A server left a client's message out of what it aggregates."""


@dataclass(frozen=True)
class Tracker:
    """The state of early stopping and of the choice of each client's best model.

    `best` is empty where best models are not stored; `changed` says whose model is another one than
    at the last evaluation.
    """

    best_loss: Float[Tensor, " clients"]
    best: Float[Tensor, "kept params"]
    bad: Int[Tensor, " clients"]
    stopped: Bool[Tensor, " clients"]
    changed: Bool[Tensor, " clients"]

    @staticmethod
    def start(params: Float[Tensor, "clients params"], keep: bool = True) -> "Tracker":
        """Return the tracker before the first evaluation; `keep` stores best models."""
        number = len(params)
        # No loss is infinite at first, so that the first evaluation is the best one so far.
        nothing = torch.full((number,), torch.inf, dtype=params.dtype)
        zero = torch.zeros(number, dtype=torch.int64)
        if not keep:
            params = params[:0]
        return Tracker(nothing, params.clone(), zero, zero.bool(), zero.bool())

    def note_changed(self, rows: Int[Tensor, " rows"]) -> "Tracker":
        """Return the tracker after some clients got other models."""
        return dataclasses.replace(self, changed=self.changed.index_fill(0, rows, True))

    def observe(
        self,
        params: Float[Tensor, "clients params"],
        loss: Float[Tensor, " clients"],
        measured: Bool[Tensor, " clients"],
        unknown: Bool[Tensor, " clients"],
        patience: int | None,
        rounds: int = 1,
    ) -> "Tracker":
        """Update the tracker with new models and their validation losses.

        Args:
            params: the models now.
            loss: their validation losses.
            measured: which clients trained since the last call.
            unknown: which clients have no validation data; their newest model counts as the best.
            patience: see `Settings`.
            rounds: rounds since the last call.
        """
        # `<`, not `<=`: of equal losses the earlier model stays, and patience is used up. A NaN is
        # never better.
        better = measured & ((loss < self.best_loss) | unknown)
        worse = measured & ~better
        # `rounds` counts for the rounds between two evaluations.
        bad = torch.where(better, 0, self.bad + rounds * worse.to(torch.int64))
        stopped, best = self.stopped, self.best
        if patience is not None:
            stopped = stopped | (bad >= patience)
        if len(best) and bool(better.any()):
            # `where` copies, so that earlier trackers stay as they are.
            best = torch.where(better.to(params.device)[:, None], params, self.best)
        return Tracker(
            torch.where(better, loss, self.best_loss), best, bad, stopped, self.changed & ~measured
        )


class Loop:
    """The rounds of one run, for the clients hosted here.

    Args:
        task: model and data of the hosted clients.
        method: what happens in a round.
        exchange: the door to other clients.
        settings: how the run goes.
        rng: the random streams of the run.
        record: where results go.
        extensions: what the run adds to the method's rounds; those of the settings when None.

    Raises:
        ConfigError: when this loop cannot run the schedule of the settings.
    """

    schedules: ClassVar[frozenset[Schedule]] = frozenset({"synchronous"})
    """The schedules of rounds that this loop runs."""

    def __init__(
        self,
        task: Task,
        method: Method,
        exchange: Exchange,
        settings: Settings,
        rng: Rng,
        record: Record,
        extensions: Sequence[Extension] | None = None,
    ) -> None:
        schedule = settings.schedule
        require(schedule in self.schedules, "schedule", schedule, " or ".join(self.schedules))
        self.next_round = -1  # the warm-up
        # Every draw of the task comes from streams of the run; see decision 003.
        self._tasks = [(-1, task.for_round(rng))]
        for first, later in task.phases:
            self._tasks.append((first, later.for_round(rng)))
        self.rng = rng
        self.method, self.exchange, self.settings, self.record = method, exchange, settings, record
        self.order: Order = settings.order or method.order
        if extensions is None:
            extensions = make_extensions(method, settings)
        self.extensions = extensions
        self.state = self._init_state(task)
        self.tracker = Tracker.start(self.state.params, settings.keeps_best_models(method.server))
        self.evaluated_models: Tensor | None = None  # the models of the final evaluation
        # the models that the last round judged, and how they did
        self._validated: tuple[Tensor, dict[str, Tensor]] | None = None
        # the first and the last round of each gap
        self.skipped_rounds: list[tuple[int, int]] = []
        self.alone_rounds: list[tuple[int, int]] = []  # of a node that received no message
        self.validation: dict[str, Tensor] = {}
        self.train_samples = 0
        self.undefined_reasons: dict[str, str] = {}  # why final metrics are NaN
        self.recorded_metrics = list_report_metrics(method)  # of what rounds report
        for extension in self.extensions:
            self.recorded_metrics |= index_by_name(extension.report_metrics())
        self.counted = self.select_counted(task.ids)  # hosted clients that count in results
        self._ever_refused: set[int] = set()
        self.refused: dict[int, str] = {}  # whose messages the server left out of this round
        self.mean_reports: dict[str, float] = {}  # means over clients of the last report
        self.translation: dict[str, Any] = {}  # what the check of the translation has found
        self._undeclared: set[str] = set()  # reported names that a warning has named already
        self._prepare_schedule()

    def _prepare_schedule(self) -> None:
        """Prepare what the schedule needs, and refuse what it cannot run; here it does nothing."""

    @property
    def task(self) -> Task:
        """The task of the next round; after the last round, that of the last."""
        return self._find_task(self.next_round)

    def _find_task(self, index: int) -> Task:
        """Return the task with the data of a round."""
        return [task for first, task in self._tasks if first <= index][-1]

    def _begins_phase(self, index: int) -> bool:
        """Whether the clients' data change before a round."""
        return any(first == index for first, _ in self._tasks[1:])

    def _init_state(self, task: Task) -> State:
        """Return the state before the first round of the clients of a task."""
        state = check_returned_state(
            self.method,
            "init_state",
            self.method.init_state(task.for_round(self.rng), self.rng),
            task,
        )
        if self.settings.local.persistent_client_optimizer:
            tracks = self.method.tracks
            moments = task.trainer.init_optimizer_state(self.settings.local, tracks)
            state = dataclasses.replace(state, moments=moments)
        for extension in self.extensions:
            extension.start(task, self.rng, state.params)
        return state

    def check_translation(self, federation: Federation) -> tuple[str, ...]:
        """Compare what will train with the module in plain PyTorch, once in a run.

        Args:
            federation: the data from which the task was built.

        Returns:
            Lines about what is meant to differ, or was not compared; none where nothing was done.

        Raises:
            TranslationError: when something differs.
        """
        if not self.settings.check or self.translation:
            return ()
        found = check_translation(self.task, federation, self.settings.local, self.rng)
        self.translation = found.to_json()
        return found.lines

    def select_counted(self, ids: Int[Tensor, " clients"]) -> Bool[Tensor, " clients"]:
        """Return which clients count in results."""
        counted = torch.ones(len(ids), dtype=torch.bool)
        for extension in self.extensions:
            counted &= extension.select_counted(ids)
        return counted

    @property
    def computes_run_metrics(self) -> bool:
        """Whether this process hosts all clients, and so computes metrics of the whole run."""
        return len(self.task) == self.task.population

    @property
    def train_seconds(self) -> float:
        """Seconds spent in training so far."""
        return self.task.trainer.totals.seconds

    def gather_state(self) -> None:
        """Collect the state of clients that other processes host; here it does nothing."""

    def snapshot(self) -> dict[str, Tensor]:
        """Return what later rounds depend on in addition to the state, for a checkpoint."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `snapshot`."""

    def scatter_state(self) -> None:
        """Send restored state to the processes that host the clients; here it does nothing."""

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are done, or every client has stopped."""
        return self.next_round >= self.settings.rounds or (
            self.next_round >= 0 and bool(self.tracker.stopped.all())
        )

    @property
    def is_untrained(self) -> bool:
        """Whether every round so far was left out."""
        # Round -1, the warm-up, is not a round of training that could be left out.
        left_out = sum(last + 1 - max(first, 0) for first, last in self.skipped_rounds)
        return left_out > 0 and left_out >= self.next_round

    @property
    def num_alone(self) -> int:
        """Number of rounds in which no message arrived though some were needed."""
        return sum(last + 1 - first for first, last in self.alone_rounds)

    def skip_rounds(self, to: int) -> None:
        """Leave out rounds so that `to` is the next one; results mark them as not trained."""
        _add_rounds(self.skipped_rounds, self.next_round, to - 1)
        self.next_round = to

    def note_alone(self, round: int) -> None:
        """Note that no message arrived in a round that needed some; results mark it."""
        _add_rounds(self.alone_rounds, round, round)

    def run_next_round(self) -> None:
        """Do the warm-up or one round."""
        index = self.next_round
        if index < 0:
            self._warm_up()
        else:
            self._run_round(index)
        self.next_round += 1

    def _task_at(self, index: int) -> Task:
        """Return the task with the random streams with which it evaluates in a round."""
        return self._find_task(index).for_round(self.rng.at_round(index))

    def _make_round(self, index: int, rows: Tensor, cohort: Tensor) -> Round:
        # Reachable are the members of the cohort: the others publish nothing in this round.
        reachable = torch.zeros(self.task.population, dtype=torch.bool)
        reachable[cohort] = True
        # Views where all clients take part: the usual case copies no model.
        task, params = self._task_at(index), self.state.params
        if len(rows) < len(self.task):
            task, params = task.select_clients(rows), params[rows]
        exchange = narrow_exchange(self.exchange, task.sharing, params)
        rnd = Round(
            index=index,
            task=task,
            exchange=exchange,
            rng=self.rng.at_round(index),
            reachable=reachable,
            local=self.settings.local,
            order=self.order,
            metrics=frozenset(map(str, self.settings.metrics)),
            record_similarities=self.settings.record_similarities,
            acceptance=self.settings.acceptance_rules if self.method.server else None,
            sum_only=self.settings.secure_terms,
            note_refused=self._note_refused,
            sampling=self.settings.views_among(self.task.population),
        )
        for extension in self.extensions:
            rnd = extension.prepare_round(rnd, rows)
        return rnd

    def _warm_up(self) -> None:
        # The warm-up is round -1, with random streams of its own.
        rng, local = self.rng.at_round(-1), self.settings.warmup_training
        info: Info = {}
        # Methods that train first begin with the training of round 0.
        if (
            isinstance(self.method, PeerMethod)
            and self.order == "exchange_first"
            and (local.steps or local.epochs)
        ):
            before, task = self.state.params, self.task
            params, info, moments = task.train(before, rng, local, optimizer=self.state.moments)
            # The extensions see the training before the method does.
            for extension in self.extensions:
                extension.note_warm_up(task, before, params)
            new = self.method.remember_update(
                dataclasses.replace(self.state, params=params), before
            )
            self.state = dataclasses.replace(new, moments=moments)
        self.exchange.begin_round(rng)
        # Everybody takes part in the warm-up, whatever the participation.
        self._enroll(-1)
        self._finish_round(-1, torch.arange(len(self.task)), info)

    def _run_round(self, index: int) -> None:
        self.refused = {}
        rng = self.rng.at_round(index)
        self.exchange.begin_round(rng)
        if self._begins_phase(index):
            self._begin_phase(index)
        cohort = self._choose_cohort(rng)
        # A mask of the population, so that the order of a drawn cohort does not matter.
        taking = torch.zeros(self.task.population, dtype=torch.bool)
        taking[cohort] = True
        rows = (taking[self.task.ids] & ~self.tracker.stopped).nonzero().flatten()
        self.exchange.set_active(self.task.ids[rows])
        # Others may wait for this process even without active clients here: `skip_round` serves
        # them. In the server role the method does that, so it runs.
        if not len(rows) and not getattr(self.exchange, "server", False):
            self.exchange.skip_round(self.method.exchanges)
            self._finish_round(index, rows, {})
            return
        rnd = self._make_round(index, rows, cohort)
        # Without copies where all clients take part.
        part, whole = self.state, len(rows) == len(self.task)
        if not whole:
            part = self.state.select_rows(rows)
        new, info = self._apply_method(rnd, part)
        self._require_moments(part, new)
        for extension in self.extensions:
            info = extension.finish_round(rnd, rows, info)
        if not whole:
            new = self.state.replace_rows(rows, new)
        self.state = new
        self.record.add_edges(index, self.task.ids[rows], info)
        self._finish_round(index, rows, info)

    def _begin_phase(self, index: int) -> None:
        """Forget what was measured on the data that clients had before."""
        self.tracker = dataclasses.replace(
            self.tracker, best_loss=torch.full_like(self.tracker.best_loss, torch.inf)
        )
        self.validation = {}
        # A method that needs the planted clusters gets the new ones.
        if "truth" in self.method.needs:
            self._enroll(index)

    def _enroll(self, index: int) -> None:
        """Let all clients enroll in a round."""
        self.exchange.set_active(self.task.ids)
        rnd = self._make_round_of_all(index)
        self.state = check_returned_state(
            self.method, "enroll", self.method.enroll(rnd, self.state), self.task
        )

    def _make_round_of_all(self, index: int) -> Round:
        return self._make_round(
            index, torch.arange(len(self.task)), torch.arange(self.task.population)
        )

    def _require_moments(self, before: State, after: State) -> None:
        """Refuse a state that lost the optimizers' moments, which last from round to round."""
        if before.moments is not None and after.moments is None:
            raise ConfigError(
                f"local.persistent_client_optimizer is true, and {self.method.kind} returned a "
                "state without moments; train with rnd.train(state), and return what it returns"
            )

    def _choose_cohort(self, rng: Rng) -> Tensor:
        method, population = self.method, self.task.population
        # Peers need no common cohort when everybody takes part.
        if not method.server and self.settings.participation == 1:
            return torch.arange(population)

        def draw_cohort() -> Tensor:
            return method.select_cohort(
                self.state.shared, rng, population, self.settings.participation
            )

        if not method.server:
            return draw_cohort()
        return self.exchange.agree_on_cohort(draw_cohort)

    def _apply_method(self, rnd: Round, state: State) -> tuple[State, Info]:
        """Run the method's round for the clients that take part."""
        return check_returned_round(self.method, "round", self.method.round(rnd, state), rnd.task)

    def _finish_round(self, index: int, rows: Int[Tensor, " rows"], info: Info) -> None:
        """Evaluate the round's models, keep the best, stop clients that do not improve, record."""
        ids = self.task.ids
        if "train_samples" in info:
            self.train_samples += int(info["train_samples"].sum())
        self._record_info(index, ids[rows], info)
        self.tracker = self.tracker.note_changed(rows)
        # The last round is evaluated in any case: the final choice needs it. So are the first round
        # of a phase, from which on the best model is chosen, and the last, which is its result.
        last = index + 1 == self.settings.rounds
        begins, ends = self._begins_phase(index), self._begins_phase(index + 1)
        due = index < 0 or (index + 1) % self.settings.validate_every == 0
        if not (due or last or begins or ends):
            return
        params, extra = self._fetch_served_models(index)
        # Where a round ends with an exchange, the models before it are the ones to judge: they are
        # trained last
        trained = info.get("trained")
        judged = params
        if trained is not None and len(rows) == len(ids):
            judged = trained
        elif trained is not None:
            judged = params.index_copy(0, rows.to(params.device), trained)
        # A server serves every client after each round, so all are measured; of peers only the
        # ones that took part since the last evaluation have changed.
        measured = self.tracker.changed.clone()
        if self.method.server or begins:
            measured[:] = True
        if bool(measured.all()):
            values = self._task_at(index).evaluator.evaluate_split(judged, "validation")
            if last:
                self._validated = judged, values
        else:
            values = (
                self._task_at(index)
                .select_clients(measured.nonzero().flatten())
                .evaluator.evaluate_split(judged[measured], "validation")
            )
        for name, value in values.items():
            # NaN for a client that was never measured.
            known = self.validation.get(name, torch.full((len(ids),), torch.nan, dtype=value.dtype))
            self.validation[name] = known.masked_scatter(measured, value.cpu())
        unknown = self.task.count_samples("validation") == 0
        patience = self.settings.patience
        if self.method.server:  # whose clients do not stop by themselves
            patience = None
        before = self.tracker.stopped
        loss = self.validation[metrics.LOSS.name]
        self.tracker = self.tracker.observe(
            judged, loss, measured, unknown, patience, self.settings.validate_every
        )
        # Who stops repeats the extras of its last message, so it stops in a round that it is in.
        new = torch.zeros_like(before).index_fill(0, rows, True) & self.tracker.stopped & ~before
        self.tracker = dataclasses.replace(self.tracker, stopped=before | new)
        if bool(new.any()):
            # A stopped client publishes this model from now on.
            models = self.state.params
            if self.settings.stopped_broadcast == "best":
                models = self.tracker.best
            narrow_exchange(self.exchange, self.task.sharing, models).retire_clients(
                ids[new], models[new]
            )
        self._record_evaluation(index, params, extra)

    def _record_evaluation(self, index: int, params: Tensor, extra: Info) -> None:
        """Record how the models do now: on validation data, and where it is time on test sets."""
        ids = self.task.ids
        self.record.add_metrics(index, ids, "validation", "current", self.validation)
        self.record.add_metrics(index, ids, "train", "current", self._measure_clients())
        if (label := metrics.LABEL.name) in extra:
            self.record.add_metrics(index, ids, "train", "current", {label: extra[label]})
        every = self.settings.eval_every
        due = every and (index + 1) % every == 0 and index >= 0
        # Each phase has results of its own: the newest models after its first and its last round.
        begins, ends = self._begins_phase(index), self._begins_phase(index + 1)
        if len(self._tasks) > 1 and index + 1 == self.settings.rounds:
            ends = True
        if due or begins or ends:
            self.record.add_metrics(
                index, ids, "test", "current", self._evaluate_on_tests(index, params)
            )

    def _measure_clients(self) -> dict[str, Tensor]:
        """Return the metrics that extensions measure of each hosted client."""
        values: dict[str, Tensor] = {}
        for extension in self.extensions:
            values |= extension.measure_clients(self.task)
        return values

    def _record_info(self, index: int, ids: Tensor, info: Info) -> None:
        if not len(ids):
            return
        # What a server refused is recorded without a declaration of the method, as divergence is.
        known = {*self.recorded_metrics, metrics.REFUSED.name}
        kept = {name: value for name, value in info.items() if name in known}
        seen = self.select_counted(ids)
        # A report is NaN for a client that has nothing to report.
        self.mean_reports = {}
        for name, value in kept.items():
            self.mean_reports[name] = float(value[seen].double().nanmean())
        if kept:
            self.record.add_metrics(index, ids, "train", "current", kept)
        lost = info.get(name := metrics.DIVERGED.name)
        # That a model diverged is recorded without a declaration of the method.
        if lost is not None and bool(lost.any()):
            self.record.add_metrics(
                index, ids[lost], "train", "current", {name: torch.ones(int(lost.sum()))}
            )
            self._note_diverged(ids[lost])
        found = metrics.LABEL.name
        if found in info and not self.method.server and found not in self._undeclared:
            self._undeclared.add(found)
            warnings.warn(
                f"{self.method.kind} reports {found!r}, which is not recorded: a found cluster is "
                "known of methods with a server alone, whose `serving_model` returns it; give a "
                "metric of another name, declared in `reports` of its class",
                Undeclared,
                stacklevel=2,
            )
        # Each undeclared name is warned of once in a run.
        for key in sorted(
            set(info)
            - RESERVED_REPORT_KEYS
            - {metrics.DIVERGED.name, metrics.REFUSED.name}
            - self._undeclared
            - set(self.recorded_metrics)
        ):
            self._undeclared.add(key)
            warnings.warn(
                f"{self.method.kind} reports {key!r}, which is not recorded; declare it in "
                f'`reports` of its class: reports = (Metric({key!r}, "what it is"),)',
                Undeclared,
                stacklevel=2,
            )

    def _note_refused(self, refused: Mapping[int, str]) -> None:
        """Note whose messages the server left out in this round, and say it."""
        self.refused = dict(refused)
        # Said once of each client; every round counts it.
        for client in sorted(refused.keys() - self._ever_refused):
            name = format_client(self.record.client_names, client)
            warnings.warn(
                f"the server left out the message of {name} in round {self.next_round}: "
                f"{refused[client]}",
                ServerRefused,
                stacklevel=2,
            )
        self._ever_refused |= refused.keys()

    def _note_diverged(self, ids: Int[Tensor, " clients"]) -> None:
        """Leave the mean training loss undefined when the model of a counted client diverged."""
        if metrics.LOSS.name in self.mean_reports and bool(self.select_counted(ids).any()):
            self.mean_reports[metrics.LOSS.name] = math.nan

    def mean_validation(self) -> dict[str, float]:
        """Return the mean of each validation metric over the clients that count.

        Clients without validation data, and those whose data leave a metric undefined, are left
        out. A mean is NaN when the loss of a model is not finite: it diverged.
        """
        if not self.validation:
            return {}
        diverged = bool(self.diverged_on_validation.any())
        # Of a run in which a client diverged there is no mean: one over the others would hide it.
        if diverged:
            return dict.fromkeys(self.validation, math.nan)
        means = {}
        for name, value in self.validation.items():
            means[name] = float(value[self.counted].double().nanmean())
        return means

    @property
    def diverged_on_validation(self) -> Bool[Tensor, " clients"]:
        """Which counted clients have a model whose validation loss is not finite."""
        loss = self.validation.get(metrics.LOSS.name)
        if loss is None:
            return torch.zeros_like(self.counted)
        # The warm-up measures every client that has validation data.
        has_data = self.task.count_samples("validation") > 0
        return self.counted & has_data & ~loss.isfinite()

    def _fetch_served_models(self, index: int) -> tuple[Tensor, Info]:
        if not self.method.server:
            return self.state.params, {}
        return self.method.serving_model(self._make_evaluation_round(index), self.state)

    def newcomer_models(self, state: State | None = None) -> Float[Tensor, "clients params"]:
        """Return the models that newcomers in each client's cluster would get after the last round.

        Args:
            state: another state than that of the run, of the same clients.
        """
        rnd = self._make_evaluation_round(self.next_round - 1)
        return self.method.newcomer_model(rnd, self.state if state is None else state)

    def served_models(self) -> tuple[Float[Tensor, "clients params"], Info]:
        """Return the models that serve the clients now, and what the method reports of them."""
        return self._fetch_served_models(self.next_round - 1)

    def _make_evaluation_round(self, index: int) -> Round:
        """Return a round in which all clients ask the server, even outside the round's cohort."""
        population = torch.arange(self.task.population)
        # All clients ask for their model, not only the round's cohort.
        self.exchange.agree_on_cohort(lambda: population)
        self.exchange.set_active(self.task.ids)
        return self._make_round_of_all(index)

    def _evaluate_on_tests(self, index: int, params: Tensor) -> dict[str, Tensor]:
        """Return the metrics on the test sets, including the settings' extra metrics."""
        task, wanted = self._task_at(index), set(self.settings.metrics)
        balanced, prior = metrics.BALANCED_ACCURACY.name, metrics.TRAIN_PRIOR_ACCURACY.name
        overall = metrics.GLOBAL_ACCURACY.name
        accuracy = metrics.ACCURACY.name in task.engine.metrics and self.task.classes > 0
        if not accuracy or not wanted & {balanced, prior}:
            values = task.evaluate(params)
        else:
            values, recall, number = task.evaluator.evaluate_by_class(params)
            others = [one for one in task.evaluator.metrics if one.name != balanced]
            values |= task.evaluator.evaluate_metrics(params, others)
            if balanced in wanted:
                values[balanced] = recall.nanmean(1)
            if prior in wanted:
                weight = (self.task.class_counts() * number).to(recall)
                share = (weight * recall.nan_to_num()).sum(1) / weight.sum(1)
                # of a model without finite outputs no recall is known
                values[prior] = share.masked_fill(recall.isnan().all(1), torch.nan)
        self._note_undefined(values)
        if accuracy and overall in wanted and self.method.server:
            models = self.method.newcomer_model(self._make_evaluation_round(index), self.state)
            values[overall] = task.evaluator.accuracy_on_all_tests(models)
        return values

    def _note_undefined(self, values: Mapping[str, Tensor]) -> None:
        """Note why clients have no value of a metric, and which clients."""
        known = {**metrics.REGISTRY, **index_by_name(self.task.evaluator.metrics)}
        for name, value in values.items():
            entry = known[name]
            if entry.undefined and bool(value.isnan().any()):
                ids = self.task.ids[value.isnan().cpu()].tolist()
                who = format_clients(self.record.client_names, ids)
                if not self.record.client_names:
                    who = f"client {who}"
                self.undefined_reasons[name] = (
                    f"{entry.title} is undefined: {entry.undefined} ({who})"
                )

    def _compute_run_metrics(
        self, label: Tensor | None, tested: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the extra metrics of the whole run, from the final test of all clients."""
        wanted, values, seen = self.settings.metrics, {}, self.counted
        tested = {name: value.cpu()[seen] for name, value in tested.items()}
        if label is not None:
            label = label.cpu()[seen]
        if "reductions" in wanted and (name := metrics.ACCURACY.name) in tested:
            values |= final_metrics.compute_reductions(
                tested[name], self.task.data.count_test_samples()[seen], label
            )
        if "maxima" in wanted:
            clients = self.record.table_ids(self.task.ids[seen])
            values |= final_metrics.compute_maxima(self.record.metrics, clients)
        if "clusters" in wanted:
            planted = torch.from_numpy(
                self.record.find_clusters(self.next_round - 1)[
                    self.record.table_ids(self.task.ids[seen])
                ]
            )
            if label is not None:
                # -1 marks an unknown cluster: a comparison needs all of them.
                truth = None
                if bool((planted >= 0).all()):
                    truth = planted
                scores, reasons = final_metrics.explain_cluster_metrics(
                    label, truth, self.task.class_counts()[seen]
                )
                self.undefined_reasons |= reasons
                values |= {name: torch.full((len(label),), score) for name, score in scores.items()}
        for extension in self.extensions:
            values |= extension.measure_run(self.record)
        return values

    def evaluate_final(self) -> Float[Tensor, "clients params"]:
        """Evaluate each client's chosen model on its test set, once, and return the models."""
        last = self.next_round - 1
        model = "best" if self.settings.evaluate == "best_val" else "current"
        # Blocks gather these values; the driver computes from them.
        labeled = self.computes_run_metrics and bool(
            {"reductions", "clusters"} & set(self.settings.metrics)
        )
        served, known = (
            self._fetch_served_models(last)
            if model == "current" or labeled
            else (self.state.params, {})
        )
        params = self.tracker.best if model == "best" else served.contiguous()
        task = self._task_at(last)
        measured = {
            "test": self._evaluate_on_tests(last, params),
            "validation": self._validate_final(task, params),
        }
        for split, values in measured.items():
            # the round may have measured its current models already
            self.record.drop_metrics(last, split, model)
            self.record.add_metrics(last, self.task.ids, split, model, values)
        self.record.add_metrics(last, self.task.ids, "test", model, self._measure_clients())
        if self.computes_run_metrics:
            found = self._compute_run_metrics(known.get(metrics.LABEL.name), measured["test"])
            self.record.add_metrics(last, self.task.ids[self.counted], "test", model, found)
        self.evaluated_models = params
        return params

    def _validate_final(self, task: Task, params: Tensor) -> dict[str, Tensor]:
        """Return the validation of the final models, which the last round may have done already."""
        if self._validated is not None and torch.equal(self._validated[0], params):
            return self._validated[1]
        return task.evaluator.evaluate_split(params, "validation")


def _add_rounds(ranges: list[tuple[int, int]], first: int, last: int) -> None:
    """Add rounds to ranges of rounds; a range that follows the last one extends it."""
    if ranges and ranges[-1][1] == first - 1:
        first = ranges.pop()[0]
    ranges.append((first, last))
