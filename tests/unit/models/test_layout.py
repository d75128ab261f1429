import pytest
import torch
from torch import nn

from coterie.errors import ConfigError, ModelError
from coterie.models import layout
from coterie.models.layout import NETS, Layout, build_model, draw_initial_params
from coterie.rng import Rng


@pytest.mark.parametrize(
    ("kind", "features", "outputs", "params"),
    [
        ("cnn-a", (3, 32, 32), 10, 62_006),
        ("cnn-b", (1, 28, 28), 10, 56_714),
        ("cnn-b", (1, 28, 28), 20, 57_364),
        ("mlp-c", (1, 28, 28), 20, 412_180),
        ("mlp-bn", (1, 8, 8), 10, 65 * 64 + 65 * 64 + 65 * 10 + 4 * 64),
        ("linear", (10,), 1, 11),
    ],
)
def test_reference_networks_have_the_published_number_of_parameters(
    kind, features, outputs, params
):
    assert Layout(build_model(kind, features, outputs)).trainable == params


def test_net_a_takes_the_dropout_that_the_code_of_dac_defines_and_leaves_out():
    plain = build_model("cnn-a", (3, 32, 32), 10)
    assert not [part for part in plain if isinstance(part, nn.Dropout)]
    net = build_model("coterie.models.layout:cnn_a", (3, 32, 32), 10, {"dropout": 0.5})
    assert isinstance(net, nn.Sequential)
    # after the first hidden layer
    assert [i for i, part in enumerate(net) if isinstance(part, nn.Dropout)] == [9]
    assert Layout(net).trainable == 62_006


def test_net_b_takes_small_images():
    assert build_model("cnn-b", (1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_an_unknown_network_names_the_nearest_and_wrong_inputs_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'cnn-a'"):
        build_model("cnna", (3, 32, 32), 10)
    with pytest.raises(ModelError, match=r"cnn-b takes images \(channels, height, width\)"):
        build_model("cnn-b", (10,), 10)
    assert "cnn-a" in NETS


def test_a_row_is_the_module_and_back():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = Layout(module, torch.float64)
    row = layout.flatten_module(module)
    assert layout.trainable == 12 + 4 + 8 + 8 + 2
    # running mean, running variance, number of batches
    assert layout.size == layout.trainable + 4 + 4 + 1
    again = layout.build_module(row, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.allclose(again(x), module.double().eval()(x), atol=1e-12)
    views = layout.split_rows(row.expand(2, -1))
    assert torch.equal(
        layout.join_tensors(views, trainable=True), row[: layout.trainable].expand(2, -1)
    )


def test_a_module_without_trainable_parameters_is_refused():
    with pytest.raises(ModelError, match="no trainable parameters"):
        Layout(nn.Flatten())


def test_frozen_parameters_are_kept_outside_the_trained_part():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    module[0].weight.requires_grad_(False)
    layout = Layout(module)
    assert layout.trainable == 2 + 2 + 1
    assert layout.size == 5
    assert list(layout.frozen) == ["0.weight"]


def test_first_models_differ_by_seed_and_client_and_not_by_call():
    module = nn.Linear(3, 2)
    layout = Layout(module)
    for source in (module, lambda: nn.Linear(3, 2)):
        first = draw_initial_params(source, layout, Rng(0))
        assert torch.equal(first, draw_initial_params(source, layout, Rng(0)))
        assert not torch.equal(first, draw_initial_params(source, layout, Rng(1)))
        assert not torch.equal(first, draw_initial_params(source, layout, Rng(0), client=0))


class Own(nn.Linear):
    """A module that takes the shape of inputs, outputs, and an argument of its own."""

    def __init__(self, features: tuple[int, ...], outputs: int, bias: bool = True):
        super().__init__(features[0], outputs, bias)


def without_a_return(outputs: int) -> None:
    nn.Linear(4, outputs)


def failing(width: int) -> nn.Module:
    return nn.Linear(4, "three" if width else 3)  # type: ignore[arg-type]


def anything(**options: int) -> nn.Module:
    return nn.Linear(options["inputs"], 3)


def test_a_model_is_made_by_its_import_path():
    """With `features` and `outputs` where they are taken, and its own arguments; a given one wins."""
    path = f"{__name__}:Own"
    assert {tuple(t.shape) for t in layout.build_model(path, (4,), 3).parameters()} == {
        (3, 4),
        (3,),
    }
    assert [
        tuple(t.shape) for t in layout.build_model(path, (4,), 3, {"bias": False}).parameters()
    ] == [(3, 4)]
    assert layout.build_model(path, (4,), 3, {"outputs": 5}).out_features == 5
    assert layout.build_model(f"{__name__}:anything", (4,), 3, {"inputs": 2}).in_features == 2
    made = layout.resolve_model(layout.NamedModel(path, {"bias": False}), (4,), 3)
    assert callable(made)
    assert made() is not made()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "Own",
            {"bais": False},
            "model.options: unknown argument of {}:Own 'bais'; did you mean 'bias'?",
        ),
        (
            "failing",
            {},
            "model '{}:failing' takes 'width', which is not given; set model.options.width",
        ),
        ("failing", {"width": 3}, "model '{}:failing' cannot be made with (width=3): "),
        (
            "without_a_return",
            {},
            "returned NoneType; expected a torch.nn.Module: is a `return` missing?",
        ),
        (
            "Nowhere",
            {},
            "has no attribute 'Nowhere'; expected package.module:name, importable from here",
        ),
        (
            "__name__",
            {},
            "is a str; expected a subclass of torch.nn.Module, or a function that makes one",
        ),
    ],
)
def test_what_makes_no_model_is_one_line(name, options, said):
    with pytest.raises((ConfigError, ModelError)) as raised:
        layout.build_model(f"{__name__}:{name}", (4,), 3, options)
    assert said.format(__name__) in str(raised.value)


def test_a_bundled_network_takes_no_options():
    with pytest.raises(ConfigError, match="linear takes none, import paths do"):
        layout.build_model("linear", (4,), 3, {"width": 3})


def test_an_own_model_is_told_apart_by_its_arguments():
    """Which its modules need not show."""
    assert layout.custom_model_name("linear") == layout.custom_model_name(nn.Linear(1, 1)) == ""
    assert layout.custom_model_name("a.b:Net") == "a.b:Net"
    named = [layout.NamedModel("a.b:Net", {"width": width}) for width in (1, 2)]
    assert [layout.custom_model_name(one) for one in named] == [
        'a.b:Net {"width": 1}',
        'a.b:Net {"width": 2}',
    ]
