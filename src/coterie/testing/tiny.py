"""Tiny federations and settings, for runs of about a second."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.data.federation import Federation, TestSet, Truth
from coterie.data.source import Samples, Source
from coterie.engine.task import LocalTraining
from coterie.rng import Rng
from coterie.simulation.run import Settings


def tiny_federation(
    num_clients: int = 6,
    clusters: int = 2,
    *,
    train: int = 12,
    validation: int = 4,
    features: tuple[int, ...] = (4,),
    classes: int = 3,
    seed: int = 0,
) -> Federation:
    """Make a small classification problem with concept shift between clusters.

    Every cluster labels Gaussian inputs by its own random linear rule. Client i is in cluster i modulo `clusters`;
    inputs are float64, so that engines can be compared closely.
    """
    stream = Rng(seed).generator("testing.federation")
    size = int(np.prod(features))
    rules = stream.normal(size=(clusters, size, classes))
    samples = train + validation

    def draw(cluster: int, number: int) -> tuple[Tensor, Tensor]:
        x = stream.normal(size=(number, size))
        y = (x @ rules[cluster]).argmax(1)
        return torch.from_numpy(x).reshape(number, *features), torch.from_numpy(y)

    cluster = torch.arange(num_clients) % clusters
    parts = [draw(int(c), samples) for c in cluster]
    split = torch.zeros(num_clients, samples, dtype=torch.int64)
    split[:, train:] = 1
    names = tuple(f"rule {c}" for c in range(clusters))
    return Federation(
        x=torch.stack([x for x, _ in parts]),
        y=torch.stack([y for _, y in parts]),
        split=split,
        tests=tuple(TestSet(*draw(c, 30), names[c]) for c in range(clusters)),
        test_of=cluster,
        ids=torch.arange(num_clients),
        population=num_clients,
        classes=classes,
        truth=Truth(cluster, names, tuple(names[int(c)] for c in cluster)),
        name="tiny",
    )


def tiny_source(samples: int = 240, *, side: int = 6, classes: int = 3, seed: int = 0) -> Source:
    """Make a small dataset of gray images, with a column "writer" of 12 values; the test set is half as large."""
    stream = Rng(seed).generator("testing.source")

    def draw(number: int) -> Samples:
        x = torch.from_numpy(stream.integers(256, size=(number, 1, side, side), dtype=np.uint8))
        y, writer = (torch.from_numpy(stream.permutation(number) % count) for count in (classes, 12))
        return Samples(x, y, {"writer": writer})

    return Source("tiny", draw(samples), draw(samples // 2), classes)


def tiny_settings(**changes: Any) -> Settings:
    """Return settings for a run of about a second: float64, SGD, few rounds."""
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1, momentum=0.5)
    return Settings(**{"rounds": 4, "local": local, "dtype": "float64", **changes})
