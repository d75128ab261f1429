"""Heads of FedPer and its kin: the last layers, as many as the model has."""

import pytest
from torch import nn

from coterie.errors import ConfigError
from coterie.methods.fedper import head_tensors
from coterie.models.layout import Layout


def test_a_head_is_the_last_layers_and_no_more_than_there_are() -> None:
    layout = Layout(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    assert head_tensors(layout, 0) == ()
    assert head_tensors(layout, 1) == ("2.weight", "2.bias")
    assert set(head_tensors(layout, 2)) >= {"1.running_mean", "1.weight", "2.bias"}
    assert len(head_tensors(layout, 3)) == len(set(head_tensors(layout, 3)))
    assert "0.weight" in head_tensors(layout, 3)
    with pytest.raises(ConfigError, match="personal_layers is 4, and the model has 3 with trained"):
        head_tensors(layout, 4)
