"""coterie/papers/partitions.py: label counts as authors published them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.data.source import Samples
from coterie.errors import ConfigError
from coterie.papers import partitions
from coterie.studies.config import load_study

LABELS = torch.from_numpy(np.random.default_rng(1).permutation(np.repeat(np.arange(100), 500)))
CIFAR100 = Samples(torch.zeros(50_000, 1), LABELS)


def draw(seed, samples=CIFAR100, clients=100):
    return partitions.draw_fedgwc_cifar100(samples, clients, np.random.default_rng(seed))


def test_the_counts_are_what_the_specification_says_of_the_authors_file():
    """5.1 classes a client, 2 to 13, the largest with 72 % on average; all of CIFAR-100 is given away."""
    owners = draw(0)
    counts = np.zeros((100, 100), int)
    np.add.at(counts, (owners, LABELS.numpy()), 1)
    assert (counts.sum(1) == 500).all()
    assert (counts.sum(0) == 500).all()
    classes = (counts > 0).sum(1)
    assert (round(classes.mean(), 1), classes.min(), classes.max()) == (5.1, 2, 13)
    assert round((counts.max(1) / 500).mean(), 2) == 0.72


def test_which_samples_a_client_gets_is_drawn_and_how_many_is_not():
    first, again, other = draw(0), draw(0), draw(1)
    assert (first == again).all()
    assert (first != other).mean() > 0.2
    for client in (0, 57, 99):
        own = [np.bincount(LABELS.numpy()[one == client], minlength=100) for one in (first, other)]
        assert (own[0] == own[1]).all()


def test_another_number_of_clients_or_another_dataset_is_refused():
    with pytest.raises(ConfigError, match="num_clients is 50; the published partition has 100"):
        draw(0, clients=50)
    small = replace(CIFAR100, x=CIFAR100.x[:9], y=torch.arange(9))
    with pytest.raises(ConfigError, match=r"has 9 classes; .* of CIFAR-100, which has 100"):
        draw(0, samples=small)


def test_a_part_of_the_dataset_is_divided_in_the_same_shares():
    half = torch.cat([torch.nonzero(label == LABELS)[:250, 0] for label in range(100)])
    part = replace(CIFAR100, x=CIFAR100.x[half], y=LABELS[half])
    owners = draw(0, samples=part)
    for client in (0, 57, 99):
        full = np.bincount(LABELS.numpy()[draw(0) == client], minlength=100)
        own = np.bincount(LABELS.numpy()[half][owners == client], minlength=100)
        assert np.abs(own - full / 2).max() < 1


def test_the_study_is_that_of_the_paper_but_for_its_partition():
    ours = load_study("fedgwc/cifar100-published-labels")
    drawn = load_study("fedgwc/cifar100-dirichlet")
    assert ours.paper == drawn.paper == "fedgwc/cifar100-dirichlet"
    assert ours.methods == drawn.methods
    assert replace(ours.data, shift=drawn.data.shift) == drawn.data
