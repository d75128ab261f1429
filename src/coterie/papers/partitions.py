"""Partitions with label counts that authors published.

The counts are data of the package; which samples of a class a client gets is drawn.
"""

import json
from functools import cache
from importlib import resources

import numpy as np
from jaxtyping import Int

from coterie.data.source import Samples
from coterie.errors import ConfigError


def draw_fedgwc_cifar100(
    samples: Samples, num_clients: int, generator: np.random.Generator
) -> Int[np.ndarray, " samples"]:
    """Return the client of each sample of CIFAR-100, with FedGWC's published label counts.

    The file `dataset_alpha_0.50.json` of the authors' code divides all 50,000 samples: 500 for each
    of 100 clients, of 2 to 13 classes. Licciardi et al. 2025, https://arxiv.org/abs/2502.03340.

    Args:
        samples: the training set; a part of it is divided in the same shares, rounded.
        num_clients: 100.
        generator: draws which samples of a class a client gets.

    Raises:
        ConfigError: for another number of clients, or of classes.
    """
    counts = load_label_counts("cifar100-dirichlet")
    if num_clients != len(counts):
        raise ConfigError(
            f"num_clients is {num_clients}; the published partition has {len(counts)} clients"
        )
    labels = np.asarray(samples.y)
    classes = len(np.unique(labels))
    if classes != counts.shape[1]:
        raise ConfigError(
            f"the dataset has {classes} classes; the published partition is of CIFAR-100, which has "
            f"{counts.shape[1]}"
        )
    owners = np.empty(len(labels), dtype=np.int64)
    for label in range(classes):
        rows = generator.permutation(np.flatnonzero(labels == label))
        # Whole numbers: with all of CIFAR-100 the parts are the published counts.
        ends = counts[:, label].cumsum() * len(rows) // counts[:, label].sum()
        owners[rows] = np.repeat(np.arange(num_clients), np.diff(ends, prepend=0))
    return owners


@cache
def load_label_counts(name: str) -> Int[np.ndarray, "clients classes"]:
    """Return the samples that each client of a published partition has of each class.

    Args:
        name: an entry of fedgwc_labels.json.
    """
    path = resources.files("coterie.papers") / "fedgwc_labels.json"
    clients = json.loads(path.read_text(encoding="utf-8"))[name]
    counts = np.zeros((len(clients), 1 + max(int(label) for one in clients for label in one)), int)
    for row, own in enumerate(clients):
        for label, number in own.items():
            counts[row, int(label)] = number
    return counts
