"""Patterns name tensors as the user's module does; what they choose is shared, stays at home, or is compared."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from coterie.errors import ConfigError
from coterie.models.layout import Layout
from coterie.models.part import ColumnSet, ParameterSharing, match_patterns


class Net(nn.Module):
    """Two layers and a normalization in a body, and a head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))


LAYOUT = Layout(Net())
NAMES = [slot.name for slot in LAYOUT.slots]


def names(*patterns):
    mask = match_patterns(LAYOUT, patterns, "shared")
    return {slot.name for slot in LAYOUT.slots if bool(mask[slot.start : slot.stop].all())}


def test_columns_of_rows_and_rows_of_columns():
    columns = ColumnSet.from_mask(torch.tensor([True, True, False, True, False]))
    rows = torch.arange(10.0).reshape(2, 5)
    assert columns == ColumnSet(((0, 2), (3, 4)), 5)
    assert columns.select_from(rows).tolist() == [[0, 1, 3], [5, 6, 8]]
    assert columns.expand_to_rows(columns.select_from(rows)).tolist() == [
        [0, 1, 0, 3, 0],
        [5, 6, 0, 8, 0],
    ]
    assert columns.replace_in(rows, -columns.select_from(rows)).tolist() == [
        [0, -1, 2, -3, 4],
        [-5, -6, 7, -8, 9],
    ]
    assert rows.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert columns.mask.tolist() == [True, True, False, True, False]
    assert ColumnSet((), 5).select_from(rows).shape == (2, 0)


def test_columns_side_by_side_are_not_copied():
    rows = torch.zeros(2, 5)
    assert ColumnSet(((1, 4),), 5).select_from(rows).data_ptr() == rows[:, 1:].data_ptr()


def test_a_pattern_matches_names_of_tensors_and_of_modules():
    assert names() == set(NAMES)
    assert names("head") == names("head.*") == {"head.weight", "head.bias"}
    assert names("*.bias") == {"body.0.bias", "body.1.bias", "body.3.bias", "head.bias"}
    assert names("body.[03].weight") == {"body.0.weight", "body.3.weight"}


def test_an_exclamation_mark_takes_out_in_any_order():
    assert names("!head") == set(NAMES) - {"head.weight", "head.bias"}
    assert names("body", "!body.1") == names("!body.1", "body") == {one for one in NAMES if one.startswith("body.")
                                                                    and not one.startswith("body.1")}  # fmt: skip


def test_tied_and_parametrized_tensors_answer_to_all_of_their_names():
    net = Net()
    net.body[3] = nn.Linear(3, 3)
    net.head = nn.Linear(3, 3)
    net.head.weight = net.body[3].weight
    mask = match_patterns(Layout(net), ["head.weight"], "shared")
    assert int(mask.sum()) == 9
    parametrize.register_parametrization(net.body[0], "weight", nn.Identity())
    layout = Layout(net)
    assert int(match_patterns(layout, ["body.0.weight"], "shared").sum()) == 12
    assert layout.layer_tensors()["body.0"] == (
        "body.0.bias",
        "body.0.parametrizations.weight.original",
    )


def test_a_pattern_that_matches_nothing_is_refused_with_names_that_are_near():
    with pytest.raises(
        ConfigError,
        match=r"^shared: 'bodi\.\*' matches no tensor of the model; near names are body",
    ):
        match_patterns(LAYOUT, ["bodi.*"], "shared")
    with pytest.raises(
        ConfigError, match=r"matches no tensor of the model; it has body.0.weight, "
    ):
        match_patterns(LAYOUT, ["!zzzzz"], "shared")
    net = Net()
    net.body[0].requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"'body\.0' matches frozen weights alone, which all clients have"
    ):
        match_patterns(Layout(net), ["body.0"], "shared")


def test_layers_and_normalizations_are_named():
    assert list(LAYOUT.layer_tensors()) == ["body.0", "body.1", "body.3", "head"]
    norm = (
        "body.1.weight",
        "body.1.bias",
        "body.1.running_mean",
        "body.1.running_var",
        "body.1.num_batches_tracked",
    )
    assert LAYOUT.layer_tensors()["body.1"] == LAYOUT.normalization_tensors() == norm


def test_by_default_everything_is_shared_and_what_is_trained_is_compared():
    part = ParameterSharing.from_patterns(LAYOUT)
    assert part.shares_all
    assert part.shared.ranges == ((0, LAYOUT.size),)
    assert part.compared == part.trained == ColumnSet(((0, LAYOUT.trainable),), LAYOUT.size)
    rows = torch.zeros(1, LAYOUT.size)
    assert part.keep_local(rows - 1, rows) is rows


def test_what_a_method_keeps_at_home_and_what_the_setting_leaves_out_stay_at_home():
    part = ParameterSharing.from_patterns(
        LAYOUT, ["!body.1"], ["head", "body.0"], ["head"], "fedper"
    )
    trained = match_patterns(LAYOUT, ["body.0", "body.3"], "")
    assert torch.equal(part.shared.mask, trained)
    assert torch.equal(part.local.mask, ~trained)
    assert torch.equal(part.compared.mask, match_patterns(LAYOUT, ["body.0"], ""))
    before, merged = torch.zeros(1, LAYOUT.size), torch.ones(1, LAYOUT.size)
    assert torch.equal(part.keep_local(before, merged)[0].bool(), trained)


def test_nothing_to_share_or_to_compare_is_refused():
    with pytest.raises(
        ConfigError, match=r"nothing is left to share: shared is \['!\*'\]; share a layer at least"
    ):
        ParameterSharing.from_patterns(LAYOUT, ["!*"])
    with pytest.raises(ConfigError, match=r"shared is \['head'\], and fedper keeps head at home"):
        ParameterSharing.from_patterns(LAYOUT, ["head"], home=["head"], owner="fedper")
    with pytest.raises(ConfigError, match=r"what fedper keeps at home: 'heed' matches no tensor"):
        ParameterSharing.from_patterns(LAYOUT, home=["heed"], owner="fedper")
    with pytest.raises(ConfigError, match="names nothing that is trained and shared"):
        ParameterSharing.from_patterns(LAYOUT, ["head"], ["body"])


def test_choosing_nothing_is_choosing_everything():
    """Also with running statistics, which are shared and not compared."""
    layout = Layout(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    assert layout.trainable < layout.size
    assert ParameterSharing.from_patterns(layout) == ParameterSharing.from_patterns(layout, ["*"])
