"""Formulas of metrics of outputs, against scikit-learn, by hand and by counting; what is not defined is NaN."""

import math

import pytest
import sklearn.metrics
import torch
from torch.nn import functional

from coterie.functional import scores
from coterie.functional.scores import UNCOUNTED, Undefined
from coterie.rng import Rng

DRAW = Rng(0).generator("scores")


def numbers(*shape):
    return torch.from_numpy(DRAW.normal(size=shape))


def integers(most, *shape):
    return torch.from_numpy(DRAW.integers(0, most, shape))


OUTPUTS, CLASSES = numbers(60, 4), integers(4, 60)
TWO, YES = numbers(60, 2).round(decimals=1), integers(2, 60)
LOGITS, LABELS = numbers(60, 3), integers(2, 60, 3)


def test_accuracies_are_those_of_scikit_learn():
    found = OUTPUTS.argmax(1)
    assert float(scores.accuracy(OUTPUTS, CLASSES).mean()) == pytest.approx(
        sklearn.metrics.accuracy_score(CLASSES, found)
    )
    assert scores.balanced_accuracy(OUTPUTS, CLASSES) == pytest.approx(
        sklearn.metrics.balanced_accuracy_score(CLASSES, found)
    )
    some = CLASSES < 2  # a client without the other classes, which are predicted all the same
    recall = [float((found[CLASSES.eq(c)] == c).double().mean()) for c in (0, 1)]
    assert scores.balanced_accuracy(OUTPUTS[some], CLASSES[some]) == pytest.approx(sum(recall) / 2)
    expected = 1 - sklearn.metrics.hamming_loss(LABELS, LOGITS > 0)
    assert float(scores.label_accuracy(LOGITS, LABELS).mean()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (scores.auroc, sklearn.metrics.roc_auc_score),
        (scores.average_precision, sklearn.metrics.average_precision_score),
    ],
)
def test_ranking_is_that_of_scikit_learn(own, theirs):
    """Two classes with equal outputs among them, four classes one against the rest, labels; labels as numbers too."""
    assert own(TWO, YES) == pytest.approx(theirs(YES, TWO[:, 1] - TWO[:, 0]))
    each = [theirs(CLASSES.eq(c), OUTPUTS.softmax(1)[:, c]) for c in range(4)]
    assert own(OUTPUTS, CLASSES) == pytest.approx(sum(each) / 4)
    assert own(LOGITS, LABELS) == pytest.approx(theirs(LABELS, LOGITS, average="macro"))
    assert own(LOGITS, LABELS.float()) == own(LOGITS, LABELS)


def test_auroc_counts_pairs():
    """Ties are one half."""
    score = TWO[:, 1] - TWO[:, 0]
    above = (score[YES == 1, None] - score[YES == 0]).sign()
    assert bool((above == 0).any())
    assert scores.auroc(TWO, YES) == pytest.approx(float((above + 1).mean()) / 2)


def test_classes_that_a_client_lacks_do_not_count():
    """Of four classes, two are there; of labels, one varies."""
    some = CLASSES < 2
    outputs, classes = OUTPUTS[some], CLASSES[some]
    each = [sklearn.metrics.roc_auc_score(classes == c, outputs.softmax(1)[:, c]) for c in (0, 1)]
    assert scores.auroc(outputs, classes) == pytest.approx(sum(each) / 2)
    labels = torch.stack([LABELS[:, 0], torch.zeros_like(YES), torch.ones_like(YES)], 1)
    assert scores.auroc(LOGITS, labels) == pytest.approx(scores.auroc(LOGITS[:, :1], labels[:, :1]))
    with pytest.warns(
        Undefined, match="AUROC is undefined: there is no class that only some samples have"
    ):
        assert math.isnan(scores.auroc(OUTPUTS, torch.zeros_like(CLASSES)))
    with pytest.warns(Undefined, match="average precision is undefined: no sample is a yes"):
        assert math.isnan(scores.average_precision(TWO, torch.zeros_like(YES)))


def test_f1_is_that_of_scikit_learn():
    def theirs(targets, found):
        return pytest.approx(sklearn.metrics.f1_score(targets, found, average="macro"))

    assert scores.f1(OUTPUTS, CLASSES) == theirs(CLASSES, OUTPUTS.argmax(1))
    assert scores.f1(TWO, YES) == theirs(YES, TWO.argmax(1))
    assert scores.f1(LOGITS, LABELS) == theirs(LABELS, (LOGITS > 0).long())
    some = (CLASSES < 2) & (OUTPUTS.argmax(1) < 3)
    assert scores.f1(OUTPUTS[some], CLASSES[some]) == theirs(CLASSES[some], OUTPUTS.argmax(1)[some])
    none = torch.full_like(LOGITS, -1)
    with pytest.warns(Undefined, match="neither targets nor predictions have a yes"):
        assert math.isnan(scores.f1(none, torch.zeros_like(LABELS)))


def test_calibration_by_hand():
    """Confidences 0.9, 0.9 (one of them wrong) in one bin, 0.6 (right) in another: 2/3 * |0.5 - 0.9| + 1/3 * 0.4."""
    share = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]]).double()
    found = scores.calibration_error(share.log(), torch.tensor([0, 1, 1]))
    assert found == pytest.approx(2 / 3 * 0.4 + 1 / 3 * 0.4)
    assert scores.calibration_error(share.log(), torch.tensor([0, 1, 1]), bins=1) == pytest.approx(
        abs(2 / 3 - 0.8)
    )


def test_calibration_is_the_sum_over_bins():
    confidence, found = OUTPUTS.softmax(1).max(1)
    total = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if bool(inside.any()):
            right = (found == CLASSES)[inside].double().mean()
            total += float(inside.double().mean() * (right - confidence[inside].mean()).abs())
    assert scores.calibration_error(OUTPUTS, CLASSES) == pytest.approx(total)


def test_brier_is_that_of_scikit_learn():
    assert float(scores.brier(TWO, YES).mean()) == pytest.approx(
        sklearn.metrics.brier_score_loss(YES, TWO.softmax(1)[:, 1])
    )
    wanted = functional.one_hot(CLASSES, 4)
    expected = (OUTPUTS.softmax(1) - wanted).square().sum(1).mean()
    assert float(scores.brier(OUTPUTS, CLASSES).mean()) == pytest.approx(float(expected))
    each = [
        sklearn.metrics.brier_score_loss(LABELS[:, c], LOGITS[:, c].sigmoid()) for c in range(3)
    ]
    assert float(scores.brier(LOGITS, LABELS).mean()) == pytest.approx(sum(each) / 3)


POSITIONS = torch.where(numbers(20, 7) < -0.5, UNCOUNTED, integers(5, 20, 7))
POSITIONS[3] = UNCOUNTED
OF_POSITIONS = numbers(20, 7, 5)
COUNTED = POSITIONS != UNCOUNTED


def test_positions_that_do_not_count_do_not():
    found = OF_POSITIONS.argmax(2)
    right = [
        float((found[i][COUNTED[i]] == POSITIONS[i][COUNTED[i]]).double().mean())
        if COUNTED[i].any()
        else 0.0
        for i in range(20)
    ]
    assert scores.position_accuracy(OF_POSITIONS, POSITIONS).tolist() == pytest.approx(right)
    mended = OF_POSITIONS.clone()
    mended[:8] = functional.one_hot(POSITIONS[:8].clamp(min=0), 5).to(mended)
    exact = [
        float(COUNTED[i].any() and (found[i] == POSITIONS[i])[COUNTED[i]].all()) for i in range(20)
    ]
    exact[:8] = COUNTED[:8].any(1).double().tolist()
    assert 0 < sum(exact) < 20
    assert scores.exact_match(mended, POSITIONS).tolist() == exact
    entropy = functional.cross_entropy(OF_POSITIONS.flatten(0, 1), POSITIONS.flatten())
    assert scores.perplexity(OF_POSITIONS, POSITIONS) == pytest.approx(math.exp(float(entropy)))
    jaccard = sklearn.metrics.jaccard_score(POSITIONS[COUNTED], found[COUNTED], average="macro")
    assert scores.iou(OF_POSITIONS, POSITIONS) == pytest.approx(jaccard)
    for score in (scores.perplexity, scores.iou):
        with pytest.warns(Undefined, match="no position counts"):
            assert math.isnan(score(OF_POSITIONS[3:4], POSITIONS[3:4]))


def test_perplexity_of_equal_outputs_is_the_number_of_classes(monkeypatch):
    """However few samples are computed at once."""
    assert scores.perplexity(torch.zeros(20, 7, 5), POSITIONS) == pytest.approx(5)
    whole = scores.perplexity(OF_POSITIONS, POSITIONS)
    monkeypatch.setattr(scores, "_AT_ONCE", 70)
    assert scores.perplexity(OF_POSITIONS, POSITIONS) == pytest.approx(whole)


def test_iou_by_hand():
    """Truth 0 0 1 1, found 0 1 1 1: 1/2 and 2/3; a third class that nobody has does not count."""
    outputs = functional.one_hot(torch.tensor([[0, 1, 1, 1]]), 3).double()
    assert scores.iou(outputs, torch.tensor([[0, 0, 1, 1]])) == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_errors_of_numbers_are_those_of_scikit_learn():
    outputs, targets = numbers(30, 3), numbers(30, 3)
    for own, theirs in {
        scores.squared_error: sklearn.metrics.mean_squared_error,
        scores.absolute_error: sklearn.metrics.mean_absolute_error,
    }.items():
        assert float(own(outputs, targets).mean()) == pytest.approx(theirs(targets, outputs))
    assert scores.r2(outputs, targets) == pytest.approx(sklearn.metrics.r2_score(targets, outputs))
    one = sklearn.metrics.r2_score(targets[:, 0], outputs[:, 0])
    targets[:, 1:] = 2.0
    assert scores.r2(outputs, targets) == pytest.approx(one)
    for constant in (targets[:, 1], targets[:1, 0]):
        with pytest.warns(Undefined, match="the targets do not vary"):
            assert math.isnan(scores.r2(constant, constant))


def counted_pairs(risk, time, event):
    right = pairs = 0.0
    for i in range(len(time)):
        for j in range(len(time)):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return right / pairs


@pytest.mark.parametrize("at_once", [1, 100, 1 << 24])
def test_concordance_counts_pairs(at_once, monkeypatch):
    """With ties of times, of outputs and of both."""
    monkeypatch.setattr(scores, "_AT_ONCE", at_once)
    risk, time, event = numbers(40).round(decimals=1), integers(12, 40), integers(2, 40)
    found = scores.concordance(risk, torch.stack([time, event], 1).double())
    assert found == pytest.approx(counted_pairs(risk.tolist(), time.tolist(), event.tolist()))


def test_concordance_of_known_orders():
    """Perfect, reversed, and of outputs that are all equal."""
    targets = torch.tensor([[1.0, 1], [2, 1], [3, 0], [4, 1]])
    risk = torch.tensor([4.0, 3, 2, 1])
    assert scores.concordance(risk, targets) == 1
    assert scores.concordance(-risk, targets) == 0
    assert scores.concordance(torch.zeros(4), targets) == 0.5
    with pytest.warns(Undefined, match="no event before another time"):
        assert math.isnan(scores.concordance(risk, targets * torch.tensor([1.0, 0])))


@pytest.mark.parametrize(
    ("score", "outputs", "targets"),
    [
        (scores.auroc, OUTPUTS, CLASSES),
        (scores.average_precision, LOGITS, LABELS),
        (scores.calibration_error, OUTPUTS, CLASSES),
        (scores.r2, LOGITS, numbers(60, 3)),
        (scores.concordance, LOGITS[:, 0], torch.ones(60, 2).double()),
    ],
)
def test_a_model_that_diverged_has_no_value(score, outputs, targets):
    with pytest.warns(Undefined, match="an output is not finite"):
        assert math.isnan(score(torch.full_like(outputs, math.nan), targets))
