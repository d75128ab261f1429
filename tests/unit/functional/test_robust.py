"""Rules that bound one member, against plain numpy and by what they promise."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError
from coterie.functional import robust
from coterie.functional.aggregation import ReceivedModels, merge_by_rule
from coterie.methods import METHODS

RULES = {name: made() for name, made in robust.RULES.items()}
# These bound nobody, and are for named tensors: test_adapters.py and test_variance.py have them.
for name in ("product-mean", "norm-weighted", "variance-corrected"):
    del RULES[name]


def draw(count, size=23, seed=0):
    """Models with an integer part, so that numbers are easily told apart, and the model before."""
    stream = np.random.default_rng(seed)
    return stream.normal(size=(count, size)) + 3, stream.normal(size=size)


def merge(rule, models, before=None):
    """What a rule makes of numpy's numbers."""
    rows = torch.from_numpy(np.array(models))
    before = rows[0] if before is None else torch.from_numpy(before)
    claims = torch.logspace(0, 9, len(rows), dtype=rows.dtype)  # nobody's samples count
    return merge_by_rule(rule, ReceivedModels(rows, claims, None, before), "it").numpy()


def order_by_krum(models, share):
    """The formula of Blanchard et al., by loops."""
    count = len(models)
    suspects = max(math.floor(share * count + 1e-9), 1 if count >= 3 and share > 0 else 0)
    near = max(count - suspects - 2, 1)
    scores = []
    for i in range(count):
        away = sorted(float(((models[i] - models[j]) ** 2).sum()) for j in range(count) if j != i)
        scores.append(sum(away[:near]))
    return sorted(range(count), key=lambda i: (scores[i], i)), count - suspects


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10])
def test_medians_and_trimmed_means_are_those_of_numpy(count):
    models, _ = draw(count)
    np.testing.assert_allclose(merge(robust.Median(), models), np.median(models, 0), rtol=1e-12)
    for share in (0.0, 0.1, 0.2, 0.3, 0.45):
        cut = max(math.floor(share * count + 1e-9), 1 if count >= 3 and share > 0 else 0)
        expected = np.sort(models, 0)[cut : count - cut].mean(0)
        np.testing.assert_allclose(merge(robust.TrimmedMean(share), models), expected, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.4])
def test_krum_is_the_formula_of_its_paper(count, share):
    models, _ = draw(count, seed=count)
    order, kept = order_by_krum(models, share)
    np.testing.assert_array_equal(merge(robust.Krum(share), models), models[order[0]])
    np.testing.assert_allclose(
        merge(robust.MultiKrum(share), models), models[order[:kept]].mean(0), rtol=1e-12
    )


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_updates_are_clipped_at_their_median_length(times):
    models, before = draw(7)
    moved = models - before
    lengths = np.sqrt((moved**2).sum(1))
    factor = np.minimum(1, times * np.median(lengths) / lengths)
    expected = before + (factor[:, None] * moved).mean(0)
    np.testing.assert_allclose(
        merge(robust.NormClipping(times), models, before), expected, rtol=1e-12
    )
    # A client's own model has not moved from itself: it counts in the mean, not in the median.
    own = np.concatenate([before[None], models])
    expected = before + (factor[:, None] * moved).sum(0) / 8
    np.testing.assert_allclose(merge(robust.NormClipping(times), own, before), expected, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 11])
def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median(count):
    models, _ = draw(count, size=4, seed=count)
    found = merge(robust.GeometricMedian(), models)

    def total(point):
        return np.sqrt(((models - point) ** 2).sum(1)).sum()

    stream, best = np.random.default_rng(1), total(found)
    for scale in (1e-4, 1e-2, 1.0):
        for _ in range(200):
            assert total(found + scale * stream.normal(size=4)) >= best - 1e-9
    point = models.mean(0)  # Weiszfeld's steps on the points themselves
    for _ in range(20_000):
        weights = 1 / np.maximum(np.sqrt(((models - point) ** 2).sum(1)), 1e-12)
        point = weights @ models / weights.sum()
    assert total(found) <= total(point) + 1e-9


def test_the_geometric_median_may_be_a_model_itself():
    """On a line it is the model in the middle; where half are equal, it is they."""
    assert merge(robust.GeometricMedian(), [[0.0], [1.0], [10.0]])[0] == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(
        merge(robust.GeometricMedian(), [[2.0, 1.0], [9.0, 9.0], [2.0, 1.0], [-7.0, 0.0]]), [2, 1]
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("wrong", [-5.0, 1e3, 1e12, 1e18])
def test_one_member_of_ten_moves_no_rule_farther_than_the_honest_differ(name, wrong):
    """The mean follows it as far as it likes."""
    models, before = draw(10)
    honest = models[1:]
    middle, spread = honest.mean(0), np.sqrt(((honest - honest.mean(0)) ** 2).sum(1)).max()
    models[0] *= wrong
    if name == "norm-clipping":  # from where the server was, no farther than the honest ones
        spread += np.sqrt(((honest - before) ** 2).sum(1)).max()
    found = merge(RULES[name], models, before)
    assert np.sqrt(((found - middle) ** 2).sum()) <= spread
    assert wrong < 1e3 or np.sqrt(((models.mean(0) - middle) ** 2).sum()) > spread


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_models_that_are_all_the_same_stay(name, count):
    models = np.tile(np.array([0.5, -2.0, 1e-3]), (count, 1))
    np.testing.assert_allclose(merge(RULES[name], models), models[0], rtol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_neither_claimed_samples_nor_blocks_of_columns_count(name, monkeypatch):
    """As many blocks as columns: sums are of single columns, or of rows in their order."""
    models, before = draw(6)
    whole = merge(RULES[name], models, before)
    monkeypatch.setattr(robust, "_CHUNK", 6)
    np.testing.assert_allclose(merge(RULES[name], models, before), whole, rtol=1e-9, atol=1e-9)


def test_a_setting_names_a_rule_or_has_it_in_a_table():
    """And what does not fit is one line."""
    assert set(get_args(robust.RuleName)) == set(robust.RULES)
    fedavg = METHODS["fedavg"]
    assert fedavg(aggregation="krum").aggregation == "krum"
    assert robust.make_rule({"kind": "trimmed-mean", "share": 0.1}) == robust.TrimmedMean(0.1)
    for given, said in (
        ("kurm", "aggregation is 'kurm'"),
        ({"kind": "kurm"}, "kurm"),
        ({"kind": "krum", "shar": 0.1}, "shar"),
        ({"kind": "krum", "share": 0.5}, "below 0.5"),
        ({"share": 0.1}, "kind is missing"),
        ({"kind": "os.path:join"}, "a custom rule has no settings"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            fedavg(aggregation=given)
        assert "\n" not in str(caught.value)


def test_every_method_that_averages_takes_a_rule():
    """All servers, and the peers whose exchange is one average; PANM averages over two exchanges.

    PPDL's peers see sums of groups, and no single model that a rule could leave out.
    """
    without = {kind for kind, made in METHODS.items() if not hasattr(made, "aggregation")}
    assert without == {"local", "pooled", "panm-loss", "panm-grad", "ppdl"}
