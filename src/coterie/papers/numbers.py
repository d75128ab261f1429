"""The published numbers of the papers, as tables, and their names here.

A study names the experiment that it repeats (`paper = "similarity/synthetic_concept_3c"`), and each
of its methods a row (`paper = "inv_loss/fedavg"`); this module translates the clusters and metrics
of the papers.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import product

from coterie.errors import ConfigError, describe_unknown
from coterie.functional.metrics import REGISTRY

SOURCES: dict[str, str] = {
    "similarity": "Listo Zec, Hagander, Ihre-Thomason, Girdzijauskas 2024, "
    "https://arxiv.org/abs/2409.10720",
    "dac": "Listo Zec, Ekblom, Willbo, Mogren, Girdzijauskas 2022, "
    "https://arxiv.org/abs/2206.08839",
    "panm": "Li et al., PANM, poster; long form https://arxiv.org/abs/2203.12285",
    "fedgwc": "Licciardi, Leo, Fanì, Caputo, Ciccone 2025, https://arxiv.org/abs/2502.03340",
    "sosicfl": "Grinwald, Wiesner, Nakajima, SosicFL (later Floco), version 1, 2024, "
    "https://arxiv.org/abs/2403.03333v1",
}
"""The papers whose numbers are here."""

# The groups of clients of FedGWC's tables: clean, noisy and blurred images, or labels that are
# evenly (hom), unevenly (het) and very unevenly (xhet) spread over clients.
_SHIFTS = ("clean-noise", "clean-blur", "clean-noise-blur", "hom-het", "hom-xhet", "hom-het-xhet")
_NETS = (
    "cifar10-simplecnn",
    "cifar10-squeezenet",
    "tinyimagenet-mobilenet",
    "tinyimagenet-resnet18",
)
_SPLITS = ("2-fold", "5-fold", "dirichlet")
_SERVER_STUDIES = (
    *(f"fedgwc/{data}-{shift}" for data, shift in product(("cifar10", "cifar100"), _SHIFTS)),
    *(
        f"fedgwc/{name}"
        for name in ("cifar100-dirichlet", "emnist-dirichlet", "landmarks", "inaturalist")
    ),
    *(f"sosicfl/{net}-{split}" for net, split in product(_NETS, _SPLITS)),
)

EXPERIMENTS: dict[str, str] = {
    "similarity/synthetic": "similarity/synthetic_concept_3c",
    "similarity/cifar10-label-2": "similarity/cifar10_label_2c",
    "similarity/cifar10-label-5": "similarity/cifar10_label_5c",
    "similarity/fmnist-covariate-4": "similarity/fmnist_covariate_4c",
    "similarity/domain-cnn": "similarity/mnist_fmnist_domain_2c_cnn",
    "similarity/domain-mlp": "similarity/mnist_fmnist_domain_2c_mlp",
    "similarity/cifar100-pretrained": "similarity/cifar100_label_3c_pretrained",
    "dac/cifar10-rotation-4x25": "dac/cifar10_covariate_4x25",
    "dac/cifar10-rotation-70-20-5-5": "dac/cifar10_covariate_70_20_5_5",
    "dac/fmnist-rotation-70-20-5-5": "dac/fmnist_covariate_70_20_5_5",
    "dac/cifar10-label-40-60": "dac/cifar10_label_40_60",
    "panm/cifar10-4": "panm/panm_cifar10_4c",
    "panm/fmnist-4": "panm/panm_fmnist_4c",
    "panm/fmnist-2": "panm/panm_fmnist_2c",
    "panm/low-budget": "panm/panm_low_budget_cifar10_4c",
    # Studies of methods with a server have the names of their experiments.
    **{name: name for name in _SERVER_STUDIES},
    "fedgwc/cifar100-published-labels": "fedgwc/cifar100-dirichlet",
}
"""The published experiment that each built-in study repeats."""

_CLUSTERS: dict[str, str] = {
    "all_clients": "all",
    "mean_over_clusters": "clusters",
    "all_clusters": "clusters",
    "cluster1": "targets 0",
    "cluster2": "targets 1",
    "cluster3": "targets 2",
    # Of CIFAR-10's labels 2 to 7 are the animals; _n60 is the number of clients, as in _n70 below.
    "animals_n60": "labels 2-7",
    "vehicles_n40": "labels 0-1,8-9",
    # Five clusters of two classes each.
    **{f"labels_{a}_{a + 1}": f"labels {a}-{a + 1}" for a in range(0, 10, 2)},
    **{
        f"rot{angle}{clients}": f"rotation {angle}"
        for angle, clients in product((0, 10, 90, 180, 270, 350), ("", "_n70", "_n20", "_n5"))
    },
    "mnist": "mnist",
    "fashion_mnist": "fashion_mnist",
}

ROLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("oracle", ("oracle",)),
    (
        "best adaptive method",
        (
            "inv_loss",
            "inv_l2",
            "cos_grad",
            "cos_weight",
            "dac",
            "dac_var",
            "dac_no_two_hop",
            "panm_loss",
            "panm_grad",
        ),
    ),
    ("random", ("random",)),
    ("local", ("local",)),
)
"""The papers' chain of methods: the oracle, the best that selects peers, random gossip, local."""

_FOLD_OF_TINY_IMAGENET = (
    "The column of local accuracies is an artifact of how the public code divides TinyImageNet: "
    "the last class gets "
    "all 100 samples of the even part, so that 20 points plus 0.8 of the global accuracy are "
    "local accuracy.",
)
_DOMAINS = (
    "Neither the strength of the noise nor that of the blur is printed; those of the study are "
    "ours.",
)

PRINTED_AGAIN: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "fedgwc": (
        ("table 5", "cifar100-dirichlet", "fedgwc/fedavg", "53.4"),
        ("table 5", "emnist-dirichlet", "fedgwc/fedavg", "76.0"),
        ("table 5", "landmarks", "fedgwc/fedavg", "57.4"),
        ("table 5", "inaturalist", "fedgwc/fedavg", "47.8"),
        ("table 8", "cifar100-dirichlet", "ifca_c5/fedavg", "47.5"),
        ("table 8", "cifar100-dirichlet", "fesem_c5/fedavg", "53.4"),
        ("table 8", "emnist-dirichlet", "ifca_c5/fedavg", "76.7"),
        ("table 8", "emnist-dirichlet", "fesem_c2/fedavg", "75.6"),
        ("table 9", "cifar100-dirichlet", "fedavg/fedavg", "41.6"),
        ("table 9", "cifar100-dirichlet", "fedgwc/fedavg", "53.4"),
        ("table 9", "cifar100-dirichlet", "fedavgm/fedavgm", "41.5"),
        ("table 9", "cifar100-dirichlet", "fedprox/fedprox", "41.8"),
        ("table 9", "emnist-dirichlet", "fedavg/fedavg", "76.0"),
        ("table 9", "emnist-dirichlet", "fedgwc/fedavg", "76.1"),
        ("table 9", "emnist-dirichlet", "fedavgm/fedavgm", "83.3"),
        ("table 9", "emnist-dirichlet", "fedprox/fedprox", "75.9"),
    )
}
"""Accuracies that a paper prints a second time, of one method on the same data.

An entry has the place, the experiment, the row and the number in percent. The tables hold what was
printed first, so that a result is counted and judged once."""

_NOTES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [name for name in _SERVER_STUDIES if "tinyimagenet" in name and name.endswith("-fold")],
        _FOLD_OF_TINY_IMAGENET,
    ),
    # A later entry of the same experiment replaces these, and has to repeat them.
    **dict.fromkeys([name for name in _SERVER_STUDIES if "-clean-" in name], _DOMAINS),
    "sosicfl/cifar10-squeezenet-5-fold": (
        "FedProx, 29.81 globally, is far from FedAvg's 53.78: an outlier.",
    ),
    "fedgwc/cifar100-dirichlet": (
        "FedGWC has 4 clusters with 10 clients of each in a round: four times FedAvg's "
        "participation.",
        "FeSEM with 5 clusters reaches the 53.4 of FedGWC.",
    ),
    "fedgwc/emnist-dirichlet": (
        "FedAvg is 76.6 in table 1 and 76.0 in table 9; FedGWC with beta 0.5 is 76.1 and, in "
        "table 5, 76.0.",
        "The data are EMNIST's 47 classes, divided by a Dirichlet distribution; the paper calls "
        "them FEMNIST.",
    ),
    "fedgwc/cifar10-clean-noise": (
        *_DOMAINS,
        "FeSEM's Rand index, 0.49 ± 0.2, cannot be: two clusters of two groups of 50 have 0.4949 "
        "at least.",
    ),
    "similarity/synthetic_concept_3c": (
        "Random, 1494.84 ± 1973: the coefficients are drawn again for every seed; an order of "
        "magnitude only.",
    ),
    "similarity/fmnist_covariate_4c": (
        "Random, ± 0.12: the runs behind the table have 0.22.",
        "FedSim weighs by the sampling probability, so inverse loss and cosines depend on tau "
        "there.",
    ),
    "dac/cifar10_covariate_70_20_5_5": (
        "The printed deviations of DAC, DAC-var and PENS include the mean as a fifth value; the "
        "deviations over the "
        "four clusters are 2.60, 2.84 and 6.67.",
        "Random: 54.12 in the table, 54.17 in the text; Oracle: 46.79 in the table, 46.83 from "
        "its own clusters.",
    ),
    "dac/cifar10_label_40_60": (
        "The rows of the table lost their names in the available text; PENS and Oracle are "
        "certain, the others are in "
        "the order of the paper's other tables.",
        "The published Oracle row cannot come from the published code, whose index for this "
        "shift is wrong.",
    ),
    "panm/panm_low_budget_cifar10_4c": (
        "The bandwidth of PANMLoss with k = 2 is printed as 0.6; 0.06 is meant.",
        "The costs of PANM count 2l models in a round that corrects the bag, those it scores; so "
        "counted they are "
        "1118 and 1397 here, too. The neighbors that such a round averages with and has not "
        "scored are 33 and 50 more "
        "(bags of the 24 others of a cluster).",
        "PANMGrad reads an update with each model that it scores, 758 and 857 in a run: in "
        "neither number.",
        "The bandwidth of PANM is that of stage one, (l + k) / n; a round that corrects the bag "
        "reads more.",
    ),
}


@dataclass(frozen=True)
class PublishedNumber:
    """One number of a paper.

    Args:
        row: "method/aggregation" as in the paper.
        cluster: its cluster by the name used here; "all" is the mean over clients, "clusters" that
            over clusters.
        metric: its name in `metrics.REGISTRY` (accuracies are from 0 to 1), or another of the
            paper.
        mean: the number.
        std: its standard deviation over runs; None when not given.
    """

    row: str
    cluster: str
    metric: str
    mean: float
    std: float | None


@lru_cache
def load_table(source: str) -> tuple[dict[str, str], ...]:
    """Return all numbers of a paper as printed.

    Args:
        source: a name of SOURCES.

    Returns:
        Rows with experiment, method, aggregation, cluster, metric, mean, std ("" where not given).

    Raises:
        ConfigError: for another name.
    """
    # Checked first: a name could otherwise lead to any file next to the tables.
    if source not in SOURCES:
        raise ConfigError(describe_unknown("paper", source, SOURCES))
    # The tables are package data, which may lie in an archive and have no path. A tuple, since all
    # callers share the cached one.
    with (resources.files("coterie.papers") / f"{source}.csv").open(encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


@lru_cache
def load_published(experiment: str) -> tuple[PublishedNumber, ...]:
    """Return the numbers of an experiment in the names and units used here.

    Args:
        experiment: "paper/experiment", such as "dac/cifar10_label_40_60".

    Raises:
        ConfigError: for an unknown one.

    Example:
        >>> published = load_published("similarity/synthetic_concept_3c")
        >>> [(p.mean, p.std) for p in published if p.row == "oracle/fedavg"][0]
        (9.43, 0.33)
    """
    source, _, name = experiment.partition("/")
    # The tables have the experiment without its paper.
    rows = [row for row in load_table(source) if row["experiment"] == name]
    if not rows:
        known = {f"{source}/{row['experiment']}" for row in load_table(source)}
        raise ConfigError(describe_unknown("published experiment", experiment, known))
    return tuple(map(_translate_row, rows))


def find_notes(experiment: str) -> Sequence[str]:
    """Return notes on the published numbers of an experiment."""
    return _NOTES.get(experiment, ())


def _translate_row(row: Mapping[str, str]) -> PublishedNumber:
    # Some tables say "test_accuracy"; numbers are as printed, so that percentages are divided by
    # the scale of the metric.
    metric = row["metric"].removeprefix("test_")
    unit = REGISTRY[metric].scale
    # An empty cell: the paper prints no deviation.
    std = float(row["std"]) / unit if row["std"] else None
    key = f"{row['method']}/{row['aggregation']}"
    return PublishedNumber(key, _CLUSTERS[row["cluster"]], metric, float(row["mean"]) / unit, std)
