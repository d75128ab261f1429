"""Adapters of different ranks keep the promises of methods, in blocks too."""

import pytest
import torch
from tests.contract.test_blocks import same
from tests.hugging import require_peft
from tests.selection import first_only, full
from torch import nn

import coterie
from coterie.cluster.blocks import ThreadBlocks, simulate_in_blocks
from coterie.models.layout import NamedModel
from coterie.testing import check_method, tiny_federation, tiny_settings

require_peft()
RANKS = [1, 3, 2]


def small():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


ADAPTER = {"r": RANKS, "target": ["0"], "trained": ["2"]}
MODEL = NamedModel(f"{__name__}:small", adapter=ADAPTER)
RULE = {"aggregation": "product-mean"}
METHODS = [
    coterie.Random(num_peers=2, **RULE),
    full(coterie.FedAvg(aggregation="norm-weighted")),
    full(coterie.FedProx(mu=0.5)),
    full(coterie.Dac(num_peers=2, similarity="cos_product", **RULE)),
    full(coterie.Ifca(clusters=2, **RULE)),
    full(coterie.FedAvgM(**RULE)),
    full(coterie.Ditto(**RULE)),
    full(coterie.Apfl()),
    full(coterie.PFedMe()),
    full(coterie.PerFedAvg()),
    full(coterie.FedRep()),
    full(coterie.Pens(num_sampled=3, num_kept=1, num_peers=2, stage_one_rounds=1, **RULE)),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "method", first_only(METHODS[:5], slow=True), ids=lambda method: method.kind
)
def test_methods_keep_their_promises(method):
    """But for new numbers of clients, which are other ranks."""
    check_method(method, model=MODEL, relabel=False)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.kind)
def test_no_round_of_a_method_trains_more_than_the_rank_of_a_client(method):
    """Every model that serves a client or is its own, after each number of rounds."""
    for rounds in (1, 3):
        settings = tiny_settings(rounds=rounds, engine="loop", evaluate="final")
        run = coterie.simulate(tiny_federation(), method, model=MODEL, settings=settings)
        for client in range(6):
            rank = RANKS[client % 3]
            named = dict(run.model(client).named_parameters())
            shapes = {tuple(one.shape) for name, one in named.items() if "lora_" in name}
            assert shapes == {(rank, 4), (6, rank)}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vmap", "compiled"])
def test_engines_agree(engine):
    """In the columns that an adapter does not use, to the bit: they stay 0."""
    found = {}
    for name in ("loop", engine):
        settings = tiny_settings(rounds=3, engine=name, evaluate="final")
        method = coterie.Random(num_peers=2, **RULE)
        found[name] = coterie.simulate(tiny_federation(), method, model=MODEL, settings=settings)
    torch.testing.assert_close(found["loop"].params, found[engine].params, rtol=0, atol=1e-10)
    assert torch.equal(found["loop"].params == 0, found[engine].params == 0)
    assert bool((found[engine].params == 0).any())


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.kind)
def test_blocks_end_with_the_bytes_of_one_process(tmp_path, method):
    given = {"model": MODEL, "settings": tiny_settings(rounds=3, engine="loop"), "seed": 3}
    whole = coterie.simulate(tiny_federation(), method, folder=tmp_path / "whole", **given)
    split = simulate_in_blocks(
        tiny_federation(), method, folder=tmp_path / "split", blocks=[1, 4, 1],
        start=ThreadBlocks.start, **given,
    )  # fmt: skip
    assert same(whole, split)
