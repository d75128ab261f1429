"""Gains over training alone, by hand on small stored runs."""

import math

import numpy as np
import pytest

from coterie.results import gains


def test_gain_is_paired_by_client_and_seed(small):
    """Seed 0: gains .2 .1 .3 -.1 (mean .125, one of four lost); seed 1: .2 .2 .2 0 (mean .15, none lost)."""
    result = gains.compute_study_gains(small)
    assert (result["baseline"], result["metric"]) == ("Local", "accuracy")
    (dac,) = result["rows"]
    assert dac["label"] == "DAC"
    assert dac["mean"] == pytest.approx(0.1375)
    assert dac["worst_tenth"] == pytest.approx((-0.1 + 0.0) / 2)
    assert dac["lost"] == pytest.approx(0.125)
    # Student's t for one degree of freedom
    half = 12.7062047 * math.sqrt(2) * 0.0125 / math.sqrt(2)
    assert (dac["mean_low"], dac["mean_high"]) == pytest.approx((0.1375 - half, 0.1375 + half))


def test_the_worst_of_clients_who_neither_gain_nor_lose_is_no_established_loss(
    tmp_path, write_run, final_rows
):
    """The worst of ten is below 0 in every seed, its interval too; nothing is said to be established."""
    rng = np.random.default_rng(0)
    for seed in range(12):
        for label, values in (
            ("Local", np.full(10, 0.5)),
            ("DAC", 0.5 + 0.05 * rng.standard_normal(10)),
        ):
            folder = tmp_path / "s" / label / f"seed-{seed}"
            rows = final_rows(list(values), [0] * 10)
            write_run(folder, kind=label.lower(), label=label, seed=seed, metrics=rows)
    (dac,) = gains.compute_study_gains(tmp_path / "s")["rows"]
    assert dac["worst_tenth_high"] < 0
    assert not dac["mean_established"]
    assert "worst_tenth_established" not in dac


def test_gain_of_a_loss_is_turned_round(tmp_path, write_run, final_rows):
    """For regression less is better: from 3 to 1 is a gain of 2."""
    for label, kind, loss in (("L", "local", 3.0), ("D", "dac", 1.0)):
        rows = final_rows([loss, loss], [0, 0], metric="loss")
        write_run(tmp_path / "s" / label / "seed-0", kind=kind, label=label, seed=0, metrics=rows)
    (gain,) = gains.compute_study_gains(tmp_path / "s")["rows"]
    assert (gain["mean"], gain["lost"], gain["mean_low"]) == (2.0, 0.0, None)


@pytest.mark.parametrize(
    ("clients", "expected"),
    [(1, 0.0), (10, 0.0), (11, 0.5), (15, 0.5), (20, 0.5), (21, 1.0), (25, 1.0)],
)
def test_worst_tenth_is_at_least_one_client_and_rounded_up(clients, expected):
    """Of clients that gained 0, 1, 2, ...: of 10 the first, of 11 to 20 the first two, of 21 to 30 the first three."""
    values = np.random.default_rng(0).permutation(clients).astype(float)
    assert gains._reduce_gains(values)["worst_tenth"] == expected


def test_a_study_without_local_has_no_gains(tmp_path, write_run, final_rows):
    """Nothing to compare with is said, not invented."""
    write_run(
        tmp_path / "s" / "A" / "seed-0",
        kind="dac",
        label="A",
        seed=0,
        metrics=final_rows([0.2], [0]),
    )
    assert gains.compute_study_gains(tmp_path / "s") == {
        "baseline": None, "metric": "accuracy", "confidence": 0.95, "rows": []
    }  # fmt: skip


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gains_with_a_diverged_client_are_not_known(bad):
    """Sorted, it would be among those that gained most, and it would not have lost."""
    assert all(math.isnan(v) for v in gains._reduce_gains(np.array([0.1, bad, -0.2])).values())
