"""The published numbers as they are kept in the package."""

import pytest

from coterie.errors import ConfigError
from coterie.papers import numbers


@pytest.mark.parametrize(
    ("source", "rows"),
    [("similarity", 271), ("dac", 107), ("panm", 49), ("fedgwc", 175), ("sosicfl", 144)],
)
def test_every_number_is_there_once(source, rows):
    table = numbers.load_table(source)
    assert len(table) == rows
    assert (
        len(
            {
                (r["experiment"], r["method"], r["aggregation"], r["cluster"], r["metric"])
                for r in table
            }
        )
        == rows
    )


def test_what_is_printed_twice_is_there_once():
    """The papers print 762 numbers; FedGWC's tables 5, 8 and 9 repeat 4, 4 and 8 of them, two with another value."""
    again = [(source, *one) for source, lines in numbers.PRINTED_AGAIN.items() for one in lines]
    assert sum(len(numbers.load_table(source)) for source in numbers.SOURCES) + len(again) == 762
    assert len({one[:4] for one in again}) == 16
    other = []
    for source, where, name, row, mean in again:
        found = [
            p.mean
            for p in numbers.load_published(f"{source}/{name}")
            if p.row == row and "accuracy" in p.metric
        ]
        assert len(found) == 1, row
        if found[0] != pytest.approx(float(mean) / 100):
            other.append((where, name, row))
    assert other == [
        ("table 5", "emnist-dirichlet", "fedgwc/fedavg"),
        ("table 9", "emnist-dirichlet", "fedavg/fedavg"),
    ]
    assert all(
        word in " ".join(numbers.find_notes("fedgwc/emnist-dirichlet"))
        for word in ("76.6", "76.1", "76.0")
    )


def test_accuracies_are_shares_and_errors_stay_as_they_are():
    found = {
        (p.row, p.cluster): p for p in numbers.load_published("similarity/synthetic_concept_3c")
    }
    assert found["inv_loss/fedavg", "all"].mean == 31.69
    assert found["inv_loss/fedavg", "targets 1"].mean == 30.40
    assert found["inv_loss/fedavg", "targets 1"].std is None
    shares = {
        (p.row, p.cluster): p
        for p in numbers.load_published("similarity/mnist_fmnist_domain_2c_cnn")
    }
    assert shares["cos_grad/fedavg", "all"].mean == pytest.approx(0.9114)
    assert shares["cos_grad/fedavg", "all"].std == pytest.approx(0.0017)
    assert shares["oracle/fedavg", "mnist"].mean == pytest.approx(0.9768)


def test_only_accuracies_of_the_server_papers_are_turned_into_shares():
    five = {
        (p.row, p.metric): p.mean
        for p in numbers.load_published("sosicfl/cifar10-simplecnn-5-fold")
    }
    table = {
        (r["experiment"], r["method"], r["metric"]): r["mean"]
        for r in numbers.load_table("sosicfl")
    }
    printed = table["cifar10-simplecnn-5-fold", "sosicfl", "accuracy_max"]
    assert five["sosicfl/fedavg", "accuracy_max"] == pytest.approx(float(printed) / 100)
    ratio = table["cifar10-simplecnn-5-fold", "sosicfl", "tta_ratio"]
    assert five["sosicfl/fedavg", "tta_ratio"] == float(ratio)
    noise = {
        (p.row, p.metric): p.mean for p in numbers.load_published("fedgwc/cifar10-clean-noise")
    }
    assert noise["fedgwc/fedavg", "rand"] == 1.0
    assert noise["fedgwc/fedavg", "n_clusters"] == 2
    hundred = {
        (p.row, p.metric): p.mean for p in numbers.load_published("fedgwc/cifar100-dirichlet")
    }
    assert hundred["fedgwc/fedavg", "balanced_accuracy"] == pytest.approx(0.534)
    assert hundred["ifca_c5/fedavg", "was"] == -0.8


def test_the_mean_of_clusters_weighted_by_clients_is_the_printed_mean():
    """Translating cluster names wrongly would break the means of the paper's own tables."""
    sizes = {"rotation 0": 70, "rotation 180": 20, "rotation 10": 5, "rotation 350": 5}
    found = {
        (p.row, p.cluster): p.mean for p in numbers.load_published("similarity/fmnist_covariate_4c")
    }
    rows = {row for row, _ in found}
    assert len(rows) == 11
    for row in rows:
        mean = sum(n * found[row, cluster] for cluster, n in sizes.items()) / 100
        assert found[row, "all"] == pytest.approx(mean, abs=2e-4), row


def test_the_synthetic_table_has_eleven_rows():
    published = numbers.load_published("similarity/synthetic_concept_3c")
    assert len({one.row for one in published}) == 11


def test_every_experiment_of_a_study_is_known_and_can_be_read():
    for experiment in numbers.EXPERIMENTS.values():
        assert numbers.load_published(experiment)
    every = {
        f"{source}/{name}"
        for source in numbers.SOURCES
        for name in {r["experiment"] for r in numbers.load_table(source)}
    }
    assert every == set(numbers.EXPERIMENTS.values())


def test_an_unknown_experiment_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'dac/cifar10_label_40_60'"):
        numbers.load_published("dac/cifar10_label_4060")
    with pytest.raises(ConfigError, match="unknown paper 'simlarity'; did you mean 'similarity'"):
        numbers.load_published("simlarity/x")


def test_notes_belong_to_experiments():
    assert numbers.find_notes("dac/cifar10_label_40_60")
    assert numbers.find_notes("dac/cifar10_covariate_4x25") == ()
