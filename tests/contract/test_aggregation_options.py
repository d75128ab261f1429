"""Every method with an `aggregation` merges by the rule that it names: against plain numpy in the same rounds."""

import inspect
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.selection import full

from coterie.functional.aggregation import ReceivedModels
from coterie.methods import METHODS
from coterie.simulation.run import simulate
from coterie.testing import tiny_federation, tiny_settings

OPTIONS: dict[str, dict[str, Any]] = {
    "pens": {"num_sampled": 8, "num_kept": 6, "num_peers": 6, "stage_one_rounds": 1},
    "sosicfl": {"endpoints": 3},
    "sosicfl-all": {"endpoints": 3},
    "sosicfl-plus": {"endpoints": 3, "regions": 3},
}
MODELS = {"dfedalt": "mlp-c", "fedper": "mlp-c", "fedrep": "mlp-c"}
KINDS = [
    kind for kind, made in METHODS.items() if "aggregation" in inspect.signature(made).parameters
]


def order_by_krum(models: np.ndarray) -> tuple[list[int], int]:
    """The models by their sums of squared distances to the nearest others, and how many are no suspects."""
    count = len(models)
    suspects = max(math.floor(SHARE * count + 1e-9), 1 if count >= 3 else 0)
    near = max(count - suspects - 2, 1)
    away = ((models[:, None] - models[None]) ** 2).sum(2)
    scores = [np.sort(np.delete(away[i], i))[:near].sum() for i in range(count)]
    return sorted(range(count), key=lambda i: (scores[i], i)), count - suspects


def trim(models: np.ndarray) -> np.ndarray:
    count = len(models)
    cut = max(math.floor(SHARE * count + 1e-9), 1 if count >= 3 else 0)
    return np.sort(models, 0)[cut : count - cut].mean(0)


def clip(models: np.ndarray, before: np.ndarray) -> np.ndarray:
    moved = models - before
    lengths = np.sqrt((moved**2).sum(1))
    others = lengths[lengths > 0]
    if not len(others):
        return before
    factor = np.minimum(1, TIMES * np.median(others) / np.maximum(lengths, 1e-300))
    return before + (factor[:, None] * moved).mean(0)


def find_middle(models: np.ndarray) -> np.ndarray:
    """Weiszfeld's steps on the points themselves."""
    point = models.mean(0)
    for _ in range(20_000):
        weights = 1 / np.maximum(np.sqrt(((models - point) ** 2).sum(1)), 1e-13)
        before, point = point, weights @ models / weights.sum()
        if np.abs(point - before).max() < 1e-12:  # far below what is compared
            break
    return point


SHARE, TIMES = 0.2, 1.0
"""The defaults that the docs give: the share of suspects, and the multiple of the median length."""


def take(received: ReceivedModels, found: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(found)).to(received.models)


def read(received: ReceivedModels) -> np.ndarray:
    return received.models.double().cpu().numpy()


def merge_by_median(received: ReceivedModels) -> torch.Tensor:
    return take(received, np.median(read(received), 0))


def merge_by_trimming(received: ReceivedModels) -> torch.Tensor:
    return take(received, trim(read(received)))


def merge_by_clipping(received: ReceivedModels) -> torch.Tensor:
    return take(received, clip(read(received), received.before.double().cpu().numpy()))


def merge_by_krum(received: ReceivedModels) -> torch.Tensor:
    models = read(received)
    return take(received, models[order_by_krum(models)[0][0]])


def merge_by_several(received: ReceivedModels) -> torch.Tensor:
    models = read(received)
    order, kept = order_by_krum(models)
    return take(received, models[order[:kept]].mean(0))


def merge_by_middle(received: ReceivedModels) -> torch.Tensor:
    return take(received, find_middle(read(received)))


def merge_by_samples(received: ReceivedModels) -> torch.Tensor:
    samples = received.samples.double().cpu().numpy()
    return take(received, samples @ read(received) / samples.sum())


def merge_alike(received: ReceivedModels) -> torch.Tensor:
    return take(received, read(received).mean(0))


def spread_again(received: ReceivedModels) -> torch.Tensor:
    """The mean by samples; of each matrix, its deviations from their mean stretched as published."""
    models, samples = read(received), received.samples.double().cpu().numpy()
    share = samples / samples.sum()
    merged = share @ models
    for slot in received.slots:
        if len(slot.shape) > 1:
            place = slice(slot.start, slot.stop)
            factor = np.sqrt(share @ models[:, place].var(1) / merged[place].var())
            center = merged[place].mean()
            merged[place] = center + factor * (merged[place] - center)
    return take(received, merged)


REFERENCES: dict[str | None, list[Callable[[ReceivedModels], torch.Tensor]]] = {
    None: [merge_by_samples, merge_alike],
    "median": [merge_by_median],
    "trimmed-mean": [merge_by_trimming],
    "norm-clipping": [merge_by_clipping],
    "krum": [merge_by_krum],
    "multi-krum": [merge_by_several],
    "geometric-median": [merge_by_middle],
    "variance-corrected": [spread_again],
}
"""Numpy's rule of each name; the mean, of samples or of models, where none is named."""


def run(kind: str, aggregation: Any) -> torch.Tensor:
    method: Any = METHODS[kind]
    made = method(**OPTIONS.get(kind, {}), aggregation=aggregation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # So many that each cluster has more than four: of three or four the median is the trimmed mean.
        federation, settings = tiny_federation(14), tiny_settings(rounds=3 if kind == "pens" else 2)
        return simulate(
            federation, made, model=MODELS.get(kind, "linear"), settings=settings
        ).params


@pytest.mark.option(
    (
        "Apfl.aggregation",
        "Cfl.aggregation",
        "Ditto.aggregation",
        "FeSem.aggregation",
        "FedAvg.aggregation",
        "FedAvgM.aggregation",
        "FedBN.aggregation",
        "FedDrift.aggregation",
        "FedGwc.aggregation",
        "FedPer.aggregation",
        "FedProx.aggregation",
        "FedRep.aggregation",
        "FixTopology.aggregation",
        "Gossip.aggregation",
        "Ifca.aggregation",
        "OneShot.aggregation",
        "Oracle.aggregation",
        "PFedMe.aggregation",
        "Pens.aggregation",
        "PerFedAvg.aggregation",
        "SimplexMethod.aggregation",
    ),
    None,
    "median",
    "trimmed-mean",
    "norm-clipping",
    "krum",
    "multi-krum",
    "geometric-median",
    "variance-corrected",
)
@pytest.mark.option(
    "Dac.aggregation",
    "median",
    "trimmed-mean",
    "norm-clipping",
    "krum",
    "multi-krum",
    "geometric-median",
    "variance-corrected",
)
@pytest.mark.parametrize(
    "kind", [kind if kind == "fedavg" else full(kind, slow=kind != "dac") for kind in KINDS]
)
def test_a_method_merges_by_the_rule_that_it_names(kind):
    """Each way of merging, a server's and a peer's, runs in CI; the others add where it is handed on."""
    default = inspect.signature(METHODS[kind]).parameters["aggregation"].default
    found = {rule: run(kind, rule if rule else default) for rule in REFERENCES}
    for rule, params in found.items():
        given = [run(kind, reference) for reference in REFERENCES[rule]]
        assert any(torch.allclose(params, one, rtol=0, atol=1e-7) for one in given), rule
    # A rule that is taken for another would be found: no two of them agree.
    for one, other in itertools.combinations(found, 2):
        assert not torch.allclose(found[one], found[other], rtol=0, atol=1e-7), (one, other)
