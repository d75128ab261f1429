"""Metrics: the registry of what is measured, and formulas over clients, clusters and runs.

A metric is one `Metric`: its name, unit and direction, where it is shown, and how it is computed if
it is computed from outputs and targets. The code refers to it as an attribute of this module
(`metrics.ACCURACY`) or finds it by the name in a table (`REGISTRY[name]`). A method adds its own
metrics in `Method.reports`; a custom metric of outputs and targets is found by its import path
(`find_metric`). A value that is not defined for its arguments is NaN, never 0, and a warning of
class `Undefined` names the reason.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie._util.importing import check_arguments, import_object, parse_kind
from coterie._util.settings import Configurable, parse_settings
from coterie.errors import ConfigError, require
from coterie.functional import scores
from coterie.functional.scores import Form, warn_undefined
from coterie.functional.scores import Undefined as Undefined

Better = Literal["higher", "lower"]
Over = Literal["client", "run"]
Shown = Literal["result", "further", "curve", "cost", "not"]


@dataclass(frozen=True)
class Metric(Configurable):
    """What the values of one name are, how they are shown, and how outputs give them.

    Args:
        name: in tables and study files: small letters, digits and underscores.
        text: a description in one line.
        title: in headings and on axes; the name with spaces when empty.
        short: heading of a narrow column; the title when empty.
        better: which values are better; None where neither is.
        unit: the unit of a shown value, such as "%"; empty for a plain number.
        scale: the factor from a value to its unit.
        digits: decimals of a shown value, of which narrow tables show one at most; None for four
            significant digits.
        over: "client": a value of each client, averaged over clients and over clusters; "run": one
            value of the whole run (or round), the same at every client.
        shown: "result": in the tables that compare methods; "further": in tables next to them;
            "curve": over rounds only; "cost": as a cost of the run; "not".
        on_samples: whether it is measured on the samples of a split, which headings then name
            ("test accuracy"). Every metric with a `function` is.
        undefined: why a client may have no value.
        on_request: whether a run measures it only if `Settings.metrics` names it. Every metric with
            a `function` can be named too.
        function: (outputs, targets) -> one number for all samples of a set or, with `each`, one a
            sample; NaN with a warning of class `Undefined` where there is none. None for a metric
            that is not computed from outputs.
        each: whether `function` gives a value of each sample, whose mean over samples is the
            metric. It is then computed in batches, on the device of the model; otherwise it gets
            all outputs of a set, on the CPU.
        takes: the forms of outputs and targets that `function` takes, see `functional.scores`;
            empty for a function that takes those of the module and of the data as they are.
        least: the smallest possible value; None where there is no limit.
        most: the largest.
        path: the import path under which it was found, if it is not built in.
    """

    name: str
    text: str = ""
    title: str = ""
    short: str = ""
    better: Better | None = None
    unit: str = ""
    scale: float = 1.0
    digits: int | None = None
    over: Over = "client"
    shown: Shown = "further"
    on_samples: bool = False
    undefined: str = ""
    on_request: bool = False
    function: Callable[..., Any] | None = None
    each: bool = False
    takes: Sequence[Form] = ()
    least: float | None = None
    most: float | None = None
    path: str = ""

    def check(self) -> None:
        """Check that the name can be a key, and fill in what follows from other fields."""
        fits = re.fullmatch("[a-z][a-z0-9_]*", self.name) is not None
        require(fits, "name of a metric", self.name, "small letters, digits and underscores")
        # The dataclass is frozen: derived defaults are written past it, once.
        object.__setattr__(self, "title", self.title or self.name.replace("_", " "))
        object.__setattr__(self, "short", self.short or self.title)
        object.__setattr__(self, "on_samples", self.on_samples or self.function is not None)

    @property
    def sign(self) -> int:
        """1 where higher is better, -1 where lower is, 0 where neither."""
        return {"higher": 1, "lower": -1, None: 0}[self.better]

    def heading(self, split: str = "") -> str:
        """Return the title with its unit, and the split where it is measured on one.

        Example:
            >>> ACCURACY.heading("test"), N_CLUSTERS.heading("test")
            ('test accuracy in %', 'number of clusters')
        """
        title = self.title
        if self.on_samples and split:
            title = f"{split} {title}"
        if self.unit:
            title += f" in {self.unit}"
        return title

    def format_value(
        self, value: float | None, *, brief: bool = False, signed: bool = False
    ) -> str:
        """Format a value in its unit, without the unit; a dash for None, NaN and infinity.

        Args:
            value: as it is stored.
            brief: one decimal at most, for narrow tables.
            signed: with a plus where it is above 0.

        Example:
            >>> ACCURACY.format_value(0.63754), LOSS.format_value(12.3456)
            ('63.75', '12.35')
            >>> ACCURACY.format_value(0.1, brief=True, signed=True)
            '+10.0'
        """
        if value is None or not math.isfinite(value):
            return "–"
        digits = ".4g"
        if self.digits is not None:
            digits = f".{self.digits}f"
        if self.digits is not None and brief:
            # A brief cell has one decimal at most: tables of many columns stay on a page.
            digits = f".{min(self.digits, 1)}f"
        if signed:
            digits = f"+{digits}"
        return format(self.scale * value, digits)

    def to_record(self) -> dict[str, Any]:
        """Return the fields that say how values are shown: what can be stored and sent."""
        return {name: getattr(self, name) for name in _SHOWN_FIELDS}

    def measure_samples(
        self,
        outputs: Shaped[Tensor, "samples *outputs"],
        targets: Shaped[Tensor, "samples *targets"],
    ) -> Float[Tensor, " samples"]:
        """Return the value of each sample; for metrics with `each`.

        It is NaN where an output of the sample is NaN or infinite.

        Raises:
            ConfigError: when the function returns something else.
        """
        assert self.function is not None
        found = self.function(outputs, targets)
        if not isinstance(found, Tensor) or found.shape != (len(outputs),):
            raise ConfigError(
                f"metric {self.path or self.name!r} returned {_describe_value(found)} "
                f"for {len(outputs)} samples; expected one value a sample, as a tensor: "
                "take the mean over all other axes, and return it"
            )
        return found + scores.mark_not_finite(outputs)

    def __call__(
        self,
        outputs: Shaped[Tensor, "samples *outputs"],
        targets: Shaped[Tensor, "samples *targets"],
    ) -> float:
        """Return the metric of a set, by its `function`.

        Args:
            outputs: of the module for all samples of the set, in a form of `takes`.
            targets: in that form.

        Returns:
            NaN, with a warning of class `Undefined`, for a set without samples, where an output is
            NaN or infinite, or where the function warns so.

        Raises:
            ConfigError: when the function returns no number.
        """
        if not len(outputs):
            return warn_undefined(f"the {self.title}", "there are no samples")
        if not bool(torch.isfinite(outputs).all()):
            return warn_undefined(f"the {self.title}", "an output is not finite")
        if self.each:
            return float(self.measure_samples(outputs, targets).double().mean())
        assert self.function is not None
        # Formulas of whole sets run on the CPU: some are those of scikit-learn.
        found = self.function(outputs.detach().cpu(), targets.cpu())
        try:
            return float(found)
        # float() raises RuntimeError or ValueError for a tensor of several numbers.
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"metric {self.path or self.name!r} returned {_describe_value(found)}; "
                "expected one number for all samples together: return it "
                "(a value of each sample needs Metric(..., each=True))"
            ) from None


# Stored records and reports hold these fields. The others say how a run computes values, which a
# reader of its results has no use for, and a function cannot be stored.
_COMPUTING_FIELDS = {"on_request", "function", "each", "takes", "least", "most", "path"}
_SHOWN_FIELDS = tuple(one.name for one in fields(Metric) if one.name not in _COMPUTING_FIELDS)


def _describe_value(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    return repr(found)


class Metrics(dict[str, Metric]):
    """Metrics by name; an undeclared name is a plain number that is in no table of results."""

    def __missing__(self, name: str) -> Metric:
        return Metric(name)

    def choose_main(self, names: Iterable[str]) -> str:
        """Return the name by which methods are compared: the first of `MAIN` that a run has.

        The first of all its names where it has none of `MAIN`.
        """
        names = list(names)
        return next((one.name for one in MAIN if one.name in names), names[0])

    def add_stored(self, stored: Mapping[str, Mapping[str, Any]]) -> "Metrics":
        """Return these metrics and the stored ones of a run, see `metrics_to_store`.

        Raises:
            ConfigError: when an entry is no metric.
        """
        found = {}
        for name, entry in stored.items():
            # a later version may store further fields, an earlier one stored `needs`
            known = {key: value for key, value in entry.items() if key in _SHOWN_FIELDS}
            metric = parse_settings(Metric, known, name)
            found[metric.name] = metric
        # A definition of the code wins over a stored one of the same name.
        return Metrics({**found, **self})


def metrics_to_store(metrics: Iterable[Metric]) -> dict[str, dict[str, Any]]:
    """Return the records of metrics that are not built in, as plain values.

    A run stores them, so that its results can be shown where the metrics are not installed.
    """
    records = {one.name: one.to_record() for one in metrics if one.name not in REGISTRY}
    for name, record in records.items():
        # Without what is unset, so that records of runs do not grow with fields that few metrics
        # have.
        records[name] = {key: value for key, value in record.items() if value is not None}
    return records


_SHARE = {"least": 0.0, "most": 1.0}


def _share_metric(name: str, text: str, **more: Any) -> Metric:
    """Return a metric that is a share of samples, shown in per cent."""
    shown = {"better": "higher", "unit": "%", "scale": 100.0, "digits": 2, "on_samples": True}
    return Metric(name, text, **{**shown, **more})


def _number_metric(
    name: str, text: str, better: Better, undefined: str = "", **more: Any
) -> Metric:
    """Return a metric of outputs that is shown as a plain number."""
    return Metric(name, text, better=better, undefined=undefined, **more)


def _cost_metric(name: str, text: str, title: str, unit: str = "") -> Metric:
    return Metric(name, text, title, unit=unit, better="lower", shown="cost")


def _derive(base: Metric, **changes: Any) -> Metric:
    """Return a metric that is shown as another one, and is not computed from outputs itself."""
    # Limits go too: they are those of the computed value.
    computed = {"function": None, "each": False, "takes": (), "least": None, "most": None}
    return replace(base, **{**computed, "on_request": False, **changes})


def _maximum_of(base: Metric, short: str) -> Metric:
    text = (
        f"{base.text}, in the round with the largest mean over clients; on test data, so optimistic"
    )
    return _derive(
        base,
        name=f"{base.name}_max",
        text=text,
        title=f"largest {base.title}",
        short=short,
        shown="further",
    )


def _reduction_of_accuracy(how: str, words: str, short: str) -> Metric:
    return _derive(
        ACCURACY,
        name=f"{ACCURACY.name}_{how}",
        text=f"final accuracy of the whole federation, clients weighed {words}",
        title=f"accuracy weighed {words}",
        short=short,
        over="run",
        shown="further",
    )


# Of the samples of a split.
ACCURACY = _share_metric(
    "accuracy",
    "share of samples whose class is predicted",
    shown="result",
    function=scores.accuracy,
    each=True,
    takes=("class",),
    **_SHARE,
)
MSE = Metric(
    "mse",
    "mean squared error",
    "mean squared error",
    "MSE",
    "lower",
    shown="result",
    function=scores.squared_error,
    each=True,
    takes=("numbers",),
    least=0.0,
)
LABEL_ACCURACY = _share_metric(
    "label_accuracy",
    "share of right answers, yes or no, over samples and labels",
    function=scores.label_accuracy,
    each=True,
    takes=("labels",),
    **_SHARE,
)
TOKEN_ACCURACY = _share_metric(
    "token_accuracy",
    "share of positions whose class is predicted, sample by sample",
    function=scores.position_accuracy,
    each=True,
    takes=("positions",),
    **_SHARE,
)
EXACT_MATCH = _share_metric(
    "exact_match",
    "share of samples all of whose positions are predicted",
    function=scores.exact_match,
    each=True,
    takes=("positions",),
    **_SHARE,
)
PIXEL_ACCURACY = _share_metric(
    "pixel_accuracy",
    "share of pixels whose class is predicted, sample by sample",
    function=scores.position_accuracy,
    each=True,
    takes=("positions",),
    **_SHARE,
)
IOU = _share_metric(
    "iou",
    "intersection over union of predicted and true pixels, the mean over classes",
    title="intersection over union",
    short="IoU",
    undefined="no pixel of a client counts",
    function=scores.iou,
    takes=("positions",),
    **_SHARE,
)
AUROC = _number_metric(
    "auroc",
    "area under the ROC curve, of more than two classes or of labels the mean over them",
    "higher",
    "no class is that of some test samples of a client and not of others",
    title="AUROC",
    function=scores.auroc,
    takes=("class", "labels"),
    **_SHARE,
)
AVERAGE_PRECISION = _number_metric(
    "average_precision",
    "average precision, of more than two classes or of labels the mean over them",
    "higher",
    "no test sample of a client is a yes",
    function=scores.average_precision,
    takes=("class", "labels"),
    **_SHARE,
)
F1 = _number_metric(
    "f1",
    "F1, the mean over classes or labels",
    "higher",
    "neither targets nor predictions of a client have a yes",
    title="F1",
    function=scores.f1,
    takes=("class", "labels"),
    **_SHARE,
)
CALIBRATION_ERROR = _number_metric(
    "calibration_error",
    "expected calibration error of the predicted class, in 15 bins",
    "lower",
    "an output is not finite",
    short="ECE",
    function=scores.calibration_error,
    takes=("class",),
    **_SHARE,
)
BRIER = _number_metric(
    "brier",
    "Brier score: squared error of probabilities",
    "lower",
    title="Brier score",
    short="Brier",
    function=scores.brier,
    each=True,
    takes=("class", "labels"),
    least=0.0,
    # The worst: all of the probability on a wrong class, 1 for that class and 1 for the right one.
    most=2.0,
)
PERPLEXITY = _number_metric(
    "perplexity",
    "exponential of the mean cross-entropy of positions",
    "lower",
    "no position of a client counts",
    function=scores.perplexity,
    takes=("positions",),
    # The exponential of a loss that is never negative.
    least=1.0,
)
MAE = _number_metric(
    "mae",
    "mean absolute error",
    "lower",
    title="mean absolute error",
    short="MAE",
    function=scores.absolute_error,
    each=True,
    takes=("numbers",),
    least=0.0,
)
R2 = _number_metric(
    "r2",
    "coefficient of determination: 1 for perfect outputs, 0 for outputs that are the mean of the "
    "targets",
    "higher",
    "the test targets of a client do not vary",
    title="R²",
    function=scores.r2,
    takes=("numbers",),
    most=1.0,
)
CONCORDANCE = _number_metric(
    "concordance",
    "Harrell's C: share of the comparable pairs whose order in time the outputs have right",
    "higher",
    "no event of a client's test set comes before another time",
    function=scores.concordance,
    takes=("times",),
    **_SHARE,
)
LOSS = Metric(
    "loss", "mean of the objective over samples", better="lower", shown="result", on_samples=True
)
BALANCED_ACCURACY = _share_metric(
    "balanced_accuracy",
    "mean recall of the classes in the client's test set",
    short="balanced",
    undefined="a client has no test samples",
    on_request=True,
    function=scores.balanced_accuracy,
    takes=("class",),
    **_SHARE,
)
TRAIN_PRIOR_ACCURACY = _share_metric(
    "train_prior_accuracy",
    "accuracy with samples weighed by their class's share of the client's training data",
    title="train-prior accuracy",
    short="train-prior",
    undefined="no test sample of a client has a class of its training data",
    on_request=True,
)
GLOBAL_ACCURACY = _share_metric(
    "global_accuracy",
    "accuracy of the model for everybody (or for the client's cluster) on all test sets together",
    short="global",
    on_request=True,
)
# Of a whole run.
ACCURACY_MAX = _maximum_of(ACCURACY, "max")
BALANCED_ACCURACY_MAX = _maximum_of(BALANCED_ACCURACY, "balanced max")
GLOBAL_ACCURACY_MAX = _maximum_of(GLOBAL_ACCURACY, "global max")
ACCURACY_SAMPLE_WEIGHTED = _reduction_of_accuracy(
    "sample_weighted", "by test samples", "by samples"
)
ACCURACY_CLUSTER_THEN_CLIENT = _reduction_of_accuracy(
    "cluster_then_client", "cluster by cluster", "by cluster"
)
STD_OVER_CLUSTERS = _derive(
    ACCURACY,
    name="std_over_clusters",
    text="population deviation of the accuracies of the planted clusters",
    title="deviation over clusters",
    short="",
    better="lower",
    over="run",
    shown="not",
)
# Of the clusters that a method found.
N_CLUSTERS = Metric(
    "n_clusters", "clusters that the method found", "number of clusters", "clusters", over="run"
)
RAND = Metric(
    "rand", "Rand index of found and planted clusters", "Rand index", "Rand", "higher", over="run"
)
ADJUSTED_RAND = Metric(
    "adjusted_rand",
    "Rand index adjusted for chance",
    "adjusted Rand index",
    "adj. Rand",
    "higher",
    over="run",
)
WAS = Metric(
    "was",
    "Wasserstein adjusted silhouette of the found clusters",
    "WAS",
    "WAS",
    "higher",
    over="run",
)
WADB = Metric(
    "wadb", "Wasserstein adjusted Davies-Bouldin index of them", "WADB", "WADB", "lower", over="run"
)
LABEL = Metric("label", "found cluster of the client", "found cluster", shown="not")
DIVERGED = Metric("diverged", "1 where a client's model became NaN or infinite", shown="not")
# Of private training, so far.
EPSILON = Metric(
    "epsilon",
    "what a client's published models reveal of one of its training samples at most, for the delta "
    "of local.dp; see the page on privacy for what it covers",
    "epsilon of differential privacy",
    "ε",
    better="lower",
    digits=2,
    shown="further",
)
# Of a round, reported by methods.
PASSES = _cost_metric(
    "passes", "forward passes of one sample, to judge received models", "forward passes"
)
EXTRA_MODELS = _cost_metric(
    "extra_models",
    "numbers received in addition to pulled models, in units of a model",
    "further models",
)
EXTRA_FLOATS = _cost_metric("extra_floats", "further numbers received", "further numbers")
EXTRA_BYTES = _cost_metric(
    "extra_bytes", "bytes received in addition to the pulled messages", "further bytes", "B"
)
BYTES_DOWN = _cost_metric("bytes_down", "bytes received from a server", "bytes from a server", "B")
BYTES_UP = _cost_metric("bytes_up", "bytes sent to a server", "bytes to a server", "B")
# Of a whole run, as PANM's authors count: the cost ledger predicts them.
MODELS_MOVED = Metric(
    "comm_cost_models_per_client",
    "models that a client receives in a run; with a server: receives and sends",
    "models moved per client",
    better="lower",
    shown="not",
)
BANDWIDTH = Metric(
    "max_required_bandwidth_delta",
    "models that a server sends, or one client receives, in the busiest round, per client of the "
    "population",
    "largest bandwidth",
    better="lower",
    shown="not",
)
# Of time: virtual in a simulation, real on a node.
ELAPSED = Metric(
    "elapsed_seconds",
    "seconds from the end of the warm-up to the end of the round: virtual in a simulation, real on "
    "a node",
    "elapsed time",
    better="lower",
    unit="s",
    over="run",
)
OWN_ROUNDS = Metric("own_rounds", "rounds that a client has done so far by itself", shown="curve")
STALENESS = Metric(
    "staleness",
    "mean age of the messages that a client read, in its own rounds",
    "age of what was read",
    "staleness",
    "lower",
    shown="curve",
)
STALENESS_SECONDS = replace(
    STALENESS,
    name="staleness_seconds",
    text="mean age of the messages that a client read, in seconds of virtual time",
    title="age of what was read",
    short="",
    unit="s",
)
IDLE_SHARE = Metric(
    "idle_share",
    "share of virtual time in which a client did not compute",
    "time without work",
    "idle",
    "lower",
    unit="%",
    scale=100.0,
    digits=1,
)
LATE = Metric(
    "late",
    "1 where a client missed the deadline of a round, else 0; only of rounds in which some did",
    "late clients",
    "late",
    "lower",
    unit="%",
    scale=100.0,
    digits=1,
    shown="curve",
)
REFUSED = Metric(
    "refused",
    "models that a client, or its server, refused to mix in a round",
    "refused models",
    shown="curve",
)
ATTACKER_WEIGHT = Metric(
    "attacker_weight",
    "share of a client's mixing weight that is of attackers, its own model included in the whole",
    "weight of attackers",
    "attackers' weight",
    "lower",
    unit="%",
    scale=100.0,
    digits=2,
)
ATTACKER_READS = _derive(
    ATTACKER_WEIGHT,
    name="attacker_reads",
    text="share of the models mixed by a client that are of attackers",
    title="mixed models of attackers",
    short="attackers mixed",
)
GRADIENT_VARIANCE = Metric(
    "gradient_variance",
    "total variance of the last layer's updates over a round's clients; of all endpoints of a "
    "simplex",
    "total variance of updates",
    over="run",
    shown="curve",
    on_request=True,
)
COMPOSED_GRADIENT_VARIANCE = replace(
    GRADIENT_VARIANCE,
    name="composed_gradient_variance",
    text="total variance of updates of the layer at the simplex's barycenter",
    title="total variance of updates at the barycenter",
    short="",
)
INTERACTION_CHANGE = Metric(
    "interaction_change",
    "running mean of squared changes of FedGWC's interaction matrix, in the client's cluster",
    "mean squared change",
    shown="curve",
    on_request=True,
)

# Every metric defined above, in the order of this file.
REGISTRY = Metrics({one.name: one for one in list(globals().values()) if isinstance(one, Metric)})
"""Every metric that is built in, in the order in which tables show them."""
# Accuracies first, by how much they say of a model; losses last, as they differ between methods.
MAIN = (
    *(
        ACCURACY,
        ACCURACY_MAX,
        BALANCED_ACCURACY,
        LABEL_ACCURACY,
        TOKEN_ACCURACY,
        IOU,
        PIXEL_ACCURACY,
        CONCORDANCE,
    ),
    *(MSE, MAE, RAND, LOSS),
)
"""The metrics by which methods are compared: the first of these that a run has."""
COSTS = tuple(one for one in REGISTRY.values() if one.shown == "cost")
"""The costs that any method may report of a round, in addition to its training loss."""
MAXIMA = {
    ACCURACY: ACCURACY_MAX,
    BALANCED_ACCURACY: BALANCED_ACCURACY_MAX,
    GLOBAL_ACCURACY: GLOBAL_ACCURACY_MAX,
}
"""Metrics whose largest mean over clients is reported, and the metric it is reported as."""
REDUCTIONS = {
    "sample_weighted": ACCURACY_SAMPLE_WEIGHTED,
    "cluster_then_client": ACCURACY_CLUSTER_THEN_CLIENT,
}
"""Reductions of accuracy (see `reduce_over_clients`) other than the mean over clients."""
GROUPS = {
    "clusters": (N_CLUSTERS, RAND, ADJUSTED_RAND, WAS, WADB),
    "maxima": tuple(MAXIMA.values()),
    "reductions": tuple(REDUCTIONS.values()),
}
"""Metrics of a whole run that `Settings.metrics` names together."""


def find_metric(given: str | Metric | Callable[..., Any]) -> Metric:
    """Return a metric that `Settings.metrics` may name.

    Args:
        given: a name of `REGISTRY`; an import path "package.module:name" of a `Metric` or of a
            function (outputs, targets) -> number; or one of these. A function becomes a metric of
            its own name, with the first line of its docstring.

    Raises:
        ConfigError: when there is no such metric, it cannot be computed from outputs, or it has the
            name of a built-in one.

    Example:
        >>> find_metric("auroc").heading("test")
        'test AUROC'
    """
    if isinstance(given, Metric):
        return _check_custom(given)
    named = {one.name: one for one in REGISTRY.values() if one.function or one.on_request}
    path, _ = parse_kind(given, {**named, **GROUPS}, "metric", "metrics")
    if path in named:
        return named[path]
    found = import_object(path, f"metric {path!r}")
    # A class would be made, and not called with outputs and targets.
    if isinstance(found, type) or not callable(found):
        raise ConfigError(
            f"metric {path!r} is {found!r}; expected a function (outputs, targets), or a Metric"
        )
    if not isinstance(found, Metric):
        text = (getattr(found, "__doc__", None) or "").strip().partition("\n")[0]
        found = Metric(path.rpartition(":")[2].rpartition(".")[2], text, function=found)
    # An import path may lead to a built-in metric.
    if REGISTRY.get(found.name) == found:
        return found
    return _check_custom(replace(found, path=path))


def _check_custom(metric: Metric) -> Metric:
    """Refuse a metric without a function, and another one under the name of a built-in one."""
    what = "the name of a metric"
    if metric.path:
        what = f"the name of metric {metric.path!r}"
    # Two metrics of one name would be one column of results.
    is_free = REGISTRY.get(metric.name, metric) == metric
    require(is_free, what, metric.name, "one that no built-in metric has")
    is_computed = metric.function is not None or metric.on_request
    require(
        is_computed,
        f"function of metric {metric.name!r}",
        None,
        "a function of outputs and targets",
    )
    if metric.function is not None:
        named = f"metric {metric.path or metric.name!r}"
        check_arguments(metric.function, named, ("outputs", "targets"))
    return metric


def metric_path(metric: Metric) -> str:
    """Return the name or import path from which `find_metric` makes a metric again.

    Raises:
        ConfigError: when there is none: the metric was made inside a function.
    """
    if REGISTRY.get(metric.name) == metric:
        return metric.name
    if metric.path:
        return metric.path
    # A metric does not know the name it has in its module: search the module of its function.
    # `object` stands for no module; it holds no metric.
    module = getattr(metric.function, "__module__", None) or ""
    for name, value in vars(sys.modules.get(module, object)).items():
        if value is metric:
            return f"{module}:{name}"
    raise ConfigError(
        f"metric {metric.name!r} has no import path; "
        "define it at the top of a module, next to its function"
    )


def normalize_metric_setting(given: Any) -> str:
    """Return the name or import path by which `Settings.metrics` stores a metric or a group.

    An import path is not imported.
    """
    if isinstance(given, str) and (":" in given or given in GROUPS):
        return given
    return metric_path(find_metric(given))


def split_requested(names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the names of `Settings.metrics` by who computes them.

    Returns:
        Metrics that are computed from outputs alone; and metrics and groups that need the method,
        the classes or the whole run. These had a setting of their own, `extra_metrics`, by which
        stored runs are identified.
    """
    of_outputs, of_runs = [], []
    for name in names:
        # Metrics on request are measured by the run; all others follow from outputs.
        is_of_run = name in GROUPS or (name in REGISTRY and REGISTRY[name].on_request)
        (of_runs if is_of_run else of_outputs).append(name)
    return tuple(of_outputs), tuple(of_runs)


# ---------------------------------------------------------------- the federation


def reduce_over_clients(
    values: Float[Tensor, " clients"],
    samples: Shaped[Tensor, " clients"],
    label: Int[Tensor, " clients"] | None = None,
    *,
    how: str = "client_mean",
) -> float:
    r"""Reduce one value a client to one of the federation.

    Args:
        values: of each client.
        samples: test samples of each ($m_k$).
        label: its cluster, for "cluster_then_client".
        how: "client_mean": $\frac1K \sum A_k$; "sample_weighted": $\sum m_k A_k / \sum m_k$;
            "cluster_then_client": weighted by $m_k$ inside clusters, and by their numbers of
            members across.
    """
    values, weights = values.double(), samples.double()
    if how == "client_mean":
        return float(values.mean())
    # Without known clusters, all clients are one.
    if how == "sample_weighted" or label is None:
        return float((weights * values).sum() / weights.sum())
    # Clients of a cluster by their samples, clusters by their number of clients.
    total = 0.0
    for cluster in label.unique():
        inside = label == cluster
        total += int(inside.sum()) * float((weights * values)[inside].sum() / weights[inside].sum())
    return total / len(values)


# ---------------------------------------------------------------- clusters


def class_frequencies(counts: Int[Tensor, "clients classes"]) -> Float[Tensor, "clients classes"]:
    r"""Return each client's class frequencies in descending order ($\tilde X_k$).

    They show how uneven its labels are, not which labels it has.
    """
    # A client without samples has frequencies of 0.
    share = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    return share.sort(dim=1, descending=True).values


def _check_cluster_count(metric: str, label: Tensor) -> str | None:
    found = len(label.unique())
    # scikit-learn raises outside these bounds.
    if 2 <= found <= len(label) - 1:
        return None
    return f"it needs at least 2 clusters and fewer than the {len(label)} clients; found {found}"


def wasserstein_silhouette(
    counts: Int[Tensor, "clients classes"], label: Int[Tensor, " clients"]
) -> float:
    r"""Return the Wasserstein adjusted silhouette (WAS), in [-1, 1].

    It is the silhouette of clients by their sorted class frequencies. The distance of two clients
    is $W_2$ between their frequency values. Blind to *which* classes a client has: it scores levels
    of heterogeneity only.

    Args:
        counts: training samples of each class at each client.
        label: the found clusters.

    Returns:
        NaN unless there are at least 2 clusters and fewer than clients.
    """
    from sklearn.metrics import silhouette_score

    reason = _check_cluster_count("WAS", label)
    if reason is not None:
        return warn_undefined("WAS", reason)
    return float(silhouette_score(class_frequencies(counts).numpy(), label.numpy()))


def wasserstein_davies_bouldin(
    counts: Int[Tensor, "clients classes"], label: Int[Tensor, " clients"]
) -> float:
    """Return the Wasserstein adjusted Davies-Bouldin index (WADB): 0 or more, lower is better.

    See `wasserstein_silhouette` for the distance.

    Returns:
        NaN unless there are at least 2 clusters and fewer than clients, and where two clusters'
        centroids coincide (scikit-learn would give 0, a perfect score, when all do).
    """
    from sklearn.metrics import davies_bouldin_score

    reason = _check_cluster_count("WADB", label)
    if reason is not None:
        return warn_undefined("WADB", reason)
    points = class_frequencies(counts)
    centers = torch.stack([points[label == cluster].mean(0) for cluster in label.unique()])
    # The index divides by the distance of centroids.
    if float(torch.pdist(centers).min()) <= 1e-12:
        return warn_undefined("WADB", "the centroids of two clusters coincide")
    return float(davies_bouldin_score(points.numpy(), label.numpy()))


def rand_index(truth: Int[Tensor, " clients"], label: Int[Tensor, " clients"]) -> float:
    """Return the Rand index: the share of pairs that both groupings join or both separate.

    Example:
        >>> rand_index(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0]))
        1.0
    """
    from sklearn.metrics import rand_score

    if len(truth) < 2:
        return warn_undefined("the Rand index", "there are no pairs of clients")
    return float(rand_score(truth.numpy(), label.numpy()))


def adjusted_rand_index(truth: Int[Tensor, " clients"], label: Int[Tensor, " clients"]) -> float:
    """Return the Rand index adjusted for chance: 1 for equal groupings, 0 on average for random."""
    from sklearn.metrics import adjusted_rand_score

    if len(truth) < 2:
        return warn_undefined("the adjusted Rand index", "there are no pairs of clients")
    return float(adjusted_rand_score(truth.numpy(), label.numpy()))


# ---------------------------------------------------------------- whole runs


def max_accuracy(accuracy: Sequence[float]) -> float:
    """Return the largest accuracy of all evaluations; NaN entries do not count.

    The evaluations are on test data, so the maximum is optimistic.
    """
    values = [value for value in accuracy if not math.isnan(value)]
    if not values:
        return warn_undefined("the largest accuracy", "nothing was evaluated")
    return max(values)


def time_to_accuracy(rounds: Sequence[float], accuracy: Sequence[float], target: float) -> float:
    """Return the first evaluated round whose accuracy is at least `target` (TTA).

    It is infinite when the target is never reached.

    Args:
        rounds: when evaluations took place, ascending: rounds, or seconds.
        accuracy: at each of them.
        target: usually the largest accuracy of a baseline.
    """
    if math.isnan(target):
        return warn_undefined("the time to accuracy", "the target is undefined")
    return float(
        next((r for r, value in zip(rounds, accuracy, strict=True) if value >= target), math.inf)
    )


def time_to_accuracy_ratio(
    rounds: Sequence[float],
    accuracy: Sequence[float],
    base_rounds: Sequence[float],
    base: Sequence[float],
) -> float:
    """Return how many times sooner a method reaches the baseline's largest accuracy, for one seed.

    Returns:
        1 for the baseline itself, 0 when the method never gets there (its time is infinite), NaN
        when the method was there in round 0 and the baseline later, where no ratio exists.
    """
    # The target is of the baseline, so the baseline itself always reaches it.
    target = max_accuracy(base)
    own = time_to_accuracy(rounds, accuracy, target)
    theirs = time_to_accuracy(base_rounds, base, target)
    if own == theirs == 0:
        return 1.0
    if own == 0:
        return warn_undefined("the TTA ratio", "the method was there in round 0")
    return theirs / own


def total_variance(updates: Float[Tensor, "clients params"]) -> float:
    r"""Total variance of updates: $\frac{1}{|P|} \sum_k \lVert \Delta_k - \bar\Delta \rVert^2$.

    Args:
        updates: $\Delta_k$ of a round's clients, usually of the last layer (`heads.last_layer`); of
            a simplex model all endpoints, concatenated.
    """
    if not len(updates):
        return warn_undefined("the total variance", "there are no updates")
    flat = updates.double()
    return float((flat - flat.mean(0)).square().sum(1).mean())
