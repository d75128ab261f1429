"""Points of a sweep as one table: which value stands where, over which seeds, and with which intervals."""

import pytest

from coterie.errors import DataError
from coterie.papers.compare import to_json
from coterie.results.tables import compute_mean_interval
from coterie.results.varied import find_value, split_setting, tabulate_setting

PATH = "data.shift.0.alpha"
MANY, FEW = {0: [0.5, 0.7], 1: [0.6, 0.8]}, {0: [0.1, 0.3], 1: [0.2, 0.2]}


@pytest.fixture
def write_point(tmp_path, write_run, final_rows, listed):
    """Returns a function that writes a point of a sweep: the accuracy of two clients in each seed, by method."""

    def write(alpha, values):
        for label, seeds in values.items():
            for seed, accuracy in seeds.items():
                folder = tmp_path / f"swept/alpha={alpha}" / label / f"seed-{seed}"
                write_run(
                    folder, kind="dac", label=label, seed=seed, study=f"swept/alpha={alpha}",
                    metrics=final_rows(accuracy, (0, 0)),
                )  # fmt: skip
                with (folder / "config.toml").open("a") as file:
                    file.write(f"[[data.shift]]\nkind = 'dirichlet'\nalpha = {alpha}\n")
                listed(folder)
        return tmp_path / "swept"

    return write


def test_the_values_stand_in_their_order_with_means_and_intervals(write_point):
    """Of A at 0.5 the seeds have 0.6 and 0.7: mean 0.65, and 12.706 standard errors of 0.05 on each side."""
    write_point(10, {"A": FEW, "B": MANY})
    sweep = write_point(0.5, {"A": MANY, "B": FEW})
    found = tabulate_setting([sweep], f"α={PATH}")
    assert [(row["label"], row["cluster"]) for row in found.rows] == [
        ("A", "α = 0.5"), ("B", "α = 0.5"), ("A", "α = 10"), ("B", "α = 10"),
    ]  # fmt: skip
    assert [row["mean"] for row in found.rows] == pytest.approx([0.65, 0.2, 0.2, 0.65])
    low, high = compute_mean_interval(found.rows[0])
    assert (low, high) == pytest.approx((0.65 - 12.706 * 0.05, 0.65 + 12.706 * 0.05), abs=1e-4)
    assert to_json(found)["rows"] == list(found.rows)


def test_pairs_are_of_one_value_and_corrected_for_those_of_all(write_point):
    """One pair at each of two values: Holm doubles the smaller p value."""
    write_point(10, {"A": FEW, "B": MANY})
    found = tabulate_setting([write_point(0.5, {"A": MANY, "B": FEW})], PATH)
    assert [(pair.key, pair.cluster) for pair in found.pairs] == [
        ({"A", "B"}, "alpha = 0.5"),
        ({"A", "B"}, "alpha = 10"),
    ]
    least = min(found.pairs, key=lambda pair: pair.p)
    assert least.p_corrected == pytest.approx(min(1, 2 * least.p))


def test_points_of_a_grid_that_differ_in_another_setting_have_rows_of_their_own(
    tmp_path, write_run, final_rows, listed
):
    """Each of four points stands in the table; a cell is never one of two that differ elsewhere."""
    values = {(0.5, 1): 0.1, (0.5, 2): 0.2, (10, 1): 0.3, (10, 2): 0.4}
    for (alpha, beta), accuracy in values.items():
        point = f"swept/alpha={alpha},beta={beta}"
        folder = tmp_path / point / "A" / "seed-0"
        write_run(
            folder, kind="dac", label="A", seed=0, study=point,
            metrics=final_rows([accuracy, accuracy], (0, 0)),
        )  # fmt: skip
        with (folder / "config.toml").open("a") as file:
            file.write(f"[[data.shift]]\nkind = 'dirichlet'\nalpha = {alpha}\nbeta = {beta}\n")
        listed(folder)
    found = tabulate_setting([tmp_path / "swept"], PATH)
    assert {(row["label"], row["cluster"]): row["mean"] for row in found.rows} == {
        ("A, beta=1", "alpha = 0.5"): pytest.approx(0.1),
        ("A, beta=2", "alpha = 0.5"): pytest.approx(0.2),
        ("A, beta=1", "alpha = 10"): pytest.approx(0.3),
        ("A, beta=2", "alpha = 10"): pytest.approx(0.4),
    }
    # Folders whose names do not tell what differs are refused.
    for place, point in enumerate(sorted((tmp_path / "swept").iterdir())):
        point.rename(point.with_name(f"other{place}"))
        listed(point.with_name(f"other{place}") / "A" / "seed-0")
    (tmp_path / "again").mkdir()
    one, two = sorted((tmp_path / "swept").iterdir())[:2]
    one.rename(tmp_path / "again" / "same")
    two.rename(tmp_path / "swept" / "same")
    with pytest.raises(
        DataError, match=r"have the same methods at the same values of data\.shift\.0"
    ):
        tabulate_setting([tmp_path / "again" / "same", *(tmp_path / "swept").iterdir()], PATH)


def test_a_setting_of_local_training_is_that_of_the_method_where_it_has_its_own():
    config = {"methods": [{"kind": "dac", "lr": 0.1}], "local": {"lr": 0.5, "momentum": 0.9}}
    assert find_value(config, "local.lr") == find_value(config, "lr") == 0.1
    assert find_value(config, "local.momentum") == 0.9


def test_means_are_over_the_seeds_that_all_values_have(write_point):
    write_point(10, {"A": {0: [0.1, 0.3]}})
    found = tabulate_setting([write_point(0.5, {"A": MANY})], "alpha=data.shift.0.alpha")
    assert [(row["mean"], row["seeds"]) for row in found.rows] == [
        (pytest.approx(0.6), 1),
        (pytest.approx(0.2), 1),
    ]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.shift.0.beta", "no finished run here has a setting"),
        ("rounds", "do not vary rounds"),
        ("data.shift.0.alpha,data.train", "a table has one setting in its columns"),
    ],
)
def test_a_setting_that_is_not_there_or_does_not_vary_is_said(
    write_run, tmp_path, final_rows, setting, said
):
    for seed in (0, 1):
        write_run(
            tmp_path / "s/A" / f"seed-{seed}", kind="dac", label="A", seed=seed, study="s",
            metrics=final_rows([0.5], (0,)), rounds=3,
        )  # fmt: skip
    with pytest.raises(DataError, match=said):
        tabulate_setting([tmp_path / "s"], setting)


def test_a_value_need_not_be_a_number_and_a_name_may_be_given():
    config = {
        "data": {"shift": [{"kind": "iid"}]},
        "methods": [{"kind": "dac", "label": "D", "tau": 3}],
    }
    assert find_value(config, "data.shift.0.kind") == "iid"
    assert find_value(config, "tau") == 3
    assert split_setting(" τ = methods.dac.tau ") == ("methods.dac.tau", "τ")
