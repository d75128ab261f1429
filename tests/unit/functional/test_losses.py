"""Losses: values by hand, by PyTorch and by scikit-learn; every engine can run them; errors are lines."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from sklearn.metrics import mean_pinball_loss
from tests.selection import first_only
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

import coterie
from coterie.engine._loop import LoopEngine
from coterie.engine._work import EvaluationPairs, RawSamples, TrainingWork
from coterie.engine.native.traced import TracedProgram
from coterie.engine.optim import LocalTraining
from coterie.errors import ConfigError, DataError, ModelError
from coterie.functional import losses, metrics
from coterie.functional.losses import (
    LOSSES,
    Loss,
    cast_targets,
    default_loss,
    loss_to_table,
    make_loss,
)
from coterie.functional.metrics import MAIN, REGISTRY, Metric
from coterie.models.layout import Layout
from coterie.rng import Rng

SAMPLES = 12
DRAW = Rng(0).generator("losses")


def integers(classes, *shape):
    return torch.from_numpy(DRAW.integers(0, classes, (SAMPLES, *shape)))


def numbers(*shape):
    return torch.from_numpy(DRAW.normal(size=(SAMPLES, *shape)))


def with_gaps(targets, ignored=-100):
    """Some positions do not count, of the first sample the first; of the second sample, none does."""
    found = torch.where(numbers(*targets.shape[1:]) < -0.5, ignored, targets)
    found[0], found[0, 0], found[1] = targets[0], ignored, ignored
    return found


def survival():
    """Times with ties, most of them of events."""
    return torch.stack([integers(6), integers(4) > 0], 1).double()


CASES = {
    "cross-entropy": (losses.CrossEntropy(), numbers(4), integers(4)),
    "weighted": (losses.CrossEntropy((1, 2, 0.5, 3), 0.1), numbers(4), integers(4)),
    "binary": (losses.Binary(), numbers(1), integers(2)),
    "binary, numbers": (losses.Binary(3.0), numbers(), integers(2, 1).double()),
    "multi-label": (losses.MultiLabel(), numbers(3), integers(2, 3)),
    "multi-label, weighted": (losses.MultiLabel((1, 2, 3)), numbers(3), integers(2, 3).double()),
    "tokens": (losses.Tokens(), numbers(5, 4), with_gaps(integers(4, 5))),
    "tokens, smoothed": (losses.Tokens(7, 0.1), numbers(5, 4), with_gaps(integers(4, 5), 7)),
    "causal-lm": (losses.CausalLm(), numbers(5, 4), with_gaps(integers(4, 5))),
    "segmentation": (losses.Segmentation(255), numbers(3, 4, 2), with_gaps(integers(3, 4, 2), 255)),
    "dice": (losses.Dice(), numbers(3, 4, 2), with_gaps(integers(3, 4, 2))),
    "dice, with cross-entropy": (
        losses.Dice(cross_entropy=0.5),
        numbers(3, 4, 2),
        with_gaps(integers(3, 4, 2)),
    ),
    "mse": (losses.SquaredError(), numbers(2), numbers(2)),
    "mae": (losses.AbsoluteError(), numbers(2), numbers(2)),
    "huber": (losses.Huber(0.3), numbers(2), numbers(2)),
    "poisson": (losses.Poisson(), numbers(2), integers(5, 2).double()),
    "quantile": (losses.Quantile((0.2, 0.5, 0.7)), numbers(2, 3), numbers(2)),
    "cox": (losses.Cox(), numbers(1), survival()),
}
NAMES = list(CASES)


def test_every_bundled_loss_is_tried():
    assert {type(loss) for loss, _, _ in CASES.values()} == set(LOSSES.values())


@pytest.mark.parametrize("name", NAMES)
def test_no_samples_have_no_losses(name: str):
    """As in the validation of a client without validation data."""
    loss, outputs, targets = CASES[name]
    assert loss(outputs[:0], targets[:0]).shape == (0,)
    if loss.metric is not None:
        assert loss.measure_samples(outputs[:0], targets[:0]).shape == (0,)


# ---------------------------------------------------------------- values


def test_cross_entropy_is_pytorchs_and_a_plain_one_is_recognized():
    loss, outputs, targets = CASES["cross-entropy"]
    assert torch.equal(
        loss(outputs, targets), functional.cross_entropy(outputs, targets, reduction="none")
    )
    assert (
        make_loss("cross-entropy")
        == losses.CrossEntropy()
        != losses.CrossEntropy(label_smoothing=0.1)
    )


def test_weights_and_smoothing_are_those_of_the_formula():
    _, outputs, targets = CASES["weighted"]
    loss = losses.CrossEntropy((1, 2, 0.5, 3), 0.1)
    log = outputs.log_softmax(1)
    wanted = 0.9 * functional.one_hot(targets, 4) + 0.1 / 4
    expected = -(torch.tensor([1, 2, 0.5, 3]) * wanted * log).sum(1)
    torch.testing.assert_close(loss(outputs, targets), expected)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_binary_and_multi_label_are_pytorchs(weight):
    def expected(z, y):
        return functional.binary_cross_entropy(
            z.sigmoid(), y, weight=1 + (weight - 1) * y, reduction="none"
        )

    _, z, y = CASES["binary, numbers"]
    torch.testing.assert_close(losses.Binary(weight)(z, y), expected(z, y[:, 0]))
    _, z, y = CASES["multi-label, weighted"]
    torch.testing.assert_close(losses.MultiLabel((weight,) * 3)(z, y), expected(z, y).mean(1))
    assert torch.equal(losses.MultiLabel()(z, y), losses.MultiLabel()(z, y.long()))


@pytest.mark.parametrize("name", ["tokens", "tokens, smoothed", "segmentation"])
def test_positions_are_averaged_where_they_count(name):
    loss, outputs, targets = CASES[name]
    smoothing = getattr(loss, "label_smoothing", 0.0)
    first = outputs.movedim(-1, 1) if isinstance(loss, losses.Tokens) else outputs
    every = functional.cross_entropy(
        first, targets, ignore_index=loss.ignore_index, reduction="none", label_smoothing=smoothing
    )
    count = (targets != loss.ignore_index).flatten(1).sum(1)
    assert int(count[1]) == 0
    assert 0 < int(count[0]) < targets[0].numel()
    expected = every.flatten(1).sum(1) / count.clamp(min=1)
    torch.testing.assert_close(loss(outputs, targets), expected)
    assert float(loss(outputs, targets)[1]) == 0


def test_the_next_token_is_learned_by_hand():
    """Three tokens, of which the first predicts 2 and the second 0; the last predicts nothing."""
    share = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.8, 0.1, 0.1]]]).double()
    loss, targets = losses.CausalLm(), torch.tensor([[1, 2, 0]])
    expected = -(math.log(0.7) + math.log(0.5)) / 2
    torch.testing.assert_close(loss(share.log(), targets), torch.tensor([expected]).double())
    assert loss.measure_samples(share.log(), targets).tolist() == [1.0]
    assert loss.measure_samples(share.log(), torch.tensor([[1, 2, 1]])).tolist() == [0.5]
    # padding on either side does not count, and the first token is predicted by none
    for padded, expected in (([1, 2, -100], -math.log(0.7)), ([-100, -100, 0], -math.log(0.5))):
        found = loss(share.log(), torch.tensor([padded]))
        torch.testing.assert_close(found, torch.tensor([expected]).double())
    assert loss(share.log(), torch.tensor([[1, -100, -100]])).tolist() == [0.0]


def test_metrics_of_the_next_token_see_what_the_loss_compares():
    share = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.8, 0.1, 0.1]]] * 3).log()
    targets = torch.tensor([[1, 2, 0], [1, 2, 1], [1, 2, -100]])
    loss = losses.CausalLm()
    inputs = loss.metric_inputs(metrics.EXACT_MATCH, share, targets)
    assert metrics.EXACT_MATCH(*inputs) == pytest.approx(2 / 3)
    # of all tokens alike, where the loss is a mean over samples
    logs = [math.log(0.7), math.log(0.5), math.log(0.7), math.log(0.3), math.log(0.7)]
    assert metrics.PERPLEXITY(*inputs) == pytest.approx(math.exp(-sum(logs) / 5), rel=1e-6)


def test_dice_by_hand():
    """Three pixels, of which the last does not count; p of class 1 is 1/4 and 1/2, and the true classes are 0 and 1."""
    share = torch.tensor([[[0.75, 0.5, 0.9], [0.25, 0.5, 0.1]]]).double()[:, :, None]
    targets = torch.tensor([[[0, 1, -100]]])
    first = (2 * 0.75 + 1) / (0.75 + 0.5 + 1 + 1)
    second = (2 * 0.5 + 1) / (0.25 + 0.5 + 1 + 1)
    found = losses.Dice()(share.log(), targets)
    torch.testing.assert_close(found, torch.tensor([1 - (first + second) / 2]).double())
    entropy = -(math.log(0.75) + math.log(0.5)) / 2
    torch.testing.assert_close(
        losses.Dice(cross_entropy=2.0)(share.log(), targets), found + 2 * entropy
    )


def test_losses_of_numbers_are_pytorchs():
    for name, function in {
        "mse": functional.mse_loss,
        "mae": functional.l1_loss,
        "huber": lambda o, y, reduction: functional.huber_loss(
            o, y, delta=0.3, reduction=reduction
        ),
        "poisson": functional.poisson_nll_loss,
    }.items():
        loss, outputs, targets = CASES[name]
        torch.testing.assert_close(
            loss(outputs, targets), function(outputs, targets, reduction="none").mean(1)
        )


def test_quantiles_are_those_of_scikit_learn():
    loss, outputs, targets = CASES["quantile"]
    each = [
        mean_pinball_loss(targets, outputs[..., i], alpha=q) for i, q in enumerate(loss.quantiles)
    ]
    assert float(loss(outputs, targets).mean()) == pytest.approx(sum(each) / 3)
    assert torch.equal(loss(outputs.flatten(1), targets), loss(outputs, targets))


def test_cox_worked_by_hand():
    """Four are at risk at time 1, three at time 2 (Breslow: for both events), and the last is censored."""
    targets = torch.tensor([[2, 1], [1, 1], [3, 0], [2, 1]]).double()
    equal = losses.Cox()(torch.zeros(4, 1).double(), targets)
    torch.testing.assert_close(equal, torch.tensor([3, 4, 1, 3]).double().log())
    z = torch.tensor([2, 3, 5, 7]).double().log()
    expected = (
        torch.tensor([(2 + 5 + 7) / 2, (2 + 3 + 5 + 7) / 3, 1, (2 + 5 + 7) / 7]).double().log()
    )
    torch.testing.assert_close(losses.Cox()(z, targets), expected)


def test_the_mean_of_cox_is_the_partial_likelihood_over_the_number_of_samples():
    loss, outputs, targets = CASES["cox"]
    z, total = outputs[:, 0], 0.0
    for time in targets[:, 0].unique():
        events = (targets[:, 0] == time) & (targets[:, 1] == 1)
        risk = z[targets[:, 0] >= time].exp().sum()
        total += float(z[events].sum() - int(events.sum()) * risk.log())
    assert float(loss(outputs, targets).mean()) == pytest.approx(-total / SAMPLES)
    assert bool((loss(outputs, targets)[targets[:, 1] == 0] == 0).all())


# ---------------------------------------------------------------- in every engine


@pytest.mark.parametrize("name", NAMES)
def test_many_models_at_once_give_what_one_after_another_gives(name):
    """Values and gradients, of outputs whose samples do not lie one after another."""
    loss, outputs, targets = CASES[name]
    many = torch.stack([outputs, 2 * outputs, outputs - 1], -1).movedim(-1, 0)
    labels = torch.stack([targets, targets.flip(0), targets.roll(1, 0)], -1).movedim(-1, 0)

    def mean(o, y):
        return loss(o, y).mean()

    found, slopes = vmap(loss)(many, labels), vmap(grad(mean))(many, labels)
    for i in range(3):
        torch.testing.assert_close(found[i], loss(many[i].contiguous(), labels[i].contiguous()))
        torch.testing.assert_close(
            slopes[i], grad(mean)(many[i].contiguous(), labels[i].contiguous())
        )


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name):
    loss, outputs, targets = CASES[name]
    leaf = outputs.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda o: loss(o, targets), (leaf,))
    (slope,) = torch.autograd.grad(loss(leaf, targets).sum(), leaf)
    assert bool(slope.any())


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_a_sample_depends_on_others_only_where_it_says_so(name):
    loss, outputs, targets = CASES[name]
    assert loss.whole == (name == "cox")
    alone = torch.cat([loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(SAMPLES)])
    assert torch.allclose(alone, loss(outputs, targets)) != loss.whole


@pytest.mark.parametrize("name", NAMES)
def test_single_precision_and_bf16_products_give_losses_in_single_precision(name):
    loss, outputs, targets = CASES[name]
    single = targets.float() if targets.is_floating_point() else targets
    found = loss(outputs.float(), single)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = loss(outputs.float(), single)
    assert found.dtype == mixed.dtype == torch.float32
    torch.testing.assert_close(found.double(), loss(outputs, targets), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mixed, found)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    first_only(
        [
            "multi-label, weighted",
            "quantile",
            "weighted",
            "tokens, smoothed",
            "dice, with cross-entropy",
            "poisson",
        ]
    ),
)
def test_a_native_program_trains_and_measures_as_the_loop_engine(name):
    loss, outputs, targets = CASES[name]
    with Rng(0).temporary_torch_seed("init"):
        module = nn.Sequential(nn.Linear(7, outputs[0].numel()), nn.Unflatten(1, outputs.shape[1:]))
        layout = Layout(module, torch.float64)
    data = RawSamples(numbers(7), targets, torch.float64)
    rows = layout.own_values()[None]
    places = torch.arange(SAMPLES).reshape(1, 2, 6)
    work = TrainingWork(
        data, places, torch.full((1, 2), 6), LocalTraining(optimizer="sgd", lr=0.5, batch_size=6)
    )
    few = torch.arange(2)
    program, loop = (
        TracedProgram(layout, loss, data.prepare_inputs(few), data.prepare_targets(few)),
        LoopEngine(layout, loss),
    )
    ours, theirs = rows.clone(), rows.clone()
    found, expected = program.train(ours, work), loop.train(theirs, work, 1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(ours, rows, atol=1e-3)
    sets, nothing = (
        EvaluationPairs(data, places[0], torch.tensor([6, 5]), few * 0, few),
        layout.zero_inputs(1),
    )
    measured = loop.measure_pairs(theirs, sets, nothing, 1)
    for mine, value in zip(program.measure(ours, sets, nothing), measured.values(), strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-12)
    assert list(measured) == ["loss", loss.metric]


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize("name", NAMES)
def test_each_names_the_metric_by_which_methods_are_compared(name):
    loss, outputs, targets = CASES[name]
    if loss.metric is None:
        with pytest.raises(NotImplementedError, match="names no metric"):
            loss.measure_samples(outputs, targets)
        return
    one = REGISTRY[loss.metric]
    assert one in MAIN
    loss.check_metric_fits(one, targets)
    assert loss.measure_samples(outputs, targets).shape == (SAMPLES,)
    judged = loss.to_metric_form(outputs, targets)
    assert float(loss.measure_samples(outputs, targets).mean()) == pytest.approx(one(*judged))
    assert loss.metric_inputs(one, outputs, targets)[0].shape == judged[0].shape
    own = Metric("own", function=len)
    assert loss.metric_inputs(own, outputs, targets) == (outputs, targets)
    loss.check_metric_fits(own, targets)


def test_metrics_see_counts_medians_and_what_counts():
    poisson, outputs, targets = CASES["poisson"]
    torch.testing.assert_close(
        poisson.measure_samples(outputs, targets), (outputs.exp() - targets).abs().mean(1)
    )
    quantile, outputs, targets = CASES["quantile"]
    torch.testing.assert_close(
        quantile.measure_samples(outputs, targets), (outputs[..., 1] - targets).abs().mean(1)
    )
    binary, outputs, targets = CASES["binary"]
    assert torch.equal(
        binary.measure_samples(outputs, targets), ((outputs[:, 0] > 0).long() == targets).double()
    )
    pixels, outputs, targets = CASES["segmentation"]
    right = ((outputs.argmax(1) == targets) & (targets != 255)).flatten(1).sum(1)
    torch.testing.assert_close(
        pixels.measure_samples(outputs, targets),
        right / (targets != 255).flatten(1).sum(1).clamp(min=1).double(),
    )


def test_a_metric_of_other_targets_is_refused_with_those_that_fit():
    with pytest.raises(
        ConfigError,
        match="'auroc' is of one class a sample, or yes or no in each column; loss 'mse'",
    ):
        losses.SquaredError().check_metric_fits(REGISTRY["auroc"], numbers(2))
    with pytest.raises(ConfigError, match="take one of mse, mae, r2, or a custom function"):
        losses.SquaredError().check_metric_fits(REGISTRY["auroc"], numbers(2))
    own = losses.CustomLoss(f"{__name__}:focal")
    own.check_metric_fits(REGISTRY["auroc"], integers(2))
    with pytest.raises(
        ConfigError, match=r"'mae' is of numbers; loss 'own' trains outputs for one class a sample"
    ):
        own.check_metric_fits(REGISTRY["mae"], integers(2))


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "classes"),
    [
        ("accuracy", torch.randn(6, 1), torch.tensor([0, 1] * 3), 2),
        ("auroc", torch.randn(6), torch.tensor([0, 1] * 3), 2),
        ("f1", torch.randn(6, 2), torch.tensor([0, 1, 2] * 2), 3),
        ("exact_match", torch.randn(6, 6), torch.ones(6, 6).long(), 0),
        ("iou", torch.randn(6, 4, 5, 4), torch.ones(6, 5, 4).long(), 0),
        ("mae", torch.randn(3, 3), torch.randn(3), 0),
        ("auroc", torch.randn(6, 1), torch.tensor([0.0, 1.0] * 3), 0),
        ("concordance", torch.randn(6, 3), torch.ones(6, 2), 0),
    ],
)
def test_a_metric_makes_no_number_of_outputs_of_other_shapes(name, outputs, targets, classes):
    """The largest of one output is always the first: its accuracy would be the share of class 0."""
    own, metric = losses.CustomLoss(f"{__name__}:focal"), REGISTRY[name]
    own.check_metric_fits(metric, targets)
    with pytest.raises(ConfigError, match=f"metric '{name}' takes outputs and targets .*; found"):
        own.check_metric_shapes(metric, outputs, targets, classes)


def test_the_order_of_events_is_that_of_one_output_each():
    """Times 1 to 4, all of them events: of six pairs the last two samples are in the wrong order."""
    own, metric = losses.CustomLoss(f"{__name__}:focal"), REGISTRY["concordance"]
    outputs = torch.tensor([[4.0], [3.0], [1.0], [2.0]])
    targets = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0], [4.0, 1.0]])
    own.check_metric_shapes(metric, outputs, targets, 0)
    assert metric(*own.metric_inputs(metric, outputs, targets)) == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("outputs", "targets", "form"),
    [
        ((6, 3), torch.tensor([0, 1, 2] * 2), "class"),
        ((6, 1), torch.tensor([0, 1] * 3), "numbers"),
        ((6, 4), torch.ones(6, 4).long(), "labels"),
        ((6, 4, 3), torch.ones(6, 4).long(), "positions"),
        ((6, 3, 4, 4), torch.ones(6, 4, 4).long(), "numbers"),
        ((6, 1), torch.ones(6), "numbers"),
    ],
)
def test_the_form_of_outputs_of_a_function_follows_from_their_shape(outputs, targets, form):
    own = losses.CustomLoss(f"{__name__}:focal")
    assert own.find_form(torch.randn(outputs), targets) == form


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_is_accepted(name):
    loss, outputs, targets = CASES[name]
    loss.check_data(outputs[:3], targets)
    assert loss.num_outputs(targets, outputs.shape[1] if loss.targets == "class" else 0) >= 1


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "said"),
    [
        ("cross-entropy", (5, 4), (5,), r"'cross-entropy' takes outputs .* found \(samples, 5, 4\) and \(samples, 5\)"),
        ("binary", (2,), (), "one yes or no a sample; found"),
        ("multi-label", (2,), (3,), r"found \(samples, 2\) and \(samples, 3\): the module needs one output a label"),
        ("tokens", (64,), (32,), r"takes outputs \(samples, positions, classes\) and targets \(samples, positions\)"),
        ("tokens", (4, 5), (5,), "the classes last"),
        ("segmentation", (3, 4, 2), (2, 4), r"found \(samples, 3, 4, 2\) and \(samples, 2, 4\): the module needs"),
        ("dice", (3, 4), (3, 4), "before height and width"),
        ("mse", (2,), (3,), "one output for each entry of a target"),
        ("quantile", (2,), (2,), "the module needs 6 outputs"),
        ("cox", (2,), (2,), "the module needs one output, the logarithm of a hazard"),
        ("cox", (1,), (), r"found \(samples, 1\) and \(samples,\)"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(loss, outputs, targets, said):
    with pytest.raises(ModelError, match=said) as told:
        make_loss(loss).check_data(torch.zeros(8, *outputs), torch.ones(8, *targets))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "said"),
    [
        (
            "cross-entropy",
            (3,),
            torch.tensor([0, 3]),
            "a target is 3; expected a class from 0 to 2",
        ),
        ("cross-entropy", (3,), torch.tensor([0.5, 1]), "a target is 0.5; expected whole numbers"),
        ("binary", (), torch.tensor([0.0, 2.0]), "a target is 2.0; expected 0 or 1"),
        (
            "multi-label",
            (2,),
            torch.tensor([[0, 1], [1, -1]]),
            "a target is -1; expected 0 or 1 in each column",
        ),
        (
            "tokens",
            (2, 3),
            torch.tensor([[0, -1]]),
            r"a target is -1; expected a class from 0 to 2, or -100 where",
        ),
        (
            "dice",
            (3, 1, 1),
            torch.tensor([[[255]]]),
            "a target is 255; .* does not count .ignore_index",
        ),
        ("poisson", (1,), torch.tensor([[-2.0]]), "a target is -2.0; expected a count"),
        ("cox", (1,), torch.tensor([[1.0, 2.0]]), "a target is 2.0; expected 1 for an event or 0"),
    ],
)
def test_targets_that_are_none_are_refused(loss, outputs, targets, said):
    """Of all samples, though outputs are those of a few."""
    with pytest.raises(DataError, match=said):
        make_loss(loss).check_data(torch.zeros(1, *outputs), targets)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "cross-entropy", "label_smoothing": 2}, "label_smoothing is 2; expected a number, from 0 to 1"),
        ({"kind": "cross-entropy", "weight": [1, -1]}, "weight is .* expected a list of numbers, each 0 or more"),
        ({"kind": "huber", "delta": 0}, "delta is 0; expected a number, above 0"),
        ({"kind": "quantile", "quantiles": [1.0]}, "quantiles is"),
        ({"kind": "quantile", "quantiles": []}, "quantiles is"),
        ({"kind": "huber", "dleta": 1}, "did you mean 'delta'"),
        ({}, "kind is missing"),
        ("tokenz", "did you mean 'tokens'"),
        ("no_such_module:loss", "there is no module 'no_such_module'"),
        ("math:pi", "expected a function"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(table, said):
    with pytest.raises(ConfigError, match=said):
        make_loss(table)


def test_weights_are_one_a_class_or_label():
    with pytest.raises(ConfigError, match="weight has 2 entries; expected 4, one a class"):
        losses.CrossEntropy((1, 2)).check_data(numbers(4), integers(4))
    with pytest.raises(ConfigError, match="pos_weight has 2 entries; expected 3, one a label"):
        losses.MultiLabel((1, 2)).check_data(numbers(3), integers(2, 3))


# ---------------------------------------------------------------- by name or import path


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    log = outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return -((1 - log.exp()) ** 2) * log


def forgotten(outputs, targets):
    focal(outputs, targets)


def mean_of_all(outputs, targets):
    return focal(outputs, targets).mean()


def fails(outputs, targets):
    return focal(outputs.T, targets)


@dataclass(frozen=True)
class Scaled(Loss):
    kind: ClassVar[str] = "scaled"
    targets: ClassVar[losses.Targets] = "class"
    factor: float = 1.0

    def __call__(self, outputs, targets):
        return self.factor * focal(outputs, targets)


@pytest.mark.parametrize(
    "loss",
    [*(case[0] for case in CASES.values()), Scaled(2.0), losses.CustomLoss(f"{__name__}:focal")],
)
def test_a_stored_loss_is_read_again(loss):
    assert make_loss(loss_to_table(loss)) == loss


def test_a_function_and_a_class_are_found_by_their_path():
    assert (
        make_loss(focal) == make_loss(f"{__name__}:focal") == losses.CustomLoss(f"{__name__}:focal")
    )
    assert make_loss({"kind": f"{__name__}:Scaled", "factor": 3}) == Scaled(3.0)
    _, outputs, targets = CASES["cross-entropy"]
    own = make_loss(focal)
    own.check_data(outputs, targets)
    assert torch.equal(own(outputs, targets), focal(outputs, targets))
    with pytest.raises(ConfigError, match="expected one that is defined at the top of a module"):
        make_loss(lambda outputs, targets: outputs)
    with pytest.raises(ConfigError, match="unknown key 'path'"):
        make_loss({"kind": f"{__name__}:focal", "path": f"{__name__}:forgotten"})


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (forgotten, ConfigError, "returned None for 12 samples; expected one loss a sample"),
        (mean_of_all, ConfigError, r"returned a tensor of shape \(\) for 12 samples"),
        (
            fails,
            ModelError,
            r"fails on outputs \(12, 4\) and targets \(12,\): RuntimeError: Size does not match",
        ),
    ],
)
def test_a_function_that_returns_something_else_is_refused_at_the_door(function, error, said):
    _, outputs, targets = CASES["cross-entropy"]
    with pytest.raises(error, match=said):
        make_loss(function).check_data(outputs, targets)


# ---------------------------------------------------------------- targets


def test_the_usual_loss():
    assert default_loss(integers(4), 4) == losses.CrossEntropy()
    assert default_loss(numbers(2), 0) == losses.SquaredError()
    assert default_loss(torch.zeros(4, 2), 0) == losses.SquaredError()


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            integers(2, 3).double(),
            "0 and 1 in 3 columns: set loss = 'multi-label' .* or loss = 'mse'",
        ),
        (
            integers(2, 3),
            "3 whole numbers a sample, .* set loss to 'multi-label' or 'tokens' or 'causal-lm', or to a custom function",
        ),
        (
            integers(9, 3) + 1,
            "3 whole numbers a sample, .* set loss to 'tokens' or 'causal-lm', or",
        ),
        (
            integers(9, 4, 4) + 1,
            "16 whole numbers a sample, .* set loss to 'segmentation' or 'dice', or",
        ),
        (integers(9) + 1, "a whole number a sample, .* set loss to 'poisson' or 'mse', or"),
    ],
)
def test_targets_that_several_losses_fit_need_one_to_be_set(targets, said):
    with pytest.raises(ConfigError, match=said):
        default_loss(targets, 0)


@pytest.mark.parametrize(
    ("loss", "whole", "number"),
    [
        (losses.CrossEntropy(), torch.int64, torch.int64),
        (losses.Tokens(), torch.int64, torch.int64),
        (losses.MultiLabel(), torch.int64, torch.float64),
        (losses.Binary(), torch.int64, torch.float64),
        (losses.CustomLoss(f"{__name__}:focal"), torch.int64, torch.float64),
        (losses.Poisson(), torch.float64, torch.float64),
        (losses.Cox(), torch.float64, torch.float64),
    ],
)
def test_targets_are_whole_or_numbers_as_the_loss_takes_them(loss, whole, number):
    assert cast_targets(loss, torch.ones(2, dtype=torch.int32), torch.float64).dtype == whole
    assert cast_targets(loss, torch.ones(2, dtype=torch.float32), torch.float64).dtype == number


@pytest.mark.parametrize(
    "engine", ["loop", "vmap", pytest.param("compiled", marks=pytest.mark.full)]
)
def test_a_loss_of_ones_own_over_few_test_samples_is_that_of_plain_pytorch(engine):
    """Test sets of 1, 3 and 7 samples: the reported loss is the mean of the function over these."""
    stream = torch.Generator().manual_seed(0)
    x, sizes = torch.randn(60 + 11, 5, generator=stream), (1, 3, 7)
    y = torch.arange(len(x)) % 3
    owners = [client for client, size in enumerate(sizes) for _ in range(size)]
    data = coterie.from_arrays(
        x[:60], y[:60], clients=[i // 20 for i in range(60)], test=(x[60:], y[60:], owners)
    )
    settings = coterie.Settings(rounds=2, engine=engine, loss=focal)
    run = coterie.simulate(data, coterie.Local(), model=nn.Linear(5, 3), settings=settings)
    final = run.metrics[(run.metrics["split"] == "test") & (run.metrics["metric"] == "loss")]
    for client, size in enumerate(sizes):
        found = final[final["client"] == client].iloc[-1]["value"]
        own = torch.tensor(owners) == client
        module = run.model(client)
        with torch.no_grad():
            expected = float(focal(module(x[60:][own]), y[60:][own]).mean())
        assert int(own.sum()) == size
        assert found == pytest.approx(expected, rel=1e-5)
