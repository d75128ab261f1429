"""Contract tests of aggregation and selection rules."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie._util.tensors import index_optional
from coterie.functional import aggregation, selection
from coterie.functional.aggregation import ReceivedModels
from coterie.functional.selection import PeerKnowledge
from coterie.methods.base import Method
from coterie.methods.dac import Dac
from coterie.methods.fedavg import FedAvg
from coterie.methods.random_gossip import Random
from coterie.rng import Rng
from coterie.testing._promises import assert_accepted, check_pure_call, import_again
from coterie.testing.methods import check_method


def check_aggregation(
    rule: str | Callable[..., Any], *, similarity: bool = False, relabel: bool = True
) -> None:
    """Check the guarantees that every aggregation rule must give.

    It is found by its import path, returns a finite model of the form of the given models,
    for one model and for several, of either precision, changes no argument, and gives the same
    result again. The order of the peers changes nothing. In a peer-to-peer method and on a server
    it keeps the promises of methods: hosting, silence and resume among them.

    Args:
        rule: the function, or its import path.
        similarity: whether the rule needs similarities; then it is for DAC, and tried with it
            alone.
        relabel: whether the order of the peers must not matter.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    function, path = import_again(rule, "the aggregation rule")
    stream = Rng(0).generator("testing.aggregation")
    # One model (nothing arrived), a pair, and several, in both precisions.
    for count, dtype in (
        (1, torch.float32),
        (2, torch.float64),
        (5, torch.float64),
        (5, torch.float32),
    ):
        models = torch.from_numpy(stream.normal(size=(count, 7))).to(dtype)
        samples = torch.from_numpy(stream.integers(1, 50, size=count)).to(dtype)
        alike = torch.from_numpy(stream.random(count)).to(dtype)
        # On a client `before` is its own model, the first; on a server it is another one.
        cases = [(None, models[0]), (None, torch.zeros_like(models[0]))]
        if similarity:
            cases = [(alike, models[0])]
        for known, before in cases:
            received = ReceivedModels(
                models.clone(),
                samples.clone(),
                None if known is None else known.clone(),
                before.clone(),
            )
            with assert_accepted("it returns the merged model"):
                merged = check_pure_call(
                    lambda r: aggregation.merge_by_rule(function, r, "it"), received
                )
            assert bool(torch.isfinite(merged).all()), (
                f"merged from {count} finite models, the model is not finite"
            )
            # The client's own model stays first.
            order = torch.from_numpy(np.array([0, *(1 + stream.permutation(count - 1))]))
            alike_in_order = index_optional(known, order)
            turned = function(ReceivedModels(models[order], samples[order], alike_in_order, before))
            # Another order of the sums rounds differently.
            limit = {torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
            close = torch.allclose(turned, merged, rtol=limit, atol=limit)
            assert close or not relabel, (
                "the order of the peers changes the result; it is that of their ids"
            )
    methods: list[Method] = [Random(num_peers=3, aggregation=path), FedAvg(aggregation=path)]
    if similarity:
        methods = [Dac(num_peers=3, aggregation=path)]
    for method in methods:
        check_method(method, relabel=relabel)


def check_selection(rule: str | Callable[..., Any], *, relabel: bool = True) -> None:
    """Check the guarantees that every selection rule must give.

    It is found by its import path, returns a number for each member, whatever the client knows by
    then, changes no argument, and gives the same result again. Renaming the members renames the
    choice. In methods it keeps the promises of methods: hosting, silence and resume among them.

    Args:
        rule: the function, or its import path.
        relabel: whether the members' ids must not matter; False for a graph given by ids.

    Raises:
        AssertionError: naming the broken guarantee.
    """
    function, path = import_again(rule, "the selection rule")
    stream = Rng(0).generator("testing.selection")
    population = 7
    # In round 0 nothing is known.
    for round in (0, 4):
        for client in (0, population - 1):
            known = _make_known(stream, round, client, population)
            with assert_accepted("it returns a number for each member"):
                check_pure_call(lambda k: selection.select_by_rule(function, k, 3, "it"), known)
            assert not relabel or _ignores_ids(function, known, stream), (
                "renaming the members changes the choice: ids mean nothing; use what is known of "
                "a member"
            )
    check_method(Random(num_peers=2, selection=path), relabel=relabel)
    check_method(Dac(num_peers=2, selection=path), relabel=relabel)


def _make_known(
    stream: np.random.Generator, round: int, client: int, population: int
) -> PeerKnowledge:
    """What a client may know in a round: nothing at the start."""
    count = torch.from_numpy(stream.integers(0, round + 1, size=population))
    candidates = torch.arange(population) != client
    measured = (count > 0) & candidates
    # What a client measured itself is not reported by peers.
    reported = (
        ~measured & candidates & torch.from_numpy(stream.random(population) < 0.5) & (round > 0)
    )
    value = torch.from_numpy(stream.random(population))
    return PeerKnowledge(
        client=client,
        round=round,
        candidates=candidates,
        similarity=torch.where(measured | reported, value, 0.0),
        measured=measured,
        reported=reported,
        count=count * candidates,
        age=torch.where(
            measured, 1 + torch.from_numpy(stream.integers(0, max(1, round), size=population)), -1
        ),
        noise=torch.from_numpy(stream.gumbel(size=population)),
    )


def _ignores_ids(
    function: Callable[..., Any], known: PeerKnowledge, stream: np.random.Generator
) -> bool:
    """Whether the members that a client chooses are the same under other ids, but for ties."""
    order = torch.from_numpy(stream.permutation(len(known.candidates)))
    # `order` gives the old id of each new one, `place` the new id of each old one.
    place = torch.argsort(order)
    tensors = {}
    for name, value in vars(known).items():
        if isinstance(value, Tensor):
            tensors[name] = value[order]
    scores = function(known)
    turned = function(replace(known, client=int(place[known.client]), **tensors))
    return bool(
        torch.isclose(
            turned.double(), scores[order].double(), rtol=1e-9, atol=1e-9, equal_nan=True
        ).all()
    )
