"""Metrics: the registry of what is measured and how it is shown, and the formulas of clients, clusters and runs.

Each metric is one `Metric`; the rest of the code refers to it as an attribute of this module
(`metrics.ACCURACY`) or finds it by the name that a table holds (`REGISTRY[name]`). A method adds
its own in `Method.reports`. One that is computed from outputs and targets is a `SampleMetric` too,
found by its name or import path (`find_metric`). A value that is not defined for its arguments is
NaN, never 0, and a warning of class `Undefined` names the reason.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from coterie._util.importing import import_object, parse_kind
from coterie._util.settings import Configurable, parse_settings, to_plain
from coterie.errors import ConfigError, require
from coterie.functional import scores
from coterie.functional.scores import Form, warn_undefined
from coterie.functional.scores import Undefined as Undefined

Better = Literal["higher", "lower"]
Over = Literal["client", "run"]
Shown = Literal["result", "further", "curve", "cost", "not"]
Needs = Literal["classes", "regression", "server"]


@dataclass(frozen=True)
class Metric(Configurable):
    """What the values of one name are, and how they are shown.

    Args:
        name: in tables and study files: small letters, digits and underscores.
        text: what it is, in a line.
        title: in headings and on axes; the name with spaces when empty.
        short: heading of a narrow column; the title when empty.
        better: which values are better; None where neither is.
        unit: what a shown value is in, such as "%"; empty for a plain number.
        scale: what a value is multiplied with to be shown in its unit.
        digits: decimals of a shown value; None for four significant digits.
        over: "client": a value of each client, averaged over clients and over clusters; "run": one
            value of the whole run (or round), the same at every client.
        shown: "result": the tables that compare methods; "further": tables beside them; "curve":
            over rounds only; "cost": what a run cost; "not".
        on_samples: whether it is measured on the samples of a split, which headings then name
            ("test accuracy").
        needs: what it is defined for; None for every run.
        undefined: why a client may have no value.
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
    needs: Needs | None = None
    undefined: str = ""

    def check(self) -> None:
        """A name can be a key; what is not said follows from it."""
        fits = re.fullmatch("[a-z][a-z0-9_]*", self.name) is not None
        require(fits, "name of a metric", self.name, "small letters, digits and underscores")
        object.__setattr__(self, "title", self.title or self.name.replace("_", " "))
        object.__setattr__(self, "short", self.short or self.title)

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
        title = f"{split} {self.title}" if self.on_samples and split else self.title
        return f"{title} in {self.unit}" if self.unit else title

    def format_value(
        self, value: float | None, *, brief: bool = False, signed: bool = False
    ) -> str:
        """Write a value in its unit, without it; a dash for None, NaN and infinity.

        Args:
            value: as it is stored.
            brief: one decimal at most, for narrow tables.
            signed: with a plus where it is above 0.

        Example:
            >>> ACCURACY.show(0.63754), ACCURACY.show(0.1, brief=True, signed=True), LOSS.show(12.3456)
            ('63.75', '+10.0', '12.35')
        """
        if value is None or not math.isfinite(value):
            return "–"
        digits = (
            ".4g" if self.digits is None else f".{min(self.digits, 1) if brief else self.digits}f"
        )
        return f"{self.scale * value:{'+' if signed else ''}{digits}}"


@dataclass(frozen=True)
class SampleMetric(Metric):
    """A metric that is computed from the outputs of a model and the targets.

    Args:
        function: (outputs, targets) -> one number for all samples of a set, or, with `each`, one a
            sample. NaN with a warning of class `Undefined` where there is none.
        each: whether it is a value of each sample, whose mean over samples is the metric; it is
            then computed in batches, where the model is. Else it gets all outputs of a set, on the
            CPU.
        takes: the forms of outputs and targets that it takes, see `functional.scores`; nothing for
            a function that takes those of the module and of the data as they are.
        least: the smallest value that there can be; None where there is no limit.
        most: the largest.
        path: the import path under which it was found, if it is not bundled.
    """

    on_samples: bool = True
    function: Callable[..., Any] | None = None
    each: bool = False
    takes: Sequence[Form] = ()
    least: float | None = None
    most: float | None = None
    path: str = ""

    def check(self) -> None:
        """There is a function."""
        super().check()
        require(callable(self.function), "function", self.function, "a function (outputs, targets)")

    @property
    def entry(self) -> Metric:
        """What is stored and shown of it: the same without its function."""
        return Metric(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Metric)}
        )

    def measure_samples(
        self,
        outputs: Shaped[Tensor, "samples *outputs"],
        targets: Shaped[Tensor, "samples *targets"],
    ) -> Float[Tensor, " samples"]:
        """Return the value of each sample; for metrics with `each`.

        Raises:
            ConfigError: when the function returns something else.
        """
        assert self.function is not None
        found = self.function(outputs, targets)
        if not isinstance(found, Tensor) or found.shape != (len(outputs),):
            raise ConfigError(
                f"metric {self.path or self.name!r} returned {_describe_value(found)} for {len(outputs)} samples; "
                "expected one value a sample, as a tensor: take the mean over all other axes, and return it"
            )
        return found

    def __call__(
        self,
        outputs: Shaped[Tensor, "samples *outputs"],
        targets: Shaped[Tensor, "samples *targets"],
    ) -> float:
        """Return the metric of a set.

        Args:
            outputs: of the module for all samples of the set, in the form that `takes` says.
            targets: in that form.

        Returns:
            NaN, with a warning of class `Undefined`, for a set without samples or where the
            function says so.

        Raises:
            ConfigError: when the function returns no number.
        """
        if not len(outputs):
            return warn_undefined(f"the {self.title}", "there are no samples")
        if self.each:
            return float(self.measure_samples(outputs, targets).double().mean())
        assert self.function is not None
        found = self.function(outputs.detach().cpu(), targets.cpu())
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"metric {self.path or self.name!r} returned {_describe_value(found)}; expected one number for all samples "
                "together: return it (a value of each sample needs SampleMetric(..., each=True))"
            ) from None


def _describe_value(found: Any) -> str:
    return f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)


class Metrics(dict[str, Metric]):
    """Metrics by name; a name that nobody declared is a plain number that is in no table of results."""

    def __missing__(self, name: str) -> Metric:
        return Metric(name)

    def choose_main(self, names: Iterable[str]) -> str:
        """Return the name by which methods are compared, of those that a run has; the first where none is meant so."""
        names = list(names)
        return next((one.name for one in MAIN if one.name in names), names[0])

    def add_stored(self, stored: Mapping[str, Mapping[str, Any]]) -> "Metrics":
        """Return these metrics and those that a run stored, from what `metrics_to_store` returned.

        Raises:
            ConfigError: when an entry is no metric.
        """
        # a later version may store more
        known = {field.name for field in dataclasses.fields(Metric)}
        tables = {
            name: {key: value for key, value in entry.items() if key in known}
            for name, entry in stored.items()
        }
        found = [parse_settings(Metric, table, name) for name, table in tables.items()]
        return Metrics({**{one.name: one for one in found}, **self})


def metrics_to_store(metrics: Iterable[Metric]) -> dict[str, dict[str, Any]]:
    """Return, as plain values, what a run must store of metrics to be shown where nobody knows them."""
    entries = [one.entry if isinstance(one, SampleMetric) else one for one in metrics]
    return {one.name: to_plain(one) for one in entries if one.name not in REGISTRY}


def _share_metric(name: str, text: str, **more: Any) -> Metric:
    """Return a metric that is a share of samples, shown in per cent."""
    return Metric(
        name,
        text,
        **{
            "better": "higher",
            "unit": "%",
            "scale": 100.0,
            "digits": 2,
            "on_samples": True,
            **more,
        },
    )


def _maximum_of(base: Metric, short: str) -> Metric:
    text = (
        f"{base.text}, in the round with the largest mean over clients; on test data, so optimistic"
    )
    return replace(
        base,
        name=f"{base.name}_max",
        text=text,
        title=f"largest {base.title}",
        short=short,
        shown="further",
    )


def _reduction_of_accuracy(how: str, words: str, short: str) -> Metric:
    text = f"final accuracy of the whole federation, clients weighed {words}"
    title = f"accuracy weighed {words}"
    return replace(
        ACCURACY,
        name=f"{ACCURACY.name}_{how}",
        text=text,
        title=title,
        short=short,
        over="run",
        shown="further",
    )


def _number_metric(
    name: str, text: str, better: Better, undefined: str = "", **more: Any
) -> Metric:
    """Return a metric of samples that is a plain number."""
    return Metric(name, text, better=better, on_samples=True, undefined=undefined, **more)


def _cost_metric(name: str, text: str, title: str, unit: str = "") -> Metric:
    return Metric(name, text, title, unit=unit, better="lower", shown="cost")


# Measured on samples, by `Task`.
ACCURACY = _share_metric(
    "accuracy", "share of samples whose class is predicted", shown="result", needs="classes"
)
MSE = Metric(
    "mse",
    "mean squared error",
    "mean squared error",
    "MSE",
    "lower",
    shown="result",
    on_samples=True,
    needs="regression",
)
LABEL_ACCURACY = _share_metric(
    "label_accuracy", "share of right answers, yes or no, over samples and labels"
)
TOKEN_ACCURACY = _share_metric(
    "token_accuracy", "share of positions whose class is predicted, sample by sample"
)
PIXEL_ACCURACY = _share_metric(
    "pixel_accuracy", "share of pixels whose class is predicted, sample by sample"
)
IOU = _share_metric(
    "iou",
    "intersection over union of predicted and true pixels, the mean over classes",
    title="intersection over union",
    short="IoU",
    undefined="no pixel of a client counts",
)
AUROC = _number_metric(
    "auroc",
    "area under the ROC curve, of more than two classes or of labels the mean over them",
    "higher",
    "no class is that of some test samples of a client and not of others",
    title="AUROC",
)
AVERAGE_PRECISION = _number_metric(
    "average_precision",
    "average precision, of more than two classes or of labels the mean over them",
    "higher",
    "no test sample of a client is a yes",
)
F1 = _number_metric(
    "f1",
    "F1, the mean over classes or labels",
    "higher",
    "neither targets nor predictions of a client have a yes",
    title="F1",
)
CALIBRATION_ERROR = _number_metric(
    "calibration_error",
    "expected calibration error of the predicted class, in 15 bins",
    "lower",
    "an output is not finite",
    short="ECE",
)
BRIER = _number_metric(
    "brier",
    "Brier score: squared error of probabilities",
    "lower",
    title="Brier score",
    short="Brier",
)
PERPLEXITY = _number_metric(
    "perplexity",
    "exponential of the mean cross-entropy of positions",
    "lower",
    "no position of a client counts",
)
MAE = _number_metric(
    "mae", "mean absolute error", "lower", title="mean absolute error", short="MAE"
)
R2 = _number_metric(
    "r2",
    "coefficient of determination: 1 for perfect outputs, 0 for those that are the mean of the targets",
    "higher",
    "the test targets of a client do not vary",
    title="R²",
)
CONCORDANCE = _number_metric(
    "concordance",
    "Harrell's C: share of the comparable pairs whose order in time the outputs have right",
    "higher",
    "no event of a client's test set comes before another time",
)
LOSS = Metric(
    "loss", "mean of the objective over samples", better="lower", shown="result", on_samples=True
)
BALANCED_ACCURACY = _share_metric(
    "balanced_accuracy",
    "mean recall of the classes in the client's test set",
    short="balanced",
    needs="classes",
    undefined="a client has no test samples",
)
TRAIN_PRIOR_ACCURACY = _share_metric(
    "train_prior_accuracy",
    "accuracy with samples weighed by their class's share of the client's training data",
    title="train-prior accuracy",
    short="train-prior",
    needs="classes",
    undefined="no test sample of a client has a class of its training data",
)
GLOBAL_ACCURACY = _share_metric(
    "global_accuracy",
    "accuracy of the model for everybody (or for the client's cluster) on all test sets together",
    short="global",
    needs="server",
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
STD_OVER_CLUSTERS = replace(
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
    needs="classes",
)
WADB = Metric(
    "wadb",
    "Wasserstein adjusted Davies-Bouldin index of them",
    "WADB",
    "WADB",
    "lower",
    over="run",
    needs="classes",
)
LABEL = Metric("label", "found cluster of the client", "found cluster", shown="not")
DIVERGED = Metric("diverged", "1 where a client's model became NaN or infinite", shown="not")
# Of private training, so far.
EPSILON = Metric(
    "epsilon",
    "what a client's published models reveal of one of its training samples at most, for the delta of local.dp; "
    "see the page on privacy for what it covers",
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
    "extra_models", "numbers received beside pulled models, in units of a model", "further models"
)
EXTRA_FLOATS = _cost_metric("extra_floats", "further numbers received", "further numbers")
EXTRA_BYTES = _cost_metric(
    "extra_bytes", "bytes received beside the messages that were pulled", "further bytes", "B"
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
    "models that a server sends, or one client receives, in the busiest round, per client of the population",
    "largest bandwidth",
    better="lower",
    shown="not",
)
REFUSED = Metric(
    "refused", "models that a client refused to mix, in a round", "refused models", shown="curve"
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
ATTACKER_READS = replace(
    ATTACKER_WEIGHT,
    name="attacker_reads",
    text="share of the models mixed by a client that are of attackers",
    title="mixed models of attackers",
    short="attackers mixed",
)
GRADIENT_VARIANCE = Metric(
    "gradient_variance",
    "total variance of the last layer's updates over a round's clients; of all endpoints of a simplex",
    "total variance of updates",
    over="run",
    shown="curve",
    needs="server",
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
    needs="server",
)

REGISTRY = Metrics({one.name: one for one in list(globals().values()) if isinstance(one, Metric)})
"""Every metric that is built in, in the order in which tables show them."""
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
"""What methods are compared by: the first of these that there is."""
COSTS = tuple(one for one in REGISTRY.values() if one.shown == "cost")
"""What any method may report of a round beside its training loss."""
MAXIMA = {
    ACCURACY: ACCURACY_MAX,
    BALANCED_ACCURACY: BALANCED_ACCURACY_MAX,
    GLOBAL_ACCURACY: GLOBAL_ACCURACY_MAX,
}
"""Metrics whose largest mean over clients is reported, and as what."""
REDUCTIONS = {
    "sample_weighted": ACCURACY_SAMPLE_WEIGHTED,
    "cluster_then_client": ACCURACY_CLUSTER_THEN_CLIENT,
}
"""Ways to reduce accuracy (see `reduce_over_clients`) other than the mean over clients, and as what they are reported."""


def _of_samples(
    entry: Metric, function: Callable[..., Any], *takes: Form, **more: Any
) -> SampleMetric:
    """Return a bundled metric with its function."""
    told = {field.name: getattr(entry, field.name) for field in dataclasses.fields(Metric)}
    return SampleMetric(**told, function=function, takes=takes, **more)


_ANY_SHARE = {"least": 0.0, "most": 1.0}
_EACH_SHARE = {"each": True, **_ANY_SHARE}
MEASURES: dict[str, SampleMetric] = {
    one.name: one
    for one in (
        _of_samples(ACCURACY, scores.accuracy, "class", **_EACH_SHARE),
        _of_samples(BALANCED_ACCURACY, scores.balanced_accuracy, "class", **_ANY_SHARE),
        _of_samples(LABEL_ACCURACY, scores.label_accuracy, "labels", **_EACH_SHARE),
        _of_samples(TOKEN_ACCURACY, scores.position_accuracy, "positions", **_EACH_SHARE),
        _of_samples(PIXEL_ACCURACY, scores.position_accuracy, "positions", **_EACH_SHARE),
        _of_samples(IOU, scores.iou, "positions", **_ANY_SHARE),
        _of_samples(AUROC, scores.auroc, "class", "labels", **_ANY_SHARE),
        _of_samples(AVERAGE_PRECISION, scores.average_precision, "class", "labels", **_ANY_SHARE),
        _of_samples(F1, scores.f1, "class", "labels", **_ANY_SHARE),
        _of_samples(CALIBRATION_ERROR, scores.calibration_error, "class", **_ANY_SHARE),
        _of_samples(BRIER, scores.brier, "class", "labels", each=True, least=0.0, most=2.0),
        _of_samples(PERPLEXITY, scores.perplexity, "positions", least=1.0),
        _of_samples(MSE, scores.squared_error, "numbers", each=True, least=0.0),
        _of_samples(MAE, scores.absolute_error, "numbers", each=True, least=0.0),
        _of_samples(R2, scores.r2, "numbers", most=1.0),
        _of_samples(CONCORDANCE, scores.concordance, "times", **_ANY_SHARE),
    )
}
"""The bundled metrics of outputs and targets, by name."""


def find_metric(
    given: str | SampleMetric | Callable[..., Any], where: str = "metrics"
) -> SampleMetric:
    """Return a metric of outputs and targets.

    Args:
        given: a name of `MEASURES`; an import path "package.module:name" of a `SampleMetric` or of
            a function (outputs, targets) -> number; or one of these. A function becomes a metric of
            its own name, with the first line of its docstring.
        where: how the user finds it.

    Raises:
        ConfigError: when there is none, or its name is that of another metric.

    Example:
        >>> read_metric("auroc").heading("test")
        'test AUROC'
    """
    if isinstance(given, SampleMetric):
        return _check_name_is_free(given)
    path, _ = parse_kind(given, MEASURES, "metric", where)
    if path in MEASURES:
        return MEASURES[path]
    found = import_object(path, f"metric {path!r}")
    if isinstance(found, type) or not callable(found):
        raise ConfigError(
            f"metric {path!r} is {found!r}; expected a function (outputs, targets), or a SampleMetric"
        )
    if not isinstance(found, SampleMetric):
        text = (getattr(found, "__doc__", None) or "").strip().partition("\n")[0]
        found = SampleMetric(path.rpartition(":")[2].rpartition(".")[2], text, function=found)
    return (
        found
        if MEASURES.get(found.name) == found
        else _check_name_is_free(replace(found, path=path))
    )


def _check_name_is_free(metric: SampleMetric) -> SampleMetric:
    """Refuse another metric under the name of one that is built in."""
    free = metric.name not in REGISTRY or MEASURES.get(metric.name) == metric
    what = f"the name of metric {metric.path!r}" if metric.path else "the name of a metric"
    require(free, what, metric.name, "one that no built-in metric has")
    return metric


def metric_path(metric: SampleMetric) -> str:
    """Return the name or import path from which `find_metric` makes a metric again.

    Raises:
        ConfigError: when there is none: it is made inside a function.
    """
    if MEASURES.get(metric.name) == metric:
        return metric.name
    module = getattr(metric.function, "__module__", None)
    names = [
        name
        for name, value in vars(sys.modules.get(module or "", None) or object).items()
        if value is metric
    ]
    if not metric.path and not names:
        raise ConfigError(
            f"metric {metric.name!r} has no import path; define it at the top of a module, beside its function"
        )
    return metric.path or f"{module}:{names[0]}"


ExtraMetric = Literal[
    "balanced_accuracy",
    "train_prior_accuracy",
    "global_accuracy",
    "clusters",
    "maxima",
    "reductions",
    "gradient_variance",
    "composed_gradient_variance",
    "interaction_change",
]
"""What `Settings.extra_metrics` may ask for: metrics, and groups of them."""


def normalize_metric_setting(given: Any) -> str:
    """Return the name or import path under which a metric is found again: of a name, a metric or a function.

    What has an import path is not imported.
    """
    if isinstance(given, str) and ":" in given:
        return given
    return metric_path(find_metric(given))


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
    if how == "sample_weighted" or label is None:
        return float((weights * values).sum() / weights.sum())
    total = 0.0
    for cluster in label.unique():
        inside = label == cluster
        total += int(inside.sum()) * float((weights * values)[inside].sum() / weights[inside].sum())
    return total / len(values)


# ---------------------------------------------------------------- clusters


def class_frequencies(counts: Int[Tensor, "clients classes"]) -> Float[Tensor, "clients classes"]:
    r"""Return class frequencies in descending order ($\tilde X_k$): how uneven a client's labels are, not which."""
    share = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    return share.sort(dim=1, descending=True).values


def _check_cluster_count(metric: str, label: Tensor) -> str | None:
    found = len(label.unique())
    if 2 <= found <= len(label) - 1:
        return None
    return f"it needs at least 2 clusters and fewer than the {len(label)} clients; found {found}"


def wasserstein_silhouette(
    counts: Int[Tensor, "clients classes"], label: Int[Tensor, " clients"]
) -> float:
    r"""Wasserstein adjusted silhouette: the silhouette of clients by their sorted class frequencies, in [-1, 1].

    The distance of two clients is $W_2$ between their frequency values. Blind to *which* classes a
    client has: it scores levels of heterogeneity only.

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
    """Wasserstein adjusted Davies-Bouldin index, lower is better, 0 or more; see `wasserstein_silhouette`.

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
    if float(torch.pdist(centers).min()) <= 1e-12:
        return warn_undefined("WADB", "the centroids of two clusters coincide")
    return float(davies_bouldin_score(points.numpy(), label.numpy()))


def rand_index(truth: Int[Tensor, " clients"], label: Int[Tensor, " clients"]) -> float:
    """Rand index (not adjusted): the share of pairs that both groupings keep together or both keep apart.

    Example:
        >>> rand(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0]))
        1.0
    """
    from sklearn.metrics import rand_score

    if len(truth) < 2:
        return warn_undefined("the Rand index", "there are no pairs of clients")
    return float(rand_score(truth.numpy(), label.numpy()))


def adjusted_rand_index(truth: Int[Tensor, " clients"], label: Int[Tensor, " clients"]) -> float:
    """Rand index adjusted for chance: 1 for equal groupings, 0 on average for random ones."""
    from sklearn.metrics import adjusted_rand_score

    if len(truth) < 2:
        return warn_undefined("the adjusted Rand index", "there are no pairs of clients")
    return float(adjusted_rand_score(truth.numpy(), label.numpy()))


# ---------------------------------------------------------------- whole runs


def max_accuracy(accuracy: Sequence[float]) -> float:
    """The largest accuracy of all evaluations (on test data, so optimistic); NaN entries do not count."""
    values = [value for value in accuracy if not math.isnan(value)]
    return (
        max(values) if values else warn_undefined("the largest accuracy", "nothing was evaluated")
    )


def time_to_accuracy(rounds: Sequence[int], accuracy: Sequence[float], target: float) -> float:
    """The first evaluated round whose accuracy is at least `target`; infinite when it is never reached (TTA).

    Args:
        rounds: when evaluations took place, ascending.
        accuracy: at each of them.
        target: usually the largest accuracy of a baseline.
    """
    if math.isnan(target):
        return warn_undefined("the time to accuracy", "the target is undefined")
    return float(
        next((r for r, value in zip(rounds, accuracy, strict=True) if value >= target), math.inf)
    )


def time_to_accuracy_ratio(
    rounds: Sequence[int],
    accuracy: Sequence[float],
    base_rounds: Sequence[int],
    base: Sequence[float],
) -> float:
    """How many times sooner a method reaches the baseline's largest accuracy than the baseline did, for one seed.

    Returns:
        1 for the baseline itself, 0 when the method never gets there (its time is infinite), NaN
        when the method was there in round 0 and the baseline later, where no ratio exists.
    """
    target = max_accuracy(base)
    own, theirs = (
        time_to_accuracy(rounds, accuracy, target),
        time_to_accuracy(base_rounds, base, target),
    )
    if own == 0:
        return (
            1.0
            if theirs == 0
            else warn_undefined("the TTA ratio", "the method was there in round 0")
        )
    return theirs / own


def total_variance(updates: Float[Tensor, "clients params"]) -> float:
    r"""Total variance of updates: $\frac{1}{|P|} \sum_k \lVert \Delta_k - \bar\Delta \rVert^2$.

    Args:
        updates: $\Delta_k$ of a round's clients, usually of the last layer (`heads.last_layer`); of
            a simplex model all endpoints, one beside another.
    """
    if not len(updates):
        return warn_undefined("the total variance", "there are no updates")
    flat = updates.double()
    return float((flat - flat.mean(0)).square().sum(1).mean())
