"""Methods of two studies compared with each other: who is paired with whom, by what numbers, and what stands in the way."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.results.across import compare_across, correct_together
from coterie.results.stored_runs import load_runs


@pytest.fixture
def study(tmp_path, write_run, final_rows):
    """Returns a function that writes a study: the accuracy of four clients in each seed, by method."""

    def write(name, values, clusters=(0, 0, 1, 1), names=None, **config):
        for label, seeds in values.items():
            for seed, accuracy in seeds.items():
                folder = tmp_path / name / label / f"seed-{seed}"
                write_run(
                    folder, kind="dac", label=label, seed=seed, study=name,
                    metrics=final_rows(accuracy, clusters), **config,
                )  # fmt: skip
        return name, load_runs([Path(tmp_path, name)])[0]

    return write


ONE = {0: [0.5, 0.6, 0.7, 0.8], 1: [0.4, 0.6, 0.7, 0.9]}
BETTER = {0: [0.6, 0.7, 0.8, 0.9], 1: [0.5, 0.7, 0.9, 0.9]}


def test_a_method_is_paired_with_that_of_its_label_by_seed_and_client(study):
    """Seed 0: 0.1 better for each; seed 1: 0.1, 0.1, 0.2, 0. Means 0.1 and 0.1."""
    a = study("a", {"DAC": ONE, "Local": ONE}, rounds=5)
    b = study("b", {"DAC": BETTER, "Local": ONE, "Mine": BETTER}, rounds=9)
    found = compare_across(a, b)
    assert [pair.key for pair in found.pairs] == [
        {"DAC (rounds=5)", "DAC (rounds=9)"},
        {"Local (rounds=5)", "Local (rounds=9)"},
    ]
    best = found.pairs[0]
    assert best.method_a == "DAC (rounds=9)"
    assert best.difference == pytest.approx(0.1)
    assert (best.seeds, best.clients) == (2, 4)
    assert best.gained == pytest.approx(7 / 8)
    assert found.notes[0] == "a and b: rounds is 5 and 9."


def test_a_setting_that_a_method_has_of_its_own_names_no_study(study):
    """DAC of the second study trained with 0.2, whatever the study's rate for the others."""
    studies = []
    for name, accuracy, rate in (("a", ONE, 0.1), ("b", BETTER, 0.4)):
        runs = study(name, {"DAC": accuracy})[1]
        studies.append([replace(one, config={**one.config, "local": {"lr": rate}}) for one in runs])
    assert compare_across(("a", studies[0]), ("b", studies[1])).pairs[0].method_a == "DAC (lr=0.4)"
    own = []
    for run in studies[1]:
        method = {**run.method_settings, "lr": 0.2}
        own.append(replace(run, config={**run.config, "methods": [method]}))
    found = compare_across(("a", studies[0]), ("b", own))
    assert found.pairs[0].key == {"DAC (a)", "DAC (b)"}
    assert found.notes[:2] == [
        "a and b: local.lr is 0.1 and 0.4.",
        "a and b: DAC: lr is None and 0.2.",
    ]


def test_the_correction_is_for_the_pairs_that_are_shown(study):
    """Three pairs of equal labels are tested, not the fifteen pairs of six methods."""
    noisy = {0: [0.55, 0.66, 0.71, 0.88], 1: [0.41, 0.64, 0.79, 0.9]}
    a = study("a", {"A": ONE, "B": ONE, "C": ONE})
    b = study("b", {"A": noisy, "B": noisy, "C": noisy})
    for pair in compare_across(a, b).pairs:
        assert pair.p_corrected == pytest.approx(min(1, 3 * pair.p))
    (single,) = compare_across(a, b, baseline="B").pairs
    assert single.p_corrected == single.p
    assert single.key == {"B (a)", "B (b)"}


def test_studies_without_a_common_label_are_compared_in_all_pairs(study):
    found = compare_across(study("a", {"A": ONE, "B": ONE}), study("b", {"C": BETTER}))
    assert {pair.key for pair in found.pairs} == {
        frozenset({"A (a)", "C (b)"}),
        frozenset({"B (a)", "C (b)"}),
    }


def test_seeds_that_share_training_data_make_wider_intervals(study):
    """Differences 0.05 and 0.035; a fifth is tested: 1/2 + 1/4 for 1/2, and Student's t of one degree."""
    a = study("a", {"A": ONE})
    b = study("b", {"A": {0: [0.55, 0.66, 0.71, 0.88], 1: [0.41, 0.64, 0.79, 0.9]}})
    (pair,) = compare_across(a, b, share=0.2).pairs
    error = 0.015 / math.sqrt(2) * math.sqrt(1 / 2 + 1 / 4)
    assert pair.high - pair.difference == pytest.approx(math.tan(0.475 * math.pi) * error)
    assert pair.p_corrected == pytest.approx(1 - 2 / math.pi * math.atan(0.0425 / error))


def test_only_common_seeds_count(study):
    a = study("a", {"DAC": {**ONE, 2: [1.0] * 4}})
    b = study("b", {"DAC": {**BETTER, 3: [0.0] * 4}})
    assert compare_across(a, b).pairs[0].seeds == 2


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"values": {7: BETTER[0]}}, "they have no seed in common"),
        ({"clusters": (0, 1, 0, 1)}, "with seed 0 they have other clients, or clients in other"),
        ({"values": {0: BETTER[0][:3], 1: BETTER[1][:3]}}, "with seed 0 they have other clients"),
    ],
)
def test_what_cannot_be_paired_is_said(study, other, why):
    given = dict(other)
    values = {"DAC": given.pop("values", BETTER)}
    found = compare_across(study("a", {"DAC": ONE}), study("b", values, **given))
    assert (found.pairs, found.metric) == ((), None)
    assert found.notes[0].startswith(f"a and b cannot be paired: {why}")


def test_a_cluster_is_compared_alone(study):
    """Clients 2 and 3: 0.1 in seed 0, then 0.2 and 0: 0.1 both times."""
    found = compare_across(study("a", {"DAC": ONE}), study("b", {"DAC": BETTER}), cluster="1")
    (pair,) = found.pairs
    assert pair.difference == pytest.approx(0.1)
    assert pair.clients == 2


def test_which_metrics_are_computed_is_no_difference(study):
    """Both have the accuracy; so the studies are named by the rounds alone, and without them by their names."""
    name, runs = study("a", {"DAC": ONE}, rounds=5, checkpoint_seconds=30)
    more = [replace(run, config={**run.config, "metrics": ["f1"]}) for run in runs]
    b = study("b", {"DAC": BETTER}, rounds=9, checkpoint_seconds=0)
    found = compare_across((name, more), b)
    assert found.notes[0] == "a and b: rounds is 5 and 9."
    assert found.pairs[0].method_a == "DAC (rounds=9)"


def test_three_studies_are_corrected_for_the_pairs_of_all(study):
    """One label in three studies makes three pairs; in the smallest p value none is left out."""
    noisy = {0: [0.55, 0.66, 0.71, 0.88], 1: [0.41, 0.64, 0.79, 0.9]}
    better = {0: [0.6, 0.7, 0.8, 0.9], 1: [0.5, 0.7, 0.9, 0.94]}
    one, two, three = (study(n, {"A": v}) for n, v in (("a", ONE), ("b", noisy), ("c", better)))
    alone = [compare_across(*sides) for sides in ((one, two), (one, three), (two, three))]
    raw = [found.pairs[0].p for found in alone]
    assert [found.pairs[0].p_corrected for found in alone] == raw
    together = correct_together(alone)
    # Holm's rule by hand: times 3, 2 and 1 from the smallest on, and never falling.
    expected, least = {}, 0.0
    for place, value in enumerate(sorted(raw)):
        least = max(least, min(1.0, (3 - place) * value))
        expected[value] = least
    assert [found.pairs[0].p_corrected for found in together] == pytest.approx(
        [expected[value] for value in raw]
    )
    assert [found.studies for found in together] == [("a", "b"), ("a", "c"), ("b", "c")]
    # The verdict speaks of the corrected value: what one pair alone establishes, three do not.
    assert [found.pairs[0].established for found in alone] == [False, True, False]
    assert not any(found.pairs[0].established for found in together)
    assert together[1].verdicts != alone[1].verdicts


def test_other_data_of_the_same_settings_are_said(study):
    """A file or a function of the user's was changed between the two studies."""

    def note(runs, digest):
        return [replace(run, provenance={**run.provenance, "data": digest}) for run in runs]

    a, b = study("a", {"DAC": ONE}), study("b", {"DAC": BETTER})
    line = "a and b: their data differ, though their settings of data do not."
    found = compare_across(("a", note(a[1], "1f")), ("b", note(b[1], "2e")))
    assert found.notes == [line]
    assert len(found.pairs) == 1
    assert compare_across(("a", note(a[1], "1f")), ("b", note(b[1], "1f"))).notes == []
    assert compare_across(("a", note(a[1], "1f")), b).notes == []


def test_an_item_of_a_list_names_the_studies_by_its_own_setting(study):
    """Points of a sweep over the first shift: not the whole list of shifts."""
    points = []
    for name, values, alpha in (("a", ONE, 0.1), ("b", BETTER, 10.0)):
        shift = [{"kind": "dirichlet", "concentration": alpha}, {"kind": "rotation"}]
        own = [replace(r, config={**r.config, "data": {**r.config["data"], "shift": shift}})
               for r in study(name, {"DAC": values})[1]]  # fmt: skip
        points.append((name, own))
    found = compare_across(*points)
    assert found.pairs[0].key == {"DAC (concentration=0.1)", "DAC (concentration=10.0)"}
    assert found.notes[0] == "a and b: data.shift.0.concentration is 0.1 and 10.0."


def test_methods_of_studies_that_are_equal_otherwise_are_named_by_their_own_settings(study):
    """DAC by its tau; the other, which is the same in both, by the studies."""
    sides = []
    for name, values, tau in (("a", ONE, 3.0), ("b", BETTER, 30.0)):
        own = []
        for run in study(name, {"DAC": values, "Local": values})[1]:
            method = {**run.method_settings, **({"tau": tau} if run.label == "DAC" else {})}
            own.append(replace(run, config={**run.config, "methods": [method]}))
        sides.append((name, own))
    found = compare_across(*sides)
    assert [pair.key for pair in found.pairs] == [
        {"DAC (tau=3.0)", "DAC (tau=30.0)"},
        {"Local (a)", "Local (b)"},
    ]
    assert found.notes[0] == "a and b: DAC: tau is 3.0 and 30.0."
