"""Metrics, worked by hand; undefined ones are NaN with a reason."""

import ast
import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.errors import ConfigError
from coterie.functional import metrics
from coterie.rng import Rng


def stream(seed: int = 0):
    return Rng(seed).generator("test")


def test_federated_reductions():
    """Values 1, 0, 0.5 with 1, 3, 4 samples: means 0.5, 3/8, and (2 * 1/4 + 1 * 1/2) / 3 over clusters {0, 1}, {2}."""
    values, samples = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 3, 4])
    label = torch.tensor([0, 0, 1])
    assert metrics.reduce_over_clients(values, samples) == 0.5
    assert metrics.reduce_over_clients(values, samples, how="sample_weighted") == 0.375
    assert metrics.reduce_over_clients(
        values, samples, label, how="cluster_then_client"
    ) == pytest.approx(1 / 3)
    equal = torch.full((3,), 7)
    assert metrics.reduce_over_clients(
        values, equal, label, how="cluster_then_client"
    ) == pytest.approx(0.5)


def two_levels(clients: int = 10, classes: int = 8) -> tuple[Tensor, Tensor]:
    """Half of the clients have one class each, half all classes evenly."""
    counts = torch.full((clients, classes), 4)
    half = clients // 2
    counts[:half] = 0
    counts[torch.arange(half), torch.arange(half) % classes] = 32
    return counts, (torch.arange(clients) >= half).long()


def test_two_levels_of_heterogeneity_are_separated():
    """Single classes (whichever) against uniform labels: WAS is 1 and WADB is 0."""
    counts, label = two_levels()
    assert metrics.wasserstein_silhouette(counts, label) == pytest.approx(1.0)
    assert metrics.wasserstein_davies_bouldin(counts, label) == pytest.approx(0.0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000))
def test_levels_are_all_that_counts(seed: int):
    """Neither relabeling each client's classes, nor the names of clusters, nor the number of samples matter."""
    draw = stream(seed)
    counts = torch.from_numpy(draw.integers(1, 20, (9, 5)))
    label = torch.arange(9) % 3
    shuffled = torch.stack([row[torch.from_numpy(draw.permutation(5))] for row in counts])
    for metric in (metrics.wasserstein_silhouette, metrics.wasserstein_davies_bouldin):
        value = metric(counts, label)
        assert metric(shuffled, label) == pytest.approx(value)
        assert metric(counts, torch.tensor([5, 0, 2])[label]) == pytest.approx(value)
        assert metric(3 * counts, label) == pytest.approx(value)


def test_was_by_hand():
    """Sorted frequencies on a line at 0, 0.1 | 0.5 (times a factor): s = (0.5-0.1)/0.5, (0.4-0.1)/0.4, singleton 0."""
    counts = torch.tensor([[50, 50], [60, 40], [100, 0]])
    value = metrics.wasserstein_silhouette(counts, torch.tensor([0, 0, 1]))
    assert value == pytest.approx((0.8 + 0.75 + 0.0) / 3)


@pytest.mark.parametrize("label", [[0, 0, 0], [0, 1, 2]])
def test_scores_need_between_two_clusters_and_all_but_one(label: list[int]):
    """One cluster, or one a client: NaN with the reason."""
    counts = torch.tensor([[1, 2], [3, 4], [9, 1]])
    for metric in (metrics.wasserstein_silhouette, metrics.wasserstein_davies_bouldin):
        with pytest.warns(
            metrics.Undefined, match=rf"at least 2 clusters .* found {len(set(label))}"
        ):
            assert math.isnan(metric(counts, torch.tensor(label)))


def test_coinciding_centroids_are_not_perfect():
    """scikit-learn's index is 0 for them."""
    counts = torch.tensor([[3, 1], [1, 3], [3, 1], [1, 3]])
    with pytest.warns(metrics.Undefined, match="centroids of two clusters coincide"):
        assert math.isnan(metrics.wasserstein_davies_bouldin(counts, torch.tensor([0, 0, 1, 1])))


@pytest.mark.parametrize(("a", "b"), [(50, 0), (40, 10), (25, 25), (30, 5)])
def test_rand_of_two_clusters_over_fifty_fifty(a: int, b: int):
    """With a and b members of cluster 1 from each half: (2450 + (a - b)^2) / 4950; never below 0.4949."""
    truth = (torch.arange(100) >= 50).long()
    label = torch.zeros(100, dtype=torch.int64)
    label[:a] = 1
    label[50 : 50 + b] = 1
    if a + b == 50:
        assert metrics.rand_index(truth, label) == pytest.approx((2450 + (a - b) ** 2) / 4950)
    assert metrics.rand_index(truth, label) >= 0.4949


def test_rand_of_one_cluster():
    """Pairs of one planted group are kept together, the others are not: 0.4949 for 50/50, 1/3 for 40/30/30."""
    halves, thirds = (
        (torch.arange(100) >= 50).long(),
        torch.bucketize(torch.arange(100), torch.tensor([39, 69])),
    )
    one = torch.zeros(100, dtype=torch.int64)
    assert metrics.rand_index(halves, one) == pytest.approx(2450 / 4950)
    assert metrics.rand_index(thirds, one) == pytest.approx((780 + 435 + 435) / 4950)
    assert metrics.adjusted_rand_index(halves, one) == 0.0
    assert metrics.adjusted_rand_index(halves, 1 - halves) == 1.0
    with pytest.warns(metrics.Undefined, match="no pairs"):
        assert math.isnan(metrics.rand_index(one[:1], one[:1]))
    with pytest.warns(metrics.Undefined, match="no pairs"):
        assert math.isnan(metrics.adjusted_rand_index(one[:1], one[:1]))


def test_the_largest_accuracy():
    """Evaluations that did not happen do not count."""
    assert metrics.max_accuracy([0.1, math.nan, 0.9, 0.5]) == 0.9
    with pytest.warns(metrics.Undefined, match="nothing was evaluated"):
        assert math.isnan(metrics.max_accuracy([]))


def test_time_to_accuracy():
    """A method that is the baseline has ratio 1; one twice as fast 2; one that never gets there 0 (time infinite)."""
    rounds, base = [10, 20, 30, 40], [0.1, 0.2, 0.3, 0.3]
    assert metrics.time_to_accuracy(rounds, base, 0.3) == 30
    assert metrics.time_to_accuracy_ratio(rounds, base, rounds, base) == 1.0
    assert metrics.time_to_accuracy_ratio(rounds, [0.1, 0.35, 0.3, 0.3], rounds, base) == 1.5
    assert metrics.time_to_accuracy(rounds, [0.1] * 4, 0.3) == math.inf
    assert metrics.time_to_accuracy_ratio(rounds, [0.1] * 4, rounds, base) == 0.0
    with pytest.warns(metrics.Undefined, match="the target is undefined"):
        assert math.isnan(metrics.time_to_accuracy(rounds, base, math.nan))


def test_ratios_at_round_zero():
    """Both at once is 1; a method that starts where the baseline ends has no ratio."""
    assert metrics.time_to_accuracy_ratio([0, 1], [0.5, 0.5], [0, 1], [0.5, 0.5]) == 1.0
    with pytest.warns(metrics.Undefined, match="round 0"):
        assert math.isnan(metrics.time_to_accuracy_ratio([0, 1], [0.6, 0.6], [0, 1], [0.4, 0.5]))


def test_total_variance():
    """Updates (0, 0) and (2, 4): each 1 + 4 from the mean. Equal updates vary by 0; a constant changes nothing."""
    updates = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    assert metrics.total_variance(updates) == 5.0
    assert metrics.total_variance(updates + 7) == 5.0
    assert metrics.total_variance(updates[:1].expand(4, 2)) == 0.0
    with pytest.warns(metrics.Undefined, match="no updates"):
        assert math.isnan(metrics.total_variance(updates[:0]))


# ---------------------------------------------------------------- the registry

SOURCES = Path(metrics.__file__).parents[1]
PLACES = {
    "functional/metrics.py": "the registry",
    "functional/losses.py": "names of losses",
    "engine/native/library.py": "fields of a C struct",
    "engine/native/traced.py": "fields of a C struct",
    "engine/native/trace.py": "names of PyTorch's operations",
    "models/draws.py": "names of PyTorch's operations",
    "papers/dac.py": "a method",
}
WORDS = {
    "label": "also the name of a method in a study",
    "loss": "also a setting of a run",
    "refused": "also an event of a node's log, and the purpose of a read",
}


def literals(path: Path) -> set[str]:
    """The text literals of a source file."""
    text = path.read_text("utf-8")
    if path.suffix == ".js":
        return set(re.findall(r"[\"'`](\w+)[\"'`]", text)) | set(re.findall(r"\.(\w+)\b", text))
    return {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)} - {
        None
    }


@pytest.mark.full
def test_nothing_but_the_registry_and_methods_knows_a_metric_by_name():
    """In Python no literal, in the page's scripts no literal and no property is the name of a metric."""
    files = [*SOURCES.rglob("*.py"), *(SOURCES / "report" / "assets").glob("*.js")]
    assert len(files) > 100
    found = {
        f"{place}: {name}"
        for path in files
        if (place := path.relative_to(SOURCES).as_posix()) not in PLACES
        and not place.startswith("methods/")
        for name in literals(path) & (set(metrics.REGISTRY) - set(WORDS))
    }
    assert not found


def test_every_entry_says_what_it_is():
    """Names are keys; every entry has a line on what it is, and what is compared says which values are better."""
    for name, entry in metrics.REGISTRY.items():
        assert entry.name == name
        assert entry.text
        assert entry.title
    assert all(entry.sign for entry in metrics.MAIN)
    for group in metrics.GROUPS.values():
        assert {one.name for one in group} <= set(metrics.REGISTRY)


def test_derived_metrics_are_shown_as_what_they_are_made_from():
    """A largest accuracy is an accuracy: in %, higher is better. Shown once and the same everywhere."""
    for base, largest in metrics.MAXIMA.items():
        assert (largest.unit, largest.scale, largest.digits, largest.sign) == (
            base.unit,
            base.scale,
            base.digits,
            1,
        )
        assert largest.format_value(0.5) == "50.00"
        assert largest.format_value(0.5, brief=True) == "50.0"
    assert {entry.name for entry in metrics.REDUCTIONS.values()} == {
        f"accuracy_{how}" for how in ("sample_weighted", "cluster_then_client")
    }


@pytest.mark.parametrize(
    "name", [one.name for one in metrics.REGISTRY.values() if one.function is not None]
)
def test_a_built_in_metric_of_outputs_is_found_and_stored_by_its_name(name):
    """A metric that may be NaN has the reason in its entry."""
    one = metrics.REGISTRY[name]
    assert one.sign
    assert one.takes
    assert one.on_samples
    assert one.each or one.undefined or name == "balanced_accuracy"
    assert metrics.find_metric(name) is one
    assert metrics.metric_path(one) == name
    assert metrics.metrics_to_store([one]) == {}


def spread(outputs, targets):
    """How far apart outputs are.

    Not shown.
    """
    return outputs.std()


def forgotten(outputs, targets):
    outputs.std()


def each_of_them(outputs, targets):
    return outputs.mean(1)


def loss(outputs, targets):
    return 0.0


def of_three(a, b, c):
    return 0.0


WORST = metrics.Metric("worst", "the largest error", better="lower", function=spread, least=0.0)
OTHER_ACCURACY = metrics.Metric("accuracy", function=spread)


def test_a_function_is_a_metric_of_its_name():
    own = metrics.find_metric(spread)
    assert own == metrics.find_metric(f"{__name__}:spread")
    assert (own.name, own.text, own.sign, own.shown) == (
        "spread",
        "How far apart outputs are.",
        0,
        "further",
    )
    assert own(torch.tensor([[1.0], [3.0]]), torch.zeros(2)) == pytest.approx(math.sqrt(2))
    assert metrics.metric_path(own) == f"{__name__}:spread"
    stored = metrics.metrics_to_store([own])
    assert json.loads(json.dumps(stored)) == stored
    assert metrics.REGISTRY.add_stored(stored)["spread"].to_record() == own.to_record()


def test_a_metric_is_found_by_its_path_and_stored_by_it():
    found = metrics.find_metric(f"{__name__}:WORST")
    assert (found.name, found.better, found.path) == ("worst", "lower", f"{__name__}:WORST")
    assert metrics.metric_path(found) == metrics.metric_path(WORST) == f"{__name__}:WORST"
    assert metrics.find_metric(WORST) is WORST
    nowhere = metrics.Metric("nowhere", function=spread)
    with pytest.raises(
        ConfigError, match="'nowhere' has no import path; define it at the top of a module"
    ):
        metrics.metric_path(nowhere)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("auroq", "metrics: unknown metric 'auroq'; did you mean 'auroc'?"),
        ("n_clusters", "unknown metric 'n_clusters'"),
        ("math:pi", "'math:pi' is 3.14.*; expected a function"),
        ("math:no", "expected package.module:name"),
        ("torch.nn:Linear", "expected a function"),
        (lambda outputs, targets: 0, "at the top of a module"),
        (
            f"{__name__}:loss",
            "the name of metric .* is 'loss'; expected one that no built-in metric has",
        ),
        (f"{__name__}:OTHER_ACCURACY", "is 'accuracy'; expected one that no built-in metric has"),
        (OTHER_ACCURACY, "the name of a metric is 'accuracy'; expected one that"),
        (
            f"{__name__}:of_three",
            r"of_three' has the arguments \(a, b, c\); expected \(outputs, targets\)",
        ),
        (
            metrics.Metric("short", function=len),
            r"'short' has the arguments .*; expected \(outputs, t",
        ),
    ],
)
def test_a_metric_of_samples_that_is_none_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        metrics.find_metric(given)


def test_a_metric_without_a_function_is_not_computed_from_outputs():
    reported = metrics.Metric("trust", "how much a client trusts its peers")
    with pytest.raises(
        ConfigError, match="function of metric 'trust' is None; expected a function"
    ):
        metrics.find_metric(reported)


def test_requested_names_are_split_by_what_computes_them():
    """`balanced_accuracy` is computed from the recall of each class, which a run measures anyway."""
    names = ["auroc", "maxima", "balanced_accuracy", "my.module:metric", "global_accuracy"]
    assert metrics.split_requested(names) == (
        ("auroc", "my.module:metric"),
        ("maxima", "balanced_accuracy", "global_accuracy"),
    )
    assert [metrics.normalize_metric_setting(name) for name in names] == names


def test_what_a_function_returns_must_be_a_number():
    outputs, targets = torch.zeros(3, 2), torch.zeros(3)
    with pytest.raises(
        ConfigError, match="forgotten' returned None; expected one number for all samples"
    ):
        metrics.find_metric(forgotten)(outputs, targets)
    with pytest.raises(
        ConfigError, match=r"returned a tensor of shape \(3,\); .* needs Metric\(..., each=True\)"
    ):
        metrics.find_metric(each_of_them)(outputs, targets)
    every = metrics.Metric("every", function=each_of_them, each=True)
    assert every(outputs + 2, targets) == 2
    with pytest.raises(ConfigError, match=r"'every' returned a tensor of shape \(\) for 3 samples"):
        metrics.Metric("every", function=spread, each=True)(outputs, targets)


def test_a_set_without_samples_has_no_value():
    with pytest.warns(
        metrics.Undefined, match="the mean squared error is undefined: there are no samples"
    ):
        assert math.isnan(metrics.REGISTRY["mse"](torch.zeros(0), torch.zeros(0)))


def test_an_unknown_metric_is_a_plain_number_without_direction():
    entry = metrics.REGISTRY["never_heard_of"]
    assert (entry.title, entry.sign, entry.format_value(0.5), entry.heading("test")) == (
        "never heard of", 0, "0.5", "never heard of"
    )  # fmt: skip
    assert "never_heard_of" not in metrics.REGISTRY


def test_what_compares_methods_is_the_first_that_is_there():
    assert (
        metrics.REGISTRY.choose_main(["loss", "n_clusters", "accuracy_max", "accuracy"])
        == "accuracy"
    )
    assert metrics.REGISTRY.choose_main(["loss", "mse"]) == "mse"
    assert metrics.REGISTRY.choose_main(["trust"]) == "trust"
    assert metrics.REGISTRY.choose_main(["pixel_accuracy", "loss", "iou"]) == "iou"


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"name": "Trust Me"}, "small letters"), ({"name": "t", "over": "moon"}, "over is .moon")],
)
def test_a_metric_that_is_none_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        metrics.REGISTRY.add_stored({"t": fields})


def test_stored_metrics_come_back_and_built_in_ones_are_not_stored():
    own = metrics.Metric("trust", "a line", better="lower", unit="s", scale=2.0, digits=0)
    stored = metrics.metrics_to_store([metrics.LOSS, own])
    assert list(stored) == ["trust"]
    known = metrics.REGISTRY.add_stored(
        json.loads(json.dumps(stored)) | {"x": {"name": "x", "of_later_versions": 1}}
    )
    assert known["trust"] == own
    assert known["x"] == metrics.Metric("x")
    assert known["loss"] is metrics.LOSS


def _make_set(form: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if form == "class":
        return torch.randn(8, 3, generator=generator), torch.arange(8) % 3
    if form == "positions":
        return torch.randn(8, 4, 3, generator=generator), torch.arange(32).reshape(8, 4) % 3
    if form == "times":
        return torch.randn(8, generator=generator), torch.stack(
            [torch.arange(8.0), torch.ones(8)], 1
        )
    outputs = torch.randn(8, 3, generator=generator)
    targets = torch.randn(8, 3, generator=generator)
    return outputs, (targets > 0).float() if form == "labels" else targets


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", [name for name, one in metrics.REGISTRY.items() if one.function is not None]
)
def test_outputs_that_are_not_finite_have_no_score(name: str, bad: float):
    """One entry of one of eight samples: for every metric and form that it takes."""
    metric = metrics.REGISTRY[name]
    for form in metric.takes:
        outputs, targets = _make_set(form)
        assert math.isfinite(metric(outputs, targets))
        outputs[(3,) + (0,) * (outputs.dim() - 1)] = bad
        with pytest.warns(metrics.Undefined, match="an output is not finite"):
            assert math.isnan(metric(outputs, targets))
        if metric.each:
            lost = metric.measure_samples(outputs, targets).isnan()
            assert lost.tolist() == [n == 3 for n in range(8)]
