"""Tiny federations and settings, for runs of about a second."""

from dataclasses import fields
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from coterie.data.federation import Federation, TestSet, Truth
from coterie.data.source import Samples, Source
from coterie.engine.task import EngineOptions, LocalTraining, ModelSpec, Task, Workload
from coterie.models.layout import ModelSource
from coterie.rng import Rng
from coterie.runtime.settings import Settings

Kind = Literal["classes", "labels", "tokens"]


def tiny_federation(
    num_clients: int = 6,
    clusters: int = 2,
    *,
    train: int = 12,
    validation: int = 4,
    features: tuple[int, ...] = (4,),
    classes: int = 3,
    seed: int = 0,
    kind: Kind = "classes",
) -> Federation:
    """Make a small problem with concept shift between clusters.

    Every cluster labels Gaussian inputs by its own random linear rule. Client i is in cluster i
    modulo `clusters`; inputs are float64, so that engines can be compared closely.

    Args:
        num_clients: number of clients.
        clusters: number of clusters.
        train: training samples of a client.
        validation: validation samples of a client.
        features: the shape of an input.
        classes: number of classes, of labels, or of tokens.
        seed: what the data are drawn from.
        kind: "classes": the target is the class with the largest value of the rule; "labels": it is
            1 for each value above 0, and 0 for the others (multi-label); "tokens": inputs are whole
            numbers, and each entry's target is that number moved on by the cluster's step.
    """
    stream = Rng(seed).generator("testing.federation")
    size = int(np.prod(features))
    rules = stream.normal(size=(clusters, size, classes))
    samples = train + validation

    def draw_samples(cluster: int, number: int) -> tuple[Tensor, Tensor]:
        if kind == "tokens":
            tokens = torch.from_numpy(stream.integers(classes, size=(number, *features)))
            return tokens.int(), (tokens + 1 + cluster) % classes
        x = stream.normal(size=(number, size))
        # Linear, so that the model "linear" can learn one cluster's rule, and not two at once.
        values = x @ rules[cluster]
        y = (values > 0).astype(np.float32)
        if kind == "classes":
            y = values.argmax(1)
        return torch.from_numpy(x).reshape(number, *features), torch.from_numpy(y)

    cluster = torch.arange(num_clients) % clusters
    x, y = zip(*[draw_samples(int(c), samples) for c in cluster], strict=True)
    tests = [draw_samples(number, 30) for number in range(clusters)]
    # 0 is training, 1 validation.
    split = torch.zeros(num_clients, samples, dtype=torch.int64)
    split[:, train:] = 1
    names = tuple(f"rule {number}" for number in range(clusters))
    return Federation(
        x=torch.stack(x),
        y=torch.stack(y),
        split=split,
        # One test set for each cluster, which its clients share.
        tests=tuple(TestSet(*test, name) for test, name in zip(tests, names, strict=True)),
        test_of=cluster,
        ids=torch.arange(num_clients),
        population=num_clients,
        # 0 where a target is not one class a sample.
        classes=classes * (kind == "classes"),
        truth=Truth(cluster, names, tuple(names[number] for number in cluster.tolist())),
        name="tiny",
    )


class TinyTokens(nn.Module):
    """A model of tokens: an embedding and a linear layer, with some dependence on the token before.

    Args:
        tokens: how many there are.
    """

    def __init__(self, tokens: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 4)
        self.before = nn.Linear(4, 4, bias=False)
        self.scores = nn.Linear(4, tokens)

    def forward(
        self, tokens: Int[Tensor, "samples positions"]
    ) -> Float[Tensor, "samples positions scores"]:
        """Return the scores of each position's target."""
        seen = self.embedding(tokens)
        # Shifted by one position: a position sees the one before, and the first sees zeros.
        before = functional.pad(seen, (0, 0, 1, 0))[:, :-1]
        return self.scores(torch.tanh(seen + self.before(before)))


def tiny_source(samples: int = 240, *, side: int = 6, classes: int = 3, seed: int = 0) -> Source:
    """Make small gray images with a column "writer" of 12 values; the test set is half as large."""
    stream = Rng(seed).generator("testing.source")

    def draw_samples(number: int) -> Samples:
        x = torch.from_numpy(stream.integers(256, size=(number, 1, side, side), dtype=np.uint8))
        # A permutation modulo the count: balanced classes and writers.
        y = torch.from_numpy(stream.permutation(number) % classes)
        writer = torch.from_numpy(stream.permutation(number) % 12)
        return Samples(x, y, {"writer": writer})

    return Source("tiny", draw_samples(samples), draw_samples(samples // 2), classes)


def tiny_settings(**changes: Any) -> Settings:
    """Return settings for a run of about a second: float64, SGD, few rounds."""
    local = LocalTraining(batch_size=5, optimizer="sgd", lr=0.1, momentum=0.5)
    # float64: results that differ only by the order of sums agree to many digits. Tests of methods
    # need no check of the translation.
    return Settings(**{"rounds": 4, "local": local, "dtype": "float64", "check": False, **changes})


def build_task(
    federation: Federation | None = None, model: ModelSource = "linear", **options: Any
) -> Task:
    """Build a task from one list of options.

    Args:
        federation: the hosted rows; all of a tiny federation when None.
        model: what clients train.
        options: fields of `ModelSpec`, `EngineOptions` and `Workload`, and further arguments of
            `Task.build`, by name.

    Example:
        >>> build_task(engine="loop", init="per_client").engine.name
        'loop'
    """
    if federation is None:
        federation = tiny_federation()
        federation = federation.host(federation.ids)

    def pop_fields(kind: type) -> dict[str, Any]:
        return {item.name: options.pop(item.name) for item in fields(kind) if item.name in options}

    spec = ModelSpec(model, **pop_fields(ModelSpec))
    return Task.build(
        federation,
        spec,
        EngineOptions(**pop_fields(EngineOptions)),
        workload=Workload(**pop_fields(Workload)),
        **options,
    )
