"""Methods whose clients choose peers in views of few members."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.selection import first_only

from coterie.errors import ConfigError
from coterie.exchange.in_memory import InMemory
from coterie.functional.selection import PeerKnowledge
from coterie.methods import METHODS
from coterie.methods.base import Round, draw_peers_uniformly
from coterie.methods.dac import Dac
from coterie.methods.pens import Pens
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.runtime.settings import Settings
from coterie.simulation.run import simulate
from coterie.testing import check_method, tiny_federation, tiny_settings
from coterie.testing.tiny import build_task

CLIENTS = 14
VIEWS = {"view": 4, "shuffle": 2}


def prefer_even(known: PeerKnowledge) -> torch.Tensor:
    """A selection rule: even ids first."""
    return known.noise + 100.0 * (torch.arange(len(known.noise)) % 2 == 0)


RULE = f"{__name__}:prefer_even"
PEER_METHODS = {
    "dac-table": Dac(num_peers=3, table=5, explore=1),
    "random": Random(num_peers=3),
    "dac": Dac(num_peers=3),
    "dac-full-table": Dac(num_peers=3, table=CLIENTS),
    "pens": Pens(num_sampled=4, num_kept=2, num_peers=3, stage_one_rounds=2),
    "panm-loss": METHODS["panm-loss"](
        num_peers=3, num_candidates=3, stage_one_rounds=2, interval=2
    ),
    "sketches": Dac(num_peers=3, table=5, similarity="cos_weight", sketch=16, num_candidates=4),
    "random-rule": Random(num_peers=3, selection=RULE),
    "dac-rule": Dac(num_peers=3, selection=RULE),
    "dac-table-rule": Dac(num_peers=3, table=5, selection=RULE),
}


def run(method, *, clients=CLIENTS, **settings):
    settings = tiny_settings(**{"rounds": 5, "check": False, **settings})
    return simulate(tiny_federation(clients), method, model="linear", settings=settings, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("name", first_only(PEER_METHODS, slow=True))
def test_promises_hold_with_views(name):
    """Resumed, hosted in any grouping, with members that never answer: views follow from the round."""
    method = PEER_METHODS[name]
    check_method(
        method,
        federation=tiny_federation(CLIENTS),
        settings=tiny_settings(rounds=5, peer_sampling=VIEWS),
        # Places on rings follow from the numbers of clients.
        relabel=False,
    )


@pytest.mark.parametrize("name", first_only(PEER_METHODS))
def test_a_view_of_the_whole_population_gives_the_bytes_of_a_run_without(name):
    plain = run(PEER_METHODS[name])
    whole = run(PEER_METHODS[name], peer_sampling={"view": CLIENTS, "shuffle": 0})
    narrow = run(PEER_METHODS[name], peer_sampling=VIEWS)
    assert torch.equal(plain.params, whole.params)
    assert plain.edges.equals(whole.edges)
    assert not torch.equal(plain.params, narrow.params)


def views_by_round(rounds: int) -> list[list[set[int]]]:
    settings = Settings(peer_sampling=VIEWS)
    found = []
    for index in range(rounds):
        views = settings.views.draw_views(
            Rng(1, index), torch.arange(CLIENTS), torch.ones(CLIENTS, dtype=torch.bool)
        )
        found.append([set(row) - {-1} for row in views.tolist()])
    return found


@pytest.mark.parametrize("name", first_only(PEER_METHODS))
def test_who_is_read_was_in_a_view_or_known_before(name):
    """Known are those read before, and, where peers share similarities, those that they have read."""
    rounds, method = 8, PEER_METHODS[name]
    result = run(method, rounds=rounds, peer_sampling=VIEWS)
    views = views_by_round(rounds)
    known = [set[int]() for _ in range(CLIENTS)]
    outside = 0
    for index, edges in result.edges.groupby("round"):
        new = [set(each) for each in known]
        for reader, group in edges.groupby("reader"):
            read = set(group["read"])
            assert read
            assert read <= views[index][reader] | known[reader], (index, reader)
            outside += len(read - views[index][reader])
            new[reader] |= read
            if isinstance(method, Dac) and method.two_hop:
                for peer in read:
                    new[reader] |= known[peer] - {reader}
        if isinstance(method, Dac) and method.num_candidates:  # whose sketches were read
            new = [new[k] | views[index][k] for k in range(CLIENTS)]
        known = new
    # Uniform gossip knows nobody; all others return to whom they have found.
    assert (outside > 0) == (name != "random"), outside


def test_uniform_draws_are_of_the_view_and_all_of_it_is_equally_likely():
    """400 rounds of static views of four members: each is among two drawn in half of the rounds."""
    settings = Settings(peer_sampling={"view": 4, "shuffle": 0})
    task = build_task(tiny_federation(CLIENTS).host(torch.arange(CLIENTS)), "linear", engine="loop")
    door, everybody = (
        InMemory(torch.arange(CLIENTS), CLIENTS),
        torch.ones(CLIENTS, dtype=torch.bool),
    )
    seen = np.zeros((CLIENTS, CLIENTS))
    for index in range(400):
        rnd = Round(index, task, door, Rng(3, index), everybody, sampling=settings.views)
        peers = draw_peers_uniformly(rnd, 2)
        for client, row in enumerate(peers.tolist()):
            assert len(set(row)) == 2
            seen[client, row] += 1
    views = rnd.views_of(torch.arange(CLIENTS))
    for client, view in enumerate(views.tolist()):
        members = sorted(set(view) - {-1})
        assert seen[client].nonzero()[0].tolist() == members
        share = 2 / len(members)
        error = np.sqrt(share * (1 - share) / 400)
        assert (abs(seen[client, members] / 400 - share) <= 4 * error).all()


def test_one_who_is_missing_is_replaced_and_the_other_draws_stay():
    settings, population = Settings(peer_sampling={"view": 6, "shuffle": 2}), 200
    task = build_task(
        tiny_federation(population).host(torch.arange(population)), "linear", engine="loop"
    )
    door = InMemory(torch.arange(population), population)
    everybody = torch.ones(population, dtype=torch.bool)
    rnd = Round(4, task, door, Rng(3, 4), everybody, sampling=settings.views)
    before = draw_peers_uniformly(rnd, 3)
    lost = int(before[7, 1])
    after = draw_peers_uniformly(
        dataclasses.replace(rnd, reachable=everybody.index_fill(0, torch.tensor([lost]), False)), 3
    )
    assert int(after[7, 1]) not in {-1, lost, *before[7].tolist()}
    assert after[7, [0, 2]].tolist() == before[7, [0, 2]].tolist()
    # Who has not drawn the missing one, and has it not in its view, draws as before.
    views = rnd.views_of(torch.arange(population))
    apart = (views != lost).all(1)
    apart[lost] = False
    assert torch.equal(before[apart], after[apart])
    assert apart.sum() >= population - 8


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        (METHODS["fedavg"](), {}, "fedavg cannot have it: its clients draw no peers"),
        (METHODS["fix-topology"](), {}, "fix-topology cannot have it: its graph is drawn once"),
        (METHODS["oracle"](), {}, "oracle cannot have it: it asks all members for their cluster"),
        (METHODS["ppdl"](), {}, "ppdl cannot have it: its bandit chooses among groups"),
        (Dac(loss_direction="push"), {}, "dac cannot have it: a push asks all members"),
    ],
)
def test_methods_that_need_everybody_are_refused(method, settings, text):
    with pytest.raises(ConfigError, match=text):
        run(method, peer_sampling=True, **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"schedule": "asynchronous", "time": {"step_seconds": 1.0, "record_seconds": 1.0}},
            "peer_sampling is set; with schedule = 'asynchronous' it is not: views change",
        ),
        ({"pace": "free"}, "peer_sampling is set; with pace = 'free' it is not: views change"),
        ({"peer_sampling": {"view": 3}}, "view is 3; expected an even number"),
        ({"peer_sampling": {"views": 4}}, "views"),
    ],
)
def test_settings_that_do_not_go_with_views_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        Settings(**{"peer_sampling": True, **settings})


@pytest.mark.option("Settings.peer_sampling", None, False, True)
def test_unset_and_switched_off_views_are_one_setting():
    assert Settings(peer_sampling=False) == Settings()
    assert "peer_sampling" not in Settings().to_identity()
    assert Settings(peer_sampling=True).peer_sampling == {"view": 30, "shuffle": 8}
    local = run(METHODS["local"](), peer_sampling=VIEWS)
    assert torch.equal(local.params, run(METHODS["local"]()).params)
