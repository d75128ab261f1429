"""The options of the peer-to-peer methods keep the promises too."""

import warnings

import pytest
import torch
from tests.selection import first_only

from coterie.data.arrays import from_arrays
from coterie.errors import ConfigError
from coterie.methods.dac import Dac
from coterie.methods.panm import PanmGrad, PanmLoss
from coterie.methods.pens import Pens
from coterie.methods.ppdl import Ppdl
from coterie.papers.dac import PublishedDac
from coterie.simulation.run import simulate
from coterie.testing import check_method, tiny_federation, tiny_settings

METHODS = {
    "l2": PublishedDac(num_peers=2, similarity="inv_l2", aggregation="fedsim", scaling="minmax"),
    "weights": PublishedDac(
        num_peers=2, similarity="cos_weight", aggregation="fedsim_prior", tau=300, unknown="floor"
    ),
    "gradients": PublishedDac(
        num_peers=2, similarity="cos_grad", two_hop_pick="least", drop_nonpositive=True
    ),
    "push": PublishedDac(num_peers=2, loss_direction="push", two_hop_relay="any"),
    "history": PublishedDac(
        num_peers=2, two_hop_scope="history", tau_schedule="entropy", entropy=1.0
    ),
    "push and history": PublishedDac(
        num_peers=2, loss_direction="push", two_hop_scope="history", aggregation="fedsim"
    ),
    "pens, both stages": Pens(num_sampled=3, num_kept=1, num_peers=2, stage_one_rounds=2),
    "panm-loss, both stages": PanmLoss(
        num_peers=2, num_candidates=2, stage_one_rounds=1, interval=2, em="soft"
    ),
    "panm-grad, both stages": PanmGrad(
        num_peers=2, num_candidates=2, stage_one_rounds=1, interval=2
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", first_only(METHODS, slow=True))
def test_option_keeps_the_contract(name):
    check_method(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_clients_that_accept_every_model_change_nothing(name):
    """Bounds that nobody reaches: the judged messages pass through every exchange of a round."""
    models = []
    for acceptance in (False, {"worse": 1e9, "clip": 1e9, "samples": 1e9}):
        settings = tiny_settings(acceptance=acceptance, evaluate="final")
        run = simulate(tiny_federation(), METHODS[name], model="linear", settings=settings, seed=3)
        models.append(run.params)
    assert torch.equal(*models)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [Dac(num_peers=2, similarity="cos_grad"), PanmGrad(num_peers=2, num_candidates=2)]
)
def test_cosines_of_updates_keep_the_contract_when_clients_start_apart(method):
    """Then a peer's first model has to be told: it travels with the message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check_method(method, settings=tiny_settings(init="per_client"))


def below_zero(outputs, targets):
    """A squared error that is below 0 for good outputs."""
    return (outputs.reshape(targets.shape) - targets).square() - 100


RANKS_WRONGLY = {
    "dac": (Dac(num_peers=2), r"similarity = 'inv_loss' is 1 over the loss; take 'cos_grad'"),
    "panm-loss": (PanmLoss(num_peers=2), r"transform = 'inverse' is 1 over the loss; take 'neg"),
    "ppdl": (Ppdl(group_size=2), r"its reward is the exponential of minus the loss, which is at"),
}


@pytest.mark.parametrize("kind", RANKS_WRONGLY)
@pytest.mark.parametrize("loss", ["poisson", f"{__name__}:below_zero"])
def test_losses_below_zero_are_refused_where_their_inverse_ranks_models(kind, loss):
    """The likelihood of counts is known to be below 0; of a custom loss it shows in the first round."""
    method, reason = RANKS_WRONGLY[kind]
    x = torch.arange(48.0).reshape(24, 2) / 48
    federation = from_arrays(x, (x.sum(1) * 4).round(), num_clients=4, classes=0)
    line = rf"^loss 'poisson' can be below 0; {kind} cannot have it: {reason}"
    if loss != "poisson":
        line = r"needs losses of 0 and more; found -\d"
    with pytest.raises(ConfigError, match=line):
        simulate(federation, method, model="linear", settings=tiny_settings(loss=loss))


@pytest.mark.parametrize(
    "method",
    [
        Dac(num_peers=2, similarity="cos_weight"),
        PanmLoss(num_peers=2, transform="negative"),
        Pens(num_sampled=2, num_kept=1, stage_one_rounds=1),
    ],
    ids=lambda one: one.kind,
)
def test_methods_that_only_order_losses_have_any(method):
    x = torch.arange(48.0).reshape(24, 2) / 48
    federation = from_arrays(x, (x.sum(1) * 4).round(), num_clients=4, classes=0)
    settings = tiny_settings(loss=f"{__name__}:below_zero")
    found = simulate(federation, method, model="linear", settings=settings)
    assert bool(torch.isfinite(found.params).all())
