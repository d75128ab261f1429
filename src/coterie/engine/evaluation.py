"""Evaluation of models on the hosted clients' data and on the test sets that serve them."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from coterie.engine._base import Engine, explain_module_errors
from coterie.engine._work import EvaluationPairs, RawSamples, first_equal_rows
from coterie.engine.client_data import ClientData
from coterie.errors import ConfigError
from coterie.exchange.base import Inbox
from coterie.functional import metrics
from coterie.functional.losses import Loss
from coterie.functional.metrics import Metric, Undefined
from coterie.functional.scores import Form
from coterie.functional.similarity import (
    NO_CLASS,
    agree_on_predictions,
    check_predicts_classes,
    predict_classes,
)
from coterie.models.layout import Layout
from coterie.models.part import ParameterSharing
from coterie.rng import Rng

# 64 MB in float32: each pair has a whole model of its own then.
# numbers of received models that are completed with the receiver's own columns at once
_MAX_COMPLETED_ENTRIES = 1 << 24


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates models of clients. No random draw of a run is made; those of models have own keys.

    Args:
        data: the clients.
        layout: how models lie in rows.
        loss: what is minimized.
        metrics: what `evaluate` measures in addition to the loss and the metric that goes with it.
        form: of the module's outputs and the targets, see `functional.scores`.
        engine: computes the outputs.
        block: models that are run at once.
        rng: the streams of the round, which decide the noise on inputs and what models draw.
        cache: by split, the models that were scored last with `keep`, and their losses, NaN for
            unknown ones; all views of these data share it.
    """

    data: ClientData
    layout: Layout
    loss: Loss
    metrics: Sequence[Metric]
    form: Form
    engine: Engine
    block: int
    rng: Rng = field(default_factory=lambda: Rng(0))
    cache: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    # ------------------------------------------------------------------ on the clients' own data

    def evaluate_split(
        self, params: Float[Tensor, "clients params"], split: str
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return the loss of each client's model on its own data, and the metric of the loss.

        Args:
            params: the models.
            split: which of the client's samples; NaN for a client without any.
        """
        everybody = torch.arange(len(self.data))
        return self._evaluate_pairs(params, everybody, everybody, split)

    def sample_losses(
        self, params: Float[Tensor, "clients params"]
    ) -> Float[Tensor, "clients samples"]:
        """Return each client's loss on each training sample, on the CPU; NaN after its last one."""
        samples, indices = self.data.samples, self.data.sample_indices("train")
        counts, everybody = self.data.count_samples("train"), torch.arange(len(self.data))
        keys = self._draw_keys("train")
        pairs = EvaluationPairs(samples, indices, counts, everybody, everybody, draw_keys=keys)
        found = torch.full(indices.shape, torch.nan, dtype=self.layout.dtype)
        # Each set has one pair, so that `outputs` has one row.
        for client, _, outputs in self._iterate_outputs(params, pairs):
            count = int(counts[client])
            targets = samples.prepare_targets(indices[client, :count])
            found[client, :count] = self.loss(outputs[0], targets).to(found)
        return found

    def score(
        self, inbox: Inbox, split: str = "train", *, keep: bool = False
    ) -> Float[Tensor, "clients peers"]:
        """Return the mean loss of each received model on the receiver's data; see `Task.score`."""
        out = torch.full(inbox.mask.shape, torch.inf, dtype=self.layout.dtype)
        clients, slots = inbox.mask.nonzero(as_tuple=True)
        if not len(clients):
            return out
        models = inbox.index[clients, slots]
        if inbox.part is not None and inbox.own is not None:
            losses = self._score_completed(
                inbox.part, inbox.own, inbox.table, models, clients, split
            )
        # Noise on inputs, and what models draw, is another in every round, so that no loss holds
        # for the next one.
        elif keep and self.data.federation.noise is None and not self.layout.draws[False]:
            losses = self._score_cached(inbox.table, models, clients, split)
        else:
            losses = self._score_pairs(inbox.table, models, clients, split)
        out[clients, slots] = losses
        return out

    def measure_agreement(
        self, own: Float[Tensor, "clients params"], inbox: Inbox, split: str
    ) -> Float[Tensor, "clients peers"]:
        """Return how far received models predict the same; see `Task.measure_agreement`."""
        out = torch.zeros(inbox.mask.shape, dtype=torch.float64)
        clients, slots = inbox.mask.nonzero(as_tuple=True)
        samples, indices = self.data.samples, self.data.sample_indices(split)
        counts, form = self.data.count_samples(split), self.form
        # Client by client: what two models predict depends on no other client, and few outputs are
        # in memory at a time.
        for client in clients.unique().tolist():
            received = inbox.table[inbox.index[client, slots[clients == client]].to(own.device)]
            mine = own[client : client + 1]
            if inbox.part is not None:
                received = inbox.part.keep_local(mine.expand(len(received), -1), received)
            models = torch.arange(1 + len(received))
            pairs = EvaluationPairs(
                samples, indices, counts, models, torch.full_like(models, client),
                self.data.input_noise(self.rng, "noise"), self._draw_keys(split),
            )  # fmt: skip
            table = torch.cat([mine, received])
            outputs = list[Tensor]()
            for _, _, part in self._iterate_outputs(table, pairs):
                outputs.extend(part)
            if not outputs:  # of a client without samples
                continue
            targets = samples.prepare_targets(indices[client, : int(counts[client])])
            forms = [self.loss.to_metric_form(one, targets) for one in outputs]
            first = forms[0][0]
            values = [agree_on_predictions(form, first, one, known) for one, known in forms[1:]]
            out[client, slots[clients == client]] = torch.tensor(values, dtype=torch.float64)
        # A model that is not finite agrees with none.
        return torch.nan_to_num(out, nan=0.0)

    def predict_public(
        self, params: Float[Tensor, "clients params"]
    ) -> Int[Tensor, "clients predictions"]:
        """Return the classes that models predict for the public set; see `Task.predict_public`."""
        public, form = self._require_public(), self.form
        check_predicts_classes("public_agreement", form)
        everything, models = torch.arange(len(public))[None], torch.arange(len(params))
        keys = None
        if self.layout.draws[False]:
            key = int(self.rng.generator("draws.public").integers(1 << 62))
            keys = torch.full((1,), key, device=params.device)
        pairs = EvaluationPairs(
            public, everything, torch.tensor([len(public)]), models, torch.zeros_like(models),
            None, keys,
        )  # fmt: skip
        targets = public.prepare_targets(everything[0])
        out = torch.full((len(params), self.count_predictions()), NO_CLASS, dtype=torch.int32)
        for _, part, outputs in self._iterate_outputs(params, pairs):
            for model, own in zip(part.tolist(), outputs, strict=True):
                found = predict_classes(form, *self.loss.to_metric_form(own, targets))
                out[model] = found.flatten().to(out)
        return out

    def count_predictions(self) -> int:
        """Return how many classes a model predicts for the public set."""
        targets = self._require_public().y
        if self.form == "positions":
            # of one class, since a form may leave out some of the positions
            one = targets[:, None] if self.loss.class_axis == 1 else targets[..., None]
            targets = self.loss.to_metric_form(one, targets)[1]
        return targets.numel()

    def _require_public(self) -> RawSamples:
        if self.data.public is None:
            raise ConfigError(
                "similarity 'public_agreement' compares predictions for a public set, and these "
                "data have none; give them one by Federation.with_public_set, or take 'agreement'"
            )
        return self.data.public

    def _score_pairs(
        self, table: Tensor, models: Tensor, clients: Tensor, split: str
    ) -> Float[Tensor, " pairs"]:
        return self._evaluate_pairs(table, models, clients, split)[metrics.LOSS.name]

    def _score_completed(
        self,
        sharing: ParameterSharing,
        own: Tensor,
        table: Tensor,
        models: Tensor,
        clients: Tensor,
        split: str,
    ) -> Float[Tensor, " pairs"]:
        """Score received parts of models, completed with the receiver's own columns."""
        losses = []
        size = max(1, _MAX_COMPLETED_ENTRIES // table.shape[1])
        for pairs in torch.arange(len(models)).split(size):
            received = table[models[pairs].to(table.device)]
            # Each pair gets a model of its own: the part of the sender, the rest of the receiver.
            completed = sharing.keep_local(own[clients[pairs].to(own.device)], received)
            rows = torch.arange(len(pairs))
            losses.append(self._score_pairs(completed, rows, clients[pairs], split))
        return torch.cat(losses)

    def _score_cached(
        self, table: Tensor, models: Tensor, clients: Tensor, split: str
    ) -> Float[Tensor, " pairs"]:
        """Score models that are not in the cache, which has the losses of one table a split."""
        known = self.cache.get(split)
        # One table is kept for a split: a single model that differs drops all losses.
        if known is None or not torch.equal(known[0], table):
            # A row for every client of the federation, since views of other clients share the
            # cache.
            shape = len(self.data.federation), len(table)
            known = table.clone(), torch.full(shape, torch.nan, dtype=self.layout.dtype)
            self.cache[split] = known
        rows, losses = self.data.rows[clients], known[1]
        new = losses[rows, models].isnan()
        if bool(new.any()):
            losses[rows[new], models[new]] = self._score_pairs(
                table, models[new], clients[new], split
            )
        return losses[rows, models]

    def _evaluate_pairs(
        self,
        table: Float[Tensor, "models params"],
        models: Int[Tensor, " pairs"],
        clients: Int[Tensor, " pairs"],
        split: str,
    ) -> dict[str, Float[Tensor, " pairs"]]:
        """Evaluate pairs of a row of the table and a client on the client's own data."""
        pairs = EvaluationPairs(
            self.data.samples,
            self.data.sample_indices(split),
            self.data.count_samples(split),
            models,
            clients,
            self.data.input_noise(self.rng, "noise"),
            self._draw_keys(split),
        )
        values = self._measure_pairs(table, pairs)
        if self.loss.kind == self.loss.metric:  # both have the same value
            return {metrics.LOSS.name: values[metrics.LOSS.name]}
        return values

    # ------------------------------------------------------------------ on test sets

    def evaluate(
        self, params: Float[Tensor, "clients params"]
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return each client's metrics on the test set that serves it; see `Task.evaluate`."""
        out = self._undefined_by_sample()
        for number, _, rows, models, which in self._iterate_test_sets(params):
            pairs = self._pair_with_test_set(number, models)
            for name, value in self._measure_pairs(params, pairs).items():
                out[name][rows] = value[which]
        return {**out, **self.evaluate_metrics(params, self.metrics)}

    def evaluate_metrics(
        self, params: Float[Tensor, "clients params"], wanted: Sequence[Metric]
    ) -> dict[str, Float[Tensor, " clients"]]:
        """Return metrics of each client's outputs for all samples of the test set that serves it.

        Args:
            params: the models.
            wanted: the metrics; NaN where one is not defined, and for a test set without samples.
        """
        out = {metric.name: self._all_undefined() for metric in wanted}
        if not wanted:
            return out
        for number, test, rows, models, which in self._iterate_test_sets(params):
            undefined = torch.full((len(models),), torch.nan, dtype=self.layout.dtype)
            values = {metric.name: undefined.clone() for metric in wanted}
            pairs = self._pair_with_test_set(number, models)
            targets = test.prepare_targets(torch.arange(len(test)))
            for _, part, outputs in self._iterate_outputs(params, pairs):
                for pair, own in zip(part.tolist(), outputs, strict=True):
                    for metric in wanted:
                        values[metric.name][pair] = self._apply_metric(metric, own, targets)
            for name, value in values.items():
                out[name][rows] = value[which]
        return out

    def evaluate_by_class(
        self, params: Float[Tensor, "clients params"]
    ) -> tuple[dict[str, Tensor], Float[Tensor, "clients classes"], Int[Tensor, "clients classes"]]:
        """Return the loss and its metric, from one pass over the samples of each class.

        They equal those of `evaluate` up to the rounding of the loss, and to what a module draws in
        evaluation. With them the recall of each
        class on the test set that serves each client, NaN for a class without samples, and how
        many samples it has.
        """
        clients, classes = len(self.data), self.data.federation.classes
        values = self._undefined_by_sample()
        recall = torch.full((clients, classes), torch.nan, dtype=self.layout.dtype)
        counts = torch.zeros(clients, classes, dtype=torch.int64)
        for number, test, rows, models, which in self._iterate_test_sets(params):
            labels = self.data.federation.tests[number].y.to(torch.int64)
            present, size = labels.unique(return_counts=True)
            # one set of samples for each class
            by_class = torch.argsort(labels, stable=True).split(size.tolist())
            indices = torch.nn.utils.rnn.pad_sequence(list(by_class), batch_first=True)
            # Each model with each class, the classes innermost.
            pairs = EvaluationPairs(
                test,
                indices,
                size,
                models.repeat_interleave(len(present)),
                torch.arange(len(present)).repeat(len(models)),
                self.data.test_noise(self.rng, number, len(present)),
                self._test_draw_keys(number, len(present)),
            )
            means = {}
            for name, value in self._measure_pairs(params, pairs).items():
                means[name] = value.reshape(len(models), len(present))
            # `which` gives each client the row of its model among the different ones.
            recall[rows[:, None], present] = means[metrics.ACCURACY.name][which]
            counts[rows[:, None], present] = size
            for name in values:
                # Means times sizes are sums again, in float64 so that the detour costs no digit.
                sums = means[name].double() * size
                if name == metrics.ACCURACY.name:  # numbers of right answers are whole
                    sums = sums.round()
                values[name][rows] = (sums.sum(1) / len(test)).to(self.layout.dtype)[which]
        # A model without finite outputs on one class has no recall of any: means over the others
        # would hide that it diverged.
        recall[values[metrics.LOSS.name].isnan()] = torch.nan
        return values, recall, counts

    def accuracy_on_all_tests(
        self, models: Float[Tensor, "clients params"]
    ) -> Float[Tensor, " clients"]:
        """Return the accuracy of each model on all test sets together; equal ones run once."""
        chosen, which = first_equal_rows(models).unique(return_inverse=True)
        right, total = torch.zeros(len(chosen), dtype=self.layout.dtype), 0
        for number, test in enumerate(self.data.tests):
            values = self._measure_pairs(models, self._pair_with_test_set(number, chosen))
            right += values[metrics.ACCURACY.name] * len(test)
            total += len(test)
        return (right / total)[which]

    def _undefined_by_sample(self) -> dict[str, Tensor]:
        """Return NaN for each client, and for each metric that the engine measures by samples."""
        return {name: self._all_undefined() for name in self.engine.metrics}

    def _all_undefined(self) -> Float[Tensor, " clients"]:
        return torch.full((len(self.data),), torch.nan, dtype=self.layout.dtype)

    def _iterate_test_sets(
        self, params: Tensor
    ) -> Iterator[tuple[int, RawSamples, Tensor, Tensor, Tensor]]:
        """Give each test set with the different models to evaluate on it.

        Args:
            params: the models of all clients; equal ones are evaluated once on each test set.

        Yields:
            The number of the test set, the set, the rows of the clients that it serves, rows of
            `params` with different models of theirs, and which of these each client has.
        """
        serves = self.data.test_set_numbers
        same = first_equal_rows(params)
        for number, test in enumerate(self.data.tests):
            rows = (serves == number).nonzero().flatten()
            models, which = same[rows].unique(return_inverse=True)
            yield number, test, rows, models, which

    def _pair_with_test_set(self, number: int, models: Int[Tensor, " models"]) -> EvaluationPairs:
        """Return the pairs of some models and a whole test set."""
        test = self.data.tests[number]
        # One set, which all of the models are measured on.
        everything, size = torch.arange(len(test))[None], torch.tensor([len(test)])
        noise = self.data.test_noise(self.rng, number, 1)
        keys = self._test_draw_keys(number, 1)
        return EvaluationPairs(
            test, everything, size, models, torch.zeros_like(models), noise, keys
        )

    def _draw_keys(self, split: str) -> Tensor | None:
        """Return the keys of what models draw on each client's data; None where they do not."""
        if not self.layout.draws[False]:
            return None
        return self.data.draw_keys(self.rng, f"draws.{split}")

    def _test_draw_keys(self, number: int, sets: int) -> Tensor | None:
        if not self.layout.draws[False]:
            return None
        return self.data.test_draw_keys(self.rng, number, sets)

    def _apply_metric(self, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
        """Return a metric of one model's outputs."""
        # The outputs of the module, since a form may keep only some of them.
        if not bool(torch.isfinite(outputs).all()):
            return math.nan
        given = self.loss.metric_inputs(metric, outputs, targets)
        if not metric.each:
            given = (given[0].cpu(), given[1].cpu())
        with warnings.catch_warnings():
            # the value is NaN, and the run says why
            warnings.simplefilter("ignore", Undefined)
            return metric(*given)

    # ------------------------------------------------------------------ by the engine

    def _measure_pairs(self, table: Tensor, pairs: EvaluationPairs) -> dict[str, Tensor]:
        with explain_module_errors("in evaluation"):
            zeros = self.layout.zero_inputs(len(table))
            return self.engine.measure_pairs(table, pairs, zeros, self.block)

    def _iterate_outputs(
        self, table: Tensor, pairs: EvaluationPairs
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        zeros = self.layout.zero_inputs(len(table))
        with explain_module_errors("in evaluation"):
            yield from self.engine.iterate_outputs(table, pairs, zeros, self.block)
