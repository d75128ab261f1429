"""IFCA's options."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from coterie.engine.task import Task
from coterie.exchange.base import Inbox, Message
from coterie.methods.ifca import Ifca, IfcaModels, choose_cluster
from coterie.methods.server import ServerContext
from coterie.models.layout import Layout
from coterie.rng import Rng
from coterie.testing import run_method, tiny_settings


@pytest.mark.option("Ifca.averaging_of", "models", "gradients")
@pytest.mark.option("Ifca.share_representation", False, True)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # (1 + 3 x 3) / 4 of the first cluster; the second has one client
        ({}, [[2.5, 25.0], [6.0, 60.0]]),
        # updates from (2, 4): -1 and 1 in the first cluster, 4 in the second, each a third
        ({"averaging_of": "gradients"}, [[2.0, 4 + (6 + 26) / 3], [2 + 4 / 3, 4 + 56 / 3]]),
        ({"share_representation": True}, [[(1 + 9 + 12) / 6, 25.0], [(1 + 9 + 12) / 6, 60.0]]),
    ],
)
def test_clusters_are_averaged_as_the_options_say(options, expected):
    """Two layers of one weight; 1, 3 and 2 samples; the first two clients chose the first cluster."""
    layout = Layout(
        nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), torch.float64
    )
    params = torch.tensor([[1.0, 10.0], [3.0, 30.0], [6.0, 60.0]], dtype=torch.float64)
    fields = {
        "label": torch.tensor([0, 0, 1]),
        "samples": torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64),
    }
    old = IfcaModels(torch.tensor([[2.0, 4.0], [2.0, 4.0]], dtype=torch.float64))
    method = Ifca(clusters=2, **options)
    context = ServerContext(0, Rng(0).at_round(0), layout, 3)
    merged = method.aggregate(context, old, Message(params, fields, torch.arange(3))).models
    torch.testing.assert_close(merged, torch.tensor(expected, dtype=torch.float64))


def test_a_cluster_has_the_servers_number_where_a_node_was_shown_some_of_the_models():
    """Of the server's models 1 and 4 came, in rows 0 and 1; the first client was shown one of them."""
    index, table = torch.tensor([[1, 1], [0, 1]]), torch.tensor([[1.0], [4.0]])

    task, nothing = Mock(spec=Task), torch.zeros_like(index)
    task.score.return_value = torch.tensor([[0.5, 0.5], [2.0, 3.0]])
    offer = Inbox(table, index, torch.tensor([[4, 4], [1, 4]]), nothing == 0, nothing, {}, nothing)
    label, model = choose_cluster(task, offer)
    assert label.tolist() == [4, 1]
    assert model.tolist() == [[4.0], [1.0]]


@pytest.mark.option("Ifca.start", "independent", "resample")
def test_the_first_models_are_drawn_or_chosen_by_the_clients(loss_table):
    """The first pair of models of which each is best for a third of the clients; or simply the first pair.

    Either way everybody is offered both, from the first round on.
    """
    sets, share = 6, 1 / 3
    for start in ("independent", "resample"):
        method = Ifca(clusters=2, start=start, candidates=sets, resample_share=share)
        loop = run_method(method, settings=tiny_settings(rounds=0))
        models = loop.task.draw_models(Rng(3), 2 * sets)
        losses = loss_table(loop.task, models).reshape(6, sets, 2)
        shares = (losses.argmin(2) == 0).double().mean(0)
        fair = [place for place in range(sets) if share <= float(shares[place]) <= 1 - share]
        chosen = fair[0] if start == "resample" else 0
        assert fair[0] > 0, "otherwise both would be one"
        assert torch.equal(loop.state.shared.models, models.reshape(sets, 2, -1)[chosen])
        context = ServerContext(0, Rng(3).at_round(0), loop.task.layout, 6)
        _, offer = method.reply(
            context, loop.state.shared, Message(torch.zeros(6, 0), {}, torch.arange(6))
        )
        assert offer.index.tolist() == [[0, 1]] * 6
